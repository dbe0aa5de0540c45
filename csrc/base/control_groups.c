// control_groups.c: see control_groups.h, and the memory pools of memory.h. Rejected: paths below
// /sys/fs/cgroup without mountinfo, because version 1 has a mount for each controller, mixed
// systems have both versions, and a container that sees its own group as the root has no path to it
// below the mount.
#define _GNU_SOURCE
#include "base/control_groups.h"

#include <limits.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/memory.h"

enum { MASK_WORDS = 1024 }; // 65,536 processors
// Without a limit, version 1 writes a number larger than any memory.
static const size_t NO_LIMIT = (size_t)1 << 60;

typedef void (*visit_fn)(void *arg, const char *group);

static FILE *opened(const char *folder, const char *name) {
  char *path;
  if (asprintf(&path, "%s/%s", folder, name) < 0) return NULL;
  FILE *file = fopen(path, "re");
  free(path);
  return file;
}

// Reads the next line without its newline into *line, which the caller frees. Returns 0 at the end
// of the file, and for NULL.
static int next_line(FILE *file, char **line) {
  size_t room = 0;
  free(*line);
  *line = NULL;
  if (!file || getline(line, &room, file) < 0) return 0;
  (*line)[strcspn(*line, "\n")] = 0;
  return 1;
}

static void close_all(FILE *file, char *line) {
  if (file) fclose(file);
  free(line);
}

// Reads n numbers after `key` in a file of the group, with key "" from its first line. Returns 0 if
// they are not there or too large.
static int read_numbers(const char *group, const char *name, const char *key, int n,
                        size_t numbers[]) {
  FILE *file = opened(group, name);
  char *line = NULL;
  int found = 0;
  while (!found && next_line(file, &line)) {
    char *at = line + strlen(key);
    for (found = strncmp(line, key, strlen(key)) == 0; found && n > 0; n--) {
      at += strspn(at, " \t");
      found = *at >= '0' && *at <= '9' && (*numbers++ = strtoull(at, &at, 10)) < ULLONG_MAX;
    }
    if (!*key) break;
  }
  close_all(file, line);
  return found;
}

static int has_word(const char *list, const char *word) {
  const size_t length = strlen(word);
  for (; list; list = strchr(list, ',') ? strchr(list, ',') + 1 : NULL)
    if (strncmp(list, word, length) == 0 && (list[length] == ',' || !list[length])) return 1;
  return 0;
}

// --------------------------------------------------------------------------- where the groups are
// Returns the path of this process's group, "/…", to be freed: in the hierarchy of a version 1
// controller, or in the version 2 hierarchy when controller is "". NULL: none.
static char *own_group(const char *root, const char *controller) {
  FILE *file = opened(root, "proc/self/cgroup");
  char *line = NULL, *group = NULL;
  while (!group && next_line(file, &line)) { // "4:cpu,cpuacct:/a/b", "0::/a/b"
    char *names = strchr(line, ':'), *path = names ? strchr(++names, ':') : NULL;
    if (!path || path[1] != '/') continue;
    *path++ = 0;
    if (*controller ? has_word(names, controller) : !*names) group = strdup(path);
  }
  close_all(file, line);
  return group;
}

// mountinfo writes blanks and backslashes as octal numbers.
static void unescape(char *text) {
  char *to = text;
  for (const char *from = text; *from; to++) {
    int code, used = 0;
    const int is_escaped =
        *from == '\\' && sscanf(from + 1, "%3o%n", (unsigned *)&code, &used) == 1 && used == 3;
    *to = is_escaped ? (char)code : *from;
    from += is_escaped ? 4 : 1;
  }
  *to = 0;
}

static int goes_up(const char *path) {
  return strncmp(path, "/..", 3) == 0 && (path[3] == '/' || !path[3]);
}

// Returns the path from a mount's group down to the process's group, "" or "/…"; NULL if the
// process is not below the mount. Both paths are relative to the process's cgroup namespace: groups
// above the namespace's root begin with "/..", and their names are not known.
static const char *way_down(const char *mount, const char *own) {
  for (; goes_up(mount) && goes_up(own); own += 3) mount += 3;
  if (goes_up(own)) return NULL;
  const int is_above = goes_up(mount);
  while (goes_up(mount)) mount += 3;
  const size_t length = strcmp(mount, "/") ? strlen(mount) : 0;
  if (is_above) return length ? NULL : "";
  if (strncmp(mount, own, length) || (own[length] && own[length] != '/')) return NULL;
  return strcmp(own + length, "/") ? own + length : "";
}

// Calls visit with `top` + `down`, a folder, and each of its parents down to `top`.
static void visit_up(const char *root, const char *top, const char *down, visit_fn visit,
                     void *arg) {
  char *group;
  const int length = asprintf(&group, "%s%s%s", root, top, down);
  if (length < 0) return;
  for (char *end = group + length; end; end = strrchr(group + strlen(root) + strlen(top), '/')) {
    *end = 0;
    visit(arg, group);
  }
  free(group);
}

