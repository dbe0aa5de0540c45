// requests.c: add, find, end and release requests, by id. sequence_group.c checks them.
#include <stdio.h>

#include "scheduler/external_scheduler.h"

// ----------------------------------------------------------------------------------- groups by id
// Ids are consecutive numbers, so the low bits distribute them evenly.
static rm_sequence_group **bucket(const rm_scheduler *scheduler, uint64_t id) {
  return &scheduler->buckets[id & (scheduler->n_buckets - 1)];
}

static int grow_buckets(rm_scheduler *scheduler) {
  if (scheduler->n_groups < (int64_t)scheduler->n_buckets) return 1;
  const uint64_t n_old = scheduler->n_buckets, n = n_old ? 2 * n_old : 64;
  rm_sequence_group **old = scheduler->buckets, **buckets = rm_alloc(n, sizeof *buckets);
  if (!buckets) return 0;
  scheduler->buckets = buckets;
  scheduler->n_buckets = n;
  for (uint64_t b = 0; b < n_old; b++)
    for (rm_sequence_group *group = old[b], *next; group; group = next) {
      next = group->next_in_bucket;
      group->next_in_bucket = *bucket(scheduler, group->id);
      *bucket(scheduler, group->id) = group;
    }
  rm_free(old);
  return 1;
}

rm_sequence_group *rm_find_sequence_group(const rm_scheduler *scheduler, uint64_t id,
                                          rm_error *err) {
  rm_sequence_group *group = scheduler->n_buckets ? *bucket(scheduler, id) : NULL;
  while (group && group->id != id) group = group->next_in_bucket;
  if (!group)
    rm_fail(err, RM_E_REQUEST, "request %lu: expected one that was added and not released", id);
  return group;
}

rm_sequence *rm_find_sample(const rm_scheduler *scheduler, uint64_t id, int32_t sample,
                            rm_error *err) {
  rm_sequence_group *group = rm_find_sequence_group(scheduler, id, err);
  if (!group) return NULL;
  if (sample >= 0 && sample < group->n) return &group->sequences[sample];
  rm_fail(err, RM_E_REQUEST, "request %lu: expected sample 0 to %d, got %d", id, group->n - 1,
          sample);
  return NULL;
}

// --------------------------------------------------------------------------------------------- in
rm_code rm_scheduler_add(rm_scheduler *scheduler, const rm_request *request, uint64_t id,
                         rm_error *err) {
  rm_sequence_group *group;
  RM_TRY(rm_sequence_group_create(request, &scheduler->options.limits, id, scheduler->next_order,
                                  &group, err));
  if (!grow_buckets(scheduler)) {
    rm_free(group);
    return rm_no_memory(err, "the table of requests", 0);
  }
  scheduler->next_order += (uint64_t)group->n;
  scheduler->n_groups++;
  scheduler->n_live++;
  group->next_in_bucket = *bucket(scheduler, group->id);
  *bucket(scheduler, group->id) = group;
  rm_list_insert_before(&scheduler->live, &group->link);
  for (int32_t i = 0; i < group->n; i++) rm_enqueue(scheduler, &group->sequences[i]);
  return RM_OK;
}

// -------------------------------------------------------------------------------------------- out
rm_code rm_scheduler_release(rm_scheduler *scheduler, uint64_t id, rm_error *err) {
  rm_sequence_group *group = rm_find_sequence_group(scheduler, id, err);
  if (!group) return RM_E_REQUEST;
  RM_FAIL_IF(group->n_done < group->n, RM_E_STATE,
             "request %lu: expected a finished one to release; abort it first", id);
  rm_sequence_group **at = bucket(scheduler, id);
  while (*at != group) at = &(*at)->next_in_bucket;
  *at = group->next_in_bucket;
  rm_list_remove(&group->link);
  scheduler->n_groups--;
  rm_free(group);
  return RM_OK;
}

// ------------------------------------------------------------------------------------------- ends
void rm_finish_sequence(rm_scheduler *scheduler, rm_sequence *seq, rm_finish finish) {
  rm_sequence_group *group = seq->group;
  rm_leave_lists(scheduler, seq);
  seq->status = RM_DONE;
  seq->finish = finish;
  if (++group->n_done < group->n) return;
  rm_list_remove(&group->link);
  rm_list_insert_before(&scheduler->finished, &group->link);
  scheduler->n_live--;
}

void rm_finish_sequence_group(rm_scheduler *scheduler, rm_sequence_group *group, rm_finish finish) {
  for (int32_t i = 0; i < group->n; i++)
    if (group->sequences[i].status != RM_DONE)
      rm_finish_sequence(scheduler, &group->sequences[i], finish);
}

void rm_fail_sequence_group(rm_scheduler *scheduler, const rm_sequence *seq, int64_t position,
                            const char *what) {
  rm_sequence_group *group = seq->group;
  group->error = RM_E_NUMERICS;
  snprintf(group->message, sizeof group->message,
           "request %lu, sample %d, position %ld: %s not finite", group->id, seq->index, position,
           what);
  // Own pages are not in the prefix index, and are zeroed when they are allocated again.
  if (rm_is_external(scheduler)) rm_external_invalidate(scheduler, seq);
  rm_finish_sequence_group(scheduler, group, RM_FINISH_ERROR);
}

// ------------------------------------------------------------------------------ ends from outside
rm_code rm_scheduler_abort(rm_scheduler *scheduler, uint64_t id, rm_error *err) {
  rm_sequence_group *group = rm_find_sequence_group(scheduler, id, err);
  if (!group) return RM_E_REQUEST;
  rm_finish_sequence_group(scheduler, group, RM_FINISH_ABORT);
  return RM_OK;
}

rm_code rm_scheduler_stop_sample(rm_scheduler *scheduler, uint64_t id, int32_t sample,
                                 int64_t n_tokens, rm_error *err) {
  rm_sequence *seq = rm_find_sample(scheduler, id, sample, err);
  if (!seq) return RM_E_REQUEST;
  REFUSE_UNLESS(n_tokens >= 0 && n_tokens <= seq->n_tokens,
                "request %lu, sample %d: expected a stop after 0 to %ld tokens, got %ld", id,
                sample, seq->n_tokens, n_tokens);
  RM_FAIL_IF(seq->finish == RM_FINISH_ABORT || seq->finish == RM_FINISH_ERROR, RM_E_STATE,
             "request %lu, sample %d: expected one to stop, got one that was %s", id, sample,
             seq->finish == RM_FINISH_ABORT ? "aborted" : "ended by an error");
  if (seq->status != RM_DONE) rm_finish_sequence(scheduler, seq, RM_FINISH_STOP);
  seq->finish = RM_FINISH_STOP;
  seq->stop_token = -1;
  seq->n_tokens = n_tokens;
  return RM_OK;
}
