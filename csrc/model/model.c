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

static rm_limits limits_of(const rm_params *params, const rm_model_options *options,
                           int n_threads) {
  const rm_spec *spec = params->spec;
  const int64_t heads = spec->n_heads * spec->head_dim;
  const int64_t inner = rm_max64(rm_max64(spec->intermediate_size, spec->shared_intermediate_size),
                                 spec->moe_intermediate_size);
  return (rm_limits){
      .max_rows = options->max_rows,
      .max_k = rm_max64(spec->hidden_size, rm_max64(inner, heads)),
      .max_n = rm_max64(rm_max64(spec->hidden_size, rm_qkv_width(params)), rm_gate_up_rows(inner)),
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
               half = (size_t)spec->rotary_dim / 2, row = (size_t)spec->hidden_size * elem;
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
      {&model->residual, rows, row},
      {&model->x, rows, row},
      {&model->out_residual, rows, row},
      {&model->qkv, rows, (size_t)rm_qkv_width(model->params) * elem},
      {&model->q, rows, (size_t)(model->params->placement.heads.n * spec->head_dim) * elem},
      {&model->inner, spec->n_moe_layers < spec->n_layers || shared_rows ? rows : 0,
       (size_t)rm_max64(spec->intermediate_size, spec->shared_intermediate_size) * elem},
      RM_FIELD_ROWS(
          model->squares, normed_rows,
          (size_t)(model->params->placement.heads.n + model->params->placement.kv_heads.n)),
      RM_FIELD_ROWS(model->all_squares, parallel ? normed_rows : 0,
                    (size_t)(spec->n_heads + spec->n_kv_heads)),
      {&model->shared, shared_rows, row},
      {&model->shared_home, parallel ? shared_rows : 0, row},
      {&model->shared_switch, spec->shared_switch ? shared_rows : 0, elem},
      {&model->attended, parallel ? rows : 0, wide},
      {&model->home, parallel ? looked_up : 0, row},
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
  if (!code) rm_fields_place(fields, n_fields, model->block);
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
  if (!cos) return rm_no_memory(err, "a rope table", 2 * n * sizeof *cos);
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
      RM_FIELD(model->embed_ids, rows),
      RM_FIELD(model->embed_rows, rows),
      RM_FIELD(model->own_out_rows, rows),
      RM_FIELD(model->local_targets, outs),
      RM_FIELD(model->from_targets, outs),
      RM_FIELD(model->embed_counts, (size_t)model->shard.size),
      RM_FIELD(model->out_counts, (size_t)model->shard.size),
  };
  const size_t n = sizeof fields / sizeof *fields;
  if (!model->shard.comm) return RM_OK;
  const rm_code code = rm_mirrored_create(model->device, rm_fields_bytes(fields, n), "indices",
                                          &model->indices, err);
  if (!code) rm_fields_place(fields, n, model->indices.host);
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
      (code = rm_moe_create(&model->moe, model->params, model->device, options->rank, &model->shard,
                            &model->ctx, options->max_rows, err)))
    return code;
  if ((code = create_buffers(model, &workspace, workspace_bytes, err)) ||
      (code = create_indices(model, err)))
    return code;
  if (model->params->plain && (code = rm_open_vendor_gemm(model, err))) return code;
  model->ctx = (rm_ctx){.workspace = workspace,
                        .workspace_bytes = workspace_bytes,
                        .n_threads = rm_team_threads(team),
                        .stream = model->device->stream,
                        .run = rm_team_run,
                        .team = team,
                        .profile = options->profile};
  return fill_rope_table(model, err);
}

