// main.c: compares every op of every variant of this program's device with the reference, bit for
// bit, over random shapes and hard numbers; the same bodies are benchmarks.
//
//   checkops [--quick | --elements N [--seconds S] | --seconds S | --trials N | --trial SEED |
//   --bench | --list]
//            [--op NAME] [--isa NAME] [--seed N] [--small] [--heap] [--plant | --touch]
//
// --quick is --trials 300 (the default). --elements counts output elements that the reference
// computed, each of which is then compared with every variant in each setting of the device
// (numbers or orders of threads); ops get fixed shares of N, so that the cheap ones do not dominate
// the count. The seed is random and always printed; a failure prints the one trial that shows it.
// --small: shapes for valgrind; --heap: exact allocations instead of guards, on the CPU. --plant
// flips one bit of a variant's output in one op before the comparison: the run must then fail.
// --touch runs each variant once and compares nothing, for memory checkers, under which a launch
// takes long. Exit status: 0 if all variants agree, 1 for a difference, 2 for a usage error, 3
// without a variant to compare.
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xmmintrin.h>

#include "common/option.h"
#include "trial.h"

static const op_test *const OPS[] = {&op_embed,        &op_gather_rows,     &op_rms_norm,
                                     &op_gemm,         &op_gemm_swiglu,     &op_activate,
                                     &op_sigmoid_gate, &op_head_squares,    &op_qk_rope_kv,
                                     &op_attention,    &op_delta_net,       &op_router,
                                     &op_permute,      &op_static_dispatch, &op_combine,
                                     &op_lm_head,      &op_merge_pairs,     &op_sample,
                                     &op_top_logprobs, &op_ranks,           &op_pack};
enum { N_OPS = sizeof OPS / sizeof OPS[0], MXCSR_CONTROL = 0xffc0, DEFAULT_TRIALS = 300 };
#define COUNT(name, args) +1
_Static_assert(N_OPS == 1 + RM_OPS(COUNT), "every op of the table has an op_test, and so has pack");

typedef struct options {
  int bench, list, small, heap, plant, touch;
  int64_t elements, trials;
  double seconds;
  const char *op, *isa;
  uint64_t seed, trial;
  int one_trial;
} options;

typedef struct counts {
  int64_t trials, elements, compared[MAX_VARIANTS];
  double seconds;
} counts;

static options want;
static counts done[N_OPS];
static trial current;
static variant variants[MAX_VARIANTS];
static int n_variants, has_run[MAX_VARIANTS];
static char where[512]; // the running trial, for the handler of a bad access
static int where_length;

// ------------------------------------------------------------------------------------------ words
static const char *dtype_name(rm_dtype dtype) { return dtype == RM_BF16 ? "bf16" : "f32"; }

static int describe_shape(const shape *s, char *text, size_t room) {
  const struct {
    const char *name;
    int64_t value;
  } parts[] = {{"n", s->n},
               {"k", s->k},
               {"vocab", s->vocab},
               {"heads", s->n_heads},
               {"kv_heads", s->n_kv_heads},
               {"head_dim", s->head_dim},
               {"value_dim", s->value_dim},
               {"rotary_dim", s->rotary_dim},
               {"positions", s->positions},
               {"page_size", s->page_size},
               {"window", s->window},
               {"experts", s->n_experts},
               {"top_k", s->top_k},
               {"groups", s->n_groups},
               {"group", s->group},
               {"head0", s->head0},
               {"index0", s->index0},
               {"option", s->option}};
  int at = snprintf(text, room, "%s rows=%" PRId64, dtype_name(s->dtype), s->rows);
  for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
    if (parts[i].value)
      at += snprintf(text + at, room - (size_t)at, " %s=%" PRId64, parts[i].name, parts[i].value);
  return at;
}

static void say_where(const op_test *op, const char *isa, const char *setting) {
  char text[256];
  describe_shape(&current.s, text, sizeof text);
  where_length = snprintf(where, sizeof where,
                          "%s, %s, %s: %s\n  again: checkops --op %s --trial %" PRIu64 "%s%s\n",
                          op->name, isa, setting, text, op->name, current.seed,
                          want.small ? " --small" : "", want.heap ? " --heap" : "");
}

// Text that the simulated device prints with a fault.
const char *simt_where(void) { return where; }

