// commit.c: writes the results of a step to the records of the requests, in this order: records of
// logits; failures, so that a request with a row that was not finite ends before its tokens or
// pages count; records of computed rows, and full pages to the prefix index; tokens, which may end
// a sequence.
#include "clock.h"
#include "scheduler/scheduler.h"

// ------------------------------------------------------------------------------ records of logits
static void record_out(const rm_out_row *out, const rm_step_output *output, int64_t i) {
  rm_sequence *seq = out->seq;
  rm_sequence_group *group = seq->group;
  if (out->draws && group->want_kept) seq->kept[seq->n_tokens] = output->kept[i];
  if (out->target < 0) return;
  group->prompt_logprobs[out->position] = output->target_logprobs[i];
  if (out->samples) group->prompt_sampling[out->position] = output->sampling_logprobs[i];
  if (group->want_token_ranks) group->prompt_ranks[out->position] = output->ranks[i];
}

// --------------------------------------------------------------------------------------- failures
static void fail_flagged(rm_scheduler *scheduler, const rm_sequence *seq, const uint8_t *flags) {
  for (int64_t r = seq->first_row; r < seq->first_row + seq->n_rows; r++)
    if (flags[r]) {
      rm_fail_sequence_group(scheduler, seq, scheduler->plan.positions[r],
                             flags[r] & RM_ROW_KV_NONFINITE ? "a row of K or V is" : "logits are");
      return;
    }
}

// ---------------------------------------------------------------------------------- computed rows
// The routing of a position, in its page.
static int16_t *routed_at(const rm_scheduler *scheduler, const rm_sequence *seq, int64_t p) {
  const int64_t size = rm_page_size(scheduler);
  return rm_kv_routed(scheduler->cache, rm_block_table(scheduler, seq)[p / size]) +
         p % size * scheduler->options.limits.routed_per_token;
}

void rm_take_routed(rm_scheduler *scheduler, rm_sequence *seq, int64_t end) {
  rm_sequence_group *group = seq->group;
  const int64_t per_token = scheduler->options.limits.routed_per_token;
  const size_t bytes = (size_t)per_token * sizeof(int16_t);
  if (!per_token) return;
  for (int64_t p; (p = group->n_prompt_routed) < rm_min64(end, group->n_prompt);
       group->n_prompt_routed++)
    memcpy(group->prompt_routed + p * per_token, routed_at(scheduler, seq, p), bytes);
  for (int64_t p; (p = group->n_prompt + seq->n_routed) < end; seq->n_routed++)
    memcpy(seq->routed + seq->n_routed * per_token, routed_at(scheduler, seq, p), bytes);
}

static void record_routed(rm_scheduler *scheduler, rm_sequence *seq, const int16_t *all) {
  const int64_t per_token = scheduler->options.limits.routed_per_token,
                end = seq->next + seq->n_rows;
  for (int64_t p = rm_max64(seq->kv_len, seq->next); p < end; p++)
    memcpy(routed_at(scheduler, seq, p), all + (seq->first_row + p - seq->next) * per_token,
           (size_t)per_token * sizeof *all);
  rm_take_routed(scheduler, seq, end);
}

// Copies the logprobs of the page's tokens from the request's records. Returns 0 if the records are
// incomplete.
static int fill_logprobs(rm_scheduler *scheduler, const rm_sequence *seq, int64_t index,
                         int32_t page) {
  const rm_sequence_group *group = seq->group;
  const int64_t start = index * rm_page_size(scheduler);
  float *out = rm_kv_logprobs(scheduler->cache, page);
  if (!group->want_prompt_logprobs || group->mixed) return 0;
  for (int64_t i = 0; i < rm_page_size(scheduler); i++) {
    const int64_t p = start + i;
    out[i] = p == 0                ? 0
             : p < group->n_prompt ? group->prompt_logprobs[p - 1]
                                   : seq->logprobs[p - group->n_prompt];
  }
  return 1;
}

// The indexed page with these tokens keeps the state that is saved after their last row. Of the pages
// of generated tokens only the last one keeps its state, besides those at the interval.
static void keep_state(rm_scheduler *scheduler, const rm_sequence *seq, int64_t index,
                       int32_t page) {
  const int64_t size = rm_page_size(scheduler), start = index * size,
                row = seq->first_row + seq->n_rows - 1 - (seq->kv_len - start - size);
  if (page < 0 || row < seq->first_row || scheduler->plan.save_states[row] < 0) return;
  rm_kv_keep_state(scheduler->cache, page, scheduler->plan.save_states[row]);
  if (start > seq->group->n_prompt && !rm_keeps_state(scheduler, seq, start))
    rm_kv_drop_state(scheduler->cache, rm_block_table(scheduler, seq)[index - 1]);
}

