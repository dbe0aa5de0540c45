// region.c: regions of threads, offsets of any region, and endpoints of groups. region.h describes
// a region, layout.h its contents; attach.c creates regions that processes share.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "base/control_groups.h"
#include "base/hash.h"
#include "base/memory.h"
#include "comm/shm/layout.h"

enum { PAGE = 4096, SPIN_PAUSES = 1000 }; // some 25 µs: as long as small exchanges take

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

static void plan(rm_region *region) {
  const rm_region_options *options = &region->options;
  const size_t n = (size_t)options->world * (size_t)options->n_groups;
  region->slots_at = round_up(sizeof(rm_region_map), PAGE);
  region->buffers_at = region->slots_at + round_up(n * sizeof(rm_region_slot), PAGE);
  region->buffer_bytes = round_up(options->buffer_bytes, RM_REGION_LINE);
  region->pair_bytes = round_up(2 * region->buffer_bytes, PAGE);
  region->map_bytes = region->buffers_at + n * region->pair_bytes;
}

rm_code rm_region_new(const rm_region_options *options, rm_region **out, rm_error *err) {
  RM_TRY(rm_check_range(err, RM_E_CONFIG, "world", options->world, 1, RM_REGION_RANKS));
  rm_region *region = rm_alloc(1, sizeof *region);
  if (!region) return rm_no_memory(err, "a region", 0);
  region->options = *options;
  plan(region);
  region->file = region->lock = -1;
  region->most_spins = options->world <= rm_usable_cores("") ? SPIN_PAUSES : 0;
  atomic_store(&region->references, 1);
  *out = region;
  return RM_OK;
}

rm_code rm_region_create(const rm_region_options *options, rm_region **out, rm_error *err) {
  *out = NULL;
  rm_region *region = NULL;
  RM_TRY(rm_region_new(options, &region, err));
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
  if (region->file >= 0) close(region->file);
  if (region->lock >= 0) rm_process_unlock(region->lock);
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
  RM_FAIL_IF(failed, RM_E_CAPACITY, "no shared memory for two buffers of %zu bytes: %s",
             region->buffer_bytes, strerror(failed));
  return RM_OK;
}

static rm_region_endpoint *make_end(rm_region *region, int index, const int32_t *members, int n,
                                    int rank) {
  rm_region_endpoint *end = rm_alloc(1, sizeof *end);
  if (!end) return NULL;
  *end = (rm_region_endpoint){
      .region = region, .size = n, .index = index, .n_spins = region->most_spins};
  // 0, except in tests of the counters' wrap-around.
  end->round = atomic_load(&rm_region_slot_of(region, index, rank)->came);
  for (int i = 0; i < n; i++) {
    if (members[i] == rank) end->me = i;
    end->members[i] = members[i];
    end->member_set |= UINT64_C(1) << members[i];
    end->slots[i] = rm_region_slot_of(region, index, members[i]);
    end->buffers[i] = (char *)region->map + rm_region_buffers_of(region, index, members[i]);
  }
  end->group = end->slots[0];
  return end;
}

rm_code rm_region_comm(rm_region *region, int index, const int32_t *members, int n_members,
                       int rank, rm_comm **out, rm_error *err) {
  *out = NULL;
  RM_TRY(claim_pages(region, rm_region_buffers_of(region, index, rank), err));
  rm_region_endpoint *end = make_end(region, index, members, n_members, rank);
  if (!end) return rm_no_memory(err, "a group of ranks", 0);
  const rm_transport transport = {.self = end,
                                  .exchange = rm_region_exchange,
                                  .abort = end_abort,
                                  .check = rm_region_check,
                                  .leave = end_leave,
                                  .destroy = end_destroy};
  const rm_code code = rm_comm_create(&transport, end->me, n_members, out, err);
  if (code) {
    rm_free(end);
    return code;
  }
  atomic_store(&end->slots[end->me]->members, digest_of(members, n_members));
  atomic_fetch_add(&region->references, 1);
  rm_comm_set_timeout(*out, region->options.timeout);
  return RM_OK;
}