static void on_bad_access(int signal) {
  static const char text[] =
      "FAIL: memory that is not the op's was touched (or an instruction is not there): ";
  (void)signal;
  if (write(STDOUT_FILENO, text, sizeof text - 1) < 0 ||
      write(STDOUT_FILENO, where, (size_t)where_length) < 0)
    _exit(1);
  _exit(1);
}

// --------------------------------------------------------------------------- one run of one table
// The size that the trial asks for. On a GPU, half of the trials of an op that takes passes ask for
// few rows, and for a list of all of them.
static size_t workspace_size(const op_test *op, const rm_kernels *table, int n_threads) {
  rm_limits limits = current.limits;
  limits.n_threads = n_threads;
  if (!check_device.is_gpu || !op->takes_passes || !(current.seed >> 20 & 1))
    return table->workspace_bytes(&limits);
  const int64_t rows = limits.max_rows;
  limits.max_rows = rm_min64(rows, 1 + (int64_t)(current.seed >> 21 & 3));
  return table->workspace_bytes(&limits) + (size_t)rm_round_up(8 * (rows + 1), 256);
}

// Scratch of exactly that size, NaNs in it or whatever was there, an inaccessible page behind it.
static void set_workspace(rm_ctx *ctx, const op_test *op, const rm_kernels *table) {
  ctx->workspace_bytes = workspace_size(op, table, ctx->n_threads);
  const int64_t whole = rm_round_up((int64_t)ctx->workspace_bytes, 64);
  if (current.heap) {
    ctx->workspace = aligned_alloc(64, (size_t)rm_max64(whole, 64));
    return;
  }
  ctx->workspace = trial_scratch(whole);
  if (!current.timed) memset(ctx->workspace, current.seed & 1 ? 0xff : 0x7f, (size_t)whole);
}

// Returns 0 if the op restored the floating-point environment.
static int run_once(const op_test *op, const char *isa, const rm_kernels *table, rm_ctx ctx,
                    const char *setting) {
  set_workspace(&ctx, op, table);
  say_where(op, isa, setting);
  const uint32_t saved = rm_fp_enter();
  const uint32_t before = _mm_getcsr() & MXCSR_CONTROL;
  op->call(table, &ctx, &current);
  device_wait();
  const int changed = (_mm_getcsr() & MXCSR_CONTROL) != before;
  rm_fp_leave(saved);
  if (current.heap) free(ctx.workspace);
  return changed;
}

static int run_setting(const op_test *op, const variant *v, int setting) {
  rm_ctx ctx = {.n_threads = 1};
  const char *words = device_set(&ctx, setting);
  return run_once(op, v->name, v->table, ctx, words);
}

// ------------------------------------------------------------------------------------ differences
static void print_bits(const char *p, int bytes) {
  for (int i = bytes - 1; i >= 0; i--) printf("%02x", (unsigned char)p[i]);
}

static int fail(const char *what) {
  printf("FAIL: %s: %s", what, where);
  return 1;
}

static int report_difference(const buffer *b, int64_t byte) {
  const int64_t first = b->data - b->room, bytes = b->elements * b->elem_bytes;
  if (byte < first || byte >= first + bytes)
    return fail(byte < first ? "written before an output" : "written behind an output");
  int64_t wrong = 0;
  for (int64_t i = 0; i < b->elements; i++)
    wrong += memcmp(b->data + i * b->elem_bytes, b->want + first + i * b->elem_bytes,
                    (size_t)b->elem_bytes) != 0;
  const int64_t i = (byte - first) / b->elem_bytes;
  printf("FAIL: %s[%" PRId64 "] is ", b->name, i);
  print_bits(b->data + i * b->elem_bytes, b->elem_bytes);
  printf(", the reference has ");
  print_bits(b->want + first + i * b->elem_bytes, b->elem_bytes);
  printf(" (%" PRId64 " of %" PRId64 " differ): %s", wrong, b->elements, where);
  return 1;
}

// Flips one bit of one element of any output, to test that this driver can fail.
static void plant(void) {
  const buffer *outputs[MAX_BUFFERS];
  uint64_t n = 0;
  for (int i = 0; i < current.n_buffers; i++)
    if (current.buffers[i].is_output && current.buffers[i].elements)
      outputs[n++] = &current.buffers[i];
  if (!n) return;
  const buffer *b = outputs[(current.seed >> 40) % n];
  b->data[current.seed % (uint64_t)(b->elements * b->elem_bytes)] ^=
      (char)(1 << (current.seed >> 32 & 7));
}

