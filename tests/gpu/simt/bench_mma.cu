// bench_mma.cu: the rates of a table's ops on this card, one op at a time: GB/s of weights or of
// keys and values for few rows, TFLOP/s for many, beside the rate of a kernel that only reads.
//   bench_mma [mma | fma] [NAME]   the rates of the ops whose line contains NAME, for a profiler
//   bench_mma read     only the rate of the reading kernel, GB/s
#include "open_kernels.h"
#include "rm_cuda.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <functional>
#include <vector>

namespace {

constexpr int TIMES = 30;
// The matrices rotate, so that the cache holds none of them.
constexpr size_t BEYOND_L2 = size_t{512} << 20;

void must(cudaError_t error) {
  if (error == cudaSuccess) return;
  printf("CUDA: %s\n", cudaGetErrorString(error));
  exit(4);
}

// Numbers between 1 and 2 with either sign, times a power of two that keeps sums small.
__global__ void fill_kernel(uint16_t *p, size_t n, uint16_t exponent) {
  for (size_t i = blockIdx.x * size_t{256} + threadIdx.x; i < n; i += gridDim.x * size_t{256}) {
    const uint32_t bits = static_cast<uint32_t>(i * 2654435761u >> 7) * 2246822519u >> 16;
    p[i] = static_cast<uint16_t>((bits & 0x807fu) | exponent << 7);
  }
}

__global__ void read_kernel(const uint4 *p, size_t n, unsigned *out) {
  unsigned sum = 0;
  for (size_t i = blockIdx.x * size_t{256} + threadIdx.x; i < n; i += gridDim.x * size_t{256})
    sum ^= p[i].x ^ p[i].y ^ p[i].z ^ p[i].w;
  if (sum == 0x12345678u) *out = sum;
}

uint16_t *numbers(size_t n, uint16_t exponent = 120) {
  uint16_t *p;
  must(cudaMalloc(&p, n * sizeof *p));
  fill_kernel<<<4096, 256>>>(p, n, exponent);
  must(cudaGetLastError());
  return p;
}

template <class T> T *put(const std::vector<T> &values) {
  T *p;
  must(cudaMalloc(&p, values.size() * sizeof *p));
  must(cudaMemcpy(p, values.data(), values.size() * sizeof *p, cudaMemcpyHostToDevice));
  return p;
}

// Milliseconds of one call; `call` gets its number.
double time_of(cudaStream_t stream, const std::function<void(int)> &call) {
  cudaEvent_t from, to;
  must(cudaEventCreate(&from));
  must(cudaEventCreate(&to));
  must(cudaDeviceSynchronize()); // operands are filled on another stream
  for (int i = 0; i < 3; i++) call(i);
  must(cudaEventRecord(from, stream));
  for (int i = 0; i < TIMES; i++) call(i);
  must(cudaEventRecord(to, stream));
  must(cudaEventSynchronize(to));
  float ms = 0.0f;
  must(cudaEventElapsedTime(&ms, from, to));
  must(cudaEventDestroy(from));
  must(cudaEventDestroy(to));
  return static_cast<double>(ms) / TIMES;
}

struct bench {
  const rm_kernels *table;
  rm_ctx ctx;
  double limit; // GB/s
  const char *only; // part of the names of the ops to run

