// sample.cu: token choice of docs/numerics.md §7, top-logprobs and ranks, with one block of threads
// for each row. Sums of integers are exact, so threads may add in any order. Weights are not
// stored: each pass over the row computes them again from logits in the L2 cache.
//
// A filter keeps the tokens with a key above a cut and, among those with the cut's key, the first
// ones, up to an id. A radix selection over the keys finds the key, with three histograms in shared
// memory. Tokens with the same key have the same weight, so their number is known, and the id is
// searched only if some of them are dropped.
//
// A search for the id at which a running sum exceeds a target narrows its range to the sixteenth
// that has the id, until one warp can walk it. The draw is such a search over weights.
//
// A banned token counts as a NaN: it is never the largest, has weight 0 and the lowest key. Bits in
// the workspace mark banned and edited tokens, since a row's lists may be as long as the
// vocabulary. Each pass finds an edit by bisection and applies it again.
#include "device.cuh"

#include "cpu/philox.h"

namespace {

constexpr int THREADS = 512, WARPS = THREADS / RM_WARP, BINS = 1 << 11, WALK = 1024,
              WORKSPACE_ROWS = 256;
constexpr float NO_WEIGHT = -28.0f; // exp of this is below 2^-40

struct scratch { // in shared memory
  uint64_t by_warp[WARPS];
  uint64_t above, bin; // of find_bin
  uint64_t found; // of walk
  uint64_t bins[BINS];
};

struct row_view {
  const float *logits;
  const uint32_t *changed, *banned; // bits of edited or banned tokens, and of banned; NULL: none
  const rm_sample_params *params;
  int64_t vocab;
  float max, temperature, min_p;
};

// Keeps tokens with a higher key, and those with this key up to the id `last`.
struct cut {
  uint32_t key;
  int64_t last;
};
constexpr cut NO_CUT = {0, -1}; // keeps all that are not NaN

__device__ bool keeps(cut c, uint32_t key, int64_t id) {
  return key > c.key || (key == c.key && id <= c.last);
}

__device__ bool has_bit(const uint32_t *bits, int64_t id) { return bits[id / 32] >> (id % 32) & 1; }

__device__ float changed_logit(const row_view &v, int64_t id) {
  if (has_bit(v.banned, id)) return rm_float(0x7fc00000u);
  return rm_edited_logit(v.logits[id], v.params, rm_find_edit(v.params, id));
}

__device__ float logit_of(const row_view &v, int64_t id) {
  return v.changed && has_bit(v.changed, id) ? changed_logit(v, id) : v.logits[id] + 0.0f;
}

__device__ float scaled(const row_view &v, float x) { return (x - v.max) / v.temperature; }

__device__ uint64_t weight_of(const row_view &v, float x) {
  const float d = scaled(v, x);
  if (!(d > NO_WEIGHT)) return 0; // true for most of a vocabulary
  const float e = rm_exp(d);
  return v.min_p > 0.0f && !(e >= v.min_p) ? 0 : rm_token_weight(e);
}

__device__ uint64_t weight_of_key(const row_view &v, uint32_t key) {
  return weight_of(v, rm_float(key & 0x80000000u ? key ^ 0x80000000u : ~key));
}

// ----------------------------------------------------------------------------------------- search
// A range of ids, and the sum before it.
struct place {
  int64_t from, n;
  uint64_t before;
};

// Narrows p to the sixteenth in which the running sum of `of` exceeds target.
template <class F> __device__ place narrow(place p, uint64_t target, scratch &s, const F &of) {
  const int64_t length = rm_round_up((p.n + WARPS - 1) / WARPS, RM_WARP), end = p.from + p.n;
  const int64_t from = p.from + rm_warp() * length, to = rm_min64(from + length, end);
  uint64_t sum = 0;
  for (int64_t id = from + rm_lane(); id < to; id += RM_WARP) sum += of(id);
  sum = rm_over_lanes(sum, rm_sum_of());
  if (rm_lane() == 0) s.by_warp[rm_warp()] = sum;
  __syncthreads();
  for (int w = 0; w < WARPS && p.before + s.by_warp[w] <= target; w++) {
    p.before += s.by_warp[w];
    p.from += length;
  }
  p.n = rm_min64(length, end - p.from);
  __syncthreads(); // before the sums are used again
  return p;
}

// Called by the first warp: walks the range, 32 ids at a time.
template <class F> __device__ void walk(place p, uint64_t target, scratch &s, const F &of) {
  const int lane = rm_thread();
  const int64_t end = p.from + p.n;
  for (int64_t from = p.from; from < end; from += RM_WARP) {
    uint64_t sum = from + lane < end ? of(from + lane) : 0;
    for (int step = 1; step < RM_WARP; step *= 2) {
      const uint64_t lower = __shfl_up_sync(RM_ALL_LANES, sum, step);
      if (lane >= step) sum += lower;
    }
    const unsigned over = __ballot_sync(RM_ALL_LANES, p.before + sum > target);
    if (over) {
      if (lane == 0) s.found = static_cast<uint64_t>(from + __ffs(static_cast<int>(over)) - 1);
      return;
    }
    p.before += __shfl_sync(RM_ALL_LANES, sum, RM_WARP - 1);
  }
}

// Returns the first of n ids whose running sum of `of` exceeds target, which is below the sum of
// all.
template <class F>
__device__ int32_t first_over(int64_t n, uint64_t target, scratch &s, const F &of) {
  place p = {0, n, 0};
  while (p.n > WALK) p = narrow(p, target, s, of);
  if (threadIdx.x < RM_WARP) walk(p, target, s, of);
  __syncthreads();
  const int32_t found = static_cast<int32_t>(s.found);
  __syncthreads(); // before the next search
  return found;
}

// ---------------------------------------------------------------------------------------- filters
// The number of tokens with a weight that the cut keeps, or the sum of their weights.
__device__ uint64_t measure(const row_view &v, cut c, bool by_weight, scratch &s) {
  uint64_t sum = 0;
  for (int64_t id = threadIdx.x; id < v.vocab; id += THREADS) {
    const float x = logit_of(v, id);
    const uint64_t weight = weight_of(v, x);
    if (weight && keeps(c, rm_order_key(x), id)) sum += by_weight ? weight : 1;
  }
  return rm_over_block<THREADS>(sum, s.by_warp, rm_sum_of());
}

// Called by the first warp: finds the highest bin at which `above` plus the sum from the top
// reaches need. s.above: that sum without the bin. Each lane adds BINS / 32 bins,
// starting at a different one to avoid bank conflicts.
__device__ void find_bin(scratch &s, uint64_t above, uint64_t need) {
  constexpr int EACH = BINS / RM_WARP;
  const int lane = rm_thread();
  uint64_t mine = 0;
  for (int i = 0; i < EACH; i++) mine += s.bins[lane * EACH + (i + lane) % EACH];
  int part = RM_WARP - 1;
  for (; part > 0; part--) {
    const uint64_t of_part = __shfl_sync(RM_ALL_LANES, mine, part);
    if (above + of_part >= need) break;
    above += of_part;
  }
  int bin = part * EACH + EACH - 1;
  while (bin > part * EACH && above + s.bins[bin] < need) above += s.bins[bin--];
  if (lane != 0) return;
  s.above = above;
  s.bin = static_cast<uint64_t>(bin);
}

// One round: fills the bins with the measure of each value of 11 bits of the key at `shift`, for
// tokens whose higher bits are those of `prefix`.
__device__ void fill_bins(const row_view &v, cut before, uint32_t prefix, int shift, uint32_t known,
                          bool by_weight, scratch &s) {
  const uint32_t digits = shift ? BINS - 1 : (1u << 10) - 1;
  for (int i = rm_thread(); i < BINS; i += THREADS) s.bins[i] = 0;
  __syncthreads();
  for (int64_t id = threadIdx.x; id < v.vocab; id += THREADS) {
    const float x = logit_of(v, id);
    const uint32_t key = rm_order_key(x);
    if (!keeps(before, key, id) || (key & known) != prefix) continue;
    const uint64_t weight = weight_of(v, x);
    if (weight)
      atomicAdd(reinterpret_cast<unsigned long long *>(s.bins + (key >> shift & digits)),
                by_weight ? weight : 1);
  }
  __syncthreads();
}

// Finds the shortest prefix of the tokens that `before` keeps, in descending key and ascending id,
// whose measure reaches `need`, which is at most the measure of all of them. *sum: the measure of
// the prefix.
__device__ cut select_prefix(const row_view &v, cut before, uint64_t need, bool by_weight,
                             scratch &s, uint64_t *sum) {
  uint32_t prefix = 0, known = 0;
  uint64_t above = 0; // measure of the keys known to be higher
  for (int round = 0; round < 3; round++) {
    const int shift = round == 0 ? 21 : round == 1 ? 10 : 0;
    fill_bins(v, before, prefix, shift, known, by_weight, s);
    if (threadIdx.x < RM_WARP) find_bin(s, above, need);
    __syncthreads();
    above = s.above;
    prefix |= static_cast<uint32_t>(s.bin) << shift;
    known = ~0u << shift;
  }
  const uint64_t each = by_weight ? weight_of_key(v, prefix) : 1;
  const uint64_t ties = (need - above + each - 1) / each;
  *sum = above + ties * each;
  // The last bin has the tokens of this key that `before` keeps.
  if (ties * each == s.bins[s.bin]) return {prefix, prefix == before.key ? before.last : v.vocab};
  return {prefix, first_over(v.vocab, ties - 1, s, [&](int64_t id) -> uint64_t {
            return rm_order_key(logit_of(v, id)) == prefix;
          })};
}

// ------------------------------------------------------------------------------------------- rows
struct drawn {
  int32_t token; // −1: all weights are 0
  float under; // its logprob under the distribution of the draw
  int32_t kept; // tokens that the filters keep, if `counts`
};

__device__ drawn draw_row(const row_view &v, const rm_sample_params *p, bool counts, scratch &s) {
  cut c = NO_CUT;
  uint64_t total;
  if (p->top_k > 0 && p->top_k < v.vocab &&
      measure(v, c, false, s) > static_cast<uint64_t>(p->top_k))
    c = select_prefix(v, c, static_cast<uint64_t>(p->top_k), false, s, &total);
  total = measure(v, c, true, s);
  if (total == 0) return {-1, 0.0f, 0};
  if (p->top_p < 1.0f) c = select_prefix(v, c, rm_top_p_need(p->top_p, total), true, s, &total);
  const int32_t kept = counts ? static_cast<int32_t>(measure(v, c, false, s)) : 0;
  int32_t token = p->forced;
  if (token < 0) {
    const uint64_t target = rm_mul_high(total, rm_philox_u64(p->seed, p->counter));
    token = first_over(v.vocab, target, s, [&](int64_t id) -> uint64_t {
      const float logit = logit_of(v, id);
      return keeps(c, rm_order_key(logit), id) ? weight_of(v, logit) : 0;
    });
  } else if (!keeps(c, rm_order_key(logit_of(v, token)), token)) return {token, -INFINITY, kept};
  const float x = logit_of(v, token);
  const bool possible = weight_of(v, x) != 0;
  return {token,
          possible ? rm_canon(scaled(v, x) - rm_log(static_cast<float>(total) * 0x1p-40f))
                   : -INFINITY,
          kept};
}

RM_INLINE int64_t words_of_row(int64_t vocab) { return (vocab + 31) / 32; }

__device__ void mark(uint32_t *bits, int32_t id, int64_t vocab) {
  if (id >= 0 && id < vocab) atomicOr(bits + id / 32, 1u << (id % 32));
}

// Marks the row's changed tokens and its banned ones, with the whole block.
__device__ void mark_changed(uint32_t *changed, uint32_t *banned, const rm_sample_params *p,
                             int64_t vocab) {
  for (int64_t i = threadIdx.x; i < words_of_row(vocab); i += THREADS) changed[i] = banned[i] = 0;
  __syncthreads();
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < p->n_edits; i += THREADS)
    mark(changed, p->edits[i].token, vocab);
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < p->n_banned; i += THREADS) {
    mark(changed, p->banned[i], vocab);
    mark(banned, p->banned[i], vocab);
  }
  __syncthreads();
}

