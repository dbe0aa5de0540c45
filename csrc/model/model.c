// model.c: the forward pass. One function per block of a layer, each a few calls of the op table,
// which does all arithmetic. All rows of a step are computed together. Only attention reads other
// rows of a sequence, and every op computes a row independently of the batch, so batching does not
// change the result.
//
// A matmul writes this rank's columns of a whole matrix; shard.h then completes the rows. Ranks
// never exchange partial sums, so a mesh is bit-identical to one rank.
//
// Buffers: `residual` is the residual stream, `x` the input of a block and then its output. With
// sequence parallelism residual has this rank's home rows only, and a block's output goes to
// `home`. out_rows are selected only before the final norm, since the routing of every row is
// recorded.
#include "model/layer_kinds.h"

int rm_model_is_static(const rm_model *model, int64_t rows) {
  rm_comm *const comms[] = {model->shard.comm, model->moe.ep};
  for (int i = 0; i < 2; i++)
    if (comms[i] && (rows > model->options.static_rows || !rm_comm_can_be_captured(comms[i])))
      return 0;
  return 1;
}

// ------------------------------------------------------------------------------------------- rows
// out[i] ← x[from[i]], rows of hidden elements. out and x must not overlap.
static void gather(rm_model *model, void *out, const void *x, const int32_t *from, int64_t rows) {
  const rm_gather_rows_args args = {out, x, from, rows, rm_row_bytes(model)};
  if (rows) model->kernels->gather_rows(&model->ctx, &args);
}

static void look_up(const rm_pass *pass, void *out, const int32_t *ids, int64_t rows) {
  rm_model *model = pass->model;
  const rm_embed_args args = {
      .out = out,
      .ids = ids,
      .table = rm_weight(pass->weights, &model->params->ends, RM_P_EMBED),
      .packed = model->spec->tie_word_embeddings,
      .rows = rows,
      .hidden = model->spec->hidden_size,
      .dtype = model->options.dtype,
      .scale = model->options.dtype == RM_BF16 ? model->spec->embed_scale_bf16
                                               : model->spec->embed_scale,
  };
  if (rows) model->kernels->embed(&model->ctx, &args);
}

// Copies n indices that rm_model_prepare has computed to the device. It records no event, since the
// copy may be captured: rm_model_prepare waits for the ops instead.
static const int32_t *copy_indices(rm_model *model, const int32_t *at, int64_t n) {
  rm_mirrored_copy_to_device(&model->indices, at, (size_t)n * sizeof *at);
  return rm_mirrored_on_device(&model->indices, at);
}

// Each rank looks up the rows that host_indices.c lists. The ranks gather them in `home` by rank,
// then put them in order.
static rm_code embed(const rm_pass *pass) {
  rm_model *model = pass->model;
  rm_shard *shard = &model->shard;
  if (!shard->comm) {
    look_up(pass, model->residual, rm_on_device(pass, pass->batch->ids), pass->rows);
    return RM_OK;
  }
  const int64_t n_mine = model->embed_counts[shard->me], n_kept = rm_kept_rows(model, pass->rows).n;
  const int32_t *ids = copy_indices(model, model->embed_ids, n_mine),
                *from = copy_indices(model, model->embed_rows, n_kept);
  look_up(pass, model->x, ids, model->params->placement.vocab.n ? n_mine : 0);
  RM_TRY(rm_comm_gather_rows(shard->comm, model->x, model->home, model->embed_counts,
                             rm_row_bytes(model), pass->err));
  gather(model, model->residual, model->home, from, n_kept);
  return RM_OK;
}

// out ← norm(residual += x · gate · scale), without the addition when x is NULL, without the norm
// when weight is NULL, without out when it is NULL, without the gate when it is NULL, without the
// scale when it is 0.
static void norm_rows(rm_model *model, void *out, void *residual, const void *x, const void *gate,
                      float scale, const char *weight, int64_t rows) {
  const rm_rms_norm_args args = {
      .out = out,
      .residual = residual,
      .x = x,
      .x_gate = gate,
      .weight = weight,
      .eps = model->spec->rms_norm_eps,
      .rows = rows,
      .n = model->spec->hidden_size,
      .dtype = model->options.dtype,
      .zero_centered = model->spec->zero_centered_norms,
      .x_scale = scale,
  };
  if (rows) model->kernels->rms_norm(&model->ctx, &args);
}

