// static_dispatch.c: the static form of the block. Every exchange has the worst-case size for the
// step's number of rows, independent of the chosen experts. So ranks need not exchange counts, the
// host is not involved, and a step can be captured and replayed with other choices. The cost: a
// rank returns min(top_k, local experts) outputs for each row, whether they were chosen or not.
// With the staged transport only steps of few rows use it (rm_model_options.static_rows); with NCCL
// it costs less than a wait for the host in every layer.
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

rm_code rm_moe_static_create(rm_moe *moe, const rm_mesh *mesh, int64_t static_rows, rm_error *err) {
  rm_moe_static *fixed = &moe->fixed;
  const int for_all = static_rows > 0 && rm_comm_can_be_captured(moe->ep);
  fixed->mesh = *mesh;
  fixed->most_rows = for_all ? INT64_MAX : rm_min64(static_rows, moe->max_rows);
  fixed->rows =
      rm_static_run_rows(moe->spec, mesh, moe->dtype, rm_min64(fixed->most_rows, moe->max_rows));
  if (for_all) moe->max_rows = fixed->rows;
  if (!fixed->rows || moe->dispatcher == RM_DISPATCH_LOCAL_ALLREDUCE) return RM_OK;
  const rm_static_sizes most = rm_static_sizes_of(moe->spec, mesh, moe->dtype, fixed->rows);
  const size_t bytes = (size_t)(most.home_rows * moe->spec->top_k) * ID_BYTES;
  const rm_code code = rm_mirrored_create(moe->device, bytes, "ids of no rows", &fixed->none, err);
  if (code) return code;
  memset(fixed->none.host, 0xff, bytes);
  rm_mirrored_copy_to_device(&fixed->none, fixed->none.host, bytes);
  return RM_OK;
}

