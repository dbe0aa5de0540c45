// shard.h: exchanges of activations within a tensor parallel group. A matmul computes a rank's
// columns of all rows, and the next op reads whole rows. Conversions of a [rows][width] activation:
//
//   rm_shard_gather_part      every rank's compact columns → whole rows on every rank
//   rm_shard_gather_columns   the same in place: each rank has written its columns of the whole
//                             matrix
//   rm_shard_columns_to_rows  every rank's columns → whole rows, on each rank its home rows only
//   rm_shard_gather_rows      home rows → all rows on every rank, in place
//
// With sequence parallelism a rank keeps its home rows between the matmuls: ⌈n / tp⌉ of n rows, so
// the last ranks may have fewer or none. On one rank these functions do nothing. One thread at a
// time uses a shard; all ranks of the group make the same calls in the same order.
#pragma once

#include "model/placement.h"
#include "model/rank.h"

typedef enum rm_cut {
  RM_CUT_HEADS,
  RM_CUT_HIDDEN,
  RM_CUT_INNER,
  RM_CUT_SHARED_INNER,
  RM_CUT_EXPERT_INNER,
  RM_CUT_Q_SQUARES,
  RM_CUT_K_SQUARES,
  RM_N_CUT
} rm_cut;

typedef struct rm_shard {
  rm_comm *comm; // view, for device memory; NULL: one rank
  int size, me;
  size_t elem; // bytes of an element
  // [size] columns of each rank, in elements. SQUARES are float32; the first rank that holds a KV
  // head sends its column.
  rm_range *cuts[RM_N_CUT];
  rm_range *vocab; // [size]
  rm_block *send, *recv; // [size] scratch of a call
  int64_t widths[RM_N_CUT];
} rm_shard;

rm_code rm_shard_create(const rm_spec *spec, const rm_rank *rank, rm_dtype dtype, rm_shard *out,
                        rm_error *err);
void rm_shard_destroy(rm_shard *shard);

// The home rows of rank r among n rows.
static inline rm_range rm_shard_rows(const rm_shard *shard, int64_t n, int r) {
  const int64_t each = (n + shard->size - 1) / shard->size, first = rm_min64(each * r, n);
  return (rm_range){first, rm_min64(each, n - first)};
}
static inline rm_range rm_shard_home(const rm_shard *shard, int64_t n) {
  return rm_shard_rows(shard, n, shard->me);
}

// part: this rank's columns, rows of `ld` elements; whole: T [rows][width].
rm_code rm_shard_gather_part(rm_shard *shard, rm_cut cut, const void *part, int64_t ld, void *whole,
                             int64_t rows, rm_error *err);
rm_code rm_shard_gather_columns(rm_shard *shard, rm_cut cut, void *whole, int64_t rows,
                                rm_error *err);
// columns: this rank's first column, T [rows] of `ld` elements; home: T [home rows][width].
rm_code rm_shard_columns_to_rows(rm_shard *shard, rm_cut cut, const void *columns, int64_t ld,
                                 void *home, int64_t rows, rm_error *err);
// Gathers rows of `bytes` bytes each.
rm_code rm_shard_gather_rows(rm_shard *shard, void *whole, int64_t rows, size_t bytes,
                             rm_error *err);
// All-gathers counts[r] rows of each rank r into `out`, ordered by rank.
rm_code rm_shard_gather_counted(rm_shard *shard, const void *mine, void *out, const int64_t *counts,
                                size_t bytes, rm_error *err);
