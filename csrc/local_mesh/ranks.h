// ranks.h: the ranks of a mesh that live in this process, an engine each, driven as one. It is what the extension talks to, and has
// the engine's calls (engine.h says what they mean); with a mesh of one rank it is the engine.
//
// There are two ways to be on a mesh. All ranks are threads of this process: then a call goes to all engines that it concerns at once,
// each on a thread of its own with its own team, and is over when all are done. Or this process is one rank of several processes,
// which all make the same calls in the same order: then a call is this rank's part of it, requests of other replicas are counted
// and not kept (rm_ranks_has says whose they are), and what a call gives is of this rank alone.
// Within a replica all ranks get the same requests; a request is put to one replica when it is added:
// where its first tokens have been before, unless that replica has much more to do than another, else where least was asked for.
// What decides is the list of requests so far and nothing that has to do with time.
//
// When ranks fail differently the error is that of the first rank that did not merely hear of another's.
#pragma once

#include "engine/engine.h"

typedef struct rm_ranks rm_ranks;

// What ties one process to the others. The comms pass to the ranks when create succeeds; NULL where the group has one rank.
typedef struct rm_ends {
  int32_t index;                // this rank
  rm_comm *tp, *ep, *world;
} rm_ends;

typedef struct rm_ranks_options {
  rm_engine_options engine;     // of each rank, but for `rank` and `memory`; n_threads is shared out over the ranks
  rm_mesh mesh;
  rm_dispatcher dispatcher;
  int sequence_parallel;
  const char *cuda_library;     // NULL: the CPU; else the ranks run on CUDA devices, by this library
  int cuda_ordinal;             // all on this one; −1: each rank on that of its number, counted round
  const char *cuda_family;      // of the ops; NULL: device/cuda.h's choice
  const rm_ends *ends;          // NULL: all ranks are threads here; else this process is one rank
} rm_ranks_options;

// The spec is a view and must outlive the ranks; the options are copied.
rm_code rm_ranks_create(const rm_spec *spec, const rm_ranks_options *options, rm_ranks **out, rm_error *err);
void rm_ranks_destroy(rm_ranks *ranks);   // safe on NULL
rm_mesh rm_ranks_mesh(const rm_ranks *ranks);            // all of it, whoever of its ranks are here

rm_code rm_ranks_add(rm_ranks *ranks, const rm_request *request, uint64_t *id, rm_error *err);
int rm_ranks_has(const rm_ranks *ranks, uint64_t id);     // it is kept here
// Where experts span replicas a rank without requests has to step on while another has some: *more says so. Otherwise *more is
// whether a request of this process is unfinished and not paused.
rm_code rm_ranks_step(rm_ranks *ranks, int64_t *n_work, int *more, rm_error *err);
int64_t rm_ranks_unfinished(const rm_ranks *ranks);       // of those kept here
int64_t rm_ranks_finished(rm_ranks *ranks, uint64_t *ids, int64_t capacity);
uint64_t rm_ranks_next_finished(const rm_ranks *ranks);
rm_code rm_ranks_view(const rm_ranks *ranks, uint64_t id, rm_request_view *out, rm_error *err);
rm_code rm_ranks_sample_view(const rm_ranks *ranks, uint64_t id, int32_t sample, rm_sample_view *out, rm_error *err);
rm_code rm_ranks_release(rm_ranks *ranks, uint64_t id, rm_error *err);
rm_code rm_ranks_abort(rm_ranks *ranks, uint64_t id, rm_error *err);
rm_code rm_ranks_stop_sample(rm_ranks *ranks, uint64_t id, int32_t sample, int64_t n_tokens, rm_error *err);
void rm_ranks_pause(rm_ranks *ranks, int paused);
void rm_ranks_reset_prefix_cache(rm_ranks *ranks);

rm_code rm_ranks_sync_begin(rm_ranks *ranks, const rm_sync_options *options, rm_error *err);
rm_code rm_ranks_sync_check(rm_ranks *ranks, const char *name, size_t length, const rm_tensor *tensor, rm_error *err);
// Each rank copies its part. When one cannot, the tensor is not there on any, and may be sent again.
rm_code rm_ranks_sync_push(rm_ranks *ranks, const char *name, size_t length, const rm_tensor *tensor, rm_error *err);
// The same for many at once, which spares the ranks a meeting after each: all of them are there afterwards, or none on any rank.
rm_code rm_ranks_sync_push_all(rm_ranks *ranks, const rm_entry *entries, int64_t n, rm_error *err);
// bytes of the report: read by all ranks together; the times are the longest of any.
rm_code rm_ranks_sync_commit(rm_ranks *ranks, rm_inflight inflight, rm_sync_report *report, rm_error *err);
void rm_ranks_sync_abort(rm_ranks *ranks);
// All ranks or none. What was kept stays after wake, until forgotten or the next sync: other processes may have failed to wake.
rm_code rm_ranks_sleep(rm_ranks *ranks, unsigned parts, rm_error *err);
rm_code rm_ranks_wake(rm_ranks *ranks, unsigned parts, rm_error *err);
size_t rm_ranks_bytes_to_keep(const rm_ranks *ranks);      // of the host, that keep_weights would take
rm_code rm_ranks_keep_weights(rm_ranks *ranks, rm_error *err);
void rm_ranks_forget_kept(rm_ranks *ranks);

// external_scheduler.h's calls, of the one rank that a hosted process has. Requests that are added are its own, whatever the mesh.
rm_code rm_ranks_external_step(rm_ranks *ranks, const rm_external_step *step, rm_external_result *results, int64_t *n_work, rm_error *err);
rm_code rm_ranks_external_draw(rm_ranks *ranks, const rm_external_draw *draws, int64_t n, rm_external_result *results, rm_error *err);
void rm_ranks_external_forget(rm_ranks *ranks, const int32_t *pages, int64_t n);
rm_code rm_ranks_external_fail(rm_ranks *ranks, uint64_t id, rm_error *err);
rm_code rm_ranks_external_preempt(rm_ranks *ranks, uint64_t id, rm_error *err);
rm_code rm_ranks_external_tokens(rm_ranks *ranks, uint64_t id, const int32_t *tokens, int64_t n, rm_error *err);

// Counts of requests and tokens are of all replicas, sizes of all ranks, times of the rank that took longest.
void rm_ranks_statistics(const rm_ranks *ranks, rm_engine_stats *out);
// This process leaves the order of calls that the others make: they get RM_E_RANK_LOST where they wait.
void rm_ranks_give_up(rm_ranks *ranks);
// The device whose stream the producer of a tensor of that CUDA device makes wait (device/ready_queues.h). A view.
int rm_ranks_read_gpus(const rm_ranks *ranks);
rm_code rm_ranks_reader(rm_ranks *ranks, int ordinal, const rm_device **out, rm_error *err);
rm_engine *rm_ranks_engine(rm_ranks *ranks, int member);  // one of those in this process; for the manifest and the version; a view
