// predict.h: the documented behavior of an engine (engine.h, sync.h) as a state machine without
// weights, tokens or time: the code that a call returns, the version that serves, and the set of
// weights of each parameter. It shares only the names of codes and options with csrc. fuzz_calls.c
// runs an engine beside a state machine and compares the two.
//
// A call has several codes only if two of its arguments are wrong at once and the headers do not
// define an order; codes are therefore sets, a bit each.
#pragma once

#include <string.h>

#include "common/tiny.h"

enum {
  PREDICT_PARAMS = 64,
  NO_SET = -1,
  UNKNOWN_SET = -2
}; // NO_SET: a bias that never came; UNKNOWN_SET: not any set's values

typedef uint32_t codes;
static inline codes code_set(rm_code code) { return UINT32_C(1) << code; }
static inline int code_in(codes set, rm_code code) { return set >> code & 1; }

// `yes` adds one more error.
static inline codes wrong_if(codes set, int yes, rm_code code) {
  return yes ? set | code_set(code) : set;
}
static inline codes or_ok(codes wrong) { return wrong ? wrong : code_set(RM_OK); }

typedef struct predict {
  int64_t n_params;
  int bias; // index of the one parameter that may be absent, −1: none
  // what serves
  int64_t version, last; // −1
  int set[PREDICT_PARAMS]; // of each parameter, while version ≥ 0
  int had_bias; // the last committed version had one
  unsigned asleep;
  int64_t kept; // the version that serves again when the weights wake, −1: none
  int64_t live; // unfinished requests
  // the open sync
  int open;
  rm_sync_options options; // version resolved
  int based; // partial, on what serves
  int64_t version_before; // in place: the version to restore if the sync writes nothing
  int coming[PREDICT_PARAMS];
  uint8_t seen[PREDICT_PARAMS], dirty[PREDICT_PARAMS];
  int64_t n_pushed, n_skipped;
} predict;

static inline predict predict_create(int64_t n_params, int bias) {
  return (predict){.n_params = n_params, .bias = bias, .version = -1, .last = -1, .kept = -1};
}

static inline int predict_serves(const predict *p) { return p->version >= 0; }

// The set that all parameters are of, UNKNOWN_SET when there is none.
static inline int predict_whole_set(const predict *p) {
  for (int64_t i = 1; i < p->n_params; i++)
    if (p->set[i] != p->set[0]) return UNKNOWN_SET;
  return predict_serves(p) ? p->set[0] : UNKNOWN_SET;
}

// --------------------------------------------------------------------------------------- requests
static inline codes predict_closed(const predict *p) {
  return p->asleep & RM_PART_WEIGHTS ? code_set(RM_E_STATE)
         : predict_serves(p)         ? 0
                                     : code_set(RM_E_NOT_SYNCED);
}

static inline codes predict_step(const predict *p) {
  return or_ok(p->asleep ? code_set(RM_E_STATE) : predict_closed(p));
}

// Whether a step that returns RM_OK computes anything.
static inline int predict_works(const predict *p) { return p->live > 0; }

// ------------------------------------------------------------------------------------------- sync
// In place with nothing written the old version serves again; otherwise a version that was taken
// out of service is gone.
static inline void predict_sync_abort(predict *p) {
  if (!p->open) return;
  p->open = 0;
  int written = 0;
  for (int64_t i = 0; i < p->n_params; i++) written |= p->dirty[i];
  if (p->options.in_place && !written) p->version = p->version_before;
}

