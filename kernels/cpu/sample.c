// sample.c: token choice of docs/numerics.md §7 and top-logprobs. A thread takes whole rows.
//
// Without a filter a row costs two looks at its logits: the largest, then one pass that adds up integer weights, remembering the
// sum of every 1024 so that only the piece in which the draw falls is looked at again. With top_k or top_p the weights and
// order keys are kept, and the cut is found by a radix selection: three histograms over 11, 11 and 10 bits of the key, counting
// tokens for top_k and adding weights for top_p. Sorting 150,000 logits to keep 50 would cost ten times as much.
//
// A banned token is a NaN in a copy of the logits: a NaN is never the largest, has weight 0 and the lowest key.
#include "philox.h"
#include "variant.h"

enum { PIECE = 1024, DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS };

typedef struct sample_job {
  const rm_sample_args *a;
  char *workspace;
  int64_t stride;               // bytes of one thread
} sample_job;

typedef struct row_view {       // one row's work; arrays are carved from the thread's workspace
  const rm_sample_params *params;
  const float *logits;          // [vocab], banned ones NaN
  int64_t vocab;
  float max;
  uint64_t *weights;            // [vocab↑1024]; without a filter only one sum per 1024
  uint32_t *keys;               // [vocab↑16]
  float *copy;                  // [vocab↑16]
} row_view;

static int64_t thread_bytes(int64_t vocab) {
  const int64_t padded = rm_round_up(vocab, PIECE);
  return padded * (int64_t)(sizeof(uint64_t) + sizeof(uint32_t) + sizeof(float));
}

// ------------------------------------------------------------------------------------------------ parts of a row
static float largest(const float *x, int64_t n) {
  vf max = vf_set1(-INFINITY);
  int64_t i = 0;
  for (; i + RM_LANES <= n; i += RM_LANES) max = vf_max(vf_load(x + i), max);
  if (i < n) max = vf_max(vf_pick(vi_first(n - i), vf_load_n(x + i, n - i), max), max);
  return vf_max16(max) + 0.0f;
}

// The lowest id whose logit is `value`, −1: none.
static int32_t first_equal(const float *x, int64_t n, float value) {
  for (int64_t i = 0; i < n; i++)
    if (x[i] == value) return (int32_t)i;
  return -1;
}

// Weights of tokens [from, from + n), n ≤ 1024, into out[0 … n↑16); those that fail min_p are 0.
static void piece_weights(const row_view *v, int64_t from, int64_t n, uint64_t *out) {
  const vf max = vf_set1(v->max), temperature = vf_set1(v->params->temperature), min_p = vf_set1(v->params->min_p);
  for (int64_t i = 0; i < n; i += RM_LANES) {
    const int64_t lanes = rm_min64(RM_LANES, n - i);
    const vf x = vf_add(vf_load_n(v->logits + from + i, lanes), vf_zero());
    vf e = vf_exp(vf_div(vf_sub(x, max), temperature));
    if (v->params->min_p > 0.0f) e = vf_keep(e, vf_ge(e, min_p));
    vec_token_weights(out + i, vf_keep(e, vi_first(lanes)));
  }
}

static uint64_t sum_of(const uint64_t *weights, int64_t n) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < n; i++) sum += weights[i];
  return sum;
}

// The first id in ascending order whose running sum of weights exceeds target, given what stands before `id`.
static int32_t exceeding(const uint64_t *weights, int64_t n, int64_t id, uint64_t before, uint64_t target) {
  for (int64_t i = 0; i < n; i++)
    if ((before += weights[i]) > target) return (int32_t)(id + i);
  return -1;
}

static float scaled(const row_view *v, int32_t token) { return (v->logits[token] + 0.0f - v->max) / v->params->temperature; }

static float logprob_under(const row_view *v, int32_t token, uint64_t weight, uint64_t total) {
  return weight ? rm_canon(scaled(v, token) - rm_log((float)total * 0x1p-40f)) : -INFINITY;
}

// ------------------------------------------------------------------------------------------------ without top_k and top_p
// Returns the token and its logprob; −1 when nothing can be drawn. min_p and bans are in the weights.
static int32_t draw_from_all(row_view *v, float *under) {
  uint64_t piece[PIECE], total = 0;
  for (int64_t from = 0; from < v->vocab; from += PIECE) {
    const int64_t n = rm_min64(PIECE, v->vocab - from);
    piece_weights(v, from, n, piece);
    total += v->weights[from / PIECE] = sum_of(piece, n);
  }
  if (total == 0) return -1;
  int32_t token = v->params->forced;
  if (token < 0) {
    const uint64_t target = rm_mul_high(total, rm_philox_u64(v->params->seed, v->params->counter));
    uint64_t before = 0;
    int64_t at = 0;
    while (before + v->weights[at] <= target) before += v->weights[at++];
    const int64_t n = rm_min64(PIECE, v->vocab - at * PIECE);
    piece_weights(v, at * PIECE, n, piece);
    token = exceeding(piece, n, at * PIECE, before, target);
  }
  piece_weights(v, token, 1, piece);
  *under = logprob_under(v, token, piece[0], total);
  return token;
}

