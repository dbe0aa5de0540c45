// mesh_comm.c: groups of threads that exchange. The oracle is common/talk.h, from which every rank
// computes what all the others send.
//
// Talk: each case is a world of 1 … 8 ranks, sometimes of 64, with small buffers, so that calls
// take several rounds. Its ranks, in random order, are in up to three groups each, and the groups
// take turns. Bytes, gaps, guards and statistics are checked, and that no call allocates. Under
// TSan the copies are plain memory, so a missing happens-before edge in the headers is reported.
// Faults: each way in which ranks can disagree, be late or leave. Every rank must fail by its
// second call after that, with the expected code, the same message as all the others, and
// permanently. Deadlines: ranks that come when their deadlines pass, some of them while they fill a
// large buffer. A call is decided once: it succeeds on all ranks or on none.
//
//   mesh_comm [--cases 200] [--seconds S] [--seed 1] [--first 0]
//     Each --plant must end in a failure:
//     --plant 1: a rank sends a byte that it should not
//             2: a rank writes where the others may still read
//             3: a fault case without a fault
//             4: like 2, but with the bytes that are there (only TSan detects it)
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/memory.h"
#include "comm/shm/layout.h"
#include "common/fuzz.h"
#include "common/talk.h"

enum { MAX_WORLD = RM_REGION_RANKS, USUAL_WORLD = 8, GROUPS = 3 };

static atomic_long n_calls, n_kinds[TALK_N_KIND], n_faults, n_late;

// ------------------------------------------------------------------------------------------- talk
typedef struct world {
  rm_region *region;
  int world, n_groups;
  int32_t members[GROUPS][MAX_WORLD]; // a permutation for each index; groups are runs of it
  int length[GROUPS]; // of a run; the last may be shorter
  uint64_t seed;
  size_t most;
  long calls;
  const char *where;
  int plant;
  pthread_barrier_t *barrier; // of the ranks
} world;

typedef struct rank {
  pthread_t thread;
  const world *w;
  int rank;
} rank;

static int place_of(const world *w, int index, int who) {
  int at = 0;
  while (w->members[index][at] != who) at++;
  return at;
}

static rm_comm *join_group(const world *w, int index, int who, int *first) {
  rm_comm *comm;
  rm_error err = RM_ERROR_INIT;
  const int length = w->length[index];
  *first = place_of(w, index, who) / length * length;
  const int n = w->world - *first < length ? w->world - *first : length;
  tiny_must(rm_region_comm(w->region, index, w->members[index] + *first, n, who, &comm, &err),
            &err);
  if (rm_comm_size(comm) != n || rm_comm_rank(comm) != place_of(w, index, who) - *first)
    tiny_die("%s: another place", w->where);
  return comm;
}

static void check_books(const world *w, const talk *t, long calls) {
  rm_comm_stats stats;
  long counted = 0;
  rm_comm_statistics(t->comm, &stats);
  counted = (long)stats.calls;
  if (counted != calls || stats.bytes_sent != t->bytes_sent ||
      stats.bytes_received != t->bytes_received || stats.seconds < 0)
    tiny_die("%s: the books say %ld calls, %llu and %llu bytes, wanted %ld, %llu and %llu",
             w->where, counted, (unsigned long long)stats.bytes_sent,
             (unsigned long long)stats.bytes_received, calls, (unsigned long long)t->bytes_sent,
             (unsigned long long)t->bytes_received);
}

// Breaks the rule of the header: writes before the others have come to the next call.
static void scribble(const world *w, int index, int who) {
  char *buffer = (char *)w->region->map + rm_region_buffers_of(w->region, index, who),
       *written = malloc(w->region->pair_bytes);
  if (!written) tiny_die("no memory");
  if (w->plant == 2) memset(written, 0x77, w->region->pair_bytes);
  else memcpy(written, buffer, w->region->pair_bytes);
  memcpy(buffer, written, w->region->pair_bytes);
  free(written);
}

// Ranks must not allocate between the first and the second call of this function.
static void no_allocations(const world *w, int who, int begin) {
  pthread_barrier_wait(w->barrier);
  if (who == 0) {
    if (!begin && rm_memory_failed()) tiny_die("%s: calls allocate", w->where);
    rm_memory_fail_at(begin, begin);
  }
  pthread_barrier_wait(w->barrier);
}