  bool runs(const char *what) const { return strstr(what, only) != nullptr; }
  void say(const char *what, double ms, double bytes, double flops) const {
    const double rate = bytes / ms * 1e-6;
    printf("%-58s %9.1f us %8.0f GB/s %5.1f %% of reading %8.1f TFLOP/s\n", what, ms * 1e3, rate,
           100.0 * rate / limit, flops / ms * 1e-9);
    fflush(stdout);
  }
};

double reading(cudaStream_t stream) {
  const size_t bytes = size_t{4} << 30;
  uint16_t *p = numbers(bytes / 2);
  const double ms = time_of(stream, [&](int) {
    read_kernel<<<132 * 16, 256, 0, stream>>>(reinterpret_cast<uint4 *>(p), bytes / 16,
                                              reinterpret_cast<unsigned *>(p));
  });
  must(cudaFree(p));
  return static_cast<double>(bytes) / ms * 1e-6;
}

// groups: experts; each row goes to top_k of them.
void gemm(const bench &b, const char *name, int64_t m, int64_t n, int64_t k, bool swiglu,
          int64_t groups = 0) {
  char what[100];
  snprintf(what, sizeof what, "%s rows=%ld n=%ld k=%ld groups=%ld", name, static_cast<long>(m),
           static_cast<long>(n), static_cast<long>(k), static_cast<long>(groups));
  if (!b.runs(what)) return;
  const int64_t stride = rm_packed_elems(swiglu ? rm_gate_up_rows(n) : n, k),
                all = stride * rm_max64(1, groups);
  const int64_t copies = rm_max64(1, static_cast<int64_t>(BEYOND_L2 / 2) / all);
  uint16_t *w = numbers(static_cast<size_t>(all * copies)),
           *x = numbers(static_cast<size_t>(m * k)), *y = numbers(static_cast<size_t>(m * n));
  std::vector<int32_t> rows; // every group has one row while rows last: the first m
  for (int64_t g = 0; g <= groups; g++)
    rows.push_back(
        static_cast<int32_t>(m >= groups ? m * g / rm_max64(1, groups) : rm_min64(g, m)));
  int32_t *group_rows = put(rows);
  rm_gemm_args a = {};
  a.y = y, a.x = x, a.m = m, a.n = n, a.k = k, a.ldx = k, a.ldy = n, a.dtype = a.y_dtype = RM_BF16;
  a.group_rows = groups ? group_rows : nullptr, a.n_groups = groups, a.group_stride = stride;
  const double ms = time_of(static_cast<cudaStream_t>(b.ctx.stream), [&](int i) {
    a.w = w + i % copies * all;
    (swiglu ? b.table->gemm_swiglu : b.table->gemm)(&b.ctx, &a);
  });
  const double read = static_cast<double>(stride * (groups ? rm_min64(groups, m) : 1)) * 2.0;
  b.say(what, ms, read, 2.0 * static_cast<double>(m * n * k) * (swiglu ? 2.0 : 1.0));
  must(cudaFree(w)), must(cudaFree(x)), must(cudaFree(y)), must(cudaFree(group_rows));
}

void lm_head(const bench &b, int64_t rows, int64_t vocab, int64_t hidden) {
  char what[100];
  snprintf(what, sizeof what, "lm_head rows=%ld vocab=%ld hidden=%ld", static_cast<long>(rows),
           static_cast<long>(vocab), static_cast<long>(hidden));
  if (!b.runs(what)) return;
  const size_t elems = static_cast<size_t>(rm_packed_elems(vocab, hidden));
  uint16_t *w = numbers(elems), *x = numbers(static_cast<size_t>(rows * hidden)),
           *out = numbers(static_cast<size_t>(rows) * 8);
  uint16_t *logits = numbers(static_cast<size_t>(rows * vocab) * 2);
  rm_lm_head_args a = {};
  a.logits = reinterpret_cast<float *>(logits), a.stats = reinterpret_cast<float *>(out),
  a.row_flags = reinterpret_cast<uint8_t *>(out + rows * 4);
  a.x = x, a.w = w, a.rows = rows, a.vocab = vocab, a.hidden = a.ldx = hidden, a.ld_logits = vocab,
  a.dtype = RM_BF16;
  const double ms =
      time_of(static_cast<cudaStream_t>(b.ctx.stream), [&](int) { b.table->lm_head(&b.ctx, &a); });
  b.say(what, ms, static_cast<double>(elems) * 2.0,
        2.0 * static_cast<double>(rows * vocab * hidden));
  must(cudaFree(w)), must(cudaFree(x)), must(cudaFree(out)), must(cudaFree(logits));
}

// n_seqs sequences of `context` positions; the last `each` of them are the rows.
void attention(const bench &b, int64_t n_seqs, int64_t each, int64_t context, int64_t heads,
               int64_t kv_heads, int64_t head_dim) {
  const int64_t page_size = 64, pages = (context + page_size - 1) / page_size, rows = n_seqs * each;
  char what[100];
  snprintf(what, sizeof what, "attention seqs=%ld rows=%ld context=%ld heads=%ld/%ld",
           static_cast<long>(n_seqs), static_cast<long>(rows), static_cast<long>(context),
           static_cast<long>(heads), static_cast<long>(kv_heads));
  if (!b.runs(what)) return;
  std::vector<int32_t> positions, seqs, tables;
  for (int64_t s = 0; s < n_seqs; s++)
    for (int64_t i = 0; i < each; i++)
      positions.push_back(static_cast<int32_t>(context - each + i)),
          seqs.push_back(static_cast<int32_t>(s));
  for (int64_t i = 0; i < n_seqs * pages; i++) tables.push_back(static_cast<int32_t>(i));
  int32_t *at = put(positions), *of = put(seqs), *table = put(tables);
  const size_t cache = static_cast<size_t>(n_seqs * pages * kv_heads * page_size * head_dim),
               n_q = static_cast<size_t>(rows * heads * head_dim);
  uint16_t *k = numbers(cache), *v = numbers(cache), *q = numbers(n_q), *out = numbers(n_q);
  rm_attention_args a = {};
  a.out = out, a.q = q, a.k_cache = k, a.v_cache = v, a.positions = at, a.seq_of_row = of,
  a.block_tables = table, a.rows = rows, a.n_seqs = n_seqs;
  a.max_pages = pages, a.n_heads = heads, a.n_kv_heads = kv_heads, a.group = heads / kv_heads;
  a.head_dim = a.value_dim = head_dim, a.page_size = page_size, a.scale = 0.0883883f;
  a.dtype = RM_BF16;
  const double ms = time_of(static_cast<cudaStream_t>(b.ctx.stream),
                            [&](int) { b.table->attention(&b.ctx, &a); });
  const double live = static_cast<double>(rows) *
                      (static_cast<double>(context) - static_cast<double>(each - 1) / 2.0);
  b.say(what, ms, static_cast<double>(cache) * 4.0,
        4.0 * live * static_cast<double>(heads * head_dim));
  for (void *p : {static_cast<void *>(k), static_cast<void *>(v), static_cast<void *>(q),
                  static_cast<void *>(out), static_cast<void *>(at), static_cast<void *>(of),
                  static_cast<void *>(table)})
    must(cudaFree(p));
}

} // namespace

