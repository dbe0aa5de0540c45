// fake_device.h: a device for tests of code that enqueues: one queue that a thread works off some
// time later, and a memory that is inaccessible to the host (an access ends with SIGSEGV).
//
//   fake_device *d = fake_device_open(64 << 20);
//   d->device.alloc(d, …); d->device.copy_2d(d, …); d->device.wait(d);
//   fake_device_close(d);                              // ends the program when a block was not
//                                                      given back
//
// Work is late by up to `late_us` microseconds, so that data read before the wait is old. Any
// thread may set `fault` to 1: from then on the device is dead, as device.h defines it.
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/tiny.h"
#include "device.h"
#include "standin/stream.h"

typedef struct fake_task fake_task;
struct fake_task {
  fake_task *next;
  int (*run)(void *data);
  size_t bytes;
  char data[];
};

typedef struct fake_list {
  fake_task *first, *last;
} fake_list;

typedef struct fake_device {
  standin_stream stream; // first: the device's stream is a pointer to it
  rm_device device; // self is this struct
  char *there, *memory; // what the device's addresses are; where the bytes are
  size_t room, used;
  int blocks, pins, frees; // now; so far
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  fake_list queue;
  fake_list *graph; // the active capture, or NULL
  long enqueued, done, events[RM_DEVICE_EVENTS];
  int late_us, closing;
  long waits; // calls of wait and reach: what may not be recorded
  atomic_int fault;
  int refuse_at; // the map or pin of this number from now on fails; 0: none
} fake_device;

static inline void fake_append(fake_list *list, int (*run)(void *), const void *data,
                               size_t bytes) {
  fake_task *task = malloc(sizeof *task + bytes);
  if (!task) tiny_die("no memory for a task");
  *task = (fake_task){.run = run, .bytes = bytes};
  memcpy(task->data, data, bytes);
  if (list->last) list->last->next = task;
  else list->first = task;
  list->last = task;
}

static inline void fake_enqueue(standin_stream *stream, int (*run)(void *), const void *data,
                                size_t bytes) {
  fake_device *d = (fake_device *)stream;
  pthread_mutex_lock(&d->lock);
  if (d->graph) fake_append(d->graph, run, data, bytes);
  else {
    fake_append(&d->queue, run, data, bytes);
    d->enqueued++;
  }
  pthread_cond_broadcast(&d->changed);
  pthread_mutex_unlock(&d->lock);
}

static inline char *fake_host(standin_stream *stream, const void *there) {
  fake_device *d = (fake_device *)stream;
  const size_t at = (size_t)((const char *)there - d->there);
  if (at >= d->room) tiny_die("%p is no address of the device", there);
  return d->memory + at;
}

static inline void *fake_work(void *self) {
  fake_device *d = self;
  uint64_t random = 1;
  pthread_mutex_lock(&d->lock);
  for (;;) {
    while (!d->queue.first && !d->closing) pthread_cond_wait(&d->changed, &d->lock);
    fake_task *task = d->queue.first;
    if (!task) break;
    d->queue.first = task->next;
    if (!task->next) d->queue.last = NULL;
    pthread_mutex_unlock(&d->lock);
    random = tiny_mix(random + 1);
    if (d->late_us && random % 8 == 0) usleep((useconds_t)(random >> 8) % (useconds_t)d->late_us);
    while (!atomic_load(&d->fault) && !task->run(task->data)) usleep(20);
    free(task);
    pthread_mutex_lock(&d->lock);
    d->done++;
    pthread_cond_broadcast(&d->changed);
  }
  pthread_mutex_unlock(&d->lock);
  return NULL;
}

// ----------------------------------------------------------------------------------------- memory
static inline rm_device_status fake_alloc(void *self, size_t bytes, void **out) {
  fake_device *d = self;
  const size_t rounded = (bytes + 255) / 256 * 256;
  *out = NULL;
  if (atomic_load(&d->fault)) return RM_DEVICE_FAULT;
  if (rounded > d->room - d->used || (d->refuse_at && --d->refuse_at == 0))
    return RM_DEVICE_NO_MEMORY;
  memset(d->memory + d->used, 0, bytes);
  *out = d->there + d->used;
  d->used += rounded;
  d->blocks++;
  return RM_DEVICE_OK;
}

