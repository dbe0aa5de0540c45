// graph_replay.h: steps in which each row draws one token, on a device that can record what is enqueued (CUDA graphs). Such a step is the same
// ops at the same addresses as another of as many rows, so it is enqueued once, kept, and replayed: one launch in the place of hundreds.
//
// What ops read and write there lies in one run of the engine's paired, inputs before results, so that a step is one put, the forward,
// the draws, and one get. Rows are made up to one of a few sizes; those behind the batch's are of no sequence that counts: they write
// no KV and what they give is not looked at. No row knows of another, so they change no bit.
//
// A recording holds addresses: of the KV cache, which stays until it sleeps, and of the weights, of which a store has two blocks that
// take turns. So there are two sets of recordings, and a sync costs none of them. A size is recorded when it comes for the second time
// with weights of that block: the first run loads what other libraries load late. One that another thread spoils, by
// waiting for the whole device, is tried again at the next step; this one is enqueued.
//
// Ranks record and replay alike, exchanges included. Those of a tp group have seen the same batches and blocks. Where experts span
// replicas each has a batch of its own, and what they agree on before a step (rm_engine_ask_all) is whether it goes this way at all,
// its size, which is that of the most rows of any, and whether ranks are wanted. A replica without rows has rows that do not count alone.
#pragma once

#include "base/status.h"
#include "kernels.h"

typedef struct rm_engine rm_engine;

enum { RM_DECODE_SETS = 2, RM_DECODE_SIZES = 32 };

typedef struct rm_recording {
  void *kept; // the device's; NULL: none yet
  uint64_t comm_bytes; // that its exchanges send to other ranks, as was counted when it was recorded
  int64_t comm_calls;
  int was_run; // so that the next may be recorded
  int is_refused; // the device had no memory for it
} rm_recording;

typedef struct rm_recordings {
  uint64_t block; // of the store, by its number; 0: none
  rm_recording list[RM_DECODE_SIZES][2]; // without ranks, with
} rm_recordings;

typedef struct rm_decode {
  int64_t sizes[RM_DECODE_SIZES]; // ascending
  int64_t n_sizes; // 0: no step is recorded
  char *block; // view: in the engine's paired
  size_t block_bytes;
  rm_recordings sets[RM_DECODE_SETS];
  int last; // the set that was used last
  int has_forgotten; // since ranks that step together heard of it
} rm_decode;

// Sizes, up to 512 rows, and bytes for them. None where the device records nothing, the options say so, or exchanges wait for the host
// (staged.h).
void rm_decode_plan(rm_engine *engine);
// Whether the plan is such a step, as far as this rank knows; one without rows is. *with_ranks: it wants those of its tokens.
int rm_decode_serves(const rm_engine *engine, int *with_ranks);
// Where the plan says that it is recorded, in the place of enqueueing it op by op and fetching: inputs put, results in the plan. What is
// enqueued on an error is not waited for.
rm_code rm_decode_run(rm_engine *engine, rm_error *err);
// Before memory goes that recordings know. Waits for the device.
void rm_decode_forget(rm_engine *engine);
