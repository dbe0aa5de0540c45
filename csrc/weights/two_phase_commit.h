// two_phase_commit.h: the vote between the two phases of a commit. Every rank has prepared, or failed to; they tell one another, and swap all
// or none. With a vote goes what this rank answers for of the digest, so that the digest of a version is that of one rank.
//
// Ranks that hold the same part of a parameter must have been sent the same values of it: replicas of a trainer that have drifted apart
// would otherwise serve different models under one version. Of KV heads that two ranks share in part only, it is not compared.
//
// After a vote that all have heard each rank knows that every other can swap, and swapping cannot fail. If a rank ends in between,
// the others serve a version that it may not; but then the group is dead (comm.h), and nobody steps again on this mesh.
#pragma once

#include "model/rank.h"
#include "weights/sync.h"

// Prepares, votes and swaps, or closes the sync on every rank: this rank's own error, or RM_E_SYNC_ABORTED with the first other rank that
// failed and why, or RM_E_MESH_MISMATCH when versions or values differ. A rank alone does not vote.
rm_code rm_sync_commit_together(rm_store *store, const rm_rank *rank, rm_sync_report *report, rm_error *err);
