// inflight.c: what happens to running requests, their KV and their records when a new version is
// committed, or when the weights or the KV cache go to sleep.
#include "scheduler/scheduler.h"

// Restarts the request from its prompt, with all its samples, including those that had ended.
static void restart(rm_scheduler *scheduler, rm_sequence_group *group) {
  for (int32_t i = 0; i < group->n; i++) rm_leave_lists(scheduler, &group->sequences[i]);
  rm_sequence_group_rewind(group);
  for (int32_t i = group->n - 1; i >= 0; i--) rm_enqueue(scheduler, &group->sequences[i]);
}

// Keeps tokens and their records. Without keep_kv the KV is recomputed before the next token is
// drawn. A request without a token restarts, since the records of a prompt must be of one version.
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

// Visits the newest request first: each request is older than those put back before it, so its
// position in the queue is found at once. With an external scheduler, which decides about requests,
// only requests without a token record their prompts again. It recognizes pages of the old version
// by their number.
void rm_weights_changed(rm_scheduler *scheduler, rm_inflight inflight) {
  for (rm_link *at = scheduler->live.prev, *before; at != &scheduler->live; at = before) {
    rm_sequence_group *group = (rm_sequence_group *)at;
    before = at->prev;
    if (rm_is_external(scheduler)) {
      rm_drop_state(scheduler, group->sequences);
      if (!group->sequences->n_tokens) group->n_scored = group->n_prompt_routed = 0;
      continue;
    }
    if (inflight == RM_INFLIGHT_RESTART) restart(scheduler, group);
    if (inflight == RM_INFLIGHT_ABORT) rm_finish_sequence_group(scheduler, group, RM_FINISH_ABORT);
    if (inflight == RM_INFLIGHT_KEEP) keep(scheduler, group, 0);
    if (inflight == RM_INFLIGHT_KEEP_KV) keep(scheduler, group, 1);
  }
}

// With an external scheduler requests keep their pages, whose KV is recomputed.
void rm_pages_lost(rm_scheduler *scheduler) {
  for (int64_t i = 0; i < scheduler->options.external_pages; i++) scheduler->page_versions[i] = -1;
  if (rm_is_external(scheduler)) rm_weights_changed(scheduler, RM_INFLIGHT_KEEP);
  else
    while (!rm_list_empty(&scheduler->active))
      rm_preempt(scheduler, (rm_sequence *)scheduler->active.prev);
}
