// commit.h: the third part of a step: its results go into the records of the requests. Nothing here touches the device, and nothing
// here asks who scheduled (scheduler.h's policy does).
#pragma once

#include "scheduler/scheduler.h"

// What a draw gave.
typedef struct rm_drawn {
  int32_t token, rank;
  float logprob, sampling_logprob;
} rm_drawn;

void rm_commit(rm_scheduler *scheduler);   // of the plan
void rm_append(rm_scheduler *scheduler, rm_sequence *seq, const rm_drawn *drawn);   // a token of an active sequence
