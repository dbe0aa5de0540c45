// shard.h: how activations move between the ranks of a tensor parallel group. Every matrix product gives a rank its columns of
// all rows; what reads the result wants whole rows. So there are two shapes of a [rows][width] activation on a rank, its columns and
// its rows, and four ways between them:
//
//   part  → whole     rm_shard_gather_part      compact columns of every rank into whole rows, on every rank
//   columns → whole   rm_shard_gather_columns   the same in place, each rank having written its columns of a whole matrix
//   columns → rows    rm_shard_columns_to_rows  in place of the first; each rank gets whole rows, of its run of rows only
//   rows  → whole     rm_shard_gather_rows      in place, each rank having written its run of rows
//
// With sequence parallelism a rank owns a run of rows, its home rows, between the matrix products: n of every step's rows in runs of
// ⌈n / tp⌉, so the last may be short or empty. On one rank all of this is nothing.
#pragma once

#include "model/placement.h"
#include "model/rank.h"

typedef enum rm_cut { RM_CUT_HEADS, RM_CUT_HIDDEN, RM_CUT_INNER, RM_CUT_EXPERT_INNER, RM_N_CUT } rm_cut;

typedef struct rm_shard {
  rm_comm *comm;                // view; NULL: one rank. Of blocks in the device's memory
  int size, me;
  size_t elem;                  // bytes of an element
  rm_range *cuts[RM_N_CUT];     // [size] columns of each rank; of HEADS in elements
  rm_range *vocab;              // [size]
  rm_block *send, *recv;        // [size] scratch of a call
  int64_t widths[RM_N_CUT];
} rm_shard;

rm_code rm_shard_create(const rm_spec *spec, const rm_rank *rank, rm_dtype dtype, rm_shard *out, rm_error *err);
void rm_shard_destroy(rm_shard *shard);

// Run of home rows of rank r, of n rows.
static inline rm_range rm_shard_rows(const rm_shard *shard, int64_t n, int r) {
  const int64_t each = (n + shard->size - 1) / shard->size, first = rm_min64(each * r, n);
  return (rm_range){first, rm_min64(each, n - first)};
}
static inline rm_range rm_shard_home(const rm_shard *shard, int64_t n) { return rm_shard_rows(shard, n, shard->me); }

// part: T [rows][columns of this rank], whole: T [rows][width of the cut].
rm_code rm_shard_gather_part(rm_shard *shard, rm_cut cut, const void *part, void *whole, int64_t rows, rm_error *err);
rm_code rm_shard_gather_columns(rm_shard *shard, rm_cut cut, void *whole, int64_t rows, rm_error *err);
// columns: T [rows] of `ld` elements, this rank's columns from the first on; home: T [home rows][width].
rm_code rm_shard_columns_to_rows(rm_shard *shard, rm_cut cut, const void *columns, int64_t ld, void *home, int64_t rows, rm_error *err);
// Rows of `bytes` each.
rm_code rm_shard_gather_rows(rm_shard *shard, void *whole, int64_t rows, size_t bytes, rm_error *err);
// What each rank has of rows that are cut by what is in them: rank r has counts[r] of them, one after another in `out`.
rm_code rm_shard_gather_counted(rm_shard *shard, const void *mine, void *out, const int64_t *counts, size_t bytes, rm_error *err);
