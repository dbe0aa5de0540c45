// simt_streams.cpp: see simt_inside.h. Streams and their work other than kernels: copies, fills,
// waits for events, another library's work.
#include "simt_inside.h"

#include <cstdlib>
#include <cstring>

using namespace simt_inside;

struct simt_event {
  cudaStream_t stream;
  uint64_t place; // work of the stream before it
  bool is_captured;
};

static void enqueue_others(standin_stream *stream, int (*run)(void *data), const void *data,
                           size_t bytes) {
  const char *from = static_cast<const char *>(data);
  const locked hold(lock);
  begin_helper();
  enqueue(reinterpret_cast<simt_stream *>(stream), {.run = run, .data = {from, from + bytes}});
}

static char *host_address(standin_stream *, const void *device) {
  return static_cast<char *>(const_cast<void *>(device));
}

static long spoils_at(int ordinal) {
  const char *text = getenv("ROLLMESH_SIMT_SPOIL"), *of = text ? strchr(text, ',') : nullptr;
  return text && (!of || atoi(of + 1) == ordinal) ? atol(text) : 0;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
  const locked hold(lock);
  cudaError_t error = ready();
  if (error == cudaSuccess && all_memory() == 0) error = cudaErrorMemoryAllocation;
  if (error != cudaSuccess) return said(error);
  *stream = new simt_stream();
  (*stream)->others = {enqueue_others, host_address};
  (*stream)->owner = current_device;
  (*stream)->fault_at = from_environment("ROLLMESH_SIMT_FAULT", 0);
  (*stream)->spoil_at = spoils_at(current_device);
  devices[current_device].n_streams++;
  n_made[STREAMS]++;
  streams.insert(*stream);
  simt_order(from_environment("ROLLMESH_SIMT_REVERSED", 0) != 0);
  simt_watch();
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t s) {
  locked hold(lock);
  drain_whole(s, s->n_enqueued, hold);
  device &d = devices[s->owner];
  const bool is_forgotten = --d.n_streams == 0 && !from_environment("ROLLMESH_SIMT_STICKY", 0);
  const cudaError_t error = is_forgotten ? cudaSuccess : d.sticky;
  if (is_forgotten) d.sticky = cudaSuccess;
  capture_drop(s);
  streams.erase(s);
  delete s;
  return said(error);
}

cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  locked hold(lock);
  if (s->capture) return said(forbid(s));
  drain_whole(s, s->n_enqueued, hold);
  return said(devices[s->owner].sticky);
}

cudaError_t cudaStreamQuery(cudaStream_t s) {
  const locked hold(lock);
  if (s->capture) return said(forbid(s));
  if (simt_stream *forbids = forbidding()) return said(forbid(forbids));
  if (s->n_done == s->n_enqueued) return said(devices[s->owner].sticky);
  drain(s, s->n_done + 1);
  return said(devices[s->owner].sticky == cudaSuccess ? cudaErrorNotReady
                                                      : devices[s->owner].sticky);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t s) {
  locked hold(lock);
  const bool to_device = kind != cudaMemcpyDeviceToHost,
             from_device = kind != cudaMemcpyHostToDevice;
  if ((to_device && !is_on(s->owner, to, bytes)) || (from_device && !is_on(s->owner, from, bytes)))
    return said(cudaErrorInvalidValue);
  work w = {.to = static_cast<char *>(to), .from = static_cast<const char *>(from), .bytes = bytes};
  if (to_device && from_device) return said(enqueue(s, w));
  const void *host = to_device ? from : to;
  const block *b = block_of(host);
  if (b && (b->owner != HOST || !is_inside(b, host, bytes))) return said(cudaErrorInvalidValue);
  if (b) return said(enqueue(s, w));
  if (s->capture) return said(forbid(s));
  drain_whole(s, s->n_enqueued, hold, &w);
  return said(devices[s->owner].sticky);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                size_t bytes, cudaStream_t s) {
  const locked hold(lock);
  if (!is_on(to_device, to, bytes) || !is_on(from_device, from, bytes) ||
      (s->owner != to_device && s->owner != from_device))
    return said(cudaErrorInvalidValue);
  return said(enqueue(s, {.to = static_cast<char *>(to),
                          .from = static_cast<const char *>(from),
                          .bytes = bytes,
                          .is_peers = true}));
}

