// norm.c: rms_norm with its residual, and sigmoid_gate.
#include "variant.h"

// sigmoid(logit), rounded to T.
VEC vf gate_of(rm_dtype T, vf logit) { return vt_round(T, vf_times_sigmoid(vf_set1(1.0f), logit)); }

VEC void gate_row(rm_dtype T, const rm_sigmoid_gate_args *a, int64_t row) {
  const int64_t base = row * a->n;
  for (int64_t i = 0; i < a->n; i += RM_LANES) {
    const int64_t n = rm_min64(RM_LANES, a->n - i);
    const vf gate = gate_of(T, vt_load_n(T, a->gate, base + i, n));
    vt_store_n(T, a->out, base + i, vt_round(T, vf_mul(gate, vt_load_n(T, a->x, base + i, n))), n);
  }
}

ROW_OP(sigmoid_gate, a->rows * a->n, SPECIALIZE(a->dtype, gate_row(T, a, r)))

VEC void norm_row(rm_dtype T, const rm_rms_norm_args *a, int64_t row) {
  const int64_t base = row * a->n;
  const int is_scaled = a->x_gate || a->x_scale != 0.0f;
  const vf factor =
      a->x_gate ? gate_of(T, vf_set1(rm_get(T, a->x_gate, row))) : vf_set1(a->x_scale);
  vf squares = vf_zero();
  for (int64_t i = 0; i < a->n; i += RM_LANES) {
    const int64_t n = rm_min64(RM_LANES, a->n - i);
    vf h = vt_load_n(T, a->residual, base + i, n);
    if (a->x) {
      const vf x = vt_load_n(T, a->x, base + i, n);
      h = vt_round(T, vf_add(h, is_scaled ? vt_round(T, vf_mul(factor, x)) : x));
      vt_store_n(T, a->residual, base + i, h, n);
    }
    squares = vf_fma(h, h, squares);
  }
  if (!a->weight) {
    if (a->out)
      memcpy(rm_at_mut(T, a->out, base), rm_at(T, a->residual, base),
             (size_t)a->n * rm_dtype_bytes(T));
    return;
  }
  const vf scale = vf_set1(rm_rms_scale(vf_tree16(squares), a->n, a->eps));
  for (int64_t i = 0; i < a->n; i += RM_LANES) {
    const int64_t n = rm_min64(RM_LANES, a->n - i);
    const vf t = vf_mul(vt_load_n(T, a->residual, base + i, n), scale);
    vt_store_n(T, a->out, base + i,
               vt_weighted(T, a->zero_centered, vt_load_n(T, a->weight, i, n), t), n);
  }
}

ROW_OP(rms_norm, a->rows * a->n, SPECIALIZE(a->dtype, norm_row(T, a, r)))
