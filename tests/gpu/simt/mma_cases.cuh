// mma_cases.cuh: random operands of mma.m16n8k16 and its results on a card, beside the results of
// the model (mma_model.h).
#pragma once

#include "mma.cuh"
#include "mma_model.h"
#include "random_bits.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <vector>

namespace {

// The first KINDS are for questions about the instruction alone, all for a comparison with the
// model.
constexpr int KINDS = 6, MODEL_KINDS = 13, OUTPUTS = 128;

struct problem {
  uint16_t a[16][16], b[16][8]; // [row][k], [k][col]
  float c[16][8];
};
struct result {
  float d[16][8];
};

void must(cudaError_t error) {
  if (error == cudaSuccess) return;
  printf("CUDA: %s\n", cudaGetErrorString(error));
  exit(4);
}

__device__ uint32_t pair_of(uint16_t even, uint16_t odd) {
  return even | static_cast<uint32_t>(odd) << 16;
}

__device__ uint4 load_a(const uint16_t (*a)[16], int lane) {
  const int g = lane / 4, t = lane % 4 * 2;
  return {pair_of(a[g][t], a[g][t + 1]), pair_of(a[g + 8][t], a[g + 8][t + 1]),
          pair_of(a[g][t + 8], a[g][t + 9]), pair_of(a[g + 8][t + 8], a[g + 8][t + 9])};
}

__global__ void mma_kernel(const problem *problems, result *results) {
  const problem &p = problems[blockIdx.x];
  const int lane = static_cast<int>(threadIdx.x), g = lane / 4, t = lane % 4 * 2;
  float c[4];
  for (int i = 0; i < 4; i++) c[i] = p.c[g + i / 2 * 8][t + i % 2];
  rm_mma16(c, load_a(p.a, lane),
           {pair_of(p.b[t][g], p.b[t + 1][g]), pair_of(p.b[t + 8][g], p.b[t + 9][g])});
  for (int i = 0; i < 4; i++) results[blockIdx.x].d[g + i / 2 * 8][t + i % 2] = c[i];
}

std::vector<result> run(const std::vector<problem> &problems) {
  problem *p;
  result *r;
  std::vector<result> results(problems.size());
  must(cudaMalloc(&p, problems.size() * sizeof *p));
  must(cudaMalloc(&r, problems.size() * sizeof *r));
  must(cudaMemcpy(p, problems.data(), problems.size() * sizeof *p, cudaMemcpyHostToDevice));
  mma_kernel<<<static_cast<unsigned>(problems.size()), 32>>>(p, r);
  must(cudaGetLastError());
  must(cudaMemcpy(results.data(), r, problems.size() * sizeof *r, cudaMemcpyDeviceToHost));
  must(cudaFree(p));
  must(cudaFree(r));
  return results;
}

// Random sign and fraction; exponents of the first kinds: near 1, far apart, huge, denormal, mixed
// with zeros, or all equal.
uint16_t number(int kind) {
  const uint32_t sign = random_bits() & 0x8000u, fraction = random_bits() & 0x7fu;
  const uint32_t exponent = kind == 1   ? 100 + random_bits() % 56
                            : kind == 2 ? 180 + random_bits() % 10
                            : kind == 3 ? random_bits() % 2 * (random_bits() % 140)
                            : kind == 4 ? random_bits() % 3 * 60
                            : kind == 5 ? 127
                                        : 124 + random_bits() % 4;
  return static_cast<uint16_t>(kind == 4 && exponent == 0 ? sign : sign | exponent << 7 | fraction);
}

// The second eight products nearly cancel the first eight.
void cancel(problem *p) {
  for (auto &row : p->a)
    for (int k = 0; k < 8; k++)
      row[k + 8] = static_cast<uint16_t>(row[k] ^ 0x8000u ^ (random_bits() % 8 == 0));
  for (int k = 0; k < 8; k++) memcpy(p->b[k + 8], p->b[k], sizeof p->b[k]);
}

problem random_problem(int kind) {
  problem p;
  for (auto &row : p.a)
    for (uint16_t &x : row) x = number(kind);
  for (auto &row : p.b)
    for (uint16_t &x : row) x = number(kind == 2 ? 0 : kind);
  for (auto &row : p.c)
    for (float &x : row)
      x = rm_bf16_to_f32(number(kind)) * (random_bits() % 2 ? 1.0f : 0x1.234568p0f);
  if (kind == 5) cancel(&p);
  return p;
}

void operands_of(const problem &p, int at, uint16_t *a, uint16_t *b) {
  for (int k = 0; k < 16; k++) a[k] = p.a[at / 8][k], b[k] = p.b[k][at % 8];
}

float model_of(const problem &p, int at) {
  uint16_t a[16], b[16];
  operands_of(p, at, a, b);
  return mma_model(p.c[at / 8][at % 8], a, b);
}

// A number with one of `n` exponents from `from` on, which may be denormal.
uint16_t between(uint32_t from, uint32_t n) {
  return static_cast<uint16_t>((random_bits() & 0x807fu) | (from + random_bits() % n) << 7);
}

uint16_t hard_number(int kind) {
  const uint32_t chance = random_bits();
  switch (kind) {
    case 6: return between(0, 190); // any that overflow rarely
    case 7: return chance % 4 ? between(40, 26) : between(0, 2); // products and sums are denormal
    case 8: return between(120, 12); // the accumulator cancels the products
    case 9: return chance % 2 ? between(64, 128) : static_cast<uint16_t>(chance >> 16 & 0x8000u);
    case 10: // infinities and NaNs
      return chance % 64     ? between(120, 12)
             : chance & 1024 ? static_cast<uint16_t>(0x7f80u | (chance >> 16 & 0x8000u))
                             : static_cast<uint16_t>(0x7fc1u | (chance >> 16 & 0x8000u));
    case 11: return between(184, 10); // products on both sides of 2^128
    default: return between(126, 3); // the accumulator is up to 2^32 times as large
  }
}

float hard_sum(int kind) {
  const uint32_t bits = random_bits() & 0x807fffffu, chance = random_bits();
  const auto with = [&](uint32_t from, uint32_t n) {
    return rm_float(bits | (from + random_bits() % n) << 23);
  };
  switch (kind) {
    case 6: return with(0, 255);
    case 7: return chance % 4 ? 0.0f : with(0, 5);
    case 9: return chance % 4 ? with(64, 128) : chance % 8 ? 0.0f : -0.0f;
    case 10: return chance % 64 ? with(120, 12) : rm_float((bits & 0x80000000u) | 0x7f800000u);
    case 11: return with(235, 20);
    default: return with(127, 34);
  }
}

// Makes a problem of any kind; the accumulators of the first kinds get random bits as well.
problem model_problem(int kind) {
  if (kind < KINDS) {
    problem p = random_problem(kind);
    for (auto &row : p.c)
      for (float &x : row) x = rm_float(rm_bits(x) ^ (random_bits() & 0xffffu));
    return p;
  }
  problem p;
  for (auto &row : p.a)
    for (uint16_t &x : row) x = hard_number(kind);
  for (auto &row : p.b)
    for (uint16_t &x : row) x = hard_number(kind);
  if (kind == 11 && random_bits() % 2) cancel(&p);
  for (auto &row : p.c)
    for (float &x : row) x = kind == 8 ? 0.0f : hard_sum(kind);
  for (int at = 0; kind == 8 && at < OUTPUTS; at++)
    p.c[at / 8][at % 8] = rm_float((rm_bits(-model_of(p, at))) ^ (random_bits() % 4 ? 0 : 1));
  return p;
}

// How many results of a card and of the model differ; NaNs do not differ from each other.
struct comparison {
  int64_t cases, differ, zeros; // zeros: outputs that differ in the sign of a zero only
};

// Prints the first `most` differences of each kind: c, 16 a, 16 b and both results.
comparison compare_model(int64_t problems, int most) {
  std::vector<problem> all;
  for (int64_t i = 0; i < problems; i++)
    all.push_back(model_problem(static_cast<int>(i % MODEL_KINDS)));
  const std::vector<result> got = run(all);
  comparison found = {};
  int printed[MODEL_KINDS] = {};
  for (size_t i = 0; i < all.size(); i++)
    for (int at = 0; at < OUTPUTS; at++) {
      const float card = got[i].d[at / 8][at % 8], model = model_of(all[i], at);
      found.cases++;
      if (rm_bits(card) == rm_bits(model) || (rm_is_nan(card) && rm_is_nan(model))) continue;
      if (card == 0.0f && model == 0.0f && !(rm_bits(card) << 1 | rm_bits(model) << 1)) {
        found.zeros++;
        continue;
      }
      found.differ++;
      const int kind = static_cast<int>(i % MODEL_KINDS);
      if (printed[kind]++ >= most) continue;
      uint16_t a[16], b[16];
      operands_of(all[i], at, a, b);
      printf("P9 kind %d c=%08x a=", kind, rm_bits(all[i].c[at / 8][at % 8]));
      for (const uint16_t x : a) printf("%04x ", x);
      printf("b=");
      for (const uint16_t x : b) printf("%04x ", x);
      printf("card=%08x model=%08x\n", rm_bits(card), rm_bits(model));
    }
  for (int kind = 0; most && kind < MODEL_KINDS; kind++)
    if (printed[kind]) printf("P9 kind %d: %d differ\n", kind, printed[kind]);
  printf("P9 model = card: %ld of %ld differ", static_cast<long>(found.differ),
         static_cast<long>(found.cases));
  printf(found.zeros ? ", and %ld in the sign of a zero\n" : "\n", static_cast<long>(found.zeros));
  return found;
}

} // namespace
