// device.cu: an rm_device over the CUDA runtime, and functions of rm_cuda.h.
//
// It has its own stream (cudaStreamNonBlocking) and uses the device's primary context, which it
// shares with every other runtime of the process. A failed call kills the device unless it only
// lacked memory: work that could not be enqueued is missing from the queue, and after a kernel's
// fault the context is unusable anyway. Launches report to the thread's last error, which each call
// with a status checks first.
#include "rm_cuda.h"

#include <cstdio>
#include <new>

#include "device.cuh"

namespace {

constexpr int MAX_PEERS = 64;
constexpr int ORDER = RM_DEVICE_EVENTS; // the event of make_wait
constexpr size_t MAX_PITCH = 0x7fffffff;
// Lower numbers are default streams (below FIRST_HANDLE), or not valid addresses.
constexpr uintptr_t FIRST_HANDLE = 3, FIRST_ADDRESS = 4096;

struct cuda_device {
  int ordinal;
  unsigned long long peers_asked; // one bit for each device that reach_peer has handled
  bool dead, is_capturing;
  cudaStream_t stream;
  cudaEvent_t events[RM_DEVICE_EVENTS + 1];
  char name[24], isa[16], family[24], message[200];
  rm_kernels kernels;
};

cuda_device *of(void *self) { return static_cast<cuda_device *>(self); }

// ----------------------------------------------------------------------------------------- errors
rm_device_status die(cuda_device *d, cudaError_t error, const char *call) {
  cudaGetLastError(); // clears the failed call's error
  if (!d->dead) snprintf(d->message, sizeof d->message, "%s: %s", call, cudaGetErrorString(error));
  d->dead = true;
  return RM_DEVICE_FAULT;
}

// Another thread that synchronizes the device (torch.cuda.synchronize) invalidates this thread's
// capture, in any capture mode. Later calls of the capture fail; the device stays usable.
bool is_invalidated(const cuda_device *d, cudaError_t error) {
  return d->is_capturing && error == cudaErrorStreamCaptureInvalidated;
}

// While the thread captures another stream, allocations fail, but this device stays usable.
bool is_anothers_capture(const cuda_device *d, cudaError_t error) {
  cudaStreamCaptureStatus own = cudaStreamCaptureStatusNone;
  if (error != cudaErrorStreamCaptureUnsupported) return false;
  return cudaStreamIsCapturing(d->stream, &own) == cudaSuccess &&
         own == cudaStreamCaptureStatusNone;
}

rm_device_status lacks(cuda_device *d, cudaError_t error, const char *call, size_t bytes) {
  char what[80];
  snprintf(what, sizeof what, "%s of %zu bytes", call, bytes);
  if (error != cudaErrorMemoryAllocation && !is_anothers_capture(d, error))
    return die(d, error, what);
  cudaGetLastError();
  snprintf(d->message, sizeof d->message, "%s: %s", what, cudaGetErrorString(error));
  return RM_DEVICE_NO_MEMORY;
}

// Called before every runtime call, so that an earlier failed launch is not reported as the error
// of that call.
bool is_alive(cuda_device *d) {
  if (d->dead) return false;
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess && !is_invalidated(d, error)) die(d, error, "a launch");
  return !d->dead;
}

rm_device_status done(cuda_device *d, cudaError_t error, const char *call) {
  if (error == cudaSuccess) return RM_DEVICE_OK;
  if (error != cudaErrorNotReady && !is_invalidated(d, error)) return die(d, error, call);
  cudaGetLastError(); // CUDA keeps cudaErrorNotReady as an error
  return error == cudaErrorNotReady ? RM_DEVICE_BUSY : RM_DEVICE_OK;
}

// Calls the runtime, and converts the result to a status.
#define CALL(d, name, ...) done(d, name(__VA_ARGS__), #name)
// The same unless the device is dead.
#define RUN(d, name, ...) (is_alive(d) ? CALL(d, name, __VA_ARGS__) : RM_DEVICE_FAULT)

// Called before memory or graphs that the queue may use are freed. A dead device may still be
// running work.
void finish(cuda_device *d) {
  is_alive(d);
  CALL(d, cudaStreamSynchronize, d->stream);
}