static inline codes predict_sync_begin(predict *p, const rm_sync_options *options) {
  codes wrong = wrong_if(0, p->asleep & RM_PART_WEIGHTS, RM_E_STATE);
  wrong = wrong_if(wrong, options->in_place && p->live, RM_E_STATE);
  const int next = options->version == -1,
            grows = options->version > p->last && options->version >= 0;
  wrong = wrong_if(wrong, next ? p->last == INT64_MAX : !grows, RM_E_VERSION);
  if (wrong) return wrong;
  predict_sync_abort(p);
  p->open = 1;
  p->options = *options;
  if (options->version == -1) p->options.version = p->last + 1;
  p->based = options->allow_partial && predict_serves(p);
  p->version_before = p->version;
  if (options->in_place) p->version = -1;
  memset(p->seen, 0, sizeof p->seen);
  memset(p->dirty, 0, sizeof p->dirty);
  p->n_pushed = p->n_skipped = 0;
  return code_set(RM_OK);
}

// `param` −1: a name of no parameter. `fault`: the code of what is wrong with the tensor, RM_OK:
// nothing.
static inline codes predict_check(const predict *p, int64_t param, rm_code fault) {
  if (!p->open) return code_set(RM_E_STATE);
  if (param < 0) return code_set(p->options.allow_partial ? RM_OK : RM_E_UNEXPECTED_KEY);
  return or_ok(wrong_if(wrong_if(0, p->seen[param], RM_E_DUPLICATE_KEY), fault != RM_OK, fault));
}

// A value that is not finite is detected while copying, only by push; allow_nonfinite accepts it.
static inline codes predict_push(predict *p, int64_t param, int set, rm_code fault, int nonfinite) {
  const codes want = predict_check(p, param, fault);
  if (want != code_set(RM_OK)) return want;
  if (param < 0) {
    p->n_skipped++;
    return want;
  }
  p->dirty[param] = 1;
  if (nonfinite && !p->options.allow_nonfinite) return code_set(RM_E_NONFINITE);
  p->seen[param] = 1;
  p->coming[param] = nonfinite ? UNKNOWN_SET : set;
  p->n_pushed++;
  return want;
}

static inline int predict_keeps(const predict *p, int64_t i) { return p->based && !p->dirty[i]; }

// On RM_OK the new version serves; on a sync that lacks something it is closed, and else stays
// open.
static inline codes predict_commit(predict *p, rm_inflight inflight) {
  codes wrong = wrong_if(0, !p->open || (inflight == RM_INFLIGHT_REFUSE && p->live), RM_E_STATE);
  if (wrong) return wrong;
  for (int64_t i = 0; i < p->n_params; i++) {
    if (p->seen[i] || predict_keeps(p, i)) continue;
    if (i != p->bias || p->dirty[i]) wrong |= code_set(RM_E_INCOMPLETE_SYNC);
    else if (p->had_bias && !p->options.allow_bias_removal) wrong |= code_set(RM_E_MISSING_KEY);
  }
  if (wrong) {
    predict_sync_abort(p);
    return wrong;
  }
  for (int64_t i = 0; i < p->n_params; i++)
    if (!predict_keeps(p, i)) p->set[i] = p->seen[i] ? p->coming[i] : NO_SET;
  if (p->bias >= 0) p->had_bias = p->set[p->bias] != NO_SET;
  p->version = p->last = p->options.version;
  p->open = 0;
  return code_set(RM_OK);
}

// ------------------------------------------------------------------------------------------ parts
static inline codes predict_sleep(predict *p, unsigned parts) {
  const int keep = (parts & RM_SLEEP_OFFLOAD) != 0;
  parts &= ~(unsigned)RM_SLEEP_OFFLOAD;
  const unsigned now = parts & ~p->asleep;
  if (now & RM_PART_WEIGHTS && p->open) return code_set(RM_E_STATE);
  if (parts & RM_PART_WEIGHTS && !keep) p->kept = -1;
  if (now & RM_PART_WEIGHTS) {
    if (keep) p->kept = p->version;
    p->version = -1;
  }
  p->asleep |= now;
  return code_set(RM_OK);
}

static inline codes predict_wake(predict *p, unsigned parts) {
  if (parts & p->asleep & RM_PART_WEIGHTS) {
    p->version = p->kept;
    p->kept = -1;
  }
  p->asleep &= ~parts;
  return code_set(RM_OK);
}
