// pack.c: the packing of weights. See ops.h.
#include "dlpack.h"
#include "ops.h"

#define OP a.pack
#define SIZE_found ~, s.found
// With this limit the byte offset of an element, and the sum of two offsets, stay below 2^63.
#define MAX_INDEX (INT64_MAX / 16)

// A weight has two dims, or three with groups.
static void pack_weight(rm_op_call *c, rm_op_argument *weight) {
  rm_pack_args *a = &c->OP;
  PyObject *object = rm_op_given(c, weight->name);
  const int type = rm_op_type_of(c, object);
  while (a->src_dtype < RM_SRC_F64 && rm_elements[a->src_dtype].type != type) a->src_dtype++;
  if (rm_elements[a->src_dtype].type != type)
    rm_op_refuse_dtype(c, object, weight->name,
                       "bfloat16 (its words in uint16), float32, float16 or float64");
  if (c->s.grouped) return;
  c->s.groups = 1;
  weight->dims[0] = AT(rows);
  weight->dims[1] = AT(cols);
  weight->dims[2] = 0;
}

static void pack_sizes(rm_op_call *c) {
  rm_pack_args *a = &c->OP;
  const int64_t end = a->dst_row0 + a->rows;
  if (a->cols % 2 == 0 && a->index0 % 2)
    rm_op_refuse(c, "index0 of rows of even width", a->index0, "even, such as", a->index0 - 1);
  a->row_stride = a->dst_cols = a->cols;
  a->col_stride = 1;
  c->s.group_elems =
      a->layout == RM_PLAIN
          ? rm_op_product(c, "dst", end, a->cols)
          : rm_op_packed_elems(c, "dst", a->layout == RM_PACKED ? end : rm_gate_up_rows(end),
                               a->cols);
  c->s.elems = rm_op_product(c, "dst", c->s.groups, c->s.group_elems);
}

// The first group of a given dst begins at element dst_first, and dst may be larger: the rows are
// packed into a part of it.
static void pack_dst(rm_op_call *c, rm_op_argument *dst) {
  rm_op_out_dtype(c, dst);
  if (!rm_op_is_new(c, dst)) c->s.elems = -1;
}

static void pack_check(rm_op_call *c) {
  rm_op_at_least(c, "the length of dst from dst_first on", c->s.elems - c->s.dst_first,
                 c->s.groups * c->s.group_elems);
  c->OP.dst_dtype = c->out_dtype;
}

// On the CPU the kernel returns the results of the last group in its arguments.
static void run_pack(rm_op_call *c) {
  rm_pack_args a = c->OP;
  const int64_t of_src = a.rows * a.cols * (rm_elements[a.src_dtype].bits / 8),
                of_dst = c->s.group_elems * (int64_t)rm_dtype_bytes(a.dst_dtype);
  a.dst = (char *)a.dst + c->s.dst_first * (int64_t)rm_dtype_bytes(a.dst_dtype);
  if (c->self->op_device) a.found = c->s.found;
  const int64_t n = c->s.group_elems ? c->s.groups : rm_min64(c->s.groups, 1);
  for (int64_t group = 0; group < n; group++) {
    c->self->table->pack(&c->ctx, &a);
    a.src = (const char *)a.src + of_src;
    a.dst = (char *)a.dst + of_dst;
  }
  if (!a.found) *c->s.found = (rm_pack_found){a.digest, a.nonfinite_index, a.diff_index};
}

ARGUMENTS(pack) = {
    CHOICE(layout, RM_PACKED_UP),
    SIZE(dst_row0, 0),
    NUMBER(index0, index0, SIZE, 0, 0, MAX_INDEX),
    NUMBER(dst_first, dst_first, SIZE, 0, 0, MAX_INDEX),
    FLAG(grouped),
    FLAG(float32_out),
    {ARRAY_AT(weight, src, WEIGHT, RM_ARRAY_IN, groups, rows, cols), .adjust = pack_weight},
    STEP(pack_sizes),
    ADJUSTED(pack_dst, dst, OUT_T, RM_OP_OUT | RM_OP_ZERO | RM_ARRAY_PACKED, elems),
    STEP(pack_check),
    OUT(found, I64, three),
    LIMIT(max_rows, rows),
    LIMIT(max_k, cols),
};

const rm_op rm_ops_pack[] = {OP_OF_F32(pack), {0}};
