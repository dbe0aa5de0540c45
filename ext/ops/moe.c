// moe.c: the mixture of experts. See ops.h.
#include "ops.h"

static void check_top_k(rm_op_call *c, int64_t top_k, int64_t n_experts) {
  rm_op_at_least(c, "top_k", top_k, 1);
  if (top_k > n_experts || top_k > RM_MAX_TOP_K) rm_op_refuse(c, RM_E_SHAPE, "top_k", top_k, "at most", rm_min64(n_experts, RM_MAX_TOP_K));
}

// (ids, gates, x, w, bias | None, num_experts, renormalize)
RM_KERNELS_METHOD(router) {
  OBJECTS(5);
  CALL;
  long long n_experts;
  rm_router_args a = {.rows = -1, .hidden = -1, .top_k = -1};
  if (!PyArg_ParseTuple(args, "OOOOOLp:router", &o[0], &o[1], &o[2], &o[3], &o[4], &n_experts, &a.renormalize)) return NULL;
  a.dtype = rm_op_dtype_of(&c, o[2], "x");
  a.x = rm_op_view(&c, o[2], "x", rm_op_numpy_type(a.dtype), RM_ARRAY_IN, 2, &a.rows, &a.hidden, NULL);
  rm_op_size(&c, "num_experts", n_experts, 1);
  a.n_experts = n_experts;
  int64_t elems = rm_op_packed_elems(&c, "w", n_experts, a.hidden);
  a.w = rm_op_view(&c, o[3], "w", rm_op_numpy_type(a.dtype), RM_ARRAY_PACKED, 1, &elems, NULL, NULL);
  a.bias = rm_op_view(&c, o[4], "bias", NPY_FLOAT32, RM_ARRAY_OPTIONAL, 1, &a.n_experts, NULL, NULL);
  a.ids = rm_op_view(&c, o[0], "ids", NPY_INT32, RM_ARRAY_WRITE, 2, &a.rows, &a.top_k, NULL);
  a.gates = rm_op_view(&c, o[1], "gates", NPY_FLOAT32, RM_ARRAY_WRITE, 2, &a.rows, &a.top_k, NULL);
  check_top_k(&c, a.top_k, n_experts);
  RUN(router, ((rm_limits){.max_rows = a.rows, .max_k = a.hidden, .n_experts = n_experts, .top_k = a.top_k}), &a);
}

// (x_out, group_rows, place, x, ids, num_experts)
RM_KERNELS_METHOD(permute) {
  OBJECTS(5);
  CALL;
  long long n_experts;
  rm_permute_args a = {.rows = -1, .hidden = -1, .top_k = -1};
  if (!PyArg_ParseTuple(args, "OOOOOL:permute", &o[0], &o[1], &o[2], &o[3], &o[4], &n_experts)) return NULL;
  a.dtype = rm_op_dtype_of(&c, o[3], "x");
  a.x = rm_op_view(&c, o[3], "x", rm_op_numpy_type(a.dtype), RM_ARRAY_IN, 2, &a.rows, &a.hidden, NULL);
  a.ids = rm_op_view(&c, o[4], "ids", NPY_INT32, RM_ARRAY_IN, 2, &a.rows, &a.top_k, NULL);
  rm_op_size(&c, "num_experts", n_experts, 0);
  int64_t choices = rm_op_product(&c, "x_out", a.rows, a.top_k), bounds = c.failed ? 0 : n_experts + 1;
  a.x_out = rm_op_view(&c, o[0], "x_out", rm_op_numpy_type(a.dtype), RM_ARRAY_WRITE, 2, &choices, &a.hidden, NULL);
  a.group_rows = rm_op_view(&c, o[1], "group_rows", NPY_INT32, RM_ARRAY_WRITE, 1, &bounds, NULL, NULL);
  a.place = rm_op_view(&c, o[2], "place", NPY_INT32, RM_ARRAY_WRITE, 2, &a.rows, &a.top_k, NULL);
  rm_op_in_range(&c, "ids", a.ids, choices, 0, n_experts);
  a.n_experts = n_experts;
  RUN(permute, ((rm_limits){.max_rows = a.rows, .max_k = a.hidden, .n_experts = n_experts, .top_k = a.top_k}), &a);
}

// A row's experts are distinct: the tree that adds their outputs up has one leaf for each.
static void distinct_in_rows(rm_op_call *c, const int32_t *ids, int64_t rows, int64_t n) {
  ids = rm_op_seen(c, ids);
  for (int64_t r = 0; r < rows && !c->failed; r++)
    for (int64_t i = 1; i < n && !c->failed; i++)
      for (int64_t j = 0; j < i && !c->failed; j++)
        if (ids[r * n + i] == ids[r * n + j]) {
          rm_raise_code(c->module, RM_E_REQUEST, "row %lld of ids has expert %d twice, wanted distinct ones", (long long)r, ids[r * n + i]);
          c->failed = 1;
        }
}

// (out, y, place, ids, gates, num_experts)
RM_KERNELS_METHOD(combine) {
  OBJECTS(5);
  CALL;
  long long n_experts;
  rm_combine_args a = {.rows = -1, .hidden = -1, .top_k = -1};
  if (!PyArg_ParseTuple(args, "OOOOOL:combine", &o[0], &o[1], &o[2], &o[3], &o[4], &n_experts)) return NULL;
  a.dtype = rm_op_dtype_of(&c, o[1], "y");
  a.place = rm_op_view(&c, o[2], "place", NPY_INT32, RM_ARRAY_IN, 2, &a.rows, &a.top_k, NULL);
  a.ids = rm_op_view(&c, o[3], "ids", NPY_INT32, RM_ARRAY_IN, 2, &a.rows, &a.top_k, NULL);
  a.gates = rm_op_view(&c, o[4], "gates", NPY_FLOAT32, RM_ARRAY_IN, 2, &a.rows, &a.top_k, NULL);
  rm_op_size(&c, "num_experts", n_experts, 0);
  int64_t choices = rm_op_product(&c, "y", a.rows, a.top_k);
  a.y = rm_op_view(&c, o[1], "y", rm_op_numpy_type(a.dtype), RM_ARRAY_IN, 2, &choices, &a.hidden, NULL);
  a.out = rm_op_view(&c, o[0], "out", rm_op_numpy_type(a.dtype), RM_ARRAY_WRITE, 2, &a.rows, &a.hidden, NULL);
  check_top_k(&c, a.top_k, n_experts);
  rm_op_in_range(&c, "ids", a.ids, choices, 0, n_experts);
  rm_op_in_range(&c, "place", a.place, choices, 0, choices);
  distinct_in_rows(&c, a.ids, a.rows, a.top_k);
  a.n_experts = n_experts;
  RUN(combine, ((rm_limits){.max_rows = a.rows, .max_k = a.hidden, .n_experts = n_experts, .top_k = a.top_k}), &a);
}
