// model.c: the walk of a token. One function per block of a layer, each a few calls of the op table; no arithmetic is done
// here. All rows of a step go through together, whatever sequences they belong to: only attention knows sequences, and every
// op treats a row the same in any company, which is what makes batching invisible.
//
// Buffers: `residual` is the stream that blocks add to, `x` what a block reads and then writes. The rows whose output is wanted
// are gathered before the final norm; earlier they cannot be, since every row's routing is recorded.
#include "model/model.h"

#include "model/moe/moe.h"

struct rm_model {
  const rm_params *params;      // view
  const rm_spec *spec;          // view
  const rm_kernels *kernels;
  rm_model_options options;
  rm_ctx ctx;
  void *block;                  // all that follows
  size_t block_bytes;
  float *cos, *sin;             // [max_positions][head_dim/2]
  char *residual, *x;           // T [max_rows][hidden]
  char *qkv;                    // T [max_rows][(heads + 2·kv_heads)·head_dim]; then attention's output
  char *q;                      // T [max_rows][heads·head_dim]
  char *inner;                  // T [max_rows][intermediate], where a layer is dense
  rm_moe moe;                   // where one is not
};

static int64_t layer_width(const rm_spec *spec) { return (spec->n_heads + 2 * spec->n_kv_heads) * spec->head_dim; }

static rm_limits limits_of(const rm_spec *spec, const rm_model_options *options, int n_threads) {
  const int64_t heads = spec->n_heads * spec->head_dim;
  const int64_t inner = rm_max64(spec->intermediate_size, spec->moe_intermediate_size);
  return (rm_limits){
      .max_rows = options->max_rows,
      .max_k = rm_max64(spec->hidden_size, rm_max64(inner, heads)),
      .max_n = rm_max64(rm_max64(spec->hidden_size, layer_width(spec)), rm_gate_up_rows(inner)),
      .vocab = spec->vocab_size,
      .n_heads = spec->n_heads,
      .n_kv_heads = spec->n_kv_heads,
      .head_dim = spec->head_dim,
      .max_positions = options->max_positions,
      .n_experts = spec->n_experts,
      .top_k = spec->top_k,
      .n_threads = n_threads,
  };
}

rm_code rm_model_create(const rm_params *params, const rm_kernels *kernels, rm_team *team, const rm_model_options *options, rm_model **out,
                        rm_error *err) {
  const rm_spec *spec = params->spec;
  *out = NULL;
  rm_model *model = rm_alloc(1, sizeof *model);
  if (!model) return rm_fail(err, RM_E_MEMORY, "no memory for the model");
  *model = (rm_model){.params = params, .spec = spec, .kernels = kernels, .options = *options};
  model->moe = (rm_moe){.spec = spec, .kernels = kernels, .dtype = options->dtype};
  const rm_limits limits = limits_of(spec, options, rm_team_threads(team));
  const size_t rows = (size_t)options->max_rows, elem = rm_dtype_bytes(options->dtype), half = (size_t)spec->head_dim / 2;
  const size_t table = (size_t)options->max_positions * sizeof(float);
  char *workspace;
  const size_t workspace_bytes = kernels->workspace_bytes(&limits);
  rm_field fields[8 + RM_MOE_FIELDS] = {
      {&model->cos, table, half},
      {&model->sin, table, half},
      {&model->residual, rows, (size_t)spec->hidden_size * elem},
      {&model->x, rows, (size_t)spec->hidden_size * elem},
      {&model->qkv, rows, (size_t)layer_width(spec) * elem},
      {&model->q, rows, (size_t)(spec->n_heads * spec->head_dim) * elem},
      {&model->inner, spec->n_moe_layers < spec->n_layers ? rows : 0, (size_t)spec->intermediate_size * elem},
      {&workspace, workspace_bytes, 1},
  };
  const size_t n_fields = spec->n_moe_layers ? 8 + RM_MOE_FIELDS : 8;
  if (spec->n_moe_layers) rm_moe_fields(&model->moe, options->max_rows, fields + 8);
  model->block_bytes = rm_fields_bytes(fields, n_fields);
  model->block = model->block_bytes ? rm_map(model->block_bytes) : NULL;
  if (!model->block || !rm_fields_place(fields, n_fields, model->block, model->block_bytes)) {
    const size_t wanted = model->block_bytes;
    rm_model_destroy(model);
    return rm_fail(err, RM_E_MEMORY, "no memory for %zu bytes of activations (%lld rows a step, %lld positions)", wanted,
                   (long long)options->max_rows, (long long)options->max_positions);
  }
  model->ctx = (rm_ctx){.workspace = workspace, .workspace_bytes = workspace_bytes, .n_threads = rm_team_threads(team)};
  model->ctx.run = rm_team_run;
  model->ctx.team = team;
  const uint32_t saved = rm_fp_enter();
  rm_rope_table(model->cos, model->sin, spec->inv_freq, options->max_positions, spec->head_dim / 2, spec->rope_scale, options->dtype);
  rm_fp_leave(saved);
  *out = model;
  return RM_OK;
}

