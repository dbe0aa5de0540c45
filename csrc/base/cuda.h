// cuda.h: the CUDA devices of this machine, by way of librollmesh_cuda.so (kernels/cuda/rm_cuda.h), which is loaded when the first one is
// opened and stays.
#pragma once

#include "base/devices.h"

// `library`: its path; `ordinal`: which device; `family`: which table of ops, "cuda_fma" or "cuda_mma", NULL: the first. RM_E_CONFIG: no
// such library, device or family, or a device that the library has no code for; RM_E_DEVICE: CUDA's own words. The device is the
// caller's, to be closed.
rm_code rm_cuda_device(const char *library, int ordinal, const char *family, rm_device *out, rm_error *err);
// Devices that the driver shows, −1 where there is no driver.
rm_code rm_cuda_count(const char *library, int *count, rm_error *err);
