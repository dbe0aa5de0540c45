// scheduler.c: the scheduler alone, without a model, a device or another rank. The model is a hash:
// the state at a position is a function of the token there and of the state before, which is read
// through the block table from an array that replaces the KV cache. The token drawn from a row is a
// function of its state, the seed and the position.
//
// Oracle: the tokens of each sample, computed from its prompt without any page. A page that is
// shared, copied, cached, preempted or zeroed wrongly gives another token. Besides: each row's page
// belongs to its sequence, no two rows write one slot, pages are given back at the end.
//
// In half of the cases the model also has states of sequences. A sequence's rows load the hash of
// all tokens before them and save it after the rows that the plan names. No state is saved twice in
// a step, or saved by a sequence while another one loads it.
//
//   scheduler [--cases 300] [--seed 1] [--plant 1: pages are not copied, 2: not zeroed, 3: states are
//             saved one row early]
#include <string.h>

#include "common/fuzz.h"
#include "scheduler/scheduler.h"

enum {
  VOCAB = 50,
  PAGE = 16,
  MAX_LEN = 96,
  MAX_ROWS = 64,
  MAX_PAGES = 64,
  MAX_REQUESTS = 12,
  MAX_STATES = 24
};

typedef struct scene {
  fuzz f;
  rm_scheduler scheduler;
  uint64_t kv[MAX_PAGES * PAGE];
  uint64_t states[MAX_STATES];
  int32_t prompts[MAX_REQUESTS][MAX_LEN];
  int32_t tokens[MAX_ROWS], ranks[MAX_ROWS], kept[MAX_ROWS];
  float floats[MAX_ROWS];
  uint8_t flags[MAX_ROWS];
  long steps, samples, preemptions, hits, copies, loads, cached, state_evictions;
} scene;

static uint64_t state_of(uint64_t before, int32_t token) {
  return tiny_mix(before + 0x9E3779B97F4A7C15u * (uint64_t)(token + 1));
}

static int32_t draw_of(uint64_t state, uint64_t seed, int64_t length) {
  return (int32_t)(tiny_mix(state ^ tiny_mix(seed + (uint64_t)length)) % VOCAB);
}

static void begin(scene *s) {
  const rm_scheduler_options options = {
      .limits = {.vocab = VOCAB, .max_model_len = MAX_LEN, .page_size = PAGE, .engine_seed = 3},
      .max_num_seqs = 1 + fuzz_below(&s->f, 6),
      .max_num_batched_tokens = 1 + fuzz_below(&s->f, MAX_ROWS),
      .prefix_caching = !fuzz_one_in(&s->f, 4),
  };
  const int64_t n_pages = MAX_LEN / PAGE + fuzz_below(&s->f, MAX_PAGES - MAX_LEN / PAGE);
  rm_error err = RM_ERROR_INIT;
  memset(&s->scheduler, 0, sizeof s->scheduler);
  memset(s->kv, 0, sizeof s->kv);
  tiny_must(rm_scheduler_create(&s->scheduler, &options, &err), &err);
  const int64_t n_states = fuzz_one_in(&s->f, 2) ? 0 : 2 + fuzz_below(&s->f, MAX_STATES - 1);
  tiny_must(rm_scheduler_open_pages(&s->scheduler, n_pages, n_states,
                                    PAGE * (1 + fuzz_below(&s->f, 3)), &err),
            &err);
}

static void add(scene *s, uint64_t id) {
  int32_t *prompt = s->prompts[id - 1];
  const uint64_t text = fuzz_one_in(&s->f, 2) ? s->f.seed : fuzz_bits(&s->f); // some begin alike
  const int64_t n_prompt = 1 + fuzz_below(&s->f, MAX_LEN - 1);
  for (int64_t p = 0; p < n_prompt; p++)
    prompt[p] = (int32_t)(tiny_mix(text + (uint64_t)p) % VOCAB);
  const rm_request request = {.prompt = prompt,
                              .n_prompt = n_prompt,
                              .n = 1 + (int32_t)fuzz_below(&s->f, 4),
                              .max_tokens = 1 + fuzz_below(&s->f, 40),
                              .temperature = 1,
                              .top_p = 1,
                              .top_k = -1,
                              .has_seed = 1,
                              .seed = 7 * id,
                              .prompt_logprobs = (int32_t)fuzz_below(&s->f, 2) - 1};
  rm_error err = RM_ERROR_INIT;
  tiny_must(rm_sequence_group_check(&request, &s->scheduler.options.limits, &err), &err);
  tiny_must(rm_scheduler_add(&s->scheduler, &request, id, &err), &err);
}

