// staged.h: a transport for device memory over any host group (threads, shm, torch): copies blocks
// to the host, exchanges them there, copies them back. It needs nothing but the device, so it works
// without NCCL, and NCCL is measured against it. Every call waits for the device and for the other
// ranks, so a graph cannot capture it.
//
//   rm_comm *tp;                                         // its blocks are device memory
//   rm_comm_create_staged(host, device, 64 << 20, &tp, &err);
//   rm_comm_exchange(tp, …); rm_comm_wait(&tp, 1, device, seconds, &err);
//   rm_comm_destroy(tp);                                 // before the host group, and before the
//                                                        device is closed
#pragma once

#include "comm/comm.h"

// `host` and `device` are views, used by the thread that uses the new comm and has entered the
// device. Calls of `host` may come between those of the new comm, at the same places on all ranks.
// Headers and errors are the host group's; an error ends both groups. An exchange sends at most
// `capacity` bytes and receives as many (an all_gather sends its block once); more is RM_E_CAPACITY
// and ends the group. Takes 2 · capacity of device memory and of host memory.
rm_code rm_comm_create_staged(rm_comm *host, const rm_device *device, size_t capacity,
                              rm_comm **out, rm_error *err);
