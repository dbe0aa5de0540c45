// device_comms.c: the groups by which this engine's rank exchanges what lies in its device's memory, and all that a step waits for there.
//
// On a device each group of the host has a second one beside it, of the same ranks: staged by way of the host's, or NCCL over it. What
// is no activation (batches, draws, flags, votes) goes by the host's, whose headers compare what the ranks are doing; NCCL's calls have
// none, and are compared once a step.
#define _GNU_SOURCE
#include <time.h>

#include "comm/nccl/nccl.h"
#include "comm/staged.h"
#include "engine/state.h"
#include "model/exchange_sizes.h"

// ---------------------------------------------------------------------------------------------- making
static rm_code join(rm_engine *engine, rm_comm *host, rm_exchanged most, rm_comm **out, rm_error *err) {
  const rm_engine_options *options = &engine->options;
  if (!options->nccl_library) return rm_comm_create_staged(host, engine->device, most.all, out, err);
  const rm_nccl_options nccl = {.library = options->nccl_library,
                                .gpu = options->nccl_gpu ? options->nccl_gpu : engine->device->name,
                                .capacity = most.apart,
                                .timeout = rm_comm_timeout(host)};
  return rm_comm_create_nccl(host, engine->device, &nccl, out, err);
}

rm_code rm_join_peers(rm_engine *engine, rm_error *err) {
  rm_rank *rank = &engine->options.rank;
  const int calls_ep = rank->ep != NULL;
  const rm_model_options model = rm_model_options_of(engine);
  rm_code code = RM_OK;
  if (engine->device->on_host) return RM_OK;
  if (rank->tp) code = join(engine, rank->tp, rm_exchanged_tp(engine->spec, &model), &engine->tp_there, err);
  if (code) return code;
  if (calls_ep && rank->mesh.ep == rank->mesh.tp) engine->ep_there = engine->tp_there;   // the same ranks
  else if (calls_ep && (code = join(engine, rank->ep, rm_exchanged_ep(engine->spec, &model), &engine->ep_there, err))) return code;
  rank->tp_there = engine->tp_there;
  rank->ep_there = engine->ep_there;
  return RM_OK;
}

void rm_leave_peers(rm_engine *engine) {
  if (engine->ep_there != engine->tp_there) rm_comm_destroy(engine->ep_there);
  rm_comm_destroy(engine->tp_there);
  engine->tp_there = engine->ep_there = NULL;
}

// ---------------------------------------------------------------------------------------------- a step
rm_code rm_engine_wait(rm_engine *engine, rm_error *err) { return rm_rank_wait(&engine->options.rank, engine->device, err); }

static rm_code compare(rm_comm *there, rm_comm *host, rm_error *err) {
  return there && rm_comm_can_be_recorded(there) ? rm_comm_compare(there, host, err) : RM_OK;
}

rm_code rm_compare_forward(rm_engine *engine, rm_error *err) {
  return engine->ep_there == engine->tp_there ? RM_OK : compare(engine->ep_there, engine->options.rank.ep, err);
}

rm_code rm_compare_outs(rm_engine *engine, rm_error *err) { return compare(engine->tp_there, engine->options.rank.tp, err); }

// A rank that waits for this one in another group has to hear of it too. What stands in the device's queue for others comes to its end.
void rm_abandon_peers(rm_engine *engine, rm_code why) {
  const rm_rank *rank = &engine->options.rank;
  rm_comm *const groups[] = {engine->tp_there, engine->ep_there, rank->tp, rank->ep, rank->world};
  for (size_t i = 0; i < sizeof groups / sizeof *groups; i++)
    if (groups[i]) rm_comm_abort(groups[i], why);
}

void rm_settle_peers(rm_engine *engine) {
  const rm_device *device = engine->device;
  const rm_comm *const tp = engine->tp_there, *const ep = engine->ep_there;
  const double until = rm_now() + (tp || ep ? rm_comm_timeout(tp ? tp : ep) : 0);
  if (!tp && !ep) rm_device_wait(device, NULL);
  while ((tp || ep) && device->poll(device->self) == RM_DEVICE_BUSY && rm_now() < until)
    nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
}

// ---------------------------------------------------------------------------------------------- figures
// What is staged is counted by the host's groups.
void rm_peers_traffic(const rm_engine *engine, rm_engine_stats *out) {
  const rm_rank *rank = &engine->options.rank;
  const rm_comm *const tp = engine->tp_there, *const ep = engine->ep_there == tp ? NULL : engine->ep_there;
  const rm_comm *const groups[] = {rank->tp, rank->ep, rank->world, tp && rm_comm_can_be_recorded(tp) ? tp : NULL,
                                   ep && rm_comm_can_be_recorded(ep) ? ep : NULL};
  for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
    rm_comm_stats its;
    if (!groups[i]) continue;
    rm_comm_statistics(groups[i], &its);
    out->comm_bytes += its.bytes_sent;
    out->comm_seconds += its.seconds;
    for (int op = 0; op < RM_N_COMM_OP; op++) out->comm_calls += its.calls[op];
  }
}
