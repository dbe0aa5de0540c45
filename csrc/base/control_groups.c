// control_groups.c: see control_groups.h. Rejected: paths below /sys/fs/cgroup without mountinfo,
// because version 1 has a mount for each controller, mixed systems have both versions, and a
// container that sees its own group as the root has no path to it below the mount.
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

enum { LINE = 2 * PATH_MAX, MASK_WORDS = 1024 }; // 65,536 processors
// Without a limit, version 1 writes a number larger than any memory.
static const size_t NO_LIMIT = (size_t)1 << 60;

typedef void (*visit_fn)(void *arg, const char *group);

static FILE *opened(const char *folder, const char *name) {
  char path[LINE];
  const int length = snprintf(path, sizeof path, "%s/%s", folder, name);
  return length > 0 && (size_t)length < sizeof path ? fopen(path, "re") : NULL;
}

// Reads the next line without its newline, cut to LINE. Returns 0 at the end of the file.
static int next_line(FILE *file, char line[LINE]) {
  if (!fgets(line, LINE, file)) return 0;
  char *end = strchr(line, '\n');
  if (end) *end = 0;
  else
    for (int c; (c = fgetc(file)) != EOF && c != '\n';) {}
  return 1;
}

// Reads the integer at the start of `text`, after blanks. Returns 0 if there is none or it is too
// large.
static int read_number(const char *text, size_t *number, const char **end) {
  text += strspn(text, " \t");
  if (*text < '0' || *text > '9') return 0;
  char *after;
  const unsigned long long value = strtoull(text, &after, 10);
  *number = value;
  if (end) *end = after;
  return value < ULLONG_MAX;
}

// Reads the number after `key` in a file of the group; with key "" the file's first line.
static int number_in(const char *group, const char *name, const char *key, size_t *number) {
  FILE *file = opened(group, name);
  if (!file) return 0;
  char line[LINE];
  int found = 0;
  while (!found && next_line(file, line)) {
    found = strncmp(line, key, strlen(key)) == 0 && read_number(line + strlen(key), number, NULL);
    if (!*key) break;
  }
  fclose(file);
  return found;
}

static int has_word(const char *list, const char *word) {
  const size_t length = strlen(word);
  for (; list; list = strchr(list, ',') ? strchr(list, ',') + 1 : NULL)
    if (strncmp(list, word, length) == 0 && (list[length] == ',' || !list[length])) return 1;
  return 0;
}

// --------------------------------------------------------------------------- where the groups are
// Finds the path of this process's group, "/…": in the hierarchy of a version 1 controller, or in
// the version 2 hierarchy when controller is "".
static int own_group(const char *root, const char *controller, char line[LINE],
                     const char **group) {
  FILE *file = opened(root, "proc/self/cgroup");
  if (!file) return 0;
  int found = 0;
  while (!found && next_line(file, line)) { // "4:cpu,cpuacct:/a/b", "0::/a/b"
    char *names = strchr(line, ':'), *path = names ? strchr(++names, ':') : NULL;
    if (!path || path[1] != '/') continue;
    *path++ = 0;
    found = *controller ? has_word(names, controller) : !*names;
    *group = path;
  }
  fclose(file);
  return found;
}

typedef struct mounted {
  char *group; // the group that is mounted at `point`; "/" is the hierarchy's root
  char *point, *type;
  const char *options;
} mounted;

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

// Parses "31 23 0:28 /group /point rw,relatime … - cgroup source rw,memory", with any number of
// words before the "-".
static int parse_mount(char *line, mounted *mount) {
  char *words[5], *word;
  for (int i = 0; i < 5; i++)
    if (!(words[i] = strsep(&line, " "))) return 0;
  while ((word = strsep(&line, " ")) && strcmp(word, "-")) {}
  mount->type = strsep(&line, " ");
  if (!mount->type || !strsep(&line, " ") || !line) return 0;
  *mount = (mounted){.group = words[3], .point = words[4], .type = mount->type, .options = line};
  unescape(mount->group);
  unescape(mount->point);
  return 1;
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

// Calls visit with the folder of each group that this process is in, innermost first, in the
// controller's hierarchies of both versions.
static void each_group(const char *root, const char *controller, visit_fn visit, void *arg) {
  FILE *file = opened(root, "proc/self/mountinfo");
  if (!file) return;
  char line[LINE], own[LINE], group[2 * LINE];
  mounted mount;
  const char *path = NULL;
  while (next_line(file, line)) {
    if (!parse_mount(line, &mount)) continue;
    const int is_v2 = strcmp(mount.type, "cgroup2") == 0;
    if (!is_v2 && (strcmp(mount.type, "cgroup") || !has_word(mount.options, controller))) continue;
    const char *down =
        own_group(root, is_v2 ? "" : controller, own, &path) ? way_down(mount.group, path) : NULL;
    if (!down) continue;
    const int top = snprintf(group, sizeof group, "%s%s", root, mount.point);
    if (top < 0 || (size_t)top + strlen(down) >= sizeof group) continue;
    memcpy(group + top, down, strlen(down) + 1);
    for (;;) {
      visit(arg, group);
      if (strlen(group) <= (size_t)top) break;
      *strrchr(group, '/') = 0;
    }
  }
  fclose(file);
}

// ----------------------------------------------------------------------------------------- memory
typedef struct memory_visit {
  rm_group_memory_fn visit;
  void *arg;
} memory_visit;

static void visit_memory(void *opaque, const char *group) {
  static const char *const FILES[2][4] = {
      {"memory.max", "memory.current", "memory.stat", "inactive_file "},
      {"memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file "},
  };
  const memory_visit *to = opaque;
  for (int version = 0; version < 2; version++) {
    const char *const *names = FILES[version];
    size_t limit, used, cached;
    char path[2 * LINE];
    struct stat status;
    if (!number_in(group, names[0], "", &limit) || limit >= NO_LIMIT) continue;
    if (snprintf(path, sizeof path, "%s/%s", group, names[0]) >= (int)sizeof path ||
        stat(path, &status))
      continue;
    if (!number_in(group, names[1], "", &used)) used = 0;
    if (!number_in(group, names[2], names[3], &cached) || cached > used) cached = 0;
    used -= cached;
    to->visit(to->arg, (rm_group_memory){(uint64_t)status.st_ino, limit > used ? limit - used : 0});
  }
}

void rm_each_memory_limit(const char *root, rm_group_memory_fn visit, void *arg) {
  each_group(root, "memory", visit_memory, &(memory_visit){visit, arg});
}

// ------------------------------------------------------------------------------------------ cores
static void visit_cpu(void *opaque, const char *group) {
  double *least = opaque;
  size_t quota = 0, period = 0;
  char line[LINE];
  FILE *file = opened(group, "cpu.max");
  if (file) { // version 2: "QUOTA PERIOD", or "max PERIOD"
    const char *rest = NULL;
    if (!next_line(file, line) || !read_number(line, &quota, &rest) ||
        !read_number(rest, &period, NULL))
      quota = 0;
    fclose(file);
  } else if (!number_in(group, "cpu.cfs_quota_us", "", &quota) ||
             !number_in(group, "cpu.cfs_period_us", "", &period)) { // -1: none
    quota = 0;
  }
  if (quota && period) *least = fmin(*least, (double)quota / (double)period);
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
