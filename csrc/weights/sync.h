// sync.h: a sync brings a new version of the weights into service, all of it or nothing.
//
//   begin ──► resolve, check, push … ──► commit     one sync at a time; begin resets an open sync
//                                  └───► abort
//
// A push is a list of entries. rm_names_resolve finds out once where the values of a name go and in
// which order (rm_target); check, push and undo work on that list. check compares shape, dtype,
// strides and place of the tensor; push copies the values into the store's staged allocation in the
// kernels' layout and checks that they are finite. commit checks that every required parameter was
// pushed and swaps the allocations; before that the serving weights do not change. With `in_place`
// there is no second allocation: the store is unsynced from begin to commit. After a failed push
// the sync stays open without these tensors; they can be pushed again, and commit fails while a
// required one is missing.
//
// On a mesh every rank gets every entry; its target is the same on all ranks. Names, shapes and
// strides are checked whole; values are read, checked and copied for the rank's shard only. Commit
// is two-phase (two_phase_commit.h): prepare, which can fail, a vote, and swap, which cannot.
//
// Not thread-safe, as the store. A push returns when the device has read the tensors. No call waits
// for other ranks.
#pragma once

#include "weights/names.h"

typedef struct rm_store rm_store; // store.h

// One tensor of the trainer: a view, valid and unchanged during the push.
typedef struct rm_tensor {
  const void *data;
  rm_src_dtype dtype;
  int n_dims; // 0 … 4
  int64_t shape[4];
  int64_t strides[4]; // in elements, any sign
  int64_t span_lo, span_hi; // the owner's buffer, in bytes before and after data; both 0: unknown
  int on_device, ordinal; // data is in the memory of CUDA device `ordinal`
} rm_tensor;

typedef struct rm_entry {
  const char *name; // [length] and a NUL, UTF-8; a view
  size_t length;
  rm_target target; // owned: rm_target_clear. No pieces: push counts the entry as skipped
  rm_tensor tensor;
} rm_entry;

typedef struct rm_sync_options {
  int64_t version; // must exceed the last committed version; −1: the next number
  int cast; // convert other float dtypes
  int allow_nonfinite;
  // strict=False: unexpected names are skipped, missing parameters keep the serving value
  int allow_partial;
  int allow_bias_removal; // a router bias that the serving version has may be absent
  int in_place;
} rm_sync_options;

typedef struct rm_sync_report {
  int64_t version, n_tensors, n_parameters, n_skipped;
  uint64_t bytes; // of tensor data read by this rank
  double seconds; // begin to commit
  double copy_seconds; // inside push
  uint64_t digest; // of names and stored values; the same for every spelling of the same weights
} rm_sync_report;

rm_code rm_sync_begin(rm_store *store, const rm_sync_options *options, rm_error *err);
// Compares a tensor with the target of an entry; reads and writes no values.
rm_code rm_sync_check(const rm_store *store, const rm_entry *entry, const rm_tensor *tensor,
                      rm_error *err);
// Begins a push of entries whose tensors were checked. They stay valid until rm_sync_copy has
// copied all of them; a push ends with all of them or, after an error, with none.
rm_code rm_sync_push(rm_store *store, const rm_entry *const *entries, int64_t n, rm_error *err);
// Copies the next part of the push, of `most` bytes or a little more.
rm_code rm_sync_copy(rm_store *store, int64_t most, rm_error *err);
// Undoes the last push, which failed here or on another rank.
void rm_sync_undo(rm_store *store);
// The two phases of two_phase_commit.h. prepare makes the checks of an open sync. swap: after
// prepare; sums: added over the mesh; completes store->report.
rm_code rm_sync_prepare(rm_store *store, rm_error *err);
void rm_sync_swap(rm_store *store, const uint64_t *sums);
void rm_sync_abort(rm_store *store);
