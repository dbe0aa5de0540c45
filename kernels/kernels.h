// kernels.h: the ops of a forward pass, of sampling and of weight syncs over raw pointers, and the
// contract that every variant of them keeps.
//
// A variant (reference loops, AVX2, AVX-512, AMX; CUDA) is one `rm_kernels` table. All tables of a
// family compute bit-identical results; docs/numerics.md states the arithmetic, kernels/cpu/ref.c
// implements it as plain loops.
//
// This layer does not depend on mesh, model or Python. It does not own memory: every pointer is a
// view that the caller keeps valid until the call returns (on a stream: until the op has run). Ops
// do not allocate, print or use globals. Any thread may call an op; calls on one ctx must not
// overlap, calls on different ctxs may. A call cannot fail: the caller checks shapes, and row_flags
// report rows that are not finite.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifdef __CUDACC__
#define RM_INLINE static inline __host__ __device__
#else
#define RM_INLINE static inline
#endif

typedef enum rm_dtype { RM_BF16 = 0, RM_F32 = 1 } rm_dtype;

RM_INLINE size_t rm_dtype_bytes(rm_dtype dtype) { return dtype == RM_BF16 ? 2 : 4; }
RM_INLINE int64_t rm_round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
RM_INLINE int64_t rm_min64(int64_t a, int64_t b) { return a < b ? a : b; }
RM_INLINE int64_t rm_max64(int64_t a, int64_t b) { return a > b ? a : b; }

// Constants of the contract. Changing one changes results.
enum {
  RM_LANES = 16, // partial sums of a reduction (norm, softmax, log-sum-exp)
  RM_K_BLOCK = 32, // k per step of a dot product: a chain of even k and one of odd k
  RM_N_TILE = 16, // columns per tile of packed weights
  RM_ATTN_BLOCK = 32, // positions per softmax block
  RM_ATTN_SPLIT = 1024, // positions per independent softmax state
  RM_VOCAB_BLOCK = 128, // vocabulary entries per (max, sum) partial
  RM_MAX_TOP_K = 64, // experts per token
  RM_MAX_EXPERT_GROUPS = 64, // expert groups of a router
  RM_MAX_DELTA_DIM = 128, // rows or columns of a delta_net state, which a GPU has in registers
};

// ---------------------------------------------------------------------------------------- layouts
// Sizes are the same for every family. Element indices are those below, except for the bf16 of
// cuda_mma (kernels/cuda/packing.cuh).
//
// Packed weights of y = x·Wᵀ with W [n][k]: tiles of 16 columns × 32 k, zero padded; tile (nb, kb)
// has index nb·(K/32) + kb.
//   bf16: tile[16 k-pairs][16 n][2]   (the layout of an AMX tile load; one 32-bit lane per column
//                                     for FMA)
//   f32:  tile[32 k][16 n]
RM_INLINE int64_t rm_packed_elems(int64_t n, int64_t k) {
  return rm_round_up(n, RM_N_TILE) * rm_round_up(k, RM_K_BLOCK);
}
RM_INLINE int64_t rm_packed_index(rm_dtype dtype, int64_t k_total, int64_t n, int64_t k) {
  const int64_t tile =
      (n / RM_N_TILE) * (rm_round_up(k_total, RM_K_BLOCK) / RM_K_BLOCK) + k / RM_K_BLOCK;
  const int64_t kk = k % RM_K_BLOCK, nn = n % RM_N_TILE;
  const int64_t in = dtype == RM_BF16 ? (kk / 2) * 32 + nn * 2 + (kk & 1) : kk * RM_N_TILE + nn;
  return tile * (RM_N_TILE * RM_K_BLOCK) + in;
}
// gate and up of a SwiGLU share one packed matrix: 16 columns of gate, then the same 16 of up, and
// so on.
RM_INLINE int64_t rm_gate_up_row(int64_t row, int up) {
  return (row / RM_N_TILE) * 2 * RM_N_TILE + (up ? RM_N_TILE : 0) + row % RM_N_TILE;
}
RM_INLINE int64_t rm_gate_up_rows(int64_t width) { return rm_round_up(width, RM_N_TILE) * 2; }

