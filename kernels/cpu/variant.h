// variant.h: the ops of one fast variant, whose names end with the variant's; table.c makes them a
// table. Each source includes this header, so that a definition that differs from its slot is a
// compile error.
#pragma once

#include "vec.h"

#define RM_DECLARE(name, args) void RM_FN(name)(const rm_ctx *, const args *);
RM_FAST_OPS(RM_DECLARE)
#undef RM_DECLARE

// Bytes of workspace that the ops of a file need.
#define RM_WORKSPACES(X) X(gemm) X(attention) X(delta) X(rope) X(moe) X(lm_head) X(sample)
#define RM_DECLARE(file) size_t RM_FN(file##_workspace)(const rm_limits *);
RM_WORKSPACES(RM_DECLARE)
#undef RM_DECLARE