static void *talk_all(void *arg) {
  const rank *self = arg;
  const world *w = self->w;
  talk talks[GROUPS];
  long counts[GROUPS] = {0};
  rm_error err = RM_ERROR_INIT;
  for (int g = 0; g < w->n_groups; g++) {
    int first;
    rm_comm *comm = join_group(w, g, self->rank, &first);
    talks[g] = talk_begin(comm, tiny_mix(w->seed + (uint64_t)(g * 64 + first)), w->most);
    talks[g].lie = w->plant == 1 && self->rank == 0;
  }
  no_allocations(w, self->rank, 1);
  for (long call = 0; call < w->calls; call++) {
    const int g = (int)(tiny_mix(w->seed ^ (uint64_t)call) % (uint64_t)w->n_groups);
    rm_comm_set_epoch(talks[g].comm, call / 7);
    tiny_must(talk_call(&talks[g], (uint64_t)counts[g]++, &err), &err);
    if ((w->plant == 2 || w->plant == 4) && self->rank == 0) scribble(w, g, 0);
    atomic_fetch_add(&n_calls, 1);
  }
  no_allocations(w, self->rank, 0);
  for (int g = 0; g < w->n_groups; g++) {
    check_books(w, &talks[g], counts[g]);
    for (int kind = 0; kind < TALK_N_KIND; kind++)
      atomic_fetch_add(&n_kinds[kind], talks[g].kinds[kind]);
    rm_comm_destroy(talks[g].comm);
    talk_end(&talks[g]);
  }
  return NULL;
}

static void run_ranks(rank ranks[], int n, void *(*body)(void *)) {
  for (int r = 0; r < n; r++)
    if (pthread_create(&ranks[r].thread, NULL, body, &ranks[r])) tiny_die("no thread %d", r);
  for (int r = 0; r < n; r++) pthread_join(ranks[r].thread, NULL);
}

static void shuffle(fuzz *f, int32_t *list, int n) {
  for (int i = 0; i < n; i++) list[i] = i;
  for (int i = n - 1; i > 0; i--) {
    const int j = (int)fuzz_below(f, i + 1);
    const int32_t kept = list[i];
    list[i] = list[j];
    list[j] = kept;
  }
}

// Runs some rounds before the group's counters wrap to 0.
static void begin_near_the_end(const world *w, int index, uint32_t rounds) {
  for (int first = 0; first < w->world; first += w->length[index]) {
    const int n = w->world - first < w->length[index] ? w->world - first : w->length[index];
    const uint32_t turn =
        (uint32_t)(UINT64_C(0x100000000) / ((unsigned)n * RM_BARRIER_ARRIVAL)) - rounds;
    for (int i = first; i < first + n; i++)
      atomic_store(&rm_region_slot_of(w->region, index, w->members[index][i])->came, turn);
    atomic_store(&rm_region_slot_of(w->region, index, w->members[index][first])->barrier,
                 turn * (uint32_t)n * RM_BARRIER_ARRIVAL);
  }
}

static void talk_case(fuzz *f, int ranks_there, long calls) {
  static const size_t buffers[] = {1, 64, 65, 200, 1000, 4096, 100000};
  rm_error err = RM_ERROR_INIT;
  pthread_barrier_t barrier;
  world w = {.barrier = &barrier,
             .world = ranks_there,
             .calls = calls,
             .where = fuzz_where(f),
             .plant = (int)f->plant};
  w.n_groups = 1 + (int)fuzz_below(f, GROUPS);
  w.seed = fuzz_bits(f);
  for (int g = 0; g < w.n_groups; g++) {
    shuffle(f, w.members[g], w.world);
    w.length[g] = g == 0 ? w.world : 1 + (int)fuzz_below(f, w.world);
  }
  const size_t buffer = buffers[fuzz_below(f, 7)];
  w.most = w.world > USUAL_WORLD        ? 100
           : buffer < 500               ? 500
           : buffer + buffer / 2 < 5000 ? buffer + buffer / 2
                                        : 5000;
  const rm_region_options options = {
      .world = w.world, .n_groups = w.n_groups, .buffer_bytes = buffer, .timeout = 120};
  tiny_must(rm_region_create(&options, &w.region, &err), &err);
  for (int g = 0; g < w.n_groups; g++)
    if (fuzz_one_in(f, 3)) begin_near_the_end(&w, g, (uint32_t)fuzz_below(f, 40));
  rank ranks[MAX_WORLD];
  for (int r = 0; r < w.world; r++) ranks[r] = (rank){.w = &w, .rank = r};
  pthread_barrier_init(&barrier, NULL, (unsigned)w.world);
  run_ranks(ranks, w.world, talk_all);
  pthread_barrier_destroy(&barrier);
  rm_region_release(w.region);
}

