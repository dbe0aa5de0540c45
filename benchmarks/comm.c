// comm.c: the cost of a collective between ranks that share memory, beside a copy of the same bytes
// by the same ranks at the same time.
//
//   comm threads|shm RANKS BUFFER_BYTES SECONDS  →  one line of JSON for each operation and size
//
// `bytes` is the block of one rank for one other. A call's time is rank 0's, over a run of calls
// that begins at a barrier and is long enough for the clock. copy: each rank copies RANKS blocks,
// as many bytes as it ends up with, with memcpy, all ranks at the same time. Compiled by
// benchmarks/comm.py.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "comm/shm/region.h"

enum { MAX_RANKS = 64, RUNS = 7, COLUMN_ROWS = 16 };
static const size_t sizes[] = {64, 1024, 16 << 10, 256 << 10, 4 << 20};

typedef enum work { BARRIER, ALL_GATHER, ALL_TO_ALL, GATHER_COLUMNS, COPY, N_WORK } work;
static const char *const names[N_WORK] = {"barrier", "all_gather", "all_to_all", "gather_columns",
                                          "copy"};

typedef struct bench {
  const char *transport;
  int ranks;
  size_t buffer_bytes;
  double seconds; // of each run
  rm_region *region; // threads
  char name[64]; // shm
} bench;

typedef struct rank {
  pthread_t thread;
  const bench *b;
  int rank;
  rm_comm *comm;
  char *send, *recv; // owned: [ranks][largest block]
} rank;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void must(rm_code code, const rm_error *err) {
  if (!code) return;
  fprintf(stderr, "comm: %s: %s\n", rm_code_name(code), rm_error_message(err));
  exit(1);
}

static void call(rank *r, work what, size_t bytes) {
  const int n = r->b->ranks;
  rm_error err = RM_ERROR_INIT;
  rm_block send[MAX_RANKS], recv[MAX_RANKS];
  size_t lengths[MAX_RANKS], first[MAX_RANKS];
  const int64_t rows = bytes < COLUMN_ROWS * 16 ? 1 : COLUMN_ROWS;
  for (int i = 0; i < n; i++) {
    lengths[i] = what == GATHER_COLUMNS ? bytes / (size_t)rows : bytes;
    first[i] = (size_t)i * lengths[i];
    send[i] = (rm_block){r->send + (size_t)i * bytes, 1, bytes, bytes};
    recv[i] = (rm_block){r->recv + (size_t)i * bytes, 1, bytes, bytes};
  }
  switch (what) {
    case BARRIER: must(rm_comm_barrier(r->comm, &err), &err); break;
    case ALL_GATHER:
      must(rm_comm_all_gather(r->comm, r->send, r->recv, lengths, &err), &err);
      break;
    case ALL_TO_ALL:
      must(rm_comm_exchange(r->comm, RM_COMM_ALL_TO_ALL, send, recv, &err), &err);
      break;
    case GATHER_COLUMNS:
      must(rm_comm_gather_columns(r->comm, r->recv, rows, (size_t)n * lengths[0], first, lengths,
                                  &err),
           &err);
      break;
    default: memcpy(r->recv, r->send, (size_t)n * bytes);
  }
}

static double run(rank *r, work what, size_t bytes, int64_t calls) {
  call(r, BARRIER, 0);
  const double start = now();
  for (int64_t i = 0; i < calls; i++) call(r, what, bytes);
  const double end = now();
  call(r, BARRIER, 0);
  return (end - start) / (double)calls;
}

// Seconds of one call, the best of several runs: other work on the machine can only slow one down.
// How many calls a run has is rank 0's decision.
static double measure(rank *r, work what, size_t bytes) {
  double best = 1e9;
  int64_t calls = 1;
  rm_error err = RM_ERROR_INIT;
  for (double once; (once = run(r, what, bytes, calls)) >= 0;) {
    const int64_t more = once * (double)calls < 0.1 * r->b->seconds ? calls * 4 : 0;
    int64_t all[MAX_RANKS];
    must(rm_comm_all_gather(r->comm, &more, all, sizeof more, &err), &err);
    if (!all[0]) break;
    calls = all[0];
  }
  calls *= 5;
  for (int i = 0; i < RUNS; i++) {
    const double seconds = run(r, what, bytes, calls);
    if (seconds < best) best = seconds;
  }
  return best;
}

