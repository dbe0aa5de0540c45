// plan.c: who copies what, over random boxes, with pieces that are none and with allocations that fail.
//
// Input: a small tensor of 1 to 4 dims, up to 12 parts that ranks hold, overlapping as they like, and up to 12 that ranks want; now and
// then a size near the ends of int64, or a failing allocation. Oracle: a count for each element of each wanted part. A plan must write
// each once, from a rank that holds it; one that is refused must have had a part outside, an element that nobody holds, or no memory.
//
//   plan [--cases 30000] [--seed 1] [--plant 1: the last copy is denied; 2: the first is done twice]
#include "weights/resharding.h"

#include <string.h>

#include "base/memory.h"
#include "common/fuzz.h"

enum { MAX_PARTS = 12, MAX_SIDE = 6, MAX_ELEMENTS = MAX_SIDE * MAX_SIDE * MAX_SIDE * MAX_SIDE };

typedef struct tensor {
  fuzz f;
  rm_pieces pieces;
  int64_t shape[RM_BOX_DIMS];   // of all four dims
  rm_part held[MAX_PARTS], wanted[MAX_PARTS];
  int outside, starved;         // a part is none; an allocation was to fail
} tensor;

#define MUST(t, condition, ...) \
  do { \
    if (!(condition)) fprintf(stderr, "%s\n", fuzz_where(&(t)->f)), tiny_die(__VA_ARGS__); \
  } while (0)

// ------------------------------------------------------------------------------------------------ input
static rm_part pick_part(tensor *t, int64_t rank, int tends_to_all) {
  fuzz *f = &t->f;
  rm_part part = {.rank = rank};
  for (int d = 0; d < RM_BOX_DIMS; d++) {
    const int all = tends_to_all && !fuzz_one_in(f, 3);
    part.box.first[d] = all ? 0 : fuzz_below(f, t->shape[d] + 1);
    part.box.n[d] = all ? t->shape[d] : fuzz_below(f, t->shape[d] - part.box.first[d] + 1);
  }
  return part;
}

static int64_t pick_parts(tensor *t, rm_part *parts, int tends_to_all) {
  const int64_t n = fuzz_below(&t->f, MAX_PARTS + 1);
  for (int64_t i = 0, rank = 0; i < n; i++) {
    rank += rank < t->pieces.n_ranks - 1 && fuzz_one_in(&t->f, 2);
    parts[i] = pick_part(t, rank, tends_to_all);
    if (!fuzz_one_in(&t->f, 60)) continue;
    parts[i].box.n[fuzz_below(&t->f, RM_BOX_DIMS)] = fuzz_one_in(&t->f, 2) ? INT64_MAX : INT64_MIN;
    t->outside = 1;
  }
  return n;
}

static void make(tensor *t) {
  fuzz *f = &t->f;
  t->pieces = (rm_pieces){.name = "x", .n_dims = 1 + (int)fuzz_below(f, 4), .n_ranks = 1 + fuzz_below(f, 6)};
  t->outside = 0;
  for (int d = 0; d < RM_BOX_DIMS; d++) t->shape[d] = d < t->pieces.n_dims ? fuzz_below(f, MAX_SIDE + 1) : 1;
  memcpy(t->pieces.shape, t->shape, (size_t)t->pieces.n_dims * sizeof *t->shape);
  t->pieces.held = t->held;
  t->pieces.wanted = t->wanted;
  t->pieces.n_held = pick_parts(t, t->held, 1);
  t->pieces.n_wanted = pick_parts(t, t->wanted, 0);
  t->starved = fuzz_one_in(f, 8);
}

// ------------------------------------------------------------------------------------------------ oracle
static int contains(const rm_box *box, const int64_t at[]) {
  for (int d = 0; d < RM_BOX_DIMS; d++)
    if (at[d] < box->first[d] || at[d] >= box->first[d] + box->n[d]) return 0;
  return 1;
}

