// commit.h: the third part of a step: writes results to the records of requests. It does not use
// the device. What depends on the scheduler is in its policy (scheduler.h).
#pragma once

#include "scheduler/scheduler.h"

// Result of a draw.
typedef struct rm_drawn {
  int32_t token, rank;
  float logprob, sampling_logprob;
} rm_drawn;

void rm_commit(rm_scheduler *scheduler); // of the plan
void rm_append(rm_scheduler *scheduler, rm_sequence *seq,
               const rm_drawn *drawn); // a token of an active sequence
