// simt_runtime.cpp: simt_runtime.h over simt.cpp. One lock over everything: the fibres, which are one set, and the tables below.
#include "simt.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <set>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "standin/stream.h"

namespace {

enum { PAGE = 4096, CHUNK = 16 * PAGE, MAX_OPEN = 4096, ALIGNMENT = 256, MAX_DEVICES = 64, HOST = -1, FRESH = 0xff, SLACK = 0xa5 };

struct block {
  char *raw, *room, *data;          // guard page, then pages of which the last hold the block, then a guard page
  size_t length, room_bytes, bytes;  // of the mapping, of its pages that may be touched, of the block
  int owner;                        // a device, or HOST
  int file;                         // of its room, which other processes open; 0: none
  bool is_borrowed;                 // another process's
  cudaIpcMemHandle_t handle;
  char *slack_from() const { return std::max(room, data - ALIGNMENT); }
};

struct device {
  bool has_context;
  cudaError_t sticky;
  size_t used;
  int n_streams;
};

// One of the five kinds: a launch, somebody else's (`run`, over `data`), a wait for what another stream has before a place, a copy
// (`from`), a fill.
struct work {
  std::shared_ptr<const simt_launch> launch = {};
  char *to = nullptr;
  const char *from = nullptr;
  int value = 0;
  size_t bytes = 0;
  bool is_peers = false;  // `from` is another device's
  cudaStream_t awaited = nullptr;
  uint64_t place = 0;
  int (*run)(void *data) = nullptr;  // returns whether it is through; else it is called again
  std::vector<char> data = {};
};

std::mutex lock;
using locked = std::unique_lock<std::mutex>;
std::map<const char *, block> blocks;  // by data
std::set<cudaStream_t> streams;
std::set<std::pair<int, int>> peers;  // who may read whom
std::set<std::pair<int, const void *>> loaded;  // kernels, by device
std::map<std::pair<const void *, int>, size_t> shared_allowed;  // bytes of a kernel's block on a device, where it asked
device devices[MAX_DEVICES];
thread_local cudaError_t last;
thread_local int current_device;
thread_local int current_context = -1;  // the driver's: of which device; −1: none, then the runtime takes that of its own
thread_local cudaStream_t captured;  // by this thread
thread_local cudaStreamCaptureMode thread_mode;
long n_graphs;                       // made and not destroyed
// Of the process: blocks of devices, pinned blocks, graphs instantiated, streams, events.
enum { DEVICE_BLOCKS, PINNED_BLOCKS, GRAPHS, STREAMS, EVENTS, N_KINDS };
std::atomic<uint64_t> n_made[N_KINDS];

long from_environment(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text && *text ? atol(text) : otherwise;
}

cudaError_t said(cudaError_t error) {
  if (error != cudaSuccess) last = error;
  return error;
}

}  // namespace

struct simt_stream {
  standin_stream others;  // first
  int owner;
  std::deque<work> queue;
  uint64_t n_enqueued, n_done;
  uint64_t behind_others;  // the place behind the last work of others
  long n_launches, fault_at, n_captured, spoil_at;
  std::vector<work> *capture;  // NULL: not recording
  std::thread::id capturer;
  cudaStreamCaptureMode mode;  // of the capture
  bool is_invalid;
};
struct simt_event {
  cudaStream_t stream;
  uint64_t place;  // work of the stream before it
  bool is_captured;
};
struct simt_graph {
  std::vector<work> list;
};
struct simt_graph_exec {
  std::vector<work> list;
  cudaStream_t stream;  // where it was launched last, and the place behind it
  uint64_t behind;
};