// The reference must not write outside its outputs either: checks its guards.
static int guards_changed(void) {
  for (int i = 0; i < current.n_buffers && !current.heap; i++) {
    const buffer *b = &current.buffers[i];
    for (const char *p = b->room; b->is_output && p < b->room + b->room_bytes; p++) {
      if (p == b->data) p += b->elements * b->elem_bytes;
      if (p < b->room + b->room_bytes && (unsigned char)*p != OUT_GUARD) return 1;
    }
  }
  return 0;
}

static int wants(const char *filter, const char *name) {
  return !filter || strcmp(filter, name) == 0;
}

// Whether an op of a variant is compared. pack's plain loops are an oracle of the reference too.
static int is_compared(const op_test *op, const variant *v) {
  return v->table && wants(want.isa, v->name) && (v->table != v->reference || op->plain) &&
         (!v->only || strncmp(op->name, v->only, strlen(v->only)) == 0);
}

static void begin_trial(const op_test *op, uint64_t seed) {
  trial_begin(&current, seed);
  op->draw(&current);
  op->build(&current);
  trial_seal(&current);
}

// Makes the outputs of the reference, or of the op's plain loops, the expected ones.
static int run_reference(const op_test *op, const rm_kernels *reference) {
  trial_reset(&current);
  if (op->plain) {
    const uint32_t saved = rm_fp_enter();
    say_where(op, "plain loops", "1 thread");
    op->plain(&current);
    rm_fp_leave(saved);
  } else if (run_once(op, "ref", reference, (rm_ctx){.n_threads = 1}, "1 thread")) {
    return fail("the floating-point environment was changed");
  }
  if (guards_changed()) return fail("written outside an output");
  trial_keep(&current);
  return 0;
}

static int compare_variant(const op_test *op, const variant *v) {
  for (int setting = 0; setting < (want.touch ? 1 : check_device.n_settings); setting++) {
    int64_t byte;
    trial_reset(&current);
    if (run_setting(op, v, setting)) return fail("the floating-point environment was changed");
    if (want.touch) continue;
    if (want.plant) plant();
    const buffer *differs = trial_differs(&current, &byte);
    if (differs) return report_difference(differs, byte);
  }
  return 0;
}

// The trial is the same for each reference: it is a function of its seed.
static int check_trial(const op_test *op, counts *count, uint64_t seed) {
  const double start = seconds_now();
  const rm_kernels *reference = NULL;
  int64_t elements = 0;
  current.small = want.small;
  current.heap = want.heap;
  for (int i = 0; i < n_variants; i++) {
    const variant *v = &variants[i];
    if (!is_compared(op, v)) continue;
    if (v->reference != reference) {
      reference = v->reference;
      if (want.heap) trial_free(&current);
      begin_trial(op, seed);
      elements = trial_elements(&current);
      if (!want.touch && run_reference(op, reference)) return 1;
    }
    if (v->is_mma) trial_relay(&current);
    if (compare_variant(op, v)) return 1;
    has_run[i] = 1;
    count->compared[i] += check_device.n_settings * elements;
  }
  count->elements += elements;
  count->trials++;
  if (want.heap) trial_free(&current);
  count->seconds += seconds_now() - start;
  return 0;
}

// ------------------------------------------------------------------------------- which trial next
static uint64_t trial_seed(int op, int64_t i) {
  trial t = {.random = want.seed};
  t.random = next64(&t) ^ (uint64_t)(op + 1) << 56 ^ (uint64_t)i;
  return next64(&t);
}

// The op that is furthest behind its share; −1 when all have what was asked for. Shares are of
// elements, trials or seconds.
static int next_op(double elapsed) {
  int64_t shares = 0;
  for (int i = 0; i < N_OPS; i++) shares += wants(want.op, OPS[i]->name) ? OPS[i]->share : 0;
  int next = -1;
  double least = 1;
  if (want.seconds > 0 && elapsed >= want.seconds) return -1;
  for (int i = 0; i < N_OPS; i++) {
    if (!wants(want.op, OPS[i]->name)) continue;
    double progress;
    if (want.elements)
      progress =
          (double)done[i].elements * (double)shares / ((double)want.elements * OPS[i]->share);
    else if (want.seconds > 0) progress = done[i].seconds / (want.seconds * 1000);
    else progress = (double)done[i].trials / (double)want.trials;
    if (progress >= least) continue;
    least = progress;
    next = i;
  }
  return next;
}

