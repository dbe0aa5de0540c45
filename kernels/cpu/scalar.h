// scalar.h: the arithmetic of docs/numerics.md on one number: bf16, canonical rounding, exp, log.
// ref*.c uses it; the vector headers have the same steps for 16 lanes. It needs FMA (fmaf must
// compile to the instruction) and rm_fp_enter's environment.
#pragma once

#include <math.h>
#include <string.h>

#include "kernels.h"

// Every variant detects NaNs by their bits and compares so that a NaN is never greater.
RM_INLINE uint32_t rm_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

RM_INLINE float rm_float(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

RM_INLINE int rm_is_nan(float x) { return (rm_bits(x) & 0x7fffffffu) > 0x7f800000u; }
RM_INLINE int rm_is_finite(float x) { return (rm_bits(x) & 0x7f800000u) != 0x7f800000u; }
RM_INLINE float rm_max_f32(float x, float m) { return x > m ? x : m; }

RM_INLINE float rm_bf16_to_f32(uint16_t b) { return rm_float((uint32_t)b << 16); }

RM_INLINE uint16_t rm_f32_to_bf16(float x) {
  const uint32_t u = rm_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  if ((u & 0x7f800000u) == 0) return (uint16_t)(u >> 16 & 0x8000u);
  return (uint16_t)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}

// Applied to every stored float32: −0 becomes +0, and every NaN becomes the same NaN.
RM_INLINE float rm_canon(float x) {
  const float y = x + 0.0f;
  return rm_is_nan(y) ? rm_float(0x7fc00000u) : y;
}

// round_T: x rounded to T, as a float.
RM_INLINE float rm_round_to(rm_dtype dtype, float x) {
  const float y = rm_canon(x);
  return dtype == RM_BF16 ? rm_bf16_to_f32(rm_f32_to_bf16(y)) : y;
}

RM_INLINE const void *rm_at(rm_dtype dtype, const void *p, int64_t i) {
  return (const char *)p + i * (int64_t)rm_dtype_bytes(dtype);
}
RM_INLINE void *rm_at_mut(rm_dtype dtype, void *p, int64_t i) {
  return (char *)p + i * (int64_t)rm_dtype_bytes(dtype);
}

RM_INLINE float rm_get(rm_dtype dtype, const void *p, int64_t i) {
  return dtype == RM_BF16 ? rm_bf16_to_f32(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}

// Stores round_T(x).
RM_INLINE void rm_put(rm_dtype dtype, void *p, int64_t i, float x) {
  const float y = rm_canon(x);
  if (dtype == RM_BF16) ((uint16_t *)p)[i] = rm_f32_to_bf16(y);
  else ((float *)p)[i] = y;
}

// Copies one element, bit-identical.
RM_INLINE void rm_copy_elem(rm_dtype dtype, void *to, int64_t i, const void *from, int64_t j) {
  if (dtype == RM_BF16) ((uint16_t *)to)[i] = ((const uint16_t *)from)[j];
  else ((uint32_t *)to)[i] = ((const uint32_t *)from)[j];
}

// c[0] + c[1]·x + … + c[n − 1]·x^(n − 1), by Horner's rule. n is a constant.
RM_INLINE float rm_polynomial(const float *c, int n, float x) {
  float sum = c[n - 1];
  for (int i = n - 2; i >= 0; i--) sum = fmaf(sum, x, c[i]);
  return sum;
}

// exp: x = n·ln2 + r, |r| ≤ ln2/2, e^r = 1 + r + r²·q(r), then times 2^n in two steps, of which
// only the last may round.
#define RM_EXP_LO (-88.0f)
#define RM_EXP_HI 89.0f
#define RM_LOG2E 0x1.715476p+0f
#define RM_LN2_HI 0x1.62e4p-1f
#define RM_LN2_LO 0x1.7f7d1cp-20f
#define RM_ROUND_MAGIC 12582912.0f // 1.5·2^23: adding it leaves the nearest integer in the low bits
#define RM_EXP_Q \
  0x1p-1f, 0x1.555556p-3f, 0x1.55547p-5f, 0x1.1110acp-7f, 0x1.6da76cp-10f, 0x1.a17e08p-13f

// e^r, and t, whose low bits are n.
RM_INLINE float rm_exp_rest(float x, float *t) {
  *t = fmaf(x, RM_LOG2E, RM_ROUND_MAGIC);
  const float n = *t - RM_ROUND_MAGIC;
  float r = fmaf(n, -RM_LN2_HI, x);
  r = fmaf(n, -RM_LN2_LO, r);
  const float q[] = {RM_EXP_Q};
  return fmaf(rm_polynomial(q, 6, r), r * r, r) + 1.0f;
}

RM_INLINE float rm_exp(float x) {
  x = RM_EXP_LO > x ? RM_EXP_LO : x;
  x = RM_EXP_HI < x ? RM_EXP_HI : x;
  float t;
  const float p = rm_exp_rest(x, &t);
  const int32_t i = (int32_t)(rm_bits(t) - rm_bits(RM_ROUND_MAGIC)), half = i >> 1;
  const float lo = rm_float((uint32_t)(half + 127) << 23),
              hi = rm_float((uint32_t)(i - half + 127) << 23);
  return p * lo * hi;
}

RM_INLINE float rm_sigmoid(float x) { return 1.0f / (1.0f + rm_exp(-x)); }

// GELU by tanh: x·σ(z), z = x·(K3·x² + K1), K1 = √(8/π), K3 = 0.044715·K1. GELU by erf: x·Φ(x),
// where Φ(−|x|) is half of Abramowitz and Stegun's 7.1.26, of |x|/√2.
#define RM_GELU_K1 0x1.988454p+0f
#define RM_GELU_K3 0x1.2444f2p-4f
#define RM_SQRT_HALF 0x1.6a09e6p-1f
#define RM_PHI_P 0x1.4f740ap-2f
#define RM_PHI_A 0x1.04f20cp-3f, -0x1.23531cp-3f, 0x1.6be1c6p-1f, -0x1.7401c6p-1f, 0x1.0fb844p-1f

RM_INLINE float rm_gelu(float x) {
  const float a = rm_max_f32(x, -x) * RM_SQRT_HALF, t = 1.0f / fmaf(RM_PHI_P, a, 1.0f);
  const float q[] = {RM_PHI_A}, below = rm_polynomial(q, 5, t) * t * rm_exp(-(a * a));
  return x * (x < 0.0f ? below : 1.0f - below);
}

RM_INLINE float rm_activate(rm_activation how, float x) {
  if (how == RM_GELU) return rm_gelu(x);
  if (how == RM_RELU2) return x < 0.0f ? 0.0f : x * x; // a NaN stays a NaN
  const float z = how == RM_GELU_TANH ? x * fmaf(RM_GELU_K3, x * x, RM_GELU_K1) : x;
  return x / (1.0f + rm_exp(-z));
}

// activation(gate) · up of gemm_swiglu for rounded gate and up, before it is rounded. A NaN stays a
// NaN.
RM_INLINE float rm_gated(rm_dtype dtype, const rm_gemm_args *a, float gate, float up) {
  if (a->activation != RM_SWIGLU_OAI)
    return rm_round_to(dtype, rm_activate(a->activation, gate)) * up;
  const float limit = a->limit, g = gate > limit ? limit : gate,
              u = up > limit    ? limit
                  : up < -limit ? -limit
                                : up;
  return rm_round_to(dtype, g / (1.0f + rm_exp(-(a->alpha * g)))) * (u + 1.0f);
}

// The biases of a group's matrix.
RM_INLINE const void *rm_bias_of(rm_dtype dtype, const rm_gemm_args *a, int64_t group, int swiglu) {
  return a->bias ? rm_at(dtype, a->bias, group * (swiglu ? 2 : 1) * a->n) : NULL;
}

// tanh: near 0 an odd polynomial, which keeps the relative error small; else 1 − 2/(e^2|x| + 1).
#define RM_TANH_SMALL 0.625f
#define RM_TANH_Q -0x1.555532p-2f, 0x1.110726p-3f, -0x1.b83c5ap-5f, 0x1.52269cp-6f, -0x1.75e1ccp-8f

RM_INLINE float rm_tanh(float x) {
  const float a = rm_max_f32(x, -x), z = x * x;
  const float q[] = {RM_TANH_Q}, near = fmaf(x * z, rm_polynomial(q, 5, z), x),
              far = 1.0f - 2.0f / (rm_exp(a + a) + 1.0f);
  return RM_TANH_SMALL > a ? near : x < 0.0f ? -far : far;
}

// `cap` 0: none.
RM_INLINE float rm_softcap(float x, float cap) { return cap != 0.0f ? cap * rm_tanh(x / cap) : x; }

// The logit of a dot product.
RM_INLINE float rm_logit(const rm_lm_head_args *a, float acc) {
  return rm_canon(rm_softcap(a->scale != 0.0f ? acc * a->scale : acc, a->softcap));
}

// 1 / √(mean square + eps) of n numbers, from the sum of their squares.
RM_INLINE float rm_rms_scale(float squares, int64_t n, float eps) {
  return 1.0f / sqrtf(squares / (float)n + eps);
}

// The same for all heads of a row of q or of k, by their sums of squares.
RM_INLINE float rm_scale_of_heads(const rm_qk_rope_kv_args *a, const float *squares,
                                  int64_t n_heads) {
  float total = 0.0f;
  for (int64_t h = 0; h < n_heads; h++) total = total + squares[h];
  return rm_rms_scale(total, n_heads * a->head_dim, a->eps);
}

// A norm's output: t is the number times 1/rms. Weights as they are stored, or zero-centered.
RM_INLINE float rm_weighted(rm_dtype dtype, int zero_centered, float weight, float t) {
  return zero_centered ? (1.0f + weight) * t : weight * rm_round_to(dtype, t);
}

// log of a positive normal number: x = 2^e·m, √½ ≤ m < √2, f = m − 1, log m = f − f²/2 + f³·p(f).
RM_INLINE float rm_log(float x) {
  if (!(x > 0.0f)) return rm_is_nan(x) || x < 0.0f ? rm_float(0x7fc00000u) : -INFINITY;
  if (!rm_is_finite(x)) return x;
  const uint32_t shifted = rm_bits(x) - 0x3f3504f3u; // √½
  const int32_t e = (int32_t)shifted >> 23;
  const float f = rm_float((shifted & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
  const float n = (float)e, f2 = f * f;
  const float p[] = {0x1.555548p-2f,  -0x1.000006p-2f, 0x1.99a4b6p-3f,
                     -0x1.555c4cp-3f, 0x1.23376ap-3f,  -0x1.fc2224p-4f,
                     0x1.e6f066p-4f,  -0x1.de3b6ap-4f, 0x1.1456e2p-4f};
  float y = f * f2 * rm_polynomial(p, 9, f);
  y = fmaf(n, RM_LN2_LO, y);
  y = fmaf(-0.5f, f2, y);
  return fmaf(n, RM_LN2_HI, f + y);
}

// log(1 + e^x), which is x to float32 above 20. The quotient is what 1 + e^x lost by rounding.
RM_INLINE float rm_softplus(float x) {
  if (x > 20.0f) return x;
  const float e = rm_exp(x), sum = 1.0f + e;
  return rm_log(sum) + (e - (sum - 1.0f)) / sum;
}

// ------------------------------------------------------------------------------------- delta_net
enum { RM_DELTA_CHAINS = 4 }; // of a sum over the rows of a state
#define RM_L2_EPS 1e-6f

// A value head of the rows of a sequence in this call.
typedef struct rm_delta_run {
  const rm_delta_net_args *a;
  int64_t head, k_head, first, columns; // first row; columns of x
  int64_t n; // inputs of the convolution: q, k and v of the head
  float *loaded; // the head's part of the state before the run; NULL: zeros
} rm_delta_run;

RM_INLINE float *rm_delta_state(const rm_delta_net_args *a, int32_t slot, int64_t head) {
  const int64_t bytes = rm_delta_head_bytes(a->k_dim, a->v_dim, a->kernel, a->dtype);
  return slot < 0 ? NULL : (float *)((char *)a->states + (slot * a->n_v_heads + head) * bytes);
}
// The last inputs of the convolution in a state.
RM_INLINE void *rm_delta_window(const rm_delta_net_args *a, float *state) {
  return state + rm_packed_elems(a->v_dim, a->k_dim);
}
RM_INLINE rm_delta_run rm_delta_run_at(const rm_delta_net_args *a, int64_t first, int64_t head) {
  const rm_delta_run run = {a,
                            head,
                            (uint32_t)(a->head0 + head) / (uint32_t)a->group,
                            first,
                            rm_delta_columns(a->n_k_heads, a->n_v_heads, a->k_dim, a->v_dim),
                            2 * a->k_dim + a->v_dim,
                            rm_delta_state(a, a->load_slots[a->seq_of_row[first]], head)};
  return run;
}

// The column of x, and the channel of the convolution, of input i.
RM_INLINE int64_t rm_delta_channel(const rm_delta_run *of, int64_t i) {
  const rm_delta_net_args *a = of->a;
  if (i < a->k_dim) return of->k_head * a->k_dim + i;
  if (i < 2 * a->k_dim) return (a->n_k_heads + of->k_head - 1) * a->k_dim + i;
  return 2 * (a->n_k_heads - 1) * a->k_dim + of->head * a->v_dim + i;
}
// Inputs i, i + 1, … of q, of k or of v at row t, which may be before the run; NULL: zeros.
RM_INLINE const void *rm_delta_input(const rm_delta_run *of, int64_t t, int64_t i) {
  const rm_delta_net_args *a = of->a;
  if (t >= of->first) return rm_at(a->dtype, a->x, t * of->columns + rm_delta_channel(of, i));
  const int64_t before = t - of->first + a->kernel - 1;
  return of->loaded ? rm_at(a->dtype, rm_delta_window(a, of->loaded), before * of->n + i) : NULL;
}
RM_INLINE float rm_delta_convolved(const rm_delta_run *of, int64_t row, int64_t i) {
  const rm_delta_net_args *a = of->a;
  float acc = 0.0f;
  for (int64_t j = 0; j < a->kernel; j++) {
    const void *x = rm_delta_input(of, row - a->kernel + 1 + j, i);
    const float tap = rm_get(a->dtype, a->conv, rm_delta_channel(of, i) * a->kernel + j);
    acc = fmaf(tap, x ? rm_get(a->dtype, x, 0) : 0.0f, acc);
  }
  return rm_activate(RM_SILU, acc);
}
// Saves inputs [i, i + n) of the convolution after a row. Ascending, since the state may be the
// loaded one.
RM_INLINE void rm_delta_save_inputs(const rm_delta_run *of, int64_t row, float *state, int64_t i,
                                    int64_t n) {
  const rm_delta_net_args *a = of->a;
  const size_t bytes = (size_t)n * rm_dtype_bytes(a->dtype);
  for (int64_t j = 0; j < a->kernel - 1; j++) {
    const void *x = rm_delta_input(of, row - a->kernel + 2 + j, i);
    void *to = rm_at_mut(a->dtype, rm_delta_window(a, state), j * of->n + i);
    if (x) memcpy(to, x, bytes);
    else memset(to, 0, bytes);
  }
}

// The first column of the head's z.
RM_INLINE int64_t rm_delta_z(const rm_delta_run *of) {
  const rm_delta_net_args *a = of->a;
  return 2 * a->n_k_heads * a->k_dim + (a->n_v_heads + of->head) * a->v_dim;
}
// gates ← the factor of the state, and beta, at a row.
RM_INLINE void rm_delta_gates(const rm_delta_run *of, int64_t row, float *gates) {
  const rm_delta_net_args *a = of->a;
  const int64_t b = (row + 1) * of->columns - 2 * a->n_v_heads + of->head;
  const float dt = rm_get(a->dtype, a->x, b + a->n_v_heads) + a->dt_bias[of->head];
  gates[0] = rm_exp(-(rm_exp(a->a_log[of->head]) * rm_softplus(dt)));
  gates[1] = rm_sigmoid(rm_get(a->dtype, a->x, b));
}

// The fixed tree over the 16 partial sums of a reduction.
RM_INLINE float rm_tree16(const float *partial) {
  float s[RM_LANES];
  memcpy(s, partial, sizeof s);
  for (int step = RM_LANES / 2; step > 0; step /= 2)
    for (int j = 0; j < step; j++) s[j] = s[j] + s[j + step];
  return s[0];
}

// The maximum of numbers x and their Σ exp(x − max), merged from those of two parts. old, add: the
// factors of the parts' own sums.
typedef struct rm_merged {
  float max, sum, old, add;
} rm_merged;
RM_INLINE rm_merged rm_merge(float max, float sum, float next_max, float next_sum) {
  rm_merged both;
  both.max = rm_max_f32(next_max, max);
  both.old = rm_exp(max - both.max);
  both.add = rm_exp(next_max - both.max);
  both.sum = fmaf(sum, both.old, next_sum * both.add);
  return both;
}

// Merges a row's sums with the sink of its head after the last split: updates l and returns the
// factor of the sums. Without sinks the factor is 1.
RM_INLINE float rm_add_sink(const rm_attention_args *a, int64_t head, float m, float *l) {
  if (!a->sinks) return 1.0f;
  const rm_merged all = rm_merge(m, *l, rm_get(a->dtype, a->sinks, head), 1.0f);
  *l = all.sum;
  return all.old;
}

// (logit − max) − log(sum): every logprob is computed this way.
RM_INLINE float rm_logprob(float logit, const float *stats) {
  return rm_canon((logit - stats[0]) - rm_log(stats[1]));
}

// Stores the stats of a row, its flag and the logprob of its target.
RM_INLINE void rm_put_stats(const rm_merge_pairs_args *a, int64_t row, float max, float sum) {
  float *stats = a->stats + 2 * row;
  stats[0] = rm_canon(max);
  stats[1] = rm_canon(sum);
  if (rm_is_nan(sum)) a->row_flags[row] |= RM_ROW_LOGITS_NONFINITE;
  if (a->target_logprobs)
    a->target_logprobs[row] = a->targets[row] < 0 ? 0.0f : rm_logprob(a->target_logits[row], stats);
}

// The router chooses the experts with the largest keys.
RM_INLINE float rm_router_key(const rm_router_args *a, const float *scores, int64_t e) {
  return a->bias ? scores[e] + a->bias[e] : scores[e];
}

// The router's gate, from the chosen expert's score and, with renormalize, the sum of all chosen
// scores.
RM_INLINE float rm_gate(const rm_router_args *a, float score, float sum) {
  if (a->renormalize && a->score == RM_SCORE_SIGMOID) score = score / (sum + 1e-20f);
  else if (a->renormalize && sum != 0.0f) score = score / (sum < a->min_sum ? a->min_sum : sum);
  return rm_canon(score * a->route_scale);
}

// Floats as unsigned keys in ascending order; a NaN is lowest, −0 is +0.
RM_INLINE uint32_t rm_order_key(float x) {
  const uint32_t u = rm_bits(x + 0.0f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0;
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
