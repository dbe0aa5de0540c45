// dispatch.c: see dispatch.h. Rows arrive ordered by rank, then expert; grouped gemms need them by
// expert, so they are reordered once, and the outputs once more. Rejected: writing directly to the
// final position, because it needs a transport with remote addresses. The order of rows within an
// expert does not change the result.
#include "model/moe/dispatch.h"

#include <string.h>

#include "base/fields.h"
#include "base/hash.h"
#include "comm/block.h"

struct rm_dispatch {
  rm_comm *ep; // view; NULL: one rank
  int n_ranks, me;
  int64_t n_experts, top_k, max_rows, max_arrive;
  size_t max_row_bytes;
  int dispatches, sees_all; // rows move to other ranks; every rank gets all rows
  rm_range here; // experts of this rank
  rm_range *experts; // [n_ranks]
  rm_block *send, *recv; // [n_ranks]
  int32_t *cursor; // [n_experts]
  char (*texts)[RM_DISPATCH_TEXT]; // [n_ranks] what rm_dispatch_agree compares
  int32_t *all_ids; // [n_ranks·max_rows][top_k]; sees_all
  char *choices; // rows [max_rows·top_k] for the home rows' choices, by expert
  char *arrived; // rows [max_arrive] by rank, then expert; where rows move
  char *work; // rows [max_arrive] by expert, then rank; where rows move
  char *all_rows; // rows [n_ranks·max_rows]; sees_all
  void *block; // owned: all of these arrays
  size_t block_bytes;
};

// --------------------------------------------------------------------------------------- creation
static rm_code check_options(const rm_dispatch_options *o, int n_ranks, rm_error *err) {
  int64_t next = 0, choices, total;
  if (o->backend < 0 || o->backend >= RM_N_DISPATCHER)
    return rm_fail(err, RM_E_CONFIG, "backend: expected a token dispatcher, got %d",
                   (int)o->backend);
  if (n_ranks > 1 && o->backend == RM_DISPATCH_DISABLED)
    return rm_fail(
        err, RM_E_CONFIG,
        "backend: expected a dispatcher that moves tokens for %d ranks, got \"disabled\"", n_ranks);
  if (o->top_k < 1 || o->top_k > o->n_experts || o->top_k > RM_MAX_TOP_K)
    return rm_fail(err, RM_E_CONFIG, "top_k: expected 1 to %lld (num_experts=%lld), got %lld",
                   (long long)rm_min64(o->n_experts, RM_MAX_TOP_K), (long long)o->n_experts,
                   (long long)o->top_k);
  if (o->max_rows < 1 || o->max_row_bytes < 1)
    return rm_fail(err, RM_E_CONFIG,
                   "max_rows, max_row_bytes: expected at least 1, got %lld and %zu",
                   (long long)o->max_rows, o->max_row_bytes);
  if (!rm_mul_i64(o->max_rows, o->top_k, &choices) || !rm_mul_i64(choices, n_ranks, &total) ||
      total > INT32_MAX)
    return rm_fail(err, RM_E_LIMIT,
                   "max_rows: expected at most %d choices in all, got max_rows=%lld on %d ranks "
                   "with top_k=%lld",
                   INT32_MAX, (long long)o->max_rows, n_ranks, (long long)o->top_k);
  for (int r = 0; r < n_ranks; next += o->experts[r++].n)
    if (o->experts[r].first != next || o->experts[r].n < 0) break;
  if (next != o->n_experts)
    return rm_fail(err, RM_E_CONFIG,
                   "experts: expected %d ascending ranges that cover %lld experts, got gaps or "
                   "overlaps",
                   n_ranks, (long long)o->n_experts);
  return RM_OK;
}

