// create.c: creates and destroys a model: its activations, rope table and parts.
#include <stdio.h>

#include "model/model_internal.h"

// The columns of the output of a layer's first block, before its last linear layer, over all ranks;
// and those of its inputs on this rank.
static int64_t width_of_heads(const rm_spec *spec) {
  return rm_max64(spec->n_heads * rm_out_dim(spec), spec->delta_v_heads * spec->delta_v_dim);
}
static int64_t width_of_inputs(const rm_params *params) {
  return rm_max64(rm_qkv_width(params), rm_delta_width(params));
}

static rm_limits limits_of(const rm_params *params, const rm_model_options *options,
                           int n_threads) {
  const rm_spec *spec = params->spec;
  const int64_t heads = rm_max64(width_of_heads(spec), spec->n_heads * spec->head_dim);
  const int64_t inner = rm_max64(rm_max64(spec->intermediate_size, spec->shared_intermediate_size),
                                 spec->moe_intermediate_size);
  return (rm_limits){
      .max_rows = options->max_rows,
      .max_k = rm_max64(rm_max64(spec->hidden_size, spec->q_lora_rank), rm_max64(inner, heads)),
      .max_n = rm_max64(rm_max64(spec->hidden_size, spec->q_lora_rank),
                        rm_max64(width_of_inputs(params), rm_gate_up_rows(inner))),
      .vocab = spec->vocab_size,
      .n_heads = params->placement.heads.n,
      .n_kv_heads = params->placement.kv_heads.n,
      .head_dim = spec->head_dim,
      .group = spec->n_heads / spec->n_kv_heads,
      .max_positions = options->max_positions,
      .n_experts = spec->n_experts,
      .top_k = spec->top_k,
      .k_dim = spec->delta_k_dim,
      .v_dim = spec->delta_v_dim,
      .kernel = spec->delta_kernel,
      .n_threads = n_threads,
  };
}

// The number of rope tables.
static int n_ropes(const rm_spec *spec) { return spec->local_inv_freq ? 2 : 1; }

// Allocates all activations as one block.
static rm_code create_buffers(rm_model *model, char **workspace, size_t workspace_bytes,
                              rm_error *err) {
  const rm_model_options *options = &model->options;
  const rm_spec *spec = model->spec;
  const int parallel = model->shard.comm != NULL;
  const size_t rows = (size_t)options->max_rows, elem = rm_dtype_bytes(options->dtype),
               half = (size_t)spec->rotary_dim / 2, row = (size_t)spec->hidden_size * elem;
  const size_t table = (size_t)(options->max_positions * n_ropes(spec)) * sizeof(float),
               wide = (size_t)width_of_heads(spec) * elem;
  const rm_placement *here = &model->params->placement;
  const int64_t heads = here->heads.n, own_wide = rm_max64(heads * spec->head_dim,
                                                           here->delta_heads.n * spec->delta_v_dim);
  const size_t looked_up =
      (size_t)rm_max64(options->max_rows, options->static_rows * model->shard.size);
  const size_t shared_rows = spec->shared_intermediate_size ? rows : 0;
  const size_t normed_rows = spec->qk_norm == RM_QK_NORM_WHOLE ? rows : 0;
  enum { FIELDS = 19 };
  rm_field fields[FIELDS + RM_HEAD_FIELDS + RM_MOE_FIELDS] = {
      {&model->cos, table, half},
      {&model->sin, table, half},
      {&model->residual, rows, row},
      {&model->x, rows, row},
      {&model->out_residual, rows, row},
      {&model->qkv, rows,
       (size_t)rm_max64(width_of_inputs(model->params), heads * rm_out_dim(spec)) * elem},
      {&model->q, rows, (size_t)own_wide * elem},
      {&model->latents, spec->kv_lora_rank ? rows : 0,
       (size_t)rm_max64(heads * spec->kv_lora_rank, spec->q_lora_rank) * elem},
      {&model->attn_gate, spec->attention_gate ? rows : 0, (size_t)(heads * spec->head_dim) * elem},
      {&model->inner, spec->n_moe_layers < spec->n_layers || shared_rows ? rows : 0,
       (size_t)rm_max64(spec->intermediate_size, spec->shared_intermediate_size) * elem},
      RM_FIELD_ROWS(model->squares, normed_rows, heads + here->kv_heads.n),
      RM_FIELD_ROWS(model->all_squares, parallel ? normed_rows : 0,
                    spec->n_heads + spec->n_kv_heads),
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
  snprintf(what, sizeof what, "activations (%ld rows a step, %ld positions)", options->max_rows,
           options->max_positions);
  RM_TRY(rm_device_alloc(model->device, model->block_bytes, what, &model->block, err));
  rm_fields_place(fields, n_fields, model->block);
  return RM_OK;
}

static void make_rope_table(const rm_model *model, float *cos, float *sin) {
  const rm_spec *spec = model->spec;
  const uint32_t saved = rm_fp_enter();
  for (int i = 0; i < n_ropes(spec); i++) {
    const int64_t at = i * rm_rope_elems(model);
    rm_rope_table(cos + at, sin + at, i ? spec->local_inv_freq : spec->inv_freq,
                  model->options.max_positions, spec->rotary_dim / 2,
                  i ? spec->local_rope_scale : spec->rope_scale, model->options.dtype);
  }
  rm_fp_leave(saved);
}

// Computes the table on the host for every device, so that all devices have the same values.
static rm_code fill_rope_table(rm_model *model, rm_error *err) {
  const rm_device *device = model->device;
  const size_t n = (size_t)(rm_rope_elems(model) * n_ropes(model->spec));
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
  const int64_t rows = model->options.max_rows, outs = model->options.max_out_rows;
  const rm_field fields[] = {
      RM_FIELD(model->embed_ids, rows),
      RM_FIELD(model->embed_rows, rows),
      RM_FIELD(model->own_out_rows, rows),
      RM_FIELD(model->local_targets, outs),
      RM_FIELD(model->from_targets, outs),
      RM_FIELD(model->embed_counts, model->shard.size),
      RM_FIELD(model->out_counts, model->shard.size),
  };
  const size_t n = sizeof fields / sizeof *fields;
  if (!model->shard.comm) return RM_OK;
  RM_TRY(rm_mirrored_create(model->device, rm_fields_bytes(fields, n), "indices", &model->indices,
                            err));
  rm_fields_place(fields, n, model->indices.host);
  return RM_OK;
}

static rm_code create_parts(rm_model *model, rm_team *team, rm_error *err) {
  const rm_model_options *options = &model->options;
  const rm_spec *spec = model->spec;
  const rm_limits limits = limits_of(model->params, options, rm_team_threads(team));
  char *workspace;
  const size_t workspace_bytes = model->kernels->workspace_bytes(&limits);
  RM_TRY(rm_shard_create(spec, options->rank, options->dtype, &model->shard, err));
  if (spec->n_moe_layers)
    RM_TRY(rm_moe_create(&model->moe, model->params, model->device, options->rank, &model->shard,
                         &model->ctx, options->max_rows, err));
  RM_TRY(create_buffers(model, &workspace, workspace_bytes, err));
  RM_TRY(create_indices(model, err));
  if (model->params->plain) RM_TRY(rm_open_vendor_gemm(model, err));
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

const rm_ctx *rm_model_ctx(const rm_model *model) { return &model->ctx; }
size_t rm_model_workspace_bytes(const rm_model *model) {
  return model->block_bytes + model->indices.bytes + rm_moe_bytes(&model->moe);
}
