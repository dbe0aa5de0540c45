// variant.h: the ops of one fast variant, whose names end with the variant's; table.c makes them a
// table. Each source includes this header, so that a definition that differs from its slot is a
// compile error.
#pragma once

#include "vec.h"

#define RM_DECLARE(name, args) void RM_FN(name)(const rm_ctx *, const args *);
RM_FAST_OPS(RM_DECLARE)
#undef RM_DECLARE

// Bytes of workspace that each file's ops need.
size_t RM_FN(gemm_workspace)(const rm_limits *);
size_t RM_FN(attention_workspace)(const rm_limits *);
size_t RM_FN(rope_workspace)(const rm_limits *);
size_t RM_FN(moe_workspace)(const rm_limits *);
size_t RM_FN(lm_head_workspace)(const rm_limits *);
size_t RM_FN(sample_workspace)(const rm_limits *);
