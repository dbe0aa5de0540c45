// simt.cpp: the scheduler of simt.h. One fibre a thread; a fibre runs until it waits or ends, and a barrier opens when every fibre
// of its block (of its warp, for an operation of a warp) stands at it.
#include "simt.h"

#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <vector>

simt_state simt;

namespace {

enum wait_state { READY, AT_BARRIER, AT_WARP, DONE };
enum { WARP = 32, MAX_THREADS = 1024, STACK = 64 << 10, PAGE = 4096, FAULT_STATUS = 3 };

struct fibre {
  jmp_buf place;       // where it waits; a fibre is made once, at its first turn, and serves every block from then on
  bool made;
  wait_state state;
  unsigned exchanges;  // operations of its warp that this thread has entered
  simt_op op;          // the last of them
};

fibre fibres[MAX_THREADS];
uint64_t lanes[2][MAX_THREADS];  // a lane is at most one exchange ahead of its warp, so two sets of values are enough
char *stacks;
jmp_buf scheduler;
unsigned n_threads, current;
bool reversed;
const std::function<void()> *body;

[[noreturn]] void fault(const char *text) {
  char line[160];
  const int n =
      snprintf(line, sizeof line, "simt: %s (block %u,%u,%u thread %u)\n", text, simt.block.x, simt.block.y, simt.block.z, current);
  if (write(STDERR_FILENO, line, static_cast<size_t>(n)) < 0) _exit(FAULT_STATUS + 1);
  _exit(FAULT_STATUS);
}

void on_fault(int) { fault("access outside a buffer or outside shared memory"); }

// _setjmp and _longjmp change stacks without a system call, which swapcontext makes at each turn.
void wait_as(wait_state state) {
  fibre &me = fibres[current];
  me.state = state;
  if (!_setjmp(me.place)) _longjmp(scheduler, 1);
}

void serve() {
  for (;;) {
    (*body)();
    wait_as(DONE);
  }
}

void make_fibre(unsigned i) {
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stacks + static_cast<size_t>(i) * STACK;
  context.uc_stack.ss_size = STACK;
  context.uc_link = nullptr;
  makecontext(&context, serve, 0);
  fibres[i].made = true;
  setcontext(&context);
}

// Until it waits or ends.
void give_turn(fibre &to) {
  if (_setjmp(scheduler)) return;
  if (to.made) _longjmp(to.place, 1);
  make_fibre(current);
}

// Opens the barrier of fibres [from, to) when all of them stand at it.
bool open_barrier(unsigned from, unsigned to, wait_state at) {
  for (unsigned i = from; i < to; i++)
    if (fibres[i].state != at) return false;
  for (unsigned i = from; i < to; i++) {
    current = i;
    if (at == AT_WARP && fibres[i].op != fibres[from].op) fault("lanes of a warp in different operations");
    fibres[i].state = READY;
  }
  return true;
}

// One warp as far as it comes, to a barrier of the block or its end: others may be that far behind it.
bool run_warp(unsigned from) {
  const unsigned to = from + WARP < n_threads ? from + WARP : n_threads;
  for (bool moved = false;; moved = true) {
    bool ran = false;
    for (unsigned i = from; i < to; i++) {
      current = reversed ? from + to - 1 - i : i;
      if (fibres[current].state != READY) continue;
      simt.thread = dim3(current, 0, 0);
      give_turn(fibres[current]);
      ran = true;
    }
    const bool opened = open_barrier(from, to, AT_WARP);
    if (!ran && !opened) return moved;
  }
}

void run_block() {
  for (unsigned i = 0; i < n_threads; i++) {
    fibre &f = fibres[i];
    f.state = READY;
    f.exchanges = 0;
  }
  for (;;) {
    bool moved = false;
    const unsigned n_warps = (n_threads + WARP - 1) / WARP;
    for (unsigned w = 0; w < n_warps; w++) moved |= run_warp((reversed ? n_warps - 1 - w : w) * WARP);
    moved |= open_barrier(0, n_threads, AT_BARRIER);
    if (moved) continue;
    for (current = 0; current < n_threads; current++)
      if (fibres[current].state != DONE) fault("a barrier that not all threads reach");
    return;
  }
}

void prepare() {
  if (stacks) return;
  stacks = static_cast<char *>(malloc(static_cast<size_t>(MAX_THREADS) * STACK));
  static char signal_stack[64 << 10];
  stack_t alternate = {};
  alternate.ss_sp = signal_stack;
  alternate.ss_size = sizeof signal_stack;
  struct sigaction action = {};
  action.sa_handler = on_fault;
  action.sa_flags = SA_ONSTACK;
  if (!stacks || sigaltstack(&alternate, nullptr) || sigaction(SIGSEGV, &action, nullptr)) fault("no memory");
}

struct guarded {
  char *raw, *data;
  size_t length;
};

guarded guarded_create(size_t bytes) {
  const size_t used = (bytes + 3) / 4 * 4, room = (used + PAGE - 1) / PAGE * PAGE, length = room + 2 * PAGE;
  void *raw = mmap(nullptr, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) fault("no memory");
  char *base = static_cast<char *>(raw) + PAGE;
  if (room && mprotect(base, room, PROT_READ | PROT_WRITE)) fault("no memory");
  memset(base, 0xff, room);
  return {static_cast<char *>(raw), base + room - used, length};
}

}  // namespace

