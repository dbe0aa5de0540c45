// moe.c: see moe.h. Weights stay in place and rows move: at top-8 of 128 a row meets 6 % of the experts, and sorting rows
// by expert makes of them one gemm per expert that was chosen, whose weights are read once a batch.
#include "model/moe/moe.h"

void rm_moe_fields(rm_moe *moe, int64_t max_rows, rm_field fields[RM_MOE_FIELDS]) {
  const rm_spec *spec = moe->spec;
  const size_t choices = (size_t)(max_rows * spec->top_k), elem = rm_dtype_bytes(moe->dtype);
  const rm_field all[RM_MOE_FIELDS] = {
      {&moe->ids, choices, sizeof *moe->ids},
      {&moe->gates, choices, sizeof *moe->gates},
      {&moe->place, choices, sizeof *moe->place},
      {&moe->group_rows, (size_t)spec->n_experts + 1, sizeof *moe->group_rows},
      {&moe->sorted, choices, (size_t)spec->hidden_size * elem},
      {&moe->inner, choices, (size_t)spec->moe_intermediate_size * elem},
  };
  memcpy(fields, all, sizeof all);
}

static void route(rm_moe *moe, const rm_ctx *ctx, const rm_layer_params *layer, const char *weights, const void *x, int64_t rows) {
  const rm_spec *spec = moe->spec;
  const rm_router_args args = {
      .ids = moe->ids,
      .gates = moe->gates,
      .x = x,
      .w = weights + layer->router,
      .bias = layer->router_bias == SIZE_MAX ? NULL : (const float *)(weights + layer->router_bias),
      .rows = rows,
      .hidden = spec->hidden_size,
      .n_experts = spec->n_experts,
      .top_k = spec->top_k,
      .renormalize = spec->norm_topk_prob,
      .dtype = moe->dtype,
  };
  moe->kernels->router(ctx, &args);
}

static void dispatch(rm_moe *moe, const rm_ctx *ctx, const void *x, int64_t rows) {
  const rm_permute_args args = {
      .x_out = moe->sorted,
      .group_rows = moe->group_rows,
      .place = moe->place,
      .x = x,
      .ids = moe->ids,
      .rows = rows,
      .hidden = moe->spec->hidden_size,
      .n_experts = moe->spec->n_experts,
      .top_k = moe->spec->top_k,
      .dtype = moe->dtype,
  };
  moe->kernels->permute(ctx, &args);
}

static void experts(rm_moe *moe, const rm_ctx *ctx, const rm_layer_params *layer, const char *weights, int64_t rows) {
  const int64_t hidden = moe->spec->hidden_size, width = moe->spec->moe_intermediate_size;
  rm_gemm_args args = {
      .y = moe->inner,
      .x = moe->sorted,
      .w = weights + layer->expert_gate_up,
      .group_rows = moe->group_rows,
      .n_groups = moe->spec->n_experts,
      .group_stride = layer->expert_gate_up_stride,
      .m = rows * moe->spec->top_k,
      .n = width,
      .k = hidden,
      .ldx = hidden,
      .ldy = width,
      .dtype = moe->dtype,
      .y_dtype = moe->dtype,
  };
  moe->kernels->gemm_swiglu(ctx, &args);
  args.y = moe->sorted;   // the inputs are not needed again
  args.x = moe->inner;
  args.w = weights + layer->expert_down;
  args.group_stride = layer->expert_down_stride;
  args.n = args.ldy = hidden;
  args.k = args.ldx = width;
  moe->kernels->gemm(ctx, &args);
}

static void combine(rm_moe *moe, const rm_ctx *ctx, void *x, int64_t rows) {
  const rm_combine_args args = {
      .out = x,
      .y = moe->sorted,
      .place = moe->place,
      .ids = moe->ids,
      .gates = moe->gates,
      .rows = rows,
      .hidden = moe->spec->hidden_size,
      .n_experts = moe->spec->n_experts,
      .top_k = moe->spec->top_k,
      .dtype = moe->dtype,
  };
  moe->kernels->combine(ctx, &args);
}

void rm_moe_forward(rm_moe *moe, const rm_ctx *ctx, const rm_layer_params *layer, const void *weights, void *x, int64_t rows,
                    int16_t *routed, int64_t routed_stride) {
  const int64_t top_k = moe->spec->top_k;
  route(moe, ctx, layer, weights, x, rows);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < top_k; i++) routed[r * routed_stride + i] = (int16_t)moe->ids[r * top_k + i];
  dispatch(moe, ctx, x, rows);
  experts(moe, ctx, layer, weights, rows);
  combine(moe, ctx, x, rows);
}
