// ops.h: _core.Kernels and the table of ops that it runs over arrays.
//
// `Kernels(isa, threads)` has the kernels of one instruction set, a thread team and a workspace
// that grows. `Kernels(family, 1, op_device, stream)` has the kernels of a CUDA device, over
// DeviceArrays, on the OpDevice's stream. Its method run(op, {argument: value}) returns the tuple
// of the op's outputs. rollmesh.ops is the public interface.
//
// The table (dense.c, attention.c, moe.c, logits.c, pack.c) has an entry for each op. The entry
// lists the arguments in the order in which they are taken: name, type, flags and shape. An
// argument is a member of the kernel's argument struct; a size of a shape is a member of that
// struct or of rm_op_sizes. The first array that has a size sets it. A step between two arguments
// computes a member or checks a value. Python reads names and roles from _core.op_arguments().
//
// A call (call.c) takes the arguments, begins, runs the op and finishes. The first error sets the
// exception; later checks do nothing, and begin ends the call. Everything that kernels rely on is
// checked here: dtypes, sizes, ranges of indices. Checks hold the GIL; the op runs without it,
// under the object's mutex. Indices are copied to a block of host memory before they are checked,
// since another thread may write to the array, or an output may overlap it. On a device, begin
// moves the blocks to the device, so that the op reads the checked indices.
//
// With a caller's stream the op waits for that stream, and later work of that stream waits for the
// op. Without a stream (0) the call returns when the op is done.
#pragma once

#include "arrays.h"

#include <pthread.h>
#include <stddef.h>
#include <unistd.h>

#include "base/team.h"
#include "gpu/gpu_array.h"
#include "kernels.h"

typedef struct rm_kernels_object {
  PyObject_HEAD
  const rm_kernels *table; // view
  rm_op_device *op_device; // owned; NULL: the CPU
  void *stream; // the caller's stream, with which ops are ordered; NULL: none
  rm_team *team; // owned, like the workspace; on a device both belong to the OpDevice
  void *workspace;
  size_t workspace_bytes;
  pthread_mutex_t mutex; // guards team and workspace
  // In a forked child the mutex may be locked by a thread that exists only in the parent.
  pid_t owner;
} rm_kernels_object;

// The largest size: sums of sizes and rounding up are exact in int64_t; products are checked.
enum { RM_OP_MAX_SIZE = INT32_MAX };
// Blocks and arguments of one op; dims of an array.
enum { RM_OP_MAX_BLOCKS = 5, RM_OP_MAX_ARGUMENTS = 32, RM_OP_MAX_DIMS = 3 };

// -------------------------------------------------------------------------------------- the table
// The argument struct of every op.
typedef struct rm_rope_table_args {
  const float *inv_freq;
  float *cos, *sin;
  float scale;
  int bfloat16;
} rm_rope_table_args;
#define RM_OP_ARGS(name, args) args name;
typedef union rm_op_args {
  RM_OPS(RM_OP_ARGS)
  rm_pack_args pack;
  rm_rope_table_args rope_table;
} rm_op_args;

// Values of a call outside its argument struct: sizes, and the columns of rm_sample_params.
typedef struct rm_op_sizes {
  int64_t x_rows, width, elems, k_elems, v_elems, q_width, k_width, both, n_blocks, n_banned, two;
  int64_t n_values, bounds, choices, n_pages, n_positions, half, n_slots, groups, group_elems,
      dst_first, three, columns;
  int float32_out, grouped;
  rm_pack_found *found; // of pack
  rm_sample_params *params; // the block of a.sample.params on the host
  const float *temperature, *top_p, *min_p;
  const int32_t *top_k, *forced, *banned_starts, *banned;
  const uint64_t *seed, *counter;
} rm_op_sizes;

