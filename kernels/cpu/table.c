// table.c: the ops of one fast variant as a table.
#include "tables.h"
#include "variant.h"

static size_t workspace_bytes(const rm_limits *limits) {
  size_t most = 0;
#define TAKE_MOST(file) \
  most = (size_t)rm_max64((int64_t)most, (int64_t)RM_FN(file##_workspace)(limits));
  RM_WORKSPACES(TAKE_MOST)
  return most;
}

#define ENTRY(name, args) .name = RM_FN(name),
#define SHARED_ENTRY(name, args) .name = rm_##name##_ref,
const rm_kernels RM_CAT(rm_table, RM_ISA) = {
    .isa = RM_STRING(RM_ISA),
    .family = "x86",
    .workspace_bytes = workspace_bytes,
    RM_FAST_OPS(ENTRY) RM_SHARED_OPS(SHARED_ENTRY).pack = rm_cpu_pack,
};
