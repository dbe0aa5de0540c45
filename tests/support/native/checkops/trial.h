// trial.h: shared by the parts of checkops. A trial is one call of one op: its shape, its
// arguments, and the buffers they point to, all of it a function of one 64-bit seed, so that a
// failure can be repeated from one number.
//
// Buffers. An input is poisoned on both sides (bytes 0xFF: NaNs, and −1 as an index), made
// read-only before the call, and in one trial of two it ends where an inaccessible page begins. An
// output lies between guard bytes, is put back to its first content before each run, and is
// compared whole, guards and gaps included. Starts are off any alignment but an element's. With
// `heap` every buffer is a malloc of its exact size instead, outputs uninitialised: the form that
// valgrind can judge.
#pragma once

#include <stdint.h>

#include "device.h"
#include "kernels.h"

enum { MAX_BUFFERS = 24, GUARD_BYTES = 192, OUT_GUARD = 0xA5, MAX_BENCH = 4 };

// The sizes of a trial; an op leaves those that it does not know at 0. `option` is a bit set of the
// op's own choices.
typedef struct shape {
  int64_t rows, n, k, vocab, n_heads, n_kv_heads, head_dim, value_dim, rotary_dim, positions,
      page_size, window, n_experts, top_k, n_groups;
  int64_t group, head0, index0; // of a rank's part
  int option;
  rm_dtype dtype, out_dtype;
} shape;

// Contents of a float buffer. NUMBERS and all values before it hold finite numbers only.
typedef enum kind { PLAIN, HARD, EQUAL, TINY, VAST, SPOILED } kind;

// Packed operands, each with `rows` rows of k elements; the next begins `stride` elements further.
// GATE_UP: `rows` rows of each of the two. VALUES: pages of V, positions by head_dim.
typedef enum packed_as { NOT_PACKED, MATRICES, GATE_UP, VALUES } packed_as;
typedef struct packing {
  packed_as as;
  int64_t n, rows, k, stride;
} packing;

typedef struct buffer {
  const char *name;
  char *map; // of map_bytes, followed by an inaccessible page; grows, kept from trial to trial
  int64_t map_bytes;
  char *room; // guards and data
  char *data;
  int64_t room_bytes, elements, counted; // counted: elements that the op writes
  int elem_bytes, is_output;
  char *first, *want; // of an output: content before the call, content after the reference's
  int64_t image_bytes;
  packing packed;
} buffer;

typedef struct trial {
  uint64_t seed, random; // the trial's number; the state of its generator
  int small, heap,
      // small: shapes that valgrind and emulators can afford; timed: a benchmark's, nothing guarded
      timed;
  int is_aligned; // all buffers to 16 bytes, as kernels of a GPU prefer it
  int is_relaid; // packed operands are in the layout of cuda_mma
  shape s;
  rm_limits limits; // exactly the trial's sizes, n_threads aside
  int64_t moved_bytes; // of a timed trial: what the call must read and write at least
  double flops;
  int n_buffers;
  buffer buffers[MAX_BUFFERS];
  union {
    rm_embed_args embed;
    rm_gather_rows_args gather;
    rm_rms_norm_args rms_norm;
    rm_gemm_args gemm;
    rm_activate_args activate;
    rm_sigmoid_gate_args sigmoid_gate;
    rm_head_squares_args head_squares;
    rm_qk_rope_kv_args rope;
    rm_attention_args attention;
    rm_delta_net_args delta_net;
    rm_router_args router;
    rm_permute_args permute;
    rm_static_dispatch_args static_dispatch;
    rm_combine_args combine;
    rm_lm_head_args lm_head;
    rm_merge_pairs_args merge_pairs;
    rm_sample_args sample;
    rm_top_logprobs_args top;
    rm_ranks_args ranks;
    rm_pack_args pack;
  } args;
} trial;

