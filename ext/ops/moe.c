// moe.c: the mixture of experts. See ops.h.
#include "ops.h"

static void check_top_k(rm_op_call *c, int64_t top_k, int64_t n_experts) {
  rm_op_at_least(c, "top_k", top_k, 1);
  if (top_k > n_experts || top_k > RM_MAX_TOP_K)
    rm_op_refuse(c, RM_E_SHAPE, "top_k", top_k, "at most", rm_min64(n_experts, RM_MAX_TOP_K));
}

static void check_groups(rm_op_call *c, const rm_router_args *a) {
  if (c->failed || a->n_groups == 1) return;
  rm_op_multiple_of(c, "num_experts", a->n_experts, a->n_groups);
  const int64_t size = a->n_experts / a->n_groups;
  rm_op_at_least(c, "num_experts / num_groups", size, 2);
  if (a->top_k > a->top_groups * size)
    rm_op_refuse(c, RM_E_SHAPE, "top_k", a->top_k,
                 "at most top_groups * num_experts / num_groups =", a->top_groups * size);
}

// (ids, gates, x, w, bias | None, num_experts, renormalize, sigmoid, num_groups, top_groups,
// route_scale)
RM_KERNELS_METHOD(router) {
  CALL(11);
  rm_router_args a = {.rows = -1,
                      .hidden = -1,
                      .top_k = -1,
                      .renormalize = o[6] == Py_True,
                      .score = o[7] == Py_True ? RM_SCORE_SIGMOID : RM_SCORE_SOFTMAX};
  a.n_experts = rm_op_size_of(&c, o[5], "num_experts", 1);
  a.dtype = rm_op_dtype_of(&c, o[2], "x");
  a.x = VIEW(&c, o[2], "x", rm_op_numpy_type(a.dtype), RM_ARRAY_IN, &a.rows, &a.hidden);
  int64_t elems = rm_op_packed_elems(&c, "w", a.n_experts, a.hidden);
  a.w = VIEW(&c, o[3], "w", rm_op_numpy_type(a.dtype), RM_ARRAY_PACKED, &elems);
  a.bias = VIEW(&c, o[4], "bias", NPY_FLOAT32, RM_ARRAY_OPTIONAL, &a.n_experts);
  a.ids = VIEW(&c, o[0], "ids", NPY_INT32, RM_ARRAY_WRITE, &a.rows, &a.top_k);
  a.gates = VIEW(&c, o[1], "gates", NPY_FLOAT32, RM_ARRAY_WRITE, &a.rows, &a.top_k);
  a.n_groups = rm_op_integer(&c, o[8], "num_groups", 1, RM_MAX_EXPERT_GROUPS);
  a.top_groups = rm_op_integer(&c, o[9], "top_groups", 1, a.n_groups);
  a.route_scale = rm_op_real(&c, o[10], "route_scale", 0);
  check_top_k(&c, a.top_k, a.n_experts);
  check_groups(&c, &a);
  RUN(router,
      ((rm_limits){
          .max_rows = a.rows, .max_k = a.hidden, .n_experts = a.n_experts, .top_k = a.top_k}),
      &a);
}

// (x_out, group_rows, place, x, ids, num_experts)
RM_KERNELS_METHOD(permute) {
  CALL(6);
  rm_permute_args a = {.rows = -1,
                       .hidden = -1,
                       .top_k = -1,
                       .n_experts = rm_op_size_of(&c, o[5], "num_experts", 0)};
  a.dtype = rm_op_dtype_of(&c, o[3], "x");
  a.x = VIEW(&c, o[3], "x", rm_op_numpy_type(a.dtype), RM_ARRAY_IN, &a.rows, &a.hidden);
  a.ids = VIEW(&c, o[4], "ids", NPY_INT32, RM_ARRAY_IN, &a.rows, &a.top_k);
  int64_t choices = rm_op_product(&c, "x_out", a.rows, a.top_k),
          bounds = c.failed ? 0 : a.n_experts + 1;
  a.x_out = VIEW(&c, o[0], "x_out", rm_op_numpy_type(a.dtype), RM_ARRAY_WRITE, &choices, &a.hidden);
  a.group_rows = VIEW(&c, o[1], "group_rows", NPY_INT32, RM_ARRAY_WRITE, &bounds);
  a.place = VIEW(&c, o[2], "place", NPY_INT32, RM_ARRAY_WRITE, &a.rows, &a.top_k);
  rm_op_in_range(&c, "ids", a.ids, choices, 0, a.n_experts);
  RUN(permute,
      ((rm_limits){
          .max_rows = a.rows, .max_k = a.hidden, .n_experts = a.n_experts, .top_k = a.top_k}),
      &a);
}

// A row's experts are distinct: the tree that adds their outputs up has one leaf for each.
static void distinct_in_rows(rm_op_call *c, const int32_t *ids, int64_t rows, int64_t n) {
  ids = rm_op_seen(c, ids);
  for (int64_t r = 0; r < rows && !c->failed; r++)
    for (int64_t i = 1; i < n && !c->failed; i++)
      for (int64_t j = 0; j < i && !c->failed; j++)
        if (ids[r * n + i] == ids[r * n + j]) {
          rm_raise_code(c->module, RM_E_REQUEST,
                        "ids: expected distinct experts in a row, got %d twice in row %lld",
                        ids[r * n + i], (long long)r);
          c->failed = 1;
        }
}

// (out, y, place, ids, gates, num_experts)
RM_KERNELS_METHOD(combine) {
  CALL(6);
  rm_combine_args a = {.rows = -1,
                       .hidden = -1,
                       .top_k = -1,
                       .n_experts = rm_op_size_of(&c, o[5], "num_experts", 0)};
  a.dtype = rm_op_dtype_of(&c, o[1], "y");
  a.place = VIEW(&c, o[2], "place", NPY_INT32, RM_ARRAY_IN, &a.rows, &a.top_k);
  a.ids = VIEW(&c, o[3], "ids", NPY_INT32, RM_ARRAY_IN, &a.rows, &a.top_k);
  a.gates = VIEW(&c, o[4], "gates", NPY_FLOAT32, RM_ARRAY_IN, &a.rows, &a.top_k);
  int64_t choices = rm_op_product(&c, "y", a.rows, a.top_k);
  a.y = VIEW(&c, o[1], "y", rm_op_numpy_type(a.dtype), RM_ARRAY_IN, &choices, &a.hidden);
  a.out = VIEW(&c, o[0], "out", rm_op_numpy_type(a.dtype), RM_ARRAY_WRITE, &a.rows, &a.hidden);
  check_top_k(&c, a.top_k, a.n_experts);
  rm_op_in_range(&c, "ids", a.ids, choices, 0, a.n_experts);
  rm_op_in_range(&c, "place", a.place, choices, 0, choices);
  distinct_in_rows(&c, a.ids, a.rows, a.top_k);
  RUN(combine,
      ((rm_limits){
          .max_rows = a.rows, .max_k = a.hidden, .n_experts = a.n_experts, .top_k = a.top_k}),
      &a);
}
