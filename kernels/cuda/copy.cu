// copy.cu: copies runs of bytes from one pitch to another, and writes runs of zeros.
// cudaMemcpy2DAsync rejects a pitch above a limit of the device or below the width, so this is a
// kernel; the caller uses the runtime's copy for contiguous rows. A word is as long as addresses,
// pitches and width allow. A power of two of threads covers a run, and the rest of a block covers
// the runs below.
#include "device.cuh"

namespace {

constexpr unsigned THREADS = 128, MAX_ACROSS = 2048, MAX_DOWN = 65535;

struct runs {
  char *to;
  const char *from; // NULL: zeros
  size_t to_pitch, from_pitch, width, rows;
};

template <class WORD>
__global__ void __launch_bounds__(THREADS) copy_kernel(runs r, unsigned across) {
  const unsigned down = THREADS / across;
  const size_t words = r.width / sizeof(WORD);
  for (size_t row = blockIdx.y * static_cast<size_t>(down) + threadIdx.x / across; row < r.rows;
       row += gridDim.y * static_cast<size_t>(down)) {
    WORD *to = reinterpret_cast<WORD *>(r.to + row * r.to_pitch);
    const WORD *from = reinterpret_cast<const WORD *>(r.from + row * r.from_pitch);
#pragma unroll 4
    for (size_t i = blockIdx.x * static_cast<size_t>(across) + threadIdx.x % across; i < words;
         i += gridDim.x * static_cast<size_t>(across))
      to[i] = r.from ? from[i] : WORD{};
  }
}

template <class WORD> void launch(void *stream, const runs &r) {
  const size_t words = r.width / sizeof(WORD);
  unsigned across = 1;
  while (across < THREADS && across < words) across *= 2;
  const size_t x = (words + across - 1) / across, down = THREADS / across,
               y = (r.rows + down - 1) / down;
  const dim3 grid = rm_grid(x < MAX_ACROSS ? x : MAX_ACROSS, y < MAX_DOWN ? y : MAX_DOWN);
  RM_LAUNCH(copy_kernel<WORD>, grid, THREADS, 0, stream, r, across);
}

} // namespace

void rm_cuda_copy(void *stream, void *to, size_t to_pitch, const void *from, size_t from_pitch,
                  size_t width, size_t rows) {
  if (!width || !rows) return;
  const runs r = {
      static_cast<char *>(to), static_cast<const char *>(from), to_pitch, from_pitch, width, rows};
  const size_t pitches = rows > 1 ? to_pitch | (from ? from_pitch : 0) : 0;
  const size_t odd =
      reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | pitches | width;
  if (odd % sizeof(uint4) == 0) launch<uint4>(stream, r);
  else if (odd % sizeof(uint32_t) == 0) launch<uint32_t>(stream, r);
  else if (odd % sizeof(uint16_t) == 0) launch<uint16_t>(stream, r);
  else launch<uint8_t>(stream, r);
}
