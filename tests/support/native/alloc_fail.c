// alloc_fail.c: fails every allocation and every thread creation of the engine once, and then again
// together with all that follow. One life of an engine is a list of calls: create, sync, add,
// steps, a second sync while requests run, sleep, wake, a sync in place, and calls that are refused
// in any case. For i = 1, 2, … the life is repeated with the i-th request to the system failing,
// until a life makes fewer than i requests. Then:
//
//   - the failing call returns RM_E_MEMORY or RM_E_CAPACITY with a message; a call that is refused
//     in any case keeps its code
//   - statistics, version and digest are unchanged by the call, and the old weights give
//     bit-identical results (P1)
//   - the same call succeeds when it is repeated, and the life ends with the hash of a life without
//     failures
//   - a failed create holds no block, and at the end all memory is freed (P7)
//   - steps allocate nothing
//
//   alloc_fail [--kind 0 dense, 1 tied, 2 MoE; −1: all] [--adds 70]     prints the sites, calls and
//                                                                       lives of each model
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "common/option.h"
#include "common/seen.h"
#include "common/tiny.h"

enum { MANY = 70, FEW = 6, LAST = 5 }; // requests in a life; their table grows at 64

// ----------------------------------------------------------------------- threads that do not come
static atomic_long thread_countdown, threads_failed; // 0: off
static atomic_int threads_for_ever;

// Replaces the C library's function, which it calls.
int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *),
                   void *arg) {
  int (*next)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
  *(void **)&next = dlsym(RTLD_NEXT, "pthread_create");
  const long left = atomic_load(&thread_countdown);
  if (left > 0) {
    atomic_store(&thread_countdown, left == 1 && atomic_load(&threads_for_ever) ? 1 : left - 1);
    if (left == 1) {
      atomic_fetch_add(&threads_failed, 1);
      return EAGAIN;
    }
  }
  return next(thread, attributes, start, arg);
}

static void arm(long site, int threads, int for_ever) {
  atomic_store(&threads_failed, 0);
  atomic_store(&threads_for_ever, for_ever);
  atomic_store(&thread_countdown, threads ? site : 0);
  rm_memory_fail_at(threads ? 0 : site, for_ever);
}

static long met(void) { return rm_memory_failed() + atomic_load(&threads_failed); }

// ----------------------------------------------------------------------------------------- a life
typedef struct life {
  const tiny_model *model;
  const tiny_weights *old, *new;
  // Gate and up of all experts, sent instead of each; NULL in a dense model.
  const tiny_tensor *fused;
  rm_engine *engine;
  int n_threads, many;
  long site;
  int pending; // the site was not reached yet
  uint64_t ids[MANY], hash;
  long calls;
} life;

typedef rm_code (*call)(life *l, const void *arg, rm_error *err);

static seen look(const life *l) { return seen_of(l->engine); }

