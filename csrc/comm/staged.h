// staged.h: a transport for blocks in a device's memory over any group of the host: threads, shm, torch. Blocks are copied to the host,
// exchanged there, and copied back. It needs nothing but what a device has anyway, so it runs where NCCL does not, and it is what NCCL
// is measured against. Every call waits for the device once and for the other ranks: nothing of it can be recorded.
//
//   rm_comm *tp;                                         // blocks are of the device's memory
//   rm_comm_create_staged(host, device, 64 << 20, &tp, &err);
//   rm_comm_exchange(tp, …); rm_comm_wait(&tp, 1, device, seconds, &err);
//   rm_comm_destroy(tp);                                 // before the host's, and before the device is closed
#pragma once

#include "comm/comm.h"

// `host` and `device` are views, used by the thread that uses the new one, which has entered the device; calls of `host` may stand
// between those of the new one, on all ranks at the same places. Headers and errors are the host's, whose epoch and deadline each call
// sets: a failure of one is the end of both. One exchange may send `capacity` bytes and receive as many; an all_gather sends its block
// once. More is RM_E_CAPACITY, which names both numbers and ends the group. Takes twice `capacity` of the device's memory and of the
// host's.
rm_code rm_comm_create_staged(rm_comm *host, const rm_device *device, size_t capacity, rm_comm **out, rm_error *err);
