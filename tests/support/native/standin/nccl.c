// nccl.c: a stand-in for libnccl.so.2, for streams of standin/stream.h. It implements the functions
// that csrc/gpu/nccl/nccl.c loads, as NCCL documents them for nonblocking communicators, with
// ranks that are threads or processes. A thread enqueues each group some time after ncclGroupEnd. A
// group runs when the queue reaches it and waits there for its peers, as a kernel would, until it
// finishes or the communicator is aborted. A size or kind that a peer does not expect is a hang, as
// in NCCL.
//
// Violations of NCCL's rules end the program: a communicator that is used while it is busy, after
// its end, or by two threads at once, or destroyed before it was finalized.
//
// The environment injects faults and is read when a communicator is made. Calls are groups of the
// communicator, counted from 1:
//   STANDIN_VERSION=22907                     the version of ncclGetVersion
//   STANDIN_ID=result                         ncclGetUniqueId fails
//   STANDIN_INIT=rank:result                  that rank's communicator is not made; result 7: it
//                                             never is
//   STANDIN_GROUP=rank:call:result            that group fails after ncclGroupEnd, and is never
//                                             enqueued; result 7: it stays busy
//   STANDIN_ASYNC=rank:call:result            an error while that group runs, which hangs
//   STANDIN_HANG=rank:call                    that group hangs without an error
//   STANDIN_SKIP=rank:call                    that group is skipped
//   STANDIN_FLIP=rank:call                    flips a bit of what that group sends
//   STANDIN_FINALIZE=rank                     the communicator never finishes
//   STANDIN_ABORT=seconds                     an abort returns only after this time, as for a
//                                             communicator that a recording uses
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "standin/stream.h"

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS, CUDA, SYSTEM, INTERNAL, ARGUMENT, USAGE, REMOTE, IN_PROGRESS };
enum { RANKS = 16, ROOM = 1024, OPS = 4 * RANKS };
enum { KIND_SEND = 1, KIND_GATHER = 2 };
static const unsigned MAGIC = 0xcafebeef;
static const double FAILS_AFTER = 0.1; // seconds that a kernel runs before its error shows

// --------------------------------------------------------------------------- what the ranks share
// Bytes from one rank to another: a frame of a word, kind and size, then the bytes. A ring; the
// counters never wrap.
typedef struct channel {
  _Atomic uint64_t written, read;
  char ring[ROOM];
} channel;

typedef struct meeting { // a file in /dev/shm, of one communicator
  atomic_int joined, finalized;
  channel channels[RANKS][RANKS]; // from, to
} meeting;

typedef struct unique_id {
  char internal[128];
} unique_id;

// ---------------------------------------------------------------------------------- communicators
typedef struct fault {
  int is_set, rank, result;
  long call;
} fault;

typedef struct comm {
  unsigned alive; // MAGIC until its end
  int rank, size, is_final; // is_final: ncclCommFinalize was called
  meeting *shared;
  char name[64];
  atomic_int state, dead, users;
  long calls;
  pthread_t thread; // of what is under way
  int has_thread;
  atomic_int running; // kernels that have begun and have not finished
  atomic_int inside; // of those, the ones that access shared data at this moment
  struct comm *before; // all communicators ever made: a use after the end is detected
  fault init, group, async, hang, skip, flip, finalize;
} comm;

typedef struct op {
  int sends, kind, peer;
  char *at; // of the host
  size_t bytes, done; // done counts the frame's word too
  uint64_t frame;
} op;

typedef struct kernel {
  comm *comm;
  int n, hangs, fails, flips, has_begun;
  double since;
  op ops[OPS];
} kernel;

typedef struct group { // of a thread, between start and end
  int depth, result;
  comm *comm;
  standin_stream *stream;
  kernel kernel;
} group;

static _Thread_local group now;
static _Thread_local char last[256] = "";
static atomic_ulong names;
static atomic_long n_aborts;
static _Atomic(comm *) made;

static void wrong(const char *what) {
  fprintf(stderr, "stand-in for NCCL: %s\n", what);
  fflush(stderr);
  abort();
}

static double clock_now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

static void nap(void) { nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL); }

static fault planted(const char *name) {
  fault f = {0};
  const char *text = getenv(name);
  int a = 0, c = 0;
  long b = 0;
  if (!text || !*text) return f;
  const int n = sscanf(text, "%d:%ld:%d", &a, &b, &c);
  f = (fault){.is_set = n > 0, .rank = a, .call = b, .result = n == 3 ? c : (int)b};
  return f;
}