// ------------------------------------------------------------------------------------------------ blocks
namespace {

// The block that [at, at + bytes) begins in, if it may be touched by nobody else.
const block *block_of(const void *at) {
  auto found = blocks.upper_bound(static_cast<const char *>(at));
  if (found == blocks.begin()) return nullptr;
  const block &b = std::prev(found)->second;
  return at < b.data + b.bytes ? &b : nullptr;
}

bool is_inside(const block *b, const void *at, size_t bytes) {
  return b && bytes <= b->bytes && static_cast<const char *>(at) <= b->data + (b->bytes - bytes);
}

bool is_on(int owner, const void *at, size_t bytes) {
  const block *b = block_of(at);
  return b && b->owner == owner && is_inside(b, at, bytes);
}

cudaError_t block_create(int owner, size_t bytes, void **out) {
  const size_t used = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, room = (used + PAGE - 1) / PAGE * PAGE;
  block b = {};
  b.length = room + 2 * PAGE, b.room_bytes = room, b.bytes = bytes, b.owner = owner;
  void *raw = mmap(nullptr, b.length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return cudaErrorMemoryAllocation;
  b.raw = static_cast<char *>(raw), b.room = b.raw + PAGE, b.data = b.room + room - used;
  if (mprotect(b.room, room, PROT_READ | PROT_WRITE)) simt_fault("mprotect");
  memset(b.slack_from(), SLACK, static_cast<size_t>(b.room + room - b.slack_from()));
  memset(b.data, FRESH, bytes);
  if (owner != HOST && mprotect(b.room, room, PROT_NONE)) simt_fault("mprotect");
  blocks[b.data] = b;
  *out = b.data;
  return cudaSuccess;
}

// Device memory is opened where work touches it, in pieces, and closed when the drain ends: to open all of it would cost more than most
// launches do. A piece of work says what it touches, a kernel is met by simt_open at its first access.
struct opened {
  const block *b;
  char *from, *to;
};
opened open_now[MAX_OPEN];
int n_open, drains = HOST;  // whose memory may be opened

void protect(char *from, const char *to, int protection) {
  if (mprotect(from, static_cast<size_t>(to - from), protection)) simt_fault("mprotect");
}

bool is_slack(const char *from, const char *to) {
  return std::all_of(from, to, [](char c) { return static_cast<unsigned char>(c) == SLACK; });
}

[[noreturn]] void slack_written(const block &b) {
  char text[120];
  snprintf(text, sizeof text, "bytes beside a block of %zu bytes were written", b.bytes);
  simt_fault(text);
}

void check_slack(const block &b) {
  if (!is_slack(b.slack_from(), b.data) || !is_slack(b.data + b.bytes, b.room + b.room_bytes)) slack_written(b);
}

// What lies beside a block is in its first and its last chunk.
void close_all() {
  for (int i = 0; i < n_open; i++) {
    const opened &o = open_now[i];
    if (o.from == o.b->room && !is_slack(o.b->slack_from(), o.b->data)) slack_written(*o.b);
    if (o.to == o.b->room + o.b->room_bytes && !is_slack(o.b->data + o.b->bytes, o.to)) slack_written(*o.b);
  }
  for (int i = 0; i < n_open; i++) protect(open_now[i].from, open_now[i].to, PROT_NONE);
  n_open = 0;
}

// The chunks of b that hold [from, to).
void open_chunks(const block &b, const char *from, const char *to) {
  const ptrdiff_t first = (from - b.room) / CHUNK * CHUNK, behind = (to - b.room + CHUNK - 1) / CHUNK * CHUNK;
  const opened wanted = {&b, b.room + first, b.room + std::min(behind, static_cast<ptrdiff_t>(b.room_bytes))};
  for (int i = 0; i < n_open; i++)
    if (open_now[i].from <= wanted.from && wanted.to <= open_now[i].to) return;
  if (n_open == MAX_OPEN) close_all();  // what is needed of it again opens again
  open_now[n_open++] = wanted;
  protect(wanted.from, wanted.to, PROT_READ | PROT_WRITE);
}

void block_drop(std::map<const char *, block>::iterator at) {
  if (at->second.file) close(at->second.file);
  munmap(at->second.raw, at->second.length);
  blocks.erase(at);
}

bool block_destroy(void *data, bool on_host) {
  auto found = blocks.find(static_cast<char *>(data));
  if (found == blocks.end() || (found->second.owner == HOST) != on_host || found->second.is_borrowed) return false;
  const block &b = found->second;
  if (b.file && flock(b.file, LOCK_EX | LOCK_NB)) simt_fault("memory is freed that another process has open");
  if (on_host) check_slack(b);
  else devices[b.owner].used -= b.bytes;
  block_drop(found);
  return true;
}

// ------------------------------------------------------------------------------------------------ the queue
// Returns whether it is through.
bool do_work(simt_stream *s, work &w) {
  if (w.launch) {
    if (++s->n_launches == s->fault_at) devices[s->owner].sticky = cudaErrorIllegalAddress;
    else simt_run(*w.launch);
    return true;
  }
  if (w.run) {
    simt_doing("an exchange");
    return w.run(w.data.data());
  }
  simt_doing(w.from ? "cudaMemcpyAsync" : "cudaMemsetAsync");
  for (const char *at : {static_cast<const char *>(w.to), w.from}) {
    const block *b = at ? block_of(at) : nullptr;
    if (b && (b->owner == s->owner || (w.is_peers && b->owner != HOST)) && w.bytes) open_chunks(*b, at, at + w.bytes);
  }
  if (w.from) memcpy(w.to, w.from, w.bytes);
  else memset(w.to, w.value, w.bytes);
  if (w.is_peers) close_all();  // to the kernels behind it
  return true;
}

void drain(simt_stream *s, uint64_t place, work *now = nullptr);

// Returns whether the other stream has come so far; one that is gone was drained.
bool await(simt_stream *s, const work &w) {
  if (!streams.count(w.awaited)) return true;
  const uint64_t place = std::min(w.place, w.awaited->n_enqueued);
  drains = HOST;
  close_all();
  simt_end();
  drain(w.awaited, place);
  simt_begin();
  drains = s->owner;
  return w.awaited->n_done >= place;
}

// Does what was enqueued before `place`, with the device's memory open to it, and `now` behind it; as far as it comes.
void drain(simt_stream *s, uint64_t place, work *now) {
  const device &d = devices[s->owner];
  if (d.sticky == cudaSuccess && (s->n_done < place || now)) {
    simt_begin();
    drains = s->owner;
    for (; s->n_done < place && d.sticky == cudaSuccess; s->n_done++) {
      work &w = s->queue.front();
      if (!(w.awaited ? await(s, w) : do_work(s, w))) break;
      s->queue.pop_front();
    }
    if (now && s->n_done >= place && d.sticky == cudaSuccess) do_work(s, *now);
    drains = HOST;
    close_all();
    for (const auto &[data, b] : blocks)
      if (b.owner == HOST) check_slack(b);
    simt_end();
  }
  if (d.sticky == cudaSuccess) return;
  s->queue.clear();
  s->n_done = s->n_enqueued;
}

// All of it, however long another rank takes.
void drain_whole(simt_stream *s, uint64_t place, locked &hold, work *now = nullptr) {
  for (drain(s, place, now); s->n_done < place; drain(s, place, now)) {
    hold.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    hold.lock();
  }
}

// Every stream of a device, anybody's.
void drain_device(int owner, locked &hold) {
  const auto is_due = [owner](const simt_stream *s) { return s->owner == owner && s->n_done < s->n_enqueued; };
  for (auto s = streams.begin(); (s = std::find_if(streams.begin(), streams.end(), is_due)) != streams.end();) {
    drain(*s, (*s)->n_enqueued);
    if (!is_due(*s)) continue;
    hold.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    hold.lock();
  }
}

cudaError_t enqueue(simt_stream *s, work w) {
  if (devices[s->owner].sticky != cudaSuccess) return devices[s->owner].sticky;
  if (s->capture) {
    s->is_invalid |= ++s->n_captured == s->spoil_at;
    if (s->is_invalid) return cudaErrorStreamCaptureInvalidated;
    s->capture->push_back(std::move(w));
    return cudaSuccess;
  }
  const bool is_others = w.run;
  s->queue.push_back(std::move(w));
  s->n_enqueued++;
  if (is_others) s->behind_others = s->n_enqueued;
  if (from_environment("ROLLMESH_SIMT_EAGER", 0)) drain(s, s->n_enqueued);
  return cudaSuccess;
}

// Another rank may wait for an exchange that stands in a queue here, while this one's thread waits for something else: a thread of its own
// does, a little later than a GPU would, what stands before the last exchange of each queue, and the exchange.
struct helper {
  std::thread *thread;  // NULL until it is needed
  pid_t process;        // whose it is: a forked child has none
  std::atomic<bool> is_over;

  void work() {
    while (!is_over) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      const locked hold(lock);
      for (simt_stream *s : streams)
        if (s->n_done < s->behind_others) drain(s, s->behind_others);
    }
  }
  void begin() {
    if (thread && process == getpid()) return;
    process = getpid();
    thread = new std::thread([this] { work(); });
  }
  ~helper() {
    is_over = true;
    if (thread && process == getpid()) thread->join();
  }
} others_helper;

// A call that a capture does not allow.
cudaError_t forbid(simt_stream *s) {
  s->is_invalid = true;
  return cudaErrorStreamCaptureUnsupported;
}

// The capture that does not allow this thread what might be unsafe in it; NULL: none.
simt_stream *forbidding() {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return nullptr;
  if (captured && captured->mode != cudaStreamCaptureModeRelaxed) return captured;
  for (simt_stream *s : streams)
    if (s->capture && s->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal) return s;
  return nullptr;
}

// Whether the current device can do what is no stream's; makes its context.
cudaError_t ready() {
  if (simt_stream *s = forbidding()) return forbid(s);
  devices[current_context = current_device].has_context = true;
  return devices[current_device].sticky;
}

}  // namespace

