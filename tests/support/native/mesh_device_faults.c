// mesh_device_faults.c: faults of an NCCL group, on devices that are threads and with the stand-in
// for NCCL (mesh_device.c), which is controlled by the environment. Ranks are threads, and in the
// last part processes, one of which is killed.
//
// Each trial is one fault, after some successful calls. Every rank must fail within SOON seconds
// (or its deadline), with an expected code and words; every later call fails with the same code and
// words; and everything must be freed.
//
//   mesh_device_faults [--cases 2] [--seed 1]           cases: of each fault
//     --plant N: the Nth fault is not injected          (must end in a failure)
#include <dlfcn.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>

#include "base/memory.h"
#include "comm/shm/region.h"
#include "common/fake_device.h"
#include "common/fuzz.h"
#include "common/talk.h"
#include "gpu/nccl/nccl.h"
#include "gpu/staged.h"

enum { RANKS = 6, CALLS = 6, CULPRIT = 1, ROOM = 4 << 20, CAPACITY = 2000, BYTES = 3000 };
static const double PATIENCE = 0.5, SOON = 20; // a machine that runs tests may stand still,
static const double PARTING_PATIENCE = 2; // and this one is also that of making the group

typedef enum when { MAKING, CALLING, WAITING, COMPARING, ABORTING, DEVICE, LEAVING, PARTING } when;

typedef struct fault {
  const char *name, *variable,
      *value; // of the environment; value: "rank:call:result" with the culprit and the call at hand
  when when; // what fails on the culprit
  rm_code own; // the culprit's; RM_OK: any of a mismatch, a timeout and a lost rank
  const char *word; // in the culprit's message
  int own_word_for_all; // the others have it in their message too
} fault;

