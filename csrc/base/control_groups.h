// control_groups.h: the cores and the memory that this process may use: cores from its affinity
// mask and the CPU quotas of its control groups (cgroups), memory from their limits. A limit holds
// for a group and all groups below it, so every group from the process's own up to the mount's root
// counts. Any thread may call these functions.
//
// /proc/self/cgroup lists the process's groups, one line for each version 1 hierarchy and one for
// version 2. /proc/self/mountinfo lists where each hierarchy is mounted and which group is mounted
// there: a container sees its own group as the root. Files that cannot be read set no limit. Groups
// that are not mounted (after unshare --cgroup without a new mount) set none either.
// `root` is prepended to every path: "", or the folder of a test.
#pragma once

#include <stddef.h>
#include <stdint.h>

double rm_cpu_quota(const char *root); // the smallest quota, in cores; INFINITY: none
// Cores of the affinity mask, at most the quota rounded down; at least 1.
int rm_usable_cores(const char *root);

typedef struct rm_group_memory {
  uint64_t inode; // of the file with the group's limit; identifies the group on this machine
  size_t available; // bytes up to the limit; inactive cached file pages count as available
} rm_group_memory;
typedef void (*rm_group_memory_fn)(void *arg, rm_group_memory group);
// Calls visit for each group that has a memory limit; it may visit a group twice.
void rm_each_memory_limit(const char *root, rm_group_memory_fn visit, void *arg);