void rm_model_destroy(rm_model *model) {
  if (!model) return;
  rm_unmap(model->block, model->block_bytes);
  rm_free(model);
}

const rm_ctx *rm_model_ctx(const rm_model *model) { return &model->ctx; }
size_t rm_model_workspace_bytes(const rm_model *model) { return model->block_bytes; }

// ---------------------------------------------------------------------------------------------- KV pages
// Bytes of one page's K, and of its V, in one layer.
static size_t k_bytes(const rm_model *model) {
  return (size_t)(model->spec->n_kv_heads * rm_k_page_elems(model->options.page_size, model->spec->head_dim)) *
         rm_dtype_bytes(model->options.dtype);
}

static size_t v_bytes(const rm_model *model) {
  return (size_t)(model->spec->n_kv_heads * rm_v_page_elems(model->options.page_size, model->spec->head_dim)) *
         rm_dtype_bytes(model->options.dtype);
}

size_t rm_model_page_bytes(const rm_model *model) { return (size_t)model->spec->n_layers * (k_bytes(model) + v_bytes(model)); }

static char *k_cache(const rm_model *model, void *kv, int64_t n_pages, int64_t layer) {
  return (char *)kv + (size_t)layer * (size_t)n_pages * (k_bytes(model) + v_bytes(model));
}

static char *v_cache(const rm_model *model, void *kv, int64_t n_pages, int64_t layer) {
  return k_cache(model, kv, n_pages, layer) + (size_t)n_pages * k_bytes(model);
}

void rm_model_zero_page(const rm_model *model, void *kv, int64_t n_pages, int32_t page) {
  const size_t k = k_bytes(model), v = v_bytes(model);
  for (int64_t layer = 0; layer < model->spec->n_layers; layer++) {
    memset(k_cache(model, kv, n_pages, layer) + (size_t)page * k, 0, k);
    memset(v_cache(model, kv, n_pages, layer) + (size_t)page * v, 0, v);
  }
}

void rm_model_copy_page(const rm_model *model, void *kv, int64_t n_pages, int32_t to, int32_t from) {
  const size_t k = k_bytes(model), v = v_bytes(model);
  for (int64_t layer = 0; layer < model->spec->n_layers; layer++) {
    char *ks = k_cache(model, kv, n_pages, layer), *vs = v_cache(model, kv, n_pages, layer);
    memcpy(ks + (size_t)to * k, ks + (size_t)from * k, k);
    memcpy(vs + (size_t)to * v, vs + (size_t)from * v, v);
  }
}

// ---------------------------------------------------------------------------------------------- blocks
static void embed(rm_model *model, const char *weights, const rm_batch *batch) {
  const rm_embed_args args = {
      .out = model->residual,
      .ids = batch->ids,
      .table = weights + model->params->embed,
      .packed = model->spec->tie_word_embeddings,
      .rows = batch->n_rows,
      .hidden = model->spec->hidden_size,
      .dtype = model->options.dtype,
  };
  model->kernels->embed(&model->ctx, &args);
}

// x ← norm(residual += x), without the addition when `first`.
static void norm(rm_model *model, const char *weight, int64_t rows, int first) {
  const rm_rms_norm_args args = {
      .out = model->x,
      .residual = model->residual,
      .x = first ? NULL : model->x,
      .weight = weight,
      .eps = model->spec->rms_norm_eps,
      .rows = rows,
      .n = model->spec->hidden_size,
      .dtype = model->options.dtype,
  };
  model->kernels->rms_norm(&model->ctx, &args);
}

static rm_gemm_args linear(const rm_model *model, void *y, const void *x, const char *w, const char *bias, int64_t m, int64_t n,
                           int64_t k) {
  return (rm_gemm_args){.y = y,
                        .x = x,
                        .w = w,
                        .bias = bias,
                        .m = m,
                        .n = n,
                        .k = k,
                        .ldx = k,
                        .ldy = n,
                        .dtype = model->options.dtype,
                        .y_dtype = model->options.dtype};
}

static const char *optional(const char *weights, size_t offset) { return offset == SIZE_MAX ? NULL : weights + offset; }