static rm_code create_buffers(rm_dispatch *d, rm_error *err) {
  const size_t ranks = (size_t)d->n_ranks, choices = (size_t)(d->max_rows * d->top_k),
               row = d->max_row_bytes;
  const size_t arrive = d->dispatches ? (size_t)d->max_arrive : 0,
               all = d->sees_all ? ranks * (size_t)d->max_rows : 0;
  const rm_field fields[] = {
      {&d->experts, ranks, sizeof *d->experts},
      {&d->send, ranks, sizeof *d->send},
      {&d->recv, ranks, sizeof *d->recv},
      {&d->cursor, (size_t)d->n_experts, sizeof *d->cursor},
      {&d->texts, ranks, sizeof *d->texts},
      {&d->all_ids, all, (size_t)d->top_k * sizeof *d->all_ids},
      {&d->choices, choices, row},
      {&d->arrived, arrive, row},
      {&d->work, arrive, row},
      {&d->all_rows, all, row},
  };
  const size_t n = sizeof fields / sizeof *fields;
  d->block_bytes = rm_fields_bytes(fields, n);
  d->block = d->block_bytes ? rm_map(d->block_bytes) : NULL;
  if (d->block && rm_fields_place(fields, n, d->block, d->block_bytes)) return RM_OK;
  return rm_fail(err, RM_E_MEMORY,
                 "no memory for %zu bytes of rows between ranks (%lld rows of %zu bytes, %d ranks)",
                 d->block_bytes, (long long)d->max_rows, row, d->n_ranks);
}

rm_code rm_dispatch_create(const rm_dispatch_options *options, rm_dispatch **out, rm_error *err) {
  const int n_ranks = options->ep ? rm_comm_size(options->ep) : 1;
  *out = NULL;
  rm_code code = check_options(options, n_ranks, err);
  if (code) return code;
  rm_dispatch *d = rm_alloc(1, sizeof *d);
  if (!d) return rm_fail(err, RM_E_MEMORY, "no memory for a token dispatcher");
  *d = (rm_dispatch){.ep = options->ep,
                     .n_ranks = n_ranks,
                     .me = options->ep ? rm_comm_rank(options->ep) : 0,
                     .n_experts = options->n_experts,
                     .top_k = options->top_k,
                     .max_rows = options->max_rows,
                     .max_row_bytes = options->max_row_bytes};
  d->dispatches = n_ranks > 1 && options->backend != RM_DISPATCH_LOCAL_ALLREDUCE;
  d->sees_all = d->dispatches && options->backend == RM_DISPATCH_ALLGATHER_REDUCESCATTER;
  d->here = options->experts[d->me];
  d->max_arrive = d->max_rows * (d->dispatches ? n_ranks : 1) * rm_min64(d->top_k, d->here.n);
  if ((code = create_buffers(d, err))) {
    rm_dispatch_destroy(d);
    return code;
  }
  memcpy(d->experts, options->experts, (size_t)n_ranks * sizeof *d->experts);
  *out = d;
  return RM_OK;
}

void rm_dispatch_destroy(rm_dispatch *dispatch) {
  if (!dispatch) return;
  rm_unmap(dispatch->block, dispatch->block_bytes);
  rm_free(dispatch);
}

size_t rm_dispatch_bytes(const rm_dispatch *dispatch) { return dispatch->block_bytes; }
int64_t rm_dispatch_max_arrive(const rm_dispatch *dispatch) { return dispatch->max_arrive; }

// ------------------------------------------------------------------------------------------ plans
static int64_t stride(const rm_dispatch *d) {
  return d->n_experts + 1 + (int64_t)(sizeof(uint64_t) / sizeof(int32_t));
}

rm_code rm_dispatch_plan_create(const rm_dispatch *d, rm_dispatch_plan **out, rm_error *err) {
  const size_t choices = (size_t)(d->max_rows * d->top_k);
  rm_dispatch_plan parts = {0};
  const rm_field fields[] = {
      {&parts.place, choices, sizeof *parts.place},
      {&parts.ids, choices, sizeof *parts.ids},
      {&parts.group_rows, (size_t)d->here.n + 1, sizeof *parts.group_rows},
      {&parts.starts, (size_t)d->n_ranks, (size_t)stride(d) * sizeof *parts.starts},
  };
  const size_t n = sizeof fields / sizeof *fields, bytes = rm_fields_bytes(fields, n);
  rm_dispatch_plan *plan = bytes ? rm_alloc(1, sizeof *plan + bytes) : NULL;
  *out = NULL;
  if (!plan || !rm_fields_place(fields, n, plan + 1, bytes)) {
    rm_free(plan);
    return rm_fail(err, RM_E_MEMORY, "no memory for a plan of %lld rows, %zu bytes",
                   (long long)d->max_rows, bytes);
  }
  *plan = parts;
  *out = plan;
  return RM_OK;
}

void rm_dispatch_plan_destroy(rm_dispatch_plan *plan) { rm_free(plan); }

static int32_t *starts_of(const rm_dispatch *d, const rm_dispatch_plan *plan, int rank) {
  return plan->starts + rank * stride(d);
}

