// parallel_copy.c: see parallel_copy.h. Which thread makes which unit does not matter: a digest is a sum, and every unit has results of its own.
#include "weights/parallel_copy.h"

#include <stdatomic.h>
#include <string.h>

#include "base/fields.h"
#include "weights/check.h"

enum {
  UNIT_ELEMENTS = 1 << 17, // some 20 µs of memory
  MAX_UNITS = 64, // of one copy
  SERIAL_ELEMENTS = 1 << 16, // below this waking threads costs more than it saves
  UNIT_BYTES = 16 << 20, // at most, but for 16 rows
  FERRY_UNITS = 4096, // units that a device is given before it is waited for
  N_HALVES = 2,
};

static rm_code make_room(rm_units *units, int64_t n, rm_error *err) {
  if (units->n + n <= units->capacity) return RM_OK;
  const int64_t capacity = rm_max64(2 * units->capacity, units->n + n);
  rm_unit *list = rm_realloc(units->list, (size_t)capacity, sizeof *list);
  if (!list) return rm_fail(err, RM_E_MEMORY, "no memory for a list of %lld copies", (long long)capacity);
  units->list = list;
  units->capacity = capacity;
  return RM_OK;
}

// Rows [begin, begin + n) of it.
static rm_unit cut(const rm_unit *whole, int64_t begin, int64_t n) {
  rm_unit unit = *whole;
  unit.args.src = (const char *)whole->args.src + begin * whole->args.row_stride * (int64_t)rm_src_bytes(whole->args.src_dtype);
  unit.args.rows = n;
  unit.args.dst_row0 += begin;
  unit.args.index0 += begin * whole->args.cols;
  return unit;
}

rm_code rm_units_add(rm_units *units, const rm_unit *whole, rm_error *err) {
  const rm_pack_args *args = &whole->args;
  const int64_t at_least = rm_max64(UNIT_ELEMENTS / args->cols, args->rows / MAX_UNITS + 1);
  const int64_t fitting = UNIT_BYTES / (args->cols * (int64_t)rm_src_bytes(args->src_dtype)) / RM_N_TILE * RM_N_TILE;
  const int64_t tile = args->layout == RM_PLAIN ? 1 : RM_N_TILE;
  const int64_t rows = rm_min64(rm_round_up(at_least, RM_N_TILE), rm_max64(fitting, RM_N_TILE));
  const rm_code code = make_room(units, args->rows / rows + 2, err);
  if (code) return code;
  for (int64_t begin = 0, n; begin < args->rows; begin += n) {
    n = rm_min64(rows - (args->dst_row0 + begin) % tile, args->rows - begin); // a unit ends where a tile ends
    units->list[units->n++] = cut(whole, begin, n);
  }
  return RM_OK;
}

typedef struct making {
  const rm_units *units;
  const rm_kernels *kernels;
  _Atomic int64_t next;
} making;

static void make_some(void *arg, int thread, int n_threads) {
  making *work = arg;
  const rm_ctx alone = {.n_threads = 1};
  (void)thread, (void)n_threads;
  for (int64_t i; (i = atomic_fetch_add(&work->next, 1)) < work->units->n;) work->kernels->pack(&alone, &work->units->list[i].args);
}

static void make_here(const rm_units *units, const rm_kernels *kernels, const rm_ctx *ctx) {
  making work = {.units = units, .kernels = kernels};
  int64_t elements = 0;
  for (int64_t i = 0; i < units->n && elements < SERIAL_ELEMENTS; i++) elements += units->list[i].args.rows * units->list[i].args.cols;
  if (ctx->n_threads > 1 && elements >= SERIAL_ELEMENTS) ctx->run(ctx->team, make_some, &work);
  else make_some(&work, 0, 1);
}

// ------------------------------------------------------------------------------------------------ on a device
size_t rm_ferry_bytes(const rm_ferry *ferry) {
  return ferry->device->on_host ? 0 : N_HALVES * ferry->half_bytes + FERRY_UNITS * sizeof(rm_pack_found);
}

