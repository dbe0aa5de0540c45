// check_moe.cpp: router, permute, static_dispatch and combine.
#include "check.h"

namespace {

struct shape {
  int64_t rows, hidden, n_experts, top_k;
};

size_t of_choices(shape s) { return static_cast<size_t>(s.rows * s.top_k); }

// Distinct ids in a row, from few experts or from neighbours, at random.
int32_t *random_ids(shape s) {
  int32_t *ids = array<int32_t>(s.rows * s.top_k);
  for (int64_t r = 0; r < s.rows; r++) {
    const int64_t span = pick(2) ? s.n_experts : s.top_k + pick(s.n_experts - s.top_k + 1),
                  first = pick(s.n_experts - span + 1);
    for (int64_t k = 0; k < s.top_k; k++) {
      int32_t *id = ids + r * s.top_k + k;
      bool taken = true;
      while (taken) {
        *id = static_cast<int32_t>(first + pick(span));
        taken = false;
        for (int32_t *other = ids + r * s.top_k; other < id; other++) taken |= *other == *id;
      }
    }
  }
  return ids;
}

enum rows_kind { PLAIN, EQUAL, HALF_EQUAL, NANS };

// One of the possible numbers of expert groups; 0: without groups.
int64_t random_groups(int64_t n_experts) {
  const int64_t n = 2 << pick(6);
  return n_experts % n || n_experts / n < 2 ? 0 : n;
}

bool router_case(rm_dtype dtype, shape s, rows_kind kind_of, int renormalize) {
  rm_router_args a = {};
  void *x = numbers(dtype, s.rows * s.hidden, kind_of == NANS ? WILD : TAME),
       *w = numbers(dtype, rm_packed_elems(s.n_experts, s.hidden));
  const size_t row_bytes = static_cast<size_t>(s.hidden) * rm_dtype_bytes(dtype);
  if (kind_of == EQUAL) memset(x, 0, static_cast<size_t>(s.rows) * row_bytes);
  if (kind_of == HALF_EQUAL)
    memset(w, 0,
           static_cast<size_t>(rm_packed_elems(s.n_experts / 2 + 1, s.hidden)) *
               rm_dtype_bytes(dtype));
  if (kind_of == NANS && s.rows > 1) memset(x, 0xff, row_bytes);
  const packed both = {w, relaid_matrices(w, dtype, 1, s.n_experts, s.hidden, false)};
  a.x = x,
  a.bias = pick(2)
               ? static_cast<float *>(numbers(RM_F32, s.n_experts, kind_of == NANS ? WILD : TAME))
               : nullptr;
  a.rows = s.rows, a.hidden = s.hidden, a.n_experts = s.n_experts, a.top_k = s.top_k,
  a.renormalize = renormalize, a.dtype = dtype;
  a.score = pick(2) ? RM_SCORE_SIGMOID : RM_SCORE_SOFTMAX, a.route_scale = pick(2) ? 2.5f : 1.0f;
  if ((a.n_groups = random_groups(s.n_experts))) {
    const int64_t size = s.n_experts / a.n_groups, least = (s.top_k + size - 1) / size;
    a.top_groups = least + pick(a.n_groups - least + 1);
  }
  rm_limits limits = {};
  limits.max_rows = s.rows, limits.n_experts = s.n_experts, limits.top_k = s.top_k;
  if (pick(2)) limits.max_k = s.hidden, limits.max_n = s.n_experts;
  char what[200];
  snprintf(
      what, sizeof what,
      "router dtype=%d rows=%ld hidden=%ld experts=%ld top_k=%ld kind=%d renormalize=%d bias=%d score=%d groups=%ld/%ld scale=%g",
      dtype, s.rows, s.hidden, s.n_experts, s.top_k, kind_of, renormalize, a.bias != nullptr,
      a.score, a.top_groups, a.n_groups, static_cast<double>(a.route_scale));
  const int64_t n = s.rows * s.top_k;
  const bool recorded = pick(2);  // with room between a row's ids and the next
  a.routed_stride = s.top_k + pick(4);
  const size_t routed_bytes =
      recorded && s.rows ? static_cast<size_t>((s.rows - 1) * a.routed_stride + s.top_k) * 2 : 0;
  return held(
      what,
      {{&a.ids, of_choices(s) * 4, n},
       {&a.gates, of_choices(s) * 4, n},
       {recorded ? static_cast<void *>(&a.routed) : nullptr, routed_bytes, recorded ? n : 0}},
      limits, [&](const rm_kernels *table, const rm_ctx *ctx) {
        a.w = both.of(table), table->router(ctx, &a);
      });
}

// Some choices are empty: all of a row, or single ones.
void make_holes(int32_t *ids, shape s) {
  for (int64_t i = 0; i < s.rows * s.top_k; i++)
    if (i / s.top_k % 4 == 1 || pick(5) == 0) ids[i] = -1 - static_cast<int32_t>(pick(2));
}

// Marks an output in which −1 is expected: a value that ops do not write.
int32_t *stale(int64_t n) {
  int32_t *words = array<int32_t>(n);
  for (int64_t i = 0; i < n; i++) words[i] = 77;
  return words;
}

bool permute_case(rm_dtype dtype, shape s, bool holes) {
  rm_permute_args a = {};
  int32_t *ids = random_ids(s);
  if (holes) make_holes(ids, s);
  a.x = numbers(dtype, s.rows * s.hidden, WILD), a.ids = ids, a.place = stale(s.rows * s.top_k);
  a.rows = s.rows, a.hidden = s.hidden, a.n_experts = s.n_experts, a.top_k = s.top_k,
  a.dtype = dtype;
  char what[120];
  snprintf(what, sizeof what, "permute dtype=%d rows=%ld hidden=%ld experts=%ld top_k=%ld holes=%d",
           dtype, s.rows, s.hidden, s.n_experts, s.top_k, holes);
  const int64_t n = s.rows * s.top_k;
  return held(what,
              {{&a.x_out, of_choices(s) * static_cast<size_t>(s.hidden) * rm_dtype_bytes(dtype),
                n * s.hidden},
               {&a.group_rows, static_cast<size_t>(s.n_experts + 1) * 4, s.n_experts + 1},
               {&a.place, of_choices(s) * 4, n}},
              {}, [&](const rm_kernels *table, const rm_ctx *ctx) { table->permute(ctx, &a); });
}

// `ranks` of s.n_experts experts each, and homes of s.rows rows followed by `behind` more.
bool static_dispatch_case(shape s, int64_t ranks, int64_t homes, int64_t behind, bool holes) {
  const int64_t pitch = s.rows * s.top_k + pick(5), each = rm_max_choices(s.top_k, s.n_experts);
  int32_t *ids = array<int32_t>(homes * pitch);
  for (int64_t i = 0; i < homes * pitch; i++) ids[i] = 0;  // between homes: ids, but nobody's
  for (int64_t home = 0; home < homes; home++) {
    int32_t *its = random_ids({s.rows, s.hidden, ranks * s.n_experts, s.top_k});
    if (holes) make_holes(its, s);
    if (s.rows > 0) memcpy(ids + home * pitch, its, of_choices(s) * 4);
  }
  rm_static_dispatch_args a = {};
  a.ids = ids, a.homes = homes, a.home_rows = s.rows, a.pitch = s.rows + behind,
  a.ids_pitch = pitch;
  a.top_k = s.top_k, a.experts_each = s.n_experts, a.rank = pick(ranks);
  char what[140];
  snprintf(
      what, sizeof what,
      "static_dispatch homes=%ld rows=%ld behind=%ld ranks=%ld of %ld experts top_k=%ld rank=%ld holes=%d",
      homes, s.rows, behind, ranks, s.n_experts, s.top_k, a.rank, holes);
  const int64_t n_own = homes * a.pitch * each;
  a.place = stale(homes * s.rows * s.top_k), a.own = stale(n_own);
  return held(what,
              {{&a.place, static_cast<size_t>(homes) * of_choices(s) * 4, homes * s.rows * s.top_k},
               {&a.own, static_cast<size_t>(n_own) * 4, n_own}},
              {},
              [&](const rm_kernels *table, const rm_ctx *ctx) { table->static_dispatch(ctx, &a); });
}

bool combine_case(rm_dtype dtype, shape s, kind wild) {
  const int64_t n = s.rows * s.top_k;
  int32_t *place = array<int32_t>(n);
  for (int64_t i = 0; i < n; i++) place[i] = static_cast<int32_t>(i);
  for (int64_t i = n - 1; i > 0; i--) {
    const int64_t j = pick(i + 1);
    const int32_t moved = place[i];
    place[i] = place[j], place[j] = moved;
  }
  rm_combine_args a = {};
  a.y = numbers(dtype, n * s.hidden, wild), a.place = place, a.ids = random_ids(s);
  a.gates = static_cast<float *>(numbers(RM_F32, n, wild));
  a.rows = s.rows, a.hidden = s.hidden, a.n_experts = s.n_experts, a.top_k = s.top_k,
  a.dtype = dtype;
  char what[120];
  snprintf(what, sizeof what, "combine dtype=%d rows=%ld hidden=%ld experts=%ld top_k=%ld wild=%d",
           dtype, s.rows, s.hidden, s.n_experts, s.top_k, wild);
  return held(
      what,
      {{&a.out, static_cast<size_t>(s.rows * s.hidden) * rm_dtype_bytes(dtype), s.rows * s.hidden}},
      {}, [&](const rm_kernels *table, const rm_ctx *ctx) { table->combine(ctx, &a); });
}

}  // namespace