static const fault faults[] = {
    {"no such file", NULL, "/nowhere/libnccl.so.2", MAKING, RM_E_CONFIG, "nowhere", 1},
    {"no NCCL", NULL, "libm.so.6", MAKING, RM_E_CONFIG, "ncclGetVersion", 1},
    {"an old NCCL", "STANDIN_VERSION", "21602", MAKING, RM_E_CONFIG, "2.16.2", 1},
    {"no name", "STANDIN_ID", "2", MAKING, RM_E_RANK_LOST, "planted: no id", 1},
    {"no room", NULL, "room", MAKING, RM_E_CAPACITY, "a buffer for exchanges takes", 1},
    {"not made", "STANDIN_INIT", "1:5", MAKING, RM_E_CONFIG, "invalid usage", 0},
    {"never made", "STANDIN_INIT", "1:7", MAKING, RM_E_COLLECTIVE_TIMEOUT, "making a group", 0},
    {"CUDA while it is made", "STANDIN_INIT", "1:1", MAKING, RM_E_DEVICE, "unhandled cuda error",
     0},
    {"other bytes", "STANDIN_FLIP", "1:1", MAKING, RM_OK, "", 0},
    {"a group fails", "STANDIN_GROUP", "1:*:3", CALLING, RM_E_RANK_LOST, "internal error", 0},
    {"a group is misused", "STANDIN_GROUP", "1:*:5", CALLING, RM_E_COLLECTIVE_MISMATCH,
     "invalid usage", 0},
    {"CUDA in a group", "STANDIN_GROUP", "1:*:1", CALLING, RM_E_DEVICE, "unhandled cuda error", 0},
    {"a group times out", "STANDIN_GROUP", "1:*:8", CALLING, RM_E_COLLECTIVE_TIMEOUT,
     "operation timed out", 0},
    {"a group stays busy", "STANDIN_GROUP", "1:*:7", CALLING, RM_E_COLLECTIVE_TIMEOUT,
     "was not done on rank 1", 0},
    {"an error while it runs", "STANDIN_ASYNC", "1:*:6", WAITING, RM_E_RANK_LOST,
     "remote process exited", 0},
    {"a kernel hangs", "STANDIN_HANG", "1:*", WAITING, RM_OK, "", 0},
    {"a kernel is left out", "STANDIN_SKIP", "1:*", WAITING, RM_OK, "", 0},
    {"another operation", NULL, "op", COMPARING, RM_E_COLLECTIVE_MISMATCH, "other calls", 0},
    {"another size", NULL, "size", COMPARING, RM_E_COLLECTIVE_MISMATCH, "sizes", 0},
    {"another epoch", NULL, "epoch", COMPARING, RM_E_COLLECTIVE_MISMATCH, "epoch", 0},
    {"a call less", NULL, "call", COMPARING, RM_E_COLLECTIVE_MISMATCH, "calls", 0},
    {"an abort", NULL, "own", ABORTING, RM_E_RANK_LOST, "rank 1 has aborted: NumericsError", 1},
    {"an abort from another thread", NULL, "other", ABORTING, RM_E_RANK_LOST,
     "rank 1 has aborted: NumericsError", 1},
    {"a device fails", NULL, NULL, DEVICE, RM_E_DEVICE, "an injected fault", 0},
    {"a rank leaves", NULL, NULL, LEAVING, RM_OK, "", 0},
    {"the last way out is shut", "STANDIN_FINALIZE", "1", PARTING, RM_OK, "", 0},
    {"too much", NULL, "room", CALLING, RM_E_CAPACITY,
     "expected at most 2000 bytes of strided blocks in one exchange, got 2998 that rank", 0},
    {"staged: too much", NULL, "room", CALLING, RM_E_CAPACITY,
     "expected at most 2000 bytes in one exchange, got 2998 that rank", 0},
    {"staged: no room", NULL, "room", MAKING, RM_E_CAPACITY, "a buffer for exchanges takes", 0},
    {"staged: a device fails", NULL, NULL, DEVICE, RM_E_DEVICE, "an injected fault", 0},
    {"staged: an abort", NULL, "own", ABORTING, RM_E_RANK_LOST, "rank 1 has aborted: NumericsError",
     1},
    {"staged: a late rank", NULL, "late", CALLING, RM_E_COLLECTIVE_TIMEOUT,
     "rank 1 did not arrive within", 1},
    {"staged: another epoch", NULL, "epoch", COMPARING, RM_E_COLLECTIVE_MISMATCH,
     "weights of epoch", 1},
    {"staged: a rank leaves", NULL, NULL, LEAVING, RM_E_RANK_LOST, "left", 1},
};
enum { N_FAULT = sizeof faults / sizeof *faults };

typedef struct trial {
  const fault *fault;
  rm_region *region;
  const char *where;
  atomic_int failed; // ranks that have
  int size, plant;
  long aborts; // that the stand-in has seen
  long before; // successful calls before it
  rm_code codes[RANKS]; // each rank writes its own
  char texts[RANKS][512];
  double seconds[RANKS]; // from its call to its failure
} trial;

typedef struct rank {
  pthread_t thread, other;
  trial *t;
  int rank;
  rm_comm *host, *comm;
  fake_device *device;
  char *there;
} rank;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int is_culprit(const rank *self) { return self->rank == CULPRIT && !self->t->plant; }

static int is_staged(const trial *t) { return strncmp(t->fault->name, "staged:", 7) == 0; }

static int says(const fault *f, const char *value) {
  return f->value && !f->variable && strcmp(f->value, value) == 0;
}

