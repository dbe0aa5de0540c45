// simt_graphs.cpp: see simt_inside.h. A capture is a list that receives a stream's work instead of
// its queue; launching a graph gives the list to a queue.
#include "simt_inside.h"

#include <climits>

using namespace simt_inside;

struct simt_graph {
  std::vector<work> list;
};
struct simt_graph_exec {
  std::vector<work> list;
  cudaStream_t stream; // where it was launched last, and the place behind it
  uint64_t behind;
};

static thread_local cudaStream_t captured; // by this thread
static thread_local cudaStreamCaptureMode thread_mode;
static long n_graphs; // made and not destroyed

namespace simt_inside {

cudaError_t forbid(simt_stream *s) {
  s->is_invalid = true;
  return cudaErrorStreamCaptureUnsupported;
}

simt_stream *forbidding() {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return nullptr;
  if (captured && captured->mode != cudaStreamCaptureModeRelaxed) return captured;
  for (simt_stream *s : streams)
    if (s->capture && s->mode == cudaStreamCaptureModeGlobal &&
        thread_mode == cudaStreamCaptureModeGlobal)
      return s;
  return nullptr;
}

void capture_drop(simt_stream *s) {
  if (captured == s) captured = nullptr;
  delete s->capture;
}

} // namespace simt_inside

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode) {
  const locked hold(lock);
  if (s->capture || captured) return said(cudaErrorIllegalState);
  if (devices[s->owner].sticky != cudaSuccess) return said(devices[s->owner].sticky);
  s->capture = new std::vector<work>();
  s->capturer = std::this_thread::get_id();
  s->mode = mode;
  s->is_invalid = false;
  captured = s;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) {
  const locked hold(lock);
  *graph = nullptr;
  if (!s->capture) return said(cudaErrorIllegalState);
  if (s->capturer != std::this_thread::get_id()) return said(cudaErrorStreamCaptureWrongThread);
  const std::unique_ptr<std::vector<work>> list(s->capture);
  s->capture = nullptr;
  captured = nullptr;
  if (devices[s->owner].sticky != cudaSuccess) return said(devices[s->owner].sticky);
  if (s->is_invalid) return said(cudaErrorStreamCaptureInvalidated);
  *graph = new simt_graph{std::move(*list)};
  return cudaSuccess;
}

// For tests: calls of another runtime of the process on its streams. The driver's calls of these
// names take the same arguments.
extern "C" __attribute__((visibility("default"))) int cuStreamBeginCapture_v2(void *stream,
                                                                              int mode) {
  return cudaStreamBeginCapture(static_cast<cudaStream_t>(stream),
                                static_cast<cudaStreamCaptureMode>(mode));
}

extern "C" __attribute__((visibility("default"))) int cuStreamEndCapture(void *stream,
                                                                         void **graph) {
  return cudaStreamEndCapture(static_cast<cudaStream_t>(stream),
                              reinterpret_cast<cudaGraph_t *>(graph));
}

extern "C" __attribute__((visibility("default"))) int cuGraphDestroy(void *graph) {
  return cudaGraphDestroy(static_cast<cudaGraph_t>(graph));
}

extern "C" __attribute__((visibility("default"))) int cuThreadExchangeStreamCaptureMode(int *mode) {
  cudaStreamCaptureMode exchanged = static_cast<cudaStreamCaptureMode>(*mode);
  const cudaError_t error = cudaThreadExchangeStreamCaptureMode(&exchanged);
  *mode = exchanged;
  return error;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long) {
  const locked hold(lock);
  if (n_graphs >= from_environment("ROLLMESH_SIMT_GRAPHS", LONG_MAX))
    return said(cudaErrorMemoryAllocation);
  n_graphs++;
  n_made[GRAPHS]++;
  *made = new simt_graph_exec{graph->list, nullptr, 0};
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t s) {
  const locked hold(lock);
  return said(devices[s->owner].sticky);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t made, cudaStream_t s) {
  const locked hold(lock);
  cudaError_t error = devices[s->owner].sticky;
  for (size_t i = 0; i < made->list.size() && error == cudaSuccess; i++)
    error = enqueue(s, made->list[i]);
  made->stream = s, made->behind = s->n_enqueued;
  return said(error);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t made) {
  const locked hold(lock);
  if (made->stream && made->stream->n_done < made->behind)
    simt_fault("a graph is destroyed that a stream is still to run");
  delete made;
  n_graphs--;
  return cudaSuccess;
}
