// dispatch.c: which table this machine runs. An instruction set counts as there when the processor has it and the operating
// system saves its registers (xgetbv), since a kernel under an old hypervisor may hide them. Compiled without any -m flag.
#include <cpuid.h>
#include <stdlib.h>
#include <string.h>

#include "tables.h"

static const char *const NAMES[RM_N_ISA] = {"ref", "avx2", "avx512f", "avx512bf16", "amx"};

const char *rm_isa_name(rm_isa isa) { return isa >= 0 && isa < RM_N_ISA ? NAMES[isa] : "unknown"; }

static uint64_t saved_registers(void) {
  uint32_t lo, hi;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return (uint64_t)hi << 32 | lo;
}

enum { KNOWN = 1, HAS_FMA = 2, HAS_AVX2 = 4 };  // usable: by the processor and the operating system

static int detect(void) {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return KNOWN;
  enum { XMM_AND_YMM = 6 };
  if ((saved_registers() & XMM_AND_YMM) != XMM_AND_YMM || !(c & bit_FMA) || !(c & bit_AVX)) return KNOWN;
  const int avx2 = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
  return KNOWN | HAS_FMA | (avx2 ? HAS_AVX2 : 0);
}

// Asked once: under a hypervisor each cpuid is a trap of some 20 µs. Threads that race here write the same value.
static int features(void) {
  static _Atomic int found;
  if (!found) found = detect();
  return found;
}

const rm_kernels *rm_kernels_for(rm_isa isa) {
  if (isa == RM_ISA_REF) return features() & HAS_FMA ? &rm_table_ref : NULL;
  if (isa == RM_ISA_AVX2) return features() & HAS_AVX2 ? &rm_table_avx2 : NULL;
  return NULL;
}

const rm_kernels *rm_kernels_best(void) {
  const char *word = getenv("RM_ISA");
  int cap = RM_N_ISA - 1;
  if (word && *word) {
    cap = 0;
    while (cap < RM_N_ISA && strcmp(word, NAMES[cap]) != 0) cap++;
    if (cap == RM_N_ISA) return NULL;
  }
  for (int isa = cap; isa >= 0; isa--) {
    const rm_kernels *table = rm_kernels_for((rm_isa)isa);
    if (table) return table;
  }
  return NULL;
}
