// team.c: the thread team. A forward pass calls rm_team_run some hundred times a token, so starting
// a run must take about a microsecond: it is one addition to `epoch`, which the workers poll. They
// spin for some microseconds, since the next op usually follows at once, and then sleep on `epoch`
// as a futex. With more threads than cores they do not spin.
//
// Each op divides its own work: in products and attention the threads take parts dynamically, small
// ops split evenly.
#define _GNU_SOURCE
#include "base/team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/control_groups.h"
#include "base/memory.h"

enum { SPIN_PAUSES = 1000 }; // some 20 µs; an op on small rows takes less

typedef struct rm_worker {
  rm_team *team; // view
  pthread_t thread;
  int index;
} rm_worker;

struct rm_team {
  int n_threads, spins;
  int n_started; // workers that exist
  pid_t owner; // the process that created the workers; a forked child has none
  rm_task_fn fn; // of the current run; NULL: the workers return
  void *arg;
  char pad0[64]; // each polled word has its own cache line
  _Atomic uint32_t epoch; // futex: number of runs
  char pad1[60];
  _Atomic uint32_t pending; // futex: workers not yet done
  char pad2[60];
  _Atomic int sleeping_workers, sleeping_caller;
  rm_worker workers[]; // [n_threads − 1]
};

static void futex_wait(_Atomic uint32_t *word, uint32_t seen) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake_all(_Atomic uint32_t *word) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, RM_MAX_THREADS, NULL, NULL, 0);
}

static void cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

// Returns the first epoch after `seen`.
static uint32_t await_epoch(rm_team *team, uint32_t seen) {
  uint32_t now;
  for (int i = 0; i < team->spins; i++) {
    if ((now = atomic_load_explicit(&team->epoch, memory_order_acquire)) != seen) return now;
    cpu_relax();
  }
  // Before FUTEX_WAIT reads epoch: either the next run reads sleeping_workers after this addition,
  // or FUTEX_WAIT reads the new epoch.
  atomic_fetch_add(&team->sleeping_workers, 1);
  while ((now = atomic_load(&team->epoch)) == seen) futex_wait(&team->epoch, seen);
  atomic_fetch_sub(&team->sleeping_workers, 1);
  return now;
}

static void *worker_main(void *arg) {
  rm_worker *worker = arg;
  rm_team *team = worker->team;
  rm_fp_enter();
  for (uint32_t seen = 0;;) {
    seen = await_epoch(team, seen);
    if (!team->fn) return NULL;
    team->fn(team->arg, worker->index, team->n_threads);
    if (atomic_fetch_sub(&team->pending, 1) == 1 && atomic_load(&team->sleeping_caller))
      futex_wake_all(&team->pending);
  }
}

static void await_workers(rm_team *team) {
  for (int i = 0; i < team->spins; i++) {
    if (atomic_load_explicit(&team->pending, memory_order_acquire) == 0) return;
    cpu_relax();
  }
  atomic_store(&team->sleeping_caller, 1);
  uint32_t left;
  while ((left = atomic_load(&team->pending)) != 0) futex_wait(&team->pending, left);
  atomic_store(&team->sleeping_caller, 0);
}

static void start_run(rm_team *team, rm_task_fn fn, void *arg) {
  team->fn = fn;
  team->arg = arg;
  atomic_store(&team->pending, (uint32_t)team->n_started);
  atomic_fetch_add(&team->epoch, 1);
  if (atomic_load(&team->sleeping_workers)) futex_wake_all(&team->epoch);
}

void rm_team_run(void *opaque, rm_task_fn fn, void *arg) {
  rm_team *team = opaque;
  const uint32_t saved = rm_fp_enter();
  if (team->n_threads == 1) {
    fn(arg, 0, 1);
  } else if (getpid() != team->owner) {
    for (int thread = 0; thread < team->n_threads; thread++) fn(arg, thread, team->n_threads);
  } else {
    start_run(team, fn, arg);
    fn(arg, 0, team->n_threads);
    await_workers(team);
  }
  rm_fp_leave(saved);
}

// Workers block all signals, so that Ctrl-C goes to the interpreter's thread. Signals of a worker's
// own faults stay enabled: faulthandler and the tests' guard pages handle them.
static int start_worker(rm_worker *worker) {
  sigset_t all, before;
  static const int own_faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
  sigfillset(&all);
  for (size_t i = 0; i < sizeof own_faults / sizeof *own_faults; i++)
    sigdelset(&all, own_faults[i]);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int failed = pthread_create(&worker->thread, NULL, worker_main, worker);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return failed;
}

rm_code rm_team_create(int n_threads, rm_team **out, rm_error *err) {
  *out = NULL;
  RM_TRY(rm_check_range(err, RM_E_CONFIG, "threads", n_threads, 1, RM_MAX_THREADS));
  rm_team *team = rm_alloc(1, sizeof *team + (size_t)(n_threads - 1) * sizeof team->workers[0]);
  if (!team) return rm_no_memory(err, "a team of threads", 0);
  team->n_threads = n_threads;
  team->owner = getpid();
  team->spins = n_threads <= rm_usable_cores("") ? SPIN_PAUSES : 0;
  for (int i = 0; i < n_threads - 1; i++) {
    team->workers[i] = (rm_worker){.team = team, .index = i + 1};
    const int failed = start_worker(&team->workers[i]);
    if (failed) {
      rm_team_destroy(team);
      return rm_fail(err, RM_E_CAPACITY, "the system refuses thread %d of threads=%d: %s", i + 2,
                     n_threads, strerror(failed));
    }
    team->n_started++;
  }
  *out = team;
  return RM_OK;
}

void rm_team_destroy(rm_team *team) {
  if (!team) return;
  if (getpid() == team->owner) {
    start_run(team, NULL, NULL);
    for (int i = 0; i < team->n_started; i++) pthread_join(team->workers[i].thread, NULL);
  }
  rm_free(team);
}

int rm_team_threads(const rm_team *team) { return team->n_threads; }

// ------------------------------------------------------------------------------------------ memcpy
typedef struct block_job {
  char *to;
  const char *from;
  size_t bytes;
} block_job;

static void copy_some(void *arg, int thread, int n_threads) {
  const block_job *job = arg;
  const size_t part = (job->bytes / (size_t)n_threads + 63) / 64 * 64,
               start = part * (size_t)thread;
  if (start >= job->bytes) return;
  memcpy(job->to + start, job->from + start, part < job->bytes - start ? part : job->bytes - start);
}

void rm_copy_block(char *to, const char *from, size_t bytes, const rm_ctx *ctx) {
  block_job job = {to, from, bytes};
  ctx->run(ctx->team, copy_some, &job);
}
