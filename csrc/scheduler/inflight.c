// inflight.c: what becomes of running requests, their KV and their records when a new version is committed, or when weights or KV cache go
// to sleep.
#include "scheduler/scheduler.h"

// The group begins again: from its prompt, with all its samples, whether they had ended or not.
static void restart(rm_scheduler *scheduler, rm_sequence_group *group) {
  for (int32_t i = 0; i < group->n; i++) rm_leave_lists(scheduler, &group->sequences[i]);
  rm_sequence_group_rewind(group);
  for (int32_t i = group->n - 1; i >= 0; i--) rm_enqueue(scheduler, &group->sequences[i]);
}

// Tokens and their records stay. Without keep_kv all KV goes, and is computed again before the next token is drawn. A group
// that has no token yet has nothing to keep, and its prompt's records must be of one version: it begins again.
static void keep(rm_scheduler *scheduler, rm_sequence_group *group, int keep_kv) {
  int has_tokens = 0;
  for (int32_t i = 0; i < group->n; i++) has_tokens |= group->sequences[i].n_tokens > 0;
  if (!has_tokens) {
    restart(scheduler, group);
    return;
  }
  group->mixed = 1;
  for (int32_t i = group->n - 1; i >= 0; i--) {
    rm_sequence *seq = &group->sequences[i];
    if (seq->status != RM_ACTIVE) continue;
    if (keep_kv && seq->n_tokens) seq->stale = 1;
    else rm_preempt(scheduler, seq);
  }
}

// Newest first: each is then older than those already put back, and finds its place in the queue at once.
void rm_apply_inflight(rm_scheduler *scheduler, rm_inflight inflight) {
  for (rm_link *at = scheduler->live.prev, *before; at != &scheduler->live; at = before) {
    rm_sequence_group *group = (rm_sequence_group *)at;
    before = at->prev;
    if (inflight == RM_INFLIGHT_RESTART) restart(scheduler, group);
    if (inflight == RM_INFLIGHT_ABORT) rm_finish_sequence_group(scheduler, group, RM_FINISH_ABORT);
    if (inflight == RM_INFLIGHT_KEEP) keep(scheduler, group, 0);
    if (inflight == RM_INFLIGHT_KEEP_KV) keep(scheduler, group, 1);
  }
}

void rm_preempt_all(rm_scheduler *scheduler) {
  while (!rm_list_empty(&scheduler->active)) rm_preempt(scheduler, (rm_sequence *)scheduler->active.prev);
}