typedef enum rm_op_type {
  RM_OP_T, // an array of the op's dtype: bfloat16 or float32, decided by the first such array
  RM_OP_OUT_T, // an array of out_dtype, which `adjust` decides
  RM_OP_WEIGHT, // an array of the element type a.pack.src_dtype, which `adjust` decides
  RM_OP_F32,
  RM_OP_I32,
  RM_OP_I64,
  RM_OP_U8,
  RM_OP_U64,
  RM_OP_SIZE, // an integer in [low, high], an int64_t
  RM_OP_CHOICE, // the same, an int
  RM_OP_REAL, // a finite float32, at least 0 if low is 0
  RM_OP_FLAG, // a bool, an int
} rm_op_type;

// Flags in addition to those of arrays.h. NEW: an output. The call makes it if it is absent, None
// or `...`; an output that is also OPTIONAL is made only for `...`. ZERO: a new output is filled
// with zeros. An absent OPTIONAL number (a REAL also as None) is 0, or the value from the arrays.
// SAME: the array may be one of those before it, although the op writes to one of the two.
enum { RM_OP_NEW = 16, RM_OP_ZERO = 32, RM_OP_OUT = RM_OP_NEW | RM_ARRAY_WRITE, RM_OP_SAME = 64 };

typedef struct rm_op_call rm_op_call;
typedef struct rm_op_argument rm_op_argument;
struct rm_op_argument {
  const char *name; // NULL: a step or a copy alone
  rm_op_type type;
  int flags;
  size_t value, dims[RM_OP_MAX_DIMS]; // offsets in rm_op_call; dims end with 0
  int64_t low, high;
  size_t below; // of indices: offset of the size that they are below, from `low` on; 0: unchecked
  const char *with[4]; // an OPTIONAL argument is required if one of these is given
  void (*step)(rm_op_call *);
  void (*adjust)(rm_op_call *, rm_op_argument *); // changes a copy of the entry, which is then used
};

#define ARGUMENTS(op) static const rm_op_argument op[]
// The lines of an entry, in ext/ops/*.c, where OP is the path of the op's struct in rm_op_call. The
// name of an argument is that of its member, except in the …_AT lines. A size is a member of OP, or
// of rm_op_sizes if it is listed here.
#define SIZE_x_rows ~, s.x_rows
#define SIZE_width ~, s.width
#define SIZE_elems ~, s.elems
#define SIZE_k_elems ~, s.k_elems
#define SIZE_v_elems ~, s.v_elems
#define SIZE_q_width ~, s.q_width
#define SIZE_k_width ~, s.k_width
#define SIZE_both ~, s.both
#define SIZE_n_values ~, s.n_values
#define SIZE_n_blocks ~, s.n_blocks
#define SIZE_n_banned ~, s.n_banned
#define SIZE_two ~, s.two
#define SIZE_bounds ~, s.bounds
#define SIZE_choices ~, s.choices
#define SIZE_n_pages ~, s.n_pages
#define SIZE_n_positions ~, s.n_positions
#define SIZE_half ~, s.half
#define SIZE_n_slots ~, s.n_slots
#define SIZE_groups ~, s.groups
#define SIZE_three ~, s.three
#define SIZE_columns ~, s.columns
#define SIZE_dst_first ~, s.dst_first
#define SIZE_grouped ~, s.grouped
#define SIZE_float32_out ~, s.float32_out
#define SECOND(a, b, ...) b
#define SECOND_OF(...) SECOND(__VA_ARGS__)
#define AT(member) offsetof(rm_op_call, SECOND_OF(SIZE_##member, OP.member, ))
#define DIMS1(a) {AT(a)}
#define DIMS2(a, b) {AT(a), AT(b)}
#define DIMS3(a, b, c) {AT(a), AT(b), AT(c)}
#define DIMS_N(a, b, c, name, ...) name
#define DIMS(...) DIMS_N(__VA_ARGS__, DIMS3, DIMS2, DIMS1, )(__VA_ARGS__)
#define ARRAY_AT(name_, member_, type_, flags_, ...) \
  .name = #name_, .type = RM_OP_##type_, .flags = flags_, .value = AT(member_), \
  .dims = DIMS(__VA_ARGS__)
#define ADJUSTED(adjust_, name, type, flags, ...) \
  {ARRAY_AT(name, name, type, flags, __VA_ARGS__), .adjust = adjust_}
