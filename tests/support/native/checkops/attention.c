// attention.c: trials of the ops that know heads and pages: head_squares, qk_rope_kv and attention.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "trial.h"

static int64_t size_of(rm_dtype dtype) { return (int64_t)rm_dtype_bytes(dtype); }

// A model's heads, whole groups of them.
static void draw_heads(trial *t) {
  shape *s = &t->s;
  s->n_kv_heads = PICK(t, 1, 1, 2, 3);
  s->n_heads = s->n_kv_heads * PICK(t, 1, 1, 2, 3, 4, 7, 8);
  s->head_dim = PICK(t, 2, 4, 14, 16, 18, 30, 32, 34, 48, 62, 64, 66, 80, 96, 112, 128, 130);
  s->page_size = PICK(t, 16, 16, 32, 48, 64, 112);
  s->dtype = draw_dtype(t);
}

// A rank's: a run of query heads that may begin and end inside a group, and the kv heads that they
// read.
static void draw_part(trial *t, int64_t most) {
  shape *s = &t->s;
  // Now and then more query heads of a kv head than attention.c's unit has otherwise, and so long
  // that no other op's workspace hides what it needs.
  const int wide = most >= 44 && one_in(t, 5);
  if (wide) s->head_dim = 128;
  s->group = wide ? PICK(t, 32, 40) : PICK(t, 1, 2, 3, 4, 5, 7, 8, 16);
  s->head0 = one_in(t, 3) ? 0 : between(t, 0, wide ? 4 : s->group - 1);
  s->n_heads = wide ? between(t, 30, 44) : between(t, 1, rm_min64(most, 9));
  s->n_kv_heads = (s->head0 + s->n_heads + s->group - 1) / s->group;
}

// A cache of K or V, an input or, with `written` ≥ 0, an output: pads are zero, like in new pages.
static void *draw_pages(trial *t, packed_as as, int64_t n_pages, int64_t written, kind what) {
  const shape *s = &t->s;
  const int64_t bytes = size_of(s->dtype),
                dim = as == VALUES ? rm_value_dim(s->value_dim, s->head_dim) : s->head_dim;
  const int64_t elems =
      as == VALUES ? rm_v_page_elems(s->page_size, dim) : rm_k_page_elems(s->page_size, dim);
  const packing p = {as, n_pages, s->page_size, dim, elems};
  char *cache = packed_room(t, as == VALUES ? "v_cache" : "k_cache", s->dtype, p, written);
  memset(cache, 0, (size_t)(n_pages * elems * bytes));
  for (int64_t page = 0; page < n_pages; page++)
    for (int64_t pos = 0; pos < s->page_size; pos++)
      for (int64_t d = 0; d < dim; d++) {
        const int64_t in = as == VALUES ? rm_v_index(s->dtype, dim, pos, d)
                                        : rm_packed_index(s->dtype, dim, pos, d);
        fill(t, s->dtype, cache + (page * elems + in) * bytes, 1, what);
      }
  return cache;
}

// ----------------------------------------------------------------------------------- head_squares
static void draw_head_squares(trial *t) {
  draw_heads(t);
  if (one_in(t, 3)) draw_part(t, 9);
  t->s.rows = draw_rows(t, t->small ? 11 : 200);
}

static void build_head_squares(trial *t) {
  const shape *s = &t->s;
  const int64_t width = (s->n_heads + 2 * s->n_kv_heads) * s->head_dim;
  t->args.head_squares = (rm_head_squares_args){
      .q_out = output(t, "q_out", s->rows * s->n_heads, sizeof(float)),
      .k_out = output(t, "k_out", s->rows * s->n_kv_heads, sizeof(float)),
      .qkv = float_input(t, "qkv", s->dtype, s->rows * width, draw_kind(t, SPOILED)),
      .rows = s->rows,
      .n_heads = s->n_heads,
      .n_kv_heads = s->n_kv_heads,
      .head_dim = s->head_dim,
      .dtype = s->dtype};
  t->moved_bytes -= s->rows * s->n_kv_heads * s->head_dim * size_of(s->dtype); // v is not read
  t->limits = (rm_limits){.max_rows = s->rows,
                          .n_heads = s->n_heads,
                          .n_kv_heads = s->n_kv_heads,
                          .head_dim = s->head_dim};
  t->flops = 2.0 * (double)(s->rows * (s->n_heads + s->n_kv_heads) * s->head_dim);
}

