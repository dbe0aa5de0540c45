// graphs.c: captured decode steps; see gpu.h.
//
// A graph contains the addresses of the KV cache, which change only by sleeping, and of the
// weights, whose two allocations serve alternately. So there are two sets of graphs, and a sync
// keeps both. A size is captured at its second use with the same weights, since libraries load
// lazily in the first run. A capture that another thread invalidates by synchronizing the device is
// repeated at the next step.
#include <assert.h>
#include <string.h>

#include "base/memory.h"
#include "gpu/gpu.h"
#include "scheduler/logit_edits.h"

enum { N_SETS = 2, MAX_SIZES = 32 };

typedef struct graph {
  void *captured; // the graph of the device; NULL: not captured yet
  uint64_t comm_bytes; // bytes and number of its exchanges, counted at capture
  int64_t comm_calls;
  int was_run; // whether it may be captured at the next step
  int is_refused; // whether the device had too little memory for it
} graph;

typedef struct graph_set {
  uint64_t weights; // number of the store's allocation; 0: none
  graph graphs[MAX_SIZES][2]; // [1]: with ranks of tokens
} graph_set;

struct rm_graphs {
  const rm_device *device; // views
  const rm_rank *rank;
  int64_t sizes[MAX_SIZES]; // ascending
  int64_t n_sizes;
  graph_set sets[N_SETS];
  int last; // the set used last
  int was_reset; // whether the graphs were cleared since the last agreement
  // counts since creation: replays, and their exchanges
  int64_t replays, comm_calls;
  uint64_t comm_bytes;
};

// --------------------------------------------------------------------------------------- creation
static int64_t next_size(int64_t rows) {
  return rows < 8 ? 2 * rows : rows < 64 ? rows + 8 : rows < 256 ? rows + 16 : rows + 32;
}

rm_code rm_graphs_create(const rm_device *device, const rm_rank *rank, int64_t most_rows,
                         rm_graphs **out, rm_error *err) {
  *out = NULL;
  if (!device->begin_capture || most_rows <= 0) return RM_OK;
  rm_graphs *graphs = *out = rm_alloc(1, sizeof *graphs);
  if (!graphs) return rm_fail(err, RM_E_MEMORY, "no memory for the list of graphs");
  graphs->device = device;
  graphs->rank = rank;
  for (int64_t rows = 1; rows < most_rows; rows = next_size(rows)) {
    assert(graphs->n_sizes < MAX_SIZES - 1);
    graphs->sizes[graphs->n_sizes++] = rows;
  }
  graphs->sizes[graphs->n_sizes++] = most_rows;
  return RM_OK;
}

static void forget_set(rm_graphs *graphs, int set) {
  const rm_device *device = graphs->device;
  for (int64_t i = 0; i < graphs->n_sizes; i++)
    for (int ranks = 0; ranks < 2; ranks++)
      device->destroy_graph(device->self, graphs->sets[set].graphs[i][ranks].captured);
  memset(&graphs->sets[set], 0, sizeof graphs->sets[set]);
}

void rm_graphs_clear(rm_graphs *graphs) {
  if (!graphs) return;
  for (int set = 0; set < N_SETS; set++) forget_set(graphs, set);
  graphs->was_reset = 1;
}

void rm_graphs_destroy(rm_graphs *graphs) {
  rm_graphs_clear(graphs);
  rm_free(graphs);
}

// ------------------------------------------------------------------------------------ which steps
// Whether the row needs only its next token and records of a fixed size.
static int only_draws(const rm_plan *plan, int64_t i) {
  const rm_out_row *out = &plan->outs[i];
  const rm_sequence *seq = out->seq;
  const rm_sequence_group *group = seq->group;
  if (!out->draws || !out->samples || plan->out_rows[i] != i || group->top_logprobs) return 0;
  if (rm_has_penalties(group) || group->n_edits || group->n_never || group->n_bad_words)
    return 0; // lists of changing sizes
  return !(seq->n_tokens < group->min_tokens && group->n_early);
}

int rm_graphs_flags(const rm_graphs *graphs, const rm_plan *plan) {
  if (!graphs) return RM_GRAPHS_REFUSE;
  int flags = graphs->was_reset ? RM_GRAPHS_RESET : 0;
  if (plan->n_rows > graphs->sizes[graphs->n_sizes - 1] || plan->n_out != plan->n_rows)
    return flags | RM_GRAPHS_REFUSE;
  for (int64_t i = 0; i < plan->n_rows; i++) {
    if (!only_draws(plan, i)) return flags | RM_GRAPHS_REFUSE;
    if (plan->outs[i].seq->group->want_token_ranks) flags |= RM_GRAPHS_TOKEN_RANKS;
  }
  return flags;
}

