// tiny.c: see tiny.h. A value is a function of (seed, parameter, element), so weights need no
// generator that is carried along, and two of them with one seed are equal byte for byte.
#include "common/tiny.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_HEAD_DIM = 64, LAYERS = 2, MAX_LEN = 64, MAX_TOKENS = 10 };

static const struct sizes {
  int64_t vocab, hidden, intermediate, head_dim, experts, top_k, of_expert;
} SMALL = {131, 40, 56, 16, 5, 2, 24}, WIDE = {517, 168, 208, 64, 9, 3, 72};

_Noreturn void tiny_die(const char *format, ...) {
  va_list args;
  va_start(args, format);
  vfprintf(stderr, format, args);
  va_end(args);
  fputc('\n', stderr);
  exit(1);
}

void tiny_must(rm_code code, const rm_error *err) {
  if (code) tiny_die("%s: %s", rm_code_name(code), rm_error_message(err));
}

uint64_t tiny_mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

uint64_t tiny_hash_bytes(uint64_t hash, const void *data, size_t bytes) {
  const unsigned char *p = data;
  for (size_t i = 0; i < bytes; i++) hash = (hash ^ p[i]) * 0x100000001B3u;
  return hash;
}

static void *take(size_t count, size_t bytes) {
  void *block = calloc(count ? count : 1, bytes);
  if (!block) tiny_die("no memory for %zu × %zu bytes of a test", count, bytes);
  return block;
}

// ------------------------------------------------------------------------------------------ model
tiny_model *tiny_model_create(tiny_kind kind, rm_dtype dtype) {
  const struct sizes *size = kind == TINY_WIDE ? &WIDE : &SMALL;
  float inv_freq[MAX_HEAD_DIM / 2];
  for (int i = 0; i < size->head_dim / 2; i++)
    inv_freq[i] = powf(10000.0f, -2.0f * (float)i / (float)size->head_dim);
  const int moe = kind == TINY_MOE || kind == TINY_WIDE;
  const rm_layer_spec layers[LAYERS] = {{.rotates = 1},
                                        {.is_moe = moe, .rotates = 1, .window = moe ? 0 : 20}};
  const rm_spec values = {
      .vocab_size = size->vocab,
      .hidden_size = size->hidden,
      .intermediate_size = size->intermediate,
      .n_layers = LAYERS,
      .n_heads = 4,
      .n_kv_heads = 2,
      .head_dim = size->head_dim,
      .rotary_dim = size->head_dim,
      .n_experts = moe ? size->experts : 0,
      .top_k = moe ? size->top_k : 0,
      .moe_intermediate_size = moe ? size->of_expert : 0,
      .norm_topk_prob = moe,
      .n_groups = 1,
      .top_groups = 1,
      .route_scale = 1,
      .norm_before = 1,
      .qk_norm = 1,
      .wq_rows = RM_WQ_HALVES,
      .attention_bias = kind == TINY_TIED,
      .o_bias = kind == TINY_TIED,
      .tie_word_embeddings = kind == TINY_TIED,
      .rms_norm_eps = 1e-6f,
      .rope_scale = 1,
      .inv_freq = inv_freq,
      .layers = layers,
  };
  tiny_model *model = take(1, sizeof *model);
  rm_error err = RM_ERROR_INIT;
  model->kind = kind;
  model->dtype = dtype;
  tiny_must(rm_spec_create(&values, &model->spec, &err), &err);
  tiny_must(rm_params_create(model->spec, NULL, dtype, 0, &model->params, &err), &err);
  return model;
}

void tiny_model_destroy(tiny_model *model) {
  if (!model) return;
  rm_params_destroy(model->params);
  rm_spec_destroy(model->spec);
  free(model);
}

// ---------------------------------------------------------------------------------------- weights
static int is_norm(rm_param_kind kind) {
  return kind == RM_P_FINAL_NORM || kind == RM_P_INPUT_NORM || kind == RM_P_PRE_MLP_NORM ||
         kind == RM_P_Q_NORM || kind == RM_P_K_NORM;
}

