// moe.h: the mixture-of-experts block of one layer, in four steps: route (which experts, with what gates), dispatch (rows
// to where their experts are, sorted by expert), experts (two grouped gemms with SwiGLU between), combine (gate-weighted
// tree sum at the token's home). On one rank dispatch is a permutation in memory; a token dispatcher between ranks takes
// the place of dispatch and combine, and neither route nor experts will notice.
#pragma once

#include "base/fields.h"
#include "model/params.h"

// Scratch of the block, carved by the model for max_rows rows; reused by every layer.
typedef struct rm_moe {
  const rm_spec *spec;          // view
  const rm_kernels *kernels;
  rm_dtype dtype;
  int32_t *ids;                 // [rows][top_k], best first
  float *gates;                 // [rows][top_k]
  int32_t *place;               // [rows][top_k]
  int32_t *group_rows;          // [n_experts + 1]
  void *sorted;                 // T [rows·top_k][hidden] inputs by expert, then outputs by expert
  void *inner;                  // T [rows·top_k][moe_intermediate]
} rm_moe;

enum { RM_MOE_FIELDS = 6 };
void rm_moe_fields(rm_moe *moe, int64_t max_rows, rm_field fields[RM_MOE_FIELDS]);

// x ← block(x), T [rows][hidden]. routed: the chosen ids, row r's at routed + r·routed_stride.
void rm_moe_forward(rm_moe *moe, const rm_ctx *ctx, const rm_layer_params *layer, const void *weights, void *x, int64_t rows,
                    int16_t *routed, int64_t routed_stride);
