// logit_edits.h: what changes a sequence's logits before a draw: logit_bias, penalties, banned
// tokens and bad words, with vLLM's meaning.
//
// A sequence keeps the list of its changed tokens, sorted, and adds the tokens that were generated
// since the last draw. The list depends on the request and on the tokens only, so preemption and
// recomputed KV leave it as it is. The kernels apply it (docs/numerics.md §7).
#pragma once

#include "scheduler/sequence.h"

static inline int rm_has_penalties(const rm_sequence_group *group) {
  return group->repetition_penalty != 1 || group->frequency_penalty != 0 ||
         group->presence_penalty != 0;
}

rm_code rm_logit_edits_check(const rm_request *request, const rm_request_limits *limits,
                             rm_error *err);
int64_t rm_logit_edits_most(const rm_request *request); // edits of the first draw, at most
void rm_logit_edits_init(rm_sequence_group *group,
                         const rm_request *request); // fills the group's lists
void rm_logit_edits_rewind(rm_sequence *seq); // nothing is generated
// Parameters of the sequence's next draw, or of all rows of a scored prompt. Lists are views of the
// sequence, valid until the next call.
rm_sample_params rm_params_of(rm_sequence *seq);
