// simt_runtime.h: the calls of the CUDA runtime that kernels/cuda makes, by their own names, on the
// shim: memory, streams, events, graphs. It is as strict as a GPU is at its slowest:
//   - what is enqueued is done when something waits for it, on the thread that waits, and not
//     before: arguments are kept by value, pinned memory is read and written then. cudaStreamQuery
//     and cudaEventQuery do one step. Copies of memory that is not pinned drain the stream.
//   - the host cannot touch a device's memory, and no device another's but by peer copies; a block
//     has pages that nobody may touch on both ends, and the bytes between those and its own are
//     looked at after each drain. A fault is a message and exit status 3, in any program.
//   - what another process opens (cudaIpcOpenMemHandle) is a file of memory that both map. A
//     process opens it once, and not its own; memory that is freed while another has it open is a
//     fault.
//   - fresh memory holds 0xff, also that of the host.
//   - a kernel that is launched for a stream before the stream's device has loaded it
//     (cudaFuncGetAttributes) is a fault: a GPU loads it then, and waits for whatever runs.
//   - a thread that captures can allocate, give back and ask nothing meanwhile, nor can any while
//     another captures in global mode, but for those in a mode that lets them
//     (cudaThreadExchangeStreamCaptureMode). Who tries has made the capture invalid.
//   - the default streams (1 and 2) have nothing enqueued, and what they are to wait for is done at
//     once.
// Threads may use it at once, as CUDA says; work is done by one at a time. A stream takes the work
// of a stand-in for NCCL too (tests/support/native/standin/stream.h), which may take until another
// rank comes: meanwhile nothing is locked, and what stands before it is done some milliseconds
// later though nobody waits.
//
// The environment, read when it is needed:
//   ROLLMESH_SIMT_DEVICES=n      devices to show (8)
//   ROLLMESH_SIMT_DRIVER=13000   the version of CUDA that the driver is for; 0: there is none
//   ROLLMESH_SIMT_FIRST=n        which of the machine's is the first of them (0): the others have
//                                other numbers in other processes
//   ROLLMESH_SIMT_MEMORY=bytes   of each of them (1 GiB); with 0 there is not even room for a
//                                stream
//   ROLLMESH_SIMT_SM=90          their architecture, or that of each by turns (90,80): kernels have
//                                code for 90 and 80
//   ROLLMESH_SIMT_PROCESSORS=n   their multiprocessors (132)
//   ROLLMESH_SIMT_FAULT=n        the n-th launch done for a stream fails, and its device with it
//                                until its last stream is gone
//   ROLLMESH_SIMT_STICKY=1       and then until the process ends, as a GPU's context does
//   ROLLMESH_SIMT_GRAPHS=n       a process's graphs at once; there is no memory for more (no limit)
//   ROLLMESH_SIMT_SPOIL=n[,d]    the n-th work that a stream (of device d) is given while it is
//                                captured finds the capture invalid, as behind another thread's
//                                wait for the whole device
//   ROLLMESH_SIMT_EAGER=1        everything is done when it is enqueued: as strict as a GPU at its
//                                fastest
//   ROLLMESH_SIMT_REVERSED=1     threads in descending order
#pragma once

#include <cstddef>

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorDeviceUninitialized = 201,
  cudaErrorMapBufferObjectFailed = 205,
  cudaErrorAlreadyMapped = 208,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorIllegalState = 401,
  cudaErrorNotReady = 600,
  cudaErrorIllegalAddress = 700,
  cudaErrorPeerAccessAlreadyEnabled = 704,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureInvalidated = 901,
  cudaErrorStreamCaptureWrongThread = 908,
  cudaErrorCapturedEvent = 907,
};
enum cudaMemcpyKind {
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3
};
enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone = 0,
  cudaStreamCaptureStatusActive = 1,
  cudaStreamCaptureStatusInvalidated = 2
};
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal = 0,
  cudaStreamCaptureModeThreadLocal = 1,
  cudaStreamCaptureModeRelaxed = 2
};
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1
};
enum cudaMemoryType {
  cudaMemoryTypeUnregistered = 0,
  cudaMemoryTypeHost = 1,
  cudaMemoryTypeDevice = 2,
  cudaMemoryTypeManaged = 3
};
enum {
  cudaHostAllocPortable = 1,
  cudaStreamNonBlocking = 1,
  cudaEventDisableTiming = 2,
  cudaEnableDefault = 0,
  cudaIpcMemLazyEnablePeerAccess = 1
};

using cudaStream_t = struct simt_stream *;
using cudaEvent_t = struct simt_event *;
using cudaGraph_t = struct simt_graph *;
using cudaGraphExec_t = struct simt_graph_exec *;
struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
};
struct cudaFuncAttributes {
  int binaryVersion;
};

const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();

cudaError_t cudaGetDeviceCount(int *n);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaGetDevice(int *ordinal);
cudaError_t cudaSetDevice(int ordinal);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int ordinal);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *kernel);
// Shared memory that a kernel may have on a device, without asking and at most: what the smallest
// of the cards has (sm_86, sm_89).
enum { SIMT_SHARED_UNASKED = 48 << 10, SIMT_SHARED_MOST = 99 << 10 };
cudaError_t simt_allow_shared(const void *function, int bytes); // on the current device
template <class T> cudaError_t cudaFuncSetAttribute(T *function, cudaFuncAttribute, int bytes) {
  return simt_allow_shared(reinterpret_cast<const void *>(function), bytes);
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **entry, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult *found);

cudaError_t cudaMalloc(void **block, size_t bytes);
cudaError_t cudaFree(void *block);
cudaError_t cudaHostAlloc(void **block, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void *block);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *address);
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *all_bytes);

struct cudaIpcMemHandle_t {
  char reserved[64];
};
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *block);
cudaError_t cudaIpcOpenMemHandle(void **block, cudaIpcMemHandle_t handle, unsigned flags);
cudaError_t cudaIpcCloseMemHandle(void *block);
cudaError_t cudaDeviceGetPCIBusId(char *id, int room, int ordinal);
cudaError_t cudaDeviceGetByPCIBusId(int *ordinal, const char *id);

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                size_t bytes, cudaStream_t stream);
struct cudaPitchedPtr {
  void *ptr;
  size_t pitch, xsize, ysize;
};
struct cudaExtent {
  size_t width, height, depth;
};
struct cudaMemcpy3DPeerParms {
  int srcDevice, dstDevice;
  cudaPitchedPtr srcPtr, dstPtr;
  cudaExtent extent;
};
inline cudaPitchedPtr make_cudaPitchedPtr(void *ptr, size_t pitch, size_t xsize, size_t ysize) {
  return {ptr, pitch, xsize, ysize};
}
inline cudaExtent make_cudaExtent(size_t width, size_t height, size_t depth) {
  return {width, height, depth};
}
cudaError_t cudaMemcpy3DPeerAsync(const cudaMemcpy3DPeerParms *run, cudaStream_t stream);
cudaError_t cudaDeviceCanAccessPeer(int *can, int ordinal, int peer);
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags); // of the current device
cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t stream);

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status);
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *ordinal);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t graph,
                                 unsigned long long flags);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphUpload(cudaGraphExec_t made, cudaStream_t stream);
cudaError_t cudaGraphLaunch(cudaGraphExec_t made, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t made);
