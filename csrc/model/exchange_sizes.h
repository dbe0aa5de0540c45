// exchange_sizes.h: how much a rank sends or receives in one exchange of a forward, and of its logits, at most: what a transport is made with.
// From the configuration alone; nothing is owned.
#pragma once

#include "model/model.h"

typedef struct rm_exchanged { // bytes, in one direction
  size_t all;
  size_t apart; // of blocks whose rows lie apart; the rest of them a transport may take where they are (nccl.h)
} rm_exchanged;

// Over the tp group, which is the experts' too where ep = tp.
rm_exchanged rm_exchanged_tp(const rm_spec *spec, const rm_model_options *options);
// Over the experts' group where it is another: slots alone. What is counted goes by way of the host.
rm_exchanged rm_exchanged_ep(const rm_spec *spec, const rm_model_options *options);