// In ±√3·scale, or around 1 for a norm: activations neither die nor explode.
static float value_of(const rm_param *param, uint64_t seed, int64_t index, int64_t element) {
  const uint64_t bits = tiny_mix(tiny_mix(seed ^ tiny_mix((uint64_t)index)) + (uint64_t)element);
  const float unit = (float)(bits >> 40) * 0x1p-23f - 1; // [−1, 1), exact
  if (is_norm(param->kind)) return 1 + 0.25f * unit;
  const float scale = param->kind == RM_P_EMBED ? 1.0f
                      : param->n_dims == 1      ? 0.2f
                                                : 2.0f / sqrtf((float)param->cols);
  return scale * unit;
}

static void store(void *to, rm_dtype dtype, int64_t i, float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (dtype == RM_F32) ((float *)to)[i] = value;
  else ((uint16_t *)to)[i] = (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16); // nearest even
}

static int is_sent(const rm_param *param) {
  return param->required || param->kind == RM_P_ROUTER_BIAS;
}

tiny_weights *tiny_weights_create(const tiny_model *model, uint64_t seed) {
  const rm_params *params = model->params;
  tiny_weights *weights = take(1, sizeof *weights);
  size_t bytes = 0, used = 0;
  for (int64_t i = 0; i < params->n; i++)
    bytes += (size_t)(params->list[i].rows * params->list[i].cols) * sizeof(float);
  weights->list = take((size_t)params->n, sizeof *weights->list);
  weights->block = take(bytes, 1);
  for (int64_t i = 0; i < params->n; i++) {
    const rm_param *param = &params->list[i];
    if (!is_sent(param)) continue;
    const int64_t n = param->rows * param->cols, length = n * (int64_t)rm_dtype_bytes(param->dtype);
    tiny_tensor *out = &weights->list[weights->n++];
    void *data = weights->block + used;
    used += (size_t)n * sizeof(float);
    for (int64_t e = 0; e < n; e++) store(data, param->dtype, e, value_of(param, seed, i, e));
    snprintf(out->name, sizeof out->name, "%s", rm_param_name(params, param).text);
    out->length = strlen(out->name);
    out->tensor = (rm_tensor){.data = data,
                              .dtype = param->dtype == RM_BF16 ? RM_SRC_BF16 : RM_SRC_F32,
                              .n_dims = param->n_dims};
    out->tensor.shape[0] = param->n_dims == 1 ? param->cols : param->rows;
    out->tensor.strides[0] = param->n_dims == 1 ? 1 : param->cols;
    if (param->n_dims == 2) out->tensor.shape[1] = param->cols, out->tensor.strides[1] = 1;
    out->tensor.span_hi = length;
  }
  return weights;
}

void tiny_weights_destroy(tiny_weights *weights) {
  if (!weights) return;
  free(weights->list);
  free(weights->block);
  free(weights);
}

// ----------------------------------------------------------------------------------------- engine
rm_engine_options tiny_options(const tiny_model *model, int n_threads) {
  static const int32_t eos[1] = {3};
  const rm_spec *s = model->spec;
  const int64_t page = 16, elems = s->n_kv_heads * (rm_k_page_elems(page, s->head_dim) +
                                                    rm_v_page_elems(page, s->head_dim));
  return (rm_engine_options){
      .dtype = model->dtype,
      .n_threads = n_threads,
      .max_model_len = MAX_LEN,
      .max_num_seqs = 4,
      .max_num_batched_tokens = 24,
      .page_size = page,
      .kv_bytes = 12 * (uint64_t)(s->n_layers * elems) * rm_dtype_bytes(model->dtype),
      .seed = 5,
      .prefix_caching = 1,
      .n_eos = 1,
      .eos_ids = eos,
  };
}

rm_engine *tiny_engine(const tiny_model *model, int n_threads) {
  const rm_engine_options options = tiny_options(model, n_threads);
  rm_engine *engine;
  rm_error err = RM_ERROR_INIT;
  tiny_must(rm_engine_create(model->spec, &options, &engine, &err), &err);
  return engine;
}