static void call_head_squares(const rm_kernels *k, const rm_ctx *ctx, trial *t) {
  k->head_squares(ctx, &t->args.head_squares);
}

const op_test op_head_squares = {
    .name = "head_squares",
    .share = 4,
    .draw = draw_head_squares,
    .build = build_head_squares,
    .call = call_head_squares,
    .bench = {{.rows = 32, .n_heads = 16, .n_kv_heads = 8, .head_dim = 128},
              {.rows = 512, .n_heads = 16, .n_kv_heads = 8, .head_dim = 128}}};

// ------------------------------------------------------------------------------------- qk_rope_kv
enum { UNNORMED = 1, WHOLE = 2, LATENT = 4 };

static void draw_qk_rope_kv(trial *t) {
  draw_heads(t);
  if (one_in(t, 3)) draw_part(t, 9);
  t->s.rows = draw_rows(t, t->small ? 11 : 200);
  t->s.positions = between(t, 1, 300);
  t->s.option = (int)PICK(t, 0, UNNORMED, WHOLE, LATENT);
  t->s.rotary_dim = one_in(t, 3) ? 2 * between(t, 0, t->s.head_dim / 2) : t->s.head_dim;
  if (t->s.option != LATENT) return;
  t->s.n_kv_heads = 1;
  t->s.value_dim = between(t, 1, 40);
  t->s.value_dim += t->s.value_dim % 2;
  t->s.head_dim = t->s.rotary_dim + t->s.value_dim;
}

static const float *draw_angles(trial *t, const char *name) {
  const int64_t n = t->s.positions * (t->s.rotary_dim / 2);
  float *x = input(t, name, n, sizeof *x);
  for (int64_t i = 0; i < n; i++) {
    uint32_t u = draw_float(t, PLAIN);
    if (one_in(t, 8)) u = (uint32_t)PICK(t, 0, 0x3f800000, 0xbf800000, 0x80000000);
    if (t->s.dtype == RM_BF16) u &= 0xffff0000u;
    memcpy(x + i, &u, sizeof u);
  }
  return x;
}

// The squares of a model whose other heads may belong to other ranks.
static const float *draw_squares(trial *t, const char *name, int64_t n_heads, int64_t *all) {
  *all = n_heads + (t->timed ? 0 : PICK(t, 0, 0, 1, 5, 17));
  float *squares = float_input(t, name, RM_F32, t->s.rows * *all, draw_kind(t, SPOILED));
  for (int64_t i = 0; i < t->s.rows * *all; i++) squares[i] = fabsf(squares[i]);
  return squares;
}

static int64_t *draw_slots(trial *t, int64_t n_slots) {
  const shape *s = &t->s;
  int64_t *slots = input(t, "slots", s->rows, sizeof *slots);
  int32_t *order = malloc((size_t)n_slots * sizeof *order);
  for (int64_t i = 0; i < n_slots; i++) order[i] = (int32_t)i;
  if (!one_in(t, 3)) shuffle(t, order, n_slots);
  for (int64_t r = 0; r < s->rows; r++) slots[r] = one_in(t, 9) ? -1 : order[r];
  free(order);
  return slots;
}

