// moe.c: the mixture of experts. See ops.h.
#include "ops.h"

static void check_top_k(rm_op_call *c, int64_t top_k, int64_t n_experts) {
  const int64_t most = rm_min64(n_experts, RM_MAX_TOP_K);
  rm_op_at_least(c, "top_k", top_k, 1);
  if (top_k > most) rm_op_refuse(c, "top_k", top_k, "at most", most);
}

// ----------------------------------------------------------------------------------------- router
#define OP a.router
static void router_sizes(rm_op_call *c) {
  const rm_router_args *a = &c->OP;
  check_top_k(c, a->top_k, a->n_experts);
  if (a->n_groups > 1) {
    const int64_t size = a->n_experts / a->n_groups, most = a->top_groups * size;
    rm_op_multiple_of(c, "num_experts", a->n_experts, a->n_groups);
    rm_op_at_least(c, "num_experts / num_groups", size, 2);
    if (a->top_k > most)
      rm_op_refuse(c, "top_k", a->top_k, "at most top_groups * num_experts / num_groups =", most);
  }
  c->s.elems = rm_op_packed_elems(c, "w", a->n_experts, a->hidden);
}

static void at_most_groups(rm_op_call *c, rm_op_argument *top_groups) {
  top_groups->high = c->OP.n_groups;
}

ARGUMENTS(router) = {
    SIZE_AT(num_experts, n_experts, 1),
    SIZE(top_k, 0),
    FLAG(renormalize),
    CHOICE(score, RM_SCORE_SIGMOID),
    NUMBER(num_groups, n_groups, SIZE, 0, 1, RM_MAX_EXPERT_GROUPS),
    {.name = "top_groups",
     .type = RM_OP_SIZE,
     .value = AT(top_groups),
     .low = 1,
     .adjust = at_most_groups},
    REAL(route_scale, 0),
    REAL(min_sum, 0),
    IN(x, T, rows, hidden),
    STEP(router_sizes),
    PACKED(w, elems),
    OPTIONAL(bias, F32, n_experts),
    OPTIONAL(logit_bias, T, n_experts),
    OUT(ids, I32, rows, top_k),
    OUT(gates, F32, rows, top_k),
    LIMIT(max_k, hidden),
    LIMIT(max_rows, rows),
    LIMIT(n_experts, n_experts),
    LIMIT(top_k, top_k),
};

// ---------------------------------------------------------------------------------------- permute
#undef OP
#define OP a.permute
static void permute_sizes(rm_op_call *c) {
  const rm_permute_args *a = &c->OP;
  c->s.choices = rm_op_product(c, "x_out", a->rows, a->top_k);
  c->s.bounds = a->n_experts + 1;
}

ARGUMENTS(permute) = {
    SIZE_AT(num_experts, n_experts, 0),
    IN(x, T, rows, hidden),
    INDICES(ids, I32, 0, n_experts, rows, top_k),
    STEP(permute_sizes),
    OUT(x_out, T, choices, hidden),
    OUT(group_rows, I32, bounds),
    OUT(place, I32, rows, top_k),
    LIMIT(max_rows, rows),
    LIMIT(n_experts, n_experts),
    LIMIT(top_k, top_k),
};

// ---------------------------------------------------------------------------------------- combine
#undef OP
#define OP a.combine
// A row's experts are distinct: the tree that adds their outputs up has one leaf for each.
static void distinct_in_rows(rm_op_call *c) {
  const int32_t *ids = c->OP.ids;
  const int64_t rows = c->OP.rows, n = c->OP.top_k;
  for (int64_t r = 0; r < rows && !c->failed; r++)
    for (int64_t i = 1; i < n && !c->failed; i++)
      for (int64_t j = 0; j < i && !c->failed; j++)
        if (ids[r * n + i] == ids[r * n + j])
          rm_op_raise(c, RM_E_REQUEST,
                      "ids: expected distinct experts in a row, got %d twice in row %zd",
                      ids[r * n + i], r);
}

static void combine_sizes(rm_op_call *c) {
  const rm_combine_args *a = &c->OP;
  c->s.choices = rm_op_product(c, "y", a->rows, a->top_k);
  check_top_k(c, a->top_k, a->n_experts);
  distinct_in_rows(c);
}

ARGUMENTS(combine) = {
    SIZE_AT(num_experts, n_experts, 0),
    INDICES(ids, I32, 0, n_experts, rows, top_k),
    STEP(combine_sizes),
    INDICES(place, I32, 0, choices, rows, top_k),
    IN(gates, F32, rows, top_k),
    IN(y, T, choices, hidden),
    OUT(out, T, rows, hidden),
    LIMIT(max_rows, rows),
    LIMIT(n_experts, n_experts),
    LIMIT(top_k, top_k),
};

const rm_op rm_ops_moe[] = {OP_OF_T(router), OP_OF_T(permute), OP_OF_T(combine), {0}};