static int is_held(const tensor *t, int64_t rank, const int64_t at[]) {   // rank −1: by any
  for (int64_t i = 0; i < t->pieces.n_held; i++)
    if ((rank < 0 || t->held[i].rank == rank) && contains(&t->held[i].box, at)) return 1;
  return 0;
}

static void at_index(const tensor *t, int64_t index, int64_t at[]) {
  for (int d = RM_BOX_DIMS - 1; d >= 0; index /= t->shape[d--]) at[d] = index % t->shape[d];
}

static int64_t n_elements(const tensor *t) { return t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3]; }

// Of each rank: as often as parts of it want an element copies bring it, and each from one that holds it.
static void check_plan(tensor *t, const rm_copies *copies) {
  const int64_t n = copies->n - (t->f.plant == 1 && copies->n > 0);
  for (int64_t index = 0; index < n_elements(t); index++) {
    int64_t at[RM_BOX_DIMS], balance[8] = {0};
    at_index(t, index, at);
    for (int64_t i = 0; i < t->pieces.n_wanted; i++) balance[t->wanted[i].rank] += contains(&t->wanted[i].box, at);
    for (int64_t i = 0; i < n; i++) {
      if (!contains(&copies->list[i].box, at)) continue;
      balance[copies->list[i].to] -= 1 + (t->f.plant == 2 && i == 0);
      MUST(t, is_held(t, copies->list[i].from, at), "rank %lld gives what it does not have", (long long)copies->list[i].from);
    }
    for (int64_t rank = 0; rank < t->pieces.n_ranks; rank++)
      MUST(t, !balance[rank], "element %lld reaches rank %lld %lld times too seldom", (long long)index, (long long)rank,
           (long long)balance[rank]);
  }
}

static int anything_lacks(const tensor *t) {
  for (int64_t index = 0; index < n_elements(t); index++) {
    int64_t at[RM_BOX_DIMS];
    at_index(t, index, at);
    for (int64_t i = 0; i < t->pieces.n_wanted; i++)
      if (contains(&t->wanted[i].box, at) && !is_held(t, -1, at)) return 1;
  }
  return 0;
}

int main(int argc, char **argv) {
  static tensor t;
  long plans = 0, refused = 0, starved = 0;
  rm_copies copies = {0};
  t.f = fuzz_begin(argc, argv, 30000, 2);
  while (fuzz_next_case(&t.f)) {
    rm_error err = RM_ERROR_INIT;
    make(&t);
    if (t.starved) rm_memory_fail_at(1 + (long)fuzz_below(&t.f, 3), 0);
    const rm_code code = rm_plan_copies(&t.pieces, &copies, &err);
    rm_memory_fail_at(0, 0);
    MUST(&t, code == RM_OK || *rm_error_message(&err), "%s and no word of it", rm_code_name(code));
    rm_error_clear(&err);
    MUST(&t, (code == RM_E_LAYOUT) == t.outside, "%s for parts that are%s inside", rm_code_name(code), t.outside ? " not" : "");
    MUST(&t, code != RM_E_MEMORY || t.starved, "no memory");
    if (!code) check_plan(&t, &copies);
    if (!t.outside && code != RM_E_MEMORY)
      MUST(&t, (code == RM_E_INCOMPLETE_SYNC) == anything_lacks(&t), "%s for what ranks hold", rm_code_name(code));
    plans += !code, refused += code && code != RM_E_MEMORY, starved += code == RM_E_MEMORY;
    if (fuzz_one_in(&t.f, 10)) rm_copies_clear(&copies);
  }
  rm_copies_clear(&copies);
  MUST(&t, !rm_memory_blocks(), "%zu blocks were not given back", rm_memory_blocks());
  printf("plan: %ld plans, %ld refused, %ld out of memory, seed %" PRIu64 "\n", plans, refused, starved, t.f.seed);
  return 0;
}
