// wgmma.h: Hopper's product of 64 rows by a warpgroup, A from registers like mma.sync's or from
// shared memory, B from shared memory. Used by the programs that test on a card whether its bits
// are mma.sync's (probe_mma.cu) and what it would gain (bench_wgmma.cu).
#pragma once

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include <cuda_runtime.h>

#define RM_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define RM_D32(i) \
  RM_D4(i), RM_D4(i + 4), RM_D4(i + 8), RM_D4(i + 12), RM_D4(i + 16), RM_D4(i + 20), \
      RM_D4(i + 24), RM_D4(i + 28)
#define RM_SUMS_4 RM_D4(0)
#define RM_SUMS_32 RM_D32(0)
#define RM_SUMS_64 RM_SUMS_32, RM_D32(32)
#define RM_SUMS_96 RM_SUMS_64, RM_D32(64)
#define RM_SUMS_128 RM_SUMS_96, RM_D32(96)
#define RM_NAMES_4 "%0, %1, %2, %3"
#define RM_NAMES_32 \
  RM_NAMES_4 ", %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
             "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define RM_NAMES_64 \
  RM_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
              "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define RM_NAMES_96 \
  RM_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
              "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define RM_NAMES_128 \
  RM_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, " \
              "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, " \
              "%123, %124, %125, %126, %127"

// d ← A·B + d, only after rm_wgmma_arrive; the tensor core owns d and a until a wait that covers
// all groups since. A is four registers, or a descriptor of 64 rows in shared memory, like B's of N
// columns. The numbers after N are those of the operands that follow the sums.
#define RM_WGMMA(SUMS, N, I0, I1, I2, I3, I4) \
  __device__ inline void rm_wgmma(float (&d)[SUMS], const uint4 &a, uint64_t b) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" RM_NAMES_##SUMS \
                 "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", 1, 1, 1, 0;" \
                 : RM_SUMS_##SUMS \
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b) \
                 : "memory"); \
  } \
  __device__ inline void rm_wgmma(float (&d)[SUMS], uint64_t a, uint64_t b) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" RM_NAMES_##SUMS \
                 "}, %" #I0 ", %" #I1 ", 1, 1, 1, 0, 0;" \
                 : RM_SUMS_##SUMS \
                 : "l"(a), "l"(b) \
                 : "memory"); \
  }
RM_WGMMA(4, 8, 4, 5, 6, 7, 8)
RM_WGMMA(32, 64, 32, 33, 34, 35, 36)
RM_WGMMA(64, 128, 64, 65, 66, 67, 68)
RM_WGMMA(96, 192, 96, 97, 98, 99, 100)
RM_WGMMA(128, 256, 128, 129, 130, 131, 132)
#undef RM_WGMMA

__device__ inline void rm_wgmma_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void rm_wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int LEFT> __device__ inline void rm_wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
#endif
