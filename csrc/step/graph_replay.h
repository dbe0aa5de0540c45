// graph_replay.h: decode steps as CUDA graphs. Steps in which each row draws one token run the same
// ops at the same addresses for the same number of rows, so a step is captured once and then
// replayed with one launch instead of hundreds. forward.c enqueues the work; this file decides what
// is captured and when.
//
// The batch is padded to a captured size. Padding rows do not write KV, and their results are
// ignored. Rows do not depend on each other, so padding does not change results.
//
// A graph contains the addresses of the KV cache, which change only by sleeping, and of the
// weights, whose two allocations serve alternately. So there are two sets of graphs, and a sync
// keeps both. A size is captured at its second use with the same weights, since libraries load
// lazily in the first run. A capture that another thread invalidates by synchronizing the device is
// repeated at the next step.
//
// Ranks capture and replay together, since graphs contain exchanges. Ranks of a tp group have the
// same batches. Across replicas the lockstep group agrees before each step (lockstep.c) whether to
// replay, on the size (for the most rows), and whether ranks of tokens are computed; a replica
// without rows replays padding rows only.
#pragma once

#include "base/status.h"
#include "kernels.h"

typedef struct rm_runner rm_runner;

enum { RM_GRAPH_SETS = 2, RM_GRAPH_SIZES = 32 };

typedef struct rm_graph {
  void *captured; // the graph of the device; NULL: not captured yet
  uint64_t comm_bytes; // bytes and number of its exchanges, counted at capture
  int64_t comm_calls;
  int was_run; // whether it may be captured at the next step
  int is_refused; // whether the device had too little memory for it
} rm_graph;

typedef struct rm_graph_set {
  uint64_t weights; // the store's allocation, by its number; 0: none
  rm_graph graphs[RM_GRAPH_SIZES][2]; // [1]: with ranks of tokens
} rm_graph_set;

typedef struct rm_graphs {
  int64_t sizes[RM_GRAPH_SIZES]; // ascending
  int64_t n_sizes; // 0: steps are not captured
  rm_graph_set sets[RM_GRAPH_SETS];
  int last; // the set used last
  int was_reset; // whether the graphs were cleared since the lockstep group last agreed
} rm_graphs;

// Selects the sizes, up to 512 rows. Selects none if the device cannot capture, with enforce_eager,
// or if exchanges wait for the host (staged.h).
void rm_graphs_plan(rm_runner *runner);
// Whether this rank's plan can run as a graph; a plan without rows can. *with_token_ranks: some
// draw needs its rank.
int rm_graphs_serve(const rm_runner *runner, int *with_token_ranks);
// Returns the captured size to which `rows` are padded.
int64_t rm_graphs_size(const rm_runner *runner, int64_t rows);
// Runs the padded step: calls `enqueue`, captures it, or replays its graph.
typedef rm_code (*rm_enqueue_step)(rm_runner *runner, rm_error *err);
rm_code rm_graphs_run(rm_runner *runner, rm_enqueue_step enqueue, rm_error *err);
// Destroys all graphs, before memory that they use is freed. Waits for the device.
void rm_graphs_clear(rm_runner *runner);
