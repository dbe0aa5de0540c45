// simt.h: enough of CUDA to run the kernels of kernels/cuda on a CPU as C++. Blocks run one after
// another. The threads of a block are fibres that switch only at barriers and warp operations, in
// ascending or descending order (simt_order); each warp runs as far as it can before the next. So a
// missing barrier, of a block or of a warp, makes the result differ from the reference in one of
// the orders. Detected with a message and exit status 3: threads that exit or wait elsewhere while
// others wait at a barrier, lanes of one warp in different operations, an address that is not a
// multiple of its word, an access outside shared memory or outside a simt_buffer (both end at an
// inaccessible page). Not modelled: concurrent blocks, so atomics are plain; the missing memory
// ordering of shuffles and ballots; rounding that is specific to the hardware. simt_runtime.h is
// the rest of CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <tuple>
#include <type_traits>

#include "simt_runtime.h"

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct alignas(16) uint4 { // an unaligned access faults here as on a GPU
  unsigned x, y, z, w;
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
#define RM_ENQUEUE(kernel, grid, block, shared_bytes, stream, ...) \
  simt_enqueue( \
      simt_launch_of({#kernel, grid, block, shared_bytes}, kernel __VA_OPT__(, ) __VA_ARGS__), \
      stream)

struct simt_shape {
  const char *kernel;
  dim3 grid, block;
  size_t shared_bytes;
  const void *function = nullptr;
};
// A kernel's launch, its arguments by value as CUDA takes them.
struct simt_launch : simt_shape {
  explicit simt_launch(const simt_shape &shape) : simt_shape(shape) {}
  virtual void thread() const = 0; // one thread of it
  virtual ~simt_launch() = default;
};
template <class... P> struct simt_launch_with final : simt_launch {
  void (*function)(P...);
  std::tuple<P...> arguments;
  static_assert((std::is_trivially_copyable_v<P> && ...) && sizeof arguments <= 4096,
                "not what CUDA takes as arguments");
  simt_launch_with(const simt_shape &shape, void (*function_)(P...), P... given)
      : simt_launch(shape), function(function_), arguments(given...) {
    simt_shape::function = reinterpret_cast<const void *>(function_);
  }
  void thread() const override { std::apply(function, arguments); }
};
template <class... P, class... A>
std::unique_ptr<simt_launch> simt_launch_of(const simt_shape &shape, void (*function)(P...),
                                            A &&...given) {
  return std::make_unique<simt_launch_with<P...>>(shape, function, static_cast<P>(given)...);
}

// Without a stream: runs immediately. A launch that CUDA refuses sets the thread's last error;
// without a stream it is a fault.
void simt_enqueue(std::unique_ptr<simt_launch> launch, void *stream);
const char *simt_refused(const simt_launch &launch, size_t shared_most); // NULL, or the reason
// Called by one thread of the program at a time, between begin and end.
void simt_run(const simt_launch &launch);
void simt_begin(), simt_end(); // the thread's signal stack and floating-point environment
// For the message of a fault: the work between begin and end other than launches.
void simt_doing(const char *what);
[[noreturn]] void simt_fault(const char *text); // message and exit status 3
void simt_watch(); // detects faults of this process from here on
// In simt_memory.cpp, after a fault: whether work may access the memory. From then on it is
// accessible.
bool simt_open(const void *address);
// After a fault of the host: NULL, or the forbidden access.
const char *simt_whose(const void *address);
void simt_order(bool reverse); // of the threads, from the next launch on
inline void simt_finish() {} // until all launches are done
// Ends at an inaccessible page (rounded up to 4 bytes), filled with 0xff; never freed.
void *simt_buffer(size_t bytes);

// Operations of a warp: all 32 lanes in the same operation. Returns the value of lane `lane`.
enum simt_op { SIMT_SHUFFLE, SIMT_BALLOT, SIMT_SYNCWARP, SIMT_MMA, SIMT_MATRICES };
bool simt_is_shared(const void *from, size_t bytes); // of the running block
uint64_t simt_exchange(unsigned mask, uint64_t value, unsigned lane);
void simt_meet(simt_op op); // a barrier without an exchange

void __syncthreads();
void __syncwarp(unsigned mask = 0xffffffffu);
unsigned __ballot_sync(unsigned mask, int predicate);

template <class T> T __shfl_sync(unsigned mask, T value, int lane) {
  uint64_t word = 0;
  static_assert(sizeof value <= sizeof word);
  std::memcpy(&word, &value, sizeof value);
  word = simt_exchange(mask, word, static_cast<unsigned>(lane) % 32);
  std::memcpy(&value, &word, sizeof value);
  return value;
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  return __shfl_sync(mask, value, static_cast<int>(simt.thread.x % 32) ^ lane_mask);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned delta) {
  const unsigned lane = simt.thread.x % 32;
  return __shfl_sync(mask, value, static_cast<int>(lane < delta ? lane : lane - delta));
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }

inline unsigned atomicOr(unsigned *p, unsigned value) {
  const unsigned old = *p;
  *p = old | value;
  return old;
}
inline unsigned long long atomicAdd(unsigned long long *p, unsigned long long value) {
  const unsigned long long old = *p;
  *p = old + value;
  return old;
}
inline unsigned long long atomicMin(unsigned long long *p, unsigned long long value) {
  const unsigned long long old = *p;
  *p = value < old ? value : old;
  return old;
}