static int hits(const comm *c, const fault *f) {
  return f->is_set && f->rank == c->rank && f->call == c->calls;
}

// Every function of a communicator but abort and get_async_error is one at a time, and not while it
// is busy.
static void enter(comm *c, int may_be_busy) {
  if (!c || c->alive != MAGIC) wrong("a communicator that was given back is used");
  if (atomic_fetch_add(&c->users, 1)) wrong("two threads use a communicator");
  if (!may_be_busy && atomic_load(&c->state) == IN_PROGRESS)
    wrong("a communicator is used while it is busy");
}

static void leave(comm *c) { atomic_fetch_sub(&c->users, 1); }

static void join(comm *c) {
  if (c->has_thread) pthread_join(c->thread, NULL);
  c->has_thread = 0;
}

// An error stays: later operations do not begin.
static int begin(comm *c, void *(*body)(void *), void *data) {
  int state = SUCCESS;
  join(c);
  if (!atomic_compare_exchange_strong(&c->state, &state, IN_PROGRESS)) return state;
  if (pthread_create(&c->thread, NULL, body, data)) wrong("no thread");
  c->has_thread = 1;
  return IN_PROGRESS;
}

// ---------------------------------------------------------------------------------------- kernels
static int pour(comm *c, op *o) {
  channel *ch =
      o->sends ? &c->shared->channels[c->rank][o->peer] : &c->shared->channels[o->peer][c->rank];
  const size_t all = sizeof o->frame + o->bytes;
  uint64_t written = atomic_load(&ch->written), read = atomic_load(&ch->read);
  int moved = 0;
  while (o->done < all && (o->sends ? written - read < ROOM : read < written)) {
    char *in_ring = &ch->ring[(o->sends ? written : read) % ROOM];
    char *mine = o->done < sizeof o->frame ? (char *)&o->frame + o->done
                                           : o->at + (o->done - sizeof o->frame);
    if (o->sends) *in_ring = *mine, written++;
    else *mine = *in_ring, read++;
    o->done++;
    moved = 1;
    if (!o->sends && o->done == sizeof o->frame && o->frame != ((uint64_t)o->kind << 56 | o->bytes))
      o->done = SIZE_MAX; // for ever
    if (o->done == SIZE_MAX) break;
  }
  if (o->sends) atomic_store(&ch->written, written);
  else atomic_store(&ch->read, read);
  return moved;
}

static void begin_kernel(kernel *k) {
  k->has_begun = 1;
  k->since = clock_now();
  atomic_fetch_add(&k->comm->running, 1);
  for (int i = 0; i < k->n && k->flips && !atomic_load(&k->comm->dead); i++) {
    int is_flipped = !k->ops[i].sends || !k->ops[i].bytes;
    for (int j = 0; j < i; j++)
      is_flipped |= k->ops[j].sends && k->ops[j].at == k->ops[i].at; // one block for several ranks
    if (!is_flipped) k->ops[i].at[0] ^= 1;
  }
}

// Advances as far as possible now. Returns whether something is left.
static int run_on(kernel *k) {
  comm *c = k->comm;
  if (k->fails && clock_now() - k->since > FAILS_AFTER)
    atomic_store(&c->state, k->fails); // the caller has continued
  if (k->hangs) return 1;
  int left = 1;
  for (int moved = 1; moved && left;) {
    moved = left = 0;
    for (int i = 0; i < k->n && !atomic_load(&c->dead); i++) {
      moved |= pour(c, &k->ops[i]);
      left |= k->ops[i].done != sizeof k->ops[i].frame + k->ops[i].bytes;
    }
  }
  return left;
}

static int run_kernel(void *data) {
  kernel *k = data;
  comm *c = k->comm;
  int left = 0;
  atomic_fetch_add(&c->inside, 1);
  if (!k->has_begun) begin_kernel(k);
  if (!atomic_load(&c->dead)) left = run_on(k);
  left &= !atomic_load(&c->dead);
  if (!left) atomic_fetch_sub(&c->running, 1);
  atomic_fetch_sub(&c->inside, 1);
  return !left;
}

typedef struct launch {
  comm *comm;
  standin_stream *stream;
  int result, is_empty;
  kernel kernel;
} launch;

static void *launch_group(void *data) {
  launch *l = data;
  comm *c = l->comm;
  usleep((useconds_t)((uintptr_t)l >> 6) % 200);
  while (l->result == IN_PROGRESS && !atomic_load(&c->dead)) nap();
  if (l->result == SUCCESS && !l->is_empty && !atomic_load(&c->dead))
    l->stream->enqueue(l->stream, run_kernel, &l->kernel, sizeof l->kernel);
  int busy = IN_PROGRESS; // the kernel may have failed already
  atomic_compare_exchange_strong(&c->state, &busy, l->result);
  free(l);
  return NULL;
}

