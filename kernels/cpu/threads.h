// threads.h: divides the work of an op among the threads of its ctx.
#pragma once

#include <stdatomic.h>

#include "kernels.h"

// Runs fn on the team if the work is large enough, else on the calling thread. cost: in clock
// cycles, roughly.
enum { RM_COST_OF_A_TEAM = 20000 };

static inline void rm_parallel(const rm_ctx *ctx, int64_t cost, rm_task_fn fn, void *arg) {
  if (ctx->run && ctx->n_threads > 1 && cost > RM_COST_OF_A_TEAM) ctx->run(ctx->team, fn, arg);
  else fn(arg, 0, 1);
}

// Units of an op that threads take dynamically, large parts first and small ones at the end, so
// that one slow thread does not delay the others for long.
typedef struct rm_work {
  _Atomic int64_t next;
  int64_t n, least; // number of units; the fewest units of a part
} rm_work;

// Takes the next part [from, to). Returns 0 if all are taken.
static inline int rm_take(rm_work *work, int n_threads, int64_t *from, int64_t *to) {
  int64_t at = atomic_load_explicit(&work->next, memory_order_relaxed);
  do {
    if (at >= work->n) return 0;
    const int64_t part = n_threads == 1 ? work->n : (work->n - at) / (2 * n_threads);
    *to = rm_min64(work->n, at + rm_max64(part, work->least));
  } while (!atomic_compare_exchange_weak_explicit(&work->next, &at, *to, memory_order_relaxed,
                                                  memory_order_relaxed));
  *from = at;
  return 1;
}

// Finds the runs of adjacent rows of one sequence, each of at most `most` rows. runs[0 … n] ← their
// first rows, then `rows`. Returns their number n.
static inline int64_t rm_find_runs(const int32_t *seq_of_row, int64_t rows, int64_t most,
                                   int32_t *runs) {
  int64_t n = 0;
  for (int64_t r = 0; r < rows; r++)
    if (r == 0 || seq_of_row[r] != seq_of_row[r - 1] || r - runs[n - 1] == most)
      runs[n++] = (int32_t)r;
  runs[n] = (int32_t)rows;
  return n;
}
// Floats for `runs`; an int32 is as large as a float.
static inline int64_t rm_runs_floats(int64_t rows) { return rm_round_up(rows + 1, RM_LANES); }

// Rows that each thread takes an equal run of. fn computes one row.
typedef void (*rm_row_fn)(const void *args, int thread, int64_t row);
typedef struct rm_rows {
  rm_row_fn fn;
  const void *args;
  int64_t n;
} rm_rows;

static inline void rm_rows_task(void *arg, int thread, int n_threads) {
  const rm_rows *rows = arg;
  for (int64_t r = rows->n * thread / n_threads; r < rows->n * (thread + 1) / n_threads; r++)
    rows->fn(rows->args, thread, r);
}
static inline void rm_each_row(const rm_ctx *ctx, int64_t n, int64_t cost, rm_row_fn fn,
                               const void *args) {
  rm_parallel(ctx, cost, rm_rows_task, &(rm_rows){fn, args, n});
}

// Defines the op `name`, whose rows are independent. `compute` computes row `r` of the arguments
// `a`.
#define RM_ROW_OP(symbol, name, cost, compute) \
  static void name##_row_of(const void *args, int, int64_t r) { \
    const rm_##name##_args *a = args; \
    compute; \
  } \
  void symbol(const rm_ctx *ctx, const rm_##name##_args *a) { \
    rm_each_row(ctx, a->rows, cost, name##_row_of, a); \
  }
