// cuda.h: the CUDA devices of this machine, by way of librollmesh_cuda.so (kernels/cuda/rm_cuda.h), which is loaded when the first one is
// opened and stays.
#pragma once

#include "device/devices.h"

// `library`: its path; `ordinal`: which device; `family`: which table of ops, "cuda_fma" or "cuda_mma", NULL: the first; the device's own
// table names its architecture too. RM_E_CONFIG: no such library, device or family, or a device that the library has no code for;
// RM_E_CAPACITY: no memory there for its context; RM_E_DEVICE: CUDA's own words. The device is the caller's, to be closed.
rm_code rm_cuda_device(const char *library, int ordinal, const char *family, rm_device *out, rm_error *err);
// A table of the library's by its family, NULL: the first; a view that lasts. RM_E_CONFIG as above.
rm_code rm_cuda_kernels(const char *library, const char *family, const rm_kernels **out, rm_error *err);
// Memory between processes (rm_cuda.h), on a device that is open. RM_E_UNSUPPORTED_TENSOR: the allocation around `address` cannot be
// lent; RM_E_CONFIG: no device here has the bus id; RM_E_DEVICE: the handle cannot be opened.
rm_code rm_cuda_loan(const char *library, const rm_device *device, const void *address, rm_device_loan *out, rm_error *err);
rm_code rm_cuda_ordinal(const char *library, const char *bus, int *ordinal, rm_error *err);
rm_code rm_cuda_borrowed(const char *library, const rm_device *device, rm_device_loan *loan, rm_error *err);
rm_code rm_cuda_given_back(const char *library, const rm_device *device, void *block, rm_error *err);
// The PCI bus id of a device: one name in every process of the machine.
rm_code rm_cuda_bus_id(const char *library, int ordinal, char id[32], rm_error *err);
// Devices that the driver shows, −1 where there is no driver, −2 where it is older than the library's CUDA.
rm_code rm_cuda_count(const char *library, int *count, rm_error *err);
