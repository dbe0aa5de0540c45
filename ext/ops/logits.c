// logits.c: logits and the tokens that are drawn from them. See ops.h.
#include "ops.h"

#include <string.h>

#include "base/memory.h"

// (logits | None, stats, target_logprobs | None, targets | None, row_flags, x, w, vocab, pairs |
// None, target_logits | None). With pairs, stats may be None, and vocab 0.
RM_KERNELS_METHOD(lm_head) {
  CALL(10);
  rm_lm_head_args a = {.rows = -1, .hidden = -1};
  const int in_pairs = o[8] != Py_None, has_targets = o[2] != Py_None || o[9] != Py_None;
  const int64_t vocab = a.vocab = a.ld_logits = rm_op_size_of(&c, o[7], "vocab", !in_pairs);
  a.dtype = rm_op_dtype_of(&c, o[5], "x");
  a.x = VIEW(&c, o[5], "x", rm_op_numpy_type(a.dtype), RM_ARRAY_IN, &a.rows, &a.hidden);
  int64_t elems = rm_op_packed_elems(&c, "w", vocab, a.hidden), two = 2;
  int64_t n_blocks = c.failed ? 0 : rm_round_up(vocab, RM_VOCAB_BLOCK) / RM_VOCAB_BLOCK;
  a.w = VIEW(&c, o[6], "w", rm_op_numpy_type(a.dtype), RM_ARRAY_PACKED, &elems);
  a.logits =
      VIEW(&c, o[0], "logits", NPY_FLOAT32, RM_ARRAY_WRITE | RM_ARRAY_OPTIONAL, &a.rows, &a.vocab);
  a.stats = VIEW(&c, o[1], "stats", NPY_FLOAT32,
                 RM_ARRAY_WRITE | (in_pairs ? RM_ARRAY_OPTIONAL : 0), &a.rows, &two);
  a.target_logprobs =
      VIEW(&c, o[2], "target_logprobs", NPY_FLOAT32, RM_ARRAY_WRITE | RM_ARRAY_OPTIONAL, &a.rows);
  a.targets =
      VIEW(&c, o[3], "targets", NPY_INT32, has_targets ? RM_ARRAY_IN : RM_ARRAY_OPTIONAL, &a.rows);
  a.pairs = VIEW(&c, o[8], "pairs", NPY_FLOAT32, RM_ARRAY_WRITE | RM_ARRAY_OPTIONAL, &n_blocks,
                 &a.rows, &two);
  a.target_logits =
      VIEW(&c, o[9], "target_logits", NPY_FLOAT32, RM_ARRAY_WRITE | RM_ARRAY_OPTIONAL, &a.rows);
  a.row_flags = VIEW(&c, o[4], "row_flags", NPY_UINT8, RM_ARRAY_WRITE, &a.rows);
  rm_op_in_range(&c, "targets", a.targets, a.rows, -1, vocab);
  a.ldx = a.hidden;
  RUN(lm_head, ((rm_limits){.max_rows = a.rows, .max_k = a.hidden, .vocab = vocab}), &a);
}

// (stats, target_logprobs | None, targets | None, row_flags, pairs, target_logits | None)
RM_KERNELS_METHOD(merge_pairs) {
  CALL(6);
  rm_merge_pairs_args a = {.rows = -1, .n_blocks = -1};
  int64_t two = 2;
  a.pairs = VIEW(&c, o[4], "pairs", NPY_FLOAT32, RM_ARRAY_IN, &a.n_blocks, &a.rows, &two);
  rm_op_at_least(&c, "the blocks of pairs", a.n_blocks, 1);
  a.stats = VIEW(&c, o[0], "stats", NPY_FLOAT32, RM_ARRAY_WRITE, &a.rows, &two);
  a.target_logprobs =
      VIEW(&c, o[1], "target_logprobs", NPY_FLOAT32, RM_ARRAY_WRITE | RM_ARRAY_OPTIONAL, &a.rows);
  const int flags = a.target_logprobs ? RM_ARRAY_IN : RM_ARRAY_OPTIONAL;
  a.targets = VIEW(&c, o[2], "targets", NPY_INT32, flags, &a.rows);
  a.target_logits = VIEW(&c, o[5], "target_logits", NPY_FLOAT32, flags, &a.rows);
  a.row_flags = VIEW(&c, o[3], "row_flags", NPY_UINT8, RM_ARRAY_WRITE, &a.rows);
  rm_op_in_range(&c, "targets", a.targets, a.rows, -1, a.n_blocks * RM_VOCAB_BLOCK);
  RUN(merge_pairs, ((rm_limits){.max_rows = a.rows}), &a);
}

