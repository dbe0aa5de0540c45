// static_dispatch.c: the static form of the block. Every exchange has the worst-case size for the
// step's number of rows, independent of the chosen experts. So ranks need not exchange counts, the
// host is not involved, and a step can be captured and replayed with other choices. The cost: a
// rank returns min(top_k, local experts) outputs for each row, whether they were chosen or not.
// With NCCL this costs less than a wait for the host in every layer.
//
//   dispatched   all ranks' rows and expert ids are all-gathered; each rank computes the rows for
//                its experts and returns the outputs
//   replicated   all ranks have all rows; columns of the outputs go to all ranks
//
// Rank r returns max_choices = min(top_k, local experts) outputs for each row; the i-th is the
// output of the row's i-th choice among r's experts. Both sides derive this from the same ids;
// unused outputs are not read. Rows are all-gathered for every dispatcher: with worst-case sizes,
// all-to-all by rank sends as much, and by choice top_k times more.
#include "model/moe/moe.h"

enum { ID_BYTES = sizeof(int32_t) };

// The expert ids of a rank's rows follow the rows. Returns their size, in rows.
static int64_t ids_rows(const rm_spec *spec, size_t row, int64_t home_rows) {
  const int64_t bytes = home_rows * spec->top_k * ID_BYTES;
  return (bytes + (int64_t)row - 1) / (int64_t)row;
}

// Rounds up to an even number of rows where a row's bytes are not a multiple of an id's.
static int64_t whole(size_t row, int64_t rows) { return rm_round_up(rows, row % ID_BYTES ? 2 : 1); }

rm_static_sizes rm_static_sizes_of(const rm_spec *spec, const rm_mesh *mesh, rm_dtype dtype,
                                   int64_t rows) {
  const size_t row = (size_t)spec->hidden_size * rm_dtype_bytes(dtype);
  const int64_t home_rows = whole(row, (rows + mesh->tp - 1) / mesh->tp);
  return (rm_static_sizes){.home_rows = home_rows,
                           .pitch = whole(row, home_rows + ids_rows(spec, row, home_rows)),
                           .each = rm_max_choices(spec->top_k, spec->n_experts / mesh->ep)};
}

size_t rm_static_exchanged(const rm_spec *spec, const rm_mesh *mesh, rm_dtype dtype, int64_t rows) {
  const rm_static_sizes sizes = rm_static_sizes_of(spec, mesh, dtype, rows);
  const int64_t units = (spec->hidden_size + RM_SHARD_WIDTH - 1) / RM_SHARD_WIDTH,
                columns = (units + mesh->tp - 1) / mesh->tp;
  const int64_t travel = rm_max64(sizes.pitch, sizes.home_rows * sizes.each) * spec->hidden_size;
  const int64_t stay =
      rows * sizes.each *
      rm_max64(columns * RM_SHARD_WIDTH, (spec->hidden_size + mesh->ep - 1) / mesh->ep);
  return (size_t)(mesh->ep * rm_max64(travel, stay)) * rm_dtype_bytes(dtype);
}

int64_t rm_static_run_rows(const rm_spec *spec, const rm_mesh *mesh, rm_dtype dtype, int64_t rows) {
  int64_t least = 1, most = rm_min64(rows, (int64_t)RM_STATIC_ROWS * mesh->tp);
  while (least < most) {
    const int64_t half = least + (most - least + 1) / 2;
    if (rm_static_exchanged(spec, mesh, dtype, half) <= RM_STATIC_BYTES) least = half;
    else most = half - 1;
  }
  return rm_min64(least, rows);
}

rm_static_sizes rm_moe_static_most(const rm_moe *moe) {
  return moe->is_static ? rm_static_sizes_of(moe->spec, &moe->rank->mesh, moe->dtype, moe->max_rows)
                        : (rm_static_sizes){0};
}

rm_code rm_moe_static_create(rm_moe *moe, rm_error *err) {
  rm_moe_static *fixed = &moe->fixed;
  moe->max_rows = rm_static_run_rows(moe->spec, &moe->rank->mesh, moe->dtype, moe->max_rows);
  if (!moe->dispatches) return RM_OK;
  const rm_static_sizes most = rm_moe_static_most(moe);
  const size_t bytes = (size_t)(most.home_rows * moe->spec->top_k) * ID_BYTES;
  RM_TRY(rm_mirrored_create(moe->device, bytes, "ids of no rows", &fixed->none, err));
  memset(fixed->none.host, 0xff, bytes);
  rm_mirrored_copy_to_device(&fixed->none, fixed->none.host, bytes);
  return RM_OK;
}

void rm_moe_static_fields(rm_moe *moe, rm_field fields[RM_STATIC_FIELDS]) {
  rm_moe_static *fixed = &moe->fixed;
  const rm_static_sizes most = rm_moe_static_most(moe);
  const size_t row = rm_moe_row_bytes(moe), dispatches = moe->dispatches != 0,
               homes = dispatches ? (size_t)moe->rank->mesh.ep : 1;
  const size_t rows = (size_t)(dispatches || !moe->is_static ? most.pitch : moe->max_rows),
               n = homes * rows * (size_t)most.each;
  const rm_field list[RM_STATIC_FIELDS] = {
      {&fixed->all, dispatches ? homes * rows : 0, row},
      {&fixed->own, n, ID_BYTES},
      {&fixed->from, n, ID_BYTES},
      {&fixed->group_rows, rows ? (size_t)moe->here->experts.n + 1 : 0, ID_BYTES},
      {&fixed->back, n, row},
  };
  memcpy(fields, list, sizeof list);
}

