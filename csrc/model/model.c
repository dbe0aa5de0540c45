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
#include <stdio.h>

#include "model/model_internal.h"

// Elements of q, k and v of one token on this rank.
static int64_t layer_width(const rm_params *params) {
  return (params->placement.heads.n + 2 * params->placement.kv_heads.n) * params->spec->head_dim;
}

static rm_limits limits_of(const rm_params *params, const rm_model_options *options,
                           int n_threads) {
  const rm_spec *spec = params->spec;
  const int64_t heads = spec->n_heads * spec->head_dim;
  const int64_t inner = rm_max64(rm_max64(spec->intermediate_size, spec->shared_intermediate_size),
                                 spec->moe_intermediate_size);
  return (rm_limits){
      .max_rows = options->max_rows,
      .max_k = rm_max64(spec->hidden_size, rm_max64(inner, heads)),
      .max_n = rm_max64(rm_max64(spec->hidden_size, layer_width(params)), rm_gate_up_rows(inner)),
      .vocab = spec->vocab_size,
      .n_heads = params->placement.heads.n,
      .n_kv_heads = params->placement.kv_heads.n,
      .head_dim = spec->head_dim,
      .group = spec->n_heads / spec->n_kv_heads,
      .max_positions = options->max_positions,
      .n_experts = spec->n_experts,
      .top_k = spec->top_k,
      .n_threads = n_threads,
  };
}

// Allocates all activations as one block.
static rm_code create_buffers(rm_model *model, char **workspace, size_t workspace_bytes,
                              rm_error *err) {
  const rm_model_options *options = &model->options;
  const rm_spec *spec = model->spec;
  const int parallel = model->shard.comm != NULL;
  const size_t rows = (size_t)options->max_rows, elem = rm_dtype_bytes(options->dtype),
               half = (size_t)spec->rotary_dim / 2;
  const size_t table = (size_t)options->max_positions * sizeof(float),
               wide = (size_t)(spec->n_heads * spec->head_dim) * elem;
  const size_t looked_up =
      (size_t)rm_max64(options->max_rows, options->static_rows * model->shard.size);
  const size_t shared_rows = spec->shared_intermediate_size ? rows : 0;
  const size_t normed_rows = spec->qk_norm == RM_QK_NORM_WHOLE ? rows : 0;
  enum { FIELDS = 17 };
  rm_field fields[FIELDS + RM_HEAD_FIELDS + RM_MOE_FIELDS] = {
      {&model->cos, table, half},
      {&model->sin, table, half},
      {&model->residual, rows, (size_t)spec->hidden_size * elem},
      {&model->x, rows, (size_t)spec->hidden_size * elem},
      {&model->out_residual, rows, (size_t)spec->hidden_size * elem},
      {&model->qkv, rows, (size_t)layer_width(model->params) * elem},
      {&model->q, rows, (size_t)(model->params->placement.heads.n * spec->head_dim) * elem},
      {&model->inner, spec->n_moe_layers < spec->n_layers || shared_rows ? rows : 0,
       (size_t)rm_max64(spec->intermediate_size, spec->shared_intermediate_size) * elem},
      {&model->squares, normed_rows,
       (size_t)(model->params->placement.heads.n + model->params->placement.kv_heads.n) *
           sizeof(float)},
      {&model->all_squares, parallel ? normed_rows : 0,
       (size_t)(spec->n_heads + spec->n_kv_heads) * sizeof(float)},
      {&model->shared, shared_rows, (size_t)spec->hidden_size * elem},
      {&model->shared_home, parallel ? shared_rows : 0, (size_t)spec->hidden_size * elem},
      {&model->shared_switch, spec->shared_switch ? shared_rows : 0, elem},
      {&model->attended, parallel ? rows : 0, wide},
      {&model->home, parallel ? looked_up : 0, (size_t)spec->hidden_size * elem},
      {workspace, workspace_bytes, 1},
      {&model->vendor_gemm_workspace, rm_model_gemm_workspace(model), 1},
  };
  size_t n_fields = FIELDS;
  if (parallel) n_fields += rm_head_fields(model, fields + n_fields);
  if (spec->n_moe_layers) n_fields += rm_moe_fields(&model->moe, fields + n_fields);
  model->block_bytes = rm_fields_bytes(fields, n_fields);
  char what[96];
  snprintf(what, sizeof what, "activations (%lld rows a step, %lld positions)",
           (long long)options->max_rows, (long long)options->max_positions);
  const rm_code code = rm_device_alloc(model->device, model->block_bytes, what, &model->block, err);
  if (!code) rm_fields_place(fields, n_fields, model->block, model->block_bytes);
  return code;
}

