// device_comms.c: the groups for exchanges of device memory, and waits that check them.
//
// Each host comm has a counterpart for device memory with the same ranks: staged through the host
// comm, or NCCL. Batches, draws, flags and votes use the host comms, whose headers detect ranks
// that differ; NCCL's calls are sent without headers and are compared once per step.
#define _GNU_SOURCE
#include <time.h>

#include "clock.h"
#include "comm/nccl/nccl.h"
#include "comm/staged.h"
#include "model/exchange_sizes.h"
#include "step/runner.h"

// ----------------------------------------------------------------------------------------- making
static rm_code join(rm_runner *runner, rm_comm *host, rm_exchanged most, rm_comm **out,
                    rm_error *err) {
  const rm_runner_options *options = &runner->options;
  if (!options->nccl_library)
    return rm_comm_create_staged(host, runner->device, most.all, out, err);
  const rm_nccl_options nccl = {.library = options->nccl_library,
                                .gpu = options->nccl_gpu ? options->nccl_gpu : runner->device->name,
                                .capacity = most.apart,
                                .timeout = rm_comm_timeout(host)};
  return rm_comm_create_nccl(host, runner->device, &nccl, out, err);
}

rm_code rm_comms_join(rm_runner *runner, rm_error *err) {
  rm_rank *rank = &runner->rank;
  const rm_model_options *model = &runner->options.model;
  const rm_spec *spec = runner->options.spec;
  rm_code code = RM_OK;
  if (runner->device->on_host) return RM_OK;
  if (rank->tp) code = join(runner, rank->tp, rm_exchanged_tp(spec, model), &rank->device_tp, err);
  if (code || !rank->ep) return code;
  if (rank->mesh.ep == rank->mesh.tp) rank->device_ep = rank->device_tp; // the same ranks
  else code = join(runner, rank->ep, rm_exchanged_ep(spec, model), &rank->device_ep, err);
  return code;
}

void rm_comms_leave(rm_runner *runner) {
  rm_rank *rank = &runner->rank;
  if (rank->device_ep != rank->device_tp) rm_comm_destroy(rank->device_ep);
  rm_comm_destroy(rank->device_tp);
  rank->device_tp = rank->device_ep = NULL;
}

// ----------------------------------------------------------------------------------------- a step
void rm_comms_set_epoch(const rm_runner *runner, int64_t version) {
  const rm_rank *rank = &runner->rank;
  rm_comm *const groups[] = {rank->tp, rank->ep, rank->device_tp, rank->device_ep};
  for (size_t i = 0; i < sizeof groups / sizeof *groups; i++)
    if (groups[i]) rm_comm_set_epoch(groups[i], version);
}

rm_code rm_runner_wait(rm_runner *runner, rm_error *err) {
  return rm_rank_wait(&runner->rank, runner->device, err);
}

static rm_code compare(rm_comm *there, rm_comm *host, rm_error *err) {
  return there && rm_comm_can_be_captured(there) ? rm_comm_compare(there, host, err) : RM_OK;
}

rm_code rm_compare_forward(rm_runner *runner, rm_error *err) {
  const rm_rank *rank = &runner->rank;
  return rank->device_ep == rank->device_tp ? RM_OK : compare(rank->device_ep, rank->ep, err);
}

rm_code rm_compare_outs(rm_runner *runner, rm_error *err) {
  return compare(runner->rank.device_tp, runner->rank.tp, err);
}

// Aborts every group, since another rank may wait for this one in a group that did not fail.
void rm_comms_abort(rm_runner *runner, rm_code why) {
  const rm_rank *rank = &runner->rank;
  rm_comm *const groups[] = {rank->device_tp, rank->device_ep, rank->tp, rank->ep, rank->world};
  for (size_t i = 0; i < sizeof groups / sizeof *groups; i++)
    if (groups[i]) rm_comm_abort(groups[i], why);
}

void rm_comms_settle(rm_runner *runner) {
  const rm_device *device = runner->device;
  const rm_comm *const tp = runner->rank.device_tp, *const ep = runner->rank.device_ep;
  const double until = rm_now() + (tp || ep ? rm_comm_timeout(tp ? tp : ep) : 0);
  if (!tp && !ep) rm_device_wait(device, NULL);
  while ((tp || ep) && device->poll(device->self) == RM_DEVICE_BUSY && rm_now() < until)
    nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
}

// ------------------------------------------------------------------------------------- statistics
// A staged comm is counted by its host comm.
rm_traffic rm_comms_traffic(const rm_runner *runner) {
  const rm_rank *rank = &runner->rank;
  const rm_comm *const tp = rank->device_tp, *const ep =
                                                 rank->device_ep == tp ? NULL : rank->device_ep;
  const rm_comm *const groups[] = {rank->tp, rank->ep, rank->world,
                                   tp && rm_comm_can_be_captured(tp) ? tp : NULL,
                                   ep && rm_comm_can_be_captured(ep) ? ep : NULL};
  rm_traffic traffic = {runner->comm_bytes, runner->comm_calls, 0};
  for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
    rm_comm_stats its;
    if (!groups[i]) continue;
    rm_comm_statistics(groups[i], &its);
    traffic.bytes += its.bytes_sent;
    traffic.seconds += its.seconds;
    for (int op = 0; op < RM_N_COMM_OP; op++) traffic.calls += its.calls[op];
  }
  return traffic;
}
