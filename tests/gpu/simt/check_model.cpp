// check_model.cpp: the model of the tensor cores (mma_model.h) against results of an H100 and
// against the properties that the family cuda_mma needs of the instruction.
#include "check.h"
#include "mma_model.h"
#include "random_bits.h"

#include <cmath>
#include <cstdio>

namespace {

struct recorded {
  uint32_t c;
  uint16_t a[16], b[16];
  uint32_t d;
};
// From the data of arXiv 2512.07004 (github.com/north-numerical-computing/MATLAB-tensor-core,
// model_validation/H100/bf16). d is neither the exact sum rounded nor the exact sum cut.
constexpr recorded RECORDED[] = {{0x3ab041ea,
                                  {0x3fdf, 0xbdea, 0xbf05, 0x3e29, 0xbf07, 0x3ee6, 0x4023, 0xbf97,
                                   0x3f8e, 0xbf8c, 0xbf3a, 0x3f92, 0xbdee, 0xbe84, 0x3fa6, 0xbf60},
                                  {0x3fcb, 0x3f9b, 0xbd7a, 0x3ea5, 0x3f7f, 0xbd71, 0xbf0a, 0xbec1,
                                   0xbe63, 0xbc13, 0x3f88, 0xbf5d, 0xbfb4, 0xbf61, 0x3f6c, 0x3fba},
                                  0xbee53f5f},
                                 {0x3d0eaf5a,
                                  {0xbfc3, 0x3f3d, 0x3fbc, 0x3f55, 0xbf0a, 0xbe6e, 0x3f8b, 0xbe80,
                                   0xbfd7, 0xbf13, 0xbf11, 0x3f0c, 0x3ee6, 0x3f70, 0x3f8c, 0x3ebd},
                                  {0x3eb2, 0xbe14, 0x3ea6, 0x3fcb, 0xbf60, 0x3f93, 0xbfba, 0xbdb6,
                                   0xbe78, 0xbe7f, 0x3d9e, 0x3ef0, 0xbedd, 0x3f8c, 0xbf75, 0xbf96},
                                  0xbd2cd0a8},
                                 {0x3dd65a52,
                                  {0xbf43, 0x3fd5, 0x3fac, 0xbfa5, 0x3ef9, 0xbed0, 0xbe80, 0xbeaa,
                                   0xbe7e, 0x3fb0, 0x3f31, 0xc004, 0xbf98, 0xbfc4, 0xbef6, 0x3f0f},
                                  {0xbe88, 0x3f7f, 0xbf9a, 0xbf51, 0xbee1, 0xbe39, 0xbee3, 0x3f27,
                                   0xbfb6, 0xbf82, 0x3f10, 0x3f98, 0xbfc5, 0x3c3a, 0xbea4, 0x3eaf},
                                  0x3e521528},
                                 {0x3ce8d61d,
                                  {0xbe90, 0x400b, 0x3fa3, 0x3f52, 0xbb92, 0x3fa7, 0xbf2e, 0x3ec8,
                                   0x3f33, 0xbe22, 0x3f67, 0xbfb3, 0x3fc0, 0x3fdd, 0xbf7e, 0xc052},
                                  {0xbf83, 0xbeae, 0x3f5a, 0xbf7d, 0xbedd, 0x3fd9, 0xbf02, 0xbdd3,
                                   0xbeda, 0x3f48, 0xbf5f, 0x3e84, 0x3f6d, 0xbf1d, 0xbff1, 0x3f89},
                                  0xbf02e8c6}};

// Two products and an accumulator, of which not all are finite, and results without a float32.
struct edge {
  float c;
  uint16_t a[2], b[2];
  float d;
};
constexpr uint16_t ONE = 0x3f80, INF = 0x7f80, NOT = 0x7fc0, MOST = 0x7f7f, TINY = 0x0001;
constexpr edge EDGES[] = {{1.0f, {INF}, {ONE}, INFINITY},
                          {1.0f, {INF}, {TINY}, INFINITY},
                          {-INFINITY, {ONE}, {ONE}, -INFINITY},
                          {1.0f, {MOST}, {MOST}, INFINITY},
                          {-INFINITY, {MOST}, {MOST}, -INFINITY},
                          {0.0f, {MOST, MOST}, {MOST, MOST | 0x8000}, 0.0f},
                          {1.0f, {INF}, {0}, NAN},
                          {-INFINITY, {INF}, {ONE}, NAN},
                          {0.0f, {INF, INF}, {ONE, ONE | 0x8000}, NAN},
                          {0.0f, {NOT}, {0}, NAN},
                          {NAN, {ONE}, {ONE}, NAN},
                          {0x1p-149f, {0}, {MOST}, 0x1p-149f},
                          {0.0f, {TINY}, {TINY}, 0.0f}};

bool is_same(const char *what, float got, float want) {
  const bool both = rm_is_nan(got) && rm_is_nan(want);
  const uint32_t x = both ? 0 : rm_bits(got), y = both ? 0 : rm_bits(want);
  return same(what, &x, &y, sizeof x, 1);
}

// Another order of the products, and a step of zeros behind it, do not change the sum. Its error is
// at most 17 cuts of 2^-25 of the largest term and one of 2^-23 of the sum.
bool random_case() {
  uint16_t a[16], b[16], other_a[16], other_b[16];
  const float c = rm_float((random_bits() & 0x807fffffu) | (120 + random_bits() % 12) << 23);
  double exact = static_cast<double>(c), largest = fabs(exact);
  for (int k = 0; k < 16; k++) {
    a[k] = static_cast<uint16_t>((random_bits() & 0x807fu) | (120 + random_bits() % 12) << 7);
    b[k] = static_cast<uint16_t>((random_bits() & 0x807fu) | (120 + random_bits() % 12) << 7);
    const double product =
        static_cast<double>(rm_bf16_to_f32(a[k])) * static_cast<double>(rm_bf16_to_f32(b[k]));
    exact += product, largest = fmax(largest, fabs(product));
  }
  const float sum = mma_model(c, a, b);
  const uint32_t step = random_bits() | 1;
  for (uint32_t k = 0; k < 16; k++) other_a[k * step % 16] = a[k], other_b[k * step % 16] = b[k];
  if (!is_same("products in another order", mma_model(c, other_a, other_b), sum)) return false;
  for (int k = 0; k < 16; k++) {
    const uint16_t zero = static_cast<uint16_t>(random_bits() & 0x8000u),
                   any = random_bits() % 2 ? MOST : TINY;
    a[k] = k % 2 ? zero : any, b[k] = k % 2 ? any : zero;
  }
  if (!is_same("a step of zeros", mma_model(sum, a, b), sum)) return false;
  const double bound = (17.0 / 4.0 * largest + fabs(exact)) * 0x1p-23 * 1.001;
  const bool close = fabs(static_cast<double>(sum) - exact) <= bound;
  return close || is_same("an error beyond its bound", sum, static_cast<float>(exact));
}

} // namespace

bool check_mma_model(uint64_t seed) {
  state = seed;
  for (const recorded &r : RECORDED)
    if (!is_same("a result of an H100", mma_model(rm_float(r.c), r.a, r.b), rm_float(r.d)))
      return false;
  for (const edge &e : EDGES) {
    const uint16_t a[16] = {e.a[0], e.a[1]}, b[16] = {e.b[0], e.b[1]};
    if (!is_same("an edge", mma_model(e.c, a, b), e.d)) return false;
  }
  for (int i = 0; i < 100000; i++)
    if (!random_case()) return false;
  return true;
}
