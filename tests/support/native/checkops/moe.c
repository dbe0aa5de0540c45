// moe.c: trials of router, permute, static_dispatch and combine.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "trial.h"

static int64_t size_of(rm_dtype dtype) { return (int64_t)rm_dtype_bytes(dtype); }

enum {
  MOE_BIAS = 1,
  MOE_RENORMALIZE = 2,
  MOE_EQUAL = 4,
  MOE_ROUTED = 8,
  MOE_HOLES = 16,
  MOE_SIGMOID = 32,
  MOE_SCALE = 64,
  MOE_LOGIT_BIAS = 128
};

static void draw_moe(trial *t) {
  shape *s = &t->s;
  s->n_experts = PICK(t, 1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 60, 64, 127, 128, 129, 256);
  s->top_k = rm_min64(PICK(t, 1, 1, 2, 3, 4, 6, 8, 8, 16, RM_MAX_TOP_K), s->n_experts);
  s->rows = draw_rows(t, t->small ? 11 : 1025);
  s->n = draw_width(t, t->small ? 49 : 300);
  if (s->rows > 100) s->n = rm_min64(s->n, 66);
  s->dtype = draw_dtype(t);
}

// ----------------------------------------------------------------------------------------- router
// n_groups: of experts; group: how many of them may be chosen from.
static void draw_router(trial *t) {
  draw_moe(t);
  if (t->s.rows > 100) t->s.top_k = rm_min64(t->s.top_k, 8);
  t->s.option = (one_in(t, 2) ? MOE_BIAS : 0) | (one_in(t, 2) ? MOE_RENORMALIZE : 0) |
                (one_in(t, 4) ? MOE_EQUAL : 0) | (one_in(t, 2) ? MOE_ROUTED : 0) |
                (one_in(t, 2) ? MOE_SIGMOID : 0) | (one_in(t, 2) ? MOE_SCALE : 0) |
                (one_in(t, 3) ? MOE_LOGIT_BIAS : 0);
  const int64_t n_groups = PICK(t, 1, 1, 2, 3, 4, 5, 8, 16, 32, RM_MAX_EXPERT_GROUPS),
                size = t->s.n_experts / n_groups;
  if (t->s.n_experts % n_groups || size < 2) return;
  t->s.n_groups = n_groups;
  t->s.group = between(t, (t->s.top_k + size - 1) / size, n_groups);
}

static void build_router(trial *t) {
  const shape *s = &t->s;
  rm_router_args *a = &t->args.router;
  *a = (rm_router_args){.rows = s->rows,
                        .hidden = s->n,
                        .n_experts = s->n_experts,
                        .top_k = s->top_k,
                        .n_groups = s->n_groups,
                        .top_groups = s->group,
                        .route_scale =
                            s->option & MOE_SCALE ? 0.5f * (float)PICK(t, 1, 5, INT64_MAX) : 1.0f,
                        .renormalize = !!(s->option & MOE_RENORMALIZE),
                        .score = s->option & MOE_SIGMOID ? RM_SCORE_SIGMOID : RM_SCORE_SOFTMAX,
                        .dtype = s->dtype};
  a->x = float_input(t, "x", s->dtype, s->rows * s->n, draw_kind(t, SPOILED));
  // Rows that are all the same give logits that are: the choice is by id alone.
  const packing p = {.as = MATRICES, .n = 1, .rows = s->n_experts, .k = s->n};
  a->w = packed_input(t, "w", s->dtype, p, s->option & MOE_EQUAL ? EQUAL : draw_kind(t, SPOILED));
  if (s->option & MOE_EQUAL) {
    char *w = (char *)(uintptr_t)a->w;
    for (int64_t e = 1; e < s->n_experts; e++)
      for (int64_t k = 0; k < s->n; k++)
        memcpy(w + rm_packed_index(s->dtype, s->n, e, k) * size_of(s->dtype),
               w + rm_packed_index(s->dtype, s->n, e & 1, k) * size_of(s->dtype),
               (size_t)size_of(s->dtype));
  }
  if (s->option & MOE_BIAS)
    a->bias = float_input(t, "bias", RM_F32, s->n_experts, draw_kind(t, SPOILED));
  if (s->option & MOE_LOGIT_BIAS)
    a->logit_bias = float_input(t, "logit_bias", s->dtype, s->n_experts, draw_kind(t, SPOILED));
  a->ids = output(t, "ids", s->rows * s->top_k, sizeof *a->ids);
  a->gates = output(t, "gates", s->rows * s->top_k, sizeof *a->gates);
  if (s->option & MOE_ROUTED) {
    a->routed_stride = s->top_k + between(t, 0, 20);
    const int64_t room = s->rows ? (s->rows - 1) * a->routed_stride + s->top_k : 0;
    a->routed = partial_output(t, "routed", room, sizeof *a->routed, s->rows * s->top_k);
  }
  t->limits = (rm_limits){.max_rows = s->rows,
                          .max_k = s->n,
                          .max_n = s->n_experts,
                          .n_experts = s->n_experts,
                          .top_k = s->top_k};
  t->flops = 2.0 * (double)(s->rows * s->n_experts) * (double)s->n;
}

