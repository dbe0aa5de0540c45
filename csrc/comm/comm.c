// comm.c: see comm.h. The part that all transports share: numbers and counts calls, copies the
// block that a rank sends to itself, and keeps the first error, which every later call on a dead
// group returns.
//
// For transports without headers it keeps a digest of all calls for each rank and direction, so
// that a comparison can name the ranks that differ.
//
// A wrong argument on one rank ends the group too, since the other ranks wait in a call that this
// rank will not join.
#include "comm/comm.h"

#include <stdatomic.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include "base/hash.h"
#include "base/memory.h"
#include "clock.h"
#include "comm/block.h"
#include "device/devices.h"

// MAX_SECONDS: three years, so that a deadline fits in any timespec.
static const double DEFAULT_SECONDS = 60, MAX_SECONDS = 1e8;
// rm_comm_wait polls without sleeping for AWAKE_SECONDS, then with naps; it checks the groups every
// LOOK_SECONDS.
static const double AWAKE_SECONDS = 200e-6, LOOK_SECONDS = 1e-3;
enum { NAP_NANOSECONDS = 20000 };

typedef struct account { // a rank's calls so far, sent to another rank to compare them
  uint64_t calls, digest; // of all calls; the digest also of the bytes sent to that other rank
  int64_t epoch;
} account;

struct rm_comm {
  rm_transport transport;
  pid_t owner; // the process that created it; a forked child may only destroy its copy
  int rank, size;
  uint64_t sequence; // calls so far
  int64_t epoch;
  double timeout;
  rm_comm_stats stats;
  _Atomic int aborted; // code of rm_comm_abort, which any thread may call; 0: not aborted
  rm_error error; // owned: the group's; its code is RM_OK while the group lives
  rm_block *send, *recv; // [size] each, carved: scratch of all_gather, barrier, …
  // [size] each, carved: digests of all calls with the bytes sent to, or received from, each rank.
  uint64_t *given, *taken;
  account *accounts; // [2][size], carved: sent and received
};

static const char *const op_names[RM_N_COMM_OP] = {
    [RM_COMM_BARRIER] = "barrier",
    [RM_COMM_GATHER] = "all_gather",
    [RM_COMM_ALL_TO_ALL] = "all_to_all",
    [RM_COMM_DISPATCH] = "dispatch",
    [RM_COMM_COMBINE] = "combine",
    [RM_COMM_STEP] = "step",
    [RM_COMM_VOTE] = "vote",
};

const char *rm_comm_op_name(rm_comm_op op) {
  return (unsigned)op < RM_N_COMM_OP ? op_names[op] : "an unknown operation";
}

static double clamp_timeout(double seconds) {
  return !(seconds > 0) ? 0 : seconds < MAX_SECONDS ? seconds : MAX_SECONDS;
}

static int is_here(const rm_comm *comm) { return getpid() == comm->owner; }

// Fails in a forked child, and if the group is dead.
static rm_code check_usable(const rm_comm *comm, rm_error *err) {
  RM_FAIL_IF(!is_here(comm), RM_E_STATE,
             "this endpoint belongs to process %d, and this is process %d; create a new one "
             "in a forked child",
             (int)comm->owner, (int)getpid());
  return comm->error.code ? rm_fail(err, comm->error.code, "%s", rm_error_message(&comm->error))
                          : RM_OK;
}

// --------------------------------------------------------------------------------------- creation
rm_code rm_comm_create(const rm_transport *transport, int rank, int size, rm_comm **out,
                       rm_error *err) {
  *out = NULL;
  RM_TRY(rm_check_range(err, RM_E_CONFIG, "rank", rank, 0, size - 1));
  rm_comm *comm = rm_alloc(
      1, sizeof *comm + 2 * (size_t)size *
                            (sizeof *comm->send + sizeof *comm->given + sizeof *comm->accounts));
  if (!comm) return rm_no_memory(err, "a group of ranks", 0);
  comm->transport = *transport;
  comm->owner = getpid();
  comm->rank = rank;
  comm->size = size;
  comm->timeout = DEFAULT_SECONDS;
  comm->send = (rm_block *)(comm + 1);
  comm->recv = comm->send + size;
  comm->given = (uint64_t *)(comm->recv + size);
  comm->taken = comm->given + size;
  comm->accounts = (account *)(comm->taken + size);
  *out = comm;
  return RM_OK;
}