static void check_loaded(const simt_stream *s, const simt_launch &launch) {
  char text[240];
  if (loaded.count({s->owner, launch.function})) return;
  snprintf(text, sizeof text, "%s is launched before device %d has loaded it", launch.kernel, s->owner);
  simt_fault(text);
}

bool simt_open(const void *address) {
  auto next = blocks.upper_bound(static_cast<const char *>(address));
  if (next == blocks.end() || address < next->second.room) {
    if (next == blocks.begin()) return false;
    next--;
  }
  const block &b = next->second;
  const char *at = static_cast<const char *>(address);
  if (b.owner == HOST || b.owner != drains || at < b.room || at >= b.room + b.room_bytes) return false;
  open_chunks(b, at, at + 1);
  return true;
}

const char *simt_whose(const void *address) {
  static char text[120];
  for (const auto &[data, b] : blocks) {
    if (address < b.raw || address >= b.raw + b.length) continue;
    const char *memory = b.owner == HOST ? "pinned memory" : "memory of a device";
    snprintf(text, sizeof text, "the host touched %s, byte %td of a block of %zu", memory, static_cast<const char *>(address) - b.data,
             b.bytes);
    return text;
  }
  return nullptr;
}

void simt_enqueue(std::unique_ptr<simt_launch> launch, void *stream) {
  const locked hold(lock);
  const auto allowed = shared_allowed.find({launch->function, stream ? static_cast<simt_stream *>(stream)->owner : current_device});
  const char *refused = simt_refused(*launch, allowed == shared_allowed.end() ? size_t{SIMT_SHARED_UNASKED} : allowed->second);
  if (stream) {
    simt_stream *s = static_cast<simt_stream *>(stream);
    check_loaded(s, *launch);
    said(refused ? cudaErrorInvalidConfiguration : enqueue(s, {.launch = std::move(launch)}));
    return;
  }
  if (refused) simt_fault(refused);
  simt_begin();
  simt_run(*launch);
  simt_end();
}

