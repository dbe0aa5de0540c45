// graph_replay.c: see graph_replay.h.
#include "step/graph_replay.h"

#include <assert.h>

#include "engine/state.h"

// The arrays of a step of `rows` rows, the host's addresses.
typedef struct rows_block {
  // put
  int64_t *slots;
  rm_sample_params *params;
  int32_t *ids, *positions, *seq_of_row, *out_rows;
  uint8_t *row_flags, *out_flags;   // zeros; got again, as all that follow
  int32_t *tokens, *ranks;
  float *logprobs, *sampling_logprobs;
  int16_t *routed;              // [rows][routed_per_token]
  char *end;
} rows_block;

enum { N_FIELDS = 14 };

static void list_fields(const rm_engine *engine, int64_t rows, rows_block *b, rm_field fields[N_FIELDS]) {
  const size_t n = (size_t)rows;
  const rm_field all[N_FIELDS] = {
      {&b->slots, n, sizeof *b->slots},
      {&b->params, n, sizeof *b->params},
      {&b->ids, n, sizeof *b->ids},
      {&b->positions, n, sizeof *b->positions},
      {&b->seq_of_row, n, sizeof *b->seq_of_row},
      {&b->out_rows, n, sizeof *b->out_rows},
      {&b->row_flags, n, sizeof *b->row_flags},
      {&b->out_flags, n, sizeof *b->out_flags},
      {&b->tokens, n, sizeof *b->tokens},
      {&b->ranks, n, sizeof *b->ranks},
      {&b->logprobs, n, sizeof *b->logprobs},
      {&b->sampling_logprobs, n, sizeof *b->sampling_logprobs},
      {&b->routed, engine->routed_per_token ? n : 0, (size_t)engine->routed_per_token * sizeof *b->routed},
      {&b->end, 1, 1},
  };
  memcpy(fields, all, sizeof all);
}

static rows_block block_of(const rm_engine *engine, int64_t rows) {
  rows_block b;
  rm_field fields[N_FIELDS];
  list_fields(engine, rows, &b, fields);
  rm_fields_place(fields, N_FIELDS, engine->decode.block, engine->decode.block_bytes);   // made for the most rows
  return b;
}

// ---------------------------------------------------------------------------------------------- which steps
static int64_t next_size(int64_t rows) {
  return rows < 4 ? 2 * rows : rows < 8 ? 8 : rows < 64 ? rows + 8 : rows < 256 ? rows + 16 : rows + 32;
}

void rm_decode_plan(rm_engine *engine) {
  rm_decode *decode = &engine->decode;
  const rm_engine_options *options = &engine->options;
  const int64_t most = rm_model_options_of(engine).static_rows;   // more hide the launches behind the work
  rows_block unused;
  rm_field fields[N_FIELDS];
  if (options->enforce_eager || !engine->device->record || !rm_model_is_static(engine->model, most)) return;
  for (int64_t rows = 1; rows < most; rows = next_size(rows)) {
    assert(decode->n_sizes < RM_DECODE_SIZES - 1);
    decode->sizes[decode->n_sizes++] = rows;
  }
  decode->sizes[decode->n_sizes++] = most;
  list_fields(engine, most, &unused, fields);
  decode->block_bytes = rm_fields_bytes(fields, N_FIELDS);
}

// Nothing is wanted of the row but the next token and its records that have a fixed size.
static int only_draws(const rm_plan *plan, int64_t i) {
  const rm_out_row *out = &plan->outs[i];
  const rm_sequence *seq = out->seq;
  const rm_group *group = seq->group;
  if (!out->draws || out->target >= 0 || plan->draws[i].out != i || group->top_logprobs || group->wants_logits || group->host_draws)
    return 0;
  return !group->score_sampling && !(seq->n_tokens < group->min_tokens && group->n_banned);
}

