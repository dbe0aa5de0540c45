// fuzz_weights.c: malformed state dicts. A case is one descriptor: a name and an inaccessible
// tensor, valid and then mutated up to three times, which rm_sync_check must judge as the rules do.
// The cases come in blocks. Before each block, whole syncs are pushed, in random spellings and
// layouts, with tensors that are missing, duplicated, wrong or not finite.
//
// Oracle: common/spellings.h (the meaning of a name, from a table and not by matching),
// common/layouts.h (the bytes of a tensor, from the sum over its dims), and a second engine that
// receives the values, gathered element by element, as plain contiguous tensors. Compared are the
// verdict, the code and the name in the message of every call, the state after every refusal, the
// digest after every commit and, for some commits, the bits of rollouts.
//
//   fuzz_weights [options of common/fuzz.h] [--plant 1: the oracle allows one byte of span too
//       many; 2: it does not accept a name; 3: it does not record tensors that have arrived; 4: it
//       rounds ties away from zero; 5: it accepts NaNs; 6: a tensor that is only checked is read]
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "common/fuzz.h"
#include "common/mutate.h"

enum {
  BLOCK = 4096,
  WORLDS = 2 * TINY_N_KIND,
  DATA_ROOM = 1 << 20,
  HASH_EVERY = 16,
  WALK_EVERY = 1021
};

typedef struct sync { // the open sync, and the tensors that have arrived
  int open;
  rm_sync_options options;
  uint64_t seen, dirty;
} sync;

typedef struct world {
  tiny_model *model;
  tiny_weights *good;
  rm_engine *engine, *plain; // the tested engine, and the one that receives only valid tensors
  book *book;
  sync sync;
  int64_t version; // of the engine
  int served; // it has weights: values[slot] are their bits
  uint64_t biases; // slots of router biases that the last committed version had
  uint32_t *start[BOOK_SLOTS], *values[BOOK_SLOTS], *next[BOOK_SLOTS];
} world;

typedef struct scene {
  fuzz f;
  world worlds[WORLDS], *w;
  room names, data, nowhere; // nowhere: inaccessible pages
  rm_error err;
  uint32_t gathered[1 << 14];
  long accepted, refused[RM_N_CODE], pushes, push_refused[RM_N_CODE], syncs,
      commit_refused[RM_N_CODE], hashes;
} scene;

typedef struct descriptor {
  char *name; // ends where the room of names does
  size_t length;
  rm_tensor tensor;
} descriptor;

// -------------------------------------------------------------------------------------- the rules
static rm_code layout_rule(scene *s, const rm_tensor *t) {
  if (!t->data) return RM_E_UNSUPPORTED_TENSOR;
  const reach r = tensor_reach(t);
  if (s->f.at % WALK_EVERY == 0) {
    const reach walked = tensor_walk(t);
    if (walked.before != r.before || walked.after != r.after)
      tiny_die("the oracle errs about %s", fuzz_where(&s->f));
  }
  const wide at = (wide)(uintptr_t)t->data, end = (wide)UINTPTR_MAX;
  if (r.before > INT64_MAX || r.after > INT64_MAX || r.before > at || at + r.after > end)
    return RM_E_LAYOUT; // such addresses do not exist
  if (t->span_lo == 0 && t->span_hi == 0) return RM_OK; // not known
  const wide granted = s->f.plant == 1;
  return r.before > t->span_lo || r.after > t->span_hi + granted ? RM_E_LAYOUT : RM_OK;
}

