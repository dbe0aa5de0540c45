// cuda.h: the CUDA devices of this machine. librollmesh_cuda.so (kernels/cuda/rm_cuda.h) is loaded
// at the first call and stays loaded.
#pragma once

#include "device/devices.h"

// Opens a device. `library`: path of librollmesh_cuda.so. `family`: the op table, "cuda_fma" or
// "cuda_mma"; NULL: the first. *out is owned, to be closed; its table's name includes the
// architecture. RM_E_CONFIG: no such library, device or family, or no code for this device;
// RM_E_CAPACITY: no device memory for a context; RM_E_DEVICE: CUDA's message.
rm_code rm_cuda_device(const char *library, int ordinal, const char *family, rm_device *out,
                       rm_error *err);
// Sets *out to the table of a family, a view for the life of the process. RM_E_CONFIG as above.
rm_code rm_cuda_kernels(const char *library, const char *family, const rm_kernels **out,
                        rm_error *err);
// CUDA IPC loans (rm_cuda.h), on an open device. The owner's process calls make. The reader's
// process calls ordinal, then open, which sets block and bytes, and close after all reads.
// RM_E_UNSUPPORTED_TENSOR: the allocation around `address` cannot be lent; RM_E_CONFIG: the bus id
// is not that of a visible device; RM_E_DEVICE: the handle cannot be opened.
rm_code rm_cuda_make_loan(const char *library, const rm_device *device, const void *address,
                          rm_device_loan *out, rm_error *err);
rm_code rm_cuda_ordinal(const char *library, const char *bus, int *ordinal, rm_error *err);
rm_code rm_cuda_open_loan(const char *library, const rm_device *device, rm_device_loan *loan,
                          rm_error *err);
rm_code rm_cuda_close_loan(const char *library, const rm_device *device, void *block,
                           rm_error *err);
// Writes the PCI bus id of a device, which is the same in every process of the machine.
rm_code rm_cuda_bus_id(const char *library, int ordinal, char id[32], rm_error *err);
// *count: visible devices; −1: no driver; −2: the driver is older than the library's CUDA.
rm_code rm_cuda_count(const char *library, int *count, rm_error *err);
