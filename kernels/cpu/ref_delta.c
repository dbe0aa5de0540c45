// ref_delta.c: the gated delta rule of docs/numerics.md, one value head of one sequence after the
// other, row by row.
#include "ref.h"

typedef struct head_run { // a value head of the rows of a sequence
  const rm_delta_net_args *a;
  int64_t head, first, columns; // first row; columns of x
  float *loaded; // NULL: zeros
} head_run;

// Where input i of the convolution at row t is; NULL: zero. t may be before the run.
static const void *input_at(const head_run *h, int64_t t, int64_t i) {
  const rm_delta_net_args *a = h->a;
  if (t >= h->first) return rm_at(a->dtype, a->x, t * h->columns + rm_delta_channel(a, h->head, i));
  if (!h->loaded) return NULL;
  const int64_t before = t - h->first + a->kernel - 1;
  return rm_at(a->dtype, rm_delta_window(a, h->loaded), before * (2 * a->k_dim + a->v_dim) + i);
}

static float convolved(const head_run *h, int64_t row, int64_t i) {
  const rm_delta_net_args *a = h->a;
  const int64_t channel = rm_delta_channel(a, h->head, i);
  float acc = 0.0f;
  for (int64_t j = 0; j < a->kernel; j++) {
    const void *x = input_at(h, row - a->kernel + 1 + j, i);
    acc = fmaf(rm_get(a->dtype, a->conv, channel * a->kernel + j),
               x ? rm_get(a->dtype, x, 0) : 0.0f, acc);
  }
  return rm_activate(RM_SILU, acc);
}

static float sum_of_squares(const float *x, int64_t n) {
  float partial[RM_LANES] = {0};
  for (int64_t i = 0; i < n; i++) partial[i % RM_LANES] = fmaf(x[i], x[i], partial[i % RM_LANES]);
  return rm_tree16(partial);
}

// Column j of the state times x.
static float state_dot(const rm_delta_net_args *a, const float *state, int64_t j, const float *x) {
  float sum[RM_DELTA_CHAINS] = {0};
  for (int64_t i = 0; i < a->k_dim; i++)
    sum[i % RM_DELTA_CHAINS] =
        fmaf(state[rm_packed_index(RM_F32, a->k_dim, j, i)], x[i], sum[i % RM_DELTA_CHAINS]);
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// o ← the row's output before the norm; updates the state. inputs: q, k and v after the
// convolution.
static void delta_step(const head_run *h, int64_t row, float *state, float *inputs, float *o) {
  const rm_delta_net_args *a = h->a;
  float *q = inputs, *k = q + a->k_dim, *v = k + a->k_dim;
  const void *x = rm_at(a->dtype, a->x, row * h->columns);
  const float decay = rm_delta_decay(a, x, h->head), beta = rm_delta_beta(a, x, h->head);
  const float q_scale = 1.0f / sqrtf(sum_of_squares(q, a->k_dim) + RM_L2_EPS),
              k_scale = 1.0f / sqrtf(sum_of_squares(k, a->k_dim) + RM_L2_EPS);
  for (int64_t i = 0; i < a->k_dim; i++) {
    q[i] = q[i] * q_scale * (1.0f / sqrtf((float)a->k_dim));
    k[i] = k[i] * k_scale;
  }
  for (int64_t j = 0; j < rm_round_up(a->v_dim, RM_N_TILE); j++) {
    const float value = j < a->v_dim ? v[j] : 0.0f,
                delta = (value - decay * state_dot(a, state, j, k)) * beta;
    for (int64_t i = 0; i < a->k_dim; i++) {
      float *s = state + rm_packed_index(RM_F32, a->k_dim, j, i);
      *s = fmaf(k[i], delta, decay * *s);
    }
    o[j] = state_dot(a, state, j, q);
  }
}

static void put_normed(const head_run *h, int64_t row, const float *o) {
  const rm_delta_net_args *a = h->a;
  const float scale = 1.0f / sqrtf(sum_of_squares(o, a->v_dim) / (float)a->v_dim + a->eps);
  for (int64_t j = 0; j < a->v_dim; j++) {
    const float z = rm_get(a->dtype, a->x, row * h->columns + rm_delta_z(a, h->head) + j);
    rm_put(a->dtype, a->out, (row * a->n_v_heads + h->head) * a->v_dim + j,
           o[j] * scale * rm_get(a->dtype, a->norm, j) * rm_activate(RM_SILU, z));
  }
}

static void save(const head_run *h, int64_t row, const float *state) {
  const rm_delta_net_args *a = h->a;
  const int64_t n = 2 * a->k_dim + a->v_dim;
  static const uint32_t zero = 0;
  float *to = rm_delta_state(a, a->save_slots[row], h->head);
  for (int64_t j = 0; j < rm_round_up(a->v_dim, RM_N_TILE); j++)
    for (int64_t i = 0; i < a->k_dim; i++) {
      const int64_t at = rm_packed_index(RM_F32, a->k_dim, j, i);
      to[at] = rm_canon(state[at]);
    }
  for (int64_t j = 0; j < a->kernel - 1; j++) // ascending: `to` may be h->loaded
    for (int64_t i = 0; i < n; i++) {
      const void *x = input_at(h, row - a->kernel + 2 + j, i);
      rm_copy_elem(a->dtype, rm_delta_window(a, to), j * n + i, x ? x : &zero, 0);
    }
}

static void run_head(const head_run *h, int64_t end, float *state) {
  const rm_delta_net_args *a = h->a;
  const int64_t elems = rm_packed_elems(a->v_dim, a->k_dim);
  float *inputs = state + elems, *o = inputs + 2 * a->k_dim + a->v_dim;
  if (h->loaded) memcpy(state, h->loaded, (size_t)elems * sizeof *state);
  else memset(state, 0, (size_t)elems * sizeof *state);
  for (int64_t row = h->first; row < end; row++) {
    for (int64_t i = 0; i < 2 * a->k_dim + a->v_dim; i++) inputs[i] = convolved(h, row, i);
    delta_step(h, row, state, inputs, o);
    put_normed(h, row, o);
    if (a->save_slots[row] >= 0) save(h, row, state);
  }
}

void rm_delta_net_ref(const rm_ctx *ctx, const rm_delta_net_args *a) {
  for (int64_t first = 0, end; first < a->rows; first = end) {
    const int32_t slot = a->load_slots[a->seq_of_row[first]];
    for (end = first + 1; end < a->rows && a->seq_of_row[end] == a->seq_of_row[first];) end++;
    for (int64_t head = 0; head < a->n_v_heads; head++)
      run_head(
          &(head_run){.a = a,
                      .head = head,
                      .first = first,
                      .columns = rm_delta_columns(a->n_k_heads, a->n_v_heads, a->k_dim, a->v_dim),
                      .loaded = slot < 0 ? NULL : rm_delta_state(a, slot, head)},
          end, ctx->workspace);
  }
}
