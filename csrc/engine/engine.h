// engine.h: the generator in C. An rm_engine owns everything that generates in this process:
//
//   schedulers   one per replica here: requests, KV pages, the plan of a step (scheduler/)
//   workers      one per rank here: device, threads, model, weights, KV cache, runner (step/)
//
// Either all ranks of the mesh are threads of this process, or this process is one rank of several,
// which make the same calls in the same order; requests of other replicas are then counted but not
// stored. A request goes to the replica that has computed its prefix before (for the prefix cache),
// unless that replica has much more work than another; otherwise it goes to the replica with the
// least work. Routing depends only on the history of requests.
//
// Threads: one call at a time, which the extension ensures. Inside a call the engine uses its own
// threads. Order of calls:
//
//   create ─► sync_begin, push, commit ─► add … ─► step … ─► view ─► release ─► destroy
//
// A step: each scheduler makes a plan, each worker computes its replica's plan, and each scheduler
// commits what its first worker returns. Only a step, a commit and create exchange data with other
// ranks. After a failed exchange (comm.h's codes) the engine is unusable: each later step returns
// that error, and results stay readable. Any other failed call changes nothing. If several ranks
// fail, a call returns the first error that was not caused by another rank.
//
// Calls for one request go to its scheduler (scheduler/scheduler.h), which rm_engine_scheduler
// finds.
//
// The logprob of a token depends only on the weights and the tokens before it (docs/numerics.md).
#pragma once

#include "base/attribute.h"
#include "base/team.h"
#include "model/model.h"
#include "scheduler/external_scheduler.h"
#include "weights/store.h"

typedef struct rm_engine rm_engine;

// The comms of a process that is one rank of several; NULL for a group of one rank. The engine owns
// them after create has succeeded.
typedef struct rm_endpoints {
  int32_t index; // this rank
  rm_comm *tp, *ep, *world;
} rm_endpoints;

typedef struct rm_engine_options {
  rm_mesh mesh; // zeros: one rank
  rm_dispatcher dispatcher;
  int sequence_parallel;
  const rm_endpoints *endpoints; // view during create; NULL: all ranks are threads here
  rm_dtype dtype;
  const rm_kernels *kernels; // kernels of the CPU; NULL: rm_kernels_best()
  const char *cuda_library; // NULL: the CPU; else the path of the CUDA library. View during create
  const char *cuda_family; // family of the ops; NULL: gpu/gpu.h selects it
  int cuda_ordinal; // all ranks on this device; −1: rank r on device r modulo the number of devices
  int n_threads; // total of all ranks here; 0: rm_usable_cores, at most RM_MAX_THREADS
  int64_t max_model_len, max_num_seqs;
  int64_t max_num_batched_tokens; // rows of one step: the chunk of a prefill
  int64_t page_size; // a multiple of 16
  // Positions between states that the prefix cache keeps, a multiple of page_size; 0: kv_size.c
  // decides. No effect in models without states.
  int64_t state_interval;
  uint64_t kv_bytes; // bytes of KV cache per rank, at least one page; 0: memory_fraction decides
  // In (0, 1]: share of the device's free memory for two copies of the weights and the KV cache of
  // every rank on the device (kv_size.c).
  double memory_fraction;
  uint64_t seed; // for requests without a seed
  int prefix_caching;
  int profile; // time every op (rm_engine_profile); only on the CPU
  int enforce_eager; // do not capture graphs (gpu/graphs.c)
  // > 0: number of pages of an external scheduler; kv_bytes is ignored. kv_size.c adds states.
  int64_t external_pages;
  int64_t n_eos;
  const int32_t *eos_ids; // [n_eos] view during create; may be NULL if n_eos is 0
  // views during create
  const char *nccl_library; // a libnccl.so.2, for exchanges between GPUs; NULL: through the host
  // A libcublasLt.so.13, for bf16 matmuls on a GPU, whose sums may depend on the batch
  // (model/linear.c); NULL: the matmuls of the op table.
  const char *cublas_library;
} rm_engine_options;

