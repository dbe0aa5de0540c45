// process.c: whether the process of a rank runs. Each rank holds a lock on one byte of the region's
// file, the byte with its number. The lock belongs to a descriptor that the rank opens for it, and
// the system releases it when that is closed, so at the end of the process. Pids would be reused,
// and containers have equal ones. A forked child closes the descriptors that it inherits.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

#include "comm/shm/layout.h"

enum { MOST_FILES = 1024 };
static _Atomic int files[MOST_FILES]; // 1 + the descriptor of each lock of this process, or 0

static void replace(int from, int to) {
  for (int i = 0, old = from; i < MOST_FILES; i++, old = from)
    if (atomic_compare_exchange_strong(&files[i], &old, to)) return;
}

// The numbers stay in use, because the child's copies of the regions close them.
static void close_in_child(void) {
  const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int i = 0; i < MOST_FILES; i++)
    if (files[i]) dup3(null, files[i] - 1, O_CLOEXEC);
  close(null);
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, close_in_child); }

static struct flock lock_of(int rank) {
  return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
}

int rm_process_lock(int file, int rank) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  struct flock lock = lock_of(rank);
  char path[40];
  snprintf(path, sizeof path, "/proc/self/fd/%d", file); // a mapping would keep the lock of `file`
  const int own = open(path, O_RDWR | O_CLOEXEC);
  if (own < 0) return -1;
  pthread_once(&once, watch_forks);
  replace(0, own + 1);
  if (fcntl(own, F_OFD_SETLK, &lock) == 0) return own;
  rm_process_unlock(own);
  return -1;
}

void rm_process_unlock(int lock) {
  replace(lock + 1, 0);
  close(lock);
}

int rm_process_ended(int file, int rank) {
  struct flock lock = lock_of(rank);
  return fcntl(file, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

uint64_t rm_process_dead_ranks(const rm_region *region, uint64_t ranks) {
  uint64_t dead = 0;
  for (int r = 0; r < region->options.world && region->file >= 0; r++)
    if (ranks >> r & 1 && atomic_load(&region->map->ranks[r].pid) &&
        rm_process_ended(region->file, r))
      dead |= UINT64_C(1) << r;
  return dead;
}
