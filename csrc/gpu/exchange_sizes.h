// exchange_sizes.h: the most bytes that a rank sends or receives in one exchange of a forward,
// which its transports need as capacity. They depend on the configuration only.
#pragma once

#include "model/model.h"

typedef struct rm_exchanged { // bytes, in one direction
  size_t all;
  size_t apart; // strided blocks only: NCCL sends contiguous blocks unpacked (gpu/nccl/nccl.h)
} rm_exchanged;

// In the tp group, which is also the ep group where ep = tp.
rm_exchanged rm_exchanged_tp(const rm_spec *spec, const rm_model_options *options);
// In an ep group that is not the tp group.
rm_exchanged rm_exchanged_ep(const rm_spec *spec, const rm_model_options *options);
