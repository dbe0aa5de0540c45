// check.cpp: compares the kernels of kernels/cuda on the fibres of simt.h with the reference table,
// bit for bit.
//
//   check OP SEED [fma | mma] [touch | few]
//       Every shape in both thread orders, with the table of that family (fma). Prints
//       "OK cases=… elements=…", or the first difference. touch: runs each launch once without a
//       comparison, for memory checkers, under which a launch takes long. few: one case of eight.
//   check barrier | left | mixed | mma | copies | shared | shared_end | buffer | misaligned |
//         race | warp_race
//       Runs a faulty kernel, which the shim must report.
//
// On a GPU, with gpu.cu instead of simt.h's scheduler, it runs the same test.
#include "check.h"

#include <vector>

#include "mma.cuh"

static bool is_mma, is_touch, is_few;
static uint64_t state, few_state;
static int64_t cases, elements;

void check_seed(uint64_t seed) { state = few_state = seed; }

// Draws that are independent of random_bits, so that a case has the same data in either run.
static bool is_left_out() {
  few_state = few_state * 6364136223846793005u + 1442695040888963407u;
  return is_few && few_state >> 61 != 0;
}

uint32_t random_bits() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 33) ^ static_cast<uint32_t>(state >> 13);
}
int64_t pick(int64_t n) { return static_cast<int64_t>(random_bits() % static_cast<uint32_t>(n)); }

float number(kind k) {
  static const uint32_t edges[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc12345u,
                                   0x7f7fffffu, 0xff7fffffu, 0x00800000u};
  const int64_t turn = pick(32);
  const float unit = static_cast<float>(static_cast<int32_t>(random_bits())) * 0x1p-31f;
  if (k == WILD && pick(48) == 0) return rm_float(edges[pick(7)]);
  if (turn == 0) return rm_float(random_bits() & 0x80000000u);
  if (turn == 1) return rm_float(random_bits() & 0x807fffffu);
  if (turn == 2) return ldexpf(unit, static_cast<int>(pick(40)) - 20);
  return unit;
}

void *numbers(rm_dtype dtype, int64_t n, kind k) {
  char *p = static_cast<char *>(simt_buffer(static_cast<size_t>(n) * rm_dtype_bytes(dtype)));
  for (int64_t i = 0; i < n; i++) {
    const uint32_t u = rm_bits(number(k));
    if (dtype == RM_BF16) reinterpret_cast<uint16_t *>(p)[i] = static_cast<uint16_t>(u >> 16);
    else reinterpret_cast<uint32_t *>(p)[i] = u;
  }
  return p;
}

const rm_kernels *in_test() { return is_mma ? rm_kernels_cuda_mma() : rm_kernels_cuda(); }
const rm_kernels *oracle() { return is_mma ? &rm_table_ref_mma : &rm_table_ref; }

static void *copy_of(const void *from, size_t bytes) {
  return memcpy(simt_buffer(bytes), from, bytes);
}

void *relaid_matrices(const void *from, rm_dtype dtype, int64_t n_matrices, int64_t rows, int64_t k,
                      bool gate_up) {
  const int64_t n = rm_round_up(rows, RM_N_TILE),
                each = rm_packed_elems(gate_up ? rm_gate_up_rows(rows) : rows, k);
  void *to = copy_of(from, static_cast<size_t>(n_matrices * each) * rm_dtype_bytes(dtype));
  if (!is_mma || dtype == RM_F32) return to;
  for (int64_t m = 0; m < n_matrices; m++)
    for (int64_t r = 0; r < n * (gate_up ? 2 : 1); r++)
      for (int64_t i = 0; i < rm_round_up(k, RM_K_BLOCK); i++) {
        const int64_t there = gate_up ? rm_mma_gate_up_row(r / 2, r & 1) : r,
                      here = gate_up ? rm_gate_up_row(r / 2, r & 1) : r;
        rm_copy_elem(dtype, to, m * each + rm_mma_index(k, there, i), from,
                     m * each + rm_packed_index(dtype, k, here, i));
      }
  return to;
}

void *relaid_pages(const void *from, rm_dtype dtype, int64_t n_pages, int64_t page_size,
                   int64_t head_dim, bool values) {
  if (!values) return relaid_matrices(from, dtype, n_pages, page_size, head_dim, false);
  const int64_t each = rm_v_page_elems(page_size, head_dim);
  void *to = copy_of(from, static_cast<size_t>(n_pages * each) * rm_dtype_bytes(dtype));
  if (!is_mma || dtype == RM_F32) return to;
  for (int64_t page = 0; page < n_pages; page++)
    for (int64_t pos = 0; pos < page_size; pos++)
      for (int64_t d = 0; d < rm_round_up(head_dim, RM_N_TILE); d++)
        rm_copy_elem(dtype, to, page * each + rm_mma_v_index(head_dim, pos, d), from,
                     page * each + rm_v_index(dtype, head_dim, pos, d));
  return to;
}

