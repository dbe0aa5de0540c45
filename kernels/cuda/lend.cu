// lend.cu: a device's memory for another process: the handle that CUDA gives of an allocation, and
// what one opens. Memory that was not allocated whole (cuMemCreate: torch's expandable segments;
// cudaMallocAsync) has no such handle, and CUDA says so as an invalid argument. Passing file
// descriptors of it was rejected: they need a socket, and the trainer's allocator must have asked
// for them before.
#include "rm_cuda.h"

#include <cstdio>
#include <cstring>

#include "device.cuh"

namespace {

// NULL, or the call and CUDA's words for what it said; its last error is not to be found again.
const char *refusal(const char *call, cudaError_t error) {
  static thread_local char why[200];
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();
  snprintf(why, sizeof why, "%s: %s", call, cudaGetErrorString(error));
  return why;
}

// The allocation around an address of the current device's memory.
const char *range_of(const void *address, char **base, size_t *bytes) {
  using range_call = int (*)(unsigned long long *base, size_t *bytes, unsigned long long address);
  void *entry = nullptr;
  unsigned long long start = 0;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &entry, 12000,
                                                             cudaEnableDefault, &found);
  if (error != cudaSuccess) cudaGetLastError(); // or it were found again behind the next launch
  if (error != cudaSuccess || !entry) return "the driver has no cuMemGetAddressRange";
  if (reinterpret_cast<range_call>(entry)(&start, bytes, reinterpret_cast<uintptr_t>(address)) != 0)
    return "it is in no allocation";
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
