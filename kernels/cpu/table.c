// table.c: the ops of one fast variant as a table.
#include "tables.h"
#include "variant.h"

static size_t workspace_bytes(const rm_limits *limits) {
  const size_t asked[] = {RM_FN(gemm_workspace)(limits),    RM_FN(attention_workspace)(limits),
                          RM_FN(rope_workspace)(limits),    RM_FN(moe_workspace)(limits),
                          RM_FN(lm_head_workspace)(limits), RM_FN(sample_workspace)(limits)};
  size_t most = 0;
  for (size_t i = 0; i < sizeof asked / sizeof asked[0]; i++)
    most = asked[i] > most ? asked[i] : most;
  return most;
}

#define ENTRY(name, args) .name = RM_FN(name),
#define PLAIN_ENTRY(name, args) .name = rm_##name##_ref,
const rm_kernels RM_CAT(rm_table, RM_ISA) = {
    .isa = RM_STRING(RM_ISA),
    .family = "x86",
    .workspace_bytes = workspace_bytes,
    RM_FAST_OPS(ENTRY) RM_PLAIN_OPS(PLAIN_ENTRY).pack = rm_cpu_pack,
};
