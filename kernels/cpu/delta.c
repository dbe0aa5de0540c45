// delta.c: delta_net. A thread takes one value head of the rows of one sequence (a run). For each
// block of rows it first computes the convolution. Then a few tiles of the state's columns at a
// time go through all rows of the block, so that the tiles stay in the L1 cache. Each row reads the
// state from where the previous row left it. It writes the state to the slot to which the row is
// saved, or else to the thread's memory. States are not copied.
#include "variant.h"

enum {
  BLOCK_ROWS = 16,
  TILES = RM_KEEP_SUMS ? 2 : 1, // tiles at a time: 8 chains of one register, or 4 of two
};

typedef struct delta_job {
  const rm_delta_net_args *a;
  int32_t *runs; // [n_runs + 1] first rows of the runs; at the end `rows`
  float *workspace; // of all threads
  int64_t n_runs, stride; // floats of a thread
  _Atomic int64_t next;
} delta_job;

typedef struct unit {
  rm_delta_run of;
  int64_t width; // of a row's inputs, v padded to tiles
  float *taps; // [kernel][n], the weights of the convolution
  float *inputs; // [BLOCK_ROWS][width]: q, k and v; o (before the norm) replaces v
  float *gates; // [BLOCK_ROWS][2]: decay and beta
  float *state; // the thread's memory for a state
} unit;

static int64_t width_of(int64_t k_dim, int64_t v_dim) {
  return 2 * k_dim + rm_round_up(v_dim, RM_N_TILE);
}

static int64_t unit_floats(int64_t k_dim, int64_t v_dim, int64_t kernel) {
  return rm_packed_elems(v_dim, k_dim) + (kernel + BLOCK_ROWS) * width_of(k_dim, v_dim) +
         2 * BLOCK_ROWS;
}

static unit carve(const rm_delta_net_args *a, float *memory, int64_t first, int64_t head) {
  unit u = {.of = rm_delta_run_at(a, first, head),
            .width = width_of(a->k_dim, a->v_dim),
            .state = memory};
  u.taps = memory + rm_packed_elems(a->v_dim, a->k_dim);
  u.inputs = u.taps + a->kernel * u.of.n;
  u.gates = u.inputs + BLOCK_ROWS * u.width;
  return u;
}

VEC void load_taps(rm_dtype T, const unit *u) {
  const rm_delta_net_args *a = u->of.a;
  for (int64_t i = 0; i < u->of.n; i++)
    for (int64_t j = 0; j < a->kernel; j++)
      u->taps[j * u->of.n + i] = rm_get(T, a->conv, rm_delta_channel(&u->of, i) * a->kernel + j);
}

// Lanes after the end of q or k are overwritten by the next part; those after v become zeros.
VEC void convolve(rm_dtype T, const unit *u, int64_t row, float *out) {
  const rm_delta_net_args *a = u->of.a;
  for (int64_t i = 0, n; i < u->of.n; i += n) {
    const int64_t end = i < a->k_dim ? a->k_dim : i < 2 * a->k_dim ? 2 * a->k_dim : u->of.n;
    vf acc = vf_zero();
    n = rm_min64(RM_LANES, end - i);
    for (int64_t j = 0; j < a->kernel; j++) {
      const void *x = rm_delta_input(&u->of, row - a->kernel + 1 + j, i);
      const vf tap = vf_load_n(u->taps + j * u->of.n + i, n);
      acc = vf_fma(tap, x ? vt_load_n(T, x, 0, n) : vf_zero(), acc);
    }
    vf_store(out + i, vf_times_sigmoid(acc, acc));
  }
}

VEC void l2_norm(float *x, int64_t n, float factor) {
  const vf scale = vf_set1(1.0f / sqrtf(vt_sum_of_squares(RM_F32, x, n) + RM_L2_EPS));
  for (int64_t i = 0; i < n; i += RM_LANES)
    vt_store_n(RM_F32, x, i, vf_mul(vf_mul(vf_load(x + i), scale), vf_set1(factor)), n - i);
}

VEC vf sum_of_chains(const vf *sum) {
  return vf_add(vf_add(sum[0], sum[1]), vf_add(sum[2], sum[3]));
}

