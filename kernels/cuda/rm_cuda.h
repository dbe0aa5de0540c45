// rm_cuda.h: the one door of librollmesh_cuda.so, which holds everything that needs CUDA and is loaded only when a GPU is used.
//
// The library carries its own CUDA runtime and finds the driver at the first call that needs it, so loading it needs no GPU. The
// caller owns the device, its memory and its streams; ctx->stream and every pointer may come from another runtime of the same
// process (torch's), since all share the device's primary context. An op enqueues on ctx->stream and returns: nothing is allocated
// and nothing waited for. A launch that failed is seen by rm_cuda_error, a fault of a kernel when the stream is synchronised.
#pragma once

#include "device.h"
#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

// Every slot is there. Which engine may run on it is not decided here.
const rm_kernels *rm_kernels_cuda(void);
// The same with bf16 on tensor cores: other sums, and packed weights and caches that lie otherwise (packing.cuh) in as many bytes.
const rm_kernels *rm_kernels_cuda_mma(void);
// The architectures compiled in: "sm_90a", separated by commas.
const char *rm_cuda_archs(void);
// The calling thread's last CUDA error since the last call, as text; NULL: none.
const char *rm_cuda_error(void);
// Devices that the driver shows, −1 where there is no driver, −2 where it is older than the library's CUDA.
int rm_cuda_devices(void);

// Opens one of them with a stream of its own, and one of the library's tables, NULL: the first. Its own copy of that says which
// architecture it is: "cuda_sm90", and where the bits may be that one's alone, "cuda_mma_sm90". `why` says in text why not. The device
// is closed by its own `close`.
rm_device_opened rm_cuda_open(int ordinal, const rm_kernels *kernels, rm_device *out, char why[256]);

// Memory between processes. The device is the thread's current one (rm_device.enter); NULL, or why not, as text that is valid until the
// thread's next call. Whoever lends keeps the allocation until all have given it back. A process opens a handle once, and none of its
// own.
// The allocation that has `address`.
const char *rm_cuda_lend(int ordinal, const void *address, rm_device_loan *out);
// Its PCI bus id, which is the device's in every process of the machine: NULL, or why not. And which device here has that one.
const char *rm_cuda_bus(int ordinal, char *id, int room);
const char *rm_cuda_find(const char *device, int *ordinal);
// Fills in block and bytes from the handle.
const char *rm_cuda_borrow(rm_device_loan *loan);
const char *rm_cuda_give_back(void *block);   // nothing reads it any more

#ifdef __cplusplus
}
#endif