static void print_counts(const char *name, const counts *c) {
  printf("%-16s %9" PRId64 " %14" PRId64, name, c->trials, c->elements);
  for (int i = 0; i < n_variants; i++) printf(" %14" PRId64, c->compared[i]);
  printf("  %.1f s\n", c->seconds);
}

static void print_variant(int i) {
  const variant *v = &variants[i];
  if (has_run[i]) printf("ran: %s%s\n", v->name, v->is_emulated ? " (emulated)" : "");
  else if (!wants(want.isa, v->name)) printf("did not run: %s (not asked for)\n", v->name);
  else if (v->table) printf("did not run: %s (it has none of these ops)\n", v->name);
  else printf("did not run: %s (%s)\n", v->name, v->refused ? v->refused : "not available here");
}

static int summarize(double seconds) {
  counts all = {0};
  int ran = 0;
  printf("%-16s %9s %14s", "op", "trials", "elements");
  for (int i = 0; i < n_variants; i++) printf(" %14s", variants[i].name);
  printf("\n");
  for (int op = 0; op < N_OPS; op++) {
    if (!done[op].trials) continue;
    print_counts(OPS[op]->name, &done[op]);
    all.trials += done[op].trials;
    all.elements += done[op].elements;
    all.seconds += done[op].seconds;
    for (int i = 0; i < n_variants; i++) all.compared[i] += done[op].compared[i];
  }
  print_counts("all", &all);
  for (int i = 0; i < n_variants; i++) {
    if (variants[i].table == variants[i].reference) continue;
    print_variant(i);
    ran += has_run[i];
  }
  if (!ran) printf("no variant but the reference could run\n");
  if (want.touch) printf("%" PRId64 " elements, not compared", all.elements);
  else
    printf("0 differences in %" PRId64 " elements, each variant %s", all.elements,
           device_summary());
  printf("; seed %" PRIu64 ", %.1f s\n", want.seed, seconds);
  return ran ? 0 : 3;
}

static int check(void) {
  const double start = seconds_now();
  if (want.one_trial) {
    for (int i = 0; i < N_OPS; i++)
      if (wants(want.op, OPS[i]->name) && check_trial(OPS[i], &done[i], want.trial)) return 1;
    return summarize(seconds_now() - start);
  }
  int i;
  while ((i = next_op(seconds_now() - start)) >= 0)
    if (check_trial(OPS[i], &done[i], trial_seed(i, done[i].trials))) return 1;
  return summarize(seconds_now() - start);
}

static int usage(const char *word) {
  fprintf(stderr,
          "checkops: %.40s is not an option, or its value is missing or not known; the head of "
          "tests/support/native/checkops/main.c lists them\n",
          word);
  return OPTION_REFUSED;
}

// -------------------------------------------------------------------------------------- benchmark
// Seconds of one call: the best of those begun within a third of a second.
static double time_call(const op_test *op, const variant *v, int setting) {
  double best = 1e30;
  const double start = seconds_now();
  for (int i = 0; i == 0 || (seconds_now() - start < 0.33 && i < 1000); i++) {
    trial_reset(&current);
    const double before = seconds_now();
    run_setting(op, v, setting);
    const double now = seconds_now() - before;
    best = now < best ? now : best;
  }
  return best;
}

static void bench_shape(const op_test *op, const shape *s, rm_dtype dtype, int setting,
                        machine limit) {
  char text[256];
  current.timed = 1;
  trial_begin(&current, 1);
  current.s = *s;
  current.s.dtype = current.s.out_dtype = dtype;
  op->build(&current);
  trial_seal(&current);
  describe_shape(&current.s, text, sizeof text);
  double ref_seconds = 0;
  for (int i = 0; i < n_variants; i++) {
    const variant *v = &variants[i];
    if (!v->table || (v->table != v->reference && !wants(want.isa, v->name))) continue;
    const double seconds = time_call(op, v, setting),
                 gb = (double)current.moved_bytes * 1e-9 / seconds;
    const double gflop = current.flops * 1e-9 / seconds;
    if (v->table == v->reference) ref_seconds = seconds;
    printf("%-13s %-11s %10.1f us %7.2f GB/s %3.0f %% %8.1f GFLOP/s %3.0f %% %7.1f x ref   %s\n",
           op->name, v->name, seconds * 1e6, gb, 100 * gb / limit.read_gb_s, gflop,
           100 * gflop / limit.fma_gflop_s, ref_seconds / seconds, text);
    fflush(stdout);
  }
}

