// fuzz_calls.c: random sequences of 5 to 60 calls of engine.h, in any order and any state, with
// wrong ids, samples, names, parts and versions among them. Each sequence runs on a new engine
// (three kinds of model, both dtypes, few pages or many, chunks, threads, prefix caching), which is
// destroyed wherever the sequence ends. Half of the lives are such random sequences; the other half
// serve most of the time, and commit while they do. Requests are the world's sixteen, and requests
// that begin with another's prompt and answer. Beside each engine runs a predict.h. Oracle:
//
//   - every return code is the predicted one; a call that fails does not change statistics,
//     version, digest and requests
//   - version, digest, asleep, open and unfinished are as predicted after every call; the digest is
//     the sum of the contributions of each parameter's latest values
//   - tokens equal those that a separate engine draws with that version's weights, as many as exist
//     so far; a finished request is bit-identical to its reference until it is released. Only
//     requests that were kept over a commit have tokens of several versions; they keep the tokens
//     they had, and continue as a separate engine of the new version does after the same tokens
//   - a sequence that is allowed to finish does so in a bounded number of steps and then holds no
//     page; after destroy all memory is freed
//
//   fuzz_calls [--cases 2000 sequences] [--seconds 0] [--seed 1] [--first 0]
//       [--plant 1: release of a running request is predicted to work, 2: one value of the digest
//        table is wrong, 3: a bit of the reference answers is wrong, 4: an engine is not destroyed,
//        5: aborts of a sync are not predicted]
#include <stdlib.h>

#include "base/memory.h"
#include "common/life.h"

enum { NOT_FINITE = 5 }; // the last fault of a tensor
enum { WORLDS = 6, TENSOR_BYTES = 1 << 15, MAX_STEPS = 5000 };

typedef struct scene {
  fuzz f;
  world worlds[WORLDS];
} scene;

static char tensor_data[TENSOR_BYTES];
static long run_out;

// -------------------------------------------------------------------------------- calls: requests
// Picks the id of a request, of a released request, or any id; returns NULL if the id is unknown.
static slot *pick(life *l, uint64_t *id) {
  slot *at = l->slots + fuzz_below(l->f, SLOTS);
  for (int i = 0; i < SLOTS && at->state == EMPTY; i++) at = l->slots + (at + 1 - l->slots) % SLOTS;
  if (at->state != EMPTY && !fuzz_one_in(l->f, 6)) return *id = at->id, at;
  *id = fuzz_one_in(l->f, 2) && l->n_gone ? l->gone[fuzz_bits(l->f) % l->n_gone % GONE]
                                          : (uint64_t)fuzz_integer(l->f);
  for (at = l->slots; at < l->slots + SLOTS; at++)
    if (at->state != EMPTY && at->id == *id) return at;
  return NULL;
}

// Under the version that serves: from its prompt, or `keeps` what it has.
static void begin_again(life *l, slot *at, int keeps, int keeps_kv) {
  at->version = l->p.version;
  at->set = predict_whole_set(&l->p);
  at->mixed = keeps;
  at->stopped = at->stopped && keeps;
  at->kv_kept = keeps && (at->kv_kept || keeps_kv);
  kept += keeps;
}

// One of the world's; or, as in a conversation, a request that begins with what another was asked
// and has answered so far, so that pages with generated tokens are found again.
static void compose(life *l, slot *out) {
  out->which = (int)fuzz_below(l->f, REQUESTS);
  out->request = request_of(l->w, out->which, &out->room);
  const slot *from = l->slots + fuzz_below(l->f, SLOTS), *end = l->slots + SLOTS;
  while (from < end && (from->state == EMPTY || from->which < 0 || !sample_of(l, from, 0).n_tokens))
    from++;
  if (from == end || fuzz_one_in(l->f, 3)) return;
  const tiny_sample_view v = sample_of(l, from, (int32_t)fuzz_below(l->f, samples_of(l, from)));
  if (!v.n_tokens) return;
  *out = (slot){.which = NO_TABLE, .request = from->request, .room = from->room};
  for (int64_t i = 0; i < v.n_tokens; i++) out->room.prompt[out->request.n_prompt++] = v.tokens[i];
  if (fuzz_one_in(l->f, 2)) out->request.kind = RM_SCORE, out->request.prompt_logprobs = 0;
}

