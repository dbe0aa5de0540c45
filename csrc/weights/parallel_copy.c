// parallel_copy.c: see parallel_copy.h. Any thread can copy any task: a digest is a sum, and each
// task has its own results.
#include "weights/parallel_copy.h"

#include <stdatomic.h>
#include <string.h>

#include "base/fields.h"
#include "weights/check.h"

enum {
  TASK_ELEMENTS = 1 << 17, // about 20 µs of copying
  MAX_TASKS = 64, // per copy
  SERIAL_ELEMENTS = 1 << 16, // fewer are copied by the caller alone: waking threads costs more
  TASK_BYTES = 16 << 20, // the largest task, except that a task has at least 16 rows
  STAGED_TASKS = 4096, // tasks enqueued between two waits for the device
  N_HALVES = 2,
};

static rm_code grow(rm_copy_tasks *tasks, int64_t n, rm_error *err) {
  if (tasks->n + n <= tasks->capacity) return RM_OK;
  const int64_t capacity = rm_max64(2 * tasks->capacity, tasks->n + n);
  rm_copy_task *list = rm_realloc(tasks->list, (size_t)capacity, sizeof *list);
  if (!list)
    return rm_fail(err, RM_E_MEMORY, "no memory for a list of %lld copies", (long long)capacity);
  tasks->list = list;
  tasks->capacity = capacity;
  return RM_OK;
}

// Returns a task for rows [begin, begin + n) of `whole`.
static rm_copy_task cut(const rm_copy_task *whole, int64_t begin, int64_t n) {
  rm_copy_task task = *whole;
  task.args.src = (const char *)whole->args.src +
                  begin * whole->args.row_stride * (int64_t)rm_src_bytes(whole->args.src_dtype);
  task.args.rows = n;
  task.args.dst_row0 += begin;
  task.args.index0 += begin * whole->args.cols;
  return task;
}

rm_code rm_copy_tasks_add(rm_copy_tasks *tasks, const rm_copy_task *whole, rm_error *err) {
  const rm_pack_args *args = &whole->args;
  const int64_t at_least = rm_max64(TASK_ELEMENTS / args->cols, args->rows / MAX_TASKS + 1);
  const int64_t fitting =
      TASK_BYTES / (args->cols * (int64_t)rm_src_bytes(args->src_dtype)) / RM_N_TILE * RM_N_TILE;
  const int64_t tile = args->layout == RM_PLAIN ? 1 : RM_N_TILE;
  const int64_t rows = rm_min64(rm_round_up(at_least, RM_N_TILE), rm_max64(fitting, RM_N_TILE));
  const rm_code code = grow(tasks, args->rows / rows + 2, err);
  if (code) return code;
  for (int64_t begin = 0, n; begin < args->rows; begin += n) {
    // A task ends at a tile boundary.
    n = rm_min64(rows - (args->dst_row0 + begin) % tile, args->rows - begin);
    tasks->list[tasks->n++] = cut(whole, begin, n);
  }
  return RM_OK;
}

typedef struct host_run {
  const rm_copy_tasks *tasks;
  const rm_kernels *kernels;
  _Atomic int64_t next;
} host_run;

static void pack_tasks(void *arg, int thread, int n_threads) {
  host_run *work = arg;
  const rm_ctx alone = {.n_threads = 1};
  (void)thread, (void)n_threads;
  for (int64_t i; (i = atomic_fetch_add(&work->next, 1)) < work->tasks->n;)
    work->kernels->pack(&alone, &work->tasks->list[i].args);
}

static void run_on_host(const rm_copy_tasks *tasks, const rm_kernels *kernels, const rm_ctx *ctx) {
  host_run work = {.tasks = tasks, .kernels = kernels};
  int64_t elements = 0;
  for (int64_t i = 0; i < tasks->n && elements < SERIAL_ELEMENTS; i++)
    elements += tasks->list[i].args.rows * tasks->list[i].args.cols;
  if (ctx->n_threads > 1 && elements >= SERIAL_ELEMENTS) ctx->run(ctx->team, pack_tasks, &work);
  else pack_tasks(&work, 0, 1);
}

// ------------------------------------------------------------------------------------ on a device
size_t rm_staging_bytes(const rm_staging *staging) {
  return staging->device->on_host
             ? 0
             : N_HALVES * staging->half_bytes + STAGED_TASKS * sizeof(rm_pack_found);
}

