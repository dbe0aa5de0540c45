// parallel_copy.h: the copies of a push, from rows of tensors to rows of parameters. They are
// collected and then run together, in tasks of about 2^17 elements (16 MiB at most, but 16 rows at
// least) that threads take from a shared counter: many small tensors wake the threads once, and a
// thread that is scheduled late delays at most one task.
//
// On a GPU the device's pack op copies the tasks (gpu/staging.c). Called only by the thread that
// owns the store (sync.h).
#pragma once

#include "base/status.h"
#include "gpu/gpu.h"
#include "weights/sync.h"

typedef struct rm_copy_task {
  rm_pack_args args; // inputs, and results after the copy, with indices relative to args.index0
  const rm_entry *entry; // view
  rm_param_rows piece;
  int64_t twin; // the tied parameter to compare with; −1: write
  int counted; // this rank counts it in the mesh's digest
  int ordinal; // CUDA device whose memory holds args.src; −1: the host
} rm_copy_task;

typedef struct rm_copy_tasks {
  rm_copy_task *list; // owned; in the order added, rows ascending
  int64_t n, capacity;
  int64_t done; // the first `done` tasks have been copied
} rm_copy_tasks;

// Cuts `whole` into tasks that share no tile of the destination, and adds them.
rm_code rm_copy_tasks_add(rm_copy_tasks *tasks, const rm_copy_task *whole, rm_error *err);
// Copies the next tasks, of `most` bytes or a little more, and waits. RM_E_DEVICE, RM_E_MEMORY,
// RM_E_CAPACITY: on a device only; the destination is undefined then.
rm_code rm_copy_tasks_run(rm_copy_tasks *tasks, int64_t most, rm_staging *staging,
                          const rm_ctx *ctx, rm_error *err);
void rm_copy_tasks_free(rm_copy_tasks *tasks);
