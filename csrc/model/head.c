// head.c: from hidden states to logits. A rank holds whole blocks of 128 vocabulary entries and
// computes a pair (max, sum) of each block. Every rank gathers all pairs and merges them in the
// contract's order. Ranks exchange logits only on request.
#include "model/model_internal.h"

size_t rm_head_fields(rm_model *model, rm_field fields[RM_HEAD_FIELDS]) {
  const size_t rows = (size_t)model->options.max_out_rows, ranks = (size_t)model->shard.size;
  const size_t blocks =
      (size_t)(rm_round_up(model->spec->vocab_size, RM_VOCAB_BLOCK) / RM_VOCAB_BLOCK);
  const rm_field all[RM_HEAD_FIELDS] = {
      RM_FIELD_ROWS(model->pairs, blocks, rows * 2),
      RM_FIELD_ROWS(model->target_logits, ranks, rows),
      RM_FIELD(model->own_logits, rows),
  };
  memcpy(fields, all, sizeof all);
  return RM_HEAD_FIELDS;
}

static rm_lm_head_args args_of(const rm_model *model, const char *weights, const rm_head *head) {
  return (rm_lm_head_args){
      .logits = head->logits,
      .stats = head->stats,
      .target_logprobs = head->target_logprobs,
      .targets = head->targets,
      .row_flags = head->row_flags,
      .x = head->hidden,
      .w = rm_weight(weights, &model->params->ends, RM_P_LM_HEAD),
      .rows = head->rows,
      .vocab = model->params->placement.vocab.n,
      .hidden = model->spec->hidden_size,
      .ldx = model->spec->hidden_size,
      .ld_logits = head->ld_logits,
      .dtype = model->options.dtype,
      .scale = model->spec->logits_scale,
      .softcap = model->spec->logits_softcap,
  };
}

static int64_t block_of(int64_t entry) { return (entry + RM_VOCAB_BLOCK - 1) / RM_VOCAB_BLOCK; }

static rm_code compute_shard(rm_model *model, const char *weights, const rm_head *head,
                             rm_error *err) {
  const rm_range mine = model->params->placement.vocab;
  rm_lm_head_args args = args_of(model, weights, head);
  args.pairs = model->pairs + block_of(mine.first) * head->rows * 2;
  args.target_logprobs = NULL;
  args.targets = NULL;
  if (head->logits) args.logits = head->logits + mine.first;
  if (head->target_logprobs) {
    RM_TRY(rm_indices_begin(model, err));
    for (int64_t i = 0; i < head->rows; i++) {
      const int64_t at = head->host_targets[i] - mine.first;
      model->local_targets[i] =
          head->host_targets[i] >= 0 && at >= 0 && at < mine.n ? (int32_t)at : -1;
    }
    args.targets = rm_indices_copy_to_device(model, model->local_targets, head->rows);
    args.target_logits = model->target_logits + model->shard.me * head->rows;
  }
  model->kernels->lm_head(&model->ctx, &args);
  return RM_OK;
}

static rm_code gather_pairs(rm_model *model, int64_t rows, rm_error *err) {
  rm_shard *shard = &model->shard;
  int64_t counts[RM_MAX_TP];
  for (int r = 0; r < shard->size; r++) counts[r] = block_of(shard->placements[r].vocab.n);
  return rm_comm_gather_rows(shard->comm, NULL, model->pairs, counts,
                             (size_t)rows * 2 * sizeof(float), err);
}

// Gathers each target's logit from the rank that holds it, into own_logits.
static rm_code gather_targets(rm_model *model, const rm_head *head, rm_error *err) {
  rm_shard *shard = &model->shard;
  RM_TRY(rm_comm_all_gather(shard->comm, model->target_logits + shard->me * head->rows,
                            model->target_logits, (size_t)head->rows * sizeof(float), err));
  RM_TRY(rm_indices_begin(model, err));
  for (int64_t i = 0; i < head->rows; i++)
    model->from_targets[i] =
        (int32_t)(rm_shard_owner(shard, head->host_targets[i]) * head->rows + i);
  const int32_t *from = rm_indices_copy_to_device(model, model->from_targets, head->rows);
  const rm_gather_rows_args args = {model->own_logits, model->target_logits, from, head->rows,
                                    sizeof(float)};
  model->kernels->gather_rows(&model->ctx, &args);
  return RM_OK;
}

// Exchanges columns of logits: every rank gets all rows, or with own_rows its share of the rows.
static rm_code exchange_logits(rm_model *model, const rm_head *head, rm_error *err) {
  rm_shard *shard = &model->shard;
  const size_t ld = (size_t)head->ld_logits * sizeof(float);
  const rm_range all = {0, head->rows}, mine = model->params->placement.vocab,
                 here = head->own_rows ? rm_shard_home(shard, head->rows) : all;
  rm_block *send = rm_comm_blocks(shard->comm), *recv = send + shard->size;
  for (int r = 0; r < shard->size; r++) {
    const rm_range its = shard->placements[r].vocab,
                   there = head->own_rows ? rm_shard_rows(shard, head->rows, r) : all;
    float *from = head->logits + there.first * head->ld_logits + mine.first,
          *to = head->logits + here.first * head->ld_logits + its.first;
    send[r] = (rm_block){from, there.n, (size_t)mine.n * sizeof(float), ld};
    recv[r] = (rm_block){to, here.n, (size_t)its.n * sizeof(float), ld};
  }
  return rm_comm_exchange(shard->comm, head->own_rows ? RM_COMM_ALL_TO_ALL : RM_COMM_GATHER, send,
                          recv, err);
}

rm_range rm_model_own_rows(const rm_model *model, int64_t n, int r) {
  return rm_shard_rows(&model->shard, n, r);
}

rm_code rm_model_head(rm_model *model, const void *weights, const rm_head *head, rm_error *err) {
  if (!head->rows) return RM_OK;
  if (!model->shard.comm) {
    const rm_lm_head_args args = args_of(model, weights, head);
    model->kernels->lm_head(&model->ctx, &args);
    return RM_OK;
  }
  RM_TRY(compute_shard(model, weights, head, err));
  RM_TRY(gather_pairs(model, head->rows, err));
  if (head->target_logprobs) RM_TRY(gather_targets(model, head, err));
  if (head->logits) RM_TRY(exchange_logits(model, head, err));
  const rm_merge_pairs_args merge = {
      .stats = head->stats,
      .target_logprobs = head->target_logprobs,
      .targets = head->targets,
      .row_flags = head->row_flags,
      .pairs = model->pairs,
      .target_logits = model->own_logits,
      .rows = head->rows,
      .n_blocks = block_of(model->spec->vocab_size),
  };
  model->kernels->merge_pairs(&model->ctx, &merge);
  return RM_OK;
}