static void do_add(life *l) {
  slot *at = l->slots, fresh = {0};
  while (at < l->slots + SLOTS && at->state != EMPTY) at++;
  if (at == l->slots + SLOTS) return;
  compose(l, &fresh);
  const rm_request r = request_in(&fresh);
  const int64_t positions = r.n_prompt + (r.kind == RM_SCORE ? 0 : NEW_TOKENS - 1);
  codes want = predict_closed(&l->p);
  if (!want)
    want = or_ok(wrong_if(0, positions > l->n_pages * l->options.page_size, RM_E_CAPACITY));
  const seen before = look(l);
  rm_error err = RM_ERROR_INIT;
  if (!judge(l, ADD, rm_engine_add(l->engine, &r, &fresh.id, &err), want, &err, &before)) return;
  if (fresh.id != l->next_id++) wrong(l, "ids do not count up");
  *at = fresh;
  at->state = LIVE;
  begin_again(l, at, 0, 0);
  l->p.live++;
}

static void do_add_bad(life *l) {
  tiny_room room;
  rm_request r = request_of(l->w, (int)fuzz_below(l->f, REQUESTS), &room);
  switch (fuzz_below(l->f, 4)) {
    case 0: r.n_prompt = 0; break;
    case 1: room.prompt[fuzz_below(l->f, r.n_prompt)] = 131; break;
    case 2: r.prompt_logprobs = -2; break;
    default: r.n_stop_ids = 1, r.stop_ids = NULL;
  }
  const seen before = look(l);
  rm_error err = RM_ERROR_INIT;
  uint64_t id;
  judge(l, ADD_BAD, rm_engine_add(l->engine, &r, &id, &err),
        predict_closed(&l->p) | code_set(RM_E_REQUEST), &err, &before);
}

static void do_step(life *l) {
  const seen before = look(l);
  const codes want = predict_step(&l->p);
  int64_t rows = -1;
  rm_error err = RM_ERROR_INIT;
  if (!judge(l, STEP, rm_engine_step(l->engine, NULL, &rows, &err), want, &err, &before)) return;
  if (rows > l->options.max_num_batched_tokens || (rows > 0) != predict_works(&l->p))
    wrong(l, "a step of another number of rows");
  l->steps += rows > 0;
}

static void do_abort(life *l) {
  uint64_t id;
  slot *at = pick(l, &id);
  const seen before = look(l);
  rm_error err = RM_ERROR_INIT;
  if (at && at->state == LIVE) at->aborted = 1;
  judge(l, ABORT, rm_scheduler_abort(rm_engine_scheduler(l->engine, id), id, &err),
        code_set(at ? RM_OK : RM_E_REQUEST), &err, &before);
}

static void do_release(life *l) {
  uint64_t id;
  slot *at = pick(l, &id);
  const seen before = look(l);
  rm_error err = RM_ERROR_INIT;
  if (at && at->state == DONE && tiny_hash(l->engine, id) != at->hash)
    wrong(l, "a finished request changed before it was released");
  const rm_code want = !at                                     ? RM_E_REQUEST
                       : at->state == LIVE && l->f->plant != 1 ? RM_E_STATE
                                                               : RM_OK;
  if (!judge(l, RELEASE, rm_scheduler_release(rm_engine_scheduler(l->engine, id), id, &err),
             code_set(want), &err, &before))
    return;
  at->state = EMPTY;
  l->gone[l->n_gone++ % GONE] = id;
}

