// engine.c: creation and destruction of an engine, and its steps. The rest of engine.h is in
// sync_policy.c and sleep.c.
#include <stdlib.h>
#include <string.h>

#include "base/control_groups.h"
#include "engine/state.h"

enum {
  MAX_POSITIONS = 1 << 24, // exact in float32, in which rope multiplies positions
  MAX_SEQUENCES = 1 << 16,
  MAX_BATCHED = 1 << 20,
  MAX_PAGE = 1 << 12,
};

static rm_code check_range(const char *name, int64_t value, int64_t lo, int64_t hi, rm_error *err) {
  if (value >= lo && value <= hi) return RM_OK;
  return rm_fail(err, RM_E_CONFIG, "%s=%lld is not in [%lld, %lld]", name, (long long)value,
                 (long long)lo, (long long)hi);
}

static rm_code check_options(const rm_spec *spec, const rm_engine_options *options, rm_error *err) {
  rm_code code;
  if ((code = check_range("max_model_len", options->max_model_len, 1, MAX_POSITIONS, err)))
    return code;
  if ((code = check_range("max_num_seqs", options->max_num_seqs, 1, MAX_SEQUENCES, err)))
    return code;
  if ((code = check_range("max_num_batched_tokens", options->max_num_batched_tokens, 1, MAX_BATCHED,
                          err)))
    return code;
  if ((code = check_range("page_size", options->page_size, 16, MAX_PAGE, err))) return code;
  if ((code = check_range("external_pages", options->external_pages, 0, INT32_MAX / 2, err)))
    return code;
  if ((code = check_range("n_threads", options->n_threads, 0, RM_MAX_THREADS, err))) return code;
  if ((code = check_range("num_experts", spec->n_experts, 0, INT16_MAX, err))) return code;
  if (options->page_size % 16)
    return rm_fail(err, RM_E_CONFIG, "page_size=%lld is not a multiple of 16",
                   (long long)options->page_size);
  if (options->dtype != RM_BF16 && options->dtype != RM_F32)
    return rm_fail(err, RM_E_CONFIG, "dtype=%d is neither bf16 nor float32", options->dtype);
  if (options->nccl_library && (!options->device || options->device->on_host))
    return rm_fail(err, RM_E_CONFIG, "NCCL: expected an engine on a GPU, got one on the CPU");
  if (options->cublas_library && (!options->device || !options->device->open_vendor_gemm))
    return rm_fail(err, RM_E_CONFIG,
                   "fast=True (cuBLASLt): expected an engine on a GPU, got one on the CPU");
  if (options->cublas_library && options->dtype != RM_BF16)
    return rm_fail(err, RM_E_CONFIG, "fast=True: expected bfloat16, got float32");
  if (options->n_eos < 0 || (options->n_eos && !options->eos_ids))
    return rm_fail(err, RM_E_CONFIG, "expected an array of %lld eos ids, got none",
                   (long long)options->n_eos);
  for (int64_t i = 0; i < options->n_eos; i++)
    if ((code = check_range("eos_token_id", options->eos_ids[i], 0, spec->vocab_size - 1, err)))
      return code;
  return RM_OK;
}

// --------------------------------------------------------------------------------------- creation
static rm_code create_cache(rm_engine *engine, rm_error *err) {
  int64_t n_pages;
  rm_code code = rm_kv_pages(engine, &n_pages, err);
  if (code) return code;
  engine->runner.n_pages = n_pages;
  engine->kv_bytes = (size_t)n_pages * rm_model_page_bytes(engine->model);
  if ((code = rm_scheduler_open_pages(&engine->scheduler, n_pages, err))) return code;
  return rm_device_alloc(engine->device, engine->kv_bytes, "the KV cache", &engine->runner.kv, err);
}

