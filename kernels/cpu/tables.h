// tables.h: the CPU's tables, one per variant that the build made, and the op they all share.
#pragma once

#include "kernels.h"

extern const rm_kernels rm_table_ref, rm_table_avx2;

void rm_cpu_pack(const rm_ctx *, rm_pack_args *);  // pack.c: moves bytes, so one variant serves all
