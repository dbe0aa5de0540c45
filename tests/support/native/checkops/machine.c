// machine.c: see machine.h. 512-bit multiply-adds where the processor has them.
#include "machine.h"

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/team.h"

enum { CHAINS = 12, ROUNDS = 2000000, TRIES = 6, FLOATS = 64 << 20 };  // 256 MiB

typedef struct sweep {
  const float *from;
  int wide, reads;
} sweep;

static volatile float sink[256];

__attribute__((target("avx2,fma"))) static float fma256(void) {
  __m256 r[CHAINS];
  for (int i = 0; i < CHAINS; i++) r[i] = _mm256_set1_ps((float)i);
  for (int k = 0; k < ROUNDS; k++) {
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++)
      r[i] = _mm256_fmadd_ps(r[i], _mm256_set1_ps(1.0000001f), _mm256_set1_ps(1e-9f));
  }
  for (int i = 1; i < CHAINS; i++) r[0] = _mm256_add_ps(r[0], r[i]);
  return _mm256_cvtss_f32(r[0]);
}

__attribute__((target("avx512f"))) static float fma512(void) {
  __m512 r[CHAINS];
  for (int i = 0; i < CHAINS; i++) r[i] = _mm512_set1_ps((float)i);
  for (int k = 0; k < ROUNDS; k++) {
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++)
      r[i] = _mm512_fmadd_ps(r[i], _mm512_set1_ps(1.0000001f), _mm512_set1_ps(1e-9f));
  }
  for (int i = 1; i < CHAINS; i++) r[0] = _mm512_add_ps(r[0], r[i]);
  return _mm512_cvtss_f32(r[0]);
}

__attribute__((target("avx2"))) static float read_all(const float *p, int64_t n) {
  __m256i a = _mm256_setzero_si256(), b = a;
  for (int64_t i = 0; i < n; i += 32) {
    _mm_prefetch((const char *)(p + i) + 1024, _MM_HINT_T0);
    _mm_prefetch((const char *)(p + i) + 1088, _MM_HINT_T0);
    a = _mm256_xor_si256(a, _mm256_xor_si256(_mm256_load_si256((const __m256i *)(p + i)),
                                             _mm256_load_si256((const __m256i *)(p + i + 8))));
    b = _mm256_xor_si256(b, _mm256_xor_si256(_mm256_load_si256((const __m256i *)(p + i + 16)),
                                             _mm256_load_si256((const __m256i *)(p + i + 24))));
  }
  return (float)_mm256_extract_epi32(_mm256_xor_si256(a, b), 0);
}

static void task(void *arg, int thread, int n_threads) {
  const sweep *s = arg;
  const int64_t share = FLOATS / n_threads / 32 * 32;
  if (s->reads) sink[thread] = read_all(s->from + thread * share, share);
  else sink[thread] = s->wide ? fma512() : fma256();
}

static double rate(void *team, int n_threads, sweep *s, double amount) {
  double best = 0;
  for (int i = 0; i < TRIES; i++) {
    const double start = seconds_now();
    if (n_threads > 1) rm_team_run(team, task, s);
    else task(s, 0, 1);
    const double now = amount / (seconds_now() - start) * 1e-9;
    best = now > best ? now : best;
  }
  return best;
}

machine measure_machine(void *team, int n_threads) {
  machine found = {0};
  float *buffer = aligned_alloc(64, sizeof(float) * (size_t)FLOATS);
  if (!buffer) return found;
  memset(buffer, 1, sizeof(float) * (size_t)FLOATS);
  sweep s = {.from = buffer, .reads = 1};
  found.read_gb_s = rate(team, n_threads, &s, 4.0 * FLOATS);
  s.reads = 0;
  const double flops = 2.0 * CHAINS * ROUNDS * n_threads;
  found.fma_gflop_s = rate(team, n_threads, &s, 8 * flops);
  s.wide = __builtin_cpu_supports("avx512f") != 0;
  const double wide = s.wide ? rate(team, n_threads, &s, 16 * flops) : 0;
  found.fma_gflop_s = wide > found.fma_gflop_s ? wide : found.fma_gflop_s;
  free(buffer);
  return found;
}
