// mesh_device.c: the transports for device memory, on devices that are threads
// (common/fake_device.h): staged over a group of threads, and nccl with a stand-in for NCCL
// (tests/support/native/standin) whose path is in the environment (STANDIN_LIBRARY).
//
// Talk: each case is a world of 2 … 8 ranks that exchanges by both transports
// (common/device_talk.h), byte for byte as threads do. Then a chain of exchanges and copies without
// a wait in between, repeated; with nccl it is recorded once and replayed. Ranks compare their
// statistics on the way. Before that, each allocation of a group of one rank fails once, and a
// process with such a group forks.
//
//   mesh_device [--cases 40] [--seconds S] [--seed 1] [--first 0]
//       [--transport 0: both, 1: staged, 2: nccl]
//     Each --plant must end in a failure:
//     --plant 1: a bit of what a rank sends is flipped
//             2: a rank is one call behind the chain's recording
//             3: received bytes are read before the wait for them (only TSan detects it)
#include <stdatomic.h>
#include <sys/wait.h>

#include "base/memory.h"
#include "comm/shm/region.h"
#include "common/device_talk.h"
#include "common/fuzz.h"
#include "gpu/nccl/nccl.h"
#include "gpu/staged.h"

enum { RANKS = 8, HOST = 0, PLAIN = 1, CAPACITY = 1 << 17, ROOM = 16 << 20, ROWS = 2 };

static atomic_long n_calls, n_chains, n_compared;

typedef struct world {
  rm_region *region;
  int size, is_nccl, plant;
  uint64_t seed;
  size_t most;
  long calls;
  const char *where;
} world;

typedef struct rank {
  pthread_t thread;
  const world *w;
  int rank;
  rm_comm *host, *plain, *tried;
  fake_device *device;
} rank;

static rm_comm *join_group(const world *w, int index, int who) {
  rm_comm *comm;
  rm_error err = RM_ERROR_INIT;
  const int32_t members[RANKS] = {0, 1, 2, 3, 4, 5, 6, 7};
  tiny_must(rm_region_comm(w->region, index, members, w->size, who, &comm, &err), &err);
  return comm;
}

static void begin(rank *self) {
  const world *w = self->w;
  rm_error err = RM_ERROR_INIT;
  const rm_nccl_options options = {
      .library = getenv("STANDIN_LIBRARY"), .capacity = CAPACITY, .timeout = 60};
  self->device = fake_device_open(ROOM);
  self->host = join_group(w, HOST, self->rank);
  self->plain = join_group(w, PLAIN, self->rank);
  if (w->is_nccl)
    tiny_must(rm_comm_create_nccl(self->host, &self->device->device, &options, &self->tried, &err),
              &err);
  if (self->device->frees)
    tiny_die("making a group has freed %d blocks, for which a GPU waits until it is idle",
             self->device->frees);
  if (!w->is_nccl)
    tiny_must(
        rm_comm_create_staged(self->host, &self->device->device, CAPACITY, &self->tried, &err),
        &err);
}

static void end(rank *self) {
  rm_comm_destroy(self->tried);
  rm_comm_destroy(self->plain);
  rm_comm_destroy(self->host);
  fake_device_close(self->device);
}

// ---------------------------------------------------------------------------------------- a chain
// Two matrices of ROWS rows for each rank. Columns are gathered, runs of rows are exchanged, whole
// rows are gathered; then each rank moves one of its rows, so that every round differs from the one
// before.
typedef struct chain {
  char *x, *y;
  size_t first[RANKS], bytes[RANKS], ld;
} chain;

static chain chain_of(const world *w, char *memory) {
  chain c = {.x = memory};
  for (int r = 0; r < w->size; r++) {
    c.first[r] = c.ld;
    c.bytes[r] = talk_size(tiny_mix(w->seed + (uint64_t)r), 90);
    c.ld += c.bytes[r];
  }
  c.ld += 1 + tiny_mix(w->seed) % 3;
  c.y = memory + (size_t)(ROWS * w->size) * c.ld;
  return c;
}

