// simt.cpp: the scheduler of simt.h. Each thread is a fibre. A fibre runs until it waits or ends,
// and a barrier opens when every fibre of its block (of its warp, for an operation of a warp) has
// reached it.
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

constexpr int FAULT_STATUS = 3;
constexpr unsigned WARP = 32, MAX_THREADS = 1024, MXCSR_FLUSHED = 0x1f80 | 0x8000 | 0x0040;
constexpr size_t PAGE = 4096;
// Size of a fibre's stack: a few lines more than a power of two, or all stacks would use the same
// sets of the caches.
constexpr size_t STACK = (64 << 10) + 17 * 64;

} // namespace

// Lanes of a warp are always released together, so they run one after the other: a waiting lane
// switches to its neighbour, the last one to the scheduler. Not in the unnamed namespace, because a
// compiler that knows all uses of a variable concludes that `go`, in which others run, does not
// change it.
namespace simt_turns {
enum wait_state : uint8_t { AT_WARP, AT_BARRIER, DONE, N_STATES };
// Stack pointers of waiting fibres. A fibre is made at its first turn and serves every block.
void *places[MAX_THREADS];
void *scheduler; // its own
wait_state states[MAX_THREADS];
unsigned n_waiting[N_STATES]; // of the lanes of this warp that had their turn
simt_op op_of_warp; // of those AT_WARP
// Values that the lanes gave. A lane is at most one exchange ahead of its warp, so two sets are
// enough.
uint64_t lanes[2][WARP];
unsigned set_of_warp;
unsigned n_threads, current, n_left; // n_left: lanes of this warp yet to come
const simt_launch *launch; // NULL between launches
} // namespace simt_turns
using namespace simt_turns;

namespace {

char *stacks;
bool reversed;
unsigned step; // 1, or −1 when reversed
const char *doing; // NULL if there is none
pthread_t doer; // the thread that does it

// Leaves this stack at *from, and continues where the stack `to` was left. It jumps instead of
// returning, because the processor could not predict the return, and the compiler saves the
// registers. The 128 bytes are the red zone of a leaf function.
inline void go(void **from, void *to) {
  asm volatile(R"(
    leaq -128(%%rsp), %%rsp
    pushq %%rbp
    leaq 1f(%%rip), %%rax
    pushq %%rax
    movq %%rsp, (%0)
    movq %1, %%rsp
    popq %%rax
    jmp *%%rax
  1:
    popq %%rbp
    leaq 128(%%rsp), %%rsp
)"
               : "+D"(from), "+S"(to)
               :
               : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15",
                 "cc", "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",
                 "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
}

[[noreturn]] void serve();

// A stack in the state in which `go` leaves one, about to enter serve as if called: 8 bytes off a
// multiple of 16.
void *make_fibre(unsigned i) {
  void **top = reinterpret_cast<void **>(stacks + (i + size_t{1}) * STACK) - 2;
  *top = reinterpret_cast<void *>(serve);
  return top;
}

inline void *place_of(unsigned i) { return places[i] ? places[i] : make_fibre(i); }

__attribute__((noinline)) void wait_as(wait_state state) {
  const unsigned me = current;
  states[me] = state;
  n_waiting[state]++;
  if (!--n_left) {
    go(&places[me], scheduler);
    return;
  }
  simt.thread.x = current = me + step;
  go(&places[me], place_of(current));
}

void serve() {
  for (;;) {
    launch->thread();
    wait_as(DONE);
  }
}

// Runs one warp to a barrier of the block or its end; the other warps may be behind it. Returns
// false if its lanes are not all in the same operation.
__attribute__((noinline)) bool run_warp(unsigned from) {
  const unsigned n = from + WARP < n_threads ? WARP : n_threads - from;
  do {
    n_waiting[AT_WARP] = n_waiting[AT_BARRIER] = n_waiting[DONE] = 0;
    n_left = n;
    set_of_warp ^= 1;
    simt.thread.x = current = reversed ? from + n - 1 : from;
    go(&scheduler, place_of(current));
  } while (n_waiting[AT_WARP] == n);
  return n_waiting[AT_BARRIER] == n || n_waiting[DONE] == n;
}

void run_block() {
  const unsigned n_warps = (n_threads + WARP - 1) / WARP;
  bool together = true;
  do {
    for (unsigned w = 0; w < n_warps; w++)
      together &= run_warp((reversed ? n_warps - 1 - w : w) * WARP);
    for (unsigned w = 0; w < n_warps; w++) together &= states[w * WARP] == states[0];
    if (together) continue;
    for (current = 0; states[current] == AT_BARRIER;) current++;
    simt_fault("a barrier that not all threads reach");
  } while (states[0] == AT_BARRIER);
}

struct guarded {
  char *raw, *data;
  size_t length;
};

guarded guarded_create(size_t bytes) {
  const size_t used = (bytes + 3) / 4 * 4, room = (used + PAGE - 1) / PAGE * PAGE,
               length = room + 2 * PAGE;
  void *raw = mmap(nullptr, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) simt_fault("no memory");
  char *base = static_cast<char *>(raw) + PAGE;
  if (room && mprotect(base, room, PROT_READ | PROT_WRITE)) simt_fault("no memory");
  memset(base, 0xff, room);
  return {static_cast<char *>(raw), base + room - used, length};
}

// Shared memory of one size, kept from launch to launch: aligned like a GPU's, followed by less
// than 16 bytes and an inaccessible page.
char *shared_of(size_t room) {
  static guarded kept[SIMT_SHARED_MOST / PAGE + 1];
  guarded &g = kept[(room + PAGE - 1) / PAGE];
  if (!g.raw) g = guarded_create((room + PAGE - 1) / PAGE * PAGE);
  return g.raw + g.length - PAGE - room;
}

void run_block_in(char *shared, size_t bytes, size_t room) {
  memset(shared, 0xff, room); // NaNs, because contents of an earlier block are not visible
  run_block();
  for (size_t i = bytes; i < room; i++)
    if (static_cast<unsigned char>(shared[i]) != 0xff)
      simt_fault("access outside a buffer or outside shared memory");
}

// ------------------------------------------------------------------------------------- faults
struct sigaction of_others[2];
// SIGILL: the sanitizer of tests/support/cuda_build.py raises it for an unaligned access.
const int SIGNALS[2] = {SIGSEGV, SIGILL};
stack_t stack_of_thread;
unsigned mxcsr_of_thread;

void on_signal(int number, siginfo_t *info, void *) {
  if (doing && pthread_equal(doer, pthread_self())) {
    if (number == SIGILL) simt_fault("an address that is not aligned");
    if (simt_open(info->si_addr)) return;
    simt_fault("access outside a buffer or outside shared memory");
  }
  const char *whose = number == SIGILL ? nullptr : simt_whose(info->si_addr);
  if (whose) simt_fault(whose);
  sigaction(number, &of_others[number == SIGILL],
            nullptr); // the previous handler: the access is repeated
}

} // namespace

