// two_phase_commit.h: the commit of a sync on a mesh. Every rank prepares, the ranks exchange votes
// and digests, and either all ranks swap or all keep the old version.
//
// Ranks that hold the same shard of a parameter must have the same values: otherwise trainer
// replicas that have diverged would serve different models as one version. KV heads that two ranks
// share only partly are not compared.
//
// After a successful vote all ranks can swap, and swap cannot fail. If a rank ends between the vote
// and its swap, the others may serve a version that it does not. The group is then dead (comm.h),
// so the ranks of the mesh do not step again.
#pragma once

#include "model/rank.h"
#include "weights/sync.h"

// Called by all ranks. On failure the sync is closed on every rank. Returns this rank's error if it
// has one, RM_E_SYNC_ABORTED with the first other rank that failed and its error, or
// RM_E_MESH_MISMATCH when versions or values differ. A mesh of one rank does not vote.
rm_code rm_sync_commit(rm_store *store, const rm_rank *rank, rm_error *err);