static void do_view(life *l) {
  uint64_t id;
  const slot *at = pick(l, &id);
  tiny_request_view v;
  rm_error err = RM_ERROR_INIT;
  if (!judge(l, VIEW, tiny_view_request(rm_engine_scheduler(l->engine, id), id, &v, &err),
             code_set(at ? RM_OK : RM_E_REQUEST), &err, NULL))
    return;
  if (v.id != id || v.finished != (at->state == DONE)) wrong(l, "a view of another request");
}

static void do_sample_view(life *l) {
  uint64_t id;
  const slot *at = pick(l, &id);
  const int32_t sample =
      fuzz_one_in(l->f, 4) ? (int32_t)fuzz_integer(l->f) : (int32_t)fuzz_below(l->f, 4);
  const int there = at && sample >= 0 && sample < samples_of(l, at);
  tiny_sample_view v;
  rm_error err = RM_ERROR_INIT;
  const rm_code code = tiny_view_sample(rm_engine_scheduler(l->engine, id), id, sample, &v, &err);
  if (judge(l, SAMPLE_VIEW, code, code_set(there ? RM_OK : RM_E_REQUEST), &err, NULL))
    check_tokens(l, at);
}

static void do_stop_sample(life *l) {
  uint64_t id;
  slot *at = pick(l, &id);
  const int32_t sample =
      fuzz_one_in(l->f, 8) ? (int32_t)fuzz_integer(l->f) : (int32_t)fuzz_below(l->f, 2);
  const int there = at && sample >= 0 && sample < samples_of(l, at);
  const tiny_sample_view v = there ? sample_of(l, at, sample) : (tiny_sample_view){0};
  const int64_t n = fuzz_one_in(l->f, 4) ? fuzz_integer(l->f) : fuzz_below(l->f, v.n_tokens + 2);
  codes want = wrong_if(0, !there || n < 0 || n > v.n_tokens, RM_E_REQUEST);
  want = or_ok(wrong_if(want, there && (v.finish == RM_FINISH_ABORT || v.finish == RM_FINISH_ERROR),
                        RM_E_STATE));
  const seen before = look(l);
  rm_error err = RM_ERROR_INIT;
  if (!judge(l, STOP_SAMPLE,
             rm_scheduler_stop_sample(rm_engine_scheduler(l->engine, id), id, sample, n, &err),
             want, &err, &before))
    return;
  const tiny_sample_view after = sample_of(l, at, sample);
  if (after.finish != RM_FINISH_STOP || after.stop_token != -1 || after.n_tokens != n)
    wrong(l, "a sample that was not stopped there");
  at->stopped = 1;
  if (at->state == DONE) at->hash = tiny_hash(l->engine, id);
}

static void do_finished(life *l) {
  uint64_t ids[SLOTS];
  const int64_t capacity = fuzz_below(l->f, SLOTS + 1);
  int64_t waiting = 0;
  for (slot *at = l->slots; at < l->slots + SLOTS; at++) waiting += at->state == DONE;
  const int64_t n = rm_engine_finished(l->engine, ids, capacity);
  judge(l, FINISHED, RM_OK, code_set(RM_OK), NULL, NULL);
  if (n != rm_min64(waiting, capacity)) wrong(l, "another number of finished requests");
  for (int64_t i = 0; i < n; i++) {
    const slot *at = l->slots;
    while (at < l->slots + SLOTS && (at->state != DONE || at->id != ids[i])) at++;
    int is_known = at == l->slots + SLOTS;
    for (int64_t j = 0; j < i; j++) is_known |= ids[j] == ids[i];
    if (is_known) wrong(l, "a request is reported that is not finished, or twice");
  }
}

static void do_reset(life *l) {
  rm_engine_reset_prefix_cache(l->engine);
  judge(l, RESET, RM_OK, code_set(RM_OK), NULL, NULL);
}