// The code that a check of the descriptor must return. *is: the parameter that the name spells, or
// NULL if the name does not spell a parameter.
static rm_code rule(scene *s, const descriptor *d, const spelling **is) {
  const world *w = s->w;
  const rm_tensor *t = &d->tensor;
  rm_code code;
  *is = NULL;
  if (!w->sync.open) return RM_E_STATE;
  const spelling *want = book_find(w->book, d->name, d->length, &code);
  if (s->f.plant == 2 && want == &w->book->names[5]) want = NULL, code = RM_E_UNEXPECTED_KEY;
  if (code == RM_E_UNEXPECTED_KEY && w->sync.options.allow_partial) return RM_OK;
  if (code) return code;
  if ((want->mask & w->sync.seen) && s->f.plant != 3) return RM_E_DUPLICATE_KEY;
  const int is_row = want->n_dims == 1 && t->n_dims == 2 && t->shape[0] == 1; // of a vector
  if (t->n_dims != want->n_dims + is_row) return RM_E_SHAPE;
  for (int i = 0; i < want->n_dims; i++)
    if (t->shape[i + is_row] != want->shape[i]) return RM_E_SHAPE;
  const int known = t->dtype == RM_SRC_BF16 || t->dtype == RM_SRC_F32 || t->dtype == RM_SRC_F16 ||
                    t->dtype == RM_SRC_F64;
  if (t->dtype != w->book->slots[want->slots[0]].dtype && !(w->sync.options.cast && known))
    return RM_E_DTYPE;
  if ((code = layout_rule(s, t))) return code;
  *is = want;
  return RM_OK;
}

// ------------------------------------------------------------------------------------- complaints
_Noreturn static void complain(scene *s, const descriptor *d, const char *what, rm_code got,
                               rm_code want) {
  const rm_tensor *t = &d->tensor;
  fprintf(stderr,
          "fuzz_weights %s: %s: got %s (%s), wanted %s\n  name of %zu bytes \"%.*s\", dtype %d, %d "
          "dims\n",
          fuzz_where(&s->f), what, rm_code_name(got), got ? rm_error_message(&s->err) : "",
          rm_code_name(want), d->length, d->length < 200 ? (int)d->length : 200, d->name,
          (int)t->dtype, t->n_dims);
  for (int i = 0; i < 4; i++)
    fprintf(stderr, "  dim %" PRId64 " stride %" PRId64 "\n", t->shape[i], t->strides[i]);
  tiny_die("  data %p span -%" PRId64 " +%" PRId64, t->data, t->span_lo, t->span_hi);
}

static void compare(scene *s, const descriptor *d, const char *what, rm_code got, rm_code want) {
  if (got != want) complain(s, d, what, got, want);
  if (got == RM_OK) return;
  const char *message = rm_error_message(&s->err);
  const int named = got == RM_E_LIMIT || got == RM_E_STATE
                        ? *message != 0
                        : strncmp(message, d->name, d->length) == 0;
  if (s->err.code != got || !named)
    complain(s, d, "the message does not say what it is about", got, want);
}

static void expect_state(scene *s, int64_t version, uint64_t digest) {
  const rm_store *store = rm_engine_store(s->w->engine);
  if (store->version == version && rm_store_digest(store) == digest) return;
  tiny_die("fuzz_weights %s: version %" PRId64 " digest %" PRIx64 "; wanted %" PRId64 " %" PRIx64,
           fuzz_where(&s->f), store->version, rm_store_digest(store), version, digest);
}

// ------------------------------------------------------------------------------------ descriptors
static void set_name(scene *s, descriptor *d, const char *text, size_t length) {
  char *to = s->names.high - length;
  memmove(to, text, length);
  d->name = to, d->length = length;
}

static void set_tensor(scene *s, descriptor *d, const spelling *is) {
  d->tensor = (rm_tensor){.data = s->nowhere.low - 4096,
                          .dtype = s->w->book->slots[is->slots[0]].dtype,
                          .n_dims = is->n_dims};
  memcpy(d->tensor.shape, is->shape, sizeof is->shape);
  if (s->w->sync.options.cast && fuzz_one_in(&s->f, 3))
    d->tensor.dtype = (rm_src_dtype)fuzz_below(&s->f, 4);
  tensor_lay_out(&s->f, &d->tensor);
}

static void make(scene *s, descriptor *d) {
  static char text[NAME_ROOM];
  fuzz *f = &s->f;
  const spelling *is = &s->w->book->names[fuzz_below(f, s->w->book->n_names)];
  size_t n = dress(f, text, is->name);
  set_tensor(s, d, is);
  for (int64_t left = fuzz_below(f, 4); left > 0; left--) {
    if (fuzz_one_in(f, 3)) n = mutate_name(f, s->w->book, text, n);
    else mutate_tensor(f, &d->tensor);
  }
  if (fuzz_one_in(f, 256)) n = stretch_name(f, text, n);
  set_name(s, d, text, n);
}

