// travel.c: rows go to the ranks of their experts and come back. What arrives is ordered by rank, then expert; the gemms want it by
// expert, so it is copied over once, and back once with the outputs. A row's place among others of its expert reaches no bit.
//
//   alltoall                  each row goes to the ranks of its experts, once for each expert
//   allgather_reducescatter   all rows go to all ranks, with their experts' ids, and each rank picks those that it has experts for
//
// Outputs come back the same way for both: one row for each choice, to the place where the home's permutation had its input.
#include "model/moe/moe.h"

static size_t row_bytes(const rm_moe *moe) { return (size_t)moe->spec->hidden_size * rm_dtype_bytes(moe->dtype); }
static const int32_t *starts_of(const rm_moe *moe, int rank) { return moe->counts + (int64_t)rank * (moe->spec->n_experts + 1); }

// Rows of rank r for the experts of rank s.
static int64_t rows_for(const rm_moe *moe, int r, int s) {
  const rm_range its = moe->experts[s];
  return starts_of(moe, r)[its.first + its.n] - starts_of(moe, r)[its.first];
}

static int64_t home_rows(const rm_moe *moe, int r) { return starts_of(moe, r)[moe->spec->n_experts] / moe->spec->top_k; }

// How many rows each rank has for each expert, known to all.
static rm_code exchange_counts(rm_moe *moe, rm_error *err) {
  const size_t bytes = (size_t)(moe->spec->n_experts + 1) * sizeof *moe->counts;
  for (int r = 0; r < moe->n_ranks; r++) {
    moe->send[r] = (rm_block){moe->group_rows, 1, bytes, bytes};
    moe->recv[r] = (rm_block){moe->counts + (int64_t)r * (moe->spec->n_experts + 1), 1, bytes, bytes};
  }
  const rm_code code = rm_comm_exchange(moe->ep, RM_COMM_GATHER, moe->send, moe->recv, err);
  if (code) return code;
  moe->local_rows[0] = 0;
  for (int64_t e = 0; e < moe->here->experts.n; e++) {
    const int64_t expert = moe->here->experts.first + e;
    moe->local_rows[e + 1] = moe->local_rows[e];
    for (int r = 0; r < moe->n_ranks; r++) moe->local_rows[e + 1] += starts_of(moe, r)[expert + 1] - starts_of(moe, r)[expert];
  }
  return RM_OK;
}

// ---------------------------------------------------------------------------------------------- the two orders of what arrived
typedef struct reorder_job {
  const rm_moe *moe;
  int back;                     // from `work` to `arrived`
} reorder_job;

static void reorder_task(void *arg, int thread, int n_threads) {
  const reorder_job *job = arg;
  const rm_moe *moe = job->moe;
  const rm_range here = moe->here->experts;
  const size_t bytes = row_bytes(moe);
  for (int64_t e = thread; e < here.n; e += n_threads) {
    char *work = moe->work + (size_t)moe->local_rows[e] * bytes, *arrived = moe->arrived;
    for (int r = 0; r < moe->n_ranks; r++) {
      const int32_t *starts = starts_of(moe, r);
      char *there = arrived + (size_t)(starts[here.first + e] - starts[here.first]) * bytes;
      const size_t n = (size_t)(starts[here.first + e + 1] - starts[here.first + e]) * bytes;
      memcpy(job->back ? there : work, job->back ? work : there, n);
      work += n;
      arrived += (size_t)rows_for(moe, r, moe->me) * bytes;
    }
  }
}

static void reorder(rm_moe *moe, const rm_ctx *ctx, int back) {
  reorder_job job = {moe, back};
  ctx->run(ctx->team, reorder_task, &job);
}

// ---------------------------------------------------------------------------------------------- out
static rm_code send_chosen(rm_moe *moe, const rm_ctx *ctx, rm_error *err) {
  const size_t bytes = row_bytes(moe);
  char *at = moe->arrived;
  for (int r = 0; r < moe->n_ranks; r++) {
    moe->send[r] =
        (rm_block){moe->sorted + (size_t)moe->group_rows[moe->experts[r].first] * bytes, rows_for(moe, moe->me, r), bytes, bytes};
    moe->recv[r] = (rm_block){at, rows_for(moe, r, moe->me), bytes, bytes};
    at += (size_t)rows_for(moe, r, moe->me) * bytes;
  }
  const rm_code code = rm_comm_exchange(moe->ep, RM_COMM_DISPATCH, moe->send, moe->recv, err);
  if (!code) reorder(moe, ctx, 0);
  return code;
}

