// resharding.c: see resharding.h.
#include "weights/resharding.h"

#include "base/memory.h"

static rm_code add_part(rm_parts *parts, const rm_part *part, rm_error *err) {
  if (parts->n == parts->capacity) {
    const int64_t more = parts->capacity ? 2 * parts->capacity : 16;
    rm_part *grown = rm_realloc(parts->list, (size_t)more, sizeof *grown);
    if (!grown)
      return rm_fail(err, RM_E_MEMORY, "no memory for %lld parts of a tensor", (long long)more);
    parts->list = grown;
    parts->capacity = more;
  }
  parts->list[parts->n++] = *part;
  return RM_OK;
}

void rm_parts_clear(rm_parts *parts) {
  rm_free(parts->list);
  *parts = (rm_parts){0};
}

static int is_empty(const rm_box *box) {
  for (int d = 0; d < RM_BOX_DIMS; d++)
    if (!box->n[d]) return 1;
  return 0;
}

// Extends `part` by `next` and returns 1 if both have the same rank, `next` begins where `part`
// ends in dim d, and they are equal in all other dims. Else returns 0.
static int joins(rm_part *part, const rm_part *next, int d) {
  for (int other = 0; other < RM_BOX_DIMS; other++) {
    const int same = part->box.first[other] == next->box.first[other] &&
                     part->box.n[other] == next->box.n[other];
    if (other != d && !same) return 0;
  }
  if (part->rank != next->rank || part->box.first[d] + part->box.n[d] != next->box.first[d])
    return 0;
  part->box.n[d] += next->box.n[d];
  return 1;
}

// Runs of one expert: three for the largest fused tensor (q, k, v), and one more.
enum { MAX_RUNS = 4 };

// Merges a run with one of the last few if possible: runs of consecutive experts are often adjacent
// in the first dim. Else adds it.
static rm_code add_run(rm_parts *parts, const rm_part *run, rm_error *err) {
  for (int64_t i = parts->n - 1; i >= 0 && i >= parts->n - MAX_RUNS; i--)
    if (joins(&parts->list[i], run, 0)) return RM_OK;
  return add_part(parts, run, err);
}

// Adds the rows of one expert that a rank needs (the elements, if the parameter is a vector).
// Adjacent rows are merged. *piece moves to the next expert.
static rm_code add_expert(const rm_params *params, const rm_target *target,
                          const rm_placement *placement, int64_t *piece, int64_t rank,
                          rm_parts *out, rm_error *err) {
  const int64_t outer = target->pieces[*piece].outer;
  rm_part runs[MAX_RUNS];
  int n_runs = 0;
  for (; *piece < target->n_pieces && target->pieces[*piece].outer == outer && n_runs < MAX_RUNS;
       ++*piece) {
    const rm_param_rows *at = &target->pieces[*piece];
    const rm_param *param = &params->list[at->param];
    const rm_range rows = rm_param_rows_of(params, placement, param);
    rm_part run = {rank, {{0, 0, 0, 0}, {1, 1, 1, 1}}};
    const int d = target->n_dims == 3;
    run.box.first[0] = outer;
    run.box.first[d] = at->row0 + rows.first;
    run.box.n[d] = rows.n;
    if (target->n_dims > 1) run.box.n[d + 1] = param->cols;
    if (!is_empty(&run.box) && !(n_runs && joins(&runs[n_runs - 1], &run, d))) runs[n_runs++] = run;
  }
  rm_code code = RM_OK;
  for (int i = 0; i < n_runs && !code; i++) code = add_run(out, &runs[i], err);
  return code;
}

rm_code rm_plan_wanted(const rm_params *params, const rm_target *target, const rm_mesh *mesh,
                       rm_parts *out, rm_error *err) {
  out->n = 0;
  for (int32_t rank = 0; rank < rm_mesh_world(mesh); rank++) {
    const rm_placement placement = rm_placement_of(params->spec, mesh, rank);
    rm_code code = RM_OK;
    for (int64_t piece = 0; piece < target->n_pieces && !code;)
      code = add_expert(params, target, &placement, &piece, rank, out, err);
    if (code) return code;
  }
  return RM_OK;
}
