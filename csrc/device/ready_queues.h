// ready_queues.h: for each CUDA device the queue that is told when tensors of it are ready. A producer makes a stream of the tensor's own
// device wait for what writes it (DLPack's protocol), and that device need not be one that the engine runs on: then one is opened for
// this alone, when its first tensor comes, and stays.
#pragma once

#include "device/devices.h"

enum { RM_MAX_GPUS = 64 };

typedef struct rm_readers {
  char *library;                            // owned; NULL: the CPU, which reads no GPU
  const rm_device *own[RM_MAX_GPUS];        // by ordinal, views: those of the engine
  rm_device opened[RM_MAX_GPUS];            // by ordinal, owned; zeros: not opened
} rm_readers;

rm_code rm_readers_init(rm_readers *readers, const char *library, rm_error *err);   // on zeros; NULL: as they are
void rm_readers_destroy(rm_readers *readers);                                       // safe on zeros
// A view. RM_E_CONFIG: there is no such device; RM_E_DEVICE: it cannot be opened.
rm_code rm_readers_find(rm_readers *readers, int ordinal, const rm_device **out, rm_error *err);
// Until the device has done what it was to wait for; one that was found before.
rm_code rm_readers_wait(rm_readers *readers, int ordinal, rm_error *err);
