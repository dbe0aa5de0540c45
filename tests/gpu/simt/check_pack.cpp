// check_pack.cpp: pack from every type to either dtype, in every layout, along rows and down
// columns, written and compared, in parts.
#include "check.h"

namespace {

int64_t bytes_of(rm_src_dtype dtype) {
  return dtype == RM_SRC_F64 ? 8 : dtype == RM_SRC_F32 ? 4 : 2;
}

// Random words: every class of number, with more of them near 1; in few cases a word is not finite.
void *random_source(rm_src_dtype dtype, int64_t n, bool finite) {
  char *p = static_cast<char *>(simt_buffer(static_cast<size_t>(n * bytes_of(dtype))));
  for (int64_t i = 0; i < n; i++) {
    const float x = pick(6) ? number() : ldexpf(number(), static_cast<int>(pick(200)) - 100);
    const double wide =
        static_cast<double>(x) * (1.0 + static_cast<double>(random_bits()) * 0x1p-50);
    uint64_t u = 0;
    if (dtype == RM_SRC_F64) memcpy(&u, &wide, 8);
    else if (dtype == RM_SRC_F32) u = rm_bits(x);
    else if (dtype == RM_SRC_BF16) u = rm_bits(x) >> 16;
    else u = random_bits() & (pick(4) ? 0xbfffu : 0x83ffu);
    if (!finite && pick(static_cast<int64_t>(2 * n)) < 3)
      u = static_cast<uint64_t>(random_bits()) << 32 | random_bits() | ~0ull << 52;
    if (!finite && pick(static_cast<int64_t>(2 * n)) < 3) u = ~0ull >> 1;
    memcpy(p + i * bytes_of(dtype), &u, static_cast<size_t>(bytes_of(dtype)));
  }
  return p;
}

struct shape {
  int64_t rows, cols, row0, more; // the destination has row0 rows before and `more` after
};

enum way { ROWS, COLUMNS, BACKWARDS, N_WAYS };

// Where the reference returns −1 or a sum in its arguments, a GPU writes it to memory.
rm_pack_found found_in(const rm_pack_args &a) {
  return {a.digest, a.nonfinite_index, a.diff_index};
}

bool pack_case(rm_src_dtype src, rm_dtype dst, rm_layout layout, shape s, way how, bool compare,
               bool finite) {
  const int64_t all_rows = s.row0 + s.rows + s.more,
                pitch = how == COLUMNS ? s.rows + pick(3) : s.cols + pick(3);
  const int64_t n_src = pitch * (how == COLUMNS ? s.cols : s.rows);
  const int64_t n_dst =
      layout == RM_PLAIN
          ? all_rows * s.cols
          : rm_packed_elems(layout == RM_PACKED ? all_rows : rm_gate_up_rows(all_rows), s.cols);
  rm_pack_args a = {};
  char *source = static_cast<char *>(random_source(src, n_src, finite));
  a.src = source, a.src_dtype = src, a.rows = s.rows, a.cols = s.cols;
  a.row_stride = how == COLUMNS ? 1 : pitch, a.col_stride = how == COLUMNS ? pitch : 1;
  if (how == BACKWARDS && s.rows > 0)
    a.src = source + (s.rows - 1) * pitch * bytes_of(src), a.row_stride = -pitch;
  a.dst_dtype = dst, a.layout = layout, a.dst_row0 = s.row0, a.dst_cols = s.cols,
  a.index0 = s.row0 * s.cols;
  const size_t bytes = static_cast<size_t>(n_dst) * rm_dtype_bytes(dst);
  a.dst = simt_buffer(bytes);
  rm_ctx nothing = {};
  if (compare) oracle()->pack(&nothing, &a); // equal, and perhaps one bit that is not
  if (compare && pick(2) && bytes)
    static_cast<char *>(a.dst)[pick(static_cast<int64_t>(bytes))] ^= 1;
  a.compare = compare;
  char what[160];
  snprintf(
      what, sizeof what,
      "pack src=%d dst=%d layout=%d rows=%ld cols=%ld row0=%ld more=%ld way=%d compare=%d finite=%d",
      src, dst, layout, s.rows, s.cols, s.row0, s.more, how, compare, finite);
  const auto relaid = [=](const void *from) {
    const bool gate_up = layout != RM_PACKED;
    return layout == RM_PLAIN ? const_cast<void *>(from)
                              : relaid_matrices(from, dst, 1, all_rows, s.cols, gate_up);
  };
  return held(what, {{&a.dst, bytes, s.rows * s.cols, relaid}, {&a.found, sizeof *a.found, 1}}, {},
              [&](const rm_kernels *table, const rm_ctx *ctx) {
                a.digest = 0, a.nonfinite_index = a.diff_index = -2;
                table->pack(ctx, &a);
                if (table == oracle()) *a.found = found_in(a);
              });
}

} // namespace

bool check_pack() {
  const shape shapes[] = {{1, 1, 0, 0},    {1, 40, 0, 3},  {16, 32, 0, 0},   {17, 33, 3, 2},
                          {5, 64, 30, 0},  {15, 31, 1, 0}, {48, 128, 16, 0}, {33, 129, 0, 16},
                          {20, 260, 7, 9}, {0, 32, 4, 4}};
  for (const rm_src_dtype src : {RM_SRC_BF16, RM_SRC_F32, RM_SRC_F16, RM_SRC_F64})
    for (const rm_dtype dst : {RM_BF16, RM_F32})
      for (const rm_layout layout : {RM_PLAIN, RM_PACKED, RM_PACKED_GATE, RM_PACKED_UP})
        for (const shape &s : shapes)
          if (!pack_case(src, dst, layout, s, static_cast<way>(pick(N_WAYS)), pick(3) == 0,
                         pick(2)))
            return false;
  return true;
}
