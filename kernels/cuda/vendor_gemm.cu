// vendor_gemm.cu: vendor_gemm.h by NVIDIA's cuBLASLt. Its matrices are column-major, so it computes
// yᵀ = W·xᵀ: W's rows are the columns of the transposed A, x's rows the columns of B, and only the
// numbers of columns of B and D change between calls. Sums are float32 and rounded once, after the
// bias. Gate and up are one matmul into the workspace, followed by a kernel of this file, since
// cuBLASLt has no epilogue that multiplies two columns. Rejected: the cuBLAS interface, because it
// chooses an algorithm at every call, by the number of rows.
#include "vendor_gemm.h"

#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <new>

#include "cublaslt.h"
#include "device.cuh"

namespace {

constexpr int CANDIDATES = 8, CLASSES = 32, THREADS = 128, MAX_GRID_Y = 65535;
constexpr uint32_t ALIGNED = 16; // all operands are aligned to 64 (base/fields.h, placement.h)

struct matmul {
  rm_gemm_shape shape;
  rm_lt_desc *desc;
  rm_lt_layout *w, *x, *y;
  rm_lt_algorithm algorithms[CLASSES]; // by class_of
};

struct vendor_gemm {
  rm_lt api;
  rm_lt_context *context;
  rm_lt_preference *preference; // of algorithms
  const rm_device *device;
  char *workspace; // cuBLASLt's, followed by gate and up
  size_t both_bytes; // of gate and up
  int64_t max_rows;
  rm_vendor_gemm_choice choice;
  int n;
  matmul list[RM_MAX_GEMM_SHAPES];
};

vendor_gemm *of(void *self) { return static_cast<vendor_gemm *>(self); }

thread_local char why[320];

const char *refuse(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *refuse(const char *format, ...) {
  va_list words;
  va_start(words, format);
  vsnprintf(why, sizeof why, format, words);
  va_end(words);
  return why;
}

// Return the text of a failure from the function.
#define TRY(call) \
  if (const char *wrong_call = call) return wrong_call
#define CALL(name, ...) \
  if (const int status = p->api.name(__VA_ARGS__)) \
  return refuse("cublasLt" #name ": %s", p->api.GetStatusString(status))

// --------------------------------------------------------------------------------------- cuBLASLt
const char *load(rm_lt *api, const char *path) {
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE), *found;
  if (!library) return refuse("cuBLASLt cannot be loaded: %s", dlerror());
#define LOAD(name, result, arguments) \
  if (!(found = dlsym(library, "cublasLt" #name))) \
    return refuse("expected cuBLASLt 12.0 or later, got %s without cublasLt" #name, path); \
  api->name = reinterpret_cast<decltype(api->name)>(found);
  RM_LT_CALLS(LOAD)
  const size_t version = api->GetVersion();
  if (version >= RM_LT_LEAST) return nullptr;
  return refuse("expected cuBLASLt 12.0 or later, got %s of version %zu.%zu.%zu", path,
                version / 10000, version / 100 % 100, version % 100);
}

// ----------------------------------------------------------------------------------------- shapes
int64_t w_rows(const rm_gemm_shape &shape) { return shape.swiglu ? 2 * shape.n : shape.n; }

// Class c is 2^(c−1) + 1 to 2^c rows.
int class_of(int64_t rows) {
  int c = 0;
  while (rows > int64_t{1} << c) c++;
  return c;
}

const char *set_rows(const vendor_gemm *p, const matmul &of, int64_t rows) {
  const uint64_t cols = static_cast<uint64_t>(rows);
  for (rm_lt_layout *layout : {of.x, of.y})
    CALL(MatrixLayoutSetAttribute, layout, RM_LT_LAYOUT_COLS, &cols, sizeof cols);
  return nullptr;
}

const char *set_bias(const vendor_gemm *p, const matmul &of, const void *bias) {
  CALL(MatmulDescSetAttribute, of.desc, RM_LT_BIAS_POINTER, &bias, sizeof bias);
  return nullptr;
}

const char *describe(const vendor_gemm *p, matmul *made) {
  const rm_gemm_shape &s = made->shape;
  const uint64_t rows = static_cast<uint64_t>(w_rows(s)), k = static_cast<uint64_t>(s.k),
                 most = static_cast<uint64_t>(p->max_rows);
  const int32_t transposed = RM_LT_TRANSPOSED, epilogue = RM_LT_EPILOGUE_BIAS,
                invariant = RM_LT_INVARIANT_16B;
  CALL(MatmulDescCreate, &made->desc, RM_LT_COMPUTE_F32, RM_LT_F32);
  CALL(MatmulDescSetAttribute, made->desc, RM_LT_TRANSA, &transposed, sizeof transposed);
  CALL(MatrixLayoutCreate, &made->w, RM_LT_BF16, k, rows, s.k);
  CALL(MatrixLayoutCreate, &made->x, RM_LT_BF16, k, most, s.ldx);
  CALL(MatrixLayoutCreate, &made->y, RM_LT_BF16, rows, most, s.swiglu ? w_rows(s) : s.ldy);
  if (p->choice == RM_VENDOR_GEMM_INVARIANT &&
      p->api.MatmulDescSetAttribute(made->desc, RM_LT_INVARIANCE, &invariant, sizeof invariant))
    return refuse("expected a cuBLASLt with batch invariance, got one without");
  if (!s.has_bias) return nullptr;
  CALL(MatmulDescSetAttribute, made->desc, RM_LT_EPILOGUE, &epilogue, sizeof epilogue);
  // The choice of an algorithm depends on the alignment of the bias, which the workspace has too.
  return set_bias(p, *made, p->workspace);
}

// ------------------------------------------------------------------------------------- algorithms
bool serves(const vendor_gemm *p, const matmul &of, const rm_lt_candidate &candidate,
            int64_t rows) {
  rm_lt_candidate checked = {};
  return candidate.status == RM_LT_SUCCESS && !set_rows(p, of, rows) &&
         p->api.MatmulAlgoCheck(p->context, of.desc, of.w, of.x, of.y, of.y, &candidate.algorithm,
                                &checked) == RM_LT_SUCCESS &&
         checked.workspace_bytes <= RM_VENDOR_GEMM_LIBRARY_BYTES;
}

// Chooses the first candidate that works for the least rows of classes [first, last] and for the
// most rows of each class.
const char *choose(const vendor_gemm *p, matmul *made, int first, int last) {
  rm_lt_candidate candidates[CANDIDATES];
  int n = 0;
  const int64_t most = rm_min64(int64_t{1} << last, p->max_rows),
                least = first ? (int64_t{1} << (first - 1)) + 1 : 1;
  const long long rows = most, cols = w_rows(made->shape), k = made->shape.k;
  TRY(set_rows(p, *made, most));
  const int status =
      p->api.MatmulAlgoGetHeuristic(p->context, made->desc, made->w, made->x, made->y, made->y,
                                    p->preference, CANDIDATES, candidates, &n);
  if (status != RM_LT_SUCCESS || n <= 0)
    return refuse("cuBLASLt has no algorithm for rows=%lld n=%lld k=%lld: %s", rows, cols, k,
                  p->api.GetStatusString(status));
  for (int i = 0; i < n; i++) {
    bool all = serves(p, *made, candidates[i], least);
    for (int c = first; c <= last && all; c++)
      all = serves(p, *made, candidates[i], rm_min64(int64_t{1} << c, p->max_rows));
    if (!all) continue;
    for (int c = first; c <= last; c++) made->algorithms[c] = candidates[i].algorithm;
    return nullptr;
  }
  return refuse(
      "none of cuBLASLt's %d algorithms for rows=%lld n=%lld k=%lld works for all from %lld rows "
      "on",
      n, rows, cols, k, static_cast<long long>(least));
}

const char *choose_all(const vendor_gemm *p, matmul *made) {
  const int last = class_of(p->max_rows);
  if (p->choice != RM_VENDOR_GEMM_FREE) return choose(p, made, 0, last);
  for (int c = 0; c <= last; c++) TRY(choose(p, made, c, c));
  return nullptr;
}

const char *prepare(vendor_gemm *p, const rm_vendor_gemm_options *options) {
  const uint64_t bytes = RM_VENDOR_GEMM_LIBRARY_BYTES;
  // The other schemes round the partial sums, or add them in the order of completion.
  const uint32_t schemes = RM_LT_SCHEME_COMPUTE;
  TRY(load(&p->api, options->library));
  CALL(Create, &p->context);
  CALL(MatmulPreferenceCreate, &p->preference);
  CALL(MatmulPreferenceSetAttribute, p->preference, RM_LT_MAX_WORKSPACE, &bytes, sizeof bytes);
  CALL(MatmulPreferenceSetAttribute, p->preference, RM_LT_SCHEMES, &schemes, sizeof schemes);
  for (int which = RM_LT_ALIGNMENT_A; which <= RM_LT_ALIGNMENT_D; which++)
    CALL(MatmulPreferenceSetAttribute, p->preference, which, &ALIGNED, sizeof ALIGNED);
  for (int i = 0; i < options->n; i++) {
    matmul *made = &p->list[p->n++];
    made->shape = options->list[i];
    TRY(describe(p, made));
    TRY(choose_all(p, made));
  }
  return nullptr;
}

// ------------------------------------------------------------------------------------------ calls
matmul *find(vendor_gemm *p, const rm_gemm_args *a, bool swiglu) {
  for (int i = 0; i < p->n; i++) {
    const rm_gemm_shape &s = p->list[i].shape;
    if (s.n == a->n && s.k == a->k && s.ldx == a->ldx && s.ldy == a->ldy &&
        !s.has_bias == !a->bias && !s.swiglu == !swiglu)
      return a->m <= p->max_rows ? &p->list[i] : nullptr;
  }
  return nullptr;
}

// Multiplies rows [row0, row0 + m) of x into y.
const char *multiply(vendor_gemm *p, matmul *made, const rm_gemm_args *a, int64_t row0, int64_t m,
                     void *y) {
  const float one = 1.0f, zero = 0.0f;
  TRY(set_rows(p, *made, m));
  if (a->bias) TRY(set_bias(p, *made, a->bias));
  const uint16_t *x = static_cast<const uint16_t *>(a->x) + row0 * a->ldx;
  CALL(Matmul, p->context, made->desc, &one, a->w, made->w, x, made->x, &zero, y, made->y, y,
       made->y, &made->algorithms[class_of(m)], p->workspace, RM_VENDOR_GEMM_LIBRARY_BYTES,
       p->device->stream);
  return nullptr;
}

// both: [m][2n], gate and up of rows [row0, row0 + m) of y.
__global__ void __launch_bounds__(THREADS)
    swiglu_kernel(rm_gemm_args a, const uint16_t *both, int64_t row0, int64_t m) {
  const int64_t col = blockIdx.x * static_cast<int64_t>(THREADS) + threadIdx.x;
  if (col >= a.n) return;
  for (int64_t row = blockIdx.y; row < m; row += gridDim.y) {
    const int64_t at = row * 2 * a.n + col;
    rm_put_output<RM_BF16, true>(a, row0 + row, col, rm_get(RM_BF16, both, at),
                                 rm_get(RM_BF16, both, at + a.n));
  }
}

const char *multiply_gate_up(vendor_gemm *p, matmul *made, const rm_gemm_args *a) {
  uint16_t *both = reinterpret_cast<uint16_t *>(p->workspace + RM_VENDOR_GEMM_LIBRARY_BYTES);
  const int64_t each = static_cast<int64_t>(p->both_bytes / rm_vendor_gemm_gate_up_bytes(a->n));
  for (int64_t row0 = 0; row0 < a->m; row0 += each) {
    const int64_t m = rm_min64(each, a->m - row0);
    TRY(multiply(p, made, a, row0, m, both));
    RM_LAUNCH(swiglu_kernel, rm_grid(rm_blocks(a->n, THREADS), rm_min64(m, MAX_GRID_Y)), THREADS, 0,
              p->device->stream, *a, both, row0, m);
  }
  return nullptr;
}

template <bool SWIGLU> void gemm(void *self, const rm_gemm_args *a) {
  vendor_gemm *p = of(self);
  if (a->m <= 0 || !rm_cuda_lives(p->device->self)) return;
  matmul *made = find(p, a, SWIGLU);
  const char *wrong = !made    ? "a gemm of a shape that was not given at open"
                      : SWIGLU ? multiply_gate_up(p, made, a)
                               : multiply(p, made, a, 0, a->m, a->y);
  if (wrong) rm_cuda_kill(p->device->self, wrong);
}

void close_vendor_gemm(void *self) {
  vendor_gemm *p = of(self);
  for (int i = 0; i < p->n; i++) {
    if (p->list[i].desc) p->api.MatmulDescDestroy(p->list[i].desc);
    for (rm_lt_layout *layout : {p->list[i].w, p->list[i].x, p->list[i].y})
      if (layout) p->api.MatrixLayoutDestroy(layout);
  }
  if (p->preference) p->api.MatmulPreferenceDestroy(p->preference);
  if (p->context) p->api.Destroy(p->context);
  delete p;
}

} // namespace

const char *rm_cuda_open_vendor_gemm(const rm_device *device, const rm_vendor_gemm_options *options,
                                     rm_vendor_gemm *out) {
  *out = rm_vendor_gemm{};
  if (options->n < 0 || options->n > RM_MAX_GEMM_SHAPES || options->max_rows < 1 ||
      options->max_rows > int64_t{1} << (CLASSES - 2))
    return refuse("expected up to %d shapes of 1 to 2^%d rows, got %d of %lld", RM_MAX_GEMM_SHAPES,
                  CLASSES - 2, options->n, static_cast<long long>(options->max_rows));
  const size_t room = rm_vendor_gemm_workspace(options->list, options->n, 1);
  if (options->workspace_bytes < room)
    return refuse("expected a workspace of %zu bytes, got %zu", room, options->workspace_bytes);
  vendor_gemm *p = new (std::nothrow) vendor_gemm();
  if (!p) return "no memory";
  const uintptr_t at = reinterpret_cast<uintptr_t>(options->workspace);
  p->both_bytes = options->workspace_bytes - RM_VENDOR_GEMM_LIBRARY_BYTES - 256;
  p->device = device, p->choice = options->choice, p->max_rows = options->max_rows;
  p->workspace = static_cast<char *>(options->workspace) + (256 - at % 256) % 256;
  if (const char *wrong = prepare(p, options)) {
    close_vendor_gemm(p);
    return wrong;
  }
  *out = {p, static_cast<int>(p->api.GetVersion()), gemm<false>, gemm<true>, close_vendor_gemm};
  return nullptr;
}