void simt_order(bool reverse) { reversed = reverse; }

void *simt_buffer(size_t bytes) { return guarded_create(bytes).data; }

void simt_launch(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()> &thread) {
  prepare();
  n_threads = block.x;
  if (block.y != 1 || block.z != 1 || !n_threads || n_threads > MAX_THREADS) fault("a block must be 1 to 1024 threads in x");
  if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535 || shared_bytes > (48 << 10)) fault("a launch CUDA refuses");
  body = &thread;
  simt.grid = grid;
  const guarded shared = guarded_create(shared_bytes);
  simt.shared = reinterpret_cast<float *>(shared.data);
  for (unsigned z = 0; z < grid.z; z++)
    for (unsigned y = 0; y < grid.y; y++)
      for (unsigned x = 0; x < grid.x; x++) {
        simt.block = dim3(x, y, z);
        memset(shared.data, 0xff, (shared_bytes + 3) / 4 * 4);  // NaNs: what an earlier block left is not there
        run_block();
      }
  munmap(shared.raw, shared.length);
}

void __syncthreads() { wait_as(AT_BARRIER); }

// The set of values that the calling lane's warp has given, once all have.
static const uint64_t *meet(simt_op op, unsigned mask, uint64_t value) {
  if (mask != 0xffffffffu) fault("an operation of less than a warp");
  const unsigned me = current, set = fibres[me].exchanges++ & 1u;
  if (me / WARP * WARP + WARP > n_threads) fault("an operation of a warp that is not whole");
  lanes[set][me] = value;
  fibres[me].op = op;
  wait_as(AT_WARP);
  return lanes[set] + me / WARP * WARP;
}

uint64_t simt_exchange(unsigned mask, uint64_t value, unsigned lane) { return meet(SIMT_SHUFFLE, mask, value)[lane]; }

void simt_meet(simt_op op) { meet(op, 0xffffffffu, 0); }

void simt_fault(const char *text) { fault(text); }

void __syncwarp(unsigned mask) { meet(SIMT_SYNCWARP, mask, 0); }

unsigned __ballot_sync(unsigned mask, int predicate) {
  const uint64_t *of_lane = meet(SIMT_BALLOT, mask, predicate != 0);
  unsigned bits = 0;
  for (unsigned i = 0; i < WARP; i++) bits |= static_cast<unsigned>(of_lane[i]) << i;
  return bits;
}
