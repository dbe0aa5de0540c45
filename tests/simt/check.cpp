// check.cpp: the kernels of kernels/cuda on the fibres of simt.h against the reference table, bit for bit.
//   check gemm | attention SEED     every shape in both thread orders; prints "OK cases=… elements=…", or the first difference
// On a GPU, with gpu.cu in the place of simt.h's scheduler, the first two are the same test.
//   check barrier | left | shared | buffer | race     a faulty kernel: what the shim must say of it
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "device.cuh"
#include "rm_cuda.h"
#ifndef RM_SIMT
#include "gpu.h"
#endif

extern "C" const rm_kernels rm_table_ref;

namespace {

uint64_t state;
int64_t cases, elements;

uint32_t random_bits() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 33) ^ static_cast<uint32_t>(state >> 13);
}
int64_t pick(int64_t n) { return static_cast<int64_t>(random_bits() % static_cast<uint32_t>(n)); }

// Mostly near 1; some ±0, denormals, and magnitudes that cancel.
float number() {
  const int64_t kind = pick(32);
  const float unit = static_cast<float>(static_cast<int32_t>(random_bits())) * 0x1p-31f;
  if (kind == 0) return rm_float(random_bits() & 0x80000000u);
  if (kind == 1) return rm_float(random_bits() & 0x807fffffu);
  if (kind == 2) return ldexpf(unit, static_cast<int>(pick(40)) - 20);
  return unit;
}

void *numbers(rm_dtype dtype, int64_t n) {
  char *p = static_cast<char *>(simt_buffer(static_cast<size_t>(n) * rm_dtype_bytes(dtype)));
  for (int64_t i = 0; i < n; i++) {
    const uint32_t u = rm_bits(number());
    if (dtype == RM_BF16) reinterpret_cast<uint16_t *>(p)[i] = static_cast<uint16_t>(u >> 16);
    else reinterpret_cast<uint32_t *>(p)[i] = u;
  }
  return p;
}

// Both outputs are filled with 0xff first, so what an op must not write is compared too.
bool same(const char *what, const void *got, const void *want, size_t bytes, int64_t count) {
  cases++;
  elements += count;
  if (memcmp(got, want, bytes) == 0) return true;
  size_t at = 0;
  while (static_cast<const char *>(got)[at] == static_cast<const char *>(want)[at]) at++;
  printf("DIFFERS %s at byte %zu of %zu\n", what, at, bytes);
  return false;
}

bool gemm_case(rm_dtype dtype, rm_dtype y_dtype, int64_t m, int64_t n, int64_t k, int64_t groups) {
  const int64_t ldx = k + pick(3), ldy = n + pick(3), stride = rm_packed_elems(n, k);
  const size_t bytes = static_cast<size_t>(m * ldy) * rm_dtype_bytes(y_dtype);
  int32_t *group_rows = static_cast<int32_t *>(simt_buffer(static_cast<size_t>(groups + 1) * 4));
  for (int64_t g = 0; g <= groups; g++)
    group_rows[g] = g == groups ? static_cast<int32_t>(m) : g == 0 ? 0 : static_cast<int32_t>(m * g * g / (groups * groups));
  rm_gemm_args a = {};
  a.x = numbers(dtype, m * ldx);
  a.w = numbers(dtype, stride * rm_max64(groups, 1));
  a.bias = !groups && pick(2) ? numbers(dtype, n) : nullptr;
  a.group_rows = groups ? group_rows : nullptr;
  a.n_groups = groups, a.group_stride = stride, a.m = m, a.n = n, a.k = k, a.ldx = ldx, a.ldy = ldy, a.dtype = dtype, a.y_dtype = y_dtype;
  rm_ctx ctx = {};
  void *want = a.y = simt_buffer(bytes);
  rm_table_ref.gemm(&ctx, &a);
  char what[120];
  snprintf(what, sizeof what, "gemm dtype=%d y=%d m=%ld n=%ld k=%ld groups=%ld bias=%d", dtype, y_dtype, m, n, k, groups,
           a.bias != nullptr);
  for (int order = 0; order < 2; order++) {
    a.y = simt_buffer(bytes);
    simt_order(order);
    rm_kernels_cuda()->gemm(&ctx, &a);
    simt_finish();
    if (!same(what, a.y, want, bytes, m * n)) return false;
  }
  return true;
}