// ----------------------------------------------------------------------------------------- memory
rm_device_status alloc_memory(void *self, size_t bytes, void **out) {
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

void free_memory(void *self, void *block, size_t) {
  finish(of(self));
  CALL(of(self), cudaFree, block);
}

rm_device_status alloc_pinned(void *self, size_t bytes, void **out) {
  cuda_device *d = of(self);
  *out = nullptr;
  if (!is_alive(d)) return RM_DEVICE_FAULT;
  const cudaError_t error = cudaHostAlloc(out, bytes ? bytes : 1, cudaHostAllocPortable);
  if (error != cudaSuccess) return lacks(d, error, "cudaHostAlloc", bytes);
  memset(*out, 0, bytes);
  return RM_DEVICE_OK;
}

void free_pinned(void *self, void *block, size_t) {
  finish(of(self));
  CALL(of(self), cudaFreeHost, block);
}

size_t available(void *self) {
  size_t free_bytes = 0, all_bytes = 0;
  return RUN(of(self), cudaMemGetInfo, &free_bytes, &all_bytes) == RM_DEVICE_OK ? free_bytes : 0;
}

int ordinal_of(void *, const void *address) {
  cudaPointerAttributes found;
  const bool known = cudaPointerGetAttributes(&found, address) == cudaSuccess;
  if (!known) cudaGetLastError();
  return known && (found.type == cudaMemoryTypeDevice || found.type == cudaMemoryTypeManaged)
             ? found.device
             : -1;
}

// -------------------------------------------------------------------------------------- the queue
void copy_to_device(void *self, void *to, const void *from_host, size_t bytes) {
  cuda_device *d = of(self);
  if (bytes) RUN(d, cudaMemcpyAsync, to, from_host, bytes, cudaMemcpyHostToDevice, d->stream);
}

void copy_to_host(void *self, void *to_host, const void *from, size_t bytes) {
  cuda_device *d = of(self);
  if (bytes) RUN(d, cudaMemcpyAsync, to_host, from, bytes, cudaMemcpyDeviceToHost, d->stream);
}

// Enables peer access once for each device that is read. Without it copies go through the host.
void reach_peer(cuda_device *d, int ordinal) {
  if (ordinal == d->ordinal || ordinal < 0 || ordinal >= MAX_PEERS || d->peers_asked >> ordinal & 1)
    return;
  d->peers_asked |= 1ull << ordinal;
  cudaDeviceEnablePeerAccess(ordinal, 0);
  cudaGetLastError(); // an error if peer access was enabled before by this process
}

// CUDA's pitched copies reject a pitch that is negative, shorter than a row, or longer than
// MAX_PITCH.
bool is_pitch(size_t pitch, size_t width) { return pitch >= width && pitch <= MAX_PITCH; }

void copy_2d_from_peer(void *self, void *to, size_t to_pitch, const void *from, int ordinal,
                       size_t from_pitch, size_t width, size_t rows) {
  cuda_device *d = of(self);
  if (!width || !rows || !is_alive(d)) return;
  if (rows > 1 && !(is_pitch(to_pitch, width) && is_pitch(from_pitch, width))) {
    for (size_t r = 0; r < rows; r++)
      copy_2d_from_peer(self, static_cast<char *>(to) + static_cast<ptrdiff_t>(r * to_pitch), 0,
                        static_cast<const char *>(from) + static_cast<ptrdiff_t>(r * from_pitch),
                        ordinal, 0, width, 1);
    return;
  }
  reach_peer(d, ordinal);
  if (rows == 1 || (to_pitch == width && from_pitch == width)) {
    CALL(d, cudaMemcpyPeerAsync, to, d->ordinal, from, ordinal, width * rows, d->stream);
    return;
  }
  cudaMemcpy3DPeerParms run = {};
  run.dstDevice = d->ordinal, run.dstPtr = make_cudaPitchedPtr(to, to_pitch, width, rows);
  run.srcDevice = ordinal,
  run.srcPtr = make_cudaPitchedPtr(const_cast<void *>(from), from_pitch, width, rows);
  run.extent = make_cudaExtent(width, rows, 1);
  CALL(d, cudaMemcpy3DPeerAsync, &run, d->stream);
}

void copy_2d(void *self, void *to, size_t to_pitch, const void *from, size_t from_pitch,
             size_t width, size_t rows) {
  cuda_device *d = of(self);
  if (!width || !rows || !is_alive(d)) return;
  if (rows == 1 || (to_pitch == width && from_pitch == width))
    CALL(d, cudaMemcpyAsync, to, from, width * rows, cudaMemcpyDeviceToDevice, d->stream);
  else rm_cuda_copy(d->stream, to, to_pitch, from, from_pitch, width, rows);
}

void zero_2d(void *self, void *at, size_t pitch, size_t width, size_t rows) {
  cuda_device *d = of(self);
  if (!width || !rows || !is_alive(d)) return;
  if (rows == 1 || pitch == width) CALL(d, cudaMemsetAsync, at, 0, width * rows, d->stream);
  else rm_cuda_copy(d->stream, at, pitch, nullptr, 0, width, rows);
}

void record_event(void *self, int number) {
  cuda_device *d = of(self);
  RUN(d, cudaEventRecord, d->events[number], d->stream);
}

// For CUDA the work before an event that was never recorded is complete.
rm_device_status wait_event(void *self, int number) {
  return RUN(of(self), cudaEventSynchronize, of(self)->events[number]);
}
rm_device_status query_event(void *self, int number) {
  return RUN(of(self), cudaEventQuery, of(self)->events[number]);
}

rm_device_status wait(void *self) { return RUN(of(self), cudaStreamSynchronize, of(self)->stream); }
rm_device_status poll(void *self) { return RUN(of(self), cudaStreamQuery, of(self)->stream); }

// A wait refers to the event's recording at the time it is enqueued.
void make_wait(cuda_device *d, cudaStream_t later, cudaStream_t earlier) {
  if (RUN(d, cudaEventRecord, d->events[ORDER], earlier) == RM_DEVICE_OK)
    CALL(d, cudaStreamWaitEvent, later, d->events[ORDER], 0);
}

void wait_stream(void *self, void *stream) {
  make_wait(of(self), of(self)->stream, static_cast<cudaStream_t>(stream));
}
void make_stream_wait(void *self, void *stream) {
  make_wait(of(self), static_cast<cudaStream_t>(stream), of(self)->stream);
}

// CUDA dereferences stream handles, so small numbers are rejected first. The default streams are
// those of the current device, which is this one. Waiting for a stream that is being captured would
// join this stream to that capture and invalidate both.
const char *check_stream(void *self, void *stream) {
  const cudaStream_t other = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  int ordinal = of(self)->ordinal;
  const uintptr_t handle = reinterpret_cast<uintptr_t>(stream);
  if (handle >= FIRST_HANDLE && handle < FIRST_ADDRESS) return "it is not a stream handle";
  cudaError_t error = cudaStreamIsCapturing(other, &capturing);
  if (error == cudaSuccess && handle >= FIRST_HANDLE) error = cudaStreamGetDevice(other, &ordinal);
  if (error != cudaSuccess) cudaGetLastError();
  return error != cudaSuccess                       ? cudaGetErrorString(error)
         : capturing != cudaStreamCaptureStatusNone ? "it is being captured"
         : ordinal != of(self)->ordinal             ? "it is another device's"
                                                    : nullptr;
}

// ---------------------------------------------------------------------------------- graph capture
// Thread-local, so that other threads may allocate on any device in the meantime.
rm_device_status begin_capture(void *self) {
  cuda_device *d = of(self);
  if (!is_alive(d)) return RM_DEVICE_FAULT;
  const cudaError_t error = cudaStreamBeginCapture(d->stream, cudaStreamCaptureModeThreadLocal);
  d->is_capturing = error == cudaSuccess;
  return done(d, error, "cudaStreamBeginCapture");
}

// Ends the capture; *graph is NULL unless it succeeded.
rm_device_status stop_capture(cuda_device *d, cudaGraph_t *graph) {
  is_alive(d);
  const cudaError_t error = cudaStreamEndCapture(d->stream, graph);
  const bool invalidated = is_invalidated(d, error);
  d->is_capturing = false;
  if (error == cudaSuccess && !d->dead) return RM_DEVICE_OK;
  if (*graph) cudaGraphDestroy(*graph);
  if (!invalidated || d->dead) return die(d, error, "cudaStreamEndCapture");
  cudaGetLastError();
  snprintf(d->message, sizeof d->message, "cudaStreamEndCapture: %s", cudaGetErrorString(error));
  return RM_DEVICE_CAPTURE_INVALIDATED;
}

rm_device_status end_capture(void *self, void **out) {
  cuda_device *d = of(self);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t made = nullptr;
  *out = nullptr;
  const rm_device_status ended = stop_capture(d, &graph);
  if (ended != RM_DEVICE_OK) return ended;
  cudaError_t error = cudaGraphInstantiate(&made, graph, 0);
  cudaGraphDestroy(graph);
  // Uploads now, so that the first launch does not allocate.
  if (error == cudaSuccess) error = cudaGraphUpload(made, d->stream);
  if (error == cudaErrorMemoryAllocation) {
    if (made) cudaGraphExecDestroy(made);
    return lacks(d, error, "cudaGraphInstantiate", 0);
  }
  *out = made;
  return done(d, error, "cudaGraphInstantiate");
}

void replay(void *self, void *graph) {
  cuda_device *d = of(self);
  RUN(d, cudaGraphLaunch, static_cast<cudaGraphExec_t>(graph), d->stream);
}

void destroy_graph(void *self, void *graph) {
  if (!graph) return;
  finish(of(self));
  CALL(of(self), cudaGraphExecDestroy, static_cast<cudaGraphExec_t>(graph));
}

// -------------------------------------------------------------------- the thread's current device
// Other runtimes of the process (torch's) use the thread's current context, so `leave` restores it.
// If the thread did not have a context, `leave` clears it: a context would look like the thread's
// choice of a device, and creating one on another device would cost some hundred MiB.
constexpr int NO_CONTEXT = -2;

int current() {
  static const auto get = rm_cuda_driver<int(void **context)>("cuCtxGetCurrent");
  void *context = nullptr;
  int ordinal = -1;
  if (get && get(&context) == 0 && !context) return NO_CONTEXT;
  return cudaGetDevice(&ordinal) == cudaSuccess ? ordinal : -1;
}

void go_back(int ordinal, int saved) {
  static const auto set = rm_cuda_driver<int(void *context)>("cuCtxSetCurrent");
  if (saved == NO_CONTEXT && set) set(nullptr);
  else if (saved >= 0 && saved != ordinal) cudaSetDevice(saved);
}

// While another thread captures in "global" mode (torch.cuda.graph), a thread in that mode, which
// is the default, must not allocate or query events: that would invalidate the capture. So a thread
// that has entered a device is in ThreadLocal mode.
cudaStreamCaptureMode exchange(cudaStreamCaptureMode mode) {
  if (cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess) return mode;
  cudaGetLastError();
  return cudaStreamCaptureModeGlobal;
}

// The thread's device and capture mode, as one number.
constexpr int MODES = 4;

int enter(void *self) {
  cuda_device *d = of(self);
  const int saved = current();
  cudaGetLastError(); // clears errors of other runtimes; a sticky error is reported again
  if (cudaSetDevice(d->ordinal) != cudaSuccess) is_alive(d);
  return saved * MODES + exchange(cudaStreamCaptureModeThreadLocal);
}

void leave(void *self, int saved) {
  cuda_device *d = of(self);
  const int mode = saved & (MODES - 1);
  is_alive(d); // keeps an error of the last launch in this device
  exchange(static_cast<cudaStreamCaptureMode>(mode));
  go_back(d->ordinal, (saved - mode) / MODES);
}

// ---------------------------------------------------------------------------------------- opening
const char *message(void *self) { return of(self)->message; }

void close_device(void *self) {
  cuda_device *d = of(self);
  for (cudaEvent_t event : d->events)
    if (event) cudaEventDestroy(event);
  if (d->stream) cudaStreamDestroy(d->stream);
  cudaGetLastError();
  delete d;
}

const rm_listed_kernel *listed; // head of the list; NULL: empty

// Returns NULL, or the name of the call that failed.
#define TRY(name, ...) \
  if ((*error = name(__VA_ARGS__)) != cudaSuccess) return #name
const char *make(cuda_device *d, cudaError_t *error) {
  TRY(cudaSetDevice, d->ordinal);
  cudaFuncAttributes attributes;
  for (const rm_listed_kernel *l = listed; l; l = l->next) {
    TRY(cudaFuncGetAttributes, &attributes, l->kernel);
    TRY(cudaFuncSetAttribute, l->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
        RM_MAX_SHARED);
  }
  TRY(cudaStreamCreateWithFlags, &d->stream, cudaStreamNonBlocking);
  for (cudaEvent_t &event : d->events)
    TRY(cudaEventCreateWithFlags, &event, cudaEventDisableTiming);
  return nullptr;
}

int architecture(int ordinal) {
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal);
  return 10 * major + minor;
}

