// ready_streams.h: one stream for each CUDA device, to wait until a tensor is ready. A DLPack
// producer gets a stream and makes it wait for the producer's pending writes; the engine then waits
// for that stream. A device that the engine does not use is opened at its first tensor. Only the
// thread that owns the engine calls these functions.
#pragma once

#include "device/devices.h"

enum { RM_MAX_GPUS = 64 };

typedef struct rm_ready_streams {
  char *library; // owned; NULL: a CPU engine, which reads no GPU tensors
  const rm_device *own[RM_MAX_GPUS]; // [ordinal] views: the engine's devices
  rm_device opened[RM_MAX_GPUS]; // [ordinal] owned; zeros: not opened
} rm_ready_streams;

// Called on a zeroed struct. library NULL: a CPU engine.
rm_code rm_ready_streams_init(rm_ready_streams *streams, const char *library, rm_error *err);
void rm_ready_streams_destroy(rm_ready_streams *streams); // safe on a zeroed struct
// Sets *out to a view of the device. RM_E_CONFIG: no such device; RM_E_DEVICE: it cannot be opened.
rm_code rm_ready_streams_find(rm_ready_streams *streams, int ordinal, const rm_device **out,
                              rm_error *err);
// Waits until the producer's writes are complete. Called after find with the same ordinal.
rm_code rm_ready_streams_wait(rm_ready_streams *streams, int ordinal, rm_error *err);
