// simt_peers.cpp: see simt_inside.h. A block that is exported to another process becomes a file of
// memory. The other process finds the file by the process and the number in the handle and maps it
// as a separate block.
#include "simt_inside.h"

#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

using namespace simt_inside;

// Contents of a handle: the place of the file, and the block's position in it.
struct simt_handle {
  char magic[8];
  pid_t process;
  int file, bus;
  uint64_t inode; // another file may have this number by now
  size_t room_bytes, bytes;
};
static_assert(sizeof(simt_handle) <= sizeof(cudaIpcMemHandle_t));

static int bus_of(int ordinal) {
  return static_cast<int>(from_environment("ROLLMESH_SIMT_FIRST", 0)) + ordinal + 1;
}

// Moves the memory of b into a file, with its bytes.
static cudaError_t share(block &b) {
  struct stat status;
  const int file = memfd_create("simt", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(b.room_bytes)) || fstat(file, &status))
    return cudaErrorMemoryAllocation;
  protect(b.room, b.room + b.room_bytes, PROT_READ);
  if (pwrite(file, b.room, b.room_bytes, 0) != static_cast<ssize_t>(b.room_bytes))
    simt_fault("pwrite");
  if (mmap(b.room, b.room_bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED)
    simt_fault("mmap");
  const simt_handle made = {{"simtipc"},   getpid(),     file,   bus_of(b.owner),
                            status.st_ino, b.room_bytes, b.bytes};
  memcpy(&b.handle, &made, sizeof made);
  b.file = file;
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *data) {
  const locked hold(lock);
  cudaError_t error = ready();
  auto found = blocks.find(static_cast<char *>(data));
  const bool is_whole =
      found != blocks.end() && found->second.owner != HOST && !found->second.is_borrowed;
  if (error != cudaSuccess) return said(error);
  if (!is_whole || from_environment("ROLLMESH_SIMT_SEGMENTS", 0))
    return said(cudaErrorInvalidValue);
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
  if (memcmp(from.magic, "simtipc", sizeof from.magic) != 0 || from.bus != bus_of(current_device))
    return said(cudaErrorInvalidValue);
  if (from.process == getpid()) return said(cudaErrorDeviceUninitialized);
  for (const auto &[data, b] : blocks)
    if (b.is_borrowed && !memcmp(&b.handle, &handle, sizeof handle))
      return said(cudaErrorAlreadyMapped);
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
  b.length = from.room_bytes + 2 * PAGE, b.room_bytes = from.room_bytes, b.bytes = from.bytes,
  b.owner = current_device;
  b.file = file, b.is_borrowed = true, b.handle = handle;
  b.raw = static_cast<char *>(
      mmap(nullptr, b.length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  b.room = b.raw + PAGE;
  b.data = b.room + b.room_bytes - (b.bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  if (mmap(b.room, b.room_bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED)
    simt_fault("mmap");
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

// Which device may read which.
static std::set<std::pair<int, int>> peers;

cudaError_t cudaDeviceCanAccessPeer(int *can, int ordinal, int peer) {
  *can = ordinal != peer;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  const locked hold(lock);
  const bool is_first = peers.insert({current_device, peer}).second;
  return said(peer == current_device ? cudaErrorInvalidValue
              : is_first             ? cudaSuccess
                                     : cudaErrorPeerAccessAlreadyEnabled);
}