// Writes the reason why `call` failed to `why`.
rm_device_opened explain(char *why, size_t room, const cuda_device *d, const char *call,
                         cudaError_t error) {
  if (error != cudaErrorNoKernelImageForDevice && error != cudaErrorInvalidDeviceFunction) {
    snprintf(why, room, "%s: %s: %s", d->name, call, cudaGetErrorString(error));
    return error == cudaErrorMemoryAllocation ? RM_DEVICE_FULL : RM_DEVICE_FAILED;
  }
  snprintf(
      why, room,
      "%s is an sm_%d, for which this library has no code, but for %s (set ROLLMESH_CUDA_ARCHS "
      "when building it)",
      d->name, architecture(d->ordinal), rm_cuda_archs());
  return RM_DEVICE_NOT_FOUND;
}

// Copies the table and adds the device's architecture to its names.
void take_kernels(cuda_device *d, const rm_kernels *kernels) {
  const int sm = architecture(d->ordinal);
  snprintf(d->isa, sizeof d->isa, "cuda_sm%d", sm);
  snprintf(d->family, sizeof d->family, kernels == rm_kernels_cuda_mma() ? "%s_sm%d" : "%s",
           kernels->family, sm);
  d->kernels = *kernels;
  d->kernels.isa = d->isa;
  d->kernels.family = d->family;
}