static void write_kv(rm_model *model, const rm_layer_params *layer, const char *weights, void *k, void *v, const rm_batch *batch) {
  const rm_spec *spec = model->spec;
  const rm_qk_rope_kv_args args = {
      .q_out = model->q,
      .qkv = model->qkv,
      .q_weight = weights + layer->q_norm,
      .k_weight = weights + layer->k_norm,
      .cos = model->cos,
      .sin = model->sin,
      .positions = batch->positions,
      .slots = batch->slots,
      .k_cache = k,
      .v_cache = v,
      .row_flags = batch->row_flags,
      .eps = spec->rms_norm_eps,
      .rows = batch->n_rows,
      .n_heads = spec->n_heads,
      .n_kv_heads = spec->n_kv_heads,
      .head_dim = spec->head_dim,
      .page_size = model->options.page_size,
      .dtype = model->options.dtype,
  };
  model->kernels->qk_rope_kv(&model->ctx, &args);
}

static void attend(rm_model *model, int64_t index, const void *k, const void *v, const rm_batch *batch) {
  const rm_spec *spec = model->spec;
  const rm_attention_args args = {
      .out = model->qkv,
      .q = model->q,
      .k_cache = k,
      .v_cache = v,
      .positions = batch->positions,
      .seq_of_row = batch->seq_of_row,
      .block_tables = batch->block_tables,
      .rows = batch->n_rows,
      .n_seqs = batch->n_seqs,
      .max_pages = batch->max_pages,
      .n_heads = spec->n_heads,
      .n_kv_heads = spec->n_kv_heads,
      .head_dim = spec->head_dim,
      .page_size = model->options.page_size,
      .window = spec->layers[index].window,
      .scale = (float)(1.0 / __builtin_sqrt((double)spec->head_dim)),
      .dtype = model->options.dtype,
  };
  model->kernels->attention(&model->ctx, &args);
}

static void attention_block(rm_model *model, int64_t index, const char *weights, void *kv, int64_t n_pages, const rm_batch *batch) {
  const rm_spec *spec = model->spec;
  const rm_layer_params *layer = &model->params->layers[index];
  const int64_t rows = batch->n_rows, hidden = spec->hidden_size, heads = spec->n_heads * spec->head_dim;
  void *k = k_cache(model, kv, n_pages, index), *v = v_cache(model, kv, n_pages, index);
  const rm_gemm_args in =
      linear(model, model->qkv, model->x, weights + layer->qkv, optional(weights, layer->qkv_bias), rows, layer_width(spec), hidden);
  model->kernels->gemm(&model->ctx, &in);
  write_kv(model, layer, weights, k, v, batch);
  attend(model, index, k, v, batch);
  const rm_gemm_args back = linear(model, model->x, model->qkv, weights + layer->o, optional(weights, layer->o_bias), rows, hidden, heads);
  model->kernels->gemm(&model->ctx, &back);
}

static void mlp_block(rm_model *model, const rm_layer_params *layer, const char *weights, int64_t rows) {
  const int64_t hidden = model->spec->hidden_size, width = model->spec->intermediate_size;
  const rm_gemm_args in = linear(model, model->inner, model->x, weights + layer->gate_up, NULL, rows, width, hidden);
  model->kernels->gemm_swiglu(&model->ctx, &in);
  const rm_gemm_args back = linear(model, model->x, model->inner, weights + layer->down, NULL, rows, hidden, width);
  model->kernels->gemm(&model->ctx, &back);
}

// Moves the wanted rows to the front. out_rows ascend, so a row is read before anything is written over it.
static void gather(const rm_model *model, char *rows, const rm_batch *batch) {
  const size_t bytes = (size_t)model->spec->hidden_size * rm_dtype_bytes(model->options.dtype);
  for (int64_t i = 0; i < batch->n_out; i++)
    if (batch->out_rows[i] != i) memcpy(rows + (size_t)i * bytes, rows + (size_t)batch->out_rows[i] * bytes, bytes);
}

void rm_model_forward(rm_model *model, const void *weights, void *kv, int64_t n_pages, const rm_batch *batch, const void **hidden) {
  const rm_spec *spec = model->spec;
  const char *base = weights;
  int64_t moe_layer = 0;
  embed(model, base, batch);
  for (int64_t i = 0; i < spec->n_layers; i++) {
    const rm_layer_params *layer = &model->params->layers[i];
    norm(model, base + layer->input_norm, batch->n_rows, i == 0);
    attention_block(model, i, base, kv, n_pages, batch);
    norm(model, base + layer->post_norm, batch->n_rows, 0);
    if (spec->layers[i].is_moe)
      rm_moe_forward(&model->moe, &model->ctx, layer, base, model->x, batch->n_rows, batch->routed + moe_layer++ * spec->top_k,
                     spec->n_moe_layers * spec->top_k);
    else mlp_block(model, layer, base, batch->n_rows);
  }
  gather(model, model->residual, batch);
  gather(model, model->x, batch);
  norm(model, base + model->params->final_norm, batch->n_out, 0);
  *hidden = model->x;
}
