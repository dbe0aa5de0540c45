// requests.c: requests from outside, by number: add, look at, end, release. (sequence_group.c says what one may ask for.)
#include "engine/state.h"

// ---------------------------------------------------------------------------------------------- groups by id
// Ids count up, so the low bits spread them evenly.
static rm_group **bucket(const rm_engine *engine, uint64_t id) { return &engine->buckets[id & (engine->n_buckets - 1)]; }

static int grow_buckets(rm_engine *engine) {
  if (engine->n_groups < (int64_t)engine->n_buckets) return 1;
  const uint64_t n_old = engine->n_buckets, n = n_old ? 2 * n_old : 64;
  rm_group **old = engine->buckets, **buckets = rm_alloc(n, sizeof *buckets);
  if (!buckets) return 0;
  engine->buckets = buckets;
  engine->n_buckets = n;
  for (uint64_t b = 0; b < n_old; b++)
    for (rm_group *group = old[b], *next; group; group = next) {
      next = group->next_in_bucket;
      group->next_in_bucket = *bucket(engine, group->id);
      *bucket(engine, group->id) = group;
    }
  rm_free(old);
  return 1;
}

rm_group *rm_find_group(const rm_engine *engine, uint64_t id, rm_error *err) {
  rm_group *group = engine->n_buckets ? *bucket(engine, id) : NULL;
  while (group && group->id != id) group = group->next_in_bucket;
  if (!group) rm_fail(err, RM_E_REQUEST, "there is no request %llu", (unsigned long long)id);
  return group;
}

static rm_sequence *find_sample(const rm_engine *engine, uint64_t id, int32_t sample, rm_error *err) {
  rm_group *group = rm_find_group(engine, id, err);
  if (!group) return NULL;
  if (sample >= 0 && sample < group->n) return &group->sequences[sample];
  rm_fail(err, RM_E_REQUEST, "request %llu has no sample %d, only 0 … %d", (unsigned long long)id, sample, group->n - 1);
  return NULL;
}

// ---------------------------------------------------------------------------------------------- in
static rm_request_rules rules_of(const rm_engine *engine) {
  return (rm_request_rules){
      .vocab = engine->spec->vocab_size,
      .max_model_len = engine->options.max_model_len,
      .page_size = engine->options.page_size,
      .n_pages = engine->n_pages,
      .routed_per_token = engine->routed_per_token,
      .hosted = rm_is_external(engine),
      .eos_ids = engine->options.eos_ids,
      .n_eos = engine->options.n_eos,
      .engine_seed = engine->options.seed,
  };
}

static rm_code check_state(const rm_engine *engine, rm_error *err) {
  if (engine->asleep & RM_PART_WEIGHTS) return rm_fail(err, RM_E_STATE, "a request while the weights are asleep");
  if (!rm_store_weights(engine->store)) return rm_fail(err, RM_E_NOT_SYNCED, "a request before any weights were synced");
  return RM_OK;
}

rm_code rm_engine_check(const rm_engine *engine, const rm_request *request, rm_error *err) {
  const rm_request_rules rules = rules_of(engine);
  const rm_code code = check_state(engine, err);
  return code ? code : rm_group_check(request, &rules, err);
}

rm_code rm_engine_add(rm_engine *engine, const rm_request *request, uint64_t *id, rm_error *err) {
  const rm_request_rules rules = rules_of(engine);
  rm_code code = check_state(engine, err);
  if (code) return code;
  const uint64_t number = request->id ? request->id : engine->next_id;
  if (number < engine->next_id)
    return rm_fail(err, RM_E_STATE, "request %llu is not above %llu, the last one", (unsigned long long)number,
                   (unsigned long long)engine->next_id - 1);
  rm_group *group;
  code = rm_group_create(request, &rules, number, engine->next_order, &group, err);
  if (code) return code;
  if (!grow_buckets(engine)) {
    rm_free(group);
    return rm_fail(err, RM_E_MEMORY, "no memory for the table of %lld requests", (long long)engine->n_groups + 1);
  }
  engine->next_id = number + 1;
  engine->next_order += (uint64_t)group->n;
  engine->n_groups++;
  engine->n_live++;
  group->next_in_bucket = *bucket(engine, group->id);
  *bucket(engine, group->id) = group;
  rm_list_insert_before(&engine->live, &group->link);
  for (int32_t i = 0; i < group->n; i++) rm_enqueue(engine, &group->sequences[i]);
  *id = group->id;
  return RM_OK;
}