// One layer's K and V caches: [page][kv_head][…]; page_size is a multiple of 16; pages are zeroed
// when handed out.
//   K: packed like weights of [page_size][head_dim], so that q·Kᵀ is the gemm's dot product
//   V: bf16 [page_size/2][head_dim↑16][2], f32 [page_size][head_dim↑16]: positions are the k of p·V
RM_INLINE int64_t rm_k_page_elems(int64_t page_size, int64_t head_dim) {
  return page_size * rm_round_up(head_dim, RM_K_BLOCK);
}
RM_INLINE int64_t rm_v_page_elems(int64_t page_size, int64_t head_dim) {
  return page_size * rm_round_up(head_dim, RM_N_TILE);
}
RM_INLINE int64_t rm_v_index(rm_dtype dtype, int64_t head_dim, int64_t pos, int64_t d) {
  const int64_t width = rm_round_up(head_dim, RM_N_TILE);
  return dtype == RM_BF16 ? ((pos / 2) * width + d) * 2 + (pos & 1) : pos * width + d;
}

// ---------------------------------------------------------------------------------------- context
typedef void (*rm_task_fn)(void *arg, int thread, int n_threads);

// The resources of an op besides its arguments. On the CPU ops are complete at return. On a GPU
// `stream` is a CUDA stream: an op enqueues there and neither waits nor allocates. All pointers
// except the ctx and the argument struct are device memory, also workspace, row_flags, group_rows,
// positions and block_tables: grids are sized by the shapes in the struct, so an op can be captured
// in a graph. Ops of one stream may share a workspace.
typedef struct rm_ctx {
  void *stream;
  void *workspace; // scratch, aligned to 64 bytes; its content is undefined between ops
  size_t workspace_bytes; // at least workspace_bytes(limits)
  int n_threads; // ≥ 1
  // Runs fn on every thread and returns when all are done; NULL: the caller runs fn alone.
  void (*run)(void *team, rm_task_fn fn, void *arg);
  void *team;
  struct rm_profile *profile; // used only with its own table (profile.h)
} rm_ctx;

// Bounds that determine the size of a workspace.
typedef struct rm_limits {
  int64_t max_rows; // rows of one call
  int64_t max_k; // longest dot product (hidden, intermediate, heads·head_dim)
  int64_t max_n; // widest output, except logits
  int64_t vocab;
  int64_t n_heads, n_kv_heads, head_dim;
  int64_t group; // as in rm_attention_args
  int64_t max_positions; // longest context
  int64_t n_experts, top_k; // 0 in a dense model
  int64_t k_dim, v_dim, kernel; // as in rm_delta_net_args; 0 in a model without delta nets
  int n_threads;
} rm_limits;

// The floating-point environment of the contract: nearest even, denormal inputs and outputs flushed
// to zero, all exceptions masked. Ops must be called with it. rm_fp_enter sets it and returns the
// previous one, which rm_fp_leave restores.
uint32_t rm_fp_enter(void);
void rm_fp_leave(uint32_t saved);

enum { RM_ROW_KV_NONFINITE = 1, RM_ROW_LOGITS_NONFINITE = 2 }; // bits of row_flags

// -------------------------------------------------------------------------------------- arguments
// "T" below is the op's dtype: uint16 words of bf16, or float32.

typedef struct rm_embed_args {
  void *out; // T [rows][hidden]
  const int32_t *ids; // [rows], each in [0, vocab)
  const void *table; // T [vocab][hidden]; with `packed` (tied embeddings) packed [vocab]×[hidden]
  int packed;
  int64_t rows, hidden;
  rm_dtype dtype;
  float scale; // out ← round(scale · row); 0: copies bits
} rm_embed_args;

// out[i] = x[from[i]], bit-identical. from: rows of x in any order, with repetitions; if from[i] is
// negative, out[i] is not written.
typedef struct rm_gather_rows_args {
  void *out; // [rows] runs of row_bytes; does not overlap x
  const void *x; // runs of row_bytes
  const int32_t *from; // [rows]
  int64_t rows;
  size_t row_bytes; // even
} rm_gather_rows_args;