static void build_qk_rope_kv(trial *t) {
  const shape *s = &t->s;
  const int latent = s->option == LATENT;
  const int64_t n_pages = s->rows / s->page_size + 2, bytes = size_of(s->dtype),
                q_dim = latent ? s->rotary_dim + between(t, 0, 40) : 0,
                width = latent ? s->n_heads * q_dim + s->head_dim
                               : (s->n_heads + 2 * s->n_kv_heads) * s->head_dim;
  const kind what = draw_kind(t, SPOILED);
  int32_t *positions = input(t, "positions", s->rows, sizeof *positions);
  for (int64_t r = 0; r < s->rows; r++) positions[r] = (int32_t)between(t, 0, s->positions - 1);
  rm_qk_rope_kv_args *a = &t->args.rope;
  *a = (rm_qk_rope_kv_args){.positions = positions,
                            .eps = 1e-6f,
                            .rows = s->rows,
                            .n_heads = s->n_heads,
                            .n_kv_heads = s->n_kv_heads,
                            .head_dim = s->head_dim,
                            .page_size = s->page_size,
                            .rotary_dim = s->rotary_dim,
                            .zero_centered = !latent && !t->timed && one_in(t, 3),
                            .norm_last =
                                !t->timed && !(s->option & (WHOLE | LATENT)) && one_in(t, 3),
                            .value_dim = s->value_dim,
                            .q_dim = q_dim,
                            .dtype = s->dtype};
  a->qkv = float_input(t, "qkv", s->dtype, s->rows * width, what);
  if (s->option & WHOLE) {
    a->q_squares = draw_squares(t, "q_squares", s->n_heads, &a->all_heads);
    a->k_squares = draw_squares(t, "k_squares", s->n_kv_heads, &a->all_kv_heads);
  }
  if (latent) {
    a->k_weight = float_input(t, "k_weight", s->dtype, s->value_dim, draw_kind(t, VAST));
  } else if (!(s->option & UNNORMED)) {
    a->q_weight =
        float_input(t, "q_weight", s->dtype, (s->option & WHOLE ? s->n_heads : 1) * s->head_dim,
                    draw_kind(t, VAST));
    a->k_weight =
        float_input(t, "k_weight", s->dtype, (s->option & WHOLE ? s->n_kv_heads : 1) * s->head_dim,
                    draw_kind(t, VAST));
  }
  a->slots = draw_slots(t, n_pages * s->page_size);
  const int64_t q_elems = s->rows * s->n_heads * s->head_dim;
  a->q_out = latent
                 ? partial_output(t, "q_out", q_elems, bytes, s->rows * s->n_heads * s->rotary_dim)
                 : output(t, "q_out", q_elems, bytes);
  if (latent) memset(a->q_out, 0, (size_t)(q_elems * bytes));
  int64_t written = 0;
  for (int64_t r = 0; r < s->rows; r++)
    written += a->slots[r] >= 0 ? s->n_kv_heads * s->head_dim : 0;
  const int64_t pages = n_pages * s->n_kv_heads;
  a->k_cache = draw_pages(t, MATRICES, pages, written, EQUAL);
  a->v_cache = draw_pages(t, VALUES, pages, written, EQUAL);
  a->row_flags = partial_output(t, "row_flags", s->rows, 1, s->rows);
  for (int64_t r = 0; r < s->rows; r++)
    a->row_flags[r] = (uint8_t)PICK(t, 0, 0, RM_ROW_LOGITS_NONFINITE, RM_ROW_KV_NONFINITE);
  const int64_t before = t->moved_bytes;
  a->cos = draw_angles(t, "cos");
  a->sin = draw_angles(t, "sin");
  t->moved_bytes = before + s->rows * s->head_dim * (int64_t)sizeof *a->cos;
  t->limits = (rm_limits){.max_rows = s->rows,
                          .max_k = s->n_heads * s->head_dim,
                          .max_n = width,
                          .n_heads = s->n_heads,
                          .n_kv_heads = s->n_kv_heads,
                          .head_dim = s->head_dim,
                          .max_positions = s->positions};
  t->flops = 10.0 * (double)(s->rows * (s->n_heads + s->n_kv_heads) * s->head_dim);
}

static void call_qk_rope_kv(const rm_kernels *k, const rm_ctx *ctx, trial *t) {
  k->qk_rope_kv(ctx, &t->args.rope);
}

const op_test op_qk_rope_kv = {.name = "qk_rope_kv",
                               .share = 80,
                               .draw = draw_qk_rope_kv,
                               .build = build_qk_rope_kv,
                               .call = call_qk_rope_kv,
                               .bench = {{.rows = 32,
                                          .n_heads = 16,
                                          .n_kv_heads = 8,
                                          .head_dim = 128,
                                          .rotary_dim = 128,
                                          .page_size = 16,
                                          .positions = 2048},
                                         {.rows = 512,
                                          .n_heads = 16,
                                          .n_kv_heads = 8,
                                          .head_dim = 128,
                                          .rotary_dim = 128,
                                          .page_size = 16,
                                          .positions = 2048},
                                         {.rows = 512,
                                          .n_heads = 16,
                                          .n_kv_heads = 8,
                                          .head_dim = 128,
                                          .rotary_dim = 128,
                                          .page_size = 16,
                                          .positions = 2048,
                                          .option = WHOLE}}};

// -------------------------------------------------------------------------------------- attention
enum { ATTEND_PREFILL = 1, ATTEND_MIXED = 2, ATTEND_SINKS = 4 };