// Computes the experts of x: [homes][pitch] rows, of which the first home_rows of each rank have
// expert ids; those of two ranks are ids_pitch apart. Writes the outputs to `back`,
// [homes][pitch][each].
static rm_code compute(rm_moe *moe, const rm_moe_rows *at, const char *x, const int32_t *ids,
                       int64_t homes, int64_t home_rows, int64_t pitch, int64_t ids_pitch,
                       rm_error *err) {
  rm_moe_static *fixed = &moe->fixed;
  const int64_t experts = moe->here->experts.n, each = rm_max_choices(moe->spec->top_k, experts),
                rows = homes * pitch, most = homes * home_rows * each;
  const rm_static_dispatch_args slots = {.place = moe->place,
                                         .own = fixed->own,
                                         .ids = ids,
                                         .homes = homes,
                                         .home_rows = home_rows,
                                         .pitch = pitch,
                                         .ids_pitch = ids_pitch,
                                         .top_k = moe->spec->top_k,
                                         .experts_each = experts,
                                         .rank = rm_comm_rank(moe->ep)};
  const rm_permute_args permute = {.x_out = moe->sorted,
                                   .group_rows = fixed->group_rows,
                                   .place = fixed->from,
                                   .x = x,
                                   .ids = fixed->own,
                                   .rows = rows,
                                   .hidden = moe->spec->hidden_size,
                                   .n_experts = experts,
                                   .top_k = each,
                                   .dtype = moe->dtype};
  const rm_gather_rows_args gather = {fixed->back, moe->sorted, fixed->from, rows * each,
                                      rm_moe_row_bytes(moe)};
  if (!most) return RM_OK;
  moe->kernels->static_dispatch(moe->ctx, &slots);
  moe->kernels->permute(moe->ctx, &permute);
  const rm_code code =
      rm_moe_experts(moe, at, fixed->group_rows, most, moe->sorted, moe->sorted, err);
  moe->kernels->gather_rows(moe->ctx, &gather);
  return code;
}

rm_code rm_moe_static_replicated(rm_moe *moe, const rm_moe_rows *at, rm_error *err) {
  const int64_t top_k = moe->spec->top_k, each = rm_max_choices(top_k, moe->here->experts.n);
  int64_t counts[RM_MAX_TP];
  for (int r = 0; r < moe->shard->size; r++) counts[r] = at->rows * each;
  RM_TRY(compute(moe, at, at->x, moe->ids, 1, at->rows, at->rows, at->rows * top_k, err));
  return rm_moe_exchange_columns(moe, moe->fixed.back, counts, err);
}

// Sends each rank the outputs of its rows, into `sorted`, whose inputs are free by now.
static rm_code return_outputs(rm_moe *moe, rm_static_sizes sizes, rm_error *err) {
  const size_t row = rm_moe_row_bytes(moe);
  const int64_t n = sizes.home_rows * sizes.each;
  rm_block *send = rm_comm_blocks(moe->ep), *recv = send + rm_comm_size(moe->ep);
  for (int r = 0; r < rm_comm_size(moe->ep); r++) {
    send[r] =
        (rm_block){moe->fixed.back + (size_t)(r * sizes.pitch * sizes.each) * row, n, row, row};
    recv[r] = (rm_block){moe->sorted + (size_t)(r * n) * row, n, row, row};
  }
  return rm_comm_exchange(moe->ep, RM_COMM_COMBINE, send, recv, err);
}

rm_code rm_moe_static_dispatched(rm_moe *moe, const rm_moe_rows *at, rm_error *err) {
  const rm_mesh *mesh = &moe->rank->mesh;
  const rm_static_sizes sizes =
      rm_static_sizes_of(moe->spec, mesh, moe->dtype, at->most * mesh->tp);
  const int64_t top_k = moe->spec->top_k, me = rm_comm_rank(moe->ep),
                empty = sizes.home_rows - at->rows;
  const size_t row = rm_moe_row_bytes(moe), ids_at = (size_t)sizes.home_rows * row;
  char *mine = moe->fixed.all + (size_t)(me * sizes.pitch) * row;
  int32_t *ids = (int32_t *)(mine + ids_at);
  rm_moe_route(moe, at, ids);
  rm_device_copy(moe->device, mine, at->x, (size_t)at->rows * row);
  rm_device_copy(moe->device, ids + at->rows * top_k, moe->fixed.none.on_device,
                 (size_t)(empty * top_k) * ID_BYTES);
  RM_TRY(rm_comm_all_gather(moe->ep, mine, moe->fixed.all, (size_t)sizes.pitch * row, err));
  RM_TRY(compute(moe, at, moe->fixed.all, (const int32_t *)(moe->fixed.all + ids_at), mesh->ep,
                 sizes.home_rows, sizes.pitch, sizes.pitch * (int64_t)row / ID_BYTES, err));
  RM_TRY(return_outputs(moe, sizes, err));
  rm_moe_combine(moe, at->out, moe->sorted, ids, moe->place + me * sizes.home_rows * top_k,
                 moe->spec->hidden_size, at->rows);
  return RM_OK;
}
