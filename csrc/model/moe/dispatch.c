// dispatch.c: see dispatch.h. Rows arrive ordered by rank, then expert; grouped gemms need them by
// expert, so they are reordered once, and the outputs once more. Writing directly to the final
// position was rejected: it needs a transport with remote addresses. The order of rows within an
// expert changes no bit.
//
// Results of the two moves are views until the next call on the dispatch; they may be written to,
// and what out returned may be passed to back.
#include <string.h>

#include "comm/block.h"
#include "model/moe/moe.h"

// --------------------------------------------------------------------------------------- creation
static rm_code create_buffers(rm_dispatch *d, int64_t max_rows, rm_error *err) {
  const size_t ranks = (size_t)d->n_ranks, choices = (size_t)(max_rows * d->top_k),
               row = d->row_bytes, arrive = (size_t)d->max_arrive;
  const size_t all = d->sees_all ? ranks * (size_t)max_rows : 0;
  const rm_field fields[] = {
      RM_FIELD(d->cursor, d->n_experts),
      RM_FIELD(d->home_rows, ranks),
      RM_FIELD(d->starts, ranks * (size_t)(d->n_experts + 1)),
      RM_FIELD(d->place, choices),
      RM_FIELD(d->group_rows, d->here.n + 1),
      RM_FIELD_ROWS(d->all_ids, all, d->top_k),
      {&d->choices, choices, row},
      {&d->arrived, arrive, row},
      {&d->work, arrive, row},
      {&d->all_rows, all, row},
  };
  const size_t n = sizeof fields / sizeof *fields;
  d->block_bytes = rm_fields_bytes(fields, n);
  d->block = d->block_bytes ? rm_map(d->block_bytes) : NULL;
  if (!d->block) return rm_no_memory(err, "rows between ranks", d->block_bytes);
  rm_fields_place(fields, n, d->block);
  return RM_OK;
}

rm_code rm_dispatch_create(const rm_moe *moe, int64_t max_rows, rm_dispatch *out, rm_error *err) {
  rm_comm *ep = moe->rank->ep;
  const int n_ranks = rm_comm_size(ep), me = rm_comm_rank(ep);
  const int64_t top_k = moe->spec->top_k;
  RM_FAIL_IF(max_rows * top_k * n_ranks > INT32_MAX, RM_E_LIMIT,
             "max_rows: expected at most %d choices in all, got max_rows=%ld on %d ranks "
             "with top_k=%ld",
             INT32_MAX, max_rows, n_ranks, top_k);
  *out = (rm_dispatch){.ep = ep,
                       .n_ranks = n_ranks,
                       .me = me,
                       .n_experts = moe->spec->n_experts,
                       .top_k = top_k,
                       .max_arrive = max_rows * n_ranks * rm_min64(top_k, moe->experts[me].n),
                       .row_bytes = rm_moe_row_bytes(moe),
                       .experts = moe->experts,
                       .here = moe->experts[me],
                       .sees_all = moe->rank->dispatcher == RM_DISPATCH_ALLGATHER_REDUCESCATTER};
  return create_buffers(out, max_rows, err);
}

// ------------------------------------------------------------------------------------------ plans
static int32_t *starts_of(const rm_dispatch *d, int rank) {
  return d->starts + rank * (d->n_experts + 1);
}

// Rows of rank r for the experts of rank s.
static int64_t rows_for(const rm_dispatch *d, int r, int s) {
  const int32_t *starts = starts_of(d, r) + d->experts[s].first;
  return starts[d->experts[s].n] - starts[0];
}

// This rank's part of the plan: the number of rows for each expert, and the place of each choice.
static void sort_choices(rm_dispatch *d, const int32_t *ids) {
  int32_t *starts = starts_of(d, d->me);
  memset(starts, 0, (size_t)(d->n_experts + 1) * sizeof *starts);
  for (int64_t i = 0; i < d->n_choices; i++) starts[ids[i] + 1]++;
  for (int64_t e = 0; e < d->n_experts; e++) starts[e + 1] += starts[e];
  memcpy(d->cursor, starts, (size_t)d->n_experts * sizeof *starts);
  for (int64_t i = 0; i < d->n_choices; i++) d->place[i] = d->cursor[ids[i]]++;
}

// ids: [n_rows][top_k], distinct within a row.
static rm_code plan(rm_dispatch *d, const int32_t *ids, int64_t n_rows, rm_error *err) {
  const size_t bytes = (size_t)(d->n_experts + 1) * sizeof *d->starts;
  d->ids = ids;
  d->n_choices = n_rows * d->top_k;
  sort_choices(d, ids);
  RM_TRY(rm_comm_all_gather(d->ep, starts_of(d, d->me), d->starts, bytes, err));
  int32_t *group_rows = d->group_rows;
  group_rows[0] = 0;
  for (int64_t e = 0; e < d->here.n; e++) {
    group_rows[e + 1] = group_rows[e];
    for (int r = 0; r < d->n_ranks; r++) {
      const int32_t *starts = starts_of(d, r) + d->here.first + e;
      group_rows[e + 1] += starts[1] - starts[0];
    }
  }
  d->n_arrive = group_rows[d->here.n];
  return RM_OK;
}

// ------------------------------------------------------------------------------- copies in memory
enum { SHARED_BYTES = 1 << 16 }; // fewer are copied by the caller alone

typedef struct copy_job {
  const rm_dispatch *d;
  const char *from;
  char *to;
  int back; // reorder from by-expert to by-rank
} copy_job;

