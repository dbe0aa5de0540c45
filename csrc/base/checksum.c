#include "base/checksum.h"

#include <string.h>

#include "base/hash.h"

static inline __attribute__((always_inline)) uint64_t sum_words(const char *bytes, size_t n_words) {
  uint64_t sum = 0;
  for (size_t i = 0; i < n_words; i++) {
    uint64_t word;
    memcpy(&word, bytes + 8 * i, 8);
    sum += rm_hash_finish(word + (i + 1) * RM_HASH_STEP);
  }
  return sum;
}

// AVX-512DQ multiplies eight words at a time; without it the loop is faster in general registers.
#define AVX512 __attribute__((target("avx512f,avx512dq")))
AVX512 static uint64_t sum_avx512(const char *bytes, size_t n) { return sum_words(bytes, n); }

uint64_t rm_checksum(const void *bytes, size_t n) {
  const size_t n_words = n / 8;
  uint64_t sum, last = 0;
  if (__builtin_cpu_supports("avx512dq")) sum = sum_avx512(bytes, n_words);
  else sum = sum_words(bytes, n_words);
  if (n % 8) {
    memcpy(&last, (const char *)bytes + 8 * n_words, n % 8);
    sum += rm_hash_finish(last + (n_words + 1) * RM_HASH_STEP);
  }
  return rm_hash_finish(sum + n);
}
