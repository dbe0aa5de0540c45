// moe.c: see moe.h. Rows are sorted by expert, so that each chosen expert is one gemm, which reads
// its weights once per batch.
#include "model/moe/moe.h"

// --------------------------------------------------------------------------------------- creation
rm_code rm_moe_create(rm_moe *moe, const rm_params *params, const rm_device *device,
                      const rm_rank *rank, rm_shard *shard, const rm_ctx *ctx, int64_t max_rows,
                      rm_error *err) {
  const rm_mesh *mesh = &rank->mesh;
  const rm_peers peers = rm_mesh_peers(mesh, rank->index, RM_AXIS_EP);
  *moe = (rm_moe){.params = params,
                  .spec = params->spec,
                  .here = &params->placement,
                  .device = device,
                  .kernels = device->kernels,
                  .rank = rank,
                  .shard = shard,
                  .ctx = ctx,
                  .dtype = params->dtype,
                  .max_rows = max_rows};
  if (mesh->ep == 1) return RM_OK;
  moe->dispatches = rank->dispatcher != RM_DISPATCH_LOCAL_ALLREDUCE;
  moe->ep = rank->device_ep ? rank->device_ep : rank->ep;
  moe->experts = rm_alloc((size_t)mesh->ep, sizeof *moe->experts);
  if (!moe->experts) return rm_no_memory(err, "the experts of an ep group", 0);
  for (int32_t i = 0; i < peers.count; i++)
    moe->experts[i] = rm_placement_of(params->spec, mesh, peers.first + i * peers.step).experts;
  moe->is_static = !device->on_host;
  if (moe->is_static) return rm_moe_static_create(moe, err);
  if (!moe->dispatches) return RM_OK;
  return rm_dispatch_create(moe, (max_rows + mesh->tp - 1) / mesh->tp, &moe->dispatch, err);
}

void rm_moe_destroy(rm_moe *moe) {
  rm_mirrored_destroy(&moe->fixed.none);
  rm_unmap(moe->dispatch.block, moe->dispatch.block_bytes);
  rm_free(moe->experts);
}

size_t rm_moe_bytes(const rm_moe *moe) { return moe->fixed.none.bytes + moe->dispatch.block_bytes; }

size_t rm_moe_fields(rm_moe *moe, rm_field fields[RM_MOE_FIELDS]) {
  const rm_spec *spec = moe->spec;
  const int dispatches = moe->dispatches, cut = moe->rank->mesh.tp > 1 && !dispatches;
  const rm_static_sizes most = rm_moe_static_most(moe);
  const size_t choices = (size_t)(moe->max_rows * spec->top_k), elem = rm_dtype_bytes(moe->dtype),
               ep = (size_t)moe->rank->mesh.ep;
  const size_t homes = ep * (size_t)most.home_rows, slots = homes * (size_t)most.each,
               in_part = ep * (size_t)(moe->max_rows * most.each);
  const size_t arrive = dispatches ? (size_t)moe->dispatch.max_arrive : choices;
  const rm_field list[RM_MOE_FIELDS - RM_STATIC_FIELDS] = {
      RM_FIELD(moe->ids, choices),
      RM_FIELD(moe->gates, choices),
      RM_FIELD(moe->group_rows, spec->n_experts + 1),
      {&moe->inner, arrive > slots ? arrive : slots, (size_t)spec->moe_intermediate_size * elem},
      RM_FIELD(moe->place, dispatches ? homes * (size_t)spec->top_k : choices),
      {&moe->sorted, dispatches ? slots : choices, (size_t)spec->hidden_size * elem},
      {&moe->part,
       !cut                ? 0
       : choices > in_part ? choices
                           : in_part,
       (size_t)rm_max64(moe->here->hidden.n, 1) * elem},
  };
  memcpy(fields, list, sizeof list);
  rm_moe_static_fields(moe, fields + RM_MOE_FIELDS - RM_STATIC_FIELDS);
  return RM_MOE_FIELDS;
}