// --------------------------------------------------------------------------------- calls: weights
static int begin(life *l, const rm_sync_options *options) {
  const seen before = look(l);
  rm_error err = RM_ERROR_INIT;
  const codes want = predict_sync_begin(&l->p, options);
  if (!judge(l, SYNC_BEGIN, rm_engine_sync_begin(l->engine, options, &err), want, &err, &before))
    return 0;
  l->target = (int)fuzz_below(l->f, SETS);
  return 1;
}

static void do_begin(life *l) {
  fuzz *f = l->f;
  rm_sync_options options = {.version = -1};
  if (fuzz_one_in(f, 3))
    options.version = (int64_t)((uint64_t)l->p.last + (uint64_t)fuzz_below(f, 4) - 1);
  if (fuzz_one_in(f, 30)) options.version = fuzz_one_in(f, 20) ? INT64_MAX : -fuzz_below(f, 100);
  options.cast = fuzz_one_in(f, 4);
  options.allow_nonfinite = fuzz_one_in(f, 4);
  options.allow_partial = fuzz_one_in(f, 3);
  options.allow_bias_removal = fuzz_one_in(f, 4);
  options.in_place = fuzz_one_in(f, 3);
  begin(l, &options);
}

// Tensor `param` of a set, out of a buffer that holds other values as soon as the call returns; −1:
// a name of no parameter.
static void send(life *l, call which, int64_t param, int set, int fault) {
  const tiny_tensor *from = &l->w->sets[set]->list[rm_max64(param, 0)];
  tiny_tensor t = *from;
  rm_code code = RM_OK;
  memcpy(tensor_data, from->tensor.data, (size_t)from->tensor.span_hi);
  t.tensor.data = tensor_data;
  if (param < 0) memcpy(t.name, "model.layers.9.mlp", 19), t.length = 18;
  if (fault == 1) t.tensor.shape[0]++, code = RM_E_SHAPE;
  if (fault == 2)
    t.tensor.dtype = RM_SRC_F64,
    code = l->p.options.cast ? RM_E_LAYOUT : RM_E_DTYPE; // the buffer is too small for it
  if (fault == 3) t.tensor.strides[0] = INT64_MAX / 3, code = RM_E_LAYOUT;
  if (fault == 4) t.tensor.data = NULL, code = RM_E_UNSUPPORTED_TENSOR;
  if (fault == 3 && t.tensor.shape[0] == 1) return;
  if (fault == NOT_FINITE) memset(tensor_data, 0xFF, 4);
  const seen before = look(l);
  rm_error err = RM_ERROR_INIT;
  const int pushes = which == SYNC_PUSH;
  const codes want = pushes ? predict_push(&l->p, param, set, code, fault == NOT_FINITE)
                            : predict_check(&l->p, param, code);
  const rm_code got = (pushes ? tiny_push : tiny_check)(l->engine, l->p.options.allow_partial,
                                                        t.name, t.length, &t.tensor, &err);
  judge(l, which, got, want, &err, &before);
  memset(tensor_data, 0xFF, (size_t)from->tensor.span_hi);
}

static void do_tensor(life *l, call which) {
  if (!l->p.open && !fuzz_one_in(l->f, 4)) do_begin(l);
  const int set = fuzz_one_in(l->f, 8) ? (int)fuzz_below(l->f, SETS) : l->target;
  const int64_t param = fuzz_one_in(l->f, 12) ? -1 : fuzz_below(l->f, l->p.n_params);
  send(l, which, param, set, fuzz_one_in(l->f, 2) ? (int)fuzz_below(l->f, NOT_FINITE + 1) : 0);
}

static void do_check(life *l) { do_tensor(l, SYNC_CHECK); }
static void do_push(life *l) { do_tensor(l, SYNC_PUSH); }

// All tensors that have not arrived, except one in some cases.
static void do_push_rest(life *l) {
  const int64_t without = fuzz_one_in(l->f, 8)   ? fuzz_below(l->f, l->p.n_params)
                          : fuzz_one_in(l->f, 8) ? l->p.bias
                                                 : -1;
  const int64_t poisoned =
      l->p.options.allow_nonfinite && fuzz_one_in(l->f, 2) ? fuzz_below(l->f, l->p.n_params) : -1;
  for (int64_t i = 0; i < l->p.n_params && l->p.open; i++)
    if (!l->p.seen[i] && i != without)
      send(l, SYNC_PUSH, i, l->target, i == poisoned ? NOT_FINITE : 0);
}