#define ARRAY(name, type, flags, ...) {ARRAY_AT(name, name, type, flags, __VA_ARGS__)}
#define IN(name, type, ...) ARRAY(name, type, RM_ARRAY_IN, __VA_ARGS__)
#define OPTIONAL_AT(name, type, ...) ARRAY_AT(name, name, type, RM_ARRAY_OPTIONAL, __VA_ARGS__)
#define OPTIONAL(name, type, ...) ARRAY(name, type, RM_ARRAY_OPTIONAL, __VA_ARGS__)
#define INDICES(name, type, low_, below_, ...) \
  {ARRAY_AT(name, name, type, RM_ARRAY_IN, __VA_ARGS__), .low = low_, .below = AT(below_)}
#define PACKED(name, ...) ARRAY(name, T, RM_ARRAY_PACKED, __VA_ARGS__)
#define OUT(name, type, ...) OUT_AT(name, name, type, __VA_ARGS__)
#define OUT_AT(name, member, type, ...) {ARRAY_AT(name, member, type, RM_OP_OUT, __VA_ARGS__)}
#define OPTIONAL_OUT(name, type, ...) ARRAY(name, type, RM_OP_OUT | RM_ARRAY_OPTIONAL, __VA_ARGS__)
#define ROW_FLAGS ARRAY(row_flags, U8, RM_OP_OUT | RM_OP_ZERO, rows)
#define NUMBER(name_, member_, type_, flags_, low_, high_) \
  {.name = #name_, \
   .type = RM_OP_##type_, \
   .flags = flags_, \
   .value = AT(member_), \
   .low = low_, \
   .high = high_}
#define SIZE_AT(name, member, low) NUMBER(name, member, SIZE, 0, low, RM_OP_MAX_SIZE)
#define SIZE(name, low) SIZE_AT(name, name, low)
#define OPTIONAL_SIZE(name) NUMBER(name, name, SIZE, RM_ARRAY_OPTIONAL, 0, RM_OP_MAX_SIZE)
#define CHOICE(name, last) NUMBER(name, name, CHOICE, 0, 0, last)
#define REAL(name, low) NUMBER(name, name, REAL, 0, low, 0)
#define OPTIONAL_REAL(name) NUMBER(name, name, REAL, RM_ARRAY_OPTIONAL, 0, 0)
#define FLAG(name) NUMBER(name, name, FLAG, RM_ARRAY_OPTIONAL, 0, 0)
#define STEP(step_) {.step = step_}
// Sets a member, or one of the limits of the workspace, to a size.
#define COPY_AT(offset, size) {.value = offset, .below = AT(size), .adjust = rm_op_copy}
#define COPY(member, size) COPY_AT(AT(member), size)
#define LIMIT(limit, size) COPY_AT(offsetof(rm_op_call, limits.limit), size)

typedef struct rm_op {
  const char *name;
  const rm_op_argument *arguments; // [n_arguments]
  int n_arguments;
  void (*run)(rm_op_call *);
  size_t dtype; // offset in rm_op_call of the struct's dtype; 0: it has none
  void (*placed)(rm_op_call *); // fills a block whose contents depend on its address; or NULL
} rm_op;
#define OP_RUN(name, run, dtype, placed) {#name, name, RM_LENGTH(name), run, dtype, placed}
#define OP_OF_T(name) OP_RUN(name, run_##name, offsetof(rm_op_call, a.name.dtype), NULL)
#define OP_OF_F32(name) OP_RUN(name, run_##name, 0, NULL)

extern const rm_op rm_ops_dense[], rm_ops_attention[], rm_ops_moe[], rm_ops_logits[],
    rm_ops_pack[]; // each ends with {0}

// -------------------------------------------------------------------------------------- one call
typedef struct rm_op_taken { // the memory of an array, a view
  const char *data;
  size_t bytes;
  int flags;
} rm_op_taken;

typedef struct rm_op_block { // host memory that the call owns
  void *host;
  size_t bytes;
  size_t value; // offset in rm_op_call of the pointer to it, which moves; 0: stays on the host
} rm_op_block;

