// engine.c: making and ending an engine, and the three calls of a step. The rest of engine.h is in requests.c (add, views,
// abort) and sync_policy.c (sync, sleep, wake).
#define _GNU_SOURCE
#include <assert.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/state.h"

enum {
  MAX_POSITIONS = 1 << 24,         // float32 counts that far, and rope multiplies positions in float32
  MAX_SEQUENCES = 1 << 16,
  MAX_BATCHED = 1 << 20,
  MAX_PAGE = 1 << 12,
  STATIC_ROWS = 512,               // of a step that may have sizes for the worst case: beyond, they are more than is worth a wait
  LOGITS_BYTES = 64 << 20,         // of logits at a time; but …
  MIN_OUT_ROWS = 32,               // … lm_head's weights should serve that many rows a pass
  RESULTS_BYTES = 1 << 20,         // of results that a step keeps before it has to wait; at least one row's top logprobs, and the
                                   // parameters of one draw with all tokens banned
};

static int threads_allowed(void) {
  cpu_set_t set;
  const int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  return n < 1 ? 1 : n > 256 ? 256 : n;
}

static rm_code check_range(const char *name, int64_t value, int64_t lo, int64_t hi, rm_error *err) {
  if (value >= lo && value <= hi) return RM_OK;
  return rm_fail(err, RM_E_CONFIG, "%s=%lld is not in [%lld, %lld]", name, (long long)value, (long long)lo, (long long)hi);
}

static rm_code check_options(const rm_spec *spec, const rm_engine_options *options, rm_error *err) {
  rm_code code;
  if ((code = check_range("max_model_len", options->max_model_len, 1, MAX_POSITIONS, err))) return code;
  if ((code = check_range("max_num_seqs", options->max_num_seqs, 1, MAX_SEQUENCES, err))) return code;
  if ((code = check_range("max_num_batched_tokens", options->max_num_batched_tokens, 1, MAX_BATCHED, err))) return code;
  if ((code = check_range("page_size", options->page_size, 16, MAX_PAGE, err))) return code;
  if ((code = check_range("host_pages", options->host_pages, 0, INT32_MAX / 2, err))) return code;
  if ((code = check_range("n_threads", options->n_threads, 0, 256, err))) return code;
  if ((code = check_range("num_experts", spec->n_experts, 0, INT16_MAX, err))) return code;
  if (options->page_size % 16) return rm_fail(err, RM_E_CONFIG, "page_size=%lld is not a multiple of 16", (long long)options->page_size);
  if (options->dtype != RM_BF16 && options->dtype != RM_F32)
    return rm_fail(err, RM_E_CONFIG, "dtype=%d is neither bf16 nor float32", options->dtype);
  if (options->nccl_library && (!options->device || options->device->on_host))
    return rm_fail(err, RM_E_CONFIG, "NCCL for an engine on the CPU, wanted one on a GPU: it moves what lies in GPUs' memories");
  if (options->cublas_library && (!options->device || !options->device->products))
    return rm_fail(err, RM_E_CONFIG, "fast=True for an engine on the CPU, wanted one on a GPU: cuBLASLt multiplies what lies there");
  if (options->cublas_library && options->dtype != RM_BF16) return rm_fail(err, RM_E_CONFIG, "fast=True for float32, wanted bfloat16");
  if (options->n_eos < 0 || (options->n_eos && !options->eos_ids))
    return rm_fail(err, RM_E_CONFIG, "%lld eos ids but no array", (long long)options->n_eos);
  for (int64_t i = 0; i < options->n_eos; i++)
    if ((code = check_range("eos_token_id", options->eos_ids[i], 0, spec->vocab_size - 1, err))) return code;
  return RM_OK;
}

// ---------------------------------------------------------------------------------------------- creation
static void zero_page(void *owner, int32_t page) {
  const rm_engine *engine = owner;
  rm_model_zero_page(engine->model, engine->kv, engine->n_pages, page);
}

static rm_code create_cache(rm_engine *engine, rm_error *err) {
  rm_code code = rm_kv_pages(engine, &engine->n_pages, err);
  if (code) return code;
  engine->kv_bytes = (size_t)engine->n_pages * rm_model_page_bytes(engine->model);
  const rm_kv_options options = {engine->n_pages, engine->options.page_size, engine->routed_per_token, zero_page, engine};
  if ((code = rm_kv_create(&options, &engine->cache, err))) return code;
  return rm_device_map(engine->device, engine->kv_bytes, "the KV cache", &engine->kv, err);
}