bool check_router() {
  const int64_t experts[][2] = {{1, 1},  {2, 1},  {8, 2},   {15, 8},  {16, 8},  {17, 17},
                                {32, 4}, {33, 8}, {64, 64}, {128, 8}, {131, 10}};
  for (const rm_dtype dtype : {RM_BF16, RM_F32})
    for (const int64_t hidden : {1, 32, 65})
      for (const auto &e : experts)
        for (const rows_kind k : {PLAIN, EQUAL, HALF_EQUAL, NANS})
          if (!router_case(dtype, {1 + pick(4), hidden, e[0], e[1]}, k, static_cast<int>(pick(2))))
            return false;
  for (int again = 0; again < 6;
       again++)  // k split over blocks, where the workspace has room for it
    if (!router_case(RM_BF16, {12, 600 + 600 * (again % 2), 20, 3}, PLAIN, 1)) return false;
  return router_case(RM_BF16, {0, 32, 8, 2}, PLAIN, 1);
}

bool check_permute() {
  const int64_t experts[][2] = {{1, 1}, {2, 1}, {7, 3}, {8, 8}, {60, 4}, {128, 8}};
  for (const rm_dtype dtype : {RM_BF16, RM_F32})
    for (const int64_t rows : {0, 1, 5, 31, 33, 150})
      for (const auto &e : experts)
        for (const bool holes : {false, true})
          if (!permute_case(dtype, {rows, pick(2) ? 8 : 1 + pick(40), e[0], e[1]}, holes))
            return false;
  return permute_case(RM_BF16, {3, 0, 4, 2}, false);
}

