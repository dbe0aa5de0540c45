// device.cu: an rm_device over the CUDA runtime, and the doors of rm_cuda.h that ask it.
//
// One stream of its own, which waits for no other (cudaStreamNonBlocking), and the device's primary context, which it shares with
// every other runtime of the process. A failed call kills the device unless it only lacked memory: what a call could not enqueue is
// missing from the queue, and CUDA itself gives up a context after a kernel's fault. Launches report to the thread's last error; each
// call that returns a status looks there first.
#include "rm_cuda.h"

#include <cstdio>
#include <new>

#include "device.cuh"

namespace {

struct cuda_device {
  int ordinal;
  bool dead;
  cudaStream_t stream;
  cudaEvent_t marks[RM_DEVICE_MARKS];
  bool is_marked[RM_DEVICE_MARKS];
  char name[24], message[200];
};

cuda_device *of(void *self) { return static_cast<cuda_device *>(self); }

// ------------------------------------------------------------------------------------------------ what went wrong
rm_device_status die(cuda_device *d, cudaError_t error, const char *call) {
  cudaGetLastError();  // the failed call's own: it is not to be found again
  if (!d->dead) snprintf(d->message, sizeof d->message, "%s: %s", call, cudaGetErrorString(error));
  d->dead = true;
  return RM_DEVICE_FAULT;
}

rm_device_status lacks(cuda_device *d, cudaError_t error, const char *call, size_t bytes) {
  char what[80];
  snprintf(what, sizeof what, "%s of %zu bytes", call, bytes);
  if (error != cudaErrorMemoryAllocation) return die(d, error, what);
  cudaGetLastError();
  snprintf(d->message, sizeof d->message, "%s: %s", what, cudaGetErrorString(error));
  return RM_DEVICE_NO_MEMORY;
}

// Asked before every call to the runtime, so that what ops have launched is blamed on nothing else.
bool is_alive(cuda_device *d) {
  if (d->dead) return false;
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) die(d, error, "a launch");
  return !d->dead;
}

rm_device_status done(cuda_device *d, cudaError_t error, const char *call) {
  return error == cudaSuccess ? RM_DEVICE_OK : die(d, error, call);
}

// Before something goes that the queue may hold; a device that died may still be at work.
void finish(cuda_device *d) {
  is_alive(d);
  done(d, cudaStreamSynchronize(d->stream), "cudaStreamSynchronize");
}

// ------------------------------------------------------------------------------------------------ memory
rm_device_status map(void *self, size_t bytes, void **out) {
  cuda_device *d = of(self);
  *out = nullptr;
  if (!is_alive(d)) return RM_DEVICE_FAULT;
  void *block = nullptr;
  cudaError_t error = cudaMalloc(&block, bytes ? bytes : 1);
  if (error != cudaSuccess) return lacks(d, error, "cudaMalloc", bytes);
  error = cudaMemsetAsync(block, 0, bytes ? bytes : 1, d->stream);
  if (error == cudaSuccess) *out = block;
  else cudaFree(block);
  return done(d, error, "cudaMemsetAsync");
}

void unmap(void *self, void *block, size_t) {
  cuda_device *d = of(self);
  finish(d);
  const cudaError_t error = cudaFree(block);
  if (error != cudaSuccess) die(d, error, "cudaFree");
}

rm_device_status pin(void *self, size_t bytes, void **out) {
  cuda_device *d = of(self);
  *out = nullptr;
  if (!is_alive(d)) return RM_DEVICE_FAULT;
  const cudaError_t error = cudaHostAlloc(out, bytes ? bytes : 1, cudaHostAllocPortable);
  if (error != cudaSuccess) return lacks(d, error, "cudaHostAlloc", bytes);
  memset(*out, 0, bytes);
  return RM_DEVICE_OK;
}

void unpin(void *self, void *block, size_t) {
  cuda_device *d = of(self);
  finish(d);
  const cudaError_t error = cudaFreeHost(block);
  if (error != cudaSuccess) die(d, error, "cudaFreeHost");
}