packed weights(rm_dtype dtype, int64_t n_matrices, int64_t rows, int64_t k, bool gate_up,
               kind k_of) {
  void *w =
      numbers(dtype, n_matrices * rm_packed_elems(gate_up ? rm_gate_up_rows(rows) : rows, k), k_of);
  return {w, relaid_matrices(w, dtype, n_matrices, rows, k, gate_up)};
}

bool same(const char *what, const void *got, const void *want, size_t bytes, int64_t count) {
  cases++;
  elements += count;
  if (is_touch) return true;
  if (memcmp(got, want, bytes) == 0) return true;
  size_t at = 0;
  while (static_cast<const char *>(got)[at] == static_cast<const char *>(want)[at]) at++;
  printf("DIFFERS %s at byte %zu of %zu\n", what, at, bytes);
  return false;
}

// Points the field at a new buffer and returns the buffer.
static void *renew(const output &out, const void *initial) {
  void *p = simt_buffer(out.bytes);
  if (initial) memcpy(p, initial, out.bytes);
  memcpy(out.field, &p, sizeof p);
  return p;
}

static rm_ctx context(const rm_kernels *table, const rm_limits &limits) {
  rm_ctx ctx = {};
  ctx.workspace_bytes = table->workspace_bytes(&limits);
  ctx.workspace = simt_buffer(ctx.workspace_bytes);
  ctx.n_threads = 1;
  return ctx;
}

bool held(const char *what, std::initializer_list<output> outputs, const rm_limits &limits,
          const std::function<void(const rm_kernels *, const rm_ctx *)> &run) {
  if (is_left_out()) return true;
  std::vector<output> wanted;
  std::vector<void *> initial, want, got;
  for (const output &out : outputs) {
    if (!out.field) continue;
    wanted.push_back(out);
    void *p;
    memcpy(&p, out.field, sizeof p);
    initial.push_back(p);
    want.push_back(renew(out, p));
  }
  if (!is_touch) {
    const rm_ctx ref = context(oracle(), limits);
    run(oracle(), &ref);
  }
  for (size_t i = 0; i < wanted.size(); i++) {
    if (!wanted[i].relaid) continue;
    initial[i] = wanted[i].relaid(initial[i]);
    want[i] = wanted[i].relaid(want[i]);
  }
  for (int order = 0; order < (is_touch ? 1 : 2); order++) {
    got.clear();
    for (const output &out : wanted) got.push_back(renew(out, initial[got.size()]));
    const rm_ctx ctx = context(in_test(), limits);
    simt_order(order);
    run(in_test(), &ctx);
    simt_finish();
    size_t i = 0;
    for (const output &out : wanted) {
      if (!same(what, got[i], want[i], out.bytes, out.count)) return false;
      i++;
    }
  }
  return true;
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
  float *y = array<float>(64), *z = array<float>(64);
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
  static const struct {
    const char *name;
    bool (*run)();
  } ops[] = {
      {"embed", check_embed},
      {"gather_rows", check_gather_rows},
      {"rms_norm", check_rms_norm},
      {"activate", check_activate},
      {"head_squares", check_head_squares},
      {"qk_rope_kv", check_qk_rope_kv},
      {"gemm", check_gemm},
      {"gemm_swiglu", check_gemm_swiglu},
      {"attention", check_attention},
      {"router", check_router},
      {"permute", check_permute},
      {"static_dispatch", check_static_dispatch},
      {"combine", check_combine},
      {"lm_head", check_lm_head},
      {"merge_pairs", check_merge_pairs},
      {"sample", check_sample},
      {"top_logprobs", check_top_logprobs},
      {"ranks", check_ranks},
      {"pack", check_pack},
      {"mma_places", check_mma_places},
      {"mma_company", check_mma_company},
      {"mma_tiles", check_mma_tiles},
  };
  if (argc < 2) return 2;
  check_seed(argc > 2 ? strtoull(argv[2], nullptr, 10) : 1);
  is_mma = argc > 3 && strcmp(argv[3], "mma") == 0;
  is_touch = argc > 4 && strcmp(argv[4], "touch") == 0;
  is_few = argc > 4 && strcmp(argv[4], "few") == 0;
  for (const auto &op : ops) {
    if (strcmp(argv[1], op.name) != 0) continue;
    const uint32_t saved = rm_fp_enter();
    const bool ok = op.run();
    rm_fp_leave(saved);
    if (ok) printf("OK cases=%ld elements=%ld\n", cases, elements);
    return ok ? 0 : 1;
  }
  return faulty(argv[1]);
}