// With x: residual ← round(residual + x); with x and x_gate: residual ← round(residual +
// round(round(sigmoid(x_gate)) · x)); with x and x_scale: residual ← round(residual +
// round(x_scale · x)). Then out ← round(weight · round(residual / rms(residual))); zero_centered:
// out ← round((1 + weight) · (residual / rms(residual))); without a weight out ← residual.
typedef struct rm_rms_norm_args {
  void *out; // T [rows][n]; may be x or residual; NULL: only updates the residual
  void *residual; // T [rows][n], in and out
  const void *x; // T [rows][n] or NULL
  const void *x_gate; // T [rows], or NULL: adds x unscaled
  const void *weight; // T [n] or NULL
  float eps;
  int64_t rows, n;
  rm_dtype dtype;
  int zero_centered; // multiplies by 1 + weight
  float x_scale; // 0: adds x unscaled; never with x_gate
} rm_rms_norm_args;

// y[i][j] = round(dot(x[i], w[j]) + bias[j]). With groups, rows [group_rows[g], group_rows[g+1]) of
// x are multiplied by matrix g and use bias g. gemm_swiglu: w holds gate and up interleaved
// (rm_gate_up_row), y[i][j] = round(round(activation(round gate)) · round up), where gate and up
// include their biases.
typedef enum rm_activation {
  RM_SILU,
  RM_GELU_TANH,
  RM_GELU, // by erf
  RM_RELU2, // max(x, 0)²
  // Only with a gate: g · sigmoid(alpha · g) · (u + 1), g = min(gate, limit), u = up within ±limit.
  RM_SWIGLU_OAI
} rm_activation;

typedef struct rm_gemm_args {
  void *y; // y_dtype [m][n], row stride ldy; may not alias x
  void *gate_up; // with swiglu, out: T [m][2n] rounded gate and up, for a backward pass; or NULL
  const void *x; // T [m][k], row stride ldx
  const void *w; // packed T [n]×[k]; with groups: n_groups of them, group_stride elements apart
  // T [n], with groups [n_groups][n]; or NULL. With swiglu 2n instead of n: gate's, then up's.
  const void *bias;
  const int32_t *group_rows; // [n_groups + 1] ascending, or NULL
  int64_t n_groups, group_stride;
  int64_t m, n, k; // n: columns of y (with swiglu the intermediate width)
  int64_t ldx, ldy;
  rm_dtype dtype, y_dtype; // y_dtype: dtype, or RM_F32
  rm_activation activation; // of the gate, with swiglu
  float alpha, limit; // of RM_SWIGLU_OAI
} rm_gemm_args;

// out[i][j] = round(activation(x[i][j])), for an MLP without a gate.
typedef struct rm_activate_args {
  void *out; // T [rows][n], row stride ld; may be x
  const void *x; // T [rows][n], row stride ld
  int64_t rows, n, ld;
  rm_dtype dtype;
  rm_activation activation;
} rm_activate_args;

// out[i][j] = round(round(sigmoid(gate[i][j])) · x[i][j]): the output gate of attention.
typedef struct rm_sigmoid_gate_args {
  void *out; // T [rows][n]; may be x
  const void *x, *gate; // T [rows][n]
  int64_t rows, n;
  rm_dtype dtype;
} rm_sigmoid_gate_args;

// The sum of squares of each head of q and k, as qk_rope_kv computes it for a norm per head. A norm
// over all heads of a row takes the sums of all ranks' heads.
typedef struct rm_head_squares_args {
  float *q_out; // [rows][n_heads]
  float *k_out; // [rows][n_kv_heads]
  const void *qkv; // T [rows][(n_heads + 2·n_kv_heads)·head_dim], q then k then v
  int64_t rows, n_heads, n_kv_heads, head_dim;
  rm_dtype dtype;
} rm_head_squares_args;