// ---------------------------------------------------------------------------------------------- out
int64_t rm_engine_finished(rm_engine *engine, uint64_t *ids, int64_t capacity) {
  int64_t n = 0;
  for (; n < capacity && !rm_list_empty(&engine->finished); n++) {
    rm_group *group = (rm_group *)engine->finished.next;
    rm_list_remove(&group->link);
    ids[n] = group->id;
  }
  return n;
}

uint64_t rm_engine_next_finished(const rm_engine *engine) {
  return rm_list_empty(&engine->finished) ? 0 : ((const rm_group *)engine->finished.next)->id;
}

int rm_engine_has(const rm_engine *engine, uint64_t id) {
  const rm_group *group = engine->n_buckets ? *bucket(engine, id) : NULL;
  while (group && group->id != id) group = group->next_in_bucket;
  return group != NULL;
}

rm_code rm_engine_view(const rm_engine *engine, uint64_t id, rm_request_view *out, rm_error *err) {
  const rm_group *group = rm_find_group(engine, id, err);
  if (!group) return RM_E_REQUEST;
  *out = (rm_request_view){
      .id = id,
      .finished = group->n_done == group->n,
      .error = group->error,
      .message = group->message,
      .n_prompt = group->n_prompt,
      .n_cached = group->n_cached,
      .n_scored = group->n_scored,
      .prompt_logprobs = group->prompt_logprobs,
      .prompt_sampling_logprobs = group->prompt_sampling,
      .prompt_ranks = group->want_ranks ? group->prompt_ranks : NULL,
      .prompt_top_ids = group->prompt_top_ids,
      .prompt_top_logprobs = group->prompt_top_logprobs,
      .prompt_routed = group->prompt_routed,
      .n = group->n,
  };
  return RM_OK;
}

rm_code rm_engine_sample_view(const rm_engine *engine, uint64_t id, int32_t sample, rm_sample_view *out, rm_error *err) {
  const rm_sequence *seq = find_sample(engine, id, sample, err);
  if (!seq) return RM_E_REQUEST;
  *out = (rm_sample_view){
      .finish = seq->finish,
      .stop_token = seq->stop_token,
      .n_tokens = seq->n_tokens,
      .tokens = seq->ids + seq->group->n_prompt,
      .logprobs = seq->logprobs,
      .sampling_logprobs = seq->sampling_logprobs,
      .versions = seq->versions,
      .no_contract = seq->no_contract,
      .ranks = seq->group->want_ranks ? seq->ranks : NULL,
      .n_top = seq->group->top_logprobs,
      .top_ids = seq->top_ids,
      .top_logprobs = seq->top_logprobs,
      .routed = seq->routed,
  };
  return RM_OK;
}

rm_code rm_engine_release(rm_engine *engine, uint64_t id, rm_error *err) {
  rm_group *group = rm_find_group(engine, id, err);
  if (!group) return RM_E_REQUEST;
  if (group->n_done < group->n) return rm_fail(err, RM_E_STATE, "request %llu is not finished; abort it first", (unsigned long long)id);
  rm_group **at = bucket(engine, id);
  while (*at != group) at = &(*at)->next_in_bucket;
  *at = group->next_in_bucket;
  rm_list_remove(&group->link);
  engine->n_groups--;
  rm_free(group);
  return RM_OK;
}

// ---------------------------------------------------------------------------------------------- ends from outside
rm_code rm_engine_abort(rm_engine *engine, uint64_t id, rm_error *err) {
  rm_group *group = rm_find_group(engine, id, err);
  if (!group) return RM_E_REQUEST;
  rm_finish_group(engine, group, RM_FINISH_ABORT);
  return RM_OK;
}

rm_code rm_engine_stop_sample(rm_engine *engine, uint64_t id, int32_t sample, int64_t n_tokens, rm_error *err) {
  rm_sequence *seq = find_sample(engine, id, sample, err);
  if (!seq) return RM_E_REQUEST;
  if (n_tokens < 0 || n_tokens > seq->n_tokens)
    return rm_fail(err, RM_E_REQUEST, "sample %d of request %llu cannot stop at %lld tokens: it has %lld", sample, (unsigned long long)id,
                   (long long)n_tokens, (long long)seq->n_tokens);
  if (seq->finish == RM_FINISH_ABORT || seq->finish == RM_FINISH_ERROR)
    return rm_fail(err, RM_E_STATE, "sample %d of request %llu was %s", sample, (unsigned long long)id,
                   seq->finish == RM_FINISH_ABORT ? "aborted" : "ended by an error");
  if (seq->status != RM_DONE) rm_finish_sequence(engine, seq, RM_FINISH_STOP);
  seq->finish = RM_FINISH_STOP;
  seq->stop_token = -1;
  seq->n_tokens = n_tokens;
  return RM_OK;
}