// Calls STEP(i, chain) for the rows i of a state.
#define EACH_STATE_ROW(n, STEP) \
  do { \
    int64_t i = 0; \
    for (; i + RM_DELTA_CHAINS <= (n); i += RM_DELTA_CHAINS) { \
      { STEP(i, 0) } \
      { STEP(i + 1, 1) } \
      { STEP(i + 2, 2) } \
      { STEP(i + 3, 3) } \
    } \
    if (i < (n)) { STEP(i, 0) } \
    if (i + 1 < (n)) { STEP(i + 1, 1) } \
    if (i + 2 < (n)) { STEP(i + 2, 2) } \
  } while (0)

// Computes a row's step on `tiles` tiles of the state; o replaces v.
VEC void step_tiles(int64_t k_dim, int tiles, const float *from, float *to, int is_saved,
                    const float *q, const float *k, float *v, const float *gates) {
  const int64_t tile = rm_packed_elems(RM_N_TILE, k_dim);
  const vf decay = vf_set1(gates[0]), beta = vf_set1(gates[1]);
  vf sum[TILES][RM_DELTA_CHAINS], delta[TILES];
  for (int t = 0; t < tiles; t++)
    for (int c = 0; c < RM_DELTA_CHAINS; c++) sum[t][c] = vf_zero();
#define ADD_MEMORY(i, c) \
  const vf k_i = vf_set1(k[i]); \
  for (int t = 0; t < tiles; t++) \
    sum[t][c] = vf_fma(k_i, vf_load(from + t * tile + (i) * RM_N_TILE), sum[t][c]);
  EACH_STATE_ROW(k_dim, ADD_MEMORY);
  for (int t = 0; t < tiles; t++) {
    const vf known = vf_mul(decay, sum_of_chains(sum[t]));
    delta[t] = vf_mul(vf_sub(vf_load(v + t * RM_N_TILE), known), beta);
    for (int c = 0; c < RM_DELTA_CHAINS; c++) sum[t][c] = vf_zero();
  }
  // Loads all tiles before it stores one: tiles are a multiple of 4 KB apart, and a load waits for
  // an earlier store whose address differs by such a multiple.
#define UPDATE(i, c) \
  const vf k_i = vf_set1(k[i]), q_i = vf_set1(q[i]); \
  vf s[TILES]; \
  for (int t = 0; t < tiles; t++) \
    s[t] = vf_mul(decay, vf_load(from + t * tile + (i) * RM_N_TILE)); \
  for (int t = 0; t < tiles; t++) { \
    s[t] = vf_fma(k_i, delta[t], s[t]); \
    vf_store(to + t * tile + (i) * RM_N_TILE, is_saved ? vf_canon(s[t]) : s[t]); \
    sum[t][c] = vf_fma(q_i, s[t], sum[t][c]); \
  }
  EACH_STATE_ROW(k_dim, UPDATE);
  for (int t = 0; t < tiles; t++) vf_store(v + t * RM_N_TILE, sum_of_chains(sum[t]));
}

// Computes rows [row, row + n) on the tiles from column j on. Returns the address of the state
// after these rows.
VEC const float *block_tiles(const unit *u, int tiles, const float *from, int64_t row, int64_t n,
                             int64_t j) {
  const rm_delta_net_args *a = u->of.a;
  const int64_t at = rm_packed_elems(j, a->k_dim);
  for (int64_t r = 0; r < n; r++) {
    float *q = u->inputs + r * u->width, *k = q + a->k_dim, *v = k + a->k_dim + j;
    float *slot = rm_delta_state(a, a->save_slots[row + r], u->of.head),
          *to = slot ? slot : u->state;
    const float *gates = u->gates + 2 * r;
    if (slot) step_tiles(a->k_dim, tiles, from + at, to + at, 1, q, k, v, gates);
    else step_tiles(a->k_dim, tiles, from + at, to + at, 0, q, k, v, gates);
    from = to;
  }
  return from;
}