// Hash of a score under the version that serves, which a fresh engine with those weights must
// reproduce. It steps, so unfinished requests advance; the hash of the life covers their results.
static void probe(life *l, const char *name) {
  static const int32_t prompt[] = {9, 8, 7, 6, 5, 4, 3, 2, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  static uint64_t digests[8], hashes[8]; // of the versions seen
  const rm_request request = {
      .kind = RM_SCORE, .prompt = prompt, .n_prompt = sizeof prompt / sizeof *prompt};
  const uint64_t digest = rm_store_digest(rm_engine_store(l->engine));
  rm_error err = RM_ERROR_INIT;
  uint64_t id;
  tiny_must(rm_engine_add(l->engine, &request, &id, &err), &err);
  tiny_must(tiny_drain(l->engine, &err), &err);
  const uint64_t hash = tiny_hash(l->engine, id);
  tiny_must(rm_scheduler_release(rm_engine_scheduler(l->engine, id), id, &err), &err);
  int i = 0;
  while (digests[i] && digests[i] != digest) i++;
  if (i == 7) tiny_die("more versions than were sent");
  if (!digests[i]) digests[i] = digest, hashes[i] = hash;
  if (hashes[i] != hash)
    tiny_die("%s, site %ld: the version that serves gives other bits after the failure", name,
             l->site);
}

static int serves(const life *l) {
  return l->engine && !look(l).stats.asleep && rm_engine_store(l->engine)->serving.block;
}

static void check_failure(life *l, const char *name, rm_code code, rm_code want, rm_error *err,
                          const seen *before, size_t blocks) {
  const seen after = look(l);
  const int refused = want != RM_OK && code == want;
  if (!refused && code != RM_E_MEMORY && code != RM_E_CAPACITY)
    tiny_die("%s, site %ld: %s", name, l->site, rm_code_name(code));
  if (!*rm_error_message(err)) tiny_die("%s, site %ld: no message", name, l->site);
  if (memcmp(before, &after, sizeof after))
    tiny_die("%s, site %ld: the failed call changed what can be observed", name, l->site);
  rm_error_clear(err);
  if (!l->engine && rm_memory_blocks() != blocks)
    tiny_die("%s, site %ld: it kept %zu blocks", name, l->site, rm_memory_blocks() - blocks);
}

// Makes the call; `want` is its code when the system refuses nothing.
static void make(life *l, const char *name, call function, const void *arg, rm_code want) {
  const seen before = look(l);
  const size_t blocks = rm_memory_blocks();
  rm_error err = RM_ERROR_INIT;
  rm_code code = function(l, arg, &err);
  l->calls++;
  if (l->pending && met()) {
    arm(0, 0, 0);
    l->pending = 0;
    check_failure(l, name, code, want, &err, &before, blocks);
    if (serves(l)) probe(l, name);
    if (code != want) code = function(l, arg, &err);
  }
  if (code != want)
    tiny_die("%s, site %ld: %s, %s", name, l->site, rm_code_name(code), rm_error_message(&err));
  rm_error_clear(&err);
}

// -------------------------------------------------------------------------------------- its calls
static rm_code create(life *l, const void *arg, rm_error *err) {
  const rm_engine_options options = tiny_options(l->model, l->n_threads);
  (void)arg;
  return rm_engine_create(l->model->spec, &options, &l->engine, err);
}

static rm_code begin(life *l, const void *options, rm_error *err) {
  return rm_engine_sync_begin(l->engine, options, err);
}

static rm_code push(life *l, const void *tensor, rm_error *err) {
  const tiny_tensor *t = tensor;
  return tiny_push(l->engine, 0, t->name, t->length, &t->tensor, err);
}

static rm_code commit(life *l, const void *arg, rm_error *err) {
  (void)arg;
  return rm_engine_sync_commit(l->engine, RM_INFLIGHT_REFUSE, NULL, err);
}

static rm_code add(life *l, const void *arg, rm_error *err) {
  const int i = *(const int *)arg;
  tiny_room room;
  rm_request request = tiny_request(l->model, 11, i, &room);
  if (i >= FEW)
    request.n_prompt = request.n = 1, request.min_tokens = 0,
    request.max_tokens = 2; // many, but short
  return rm_engine_add(l->engine, &request, &l->ids[i], err);
}

static rm_code add_bad(life *l, const void *arg, rm_error *err) {
  uint64_t id;
  return rm_engine_add(l->engine, arg, &id, err);
}

static rm_code sleep_parts(life *l, const void *parts, rm_error *err) {
  return rm_engine_sleep(l->engine, *(const unsigned *)parts, err);
}
static rm_code wake_parts(life *l, const void *parts, rm_error *err) {
  return rm_engine_wake(l->engine, *(const unsigned *)parts, err);
}

static rm_code view_none(life *l, const void *arg, rm_error *err) {
  tiny_request_view view;
  (void)arg;
  return tiny_view_request(rm_engine_scheduler(l->engine, 1u << 30), 1u << 30, &view, err);
}

// --------------------------------------------------------------------------------------- in order
static int is_expert_gate_up(const tiny_tensor *t) {
  return strstr(t->name, ".experts.") && !strstr(t->name, "down_proj");
}

static void sync_all(life *l, const tiny_weights *weights, int in_place, const tiny_tensor *fused) {
  const rm_sync_options options = {.version = -1, .in_place = in_place}, past = {.version = 0};
  if (rm_engine_store(l->engine)->version >= 0)
    make(l, "begin of an old version", begin, &past, RM_E_VERSION);
  make(l, "begin", begin, &options, RM_OK);
  if (fused) make(l, "push of all experts", push, fused, RM_OK);
  for (int64_t i = 0; i < weights->n; i++)
    if (!fused || !is_expert_gate_up(&weights->list[i]))
      make(l, "push", push, &weights->list[i], RM_OK);
  make(l, "push twice", push, &weights->list[0], RM_E_DUPLICATE_KEY);
  make(l, "push of an unknown name", push, &(tiny_tensor){.name = "model.nothing", .length = 13},
       RM_E_UNEXPECTED_KEY);
}

// Steps must not allocate: the next request of any thread would fail.
static void work(life *l, int from, int n) {
  rm_error err = RM_ERROR_INIT;
  if (!l->pending) arm(1, 0, 1);
  tiny_must(tiny_drain(l->engine, &err), &err);
  if (!l->pending && met()) tiny_die("site %ld: a step asked for memory", l->site);
  if (!l->pending) arm(0, 0, 0);
  for (int i = from; i < from + n; i++) {
    l->hash = tiny_mix(l->hash ^ tiny_hash(l->engine, l->ids[i]));
    tiny_must(rm_scheduler_release(rm_engine_scheduler(l->engine, l->ids[i]), l->ids[i], &err),
              &err);
  }
}

static void add_some(life *l, int n) {
  for (int i = 0; i < n; i++) make(l, "add", add, &i, RM_OK);
}

static uint64_t live(life *l) {
  const unsigned kv = RM_PART_KV, both = RM_PART_KV | RM_PART_WEIGHTS,
                 kept = both | RM_SLEEP_OFFLOAD;
  static const int32_t outside[] = {1, 1 << 20};
  const rm_request bad = {
      .prompt = outside, .n_prompt = 2, .n = 1, .max_tokens = 3, .top_p = 1, .top_k = -1};
  rm_error err = RM_ERROR_INIT;
  int64_t rows;
  l->hash = 0;
  make(l, "create", create, NULL, RM_OK);
  make(l, "add before weights", add, &(int){0}, RM_E_NOT_SYNCED);
  sync_all(l, l->old, 0, NULL);
  make(l, "commit", commit, NULL, RM_OK);
  add_some(l, l->many);
  make(l, "add of a bad request", add_bad, &bad, RM_E_REQUEST);
  make(l, "view", view_none, NULL, RM_E_REQUEST);
  work(l, 0, l->many);
  add_some(l, FEW);
  for (int i = 0; i < 3; i++) tiny_must(rm_engine_step(l->engine, NULL, &rows, &err), &err);
  sync_all(l, l->new, 0, l->fused); // while these run
  if (rm_engine_unfinished(l->engine)) make(l, "commit that must wait", commit, NULL, RM_E_STATE);
  work(l, 0, FEW);
  make(l, "commit", commit, NULL, RM_OK);
  add_some(l, LAST);
  tiny_must(rm_engine_step(l->engine, NULL, &rows, &err), &err);
  make(l, "sleep", sleep_parts, &kv, RM_OK);
  make(l, "wake", wake_parts, &kv, RM_OK);
  work(l, 0, LAST);
  make(l, "sleep", sleep_parts, &kept, RM_OK);
  make(l, "wake", wake_parts, &both, RM_OK);
  add_some(l, LAST);
  work(l, 0, LAST);
  make(l, "sleep", sleep_parts, &both, RM_OK);
  make(l, "wake", wake_parts, &both, RM_OK);
  for (int in_place = 0; in_place < 2; in_place++) {
    sync_all(l, l->old, in_place, NULL);
    make(l, "commit", commit, NULL, RM_OK);
    add_some(l, LAST);
    work(l, 0, LAST);
  }
  rm_engine_destroy(l->engine);
  l->engine = NULL;
  return l->hash;
}

// gate and up of the experts lie one after another in the weights, all gates first; the fused
// tensor has them expert by expert.
static tiny_tensor fuse(const tiny_model *model, const tiny_weights *weights, char *data) {
  const rm_spec *spec = model->spec;
  const int64_t experts = spec->n_experts, rows = spec->moe_intermediate_size,
                cols = spec->hidden_size;
  const size_t bytes = (size_t)(rows * cols) * rm_dtype_bytes(model->dtype);
  int64_t first = 0;
  while (!is_expert_gate_up(&weights->list[first])) first++;
  for (int64_t e = 0; e < experts; e++) {
    memcpy(data + (size_t)(2 * e) * bytes, weights->list[first + e].tensor.data, bytes);
    memcpy(data + (size_t)(2 * e + 1) * bytes, weights->list[first + experts + e].tensor.data,
           bytes);
  }
  tiny_tensor out = {.name = "model.layers.1.mlp.experts.gate_up_proj",
                     .tensor = weights->list[first].tensor};
  out.length = strlen(out.name);
  out.tensor.data = data;
  out.tensor.n_dims = 3;
  out.tensor.span_hi = (int64_t)bytes * 2 * experts;
  const int64_t shape[3] = {experts, 2 * rows, cols}, strides[3] = {2 * rows * cols, cols, 1};
  memcpy(out.tensor.shape, shape, sizeof shape);
  memcpy(out.tensor.strides, strides, sizeof strides);
  return out;
}

// Lives until a life has no failure; returns the number of sites.
static long all_sites(life *l, int threads, int for_ever, uint64_t want) {
  for (l->site = 1;; l->site++) {
    const size_t blocks = rm_memory_blocks(), mapped = rm_memory_mapped();
    l->pending = 1;
    l->n_threads = threads ? 4 : 2;
    arm(l->site, threads, for_ever);
    const uint64_t hash = live(l);
    arm(0, 0, 0);
    if (hash != want) tiny_die("site %ld: the life ended with other bits", l->site);
    if (rm_memory_blocks() != blocks || rm_memory_mapped() != mapped)
      tiny_die("site %ld: %zu blocks leaked", l->site, rm_memory_blocks() - blocks);
    if (l->pending) return l->site - 1;
  }
}

static void one_model(tiny_kind kind, rm_dtype dtype, int many) {
  static const char *const names[TINY_N_KIND] = {"dense", "tied", "MoE"};
  static char fused_data[1 << 16];
  tiny_model *model = tiny_model_create(kind, dtype);
  tiny_weights *old = tiny_weights_create(model, 1), *new = tiny_weights_create(model, 2);
  life l = {.model = model, .old = old, .new = new, .n_threads = 1, .many = many};
  tiny_tensor fused;
  if (kind == TINY_MOE) fused = fuse(model, new, fused_data), l.fused = &fused;
  const uint64_t want = live(&l);
  long sites[2][2], lives = 1;
  for (int threads = 0; threads < 2; threads++)
    for (int for_ever = 0; for_ever < 2; for_ever++)
      lives += (sites[threads][for_ever] = all_sites(&l, threads, for_ever, want)) + 1;
  if (sites[0][0] != sites[0][1] || sites[1][0] != 3)
    tiny_die("sites: %ld once, %ld for ever, %ld threads", sites[0][0], sites[0][1], sites[1][0]);
  printf(
      "%s %s: %ld allocations and %ld threads failed once and for ever, %ld lives of %ld calls in "
      "all, hash %016llx\n",
      names[kind], dtype == RM_BF16 ? "bf16" : "f32", sites[0][0], sites[1][0], lives, l.calls,
      (unsigned long long)want);
  tiny_weights_destroy(old);
  tiny_weights_destroy(new);
  tiny_model_destroy(model);
}

int main(int argc, char **argv) {
  long only = -1, many = MANY;
  option_read(argc, argv,
              (option[]){{"kind", .least = -1, .most = TINY_N_KIND - 1, .count = &only},
                         {"adds", .least = 1, .most = MANY, .count = &many},
                         {0}});
  for (int kind = 0; kind < TINY_N_KIND; kind++)
    if (only < 0 || only == kind)
      one_model((tiny_kind)kind, kind == TINY_TIED ? RM_F32 : RM_BF16, (int)many);
  return 0;
}
