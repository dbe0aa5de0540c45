// device.h: where the ops of a program of checkops run. A program has one device: the CPU (cpu.c),
// or CUDA's kernels on the simulated device or on a card (tests/gpu/simt/checkops_cuda.cpp). All
// functions are called by one thread.
#pragma once

#include "kernels.h"
#include "machine.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MAX_VARIANTS = 8 };

// A table to compare, and the reference with its family's order of sums.
typedef struct variant {
  const char *name; // of --isa
  const rm_kernels *table; // NULL: not available here
  const rm_kernels *reference;
  const char *refused; // why it is not available
  const char *only; // the beginning of the names of its ops; NULL: all ops
  int is_emulated;
  int is_mma; // packed bf16 operands are in the layout of kernels/cuda/packing.cuh
} variant;

typedef struct device {
  int n_settings; // each variant runs once in each: numbers or orders of threads
  // Writes results of pack to memory, reads packed operands 16 bytes at a time, and computes ops in
  // passes if the workspace is small.
  int is_gpu;
  int is_managed; // buffers come from device_memory
} device;

extern const device check_device;
int device_variants(variant *out); // at most MAX_VARIANTS; those of one reference are adjacent
int device_open(void); // 0: ready, else the exit status of the program, after a message
void device_close(void);
// Prepares setting 0 … n_settings − 1: sets the threads of ctx and returns words for a report.
const char *device_set(rm_ctx *ctx, int setting);
void device_wait(void); // until all launches are done
void *device_memory(size_t bytes); // never freed; only with is_managed
const char *device_summary(void); // words about all settings, of the last line of a run
int device_measure(int setting, machine *out); // 0, or 1 if the device has no benchmark

#ifdef __cplusplus
}
#endif
