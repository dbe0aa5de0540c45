// simt.h: enough of CUDA for the kernels of kernels/cuda to run on a CPU as C++. Blocks run one after another, the threads of a block
// as fibres that change places at barriers and shuffles only, in ascending or descending order (SIMT_REVERSE): a missing barrier
// shows as bits that the reference does not have, in one order or the other. Caught with a message and exit status 3: threads that
// leave or wait elsewhere while others stand at a barrier, an access outside shared memory or outside a simt_buffer (both end at a
// page that nobody may touch). What is not modelled: memory that two blocks share, and rounding that the hardware does its own way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct simt_state {
  dim3 thread, block, grid;
  float *shared = nullptr;
};
extern simt_state simt;

#define threadIdx simt.thread
#define blockIdx simt.block
#define gridDim simt.grid
#define RM_SHARED(name) float *const name = simt.shared
#define RM_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ((void)(stream), simt_launch(grid, block, shared_bytes, [&] { kernel(__VA_ARGS__); }))

void simt_launch(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()> &thread);
void simt_order(bool reverse);      // of the threads, from the next launch on
inline void simt_finish() {}        // until all launches are done
void *simt_buffer(size_t bytes);    // ends at an unreachable page (rounded up to 4 bytes), filled with 0xff; never freed

void __syncthreads();
float __shfl_xor_sync(unsigned mask, float value, int lane_mask);  // all 32 lanes