const rm_device CALLS = {
    .self = nullptr,
    .name = nullptr,
    .on_host = 0,
    .ordinal = -1,
    .kernels = nullptr,
    .stream = nullptr,
    .alloc = alloc_memory,
    .free = free_memory,
    .alloc_pinned = alloc_pinned,
    .free_pinned = free_pinned,
    .available = available,
    .ordinal_of = ordinal_of,
    .copy_to_device = copy_to_device,
    .copy_to_host = copy_to_host,
    .copy_2d_from_peer = copy_2d_from_peer,
    .copy_2d = copy_2d,
    .zero_2d = zero_2d,
    .record_event = record_event,
    .wait_event = wait_event,
    .query_event = query_event,
    .wait = wait,
    .poll = poll,
    .wait_stream = wait_stream,
    .make_stream_wait = make_stream_wait,
    .check_stream = check_stream,
    .begin_capture = begin_capture,
    .end_capture = end_capture,
    .replay = replay,
    .destroy_graph = destroy_graph,
    .enter = enter,
    .leave = leave,
    .message = message,
    .close = close_device,
    .open_vendor_gemm = rm_cuda_open_vendor_gemm,
};

} // namespace

rm_listed_kernel::rm_listed_kernel(const void *kernel_) : kernel(kernel_), next(listed) {
  listed = this;
}

