// machine.h: the limits of this machine, measured in the same run as the figures that are compared
// with them.
#pragma once

#include <time.h>

// Sweeps a buffer larger than any cache, and runs fused multiply-adds that never leave the
// registers, on the threads of a team (NULL: on the caller); the best of some runs.
typedef struct machine {
  double read_gb_s, fma_gflop_s;
} machine;

static inline double seconds_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

machine measure_machine(void *team, int n_threads);