// ------------------------------------------------------------------------------------------------ with them
typedef struct cut {            // tokens of a higher key stay, and `ties` of this key, lowest ids first
  uint32_t key;
  int64_t ties;
} cut;

// The shortest prefix, in descending key and ascending id, whose measure reaches `need`: a number of tokens, or a sum of
// weights. need is at most the measure of all.
static cut select_prefix(const row_view *v, uint64_t need, int by_weight) {
  uint64_t sums[DIGITS];
  uint32_t prefix = 0;
  uint64_t above = 0;           // measure of the keys known to be higher
  int64_t equal = 0;
  for (int shift = 21, bits = 32 - 21;; bits = shift, shift = rm_max64(0, shift - DIGIT_BITS)) {
    const int width = bits < DIGIT_BITS ? bits : DIGIT_BITS;
    const uint32_t known = shift + width >= 32 ? 0 : ~0u << (shift + width);
    memset(sums, 0, sizeof sums);
    equal = 0;
    for (int64_t i = 0; i < v->vocab; i++)
      if ((v->keys[i] & known) == prefix) sums[v->keys[i] >> shift & ((1u << width) - 1)] += by_weight ? v->weights[i] : 1;
    uint32_t digit = (1u << width) - 1;
    while (digit > 0 && above + sums[digit] < need) above += sums[digit--];
    prefix |= digit << shift;
    if (shift == 0) {
      equal = (int64_t)sums[digit];
      break;
    }
  }
  if (!by_weight) return (cut){prefix, rm_min64((int64_t)(need - above), equal)};
  cut found = {prefix, 0};      // equal logits have equal weights, but ties of a cut before may be fewer
  for (int64_t i = 0; i < v->vocab && above < need; i++)
    if (v->keys[i] == prefix) {
      above += v->weights[i];
      found.ties++;
    }
  return found;
}

// Takes the tokens outside of a cut out: weight and key 0.
static void apply(row_view *v, cut c) {
  int64_t ties = 0;
  for (int64_t i = 0; i < v->vocab; i++)
    if (v->keys[i] < c.key || (v->keys[i] == c.key && ties++ >= c.ties)) {
      v->weights[i] = 0;
      v->keys[i] = 0;
    }
}

static int32_t draw_filtered(row_view *v, float *under) {
  const rm_sample_params *p = v->params;
  int64_t left = 0;
  for (int64_t from = 0; from < v->vocab; from += PIECE) piece_weights(v, from, rm_min64(PIECE, v->vocab - from), v->weights + from);
  for (int64_t i = 0; i < v->vocab; i++) {
    v->keys[i] = v->weights[i] ? rm_order_key(v->logits[i]) : 0;
    left += v->keys[i] != 0;
  }
  if (p->top_k > 0 && p->top_k < left) apply(v, select_prefix(v, (uint64_t)p->top_k, 0));
  uint64_t total = sum_of(v->weights, v->vocab);
  if (total == 0) return -1;
  if (p->top_p < 1.0f) {
    apply(v, select_prefix(v, rm_top_p_need(p->top_p, total), 1));
    total = sum_of(v->weights, v->vocab);
  }
  int32_t token = p->forced;
  if (token < 0) token = exceeding(v->weights, v->vocab, 0, 0, rm_mul_high(total, rm_philox_u64(p->seed, p->counter)));
  *under = logprob_under(v, token, v->weights[token], total);
  return token;
}

// ------------------------------------------------------------------------------------------------ rows
static void ban(row_view *v) {
  if (v->params->n_banned <= 0) return;
  memcpy(v->copy, v->logits, (size_t)v->vocab * sizeof *v->copy);
  for (int32_t i = 0; i < v->params->n_banned; i++)
    if (v->params->banned[i] >= 0 && v->params->banned[i] < v->vocab) v->copy[v->params->banned[i]] = NAN;
  v->logits = v->copy;
}

