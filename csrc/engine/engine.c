// engine.c: creation and destruction of an engine, jobs on all its workers, and statistics.
#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/fields.h"
#include "engine/state.h"

// ------------------------------------------------------------------------------------------- jobs
typedef struct job {
  rm_engine *engine;
  rm_worker_call call;
  void *arg;
} job;

// The team has a thread for each worker.
static void run_worker(void *arg, int thread, int n_threads) {
  const job *it = arg;
  rm_worker *worker = &it->engine->workers[thread];
  (void)n_threads;
  const rm_entered saved = rm_enter(worker);
  worker->code = it->call(worker, it->arg);
  rm_leave(saved);
}

static int is_consequence(rm_code code) { // of another rank's error
  return code == RM_E_RANK_LOST || code == RM_E_SYNC_ABORTED;
}

// If ranks have lost each other, reports the first rank's message and another one that differs.
static void report(const rm_engine *engine, const rm_worker *worst, rm_error *err) {
  const char *text = rm_error_message(&worst->err);
  for (int w = 0; w < engine->n_workers && worst->code == RM_E_RANK_LOST; w++) {
    const rm_worker *other = &engine->workers[w];
    if (other->code != worst->code || !strcmp(rm_error_message(&other->err), text)) continue;
    rm_fail(err, worst->code, "rank %d: %.300s; rank %d: %.300s", worst->index, text, other->index,
            rm_error_message(&other->err));
    return;
  }
  rm_fail(err, worst->code, "%s", text);
}

rm_code rm_run_workers(rm_engine *engine, rm_worker_call call, void *arg, rm_error *err) {
  job it = {engine, call, arg};
  const rm_worker *worst = NULL;
  if (engine->team) rm_team_run(engine->team, run_worker, &it);
  else run_worker(&it, 0, 1); // at most one worker exists
  for (int w = 0; w < engine->n_workers; w++) {
    const rm_worker *worker = &engine->workers[w];
    if (worker->code && (!worst || (is_consequence(worst->code) && !is_consequence(worker->code))))
      worst = worker;
  }
  if (!worst) return RM_OK;
  const rm_code code = worst->code;
  report(engine, worst, err);
  for (int w = 0; w < engine->n_workers; w++) rm_error_clear(&engine->workers[w].err);
  return code;
}

// ---------------------------------------------------------------------------------------- options
#define ROW(name, type, member, least, most) \
  {RM_ATTRIBUTE_AS(rm_engine_options, type, name, member), least, most},
const rm_option rm_engine_option_table[RM_N_ENGINE_OPTIONS] = {RM_ENGINE_OPTIONS(ROW)};

static rm_code check_ranges(const rm_spec *spec, const rm_engine_options *options, rm_error *err) {
  for (int i = 0; i < RM_N_ENGINE_OPTIONS; i++) {
    const rm_option *option = &rm_engine_option_table[i];
    const void *member = (const char *)options + option->attribute.offset;
    int64_t value;
    if (option->attribute.type == RM_ATTR_I32) value = *(const int *)member;
    else if (option->attribute.type == RM_ATTR_I64) value = *(const int64_t *)member;
    else continue;
    RM_TRY(rm_check_range(err, RM_E_CONFIG, option->attribute.name, value, option->least,
                          (int64_t)option->most));
  }
  for (int64_t i = 0; i < options->n_eos; i++)
    RM_FAIL_IF(options->eos_ids[i] < 0 || options->eos_ids[i] >= spec->vocab_size, RM_E_CONFIG,
               "eos_token_id: expected 0 to %ld, got %d", spec->vocab_size - 1,
               options->eos_ids[i]);
  return RM_OK;
}

// Whether the mesh fits the model and the dispatcher.
static rm_code check_mesh(const rm_spec *spec, const rm_engine_options *options, rm_error *err) {
  const rm_mesh *mesh = &options->mesh;
  RM_TRY(rm_placement_check(spec, mesh, err));
  RM_FAIL_IF(mesh->tp > RM_MAX_TP, RM_E_CONFIG, "tp: expected at most %d, got %d", RM_MAX_TP,
             mesh->tp);
  RM_FAIL_IF(mesh->ep > 1 && options->dispatcher == RM_DISPATCH_DISABLED, RM_E_CONFIG,
             "ep_backend: expected a token dispatcher for ep=%d, got \"disabled\"", mesh->ep);
  RM_FAIL_IF(mesh->ep > 1 && mesh->ep != mesh->tp &&
                 options->dispatcher == RM_DISPATCH_LOCAL_ALLREDUCE,
             RM_E_CONFIG, "ep_backend=\"%s\": expected ep=tp, got ep=%d and tp=%d",
             rm_dispatcher_name(options->dispatcher), mesh->ep, mesh->tp);
  return RM_OK;
}