static void check_one(scene *s) {
  descriptor d;
  const spelling *is;
  make(s, &d);
  if (s->f.plant == 6) s->gathered[0] = (uint32_t)*(const volatile char *)s->nowhere.high;
  const rm_code want = rule(s, &d, &is),
                got = tiny_check(s->w->engine, s->w->sync.options.allow_partial, d.name, d.length,
                                 &d.tensor, &s->err);
  compare(s, &d, "a descriptor", got, want);
  if (got) s->refused[got]++;
  else s->accepted++;
}

// ----------------------------------------------------------------------------------------- pushes
static int64_t slot_elements(const slot *p) { return p->rows * p->cols; }

static uint32_t load(const scene *s, const char *from, rm_src_dtype dtype, rm_src_dtype as) {
  const uint32_t bits = element_load(from, dtype, as);
  if (s->f.plant != 4 || as != RM_SRC_BF16 || dtype != RM_SRC_F32) return bits;
  uint16_t high;
  memcpy(&high, from + 2, sizeof high);
  return high;
}

// The other tensor of a tied pair, if it has arrived and this one must equal it; −1 otherwise.
static int tied_twin(const world *w, int index) {
  const book *b = w->book;
  const int twin = index == b->embed ? b->lm_head : index == b->lm_head ? b->embed : -1;
  return twin >= 0 && w->model->kind == TINY_TIED && (w->sync.seen >> twin & 1) ? twin : -1;
}

// Places a tensor of values in a buffer that ends, or begins, at an inaccessible page. The bytes
// between its elements are NaNs. The buffer is [*low, *high).
static void place(scene *s, descriptor *d, const spelling *is, char **low, char **high) {
  fuzz *f = &s->f;
  const book *b = s->w->book;
  set_tensor(s, d, is);
  rm_tensor *t = &d->tensor;
  const reach r = tensor_reach(t);
  const int64_t bytes = (int64_t)(r.before + r.after),
                shift = fuzz_one_in(f, 8) ? 1 + fuzz_below(f, 8) : 0;
  if (bytes + shift > DATA_ROOM) tiny_die("%s takes %" PRId64 " bytes", is->name, bytes);
  *low = fuzz_one_in(f, 2) ? s->data.low + shift : s->data.high - bytes - shift;
  *high = *low + bytes;
  memset(*low, 0xFF, (size_t)bytes);
  t->data = *low + (int64_t)r.before;
  const int wild = fuzz_one_in(f, 32), twin = tied_twin(s->w, is->slots[0]);
  const uint32_t *equal = twin >= 0 && !fuzz_one_in(f, 4) ? s->w->next[twin] : NULL;
  int64_t n = 1;
  for (int i = 0; i < t->n_dims; i++) n *= t->shape[i];
  for (int64_t e = 0; e < n; e++)
    element_store(element_at(t, e), t->dtype,
                  equal ? element_value(equal[e], b->slots[twin].dtype) : any_value(f, wild));
  static const double bad[] = {NAN, -NAN, INFINITY, -INFINITY};
  if (fuzz_one_in(f, 64))
    element_store(element_at(t, fuzz_below(f, n)), t->dtype, bad[fuzz_below(f, 4)]);
}

// The result of a push whose descriptor obeys all rules: the parameters are stored one after
// another until one is refused. *bad: the element of the tensor that is not finite, or −1.
static rm_code push_rule(scene *s, const descriptor *d, const spelling *is, int64_t *bad) {
  world *w = s->w;
  const book *b = w->book;
  uint32_t *at = s->gathered;
  *bad = -1;
  for (int i = 0; i < is->n_slots; i++) {
    const int index = is->slots[i], twin = tied_twin(w, index),
              is_tied_head = index == b->lm_head && b->slots[index].optional;
    const slot *p = &b->slots[index];
    const int64_t n = slot_elements(p);
    // A tied pair has one matrix.
    if (twin < 0) w->sync.dirty |= UINT64_C(1) << (is_tied_head ? b->embed : index);
    for (int64_t e = 0; e < n; e++) {
      const int64_t element = at - s->gathered + e;
      at[e] = load(s, element_at(&d->tensor, element), d->tensor.dtype, p->dtype);
      if (*bad < 0 && is_nonfinite(at[e], p->dtype) && s->f.plant != 5) *bad = element;
    }
    if (*bad >= 0) return RM_E_NONFINITE;
    if (twin >= 0 && memcmp(at, w->next[twin], (size_t)n * sizeof *at) != 0)
      return RM_E_TIED_WEIGHT;
    at += n;
  }
  return RM_OK;
}

