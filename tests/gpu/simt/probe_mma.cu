// probe_mma.cu: the properties of the hardware that the family cuda_mma relies on and that a CPU
// cannot show. Prints one line per question. The status is 0 if P1 and P2 hold, on which the
// family's results depend. A "no" is an answer, a "NO" a failure.
//   P1  an output does not depend on its row in A or its column in B, nor on the contents of the
//       other rows and columns
//   P2  a step of zeros does not change the result, whatever is multiplied by the zeros; nor does
//       the position of a product among the 16
//   P3  a digest of 4096 results, to be compared between cards
//   P4  the bits of a sum of zeros and NaNs
//   P5  wgmma m64nNk16 is bit-identical to mma.sync, with A from registers and from shared memory
//   P6  whether denormal operands, accumulators and results are kept
//   P7  the error against exact sums, in units of 2^-23 of the largest term
//   P8  the result of -ftz for a value just below the smallest normal number, and the result of
//       this machine's CPU; if they differ, cuda_fma is bit-identical to x86 except for such values
//   P9  how many of a million results differ from those of the model (mma_model.h), and the
//       operands of the first ones of each kind
#include "mma_cases.cuh"
#include "wgmma.h"

#include <cmath>
#include <immintrin.h>

namespace {

constexpr int CASES = 4096;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// An operand in shared memory without a swizzle: core matrices of 8 rows of A, or columns of B, by
// 16 bytes of k, 128 bytes from one k to the next and 256 from one 8 to the next.
__device__ uint64_t descriptor(const void *operand) {
  const uint64_t at = __cvta_generic_to_shared(operand);
  return (at & 0x3ffff) >> 4 | static_cast<uint64_t>(128 >> 4) << 16 |
         static_cast<uint64_t>(256 >> 4) << 32;
}
#endif

// The 4 problems from 4·blockIdx.x on fill the 64 rows; the columns of all of them are those of the
// first, repeated N / 8 times.
template <int N, bool A_IS_SHARED>
__global__ void wgmma_kernel(const problem *problems, result *results, int *there) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ __align__(128) uint16_t a[64 / 8][2][8][8], b[N / 8][2][8][8];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            g = lane / 4, t = lane % 4 * 2;
  const problem *first = problems + 4 * blockIdx.x, &p = first[warp];
  for (int i = static_cast<int>(threadIdx.x); i < 64 * 16; i += 128)
    a[i / 128][i / 64 % 2][i / 8 % 8][i % 8] =
        first[i / 256].a[i / 128 % 2 * 8 + i / 8 % 8][i / 64 % 2 * 8 + i % 8];
  for (int i = static_cast<int>(threadIdx.x); i < N * 16; i += 128)
    b[i / 128][i / 64 % 2][i / 8 % 8][i % 8] = first->b[i / 64 % 2 * 8 + i % 8][i / 8 % 8];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  float d[N / 2];
  for (int i = 0; i < N / 2; i++) d[i] = p.c[g + i % 4 / 2 * 8][t + i % 2];
  rm_wgmma_arrive();
  if constexpr (A_IS_SHARED) rm_wgmma(d, descriptor(a), descriptor(b));
  else rm_wgmma(d, load_a(p.a, lane), descriptor(b));
  rm_wgmma_commit();
  rm_wgmma_wait<0>();
  float *out = results[4 * blockIdx.x + warp].d[0];
  for (int i = 0; i < 4; i++) out[(g + i / 2 * 8) * 8 + t + i % 2] = d[i];
  bool same = true; // every 8 columns are the first 8 again
  for (int i = 4; i < N / 2; i++) same &= __float_as_uint(d[i]) == __float_as_uint(d[i % 4]);
  if (!same) atomicAnd(there, 0);
#else
  if (threadIdx.x == 0) *there = -1;
#endif
}

// Equal bits, or two NaNs.
bool equal(float x, float y) { return rm_bits(x) == rm_bits(y) || (rm_is_nan(x) && rm_is_nan(y)); }
int64_t differing(const std::vector<result> &x, const std::vector<result> &y) {
  int64_t n = 0;
  for (size_t i = 0; i < x.size(); i++)
    for (int at = 0; at < 128; at++) n += !equal(x[i].d[at / 8][at % 8], y[i].d[at / 8][at % 8]);
  return n;
}

int say(const char *what, int64_t wrong, bool needed = true) {
  printf("%-78s %s", what, wrong ? needed ? "NO" : "no" : "yes");
  printf(wrong ? " (%ld outputs)\n" : "\n", static_cast<long>(wrong));
  return wrong && needed;
}