static rm_code ferry_open(rm_ferry *ferry, rm_error *err) {
  if (ferry->halves.device) return RM_OK;
  rm_code code = rm_mirror_create(ferry->device, N_HALVES * ferry->half_bytes, "tensors on their way", &ferry->halves, err);
  if (!code) code = rm_mirror_create(ferry->device, FERRY_UNITS * sizeof(rm_pack_found), "what was found in them", &ferry->found, err);
  if (code) rm_ferry_free(ferry);
  return code;
}

void rm_ferry_free(rm_ferry *ferry) {
  rm_mirror_destroy(&ferry->halves);
  rm_mirror_destroy(&ferry->found);
  ferry->used = 0;
}

typedef struct loading {
  const rm_pack_args *args;
  char *to;
} loading;

static void load_rows(void *arg, int thread, int n_threads) {
  const loading *job = arg;
  const rm_pack_args *args = job->args;
  const size_t elem = rm_src_bytes(args->src_dtype), row = (size_t)args->cols * elem;
  const int64_t each = (args->rows + n_threads - 1) / n_threads, first = each * thread, end = rm_min64(first + each, args->rows);
  for (int64_t r = first; r < end; r++) {
    const char *from = (const char *)args->src + r * args->row_stride * (int64_t)elem;
    char *to = job->to + (size_t)r * row;
    if (args->col_stride == 1) memcpy(to, from, row);
    else
      for (int64_t c = 0; c < args->cols; c++) memcpy(to + (size_t)c * elem, from + c * args->col_stride * (int64_t)elem, elem);
  }
}

// The next `bytes` of the half that is being filled, as the host has them.
static rm_code take_room(rm_ferry *ferry, size_t bytes, char **here, rm_error *err) {
  const rm_device *device = ferry->device;
  if (ferry->used + bytes > ferry->half_bytes) {
    device->mark(device->self, RM_MARK_FERRY + ferry->half);
    ferry->half = !ferry->half;
    ferry->used = 0;
    const rm_code code = rm_device_check(device, device->reach(device->self, RM_MARK_FERRY + ferry->half), err);
    if (code) return code;
  }
  *here = ferry->halves.here + (size_t)ferry->half * ferry->half_bytes + ferry->used;
  ferry->used += (size_t)rm_round_up((int64_t)bytes, RM_FIELD_ALIGN);
  return RM_OK;
}

// The unit's source, row after row, to where the device can read it.
static rm_code load(rm_ferry *ferry, rm_pack_args *args, size_t bytes, const rm_ctx *ctx, rm_error *err) {
  char *here;
  const rm_code code = take_room(ferry, bytes, &here, err);
  if (code) return code;
  loading job = {args, here};
  if (ctx->n_threads > 1 && args->rows * args->cols >= SERIAL_ELEMENTS) ctx->run(ctx->team, load_rows, &job);
  else load_rows(&job, 0, 1);
  rm_mirror_put(&ferry->halves, here, bytes);
  args->src = rm_mirror_there(&ferry->halves, here);
  args->row_stride = args->cols;
  args->col_stride = 1;
  return RM_OK;
}

// The unit's source from another device: run after run of what lies together along a row or a column, as one copy with a pitch. Of a
// matrix without such runs, or whose elements lie close, all bytes from its first in memory to its last come, strides as they are.
static rm_code fetch(rm_ferry *ferry, const rm_unit *unit, rm_pack_args *args, size_t bytes, rm_error *err) {
  const rm_device *device = ferry->device;
  const int64_t elem = (int64_t)rm_src_bytes(args->src_dtype), down = (args->rows - 1) * args->row_stride;
  const int64_t right = (args->cols - 1) * args->col_stride, low = rm_min64(down, 0) + rm_min64(right, 0);
  const int64_t span = (rm_max64(down, 0) + rm_max64(right, 0) - low + 1) * elem, half = (int64_t)ferry->half_bytes;
  const int by_rows = args->col_stride == 1;
  int64_t *stride = by_rows ? &args->row_stride : &args->col_stride; // from run to run
  const int64_t n = by_rows ? args->rows : args->cols, run = by_rows ? args->cols : args->rows;
  const int has_runs = by_rows || args->row_stride == 1, ascend = *stride >= run;
  const int is_whole = span <= (has_runs && ascend ? rm_min64(half, 2 * (int64_t)bytes) : half);
  const char *from = args->src;
  char *here;
  if (!is_whole && !has_runs)
    return rm_fail(err, RM_E_LAYOUT, "%.*s: strides [%lld, %lld] spread %lld elements on cuda:%d over %lld bytes; send .contiguous()",
                   (int)unit->entry->length, unit->entry->name, (long long)args->row_stride, (long long)args->col_stride,
                   (long long)(args->rows * args->cols), unit->ordinal, (long long)span);
  const rm_code code = take_room(ferry, is_whole ? (size_t)span : bytes, &here, err);
  if (code) return code;
  char *there = rm_mirror_there(&ferry->halves, here);
  args->src = is_whole ? there - low * elem : there;
  const size_t width = (size_t)(is_whole ? span : run * elem), pitch = is_whole ? width : (size_t)(*stride * elem);
  device->fetch(device->self, there, width, from + (is_whole ? low * elem : 0), unit->ordinal, pitch, width, is_whole ? 1 : (size_t)n);
  if (!is_whole) *stride = run;
  return RM_OK;
}