// Cases that only the kernels of GPUs tell apart: whole tiles of rows, splits of a bf16 context, rows of
// sequences in turn, heads of several launches, a page longer than a split; and no heads, which
// only a GPU takes.
static void draw_long_attention(trial *t) {
  shape *s = &t->s;
  switch (between(t, 0, check_device.is_gpu ? 5 : 4)) {
    case 0:
      s->rows = 150;
      s->option = ATTEND_PREFILL;
      s->positions = PICK(t, 80, 1090);
      s->head_dim = rm_min64(s->head_dim, s->positions > 80 ? 16 : 128);
      break;
    case 1:
      s->dtype = RM_BF16;
      s->rows = rm_min64(s->rows, 40);
      s->positions = PICK(t, 1023, 1024, 1025, 2080);
      break;
    case 2:
      s->rows = 700;
      s->option = ATTEND_MIXED;
      s->head_dim = 16;
      s->positions = 40;
      break;
    case 3: s->head_dim = PICK(t, 272, 544); break;
    case 4: s->page_size = 4096; break;
    default: s->n_heads = s->n_kv_heads = s->head0 = 0; s->group = 1;
  }
}

static void draw_attention(trial *t) {
  shape *s = &t->s;
  draw_heads(t);
  const int whole = one_in(t, 2);
  if (!whole) draw_part(t, 44);
  s->rows = t->small ? between(t, 0, 6) : draw_rows(t, 40);
  s->positions = t->small ? PICK(t, 1, 17, 33, 50, 70)
                          : PICK(t, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 100, 150, 200);
  if (one_in(t,
             t->small ? 60 : 6)) { // more than one split; a bf16 rounds most of what differs away
    s->dtype = RM_F32;
    s->positions = PICK(t, 1024, 1025, 1056, 1700, 2048, 2060);
    s->rows = rm_min64(s->rows, 3);
    s->head_dim = rm_min64(s->head_dim, 34);
    if (whole) s->n_heads = rm_min64(s->n_heads / s->n_kv_heads, 2) * s->n_kv_heads;
    else draw_part(t, 4);
  }
  s->option = (int)PICK(t, 0, ATTEND_PREFILL, ATTEND_PREFILL, ATTEND_MIXED);
  if (!t->small && one_in(t, check_device.is_gpu ? 8 : 40)) draw_long_attention(t);
  if (one_in(t, 3)) s->option |= ATTEND_SINKS;
  if (one_in(t, 3)) s->value_dim = between(t, 1, s->head_dim);
  while (s->rows * s->n_heads * s->head_dim * s->positions > 4000000) s->rows /= 2;
  s->window = one_in(t, 3) ? PICK(t, 1, 2, 15, 16, 17, 31, 32, 33, 40, 1000) : 0;
}

// Which sequence each row is of and where it stands there: rows of a sequence together at rising
// positions (a chunk of a prompt), one row a sequence (decode), or anything.
static int64_t draw_rows_of(trial *t, int32_t *seqs, int32_t *positions) {
  const shape *s = &t->s;
  const int64_t n_seqs = s->option & ATTEND_PREFILL ? (t->timed ? 1 : between(t, 1, 3))
                         : s->option & ATTEND_MIXED ? (s->rows > 150 ? 2 : 4)
                                                    : rm_max64(1, s->rows);
  for (int64_t r = 0; r < s->rows; r++) {
    const int64_t last = s->positions - 1;
    if (s->option & ATTEND_PREFILL) {
      seqs[r] = (int32_t)(r * n_seqs / s->rows);
      positions[r] = (int32_t)rm_min64(last, r > 0 && seqs[r] == seqs[r - 1] ? positions[r - 1] + 1
                                             : t->timed                      ? 0
                                                                             : between(t, 0, last));
    } else {
      seqs[r] = (int32_t)(s->option & ATTEND_MIXED ? between(t, 0, n_seqs - 1) : r);
      positions[r] = (int32_t)(t->timed ? last : between(t, rm_max64(0, last - 20), last));
    }
  }
  return n_seqs;
}

