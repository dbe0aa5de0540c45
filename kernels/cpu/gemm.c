// gemm.c: y = x·Wᵀ on packed weights, plain, with a bias, with SwiGLU, or one matrix per group of
// rows (experts).
//
// A unit of work is one tile column for one panel of rows, panel by panel; threads take runs of
// units dynamically. One thread computes all of a dot product, so the result does not depend on how
// units are divided. Groups differ in their rows, so their columns are weighted by cost.
#include "panel.h"
#include "variant.h"

typedef struct gemm_job {
  const rm_gemm_args *a;
  int swiglu;
  float *workspace;
  int64_t tiles; // tile columns of y
  int64_t panel_rows; // fewer than PANEL_ROWS when there are too few columns for all threads
  rm_work work; // counts units; with groups their cost
} gemm_job;

// Cost of the smallest part that a thread takes: with few rows several columns, so that a thread
// reads contiguous memory.
enum { LEAST_ROWS = 32 };
#ifdef RM_TILES
enum { LEAST_TILES = 2 }; // two tile columns share the loads of rows
#else
enum { LEAST_TILES = 1 };
#endif

// A column costs its rows, plus about four for reading it from memory.
static int64_t column_cost(int64_t rows) { return rows > 0 ? rows + 4 : 0; }

// rm_activate for 16 lanes.
VEC vf activate(rm_activation how, vf x) {
  if (how == RM_GELU) {
    const vf one = vf_set1(1.0f), a = vf_mul(vf_max(x, vf_neg(x)), vf_set1(RM_SQRT_HALF)),
             t = vf_div(one, vf_fma(vf_set1(RM_PHI_P), a, one));
    const float q[] = {RM_PHI_A};
    const vf below = vf_mul(vf_mul(vf_polynomial(q, 5, t), t), vf_exp(vf_neg(vf_mul(a, a))));
    return vf_mul(x, vf_pick(vf_gt(vf_zero(), x), below, vf_sub(one, below)));
  }
  if (how == RM_RELU2) return vf_pick(vf_gt(vf_zero(), x), vf_zero(), vf_mul(x, x));
  vf z = x;
  if (how == RM_GELU_TANH)
    z = vf_mul(x, vf_fma(vf_set1(RM_GELU_K3), vf_mul(x, x), vf_set1(RM_GELU_K1)));
  return vf_times_sigmoid(x, z);
}

// rm_gated for 16 lanes.
VEC vf gated(rm_dtype T, const rm_gemm_args *a, vf gate, vf up) {
  if (a->activation != RM_SWIGLU_OAI) return vf_mul(vt_round(T, activate(a->activation, gate)), up);
  const vf limit = vf_set1(a->limit), least = vf_neg(limit);
  const vf g = vf_pick(vf_gt(gate, limit), limit, gate);
  up = vf_pick(vf_gt(up, limit), limit, up);
  up = vf_pick(vf_gt(least, up), least, up);
  const vf z = vf_mul(vf_set1(a->alpha), g);
  return vf_mul(vt_round(T, vf_times_sigmoid(g, z)), vf_add(up, vf_set1(1.0f)));
}

// Stores columns of y from their sums; with swiglu from gate's and up's, whose tile follows gate's.
VEC void store(rm_dtype T, rm_dtype Y, const gemm_job *job, const float *acc, int64_t row,
               int64_t rows, int64_t tile, int64_t n_tiles, const void *biases) {
  const rm_gemm_args *a = job->a;
  const int per = job->swiglu ? 2 : 1;
  for (int64_t t = 0; t < n_tiles; t++) {
    const int64_t col = (tile + t) * RM_N_TILE, n = rm_min64(RM_N_TILE, a->n - col);
    const vf bias = biases ? vt_load_n(T, biases, col, n) : vf_zero(),
             up_bias = biases && job->swiglu ? vt_load_n(T, biases, a->n + col, n) : vf_zero();
    for (int64_t r = 0; r < rows; r++) {
      const int64_t both = 2 * (row + r) * a->n + col;
      const float *sum = acc + (per * t * rows + r) * RM_N_TILE;
      vf y = vf_add(vf_load(sum), bias);
      if (job->swiglu) {
        const vf gate = vt_round(T, y),
                 up = vt_round(T, vf_add(vf_load(sum + rows * RM_N_TILE), up_bias));
        y = gated(T, a, gate, up);
        // Rounded again, like every stored value: an emulator may not flush denormals.
        if (a->gate_up) {
          vt_store_n(T, a->gate_up, both, vt_round(T, gate), n);
          vt_store_n(T, a->gate_up, both + a->n, vt_round(T, up), n);
        }
      }
      vt_store_n(Y, a->y, (row + r) * a->ldy + col, vt_round(Y, y), n);
    }
  }
}

// A thread's scratch: a panel of the rows from `row` on (−1: empty), followed by sums. `bias` are
// the biases of the matrix, or NULL.
typedef struct scratch {
  float *panel;
  int64_t row;
  panel_rows rows;
  const void *bias;
} scratch;

