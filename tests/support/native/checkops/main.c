// main.c: compares every op of every variant with the reference, bit for bit, over random shapes
// and hard numbers; the same bodies are benchmarks.
//
//   checkops [--quick | --elements N [--seconds S] | --seconds S | --trials N | --trial SEED |
//   --bench | --list]
//            [--op NAME] [--isa NAME] [--seed N] [--small] [--heap] [--plant]
//
// --quick is --trials 300 (the default). --elements counts output elements that the reference
// computed, each of which is then compared with every variant at each thread count; ops get fixed
// shares of N, so that the cheap ones do not dominate the count. The seed is random and always
// printed; a failure prints the one trial that shows it. --small: shapes for valgrind; --heap:
// exact
// allocations instead of guards. --plant flips one bit of a variant's output in one op before the
// comparison: the run must then fail. Exit status: 0 if all variants agree, 1 for a difference, 2
// for a usage error, 3 without a variant to compare.
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xmmintrin.h>

#include "base/team.h"
#include "common/option.h"
#include "machine.h"
#include "trial.h"

static const op_test *const OPS[] = {
    &op_embed,    &op_gather_rows,     &op_rms_norm,   &op_gemm,      &op_gemm_swiglu,
    &op_activate, &op_head_squares,    &op_qk_rope_kv, &op_attention, &op_router,
    &op_permute,  &op_static_dispatch, &op_combine,    &op_lm_head,   &op_merge_pairs,
    &op_sample,   &op_top_logprobs,    &op_ranks,      &op_pack};
enum {
  N_OPS = sizeof OPS / sizeof OPS[0],
  THREAD_COUNTS = 2,
  MXCSR_CONTROL = 0xffc0,
  DEFAULT_TRIALS = 300
};

typedef struct options {
  int bench, list, small, heap, plant;
  int64_t elements, trials;
  double seconds;
  const char *op, *isa;
  uint64_t seed, trial;
  int one_trial;
} options;

typedef struct counts {
  int64_t trials, elements, compared[RM_N_ISA];
  double seconds;
} counts;

static options want;
static counts done[N_OPS];
static trial current;
static rm_team *team;
static int64_t team_runs; // how often an op used a second thread
static char where[512]; // the running trial, for the handler of a bad access
static int where_length;
static char *workspace; // one map, an inaccessible page behind it
static int64_t workspace_map;

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

static void say_where(const op_test *op, const char *isa, int threads) {
  char text[256];
  describe_shape(&current.s, text, sizeof text);
  where_length =
      snprintf(where, sizeof where,
               "%s, %s, %d thread%s: %s\n  again: checkops --op %s --trial %" PRIu64 "%s%s\n",
               op->name, isa, threads, threads > 1 ? "s" : "", text, op->name, current.seed,
               want.small ? " --small" : "", want.heap ? " --heap" : "");
}

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
static void run_team(void *arg, rm_task_fn fn, void *task) {
  team_runs++;
  rm_team_run(arg, fn, task);
}

