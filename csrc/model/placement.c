// placement.c: see placement.h.
#include "model/placement.h"

rm_range rm_share(int64_t n, int64_t unit, int64_t parts, int64_t index) {
  const int64_t units = (n + unit - 1) / unit;
  const int64_t first = rm_min64(units * index / parts * unit, n),
                end = rm_min64(units * (index + 1) / parts * unit, n);
  return (rm_range){.first = first, .n = end - first};
}

rm_code rm_placement_check(const rm_spec *spec, const rm_mesh *mesh, rm_error *err) {
  if (spec->n_heads % mesh->tp)
    return rm_fail(err, RM_E_CONFIG, "tp: expected a divisor of num_attention_heads=%lld, got %d",
                   (long long)spec->n_heads, mesh->tp);
  if (mesh->ep > 1 && !spec->n_experts)
    return rm_fail(err, RM_E_CONFIG, "ep: expected 1 for a model without experts, got %d",
                   mesh->ep);
  if (mesh->ep > 1 && spec->n_experts % mesh->ep)
    return rm_fail(err, RM_E_CONFIG, "ep: expected a divisor of num_experts=%lld, got %d",
                   (long long)spec->n_experts, mesh->ep);
  return RM_OK;
}

// The KV heads that these query heads read.
static rm_range kv_heads_of(const rm_spec *spec, rm_range heads) {
  const int64_t group = spec->n_heads / spec->n_kv_heads, first = heads.first / group;
  return (rm_range){.first = first, .n = (heads.first + heads.n - 1) / group - first + 1};
}

rm_placement rm_placement_of(const rm_spec *spec, const rm_mesh *mesh, int32_t rank) {
  const rm_coords at = rm_mesh_coords(mesh, rank);
  const rm_range heads = rm_share(spec->n_heads, 1, mesh->tp, at.tp);
  rm_placement p = {
      .heads = heads,
      .kv_heads = kv_heads_of(spec, heads),
      .hidden = rm_share(spec->hidden_size, RM_SHARD_WIDTH, mesh->tp, at.tp),
      .inner = rm_share(spec->intermediate_size, RM_SHARD_WIDTH, mesh->tp, at.tp),
      .shared_inner = rm_share(spec->shared_intermediate_size, RM_SHARD_WIDTH, mesh->tp, at.tp),
      .vocab = rm_share(spec->vocab_size, RM_SHARD_VOCAB, mesh->tp, at.tp),
      .experts = {0, spec->n_experts},
      .expert_inner = rm_share(spec->moe_intermediate_size, RM_SHARD_WIDTH, mesh->tp, at.tp),
  };
  p.expert_hidden = p.hidden;
  if (mesh->ep > 1) {
    p.experts = rm_share(spec->n_experts, 1, mesh->ep, at.ep);
    p.expert_inner = (rm_range){0, spec->moe_intermediate_size};
    p.expert_hidden = (rm_range){0, spec->hidden_size};
  }
  p.counts_replicated = rank == 0;
  p.counts_sharded = at.dp == 0;
  p.counts_experts = mesh->ep == rm_mesh_world(mesh) || at.dp == 0;
  return p;
}

rm_placement rm_placement_whole(const rm_spec *spec) {
  const rm_mesh alone = {.tp = 1, .dp = 1, .ep = 1};
  return rm_placement_of(spec, &alone, 0);
}

static rm_range scaled(rm_range r, int64_t by) { return (rm_range){r.first * by, r.n * by}; }

rm_range rm_placement_rows(const rm_spec *spec, const rm_placement *p, rm_param_kind kind,
                           int32_t expert, int64_t n) {
  if (expert >= 0 && (expert < p->experts.first || expert >= p->experts.first + p->experts.n))
    return (rm_range){0, 0};
  switch (kind) {
    case RM_P_EMBED:
    case RM_P_LM_HEAD: return p->vocab;
    case RM_P_Q:
    case RM_P_Q_BIAS: return scaled(p->heads, spec->head_dim);
    case RM_P_K:
    case RM_P_V:
    case RM_P_K_BIAS:
    case RM_P_V_BIAS: return scaled(p->kv_heads, spec->head_dim);
    case RM_P_O:
    case RM_P_O_BIAS:
    case RM_P_SHARED_DOWN:
    case RM_P_DOWN: return p->hidden;
    case RM_P_SHARED_GATE:
    case RM_P_SHARED_UP: return p->shared_inner;
    case RM_P_Q_NORM:
      return spec->qk_norm == RM_QK_NORM_WHOLE ? scaled(p->heads, spec->head_dim)
                                               : (rm_range){0, n};
    case RM_P_K_NORM:
      return spec->qk_norm == RM_QK_NORM_WHOLE ? scaled(p->kv_heads, spec->head_dim)
                                               : (rm_range){0, n};
    case RM_P_GATE:
    case RM_P_UP: return p->inner;
    case RM_P_EXPERT_GATE:
    case RM_P_EXPERT_UP: return p->expert_inner;
    case RM_P_EXPERT_DOWN: return p->expert_hidden;
    default: return (rm_range){0, n};
  }
}

rm_range rm_placement_new_kv_heads(const rm_spec *spec, const rm_placement *p) {
  const int64_t group = spec->n_heads / spec->n_kv_heads, shared = p->heads.first % group != 0;
  return (rm_range){p->kv_heads.first + shared, p->kv_heads.n - shared};
}

rm_range rm_placement_counted(const rm_spec *spec, const rm_placement *p, rm_param_kind kind,
                              int32_t expert, int64_t n) {
  const rm_range held = rm_placement_rows(spec, p, kind, expert, n), none = {held.first, 0};
  switch (kind) {
    case RM_P_K:
    case RM_P_V:
    case RM_P_K_BIAS:
    case RM_P_V_BIAS:
      return p->counts_sharded ? scaled(rm_placement_new_kv_heads(spec, p), spec->head_dim) : none;
    case RM_P_EXPERT_GATE:
    case RM_P_EXPERT_UP:
    case RM_P_EXPERT_DOWN: return p->counts_experts ? held : none;
    case RM_P_FINAL_NORM:
    case RM_P_INPUT_NORM:
    case RM_P_POST_ATTN_NORM:
    case RM_P_PRE_MLP_NORM:
    case RM_P_POST_MLP_NORM:
    case RM_P_SHARED_SWITCH:
    case RM_P_ROUTER:
    case RM_P_ROUTER_BIAS: return p->counts_replicated ? held : none;
    case RM_P_Q_NORM:
    case RM_P_K_NORM:
      if (spec->qk_norm != RM_QK_NORM_WHOLE) return p->counts_replicated ? held : none;
      if (!p->counts_sharded) return none;
      return kind == RM_P_Q_NORM ? held
                                 : scaled(rm_placement_new_kv_heads(spec, p), spec->head_dim);
    default: return p->counts_sharded ? held : none;
  }
}
