// dense.c: trials of the ops on plain rows: embed, gather_rows, rms_norm, gemm and gemm_swiglu with
// and without groups.
#include <stdlib.h>
#include <string.h>

#include "trial.h"

static int64_t size_of(rm_dtype dtype) { return (int64_t)rm_dtype_bytes(dtype); }

// ------------------------------------------------------------------------------------------ embed
enum { EMBED_PACKED = 1 };

static void draw_embed(trial *t) {
  t->s = (shape){.rows = draw_rows(t, t->small ? 33 : 1025),
                 .n = draw_width(t, t->small ? 131 : 700),
                 .vocab = draw_width(t, 600)};
  t->s.option = one_in(t, 2) ? EMBED_PACKED : 0;
  t->s.dtype = draw_dtype(t);
}

static void build_embed(trial *t) {
  const shape *s = &t->s;
  int32_t *ids = input(t, "ids", s->rows, sizeof *ids);
  for (int64_t r = 0; r < s->rows; r++) ids[r] = (int32_t)between(t, 0, s->vocab - 1);
  const void *table;
  const int64_t before = t->moved_bytes;
  if (s->option & EMBED_PACKED) {
    const packing p = {.as = MATRICES, .n = 1, .rows = s->vocab, .k = s->n};
    table = packed_input(t, "table", s->dtype, p, SPOILED);
  } else {
    uint16_t *words = input(t, "table", s->vocab * s->n, size_of(s->dtype));
    for (int64_t i = 0; i < s->vocab * s->n * size_of(s->dtype) / 2; i++)
      words[i] = (uint16_t)(t->timed ? i : (int64_t)next64(t));
    table = words;
  }
  // Only the requested rows of the table.
  t->moved_bytes = before + s->rows * s->n * size_of(s->dtype);
  t->args.embed = (rm_embed_args){.out = output(t, "out", s->rows * s->n, size_of(s->dtype)),
                                  .ids = ids,
                                  .table = table,
                                  .packed = s->option & EMBED_PACKED,
                                  .rows = s->rows,
                                  .hidden = s->n,
                                  .dtype = s->dtype};
  t->limits = (rm_limits){.max_rows = s->rows, .max_n = s->n, .vocab = s->vocab};
}

static void call_embed(const rm_kernels *k, const rm_ctx *ctx, trial *t) {
  k->embed(ctx, &t->args.embed);
}

const op_test op_embed = {
    .name = "embed",
    .share = 80,
    .draw = draw_embed,
    .build = build_embed,
    .call = call_embed,
    .bench = {{.rows = 512, .n = 2048, .vocab = 32768},
              {.rows = 512, .n = 2048, .vocab = 32768, .option = EMBED_PACKED}}};

// ------------------------------------------------------------------------------------ gather_rows
enum { GATHER_IN_ORDER = 1, GATHER_HOLES = 2 };

// n: words of 16 bits in a row; positions: rows of x.
static void draw_gather_rows(trial *t) {
  shape *s = &t->s;
  *s = (shape){.rows = draw_rows(t, t->small ? 33 : 1025),
               .n = draw_width(t, t->small ? 131 : 1400),
               .positions = draw_width(t, 600)};
  if (!t->small && one_in(t, 12)) {
    s->n = PICK(t, 0, 2048, 4096, 5000);
    s->rows = rm_min64(s->rows, 40);
  }
  s->option = (one_in(t, 3) ? GATHER_IN_ORDER : 0) | (one_in(t, 3) ? GATHER_HOLES : 0);
}

static void build_gather_rows(trial *t) {
  const shape *s = &t->s;
  const size_t row_bytes = (size_t)s->n * sizeof(uint16_t);
  int32_t *from = input(t, "from", s->rows, sizeof *from);
  int64_t named = 0;
  for (int64_t r = 0; r < s->rows; r++) {
    from[r] =
        (int32_t)(s->option & GATHER_IN_ORDER ? r % s->positions : between(t, 0, s->positions - 1));
    if (s->option & GATHER_HOLES && one_in(t, 3)) from[r] = -1;
    named += from[r] >= 0;
  }
  const int64_t before = t->moved_bytes;
  uint16_t *x = input(t, "x", s->positions * s->n, sizeof *x);
  for (int64_t i = 0; i < s->positions * s->n; i++)
    x[i] = (uint16_t)(t->timed ? i : (int64_t)next64(t));
  t->moved_bytes = before + s->rows * (int64_t)row_bytes; // of x the rows that are asked for
  void *out = s->option & GATHER_HOLES
                  ? partial_output(t, "out", s->rows * s->n, sizeof *x, named * s->n)
                  : output(t, "out", s->rows * s->n, sizeof *x);
  t->args.gather = (rm_gather_rows_args){
      .out = out, .x = x, .from = from, .rows = s->rows, .row_bytes = row_bytes};
  t->limits = (rm_limits){.max_rows = s->rows, .max_n = s->n};
}

