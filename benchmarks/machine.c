// machine.c: measures the limits of this machine, so that a benchmark can report which fraction of
// a limit was reached.
//
//   machine THREADS GIB SECONDS  →  one line of JSON on stdout, rates in 1e9 per second
//
// read: all threads read a buffer far larger than the last cache, by several access patterns (one
// stream, one with software prefetch, four), because the fastest pattern differs between memory
// controllers; the best is the limit. copy: memcpy from one half to the other, bytes counted once.
// fma: independent chains of 256-bit and, if supported, 512-bit FMAs on registers: the limit of
// every float32 matmul. bf16 and amx: the same with vdpbf16ps and tdpbf16ps, the limits of bfloat16
// matmuls, or 0 if unsupported. Each rate is the best of several runs, because other work on the
// machine can only slow a run down. benchmarks/machine.py compiles this with plain gcc: the wider
// parts have target attributes.
#define _GNU_SOURCE
#include <cpuid.h>
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
  MAX_THREADS = 256,
  FMA_CHAINS = 12,
  FMA_ROUNDS = 10 * 1000 * 1000,
  AMX_CHAINS = 4,
  AMX_ROUNDS = 1000 * 1000
};

typedef enum work {
  READ_PLAIN,
  READ_PREFETCH,
  READ_FOUR,
  COPY,
  FMA256,
  FMA512,
  BF16,
  AMX,
  N_WORK
} work;

static int n_threads;
static char *buffer;
static size_t bytes_per_thread; // a multiple of 16 KiB
static double seconds_per_work;
static pthread_barrier_t barrier;
static double started[MAX_THREADS], ended[MAX_THREADS];
static double best[N_WORK]; // written by thread 0
static int again; // thread 0's verdict, read after a barrier
static volatile int sink;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

__attribute__((target("avx2"))) static void read_plain(const char *p, size_t n, size_t prefetch) {
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  for (size_t i = 0; i < n; i += 128) {
    if (prefetch) {
      _mm_prefetch(p + i + prefetch, _MM_HINT_T0);
      _mm_prefetch(p + i + prefetch + 64, _MM_HINT_T0);
    }
    a = _mm256_xor_si256(a, _mm256_load_si256((const __m256i *)(p + i)));
    b = _mm256_xor_si256(b, _mm256_load_si256((const __m256i *)(p + i + 32)));
    c = _mm256_xor_si256(c, _mm256_load_si256((const __m256i *)(p + i + 64)));
    d = _mm256_xor_si256(d, _mm256_load_si256((const __m256i *)(p + i + 96)));
  }
  a = _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d));
  sink = _mm256_extract_epi32(a, 0);
}

__attribute__((target("avx2"))) static void read_four(const char *p, size_t n) {
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  const size_t quarter = n / 4;
  for (size_t i = 0; i < quarter; i += 64) {
    for (size_t half = 0; half < 64; half += 32) {
      const char *at = p + i + half;
      a = _mm256_xor_si256(a, _mm256_load_si256((const __m256i *)at));
      b = _mm256_xor_si256(b, _mm256_load_si256((const __m256i *)(at + quarter)));
      c = _mm256_xor_si256(c, _mm256_load_si256((const __m256i *)(at + 2 * quarter)));
      d = _mm256_xor_si256(d, _mm256_load_si256((const __m256i *)(at + 3 * quarter)));
    }
  }
  a = _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d));
  sink = _mm256_extract_epi32(a, 0);
}

__attribute__((target("avx2,fma"))) static void fma256(void) {
  __m256 r[FMA_CHAINS];
  for (int i = 0; i < FMA_CHAINS; i++) r[i] = _mm256_set1_ps((float)i);
  const __m256 x = _mm256_set1_ps(1.0000001f), y = _mm256_set1_ps(1e-9f);
  for (int k = 0; k < FMA_ROUNDS; k++) {
#pragma GCC unroll 12
    for (int i = 0; i < FMA_CHAINS; i++) r[i] = _mm256_fmadd_ps(r[i], x, y);
  }
  for (int i = 1; i < FMA_CHAINS; i++) r[0] = _mm256_add_ps(r[0], r[i]);
  sink = (int)_mm256_cvtss_f32(r[0]);
}

__attribute__((target("avx512f"))) static void fma512(void) {
  __m512 r[FMA_CHAINS];
  for (int i = 0; i < FMA_CHAINS; i++) r[i] = _mm512_set1_ps((float)i);
  const __m512 x = _mm512_set1_ps(1.0000001f), y = _mm512_set1_ps(1e-9f);
  for (int k = 0; k < FMA_ROUNDS; k++) {
#pragma GCC unroll 12
    for (int i = 0; i < FMA_CHAINS; i++) r[i] = _mm512_fmadd_ps(r[i], x, y);
  }
  for (int i = 1; i < FMA_CHAINS; i++) r[0] = _mm512_add_ps(r[0], r[i]);
  sink = (int)_mm512_cvtss_f32(r[0]);
}

__attribute__((target("avx512f,avx512bf16"))) static void bf16(void) {
  __m512 r[FMA_CHAINS];
  for (int i = 0; i < FMA_CHAINS; i++) r[i] = _mm512_set1_ps((float)i);
  const __m512bh x = (__m512bh)_mm512_set1_epi32(0x3f803f80),
                 y = (__m512bh)_mm512_set1_epi32(0x30003000); // pairs of 1 and of 2⁻³¹
  for (int k = 0; k < FMA_ROUNDS; k++) {
#pragma GCC unroll 12
    for (int i = 0; i < FMA_CHAINS; i++) r[i] = _mm512_dpbf16_ps(r[i], x, y);
  }
  for (int i = 1; i < FMA_CHAINS; i++) r[0] = _mm512_add_ps(r[0], r[i]);
  sink = (int)_mm512_cvtss_f32(r[0]);
}

