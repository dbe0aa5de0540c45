// kv_cache.h: the pages of the KV cache and the states of sequences, their reference counts, and
// the prefix index. The contents are on the ranks, not here. This file lists the pages that the
// ranks must zero or copy before they compute the next rows.
//
// A page is free, held (references > 0), or cached (no reference, but in the index until it is
// needed). A full page is indexed by hash(weight version, parent, its tokens); a hit compares all
// three, so a collision cannot serve wrong KV.
//
// In a model whose layers have states (model/layer_kinds.h), a page that is indexed or belongs to
// an external scheduler may keep a state: the one after its last token. A state is free, held
// (references > 0), or cached (no reference, but a page keeps it). A state that a page keeps, or
// that several sequences hold, is not written.
//
// A page also has records of its tokens, their logprobs (if requested) and routed experts, so that
// a hit returns the same results as a recomputation.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct rm_kv_cache rm_kv_cache;

typedef struct rm_kv_options {
  int64_t n_pages, page_size;
  int64_t routed_per_token; // n_moe_layers · top_k, 0 in a dense model
  int64_t n_states; // 0: the layers have no states
} rm_kv_options;

typedef struct rm_page_write {
  int32_t to, from; // from −1: zeroes
} rm_page_write;

// Returns the largest number of bytes of host memory that a page takes here.
size_t rm_kv_record_bytes(int64_t page_size, int64_t routed_per_token);
rm_code rm_kv_create(const rm_kv_options *options, rm_kv_cache **out, rm_error *err);
void rm_kv_destroy(rm_kv_cache *cache); // safe on NULL

int64_t rm_kv_free_pages(const rm_kv_cache *cache); // free or evictable
int32_t rm_kv_alloc(
    rm_kv_cache *cache); // a page with one reference, to be zeroed; −1: all are held
// Returns a copy with one reference. The ranks copy the contents; this copies the routing. Releases
// `from`.
int32_t rm_kv_copy(rm_kv_cache *cache, int32_t from);
// Lists the page to be zeroed. The page no longer keeps a state.
void rm_kv_zero(rm_kv_cache *cache, int32_t page);
// Returns the *n writes since the last call, in order; views until the next write. Between two
// calls a page is allocated or zeroed at most once.
const rm_page_write *rm_kv_take_writes(rm_kv_cache *cache, int64_t *n);
void rm_kv_retain(rm_kv_cache *cache, int32_t page);
void rm_kv_release(rm_kv_cache *cache, int32_t page); // at 0: cached when indexed, else free
int32_t rm_kv_references(const rm_kv_cache *cache, int32_t page);

// Returns the page with `tokens` [page_size] after `parent` (−1: the start) under `version`, and
// retains it. −1: no hit. need_logprobs: only accept a page with logprobs.
int32_t rm_kv_find(rm_kv_cache *cache, int64_t version, int32_t parent, const int32_t *tokens,
                   int need_logprobs);
// Indexes a full page, unless an equal page is already indexed. Returns the page that is indexed, −1:
// none. The page must not have values that are not finite.
int32_t rm_kv_index(rm_kv_cache *cache, int32_t page, int64_t version, int32_t parent,
                    const int32_t *tokens, int has_logprobs);
void rm_kv_reset(rm_kv_cache *cache); // empties the index; held pages stay held
void rm_kv_renew(rm_kv_cache *cache); // makes all pages zero (mapped again); all must be released

int64_t rm_kv_free_states(const rm_kv_cache *cache); // free or cached
int64_t rm_kv_shared_states(const rm_kv_cache *cache); // held, and also kept by a page
// Returns a state with one reference, with any content; −1: all are held.
int32_t rm_kv_alloc_state(rm_kv_cache *cache);
void rm_kv_retain_state(rm_kv_cache *cache, int32_t state);
void rm_kv_release_state(rm_kv_cache *cache, int32_t state); // no effect on −1
// Returns whether the caller may overwrite the state: the caller has the only reference, and no
// page keeps the state. If no other state is free, the page that keeps this state gives it up
// first.
int rm_kv_owns_state(rm_kv_cache *cache, int32_t state);
// Lets a page keep a held state, unless the page keeps one already.
void rm_kv_keep_state(rm_kv_cache *cache, int32_t page, int32_t state);
int32_t rm_kv_state_of(const rm_kv_cache *cache, int32_t page); // −1: none
// Returns whether a page began to keep the state after the last rm_kv_take_writes.
int rm_kv_state_is_new(const rm_kv_cache *cache, int32_t state);
void rm_kv_drop_state(rm_kv_cache *cache, int32_t page); // the page no longer keeps a state

float *rm_kv_logprobs(rm_kv_cache *cache, int32_t page); // [page_size], view
int16_t *rm_kv_routed(rm_kv_cache *cache, int32_t page); // [page_size][routed_per_token], view

typedef struct rm_kv_counts { // since creation
  int64_t hits, misses, evictions;
  int64_t state_evictions;
} rm_kv_counts;
const rm_kv_counts *rm_kv_statistics(const rm_kv_cache *cache); // a view