void rm_comm_destroy(rm_comm *comm) {
  if (!comm) return;
  if (comm->transport.leave && is_here(comm)) comm->transport.leave(comm->transport.self);
  if (comm->transport.destroy) comm->transport.destroy(comm->transport.self);
  rm_error_clear(&comm->error);
  rm_free(comm);
}

int rm_comm_rank(const rm_comm *comm) { return comm->rank; }
int rm_comm_size(const rm_comm *comm) { return comm->size; }
void rm_comm_set_epoch(rm_comm *comm, int64_t epoch) { comm->epoch = epoch; }
double rm_comm_timeout(const rm_comm *comm) { return comm->timeout; }
void rm_comm_set_timeout(rm_comm *comm, double seconds) { comm->timeout = clamp_timeout(seconds); }
void rm_comm_statistics(const rm_comm *comm, rm_comm_stats *out) { *out = comm->stats; }

rm_code rm_comm_check(rm_comm *comm, rm_error *err) {
  RM_TRY(check_usable(comm, err));
  return comm->transport.check ? comm->transport.check(comm->transport.self, err) : RM_OK;
}

void rm_comm_abort(rm_comm *comm, rm_code why) {
  if (!is_here(comm)) return;
  atomic_store(&comm->aborted, (int)(why ? why : RM_E_STATE));
  if (comm->transport.abort) comm->transport.abort(comm->transport.self, why);
}

// --------------------------------------------------------------------------------------- one call
static rm_code check_own(const rm_comm *comm, rm_comm_op op, const rm_block *send,
                         const rm_block *recv, rm_error *err) {
  RM_FAIL_IF(rm_block_bytes(send) != rm_block_bytes(recv), RM_E_LAYOUT,
             "%s: rank %d sends itself %zu bytes: expected a receive block of as many, got %zu",
             rm_comm_op_name(op), comm->rank, rm_block_bytes(send), rm_block_bytes(recv));
  return RM_OK;
}

static rm_code move(rm_comm *comm, rm_comm_op op, const rm_block send[], const rm_block recv[],
                    rm_error *err) {
  RM_TRY(comm->transport.exchange(comm->transport.self, op, comm->sequence, comm->epoch,
                                  comm->timeout, send, recv, err));
  if (!comm->transport.moves_own) rm_block_copy(&send[comm->rank], &recv[comm->rank]);
  for (int r = 0; r < comm->size; r++) {
    if (r == comm->rank) continue;
    comm->stats.bytes_sent += rm_block_bytes(&send[r]);
    comm->stats.bytes_received += rm_block_bytes(&recv[r]);
  }
  return RM_OK;
}

// Adds a successful (or enqueued) call to the digests.
static void add_to_digests(rm_comm *comm, rm_comm_op op, const rm_block send[],
                           const rm_block recv[]) {
  const uint64_t call =
      rm_hash_word(rm_hash_word(comm->sequence, (uint64_t)op), (uint64_t)comm->epoch);
  for (int r = 0; r < comm->size; r++) {
    const uint64_t given = r == comm->rank ? 0 : rm_block_bytes(&send[r]),
                   taken = r == comm->rank ? 0 : rm_block_bytes(&recv[r]);
    comm->given[r] = rm_hash_word(rm_hash_word(comm->given[r], call), given);
    comm->taken[r] = rm_hash_word(rm_hash_word(comm->taken[r], call), taken);
  }
}

// Keeps the error, which later calls return.
static rm_code keep(rm_comm *comm, rm_code code, const rm_error *err) {
  return rm_fail(&comm->error, code, "%s", rm_error_message(err));
}