// For each head: norms q and k over head_dim, or over all heads of the model by their sums of
// squares; rotates their first rotary_dim elements (pairs i, i + rotary_dim/2); writes k and v to
// their slot. With norm_last it rotates first and then norms. If k or v of a head is not finite,
// stores zeros instead and flags the row.
//
// Latent attention (value_dim > 0): qkv is T [rows][n_heads·q_dim + value_dim + rotary_dim], q,
// then the latent, then the key. Only the last rotary_dim elements of each head of q are read. They
// are rotated and become the first elements of the head in q_out, whose other elements are not
// written. K of the only kv head is the rotated key, then the latent, normed by k_weight
// [value_dim]. V is the normed latent.
typedef struct rm_qk_rope_kv_args {
  void *q_out; // T [rows][n_heads][head_dim]
  const void *qkv; // T [rows][(n_heads + 2·n_kv_heads)·head_dim], q then k then v
  // T [head_dim], with squares T [n_heads·head_dim] and [n_kv_heads·head_dim]; both NULL: no norm.
  const void *q_weight, *k_weight;
  // [rows][all_heads], [rows][all_kv_heads] of head_squares; both NULL: a norm per head.
  const float *q_squares, *k_squares;
  const float *cos, *sin; // [max_positions][rotary_dim/2], already rounded to T
  const int32_t *positions; // [rows]
  const int64_t *slots; // [rows] page·page_size + offset, or -1: not written
  void *k_cache, *v_cache; // of this layer
  uint8_t *row_flags; // [rows], or-ed
  float eps;
  int64_t rows, n_heads, n_kv_heads, head_dim, page_size;
  int64_t rotary_dim; // even, 0 to head_dim; 0: no rotation
  int64_t all_heads, all_kv_heads; // with squares: heads of the whole model
  rm_dtype dtype;
  int zero_centered; // multiplies by 1 + weight
  int norm_last; // never with squares
  // With value_dim: head_dim = rotary_dim + value_dim, n_kv_heads = 1, q_dim ≥ rotary_dim, no
  // squares and neither zero_centered nor norm_last.
  int64_t value_dim, q_dim;
} rm_qk_rope_kv_args;
// Returns the elements of a head of V.
RM_INLINE int64_t rm_value_dim(int64_t value_dim, int64_t head_dim) {
  return value_dim ? value_dim : head_dim;
}

// Row r attends to positions max(0, p − window + 1) … p of its sequence, p = positions[r]. Rows may
// be any mix of prefill and decode; adjacent rows of one sequence are computed together.
//
// A rank of a mesh holds a run of the model's query heads and the kv heads that these read; it may
// hold only some query heads of the first and of the last kv head. Local query head h reads local
// kv head (head0 + h) / group, and n_kv_heads = ⌈(head0 + n_heads) / group⌉.
typedef struct rm_attention_args {
  void *out; // T [rows][n_heads][value_dim]
  const void *q; // T [rows][n_heads][head_dim]
  const void *k_cache, *v_cache;
  const int32_t *positions; // [rows]
  const int32_t *seq_of_row; // [rows]
  const int32_t *block_tables; // [max seq_of_row + 1][max_pages] page ids
  // n_seqs: at least the number of sequences that the rows belong to; as many as rows in decode
  int64_t rows, n_seqs, max_pages, n_heads, n_kv_heads, head_dim, page_size;
  int64_t group; // query heads of a kv head in the whole model
  int64_t head0; // index of query head 0 among the query heads of its kv head, in [0, group)
  int64_t window; // 0: none
  float scale;
  rm_dtype dtype;
  // T [n_heads]: for each query head a logit that takes part in the softmax without a key or value;
  // or NULL.
  const void *sinks;
  float softcap; // scores become softcap · tanh(score / softcap); 0: no cap
  int64_t value_dim; // elements of a head of V and out, at most head_dim
} rm_attention_args;
// The first position that a row attends to.
RM_INLINE int64_t rm_first_position(const rm_attention_args *a, int64_t row) {
  return a->window > 0 ? rm_max64(0, a->positions[row] - a->window + 1) : 0;
}

