// graph_replay.c: see graph_replay.h.
#include "step/graph_replay.h"

#include <assert.h>
#include <string.h>

#include "scheduler/logit_edits.h"
#include "step/runner.h"

// ------------------------------------------------------------------------------------ which steps
static int64_t next_size(int64_t rows) {
  return rows < 4     ? 2 * rows
         : rows < 8   ? 8
         : rows < 64  ? rows + 8
         : rows < 256 ? rows + 16
                      : rows + 32;
}

void rm_graphs_plan(rm_runner *runner) {
  rm_graphs *graphs = &runner->graphs;
  // With more rows the launches overlap with the work.
  const int64_t most = runner->options.model.static_rows;
  if (runner->options.enforce_eager || !runner->device->begin_capture ||
      !rm_model_is_static(runner->model, most))
    return;
  for (int64_t rows = 1; rows < most; rows = next_size(rows)) {
    assert(graphs->n_sizes < RM_GRAPH_SIZES - 1);
    graphs->sizes[graphs->n_sizes++] = rows;
  }
  graphs->sizes[graphs->n_sizes++] = most;
}

// Whether the row needs only its next token and records of a fixed size.
static int only_draws(const rm_plan *plan, int64_t i) {
  const rm_out_row *out = &plan->outs[i];
  const rm_sequence *seq = out->seq;
  const rm_sequence_group *group = seq->group;
  if (!out->draws || out->target >= 0 || plan->draws[i].out != i || group->top_logprobs ||
      group->logits_out || group->external_draws)
    return 0;
  if (rm_has_penalties(group) || group->n_edits || group->n_never || group->n_bad_words)
    return 0;   // lists of changing sizes
  return !group->score_sampling && !(seq->n_tokens < group->min_tokens && group->n_early);
}

int rm_graphs_serve(const rm_runner *runner, int *with_token_ranks) {
  const rm_plan *plan = runner->plan;
  const rm_graphs *graphs = &runner->graphs;
  *with_token_ranks = 0;
  if (!graphs->n_sizes || plan->n_rows > graphs->sizes[graphs->n_sizes - 1]) return 0;
  if (plan->n_out != plan->n_rows || plan->n_draws != plan->n_rows) return 0;
  for (int64_t i = 0; i < plan->n_rows; i++) {
    if (!only_draws(plan, i)) return 0;
    *with_token_ranks |= plan->draws[i].seq->group->want_token_ranks != 0;
  }
  return 1;
}

static int64_t size_index(const rm_graphs *graphs, int64_t rows) {
  int64_t i = 0;
  while (graphs->sizes[i] < rows) i++;
  return i;
}

int64_t rm_graphs_size(const rm_runner *runner, int64_t rows) {
  return runner->graphs.sizes[size_index(&runner->graphs, rows)];
}

// ----------------------------------------------------------------------------- capture and replay
static void forget_set(rm_runner *runner, int set) {
  const rm_device *device = runner->device;
  rm_graphs *graphs = &runner->graphs;
  for (int64_t i = 0; i < graphs->n_sizes; i++)
    for (int ranks = 0; ranks < 2; ranks++)
      device->destroy_graph(device->self, graphs->sets[set].graphs[i][ranks].captured);
  memset(&graphs->sets[set], 0, sizeof graphs->sets[set]);
}

void rm_graphs_clear(rm_runner *runner) {
  for (int set = 0; set < RM_GRAPH_SETS && runner->graphs.n_sizes; set++) forget_set(runner, set);
  runner->graphs.was_reset = 1;
}

// Returns the graph for the serving weights. Weights at a new address replace the set that was not
// used last.
static rm_graph *graph_of(rm_runner *runner, int64_t index, int with_token_ranks) {
  rm_graphs *graphs = &runner->graphs;
  const uint64_t weights = rm_store_block(runner->store);
  int set = 0;
  while (set < RM_GRAPH_SETS && graphs->sets[set].weights != weights) set++;
  if (set == RM_GRAPH_SETS) {
    set = !graphs->last;
    forget_set(runner, set);
    graphs->sets[set].weights = weights;
  }
  graphs->last = set;
  return &graphs->sets[set].graphs[index][with_token_ranks];
}

// Result of a capture, from best to worst. INVALIDATED: it is repeated at the next step. REFUSED:
// the device had too little memory.
typedef enum outcome { KEPT, INVALIDATED, REFUSED } outcome;

static outcome outcome_of(rm_device_status status) {
  return status == RM_DEVICE_CAPTURE_INVALIDATED ? INVALIDATED
         : status == RM_DEVICE_NO_MEMORY         ? REFUSED
                                                 : KEPT;
}

// Max-reduces the outcome over the ranks that replay together: they replay only if all have a
// graph.
static rm_code agree_on(rm_runner *runner, outcome *came, rm_error *err) {
  const rm_rank *rank = &runner->rank;
  rm_comm *together = rm_rank_spans_dp(rank) ? rank->ep : rank->tp;
  const uint8_t mine = (uint8_t)*came;
  uint8_t all[RM_MAX_WORLD];
  size_t bytes[RM_MAX_WORLD];
  if (!together) return RM_OK;
  for (int r = 0; r < rm_comm_size(together); r++) bytes[r] = sizeof mine;
  const rm_code code = rm_comm_all_gather(together, &mine, all, bytes, err);
  for (int r = 0; r < rm_comm_size(together) && !code; r++)
    if (all[r] > *came) *came = (outcome)all[r];
  return code;
}

// Corrects the counts of the comms, which count an exchange when it is enqueued: a capture does not
// send data, and each replay does.
static void count_captured(rm_runner *runner, const rm_traffic *before, rm_graph *graph) {
  const rm_traffic after = rm_comms_traffic(runner);
  graph->comm_bytes = after.bytes - before->bytes;
  graph->comm_calls = after.calls - before->calls;
  runner->comm_bytes -= graph->comm_bytes;
  runner->comm_calls -= graph->comm_calls;
}

static void replay(rm_runner *runner, const rm_graph *graph) {
  runner->device->replay(runner->device->self, graph->captured);
  runner->comm_bytes += graph->comm_bytes;
  runner->comm_calls += graph->comm_calls;
  runner->replays++;
}

// Captures the step. If this does not give a graph, the caller enqueues the step.
static rm_code capture(rm_runner *runner, rm_graph *graph, rm_enqueue_step enqueue, rm_error *err) {
  const rm_device *device = runner->device;
  rm_code code = rm_device_check(device, device->begin_capture(device->self), err);
  if (code) return code;
  const rm_traffic before = rm_comms_traffic(runner);
  code = enqueue(runner, err);
  count_captured(runner, &before, graph);
  const rm_device_status status = device->end_capture(device->self, &graph->captured);
  outcome came = outcome_of(status);
  if (!code && came == KEPT) code = rm_device_check(device, status, err);
  if (!code) code = agree_on(runner, &came, err);
  if (!code && came == KEPT) return RM_OK;
  graph->is_refused = came == REFUSED;
  device->destroy_graph(device->self, graph->captured);
  graph->captured = NULL;
  return code;
}

rm_code rm_graphs_run(rm_runner *runner, rm_enqueue_step enqueue, rm_error *err) {
  rm_graph *graph = graph_of(runner, size_index(&runner->graphs, runner->shape.n_rows),
                             runner->shape.with_token_ranks);
  const int may_capture = graph->was_run && !graph->captured && !graph->is_refused;
  rm_code code = may_capture ? capture(runner, graph, enqueue, err) : RM_OK;
  if (!code && graph->captured) replay(runner, graph);
  else if (!code) code = enqueue(runner, err);
  graph->was_run = 1;
  return code;
}
