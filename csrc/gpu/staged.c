// staged.c: see staged.h. An exchange packs the blocks for other ranks into one device buffer,
// copies it to pinned memory, exchanges over the host group, copies the received bytes back in one
// copy, and unpacks them. Rejected: one copy per block, because each copy costs some microseconds
// and there is one block per rank.
#include "gpu/staged.h"

#include "base/memory.h"
#include "device/devices.h"
#include "gpu/device_block.h"

typedef struct run { // buffers of one direction
  char *there, *here; // owned: [capacity] bytes of device memory, [capacity] of pinned memory
} run;

typedef struct staged {
  rm_comm *host; // view
  const rm_device *device; // view
  int rank, size;
  size_t capacity;
  run out, in;
  rm_block *send, *recv; // [size] each, carved: blocks of the host exchange
} staged;

// --------------------------------------------------------------------------------------- one call
static int is_one_block(rm_comm_op op) { return op == RM_COMM_GATHER || op == RM_COMM_BROADCAST; }

// Assigns consecutive ranges of `here` to the blocks of one direction. Returns their bytes.
static size_t lay_out(const staged *s, const rm_block blocks[], int is_shared, char *here,
                      rm_block placed[]) {
  size_t used = 0;
  for (int r = 0; r < s->size; r++) {
    const size_t bytes = r == s->rank ? 0 : rm_block_bytes(&blocks[r]);
    placed[r] = (rm_block){here + (is_shared ? 0 : used), bytes > 0, bytes, bytes};
    if (!is_shared) used += bytes;
    else if (bytes > used) used = bytes;
  }
  return used;
}

static rm_code check_room(const staged *s, rm_comm_op op, size_t sent, size_t received,
                          rm_error *err) {
  const size_t most = sent > received ? sent : received;
  if (most <= s->capacity) return RM_OK;
  return rm_fail(
      err, RM_E_CAPACITY, "%s: expected at most %zu bytes in one exchange, got %zu that rank %d %s",
      rm_comm_op_name(op), s->capacity, most, s->rank, sent == most ? "sends" : "receives");
}

static rm_code copy_to_host(staged *s, const rm_block send[], size_t sent, rm_error *err) {
  for (int r = 0; r < s->size && sent > 0; r++) {
    const size_t at = (size_t)((char *)s->send[r].base - s->out.here);
    if (r == s->rank || s->send[r].rows == 0) continue;
    int is_packed = 0; // a gather has one block for all ranks
    for (int i = 0; i < r && !is_packed; i++)
      is_packed = i != s->rank && s->send[i].rows && s->send[i].base == s->send[r].base;
    if (!is_packed) rm_device_pack(s->device, &send[r], s->out.there + at);
  }
  if (sent > 0) s->device->copy_to_host(s->device->self, s->out.here, s->out.there, sent);
  // Also waits for the previous exchange's copy from s->in.here.
  return rm_device_wait(s->device, err);
}

static void copy_to_device(staged *s, const rm_block recv[], size_t received) {
  if (received > 0) s->device->copy_to_device(s->device->self, s->in.there, s->in.here, received);
  for (int r = 0; r < s->size; r++)
    if (r != s->rank)
      rm_device_unpack(s->device, s->in.there + ((char *)s->recv[r].base - s->in.here), &recv[r]);
}

static rm_code exchange(void *self, rm_comm_op op, uint64_t sequence, int64_t epoch, double timeout,
                        const rm_block send[], const rm_block recv[], rm_error *err) {
  staged *s = self;
  (void)sequence; // the host group counts its own calls
  const size_t sent = lay_out(s, send, is_one_block(op), s->out.here, s->send);
  const size_t received = lay_out(s, recv, 0, s->in.here, s->recv);
  const rm_block *from = &send[s->rank], *to = &recv[s->rank];
  const size_t own = rm_device_own_needs_run(from, to) ? rm_block_bytes(to) : 0;
  rm_code code = check_room(s, op, sent > own ? sent : own, received, err);
  if (!code) code = copy_to_host(s, send, sent, err);
  if (code) {
    rm_comm_abort(s->host, code); // other ranks wait in the call that this rank will not join
    return code;
  }
  rm_comm_set_epoch(s->host, epoch);
  rm_comm_set_timeout(s->host, timeout);
  if ((code = rm_comm_exchange(s->host, op, s->send, s->recv, err))) return code;
  copy_to_device(s, recv, received);
  rm_device_own(s->device, from, to, s->out.there);
  return RM_OK;
}

static void give_up(void *self, rm_code why) { rm_comm_abort(((staged *)self)->host, why); }

static rm_code look(void *self, rm_error *err) {
  return rm_comm_check(((staged *)self)->host, err);
}

// --------------------------------------------------------------------------------------- creation
static void free_run(const rm_device *device, run *r, size_t bytes) {
  if (r->there) device->free(device->self, r->there, bytes);
  if (r->here) device->free_pinned(device->self, r->here, bytes);
  *r = (run){0};
}

// Not called in a forked child, where device memory cannot be freed.
static void leave(void *self) {
  staged *s = self;
  free_run(s->device, &s->out, s->capacity);
  free_run(s->device, &s->in, s->capacity);
}

static void destroy(void *self) { rm_free(self); }

static rm_code make_run(const rm_device *device, run *r, size_t bytes, rm_error *err) {
  void *there = NULL, *here = NULL;
  const rm_code code = rm_device_alloc(device, bytes, "a buffer for exchanges", &there, err);
  if (code) return code;
  r->there = there;
  const rm_device_status status = device->alloc_pinned(device->self, bytes, &here);
  if (status == RM_DEVICE_OK) return r->here = here, RM_OK;
  if (status != RM_DEVICE_NO_MEMORY) return rm_device_check(device, status, err);
  return rm_fail(err, RM_E_MEMORY, "no host memory for a buffer for exchanges of %zu bytes", bytes);
}

static rm_code make_runs(staged *s, rm_error *err) {
  const rm_code code = make_run(s->device, &s->out, s->capacity, err);
  return code ? code : make_run(s->device, &s->in, s->capacity, err);
}

rm_code rm_comm_create_staged(rm_comm *host, const rm_device *device, size_t capacity,
                              rm_comm **out, rm_error *err) {
  const int size = rm_comm_size(host), rank = rm_comm_rank(host);
  *out = NULL;
  if (capacity < 1 || capacity > INT64_MAX)
    return rm_fail(err, RM_E_CONFIG, "capacity: expected 1 to 2^63 - 1 bytes, got %zu", capacity);
  staged *s = rm_alloc(1, sizeof *s + 2 * (size_t)size * sizeof s->send[0]);
  if (!s) return rm_fail(err, RM_E_MEMORY, "no memory for a group of %d ranks", size);
  *s = (staged){.host = host,
                .device = device,
                .rank = rank,
                .size = size,
                .capacity = capacity,
                .send = (rm_block *)(s + 1)};
  s->recv = s->send + size;
  const rm_transport transport = {.name = "staged",
                                  .moves_own = 1,
                                  .self = s,
                                  .exchange = exchange,
                                  .abort = give_up,
                                  .check = look,
                                  .leave = leave,
                                  .destroy = destroy};
  rm_code code = make_runs(s, err);
  if (!code) code = rm_comm_create(&transport, rank, size, out, err);
  if (!code) rm_comm_set_timeout(*out, rm_comm_timeout(host));
  if (code) {
    leave(s);
    destroy(s);
  }
  return code;
}
