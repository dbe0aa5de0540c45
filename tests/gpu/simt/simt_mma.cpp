// simt_mma.cpp: implements simt_mma.h. Elements are found by the place functions of packing.cuh,
// which follow the PTX manual.
#include "simt_mma.h"

#include <deque>
#include <vector>

#include "mma_model.h"
#include "packing.cuh"

namespace {

enum { WARP = 32, MAX_THREADS = 1024 };

struct operands {
  unsigned a[4], b[2];
};

// Two sets, as in simt.cpp: a lane is at most one operation ahead of its warp.
operands given[2][MAX_THREADS];
unsigned turns[MAX_THREADS];

uint16_t half_of(const unsigned *words, rm_mma_place place) {
  return static_cast<uint16_t>(words[place.word] >> (16 * place.half));
}

struct copy {
  void *to;
  const void *from; // NULL: zeros
};
struct copies {
  dim3 block;
  std::vector<copy> open; // not committed yet
  std::deque<std::vector<copy>> groups; // committed, oldest first
};
copies pending[MAX_THREADS];

copies &mine() {
  copies &c = pending[simt.thread.x];
  const bool same_block =
      c.block.x == simt.block.x && c.block.y == simt.block.y && c.block.z == simt.block.z;
  if (!same_block && (!c.open.empty() || !c.groups.empty()))
    simt_fault("a block ended before its copies");
  c.block = simt.block;
  return c;
}

} // namespace

void simt_mma16(float *c, uint4 a, uint2 b) {
  const unsigned me = simt.thread.x, lane = me % WARP, set = turns[me]++ & 1u;
  given[set][me] = {{a.x, a.y, a.z, a.w}, {b.x, b.y}};
  simt_meet(SIMT_MMA);
  const operands *warp = given[set] + me / WARP * WARP;
  for (int row = 0; row < RM_MMA_ROWS; row++)
    for (int col = 0; col < RM_MMA_COLS; col++) {
      const rm_mma_place to = rm_mma_c_place(row, col);
      if (to.lane != static_cast<int>(lane)) continue;
      uint16_t of_row[RM_MMA_K], of_col[RM_MMA_K];
      for (int k = 0; k < RM_MMA_K; k++) {
        const rm_mma_place in_a = rm_mma_a_place(row, k), in_b = rm_mma_b_place(k, col);
        of_row[k] = half_of(warp[in_a.lane].a, in_a);
        of_col[k] = half_of(warp[in_b.lane].b, in_b);
      }
      c[to.word] = mma_model(c[to.word], of_row, of_col);
    }
}

// A lane reads its row when it arrives, so other lanes of its warp cannot change the row after the
// operation.
uint4 simt_load_matrices(const void *shared_row) {
  const unsigned me = simt.thread.x, lane = me % WARP, set = turns[me]++ & 1u;
  if (reinterpret_cast<uintptr_t>(shared_row) % sizeof(uint4))
    simt_fault("a row of a matrix that is not aligned");
  if (!simt_is_shared(shared_row, sizeof(uint4)))
    simt_fault("a row of a matrix that is not in shared memory");
  memcpy(given[set][me].a, shared_row, sizeof(uint4));
  simt_meet(SIMT_MATRICES);
  const operands *row = given[set] + me / WARP * WARP + lane / 4;
  return {row[0].a[lane % 4], row[8].a[lane % 4], row[16].a[lane % 4], row[24].a[lane % 4]};
}

void simt_copy_async(void *to, const void *from, bool there) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % sizeof(uint4))
    simt_fault("an asynchronous copy that is not aligned");
  if (there) {
    // Reads the memory, so that a fault occurs where it is caused.
    volatile const char seen = *static_cast<const char *>(from);
    (void)seen;
  }
  memset(to, 0xff, sizeof(uint4));
  mine().open.push_back({to, there ? from : nullptr});
}

void simt_copies_commit() {
  copies &c = mine();
  c.groups.push_back(std::move(c.open));
  c.open.clear();
}

void simt_copies_wait(int left) {
  copies &c = mine();
  for (; static_cast<int>(c.groups.size()) > left; c.groups.pop_front())
    for (const copy &one : c.groups.front()) {
      if (one.from) memcpy(one.to, one.from, sizeof(uint4));
      else memset(one.to, 0, sizeof(uint4));
    }
}
