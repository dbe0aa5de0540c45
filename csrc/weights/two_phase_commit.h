// two_phase_commit.h: the commit of a sync on a mesh. Every rank prepares; they exchange votes and
// digests; all swap, or none.
//
// Ranks that hold the same shard of a parameter must have the same values: otherwise trainer
// replicas that have diverged would serve different models as one version. KV heads that two ranks
// share only partly are not compared.
//
// After a successful vote every rank knows that all others can swap, and swap cannot fail. If a
// rank ends in between, the others may serve a version that it does not; the group is dead then
// (comm.h), and no rank of the mesh steps again.
#pragma once

#include "model/rank.h"
#include "weights/sync.h"

// Called by all ranks. On failure the sync is closed on every rank: with this rank's own error,
// RM_E_SYNC_ABORTED naming the first other rank that failed and why, or RM_E_MESH_MISMATCH when
// versions or values differ. A mesh of one rank does not vote.
rm_code rm_sync_commit_together(rm_store *store, const rm_rank *rank, rm_sync_report *report,
                                rm_error *err);
