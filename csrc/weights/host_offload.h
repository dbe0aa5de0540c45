// host_offload.h: copies a block of device memory to the host (sleep) and back (wake).
//
// The host copy is pageable: pinning all of it would take longer than the copy, and pinned memory
// cannot be swapped out while the trainer uses the GPU. Both directions use two pinned halves: the
// device copies one while the threads copy the other.
#pragma once

#include "device/devices.h"

// Both functions leave their source unchanged. They return when the device is done, on failure too.
// *copy: owned by the caller, who frees it with rm_unmap. RM_E_CAPACITY: too little host memory is
// available; RM_E_MEMORY: it could not be mapped; RM_E_DEVICE.
rm_code rm_offload_block(const rm_device *device, const char *block, size_t bytes,
                         const rm_ctx *ctx, char **copy, rm_error *err);
// *block: new, owned by the caller, who frees it with rm_device_free. RM_E_CAPACITY: the device has
// too little free memory.
rm_code rm_restore_block(const rm_device *device, const char *copy, size_t bytes, const rm_ctx *ctx,
                         char **block, rm_error *err);