// ---------------------------------------------------------------------------------- the hash model
static void write_pages(scene *s) {
  const rm_plan *plan = &s->scheduler.plan;
  for (int64_t i = 0; i < plan->n_writes; i++) {
    const rm_page_write *write = &plan->writes[i];
    uint64_t *to = s->kv + write->to * PAGE;
    if (write->from < 0 && s->f.plant != 2) memset(to, 0, PAGE * sizeof *to);
    if (write->from >= 0 && s->f.plant != 1)
      memcpy(to, s->kv + write->from * PAGE, PAGE * sizeof *to);
    s->copies += write->from >= 0;
  }
}

static uint64_t *slot_of(scene *s, int64_t row, int64_t position) {
  const rm_plan *plan = &s->scheduler.plan;
  const int32_t *table = plan->block_tables + plan->seq_of_row[row] * s->scheduler.max_pages;
  return &s->kv[table[position / PAGE] * PAGE + position % PAGE];
}

// Pages are zero before they are written, like the memory after a row's position.
static void compute(scene *s, uint64_t states[]) {
  const rm_plan *plan = &s->scheduler.plan;
  for (int64_t r = 0; r < plan->n_rows; r++) {
    const int64_t p = plan->positions[r];
    uint64_t *at = slot_of(s, r, p);
    states[r] = state_of(p ? *slot_of(s, r, p - 1) : 0, plan->ids[r]);
    if (plan->slots[r] < 0) {
      if (*at != states[r]) tiny_die("%s: a cached position differs", fuzz_where(&s->f));
      continue;
    }
    if (at != &s->kv[plan->slots[r]]) tiny_die("%s: a slot of another page", fuzz_where(&s->f));
    if (*at) tiny_die("%s: a position is written twice or not zero", fuzz_where(&s->f));
    *at = states[r];
  }
}

// What the plan's states allow, with the hashes that the rows' pages give.
static void check_states(scene *s, const uint64_t states[]) {
  const rm_plan *plan = &s->scheduler.plan;
  int64_t loaded_by[MAX_STATES], saved[MAX_STATES] = {0}; // row of the sequence + 1; row + 1
  uint64_t before[MAX_STATES];
  memset(loaded_by, 0, sizeof loaded_by);
  memcpy(before, s->states, sizeof before);
  for (int64_t r = 0; r < plan->n_rows && s->scheduler.n_states; r++) {
    const int32_t row = plan->seq_of_row[r], load = plan->load_states[row];
    if (r && plan->seq_of_row[r - 1] == row) continue;
    const int64_t p = plan->positions[r];
    if ((load < 0) != !p)
      tiny_die("%s: position %lld loads %d", fuzz_where(&s->f), (long long)p, load);
    if (load < 0) continue;
    if (before[load] != *slot_of(s, r, p - 1)) tiny_die("%s: another state", fuzz_where(&s->f));
    loaded_by[load] = loaded_by[load] && loaded_by[load] != row + 1 ? -1 : row + 1;
    s->loads++;
  }
  for (int64_t r = 0; r < plan->n_rows; r++) {
    const int32_t save = plan->save_states[r];
    const int is_last = r + 1 == plan->n_rows || plan->seq_of_row[r + 1] != plan->seq_of_row[r];
    if (is_last && s->scheduler.n_states && save < 0) tiny_die("%s: not saved", fuzz_where(&s->f));
    if (save < 0) continue;
    if (saved[save]++) tiny_die("%s: a state is saved twice", fuzz_where(&s->f));
    if (loaded_by[save] && loaded_by[save] != plan->seq_of_row[r] + 1)
      tiny_die("%s: a state is loaded and saved", fuzz_where(&s->f));
    s->states[save] = states[s->f.plant == 3 && r ? r - 1 : r];
  }
}