// Per row parameters from their columns, which are the host's; owned, on a device in a mirrored
// buffer. NULL with an exception set.
static rm_sample_params *sample_params(rm_op_call *c, PyObject *const *o, int64_t rows,
                                       int64_t vocab) {
  int64_t bounds = rows + 1, n_banned = -1;
  const float *temperature = VIEW(c, o[0], "temperature", NPY_FLOAT32, RM_ARRAY_OF_HOST, &rows);
  const float *top_p = VIEW(c, o[1], "top_p", NPY_FLOAT32, RM_ARRAY_OF_HOST, &rows);
  const float *min_p = VIEW(c, o[2], "min_p", NPY_FLOAT32, RM_ARRAY_OF_HOST, &rows);
  const int32_t *top_k = VIEW(c, o[3], "top_k", NPY_INT32, RM_ARRAY_OF_HOST, &rows);
  const uint64_t *seed = VIEW(c, o[4], "seed", NPY_UINT64, RM_ARRAY_OF_HOST, &rows);
  const uint64_t *counter = VIEW(c, o[5], "counter", NPY_UINT64, RM_ARRAY_OF_HOST, &rows);
  const int32_t *forced = VIEW(c, o[6], "forced", NPY_INT32, RM_ARRAY_OF_HOST, &rows);
  const int32_t *starts = VIEW(c, o[7], "banned_starts", NPY_INT32, RM_ARRAY_OF_HOST, &bounds);
  const int32_t *banned = VIEW(c, o[8], "banned", NPY_INT32, RM_ARRAY_OF_HOST, &n_banned);
  rm_op_in_range(c, "forced", forced, rows, -1, vocab);
  rm_op_in_range(c, "banned_starts", starts, bounds, 0, n_banned + 1);
  for (int64_t r = 0; r < rows && !c->failed; r++) {
    if (starts[r + 1] < starts[r])
      rm_op_refuse(c, RM_E_REQUEST, "banned_starts", starts[r + 1], "ascending, at least",
                   starts[r]);
    if (!(temperature[r] >= 0.0f && top_p[r] > 0.0f && top_p[r] <= 1.0f && min_p[r] >= 0.0f &&
          min_p[r] <= 1.0f) &&
        !c->failed) {
      rm_raise_code(
          c->module, RM_E_REQUEST,
          "params: expected temperature >= 0, top_p in (0, 1] and min_p in [0, 1], got others in "
          "row %lld",
          (long long)r);
      c->failed = 1;
    }
  }
  if (c->failed) return NULL;
  const size_t of_params = (size_t)(rows + 1) * sizeof(rm_sample_params),
               of_banned = (size_t)n_banned * sizeof *banned;
  const int on_host = !c->self->op_device;
  rm_sample_params *params =
      on_host ? rm_alloc(of_params, 1) : rm_op_mirrored(c, of_params + of_banned);
  if (!params) {
    if (!c->failed) PyErr_NoMemory();
    c->failed = 1;
    return NULL;
  }
  if (!on_host && of_banned)
    banned = rm_op_there(c, memcpy((char *)params + of_params, banned, of_banned));
  for (int64_t r = 0; r < rows; r++)
    params[r] = (rm_sample_params){
        .temperature = temperature[r],
        .top_p = top_p[r],
        .min_p = min_p[r],
        .top_k = top_k[r],
        .seed = seed[r],
        .counter = counter[r],
        .banned = banned + starts[r],
        .n_banned = starts[r + 1] - starts[r],
        .forced = forced[r],
    };
  return params;
}