static void call_router(const rm_kernels *k, const rm_ctx *ctx, trial *t) {
  k->router(ctx, &t->args.router);
}

const op_test op_router = {
    .name = "router",
    .share = 5,
    .draw = draw_router,
    .build = build_router,
    .call = call_router,
    .bench = {{.rows = 32, .n = 2048, .n_experts = 128, .top_k = 8, .option = MOE_RENORMALIZE},
              {.rows = 512, .n = 2048, .n_experts = 128, .top_k = 8, .option = MOE_RENORMALIZE},
              {.rows = 512,
               .n = 2048,
               .n_experts = 128,
               .top_k = 8,
               .n_groups = 8,
               .group = 4,
               .option = MOE_SIGMOID}}};

// ----------------------------------------------------------- permute, static_dispatch and combine
// top_k distinct experts for each row, in any order.
static int32_t *draw_ids(trial *t) {
  const shape *s = &t->s;
  int32_t *ids = input(t, "ids", s->rows * s->top_k, sizeof *ids),
          *all = malloc((size_t)s->n_experts * sizeof *all);
  for (int64_t e = 0; e < s->n_experts; e++) all[e] = (int32_t)e;
  for (int64_t r = 0; r < s->rows; r++) {
    shuffle(t, all, s->n_experts);
    memcpy(ids + r * s->top_k, all, (size_t)s->top_k * sizeof *ids);
  }
  free(all);
  return ids;
}

static void draw_holes(trial *t) {
  draw_moe(t);
  if (one_in(t, 3)) t->s.option = MOE_HOLES;
}

// Some of the n ids become none: whole rows of them, and here and there one. How many are left.
static int64_t make_holes(trial *t, int32_t *ids, int64_t n) {
  const shape *s = &t->s;
  int64_t left = 0;
  for (int64_t i = 0; i < n; i++) {
    if (s->option & MOE_HOLES && (i / s->top_k % 4 == 1 || one_in(t, 5)))
      ids[i] = -1 - (int32_t)(i % 3);
    left += ids[i] >= 0;
  }
  return left;
}

static void moe_limits(trial *t) {
  t->limits = (rm_limits){.max_rows = t->s.rows,
                          .max_k = t->s.n,
                          .max_n = t->s.n,
                          .n_experts = t->s.n_experts,
                          .top_k = t->s.top_k};
}

static void build_permute(trial *t) {
  const shape *s = &t->s;
  rm_permute_args *a = &t->args.permute;
  const int64_t choices = s->rows * s->top_k;
  *a = (rm_permute_args){.rows = s->rows,
                         .hidden = s->n,
                         .n_experts = s->n_experts,
                         .top_k = s->top_k,
                         .dtype = s->dtype};
  int32_t *ids = draw_ids(t);
  const int64_t n = make_holes(t, ids, choices);
  a->ids = ids;
  a->x = float_input(t, "x", s->dtype, s->rows * s->n, draw_kind(t, SPOILED));
  a->x_out = s->option & MOE_HOLES
                 ? partial_output(t, "x_out", choices * s->n, size_of(s->dtype), n * s->n)
                 : output(t, "x_out", choices * s->n, size_of(s->dtype));
  a->group_rows = output(t, "group_rows", s->n_experts + 1, sizeof *a->group_rows);
  a->place = output(t, "place", choices, sizeof *a->place);
  moe_limits(t);
}

static void call_permute(const rm_kernels *k, const rm_ctx *ctx, trial *t) {
  k->permute(ctx, &t->args.permute);
}

const op_test op_permute = {.name = "permute",
                            .share = 60,
                            .draw = draw_holes,
                            .build = build_permute,
                            .call = call_permute,
                            .bench = {{.rows = 512, .n = 2048, .n_experts = 128, .top_k = 8}}};