// ------------------------------------------------------------------------------ making and ending
EXPORT int ncclGetVersion(int *version) {
  const char *text = getenv("STANDIN_VERSION");
  *version = text && *text ? atoi(text) : 23203;
  return SUCCESS;
}

EXPORT const char *ncclGetErrorString(int result) {
  static const char *const text[] = {"no error",
                                     "unhandled cuda error",
                                     "unhandled system error",
                                     "internal error",
                                     "invalid argument",
                                     "invalid usage",
                                     "remote process exited",
                                     "NCCL operation in progress"};
  return result >= 0 && result <= IN_PROGRESS ? text[result]
         : result == 8                        ? "operation timed out"
                                              : "unknown result code";
}

EXPORT const char *ncclGetLastError(comm *c) { return (void)c, last; }

EXPORT int ncclGetUniqueId(unique_id *id) {
  const fault f = planted("STANDIN_ID");
  memset(id, 0, sizeof *id);
  if (f.is_set) {
    snprintf(last, sizeof last, "planted: no id\nsecond line");
    return f.rank;
  }
  snprintf(id->internal, sizeof id->internal, "/standin-nccl-%ld-%lu", (long)getpid(),
           atomic_fetch_add(&names, 1));
  return SUCCESS;
}

static void *init_comm(void *data) {
  comm *c = data;
  if (c->init.is_set && c->init.rank == c->rank) {
    while (c->init.result == IN_PROGRESS && !atomic_load(&c->dead)) nap();
    atomic_store(&c->state, c->init.result);
    return NULL;
  }
  atomic_fetch_add(&c->shared->joined, 1);
  while (atomic_load(&c->shared->joined) < c->size && !atomic_load(&c->dead)) nap();
  shm_unlink(c->name); // every rank has mapped it, or the communicator is dead
  atomic_store(&c->state, SUCCESS);
  return NULL;
}

typedef struct config { // what a caller of 2.17 gives, at least
  size_t size;
  unsigned magic, version;
  int blocking, cga, min_ctas, max_ctas;
  const char *net;
  int split, traffic;
} config;

