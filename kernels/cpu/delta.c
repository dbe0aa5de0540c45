// delta.c: delta_net. A thread takes one value head of one run of rows. It computes the convolution
// of a block of rows first; then a few tiles of the state's columns go through all rows of the
// block, so that they stay in the L1 cache. A row reads the state where the row before left it, in
// the slot or in the thread's memory, and writes it where it is needed next, so nothing is copied.
#include "variant.h"

enum {
  BLOCK_ROWS = 16,
  TILES = RM_KEEP_SUMS ? 2 : 1, // tiles at a time: 8 chains of a sum, or 4 of two registers
};

typedef struct delta_job {
  const rm_delta_net_args *a;
  int32_t *runs; // [n_runs + 1] first rows of the runs
  float *workspace; // of all threads
  int64_t n_runs, stride; // floats of a thread
  _Atomic int64_t next;
} delta_job;

typedef struct unit {
  const rm_delta_net_args *a;
  int64_t head, first, columns; // first row of the run; columns of x
  int64_t k_pad, v_pad, width; // padded to lanes; width: 2·k_pad + v_pad, q, k and v
  int64_t channels[3]; // the first channels of q, k and v
  float *loaded; // the state before the run; NULL: zeros
  float *taps; // [kernel][width]
  float *inputs; // [BLOCK_ROWS][width]; o replaces v
  float *decay, *beta; // [BLOCK_ROWS]
  float *state; // of the thread
} unit;

static int64_t unit_floats(int64_t k_dim, int64_t v_dim, int64_t kernel) {
  const int64_t width = 2 * rm_round_up(k_dim, RM_LANES) + rm_round_up(v_dim, RM_LANES);
  return (kernel + BLOCK_ROWS) * width + 2 * BLOCK_ROWS + rm_packed_elems(v_dim, k_dim);
}

static unit carve(const rm_delta_net_args *a, float *memory, int64_t first, int64_t head) {
  const int32_t slot = a->load_slots[a->seq_of_row[first]];
  unit u = {.a = a,
            .head = head,
            .first = first,
            .columns = rm_delta_columns(a->n_k_heads, a->n_v_heads, a->k_dim, a->v_dim),
            .k_pad = rm_round_up(a->k_dim, RM_LANES),
            .v_pad = rm_round_up(a->v_dim, RM_LANES),
            .loaded = slot < 0 ? NULL : rm_delta_state(a, slot, head),
            .state = memory};
  for (int i = 0; i < 3; i++) u.channels[i] = rm_delta_channel(a, head, i * a->k_dim);
  u.width = 2 * u.k_pad + u.v_pad;
  u.taps = memory + rm_packed_elems(a->v_dim, a->k_dim);
  u.inputs = u.taps + a->kernel * u.width;
  u.decay = u.inputs + BLOCK_ROWS * u.width;
  u.beta = u.decay + BLOCK_ROWS;
  return u;
}

// q, k or v of a head: `n` inputs from input `from` and channel `channel` on, and their place in
// the padded width.
typedef struct part {
  int64_t from, n, at, channel;
} part;
VEC part part_of(const unit *u, int i) {
  const int64_t k_dim = u->a->k_dim;
  return (part){i * k_dim, i < 2 ? k_dim : u->a->v_dim, i * u->k_pad, u->channels[i]};
}

// The inputs of a part at row t, which may be before the run; NULL: zeros.
VEC const void *inputs_at(rm_dtype T, const unit *u, part p, int64_t t) {
  const rm_delta_net_args *a = u->a;
  if (t >= u->first) return rm_at(T, a->x, t * u->columns + p.channel);
  const int64_t before = t - u->first + a->kernel - 1;
  return u->loaded
             ? rm_at(T, rm_delta_window(a, u->loaded), before * (2 * a->k_dim + a->v_dim) + p.from)
             : NULL;
}

VEC void load_taps(rm_dtype T, const unit *u) {
  const rm_delta_net_args *a = u->a;
  for (int i = 0; i < 3; i++) {
    const part p = part_of(u, i);
    const void *conv = rm_at(T, a->conv, p.channel * a->kernel);
    for (int64_t j = 0; j < a->kernel; j++)
      for (int64_t c = 0; c < p.n; c++)
        u->taps[j * u->width + p.at + c] = rm_get(T, conv, c * a->kernel + j);
  }
}