// What the program was doing, with a newline at its end; a program need not have it.
extern "C" __attribute__((weak)) const char *simt_where();

void simt_fault(const char *text) {
  char line[1000];
  int n;
  const bool is_doing = doing && pthread_equal(doer, pthread_self());
  if (is_doing && launch)
    n = snprintf(line, sizeof line, "simt: %s (block %u,%u,%u thread %u of %s)\n", text,
                 simt.block.x, simt.block.y, simt.block.z, current, launch->kernel);
  else
    n = snprintf(line, sizeof line, "simt: %s%s%s\n", text, is_doing ? " in " : "",
                 is_doing ? doing : "");
  if (simt_where) {
    const size_t at = static_cast<size_t>(n);
    n += snprintf(line + at, sizeof line - at, "  %s", simt_where());
  }
  if (write(STDERR_FILENO, line, static_cast<size_t>(n)) < 0) _exit(FAULT_STATUS + 1);
  _exit(FAULT_STATUS);
}

void simt_watch() {
  struct sigaction action = {}, before;
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_ONSTACK | SA_SIGINFO;
  for (int i = 0; i < 2; i++) {
    if (sigaction(SIGNALS[i], &action, &before)) simt_fault("no signal handler");
    if (!(before.sa_flags & SA_SIGINFO) || before.sa_sigaction != on_signal) of_others[i] = before;
  }
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

// ----------------------------------------------------------------------------------- launches
void simt_order(bool reverse) { reversed = reverse; }

void *simt_buffer(size_t bytes) { return guarded_create(bytes).data; }

bool simt_is_shared(const void *from, size_t bytes) {
  const char *const begin = reinterpret_cast<const char *>(simt.shared);
  return from >= begin && static_cast<const char *>(from) + bytes <= begin + launch->shared_bytes;
}

const char *simt_refused(const simt_launch &l, size_t shared_most) {
  if (l.block.y != 1 || l.block.z != 1 || !l.block.x || l.block.x > MAX_THREADS)
    return "a block must be 1 to 1024 threads in x";
  const bool fits = l.grid.x && l.grid.x <= 0x7fffffff && l.grid.y && l.grid.z &&
                    l.grid.y <= 65535 && l.grid.z <= 65535;
  return fits && l.shared_bytes <= shared_most ? nullptr : "a launch CUDA refuses";
}

void simt_run(const simt_launch &l) {
  launch = &l;
  n_threads = l.block.x;
  step = reversed ? ~0u : 1u;
  simt.grid = l.grid;
  const size_t room = (l.shared_bytes + 15) / 16 * 16;
  char *const shared = shared_of(room);
  simt.shared = reinterpret_cast<float *>(shared);
  for (unsigned z = 0; z < l.grid.z; z++)
    for (unsigned y = 0; y < l.grid.y; y++)
      for (unsigned x = 0; x < l.grid.x; x++) {
        simt.block = dim3(x, y, z);
        run_block_in(shared, l.shared_bytes, room);
      }
  launch = nullptr;
}

void __syncthreads() { wait_as(AT_BARRIER); }

// Returns the values that the lanes of the calling lane's warp have given, once all have given one.
static const uint64_t *meet(simt_op op, unsigned mask, uint64_t value) {
  if (mask != 0xffffffffu) simt_fault("an operation of less than a warp");
  const unsigned lane = current % WARP, set = set_of_warp;
  if (current - lane + WARP > n_threads) simt_fault("an operation of a warp that is not whole");
  if (!n_waiting[AT_WARP]) op_of_warp = op;
  if (op != op_of_warp) simt_fault("lanes of a warp in different operations");
  lanes[set][lane] = value;
  wait_as(AT_WARP);
  return lanes[set];
}

uint64_t simt_exchange(unsigned mask, uint64_t value, unsigned lane) {
  return meet(SIMT_SHUFFLE, mask, value)[lane];
}

void simt_meet(simt_op op) { meet(op, 0xffffffffu, 0); }

void __syncwarp(unsigned mask) { meet(SIMT_SYNCWARP, mask, 0); }

unsigned __ballot_sync(unsigned mask, int predicate) {
  const uint64_t *of_lane = meet(SIMT_BALLOT, mask, predicate != 0);
  unsigned bits = 0;
  for (unsigned i = 0; i < WARP; i++) bits |= static_cast<unsigned>(of_lane[i]) << i;
  return bits;
}