static int64_t size_index(const rm_graphs *graphs, int64_t rows) {
  int64_t i = 0;
  while (graphs->sizes[i] < rows) i++;
  return i;
}

int64_t rm_graphs_agree(rm_graphs *graphs, int flags, int64_t most_rows) {
  if (!graphs) return 0;
  // A rank that slept has no graphs, so all ranks capture again.
  if (flags & RM_GRAPHS_RESET) rm_graphs_clear(graphs);
  graphs->was_reset = 0;
  return flags & RM_GRAPHS_REFUSE ? 0 : graphs->sizes[size_index(graphs, most_rows)];
}

// ----------------------------------------------------------------------------- capture and replay
// Returns the graph for the serving weights. Weights at a new address replace the set that was not
// used last.
static graph *graph_of(rm_graphs *graphs, const rm_graph_step *step) {
  int set = 0;
  while (set < N_SETS && graphs->sets[set].weights != step->weights) set++;
  if (set == N_SETS) {
    set = !graphs->last;
    forget_set(graphs, set);
    graphs->sets[set].weights = step->weights;
  }
  graphs->last = set;
  return &graphs->sets[set].graphs[size_index(graphs, step->rows)][step->with_token_ranks];
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
static rm_code agree_on(const rm_rank *rank, outcome *came, rm_error *err) {
  rm_comm *together = rm_rank_spans_dp(rank) ? rank->ep : rank->tp;
  const uint8_t mine = (uint8_t)*came;
  uint8_t all[RM_MAX_WORLD];
  if (!together) return RM_OK;
  const rm_code code = rm_comm_all_gather(together, &mine, all, sizeof mine, err);
  for (int r = 0; r < rm_comm_size(together) && !code; r++)
    if (all[r] > *came) *came = (outcome)all[r];
  return code;
}

// Corrects the counts of the comms, which count an exchange when it is enqueued: a capture does not
// send data, and each replay does.
static void count_captured(rm_graphs *graphs, const rm_traffic *before, graph *of) {
  const rm_traffic after = rm_rank_traffic(graphs->rank);
  of->comm_bytes = after.bytes - before->bytes;
  of->comm_calls = after.calls - before->calls;
  graphs->comm_bytes -= of->comm_bytes;
  graphs->comm_calls -= of->comm_calls;
}

static void replay(rm_graphs *graphs, const graph *of) {
  graphs->device->replay(graphs->device->self, of->captured);
  graphs->comm_bytes += of->comm_bytes;
  graphs->comm_calls += of->comm_calls;
  graphs->replays++;
}

// Captures the step. If this does not give a graph, the caller enqueues the step.
static rm_code capture(rm_graphs *graphs, graph *of, const rm_graph_step *step, rm_error *err) {
  const rm_device *device = graphs->device;
  rm_code code = rm_device_check(device, device->begin_capture(device->self), err);
  if (code) return code;
  const rm_traffic before = rm_rank_traffic(graphs->rank);
  code = step->enqueue(step->self, err);
  count_captured(graphs, &before, of);
  const rm_device_status status = device->end_capture(device->self, &of->captured);
  outcome came = outcome_of(status);
  if (!code && came == KEPT) code = rm_device_check(device, status, err);
  if (!code) code = agree_on(graphs->rank, &came, err);
  if (!code && came == KEPT) return RM_OK;
  of->is_refused = came == REFUSED;
  device->destroy_graph(device->self, of->captured);
  of->captured = NULL;
  return code;
}

rm_code rm_graphs_run(rm_graphs *graphs, const rm_graph_step *step, rm_error *err) {
  graph *of = graph_of(graphs, step);
  const int may_capture = of->was_run && !of->captured && !of->is_refused;
  rm_code code = may_capture ? capture(graphs, of, step, err) : RM_OK;
  if (!code && of->captured) replay(graphs, of);
  else if (!code) code = step->enqueue(step->self, err);
  of->was_run = 1;
  if (!code) code = rm_compare_forward(graphs->rank, err);
  return code ? code : rm_compare_outs(graphs->rank, err);
}

// ------------------------------------------------------------------------------------- statistics
int64_t rm_graphs_replays(const rm_graphs *graphs) { return graphs ? graphs->replays : 0; }

void rm_graphs_add_traffic(const rm_graphs *graphs, rm_traffic *traffic) {
  if (!graphs) return;
  traffic->bytes += graphs->comm_bytes;
  traffic->calls += graphs->comm_calls;
}
