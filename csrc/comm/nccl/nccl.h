// nccl.h: a transport for blocks in GPUs' memory, by NVIDIA's NCCL: one rank a GPU, over NVLink, PCIe or a network, or several on one GPU
// where NCCL is 2.30.3 or later and NCCL_MULTI_RANK_GPU_ENABLE=1 is in the environment before its first group is made.
//
// A call packs strided blocks with copies of the device, enqueues one group of sends and receives, and unpacks. It waits for nothing of
// the device, so it can be recorded; ranks record the same calls, and replay them at the same places. It compares no headers: ranks
// that disagree hang, until rm_comm_wait's deadline, or are found by rm_comm_compare before.
//
// NCCL knows a lost peer only on some networks. So each group stands on a group of the host of the same ranks, by which its ranks meet
// when it is made, and at which rm_comm_wait looks: a process that has ended, or a rank that has given up, is known there at once and
// by name. A failure of one is the end of both; it ends what stands in the device's queue.
//
//   rm_comm *tp;
//   rm_comm_create_nccl(host, device, &options, &tp, &err);
//   rm_comm_exchange(tp, …); …                           // all the calls of a step
//   rm_comm_compare(tp, host, &err);                     // once a step
//   rm_comm_wait(&tp, 1, device, seconds, &err);
//   rm_comm_destroy(tp);                                 // after a wait; before the host's, and before the device is closed
#pragma once

#include "comm/comm.h"

typedef struct rm_nccl_options {
  const char *library;          // the path of libnccl.so.2, which is loaded if it was not
  const char *gpu;              // names this rank's GPU, alike where two ranks have the same one; NULL: not known
  size_t capacity;              // bytes of blocks with rows apart, in one exchange and direction; an all_gather's are all ranks'. 0: none
  double timeout;               // seconds: of creation, of leaving, and the first value of the comm's
} rm_nccl_options;

// Every rank of `host` calls it. `host` and `device` are views, used by the thread that uses the new one, which has entered the device;
// device->stream is a CUDA stream. The strings may go. The group is made, and proved by an exchange in which each rank tells each a word.
//
//   RM_E_CONFIG          no library, an old one, or one that does not allow two ranks on a GPU; on the other ranks too, with the rank
//   RM_E_MESH_MISMATCH   ranks have NCCL of different versions
//   RM_E_CAPACITY        capacity does not fit the device
//   RM_E_DEVICE          CUDA failed: no driver, or no such GPU
//   RM_E_COLLECTIVE_TIMEOUT, RM_E_RANK_LOST
//
// `host` lives on where the ranks did not get as far as NCCL's own part: no library, an old one, another, no room. Else it is dead.
rm_code rm_comm_create_nccl(rm_comm *host, const rm_device *device, const rm_nccl_options *options, rm_comm **out, rm_error *err);
