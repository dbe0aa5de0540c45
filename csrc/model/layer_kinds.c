// layer_kinds.c: the table of kinds, and the layout of the cache: one allocation has the pages,
// layer by layer, and another one the states.
#include "model/layer_kinds.h"

const rm_layer_kind_ops rm_layer_kinds[RM_N_LAYER_KIND] = {
    [RM_LAYER_ATTENTION] = {"attention", rm_attention_page_bytes, NULL, rm_attention_forward},
    [RM_LAYER_LATENT] = {"latent", rm_attention_page_bytes, NULL, rm_latent_forward},
    [RM_LAYER_DELTA_NET] = {"delta_net", NULL, rm_delta_net_state_bytes, rm_delta_net_forward},
};

static const rm_layer_kind_ops *kind_of(const rm_model *model, int64_t layer) {
  return &rm_layer_kinds[model->spec->layers[layer].kind];
}

// Bytes of one page and of one state over all layers, on the rank of `here`.
static void cache_bytes(const rm_model *model, const rm_placement *here, size_t *page,
                        size_t *state) {
  *page = *state = 0;
  for (int64_t i = 0; i < model->spec->n_layers; i++) {
    const rm_layer_kind_ops *kind = kind_of(model, i);
    size_t parts[RM_PAGE_PARTS] = {0};
    if (kind->page_bytes) kind->page_bytes(model, here, parts);
    for (int p = 0; p < RM_PAGE_PARTS; p++) *page += parts[p];
    if (kind->state_bytes) *state += kind->state_bytes(model, here);
  }
}

// The same on the rank of the tp group where they are largest.
static void most_bytes(const rm_model *model, size_t *page, size_t *state) {
  *page = *state = 0;
  for (int r = 0; r < model->shard.size; r++) {
    size_t p, s;
    cache_bytes(model, &model->shard.placements[r], &p, &s);
    if (p > *page) *page = p;
    if (s > *state) *state = s;
  }
}

size_t rm_model_page_bytes(const rm_model *model) {
  size_t page, state;
  most_bytes(model, &page, &state);
  return page;
}

size_t rm_model_state_bytes(const rm_model *model) {
  size_t page, state;
  most_bytes(model, &page, &state);
  return state;
}

rm_layer_cache rm_next_cache(const rm_pass *pass, rm_cache *rest) {
  const rm_model *model = pass->model;
  const rm_placement *here = &model->params->placement;
  const rm_layer_kind_ops *kind = kind_of(model, pass->index);
  rm_layer_cache cache = {.states = rest->states};
  size_t parts[RM_PAGE_PARTS] = {0};
  if (kind->page_bytes) kind->page_bytes(model, here, parts);
  for (int p = 0; p < RM_PAGE_PARTS; p++) {
    cache.pages[p] = rest->pages;
    rest->pages = (char *)rest->pages + (size_t)rest->n_pages * parts[p];
  }
  if (kind->state_bytes)
    rest->states = (char *)rest->states + (size_t)rest->n_states * kind->state_bytes(model, here);
  return cache;
}

void rm_model_write_page(const rm_model *model, const rm_cache *cache, int32_t to, int32_t from) {
  const rm_device *device = model->device;
  size_t parts[RM_PAGE_PARTS] = {0}, n_layers = 0, pitch = 0;
  for (int64_t i = 0; i < model->spec->n_layers; i++) {
    const rm_layer_kind_ops *kind = kind_of(model, i);
    if (!kind->page_bytes) continue;
    kind->page_bytes(model, &model->params->placement, parts);
    n_layers++;
  }
  for (int p = 0; p < RM_PAGE_PARTS; p++) pitch += (size_t)cache->n_pages * parts[p];
  char *pages = cache->pages; // of the first layer
  for (int p = 0; p < RM_PAGE_PARTS; pages += (size_t)cache->n_pages * parts[p++]) {
    char *at = pages + (size_t)to * parts[p];
    if (!parts[p] || !n_layers) continue;
    if (from < 0) device->zero_2d(device->self, at, pitch, parts[p], n_layers);
    else
      device->copy_2d(device->self, at, pitch, pages + (size_t)from * parts[p], pitch, parts[p],
                      n_layers);
  }
}