// ----------------------------------------------------------------------------------------- faults
typedef enum fault {
  FAULT_OP,
  FAULT_SIZE,
  FAULT_EPOCH,
  FAULT_MEMBERS,
  FAULT_LATE,
  FAULT_ABORT,
  FAULT_ABORT_ELSEWHERE,
  FAULT_LEFT,
  FAULT_ARGUMENT,
  N_FAULT
} fault;

static const struct {
  const char *name;
  rm_code code, own; // of the others, and of the rank at fault
} faults[N_FAULT] = {
    [FAULT_OP] = {"another operation", RM_E_COLLECTIVE_MISMATCH, RM_E_COLLECTIVE_MISMATCH},
    [FAULT_SIZE] = {"another size", RM_E_COLLECTIVE_MISMATCH, RM_E_COLLECTIVE_MISMATCH},
    [FAULT_EPOCH] = {"another epoch", RM_E_COLLECTIVE_MISMATCH, RM_E_COLLECTIVE_MISMATCH},
    [FAULT_MEMBERS] = {"other members", RM_E_MESH_MISMATCH, RM_E_MESH_MISMATCH},
    [FAULT_LATE] = {"a late rank", RM_E_COLLECTIVE_TIMEOUT, RM_E_COLLECTIVE_TIMEOUT},
    [FAULT_ABORT] = {"an abort", RM_E_RANK_LOST, RM_E_RANK_LOST},
    [FAULT_ABORT_ELSEWHERE] = {"an abort of another group", RM_E_RANK_LOST, RM_E_RANK_LOST},
    [FAULT_LEFT] = {"a rank that left", RM_E_RANK_LOST, RM_OK},
    [FAULT_ARGUMENT] = {"a bad argument", RM_E_RANK_LOST, RM_E_LAYOUT},
};

typedef struct trial {
  rm_region *region;
  fault fault;
  int world, culprit, before; // successful calls before it
  int32_t members[MAX_WORLD];
  const char *where;
  int plant;
  atomic_int failed; // ranks that have failed
  rm_code codes[MAX_WORLD]; // each rank writes its own
  char texts[MAX_WORLD][512];
} trial;

typedef struct trial_rank {
  pthread_t thread;
  trial *t;
  int rank;
} trial_rank;

static rm_code good_call(rm_comm *comm, size_t bytes, rm_error *err) {
  char mine[300] = {0}, all[MAX_WORLD * 300];
  return rm_comm_all_gather(comm, mine, all, bytes, err);
}

static void wait_for_others(const trial *t) {
  for (int i = 0; atomic_load(&t->failed) < t->world - 1; i++) {
    if (i > 60 * 1000) tiny_die("%s: the others did not fail within a minute", t->where);
    usleep(1000);
  }
}

// The rank at fault does something else while the others make a good call. Returns its code.
static rm_code misbehave(trial *t, rm_comm **comm, rm_comm *other, rm_error *err) {
  rm_block bad[MAX_WORLD] = {{0}}, none[MAX_WORLD] = {{0}};
  switch (t->plant == 3 ? N_FAULT : t->fault) {
    case FAULT_OP: return rm_comm_barrier(*comm, err);
    case FAULT_SIZE: return good_call(*comm, 299, err);
    case FAULT_EPOCH: rm_comm_set_epoch(*comm, 7); break;
    case FAULT_LATE: wait_for_others(t); break;
    case FAULT_ABORT: rm_comm_abort(*comm, RM_E_NUMERICS); break;
    case FAULT_ABORT_ELSEWHERE:
      // one group has failed, the other is given up for it: the reason is the first one's
      rm_comm_abort(other, RM_E_NUMERICS);
      rm_comm_abort(*comm, RM_E_STATE);
      break;
    case FAULT_LEFT:
      rm_comm_destroy(*comm);
      *comm = NULL;
      return RM_OK;
    case FAULT_ARGUMENT:
      bad[rm_comm_rank(*comm)] = (rm_block){"x", 1, 1, 1};
      return rm_comm_exchange(*comm, RM_COMM_VOTE, bad, none, err);
    default: break;
  }
  return good_call(*comm, 300, err);
}

