// variant.h: the ops of one fast variant, named after it; table.c gathers them. Each source
// includes this, so that a definition that differs from its slot is an error.
#pragma once

#include "vec.h"

#define RM_DECLARE(name, args) void RM_FN(name)(const rm_ctx *, const args *);
RM_FAST_OPS(RM_DECLARE)
#undef RM_DECLARE

// Workspace that each file's ops ask for, in bytes.
size_t RM_FN(gemm_workspace)(const rm_limits *);
size_t RM_FN(attention_workspace)(const rm_limits *);
size_t RM_FN(rope_workspace)(const rm_limits *);
size_t RM_FN(moe_workspace)(const rm_limits *);
size_t RM_FN(lm_head_workspace)(const rm_limits *);
size_t RM_FN(sample_workspace)(const rm_limits *);
