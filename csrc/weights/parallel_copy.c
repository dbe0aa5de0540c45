// parallel_copy.c: see parallel_copy.h. Any thread can copy any task: a digest is a sum, and each
// task has its own results.
#include "weights/parallel_copy.h"

#include <stdatomic.h>
#include <string.h>

#include "base/memory.h"

enum {
  TASK_ELEMENTS = 1 << 17, // about 20 µs of copying
  MAX_TASKS = 64, // per copy
  SERIAL_ELEMENTS = 1 << 16, // fewer are copied by the caller alone: waking threads costs more
  TASK_BYTES = 16 << 20, // the largest task, except that a task has at least 16 rows
};

static rm_code grow(rm_copy_tasks *tasks, int64_t n, rm_error *err) {
  if (tasks->n + n <= tasks->capacity) return RM_OK;
  const int64_t capacity = rm_max64(2 * tasks->capacity, tasks->n + n);
  rm_copy_task *list = rm_realloc(tasks->list, (size_t)capacity, sizeof *list);
  if (!list) return rm_no_memory(err, "a list of copies", (size_t)capacity * sizeof *list);
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
  // On the CPU threads share small tasks. On a GPU each task is a launch, so tasks are large.
  const int64_t at_least = whole->ordinal < 0
                               ? rm_max64(TASK_ELEMENTS / args->cols, args->rows / MAX_TASKS + 1)
                               : args->rows;
  const int64_t fitting =
      TASK_BYTES / (args->cols * (int64_t)rm_src_bytes(args->src_dtype)) / RM_N_TILE * RM_N_TILE;
  const int64_t tile = args->layout == RM_PLAIN ? 1 : RM_N_TILE;
  const int64_t rows = rm_min64(rm_round_up(at_least, RM_N_TILE), rm_max64(fitting, RM_N_TILE));
  RM_TRY(grow(tasks, args->rows / rows + 2, err));
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
  int64_t end;
  _Atomic int64_t next;
} host_run;

static void pack_tasks(void *arg, int thread, int n_threads) {
  host_run *work = arg;
  const rm_ctx alone = {.n_threads = 1};
  (void)thread, (void)n_threads;
  for (int64_t i; (i = atomic_fetch_add(&work->next, 1)) < work->end;)
    work->kernels->pack(&alone, &work->tasks->list[i].args);
}

// Copies tasks [tasks->done, end).
static void run_on_host(const rm_copy_tasks *tasks, int64_t end, const rm_kernels *kernels,
                        const rm_ctx *ctx) {
  host_run work = {.tasks = tasks, .kernels = kernels, .end = end, .next = tasks->done};
  int64_t elements = 0;
  for (int64_t i = tasks->done; i < end && elements < SERIAL_ELEMENTS; i++)
    elements += tasks->list[i].args.rows * tasks->list[i].args.cols;
  if (ctx->n_threads > 1 && elements >= SERIAL_ELEMENTS) ctx->run(ctx->team, pack_tasks, &work);
  else pack_tasks(&work, 0, 1);
}

// ------------------------------------------------------------------------------------ on a device
// Copies tasks [first, first + n) on the device and gets their results.
static rm_code run_on_device(const rm_copy_tasks *tasks, int64_t first, int64_t n,
                             rm_staging *staging, const rm_ctx *ctx, rm_error *err) {
  const rm_pack_found *found;
  rm_code code = RM_OK;
  for (int64_t i = 0; i < n && !code; i++) {
    const rm_copy_task *task = &tasks->list[first + i];
    const rm_staged_tensor from = {task->entry->name, task->entry->length, task->ordinal};
    code = rm_staging_pack(staging, i, &task->args, &from, ctx, err);
  }
  const rm_code waited = rm_staging_finish(staging, n, &found, code ? NULL : err);
  for (int64_t i = 0; i < n && !code && !waited; i++) {
    rm_pack_args *args = &tasks->list[first + i].args;
    args->digest = found[i].digest;
    args->nonfinite_index = found[i].nonfinite_index;
    args->diff_index = found[i].diff_index;
  }
  return code ? code : waited;
}

rm_code rm_copy_tasks_run(rm_copy_tasks *tasks, int64_t most, rm_staging *staging,
                          const rm_ctx *ctx, rm_error *err) {
  int64_t end = tasks->done;
  for (int64_t bytes = 0; end < tasks->n && bytes < most; end++) {
    const rm_pack_args *args = &tasks->list[end].args;
    bytes += args->rows * args->cols * (int64_t)rm_src_bytes(args->src_dtype);
  }
  rm_code code = RM_OK;
  if (staging->device->on_host) run_on_host(tasks, end, staging->device->kernels, ctx);
  else code = rm_staging_open(staging, err);
  for (int64_t i = tasks->done; !staging->device->on_host && i < end && !code;
       i += RM_STAGED_COPIES)
    code = run_on_device(tasks, i, rm_min64(end - i, RM_STAGED_COPIES), staging, ctx, err);
  tasks->done = end;
  return code;
}

void rm_copy_tasks_free(rm_copy_tasks *tasks) {
  rm_free(tasks->list);
  *tasks = (rm_copy_tasks){0};
}
