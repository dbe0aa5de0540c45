// simt_memory.cpp: see simt_inside.h. A block is placed between inaccessible pages and ends at the
// second; the bytes beside it have a value that is checked. The host can never access a device's
// block; work can access it while it runs.
#include "simt_inside.h"

#include <cstdio>
#include <cstring>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

using namespace simt_inside;

namespace simt_inside {

enum { CHUNK = 16 * PAGE, MAX_OPEN = 4096, FRESH = 0xff, SLACK = 0xa5 };

size_t all_memory() {
  return static_cast<size_t>(from_environment("ROLLMESH_SIMT_MEMORY", 1l << 30));
}

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

static cudaError_t block_create(int owner, size_t bytes, void **out) {
  const size_t used = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT,
               room = (used + PAGE - 1) / PAGE * PAGE;
  block b = {};
  b.length = room + 2 * PAGE, b.room_bytes = room, b.bytes = bytes, b.owner = owner;
  void *raw =
      mmap(nullptr, b.length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
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

struct opened {
  const block *b;
  char *from, *to;
};
static opened open_now[MAX_OPEN];
static int n_open;

void protect(char *from, const char *to, int protection) {
  if (mprotect(from, static_cast<size_t>(to - from), protection)) simt_fault("mprotect");
}

static bool is_slack(const char *from, const char *to) {
  return std::all_of(from, to, [](char c) { return static_cast<unsigned char>(c) == SLACK; });
}

[[noreturn]] static void slack_written(const block &b) {
  char text[120];
  snprintf(text, sizeof text, "bytes beside a block of %zu bytes were written", b.bytes);
  simt_fault(text);
}

void check_slack(const block &b) {
  if (!is_slack(b.slack_from(), b.data) || !is_slack(b.data + b.bytes, b.room + b.room_bytes))
    slack_written(b);
}

// The bytes beside a block are in its first and its last chunk.
void close_all() {
  for (int i = 0; i < n_open; i++) {
    const opened &o = open_now[i];
    if (o.from == o.b->room && !is_slack(o.b->slack_from(), o.b->data)) slack_written(*o.b);
    if (o.to == o.b->room + o.b->room_bytes && !is_slack(o.b->data + o.b->bytes, o.to))
      slack_written(*o.b);
  }
  for (int i = 0; i < n_open; i++) protect(open_now[i].from, open_now[i].to, PROT_NONE);
  n_open = 0;
}

void open_chunks(const block &b, const char *from, const char *to) {
  const ptrdiff_t first = (from - b.room) / CHUNK * CHUNK,
                  behind = (to - b.room + CHUNK - 1) / CHUNK * CHUNK;
  const opened wanted = {&b, b.room + first,
                         b.room + std::min(behind, static_cast<ptrdiff_t>(b.room_bytes))};
  for (int i = 0; i < n_open; i++)
    if (open_now[i].from <= wanted.from && wanted.to <= open_now[i].to) return;
  if (n_open == MAX_OPEN) close_all(); // needed parts are opened again
  open_now[n_open++] = wanted;
  protect(wanted.from, wanted.to, PROT_READ | PROT_WRITE);
}

void block_drop(std::map<const char *, block>::iterator at) {
  if (at->second.file) close(at->second.file);
  munmap(at->second.raw, at->second.length);
  blocks.erase(at);
}

static bool block_destroy(void *data, bool on_host) {
  auto found = blocks.find(static_cast<char *>(data));
  if (found == blocks.end() || (found->second.owner == HOST) != on_host ||
      found->second.is_borrowed)
    return false;
  const block &b = found->second;
  for (int tries = 0; b.file && flock(b.file, LOCK_EX | LOCK_NB);
       tries++) { // a process that ends closes one file after another
    if (tries == 50) simt_fault("memory is freed that another process has open");
    usleep(1000);
  }
  if (on_host) check_slack(b);
  else devices[b.owner].used -= b.bytes;
  block_drop(found);
  return true;
}

} // namespace simt_inside

bool simt_open(const void *address) {
  auto next = blocks.upper_bound(static_cast<const char *>(address));
  if (next == blocks.end() || address < next->second.room) {
    if (next == blocks.begin()) return false;
    next--;
  }
  const block &b = next->second;
  const char *at = static_cast<const char *>(address);
  if (b.owner == HOST || b.owner != drains || at < b.room || at >= b.room + b.room_bytes)
    return false;
  open_chunks(b, at, at + 1);
  return true;
}

const char *simt_whose(const void *address) {
  static char text[120];
  for (const auto &[data, b] : blocks) {
    if (address < b.raw || address >= b.raw + b.length) continue;
    const char *memory = b.owner == HOST ? "pinned memory" : "memory of a device";
    snprintf(text, sizeof text, "the host touched %s, byte %td of a block of %zu", memory,
             static_cast<const char *>(address) - b.data, b.bytes);
    return text;
  }
  return nullptr;
}

cudaError_t cudaMalloc(void **out, size_t bytes) {
  const locked hold(lock);
  cudaError_t error = ready();
  device &d = devices[current_device];
  if (error == cudaSuccess && (bytes > all_memory() || d.used > all_memory() - bytes))
    error = cudaErrorMemoryAllocation;
  if (error == cudaSuccess) error = block_create(current_device, bytes, out);
  if (error == cudaSuccess) d.used += bytes;
  n_made[DEVICE_BLOCKS]++;
  return said(error);
}

// Waits for all pending work of the device, as in CUDA.
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
  attributes->type = !inside            ? cudaMemoryTypeUnregistered
                     : b->owner == HOST ? cudaMemoryTypeHost
                                        : cudaMemoryTypeDevice;
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