// Calls visit with the folder of each group that this process is in, innermost first, in the
// controller's hierarchies of both versions.
static void each_group(const char *root, const char *controller, visit_fn visit, void *arg) {
  FILE *file = opened(root, "proc/self/mountinfo");
  char *line = NULL;
  // "31 23 0:28 /group /point rw,relatime … - cgroup source rw,memory"
  while (next_line(file, &line)) {
    char *group = NULL, *point = NULL, *type = NULL, *options = NULL, *own = NULL;
    const char *rest = strstr(line, " - ");
    if (rest && sscanf(line, "%*s %*s %*s %ms %ms", &group, &point) == 2 &&
        sscanf(rest, " - %ms %*s %ms", &type, &options) == 2) {
      const int is_v2 = strcmp(type, "cgroup2") == 0;
      if (is_v2 || (strcmp(type, "cgroup") == 0 && has_word(options, controller)))
        own = own_group(root, is_v2 ? "" : controller);
      unescape(group);
      unescape(point);
      const char *down = own ? way_down(group, own) : NULL;
      if (down) visit_up(root, point, down, visit, arg);
    }
    char *const owned[] = {group, point, type, options, own};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
  }
  close_all(file, line);
}

// ----------------------------------------------------------------------------------------- memory
// Returns MemAvailable of the machine in bytes; SIZE_MAX: unknown.
static size_t machine_available(const char *root) {
  size_t kib, bytes;
  return read_numbers(root, "proc/meminfo", "MemAvailable:", 1, &kib) && kib &&
                 rm_mul_size(kib, 1024, &bytes)
             ? bytes
             : SIZE_MAX;
}

typedef struct pool_list {
  rm_memory_pool *pools;
  int n;
} pool_list;

// Adds a control group. In a full list it replaces the group with the most memory left, so that
// the group with the least is always listed.
static void add_pool(pool_list *list, rm_memory_pool pool) {
  int most = 0;
  for (int i = 0; i < list->n; i++) {
    if (list->pools[i].name == pool.name) return;
    if (list->pools[i].available > list->pools[most].available) most = i;
  }
  if (list->n < RM_MEMORY_POOLS) list->pools[list->n++] = pool;
  else if (pool.available < list->pools[most].available) list->pools[most] = pool;
}

static void visit_memory(void *list, const char *group) {
  static const char *const FILES[2][4] = {
      {"memory.max", "memory.current", "memory.stat", "inactive_file "},
      {"memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file "},
  };
  struct stat status;
  char name[48];
  for (int version = 0; version < 2; version++) {
    const char *const *names = FILES[version];
    size_t limit, used, cached;
    if (!read_numbers(group, names[0], "", 1, &limit) || limit >= NO_LIMIT || stat(group, &status))
      continue;
    if (!read_numbers(group, names[1], "", 1, &used)) used = 0;
    // Inactive cached file pages count as available.
    if (!read_numbers(group, names[2], names[3], 1, &cached) || cached > used) cached = 0;
    used -= cached;
    snprintf(name, sizeof name, "control group %lu", status.st_ino);
    add_pool(list, (rm_memory_pool){rm_memory_name(name), limit > used ? limit - used : 0});
  }
}

int rm_memory_pools(const char *root, rm_memory_pool pools[RM_MEMORY_POOLS]) {
  pool_list list = {pools, 1};
  pools[0] = (rm_memory_pool){rm_memory_name(""), machine_available(root)};
  each_group(root, "memory", visit_memory, &list);
  return list.n;
}

// ------------------------------------------------------------------------------------------ cores
// Version 2 has one file, "QUOTA PERIOD" or "max PERIOD"; in version 1 a quota of -1 is none.
static void visit_cpu(void *opaque, const char *group) {
  double *least = opaque;
  size_t n[2]; // quota, period
  const int has_quota = read_numbers(group, "cpu.max", "", 2, n) ||
                        (read_numbers(group, "cpu.cfs_quota_us", "", 1, &n[0]) &&
                         read_numbers(group, "cpu.cfs_period_us", "", 1, &n[1]));
  if (has_quota && n[0] && n[1]) *least = fmin(*least, (double)n[0] / (double)n[1]);
}

double rm_cpu_quota(const char *root) {
  double least = INFINITY;
  each_group(root, "cpu", visit_cpu, &least);
  return least;
}

// Rounds the quota down: with more threads than cores, the whole team would wait for the thread
// that the quota stops.
int rm_usable_cores(const char *root) {
  unsigned long mask[MASK_WORDS] = {0}; // cpu_set_t has 1,024 processors
  const int answered = sched_getaffinity(0, sizeof mask, (cpu_set_t *)mask) == 0;
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  const double cores = fmin(answered ? CPU_COUNT_S(sizeof mask, (cpu_set_t *)mask) : (double)online,
                            rm_cpu_quota(root));
  return cores < 1 ? 1 : (int)cores;
}
