// travel.c: the block where rows go to the ranks of their experts and come back (dispatch.h), each rank computing what has come to it.
#include "model/moe/moe.h"

// rows: T [rows that came][hidden], inputs, then outputs.
static void compute(rm_moe *moe, const rm_ctx *ctx, const rm_layer_params *layer, const char *weights, char *rows) {
  const rm_dispatch_plan *plan = moe->plan;
  rm_gemm_args up = rm_moe_up(moe, layer, weights, plan->group_rows, plan->n_arrive);
  rm_gemm_args down = rm_moe_down(moe, layer, weights, plan->group_rows, plan->n_arrive);
  if (!plan->n_arrive) return;
  up.x = down.y = rows;
  up.y = moe->inner;
  down.x = moe->inner;
  moe->kernels->gemm_swiglu(ctx, &up);
  moe->kernels->gemm(ctx, &down);
}

rm_code rm_moe_travel(rm_moe *moe, const rm_ctx *ctx, const rm_layer_params *layer, const char *weights, const char *x, char *out,
                      int64_t rows, int16_t *routed, int64_t routed_stride, rm_error *err) {
  const size_t bytes = (size_t)moe->spec->hidden_size * rm_dtype_bytes(moe->dtype);
  char *here, *choices;
  rm_code code;
  rm_moe_route(moe, ctx, layer, weights, x, rows, routed, routed_stride);
  if ((code = rm_dispatch_plan_fill(moe->dispatch, moe->plan, moe->ids, rows, err))) return code;
  if ((code = rm_dispatch_out(moe->dispatch, ctx, moe->plan, x, bytes, &here, err))) return code;
  compute(moe, ctx, layer, weights, here);
  if ((code = rm_dispatch_back(moe->dispatch, ctx, moe->plan, here, bytes, &choices, err))) return code;
  rm_moe_combine(moe, ctx, out, choices, moe->plan->place, moe->spec->hidden_size, rows);
  return RM_OK;
}
