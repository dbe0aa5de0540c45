// fuzz.h: shared by the fuzzers: the number of cases and the time limit, cases that depend only on
// the seed and their number, and integers that often cause mistakes.
//
//   fuzz f = fuzz_begin(argc, argv, 100000, 4);       // cases unless --cases or --seconds says
//                                                     otherwise; faults it can plant
//   while (fuzz_next_case(&f)) { … fuzz_bits(&f) … }  // a failure says fuzz_where(&f): --seed 7
//                                                     --first 1234 --cases 1 replays it
//
//   --cases N --seconds S (whichever ends first) --seed N --first N --plant K
#pragma once

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <time.h>

#include "common/option.h"
#include "common/tiny.h"

typedef struct fuzz {
  uint64_t seed, state;
  long first, at, cases, seconds, plant; // at: the case that runs, −1 before the first
  struct timespec begin;
  char where[80];
} fuzz;

static inline double fuzz_seconds(const fuzz *f) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)(now.tv_sec - f->begin.tv_sec) + 1e-9 * (double)(now.tv_nsec - f->begin.tv_nsec);
}

static inline fuzz fuzz_begin(int argc, char **argv, long cases, long plants) {
  fuzz f = {.seed = 1};
  option_read(argc, argv,
              (option[]){{"cases", .least = 1, .most = OPTION_MOST, .count = &f.cases},
                         {"seconds", .most = OPTION_MOST, .count = &f.seconds},
                         {"first", .most = OPTION_MOST, .count = &f.first},
                         {"plant", .most = plants, .count = &f.plant},
                         {"seed", .bits = &f.seed},
                         {0}});
  if (!f.cases) f.cases = f.seconds ? OPTION_MOST : cases;
  f.at = f.first - 1;
  clock_gettime(CLOCK_MONOTONIC, &f.begin);
  return f;
}

// Begins the next case; returns 0 when there are enough. The clock is read every 64th case.
static inline int fuzz_next_case(fuzz *f) {
  if (++f->at - f->first >= f->cases) return 0;
  f->state = tiny_mix(f->seed * 0x9E3779B97F4A7C15u + (uint64_t)f->at);
  return !f->seconds || f->at % 64 || fuzz_seconds(f) < (double)f->seconds;
}

static inline const char *fuzz_where(fuzz *f) {
  snprintf(f->where, sizeof f->where, "--seed %" PRIu64 " --first %ld --cases 1", f->seed, f->at);
  return f->where;
}

static inline uint64_t fuzz_bits(fuzz *f) { return tiny_mix(f->state += 0x9E3779B97F4A7C15u); }

// Returns a number in 0 … n − 1; n > 0.
static inline int64_t fuzz_below(fuzz *f, int64_t n) {
  return (int64_t)(fuzz_bits(f) % (uint64_t)n);
}

// True one time in n.
static inline int fuzz_one_in(fuzz *f, int64_t n) { return fuzz_below(f, n) == 0; }

// Zero, small ones of both signs, powers of two with their neighbours, the ends of 32 and 64 bits,
// and any.
static inline int64_t fuzz_integer(fuzz *f) {
  // One call per statement, because the compiler chooses the order of two calls in an expression.
  const int64_t kind = fuzz_below(f, 6);
  const uint64_t power = UINT64_C(1) << fuzz_below(f, 63), near = (uint64_t)fuzz_below(f, 3) - 1;
  switch (kind) {
    case 0: return fuzz_below(f, 9) - 4;
    case 1: return (int64_t)(power + near);
    case 2: return (int64_t)(0 - power + near);
    case 3:
      return (const int64_t[]){INT64_MIN,  INT64_MIN + 1, INT32_MIN, INT32_MAX,
                               UINT32_MAX, INT64_MAX - 1, INT64_MAX}[fuzz_below(f, 7)];
    case 4: return fuzz_below(f, 2000) - 1000;
    default: return (int64_t)fuzz_bits(f);
  }
}
