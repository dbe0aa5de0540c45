// draw_edited.c: draws from rows of logits that an external scheduler has edited on the host.
#include <math.h>

#include "scheduler/logit_edits.h"
#include "step/runner.h"

// Draws from a row in host memory. Sets all of *out but the rank.
static rm_code run_sample(rm_runner *runner, const float *logits, const float *stats,
                          rm_sample_params params, rm_drawn *out, rm_error *err) {
  static const uint8_t flags = 0;
  rm_results *results = &runner->results;
  const int64_t vocab = runner->options.spec->vocab_size;
  const size_t row = (size_t)vocab * sizeof *logits,
               banned = (size_t)params.n_banned * sizeof *params.banned;
  RM_TRY(rm_results_reserve(results, 8, row + banned + 256, err));
  params.banned = rm_results_input(results, params.banned, banned);
  const rm_sample_args args = {
      .tokens = rm_results_output(results, &out->token, sizeof out->token),
      .logprobs = rm_results_output(results, &out->logprob, sizeof out->logprob),
      .sampling_logprobs =
          rm_results_output(results, &out->sampling_logprob, sizeof out->sampling_logprob),
      .logits = rm_results_input(results, logits, row),
      .stats = rm_results_input(results, stats, 2 * sizeof *stats),
      .params = rm_results_input(results, &params, sizeof params),
      .row_flags = rm_results_input(results, &flags, sizeof flags),
      .rows = 1,
      .vocab = vocab,
      .ld_logits = vocab,
  };
  runner->kernels->sample(rm_model_ctx(runner->model), &args);
  return rm_results_copy_out(results, err);
}

static int32_t rank_of(const float *logits, int64_t vocab, int32_t token) {
  int32_t rank = 0;
  for (int64_t v = 0; v < vocab; v++) rank += logits[v] >= logits[token];
  return rank;
}

// With temperature 1 and without filters, the op returns the model's logprob as the sampling
// logprob. Here the two come from different logits, so a banned token that does not exist disables
// this shortcut.
rm_code rm_draw_edited(rm_runner *runner, rm_sequence *seq, const float *raw, const float *stats,
                       const float *edited, rm_drawn *out, rm_error *err) {
  static const int32_t nobody = -1;
  const int64_t vocab = runner->options.spec->vocab_size;
  rm_drawn forced = {0};
  *out = (rm_drawn){.token = -1};
  for (int64_t v = 0; v < vocab; v++)
    if (isnan(edited[v])) return RM_OK; // the op would skip it
  rm_sample_params params = rm_params_of(seq);
  if (!params.n_banned) params.banned = &nobody, params.n_banned = 1;
  RM_TRY(run_sample(runner, edited, stats, params, out, err));
  if (out->token >= 0 && edited[out->token] == -INFINITY) out->token = -1; // all entries are −inf
  if (out->token < 0) return RM_OK;
  const rm_sample_params model = {.temperature = 1, .top_p = 1, .top_k = -1, .forced = out->token};
  RM_TRY(run_sample(runner, raw, stats, model, &forced, err));
  out->logprob = forced.logprob;
  if (seq->group->want_token_ranks) out->rank = rank_of(raw, vocab, out->token);
  return RM_OK;
}
