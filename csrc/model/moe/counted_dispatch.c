// counted_dispatch.c: the dispatched form with counted sizes: rows go to the ranks of their experts
// and outputs come back (dispatch.h). The dispatcher works in host memory, so a device's rows are
// copied to the host and back (rm_moe_stage).
#include "model/moe/moe.h"

rm_code rm_moe_stage_create(rm_moe *moe, int64_t home_rows, rm_error *err) {
  rm_moe_stage *stage = &moe->stage;
  const size_t rows = (size_t)home_rows, choices = rows * (size_t)moe->spec->top_k,
               row = rm_moe_row_bytes(moe);
  const rm_field fields[] = {
      {&stage->x, rows, row},
      {&stage->ids, choices, sizeof *stage->ids},
      {&stage->here, (size_t)rm_dispatch_max_arrive(moe->dispatch), row},
      {&stage->group_rows, (size_t)moe->here->experts.n + 1, sizeof *stage->group_rows},
      {&stage->choices, choices, row},
      {&stage->place, choices, sizeof *stage->place},
  };
  const size_t n = sizeof fields / sizeof *fields;
  if (moe->device->on_host) return RM_OK;
  const rm_code code = rm_mirrored_create(moe->device, rm_fields_bytes(fields, n),
                                          "rows on their way to experts", &stage->mirrored, err);
  if (!code) rm_fields_place(fields, n, stage->mirrored.host, stage->mirrored.bytes);
  return code;
}

// Computes the experts of `rows`: T [n_arrive][hidden], inputs, then outputs.
static void compute(rm_moe *moe, const rm_ctx *ctx, const rm_layer_params *layer,
                    const char *weights, const int32_t *group_rows, char *rows) {
  const int64_t n = moe->plan->n_arrive;
  rm_gemm_args up = rm_moe_up(moe, layer, weights, group_rows, n),
               down = rm_moe_down(moe, layer, weights, group_rows, n);
  if (!n) return;
  up.x = down.y = rows;
  up.y = moe->inner;
  down.x = moe->inner;
  moe->kernels->gemm_swiglu(ctx, &up);
  moe->kernels->gemm(ctx, &down);
}

// Copies inputs and expert ids to the host.
static rm_code take_home(rm_moe *moe, const char *x, int64_t rows, rm_error *err) {
  const rm_device *device = moe->device;
  rm_moe_stage *stage = &moe->stage;
  if (rows) device->copy_to_host(device->self, stage->x, x, (size_t)rows * rm_moe_row_bytes(moe));
  if (rows)
    device->copy_to_host(device->self, stage->ids, moe->ids,
                         (size_t)(rows * moe->spec->top_k) * sizeof *stage->ids);
  return rm_rank_wait(moe->rank, device, err);
}

// Copies the dispatcher's `rows` to the device, computes the experts, copies outputs back.
static rm_code compute_there(rm_moe *moe, const rm_ctx *ctx, const rm_layer_params *layer,
                             const char *weights, char *rows, rm_error *err) {
  rm_moe_stage *stage = &moe->stage;
  const size_t bytes = (size_t)moe->plan->n_arrive * rm_moe_row_bytes(moe),
               groups = (size_t)moe->here->experts.n + 1;
  if (!bytes) return RM_OK;
  memcpy(stage->here, rows, bytes);
  memcpy(stage->group_rows, moe->plan->group_rows, groups * sizeof *stage->group_rows);
  rm_mirrored_copy_to_device(&stage->mirrored, stage->here, bytes);
  rm_mirrored_copy_to_device(&stage->mirrored, stage->group_rows,
                             groups * sizeof *stage->group_rows);
  compute(moe, ctx, layer, weights, rm_mirrored_on_device(&stage->mirrored, stage->group_rows),
          rm_mirrored_on_device(&stage->mirrored, stage->here));
  rm_mirrored_copy_to_host(&stage->mirrored, stage->here, bytes);
  const rm_code code = rm_rank_wait(moe->rank, moe->device, err);
  if (!code) memcpy(rows, stage->here, bytes);
  return code;
}

// Copies outputs to the device and combines them there.
static void combine_there(rm_moe *moe, const rm_ctx *ctx, char *out, const char *choices,
                          int64_t rows) {
  rm_moe_stage *stage = &moe->stage;
  const size_t bytes = (size_t)moe->plan->n_choices * rm_moe_row_bytes(moe),
               places = (size_t)(rows * moe->spec->top_k) * sizeof *stage->place;
  memcpy(stage->choices, choices, bytes);
  memcpy(stage->place, moe->plan->place, places);
  rm_mirrored_copy_to_device(&stage->mirrored, stage->choices, bytes);
  rm_mirrored_copy_to_device(&stage->mirrored, stage->place, places);
  rm_moe_combine(moe, ctx, out, rm_mirrored_on_device(&stage->mirrored, stage->choices), moe->ids,
                 rm_mirrored_on_device(&stage->mirrored, stage->place), moe->spec->hidden_size,
                 rows);
}

rm_code rm_moe_dispatched(rm_moe *moe, const rm_ctx *ctx, const rm_layer_params *layer,
                          const char *weights, const char *x, char *out, int64_t rows,
                          int64_t most_rows, int16_t *routed, int64_t routed_stride,
                          rm_error *err) {
  const int staged = !moe->device->on_host;
  char *here, *choices;
  rm_code code;
  if (rm_moe_is_static(moe, most_rows))
    return rm_moe_static_dispatched(moe, ctx, layer, weights, x, out, rows, most_rows, routed,
                                    routed_stride, err);
  rm_moe_route(moe, ctx, layer, weights, x, moe->ids, rows, routed, routed_stride);
  if (staged && (code = take_home(moe, x, rows, err))) return code;
  const int32_t *ids = staged ? moe->stage.ids : moe->ids;
  if ((code = rm_dispatch_plan_rows(moe->dispatch, ids, rows, &moe->plan, err))) return code;
  code = rm_dispatch_out(moe->dispatch, ctx, staged ? moe->stage.x : x, &here, err);
  if (code) return code;
  if (!staged) compute(moe, ctx, layer, weights, moe->plan->group_rows, here);
  else if ((code = compute_there(moe, ctx, layer, weights, here, err))) return code;
  if ((code = rm_dispatch_back(moe->dispatch, ctx, here, &choices, err))) return code;
  if (staged) combine_there(moe, ctx, out, choices, rows);
  else
    rm_moe_combine(moe, ctx, out, choices, moe->ids, moe->plan->place, moe->spec->hidden_size,
                   rows);
  return RM_OK;
}