// (tokens, logprobs, sampling_logprobs, kept | None, logits, stats, row_flags, then the columns of
// sample_params)
RM_KERNELS_METHOD(sample) {
  CALL(16);
  rm_sample_args a = {.rows = -1, .vocab = -1};
  int64_t two = 2;
  a.logits = VIEW(&c, o[4], "logits", NPY_FLOAT32, RM_ARRAY_IN, &a.rows, &a.vocab);
  rm_op_at_least(&c, "vocab", a.vocab, 1);
  a.stats = VIEW(&c, o[5], "stats", NPY_FLOAT32, RM_ARRAY_IN, &a.rows, &two);
  a.row_flags = VIEW(&c, o[6], "row_flags", NPY_UINT8, RM_ARRAY_IN, &a.rows);
  a.tokens = VIEW(&c, o[0], "tokens", NPY_INT32, RM_ARRAY_WRITE, &a.rows);
  a.logprobs = VIEW(&c, o[1], "logprobs", NPY_FLOAT32, RM_ARRAY_WRITE, &a.rows);
  a.sampling_logprobs = VIEW(&c, o[2], "sampling_logprobs", NPY_FLOAT32, RM_ARRAY_WRITE, &a.rows);
  a.kept = VIEW(&c, o[3], "kept", NPY_INT32, RM_ARRAY_WRITE | RM_ARRAY_OPTIONAL, &a.rows);
  a.ld_logits = a.vocab;
  rm_sample_params *params = sample_params(&c, o + 7, a.rows, a.vocab);
  a.params = self->op_device ? rm_op_there(&c, params) : params;
  PyObject *result = NULL;
  if (!rm_op_begin(&c, (rm_limits){.max_rows = a.rows, .vocab = a.vocab})) {
    self->table->sample(&c.ctx, &a);
    result = rm_op_finish(&c);
  }
  if (!self->op_device) rm_free(params);
  return result;
}

// (ids, logprobs, logits, stats)
RM_KERNELS_METHOD(top_logprobs) {
  CALL(4);
  rm_top_logprobs_args a = {.rows = -1, .vocab = -1, .k = -1};
  int64_t two = 2;
  a.logits = VIEW(&c, o[2], "logits", NPY_FLOAT32, RM_ARRAY_IN, &a.rows, &a.vocab);
  a.stats = VIEW(&c, o[3], "stats", NPY_FLOAT32, RM_ARRAY_IN, &a.rows, &two);
  a.ids = VIEW(&c, o[0], "ids", NPY_INT32, RM_ARRAY_WRITE, &a.rows, &a.k);
  a.logprobs = VIEW(&c, o[1], "logprobs", NPY_FLOAT32, RM_ARRAY_WRITE, &a.rows, &a.k);
  if (a.k > a.vocab) rm_op_refuse(&c, RM_E_SHAPE, "k", a.k, "at most", a.vocab);
  a.ld_logits = a.vocab;
  RUN(top_logprobs, ((rm_limits){.max_rows = a.rows, .vocab = a.vocab}), &a);
}

// (ranks, logits, tokens)
RM_KERNELS_METHOD(ranks) {
  CALL(3);
  rm_ranks_args a = {.rows = -1, .vocab = -1};
  a.logits = VIEW(&c, o[1], "logits", NPY_FLOAT32, RM_ARRAY_IN, &a.rows, &a.vocab);
  a.tokens = VIEW(&c, o[2], "tokens", NPY_INT32, RM_ARRAY_IN, &a.rows);
  a.ranks = VIEW(&c, o[0], "ranks", NPY_INT32, RM_ARRAY_WRITE, &a.rows);
  rm_op_in_range(&c, "tokens", a.tokens, a.rows, -1, a.vocab);
  a.ld_logits = a.vocab;
  RUN(ranks, ((rm_limits){.max_rows = a.rows, .vocab = a.vocab}), &a);
}