// ------------------------------------------------------------------------------- what a rank does
static rm_code make(rank *self, rm_error *err) {
  const fault *f = self->t->fault;
  const int32_t members[RANKS] = {0, 1, 2, 3, 4, 5};
  const int is_file = f->value && !f->variable && strstr(f->value, ".so");
  rm_nccl_options options = {
      .library = getenv("STANDIN_LIBRARY"), .capacity = CAPACITY, .timeout = SOON};
  const int is_told = f->own && f->own != RM_E_COLLECTIVE_TIMEOUT;
  if (f->when == MAKING && !is_told && self->rank == CULPRIT)
    options.timeout = PATIENCE; // the first to time out
  if (f->when == PARTING && is_culprit(self))
    options.timeout = PARTING_PATIENCE; // otherwise the ranks do not time out
  if (is_culprit(self) && is_file) options.library = f->value;
  if (is_culprit(self) && f->when == MAKING && says(f, "room")) options.capacity = ROOM;
  self->device = fake_device_open(ROOM);
  tiny_must(
      rm_region_comm(self->t->region, 0, members, self->t->size, self->rank, &self->host, err),
      err);
  void *there;
  if (self->device->device.alloc(self->device, 2 * BYTES, &there))
    tiny_die("no memory of a device");
  self->there = there;
  if (is_staged(self->t)) {
    const rm_code code = rm_comm_create_staged(self->host, &self->device->device, options.capacity,
                                               &self->comm, err);
    if (code) rm_comm_abort(self->host, code); // else the others waited for this rank
    return code;
  }
  return rm_comm_create_nccl(self->host, &self->device->device, &options, &self->comm, err);
}

static rm_code gather(rank *self, size_t bytes, rm_error *err) {
  size_t sizes[RANKS];
  for (int r = 0; r < self->t->size; r++)
    sizes[r] = bytes + (size_t)(r == 0); // not NCCL's all_gather
  return talk_all_gather(self->comm, self->there, self->there + BYTES, sizes, err);
}

static rm_code swap(rank *self, size_t bytes, rm_error *err) {
  rm_block send[RANKS] = {{0}}, recv[RANKS] = {{0}};
  for (int r = 0; r < self->t->size; r++) {
    const size_t n = r == self->rank ? 0 : bytes;
    send[r] = (rm_block){self->there + (size_t)r * bytes, n > 0, n, n};
    recv[r] = (rm_block){self->there + BYTES + (size_t)r * bytes, n > 0, n, n};
  }
  return rm_comm_exchange(self->comm, RM_COMM_ALL_TO_ALL, send, recv, err);
}

static rm_code send_too_much(rank *self, rm_error *err) {
  rm_block send[RANKS] = {{0}}, recv[RANKS] = {{0}};
  send[0] = (rm_block){self->there, 2, BYTES / 2 - 1, BYTES / 2};
  return rm_comm_exchange(self->comm, RM_COMM_ALL_TO_ALL, send, recv, err);
}

static rm_code step(rank *self, int misbehaves, rm_error *err) {
  const char *how = misbehaves && self->t->fault->value ? self->t->fault->value : "";
  rm_code code = RM_OK;
  if (strcmp(how, "epoch") == 0) rm_comm_set_epoch(self->comm, 7);
  if (strcmp(how, "call")) code = gather(self, 200, err);
  if (!code && strcmp(how, "op") == 0) code = gather(self, 100, err);
  else if (!code) code = swap(self, strcmp(how, "size") ? 100 : 101, err);
  return code;
}

static void *abort_soon(void *arg) {
  rank *self = arg;
  usleep(30000);
  rm_comm_abort(self->comm, RM_E_NUMERICS);
  return NULL;
}

// The fault, if there is a queue to wait for.
static rm_code misbehave(rank *self, rm_error *err) {
  const when what = self->t->fault->when;
  if (what == DEVICE) atomic_store(&self->device->fault, 1);
  if (what == ABORTING && says(self->t->fault, "own")) rm_comm_abort(self->comm, RM_E_NUMERICS);
  else if (what == ABORTING && pthread_create(&self->other, NULL, abort_soon, self))
    tiny_die("no thread");
  if (what == LEAVING) {
    rm_comm_destroy(self->comm);
    rm_comm_destroy(self->host);
    self->comm = self->host = NULL;
    return rm_fail(err, RM_E_RANK_LOST, "left");
  }
  if (says(self->t->fault, "late")) usleep((useconds_t)(3e6 * PATIENCE));
  return what == CALLING && says(self->t->fault, "room") ? send_too_much(self, err)
                                                         : step(self, what == COMPARING, err);
}