// Ends the group after wrong arguments, since this rank does not make the call.
static rm_code refuse(rm_comm *comm, rm_code code, const rm_error *err) {
  rm_comm_abort(comm, code);
  return keep(comm, code, err);
}

rm_code rm_comm_exchange(rm_comm *comm, rm_comm_op op, const rm_block send[], const rm_block recv[],
                         rm_error *err) {
  const double start = rm_now();
  RM_TRY(check_usable(comm, err));
  comm->sequence++;
  rm_code code = check_own(comm, op, &send[comm->rank], &recv[comm->rank], err);
  if (code) return refuse(comm, code, err);
  code = move(comm, op, send, recv, err);
  if (code) return keep(comm, code, err);
  add_to_digests(comm, op, send, recv);
  comm->stats.calls++;
  comm->stats.seconds += rm_now() - start;
  return RM_OK;
}

// ------------------------------------------------------------------------------ other collectives
static rm_block flat(const void *base, size_t bytes) {
  return (rm_block){(void *)(uintptr_t)base, bytes > 0, bytes, bytes};
}

rm_block *rm_comm_blocks(rm_comm *comm) { return comm->send; }

rm_code rm_comm_gather(rm_comm *comm, rm_block mine, const rm_block recv[], rm_error *err) {
  for (int r = 0; r < comm->size; r++) comm->send[r] = mine;
  return rm_comm_exchange(comm, RM_COMM_GATHER, comm->send, recv, err);
}

rm_code rm_comm_gather_rows(rm_comm *comm, const void *mine, void *out, const int64_t counts[],
                            size_t bytes, rm_error *err) {
  char *at = out;
  for (int r = 0; r < comm->size; at += (size_t)counts[r++] * bytes)
    comm->recv[r] = (rm_block){at, counts[r], bytes, bytes};
  rm_block own = comm->recv[comm->rank];
  if (mine) own.base = (void *)(uintptr_t)mine;
  return rm_comm_gather(comm, own, comm->recv, err);
}

rm_code rm_comm_all_gather(rm_comm *comm, const void *send, void *out, size_t bytes,
                           rm_error *err) {
  for (int r = 0; r < comm->size; r++) comm->recv[r] = flat((char *)out + (size_t)r * bytes, bytes);
  return rm_comm_gather(comm, flat(send, bytes), comm->recv, err);
}

rm_code rm_comm_barrier(rm_comm *comm, rm_error *err) {
  memset(comm->send, 0, 2 * (size_t)comm->size * sizeof comm->send[0]);
  return rm_comm_exchange(comm, RM_COMM_BARRIER, comm->send, comm->recv, err);
}

// ---------------------------------------------------------------------------------- device groups
// Called when the device has completed its work: returns an error if a group has failed or was
// aborted, since that work may have ended early. A rank that left normally had done its part.
static rm_code check_completed(rm_comm *const comms[], int n, rm_error *err) {
  for (int i = 0; i < n; i++) {
    if (!comms[i] || !(comms[i]->error.code || atomic_load(&comms[i]->aborted))) continue;
    RM_TRY(rm_comm_check(comms[i], err));
    return rm_fail(err, RM_E_RANK_LOST, "rank %d has aborted: %s", comms[i]->rank,
                   rm_code_name((rm_code)atomic_load(&comms[i]->aborted)));
  }
  return RM_OK;
}

static int waits_in_queue(const rm_comm *comm) {
  return comm->transport.waits_in_queue || comm->error.code || atomic_load(&comm->aborted);
}

// Called while work is pending: returns a group's error, a timeout, or RM_OK.
static rm_code check_pending(rm_comm *const comms[], int n, const rm_device *device, double timeout,
                             double waited, rm_error *err) {
  for (int i = 0; i < n; i++) {
    if (comms[i] && waits_in_queue(comms[i])) RM_TRY(rm_comm_check(comms[i], err));
  }
  RM_FAIL_IF(waited >= timeout, RM_E_COLLECTIVE_TIMEOUT,
             "%s: its work was not done within %.3g s; a rank that it waits for did not arrive",
             device->name, timeout);
  return RM_OK;
}