static void step(scene *s) {
  rm_scheduler *scheduler = &s->scheduler;
  const rm_plan *plan = &scheduler->plan;
  uint64_t states[MAX_ROWS];
  if (rm_schedule(scheduler) != RM_LAST_BATCH) tiny_die("%s: no work", fuzz_where(&s->f));
  write_pages(s);
  compute(s, states);
  check_states(s, states);
  for (int64_t i = 0; i < plan->n_out; i++) {
    const rm_sample_params *params = &plan->params[i];
    s->tokens[i] = draw_of(states[plan->out_rows[i]], params->seed, (int64_t)params->counter);
  }
  const rm_step_output output = {.row_flags = s->flags,
                                 .target_logprobs = s->floats,
                                 .tokens = s->tokens,
                                 .ranks = s->ranks,
                                 .kept = s->kept,
                                 .logprobs = s->floats,
                                 .sampling_logprobs = s->floats};
  rm_commit(scheduler, &output);
  s->steps++;
}

// ------------------------------------------------------------------------------------- the oracle
static void check(scene *s, uint64_t id) {
  tiny_request_view request;
  rm_error err = RM_ERROR_INIT;
  tiny_must(tiny_view_request(&s->scheduler, id, &request, &err), &err);
  uint64_t prompt = 0;
  for (int64_t p = 0; p < request.n_prompt; p++) prompt = state_of(prompt, s->prompts[id - 1][p]);
  for (int32_t i = 0; i < request.n; i++) {
    tiny_sample_view sample;
    uint64_t state = prompt;
    tiny_must(tiny_view_sample(&s->scheduler, id, i, &sample, &err), &err);
    for (int64_t t = 0; t < sample.n_tokens; t++) {
      const int32_t want = draw_of(state, 7 * id + (uint64_t)i, request.n_prompt + t);
      if (sample.tokens[t] != want)
        tiny_die("%s: request %llu, sample %d: token %lld is %d instead of %d", fuzz_where(&s->f),
                 (unsigned long long)id, i, (long long)t, sample.tokens[t], want);
      state = state_of(state, want);
    }
    s->samples++;
  }
  tiny_must(rm_scheduler_release(&s->scheduler, id, &err), &err);
}

int main(int argc, char **argv) {
  static scene s;
  s.f = fuzz_begin(argc, argv, 300, 3);
  while (fuzz_next_case(&s.f)) {
    const uint64_t n = 1 + (uint64_t)fuzz_below(&s.f, MAX_REQUESTS);
    begin(&s);
    for (uint64_t id = 1; id <= n || s.scheduler.n_live;) {
      if (id <= n && fuzz_one_in(&s.f, 3)) add(&s, id++);
      if (s.scheduler.n_live) step(&s);
    }
    for (uint64_t id = 1; id <= n; id++) check(&s, id);
    const int64_t held = s.scheduler.options.limits.n_pages - rm_kv_free_pages(s.scheduler.cache);
    if (held) tiny_die("%s: %lld pages are held", fuzz_where(&s.f), (long long)held);
    const int64_t states = s.scheduler.n_states - rm_kv_free_states(s.scheduler.cache);
    if (states) tiny_die("%s: %lld states are held", fuzz_where(&s.f), (long long)states);
    if (s.scheduler.n_states) s.cached += s.scheduler.cached_tokens;
    s.state_evictions += rm_kv_statistics(s.scheduler.cache)->state_evictions;
    s.preemptions += s.scheduler.preemptions;
    s.hits += rm_kv_statistics(s.scheduler.cache)->hits;
    rm_scheduler_destroy(&s.scheduler);
  }
  printf("scheduler: %ld samples in %ld steps; %ld preemptions, %ld pages reused, %ld copied; "
         "%ld states loaded, %ld evicted, %ld tokens of prefixes with states\n",
         s.samples, s.steps, s.preemptions, s.hits, s.copies, s.loads, s.state_evictions, s.cached);
  return 0;
}
