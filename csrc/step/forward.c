// forward.c: one rank's part of a step, in three calls (runner.h). The step waits for the device
// only once, unless a caller gets rows of logits.
#include "base/fields.h"
#include "base/hash.h"
#include "step/runner.h"

// ---------------------------------------------------------------- the other ranks of the tp group
// Compares a digest of the batch if each process of the tp group has scheduled the batch itself.
static rm_code compare_batches(rm_runner *runner, rm_error *err) {
  const rm_plan *plan = runner->plan;
  rm_comm *tp = runner->rank.tp;
  if (!tp || !runner->options.compares_batches) return RM_OK;
  uint64_t digest = (uint64_t)plan->n_rows, all[RM_MAX_TP];
  for (int64_t r = 0; r < plan->n_rows; r++)
    digest = rm_hash_word(
        rm_hash_word(digest, (uint64_t)(uint32_t)plan->ids[r] ^ (uint64_t)plan->slots[r] << 32),
        (uint64_t)plan->positions[r]);
  RM_TRY(rm_comm_all_gather(tp, &digest, all, sizeof digest, err));
  for (int r = 0; r < rm_comm_size(tp); r++)
    RM_FAIL_IF(
        all[r] != digest, RM_E_COLLECTIVE_MISMATCH,
        "batch: expected the same calls on all ranks of a tp group, got another batch on tp rank "
        "%d than on tp rank %d",
        r, rm_comm_rank(tp));
  return RM_OK;
}

// Or-reduces row flags: only the ranks with its head detect a K or V row that is not finite.
static rm_code share_flags(rm_runner *runner, rm_error *err) {
  rm_comm *tp = runner->rank.tp;
  uint8_t *flags = runner->step.output.row_flags;
  const int64_t n = runner->plan->n_rows;
  if (!tp || !n) return RM_OK;
  RM_TRY(rm_comm_all_gather(tp, flags, runner->all_flags, (size_t)n, err));
  for (int64_t i = 0; i < n * rm_comm_size(tp); i++) flags[i % n] |= runner->all_flags[i];
  return RM_OK;
}

// -------------------------------------------------------------------------------- the step buffer
enum { STEP_FIELDS = 19 };

static void list_fields(const rm_runner *runner, rm_step_buffer *b, size_t rows, size_t outs,
                        rm_field fields[STEP_FIELDS]) {
  const size_t routed = (size_t)runner->routed_per_token;
  rm_step_output *out = &b->output;
  rows = rows ? rows : 1; // so that every array has an address
  outs = outs ? outs : 1;
  const rm_field all[STEP_FIELDS] = {
      RM_FIELD(b->slots, rows),
      RM_FIELD(b->params, outs),
      RM_FIELD(b->ids, rows),
      RM_FIELD(b->positions, rows),
      RM_FIELD(b->seq_of_row, rows),
      RM_FIELD(b->load_states, runner->options.max_num_seqs),
      RM_FIELD(b->save_states, rows),
      RM_FIELD(b->out_rows, outs),
      RM_FIELD(b->targets, outs),
      RM_FIELD(out->row_flags, rows),
      RM_FIELD(b->out_flags, outs),
      RM_FIELD(out->tokens, outs),
      RM_FIELD(out->ranks, outs),
      RM_FIELD(out->kept, outs),
      RM_FIELD(out->logprobs, outs),
      RM_FIELD(out->sampling_logprobs, outs),
      RM_FIELD(out->target_logprobs, outs),
      RM_FIELD_ROWS(out->routed, routed ? rows : 0, routed),
      {&b->end, 1, 1},
  };
  memcpy(fields, all, sizeof all);
}

size_t rm_step_buffer_bytes(const rm_runner *runner, size_t rows, size_t outs) {
  rm_step_buffer unused;
  rm_field fields[STEP_FIELDS];
  list_fields(runner, &unused, rows, outs, fields);
  return rm_fields_bytes(fields, STEP_FIELDS);
}