static void *try_all(void *arg) {
  trial_rank *self = arg;
  trial *t = self->t;
  rm_error err = RM_ERROR_INIT;
  rm_comm *comm, *other;
  rm_code code = RM_OK;
  int32_t members[MAX_WORLD];
  memcpy(members, t->members, sizeof members);
  const int culprit = self->rank == t->culprit;
  // The first member stays, the order of the others is reversed.
  if (culprit && t->fault == FAULT_MEMBERS && t->plant != 3) {
    for (int i = 1; i < t->world; i++) members[i] = t->members[t->world - i];
  }
  tiny_must(rm_region_comm(t->region, 0, members, t->world, self->rank, &comm, &err), &err);
  tiny_must(rm_region_comm(t->region, 1, t->members, t->world, self->rank, &other, &err), &err);
  if (t->fault == FAULT_LATE && !culprit) rm_comm_set_timeout(comm, 0.05);
  for (int i = 0; i < t->before && t->fault != FAULT_MEMBERS; i++) {
    rm_comm_set_timeout(comm, 60);
    tiny_must(good_call(comm, (size_t)(i % 300), &err), &err);
  }
  if (t->fault == FAULT_LATE) rm_comm_set_timeout(comm, 0.05);
  code = culprit ? misbehave(t, &comm, other, &err) : good_call(comm, 300, &err);
  if (!code && comm)
    code = rm_comm_barrier(comm, &err); // a rank without an error in that call gets it in this one
  snprintf(t->texts[self->rank], sizeof t->texts[0], "%s", rm_error_message(&err));
  t->codes[self->rank] = code;
  atomic_fetch_add(&t->failed, 1);
  if (comm && code) { // permanently, for every call
    rm_error again = RM_ERROR_INIT;
    if (rm_comm_barrier(comm, &again) != code ||
        strcmp(rm_error_message(&again), t->texts[self->rank]))
      tiny_die("%s: a dead group says \"%s\" and then \"%s\"", t->where, t->texts[self->rank],
               rm_error_message(&again));
    rm_error_clear(&again);
  }
  rm_comm_destroy(comm);
  rm_comm_destroy(other);
  rm_error_clear(&err);
  return NULL;
}

static void check_trial(const trial *t) {
  const rm_code want = faults[t->fault].code, own = faults[t->fault].own;
  const int witness = t->culprit == 0; // any rank but the one at fault
  const char *said = t->texts[witness];
  char culprit[24];
  snprintf(culprit, sizeof culprit, "rank %d", t->culprit);
  for (int r = 0; r < t->world; r++) {
    if (t->codes[r] != (r == t->culprit ? own : want))
      tiny_die("%s: %s: rank %d has %s (%s)", t->where, faults[t->fault].name, r,
               rm_code_name(t->codes[r]), t->texts[r]);
    if (r != t->culprit && strcmp(t->texts[r], said))
      tiny_die("%s: \"%s\" and \"%s\"", t->where, said, t->texts[r]);
  }
  if (own == want && strcmp(t->texts[t->culprit], said))
    tiny_die("%s: \"%s\" and \"%s\"", t->where, said, t->texts[t->culprit]);
  if (!strstr(said, culprit))
    tiny_die("%s: %s of %s is not named by \"%s\"", t->where, faults[t->fault].name, culprit, said);
  const char *sign = t->fault == FAULT_ABORT || t->fault == FAULT_ABORT_ELSEWHERE ? "NumericsError"
                     : t->fault == FAULT_LEFT                                     ? "left"
                     : t->fault == FAULT_LATE  ? "all_gather, call"
                     : t->fault == FAULT_EPOCH ? "epoch"
                                               : "rank";
  if (!strstr(said, sign)) tiny_die("%s: \"%s\" does not say \"%s\"", t->where, said, sign);
}

