// control_groups.h: what this process may use of the machine: cores by its affinity mask and the
// CPU quotas of its control groups (cgroups), memory by their limits. A limit holds for a group and
// all below it, so every group from the process's own up to the mount's root counts.
//
// /proc/self/cgroup names the process's groups, one line for each hierarchy of version 1 and one
// for version 2; /proc/self/mountinfo says where the hierarchies are mounted and from which group
// on: a container sees its own group as the root. What cannot be read is no limit; nor are groups
// that no mount shows, as after unshare --cgroup without a new mount.
// `root` stands before every path: "", or a folder of a test.
#pragma once

#include <stddef.h>
#include <stdint.h>

double rm_cpu_quota(const char *root); // the smallest quota, in cores; INFINITY: none
int rm_usable_cores(
    const char *root); // cores of the affinity mask, at most the quota rounded down; at least 1

typedef struct rm_group_memory {
  uint64_t inode; // of the group's limit; identifies it on this machine
  size_t
      // bytes up to its limit; cached pages of files that were not used lately count as available
      available;
} rm_group_memory;
typedef void (*rm_group_memory_fn)(void *arg, rm_group_memory group);
void rm_each_memory_limit(const char *root, rm_group_memory_fn visit,
                          void *arg); // of each group that has one; a group may come twice
