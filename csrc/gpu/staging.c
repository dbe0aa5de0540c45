// staging.c: the device's part of a push; see gpu.h.
#include <string.h>

#include "base/fields.h"
#include "gpu/gpu.h"

enum {
  N_HALVES = 2,
  SERIAL_ELEMENTS = 1 << 16, // fewer are copied by the caller alone: waking threads costs more
};

size_t rm_staging_bytes(const rm_staging *staging) {
  return staging->device->on_host
             ? 0
             : N_HALVES * staging->half_bytes + RM_STAGED_COPIES * sizeof(rm_pack_found);
}

rm_code rm_staging_open(rm_staging *staging, rm_error *err) {
  if (staging->halves.device) return RM_OK;
  rm_code code = rm_mirrored_create(staging->device, N_HALVES * staging->half_bytes,
                                    "the staging buffer", &staging->halves, err);
  if (!code)
    code = rm_mirrored_create(staging->device, RM_STAGED_COPIES * sizeof(rm_pack_found),
                              "the results of packing", &staging->found, err);
  if (code) rm_staging_free(staging);
  return code;
}

void rm_staging_free(rm_staging *staging) {
  rm_mirrored_destroy(&staging->halves);
  rm_mirrored_destroy(&staging->found);
  staging->used = 0;
}

typedef struct loading {
  const rm_pack_args *args;
  char *to;
} loading;

static void load_rows(void *arg, int thread, int n_threads) {
  const loading *job = arg;
  const rm_pack_args *args = job->args;
  const size_t elem = rm_src_bytes(args->src_dtype), row = (size_t)args->cols * elem;
  const int64_t each = (args->rows + n_threads - 1) / n_threads, first = each * thread,
                end = rm_min64(first + each, args->rows);
  for (int64_t r = first; r < end; r++) {
    const char *from = (const char *)args->src + r * args->row_stride * (int64_t)elem;
    char *to = job->to + (size_t)r * row;
    if (args->col_stride == 1) memcpy(to, from, row);
    else
      for (int64_t c = 0; c < args->cols; c++)
        memcpy(to + (size_t)c * elem, from + c * args->col_stride * (int64_t)elem, elem);
  }
}

// Reserves `bytes` in the current half. When it is full, switches to the other half and waits until
// the device has read that half.
static rm_code reserve(rm_staging *staging, size_t bytes, char **here, rm_error *err) {
  const rm_device *device = staging->device;
  if (staging->used + bytes > staging->half_bytes) {
    device->record_event(device->self, RM_EVENT_STAGING + staging->half);
    staging->half = !staging->half;
    staging->used = 0;
    const rm_code code = rm_device_check(
        device, device->wait_event(device->self, RM_EVENT_STAGING + staging->half), err);
    if (code) return code;
  }
  *here = staging->halves.host + (size_t)staging->half * staging->half_bytes + staging->used;
  staging->used += (size_t)rm_round_up((int64_t)bytes, RM_FIELD_ALIGN);
  return RM_OK;
}

// Copies a source row by row into the staging buffer, and from there to the device.
static rm_code stage_from_host(rm_staging *staging, rm_pack_args *args, size_t bytes,
                               const rm_ctx *ctx, rm_error *err) {
  char *here;
  const rm_code code = reserve(staging, bytes, &here, err);
  if (code) return code;
  loading job = {args, here};
  if (ctx->n_threads > 1 && args->rows * args->cols >= SERIAL_ELEMENTS)
    ctx->run(ctx->team, load_rows, &job);
  else load_rows(&job, 0, 1);
  rm_mirrored_copy_to_device(&staging->halves, here, bytes);
  args->src = rm_mirrored_on_device(&staging->halves, here);
  args->row_stride = args->cols;
  args->col_stride = 1;
  return RM_OK;
}

// Copies a source from another GPU. Contiguous rows (or columns) are copied by one pitched copy. In
// any other layout the whole byte range that the source spans is copied and keeps its strides.
static rm_code stage_from_gpu(rm_staging *staging, const rm_staged_tensor *tensor,
                              rm_pack_args *args, size_t bytes, rm_error *err) {
  const rm_device *device = staging->device;
  const int64_t elem = (int64_t)rm_src_bytes(args->src_dtype),
                down = (args->rows - 1) * args->row_stride,
                right = (args->cols - 1) * args->col_stride;
  const int64_t low = rm_min64(down, 0) + rm_min64(right, 0),
                span = (rm_max64(down, 0) + rm_max64(right, 0) - low + 1) * elem;
  const int by_rows = args->col_stride == 1;
  int64_t *stride = by_rows ? &args->row_stride : &args->col_stride; // from run to run
  const int64_t run = by_rows ? args->cols : args->rows;
  const int has_runs = (by_rows || args->row_stride == 1) && *stride >= run;
  char *here;
  if (!has_runs && span > (int64_t)staging->half_bytes)
    return rm_fail(
        err, RM_E_LAYOUT,
        "%.*s: strides [%lld, %lld] spread %lld elements on cuda:%d over %lld bytes; send "
        ".contiguous()",
        (int)tensor->length, tensor->name, (long long)args->row_stride, (long long)args->col_stride,
        (long long)(args->rows * args->cols), tensor->ordinal, (long long)span);
  const size_t width = (size_t)(has_runs ? run * elem : span), n = has_runs ? bytes / width : 1,
               pitch = has_runs ? (size_t)(*stride * elem) : width;
  const rm_code code = reserve(staging, n * width, &here, err);
  if (code) return code;
  char *there = rm_mirrored_on_device(&staging->halves, here);
  device->copy_2d_from_peer(device->self, there, width,
                            (const char *)args->src + (has_runs ? 0 : low * elem), tensor->ordinal,
                            pitch, width, n);
  args->src = has_runs ? there : there - low * elem;
  if (has_runs) *stride = run;
  return RM_OK;
}

static rm_code stage(rm_staging *staging, const rm_staged_tensor *tensor, rm_pack_args *args,
                     const rm_ctx *ctx, rm_error *err) {
  const size_t bytes = (size_t)(args->rows * args->cols) * rm_src_bytes(args->src_dtype);
  if (bytes > staging->half_bytes)
    return rm_fail(err, RM_E_LIMIT, "rows of %lld elements are too long", (long long)args->cols);
  return tensor->ordinal < 0 ? stage_from_host(staging, args, bytes, ctx, err)
                             : stage_from_gpu(staging, tensor, args, bytes, err);
}

rm_code rm_staging_pack(rm_staging *staging, int64_t i, const rm_pack_args *args,
                        const rm_staged_tensor *from, const rm_ctx *ctx, rm_error *err) {
  const rm_device *device = staging->device;
  rm_pack_args own = *args;
  own.found = rm_mirrored_on_device(&staging->found, (rm_pack_found *)staging->found.host + i);
  const rm_code code =
      from->ordinal == device->ordinal ? RM_OK : stage(staging, from, &own, ctx, err);
  if (!code) device->kernels->pack(ctx, &own);
  return code;
}

rm_code rm_staging_finish(rm_staging *staging, int64_t n, const rm_pack_found **found,
                          rm_error *err) {
  *found = (const rm_pack_found *)staging->found.host;
  rm_mirrored_copy_to_host(&staging->found, staging->found.host, (size_t)n * sizeof **found);
  staging->used = 0;
  return rm_device_wait(staging->device, err);
}