static size_t chain_bytes(const world *w) {
  const chain c = chain_of(w, NULL);
  return 2 * (size_t)(ROWS * w->size) * c.ld;
}

static rm_code chain_calls(const world *w, const chain *c, rm_comm *comm, int me, rm_error *err) {
  rm_block send[RANKS], recv[RANKS];
  rm_code code = talk_gather_columns(comm, c->x, ROWS * w->size, c->ld, c->first, c->bytes, err);
  for (int r = 0; r < w->size; r++) {
    send[r] =
        (rm_block){c->x + (size_t)(ROWS * r) * c->ld + c->first[me], ROWS, c->bytes[me], c->ld};
    recv[r] =
        (rm_block){c->y + (size_t)(ROWS * me) * c->ld + c->first[r], ROWS, c->bytes[r], c->ld};
  }
  if (!code) code = rm_comm_exchange(comm, RM_COMM_ALL_TO_ALL, send, recv, err);
  for (int r = 0; r < w->size; r++) {
    send[r] = (rm_block){c->y + (size_t)(ROWS * me) * c->ld, 1, ROWS * c->ld, ROWS * c->ld};
    recv[r] = (rm_block){c->x + (size_t)(ROWS * r) * c->ld, 1, ROWS * c->ld, ROWS * c->ld};
  }
  return code ? code : rm_comm_exchange(comm, RM_COMM_GATHER, send, recv, err);
}

static void chain_turn(const world *w, int me, size_t *to, size_t *from) {
  *to = (size_t)me;
  *from = (size_t)((me + 3) % (ROWS * w->size));
}

static void chain_on_device(const rank *self, const chain *c) {
  rm_error err = RM_ERROR_INIT;
  const rm_device *device = &self->device->device;
  size_t to, from;
  chain_turn(self->w, self->rank, &to, &from);
  tiny_must(chain_calls(self->w, c, self->tried, self->rank, &err), &err);
  if (to != from)
    device->copy_2d(device->self, c->x + to * c->ld, c->ld, c->x + from * c->ld, c->ld, c->ld, 1);
}

static void chain_on_host(const rank *self, const chain *c) {
  rm_error err = RM_ERROR_INIT;
  size_t to, from;
  chain_turn(self->w, self->rank, &to, &from);
  tiny_must(chain_calls(self->w, c, self->plain, self->rank, &err), &err);
  if (to != from) memcpy(c->x + to * c->ld, c->x + from * c->ld, c->ld);
}

static void run_chain(const rank *self) {
  enum { ROUNDS = 5 };
  const world *w = self->w;
  const rm_device *device = &self->device->device;
  const size_t bytes = chain_bytes(w);
  rm_error err = RM_ERROR_INIT;
  void *there, *graph = NULL;
  char *here = malloc(bytes), *shadow = malloc(bytes);
  if (!here || !shadow || device->alloc(device->self, bytes, &there)) tiny_die("no memory");
  for (size_t i = 0; i < bytes; i++) here[i] = talk_byte(w->seed + (uint64_t)self->rank, i);
  const chain on_host = chain_of(w, here), on_device = chain_of(w, there);
  device->copy_to_device(device->self, there, here, bytes);
  if (device->wait(device->self))
    tiny_die("a copy to the device fails"); // the host's chain overwrites its own input
  if (rm_comm_can_be_captured(self->tried) != w->is_nccl)
    tiny_die("%s: what can be recorded is another", w->where);
  if (w->is_nccl) {
    if (device->begin_capture(device->self)) tiny_die("nothing can be recorded");
    chain_on_device(self, &on_device);
    if (device->end_capture(device->self, &graph)) tiny_die("nothing was recorded");
  }
  const int behind = w->plant == 2 && self->rank == 0;
  for (int round = 0; round < ROUNDS; round++) {
    if (graph && !(behind && round == 0)) device->replay(device->self, graph);
    else if (!graph) chain_on_device(self, &on_device);
    chain_on_host(self, &on_host);
  }
  device->copy_to_host(device->self, shadow, there, bytes);
  tiny_must(rm_comm_wait(&self->tried, 1, device, RM_WAIT_QUEUE, behind ? 2 : 60, &err), &err);
  if (memcmp(shadow, here, bytes))
    tiny_die("%s: a chain of exchanges brings other bytes than threads do", w->where);
  device->destroy_graph(device->self, graph);
  device->free(device->self, there, bytes);
  free(shadow);
  free(here);
  atomic_fetch_add(&n_chains, ROUNDS);
}