// The buffer of a block's output: all rows, or with sequence parallelism the home rows.
static char *output_of(rm_model *model) {
  return model->sequence_parallel ? model->home : model->x;
}

// x ← norm(residual += the previous block's output), for the kept rows, at their indices of x.
// weight NULL: x ← residual.
static void norm(const rm_pass *pass, const char *weight, int is_first) {
  rm_model *model = pass->model;
  const rm_range rows = rm_kept_rows(model, pass->rows);
  char *out = model->x + (size_t)rows.first * rm_row_bytes(model);
  norm_rows(model, out, model->residual, is_first ? NULL : output_of(model), NULL,
            model->spec->residual_scale, weight, rows.n);
}

// Norms a block's output in place, in models with norms after blocks.
static void norm_output(const rm_pass *pass, rm_param_kind kind) {
  rm_model *model = pass->model;
  const char *weight = rm_weight(pass->weights, pass->layer, kind);
  if (weight)
    norm_rows(model, output_of(model), output_of(model), NULL, NULL, 0, weight,
              rm_kept_rows(model, pass->rows).n);
}

rm_code rm_complete_rows(const rm_pass *pass) {
  rm_model *model = pass->model;
  return model->sequence_parallel ? rm_shard_gather_rows(&model->shard, model->x, pass->rows,
                                                         rm_row_bytes(model), pass->err)
                                  : RM_OK;
}

rm_code rm_complete_columns(const rm_pass *pass, char *matrix, char *home) {
  rm_model *model = pass->model;
  return model->sequence_parallel
             ? rm_shard_columns_to_rows(&model->shard, RM_DIM_OUT, matrix, home, pass->rows,
                                        pass->err)
             : rm_shard_gather_columns(&model->shard, RM_DIM_OUT, matrix, pass->rows, pass->err);
}

// ----------------------------------------------------------------------------------------- blocks
// inner ← activation(up(x)), of an MLP without a gate.
static void ungated_up(const rm_pass *pass) {
  rm_model *model = pass->model;
  const rm_range mine = model->params->placement.inner;
  char *inner = model->inner + (size_t)mine.first * model->shard.elem;
  const rm_activate_args args = {inner,
                                 inner,
                                 pass->rows,
                                 mine.n,
                                 model->spec->intermediate_size,
                                 model->options.dtype,
                                 model->spec->activation};
  rm_linear(pass, RM_P_UP, model->x, model->inner);
  if (pass->rows && mine.n) model->kernels->activate(&model->ctx, &args);
}

// The MLP of a dense layer, from x to x (`home`), or the shared expert of all rows of x, to
// `shared`.
static rm_code mlp_block(const rm_pass *pass, int is_shared) {
  rm_model *model = pass->model;
  char *out = is_shared ? model->shared : model->x;
  RM_TRY(rm_complete_rows(pass));
  if (!is_shared && model->spec->ungated) ungated_up(pass);
  else rm_linear(pass, is_shared ? RM_P_SHARED_GATE : RM_P_GATE, model->x, model->inner);
  RM_TRY(rm_shard_gather_columns(&model->shard, is_shared ? RM_DIM_SHARED_INNER : RM_DIM_INNER,
                                 model->inner, pass->rows, pass->err));
  rm_linear(pass, is_shared ? RM_P_SHARED_DOWN : RM_P_DOWN, model->inner, out);
  return rm_complete_columns(pass, out, is_shared ? model->shared_home : model->home);
}

// Reads x and writes output_of(model).
static rm_code routed_experts(const rm_pass *pass) {
  rm_model *model = pass->model;
  const rm_batch *batch = pass->batch;
  const rm_spec *spec = model->spec;
  rm_shard *shard = &model->shard;
  const rm_range home = rm_shard_home(shard, pass->rows);
  rm_moe_rows rows = {
      .layer = pass->layer,
      .weights = pass->weights,
      .x = model->x,
      .out = model->x,
      .rows = pass->rows,
      .most = rm_max64(batch->most_rows, pass->rows),
      .routed = (int16_t *)rm_on_device(pass, batch->routed) + pass->moe_index * spec->top_k,
  };
  if (!model->moe.dispatches) {
    if (!spec->shared_intermediate_size) RM_TRY(rm_complete_rows(pass));
    RM_TRY(rm_moe_forward(&model->moe, &rows, pass->err));
    return rm_complete_columns(pass, model->x, model->home);
  }
  rows.out += (size_t)home.first * rm_row_bytes(model);
  rows.x = rows.out;
  if (model->sequence_parallel) rows.out = model->home;
  rows.rows = home.n;
  rows.routed += home.first * spec->n_moe_layers * spec->top_k;
  const rm_code code = rm_moe_forward(&model->moe, &rows, pass->err);
  return code || model->sequence_parallel
             ? code
             : rm_shard_gather_rows(shard, model->x, pass->rows, rm_row_bytes(model), pass->err);
}

