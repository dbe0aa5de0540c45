// agree.c: see agree.h. Two exchanges: the votes, and when all are for it the sums. What they need is allocated before the vote, so
// that after it nothing is left to fail but the exchange.
#include "weights/agree.h"

#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/memory.h"

typedef struct vote {
  int64_t version, n_params;
  int32_t code;
  char message[244];
} vote;

typedef struct ballot {         // one block
  int size;
  vote *votes;                  // [size]
  uint64_t *sums;               // [size][n]
  size_t *bytes;                // [size]
} ballot;

static rm_code open_ballot(const rm_store *store, int size, ballot *b, rm_error *err) {
  const size_t n = (size_t)rm_store_params(store)->n, ranks = (size_t)size;
  size_t sums;
  b->size = size;
  b->votes = NULL;
  if (rm_mul_size(n, sizeof *b->sums, &sums)) b->votes = rm_alloc(ranks, sizeof *b->votes + sizeof *b->bytes + sums);
  if (!b->votes) return rm_fail(err, RM_E_MEMORY, "no memory for the votes of %d ranks on %zu parameters", size, n);
  b->sums = (uint64_t *)(b->votes + ranks);
  b->bytes = (size_t *)(b->sums + ranks * n);
  return RM_OK;
}

static rm_code hear(rm_comm *world, ballot *b, const void *mine, void *all, size_t each, rm_error *err) {
  for (int r = 0; r < b->size; r++) b->bytes[r] = each;
  return rm_comm_all_gather(world, mine, all, b->bytes, err);
}

// RM_OK when everybody can.
static rm_code count(const ballot *b, int me, rm_error *err) {
  for (int r = 0; r < b->size; r++)
    if (b->votes[r].code)
      return rm_fail(err, RM_E_SYNC_ABORTED, "rank %d could not take version %lld: %s: %s", r, (long long)b->votes[r].version,
                     rm_code_name((rm_code)b->votes[r].code), b->votes[r].message);
  for (int r = 0; r < b->size; r++)
    if (b->votes[r].version != b->votes[me].version || b->votes[r].n_params != b->votes[me].n_params)
      return rm_fail(err, RM_E_MESH_MISMATCH, "rank %d commits version %lld of %lld parameters and rank %d version %lld of %lld", r,
                     (long long)b->votes[r].version, (long long)b->votes[r].n_params, me, (long long)b->votes[me].version,
                     (long long)b->votes[me].n_params);
  return RM_OK;
}

static rm_code commit(rm_store *store, rm_comm *world, ballot *b, rm_code prepared, rm_sync_report *report, rm_error *err) {
  const int64_t n = rm_store_params(store)->n;
  const int me = rm_comm_rank(world);
  vote mine = {.version = rm_sync_version(store), .n_params = n, .code = prepared};
  rm_error other = RM_ERROR_INIT;
  if (prepared) snprintf(mine.message, sizeof mine.message, "%s", rm_error_message(err));
  rm_code code = hear(world, b, &mine, b->votes, sizeof mine, &other);
  if (!code) code = count(b, me, &other);
  if (!code) code = hear(world, b, rm_sync_sums(store), b->sums, (size_t)n * sizeof *b->sums, &other);
  if (code) {
    rm_sync_abort(store);
    if (!prepared) rm_fail(err, code, "%s", rm_error_message(&other));   // one's own reason says more than that one had one
    rm_error_clear(&other);
    return prepared ? prepared : code;
  }
  for (int r = 1; r < b->size; r++)
    for (int64_t i = 0; i < n; i++) b->sums[i] += b->sums[r * n + i];
  rm_sync_swap(store, b->sums, report);
  return RM_OK;
}

rm_code rm_sync_commit_together(rm_store *store, rm_comm *world, rm_sync_report *report, rm_error *err) {
  ballot b;
  if (!world) return rm_sync_commit(store, report, err);
  if (!rm_store_is_open(store)) return rm_fail(err, RM_E_STATE, "a sync was to be committed and none is open");
  rm_code code = open_ballot(store, rm_comm_size(world), &b, err);
  if (code) {
    rm_comm_abort(world, code);   // without a ballot this rank cannot say so
    rm_sync_abort(store);
    return code;
  }
  code = commit(store, world, &b, rm_sync_prepare(store, err), report, err);
  rm_free(b.votes);
  return code;
}