// The message for a value that is not finite has its index in the sender's tensor.
static int says_where(const scene *s, const rm_tensor *t, int64_t element) {
  char where[96];
  const int64_t last = t->shape[t->n_dims - 1], row = element / last,
                rows = t->shape[t->n_dims > 1 ? t->n_dims - 2 : 0];
  if (t->n_dims == 1) snprintf(where, sizeof where, " [%" PRId64 "] ", element);
  else if (t->n_dims == 2)
    snprintf(where, sizeof where, " [%" PRId64 ", %" PRId64 "] ", row, element % last);
  else
    snprintf(where, sizeof where, " [%" PRId64 ", %" PRId64 ", %" PRId64 "] ", row / rows,
             row % rows, element % last);
  return strstr(rm_error_message(&s->err), where) != NULL;
}

static void push(scene *s, const descriptor *d) {
  world *w = s->w;
  const spelling *is;
  int64_t bad = -1;
  rm_code want = rule(s, d, &is);
  if (!want && is) want = push_rule(s, d, is, &bad);
  const rm_code got =
      tiny_push(w->engine, w->sync.options.allow_partial, d->name, d->length, &d->tensor, &s->err);
  compare(s, d, "a push", got, want);
  if (got == RM_E_NONFINITE && !says_where(s, &d->tensor, bad))
    complain(s, d, "the wrong element is named", got, want);
  s->pushes++;
  s->push_refused[got]++;
  if (got || !is) return;
  const uint32_t *at = s->gathered;
  for (int i = 0; i < is->n_slots; i++) {
    const int64_t n = slot_elements(&w->book->slots[is->slots[i]]);
    memcpy(w->next[is->slots[i]], at, (size_t)n * sizeof *at);
    at += n;
  }
  w->sync.seen |= is->mask;
}

// A valid tensor, sometimes after an almost valid one, and sometimes sent twice.
static void send(scene *s, const spelling *is) {
  fuzz *f = &s->f;
  const world *w = s->w;
  static char text[NAME_ROOM];
  descriptor d;
  char *low, *high;
  size_t n = dress(f, text, is->name);
  set_name(s, &d, text, n);
  place(s, &d, is, &low, &high);
  if (fuzz_one_in(f, 6)) {
    descriptor wrong = d;
    if (fuzz_one_in(f, 4)) set_name(s, &wrong, text, mutate_name(f, s->w->book, text, n));
    else mutate_tensor(f, &wrong.tensor);
    const spelling *as;
    // If it fits, its bytes are read, so they must exist.
    const int fits = rule(s, &wrong, &as) == RM_OK && as;
    const reach r = fits ? tensor_reach(&wrong.tensor) : (reach){0, 0};
    const uintptr_t at = (uintptr_t)wrong.tensor.data;
    if (!fits ||
        (at >= (uintptr_t)low + (uintptr_t)r.before && at + (uintptr_t)r.after <= (uintptr_t)high))
      push(s, &wrong);
    set_name(s, &d, text, n = dress(f, text, is->name));
  }
  if (fuzz_one_in(f, 200)) return;
  push(s, &d);
  if (fuzz_one_in(f, 16)) push(s, &d);
  for (int tries = 0; tries < 4 && !(w->sync.seen & is->mask) && !fuzz_one_in(f, 6);
       tries++) { // not finite, or different from its twin
    place(s, &d, is, &low, &high);
    push(s, &d);
  }
}