uint64_t rm_engine_workspace(const rm_engine *engine) {
  return rm_model_workspace_bytes(engine->model) + engine->block_bytes + engine->scratch_bytes + engine->paired.bytes +
         engine->results.paired.bytes;
}

static size_t results_bytes(const rm_engine *engine) { return RESULTS_BYTES + 2 * sizeof(float) * (size_t)engine->spec->vocab_size; }

#define N_FIELDS(fields) (sizeof(fields) / sizeof *(fields))

// Everything a step writes to, in three blocks: the host's, the device's, and what both have.
static rm_code create_plan(rm_engine *engine, rm_error *err) {
  rm_plan *plan = &engine->plan;
  const size_t rows = (size_t)engine->options.max_num_batched_tokens, seqs = (size_t)engine->options.max_num_seqs;
  const size_t outs = (size_t)engine->max_out_rows, draws = (size_t)engine->max_draws;
  const rm_field host[] = {
      {&engine->places, seqs, sizeof(int32_t)},
      {&engine->table_changed, seqs, sizeof(uint8_t)},
      {&engine->page_versions, (size_t)engine->options.host_pages, sizeof(int64_t)},
      {&plan->outs, rows, sizeof(rm_out_row)},
      {&plan->scheduled, seqs, sizeof(rm_sequence *)},
      {&plan->draws, seqs, sizeof(rm_draw)},
      {&plan->all_flags, engine->options.rank.tp ? rows : 0, (size_t)engine->options.rank.mesh.tp},
      {&plan->drawn, engine->options.rank.tp ? seqs : 0, sizeof(rm_drawn)},
      {&plan->params, draws, sizeof(rm_sample_params)},
  };
  const rm_field device[] = {
      {&plan->logits, outs, (size_t)engine->ld_logits * sizeof(float)},
      {&plan->stats, outs, 2 * sizeof(float)},
      {&plan->unused_logprobs, draws, sizeof(float)},
      {&plan->unused_tokens, draws, sizeof(int32_t)},
  };
  const rm_field both[] = {
      {&engine->block_tables, seqs, (size_t)engine->max_pages * sizeof(int32_t)},
      {&plan->ids, rows, sizeof(int32_t)},
      {&plan->positions, rows, sizeof(int32_t)},
      {&plan->seq_of_row, rows, sizeof(int32_t)},
      {&plan->slots, rows, sizeof(int64_t)},
      {&plan->out_rows, rows, sizeof(int32_t)},
      {&plan->targets, rows, sizeof(int32_t)},
      {&plan->routed, engine->routed_per_token ? rows : 0, (size_t)engine->routed_per_token * sizeof(int16_t)},
      {&plan->row_flags, rows, sizeof(uint8_t)},
      {&plan->out_flags, rows, sizeof(uint8_t)},
      {&plan->target_logprobs, rows, sizeof(float)},
      {&plan->tokens, seqs, sizeof(int32_t)},
      {&plan->logprobs, seqs, sizeof(float)},
      {&plan->sampling_logprobs, seqs, sizeof(float)},
      {&plan->ranks, seqs, sizeof(int32_t)},
      {&engine->decode.block, engine->decode.block_bytes, 1},
  };
  char what[96];
  snprintf(what, sizeof what, "batch (max_num_batched_tokens=%zu, max_num_seqs=%zu)", rows, seqs);
  engine->block_bytes = rm_fields_bytes(host, N_FIELDS(host));
  engine->scratch_bytes = rm_fields_bytes(device, N_FIELDS(device));
  engine->block = engine->block_bytes ? rm_map(engine->block_bytes) : NULL;
  if (!engine->block) return rm_fail(err, RM_E_MEMORY, "no memory for %zu bytes of %s", engine->block_bytes, what);
  rm_code code = rm_device_map(engine->device, engine->scratch_bytes, what, &engine->scratch, err);
  if (!code) code = rm_paired_create(engine->device, rm_fields_bytes(both, N_FIELDS(both)), what, &engine->paired, err);
  if (!code) code = rm_results_create(engine->device, &engine->options.rank, results_bytes(engine), &engine->results, err);
  if (code) return code;
  rm_fields_place(host, N_FIELDS(host), engine->block, engine->block_bytes);   // what was asked for fits
  rm_fields_place(device, N_FIELDS(device), engine->scratch, engine->scratch_bytes);
  rm_fields_place(both, N_FIELDS(both), engine->paired.host, engine->paired.bytes);
  for (engine->n_places = 0; engine->n_places < engine->options.max_num_seqs; engine->n_places++)
    engine->places[engine->n_places] = (int32_t)(engine->options.max_num_seqs - 1 - engine->n_places);
  return RM_OK;
}

