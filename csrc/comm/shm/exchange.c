// exchange.c: one call. A rank's blocks for the others form one stream of bytes, which goes through
// its buffer in rounds; a gather's stream is its one block. The stream begins with the block for
// the next rank, so that in each round the ranks read from different buffers. The headers of the
// first round contain the lengths, and all ranks take part in as many rounds as the longest stream
// needs.
//
// The two buffers of a rank alternate. When all ranks have arrived at round t, all have read the
// data of round t − 1, so round t + 1 may overwrite it: one wait per round is enough.
#include <stddef.h>

#include "comm/block.h"
#include "comm/shm/layout.h"

typedef struct stream {
  size_t at[RM_REGION_RANKS]; // where the block for rank r of the group begins
  size_t bytes; // of the whole stream
} stream;

static size_t buffer_of(const rm_region_endpoint *end) { return end->region->buffer_bytes; }

// Returns the stream of rank `from`, from the sizes in its header.
static stream stream_of(const rm_region_endpoint *end, int from, rm_comm_op op,
                        const uint64_t bytes[]) {
  stream out = {0};
  for (int step = 1; step < end->size; step++) {
    const int to = (from + step) % end->size;
    if (op == RM_COMM_GATHER) {
      if (bytes[to] > out.bytes) out.bytes = bytes[to];
    } else {
      out.at[to] = out.bytes;
      out.bytes += bytes[to];
    }
  }
  return out;
}

// The range of a block that belongs to one round. The block begins at `at` in the stream, the round
// at `begin`.
typedef struct part {
  size_t first, length;
} part;

static part part_of(size_t at, size_t bytes, size_t begin, size_t room) {
  const size_t from = at > begin ? at : begin,
               to = at + bytes < begin + room ? at + bytes : begin + room;
  return from < to ? (part){from - at, to - from} : (part){0};
}

static void fill(rm_region_endpoint *end, rm_comm_op op, const stream *mine, uint64_t round,
                 const rm_block send[]) {
  const size_t room = buffer_of(end), begin = (size_t)round * room;
  char *buffer = end->buffers[end->me] + (end->round & 1) * room;
  if (begin >= mine->bytes) return;
  for (int step = 1; step < end->size; step++) {
    const int to = (end->me + step) % end->size;
    const part p = part_of(mine->at[to], rm_block_bytes(&send[to]), begin, room);
    rm_block_move(&send[to], p.first, buffer + (mine->at[to] + p.first - begin), p.length, 0);
    if (op == RM_COMM_GATHER && p.length) return; // once for all
  }
}

static void take(rm_region_endpoint *end, int from, size_t at, uint64_t round,
                 const rm_block *into) {
  const size_t room = buffer_of(end), begin = (size_t)round * room;
  const part p = part_of(at, rm_block_bytes(into), begin, room);
  char *buffer = end->buffers[from] + (end->round & 1) * room;
  rm_block_move(into, p.first, buffer + (at + p.first - begin), p.length, 1);
}

// Ends the group if rank `from` makes a different call than this rank.
static rm_code compare(rm_region_endpoint *end, int from, const rm_region_header *mine,
                       const rm_region_header *theirs, size_t expected, rm_error *err) {
  rm_region *region = end->region;
  const int me = end->members[end->me], other = end->members[from];
  const char *op = rm_comm_op_name((rm_comm_op)mine->op);
  const uint64_t n = mine->sequence;
  uint32_t cause;
  if (atomic_load(&end->slots[from]->members) != atomic_load(&end->slots[end->me]->members))
    cause = rm_region_set_error(region, me, RM_E_MESH_MISMATCH,
                                "group %d has other members for rank %d than for rank %d",
                                end->index, other, me);
  else if (theirs->op != mine->op || theirs->sequence != n || theirs->round != mine->round ||
           theirs->epoch != mine->epoch)
    cause = rm_region_set_error(
        region, me, RM_E_COLLECTIVE_MISMATCH,
        "rank %d is in %s, call %lu, round %lu, with weights of epoch %ld, rank %d in %s, call "
        "%lu, round %lu, with weights of epoch %ld",
        other, rm_comm_op_name((rm_comm_op)theirs->op), theirs->sequence, theirs->round,
        theirs->epoch, me, op, n, mine->round, mine->epoch);
  else if (theirs->bytes[end->me] != expected)
    cause =
        rm_region_set_error(region, me, RM_E_COLLECTIVE_MISMATCH,
                            "%s, call %lu: rank %d sends %lu bytes to rank %d, which expects %zu",
                            op, n, other, theirs->bytes[end->me], me, expected);
  else return RM_OK;
  rm_region_fail_group(end, cause);
  return rm_region_group_error(end, err);
}

// Writes this rank's part of a round and waits for the other ranks.
static rm_code meet(rm_region_endpoint *end, const rm_region_call *call,
                    const rm_region_header *mine, const stream *out, const rm_block send[],
                    rm_error *err) {
  end->round++;
  fill(end, call->op, out, mine->round, send);
  rm_copy(&end->slots[end->me]->headers[end->round & 1], mine,
          offsetof(rm_region_header, bytes) + (size_t)end->size * sizeof mine->bytes[0]);
  return rm_region_barrier(end, call, err);
}

// One round. `at`: where this rank's block begins in each stream, set in the first round.
static rm_code round_of(rm_region_endpoint *end, const rm_region_call *call, rm_region_header *mine,
                        const stream *out, size_t at[], const rm_block send[],
                        const rm_block recv[], rm_error *err) {
  RM_TRY(meet(end, call, mine, out, send, err));
  for (int step = 1; step < end->size; step++) {
    const int from = (end->me + step) % end->size;
    const rm_region_header *theirs = &end->slots[from]->headers[end->round & 1];
    RM_TRY(compare(end, from, mine, theirs, rm_block_bytes(&recv[from]), err));
    if (mine->round == 0) {
      at[from] = stream_of(end, from, call->op, theirs->bytes).at[end->me];
      if (theirs->n_rounds > mine->n_rounds) mine->n_rounds = theirs->n_rounds;
    }
    take(end, from, at[from], mine->round, &recv[from]);
  }
  return RM_OK;
}

rm_code rm_region_exchange(void *self, rm_comm_op op, uint64_t sequence, int64_t epoch,
                           double timeout, const rm_block send[], const rm_block recv[],
                           rm_error *err) {
  rm_region_endpoint *end = self;
  const rm_region_call call = {
      .op = op, .sequence = sequence, .seconds = timeout, .deadline = rm_now() + timeout};
  rm_region_header mine = {.sequence = sequence, .epoch = epoch, .op = (uint32_t)op};
  size_t at[RM_REGION_RANKS];
  if (atomic_load(&end->group->barrier) & RM_BARRIER_CAUSE) return rm_region_group_error(end, err);
  for (int r = 0; r < end->size; r++) mine.bytes[r] = r == end->me ? 0 : rm_block_bytes(&send[r]);
  const stream out = stream_of(end, end->me, op, mine.bytes);
  mine.n_rounds = out.bytes / buffer_of(end) + (out.bytes % buffer_of(end) != 0);
  do {
    RM_TRY(round_of(end, &call, &mine, &out, at, send, recv, err));
  } while (++mine.round < mine.n_rounds);
  return RM_OK;
}
