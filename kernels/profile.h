// profile.h: measures where the time of a step goes: an op table that times the ops of another
// table. It counts calls by op and shape, so that the products of a model (qkv, o, gate and up,
// down) are separate entries.
//
// Works on the CPU only, whose ops are complete at return. A profile belongs to one rank, whose ctx
// must point to it; the thread that uses the ctx uses the profile.
#pragma once

#include "kernels.h"

enum { RM_PROFILE_ENTRIES = 64 };

typedef struct rm_profile_entry {
  const char *op;
  int64_t n, k; // columns and inner dimension of a product's weights; 0 for other ops
  int64_t calls, rows;
  double seconds;
  double waited; // part of seconds: the mean over threads of the time in which a thread was idle
  double flops; // of products and attention
  double weight_bytes; // weights that the calls read; of experts, only of those with rows
} rm_profile_entry;

typedef struct rm_profile {
  rm_kernels table; // the table `of` with every op timed
  const rm_kernels *of; // view
  double waited; // of the op that runs
  // When all entries are used, further ops and shapes share the last entry, whose op is "other".
  int n_entries;
  rm_profile_entry entries[RM_PROFILE_ENTRIES];
} rm_profile;

void rm_profile_init(rm_profile *profile, const rm_kernels *of);
void rm_profile_reset(rm_profile *profile); // removes all entries