static void index_pages(rm_scheduler *scheduler, rm_sequence *seq) {
  const int64_t size = rm_page_size(scheduler);
  const int32_t *table = rm_block_table(scheduler, seq);
  if (!scheduler->options.prefix_caching || seq->stale || rm_is_external(scheduler)) return;
  for (; (seq->n_indexed + 1) * size <= seq->kv_len; seq->n_indexed++) {
    const int64_t i = seq->n_indexed;
    const int has_logprobs = fill_logprobs(scheduler, seq, i, table[i]);
    const int32_t page = rm_kv_index(scheduler->cache, table[i], scheduler->version,
                                     i ? table[i - 1] : -1, seq->ids + i * size, has_logprobs);
    keep_state(scheduler, seq, i, page);
  }
}

// Holds the state after the rows of this step instead of the one before them.
static void take_state(rm_scheduler *scheduler, rm_sequence *seq) {
  int32_t *saved = &scheduler->plan.save_states[seq->first_row + seq->n_rows - 1];
  rm_kv_release_state(scheduler->cache, seq->state);
  seq->state = *saved;
  *saved = -1;
}

static void advance(rm_scheduler *scheduler, rm_sequence *seq, const int16_t *routed) {
  rm_sequence_group *group = seq->group;
  const int64_t end = seq->next + seq->n_rows;
  if (scheduler->options.limits.routed_per_token) record_routed(scheduler, seq, routed);
  group->n_scored = rm_max64(group->n_scored, rm_min64(end, group->n_targets));
  seq->kv_len = rm_max64(seq->kv_len, end);
  seq->next = end;
  index_pages(scheduler, seq);
  take_state(scheduler, seq);
  if (group->kind == RM_SCORE && end == group->n_prompt)
    rm_finish_sequence(scheduler, seq, RM_FINISH_LENGTH);
}

// ------------------------------------------------------------------------------------------ draws
// Whether the engine has drawn a token for a sequence that has not failed.
static int is_drawn(const rm_out_row *out) {
  return out->draws && out->samples && out->seq->status != RM_DONE;
}

void rm_append(rm_scheduler *scheduler, rm_sequence *seq, const rm_drawn *drawn) {
  rm_sequence_group *group = seq->group;
  const int64_t at = seq->n_tokens++;
  const int32_t token = drawn->token;
  seq->ids[group->n_prompt + at] = token;
  seq->logprobs[at] = drawn->logprob;
  seq->sampling_logprobs[at] = drawn->sampling_logprob;
  if (group->want_token_ranks) seq->ranks[at] = drawn->rank;
  seq->versions[at] = scheduler->version;
  seq->no_contract[at] = seq->stale != 0;
  group->times.last_token = rm_now();
  if (group->times.first_token == 0) group->times.first_token = group->times.last_token;
  scheduler->generated_tokens++;
  if (rm_is_external(scheduler)) return; // which ends requests
  if (rm_sequence_group_stops_at(group, token)) {
    seq->stop_token = token;
    rm_finish_sequence(scheduler, seq, RM_FINISH_STOP);
  } else if (seq->n_tokens == group->capacity) {
    rm_finish_sequence(scheduler, seq, RM_FINISH_LENGTH);
  }
}

void rm_commit(rm_scheduler *scheduler, const rm_step_output *output) {
  const rm_plan *plan = &scheduler->plan;
  memset(plan->table_changed, 0, (size_t)scheduler->options.max_num_seqs);
  for (int64_t i = 0; i < plan->n_out; i++) record_out(&plan->outs[i], output, i);
  for (int64_t i = 0; i < plan->n_scheduled; i++)
    if (plan->scheduled[i]->status != RM_DONE)
      fail_flagged(scheduler, plan->scheduled[i], output->row_flags);
  for (int64_t i = 0; i < plan->n_out; i++)
    if (is_drawn(&plan->outs[i]) && output->tokens[i] < 0)
      rm_fail_sequence_group(scheduler, plan->outs[i].seq, plan->outs[i].position,
                             "all tokens are banned, or logits with a bias or penalty are");
  for (int64_t i = 0; i < plan->n_scheduled; i++)
    if (plan->scheduled[i]->status != RM_DONE)
      advance(scheduler, plan->scheduled[i], output->routed);
  for (int64_t r = 0; r < plan->n_rows; r++)
    rm_kv_release_state(scheduler->cache, plan->save_states[r]);
  for (int64_t i = 0; i < plan->n_out; i++) {
    rm_sequence *seq = plan->outs[i].seq;
    if (!is_drawn(&plan->outs[i])) continue;
    if (seq->group->leader == seq) seq->group->leader = NULL;
    const rm_drawn drawn = {output->tokens[i], output->ranks[i], output->logprobs[i],
                            output->sampling_logprobs[i]};
    rm_append(scheduler, seq, &drawn);
  }
}