// Multiplies rows [row0, row1) of x by tile columns [tile0, tile1) of matrix w.
VEC void region_as(rm_dtype T, rm_dtype Y, const gemm_job *job, scratch *s, const void *w,
                   int64_t row0, int64_t row1, int64_t tile0, int64_t tile1) {
  const rm_gemm_args *a = job->a;
  const int per = job->swiglu ? 2 : 1; // weight tiles per tile of y
  const int64_t n_blocks = rm_round_up(a->k, RM_K_BLOCK) / RM_K_BLOCK, at_once = PANEL_TILES / per;
  float *acc = s->panel + PANEL_ROWS * n_blocks * RM_K_BLOCK;
  for (int64_t row = row0; row < row1; row += PANEL_ROWS) {
    const int64_t rows = rm_min64(PANEL_ROWS, row1 - row);
    if (row != s->row)
      s->rows = fill_panel(T, s->panel, rm_at(T, a->x, row * a->ldx), a->ldx, rows, a->k);
    s->row = row;
    for (int64_t tile = tile0; tile < tile1; tile += at_once) {
      const int64_t n_tiles = rm_min64(at_once, tile1 - tile);
      panel_dots(T, s->rows, rows, rm_at(T, w, tile * per * n_blocks * TILE), n_tiles * per,
                 n_blocks, acc);
      store(T, Y, job, acc, row, rows, tile, n_tiles, s->bias);
    }
  }
}

static void region(const gemm_job *job, scratch *s, const void *w, int64_t row0, int64_t row1,
                   int64_t tile0, int64_t tile1) {
  const rm_dtype Y = job->a->y_dtype;
  if (job->a->dtype == RM_F32) region_as(RM_F32, RM_F32, job, s, w, row0, row1, tile0, tile1);
  else if (Y == RM_F32) region_as(RM_BF16, RM_F32, job, s, w, row0, row1, tile0, tile1);
  else region_as(RM_BF16, RM_BF16, job, s, w, row0, row1, tile0, tile1);
}

static int64_t groups_cost(const rm_gemm_args *a, int64_t tiles) {
  int64_t cost = 0;
  for (int64_t g = 0; g < a->n_groups; g++)
    cost += tiles * column_cost(a->group_rows[g + 1] - a->group_rows[g]);
  return cost;
}

// Computes the columns whose cumulative cost begins in [from, to).
static void grouped(const gemm_job *job, scratch *s, int64_t from, int64_t to) {
  const rm_gemm_args *a = job->a;
  int64_t start = 0;
  for (int64_t g = 0; g < a->n_groups && start < to; g++) {
    const int64_t row0 = a->group_rows[g], row1 = a->group_rows[g + 1],
                  cost = column_cost(row1 - row0);
    if (cost == 0) continue;
    const int64_t tile0 = rm_max64(0, (from - start + cost - 1) / cost),
                  tile1 = rm_min64(job->tiles, (to - start + cost - 1) / cost);
    s->bias = rm_bias_of(a->dtype, a, g, job->swiglu);
    if (from - start < job->tiles * cost && tile0 < tile1)
      region(job, s, rm_at(a->dtype, a->w, g * a->group_stride), row0, row1, tile0, tile1);
    start += job->tiles * cost;
  }
}

static void plain(const gemm_job *job, scratch *s, int64_t from, int64_t to) {
  for (int64_t next; from < to; from = next) {
    const int64_t panel = from / job->tiles, tile = from % job->tiles,
                  row = panel * job->panel_rows;
    next = rm_min64(to, (panel + 1) * job->tiles);
    region(job, s, job->a->w, row, rm_min64(job->a->m, row + job->panel_rows), tile,
           tile + next - from);
  }
}

static void gemm_task(void *arg, int thread, int n_threads) {
  gemm_job *job = arg;
  scratch s = {
      .panel = job->workspace + thread * dots_floats(job->a->k), .row = -1, .bias = job->a->bias};
  int64_t from, to;
  while (rm_take(&job->work, n_threads, &from, &to)) {
    if (job->a->group_rows) grouped(job, &s, from, to);
    else plain(job, &s, from, to);
  }
}

static void run(const rm_ctx *ctx, const rm_gemm_args *a, int swiglu) {
  if (a->m == 0 || a->n == 0) return;
  gemm_job job = {.a = a,
                  .swiglu = swiglu,
                  .workspace = ctx->workspace,
                  .tiles = (a->n + RM_N_TILE - 1) / RM_N_TILE};
  const int64_t columns = a->group_rows ? groups_cost(a, job.tiles) : job.tiles * column_cost(a->m);
  // Rows of a panel when each thread should get two panels.
  const int64_t fair = rm_round_up(a->m / (2 * ctx->n_threads) + 1, RM_VEC_ROWS);
  job.panel_rows = job.tiles < 4 * ctx->n_threads ? rm_min64(PANEL_ROWS, fair) : PANEL_ROWS;
  job.work.n = a->group_rows ? columns : (a->m + job.panel_rows - 1) / job.panel_rows * job.tiles;
  job.work.least =
      a->group_rows ? LEAST_ROWS : rm_max64(LEAST_TILES, LEAST_ROWS / column_cost(a->m));
  // 16 columns × one k take about a cycle.
  rm_parallel(ctx, columns * (swiglu ? 2 : 1) * a->k, gemm_task, &job);
}

void RM_FN(gemm)(const rm_ctx *ctx, const rm_gemm_args *a) { run(ctx, a, 0); }
void RM_FN(gemm_swiglu)(const rm_ctx *ctx, const rm_gemm_args *a) { run(ctx, a, 1); }

size_t RM_FN(gemm_workspace)(const rm_limits *l) {
  return (size_t)(l->n_threads * dots_floats(l->max_k)) * sizeof(float);
}

VEC void activate_row(rm_dtype T, const rm_activate_args *a, int64_t row) {
  for (int64_t i = 0; i < a->n; i += RM_LANES) {
    const int64_t n = rm_min64(RM_LANES, a->n - i), at = row * a->ld + i;
    vt_store_n(T, a->out, at, vt_round(T, activate(a->activation, vt_load_n(T, a->x, at, n))), n);
  }
}

ROW_OP(activate, a->rows * a->n, SPECIALIZE(a->dtype, activate_row(T, a, r)))
