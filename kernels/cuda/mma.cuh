// mma.cuh: the tensor core instruction of the family cuda_mma, and asynchronous copies to shared
// memory.
//
// Weights are always A, 16 of their rows; tokens are always B, 8 of them, padded with zeros: yᵀ =
// W·xᵀ at every batch size, so results do not depend on the hardware being symmetric. A dot product
// over k is, for each split of RM_MMA_SPLIT, a chain of this instruction from +0 in ascending
// k; the sums of splits are added as IEEE float32 in ascending order. The hardware defines the
// instruction's sum of 16 products and an accumulator: exact products, aligned and truncated.
// Attention is K·qᵀ and Vᵀ·P, with the same roles of A and B.
//
// tests/gpu/simt/simt_mma.h implements all of it for a CPU, with a model of the sum.
#pragma once

#include "device.cuh"
#include "packing.cuh"

#ifdef RM_SIMT
#include <simt_mma.h> // tests/gpu/simt, by -I
#endif

// c ← A·B + c, called by a whole warp. Lane 4g + t holds rows g and g + 8 of A (rm_mma_a_place), k
// 2t, 2t + 1, 2t + 8 and 2t + 9 of column g of B, and columns 2t and 2t + 1 of rows g and g + 8 of
// c.
__device__ inline void rm_mma16(float (&c)[4], const uint4 &a, const uint2 &b) {
#ifdef RM_SIMT
  simt_mma16(c, a, b);
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y));
#endif
}

// Loads four 8 × 8 matrices of bf16 from shared memory, called by a whole warp. Lane 8j + r passes
// the address of row r of matrix j, 16 bytes; word j of lane l's result is word l % 4 of row l / 4
// of matrix j. So a matrix whose rows are tokens is a word of B.
__device__ inline uint4 rm_load_matrices(const void *shared_row) {
#ifdef RM_SIMT
  return simt_load_matrices(shared_row);
#else
  uint4 v;
  const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(shared_row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
#endif
}

// Transposes an 8 × 8 matrix of 16-bit elements, called by a whole warp. Before and after, lane l
// has columns 2(l % 4) and 2(l % 4) + 1 of row l / 4.
__device__ inline uint32_t rm_transposed(uint32_t pair) {
#ifdef RM_SIMT
  const int lane = rm_lane(), from = lane % 4 * 8 + lane / 8, half = lane / 4 % 2 * 16;
  const uint32_t even = __shfl_sync(RM_ALL_LANES, pair, from),
                 odd = __shfl_sync(RM_ALL_LANES, pair, from + 4);
  return (even >> half & 0xffffu) | (odd >> half & 0xffffu) << 16;
#else
  uint32_t turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
#endif
}

// rm_f32_to_bf16 of two numbers that are normal, zero or NaN, the first in the lower half. A NaN
// stays a NaN, but its bits are not defined.
__device__ inline uint32_t rm_bf16_pair(float low, float high) {
#ifdef RM_SIMT
  return rm_f32_to_bf16(low) | static_cast<uint32_t>(rm_f32_to_bf16(high)) << 16;
#else
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}

// Loads weights that are read once, without the L1 cache.
__device__ inline uint4 rm_load_stream(const uint4 *p) {
#ifdef RM_SIMT
  return *p;
#else
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
#endif
}

// Copies 16 bytes from global to shared memory, both aligned to 16. If `there` is false, writes
// zeros and does not read `from`. The copy is complete for the calling thread once rm_copies_wait
// returns for its group. It has no branch, so that the compiler can mix it with other instructions.
__device__ inline void rm_copy_async(void *to_shared, const void *from, bool there = true) {
#ifdef RM_SIMT
  simt_copy_async(to_shared, from, there);
#else
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(to_shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
#endif
}
__device__ inline void rm_copies_commit() {
#ifdef RM_SIMT
  simt_copies_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until all but the last LEFT groups of the calling thread are complete.
template <int LEFT> __device__ inline void rm_copies_wait() {
#ifdef RM_SIMT
  simt_copies_wait(LEFT);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}

// A row of tiles of the packed matrix that begins at element `first`.
__device__ inline const uint4 *rm_mma_row(const void *w, int64_t first, int64_t tile_row,
                                          int64_t k) {
  return reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(w) + first) +
         tile_row * rm_mma_steps(k) * RM_WARP;
}

// Rows of bf16 that become B: x[row][k], with zeros for rows from `end` on and for k from `k` on.
struct rm_tokens {
  const uint16_t *x;
  int64_t ldx, k, row0, end;
  bool wide; // rm_is_wide
};

// Whether every row of x may be read 16 bytes at a time, up to k.
RM_INLINE bool rm_is_wide(const void *x, int64_t ldx, int64_t k) {
  return (ldx | k) % 8 == 0 && reinterpret_cast<uintptr_t>(x) % sizeof(uint4) == 0;
}

__device__ inline rm_tokens rm_tokens_of(const void *x, int64_t ldx, int64_t k, int64_t row0,
                                         int64_t end) {
  return {static_cast<const uint16_t *>(x), ldx, k, row0, end, rm_is_wide(x, ldx, k)};
}

// Loads k … k + 7 of row row0 + r.
__device__ inline uint4 rm_load_tokens(const rm_tokens &t, int r, int64_t k) {
  const int64_t row = t.row0 + r;
  if (row >= t.end) return {0, 0, 0, 0};
  const uint16_t *from = t.x + row * t.ldx + k;
  if (t.wide && k < t.k) return *reinterpret_cast<const uint4 *>(from);
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t even = k + 2 * i < t.k ? from[2 * i] : 0u,
                   odd = k + 2 * i + 1 < t.k ? from[2 * i + 1] : 0u;
    words[i] = even | odd << 16;
  }
  return {words[0], words[1], words[2], words[3]};
}
