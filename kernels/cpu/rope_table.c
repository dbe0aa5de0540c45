// rope_table.c: sines and cosines of the contract (docs/numerics.md §3), in double and without
// libm, so that every machine has the same table. Angles go up to 10^6; after two fused steps of
// π/2 the remainder has a relative error of 2^-48, and the Taylor sums on |r| ≤ π/4 are exact to a
// double's last bits. A generator computes the table once, so the code is not optimized.
#include "scalar.h"

static const double TWO_OVER_PI = 0x1.45f306dc9c883p-1, PIO2_HI = 0x1.921fb54442d18p+0,
                    PIO2_LO = 0x1.1a62633145c07p-54;
static const double ROUND_MAGIC = 6755399441055744.0; // 1.5·2^52

// 1 − z/(n·(n−1)) + …, a Taylor series by Horner's rule from the term of n to that of `last`.
static double taylor(double z, int n, int last) {
  double sum = 1.0;
  for (; n >= last; n -= 2) sum = fma(sum, -z / (double)(n * (n - 1)), 1.0);
  return sum;
}

static void sin_cos(float angle, double *sin, double *cos) {
  const double t = fma((double)angle, TWO_OVER_PI, ROUND_MAGIC), k = t - ROUND_MAGIC;
  const double r = fma(-k, PIO2_LO, fma(-k, PIO2_HI, (double)angle));
  const double z = r * r, c = taylor(z, 16, 2), s = fma(taylor(z, 19, 5) * (-z / 6.0), r, r);
  const int64_t quadrant = (int64_t)k & 3;
  const double along = quadrant & 1 ? c : s, across = quadrant & 1 ? s : c;
  *sin = quadrant & 2 ? -along : along;
  *cos = (quadrant + 1) & 2 ? -across : across;
}

void rm_rope_table(float *cos, float *sin, const float *inv_freq, int64_t n_positions,
                   int64_t half_dim, float scale, rm_dtype dtype) {
  const uint32_t saved = rm_fp_enter();
  for (int64_t p = 0; p < n_positions; p++)
    for (int64_t i = 0; i < half_dim; i++) {
      double s, c;
      sin_cos((float)p * inv_freq[i], &s, &c);
      cos[p * half_dim + i] = rm_round_to(dtype, (float)c * scale);
      sin[p * half_dim + i] = rm_round_to(dtype, (float)s * scale);
    }
  rm_fp_leave(saved);
}