// Pages are stored in any order. Pages that are never read do not exist: their entry in the table
// is an arbitrary number.
static int32_t *draw_tables(trial *t, const int32_t *seqs, const int32_t *positions, int64_t n_seqs,
                            int64_t max_pages, int64_t *n_pages) {
  const shape *s = &t->s;
  int32_t *tables = input(t, "block_tables", n_seqs * max_pages, sizeof *tables),
          *order = malloc((size_t)(n_seqs * max_pages + 1) * 4);
  for (int64_t i = 0; i < n_seqs * max_pages; i++) tables[i] = INT32_MAX;
  *n_pages = 0;
  for (int64_t r = 0; r < s->rows; r++) {
    const int64_t first = s->window > 0 ? rm_max64(0, positions[r] - s->window + 1) : 0;
    for (int64_t p = first / s->page_size; p <= positions[r] / s->page_size; p++)
      if (tables[seqs[r] * max_pages + p] == INT32_MAX)
        tables[seqs[r] * max_pages + p] = (int32_t)(*n_pages)++;
  }
  for (int64_t i = 0; i < *n_pages; i++) order[i] = (int32_t)i;
  shuffle(t, order, *n_pages);
  for (int64_t i = 0; i < n_seqs * max_pages; i++)
    if (tables[i] != INT32_MAX) tables[i] = order[tables[i]];
  free(order);
  return tables;
}

static void build_attention(trial *t) {
  const shape *s = &t->s;
  const int64_t bytes = size_of(s->dtype), width = s->n_heads * s->head_dim,
                max_pages = (s->positions - 1) / s->page_size + 1;
  int32_t *positions = input(t, "positions", s->rows, sizeof *positions),
          *seqs = input(t, "seq_of_row", s->rows, sizeof *seqs);
  rm_attention_args *a = &t->args.attention;
  *a = (rm_attention_args){.positions = positions,
                           .seq_of_row = seqs,
                           .rows = s->rows,
                           .max_pages = max_pages,
                           .n_heads = s->n_heads,
                           .n_kv_heads = s->n_kv_heads,
                           .head_dim = s->head_dim,
                           .page_size = s->page_size,
                           .group = s->group ? s->group : s->n_heads / s->n_kv_heads,
                           .head0 = s->head0,
                           .window = s->window,
                           .softcap = draw_factor(t),
                           .value_dim = rm_value_dim(s->value_dim, s->head_dim),
                           .dtype = s->dtype};
  a->scale = one_in(t, 4) ? 1.0f : 0.125f;
  a->n_seqs = draw_rows_of(t, seqs, positions);
  int64_t n_pages;
  a->block_tables = draw_tables(t, seqs, positions, a->n_seqs, max_pages, &n_pages);
  n_pages *= s->n_kv_heads;
  const kind what = draw_kind(t, VAST);
  a->k_cache = draw_pages(t, MATRICES, n_pages, -1, what);
  a->v_cache = draw_pages(t, VALUES, n_pages, -1, what);
  a->q =
      float_input(t, "q", s->dtype, s->rows * width, one_in(t, 2) ? PLAIN : draw_kind(t, SPOILED));
  if (s->option & ATTEND_SINKS)
    a->sinks =
        float_input(t, "sinks", s->dtype, s->n_heads, one_in(t, 2) ? PLAIN : draw_kind(t, SPOILED));
  a->out = output(t, "out", s->rows * s->n_heads * a->value_dim, bytes);
  t->limits = (rm_limits){.max_rows = s->rows,
                          .n_heads = s->n_heads,
                          .n_kv_heads = s->n_kv_heads,
                          .head_dim = s->head_dim,
                          .group = a->group,
                          .max_positions = s->positions};
  for (int64_t r = 0; r < s->rows; r++)
    t->flops += 4.0 * (double)width *
                (double)(s->window > 0 ? rm_min64(s->window, positions[r] + 1) : positions[r] + 1);
}

static void call_attention(const rm_kernels *k, const rm_ctx *ctx, trial *t) {
  k->attention(ctx, &t->args.attention);
}

const op_test op_attention = {.name = "attention",
                              .share = 80,
                              .takes_passes = 1,
                              .draw = draw_attention,
                              .build = build_attention,
                              .call = call_attention,
                              .bench = {{.rows = 16,
                                         .n_heads = 16,
                                         .n_kv_heads = 8,
                                         .head_dim = 128,
                                         .page_size = 16,
                                         .positions = 1024},
                                        {.rows = 16,
                                         .n_heads = 3,
                                         .n_kv_heads = 2,
                                         .group = 2,
                                         .head0 = 1,
                                         .head_dim = 128,
                                         .page_size = 16,
                                         .positions = 1024},
                                        {.rows = 256,
                                         .n_heads = 16,
                                         .n_kv_heads = 8,
                                         .head_dim = 128,
                                         .page_size = 16,
                                         .positions = 256,
                                         .option = ATTEND_PREFILL}}};
