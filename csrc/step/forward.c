// forward.c: the part of a step that uses the device. One function enqueues all of it, captured or
// not: copy inputs to the device, model, sampler.c on the out rows, copy results to the host. Then
// the step waits for the device, once unless a caller gets rows of logits, and results go into the
// records.
#include "base/fields.h"
#include "base/hash.h"
#include "scheduler/logit_edits.h"
#include "step/runner.h"

// ---------------------------------------------------------------- the other ranks of the tp group
// All ranks got the same calls and scheduled the same batch; compares a digest of it.
static rm_code agree_on_batch(rm_runner *runner, rm_error *err) {
  const rm_plan *plan = runner->plan;
  rm_comm *tp = runner->rank.tp;
  if (!tp) return RM_OK;
  uint64_t digest = (uint64_t)plan->n_rows, all[RM_MAX_TP];
  size_t bytes[RM_MAX_TP];
  for (int64_t r = 0; r < plan->n_rows; r++)
    digest = rm_hash_word(
        rm_hash_word(digest, (uint64_t)(uint32_t)plan->ids[r] ^ (uint64_t)plan->slots[r] << 32),
        (uint64_t)plan->positions[r]);
  for (int r = 0; r < rm_comm_size(tp); r++) bytes[r] = sizeof digest;
  const rm_code code = rm_comm_all_gather(tp, &digest, all, bytes, err);
  for (int r = 0; r < rm_comm_size(tp) && !code; r++)
    if (all[r] != digest)
      return rm_fail(
          err, RM_E_COLLECTIVE_MISMATCH,
          "tp rank %d steps with another batch than tp rank %d; expected the same calls on all "
          "ranks of a tp group",
          r, rm_comm_rank(tp));
  return code;
}

// Or-reduces row flags: a K or V row that is not finite is seen only by the ranks that hold its
// head.
static rm_code share_flags(rm_runner *runner, rm_error *err) {
  rm_comm *tp = runner->rank.tp;
  rm_plan *plan = runner->plan;
  if (!tp || !plan->n_rows) return RM_OK;
  size_t bytes[RM_MAX_TP];
  for (int r = 0; r < rm_comm_size(tp); r++) bytes[r] = (size_t)plan->n_rows;
  const rm_code code = rm_comm_all_gather(tp, plan->row_flags, runner->all_flags, bytes, err);
  for (int64_t i = 0; i < plan->n_rows * rm_comm_size(tp) && !code; i++)
    plan->row_flags[i % plan->n_rows] |= runner->all_flags[i];
  return code;
}

// -------------------------------------------------------------------------------- the step buffer
enum { STEP_FIELDS = 17 };

static void list_fields(const rm_runner *runner, rm_step_buffer *b, size_t rows, size_t outs,
                        size_t draws, rm_field fields[STEP_FIELDS]) {
  const size_t routed = (size_t)runner->routed_per_token;
  rows = rows ? rows : 1, outs = outs ? outs : 1,
  draws = draws ? draws : 1; // so that no array is NULL
  const rm_field all[STEP_FIELDS] = {
      {&b->slots, rows, sizeof *b->slots},
      {&b->params, draws, sizeof *b->params},
      {&b->ids, rows, sizeof *b->ids},
      {&b->positions, rows, sizeof *b->positions},
      {&b->seq_of_row, rows, sizeof *b->seq_of_row},
      {&b->out_rows, outs, sizeof *b->out_rows},
      {&b->targets, outs, sizeof *b->targets},
      {&b->row_flags, rows, sizeof *b->row_flags},
      {&b->out_flags, outs, sizeof *b->out_flags},
      {&b->tokens, draws, sizeof *b->tokens},
      {&b->ranks, draws, sizeof *b->ranks},
      {&b->kept, draws, sizeof *b->kept},
      {&b->logprobs, draws, sizeof *b->logprobs},
      {&b->sampling_logprobs, draws, sizeof *b->sampling_logprobs},
      {&b->target_logprobs, outs, sizeof *b->target_logprobs},
      {&b->routed, routed ? rows : 0, routed * sizeof *b->routed},
      {&b->end, 1, 1},
  };
  memcpy(fields, all, sizeof all);
}

size_t rm_step_buffer_bytes(const rm_runner *runner, size_t rows, size_t outs, size_t draws) {
  rm_step_buffer unused;
  rm_field fields[STEP_FIELDS];
  list_fields(runner, &unused, rows, outs, draws, fields);
  return rm_fields_bytes(fields, STEP_FIELDS);
}

// Copies the plan's inputs into the buffer, and points the plan's results into it.
static void fill(rm_runner *runner) {
  rm_plan *plan = runner->plan;
  rm_step_buffer *b = &runner->step;
  rm_field fields[STEP_FIELDS];
  const size_t rows = (size_t)plan->n_rows, outs = (size_t)plan->n_out,
               draws = (size_t)plan->n_draws;
  list_fields(runner, b, rows, outs, draws, fields);
  rm_fields_place(fields, STEP_FIELDS, runner->buffer,
                  runner->buffer_bytes); // sized for the largest step
  memcpy(b->slots, plan->slots, rows * sizeof *b->slots);
  memcpy(b->ids, plan->ids, rows * sizeof *b->ids);
  memcpy(b->positions, plan->positions, rows * sizeof *b->positions);
  memcpy(b->seq_of_row, plan->seq_of_row, rows * sizeof *b->seq_of_row);
  memcpy(b->out_rows, plan->out_rows, outs * sizeof *b->out_rows);
  memcpy(b->targets, plan->targets, outs * sizeof *b->targets);
  for (size_t d = 0; d < draws; d++) {
    rm_logit_edits_advance(plan->draws[d].seq);
    b->params[d] = rm_params_of(plan->draws[d].seq);
  }
  memset(b->row_flags, 0, rows);
  memset(b->out_flags, 0, outs);
  plan->row_flags = b->row_flags;
  plan->out_flags = b->out_flags;
  plan->target_logprobs = b->target_logprobs;
  plan->tokens = b->tokens;
  plan->ranks = b->ranks;
  plan->kept = b->kept;
  plan->logprobs = b->logprobs;
  plan->sampling_logprobs = b->sampling_logprobs;
  plan->routed = b->routed;
}

