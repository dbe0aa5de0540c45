// simt_devices.cpp: see simt_inside.h. The devices of the machine, from the environment, and the
// current device of a thread: the runtime's and the driver's.
#include "simt_inside.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using namespace simt_inside;

static thread_local cudaError_t last; // until it is asked for

namespace simt_inside {

long from_environment(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text && *text ? atol(text) : otherwise;
}

cudaError_t said(cudaError_t error) {
  if (error != cudaSuccess) last = error;
  return error;
}

int architecture_of(int ordinal) {
  const char *text = getenv("ROLLMESH_SIMT_SM");
  std::vector<int> list;
  for (char *end; text && *text; text = *end ? end + 1 : end)
    list.push_back(static_cast<int>(strtol(text, &end, 10)));
  return list.empty() ? 90 : list[static_cast<size_t>(ordinal) % list.size()];
}

cudaError_t ready() {
  if (simt_stream *s = forbidding()) return forbid(s);
  devices[current_context = current_device].has_context = true;
  return devices[current_device].sticky;
}

} // namespace simt_inside

const char *cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorDeviceUninitialized: return "invalid device context";
    case cudaErrorMapBufferObjectFailed: return "mapping of buffer object failed";
    case cudaErrorAlreadyMapped: return "resource already mapped";
    case cudaErrorInvalidDeviceFunction: return "invalid device function";
    case cudaErrorInsufficientDriver:
      return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNoKernelImageForDevice:
      return "no kernel image is available for execution on the device";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorIllegalState: return "the operation cannot be performed in the present state";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorPeerAccessAlreadyEnabled: return "peer access is already enabled";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureWrongThread:
      return "attempt to terminate a thread-local capture sequence from another thread";
    case cudaErrorCapturedEvent:
      return "operation not permitted on an event last recorded in a capturing stream";
  }
  return "unrecognized error code";
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last;
  last = cudaSuccess;
  return error;
}

cudaError_t cudaDriverGetVersion(int *version) {
  *version = static_cast<int>(from_environment("ROLLMESH_SIMT_DRIVER", 13000));
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *n) {
  *n = 0;
  if (from_environment("ROLLMESH_SIMT_DRIVER", 13000) < 13000)
    return said(cudaErrorInsufficientDriver);
  *n = static_cast<int>(
      std::min(from_environment("ROLLMESH_SIMT_DEVICES", 8), static_cast<long>(MAX_DEVICES)));
  return said(*n > 0 ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *ordinal) {
  *ordinal = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int ordinal) {
  int n = 0;
  if (cudaGetDeviceCount(&n) != cudaSuccess || ordinal < 0 || ordinal >= n)
    return said(cudaErrorInvalidDevice);
  const locked hold(lock);
  current_device = current_context = ordinal;
  devices[ordinal].has_context = true;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int ordinal) {
  const int architecture = architecture_of(ordinal);
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? architecture / 10 : architecture % 10;
  if (attribute == cudaDevAttrMultiProcessorCount)
    *value = static_cast<int>(from_environment("ROLLMESH_SIMT_PROCESSORS", 132));
  return cudaSuccess;
}

static int get_context(void **context) {
  *context = current_context < 0 ? nullptr : &devices[current_context];
  return 0;
}

static int set_context(void *context) {
  if (context) return cudaErrorInvalidValue;
  current_context = -1;
  return 0;
}

static int address_range(unsigned long long *base, size_t *bytes, unsigned long long address) {
  const locked hold(lock);
  const void *at = reinterpret_cast<const void *>(address);
  const block *b = block_of(at);
  if (!b || b->owner == HOST || !is_inside(b, at, 1)) return cudaErrorInvalidValue;
  *base = reinterpret_cast<uintptr_t>(b->data), *bytes = b->bytes;
  return 0;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **entry, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult *found) {
  *entry = !strcmp(name, "cuCtxGetCurrent")        ? reinterpret_cast<void *>(get_context)
           : !strcmp(name, "cuCtxSetCurrent")      ? reinterpret_cast<void *>(set_context)
           : !strcmp(name, "cuMemGetAddressRange") ? reinterpret_cast<void *>(address_range)
                                                   : nullptr;
  *found = *entry ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// For tests: a bit for each device that has a context.
extern "C" __attribute__((visibility("default"))) uint64_t simt_contexts() {
  const locked hold(lock);
  uint64_t bits = 0;
  for (int i = 0; i < MAX_DEVICES; i++) bits |= static_cast<uint64_t>(devices[i].has_context) << i;
  return bits;
}

// For tests: the number of requests of each kind so far.
extern "C" __attribute__((visibility("default"))) void simt_made(uint64_t counts[N_KINDS]) {
  std::copy(std::begin(n_made), std::end(n_made), counts);
}

// For tests: sets and reads the last error of a failed call by another library.
extern "C" __attribute__((visibility("default"))) void simt_leave_error() {
  said(cudaErrorInvalidValue);
}
extern "C" __attribute__((visibility("default"))) int simt_left_error() {
  return static_cast<int>(last);
}

// For tests that act as another library of the process with a separate runtime: the thread's
// device, the owner of a stream, and cudaStreamWaitEvent for all the work that `awaited` has
// received so far.
extern "C" __attribute__((visibility("default"))) int simt_current_device() {
  return current_context < 0 ? 0 : current_context;
}

extern "C" __attribute__((visibility("default"))) int simt_stream_device(void *stream) {
  return static_cast<cudaStream_t>(stream)->owner;
}

extern "C" __attribute__((visibility("default"))) void simt_stream_await(void *stream,
                                                                         void *awaited) {
  const locked hold(lock);
  const cudaStream_t other = static_cast<cudaStream_t>(awaited);
  enqueue(static_cast<cudaStream_t>(stream), {.awaited = other, .place = other->n_enqueued});
}