rm_code rm_model_create(const rm_params *params, const rm_device *device, rm_team *team,
                        const rm_model_options *options, rm_model **out, rm_error *err) {
  *out = NULL;
  rm_model *model = rm_alloc(1, sizeof *model);
  if (!model) return rm_no_memory(err, "the model", 0);
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
static size_t k_bytes(const rm_model *model, int64_t n) {
  return (size_t)(n * rm_k_page_elems(model->options.page_size, model->spec->head_dim)) *
         rm_dtype_bytes(model->options.dtype);
}

static size_t v_bytes(const rm_model *model, int64_t n) {
  return (size_t)(n * rm_v_page_elems(model->options.page_size, model->spec->head_dim)) *
         rm_dtype_bytes(model->options.dtype);
}

size_t rm_model_page_bytes(const rm_model *model) {
  int64_t most = 0;
  for (int r = 0; r < model->shard.size; r++)
    most = rm_max64(most, model->shard.placements[r].kv_heads.n);
  return (size_t)model->spec->n_layers * (k_bytes(model, most) + v_bytes(model, most));
}

void rm_model_write_page(const rm_model *model, void *kv, int64_t n_pages, int32_t to,
                         int32_t from) {
  const rm_device *device = model->device;
  const int64_t heads = model->params->placement.kv_heads.n;
  const size_t halves[] = {k_bytes(model, heads), v_bytes(model, heads)},
               pitch = (size_t)n_pages * (halves[0] + halves[1]),
               layers = (size_t)model->spec->n_layers;
  char *pages = kv; // of the first layer
  for (int i = 0; i < 2; pages += (size_t)n_pages * halves[i++]) {
    char *at = pages + (size_t)to * halves[i];
    if (from < 0) device->zero_2d(device->self, at, pitch, halves[i], layers);
    else
      device->copy_2d(device->self, at, pitch, pages + (size_t)from * halves[i], pitch, halves[i],
                      layers);
  }
}

// ------------------------------------------------------------------------------------------- rows
static size_t row_bytes(const rm_model *model) {
  return (size_t)model->spec->hidden_size * rm_dtype_bytes(model->options.dtype);
}

static void *on_device(const rm_pass *pass, const void *here) {
  return rm_mirrored_on_device(pass->batch->mirrored, here);
}

// out[i] ← x[from[i]], rows of hidden elements. out and x must not overlap.
static void gather(rm_model *model, void *out, const void *x, const int32_t *from, int64_t rows) {
  const rm_gather_rows_args args = {out, x, from, rows, row_bytes(model)};
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
    look_up(pass, model->residual, on_device(pass, pass->batch->ids), pass->rows);
    return RM_OK;
  }
  const int64_t n_mine = model->embed_counts[shard->me], n_kept = rm_kept_rows(model, pass->rows).n;
  const int32_t *ids = copy_indices(model, model->embed_ids, n_mine),
                *from = copy_indices(model, model->embed_rows, n_kept);
  look_up(pass, model->x, ids, model->params->placement.vocab.n ? n_mine : 0);
  const rm_code code = rm_comm_gather_rows(shard->comm, model->x, model->home, model->embed_counts,
                                           row_bytes(model), pass->err);
  if (!code) gather(model, model->residual, model->home, from, n_kept);
  return code;
}

// out ← norm(residual += x · gate), without the addition when x is NULL, without the norm when
// weight is NULL, without out when it is NULL, without the gate when it is NULL.
static void norm_rows(rm_model *model, void *out, void *residual, const void *x, const void *gate,
                      const char *weight, int64_t rows) {
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
  char *out = model->x + (size_t)rows.first * row_bytes(model);
  norm_rows(model, out, model->residual, is_first ? NULL : output_of(model), NULL, weight, rows.n);
}

// Norms a block's output in place, in models with norms after blocks.
static void norm_output(const rm_pass *pass, rm_param_kind kind) {
  rm_model *model = pass->model;
  const char *weight = rm_weight(pass->weights, pass->layer, kind);
  if (weight)
    norm_rows(model, output_of(model), output_of(model), NULL, NULL, weight,
              rm_kept_rows(model, pass->rows).n);
}

// Completes x: all rows on every rank.
static rm_code complete_rows(const rm_pass *pass) {
  rm_model *model = pass->model;
  return model->sequence_parallel ? rm_shard_gather_rows(&model->shard, model->x, pass->rows,
                                                         row_bytes(model), pass->err)
                                  : RM_OK;
}

// Completes the rows of a matrix of which each rank has its columns: all rows in place, or with
// sequence parallelism the home rows in `home`.
static rm_code complete_columns(const rm_pass *pass, char *matrix, char *home) {
  rm_model *model = pass->model;
  return model->sequence_parallel
             ? rm_shard_columns_to_rows(&model->shard, RM_DIM_OUT, matrix, home, pass->rows,
                                        pass->err)
             : rm_shard_gather_columns(&model->shard, RM_DIM_OUT, matrix, pass->rows, pass->err);
}