int rm_decode_serves(const rm_engine *engine, int *with_ranks) {
  const rm_plan *plan = &engine->plan;
  const rm_decode *decode = &engine->decode;
  *with_ranks = 0;
  if (!decode->n_sizes || plan->n_rows > decode->sizes[decode->n_sizes - 1]) return 0;
  if (plan->n_out != plan->n_rows || plan->n_draws != plan->n_rows) return 0;
  for (int64_t i = 0; i < plan->n_rows; i++) {
    if (!only_draws(plan, i)) return 0;
    *with_ranks |= plan->draws[i].seq->group->want_ranks != 0;
  }
  return 1;
}

static int64_t size_index(const rm_decode *decode, int64_t rows) {
  int64_t i = 0;
  while (decode->sizes[i] < rows) i++;
  return i;
}

// ---------------------------------------------------------------------------------------------- a step
// Rows behind the plan's: token 0 at position 0 of the first row's sequence, which has a page there; where there is none, of whoever had
// the first place last: every number in the tables is a page's, from the beginning on.
static void fill(const rm_engine *engine, const rows_block *b, int64_t rows) {
  const rm_plan *plan = &engine->plan;
  const int32_t first = plan->n_rows ? plan->seq_of_row[0] : 0;
  for (int64_t i = 0; i < rows; i++) {
    const int counts = i < plan->n_rows;
    b->slots[i] = counts ? plan->slots[i] : -1;
    b->ids[i] = counts ? plan->ids[i] : 0;
    b->positions[i] = counts ? plan->positions[i] : 0;
    b->seq_of_row[i] = counts ? plan->seq_of_row[i] : first;
    b->out_rows[i] = (int32_t)i;
    b->params[i] = counts ? rm_params_of(plan->draws[i].seq) : (rm_sample_params){.top_p = 1, .top_k = -1, .forced = -1};
  }
  memset(b->row_flags, 0, (size_t)rows);
  memset(b->out_flags, 0, (size_t)rows);
}

static void *there(const rm_engine *engine, const void *here) { return rm_paired_on_device(&engine->paired, here); }

// Rows of n that this rank draws from: of a tp group each rank has its share, and tells the others.
static rm_range own_rows(const rm_engine *engine, int64_t n) {
  const rm_comm *tp = engine->options.rank.tp;
  return tp ? rm_model_own_rows(engine->model, n, rm_comm_rank(tp)) : (rm_range){0, n};
}

// Tokens of this rank's share of rows [first, first + n), from their hidden states.
static rm_code draw(rm_engine *engine, const rows_block *b, const char *hidden, int64_t first, int64_t n, int with_ranks, rm_error *err) {
  const rm_plan *plan = &engine->plan;
  const rm_range own = own_rows(engine, n);
  const int64_t at = first + own.first;
  const rm_head head = {
      .hidden = hidden + (size_t)(first * engine->spec->hidden_size) * rm_dtype_bytes(engine->options.dtype),
      .rows = n,
      .ld_logits = engine->ld_logits,
      .own_rows = engine->options.rank.tp != NULL,
      .logits = plan->logits,
      .stats = plan->stats,
      .row_flags = there(engine, b->out_flags + first),
  };
  const rm_sample_args sample = {
      .tokens = there(engine, b->tokens + at),
      .logprobs = there(engine, b->logprobs + at),
      .sampling_logprobs = there(engine, b->sampling_logprobs + at),
      .logits = plan->logits + own.first * engine->ld_logits,
      .stats = plan->stats + 2 * own.first,
      .params = there(engine, b->params + at),
      .row_flags = there(engine, b->out_flags + at),
      .rows = own.n,
      .vocab = engine->spec->vocab_size,
      .ld_logits = engine->ld_logits,
  };
  const rm_ranks_args ranks = {
      .ranks = there(engine, b->ranks + at),
      .logits = sample.logits,
      .tokens = sample.tokens,
      .rows = own.n,
      .vocab = sample.vocab,
      .ld_logits = sample.ld_logits,
  };
  const rm_code code = rm_model_head(engine->model, rm_store_weights(engine->store), &head, err);
  if (code || !own.n) return code;
  engine->kernels->sample(rm_model_ctx(engine->model), &sample);
  if (with_ranks) engine->kernels->ranks(rm_model_ctx(engine->model), &ranks);
  return RM_OK;
}

