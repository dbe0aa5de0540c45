// nccl.c: creation of an NCCL group. First each rank loads the library and allocates memory, and
// the ranks share the results over the host group, so that all ranks report the problem of one rank
// before NCCL is called. Then NCCL creates the communicator, under a deadline. Then an all-to-all
// and an all_gather of one word test it and establish its connections, which a capture does not
// allow.
#include "gpu/nccl/nccl.h"

#include <stdio.h>
#include <string.h>

#include "base/memory.h"
#include "device/devices.h"
#include "gpu/nccl/endpoint.h"

enum { HELLO_TEXT = 256 };

typedef struct hello { // what the ranks all-gather
  int32_t code;
  rm_nccl_id id; // set by rank 0
  char text[HELLO_TEXT]; // the message of `code`
} hello;

// ---------------------------------------------------------------------------- comparing the ranks
static rm_code prepare(rm_nccl_endpoint *end, const rm_nccl_options *options, hello *mine,
                       rm_error *err) {
  void *out = NULL, *in = NULL;
  rm_code code = rm_nccl_load(options->library, &end->api, err);
  for (int i = 0; i < 2 && end->capacity && !code; i++)
    code =
        rm_device_alloc(end->device, end->capacity, "a buffer for exchanges", i ? &in : &out, err);
  end->out = out, end->in = in;
  if (code) return code;
  const int result = end->rank == 0 ? end->api.get_unique_id(&mine->id) : RM_NCCL_SUCCESS;
  return rm_nccl_result(end, "ncclGetUniqueId", result, RM_NCCL_CREATING, err);
}

// Returns the same result on all ranks.
static rm_code judge_hellos(const hello *all, int size, rm_error *err) {
  for (int r = 0; r < size; r++) {
    const rm_code code =
        all[r].code > RM_OK && all[r].code < RM_N_CODE ? (rm_code)all[r].code : RM_E_RANK_LOST;
    if (all[r].code) return rm_fail(err, code, "rank %d: %.*s", r, HELLO_TEXT - 1, all[r].text);
  }
  return RM_OK;
}

// Shares the results of all ranks and sets *id to the group's unique id. `code` and err: the result
// of this rank's own preparation.
static rm_code meet(rm_nccl_endpoint *end, rm_code code, hello *mine, rm_nccl_id *id,
                    rm_error *err) {
  const size_t size = (size_t)end->size;
  hello *all = rm_alloc(size, sizeof *all);
  if (!all) {
    code = rm_fail(err, RM_E_MEMORY, "no memory for a group of %zu ranks", size);
    rm_comm_abort(end->host, code);
    goto out;
  }
  mine->code = code;
  if (code) snprintf(mine->text, sizeof mine->text, "%s", rm_error_message(err));
  rm_error met = RM_ERROR_INIT;
  rm_code common = rm_comm_all_gather(end->host, mine, all, sizeof *all, &met);
  if (!common) common = judge_hellos(all, end->size, &met);
  if (!code && common) code = rm_fail(err, common, "%s", rm_error_message(&met));
  rm_error_clear(&met);
  *id = all[0].id;
out:
  rm_free(all);
  return code;
}

// --------------------------------------------------------------------------------------- creation
static rm_code init(rm_nccl_endpoint *end, rm_nccl_id id, double timeout, rm_error *err) {
  rm_nccl_config config = {.size = sizeof config,
                           .magic = RM_NCCL_MAGIC,
                           .version = 22200, // the layout: after 2.17, before trafficClass
                           .blocking = 0,
                           .cga_cluster_size = RM_NCCL_UNDEFINED,
                           .min_ctas = RM_NCCL_UNDEFINED,
                           .max_ctas = RM_NCCL_UNDEFINED,
                           .split_share = RM_NCCL_UNDEFINED,
                           .traffic_class = RM_NCCL_UNDEFINED};
  rm_nccl_comm *comm = NULL;
  const int result = end->api.init_rank(&comm, end->size, id, end->rank, &config);
  pthread_mutex_lock(&end->lock);
  end->comm = comm;
  pthread_mutex_unlock(&end->lock);
  const rm_code code =
      rm_nccl_result(end, "making a group", result, RM_NCCL_CREATING | RM_NCCL_ABORTS_HOST, err);
  if (code) return code;
  if (!comm) {
    rm_comm_abort(end->host, RM_E_DEVICE);
    return rm_fail(err, RM_E_DEVICE, "making a group: NCCL returned neither a group nor an error");
  }
  return rm_nccl_wait_ready(end, "making a group", timeout, RM_NCCL_CREATING | RM_NCCL_ABORTS_HOST,
                            err);
}

static uint64_t word_of(int from, int to) {
  return UINT64_C(0x9E3779B97F4A7C15) * (uint64_t)(1 + from) + (uint64_t)to;
}

