// ranks.h: the ranks of a mesh in this process, with an engine each, driven as one engine. The
// functions are the engine's (engine.h).
//
// Either all ranks are threads of this process: a call runs on all engines concerned in parallel,
// each on its own thread with its own team, and returns when all are done. Or this process is one
// rank of several, which all make the same calls in the same order: a call is then this rank's part
// of it, and requests of other replicas are counted but not kept (rm_ranks_has).
//
// All ranks of a replica get the same requests. A request goes to the replica that has seen its
// prefix before, for the prefix cache, unless that replica has much more work than another; else to
// the replica with the least work. Routing depends only on request history.
//
// When ranks fail with different errors, the first error that was not caused by another rank is
// returned.
#pragma once

#include "engine/engine.h"

typedef struct rm_ranks rm_ranks;

// The comms of a process that is one rank. They pass to the ranks when create succeeds; NULL where
// the group has one rank.
typedef struct rm_endpoints {
  int32_t index; // this rank
  rm_comm *tp, *ep, *world;
} rm_endpoints;

typedef struct rm_ranks_options {
  rm_engine_options
      engine; // of each rank, except `rank` and `memory`; n_threads is divided among the ranks
  rm_mesh mesh;
  rm_dispatcher dispatcher;
  int sequence_parallel;
  const char *cuda_library; // NULL: the CPU; else the ranks run on CUDA devices, by this library
  int cuda_ordinal; // all ranks on this device; −1: rank r on device r modulo their number
  const char *cuda_family; // of the ops; NULL: device/cuda.h's choice
  const rm_endpoints *endpoints; // NULL: all ranks are threads here; else this process is one rank
} rm_ranks_options;

// The spec is a view and must outlive the ranks; the options are copied.
rm_code rm_ranks_create(const rm_spec *spec, const rm_ranks_options *options, rm_ranks **out,
                        rm_error *err);
void rm_ranks_destroy(rm_ranks *ranks); // safe on NULL
rm_mesh rm_ranks_mesh(const rm_ranks *ranks); // the whole mesh

rm_code rm_ranks_add(rm_ranks *ranks, const rm_request *request, uint64_t *id, rm_error *err);
int rm_ranks_has(const rm_ranks *ranks, uint64_t id); // it is kept here
// *more: whether to step again. In a lockstep group that is so while any of its ranks has requests,
// else while a request of this process is unfinished and not paused.
rm_code rm_ranks_step(rm_ranks *ranks, int64_t *n_work, int *more, rm_error *err);
int64_t rm_ranks_unfinished(const rm_ranks *ranks); // of those kept here
int64_t rm_ranks_finished(rm_ranks *ranks, uint64_t *ids, int64_t capacity);
uint64_t rm_ranks_next_finished(const rm_ranks *ranks);
rm_code rm_ranks_view(const rm_ranks *ranks, uint64_t id, rm_request_view *out, rm_error *err);
rm_code rm_ranks_sample_view(const rm_ranks *ranks, uint64_t id, int32_t sample,
                             rm_sample_view *out, rm_error *err);
rm_code rm_ranks_release(rm_ranks *ranks, uint64_t id, rm_error *err);
rm_code rm_ranks_abort(rm_ranks *ranks, uint64_t id, rm_error *err);
rm_code rm_ranks_stop_sample(rm_ranks *ranks, uint64_t id, int32_t sample, int64_t n_tokens,
                             rm_error *err);
void rm_ranks_pause(rm_ranks *ranks, int paused);
void rm_ranks_reset_prefix_cache(rm_ranks *ranks);

rm_code rm_ranks_sync_begin(rm_ranks *ranks, const rm_sync_options *options, rm_error *err);
rm_code rm_ranks_sync_check(rm_ranks *ranks, const rm_entry *entry, const rm_tensor *tensor,
                            rm_error *err);
// Each rank copies its shard. When one fails, none of the entries counts as pushed on any rank; they
// may be pushed again.
rm_code rm_ranks_sync_push(rm_ranks *ranks, const rm_entry *const *entries, int64_t n,
                           rm_error *err);
// The report: bytes read by all ranks together, times of the slowest.
rm_code rm_ranks_sync_commit(rm_ranks *ranks, rm_inflight inflight, rm_sync_report *report,
                             rm_error *err);
void rm_ranks_sync_abort(rm_ranks *ranks);
// All ranks or none. Offloaded copies stay after wake, until rm_ranks_free_offloaded or the next
// sync: other processes may have failed to wake.
rm_code rm_ranks_sleep(rm_ranks *ranks, unsigned parts, rm_error *err);
rm_code rm_ranks_wake(rm_ranks *ranks, unsigned parts, rm_error *err);
size_t rm_ranks_offload_bytes(
    const rm_ranks *ranks); // host memory that rm_ranks_offload_weights takes
rm_code rm_ranks_offload_weights(rm_ranks *ranks, rm_error *err);
void rm_ranks_free_offloaded(rm_ranks *ranks);

// The calls of external_scheduler.h, for the only rank of a process with an external scheduler.
// Requests added here stay on this rank.
rm_code rm_ranks_external_step(rm_ranks *ranks, const rm_external_step *step,
                               rm_external_result *results, int64_t *n_work, rm_error *err);
rm_code rm_ranks_external_draw(rm_ranks *ranks, const rm_external_draw *draws, int64_t n,
                               rm_external_result *results, rm_error *err);
void rm_ranks_external_invalidate_pages(rm_ranks *ranks, const int32_t *pages, int64_t n);
rm_code rm_ranks_external_fail(rm_ranks *ranks, uint64_t id, rm_error *err);
rm_code rm_ranks_external_preempt(rm_ranks *ranks, uint64_t id, rm_error *err);
rm_code rm_ranks_external_tokens(rm_ranks *ranks, uint64_t id, const int32_t *tokens, int64_t n,
                                 rm_error *err);

// Counts of requests and tokens are summed over replicas, sizes over ranks; times are of the
// slowest rank.
void rm_ranks_statistics(const rm_ranks *ranks, rm_engine_stats *out);
// This process stops calling: other ranks get RM_E_RANK_LOST where they wait for it.
void rm_ranks_abort_groups(rm_ranks *ranks);
// The device whose stream DLPack producers synchronize with for tensors of that ordinal
// (device/ready_streams.h). A view.
int rm_ranks_reads_gpus(const rm_ranks *ranks);
rm_code rm_ranks_ready_queue(rm_ranks *ranks, int ordinal, const rm_device **out, rm_error *err);
rm_engine *rm_ranks_engine(rm_ranks *ranks,
                           int member); // a view; for the manifest, the version and the profile