// The number of rows of rank r for the experts of rank s.
static int64_t rows_for(const rm_dispatch *d, const rm_dispatch_plan *plan, int r, int s) {
  const int32_t *starts = starts_of(d, plan, r) + d->experts[s].first;
  return starts[d->experts[s].n] - starts[0];
}

// The number of rows of rank r without padding.
static int64_t home_rows(const rm_dispatch *d, const rm_dispatch_plan *plan, int r) {
  return starts_of(d, plan, r)[d->n_experts] / d->top_k;
}

// Aborts the group on an error, since the other ranks wait in a call that this rank will not make.
static rm_code refuse(rm_dispatch *d, rm_code code) {
  if (code && d->ep) rm_comm_abort(d->ep, code);
  return code;
}

static rm_code check_row(const rm_dispatch *d, const int32_t *ids, int64_t row, rm_error *err) {
  for (int64_t i = 0; i < d->top_k; i++) {
    if (ids[i] >= d->n_experts || (ids[i] < 0) != (ids[0] < 0))
      return rm_fail(err, RM_E_REQUEST,
                     "row %lld of ids: expected all from 0 to %lld or all negative, got %d",
                     (long long)row, (long long)d->n_experts - 1, ids[i]);
    for (int64_t j = 0; j < i && ids[i] >= 0; j++)
      if (ids[j] == ids[i])
        return rm_fail(err, RM_E_REQUEST,
                       "row %lld of ids: expected distinct experts, got expert %d twice",
                       (long long)row, ids[i]);
  }
  return RM_OK;
}

// Fills this rank's part of the plan: the number of rows for each expert and the place of each
// choice.
static rm_code sort_choices(rm_dispatch *d, rm_dispatch_plan *plan, const int32_t *ids,
                            int64_t n_rows, rm_error *err) {
  int32_t *starts = starts_of(d, plan, d->me);
  // The digest of the ids in their order: with local_allreduce all ranks must have the same.
  uint64_t digest = RM_HASH_SEED;
  if (n_rows < 0 || n_rows > d->max_rows)
    return rm_fail(err, RM_E_CAPACITY, "ids: expected at most max_rows=%lld rows, got %lld",
                   (long long)d->max_rows, (long long)n_rows);
  plan->n_rows = n_rows;
  plan->n_choices = 0;
  memset(starts, 0, (size_t)stride(d) * sizeof *starts);
  for (int64_t r = 0; r < n_rows; r++, ids += d->top_k) {
    const rm_code code = check_row(d, ids, r, err);
    if (code) return code;
    for (int64_t i = 0; i < d->top_k && ids[i] >= 0; i++) {
      starts[ids[i] + 1]++;
      plan->ids[plan->n_choices++] = ids[i];
      digest = rm_hash_word(digest, (uint64_t)ids[i]);
    }
  }
  for (int64_t e = 0; e < d->n_experts; e++) starts[e + 1] += starts[e];
  memcpy(starts + d->n_experts + 1, &digest, sizeof digest);
  memcpy(d->cursor, starts, (size_t)d->n_experts * sizeof *starts);
  ids -= n_rows * d->top_k;
  for (int64_t i = 0; i < n_rows * d->top_k; i++)
    plan->place[i] = ids[i] < 0 ? -1 : d->cursor[ids[i]]++;
  return RM_OK;
}

// Checks the counts of other ranks before rows are written according to them.
static rm_code check_starts(const rm_dispatch *d, const rm_dispatch_plan *plan, rm_error *err) {
  const int64_t most = d->max_rows * d->top_k,
                most_here = d->max_rows * rm_min64(d->top_k, d->here.n);
  const int32_t *mine = starts_of(d, plan, d->me);
  for (int r = 0; r < d->n_ranks; r++) {
    const int32_t *starts = starts_of(d, plan, r);
    const long long n = starts[d->n_experts];
    int fits = starts[0] == 0 && n <= most && n % d->top_k == 0;
    for (int64_t e = 0; e < d->n_experts; e++) fits = fits && starts[e] <= starts[e + 1];
    if (!fits || rows_for(d, plan, r, d->me) > most_here)
      return rm_fail(
          err, RM_E_COLLECTIVE_MISMATCH,
          "ids: expected a multiple of top_k=%lld choices, at most %lld, got %lld from rank %d",
          (long long)d->top_k, (long long)most, n, r);
    if (!d->dispatches && memcmp(starts, mine, (size_t)stride(d) * sizeof *starts) != 0)
      return rm_fail(
          err, RM_E_COLLECTIVE_MISMATCH,
          "local_allreduce: expected the same rows and ids on all ranks, got others on rank %d "
          "than on rank %d",
          r, d->me);
  }
  return RM_OK;
}