static rm_code send(rm_engine *engine, int skip_unknown, rm_entry *entry, int pushes,
                    rm_error *err) {
  rm_code code = RM_OK;
  char *text = malloc(entry->length + 1); // the name with a NUL behind it
  if (!text) tiny_die("no memory for a name");
  memcpy(text, entry->name, entry->length);
  text[entry->length] = 0;
  entry->name = text;
  if (rm_engine_store(engine)->open)
    code = rm_names_resolve(rm_engine_store(engine)->params, entry->name, entry->length,
                            skip_unknown, &entry->target, err);
  if (!code) code = rm_sync_check(rm_engine_store(engine), entry, &entry->tensor, err);
  int is_done = 0;
  const rm_entry *one = entry; // read by the copy too
  if (!code && pushes) code = rm_engine_sync_push(engine, &one, 1, err);
  if (!code && pushes) code = rm_engine_sync_copy(engine, INT64_MAX, &is_done, err);
  rm_target_clear(&entry->target);
  free(text);
  return code;
}

rm_code tiny_check(rm_engine *engine, int skip_unknown, const char *name, size_t length,
                   const rm_tensor *tensor, rm_error *err) {
  return send(engine, skip_unknown, &(rm_entry){.name = name, .length = length, .tensor = *tensor},
              0, err);
}

rm_code tiny_push(rm_engine *engine, int skip_unknown, const char *name, size_t length,
                  const rm_tensor *tensor, rm_error *err) {
  return send(engine, skip_unknown, &(rm_entry){.name = name, .length = length, .tensor = *tensor},
              1, err);
}

rm_code tiny_sync_with(rm_engine *engine, const tiny_weights *weights,
                       const rm_sync_options *options, rm_inflight inflight, rm_error *err) {
  rm_code code = rm_engine_sync_begin(engine, options, err);
  if (code) return code;
  for (int64_t i = 0; i < weights->n && !code; i++) {
    const tiny_tensor *t = &weights->list[i];
    code = tiny_push(engine, 0, t->name, t->length, &t->tensor, err);
  }
  if (!code) code = rm_engine_sync_commit(engine, inflight, NULL, err);
  if (code) rm_engine_sync_abort(engine);
  return code;
}

rm_code tiny_sync(rm_engine *engine, const tiny_weights *weights, rm_inflight inflight,
                  rm_error *err) {
  return tiny_sync_with(engine, weights, &(rm_sync_options){.version = -1}, inflight, err);
}

// --------------------------------------------------------------------------------------- requests
rm_request tiny_request(const tiny_model *model, uint64_t seed, int i, tiny_room *room) {
  const uint64_t r = tiny_mix(seed ^ tiny_mix((uint64_t)i));
  const uint64_t text = i % 3 == 2 ? tiny_mix(seed) : r; // of those that begin alike
  const int64_t n_prompt = 1 + (int64_t)(r % 40);
  for (int64_t p = 0; p < n_prompt; p++)
    room->prompt[p] = (int32_t)(tiny_mix(text + (uint64_t)p) % (uint64_t)model->spec->vocab_size);
  room->stop_ids[0] = (int32_t)(r >> 8 & 63);
  room->stop_ids[1] = (int32_t)(r >> 16 & 63);
  const int score = i % 5 == 4;
  return (rm_request){
      .kind = score ? RM_SCORE : RM_GENERATE,
      .prompt = room->prompt,
      .n_prompt = n_prompt,
      .n = score ? 1 : 1 + (int32_t)(r >> 24 & 3) % 3,
      .max_tokens = MAX_TOKENS,
      .min_tokens = i % 4 == 1 ? 4 : 0,
      .temperature = i % 3 == 0 ? 0.0f : 0.8f,
      .top_p = i % 4 == 2 ? 0.9f : 1.0f,
      .min_p = i % 4 == 3 ? 0.01f : 0.0f,
      .top_k = i % 5 == 1 ? 20 : -1,
      .has_seed = 1,
      .seed = r,
      .stop_ids = room->stop_ids,
      .n_stop_ids = i % 6 == 5 ? 2 : 0,
      .ignore_eos = i % 2,
      .logprobs = i % 4 == 0 ? 3 : 0,
      .prompt_logprobs = score || i % 7 == 1 ? 2 : -1,
      .score_sampling = score && (r >> 32 & 1),
  };
}

