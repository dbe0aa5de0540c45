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

typedef struct rm_shard {
  rm_comm *comm; // view, for device memory; NULL: one rank
  int size, me;
  size_t elem; // bytes of an element
  rm_placement whole, *placements; // of a single rank; [size] of each rank, owned
} rm_shard;

rm_code rm_shard_create(const rm_spec *spec, const rm_rank *rank, rm_dtype dtype, rm_shard *out,
                        rm_error *err);
void rm_shard_destroy(rm_shard *shard);

// The columns of rank r in a matrix whose columns are `dim`; the width of the matrix.
static inline rm_range rm_shard_columns(const rm_shard *shard, rm_dim dim, int r) {
  return shard->placements[r].dims[dim];
}
static inline int64_t rm_shard_width(const rm_shard *shard, rm_dim dim) {
  return shard->whole.dims[dim].n;
}
// The home rows of rank r among n rows.
static inline rm_range rm_shard_rows(const rm_shard *shard, int64_t n, int r) {
  const int64_t each = (n + shard->size - 1) / shard->size, first = rm_min64(each * r, n);
  return (rm_range){first, rm_min64(each, n - first)};
}
static inline rm_range rm_shard_home(const rm_shard *shard, int64_t n) {
  return rm_shard_rows(shard, n, shard->me);
}

// The rank that holds a vocabulary entry.
static inline int rm_shard_owner(const rm_shard *shard, int32_t id) {
  int r = 0;
  while (id >= shard->placements[r].vocab.first + shard->placements[r].vocab.n) r++;
  return r;
}

// part: this rank's columns, rows of `ld` elements of `elem` bytes each; whole: [rows][width].
rm_code rm_shard_gather_part(rm_shard *shard, rm_dim dim, size_t elem, const void *part, int64_t ld,
                             void *whole, int64_t rows, rm_error *err);
rm_code rm_shard_gather_columns(rm_shard *shard, rm_dim dim, void *whole, int64_t rows,
                                rm_error *err);
// whole: T [rows][width], of which this rank has its columns; home: T [home rows][width].
rm_code rm_shard_columns_to_rows(rm_shard *shard, rm_dim dim, const void *whole, void *home,
                                 int64_t rows, rm_error *err);
// Gathers rows of `bytes` bytes each.
rm_code rm_shard_gather_rows(rm_shard *shard, void *whole, int64_t rows, size_t bytes,
                             rm_error *err);
