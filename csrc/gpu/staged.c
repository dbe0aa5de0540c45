// staged.c: see staged.h. An exchange packs the blocks for other ranks into one device buffer,
// copies it to pinned memory, exchanges over the host group, copies the received bytes back in one
// copy, and unpacks them. Rejected: one copy per block, because each copy costs some microseconds
// and there is one block per rank.
#include "gpu/staged.h"

#include "base/memory.h"
#include "device/devices.h"
#include "gpu/device_block.h"

typedef struct staged {
  rm_comm *host; // view
  const rm_device *device; // view
  int rank, size;
  size_t capacity;
  rm_mirrored_buffer out, in; // owned: [capacity] bytes for each direction
  rm_block *send, *recv; // [size] each, carved: blocks of the host exchange
  char **from, **to; // [size] each, carved: their bytes on the device
} staged;

// --------------------------------------------------------------------------------------- one call
// The blocks of the host exchange: the bytes in pinned memory of what was placed on the device.
static void place_here(const staged *s, const rm_mirrored_buffer *run, const rm_block blocks[],
                       char *const at[], rm_block here[]) {
  for (int i = 0; i < s->size; i++) {
    const size_t bytes = at[i] ? rm_block_bytes(&blocks[i]) : 0;
    here[i] = (rm_block){run->host + (at[i] ? at[i] - run->on_device : 0), bytes > 0, bytes, bytes};
  }
}

static rm_code copy_to_host(staged *s, const rm_block send[], size_t sent, rm_error *err) {
  rm_device_pack_all(s->device, send, s->size, s->from);
  if (sent > 0) s->device->copy_to_host(s->device->self, s->out.host, s->out.on_device, sent);
  // Also waits for the previous exchange's copy from s->in.host.
  return rm_device_wait(s->device, err);
}

static rm_code exchange(void *self, rm_comm_op op, uint64_t sequence, int64_t epoch, double timeout,
                        const rm_block send[], const rm_block recv[], rm_error *err) {
  staged *s = self;
  (void)sequence; // the host group counts its own calls
  const size_t sent =
      rm_device_place(send, s->size, s->rank, op == RM_COMM_GATHER, 0, s->out.on_device, s->from);
  const size_t received = rm_device_place(recv, s->size, s->rank, 0, 0, s->in.on_device, s->to);
  rm_code code = rm_device_check_room(op, "bytes", s->rank, s->capacity, sent, received, err);
  if (!code) code = copy_to_host(s, send, sent, err);
  if (code) {
    rm_comm_abort(s->host, code); // other ranks wait in the call that this rank will not join
    return code;
  }
  place_here(s, &s->out, send, s->from, s->send);
  place_here(s, &s->in, recv, s->to, s->recv);
  rm_comm_set_epoch(s->host, epoch);
  rm_comm_set_timeout(s->host, timeout);
  if ((code = rm_comm_exchange(s->host, op, s->send, s->recv, err))) return code;
  if (received > 0)
    s->device->copy_to_device(s->device->self, s->in.on_device, s->in.host, received);
  rm_device_unpack_all(s->device, recv, s->size, s->to);
  rm_device_own(s->device, &send[s->rank], &recv[s->rank]);
  return RM_OK;
}

static void give_up(void *self, rm_code why) { rm_comm_abort(((staged *)self)->host, why); }

static rm_code look(void *self, rm_error *err) {
  return rm_comm_check(((staged *)self)->host, err);
}

// --------------------------------------------------------------------------------------- creation
// Not called in a forked child, where device memory cannot be freed.
static void leave(void *self) {
  staged *s = self;
  rm_mirrored_destroy(&s->out);
  rm_mirrored_destroy(&s->in);
}

static void destroy(void *self) { rm_free(self); }

rm_code rm_comm_create_staged(rm_comm *host, const rm_device *device, size_t capacity,
                              rm_comm **out, rm_error *err) {
  const int size = rm_comm_size(host), rank = rm_comm_rank(host);
  *out = NULL;
  staged *s = rm_alloc(1, sizeof *s + 2 * (size_t)size * (sizeof *s->send + sizeof *s->from));
  if (!s) return rm_fail(err, RM_E_MEMORY, "no memory for a group of %d ranks", size);
  *s = (staged){.host = host,
                .device = device,
                .rank = rank,
                .size = size,
                .capacity = capacity,
                .send = (rm_block *)(s + 1)};
  s->recv = s->send + size;
  s->from = (char **)(s->recv + size);
  s->to = s->from + size;
  const rm_transport transport = {.moves_own = 1,
                                  .self = s,
                                  .exchange = exchange,
                                  .abort = give_up,
                                  .check = look,
                                  .leave = leave,
                                  .destroy = destroy};
  rm_code code = rm_mirrored_create(device, capacity, "a buffer for exchanges", &s->out, err);
  if (!code) code = rm_mirrored_create(device, capacity, "a buffer for exchanges", &s->in, err);
  if (!code) code = rm_comm_create(&transport, rank, size, out, err);
  if (!code) rm_comm_set_timeout(*out, rm_comm_timeout(host));
  if (code) {
    leave(s);
    destroy(s);
  }
  return code;
}
