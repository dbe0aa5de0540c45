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

// Bytes of one layer: of the parts of a KV page, and of the state of a sequence.
typedef struct rm_layer_bytes {
  size_t pages[RM_PAGE_PARTS]; // zeros: no pages; all layers with pages have parts of these sizes
  size_t state; // 0: no state
} rm_layer_bytes;

typedef struct rm_layer_kind_ops {
  const char *name; // as in ModelSpec.layer_kinds
  rm_layer_bytes (*bytes)(const rm_model *model, const rm_placement *here); // on the rank of `here`
  // Reads this rank's kept rows of x (rm_kept_rows). Leaves the block's output as
  // rm_complete_columns does.
  rm_code (*forward)(const rm_pass *pass, const rm_layer_cache *cache);
} rm_layer_kind_ops;

extern const rm_layer_kind_ops rm_layer_kinds[RM_N_LAYER_KIND];

// Returns the cache of the pass's layer, which begins at `rest`, and advances `rest` to the next
// layer.
rm_layer_cache rm_next_cache(const rm_pass *pass, rm_cache *rest);

// attention.c
rm_layer_bytes rm_attention_bytes(const rm_model *model, const rm_placement *here);
rm_code rm_attention_forward(const rm_pass *pass, const rm_layer_cache *cache);
// For latent.c too: writes the rows' K and V to the cache, and their rotated q to model->q; writes
// attention of model->q over the cache to `out`.
rm_code rm_write_kv(const rm_pass *pass, const rm_layer_cache *cache);
void rm_attend(const rm_pass *pass, const rm_layer_cache *cache, char *out);
// For all kinds: completes the block's output, of which this rank has `part`, its columns of `dim`,
// and multiplies it by the layer's matrix `kind`.
rm_code rm_project_output(const rm_pass *pass, rm_dim dim, const char *part, rm_param_kind kind);
// latent.c. transformers norms latents with this eps for every rms_norm_eps.
static const float RM_LATENT_EPS = 1e-6f;
rm_code rm_latent_forward(const rm_pass *pass, const rm_layer_cache *cache);
// delta_net.c
rm_layer_bytes rm_delta_net_bytes(const rm_model *model, const rm_placement *here);
rm_code rm_delta_net_forward(const rm_pass *pass, const rm_layer_cache *cache);
