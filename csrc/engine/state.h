// state.h: the struct of an engine, for the files of this folder.
#pragma once

#include "base/memory.h"
#include "clock.h"
#include "engine/engine.h"
#include "step/runner.h"

struct rm_engine {
  // set at creation
  const rm_spec *spec;          // view
  rm_engine_options options;    // eos_ids: owned; rank: zeros, the runner has it
  rm_device cpu;                // what `device` is where the options name none
  const rm_device *device;      // view
  rm_profile *profile;          // owned; NULL without options.profile
  rm_team *team;                // owned, as all below
  rm_params *params;
  rm_model *model;
  rm_store *store;
  rm_scheduler scheduler;       // requests, pages, plan
  rm_runner runner;             // what computes a plan
  size_t kv_bytes;              // of runner.kv
  int had_work;                 // in the last step, this rank or another of its lockstep group
  unsigned asleep;
  rm_error lost;                // RM_OK, or why this engine cannot step any more
  // counts since creation
  int64_t steps, rows;
  double schedule_seconds, forward_seconds, commit_seconds;
};

// State of the calling thread that a call into the engine changes and restores: floating-point
// environment and current device.
typedef struct rm_entered {
  uint32_t fp;
  int device;
} rm_entered;
static inline rm_entered rm_enter(const rm_engine *engine) {
  return (rm_entered){rm_fp_enter(), engine->device->enter(engine->device->self)};
}
static inline void rm_leave(const rm_engine *engine, rm_entered entered) {
  engine->device->leave(engine->device->self, entered.device);
  rm_fp_leave(entered.fp);
}

// kv_size.c: the number of KV pages. With memory_fraction all ranks of the mesh call it together,
// when everything but the cache was allocated; they get the same number or the same error.
rm_code rm_kv_pages(rm_engine *engine, int64_t *n_pages, rm_error *err);
