// device.h: the function table of a device: its memory, its one queue (stream), and the op table whose ops are enqueued there.
//
// A device has one owner and is used by one thread at a time, between enter and leave. Enqueued work (put, get, fetch, copy, zero, and
// the ops of `kernels` on `stream`) runs later, in order. Enqueuing cannot fail: an error is kept, and the next call that returns a status
// returns it. After RM_DEVICE_FAULT the device is dead: enqueued work is dropped, every status is RM_DEVICE_FAULT, and memory can only be
// given back.
//
// On the CPU host and device memory are the same (on_host), and everything is done when its call returns.
#pragma once

#include "kernels.h"
#include "products.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum rm_device_status {
  RM_DEVICE_OK = 0,
  RM_DEVICE_BUSY,           // poll and reached only: work is left
  RM_DEVICE_NO_MEMORY,      // nothing has changed
  RM_DEVICE_FAULT,          // a launch or a kernel failed
  RM_DEVICE_SPOILT,         // recorded only: another thread's device-wide wait ended the capture; the device is usable
} rm_device_status;

enum { RM_DEVICE_MARKS = 4 };

typedef struct rm_device {
  void *self;
  const char *name;         // "cpu", "cuda:0"
  int on_host;              // the host can access the device's memory; put and get may be left out
  int ordinal;              // CUDA's number of it; −1: the CPU
  const rm_kernels *kernels;
  void *stream;             // for rm_ctx

  // Device memory, zeroed, aligned to 256 bytes. unmap first waits for enqueued work.
  rm_device_status (*map)(void *self, size_t bytes, void **out);
  void (*unmap)(void *self, void *block, size_t bytes);
  // Pinned host memory, zeroed. With other memory put and get are slower and may block.
  rm_device_status (*pin)(void *self, size_t bytes, void **out);
  void (*unpin)(void *self, void *block, size_t bytes);
  size_t (*available)(void *self);   // bytes that map can allocate now; SIZE_MAX: unknown
  int (*place)(void *self, const void *address);   // ordinal of the device whose memory it is, whoever allocated it; −1: none

  // Enqueued. Until it was waited for, host memory must not change (put) or be read (get).
  void (*put)(void *self, void *to, const void *from_host, size_t bytes);
  void (*get)(void *self, void *to_host, const void *from, size_t bytes);
  // copy from the memory of device `ordinal`. Does not wait for that device: the source must be complete.
  void (*fetch)(void *self, void *to, size_t to_pitch, const void *from, int ordinal, size_t from_pitch, size_t width, size_t rows);
  // Pitched copy: `rows` rows of `width` bytes, at any pitch (a negative one as a size_t). Rows must not overlap, nor `to` and `from`.
  void (*copy)(void *self, void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t rows);
  void (*zero)(void *self, void *at, size_t pitch, size_t width, size_t rows);

  // mark: records an event under a number below RM_DEVICE_MARKS. reach: waits for the work before it; returns at once if it was never
  // recorded. reached: the same without waiting. wait: for all work. poll: the same without waiting.
  void (*mark)(void *self, int number);
  rm_device_status (*reach)(void *self, int number);
  rm_device_status (*reached)(void *self, int number);
  rm_device_status (*wait)(void *self);
  rm_device_status (*poll)(void *self);
  // Order against another stream of the same device: a CUDA handle, or 1 and 2 for the default streams (as in DLPack). follow: work
  // enqueued here from now on waits for the stream's work so far. lead: the other way round.
  void (*follow)(void *self, void *stream);
  void (*lead)(void *self, void *stream);
  const char *(*refuses)(void *self, void *stream);   // NULL, or why follow and lead cannot use this stream

  // Graph capture: work enqueued between record and recorded is captured instead of run, and each replay runs it whole with the same
  // addresses. Without RM_DEVICE_OK nothing was captured or run. No wait, mark, map or pin in between. NULL where a device cannot
  // capture. forget frees a captured graph; safe on NULL.
  rm_device_status (*record)(void *self);
  rm_device_status (*recorded)(void *self, void **recording);
  void (*replay)(void *self, void *recording);
  void (*forget)(void *self, void *recording);

  int (*enter)(void *self);               // makes it the calling thread's current device; returns the argument for leave
  void (*leave)(void *self, int saved);
  const char *(*message)(void *self);     // CUDA's message for the last error status; valid until the next call
  void (*close)(void *self);              // after all memory was given back
  // Opens the vendor's library of matrix products (products.h) for this device, which must outlive it. Returns NULL, or the reason for
  // failure, valid until the thread's next call. The slot is NULL where a device has no such library.
  const char *(*products)(const struct rm_device *device, const rm_products_options *options, rm_products *out);
} rm_device;

// Result of opening a device (rm_cuda.h).
typedef enum rm_device_opened {
  RM_DEVICE_OPENED = 0,
  RM_DEVICE_NOT_SUCH,       // no device of that ordinal, or no code for it
  RM_DEVICE_FULL,           // no device memory
  RM_DEVICE_FAILED,
} rm_device_opened;

// Device memory that another process can open by CUDA IPC (rm_cuda.h).
typedef struct rm_device_loan {
  char device[32];          // PCI bus id, since ordinals may differ between processes
  unsigned char handle[64];
  void *block;              // its address in this process
  size_t bytes;
} rm_device_loan;

#ifdef __cplusplus
}
#endif