static void fault_case(fuzz *f, fault kind) {
  rm_error err = RM_ERROR_INIT;
  trial t = {.fault = kind, .where = fuzz_where(f), .plant = (int)f->plant};
  t.world = (kind == FAULT_MEMBERS ? 3 : 2) + (int)fuzz_below(f, 5);
  t.before = (int)fuzz_below(f, 6);
  shuffle(f, t.members, t.world);
  t.culprit = t.members[fuzz_below(f, t.world)];
  const rm_region_options options = {.world = t.world,
                                     .n_groups = 2,
                                     .buffer_bytes = 1 + (size_t)fuzz_below(f, 400),
                                     .timeout = 60};
  tiny_must(rm_region_create(&options, &t.region, &err), &err);
  trial_rank ranks[MAX_WORLD];
  for (int r = 0; r < t.world; r++) {
    ranks[r] = (trial_rank){.t = &t, .rank = r};
    if (pthread_create(&ranks[r].thread, NULL, try_all, &ranks[r])) tiny_die("no thread %d", r);
  }
  for (int r = 0; r < t.world; r++) pthread_join(ranks[r].thread, NULL);
  check_trial(&t);
  rm_region_release(t.region);
  atomic_fetch_add(&n_faults, 1);
}

// -------------------------------------------------------------------------------------- deadlines
enum { RACE_CALLS = 12, RACE_BYTES = 1 << 20 };

typedef struct race {
  rm_region *region;
  int world;
  uint64_t seed;
  char *data[MAX_WORLD]; // [RACE_BYTES]
  long made[MAX_WORLD]; // calls that went well; each rank writes its own
  char texts[MAX_WORLD][512];
} race;

typedef struct racer {
  pthread_t thread;
  race *r;
  int rank;
} racer;

static void *race_all(void *arg) {
  const racer *self = arg;
  race *r = self->r;
  rm_comm *comm;
  rm_error err = RM_ERROR_INIT;
  const int32_t members[] = {0, 1, 2, 3, 4, 5, 6, 7};
  tiny_must(rm_region_comm(r->region, 0, members, r->world, self->rank, &comm, &err), &err);
  for (int call = 0; call < RACE_CALLS; call++) {
    const uint64_t bits = tiny_mix(r->seed + (uint64_t)(call * MAX_WORLD + self->rank));
    rm_comm_set_timeout(comm, call == 0 ? 60 : 0.0003 * (double)(bits % 16));
    usleep((useconds_t)(bits >> 8) % 2000);
    int64_t counts[MAX_WORLD] = {0};
    counts[call % r->world] = RACE_BYTES;
    if (rm_comm_gather_rows(comm, NULL, r->data[self->rank], counts, 1, &err)) break;
    r->made[self->rank]++;
  }
  snprintf(r->texts[self->rank], sizeof r->texts[0], "%s", rm_error_message(&err));
  rm_comm_destroy(comm);
  rm_error_clear(&err);
  return NULL;
}

static void race_case(fuzz *f) {
  rm_error err = RM_ERROR_INIT;
  race r = {.world = 2 + (int)fuzz_below(f, 3), .seed = fuzz_bits(f)};
  const rm_region_options options = {
      .world = r.world, .n_groups = 1, .buffer_bytes = RACE_BYTES, .timeout = 60};
  tiny_must(rm_region_create(&options, &r.region, &err), &err);
  racer racers[MAX_WORLD];
  for (int i = 0; i < r.world; i++) {
    racers[i] = (racer){.r = &r, .rank = i};
    if (!(r.data[i] = calloc(1, RACE_BYTES))) tiny_die("no memory");
  }
  for (int i = 0; i < r.world; i++)
    if (pthread_create(&racers[i].thread, NULL, race_all, &racers[i])) tiny_die("no thread %d", i);
  for (int i = 0; i < r.world; i++) pthread_join(racers[i].thread, NULL);
  for (int i = 0; i < r.world; i++) {
    if (r.made[i] != r.made[0] || strcmp(r.texts[i], r.texts[0]))
      tiny_die("%s: rank 0 made %ld calls (%s), rank %d %ld (%s)", fuzz_where(f), r.made[0],
               r.texts[0], i, r.made[i], r.texts[i]);
    free(r.data[i]);
  }
  atomic_fetch_add(&n_late, r.made[0] < RACE_CALLS);
  rm_region_release(r.region);
}

// -------------------------------------------------------------------------------- what is refused
static void refused(rm_code code, rm_code want, const char *word, rm_error *err) {
  if (code != want || !strstr(rm_error_message(err), word))
    tiny_die("%s \"%s\", wanted %s with \"%s\"", rm_code_name(code), rm_error_message(err),
             rm_code_name(want), word);
  rm_error_clear(err);
}

