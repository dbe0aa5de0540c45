// exchange_sizes.h: the most bytes that a rank sends or receives in one exchange of a forward, for the capacity of its transports. Computed
// from the configuration alone; nothing is owned.
#pragma once

#include "model/model.h"

typedef struct rm_exchanged { // bytes, in one direction
  size_t all;
  size_t apart; // of strided blocks alone; a transport can send the others without packing (comm/nccl/nccl.h)
} rm_exchanged;

// In the tp group, which is also the ep group where ep = tp.
rm_exchanged rm_exchanged_tp(const rm_spec *spec, const rm_model_options *options);
// In an ep group of its own: exchanges of fixed sizes only. Those of counted sizes go over the host group.
rm_exchanged rm_exchanged_ep(const rm_spec *spec, const rm_model_options *options);