static rm_code exchange_starts(rm_dispatch *d, rm_dispatch_plan *plan, rm_error *err) {
  const size_t bytes = (size_t)stride(d) * sizeof *plan->starts;
  if (d->n_ranks == 1) return RM_OK;
  for (int r = 0; r < d->n_ranks; r++) {
    d->send[r] = (rm_block){starts_of(d, plan, d->me), 1, bytes, bytes};
    d->recv[r] = (rm_block){starts_of(d, plan, r), 1, bytes, bytes};
  }
  const rm_code code = rm_comm_exchange(d->ep, RM_COMM_GATHER, d->send, d->recv, err);
  return code ? code : refuse(d, check_starts(d, plan, err));
}

rm_code rm_dispatch_plan_fill(rm_dispatch *d, rm_dispatch_plan *plan, const int32_t *ids,
                              int64_t n_rows, rm_error *err) {
  rm_code code = sort_choices(d, plan, ids, n_rows, err);
  if (code) return refuse(d, code);
  if ((code = exchange_starts(d, plan, err))) return code;
  // The ranks whose rows come here.
  const int first = d->dispatches ? 0 : d->me, end = d->dispatches ? d->n_ranks : d->me + 1;
  plan->group_rows[0] = 0;
  for (int64_t e = 0; e < d->here.n; e++) {
    plan->group_rows[e + 1] = plan->group_rows[e];
    for (int r = first; r < end; r++) {
      const int32_t *starts = starts_of(d, plan, r) + d->here.first + e;
      plan->group_rows[e + 1] += starts[1] - starts[0];
    }
  }
  plan->n_arrive = plan->group_rows[d->here.n];
  return RM_OK;
}

// ------------------------------------------------------------------------------- copies in memory
enum { SHARED_BYTES = 1 << 16 }; // the calling thread alone copies up to this many bytes

typedef struct copy_job {
  const rm_dispatch *d;
  const rm_dispatch_plan *plan;
  const char *from;
  char *to;
  size_t bytes; // of a row
  int back; // reorder from expert order to rank order; else the other way
} copy_job;

static void run(const rm_ctx *ctx, rm_task_fn task, int64_t rows, copy_job *job) {
  if (ctx && ctx->run && (size_t)rows * job->bytes > SHARED_BYTES) ctx->run(ctx->team, task, job);
  else task(job, 0, 1);
}

static void spread_task(void *arg, int thread, int n_threads) {
  const copy_job *job = arg;
  const int64_t top_k = job->d->top_k, n = job->plan->n_rows;
  for (int64_t i = n * thread / n_threads * top_k; i < n * (thread + 1) / n_threads * top_k; i++)
    if (job->plan->place[i] >= 0)
      rm_copy(job->to + (size_t)job->plan->place[i] * job->bytes,
              job->from + (size_t)(i / top_k) * job->bytes, job->bytes);
}

// Copies each home row to the place of each of its choices.
static void spread(rm_dispatch *d, const rm_ctx *ctx, const rm_dispatch_plan *plan, const void *x,
                   size_t bytes) {
  run(ctx, spread_task, plan->n_choices,
      &(copy_job){.d = d, .plan = plan, .from = x, .to = d->choices, .bytes = bytes});
}

static void reorder_task(void *arg, int thread, int n_threads) {
  const copy_job *job = arg;
  const rm_dispatch *d = job->d;
  const rm_range here = d->here;
  for (int64_t e = thread; e < here.n; e += n_threads) {
    int64_t by_expert = job->plan->group_rows[e], rank = 0;
    for (int r = 0; r < d->n_ranks; r++) {
      const int32_t *starts = starts_of(d, job->plan, r) + here.first;
      const int64_t n = starts[e + 1] - starts[e], by_rank = rank + starts[e] - starts[0];
      const int64_t from = job->back ? by_expert : by_rank, to = job->back ? by_rank : by_expert;
      rm_copy(job->to + (size_t)to * job->bytes, job->from + (size_t)from * job->bytes,
              (size_t)n * job->bytes);
      by_expert += n;
      rank += rows_for(d, job->plan, r, d->me);
    }
  }
}

