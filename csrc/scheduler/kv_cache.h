// kv_cache.h: pages of KV, who holds them, and which prefixes they already contain. Pure bookkeeping: page *contents* are
// written by the model; a page is zeroed when it is handed out (the owner gives the function that does it).
//
// A page is free, held (references > 0), or cached (no reference, but found by its hash until it is needed). A page is
// entered in the prefix index when it is full: key = hash(weight version, parent key, its tokens); a hit compares the
// tokens and the parent too, so a collision cannot serve wrong KV.
//
// A page also owns the record of the tokens in it: logprobs of prompt tokens (when they were asked for) and routed experts,
// so that a hit returns what a recomputation would.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct rm_kv_cache rm_kv_cache;

typedef struct rm_kv_options {
  int64_t n_pages, page_size;
  int64_t routed_per_token;     // n_moe_layers · top_k, 0 in a dense model
  void (*zero_page)(void *owner, int32_t page);
  void *owner;
} rm_kv_options;

size_t rm_kv_record_bytes(int64_t page_size, int64_t routed_per_token);   // of the host's memory, that a page takes here at most
rm_code rm_kv_create(const rm_kv_options *options, rm_kv_cache **out, rm_error *err);
void rm_kv_destroy(rm_kv_cache *cache);

int64_t rm_kv_free_pages(const rm_kv_cache *cache);            // free or evictable
int32_t rm_kv_alloc(rm_kv_cache *cache);                       // one reference, zeroed; −1: none left
void rm_kv_retain(rm_kv_cache *cache, int32_t page);
void rm_kv_release(rm_kv_cache *cache, int32_t page);          // at 0: cached when indexed, else free
int32_t rm_kv_references(const rm_kv_cache *cache, int32_t page);

// The page that holds `tokens` [page_size] after `parent` (−1: none) under `version`; retained. −1: no hit.
// need_logprobs: only a page whose record has them counts.
int32_t rm_kv_find(rm_kv_cache *cache, int64_t version, int32_t parent, const int32_t *tokens, int need_logprobs);
// Enters a full page. If an equal one is indexed already, nothing happens. A poisoned page must not be entered.
void rm_kv_index(rm_kv_cache *cache, int32_t page, int64_t version, int32_t parent, const int32_t *tokens, int has_logprobs);
void rm_kv_reset(rm_kv_cache *cache);                          // forgets the index; held pages stay held
void rm_kv_renew(rm_kv_cache *cache);                          // all pages are zero again (mapped anew); none may be held

float *rm_kv_logprobs(rm_kv_cache *cache, int32_t page);       // [page_size], view
int16_t *rm_kv_routed(rm_kv_cache *cache, int32_t page);       // [page_size][routed_per_token], view

typedef struct rm_kv_stats {
  int64_t hits, misses, evictions, pages_held, pages_cached, pages_free;
} rm_kv_stats;
rm_kv_stats rm_kv_statistics(const rm_kv_cache *cache);