static void call_gather_rows(const rm_kernels *k, const rm_ctx *ctx, trial *t) {
  k->gather_rows(ctx, &t->args.gather);
}

const op_test op_gather_rows = {.name = "gather_rows",
                                .share = 30,
                                .draw = draw_gather_rows,
                                .build = build_gather_rows,
                                .call = call_gather_rows,
                                .bench = {{.rows = 512, .n = 2048, .positions = 2048}}};

// --------------------------------------------------------------------------------------- rms_norm
enum { NORM_X = 1, NORM_IN_PLACE = 2, NORM_GATE = 4, NORM_SUM = 8, NORM_NO_OUT = 16 };

static void draw_rms_norm(trial *t) {
  t->s = (shape){.rows = draw_rows(t, t->small ? 17 : 1025),
                 .n = one_in(t, 6) && !t->small ? between(t, 500, 4200) : draw_width(t, 700)};
  if (t->s.rows > 128) t->s.n = rm_min64(t->s.n, 300);
  t->s.option = (int)PICK(t, 0, NORM_X, NORM_X | NORM_IN_PLACE);
  if (t->s.option & NORM_X && one_in(t, 3)) t->s.option |= NORM_GATE;
  if (one_in(t, 3))
    t->s.option |=
        t->s.option & NORM_IN_PLACE ? NORM_SUM : (int)PICK(t, NORM_SUM, NORM_SUM | NORM_NO_OUT);
  t->s.dtype = draw_dtype(t);
}

static void build_rms_norm(trial *t) {
  const shape *s = &t->s;
  const int64_t n = s->rows * s->n;
  rm_rms_norm_args *a = &t->args.rms_norm;
  *a = (rm_rms_norm_args){.rows = s->rows,
                          .n = s->n,
                          .dtype = s->dtype,
                          .eps = one_in(t, 8)   ? 0.0f
                                 : one_in(t, 2) ? 1e-6f
                                                : 1e-5f};
  a->residual = partial_output(t, "residual", n, size_of(s->dtype), n);
  fill(t, s->dtype, a->residual, n, draw_kind(t, SPOILED));
  if (s->option & NORM_IN_PLACE) {
    a->x = a->out = partial_output(t, "x and out", n, size_of(s->dtype), n);
    fill(t, s->dtype, a->out, n, draw_kind(t, SPOILED));
  } else {
    if (s->option & NORM_X) a->x = float_input(t, "x", s->dtype, n, draw_kind(t, SPOILED));
    if (!(s->option & NORM_NO_OUT)) a->out = output(t, "out", n, size_of(s->dtype));
  }
  if (s->option & NORM_GATE)
    a->x_gate = float_input(t, "x_gate", s->dtype, s->rows, draw_kind(t, SPOILED));
  if (!(s->option & NORM_SUM))
    a->weight = float_input(t, "weight", s->dtype, s->n, draw_kind(t, SPOILED));
  t->limits = (rm_limits){.max_rows = s->rows, .max_n = s->n, .max_k = s->n};
  t->flops = 6.0 * (double)n;
}

static void call_rms_norm(const rm_kernels *k, const rm_ctx *ctx, trial *t) {
  k->rms_norm(ctx, &t->args.rms_norm);
}

const op_test op_rms_norm = {.name = "rms_norm",
                             .share = 120,
                             .draw = draw_rms_norm,
                             .build = build_rms_norm,
                             .call = call_rms_norm,
                             .bench = {{.rows = 32, .n = 2048, .option = NORM_X},
                                       {.rows = 1024, .n = 2048, .option = NORM_X}}};

// ------------------------------------------------------------------------------------------- gemm
enum { GEMM_BIAS = 1, GEMM_GROUPS = 2, GEMM_STRIDES = 4, GEMM_KEEP = 8 };

