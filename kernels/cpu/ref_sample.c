// ref_sample.c: token choice of docs/numerics.md §7. Weights are integers, so they may be added in
// any order. Each pass over the vocabulary computes them again, and bisection finds a threshold,
// first over keys and then over ties.
#include "ref.h"

#include "philox.h"

typedef struct filter { // the tokens that are left, and their weights
  const float *logits;
  int64_t vocab;
  const rm_sample_params *params;
  float max; // the largest edited logit that is not banned
  uint32_t key; // tokens with a lower key are out
  int64_t ties; // of the tokens with this key only this many, those of the lowest ids, are left
} filter;

static int is_banned(const rm_sample_params *params, int64_t v) {
  for (int32_t i = 0; i < params->n_banned; i++)
    if (params->banned[i] == v) return 1;
  return 0;
}

// The logit of the draw: x of the contract.
static float edited(const rm_sample_params *params, const float *logits, int64_t v) {
  const rm_logit_edit *edit = rm_find_edit(params, v);
  return edit ? rm_edited_logit(logits[v], params, edit) : logits[v] + 0.0f;
}

static float scaled(const filter *f, int64_t v) {
  return (edited(f->params, f->logits, v) - f->max) / f->params->temperature;
}

// Steps 1 and 2: whether a token is not banned and passes min_p, and its weight.
static int enters(const filter *f, int64_t v, uint64_t *weight) {
  const float e = rm_exp(scaled(f, v));
  *weight = rm_token_weight(e);
  return !is_banned(f->params, v) && !(f->params->min_p > 0.0f && !(e >= f->params->min_p));
}

// Whether a token is left after f->key and f->ties. Called in ascending id.
static int is_left(const filter *f, int64_t v, int64_t *ties_seen, uint64_t *weight) {
  const uint32_t key = rm_order_key(edited(f->params, f->logits, v));
  if (!enters(f, v, weight) || key < f->key) return 0;
  return key > f->key || (*ties_seen)++ < f->ties;
}

// The tokens that are left: their number, the number of those with a weight, the sum of weights,
// and the first token at which the sum exceeds `target`.
typedef struct rest {
  uint64_t n, weight;
  int32_t kept, drawn;
} rest;

static rest rest_of(const filter *f, uint64_t target) {
  rest all = {.drawn = -1};
  uint64_t weight;
  int64_t ties_seen = 0;
  for (int64_t v = 0; v < f->vocab; v++) {
    if (!is_left(f, v, &ties_seen, &weight)) continue;
    all.n++;
    all.kept += weight != 0;
    all.weight += weight;
    if (all.drawn < 0 && all.weight > target) all.drawn = (int32_t)v;
  }
  return all;
}

static uint64_t measure(const filter *f, int by_weight) {
  const rest all = rest_of(f, 0);
  return by_weight ? all.weight : all.n;
}

// Narrows the filter to the shortest prefix, in descending logit and ascending id, whose measure
// reaches `need`.
static void keep_prefix(filter *f, uint64_t need, int by_weight) {
  const filter before = *f;
  filter at = before;
  uint32_t key = 0;
  for (int bit = 31; bit >= 0; bit--) {
    at.key = key | 1u << bit;
    at.ties = at.key == before.key ? before.ties : at.key < before.key ? 0 : INT64_MAX;
    if (at.key < before.key || measure(&at, by_weight) >= need) key = at.key;
  }
  f->key = key;
  int64_t low = 0, high = key == before.key ? rm_min64(before.ties, f->vocab) : f->vocab;
  while (low < high) {
    f->ties = (low + high) / 2;
    if (measure(f, by_weight) >= need) high = f->ties;
    else low = f->ties + 1;
  }
  f->ties = low;
}

static int32_t greedy(const float *logits, int64_t vocab, const rm_sample_params *params) {
  int32_t best = -1;
  uint32_t highest = 0;
  for (int64_t v = 0; v < vocab; v++) {
    const float x = edited(params, logits, v);
    if (is_banned(params, v) || rm_is_nan(x) || (best >= 0 && rm_order_key(x) <= highest)) continue;
    best = (int32_t)v;
    highest = rm_order_key(x);
  }
  return best;
}

static float logprob_under(const filter *f, int32_t token, uint64_t total) {
  uint64_t weight = 0;
  int64_t ties_seen = 0;
  int left = 0;
  for (int64_t v = 0; v <= token; v++) left = is_left(f, v, &ties_seen, &weight);
  return left && weight ? rm_canon(scaled(f, token) - rm_log((float)total * 0x1p-40f)) : -INFINITY;
}

static void sample_row(const rm_sample_args *a, int64_t r) {
  const rm_sample_params *params = a->params + r;
  const float *logits = a->logits + r * a->ld_logits;
  const int32_t likeliest =
      a->row_flags[rm_sampled_row(a, r)] ? -1 : greedy(logits, a->vocab, params);
  int32_t token = likeliest >= 0 && params->forced >= 0 ? params->forced : likeliest;
  float under = token == likeliest ? 0.0f : -INFINITY;
  int32_t kept = 1;
  if (likeliest >= 0 && params->temperature != 0.0f) {
    filter f = {.logits = logits, .vocab = a->vocab, .params = params, .key = 0, .ties = INT64_MAX};
    f.max = edited(params, logits, likeliest);
    const int cuts_k = params->top_k > 0 && params->top_k < a->vocab;
    if (cuts_k && measure(&f, 0) > (uint64_t)params->top_k)
      keep_prefix(&f, (uint64_t)params->top_k, 0);
    if (params->top_p < 1.0f) keep_prefix(&f, rm_top_p_need(params->top_p, measure(&f, 1)), 1);
    const uint64_t total = measure(&f, 1);
    const rest left = rest_of(&f, rm_mul_high(total, rm_philox_u64(params->seed, params->counter)));
    if (total == 0) token = -1;
    else if (params->forced < 0) token = left.drawn;
    under = logprob_under(&f, token, total);
    kept = left.kept;
  }
  rm_put_draw(a, r, token, under, kept);
}

void rm_sample_ref(const rm_ctx *, const rm_sample_args *a) {
  for (int64_t r = 0; r < a->rows; r++) sample_row(a, r);
}

void rm_top_logprobs_ref(const rm_ctx *, const rm_top_logprobs_args *a) {
  for (int64_t r = 0; r < a->rows; r++) {
    const float *logits = a->logits + r * a->ld_logits;
    int64_t last = -1;
    for (int64_t k = 0; k < a->k; k++) { // the next in the order (descending key, ascending id)
      int64_t best = -1;
      for (int64_t v = 0; v < a->vocab; v++) {
        const uint32_t key = rm_order_key(logits[v]),
                       last_key = last < 0 ? UINT32_MAX : rm_order_key(logits[last]);
        if (last >= 0 && (key > last_key || (key == last_key && v <= last))) continue;
        if (best < 0 || key > rm_order_key(logits[best])) best = v;
      }
      a->ids[r * a->k + k] = (int32_t)best;
      a->logprobs[r * a->k + k] = rm_logprob(logits[best], a->stats + 2 * r);
      last = best;
    }
  }
}

void rm_ranks_ref(const rm_ctx *, const rm_ranks_args *a) {
  for (int64_t r = 0; r < a->rows; r++) {
    const float *logits = a->logits + r * a->ld_logits;
    a->ranks[r] = 0;
    for (int64_t v = 0; v < a->vocab && a->tokens[r] >= 0; v++)
      a->ranks[r] += logits[v] >= logits[a->tokens[r]];
  }
}
