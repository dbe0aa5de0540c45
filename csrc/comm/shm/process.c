// process.c: whether the process of a rank runs. Each process holds a lock on one byte of the
// region's file, the byte with its rank's number, which the system releases when the process ends
// in any way. Pids would be reused. If a process closes the file for one of its ranks, the system
// releases the locks of all its ranks. A child that it forks does not inherit the lock.
#include <fcntl.h>
#include <unistd.h>

#include "comm/shm/layout.h"

static struct flock lock_of(int rank) {
  return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
}

int rm_process_lock(int file, int rank) {
  struct flock lock = lock_of(rank);
  return fcntl(file, F_SETLK, &lock) == 0;
}

int rm_process_ended(int file, int rank) {
  struct flock lock = lock_of(rank);
  return fcntl(file, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

uint64_t rm_process_dead_ranks(const rm_region *region, uint64_t ranks) {
  uint64_t dead = 0;
  for (int r = 0; r < region->options.world && region->file >= 0; r++) {
    const pid_t pid = atomic_load(&region->map->ranks[r].pid);
    // A process does not see its own locks.
    if (ranks >> r & 1 && pid && pid != getpid() && rm_process_ended(region->file, r))
      dead |= UINT64_C(1) << r;
  }
  return dead;
}
