// simt_kernels.cpp: see simt_inside.h. Loaded kernels by device, their limits of shared memory, and
// launches.
#include "simt_inside.h"

#include <cstdio>

using namespace simt_inside;

static std::set<std::pair<int, const void *>> loaded; // kernels, by device
// Bytes of a kernel's block on a device, if the kernel has requested them.
static std::map<std::pair<const void *, int>, size_t> shared_allowed;

cudaError_t simt_allow_shared(const void *function, int bytes) {
  const locked hold(lock);
  if (bytes < 0 || bytes > SIMT_SHARED_MOST) return said(cudaErrorInvalidValue);
  shared_allowed[{function, current_device}] =
      std::max(static_cast<size_t>(bytes), size_t{SIMT_SHARED_UNASKED});
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *kernel) {
  const locked hold(lock);
  attributes->binaryVersion = 90;
  const int architecture = architecture_of(current_device);
  if (architecture != 90 && architecture != 80) return said(cudaErrorNoKernelImageForDevice);
  loaded.insert({current_device, kernel});
  return cudaSuccess;
}

static void check_loaded(const simt_stream *s, const simt_launch &launch) {
  char text[240];
  if (loaded.count({s->owner, launch.function})) return;
  snprintf(text, sizeof text, "%s is launched before device %d has loaded it", launch.kernel,
           s->owner);
  simt_fault(text);
}

void simt_enqueue(std::unique_ptr<simt_launch> launch, void *stream) {
  const locked hold(lock);
  const auto allowed = shared_allowed.find(
      {launch->function, stream ? static_cast<simt_stream *>(stream)->owner : current_device});
  const char *refused = simt_refused(
      *launch, allowed == shared_allowed.end() ? size_t{SIMT_SHARED_UNASKED} : allowed->second);
  if (stream) {
    simt_stream *s = static_cast<simt_stream *>(stream);
    check_loaded(s, *launch);
    said(refused ? cudaErrorInvalidValue : enqueue(s, {.launch = std::move(launch)}));
    return;
  }
  if (refused) simt_fault(refused);
  simt_begin();
  simt_run(*launch);
  simt_end();
}