// Scratch of exactly the size asked for, NaNs in it or whatever was there, an inaccessible page
// behind it.
static rm_ctx context(const rm_kernels *table, int threads, char **heap) {
  rm_limits limits = current.limits;
  limits.n_threads = threads;
  const int64_t bytes = (int64_t)table->workspace_bytes(&limits), whole = rm_round_up(bytes, 64),
                page = sysconf(_SC_PAGESIZE);
  rm_ctx ctx = {.workspace_bytes = (size_t)bytes,
                .n_threads = threads,
                .run = threads > 1 ? run_team : NULL,
                .team = team};
  if (current.heap) {
    ctx.workspace = *heap = aligned_alloc(64, (size_t)rm_max64(whole, 64));
    return ctx;
  }
  if (whole > workspace_map) {
    if (workspace) munmap(workspace, (size_t)(workspace_map + page));
    workspace_map = rm_round_up(2 * whole, page);
    workspace = mmap(NULL, (size_t)(workspace_map + page), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (workspace == MAP_FAILED || mprotect(workspace + workspace_map, (size_t)page, PROT_NONE)) {
      perror("checkops: workspace");
      exit(2);
    }
  }
  ctx.workspace = workspace + workspace_map - whole;
  if (!current.timed) memset(ctx.workspace, current.seed & 1 ? 0xff : 0x7f, (size_t)whole);
  return ctx;
}

// Returns 0 if the op restored the floating-point environment.
static int run_once(const op_test *op, const rm_kernels *table, int threads) {
  char *heap = NULL;
  const rm_ctx ctx = context(table, threads, &heap);
  say_where(op, table->isa, threads);
  const uint32_t saved = rm_fp_enter();
  const uint32_t before = _mm_getcsr() & MXCSR_CONTROL;
  op->call(table, &ctx, &current);
  const int changed = (_mm_getcsr() & MXCSR_CONTROL) != before;
  rm_fp_leave(saved);
  free(heap);
  return changed;
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

// Makes the outputs of the reference, or of the op's plain loops, the expected ones.
static int run_reference(const op_test *op) {
  trial_reset(&current);
  if (op->plain) {
    const uint32_t saved = rm_fp_enter();
    say_where(op, "plain loops", 1);
    op->plain(&current);
    rm_fp_leave(saved);
  } else if (run_once(op, rm_kernels_for(RM_ISA_REF), 1)) {
    return fail("the floating-point environment was changed");
  }
  if (guards_changed()) return fail("written outside an output");
  trial_keep(&current);
  return 0;
}

static int compare_variant(const op_test *op, const rm_kernels *table) {
  for (int threads = 1; threads <= THREAD_COUNTS; threads++) {
    int64_t byte;
    trial_reset(&current);
    if (run_once(op, table, threads)) return fail("the floating-point environment was changed");
    if (want.plant) plant();
    const buffer *differs = trial_differs(&current, &byte);
    if (differs) return report_difference(differs, byte);
  }
  return 0;
}

static int check_trial(const op_test *op, counts *count, uint64_t seed) {
  const double start = seconds_now();
  current.small = want.small;
  current.heap = want.heap;
  trial_begin(&current, seed);
  op->draw(&current);
  op->build(&current);
  trial_seal(&current);
  if (run_reference(op)) return 1;
  const int64_t elements = trial_elements(&current);
  for (rm_isa isa = op->plain ? RM_ISA_REF : RM_ISA_AVX2; isa < RM_N_ISA; isa++) {
    const rm_kernels *table = rm_kernels_for(isa);
    if (!table || !wants(want.isa, rm_isa_name(isa))) continue;
    if (compare_variant(op, table)) return 1;
    count->compared[isa] += THREAD_COUNTS * elements;
  }
  count->elements += elements;
  count->trials++;
  if (want.heap) trial_free(&current);
  count->seconds += seconds_now() - start;
  return 0;
}

// ------------------------------------------------------------------------------- which trial next
static uint64_t trial_seed(int op, int64_t i) {
  trial t = {.random = want.seed ^ (uint64_t)(op + 1) << 56 ^ (uint64_t)i};
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

static const char *why_not(rm_isa isa) {
  if (want.isa && !wants(want.isa, rm_isa_name(isa))) return "not asked for";
  const char *refused = rm_isa_ask(isa).refused;
  return refused ? refused : "not available here";
}

static int summarize(double seconds) {
  int64_t elements = 0, compared[RM_N_ISA] = {0};
  int variants = 0;
  printf("%-14s %9s %14s", "op", "trials", "elements");
  for (rm_isa isa = RM_ISA_REF; isa < RM_N_ISA; isa++) printf(" %14s", rm_isa_name(isa));
  printf("\n");
  for (int i = 0; i < N_OPS; i++) {
    if (!done[i].trials) continue;
    printf("%-14s %9" PRId64 " %14" PRId64, OPS[i]->name, done[i].trials, done[i].elements);
    elements += done[i].elements;
    for (rm_isa isa = RM_ISA_REF; isa < RM_N_ISA; isa++) {
      printf(" %14" PRId64, done[i].compared[isa]);
      compared[isa] += done[i].compared[isa];
    }
    printf("  %.1f s\n", done[i].seconds);
  }
  printf("%-14s %9s %14" PRId64, "all", "", elements);
  for (rm_isa isa = RM_ISA_REF; isa < RM_N_ISA; isa++) printf(" %14" PRId64, compared[isa]);
  printf("\n");
  for (rm_isa isa = RM_ISA_AVX2; isa < RM_N_ISA; isa++) {
    const int ran = rm_kernels_for(isa) && wants(want.isa, rm_isa_name(isa));
    variants += ran;
    if (ran) printf("ran: %s%s\n", rm_isa_name(isa), rm_isa_ask(isa).emulated ? " (emulated)" : "");
    else printf("did not run: %s (%s)\n", rm_isa_name(isa), why_not(isa));
  }
  if (!variants) printf("no variant but the reference could run\n");
  printf("0 differences in %" PRId64 " elements, each variant at 1 and 2 threads (woken %" PRId64
         " times); seed %" PRIu64 ", %.1f s\n",
         elements, team_runs, want.seed, seconds);
  return variants ? 0 : 3;
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

// -------------------------------------------------------------------------------------- benchmark
// Seconds of one call: the best of those begun within a third of a second.
static double time_call(const op_test *op, const rm_kernels *table, int threads) {
  double best = 1e30;
  const double start = seconds_now();
  for (int i = 0; i == 0 || (seconds_now() - start < 0.33 && i < 1000); i++) {
    trial_reset(&current);
    const double before = seconds_now();
    run_once(op, table, threads);
    const double now = seconds_now() - before;
    best = now < best ? now : best;
  }
  return best;
}

static void bench_shape(const op_test *op, const shape *s, rm_dtype dtype, int threads,
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
  for (rm_isa isa = RM_ISA_REF; isa < RM_N_ISA; isa++) {
    const rm_kernels *table = rm_kernels_for(isa);
    if (!table || (isa > RM_ISA_REF && !wants(want.isa, rm_isa_name(isa)))) continue;
    const double seconds = time_call(op, table, threads),
                 gb = (double)current.moved_bytes * 1e-9 / seconds;
    const double gflop = current.flops * 1e-9 / seconds;
    if (isa == RM_ISA_REF) ref_seconds = seconds;
    printf("%-13s %-11s %10.1f us %7.2f GB/s %3.0f %% %8.1f GFLOP/s %3.0f %% %7.1f x ref   %s\n",
           op->name, rm_isa_name(isa), seconds * 1e6, gb, 100 * gb / limit.read_gb_s, gflop,
           100 * gflop / limit.fma_gflop_s, ref_seconds / seconds, text);
    fflush(stdout);
  }
}

static int bench(void) {
  for (int threads = 1; threads <= THREAD_COUNTS; threads++) {
    const machine limit = measure_machine(team, threads);
    printf("%d thread%s: reads %.1f GB/s, float32 fma %.0f GFLOP/s; percentages are of these, over "
           "100 where a cache serves\n",
           threads, threads > 1 ? "s" : "", limit.read_gb_s, limit.fma_gflop_s);
    for (int i = 0; i < N_OPS; i++)
      for (int j = 0; wants(want.op, OPS[i]->name) && j < MAX_BENCH && OPS[i]->bench[j].rows; j++)
        bench_shape(OPS[i], &OPS[i]->bench[j], RM_BF16, threads, limit);
  }
  return 0;
}

// ----------------------------------------------------------------------------------- command line
static int usage(const char *word) {
  fprintf(stderr,
          "checkops: %.40s is not an option, or its value is missing or not known; the head of "
          "tests/support/native/checkops/main.c lists them\n",
          word);
  return OPTION_REFUSED;
}

static int known_op(const char *name) {
  for (int i = 0; i < N_OPS; i++)
    if (strcmp(OPS[i]->name, name) == 0) return 1;
  return 0;
}

static int known_isa(const char *name) {
  for (rm_isa isa = RM_ISA_REF; isa < RM_N_ISA; isa++)
    if (strcmp(rm_isa_name(isa), name) == 0) return 1;
  return 0;
}

static int parse(int argc, char **argv) {
  const struct {
    const char *name;
    int *flag;
  } flags[] = {{"--bench", &want.bench},
               {"--list", &want.list},
               {"--small", &want.small},
               {"--heap", &want.heap},
               {"--plant", &want.plant}};
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
  return 0;
}

static int list(void) {
  for (int i = 0; i < N_OPS; i++) printf("op %s\n", OPS[i]->name);
  for (rm_isa isa = RM_ISA_REF; isa < RM_N_ISA; isa++)
    printf("isa %s%s\n", rm_isa_name(isa), rm_kernels_for(isa) ? "" : " (not available here)");
  return 0;
}

int main(int argc, char **argv) {
  want = (options){.trials = DEFAULT_TRIALS,
                   .seed = (uint64_t)(seconds_now() * 1e9) ^ (uint64_t)getpid() << 40};
  const int bad = parse(argc, argv);
  if (bad) return bad;
  if (want.list) return list();
  if (!rm_kernels_for(RM_ISA_REF)) {
    printf("the reference needs a processor with FMA\n");
    return 3;
  }
  signal(SIGSEGV, on_bad_access);
  signal(SIGBUS, on_bad_access);
  signal(SIGILL, on_bad_access);
  rm_error err = RM_ERROR_INIT;
  if (rm_team_create(THREAD_COUNTS, &team, &err)) {
    fprintf(stderr, "checkops: %s\n", rm_error_message(&err));
    rm_error_clear(&err);
    return 2;
  }
  setvbuf(stdout, NULL, _IOLBF, 0);
  if (!want.bench) printf("seed %" PRIu64 "\n", want.seed);
  const int status = want.bench ? bench() : check();
  trial_free(&current);
  if (workspace) munmap(workspace, (size_t)(workspace_map + sysconf(_SC_PAGESIZE)));
  rm_team_destroy(team);
  return status;
}