// ------------------------------------------------------------------------------------------------ errors and devices
const char *cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorDeviceUninitialized: return "invalid device context";
    case cudaErrorMapBufferObjectFailed: return "mapping of buffer object failed";
    case cudaErrorAlreadyMapped: return "resource already mapped";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidDeviceFunction: return "invalid device function";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorIllegalState: return "the operation cannot be performed in the present state";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorPeerAccessAlreadyEnabled: return "peer access is already enabled";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureWrongThread: return "attempt to terminate a thread-local capture sequence from another thread";
    case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
  }
  return "unrecognized error code";
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = last;
  last = cudaSuccess;
  return error;
}

cudaError_t cudaDriverGetVersion(int *version) {
  *version = static_cast<int>(from_environment("ROLLMESH_SIMT_DRIVER", 13000));
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *n) {
  *n = 0;
  if (from_environment("ROLLMESH_SIMT_DRIVER", 13000) < 13000) return said(cudaErrorInsufficientDriver);
  *n = static_cast<int>(std::min(from_environment("ROLLMESH_SIMT_DEVICES", 8), static_cast<long>(MAX_DEVICES)));
  return said(*n > 0 ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *ordinal) {
  *ordinal = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int ordinal) {
  int n = 0;
  if (cudaGetDeviceCount(&n) != cudaSuccess || ordinal < 0 || ordinal >= n) return said(cudaErrorInvalidDevice);
  const locked hold(lock);
  current_device = current_context = ordinal;
  devices[ordinal].has_context = true;
  return cudaSuccess;
}

static int architecture_of(int ordinal) {
  const char *text = getenv("ROLLMESH_SIMT_SM");
  std::vector<int> list;
  for (char *end; text && *text; text = *end ? end + 1 : end) list.push_back(static_cast<int>(strtol(text, &end, 10)));
  return list.empty() ? 90 : list[static_cast<size_t>(ordinal) % list.size()];
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int ordinal) {
  const int architecture = architecture_of(ordinal);
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? architecture / 10 : architecture % 10;
  if (attribute == cudaDevAttrMultiProcessorCount) *value = static_cast<int>(from_environment("ROLLMESH_SIMT_PROCESSORS", 132));
  return cudaSuccess;
}

cudaError_t simt_allow_shared(const void *function, int bytes) {
  const locked hold(lock);
  if (bytes < 0 || bytes > SIMT_SHARED_MOST) return said(cudaErrorInvalidValue);
  shared_allowed[{function, current_device}] = std::max(static_cast<size_t>(bytes), size_t{SIMT_SHARED_UNASKED});
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *kernel) {
  const locked hold(lock);
  attributes->binaryVersion = 90;
  const int architecture = architecture_of(current_device);
  if (architecture != 90 && architecture != 80) return said(cudaErrorNoKernelImageForDevice);
  loaded.insert({current_device, kernel});
  return cudaSuccess;
}

static int get_context(void **context) {
  *context = current_context < 0 ? nullptr : &devices[current_context];
  return 0;
}

static int set_context(void *context) {
  if (context) return cudaErrorInvalidValue;
  current_context = -1;
  return 0;
}

static int address_range(unsigned long long *base, size_t *bytes, unsigned long long address) {
  const locked hold(lock);
  const void *at = reinterpret_cast<const void *>(address);
  const block *b = block_of(at);
  if (!b || b->owner == HOST || !is_inside(b, at, 1)) return cudaErrorInvalidValue;
  *base = reinterpret_cast<uintptr_t>(b->data), *bytes = b->bytes;
  return 0;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **entry, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *found) {
  *entry = !strcmp(name, "cuCtxGetCurrent")        ? reinterpret_cast<void *>(get_context)
           : !strcmp(name, "cuCtxSetCurrent")      ? reinterpret_cast<void *>(set_context)
           : !strcmp(name, "cuMemGetAddressRange") ? reinterpret_cast<void *>(address_range)
                                                   : nullptr;
  *found = *entry ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// For tests: a bit for each device that has a context.
extern "C" __attribute__((visibility("default"))) uint64_t simt_contexts() {
  const locked hold(lock);
  uint64_t bits = 0;
  for (int i = 0; i < MAX_DEVICES; i++) bits |= static_cast<uint64_t>(devices[i].has_context) << i;
  return bits;
}

// For tests: how many of each kind were asked for so far.
extern "C" __attribute__((visibility("default"))) void simt_made(uint64_t counts[N_KINDS]) {
  std::copy(std::begin(n_made), std::end(n_made), counts);
}

// For tests that are another library of the process, with a runtime of its own: the thread's device, whose a stream is, and cudaStreamWaitEvent for all that
// `awaited` has been given so far.
extern "C" __attribute__((visibility("default"))) int simt_current_device() { return current_context < 0 ? 0 : current_context; }

// For tests: another library's call that failed, of which it has not asked.
extern "C" __attribute__((visibility("default"))) void simt_leave_error() { said(cudaErrorInvalidValue); }

extern "C" __attribute__((visibility("default"))) int simt_stream_device(void *stream) { return static_cast<cudaStream_t>(stream)->owner; }

extern "C" __attribute__((visibility("default"))) void simt_stream_await(void *stream, void *awaited) {
  const locked hold(lock);
  const cudaStream_t other = static_cast<cudaStream_t>(awaited);
  enqueue(static_cast<cudaStream_t>(stream), {.awaited = other, .place = other->n_enqueued});
}

// ------------------------------------------------------------------------------------------------ memory
static size_t all_memory() { return static_cast<size_t>(from_environment("ROLLMESH_SIMT_MEMORY", 1l << 30)); }

cudaError_t cudaMalloc(void **out, size_t bytes) {
  const locked hold(lock);
  cudaError_t error = ready();
  device &d = devices[current_device];
  if (error == cudaSuccess && (bytes > all_memory() || d.used > all_memory() - bytes)) error = cudaErrorMemoryAllocation;
  if (error == cudaSuccess) error = block_create(current_device, bytes, out);
  if (error == cudaSuccess) d.used += bytes;
  n_made[DEVICE_BLOCKS]++;
  return said(error);
}

// It waits for all that the device still does, as CUDA's does.
cudaError_t cudaFree(void *data) {
  locked hold(lock);
  const cudaError_t error = ready();
  if (!data || error == cudaErrorStreamCaptureUnsupported) return said(error);
  const block *b = block_of(data);
  if (b && b->data == data && b->owner != HOST) {
    drain_device(b->owner, hold);
    b = block_of(data);
  }
  if (b && b->data == data && b->owner != HOST) {
    if (b->is_borrowed) return said(cudaErrorInvalidValue);
    mprotect(b->room, b->room_bytes, PROT_READ);
    check_slack(*b);
  }
  return said(block_destroy(data, false) ? error : cudaErrorInvalidValue);
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned) {
  const locked hold(lock);
  const cudaError_t error = ready();
  n_made[PINNED_BLOCKS]++;
  return said(error == cudaSuccess ? block_create(HOST, bytes, out) : error);
}

cudaError_t cudaFreeHost(void *data) {
  const locked hold(lock);
  const cudaError_t error = ready();
  if (!data || error == cudaErrorStreamCaptureUnsupported) return said(error);
  return said(block_destroy(data, true) ? error : cudaErrorInvalidValue);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *address) {
  const locked hold(lock);
  const block *b = block_of(address);
  const bool inside = b && is_inside(b, address, 1);
  attributes->type = !inside ? cudaMemoryTypeUnregistered : b->owner == HOST ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  attributes->device = inside && b->owner != HOST ? b->owner : -1;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *all_bytes) {
  const locked hold(lock);
  const size_t all = all_memory(), used = devices[current_device].used;
  *all_bytes = all, *free_bytes = all > used ? all - used : 0;
  devices[current_context = current_device].has_context = true;
  return said(devices[current_device].sticky);
}

// ------------------------------------------------------------------------------------------------ between processes
// What a handle says: where the file is, and how the block lies in it.
struct simt_handle {
  char magic[8];
  pid_t process;
  int file, bus;
  uint64_t inode;  // a number of a file may be another's by now
  size_t room_bytes, bytes;
};
static_assert(sizeof(simt_handle) <= sizeof(cudaIpcMemHandle_t));

static int bus_of(int ordinal) { return static_cast<int>(from_environment("ROLLMESH_SIMT_FIRST", 0)) + ordinal + 1; }

// The room of b becomes a file's, with the bytes that it has.
static cudaError_t share(block &b) {
  struct stat status;
  const int file = memfd_create("simt", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(b.room_bytes)) || fstat(file, &status)) return cudaErrorMemoryAllocation;
  protect(b.room, b.room + b.room_bytes, PROT_READ);
  if (pwrite(file, b.room, b.room_bytes, 0) != static_cast<ssize_t>(b.room_bytes)) simt_fault("pwrite");
  if (mmap(b.room, b.room_bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) simt_fault("mmap");
  const simt_handle made = {{"simtipc"}, getpid(), file, bus_of(b.owner), status.st_ino, b.room_bytes, b.bytes};
  memcpy(&b.handle, &made, sizeof made);
  b.file = file;
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *data) {
  const locked hold(lock);
  cudaError_t error = ready();
  auto found = blocks.find(static_cast<char *>(data));
  const bool is_whole = found != blocks.end() && found->second.owner != HOST && !found->second.is_borrowed;
  if (error != cudaSuccess) return said(error);
  if (!is_whole || from_environment("ROLLMESH_SIMT_SEGMENTS", 0)) return said(cudaErrorInvalidValue);
  if (!found->second.file) error = share(found->second);
  *handle = found->second.handle;
  return said(error);
}

cudaError_t cudaIpcOpenMemHandle(void **out, cudaIpcMemHandle_t handle, unsigned) {
  const locked hold(lock);
  const cudaError_t error = ready();
  if (error != cudaSuccess) return said(error);
  simt_handle from;
  memcpy(&from, &handle, sizeof from);
  if (memcmp(from.magic, "simtipc", sizeof from.magic) != 0 || from.bus != bus_of(current_device)) return said(cudaErrorInvalidValue);
  if (from.process == getpid()) return said(cudaErrorDeviceUninitialized);
  for (const auto &[data, b] : blocks)
    if (b.is_borrowed && !memcmp(&b.handle, &handle, sizeof handle)) return said(cudaErrorAlreadyMapped);
  char path[64];
  struct stat status;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", from.process, from.file);
  const int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return said(cudaErrorMapBufferObjectFailed);
  if (fstat(file, &status) || status.st_ino != from.inode || flock(file, LOCK_SH | LOCK_NB)) {
    close(file);
    return said(cudaErrorMapBufferObjectFailed);
  }
  block b = {};
  b.length = from.room_bytes + 2 * PAGE, b.room_bytes = from.room_bytes, b.bytes = from.bytes, b.owner = current_device;
  b.file = file, b.is_borrowed = true, b.handle = handle;
  b.raw = static_cast<char *>(mmap(nullptr, b.length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  b.room = b.raw + PAGE;
  b.data = b.room + b.room_bytes - (b.bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  if (mmap(b.room, b.room_bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) simt_fault("mmap");
  blocks[b.data] = b;
  *out = b.data;
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void *data) {
  const locked hold(lock);
  const cudaError_t error = ready();
  auto found = blocks.find(static_cast<char *>(data));
  if (error != cudaSuccess) return said(error);
  if (found == blocks.end() || !found->second.is_borrowed) return said(cudaErrorInvalidValue);
  block_drop(found);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int room, int ordinal) {
  int n = 0;
  cudaGetDeviceCount(&n);
  if (ordinal < 0 || ordinal >= n) return said(cudaErrorInvalidDevice);
  snprintf(id, static_cast<size_t>(room), "0000:%02X:00.0", bus_of(ordinal));
  return cudaSuccess;
}

cudaError_t cudaDeviceGetByPCIBusId(int *ordinal, const char *id) {
  int n = 0;
  unsigned bus = 0;
  cudaGetDeviceCount(&n);
  *ordinal = sscanf(id, "0000:%02X:00.0", &bus) == 1 ? static_cast<int>(bus) - bus_of(0) : -1;
  return said(*ordinal >= 0 && *ordinal < n ? cudaSuccess : cudaErrorInvalidDevice);
}

// ------------------------------------------------------------------------------------------------ streams and events
static void enqueue_others(standin_stream *stream, int (*run)(void *data), const void *data, size_t bytes) {
  const char *from = static_cast<const char *>(data);
  const locked hold(lock);
  others_helper.begin();
  enqueue(reinterpret_cast<simt_stream *>(stream), {.run = run, .data = {from, from + bytes}});
}

static char *host_address(standin_stream *, const void *device) { return static_cast<char *>(const_cast<void *>(device)); }

static long spoils_at(int ordinal) {
  const char *text = getenv("ROLLMESH_SIMT_SPOIL"), *of = text ? strchr(text, ',') : nullptr;
  return text && (!of || atoi(of + 1) == ordinal) ? atol(text) : 0;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
  const locked hold(lock);
  cudaError_t error = ready();
  if (error == cudaSuccess && all_memory() == 0) error = cudaErrorMemoryAllocation;
  if (error != cudaSuccess) return said(error);
  *stream = new simt_stream();
  (*stream)->others = {enqueue_others, host_address};
  (*stream)->owner = current_device;
  (*stream)->fault_at = from_environment("ROLLMESH_SIMT_FAULT", 0);
  (*stream)->spoil_at = spoils_at(current_device);
  devices[current_device].n_streams++;
  n_made[STREAMS]++;
  streams.insert(*stream);
  simt_order(from_environment("ROLLMESH_SIMT_REVERSED", 0) != 0);
  simt_watch();
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t s) {
  locked hold(lock);
  drain_whole(s, s->n_enqueued, hold);
  device &d = devices[s->owner];
  const bool is_forgotten = --d.n_streams == 0 && !from_environment("ROLLMESH_SIMT_STICKY", 0);
  const cudaError_t error = is_forgotten ? cudaSuccess : d.sticky;
  if (is_forgotten) d.sticky = cudaSuccess;
  if (captured == s) captured = nullptr;
  streams.erase(s);
  delete s->capture;
  delete s;
  return said(error);
}

cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  locked hold(lock);
  if (s->capture) return said(forbid(s));
  drain_whole(s, s->n_enqueued, hold);
  return said(devices[s->owner].sticky);
}

cudaError_t cudaStreamQuery(cudaStream_t s) {
  const locked hold(lock);
  if (s->capture) return said(forbid(s));
  if (simt_stream *forbids = forbidding()) return said(forbid(forbids));
  if (s->n_done == s->n_enqueued) return said(devices[s->owner].sticky);
  drain(s, s->n_done + 1);
  return said(devices[s->owner].sticky == cudaSuccess ? cudaErrorNotReady : devices[s->owner].sticky);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t s) {
  locked hold(lock);
  const bool to_device = kind != cudaMemcpyDeviceToHost, from_device = kind != cudaMemcpyHostToDevice;
  if ((to_device && !is_on(s->owner, to, bytes)) || (from_device && !is_on(s->owner, from, bytes))) return said(cudaErrorInvalidValue);
  work w = {.to = static_cast<char *>(to), .from = static_cast<const char *>(from), .bytes = bytes};
  if (to_device && from_device) return said(enqueue(s, w));
  const void *host = to_device ? from : to;
  const block *b = block_of(host);
  if (b && (b->owner != HOST || !is_inside(b, host, bytes))) return said(cudaErrorInvalidValue);
  if (b) return said(enqueue(s, w));
  if (s->capture) return said(forbid(s));
  drain_whole(s, s->n_enqueued, hold, &w);
  return said(devices[s->owner].sticky);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes, cudaStream_t s) {
  const locked hold(lock);
  if (!is_on(to_device, to, bytes) || !is_on(from_device, from, bytes) || (s->owner != to_device && s->owner != from_device))
    return said(cudaErrorInvalidValue);
  return said(enqueue(s, {.to = static_cast<char *>(to), .from = static_cast<const char *>(from), .bytes = bytes, .is_peers = true}));
}

// Of one layer; row after row. CUDA takes no pitch beyond what cudaDeviceProp says, either.
cudaError_t cudaMemcpy3DPeerAsync(const cudaMemcpy3DPeerParms *run, cudaStream_t s) {
  const cudaPitchedPtr &to = run->dstPtr, &from = run->srcPtr;
  const auto [width, rows, depth] = run->extent;
  constexpr size_t MOST = 0x7fffffff;
  if (depth != 1 || to.pitch < width || from.pitch < width || to.pitch > MOST || from.pitch > MOST) return said(cudaErrorInvalidValue);
  for (size_t r = 0; r < rows; r++) {
    void *there = static_cast<char *>(to.ptr) + r * to.pitch, *here = static_cast<char *>(from.ptr) + r * from.pitch;
    const cudaError_t error = cudaMemcpyPeerAsync(there, run->dstDevice, here, run->srcDevice, width, s);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int ordinal, int peer) {
  *can = ordinal != peer;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  const locked hold(lock);
  const bool is_first = peers.insert({current_device, peer}).second;
  return said(peer == current_device ? cudaErrorInvalidValue : is_first ? cudaSuccess : cudaErrorPeerAccessAlreadyEnabled);
}

cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t s) {
  const locked hold(lock);
  if (!is_on(s->owner, at, bytes)) return said(cudaErrorInvalidValue);
  return said(enqueue(s, {.to = static_cast<char *>(at), .value = value, .bytes = bytes}));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
  *event = new simt_event();
  n_made[EVENTS]++;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

static bool is_default(cudaStream_t s) { return reinterpret_cast<uintptr_t>(s) <= 2; }

cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus *status) {
  const locked hold(lock);
  if (!is_default(s) && !streams.count(s)) return said(cudaErrorInvalidResourceHandle);
  *status = is_default(s) || !s->capture ? cudaStreamCaptureStatusNone
            : s->is_invalid              ? cudaStreamCaptureStatusInvalidated
                                         : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t s, int *ordinal) {
  const locked hold(lock);
  if (!is_default(s) && !streams.count(s)) return said(cudaErrorInvalidResourceHandle);
  *ordinal = is_default(s) ? current_device : s->owner;
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t event, unsigned) {
  locked hold(lock);
  if (!is_default(s) && !streams.count(s)) return said(cudaErrorInvalidResourceHandle);
  if (!event->stream) return cudaSuccess;
  if (!is_default(s)) return said(enqueue(s, {.awaited = event->stream, .place = event->place}));
  drain_whole(event->stream, event->place, hold);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t s) {
  const locked hold(lock);
  if (is_default(s)) {
    *event = {nullptr, 0, false};
    return cudaSuccess;
  }
  if (!streams.count(s)) return said(cudaErrorInvalidResourceHandle);
  *event = {s, s->n_enqueued, s->capture != nullptr};
  return said(devices[s->owner].sticky);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  locked hold(lock);
  if (simt_stream *forbids = forbidding()) return said(forbid(forbids));
  if (event->is_captured) return said(cudaErrorCapturedEvent);
  if (!event->stream) return cudaSuccess;
  drain_whole(event->stream, event->place, hold);
  return said(devices[event->stream->owner].sticky);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const locked hold(lock);
  if (simt_stream *forbids = forbidding()) return said(forbid(forbids));
  if (event->is_captured) return said(cudaErrorCapturedEvent);
  simt_stream *s = event->stream;
  if (!s || s->n_done >= event->place) return said(s ? devices[s->owner].sticky : cudaSuccess);
  drain(s, s->n_done + 1);
  return said(devices[s->owner].sticky == cudaSuccess ? cudaErrorNotReady : devices[s->owner].sticky);
}

// ------------------------------------------------------------------------------------------------ graphs
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode) {
  const locked hold(lock);
  if (s->capture || captured) return said(cudaErrorIllegalState);
  if (devices[s->owner].sticky != cudaSuccess) return said(devices[s->owner].sticky);
  s->capture = new std::vector<work>();
  s->capturer = std::this_thread::get_id();
  s->mode = mode;
  s->is_invalid = false;
  captured = s;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) {
  const locked hold(lock);
  *graph = nullptr;
  if (!s->capture) return said(cudaErrorIllegalState);
  if (s->capturer != std::this_thread::get_id()) return said(cudaErrorStreamCaptureWrongThread);
  const std::unique_ptr<std::vector<work>> list(s->capture);
  s->capture = nullptr;
  captured = nullptr;
  if (devices[s->owner].sticky != cudaSuccess) return said(devices[s->owner].sticky);
  if (s->is_invalid) return said(cudaErrorStreamCaptureInvalidated);
  *graph = new simt_graph{std::move(*list)};
  return cudaSuccess;
}

// For tests: what another runtime of the process does with its streams. The driver's calls of these names take the same.
extern "C" __attribute__((visibility("default"))) int cuStreamBeginCapture_v2(void *stream, int mode) {
  return cudaStreamBeginCapture(static_cast<cudaStream_t>(stream), static_cast<cudaStreamCaptureMode>(mode));
}

extern "C" __attribute__((visibility("default"))) int cuStreamEndCapture(void *stream, void **graph) {
  return cudaStreamEndCapture(static_cast<cudaStream_t>(stream), reinterpret_cast<cudaGraph_t *>(graph));
}

extern "C" __attribute__((visibility("default"))) int cuGraphDestroy(void *graph) {
  return cudaGraphDestroy(static_cast<cudaGraph_t>(graph));
}

extern "C" __attribute__((visibility("default"))) int cuThreadExchangeStreamCaptureMode(int *mode) {
  cudaStreamCaptureMode exchanged = static_cast<cudaStreamCaptureMode>(*mode);
  const cudaError_t error = cudaThreadExchangeStreamCaptureMode(&exchanged);
  *mode = exchanged;
  return error;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long) {
  const locked hold(lock);
  if (n_graphs >= from_environment("ROLLMESH_SIMT_GRAPHS", LONG_MAX)) return said(cudaErrorMemoryAllocation);
  n_graphs++;
  n_made[GRAPHS]++;
  *made = new simt_graph_exec{graph->list, nullptr, 0};
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t s) {
  const locked hold(lock);
  return said(devices[s->owner].sticky);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t made, cudaStream_t s) {
  const locked hold(lock);
  cudaError_t error = devices[s->owner].sticky;
  for (size_t i = 0; i < made->list.size() && error == cudaSuccess; i++) error = enqueue(s, made->list[i]);
  made->stream = s, made->behind = s->n_enqueued;
  return said(error);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t made) {
  const locked hold(lock);
  if (made->stream && made->stream->n_done < made->behind) simt_fault("a graph is destroyed that a stream is still to run");
  delete made;
  n_graphs--;
  return cudaSuccess;
}
