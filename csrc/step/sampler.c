// sampler.c: computes tokens and logprobs from the hidden states of the out rows. lm_head processes
// max_out_rows rows at a time, which bounds the memory of logits for a long prompt with logprobs.
// Logits are stored only if more than the logprob of a target is requested.
//
// One call of the sample op takes a run of draws: from consecutive rows (decoding), or from one row
// (the first tokens of a prompt's samples), which is the same call with a row stride of 0.
#include "scheduler/logit_edits.h"
#include "step/runner.h"

// The rows of one call of lm_head: [first, first + n) of outs. Row indices below are relative to
// first.
typedef struct rm_logits_pass {
  int64_t first, n;
  int has_logits, has_targets; // whether logits are needed; whether a target's logprob is needed
  int own_rows; // whether this rank gets only the logits of its share of the rows
} rm_logits_pass;

// Return the out row and the draw at an index, which may be in the padding of a captured step.
static const rm_out_row *out_at(const rm_plan *plan, int64_t out) {
  static rm_sequence_group nobody_group = {.n = 1};
  static rm_sequence nobody = {.group = &nobody_group};
  static const rm_out_row padding = {.seq = &nobody, .target = -1, .draws = 1};
  return out < plan->n_out ? &plan->outs[out] : &padding;
}

static rm_draw draw_at(const rm_plan *plan, int64_t d) {
  return d < plan->n_draws ? plan->draws[d] : (rm_draw){out_at(plan, plan->n_out)->seq, (int32_t)d};
}

static const rm_out_row *out_row(const rm_runner *runner, const rm_logits_pass *pass, int64_t i) {
  return out_at(runner->plan, pass->first + i);
}

static int needs_logits(const rm_out_row *out) {
  const rm_sequence_group *group = out->seq->group;
  return out->draws || group->logits_out || group->score_sampling || group->prompt_top ||
         group->want_token_ranks;
}

// Returns whether one rank of a tp group can do the row's work for all ranks: if tokens are drawn
// from the row and it has no other records of logits, which every rank makes.
static int is_for_one_rank(const rm_out_row *out) {
  const rm_sequence_group *group = out->seq->group;
  if (group->top_logprobs || group->logits_out || group->score_sampling || group->external_draws)
    return 0;
  return out->target < 0 || !(group->prompt_top || group->want_token_ranks);
}

static rm_logits_pass pass_at(const rm_runner *runner, int64_t first) {
  rm_logits_pass pass = {first, rm_min64(runner->shape.n_out - first, runner->max_out_rows), 0, 0,
                         runner->rank.tp != NULL};
  for (int64_t i = 0; i < pass.n; i++) {
    const rm_out_row *out = out_row(runner, &pass, i);
    pass.has_logits |= needs_logits(out);
    pass.has_targets |= out->target >= 0;
    pass.own_rows &= is_for_one_rank(out);
  }
  return pass;
}

static rm_code run_lm_head(rm_runner *runner, const char *hidden, const rm_logits_pass *pass,
                           rm_error *err) {
  const rm_step_buffer *b = &runner->step;
  const int64_t first = pass->first;
  const rm_head head = {
      .hidden = hidden + (size_t)(first * runner->options.spec->hidden_size) *
                             rm_dtype_bytes(runner->options.model.dtype),
      .rows = pass->n,
      .ld_logits = runner->ld_logits,
      .own_rows = pass->own_rows,
      .logits = pass->has_logits ? runner->logits : NULL,
      .stats = runner->stats,
      .target_logprobs =
          pass->has_targets ? rm_on_device(runner, b->output.target_logprobs + first) : NULL,
      .targets = pass->has_targets ? rm_on_device(runner, b->targets + first) : NULL,
      .host_targets = b->targets + first,
      .row_flags = rm_on_device(runner, b->out_flags + first),
  };
  return rm_model_head(runner->model, rm_store_weights(runner->store), &head, err);
}

// -------------------------------------------------------------------------------- ops over logits
// Rows [row, row + n) of the pass.
static void run_sample(rm_runner *runner, const rm_logits_pass *pass, int64_t row, int64_t n,
                       int64_t ld_logits, const rm_sample_params *params, int32_t *tokens,
                       float *logprobs, float *sampling_logprobs, int32_t *kept) {
  const rm_sample_args args = {
      .tokens = tokens,
      .logprobs = logprobs,
      .sampling_logprobs = sampling_logprobs,
      .kept = kept,
      .logits = runner->logits + row * runner->ld_logits,
      .stats = runner->stats + 2 * row,
      .params = params,
      .row_flags = rm_on_device(runner, runner->step.out_flags + pass->first + row),
      .rows = n,
      .vocab = runner->options.spec->vocab_size,
      .ld_logits = ld_logits,
  };
  runner->kernels->sample(rm_model_ctx(runner->model), &args);
}

