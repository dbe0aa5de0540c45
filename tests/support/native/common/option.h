// option.h: the command line of a driver: `--name number` and nothing else. A driver that guessed
// at an unknown word or an invalid number would test nothing, or something else, and still report
// success. So both end the program with status 2 and a message before anything runs. Rejected:
// getopt_long, because it accepts abbreviated names and does not parse numbers.
//
//   long rounds = 40;                                    // what stands when it is not given
//   uint64_t seed = 1;
//   option_read(argc, argv, (option[]){{"rounds", .least = 1, .most = 1000, .count = &rounds},
//   {"seed", .bits = &seed}, {0}});
#pragma once

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OPTION_REFUSED = 2 }; // exit status
#define OPTION_MOST (INT64_MAX / 2) // for unlimited counts: two may be added

typedef struct option { // one of the pointers is set
  const char *name; // NULL ends a list
  long least, most; // of count
  long *count;
  uint64_t *bits; // 64 of any value: seeds
} option;

static inline _Noreturn __attribute__((format(printf, 1, 2))) void option_refuse(const char *format,
                                                                                 ...) {
  va_list args;
  va_start(args, format);
  vfprintf(stderr, format, args);
  va_end(args);
  fputc('\n', stderr);
  exit(OPTION_REFUSED);
}

// Checks that the whole word is a number that fits. Every reader calls it. `end` is where strto…
// stopped, errno is what strto… set.
static inline void option_must_be(int fits, const char *name, const char *text, const char *end,
                                  const char *wanted) {
  if (!*text || end == text || *end || errno || !fits)
    option_refuse("--%s %.40s is not %s", name, text, wanted);
}

static inline long option_count(const char *name, const char *text, long least, long most) {
  char wanted[96], *end;
  snprintf(wanted, sizeof wanted, "a whole number in [%ld, %ld]", least, most);
  errno = 0;
  const long value = strtol(text, &end, 0);
  option_must_be(value >= least && value <= most, name, text, end, wanted);
  return value;
}

static inline uint64_t option_bits(const char *name, const char *text) {
  char *end;
  errno = 0;
  const uint64_t value = strtoull(text, &end, 0);
  option_must_be(!strchr(text, '-'), name, text, end,
                 "a whole number in [0, 2^64)"); // strtoull takes −1 for 2^64 − 1
  return value;
}

// Above zero.
static inline double option_real(const char *name, const char *text, double most) {
  char wanted[64], *end;
  snprintf(wanted, sizeof wanted, "a number in (0, %g]", most);
  errno = 0;
  const double value = strtod(text, &end);
  option_must_be(value > 0 && value <= most, name, text, end, wanted); // false for a NaN
  return value;
}

static inline void option_read(int argc, char **argv, const option *options) {
  for (int i = 1; i < argc; i += 2) {
    const option *o = options;
    while (o->name && (strncmp(argv[i], "--", 2) != 0 || strcmp(argv[i] + 2, o->name) != 0)) o++;
    if (!o->name)
      option_refuse("%.40s is not an option; the head of the driver's source lists them", argv[i]);
    if (i + 1 == argc) option_refuse("--%s needs a value", o->name);
    if (o->count) *o->count = option_count(o->name, argv[i + 1], o->least, o->most);
    else *o->bits = option_bits(o->name, argv[i + 1]);
  }
}
