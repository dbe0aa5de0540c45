// ref_moe.c: router, static dispatch and combination of docs/numerics.md §5.
#include "ref.h"

// Whether an expert with key x precedes one with key y and a lower id.
static int comes_before(float x, float y) { return rm_order_key(x) > rm_order_key(y); }

// The sum of a group's two largest keys; NaN if fewer than two keys are numbers.
static float group_key(const float *scores, const rm_router_args *a, int64_t group) {
  const int64_t size = a->n_experts / a->n_groups;
  float first = NAN, second = NAN;
  for (int64_t e = group * size; e < (group + 1) * size; e++) {
    const float key = rm_router_key(a, scores, e);
    if (comes_before(key, first)) {
      second = first;
      first = key;
    } else if (comes_before(key, second)) {
      second = key;
    }
  }
  return first + second;
}

// Whether fewer than top_groups groups come before this group.
static int is_open(const float *keys, const rm_router_args *a, int64_t group) {
  int64_t before = 0;
  for (int64_t g = 0; g < a->n_groups; g++)
    before +=
        comes_before(keys[g], keys[group]) || (g < group && !comes_before(keys[group], keys[g]));
  return before < a->top_groups;
}

static void choose(const float *scores, const rm_router_args *a, int32_t *ids) {
  const int64_t n_groups = rm_max64(a->n_groups, 1), size = a->n_experts / n_groups;
  float group_keys[RM_MAX_EXPERT_GROUPS];
  int open[RM_MAX_EXPERT_GROUPS] = {1};
  for (int64_t g = 0; n_groups > 1 && g < n_groups; g++) group_keys[g] = group_key(scores, a, g);
  for (int64_t g = 0; n_groups > 1 && g < n_groups; g++) open[g] = is_open(group_keys, a, g);
  for (int64_t k = 0; k < a->top_k; k++) {
    int64_t best = -1;
    float best_key = 0.0f;
    for (int64_t e = 0; e < a->n_experts; e++) {
      const float key = rm_router_key(a, scores, e);
      int taken = !open[e / size];
      for (int64_t i = 0; i < k; i++) taken |= ids[i] == e;
      if (taken || (best >= 0 && !comes_before(key, best_key))) continue;
      best = e;
      best_key = key;
    }
    ids[k] = (int32_t)best;
  }
}

// Adds the chosen scores one by one in ascending expert id.
static float sum_of_chosen(const float *scores, const rm_router_args *a, const int32_t *ids) {
  float sum = 0.0f;
  for (int64_t e = 0; e < a->n_experts; e++)
    for (int64_t k = 0; k < a->top_k; k++)
      if (ids[k] == e) sum = sum + scores[e];
  return sum;
}

static void score(float *logits, const rm_router_args *a) {
  float partial[RM_LANES] = {0}, max = -INFINITY;
  if (a->score == RM_SCORE_SIGMOID) {
    for (int64_t e = 0; e < a->n_experts; e++) logits[e] = rm_sigmoid(logits[e]);
    return;
  }
  for (int64_t e = 0; e < a->n_experts; e++) max = rm_max_f32(logits[e], max);
  for (int64_t e = 0; e < a->n_experts; e++) {
    logits[e] = rm_exp(logits[e] - max);
    partial[e % RM_LANES] = partial[e % RM_LANES] + logits[e];
  }
  const float total = rm_tree16(partial);
  for (int64_t e = 0; e < a->n_experts; e++) logits[e] = logits[e] / total;
}

void rm_router_ref(const rm_ctx *ctx, const rm_router_args *a) {
  float *scores = ctx->workspace;
  for (int64_t r = 0; r < a->rows; r++) {
    int32_t *ids = a->ids + r * a->top_k;
    for (int64_t e = 0; e < a->n_experts; e++) {
      const float acc =
          rm_ref_dot(a->dtype, rm_at(a->dtype, a->x, r * a->hidden), a->w, e, a->hidden);
      scores[e] = rm_canon(a->logit_bias ? acc + rm_get(a->dtype, a->logit_bias, e) : acc);
    }
    score(scores, a);
    choose(scores, a, ids);
    const float sum = a->renormalize ? sum_of_chosen(scores, a, ids) : 0.0f;
    for (int64_t k = 0; k < a->top_k; k++) {
      a->gates[r * a->top_k + k] = rm_gate(a, scores[ids[k]], sum);
      if (a->routed) a->routed[r * a->routed_stride + k] = (int16_t)ids[k];
    }
  }
}

static void static_dispatch_row(const rm_static_dispatch_args *a, int64_t home, int64_t row) {
  const int64_t each = rm_max_choices(a->top_k, a->experts_each);
  const int32_t *ids = a->ids + home * a->ids_pitch + row * a->top_k;
  int32_t *place = a->place + (home * a->home_rows + row) * a->top_k,
          *own = a->own + (home * a->pitch + row) * each;
  for (int64_t k = 0; k < a->top_k; k++) {
    const int64_t rank = ids[k] / a->experts_each, first = rank * a->experts_each;
    int64_t n = 0; // earlier choices among the rank's experts
    for (int64_t i = 0; i < k; i++) n += ids[i] >= first && ids[i] < first + a->experts_each;
    place[k] = ids[k] < 0 ? -1 : (int32_t)((rank * a->home_rows + row) * each + n);
    if (ids[k] >= 0 && rank == a->rank) own[n] = (int32_t)(ids[k] - first);
  }
}

void rm_static_dispatch_ref(const rm_ctx *, const rm_static_dispatch_args *a) {
  for (int64_t i = 0; i < a->homes * a->pitch * rm_max_choices(a->top_k, a->experts_each); i++)
    a->own[i] = -1;
  for (int64_t home = 0; home < a->homes; home++)
    for (int64_t row = 0; row < a->home_rows; row++) static_dispatch_row(a, home, row);
}

// Computes the tree's node over expert ids [first, first + width) for row r and column i. Returns 0
// if the row has not chosen any of these experts.
static int node(const rm_combine_args *a, int64_t r, int64_t i, int64_t first, int64_t width,
                float *value) {
  if (width == 1) {
    for (int64_t k = r * a->top_k; k < (r + 1) * a->top_k; k++)
      if (a->ids[k] == first) {
        *value = a->gates[k] * rm_get(a->dtype, a->y, a->place[k] * a->hidden + i);
        return 1;
      }
    return 0;
  }
  float left, right;
  const int has_left = node(a, r, i, first, width / 2, &left),
            has_right = node(a, r, i, first + width / 2, width / 2, &right);
  if (has_left || has_right)
    *value = has_left && has_right ? left + right : has_left ? left : right;
  return has_left || has_right;
}

void rm_combine_ref(const rm_ctx *, const rm_combine_args *a) {
  int64_t places = 1;
  while (places < a->n_experts) places *= 2;
  for (int64_t r = 0; r < a->rows; r++)
    for (int64_t i = 0; i < a->hidden; i++) {
      float value = 0.0f;
      node(a, r, i, 0, places, &value);
      rm_put(a->dtype, a->out, r * a->hidden + i, value);
    }
}
