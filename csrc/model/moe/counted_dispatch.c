// counted_dispatch.c: the dispatched form with counted sizes: rows go to the ranks of their experts
// and outputs come back (dispatch.h). The dispatcher works in host memory, so a device's rows are
// copied to the host and back (rm_moe_stage).
#include "model/moe/moe.h"

rm_code rm_moe_stage_create(rm_moe *moe, rm_error *err) {
  rm_moe_stage *stage = &moe->stage;
  const size_t rows = (size_t)moe->dispatch.max_rows, choices = rows * (size_t)moe->spec->top_k,
               row = rm_moe_row_bytes(moe);
  const rm_field fields[] = {
      {&stage->x, rows, row},
      {&stage->ids, choices, sizeof *stage->ids},
      {&stage->here, (size_t)moe->dispatch.max_arrive, row},
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

// Copies inputs and expert ids to the host.
static rm_code take_home(rm_moe *moe, const rm_moe_rows *at, rm_error *err) {
  const rm_device *device = moe->device;
  rm_moe_stage *stage = &moe->stage;
  const size_t rows = (size_t)at->rows, ids = rows * (size_t)moe->spec->top_k * sizeof *stage->ids;
  if (rows) device->copy_to_host(device->self, stage->x, at->x, rows * rm_moe_row_bytes(moe));
  if (rows) device->copy_to_host(device->self, stage->ids, moe->ids, ids);
  return rm_rank_wait(moe->rank, device, RM_WAIT_QUEUE, err);
}

// Copies n bytes of the dispatcher's to the stage and on to the device. Returns their address
// there.
static void *to_device(rm_moe *moe, void *stage, const void *from, size_t n) {
  memcpy(stage, from, n);
  rm_mirrored_copy_to_device(&moe->stage.mirrored, stage, n);
  return rm_mirrored_on_device(&moe->stage.mirrored, stage);
}

// Copies the dispatcher's `rows` to the device, computes the experts, copies outputs back.
static rm_code compute_there(rm_moe *moe, const rm_moe_rows *at, char *rows, rm_error *err) {
  const rm_dispatch *d = &moe->dispatch;
  rm_moe_stage *stage = &moe->stage;
  const size_t bytes = (size_t)d->n_arrive * d->row_bytes;
  if (!bytes) return RM_OK;
  char *there = to_device(moe, stage->here, rows, bytes);
  const int32_t *groups = to_device(moe, stage->group_rows, d->group_rows,
                                    (size_t)(d->here.n + 1) * sizeof *d->group_rows);
  rm_code code = rm_moe_experts(moe, at, groups, d->n_arrive, there, there, err);
  rm_mirrored_copy_to_host(&stage->mirrored, stage->here, bytes);
  if (!code) code = rm_rank_wait(moe->rank, moe->device, RM_WAIT_QUEUE, err);
  if (!code) memcpy(rows, stage->here, bytes);
  return code;
}

rm_code rm_moe_counted_dispatched(rm_moe *moe, const rm_moe_rows *at, rm_error *err) {
  const int staged = !moe->device->on_host;
  rm_dispatch *d = &moe->dispatch;
  rm_moe_stage *stage = &moe->stage;
  char *here, *choices;
  const int32_t *place = d->place;
  rm_code code;
  rm_moe_route(moe, at, moe->ids);
  if (staged && (code = take_home(moe, at, err))) return code;
  if ((code = rm_dispatch_plan(d, staged ? stage->ids : moe->ids, at->rows, err)) ||
      (code = rm_dispatch_out(d, moe->ctx, staged ? stage->x : at->x, &here, err)))
    return code;
  code = staged ? compute_there(moe, at, here, err)
                : rm_moe_experts(moe, at, d->group_rows, d->n_arrive, here, here, err);
  if (code || (code = rm_dispatch_back(d, moe->ctx, here, &choices, err))) return code;
  if (staged) {
    choices = to_device(moe, stage->choices, choices, (size_t)d->n_choices * d->row_bytes);
    place = to_device(moe, stage->place, place, (size_t)d->n_choices * sizeof *place);
  }
  rm_moe_combine(moe, at->out, choices, moe->ids, place, moe->spec->hidden_size, at->rows);
  return RM_OK;
}
