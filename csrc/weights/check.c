// check.c: see check.h. A wrong shape is the most common mistake of a sync, so its message suggests
// a cause.
#include "weights/check.h"

#include <stdio.h>
#include <string.h>

#include "base/checked.h"

rm_dims_text rm_show_dims(const int64_t *shape, int n_dims) {
  rm_dims_text out = {"["};
  size_t used = 1;
  for (int i = 0; i < n_dims && used < sizeof out.text; i++)
    used +=
        (size_t)snprintf(out.text + used, sizeof out.text - used, "%s%ld", i ? ", " : "", shape[i]);
  if (used < sizeof out.text - 1) memcpy(out.text + used, "]", 2);
  return out;
}

// Returns the probable cause of a wrong shape; "" if unknown.
static const char *shape_hint(const rm_params *params, const rm_target *want,
                              const rm_tensor *tensor) {
  const rm_param *first = &params->list[want->pieces[0].param];
  const int64_t *w = want->shape, *t = tensor->shape;
  const int n = want->n_dims, stacked = n == 3 && want->pieces[0].outer >= 0;
  const int fused = want->n_pieces > 1 && want->pieces[1].outer == want->pieces[0].outer;
  if (n < 2) return "";
  if (tensor->n_dims == n && (!stacked || t[0] == w[0])) {
    const int64_t rows = t[n - 2], cols = t[n - 1];
    if (rows == w[n - 1] && cols == w[n - 2])
      return stacked ? "; its experts are transposed" : "; it is transposed";
    if (fused && rows == first->rows && cols == first->cols)
      return stacked ? "; this name holds gate and up fused and one of them was sent"
                     : "; this name holds a fused tensor and one part was sent";
    if (!fused && !stacked && cols == w[1] && rows > w[0])
      return "; this name holds one part and a fused tensor was sent";
  }
  if (stacked && tensor->n_dims == 2) return "; this name holds all experts in one tensor";
  if (!stacked && tensor->n_dims == 3 && first->expert >= 0) return "; this name holds one expert";
  return "";
}

static rm_code check_shape(const rm_params *params, const rm_target *want, const rm_tensor *tensor,
                           const char *name, rm_error *err) {
  if (tensor->n_dims == want->n_dims &&
      memcmp(tensor->shape, want->shape, (size_t)want->n_dims * sizeof *want->shape) == 0)
    return RM_OK;
  // A vector may be sent as one row; ERNIE-4.5's routers have such biases.
  if (want->n_dims == 1 && tensor->n_dims == 2 && tensor->shape[0] == 1 &&
      tensor->shape[1] == want->shape[0])
    return RM_OK;
  RM_FAIL_IF(tensor->n_dims < 0 || tensor->n_dims > 4, RM_E_SHAPE,
             "%s: expected shape %s, got a tensor of %d dims", name,
             rm_show_dims(want->shape, want->n_dims).text, tensor->n_dims);
  return rm_fail(err, RM_E_SHAPE, "%s: expected shape %s, got %s%s", name,
                 rm_show_dims(want->shape, want->n_dims).text,
                 rm_show_dims(tensor->shape, tensor->n_dims).text,
                 shape_hint(params, want, tensor));
}

static const char *const src_names[] = {"bfloat16", "float32", "float16", "float64"};

const char *rm_dtype_name(rm_dtype dtype) { return dtype == RM_BF16 ? "bfloat16" : "float32"; }

// The decay of a delta net is float32 in some checkpoints and modules and bfloat16 in others.
static rm_code check_dtype(const rm_param *param, const rm_tensor *tensor, int cast,
                           const char *name, rm_error *err) {
  const rm_dtype want = param->dtype;
  const int widens = param->kind == RM_P_A_LOG || param->kind == RM_P_DT_BIAS,
            same = tensor->dtype == (want == RM_BF16 ? RM_SRC_BF16 : RM_SRC_F32) ||
                   (widens && tensor->dtype == RM_SRC_BF16);
  if (same || (cast && (unsigned)tensor->dtype <= RM_SRC_F64)) return RM_OK;
  return rm_fail(err, RM_E_DTYPE, "%s: expected %s, got %s (cast=True converts)", name,
                 rm_dtype_name(want),
                 (unsigned)tensor->dtype <= RM_SRC_F64 ? src_names[tensor->dtype] : "unknown");
}

// Computes how many bytes before and after `data` the strides reach. Returns 0 on overflow.
static int extents(const rm_tensor *tensor, int64_t *before, int64_t *after) {
  int64_t low = 0, high = 1;
  for (int i = 0; i < tensor->n_dims; i++) {
    int64_t reach;
    if (!rm_mul_i64(tensor->shape[i] - 1, tensor->strides[i], &reach)) return 0;
    int64_t *end = reach < 0 ? &low : &high;
    if (!rm_add_i64(*end, reach, end)) return 0;
  }
  const int64_t each = (int64_t)rm_src_bytes(tensor->dtype);
  return low > INT64_MIN / 2 && rm_mul_i64(-low, each, before) && rm_mul_i64(high, each, after);
}

static rm_code check_layout(const rm_tensor *tensor, const char *name, rm_error *err) {
  RM_FAIL_IF(!tensor->data, RM_E_UNSUPPORTED_TENSOR, "%s: the tensor has no data (null pointer)",
             name);
  int64_t before, after;
  const uintptr_t at = (uintptr_t)tensor->data;
  RM_FAIL_IF(!extents(tensor, &before, &after) || (uintptr_t)before > at ||
                 (uintptr_t)after > UINTPTR_MAX - at,
             RM_E_LAYOUT, "%s: strides %s of shape %s reach outside the address space", name,
             rm_show_dims(tensor->strides, tensor->n_dims).text,
             rm_show_dims(tensor->shape, tensor->n_dims).text);
  if (tensor->span_lo == 0 && tensor->span_hi == 0) return RM_OK;
  RM_FAIL_IF(before > tensor->span_lo || after > tensor->span_hi, RM_E_LAYOUT,
             "%s: strides %s of shape %s reach bytes [-%ld, %ld) of a buffer that is [-%ld, %ld)",
             name, rm_show_dims(tensor->strides, tensor->n_dims).text,
             rm_show_dims(tensor->shape, tensor->n_dims).text, before, after, tensor->span_lo,
             tensor->span_hi);
  return RM_OK;
}

rm_code rm_tensor_check(const rm_params *params, const rm_target *want, const rm_tensor *tensor,
                        int cast, const char *name, rm_error *err) {
  RM_TRY(check_shape(params, want, tensor, name, err));
  RM_TRY(check_dtype(&params->list[want->pieces[0].param], tensor, cast, name, err));
  return check_layout(tensor, name, err);
}
