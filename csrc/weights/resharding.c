// resharding.c: see resharding.h. The intersection of a wanted box with a holder's box becomes a
// copy; the rest, up to two slabs for each dim, is looked up at the next holder. Slabs are
// disjoint, so an element is copied once. Slabs that are left after the last holder are missing.
#include "weights/resharding.h"

#include "base/checked.h"
#include "base/memory.h"
#include "weights/check.h"

enum { MAX_COPIES = 1 << 20 };

// ------------------------------------------------------------------------------------------ lists
// Makes room for one more element and returns the list; on an error returns NULL and sets *code.
static void *with_room(void *list, int64_t n, int64_t *capacity, size_t each, rm_code *code,
                       rm_error *err) {
  *code = RM_OK;
  if (n < *capacity) return list;
  const int64_t more = *capacity ? 2 * *capacity : 16;
  if (more > MAX_COPIES) {
    *code = rm_fail(err, RM_E_LIMIT, "the pieces of a tensor make more than %d copies", MAX_COPIES);
    return NULL;
  }
  void *grown = rm_realloc(list, (size_t)more, each);
  if (grown) *capacity = more;
  else *code = rm_no_memory(err, "the pieces of a tensor", 0);
  return grown;
}

static rm_code add_part(rm_parts *parts, rm_part part, rm_error *err) {
  rm_code code;
  rm_part *list = with_room(parts->list, parts->n, &parts->capacity, sizeof part, &code, err);
  if (code) return code;
  parts->list = list;
  parts->list[parts->n++] = part;
  return RM_OK;
}

static rm_code add_copy(rm_copies *copies, rm_copy copy, rm_error *err) {
  rm_code code;
  rm_copy *list = with_room(copies->list, copies->n, &copies->capacity, sizeof copy, &code, err);
  if (code) return code;
  copies->list = list;
  copies->list[copies->n++] = copy;
  return RM_OK;
}

void rm_copies_clear(rm_copies *copies) {
  rm_free(copies->list);
  *copies = (rm_copies){0};
}

void rm_parts_clear(rm_parts *parts) {
  rm_free(parts->list);
  *parts = (rm_parts){0};
}

// -------------------------------------------------------------------------------------- arguments
static int is_empty(const rm_box *box) {
  for (int d = 0; d < RM_BOX_DIMS; d++)
    if (!box->n[d]) return 1;
  return 0;
}

static rm_code check_parts(const rm_pieces *p, const int64_t shape[], const char *what,
                           const rm_part *parts, int64_t n, rm_error *err) {
  for (int64_t i = 0; i < n; i++) {
    const rm_part *part = &parts[i];
    if (part->rank < 0 || part->rank >= p->n_ranks || (i && part->rank < parts[i - 1].rank))
      return rm_fail(err, RM_E_LAYOUT,
                     "%s: expected parts %s by ascending ranks below %lld, got rank %lld", p->name,
                     what, (long long)p->n_ranks, (long long)part->rank);
    for (int d = 0; d < RM_BOX_DIMS; d++) {
      const int64_t first = part->box.first[d], rows = part->box.n[d];
      if (first < 0 || rows < 0 || first > shape[d] || rows > shape[d] - first)
        return rm_fail(
            err, RM_E_LAYOUT,
            "%s: the part %s by rank %lld: expected it inside shape %s, got %lld from %lld on in "
            "dim %d",
            p->name, what, (long long)part->rank, rm_show_dims(p->shape, p->n_dims).text,
            (long long)rows, (long long)first, d);
    }
  }
  return RM_OK;
}

static rm_code check_pieces(const rm_pieces *p, rm_error *err) {
  int64_t shape[RM_BOX_DIMS] = {1, 1, 1, 1}, elements = 1;
  if (p->n_dims < 0 || p->n_dims > RM_BOX_DIMS)
    return rm_fail(err, RM_E_LAYOUT, "%s: expected a tensor of at most %d dims, got %d", p->name,
                   RM_BOX_DIMS, p->n_dims);
  for (int d = 0; d < p->n_dims; d++) {
    shape[d] = p->shape[d];
    if (shape[d] < 0 || !rm_mul_i64(elements, shape[d] ? shape[d] : 1, &elements))
      return rm_fail(err, RM_E_LAYOUT, "%s: shape %s cannot be addressed", p->name,
                     rm_show_dims(p->shape, p->n_dims).text);
  }
  const rm_code code = check_parts(p, shape, "held", p->held, p->n_held, err);
  return code ? code : check_parts(p, shape, "wanted", p->wanted, p->n_wanted, err);
}