static void draw_any_gemm(trial *t, int swiglu) {
  shape *s = &t->s;
  const int64_t most = t->small ? 49 : 1100;
  *s = (shape){.rows = draw_rows(t, t->small ? 33 : 1025),
               .n = draw_width(t, most),
               .k = draw_depth(t, most)};
  if (s->rows > 100)
    s->k = rm_min64(s->k,
                    t->is_aligned ? 64 : 66); // keeps the reference, the slow side, below a second
  if (!t->small && one_in(t, check_device.is_gpu ? 5 : 20)) { // a sum of many splits
    s->rows = between(t, 1, 40);
    s->n = between(t, 1, 40);
    s->k = PICK(t, 512, 520, 544, 1064, 2104, 4704, 15008) - (t->is_aligned ? 0 : between(t, 0, 7));
  }
  while (s->rows * s->n * s->k > (swiglu ? 4000000 : 8000000)) s->n = (s->n + 1) / 2;
  if (one_in(t, 3)) s->option = GEMM_GROUPS;
  if (one_in(t, 3)) s->option |= GEMM_BIAS;
  if (one_in(t, 3)) s->option |= GEMM_STRIDES;
  if (swiglu && one_in(t, 3)) s->option |= GEMM_KEEP;
  if (s->option & GEMM_GROUPS) s->n_groups = between(t, 1, t->small ? 4 : 12);
  s->dtype = draw_dtype(t);
  s->out_dtype = one_in(t, 3) ? RM_F32 : s->dtype;
}
static void draw_gemm(trial *t) { draw_any_gemm(t, 0); }
static void draw_gemm_swiglu(trial *t) { draw_any_gemm(t, 1); }

// Rows are dealt to groups at random, or nearly all to one; others stay empty.
static const int32_t *draw_groups(trial *t, const shape *s) {
  int32_t *ends = input(t, "group_rows", s->n_groups + 1, sizeof *ends);
  int32_t *size = calloc((size_t)s->n_groups, sizeof *size);
  const int64_t favourite = between(t, 0, s->n_groups - 1);
  const int even = one_in(t, 2);
  for (int64_t r = 0; r < s->rows; r++)
    size[t->timed               ? r % s->n_groups
         : even || one_in(t, 8) ? between(t, 0, s->n_groups - 1)
                                : favourite]++;
  ends[0] = 0;
  for (int64_t g = 0; g < s->n_groups; g++) ends[g + 1] = ends[g] + size[g];
  free(size);
  return ends;
}

static void build_any_gemm(trial *t, int swiglu) {
  const shape *s = &t->s;
  rm_gemm_args *a = &t->args.gemm;
  const int strides = s->option & GEMM_STRIDES;
  *a = (rm_gemm_args){
      .m = s->rows, .n = s->n, .k = s->k, .dtype = s->dtype, .y_dtype = s->out_dtype};
  a->ldx = draw_stride(t, s->k, strides);
  a->ldy = draw_stride(t, s->n, strides);
  const kind what = draw_kind(t, SPOILED);
  a->x = strided_input(t, "x", s->dtype, s->rows, s->k, a->ldx, what);
  packing p = {.as = swiglu ? GATE_UP : MATRICES, .n = 1, .rows = s->n, .k = s->k};
  if (s->n_groups) {
    a->group_rows = draw_groups(t, s);
    p.stride = draw_stride(t, packing_elements(p), strides);
    if (check_device.is_gpu) p.stride = rm_round_up(p.stride, 8);
    a->n_groups = p.n = s->n_groups;
    a->group_stride = p.stride;
  }
  a->w = packed_input(t, "w", s->dtype, p, one_in(t, 2) ? what : PLAIN);
  if (s->option & GEMM_BIAS)
    a->bias = float_input(t, "bias", s->dtype, rm_max64(s->n_groups, 1) * (swiglu ? 2 : 1) * s->n,
                          draw_kind(t, SPOILED));
  const int64_t room = s->rows ? (s->rows - 1) * a->ldy + s->n : 0;
  if (strides) a->y = partial_output(t, "y", room, size_of(s->out_dtype), s->rows * s->n);
  else a->y = output(t, "y", room, size_of(s->out_dtype));
  if (s->option & GEMM_KEEP)
    a->gate_up = output(t, "gate_up", 2 * s->rows * s->n, size_of(s->dtype));
  if (swiglu && !t->timed) {
    a->activation = (rm_activation)between(t, RM_SILU, RM_SWIGLU_OAI);
    a->alpha = one_in(t, 2) ? 1.702f : -0.3f;
    a->limit = one_in(t, 2) ? 7.0f : 0.1f;
  }
  t->limits = (rm_limits){.max_rows = s->rows,
                          .max_k = s->k,
                          .max_n = swiglu ? rm_gate_up_rows(s->n) : s->n,
                          .top_k = check_device.is_gpu ? s->n_groups : 0};
  t->flops = (swiglu ? 4.0 : 2.0) * (double)(s->rows * s->n) * (double)s->k;
}
static void build_gemm(trial *t) { build_any_gemm(t, 0); }
static void build_gemm_swiglu(trial *t) { build_any_gemm(t, 1); }