static rm_code create_scheduler(rm_engine *engine, rm_error *err) {
  const rm_engine_options *options = &engine->options;
  const rm_scheduler_options scheduler = {
      .policy = options->external_pages > 0 ? &rm_external_policy : &rm_own_policy,
      .limits = {.vocab = engine->spec->vocab_size,
                 .max_model_len = options->max_model_len,
                 .page_size = options->page_size,
                 .routed_per_token = engine->runner.routed_per_token,
                 .external = options->external_pages > 0,
                 .eos_ids = options->eos_ids,
                 .n_eos = options->n_eos,
                 .engine_seed = options->seed},
      .max_num_seqs = options->max_num_seqs,
      .max_num_batched_tokens = options->max_num_batched_tokens,
      .prefix_caching = options->prefix_caching,
      .external_pages = options->external_pages,
      .zero_page = rm_runner_zero_page,
      .copy_page = rm_runner_copy_page,
      .pages = &engine->runner,
  };
  return rm_scheduler_create(&engine->scheduler, &scheduler, err);
}

static void init_runner(rm_engine *engine, const rm_rank *rank) {
  const rm_engine_options *options = &engine->options;
  const rm_runner_options runner = {
      .spec = engine->spec,
      .device = engine->device,
      .model = {.dtype = options->dtype,
                .max_rows = options->max_num_batched_tokens,
                .max_positions = options->max_model_len,
                .page_size = options->page_size,
                .profile = engine->profile,
                .cublas_library = options->cublas_library,
                .rank = rank},
      .max_num_seqs = options->max_num_seqs,
      .max_pages = (options->max_model_len + options->page_size - 1) / options->page_size,
      .enforce_eager = options->enforce_eager,
      .nccl_library = options->nccl_library,
      .nccl_gpu = options->nccl_gpu,
  };
  rm_runner_init(&engine->runner, &runner);
}

static rm_code create_parts(rm_engine *engine, rm_error *err) {
  const rm_engine_options *options = &engine->options;
  rm_runner *runner = &engine->runner;
  const rm_placement placement =
      rm_placement_of(engine->spec, &runner->rank.mesh, runner->rank.index);
  const int plain = options->cublas_library != NULL;
  rm_code code;
  const int usable = rm_usable_cores(""),
            by_default = usable < RM_MAX_THREADS ? usable : RM_MAX_THREADS;
  if ((code = rm_team_create(options->n_threads ? options->n_threads : by_default, &engine->team,
                             err)))
    return code;
  if ((code = rm_comms_join(runner, err))) return code;
  if ((code =
           rm_params_create(engine->spec, &placement, options->dtype, plain, &engine->params, err)))
    return code;
  if ((code = rm_model_create(engine->params, engine->device, engine->team, &runner->options.model,
                              &engine->model, err)))
    return code;
  if ((code = rm_store_create(engine->params, engine->device, engine->team, &engine->store, err)))
    return code;
  if ((code = create_scheduler(engine, err))) return code;
  if ((code = rm_runner_create(runner, engine->model, engine->store, &engine->scheduler.plan, err)))
    return code;
  return create_cache(engine, err); // last, since it may take all memory that is left
}

rm_code rm_engine_create(const rm_spec *spec, const rm_engine_options *options, rm_engine **out,
                         rm_error *err) {
  *out = NULL;
  rm_code code = check_options(spec, options, err);
  if (code) return code;
  const rm_rank rank = options->rank.mesh.tp ? options->rank : rm_rank_alone();
  if ((code = rm_rank_check(&rank, spec, err))) return code;
  const rm_kernels *kernels = options->device    ? options->device->kernels
                              : options->kernels ? options->kernels
                                                 : rm_kernels_best();
  if (!kernels)
    return rm_fail(err, RM_E_CONFIG, "RM_ISA=%.40s names no instruction set of this build",
                   getenv("RM_ISA") ? getenv("RM_ISA") : "");
  rm_engine *engine = rm_alloc(1, sizeof *engine);
  if (!engine) return rm_fail(err, RM_E_MEMORY, "no memory for the engine");
  engine->spec = spec;
  if (options->profile && !options->device) {
    if (!(engine->profile = rm_alloc(1, sizeof *engine->profile))) {
      rm_free(engine);
      return rm_fail(err, RM_E_MEMORY, "no memory for the profile");
    }
    rm_profile_init(engine->profile, kernels);
    kernels = &engine->profile->table;
  }
  engine->cpu = rm_device_cpu(kernels);
  engine->device = options->device ? options->device : &engine->cpu;
  engine->options = *options;
  engine->options.eos_ids = NULL;
  engine->options.rank = (rm_rank){0}; // the runner has it
  init_runner(engine, &rank);
  int32_t *eos = rm_alloc((size_t)options->n_eos, sizeof *eos);
  if (eos && options->n_eos) memcpy(eos, options->eos_ids, (size_t)options->n_eos * sizeof *eos);
  engine->options.eos_ids = eos;
  const rm_entered saved = rm_enter(engine);
  code = eos ? create_parts(engine, err) : rm_fail(err, RM_E_MEMORY, "no memory for the engine");
  rm_runner_options *made = &engine->runner.options; // the strings are the caller's
  engine->options.nccl_library = engine->options.nccl_gpu = engine->options.cublas_library = NULL;
  made->nccl_library = made->nccl_gpu = made->model.cublas_library = NULL;
  if (code) rm_comms_abort(&engine->runner, code); // other ranks would wait for this one
  rm_leave(engine, saved);
  if (code) {
    rm_engine_destroy(engine);
    return code;
  }
  *out = engine;
  return RM_OK;
}