// Whether this rank times out: every rank if the fault is not reported to the others, else only the
// culprit, so that the culprit's own code is returned.
static int is_lost(const rank *self) {
  const fault *f = self->t->fault;
  if (f->when == LEAVING || says(f, "late")) return 1;
  if (f->when == WAITING) return f->own == RM_OK;
  return f->when == CALLING && self->rank == CULPRIT;
}

static rm_code last_step(rank *self, rm_error *err) {
  const int compares = self->t->fault->when == COMPARING;
  const int waits_for_abort = says(self->t->fault, "other");
  const double patience = is_lost(self) ? PATIENCE : SOON;
  if (waits_for_abort && !is_culprit(self)) usleep(100000); // by then the culprit is in its wait
  rm_code code = is_culprit(self) ? misbehave(self, err) : step(self, 0, err);
  if (!code && compares) code = rm_comm_compare(self->comm, self->host, err);
  rm_comm *const groups[] = {NULL, self->comm};
  if (!code) code = rm_comm_wait(groups, 2, &self->device->device, RM_WAIT_QUEUE, patience, err);
  if (waits_for_abort && is_culprit(self)) pthread_join(self->other, NULL);
  return code;
}

static void stays_dead(rank *self, rm_code code, const char *text) {
  rm_error err = RM_ERROR_INIT;
  for (int i = 0; i < 3 && self->comm; i++) {
    const rm_code again =
        i == 0   ? step(self, 0, &err)
        : i == 1 ? rm_comm_wait(&self->comm, 1, &self->device->device, RM_WAIT_QUEUE, 1, &err)
                 : rm_comm_compare(self->comm, self->host, &err);
    if (i != 1 && (again != code || strcmp(rm_error_message(&err), text)))
      tiny_die("%s: %s: dead as \"%s\", then %s \"%s\"", self->t->where, self->t->fault->name, text,
               rm_code_name(again), rm_error_message(&err));
    if (!again)
      tiny_die("%s: %s: a wait of a dead group goes well", self->t->where, self->t->fault->name);
    rm_error_clear(&err);
  }
}

static void *run_rank(void *arg) {
  rank *self = arg;
  trial *t = self->t;
  rm_error err = RM_ERROR_INIT;
  double start = now();
  rm_code code = make(self, &err);
  if (!code && t->fault->when == MAKING && is_staged(t))
    code = swap(self, 100, &err); // each rank makes it alone
  for (long i = 0; i < t->before && !code; i++) {
    code = step(self, 0, &err);
    if (!code)
      code = rm_comm_wait(&self->comm, 1, &self->device->device, RM_WAIT_QUEUE, SOON, &err);
    if (code)
      tiny_die("%s: %s: rank %d fails early: %s", t->where, t->fault->name, self->rank,
               rm_error_message(&err));
  }
  if (!code && t->fault->when != MAKING) {
    tiny_must(rm_comm_barrier(self->host, &err), &err); // every rank has finished its good call
    rm_comm_set_timeout(self->comm, is_lost(self) ? PATIENCE : SOON);
    start = now();
    code = last_step(self, &err);
  }
  t->seconds[self->rank] = now() - start;
  t->codes[self->rank] = code;
  snprintf(t->texts[self->rank], sizeof t->texts[0], "%s", rm_error_message(&err));
  rm_error_clear(&err);
  if (code && t->fault->when == MAKING && t->fault->own_word_for_all)
    tiny_must(rm_comm_barrier(self->host, &err), &err); // lives
  atomic_fetch_add(&t->failed, 1);
  // The others get the error while the culprit does nothing more.
  for (double until = now() + SOON;
       t->fault->when == CALLING && atomic_load(&t->failed) < t->size && now() < until;)
    usleep(1000);
  if (code && self->comm) stays_dead(self, code, t->texts[self->rank]);
  rm_comm_destroy(self->comm);
  rm_comm_destroy(self->host);
  self->device->device.free(self->device, self->there, 2 * BYTES);
  fake_device_close(self->device);
  return NULL;
}