static void make_rope_table(const rm_model *model, float *cos, float *sin) {
  const rm_spec *spec = model->spec;
  const uint32_t saved = rm_fp_enter();
  rm_rope_table(cos, sin, spec->inv_freq, model->options.max_positions, spec->rotary_dim / 2,
                spec->rope_scale, model->options.dtype);
  rm_fp_leave(saved);
}

// Computes the table on the host for every device, so that all devices have the same values.
static rm_code fill_rope_table(rm_model *model, rm_error *err) {
  const rm_device *device = model->device;
  const size_t n = (size_t)(model->options.max_positions * (model->spec->rotary_dim / 2));
  if (device->on_host) {
    make_rope_table(model, model->cos, model->sin);
    return RM_OK;
  }
  float *cos = rm_alloc(n, 2 * sizeof *cos);
  if (!cos)
    return rm_fail(err, RM_E_MEMORY, "no memory for a rope table of %lld positions",
                   (long long)model->options.max_positions);
  float *sin = cos + n;
  make_rope_table(model, cos, sin);
  device->copy_to_device(device->self, model->cos, cos, n * sizeof *cos);
  device->copy_to_device(device->self, model->sin, sin, n * sizeof *sin);
  const rm_code code = rm_device_wait(device, err);
  rm_free(cos);
  return code;
}

// Allocates the arrays of host_indices.c, with tp > 1.
static rm_code create_indices(rm_model *model, rm_error *err) {
  const size_t rows = (size_t)model->options.max_rows, outs = (size_t)model->options.max_out_rows;
  const rm_field fields[] = {
      {&model->embed_ids, rows, sizeof(int32_t)},
      {&model->embed_rows, rows, sizeof(int32_t)},
      {&model->own_out_rows, rows, sizeof(int32_t)},
      {&model->local_targets, outs, sizeof(int32_t)},
      {&model->from_targets, outs, sizeof(int32_t)},
      {&model->embed_counts, (size_t)model->shard.size, sizeof(int64_t)},
      {&model->out_counts, (size_t)model->shard.size, sizeof(int64_t)},
  };
  const size_t n = sizeof fields / sizeof *fields;
  if (!model->shard.comm) return RM_OK;
  const rm_code code = rm_mirrored_create(model->device, rm_fields_bytes(fields, n), "indices",
                                          &model->indices, err);
  if (!code) rm_fields_place(fields, n, model->indices.host, model->indices.bytes);
  return code;
}

static rm_code create_parts(rm_model *model, rm_team *team, rm_error *err) {
  const rm_model_options *options = &model->options;
  const rm_spec *spec = model->spec;
  const rm_limits limits = limits_of(model->params, options, rm_team_threads(team));
  char *workspace;
  const size_t workspace_bytes = model->kernels->workspace_bytes(&limits);
  rm_code code = rm_shard_create(spec, options->rank, options->dtype, &model->shard, err);
  if (code) return code;
  if (spec->n_moe_layers &&
      (code = rm_moe_create(&model->moe, model->params, model->device, options->rank,
                            options->max_rows, options->static_rows, err)))
    return code;
  if ((code = create_buffers(model, &workspace, workspace_bytes, err)) ||
      (code = create_indices(model, err)))
    return code;
  if (model->params->plain && (code = rm_open_vendor_gemm(model, err))) return code;
  model->ctx = (rm_ctx){.workspace = workspace,
                        .workspace_bytes = workspace_bytes,
                        .n_threads = rm_team_threads(team)};
  model->ctx.stream = model->device->stream;
  model->ctx.run = rm_team_run;
  model->ctx.team = team;
  model->ctx.profile = options->profile;
  return fill_rope_table(model, err);
}