// Copies the plan's inputs into the buffer. Padding rows are token 0 at position 0, with the block
// table of the first row's sequence (or row 0 of the tables, whose entries are valid pages). They
// write no KV and no state, and their results are ignored.
static void fill(rm_runner *runner) {
  const rm_plan *plan = runner->plan;
  const rm_step_shape *shape = &runner->shape;
  rm_step_buffer *b = &runner->step;
  rm_field fields[STEP_FIELDS];
  const size_t rows = (size_t)plan->n_rows, outs = (size_t)plan->n_out;
  list_fields(runner, b, (size_t)shape->n_rows, (size_t)shape->n_out, fields);
  // The buffer is sized for the largest step.
  rm_fields_place(fields, STEP_FIELDS, runner->buffer);
#define COPY(member, n) memcpy(b->member, plan->member, (n) * sizeof *b->member)
  COPY(slots, rows);
  COPY(ids, rows);
  COPY(positions, rows);
  COPY(seq_of_row, rows);
  COPY(load_states, (size_t)runner->options.max_num_seqs);
  COPY(save_states, rows);
  COPY(out_rows, outs);
  COPY(targets, outs);
  COPY(params, outs);
#undef COPY
  for (int64_t i = plan->n_rows; i < shape->n_rows; i++) {
    b->slots[i] = b->targets[i] = b->save_states[i] = -1;
    b->ids[i] = b->positions[i] = 0;
    b->seq_of_row[i] = plan->n_rows ? plan->seq_of_row[0] : 0;
    b->out_rows[i] = (int32_t)i;
    b->params[i] =
        (rm_sample_params){.top_p = 1, .top_k = -1, .forced = -1, .repetition_penalty = 1};
  }
  memset(b->output.row_flags, 0, (size_t)shape->n_rows);
  memset(b->out_flags, 0, (size_t)shape->n_out);
}

// Copies changed block tables to the device, adjacent tables together. On the CPU the ops read the
// plan's tables.
static void put_tables(const rm_runner *runner) {
  const rm_plan *plan = runner->plan;
  const int64_t n = runner->options.max_num_seqs, width = runner->options.max_pages;
  for (int64_t i = 0, end; i < n && runner->block_tables; i = end + 1) {
    for (end = i; end < n && plan->table_changed[end];) end++;
    const size_t bytes = (size_t)((end - i) * width) * sizeof *plan->block_tables;
    if (bytes) memcpy(runner->block_tables + i * width, plan->block_tables + i * width, bytes);
    rm_mirrored_copy_to_device(&runner->mirrored, runner->block_tables + i * width, bytes);
  }
}

static void write_pages(const rm_runner *runner) {
  const rm_plan *plan = runner->plan;
  for (int64_t i = 0; i < plan->n_writes; i++)
    rm_model_write_page(runner->model, &runner->cache, plan->writes[i].to, plan->writes[i].from);
}

// ----------------------------------------------------------------------------------------- a step
static rm_batch batch_of(const rm_runner *runner) {
  const rm_step_buffer *b = &runner->step;
  return (rm_batch){
      .mirrored = &runner->mirrored,
      .n_rows = runner->shape.n_rows,
      .most_rows = runner->shape.most_rows,
      // Each row of a padded step is the only one of its sequence.
      .n_seqs = runner->shape.padded ? runner->shape.padded : runner->plan->n_scheduled,
      .max_pages = runner->options.max_pages,
      .ids = b->ids,
      .positions = b->positions,
      .seq_of_row = b->seq_of_row,
      .slots = b->slots,
      .load_states = b->load_states,
      .save_states = b->save_states,
      .block_tables = runner->block_tables ? runner->block_tables : runner->plan->block_tables,
      .n_out = runner->shape.n_out,
      .out_rows = b->out_rows,
      .routed = b->output.routed,
      .row_flags = b->output.row_flags,
  };
}

rm_code rm_step_prepare(rm_runner *runner, rm_error *err) {
  rm_step_shape *shape = &runner->shape;
  RM_TRY(compare_batches(runner, err));
  shape->n_rows = runner->plan->n_rows, shape->n_out = runner->plan->n_out;
  if (shape->padded) shape->n_rows = shape->n_out = shape->most_rows = shape->padded;
  write_pages(runner);
  fill(runner);
  put_tables(runner);
  const rm_batch batch = batch_of(runner);
  return rm_model_prepare(runner->model, &batch, err);
}

rm_code rm_step_enqueue(void *self, rm_error *err) {
  rm_runner *runner = self;
  const rm_batch batch = batch_of(runner);
  const rm_step_buffer *b = &runner->step;
  const char *tokens = (const char *)b->output.tokens, *flags = (const char *)b->output.row_flags;
  const void *hidden;
  rm_mirrored_copy_to_device(&runner->mirrored, b->slots,
                             (size_t)(tokens - (const char *)b->slots));
  rm_code code = rm_model_forward(runner->model, runner->store->serving.block, &runner->cache,
                                  &batch, &hidden, err);
  if (!code && !runner->shape.padded) code = rm_compare_forward(&runner->rank, err);
  if (!code) code = rm_sample_outs(runner, hidden, err);
  rm_mirrored_copy_to_host(&runner->mirrored, b->output.row_flags, (size_t)(b->end - flags));
  return code;
}

rm_code rm_step_finish(rm_runner *runner, rm_error *err) {
  const rm_plan *plan = runner->plan;
  RM_TRY(rm_results_copy_out(&runner->results, err));
  RM_TRY(rm_share_draws(runner, err));
  for (int64_t i = 0; i < plan->n_out; i++)
    runner->step.output.row_flags[plan->out_rows[i]] |= runner->step.out_flags[i];
  return share_flags(runner, err);
}
