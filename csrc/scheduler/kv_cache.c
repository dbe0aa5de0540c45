// kv_cache.c: see kv_cache.h. Indexed content gets a number ("node") that is never reused, and the
// key of a page is (version, node of its parent, its tokens). Rejected: page ids or hashes as
// parents, because an evicted page's id is reused with other content, and a hash can collide. A
// page with the same content as an indexed page gets the node of that page, so that pages after it
// can be indexed.
//
// Available pages are in one list: first the free ones, the last released one first, then the
// cached ones in the order of their release. Pages are allocated from the free ones, then from pages that were
// never used, then by evicting the first cached one. Sequences release their last page first, so a
// prefix stays longer than the pages after it. Available states have such a list too.
#include "scheduler/kv_cache.h"

#include <assert.h>
#include <string.h>

#include "base/fields.h"
#include "base/hash.h"
#include "scheduler/list.h"

typedef struct rm_page {
  rm_link link; // first member; in `available` or in no list
  uint64_t node, parent; // node of the content, 0: none; node of the page before it, 0: the start
  int64_t version;
  uint64_t hash;
  int32_t references;
  int32_t chain; // next page + 1 in its bucket
  int32_t state; // state + 1 that the page keeps; 0: none
  uint8_t indexed, has_logprobs;
} rm_page;

typedef struct rm_state {
  rm_link link; // first member; in `available_states` or in no list
  int32_t references; // without the page's
  int32_t page; // page + 1 that keeps it; 0: none
  int64_t kept_at; // n_takes when the page began to keep it
} rm_state;

struct rm_kv_cache {
  rm_kv_options options;
  void *block; // owned: the arrays below
  rm_page *pages; // [n_pages]
  int32_t *tokens; // [n_pages][page_size] of indexed pages
  float *logprobs; // [n_pages][page_size]
  int16_t *routed; // [n_pages][page_size][routed_per_token]
  int32_t *buckets; // [n_buckets] page + 1
  uint64_t n_buckets; // a power of two
  rm_page_write *writes; // [2·n_pages]
  int64_t n_writes, n_takes; // n_takes: calls of rm_kv_take_writes
  uint64_t last_node;
  int64_t n_fresh; // pages [n_fresh, n_pages) were never used and are zero
  rm_link available; // pages
  int64_t n_available; // also those that were never used
  rm_state *states; // [n_states]
  rm_link available_states;
  int64_t n_available_states, n_shared_states;
  rm_kv_counts counts;
};

size_t rm_kv_record_bytes(int64_t page_size, int64_t routed_per_token) {
  const rm_kv_cache *cache = NULL; // only for sizeof
  const size_t position = sizeof *cache->tokens + sizeof *cache->logprobs +
                          (size_t)routed_per_token * sizeof *cache->routed;
  return sizeof *cache->pages + (size_t)page_size * position + 2 * sizeof *cache->writes +
         4 * sizeof *cache->buckets; // less than four buckets per page
}

// Inserts a page or state that nobody holds: a cached one is the last to be allocated, a free one
// the next.
static void make_available(rm_link *list, rm_link *link, int is_cached) {
  rm_list_insert_before(is_cached ? list : list->next, link);
}

rm_code rm_kv_create(const rm_kv_options *options, rm_kv_cache **out, rm_error *err) {
  *out = NULL;
  RM_TRY(rm_check_range(err, RM_E_CAPACITY, "KV pages", options->n_pages, 1, INT32_MAX / 2));
  rm_kv_cache *cache = rm_alloc(1, sizeof *cache);
  if (!cache) return rm_no_memory(err, "the table of KV pages", 0);
  cache->options = *options;
  cache->n_available = options->n_pages;
  cache->n_available_states = options->n_states;
  rm_list_init(&cache->available);
  rm_list_init(&cache->available_states);
  const size_t n = (size_t)options->n_pages, size = (size_t)options->page_size,
               routed = (size_t)options->routed_per_token;
  for (cache->n_buckets = 1; cache->n_buckets < 2 * n; cache->n_buckets *= 2) continue;
  const rm_field fields[] = {
      RM_FIELD(cache->pages, n),
      RM_FIELD_ROWS(cache->tokens, n, size),
      RM_FIELD_ROWS(cache->logprobs, n, size),
      RM_FIELD_ROWS(cache->routed, routed ? n * size : 0, routed),
      RM_FIELD(cache->buckets, cache->n_buckets),
      RM_FIELD(cache->writes, 2 * n),
      RM_FIELD(cache->states, options->n_states),
  };
  const size_t n_fields = sizeof fields / sizeof *fields, bytes = rm_fields_bytes(fields, n_fields);
  cache->block = bytes ? rm_alloc(1, bytes) : NULL;
  if (!cache->block) {
    rm_kv_destroy(cache);
    return rm_no_memory(err, "the records of KV pages", bytes);
  }
  rm_fields_place(fields, n_fields, cache->block);
  for (int64_t i = 0; i < options->n_states; i++)
    make_available(&cache->available_states, &cache->states[i].link, 1);
  *out = cache;
  return RM_OK;
}

