// profile.c: see profile.h.
#include "profile.h"

#include <stdatomic.h>

#include "clock.h"

static rm_profile_entry *entry_of(rm_profile *profile, const char *op, int64_t n, int64_t k) {
  for (int i = 0; i < profile->n_entries; i++) {
    rm_profile_entry *entry = &profile->entries[i];
    if (entry->op == op && entry->n == n && entry->k == k) return entry;
  }
  if (profile->n_entries == RM_PROFILE_ENTRIES) {
    rm_profile_entry *last = &profile->entries[RM_PROFILE_ENTRIES - 1];
    last->op = "other";
    last->n = last->k = 0;
    return last;
  }
  rm_profile_entry *entry = &profile->entries[profile->n_entries++];
  *entry = (rm_profile_entry){.op = op, .n = n, .k = k};
  return entry;
}

// A run of the team that adds up the time of its threads.
typedef struct timed_run {
  rm_task_fn fn;
  void *arg;
  _Atomic int64_t nanoseconds;  // of all threads
} timed_run;

static void timed_task(void *arg, int thread, int n_threads) {
  timed_run *run = arg;
  const double start = rm_now();
  run->fn(run->arg, thread, n_threads);
  atomic_fetch_add(&run->nanoseconds, (int64_t)((rm_now() - start) * 1e9));
}

static void run_team(void *opaque, rm_task_fn fn, void *arg) {
  const rm_ctx *ctx = opaque;
  timed_run run = {.fn = fn, .arg = arg};
  const double start = rm_now();
  ctx->run(ctx->team, timed_task, &run);
  ctx->profile->waited += rm_now() - start - 1e-9 * (double)run.nanoseconds / ctx->n_threads;
}

static rm_ctx timed_ctx(const rm_ctx *ctx) {
  rm_ctx timed = *ctx;
  ctx->profile->waited = 0;
  if (ctx->run) timed.run = run_team;
  timed.team = (void *)ctx;
  return timed;
}

static void count(rm_profile *profile, double start, rm_profile_entry call) {
  const double seconds = rm_now() - start;
  rm_profile_entry *entry = entry_of(profile, call.op, call.n, call.k);
  entry->calls++;
  entry->seconds += seconds;
  entry->waited += profile->waited;
  entry->rows += call.rows;
  entry->flops += call.flops;
  entry->weight_bytes += call.weight_bytes;
}

// A product of `rows` rows with `matrices` matrices of packed weights [n]×[k].
static rm_profile_entry product(const char *op, int64_t rows, int64_t n, int64_t k,
                                int64_t matrices, rm_dtype dtype) {
  return (rm_profile_entry){
      .op = op,
      .n = n,
      .k = k,
      .rows = rows,
      .flops = 2.0 * (double)rows * (double)n * (double)k,
      .weight_bytes =
          (double)matrices * (double)rm_packed_elems(n, k) * (double)rm_dtype_bytes(dtype),
  };
}

static rm_profile_entry of_gemm(const char *op, const rm_gemm_args *a, int64_t n) {
  int64_t matrices = a->group_rows ? 0 : 1;
  for (int64_t g = 0; a->group_rows && g < a->n_groups; g++)
    matrices += a->group_rows[g + 1] > a->group_rows[g];
  return product(op, a->group_rows ? a->group_rows[a->n_groups] : a->m, n, a->k, matrices,
                 a->dtype);
}

static rm_profile_entry of_attention(const rm_attention_args *a) {
  double positions = 0;
  for (int64_t r = 0; r < a->rows; r++)
    positions += (double)(a->positions[r] + 1 - rm_first_position(a, r));
  return (rm_profile_entry){.op = "attention",
                            .rows = a->rows,
                            .flops = 2.0 * positions * (double)a->n_heads *
                                     (double)(a->head_dim + a->value_dim)};
}

static rm_profile_entry of_delta_net(const rm_delta_net_args *a) {
  return (rm_profile_entry){.op = "delta_net",
                            .rows = a->rows,
                            .flops = 7.0 * (double)a->rows *
                                     (double)(a->n_v_heads * a->k_dim * a->v_dim)};
}

#define TIMED(name, args_type, call) \
  static void name(const rm_ctx *ctx, const args_type *a) { \
    const rm_ctx timed = timed_ctx(ctx); \
    const double start = rm_now(); \
    ctx->profile->of->name(&timed, a); \
    count(ctx->profile, start, call); \
  }
#define TIMED_ROWS(name, args) TIMED(name, args, ((rm_profile_entry){.op = #name, .rows = a->rows}))
RM_ROW_OPS(TIMED_ROWS)
RM_SHARED_ROW_OPS(TIMED_ROWS)
#define TIMED_PLAIN(name, args) TIMED(name, args, ((rm_profile_entry){.op = #name}))
RM_PLAIN_OPS(TIMED_PLAIN)
TIMED(gemm, rm_gemm_args, of_gemm(a->group_rows ? "experts" : "gemm", a, a->n))
TIMED(gemm_swiglu, rm_gemm_args,
      of_gemm(a->group_rows ? "experts_swiglu" : "gemm_swiglu", a, 2 * a->n))
TIMED(attention, rm_attention_args, of_attention(a))
TIMED(delta_net, rm_delta_net_args, of_delta_net(a))
TIMED(router, rm_router_args, product("router", a->rows, a->n_experts, a->hidden, 1, a->dtype))
TIMED(lm_head, rm_lm_head_args, product("lm_head", a->rows, a->vocab, a->hidden, 1, a->dtype))

void rm_profile_init(rm_profile *profile, const rm_kernels *of) {
  *profile = (rm_profile){.of = of, .table = *of};
#define ENTRY(name, args) profile->table.name = name;
  RM_OPS(ENTRY) // pack is part of a weight sync, not of a step
}

void rm_profile_reset(rm_profile *profile) { profile->n_entries = 0; }