int places(const std::vector<problem> &all, const std::vector<result> &want) {
  std::vector<problem> moved = all, alone = all;
  for (size_t i = 0; i < all.size(); i++)
    for (int row = 0; row < 16; row++)
      for (int k = 0; k < 16; k++) {
        const int to = (row * 5 + static_cast<int>(i)) % 16;
        moved[i].a[to][k] = all[i].a[row][k];
        if (row >= 8) continue;
        moved[i].b[k][(row * 3 + static_cast<int>(i)) % 8] = all[i].b[k][row];
      }
  for (size_t i = 0; i < all.size(); i++)
    for (int row = 0; row < 16; row++)
      for (int col = 0; col < 8; col++)
        moved[i].c[(row * 5 + static_cast<int>(i)) % 16][(col * 3 + static_cast<int>(i)) % 8] =
            all[i].c[row][col];
  const std::vector<result> got = run(moved);
  std::vector<result> back = want;
  for (size_t i = 0; i < all.size(); i++)
    for (int row = 0; row < 16; row++)
      for (int col = 0; col < 8; col++)
        back[i].d[row][col] =
            got[i].d[(row * 5 + static_cast<int>(i)) % 16][(col * 3 + static_cast<int>(i)) % 8];
  int wrong = say("P1 an output does not depend on its row and column", differing(back, want));
  for (size_t i = 0; i < all.size(); i++)
    for (int row = 0; row < 16; row++)
      for (int k = 0; k < 16; k++) {
        const uint16_t others[] = {0x7fc0, 0x7f80, 0xff80, 0x7f7f};
        if (row != static_cast<int>(i) % 16) alone[i].a[row][k] = others[random_bits() % 4];
        if (row < 8 && row != static_cast<int>(i) % 8)
          alone[i].b[k][row] = others[random_bits() % 4];
      }
  const std::vector<result> apart = run(alone);
  int64_t n = 0;
  for (size_t i = 0; i < all.size(); i++)
    n += !equal(apart[i].d[i % 16][i % 8], want[i].d[i % 16][i % 8]);
  return wrong |
         say("P1 ... nor on NaNs, infinities and huge numbers in the other rows and columns", n);
}

int zeros(const std::vector<problem> &all, const std::vector<result> &want) {
  int wrong = 0;
  for (int how = 0; how < 3; how++) {
    std::vector<problem> behind = all;
    for (size_t i = 0; i < all.size(); i++) {
      for (int at = 0; at < 256; at++)
        behind[i].a[at / 16][at % 16] = static_cast<uint16_t>(how == 1   ? 0
                                                              : how == 0 ? 0
                                                                         : number(2));
      for (int at = 0; at < 128; at++)
        behind[i].b[at / 8][at % 8] = static_cast<uint16_t>(how == 2   ? 0
                                                            : how == 0 ? 0
                                                                       : number(2));
      memcpy(behind[i].c, want[i].d, sizeof want[i].d);
    }
    std::vector<result> got = run(behind), sums = want;
    for (auto *set : {&got, &sums})
      for (result &r : *set)
        for (auto &row : r.d)
          for (float &x : row) x += 0.0f; // the sign of a zero is not compared
    const char *names[] = {"zeros against zeros", "A's zeros against huge numbers",
                           "B's zeros against huge numbers"};
    char line[100];
    snprintf(line, sizeof line, "P2 a step of %s leaves the sum as it is", names[how]);
    wrong |= say(line, differing(got, sums));
  }
  // The smallest and the largest number beside zeros, against sums where both would be seen.
  std::vector<problem> small = all;
  std::vector<result> kept = want;
  for (size_t i = 0; i < all.size(); i++) {
    for (int k = 0; k < 16; k++) {
      const bool a_is_zero = random_bits() % 2;
      const auto operand = [](bool is_zero) {
        const uint32_t x = is_zero ? 0 : random_bits() % 2 ? 0x7f7fu : 0x0001u;
        return static_cast<uint16_t>(x | (random_bits() & 0x8000u));
      };
      for (auto &row : small[i].a) row[k] = operand(a_is_zero);
      for (uint16_t &x : small[i].b[k]) x = operand(!a_is_zero);
    }
    for (int at = 0; at < OUTPUTS; at++)
      kept[i].d[at / 8][at % 8] = small[i].c[at / 8][at % 8] =
          rm_float((random_bits() & 0x807fffffu) | (1 + random_bits() % 27) << 23);
  }
  wrong |= say("P2 ... and zeros against 0x7f7f and 0x0001 a sum of 2^-126 to 2^-100",
               differing(run(small), kept));
  std::vector<problem> turned = all, half = all, low = all;
  for (size_t i = 0; i < all.size(); i++)
    for (int k = 0; k < 16; k++) {
      const int to = (k * 7 + static_cast<int>(i)) % 16;
      for (int row = 0; row < 16; row++) turned[i].a[row][to] = all[i].a[row][k];
      for (int col = 0; col < 8; col++) turned[i].b[to][col] = all[i].b[k][col];
      for (int row = 0; k >= 8 && row < 16; row++)
        half[i].a[row][k] = 0, low[i].a[row][k - 8] = 0, low[i].a[row][k] = all[i].a[row][k - 8];
      for (int col = 0; k >= 8 && col < 8; col++) low[i].b[k][col] = all[i].b[k - 8][col];
    }
  say("P2 the place of a product among the 16 does not matter (not needed)",
      differing(run(turned), want), false);
  return wrong | say("P2 8 products and 8 zeros: which half holds which does not matter",
                     differing(run(half), run(low)), false);
}

