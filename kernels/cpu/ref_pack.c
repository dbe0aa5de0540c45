// ref_pack.c: pack, one element after the other.
#include "pack_bits.h"
#include "ref.h"

static int64_t place(const rm_pack_args *args, int64_t row, int64_t col) {
  const int64_t at = args->dst_row0 + row;
  if (args->layout == RM_PLAIN) return at * args->dst_cols + col;
  const int64_t packed_row =
      args->layout == RM_PACKED ? at : rm_gate_up_row(at, args->layout == RM_PACKED_UP);
  return rm_packed_index(args->dst_dtype, args->dst_cols, packed_row, col);
}

static uint32_t stored_bits(const rm_pack_args *args, int64_t row, int64_t col) {
  const char *src = (const char *)args->src +
                    (row * args->row_stride + col * args->col_stride) * src_bytes(args->src_dtype);
  if (args->dst_dtype == RM_F32) return f32_from(src, args->src_dtype);
  return args->src_dtype == RM_SRC_BF16 ? load16(src)
                                        : bf16_from_f32(f32_from(src, args->src_dtype));
}

// Writes zeros after the last column, up to a whole tile.
static void write_pads(const rm_pack_args *args, int64_t row) {
  if (args->layout == RM_PLAIN) return;
  const size_t bytes = rm_dtype_bytes(args->dst_dtype);
  for (int64_t col = args->cols; col < rm_round_up(args->cols, RM_K_BLOCK); col++)
    memset(rm_at_mut(args->dst_dtype, args->dst, place(args, row, col)), 0, bytes);
}

void rm_pack_ref(const rm_ctx *, rm_pack_args *args) {
  const size_t bytes = rm_dtype_bytes(args->dst_dtype);
  args->digest = 0;
  args->nonfinite_index = args->diff_index = -1;
  for (int64_t row = 0; row < args->rows; row++) {
    for (int64_t col = 0; col < args->cols; col++) {
      const uint32_t stored = stored_bits(args, row, col);
      const int64_t index = row * args->cols + col;
      void *dst = rm_at_mut(args->dst_dtype, args->dst, place(args, row, col));
      args->digest += element_digest(args->index0 + index, stored, args->dst_dtype);
      if (args->nonfinite_index < 0 && is_nonfinite(stored, args->dst_dtype))
        args->nonfinite_index = index;
      if (!args->compare) memcpy(dst, &stored, bytes); // little-endian: bf16 is in the low half
      else if (args->diff_index < 0 && memcmp(dst, &stored, bytes) != 0) args->diff_index = index;
    }
    if (!args->compare) write_pads(args, row);
  }
}