rm_model_options rm_model_options_of(const rm_engine *engine) {
  const rm_engine_options *options = &engine->options;
  const int64_t few = rm_min64(rm_min64(options->max_num_seqs, options->max_num_batched_tokens), STATIC_ROWS);
  return (rm_model_options){.dtype = options->dtype,
                            .max_rows = options->max_num_batched_tokens,
                            .max_positions = options->max_model_len,
                            .max_out_rows = engine->max_out_rows,
                            .page_size = options->page_size,
                            .static_rows = engine->device->on_host ? 0 : few,
                            .cublas_library = options->cublas_library,
                            .rank = options->rank};
}

static rm_code create_parts(rm_engine *engine, rm_error *err) {
  const rm_engine_options *options = &engine->options;
  rm_model_options model = rm_model_options_of(engine);
  const rm_placement placement = rm_placement_of(engine->spec, &options->rank.mesh, options->rank.index);
  rm_code code;
  if ((code = rm_team_create(options->n_threads ? options->n_threads : threads_allowed(), &engine->team, err))) return code;
  if ((code = rm_join_peers(engine, err))) return code;
  model.rank = options->rank;   // with the groups that were made
  const int plain = options->cublas_library != NULL;
  if ((code = rm_params_create(engine->spec, &placement, options->dtype, plain, &engine->params, err))) return code;
  if ((code = rm_model_create(engine->params, engine->device, engine->team, &model, &engine->model, err))) return code;
  if ((code = rm_store_create(engine->params, engine->device, engine->team, &engine->store, err))) return code;
  rm_decode_plan(engine);
  if ((code = create_plan(engine, err)) || (code = create_cache(engine, err))) return code;   // which may take what is left
  if (rm_is_external(engine)) rm_external_renew(engine, 1);
  return RM_OK;
}

static void derive(rm_engine *engine) {
  const rm_engine_options *options = &engine->options;
  engine->routed_per_token = engine->spec->n_moe_layers * engine->spec->top_k;
  engine->max_pages = (options->max_model_len + options->page_size - 1) / options->page_size;
  engine->ld_logits = rm_round_up(engine->spec->vocab_size, RM_VOCAB_BLOCK);
  const int64_t fitting = rm_max64(LOGITS_BYTES / (engine->ld_logits * (int64_t)sizeof(float)), MIN_OUT_ROWS);
  engine->max_out_rows = rm_min64(fitting, options->max_num_batched_tokens);
  engine->max_draws = rm_min64(rm_max64(options->max_num_seqs, engine->max_out_rows), options->max_num_batched_tokens);
}

