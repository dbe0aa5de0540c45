// simt_inside.h: the inside of the stand-in for the CUDA runtime (simt_runtime.h), shared by the
// files of it and nobody else:
//
//   simt_devices.cpp   errors, devices, contexts, the driver; functions for tests
//   simt_memory.cpp    blocks, and who may access them when
//   simt_queue.cpp     the work of a stream, and when it runs
//   simt_streams.cpp   streams, copies, fills, events
//   simt_graphs.cpp    captures, what they forbid, and graphs
//   simt_kernels.cpp   kernels: where they are loaded, their shared memory, launches
//   simt_peers.cpp     memory between processes, and between devices
//
// One lock protects everything: the single set of fibres of simt.cpp, and the tables below.
// Functions that access them are called with the lock held.
#pragma once

#include "simt.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "standin/stream.h"

namespace simt_inside {

enum { PAGE = 4096, ALIGNMENT = 256, MAX_DEVICES = 64, HOST = -1 };

struct block {
  char *raw, *room,
      *data; // guard page, then pages of which the last hold the block, then a guard page
  size_t length, room_bytes,
      bytes; // sizes: of the mapping, of its accessible pages, of the block
  int owner; // a device, or HOST
  int file; // of its room, which other processes open; 0: none
  bool is_borrowed; // another process's
  cudaIpcMemHandle_t handle;
  char *slack_from() const { return std::max(room, data - ALIGNMENT); }
};

struct device {
  bool has_context;
  cudaError_t sticky;
  size_t used;
  int n_streams;
};

// One of five kinds: a launch, another library's work (`run`, over `data`), a wait for another
// stream's work before a place, a copy (`from`), a fill.
struct work {
  std::shared_ptr<const simt_launch> launch = {};
  char *to = nullptr;
  const char *from = nullptr;
  int value = 0;
  size_t bytes = 0;
  bool is_peers = false; // `from` is another device's
  cudaStream_t awaited = nullptr;
  uint64_t place = 0;
  int (*run)(void *data) = nullptr; // returns whether it has finished; otherwise it is called again
  std::vector<char> data = {};
};

// Inline instead of local to one file, so that they live as long as the thread of simt_queue.cpp.
inline std::mutex lock;
using locked = std::unique_lock<std::mutex>;
inline std::map<const char *, block> blocks; // by data
inline std::set<cudaStream_t> streams;
inline device devices[MAX_DEVICES];
inline int drains = HOST; // whose memory work may open
inline constinit thread_local int current_device = 0;
// The driver's; −1: unset, and the runtime uses its current device.
inline constinit thread_local int current_context = -1;
// Counters of the process: blocks of devices, pinned blocks, instantiated graphs, streams, events.
enum { DEVICE_BLOCKS, PINNED_BLOCKS, GRAPHS, STREAMS, EVENTS, N_KINDS };
inline std::atomic<uint64_t> n_made[N_KINDS];

} // namespace simt_inside

struct simt_stream {
  standin_stream others; // first
  int owner;
  std::deque<simt_inside::work> queue;
  uint64_t n_enqueued, n_done;
  uint64_t behind_others; // the place behind the last work of others
  long n_launches, fault_at, n_captured, spoil_at;
  std::vector<simt_inside::work> *capture; // NULL: not recording
  std::thread::id capturer;
  cudaStreamCaptureMode mode; // of the capture
  bool is_invalid;
};

namespace simt_inside {

// simt_devices.cpp
long from_environment(const char *name, long otherwise);
int architecture_of(int ordinal);
cudaError_t said(cudaError_t error); // returns `error` and records it as the thread's last error
cudaError_t ready(); // whether the current device accepts calls without a stream; makes its context

// simt_memory.cpp
size_t all_memory(); // of a device
const block *block_of(const void *at); // that `at` lies in, if any
bool is_inside(const block *b, const void *at, size_t bytes);
bool is_on(int owner, const void *at, size_t bytes);
void block_drop(std::map<const char *, block>::iterator at); // freed, whoever has it
void protect(char *from, const char *to, int protection);
// Device memory is made accessible where work accesses it, in pieces, and closed when the drain
// ends: opening all of it would cost more than most launches. Work other than kernels declares its
// memory; a kernel's first access calls simt_open.
void open_chunks(const block &b, const char *from, const char *to); // those that hold [from, to)
void close_all(); // and checks the bytes beside the blocks
void check_slack(const block &b);

// simt_queue.cpp. Runs the work enqueued before `place`, with the device's memory open to it, and
// then `now`: drain runs as far as possible, drain_whole waits however long another rank takes, and
// drain_device runs all work of every stream there.
void drain(simt_stream *s, uint64_t place, work *now = nullptr);
void drain_whole(simt_stream *s, uint64_t place, locked &hold, work *now = nullptr);
void drain_device(int owner, locked &hold);
cudaError_t enqueue(simt_stream *s, work w);
// from now on the work before the last work of others runs even if nobody waits
void begin_helper();

// simt_graphs.cpp
cudaError_t forbid(simt_stream *s); // a call that a capture does not allow
simt_stream *
forbidding(); // the capture that forbids this thread calls that might be unsafe in it; NULL: none
void capture_drop(simt_stream *s); // for a stream that is destroyed

} // namespace simt_inside