// ------------------------------------------------------------------------------------------ moves
static rm_code check_call(rm_dispatch *d, size_t row_bytes, rm_error *err) {
  if (row_bytes >= 1 && row_bytes <= d->max_row_bytes) return RM_OK;
  return refuse(d, rm_fail(err, RM_E_LAYOUT, "row_bytes: expected 1 to %zu, got %zu",
                           d->max_row_bytes, row_bytes));
}

rm_code rm_dispatch_agree(rm_dispatch *d, const char *what, size_t row_bytes, rm_error *err) {
  const size_t n = sizeof *d->texts;
  rm_code code = check_call(d, row_bytes, err);
  if (code || d->n_ranks == 1) return code;
  memset(d->texts[d->me], 0, n);
  memcpy(d->texts[d->me], what, strnlen(what, n - 1));
  for (int r = 0; r < d->n_ranks; r++) {
    d->send[r] = (rm_block){d->texts[d->me], 1, n, n};
    d->recv[r] = (rm_block){d->texts[r], 1, n, n};
  }
  if ((code = rm_comm_exchange(d->ep, RM_COMM_STEP, d->send, d->recv, err))) return code;
  for (int r = 0; r < d->n_ranks; r++)
    if (memcmp(d->texts[r], d->texts[d->me], n) != 0)
      return refuse(d, rm_fail(err, RM_E_COLLECTIVE_MISMATCH, "rank %d is in %.*s; rank %d in %s",
                               r, (int)n - 1, d->texts[r], d->me, d->texts[d->me]));
  return RM_OK;
}

// Exchanges rows between `choices` on the home ranks, ordered by expert, and `arrived` on the
// experts' ranks, ordered by rank.
static rm_code exchange(rm_dispatch *d, const rm_dispatch_plan *plan, rm_comm_op op,
                        const char *choices, size_t bytes, rm_error *err) {
  const int32_t *starts = starts_of(d, plan, d->me);
  char *at = d->arrived;
  for (int r = 0; r < d->n_ranks; r++) {
    const rm_block here = {at, rows_for(d, plan, r, d->me), bytes, bytes};
    const rm_block home = {(char *)(uintptr_t)choices + (size_t)starts[d->experts[r].first] * bytes,
                           rows_for(d, plan, d->me, r), bytes, bytes};
    d->send[r] = op == RM_COMM_COMBINE ? here : home;
    d->recv[r] = op == RM_COMM_COMBINE ? home : here;
    at += rm_block_bytes(&here);
  }
  return rm_comm_exchange(d->ep, op, d->send, d->recv, err);
}

static rm_code send_each(rm_dispatch *d, const rm_ctx *ctx, const rm_dispatch_plan *plan,
                         const char *choices, size_t bytes, char **rows, rm_error *err) {
  const rm_code code = exchange(d, plan, RM_COMM_DISPATCH, choices, bytes, err);
  if (code) return code;
  run(ctx, reorder_task, plan->n_arrive,
      &(copy_job){.d = d, .plan = plan, .from = d->arrived, .to = d->work, .bytes = bytes});
  *rows = d->work;
  return RM_OK;
}

static rm_code gather(rm_dispatch *d, const rm_dispatch_plan *plan, const void *mine, void *all,
                      size_t bytes, rm_error *err) {
  char *at = all;
  for (int r = 0; r < d->n_ranks; r++) {
    d->send[r] = (rm_block){(void *)(uintptr_t)mine, home_rows(d, plan, d->me), bytes, bytes};
    d->recv[r] = (rm_block){at, home_rows(d, plan, r), bytes, bytes};
    at += rm_block_bytes(&d->recv[r]);
  }
  return rm_comm_exchange(d->ep, RM_COMM_GATHER, d->send, d->recv, err);
}

// Returns the home rows without padding, copied to `choices` if there is padding.
static const char *without_padding(rm_dispatch *d, const rm_dispatch_plan *plan, const char *x,
                                   size_t bytes) {
  if (plan->n_choices == plan->n_rows * d->top_k) return x;
  char *to = d->choices;
  for (int64_t r = 0; r < plan->n_rows; r++) {
    if (plan->place[r * d->top_k] < 0) continue;
    rm_copy(to, x + (size_t)r * bytes, bytes);
    to += bytes;
  }
  return d->choices;
}