// The gated delta rule (docs/numerics.md §4): the rows of a sequence, adjacent and in order, read
// and update the sequence's state one after another. Value heads of a rank read key heads just as
// query heads read kv heads in rm_attention_args, with group, head0 and n_k_heads.
//
// A slot holds a state. For each value head this is [k_dim][v_dim] float32, in the layout of packed
// weights of [v_dim]×[k_dim], then the last inputs of the head's convolution (q, k, v), T
// [kernel−1][2·k_dim + v_dim]. A call must not read and write the same slot, with two exceptions.
// The last row of a sequence may be saved to the slot from which the sequence is loaded. Padding
// rows, which are never saved and whose results are ignored, may load a slot that a sequence
// saves.
typedef struct rm_delta_net_args {
  void *out; // T [rows][n_v_heads][v_dim]
  // T [rows][rm_delta_columns]: q and k of the key heads, v and z of the value heads, then b and a,
  // one number for each value head
  const void *x;
  const void *conv; // T [2·n_k_heads·k_dim + n_v_heads·v_dim][kernel], of q, k and v
  const float *a_log, *dt_bias; // [n_v_heads]
  const void *norm; // T [v_dim]
  void *states; // slots of rm_delta_state_bytes, aligned to 4 bytes
  const int32_t *load_slots; // [max seq_of_row + 1] the state before the first row; −1: zeros
  const int32_t *save_slots; // [rows] the slot to save to after the row; −1: not saved
  const int32_t *seq_of_row; // [rows]
  int64_t rows, n_seqs; // as in rm_attention_args
  int64_t n_k_heads, n_v_heads, k_dim, v_dim, kernel, group, head0;
  float eps; // of the norm
  rm_dtype dtype;
} rm_delta_net_args;
RM_INLINE int64_t rm_delta_columns(int64_t n_k_heads, int64_t n_v_heads, int64_t k_dim,
                                   int64_t v_dim) {
  return 2 * (n_k_heads * k_dim + n_v_heads * v_dim + n_v_heads);
}
// Returns the bytes of a value head's part of a state.
RM_INLINE int64_t rm_delta_head_bytes(int64_t k_dim, int64_t v_dim, int64_t kernel,
                                      rm_dtype dtype) {
  return rm_packed_elems(v_dim, k_dim) * 4 +
         rm_round_up((kernel - 1) * (2 * k_dim + v_dim) * (int64_t)rm_dtype_bytes(dtype), 64);
}
RM_INLINE int64_t rm_delta_state_bytes(int64_t n_v_heads, int64_t k_dim, int64_t v_dim,
                                       int64_t kernel, rm_dtype dtype) {
  return n_v_heads * rm_delta_head_bytes(k_dim, v_dim, kernel, dtype);
}

// Scores are softmax or sigmoid of the logits in float32. The router chooses the experts with the
// largest score + bias, ties to the lowest id, best first. A gate is the score without the bias,
// divided by the sum of the chosen scores in ascending id order when `renormalize`, then multiplied
// by route_scale. With expert groups (runs of n_experts / n_groups ≥ 2 consecutive ids) it chooses
// only from the top_groups groups whose two best experts have the largest sums; top_groups ·
// n_experts / n_groups ≥ top_k.
typedef enum rm_score { RM_SCORE_SOFTMAX, RM_SCORE_SIGMOID } rm_score;
typedef struct rm_router_args {
  int32_t *ids; // [rows][top_k], distinct and in range for any input
  float *gates; // [rows][top_k]
  int16_t *routed; // also the ids, row r's at routed + r·routed_stride; or NULL
  int64_t routed_stride;
  const void *x; // T [rows][hidden]
  const void *w; // packed T [n_experts]×[hidden]
  const float *bias; // [n_experts] or NULL
  int64_t rows, hidden, n_experts, top_k;
  int64_t n_groups, top_groups; // n_groups 0 or 1: any expert may be chosen
  float route_scale; // 1: gates are not scaled
  float min_sum; // with renormalize and softmax: lower bound of the divisor; 0: none
  int renormalize;
  rm_score score;
  rm_dtype dtype;
  const void *logit_bias; // T [n_experts], added to the logits; or NULL
} rm_router_args;

// Sorts the rows·top_k choices by expert, then row. Negative ids are skipped.
typedef struct rm_permute_args {
  void *x_out; // T [rows·top_k][hidden]; writes one row for each choice
  int32_t *group_rows; // [n_experts + 1]
  int32_t *place; // [rows][top_k] row of x_out of a choice; −1: skipped
  const void *x; // T [rows][hidden]
  const int32_t *ids; // [rows][top_k]
  int64_t rows, hidden, n_experts, top_k;
  rm_dtype dtype;
} rm_permute_args;

