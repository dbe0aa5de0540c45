// life.h: one engine of fuzz_calls.c with its prediction, its requests in slots, and the checks
// that follow every call: its return code (judge), and the observable state of the engine
// (check_all). The counters are per process.
#pragma once

#include "common/fuzz.h"
#include "common/seen.h"
#include "common/world.h"

enum { SLOTS = 12, GONE = 8, NO_TABLE = -1 };

typedef enum slot_state { EMPTY, LIVE, DONE } slot_state;

typedef struct slot {
  slot_state state;
  uint64_t id, hash; // hash: once it is done
  int which; // of the world's requests; NO_TABLE: made here out of another's answer
  rm_request request; // but for its pointers, see request_in
  tiny_room room;
  int mixed, kv_kept, stopped, aborted;
  int64_t version; // of all its tokens, unless mixed
  int set;
} slot;

// clang-format off
typedef enum call { CREATE, ADD, ADD_BAD, STEP, ABORT, RELEASE, VIEW, SAMPLE_VIEW, STOP_SAMPLE,
  RESET, SYNC_BEGIN, SYNC_CHECK,
  SYNC_PUSH, SYNC_COMMIT, SYNC_ABORT, SLEEP, WAKE, FINISHED, DESTROY, N_CALLS } call;
static const char *const call_names[N_CALLS] = {"create", "add", "add of a bad one", "step",
  "abort", "release", "view", "sample_view",
  "stop_sample", "reset_prefix_cache", "sync_begin", "sync_check", "sync_push",
  "sync_commit", "sync_abort", "sleep", "wake",
  "finished", "destroy"};
// clang-format on
static const uint8_t never_fails[N_CALLS] = {
    [CREATE] = 1, [RESET] = 1, [SYNC_ABORT] = 1, [WAKE] = 1, [FINISHED] = 1, [DESTROY] = 1,
};

typedef struct life {
  fuzz *f;
  const world *w;
  rm_engine *engine;
  rm_engine_options options;
  int64_t n_pages;
  predict p;
  slot slots[SLOTS];
  uint64_t gone[GONE], n_gone, next_id;
  int64_t steps, preemptions;
  int serves; // it does so most of the time
  int target; // the set that the open sync sends
  call last;
} life;

static long done[N_CALLS], refused[N_CALLS], verdicts[RM_N_CODE], ends[RM_FINISH_ERROR + 1];
static long whole, kept, continued, followed,
    preempted; // requests of one version, kept over a commit, …

static _Noreturn void wrong(life *l, const char *what) {
  tiny_die("%s: after %s: %s", fuzz_where(l->f), call_names[l->last], what);
}

// ------------------------------------------------------------------------------- what can be seen
static seen look(const life *l) { return seen_of(l->engine); }

// The code of one call. `before`: the state that must not change if it fails, NULL if it may
// change.
static int judge(life *l, call which, rm_code code, codes want, rm_error *err, const seen *before) {
  l->last = which;
  if (!code_in(want, code)) {
    char list[512] = "";
    for (int c = 0; c < RM_N_CODE; c++)
      if (code_in(want, (rm_code)c)) strcat(strcat(list, " "), rm_code_name((rm_code)c));
    tiny_die("%s: %s: %s, wanted%s: %s", fuzz_where(l->f), call_names[which], rm_code_name(code),
             list, rm_error_message(err));
  }
  verdicts[code]++;
  if (code == RM_OK) return (int)++done[which] > 0;
  refused[which]++;
  if (err->code != code || !*rm_error_message(err))
    wrong(l, "a refusal without its code or a message");
  if (before) {
    const seen after = look(l);
    if (memcmp(before, &after, sizeof after))
      wrong(l, "a call that failed changed what can be observed");
  }
  rm_error_clear(err);
  return 0;
}

static tiny_sample_view sample_of(life *l, const slot *at, int32_t sample) {
  tiny_sample_view v;
  rm_error err = RM_ERROR_INIT;
  if (tiny_view_sample(rm_engine_scheduler(l->engine, at->id), at->id, sample, &v, &err))
    wrong(l, "a sample that cannot be seen");
  return v;
}

static int32_t samples_of(life *l, const slot *at) {
  tiny_request_view v;
  rm_error err = RM_ERROR_INIT;
  if (tiny_view_request(rm_engine_scheduler(l->engine, at->id), at->id, &v, &err))
    wrong(l, "a request that cannot be seen");
  return v.n;
}

static rm_request request_in(slot *at) {
  rm_request r = at->request;
  r.prompt = at->room.prompt;
  r.stop_ids = at->room.stop_ids;
  return r;
}

static uint64_t digest_of(const life *l, int *known) {
  uint64_t digest = l->w->digest;
  *known = 1;
  if (!predict_serves(&l->p)) return 0;
  for (int64_t i = 0; i < l->p.n_params; i++) {
    const int set = l->p.set[i];
    if (set == UNKNOWN_SET) *known = 0;
    else digest += set == NO_SET ? l->w->no_bias : l->w->delta[set][i];
  }
  return digest;
}

// ----------------------------------------------------------------------------- a request's tokens
// Whether a sample's tokens from the first-th on, and their logprobs, are those that the answer's
// sample begins with.
static int begins_as(const tiny_sample_view *v, int64_t first, const answer *a, int32_t sample) {
  const int64_t n = v->n_tokens - first;
  if (n == 0) return 1; // a score has no logprobs to compare
  return n <= a->n_tokens[sample] &&
         !memcmp(v->tokens + first, a->tokens[sample], (size_t)n * sizeof *v->tokens) &&
         !memcmp(v->logprobs + first, a->logprobs[sample], (size_t)n * sizeof *v->logprobs);
}