__device__ int32_t likeliest(const row_view &v, scratch &s) {
  uint64_t best = 0;
  for (int64_t id = threadIdx.x; id < v.vocab; id += THREADS) {
    const uint32_t key = rm_order_key(logit_of(v, id));
    if (key) best = rm_most_of()(best, rm_rank_of(key, id));
  }
  best = rm_over_block<THREADS>(best, s.by_warp, rm_most_of());
  return best ? rm_ranked_id(best) : -1;
}

// Two blocks on a multiprocessor: for three, some compilers spill registers.
__global__ void __launch_bounds__(THREADS, 2)
    sample_kernel(rm_sample_args a, uint32_t *marks, int64_t row0) {
  RM_SHARED(shared);
  scratch &s = *reinterpret_cast<scratch *>(shared);
  const int64_t row = row0 + blockIdx.x;
  const rm_sample_params *p = a.params + row;
  row_view v = {
      a.logits + row * a.ld_logits, nullptr, nullptr, p, a.vocab, 0.0f, p->temperature, p->min_p};
  drawn d = {-1, 0.0f, 0};
  if (!a.row_flags[rm_sampled_row(&a, row)]) {
    if (p->n_banned > 0 || p->n_edits > 0) {
      const int64_t words = words_of_row(a.vocab);
      uint32_t *changed = marks + blockIdx.x * 2 * words, *banned = changed + words;
      mark_changed(changed, banned, p, a.vocab);
      v.changed = changed;
      v.banned = banned;
    }
    const int32_t best = likeliest(v, s);
    if (best >= 0) v.max = logit_of(v, best);
    if (best >= 0 && p->temperature != 0.0f) d = draw_row(v, p, a.kept != nullptr, s);
    else if (best >= 0)
      d = {p->forced >= 0 ? p->forced : best,
           p->forced >= 0 && p->forced != best ? -INFINITY : 0.0f, 1};
  }
  if (threadIdx.x == 0) rm_put_draw(&a, row, d.token, d.under, d.kept);
}