// Indices for expert dispatch with fixed sizes, between ranks with `experts_each` consecutive
// experts each. For every row a rank returns each = rm_max_choices outputs: the i-th is the output
// of the row's i-th choice among the rank's experts, or unused. Homes are the ranks that rows come
// from.
typedef struct rm_static_dispatch_args {
  // [homes][home_rows][top_k] a choice's index in the outputs returned to its home,
  // [ranks][home_rows][each]; −1: none.
  int32_t *place;
  // [homes][pitch][each] choices among the experts of `rank`, counted from its first expert; then
  // −1.
  int32_t *own;
  // Home h's [home_rows][top_k] ids at ids + h·ids_pitch, distinct in a row; negative: no choice.
  const int32_t *ids;
  int64_t homes, home_rows;
  int64_t pitch, ids_pitch; // pitch ≥ home_rows: the rows after home_rows have no choices
  int64_t top_k, experts_each, rank;
} rm_static_dispatch_args;
RM_INLINE int64_t rm_max_choices(int64_t top_k, int64_t experts_each) {
  return rm_min64(top_k, experts_each);
}

// out[r] = round(sum of round32(gate · y[place]) over the experts of r, by the complete binary tree
// of docs/numerics.md).
typedef struct rm_combine_args {
  void *out; // T [rows][hidden]
  const void *y; // T [rows·top_k][hidden]
  const int32_t *place; // [rows][top_k]
  const int32_t *ids; // [rows][top_k], distinct in a row
  const float *gates; // [rows][top_k]
  int64_t rows, hidden, n_experts, top_k;
  rm_dtype dtype;
} rm_combine_args;

// logits = x·Wᵀ in float32; if `scale` is not 0, times scale; then, if `softcap` is not 0,
// softcap · tanh(logit / softcap). stats = (max, Σ exp(logit − max)), per 128 entries and merged
// ascending. logprob(t) = (logit[t] − max) − log(sum).
//
// A rank of a mesh holds zero or more whole blocks of 128 entries. It computes `pairs` instead of
// stats; merge_pairs takes the pairs of all ranks in the order of the vocabulary. Targets are
// counted from the rank's first entry.
typedef struct rm_lm_head_args {
  float *logits; // [rows][ld_logits], or NULL
  float *stats; // [rows][2]; not written with pairs
  float *target_logprobs; // [rows] or NULL; not written with pairs
  float *pairs; // [⌈vocab/128⌉][rows][2] (max, Σ exp(logit − max)) of each block, or NULL
  float *target_logits; // [rows] the target's logit, +0 without a target; or NULL
  const int32_t *targets; // [rows], −1: none; NULL without target_logprobs and target_logits
  uint8_t *row_flags; // [rows], or-ed with RM_ROW_LOGITS_NONFINITE when any logit is not finite
  const void *x; // T [rows][hidden], row stride ldx
  const void *w; // packed T [vocab]×[hidden]
  int64_t rows, vocab, hidden, ldx, ld_logits; // vocab ≥ 1; with pairs ≥ 0
  rm_dtype dtype;
  float scale, softcap; // 0: none
} rm_lm_head_args;

// Computes the stats, flags and logprobs of lm_head from the pairs of all blocks of the vocabulary,
// in ascending order.
typedef struct rm_merge_pairs_args {
  float *stats; // [rows][2]
  float *target_logprobs; // [rows] or NULL
  // [rows], −1: none, else target_logits has the logit; NULL without target_logprobs.
  const int32_t *targets;
  uint8_t *row_flags; // [rows], or-ed with RM_ROW_LOGITS_NONFINITE if a sum is a NaN
  const float *pairs; // [n_blocks][rows][2]
  const float *target_logits; // [rows]; NULL without target_logprobs
  int64_t rows, n_blocks; // n_blocks ≥ 1
} rm_merge_pairs_args;

// A token whose logit changes before the draw: rm_edited_logit (cpu/philox.h).
typedef struct rm_logit_edit {
  int32_t token;
  int32_t count; // times generated; 0: only in the prompt; −1: in neither, so without penalties
  float bias; // added to the logit
} rm_logit_edit;

