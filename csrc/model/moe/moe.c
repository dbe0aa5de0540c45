// moe.c: see moe.h. Rows are sorted by expert, so that each chosen expert is one gemm, which reads
// its weights once per batch.
#include "model/moe/moe.h"

// --------------------------------------------------------------------------------------- creation
static rm_code create_groups(rm_moe *moe, rm_error *err) {
  const size_t bytes = (size_t)(moe->spec->n_experts + 1) * sizeof *moe->group_rows;
  const rm_code code =
      rm_mirrored_create(moe->device, bytes, "counts of experts", &moe->groups, err);
  moe->group_rows = (int32_t *)moe->groups.host;
  return code;
}

rm_code rm_moe_create(rm_moe *moe, const rm_params *params, const rm_device *device,
                      const rm_rank *rank, int64_t max_rows, int64_t static_rows, rm_error *err) {
  const rm_mesh *mesh = &rank->mesh;
  const rm_peers peers = rm_mesh_peers(mesh, rank->index, RM_AXIS_EP);
  *moe = (rm_moe){.spec = params->spec,
                  .here = &params->placement,
                  .device = device,
                  .rank = rank,
                  .dtype = params->dtype,
                  .max_rows = max_rows};
  moe->kernels = device->kernels;
  moe->dispatcher = mesh->ep > 1 ? rank->dispatcher : RM_DISPATCH_DISABLED;
  moe->dispatches = mesh->ep > 1 && moe->dispatcher != RM_DISPATCH_LOCAL_ALLREDUCE;
  if (mesh->ep == 1) return create_groups(moe, err);
  moe->ep = rank->device_ep ? rank->device_ep : rank->ep;
  moe->experts = rm_alloc((size_t)mesh->ep, sizeof *moe->experts);
  moe->send = rm_alloc((size_t)mesh->ep, 2 * sizeof *moe->send);
  if (!moe->experts || !moe->send)
    return rm_fail(err, RM_E_MEMORY, "no memory for the experts of %d ranks", mesh->ep);
  moe->recv = moe->send + mesh->ep;
  for (int32_t i = 0; i < peers.count; i++)
    moe->experts[i] = rm_placement_of(params->spec, mesh, peers.first + i * peers.step).experts;
  rm_code code = rm_moe_static_create(moe, mesh, static_rows, err);
  if (code || rm_moe_is_static(moe, INT64_MAX)) return code;
  if (!moe->dispatches) return create_groups(moe, err);
  const rm_dispatch_options options = {.ep = rank->ep,
                                       .experts = moe->experts,
                                       .n_experts = params->spec->n_experts,
                                       .top_k = params->spec->top_k,
                                       .max_rows = (max_rows + mesh->tp - 1) / mesh->tp,
                                       .row_bytes = rm_moe_row_bytes(moe),
                                       .backend = moe->dispatcher};
  code = rm_dispatch_create(&options, &moe->dispatch, err);
  return code ? code : rm_moe_stage_create(moe, options.max_rows, err);
}

void rm_moe_destroy(rm_moe *moe) {
  rm_mirrored_destroy(&moe->stage.mirrored);
  rm_mirrored_destroy(&moe->groups);
  rm_mirrored_destroy(&moe->fixed.none);
  rm_dispatch_destroy(moe->dispatch);
  rm_free(moe->experts);
  rm_free(moe->send);
}

size_t rm_moe_bytes(const rm_moe *moe) {
  return moe->groups.bytes + moe->stage.mirrored.bytes + moe->fixed.none.bytes +
         (moe->dispatch ? rm_dispatch_bytes(moe->dispatch) : 0);
}

