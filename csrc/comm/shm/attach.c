// attach.c: how processes attach to a region, without leaving a file behind if one of them is
// killed.
//
//   1. Rank 0 fills an unnamed file, then links it under the name. The link fails if the name
//      exists. So other ranks only see a complete header.
//   2. Each other rank opens the name, checks the owner and the header, and writes its process into
//      the region.
//   3. The last rank to attach removes the name, then marks the region as complete.
//   4. A rank that fails to attach (because another rank was killed, is late or has other options)
//      removes the name before it returns. A later rank finds no file and waits for its deadline.
//
// So a name is left behind only if every rank that had opened the file was killed. The next rank 0
// with that name finds the creator dead and removes the name. A rank locks the file while it checks
// and removes the name, so that it cannot remove a new file of the same name.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/memory.h"
#include "comm/shm/layout.h"

#define FOLDER "/dev/shm"
static const char MAGIC[16] = "rollmesh region";
enum { NAME_MAX_LENGTH = 200, RETRY_NS = 2000000 };

typedef struct attaching {
  rm_region *region;
  const char *name;
  char path[sizeof FOLDER + NAME_MAX_LENGTH + 16];
  int rank;
  uint64_t nonce;
  double deadline;
} attaching;

// --------------------------------------------------------------------------------------- the name
// Removes the name if it still refers to this file. Without the lock, which is held for
// microseconds, it could remove the name of a run that starts at this moment.
static void remove_name(const attaching *a, int file) {
  struct stat here, there;
  flock(file, LOCK_EX);
  if (fstat(file, &here) == 0 && lstat(a->path, &there) == 0 && here.st_ino == there.st_ino &&
      here.st_dev == there.st_dev)
    unlink(a->path);
  flock(file, LOCK_UN);
}

