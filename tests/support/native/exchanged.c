// exchanged.c: the memory that a rank of a configuration reserves, computed from the configuration
// alone, without a device or other ranks: the answers of csrc/gpu/exchange_sizes.h, and the
// scratch of a layer's experts (csrc/model/moe/) on a device.
//
//   exchanged HIDDEN HEADS HEAD_DIM INTERMEDIATE MOE_INTERMEDIATE EXPERTS TOP_K LAYERS VOCAB TP DP
//   EP STAYS ROWS OUTS FEW
//
// All layers have experts; bfloat16. Prints rows of a run, bytes over the tp group (all, apart) and
// the experts' (all, apart), of one layer's scratch on the device, and of what it holds besides.
#include "gpu/exchange_sizes.h"

#include <stdio.h>
#include <stdlib.h>

#include "common/tiny.h"
#include "model/moe/moe.h"

enum {
  HIDDEN,
  HEADS,
  HEAD_DIM,
  INTERMEDIATE,
  MOE_INTERMEDIATE,
  EXPERTS,
  TOP_K,
  LAYERS,
  VOCAB,
  TP,
  DP,
  EP,
  STAYS,
  ROWS,
  OUTS,
  FEW,
  N_WORDS
};

static rm_code exchange(void *self, rm_comm_op op, uint64_t sequence, int64_t epoch, double timeout,
                        const rm_block send[], const rm_block recv[], rm_error *err) {
  (void)self, (void)op, (void)sequence, (void)epoch, (void)timeout, (void)send, (void)recv;
  return rm_fail(err, RM_E_STATE, "there are no other ranks");
}

static rm_spec *make_spec(const int64_t *w) {
  enum { MAX_LAYERS = 256, MAX_HALF = 256 };
  static rm_layer_spec layers[MAX_LAYERS];
  static float inv_freq[MAX_HALF];
  rm_error err = RM_ERROR_INIT;
  rm_spec *spec;
  for (int i = 0; i < MAX_LAYERS; i++) layers[i].is_moe = 1;
  for (int i = 0; i < MAX_HALF; i++) inv_freq[i] = 1;
  const rm_spec values = {.vocab_size = w[VOCAB],
                          .hidden_size = w[HIDDEN],
                          .intermediate_size = w[INTERMEDIATE],
                          .n_layers = w[LAYERS],
                          .n_heads = w[HEADS],
                          .n_kv_heads = w[HEADS],
                          .head_dim = w[HEAD_DIM],
                          .n_experts = w[EXPERTS],
                          .top_k = w[TOP_K],
                          .moe_intermediate_size = w[MOE_INTERMEDIATE],
                          .norm_before = 1,
                          .n_groups = 1,
                          .top_groups = 1,
                          .route_scale = 1,
                          .rms_norm_eps = 1e-6f,
                          .rope_scale = 1,
                          .inv_freq = inv_freq,
                          .layers = layers};
  tiny_must(rm_spec_create(&values, &spec, &err), &err);
  return spec;
}

int main(int argc, char **argv) {
  int64_t w[N_WORDS];
  rm_error err = RM_ERROR_INIT;
  if (argc != N_WORDS + 1) tiny_die("%d words, wanted %d", argc - 1, N_WORDS);
  for (int i = 0; i < N_WORDS; i++) w[i] = strtoll(argv[i + 1], NULL, 10);
  rm_spec *spec = make_spec(w);
  rm_rank rank = {.mesh = {.tp = (int32_t)w[TP], .dp = (int32_t)w[DP], .ep = (int32_t)w[EP]},
                  .dispatcher = w[STAYS] ? RM_DISPATCH_LOCAL_ALLREDUCE : RM_DISPATCH_ALLTOALL};
  const rm_transport transport = {.waits_in_queue = 1, .exchange = exchange};
  if (w[EP] > 1) tiny_must(rm_comm_create(&transport, 0, (int)w[EP], &rank.ep, &err), &err);
  const rm_model_options options = {.dtype = RM_BF16,
                                    .max_rows = w[ROWS],
                                    .max_out_rows = w[OUTS],
                                    .static_rows = w[FEW],
                                    .rank = &rank};
  const rm_params params = {
      .spec = spec, .placement = rm_placement_of(spec, &rank.mesh, 0), .dtype = RM_BF16};
  rm_device device = rm_device_cpu(rm_kernels_best());
  device.on_host = 0;
  device.alloc_pinned = device.alloc;
  device.free_pinned = device.free;
  device.copy_to_device = device.copy_to_host;
  rm_moe moe;
  rm_field fields[RM_MOE_FIELDS];
  tiny_must(rm_moe_create(&moe, &params, &device, &rank, NULL, NULL, options.max_rows, &err), &err);
  const rm_exchanged tp = rm_exchanged_tp(spec, &options), ep = rm_exchanged_ep(spec, &options);
  printf("%lld %zu %zu %zu %zu %zu %zu\n", (long long)moe.max_rows, tp.all, tp.apart, ep.all,
         ep.apart, rm_fields_bytes(fields, rm_moe_fields(&moe, fields)), rm_moe_bytes(&moe));
  rm_moe_destroy(&moe);
  rm_comm_destroy(rank.ep);
  rm_spec_destroy(spec);
  return 0;
}
