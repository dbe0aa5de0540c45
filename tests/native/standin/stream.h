// stream.h: what a stream of common/fake_device.h is to the stand-in for NCCL: something that takes work, and knows where the device's
// memory lies.
#pragma once

#include <stddef.h>

typedef struct standin_stream standin_stream;
struct standin_stream {
  // `run` is called with a copy of `data` when all that was enqueued before is done.
  void (*enqueue)(standin_stream *stream, void (*run)(void *data), const void *data, size_t bytes);
  char *(*host)(standin_stream *stream, const void *device);
};
