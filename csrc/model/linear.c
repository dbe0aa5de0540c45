// linear.c: the dense linear layers: arguments of each gemm, and the choice between the op table
// (the contract's order of sums) and cuBLASLt (for plain params). Experts, the router and lm_head
// always use the op table.
//
// y is a whole matrix, of which a rank writes its own columns.
#include "model/model_internal.h"

static rm_gemm_args gated(const rm_model *model, rm_gemm_args args) {
  args.activation = model->spec->activation;
  return args;
}

static rm_gemm_args linear(const rm_model *model, rm_cut cut, char *y, const void *x, const char *w,
                           int64_t m, int64_t k) {
  const rm_range mine = model->shard.cuts[cut][model->shard.me];
  return (rm_gemm_args){.y = y + (size_t)mine.first * model->shard.elem,
                        .x = x,
                        .w = w,
                        .m = m,
                        .n = mine.n,
                        .k = k,
                        .ldx = k,
                        .ldy = model->shard.widths[cut],
                        .dtype = model->options.dtype,
                        .y_dtype = model->options.dtype};
}

// A gemm of model->x whose n columns fill the rows of y.
static rm_gemm_args compact(const rm_model *model, char *y, const char *w, const char *bias,
                            int64_t m, int64_t n) {
  const int64_t hidden = model->spec->hidden_size;
  return (rm_gemm_args){.y = y,
                        .x = model->x,
                        .w = w,
                        .bias = bias,
                        .m = m,
                        .n = n,
                        .k = hidden,
                        .ldx = hidden,
                        .ldy = n,
                        .dtype = model->options.dtype,
                        .y_dtype = model->options.dtype};
}

rm_gemm_args rm_qkv_gemm(const rm_model *model, const rm_layer_params *layer, const char *weights,
                         int64_t m) {
  const rm_placement *here = &model->params->placement;
  const int64_t width = (here->heads.n + 2 * here->kv_heads.n) * model->spec->head_dim;
  return compact(model, model->qkv, weights + layer->qkv,
                 rm_param_or_null(weights, layer->qkv_bias), m, width);
}

rm_gemm_args rm_o_proj_gemm(const rm_model *model, const rm_layer_params *layer,
                            const char *weights, int64_t m) {
  const char *whole = model->shard.comm ? model->attended : model->qkv;
  const int64_t width = model->spec->n_heads * model->spec->head_dim;
  rm_gemm_args args = linear(model, RM_CUT_HIDDEN, model->x, whole, weights + layer->o, m, width);
  args.bias = rm_param_or_null(weights, layer->o_bias);
  return args;
}

rm_gemm_args rm_gate_up_gemm(const rm_model *model, const rm_layer_params *layer,
                             const char *weights, int64_t m) {
  return gated(model, linear(model, RM_CUT_INNER, model->inner, model->x, weights + layer->gate_up,
                             m, model->spec->hidden_size));
}

rm_gemm_args rm_down_gemm(const rm_model *model, const rm_layer_params *layer, const char *weights,
                          int64_t m) {
  return linear(model, RM_CUT_HIDDEN, model->x, model->inner, weights + layer->down, m,
                model->spec->intermediate_size);
}

rm_gemm_args rm_shared_gate_up_gemm(const rm_model *model, const rm_layer_params *layer,
                                    const char *weights, int64_t m) {
  const int64_t hidden = model->spec->hidden_size;
  return gated(model, linear(model, RM_CUT_SHARED_INNER, model->inner, model->x,
                             weights + layer->shared_gate_up, m, hidden));
}

rm_gemm_args rm_shared_down_gemm(const rm_model *model, const rm_layer_params *layer,
                                 const char *weights, int64_t m) {
  const int64_t width = model->spec->shared_intermediate_size;
  return linear(model, RM_CUT_HIDDEN, model->shared, model->inner, weights + layer->shared_down, m,
                width);
}

rm_gemm_args rm_shared_switch_gemm(const rm_model *model, const rm_layer_params *layer,
                                   const char *weights, int64_t m) {
  return compact(model, model->shared_switch, weights + layer->shared_switch, NULL, m, 1);
}

void rm_multiply(rm_model *model, const rm_gemm_args *args) {
  if (!args->m || !args->n) return;
  if (model->vendor_gemm.self) model->vendor_gemm.gemm(model->vendor_gemm.self, args);
  else model->kernels->gemm(&model->ctx, args);
}

void rm_multiply_swiglu(rm_model *model, const rm_gemm_args *args) {
  if (!args->m || !args->n) return;
  if (model->vendor_gemm.self) model->vendor_gemm.gemm_swiglu(model->vendor_gemm.self, args);
  else model->kernels->gemm_swiglu(&model->ctx, args);
}

// --------------------------------------------------------------------------------------- cuBLASLt
static void add_shape(rm_gemm_shape list[RM_MAX_GEMM_SHAPES], int *n, const rm_gemm_args *args,
                      int swiglu) {
  const rm_gemm_shape one = {args->n, args->k, args->ldx, args->ldy, args->bias != NULL, swiglu};
  if (one.n) list[(*n)++] = one;
}

// Lists the shapes of the dense gemms, which are the same in all layers. Returns their number.
static int list_shapes(const rm_model *model, rm_gemm_shape list[RM_MAX_GEMM_SHAPES]) {
  int64_t dense = 0;
  int n = 0;
  while (dense < model->spec->n_layers && model->spec->layers[dense].is_moe) dense++;
  const rm_layer_params *any = &model->params->layers[0],
                        *layer =
                            dense < model->spec->n_layers ? &model->params->layers[dense] : NULL;
  // Only the shapes are used, and whether a bias is NULL.
  const char *nowhere = (const char *)RM_FIELD_ALIGN;
  const rm_gemm_args qkv = rm_qkv_gemm(model, any, nowhere, 1),
                     back = rm_o_proj_gemm(model, any, nowhere, 1);
  add_shape(list, &n, &qkv, 0);
  add_shape(list, &n, &back, 0);
  if (!layer) return n;
  const rm_gemm_args in = rm_gate_up_gemm(model, layer, nowhere, 1),
                     down = rm_down_gemm(model, layer, nowhere, 1);
  add_shape(list, &n, &in, !model->spec->ungated);
  add_shape(list, &n, &down, 0);
  return n;
}

size_t rm_model_gemm_workspace(const rm_model *model) {
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