// rows: of a home; n_groups: homes; positions: the pitch; group: experts of a rank; head0: the
// rank.
static void draw_static_dispatch(trial *t) {
  shape *s = &t->s;
  const int64_t ranks = PICK(t, 1, 2, 2, 3, 4, 8, 16);
  *s = (shape){.rows = draw_rows(t, t->small ? 9 : 130),
               .n_groups = one_in(t, 3) ? 1 : ranks,
               .group = PICK(t, 1, 2, 3, 7, 8, 16, 33)};
  s->n_experts = ranks * s->group;
  s->top_k = rm_min64(PICK(t, 1, 2, 3, 4, 6, 8, 8, 16, RM_MAX_TOP_K), s->n_experts);
  s->positions = s->rows + PICK(t, 0, 0, 1, 2, 9);
  s->head0 = between(t, 0, ranks - 1);
  s->option = one_in(t, 2) ? MOE_HOLES : 0;
}

static void build_static_dispatch(trial *t) {
  const shape *s = &t->s;
  const int64_t choices = s->rows * s->top_k, pitch = choices + (t->timed ? 0 : between(t, 0, 9));
  int32_t *ids = input(t, "ids", s->n_groups * pitch, sizeof *ids),
          *all = malloc((size_t)s->n_experts * sizeof *all);
  for (int64_t e = 0; e < s->n_experts; e++) all[e] = (int32_t)e;
  for (int64_t i = 0; i < s->n_groups * pitch; i++) ids[i] = 0; // between homes: ids, but nobody's
  for (int64_t home = 0; home < s->n_groups; home++) {
    for (int64_t r = 0; r < s->rows; r++) {
      shuffle(t, all, s->n_experts);
      memcpy(ids + home * pitch + r * s->top_k, all, (size_t)s->top_k * sizeof *ids);
    }
    make_holes(t, ids + home * pitch, choices);
  }
  free(all);
  t->args.static_dispatch = (rm_static_dispatch_args){
      .place = output(t, "place", s->n_groups * choices, sizeof *ids),
      .own = output(t, "own", s->n_groups * s->positions * rm_max_choices(s->top_k, s->group),
                    sizeof *ids),
      .ids = ids,
      .homes = s->n_groups,
      .home_rows = s->rows,
      .pitch = s->positions,
      .ids_pitch = pitch,
      .top_k = s->top_k,
      .experts_each = s->group,
      .rank = s->head0,
  };
  moe_limits(t);
}

static void call_static_dispatch(const rm_kernels *k, const rm_ctx *ctx, trial *t) {
  k->static_dispatch(ctx, &t->args.static_dispatch);
}

const op_test op_static_dispatch = {.name = "static_dispatch",
                                    .share = 2,
                                    .draw = draw_static_dispatch,
                                    .build = build_static_dispatch,
                                    .call = call_static_dispatch,
                                    .bench = {{.rows = 64,
                                               .n_groups = 8,
                                               .positions = 65,
                                               .n_experts = 128,
                                               .top_k = 8,
                                               .group = 16,
                                               .head0 = 3}}};

static void build_combine(trial *t) {
  const shape *s = &t->s;
  rm_combine_args *a = &t->args.combine;
  const int64_t choices = s->rows * s->top_k;
  *a = (rm_combine_args){.rows = s->rows,
                         .hidden = s->n,
                         .n_experts = s->n_experts,
                         .top_k = s->top_k,
                         .dtype = s->dtype};
  a->ids = draw_ids(t);
  int32_t *place = input(t, "place", choices, sizeof *place);
  for (int64_t i = 0; i < choices; i++) place[i] = (int32_t)i;
  shuffle(t, place, choices);
  a->place = place;
  a->gates = float_input(t, "gates", RM_F32, choices, draw_kind(t, SPOILED));
  a->y = float_input(t, "y", s->dtype, choices * s->n, draw_kind(t, SPOILED));
  a->out = output(t, "out", s->rows * s->n, size_of(s->dtype));
  moe_limits(t);
  t->flops = 2.0 * (double)(choices * s->n);
}

static void call_combine(const rm_kernels *k, const rm_ctx *ctx, trial *t) {
  k->combine(ctx, &t->args.combine);
}

static void draw_combine(trial *t) {
  draw_moe(t);
  if (check_device.is_gpu && one_in(t, 40)) t->s.top_k = 0;
}

const op_test op_combine = {.name = "combine",
                            .share = 30,
                            .draw = draw_combine,
                            .build = build_combine,
                            .call = call_combine,
                            .bench = {{.rows = 512, .n = 2048, .n_experts = 128, .top_k = 8}}};