// ------------------------------------------------------------------------------------ whole syncs
static void begin(scene *s, rm_sync_options options) {
  world *w = s->w;
  if (fuzz_one_in(&s->f, 8)) {
    rm_sync_options wrong = options;
    wrong.version = fuzz_one_in(&s->f, 2) ? w->version - fuzz_below(&s->f, 3)
                                          : INT64_MIN + fuzz_below(&s->f, 1000);
    if (wrong.version >= 0 || wrong.version < -1) {
      const rm_code code = rm_engine_sync_begin(w->engine, &wrong, &s->err);
      if (code != RM_E_VERSION)
        tiny_die("fuzz_weights %s: version %" PRId64 " was taken", fuzz_where(&s->f),
                 wrong.version);
    }
  }
  tiny_must(rm_engine_sync_begin(w->engine, &options, &s->err), &s->err);
  w->sync = (sync){.open = 1, .options = options};
  w->sync.options.version = options.version < 0 ? w->version + 1 : options.version;
}

// A tied embedding that was sent as lm_head alone.
static int came_as_head(const world *w, uint64_t seen) {
  const book *b = w->book;
  return w->model->kind == TINY_TIED && !(seen >> b->embed & 1) && (seen >> b->lm_head & 1);
}

static int is_absent(const world *w, int slot_index, int has_base) {
  if (slot_index == w->book->embed && came_as_head(w, w->sync.seen)) return 0;
  const uint64_t bit = UINT64_C(1) << slot_index;
  const int wanted = !w->book->slots[slot_index].optional || (w->sync.dirty & bit);
  return wanted && !(w->sync.seen & bit) && !(has_base && !(w->sync.dirty & bit));
}

static uint64_t bias_slots(const book *b) {
  uint64_t slots = 0;
  for (int i = 0; i < b->n_slots; i++)
    if (b->slots[i].optional && i != b->lm_head) slots |= UINT64_C(1) << i;
  return slots;
}

static rm_code commit_rule(const world *w, int has_base) {
  for (int i = 0; i < w->book->n_slots; i++)
    if (is_absent(w, i, has_base)) return RM_E_INCOMPLETE_SYNC;
  const uint64_t kept = has_base ? ~w->sync.dirty : 0;
  const uint64_t gone = w->biases & ~w->sync.seen & ~kept;
  return gone && !w->sync.options.allow_bias_removal ? RM_E_MISSING_KEY : RM_OK;
}

// Pushes the serving values to the other engine as plain contiguous tensors: the digest must be
// equal.
static void expect_values(scene *s) {
  world *w = s->w;
  tiny_must(rm_engine_sync_begin(
                w->plain, &(rm_sync_options){.version = -1, .allow_bias_removal = 1}, &s->err),
            &s->err);
  for (int i = 0; i < w->book->n_slots; i++) {
    const slot *p = &w->book->slots[i];
    const int is_bias = bias_slots(w->book) >> i & 1;
    if (p->optional && !(is_bias && (w->biases >> i & 1))) continue;
    const int64_t n = slot_elements(p), each = element_bytes(p->dtype);
    rm_tensor t = {
        .data = s->data.low, .dtype = p->dtype, .n_dims = p->n_dims, .span_hi = n * each};
    if (p->n_dims == 1) t.shape[0] = p->cols, t.strides[0] = 1;
    else t.shape[0] = p->rows, t.shape[1] = p->cols, t.strides[0] = p->cols, t.strides[1] = 1;
    for (int64_t e = 0; e < n; e++)
      memcpy(s->data.low + e * each, &w->values[i][e], (size_t)each); // little endian
    tiny_must(tiny_push(w->plain, 0, p->name, strlen(p->name), &t, &s->err), &s->err);
  }
  tiny_must(rm_engine_sync_commit(w->plain, RM_INFLIGHT_REFUSE, NULL, &s->err), &s->err);
  expect_state(s, w->version, rm_store_digest(rm_engine_store(w->plain)));
}

