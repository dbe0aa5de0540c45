// layer_kinds.c: the table of kinds, and the layout of the cache: one allocation has the pages,
// layer by layer, and another one the states.
#include "model/layer_kinds.h"

const rm_layer_kind_ops rm_layer_kinds[RM_N_LAYER_KIND] = {
    [RM_LAYER_ATTENTION] = {"attention", rm_attention_bytes, rm_attention_forward},
    [RM_LAYER_LATENT] = {"latent", rm_attention_bytes, rm_latent_forward},
    [RM_LAYER_DELTA_NET] = {"delta_net", rm_delta_net_bytes, rm_delta_net_forward},
};

static rm_layer_bytes bytes_of(const rm_model *model, const rm_placement *here, int64_t layer) {
  return rm_layer_kinds[model->spec->layers[layer].kind].bytes(model, here);
}

rm_cache_bytes rm_model_cache_bytes(const rm_model *model) {
  rm_cache_bytes most = {0};
  for (int r = 0; r < model->shard.size; r++) {
    rm_cache_bytes its = {0};
    for (int64_t i = 0; i < model->spec->n_layers; i++) {
      const rm_layer_bytes layer = bytes_of(model, &model->shard.placements[r], i);
      for (int p = 0; p < RM_PAGE_PARTS; p++) its.page += layer.pages[p];
      its.state += layer.state;
    }
    if (its.page > most.page) most.page = its.page;
    if (its.state > most.state) most.state = its.state;
  }
  return most;
}

rm_layer_cache rm_next_cache(const rm_pass *pass, rm_cache *rest) {
  const rm_model *model = pass->model;
  const rm_layer_bytes bytes = bytes_of(model, &model->params->placement, pass->index);
  rm_layer_cache cache = {.states = rest->states};
  for (int p = 0; p < RM_PAGE_PARTS; p++) {
    cache.pages[p] = rest->pages;
    rest->pages = (char *)rest->pages + (size_t)rest->n_pages * bytes.pages[p];
  }
  rest->states = (char *)rest->states + (size_t)rest->n_states * bytes.state;
  return cache;
}

void rm_model_write_page(const rm_model *model, const rm_cache *cache, int32_t to, int32_t from) {
  const rm_device *device = model->device;
  rm_layer_bytes bytes = {0}; // of a layer with pages
  for (int64_t i = 0; !bytes.pages[0]; i++) bytes = bytes_of(model, &model->params->placement, i);
  const size_t n_layers = (size_t)model->spec->n_attention_layers;
  size_t pitch = 0;
  for (int p = 0; p < RM_PAGE_PARTS; p++) pitch += (size_t)cache->n_pages * bytes.pages[p];
  char *pages = cache->pages; // of the first layer
  for (int p = 0; p < RM_PAGE_PARTS; pages += (size_t)cache->n_pages * bytes.pages[p++]) {
    const size_t width = bytes.pages[p];
    char *at = pages + (size_t)to * width;
    if (from < 0) device->zero_2d(device->self, at, pitch, width, n_layers);
    else
      device->copy_2d(device->self, at, pitch, pages + (size_t)from * width, pitch, width,
                      n_layers);
  }
}
