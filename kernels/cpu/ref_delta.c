// ref_delta.c: the gated delta rule of docs/numerics.md §4, one value head of one sequence after
// the other, row by row.
#include "ref.h"

static void l2_norm(float *x, int64_t n, float factor) {
  const float scale = 1.0f / sqrtf(rm_ref_sum_of_squares(RM_F32, x, n) + RM_L2_EPS);
  for (int64_t i = 0; i < n; i++) x[i] = x[i] * scale * factor;
}

// Returns column j of the state times x.
static float state_dot(const rm_delta_net_args *a, const float *state, int64_t j, const float *x) {
  float sum[RM_DELTA_CHAINS] = {0};
  for (int64_t i = 0; i < a->k_dim; i++)
    sum[i % RM_DELTA_CHAINS] =
        fmaf(state[rm_packed_index(RM_F32, a->k_dim, j, i)], x[i], sum[i % RM_DELTA_CHAINS]);
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// The output before the norm replaces v, also in padded columns.
static void step(const rm_delta_net_args *a, float *state, const float *q, const float *k, float *v,
                 const float *gates) {
  for (int64_t j = 0; j < rm_round_up(a->v_dim, RM_N_TILE); j++) {
    const float delta = (v[j] - gates[0] * state_dot(a, state, j, k)) * gates[1];
    for (int64_t i = 0; i < a->k_dim; i++) {
      float *s = state + rm_packed_index(RM_F32, a->k_dim, j, i);
      *s = fmaf(k[i], delta, gates[0] * *s);
    }
    v[j] = state_dot(a, state, j, q);
  }
}

static void put_normed(const rm_delta_run *of, int64_t row, const float *o) {
  const rm_delta_net_args *a = of->a;
  const float scale = rm_rms_scale(rm_ref_sum_of_squares(RM_F32, o, a->v_dim), a->v_dim, a->eps);
  for (int64_t j = 0; j < a->v_dim; j++) {
    const float z = rm_get(a->dtype, a->x, row * of->columns + rm_delta_z(of) + j);
    rm_put(a->dtype, a->out, (row * a->n_v_heads + of->head) * a->v_dim + j,
           o[j] * scale * rm_get(a->dtype, a->norm, j) * rm_activate(RM_SILU, z));
  }
}

static void save(const rm_delta_run *of, int64_t row, const float *state) {
  const rm_delta_net_args *a = of->a;
  float *to = rm_delta_state(a, a->save_slots[row], of->head);
  if (!to) return;
  for (int64_t j = 0; j < rm_round_up(a->v_dim, RM_N_TILE); j++)
    for (int64_t i = 0; i < a->k_dim; i++) {
      const int64_t at = rm_packed_index(RM_F32, a->k_dim, j, i);
      to[at] = rm_canon(state[at]);
    }
  for (int64_t i = 0; i < of->n; i++) rm_delta_save_inputs(of, row, to, i, 1);
}

// Computes the rows of one sequence (a run) and returns the first row after them.
static int64_t run_head(const rm_delta_run *of, float *state) {
  const rm_delta_net_args *a = of->a;
  const int64_t elems = rm_packed_elems(a->v_dim, a->k_dim);
  float *q = state + elems, *k = q + a->k_dim, *v = k + a->k_dim, gates[2];
  memset(state, 0, (size_t)(elems + of->n + RM_N_TILE) * sizeof *state);
  if (of->loaded) memcpy(state, of->loaded, (size_t)elems * sizeof *state);
  int64_t row = of->first;
  do {
    for (int64_t i = 0; i < of->n; i++) q[i] = rm_delta_convolved(of, row, i);
    for (int64_t i = a->v_dim; i % RM_N_TILE; i++) v[i] = 0.0f;
    l2_norm(q, a->k_dim, 1.0f / sqrtf((float)a->k_dim));
    l2_norm(k, a->k_dim, 1.0f);
    rm_delta_gates(of, row, gates);
    step(a, state, q, k, v, gates);
    put_normed(of, row, v);
    save(of, row, state);
  } while (++row < a->rows && a->seq_of_row[row] == a->seq_of_row[of->first]);
  return row;
}

void rm_delta_net_ref(const rm_ctx *ctx, const rm_delta_net_args *a) {
  for (int64_t first = 0, end = a->rows; first < a->rows; first = end)
    for (int64_t head = 0; head < a->n_v_heads; head++) {
      const rm_delta_run run = rm_delta_run_at(a, first, head);
      end = run_head(&run, ctx->workspace);
    }
}
