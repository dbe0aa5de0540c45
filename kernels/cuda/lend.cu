// lend.cu: lends a device's memory to another process: gets CUDA's handle of an allocation, and
// opens such a handle. Memory from cuMemCreate (torch's expandable segments) or cudaMallocAsync
// does not have one, and CUDA returns "invalid argument". Rejected: passing file descriptors of
// such memory, because that needs a socket, and the trainer's allocator must have requested them at
// allocation.
#include "rm_cuda.h"

#include <cstdio>
#include <cstring>

#include "device.cuh"

namespace {

// Returns NULL, or the call and CUDA's message. Clears the error, so that later calls do not find
// it.
const char *refusal(const char *call, cudaError_t error) {
  static thread_local char why[200];
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();
  snprintf(why, sizeof why, "%s: %s", call, cudaGetErrorString(error));
  return why;
}

// Finds the allocation that contains an address of the current device's memory.
const char *range_of(const void *address, char **base, size_t *bytes) {
  using range = int(unsigned long long *base, size_t *bytes, unsigned long long address);
  unsigned long long start = 0;
  range *const range_at = rm_cuda_driver<range>("cuMemGetAddressRange");
  if (!range_at) return "the driver has no cuMemGetAddressRange";
  if (range_at(&start, bytes, reinterpret_cast<uintptr_t>(address)) != 0)
    return "its address is not in an allocation";
  *base = reinterpret_cast<char *>(start);
  return nullptr;
}

} // namespace

RM_EXPORT const char *rm_cuda_lend(int ordinal, const void *address, rm_device_loan *out) {
  cudaIpcMemHandle_t handle;
  static_assert(sizeof handle == sizeof out->handle, "CUDA's handles have 64 bytes");
  char *base = nullptr;
  *out = {};
  const char *why = range_of(address, &base, &out->bytes);
  if (!why) why = refusal("cudaIpcGetMemHandle", cudaIpcGetMemHandle(&handle, base));
  if (!why) why = rm_cuda_bus(ordinal, out->device, static_cast<int>(sizeof out->device));
  if (why) return why;
  memcpy(out->handle, &handle, sizeof handle);
  out->block = base;
  return nullptr;
}

RM_EXPORT const char *rm_cuda_bus(int ordinal, char *id, int room) {
  return refusal("cudaDeviceGetPCIBusId", cudaDeviceGetPCIBusId(id, room, ordinal));
}

RM_EXPORT const char *rm_cuda_find(const char *device, int *ordinal) {
  return refusal("cudaDeviceGetByPCIBusId", cudaDeviceGetByPCIBusId(ordinal, device));
}

RM_EXPORT const char *rm_cuda_borrow(rm_device_loan *loan) {
  cudaIpcMemHandle_t handle;
  void *block = nullptr;
  char *base = nullptr;
  memcpy(&handle, loan->handle, sizeof handle);
  const char *why = refusal("cudaIpcOpenMemHandle",
                            cudaIpcOpenMemHandle(&block, handle, cudaIpcMemLazyEnablePeerAccess));
  if (why) return why;
  why = range_of(block, &base, &loan->bytes);
  if (why) cudaIpcCloseMemHandle(block);
  else loan->block = block;
  return why;
}

RM_EXPORT const char *rm_cuda_give_back(void *block) {
  return refusal("cudaIpcCloseMemHandle", cudaIpcCloseMemHandle(block));
}
