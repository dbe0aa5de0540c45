// engine.h: the generator in C. It owns the weights, the KV cache, the requests and their records;
// it has a scheduler (scheduler/) and a runner (step/).
//
// One thread at a time may call it (the Python layer holds the lock); inside a call it uses its own
// thread team. A failed call changes nothing. Order:
//
//   create ─► sync_begin/push/commit ─► add … ─► step … (schedule, forward, commit) ─► result ─►
//   release ─► destroy
//
// On a mesh each rank has an engine. The ranks of a tp group get the same calls in the same order
// and schedule alike; replicas have requests of their own. Only a step and a commit talk to other
// ranks. When that fails (comm.h's codes) the engine is lost: every later step returns that error,
// and results stay readable. local_mesh/ranks.h makes and drives the ranks of one process.
//
// The logprob of a token depends on the weights and the tokens before it only (docs/numerics.md).
#pragma once

#include "model/model.h"
#include "scheduler/external_scheduler.h"
#include "weights/sync.h"

typedef struct rm_engine rm_engine;

typedef struct rm_engine_options {
  rm_dtype dtype;
  const rm_kernels *kernels; // of the CPU; NULL: rm_kernels_best()
  const rm_device
      *device; // NULL: the CPU; else a view, this engine's alone, and `kernels` is ignored
  int n_threads; // 0: rm_usable_cores, at most RM_MAX_THREADS
  int64_t max_model_len, max_num_seqs;
  int64_t max_num_batched_tokens; // rows of one step: the chunk of a prefill
  int64_t page_size; // a multiple of 16
  uint64_t kv_bytes; // of KV cache; at least one page. 0: what memory_fraction leaves
  double
      // in (0, 1], of the device's free memory: for two copies of the weights and the KV cache of
      // every rank
      memory_fraction;
  // there (kv_size.c)
  uint64_t memory; // identifies that memory, equal on ranks that share it (rm_memory_name)
  uint64_t seed; // for requests without one
  int prefix_caching;
  int profile; // time every op (rm_engine_profile); on the CPU only
  int enforce_eager; // capture no graphs (step/graph_replay.h)
  int64_t
      // > 0: an external scheduler with so many pages; kv_bytes is ignored (external_scheduler.h)
      external_pages;
  int64_t n_eos;
  const int32_t *eos_ids; // view during create
  rm_rank rank; // position on a mesh, whose comms are views; zeros: one rank
  // paths and names: views during create
  const char
      *nccl_library; // of a libnccl.so.2, for exchanges between GPUs; NULL: staged through the host
  const char *
      // of a libcublasLt.so.13, for bf16 matmuls on a GPU, whose sums may depend on the batch
      cublas_library;
  // (model/linear.c); NULL: the op table's
  const char
      *nccl_gpu; // identifies this rank's GPU, equal on ranks that share it; NULL: its ordinal
} rm_engine_options;

// The spec is a view and must outlive the engine; the options are copied.
rm_code rm_engine_create(const rm_spec *spec, const rm_engine_options *options, rm_engine **out,
                         rm_error *err);
void rm_engine_destroy(rm_engine *engine);

rm_code rm_engine_add(rm_engine *engine, const rm_request *request, uint64_t *id, rm_error *err);
rm_code rm_engine_check(const rm_engine *engine, const rm_request *request,
                        rm_error *err); // add's checks only
// One step: schedule, forward, commit. *n_work: rows computed; 0 when there is nothing to do (or
// all is paused).
rm_code rm_engine_step(rm_engine *engine, int64_t *n_work, rm_error *err);
// Whether in the last step this rank, or another of its lockstep group, had work.
int rm_engine_had_work(const rm_engine *engine);
int64_t rm_engine_unfinished(const rm_engine *engine);
// Requests finished since the last call, at most capacity of them.
int64_t rm_engine_finished(rm_engine *engine, uint64_t *ids, int64_t capacity);
// The request that rm_engine_finished would return next; 0: none.
uint64_t rm_engine_next_finished(const rm_engine *engine);
int rm_engine_has(const rm_engine *engine, uint64_t id); // it was added and not released
rm_code rm_engine_view(const rm_engine *engine, uint64_t id, rm_request_view *out, rm_error *err);
rm_code rm_engine_sample_view(const rm_engine *engine, uint64_t id, int32_t sample,
                              rm_sample_view *out, rm_error *err);
rm_code rm_engine_release(rm_engine *engine, uint64_t id, rm_error *err); // of a finished one
rm_code rm_engine_abort(rm_engine *engine, uint64_t id,
                        rm_error *err); // what was generated stays readable