// The routed experts plus the shared expert, whose output the switch of each row scales.
static rm_code moe_block(const rm_pass *pass) {
  rm_model *model = pass->model;
  const rm_range rows = rm_kept_rows(model, pass->rows);
  if (!model->spec->shared_intermediate_size) return routed_experts(pass);
  const char *gate = NULL;
  rm_code code = mlp_block(pass, 1);
  if (!code && model->spec->shared_switch) {
    rm_linear(pass, RM_P_SHARED_SWITCH, model->x, model->shared_switch);
    gate = model->shared_switch + (size_t)rows.first * model->shard.elem;
  }
  if (!code) code = routed_experts(pass);
  if (!code)
    norm_rows(model, NULL, output_of(model),
              model->sequence_parallel ? model->shared_home : model->shared, gate, 0, NULL, rows.n);
  return code;
}

// ----------------------------------------------------------------------------------------- a pass
// Computes the final norm of out_rows. With sequence parallelism each rank norms the out_rows among
// its home rows. Their number depends on the batch, so in a step of fixed sizes the ranks norm and
// exchange all rows and then select out_rows.
static rm_code finish(const rm_pass *pass, const void **hidden) {
  rm_model *model = pass->model;
  const rm_batch *batch = pass->batch;
  const char *weight = rm_weight(pass->weights, &model->params->ends, RM_P_FINAL_NORM);
  const int32_t *from = rm_on_device(pass, batch->out_rows);
  int64_t n = batch->n_out;
  if (model->sequence_parallel && rm_is_static(model, batch)) {
    norm(pass, weight, 0);
    RM_TRY(rm_complete_rows(pass));
    gather(model, model->home, model->x, from, n);
    *hidden = model->home;
    return RM_OK;
  }
  if (model->sequence_parallel) {
    n = model->out_counts[model->shard.me];
    from = copy_indices(model, model->own_out_rows, n);
  }
  gather(model, model->out_residual, model->residual, from, n);
  gather(model, model->residual, output_of(model), from, n); // residual is free by now
  norm_rows(model, model->x, model->out_residual, model->residual, NULL,
            model->spec->residual_scale, weight, n);
  *hidden = model->x;
  if (!model->sequence_parallel) return RM_OK;
  *hidden = model->home;
  return rm_comm_gather_rows(model->shard.comm, model->x, model->home, model->out_counts,
                             rm_row_bytes(model), pass->err);
}

rm_code rm_model_forward(rm_model *model, const void *weights, const rm_cache *cache,
                         const rm_batch *batch, const void **hidden, rm_error *err) {
  const rm_spec *spec = model->spec;
  rm_pass pass = {
      .model = model, .weights = weights, .batch = batch, .rows = batch->n_rows, .err = err};
  rm_cache rest = *cache; // of the layers to come
  RM_TRY(embed(&pass));
  for (int64_t i = 0; i < spec->n_layers; i++) {
    pass.index = i;
    pass.layer = &model->params->layers[i];
    norm(&pass, rm_weight(weights, pass.layer, RM_P_INPUT_NORM), i == 0);
    const rm_layer_cache of_layer = rm_next_cache(&pass, &rest);
    RM_TRY(rm_layer_kinds[spec->layers[i].kind].forward(&pass, &of_layer));
    norm_output(&pass, RM_P_POST_ATTN_NORM);
    norm(&pass, rm_weight(weights, pass.layer, RM_P_PRE_MLP_NORM), 0);
    RM_TRY(spec->layers[i].is_moe ? moe_block(&pass) : mlp_block(&pass, 0));
    pass.moe_index += spec->layers[i].is_moe != 0;
    norm_output(&pass, RM_P_POST_MLP_NORM);
  }
  if (pass.moe_index && model->moe.dispatches)
    RM_TRY(rm_shard_gather_rows(&model->shard, rm_on_device(&pass, batch->routed), pass.rows,
                                (size_t)(spec->n_moe_layers * spec->top_k) * sizeof *batch->routed,
                                err));
  return finish(&pass, hidden);
}