bool gemms() {
  const int64_t sizes[][3] = {{0, 16, 32},  {1, 1, 1},    {1, 16, 32}, {1, 64, 96},    {3, 17, 31},   {4, 15, 33},   {5, 63, 64},
                              {15, 64, 65}, {16, 65, 32}, {17, 80, 7}, {31, 127, 128}, {33, 128, 34}, {1, 131, 200}, {16, 16, 0}};
  for (int dtype = 0; dtype < 2; dtype++)
    for (const auto &s : sizes)
      for (int64_t groups = 0; groups < 4; groups += 3) {
        if (!gemm_case(static_cast<rm_dtype>(dtype), static_cast<rm_dtype>(dtype), s[0], s[1], s[2], groups)) return false;
        if (!gemm_case(static_cast<rm_dtype>(dtype), RM_F32, s[0], s[1], s[2], groups)) return false;
      }
  return true;
}

struct heads_of {  // query heads, kv heads, and of a rank's part the model's group and where in it the part begins
  int64_t n, n_kv, group, head0;
};

bool attention_case(rm_dtype dtype, int64_t context, int64_t head_dim, heads_of h, int64_t page_size, int64_t window) {
  const int64_t rows = 3, n_seqs = 2, max_pages = (context + page_size - 1) / page_size, n_pages = n_seqs * max_pages;
  const int64_t n_out = rows * h.n * head_dim;
  const size_t bytes = static_cast<size_t>(n_out) * rm_dtype_bytes(dtype);
  int32_t *positions = static_cast<int32_t *>(simt_buffer(rows * 4)), *seqs = static_cast<int32_t *>(simt_buffer(rows * 4));
  int32_t *tables = static_cast<int32_t *>(simt_buffer(static_cast<size_t>(n_pages) * 4));
  const int64_t last[] = {context - 1, context / 2, 0};
  for (int64_t r = 0; r < rows; r++) positions[r] = static_cast<int32_t>(last[r]), seqs[r] = static_cast<int32_t>(r % n_seqs);
  for (int64_t i = 0; i < n_pages; i++) tables[i] = static_cast<int32_t>(n_pages - 1 - i);
  rm_attention_args a = {};
  a.q = numbers(dtype, n_out);
  a.k_cache = numbers(dtype, n_pages * h.n_kv * rm_k_page_elems(page_size, head_dim));
  a.v_cache = numbers(dtype, n_pages * h.n_kv * rm_v_page_elems(page_size, head_dim));
  a.positions = positions, a.seq_of_row = seqs, a.block_tables = tables, a.rows = rows, a.n_seqs = n_seqs, a.max_pages = max_pages;
  a.n_heads = h.n, a.n_kv_heads = h.n_kv, a.group = h.group, a.head0 = h.head0, a.head_dim = head_dim, a.page_size = page_size,
  a.window = window, a.dtype = dtype;
  a.scale = 1.0f / sqrtf(static_cast<float>(head_dim));
  rm_limits limits = {};
  limits.max_rows = 2, limits.n_heads = h.n, limits.n_kv_heads = h.n_kv, limits.group = h.group, limits.head_dim = head_dim,
  limits.max_positions = context;
  rm_ctx ctx = {};
  ctx.workspace_bytes = static_cast<size_t>(rm_max64(1 << 12, 2 * head_dim * 4));
  ctx.workspace = simt_buffer(ctx.workspace_bytes);
  void *want = a.out = simt_buffer(bytes);
  rm_table_ref.attention(&ctx, &a);
  ctx.workspace_bytes = rm_kernels_cuda()->workspace_bytes(&limits);  // of two rows: the third takes its turn
  char what[120];
  snprintf(what, sizeof what, "attention dtype=%d context=%ld head_dim=%ld heads=%ld/%ld group=%ld head0=%ld page=%ld window=%ld", dtype,
           context, head_dim, h.n, h.n_kv, h.group, h.head0, page_size, window);
  for (int order = 0; order < 2; order++) {
    ctx.workspace = simt_buffer(ctx.workspace_bytes);
    a.out = simt_buffer(bytes);
    simt_order(order);
    rm_kernels_cuda()->attention(&ctx, &a);
    simt_finish();
    if (!same(what, a.out, want, bytes, n_out)) return false;
  }
  return true;
}

