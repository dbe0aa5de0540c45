// variants.c: whole rollouts under every instruction set. The op tests say that each op is right by itself; this says that the
// engine, with what it passes from op to op, gives the same words under each variant: raw logits, logprobs, tokens, routing.
//
// Input: every tiny model and TINY_WIDE, both dtypes; a dozen requests in a batch of four, then prompts of 1, 35, 150 and 1,100
// tokens (the last is longer than an attention segment) with all their logits. Oracle: the reference kernels with one thread,
// chunks of 256 rows. The others run with 1 and 2 threads and chunks of 256 and 37 rows. Bound: no word differs.
//
//   variants [--quick 1: without the longest prompt] [--plant 1: one bit of the oracle is flipped]
//
// Exit status 3 when no variant but the reference runs here.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "common/option.h"
#include "common/tiny.h"

enum { REQUESTS = 12, PROMPTS = 4, LONGEST = 1100, GENERATED = 6, TOP = 3, PAGES = 200 };
static int64_t lengths[PROMPTS] = {1, 35, 150, LONGEST};

typedef struct record {         // every word of the results, in order
  uint32_t *words;
  size_t n, capacity, n_logits;
} record;

static void append(record *r, const void *data, size_t bytes) {
  if (bytes % 2) tiny_die("%zu bytes are no words", bytes);
  const size_t words = (bytes + 3) / 4;
  while (r->n + words > r->capacity) {
    r->capacity = r->capacity ? 2 * r->capacity : 1 << 16;
    if (!(r->words = realloc(r->words, r->capacity * sizeof *r->words))) tiny_die("no memory for results");
  }
  if (!words) return;
  r->words[r->n + words - 1] = 0;
  memcpy(r->words + r->n, data, bytes);
  r->n += words;
}

static void append_request(record *r, rm_engine *engine, uint64_t id, int64_t routed_per_token) {
  rm_error err = RM_ERROR_INIT;
  rm_request_view v;
  tiny_must(rm_engine_view(engine, id, &v, &err), &err);
  tiny_must(v.error, &err);
  if (v.prompt_logprobs) append(r, v.prompt_logprobs, (size_t)(v.n_prompt - 1) * sizeof(float));
  if (v.prompt_routed) append(r, v.prompt_routed, (size_t)(v.n_prompt * routed_per_token) * sizeof(int16_t));
  for (int32_t s = 0; s < v.n; s++) {
    rm_sample_view w;
    tiny_must(rm_engine_sample_view(engine, id, s, &w, &err), &err);
    append(r, w.tokens, (size_t)w.n_tokens * sizeof *w.tokens);
    append(r, w.logprobs, (size_t)w.n_tokens * sizeof(float));
    append(r, w.sampling_logprobs, (size_t)w.n_tokens * sizeof(float));
    if (w.top_logprobs) append(r, w.top_logprobs, (size_t)(w.n_tokens * TOP) * sizeof(float));
  }
  tiny_must(rm_engine_release(engine, id, &err), &err);
}

static rm_request make_request(const tiny_model *model, int at, int32_t *prompt, float *logits) {
  for (int64_t i = 0; i < lengths[at]; i++) prompt[i] = (int32_t)(tiny_mix((uint64_t)(1000 * at + i)) % (uint64_t)model->spec->vocab_size);
  return (rm_request){.kind = logits ? RM_SCORE : RM_GENERATE,
                      .prompt = prompt,
                      .n_prompt = lengths[at],
                      .n = logits ? 1 : 2,
                      .max_tokens = GENERATED,
                      .temperature = 1.0f,
                      .top_p = 0.95f,
                      .top_k = -1,
                      .has_seed = 1,
                      .seed = (uint64_t)at,
                      .ignore_eos = 1,
                      .logprobs = TOP,
                      .prompt_logprobs = logits ? 0 : -1,
                      .logits_out = logits};
}

static void run_prompts(record *r, rm_engine *engine, const tiny_model *model) {
  static int32_t prompts[2 * PROMPTS][LONGEST];
  const rm_spec *spec = model->spec;
  const size_t row = (size_t)spec->vocab_size * sizeof(float);
  float *logits[PROMPTS];
  uint64_t ids[2 * PROMPTS];
  rm_error err = RM_ERROR_INIT;
  for (int i = 0; i < 2 * PROMPTS; i++) {
    const int at = i % PROMPTS;
    if (i < PROMPTS && !(logits[i] = malloc((size_t)lengths[i] * row))) tiny_die("no memory for logits");
    const rm_request request = make_request(model, at, prompts[i], i < PROMPTS ? logits[i] : NULL);
    tiny_must(rm_engine_add(engine, &request, &ids[i], &err), &err);
  }
  tiny_must(tiny_drain(engine, &err), &err);
  for (int i = 0; i < 2 * PROMPTS; i++) append_request(r, engine, ids[i], spec->n_moe_layers * spec->top_k);
  for (int i = 0; i < PROMPTS; i++) {
    append(r, logits[i], (size_t)lengths[i] * row);
    r->n_logits += (size_t)(lengths[i] * spec->vocab_size);
    free(logits[i]);
  }
}