// One row per option that Python passes as it is: its name there, its type, its member here, and
// the bounds of an integer. The extension reads the options by this table and exports the bounds;
// rm_engine_create checks them. max_model_len is exact in float32, in which rope multiplies
// positions.
#define RM_ENGINE_OPTIONS(OPTION) \
  OPTION(threads, I32, n_threads, 0, RM_MAX_THREADS) \
  OPTION(max_model_len, I64, max_model_len, 1, 1 << 24) \
  OPTION(max_num_seqs, I64, max_num_seqs, 1, 1 << 16) \
  OPTION(max_num_batched_tokens, I64, max_num_batched_tokens, 1, 1 << 20) \
  OPTION(block_size, I64, page_size, 16, 1 << 12) \
  OPTION(state_interval, I64, state_interval, 0, 1 << 24) \
  OPTION(kv_bytes, U64, kv_bytes, 0, UINT64_MAX) \
  OPTION(memory_fraction, F64, memory_fraction, 0, 0) \
  OPTION(external_pages, I64, external_pages, 0, INT32_MAX / 2) \
  OPTION(seed, U64, seed, 0, UINT64_MAX) \
  OPTION(enable_prefix_caching, BOOL, prefix_caching, 0, 0) \
  OPTION(profile, BOOL, profile, 0, 0) \
  OPTION(enforce_eager, BOOL, enforce_eager, 0, 0) \
  OPTION(sequence_parallel, BOOL, sequence_parallel, 0, 0) \
  OPTION(cuda_ordinal, I32, cuda_ordinal, -1, INT32_MAX) \
  OPTION(cuda_library, TEXT, cuda_library, 0, 0) \
  OPTION(cuda_family, TEXT, cuda_family, 0, 0) \
  OPTION(nccl_library, TEXT, nccl_library, 0, 0) \
  OPTION(cublas_library, TEXT, cublas_library, 0, 0)

typedef struct rm_option {
  rm_attribute attribute; // of rm_engine_options
  int64_t least;
  uint64_t most;
} rm_option;
#define RM_COUNT_OPTION(...) +1
enum { RM_N_ENGINE_OPTIONS = RM_ENGINE_OPTIONS(RM_COUNT_OPTION) };
extern const rm_option rm_engine_option_table[RM_N_ENGINE_OPTIONS];

// The spec is a view and must outlive the engine; the options are copied.
rm_code rm_engine_create(const rm_spec *spec, const rm_engine_options *options, rm_engine **out,
                         rm_error *err);
void rm_engine_destroy(rm_engine *engine); // safe on NULL
// Aborts the groups of this process. Ranks that wait for this process get RM_E_RANK_LOST.
void rm_engine_abort_groups(rm_engine *engine);

// --------------------------------------------------------------------------------------- requests
// Checks the request, selects its replica and assigns its id. Prompt and lists are views during the
// call, logits_out until the request has finished.
rm_code rm_engine_add(rm_engine *engine, const rm_request *request, uint64_t *id, rm_error *err);
// Returns the scheduler with the request, or any scheduler if the request does not exist. A view.
rm_scheduler *rm_engine_scheduler(const rm_engine *engine, uint64_t id);
// *n_work: rows computed by all replicas here; 0 without requests. external: the step of an external
// scheduler (external_scheduler.h), which needs one rank per process; NULL: the engine schedules.
// All ranks of a tp group get the same external steps, and all ranks of a lockstep group make the
// call, even without requests. RM_E_REQUEST: a request of the external step is not valid, and the
// engine is unchanged. The results mark failed requests.
rm_code rm_engine_step(rm_engine *engine, const rm_external_step *external, int64_t *n_work,
                       rm_error *err);
int64_t rm_engine_unfinished(const rm_engine *engine); // number of requests of this process
// Lists up to `capacity` finished requests that were not released, and returns their number.
int64_t rm_engine_finished(const rm_engine *engine, uint64_t *ids, int64_t capacity);
void rm_engine_reset_prefix_cache(rm_engine *engine);

// Draws from edited logits for an external scheduler.
rm_code rm_engine_external_draw(rm_engine *engine, const rm_external_draws *draws, rm_error *err);

