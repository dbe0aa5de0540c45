// latent.c: the kind "latent": multi-head latent attention (MLA). Prefill and decode both compute
// the absorbed form, so that they have the same bits. The cache has one kv head for all heads: the
// rotated key, then the normed latent. kv_b_proj has two parts for each head, k_b and v_b. The part
// of q without rope, multiplied by k_b, is a query for latents. Attention's output is a weighted
// sum of latents for each head, and multiplied by v_b it is the head's output. A page has the K of
// the kv head and then its V, which is the latent again, in V's layout.
#include "model/layer_kinds.h"

// For each head: y[head] ← x[head] · the head's matrix [n]×[k] of kind k_b or v_b. ldx, ldy:
// elements from one row to the next; x_step, y_step: elements from one head to the next.
static void multiply_heads(const rm_pass *pass, rm_param_kind kind, rm_gemm_args args,
                           int64_t x_step, int64_t y_step) {
  rm_model *model = pass->model;
  const size_t elem = model->shard.elem;
  args.w = rm_weight(pass->weights, pass->layer, kind);
  args.m = pass->rows;
  args.dtype = args.y_dtype = model->options.dtype;
  for (int64_t head = 0; head < model->params->placement.heads.n && args.m; head++) {
    model->kernels->gemm(&model->ctx, &args);
    args.x = (const char *)args.x + (size_t)x_step * elem;
    args.y = (char *)args.y + (size_t)y_step * elem;
    args.w = (const char *)args.w + (size_t)rm_packed_elems(args.n, args.k) * elem;
  }
}

// qkv ← q, the latent and the key of all rows, side by side.
static void project(const rm_pass *pass) {
  rm_model *model = pass->model;
  const char *weight = rm_weight(pass->weights, pass->layer, RM_P_Q_A_NORM), *from = model->x;
  if (weight) {
    const rm_rms_norm_args args = {.out = model->latents,
                                   .residual = model->latents,
                                   .weight = weight,
                                   .eps = RM_LATENT_EPS,
                                   .rows = pass->rows,
                                   .n = model->spec->q_lora_rank,
                                   .dtype = model->options.dtype};
    rm_linear(pass, RM_P_Q_A, model->x, model->latents);
    if (pass->rows) model->kernels->rms_norm(&model->ctx, &args);
    from = model->latents;
  }
  rm_linear(pass, RM_P_Q_B, from, model->qkv);
  rm_linear(pass, RM_P_KV_A, model->x,
            model->qkv + (size_t)model->params->placement.dims[RM_DIM_Q_B].n * model->shard.elem);
}

rm_code rm_latent_forward(const rm_pass *pass, const rm_layer_cache *cache) {
  rm_model *model = pass->model;
  const rm_spec *spec = model->spec;
  const int64_t heads = model->params->placement.heads.n, rank = spec->kv_lora_rank;
  RM_TRY(rm_complete_rows(pass));
  project(pass);
  const rm_gemm_args to_latents = {.y = model->q + (size_t)spec->rotary_dim * model->shard.elem,
                                   .x = model->qkv,
                                   .n = rank,
                                   .k = spec->qk_nope_head_dim,
                                   .ldx = rm_qkv_width(model->params),
                                   .ldy = heads * spec->head_dim};
  multiply_heads(pass, RM_P_K_B, to_latents, rm_q_dim(spec), spec->head_dim);
  RM_TRY(rm_write_kv(pass, cache));
  rm_attend(pass, cache, model->latents);
  const rm_gemm_args to_heads = {.y = model->qkv,
                                 .x = model->latents,
                                 .n = spec->v_head_dim,
                                 .k = rank,
                                 .ldx = heads * rank,
                                 .ldy = heads * spec->v_head_dim};
  multiply_heads(pass, RM_P_V_B, to_heads, rank, spec->v_head_dim);
  return rm_project_output(pass, RM_DIM_Q, model->qkv, RM_P_O);
}
