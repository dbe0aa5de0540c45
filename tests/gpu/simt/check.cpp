// check.cpp: properties of the kernels of kernels/cuda for tensor cores, and faulty kernels for the
// fibres of simt.h. tests/support/native/checkops compares the ops with the reference.
//
//   check mma_places | mma_company SEED | mma_model SEED
//       Prints "OK cases=… elements=…", or the first difference.
//   check barrier | left | mixed | mma | copies | matrices | matrices_between | unasked | shared |
//         shared_end | misaligned | buffer | unloaded | race | warp_race
//       Runs a faulty kernel, which the shim must report.
//
// On a GPU, with gpu.cu instead of simt.h's scheduler, it runs the same properties.
#include "check.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "mma.cuh"
#include "open_kernels.h"

static int64_t cases, elements;

bool same(const char *what, const void *got, const void *want, size_t bytes, int64_t count) {
  cases++;
  elements += count;
  if (memcmp(got, want, bytes) == 0) return true;
  size_t at = 0;
  while (static_cast<const char *>(got)[at] == static_cast<const char *>(want)[at]) at++;
  printf("DIFFERS %s at byte %zu of %zu\n", what, at, bytes);
  return false;
}

#ifdef RM_SIMT
// Kernels with one fault each.
static void odd_threads_wait() {
  if (threadIdx.x & 1) __syncthreads();
}
static void first_warp_stays() {
  __syncthreads();
  if (threadIdx.x < 32) __shfl_xor_sync(0xffffffffu, 1.0f, 16);
  if (threadIdx.x < 40) __syncthreads();
}
static void ballot_meets_shuffle() {
  if (threadIdx.x & 1) __ballot_sync(0xffffffffu, 1);
  else __shfl_sync(0xffffffffu, 1.0f, 0);
}
static void past_shared() {
  RM_SHARED(x);
  x[threadIdx.x + 1] = 1.0f;
}
static void past_shared_by_less() {
  RM_SHARED(x);
  if (threadIdx.x == 0) x[1] = 1.0f;
}
static void misaligned(float *y) { *reinterpret_cast<uint64_t *>(y + threadIdx.x) = 0; }
static void past_buffer(float *y) { y[threadIdx.x + 1] = 1.0f; }
static void missing_barrier(float *y) {
  RM_SHARED(x);
  x[threadIdx.x] = static_cast<float>(threadIdx.x);
  y[threadIdx.x] = x[threadIdx.x ^ 63];
}
static void missing_syncwarp(float *y) {
  RM_SHARED(x);
  x[threadIdx.x] = static_cast<float>(threadIdx.x);
  y[threadIdx.x] = x[threadIdx.x ^ 31];
}

static void forgotten_copy(const float *y) {
  RM_SHARED(x);
  rm_copy_async(x, y);
  rm_copies_commit();
}
static void mma_meets_shuffle() {
  float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (threadIdx.x & 1) rm_mma16(c, {0, 0, 0, 0}, {0, 0});
  else __shfl_sync(0xffffffffu, 1.0f, 0);
}

static void unloaded(float *y) {
  cudaStream_t stream;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  RM_LAUNCH(past_buffer, dim3(1), dim3(64), 0, stream, y);
}

static void matrices_of_memory(const float *y) { rm_load_matrices(y); }
static void matrices_between() {
  RM_SHARED(x);
  rm_load_matrices(x + threadIdx.x % 32);
}

static int faulty(const char *name) {
  const dim3 one(1), threads(64);
  const size_t bytes = 64 * sizeof(float);
  float *y = static_cast<float *>(simt_buffer(bytes)),
        *z = static_cast<float *>(simt_buffer(bytes));
  if (!strcmp(name, "barrier")) RM_LAUNCH(odd_threads_wait, one, threads, 0, nullptr);
  if (!strcmp(name, "left")) RM_LAUNCH(first_warp_stays, one, threads, 0, nullptr);
  if (!strcmp(name, "mixed")) RM_LAUNCH(ballot_meets_shuffle, one, threads, 0, nullptr);
  if (!strcmp(name, "mma")) RM_LAUNCH(mma_meets_shuffle, one, threads, 0, nullptr);
  if (!strcmp(name, "copies")) RM_LAUNCH(forgotten_copy, dim3(2), threads, bytes, nullptr, y);
  if (!strcmp(name, "matrices")) RM_LAUNCH(matrices_of_memory, one, threads, bytes, nullptr, y);
  if (!strcmp(name, "matrices_between")) RM_LAUNCH(matrices_between, one, threads, bytes, nullptr);
  if (!strcmp(name, "unasked"))
    RM_LAUNCH(missing_barrier, one, threads, size_t{64} << 10, nullptr, y);
  if (!strcmp(name, "shared")) RM_LAUNCH(past_shared, one, threads, bytes, nullptr);
  if (!strcmp(name, "shared_end"))
    RM_LAUNCH(past_shared_by_less, one, threads, sizeof(float), nullptr);
  if (!strcmp(name, "misaligned")) RM_LAUNCH(misaligned, one, threads, 0, nullptr, y);
  if (!strcmp(name, "buffer")) RM_LAUNCH(past_buffer, one, threads, 0, nullptr, y);
  if (!strcmp(name, "unloaded")) unloaded(y);
  if (strcmp(name, "race") != 0 && strcmp(name, "warp_race") != 0) return 2;
  const auto kernel = strcmp(name, "race") == 0 ? missing_barrier : missing_syncwarp;
  RM_ENQUEUE(kernel, one, threads, bytes, nullptr, y);
  simt_order(true);
  RM_ENQUEUE(kernel, one, threads, bytes, nullptr, z);
  return same("race", y, z, bytes, 64) ? 0 : 1;
}
#else
static int faulty(const char *) { return 2; }
#endif

int main(int argc, char **argv) {
  const bool is_places = argc > 1 && !strcmp(argv[1], "mma_places"),
             is_company = argc > 2 && !strcmp(argv[1], "mma_company"),
             is_model = argc > 2 && !strcmp(argv[1], "mma_model");
  if (argc < 2) return 2;
  if (!is_places && !is_company && !is_model) return faulty(argv[1]);
  if (!open_kernels()) return 1;
  const uint32_t saved = rm_fp_enter();
  const uint64_t seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : 0;
  const bool ok = is_places    ? check_mma_places()
                  : is_company ? check_mma_company(seed)
                               : check_mma_model(seed);
  rm_fp_leave(saved);
  if (ok) printf("OK cases=%ld elements=%ld\n", cases, elements);
  return ok ? 0 : 1;
}
