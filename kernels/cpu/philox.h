// philox.h: the integer arithmetic of token choice (docs/numerics.md §7). It is exact, so all
// variants share it.
#pragma once

#include "scalar.h"

// trunc(e·2^40) for e in [0, 1]; 0 for any other e, and for denormals.
RM_INLINE uint64_t rm_token_weight(float e) {
  const uint32_t u = rm_bits(e), exponent = u >> 23;
  const uint64_t mantissa = (u & 0x7fffffu) | 0x800000u;
  const uint32_t shift = 127 - exponent; // large for any other e
  return mantissa << 17 >> (shift < 63 ? shift : 63);
}

// max(1, ⌈top_p·total⌉), exact: top_p is m·2^-s in binary.
RM_INLINE uint64_t rm_top_p_need(float top_p, uint64_t total) {
  const uint32_t u = rm_bits(top_p), exponent = u >> 23;
  const uint64_t mantissa = exponent ? (u & 0x7fffffu) | 0x800000u : u & 0x7fffffu;
  const uint32_t shift = 150 - (exponent ? exponent : 1); // top_p < 1: 24 … 149
  const unsigned __int128 product = (unsigned __int128)mantissa * total;
  if (shift >= 128) return 1;
  const uint64_t whole = (uint64_t)(product >> shift);
  const uint64_t need = whole + (((unsigned __int128)whole << shift) != product);
  return need ? need : 1;
}

RM_INLINE uint64_t rm_mul_high(uint64_t a, uint64_t b) {
  return (uint64_t)((unsigned __int128)a * b >> 64);
}

// The first 64 bits of Philox4x32-10 at (key = seed, counter).
RM_INLINE uint64_t rm_philox_u64(uint64_t seed, uint64_t counter) {
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  uint32_t x0 = (uint32_t)counter, x1 = (uint32_t)(counter >> 32), x2 = 0, x3 = 0;
  for (int round = 0; round < 10; round++) {
    const uint64_t p0 = (uint64_t)0xD2511F53u * x0, p1 = (uint64_t)0xCD9E8D57u * x2;
    x0 = (uint32_t)(p1 >> 32) ^ x1 ^ k0;
    x2 = (uint32_t)(p0 >> 32) ^ x3 ^ k1;
    x1 = (uint32_t)p1;
    x3 = (uint32_t)p0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return (uint64_t)x1 << 32 | x0;
}

// The edit of a token, or NULL.
RM_INLINE const rm_logit_edit *rm_find_edit(const rm_sample_params *p, int64_t token) {
  int32_t low = 0, high = p->n_edits;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (p->edits[middle].token < token) low = middle + 1;
    else high = middle;
  }
  return low < p->n_edits && p->edits[low].token == token ? p->edits + low : 0;
}

// The logit of an edited token in the draw.
RM_INLINE float rm_edited_logit(float logit, const rm_sample_params *p, const rm_logit_edit *edit) {
  float x = logit + edit->bias;
  if (edit->count >= 0) x = x > 0.0f ? x / p->repetition_penalty : x * p->repetition_penalty;
  if (edit->count > 0) {
    x = x - p->frequency_penalty * (float)edit->count;
    x = x - p->presence_penalty;
  }
  return x + 0.0f;
}

// Whether the draw is from the model's own distribution, so that both logprobs are equal.
RM_INLINE int rm_samples_the_model(const rm_sample_params *p, int64_t vocab) {
  return p->temperature == 1.0f && p->n_banned == 0 && p->n_edits == 0 && !(p->min_p > 0.0f) &&
         (p->top_k <= 0 || p->top_k >= vocab) && p->top_p >= 1.0f;
}

// Stores the draw of row r: the token (−1: none), its logprob `under` the distribution of the draw,
// and the number of tokens that were kept.
RM_INLINE void rm_put_draw(const rm_sample_args *a, int64_t r, int32_t token, float under,
                           int32_t kept) {
  const float *stats = a->stats + 2 * rm_sampled_row(a, r);
  const float model =
      token < 0 ? rm_float(0x7fc00000u) : rm_logprob(a->logits[r * a->ld_logits + token], stats);
  a->tokens[r] = token;
  a->logprobs[r] = model;
  a->sampling_logprobs[r] =
      token < 0 || rm_samples_the_model(a->params + r, a->vocab) ? model : under;
  if (a->kept) a->kept[r] = token < 0 ? 0 : kept;
}