static int bench(void) {
  for (int setting = 0; setting < check_device.n_settings; setting++) {
    rm_ctx ctx;
    machine limit;
    if (device_measure(setting, &limit)) return usage("--bench on this device");
    printf("%s: reads %.1f GB/s, float32 fma %.0f GFLOP/s; percentages are of these, over "
           "100 where a cache serves\n",
           device_set(&ctx, setting), limit.read_gb_s, limit.fma_gflop_s);
    for (int i = 0; i < N_OPS; i++)
      for (int j = 0; wants(want.op, OPS[i]->name) && j < MAX_BENCH && OPS[i]->bench[j].rows; j++)
        bench_shape(OPS[i], &OPS[i]->bench[j], RM_BF16, setting, limit);
  }
  return 0;
}

// ----------------------------------------------------------------------------------- command line
static int known_op(const char *name) {
  for (int i = 0; i < N_OPS; i++)
    if (strcmp(OPS[i]->name, name) == 0) return 1;
  return 0;
}

static int known_isa(const char *name) {
  for (int i = 0; i < n_variants; i++)
    if (strcmp(variants[i].name, name) == 0) return 1;
  return 0;
}

static int parse(int argc, char **argv) {
  const struct {
    const char *name;
    int *flag;
  } flags[] = {{"--bench", &want.bench}, {"--list", &want.list},   {"--small", &want.small},
               {"--heap", &want.heap},   {"--plant", &want.plant}, {"--touch", &want.touch}};
  for (int i = 1; i < argc; i++) {
    const char *word = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
    int known = strcmp(word, "--quick") == 0;
    for (size_t j = 0; j < sizeof flags / sizeof flags[0]; j++)
      if (strcmp(word, flags[j].name) == 0) known = *flags[j].flag = 1;
    if (known) continue;
    if (!value) return usage(word);
    i++;
    if (strcmp(word, "--op") == 0 && known_op(value)) want.op = value;
    else if (strcmp(word, "--isa") == 0 && known_isa(value)) want.isa = value;
    else if (strcmp(word, "--seed") == 0) want.seed = option_bits("seed", value);
    else if (strcmp(word, "--trials") == 0)
      want.trials = option_count("trials", value, 1, OPTION_MOST);
    else if (strcmp(word, "--elements") == 0)
      want.elements = (int64_t)ceil(option_real("elements", value, 1e18));
    else if (strcmp(word, "--seconds") == 0) want.seconds = option_real("seconds", value, 1e9);
    else if (strcmp(word, "--trial") == 0)
      want.one_trial = 1, want.trial = option_bits("trial", value);
    else return usage(word);
  }
  return want.heap && check_device.is_gpu ? usage("--heap on this device") : 0;
}

static int list(void) {
  for (int i = 0; i < N_OPS; i++) printf("op %s\n", OPS[i]->name);
  for (int i = 0; i < n_variants; i++)
    printf("isa %s%s\n", variants[i].name, variants[i].table ? "" : " (not available here)");
  return 0;
}

int main(int argc, char **argv) {
  want = (options){.trials = DEFAULT_TRIALS,
                   .seed = (uint64_t)(seconds_now() * 1e9) ^ (uint64_t)getpid() << 40};
  n_variants = device_variants(variants);
  const int bad = parse(argc, argv);
  if (bad) return bad;
  if (want.list) return list();
  const int closed = device_open();
  if (closed) return closed;
  signal(SIGSEGV, on_bad_access);
  signal(SIGBUS, on_bad_access);
  signal(SIGILL, on_bad_access);
  setvbuf(stdout, NULL, _IOLBF, 0);
  if (!want.bench) printf("seed %" PRIu64 "\n", want.seed);
  const int status = want.bench ? bench() : check();
  trial_free(&current);
  device_close();
  return status;
}