void rm_kv_destroy(rm_kv_cache *cache) {
  if (!cache) return;
  rm_free(cache->block);
  rm_free(cache);
}

// -------------------------------------------------------------------------------------- the index
static uint64_t hash_key(const rm_kv_cache *cache, int64_t version, uint64_t parent,
                         const int32_t *tokens) {
  uint64_t h = rm_hash_word(rm_hash_word(RM_HASH_SEED, (uint64_t)version), parent);
  for (int64_t i = 0; i < cache->options.page_size; i++) h = rm_hash_word(h, (uint32_t)tokens[i]);
  return h;
}

// Returns the indexed page with exactly this key, or −1.
static int32_t look_up(const rm_kv_cache *cache, uint64_t hash, int64_t version, uint64_t parent,
                       const int32_t *tokens) {
  const size_t size = (size_t)cache->options.page_size;
  for (int32_t at = cache->buckets[hash & (cache->n_buckets - 1)]; at;
       at = cache->pages[at - 1].chain) {
    const rm_page *page = &cache->pages[at - 1];
    if (page->hash == hash && page->version == version && page->parent == parent &&
        !memcmp(cache->tokens + (size_t)(at - 1) * size, tokens, size * sizeof *tokens))
      return at - 1;
  }
  return -1;
}

void rm_kv_drop_state(rm_kv_cache *cache, int32_t page) {
  const int32_t id = cache->pages[page].state - 1;
  if (id < 0) return;
  cache->pages[page].state = cache->states[id].page = 0;
  if (cache->states[id].references) {
    cache->n_shared_states--;
    return;
  }
  rm_list_remove(&cache->states[id].link);
  make_available(&cache->available_states, &cache->states[id].link, 0);
}

static void remove_from_index(rm_kv_cache *cache, int32_t id) {
  rm_page *page = &cache->pages[id];
  rm_kv_drop_state(cache, id);
  int32_t *at = &cache->buckets[page->hash & (cache->n_buckets - 1)];
  while (*at != id + 1) at = &cache->pages[*at - 1].chain;
  *at = page->chain;
  page->indexed = page->has_logprobs = 0;
  page->node = 0;
}

// ------------------------------------------------------------------------------------------ pages
int64_t rm_kv_free_pages(const rm_kv_cache *cache) { return cache->n_available; }

int32_t rm_kv_alloc(rm_kv_cache *cache) {
  if (!cache->n_available) return -1;
  rm_page *first = rm_list_empty(&cache->available) ? NULL : (rm_page *)cache->available.next;
  const int is_fresh = (!first || first->indexed) && cache->n_fresh < cache->options.n_pages;
  const int32_t id = (int32_t)(is_fresh ? cache->n_fresh++ : first - cache->pages);
  if (!is_fresh) {
    rm_list_remove(&first->link);
    cache->counts.evictions += first->indexed;
    if (first->indexed) remove_from_index(cache, id);
    rm_kv_zero(cache, id);
  }
  cache->pages[id].references = 1;
  cache->n_available--;
  return id;
}

static void add_write(rm_kv_cache *cache, rm_page_write write) {
  assert(cache->n_writes < 2 * cache->options.n_pages);
  cache->writes[cache->n_writes++] = write;
}

void rm_kv_zero(rm_kv_cache *cache, int32_t id) {
  rm_kv_drop_state(cache, id);
  add_write(cache, (rm_page_write){id, -1});
}

int32_t rm_kv_copy(rm_kv_cache *cache, int32_t from) {
  const int32_t to = rm_kv_alloc(cache);
  const int64_t routed = cache->options.page_size * cache->options.routed_per_token;
  assert(to >= 0);
  add_write(cache, (rm_page_write){to, from});
  if (routed)
    memcpy(rm_kv_routed(cache, to), rm_kv_routed(cache, from), (size_t)routed * sizeof(int16_t));
  rm_kv_release(cache, from);
  return to;
}

const rm_page_write *rm_kv_take_writes(rm_kv_cache *cache, int64_t *n) {
  *n = cache->n_writes;
  cache->n_writes = 0;
  cache->n_takes++;
  return cache->writes;
}

void rm_kv_retain(rm_kv_cache *cache, int32_t id) {
  if (cache->pages[id].references++) return;
  assert(cache->pages[id].indexed);
  rm_list_remove(&cache->pages[id].link);
  cache->n_available--;
}

void rm_kv_release(rm_kv_cache *cache, int32_t id) {
  rm_page *page = &cache->pages[id];
  assert(page->references > 0);
  if (--page->references) return;
  cache->n_available++;
  if (!page->indexed) page->node = 0;
  make_available(&cache->available, &page->link, page->indexed);
}

int32_t rm_kv_references(const rm_kv_cache *cache, int32_t id) {
  return cache->pages[id].references;
}

int32_t rm_kv_find(rm_kv_cache *cache, int64_t version, int32_t parent, const int32_t *tokens,
                   int need_logprobs) {
  const uint64_t node = parent < 0 ? 0 : cache->pages[parent].node;
  int32_t id = -1;
  if (parent < 0 || node)
    id = look_up(cache, hash_key(cache, version, node, tokens), version, node, tokens);
  if (id < 0 || (need_logprobs && !cache->pages[id].has_logprobs)) {
    cache->counts.misses++;
    return -1;
  }
  cache->counts.hits++;
  rm_kv_retain(cache, id);
  return id;
}