static rm_code wait_for(rm_comm *const comms[], int n, const rm_device *device, int event,
                        double timeout, rm_error *err) {
  const double start = rm_now();
  for (double looked = start;;) {
    const rm_device_status status = event == RM_WAIT_QUEUE
                                        ? device->poll(device->self)
                                        : device->query_event(device->self, event);
    const double now = rm_now();
    if (status != RM_DEVICE_BUSY) return rm_device_check(device, status, err);
    if (now - looked >= LOOK_SECONDS || now - start >= timeout) {
      RM_TRY(check_pending(comms, n, device, timeout, now - start, err));
      looked = now;
    }
    if (now - start > AWAKE_SECONDS)
      nanosleep(&(struct timespec){.tv_nsec = NAP_NANOSECONDS}, NULL);
  }
}

rm_code rm_comm_wait(rm_comm *const comms[], int n, const rm_device *device, int event,
                     double timeout, rm_error *err) {
  int watched = 0;
  for (int i = 0; i < n; i++) watched |= comms[i] && waits_in_queue(comms[i]);
  // A queue without work that waits for another rank needs no checks meanwhile.
  rm_code code = watched ? wait_for(comms, n, device, event, clamp_timeout(timeout), err)
                 : event == RM_WAIT_QUEUE
                     ? rm_device_wait(device, err)
                     : rm_device_check(device, device->wait_event(device->self, event), err);
  if (!code) code = check_completed(comms, n, err);
  for (int i = 0; i < n && code; i++) {
    if (!comms[i] || !is_here(comms[i])) continue;
    rm_comm_abort(comms[i], code);
    if (!comms[i]->error.code) keep(comms[i], code, err);
  }
  return code;
}

int rm_comm_can_be_captured(const rm_comm *comm) { return comm->transport.waits_in_queue; }

static rm_code judge_account(const rm_comm *comm, int other, const account *theirs, rm_error *err) {
  const uint64_t n = comm->sequence;
  const int me = comm->rank;
  RM_FAIL_IF(theirs->calls != comm->sequence, RM_E_COLLECTIVE_MISMATCH,
             "rank %d has made %lu calls, rank %d %lu", other, theirs->calls, me, n);
  RM_FAIL_IF(theirs->epoch != comm->epoch, RM_E_COLLECTIVE_MISMATCH,
             "after call %lu: rank %d has weights of epoch %ld, rank %d of epoch %ld", n, other,
             theirs->epoch, me, comm->epoch);
  RM_FAIL_IF(theirs->digest != comm->taken[other], RM_E_COLLECTIVE_MISMATCH,
             "after call %lu: rank %d has made other calls than rank %d, or sends other "
             "sizes to it than it expects",
             n, other, me);
  return RM_OK;
}

static rm_code compare(rm_comm *comm, rm_comm *host, account *mine, account *theirs,
                       rm_error *err) {
  for (int r = 0; r < comm->size; r++) {
    mine[r] = (account){comm->sequence, comm->given[r], comm->epoch};
    comm->send[r] = (rm_block){&mine[r], r != comm->rank, sizeof *mine, sizeof *mine};
    comm->recv[r] = (rm_block){&theirs[r], r != comm->rank, sizeof *theirs, sizeof *theirs};
  }
  RM_TRY(rm_comm_exchange(host, RM_COMM_STEP, comm->send, comm->recv, err));
  for (int r = 0; r < comm->size; r++)
    if (r != comm->rank) RM_TRY(judge_account(comm, r, &theirs[r], err));
  return RM_OK;
}

rm_code rm_comm_compare(rm_comm *comm, rm_comm *host, rm_error *err) {
  RM_TRY(check_usable(comm, err));
  const rm_code code = compare(comm, host, comm->accounts, comm->accounts + comm->size, err);
  return code ? refuse(comm, code, err) : RM_OK;
}