// ------------------------------------------------------------------------------------ the verdict
static int is_group_end(rm_code code) {
  return code == RM_E_RANK_LOST || code == RM_E_COLLECTIVE_TIMEOUT ||
         code == RM_E_COLLECTIVE_MISMATCH;
}

static void judge(const trial *t) {
  const fault *f = t->fault;
  // All ranks learn of it in the first meeting and keep their state.
  const int shared = f->when == MAKING && f->own_word_for_all;
  for (int r = 0; r < t->size; r++) {
    const rm_code code = t->codes[r];
    const char *text = t->texts[r];
    const int own = r == CULPRIT || (shared && strcmp(f->name, "no name") != 0);
    if (t->seconds[r] > SOON)
      tiny_die("%s: %s: rank %d failed after %.1f s: %s", t->where, f->name, r, t->seconds[r],
               text);
    if (f->when == PARTING) {
      if (code || !t->aborts)
        tiny_die("%s: %s: rank %d has %s after %ld aborts", t->where, f->name, r,
                 rm_code_name(code), t->aborts);
      continue;
    }
    if (own && f->own && code != f->own)
      tiny_die("%s: %s: rank %d has %s \"%s\", wanted %s", t->where, f->name, r, rm_code_name(code),
               text, rm_code_name(f->own));
    if (!own && !shared && !is_group_end(code))
      tiny_die("%s: %s: rank %d has %s \"%s\"", t->where, f->name, r, rm_code_name(code), text);
    if ((own || f->own_word_for_all) && !strstr(text, f->word))
      tiny_die("%s: %s: rank %d says \"%s\", without \"%s\"", t->where, f->name, r, text, f->word);
  }
}

static void set_fault(const trial *t) {
  const fault *f = t->fault;
  char value[40];
  const char *star = f->variable ? strchr(f->value, '*') : NULL;
  if (!f->variable || t->plant) return;
  // Two groups prove the end, and each step that goes well is two. What is waited for is the second
  // of the last.
  const long call = 3 + 2 * t->before + (f->when == WAITING);
  if (star)
    snprintf(value, sizeof value, "%.*s%ld%s", (int)(star - f->value), f->value, call, star + 1);
  else snprintf(value, sizeof value, "%s", f->value);
  setenv(f->variable, value, 1);
}

static long aborts_so_far(void) {
  void *library = dlopen(getenv("STANDIN_LIBRARY"), RTLD_NOW | RTLD_LOCAL),
       *found = library ? dlsym(library, "standin_aborts") : NULL;
  long (*count)(void);
  if (!found) tiny_die("%s is no stand-in", getenv("STANDIN_LIBRARY"));
  memcpy(&count, &found, sizeof count);
  return count();
}

static void try_fault(fuzz *f, const fault *which) {
  rm_error err = RM_ERROR_INIT;
  trial t = {.fault = which, .where = fuzz_where(f), .plant = f->plant == which - faults + 1};
  t.size = 2 + (int)fuzz_below(f, RANKS - 1);
  t.before = which->when == MAKING ? 0 : fuzz_below(f, CALLS);
  const rm_region_options options = {
      .world = t.size, .n_groups = 1, .buffer_bytes = 4096, .timeout = SOON};
  tiny_must(rm_region_create(&options, &t.region, &err), &err);
  set_fault(&t);
  t.aborts = -aborts_so_far();
  rank ranks[RANKS];
  for (int r = 0; r < t.size; r++) {
    ranks[r] = (rank){.t = &t, .rank = r};
    if (pthread_create(&ranks[r].thread, NULL, run_rank, &ranks[r])) tiny_die("no thread %d", r);
  }
  for (int r = 0; r < t.size; r++) pthread_join(ranks[r].thread, NULL);
  if (which->variable) unsetenv(which->variable);
  t.aborts += aborts_so_far();
  judge(&t);
  rm_region_release(t.region);
  if (rm_memory_blocks())
    tiny_die("%s: %zu blocks were not given back", t.where, rm_memory_blocks());
}

