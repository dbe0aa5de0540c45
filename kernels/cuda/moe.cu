// moe.cu: router, permute, static dispatch and combine of docs/numerics.md §5. Results stay on the
// device, the number of rows of an expert too, so every grid is sized by rows · top_k or by the
// experts.
//
// A gemm computes the router's logits into the workspace; then each warp takes a row. The next
// choice is the best expert that ranks after the last choice, so the kernel keeps no list of
// choices and works for any number of experts.
//
// permute has a block of threads for each expert, which counts the choices of lower experts (its
// first row), then numbers its own in order. Every block reads all ids twice, from the L2 cache.
// Rejected: a sort with atomic counters, because its order would depend on timing.
//
// combine computes the order of a row's additions once, from the sorted ids; then each thread does
// these additions for its own columns.
#include "device.cuh"

namespace {

constexpr int THREADS = 256, COMBINE_THREADS = 128;
constexpr int MAX_TOP_K = RM_MAX_TOP_K;

// ----------------------------------------------------------------------------------------- router
// Sets open[g] to whether the router may choose the `size` experts of group g. Each lane takes
// groups.
__device__ void open_groups(const rm_router_args &a, const float *scores, int64_t size, float *keys,
                            int32_t *open, int lane) {
  for (int64_t g = lane; g < a.n_groups; g += RM_WARP) {
    float first = NAN, second = NAN;
    for (int64_t e = g * size; e < (g + 1) * size; e++) {
      const float key = rm_router_key(&a, scores, e);
      if (rm_order_key(key) > rm_order_key(first)) second = first, first = key;
      else if (rm_order_key(key) > rm_order_key(second)) second = key;
    }
    keys[g] = first + second;
  }
  __syncwarp();
  for (int64_t g = lane; g < a.n_groups; g += RM_WARP) {
    int64_t before = 0;
    for (int64_t i = 0; i < a.n_groups; i++)
      before += rm_rank_of(rm_order_key(keys[i]), i) > rm_rank_of(rm_order_key(keys[g]), g);
    open[g] = before < a.top_groups;
  }
  __syncwarp();
}

// The rank of an expert; 0 if its group is not open.
__device__ uint64_t rank_of(const rm_router_args &a, const float *scores, int64_t e,
                            const int32_t *open, uint32_t size) {
  // In 32 bits: a 64-bit division is a function call.
  if (a.n_groups > 1 && !open[static_cast<uint32_t>(e) / size]) return 0;
  return rm_rank_of(rm_order_key(rm_router_key(&a, scores, e)), e);
}

// Sorts the chosen scores by ascending id and adds them one by one.
__device__ float sum_of_chosen(const rm_router_args &a, const float *scores, const int32_t *ids,
                               float *sorted, int lane) {
  for (int64_t k = lane; k < a.top_k; k += RM_WARP) {
    int place = 0;
    for (int64_t i = 0; i < a.top_k; i++) place += ids[i] < ids[k];
    sorted[place] = scores[ids[k]];
  }
  __syncwarp();
  float sum = 0.0f;
  for (int64_t k = 0; k < a.top_k; k++) sum = sum + sorted[k];
  return sum;
}

// Called by a warp: turns its row's logits into scores.
__device__ void softmax_scores(float *scores, int64_t n_experts, int lane) {
  float max = -INFINITY, partial = 0.0f;
  for (int64_t e = lane; e < n_experts; e += RM_WARP) max = rm_max_f32(scores[e], max);
  max = rm_max_lanes(max);
  for (int64_t e = lane; e < n_experts; e += RM_WARP) scores[e] = rm_exp(scores[e] - max);
  __syncwarp();
  for (int64_t e = lane % RM_LANES; e < n_experts; e += RM_LANES) partial = partial + scores[e];
  const float total = rm_tree16_lanes(partial);
  __syncwarp(); // all lanes have read the scores; a shuffle does not order memory
  for (int64_t e = lane; e < n_experts; e += RM_WARP) scores[e] = scores[e] / total;
}

__device__ void sigmoid_scores(float *scores, int64_t n_experts, int lane) {
  for (int64_t e = lane; e < n_experts; e += RM_WARP) scores[e] = rm_sigmoid(scores[e]);
}

// A block is one warp. Overwrites `logits` [rows][n_experts] with the scores.
__global__ void __launch_bounds__(RM_WARP) choose_kernel(rm_router_args a, float *logits) {
  RM_SHARED(sorted); // [top_k], then the keys and open flags of the groups
  const int64_t row = blockIdx.x;
  const int lane = rm_thread();
  float *scores = logits + row * a.n_experts, *group_keys = sorted + a.top_k;
  int32_t *open = reinterpret_cast<int32_t *>(group_keys + a.n_groups);
  int32_t *ids = a.ids + row * a.top_k;
  if (a.score == RM_SCORE_SIGMOID) sigmoid_scores(scores, a.n_experts, lane);
  else softmax_scores(scores, a.n_experts, lane);
  __syncwarp();
  const int64_t size = a.n_groups > 1 ? a.n_experts / a.n_groups : a.n_experts;
  if (a.n_groups > 1) open_groups(a, scores, size, group_keys, open, lane);
  uint64_t last = ~0ull;
  for (int64_t k = 0; k < a.top_k; k++) {
    uint64_t best = 0;
    for (int64_t e = lane; e < a.n_experts; e += RM_WARP) {
      const uint64_t rank = rank_of(a, scores, e, open, static_cast<uint32_t>(size));
      if (rank < last && rank > best) best = rank;
    }
    last = rm_over_lanes(best, rm_most_of());
    if (lane == 0) ids[k] = rm_ranked_id(last);
  }
  __syncwarp();
  const float sum = a.renormalize ? sum_of_chosen(a, scores, ids, sorted, lane) : 0.0f;
  for (int64_t k = lane; k < a.top_k; k += RM_WARP) {
    a.gates[row * a.top_k + k] = rm_gate(&a, scores[ids[k]], sum);
    if (a.routed) a.routed[row * a.routed_stride + k] = static_cast<int16_t>(ids[k]);
  }
}

// ---------------------------------------------------------------------------------------- permute
__global__ void __launch_bounds__(THREADS) place_kernel(rm_permute_args a) {
  RM_SHARED(shared);
  uint64_t *by_warp = reinterpret_cast<uint64_t *>(shared);
  const int32_t expert = static_cast<int32_t>(blockIdx.x);
  const int64_t n = a.rows * a.top_k;
  const unsigned lane = threadIdx.x % RM_WARP, warp = threadIdx.x / RM_WARP,
                 before_me = (1u << lane) - 1;
  uint64_t lower = 0;
  for (int64_t i = threadIdx.x; i < n; i += THREADS) lower += a.ids[i] >= 0 && a.ids[i] < expert;
  int64_t next = static_cast<int64_t>(rm_over_block<THREADS>(lower, by_warp, rm_sum_of()));
  if (threadIdx.x == 0) a.group_rows[expert] = static_cast<int32_t>(next);
  for (int64_t from = 0; from < n; from += THREADS) {
    const int64_t i = from + threadIdx.x;
    const bool mine = i < n && a.ids[i] == expert;
    const unsigned of_warp = __ballot_sync(RM_ALL_LANES, mine);
    if (lane == 0) by_warp[warp] = static_cast<uint64_t>(__popc(of_warp));
    __syncthreads();
    int64_t all = 0, earlier = 0;
    for (unsigned w = 0; w < THREADS / RM_WARP; w++) {
      all += static_cast<int64_t>(by_warp[w]);
      if (w < warp) earlier += static_cast<int64_t>(by_warp[w]);
    }
    if (mine) a.place[i] = static_cast<int32_t>(next + earlier + __popc(of_warp & before_me));
    next += all;
    __syncthreads(); // before by_warp is used again
  }
  if (threadIdx.x == 0 && expert == a.n_experts - 1)
    a.group_rows[a.n_experts] = static_cast<int32_t>(next);
}

__global__ void __launch_bounds__(THREADS) move_kernel(rm_permute_args a) {
  // In 32 bits: a 64-bit division is a function call.
  const uint32_t choice = blockIdx.x, row = choice / static_cast<uint32_t>(a.top_k);
  const int64_t bytes = a.hidden * static_cast<int64_t>(rm_dtype_bytes(a.dtype));
  if (a.ids[choice] < 0 || a.ids[choice] >= a.n_experts) {
    if (threadIdx.x == 0) a.place[choice] = -1;
    return;
  }
  rm_copy_row(static_cast<char *>(a.x_out) + a.place[choice] * bytes,
              static_cast<const char *>(a.x) + row * bytes, bytes, THREADS);
}

// -------------------------------------------------------------------------------- static dispatch
// Each thread has one choice and counts the earlier choices of its row, so threads do not wait for
// one another. In `own` it writes the entry of its choice, and entry k if that is unused.
__global__ void __launch_bounds__(THREADS)
    static_dispatch_kernel(rm_static_dispatch_args a, uint32_t n) {
  // In 32 bits: a 64-bit division is a function call.
  const uint32_t i = blockIdx.x * THREADS + threadIdx.x, top_k = static_cast<uint32_t>(a.top_k);
  if (i >= n) return;
  const uint32_t at = i / top_k, k = i % top_k, home = at / static_cast<uint32_t>(a.pitch),
                 row = at % static_cast<uint32_t>(a.pitch);
  const int32_t experts = static_cast<int32_t>(a.experts_each);
  const int64_t each = rm_max_choices(a.top_k, a.experts_each);
  int32_t *own = a.own + at * each;
  int64_t earlier = 0, n_own = 0;
  if (row < a.home_rows) {
    const int32_t *ids = a.ids + home * a.ids_pitch + static_cast<int64_t>(row) * a.top_k;
    const int32_t id = ids[k], rank = id < 0 ? -1 : id / experts;
    for (uint32_t j = 0; j < top_k; j++) {
      const int32_t its = ids[j] < 0 ? -1 : ids[j] / experts;
      earlier += j < k && its == rank;
      n_own += its == a.rank;
    }
    a.place[(home * a.home_rows + row) * a.top_k + k] =
        id < 0 ? -1 : static_cast<int32_t>((rank * a.home_rows + row) * each + earlier);
    if (rank == a.rank) own[earlier] = id - rank * experts;
  }
  if (k >= n_own && k < each) own[k] = -1;
}

// ---------------------------------------------------------------------------------------- combine
// One row's choices in shared memory, sorted by id, and the additions of the tree in order.
struct choice_list {
  int32_t ids[MAX_TOP_K], places[MAX_TOP_K], left[MAX_TOP_K], right[MAX_TOP_K];
  float gates[MAX_TOP_K];
};

__device__ void sort_choices(choice_list &l, const rm_combine_args &a, int64_t first) {
  for (int k = rm_thread(); k < a.top_k; k += COMBINE_THREADS) {
    const int32_t id = a.ids[first + k];
    int at = 0;
    for (int i = 0; i < a.top_k; i++) at += a.ids[first + i] < id;
    l.ids[at] = id;
    l.places[at] = a.place[first + k];
    l.gates[at] = a.gates[first + k];
  }
}

// The level of the tree at which sorted choices i and i + 1 are joined; smaller is lower.
__device__ int level(const choice_list &l, int i) { return 32 - __clz(l.ids[i] ^ l.ids[i + 1]); }

// Addition i joins the nodes between choices i and i + 1; a node is stored in the slot of its first
// choice. Additions are ordered by level, and inside a level from left to right.
__device__ void order_joins(choice_list &l, int n) {
  for (int i = rm_thread(); i + 1 < n; i += COMBINE_THREADS) {
    const int mine = level(l, i);
    int first = i, at = 0;
    while (first > 0 && level(l, first - 1) < mine) first--;
    for (int j = 0; j + 1 < n; j++) at += level(l, j) < mine || (level(l, j) == mine && j < i);
    l.left[at] = first;
    l.right[at] = i + 1;
  }
}

template <rm_dtype DTYPE>
__global__ void __launch_bounds__(COMBINE_THREADS) combine_kernel(rm_combine_args a) {
  RM_SHARED(shared);
  choice_list &l = *reinterpret_cast<choice_list *>(shared);
  float *node = reinterpret_cast<float *>(&l + 1) +
                threadIdx.x; // [top_k][COMBINE_THREADS]: a thread's column
  const int64_t row = blockIdx.x;
  const int n = static_cast<int>(a.top_k);
  sort_choices(l, a, row * a.top_k);
  __syncthreads();
  order_joins(l, n);
  __syncthreads();
  for (int64_t i = threadIdx.x; i < a.hidden; i += COMBINE_THREADS) {
    for (int k = 0; k < n; k++)
      node[k * COMBINE_THREADS] = l.gates[k] * rm_get(DTYPE, a.y, l.places[k] * a.hidden + i);
    for (int k = 0; k + 1 < n; k++) {
      float *left = node + l.left[k] * COMBINE_THREADS;
      *left = *left + node[l.right[k] * COMBINE_THREADS];
    }
    rm_put(DTYPE, a.out, row * a.hidden + i, n > 0 ? node[0] : 0.0f);
  }
}

} // namespace