bool check_static_dispatch() {
  const int64_t experts[][3] = {{1, 1, 1},  {2, 4, 3},  {4, 2, 8},  {8, 16, 8},
                                {16, 1, 5}, {3, 7, 21}, {2, 64, 64}}; // ranks, of each, top_k
  for (const auto &e : experts)
    for (const int64_t rows : {0, 1, 5, 33})
      for (const int64_t behind : {0, 1, 4})
        for (const int64_t homes : {int64_t{1}, e[0]})
          for (const bool holes : {false, true})
            if (!static_dispatch_case({rows, 0, e[1], e[2]}, e[0], homes, behind, holes))
              return false;
  return true;
}

bool check_combine() {
  const int64_t experts[][2] = {{1, 1},  {2, 1},  {2, 2},   {7, 3},    {8, 8},
                                {60, 4}, {61, 6}, {128, 8}, {128, 64}, {200, 33}};
  for (const rm_dtype dtype : {RM_BF16, RM_F32})
    for (const int64_t hidden : {1, 31, 127, 128, 130})
      for (const auto &e : experts)
        for (const kind wild : {TAME, WILD})
          if (!combine_case(dtype, {1 + pick(3), hidden, e[0], e[1]}, wild)) return false;
  return combine_case(RM_F32, {0, 16, 4, 2}, TAME) && combine_case(RM_F32, {2, 16, 4, 0}, TAME);
}