// --------------------------------------------------------------------------------- the four steps
void rm_moe_route(rm_moe *moe, const rm_moe_rows *at, int32_t *ids) {
  const rm_spec *spec = moe->spec;
  const rm_router_args args = {
      .ids = ids,
      .gates = moe->gates,
      .routed = at->routed,
      .routed_stride = spec->n_moe_layers * spec->top_k,
      .x = at->x,
      .w = rm_weight(at->weights, at->layer, RM_P_ROUTER),
      .bias = (const float *)rm_weight(at->weights, at->layer, RM_P_ROUTER_BIAS),
      .rows = at->rows,
      .hidden = spec->hidden_size,
      .n_experts = spec->n_experts,
      .top_k = spec->top_k,
      .n_groups = spec->n_groups,
      .top_groups = spec->top_groups,
      .route_scale = spec->route_scale,
      .min_sum = spec->min_sum,
      .score = spec->sigmoid_scores ? RM_SCORE_SIGMOID : RM_SCORE_SOFTMAX,
      .renormalize = spec->norm_topk_prob,
      .dtype = moe->dtype,
      .logit_bias = rm_weight(at->weights, at->layer, RM_P_ROUTER_LOGIT_BIAS),
  };
  if (at->rows) moe->kernels->router(moe->ctx, &args);
}

static rm_gemm_args grouped(const rm_moe *moe, const rm_moe_rows *at, rm_param_kind kind,
                            rm_param_kind bias, const int32_t *group_rows, int64_t m) {
  const int64_t k = moe->params->whole.dims[rm_kinds[kind].cols].n;
  return (rm_gemm_args){.w = rm_weight(at->weights, at->layer, kind),
                        .bias = rm_weight(at->weights, at->layer, bias),
                        .group_rows = group_rows,
                        .n_groups = moe->here->experts.n,
                        .group_stride = at->layer->of[kind].elems / moe->here->experts.n,
                        .m = m,
                        .n = moe->params->placement.dims[rm_kinds[kind].rows].n,
                        .k = k,
                        .ldx = k,
                        .activation = moe->spec->activation,
                        .alpha = moe->spec->swiglu_alpha,
                        .limit = moe->spec->swiglu_limit,
                        .dtype = moe->dtype,
                        .y_dtype = moe->dtype};
}

rm_code rm_moe_experts(rm_moe *moe, const rm_moe_rows *at, const int32_t *group_rows, int64_t m,
                       const char *x, char *out, rm_error *err) {
  rm_gemm_args up = grouped(moe, at, RM_P_EXPERT_GATE, RM_P_EXPERT_GATE_BIAS, group_rows, m),
               down = grouped(moe, at, RM_P_EXPERT_DOWN, RM_P_EXPERT_DOWN_BIAS, group_rows, m);
  up.x = x;
  up.y = moe->inner + (size_t)moe->here->expert_inner.first * rm_dtype_bytes(moe->dtype);
  up.ldy = moe->spec->moe_intermediate_size;
  down.x = moe->inner;
  down.y = out;
  down.ldy = down.n;
  if (m && up.n) moe->kernels->gemm_swiglu(moe->ctx, &up);
  if (!moe->ep)
    RM_TRY(rm_shard_gather_columns(moe->shard, RM_DIM_EXPERT_INNER, moe->inner, m, err));
  if (m && down.n) moe->kernels->gemm(moe->ctx, &down);
  return RM_OK;
}

void rm_moe_combine(const rm_moe *moe, void *out, const void *y, const int32_t *ids,
                    const int32_t *place, int64_t hidden, int64_t rows) {
  const rm_combine_args args = {
      .out = out,
      .y = y,
      .place = place,
      .ids = ids,
      .gates = moe->gates,
      .rows = rows,
      .hidden = hidden,
      .n_experts = moe->spec->n_experts,
      .top_k = moe->spec->top_k,
      .dtype = moe->dtype,
  };
  if (rows && hidden) moe->kernels->combine(moe->ctx, &args);
}

// -------------------------------------------------------------------------------- replicated rows
static void permute(rm_moe *moe, const rm_moe_rows *at) {
  const rm_permute_args args = {
      .x_out = moe->sorted,
      .group_rows = moe->group_rows,
      .place = moe->place,
      .x = at->x,
      .ids = moe->ids,
      .rows = at->rows,
      .hidden = moe->spec->hidden_size,
      .n_experts = moe->spec->n_experts,
      .top_k = moe->spec->top_k,
      .dtype = moe->dtype,
  };
  if (at->rows) moe->kernels->permute(moe->ctx, &args);
  else
    rm_device_zero(moe->device, args.group_rows,
                   (size_t)(args.n_experts + 1) * sizeof *args.group_rows);
}