static rm_code gather_to_all(rm_moe *moe, const void *mine, void *all, size_t bytes, rm_error *err) {
  char *at = all;
  for (int r = 0; r < moe->n_ranks; r++) {
    moe->send[r] = (rm_block){(void *)mine, home_rows(moe, moe->me), bytes, bytes};
    moe->recv[r] = (rm_block){at, home_rows(moe, r), bytes, bytes};
    at += (size_t)home_rows(moe, r) * bytes;
  }
  return rm_comm_exchange(moe->ep, RM_COMM_GATHER, moe->send, moe->recv, err);
}

static rm_code send_all(rm_moe *moe, const char *x, rm_error *err) {
  const int64_t top_k = moe->spec->top_k;
  const rm_range here = moe->here->experts;
  rm_code code = gather_to_all(moe, x, moe->all_rows, row_bytes(moe), err);
  if (!code) code = gather_to_all(moe, moe->ids, moe->all_ids, (size_t)top_k * sizeof *moe->ids, err);
  if (code) return code;
  int64_t n = 0;
  for (int r = 0; r < moe->n_ranks; r++) n += home_rows(moe, r);
  memcpy(moe->cursor, moe->local_rows, (size_t)here.n * sizeof *moe->cursor);
  for (int64_t i = 0; i < n * top_k; i++) {   // ranks ascend, and rows in one: the order that reorder goes back by
    const int64_t e = moe->all_ids[i] - here.first;
    if (e < 0 || e >= here.n) continue;
    memcpy(moe->work + (size_t)moe->cursor[e]++ * row_bytes(moe), moe->all_rows + (size_t)(i / top_k) * row_bytes(moe), row_bytes(moe));
  }
  return RM_OK;
}

// ---------------------------------------------------------------------------------------------- and back
static void compute(rm_moe *moe, const rm_ctx *ctx, const rm_layer_params *layer, const char *weights) {
  const int64_t m = moe->local_rows[moe->here->experts.n];
  rm_gemm_args up = rm_moe_up(moe, layer, weights, moe->local_rows, m), down = rm_moe_down(moe, layer, weights, moe->local_rows, m);
  if (!m) return;
  up.x = down.y = moe->work;
  up.y = moe->inner;
  down.x = moe->inner;
  moe->kernels->gemm_swiglu(ctx, &up);
  moe->kernels->gemm(ctx, &down);
}

static rm_code send_back(rm_moe *moe, rm_error *err) {
  const size_t bytes = row_bytes(moe);
  char *at = moe->arrived;
  for (int r = 0; r < moe->n_ranks; r++) {
    moe->send[r] = (rm_block){at, rows_for(moe, r, moe->me), bytes, bytes};
    moe->recv[r] =
        (rm_block){moe->sorted + (size_t)moe->group_rows[moe->experts[r].first] * bytes, rows_for(moe, moe->me, r), bytes, bytes};
    at += (size_t)rows_for(moe, r, moe->me) * bytes;
  }
  return rm_comm_exchange(moe->ep, RM_COMM_COMBINE, moe->send, moe->recv, err);
}

rm_code rm_moe_travel(rm_moe *moe, const rm_ctx *ctx, const rm_layer_params *layer, const char *weights, const char *x, char *out,
                      int64_t rows, int16_t *routed, int64_t routed_stride, rm_error *err) {
  rm_code code;
  rm_moe_route(moe, ctx, layer, weights, x, rows, routed, routed_stride);
  rm_moe_permute(moe, ctx, x, rows);
  if ((code = exchange_counts(moe, err))) return code;
  if ((code = moe->dispatcher == RM_DISPATCH_ALLTOALL ? send_chosen(moe, ctx, err) : send_all(moe, x, err))) return code;
  compute(moe, ctx, layer, weights);
  reorder(moe, ctx, 1);
  if ((code = send_back(moe, err))) return code;
  rm_moe_combine(moe, ctx, out, moe->sorted, moe->spec->hidden_size, rows);
  return RM_OK;
}