size_t available(void *self) {
  cuda_device *d = of(self);
  if (!is_alive(d)) return 0;
  size_t free_bytes = 0, all_bytes = 0;
  return done(d, cudaMemGetInfo(&free_bytes, &all_bytes), "cudaMemGetInfo") == RM_DEVICE_OK ? free_bytes : 0;
}

int place(void *, const void *address) {
  cudaPointerAttributes found;
  const bool known = cudaPointerGetAttributes(&found, address) == cudaSuccess;
  if (!known) cudaGetLastError();
  return known && (found.type == cudaMemoryTypeDevice || found.type == cudaMemoryTypeManaged) ? found.device : -1;
}

// ------------------------------------------------------------------------------------------------ the queue
void put(void *self, void *to, const void *from_host, size_t bytes) {
  cuda_device *d = of(self);
  if (bytes && is_alive(d))
    done(d, cudaMemcpyAsync(to, from_host, bytes, cudaMemcpyHostToDevice, d->stream), "cudaMemcpyAsync to the device");
}

void get(void *self, void *to_host, const void *from, size_t bytes) {
  cuda_device *d = of(self);
  if (bytes && is_alive(d))
    done(d, cudaMemcpyAsync(to_host, from, bytes, cudaMemcpyDeviceToHost, d->stream), "cudaMemcpyAsync to the host");
}

// By way of the host where the two cannot reach each other: CUDA sees to it, and asks no leave of either.
void fetch(void *self, void *to, const void *from, int ordinal, size_t bytes) {
  cuda_device *d = of(self);
  if (bytes && is_alive(d)) done(d, cudaMemcpyPeerAsync(to, d->ordinal, from, ordinal, bytes, d->stream), "cudaMemcpyPeerAsync");
}

void copy(void *self, void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t rows) {
  cuda_device *d = of(self);
  if (!width || !rows || !is_alive(d)) return;
  if (rows == 1 || (to_pitch == width && from_pitch == width))
    done(d, cudaMemcpyAsync(to, from, width * rows, cudaMemcpyDeviceToDevice, d->stream), "cudaMemcpyAsync on the device");
  else rm_cuda_copy(d->stream, to, to_pitch, from, from_pitch, width, rows);
}

void zero(void *self, void *at, size_t pitch, size_t width, size_t rows) {
  cuda_device *d = of(self);
  if (!width || !rows || !is_alive(d)) return;
  if (rows == 1 || pitch == width) done(d, cudaMemsetAsync(at, 0, width * rows, d->stream), "cudaMemsetAsync");
  else rm_cuda_copy(d->stream, at, pitch, nullptr, 0, width, rows);
}

void mark(void *self, int number) {
  cuda_device *d = of(self);
  if (!is_alive(d)) return;
  d->is_marked[number] = done(d, cudaEventRecord(d->marks[number], d->stream), "cudaEventRecord") == RM_DEVICE_OK;
}

rm_device_status reach(void *self, int number) {
  cuda_device *d = of(self);
  if (!is_alive(d)) return RM_DEVICE_FAULT;
  return d->is_marked[number] ? done(d, cudaEventSynchronize(d->marks[number]), "cudaEventSynchronize") : RM_DEVICE_OK;
}

rm_device_status not_ready_is_busy(cuda_device *d, cudaError_t error, const char *call) {
  if (error != cudaErrorNotReady) return done(d, error, call);
  cudaGetLastError();  // it counts as an error there
  return RM_DEVICE_BUSY;
}

rm_device_status reached(void *self, int number) {
  cuda_device *d = of(self);
  if (!is_alive(d)) return RM_DEVICE_FAULT;
  return d->is_marked[number] ? not_ready_is_busy(d, cudaEventQuery(d->marks[number]), "cudaEventQuery") : RM_DEVICE_OK;
}