// ----------------------------------------------------------------------------------------- blocks
// Computes the sums of squares of all heads of q and of k, for a norm over all heads; NULL in other
// models.
static rm_code gather_squares(const rm_pass *pass, const float **q, const float **k) {
  rm_model *model = pass->model;
  const rm_spec *spec = model->spec;
  const rm_placement *here = &model->params->placement;
  rm_shard *shard = &model->shard;
  const int64_t rows = pass->rows, kv_heads = here->kv_heads.n;
  *q = *k = NULL;
  if (spec->qk_norm != RM_QK_NORM_WHOLE) return RM_OK;
  float *k_part = model->squares + rows * here->heads.n,
        *k_all = model->all_squares + rows * spec->n_heads;
  const rm_head_squares_args args = {.q_out = model->squares,
                                     .k_out = k_part,
                                     .qkv = model->qkv,
                                     .rows = rows,
                                     .n_heads = here->heads.n,
                                     .n_kv_heads = kv_heads,
                                     .head_dim = spec->head_dim,
                                     .dtype = model->options.dtype};
  if (rows) model->kernels->head_squares(&model->ctx, &args);
  *q = shard->comm ? model->all_squares : model->squares;
  *k = shard->comm ? k_all : k_part;
  const int64_t n_new = model->params->here[RM_DIM_NEW_KV_HEADS].n;
  const rm_code code = rm_shard_gather_part(shard, RM_DIM_HEADS, sizeof(float), model->squares,
                                            here->heads.n, model->all_squares, rows, pass->err);
  return code ? code
              : rm_shard_gather_part(shard, RM_DIM_NEW_KV_HEADS, sizeof(float),
                                     k_part + kv_heads - n_new, kv_heads, k_all, rows, pass->err);
}

static rm_code write_kv(const rm_pass *pass, void *k, void *v) {
  rm_model *model = pass->model;
  const rm_batch *batch = pass->batch;
  const rm_placement *here = &model->params->placement;
  const float *q_squares, *k_squares;
  const rm_code code = gather_squares(pass, &q_squares, &k_squares);
  if (code) return code;
  const rm_qk_rope_kv_args args = {
      .q_out = model->q,
      .qkv = model->qkv,
      .q_weight = rm_weight(pass->weights, pass->layer, RM_P_Q_NORM),
      .k_weight = rm_weight(pass->weights, pass->layer, RM_P_K_NORM),
      .q_squares = q_squares,
      .k_squares = k_squares,
      .all_heads = model->spec->n_heads,
      .all_kv_heads = model->spec->n_kv_heads,
      .cos = model->cos,
      .sin = model->sin,
      .positions = on_device(pass, batch->positions),
      .slots = on_device(pass, batch->slots),
      .k_cache = k,
      .v_cache = v,
      .row_flags = on_device(pass, batch->row_flags),
      .eps = model->spec->rms_norm_eps,
      .rows = pass->rows,
      .n_heads = here->heads.n,
      .n_kv_heads = here->kv_heads.n,
      .head_dim = model->spec->head_dim,
      .page_size = model->options.page_size,
      .rotary_dim = model->spec->layers[pass->index].rotates ? model->spec->rotary_dim : 0,
      .dtype = model->options.dtype,
  };
  if (pass->rows) model->kernels->qk_rope_kv(&model->ctx, &args);
  return RM_OK;
}

// Writes its output to qkv, which is free by now.
static void attend(const rm_pass *pass, const void *k, const void *v) {
  rm_model *model = pass->model;
  const rm_batch *batch = pass->batch;
  const rm_spec *spec = model->spec;
  const rm_placement *here = &model->params->placement;
  const int64_t group = spec->n_heads / spec->n_kv_heads;
  const rm_attention_args args = {
      .out = model->qkv,
      .q = model->q,
      .k_cache = k,
      .v_cache = v,
      .positions = on_device(pass, batch->positions),
      .seq_of_row = on_device(pass, batch->seq_of_row),
      .block_tables = on_device(pass, batch->block_tables),
      .rows = pass->rows,
      .n_seqs = batch->n_seqs,
      .max_pages = batch->max_pages,
      .n_heads = here->heads.n,
      .n_kv_heads = here->kv_heads.n,
      .head_dim = spec->head_dim,
      .page_size = model->options.page_size,
      .group = group,
      .head0 = here->heads.first % group,
      .window = spec->layers[pass->index].window,
      .scale = (float)(1.0 / __builtin_sqrt((double)spec->head_dim)),
      .dtype = model->options.dtype,
  };
  if (pass->rows) model->kernels->attention(&model->ctx, &args);
}

