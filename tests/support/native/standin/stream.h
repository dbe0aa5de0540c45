// stream.h: the interface of a stream of common/fake_device.h, or of tests/gpu/simt, for the
// stand-in for NCCL: it accepts work, and knows where the device's memory is. It is the first
// member of the object that the stream points at.
#pragma once

#include <stddef.h>

typedef struct standin_stream standin_stream;
struct standin_stream {
  // `run` is called with a copy of `data` when all that was enqueued before is done, and again,
  // some time later, until it returns 1: a queue that is worked off by whoever waits for it must
  // not stay inside.
  void (*enqueue)(standin_stream *stream, int (*run)(void *data), const void *data, size_t bytes);
  char *(*host)(standin_stream *stream, const void *device);
};