static void run_ranks(rm_runner *runner, int64_t row, int64_t n, int64_t ld_logits,
                      const int32_t *tokens, int32_t *ranks) {
  const rm_ranks_args args = {
      .ranks = ranks,
      .logits = runner->logits + row * runner->ld_logits,
      .tokens = tokens,
      .rows = n,
      .vocab = runner->options.spec->vocab_size,
      .ld_logits = ld_logits,
  };
  runner->kernels->ranks(rm_model_ctx(runner->model), &args);
}

// Writes the records at `ids` and `logprobs`, [n][k], as many rows at a time as fit into the
// results.
static rm_code top_logprobs(rm_runner *runner, int64_t row, int64_t n, int64_t k, int32_t *ids,
                            float *logprobs, rm_error *err) {
  rm_results *results = &runner->results;
  const size_t each = (size_t)k * sizeof(float),
               most = (rm_results_room(results) - 4 * RM_RESULT_ALIGN) / (2 * each);
  for (int64_t done = 0, rows; done < n; done += rows) {
    rows = (size_t)(n - done) < most ? n - done : (int64_t)most;
    const size_t bytes = (size_t)rows * each;
    const rm_code code = rm_results_reserve(results, 2, 2 * bytes, err);
    if (code) return code;
    const rm_top_logprobs_args args = {
        .ids = rm_results_output(results, ids + done * k, bytes),
        .logprobs = rm_results_output(results, logprobs + done * k, bytes),
        .logits = runner->logits + (row + done) * runner->ld_logits,
        .stats = runner->stats + 2 * (row + done),
        .rows = rows,
        .vocab = runner->options.spec->vocab_size,
        .ld_logits = runner->ld_logits,
        .k = k,
    };
    runner->kernels->top_logprobs(rm_model_ctx(runner->model), &args);
  }
  return RM_OK;
}

// ---------------------------------------------------------------------------- parameters of draws
// Returns the bytes of a draw's lists (banned tokens and edits) in the results' buffer.
static size_t list_bytes(const rm_sample_params *params) {
  const size_t banned = (size_t)params->n_banned * sizeof *params->banned,
               edits = (size_t)params->n_edits * sizeof *params->edits;
  return (banned ? banned + RM_RESULT_ALIGN : 0) + (edits ? edits + RM_RESULT_ALIGN : 0);
}

// Puts the lists where the op reads them. Their room is reserved.
static void put_lists(rm_results *results, rm_sample_params *params) {
  const size_t banned = (size_t)params->n_banned * sizeof *params->banned,
               edits = (size_t)params->n_edits * sizeof *params->edits;
  if (banned) params->banned = rm_results_input(results, params->banned, banned);
  if (edits) params->edits = rm_results_input(results, params->edits, edits);
}

// ----------------------------------------------------------------------------- records of prompts
// Returns the end of the rows from i on that belong to one prompt, with consecutive positions.
static int64_t prompt_run(const rm_plan *plan, int64_t i, int64_t end) {
  const rm_out_row *first = &plan->outs[i];
  int64_t at = i + 1;
  while (at < end && plan->outs[at].seq == first->seq && plan->outs[at].target >= 0) at++;
  return at;
}

// Sampling logprobs of rows [row, row + n) of a scored prompt, whose tokens are known.
static rm_code score_sampling(rm_runner *runner, const rm_logits_pass *pass, int64_t row, int64_t n,
                              rm_error *err) {
  rm_results *results = &runner->results;
  const rm_out_row *out = out_row(runner, pass, row);
  const size_t given = (size_t)n * sizeof *runner->params, taken = (size_t)n * sizeof(float);
  rm_sample_params each = rm_params_of(out->seq);
  const rm_code code = rm_results_reserve(results, 2, given + taken + list_bytes(&each), err);
  if (code) return code;
  put_lists(results, &each);
  for (int64_t i = 0; i < n; i++) {
    runner->params[i] = each;
    runner->params[i].forced = out[i].target;
  }
  const rm_sample_params *params = rm_results_input(results, runner->params, given);
  run_sample(runner, pass, row, n, runner->ld_logits, params, runner->unused_tokens,
             runner->unused_logprobs,
             rm_results_output(results, out->seq->group->prompt_sampling + out->position, taken),
             NULL);
  return RM_OK;
}

