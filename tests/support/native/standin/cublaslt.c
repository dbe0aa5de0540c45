// cublaslt.c: a stand-in for libcublasLt.so.13, for streams of standin/stream.h. It implements the
// functions that kernels/cuda/vendor_gemm.cu loads, as cublasLt.h documents them, for D = Aᵀ·B of
// bf16 with float32 sums, with or without a bias. Work is enqueued on the stream and runs there.
//
// It has two algorithms. WHOLE adds along k in one chain. SPLIT cuts k into as many parts as there
// are columns of B, up to 4, and adds the parts, rounded to 10 bits of mantissa: the result of a
// column depends on the number of columns, which even a small model shows. The heuristic returns
// SPLIT first, or what STANDIN_CUBLAS_FIRST=whole selects, and only WHOLE for a descriptor that
// asks for batch invariance.
//
// Violations of the header end the program: a descriptor that is used before it is complete or
// after it is destroyed, operands less aligned than the preference has promised, a workspace
// smaller than the algorithm's, more columns than a leading dimension has room for, an algorithm
// that this library did not return, and descriptors that still exist when their handle is
// destroyed.
//
// Faults, read when a handle is made:
//   STANDIN_CUBLAS_VERSION=110000     the version of cublasLtGetVersion (also without a handle)
//   STANDIN_CUBLAS_CREATE=status      cublasLtCreate fails
//   STANDIN_CUBLAS_NONE=rows          no algorithm for so many columns of B
//   STANDIN_CUBLAS_FAIL=call:status   that cublasLtMatmul fails, counted from 1
//   STANDIN_CUBLAS_OLD=1              does not support batch invariance
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "standin/stream.h"

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, ALLOC_FAILED = 3, INVALID = 7, NOT_SUPPORTED = 15 };
enum { WHOLE = 1, SPLIT = 2, MAX_PARTS = 4, WORKSPACE = 1 << 20 };
static const uint64_t MAGIC = 0x6375624c61737300;

typedef struct context {
  uint64_t magic;
  int none, fail_at, fail_status, calls, old;
} context;

typedef struct desc {
  uint64_t magic;
  int compute, scale, transposed, epilogue, invariance;
  const void *bias;
} desc;

typedef struct layout {
  uint64_t magic;
  int type;
  uint64_t rows, cols;
  int64_t ld;
} layout;

typedef struct preference {
  uint64_t magic, workspace;
  uint32_t aligned[4]; // of A, B, C, D
  uint32_t schemes; // of reduction
} preference;

typedef struct algorithm { // 64 bytes
  uint64_t magic;
  int kind;
  uint32_t aligned[4];
  uint64_t rest[4];
} algorithm;
_Static_assert(sizeof(algorithm) == 64, "cublasLtMatmulAlgo_t");

typedef struct candidate {
  algorithm algorithm;
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
} candidate;

typedef struct matmul { // what the stream does
  int64_t n, m, k, lda, ldb, ldd;
  int kind;
  const uint16_t *a, *b, *bias;
  uint16_t *d;
  char *workspace;
} matmul;

static atomic_int alive; // descriptors and layouts

static void wrong(const char *what) {
  fprintf(stderr, "stand-in for cuBLASLt: %s\n", what);
  fflush(stderr);
  abort();
}

static void must(int good, const char *what) {
  if (!good) wrong(what);
}

static void *make(size_t bytes) {
  uint64_t *made = calloc(1, bytes);
  must(made != NULL, "no memory");
  *made = MAGIC;
  atomic_fetch_add(&alive, 1);
  return made;
}

static int drop(void *object) {
  must(*(uint64_t *)object == MAGIC, "a descriptor ends that has ended");
  memset(object, 0, sizeof(uint64_t));
  atomic_fetch_sub(&alive, 1);
  free(object);
  return SUCCESS;
}

// ------------------------------------------------------------------------ handles and descriptors
EXPORT size_t cublasLtGetVersion(void) {
  const char *said = getenv("STANDIN_CUBLAS_VERSION");
  return said ? (size_t)atoi(said) : 131000;
}

EXPORT const char *cublasLtGetStatusString(int status) {
  return status == SUCCESS         ? "no error"
         : status == NOT_SUPPORTED ? "not supported"
         : status == INVALID       ? "an invalid value"
                                   : "a failure";
}

static int number(const char *name) {
  const char *said = getenv(name);
  return said ? atoi(said) : 0;
}

EXPORT int cublasLtCreate(context **out) {
  const int status = number("STANDIN_CUBLAS_CREATE");
  if (status) return status;
  *out = make(sizeof **out);
  (*out)->none = number("STANDIN_CUBLAS_NONE");
  (*out)->old = number("STANDIN_CUBLAS_OLD");
  const char *fail = getenv("STANDIN_CUBLAS_FAIL");
  if (fail) sscanf(fail, "%d:%d", &(*out)->fail_at, &(*out)->fail_status);
  return SUCCESS;
}