void rm_moe_static_fields(rm_moe *moe, rm_field fields[RM_STATIC_FIELDS]) {
  rm_moe_static *fixed = &moe->fixed;
  const rm_static_sizes most = rm_moe_static_most(moe);
  const size_t row = rm_moe_row_bytes(moe), dispatches = moe->dispatches != 0,
               homes = dispatches ? (size_t)fixed->mesh.ep : 1;
  const size_t rows = !fixed->rows ? 0
                      : dispatches ? (size_t)most.pitch
                                   : (size_t)fixed->rows,
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
// expert ids. Writes the outputs to `back`, [homes][pitch][each].
static void compute(rm_moe *moe, const rm_ctx *ctx, const rm_layer_params *layer,
                    const char *weights, const char *x, const rm_static_dispatch_args *slots) {
  rm_moe_static *here = &moe->fixed;
  const int64_t each = rm_max_choices(slots->top_k, slots->experts_each),
                rows = slots->homes * slots->pitch;
  const int64_t most = slots->homes * slots->home_rows * each;
  const rm_permute_args permute = {.x_out = moe->sorted,
                                   .group_rows = here->group_rows,
                                   .place = here->from,
                                   .x = x,
                                   .ids = here->own,
                                   .rows = rows,
                                   .hidden = moe->spec->hidden_size,
                                   .n_experts = slots->experts_each,
                                   .top_k = each,
                                   .dtype = moe->dtype};
  const rm_gather_rows_args gather = {here->back, moe->sorted, here->from, rows * each,
                                      rm_moe_row_bytes(moe)};
  rm_gemm_args up = rm_moe_up(moe, layer, weights, here->group_rows, most),
               down = rm_moe_down(moe, layer, weights, here->group_rows, most);
  if (!most) return;
  up.x = down.y = moe->sorted;
  up.y = moe->inner;
  down.x = moe->inner;
  moe->kernels->static_dispatch(ctx, slots);
  moe->kernels->permute(ctx, &permute);
  moe->kernels->gemm_swiglu(ctx, &up);
  moe->kernels->gemm(ctx, &down);
  moe->kernels->gather_rows(ctx, &gather);
}

static rm_static_dispatch_args slots_of(const rm_moe *moe, const int32_t *ids, int64_t homes,
                                        int64_t home_rows, int64_t pitch, int64_t ids_pitch) {
  return (rm_static_dispatch_args){.place = moe->place,
                                   .own = moe->fixed.own,
                                   .ids = ids,
                                   .homes = homes,
                                   .home_rows = home_rows,
                                   .pitch = pitch,
                                   .ids_pitch = ids_pitch,
                                   .top_k = moe->spec->top_k,
                                   .experts_each = moe->here->experts.n,
                                   .rank = rm_comm_rank(moe->ep)};
}

rm_code rm_moe_static_replicated(rm_moe *moe, const rm_ctx *ctx, const rm_shard *shard,
                                 const rm_layer_params *layer, const char *weights, const char *x,
                                 int64_t rows, rm_error *err) {
  const rm_range *columns = shard->cuts[RM_CUT_HIDDEN];
  const size_t row = rm_moe_row_bytes(moe), mine = (size_t)columns[shard->me].n * shard->elem;
  const rm_static_dispatch_args slots =
      slots_of(moe, moe->ids, 1, rows, rows, rows * moe->spec->top_k);
  const int64_t n = rows * rm_max_choices(slots.top_k, slots.experts_each);
  compute(moe, ctx, layer, weights, x, &slots);
  for (int r = 0; r < shard->size; r++) {
    moe->send[r] = (rm_block){moe->fixed.back + (size_t)columns[r].first * shard->elem, n,
                              (size_t)columns[r].n * shard->elem, row};
    moe->recv[r] = (rm_block){moe->part + (size_t)(r * n) * mine, n, mine, mine};
  }
  return rm_comm_exchange(moe->ep, RM_COMM_COMBINE, moe->send, moe->recv, err);
}

// All-gathers each rank's rows and ids in `all`.
static rm_code gather_homes(rm_moe *moe, int64_t pitch, rm_error *err) {
  const size_t row = rm_moe_row_bytes(moe), bytes = (size_t)pitch * row;
  char *mine = moe->fixed.all + (size_t)rm_comm_rank(moe->ep) * bytes;
  for (int r = 0; r < rm_comm_size(moe->ep); r++) {
    moe->send[r] = (rm_block){mine, pitch, row, row};
    moe->recv[r] = (rm_block){moe->fixed.all + (size_t)r * bytes, pitch, row, row};
  }
  return rm_comm_exchange(moe->ep, RM_COMM_GATHER, moe->send, moe->recv, err);
}

// Sends each rank the outputs of its rows, into `sorted`, whose inputs are free by now.
static rm_code return_outputs(rm_moe *moe, rm_static_sizes sizes, rm_error *err) {
  const size_t row = rm_moe_row_bytes(moe);
  const int64_t n = sizes.home_rows * sizes.each;
  for (int r = 0; r < rm_comm_size(moe->ep); r++) {
    moe->send[r] =
        (rm_block){moe->fixed.back + (size_t)(r * sizes.pitch * sizes.each) * row, n, row, row};
    moe->recv[r] = (rm_block){moe->sorted + (size_t)(r * n) * row, n, row, row};
  }
  return rm_comm_exchange(moe->ep, RM_COMM_COMBINE, moe->send, moe->recv, err);
}

// Computes the home rows of a pass. most_home: the home rows of the rank that has most.
static rm_code dispatched_pass(rm_moe *moe, const rm_ctx *ctx, const rm_layer_params *layer,
                               const char *weights, const char *x, char *out, int64_t rows,
                               int64_t most_home, int16_t *routed, int64_t routed_stride,
                               rm_error *err) {
  const rm_static_sizes sizes =
      rm_static_sizes_of(moe->spec, &moe->fixed.mesh, moe->dtype, most_home * moe->fixed.mesh.tp);
  const int64_t top_k = moe->spec->top_k, me = rm_comm_rank(moe->ep),
                empty = sizes.home_rows - rows;
  const size_t row = rm_moe_row_bytes(moe), ids_at = (size_t)sizes.home_rows * row;
  char *mine = moe->fixed.all + (size_t)(me * sizes.pitch) * row;
  int32_t *ids = (int32_t *)(mine + ids_at);
  rm_code code;
  rm_moe_route(moe, ctx, layer, weights, x, ids, rows, routed, routed_stride);
  rm_device_copy(moe->device, mine, x, (size_t)rows * row);
  rm_device_copy(moe->device, ids + rows * top_k, moe->fixed.none.on_device,
                 (size_t)(empty * top_k) * ID_BYTES);
  if ((code = gather_homes(moe, sizes.pitch, err))) return code;
  const rm_static_dispatch_args slots =
      slots_of(moe, (const int32_t *)(moe->fixed.all + ids_at), moe->fixed.mesh.ep, sizes.home_rows,
               sizes.pitch, sizes.pitch * (int64_t)row / ID_BYTES);
  compute(moe, ctx, layer, weights, moe->fixed.all, &slots);
  if ((code = return_outputs(moe, sizes, err))) return code;
  rm_moe_combine(moe, ctx, out, moe->sorted, ids, moe->place + me * sizes.home_rows * top_k,
                 moe->spec->hidden_size, rows);
  return RM_OK;
}

rm_code rm_moe_static_dispatched(rm_moe *moe, const rm_ctx *ctx, const rm_layer_params *layer,
                                 const char *weights, const char *x, char *out, int64_t rows,
                                 int64_t most_rows, int16_t *routed, int64_t routed_stride,
                                 rm_error *err) {
  const int64_t tp = moe->fixed.mesh.tp, most_home = (most_rows + tp - 1) / tp,
                each = (moe->fixed.rows + tp - 1) / tp;
  const size_t row = rm_moe_row_bytes(moe);
  rm_code code = RM_OK;
  for (int64_t first = 0; first < most_home && !code; first += each) {
    const int64_t mine = rm_min64(first, rows); // a rank without more rows takes part with none
    code =
        dispatched_pass(moe, ctx, layer, weights, x + (size_t)mine * row, out + (size_t)mine * row,
                        rm_min64(rows - mine, each), rm_min64(most_home - first, each),
                        routed + mine * routed_stride, routed_stride, err);
  }
  return code;
}