static rm_code rank_prompt(rm_runner *runner, const rm_logits_pass *pass, int64_t row, int64_t n,
                           rm_error *err) {
  const rm_out_row *out = out_row(runner, pass, row);
  const size_t bytes = (size_t)n * sizeof(int32_t);
  const rm_code code = rm_results_reserve(&runner->results, 1, bytes, err);
  if (code) return code;
  run_ranks(
      runner, row, n, runner->ld_logits,
      rm_on_device(runner, runner->step.targets + pass->first + row),
      rm_results_output(&runner->results, out->seq->group->prompt_ranks + out->position, bytes));
  return RM_OK;
}

// Records from the logits of rows [row, row + n) of one prompt.
static rm_code run_prompt(rm_runner *runner, const rm_logits_pass *pass, int64_t row, int64_t n,
                          rm_error *err) {
  const rm_out_row *out = out_row(runner, pass, row);
  rm_sequence_group *group = out->seq->group;
  const int64_t k = group->prompt_top, at = out->position;
  const rm_sample_params params = rm_params_of(out->seq);
  const int64_t room = (int64_t)((rm_results_room(&runner->results) - list_bytes(&params)) /
                                 (sizeof(rm_sample_params) + sizeof(float) + RM_RESULT_ALIGN));
  const int64_t most = rm_min64(runner->max_draws, rm_max64(room / 2, 1));
  rm_code code = RM_OK;
  if (k)
    code = top_logprobs(runner, row, n, k, group->prompt_top_ids + at * k,
                        group->prompt_top_logprobs + at * k, err);
  if (!code && group->want_token_ranks) code = rank_prompt(runner, pass, row, n, err);
  for (int64_t i = 0; i < n && !code && group->score_sampling; i += most)
    code = score_sampling(runner, pass, row + i, rm_min64(n - i, most), err);
  return code;
}

static rm_code run_prompts(rm_runner *runner, const rm_logits_pass *pass, rm_error *err) {
  rm_code code = RM_OK;
  for (int64_t i = 0, end; i < pass->n && !code; i = end) {
    end = i + 1;
    if (out_row(runner, pass, i)->target < 0) continue;
    end = prompt_run(runner->plan, pass->first + i, pass->first + pass->n) - pass->first;
    code = run_prompt(runner, pass, i, end - i, err);
  }
  return code;
}

// ------------------------------------------------------------------------------------------ draws
// Returns the end of the longest run of draws from d on whose parameters fit: from consecutive rows
// (*step 1) or from one row (*step 0).
static int64_t draw_run(const rm_runner *runner, int64_t d, int64_t end, int *step, size_t *given) {
  const rm_plan *plan = runner->plan;
  const rm_sample_params *params = runner->step.params;
  const size_t room = rm_results_room(&runner->results) - 2 * RM_RESULT_ALIGN;
  int64_t at = d + 1;
  *step = at < end && draw_at(plan, at).out == draw_at(plan, d).out ? 0 : 1;
  *given = sizeof *params + list_bytes(&params[d]);
  while (at < end && at - d < runner->max_draws &&
         draw_at(plan, at).out == draw_at(plan, at - 1).out + *step) {
    const size_t more = sizeof *params + list_bytes(&params[at]);
    if (more > room - *given) break;
    *given += more;
    at++;
  }
  return at;
}

// Parameters of draws [d, end) for the op: those in the step buffer, unless they have lists, which
// go through the results.
static rm_code params_of(rm_runner *runner, int64_t d, int64_t end, size_t given,
                         const rm_sample_params **out, rm_error *err) {
  const rm_sample_params *params = runner->step.params + d;
  const int64_t n = end - d;
  int any = 0;
  for (int64_t i = 0; i < n; i++) any |= list_bytes(&params[i]) != 0;
  *out = rm_on_device(runner, params);
  if (!any) return RM_OK;
  const rm_code code = rm_results_reserve(&runner->results, 1, given, err);
  if (code) return code;
  memcpy(runner->params, params, (size_t)n * sizeof *params);
  for (int64_t i = 0; i < n; i++) put_lists(&runner->results, &runner->params[i]);
  *out = rm_results_input(&runner->results, runner->params, (size_t)n * sizeof *params);
  return RM_OK;
}