static uint64_t tokens_hash(life *l, const slot *at, int64_t *n_tokens) {
  uint64_t hash = 0;
  *n_tokens = 0;
  for (int32_t i = 0, n = samples_of(l, at); i < n; i++) {
    const tiny_sample_view v = sample_of(l, at, i);
    *n_tokens += v.n_tokens;
    hash = tiny_hash_bytes(hash + 1, v.tokens, (size_t)v.n_tokens * sizeof *v.tokens);
    hash = tiny_hash_bytes(hash, v.versions, (size_t)v.n_tokens * sizeof *v.versions);
  }
  return hash;
}

// Checks the fate of the requests in flight.
static void check_commit(life *l, rm_inflight inflight, const uint64_t *hashes,
                         const int64_t *had) {
  for (int i = 0; i < SLOTS; i++) {
    slot *at = &l->slots[i];
    if (at->state != LIVE) continue;
    int64_t has;
    const uint64_t hash = tokens_hash(l, at, &has);
    const int keeps = inflight >= RM_INFLIGHT_KEEP && had[i] > 0;
    if (inflight == RM_INFLIGHT_ABORT) at->aborted = 1;
    else begin_again(l, at, keeps, inflight == RM_INFLIGHT_KEEP_KV);
    if (keeps || inflight == RM_INFLIGHT_ABORT ? hash != hashes[i] : has != 0)
      wrong(l, "a commit did something else to a request");
  }
}

static void do_commit(life *l) {
  uint64_t hashes[SLOTS] = {0};
  int64_t had[SLOTS] = {0};
  for (int i = 0; i < SLOTS; i++)
    if (l->slots[i].state == LIVE) hashes[i] = tokens_hash(l, &l->slots[i], &had[i]);
  const int64_t policy = l->serves ? RM_INFLIGHT_KEEP + fuzz_below(l->f, 2) : fuzz_below(l->f, 5);
  const rm_inflight inflight = (rm_inflight)policy;
  const int was_open = l->p.open;
  const seen before = look(l);
  const int64_t n = l->p.n_pushed, skipped = l->p.n_skipped;
  const codes want = predict_commit(&l->p, inflight);
  rm_sync_report report;
  rm_error err = RM_ERROR_INIT;
  const rm_code code = rm_engine_sync_commit(l->engine, inflight, &report, &err);
  if (!judge(l, SYNC_COMMIT, code, want, &err, was_open == l->p.open ? &before : NULL)) return;
  if (report.version != l->p.version || report.n_tensors != n || report.n_parameters != n ||
      report.n_skipped != skipped || report.digest != rm_store_digest(rm_engine_store(l->engine)))
    wrong(l, "a wrong report");
  check_commit(l, inflight, hashes, had);
}

static void do_sync(life *l) {
  if (begin(l, &(rm_sync_options){.version = -1, .in_place = fuzz_one_in(l->f, 4)}))
    do_push_rest(l);
  if (l->p.open) do_commit(l);
}

static void do_sync_abort(life *l) {
  rm_engine_sync_abort(l->engine);
  if (l->f->plant != 5) predict_sync_abort(&l->p);
  judge(l, SYNC_ABORT, RM_OK, code_set(RM_OK), NULL, NULL);
}

static unsigned pick_parts(fuzz *f) { return 1 + (unsigned)fuzz_below(f, 3); }

static void do_sleep(life *l) {
  const unsigned parts = pick_parts(l->f) | (fuzz_one_in(l->f, 2) ? RM_SLEEP_OFFLOAD : 0);
  const seen before = look(l);
  rm_error err = RM_ERROR_INIT;
  const codes want = predict_sleep(&l->p, parts);
  judge(l, SLEEP, rm_engine_sleep(l->engine, parts, &err), want, &err, &before);
}

