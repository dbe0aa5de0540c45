// graph_replay.h: decode steps as CUDA graphs. A step in which each row draws one token is the same ops at the same addresses as another
// of as many rows, so it is captured once and replayed: one launch in place of hundreds. forward.c enqueues both; here is what is
// captured, and when.
//
// The batch is padded to a captured size. Padding rows write no KV and their results are ignored; rows do not depend on each other, so
// padding changes no bit.
//
// A graph holds addresses: of the KV cache, which moves only by sleeping, and of the weights, of which a store has two allocations that
// serve in turns. So there are two sets of graphs, and a sync keeps both. A size is captured when it comes for the second time with those
// weights: the first run lets libraries load what they load late. A capture that another thread spoils, by synchronizing the device, is
// tried again at the next step.
//
// Ranks capture and replay together, since exchanges are in the graphs. Ranks of a tp group have the same batches. Across replicas the
// lockstep group agrees before each step (lockstep.c) whether to replay, on the size (that of the most rows), and whether ranks of tokens
// are wanted; a replica without rows replays padding rows only.
#pragma once

#include "base/status.h"
#include "kernels.h"

typedef struct rm_runner rm_runner;

enum { RM_GRAPH_SETS = 2, RM_GRAPH_SIZES = 32 };

typedef struct rm_graph {
  void *captured;               // the device's; NULL: none yet
  uint64_t comm_bytes;          // what its exchanges send to other ranks, and how many they are, counted at capture
  int64_t comm_calls;
  int was_run;                  // so that the next step may be captured
  int is_refused;               // the device had no memory for it
} rm_graph;

typedef struct rm_graph_set {
  uint64_t weights;             // the store's allocation, by its number; 0: none
  rm_graph graphs[RM_GRAPH_SIZES][2];   // without ranks of tokens, with
} rm_graph_set;

typedef struct rm_graphs {
  int64_t sizes[RM_GRAPH_SIZES];   // ascending
  int64_t n_sizes;              // 0: nothing is captured
  rm_graph_set sets[RM_GRAPH_SETS];
  int last;                     // the set that was used last
  int was_reset;                // since the lockstep group heard of it
} rm_graphs;

// The sizes, up to 512 rows. None where the device captures nothing, with enforce_eager, or where exchanges wait for the host (staged.h).
void rm_graphs_plan(rm_runner *runner);
// Whether the plan can run as a graph as far as this rank knows, which includes a plan without rows. *with_ranks: some draw wants its
// rank.
int rm_graphs_serve(const rm_runner *runner, int *with_ranks);
int64_t rm_graphs_size(const rm_runner *runner, int64_t rows);   // the captured size that `rows` are padded to
// Runs `enqueue`, which enqueues the whole padded step, or captures it, or replays what was captured.
typedef rm_code (*rm_enqueue_step)(rm_runner *runner, rm_error *err);
rm_code rm_graphs_run(rm_runner *runner, rm_enqueue_step enqueue, rm_error *err);
// Before memory goes away that graphs hold. Waits for the device.
void rm_graphs_clear(rm_runner *runner);