// Waits until so many are done; −1: all.
static inline rm_device_status fake_wait_until(fake_device *d, long until) {
  pthread_mutex_lock(&d->lock);
  d->waits++;
  if (until < 0) until = d->enqueued;
  while (d->done < until) pthread_cond_wait(&d->changed, &d->lock);
  pthread_mutex_unlock(&d->lock);
  return atomic_load(&d->fault) ? RM_DEVICE_FAULT : RM_DEVICE_OK;
}

static inline rm_device_status fake_wait(void *self) { return fake_wait_until(self, -1); }

// The memory is freed with the last block.
static inline void fake_free(void *self, void *block, size_t bytes) {
  fake_device *d = self;
  (void)block, (void)bytes;
  fake_wait(self);
  d->frees++;
  if (--d->blocks == 0) d->used = 0;
}

static inline rm_device_status fake_alloc_pinned(void *self, size_t bytes, void **out) {
  fake_device *d = self;
  *out = NULL;
  if ((d->refuse_at && --d->refuse_at == 0) || !(*out = calloc(1, bytes)))
    return RM_DEVICE_NO_MEMORY;
  d->pins++;
  return RM_DEVICE_OK;
}

static inline void fake_free_pinned(void *self, void *block, size_t bytes) {
  (void)bytes;
  fake_wait(self);
  ((fake_device *)self)->pins--;
  ((fake_device *)self)->frees++;
  free(block);
}

static inline size_t fake_available(void *self) {
  return ((fake_device *)self)->room - ((fake_device *)self)->used;
}

// -------------------------------------------------------------------------------------- the queue
typedef struct fake_move {
  char *to;
  const char *from; // NULL: zeroes
  size_t to_pitch, from_pitch, width, rows;
} fake_move;

static inline int fake_move_run(void *data) {
  const fake_move *m = data;
  for (size_t r = 0; r < m->rows; r++) {
    if (m->from) memcpy(m->to + r * m->to_pitch, m->from + r * m->from_pitch, m->width);
    else memset(m->to + r * m->to_pitch, 0, m->width);
  }
  return 1;
}

static inline void fake_copy_to_device(void *self, void *to, const void *from, size_t bytes) {
  fake_device *d = self;
  const fake_move move = {fake_host(&d->stream, to), from, bytes, bytes, bytes, 1};
  fake_enqueue(&d->stream, fake_move_run, &move, sizeof move);
}

static inline void fake_copy_to_host(void *self, void *to, const void *from, size_t bytes) {
  fake_device *d = self;
  const fake_move move = {to, fake_host(&d->stream, from), bytes, bytes, bytes, 1};
  fake_enqueue(&d->stream, fake_move_run, &move, sizeof move);
}

static inline void fake_copy_2d(void *self, void *to, size_t to_pitch, const void *from,
                                size_t from_pitch, size_t width, size_t rows) {
  fake_device *d = self;
  if (rows > 1 && (to_pitch < width || from_pitch < width))
    tiny_die("rows of %zu bytes, %zu and %zu apart", width, to_pitch, from_pitch);
  const fake_move move = {
      fake_host(&d->stream, to), fake_host(&d->stream, from), to_pitch, from_pitch, width, rows};
  fake_enqueue(&d->stream, fake_move_run, &move, sizeof move);
}

static inline void fake_zero_2d(void *self, void *at, size_t pitch, size_t width, size_t rows) {
  fake_device *d = self;
  const fake_move move = {fake_host(&d->stream, at), NULL, pitch, 0, width, rows};
  fake_enqueue(&d->stream, fake_move_run, &move, sizeof move);
}

static inline void fake_record_event(void *self, int number) {
  fake_device *d = self;
  pthread_mutex_lock(&d->lock);
  d->events[number] = d->enqueued;
  pthread_mutex_unlock(&d->lock);
}

static inline rm_device_status fake_wait_event(void *self, int number) {
  return fake_wait_until(self, ((fake_device *)self)->events[number]);
}