EXPORT int ncclCommInitRankConfig(comm **out, int size, unique_id id, int rank, config *cfg) {
  *out = NULL;
  if (!cfg || cfg->size < 44 || cfg->magic != MAGIC || cfg->version < 21700 ||
      cfg->version >= 22500 || cfg->blocking != 0 || cfg->cga != INT32_MIN ||
      cfg->min_ctas != INT32_MIN || cfg->max_ctas != INT32_MIN || cfg->net ||
      cfg->split != INT32_MIN) {
    snprintf(last, sizeof last, "a configuration that the stand-in does not know");
    return ARGUMENT;
  }
  if (size < 1 || size > RANKS || rank < 0 || rank >= size) return ARGUMENT;
  comm *c = calloc(1, sizeof *c);
  const int file = shm_open(id.internal, O_RDWR | O_CREAT, 0600);
  if (!c || file < 0 || ftruncate(file, sizeof *c->shared)) wrong("no shared memory");
  c->shared = mmap(NULL, sizeof *c->shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (c->shared == MAP_FAILED) wrong("no shared memory");
  c->alive = MAGIC;
  c->rank = rank;
  c->size = size;
  snprintf(c->name, sizeof c->name, "%.60s", id.internal);
  c->init = planted("STANDIN_INIT");
  c->group = planted("STANDIN_GROUP");
  c->async = planted("STANDIN_ASYNC");
  c->hang = planted("STANDIN_HANG");
  c->skip = planted("STANDIN_SKIP");
  c->flip = planted("STANDIN_FLIP");
  c->finalize = planted("STANDIN_FINALIZE");
  c->before = atomic_load(&made);
  while (!atomic_compare_exchange_weak(&made, &c->before, c)) {}
  *out = c;
  return begin(c, init_comm, c);
}

EXPORT int ncclCommGetAsyncError(comm *c, int *result) {
  enter(c, 1);
  *result = atomic_load(&c->state);
  leave(c);
  return SUCCESS;
}

// The struct stays, because kernels may still be in the queue.
static void bury(comm *c) {
  join(c);
  atomic_store(&c->dead, 1);
  while (atomic_load(&c->inside)) nap();
  c->alive = 0;
  munmap(c->shared, sizeof *c->shared);
}

EXPORT long standin_aborts(void) { return atomic_load(&n_aborts); }

EXPORT int ncclCommAbort(comm *c) {
  enter(c, 1);
  atomic_fetch_add(&n_aborts, 1);
  atomic_store(&c->dead, 1);
  shm_unlink(c->name);
  const char *text = getenv("STANDIN_ABORT");
  for (const double until = clock_now() + (text ? atof(text) : 0); clock_now() < until;) nap();
  bury(c);
  return SUCCESS;
}

static void *finalize_comm(void *data) {
  comm *c = data;
  const int sticks = c->finalize.is_set && c->finalize.rank == c->rank;
  atomic_fetch_add(&c->shared->finalized, 1);
  while ((sticks || atomic_load(&c->shared->finalized) < c->size || atomic_load(&c->running)) &&
         !atomic_load(&c->dead))
    nap();
  // The ranks do not finish at the same time: the last one finishes only when it has checked
  // several times whether the others are still there.
  for (const double until = clock_now() + 1e-2; c->rank == c->size - 1 && clock_now() < until;)
    nap();
  atomic_store(&c->state, SUCCESS);
  return NULL;
}

EXPORT int ncclCommFinalize(comm *c) {
  enter(c, 0);
  const int result = begin(c, finalize_comm, c);
  c->is_final = result == IN_PROGRESS;
  leave(c);
  return result;
}

EXPORT int ncclCommDestroy(comm *c) {
  enter(c, 0);
  if (!c->is_final) wrong("a communicator is destroyed that would wait for its peers there");
  bury(c);
  return SUCCESS;
}

// ----------------------------------------------------------------------------------------- groups
EXPORT int ncclGroupStart(void) {
  if (now.depth++ == 0) {
    now.result = SUCCESS;
    now.comm = NULL;
    now.kernel.n = 0;
  }
  return SUCCESS;
}

static int add(comm *c, standin_stream *stream, int sends, int kind, int peer, const void *at,
               size_t bytes) {
  kernel *k = &now.kernel;
  if (!now.depth) wrong("a call outside of a group, of a communicator that does not block");
  if (!now.comm) enter(c, 0); // until the group's end
  if (now.comm && now.comm != c) wrong("two communicators in a group");
  now.comm = c;
  now.stream = stream;
  if (peer < 0 || peer >= c->size || k->n == OPS) return now.result = ARGUMENT;
  k->ops[k->n++] = (op){.sends = sends,
                        .kind = kind,
                        .peer = peer,
                        .at = stream->host(stream, at),
                        .bytes = bytes,
                        .frame = sends ? (uint64_t)kind << 56 | bytes : 0};
  return SUCCESS;
}

EXPORT int ncclSend(const void *from, size_t count, int type, int peer, comm *c,
                    standin_stream *stream) {
  return type ? ARGUMENT : add(c, stream, 1, KIND_SEND, peer, from, count);
}

EXPORT int ncclRecv(void *to, size_t count, int type, int peer, comm *c, standin_stream *stream) {
  return type ? ARGUMENT : add(c, stream, 0, KIND_SEND, peer, to, count);
}

EXPORT int ncclAllGather(const void *from, void *to, size_t count, int type, comm *c,
                         standin_stream *stream) {
  int result = type ? ARGUMENT : SUCCESS;
  for (int r = 0; r < c->size && !result; r++) { // also to itself through the ring
    result = add(c, stream, 1, KIND_GATHER, r, from, count);
    if (!result) result = add(c, stream, 0, KIND_GATHER, r, (char *)to + (size_t)r * count, count);
  }
  return result;
}

EXPORT int ncclGroupEnd(void) {
  if (!now.depth || --now.depth) return now.depth ? SUCCESS : USAGE;
  comm *c = now.comm;
  if (!c) return now.result;
  if (now.result) return leave(c), now.result;
  launch *l = malloc(sizeof *l);
  if (!l) wrong("no memory");
  c->calls++;
  *l = (launch){.comm = c,
                .stream = now.stream,
                .result = hits(c, &c->group) ? c->group.result : SUCCESS,
                .is_empty = hits(c, &c->skip)};
  l->kernel = now.kernel;
  l->kernel.comm = c;
  l->kernel.fails = hits(c, &c->async) ? c->async.result : 0;
  l->kernel.hangs = hits(c, &c->hang) || l->kernel.fails;
  l->kernel.flips = hits(c, &c->flip);
  const int result = begin(c, launch_group, l);
  if (result != IN_PROGRESS) free(l);
  leave(c);
  return result;
}
