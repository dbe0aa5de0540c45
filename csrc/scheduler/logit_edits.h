// logit_edits.h: the changes of a sequence's logits before a draw: logit_bias, penalties, banned
// tokens and bad words, with vLLM's meaning.
//
// A sequence keeps a sorted list of its changed tokens, and adds the tokens that were generated
// since the last draw. The list depends only on the request and the tokens, so preemption and
// recomputed KV do not change it. The kernels apply the list (docs/numerics.md §7).
#pragma once

#include "scheduler/sequence.h"

static inline int rm_has_penalties(const rm_sequence_group *group) {
  const rm_sample_params *params = &group->params;
  return params->repetition_penalty != 1 || params->frequency_penalty != 0 ||
         params->presence_penalty != 0;
}

rm_code rm_logit_edits_check(const rm_request *request, const rm_request_limits *limits,
                             rm_error *err);
int64_t rm_logit_edits_most(const rm_request *request); // largest number of edits of the first draw
// Fills the group's lists.
void rm_logit_edits_init(rm_sequence_group *group, const rm_request *request);
void rm_logit_edits_rewind(rm_sequence *seq); // back to the state before the first token
// Parameters of the sequence's next draw, or of all rows of a scored prompt. Lists are views of the
// sequence, valid until the next call.
rm_sample_params rm_params_of(rm_sequence *seq);