static uint64_t hash_array(uint64_t hash, const void *data, int64_t n, size_t bytes) {
  return data ? tiny_hash_bytes(hash, data, (size_t)rm_max64(n, 0) * bytes) : hash + 1;
}

uint64_t tiny_hash(const rm_engine *engine, uint64_t id) {
  const rm_spec *spec = rm_engine_store(engine)->params->spec;
  const int64_t per_token = spec->n_moe_layers * spec->top_k;
  rm_error err = RM_ERROR_INIT;
  tiny_request_view v;
  tiny_must(tiny_view_request(rm_engine_scheduler(engine, id), id, &v, &err), &err);
  uint64_t hash = tiny_hash_bytes(0xCBF29CE484222325u, &v.error, sizeof v.error);
  hash = hash_array(hash, v.prompt_logprobs, v.n_prompt - 1, sizeof(float));
  hash = hash_array(hash, v.prompt_sampling_logprobs, v.n_prompt - 1, sizeof(float));
  hash = hash_array(hash, v.prompt_top_ids, 2 * (v.n_prompt - 1),
                    sizeof(int32_t)); // prompt_logprobs is 2 where it is set
  hash = hash_array(hash, v.prompt_top_logprobs, 2 * (v.n_prompt - 1), sizeof(float));
  hash = hash_array(hash, v.prompt_routed, v.n_prompt * per_token, sizeof(int16_t));
  for (int32_t s = 0; s < v.n; s++) {
    tiny_sample_view w;
    tiny_must(tiny_view_sample(rm_engine_scheduler(engine, id), id, s, &w, &err), &err);
    const int64_t ends[3] = {w.finish, w.stop_token, w.n_tokens};
    hash = tiny_hash_bytes(hash, ends, sizeof ends);
    hash = hash_array(hash, w.tokens, w.n_tokens, sizeof(int32_t));
    hash = hash_array(hash, w.logprobs, w.n_tokens, sizeof(float));
    hash = hash_array(hash, w.sampling_logprobs, w.n_tokens, sizeof(float));
    hash = hash_array(hash, w.top_ids, w.top_ids ? 3 * w.n_tokens : 0,
                      sizeof(int32_t)); // logprobs is 3 where it is set
    hash = hash_array(hash, w.top_logprobs, w.top_logprobs ? 3 * w.n_tokens : 0, sizeof(float));
    hash = hash_array(hash, w.routed, (w.n_tokens - 1) * per_token, sizeof(int16_t));
  }
  return hash;
}

rm_code tiny_drain(rm_engine *engine, rm_error *err) {
  while (rm_engine_unfinished(engine)) {
    int64_t rows;
    const rm_code code = rm_engine_step(engine, NULL, &rows, err);
    if (code) return code;
    if (!rows)
      return rm_fail(err, RM_E_STATE, "a step without work while %lld requests are unfinished",
                     (long long)rm_engine_unfinished(engine));
  }
  return RM_OK;
}

uint64_t tiny_generate(rm_engine *engine, const tiny_model *model, uint64_t seed, int n) {
  uint64_t *ids = take((size_t)n, sizeof *ids), hash = 0;
  rm_error err = RM_ERROR_INIT;
  for (int i = 0; i < n; i++) {
    tiny_room room;
    const rm_request request = tiny_request(model, seed, i, &room);
    tiny_must(rm_engine_add(engine, &request, &ids[i], &err), &err);
  }
  tiny_must(tiny_drain(engine, &err), &err);
  for (int i = 0; i < n; i++) {
    hash = tiny_mix(hash ^ tiny_hash(engine, ids[i]));
    tiny_must(rm_scheduler_release(rm_engine_scheduler(engine, ids[i]), ids[i], &err), &err);
  }
  free(ids);
  return hash;
}
