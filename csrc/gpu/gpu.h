// gpu.h: the interface of this folder, which contains what only an engine on a GPU needs. The rest
// of csrc computes through the tables of a device (kernels/device.h) and of a comm (comm/comm.h),
// which are the same on the CPU, and calls a GPU by the functions below. Only the files of this
// folder include its other headers. On the CPU the graphs are NULL, a rank has no device groups,
// and the functions that take them do nothing.
#pragma once

#include "model/model.h"
#include "scheduler/plan.h"

// ---------------------------------------------------------------------------------------- devices
// cuda.c: librollmesh_cuda.so (kernels/cuda/rm_cuda.h) is loaded at the first call and stays
// loaded. `library` is its path. RM_E_CONFIG: it is not a CUDA library of this build.

// *count: visible devices; −1: no driver; −2: the driver is older than the library's CUDA.
rm_code rm_cuda_count(const char *library, int *count, rm_error *err);
// Writes the PCI bus id of a device, which is the same in every process of the machine.
rm_code rm_cuda_bus_id(const char *library, int ordinal, char id[32], rm_error *err);
// Sets *out to the op table of a family, "cuda_fma" or "cuda_mma" (NULL: the first): a view for the
// life of the process. RM_E_CONFIG: no such family.
rm_code rm_cuda_kernels(const char *library, const char *family, const rm_kernels **out,
                        rm_error *err);
// Opens a device. *out is owned, to be closed; the name of its op table includes the architecture.
// RM_E_CONFIG: no such device or family, or no code for this device; RM_E_CAPACITY: no device
// memory for a context; RM_E_DEVICE: CUDA's message.
rm_code rm_cuda_device(const char *library, int ordinal, const char *family, rm_device *out,
                       rm_error *err);

// CUDA IPC loans (rm_cuda.h), on an open device. The owner's process calls make. The reader's
// process calls ordinal, then open, which sets block and bytes, and close after all reads.
// RM_E_UNSUPPORTED_TENSOR: the allocation around `address` cannot be lent; RM_E_CONFIG: the bus id
// is not that of a visible device; RM_E_DEVICE: the handle cannot be opened.
rm_code rm_cuda_make_loan(const char *library, const rm_device *device, const void *address,
                          rm_device_loan *out, rm_error *err);
rm_code rm_cuda_ordinal(const char *library, const char *bus, int *ordinal, rm_error *err);
rm_code rm_cuda_open_loan(const char *library, const rm_device *device, rm_device_loan *loan,
                          rm_error *err);
rm_code rm_cuda_close_loan(const char *library, const rm_device *device, void *block,
                           rm_error *err);

// ---------------------------------------------------------------------------------- ready streams
// ready_streams.c: one stream for each CUDA device, to wait until a tensor is ready. A DLPack
// producer gets a stream and makes it wait for the producer's pending writes; the engine then waits
// for that stream. A device that the engine does not use is opened at its first tensor. Only the
// thread that owns the engine calls these functions.
enum { RM_MAX_GPUS = 64 };

typedef struct rm_ready_streams {
  char *library; // owned; NULL: a CPU engine, which reads no GPU tensors
  const rm_device *own[RM_MAX_GPUS]; // [ordinal] views: the engine's devices
  rm_device opened[RM_MAX_GPUS]; // [ordinal] owned; zeros: not opened
} rm_ready_streams;

// Called on a zeroed struct. library NULL: a CPU engine.
rm_code rm_ready_streams_init(rm_ready_streams *streams, const char *library, rm_error *err);
void rm_ready_streams_destroy(rm_ready_streams *streams); // safe on a zeroed struct
// Sets *out to a view of the device. RM_E_CONFIG: no such device; RM_E_DEVICE: it cannot be opened.
rm_code rm_ready_streams_find(rm_ready_streams *streams, int ordinal, const rm_device **out,
                              rm_error *err);
// Waits until the producer's writes are complete. Called after find with the same ordinal.
rm_code rm_ready_streams_wait(rm_ready_streams *streams, int ordinal, rm_error *err);

// ---------------------------------------------------------------------------------- device groups
// device_comms.c: a group for device memory beside each host group of a rank, with the same ranks:
// staged through the host group (staged.h), or over NCCL (nccl/nccl.h). Batches, draws, flags and
// votes use the host groups, whose headers detect ranks that differ; NCCL's calls are sent without
// headers and are compared once per step.
// Loads NCCL, which stays loaded. *version: 23203 is 2.32.3. RM_E_CONFIG: no such file, not NCCL,
// or too old.
rm_code rm_nccl_version(const char *path, int *version, rm_error *err);
// Creates rank->device_tp and rank->device_ep; called by all ranks. No effect on the CPU. nccl:
// path of libnccl.so.2, a view during the call; NULL: staged. The caller has checked that all ranks
// have the same version, and that NCCL allows ranks that share a GPU.
rm_code rm_device_comms_create(rm_rank *rank, const rm_device *device, const rm_spec *spec,
                               const rm_model_options *options, const char *nccl, rm_error *err);
void rm_device_comms_destroy(rm_rank *rank);
// Compare the calls of NCCL's groups before a rank waits for the queue: the ep group after a
// forward (if it is not the tp group), the tp group after each lm_head, or after the forward of a
// step without lm_head.
rm_code rm_compare_forward(const rm_rank *rank, rm_error *err);
rm_code rm_compare_outs(const rm_rank *rank, rm_error *err);
// After rm_rank_abort: waits until the device is done, or for a group's timeout.
void rm_device_settle(const rm_rank *rank, const rm_device *device);

