// clock.h: the clock of all durations and deadlines. Monotonic, with an arbitrary zero.
#pragma once

#include <time.h>

static inline double rm_now(void) {   // seconds
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
