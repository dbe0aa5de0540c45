// moe.c: the mixture of experts. See ops.h.
#include "ops.h"

static void check_top_k(rm_op_call *c) {
  const int64_t top_k = c->v.top_k, most = rm_min64(c->v.num_experts, RM_MAX_TOP_K);
  rm_op_at_least(c, "top_k", top_k, 1);
  if (top_k > most) rm_op_refuse(c, RM_E_SHAPE, "top_k", top_k, "at most", most);
}

// ----------------------------------------------------------------------------------------- router
static void router_sizes(rm_op_call *c) {
  rm_op_values *v = &c->v;
  check_top_k(c);
  if (v->num_groups > 1) {
    const int64_t size = v->num_experts / v->num_groups, most = v->top_groups * size;
    rm_op_multiple_of(c, "num_experts", v->num_experts, v->num_groups);
    rm_op_at_least(c, "num_experts / num_groups", size, 2);
    if (v->top_k > most)
      rm_op_refuse(c, RM_E_SHAPE, "top_k", v->top_k,
                   "at most top_groups * num_experts / num_groups =", most);
  }
  v->elems = rm_op_packed_elems(c, "w", v->num_experts, v->hidden);
}

static void at_most_groups(rm_op_call *c, rm_op_argument *top_groups) {
  top_groups->high = c->v.num_groups;
}

static const rm_op_argument router[] = {
    SIZE(num_experts, 1),
    SIZE(top_k, 0),
    FLAG(renormalize),
    CHOICE(score, RM_SCORE_SIGMOID),
    NUMBER(num_groups, SIZE, 0, 1, RM_MAX_EXPERT_GROUPS),
    {.name = "top_groups",
     .type = RM_OP_SIZE,
     .value = AT(top_groups),
     .low = 1,
     .adjust = at_most_groups},
    REAL(route_scale, 0),
    IN(x, T, n_rows, hidden),
    STEP(router_sizes),
    PACKED(w, elems),
    OPTIONAL(bias, F32, num_experts),
    OUT(ids, I32, n_rows, top_k),
    OUT(gates, F32, n_rows, top_k),
    {0},
};
RUN(router, rm_router_args, .ids = v->ids, .gates = v->gates, .x = v->x, .w = v->w, .bias = v->bias,
    .rows = v->n_rows, .hidden = v->hidden, .n_experts = v->num_experts, .top_k = v->top_k,
    .n_groups = v->num_groups, .top_groups = v->top_groups, .route_scale = v->route_scale,
    .renormalize = v->renormalize, .score = (rm_score)v->score, .dtype = v->dtype)

// ---------------------------------------------------------------------------------------- permute
static void permute_sizes(rm_op_call *c) {
  c->v.choices = rm_op_product(c, "x_out", c->v.n_rows, c->v.top_k);
  c->v.bounds = c->v.num_experts + 1;
  rm_op_in_range(c, "ids", c->v.ids, c->v.choices, 0, c->v.num_experts);
}

static const rm_op_argument permute[] = {
    SIZE(num_experts, 0),           IN(x, T, n_rows, hidden),
    IN(ids, I32, n_rows, top_k),    STEP(permute_sizes),
    OUT(x_out, T, choices, hidden), OUT(group_rows, I32, bounds),
    OUT(place, I32, n_rows, top_k), {0},
};
RUN(permute, rm_permute_args, .x_out = v->x_out, .group_rows = v->group_rows, .place = v->place,
    .x = v->x, .ids = v->ids, .rows = v->n_rows, .hidden = v->hidden, .n_experts = v->num_experts,
    .top_k = v->top_k, .dtype = v->dtype)

// ---------------------------------------------------------------------------------------- combine
// A row's experts are distinct: the tree that adds their outputs up has one leaf for each.
static void distinct_in_rows(rm_op_call *c) {
  const int32_t *ids = rm_op_seen(c, c->v.ids);
  const int64_t rows = c->v.n_rows, n = c->v.top_k;
  for (int64_t r = 0; r < rows && !c->failed; r++)
    for (int64_t i = 1; i < n && !c->failed; i++)
      for (int64_t j = 0; j < i && !c->failed; j++)
        if (ids[r * n + i] == ids[r * n + j])
          rm_op_raise(c, RM_E_REQUEST,
                      "ids: expected distinct experts in a row, got %d twice in row %lld",
                      ids[r * n + i], (long long)r);
}

static void combine_sizes(rm_op_call *c) {
  c->v.choices = rm_op_product(c, "y", c->v.n_rows, c->v.top_k);
}

static void combine_check(rm_op_call *c) {
  check_top_k(c);
  rm_op_in_range(c, "ids", c->v.ids, c->v.choices, 0, c->v.num_experts);
  rm_op_in_range(c, "place", c->v.place, c->v.choices, 0, c->v.choices);
  distinct_in_rows(c);
}

static const rm_op_argument combine[] = {
    SIZE(num_experts, 0),          IN(place, I32, n_rows, top_k), IN(ids, I32, n_rows, top_k),
    IN(gates, F32, n_rows, top_k), STEP(combine_sizes),           IN(y, T, choices, hidden),
    STEP(combine_check),           OUT(out, T, n_rows, hidden),   {0},
};
RUN(combine, rm_combine_args, .out = v->out, .y = v->y, .place = v->place, .ids = v->ids,
    .gates = v->gates, .rows = v->n_rows, .hidden = v->hidden, .n_experts = v->num_experts,
    .top_k = v->top_k, .dtype = v->dtype)

const rm_op rm_ops_moe[] = {OP(router), OP(permute), OP(combine), {0}};