rm_code rm_model_create(const rm_params *params, const rm_device *device, rm_team *team,
                        const rm_model_options *options, rm_model **out, rm_error *err) {
  *out = NULL;
  rm_model *model = rm_alloc(1, sizeof *model);
  if (!model) return rm_fail(err, RM_E_MEMORY, "no memory for the model");
  *model = (rm_model){.params = params,
                      .spec = params->spec,
                      .device = device,
                      .kernels = device->kernels,
                      .options = *options};
  model->options.static_rows = rm_min64(options->static_rows, options->max_rows);
  model->sequence_parallel = options->rank->sequence_parallel && options->rank->mesh.tp > 1;
  const rm_code code = create_parts(model, team, err);
  if (code) {
    rm_model_destroy(model);
    return code;
  }
  *out = model;
  return RM_OK;
}

void rm_model_destroy(rm_model *model) {
  if (!model) return;
  if (model->vendor_gemm.self) model->vendor_gemm.close(model->vendor_gemm.self);
  rm_mirrored_destroy(&model->indices);
  rm_device_free(model->device, model->block, model->block_bytes);
  rm_moe_destroy(&model->moe);
  rm_shard_destroy(&model->shard);
  rm_free(model);
}

int rm_model_is_static(const rm_model *model, int64_t rows) {
  rm_comm *const comms[] = {model->shard.comm, model->moe.ep};
  for (int i = 0; i < 2; i++)
    if (comms[i] && (rows > model->options.static_rows || !rm_comm_can_be_captured(comms[i])))
      return 0;
  return 1;
}

const rm_ctx *rm_model_ctx(const rm_model *model) { return &model->ctx; }
size_t rm_model_workspace_bytes(const rm_model *model) {
  return model->block_bytes + model->indices.bytes + rm_moe_bytes(&model->moe);
}

// --------------------------------------------------------------------------------------- KV pages
// Bytes of the K of one page in one layer with n KV heads; below, of the V.
static size_t k_bytes_of(const rm_model *model, int64_t n) {
  return (size_t)(n * rm_k_page_elems(model->options.page_size, model->spec->head_dim)) *
         rm_dtype_bytes(model->options.dtype);
}

static size_t v_bytes_of(const rm_model *model, int64_t n) {
  return (size_t)(n * rm_v_page_elems(model->options.page_size, model->spec->head_dim)) *
         rm_dtype_bytes(model->options.dtype);
}

static size_t k_bytes(const rm_model *model) {
  return k_bytes_of(model, model->params->placement.kv_heads.n);
}
static size_t v_bytes(const rm_model *model) {
  return v_bytes_of(model, model->params->placement.kv_heads.n);
}

size_t rm_model_page_bytes(const rm_model *model) {
  const rm_mesh *mesh = &model->options.rank->mesh;
  int64_t most = 0;
  for (int32_t r = 0; r < mesh->tp; r++)
    most = rm_max64(most, rm_placement_of(model->spec, mesh, r).kv_heads.n);
  return (size_t)model->spec->n_layers * (k_bytes_of(model, most) + v_bytes_of(model, most));
}

static char *k_cache(const rm_model *model, void *kv, int64_t n_pages, int64_t layer) {
  return (char *)kv + (size_t)layer * (size_t)n_pages * (k_bytes(model) + v_bytes(model));
}

