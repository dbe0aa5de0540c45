// device.h: where ops run and where their arrays live: memory, one queue of work, and the table of ops that are enqueued there.
//
// A device is opened for one owner; one thread at a time uses it, between enter and leave. What is enqueued (put, get, fetch, copy, zero,
// the ops of `kernels` on `stream`) is done in that order, some time later; only what waits says whether it went well. A call that
// enqueues cannot fail: what went wrong is remembered, and the next call that returns a status returns it. After RM_DEVICE_FAULT the
// device is dead: whatever is enqueued is dropped, every status is RM_DEVICE_FAULT, and memory can only be given back.
//
// On the CPU the two memories are one (on_host), and everything is done when its call returns.
#pragma once

#include "kernels.h"
#include "products.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum rm_device_status {
  RM_DEVICE_OK = 0,
  RM_DEVICE_BUSY,           // of poll and reached alone: there is work left
  RM_DEVICE_NO_MEMORY,      // the device lives, and nothing has changed
  RM_DEVICE_FAULT,          // a launch or a kernel failed
  RM_DEVICE_SPOILT,         // of recorded alone: another thread's wait for the whole device ended the recording; the device lives
} rm_device_status;

enum { RM_DEVICE_MARKS = 4 };

typedef struct rm_device {
  void *self;
  const char *name;         // "cpu", "cuda:0"
  int on_host;              // the host may touch the device's memory: put and get may be left out
  int ordinal;              // CUDA's number of it; −1: the CPU
  const rm_kernels *kernels;
  void *stream;             // for rm_ctx

  // Blocks of the device's memory: zeroed, aligned to 256 bytes. unmap waits for what is enqueued first.
  rm_device_status (*map)(void *self, size_t bytes, void **out);
  void (*unmap)(void *self, void *block, size_t bytes);
  // Blocks of host memory, zeroed, which put and get need for their full rate, and to be enqueued rather than done.
  rm_device_status (*pin)(void *self, size_t bytes, void **out);
  void (*unpin)(void *self, void *block, size_t bytes);
  size_t (*available)(void *self);   // bytes that map can give now; SIZE_MAX: not known
  int (*place)(void *self, const void *address);   // the ordinal of the device whose memory it is, whoever has it; −1: none's

  // Enqueued. Host memory stays as it is (put) or is not looked at (get) until the work was waited for.
  void (*put)(void *self, void *to, const void *from_host, size_t bytes);
  void (*get)(void *self, void *to_host, const void *from, size_t bytes);
  // As copy, from the memory of the device of that ordinal, whose queue is not asked: what is to be read is there. No kernel of this one
  // reads it.
  void (*fetch)(void *self, void *to, size_t to_pitch, const void *from, int ordinal, size_t from_pitch, size_t width, size_t rows);
  // `rows` runs of `width` bytes each, a pitch from one to the next, any pitch (backwards: as a size_t); runs do not overlap, nor do `to` and `from`.
  void (*copy)(void *self, void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t rows);
  void (*zero)(void *self, void *at, size_t pitch, size_t width, size_t rows);

  // mark: a place in the queue, under a number below RM_DEVICE_MARKS; reach: waits until all before it is done, at once where it was
  // never set; reached: whether it is. wait: until all is done. poll: whether all is done.
  void (*mark)(void *self, int number);
  rm_device_status (*reach)(void *self, int number);
  rm_device_status (*reached)(void *self, int number);
  rm_device_status (*wait)(void *self);
  rm_device_status (*poll)(void *self);
  // Between this queue and another stream of the same device, whoever has it: a handle of CUDA's, or 1 and 2, its default streams (as
  // DLPack writes them). follow: what is enqueued here from now on waits for what the stream has. lead: the other way round.
  void (*follow)(void *self, void *stream);
  void (*lead)(void *self, void *stream);
  const char *(*refuses)(void *self, void *stream);   // NULL, or why neither can be done with it; nothing has changed then

  // What is enqueued between record and recorded is not done but kept, and done whole by each replay, with the addresses of then.
  // Without RM_DEVICE_OK there is no recording, and nothing was done. Nothing waits, marks, maps or pins in between. NULL where a device
  // cannot. forget(NULL) is nothing.
  rm_device_status (*record)(void *self);
  rm_device_status (*recorded)(void *self, void **recording);
  void (*replay)(void *self, void *recording);
  void (*forget)(void *self, void *recording);

  int (*enter)(void *self);               // makes it the calling thread's current device; what to give to leave
  void (*leave)(void *self, int saved);
  const char *(*message)(void *self);     // of the last status but OK and BUSY: a sentence in CUDA's words; valid until the next call
  void (*close)(void *self);              // all blocks were given back
  // Opens a library of matrix products (products.h) for this device, a view until it is closed. NULL, or why not, as text that is valid
  // until the thread's next call. The slot is NULL where a device knows none.
  const char *(*products)(const struct rm_device *device, const rm_products_options *options, rm_products *out);
} rm_device;

// What became of opening one (rm_cuda.h).
typedef enum rm_device_opened {
  RM_DEVICE_OPENED = 0,
  RM_DEVICE_NOT_SUCH,       // there is none of that number, or no code for it
  RM_DEVICE_FULL,           // no memory there
  RM_DEVICE_FAILED,
} rm_device_opened;

// An allocation of a device's memory that another process may open (rm_cuda.h).
typedef struct rm_device_loan {
  char device[32];          // the device's PCI bus id: its ordinal may be another one there
  unsigned char handle[64];
  void *block;              // where it begins in this process
  size_t bytes;
} rm_device_loan;

#ifdef __cplusplus
}
#endif