static rm_code attention_block(const rm_pass *pass, void *k, void *v) {
  rm_model *model = pass->model;
  rm_shard *shard = &model->shard;
  const int64_t width = model->params->placement.heads.n * model->spec->head_dim;
  rm_code code = complete_rows(pass);
  if (code) return code;
  rm_linear(pass, RM_P_Q, model->x, model->qkv);
  if ((code = write_kv(pass, k, v))) return code;
  attend(pass, k, v);
  if ((code = rm_shard_gather_part(shard, RM_DIM_Q, shard->elem, model->qkv, width, model->attended,
                                   pass->rows, pass->err)))
    return code;
  rm_linear(pass, RM_P_O, shard->comm ? model->attended : model->qkv, model->x);
  return complete_columns(pass, model->x, model->home);
}

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
  rm_code code = complete_rows(pass);
  if (code) return code;
  if (!is_shared && model->spec->ungated) ungated_up(pass);
  else rm_linear(pass, is_shared ? RM_P_SHARED_GATE : RM_P_GATE, model->x, model->inner);
  if ((code = rm_shard_gather_columns(&model->shard, is_shared ? RM_DIM_SHARED_INNER : RM_DIM_INNER,
                                      model->inner, pass->rows, pass->err)))
    return code;
  rm_linear(pass, is_shared ? RM_P_SHARED_DOWN : RM_P_DOWN, model->inner, out);
  return complete_columns(pass, out, is_shared ? model->shared_home : model->home);
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
      .routed = (int16_t *)on_device(pass, batch->routed) + pass->moe_index * spec->top_k,
  };
  if (!model->moe.dispatches) {
    rm_code code = spec->shared_intermediate_size ? RM_OK : complete_rows(pass);
    if (!code) code = rm_moe_forward(&model->moe, &rows, pass->err);
    return code ? code : complete_columns(pass, model->x, model->home);
  }
  rows.out += (size_t)home.first * row_bytes(model);
  rows.x = rows.out;
  if (model->sequence_parallel) rows.out = model->home;
  rows.rows = home.n;
  rows.routed += home.first * spec->n_moe_layers * spec->top_k;
  const rm_code code = rm_moe_forward(&model->moe, &rows, pass->err);
  return code || model->sequence_parallel
             ? code
             : rm_shard_gather_rows(shard, model->x, pass->rows, row_bytes(model), pass->err);
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
              model->sequence_parallel ? model->shared_home : model->shared, gate, NULL, rows.n);
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
  const int32_t *from = on_device(pass, batch->out_rows);
  int64_t n = batch->n_out;
  if (model->sequence_parallel && rm_is_static(model, batch)) {
    norm(pass, weight, 0);
    const rm_code code = complete_rows(pass);
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
  norm_rows(model, model->x, model->out_residual, model->residual, NULL, weight, n);
  *hidden = model->x;
  if (!model->sequence_parallel) return RM_OK;
  *hidden = model->home;
  return rm_comm_gather_rows(model->shard.comm, model->x, model->home, model->out_counts,
                             row_bytes(model), pass->err);
}

rm_code rm_model_forward(rm_model *model, const void *weights, void *kv, int64_t n_pages,
                         const rm_batch *batch, const void **hidden, rm_error *err) {
  const rm_spec *spec = model->spec;
  rm_pass pass = {
      .model = model, .weights = weights, .batch = batch, .rows = batch->n_rows, .err = err};
  const int64_t kv_heads = model->params->placement.kv_heads.n;
  const size_t pages_k = (size_t)n_pages * k_bytes(model, kv_heads),
               pages_v = (size_t)n_pages * v_bytes(model, kv_heads);
  char *k = kv; // of the layer
  rm_code code = embed(&pass);
  for (int64_t i = 0; i < spec->n_layers && !code; i++) {
    pass.index = i;
    pass.layer = &model->params->layers[i];
    norm(&pass, rm_weight(weights, pass.layer, RM_P_INPUT_NORM), i == 0);
    if ((code = attention_block(&pass, k, k + pages_k))) break;
    k += pages_k + pages_v;
    norm_output(&pass, RM_P_POST_ATTN_NORM);
    norm(&pass, rm_weight(weights, pass.layer, RM_P_PRE_MLP_NORM), 0);
    if ((code = spec->layers[i].is_moe ? moe_block(&pass) : mlp_block(&pass, 0))) break;
    pass.moe_index += spec->layers[i].is_moe != 0;
    norm_output(&pass, RM_P_POST_MLP_NORM);
  }
  if (!code && pass.moe_index && model->moe.dispatches)
    code = rm_shard_gather_rows(&model->shard, on_device(&pass, batch->routed), pass.rows,
                                (size_t)(spec->n_moe_layers * spec->top_k) * sizeof *batch->routed,
                                err);
  return code ? code : finish(&pass, hidden);
}