static record run(const tiny_model *model, const tiny_weights *weights, rm_isa isa, int threads, int64_t chunk) {
  record r = {0};
  rm_engine *engine;
  rm_error err = RM_ERROR_INIT;
  rm_engine_options options = tiny_options(model, threads);
  options.kernels = rm_kernels_for(isa);
  options.max_model_len = LONGEST + GENERATED;
  options.max_num_batched_tokens = chunk;
  options.kv_bytes = options.kv_bytes / 12 * PAGES;   // tiny_options has 12 pages
  tiny_must(rm_engine_create(model->spec, &options, &engine, &err), &err);
  tiny_must(tiny_sync(engine, weights, RM_INFLIGHT_REFUSE, &err), &err);
  const uint64_t batch = tiny_generate(engine, model, 1, REQUESTS);
  append(&r, &batch, sizeof batch);
  run_prompts(&r, engine, model);
  rm_engine_stats stats;
  rm_engine_statistics(engine, &stats);
  if (strcmp(stats.isa, rm_isa_name(isa)) != 0) tiny_die("asked for %s and got %s", rm_isa_name(isa), stats.isa);
  rm_engine_destroy(engine);
  return r;
}

// Words in which they differ.
static size_t compare(const record *want, const record *got) {
  if (want->n != got->n) tiny_die("%zu words instead of %zu", got->n, want->n);
  size_t differ = 0;
  for (size_t i = 0; i < want->n; i++) differ += want->words[i] != got->words[i];
  return differ;
}

static size_t check_model(tiny_kind kind, rm_dtype dtype, int plant, size_t compared[2]) {
  static const struct {
    int threads;
    int64_t chunk;
  } WAYS[] = {{1, 256}, {2, 37}};
  tiny_model *model = tiny_model_create(kind, dtype);
  tiny_weights *weights = tiny_weights_create(model, 3);
  size_t differ = 0;
  record want = run(model, weights, RM_ISA_REF, 1, 256);
  if (plant) want.words[want.n / 2] ^= 1;
  for (int isa = RM_ISA_AVX2; isa < RM_N_ISA; isa++)
    for (size_t way = 0; way < sizeof WAYS / sizeof *WAYS && !rm_isa_ask((rm_isa)isa).refused; way++) {
      record got = run(model, weights, (rm_isa)isa, WAYS[way].threads, WAYS[way].chunk);
      const size_t d = compare(&want, &got);
      if (d)
        printf("model %d, dtype %d, %s, %d threads: %zu of %zu words differ\n", kind, dtype, rm_isa_name((rm_isa)isa), WAYS[way].threads, d,
               want.n);
      differ += d;
      compared[0] += got.n, compared[1] += got.n_logits;
      free(got.words);
    }
  free(want.words);
  tiny_weights_destroy(weights);
  tiny_model_destroy(model);
  return differ;
}

int main(int argc, char **argv) {
  long plant = 0, quick = 0;
  option_read(argc, argv, (option[]){{"quick", .most = 1, .count = &quick}, {"plant", .most = 1, .count = &plant}, {0}});
  if (quick) lengths[PROMPTS - 1] = 60;
  size_t compared[2] = {0}, differ = 0;   // words, logits
  int ran = 0;
  for (int isa = RM_ISA_AVX2; isa < RM_N_ISA; isa++) {
    const rm_isa_state state = rm_isa_ask((rm_isa)isa);
    if (state.refused) printf("did not run: %s (%s)\n", rm_isa_name((rm_isa)isa), state.refused);
    else printf("ran: %s%s\n", rm_isa_name((rm_isa)isa), state.emulated ? " (emulated)" : ""), ran++;
  }
  if (!ran) return 3;
  for (int kind = 0; kind <= TINY_WIDE; kind++)
    for (int dtype = RM_BF16; dtype <= RM_F32; dtype++) differ += check_model((tiny_kind)kind, (rm_dtype)dtype, (int)plant, compared);
  if (rm_memory_blocks()) tiny_die("%zu blocks were not given back", rm_memory_blocks());
  printf("%zu of %zu words of rollouts differ, %zu raw logits among them\n", differ, compared[0], compared[1]);
  return differ != 0;
}
