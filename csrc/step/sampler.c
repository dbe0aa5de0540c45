// sampler.c: computes tokens and logprobs from the hidden states of the out rows. lm_head processes
// max_out_rows rows at a time, which bounds the memory of logits for a long prompt with logprobs.
// Logits are stored only if more than the logprob of a target is requested.
//
// A run of outs takes one call of each op. A draw is a call of the op `sample`, and so is the
// sampling logprob of a scored token, which the parameters force. The step buffer has one element
// per out for each result; only top logprobs, whose sizes differ, go to the records directly.
#include "scheduler/logit_edits.h"
#include "step/runner.h"

// The rows of one call of lm_head: [first, first + n) of outs. Row indices below are relative to
// first.
typedef struct rm_logits_pass {
  int64_t first, n;
  int has_logits, has_targets; // whether logits are needed; whether a target's logprob is needed
  int samples; // whether an out samples
  int own_rows; // whether this rank gets only the logits of its share of the rows
} rm_logits_pass;

// Returns an out of the pass, or the padding of a captured step.
static const rm_out_row *out_row(const rm_runner *runner, const rm_logits_pass *pass, int64_t i) {
  static rm_sequence_group nobody_group = {.n = 1};
  static rm_sequence nobody = {.group = &nobody_group};
  static const rm_out_row padding = {.seq = &nobody, .target = -1, .draws = 1, .samples = 1};
  const rm_plan *plan = runner->plan;
  return pass->first + i < plan->n_out ? &plan->outs[pass->first + i] : &padding;
}