int main(int argc, char **argv) {
  bench b = {};
  if (!open_kernels()) return 1;
  cudaStream_t stream;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  must(cudaDeviceSynchronize());
  if (argc > 1 && !strcmp(argv[1], "read")) {
    printf("%.1f\n", reading(stream));
    return 0;
  }
  b.table = argc > 1 && !strcmp(argv[1], "fma") ? rm_kernels_cuda() : rm_kernels_cuda_mma();
  b.only = argc > 2 ? argv[2] : "";
  rm_limits limits = {};
  limits.max_rows = 4096, limits.max_k = 12288, limits.max_n = 24576, limits.vocab = 151936,
  limits.n_heads = 32, limits.n_kv_heads = 8;
  limits.head_dim = 128, limits.max_positions = 32768, limits.n_experts = 128, limits.top_k = 8,
  limits.n_threads = 1;
  b.ctx.stream = stream;
  b.ctx.workspace_bytes = b.table->workspace_bytes(&limits);
  must(cudaMalloc(&b.ctx.workspace, b.ctx.workspace_bytes));
  b.limit = reading(stream);
  printf("table %s, workspace %zu MB; reading 4 GB: %.0f GB/s\n", b.table->family,
         b.ctx.workspace_bytes >> 20, b.limit);
  for (const int64_t rows : {1, 8, 16, 64, 256, 4096}) {
    gemm(b, "8B qkv", rows, 6144, 4096, false);
    gemm(b, "8B o", rows, 4096, 4096, false);
    gemm(b, "8B gate_up", rows, 12288, 4096, true);
    gemm(b, "8B down", rows, 4096, 12288, false);
    gemm(b, "0.6B o", rows, 1024, 2048, false);
    gemm(b, "0.6B gate_up", rows, 3072, 1024, true);
    gemm(b, "30B-A3B gate_up", rows * 8, 768, 2048, true, 128);
    gemm(b, "30B-A3B down", rows * 8, 2048, 768, false, 128);
    if (rows <= 256) lm_head(b, rows, 151936, 4096);
    if (rows <= 64) attention(b, rows, 1, 4096, 32, 8, 128);
    else attention(b, 1, rows, rm_max64(rows, 4096), 32, 8, 128);
  }
  attention(b, 1, 1, 32768, 32, 8, 128);
  must(cudaDeviceSynchronize());
  return 0;
}