static rm_code check_options(const rm_spec *spec, const rm_engine_options *options, rm_error *err) {
  const rm_endpoints *ends = options->endpoints;
  const int world = rm_mesh_world(&options->mesh);
  // The caller makes these from names, groups and devices that it has checked.
  assert(!ends || (ends->index >= 0 && ends->index < world && !ends->world == (world == 1)));
  assert(options->dispatcher >= 0 && options->dispatcher < RM_N_DISPATCHER);
  assert(options->dtype == RM_BF16 || options->dtype == RM_F32);
  assert(options->cuda_library || !(options->nccl_library || options->cublas_library));
  assert(options->dtype == RM_BF16 || !options->cublas_library);
  RM_TRY(check_mesh(spec, options, err));
  RM_FAIL_IF(options->external_pages > 0 && !ends && world > 1, RM_E_CONFIG,
             "external_pages: expected one rank in each process, got %d in this one", world);
  RM_TRY(check_ranges(spec, options, err));
  RM_FAIL_IF(options->page_size % 16, RM_E_CONFIG, "block_size: expected a multiple of 16, got %ld",
             options->page_size);
  RM_FAIL_IF(options->state_interval % options->page_size, RM_E_CONFIG,
             "state_interval: expected a multiple of block_size=%ld, got %ld", options->page_size,
             options->state_interval);
  return RM_OK;
}

// --------------------------------------------------------------------------------------- creation
static rm_code connect_threads(rm_engine *engine, rm_error *err) {
  const int n = engine->n_workers;
  const rm_region_options region = {
      .world = n, .n_groups = N_GROUPS, .buffer_bytes = RM_GROUP_BUFFER_BYTES, .timeout = 600};
  RM_TRY(rm_team_create(n, &engine->team, err));
  RM_TRY(rm_region_create(&region, &engine->region, err));
  for (int i = 0; i < n * N_GROUPS; i++)
    RM_TRY(rm_groups_comm(engine->region, &engine->options.mesh, i % N_GROUPS, i / N_GROUPS,
                          &engine->workers[i / N_GROUPS].groups[i % N_GROUPS], err));
  return RM_OK;
}

static rm_code create_schedulers(rm_engine *engine, rm_error *err) {
  const rm_engine_options *options = &engine->options;
  const rm_scheduler_options scheduler = {
      .limits = {.vocab = engine->spec->vocab_size,
                 .max_model_len = options->max_model_len,
                 .page_size = options->page_size,
                 .routed_per_token = engine->spec->n_moe_layers * engine->spec->top_k,
                 .external = options->external_pages > 0,
                 .eos_ids = options->eos_ids,
                 .n_eos = options->n_eos,
                 .engine_seed = options->seed},
      .max_num_seqs = options->max_num_seqs,
      .max_num_batched_tokens = options->max_num_batched_tokens,
      .prefix_caching = options->prefix_caching,
      .external_pages = options->external_pages,
  };
  for (int d = 0; d < engine->n_replicas; d++)
    RM_TRY(rm_scheduler_create(&engine->schedulers[d], &scheduler, err));
  return RM_OK;
}

// GPUs of different architectures round differently. Processes compare families when they connect.
static rm_code check_families(const rm_engine *engine, rm_error *err) {
  const rm_device *first = engine->workers[0].device;
  for (int w = 1; w < engine->n_workers; w++) {
    const rm_device *device = engine->workers[w].device;
    RM_FAIL_IF(strcmp(device->kernels->family, first->kernels->family) != 0, RM_E_MESH_MISMATCH,
               "family: expected %s on all ranks, as on rank 0 (%s), got %s on rank %d (%s)",
               first->kernels->family, first->name, device->kernels->family, w, device->name);
  }
  return RM_OK;
}