rm_code rm_engine_create(const rm_spec *spec, const rm_engine_options *options, rm_engine **out, rm_error *err) {
  *out = NULL;
  rm_code code = check_options(spec, options, err);
  if (code) return code;
  const rm_rank rank = options->rank.mesh.tp ? options->rank : rm_rank_alone();
  if ((code = rm_rank_check(&rank, spec, err))) return code;
  const rm_kernels *kernels = options->device ? options->device->kernels : options->kernels ? options->kernels : rm_kernels_best();
  if (!kernels)
    return rm_fail(err, RM_E_CONFIG, "RM_ISA=%.40s names no instruction set of this build", getenv("RM_ISA") ? getenv("RM_ISA") : "");
  rm_engine *engine = rm_alloc(1, sizeof *engine);
  if (!engine) return rm_fail(err, RM_E_MEMORY, "no memory for the engine");
  engine->spec = spec;
  engine->kernels = kernels;
  engine->cpu = rm_device_cpu(kernels);
  engine->device = options->device ? options->device : &engine->cpu;
  engine->options = *options;
  engine->options.eos_ids = NULL;
  engine->options.rank = rank;
  engine->next_id = 1;
  rm_list_init(&engine->waiting);
  rm_list_init(&engine->active);
  rm_list_init(&engine->live);
  rm_list_init(&engine->finished);
  derive(engine);
  int32_t *eos = rm_alloc((size_t)options->n_eos, sizeof *eos);
  if (eos && options->n_eos) memcpy(eos, options->eos_ids, (size_t)options->n_eos * sizeof *eos);
  engine->options.eos_ids = eos;
  const rm_entered saved = rm_enter(engine);
  code = eos ? create_parts(engine, err) : rm_fail(err, RM_E_MEMORY, "no memory for the engine");
  engine->options.nccl_library = engine->options.nccl_gpu = engine->options.cublas_library = NULL;   // the caller's
  if (code) rm_abandon_peers(engine, code);   // the others would wait for this one where groups are made, or left
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
  for (uint64_t b = 0; b < engine->n_buckets; b++)
    for (rm_group *group = engine->buckets[b], *next; group; group = next) {
      next = group->next_in_bucket;
      rm_free(group);
    }
  rm_free(engine->buckets);
  rm_decode_forget(engine);
  rm_results_destroy(&engine->results);
  rm_paired_destroy(&engine->paired);
  rm_unmap(engine->block, engine->block_bytes);
  rm_device_unmap(engine->device, engine->scratch, engine->scratch_bytes);
  rm_device_unmap(engine->device, engine->kv, engine->kv_bytes);
  rm_kv_destroy(engine->cache);
  rm_store_destroy(engine->store);
  rm_model_destroy(engine->model);
  rm_params_destroy(engine->params);
  rm_leave_peers(engine);
  rm_team_destroy(engine->team);
  rm_free((void *)engine->options.eos_ids);
  rm_error_clear(&engine->lost);
  rm_leave(engine, saved);
  rm_free(engine);
}

// ---------------------------------------------------------------------------------------------- a step
static int has_work(const rm_engine *engine) { return !engine->paused && engine->n_live > 0; }

// What was moved by a step that broke off is undefined, and so is what would follow.
static rm_code lose(rm_engine *engine, rm_code code, rm_error *err) {
  rm_abandon_peers(engine, code);
  rm_fail(&engine->lost, code, "%s", err ? rm_error_message(err) : "another rank failed");
  return code;
}

// Where experts span replicas all of them step together, those without requests with an empty batch. One whose step is not to be
// recorded makes all enqueue theirs.
rm_code rm_engine_ask_all(rm_engine *engine, int mine, int *most, rm_error *err) {
  const rm_rank *rank = &engine->options.rank;
  rm_plan *plan = &engine->plan;
  plan->is_recorded = rm_decode_serves(engine, &plan->with_ranks);
  enum { RECORDED = 1, WITH_RANKS = 2, FORGOTTEN = 4 };
  const struct word {
    int32_t rows;
    int16_t word, flags;
  } own = {(int32_t)plan->n_rows, (int16_t)mine,
           (int16_t)(plan->is_recorded * RECORDED + plan->with_ranks * WITH_RANKS + engine->decode.has_forgotten * FORGOTTEN)};
  int flags = 0;                // of any
  struct word all[RM_MAX_WORLD];
  size_t bytes[RM_MAX_WORLD];
  *most = mine;
  plan->most_rows = plan->n_rows;
  if (!rm_rank_spans_dp(rank)) return RM_OK;
  for (int r = 0; r < rm_comm_size(rank->ep); r++) bytes[r] = sizeof own;
  const rm_code code = rm_comm_all_gather(rank->ep, &own, all, bytes, err);
  for (int r = 0; r < rm_comm_size(rank->ep) && !code; r++) {
    *most = all[r].word > *most ? all[r].word : *most;
    plan->most_rows = rm_max64(plan->most_rows, all[r].rows);
    plan->is_recorded &= (all[r].flags & RECORDED) != 0;
    flags |= all[r].flags;
  }
  if (!code) plan->with_ranks = (flags & WITH_RANKS) != 0;
  if (!code && flags & FORGOTTEN) rm_decode_forget(engine);   // one that slept has none: all record anew, together
  engine->decode.has_forgotten = 0;
  return code ? lose(engine, code, err) : RM_OK;
}