// Copies one layer, row after row. As in CUDA, a pitch beyond the limit in cudaDeviceProp is an
// error.
cudaError_t cudaMemcpy3DPeerAsync(const cudaMemcpy3DPeerParms *run, cudaStream_t s) {
  const cudaPitchedPtr &to = run->dstPtr, &from = run->srcPtr;
  const auto [width, rows, depth] = run->extent;
  constexpr size_t MOST = 0x7fffffff;
  if (depth != 1 || to.pitch < width || from.pitch < width || to.pitch > MOST || from.pitch > MOST)
    return said(cudaErrorInvalidValue);
  for (size_t r = 0; r < rows; r++) {
    void *there = static_cast<char *>(to.ptr) + r * to.pitch,
         *here = static_cast<char *>(from.ptr) + r * from.pitch;
    const cudaError_t error =
        cudaMemcpyPeerAsync(there, run->dstDevice, here, run->srcDevice, width, s);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t s) {
  const locked hold(lock);
  if (!is_on(s->owner, at, bytes)) return said(cudaErrorInvalidValue);
  return said(enqueue(s, {.to = static_cast<char *>(at), .value = value, .bytes = bytes}));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
  *event = new simt_event();
  n_made[EVENTS]++;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

static bool is_default(cudaStream_t s) { return reinterpret_cast<uintptr_t>(s) <= 2; }

cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus *status) {
  const locked hold(lock);
  if (!is_default(s) && !streams.count(s)) return said(cudaErrorInvalidResourceHandle);
  *status = is_default(s) || !s->capture ? cudaStreamCaptureStatusNone
            : s->is_invalid              ? cudaStreamCaptureStatusInvalidated
                                         : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t s, int *ordinal) {
  const locked hold(lock);
  if (!is_default(s) && !streams.count(s)) return said(cudaErrorInvalidResourceHandle);
  *ordinal = is_default(s) ? current_device : s->owner;
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t event, unsigned) {
  locked hold(lock);
  if (!is_default(s) && !streams.count(s)) return said(cudaErrorInvalidResourceHandle);
  if (!event->stream) return cudaSuccess;
  if (!is_default(s)) return said(enqueue(s, {.awaited = event->stream, .place = event->place}));
  drain_whole(event->stream, event->place, hold);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t s) {
  const locked hold(lock);
  if (is_default(s)) {
    *event = {nullptr, 0, false};
    return cudaSuccess;
  }
  if (!streams.count(s)) return said(cudaErrorInvalidResourceHandle);
  *event = {s, s->n_enqueued, s->capture != nullptr};
  return said(devices[s->owner].sticky);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  locked hold(lock);
  if (simt_stream *forbids = forbidding()) return said(forbid(forbids));
  if (event->is_captured) return said(cudaErrorCapturedEvent);
  if (!event->stream) return cudaSuccess;
  drain_whole(event->stream, event->place, hold);
  return said(devices[event->stream->owner].sticky);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const locked hold(lock);
  if (simt_stream *forbids = forbidding()) return said(forbid(forbids));
  if (event->is_captured) return said(cudaErrorCapturedEvent);
  simt_stream *s = event->stream;
  if (!s || s->n_done >= event->place) return said(s ? devices[s->owner].sticky : cudaSuccess);
  drain(s, s->n_done + 1);
  return said(devices[s->owner].sticky == cudaSuccess ? cudaErrorNotReady
                                                      : devices[s->owner].sticky);
}
