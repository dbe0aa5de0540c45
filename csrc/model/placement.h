// placement.h: which shard of each parameter a rank holds. No partial sums are exchanged, so every
// matrix is sharded along its output features (the rows of the checkpoint's tensor), and a shard is
// one range of rows: whole heads of q, k and v, units of 32 of gate, up, o_proj and down_proj,
// whole blocks of 128 of the vocabulary.
//
// Units are distributed as evenly as possible; with more ranks than units some ranks hold none. A
// KV head is held by every rank that has a query head of its group, so several ranks may hold it,
// also with fewer KV heads than ranks. Norms, the router and its bias are replicated. Pure
// functions.
#pragma once

#include "mesh/mesh.h"
#include "model/spec.h"

typedef struct rm_range {
  int64_t first, n; // [first, first + n)
} rm_range;

typedef struct rm_placement { // of one rank
  rm_range heads, kv_heads;
  rm_range hidden; // rows of o_proj and of a dense layer's down_proj
  rm_range inner; // rows of a dense layer's gate_proj and up_proj
  rm_range shared_inner; // rows of a shared expert's
  rm_range vocab; // rows of embed_tokens and lm_head
  rm_range experts; // those of which it holds a shard
  rm_range expert_inner, expert_hidden; // rows of an expert's gate and up; of its down
  int answers_replicated, answers_sharded,
      answers_experts; // it is the first holder of replicated, sharded, expert parameters
} rm_placement;

enum { RM_SHARD_WIDTH = 32, RM_SHARD_VOCAB = 128 };

// RM_E_CONFIG: tp does not divide the heads, ep does not divide the experts, or ep > 1 in a model
// without experts.
rm_code rm_placement_check(const rm_spec *spec, const rm_mesh *mesh, rm_error *err);
// The mesh was checked.
rm_placement rm_placement_of(const rm_spec *spec, const rm_mesh *mesh, int32_t rank);
// One rank that holds everything.
rm_placement rm_placement_whole(const rm_spec *spec);
// The rows (of a vector: the elements) of a parameter that the rank holds, out of n; 0: none.
rm_range rm_placement_rows(const rm_spec *spec, const rm_placement *placement, rm_param_kind kind,
                           int32_t expert, int64_t n);
// The rows among them that this rank counts. Over all ranks each row is counted once, so that sums
// over ranks are sums over the parameter.
rm_range rm_placement_counted(const rm_spec *spec, const rm_placement *placement,
                              rm_param_kind kind, int32_t expert, int64_t n);

// KV heads that no lower rank of the tp group holds. Only the first can be shared with the rank
// before.
rm_range rm_placement_new_kv_heads(const rm_spec *spec, const rm_placement *placement);

// Part `index` of `parts` of [0, n), in units of `unit`; the last unit may be shorter.
rm_range rm_share(int64_t n, int64_t unit, int64_t parts, int64_t index);