size_t rm_moe_fields(rm_moe *moe, rm_field fields[RM_MOE_FIELDS]) {
  const rm_spec *spec = moe->spec;
  const int dispatches = moe->dispatches, cut = moe->rank->mesh.tp > 1 && !dispatches;
  const rm_static_sizes most = rm_moe_static_most(moe);
  const size_t choices = (size_t)(moe->max_rows * spec->top_k), elem = rm_dtype_bytes(moe->dtype),
               ep = (size_t)moe->fixed.mesh.ep;
  const size_t homes = ep * (size_t)most.home_rows, slots = homes * (size_t)most.each,
               in_part = ep * (size_t)(moe->fixed.rows * most.each);
  const size_t arrive = moe->dispatch ? (size_t)rm_dispatch_max_arrive(moe->dispatch)
                        : dispatches  ? 0
                                      : choices;
  const rm_field list[RM_MOE_FIELDS - RM_STATIC_FIELDS] = {
      {&moe->ids, choices, sizeof *moe->ids},
      {&moe->gates, choices, sizeof *moe->gates},
      {&moe->inner, arrive > slots ? arrive : slots, (size_t)spec->moe_intermediate_size * elem},
      {&moe->place, dispatches ? homes * (size_t)spec->top_k : choices, sizeof *moe->place},
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
void rm_moe_route(rm_moe *moe, const rm_ctx *ctx, const rm_layer_params *layer, const char *weights,
                  const void *x, int32_t *ids, int64_t rows, int16_t *routed,
                  int64_t routed_stride) {
  const rm_spec *spec = moe->spec;
  const rm_router_args args = {
      .ids = ids,
      .gates = moe->gates,
      .routed = routed,
      .routed_stride = routed_stride,
      .x = x,
      .w = weights + layer->router,
      .bias = layer->router_bias == SIZE_MAX ? NULL : (const float *)(weights + layer->router_bias),
      .rows = rows,
      .hidden = spec->hidden_size,
      .n_experts = spec->n_experts,
      .top_k = spec->top_k,
      .n_groups = spec->n_groups,
      .top_groups = spec->top_groups,
      .route_scale = spec->route_scale,
      .score = spec->sigmoid_scores ? RM_SCORE_SIGMOID : RM_SCORE_SOFTMAX,
      .renormalize = spec->norm_topk_prob,
      .dtype = moe->dtype,
  };
  if (rows) moe->kernels->router(ctx, &args);
}

static rm_gemm_args grouped(const rm_moe *moe, const char *w, int64_t stride,
                            const int32_t *group_rows, int64_t m, int64_t n, int64_t k) {
  return (rm_gemm_args){.w = w,
                        .group_rows = group_rows,
                        .n_groups = moe->here->experts.n,
                        .group_stride = stride,
                        .m = m,
                        .n = n,
                        .k = k,
                        .ldx = k,
                        .ldy = n,
                        .dtype = moe->dtype,
                        .y_dtype = moe->dtype};
}

rm_gemm_args rm_moe_up(const rm_moe *moe, const rm_layer_params *layer, const char *weights,
                       const int32_t *group_rows, int64_t m) {
  rm_gemm_args args = grouped(moe, weights + layer->expert_gate_up, layer->expert_gate_up_stride,
                              group_rows, m, moe->here->expert_inner.n, moe->spec->hidden_size);
  args.activation = moe->spec->activation;
  return args;
}

rm_gemm_args rm_moe_down(const rm_moe *moe, const rm_layer_params *layer, const char *weights,
                         const int32_t *group_rows, int64_t m) {
  return grouped(moe, weights + layer->expert_down, layer->expert_down_stride, group_rows, m,
                 moe->here->expert_hidden.n, moe->spec->moe_intermediate_size);
}

void rm_moe_combine(const rm_moe *moe, const rm_ctx *ctx, void *out, const void *y,
                    const int32_t *ids, const int32_t *place, int64_t hidden, int64_t rows) {
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
  if (rows && hidden) moe->kernels->combine(ctx, &args);
}

// -------------------------------------------------------------------------------- replicated rows
static void permute(rm_moe *moe, const rm_ctx *ctx, const void *x, int64_t rows) {
  const rm_permute_args args = {
      .x_out = moe->sorted,
      .group_rows = rm_mirrored_on_device(&moe->groups, moe->group_rows),
      .place = moe->place,
      .x = x,
      .ids = moe->ids,
      .rows = rows,
      .hidden = moe->spec->hidden_size,
      .n_experts = moe->spec->n_experts,
      .top_k = moe->spec->top_k,
      .dtype = moe->dtype,
  };
  if (rows) moe->kernels->permute(ctx, &args);
  else rm_device_zero(moe->device, args.group_rows, moe->groups.bytes);
}

// Experts sharded over tp: gathers the columns of `inner`, then computes this rank's columns of the
// outputs.
static rm_code cut_experts(rm_moe *moe, const rm_ctx *ctx, rm_shard *shard,
                           const rm_layer_params *layer, const char *weights, int64_t m,
                           rm_error *err) {
  const int32_t *groups = rm_mirrored_on_device(&moe->groups, moe->group_rows);
  rm_gemm_args up = rm_moe_up(moe, layer, weights, groups, m),
               down = rm_moe_down(moe, layer, weights, groups, m);
  up.x = moe->sorted;
  up.y = moe->inner + (size_t)moe->here->expert_inner.first * shard->elem;
  up.ldy = moe->spec->moe_intermediate_size;
  if (up.n) moe->kernels->gemm_swiglu(ctx, &up);
  const rm_code code = rm_shard_gather_columns(shard, RM_CUT_EXPERT_INNER, moe->inner, m, err);
  down.x = moe->inner;
  down.y = shard->comm ? moe->part : moe->sorted; // one rank: the inputs are free by now
  if (!code && down.n) moe->kernels->gemm(ctx, &down);
  return code;
}

// Whole experts on each rank: computes their outputs for all rows and sends each rank its columns.
static rm_code own_experts(rm_moe *moe, const rm_ctx *ctx, rm_shard *shard,
                           const rm_layer_params *layer, const char *weights, int64_t m,
                           rm_error *err) {
  const rm_range *columns = shard->cuts[RM_CUT_HIDDEN];
  const size_t row = (size_t)moe->spec->hidden_size * shard->elem,
               mine = (size_t)columns[shard->me].n * shard->elem;
  const int32_t *starts = moe->group_rows, *here = starts + moe->here->experts.first,
                *groups = rm_mirrored_on_device(&moe->groups, here);
  rm_gemm_args up = rm_moe_up(moe, layer, weights, groups, m),
               down = rm_moe_down(moe, layer, weights, groups, m);
  up.x = down.y = moe->sorted;
  up.y = moe->inner;
  down.x = moe->inner;
  moe->kernels->gemm_swiglu(ctx, &up);
  moe->kernels->gemm(ctx, &down);
  rm_mirrored_copy_to_host(&moe->groups, moe->group_rows, moe->groups.bytes);
  // The host needs the sizes of the blocks.
  const rm_code code = rm_rank_wait(moe->rank, moe->device, err);
  if (code) return code;
  const int64_t first = here[0], n = here[moe->here->experts.n] - first;
  for (int r = 0; r < shard->size; r++) {
    const rm_range its = moe->experts[r];
    const int64_t from = starts[its.first];
    moe->send[r] =
        (rm_block){moe->sorted + (size_t)first * row + (size_t)columns[r].first * shard->elem, n,
                   (size_t)columns[r].n * shard->elem, row};
    moe->recv[r] =
        (rm_block){moe->part + (size_t)from * mine, starts[its.first + its.n] - from, mine, mine};
  }
  return rm_comm_exchange(moe->ep, RM_COMM_COMBINE, moe->send, moe->recv, err);
}

// Computes all rows of a step, or of a pass of the static form.
static rm_code replicated_pass(rm_moe *moe, const rm_ctx *ctx, rm_shard *shard,
                               const rm_layer_params *layer, const char *weights, char *x,
                               int64_t rows, int is_static, int16_t *routed, int64_t routed_stride,
                               rm_error *err) {
  const int64_t m = rows * moe->spec->top_k;
  rm_code code;
  rm_moe_route(moe, ctx, layer, weights, x, moe->ids, rows, routed, routed_stride);
  if (is_static) {
    code = rm_moe_static_replicated(moe, ctx, shard, layer, weights, x, rows, err);
  } else {
    permute(moe, ctx, x, rows);
    code = moe->ep ? own_experts(moe, ctx, shard, layer, weights, m, err)
                   : cut_experts(moe, ctx, shard, layer, weights, m, err);
  }
  if (code) return code;
  if (!shard->comm) {
    rm_moe_combine(moe, ctx, x, moe->sorted, moe->ids, moe->place, moe->spec->hidden_size, rows);
    return RM_OK;
  }
  const rm_range mine = shard->cuts[RM_CUT_HIDDEN][shard->me];
  const size_t row = (size_t)moe->spec->hidden_size * shard->elem,
               bytes = (size_t)mine.n * shard->elem;
  rm_moe_combine(moe, ctx, moe->sorted, moe->part, moe->ids, moe->place, mine.n, rows);
  if (bytes)
    moe->device->copy_2d(moe->device->self, x + (size_t)mine.first * shard->elem, row, moe->sorted,
                         bytes, bytes, (size_t)rows);
  return RM_OK;
}

rm_code rm_moe_replicated(rm_moe *moe, const rm_ctx *ctx, rm_shard *shard,
                          const rm_layer_params *layer, const char *weights, char *x, int64_t rows,
                          int16_t *routed, int64_t routed_stride, rm_error *err) {
  const int is_static = moe->ep && rm_moe_is_static(moe, rows);
  const int64_t each = is_static ? moe->fixed.rows : rm_max64(rows, 1);
  const size_t row = rm_moe_row_bytes(moe);
  rm_code code = RM_OK;
  for (int64_t first = 0; first < rm_max64(rows, 1) && !code; first += each)
    code = replicated_pass(moe, ctx, shard, layer, weights, x + (size_t)first * row,
                           rm_min64(rows - first, each), is_static, routed + first * routed_stride,
                           routed_stride, err);
  return code;
}