rm_device_status wait(void *self) {
  cuda_device *d = of(self);
  return is_alive(d) ? done(d, cudaStreamSynchronize(d->stream), "cudaStreamSynchronize") : RM_DEVICE_FAULT;
}

rm_device_status poll(void *self) {
  cuda_device *d = of(self);
  return is_alive(d) ? not_ready_is_busy(d, cudaStreamQuery(d->stream), "cudaStreamQuery") : RM_DEVICE_FAULT;
}

// ------------------------------------------------------------------------------------------------ recordings
// Thread-local: another thread may allocate on another device, or this one, in the meantime.
rm_device_status record(void *self) {
  cuda_device *d = of(self);
  if (!is_alive(d)) return RM_DEVICE_FAULT;
  return done(d, cudaStreamBeginCapture(d->stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
}

rm_device_status recorded(void *self, void **recording) {
  cuda_device *d = of(self);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t made = nullptr;
  *recording = nullptr;
  is_alive(d);  // the capture ends in any case
  cudaError_t error = cudaStreamEndCapture(d->stream, &graph);
  if (error != cudaSuccess || d->dead) {
    if (graph) cudaGraphDestroy(graph);
    return die(d, error, "cudaStreamEndCapture");
  }
  error = cudaGraphInstantiate(&made, graph, 0);
  cudaGraphDestroy(graph);
  if (error == cudaErrorMemoryAllocation) return lacks(d, error, "cudaGraphInstantiate", 0);
  if (error == cudaSuccess && (error = cudaGraphUpload(made, d->stream)) == cudaErrorMemoryAllocation) {  // else its first launch took it
    cudaGraphExecDestroy(made);
    return lacks(d, error, "cudaGraphUpload", 0);
  }
  *recording = made;
  return done(d, error, "cudaGraphInstantiate");
}

void replay(void *self, void *recording) {
  cuda_device *d = of(self);
  if (is_alive(d)) done(d, cudaGraphLaunch(static_cast<cudaGraphExec_t>(recording), d->stream), "cudaGraphLaunch");
}

void forget(void *self, void *recording) {
  cuda_device *d = of(self);
  if (!recording) return;
  finish(d);
  const cudaError_t error = cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(recording));
  if (error != cudaSuccess) die(d, error, "cudaGraphExecDestroy");
}

// ------------------------------------------------------------------------------------------------ whose thread it is
// cudaSetDevice makes a context where there is none, some hundred MiB of a device that this process may not use at all: the thread
// goes back only to one that has a context.
bool has_context(int ordinal) {
  using state_of = int (*)(int device, unsigned *flags, int *is_active);
  void *entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &entry, 12000, cudaEnableDefault, &found);
  unsigned flags = 0;
  int is_active = 1;
  if (error == cudaSuccess && entry) reinterpret_cast<state_of>(entry)(ordinal, &flags, &is_active);
  if (error != cudaSuccess) cudaGetLastError();
  return is_active;
}

void go_back(int ordinal, int saved) {
  if (saved != ordinal && saved >= 0 && has_context(saved)) cudaSetDevice(saved);
}

int enter(void *self) {
  cuda_device *d = of(self);
  int saved = -1;
  if (cudaGetDevice(&saved) != cudaSuccess || cudaSetDevice(d->ordinal) != cudaSuccess) is_alive(d);
  return saved;
}

void leave(void *self, int saved) {
  cuda_device *d = of(self);
  is_alive(d);  // what was launched last is this device's, whoever asks this thread next
  go_back(d->ordinal, saved);
}

// ------------------------------------------------------------------------------------------------ opening
const char *message(void *self) { return of(self)->message; }

void close_device(void *self) {
  cuda_device *d = of(self);
  for (cudaEvent_t event : d->marks)
    if (event) cudaEventDestroy(event);
  if (d->stream) cudaStreamDestroy(d->stream);
  cudaGetLastError();
  delete d;
}

__global__ void nothing_kernel() {}

