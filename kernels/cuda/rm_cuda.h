// rm_cuda.h: the functions of librollmesh_cuda.so, which contains everything that needs CUDA and is
// loaded only when a GPU is used.
//
// The library contains its own CUDA runtime and loads the driver at the first call that needs it,
// so loading it needs no GPU. The caller owns the device, its memory and its streams; ctx->stream
// and every pointer may come from another runtime of the same process (torch's), since all share
// the device's primary context. An op enqueues on ctx->stream and returns; it does not allocate or
// wait. rm_cuda_error reports a failed launch; a fault of a kernel is reported when the stream is
// synchronized.
#pragma once

#include "device.h"
#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

// No function of the table is NULL.
const rm_kernels *rm_kernels_cuda(void);
// The same with bf16 on tensor cores: other sums, and another layout of packed weights and caches
// (packing.cuh) with the same size.
const rm_kernels *rm_kernels_cuda_mma(void);
// The architectures compiled in: "sm_90a", separated by commas.
const char *rm_cuda_archs(void);
// The calling thread's last CUDA error since the last call, as text; NULL: none.
const char *rm_cuda_error(void);
// The number of visible devices; −1: no driver; −2: the driver is older than the library's CUDA.
int rm_cuda_devices(void);

// Opens a device with a new stream and one of the library's tables (NULL: the first). Its copy of
// the table names the architecture: isa "cuda_sm90", and family "cuda_mma_sm90" where bits depend
// on it. `why`: the reason of a failure. Closed by out->close.
rm_device_opened rm_cuda_open(int ordinal, const rm_kernels *kernels, rm_device *out,
                              char why[256]);

// CUDA IPC. The device is the thread's current one (rm_device.enter). These return NULL, or the
// reason of a failure, valid until the thread's next call. The lender keeps the allocation until
// all borrowers have returned it. A process opens a handle once, and not its own. Lends the
// allocation that contains `address`.
const char *rm_cuda_lend(int ordinal, const void *address, rm_device_loan *out);
// The PCI bus id of a device, the same in every process of the machine, and the device here with a
// given bus id.
const char *rm_cuda_bus(int ordinal, char *id, int room);
const char *rm_cuda_find(const char *device, int *ordinal);
// Sets block and bytes from the handle.
const char *rm_cuda_borrow(rm_device_loan *loan);
const char *rm_cuda_give_back(void *block); // after all reads

#ifdef __cplusplus
}
#endif
