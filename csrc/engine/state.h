// state.h: the structs of an engine, for the files of this folder. Calls that take time or exchange
// data run on all workers in parallel (rm_run_workers); other calls run on one worker after
// another.
#pragma once

#include "base/memory.h"
#include "clock.h"
#include "engine/engine.h"
#include "engine/groups.h"
#include "gpu/gpu.h"
#include "step/runner.h"

enum { N_GROUPS = RM_GROUP_WORLD + 1 }; // groups of the model
enum { PREFIX_SLOTS = 4096 }; // prefixes of prompts, for routing

typedef struct rm_kv_room {
  int64_t n_pages, n_states, state_interval; // as in rm_scheduler_open_pages
} rm_kv_room;

typedef struct rm_worker { // one rank of this process
  rm_engine *engine; // view
  rm_scheduler *scheduler; // view: the scheduler of its replica
  int32_t index; // number of the rank
  rm_device gpu, cpu; // owned, like all fields below; gpu: zeros on the CPU
  const rm_device *device; // one of the two; NULL until it is open
  uint64_t memory; // name of the device's memory, equal on ranks that share it
  rm_comm *groups[N_GROUPS];
  rm_profile *profile; // NULL without options.profile
  rm_team *team;
  rm_params *params;
  rm_model *model;
  rm_store *store;
  rm_runner runner;
  rm_kv_room room;
  size_t kv_bytes; // bytes of runner.cache: the pages, then the states
  double forward_seconds; // since creation
  // of the last job
  rm_code code;
  rm_error err;
  rm_progress progress;
} rm_worker;

typedef struct rm_prefix {
  uint64_t hash;
  int32_t replica;
} rm_prefix;

struct rm_engine {
  // set at creation
  const rm_spec *spec; // view
  rm_engine_options options; // its pointers but eos_ids are valid during create only
  int n_workers; // ranks in this process: all, or one
  int n_replicas, per_replica; // replicas here, and their ranks here: all ranks, or one of them
  int own; // the replica of workers[0]
  rm_team *team; // owned, a thread for each worker; NULL if there is one worker
  rm_region *region; // owned
  void *memory; // owned: the arrays below and eos_ids
  rm_scheduler *schedulers; // [n_replicas]
  rm_worker *workers; // [n_workers]; the workers of replica d begin at d·per_replica
  rm_ready_streams ready_streams; // owned
  // routing
  int64_t *assigned; // [dp] tokens assigned to each replica so far
  rm_prefix *prefixes; // [PREFIX_SLOTS]
  uint64_t next_id;
  // state
  unsigned asleep; // parts that are asleep
  rm_error lost; // RM_OK, or why this engine can no longer step
  // counts since creation
  int64_t steps, rows;
  double schedule_seconds, commit_seconds;
};

static inline rm_worker *rm_first_worker(const rm_engine *engine, int replica) {
  return &engine->workers[replica * engine->per_replica];
}

// State of the calling thread that a call into a worker changes and restores: the floating-point
// environment and the current device.
typedef struct rm_entered {
  uint32_t fp;
  const rm_device *device; // NULL: the worker had none yet
  int before; // the argument of device->leave
} rm_entered;
static inline rm_entered rm_enter(const rm_worker *worker) {
  const rm_device *device = worker->device;
  return (rm_entered){rm_fp_enter(), device, device ? device->enter(device->self) : 0};
}
static inline void rm_leave(rm_entered entered) {
  if (entered.device) entered.device->leave(entered.device->self, entered.before);
  rm_fp_leave(entered.fp);
}

// Runs `call` on all workers in parallel, each entered on its own thread, and returns one worker's
// error. A call stores its error in worker->err; the workers' codes stay until the next job.
typedef rm_code (*rm_worker_call)(rm_worker *worker, void *arg);
rm_code rm_run_workers(rm_engine *engine, rm_worker_call call, void *arg, rm_error *err);

// step.c: RM_E_STATE if one of the parts is asleep; RM_E_NOT_SYNCED without weights. `before`: "a
// step".
rm_code rm_check_awake(const rm_engine *engine, unsigned parts, const char *before, rm_error *err);
rm_code rm_check_serving(const rm_engine *engine, unsigned parts, const char *before,
                         rm_error *err);

// worker.c. create: index, groups, engine and scheduler are set. All workers create and destroy
// together: they connect and measure memory together, and they leave NCCL's groups together. Both
// are calls of rm_run_workers without an argument.
rm_code rm_worker_create(rm_worker *worker, void *unused);
// Returns RM_OK. Safe on a zeroed worker; groups and gpu stay.
rm_code rm_worker_destroy(rm_worker *worker, void *unused);

// kv_size.c: the sizes of the KV cache. With memory_fraction all ranks of the mesh call it together,
// after everything but the cache was allocated; all get the same sizes or the same error.
rm_code rm_kv_size(rm_worker *worker, rm_kv_room *out, rm_error *err);
// worker.c: maps the cache, after creation or sleep.
rm_code rm_worker_map_cache(rm_worker *worker);
