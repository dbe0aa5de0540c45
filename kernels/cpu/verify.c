// verify.c: checks that a variant is bit-identical to ref on this processor or virtual machine. It
// runs the ops that multiply, reduce or choose on small fixed inputs, in both dtypes, with tails,
// cancellation, denormals and wide scales, and compares all output bits. Each instruction of a
// variant is in one of these ops; checkops compares every op. Memory is static, since kernels do
// not allocate and this runs once.
#include <string.h>

#include "clock.h"
#include "tables.h"

enum {
  ROWS = 19,
  WIDE = 200,
  SHALLOW = 101, // inner dimensions: few k blocks, and many
  DEEP = 300,
  HEADS = 4,
  KV_HEADS = 2,
  HEAD_DIM = 40,
  PAGE = 16,
  PAGES = 6,
  EXPERTS = 21,
  TOP_K = 5,
  OUT = 16384
};

static struct inputs {
  uint32_t x[64 * 1024], w[64 * 1024]; // words of either dtype
  uint32_t want[OUT], got[OUT];
} in;
static char scratch[4 << 20] __attribute__((aligned(64)));

static uint32_t next_random(uint64_t *state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(*state >> 32);
}

// Fills words with numbers near 1 of both signs, some scaled by 2^±30, some denormal, some the
// negation of the previous one.
static void fill(uint32_t *words, int64_t n, rm_dtype dtype, uint64_t seed) {
  uint16_t *half = (uint16_t *)words;
  uint32_t before = 0;
  for (int64_t i = 0; i < n; i++) {
    const uint32_t r = next_random(&seed), kind = r & 31;
    uint32_t bits = (r & 0x807fffffu) | (120u + (r >> 8 & 7)) << 23;
    if (kind == 0) bits += 30u << 23;
    if (kind == 1) bits -= 30u << 23;
    if (kind == 2) bits &= 0x807fffffu;
    if (kind == 3) bits = before ^ 0x80000000u;
    before = bits;
    if (dtype == RM_BF16) half[i] = (uint16_t)(bits >> 16);
    else words[i] = bits;
  }
}

// A check: runs ops of `k` once, whose results are `out`; p: its row of CHECKS.
typedef void (*check_fn)(const rm_kernels *k, rm_dtype dtype, void *out, const int64_t *p);

static const rm_ctx CTX = {.workspace = scratch, .workspace_bytes = sizeof scratch, .n_threads = 1};

// p: rows, inner dimension, whether it is gemm_swiglu.
static void gemm(const rm_kernels *k, rm_dtype dtype, void *out, const int64_t *p) {
  const int64_t rows = p[0], inner = p[1], swiglu = p[2], n = swiglu ? 24 : 37;
  const rm_gemm_args a = {.y = out,
                          .x = in.x,
                          .w = in.w,
                          .bias = swiglu ? NULL : in.x + 9000,
                          .m = rows,
                          .n = n,
                          .k = inner,
                          .ldx = inner + 3,
                          .ldy = n,
                          .dtype = dtype,
                          .y_dtype = swiglu ? dtype : RM_F32};
  if (swiglu) k->gemm_swiglu(&CTX, &a);
  else k->gemm(&CTX, &a);
}
static void norm(const rm_kernels *k, rm_dtype dtype, void *out, const int64_t *) {
  memcpy((char *)out + sizeof in.want / 2, in.x, ROWS * 53 * rm_dtype_bytes(dtype));
  const rm_rms_norm_args a = {.out = out,
                              .residual = (char *)out + sizeof in.want / 2,
                              .x = in.w,
                              .weight = in.w + 4000,
                              .eps = 1e-6f,
                              .rows = ROWS,
                              .n = 53,
                              .dtype = dtype};
  k->rms_norm(&CTX, &a);
}