EXPORT int cublasLtDestroy(context *c) { return drop(c); }
// For tests: the number of objects that were made and not destroyed, over all handles.
EXPORT int standin_cublas_alive(void) { return atomic_load(&alive); }

EXPORT int cublasLtMatmulDescCreate(desc **out, int compute, int scale) {
  *out = make(sizeof **out);
  (*out)->compute = compute, (*out)->scale = scale, (*out)->epilogue = 1;
  return SUCCESS;
}
EXPORT int cublasLtMatmulDescDestroy(desc *d) { return drop(d); }

EXPORT int cublasLtMatmulDescSetAttribute(desc *d, int attribute, const void *value, size_t bytes) {
  must(d->magic == MAGIC, "a descriptor is used after its end");
  if (attribute == 8 && bytes == sizeof d->bias) return memcpy(&d->bias, value, bytes), SUCCESS;
  if (bytes != sizeof(int)) return INVALID;
  int *to = attribute == 3    ? &d->transposed
            : attribute == 7  ? &d->epilogue
            : attribute == 41 ? &d->invariance
                              : NULL;
  if (!to || (attribute == 41 && number("STANDIN_CUBLAS_OLD"))) return INVALID;
  return memcpy(to, value, bytes), SUCCESS;
}

EXPORT int cublasLtMatrixLayoutCreate(layout **out, int type, uint64_t rows, uint64_t cols,
                                      int64_t ld) {
  must(ld >= (int64_t)rows, "a column is longer than the leading dimension");
  *out = make(sizeof **out);
  (*out)->type = type, (*out)->rows = rows, (*out)->cols = cols, (*out)->ld = ld;
  return SUCCESS;
}
EXPORT int cublasLtMatrixLayoutDestroy(layout *l) { return drop(l); }

EXPORT int cublasLtMatrixLayoutSetAttribute(layout *l, int attribute, const void *value,
                                            size_t bytes) {
  must(l->magic == MAGIC, "a layout is used after its end");
  if (attribute != 3 || bytes != sizeof l->cols) return INVALID;
  return memcpy(&l->cols, value, bytes), SUCCESS;
}

EXPORT int cublasLtMatmulPreferenceCreate(preference **out) {
  *out = make(sizeof **out);
  for (int i = 0; i < 4; i++) (*out)->aligned[i] = 256;
  return SUCCESS;
}
EXPORT int cublasLtMatmulPreferenceDestroy(preference *p) { return drop(p); }

EXPORT int cublasLtMatmulPreferenceSetAttribute(preference *p, int attribute, const void *value,
                                                size_t bytes) {
  if (attribute == 1 && bytes == sizeof p->workspace)
    return memcpy(&p->workspace, value, bytes), SUCCESS;
  if (attribute == 3 && bytes == sizeof p->schemes)
    return memcpy(&p->schemes, value, bytes), SUCCESS;
  if (attribute < 5 || attribute > 8 || bytes != sizeof(uint32_t)) return INVALID;
  return memcpy(&p->aligned[attribute - 5], value, bytes), SUCCESS;
}

// ------------------------------------------------------------------------------------- algorithms
static void check_shapes(const context *c, const desc *op, const layout *a, const layout *b,
                         const layout *d) {
  must(c->magic == MAGIC && op->magic == MAGIC && a->magic == MAGIC && b->magic == MAGIC &&
           d->magic == MAGIC,
       "something has ended");
  must(op->compute == 68 && op->scale == 0 && op->transposed == 1 && a->type == 14 &&
           b->type == 14 && d->type == 14,
       "not what this has");
  must(a->rows == b->rows && a->cols == d->rows && b->cols == d->cols, "shapes that do not fit");
  must(op->epilogue == 1 || (op->epilogue == 4 && op->bias), "a bias that is nowhere");
}

static size_t workspace_of(int kind) { return kind == SPLIT ? WORKSPACE : 0; }