// ----------------------------------------------------------------------------------- top logprobs
// The best of a thread's own tokens that rank after `last`.
__device__ uint64_t best_behind(const float *logits, int64_t vocab, uint64_t last) {
  uint64_t best = 0;
  for (int64_t id = threadIdx.x; id < vocab; id += THREADS) {
    const uint64_t rank = rm_rank_of(rm_order_key(logits[id]), id);
    if (rank < last && rank > best) best = rank;
  }
  return best;
}

// Each thread holds the best of its remaining tokens; only the thread whose token was taken
// searches for another.
__global__ void __launch_bounds__(THREADS) top_kernel(rm_top_logprobs_args a) {
  RM_SHARED(shared);
  const int64_t row = blockIdx.x;
  const float *logits = a.logits + row * a.ld_logits;
  uint64_t mine = best_behind(logits, a.vocab, ~0ull);
  for (int64_t k = 0; k < a.k; k++) {
    const uint64_t best =
        rm_over_block<THREADS>(mine, reinterpret_cast<uint64_t *>(shared), rm_most_of());
    if (mine != best) continue;
    const int32_t id = rm_ranked_id(best);
    a.ids[row * a.k + k] = id;
    a.logprobs[row * a.k + k] = rm_logprob(logits[id], a.stats + 2 * row);
    mine = best_behind(logits, a.vocab, best);
  }
}