void rm_engine_destroy(rm_engine *engine) {
  if (!engine) return;
  const rm_entered saved = rm_enter(engine);
  rm_runner_destroy(&engine->runner);
  rm_device_free(engine->device, engine->runner.kv, engine->kv_bytes);
  rm_scheduler_destroy(&engine->scheduler);
  rm_store_destroy(engine->store);
  rm_model_destroy(engine->model);
  rm_params_destroy(engine->params);
  rm_comms_leave(&engine->runner);
  rm_team_destroy(engine->team);
  rm_free((void *)engine->options.eos_ids);
  rm_error_clear(&engine->lost);
  rm_free(engine->profile);
  rm_leave(engine, saved);
  rm_free(engine);
}

// ----------------------------------------------------------------------------------------- a step
// After a failed step the state of the exchanges is undefined: the engine cannot step any more.
static rm_code lose(rm_engine *engine, rm_code code, rm_error *err) {
  rm_comms_abort(&engine->runner, code);
  rm_fail(&engine->lost, code, "%s", err ? rm_error_message(err) : "another rank failed");
  return code;
}

static rm_code check_ready(rm_engine *engine, rm_error *err) {
  if (engine->asleep)
    return rm_fail(err, RM_E_STATE, "cannot step while %s asleep; call wake() first",
                   engine->asleep & RM_PART_WEIGHTS ? "the weights are" : "the KV cache is");
  if (!rm_store_weights(engine->store))
    return rm_fail(err, RM_E_NOT_SYNCED,
                   "expected synced weights, got none: call sync_weights first");
  if (engine->lost.code)
    return rm_fail(err, engine->lost.code, "%s", rm_error_message(&engine->lost));
  engine->scheduler.version = rm_store_version(engine->store);
  return RM_OK;
}

// A step: schedule, forward, commit. After schedule the ranks of a lockstep group agree on what
// they do. An external step with more rows than a batch has takes several rounds.
static rm_code run_step(rm_engine *engine, int64_t *n_work, rm_error *err) {
  rm_scheduler *scheduler = &engine->scheduler;
  rm_progress progress = RM_MORE_BATCHES;
  while (progress == RM_MORE_BATCHES) {
    const double start = rm_now();
    progress = scheduler->options.policy->schedule(scheduler);
    const double scheduled = rm_now();
    rm_code code = rm_lockstep_agree(&engine->runner, &progress, err);
    if (code) return lose(engine, code, err);
    engine->had_work = progress != RM_NO_WORK;
    if (progress == RM_NO_WORK) return RM_OK;
    const double agreed = rm_now();
    if ((code = rm_forward(&engine->runner, err))) return lose(engine, code, err);
    const double forwarded = rm_now();
    rm_commit(scheduler);
    engine->schedule_seconds += scheduled - start;
    engine->forward_seconds += forwarded - agreed;
    engine->commit_seconds += rm_now() - forwarded;
    engine->rows += scheduler->plan.n_rows;
    engine->steps++;
    *n_work += scheduler->plan.n_rows;
  }
  return RM_OK;
}

