// simt.cpp: the scheduler of simt.h. One fibre a thread; a fibre runs until it waits or ends, and a barrier opens when every fibre
// of its block (of its warp, for an operation of a warp) stands at it.
#include "simt.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xmmintrin.h>

simt_state simt;

namespace {

enum wait_state { READY, AT_BARRIER, AT_WARP, DONE };
constexpr int FAULT_STATUS = 3;
constexpr unsigned WARP = 32, MAX_THREADS = 1024, MXCSR_FLUSHED = 0x1f80 | 0x8000 | 0x0040;
constexpr size_t PAGE = 4096, SHARED_MOST = 48 << 10;
// Of a fibre's stack; a few lines more than a power of two, or all of them would lie in the same sets of the caches.
constexpr size_t STACK = (64 << 10) + 17 * 64;

struct fibre {
  void *place;         // where it waits: its stack pointer; a fibre is made once, at its first turn, and serves every block from then on
  wait_state state;
  unsigned exchanges;  // operations of its warp that this thread has entered
  simt_op op;          // the last of them
};

fibre fibres[MAX_THREADS];
uint64_t lanes[2][MAX_THREADS];  // a lane is at most one exchange ahead of its warp, so two sets of values are enough
char *stacks;
void *scheduler;
unsigned n_threads, current;
bool reversed;
const simt_launch *launch;   // NULL between launches
const char *doing;           // NULL where nothing is
pthread_t doer;              // the thread that does it

// Saves what a call must keep on this stack and its pointer at *from, and goes on where another stack was left.
extern "C" void simt_switch(void **from, void *to);
asm(R"(
.text
.p2align 4
.type simt_switch, @function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch, .-simt_switch
)");

void wait_as(wait_state state) {
  fibre &me = fibres[current];
  me.state = state;
  simt_switch(&me.place, scheduler);
}

void serve() {
  for (;;) {
    launch->thread();
    wait_as(DONE);
  }
}

// A stack as simt_switch leaves one, about to enter serve.
void make_fibre(unsigned i) {
  void **top = reinterpret_cast<void **>(stacks + (static_cast<size_t>(i) + 1) * STACK);
  top[-2] = reinterpret_cast<void *>(serve);  // as if called: 8 bytes off a multiple of 16 at the first instruction
  fibres[i].place = top - 2 - 6;
}

// Until it waits or ends.
void give_turn(fibre &to) {
  if (!to.place) make_fibre(current);
  simt_switch(&scheduler, to.place);
}

// Opens the barrier of fibres [from, to) when all of them stand at it.
bool open_barrier(unsigned from, unsigned to, wait_state at) {
  for (unsigned i = from; i < to; i++)
    if (fibres[i].state != at) return false;
  for (unsigned i = from; i < to; i++) {
    current = i;
    if (at == AT_WARP && fibres[i].op != fibres[from].op) simt_fault("lanes of a warp in different operations");
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
      if (fibres[current].state != DONE) simt_fault("a barrier that not all threads reach");
    return;
  }
}

struct guarded {
  char *raw, *data;
  size_t length;
};

guarded guarded_create(size_t bytes) {
  const size_t used = (bytes + 3) / 4 * 4, room = (used + PAGE - 1) / PAGE * PAGE, length = room + 2 * PAGE;
  void *raw = mmap(nullptr, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) simt_fault("no memory");
  char *base = static_cast<char *>(raw) + PAGE;
  if (room && mprotect(base, room, PROT_READ | PROT_WRITE)) simt_fault("no memory");
  memset(base, 0xff, room);
  return {static_cast<char *>(raw), base + room - used, length};
}

// Shared memory of one size, kept from launch to launch: it ends at a page that nobody may touch.
guarded &shared_of(size_t bytes) {
  static guarded kept[SHARED_MOST / PAGE + 1];
  guarded &g = kept[(bytes + PAGE - 1) / PAGE];
  if (!g.raw) g = guarded_create((bytes + PAGE - 1) / PAGE * PAGE);
  g.data = g.raw + g.length - PAGE - (bytes + 3) / 4 * 4;
  return g;
}

// ------------------------------------------------------------------------------------------------ faults
struct sigaction others;
stack_t stack_of_thread;
unsigned mxcsr_of_thread;

void on_signal(int number, siginfo_t *info, void *) {
  if (doing && pthread_equal(doer, pthread_self())) simt_fault("access outside a buffer or outside shared memory");
  if (const char *whose = simt_whose(info->si_addr)) simt_fault(whose);
  sigaction(number, &others, nullptr);  // what it was before: the access is made again
}

}  // namespace

