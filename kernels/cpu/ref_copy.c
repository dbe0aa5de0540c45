// ref_copy.c: the ops that only copy rows; embed may scale them. All CPU variants share them.
#include "ref.h"
#include "threads.h"

static void embed_row(const rm_embed_args *a, int64_t row) {
  const int64_t bytes = (int64_t)rm_dtype_bytes(a->dtype), id = a->ids[row];
  char *out = (char *)a->out + row * a->hidden * bytes;
  // Elements that are adjacent in the table.
  const int64_t run = !a->packed ? a->hidden : a->dtype == RM_BF16 ? 2 : 1;
  for (int64_t k = 0; k < a->hidden; k += run) {
    const int64_t from = a->packed ? rm_packed_index(a->dtype, a->hidden, id, k) : id * a->hidden;
    memcpy(out + k * bytes, (const char *)a->table + from * bytes,
           (size_t)(rm_min64(run, a->hidden - k) * bytes));
  }
  for (int64_t k = 0; k < a->hidden && a->scale != 0.0f; k++)
    rm_put(a->dtype, out, k, a->scale * rm_get(a->dtype, out, k));
}
RM_ROW_OP(rm_embed_ref, embed, a->rows * a->hidden, embed_row(a, r))

static void gather_row(const rm_gather_rows_args *a, int64_t row) {
  if (a->from[row] >= 0)
    memcpy((char *)a->out + (size_t)row * a->row_bytes,
           (const char *)a->x + (size_t)a->from[row] * a->row_bytes, a->row_bytes);
}
RM_ROW_OP(rm_gather_rows_ref, gather_rows, a->rows *(int64_t)(a->row_bytes / 4), gather_row(a, r))

static void permute_row(const void *args, int, int64_t row) {
  const rm_permute_args *a = args;
  for (int64_t i = row * a->top_k; i < (row + 1) * a->top_k; i++)
    if (a->place[i] >= 0)
      memcpy(rm_at_mut(a->dtype, a->x_out, a->place[i] * a->hidden),
             rm_at(a->dtype, a->x, row * a->hidden), (size_t)a->hidden * rm_dtype_bytes(a->dtype));
}

void rm_permute_ref(const rm_ctx *ctx, const rm_permute_args *a) {
  const int64_t n = a->rows * a->top_k;
  memset(a->group_rows, 0, (size_t)(a->n_experts + 1) * sizeof *a->group_rows);
  for (int64_t i = 0; i < n; i++)
    if (a->ids[i] >= 0) a->group_rows[a->ids[i] + 1]++;
  for (int64_t e = 0; e < a->n_experts; e++) a->group_rows[e + 1] += a->group_rows[e];
  for (int64_t i = 0; i < n; i++)
    a->place[i] = a->ids[i] < 0 ? -1 : a->group_rows[a->ids[i]]++; // turns starts into ends
  for (int64_t e = a->n_experts; e > 0; e--)
    a->group_rows[e] = a->group_rows[e - 1]; // restores the starts
  a->group_rows[0] = 0;
  rm_each_row(ctx, a->rows, n * a->hidden / 4, permute_row, a);
}