struct wide_operands {
  problem *p;
  result *r;
  int *there;
};

// Returns whether this card has wgmma.
template <int N, bool A_IS_SHARED>
bool is_like(const wide_operands &o, const std::vector<result> &want) {
  int there = 1;
  std::vector<result> got(want.size());
  must(cudaMemcpy(o.there, &there, sizeof there, cudaMemcpyHostToDevice));
  wgmma_kernel<N, A_IS_SHARED><<<static_cast<unsigned>(want.size() / 4), 128>>>(o.p, o.r, o.there);
  must(cudaGetLastError());
  must(cudaMemcpy(&there, o.there, sizeof there, cudaMemcpyDeviceToHost));
  must(cudaMemcpy(got.data(), o.r, got.size() * sizeof *o.r, cudaMemcpyDeviceToHost));
  if (there < 0) return false;
  char line[90];
  snprintf(line, sizeof line, "P5 wgmma m64n%dk16, A from %s, gives the bits of mma.sync", N,
           A_IS_SHARED ? "shared memory" : "registers");
  say(line, differing(got, want) + !there, false);
  return true;
}

template <int N> bool is_like(const wide_operands &o, const std::vector<result> &want) {
  return is_like<N, false>(o, want) && is_like<N, true>(o, want);
}

void wide(const std::vector<problem> &all) {
  std::vector<problem> same_columns = all;
  for (size_t i = 0; i < all.size(); i++)
    memcpy(same_columns[i].b, all[i / 4 * 4].b, sizeof all[i].b);
  const std::vector<result> want = run(same_columns);
  wide_operands o = {};
  must(cudaMalloc(&o.p, all.size() * sizeof *o.p));
  must(cudaMalloc(&o.r, all.size() * sizeof *o.r));
  must(cudaMalloc(&o.there, sizeof *o.there));
  must(cudaMemcpy(o.p, same_columns.data(), all.size() * sizeof *o.p, cudaMemcpyHostToDevice));
  if (!(is_like<8>(o, want) && is_like<64>(o, want) && is_like<128>(o, want) &&
        is_like<256>(o, want)))
    printf("P5 no wgmma here\n");
  must(cudaFree(o.p));
  must(cudaFree(o.r));
  must(cudaFree(o.there));
}

uint64_t digest(const std::vector<result> &results) {
  uint64_t sum = 14695981039346656037u;
  for (const result &r : results)
    for (const auto &row : r.d)
      for (const float x : row) sum = (sum ^ rm_bits(rm_canon(x))) * 1099511628211u;
  return sum;
}

// One product, and the value added to it.
float one(uint16_t a, uint16_t b, float c) {
  problem p = {};
  p.a[0][0] = a, p.b[0][0] = b, p.c[0][0] = c;
  return run({p})[0].d[0][0];
}

void edges() {
  printf(
      "P4 -0·1 + +0 = %08x, -0·1 + -0 = %08x, inf·0 = %08x, NaN(0xffc1)·1 = %08x, max·2 = %08x\n",
      rm_bits(one(0x8000, 0x3f80, 0.0f)), rm_bits(one(0x8000, 0x3f80, -0.0f)),
      rm_bits(one(0x7f80, 0, 0.0f)), rm_bits(one(0xffc1, 0x3f80, 0.0f)),
      rm_bits(one(0x7f7f, 0x4000, 0.0f)));
  printf("P6 denormal operand kept: %s; accumulator kept: %s; result kept: %s\n",
         one(0x0001, 0x7f00, 0.0f) != 0.0f ? "yes" : "no",
         rm_bits(one(0, 0, rm_float(1))) == 1 ? "yes" : "no",
         rm_bits(one(0x0080, 0x3f00, 0.0f)) != 0 ? "yes" : "no");
}