int rm_engine_had_work(const rm_engine *engine) { return engine->had_work; }

rm_code rm_engine_ready(const rm_engine *engine, rm_error *err) {
  if (engine->asleep)
    return rm_fail(err, RM_E_STATE, "a step while %s asleep", engine->asleep & RM_PART_WEIGHTS ? "the weights are" : "the KV cache is");
  if (!rm_store_weights(engine->store)) return rm_fail(err, RM_E_NOT_SYNCED, "a step before any weights were synced");
  if (engine->lost.code) return rm_fail(err, engine->lost.code, "%s", rm_error_message(&engine->lost));
  return RM_OK;
}

rm_code rm_engine_run(rm_engine *engine, double scheduled, rm_error *err) {
  const rm_code code = rm_forward(engine, err);
  const double forwarded = rm_now();
  if (!code) rm_commit(engine);
  if (code) return lose(engine, code, err);
  engine->stats.forward_seconds += forwarded - scheduled;
  engine->stats.commit_seconds += rm_now() - forwarded;
  engine->stats.rows += engine->plan.n_rows;
  engine->stats.steps++;
  return RM_OK;
}

// The others are told how many rows this rank has before any of them begins.
static rm_code step(rm_engine *engine, int64_t *n_work, rm_error *err) {
  const double start = rm_now();
  if (has_work(engine)) rm_schedule(engine);
  else engine->plan.n_rows = engine->plan.n_out = engine->plan.n_scheduled = engine->plan.n_draws = 0;
  assert(engine->plan.n_rows > 0 || !has_work(engine));   // the oldest can always go on
  const double scheduled = rm_now();
  rm_code code = rm_engine_ask_all(engine, has_work(engine), &engine->had_work, err);
  if (code || !engine->had_work || (code = rm_engine_run(engine, rm_now(), err))) return code;
  engine->stats.schedule_seconds += scheduled - start;
  *n_work = engine->plan.n_rows;
  return RM_OK;
}

rm_code rm_engine_step(rm_engine *engine, int64_t *n_work, rm_error *err) {
  *n_work = 0;
  engine->had_work = 0;
  if (rm_is_external(engine)) return rm_fail(err, RM_E_STATE, "a step of its own in an engine that a host schedules");
  rm_code code = rm_engine_ready(engine, err);
  if (code) return code;
  const rm_entered saved = rm_enter(engine);
  code = step(engine, n_work, err);
  rm_leave(engine, saved);
  return code;
}

void rm_engine_pause(rm_engine *engine, int paused) { engine->paused = paused != 0; }
void rm_engine_reset_prefix_cache(rm_engine *engine) { rm_kv_reset(engine->cache); }
const rm_params *rm_engine_params(const rm_engine *engine) { return engine->params; }
rm_store *rm_engine_store(rm_engine *engine) { return engine->store; }
int64_t rm_engine_unfinished(const rm_engine *engine) { return engine->n_live; }

void rm_engine_statistics(const rm_engine *engine, rm_engine_stats *out) {
  const rm_kv_stats kv = rm_kv_statistics(engine->cache);
  *out = engine->stats;
  out->version = rm_store_version(engine->store);
  out->waiting = engine->n_waiting;
  out->running = engine->n_active;
  out->kv_pages = engine->n_pages;
  out->kv_pages_free = rm_kv_free_pages(engine->cache);
  out->prefix_hits = kv.hits;
  out->prefix_misses = kv.misses;
  out->evictions = kv.evictions;
  out->weight_bytes = engine->params->bytes;
  out->kv_bytes = engine->kv ? engine->kv_bytes : 0;
  out->workspace_bytes = rm_engine_workspace(engine);
  out->n_threads = rm_team_threads(engine->team);
  out->asleep = engine->asleep;
  rm_peers_traffic(engine, out);
  out->isa = engine->kernels->isa;
  out->family = engine->kernels->family;
  out->device = engine->device->name;
}