static void do_wake(life *l) {
  const unsigned parts = pick_parts(l->f);
  const seen before = look(l);
  rm_error err = RM_ERROR_INIT;
  const codes want = predict_wake(&l->p, parts);
  judge(l, WAKE, rm_engine_wake(l->engine, parts, &err), want, &err, &before);
}

// -------------------------------------------------------------------------------------- sequences
enum { DO_WAKE, DO_SYNC, N_ACTS = 19 };
static const struct {
  void (*act)(life *);
  int weights[2]; // in any order and state; in a life that mostly serves
  int ends_requests;
} acts[N_ACTS] = {
    [DO_WAKE] = {do_wake, {4, 0}, 0},
    [DO_SYNC] = {do_sync, {4, 4}, 1},
    {do_step, {30, 50}, 1},
    {do_add, {18, 22}, 0},
    {do_add_bad, {2, 0}, 0},
    {do_abort, {3, 1}, 1},
    {do_release, {6, 8}, 0},
    {do_view, {3, 0}, 0},
    {do_sample_view, {3, 1}, 0},
    {do_stop_sample, {4, 1}, 1},
    {do_reset, {2, 0}, 0},
    {do_begin, {4, 1}, 0},
    {do_check, {2, 0}, 0},
    {do_push, {4, 0}, 0},
    {do_push_rest, {4, 2}, 0},
    {do_commit, {5, 2}, 1},
    {do_sync_abort, {2, 1}, 0},
    {do_sleep, {2, 1}, 0},
    {do_finished, {3, 1}, 0},
};

// If requests cannot run, calls that change this are more likely.
static int choose(life *l) {
  int64_t at = 0;
  int i = 0;
  for (int a = 0; a < N_ACTS; a++) at += acts[a].weights[l->serves];
  at = fuzz_below(l->f, at);
  while (at >= acts[i].weights[l->serves]) at -= acts[i++].weights[l->serves];
  const int helps = fuzz_one_in(l->f, 3);
  if (helps && l->p.asleep) return DO_WAKE;
  return helps && !predict_serves(&l->p) && !l->p.open ? DO_SYNC : i;
}

static void act(life *l) {
  const int i = choose(l);
  acts[i].act(l);
  check_all(l, acts[i].ends_requests);
}

static void choose_options(life *l) {
  fuzz *f = l->f;
  l->options = tiny_options(l->w->model, fuzz_one_in(f, 16) ? 2 : 1);
  l->n_pages = (const int64_t[]){2, 4, 4, 5, 12}[fuzz_below(f, 5)];
  l->options.kv_bytes = l->options.kv_bytes / 12 * (uint64_t)l->n_pages;
  l->options.max_num_seqs = 1 + fuzz_below(f, 4);
  l->options.max_num_batched_tokens = (const int64_t[]){5, 24, 64}[fuzz_below(f, 3)];
  l->options.prefix_caching = !fuzz_one_in(f, 3);
  l->options.kernels = fuzz_one_in(f, 16) ? rm_kernels_for(RM_ISA_REF) : NULL;
}

// Ends all that can still end, and frees all that was held.
static void run_to_the_end(life *l) {
  rm_error err = RM_ERROR_INIT;
  do_sync_abort(l);
  tiny_must(rm_engine_wake(l->engine, RM_PART_WEIGHTS | RM_PART_KV, &err), &err);
  l->p.asleep = 0;
  for (int i = 0; i < 9 && !predict_serves(&l->p) && l->p.last < INT64_MAX; i++) do_sync(l);
  check_all(l, 1);
  for (int i = 0; predict_serves(&l->p) && l->p.live; i++) {
    if (i == MAX_STEPS) wrong(l, "requests that never end");
    do_step(l);
    check_all(l, 1);
  }
  const seen s = look(l);
  if (!l->p.live &&
      (s.stats.waiting || s.stats.running || s.stats.kv_pages_free != s.stats.kv_pages))
    wrong(l, "something is held by nothing");
  run_out += !l->p.live;
}

