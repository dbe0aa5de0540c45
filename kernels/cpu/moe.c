// moe.c: router and combination of docs/numerics.md §5. The router's logits are a separate gemm;
// the rest is small and runs row by row. Combination first plans each row: the order of its leaves
// and sums when the tree is walked from the left. So the loop over columns has no branches.
#include "variant.h"

#include "panel.h"

enum { ROUTER_ROWS = 512 }; // rows whose logits are in the workspace at a time

// ----------------------------------------------------------------------------------------- router
typedef struct router_job {
  const rm_router_args *a;
  int64_t row0, rows, width; // width: experts padded to 16, the row stride of logits
  float *logits;
} router_job;

typedef struct choice {
  uint32_t key;
  int32_t id;
} choice;

// Inserts into best[0 … n), a short list of at most `most`, best first. A later choice with an
// equal key comes after the earlier one. Returns the new n.
static inline int64_t insert(choice *best, int64_t n, int64_t most, float key, int64_t id) {
  const choice c = {rm_order_key(key), (int32_t)id};
  if (n == most && c.key <= best[n - 1].key) return n;
  int64_t i = n < most ? n++ : n - 1;
  for (; i > 0 && best[i - 1].key < c.key; i--) best[i] = best[i - 1];
  best[i] = c;
  return n;
}

// Sets open[g] to whether the router may choose the `size` experts of group g.
static void open_groups(const rm_router_args *a, const float *scores, int64_t size, uint8_t *open) {
  choice best[RM_MAX_EXPERT_GROUPS];
  int64_t n = 0;
  for (int64_t g = 0; g < a->n_groups; g++) {
    choice two[2];
    int64_t n_two = 0;
    for (int64_t e = g * size; e < (g + 1) * size; e++)
      n_two = insert(two, n_two, 2, rm_router_key(a, scores, e), e);
    n = insert(best, n, a->top_groups,
               rm_router_key(a, scores, two[0].id) + rm_router_key(a, scores, two[1].id), g);
    open[g] = 0;
  }
  for (int64_t i = 0; i < n; i++) open[best[i].id] = 1;
}

static void choose(const rm_router_args *a, const float *scores, int32_t *ids) {
  const int64_t n_groups = rm_max64(a->n_groups, 1), size = a->n_experts / n_groups;
  choice best[RM_MAX_TOP_K];
  uint8_t open[RM_MAX_EXPERT_GROUPS] = {1};
  int64_t n = 0;
  if (n_groups > 1) open_groups(a, scores, size, open);
  for (int64_t g = 0; g < n_groups; g++)
    for (int64_t e = g * size; open[g] && e < (g + 1) * size; e++)
      n = insert(best, n, a->top_k, rm_router_key(a, scores, e), e);
  for (int64_t k = 0; k < a->top_k; k++) ids[k] = best[k].id;
}

// Writes positions 0 … k−1 in ascending order of ids.
static void ascending(const int32_t *ids, int64_t k, int32_t *order) {
  for (int64_t i = 0; i < k; i++) {
    int64_t j = i;
    for (; j > 0 && ids[order[j - 1]] > ids[i]; j--) order[j] = order[j - 1];
    order[j] = (int32_t)i;
  }
}

static void softmax_scores(float *scores, int64_t n_experts) {
  vf max = vf_set1(-INFINITY), partial = vf_zero();
  for (int64_t e = 0; e < n_experts; e += RM_LANES)
    max =
        vf_max(vf_pick(vi_first(rm_min64(RM_LANES, n_experts - e)), vf_load(scores + e), max), max);
  const vf top = vf_set1(vf_max16(max));
  for (int64_t e = 0; e < n_experts; e += RM_LANES) {
    const vf p = vf_keep(vf_exp(vf_sub(vf_load(scores + e), top)),
                         vi_first(rm_min64(RM_LANES, n_experts - e)));
    vf_store(scores + e, p);
    partial = vf_add(partial, p);
  }
  const vf total = vf_set1(vf_tree16(partial));
  for (int64_t e = 0; e < n_experts; e += RM_LANES)
    vf_store(scores + e, vf_div(vf_load(scores + e), total));
}

static void sigmoid_scores(float *scores, int64_t n_experts) {
  for (int64_t e = 0; e < n_experts; e += RM_LANES)
    vf_store(scores + e, vf_times_sigmoid(vf_set1(1.0f), vf_load(scores + e)));
}

