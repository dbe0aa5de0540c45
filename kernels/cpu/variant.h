// variant.h: the ops of one fast variant, whose names end with the variant's; table.c makes them a
// table. Each source includes this header, so that a definition that differs from its slot is a
// compile error.
#pragma once

#include "vec.h"

void RM_FN(embed)(const rm_ctx *, const rm_embed_args *);
void RM_FN(gather_rows)(const rm_ctx *, const rm_gather_rows_args *);
void RM_FN(rms_norm)(const rm_ctx *, const rm_rms_norm_args *);
void RM_FN(gemm)(const rm_ctx *, const rm_gemm_args *);
void RM_FN(gemm_swiglu)(const rm_ctx *, const rm_gemm_args *);
void RM_FN(activate)(const rm_ctx *, const rm_activate_args *);
void RM_FN(head_squares)(const rm_ctx *, const rm_head_squares_args *);
void RM_FN(qk_rope_kv)(const rm_ctx *, const rm_qk_rope_kv_args *);
void RM_FN(attention)(const rm_ctx *, const rm_attention_args *);
void RM_FN(router)(const rm_ctx *, const rm_router_args *);
void RM_FN(permute)(const rm_ctx *, const rm_permute_args *);
void RM_FN(static_dispatch)(const rm_ctx *, const rm_static_dispatch_args *);
void RM_FN(combine)(const rm_ctx *, const rm_combine_args *);
void RM_FN(lm_head)(const rm_ctx *, const rm_lm_head_args *);
void RM_FN(merge_pairs)(const rm_ctx *, const rm_merge_pairs_args *);
void RM_FN(sample)(const rm_ctx *, const rm_sample_args *);
void RM_FN(top_logprobs)(const rm_ctx *, const rm_top_logprobs_args *);
void RM_FN(ranks)(const rm_ctx *, const rm_ranks_args *);

// Bytes of workspace that each file's ops need.
size_t RM_FN(gemm_workspace)(const rm_limits *);
size_t RM_FN(attention_workspace)(const rm_limits *);
size_t RM_FN(rope_workspace)(const rm_limits *);
size_t RM_FN(moe_workspace)(const rm_limits *);
size_t RM_FN(lm_head_workspace)(const rm_limits *);
size_t RM_FN(sample_workspace)(const rm_limits *);