// ---------------------------------------------------------------------------------------- a world
static void check_books(const rank *self, const talk *t, long calls) {
  rm_comm_stats stats;
  long counted = 0;
  rm_comm_statistics(self->tried, &stats);
  counted = (long)stats.calls;
  if (counted != calls || stats.bytes_sent != t->bytes_sent ||
      stats.bytes_received != t->bytes_received)
    tiny_die("%s: the books say %ld calls, %llu and %llu bytes, wanted %ld, %llu and %llu",
             self->w->where, counted, (unsigned long long)stats.bytes_sent,
             (unsigned long long)stats.bytes_received, calls, (unsigned long long)t->bytes_sent,
             (unsigned long long)t->bytes_received);
}

static void *run_rank(void *arg) {
  rank *self = arg;
  const world *w = self->w;
  rm_error err = RM_ERROR_INIT;
  device_talk d;
  begin(self);
  device_talk_begin(&d, self->tried, self->plain, self->device, w->seed, w->most);
  d.patience = w->plant ? 2 : 60;
  d.is_hasty = w->plant == 3;
  for (long call = 0; call < w->calls; call++) {
    rm_comm_set_epoch(d.talk.comm, call / 7);
    tiny_must(talk_call(&d.talk, (uint64_t)call, &err), &err);
    if (tiny_mix(w->seed ^ (uint64_t)call) % 4) continue;
    tiny_must(rm_comm_compare(self->tried, self->host, &err), &err);
    atomic_fetch_add(&n_compared, 1);
  }
  check_books(self, &d.talk, w->calls);
  atomic_fetch_add(&n_calls, w->calls);
  device_talk_end(&d);
  run_chain(self);
  end(self);
  return NULL;
}

static void run_world(fuzz *f, int is_nccl) {
  rm_error err = RM_ERROR_INIT;
  world w = {.size = 2 + (int)fuzz_below(f, RANKS - 1),
             .is_nccl = is_nccl,
             .calls = 25,
             .where = fuzz_where(f),
             .plant = (int)f->plant};
  w.seed = fuzz_bits(f);
  w.most = fuzz_one_in(f, 3) ? 3000 : 400;
  const rm_region_options options = {
      .world = w.size, .n_groups = 2, .buffer_bytes = 4096, .timeout = 60};
  tiny_must(rm_region_create(&options, &w.region, &err), &err);
  rank ranks[RANKS];
  for (int r = 0; r < w.size; r++) {
    ranks[r] = (rank){.w = &w, .rank = r};
    if (pthread_create(&ranks[r].thread, NULL, run_rank, &ranks[r])) tiny_die("no thread %d", r);
  }
  for (int r = 0; r < w.size; r++) pthread_join(ranks[r].thread, NULL);
  rm_region_release(w.region);
}

// ----------------------------------------------------------------------------------------- making
static rm_code make_alone(fake_device *device, int is_nccl, rm_comm **host, rm_comm **comm,
                          rm_error *err) {
  const rm_nccl_options options = {
      .library = getenv("STANDIN_LIBRARY"), .capacity = 1000, .timeout = 60};
  *comm = NULL;
  const rm_code code = talk_alone(host, err);
  if (code) return code;
  return is_nccl ? rm_comm_create_nccl(*host, &device->device, &options, comm, err)
                 : rm_comm_create_staged(*host, &device->device, 1000, comm, err);
}

