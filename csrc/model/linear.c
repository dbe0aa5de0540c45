// linear.c: the linear layers: the arguments of each gemm, and the choice between the op table (the
// contract's order of sums) and cuBLASLt (for plain params). Experts, the router and lm_head always
// use the op table.
#include "model/model_internal.h"

static rm_gemm_args args_of(const rm_pass *pass, rm_param_kind kind, const void *x, char *y) {
  const rm_model *model = pass->model;
  const rm_params *params = model->params;
  const rm_dim dim = rm_kinds[kind].rows;
  const rm_range mine = params->placement.dims[dim];
  const int64_t k = params->whole.dims[rm_kinds[kind].cols].n;
  rm_gemm_args args = {.y = y + (size_t)mine.first * model->shard.elem,
                       .x = x,
                       .w = rm_weight(pass->weights, pass->layer, kind),
                       .m = pass->rows,
                       .n = mine.n,
                       .k = k,
                       .ldx = k,
                       .ldy = params->whole.dims[dim].n,
                       .activation = params->spec->activation,
                       .alpha = params->spec->swiglu_alpha,
                       .limit = params->spec->swiglu_limit,
                       .dtype = params->dtype,
                       .y_dtype = params->dtype};
  if (kind == RM_P_Q || kind == RM_P_O)
    args.bias = rm_weight(pass->weights, pass->layer, kind == RM_P_Q ? RM_P_Q_BIAS : RM_P_O_BIAS);
  if (kind == RM_P_Q || kind == RM_P_ATTN_GATE || kind == RM_P_DELTA_Q) {
    args.y = y;
    args.n = args.ldy = kind == RM_P_Q         ? rm_qkv_width(params)
                        : kind == RM_P_DELTA_Q ? rm_delta_width(params)
                                               : mine.n;
  }
  if (kind == RM_P_Q_B || kind == RM_P_KV_A) {
    args.y = y;
    args.ldy = rm_qkv_width(params);
  }
  return args;
}

static int is_swiglu(rm_param_kind kind) { return kind == RM_P_GATE || kind == RM_P_SHARED_GATE; }

void rm_linear(const rm_pass *pass, rm_param_kind kind, const void *x, char *y) {
  rm_model *model = pass->model;
  const rm_kernels *kernels = model->kernels;
  const rm_vendor_gemm *vendor = &model->vendor_gemm;
  const rm_gemm_args args = args_of(pass, kind, x, y);
  if (!args.m || !args.n) return;
  if (vendor->self && rm_kind_is_dense(kind))
    (is_swiglu(kind) ? vendor->gemm_swiglu : vendor->gemm)(vendor->self, &args);
  else (is_swiglu(kind) ? kernels->gemm_swiglu : kernels->gemm)(&model->ctx, &args);
}

// --------------------------------------------------------------------------------------- cuBLASLt
// Lists the shapes of the dense gemms, which are the same in all layers that have them. Returns
// their number.
static int list_shapes(rm_model *model, rm_gemm_shape list[RM_MAX_GEMM_SHAPES]) {
  static const rm_param_kind kinds[] = {RM_P_Q,  RM_P_ATTN_GATE, RM_P_O,       RM_P_GATE,
                                        RM_P_UP, RM_P_DOWN,      RM_P_DELTA_Q, RM_P_DELTA_OUT};
  const rm_spec *spec = model->spec;
  int n = 0;
  // Only the shapes are used, and whether a bias is NULL.
  char *nowhere = (char *)RM_FIELD_ALIGN;
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
    const rm_layer_params *layer = model->params->layers, *last = layer + spec->n_layers - 1;
    while (layer < last && layer->of[kinds[i]].offset == SIZE_MAX) layer++;
    const rm_pass pass = {.model = model, .weights = nowhere, .rows = 1, .layer = layer};
    const rm_gemm_args args = args_of(&pass, kinds[i], nowhere, nowhere);
    if (!args.w || !args.n || (kinds[i] == RM_P_UP && !spec->ungated)) continue;
    list[n++] =
        (rm_gemm_shape){args.n, args.k, args.ldx, args.ldy, args.bias != NULL, is_swiglu(kinds[i])};
  }
  return n;
}

size_t rm_model_gemm_workspace(rm_model *model) {
  rm_gemm_shape list[RM_MAX_GEMM_SHAPES];
  return model->params->plain
             ? rm_vendor_gemm_workspace(list, list_shapes(model, list), model->options.max_rows)
             : 0;
}

rm_code rm_open_vendor_gemm(rm_model *model, rm_error *err) {
  rm_gemm_shape list[RM_MAX_GEMM_SHAPES];
  const rm_device *device = model->device;
  const rm_vendor_gemm_options options = {.library = model->options.cublas_library,
                                          .list = list,
                                          .n = list_shapes(model, list),
                                          .max_rows = model->options.max_rows,
                                          .choice = RM_VENDOR_GEMM_FREE,
                                          .workspace = model->vendor_gemm_workspace,
                                          .workspace_bytes = rm_model_gemm_workspace(model)};
  const char *why = device->open_vendor_gemm(device, &options, &model->vendor_gemm);
  model->options.cublas_library = NULL; // the caller may free it now
  return why ? rm_fail(err, RM_E_CONFIG, "fast=True: %s: %s", device->name, why) : RM_OK;
}
