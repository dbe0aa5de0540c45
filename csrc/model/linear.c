// linear.c: the dense linear layers: arguments of each gemm, and the choice between the op table (the contract's sums) and the
// vendor's library (cuBLASLt, where params are plain). Experts, the router and lm_head always use the op table.
//
// y is a whole matrix, of which a rank writes its own columns.
#include "model/model_internal.h"

static rm_gemm_args linear(const rm_model *model, rm_cut cut, char *y, const void *x, int64_t m, int64_t k) {
  const rm_range mine = model->shard.cuts[cut][model->shard.me];
  return (rm_gemm_args){.y = y + (size_t)mine.first * model->shard.elem,
                        .x = x,
                        .m = m,
                        .n = mine.n,
                        .k = k,
                        .ldx = k,
                        .ldy = model->shard.widths[cut],
                        .dtype = model->options.dtype,
                        .y_dtype = model->options.dtype};
}

static const char *optional(const char *weights, size_t offset) { return offset == SIZE_MAX ? NULL : weights + offset; }

rm_gemm_args rm_qkv_gemm(const rm_model *model, const rm_layer_params *layer, const char *weights, int64_t m) {
  const rm_placement *here = &model->params->placement;
  const int64_t width = (here->heads.n + 2 * here->kv_heads.n) * model->spec->head_dim, hidden = model->spec->hidden_size;
  return (rm_gemm_args){.y = model->qkv,
                        .x = model->x,
                        .w = weights + layer->qkv,
                        .bias = optional(weights, layer->qkv_bias),
                        .m = m,
                        .n = width,
                        .k = hidden,
                        .ldx = hidden,
                        .ldy = width,
                        .dtype = model->options.dtype,
                        .y_dtype = model->options.dtype};
}

rm_gemm_args rm_o_proj_gemm(const rm_model *model, const rm_layer_params *layer, const char *weights, int64_t m) {
  const char *whole = model->shard.comm ? model->attended : model->qkv;
  rm_gemm_args args = linear(model, RM_CUT_HIDDEN, model->x, whole, m, model->spec->n_heads * model->spec->head_dim);
  args.w = weights + layer->o;
  args.bias = optional(weights, layer->o_bias);
  return args;
}

rm_gemm_args rm_gate_up_gemm(const rm_model *model, const rm_layer_params *layer, const char *weights, int64_t m) {
  rm_gemm_args args = linear(model, RM_CUT_INNER, model->inner, model->x, m, model->spec->hidden_size);
  args.w = weights + layer->gate_up;
  return args;
}

rm_gemm_args rm_down_gemm(const rm_model *model, const rm_layer_params *layer, const char *weights, int64_t m) {
  rm_gemm_args args = linear(model, RM_CUT_HIDDEN, model->x, model->inner, m, model->spec->intermediate_size);
  args.w = weights + layer->down;
  return args;
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

// ---------------------------------------------------------------------------------------------- the library
static void name(rm_gemm_shape list[RM_MAX_GEMM_SHAPES], int *n, const rm_gemm_args *args, int swiglu) {
  const rm_gemm_shape one = {args->n, args->k, args->ldx, args->ldy, args->bias != NULL, swiglu};
  if (one.n) list[(*n)++] = one;
}

// Lists the shapes of the dense gemms, which are the same in all layers. Returns their number.
static int name_all(const rm_model *model, rm_gemm_shape list[RM_MAX_GEMM_SHAPES]) {
  int64_t dense = 0;
  int n = 0;
  while (dense < model->spec->n_layers && model->spec->layers[dense].is_moe) dense++;
  const rm_layer_params *any = &model->params->layers[0], *layer = dense < model->spec->n_layers ? &model->params->layers[dense] : NULL;
  const char *nowhere = (const char *)RM_FIELD_ALIGN;   // only shapes are read, and whether a bias is NULL
  const rm_gemm_args qkv = rm_qkv_gemm(model, any, nowhere, 1), back = rm_o_proj_gemm(model, any, nowhere, 1);
  name(list, &n, &qkv, 0);
  name(list, &n, &back, 0);
  if (!layer) return n;
  const rm_gemm_args in = rm_gate_up_gemm(model, layer, nowhere, 1), down = rm_down_gemm(model, layer, nowhere, 1);
  name(list, &n, &in, 1);
  name(list, &n, &down, 0);
  return n;
}

size_t rm_model_gemm_workspace(const rm_model *model) {
  rm_gemm_shape list[RM_MAX_GEMM_SHAPES];
  return model->params->plain ? rm_vendor_gemm_workspace(list, name_all(model, list), model->options.max_rows) : 0;
}

rm_code rm_open_vendor_gemm(rm_model *model, rm_error *err) {
  rm_gemm_shape list[RM_MAX_GEMM_SHAPES];
  const rm_device *device = model->device;
  const rm_vendor_gemm_options options = {.library = model->options.cublas_library,
                                          .list = list,
                                          .n = name_all(model, list),
                                          .max_rows = model->options.max_rows,
                                          .choice = RM_VENDOR_GEMM_FREE,
                                          .workspace = model->vendor_gemm_workspace,
                                          .workspace_bytes = rm_model_gemm_workspace(model)};
  const char *why = device->open_vendor_gemm(device, &options, &model->vendor_gemm);
  model->options.cublas_library = NULL;   // the caller's
  return why ? rm_fail(err, RM_E_CONFIG, "fast=True: %s: %s", device->name, why) : RM_OK;
}