// `there` and `here`: [size] words out, [size] words in, [size] words of the gather.
static rm_code exchange_words(rm_nccl_endpoint *end, uint64_t *there, uint64_t *here,
                              double timeout, rm_comm *comm, rm_error *err) {
  const size_t n = (size_t)end->size, word = sizeof *here;
  const rm_device *device = end->device;
  rm_block *send = rm_comm_blocks(comm), *recv = send + n;
  for (size_t r = 0; r < n; r++) {
    here[r] = word_of(end->rank, (int)r);
    send[r] = (rm_block){there + r, 1, word, word};
    recv[r] = (rm_block){there + n + r, 1, word, word};
  }
  device->copy_to_device(device->self, there, here, n * word);
  rm_code code = rm_nccl_exchange(end, RM_COMM_ALL_TO_ALL, 0, 0, timeout, send, recv, err);
  for (size_t r = 0; r < n; r++) {
    send[r] = (rm_block){there, 1, word, word};
    recv[r] = (rm_block){there + 2 * n + r, 1, word, word};
  }
  if (!code) code = rm_nccl_exchange(end, RM_COMM_GATHER, 0, 0, timeout, send, recv, err);
  if (!code) device->copy_to_host(device->self, here + n, there + n, 2 * n * word);
  if (!code) code = rm_comm_wait(&comm, 1, device, RM_WAIT_QUEUE, timeout, err);
  for (int r = 0; r < end->size && !code; r++)
    if (here[n + (size_t)r] != word_of(r, end->rank) || here[2 * n + (size_t)r] != word_of(r, 0))
      code = rm_fail(err, RM_E_COLLECTIVE_MISMATCH,
                     "rank %d: expected from NCCL the bytes that rank %d sent, got others",
                     end->rank, r);
  return code;
}

static rm_code test_group(rm_nccl_endpoint *end, double timeout, rm_comm *comm, rm_error *err) {
  rm_code code = rm_mirrored_create(end->device, 3 * (size_t)end->size * sizeof(uint64_t),
                                    "the test of a group", &end->words, err);
  if (!code)
    code = exchange_words(end, (uint64_t *)end->words.on_device, (uint64_t *)end->words.host,
                          timeout, comm, err);
  if (!code) code = rm_comm_barrier(end->host, err); // usable only if all ranks have succeeded
  if (code) rm_nccl_abort(end, code);
  return code;
}

static rm_code make_end(rm_comm *host, const rm_device *device, const rm_nccl_options *options,
                        rm_nccl_endpoint **out, rm_error *err) {
  const size_t size = (size_t)rm_comm_size(host);
  rm_nccl_endpoint *end = rm_alloc(1, sizeof *end + 2 * size * sizeof end->from[0]);
  *out = end;
  if (!end) return rm_fail(err, RM_E_MEMORY, "no memory for a group of %zu ranks", size);
  *end = (rm_nccl_endpoint){.host = host,
                            .device = device,
                            .rank = rm_comm_rank(host),
                            .size = (int)size,
                            .capacity = options->capacity,
                            .timeout = options->timeout,
                            .from = (char **)(end + 1)};
  end->to = end->from + size;
  pthread_mutex_init(&end->lock, NULL);
  return RM_OK;
}

rm_code rm_comm_create_nccl(rm_comm *host, const rm_device *device, const rm_nccl_options *options,
                            rm_comm **out, rm_error *err) {
  rm_nccl_endpoint *end;
  rm_nccl_id id;
  hello mine = {0};
  const double kept = rm_comm_timeout(host);
  *out = NULL;
  rm_code code = make_end(host, device, options, &end, err);
  if (code) {
    rm_comm_abort(host, code);
    goto out;
  }
  rm_comm_set_timeout(host, options->timeout);
  code = prepare(end, options, &mine, err);
  code = meet(end, code, &mine, &id, err);
  if (!code) code = init(end, id, options->timeout, err);
  const rm_transport transport = {.moves_own = 1,
                                  .waits_in_queue = 1,
                                  .self = end,
                                  .exchange = rm_nccl_exchange,
                                  .abort = rm_nccl_abort,
                                  .check = rm_nccl_check,
                                  .leave = rm_nccl_leave,
                                  .destroy = rm_nccl_destroy};
  if (!code && (code = rm_comm_create(&transport, end->rank, end->size, out, err)))
    rm_comm_abort(host, code);
  if (!code) rm_comm_set_timeout(*out, options->timeout);
  if (!code && !(code = test_group(end, options->timeout, *out, err))) goto out;
  if (*out) rm_comm_destroy(*out);
  else {
    rm_nccl_abort_comm(end);
    rm_nccl_leave(end);
    rm_nccl_destroy(end);
  }
  *out = NULL;
out:
  rm_comm_set_timeout(host, kept);
  return code;
}
