// checksum.h: a 64-bit checksum of bytes at rest and in transit.
//
// It is the sum, mod 2^64, of one function per position: word i of 8 bytes adds
// rm_hash_finish(word + (i + 1)·RM_HASH_STEP). The last word is padded with zeros, and the size is
// added at the end. Every order of the work and every instruction set gives the same value.
//
// - A change of one word always changes the checksum: rm_hash_finish is a bijection.
// - Any other change (words, rows or pages that are swapped or shifted, a file of another run)
//   keeps the checksum with probability 2^-64, since the function differs at each position.
// - It does not protect against an attacker, who can compute the checksum too. Owner, mode and
//   nonce of a file or region protect against that.
#pragma once

#include <stddef.h>
#include <stdint.h>

uint64_t rm_checksum(const void *bytes, size_t n); // bytes may have any alignment