// Returns whether so many are done; −1: all.
static inline rm_device_status fake_poll_until(fake_device *d, long until) {
  pthread_mutex_lock(&d->lock);
  const int busy = d->done < (until < 0 ? d->enqueued : until);
  pthread_mutex_unlock(&d->lock);
  return atomic_load(&d->fault) ? RM_DEVICE_FAULT : busy ? RM_DEVICE_BUSY : RM_DEVICE_OK;
}

static inline rm_device_status fake_poll(void *self) { return fake_poll_until(self, -1); }

static inline rm_device_status fake_query_event(void *self, int number) {
  return fake_poll_until(self, ((fake_device *)self)->events[number]);
}

// ---------------------------------------------------------------------------------- graph capture
static inline rm_device_status fake_begin_capture(void *self) {
  fake_device *d = self;
  if (!(d->graph = calloc(1, sizeof *d->graph))) return RM_DEVICE_NO_MEMORY;
  d->waits = 0;
  return RM_DEVICE_OK;
}

static inline rm_device_status fake_end_capture(void *self, void **graph) {
  fake_device *d = self;
  if (d->waits) tiny_die("%ld waits while it is recorded", d->waits);
  *graph = d->graph;
  d->graph = NULL;
  return RM_DEVICE_OK;
}

static inline void fake_replay(void *self, void *graph) {
  fake_device *d = self;
  for (const fake_task *t = ((fake_list *)graph)->first; t; t = t->next)
    fake_enqueue(&d->stream, t->run, t->data, t->bytes);
}

static inline void fake_destroy_graph(void *self, void *graph) {
  (void)self;
  for (fake_task *t = graph ? ((fake_list *)graph)->first : NULL, *next; t; t = next) {
    next = t->next;
    free(t);
  }
  free(graph);
}

static inline int fake_enter(void *self) { return (void)self, 0; }
static inline void fake_leave(void *self, int saved) { (void)self, (void)saved; }
static inline const char *fake_message(void *self) { return (void)self, "an injected fault"; }

static inline void fake_device_close(fake_device *d) {
  if (d->blocks || d->pins)
    tiny_die("%d blocks and %d pinned ones were not given back", d->blocks, d->pins);
  pthread_mutex_lock(&d->lock);
  d->closing = 1;
  pthread_cond_broadcast(&d->changed);
  pthread_mutex_unlock(&d->lock);
  pthread_join(d->thread, NULL);
  munmap(d->there, d->room);
  munmap(d->memory, d->room);
  free(d);
}

static inline fake_device *fake_device_open(size_t room) {
  fake_device *d = calloc(1, sizeof *d);
  if (!d) tiny_die("no memory");
  d->there = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  d->memory =
      mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (d->there == MAP_FAILED || d->memory == MAP_FAILED)
    tiny_die("no memory for a device of %zu bytes", room);
  d->room = room;
  d->late_us = 300;
  d->stream = (standin_stream){fake_enqueue, fake_host};
  d->device = (rm_device){.self = d,
                          .name = "fake:0",
                          .stream = d,
                          .alloc = fake_alloc,
                          .free = fake_free,
                          .alloc_pinned = fake_alloc_pinned,
                          .free_pinned = fake_free_pinned,
                          .available = fake_available,
                          .copy_to_device = fake_copy_to_device,
                          .copy_to_host = fake_copy_to_host,
                          .copy_2d = fake_copy_2d,
                          .zero_2d = fake_zero_2d,
                          .record_event = fake_record_event,
                          .wait_event = fake_wait_event,
                          .wait = fake_wait,
                          .poll = fake_poll,
                          .query_event = fake_query_event,
                          .begin_capture = fake_begin_capture,
                          .end_capture = fake_end_capture,
                          .replay = fake_replay,
                          .destroy_graph = fake_destroy_graph,
                          .enter = fake_enter,
                          .leave = fake_leave,
                          .message = fake_message};
  pthread_mutex_init(&d->lock, NULL);
  pthread_cond_init(&d->changed, NULL);
  if (pthread_create(&d->thread, NULL, fake_work, d)) tiny_die("no thread for a device");
  return d;
}
