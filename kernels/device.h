// device.h: the function table of a device: its memory, its one stream, and the op table whose ops
// are enqueued there.
//
// A device has one owner and is used by one thread at a time, between enter and leave. Enqueued
// work (copies, zero_2d, and the ops of `kernels` on `stream`) runs later, in order. Functions that
// enqueue do not return a status: the device keeps an error for the next call that returns one.
// After RM_DEVICE_FAULT the device is dead: it drops enqueued work, every status is
// RM_DEVICE_FAULT, and memory can only be freed.
//
// On the CPU host and device memory are the same (on_host), every call is complete when it returns,
// and the functions for pinned memory, copies between host and device or other devices, query_event
// and those for other streams are NULL, except copy_to_host.
#pragma once

#include "kernels.h"
#include "vendor_gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum rm_device_status {
  RM_DEVICE_OK = 0,
  RM_DEVICE_BUSY, // poll and query_event only: work is pending
  RM_DEVICE_NO_MEMORY, // the allocation failed; the device is usable
  RM_DEVICE_FAULT, // a launch or a kernel failed
  // end_capture only: another thread synchronized the device; the device is usable
  RM_DEVICE_CAPTURE_INVALIDATED,
} rm_device_status;

enum { RM_DEVICE_EVENTS = 4 };

typedef struct rm_device {
  void *self;
  const char *name; // "cpu", "cuda:0"
  int on_host; // device memory is host memory; copies between them are not needed
  int ordinal; // CUDA ordinal; −1: the CPU
  const rm_kernels *kernels;
  void *stream; // for rm_ctx

  // Device memory, zeroed, aligned to 256 bytes. free first waits for enqueued work.
  rm_device_status (*alloc)(void *self, size_t bytes, void **out);
  void (*free)(void *self, void *block, size_t bytes);
  // Pinned host memory, zeroed. Copies also take other host memory, but are slower and may block.
  rm_device_status (*alloc_pinned)(void *self, size_t bytes, void **out);
  void (*free_pinned)(void *self, void *block, size_t bytes);
  size_t (*available)(void *self); // bytes that alloc can allocate now; SIZE_MAX: unknown
  // Ordinal of the device that has this memory, even if another library allocated it; −1: none.
  // NULL on the CPU.
  int (*ordinal_of)(void *self, const void *address);

  // Enqueue a copy. Until it is complete, the host memory must not change (copy_to_device) or be
  // read (copy_to_host).
  void (*copy_to_device)(void *self, void *to, const void *from_host, size_t bytes);
  void (*copy_to_host)(void *self, void *to_host, const void *from, size_t bytes);
  // copy_2d from the memory of device `ordinal`. Does not wait for that device: writes to the
  // source must be complete.
  void (*copy_2d_from_peer)(void *self, void *to, size_t to_pitch, const void *from, int ordinal,
                            size_t from_pitch, size_t width, size_t rows);
  // Pitched copy: `rows` rows of `width` bytes, at any pitch (a negative pitch is cast to size_t).
  // Rows must not overlap, and neither must `to` and `from`.
  void (*copy_2d)(void *self, void *to, size_t to_pitch, const void *from, size_t from_pitch,
                  size_t width, size_t rows);
  void (*zero_2d)(void *self, void *at, size_t pitch, size_t width, size_t rows);

  // Events have numbers below RM_DEVICE_EVENTS. wait_event waits for the work that was enqueued
  // before the event was last recorded, and returns at once if it was not recorded; query_event
  // does not wait.
  void (*record_event)(void *self, int number);
  rm_device_status (*wait_event)(void *self, int number);
  rm_device_status (*query_event)(void *self, int number);
  rm_device_status (*wait)(void *self); // for all enqueued work
  rm_device_status (*poll)(void *self); // the same without waiting
  // Order work against another stream of the same device: a CUDA handle, or 1 and 2 for the default
  // streams (as in DLPack). wait_stream: work enqueued here from now on waits for that stream's
  // work so far (as in torch). make_stream_wait: that stream waits for the work enqueued here.
  void (*wait_stream)(void *self, void *stream);
  void (*make_stream_wait)(void *self, void *stream);
  // NULL, or the reason why these two cannot use the stream.
  const char *(*check_stream)(void *self, void *stream);

  // Graph capture: work enqueued between begin_capture and end_capture is captured instead of run;
  // each replay runs all of it, with the same addresses. If end_capture does not return
  // RM_DEVICE_OK, it has captured and run nothing. Waits, events and allocations are not allowed in
  // between. All four are NULL if the device cannot capture. destroy_graph is safe on NULL.
  rm_device_status (*begin_capture)(void *self);
  rm_device_status (*end_capture)(void *self, void **graph);
  void (*replay)(void *self, void *graph);
  void (*destroy_graph)(void *self, void *graph);

  // Makes the device the calling thread's current device. Returns the argument for leave.
  int (*enter)(void *self);
  void (*leave)(void *self, int saved);
  // CUDA's message for the last error status; valid until the next call.
  const char *(*message)(void *self);
  void (*close)(void *self); // called after all memory is freed
  // Opens cuBLASLt (vendor_gemm.h) for this device, which must outlive it. Returns NULL, or the
  // reason for failure, valid until the thread's next call. The pointer is NULL on the CPU.
  const char *(*open_vendor_gemm)(const struct rm_device *device,
                                  const rm_vendor_gemm_options *options, rm_vendor_gemm *out);
} rm_device;

// Result of opening a device (rm_cuda.h).
typedef enum rm_device_opened {
  RM_DEVICE_OPENED = 0,
  RM_DEVICE_NOT_FOUND, // no device of that ordinal, or no code for its architecture
  RM_DEVICE_FULL, // no device memory
  RM_DEVICE_FAILED,
} rm_device_opened;

// Device memory that another process can open by CUDA IPC (rm_cuda.h).
typedef struct rm_device_loan {
  char device[32]; // PCI bus id, since ordinals may differ between processes
  unsigned char handle[64];
  void *block; // its address in this process
  size_t bytes;
} rm_device_loan;

#ifdef __cplusplus
}
#endif
