// checksum.h: a 64-bit checksum of bytes at rest and in transit.
//
// It is the sum, mod 2^64, of one function per position: word i of 8 bytes adds
// rm_hash_finish(word + (i + 1)·RM_HASH_STEP). The last word is padded with zeros, and the size is
// added at the end. Every order of the work and every instruction set gives the same value.
//
// - A change of one word always shows: rm_hash_finish is a bijection.
// - Any other change keeps the value with probability 2^-64, since each position has a function of
//   its own: words, rows or pages that swap places or shift, a file of another run.
// - It does not resist intent: whoever may write the bytes can also compute their checksum. Owner,
//   mode and nonce protect against that.
#pragma once

#include <stddef.h>
#include <stdint.h>

uint64_t rm_checksum(const void *bytes, size_t n); // bytes: of any alignment