void errors(const std::vector<problem> &all, const std::vector<result> &got, int kind) {
  double worst = 0.0;
  int64_t nearest = 0, n = 0;
  for (size_t i = static_cast<size_t>(kind); i < all.size(); i += KINDS)
    for (int at = 0; at < 128; at++) {
      const int row = at / 8, col = at % 8;
      double sum = static_cast<double>(all[i].c[row][col]), largest = fabs(sum);
      for (int k = 0; k < 16; k++) {
        const double product = static_cast<double>(rm_bf16_to_f32(all[i].a[row][k])) *
                               static_cast<double>(rm_bf16_to_f32(all[i].b[k][col]));
        sum += product;
        largest = fmax(largest, fabs(product));
      }
      const double d = static_cast<double>(got[i].d[row][col]);
      if (largest > 0.0 && std::isfinite(d)) worst = fmax(worst, fabs(d - sum) / largest * 0x1p23);
      nearest += d == static_cast<double>(static_cast<float>(sum));
      n++;
    }
  printf(
      "P7 kind %d: error up to %.3f · 2^-23 of the largest term; %.1f %% are the nearest float32\n",
      kind, worst, 100.0 * static_cast<double>(nearest) / static_cast<double>(n));
}

// [0]: 24 bits below 2^-126, tiny before rounding and after; [1]: rounds to 2^-126, and is tiny
// only before rounding. A quotient cannot be that near: [1] is the nearest one, half of the
// smallest denormal below 2^-126. A square root is tiny only for a denormal operand.
struct flushed {
  float fma[2], product[2], quotient[2], root[2];
};
__host__ __device__ void make_flushed(flushed *out, const volatile float *in) {
  for (int i = 0; i < 2; i++) {
    const float a = in[2 * i], b = in[2 * i + 1], x = in[4 + 2 * i], y = in[5 + 2 * i];
    out->fma[i] = fmaf(a, b, 0.0f);
    out->product[i] = a * b;
    out->quotient[i] = x / y;
    out->root[i] = sqrtf(in[8 + i]);
  }
}
__global__ void flush_kernel(flushed *out, const float *in) { make_flushed(out, in); }

void flushes() {
  const float operands[10] = {1.0f - 0x1p-24f,  0x1p-126f,
                              1.0f - 0x1p-13f,  (1.0f + 0x1p-13f) * 0x1p-126f,
                              1.0f - 0x1p-23f,  (1.0f - 0x1p-24f) * 0x1p126f,
                              1.0f - 0x1p-24f,  0x1p126f,
                              0x0.fffffep-126f, 0x1p-126f};
  float *in;
  flushed *out, here, card;
  must(cudaMalloc(&in, sizeof operands));
  must(cudaMalloc(&out, sizeof *out));
  must(cudaMemcpy(in, operands, sizeof operands, cudaMemcpyHostToDevice));
  const unsigned saved = _mm_getcsr();
  // Denormal results and operands become zero, as in the CPU's kernels.
  _mm_setcsr(saved | 0x8040);
  make_flushed(&here, operands);
  _mm_setcsr(saved);
  flush_kernel<<<1, 1>>>(out, in);
  must(cudaGetLastError());
  must(cudaMemcpy(&card, out, sizeof card, cudaMemcpyDeviceToHost));
  for (int i = 0; i < 2; i++)
    printf("P8 %s 2^-126, here | on the card: fma %08x | %08x, product %08x | %08x, quotient %08x "
           "| %08x, root %08x | %08x\n",
           i ? "rounded to" : "just below", rm_bits(here.fma[i]), rm_bits(card.fma[i]),
           rm_bits(here.product[i]), rm_bits(card.product[i]), rm_bits(here.quotient[i]),
           rm_bits(card.quotient[i]), rm_bits(here.root[i]), rm_bits(card.root[i]));
  must(cudaFree(in));
  must(cudaFree(out));
}

} // namespace

int main() {
  std::vector<problem> all;
  for (int i = 0; i < CASES; i++) all.push_back(random_problem(i % KINDS));
  const std::vector<result> want = run(all);
  int wrong = places(all, want);
  wrong |= zeros(all, want);
  printf("P3 digest of %d results: %016lx\n", CASES, static_cast<unsigned long>(digest(want)));
  edges();
  wide(all);
  for (int kind = 0; kind < KINDS; kind++) errors(all, want, kind);
  flushes();
  compare_model(8192, 3);
  return wrong;
}