static void close_sync(scene *s, int abort, int has_base, uint64_t digest) {
  world *w = s->w;
  const sync was = w->sync;
  const rm_code want = commit_rule(w, has_base);
  w->sync.open = 0;
  if (abort) rm_engine_sync_abort(w->engine);
  const rm_code got =
      abort ? RM_OK : rm_engine_sync_commit(w->engine, RM_INFLIGHT_REFUSE, NULL, &s->err);
  if (!abort && got != want)
    tiny_die("fuzz_weights %s: a commit: got %s (%s), wanted %s", fuzz_where(&s->f),
             rm_code_name(got), got ? rm_error_message(&s->err) : "", rm_code_name(want));
  if (abort || got) {
    if (was.options.in_place && w->served && was.dirty) w->served = 0; // half of it is overwritten
    if (got) s->commit_refused[got]++;
    expect_state(s, w->served ? w->version : -1, w->served ? digest : 0);
    return;
  }
  s->syncs++;
  w->served = 1;
  w->version = was.options.version;
  w->biases = bias_slots(w->book) & (was.seen | (has_base ? w->biases & ~was.dirty : 0));
  for (int i = 0; i < w->book->n_slots; i++)
    if (was.seen >> i & 1)
      memcpy(w->values[i], w->next[i],
             (size_t)slot_elements(&w->book->slots[i]) * sizeof(uint32_t));
  const int embed = w->book->embed;
  if (came_as_head(w, was.seen))
    memcpy(w->values[embed], w->next[w->book->lm_head],
           (size_t)slot_elements(&w->book->slots[embed]) * sizeof(uint32_t));
  expect_values(s);
}

// Names in a random order until every parameter has arrived, in the spelling that comes first.
static void whole_sync(scene *s) {
  world *w = s->w;
  fuzz *f = &s->f;
  const uint64_t digest = rm_store_digest(rm_engine_store(w->engine));
  const rm_sync_options options = {.version =
                                       fuzz_one_in(f, 4) ? w->version + 1 + fuzz_below(f, 3) : -1,
                                   .cast = fuzz_one_in(f, 2),
                                   .allow_partial = fuzz_one_in(f, 4),
                                   .allow_bias_removal = fuzz_one_in(f, 4),
                                   .in_place = fuzz_one_in(f, 8)};
  const int has_base = options.allow_partial && w->served;
  begin(s, options);
  int order[BOOK_NAMES];
  const int n = w->book->n_names;
  for (int i = 0; i < n; i++) {
    const int64_t at = fuzz_below(f, i + 1);
    order[i] = order[at];
    order[at] = i;
  }
  const int stop = fuzz_one_in(f, 8) ? (int)fuzz_below(f, n) : n,
            few = has_base && fuzz_one_in(f, 2);
  const uint64_t forgotten = fuzz_one_in(f, 4) ? bias_slots(w->book) : 0;
  for (int i = 0; i < stop; i++) {
    const spelling *is = &w->book->names[order[i]];
    if ((is->mask & w->sync.seen) && !fuzz_one_in(f, 16)) continue;
    if (few && !fuzz_one_in(f, 8)) continue;
    if (is->mask & forgotten) continue;
    send(s, is);
  }
  close_sync(s, stop < n, has_base, digest);
}

// The state at the beginning of every block, so that a case depends on its number alone.
static void good_sync(scene *s) {
  world *w = s->w;
  tiny_must(tiny_sync(w->engine, w->good, RM_INFLIGHT_REFUSE, &s->err), &s->err);
  w->version = rm_engine_store(w->engine)->version;
  w->served = 1;
  w->biases = bias_slots(w->book);
  for (int i = 0; i < w->book->n_slots; i++)
    memcpy(w->values[i], w->start[i], (size_t)slot_elements(&w->book->slots[i]) * sizeof(uint32_t));
  expect_values(s);
}

static void expect_rollouts(scene *s, long block) {
  world *w = s->w;
  if (!w->served) return;
  const uint64_t got = tiny_generate(w->engine, w->model, (uint64_t)block, 3),
                 want = tiny_generate(w->plain, w->model, (uint64_t)block, 3);
  if (got != want)
    tiny_die("fuzz_weights %s: rollouts %" PRIx64 ", wanted %" PRIx64, fuzz_where(&s->f), got,
             want);
  s->hashes++;
}

