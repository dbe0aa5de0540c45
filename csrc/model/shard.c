// shard.c: see shard.h. Each function fills a list of blocks and makes one exchange.
#include "model/shard.h"

#include "base/memory.h"

rm_code rm_shard_create(const rm_spec *spec, const rm_rank *rank, rm_dtype dtype, rm_shard *out,
                        rm_error *err) {
  const rm_coords at = rm_mesh_coords(&rank->mesh, rank->index);
  const int size = rank->mesh.tp;
  *out = (rm_shard){.comm = size < 2          ? NULL
                            : rank->device_tp ? rank->device_tp
                                              : rank->tp,
                    .size = size,
                    .me = at.tp,
                    .elem = rm_dtype_bytes(dtype),
                    .whole = rm_placement_whole(spec)};
  out->placements = rm_alloc((size_t)size, sizeof *out->placements);
  if (!out->placements) return rm_no_memory(err, "the shards of a tp group", 0);
  for (int r = 0; r < size; r++)
    out->placements[r] =
        rm_placement_of(spec, &rank->mesh, rm_mesh_rank(&rank->mesh, at.dp, (int32_t)r));
  return RM_OK;
}

void rm_shard_destroy(rm_shard *shard) {
  rm_free(shard->placements);
  shard->placements = NULL;
}

// Returns `columns` of `rows` of a matrix with `ld` elements in a row.
static rm_block block(const void *matrix, size_t elem, int64_t ld, rm_range rows,
                      rm_range columns) {
  return (rm_block){.base = (char *)matrix + (size_t)(rows.first * ld + columns.first) * elem,
                    .rows = rows.n,
                    .row_bytes = (size_t)columns.n * elem,
                    .ld = (size_t)ld * elem};
}

rm_code rm_shard_gather_part(rm_shard *shard, rm_dim dim, size_t elem, const void *part, int64_t ld,
                             void *whole, int64_t rows, rm_error *err) {
  const rm_range all = {0, rows};
  if (!shard->comm) return RM_OK; // the caller reads `part` instead
  rm_block *recv = rm_comm_blocks(shard->comm) + shard->size;
  for (int r = 0; r < shard->size; r++)
    recv[r] = block(whole, elem, rm_shard_width(shard, dim), all, rm_shard_columns(shard, dim, r));
  const rm_range mine = {0, rm_shard_columns(shard, dim, shard->me).n};
  return rm_comm_gather(shard->comm, block(part, elem, ld, all, mine), recv, err);
}

rm_code rm_shard_gather_columns(rm_shard *shard, rm_dim dim, void *whole, int64_t rows,
                                rm_error *err) {
  if (!shard->comm) return RM_OK;
  const int64_t width = rm_shard_width(shard, dim);
  const char *mine =
      (char *)whole + (size_t)rm_shard_columns(shard, dim, shard->me).first * shard->elem;
  return rm_shard_gather_part(shard, dim, shard->elem, mine, width, whole, rows, err);
}

rm_code rm_shard_columns_to_rows(rm_shard *shard, rm_dim dim, const void *whole, void *home,
                                 int64_t rows, rm_error *err) {
  if (!shard->comm) return RM_OK;
  const int64_t width = rm_shard_width(shard, dim);
  const rm_range here = {0, rm_shard_home(shard, rows).n};
  rm_block *send = rm_comm_blocks(shard->comm), *recv = send + shard->size;
  for (int r = 0; r < shard->size; r++) {
    send[r] = block(whole, shard->elem, width, rm_shard_rows(shard, rows, r),
                    rm_shard_columns(shard, dim, shard->me));
    recv[r] = block(home, shard->elem, width, here, rm_shard_columns(shard, dim, r));
  }
  return rm_comm_exchange(shard->comm, RM_COMM_ALL_TO_ALL, send, recv, err);
}

rm_code rm_shard_gather_rows(rm_shard *shard, void *whole, int64_t rows, size_t bytes,
                             rm_error *err) {
  int64_t counts[RM_MAX_TP];
  if (!shard->comm) return RM_OK;
  for (int r = 0; r < shard->size; r++) counts[r] = rm_shard_rows(shard, rows, r).n;
  return rm_comm_gather_rows(shard->comm, NULL, whole, counts, bytes, err);
}