static size_t logits_bytes(int64_t rows, int64_t n_experts) {
  return static_cast<size_t>(
      rm_round_up(rows * n_experts * static_cast<int64_t>(sizeof(float)), 64));
}
size_t rm_cuda_router_workspace(const rm_limits *l) {
  return logits_bytes(l->max_rows, l->n_experts);
}
size_t rm_cuda_mma_router_workspace(const rm_limits *l) {
  return l->n_experts ? rm_cuda_router_workspace(l) + rm_cuda_gemm_mma_workspace(l) : 0;
}

static void router_by(const rm_ctx *ctx, const rm_router_args *a,
                      void (*gemm_of)(const rm_ctx *, const rm_gemm_args *)) {
  float *logits = static_cast<float *>(ctx->workspace);
  rm_gemm_args gemm = {};
  gemm.y = logits, gemm.x = a->x, gemm.w = a->w, gemm.bias = a->logit_bias, gemm.m = a->rows,
  gemm.n = a->n_experts, gemm.k = a->hidden;
  gemm.ldx = a->hidden, gemm.ldy = a->n_experts, gemm.dtype = a->dtype, gemm.y_dtype = RM_F32;
  rm_ctx behind = *ctx; // with the rest of the workspace, after the logits
  const size_t used = logits_bytes(a->rows, a->n_experts);
  behind.workspace = static_cast<char *>(ctx->workspace) + used;
  behind.workspace_bytes = ctx->workspace_bytes > used ? ctx->workspace_bytes - used : 0;
  gemm_of(&behind, &gemm);
  const size_t shared = static_cast<size_t>(a->top_k + 2 * a->n_groups) * sizeof(float);
  RM_LAUNCH(choose_kernel, a->rows, RM_WARP, shared, ctx->stream, *a, logits);
}

