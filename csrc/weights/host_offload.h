// host_offload.h: what a block of a device's memory holds, in the host's instead: sleep takes it there, wake brings it back.
//
// The copy is ordinary memory. To pin that much takes longer than to copy it, and pinned it could not be paged out while nobody wants
// it. So both ways go through two pinned halves: while the device copies one, the threads copy the other.
#pragma once

#include "device/devices.h"

// Neither changes the block that it copies from. What is enqueued has been waited for, whatever comes of it.
// RM_E_CAPACITY: the host has not as much left; RM_E_MEMORY: it did not give it; RM_E_DEVICE. *copy: owned, rm_unmap.
rm_code rm_keep_block(const rm_device *device, const char *block, size_t bytes, const rm_ctx *ctx, char **copy, rm_error *err);
// A new block with what was kept. RM_E_CAPACITY: the device has not as much left. *block: owned, rm_device_unmap.
rm_code rm_restore_block(const rm_device *device, const char *copy, size_t bytes, const rm_ctx *ctx, char **block, rm_error *err);