static void route_row(const void *args, int, int64_t r) {
  const router_job *job = args;
  const rm_router_args *a = job->a;
  float *scores = job->logits + r * job->width;
  int32_t *ids = a->ids + (job->row0 + r) * a->top_k, order[RM_MAX_TOP_K];
  float *gates = a->gates + (job->row0 + r) * a->top_k;
  if (a->score == RM_SCORE_SIGMOID) sigmoid_scores(scores, a->n_experts);
  else softmax_scores(scores, a->n_experts);
  choose(a, scores, ids);
  for (int64_t k = 0; a->routed && k < a->top_k; k++)
    a->routed[(job->row0 + r) * a->routed_stride + k] = (int16_t)ids[k];
  float sum = 0.0f;
  ascending(ids, a->top_k, order);
  for (int64_t k = 0; a->renormalize && k < a->top_k; k++) sum = sum + scores[ids[order[k]]];
  for (int64_t k = 0; k < a->top_k; k++) gates[k] = rm_gate(a, scores[ids[k]], sum);
}

void RM_FN(router)(const rm_ctx *ctx, const rm_router_args *a) {
  router_job job = {.a = a, .width = rm_round_up(a->n_experts, RM_LANES)};
  job.logits = (float *)ctx->workspace + ctx->n_threads * dots_floats(a->hidden); // after gemm's
  for (job.row0 = 0; job.row0 < a->rows; job.row0 += ROUTER_ROWS) {
    job.rows = rm_min64(ROUTER_ROWS, a->rows - job.row0);
    const rm_gemm_args gemm = {.y = job.logits,
                               .x = rm_at(a->dtype, a->x, job.row0 * a->hidden),
                               .w = a->w,
                               .bias = a->logit_bias,
                               .m = job.rows,
                               .n = a->n_experts,
                               .k = a->hidden,
                               .ldx = a->hidden,
                               .ldy = job.width,
                               .dtype = a->dtype,
                               .y_dtype = RM_F32};
    RM_FN(gemm)(ctx, &gemm);
    rm_each_row(ctx, job.rows, job.rows * a->n_experts * 4, route_row, &job);
  }
}

size_t RM_FN(moe_workspace)(const rm_limits *l) {
  const int64_t logits = l->n_experts ? ROUTER_ROWS * rm_round_up(l->n_experts, RM_LANES) : 0;
  return (size_t)(l->n_threads * dots_floats(l->max_k) + logits) * sizeof(float);
}

// ---------------------------------------------------------------------------------------- combine
// The leaves in ascending id and, after each leaf, how many times to add the two topmost values.
typedef struct tree_plan {
  float gate[RM_MAX_TOP_K];
  int64_t row[RM_MAX_TOP_K]; // of y
  int sums[RM_MAX_TOP_K];
} tree_plan;

// The level of the tree at which the paths of two ids join.
static int level(int32_t a, int32_t b) { return 31 - __builtin_clz((uint32_t)(a ^ b)); }

static void plan_row(const rm_combine_args *a, int64_t r, tree_plan *plan) {
  const int32_t *ids = a->ids + r * a->top_k;
  int32_t order[RM_MAX_TOP_K];
  int open[RM_MAX_TOP_K], n_open = 0; // levels at which the values on the stack join, descending
  ascending(ids, a->top_k, order);
  for (int64_t k = 0; k < a->top_k; k++) {
    plan->gate[k] = a->gates[r * a->top_k + order[k]];
    plan->row[k] = a->place[r * a->top_k + order[k]];
    const int next = k + 1 < a->top_k ? level(ids[order[k]], ids[order[k + 1]]) : 32;
    for (plan->sums[k] = 0; n_open > 0 && open[n_open - 1] < next; n_open--) plan->sums[k]++;
    open[n_open++] = next;
  }
}

VEC void combine_row(rm_dtype T, const rm_combine_args *a, int64_t r) {
  tree_plan plan;
  plan_row(a, r, &plan);
  for (int64_t i = 0; i < a->hidden; i += RM_LANES) {
    const int64_t n = rm_min64(RM_LANES, a->hidden - i);
    vf stack[RM_MAX_TOP_K];
    int top = 0;
    for (int64_t k = 0; k < a->top_k; k++) {
      stack[top++] =
          vf_mul(vf_set1(plan.gate[k]), vt_load_n(T, a->y, plan.row[k] * a->hidden + i, n));
      for (int s = 0; s < plan.sums[k]; s++, top--)
        stack[top - 2] = vf_add(stack[top - 2], stack[top - 1]);
    }
    vt_store_n(T, a->out, r * a->hidden + i, vt_round(T, stack[0]), n);
  }
}

ROW_OP(combine, a->rows * a->top_k * a->hidden / 4, SPECIALIZE(a->dtype, combine_row(T, a, r)))