void rm_cuda_router(const rm_ctx *ctx, const rm_router_args *a) { router_by(ctx, a, rm_cuda_gemm); }
void rm_cuda_mma_router(const rm_ctx *ctx, const rm_router_args *a) {
  router_by(ctx, a, rm_cuda_mma_gemm);
}

void rm_cuda_permute(const rm_ctx *ctx, const rm_permute_args *a) {
  const size_t shared = THREADS / RM_WARP * sizeof(uint64_t);
  // Without experts one block remains, which writes group_rows[0].
  RM_LAUNCH(place_kernel, rm_max64(1, a->n_experts), THREADS, shared, ctx->stream, *a);
  RM_LAUNCH(move_kernel, a->rows * a->top_k, THREADS, 0, ctx->stream, *a);
}

void rm_cuda_static_dispatch(const rm_ctx *ctx, const rm_static_dispatch_args *a) {
  const int64_t n = a->homes * a->pitch * a->top_k;
  RM_LAUNCH(static_dispatch_kernel, rm_blocks(n, THREADS), THREADS, 0, ctx->stream, *a,
            static_cast<uint32_t>(n));
}

void rm_cuda_combine(const rm_ctx *ctx, const rm_combine_args *a) {
  const size_t shared =
      sizeof(choice_list) + static_cast<size_t>(a->top_k * COMBINE_THREADS) * sizeof(float);
  rm_by_dtype(a->dtype, [&]<rm_dtype DTYPE>() {
    RM_LAUNCH(combine_kernel<DTYPE>, a->rows, COMBINE_THREADS, shared, ctx->stream, *a);
  });
}