static int32_t pick_greedy(const row_view *v, float *under) {
  const int32_t likeliest = first_equal(v->logits, v->vocab, v->max);
  if (likeliest < 0 || v->params->forced < 0) {
    *under = 0.0f;
    return likeliest;
  }
  *under = v->params->forced == likeliest ? 0.0f : -INFINITY;
  return v->params->forced;
}

static void sample_row(const rm_sample_args *a, int64_t r, char *memory) {
  const rm_sample_params *params = a->params + r;
  const float *logits = a->logits + r * a->ld_logits;
  const int64_t padded = rm_round_up(a->vocab, PIECE);
  row_view v = {.params = params, .logits = logits, .vocab = a->vocab, .weights = (uint64_t *)memory};
  v.keys = (uint32_t *)(v.weights + padded);
  v.copy = (float *)(v.keys + padded);
  a->tokens[r] = -1;
  a->logprobs[r] = a->sampling_logprobs[r] = rm_float(0x7fc00000u);
  if (a->row_flags[r]) return;
  ban(&v);
  v.max = largest(v.logits, v.vocab);

  const int same = rm_samples_the_model(params, a->vocab);
  const int filtered = (params->top_k > 0 && params->top_k < a->vocab) || params->top_p < 1.0f;
  float under = 0.0f;
  int32_t token;
  if (params->temperature == 0.0f)
    token = pick_greedy(&v, &under);
  else
    token = filtered ? draw_filtered(&v, &under) : draw_from_all(&v, &under);
  if (token < 0) return;
  a->tokens[r] = token;
  a->logprobs[r] = rm_logprob(logits[token], a->stats + 2 * r);
  a->sampling_logprobs[r] = same ? a->logprobs[r] : under;
}

static void sample_task(void *arg, int thread, int n_threads) {
  const sample_job *job = arg;
  int64_t from, to;
  rm_split(job->a->rows, thread, n_threads, &from, &to);
  for (int64_t r = from; r < to; r++) sample_row(job->a, r, job->workspace + thread * job->stride);
}

void RM_FN(sample)(const rm_ctx *ctx, const rm_sample_args *a) {
  sample_job job = {.a = a, .workspace = ctx->workspace, .stride = thread_bytes(a->vocab)};
  rm_parallel(ctx, a->rows * a->vocab * 3, sample_task, &job);
}

size_t RM_FN(sample_workspace)(const rm_limits *l) { return (size_t)(l->n_threads * thread_bytes(l->vocab)); }

// ------------------------------------------------------------------------------------------------ top logprobs
typedef struct top_list {       // the best so far, best first
  int32_t *ids;
  const float *logits;
  int64_t k, n;
  uint32_t worst;               // key of the last one when the list is full
} top_list;

static void offer(top_list *top, int64_t id) {
  const uint32_t key = rm_order_key(top->logits[id]);
  if (top->n == top->k && key <= top->worst) return;
  int64_t i = top->n < top->k ? top->n++ : top->n - 1;
  for (; i > 0 && rm_order_key(top->logits[top->ids[i - 1]]) < key; i--) top->ids[i] = top->ids[i - 1];
  top->ids[i] = (int32_t)id;
  top->worst = rm_order_key(top->logits[top->ids[top->n - 1]]);
}

static void top_row(const rm_top_logprobs_args *a, int64_t r) {
  top_list top = {.ids = a->ids + r * a->k, .logits = a->logits + r * a->ld_logits, .k = a->k};
  int64_t v = 0;
  for (; v < a->vocab && (top.n < top.k || top.worst == 0); v++) offer(&top, v);
  for (; v + RM_LANES <= a->vocab; v += RM_LANES) {  // few of the rest are better than the worst of the list
    const vf worst = vf_set1(top.logits[top.ids[top.k - 1]]);
    for (uint32_t better = vi_lanes(vf_gt(vf_load(top.logits + v), worst)); better; better &= better - 1)
      offer(&top, v + __builtin_ctz(better));
  }
  for (; v < a->vocab; v++) offer(&top, v);
  for (int64_t k = 0; k < a->k; k++) a->logprobs[r * a->k + k] = rm_logprob(top.logits[top.ids[k]], a->stats + 2 * r);
}

static void top_task(void *arg, int thread, int n_threads) {
  const rm_top_logprobs_args *a = arg;
  int64_t from, to;
  rm_split(a->rows, thread, n_threads, &from, &to);
  for (int64_t r = from; r < to; r++) top_row(a, r);
}

void RM_FN(top_logprobs)(const rm_ctx *ctx, const rm_top_logprobs_args *a) {
  if (a->k == 0) return;
  rm_top_logprobs_args args = *a;
  rm_parallel(ctx, a->rows * a->vocab, top_task, &args);
}