typedef struct rm_sample_params {
  float temperature; // ≥ 0; 0: greedy
  float top_p; // (0, 1]
  float min_p; // [0, 1]
  int32_t top_k; // −1 or ≥ 1
  uint64_t seed, counter; // the random stream and the position in it
  const int32_t *banned; // [n_banned] token ids that may not be drawn (min_tokens)
  int32_t n_banned;
  int32_t forced; // ≥ 0: takes this token instead of drawing one
  int32_t n_edits;
  float repetition_penalty, frequency_penalty, presence_penalty; // of edited tokens; the first > 0
  const rm_logit_edit *edits; // [n_edits] ascending tokens of the vocabulary, each once
} rm_sample_params;

// Order: edits, banned, temperature, min_p, top_k, top_p. Ties by ascending id. Weights are 40-bit
// fixed point numbers, so sums are exact.
typedef struct rm_sample_args {
  int32_t *tokens; // [rows]; −1 for a flagged row
  float *logprobs; // [rows] under the model: temperature 1, no filter
  // [rows] under the distribution of the draw; 0 when greedy; −inf for a forced token that the
  // filters exclude.
  float *sampling_logprobs;
  // [rows] tokens with a weight after the filters; 1 when greedy, 0 for a flagged row; or NULL.
  int32_t *kept;
  const float *logits; // [rows][ld_logits]
  const float *stats; // [rows][2] of lm_head
  const rm_sample_params *params; // [rows]
  const uint8_t *row_flags; // [rows]
  int64_t rows, vocab;
  // 0: draws all rows from one row of logits, with stats [2] and flags [1].
  int64_t ld_logits;
} rm_sample_args;
RM_INLINE int64_t rm_sampled_row(const rm_sample_args *a, int64_t r) {
  return a->ld_logits ? r : 0;
}

// The k largest logprobs of each row, descending, ties to the lowest id.
typedef struct rm_top_logprobs_args {
  int32_t *ids; // [rows][k]
  float *logprobs; // [rows][k]
  const float *logits; // [rows][ld_logits]
  const float *stats; // [rows][2]
  int64_t rows, vocab, ld_logits, k;
} rm_top_logprobs_args;

// ranks[r] = the number of v with logits[r][v] ≥ logits[r][tokens[r]], including the token itself;
// 0 if tokens[r] is negative.
typedef struct rm_ranks_args {
  int32_t *ranks; // [rows]
  const float *logits; // [rows][ld_logits]; with ld_logits 0 one row for all tokens
  const int32_t *tokens; // [rows]
  int64_t rows, vocab, ld_logits;
} rm_ranks_args;

// Element types that a trainer may send.
typedef enum rm_src_dtype {
  RM_SRC_BF16 = 0,
  RM_SRC_F32 = 1,
  RM_SRC_F16 = 2,
  RM_SRC_F64 = 3
} rm_src_dtype;
RM_INLINE size_t rm_src_bytes(rm_src_dtype dtype) {
  return dtype == RM_SRC_F64 ? 8 : dtype == RM_SRC_F32 ? 4 : 2;
}
typedef enum rm_layout {
  RM_PLAIN = 0,
  RM_PACKED = 1,
  RM_PACKED_GATE = 2,
  RM_PACKED_UP = 3
} rm_layout;

// Copies src [rows][cols] into a parameter: plain rows, or packed tiles at rows [dst_row0, dst_row0
// + rows) of a matrix with dst_cols columns (gate and up: at rm_gate_up_row). Converts like torch's
// .to() when the dtypes differ. In the same pass it sums a digest of the stored values, which does
// not depend on layout or spelling, and finds non-finite ones. With `compare` it writes nothing and
// sets diff_index to the first element whose stored bits differ.
//
// On a GPU the results are written to `found` in device memory instead.
typedef struct rm_pack_found {
  uint64_t digest;
  int64_t nonfinite_index, diff_index;
} rm_pack_found;

typedef struct rm_pack_args {
  const void *src; // any alignment; on a GPU aligned to its elements
  rm_src_dtype src_dtype;
  int64_t rows, cols, row_stride, col_stride; // strides in elements, any sign
  void *dst; // base of the whole matrix
  rm_dtype dst_dtype;
  rm_layout layout;
  int64_t dst_row0, dst_cols;
  int compare;
  // Index of src's first element in the whole parameter, so that digests of parts add up to that of
  // the whole; even if cols is even.
  int64_t index0;
  uint64_t digest; // out: Σ over elements of mix(index0 + row·cols + col, stored bits) mod 2^64
  int64_t nonfinite_index; // out: lowest row·cols + col of a NaN or Inf, or −1
  int64_t diff_index; // out: with `compare`, or −1
  rm_pack_found *found; // out, on a GPU, instead of the three above; NULL on the CPU
} rm_pack_args;

