// open_kernels.h: opens device 0 for a program that calls kernels without an engine. Opening it
// allows the kernels their shared memory.
#pragma once

#include "rm_cuda.h"

#include <cstdio>

inline bool open_kernels() {
  rm_device opened;
  char why[256];
  if (rm_cuda_open(0, nullptr, &opened, why) == RM_DEVICE_OPENED) return true;
  printf("rm_cuda_open: %s\n", why);
  return false;
}