bool rm_cuda_lives(void *self) { return is_alive(of(self)); }

void rm_cuda_kill(void *self, const char *why) {
  cuda_device *d = of(self);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (!is_alive(d)) return;
  if (d->is_capturing && cudaStreamIsCapturing(d->stream, &capture) == cudaSuccess &&
      capture == cudaStreamCaptureStatusInvalidated)
    return; // the failure is a consequence of the invalidated capture
  snprintf(d->message, sizeof d->message, "%s", why);
  d->dead = true;
}

RM_EXPORT const char *rm_cuda_error(void) {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

RM_EXPORT int rm_cuda_devices(void) {
  int n = 0, driver = 0;
  const cudaError_t error = cudaGetDeviceCount(&n);
  if (error == cudaSuccess) return n;
  cudaGetLastError();
  // CUDA also returns "insufficient driver" without a driver, whose version is 0 then.
  return error == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess &&
                 driver > 0
             ? -2
             : -1;
}

RM_EXPORT rm_device_opened rm_cuda_open(int ordinal, const rm_kernels *kernels, rm_device *out,
                                        char why[256]) {
  int n = 0;
  const cudaError_t counted = cudaGetDeviceCount(&n);
  cudaGetLastError();
  if (counted != cudaSuccess || ordinal < 0 || ordinal >= n) {
    if (counted != cudaSuccess)
      snprintf(why, 256, "no CUDA device: %s", cudaGetErrorString(counted));
    else snprintf(why, 256, "expected one of the driver's %d devices, got cuda:%d", n, ordinal);
    return RM_DEVICE_NOT_FOUND;
  }
  cuda_device *d = new (std::nothrow) cuda_device();
  if (!d) {
    snprintf(why, 256, "no memory");
    return RM_DEVICE_FULL;
  }
  d->ordinal = ordinal;
  snprintf(d->name, sizeof d->name, "cuda:%d", ordinal);
  const int saved = enter(d);
  cudaError_t error = cudaSuccess;
  rm_device_opened opened = RM_DEVICE_OPENED;
  const char *failed = make(d, &error);
  if (failed) {
    opened = explain(why, 256, d, failed, error);
  } else {
    take_kernels(d, kernels ? kernels : rm_kernels_cuda());
    *out = CALLS;
    out->self = d, out->name = d->name, out->kernels = &d->kernels, out->stream = d->stream;
    out->ordinal = ordinal;
  }
  leave(d, saved);
  if (failed) close_device(d);
  return opened;
}
