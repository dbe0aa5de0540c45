// forward.c: the part of a step that touches the device: from the batch to results. First everything is enqueued, the forward and then what
// sampler.c does with the wanted rows; then the device is waited for, once but for rows of logits that a caller wants; then results go
// into the records. Steps that the device has recorded go by graph_replay.c.
#include "base/hash.h"
#include "engine/state.h"

static void *there(const rm_engine *engine, const void *here) { return rm_paired_on_device(&engine->paired, here); }

// ---------------------------------------------------------------------------------------------- the other ranks of the tp group
// They were told the same and have scheduled alike, or what they exchange would be of different batches.
static rm_code agree_on_batch(rm_engine *engine, rm_error *err) {
  const rm_plan *plan = &engine->plan;
  rm_comm *tp = engine->options.rank.tp;
  if (!tp) return RM_OK;
  uint64_t digest = (uint64_t)plan->n_rows, all[RM_MAX_TP];
  size_t bytes[RM_MAX_TP];
  for (int64_t r = 0; r < plan->n_rows; r++)
    digest =
        rm_hash_word(rm_hash_word(digest, (uint64_t)(uint32_t)plan->ids[r] ^ (uint64_t)plan->slots[r] << 32), (uint64_t)plan->positions[r]);
  for (int r = 0; r < rm_comm_size(tp); r++) bytes[r] = sizeof digest;
  const rm_code code = rm_comm_all_gather(tp, &digest, all, bytes, err);
  for (int r = 0; r < rm_comm_size(tp) && !code; r++)
    if (all[r] != digest)
      return rm_fail(err, RM_E_COLLECTIVE_MISMATCH,
                     "tp rank %d steps with another batch than tp rank %d; all ranks of a tp group get the same calls", r,
                     rm_comm_rank(tp));
  return code;
}

// A row of K or V that is not finite is seen by the ranks that have its head, and ends its request on all.
static rm_code share_flags(rm_engine *engine, rm_error *err) {
  rm_comm *tp = engine->options.rank.tp;
  rm_plan *plan = &engine->plan;
  if (!tp || !plan->n_rows) return RM_OK;
  size_t bytes[RM_MAX_TP];
  for (int r = 0; r < rm_comm_size(tp); r++) bytes[r] = (size_t)plan->n_rows;
  const rm_code code = rm_comm_all_gather(tp, plan->row_flags, plan->all_flags, bytes, err);
  for (int64_t i = 0; i < plan->n_rows * rm_comm_size(tp) && !code; i++) plan->row_flags[i % plan->n_rows] |= plan->all_flags[i];
  return code;
}

// ---------------------------------------------------------------------------------------------- a step
// Those that were changed, neighbours together. Nothing where the memory is one.
static void put_tables(const rm_engine *engine) {
  uint8_t *changed = engine->table_changed;
  for (int64_t i = 0, end; i < engine->options.max_num_seqs && !engine->device->on_host; i = end + 1) {
    for (end = i; end < engine->options.max_num_seqs && changed[end]; end++) changed[end] = 0;
    rm_paired_put(&engine->paired, engine->block_tables + i * engine->max_pages,
                  (size_t)((end - i) * engine->max_pages) * sizeof *engine->block_tables);
  }
}

static void put_inputs(const rm_engine *engine) {
  const rm_plan *plan = &engine->plan;
  const rm_paired *paired = &engine->paired;
  const size_t rows = (size_t)plan->n_rows, outs = (size_t)plan->n_out;
  rm_paired_put(paired, plan->ids, rows * sizeof *plan->ids);
  rm_paired_put(paired, plan->positions, rows * sizeof *plan->positions);
  rm_paired_put(paired, plan->seq_of_row, rows * sizeof *plan->seq_of_row);
  rm_paired_put(paired, plan->slots, rows * sizeof *plan->slots);
  rm_paired_put(paired, plan->out_rows, outs * sizeof *plan->out_rows);
  rm_paired_put(paired, plan->targets, outs * sizeof *plan->targets);
  rm_device_zero(engine->device, there(engine, plan->row_flags), rows);
  rm_device_zero(engine->device, there(engine, plan->out_flags), outs);
}

static rm_code get_results(rm_engine *engine, rm_error *err) {
  const rm_plan *plan = &engine->plan;
  const rm_paired *paired = &engine->paired;
  rm_paired_get(paired, plan->row_flags, (size_t)plan->n_rows);
  rm_paired_get(paired, plan->out_flags, (size_t)plan->n_out);
  rm_paired_get(paired, plan->target_logprobs, (size_t)plan->n_out * sizeof *plan->target_logprobs);
  if (plan->routed) rm_paired_get(paired, plan->routed, (size_t)(plan->n_rows * engine->routed_per_token) * sizeof *plan->routed);
  return rm_results_fetch(&engine->results, err);
}

static rm_code enqueue(rm_engine *engine, rm_error *err) {
  const rm_plan *plan = &engine->plan;
  const void *hidden;
  const rm_batch batch = {
      .paired = &engine->paired,
      .n_rows = plan->n_rows,
      .most_rows = plan->most_rows,
      .n_seqs = engine->options.max_num_seqs,
      .max_pages = engine->max_pages,
      .ids = plan->ids,
      .positions = plan->positions,
      .seq_of_row = plan->seq_of_row,
      .slots = plan->slots,
      .block_tables = engine->block_tables,
      .n_out = plan->n_out,
      .out_rows = plan->out_rows,
      .routed = plan->routed,
      .row_flags = plan->row_flags,
  };
  rm_code code = rm_model_prepare(engine->model, &batch, err);
  if (code) return code;
  put_inputs(engine);
  code = rm_model_forward(engine->model, rm_store_weights(engine->store), engine->kv, engine->n_pages, &batch, &hidden, err);
  if (!code) code = rm_compare_forward(engine, err);
  return code ? code : rm_sample_outs(engine, hidden, err);
}

static rm_code run(rm_engine *engine, rm_error *err) {
  put_tables(engine);
  if (engine->plan.is_recorded) return rm_decode_run(engine, err);
  const rm_code code = enqueue(engine, err);
  return code ? code : get_results(engine, err);
}

rm_code rm_forward(rm_engine *engine, rm_error *err) {
  rm_plan *plan = &engine->plan;
  rm_code code = agree_on_batch(engine, err);
  if (!code) code = run(engine, err);
  if (code) {
    rm_abandon_peers(engine, code);
    rm_settle_peers(engine); // for what would be written to records, which may go
    rm_results_drop(&engine->results);
    return code;
  }
  for (int64_t i = 0; i < plan->n_out; i++) plan->row_flags[plan->out_rows[i]] |= plan->out_flags[i];
  for (int64_t d = 0; d < plan->n_draws; d++)
    if (!plan->draws[d].seq->group->want_ranks) plan->ranks[d] = 0;
  rm_record_outs(plan);
  return share_flags(engine, err);
}