static void attention(const rm_kernels *k, rm_dtype dtype, void *out, const int64_t *) {
  static const int32_t positions[] = {0, 15, 16, 31, 32, 70, 71, 95}, sequence[8] = {0};
  static const int32_t pages[PAGES] = {3, 0, 5, 1, 4, 2};
  const rm_attention_args a = {.out = out,
                               .q = in.x,
                               .k_cache = in.w,
                               .v_cache = in.w + 32768,
                               .positions = positions,
                               .seq_of_row = sequence,
                               .block_tables = pages,
                               .rows = 8,
                               .n_seqs = 1,
                               .max_pages = PAGES,
                               .n_heads = HEADS,
                               .n_kv_heads = KV_HEADS,
                               .head_dim = HEAD_DIM,
                               .page_size = PAGE,
                               .group = HEADS / KV_HEADS,
                               .value_dim = HEAD_DIM,
                               .scale = 0.125f,
                               .dtype = dtype};
  k->attention(&CTX, &a);
}
// p: score, number of groups.
static void router(const rm_kernels *k, rm_dtype dtype, void *out, const int64_t *p) {
  const rm_router_args a = {.ids = out,
                            .gates = (float *)out + ROWS * TOP_K,
                            .x = in.x,
                            .w = in.w,
                            .rows = ROWS,
                            .hidden = 64,
                            .n_experts = EXPERTS,
                            .top_k = TOP_K,
                            .n_groups = p[1],
                            .top_groups = 3,
                            .route_scale = 2.5f,
                            .renormalize = 1,
                            .score = (rm_score)p[0],
                            .dtype = dtype};
  k->router(&CTX, &a);
}
static void head_and_sample(const rm_kernels *k, rm_dtype dtype, void *out, const int64_t *) {
  static uint8_t flags[ROWS];
  rm_sample_params params[ROWS];
  float *logprobs = (float *)out + ROWS, *stats = logprobs + 2 * ROWS, *logits = stats + 2 * ROWS;
  memset(flags, 0, sizeof flags);
  const rm_lm_head_args head = {.logits = logits,
                                .stats = stats,
                                .row_flags = flags,
                                .x = in.x,
                                .w = in.w,
                                .rows = ROWS,
                                .vocab = WIDE,
                                .hidden = 64,
                                .ldx = 64,
                                .ld_logits = WIDE,
                                .dtype = dtype};
  k->lm_head(&CTX, &head);
  for (int r = 0; r < ROWS; r++)
    params[r] = (rm_sample_params){.temperature = 0.25f * (float)(r % 5),
                                   .top_p = r % 2 ? 0.9f : 1.0f,
                                   .min_p = r % 3 ? 0.0f : 0.01f,
                                   .top_k = r % 4 ? -1 : 7,
                                   .seed = 7,
                                   .counter = (uint64_t)r,
                                   .forced = -1};
  const rm_sample_args sample = {.tokens = out,
                                 .logprobs = logprobs,
                                 .sampling_logprobs = logprobs + ROWS,
                                 .kept = (int32_t *)logits + ROWS * WIDE,
                                 .logits = logits,
                                 .stats = stats,
                                 .params = params,
                                 .row_flags = flags,
                                 .rows = ROWS,
                                 .vocab = WIDE,
                                 .ld_logits = WIDE};
  k->sample(&CTX, &sample);
}

static void rope(const rm_kernels *k, rm_dtype dtype, void *out, const int64_t *) {
  static int32_t positions[ROWS];
  static int64_t slots[ROWS];
  static uint8_t flags[ROWS];
  for (int r = 0; r < ROWS; r++) {
    positions[r] = r;
    slots[r] = 2 * r;
  }
  const rm_qk_rope_kv_args a = {.q_out = out,
                                .qkv = in.x,
                                .q_weight = in.w,
                                .k_weight = in.w + 128,
                                .cos = (const float *)in.w + 1000,
                                .sin = (const float *)in.w + 2000,
                                .positions = positions,
                                .slots = slots,
                                .k_cache = (char *)out + OUT,
                                .v_cache = (char *)out + 2 * OUT,
                                .row_flags = flags,
                                .eps = 1e-6f,
                                .rows = ROWS,
                                .n_heads = HEADS,
                                .n_kv_heads = KV_HEADS,
                                .head_dim = 32,
                                .page_size = PAGE,
                                .rotary_dim = 32,
                                .dtype = dtype};
  k->qk_rope_kv(&CTX, &a);
}
static void combine(const rm_kernels *k, rm_dtype dtype, void *out, const int64_t *) {
  static int32_t place[ROWS * TOP_K], ids[ROWS * TOP_K];
  static float gates[ROWS * TOP_K];
  for (int i = 0; i < ROWS * TOP_K; i++) {
    place[i] = (i * 7) % (ROWS * TOP_K);
    ids[i] = (i % TOP_K * 4 + i / TOP_K) % EXPERTS;
    gates[i] = 1.0f / (float)(i + 3);
  }
  const rm_combine_args a = {.out = out,
                             .y = in.x,
                             .place = place,
                             .ids = ids,
                             .gates = gates,
                             .rows = ROWS,
                             .hidden = 43,
                             .n_experts = EXPERTS,
                             .top_k = TOP_K,
                             .dtype = dtype};
  k->combine(&CTX, &a);
}