// ----------------------------------------------------------------------------------------- graphs
// graphs.c: decode steps as CUDA graphs. Steps in which each row draws one token run the same ops
// at the same addresses for the same number of rows, so a step is captured once and then replayed
// with one launch instead of hundreds. The batch is padded to a captured size. Padding rows do not
// write KV, and their results are ignored. Rows do not depend on each other, so padding does not
// change results.
//
// Ranks capture and replay together, since graphs contain exchanges. Ranks of a tp group have the
// same batches. Across replicas the lockstep group combines the flags of its ranks before each step
// (step/lockstep.c): on whether to replay, on the size (for the most rows), and on whether ranks of
// tokens are computed. A replica without rows replays padding rows only.
typedef struct rm_graphs rm_graphs; // of one rank, used by the thread that uses the device

// *out: owned; NULL on a device that cannot capture, and with most_rows 0. Selects the sizes, up to
// most_rows. rank and device are views.
rm_code rm_graphs_create(const rm_device *device, const rm_rank *rank, int64_t most_rows,
                         rm_graphs **out, rm_error *err);
void rm_graphs_destroy(rm_graphs *graphs);
// Destroys all captured graphs, before memory that they use is freed. Waits for the device.
void rm_graphs_clear(rm_graphs *graphs);

enum {
  RM_GRAPHS_REFUSE = 1, // the plan cannot run as a graph; a plan without rows can
  RM_GRAPHS_TOKEN_RANKS = 2, // some draw needs the rank of its token
  RM_GRAPHS_RESET = 4, // the graphs were cleared since the last agreement
};
int rm_graphs_flags(const rm_graphs *graphs, const rm_plan *plan);
// Takes the flags of all ranks, combined by or, and the largest n_rows of their plans. Returns the
// number of rows to which all ranks pad their step; 0: the step runs without a graph.
int64_t rm_graphs_agree(rm_graphs *graphs, int flags, int64_t most_rows);

// A padded step. Steps with other weights or another size use another graph.
typedef struct rm_graph_step {
  int64_t rows;
  int with_token_ranks;
  uint64_t weights; // number of the store's allocation, not 0
  rm_code (*enqueue)(void *self, rm_error *err); // enqueues the step without waiting
  void *self;
} rm_graph_step;
// Runs the step: calls enqueue, captures it, or replays its graph. Then compares the groups' calls.
rm_code rm_graphs_run(rm_graphs *graphs, const rm_graph_step *step, rm_error *err);
int64_t rm_graphs_replays(const rm_graphs *graphs); // since creation
// Adds the exchanges of replays, which the groups do not count.
void rm_graphs_add_traffic(const rm_graphs *graphs, rm_traffic *traffic);

// ---------------------------------------------------------------------------------------- staging
// staging.c: the copies of a push by the device's pack op. Host tensors go through a
// double-buffered staging buffer: while the device reads one half, the host fills the other. The
// device copies tensors of another GPU into the same halves.
typedef struct rm_staging { // unused on the CPU
  const rm_device *device; // view
  size_t half_bytes; // max bytes of one copy's source
  rm_mirrored_buffer halves; // [2][half_bytes]; owned; created at first use
  rm_mirrored_buffer found; // rm_pack_found of each copy; owned; created at first use
  int half; // the half being filled
  size_t used; // its bytes in use
} rm_staging;

typedef struct rm_staged_tensor { // the source of a copy
  const char *name; // for messages; of `length` bytes
  size_t length;
  int ordinal; // CUDA device whose memory holds it; −1: the host
} rm_staged_tensor;

enum { RM_STAGED_COPIES = 4096 }; // most copies between two waits for the device
size_t rm_staging_bytes(const rm_staging *staging); // device memory that it takes once used
void rm_staging_free(rm_staging *staging); // the device must be idle
rm_code rm_staging_open(rm_staging *staging, rm_error *err); // no effect on an open one
// Enqueues copy i since the last finish. RM_E_LIMIT, RM_E_LAYOUT: the source cannot be staged;
// RM_E_DEVICE.
rm_code rm_staging_pack(rm_staging *staging, int64_t i, const rm_pack_args *args,
                        const rm_staged_tensor *from, const rm_ctx *ctx, rm_error *err);
// Waits for the n copies, also after an error. *found: their results, a view until the next copy.
rm_code rm_staging_finish(rm_staging *staging, int64_t n, const rm_pack_found **found,
                          rm_error *err);

// ----------------------------------------------------------------------------------- host offload
// host_offload.c: copies a block of device memory to the host (sleep) and back (wake). Both leave
// their source unchanged, and return when the device is done, on failure too.

// *copy: owned by the caller, who frees it with rm_unmap. RM_E_CAPACITY: too little host memory is
// available; RM_E_MEMORY: it could not be mapped; RM_E_DEVICE.
rm_code rm_offload_block(const rm_device *device, const char *block, size_t bytes,
                         const rm_ctx *ctx, char **copy, rm_error *err);
// *block: new, owned by the caller, who frees it with rm_device_free. RM_E_CAPACITY: the device has
// too little free memory.
rm_code rm_restore_block(const rm_device *device, const char *copy, size_t bytes, const rm_ctx *ctx,
                         char **block, rm_error *err);