// -------------------------------------------------------------------------------------- the table
// Every op and its argument struct: a row here declares the op in each table and each variant.
//   RM_SHARED_OPS  the reference's function serves every CPU variant
//   RM_FAST_OPS    have fast variants
// A profile counts the `rows` of the argument struct of RM_SHARED_ROW_OPS and RM_ROW_OPS.
#define RM_PLAIN_OPS(X) X(static_dispatch, rm_static_dispatch_args)
#define RM_SHARED_ROW_OPS(X) \
  X(embed, rm_embed_args) \
  X(gather_rows, rm_gather_rows_args) \
  X(permute, rm_permute_args) \
  X(merge_pairs, rm_merge_pairs_args)
#define RM_SHARED_OPS(X) RM_SHARED_ROW_OPS(X) RM_PLAIN_OPS(X)
#define RM_ROW_OPS(X) \
  X(rms_norm, rm_rms_norm_args) \
  X(activate, rm_activate_args) \
  X(sigmoid_gate, rm_sigmoid_gate_args) \
  X(head_squares, rm_head_squares_args) \
  X(qk_rope_kv, rm_qk_rope_kv_args) \
  X(combine, rm_combine_args) \
  X(sample, rm_sample_args) \
  X(top_logprobs, rm_top_logprobs_args) \
  X(ranks, rm_ranks_args)
#define RM_FAST_OPS(X) \
  RM_ROW_OPS(X) \
  X(gemm, rm_gemm_args) \
  X(gemm_swiglu, rm_gemm_args) \
  X(attention, rm_attention_args) \
  X(delta_net, rm_delta_net_args) \
  X(router, rm_router_args) \
  X(lm_head, rm_lm_head_args)
#define RM_OPS(X) RM_FAST_OPS(X) RM_SHARED_OPS(X)
#define RM_OP_SLOT(name, args) void (*name)(const rm_ctx *, const args *);

// The tables that rm_kernels_for, rm_kernels_best and rm_kernels_cuda (kernels/cuda/rm_cuda.h)
// return have every function.
typedef struct rm_kernels {
  const char *isa; // "ref", "avx2", …
  const char *family; // variants of one family are bit-identical: "x86"
  size_t (*workspace_bytes)(const rm_limits *limits); // enough for any op within the limits
  RM_OPS(RM_OP_SLOT)
  void (*pack)(const rm_ctx *, rm_pack_args *);
} rm_kernels;

typedef enum rm_isa {
  RM_ISA_REF,
  RM_ISA_AVX2,
  RM_ISA_AVX512F,
  RM_ISA_AVX512BF16,
  RM_ISA_AMX,
  RM_N_ISA
} rm_isa;

// The state of a variant. The first call determines it, which takes milliseconds
// (kernels/cpu/select_isa.c).
typedef struct rm_isa_state {
  const char *refused; // NULL: usable; else the reason, a static string
  int emulated; // test builds only: functions emulate its instructions
  // Measured for the bf16 gemm on one thread, with weights in the L2 cache; 0: not measured.
  double gflops_one_row, gflops_many_rows;
} rm_isa_state;

const char *rm_isa_name(rm_isa isa);
rm_isa_state rm_isa_ask(rm_isa isa);
// The table of exactly this instruction set; NULL if it is not usable.
const rm_kernels *rm_kernels_for(rm_isa isa);
// The same by rm_isa_name; NULL also for an unknown name.
const rm_kernels *rm_kernels_named(const char *isa);
// The fastest table of this machine. The environment variable RM_ISA = ref | avx2 | … caps the
// choice; NULL if it is none of these.
const rm_kernels *rm_kernels_best(void);

// The rope table of the contract: cos and sin of round32(position · inv_freq[i]) times `scale`,
// rounded to dtype.
void rm_rope_table(float *cos, float *sin, const float *inv_freq, int64_t n_positions,
                   int64_t half_dim, float scale, rm_dtype dtype);

#ifdef __cplusplus
}
#endif
