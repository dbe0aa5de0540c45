// ranks.h: rank processes of a test, forked by a single-threaded parent, and their reports: a page
// of memory that all share. A rank ends by _exit only, so that objects of the parent are not
// flushed or freed twice; the parent ends the program if a rank is not done within a minute.
#pragma once

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "comm/shm/region.h"
#include "common/tiny.h"

enum { RANKS_MAX = 8, RANKS_MINUTE = 60 };

typedef struct ranks_word { // of one rank; its own to write
  atomic_int attached; // 1 once it is
  atomic_long calls; // that it has made
  rm_code code; // its result, valid once it is done
  double when; // clock of its error
  char text[400];
} ranks_word;

typedef struct ranks {
  int world;
  pid_t pids[RANKS_MAX]; // 0: waited for
  ranks_word *words; // shared
} ranks;

static inline double ranks_clock(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static inline void ranks_pause(double seconds) {
  const struct timespec t = {(time_t)seconds, (long)(1e9 * (seconds - (double)(time_t)seconds))};
  nanosleep(&t, NULL);
}

static inline ranks ranks_make(void) {
  ranks r = {.words = mmap(NULL, RANKS_MAX * sizeof(ranks_word), PROT_READ | PROT_WRITE,
                           MAP_SHARED | MAP_ANONYMOUS, -1, 0)};
  if (r.words == MAP_FAILED) tiny_die("no shared page");
  return r;
}

// Forks `world` ranks, each of which runs body(rank, word, arg) and leaves.
static inline void ranks_start(ranks *r, int world,
                               void (*body)(int rank, ranks_word *word, void *arg), void *arg) {
  r->world = world;
  memset(r->words, 0, RANKS_MAX * sizeof(ranks_word));
  fflush(NULL);
  for (int rank = 0; rank < world; rank++) {
    if ((r->pids[rank] = fork()) < 0) tiny_die("no process for rank %d", rank);
    if (r->pids[rank] > 0) continue;
    body(rank, &r->words[rank], arg);
    _exit(0);
  }
}

static inline void ranks_ended(ranks_word *word, rm_code code, const rm_error *err) {
  word->when = ranks_clock();
  word->code = code;
  snprintf(word->text, sizeof word->text, "%s", rm_error_message(err));
}

// The wait status of a rank.
static inline int ranks_wait(ranks *r, int rank, const char *where) {
  const double limit = ranks_clock() + RANKS_MINUTE;
  int status;
  for (pid_t pid; (pid = waitpid(r->pids[rank], &status, WNOHANG)) != r->pids[rank];
       ranks_pause(0.0005)) {
    if (pid < 0 && errno != EINTR)
      tiny_die("%s: rank %d is not there to be waited for", where, rank);
    if (ranks_clock() < limit) continue;
    for (int i = 0; i < r->world; i++)
      if (r->pids[i]) kill(r->pids[i], SIGKILL);
    tiny_die("%s: rank %d has not ended within a minute", where, rank);
  }
  r->pids[rank] = 0;
  return status;
}

static inline void ranks_kill(ranks *r, int rank) { kill(r->pids[rank], SIGKILL); }

// Whether the name still exists.
static inline int ranks_left_behind(const char *name) {
  char path[300];
  snprintf(path, sizeof path, "/dev/shm/rollmesh.%s", name);
  return access(path, F_OK) == 0;
}
