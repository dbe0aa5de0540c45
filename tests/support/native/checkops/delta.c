// delta.c: trials of delta_net.
#include "trial.h"

enum { ONE_ROW = 1 }; // each sequence has one row, as in decode

// head_dim and n: rows and columns of a state; k: taps of the convolution.
static void draw_delta_net(trial *t) {
  shape *s = &t->s;
  s->rows = draw_rows(t, t->small ? 9 : 50);
  s->option = one_in(t, 3) ? ONE_ROW : 0;
  s->group = PICK(t, 0, 1, 2, 3, 4);
  s->head0 = s->group ? between(t, 0, s->group - 1) : 0;
  s->n_heads = s->group ? between(t, 1, 5) : PICK(t, 2, 4);
  s->n_kv_heads = s->group ? (s->head0 + s->n_heads - 1) / s->group + 1 : 2;
  s->head_dim = draw_width(t, t->small ? 33 : RM_MAX_DELTA_DIM);
  s->n = draw_width(t, t->small ? 33 : RM_MAX_DELTA_DIM);
  s->k = PICK(t, 1, 2, 3, 4, 4, 4, 7);
  s->dtype = draw_dtype(t);
}

static void fill_states(trial *t, int64_t n_slots, char *states) {
  const shape *s = &t->s;
  const int64_t bytes = rm_delta_head_bytes(s->head_dim, s->n, s->k, s->dtype),
                matrix = rm_packed_elems(s->n, s->head_dim),
                window = (bytes - matrix * 4) / (int64_t)rm_dtype_bytes(s->dtype);
  const kind what = draw_kind(t, SPOILED);
  for (char *at = states; at < states + n_slots * s->n_heads * bytes; at += bytes) {
    fill(t, RM_F32, at, matrix, what);
    fill(t, s->dtype, at + matrix * 4, window, what);
  }
}

// Sequence i may be loaded from slot i; a row that is not saved there is saved to a slot of its
// own, after those.
static void draw_slots(trial *t, int32_t *loads, int32_t *saves, const int32_t *seqs,
                       int64_t n_seqs) {
  const shape *s = &t->s;
  for (int64_t i = 0; i < n_seqs; i++) loads[i] = t->timed || one_in(t, 2) ? (int32_t)i : -1;
  for (int64_t r = 0; r < s->rows; r++) {
    const int is_last = r + 1 == s->rows || seqs[r + 1] != seqs[r];
    if (is_last && (t->timed || one_in(t, 2))) saves[r] = seqs[r];
    else saves[r] = t->timed || !one_in(t, is_last ? 2 : 6) ? -1 : (int32_t)(n_seqs + r);
  }
}

static void build_delta_net(trial *t) {
  const shape *s = &t->s;
  const int64_t n_seqs = s->option & ONE_ROW ? rm_max64(1, s->rows)
                         : t->timed          ? 1
                                             : 3,
                n_slots = n_seqs + (t->timed ? 0 : s->rows),
                channels = 2 * s->n_kv_heads * s->head_dim + s->n_heads * s->n,
                columns = rm_delta_columns(s->n_kv_heads, s->n_heads, s->head_dim, s->n),
                floats = rm_delta_state_bytes(s->n_heads, s->head_dim, s->n, s->k, s->dtype) / 4;
  int32_t *seqs = input(t, "seq_of_row", s->rows, sizeof *seqs),
          *loads = input(t, "load_slots", n_seqs, sizeof *loads),
          *saves = input(t, "save_slots", s->rows, sizeof *saves);
  for (int64_t r = 0; r < s->rows; r++) seqs[r] = (int32_t)(r * n_seqs / s->rows);
  draw_slots(t, loads, saves, seqs, n_seqs);
  int64_t saved = 0;
  for (int64_t r = 0; r < s->rows; r++) saved += saves[r] >= 0;
  const kind what = draw_kind(t, SPOILED);
  rm_delta_net_args *a = &t->args.delta_net;
  *a = (rm_delta_net_args){
      .x = float_input(t, "x", s->dtype, s->rows * columns, what),
      .conv = float_input(t, "conv", s->dtype, channels * s->k, draw_kind(t, HARD)),
      .a_log = float_input(t, "a_log", RM_F32, s->n_heads, draw_kind(t, VAST)),
      .dt_bias = float_input(t, "dt_bias", RM_F32, s->n_heads, draw_kind(t, VAST)),
      .norm = float_input(t, "norm", s->dtype, s->n, draw_kind(t, VAST)),
      .states = partial_output(t, "states", n_slots * floats, sizeof(float), saved * floats),
      .load_slots = loads,
      .save_slots = saves,
      .seq_of_row = seqs,
      .rows = s->rows,
      .n_seqs = n_seqs,
      .n_k_heads = s->n_kv_heads,
      .n_v_heads = s->n_heads,
      .k_dim = s->head_dim,
      .v_dim = s->n,
      .kernel = s->k,
      .group = s->group ? s->group : s->n_heads / s->n_kv_heads,
      .head0 = s->head0,
      .eps = 1e-6f,
      .dtype = s->dtype};
  fill_states(t, n_slots, a->states);
  a->out = output(t, "out", s->rows * s->n_heads * s->n, (int64_t)rm_dtype_bytes(s->dtype));
  t->limits = (rm_limits){.max_rows = s->rows, .k_dim = s->head_dim, .v_dim = s->n, .kernel = s->k};
  t->flops = 7.0 * (double)(s->rows * s->n_heads * s->head_dim * s->n);
}

static void call_delta_net(const rm_kernels *k, const rm_ctx *ctx, trial *t) {
  k->delta_net(ctx, &t->args.delta_net);
}

const op_test op_delta_net = {
    .name = "delta_net",
    .share = 20,
    .draw = draw_delta_net,
    .build = build_delta_net,
    .call = call_delta_net,
    .bench = {{.rows = 32,
               .n_heads = 16,
               .n_kv_heads = 16,
               .head_dim = 128,
               .n = 128,
               .k = 4,
               .option = ONE_ROW},
              {.rows = 256, .n_heads = 16, .n_kv_heads = 16, .head_dim = 128, .n = 128, .k = 4}}};
