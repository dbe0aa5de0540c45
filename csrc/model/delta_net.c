// delta_net.c: the kind "delta_net": linear attention by the gated delta rule, with one state for
// each sequence. A gemm computes q, k, v, z, b and a of this rank's heads, the op delta_net
// computes the block from the convolution to the gated norm, and a second gemm computes the output.
// Padding rows have the number of a real sequence (step/forward.c). They read its state, but do not
// save one, so the result of the sequence does not change.
#include "model/layer_kinds.h"

rm_layer_bytes rm_delta_net_bytes(const rm_model *model, const rm_placement *here) {
  const rm_spec *spec = model->spec;
  return (rm_layer_bytes){.state = (size_t)rm_delta_state_bytes(
                              here->delta_heads.n, spec->delta_k_dim, spec->delta_v_dim,
                              spec->delta_kernel, model->options.dtype)};
}

rm_code rm_delta_net_forward(const rm_pass *pass, const rm_layer_cache *cache) {
  rm_model *model = pass->model;
  const rm_spec *spec = model->spec;
  const rm_batch *batch = pass->batch;
  const rm_placement *here = &model->params->placement;
  const int64_t group = rm_delta_group(spec);
  RM_TRY(rm_complete_rows(pass));
  const rm_delta_net_args args = {
      .out = model->q,
      .x = model->qkv,
      .conv = rm_weight(pass->weights, pass->layer, RM_P_CONV_Q),
      .a_log = (const float *)rm_weight(pass->weights, pass->layer, RM_P_A_LOG),
      .dt_bias = (const float *)rm_weight(pass->weights, pass->layer, RM_P_DT_BIAS),
      .norm = rm_weight(pass->weights, pass->layer, RM_P_DELTA_NORM),
      .states = cache->states,
      .load_slots = rm_on_device(pass, batch->load_states),
      .save_slots = rm_on_device(pass, batch->save_states),
      .seq_of_row = rm_on_device(pass, batch->seq_of_row),
      .rows = pass->rows,
      .n_seqs = batch->n_seqs,
      .n_k_heads = here->delta_k_heads.n,
      .n_v_heads = here->delta_heads.n,
      .k_dim = spec->delta_k_dim,
      .v_dim = spec->delta_v_dim,
      .kernel = spec->delta_kernel,
      .group = group,
      .head0 = here->delta_heads.first % group,
      .eps = spec->rms_norm_eps,
      .dtype = model->options.dtype,
  };
  rm_linear(pass, RM_P_DELTA_Q, model->x, model->qkv);
  if (pass->rows) model->kernels->delta_net(&model->ctx, &args);
  return rm_project_output(pass, RM_DIM_DELTA_V, model->q, RM_P_DELTA_OUT);
}