static void report(const rank *r, work what, size_t bytes, double seconds, double copy) {
  if (r->rank != 0) return;
  printf(
      "{\"transport\": \"%s\", \"ranks\": %d, \"op\": \"%s\", \"bytes\": %zu, \"seconds\": %.9f, "
      "\"copy_seconds\": %.9f}\n",
      r->b->transport, r->b->ranks, names[what], bytes, seconds, copy);
  fflush(stdout);
}

static void measure_all(rank *r) {
  const size_t largest = sizes[sizeof sizes / sizeof sizes[0] - 1] * (size_t)r->b->ranks;
  int32_t members[MAX_RANKS];
  rm_error err = RM_ERROR_INIT;
  for (int i = 0; i < r->b->ranks; i++) members[i] = i;
  must(rm_region_comm(r->b->region, 0, members, r->b->ranks, r->rank, &r->comm, &err), &err);
  r->send = malloc(largest);
  r->recv = malloc(largest);
  if (!r->send || !r->recv) exit(1);
  memset(r->send, 1, largest);
  memset(r->recv, 2, largest);
  report(r, BARRIER, 0, measure(r, BARRIER, 0), 0);
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    const double copy = measure(r, COPY, sizes[i]);
    for (work what = ALL_GATHER; what <= GATHER_COLUMNS; what++)
      report(r, what, sizes[i], measure(r, what, sizes[i]), copy);
  }
  rm_comm_destroy(r->comm);
  free(r->send);
  free(r->recv);
}

static void *thread(void *arg) {
  measure_all(arg);
  return NULL;
}

static void run_threads(bench *b, const rm_region_options *options) {
  rank ranks[MAX_RANKS];
  rm_error err = RM_ERROR_INIT;
  must(rm_region_create(options, &b->region, &err), &err);
  for (int i = 0; i < b->ranks; i++) {
    ranks[i] = (rank){.b = b, .rank = i};
    if (pthread_create(&ranks[i].thread, NULL, thread, &ranks[i])) exit(1);
  }
  for (int i = 0; i < b->ranks; i++) pthread_join(ranks[i].thread, NULL);
  rm_region_release(b->region);
}

static int run_processes(bench *b, const rm_region_options *options) {
  int failed = 0, status;
  snprintf(b->name, sizeof b->name, "bench-%d", (int)getpid());
  for (int i = 0; i < b->ranks; i++) {
    if (fork()) continue;
    rank r = {.b = b, .rank = i};
    rm_error err = RM_ERROR_INIT;
    must(rm_region_attach(b->name, i, 1, options, &b->region, &err), &err);
    measure_all(&r);
    exit(0);
  }
  while (wait(&status) > 0) failed |= status;
  return failed;
}

int main(int argc, char **argv) {
  bench b = {.transport = argc == 5 ? argv[1] : "", .ranks = argc == 5 ? atoi(argv[2]) : 0};
  b.buffer_bytes = argc == 5 ? (size_t)atoll(argv[3]) : 0;
  b.seconds = argc == 5 ? atof(argv[4]) : 0;
  const int processes = strcmp(b.transport, "shm") == 0;
  if (b.ranks < 1 || b.ranks > MAX_RANKS || (!processes && strcmp(b.transport, "threads") != 0)) {
    fprintf(stderr, "usage: comm threads|shm RANKS BUFFER_BYTES SECONDS\n");
    return 2;
  }
  const rm_region_options options = {
      .world = b.ranks, .n_groups = 1, .buffer_bytes = b.buffer_bytes, .timeout = 60};
  if (processes) return run_processes(&b, &options) ? 1 : 0;
  run_threads(&b, &options);
  return 0;
}
