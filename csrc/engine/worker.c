// worker.c: creation and destruction of one rank: its device, threads, model, weights, runner and
// KV cache.
#include "base/control_groups.h"
#include "engine/state.h"

static rm_code open_gpu(rm_worker *worker, char card[32]) {
  const rm_engine_options *options = &worker->engine->options;
  const char *library = options->cuda_library;
  int ordinal = options->cuda_ordinal, count = 0;
  if (ordinal < 0) {
    RM_TRY(rm_cuda_count(library, &count, &worker->err));
    ordinal = count > 0 ? worker->index % count : 0;
  }
  RM_TRY(rm_cuda_device(library, ordinal, options->cuda_family, &worker->gpu, &worker->err));
  RM_TRY(rm_cuda_bus_id(library, ordinal, card, &worker->err));
  worker->device = &worker->gpu;
  return RM_OK;
}

static rm_code open_cpu(rm_worker *worker) {
  const rm_kernels *kernels = worker->engine->options.kernels;
  if (worker->engine->options.profile) {
    if (!(worker->profile = rm_alloc(1, sizeof *worker->profile)))
      return rm_fail(&worker->err, RM_E_MEMORY, "no memory for the profile");
    rm_profile_init(worker->profile, kernels);
    kernels = &worker->profile->table;
  }
  worker->cpu = rm_device_cpu(kernels);
  worker->device = &worker->cpu;
  return RM_OK;
}

static void init_runner(rm_worker *worker) {
  const rm_engine_options *options = &worker->engine->options;
  const rm_runner_options runner = {
      .spec = worker->engine->spec,
      .device = worker->device,
      .model = {.dtype = options->dtype,
                .max_rows = options->max_num_batched_tokens,
                .max_positions = options->max_model_len,
                .page_size = options->page_size,
                .profile = worker->profile,
                .cublas_library = options->cublas_library,
                .rank = &worker->runner.rank},
      .max_num_seqs = options->max_num_seqs,
      .max_pages = worker->scheduler->max_pages,
      .keeps_records = (worker - worker->engine->workers) % worker->engine->per_replica == 0,
      .compares_batches = options->endpoints != NULL,
      .enforce_eager = options->enforce_eager,
  };
  rm_runner_init(&worker->runner, &runner);
}

static rm_code create_team(rm_worker *worker) {
  const int n_workers = worker->engine->n_workers, usable = rm_usable_cores("");
  int n = worker->engine->options.n_threads;
  if (n_workers > 1) n = n > n_workers ? n / n_workers : 1;
  if (!n) n = usable < RM_MAX_THREADS ? usable : RM_MAX_THREADS;
  return rm_team_create(n, &worker->team, &worker->err);
}

static rm_code create_cache(rm_worker *worker) {
  RM_TRY(rm_kv_size(worker, &worker->room, &worker->err));
  const rm_cache_bytes bytes = rm_model_cache_bytes(worker->model);
  worker->kv_bytes =
      (size_t)worker->room.n_pages * bytes.page + (size_t)worker->room.n_states * bytes.state;
  return rm_worker_map_cache(worker);
}

rm_code rm_worker_map_cache(rm_worker *worker) {
  rm_cache *cache = &worker->runner.cache;
  const rm_kv_room *room = &worker->room;
  RM_TRY(rm_device_alloc(worker->device, worker->kv_bytes, "the KV cache", &cache->pages,
                         &worker->err));
  cache->n_pages = room->n_pages;
  cache->n_states = room->n_states;
  cache->states =
      (char *)cache->pages + (size_t)room->n_pages * rm_model_cache_bytes(worker->model).page;
  return RM_OK;
}

static rm_code create_parts(rm_worker *worker) {
  const rm_engine_options *options = &worker->engine->options;
  rm_runner *runner = &worker->runner;
  const rm_spec *spec = worker->engine->spec;
  const rm_placement placement = rm_placement_of(spec, &runner->rank.mesh, worker->index);
  const int plain = options->cublas_library != NULL;
  rm_error *err = &worker->err;
  RM_TRY(create_team(worker));
  RM_TRY(rm_device_comms_create(&runner->rank, worker->device, spec, &runner->options.model,
                                options->nccl_library, err));
  RM_TRY(rm_params_create(spec, &placement, options->dtype, plain, &worker->params, err));
  RM_TRY(rm_model_create(worker->params, worker->device, worker->team, &runner->options.model,
                         &worker->model, err));
  RM_TRY(rm_store_create(worker->params, worker->device, worker->team, &worker->store, err));
  RM_TRY(rm_runner_create(runner, worker->model, worker->store, &worker->scheduler->plan, err));
  return create_cache(worker); // last, since it may take all memory that is left
}

rm_code rm_worker_create(rm_worker *worker, void *unused) {
  (void)unused;
  const rm_engine_options *options = &worker->engine->options;
  char card[32] = "";
  worker->runner.rank = (rm_rank){
      .mesh = options->mesh,
      .index = worker->index,
      .tp = worker->groups[RM_GROUP_TP],
      .ep = worker->groups[RM_GROUP_EP],
      .world = worker->groups[RM_GROUP_WORLD],
      .dispatcher = options->dispatcher,
      .sequence_parallel = options->sequence_parallel,
  };
  rm_code code = options->cuda_library ? open_gpu(worker, card) : open_cpu(worker);
  if (!code) {
    worker->memory = rm_memory_name(card);
    const rm_entered saved = rm_enter(worker);
    init_runner(worker);
    code = create_parts(worker);
    rm_leave(saved);
  }
  if (code) rm_rank_abort(&worker->runner.rank, code); // other ranks may wait for this one
  return code;
}

rm_code rm_worker_destroy(rm_worker *worker, void *unused) {
  (void)unused;
  if (!worker->device) return RM_OK;
  rm_runner_destroy(&worker->runner);
  rm_device_free(worker->device, worker->runner.cache.pages, worker->kv_bytes);
  rm_store_destroy(worker->store);
  rm_model_destroy(worker->model);
  rm_params_destroy(worker->params);
  rm_device_comms_destroy(&worker->runner.rank);
  rm_team_destroy(worker->team);
  rm_free(worker->profile);
  return RM_OK;
}