VEC void put_normed(rm_dtype T, const unit *u, int64_t row, const float *o) {
  const rm_delta_net_args *a = u->of.a;
  const vf scale = vf_set1(rm_rms_scale(vt_sum_of_squares(RM_F32, o, a->v_dim), a->v_dim, a->eps));
  const void *z = rm_at(T, a->x, row * u->of.columns + rm_delta_z(&u->of));
  void *out = rm_at_mut(T, a->out, (row * a->n_v_heads + u->of.head) * a->v_dim);
  for (int64_t i = 0; i < a->v_dim; i += RM_LANES) {
    const int64_t n = a->v_dim - i;
    const vf normed = vf_mul(vf_mul(vf_load(o + i), scale), vt_load_n(T, a->norm, i, n)),
             gate = vt_load_n(T, z, i, n);
    vt_store_n(T, out, i, vt_round(T, vf_mul(normed, vf_times_sigmoid(gate, gate))), n);
  }
}

VEC void save_inputs(const unit *u, int64_t row) {
  const rm_delta_net_args *a = u->of.a;
  float *to = rm_delta_state(a, a->save_slots[row], u->of.head);
  for (int i = 0; i < 3 && to; i++)
    rm_delta_save_inputs(&u->of, row, to, i * a->k_dim, i < 2 ? a->k_dim : a->v_dim);
}

VEC void run_unit(rm_dtype T, const unit *u, int64_t end, int has_other_taps) {
  const rm_delta_net_args *a = u->of.a;
  const float *from = u->of.loaded ? u->of.loaded : u->state, *left = from;
  if (!u->of.loaded)
    memset(u->state, 0, (size_t)rm_packed_elems(a->v_dim, a->k_dim) * sizeof *u->state);
  if (has_other_taps) load_taps(T, u);
  for (int64_t row = u->of.first, n; row < end; row += n, from = left) {
    n = rm_min64(BLOCK_ROWS, end - row);
    for (int64_t r = 0; r < n; r++) {
      float *inputs = u->inputs + r * u->width;
      convolve(T, u, row + r, inputs);
      l2_norm(inputs, a->k_dim, 1.0f / sqrtf((float)a->k_dim));
      l2_norm(inputs + a->k_dim, a->k_dim, 1.0f);
      rm_delta_gates(&u->of, row + r, u->gates + 2 * r);
    }
    int64_t j = 0;
    for (; j + TILES * RM_N_TILE <= u->width - 2 * a->k_dim; j += TILES * RM_N_TILE)
      left = block_tiles(u, TILES, from, row, n, j);
    if (j < a->v_dim) left = block_tiles(u, 1, from, row, n, j);
    for (int64_t r = 0; r < n; r++) {
      put_normed(T, u, row + r, u->inputs + r * u->width + 2 * a->k_dim);
      save_inputs(u, row + r);
    }
  }
}

// The runs of one head are adjacent, because they have the same taps.
static void delta_task(void *arg, int thread, int) {
  delta_job *job = arg;
  for (int64_t i, of_taps = -1;;) {
    i = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
    if (i >= job->n_runs * job->a->n_v_heads) return;
    const int64_t head = i / job->n_runs;
    const int32_t *run = job->runs + i % job->n_runs;
    const unit u = carve(job->a, job->workspace + thread * job->stride, run[0], head);
    SPECIALIZE(job->a->dtype, run_unit(T, &u, run[1], head != of_taps));
    of_taps = head;
  }
}

void RM_FN(delta_net)(const rm_ctx *ctx, const rm_delta_net_args *a) {
  delta_job job = {.a = a, .runs = ctx->workspace};
  job.workspace = (float *)ctx->workspace + rm_runs_floats(a->rows);
  job.stride = unit_floats(a->k_dim, a->v_dim, a->kernel);
  job.n_runs = rm_find_runs(a->seq_of_row, a->rows, a->rows, job.runs);
  rm_parallel(ctx, a->rows * a->n_v_heads * a->k_dim * a->v_dim / 8, delta_task, &job);
}

size_t RM_FN(delta_workspace)(const rm_limits *l) {
  if (l->v_dim == 0) return 0; // a caller without delta_net
  return (size_t)(rm_runs_floats(l->max_rows) +
                  l->n_threads * unit_floats(l->k_dim, l->v_dim, l->kernel)) *
         sizeof(float);
}
