// rope_table.c: sines and cosines of the contract (docs/numerics.md §3), in double and without
// libm, so that every machine has the same table. Angles go up to 10^6; after two fused steps of
// π/2 the remainder has a relative error of 2^-48, and the Taylor sums on |r| ≤ π/4 are exact to a
// double's last bits. A generator computes the table once, so the code is not optimized.
#include "scalar.h"

static const double TWO_OVER_PI = 0x1.45f306dc9c883p-1, PIO2_HI = 0x1.921fb54442d18p+0,
                    PIO2_LO = 0x1.1a62633145c07p-54;
static const double ROUND_MAGIC = 6755399441055744.0; // 1.5·2^52

static double taylor_sin(double r) {
  const double z = r * r;
  double sum = 0.0;
  for (int n = 17; n >= 3; n -= 2) sum = fma(sum, -z / (double)((n + 2) * (n + 1)), 1.0);
  return fma(sum * (-z / 6.0), r, r);
}

static double taylor_cos(double r) {
  const double z = r * r;
  double sum = 1.0;
  for (int n = 16; n >= 2; n -= 2) sum = fma(sum, -z / (double)(n * (n - 1)), 1.0);
  return sum;
}

static void sin_cos(float angle, double *sin, double *cos) {
  const double t = fma((double)angle, TWO_OVER_PI, ROUND_MAGIC), k = t - ROUND_MAGIC;
  const double r = fma(-k, PIO2_LO, fma(-k, PIO2_HI, (double)angle));
  const double s = taylor_sin(r), c = taylor_cos(r);
  const int64_t quadrant = (int64_t)k & 3;
  *sin = quadrant == 0 ? s : quadrant == 1 ? c : quadrant == 2 ? -s : -c;
  *cos = quadrant == 0 ? c : quadrant == 1 ? -s : quadrant == 2 ? -c : s;
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