// -------------------------------------------------------------------------------------- processes
// A rank that is killed with its call in the queue is named by all others.
static void run_process(trial *t, int who, uint64_t nonce, const char *name, int dies_at) {
  rm_error err = RM_ERROR_INIT;
  rank self = {.t = t, .rank = who};
  const rm_region_options options = {
      .world = t->size, .n_groups = 1, .buffer_bytes = 4096, .timeout = SOON};
  tiny_must(rm_region_attach(name, who, nonce, &options, &t->region, &err), &err);
  tiny_must(make(&self, &err), &err);
  for (int call = 0;; call++) {
    if (who == CULPRIT && call == dies_at) raise(SIGKILL);
    rm_code code = step(&self, 0, &err);
    if (!code) code = rm_comm_wait(&self.comm, 1, &self.device->device, RM_WAIT_QUEUE, SOON, &err);
    if (!code) continue;
    // Its last bytes may have arrived, but not been read, when its exit is detected.
    if (call < dies_at - 1 || code != RM_E_RANK_LOST ||
        !strstr(rm_error_message(&err), "lost rank 1: the process has ended"))
      tiny_die("rank %d, call %d: %s \"%s\"", who, call, rm_code_name(code),
               rm_error_message(&err));
    break;
  }
  rm_comm_destroy(self.comm);
  rm_comm_destroy(self.host);
  rm_region_release(t->region);
  self.device->device.free(self.device, self.there, 2 * BYTES);
  fake_device_close(self.device);
  exit(0);
}

static double try_kill(fuzz *f) {
  static const fault none = {.name = "a kill", .when = WAITING};
  char name[64];
  pid_t children[RANKS];
  trial t = {
      .fault = &none,
      .size = 2 + (int)fuzz_below(f, RANKS - 1),
  };
  const int dies_at = (int)fuzz_below(f, CALLS);
  const uint64_t nonce = fuzz_bits(f);
  snprintf(name, sizeof name, "rollmesh-faults-%d-%ld", (int)getpid(), f->at);
  for (int r = 0; r < t.size; r++) {
    if ((children[r] = fork()) < 0) tiny_die("no process %d", r);
    if (children[r] == 0) run_process(&t, r, nonce, name, dies_at);
  }
  int status;
  waitpid(children[CULPRIT], &status, 0);
  const double start = now();
  for (int r = 0; r < t.size; r++) {
    if (r == CULPRIT) continue;
    waitpid(children[r], &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status))
      tiny_die("rank %d ended with status %d", r, status);
  }
  return now() - start;
}

int main(int argc, char **argv) {
  fuzz f = fuzz_begin(argc, argv, 2, N_FAULT);
  double killed = 0;
  long n = 0;
  if (!getenv("STANDIN_LIBRARY")) tiny_die("STANDIN_LIBRARY is not set");
  while (fuzz_next_case(&f)) {
    const double took = f.plant ? 0 : try_kill(&f);
    killed = took > killed ? took : killed;
    for (int i = f.plant ? (int)f.plant - 1 : 0; i < (f.plant ? (int)f.plant : N_FAULT); i++, n++)
      try_fault(&f, &faults[i]);
  }
  printf("mesh_device_faults: %ld trials of %d faults; a killed rank was named by all within %.0f "
         "ms\n",
         n, N_FAULT, 1e3 * killed);
  return 0;
}
