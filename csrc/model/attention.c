// attention.c: the kind "attention": multi-head attention with grouped KV heads. A page has the K
// and then the V of this rank's KV heads.
#include "model/layer_kinds.h"

rm_layer_bytes rm_attention_bytes(const rm_model *model, const rm_placement *here) {
  const int64_t page_size = model->options.page_size, head_dim = model->spec->head_dim,
                value_dim = rm_value_dim(model->spec->kv_lora_rank, head_dim);
  const size_t heads = (size_t)here->kv_heads.n * rm_dtype_bytes(model->options.dtype);
  return (rm_layer_bytes){.pages = {heads * (size_t)rm_k_page_elems(page_size, head_dim),
                                    heads * (size_t)rm_v_page_elems(page_size, value_dim)}};
}

// Sets *q and *k to the sums of squares of all heads, for a norm over all heads; in other models to
// NULL.
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
  const int64_t n_new = model->params->placement.dims[RM_DIM_NEW_KV_HEADS].n;
  RM_TRY(rm_shard_gather_part(shard, RM_DIM_HEADS, sizeof(float), model->squares, here->heads.n,
                              model->all_squares, rows, pass->err));
  return rm_shard_gather_part(shard, RM_DIM_NEW_KV_HEADS, sizeof(float), k_part + kv_heads - n_new,
                              kv_heads, k_all, rows, pass->err);
}

rm_code rm_write_kv(const rm_pass *pass, const rm_layer_cache *cache) {
  rm_model *model = pass->model;
  const rm_batch *batch = pass->batch;
  const rm_spec *spec = model->spec;
  const rm_placement *here = &model->params->placement;
  const float *q_squares, *k_squares;
  RM_TRY(gather_squares(pass, &q_squares, &k_squares));
  const int is_latent = spec->kv_lora_rank > 0, rope = spec->layers[pass->index].rotates;
  const int64_t table = rope > 1 ? rm_rope_elems(model) : 0;
  const rm_qk_rope_kv_args args = {
      .q_out = model->q,
      .qkv = model->qkv,
      .q_weight = rm_weight(pass->weights, pass->layer, RM_P_Q_NORM),
      .k_weight = rm_weight(pass->weights, pass->layer, is_latent ? RM_P_KV_A_NORM : RM_P_K_NORM),
      .q_squares = q_squares,
      .k_squares = k_squares,
      .all_heads = spec->n_heads,
      .all_kv_heads = spec->n_kv_heads,
      .cos = model->cos + table,
      .sin = model->sin + table,
      .positions = rm_on_device(pass, batch->positions),
      .slots = rm_on_device(pass, batch->slots),
      .k_cache = cache->pages[0],
      .v_cache = cache->pages[1],
      .row_flags = rm_on_device(pass, batch->row_flags),
      .eps = is_latent ? RM_LATENT_EPS : spec->rms_norm_eps,
      .rows = pass->rows,
      .n_heads = here->heads.n,
      .n_kv_heads = here->kv_heads.n,
      .head_dim = spec->head_dim,
      .page_size = model->options.page_size,
      .rotary_dim = rope ? spec->rotary_dim : 0,
      .dtype = model->options.dtype,
      .zero_centered = spec->zero_centered_norms,
      .norm_last = !is_latent && spec->qk_norm_last,
      .value_dim = spec->kv_lora_rank,
      .q_dim = rm_q_dim(spec),
  };
  if (pass->rows) model->kernels->qk_rope_kv(&model->ctx, &args);
  return RM_OK;
}

void rm_attend(const rm_pass *pass, const rm_layer_cache *cache, char *out) {
  rm_model *model = pass->model;
  const rm_batch *batch = pass->batch;
  const rm_spec *spec = model->spec;
  const rm_placement *here = &model->params->placement;
  const int64_t group = spec->n_heads / spec->n_kv_heads;
  const rm_attention_args args = {
      .out = out,
      .q = model->q,
      .k_cache = cache->pages[0],
      .v_cache = cache->pages[1],
      .positions = rm_on_device(pass, batch->positions),
      .seq_of_row = rm_on_device(pass, batch->seq_of_row),
      .block_tables = rm_on_device(pass, batch->block_tables),
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
      .scale = spec->attention_scale != 0 ? spec->attention_scale
                                          : (float)(1.0 / __builtin_sqrt((double)spec->head_dim)),
      .dtype = model->options.dtype,
      .sinks = rm_weight(pass->weights, pass->layer, RM_P_SINKS),
      .softcap = spec->attention_softcap,
      .value_dim = rm_value_dim(spec->kv_lora_rank, spec->head_dim),
  };
  if (pass->rows) model->kernels->attention(&model->ctx, &args);
}

// Multiplies attention's output by the sigmoid of the gate, which is computed from x.
static void gate_output(const rm_pass *pass) {
  rm_model *model = pass->model;
  const int64_t n = model->params->placement.heads.n * model->spec->head_dim;
  const rm_sigmoid_gate_args args = {model->qkv, model->qkv, model->attn_gate,
                                     pass->rows, n,          model->options.dtype};
  rm_linear(pass, RM_P_ATTN_GATE, model->x, model->attn_gate);
  if (pass->rows) model->kernels->sigmoid_gate(&model->ctx, &args);
}

rm_code rm_project_output(const rm_pass *pass, rm_dim dim, const char *part, rm_param_kind kind) {
  rm_model *model = pass->model;
  rm_shard *shard = &model->shard;
  RM_TRY(rm_shard_gather_part(shard, dim, shard->elem, part, model->params->placement.dims[dim].n,
                              model->attended, pass->rows, pass->err));
  rm_linear(pass, kind, shard->comm ? model->attended : part, model->x);
  return rm_complete_columns(pass, model->x, model->home);
}

// Attention's output is written to qkv, which is free by then.
rm_code rm_attention_forward(const rm_pass *pass, const rm_layer_cache *cache) {
  rm_model *model = pass->model;
  RM_TRY(rm_complete_rows(pass));
  rm_linear(pass, RM_P_Q, model->x, model->qkv);
  RM_TRY(rm_write_kv(pass, cache));
  rm_attend(pass, cache, model->qkv);
  if (model->spec->attention_gate) gate_output(pass);
  return rm_project_output(pass, RM_DIM_Q, model->qkv, RM_P_O);
}
