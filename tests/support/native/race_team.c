// race_team.c: the thread team under TSan. What a team promises is order: everything before
// rm_team_run is seen by its workers, and everything they did is seen when it returns. So tasks
// write plain memory, no atomics, and the caller reads and overwrites it between runs; a missing
// edge is a report. Checked: teams created, run and destroyed in several threads at once; a team
// that is handed from thread to thread; runs that follow at once (workers spin) and after a pause
// (they sleep on the futex).
//
//   race_team [--threads 4] [--rounds 40] [--seed 1] [--plant 1: a task increments an
//   unsynchronised counter]
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

#include "base/memory.h"
#include "base/team.h"
#include "common/option.h"
#include "common/tiny.h"

enum { MAX_TEAM = 5, RUNS = 12, LINE = 8, MAX_THREADS = 16 };

typedef struct job {
  int64_t input; // written by the caller before a run
  int64_t slots[MAX_TEAM * LINE];
  int64_t *unsynchronised; // the injected fault, or NULL
} job;

static int64_t planted;
static atomic_long n_runs;

static void task(void *arg, int thread, int n_threads) {
  job *j = arg;
  for (int t = thread; t < MAX_TEAM; t += n_threads) j->slots[t * LINE] += j->input + t;
  if (j->unsynchronised) ++*j->unsynchronised;
}

static void run_and_check(rm_team *team, job *j, int64_t input) {
  int64_t want[MAX_TEAM];
  for (int t = 0; t < MAX_TEAM; t++) want[t] = j->slots[t * LINE] + input + t;
  j->input = input;
  rm_team_run(team, task, j);
  atomic_fetch_add(&n_runs, 1);
  for (int t = 0; t < MAX_TEAM; t++)
    if (j->slots[t * LINE] != want[t])
      tiny_die("slot %d is %lld, wanted %lld", t, (long long)j->slots[t * LINE],
               (long long)want[t]);
}

typedef struct shared_team {
  pthread_mutex_t lock;
  rm_team *team;
  job j;
} shared_team;

typedef struct worker {
  pthread_t thread;
  uint64_t seed;
  long rounds;
  int plant;
  shared_team *shared;
} worker;

static void *work(void *arg) {
  worker *w = arg;
  for (long round = 0; round < w->rounds; round++) {
    const uint64_t r = tiny_mix(w->seed + (uint64_t)round);
    rm_team *team;
    rm_error err = RM_ERROR_INIT;
    tiny_must(rm_team_create(1 + (int)(r % MAX_TEAM), &team, &err), &err);
    job own = {.unsynchronised = w->plant ? &planted : NULL};
    // Includes 0: workers that are told to leave before they have run.
    const int runs = (int)(r >> 8) % RUNS;
    for (int i = 0; i < runs; i++) {
      run_and_check(team, &own, (int64_t)(r >> (i % 32) & 0xFFFF));
      if ((r >> 20 & 7) == 0) usleep(200); // long enough for the workers to fall asleep
    }
    rm_team_destroy(team);
    pthread_mutex_lock(&w->shared->lock);
    run_and_check(w->shared->team, &w->shared->j, (int64_t)(r & 0xFF));
    pthread_mutex_unlock(&w->shared->lock);
  }
  return NULL;
}

int main(int argc, char **argv) {
  long n = 4, rounds = 40, plant = 0;
  uint64_t seed = 1;
  option_read(argc, argv,
              (option[]){{"threads", .least = 1, .most = MAX_THREADS, .count = &n},
                         {"rounds", .least = 1, .most = OPTION_MOST, .count = &rounds},
                         {"plant", .most = 1, .count = &plant},
                         {"seed", .bits = &seed},
                         {0}});
  shared_team shared = {.lock = PTHREAD_MUTEX_INITIALIZER};
  rm_error err = RM_ERROR_INIT;
  worker workers[MAX_THREADS] = {0};
  tiny_must(rm_team_create(2, &shared.team, &err), &err);
  for (int i = 0; i < n; i++) {
    workers[i] = (worker){
        .seed = tiny_mix(seed) + (uint64_t)i * 1000, .rounds = rounds, .plant = plant != 0};
    workers[i].shared = &shared;
    if (pthread_create(&workers[i].thread, NULL, work, &workers[i])) tiny_die("no thread %d", i);
  }
  for (int i = 0; i < n; i++) pthread_join(workers[i].thread, NULL);
  rm_team_destroy(shared.team);
  if (rm_memory_blocks()) tiny_die("%zu blocks were not given back", rm_memory_blocks());
  printf("race_team: %ld runs in %ld threads\n", (long)n_runs, n);
  return 0;
}