bool attentions() {
  const int64_t contexts[] = {1, 2, 31, 32, 33, 65, 1023, 1024, 1025, 2080}, windows[] = {0, 1, 40, 1030};
  int turn = 0;
  for (int dtype = 0; dtype < 2; dtype++)
    for (const int64_t context : contexts)
      for (const int64_t window : windows) {
        const int64_t dims[] = {32, 128, 16, 80, 160}, pages[] = {16, 32, 48};
        const heads_of heads[] = {{2, 1, 0, 0}, {1, 1, 0, 0}, {3, 3, 0, 0}, {4, 3, 2, 1}, {2, 1, 7, 5}, {3, 2, 4, 3}};
        const heads_of &h = heads[context > 1000 ? 1 + 3 * (turn % 2) : turn % 6];
        if (!attention_case(static_cast<rm_dtype>(dtype), context, dims[turn % 5], h, pages[turn % 3], window)) return false;
        turn++;
      }
  return true;
}

#ifdef RM_SIMT
// Kernels with one fault each.
void odd_threads_wait() {
  if (threadIdx.x & 1) __syncthreads();
}
void first_warp_stays() {
  __syncthreads();
  if (threadIdx.x < 32) __shfl_xor_sync(0xffffffffu, 1.0f, 16);
  if (threadIdx.x < 40) __syncthreads();
}
void past_shared() {
  RM_SHARED(x);
  x[threadIdx.x + 1] = 1.0f;
}
void past_buffer(float *y) { y[threadIdx.x + 1] = 1.0f; }
void missing_barrier(float *y) {
  RM_SHARED(x);
  x[threadIdx.x] = static_cast<float>(threadIdx.x);
  y[threadIdx.x] = x[threadIdx.x ^ 63];
}

int faulty(const char *name) {
  const dim3 one(1), threads(64);
  const size_t bytes = 64 * sizeof(float);
  float *y = static_cast<float *>(simt_buffer(bytes)), *z = static_cast<float *>(simt_buffer(bytes));
  if (!strcmp(name, "barrier")) RM_LAUNCH(odd_threads_wait, one, threads, 0, nullptr);
  if (!strcmp(name, "left")) RM_LAUNCH(first_warp_stays, one, threads, 0, nullptr);
  if (!strcmp(name, "shared")) RM_LAUNCH(past_shared, one, threads, bytes, nullptr);
  if (!strcmp(name, "buffer")) RM_LAUNCH(past_buffer, one, threads, 0, nullptr, y);
  if (strcmp(name, "race") != 0) return 2;
  RM_LAUNCH(missing_barrier, one, threads, bytes, nullptr, y);
  simt_order(true);
  RM_LAUNCH(missing_barrier, one, threads, bytes, nullptr, z);
  return same("race", y, z, bytes, 64) ? 0 : 1;
}
#else
int faulty(const char *) { return 2; }
#endif

}  // namespace

int main(int argc, char **argv) {
  if (argc < 2) return 2;
  state = argc > 2 ? strtoull(argv[2], nullptr, 10) : 1;
  const bool is_gemm = !strcmp(argv[1], "gemm");
  if (!is_gemm && strcmp(argv[1], "attention") != 0) return faulty(argv[1]);
  const uint32_t saved = rm_fp_enter();
  const bool ok = is_gemm ? gemms() : attentions();
  rm_fp_leave(saved);
  if (ok) printf("OK cases=%ld elements=%ld\n", cases, elements);
  return ok ? 0 : 1;
}