rm_code rm_engine_step(rm_engine *engine, int64_t *n_work, rm_error *err) {
  *n_work = 0;
  engine->had_work = 0;
  if (engine->options.external_pages > 0)
    return rm_fail(err, RM_E_STATE,
                   "this engine has an external scheduler: expected external_step, got step");
  rm_code code = check_ready(engine, err);
  if (code) return code;
  const rm_entered saved = rm_enter(engine);
  code = run_step(engine, n_work, err);
  rm_leave(engine, saved);
  return code;
}

int rm_engine_had_work(const rm_engine *engine) { return engine->had_work; }

// --------------------------------------------------------------------- with an external scheduler
rm_code rm_engine_external_step(rm_engine *engine, const rm_external_step *step,
                                rm_external_result *results, int64_t *n_work, rm_error *err) {
  *n_work = 0;
  if (!engine->options.external_pages)
    return rm_fail(err, RM_E_STATE,
                   "this engine schedules its own requests: expected step, got external_step");
  rm_code code = check_ready(engine, err);
  if (code || (code = rm_external_begin(&engine->scheduler, step, err))) return code;
  const rm_entered saved = rm_enter(engine);
  code = run_step(engine, n_work, err);
  rm_leave(engine, saved);
  rm_external_end(&engine->scheduler, code ? NULL : results);
  return code;
}

rm_code rm_engine_external_draw(rm_engine *engine, const rm_external_draw *draws, int64_t n,
                                rm_external_result *results, rm_error *err) {
  rm_scheduler *scheduler = &engine->scheduler;
  rm_code code = RM_OK;
  if (engine->lost.code)
    return rm_fail(err, engine->lost.code, "%s", rm_error_message(&engine->lost));
  for (int64_t i = 0; i < n; i++)
    if (!rm_external_drawing(scheduler, draws[i].id, &code, err)) return code;
  scheduler->version = rm_store_version(engine->store);
  const rm_entered saved = rm_enter(engine);
  for (int64_t i = 0; i < n && !code; i++) {
    rm_sequence *seq = rm_find_sequence_group(scheduler, draws[i].id, NULL)->sequences;
    rm_external_result *result = &results[i];
    seq->external_row = -1;
    if ((code = rm_draw_edited(&engine->runner, seq, &draws[i], result, err)))
      break; // the device is dead, as the next step says too
    if (result->token >= 0) {
      rm_append(
          scheduler, seq,
          &(rm_drawn){result->token, result->rank, result->logprob, result->sampling_logprob});
    } else {
      rm_fail_sequence_group(scheduler, seq, rm_sequence_length(seq) - 1,
                             "the edited logits leave no token to draw and are");
      result->token = RM_EXTERNAL_FAILED;
    }
  }
  rm_leave(engine, saved);
  return code;
}

rm_scheduler *rm_engine_scheduler(rm_engine *engine) { return &engine->scheduler; }

// --------------------------------------------------------------------------------------- requests
static rm_code check_weights(const rm_engine *engine, rm_error *err) {
  if (engine->asleep & RM_PART_WEIGHTS)
    return rm_fail(err, RM_E_STATE,
                   "cannot add a request while the weights are asleep; call wake() first");
  if (!rm_store_weights(engine->store))
    return rm_fail(err, RM_E_NOT_SYNCED,
                   "expected synced weights, got none: call sync_weights first");
  return RM_OK;
}

rm_code rm_engine_check(const rm_engine *engine, const rm_request *request, rm_error *err) {
  const rm_code code = check_weights(engine, err);
  return code ? code : rm_sequence_group_check(request, &engine->scheduler.options.limits, err);
}

rm_code rm_engine_add(rm_engine *engine, const rm_request *request, uint64_t *id, rm_error *err) {
  const rm_code code = check_weights(engine, err);
  return code ? code : rm_scheduler_add(&engine->scheduler, request, id, err);
}