// Four sums of 16 × 16 from two tiles of either operand, as a matmul's block has them.
__attribute__((target("amx-tile,amx-bf16"))) static void amx(void) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {.palette = 1};
  static const uint16_t zeros[16 * 32];
  for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, zeros, 64);
  _tile_loadd(5, zeros, 64);
  _tile_loadd(6, zeros, 64);
  _tile_loadd(7, zeros, 64);
  for (int k = 0; k < AMX_ROUNDS; k++) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}

// Returns why this process cannot use AMX, or "" if it can. Linux maps a thread's tiles only for a
// process that has asked for them.
static const char *no_amx(void) {
  enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & 1u << 22) || !(d & 1u << 24))
    return "the processor has no AMX with bfloat16";
  if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA))
    return "the system refuses arch_prctl(ARCH_REQ_XCOMP_PERM)";
  return "";
}

static const char *amx_missing;

static int has(work which) {
  switch (which) {
    case FMA512: return __builtin_cpu_supports("avx512f");
    case BF16: return __builtin_cpu_supports("avx512bf16");
    case AMX: return !*amx_missing;
    default: return 1;
  }
}

// Runs one piece of work on this thread's share; returns how much it was (bytes, or floating-point
// operations).
static double run(work which, char *mine) {
  switch (which) {
    case READ_PLAIN: read_plain(mine, bytes_per_thread, 0); return (double)bytes_per_thread;
    case READ_PREFETCH: read_plain(mine, bytes_per_thread, 1024); return (double)bytes_per_thread;
    case READ_FOUR: read_four(mine, bytes_per_thread); return (double)bytes_per_thread;
    case COPY:
      memcpy(mine, mine + bytes_per_thread / 2, bytes_per_thread / 2);
      return (double)bytes_per_thread / 2;
    case FMA256: fma256(); return (double)FMA_ROUNDS * FMA_CHAINS * 8 * 2;
    case FMA512: fma512(); return (double)FMA_ROUNDS * FMA_CHAINS * 16 * 2;
    case BF16: bf16(); return (double)FMA_ROUNDS * FMA_CHAINS * 16 * 4;
    case AMX: amx(); return (double)AMX_ROUNDS * AMX_CHAINS * 16 * 16 * 32 * 2;
    default: return 0;
  }
}

static void *thread(void *argument) {
  const long id = (long)argument;
  char *mine = buffer + (size_t)id * bytes_per_thread;
  memset(mine, 1, bytes_per_thread);
  for (work which = READ_PLAIN; which < N_WORK; which++) {
    if (!has(which)) continue;
    const double deadline = now() + seconds_per_work;
    do {
      pthread_barrier_wait(&barrier);
      started[id] = now();
      const double amount = run(which, mine) * n_threads;
      ended[id] = now();
      pthread_barrier_wait(&barrier);
      if (id == 0) {
        double first = started[0], last = ended[0];
        for (int i = 1; i < n_threads; i++) {
          if (started[i] < first) first = started[i];
          if (ended[i] > last) last = ended[i];
        }
        const double rate = amount / (last - first) * 1e-9;
        if (rate > best[which]) best[which] = rate;
        again = last < deadline;
      }
      pthread_barrier_wait(&barrier);
    } while (again);
  }
  return NULL;
}

int main(int argc, char **argv) {
  n_threads = argc == 4 ? atoi(argv[1]) : 0;
  const double gib = argc == 4 ? atof(argv[2]) : 0;
  seconds_per_work = argc == 4 ? atof(argv[3]) : 0;
  if (n_threads < 1 || n_threads > MAX_THREADS || gib <= 0 || gib > 1024) {
    fprintf(stderr, "usage: machine THREADS GIB SECONDS\n");
    return 2;
  }
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    fprintf(stderr, "machine: this processor has no AVX2 with FMA\n");
    return 3;
  }
  amx_missing = no_amx();
  bytes_per_thread = (size_t)(gib * 1024 * 1024 * 1024) / (size_t)n_threads / 16384 * 16384;
  // The additional bytes, because a prefetch may point slightly past the end.
  const size_t total = bytes_per_thread * (size_t)n_threads + 65536;
  buffer = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (buffer == MAP_FAILED) {
    perror("mmap");
    return 4;
  }
  madvise(buffer, total, MADV_HUGEPAGE);
  pthread_barrier_init(&barrier, NULL, (unsigned)n_threads);
  pthread_t threads[MAX_THREADS];
  for (long i = 0; i < n_threads; i++) {
    if (pthread_create(&threads[i], NULL, thread, (void *)i)) return 5;
  }
  for (int i = 0; i < n_threads; i++) pthread_join(threads[i], NULL);
  printf("{\"threads\": %d, \"read_plain_gb_s\": %.2f, \"read_prefetch_gb_s\": %.2f, "
         "\"read_four_gb_s\": %.2f, \"copy_gb_s\": %.2f, "
         "\"fma256_gflop_s\": %.1f, \"fma512_gflop_s\": %.1f, \"bf16_gflop_s\": %.1f, "
         "\"amx_gflop_s\": %.1f, \"no_amx\": \"%s\"}\n",
         n_threads, best[READ_PLAIN], best[READ_PREFETCH], best[READ_FOUR], best[COPY],
         best[FMA256], best[FMA512], best[BF16], best[AMX], amx_missing);
  return 0;
}
