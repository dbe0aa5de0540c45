// simt_runtime.h: the calls of the CUDA runtime that kernels/cuda makes, under their real names, on
// the shim: memory, streams, events, graphs. It is as strict as a GPU at its slowest:
//   - enqueued work runs when a thread waits for it, on the waiting thread, and not before:
//     arguments are kept by value, and pinned memory is read and written at that time.
//     cudaStreamQuery and cudaEventQuery run one step. Copies of unpinned memory drain the stream.
//   - the host cannot access a device's memory, and a device can access another's only by peer
//     copies. A block has inaccessible pages on both ends; the bytes between these pages and the
//     block are checked after each drain. A fault prints a message and exits with status 3, in any
//     program.
//   - memory that another process opens (cudaIpcOpenMemHandle) is a file that both map. A process
//     opens it once, and cannot open its own memory; freeing memory that another process has open
//     is a fault.
//   - fresh memory holds 0xff, on the host too.
//   - launching a kernel on a stream before the stream's device has loaded it
//     (cudaFuncGetAttributes) is a fault, because a GPU would load it then and wait for running
//     work.
//   - a capturing thread cannot allocate, free or query anything. The same holds for all threads
//     while a thread captures in global mode, except threads in a mode that allows it
//     (cudaThreadExchangeStreamCaptureMode). Such a call invalidates the capture.
//   - the default streams (1 and 2) run work immediately, including the work that they wait for.
// Several threads may call it at once, as in CUDA; one of them runs work at a time. A stream also
// runs the work of a stand-in for NCCL (tests/support/native/standin/stream.h), which may last
// until another rank comes: it holds no lock meanwhile, and the work before it runs some
// milliseconds later even if nobody waits.
//
// The environment, read when it is needed:
//   ROLLMESH_SIMT_DEVICES=n      the number of devices (8)
//   ROLLMESH_SIMT_DRIVER=13000   the CUDA version that the driver supports; 0: without a driver
//   ROLLMESH_SIMT_FIRST=n        the machine's number of the first device (0): the devices have
//                                other numbers in other processes
//   ROLLMESH_SIMT_MEMORY=bytes   memory of each device (1 GiB); with 0 not even a stream can be
//   made
//   ROLLMESH_SIMT_SM=90          their architecture, or alternating architectures (90,80): kernels
//                                have code for 90 and 80
//   ROLLMESH_SIMT_PROCESSORS=n   the number of their multiprocessors (132)
//   ROLLMESH_SIMT_FAULT=n        the n-th launch that runs on a stream fails, and all later work of
//                                its device until the device's last stream is destroyed
//   ROLLMESH_SIMT_STICKY=1       the device fails until the process ends, like a GPU's context
//   ROLLMESH_SIMT_GRAPHS=n       limit of a process's graphs; more fail for lack of memory (no
//   limit)
//   ROLLMESH_SIMT_SPOIL=n[,d]    the capture is invalid at the n-th work that is given to a
//   capturing
//                                stream (of device d), as after another thread's wait for the whole
//                                device
//   ROLLMESH_SIMT_EAGER=1        work runs when it is enqueued: as strict as a GPU at its fastest
//   ROLLMESH_SIMT_REVERSED=1     threads run in descending order
#pragma once

#include <cstddef>

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorDeviceUninitialized = 201,
  cudaErrorMapBufferObjectFailed = 205,
  cudaErrorAlreadyMapped = 208,
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