int64_t rm_engine_finished(rm_engine *engine, uint64_t *ids, int64_t capacity) {
  return rm_scheduler_finished(&engine->scheduler, ids, capacity);
}
uint64_t rm_engine_next_finished(const rm_engine *engine) {
  const rm_link *finished = &engine->scheduler.finished;
  return rm_list_empty(finished) ? 0 : ((const rm_sequence_group *)finished->next)->id;
}
int64_t rm_engine_unfinished(const rm_engine *engine) { return engine->scheduler.n_live; }
int rm_engine_has(const rm_engine *engine, uint64_t id) {
  return rm_find_sequence_group(&engine->scheduler, id, NULL) != NULL;
}
rm_code rm_engine_view(const rm_engine *engine, uint64_t id, rm_request_view *out, rm_error *err) {
  return rm_scheduler_view(&engine->scheduler, id, out, err);
}
rm_code rm_engine_sample_view(const rm_engine *engine, uint64_t id, int32_t sample,
                              rm_sample_view *out, rm_error *err) {
  return rm_scheduler_sample_view(&engine->scheduler, id, sample, out, err);
}
rm_code rm_engine_release(rm_engine *engine, uint64_t id, rm_error *err) {
  return rm_scheduler_release(&engine->scheduler, id, err);
}
rm_code rm_engine_abort(rm_engine *engine, uint64_t id, rm_error *err) {
  rm_sequence_group *group = rm_find_sequence_group(&engine->scheduler, id, err);
  if (!group) return RM_E_REQUEST;
  rm_finish_sequence_group(&engine->scheduler, group, RM_FINISH_ABORT);
  return RM_OK;
}
rm_code rm_engine_stop_sample(rm_engine *engine, uint64_t id, int32_t sample, int64_t n_tokens,
                              rm_error *err) {
  return rm_scheduler_stop_sample(&engine->scheduler, id, sample, n_tokens, err);
}

void rm_engine_pause(rm_engine *engine, int paused) { engine->scheduler.paused = paused != 0; }
void rm_engine_reset_prefix_cache(rm_engine *engine) { rm_kv_reset(engine->scheduler.cache); }

// ------------------------------------------------------------------------------------- statistics
rm_profile *rm_engine_profile(rm_engine *engine) { return engine->profile; }
const rm_params *rm_engine_params(const rm_engine *engine) { return engine->params; }
rm_store *rm_engine_store(rm_engine *engine) { return engine->store; }

void rm_engine_statistics(const rm_engine *engine, rm_engine_stats *out) {
  const rm_scheduler *scheduler = &engine->scheduler;
  const rm_kv_stats kv = rm_kv_statistics(scheduler->cache);
  const rm_traffic traffic = rm_comms_traffic(&engine->runner);
  *out = (rm_engine_stats){
      .version = rm_store_version(engine->store),
      .waiting = scheduler->n_waiting,
      .running = scheduler->n_active,
      .steps = engine->steps,
      .rows = engine->rows,
      .generated_tokens = scheduler->generated_tokens,
      .prompt_tokens = scheduler->prompt_tokens,
      .cached_tokens = scheduler->cached_tokens,
      .preemptions = scheduler->preemptions,
      .replays = engine->runner.replays,
      .kv_pages = engine->runner.n_pages,
      .kv_pages_free = rm_kv_free_pages(scheduler->cache),
      .prefix_hits = kv.hits,
      .prefix_misses = kv.misses,
      .evictions = kv.evictions,
      .weight_bytes = engine->params->bytes,
      .kv_bytes = engine->runner.kv ? engine->kv_bytes : 0,
      .workspace_bytes = rm_runner_workspace(&engine->runner) + scheduler->memory_bytes,
      .n_threads = rm_team_threads(engine->team),
      .asleep = engine->asleep,
      .isa = engine->runner.kernels->isa,
      .family = engine->runner.kernels->family,
      .device = engine->device->name,
      .forward_seconds = engine->forward_seconds,
      .schedule_seconds = engine->schedule_seconds,
      .commit_seconds = engine->commit_seconds,
      .comm_bytes = traffic.bytes,
      .comm_calls = traffic.calls,
      .comm_seconds = traffic.seconds,
  };
}
