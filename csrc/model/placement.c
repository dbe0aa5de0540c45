// placement.c: see placement.h.
#include "model/placement.h"

#include <string.h>

rm_range rm_share(int64_t n, int64_t unit, int64_t parts, int64_t index) {
  const int64_t units = (n + unit - 1) / unit;
  const int64_t first = rm_min64(units * index / parts * unit, n),
                end = rm_min64(units * (index + 1) / parts * unit, n);
  return (rm_range){.first = first, .n = end - first};
}

rm_code rm_placement_check(const rm_spec *spec, const rm_mesh *mesh, rm_error *err) {
  RM_FAIL_IF(spec->n_heads % mesh->tp, RM_E_CONFIG,
             "tp: expected a divisor of num_attention_heads=%ld, got %d", spec->n_heads, mesh->tp);
  RM_FAIL_IF(spec->delta_v_heads % mesh->tp, RM_E_CONFIG,
             "tp: expected a divisor of linear_num_value_heads=%ld, got %d", spec->delta_v_heads,
             mesh->tp);
  RM_FAIL_IF(mesh->ep > 1 && !spec->n_experts, RM_E_CONFIG,
             "ep: expected 1 for a model without experts, got %d", mesh->ep);
  RM_FAIL_IF(mesh->ep > 1 && spec->n_experts % mesh->ep, RM_E_CONFIG,
             "ep: expected a divisor of num_experts=%ld, got %d", spec->n_experts, mesh->ep);
  return RM_OK;
}

// The KV heads (key heads) that these query heads (value heads) read, `group` of them each.
static rm_range kv_heads_of(int64_t group, rm_range heads) {
  const int64_t first = heads.first / group;
  return (rm_range){.first = first, .n = (heads.first + heads.n - 1) / group - first + 1};
}

// The KV heads of `heads` that no lower rank of the tp group holds.
static rm_range new_heads(rm_range heads, rm_range kv_heads, int64_t group) {
  const int64_t shared = heads.first % group != 0;
  return (rm_range){kv_heads.first + shared, kv_heads.n - shared};
}

static rm_range scaled(rm_range r, int64_t by) { return (rm_range){r.first * by, r.n * by}; }

static void set_dims(const rm_spec *spec, rm_placement *p) {
  const rm_range dims[RM_N_DIM] = {
      [RM_DIM_ONE] = {0, 1},
      [RM_DIM_HIDDEN] = {0, spec->hidden_size},
      [RM_DIM_HEAD] = {0, spec->head_dim},
      [RM_DIM_Q_RANK] = {0, spec->q_lora_rank ? spec->q_lora_rank : spec->hidden_size},
      [RM_DIM_LATENT] = {0, spec->kv_lora_rank},
      [RM_DIM_KV_A] = {0, spec->head_dim},
      [RM_DIM_NOPE] = {0, spec->qk_nope_head_dim},
      [RM_DIM_DELTA_HEAD] = {0, spec->delta_v_dim},
      [RM_DIM_KERNEL] = {0, spec->delta_kernel},
      [RM_DIM_EXPERTS] = {0, spec->n_experts},
      [RM_DIM_VOCAB] = p->vocab,
      [RM_DIM_Q] = scaled(p->heads, rm_out_dim(spec)),
      [RM_DIM_Q_B] = scaled(p->heads, rm_q_dim(spec)),
      [RM_DIM_K_B] = scaled(p->heads, spec->kv_lora_rank),
      [RM_DIM_KV] = scaled(p->kv_heads, spec->head_dim),
      [RM_DIM_DELTA_K] = scaled(p->delta_k_heads, spec->delta_k_dim),
      [RM_DIM_DELTA_V] = scaled(p->delta_heads, spec->delta_v_dim),
      [RM_DIM_DELTA_HEADS] = p->delta_heads,
      [RM_DIM_OUT] = p->hidden,
      [RM_DIM_INNER] = p->inner,
      [RM_DIM_SHARED_INNER] = p->shared_inner,
      [RM_DIM_EXPERT_INNER] = p->expert_inner,
      [RM_DIM_EXPERT_OUT] = p->expert_hidden,
      [RM_DIM_HEADS] = p->heads,
      [RM_DIM_NEW_KV_HEADS] = new_heads(p->heads, p->kv_heads, spec->n_heads / spec->n_kv_heads),
  };
  memcpy(p->dims, dims, sizeof dims);
}

rm_placement rm_placement_of(const rm_spec *spec, const rm_mesh *mesh, int32_t rank) {
  const rm_coords at = rm_mesh_coords(mesh, rank);
  const rm_range heads = rm_share(spec->n_heads, 1, mesh->tp, at.tp);
  rm_placement p = {
      .heads = heads,
      .kv_heads = kv_heads_of(spec->n_heads / spec->n_kv_heads, heads),
      .hidden = rm_share(spec->hidden_size, RM_SHARD_WIDTH, mesh->tp, at.tp),
      .inner = rm_share(spec->intermediate_size, RM_SHARD_WIDTH, mesh->tp, at.tp),
      .shared_inner = rm_share(spec->shared_intermediate_size, RM_SHARD_WIDTH, mesh->tp, at.tp),
      .vocab = rm_share(spec->vocab_size, RM_SHARD_VOCAB, mesh->tp, at.tp),
      .experts = {0, spec->n_experts},
      .expert_inner = rm_share(spec->moe_intermediate_size, RM_SHARD_WIDTH, mesh->tp, at.tp),
  };
  p.expert_hidden = p.hidden;
  if (spec->delta_v_heads) {
    p.delta_heads = rm_share(spec->delta_v_heads, 1, mesh->tp, at.tp);
    p.delta_k_heads = kv_heads_of(rm_delta_group(spec), p.delta_heads);
  }
  if (mesh->ep > 1) {
    p.experts = rm_share(spec->n_experts, 1, mesh->ep, at.ep);
    p.expert_inner = (rm_range){0, spec->moe_intermediate_size};
    p.expert_hidden = (rm_range){0, spec->hidden_size};
  }
  set_dims(spec, &p);
  p.counts_replicated = rank == 0;
  p.counts_sharded = at.dp == 0;
  p.counts_experts = mesh->ep == rm_mesh_world(mesh) || at.dp == 0;
  return p;
}

rm_placement rm_placement_whole(const rm_spec *spec) {
  const rm_mesh alone = {.tp = 1, .dp = 1, .ep = 1};
  return rm_placement_of(spec, &alone, 0);
}

rm_range rm_placement_counted(const rm_spec *spec, const rm_placement *p, rm_dim dim) {
  const rm_range held = p->dims[dim];
  const int counts = dim <= RM_DIM_EXPERTS        ? p->counts_replicated
                     : dim >= RM_DIM_EXPERT_INNER ? p->counts_experts
                                                  : p->counts_sharded;
  if (!counts) return (rm_range){held.first, 0};
  if (dim == RM_DIM_KV) return scaled(p->dims[RM_DIM_NEW_KV_HEADS], spec->head_dim);
  if (dim == RM_DIM_DELTA_K && spec->delta_k_heads)
    return scaled(new_heads(p->delta_heads, p->delta_k_heads, rm_delta_group(spec)),
                  spec->delta_k_dim);
  return held;
}
