// exchange_sizes.c: see exchange_sizes.h. One line for each exchange of shard.c, head.c and moe/.
#include "gpu/exchange_sizes.h"

#include "model/moe/moe.h"

static size_t most(const size_t *sizes, size_t n) {
  size_t largest = 0;
  for (size_t i = 0; i < n; i++) largest = sizes[i] > largest ? sizes[i] : largest;
  return largest;
}

#define MOST(...) \
  most((const size_t[]){__VA_ARGS__}, sizeof((const size_t[]){__VA_ARGS__}) / sizeof(size_t))

// The rows of the longest pass of the static form.
static int64_t run_rows(const rm_spec *spec, const rm_model_options *options) {
  return rm_static_run_rows(spec, &options->rank->mesh, options->dtype, options->max_rows);
}

rm_exchanged rm_exchanged_tp(const rm_spec *spec, const rm_model_options *options) {
  const rm_mesh *mesh = &options->rank->mesh;
  const size_t elem = rm_dtype_bytes(options->dtype), rows = (size_t)options->max_rows,
               hidden = (size_t)spec->hidden_size * elem;
  const size_t heads = (size_t)(spec->n_heads * rm_out_dim(spec)) * elem;
  const size_t inner =
      spec->n_moe_layers < spec->n_layers ? (size_t)spec->intermediate_size * elem : 0;
  const size_t routed = (size_t)(spec->n_moe_layers * spec->top_k) * sizeof(int16_t);
  const size_t logits = (size_t)rm_round_up(spec->vocab_size, RM_VOCAB_BLOCK) * sizeof(float);
  const int shares = mesh->ep > 1 && mesh->ep == mesh->tp,
            stays = options->rank->dispatcher == RM_DISPATCH_LOCAL_ALLREDUCE;
  const size_t slots = shares ? (size_t)(run_rows(spec, options) *
                                         rm_max_choices(spec->top_k, spec->n_experts / mesh->ep))
                              : 0;
  const size_t apart =
      MOST(rows * hidden, rows * heads, rows * inner, (size_t)options->max_out_rows * logits,
           mesh->ep == 1 ? rows * (size_t)(spec->top_k * spec->moe_intermediate_size) * elem : 0,
           stays ? slots * hidden : 0);
  const size_t all = MOST(apart, rows * routed, (size_t)(mesh->tp * options->static_rows) * hidden,
                          shares ? rm_exchanged_ep(spec, options).all : 0);
  return (rm_exchanged){all, apart};
}

rm_exchanged rm_exchanged_ep(const rm_spec *spec, const rm_model_options *options) {
  return (rm_exchanged){
      rm_static_exchanged(spec, &options->rank->mesh, options->dtype, run_rows(spec, options)), 0};
}
