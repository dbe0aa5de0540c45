// wgmma.h: Hopper's product of 64 rows by a warpgroup, A from registers like mma.sync's, B from
// shared memory. Used by the programs that test on a card whether its bits are mma.sync's
// (probe_mma.cu) and what it would gain (bench_wgmma.cu).
#pragma once

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include <cuda_runtime.h>

// d ← A·B + d, only after rm_wgmma_arrive; the tensor core owns d and a until a wait that covers
// all groups since.
#define RM_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define RM_D16(i) RM_D4(i), RM_D4(i + 4), RM_D4(i + 8), RM_D4(i + 12)
__device__ inline void rm_wgmma(float (&d)[4], const uint4 &a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "%8, 1, 1, 1, 0;"
      : RM_D4(0)
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b)
      : "memory");
}
__device__ inline void rm_wgmma(float (&d)[64], const uint4 &a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
               "{%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
               : RM_D16(0), RM_D16(16), RM_D16(32), RM_D16(48)
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b)
               : "memory");
}
__device__ inline void rm_wgmma(float (&d)[96], const uint4 &a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 "
               "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "
               "{%96, %97, %98, %99}, %100, 1, 1, 1, 0;"
               : RM_D16(0), RM_D16(16), RM_D16(32), RM_D16(48), RM_D16(64), RM_D16(80)
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b)
               : "memory");
}
__device__ inline void rm_wgmma_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void rm_wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int LEFT> __device__ inline void rm_wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
#undef RM_D16
#undef RM_D4
#endif