// Ends one sample at n_tokens (a stop string matched there); finish = stop. Also of one that has
// ended by itself meanwhile; RM_E_STATE for one that was aborted or failed.
rm_code rm_engine_stop_sample(rm_engine *engine, uint64_t id, int32_t sample, int64_t n_tokens,
                              rm_error *err);

// With an external scheduler (options.external_pages; external_scheduler.h): its step instead of
// rm_engine_step, its draws, and the scheduler for the calls between steps. All ranks of a tp group
// get the same steps; all ranks of a lockstep group make the call, also without parts.
// RM_E_REQUEST: a part breaks a rule, and nothing has changed. A part's result says if its request
// has failed.
rm_code rm_engine_external_step(rm_engine *engine, const rm_external_step *step,
                                rm_external_result *results, int64_t *n_work, rm_error *err);
rm_code rm_engine_external_draw(rm_engine *engine, const rm_external_draw *draws, int64_t n,
                                rm_external_result *results, rm_error *err);
rm_scheduler *rm_engine_scheduler(rm_engine *engine);

void rm_engine_pause(rm_engine *engine, int paused); // a paused engine schedules nothing
void rm_engine_reset_prefix_cache(rm_engine *engine);

// Weights: sync.h with the engine's rules on top (rm_inflight says what happens to running
// requests). Steps may go on while a staged sync is open. An in-place sync begins only when no
// request is unfinished (RM_E_STATE), and until its commit there are no weights to step with.
rm_code rm_engine_sync_begin(rm_engine *engine, const rm_sync_options *options, rm_error *err);
rm_code rm_engine_sync_check(rm_engine *engine, const rm_entry *entry, const rm_tensor *tensor,
                             rm_error *err);
rm_code rm_engine_sync_push(rm_engine *engine, const rm_entry *const *entries, int64_t n,
                            rm_error *err);
// RM_E_STATE if requests are unfinished.
rm_code rm_engine_require_idle(const rm_engine *engine, rm_error *err);
rm_code rm_engine_sync_commit(rm_engine *engine, rm_inflight inflight, rm_sync_report *report,
                              rm_error *err);
void rm_engine_sync_abort(rm_engine *engine);

// Sleep by part; no effect on a part that is asleep (awake) already. Weights: unsynced after wake;
// not while a sync is open. KV: running requests are preempted and recomputed after wake; a sync
// may run meanwhile. With RM_SLEEP_OFFLOAD the weights are offloaded to host memory and serve again
// after wake; on the CPU they stay in place. Without it, weights that were offloaded before are
// discarded. A failed call changes nothing. Where several engines sleep or wake together,
// offload_weights is called on all first, and free_offloaded after the last is awake: in between
// sleep and wake need no host memory and cannot fail, so they can be undone.
enum { RM_PART_WEIGHTS = 1, RM_PART_KV = 2, RM_SLEEP_OFFLOAD = 4 };
rm_code rm_engine_sleep(rm_engine *engine, unsigned parts, rm_error *err);
rm_code rm_engine_wake(rm_engine *engine, unsigned parts, rm_error *err);
size_t rm_engine_offload_bytes(const rm_engine *engine); // host memory that offload_weights takes
rm_code rm_engine_offload_weights(
    rm_engine *engine, rm_error *err); // RM_E_CAPACITY, RM_E_MEMORY: the host has no room
void rm_engine_free_offloaded(
    rm_engine *engine); // frees the copy; no effect while the weights are asleep

typedef struct rm_engine_stats {
  int64_t version; // −1: not synced
  int64_t waiting, running, steps, rows, generated_tokens, prompt_tokens, cached_tokens,
      preemptions;
  int64_t replays; // steps that were captured graphs
  int64_t kv_pages, kv_pages_free, prefix_hits, prefix_misses, evictions;
  uint64_t weight_bytes, kv_bytes, workspace_bytes;
  int n_threads;
  unsigned asleep;
  const char *isa, *family, *device;
  double forward_seconds, schedule_seconds, commit_seconds;
  uint64_t comm_bytes; // sent to other ranks
  int64_t comm_calls; // exchanges
  double comm_seconds; // inside exchanges, without those of captured graphs
} rm_engine_stats;
void rm_engine_statistics(const rm_engine *engine, rm_engine_stats *out);
// What was timed since the last reset; NULL without options.profile. Not during a step.
rm_profile *rm_engine_profile(rm_engine *engine);
const rm_params *rm_engine_params(const rm_engine *engine);
rm_store *rm_engine_store(rm_engine *engine); // for the version and digest; not for syncing