static rm_code run_draws(rm_runner *runner, const rm_logits_pass *pass, int64_t d, int64_t end,
                         int step, size_t given, rm_error *err) {
  const rm_plan *plan = runner->plan;
  const rm_step_output *b = &runner->step.output;
  const int64_t first = draw_at(plan, d).out - pass->first, n = end - d,
                ld_logits = step ? runner->ld_logits : 0;
  const rm_sample_params *params;
  int32_t *tokens = rm_on_device(runner, b->tokens + d);
  int with_ranks = runner->shape.with_token_ranks, with_kept = 0;
  const rm_code code = params_of(runner, d, end, given, &params, err);
  if (code) return code;
  for (int64_t i = d; i < end; i++) {
    const rm_sequence_group *group = draw_at(plan, i).seq->group;
    with_ranks |= group->want_token_ranks;
    with_kept |= group->want_kept;
  }
  run_sample(runner, pass, first, n, ld_logits, params, tokens,
             rm_on_device(runner, b->logprobs + d), rm_on_device(runner, b->sampling_logprobs + d),
             with_kept ? rm_on_device(runner, b->kept + d) : NULL);
  if (with_ranks)
    run_ranks(runner, first, n, ld_logits, tokens, rm_on_device(runner, b->ranks + d));
  return RM_OK;
}

// Writes the top-k of a draw's row to the record of the token that will be appended. Draws from one
// row have the same top-k, which commit copies.
static rm_code top_of_draw(rm_runner *runner, const rm_logits_pass *pass, int64_t d,
                           rm_error *err) {
  const rm_draw draw = draw_at(runner->plan, d);
  rm_sequence *seq = draw.seq;
  const int64_t k = seq->group->top_logprobs, at = seq->n_tokens * k;
  if (!k || (d > 0 && draw_at(runner->plan, d - 1).out == draw.out)) return RM_OK;
  return top_logprobs(runner, draw.out - pass->first, 1, k, seq->top_ids + at,
                      seq->top_logprobs + at, err);
}

static int64_t draws_before(const rm_runner *runner, int64_t d, int64_t out) {
  while (d < runner->shape.n_draws && draw_at(runner->plan, d).out < out) d++;
  return d;
}

// Returns the end of the draws from rank r's share of a pass's rows; d is the first one.
static int64_t share_end(const rm_runner *runner, const rm_logits_pass *pass, int64_t d, int r) {
  const rm_range rows = rm_model_own_rows(runner->model, pass->n, r);
  return draws_before(runner, d, pass->first + rows.first + rows.n);
}

// Makes the draws of the pass, from *d on; with own_rows only those of this rank's share. Without
// own_rows all ranks have the same logits, and only ranks that keep records draw.
static rm_code draw_tokens(rm_runner *runner, const rm_logits_pass *pass, int64_t *d,
                           rm_error *err) {
  int64_t first = *d, end = draws_before(runner, first, pass->first + pass->n);
  rm_code code = RM_OK;
  *d = end;
  if (!pass->own_rows && !runner->options.keeps_records) return RM_OK;
  for (int r = 0; pass->own_rows && r <= rm_comm_rank(runner->rank.tp); r++) {
    first = r ? end : first;
    end = share_end(runner, pass, first, r);
  }
  for (int64_t at = first, stop; at < end && !code; at = stop) {
    int step;
    size_t given;
    stop = draw_run(runner, at, end, &step, &given);
    code = run_draws(runner, pass, at, stop, step, given, err);
  }
  for (int64_t at = first; at < end && !code; at++) code = top_of_draw(runner, pass, at, err);
  return code;
}

// All-gathers n draws from d on, of which rank r of the tp group has made the next counts[r].
static rm_code share(rm_runner *runner, const int64_t *counts, int64_t d, int64_t n,
                     rm_error *err) {
  const rm_step_output *b = &runner->step.output;
  rm_drawn *drawn = runner->drawn;
  for (int64_t i = 0; i < n; i++)
    drawn[i] = (rm_drawn){b->tokens[d + i], b->ranks[d + i], b->logprobs[d + i],
                          b->sampling_logprobs[d + i]};
  const rm_code code =
      rm_comm_gather_rows(runner->rank.tp, NULL, drawn, counts, sizeof *drawn, err);
  for (int64_t i = 0; i < n && !code; i++) {
    b->tokens[d + i] = drawn[i].token;
    b->ranks[d + i] = drawn[i].rank;
    b->logprobs[d + i] = drawn[i].logprob;
    b->sampling_logprobs[d + i] = drawn[i].sampling_logprob;
  }
  return code;
}