static void one_sequence(scene *s) {
  const int64_t where = fuzz_below(&s->f, WORLDS);
  life l = {.f = &s->f, .w = &s->worlds[where], .next_id = 1};
  if (!l.w->model) world_create(&s->worlds[where], (int)where, s->f.plant);
  const size_t blocks = rm_memory_blocks(), mapped = rm_memory_mapped();
  l.p = predict_create(l.w->sets[0]->n, l.w->bias);
  l.serves = fuzz_one_in(&s->f, 2);
  choose_options(&l);
  rm_error err = RM_ERROR_INIT;
  judge(&l, CREATE, rm_engine_create(l.w->model->spec, &l.options, &l.engine, &err),
        code_set(RM_OK), &err, NULL);
  if (!fuzz_one_in(&s->f, 8)) do_sync(&l);
  for (int64_t n = 5 + fuzz_below(&s->f, 56); n > 0; n--) act(&l);
  if (fuzz_one_in(&s->f, 4)) run_to_the_end(&l);
  if (s->f.plant != 4) rm_engine_destroy(l.engine);
  judge(&l, DESTROY, RM_OK, code_set(RM_OK), NULL, NULL);
  if (rm_memory_blocks() != blocks || rm_memory_mapped() != mapped)
    wrong(&l, "blocks of memory are still held");
}

static void report(const scene *s, long cases) {
  long calls = 0;
  for (int c = 0; c < N_CALLS; c++)
    printf("%s %ld + %ld refused%s", call_names[c], done[c], refused[c],
           c == N_CALLS - 1 ? "\n" : ", ");
  printf("samples: %ld stopped, %ld at their length, %ld aborted, %ld failed; requests: %ld of one "
         "whole version, %ld kept over a commit, "
         "%ld of whose samples went on as predicted, %ld begun with another's answer; %ld "
         "preemptions; %ld sequences run out\n",
         ends[RM_FINISH_STOP], ends[RM_FINISH_LENGTH], ends[RM_FINISH_ABORT], ends[RM_FINISH_ERROR],
         whole, kept, continued, followed, preempted, run_out);
  for (int c = 0; c < RM_N_CODE; c++) calls += verdicts[c];
  printf("fuzz_calls: %ld sequences of %ld calls, seed %" PRIu64 ", %.1f s:", cases, calls,
         s->f.seed, fuzz_seconds(&s->f));
  for (int c = 0; c < RM_N_CODE; c++)
    if (verdicts[c]) printf(" %s %ld", rm_code_name((rm_code)c), verdicts[c]);
  putchar('\n');
}

// With enough cases, each of these must have occurred.
static void check_counts(void) {
  for (int c = 0; c < N_CALLS; c++)
    if ((c != ADD_BAD && !done[c]) || (!never_fails[c] && !refused[c]))
      tiny_die("%s never worked, or was never refused", call_names[c]);
  for (int finish = RM_FINISH_STOP; finish <= RM_FINISH_ERROR; finish++)
    if (!ends[finish]) tiny_die("no sample ended by %d", finish);
  if (!whole || !kept || !continued || !followed || !preempted || !run_out)
    tiny_die("a kind of request never came");
}

int main(int argc, char **argv) {
  static scene s;
  s.f = fuzz_begin(argc, argv, 2000, 5);
  while (fuzz_next_case(&s.f)) one_sequence(&s);
  const long cases = s.f.at - s.f.first;
  report(&s, cases);
  for (int i = 0; i < WORLDS; i++) world_destroy(&s.worlds[i]);
  if (rm_memory_blocks()) tiny_die("%zu blocks were not given back", rm_memory_blocks());
  if (cases >= 2000) check_counts();
  return 0;
}
