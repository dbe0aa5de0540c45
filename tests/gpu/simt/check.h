// check.h: shared by the checks of the ops. A check runs an op of the reference table, then the
// CUDA table's in both thread orders, on fresh outputs in guarded memory; every byte of an output
// is compared, including bytes that an op must not write.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>

#include "device.cuh"
#include "rm_cuda.h"
#ifndef RM_SIMT
#include "gpu.h"
#endif

extern "C" const rm_kernels rm_table_ref, rm_table_ref_mma;

// The tested table, and the reference with its family's sums. The reference packs like the CPU, a
// table like its family.
const rm_kernels *in_test(), *oracle();

void check_seed(uint64_t seed);
void check_counts(int64_t *cases, int64_t *elements);

uint32_t random_bits();
int64_t pick(int64_t n); // 0 … n − 1
// Mostly near 1; some ±0, denormals, and magnitudes that cancel. WILD: NaNs, infinities and the
// largest numbers too.
enum kind { TAME, WILD };
float number(kind k = TAME);
void *numbers(rm_dtype dtype, int64_t n, kind k = TAME);
template <class T> T *array(int64_t n) {
  return static_cast<T *>(simt_buffer(static_cast<size_t>(n) * sizeof(T)));
}

// Compares bits, counts a case of `count` elements, and prints where they differ.
bool same(const char *what, const void *got, const void *want, size_t bytes, int64_t count);

// A packed tensor, in the oracle's layout and in the tested table's layout.
struct packed {
  void *of_oracle, *of_test;
  void *of(const rm_kernels *table) const { return table == oracle() ? of_oracle : of_test; }
};
void *relaid_matrices(const void *from, rm_dtype dtype, int64_t n_matrices, int64_t rows, int64_t k,
                      bool gate_up);
void *relaid_pages(const void *from, rm_dtype dtype, int64_t n_pages, int64_t page_size,
                   int64_t head_dim, bool values);
// `rows` is the number of rows of a matrix; with gate_up, of each of the two.
packed weights(rm_dtype dtype, int64_t n_matrices, int64_t rows, int64_t k, bool gate_up = false,
               kind k_of = TAME);

// A pointer in the arguments that gets a separate buffer for each run. The buffer is filled with
// the initial contents of the pointer's target, or with 0xff if the pointer was NULL. Without a
// field the output is skipped.
struct output {
  void *field;
  size_t bytes;
  int64_t count;
  // Converts from the oracle's packing to that of the tested table.
  std::function<void *(const void *)> relaid = nullptr;
};
// Calls `run` with a table and a ctx whose workspace has that table's workspace_bytes(limits).
bool held(const char *what, std::initializer_list<output> outputs, const rm_limits &limits,
          const std::function<void(const rm_kernels *, const rm_ctx *)> &run);

bool check_embed(), check_gather_rows(), check_rms_norm(), check_activate(), check_head_squares(),
    check_qk_rope_kv();
bool check_gemm(), check_gemm_swiglu();
bool check_attention();
bool check_router(), check_permute(), check_static_dispatch(), check_combine();
bool check_lm_head(), check_merge_pairs();
bool check_sample(), check_top_logprobs(), check_ranks();
bool check_pack();
bool check_mma_places(), check_mma_company(), check_mma_tiles();