void simt_fault(const char *text) {
  char line[400];
  int n;
  const bool is_doing = doing && pthread_equal(doer, pthread_self());
  if (is_doing && launch)
    n = snprintf(line, sizeof line, "simt: %s (block %u,%u,%u thread %u of %s)\n", text, simt.block.x, simt.block.y, simt.block.z, current,
                 launch->kernel);
  else n = snprintf(line, sizeof line, "simt: %s%s%s\n", text, is_doing ? " in " : "", is_doing ? doing : "");
  if (write(STDERR_FILENO, line, static_cast<size_t>(n)) < 0) _exit(FAULT_STATUS + 1);
  _exit(FAULT_STATUS);
}

void simt_watch() {
  struct sigaction action = {}, before;
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_ONSTACK | SA_SIGINFO;
  if (sigaction(SIGSEGV, &action, &before)) simt_fault("no signal handler");
  if (!(before.sa_flags & SA_SIGINFO) || before.sa_sigaction != on_signal) others = before;
}

void simt_begin() {
  static char signal_stack[64 << 10];
  stack_t alternate = {};
  alternate.ss_sp = signal_stack;
  alternate.ss_size = sizeof signal_stack;
  if (!stacks) stacks = static_cast<char *>(aligned_alloc(64, MAX_THREADS * STACK));
  if (!stacks || sigaltstack(&alternate, &stack_of_thread)) simt_fault("no memory");
  simt_watch();
  mxcsr_of_thread = _mm_getcsr();
  _mm_setcsr(MXCSR_FLUSHED);
  doer = pthread_self();
  doing = "a launch";
}

void simt_end() {
  doing = nullptr;
  _mm_setcsr(mxcsr_of_thread);
  sigaltstack(&stack_of_thread, nullptr);
}

void simt_doing(const char *what) { doing = what; }

// ------------------------------------------------------------------------------------------------ launches
void simt_order(bool reverse) { reversed = reverse; }

void *simt_buffer(size_t bytes) { return guarded_create(bytes).data; }

const char *simt_refused(const simt_launch &l) {
  if (l.block.y != 1 || l.block.z != 1 || !l.block.x || l.block.x > MAX_THREADS) return "a block must be 1 to 1024 threads in x";
  const bool fits = l.grid.x && l.grid.x <= 0x7fffffff && l.grid.y && l.grid.z && l.grid.y <= 65535 && l.grid.z <= 65535;
  return fits && l.shared_bytes <= SHARED_MOST ? nullptr : "a launch CUDA refuses";
}

void simt_run(const simt_launch &l) {
  launch = &l;
  n_threads = l.block.x;
  simt.grid = l.grid;
  const size_t shared_bytes = (l.shared_bytes + 3) / 4 * 4;
  simt.shared = reinterpret_cast<float *>(shared_of(shared_bytes).data);
  for (unsigned z = 0; z < l.grid.z; z++)
    for (unsigned y = 0; y < l.grid.y; y++)
      for (unsigned x = 0; x < l.grid.x; x++) {
        simt.block = dim3(x, y, z);
        memset(simt.shared, 0xff, shared_bytes);  // NaNs: what an earlier block left is not there
        run_block();
      }
  launch = nullptr;
}

void __syncthreads() { wait_as(AT_BARRIER); }

// The set of values that the calling lane's warp has given, once all have.
static const uint64_t *meet(simt_op op, unsigned mask, uint64_t value) {
  if (mask != 0xffffffffu) simt_fault("an operation of less than a warp");
  const unsigned me = current, set = fibres[me].exchanges++ & 1u;
  if (me / WARP * WARP + WARP > n_threads) simt_fault("an operation of a warp that is not whole");
  lanes[set][me] = value;
  fibres[me].op = op;
  wait_as(AT_WARP);
  return lanes[set] + me / WARP * WARP;
}

uint64_t simt_exchange(unsigned mask, uint64_t value, unsigned lane) { return meet(SIMT_SHUFFLE, mask, value)[lane]; }

void __syncwarp(unsigned mask) { meet(SIMT_SYNCWARP, mask, 0); }

unsigned __ballot_sync(unsigned mask, int predicate) {
  const uint64_t *of_lane = meet(SIMT_BALLOT, mask, predicate != 0);
  unsigned bits = 0;
  for (unsigned i = 0; i < WARP; i++) bits |= static_cast<unsigned>(of_lane[i]) << i;
  return bits;
}