static rm_code send_all(rm_dispatch *d, const rm_dispatch_plan *plan, const char *x, size_t bytes,
                        char **rows, rm_error *err) {
  int64_t n = 0;
  rm_code code = gather(d, plan, without_padding(d, plan, x, bytes), d->all_rows, bytes, err);
  if (!code)
    code = gather(d, plan, plan->ids, d->all_ids, (size_t)d->top_k * sizeof *d->all_ids, err);
  if (code) return code;
  for (int r = 0; r < d->n_ranks; r++) n += home_rows(d, plan, r);
  memcpy(d->cursor, plan->group_rows, (size_t)d->here.n * sizeof *d->cursor);
  for (int64_t i = 0; i < n * d->top_k; i++) { // by rank, then row, as reorder_task expects
    const int64_t e = d->all_ids[i] - d->here.first;
    if (e < 0 || e >= d->here.n) continue;
    rm_copy(d->work + (size_t)d->cursor[e]++ * bytes, d->all_rows + (size_t)(i / d->top_k) * bytes,
            bytes);
  }
  *rows = d->work;
  return RM_OK;
}

// Returns the choices of this rank's experts, with dispatchers that do not move rows.
static char *own_choices(const rm_dispatch *d, const rm_dispatch_plan *plan, const char *choices,
                         size_t bytes) {
  return (char *)(uintptr_t)choices + (size_t)starts_of(d, plan, d->me)[d->here.first] * bytes;
}

rm_code rm_dispatch_out(rm_dispatch *d, const rm_ctx *ctx, const rm_dispatch_plan *plan,
                        const void *x, size_t row_bytes, char **rows, rm_error *err) {
  const rm_code code = check_call(d, row_bytes, err);
  if (code) return code;
  if (d->sees_all) return send_all(d, plan, x, row_bytes, rows, err);
  spread(d, ctx, plan, x, row_bytes);
  if (d->dispatches) return send_each(d, ctx, plan, d->choices, row_bytes, rows, err);
  *rows = own_choices(d, plan, d->choices, row_bytes);
  return RM_OK;
}

rm_code rm_dispatch_out_each(rm_dispatch *d, const rm_ctx *ctx, const rm_dispatch_plan *plan,
                             const void *choices, size_t row_bytes, char **rows, rm_error *err) {
  const rm_code code = check_call(d, row_bytes, err);
  if (code) return code;
  if (d->dispatches) return send_each(d, ctx, plan, choices, row_bytes, rows, err);
  *rows = own_choices(d, plan, d->choices, row_bytes);
  rm_copy(*rows, own_choices(d, plan, choices, row_bytes), (size_t)plan->n_arrive * row_bytes);
  return RM_OK;
}

// local_allreduce: sends the outputs of this rank's experts to every rank.
static rm_code send_to_all(rm_dispatch *d, const rm_dispatch_plan *plan, const void *rows,
                           size_t bytes, rm_error *err) {
  const int32_t *starts = starts_of(d, plan, d->me);
  for (int r = 0; r < d->n_ranks; r++) {
    d->send[r] = (rm_block){(void *)(uintptr_t)rows, plan->n_arrive, bytes, bytes};
    d->recv[r] = (rm_block){d->choices + (size_t)starts[d->experts[r].first] * bytes,
                            rows_for(d, plan, d->me, r), bytes, bytes};
  }
  if (d->n_ranks > 1) return rm_comm_exchange(d->ep, RM_COMM_COMBINE, d->send, d->recv, err);
  rm_block_copy(d->send, d->recv);
  return RM_OK;
}

rm_code rm_dispatch_back(rm_dispatch *d, const rm_ctx *ctx, const rm_dispatch_plan *plan,
                         const void *rows, size_t row_bytes, char **choices, rm_error *err) {
  const rm_code code = check_call(d, row_bytes, err);
  if (code) return code;
  *choices = d->choices;
  if (!d->dispatches) return send_to_all(d, plan, rows, row_bytes, err);
  run(ctx, reorder_task, plan->n_arrive,
      &(copy_job){
          .d = d, .plan = plan, .from = rows, .to = d->arrived, .bytes = row_bytes, .back = 1});
  return exchange(d, plan, RM_COMM_COMBINE, d->choices, row_bytes, err);
}
