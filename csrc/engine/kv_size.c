// kv_size.c: the number of pages of the KV cache, and of states in models that have them.
//
// There is a state for each running sequence, one to fork, and one for each state_interval positions
// that half of the memory holds in pages. States take at most half of the memory, but there are at
// least two. With pages of an external scheduler the states are added to them: those for running
// sequences, and as much memory as the pages take. vllm/worker/worker.py leaves memory for both.
//
// Every rank of a mesh has the same number of pages, and ranks may share a memory: a GPU, or a
// machine's RAM. With memory_fraction, after allocating everything but the caches, the ranks
// all-gather how much memory is free and how much each rank is going to take. All ranks measure
// before any rank allocates its cache, so the free memory is the minimum over the ranks that share
// a memory. All ranks compute the same number (or error) from the same table: for each memory the
// number of pages that fit for all its ranks, and for the mesh the minimum of these numbers.
//
// Rejected: measuring on each rank alone, because the second rank would count the first rank's
// cache as used by others, and the first rank would count the second's future cache as free.
#include <math.h>
#include <stdio.h>

#include "base/memory.h"
#include "engine/state.h"

enum {
  MOST_PAGES = INT32_MAX / 2,
  // The default interval has at most these positions, or is one page (benchmarks/states.py).
  STATE_INTERVAL = 256,
};

typedef struct claim { // the message of a rank; in bytes
  uint64_t memory; // rm_memory_name
  uint64_t available; // before weights and caches of this engine; UINT64_MAX: not known
  uint64_t fixed; // what this rank is going to take besides its cache …
  uint64_t page, state; // … and for each page and state of the cache
  double fraction;
  char device[24];
} claim;

typedef struct pool { // the ranks of one memory
  int tightest, n; // the rank that may use the least; number of ranks
  double share; // what the ranks may use together
  double fixed, page, state; // sums over the ranks
} pool;

static double share_of(const claim *c) { return c->fraction * (double)c->available; }

// Host memory is taken when it is first written, so on the host the memory that is already mapped
// and the records of pages count too.
static claim claim_of(const rm_worker *worker) {
  const rm_device *device = worker->device;
  const rm_cache_bytes cache = rm_model_cache_bytes(worker->model);
  const size_t available = device->available(device->self);
  claim c = {.memory = worker->memory,
             .available = available == SIZE_MAX ? UINT64_MAX : available,
             .fixed = 2 * worker->params->bytes + rm_staging_bytes(&worker->store->staging),
             .page = cache.page,
             .state = cache.state,
             .fraction = worker->engine->options.memory_fraction};
  if (device->on_host) c.fixed += rm_runner_workspace(&worker->runner);
  if (device->on_host && worker->runner.options.keeps_records) { // the scheduler, for its replica
    c.fixed += worker->scheduler->memory_bytes;
    c.page +=
        rm_kv_record_bytes(worker->engine->options.page_size, worker->runner.routed_per_token);
  }
  snprintf(c.device, sizeof c.device, "%s", device->name);
  return c;
}

// Divides bytes into pages and states. Returns 0 if they are too few for a page and two states.
static int divide(const rm_engine_options *options, double bytes, double page, double state,
                  rm_kv_room *out) {
  const double span = (double)(out->state_interval / options->page_size) * page;
  double states = 0;
  if (state > 0) {
    const double kept = options->prefix_caching ? floor(bytes / 2 / span) : 0;
    states = fmin((double)options->max_num_seqs + 1 + kept, floor(bytes / 2 / state));
    states = fmin(fmax(states, 2), MOST_PAGES);
  }
  const double pages = fmin((bytes - states * state) / page, MOST_PAGES);
  out->n_states = rm_min64((int64_t)states, out->n_states);
  out->n_pages = rm_min64((int64_t)fmax(pages, 0), out->n_pages);
  return out->n_pages > 0;
}

// --------------------------------------------------------------------------------- from the table
static pool pool_of(const claim *claims, int size, uint64_t memory) {
  pool p = {0};
  for (int r = 0; r < size; r++) {
    if (claims[r].memory != memory) continue;
    if (!p.n++ || share_of(&claims[r]) < p.share) p.share = share_of(&claims[r]), p.tightest = r;
    p.fixed += (double)claims[r].fixed;
    p.page += (double)claims[r].page;
    p.state += (double)claims[r].state;
  }
  return p;
}

