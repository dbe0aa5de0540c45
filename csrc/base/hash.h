// hash.h: 64-bit hashes of internal keys and digests. Not cryptographic. A chain begins at
// RM_HASH_SEED.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define RM_HASH_SEED UINT64_C(0xCBF29CE484222325)
#define RM_HASH_STEP UINT64_C(0x9E3779B97F4A7C15)

// Adds a word to a chain.
static inline uint64_t rm_hash_word(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * RM_HASH_STEP;
  return hash ^ hash >> 32;
}
// FNV-1a, for names.
static inline uint64_t rm_hash_bytes(uint64_t hash, const void *bytes, size_t n) {
  for (size_t i = 0; i < n; i++)
    hash = (hash ^ ((const unsigned char *)bytes)[i]) * UINT64_C(0x100000001B3);
  return hash;
}
// splitmix64's last step: every bit of the result depends on every bit of x.
static inline uint64_t rm_hash_finish(uint64_t x) {
  x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
  x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
  return x ^ x >> 31;
}
