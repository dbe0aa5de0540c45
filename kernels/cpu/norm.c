// norm.c: rms_norm with its residual, embed and gather_rows: ops that read rows of activations
// once.
#include "variant.h"

VEC vf gate_of(rm_dtype T, const rm_rms_norm_args *a, int64_t row) {
  const vf logit = vf_set1(rm_get(T, a->x_gate, row));
  return vt_round(T, vf_div(vf_set1(1.0f), vf_add(vf_set1(1.0f), vf_exp(vf_neg(logit)))));
}

VEC void norm_row(rm_dtype T, const rm_rms_norm_args *a, int64_t row) {
  const int64_t base = row * a->n;
  const vf gate = a->x_gate ? gate_of(T, a, row) : vf_zero();
  vf squares = vf_zero();
  for (int64_t i = 0; i < a->n; i += RM_LANES) {
    const int64_t n = rm_min64(RM_LANES, a->n - i);
    vf h = vt_load_n(T, a->residual, base + i, n);
    if (a->x) {
      const vf x = vt_load_n(T, a->x, base + i, n);
      h = vt_round(T, vf_add(h, a->x_gate ? vt_round(T, vf_mul(gate, x)) : x));
      vt_store_n(T, a->residual, base + i, h, n);
    }
    squares = vf_fma(h, h, squares);
  }
  if (!a->weight) {
    if (a->out)
      memcpy(at_mut(T, a->out, base), at(T, a->residual, base), (size_t)a->n * rm_dtype_bytes(T));
    return;
  }
  const vf scale = vf_set1(1.0f / sqrtf(vf_tree16(squares) / (float)a->n + a->eps));
  for (int64_t i = 0; i < a->n; i += RM_LANES) {
    const int64_t n = rm_min64(RM_LANES, a->n - i);
    const vf t = vt_round(T, vf_mul(vt_load_n(T, a->residual, base + i, n), scale));
    vt_store_n(T, a->out, base + i, vt_round(T, vf_mul(vt_load_n(T, a->weight, i, n), t)), n);
  }
}

static void norm_task(void *arg, int thread, int n_threads) {
  const rm_rms_norm_args *a = arg;
  int64_t from, to;
  rm_split(a->rows, thread, n_threads, &from, &to);
  for (int64_t r = from; r < to; r++) SPECIALIZE(a->dtype, norm_row(T, a, r));
}

void RM_FN(rms_norm)(const rm_ctx *ctx, const rm_rms_norm_args *a) {
  rm_rms_norm_args args = *a;
  rm_parallel(ctx, a->rows * a->n, norm_task, &args);
}

static void embed_row(const rm_embed_args *a, int64_t row) {
  const int64_t bytes = (int64_t)rm_dtype_bytes(a->dtype), id = a->ids[row];
  char *out = (char *)a->out + row * a->hidden * bytes;
  if (!a->packed) {
    memcpy(out, (const char *)a->table + id * a->hidden * bytes, (size_t)(a->hidden * bytes));
    return;
  }
  const int64_t run = a->dtype == RM_BF16 ? 2 : 1; // k that are adjacent in a tile
  for (int64_t k = 0; k < a->hidden; k += run) {
    const char *from = (const char *)a->table + rm_packed_index(a->dtype, a->hidden, id, k) * bytes;
    memcpy(out + k * bytes, from, (size_t)(rm_min64(run, a->hidden - k) * bytes));
  }
}

static void embed_task(void *arg, int thread, int n_threads) {
  const rm_embed_args *a = arg;
  int64_t from, to;
  rm_split(a->rows, thread, n_threads, &from, &to);
  for (int64_t r = from; r < to; r++) embed_row(a, r);
}

void RM_FN(embed)(const rm_ctx *ctx, const rm_embed_args *a) {
  rm_embed_args args = *a;
  rm_parallel(ctx, a->rows * a->hidden, embed_task, &args);
}

static void gather_task(void *arg, int thread, int n_threads) {
  const rm_gather_rows_args *a = arg;
  int64_t from, to;
  rm_split(a->rows, thread, n_threads, &from, &to);
  for (int64_t r = from; r < to; r++)
    if (a->from[r] >= 0)
      memcpy((char *)a->out + (size_t)r * a->row_bytes,
             (const char *)a->x + (size_t)a->from[r] * a->row_bytes, a->row_bytes);
}

void RM_FN(gather_rows)(const rm_ctx *ctx, const rm_gather_rows_args *a) {
  rm_gather_rows_args args = *a;
  rm_parallel(ctx, a->rows * (int64_t)(a->row_bytes / 4), gather_task, &args);
}
