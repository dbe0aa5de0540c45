// layer_kinds.h: the kinds of a layer's first block, the one that reads other tokens of a sequence.
// A kind is one row of a table: the sizes of what a sequence keeps in the cache, and the block's
// forward function. The second block, an MLP or experts, is the same for all kinds (model.c).
#pragma once

#include "model/model_internal.h"

// This rank's cache of one layer.
typedef struct rm_layer_cache {
  char *pages[RM_PAGE_PARTS]; // [n_pages] of each part; for attention K and V
  char *states; // [n_states]
} rm_layer_cache;

typedef struct rm_layer_kind_ops {
  const char *name; // as in ModelSpec.layer_kinds
  // Bytes of the parts of one KV page in one layer, on the rank of `here`; NULL: no pages. All
  // layers with pages have parts of the same sizes.
  void (*page_bytes)(const rm_model *model, const rm_placement *here, size_t bytes[RM_PAGE_PARTS]);
  // Bytes of the state of one sequence in one layer, on the rank of `here`; NULL: no state.
  size_t (*state_bytes)(const rm_model *model, const rm_placement *here);
  // Reads this rank's kept rows of x (rm_kept_rows). Leaves the block's output as
  // rm_complete_columns does.
  rm_code (*forward)(const rm_pass *pass, const rm_layer_cache *cache);
} rm_layer_kind_ops;

extern const rm_layer_kind_ops rm_layer_kinds[RM_N_LAYER_KIND];

// Returns the cache of the pass's layer, which begins at `rest`, and advances `rest` to the next
// layer.
rm_layer_cache rm_next_cache(const rm_pass *pass, rm_cache *rest);

// attention.c
void rm_attention_page_bytes(const rm_model *model, const rm_placement *here,
                             size_t bytes[RM_PAGE_PARTS]);
rm_code rm_attention_forward(const rm_pass *pass, const rm_layer_cache *cache);
// Writes attention of model->q over the cache to `out`. latent.c calls it too.
void rm_attend(const rm_pass *pass, const rm_layer_cache *cache, char *out);
// Completes attention's output, which is in model->qkv, and computes o_proj.
rm_code rm_attention_output(const rm_pass *pass);
// latent.c
rm_code rm_latent_forward(const rm_pass *pass, const rm_layer_cache *cache);
// delta_net.c
size_t rm_delta_net_state_bytes(const rm_model *model, const rm_placement *here);
rm_code rm_delta_net_forward(const rm_pass *pass, const rm_layer_cache *cache);