static void run(const rm_ctx *ctx, rm_task_fn task, int64_t rows, copy_job *job) {
  if (ctx->run && (size_t)rows * job->d->row_bytes > SHARED_BYTES) ctx->run(ctx->team, task, job);
  else task(job, 0, 1);
}

// Copies each home row to the place of each of its choices.
static void spread_task(void *arg, int thread, int n_threads) {
  const copy_job *job = arg;
  const size_t bytes = job->d->row_bytes;
  const int64_t top_k = job->d->top_k, n = job->d->n_choices / top_k;
  for (int64_t i = n * thread / n_threads * top_k; i < n * (thread + 1) / n_threads * top_k; i++)
    rm_copy(job->to + (size_t)job->d->place[i] * bytes, job->from + (size_t)(i / top_k) * bytes,
            bytes);
}

static void reorder_task(void *arg, int thread, int n_threads) {
  const copy_job *job = arg;
  const rm_dispatch *d = job->d;
  const rm_range here = d->here;
  for (int64_t e = thread; e < here.n; e += n_threads) {
    int64_t by_expert = d->group_rows[e], rank = 0;
    for (int r = 0; r < d->n_ranks; r++) {
      const int32_t *starts = starts_of(d, r) + here.first;
      const int64_t n = starts[e + 1] - starts[e], by_rank = rank + starts[e] - starts[0];
      const int64_t from = job->back ? by_expert : by_rank, to = job->back ? by_rank : by_expert;
      rm_copy(job->to + (size_t)to * d->row_bytes, job->from + (size_t)from * d->row_bytes,
              (size_t)n * d->row_bytes);
      by_expert += n;
      rank += rows_for(d, r, d->me);
    }
  }
}

// ------------------------------------------------------------------------------------------ moves
// Exchanges between `choices` on the home ranks, by expert, and `arrived` on the experts' ranks, by
// rank.
static rm_code exchange(rm_dispatch *d, rm_comm_op op, rm_error *err) {
  const int32_t *starts = starts_of(d, d->me);
  const size_t bytes = d->row_bytes;
  char *at = d->arrived;
  rm_block *send = rm_comm_blocks(d->ep), *recv = send + d->n_ranks;
  for (int r = 0; r < d->n_ranks; r++) {
    const rm_block here = {at, rows_for(d, r, d->me), bytes, bytes};
    const rm_block home = {d->choices + (size_t)starts[d->experts[r].first] * bytes,
                           rows_for(d, d->me, r), bytes, bytes};
    send[r] = op == RM_COMM_COMBINE ? here : home;
    recv[r] = op == RM_COMM_COMBINE ? home : here;
    at += rm_block_bytes(&here);
  }
  return rm_comm_exchange(d->ep, op, send, recv, err);
}

// Gathers all rows and picks those of this rank's experts: by rank, then row, as reorder_task
// orders them.
static rm_code gather_rows(rm_dispatch *d, const char *x, rm_error *err) {
  int64_t n = 0;
  for (int r = 0; r < d->n_ranks; r++)
    n += d->home_rows[r] = starts_of(d, r)[d->n_experts] / d->top_k;
  RM_TRY(rm_comm_gather_rows(d->ep, x, d->all_rows, d->home_rows, d->row_bytes, err));
  RM_TRY(rm_comm_gather_rows(d->ep, d->ids, d->all_ids, d->home_rows,
                             (size_t)d->top_k * sizeof *d->all_ids, err));
  memcpy(d->cursor, d->group_rows, (size_t)d->here.n * sizeof *d->cursor);
  for (int64_t i = 0; i < n * d->top_k; i++) {
    const int64_t e = d->all_ids[i] - d->here.first;
    if (e < 0 || e >= d->here.n) continue;
    rm_copy(d->work + (size_t)d->cursor[e]++ * d->row_bytes,
            d->all_rows + (size_t)(i / d->top_k) * d->row_bytes, d->row_bytes);
  }
  return RM_OK;
}

static rm_code move_out(rm_dispatch *d, const rm_ctx *ctx, const void *x, char **rows,
                        rm_error *err) {
  *rows = d->work;
  if (d->sees_all) return gather_rows(d, x, err);
  run(ctx, spread_task, d->n_choices, &(copy_job){.d = d, .from = x, .to = d->choices});
  RM_TRY(exchange(d, RM_COMM_DISPATCH, err));
  run(ctx, reorder_task, d->n_arrive, &(copy_job){.d = d, .from = d->arrived, .to = d->work});
  return RM_OK;
}

static rm_code move_back(rm_dispatch *d, const rm_ctx *ctx, const void *rows, rm_error *err) {
  run(ctx, reorder_task, d->n_arrive,
      &(copy_job){.d = d, .from = rows, .to = d->arrived, .back = 1});
  return exchange(d, RM_COMM_COMBINE, err);
}

// ------------------------------------------------------------------------------------------ a pass
rm_code rm_moe_counted_dispatched(rm_moe *moe, const rm_moe_rows *at, rm_error *err) {
  rm_dispatch *d = &moe->dispatch;
  char *here;
  rm_moe_route(moe, at, moe->ids);
  RM_TRY(plan(d, moe->ids, at->rows, err));
  RM_TRY(move_out(d, moe->ctx, at->x, &here, err));
  RM_TRY(rm_moe_experts(moe, at, d->group_rows, d->n_arrive, here, here, err));
  RM_TRY(move_back(d, moe->ctx, here, err));
  rm_moe_combine(moe, at->out, d->choices, moe->ids, d->place, moe->spec->hidden_size, at->rows);
  return RM_OK;
}