VEC vf vf_silu(vf x) { return vf_div(x, vf_add(vf_set1(1.0f), vf_exp(vf_neg(x)))); }

VEC void convolve(rm_dtype T, const unit *u, int64_t row, float *out) {
  const rm_delta_net_args *a = u->a;
  for (int i = 0; i < 3; i++) {
    const part p = part_of(u, i);
    for (int64_t c = 0; c < p.n; c += RM_LANES) {
      const int64_t n = rm_min64(RM_LANES, p.n - c);
      vf acc = vf_zero();
      for (int64_t j = 0; j < a->kernel; j++) {
        const void *x = inputs_at(T, u, p, row - a->kernel + 1 + j);
        const vf tap = vf_load_n(u->taps + j * u->width + p.at + c, n);
        acc = vf_fma(tap, x ? vt_load_n(T, x, c, n) : vf_zero(), acc);
      }
      vf_store(out + p.at + c, vf_silu(acc));
    }
  }
}

VEC float sum_of_squares(const float *x, int64_t n) {
  vf squares = vf_zero();
  for (int64_t i = 0; i < n; i += RM_LANES) {
    const vf v = vf_load_n(x + i, rm_min64(RM_LANES, n - i));
    squares = vf_fma(v, v, squares);
  }
  return vf_tree16(squares);
}

