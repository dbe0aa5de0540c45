// device_comms.c: the device groups of a rank; see gpu.h.
#define _GNU_SOURCE
#include <time.h>

#include "clock.h"
#include "gpu/exchange_sizes.h"
#include "gpu/gpu.h"
#include "gpu/nccl/library.h"
#include "gpu/nccl/nccl.h"
#include "gpu/staged.h"

// --------------------------------------------------------------------------------------- creation
static rm_code join(rm_comm *host, const rm_device *device, const char *library, rm_exchanged most,
                    rm_comm **out, rm_error *err) {
  if (!library) return rm_comm_create_staged(host, device, most.all, out, err);
  const rm_nccl_options nccl = {
      .library = library, .capacity = most.apart, .timeout = rm_comm_timeout(host)};
  return rm_comm_create_nccl(host, device, &nccl, out, err);
}

rm_code rm_nccl_version(const char *path, int *version, rm_error *err) {
  rm_nccl api;
  const rm_code code = rm_nccl_load(path, &api, err);
  *version = api.version;
  return code;
}

rm_code rm_device_comms_create(rm_rank *rank, const rm_device *device, const rm_spec *spec,
                               const rm_model_options *options, const char *nccl, rm_error *err) {
  rm_code code = RM_OK;
  if (device->on_host) return RM_OK;
  if (rank->tp)
    code = join(rank->tp, device, nccl, rm_exchanged_tp(spec, options), &rank->device_tp, err);
  if (code || !rank->ep) return code;
  if (rank->mesh.ep == rank->mesh.tp) rank->device_ep = rank->device_tp; // the same ranks
  else code = join(rank->ep, device, nccl, rm_exchanged_ep(spec, options), &rank->device_ep, err);
  return code;
}

void rm_device_comms_destroy(rm_rank *rank) {
  if (rank->device_ep != rank->device_tp) rm_comm_destroy(rank->device_ep);
  rm_comm_destroy(rank->device_tp);
  rank->device_tp = rank->device_ep = NULL;
}

// ----------------------------------------------------------------------------------------- a step
static rm_code compare(rm_comm *there, rm_comm *host, rm_error *err) {
  return there && rm_comm_can_be_captured(there) ? rm_comm_compare(there, host, err) : RM_OK;
}

rm_code rm_compare_forward(const rm_rank *rank, rm_error *err) {
  return rank->device_ep == rank->device_tp ? RM_OK : compare(rank->device_ep, rank->ep, err);
}

rm_code rm_compare_outs(const rm_rank *rank, rm_error *err) {
  return compare(rank->device_tp, rank->tp, err);
}

void rm_device_settle(const rm_rank *rank, const rm_device *device) {
  const rm_comm *const tp = rank->device_tp, *const ep = rank->device_ep;
  const double until = rm_now() + (tp || ep ? rm_comm_timeout(tp ? tp : ep) : 0);
  if (!tp && !ep) rm_device_wait(device, NULL);
  while ((tp || ep) && device->poll(device->self) == RM_DEVICE_BUSY && rm_now() < until)
    nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
}
