// checkops_cuda.cpp: the device of tests/support/native/checkops for the kernels of kernels/cuda, on
// the fibres of simt.h or, by gpu.cu, on a card. The reference of cuda_mma has that family's sums
// (mma_dot.c). The op chooses one of the tiles of gemm_mma.cuh; here each tile is a variant too.
#include "device.cuh"
#include "gemm_mma.cuh"
#include "native/checkops/device.h"
#include "open_kernels.h"
#include "rm_cuda.h"
#ifndef RM_SIMT
#include "gpu.h"
#endif

extern "C" const rm_kernels rm_table_ref, rm_table_ref_mma;

namespace {

template <int TILE, bool SWIGLU> void gemm_of_tile(const rm_ctx *ctx, const rm_gemm_args *a) {
  const rm_kernels *mma = rm_kernels_cuda_mma();
  if (a->dtype == RM_BF16 && rm_is_wide(a->x, a->ldx, a->k))
    rm_cuda_gemm_mma_tiles(ctx, a, SWIGLU, TILE);
  else (SWIGLU ? mma->gemm_swiglu : mma->gemm)(ctx, a);
}

template <int TILE> const rm_kernels *tile_table() {
  static rm_kernels table;
  table = *rm_kernels_cuda_mma();
  table.gemm = gemm_of_tile<TILE, false>, table.gemm_swiglu = gemm_of_tile<TILE, true>;
  return &table;
}

variant variant_of(const char *name, const rm_kernels *table, bool is_mma, const char *only) {
  variant v = {};
  v.name = name, v.table = table, v.only = only, v.is_mma = is_mma;
  v.reference = is_mma ? &rm_table_ref_mma : &rm_table_ref;
  return v;
}

} // namespace

extern "C" {

#ifdef RM_SIMT
const device check_device = {2, true, false};
#else
const device check_device = {2, true, true};
#endif

int device_variants(variant *out) {
  static_assert(RM_N_TILES == 4);
  int n = 0;
  out[n++] = variant_of("cuda_fma", rm_kernels_cuda(), false, nullptr);
  out[n++] = variant_of("cuda_mma", rm_kernels_cuda_mma(), true, nullptr);
  out[n++] = variant_of("cuda_mma_tile0", tile_table<0>(), true, "gemm");
  out[n++] = variant_of("cuda_mma_tile1", tile_table<1>(), true, "gemm");
  out[n++] = variant_of("cuda_mma_tile2", tile_table<2>(), true, "gemm");
  out[n++] = variant_of("cuda_mma_tile3", tile_table<3>(), true, "gemm");
  return n;
}

int device_open() {
  if (!open_kernels()) return 1;
#ifndef RM_SIMT
  gpu_choose_mma_oracle();
#endif
  return 0;
}
void device_close() {}

// A card chooses its order of the threads itself, in both runs.
const char *device_set(rm_ctx *ctx, int setting) {
  ctx->n_threads = 1;
  simt_order(setting == 1);
  return setting == 1 ? "threads in descending order" : "threads in ascending order";
}

void device_wait() { simt_finish(); }
void *device_memory(size_t bytes) { return simt_buffer(bytes); }
const char *device_summary() { return "with threads in both orders"; }
int device_measure(int, machine *) { return 1; }

} // extern "C"