// What the other ranks of the tp group have drawn; the host's.
static rm_code share_draws(rm_engine *engine, const rows_block *b, int64_t rows, rm_error *err) {
  const rm_comm *tp = engine->options.rank.tp;
  int64_t counts[RM_MAX_TP];
  rm_code code = RM_OK;
  for (int64_t first = 0, n; tp && first < rows && !code; first += n) {
    n = rm_min64(rows - first, engine->max_out_rows);
    for (int r = 0; r < rm_comm_size(tp); r++) counts[r] = rm_model_own_rows(engine->model, n, r).n;
    const rm_draw_records at = {b->tokens + first, b->ranks + first, b->logprobs + first, b->sampling_logprobs + first};
    code = rm_share_draws(engine, counts, n, &at, err);
  }
  return code;
}

static rm_batch batch_of(const rm_engine *engine, const rows_block *b, int64_t rows) {
  return (rm_batch){
      .paired = &engine->paired,
      .n_rows = rows,
      .most_rows = rows,
      .n_seqs = engine->options.max_num_seqs,
      .max_pages = engine->max_pages,
      .ids = b->ids,
      .positions = b->positions,
      .seq_of_row = b->seq_of_row,
      .slots = b->slots,
      .block_tables = engine->block_tables,
      .n_out = rows,
      .out_rows = b->out_rows,
      .routed = b->routed,
      .row_flags = b->row_flags,
  };
}

static rm_code enqueue(rm_engine *engine, const rows_block *b, int64_t rows, int with_ranks, rm_error *err) {
  const rm_batch batch = batch_of(engine, b, rows);
  const void *hidden;
  rm_paired_put(&engine->paired, b->slots, (size_t)((char *)b->tokens - (char *)b->slots));
  rm_code code = rm_model_forward(engine->model, rm_store_weights(engine->store), engine->kv, engine->n_pages, &batch, &hidden, err);
  for (int64_t first = 0; first < rows && !code; first += engine->max_out_rows)
    code = draw(engine, b, hidden, first, rm_min64(rows - first, engine->max_out_rows), with_ranks, err);
  rm_paired_get(&engine->paired, b->row_flags, (size_t)(b->end - (char *)b->row_flags));
  return code;
}

// ---------------------------------------------------------------------------------------------- recordings
static void forget_set(rm_engine *engine, int set) {
  const rm_device *device = engine->device;
  rm_decode *decode = &engine->decode;
  for (int64_t i = 0; i < decode->n_sizes; i++)
    for (int ranks = 0; ranks < 2; ranks++) device->forget(device->self, decode->sets[set].list[i][ranks].kept);
  memset(&decode->sets[set], 0, sizeof decode->sets[set]);
}

void rm_decode_forget(rm_engine *engine) {
  for (int set = 0; set < RM_DECODE_SETS && engine->decode.n_sizes; set++) forget_set(engine, set);
  engine->decode.has_forgotten = 1;
}

// Of the weights that serve. A third block takes the place of the one that served before the last.
static rm_recording *recording_of(rm_engine *engine, int64_t index, int with_ranks) {
  rm_decode *decode = &engine->decode;
  const uint64_t block = rm_store_block(engine->store);
  int set = 0;
  while (set < RM_DECODE_SETS && decode->sets[set].block != block) set++;
  if (set == RM_DECODE_SETS) {
    set = !decode->last;
    forget_set(engine, set);
    decode->sets[set].block = block;
  }
  decode->last = set;
  return &decode->sets[set].list[index][with_ranks];
}

// What came of recording, from best to worst: SPOILT is tried again at the next step, for REFUSED there is no memory.
typedef enum outcome { KEPT, SPOILT, REFUSED } outcome;

static outcome outcome_of(rm_device_status status) {
  return status == RM_DEVICE_SPOILT ? SPOILT : status == RM_DEVICE_NO_MEMORY ? REFUSED : KEPT;
}

