// ranks_weights.c: sync, sleep and wake of all ranks of this process: all of them, or none.
#include "base/memory.h"
#include "local_mesh/ranks_state.h"

static rm_code begin_member(rm_member *member, void *arg) {
  return rm_engine_sync_begin(member->engine, arg, &member->err);
}

rm_code rm_ranks_sync_begin(rm_ranks *ranks, const rm_sync_options *options, rm_error *err) {
  rm_sync_options same = *options;
  const rm_code code = rm_ranks_run(ranks, begin_member, &same, err);
  if (code && ranks->n > 1) rm_ranks_sync_abort(ranks);
  return code;
}

rm_code rm_ranks_sync_check(rm_ranks *ranks, const rm_entry *entry, const rm_tensor *tensor,
                            rm_error *err) {
  // the check does not depend on the shard
  return rm_engine_sync_check(ranks->members[0].engine, entry, tensor, err);
}

typedef struct pushed {
  const rm_entry *const *entries;
  int64_t n;
} pushed;

static rm_code push_member(rm_member *member, void *arg) {
  const pushed *it = arg;
  return rm_engine_sync_push(member->engine, it->entries, it->n, &member->err);
}

// Producers of GPU tensors have made a queue of that GPU wait for pending writes. If that is the
// only member's own queue, reads are enqueued after it; otherwise this waits until the tensors are
// complete.
static rm_code await_tensors(rm_ranks *ranks, const rm_entry *const *entries, int64_t n,
                             rm_error *err) {
  const rm_device *only = ranks->n == 1 ? &ranks->members[0].device : NULL;
  uint64_t waited_for = 0; // a bit for each device
  rm_code code = RM_OK;
  for (int64_t i = 0; i < n && !code; i++) {
    const rm_tensor *tensor = &entries[i]->tensor;
    if (!tensor->on_device || !ranks->ready_streams.library ||
        (only && tensor->ordinal == only->ordinal))
      continue;
    if (tensor->ordinal >= 0 && tensor->ordinal < RM_MAX_GPUS && waited_for >> tensor->ordinal & 1)
      continue;
    code = rm_ready_streams_wait(&ranks->ready_streams, tensor->ordinal, err);
    if (!code) waited_for |= (uint64_t)1 << tensor->ordinal;
  }
  return code;
}

rm_code rm_ranks_sync_push(rm_ranks *ranks, const rm_entry *const *entries, int64_t n,
                           rm_error *err) {
  pushed it = {entries, n};
  rm_code code = await_tensors(ranks, entries, n, err);
  if (code) return code;
  code = rm_ranks_run(ranks, push_member, &it, err);
  for (int r = 0; r < ranks->n && code; r++)
    if (!ranks->members[r].code)
      rm_sync_undo(rm_engine_store(ranks->members[r].engine), entries, n);
  return code;
}

static rm_code commit_member(rm_member *member, void *arg) {
  return rm_engine_sync_commit(member->engine, *(const rm_inflight *)arg, &member->report,
                               &member->err);
}

rm_code rm_ranks_sync_commit(rm_ranks *ranks, rm_inflight inflight, rm_sync_report *report,
                             rm_error *err) {
  // Checked before any rank commits: the replica with unfinished requests would refuse alone, and
  // the others would have committed.
  rm_code code = RM_OK;
  if (inflight == RM_INFLIGHT_REFUSE && rm_store_is_open(rm_engine_store(ranks->members[0].engine)))
    for (int r = 0; r < ranks->n && !code; r++)
      code = rm_engine_require_idle(ranks->members[r].engine, err);
  if (code) return code;
  code = rm_ranks_run(ranks, commit_member, &inflight, err);
  if (code || !report) return code;
  *report = ranks->members[0].report;
  for (int r = 1; r < ranks->n; r++) {
    const rm_sync_report *its = &ranks->members[r].report;
    report->bytes += its->bytes;
    report->seconds = its->seconds > report->seconds ? its->seconds : report->seconds;
    report->copy_seconds =
        its->copy_seconds > report->copy_seconds ? its->copy_seconds : report->copy_seconds;
  }
  return RM_OK;
}

void rm_ranks_sync_abort(rm_ranks *ranks) {
  for (int r = 0; r < ranks->n; r++) rm_engine_sync_abort(ranks->members[r].engine);
}

static rm_code sleep_member(rm_member *member, void *arg) {
  return rm_engine_sleep(member->engine, *(const unsigned *)arg, &member->err);
}
static rm_code wake_member(rm_member *member, void *arg) {
  return rm_engine_wake(member->engine, *(const unsigned *)arg, &member->err);
}

static rm_code offload_member(rm_member *member, void *arg) {
  (void)arg;
  return rm_engine_offload_weights(member->engine, &member->err);
}

void rm_ranks_free_offloaded(rm_ranks *ranks) {
  for (int r = 0; r < ranks->n; r++) rm_engine_free_offloaded(ranks->members[r].engine);
}

size_t rm_ranks_offload_bytes(const rm_ranks *ranks) {
  size_t wanted = 0;
  for (int r = 0; r < ranks->n; r++) wanted += rm_engine_offload_bytes(ranks->members[r].engine);
  return wanted;
}

// The ranks of a process share the host's memory, so their sum must fit.
static rm_code check_host_room(const rm_ranks *ranks, rm_error *err) {
  const size_t available = rm_memory_available(), wanted = rm_ranks_offload_bytes(ranks);
  if (wanted <= available) return RM_OK;
  return rm_fail(err, RM_E_CAPACITY,
                 "the weights of %d ranks take %s and the host has %s left to offload them to",
                 ranks->n, rm_say_bytes((double)wanted).text, rm_say_bytes((double)available).text);
}

rm_code rm_ranks_offload_weights(rm_ranks *ranks, rm_error *err) {
  rm_code code = check_host_room(ranks, err);
  if (code) return code;
  code = rm_ranks_run(ranks, offload_member, NULL, err);
  if (code) rm_ranks_free_offloaded(ranks);
  return code;
}

// Offloading can fail, so it comes first, on all ranks.
rm_code rm_ranks_sleep(rm_ranks *ranks, unsigned parts, rm_error *err) {
  const int offload = parts & RM_SLEEP_OFFLOAD && parts & RM_PART_WEIGHTS;
  const rm_code code = offload ? rm_ranks_offload_weights(ranks, err) : RM_OK;
  return code ? code : rm_ranks_run(ranks, sleep_member, &parts, err);
}

rm_code rm_ranks_wake(rm_ranks *ranks, unsigned parts, rm_error *err) {
  unsigned asleep = 0;
  for (int r = 0; r < ranks->n; r++) {
    rm_engine_stats stats;
    rm_engine_statistics(ranks->members[r].engine, &stats);
    asleep |= stats.asleep;
  }
  const rm_code code = rm_ranks_run(ranks, wake_member, &parts, err);
  parts = (parts & asleep) | RM_SLEEP_OFFLOAD;
  if (code && parts & asleep)
    rm_ranks_run(ranks, sleep_member, &parts, NULL);   // one rank failed: all sleep again
  return code;
}