static rm_code allocate(rm_engine *engine, rm_error *err) {
  const rm_engine_options *options = &engine->options;
  int32_t *eos = NULL;
  const rm_field fields[] = {
      RM_FIELD(eos, options->n_eos),
      RM_FIELD(engine->schedulers, engine->n_replicas),
      RM_FIELD(engine->workers, engine->n_workers),
      RM_FIELD(engine->assigned, options->mesh.dp),
      RM_FIELD(engine->prefixes, PREFIX_SLOTS),
  };
  const size_t n = sizeof fields / sizeof *fields, bytes = rm_fields_bytes(fields, n);
  if (!(engine->memory = rm_alloc(1, bytes))) return rm_no_memory(err, "the engine", bytes);
  rm_fields_place(fields, n, engine->memory);
  if (eos) memcpy(eos, options->eos_ids, (size_t)options->n_eos * sizeof *eos);
  engine->options.eos_ids = eos;
  for (int w = 0; w < engine->n_workers; w++) {
    rm_worker *worker = &engine->workers[w];
    worker->engine = engine;
    worker->scheduler = &engine->schedulers[w / engine->per_replica];
    worker->index = w + (options->endpoints ? options->endpoints->index : 0);
  }
  return RM_OK;
}

static rm_code create_parts(rm_engine *engine, rm_error *err) {
  const rm_endpoints *ends = engine->options.endpoints;
  const rm_kv_room *room = &engine->workers[0].room;
  RM_TRY(create_schedulers(engine, err));
  if (ends) {
    rm_comm *const groups[N_GROUPS] = {ends->tp, ends->ep, ends->world};
    memcpy(engine->workers[0].groups, groups, sizeof groups);
  } else if (engine->n_workers > 1) {
    RM_TRY(connect_threads(engine, err));
  }
  RM_TRY(rm_ready_streams_init(&engine->ready_streams, engine->options.cuda_library, err));
  RM_TRY(rm_run_workers(engine, rm_worker_create, NULL, err));
  RM_TRY(check_families(engine, err));
  for (int d = 0; d < engine->n_replicas; d++)
    RM_TRY(rm_scheduler_open_pages(&engine->schedulers[d], room->n_pages, room->n_states,
                                   room->state_interval, err));
  for (int w = engine->n_workers - 1; w >= 0; w--) {
    const rm_device *gpu = &engine->workers[w].gpu;
    if (gpu->self && gpu->ordinal < RM_MAX_GPUS) engine->ready_streams.own[gpu->ordinal] = gpu;
  }
  return RM_OK;
}

rm_code rm_engine_create(const rm_spec *spec, const rm_engine_options *options, rm_engine **out,
                         rm_error *err) {
  rm_engine_options mine = *options;
  *out = NULL;
  if (!mine.mesh.tp) mine.mesh = rm_rank_alone().mesh;
  if (!mine.cuda_library && !mine.kernels) mine.kernels = rm_kernels_best();
  RM_TRY(check_options(spec, &mine, err));
  RM_FAIL_IF(!mine.cuda_library && !mine.kernels, RM_E_CONFIG,
             "RM_ISA: expected an instruction set of this build, got %.40s",
             getenv("RM_ISA") ? getenv("RM_ISA") : "");
  rm_engine *engine = rm_alloc(1, sizeof *engine);
  RM_FAIL_IF(!engine, RM_E_MEMORY, "no memory for the engine");
  const rm_endpoints *ends = options->endpoints;
  engine->spec = spec;
  engine->options = mine;
  engine->n_workers = ends ? 1 : rm_mesh_world(&mine.mesh);
  engine->n_replicas = ends ? 1 : mine.mesh.dp;
  engine->per_replica = ends ? 1 : mine.mesh.tp;
  engine->own = ends ? rm_mesh_coords(&mine.mesh, ends->index).dp : 0;
  engine->next_id = 1;
  rm_code code = allocate(engine, err);
  if (!code) code = create_parts(engine, err);
  if (!code) {
    *out = engine;
    return RM_OK;
  }
  if (ends && engine->workers) // the caller still owns them
    memset(engine->workers[0].groups, 0, sizeof engine->workers[0].groups);
  rm_engine_destroy(engine);
  return code;
}