VEC void l2_norm(float *x, int64_t n, float factor) {
  const vf scale = vf_set1(1.0f / sqrtf(sum_of_squares(x, n) + RM_L2_EPS));
  for (int64_t i = 0; i < n; i += RM_LANES)
    vf_store(x + i, vf_mul(vf_mul(vf_load(x + i), scale), vf_set1(factor)));
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

// A row's step on `tiles` tiles of the state: v becomes o.
VEC void step_tiles(const unit *u, int tiles, const float *from, float *to, int is_saved,
                    const float *q, const float *k, float *v, vf decay, float beta) {
  const int64_t k_dim = u->a->k_dim, tile = rm_packed_elems(RM_N_TILE, k_dim);
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
    delta[t] = vf_mul(vf_sub(vf_load(v + t * RM_N_TILE), known), vf_set1(beta));
    for (int c = 0; c < RM_DELTA_CHAINS; c++) sum[t][c] = vf_zero();
  }
  // All tiles are loaded before one is stored: tiles are a multiple of 4 KB apart, and a load waits
  // for a store whose address differs by such a multiple.
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

// The rows [row, row + n) of a block on the tiles from column j on. Returns where the state is.
VEC const float *block_tiles(const unit *u, int tiles, const float *from, int64_t row, int64_t n,
                             int64_t j) {
  const rm_delta_net_args *a = u->a;
  const int64_t at = rm_packed_elems(j, a->k_dim);
  for (int64_t r = 0; r < n; r++) {
    float *q = u->inputs + r * u->width, *k = q + u->k_pad, *v = k + u->k_pad + j;
    const int32_t slot = a->save_slots[row + r];
    float *to = slot < 0 ? u->state : rm_delta_state(a, slot, u->head);
    const vf decay = vf_set1(u->decay[r]);
    if (slot < 0) step_tiles(u, tiles, from + at, to + at, 0, q, k, v, decay, u->beta[r]);
    else step_tiles(u, tiles, from + at, to + at, 1, q, k, v, decay, u->beta[r]);
    from = to;
  }
  return from;
}

VEC void put_normed(rm_dtype T, const unit *u, int64_t row, const float *o) {
  const rm_delta_net_args *a = u->a;
  const vf scale = vf_set1(1.0f / sqrtf(sum_of_squares(o, a->v_dim) / (float)a->v_dim + a->eps));
  const void *z = rm_at(T, a->x, row * u->columns + rm_delta_z(a, u->head));
  void *out = rm_at_mut(T, a->out, (row * a->n_v_heads + u->head) * a->v_dim);
  for (int64_t i = 0; i < a->v_dim; i += RM_LANES) {
    const int64_t n = rm_min64(RM_LANES, a->v_dim - i);
    const vf normed = vf_mul(vf_mul(vf_load(o + i), scale), vt_load_n(T, a->norm, i, n));
    vt_store_n(T, out, i, vt_round(T, vf_mul(normed, vf_silu(vt_load_n(T, z, i, n)))), n);
  }
}

// Saves the last inputs of the convolution after a row. Ascending rows: the slot may be the loaded
// one.
VEC void save_window(rm_dtype T, const unit *u, int64_t row) {
  const rm_delta_net_args *a = u->a;
  void *window = rm_delta_window(a, rm_delta_state(a, a->save_slots[row], u->head));
  for (int64_t j = 0; j < a->kernel - 1; j++)
    for (int i = 0; i < 3; i++) {
      const part p = part_of(u, i);
      const void *x = inputs_at(T, u, p, row - a->kernel + 2 + j);
      void *to = rm_at_mut(T, window, j * (2 * a->k_dim + a->v_dim) + p.from);
      if (x) memcpy(to, x, (size_t)p.n * rm_dtype_bytes(T));
      else memset(to, 0, (size_t)p.n * rm_dtype_bytes(T));
    }
}

VEC void run_unit(rm_dtype T, const unit *u, int64_t end) {
  const rm_delta_net_args *a = u->a;
  const float *from = u->loaded ? u->loaded : u->state, *left = from;
  const float q_factor = 1.0f / sqrtf((float)a->k_dim);
  if (!u->loaded)
    memset(u->state, 0, (size_t)rm_packed_elems(a->v_dim, a->k_dim) * sizeof *u->state);
  load_taps(T, u);
  for (int64_t row = u->first, n; row < end; row += n, from = left) {
    n = rm_min64(BLOCK_ROWS, end - row);
    for (int64_t r = 0; r < n; r++) {
      float *inputs = u->inputs + r * u->width;
      const void *x = rm_at(T, a->x, (row + r) * u->columns);
      convolve(T, u, row + r, inputs);
      l2_norm(inputs, a->k_dim, q_factor);
      l2_norm(inputs + u->k_pad, a->k_dim, 1.0f);
      u->decay[r] = rm_delta_decay(a, x, u->head);
      u->beta[r] = rm_delta_beta(a, x, u->head);
    }
    int64_t j = 0;
    for (; j + TILES * RM_N_TILE <= u->v_pad; j += TILES * RM_N_TILE)
      left = block_tiles(u, TILES, from, row, n, j);
    if (j < u->v_pad) left = block_tiles(u, 1, from, row, n, j);
    for (int64_t r = 0; r < n; r++) {
      put_normed(T, u, row + r, u->inputs + r * u->width + 2 * u->k_pad);
      if (a->save_slots[row + r] >= 0) save_window(T, u, row + r);
    }
  }
}

static void delta_task(void *arg, int thread, int n_threads) {
  (void)n_threads;
  delta_job *job = arg;
  const int64_t heads = job->a->n_v_heads;
  for (;;) {
    const int64_t i = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
    if (i >= job->n_runs * heads) return;
    const int32_t *run = job->runs + i / heads;
    const unit u = carve(job->a, job->workspace + thread * job->stride, run[0], i % heads);
    SPECIALIZE(job->a->dtype, run_unit(T, &u, run[1]));
  }
}

// Floats for `runs`; an int32 is as large as a float.
static int64_t runs_floats(int64_t rows) { return rm_round_up(rows + 1, RM_LANES); }

void RM_FN(delta_net)(const rm_ctx *ctx, const rm_delta_net_args *a) {
  delta_job job = {.a = a, .runs = ctx->workspace};
  job.workspace = (float *)ctx->workspace + runs_floats(a->rows);
  job.stride = unit_floats(a->k_dim, a->v_dim, a->kernel);
  for (int64_t r = 0; r < a->rows; r++)
    if (r == 0 || a->seq_of_row[r] != a->seq_of_row[r - 1]) job.runs[job.n_runs++] = (int32_t)r;
  job.runs[job.n_runs] = (int32_t)a->rows;
  rm_parallel(ctx, a->rows * a->n_v_heads * a->k_dim * a->v_dim / 8, delta_task, &job);
}

size_t RM_FN(delta_workspace)(const rm_limits *l) {
  if (l->v_dim == 0) return 0; // a caller without delta_net
  return (size_t)(runs_floats(l->max_rows) +
                  l->n_threads * unit_floats(l->k_dim, l->v_dim, l->kernel)) *
         sizeof(float);
}