// The n-th allocation of the host, or of the device, fails, for every n: the call fails, frees
// everything, and the next try works.
static void no_memory(int is_nccl, int of_device) {
  int failures = 0;
  for (int n = 1;; n++) {
    rm_error err = RM_ERROR_INIT;
    rm_comm *host, *comm;
    fake_device *device = fake_device_open(1 << 20);
    rm_memory_fail_at(of_device ? 0 : n, 0);
    device->refuse_at = of_device ? n : 0;
    const rm_code code = make_alone(device, is_nccl, &host, &comm, &err);
    const int failed = of_device ? device->refuse_at == 0 : rm_memory_failed() > 0;
    rm_memory_fail_at(0, 0);
    device->refuse_at = 0;
    if (failed != (code == RM_E_MEMORY || code == RM_E_CAPACITY) || (code && comm))
      tiny_die("allocation %d: %s \"%s\"", n, rm_code_name(code), rm_error_message(&err));
    rm_error_clear(&err);
    rm_comm_destroy(comm);
    rm_comm_destroy(host);
    fake_device_close(device); // which counts
    if (rm_memory_blocks())
      tiny_die("allocation %d: %zu blocks were not given back", n, rm_memory_blocks());
    if (!failed) break;
    failures++;
  }
  if (failures < 3) tiny_die("%d allocations failed", failures);
}

// A forked child may free its copy, and nothing else; the parent is not affected.
static void forked(int is_nccl) {
  rm_error err = RM_ERROR_INIT;
  rm_comm *host, *comm;
  fake_device *device = fake_device_open(1 << 20);
  int status;
  tiny_must(make_alone(device, is_nccl, &host, &comm, &err), &err);
  const pid_t child = fork();
  if (child == 0) {
    const rm_code code = rm_comm_barrier(comm, &err);
    rm_comm_abort(comm, RM_E_STATE);
    rm_comm_destroy(comm);
    _exit(code == RM_E_STATE ? 0 : 1);
  }
  if (waitpid(child, &status, 0) != child || status)
    tiny_die("a forked child ended with %d", status);
  tiny_must(rm_comm_barrier(comm, &err), &err);
  tiny_must(rm_comm_wait(&comm, 1, &device->device, RM_WAIT_QUEUE, 60, &err), &err);
  rm_comm_destroy(comm);
  rm_comm_destroy(host);
  fake_device_close(device);
}

int main(int argc, char **argv) {
  long transport = 0;
  fuzz f = {.seed = 1};
  option_read(argc, argv,
              (option[]){{"cases", .least = 1, .most = OPTION_MOST, .count = &f.cases},
                         {"seconds", .most = OPTION_MOST, .count = &f.seconds},
                         {"first", .most = OPTION_MOST, .count = &f.first},
                         {"plant", .most = 3, .count = &f.plant},
                         {"transport", .most = 2, .count = &transport},
                         {"seed", .bits = &f.seed},
                         {0}});
  if (!f.cases) f.cases = f.seconds ? OPTION_MOST : 40;
  f.at = f.first - 1;
  clock_gettime(CLOCK_MONOTONIC, &f.begin);
  if (transport != 1 && !getenv("STANDIN_LIBRARY")) tiny_die("STANDIN_LIBRARY is not set");
  if (f.plant == 1) setenv("STANDIN_FLIP", "1:7", 1);
  for (int is_nccl = transport == 2; is_nccl < (transport == 1 ? 1 : 2); is_nccl++) {
    no_memory(is_nccl, 0);
    no_memory(is_nccl, 1);
    forked(is_nccl);
  }
  while (fuzz_next_case(&f)) {
    if (transport != 2) run_world(&f, 0);
    if (transport != 1) run_world(&f, 1);
  }
  if (rm_memory_blocks()) tiny_die("%zu blocks were not given back", rm_memory_blocks());
  printf("mesh_device: %ld calls and %ld chains of three as threads make them, %ld comparisons of "
         "accounts\n",
         (long)n_calls, (long)n_chains, (long)n_compared);
  return 0;
}
