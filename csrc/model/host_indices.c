// host_indices.c: with tp > 1, the indices that the host computes for a forward's ops. The
// vocabulary is sharded, so the rank that holds an id embeds its row; with sequence parallelism
// rows and outputs are sharded too.
//
// Each rank looks up the rows whose ids it holds. In a step of fixed sizes every rank looks up all
// rows (row 0 for ids that it does not hold): the exchange is tp times larger, but its size does
// not depend on the ids, so it can be captured.
#include "model/model_internal.h"

// Computes which rows each rank looks up, and the index of each kept row in the gathered
// embeddings.
static void prepare_embed(rm_model *model, const rm_batch *batch) {
  const rm_shard *shard = &model->shard;
  const rm_range mine = model->params->placement.vocab, rows = rm_kept_rows(model, batch->n_rows);
  const int all = rm_is_static(model, batch);
  int64_t *counts = model->embed_counts, next[RM_MAX_TP], n_mine = 0;
  memset(counts, 0, (size_t)shard->size * sizeof *counts);
  for (int64_t row = 0; row < batch->n_rows; row++) {
    const int64_t at = batch->ids[row] - mine.first;
    const int is_mine = at >= 0 && at < mine.n;
    counts[rm_shard_owner(shard, batch->ids[row])]++;
    if (is_mine || all) model->embed_ids[n_mine++] = is_mine ? (int32_t)at : 0;
  }
  for (int r = 0; r < shard->size && all; r++) counts[r] = batch->n_rows;
  next[0] = 0;
  for (int r = 1; r < shard->size; r++) next[r] = next[r - 1] + counts[r - 1];
  for (int64_t row = 0; row < batch->n_rows; row++) {
    const int owner = rm_shard_owner(shard, batch->ids[row]);
    const int64_t from = all ? next[owner] + row : next[owner]++;
    if (row >= rows.first && row < rows.first + rows.n)
      model->embed_rows[row - rows.first] = (int32_t)from;
  }
}

// Finds the out_rows among each rank's home rows.
static void prepare_outs(rm_model *model, const rm_batch *batch) {
  const rm_shard *shard = &model->shard;
  int64_t at = 0;
  for (int r = 0; r < shard->size; r++) {
    const rm_range run = rm_shard_rows(shard, batch->n_rows, r);
    const int64_t first = at;
    for (; at < batch->n_out && batch->out_rows[at] < run.first + run.n; at++)
      if (r == shard->me)
        model->own_out_rows[at - first] = (int32_t)(batch->out_rows[at] - run.first);
    model->out_counts[r] = at - first;
  }
}

rm_code rm_model_prepare(rm_model *model, const rm_batch *batch, rm_error *err) {
  if (!model->shard.comm) return RM_OK;
  RM_TRY(rm_indices_begin(model, err));
  prepare_embed(model, batch);
  if (model->sequence_parallel) prepare_outs(model, batch);
  return RM_OK;
}