// ------------------------------------------------------------------------------------------ ranks
__global__ void __launch_bounds__(THREADS) ranks_kernel(rm_ranks_args a) {
  RM_SHARED(shared);
  const int64_t row = blockIdx.x;
  const int32_t token = a.tokens[row];
  const float *logits = a.logits + row * a.ld_logits;
  uint64_t rank = 0;
  for (int64_t id = threadIdx.x; id < a.vocab && token >= 0; id += THREADS)
    rank += logits[id] >= logits[token];
  rank = rm_over_block<THREADS>(rank, reinterpret_cast<uint64_t *>(shared), rm_sum_of());
  if (threadIdx.x == 0) a.ranks[row] = static_cast<int32_t>(rank);
}

} // namespace

size_t rm_cuda_sample_workspace(const rm_limits *l) {
  return static_cast<size_t>(rm_min64(l->max_rows, WORKSPACE_ROWS) * 2 * words_of_row(l->vocab)) *
         sizeof(uint32_t);
}

// Rows that do not fit in the workspace are computed in later passes on the stream.
void rm_cuda_sample(const rm_ctx *ctx, const rm_sample_args *a) {
  if (a->vocab <= 0) return;
  const size_t per_row = static_cast<size_t>(2 * words_of_row(a->vocab)) * sizeof(uint32_t);
  const int64_t at_once = rm_max64(1, static_cast<int64_t>(ctx->workspace_bytes / per_row));
  for (int64_t row0 = 0; row0 < a->rows; row0 += at_once) {
    const dim3 grid = rm_grid(rm_min64(at_once, a->rows - row0));
    RM_LAUNCH(sample_kernel, grid, THREADS, sizeof(scratch), ctx->stream, *a,
              static_cast<uint32_t *>(ctx->workspace), row0);
  }
}

void rm_cuda_top_logprobs(const rm_ctx *ctx, const rm_top_logprobs_args *a) {
  if (a->rows <= 0 || a->k <= 0) return;
  RM_LAUNCH(top_kernel, a->rows, THREADS, WARPS * sizeof(uint64_t), ctx->stream, *a);
}

void rm_cuda_ranks(const rm_ctx *ctx, const rm_ranks_args *a) {
  if (a->rows <= 0) return;
  RM_LAUNCH(ranks_kernel, a->rows, THREADS, WARPS * sizeof(uint64_t), ctx->stream, *a);
}
