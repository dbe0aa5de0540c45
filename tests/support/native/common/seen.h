// seen.h: the observable state of an engine that is not running. A call that fails must not change
// it; two states are compared byte by byte, so the gaps between members are zeroed too.
#pragma once

#include <string.h>

#include "engine/engine.h"

typedef struct seen {
  rm_engine_stats stats;
  uint64_t digest, first; // of the weights; the first finished request
  int64_t unfinished;
  int open; // a sync is
} seen;

// All fields are zero without an engine.
static inline seen seen_of(rm_engine *engine) {
  seen s;
  memset(&s, 0, sizeof s);
  if (!engine) return s;
  rm_engine_statistics(engine, &s.stats);
  s.digest = rm_store_digest(rm_engine_store(engine));
  rm_engine_finished(engine, &s.first, 1);
  s.unfinished = rm_engine_unfinished(engine);
  s.open = rm_engine_store(engine)->open;
  return s;
}
