// region.c: regions of threads, offsets of any region, and endpoints of groups. region.h describes
// a region, layout.h its contents; attach.c creates regions that processes share.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/control_groups.h"
#include "base/hash.h"
#include "base/memory.h"
#include "comm/shm/layout.h"

enum {
  PAGE = 4096,
  MAX_GROUPS = 64,
  SPIN_PAUSES = 1000 // some 25 µs: as long as small exchanges take
};

// *at += count · bytes, rounded up to a page. Returns 0 if that does not fit.
static int extend(size_t *at, size_t count, size_t bytes) {
  size_t length;
  if (!rm_mul_size(count, bytes, &length) || !rm_add_size(length, PAGE - 1, &length)) return 0;
  return rm_add_size(*at, length / PAGE * PAGE, at) && *at <= INT64_MAX;
}

static rm_code plan(rm_region *region, const rm_region_options *options, rm_error *err) {
  rm_code code;
  if ((code = rm_check_range(err, RM_E_CONFIG, "world", options->world, 1, RM_REGION_RANKS)) ||
      (code = rm_check_range(err, RM_E_CONFIG, "n_groups", options->n_groups, 1, MAX_GROUPS)))
    return code;
  if (options->buffer_bytes < 1)
    return rm_fail(err, RM_E_CONFIG, "buffer_bytes: expected at least 1, got 0");
  region->options = *options;
  const size_t n = (size_t)options->world * (size_t)options->n_groups;
  size_t at = 0;
  int fits = extend(&at, 1, sizeof(rm_region_map));
  region->slots_at = at;
  fits = fits && extend(&at, n, sizeof(rm_region_slot));
  region->buffers_at = at;
  fits = fits && rm_add_size(options->buffer_bytes, RM_REGION_LINE - 1, &region->buffer_bytes);
  region->buffer_bytes = region->buffer_bytes / RM_REGION_LINE * RM_REGION_LINE;
  region->pair_bytes = 0;
  fits = fits && extend(&region->pair_bytes, 2, region->buffer_bytes) &&
         extend(&at, n, region->pair_bytes);
  region->map_bytes = at;
  if (fits) return RM_OK;
  return rm_fail(err, RM_E_LIMIT,
                 "buffer_bytes: expected %zu pairs of buffers to fit the address space, got %zu", n,
                 options->buffer_bytes);
}

rm_code rm_region_new(const rm_region_options *options, rm_region **out, rm_error *err) {
  rm_region *region = rm_alloc(1, sizeof *region);
  if (!region) return rm_no_memory(err, "a region", 0);
  const rm_code code = plan(region, options, err);
  if (code) {
    rm_free(region);
    return code;
  }
  region->file = -1;
  for (int r = 0; r < RM_REGION_RANKS; r++) region->pidfd[r] = -1;
  region->most_spins = options->world <= rm_usable_cores("") ? SPIN_PAUSES : 0;
  atomic_store(&region->references, 1);
  *out = region;
  return RM_OK;
}

rm_code rm_region_create(const rm_region_options *options, rm_region **out, rm_error *err) {
  *out = NULL;
  rm_region *region;
  const rm_code code = rm_region_new(options, &region, err);
  if (code) return code;
  if (!(region->map = rm_map(region->map_bytes))) {
    const size_t bytes = region->map_bytes;
    rm_region_release(region);
    return rm_no_memory(err, "a region of ranks", bytes);
  }
  *out = region;
  return RM_OK;
}

void rm_region_release(rm_region *region) {
  if (!region || atomic_fetch_sub(&region->references, 1) > 1) return;
  for (int r = 0; r < RM_REGION_RANKS; r++)
    if (region->pidfd[r] >= 0) close(region->pidfd[r]);
  if (region->file >= 0) close(region->file);
  rm_unmap(region->map, region->map_bytes);
  rm_free(region);
}

// -------------------------------------------------------------------------------------- endpoints
static void end_abort(void *self, rm_code why) {
  rm_region_endpoint *end = self;
  const int me = end->members[end->me];
  rm_region_fail_group(end, rm_region_set_error(end->region, me, RM_E_RANK_LOST,
                                                "rank %d has aborted: %s", me, rm_code_name(why)));
}

// Notifies waiting ranks that this rank will not arrive.
static void end_leave(void *self) {
  rm_region_endpoint *end = self;
  atomic_store(&end->slots[end->me]->left, 1);
  rm_region_futex_wake(&end->group->barrier);
}

