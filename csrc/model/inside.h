// inside.h: the inside of a model, shared by model.c (the walk of a token) and head.c (from hidden states to logits).
#pragma once

#include "model/model.h"
#include "model/moe/moe.h"
#include "model/shard.h"

struct rm_model {
  const rm_params *params;      // view
  const rm_spec *spec;          // view
  const rm_kernels *kernels;
  rm_model_options options;
  int sequence_parallel;        // asked for, and tp > 1
  rm_ctx ctx;
  rm_shard shard;               // owned
  void *block;                  // all that follows
  size_t block_bytes;
  float *cos, *sin;             // [max_positions][head_dim/2]
  char *residual, *x;           // T [max_rows][hidden]
  char *qkv;                    // T [max_rows][(heads + 2·kv_heads)·head_dim] of this rank; then attention's output
  char *q;                      // T [max_rows][heads·head_dim] of this rank
  char *wanted;                 // T [max_rows][hidden] the stream's rows whose output is wanted
  char *inner;                  // T [max_rows][intermediate], where a layer is dense
  rm_moe moe;                   // where one is not
  // where tp > 1
  char *attended;               // T [max_rows][heads·head_dim]
  char *home;                   // T [max_rows][hidden] home rows of a block's output; what arrives while rows are looked up
  int32_t *embed_ids;           // [max_rows]
  int32_t *from_rows;           // [max_rows] of a gather
  int64_t *embed_counts;        // [2·tp]
  // head.c
  float *pairs;                 // [vocabulary blocks][max_out_rows][2]
  float *target_logits;         // [tp][max_out_rows]
  int32_t *local_targets;       // [max_out_rows]
};

enum { RM_HEAD_FIELDS = 6 };
size_t rm_head_fields(rm_model *model, rm_field fields[RM_HEAD_FIELDS]);