// NULL, or the call that failed.
const char *make(cuda_device *d, cudaError_t *error) {
  if ((*error = cudaSetDevice(d->ordinal)) != cudaSuccess) return "cudaSetDevice";
  cudaFuncAttributes attributes;
  if ((*error = cudaFuncGetAttributes(&attributes, nothing_kernel)) != cudaSuccess) return "cudaFuncGetAttributes";
  if ((*error = cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking)) != cudaSuccess) return "cudaStreamCreateWithFlags";
  for (cudaEvent_t &event : d->marks)
    if ((*error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming)) != cudaSuccess) return "cudaEventCreateWithFlags";
  return nullptr;
}

// Why `call` failed, to whoever wanted device d.
void explain(char *why, size_t room, const cuda_device *d, const char *call, cudaError_t error) {
  if (error != cudaErrorNoKernelImageForDevice && error != cudaErrorInvalidDeviceFunction) {
    snprintf(why, room, "%s: %s: %s", d->name, call, cudaGetErrorString(error));
    return;
  }
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, d->ordinal);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, d->ordinal);
  snprintf(why, room, "%s is an sm_%d%d, for which this library has no code, but for %s (ROLLMESH_CUDA_ARCHS when it is built)", d->name,
           major, minor, rm_cuda_archs());
}

const rm_device CALLS = {
    .self = nullptr,
    .name = nullptr,
    .on_host = 0,
    .ordinal = -1,
    .kernels = nullptr,
    .stream = nullptr,
    .map = map,
    .unmap = unmap,
    .pin = pin,
    .unpin = unpin,
    .available = available,
    .place = place,
    .put = put,
    .get = get,
    .fetch = fetch,
    .copy = copy,
    .zero = zero,
    .mark = mark,
    .reach = reach,
    .reached = reached,
    .wait = wait,
    .poll = poll,
    .record = record,
    .recorded = recorded,
    .replay = replay,
    .forget = forget,
    .enter = enter,
    .leave = leave,
    .message = message,
    .close = close_device,
    .products = rm_cuda_products,
};

}  // namespace

bool rm_cuda_lives(void *self) { return is_alive(of(self)); }

void rm_cuda_kill(void *self, const char *why) {
  cuda_device *d = of(self);
  if (!is_alive(d)) return;
  snprintf(d->message, sizeof d->message, "%s", why);
  d->dead = true;
}

RM_EXPORT const char *rm_cuda_error(void) {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

RM_EXPORT int rm_cuda_devices(void) {
  int n = 0;
  if (cudaGetDeviceCount(&n) == cudaSuccess) return n;
  cudaGetLastError();
  return -1;
}

RM_EXPORT const char *rm_cuda_open(int ordinal, rm_device *out) {
  static thread_local char why[256];
  int n = 0, saved = -1;
  const cudaError_t counted = cudaGetDeviceCount(&n);
  cudaGetLastError();
  if (counted != cudaSuccess || ordinal < 0 || ordinal >= n) {
    if (counted != cudaSuccess) snprintf(why, sizeof why, "no CUDA device: %s", cudaGetErrorString(counted));
    else snprintf(why, sizeof why, "cuda:%d: the driver shows %d devices, counted from 0", ordinal, n);
    return why;
  }
  cuda_device *d = new (std::nothrow) cuda_device();
  if (!d) return "no memory";
  d->ordinal = ordinal;
  snprintf(d->name, sizeof d->name, "cuda:%d", ordinal);
  cudaGetDevice(&saved);
  cudaError_t error = cudaSuccess;
  const char *failed = make(d, &error);
  if (failed) {
    explain(why, sizeof why, d, failed, error);
    close_device(d);
  } else {
    *out = CALLS;
    out->self = d, out->name = d->name, out->kernels = rm_kernels_cuda(), out->stream = d->stream;
    out->ordinal = ordinal;
  }
  go_back(ordinal, saved);
  return failed ? why : nullptr;
}