static void end_destroy(void *self) {
  rm_region_endpoint *end = self;
  rm_region_release(end->region);
  rm_free(end);
}

static rm_code check_members(const rm_region *region, int index, const int32_t *members, int n,
                             int rank, int *me, rm_error *err) {
  uint64_t seen = 0;
  *me = -1;
  rm_code code;
  if ((code = rm_check_range(err, RM_E_CONFIG, "index", index, 0, region->options.n_groups - 1)) ||
      (code = rm_check_range(err, RM_E_CONFIG, "members", n, 1, region->options.world)))
    return code;
  for (int i = 0; i < n; i++) {
    if (members[i] < 0 || members[i] >= region->options.world || seen >> members[i] & 1)
      return rm_fail(err, RM_E_CONFIG,
                     "member %d of the group: expected distinct ranks of 0 to %d, got %d", i,
                     region->options.world - 1, members[i]);
    seen |= UINT64_C(1) << members[i];
    if (members[i] == rank) *me = i;
  }
  return *me >= 0 ? RM_OK
                  : rm_fail(err, RM_E_CONFIG, "members: expected rank %d among the %d, got none",
                            rank, n);
}

// Returns a digest that is never 0.
static uint64_t digest_of(const int32_t *members, int n) {
  const uint64_t digest = rm_hash_bytes(RM_HASH_SEED, members, (size_t)n * sizeof *members);
  return digest ? digest : 1;
}

int rm_region_claim(int file, size_t at, size_t bytes) {
  int failed;
  while ((failed = posix_fallocate(file, (off_t)at, (off_t)bytes)) == EINTR) {}
  return failed;
}

// Allocates the pages of this rank's buffers now. Otherwise a shared memory file grows when it is
// written, and a process gets SIGBUS when memory runs out.
static rm_code claim_pages(const rm_region *region, size_t at, rm_error *err) {
  if (region->file < 0) return RM_OK;
  const int failed = rm_region_claim(region->file, at, region->pair_bytes);
  if (!failed) return RM_OK;
  return rm_fail(err, RM_E_CAPACITY, "no shared memory for two buffers of %zu bytes: %s",
                 region->buffer_bytes, strerror(failed));
}

static rm_region_endpoint *make_end(rm_region *region, int index, const int32_t *members, int n,
                                    int me) {
  rm_region_endpoint *end = rm_alloc(1, sizeof *end);
  if (!end) return NULL;
  *end = (rm_region_endpoint){
      .region = region, .me = me, .size = n, .index = index, .n_spins = region->most_spins};
  // 0, except in tests of the counters' wrap-around.
  end->round = atomic_load(&rm_region_slot_of(region, index, members[me])->came);
  for (int i = 0; i < n; i++) {
    end->members[i] = members[i];
    end->slots[i] = rm_region_slot_of(region, index, members[i]);
    end->buffers[i] = (char *)region->map + rm_region_buffers_of(region, index, members[i]);
  }
  end->group = end->slots[0];
  return end;
}

rm_code rm_region_comm(rm_region *region, int index, const int32_t *members, int n_members,
                       int rank, rm_comm **out, rm_error *err) {
  int me;
  *out = NULL;
  rm_code code = check_members(region, index, members, n_members, rank, &me, err);
  if (!code) code = claim_pages(region, rm_region_buffers_of(region, index, rank), err);
  if (code) return code;
  uint64_t none = 0;
  rm_region_slot *slot = rm_region_slot_of(region, index, rank);
  if (!atomic_compare_exchange_strong(&slot->members, &none, digest_of(members, n_members)))
    return rm_fail(err, RM_E_STATE,
                   "index: expected a group that rank %d has not joined before, got %d, which it "
                   "has already joined",
                   rank, index);
  rm_transport transport = {.name = region->file < 0 ? "threads" : "shm",
                            .self = make_end(region, index, members, n_members, me),
                            .exchange = rm_region_exchange,
                            .abort = end_abort,
                            .check = rm_region_check,
                            .leave = end_leave,
                            .destroy = end_destroy};
  if (!transport.self) code = rm_no_memory(err, "a group of ranks", 0);
  else code = rm_comm_create(&transport, me, n_members, out, err);
  if (code) {
    rm_free(transport.self);
    atomic_store(&slot->members, 0);
    return code;
  }
  atomic_fetch_add(&region->references, 1);
  rm_comm_set_timeout(*out, region->options.timeout);
  return RM_OK;
}
