// machine.h: the limits of this machine, measured in the same run as the figures that are compared
// with them.
#pragma once

// Sweeps a buffer larger than any cache, and runs fused multiply-adds that never leave the
// registers, on the threads of a team (NULL: on the caller); the best of some runs.
typedef struct machine {
  double read_gb_s, fma_gflop_s;
} machine;

double seconds_now(void);
machine measure_machine(void *team, int n_threads);
