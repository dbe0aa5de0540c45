// staged.h: a transport for device memory over any host group (threads, shm, torch): copies blocks
// to the host, exchanges them there and copies them back. It works without NCCL and is the baseline
// for measurements of NCCL. Every call waits for the device and for the other ranks, so a graph
// cannot capture it.
//
//   rm_comm *tp;                                         // its blocks are device memory
//   rm_comm_create_staged(host, device, 64 << 20, &tp, &err);
//   rm_comm_exchange(tp, …); rm_comm_wait(&tp, 1, device, RM_WAIT_QUEUE, seconds, &err);
//   rm_comm_destroy(tp);    // before the host group and the device are destroyed
#pragma once

#include "comm/comm.h"

// `host` and `device` are views, used by the thread that uses the new comm and has entered the
// device. The ranks may also call `host` between calls of the new comm, all at the same places. The
// host group sends the headers and finds the errors; an error ends both groups. An exchange sends
// at most `capacity` bytes and receives at most `capacity` (an all_gather sends its block once);
// more is RM_E_CAPACITY and ends the group. Takes 2 · capacity of device memory and of host memory.
rm_code rm_comm_create_staged(rm_comm *host, const rm_device *device, size_t capacity,
                              rm_comm **out, rm_error *err);