static char *v_cache(const rm_model *model, void *kv, int64_t n_pages, int64_t layer) {
  return k_cache(model, kv, n_pages, layer) + (size_t)n_pages * k_bytes(model);
}

void rm_model_zero_page(const rm_model *model, void *kv, int64_t n_pages, int32_t page) {
  const rm_device *device = model->device;
  const size_t k = k_bytes(model), v = v_bytes(model), pitch = (size_t)n_pages * (k + v),
               layers = (size_t)model->spec->n_layers;
  device->zero_2d(device->self, k_cache(model, kv, n_pages, 0) + (size_t)page * k, pitch, k,
                  layers);
  device->zero_2d(device->self, v_cache(model, kv, n_pages, 0) + (size_t)page * v, pitch, v,
                  layers);
}

void rm_model_copy_page(const rm_model *model, void *kv, int64_t n_pages, int32_t to,
                        int32_t from) {
  const rm_device *device = model->device;
  const size_t k = k_bytes(model), v = v_bytes(model), pitch = (size_t)n_pages * (k + v),
               layers = (size_t)model->spec->n_layers;
  char *ks = k_cache(model, kv, n_pages, 0), *vs = v_cache(model, kv, n_pages, 0);
  device->copy_2d(device->self, ks + (size_t)to * k, pitch, ks + (size_t)from * k, pitch, k,
                  layers);
  device->copy_2d(device->self, vs + (size_t)to * v, pitch, vs + (size_t)from * v, pitch, v,
                  layers);
}

// ------------------------------------------------------------------------------------------- rows
static size_t row_bytes(const rm_model *model) {
  return (size_t)model->spec->hidden_size * rm_dtype_bytes(model->options.dtype);
}

static void *on_device(const rm_batch *batch, const void *here) {
  return rm_mirrored_on_device(batch->mirrored, here);
}

// out[i] ← x[from[i]], rows of hidden elements. out and x must not overlap.
static void gather(rm_model *model, void *out, const void *x, const int32_t *from, int64_t rows) {
  const rm_gather_rows_args args = {out, x, from, rows, row_bytes(model)};
  if (rows) model->kernels->gather_rows(&model->ctx, &args);
}