// ------------------------------------------------------------------------------------------ boxes
// Returns whether the two boxes share an element; *out: their intersection.
static int intersect(const rm_box *a, const rm_box *b, rm_box *out) {
  for (int d = 0; d < RM_BOX_DIMS; d++) {
    const int64_t a_end = a->first[d] + a->n[d], b_end = b->first[d] + b->n[d];
    out->first[d] = a->first[d] > b->first[d] ? a->first[d] : b->first[d];
    out->n[d] = (a_end < b_end ? a_end : b_end) - out->first[d];
    if (out->n[d] <= 0) return 0;
  }
  return 1;
}

// Adds the parts of `whole` outside of `inner`, which lies in it: for each dim a slab before and
// one behind, restricted to inner's range in the dims before.
static rm_code add_slabs(rm_parts *left, rm_part whole, const rm_box *inner, rm_error *err) {
  for (int d = 0; d < RM_BOX_DIMS; d++) {
    const int64_t end = whole.box.first[d] + whole.box.n[d],
                  inner_end = inner->first[d] + inner->n[d];
    rm_part before = whole, behind = whole;
    before.box.n[d] = inner->first[d] - whole.box.first[d];
    behind.box.first[d] = inner_end;
    behind.box.n[d] = end - inner_end;
    rm_code code = before.box.n[d] ? add_part(left, before, err) : RM_OK;
    if (!code && behind.box.n[d]) code = add_part(left, behind, err);
    if (code) return code;
    whole.box.first[d] = inner->first[d];
    whole.box.n[d] = inner->n[d];
  }
  return RM_OK;
}

// ----------------------------------------------------------------------------------------- copies
// Moves the intersection of `left` with `held` to the copies. New slabs do not intersect `held`.
static rm_code take(rm_parts *left, const rm_part *held, rm_copies *out, rm_error *err) {
  rm_code code = RM_OK;
  for (int64_t i = 0; i < left->n && !code;) {
    rm_box both;
    if (!intersect(&left->list[i].box, &held->box, &both)) {
      i++;
      continue;
    }
    const rm_part whole = left->list[i];
    left->list[i] = left->list[--left->n];
    code = add_copy(out, (rm_copy){held->rank, whole.rank, both}, err);
    if (!code) code = add_slabs(left, whole, &both, err);
  }
  return code;
}

static int comes_before(const rm_box *a, const rm_box *b) {
  for (int d = 0; d < RM_BOX_DIMS; d++)
    if (a->first[d] != b->first[d]) return a->first[d] < b->first[d];
  return 0;
}

static rm_code fail_missing(const rm_pieces *p, const rm_parts *left, rm_error *err) {
  const rm_part *first = &left->list[0];
  for (int64_t i = 1; i < left->n; i++)
    if (comes_before(&left->list[i].box, &first->box)) first = &left->list[i];
  return rm_fail(err, RM_E_INCOMPLETE_SYNC,
                 "%s: element %s of shape %s is in no rank's piece, and rank %lld needs it",
                 p->name, rm_show_dims(first->box.first, p->n_dims).text,
                 rm_show_dims(p->shape, p->n_dims).text, (long long)first->rank);
}

static int64_t first_of_rank(const rm_pieces *p, int64_t rank) {
  int64_t low = 0, high = p->n_held;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (p->held[middle].rank < rank) low = middle + 1;
    else high = middle;
  }
  return low;
}

static rm_code plan_part(const rm_pieces *p, const rm_part *wanted, rm_parts *left, rm_copies *out,
                         rm_error *err) {
  const int64_t begin = first_of_rank(p, wanted->rank);
  left->n = 0;
  if (is_empty(&wanted->box)) return RM_OK;
  rm_code code = add_part(left, *wanted, err);
  for (int64_t i = 0; i < p->n_held && left->n && !code; i++)
    code = take(left, &p->held[(begin + i) % p->n_held], out, err);
  return code || !left->n ? code : fail_missing(p, left, err);
}

rm_code rm_plan_copies(const rm_pieces *pieces, rm_copies *out, rm_error *err) {
  rm_parts left = {0};
  rm_code code = check_pieces(pieces, err);
  out->n = 0;
  for (int64_t i = 0; i < pieces->n_wanted && !code; i++)
    code = plan_part(pieces, &pieces->wanted[i], &left, out, err);
  rm_parts_clear(&left);
  return code;
}

// --------------------------------------------------------------------------------- needs of a mesh
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
  return add_part(parts, *run, err);
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