rm_code rm_share_draws(rm_runner *runner, rm_error *err) {
  const rm_comm *tp = runner->rank.tp;
  int64_t counts[RM_MAX_TP];
  rm_code code = RM_OK;
  for (int64_t first = 0, d = 0; tp && first < runner->shape.n_out && !code;
       first += runner->max_out_rows) {
    const rm_logits_pass pass = pass_at(runner, first);
    const int64_t from = d;
    for (int r = 0; r < rm_comm_size(tp); r++) {
      const int64_t end = share_end(runner, &pass, d, r);
      counts[r] = end - d;
      d = end;
    }
    if (pass.own_rows && d > from) code = share(runner, counts, from, d - from, err);
  }
  return code;
}

// --------------------------------------------------------------------- rows of logits for callers
static int is_handed_out(const rm_out_row *out) {
  return out->seq->group->logits_out != NULL || (out->draws && out->seq->group->external_draws);
}

static void get(rm_runner *runner, float *to, const float *from, int64_t n) {
  runner->device->copy_to_host(runner->device->self, to, from, (size_t)n * sizeof *to);
}

// Copies a row that the external scheduler draws from, and its stats, to the scheduler's memory;
// top logprobs go into the records.
static rm_code hand_to_scheduler(rm_runner *runner, const rm_logits_pass *pass, int64_t i,
                                 rm_error *err) {
  const rm_plan *plan = runner->plan;
  const int64_t vocab = runner->options.spec->vocab_size;
  rm_sequence *seq = out_row(runner, pass, i)->seq;
  const int64_t to = seq->external_row, k = seq->group->top_logprobs, at = seq->n_tokens * k;
  get(runner, plan->external_logits + to * vocab, runner->logits + i * runner->ld_logits, vocab);
  get(runner, plan->external_stats + 2 * to, runner->stats + 2 * i, 2);
  return k ? top_logprobs(runner, i, 1, k, seq->top_ids + at, seq->top_logprobs + at, err) : RM_OK;
}

// The caller's memory is not pinned: a copy to it waits inside the driver, without a timeout and
// without checking for lost ranks. So this waits for the queue first; the work enqueued after it
// does not wait for other ranks until the next lm_head.
static rm_code hand_out(rm_runner *runner, const rm_logits_pass *pass, rm_error *err) {
  const int64_t vocab = runner->options.spec->vocab_size;
  int any = 0;
  for (int64_t i = 0; i < pass->n && !any; i++) any = is_handed_out(out_row(runner, pass, i));
  rm_code code = any ? rm_rank_wait(&runner->rank, runner->device, RM_WAIT_QUEUE, err) : RM_OK;
  for (int64_t i = 0; any && i < pass->n && !code; i++) {
    const rm_out_row *out = out_row(runner, pass, i);
    float *to = out->seq->group->logits_out;
    if (to) get(runner, to + out->position * vocab, runner->logits + i * runner->ld_logits, vocab);
    if (out->draws && out->seq->group->external_draws)
      code = hand_to_scheduler(runner, pass, i, err);
  }
  return code;
}

// ------------------------------------------------------------------------------------ all of them
rm_code rm_sample_outs(rm_runner *runner, const void *hidden, rm_error *err) {
  const rm_step_shape *shape = &runner->shape;
  const int compares = !shape->padded; // rm_graphs_run compares a padded step
  const int records = runner->options.keeps_records;
  rm_code code = RM_OK;
  for (int64_t first = 0, d = 0; first < shape->n_out && !code; first += runner->max_out_rows) {
    const rm_logits_pass pass = pass_at(runner, first);
    code = run_lm_head(runner, hidden, &pass, err);
    if (!code && compares) code = rm_compare_outs(&runner->rank, err);
    if (!code && records) code = hand_out(runner, &pass, err);
    if (!code && records) code = run_prompts(runner, &pass, err);
    if (!code) code = draw_tokens(runner, &pass, &d, err);
  }
  return code || shape->n_out || !compares ? code : rm_compare_outs(&runner->rank, err);
}