// Packs into both layouts, with rows that begin in the middle of a tile, and writes the results too
// (digest, first non-finite element).
static void pack(const rm_kernels *k, rm_dtype dtype, void *out, const int64_t *) {
  rm_pack_args a = {.src = in.x,
                    .rows = 41,
                    .cols = 40,
                    .row_stride = 44,
                    .col_stride = 1,
                    .dst_dtype = dtype,
                    .dst_row0 = 5,
                    .dst_cols = 40,
                    .index0 = 80};
  const rm_layout layouts[] = {RM_PLAIN, RM_PACKED};
  for (int i = 0; i < 2; i++) {
    a.src_dtype = i && dtype == RM_BF16 ? RM_SRC_F32 : dtype == RM_BF16 ? RM_SRC_BF16 : RM_SRC_F32;
    a.layout = layouts[i];
    a.dst = (char *)out + i * (sizeof in.want / 2);
    k->pack(&CTX, &a);
    ((uint64_t *)out)[sizeof in.want / 16 - 1 - i] = a.digest;
    ((uint64_t *)out)[sizeof in.want / 16 - 3 - i] = (uint64_t)a.nonfinite_index;
  }
}

static const struct check {
  const char *name;
  check_fn run;
  int64_t p[3];
} CHECKS[] = {{"gemm", gemm, {1, SHALLOW}},
              {"gemm", gemm, {ROWS, SHALLOW}},
              {"gemm", gemm, {35, DEEP}},
              {"gemm_swiglu", gemm, {5, SHALLOW, 1}},
              {"gemm_swiglu", gemm, {35, DEEP, 1}},
              {"rms_norm", norm, {0}},
              {"attention", attention, {0}},
              {"router", router, {RM_SCORE_SOFTMAX, 0}},
              {"router", router, {RM_SCORE_SIGMOID, 7}},
              {"lm_head or sample", head_and_sample, {0}},
              {"qk_rope_kv", rope, {0}},
              {"combine", combine, {0}},
              {"pack", pack, {0}}};

const char *rm_verify(const rm_kernels *kernels) {
  for (rm_dtype dtype = RM_BF16; dtype <= RM_F32; dtype++) {
    fill(in.x, sizeof in.x / rm_dtype_bytes(dtype), dtype, 1);
    fill(in.w, sizeof in.w / rm_dtype_bytes(dtype), dtype, 2);
    for (size_t i = 0; i < sizeof CHECKS / sizeof CHECKS[0]; i++) {
      memset(in.want, 0, sizeof in.want);
      memset(in.got, 0, sizeof in.got);
      CHECKS[i].run(&rm_table_ref, dtype, in.want, CHECKS[i].p);
      // An op that reads scratch before it writes it reads NaNs.
      memset(scratch, 0xff, sizeof scratch / 16);
      CHECKS[i].run(kernels, dtype, in.got, CHECKS[i].p);
      if (memcmp(in.want, in.got, sizeof in.want) != 0) return CHECKS[i].name;
    }
  }
  return NULL;
}

// ------------------------------------------------------------------------------------------ speed
// Returns the best of three runs, which other load affects least.
static double gemm_gflops(const rm_kernels *kernels, int64_t rows, int64_t columns) {
  enum { K = 512 };
  const rm_gemm_args a = {.y = scratch + (2 << 20),
                          .x = in.x,
                          .w = in.w,
                          .m = rows,
                          .n = columns,
                          .k = K,
                          .ldx = K,
                          .ldy = columns,
                          .dtype = RM_BF16,
                          .y_dtype = RM_BF16};
  double best = 0;
  for (int i = 0; i < 4; i++) { // the first run warms up
    const double start = rm_now();
    kernels->gemm(&CTX, &a);
    const double rate = 2e-9 * (double)(rows * columns * K) / (rm_now() - start);
    if (i && rate > best) best = rate;
  }
  return best;
}

void rm_measure(const rm_kernels *kernels, double *one_row, double *many_rows) {
  fill(in.x, 2 * (int64_t)(sizeof in.x / sizeof in.x[0]), RM_BF16, 1);
  fill(in.w, 2 * (int64_t)(sizeof in.w / sizeof in.w[0]), RM_BF16, 2);
  *one_row = gemm_gflops(kernels, 1, 256);
  *many_rows = gemm_gflops(kernels, 64, 64);
}