// ----------------------------------------------------------------------------------------- blocks
static void open_block(scene *s, long block) {
  const uint64_t kept = s->f.state;
  fuzz *f = &s->f;
  f->state = tiny_mix(f->seed ^ tiny_mix((uint64_t)block));
  world *w = s->w = &s->worlds[fuzz_below(f, WORLDS)];
  good_sync(s);
  whole_sync(s);
  if (fuzz_one_in(f, HASH_EVERY)) expect_rollouts(s, block);
  if (!fuzz_one_in(f, 32)) { // otherwise the checks of this block would not belong to a sync
    begin(s, (rm_sync_options){
                 .version = -1, .cast = fuzz_one_in(f, 2), .allow_partial = fuzz_one_in(f, 8)});
    for (int64_t left = fuzz_below(f, 8); left > 0; left--)
      send(s, &w->book->names[fuzz_below(f, w->book->n_names)]);
  }
  f->state = kept;
}

static void close_block(scene *s) {
  world *w = s->w;
  const uint64_t digest = rm_store_digest(rm_engine_store(w->plain));
  expect_state(s, w->served ? w->version : -1, w->served ? digest : 0);
  rm_engine_sync_abort(w->engine);
  w->sync.open = 0;
  expect_state(s, w->served ? w->version : -1, w->served ? digest : 0);
}

// ----------------------------------------------------------------------------------------- worlds
static void create_world(world *w, tiny_kind kind, rm_dtype dtype) {
  w->model = tiny_model_create(kind, dtype);
  w->good = tiny_weights_create(w->model, 7);
  w->engine = tiny_engine(w->model, 1);
  w->plain = tiny_engine(w->model, 1);
  w->book = book_create(w->model);
  w->version = -1;
  for (int i = 0; i < w->book->n_slots; i++) {
    const slot *p = &w->book->slots[i];
    uint32_t **const all[3] = {&w->start[i], &w->values[i], &w->next[i]};
    for (int k = 0; k < 3; k++)
      if (!(*all[k] = calloc((size_t)slot_elements(p), sizeof(uint32_t))))
        tiny_die("no memory for values");
    for (int64_t k = 0; k < w->good->n; k++) {
      const tiny_tensor *t = &w->good->list[k];
      if (strcmp(t->name, p->name) != 0) continue;
      for (int64_t e = 0; e < slot_elements(p); e++)
        w->start[i][e] = element_load(element_at(&t->tensor, e), p->dtype, p->dtype);
    }
  }
}

static void destroy_world(world *w) {
  for (int i = 0; i < w->book->n_slots; i++)
    free(w->start[i]), free(w->values[i]), free(w->next[i]);
  free(w->book);
  rm_engine_destroy(w->engine), rm_engine_destroy(w->plain);
  tiny_weights_destroy(w->good), tiny_model_destroy(w->model);
}

static void print_counts(const char *before, const long counts[RM_N_CODE]) {
  for (int code = 1; code < RM_N_CODE; code++)
    if (counts[code])
      printf("%s%s %ld", before, rm_code_name((rm_code)code), counts[code]), before = ", ";
}

int main(int argc, char **argv) {
  static scene s;
  s.f = fuzz_begin(argc, argv, 200000, 6);
  s.names = room_create(NAME_ROOM), s.data = room_create(DATA_ROOM), s.nowhere = room_create(4096);
  for (int i = 0; i < WORLDS; i++)
    create_world(&s.worlds[i], (tiny_kind)(i / 2), i % 2 ? RM_F32 : RM_BF16);
  long cases = 0, block = -1;
  for (; fuzz_next_case(&s.f); cases++) {
    if (s.f.at / BLOCK != block) {
      if (block >= 0) close_block(&s);
      open_block(&s, block = s.f.at / BLOCK);
    }
    check_one(&s);
  }
  if (block >= 0) close_block(&s);
  rm_error_clear(&s.err);
  for (int i = 0; i < WORLDS; i++) destroy_world(&s.worlds[i]);
  room_destroy(s.names), room_destroy(s.data), room_destroy(s.nowhere);
  if (rm_memory_blocks()) tiny_die("%zu blocks were not given back", rm_memory_blocks());
  printf("fuzz_weights: %ld descriptors (%ld accepted, refused: ", cases, s.accepted);
  print_counts("", s.refused);
  printf("), %ld pushes (refused: ", s.pushes);
  print_counts("", s.push_refused);
  printf("), %ld syncs (refused: ", s.syncs);
  print_counts("", s.commit_refused);
  printf("), %ld rollouts compared, seed %" PRIu64 "\n", s.hashes, s.f.seed);
  return 0;
}