typedef struct op_test {
  const char *name;
  int share; // of the elements of a long run, in thousandths
  void (*draw)(trial *); // a random shape
  void (*build)(trial *); // buffers, args, limits from the shape
  void (*call)(const rm_kernels *, const rm_ctx *, trial *);
  void (*plain)(trial *); // NULL: the oracle is the reference
  int takes_passes; // a GPU's workspace may have room for fewer rows than the call has
  shape bench[MAX_BENCH]; // rows = 0 ends them
} op_test;

extern const op_test op_embed, op_gather_rows, op_rms_norm, op_gemm, op_gemm_swiglu, op_activate,
    op_sigmoid_gate, op_head_squares, op_qk_rope_kv, op_attention, op_delta_net;
extern const op_test op_router, op_permute;
extern const op_test op_static_dispatch, op_combine, op_lm_head, op_merge_pairs, op_sample,
    op_top_logprobs, op_ranks, op_pack;

// ----------------------------------------------------------------------------------------- chance
uint64_t next64(trial *t);
int64_t between(trial *t, int64_t low, int64_t high); // both included
int one_in(trial *t, int64_t n);
int64_t pick(trial *t, const int64_t *of, int64_t n);
#define PICK(t, ...) \
  pick(t, (const int64_t[]){__VA_ARGS__}, \
       (int64_t)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)))
int64_t draw_width(trial *t, int64_t most); // ≥ 1, mostly around multiples of 16 and 32
int64_t draw_depth(trial *t, int64_t most); // the same, of sums: a multiple of 8 if is_aligned
int64_t draw_rows(trial *t, int64_t most); // ≥ 0
float draw_factor(trial *t); // of a scale or a cap; mostly 0, which stands for none
rm_dtype draw_dtype(trial *t);
kind draw_kind(trial *t, kind last); // PLAIN … last
void shuffle(trial *t, int32_t *x, int64_t n);

// ---------------------------------------------------------------------------------------- buffers
void *input(trial *t, const char *name, int64_t elements, int64_t elem_bytes);
void *output(trial *t, const char *name, int64_t elements,
             int64_t elem_bytes); // all of it written by the op
void *partial_output(trial *t, const char *name, int64_t elements, int64_t elem_bytes,
                     int64_t counted); // defined before the call
void *float_input(trial *t, const char *name, rm_dtype dtype, int64_t elements, kind what);
// rows × k numbers with a row stride; what stands between rows is poison.
void *strided_input(trial *t, const char *name, rm_dtype dtype, int64_t rows, int64_t k,
                    int64_t stride, kind what);
// Packed matrices: those of MATRICES or GATE_UP, `rows` rows of k numbers; zeros as padding.
void *packed_input(trial *t, const char *name, rm_dtype dtype, packing p, kind what);
// Room for packed operands, whose content the caller fills in. counted: elements that the op
// writes; −1: an input.
void *packed_room(trial *t, const char *name, rm_dtype dtype, packing p, int64_t counted);
int64_t packing_elements(packing p); // of all operands
// The distance of rows or of packed operands; with is_larger it may be larger than it must be.
int64_t draw_stride(trial *t, int64_t least, int is_larger);
void fill(trial *t, rm_dtype dtype, void *p, int64_t n, kind what);
uint32_t draw_float(trial *t, kind what); // bits of a float32

void trial_begin(trial *t, uint64_t seed);
void trial_seal(trial *t); // after build: images of outputs are taken, inputs become read-only
// Repacks packed bf16 operands, and what is wanted of them, for cuda_mma. For this trial only.
void trial_relay(trial *t);
void trial_reset(trial *t); // outputs as they were
void trial_keep(trial *t); // outputs are what is wanted
const buffer *trial_differs(
    const trial *t,
    int64_t *byte); // NULL, or the first output that differs; byte of its room
void trial_free(trial *t);
// Memory for a workspace of `bytes`, a multiple of 64, with an inaccessible page behind it.
char *trial_scratch(int64_t bytes);
int64_t trial_elements(const trial *t);