static rm_code refuse(const claim *claims, int size, const pool *p, rm_error *err) {
  const claim *c = &claims[p->tightest];
  char rank[32] = "", sharing[48] = "";
  if (size > 1) snprintf(rank, sizeof rank, "rank %d: ", p->tightest);
  if (p->n > 1) snprintf(sharing, sizeof sharing, " for the %d ranks that share it", p->n);
  return rm_fail(
      err, RM_E_CAPACITY,
      "%smemory_fraction=%g of the %s that %s has free is %s: expected more than two copies of "
      "the weights and their buffers, %s, and a page of KV cache, %.0f bytes%s%s",
      rank, c->fraction, rm_say_bytes((double)c->available).text, c->device,
      rm_say_bytes(p->share).text, rm_say_bytes(p->fixed).text, p->page,
      p->state > 0 ? ", with two states" : "", sharing);
}

static rm_code judge(const rm_engine_options *options, const claim *claims, int size,
                     rm_kv_room *out, rm_error *err) {
  for (int r = 0; r < size; r++) {
    RM_FAIL_IF(
        claims[r].available == UINT64_MAX, RM_E_CONFIG,
        "kv_cache_gib: expected a number, since the free memory of %s is not known, got none",
        claims[r].device);
    const pool p = pool_of(claims, size, claims[r].memory);
    if (!divide(options, p.share - p.fixed, p.page, p.state, out))
      return refuse(claims, size, &p, err);
  }
  return RM_OK;
}

// ----------------------------------------------------------------------------- all ranks together
static rm_code left_room(const rm_worker *worker, rm_kv_room *out, rm_error *err) {
  rm_comm *world = worker->runner.rank.world;
  const int size = world ? rm_comm_size(world) : 1;
  // A failed device reports no free memory, so its error comes first.
  rm_code code = rm_device_wait(worker->device, err);
  if (code) return code;
  claim *all = rm_alloc((size_t)size, sizeof *all);
  if (!all) return rm_no_memory(err, "the claims of all ranks", 0);
  const claim mine = *all = claim_of(worker);
  if (world) code = rm_comm_all_gather(world, &mine, all, sizeof mine, err);
  if (!code) code = judge(&worker->engine->options, all, size, out, err);
  rm_free(all);
  return code;
}

rm_code rm_kv_size(rm_worker *worker, rm_kv_room *out, rm_error *err) {
  const rm_engine_options *options = &worker->engine->options;
  const rm_cache_bytes cache = rm_model_cache_bytes(worker->model);
  const uint64_t page = cache.page, state = cache.state;
  const int64_t pages_of_state = (int64_t)rm_max64(1, (int64_t)((state + page - 1) / page)),
                pages = rm_min64(pages_of_state, rm_max64(1, STATE_INTERVAL / options->page_size));
  *out = (rm_kv_room){
      .n_pages = options->external_pages,
      .state_interval =
          options->state_interval ? options->state_interval : pages * options->page_size,
  };
  RM_FAIL_IF(out->n_pages && (uint64_t)out->n_pages > SIZE_MAX / 2 / page, RM_E_CAPACITY,
             "external_pages: expected pages that fit into the address space, got %ld of %lu bytes",
             out->n_pages, page);
  if (out->n_pages && state)
    out->n_states =
        options->max_num_seqs + 1 + options->prefix_caching * out->n_pages / pages_of_state;
  if (out->n_pages) return RM_OK;
  out->n_pages = out->n_states = MOST_PAGES;
  if (!options->kv_bytes && options->memory_fraction > 0) return left_room(worker, out, err);
  if (divide(options, (double)options->kv_bytes, (double)page, (double)state, out)) return RM_OK;
  return rm_fail(err, RM_E_CAPACITY, "kv_cache_gib: expected at least %s%lu bytes%s, got %lu bytes",
                 state ? "" : "a page of ", page + 2 * state,
                 state ? " for a page and two states" : "", options->kv_bytes);
}
