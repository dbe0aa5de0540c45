// nccl.h: a transport for GPU memory by NVIDIA's NCCL, over NVLink, PCIe or a network. Each rank
// needs its own GPU; ranks may share one with NCCL 2.30.3 or later and
// NCCL_MULTI_RANK_GPU_ENABLE=1 set before the first group is created.
//
// A call packs strided blocks, enqueues one NCCL group of sends and receives, and unpacks. It does
// not wait for the device, so graphs can capture it; all ranks capture and replay the same calls.
// It sends no headers: ranks that disagree hang until rm_comm_wait's deadline, unless
// rm_comm_compare finds the difference first.
//
// NCCL detects a lost peer only on some networks. So each NCCL group has a host group of the same
// ranks, which rm_comm_wait checks: it reports at once which rank's process has ended or which rank
// has aborted. A failure of either group ends both, and the work in the queue.
//
//   rm_comm *tp;
//   rm_comm_create_nccl(host, device, &options, &tp, &err);
//   rm_comm_exchange(tp, …); …                           // all calls of a step
//   rm_comm_compare(tp, host, &err);                     // once a step
//   rm_comm_wait(&tp, 1, device, RM_WAIT_QUEUE, seconds, &err);
//   rm_comm_destroy(tp);    // after a wait; before the host group and the device are destroyed
#pragma once

#include "comm/comm.h"

typedef struct rm_nccl_options {
  const char *library; // path of libnccl.so.2; loaded at the first group
  // The most bytes of strided blocks in one exchange and direction; an all_gather counts the blocks
  // of all ranks. 0: only contiguous blocks.
  size_t capacity;
  double timeout; // seconds, for creation and leaving; the comm's timeout starts with it
} rm_nccl_options;

// Called by every rank of `host`. `host` and `device` are views, used by the thread that uses the
// new comm and has entered the device; device->stream is a CUDA stream. The strings are copied or
// not kept. Tests the new group with an exchange before it returns.
//
//   RM_E_CONFIG          no library, or an old one; the other ranks return the error too, with this
//                        rank's number
//   RM_E_CAPACITY        capacity does not fit the device
//   RM_E_DEVICE          CUDA failed: no driver, or no such GPU
//   RM_E_COLLECTIVE_TIMEOUT, RM_E_RANK_LOST
//
// On failure `host` stays usable if NCCL itself was not reached (no library, a wrong version, no
// memory), and is dead otherwise.
rm_code rm_comm_create_nccl(rm_comm *host, const rm_device *device, const rm_nccl_options *options,
                            rm_comm **out, rm_error *err);