struct rm_op_call {
  rm_kernels_object *self; // view
  const rm_op *op; // view
  PyObject *objects[RM_OP_MAX_ARGUMENTS]; // views: the argument of each entry; NULL: absent
  PyObject *outputs; // owned tuple
  rm_op_args a;
  rm_op_sizes s;
  rm_limits limits; // set if the op uses a workspace
  rm_dtype dtype, out_dtype; // of RM_OP_T and RM_OP_OUT_T
  int is_decided; // whether an array has decided dtype
  int n_outputs; // so far
  int failed;
  int n_blocks;
  rm_op_block blocks[RM_OP_MAX_BLOCKS]; // owned until the call ends
  int n_taken;
  rm_op_taken taken[RM_OP_MAX_ARGUMENTS]; // arrays so far, without indices
  int is_entered, saved; // on a device: the OpDevice
  rm_ctx ctx; // valid from begin on, like all fields below
  uint32_t fp;
  PyThreadState *thread;
};
#define RM_OP_RUN(name, args) \
  static inline void run_##name(rm_op_call *c) { c->self->table->name(&c->ctx, &c->a.name); }
RM_OPS(RM_OP_RUN)

static inline void *rm_op_value(rm_op_call *c, size_t offset) { return (char *)c + offset; }

// run.c
PyObject *rm_op_run(rm_kernels_object *self, PyObject *args); // Kernels.run
PyObject *rm_op_table(void); // new: the dict of _core.op_arguments

// The argument of an entry; NULL: absent or None.
PyObject *rm_op_given(const rm_op_call *c, const char *name);
int rm_op_is_new(const rm_op_call *c, const rm_op_argument *out); // whether the call makes it
int rm_op_type_of(const rm_op_call *c, PyObject *object); // NumPy's type number; −1: no array
// Sets out_dtype: that of a given output; of a new one float32, or that of the inputs.
void rm_op_out_dtype(rm_op_call *c, rm_op_argument *out);
rm_dtype rm_op_dtype_of(rm_op_call *c, PyObject *object, const char *name);
// DTypeError, or UnsupportedTensorError for an object of another kind.
void rm_op_refuse_dtype(rm_op_call *c, PyObject *object, const char *name, const char *expected);
// Returns a new block of zeros for the pointer at the offset `value`; NULL after an error.
void *rm_op_block_new(rm_op_call *c, size_t bytes, size_t value);
void rm_op_copy(rm_op_call *c, rm_op_argument *copy); // see COPY

// Raises an error and fails the call, unless it has failed. Formats are PyErr_Format's.
void rm_op_raise(rm_op_call *c, rm_code code, const char *format, ...);
void rm_op_refuse(rm_op_call *c, const char *name, int64_t seen, const char *expected,
                  int64_t limit); // ShapeError
// Check a number that was computed from arguments.
void rm_op_at_least(rm_op_call *c, const char *name, int64_t seen, int64_t least);
void rm_op_size(rm_op_call *c, const char *name, int64_t seen, int64_t least);
void rm_op_multiple_of(rm_op_call *c, const char *name, int64_t seen, int64_t unit);
// Checks that n indices (RM_OP_I32 or RM_OP_I64) from `first` on are in [low, high).
void rm_op_in_range(rm_op_call *c, const char *name, rm_op_type type, const void *indices,
                    int64_t first, int64_t n, int64_t low, int64_t high);
int64_t rm_op_product(rm_op_call *c, const char *name, int64_t a, int64_t b); // 0 after an error
int64_t rm_op_packed_elems(rm_op_call *c, const char *name, int64_t n,
                           int64_t k); // rm_packed_elems, checked

// The order of a call: enter, the arguments, begin, and if it returned 0 the op and finish; leave.
void rm_op_enter(rm_op_call *c);
int rm_op_begin(rm_op_call *c); // 0: ctx is valid; −1: the call has failed
void rm_op_finish(rm_op_call *c);
void rm_op_leave(rm_op_call *c);
void rm_op_fail(rm_op_call *c, rm_error *err); // raises err and fails the call
