// units.c: see units.h. Which thread makes which unit does not matter: a digest is a sum, and every unit has results of its own.
#include "weights/units.h"

#include <stdatomic.h>
#include <string.h>

#include "base/memory.h"
#include "weights/check.h"

enum {
  UNIT_ELEMENTS = 1 << 17,      // some 20 µs of memory
  MAX_UNITS = 64,               // of one copy
  SERIAL_ELEMENTS = 1 << 16,    // below this waking threads costs more than it saves
};

static rm_code make_room(rm_units *units, int64_t n, rm_error *err) {
  if (units->n + n <= units->capacity) return RM_OK;
  const int64_t capacity = rm_max64(2 * units->capacity, units->n + n);
  rm_unit *list = rm_realloc(units->list, (size_t)capacity, sizeof *list);
  if (!list) return rm_fail(err, RM_E_MEMORY, "no memory for a list of %lld copies", (long long)capacity);
  units->list = list;
  units->capacity = capacity;
  return RM_OK;
}

// Rows [begin, begin + n) of it.
static rm_unit cut(const rm_unit *whole, int64_t begin, int64_t n) {
  rm_unit unit = *whole;
  unit.args.src = (const char *)whole->args.src + begin * whole->args.row_stride * (int64_t)rm_src_bytes(whole->args.src_dtype);
  unit.args.rows = n;
  unit.args.dst_row0 += begin;
  unit.args.index0 += begin * whole->args.cols;
  return unit;
}

rm_code rm_units_add(rm_units *units, const rm_unit *whole, rm_error *err) {
  const rm_pack_args *args = &whole->args;
  const int64_t at_least = rm_max64(UNIT_ELEMENTS / args->cols, args->rows / MAX_UNITS + 1);
  const int64_t tile = args->layout == RM_PLAIN ? 1 : RM_N_TILE, rows = rm_round_up(at_least, RM_N_TILE);
  const rm_code code = make_room(units, args->rows / rows + 2, err);
  if (code) return code;
  for (int64_t begin = 0, n; begin < args->rows; begin += n) {
    n = rm_min64(rows - (args->dst_row0 + begin) % tile, args->rows - begin);   // a unit ends where a tile ends
    units->list[units->n++] = cut(whole, begin, n);
  }
  return RM_OK;
}

typedef struct making {
  const rm_units *units;
  const rm_kernels *kernels;
  _Atomic int64_t next;
} making;

static void make_some(void *arg, int thread, int n_threads) {
  making *work = arg;
  const rm_ctx alone = {.n_threads = 1};
  (void)thread, (void)n_threads;
  for (int64_t i; (i = atomic_fetch_add(&work->next, 1)) < work->units->n;) work->kernels->pack(&alone, &work->units->list[i].args);
}

void rm_units_make(const rm_units *units, const rm_kernels *kernels, const rm_ctx *ctx) {
  making work = {.units = units, .kernels = kernels};
  int64_t elements = 0;
  for (int64_t i = 0; i < units->n && elements < SERIAL_ELEMENTS; i++) elements += units->list[i].args.rows * units->list[i].args.cols;
  if (ctx->n_threads > 1 && elements >= SERIAL_ELEMENTS) ctx->run(ctx->team, make_some, &work);
  else make_some(&work, 0, 1);
}

void rm_units_free(rm_units *units) {
  rm_free(units->list);
  *units = (rm_units){0};
}

typedef struct block_job {
  char *to;
  const char *from;
  size_t bytes;
} block_job;

static void copy_some(void *arg, int thread, int n_threads) {
  const block_job *job = arg;
  const size_t part = (job->bytes / (size_t)n_threads + 63) / 64 * 64, start = part * (size_t)thread;
  if (start >= job->bytes) return;
  memcpy(job->to + start, job->from + start, part < job->bytes - start ? part : job->bytes - start);
}

void rm_copy_block(char *to, const char *from, size_t bytes, const rm_ctx *ctx) {
  block_job job = {to, from, bytes};
  ctx->run(ctx->team, copy_some, &job);
}
