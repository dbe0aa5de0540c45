// process.c: whether a process has ended. Pids are reused, so a process is identified by its pid
// and start time; where the system has pidfds, one is held for each rank, and one poll checks all
// of them. A zombie has ended.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "comm/shm/layout.h"

enum { NO_PROCESS = 0, UNKNOWN = 2 }; // start times are odd

// Reads the low half of the start time in ticks since boot, and the state's letter, from
// /proc/PID/stat. Returns UNKNOWN when it cannot be read (no /proc, no file descriptor left).
static uint32_t started(pid_t pid, char *state) {
  char path[32], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0)
    return errno == ENOENT && access("/proc/self/stat", F_OK) == 0 ? NO_PROCESS : UNKNOWN;
  const ssize_t length = read(file, text, sizeof text - 1);
  const int ended = length < 0 && errno == ESRCH;
  close(file);
  if (length <= 0) return ended ? NO_PROCESS : UNKNOWN;
  text[length] = 0;
  const char *at = strrchr(text, ')'); // the process name before it may contain anything
  unsigned long long ticks = 0;
  const char *fields =
      " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu";
  if (!at || sscanf(at + 1, fields, state, &ticks) != 2) return UNKNOWN;
  return (uint32_t)ticks | 1; // odd; a resolution of two ticks is enough
}

static pid_t pid_of(uint64_t identity) { return (pid_t)(identity >> 32); }

uint64_t rm_process_self(void) {
  char state;
  const pid_t pid = getpid();
  return (uint64_t)pid << 32 | started(pid, &state);
}

static int has_ended(uint64_t identity) {
  char state = 0;
  if (getpgid(pid_of(identity)) < 0 && errno == ESRCH) return 1;
  const uint32_t now = started(pid_of(identity), &state), then = (uint32_t)identity;
  if (now == NO_PROCESS) return 1;
  if (now == UNKNOWN) return 0;
  return state == 'Z' || state == 'X' || (then != UNKNOWN && then != now);
}

int rm_process_pidfd(uint64_t identity) {
#ifdef SYS_pidfd_open
  const int handle = (int)syscall(SYS_pidfd_open, pid_of(identity), 0);
  if (handle < 0 || !has_ended(identity)) return handle;
  close(handle); // another process has the pid now
#else
  (void)identity;
#endif
  return -1;
}

uint64_t rm_process_ended(const uint64_t identities[], const int handles[], int n) {
  struct pollfd polls[RM_REGION_RANKS];
  uint64_t ended = 0;
  for (int i = 0; i < n; i++) polls[i] = (struct pollfd){.fd = handles[i], .events = POLLIN};
  if (poll(polls, (nfds_t)n, 0) < 0)
    for (int i = 0; i < n; i++) polls[i].revents = 0;
  for (int i = 0; i < n; i++)
    if (handles[i] >= 0 ? polls[i].revents != 0 : identities[i] && has_ended(identities[i]))
      ended |= UINT64_C(1) << i;
  return ended;
}