void rm_engine_destroy(rm_engine *engine) {
  if (!engine) return;
  if (engine->workers) rm_run_workers(engine, rm_worker_destroy, NULL, NULL);
  rm_ready_streams_destroy(&engine->ready_streams);
  for (int w = 0; engine->workers && w < engine->n_workers; w++) {
    rm_worker *worker = &engine->workers[w];
    if (worker->gpu.self) worker->gpu.close(worker->gpu.self);
    for (int group = 0; group < N_GROUPS; group++) rm_comm_destroy(worker->groups[group]);
    rm_error_clear(&worker->err);
  }
  for (int d = 0; engine->schedulers && d < engine->n_replicas; d++)
    rm_scheduler_destroy(&engine->schedulers[d]);
  rm_region_release(engine->region);
  rm_team_destroy(engine->team);
  rm_free(engine->memory);
  rm_error_clear(&engine->lost);
  rm_free(engine);
}

void rm_engine_abort_groups(rm_engine *engine) {
  for (int w = 0; w < engine->n_workers; w++)
    for (int group = 0; group < N_GROUPS; group++)
      if (engine->workers[w].groups[group])
        rm_comm_abort(engine->workers[w].groups[group], RM_E_RANK_LOST);
}

// ------------------------------------------------------------------------------------- statistics
static void add_worker(const rm_worker *worker, rm_engine_stats *out) {
  rm_traffic traffic = rm_rank_traffic(&worker->runner.rank);
  rm_graphs_add_traffic(worker->runner.graphs, &traffic);
  out->weight_bytes += worker->params->bytes;
  out->kv_bytes += worker->runner.cache.pages ? worker->kv_bytes : 0;
  out->workspace_bytes += rm_runner_workspace(&worker->runner);
  out->n_threads += rm_team_threads(worker->team);
  out->forward_seconds = fmax(out->forward_seconds, worker->forward_seconds);
  out->comm_bytes += traffic.bytes;
  out->comm_calls = rm_max64(out->comm_calls, traffic.calls);
  out->comm_seconds = fmax(out->comm_seconds, traffic.seconds);
}

static void add_scheduler(const rm_scheduler *scheduler, rm_engine_stats *out) {
  const rm_kv_counts *kv = rm_kv_statistics(scheduler->cache);
  out->waiting += scheduler->n_waiting;
  out->running += scheduler->n_active;
  out->generated_tokens += scheduler->generated_tokens;
  out->prompt_tokens += scheduler->prompt_tokens;
  out->cached_tokens += scheduler->cached_tokens;
  out->preemptions += scheduler->preemptions;
  out->kv_pages += scheduler->options.limits.n_pages;
  out->kv_pages_free += rm_kv_free_pages(scheduler->cache);
  out->states += scheduler->n_states;
  out->states_free += rm_kv_free_states(scheduler->cache);
  out->state_evictions += kv->state_evictions;
  out->prefix_hits += kv->hits;
  out->prefix_misses += kv->misses;
  out->evictions += kv->evictions;
  out->workspace_bytes += scheduler->memory_bytes;
}

void rm_engine_statistics(const rm_engine *engine, rm_engine_stats *out) {
  const rm_worker *first = &engine->workers[0];
  *out = (rm_engine_stats){
      .version = first->store->version,
      .steps = engine->steps,
      .rows = engine->rows,
      .asleep = engine->asleep,
      .isa = first->runner.kernels->isa,
      .family = first->runner.kernels->family,
      .device = first->device->name,
      .schedule_seconds = engine->schedule_seconds,
      .commit_seconds = engine->commit_seconds,
  };
  for (int w = 0; w < engine->n_workers; w++) add_worker(&engine->workers[w], out);
  for (int d = 0; d < engine->n_replicas; d++) {
    add_scheduler(&engine->schedulers[d], out);
    out->replays += rm_graphs_replays(rm_first_worker(engine, d)->runner.graphs);
  }
}

rm_mesh rm_engine_mesh(const rm_engine *engine) { return engine->options.mesh; }
rm_profile *rm_engine_profile(rm_engine *engine) { return engine->workers[0].profile; }
rm_store *rm_engine_store(const rm_engine *engine) { return engine->workers[0].store; }
