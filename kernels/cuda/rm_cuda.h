// rm_cuda.h: the functions of librollmesh_cuda.so, which contains everything that needs CUDA and is
// loaded only when a GPU is used.
//
// The library contains its own CUDA runtime and loads the driver at the first call that needs it,
// so loading it does not require a GPU. The caller owns the device, its memory and its streams;
// ctx->stream and every pointer may come from another runtime of the same process (torch's), since
// all share the device's primary context. An op enqueues on ctx->stream and returns; it does not
// allocate or wait. rm_cuda_error returns a failed launch; synchronizing the stream returns a fault
// of a kernel. Any thread may call these functions.
#pragma once

#include "device.h"
#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

// The table of the family cuda_fma.
const rm_kernels *rm_kernels_cuda(void);
// The table of the family cuda_mma: bf16 on tensor cores, with another order of sums and another
// layout of packed weights and caches (packing.cuh), of the same size.
const rm_kernels *rm_kernels_cuda_mma(void);
// The architectures compiled in: "sm_90a", separated by commas.
const char *rm_cuda_archs(void);
// The calling thread's last CUDA error since the previous call, as text; NULL: none.
const char *rm_cuda_error(void);
// The number of visible devices; −1: no driver; −2: the driver is older than the library's CUDA.
int rm_cuda_devices(void);

// Opens a device with a new stream and one of the library's tables (NULL: cuda_fma's). Its copy of
// the table names the architecture: isa "cuda_sm90", and family "cuda_mma_sm90" if results depend
// on it. why, out: the reason for a failure. out->close closes the device.
rm_device_opened rm_cuda_open(int ordinal, const rm_kernels *kernels, rm_device *out,
                              char why[256]);

// CUDA IPC. The device is the thread's current one (rm_device.enter). These return NULL, or the
// reason for a failure, valid until the thread's next call. The lender keeps the allocation until
// all borrowers have returned it. A process opens a handle at most once, and never its own handle.
// rm_cuda_lend lends the allocation that contains `address`.
const char *rm_cuda_lend(int ordinal, const void *address, rm_device_loan *out);
// The PCI bus id of a device, which is the same in every process of the machine, and the visible
// device with a given bus id.
const char *rm_cuda_bus(int ordinal, char *id, int room);
const char *rm_cuda_find(const char *device, int *ordinal);
// Sets block and bytes from the handle.
const char *rm_cuda_borrow(rm_device_loan *loan);
const char *rm_cuda_give_back(void *block); // after all reads

#ifdef __cplusplus
}
#endif