int32_t rm_kv_index(rm_kv_cache *cache, int32_t id, int64_t version, int32_t parent,
                    const int32_t *tokens, int has_logprobs) {
  rm_page *page = &cache->pages[id];
  const uint64_t node = parent < 0 ? 0 : cache->pages[parent].node;
  const size_t size = (size_t)cache->options.page_size;
  if (page->node || (parent >= 0 && !node)) return -1;
  const uint64_t hash = hash_key(cache, version, node, tokens);
  const int32_t equal = look_up(cache, hash, version, node, tokens);
  if (equal >= 0) {
    page->node = cache->pages[equal].node;
    if (has_logprobs && !cache->pages[equal].has_logprobs) { // same content, so the same record
      memcpy(rm_kv_logprobs(cache, equal), rm_kv_logprobs(cache, id), size * sizeof(float));
      cache->pages[equal].has_logprobs = 1;
    }
    return equal;
  }
  int32_t *bucket = &cache->buckets[hash & (cache->n_buckets - 1)];
  memcpy(cache->tokens + (size_t)id * size, tokens, size * sizeof *tokens);
  page->node = ++cache->last_node;
  page->parent = node;
  page->version = version;
  page->hash = hash;
  page->chain = *bucket;
  page->indexed = 1;
  page->has_logprobs = has_logprobs != 0;
  *bucket = id + 1;
  return id;
}

void rm_kv_reset(rm_kv_cache *cache) {
  for (int64_t id = 0; id < cache->n_fresh; id++) {
    rm_kv_drop_state(cache, (int32_t)id);
    cache->pages[id].indexed = cache->pages[id].has_logprobs = 0;
    cache->pages[id].node = 0;
  }
  memset(cache->buckets, 0, cache->n_buckets * sizeof *cache->buckets);
}

void rm_kv_renew(rm_kv_cache *cache) {
  assert(cache->n_available == cache->options.n_pages);
  assert(cache->n_available_states == cache->options.n_states);
  rm_kv_reset(cache);
  rm_list_init(&cache->available);
  cache->n_fresh = 0;
}

// ----------------------------------------------------------------------------------------- states
int64_t rm_kv_free_states(const rm_kv_cache *cache) { return cache->n_available_states; }

int64_t rm_kv_shared_states(const rm_kv_cache *cache) { return cache->n_shared_states; }

int32_t rm_kv_alloc_state(rm_kv_cache *cache) {
  if (!cache->n_available_states) return -1;
  rm_state *first = (rm_state *)cache->available_states.next;
  cache->counts.state_evictions += first->page > 0;
  if (first->page) rm_kv_drop_state(cache, first->page - 1);
  rm_list_remove(&first->link);
  first->references = 1;
  cache->n_available_states--;
  return (int32_t)(first - cache->states);
}

void rm_kv_retain_state(rm_kv_cache *cache, int32_t id) {
  if (cache->states[id].references++) return;
  rm_list_remove(&cache->states[id].link);
  cache->n_available_states--;
  cache->n_shared_states++;
}

void rm_kv_release_state(rm_kv_cache *cache, int32_t id) {
  if (id < 0) return;
  rm_state *state = &cache->states[id];
  assert(state->references > 0);
  if (--state->references) return;
  make_available(&cache->available_states, &state->link, state->page > 0);
  cache->n_available_states++;
  cache->n_shared_states -= state->page > 0;
}

int rm_kv_owns_state(rm_kv_cache *cache, int32_t id) {
  if (id < 0 || cache->states[id].references != 1) return 0;
  if (cache->states[id].page && !cache->n_available_states)
    rm_kv_drop_state(cache, cache->states[id].page - 1);
  return !cache->states[id].page;
}

void rm_kv_keep_state(rm_kv_cache *cache, int32_t page, int32_t id) {
  assert(cache->states[id].references && !cache->states[id].page);
  if (cache->pages[page].state) return;
  cache->pages[page].state = id + 1;
  cache->states[id].page = page + 1;
  cache->states[id].kept_at = cache->n_takes;
  cache->n_shared_states++;
}

int rm_kv_state_is_new(const rm_kv_cache *cache, int32_t id) {
  return cache->states[id].kept_at == cache->n_takes;
}

int32_t rm_kv_state_of(const rm_kv_cache *cache, int32_t page) {
  return cache->pages[page].state - 1;
}

float *rm_kv_logprobs(rm_kv_cache *cache, int32_t id) {
  return cache->logprobs + (int64_t)id * cache->options.page_size;
}

int16_t *rm_kv_routed(rm_kv_cache *cache, int32_t id) {
  return cache->routed + (int64_t)id * cache->options.page_size * cache->options.routed_per_token;
}

const rm_kv_counts *rm_kv_statistics(const rm_kv_cache *cache) { return &cache->counts; }