static rm_code bring(rm_ferry *ferry, const rm_unit *unit, rm_pack_args *args, const rm_ctx *ctx, rm_error *err) {
  const size_t bytes = (size_t)(args->rows * args->cols) * rm_src_bytes(args->src_dtype);
  if (bytes > ferry->half_bytes) return rm_fail(err, RM_E_LIMIT, "rows of %lld elements are too long", (long long)args->cols);
  return unit->ordinal < 0 ? load(ferry, args, bytes, ctx, err) : fetch(ferry, unit, args, bytes, err);
}

// Units [first, first + n), and what was found in them.
static rm_code make_there(const rm_units *units, int64_t first, int64_t n, rm_ferry *ferry, const rm_ctx *ctx, rm_error *err) {
  const rm_device *device = ferry->device;
  rm_pack_found *found = (rm_pack_found *)ferry->found.here;
  rm_code code = RM_OK;
  for (int64_t i = 0; i < n && !code; i++) {
    const rm_unit *unit = &units->list[first + i];
    rm_pack_args args = unit->args;
    args.found = rm_mirror_there(&ferry->found, found + i);
    if (unit->ordinal != device->ordinal) code = bring(ferry, unit, &args, ctx, err);
    if (!code) device->kernels->pack(ctx, &args);
  }
  rm_mirror_get(&ferry->found, found, (size_t)n * sizeof *found);
  const rm_code waited = rm_device_wait(device, code ? NULL : err);
  ferry->used = 0;
  for (int64_t i = 0; i < n && !code && !waited; i++) {
    rm_pack_args *args = &units->list[first + i].args;
    args->digest = found[i].digest;
    args->nonfinite_index = found[i].nonfinite_index;
    args->diff_index = found[i].diff_index;
  }
  return code ? code : waited;
}

rm_code rm_units_make(const rm_units *units, rm_ferry *ferry, const rm_ctx *ctx, rm_error *err) {
  if (ferry->device->on_host) {
    make_here(units, ferry->device->kernels, ctx);
    return RM_OK;
  }
  rm_code code = ferry_open(ferry, err);
  for (int64_t i = 0; i < units->n && !code; i += FERRY_UNITS)
    code = make_there(units, i, rm_min64(units->n - i, FERRY_UNITS), ferry, ctx, err);
  return code;
}

void rm_units_free(rm_units *units) {
  rm_free(units->list);
  *units = (rm_units){0};
}

typedef struct block_job {
  char *to;
  const char *from;
  size_t bytes;
} block_job;

static void copy_some(void *arg, int thread, int n_threads) {
  const block_job *job = arg;
  const size_t part = (job->bytes / (size_t)n_threads + 63) / 64 * 64, start = part * (size_t)thread;
  if (start >= job->bytes) return;
  memcpy(job->to + start, job->from + start, part < job->bytes - start ? part : job->bytes - start);
}

void rm_copy_block(char *to, const char *from, size_t bytes, const rm_ctx *ctx) {
  block_job job = {to, from, bytes};
  ctx->run(ctx->team, copy_some, &job);
}
