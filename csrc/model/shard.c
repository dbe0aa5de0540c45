// shard.c: see shard.h. Each function fills two lists of blocks and makes one exchange.
#include "model/shard.h"

#include "base/memory.h"

rm_code rm_shard_create(const rm_spec *spec, const rm_rank *rank, rm_dtype dtype, rm_shard *out,
                        rm_error *err) {
  const rm_coords at = rm_mesh_coords(&rank->mesh, rank->index);
  const size_t size = (size_t)rank->mesh.tp;
  *out = (rm_shard){.comm = size < 2          ? NULL
                            : rank->device_tp ? rank->device_tp
                                              : rank->tp,
                    .size = (int)size,
                    .me = at.tp,
                    .elem = rm_dtype_bytes(dtype)};
  out->widths[RM_CUT_HEADS] = spec->n_heads * spec->head_dim;
  out->widths[RM_CUT_HIDDEN] = spec->hidden_size;
  out->widths[RM_CUT_INNER] = spec->intermediate_size;
  out->widths[RM_CUT_SHARED_INNER] = spec->shared_intermediate_size;
  const int64_t words = (int64_t)(sizeof(float) / out->elem);
  out->widths[RM_CUT_Q_SQUARES] = spec->n_heads * words;
  out->widths[RM_CUT_K_SQUARES] = spec->n_kv_heads * words;
  out->widths[RM_CUT_EXPERT_INNER] = spec->moe_intermediate_size;
  out->send = rm_alloc(size, 2 * sizeof *out->send);
  out->vocab = rm_alloc(size, (RM_N_CUT + 1) * sizeof *out->vocab);
  if (!out->send || !out->vocab) {
    rm_shard_destroy(out);
    return rm_fail(err, RM_E_MEMORY, "no memory for the shards of %zu ranks", size);
  }
  out->recv = out->send + size;
  for (int cut = 0; cut < RM_N_CUT; cut++) out->cuts[cut] = out->vocab + (size_t)(cut + 1) * size;
  for (int32_t r = 0; r < (int32_t)size; r++) {
    const rm_placement p = rm_placement_of(spec, &rank->mesh, rm_mesh_rank(&rank->mesh, at.dp, r));
    out->cuts[RM_CUT_HEADS][r] =
        (rm_range){p.heads.first * spec->head_dim, p.heads.n * spec->head_dim};
    out->cuts[RM_CUT_HIDDEN][r] = p.hidden;
    out->cuts[RM_CUT_INNER][r] = p.inner;
    out->cuts[RM_CUT_SHARED_INNER][r] = p.shared_inner;
    const rm_range kv = rm_placement_new_kv_heads(spec, &p);
    out->cuts[RM_CUT_Q_SQUARES][r] = (rm_range){p.heads.first * words, p.heads.n * words};
    out->cuts[RM_CUT_K_SQUARES][r] = (rm_range){kv.first * words, kv.n * words};
    out->cuts[RM_CUT_EXPERT_INNER][r] = p.expert_inner;
    out->vocab[r] = p.vocab;
  }
  return RM_OK;
}

void rm_shard_destroy(rm_shard *shard) {
  rm_free(shard->send);
  rm_free(shard->vocab);
  shard->send = NULL;
  shard->vocab = NULL;
}

// Returns columns [cut.first, cut.first + cut.n) of rows [rows.first, …) of a matrix with `ld`
// elements in a row.
static rm_block block(const rm_shard *shard, const void *matrix, int64_t ld, rm_range rows,
                      rm_range cut) {
  return (rm_block){.base = (char *)matrix + (size_t)(rows.first * ld + cut.first) * shard->elem,
                    .rows = rows.n,
                    .row_bytes = (size_t)cut.n * shard->elem,
                    .ld = (size_t)ld * shard->elem};
}

rm_code rm_shard_gather_part(rm_shard *shard, rm_cut cut, const void *part, int64_t ld, void *whole,
                             int64_t rows, rm_error *err) {
  const rm_range mine = shard->cuts[cut][shard->me], all = {0, rows};
  if (!shard->comm) return RM_OK; // the caller reads `part` instead
  for (int r = 0; r < shard->size; r++) {
    shard->send[r] = block(shard, part, ld, all, (rm_range){0, mine.n});
    shard->recv[r] = block(shard, whole, shard->widths[cut], all, shard->cuts[cut][r]);
  }
  return rm_comm_exchange(shard->comm, RM_COMM_GATHER, shard->send, shard->recv, err);
}

rm_code rm_shard_gather_columns(rm_shard *shard, rm_cut cut, void *whole, int64_t rows,
                                rm_error *err) {
  const int64_t width = shard->widths[cut];
  const rm_range all = {0, rows};
  if (!shard->comm) return RM_OK;
  for (int r = 0; r < shard->size; r++) {
    shard->send[r] = block(shard, whole, width, all, shard->cuts[cut][shard->me]);
    shard->recv[r] = block(shard, whole, width, all, shard->cuts[cut][r]);
  }
  return rm_comm_exchange(shard->comm, RM_COMM_GATHER, shard->send, shard->recv, err);
}

rm_code rm_shard_columns_to_rows(rm_shard *shard, rm_cut cut, const void *columns, int64_t ld,
                                 void *home, int64_t rows, rm_error *err) {
  const rm_range mine = shard->cuts[cut][shard->me], here = {0, rm_shard_home(shard, rows).n};
  if (!shard->comm) return RM_OK;
  for (int r = 0; r < shard->size; r++) {
    shard->send[r] =
        block(shard, columns, ld, rm_shard_rows(shard, rows, r), (rm_range){0, mine.n});
    shard->recv[r] = block(shard, home, shard->widths[cut], here, shard->cuts[cut][r]);
  }
  return rm_comm_exchange(shard->comm, RM_COMM_ALL_TO_ALL, shard->send, shard->recv, err);
}

rm_code rm_shard_gather_rows(rm_shard *shard, void *whole, int64_t rows, size_t bytes,
                             rm_error *err) {
  if (!shard->comm) return RM_OK;
  for (int r = 0; r < shard->size; r++) {
    const rm_range run = rm_shard_rows(shard, rows, r), home = rm_shard_home(shard, rows);
    shard->send[r] = (rm_block){(char *)whole + (size_t)home.first * bytes, home.n, bytes, bytes};
    shard->recv[r] = (rm_block){(char *)whole + (size_t)run.first * bytes, run.n, bytes, bytes};
  }
  return rm_comm_exchange(shard->comm, RM_COMM_GATHER, shard->send, shard->recv, err);
}

rm_code rm_shard_gather_counted(rm_shard *shard, const void *mine, void *out, const int64_t *counts,
                                size_t bytes, rm_error *err) {
  char *at = out;
  for (int r = 0; r < shard->size; at += (size_t)counts[r++] * bytes) {
    shard->send[r] = (rm_block){(void *)mine, counts[shard->me], bytes, bytes};
    shard->recv[r] = (rm_block){at, counts[r], bytes, bytes};
  }
  return rm_comm_exchange(shard->comm, RM_COMM_GATHER, shard->send, shard->recv, err);
}