// Puts changed block tables, adjacent ones together. No effect on the CPU.
static void put_tables(const rm_runner *runner) {
  const rm_plan *plan = runner->plan;
  const int64_t n = runner->options.max_num_seqs, max_pages = runner->options.max_pages;
  for (int64_t i = 0, end; i < n && !runner->device->on_host; i = end + 1) {
    for (end = i; end < n && plan->table_changed[end]; end++) plan->table_changed[end] = 0;
    rm_mirrored_copy_to_device(&runner->mirrored, plan->block_tables + i * max_pages,
                               (size_t)((end - i) * max_pages) * sizeof *plan->block_tables);
  }
}

// ----------------------------------------------------------------------------------------- a step
// Appends padding rows: token 0 at position 0, with the block table of the first row's sequence (or
// row 0 of the tables, whose entries are valid pages). They write no KV, and their results are
// ignored.
static void pad(rm_plan *plan, int64_t rows) {
  static rm_sequence_group nobody_group = {
      .n = 1, .top_p = 1, .top_k = -1, .repetition_penalty = 1};
  static rm_sequence nobody = {.group = &nobody_group};
  const int32_t first = plan->n_rows ? plan->seq_of_row[0] : 0;
  for (int64_t i = plan->n_rows; i < rows; i++) {
    plan->slots[i] = -1;
    plan->ids[i] = plan->positions[i] = 0;
    plan->seq_of_row[i] = first;
    plan->out_rows[i] = (int32_t)i;
    plan->targets[i] = -1;
    plan->outs[i] = (rm_out_row){.seq = &nobody, .target = -1, .draws = 1};
    plan->draws[i] = (rm_draw){&nobody, (int32_t)i};
  }
  plan->n_rows = plan->n_out = plan->n_draws = plan->most_rows = rows;
}

static rm_batch batch_of(const rm_runner *runner) {
  const rm_plan *plan = runner->plan;
  const rm_step_buffer *b = &runner->step;
  return (rm_batch){
      .mirrored = &runner->mirrored,
      .n_rows = plan->n_rows,
      .most_rows = plan->most_rows,
      .n_seqs = runner->options.max_num_seqs,
      .max_pages = runner->options.max_pages,
      .ids = b->ids,
      .positions = b->positions,
      .seq_of_row = b->seq_of_row,
      .slots = b->slots,
      .block_tables = plan->block_tables,
      .n_out = plan->n_out,
      .out_rows = b->out_rows,
      .routed = b->routed,
      .row_flags = b->row_flags,
  };
}

static rm_code enqueue(rm_runner *runner, rm_error *err) {
  const rm_batch batch = batch_of(runner);
  const rm_step_buffer *b = &runner->step;
  const void *hidden;
  rm_mirrored_copy_to_device(&runner->mirrored, b->slots,
                             (size_t)((char *)b->tokens - (char *)b->slots));
  rm_code code = rm_model_forward(runner->model, rm_store_weights(runner->store), runner->kv,
                                  runner->n_pages, &batch, &hidden, err);
  if (!code && !runner->plan->is_captured) code = rm_compare_forward(runner, err);
  if (!code) code = rm_sample_outs(runner, hidden, err);
  rm_mirrored_copy_to_host(&runner->mirrored, b->row_flags,
                           (size_t)(b->end - (char *)b->row_flags));
  return code;
}

rm_code rm_forward(rm_runner *runner, rm_error *err) {
  rm_plan *plan = runner->plan;
  const int64_t n_rows = plan->n_rows, n_out = plan->n_out, n_draws = plan->n_draws;
  const int is_captured = plan->is_captured;
  rm_code code = agree_on_batch(runner, err);
  if (is_captured) pad(plan, rm_graphs_size(runner, plan->most_rows));
  fill(runner);
  put_tables(runner);
  const rm_batch batch = batch_of(runner);
  if (!code) code = rm_model_prepare(runner->model, &batch, err);
  if (!code) code = is_captured ? rm_graphs_run(runner, enqueue, err) : enqueue(runner, err);
  if (!code && is_captured) code = rm_compare_forward(runner, err);
  if (!code && is_captured) code = rm_compare_outs(runner, err);
  if (!code) code = rm_results_copy_out(&runner->results, err);
  if (!code) code = rm_share_draws(runner, err);
  plan->n_rows = n_rows, plan->n_out = n_out, plan->n_draws = n_draws;
  if (code) {
    rm_comms_abort(runner, code);
    rm_comms_settle(runner); // enqueued work may write to records, which may be freed next
    rm_results_drop(&runner->results);
    return code;
  }
  for (int64_t i = 0; i < plan->n_out; i++)
    plan->row_flags[plan->out_rows[i]] |= plan->out_flags[i];
  for (int64_t d = 0; d < plan->n_draws; d++)
    if (!plan->draws[d].seq->group->want_token_ranks) plan->ranks[d] = 0;
  rm_record_outs(plan);
  return share_flags(runner, err);
}