rm_code rm_moe_exchange_columns(rm_moe *moe, char *outputs, const int64_t counts[], rm_error *err) {
  const rm_shard *shard = moe->shard;
  const size_t row = rm_moe_row_bytes(moe), mine = (size_t)moe->here->hidden.n * shard->elem;
  char *part = moe->part;
  rm_block *send = rm_comm_blocks(moe->ep), *recv = send + shard->size;
  for (int r = 0; r < shard->size; part += (size_t)counts[r++] * mine) {
    const rm_range columns = rm_shard_columns(shard, RM_DIM_OUT, r);
    send[r] = (rm_block){outputs + (size_t)columns.first * shard->elem, counts[shard->me],
                         (size_t)columns.n * shard->elem, row};
    recv[r] = (rm_block){part, counts[r], mine, mine};
  }
  return rm_comm_exchange(moe->ep, RM_COMM_COMBINE, send, recv, err);
}

// Exchanges the outputs of all experts. Called on the CPU, which can read group_rows.
static rm_code exchange_outputs(rm_moe *moe, rm_error *err) {
  const int32_t *starts = moe->group_rows;
  int64_t counts[RM_MAX_TP];
  for (int r = 0; r < moe->shard->size; r++) {
    const rm_range its = moe->experts[r];
    counts[r] = starts[its.first + its.n] - starts[its.first];
  }
  const size_t first = (size_t)starts[moe->here->experts.first];
  return rm_moe_exchange_columns(moe, moe->sorted + first * rm_moe_row_bytes(moe), counts, err);
}

// Sorts the rows by expert and computes this rank's experts, or its columns of all experts. The
// outputs are in `part`, on one rank in `sorted`, whose inputs are free by then.
static rm_code counted_replicated(rm_moe *moe, const rm_moe_rows *at, rm_error *err) {
  permute(moe, at);
  RM_TRY(rm_moe_experts(moe, at, moe->group_rows + moe->here->experts.first,
                        at->rows * moe->spec->top_k, moe->sorted,
                        moe->shard->comm && !moe->ep ? moe->part : moe->sorted, err));
  return moe->ep ? exchange_outputs(moe, err) : RM_OK;
}

static rm_code replicated(rm_moe *moe, const rm_moe_rows *at, rm_error *err) {
  const rm_shard *shard = moe->shard;
  const size_t row = rm_moe_row_bytes(moe);
  rm_moe_route(moe, at, moe->ids);
  RM_TRY(moe->is_static ? rm_moe_static_replicated(moe, at, err)
                        : counted_replicated(moe, at, err));
  if (!shard->comm) {
    rm_moe_combine(moe, at->out, moe->sorted, moe->ids, moe->place, moe->spec->hidden_size,
                   at->rows);
    return RM_OK;
  }
  const rm_range mine = moe->here->hidden;
  const size_t bytes = (size_t)mine.n * shard->elem;
  rm_moe_combine(moe, moe->sorted, moe->part, moe->ids, moe->place, mine.n, at->rows);
  if (bytes)
    moe->device->copy_2d(moe->device->self, at->out + (size_t)mine.first * shard->elem, row,
                         moe->sorted, bytes, bytes, (size_t)at->rows);
  return RM_OK;
}

// --------------------------------------------------------------------------------------- a layer
rm_code rm_moe_forward(rm_moe *moe, const rm_moe_rows *rows, rm_error *err) {
  const int64_t tp = moe->dispatches ? moe->rank->mesh.tp : 1,
                n = rm_max64((rows->most + tp - 1) / tp, 1),
                each = moe->is_static ? (moe->max_rows + tp - 1) / tp : n;
  for (int64_t first = 0; first < n; first += each) {
    // A rank without more rows takes part with none.
    const int64_t done = rm_min64(first, rows->rows);
    const size_t skipped = (size_t)done * rm_moe_row_bytes(moe);
    const rm_moe_rows pass = {
        .layer = rows->layer,
        .weights = rows->weights,
        .x = rows->x + skipped,
        .out = rows->out + skipped,
        .rows = rm_min64(rows->rows - done, each),
        .most = rm_min64(n - first, each),
        .routed = rows->routed + done * moe->spec->n_moe_layers * moe->spec->top_k,
    };
    RM_TRY(!moe->dispatches ? replicated(moe, &pass, err)
           : moe->is_static ? rm_moe_static_dispatched(moe, &pass, err)
                            : rm_moe_counted_dispatched(moe, &pass, err));
  }
  return RM_OK;
}
