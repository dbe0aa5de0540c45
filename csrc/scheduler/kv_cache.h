// kv_cache.h: the pages of the KV cache, their reference counts, and the prefix index. Bookkeeping
// only: ranks hold the contents. The cache lists the pages that they have to zero or copy before
// they compute the next rows.
//
// A page is free, held (references > 0), or cached (no reference, but in the index until it is
// needed). A full page is indexed by hash(weight version, parent, its tokens); a hit compares all
// three, so a collision cannot serve wrong KV.
//
// A page also has records of its tokens, logprobs (where asked for) and routed experts, so that a
// hit returns what a recomputation would.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct rm_kv_cache rm_kv_cache;

typedef struct rm_kv_options {
  int64_t n_pages, page_size;
  int64_t routed_per_token; // n_moe_layers · top_k, 0 in a dense model
} rm_kv_options;

typedef struct rm_page_write {
  int32_t to, from; // from −1: zeroes
} rm_page_write;

// The most host memory that a page takes here.
size_t rm_kv_record_bytes(int64_t page_size, int64_t routed_per_token);
rm_code rm_kv_create(const rm_kv_options *options, rm_kv_cache **out, rm_error *err);
void rm_kv_destroy(rm_kv_cache *cache); // safe on NULL

int64_t rm_kv_free_pages(const rm_kv_cache *cache); // free or evictable
int32_t rm_kv_alloc(rm_kv_cache *cache); // one reference, to be zeroed; −1: none left
// A copy with one reference: of the contents, by the ranks, and of the routing. Releases `from`.
int32_t rm_kv_copy(rm_kv_cache *cache, int32_t from);
void rm_kv_zero(rm_kv_cache *cache, int32_t page); // by the ranks
// Writes since the last call, in order, *n of them; views until the next write. Between two calls a
// page is allocated or zeroed once at most.
const rm_page_write *rm_kv_take_writes(rm_kv_cache *cache, int64_t *n);
void rm_kv_retain(rm_kv_cache *cache, int32_t page);
void rm_kv_release(rm_kv_cache *cache, int32_t page); // at 0: cached when indexed, else free
int32_t rm_kv_references(const rm_kv_cache *cache, int32_t page);

// The page that holds `tokens` [page_size] after `parent` (−1: none) under `version`; retained. −1:
// no hit. need_logprobs: only a page whose record has them counts.
int32_t rm_kv_find(rm_kv_cache *cache, int64_t version, int32_t parent, const int32_t *tokens,
                   int need_logprobs);
// Indexes a full page, unless an equal one is indexed already. Never a page with values that are
// not finite.
void rm_kv_index(rm_kv_cache *cache, int32_t page, int64_t version, int32_t parent,
                 const int32_t *tokens, int has_logprobs);
void rm_kv_reset(rm_kv_cache *cache); // empties the index; held pages stay held
void rm_kv_renew(rm_kv_cache *cache); // all pages are zero again (mapped anew); none may be held

float *rm_kv_logprobs(rm_kv_cache *cache, int32_t page); // [page_size], view
int16_t *rm_kv_routed(rm_kv_cache *cache, int32_t page); // [page_size][routed_per_token], view

typedef struct rm_kv_stats {
  int64_t hits, misses, evictions, pages_held, pages_cached, pages_free;
} rm_kv_stats;
rm_kv_stats rm_kv_statistics(const rm_kv_cache *cache);