// Opens the file of that name; *file is −1 when there is none. RM_E_AUTH unless this user's
// rollmesh has created it.
static rm_code open_name(const attaching *a, rm_region_head *head, int *file, rm_error *err) {
  struct stat status;
  *file = open(a->path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (*file < 0)
    return errno == ENOENT
               ? RM_OK
               : rm_fail(err, RM_E_AUTH, "%s cannot be opened: %s", a->path, strerror(errno));
  rm_code code = RM_OK;
  if (fstat(*file, &status)) code = rm_fail(err, RM_E_AUTH, "%s: %s", a->path, strerror(errno));
  else if (status.st_uid != geteuid() || status.st_mode != (S_IFREG | 0600))
    code = rm_fail(err, RM_E_AUTH,
                   "%s: expected a regular file with owner %u and mode 600, got owner %u and mode "
                   "%o",
                   a->path, (unsigned)geteuid(), (unsigned)status.st_uid,
                   (unsigned)status.st_mode & 07777);
  else if (pread(*file, head, sizeof *head, 0) != (ssize_t)sizeof *head ||
           memcmp(head->magic, MAGIC, sizeof MAGIC))
    code = rm_fail(err, RM_E_AUTH, "%s is not a region of rollmesh", a->path);
  if (!code) return RM_OK;
  close(*file);
  *file = -1;
  return code;
}

// ----------------------------------------------------------------------------------------- rank 0
static rm_code fill_file(attaching *a, rm_error *err) {
  rm_region *region = a->region;
  const rm_region_options *o = &region->options;
  region->file = open(FOLDER, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  int failed = region->file < 0 || fchmod(region->file, 0600) ||
                       ftruncate(region->file, (off_t)region->map_bytes)
                   ? errno
                   : 0;
  if (!failed) failed = rm_region_claim(region->file, 0, region->buffers_at);
  if (!failed && (region->lock = rm_process_lock(region->file, 0)) < 0) failed = errno;
  RM_FAIL_IF(failed, RM_E_CAPACITY, "no file of %zu bytes in %s: %s", region->map_bytes, FOLDER,
             strerror(failed));
  if (!(region->map = rm_map_file(region->file, region->map_bytes)))
    return rm_no_memory(err, "a region of ranks", a->region->map_bytes);
  region->map->head = (rm_region_head){.nonce = a->nonce,
                                       .maker = (uint64_t)getpid(),
                                       .world = (uint64_t)o->world,
                                       .n_groups = (uint64_t)o->n_groups,
                                       .buffer_bytes = o->buffer_bytes};
  memcpy(region->map->head.magic, MAGIC, sizeof MAGIC);
  atomic_store(&region->map->ranks[0].pid, getpid());
  atomic_store(&region->map->n_attached, 1);
  return RM_OK;
}

// A file of that name exists: removes the name if its creator has ended.
static rm_code remove_stale(const attaching *a, rm_error *err) {
  rm_region_head head;
  int file;
  RM_TRY(open_name(a, &head, &file, err));
  if (file < 0) return RM_OK;
  const int stale = rm_process_ended(file, 0);
  if (stale) remove_name(a, file);
  close(file);
  return stale ? RM_OK
               : rm_fail(err, RM_E_AUTH, "%s belongs to process %d, which runs", a->path,
                         (int)head.maker);
}

static rm_code make_file(attaching *a, rm_error *err) {
  char unnamed[40];
  RM_TRY(fill_file(a, err));
  snprintf(unnamed, sizeof unnamed, "/proc/self/fd/%d", a->region->file);
  while (linkat(AT_FDCWD, unnamed, AT_FDCWD, a->path, AT_SYMLINK_FOLLOW)) {
    RM_FAIL_IF(errno != EEXIST, RM_E_CAPACITY, "%s cannot be created: %s", a->path,
               strerror(errno));
    RM_TRY(remove_stale(a, err));
    RM_FAIL_IF(rm_now() > a->deadline, RM_E_COLLECTIVE_TIMEOUT,
               "%s cannot be created: other processes created it again each time", a->path);
  }
  return RM_OK;
}

// ------------------------------------------------------------------------------------- the others
// Waits for the file of a running rank 0, which replaces a file whose creator has ended.
static rm_code find_file(attaching *a, rm_region_head *head, rm_error *err) {
  int file;
  for (;;) {
    RM_TRY(open_name(a, head, &file, err));
    const int alive = file >= 0 && !rm_process_ended(file, 0);
    if (alive && head->nonce == a->nonce) break;
    const int late = rm_now() >= a->deadline;
    if (late && file >= 0 && !alive) remove_name(a, file);
    if (file >= 0) close(file);
    RM_FAIL_IF(alive, RM_E_AUTH, "%s has another nonce: process %d of another run created it",
               a->path, (int)head->maker);
    RM_FAIL_IF(late, RM_E_COLLECTIVE_TIMEOUT,
               "no region \"%s\" within %.3g s: rank 0 did not make it or has ended, or the "
               "other ranks gave up before this rank attached",
               a->name, a->region->options.timeout);
    nanosleep(&(struct timespec){.tv_nsec = RETRY_NS}, NULL);
  }
  a->region->file = file;
  return RM_OK;
}

// Maps the file. If it was created with other options, maps only its head, to write the error
// there.
static rm_code map_file(attaching *a, const rm_region_head *head, int *fits, rm_error *err) {
  rm_region *region = a->region;
  const rm_region_options *o = &region->options;
  *fits = head->world == (uint64_t)o->world && head->n_groups == (uint64_t)o->n_groups &&
          head->buffer_bytes == o->buffer_bytes;
  if (!*fits) region->map_bytes = region->slots_at;
  if ((region->map = rm_map_file(region->file, region->map_bytes))) return RM_OK;
  remove_name(a, region->file);
  return rm_no_memory(err, "a region of ranks", a->region->map_bytes);
}

// -------------------------------------------------------------------------- waiting for all ranks
// Ends attaching on all ranks with this rank's error, unless all have attached in the meantime.
static void end_gathering(attaching *a, uint32_t cause) {
  uint32_t gathering = RM_ATTACHING;
  if (atomic_compare_exchange_strong(&a->region->map->gathering, &gathering, RM_ATTACHED + cause))
    rm_region_futex_wake(&a->region->map->gathering);
  else if (gathering == RM_ATTACHED) rm_region_clear_error(a->region, a->rank);
}

static rm_code register_rank(attaching *a, rm_error *err) {
  rm_region_map *map = a->region->map;
  int32_t twin = 0;
  a->region->lock = rm_process_lock(a->region->file, a->rank);
  RM_FAIL_IF(a->region->lock < 0 ||
                 !atomic_compare_exchange_strong(&map->ranks[a->rank].pid, &twin, getpid()),
             RM_E_MESH_MISMATCH, "rank %d of \"%s\" attached twice: processes %d and %d", a->rank,
             a->name, (int)atomic_load(&map->ranks[a->rank].pid), (int)getpid());
  if (atomic_fetch_add(&map->n_attached, 1) + 1 < (uint32_t)a->region->options.world) return RM_OK;
  remove_name(a, a->region->file);
  uint32_t gathering = RM_ATTACHING;
  if (atomic_compare_exchange_strong(&map->gathering, &gathering, RM_ATTACHED))
    rm_region_futex_wake(&map->gathering);
  return RM_OK;
}

// The ranks that have not attached.
static uint64_t find_absent(const rm_region *region) {
  uint64_t absent = 0;
  for (int r = 0; r < region->options.world; r++)
    if (!atomic_load(&region->map->ranks[r].pid)) absent |= UINT64_C(1) << r;
  return absent;
}

// Waits until all have attached, or a rank has reported an error.
static rm_code gather(attaching *a, rm_error *err) {
  rm_region *region = a->region;
  char who[4 * RM_REGION_RANKS + 8];
  uint32_t gathering;
  while ((gathering = atomic_load(&region->map->gathering)) == RM_ATTACHING) {
    rm_region_futex_wait(&region->map->gathering, RM_ATTACHING, RM_REGION_SLICE);
    const uint64_t dead = rm_process_dead_ranks(region, UINT64_MAX);
    if (atomic_load(&region->map->gathering) != RM_ATTACHING) continue;
    if (dead)
      end_gathering(a, rm_region_set_error(region, a->rank, RM_E_RANK_LOST,
                                           "lost %s: the process has ended (attaching to \"%s\")",
                                           rm_region_names(dead, who, sizeof who), a->name));
    else if (rm_now() >= a->deadline)
      end_gathering(a, rm_region_set_error(region, a->rank, RM_E_COLLECTIVE_TIMEOUT,
                                           "%s did not attach to the region \"%s\" within %.3g s",
                                           rm_region_names(find_absent(region), who, sizeof who),
                                           a->name, region->options.timeout));
  }
  if (gathering != RM_ATTACHED) {
    remove_name(a, region->file);
    return rm_region_rank_error(region, gathering - RM_ATTACHED, err);
  }
  return RM_OK;
}

// Reports to all ranks that this rank's options differ from rank 0's.
static void end_for_options(attaching *a, const rm_region_head *head) {
  const rm_region_options *o = &a->region->options;
  end_gathering(
      a, rm_region_set_error(
             a->region, a->rank, RM_E_MESH_MISMATCH,
             "rank %d of \"%s\": expected world=%lu, n_groups=%lu, buffer_bytes=%lu as on rank 0, "
             "got world=%d, n_groups=%d, buffer_bytes=%zu",
             a->rank, a->name, head->world, head->n_groups, head->buffer_bytes, o->world,
             o->n_groups, o->buffer_bytes));
}

static rm_code attach(attaching *a, rm_error *err) {
  rm_region_head head;
  int fits;
  if (a->rank == 0) {
    RM_TRY(make_file(a, err));
    return gather(a, err);
  }
  RM_TRY(find_file(a, &head, err));
  RM_TRY(map_file(a, &head, &fits, err));
  if (fits) RM_TRY(register_rank(a, err));
  else end_for_options(a, &head);
  return gather(a, err);
}

static int is_name(const char *name) {
  const size_t length =
      strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.");
  return !name[length] && length >= 1 && length <= NAME_MAX_LENGTH;
}

rm_code rm_region_attach(const char *name, int rank, uint64_t nonce,
                         const rm_region_options *options, rm_region **out, rm_error *err) {
  *out = NULL;
  RM_FAIL_IF(!is_name(name), RM_E_CONFIG,
             "name: expected 1 to %d letters, digits, '-', '_' and '.', got \"%.*s\"",
             NAME_MAX_LENGTH, NAME_MAX_LENGTH, name);
  RM_TRY(rm_check_range(err, RM_E_CONFIG, "rank", rank, 0, options->world - 1));
  if (options->world == 1) return rm_region_create(options, out, err);
  attaching a = {
      .name = name, .rank = rank, .nonce = nonce, .deadline = rm_now() + options->timeout};
  snprintf(a.path, sizeof a.path, "%s/rollmesh.%s", FOLDER, name);
  RM_TRY(rm_region_new(options, &a.region, err));
  const rm_code code = attach(&a, err);
  if (code) rm_region_release(a.region);
  else *out = a.region;
  return code;
}
