// simt_inside.h: the inside of the stand-in for the CUDA runtime (simt_runtime.h), shared by the
// files of it and nobody else:
//
//   simt_devices.cpp   errors, devices, contexts, the driver; doors for tests
//   simt_memory.cpp    blocks, who may touch them and when
//   simt_queue.cpp     what a stream has been given, and when it is done
//   simt_streams.cpp   streams, copies, fills, events
//   simt_graphs.cpp    captures, what they forbid, and graphs
//   simt_kernels.cpp   kernels: loaded where, their shared memory, launches
//   simt_peers.cpp     memory between processes, and between devices
//
// One lock over everything: the fibres of simt.cpp, which are one set, and the tables below. What
// touches them is called with it held.
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
      bytes; // of the mapping, of its pages that may be touched, of the block
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

// One of the five kinds: a launch, somebody else's (`run`, over `data`), a wait for what another
// stream has before a place, a copy (`from`), a fill.
struct work {
  std::shared_ptr<const simt_launch> launch = {};
  char *to = nullptr;
  const char *from = nullptr;
  int value = 0;
  size_t bytes = 0;
  bool is_peers = false; // `from` is another device's
  cudaStream_t awaited = nullptr;
  uint64_t place = 0;
  int (*run)(void *data) = nullptr; // returns whether it is through; else it is called again
  std::vector<char> data = {};
};

// Inline and not one file's, so that they are there for as long as the thread of simt_queue.cpp.
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
void block_drop(std::map<const char *, block>::iterator at); // gone, whoever has it
void protect(char *from, const char *to, int protection);
// Device memory is opened where work touches it, in pieces, and closed when the drain ends: to open
// all of it would cost more than most launches do. A piece of work says what it touches, a kernel
// is met by simt_open at its first access.
void open_chunks(const block &b, const char *from, const char *to); // those that hold [from, to)
void close_all(); // and what lies beside the blocks is looked at
void check_slack(const block &b);

// simt_queue.cpp. What was enqueued before `place` is done, with the device's memory open to it,
// and `now` behind it: drain as far as it comes, drain_whole however long another rank takes,
// drain_device all of every stream there, anybody's.
void drain(simt_stream *s, uint64_t place, work *now = nullptr);
void drain_whole(simt_stream *s, uint64_t place, locked &hold, work *now = nullptr);
void drain_device(int owner, locked &hold);
cudaError_t enqueue(simt_stream *s, work w);
// from now on what stands before the last work of others is done though nobody waits
void begin_helper();

// simt_graphs.cpp
cudaError_t forbid(simt_stream *s); // a call that a capture does not allow
simt_stream *
forbidding(); // the capture that does not allow this thread what might be unsafe in it; NULL: none
void capture_drop(simt_stream *s); // of a stream that goes

} // namespace simt_inside
