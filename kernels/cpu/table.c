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

const rm_kernels RM_CAT(rm_table, RM_ISA) = {
    .isa = RM_STRING(RM_ISA),
    .family = "x86",
    .workspace_bytes = workspace_bytes,
    .embed = RM_FN(embed),
    .gather_rows = RM_FN(gather_rows),
    .rms_norm = RM_FN(rms_norm),
    .gemm = RM_FN(gemm),
    .gemm_swiglu = RM_FN(gemm_swiglu),
    .activate = RM_FN(activate),
    .head_squares = RM_FN(head_squares),
    .qk_rope_kv = RM_FN(qk_rope_kv),
    .attention = RM_FN(attention),
    .router = RM_FN(router),
    .permute = RM_FN(permute),
    .static_dispatch = RM_FN(static_dispatch),
    .combine = RM_FN(combine),
    .lm_head = RM_FN(lm_head),
    .merge_pairs = RM_FN(merge_pairs),
    .sample = RM_FN(sample),
    .top_logprobs = RM_FN(top_logprobs),
    .ranks = RM_FN(ranks),
    .pack = rm_cpu_pack,
};
