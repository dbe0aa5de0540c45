// placement.h: which shard of each parameter a rank holds. Ranks never exchange partial sums, so
// every matrix is sharded along its output features (the rows of the checkpoint's tensor), and a
// shard is one range of rows: whole heads of q, k and v, units of 32 of gate, up, o_proj and
// down_proj, whole blocks of 128 of the vocabulary.
//
// Units are distributed as evenly as possible; with more ranks than units some ranks hold none.
// Every rank that has a query head of a KV head's group holds that KV head, so several ranks may
// hold the same one. Norms, the router and its bias are replicated. All functions are pure.
#pragma once

#include "mesh/mesh.h"
#include "model/spec.h"

typedef struct rm_range {
  int64_t first, n; // [first, first + n)
} rm_range;

// The meaning of a parameter's rows or columns. A range is counted in rows, for q, k and v too.
typedef enum rm_dim {
  // Whole on every rank.
  RM_DIM_ONE,
  RM_DIM_HIDDEN,
  RM_DIM_HEAD,
  RM_DIM_Q_RANK, // what heads of q are computed from: q_lora_rank, or hidden elements
  RM_DIM_LATENT,
  RM_DIM_KV_A, // the latent and the key
  RM_DIM_NOPE, // the part of a head of q without rope
  RM_DIM_DELTA_HEAD, // a value head of a delta net
  RM_DIM_KERNEL, // positions of its convolution
  RM_DIM_EXPERTS,
  // Sharded over the tp group.
  RM_DIM_VOCAB,
  RM_DIM_Q, // heads of attention's output; except in latent attention also those of q
  RM_DIM_KV,
  RM_DIM_Q_B, // heads of q in latent attention
  RM_DIM_K_B, // a latent for each head
  RM_DIM_HEADS,
  RM_DIM_DELTA_K,
  RM_DIM_DELTA_V,
  RM_DIM_DELTA_HEADS, // value heads
  RM_DIM_OUT, // hidden elements that o_proj or down_proj computes
  RM_DIM_INNER,
  RM_DIM_SHARED_INNER,
  // Parts of one expert. The placement's `experts` selects the ranks that hold it.
  RM_DIM_EXPERT_INNER,
  RM_DIM_EXPERT_OUT,
  // Not of parameters: KV heads without those that a lower rank of the tp group holds. Only the
  // first KV head can be shared with the previous rank.
  RM_DIM_NEW_KV_HEADS,
  RM_N_DIM
} rm_dim;

typedef struct rm_placement { // of one rank
  rm_range heads, kv_heads;
  rm_range hidden; // rows of o_proj and of a dense layer's down_proj
  rm_range inner; // rows of a dense layer's gate_proj and up_proj
  rm_range shared_inner; // rows of a shared expert's gate and up
  rm_range vocab; // rows of embed_tokens and lm_head
  rm_range experts; // experts of which the rank holds a shard
  rm_range expert_inner, expert_hidden; // rows of an expert's gate and up; of its down
  rm_range delta_heads, delta_k_heads; // value heads of delta nets, and the key heads they read
  // The rank is the first that holds its replicated, sharded, expert parameters
  // (rm_placement_counted).
  int counts_replicated, counts_sharded, counts_experts;
  rm_range dims[RM_N_DIM]; // of each dim, what the rank holds
} rm_placement;

enum { RM_SHARD_WIDTH = 32, RM_SHARD_VOCAB = 128 };

// RM_E_CONFIG: tp does not divide the heads or the value heads of delta nets, ep does not divide
// the experts, or ep > 1 in a model without experts.
rm_code rm_placement_check(const rm_spec *spec, const rm_mesh *mesh, rm_error *err);
// The placement of one rank of a mesh that rm_placement_check has accepted.
rm_placement rm_placement_of(const rm_spec *spec, const rm_mesh *mesh, int32_t rank);
// The placement of a single rank, which holds everything.
rm_placement rm_placement_whole(const rm_spec *spec);
// The rows that this rank counts among those it holds. Exactly one rank counts each row, so that a
// sum over ranks is a sum over the parameter.
rm_range rm_placement_counted(const rm_spec *spec, const rm_placement *placement, rm_dim dim);

// Part `index` of `parts` of [0, n), in units of `unit`; the last unit may be shorter.
rm_range rm_share(int64_t n, int64_t unit, int64_t parts, int64_t index);