EXPORT int cublasLtMatmulAlgoGetHeuristic(context *c, desc *op, layout *a, layout *b, layout *cc,
                                          layout *d, preference *p, int wanted, candidate *out,
                                          int *found) {
  check_shapes(c, op, a, b, d);
  must(cc == d, "C is D here");
  must(p->schemes == 2, "parts of a sum may be other than float32");
  const char *first = getenv("STANDIN_CUBLAS_FIRST");
  const int whole_first = first && strcmp(first, "whole") == 0;
  *found = 0;
  if (wanted < 1) return INVALID;
  if (c->none && c->none == (int)b->cols) return NOT_SUPPORTED;
  for (int i = 0; i < 2; i++) {
    const int kind = (i == 0) == whole_first ? WHOLE : SPLIT;
    if (*found == wanted || workspace_of(kind) > p->workspace || (kind == SPLIT && op->invariance))
      continue;
    candidate *one = &out[(*found)++];
    *one = (candidate){.algorithm = {.magic = MAGIC, .kind = kind},
                       .workspace = workspace_of(kind),
                       .waves = 1.0f};
    memcpy(one->algorithm.aligned, p->aligned, sizeof p->aligned);
  }
  return *found ? SUCCESS : NOT_SUPPORTED;
}

EXPORT int cublasLtMatmulAlgoCheck(context *c, desc *op, layout *a, layout *b, layout *cc,
                                   layout *d, const algorithm *chosen, candidate *result) {
  check_shapes(c, op, a, b, d);
  (void)cc;
  if (chosen->magic != MAGIC) return INVALID;
  *result = (candidate){.workspace = workspace_of(chosen->kind), .waves = 1.0f};
  return SUCCESS;
}

// ---------------------------------------------------------------------------------------- matmuls
static float f32_of(uint16_t bits) {
  const uint32_t word = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &word, sizeof value);
  return value;
}

static uint16_t bf16_of(float value) {
  uint32_t word;
  memcpy(&word, &value, sizeof word);
  if (value != value) return 0x7fc0;
  return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

static float sum_of(const matmul *p, int64_t row, int64_t col, int64_t first, int64_t last) {
  float sum = 0.0f;
  for (int64_t k = first; k < last; k++)
    sum += f32_of(p->a[row * p->lda + k]) * f32_of(p->b[col * p->ldb + k]);
  return sum;
}

static float coarse(float value) {
  uint32_t word;
  memcpy(&word, &value, sizeof word);
  word &= ~0x1fffu;
  memcpy(&value, &word, sizeof value);
  return value;
}

static int work(void *data) {
  matmul p;
  memcpy(&p, data, sizeof p);
  const int64_t parts = p.kind == WHOLE ? 1 : p.m < MAX_PARTS ? p.m : MAX_PARTS;
  if (p.kind == SPLIT) memset(p.workspace, 0x55, 64); // it is the algorithm's
  for (int64_t col = 0; col < p.m; col++)
    for (int64_t row = 0; row < p.n; row++) {
      float sum = 0.0f;
      for (int64_t i = 0; i < parts; i++) {
        const float part = sum_of(&p, row, col, p.k * i / parts, p.k * (i + 1) / parts);
        sum += p.kind == SPLIT ? coarse(part) : part;
      }
      p.d[col * p.ldd + row] = bf16_of(p.bias ? sum + f32_of(p.bias[row]) : sum);
    }
  return 1;
}

static void must_be_aligned(const void *at, uint32_t to) {
  must((uintptr_t)at % to == 0, "an operand is less aligned than was promised");
}

EXPORT int cublasLtMatmul(context *c, desc *op, const float *alpha, const void *a, layout *al,
                          const void *b, layout *bl, const float *beta, const void *cc, layout *cl,
                          void *d, layout *dl, const algorithm *chosen, void *workspace,
                          size_t bytes, standin_stream *stream) {
  check_shapes(c, op, al, bl, dl);
  must(*alpha == 1.0f && *beta == 0.0f && cc == d && cl == dl, "not what this has");
  must(chosen->magic == MAGIC, "an algorithm that nobody gave");
  must(bytes >= workspace_of(chosen->kind) && (uintptr_t)workspace % 256 == 0,
       "a workspace that is too small, or not aligned");
  const void *operands[] = {a, b, cc, d};
  for (int i = 0; i < 4; i++) must_be_aligned(operands[i], chosen->aligned[i]);
  if (op->epilogue == 4) must_be_aligned(op->bias, 16);
  if (++c->calls == c->fail_at) return c->fail_status;
  if (!bl->cols) return INVALID;
  const matmul p = {.n = (int64_t)dl->rows,
                    .m = (int64_t)dl->cols,
                    .k = (int64_t)al->rows,
                    .lda = al->ld,
                    .ldb = bl->ld,
                    .ldd = dl->ld,
                    .kind = chosen->kind,
                    .a = (const uint16_t *)stream->host(stream, a),
                    .b = (const uint16_t *)stream->host(stream, b),
                    .bias =
                        op->epilogue == 4 ? (const uint16_t *)stream->host(stream, op->bias) : NULL,
                    .d = (uint16_t *)stream->host(stream, d),
                    .workspace = stream->host(stream, workspace)};
  stream->enqueue(stream, work, &p, sizeof p);
  return SUCCESS;
}