static void call_gemm(const rm_kernels *k, const rm_ctx *ctx, trial *t) {
  k->gemm(ctx, &t->args.gemm);
}
static void call_gemm_swiglu(const rm_kernels *k, const rm_ctx *ctx, trial *t) {
  k->gemm_swiglu(ctx, &t->args.gemm);
}

// --------------------------------------------------------------------------------------- activate
enum { ACTIVATE_IN_PLACE = 1, ACTIVATE_STRIDES = 2 };

static void draw_activate(trial *t) {
  t->s =
      (shape){.rows = draw_rows(t, t->small ? 17 : 300), .n = draw_width(t, t->small ? 131 : 700)};
  t->s.option = (one_in(t, 2) ? ACTIVATE_IN_PLACE : 0) | (one_in(t, 3) ? ACTIVATE_STRIDES : 0);
  t->s.dtype = draw_dtype(t);
}

static void build_activate(trial *t) {
  const shape *s = &t->s;
  rm_activate_args *a = &t->args.activate;
  *a = (rm_activate_args){.rows = s->rows,
                          .n = s->n,
                          .ld = s->n + (s->option & ACTIVATE_STRIDES ? between(t, 0, 40) : 0)};
  a->dtype = s->dtype;
  a->activation = t->timed ? RM_SILU : (rm_activation)between(t, RM_SILU, RM_RELU2);
  const int64_t room = s->rows ? (s->rows - 1) * a->ld + s->n : 0;
  a->out = partial_output(t, "out", room, size_of(s->dtype), s->rows * s->n);
  if (s->option & ACTIVATE_IN_PLACE) {
    fill(t, s->dtype, a->out, room, draw_kind(t, SPOILED));
    a->x = a->out;
  } else {
    a->x = strided_input(t, "x", s->dtype, s->rows, s->n, a->ld, draw_kind(t, SPOILED));
  }
  t->limits = (rm_limits){.max_rows = s->rows, .max_n = s->n};
  t->flops = 20.0 * (double)(s->rows * s->n);
}

static void call_activate(const rm_kernels *k, const rm_ctx *ctx, trial *t) {
  k->activate(ctx, &t->args.activate);
}

const op_test op_activate = {.name = "activate",
                             .share = 60,
                             .draw = draw_activate,
                             .build = build_activate,
                             .call = call_activate,
                             .bench = {{.rows = 32, .n = 8192}}};

// A decode step, a batch of decodes, a prefill, and experts that meet two rows each.
const op_test op_gemm = {
    .name = "gemm",
    .share = 220,
    .takes_passes = 1,
    .draw = draw_gemm,
    .build = build_gemm,
    .call = call_gemm,
    .bench = {{.rows = 1, .n = 8192, .k = 2048},
              {.rows = 16, .n = 8192, .k = 2048},
              {.rows = 512, .n = 2048, .k = 2048},
              {.rows = 64, .n = 768, .k = 2048, .n_groups = 32, .option = GEMM_GROUPS}}};
const op_test op_gemm_swiglu = {
    .name = "gemm_swiglu",
    .share = 140,
    .takes_passes = 1,
    .draw = draw_gemm_swiglu,
    .build = build_gemm_swiglu,
    .call = call_gemm_swiglu,
    .bench = {{.rows = 1, .n = 6144, .k = 2048},
              {.rows = 512, .n = 1024, .k = 2048},
              {.rows = 64, .n = 768, .k = 2048, .n_groups = 32, .option = GEMM_GROUPS}}};