// The worst of those that step together: where one has no recording none replays, since what it enqueues in the place of a replay the
// others would not have.
static rm_code agree_on(rm_engine *engine, outcome *came, rm_error *err) {
  const rm_rank *rank = &engine->options.rank;
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

// What was called while the device recorded was not moved, and each replay moves it.
static void count_recorded(rm_engine *engine, const rm_engine_stats *before, rm_recording *recording) {
  rm_engine_stats after = {0};
  rm_peers_traffic(engine, &after);
  recording->comm_bytes = after.comm_bytes - before->comm_bytes;
  recording->comm_calls = after.comm_calls - before->comm_calls;
  engine->stats.comm_bytes -= recording->comm_bytes;
  engine->stats.comm_calls -= recording->comm_calls;
}

static void replay(rm_engine *engine, const rm_recording *recording) {
  engine->device->replay(engine->device->self, recording->kept);
  engine->stats.comm_bytes += recording->comm_bytes;
  engine->stats.comm_calls += recording->comm_calls;
  engine->stats.replays++;
}

// What has been enqueued by an op that could not go on is dropped with the recording. Without one the step is to be enqueued.
static rm_code record(rm_engine *engine, rm_recording *recording, const rows_block *b, int64_t rows, int with_ranks, rm_error *err) {
  const rm_device *device = engine->device;
  rm_engine_stats before = {0};
  rm_code code = rm_device_check(device, device->record(device->self), err);
  if (code) return code;
  rm_peers_traffic(engine, &before);
  code = enqueue(engine, b, rows, with_ranks, err);
  count_recorded(engine, &before, recording);
  const rm_device_status status = device->recorded(device->self, &recording->kept);
  outcome came = outcome_of(status);
  if (!code && came == KEPT) code = rm_device_check(device, status, err);
  if (!code) code = agree_on(engine, &came, err);
  if (!code && came == KEPT) return RM_OK;
  recording->is_refused = came == REFUSED;
  device->forget(device->self, recording->kept);
  recording->kept = NULL;
  return code;
}

static void take(rm_engine *engine, const rows_block *b, int with_ranks) {
  rm_plan *plan = &engine->plan;
  const size_t n = (size_t)plan->n_rows, words = n * sizeof(int32_t);
  memcpy(plan->tokens, b->tokens, words);
  memcpy(plan->logprobs, b->logprobs, words);
  memcpy(plan->sampling_logprobs, b->sampling_logprobs, words);
  if (with_ranks) memcpy(plan->ranks, b->ranks, words);
  memcpy(plan->row_flags, b->row_flags, n);
  memcpy(plan->out_flags, b->out_flags, n);
  if (plan->routed) memcpy(plan->routed, b->routed, n * (size_t)engine->routed_per_token * sizeof *plan->routed);
}

rm_code rm_decode_run(rm_engine *engine, rm_error *err) {
  const int64_t index = size_index(&engine->decode, engine->plan.most_rows), rows = engine->decode.sizes[index];
  const int with_ranks = engine->plan.with_ranks;
  const rows_block b = block_of(engine, rows);
  fill(engine, &b, rows);
  rm_recording *recording = recording_of(engine, index, with_ranks);
  const rm_batch batch = batch_of(engine, &b, rows);
  rm_code code = rm_model_prepare(engine->model, &batch, err);
  const int may_record = recording->was_run && !recording->kept && !recording->is_refused;
  if (!code && may_record) code = record(engine, recording, &b, rows, with_ranks, err);
  if (!code && recording->kept) replay(engine, recording);
  else if (!code) code = enqueue(engine, &b, rows, with_ranks, err);
  recording->was_run = 1;
  if (!code) code = rm_compare_forward(engine, err);
  if (!code) code = rm_compare_outs(engine, err);
  if (!code) code = rm_results_fetch(&engine->results, err);
  if (!code) code = share_draws(engine, &b, rows, err);
  if (!code) take(engine, &b, with_ranks);
  return code;
}
