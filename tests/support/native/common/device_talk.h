// device_talk.h: talk.h for groups of device memory, compared with another group. The talk's memory
// is the host's; each of its exchanges is made twice: between copies of that memory on the device,
// by the tested group, and between the memory itself, by a group of threads. After each exchange
// all of the memory, gaps and guards too, must be equal.
//
//   device_talk d;
//   device_talk_begin(&d, tried, plain, device, seed, 3000);
//   code = talk_call(&d.talk, n, &err);
//   device_talk_end(&d);
#pragma once

#include "comm/block.h"
#include "common/fake_device.h"
#include "common/talk.h"

typedef struct device_talk {
  talk talk;
  rm_comm *tried, *plain; // views
  fake_device *device; // view
  size_t bytes; // of each of the talk's two blocks of memory
  char *there[2], *shadow[2]; // [bytes] each: the device's, and what comes back of it
  double patience; // seconds of a wait
  int is_hasty; // plant: reads received bytes before the wait for them
  uint64_t n; // calls so far
} device_talk;

static inline char *device_talk_side(device_talk *d, int i) {
  return i ? d->talk.received : d->talk.sent;
}

static inline rm_block device_talk_there(device_talk *d, const rm_block *block) {
  rm_block out = *block;
  for (int i = 0; i < 2 && block->base; i++) {
    const size_t at = (size_t)((char *)block->base - device_talk_side(d, i));
    if (at < d->bytes) out.base = d->there[i] + at;
  }
  if (block->base && out.base == block->base) tiny_die("a block outside of the talk's memory");
  return out;
}

static inline rm_code device_talk_move(void *self, rm_comm_op op, uint64_t sequence, int64_t epoch,
                                       double timeout, const rm_block send[], const rm_block recv[],
                                       rm_error *err) {
  device_talk *d = self;
  const rm_device *device = &d->device->device;
  rm_block out[TALK_RANKS], in[TALK_RANKS];
  (void)sequence;
  for (int i = 0; i < 2; i++)
    device->copy_to_device(device->self, d->there[i], device_talk_side(d, i), d->bytes);
  for (int r = 0; r < rm_comm_size(d->tried); r++) {
    out[r] = device_talk_there(d, &send[r]);
    in[r] = device_talk_there(d, &recv[r]);
  }
  rm_comm_set_epoch(d->tried, epoch);
  rm_comm_set_timeout(d->tried, timeout);
  rm_code code = rm_comm_exchange(d->tried, op, out, in, err);
  for (int i = 0; i < 2 && !code; i++)
    device->copy_to_host(device->self, d->shadow[i], d->there[i], d->bytes);
  if (d->is_hasty && *(volatile char *)d->shadow[1] == 1) d->n += 0;
  if (!code) code = rm_comm_wait(&d->tried, 1, device, RM_WAIT_QUEUE, d->patience, err);
  if (!code && d->plain) code = rm_comm_exchange(d->plain, op, send, recv, err);
  for (int i = 0; i < 2 && !code && d->plain; i++)
    if (memcmp(d->shadow[i], device_talk_side(d, i), d->bytes))
      tiny_die("call %llu: other bytes than threads bring", (unsigned long long)d->n);
  d->n++;
  return code;
}

// The talk's comm is one whose exchange is the two.
static inline void device_talk_begin(device_talk *d, rm_comm *tried, rm_comm *plain,
                                     fake_device *device, uint64_t seed, size_t most) {
  rm_comm *both;
  rm_error err = RM_ERROR_INIT;
  *d = (device_talk){.tried = tried, .plain = plain, .device = device, .patience = 60};
  const rm_transport transport = {.moves_own = 1, .self = d, .exchange = device_talk_move};
  tiny_must(rm_comm_create(&transport, rm_comm_rank(tried), rm_comm_size(tried), &both, &err),
            &err);
  d->talk = talk_begin(both, seed, most);
  d->bytes = (size_t)rm_comm_size(tried) * d->talk.room;
  memset(d->talk.sent, TALK_GUARD, d->bytes);
  memset(d->talk.received, TALK_GUARD, d->bytes);
  for (int i = 0; i < 2; i++) {
    void *there;
    if (device->device.alloc(device, d->bytes, &there)) tiny_die("no memory of a device");
    d->there[i] = there;
    if (!(d->shadow[i] = malloc(d->bytes))) tiny_die("no memory");
  }
}

static inline void device_talk_end(device_talk *d) {
  for (int i = 0; i < 2; i++) {
    d->device->device.free(d->device, d->there[i], d->bytes);
    free(d->shadow[i]);
  }
  rm_comm_destroy(d->talk.comm);
  talk_end(&d->talk);
}