static void look_up(rm_model *model, const char *weights, void *out, const int32_t *ids,
                    int64_t rows) {
  const rm_embed_args args = {
      .out = out,
      .ids = ids,
      .table = weights + model->params->embed,
      .packed = model->spec->tie_word_embeddings,
      .rows = rows,
      .hidden = model->spec->hidden_size,
      .dtype = model->options.dtype,
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
static rm_code embed(rm_model *model, const char *weights, const rm_batch *batch, rm_error *err) {
  rm_shard *shard = &model->shard;
  if (!shard->comm) {
    look_up(model, weights, model->residual, on_device(batch, batch->ids), batch->n_rows);
    return RM_OK;
  }
  const int64_t n_mine = model->embed_counts[shard->me],
                n_kept = rm_kept_rows(model, batch->n_rows).n;
  const int32_t *ids = copy_indices(model, model->embed_ids, n_mine),
                *from = copy_indices(model, model->embed_rows, n_kept);
  look_up(model, weights, model->x, ids, shard->vocab[shard->me].n ? n_mine : 0);
  const rm_code code = rm_shard_gather_counted(shard, model->x, model->home, model->embed_counts,
                                               row_bytes(model), err);
  if (!code) gather(model, model->residual, model->home, from, n_kept);
  return code;
}

// out ← norm(residual += x), without the addition when x is NULL, without the norm when weight is
// NULL.
static void norm_rows(rm_model *model, void *out, void *residual, const void *x, const char *weight,
                      int64_t rows) {
  const rm_rms_norm_args args = {
      .out = out,
      .residual = residual,
      .x = x,
      .weight = weight,
      .eps = model->spec->rms_norm_eps,
      .rows = rows,
      .n = model->spec->hidden_size,
      .dtype = model->options.dtype,
  };
  if (rows) model->kernels->rms_norm(&model->ctx, &args);
}

// The buffer of a block's output: all rows, or with sequence parallelism the home rows.
static char *output_of(rm_model *model) {
  return model->sequence_parallel ? model->home : model->x;
}

// x ← norm(residual += the previous block's output), for the kept rows, at their indices of x.
// weight NULL: x ← residual.
static void norm(rm_model *model, const char *weight, int64_t n_rows, int first) {
  const rm_range rows = rm_kept_rows(model, n_rows);
  char *out = model->x + (size_t)rows.first * row_bytes(model);
  norm_rows(model, out, model->residual, first ? NULL : output_of(model), weight, rows.n);
}

// Norms a block's output in place, in models with norms after blocks.
static void norm_output(rm_model *model, const char *weight, int64_t n_rows) {
  norm_rows(model, output_of(model), output_of(model), NULL, weight, rm_kept_rows(model, n_rows).n);
}

// Completes x: all rows on every rank.
static rm_code complete_rows(rm_model *model, int64_t rows, rm_error *err) {
  return model->sequence_parallel
             ? rm_shard_gather_rows(&model->shard, model->x, rows, row_bytes(model), err)
             : RM_OK;
}

// Completes the rows of a matrix of which each rank has its columns: all rows in place, or with
// sequence parallelism the home rows in `home`.
static rm_code complete_columns(rm_model *model, char *matrix, char *home, int64_t rows,
                                rm_error *err) {
  rm_shard *shard = &model->shard;
  if (!model->sequence_parallel)
    return rm_shard_gather_columns(shard, RM_CUT_HIDDEN, matrix, rows, err);
  const char *mine = matrix + (size_t)shard->cuts[RM_CUT_HIDDEN][shard->me].first * shard->elem;
  return rm_shard_columns_to_rows(shard, RM_CUT_HIDDEN, mine, model->spec->hidden_size, home, rows,
                                  err);
}

static rm_code complete_output(rm_model *model, int64_t rows, rm_error *err) {
  return complete_columns(model, model->x, model->home, rows, err);
}

// ----------------------------------------------------------------------------------------- blocks
// Computes the sums of squares of all heads of q and of k, for a norm over all heads; NULL in other
// models.
static rm_code gather_squares(rm_model *model, int64_t rows, const float **q, const float **k,
                              rm_error *err) {
  const rm_spec *spec = model->spec;
  const rm_placement *here = &model->params->placement;
  rm_shard *shard = &model->shard;
  *q = *k = NULL;
  if (spec->qk_norm != RM_QK_NORM_WHOLE) return RM_OK;
  float *k_part = model->squares + rows * here->heads.n,
        *k_all = model->all_squares + rows * spec->n_heads;
  const rm_head_squares_args args = {.q_out = model->squares,
                                     .k_out = k_part,
                                     .qkv = model->qkv,
                                     .rows = rows,
                                     .n_heads = here->heads.n,
                                     .n_kv_heads = here->kv_heads.n,
                                     .head_dim = spec->head_dim,
                                     .dtype = model->options.dtype};
  if (rows) model->kernels->head_squares(&model->ctx, &args);
  *q = shard->comm ? model->all_squares : model->squares;
  *k = shard->comm ? k_all : k_part;
  const int64_t words = (int64_t)(sizeof(float) / shard->elem),
                shared = here->kv_heads.n - rm_placement_new_kv_heads(spec, here).n;
  const rm_code code = rm_shard_gather_part(shard, RM_CUT_Q_SQUARES, model->squares,
                                            here->heads.n * words, model->all_squares, rows, err);
  return code ? code
              : rm_shard_gather_part(shard, RM_CUT_K_SQUARES, k_part + shared,
                                     here->kv_heads.n * words, k_all, rows, err);
}

static rm_code write_kv(rm_model *model, int64_t index, const char *weights, void *k, void *v,
                        const rm_batch *batch, rm_error *err) {
  const rm_placement *here = &model->params->placement;
  const float *q_squares, *k_squares;
  const rm_code code = gather_squares(model, batch->n_rows, &q_squares, &k_squares, err);
  if (code) return code;
  const rm_layer_params *layer = &model->params->layers[index];
  const rm_qk_rope_kv_args args = {
      .q_out = model->q,
      .qkv = model->qkv,
      .q_weight = rm_param_or_null(weights, layer->q_norm),
      .k_weight = rm_param_or_null(weights, layer->k_norm),
      .q_squares = q_squares,
      .k_squares = k_squares,
      .all_heads = model->spec->n_heads,
      .all_kv_heads = model->spec->n_kv_heads,
      .cos = model->cos,
      .sin = model->sin,
      .positions = on_device(batch, batch->positions),
      .slots = on_device(batch, batch->slots),
      .k_cache = k,
      .v_cache = v,
      .row_flags = on_device(batch, batch->row_flags),
      .eps = model->spec->rms_norm_eps,
      .rows = batch->n_rows,
      .n_heads = here->heads.n,
      .n_kv_heads = here->kv_heads.n,
      .head_dim = model->spec->head_dim,
      .page_size = model->options.page_size,
      .rotary_dim = model->spec->layers[index].rotates ? model->spec->rotary_dim : 0,
      .dtype = model->options.dtype,
  };
  if (batch->n_rows) model->kernels->qk_rope_kv(&model->ctx, &args);
  return RM_OK;
}

// Writes its output to qkv, which is free by now.
static void attend(rm_model *model, int64_t index, const void *k, const void *v,
                   const rm_batch *batch) {
  const rm_spec *spec = model->spec;
  const rm_placement *here = &model->params->placement;
  const int64_t group = spec->n_heads / spec->n_kv_heads;
  const rm_attention_args args = {
      .out = model->qkv,
      .q = model->q,
      .k_cache = k,
      .v_cache = v,
      .positions = on_device(batch, batch->positions),
      .seq_of_row = on_device(batch, batch->seq_of_row),
      .block_tables = on_device(batch, batch->block_tables),
      .rows = batch->n_rows,
      .n_seqs = batch->n_seqs,
      .max_pages = batch->max_pages,
      .n_heads = here->heads.n,
      .n_kv_heads = here->kv_heads.n,
      .head_dim = spec->head_dim,
      .page_size = model->options.page_size,
      .group = group,
      .head0 = here->heads.first % group,
      .window = spec->layers[index].window,
      .scale = (float)(1.0 / __builtin_sqrt((double)spec->head_dim)),
      .dtype = model->options.dtype,
  };
  if (batch->n_rows) model->kernels->attention(&model->ctx, &args);
}

static rm_code attention_block(rm_model *model, int64_t index, const char *weights, void *kv,
                               int64_t n_pages, const rm_batch *batch, rm_error *err) {
  const rm_layer_params *layer = &model->params->layers[index];
  const int64_t rows = batch->n_rows,
                heads = model->params->placement.heads.n * model->spec->head_dim;
  void *k = k_cache(model, kv, n_pages, index), *v = v_cache(model, kv, n_pages, index);
  rm_code code = complete_rows(model, rows, err);
  if (code) return code;
  const rm_gemm_args qkv = rm_qkv_gemm(model, layer, weights, rows),
                     back = rm_o_proj_gemm(model, layer, weights, rows);
  rm_multiply(model, &qkv);
  if ((code = write_kv(model, index, weights, k, v, batch, err))) return code;
  attend(model, index, k, v, batch);
  if ((code = rm_shard_gather_part(&model->shard, RM_CUT_HEADS, model->qkv, heads, model->attended,
                                   rows, err)))
    return code;
  rm_multiply(model, &back);
  return complete_output(model, rows, err);
}

// Computes `inner` of a dense MLP: activation(gate) · up, or activation(up) alone.
static void multiply_in(rm_model *model, const rm_gemm_args *in) {
  if (!model->spec->ungated) {
    rm_multiply_swiglu(model, in);
    return;
  }
  const rm_activate_args args = {in->y, in->y, in->m, in->n, in->ldy, in->dtype, in->activation};
  rm_multiply(model, in);
  if (in->m && in->n) model->kernels->activate(&model->ctx, &args);
}

static rm_code mlp_block(rm_model *model, const rm_layer_params *layer, const char *weights,
                         int64_t rows, rm_error *err) {
  const rm_gemm_args in = rm_gate_up_gemm(model, layer, weights, rows),
                     down = rm_down_gemm(model, layer, weights, rows);
  rm_code code = complete_rows(model, rows, err);
  if (code) return code;
  multiply_in(model, &in);
  if ((code = rm_shard_gather_columns(&model->shard, RM_CUT_INNER, model->inner, rows, err)))
    return code;
  rm_multiply(model, &down);
  return complete_output(model, rows, err);
}

// Computes the shared expert of all rows of x: its output into `shared` (kept rows), and the logit
// of each row's switch into shared_switch.
static rm_code shared_expert(rm_model *model, const rm_layer_params *layer, const char *weights,
                             int64_t rows, rm_error *err) {
  const rm_gemm_args in = rm_shared_gate_up_gemm(model, layer, weights, rows),
                     down = rm_shared_down_gemm(model, layer, weights, rows);
  rm_code code = complete_rows(model, rows, err);
  if (code) return code;
  if (rows && layer->shared_switch != SIZE_MAX) {
    const rm_gemm_args logit = rm_shared_switch_gemm(model, layer, weights, rows);
    model->kernels->gemm(&model->ctx, &logit);
  }
  if (rows && in.n) model->kernels->gemm_swiglu(&model->ctx, &in);
  if ((code = rm_shard_gather_columns(&model->shard, RM_CUT_SHARED_INNER, model->inner, rows, err)))
    return code;
  if (rows && down.n) model->kernels->gemm(&model->ctx, &down);
  return complete_columns(model, model->shared, model->shared_home, rows, err);
}

// output_of(model) += the shared expert's output.
static void add_shared_expert(rm_model *model, int64_t n_rows) {
  const rm_range rows = rm_kept_rows(model, n_rows);
  const size_t elem = rm_dtype_bytes(model->options.dtype);
  const rm_rms_norm_args args = {
      .residual = output_of(model),
      .x = model->sequence_parallel ? model->shared_home : model->shared,
      .x_gate =
          model->spec->shared_switch ? model->shared_switch + (size_t)rows.first * elem : NULL,
      .rows = rows.n,
      .n = model->spec->hidden_size,
      .dtype = model->options.dtype,
  };
  if (rows.n) model->kernels->rms_norm(&model->ctx, &args);
}

// Reads x and writes output_of(model), with either kind of dispatcher.
static rm_code routed_experts(rm_model *model, int64_t index, int64_t moe_layer,
                              const char *weights, const rm_batch *batch, rm_error *err) {
  const rm_spec *spec = model->spec;
  rm_shard *shard = &model->shard;
  rm_moe *moe = &model->moe;
  const int64_t rows = batch->n_rows, most = rm_max64(batch->most_rows, rows),
                stride = spec->n_moe_layers * spec->top_k;
  const rm_range home = rm_shard_home(shard, rows);
  int16_t *routed = (int16_t *)on_device(batch, batch->routed) + moe_layer * spec->top_k;
  const rm_layer_params *layer = &model->params->layers[index];
  rm_code code;
  if (moe->dispatches) {
    char *own = model->x + (size_t)home.first * row_bytes(model),
         *out = model->sequence_parallel ? model->home : own;
    code = rm_moe_dispatched(moe, &model->ctx, layer, weights, own, out, home.n, most,
                             routed + home.first * stride, stride, err);
    if (code || model->sequence_parallel) return code;
    return rm_shard_gather_rows(shard, model->x, rows, row_bytes(model), err);
  }
  if (!spec->shared_intermediate_size && (code = complete_rows(model, rows, err))) return code;
  if ((code = rm_moe_replicated(moe, &model->ctx, shard, layer, weights, model->x, rows, routed,
                                stride, err)))
    return code;
  return complete_output(model, rows, err);
}

static rm_code moe_block(rm_model *model, int64_t index, int64_t moe_layer, const char *weights,
                         const rm_batch *batch, rm_error *err) {
  const int shared = model->spec->shared_intermediate_size > 0;
  rm_code code =
      shared ? shared_expert(model, &model->params->layers[index], weights, batch->n_rows, err)
             : RM_OK;
  if (!code) code = routed_experts(model, index, moe_layer, weights, batch, err);
  if (!code && shared) add_shared_expert(model, batch->n_rows);
  return code;
}

// ----------------------------------------------------------------------------------------- a pass
// Computes the final norm of out_rows. With sequence parallelism each rank norms the out_rows among
// its home rows. Their number depends on the batch, so in a step of fixed sizes the ranks norm and
// exchange all rows and then select out_rows.
static rm_code finish(rm_model *model, const char *weight, const rm_batch *batch,
                      const void **hidden, rm_error *err) {
  const int32_t *from = on_device(batch, batch->out_rows);
  int64_t n = batch->n_out;
  if (model->sequence_parallel && rm_is_static(model, batch)) {
    norm(model, weight, batch->n_rows, 0);
    const rm_code code = complete_rows(model, batch->n_rows, err);
    if (!code) gather(model, model->home, model->x, from, n);
    *hidden = model->home;
    return code;
  }
  if (model->sequence_parallel) {
    n = model->out_counts[model->shard.me];
    from = copy_indices(model, model->own_out_rows, n);
  }
  gather(model, model->out_residual, model->residual, from, n);
  gather(model, model->residual, output_of(model), from, n); // residual is free by now
  norm_rows(model, model->x, model->out_residual, model->residual, weight, n);
  *hidden = model->x;
  if (!model->sequence_parallel) return RM_OK;
  *hidden = model->home;
  return rm_shard_gather_counted(&model->shard, model->x, model->home, model->out_counts,
                                 row_bytes(model), err);
}

rm_code rm_model_forward(rm_model *model, const void *weights, void *kv, int64_t n_pages,
                         const rm_batch *batch, const void **hidden, rm_error *err) {
  const rm_spec *spec = model->spec;
  const char *base = weights;
  int64_t moe_layer = 0;
  rm_code code = embed(model, base, batch, err);
  for (int64_t i = 0; i < spec->n_layers && !code; i++) {
    const rm_layer_params *layer = &model->params->layers[i];
    norm(model, rm_param_or_null(base, layer->input_norm), batch->n_rows, i == 0);
    if ((code = attention_block(model, i, base, kv, n_pages, batch, err))) break;
    if (spec->norm_after) norm_output(model, base + layer->post_attn_norm, batch->n_rows);
    norm(model, rm_param_or_null(base, layer->pre_mlp_norm), batch->n_rows, 0);
    if (spec->layers[i].is_moe) code = moe_block(model, i, moe_layer++, base, batch, err);
    else code = mlp_block(model, layer, base, batch->n_rows, err);
    if (!code && spec->norm_after) norm_output(model, base + layer->post_mlp_norm, batch->n_rows);
  }
  if (!code && moe_layer && model->moe.dispatches)
    code = rm_shard_gather_rows(&model->shard, on_device(batch, batch->routed), batch->n_rows,
                                (size_t)(moe_layer * spec->top_k) * sizeof *batch->routed, err);
  return code ? code : finish(model, base + model->params->final_norm, batch, hidden, err);
}