static void check_tokens(life *l, const slot *at) {
  const answer *want =
      at->set >= 0 && !at->mixed && at->which >= 0 ? &l->w->want[at->set][at->which] : NULL;
  for (int32_t i = 0, n = samples_of(l, at); i < n; i++) {
    const tiny_sample_view v = sample_of(l, at, i);
    if (v.n_tokens > NEW_TOKENS) wrong(l, "too many tokens");
    if (want && !begins_as(&v, 0, want, i)) wrong(l, "other tokens than a lone engine draws");
    for (int64_t t = 0; t < v.n_tokens; t++) {
      const int64_t version = v.versions[t];
      if (at->mixed ? version < 0 || version > l->p.last || (t && version < v.versions[t - 1])
                    : version != at->version)
        wrong(l, "a token of a wrong version");
      if (v.no_contract[t] > at->kv_kept) wrong(l, "a token without contract");
    }
  }
}

// A kept sample continues like a request whose prompt ends with the tokens that the sample had:
// draws depend on the position.
static void check_continued(life *l, const slot *at, int32_t sample) {
  const tiny_sample_view v = sample_of(l, at, sample);
  slot rest = *at;
  int64_t old = 0;
  for (; old < v.n_tokens && v.versions[old] < at->version; old++)
    rest.room.prompt[rest.request.n_prompt++] = v.tokens[old];
  if (old == v.n_tokens) return;
  rest.request.max_tokens -= old;
  rest.request.min_tokens = rm_max64(rest.request.min_tokens - old, 0);
  rest.request.n = 1;
  rest.request.seed += (uint64_t)sample;
  const rm_request r = request_in(&rest);
  const answer a = world_ask(l->w->lone[at->set], &r);
  const int cut = at->stopped || at->aborted;
  if (!begins_as(&v, old, &a, 0) || (!cut && v.n_tokens - old != a.n_tokens[0]))
    wrong(l, "a request that was kept does not go on as the new version would");
  continued++;
}

static void check_answer(life *l, slot *at) {
  tiny_request_view v;
  rm_error err = RM_ERROR_INIT;
  tiny_must(tiny_view_request(rm_engine_scheduler(l->engine, at->id), at->id, &v, &err), &err);
  if (v.error &&
      (v.error != RM_E_NUMERICS || (at->set >= 0 && !at->mixed) || !v.message || !*v.message))
    wrong(l, "a request failed");
  for (int32_t i = 0; i < v.n; i++) {
    const rm_finish finish = sample_of(l, at, i).finish;
    if (finish == RM_RUNNING || (finish == RM_FINISH_ABORT && !at->aborted) ||
        (finish == RM_FINISH_ERROR && !v.error))
      wrong(l, "an end that nothing led to");
    ends[finish]++;
  }
  check_tokens(l, at);
  at->hash = tiny_hash(l->engine, at->id);
  for (int32_t i = 0; i < v.n && at->mixed && !at->kv_kept && at->set >= 0; i++)
    check_continued(l, at, i);
  if (at->aborted || at->stopped || at->mixed || at->set < 0) return;
  const rm_request r = request_in(at);
  const uint64_t want = at->which >= 0 ? l->w->want[at->set][at->which].hash
                                       : world_ask(l->w->lone[at->set], &r).hash;
  if (at->hash != want) wrong(l, "a finished request is not what a lone engine gives");
  whole++;
  followed += at->which < 0;
}

// Requests that the last call ended, and the statistics.
static void check_all(life *l, int may_finish) {
  int64_t running = 0;
  for (slot *at = l->slots; at < l->slots + SLOTS; at++) {
    if (at->state != LIVE) continue;
    tiny_request_view v;
    rm_error err = RM_ERROR_INIT;
    if (tiny_view_request(rm_engine_scheduler(l->engine, at->id), at->id, &v, &err))
      wrong(l, "a request is lost");
    for (int32_t i = 0; i < v.n && !v.finished; i++)
      running += sample_of(l, at, i).finish == RM_RUNNING;
    if (!v.finished) continue;
    if (!may_finish) wrong(l, "a request ended in a call that ends none");
    at->state = DONE;
    l->p.live--;
    check_answer(l, at);
  }
  const seen s = look(l);
  int known;
  const uint64_t digest = digest_of(l, &known);
  if (s.stats.version != l->p.version || s.open != l->p.open || s.stats.asleep != l->p.asleep)
    wrong(l, "another state than predicted");
  if (known && s.digest != digest) wrong(l, "weights of another digest than what was sent");
  if (s.unfinished != l->p.live || s.stats.waiting + s.stats.running != running)
    wrong(l, "requests that no list holds");
  if (s.stats.running > l->options.max_num_seqs || s.stats.kv_pages != l->n_pages)
    wrong(l, "more than the options allow");
  if (!s.stats.running && s.stats.kv_pages_free != s.stats.kv_pages)
    wrong(l, "pages that nothing holds");
  if (s.stats.steps != l->steps) wrong(l, "steps were not counted");
  preempted += s.stats.preemptions - l->preemptions;
  l->preemptions = s.stats.preemptions;
}
