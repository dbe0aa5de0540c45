// runner.c: the sizes and the memory of a runner. See runner.h.
#include "step/runner.h"

#include <stdio.h>

#include "base/fields.h"

enum {
  // Largest number of rows of a step with exchanges of fixed sizes; with more rows counting is
  // cheaper.
  STATIC_ROWS = 512,
  LOGITS_BYTES = 64 << 20, // logits at a time, but …
  MIN_OUT_ROWS = 32, // … at least this many rows, so that lm_head seldom reads its weights
  // Results before a step has to wait, in addition to one row's top logprobs or lists of tokens.
  RESULTS_BYTES = 1 << 20,
};

void rm_runner_init(rm_runner *runner, const rm_runner_options *options) {
  rm_model_options *model = &runner->options.model;
  const int64_t vocab = options->spec->vocab_size, max_rows = options->model.max_rows;
  runner->options = *options;
  runner->device = options->device;
  runner->kernels = options->device->kernels;
  runner->rank = *options->model.rank;
  runner->options.model.rank = &runner->rank;
  runner->routed_per_token = options->spec->n_moe_layers * options->spec->top_k;
  runner->ld_logits = rm_round_up(vocab, RM_VOCAB_BLOCK);
  runner->max_out_rows =
      rm_min64(rm_max64(LOGITS_BYTES / (runner->ld_logits * (int64_t)sizeof(float)), MIN_OUT_ROWS),
               max_rows);
  model->max_out_rows = runner->max_out_rows;
  model->static_rows = runner->device->on_host
                           ? 0
                           : rm_min64(rm_min64(options->max_num_seqs, max_rows), STATIC_ROWS);
}

#define N_FIELDS(fields) (sizeof(fields) / sizeof *(fields))

rm_code rm_runner_create(rm_runner *runner, rm_model *model, rm_store *store, const rm_plan *plan,
                         rm_error *err) {
  const rm_runner_options *options = &runner->options;
  const size_t rows = (size_t)options->model.max_rows, seqs = (size_t)options->max_num_seqs;
  const size_t outs = (size_t)runner->max_out_rows, tp = (size_t)runner->rank.mesh.tp;
  // For each token: an early ban, a permanent ban and an edit.
  const size_t lists = 2 * sizeof(int32_t) + sizeof(rm_logit_edit);
  const size_t results = RESULTS_BYTES + lists * (size_t)options->spec->vocab_size;
  char what[96];
  runner->model = model;
  runner->store = store;
  runner->plan = plan;
  runner->buffer_bytes = rm_step_buffer_bytes(runner, rows, rows);
  const rm_field host[] = {
      {&runner->all_flags, runner->rank.tp ? rows : 0, tp},
      RM_FIELD(runner->drawn, runner->rank.tp ? outs : 0),
      RM_FIELD(runner->params, outs),
  };
  const rm_field device[] = {
      RM_FIELD_ROWS(runner->logits, outs, runner->ld_logits),
      RM_FIELD_ROWS(runner->stats, outs, 2),
  };
  const rm_field both[] = {
      RM_FIELD_ROWS(runner->block_tables, runner->device->on_host ? 0 : seqs, options->max_pages),
      {&runner->buffer, runner->buffer_bytes, 1},
  };
  snprintf(what, sizeof what, "batch (max_num_batched_tokens=%zu, max_num_seqs=%zu)", rows, seqs);
  runner->host_bytes = rm_fields_bytes(host, N_FIELDS(host));
  runner->scratch_bytes = rm_fields_bytes(device, N_FIELDS(device));
  runner->host = runner->host_bytes ? rm_map(runner->host_bytes) : NULL;
  if (!runner->host) return rm_no_memory(err, what, runner->host_bytes);
  RM_TRY(rm_device_alloc(runner->device, runner->scratch_bytes, what, &runner->scratch, err));
  RM_TRY(rm_mirrored_create(runner->device, rm_fields_bytes(both, N_FIELDS(both)), what,
                            &runner->mirrored, err));
  // With more rows, or when exchanges wait for the host, launches overlap with the work anyway.
  const int64_t captured =
      !options->enforce_eager && rm_model_is_static(model, options->model.static_rows)
          ? options->model.static_rows
          : 0;
  RM_TRY(rm_graphs_create(runner->device, &runner->rank, captured, &runner->graphs, err));
  RM_TRY(rm_results_create(runner->device, &runner->rank, results, &runner->results, err));
  rm_fields_place(host, N_FIELDS(host), runner->host);
  rm_fields_place(device, N_FIELDS(device), runner->scratch);
  rm_fields_place(both, N_FIELDS(both), runner->mirrored.host);
  return RM_OK;
}

void rm_runner_destroy(rm_runner *runner) {
  if (!runner->device) return;
  rm_graphs_destroy(runner->graphs);
  rm_results_destroy(&runner->results);
  rm_mirrored_destroy(&runner->mirrored);
  rm_unmap(runner->host, runner->host_bytes);
  rm_device_free(runner->device, runner->scratch, runner->scratch_bytes);
}

uint64_t rm_runner_workspace(const rm_runner *runner) {
  return rm_model_workspace_bytes(runner->model) + runner->host_bytes + runner->scratch_bytes +
         runner->mirrored.bytes + runner->results.mirrored.bytes;
}