static int needs_logits(const rm_out_row *out) {
  const rm_sequence_group *group = out->seq->group;
  return out->draws || out->samples || group->logits_out || group->prompt_top ||
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
  rm_logits_pass pass = {.first = first,
                         .n = rm_min64(runner->shape.n_out - first, runner->max_out_rows),
                         .own_rows = runner->rank.tp != NULL};
  for (int64_t i = 0; i < pass.n; i++) {
    const rm_out_row *out = out_row(runner, &pass, i);
    pass.has_logits |= needs_logits(out);
    pass.has_targets |= out->target >= 0;
    pass.samples |= out->samples;
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
  return rm_model_head(runner->model, runner->store->serving.block, &head, err);
}

// ------------------------------------------------------------------------------------ runs of outs
// Returns the bytes of the lists (banned tokens and edits) of params[i] in the results' buffer.
static size_t list_bytes(const rm_sample_params *params, int64_t i) {
  const size_t banned = (size_t)params[i].n_banned * sizeof *params->banned,
               edits = (size_t)params[i].n_edits * sizeof *params->edits;
  return (banned ? banned + RM_RESULT_ALIGN : 0) + (edits ? edits + RM_RESULT_ALIGN : 0);
}

// Whether params[i] has the lists of the row before it, as rows of one request may.
static int shares_lists(const rm_sample_params *params, int64_t i) {
  return i > 0 && params[i].banned == params[i - 1].banned &&
         params[i].n_banned == params[i - 1].n_banned && params[i].edits == params[i - 1].edits &&
         params[i].n_edits == params[i - 1].n_edits;
}

// Returns the end of the run from out i on. Its outs sample, and their parameters fit into the
// results' buffer, or they do not. *lists: the bytes of their lists.
static int64_t run_end(const rm_runner *runner, const rm_logits_pass *pass, int64_t i, int64_t end,
                       size_t *lists) {
  const rm_sample_params *params = runner->step.params + pass->first + i;
  const int samples = out_row(runner, pass, i)->samples;
  int64_t n = 0;
  for (*lists = 0; i + n < end && out_row(runner, pass, i + n)->samples == samples; n++) {
    const size_t more = samples && !shares_lists(params, n) ? list_bytes(params, n) : 0,
                 others = (size_t)(n + 1) * sizeof *params + 2 * RM_RESULT_ALIGN;
    if (n && *lists + more + others > rm_results_room(&runner->results)) break;
    *lists += more;
  }
  return i + n;
}

// Sets *out to the parameters of n outs for the op: those in the step buffer, unless they have
// lists, which go through the results.
static rm_code params_of(rm_runner *runner, const rm_sample_params *params, int64_t n, size_t lists,
                         const rm_sample_params **out, rm_error *err) {
  rm_results *results = &runner->results;
  rm_sample_params *copies = runner->params;
  *out = rm_on_device(runner, params);
  if (!lists) return RM_OK;
  const size_t bytes = (size_t)n * sizeof *params;
  RM_TRY(rm_results_reserve(results, 1, bytes + lists, err));
  memcpy(copies, params, bytes);
  for (int64_t i = 0; i < n; i++) {
    const rm_sample_params *given = &params[i];
    if (shares_lists(params, i)) {
      copies[i].banned = copies[i - 1].banned;
      copies[i].edits = copies[i - 1].edits;
      continue;
    }
    if (given->n_banned)
      copies[i].banned =
          rm_results_input(results, given->banned, (size_t)given->n_banned * sizeof *given->banned);
    if (given->n_edits)
      copies[i].edits =
          rm_results_input(results, given->edits, (size_t)given->n_edits * sizeof *given->edits);
  }
  *out = rm_results_input(results, copies, bytes);
  return RM_OK;
}

typedef struct rm_top_record { // of the top logprobs of an out; k 0: none
  int64_t k;
  int32_t *ids; // [k], like the next
  float *logprobs;
} rm_top_record;

static rm_top_record top_of(const rm_out_row *out) {
  const rm_sequence *seq = out->seq;
  const rm_sequence_group *group = seq->group;
  const int64_t of_draw = group->top_logprobs, of_prompt = group->prompt_top;
  if (out->draws && of_draw)
    return (rm_top_record){of_draw, seq->top_ids + seq->n_tokens * of_draw,
                           seq->top_logprobs + seq->n_tokens * of_draw};
  if (out->target >= 0 && of_prompt)
    return (rm_top_record){of_prompt, group->prompt_top_ids + out->position * of_prompt,
                           group->prompt_top_logprobs + out->position * of_prompt};
  return (rm_top_record){0};
}

// Writes n records from row i on, which follow each other in memory, as many at a time as fit into
// the results.
static rm_code top_logprobs(rm_runner *runner, int64_t i, int64_t n, const rm_top_record *top,
                            rm_error *err) {
  rm_results *results = &runner->results;
  const int64_t k = top->k;
  const size_t each = (size_t)k * sizeof(float),
               most = (rm_results_room(results) - 4 * RM_RESULT_ALIGN) / (2 * each);
  for (int64_t done = 0, rows; done < n; done += rows) {
    rows = (size_t)(n - done) < most ? n - done : (int64_t)most;
    const size_t bytes = (size_t)rows * each;
    RM_TRY(rm_results_reserve(results, 2, 2 * bytes, err));
    const rm_top_logprobs_args args = {
        .ids = rm_results_output(results, top->ids + done * k, bytes),
        .logprobs = rm_results_output(results, top->logprobs + done * k, bytes),
        .logits = runner->logits + (i + done) * runner->ld_logits,
        .stats = runner->stats + 2 * (i + done),
        .rows = rows,
        .vocab = runner->options.spec->vocab_size,
        .ld_logits = runner->ld_logits,
        .k = k,
    };
    runner->kernels->top_logprobs(rm_model_ctx(runner->model), &args);
  }
  return RM_OK;
}

static rm_code run_top_logprobs(rm_runner *runner, const rm_logits_pass *pass, int64_t i,
                                int64_t end, rm_error *err) {
  for (int64_t next; i < end; i = next) {
    const rm_top_record top = top_of(out_row(runner, pass, i));
    for (next = i + 1; next < end; next++) {
      const rm_top_record after = top_of(out_row(runner, pass, next));
      if (after.k != top.k || (top.k && after.ids != top.ids + (next - i) * top.k)) break;
    }
    if (top.k) RM_TRY(top_logprobs(runner, i, next - i, &top, err));
  }
  return RM_OK;
}

static rm_code sample(rm_runner *runner, int64_t at, int64_t row, int64_t n, size_t lists,
                      int with_kept, rm_error *err) {
  const rm_step_buffer *b = &runner->step;
  const rm_step_output *out = &b->output;
  const rm_sample_params *params;
  RM_TRY(params_of(runner, b->params + at, n, lists, &params, err));
  const rm_sample_args args = {
      .tokens = rm_on_device(runner, out->tokens + at),
      .logprobs = rm_on_device(runner, out->logprobs + at),
      .sampling_logprobs = rm_on_device(runner, out->sampling_logprobs + at),
      .kept = with_kept ? rm_on_device(runner, out->kept + at) : NULL,
      .logits = runner->logits + row * runner->ld_logits,
      .stats = runner->stats + 2 * row,
      .params = params,
      .row_flags = rm_on_device(runner, b->out_flags + at),
      .rows = n,
      .vocab = runner->options.spec->vocab_size,
      .ld_logits = runner->ld_logits,
  };
  runner->kernels->sample(rm_model_ctx(runner->model), &args);
  return RM_OK;
}

// The ops over the logits of a run.
static rm_code run_ops(rm_runner *runner, const rm_logits_pass *pass, int64_t i, int64_t end,
                       size_t lists, rm_error *err) {
  const rm_step_buffer *b = &runner->step;
  const int samples = out_row(runner, pass, i)->samples;
  const int64_t at = pass->first + i, n = end - i;
  int with_ranks = runner->shape.with_token_ranks, with_kept = 0;
  for (int64_t row = i; row < end; row++) {
    const rm_sequence_group *group = out_row(runner, pass, row)->seq->group;
    with_ranks |= group->want_token_ranks;
    with_kept |= group->want_kept;
  }
  RM_TRY(samples ? sample(runner, at, i, n, lists, with_kept, err) : RM_OK);
  const rm_ranks_args ranks = {
      .ranks = rm_on_device(runner, b->output.ranks + at),
      .logits = runner->logits + i * runner->ld_logits,
      .tokens = rm_on_device(runner, (samples ? b->output.tokens : b->targets) + at),
      .rows = n,
      .vocab = runner->options.spec->vocab_size,
      .ld_logits = runner->ld_logits,
  };
  if (with_ranks) runner->kernels->ranks(rm_model_ctx(runner->model), &ranks);
  return run_top_logprobs(runner, pass, i, end, err);
}

// With own_rows this rank takes its share of the rows. Otherwise all ranks have the same logits,
// and only ranks that keep records use them.
static rm_code run_pass(rm_runner *runner, const rm_logits_pass *pass, rm_error *err) {
  rm_range rows = {0, runner->options.keeps_records ? pass->n : 0};
  if (pass->own_rows)
    rows = rm_model_own_rows(runner->model, pass->n, rm_comm_rank(runner->rank.tp));
  size_t lists;
  for (int64_t i = rows.first, end; i < rows.first + rows.n && pass->has_logits; i = end) {
    end = run_end(runner, pass, i, rows.first + rows.n, &lists);
    RM_TRY(run_ops(runner, pass, i, end, lists, err));
  }
  return RM_OK;
}

// ------------------------------------------------------------------------- the ranks of a tp group
// All-gathers the draws of a pass, of which rank r of the tp group has made the next counts[r].
static rm_code share(rm_runner *runner, const rm_logits_pass *pass, const int64_t *counts,
                     rm_error *err) {
  const rm_step_output *b = &runner->step.output;
  const int64_t first = pass->first;
  rm_drawn *drawn = runner->drawn;
  for (int64_t i = 0; i < pass->n; i++)
    drawn[i] = (rm_drawn){b->tokens[first + i], b->ranks[first + i], b->logprobs[first + i],
                          b->sampling_logprobs[first + i]};
  RM_TRY(rm_comm_gather_rows(runner->rank.tp, NULL, drawn, counts, sizeof *drawn, err));
  for (int64_t i = 0; i < pass->n; i++) {
    b->tokens[first + i] = drawn[i].token;
    b->ranks[first + i] = drawn[i].rank;
    b->logprobs[first + i] = drawn[i].logprob;
    b->sampling_logprobs[first + i] = drawn[i].sampling_logprob;
  }
  return RM_OK;
}

rm_code rm_share_draws(rm_runner *runner, rm_error *err) {
  const rm_comm *tp = runner->rank.tp;
  int64_t counts[RM_MAX_TP];
  for (int64_t first = 0; tp && first < runner->shape.n_out; first += runner->max_out_rows) {
    const rm_logits_pass pass = pass_at(runner, first);
    for (int r = 0; r < rm_comm_size(tp); r++)
      counts[r] = rm_model_own_rows(runner->model, pass.n, r).n;
    if (pass.own_rows && pass.samples) RM_TRY(share(runner, &pass, counts, err));
  }
  return RM_OK;
}

// --------------------------------------------------------------------- rows of logits for callers
static void get(rm_runner *runner, float *to, const float *from, int64_t n) {
  runner->device->copy_to_host(runner->device->self, to, from, (size_t)n * sizeof *to);
}

// The caller's memory is not pinned: a copy to it waits inside the driver, without a timeout and
// without checking for lost ranks. So this waits for the queue first; the work enqueued after it
// does not wait for other ranks until the next lm_head.
static rm_code hand_out(rm_runner *runner, const rm_logits_pass *pass, rm_error *err) {
  const rm_plan *plan = runner->plan;
  const int64_t vocab = runner->options.spec->vocab_size;
  int waits = 1;
  for (int64_t i = 0; i < pass->n; i++) {
    const rm_out_row *out = out_row(runner, pass, i);
    const int64_t row = out->seq->external_row;
    if (!out->seq->group->logits_out && (!out->draws || out->samples)) continue;
    if (waits) RM_TRY(rm_rank_wait(&runner->rank, runner->device, RM_WAIT_QUEUE, err));
    waits = 0;
    float *to = out->draws ? plan->external_logits + row * vocab
                           : out->seq->group->logits_out + out->position * vocab;
    get(runner, to, runner->logits + i * runner->ld_logits, vocab);
    if (out->draws) get(runner, plan->external_stats + 2 * row, runner->stats + 2 * i, 2);
  }
  return RM_OK;
}

// ------------------------------------------------------------------------------------ all of them
rm_code rm_sample_outs(rm_runner *runner, const void *hidden, rm_error *err) {
  const rm_step_shape *shape = &runner->shape;
  const int compares = !shape->padded; // rm_graphs_run compares a padded step
  for (int64_t first = 0; first < shape->n_out; first += runner->max_out_rows) {
    const rm_logits_pass pass = pass_at(runner, first);
    RM_TRY(run_lm_head(runner, hidden, &pass, err));
    if (compares) RM_TRY(rm_compare_outs(&runner->rank, err));
    if (runner->options.keeps_records) RM_TRY(hand_out(runner, &pass, err));
    RM_TRY(run_pass(runner, &pass, err));
  }
  return shape->n_out || !compares ? RM_OK : rm_compare_outs(&runner->rank, err);
}