static rm_code staging_open(rm_staging *staging, rm_error *err) {
  if (staging->halves.device) return RM_OK;
  rm_code code = rm_mirrored_create(staging->device, N_HALVES * staging->half_bytes,
                                    "the staging buffer", &staging->halves, err);
  if (!code)
    code = rm_mirrored_create(staging->device, STAGED_TASKS * sizeof(rm_pack_found),
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

// Copies the task's source row by row into the staging buffer, and from there to the device.
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

// Copies the task's source from another GPU. Contiguous rows (or columns) are copied by one pitched
// copy. If neither rows nor columns are contiguous, or if the source is nearly dense, the whole
// byte range that it spans is copied and keeps its strides.
static rm_code stage_from_gpu(rm_staging *staging, const rm_copy_task *task, rm_pack_args *args,
                              size_t bytes, rm_error *err) {
  const rm_device *device = staging->device;
  const int64_t elem = (int64_t)rm_src_bytes(args->src_dtype),
                down = (args->rows - 1) * args->row_stride;
  const int64_t right = (args->cols - 1) * args->col_stride,
                low = rm_min64(down, 0) + rm_min64(right, 0);
  const int64_t span = (rm_max64(down, 0) + rm_max64(right, 0) - low + 1) * elem,
                half = (int64_t)staging->half_bytes;
  const int by_rows = args->col_stride == 1;
  int64_t *stride = by_rows ? &args->row_stride : &args->col_stride; // from run to run
  const int64_t n = by_rows ? args->rows : args->cols, run = by_rows ? args->cols : args->rows;
  const int has_runs = by_rows || args->row_stride == 1, ascend = *stride >= run;
  const int is_whole = span <= (has_runs && ascend ? rm_min64(half, 2 * (int64_t)bytes) : half);
  const char *from = args->src;
  char *here;
  if (!is_whole && !has_runs)
    return rm_fail(
        err, RM_E_LAYOUT,
        "%.*s: strides [%lld, %lld] spread %lld elements on cuda:%d over %lld bytes; send "
        ".contiguous()",
        (int)task->entry->length, task->entry->name, (long long)args->row_stride,
        (long long)args->col_stride, (long long)(args->rows * args->cols), task->ordinal,
        (long long)span);
  const rm_code code = reserve(staging, is_whole ? (size_t)span : bytes, &here, err);
  if (code) return code;
  char *there = rm_mirrored_on_device(&staging->halves, here);
  args->src = is_whole ? there - low * elem : there;
  const size_t width = (size_t)(is_whole ? span : run * elem),
               pitch = is_whole ? width : (size_t)(*stride * elem);
  device->copy_2d_from_peer(device->self, there, width, from + (is_whole ? low * elem : 0),
                            task->ordinal, pitch, width, is_whole ? 1 : (size_t)n);
  if (!is_whole) *stride = run;
  return RM_OK;
}

static rm_code stage(rm_staging *staging, const rm_copy_task *task, rm_pack_args *args,
                     const rm_ctx *ctx, rm_error *err) {
  const size_t bytes = (size_t)(args->rows * args->cols) * rm_src_bytes(args->src_dtype);
  if (bytes > staging->half_bytes)
    return rm_fail(err, RM_E_LIMIT, "rows of %lld elements are too long", (long long)args->cols);
  return task->ordinal < 0 ? stage_from_host(staging, args, bytes, ctx, err)
                           : stage_from_gpu(staging, task, args, bytes, err);
}

// Copies tasks [first, first + n) on the device and gets their results.
static rm_code run_on_device(const rm_copy_tasks *tasks, int64_t first, int64_t n,
                             rm_staging *staging, const rm_ctx *ctx, rm_error *err) {
  const rm_device *device = staging->device;
  rm_pack_found *found = (rm_pack_found *)staging->found.host;
  rm_code code = RM_OK;
  for (int64_t i = 0; i < n && !code; i++) {
    const rm_copy_task *task = &tasks->list[first + i];
    rm_pack_args args = task->args;
    args.found = rm_mirrored_on_device(&staging->found, found + i);
    if (task->ordinal != device->ordinal) code = stage(staging, task, &args, ctx, err);
    if (!code) device->kernels->pack(ctx, &args);
  }
  rm_mirrored_copy_to_host(&staging->found, found, (size_t)n * sizeof *found);
  const rm_code waited = rm_device_wait(device, code ? NULL : err);
  staging->used = 0;
  for (int64_t i = 0; i < n && !code && !waited; i++) {
    rm_pack_args *args = &tasks->list[first + i].args;
    args->digest = found[i].digest;
    args->nonfinite_index = found[i].nonfinite_index;
    args->diff_index = found[i].diff_index;
  }
  return code ? code : waited;
}

rm_code rm_copy_tasks_run(const rm_copy_tasks *tasks, rm_staging *staging, const rm_ctx *ctx,
                          rm_error *err) {
  if (staging->device->on_host) {
    run_on_host(tasks, staging->device->kernels, ctx);
    return RM_OK;
  }
  rm_code code = staging_open(staging, err);
  for (int64_t i = 0; i < tasks->n && !code; i += STAGED_TASKS)
    code = run_on_device(tasks, i, rm_min64(tasks->n - i, STAGED_TASKS), staging, ctx, err);
  return code;
}

void rm_copy_tasks_free(rm_copy_tasks *tasks) {
  rm_free(tasks->list);
  *tasks = (rm_copy_tasks){0};
}