static void refusals(void) {
  rm_error err = RM_ERROR_INIT;
  rm_region *region;
  rm_comm *comm;
  const int32_t members[] = {0, 1};
  rm_region_options o = {.world = 65, .n_groups = 1, .buffer_bytes = 64, .timeout = 1};
  refused(rm_region_create(&o, &region, &err), RM_E_CONFIG, "world: expected 1 to 64, got 65",
          &err);
  o.world = 0;
  refused(rm_region_create(&o, &region, &err), RM_E_CONFIG, "got 0", &err);
  o.world = 3;
  tiny_must(rm_region_create(&o, &region, &err), &err);
  tiny_must(rm_region_comm(region, 0, members, 2, 0, &comm, &err), &err);
  rm_comm_set_timeout(comm, 0);
  refused(rm_comm_barrier(comm, &err), RM_E_COLLECTIVE_TIMEOUT,
          "barrier, call 1: rank 1 did not arrive", &err);
  rm_comm_destroy(comm);
  rm_region_release(region);
}

// The n-th allocation fails, for every n: the call fails, frees everything, and the next try works.
static void no_memory(void) {
  const rm_region_options options = {.world = 2, .n_groups = 1, .buffer_bytes = 64, .timeout = 1};
  const int32_t members[] = {0, 1};
  int failures = 0;
  for (long n = 1;; n++) {
    rm_error err = RM_ERROR_INIT;
    rm_region *region;
    rm_comm *comm = NULL;
    rm_memory_fail_at(n, 0);
    rm_code code = rm_region_create(&options, &region, &err);
    if (!code) code = rm_region_comm(region, 0, members, 2, 0, &comm, &err);
    const int failed = rm_memory_failed() > 0;
    rm_memory_fail_at(0, 0);
    if (failed != (code == RM_E_MEMORY) || (code && comm))
      tiny_die("allocation %ld: %s", n, rm_code_name(code));
    rm_error_clear(&err);
    if (code && region) {
      tiny_must(rm_region_comm(region, 0, members, 2, 0, &comm, &err), &err);
      failures++;
    }
    rm_comm_destroy(comm);
    rm_region_release(region);
    if (rm_memory_blocks())
      tiny_die("allocation %ld: %zu blocks were not given back", n, rm_memory_blocks());
    if (!failed) break;
  }
  if (failures != 2) tiny_die("%d allocations of a group failed, wanted 2", failures);
}

static void lone(uint64_t seed) {
  rm_error err = RM_ERROR_INIT;
  rm_comm *comm;
  tiny_must(talk_alone(&comm, &err), &err);
  talk t = talk_begin(comm, seed, 3000);
  for (uint64_t n = 0; n < 200; n++) tiny_must(talk_call(&t, n, &err), &err);
  rm_block in = {"x", 1, 1, 1}, out = {NULL, 0, 0, 0};
  refused(rm_comm_exchange(comm, RM_COMM_VOTE, &in, &out, &err), RM_E_LAYOUT, "itself 1", &err);
  refused(rm_comm_barrier(comm, &err), RM_E_LAYOUT, "itself 1", &err);
  rm_comm_destroy(comm);
  talk_end(&t);
  tiny_must(talk_alone(&comm, &err), &err);
  rm_comm_abort(comm, RM_E_NUMERICS);
  refused(rm_comm_barrier(comm, &err), RM_E_RANK_LOST, "NumericsError", &err);
  rm_comm_destroy(comm);
}

int main(int argc, char **argv) {
  fuzz f = fuzz_begin(argc, argv, 200, 4);
  refusals();
  no_memory();
  lone(f.seed);
  while (fuzz_next_case(&f)) {
    talk_case(&f, 1 + (int)fuzz_below(&f, USUAL_WORLD), 60);
    if (f.at % 100 == 0) talk_case(&f, MAX_WORLD, 12);
    fault_case(&f, (fault)(f.at % N_FAULT));
    race_case(&f);
  }
  for (int kind = 0; kind < TALK_N_KIND; kind++)
    if (!n_kinds[kind] && f.cases > 50) tiny_die("no call of kind %d", kind);
  if (rm_memory_blocks()) tiny_die("%zu blocks were not given back", rm_memory_blocks());
  printf("mesh_comm: %ld calls (%ld barriers, %ld and %ld gathers, %ld exchanges), "
         "%ld faults of %d kinds, %ld races lost\n",
         (long)n_calls, (long)n_kinds[TALK_BARRIER], (long)n_kinds[TALK_GATHER],
         (long)n_kinds[TALK_COLUMNS], (long)n_kinds[TALK_EXCHANGE], (long)n_faults, N_FAULT,
         (long)n_late);
  return 0;
}
