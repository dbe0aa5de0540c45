// nccl_real.c: tests the real NCCL where it is installed but no driver exists to make a group with:
// NCCL loads, the declarations in this project match as far as that can be tested, and making a
// group fails on every rank, soon and with the expected code. The environment gives the library's
// path (NCCL_LIBRARY).
//
//   nccl_real            prints: version 2.32.3, result 0 of a name, DeviceError "…"
#include <stdio.h>

#include "base/memory.h"
#include "comm/shm/region.h"
#include "common/fake_device.h"
#include "gpu/nccl/library.h"
#include "gpu/nccl/nccl.h"

enum { RANKS = 2 };

typedef struct rank {
  pthread_t thread;
  rm_region *region;
  int rank;
  rm_code code;
  char text[512];
} rank;

static void *run_rank(void *arg) {
  rank *self = arg;
  rm_error err = RM_ERROR_INIT;
  rm_comm *host, *comm;
  fake_device *device = fake_device_open(1 << 20);
  const int32_t members[RANKS] = {0, 1};
  const rm_nccl_options options = {
      .library = getenv("NCCL_LIBRARY"), .capacity = 1 << 16, .timeout = 20};
  tiny_must(rm_region_comm(self->region, 0, members, RANKS, self->rank, &host, &err), &err);
  self->code = rm_comm_create_nccl(host, &device->device, &options, &comm, &err);
  snprintf(self->text, sizeof self->text, "%s", rm_error_message(&err));
  rm_error_clear(&err);
  rm_comm_destroy(comm);
  rm_comm_destroy(host);
  fake_device_close(device);
  return NULL;
}

int main(void) {
  rm_error err = RM_ERROR_INIT;
  rm_nccl api;
  rm_nccl_id id;
  rank ranks[RANKS];
  if (!getenv("NCCL_LIBRARY")) tiny_die("NCCL_LIBRARY is not set");
  tiny_must(rm_nccl_load(getenv("NCCL_LIBRARY"), &api, &err), &err);
  printf("version %d.%d.%d\n", api.version / 10000, api.version / 100 % 100, api.version % 100);
  printf("a name: %s\n", api.error_string(api.get_unique_id(&id)));
  const rm_region_options options = {
      .world = RANKS, .n_groups = 1, .buffer_bytes = 4096, .timeout = 30};
  rm_region *region;
  tiny_must(rm_region_create(&options, &region, &err), &err);
  for (int r = 0; r < RANKS; r++) {
    ranks[r] = (rank){.region = region, .rank = r};
    if (pthread_create(&ranks[r].thread, NULL, run_rank, &ranks[r])) tiny_die("no thread %d", r);
  }
  for (int r = 0; r < RANKS; r++) pthread_join(ranks[r].thread, NULL);
  for (int r = 0; r < RANKS; r++)
    printf("rank %d: %s: %s\n", r, rm_code_name(ranks[r].code), ranks[r].text);
  rm_region_release(region);
  if (rm_memory_blocks()) tiny_die("%zu blocks were not given back", rm_memory_blocks());
  return 0;
}