// ---------------------------------------------------------------------------------------- weights
// The calls of sync.h on all ranks here. rm_inflight selects what happens to running requests.
// Steps may run while a staged sync is open. An in-place sync can begin only when all requests have
// finished (RM_E_STATE), and steps are not possible until its commit.
rm_code rm_engine_sync_begin(rm_engine *engine, const rm_sync_options *options, rm_error *err);
// Begins a push; sync_copy copies the next `most` bytes of each rank's shard, or a little more.
// *is_done: all ranks have copied all of it; the entries and their list are views until then. If
// one rank fails, the push is undone on all ranks. Steps may run between two copies.
rm_code rm_engine_sync_push(rm_engine *engine, const rm_entry *const *entries, int64_t n,
                            rm_error *err);
rm_code rm_engine_sync_copy(rm_engine *engine, int64_t most, int *is_done, rm_error *err);
void rm_engine_sync_undo(rm_engine *engine); // undoes the last push on all ranks here
// report (optional): the bytes read by all ranks here, and the times of the slowest rank.
rm_code rm_engine_sync_commit(rm_engine *engine, rm_inflight inflight, rm_sync_report *report,
                              rm_error *err);
void rm_engine_sync_abort(rm_engine *engine);

// Sleep and wake by part; no effect on a part that is already asleep (or awake). Weights cannot
// sleep while a sync is open, and need a sync after wake. When KV sleeps, running requests are
// preempted and recomputed after wake; a sync may run meanwhile. With RM_SLEEP_OFFLOAD the weights
// are copied to host memory and serve again after wake; on the CPU they stay in place. Without it,
// weights that were offloaded before are discarded.
//
// If several processes sleep or wake together, offload_weights is called on all of them first, and
// free_offloaded after all are awake. In between, sleep and wake do not allocate host memory, so
// they cannot fail and can be undone.
enum { RM_PART_WEIGHTS = 1, RM_PART_KV = 2, RM_SLEEP_OFFLOAD = 4 };
rm_code rm_engine_sleep(rm_engine *engine, unsigned parts, rm_error *err);
rm_code rm_engine_wake(rm_engine *engine, unsigned parts, rm_error *err);
size_t rm_engine_offload_bytes(const rm_engine *engine); // host memory that offload_weights needs
// RM_E_CAPACITY, RM_E_MEMORY: the host has too little memory.
rm_code rm_engine_offload_weights(rm_engine *engine, rm_error *err);
void rm_engine_free_offloaded(rm_engine *engine); // no effect while the weights sleep

// Whether the ranks here are on GPUs. ready_queue: the device whose stream DLPack producers
// synchronize with for tensors of an ordinal (gpu/ready_streams.c); a view.
int rm_engine_reads_gpus(const rm_engine *engine);
rm_code rm_engine_ready_queue(rm_engine *engine, int ordinal, const rm_device **out, rm_error *err);

// ------------------------------------------------------------------------------------- statistics
// Counts of requests and tokens are summed over the replicas here, sizes over the ranks. Exchanges
// and times inside workers are those of the rank with the largest value.
typedef struct rm_engine_stats {
  int64_t version; // −1: not synced
  int64_t waiting, running, steps, rows, generated_tokens, prompt_tokens, cached_tokens;
  int64_t preemptions;
  int64_t replays; // steps that replayed captured graphs
  int64_t kv_pages, kv_pages_free, prefix_hits, prefix_misses, evictions;
  int64_t states, states_free, state_evictions; // of sequences; 0 in models without states
  uint64_t weight_bytes, kv_bytes, workspace_bytes;
  int n_threads;
  unsigned asleep;
  const char *isa, *family, *device;
  double forward_seconds, schedule_seconds, commit_seconds;
  uint64_t comm_bytes; // sent to other ranks
  int64_t comm_calls; // exchanges
  double comm_seconds; // time inside exchanges, without those of captured graphs
} rm_engine_stats;
void rm_engine_statistics(const rm_engine *engine, rm_engine_stats *out);

rm_mesh rm_engine_mesh(const rm_engine *engine); // of all ranks
// Views of the first rank here.
rm_profile *rm_engine_profile(rm_engine *engine); // since its reset; NULL without options.profile
rm_store *rm_engine_store(const rm_engine *engine); // to read its fields; not for syncing
