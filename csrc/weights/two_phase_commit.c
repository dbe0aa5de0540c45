// two_phase_commit.c: see two_phase_commit.h. It makes two exchanges: the votes, then, if all ranks
// agree, the digests. Memory is allocated before the vote, so that after it only the exchange can
// fail.
#include "weights/two_phase_commit.h"

#include <stdio.h>
#include <string.h>

#include "base/memory.h"
#include "weights/store.h"

typedef struct vote {
  int64_t version;
  int32_t code;
  char message[244];
} vote;

typedef struct ballot { // allocated as one block; `votes` owns it
  int size;
  vote *votes; // [size]
  uint64_t *sums; // [size][2][n], rm_sync_sums of each rank
  rm_placement *placements; // [size]
} ballot;

static rm_code open_ballot(const rm_store *store, const rm_mesh *mesh, ballot *b, rm_error *err) {
  const int size = rm_mesh_world(mesh);
  const size_t n = (size_t)store->params->n, ranks = (size_t)size;
  b->size = size;
  b->votes = rm_alloc(ranks, sizeof *b->votes + sizeof *b->placements + 2 * n * sizeof *b->sums);
  if (!b->votes) return rm_no_memory(err, "the votes of all ranks", 0);
  b->sums = (uint64_t *)(b->votes + ranks);
  b->placements = (rm_placement *)(b->sums + ranks * 2 * n);
  for (int r = 0; r < size; r++) b->placements[r] = rm_placement_of(store->params->spec, mesh, r);
  return RM_OK;
}

// Returns RM_OK if all ranks can commit the same version.
static rm_code tally(const ballot *b, int me, rm_error *err) {
  for (int r = 0; r < b->size; r++)
    RM_FAIL_IF(b->votes[r].code, RM_E_SYNC_ABORTED, "rank %d could not take version %ld: %s: %s", r,
               b->votes[r].version, rm_code_name((rm_code)b->votes[r].code), b->votes[r].message);
  for (int r = 0; r < b->size; r++)
    RM_FAIL_IF(b->votes[r].version != b->votes[me].version, RM_E_MESH_MISMATCH,
               "version: expected %ld on all ranks, got %ld on rank %d", b->votes[me].version,
               b->votes[r].version, r);
  return RM_OK;
}

// Returns RM_OK if ranks that hold the same rows of a parameter have the same values; compares the
// first such rank with each other one.
static rm_code compare(const ballot *b, const rm_params *params, rm_error *err) {
  const int64_t n = params->n;
  for (int64_t i = 0; i < n; i++) {
    const rm_param *param = &params->list[i];
    for (int r = 1; r < b->size; r++) {
      const rm_range mine = rm_param_rows_of(params, &b->placements[r], param);
      for (int q = 0; q < r && mine.n; q++) {
        const rm_range its = rm_param_rows_of(params, &b->placements[q], param);
        if (its.first != mine.first || its.n != mine.n) continue;
        if (b->sums[(2 * q + 1) * n + i] == b->sums[(2 * r + 1) * n + i]) break;
        return rm_fail(err, RM_E_MESH_MISMATCH, "%s: rank %d was given other values than rank %d",
                       rm_param_name(params, param).text, r, q);
      }
    }
  }
  return RM_OK;
}

// Exchanges votes and digests; sets b->sums to the digests' sums over the ranks. `prepared`: this
// rank's vote, whose message is in err.
static rm_code agree(rm_store *store, rm_comm *world, ballot *b, rm_code prepared, rm_error *err) {
  const int64_t n = store->params->n;
  const int me = rm_comm_rank(world);
  vote mine = {.version = store->options.version, .code = prepared};
  rm_error other = RM_ERROR_INIT;
  if (prepared) snprintf(mine.message, sizeof mine.message, "%s", rm_error_message(err));
  rm_code code = rm_comm_all_gather(world, &mine, b->votes, sizeof mine, &other);
  if (!code) code = tally(b, me, &other);
  if (!code)
    code = rm_comm_all_gather(world, store->staged.sums, b->sums, 2 * (size_t)n * sizeof *b->sums,
                              &other);
  if (!code) code = compare(b, store->params, &other);
  // This rank's error, if it has one, has more detail than the vote's.
  if (code && !prepared) rm_fail(err, code, "%s", rm_error_message(&other));
  rm_error_clear(&other);
  for (int r = 1; r < b->size && !code; r++)
    for (int64_t i = 0; i < n; i++) b->sums[i] += b->sums[2 * r * n + i];
  return prepared ? prepared : code;
}

rm_code rm_sync_commit(rm_store *store, const rm_rank *rank, rm_error *err) {
  rm_comm *world = rank->world;
  ballot b = {0};
  RM_FAIL_IF(!store->open, RM_E_STATE, "commit: expected an open sync, got none");
  rm_code code = world ? open_ballot(store, &rank->mesh, &b, err) : RM_OK;
  if (code) {
    rm_comm_abort(world, code); // this rank cannot vote
  } else {
    code = rm_sync_prepare(store, err);
    if (world) code = agree(store, world, &b, code, err);
  }
  if (code) rm_sync_abort(store);
  else rm_sync_swap(store, world ? b.sums : store->staged.sums);
  rm_free(b.votes);
  return code;
}
