// profile.h: where the time of a step goes: an op table that times another one's ops. Each call is
// counted by op and shape, so that the products of a model (q·k·v, o, gate and up, down) stand
// apart.
//
// On the CPU, whose ops are complete at return. A profile belongs to one rank; its ctx must point
// at it.
#pragma once

#include "kernels.h"

enum { RM_PROFILE_ENTRIES = 64 };

typedef struct rm_profile_entry {
  const char *op;
  int64_t n, k; // columns and inner dimension of a product's weights; 0 for other ops
  int64_t calls, rows;
  double seconds;
  double
      // of these, the mean over threads of the time in which a thread had nothing to do: it starts,
      // or waits for the last
      waited;
  double flops; // of products and attention
  double weight_bytes; // that the calls had to read: of experts, those with rows
} rm_profile_entry;

typedef struct rm_profile {
  rm_kernels table; // of's, with every op timed
  const rm_kernels *of; // view
  double waited; // of the op that runs
  // one op and shape more than there is room for goes to the last entry, whose op is then "other"
  int n_entries;
  rm_profile_entry entries[RM_PROFILE_ENTRIES];
} rm_profile;

void rm_profile_init(rm_profile *profile, const rm_kernels *of);
void rm_profile_reset(rm_profile *profile); // forgets what was counted
