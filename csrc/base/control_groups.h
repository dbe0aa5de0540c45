// control_groups.h: the cores that this process may use, from its affinity mask and the CPU quotas
// of its control groups (cgroups). Their memory limits are pools of memory.h. A limit holds for a
// group and all groups below it, so every group from the process's own up to the mount's root
// counts. Any thread may call these functions.
//
// /proc/self/cgroup lists the process's groups, one line for each version 1 hierarchy and one for
// version 2. /proc/self/mountinfo lists where each hierarchy is mounted and which group is mounted
// there: a container sees its own group as the root. Files that cannot be read set no limit. Groups
// that are not mounted (after unshare --cgroup without a new mount) set none either.
// `root` is prepended to every path: "", or the folder of a test.
#pragma once

double rm_cpu_quota(const char *root); // the smallest quota, in cores; INFINITY: none
// Cores of the affinity mask, at most the quota rounded down; at least 1.
int rm_usable_cores(const char *root);
