// resharding.c: see resharding.h.
#include "weights/resharding.h"

static rm_part wanted(const rm_params *params, const rm_placement *placement, int n_dims,
                      const rm_param_rows *at, int64_t rank) {
  const rm_param *param = &params->list[at->param];
  const rm_range rows = rm_param_rows_of(params, placement, param);
  rm_part part = {rank, {0, 0, 0, 0}, {1, 1, 1, 1}};
  const int d = n_dims > param->n_dims && at->outer >= 0, row_dim = d + at->transposed,
            col_dim = at->outer < 0 ? 2 : d + !at->transposed;
  // If gate and up alternate, the gate's part has the rows of both and up's part has none.
  const int both = at->turned > rm_param_extent(param);
  if (d) part.first[0] = at->outer;
  part.first[row_dim] = both ? 2 * rows.first : at->row0 + rows.first;
  part.n[row_dim] = both ? (at->row0 ? 0 : 2 * rows.n) : rows.n;
  if (param->n_dims > 1) part.n[col_dim] = param->cols;
  if (at->stride) { // the first part has all rows of the heads
    const int64_t first = rows.first / at->head_dim,
                  end = (rows.first + rows.n + at->head_dim - 1) / at->head_dim;
    part.first[d] = first * at->stride;
    part.n[d] = at->row0 ? 0 : (end - first) * at->stride;
    if (at->transposed) part.first[row_dim] = 0, part.n[row_dim] = at->head_dim;
  }
  return part;
}

void rm_list_wanted(const rm_params *params, const rm_target *target, const rm_mesh *mesh,
                    rm_part *out) {
  for (int32_t rank = 0; rank < rm_mesh_world(mesh); rank++) {
    const rm_placement placement = rm_placement_of(params->spec, mesh, rank);
    for (int64_t i = 0; i < target->n_pieces; i++)
      *out++ = wanted(params, &placement, target->n_dims, &target->pieces[i], rank);
  }
}
