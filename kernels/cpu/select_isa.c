// select_isa.c: chooses the table for this machine, once per process. A variant is usable if
//   1. the processor has it and the operating system saves its registers (for AMX also grants the
//      tiles);
//   2. its instructions run: a virtual machine may advertise instructions that trap, so the check
//      runs under a SIGILL handler;
//   3. its arithmetic is bit-identical to ref's on the inputs of verify.c.
// A measurement of a millisecond chooses the fastest of these, since on some processors vdpbf16ps
// is half as fast as FMA and on others twice as fast. `doctor` shows why a variant is not usable.
//
// Rejected: probing in a child process, because fork in a library that is imported into a process
// with threads, CUDA or MPI is worse than a handler that is installed for milliseconds, handles its
// own thread only and passes other signals on. This file is compiled without any -m flag.
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tables.h"

static const char *const NAMES[RM_N_ISA] = {"ref", "avx2", "avx512f", "avx512bf16", "amx"};
static const rm_kernels *const TABLES[RM_N_ISA] = {&rm_table_ref, &rm_table_avx2, &rm_table_avx512f,
                                                   &rm_table_avx512bf16, &rm_table_amx};

#ifdef RM_EMULATED
enum { EMULATED = 1 };
#else
enum { EMULATED = 0 };
#endif

static pthread_once_t decided = PTHREAD_ONCE_INIT;
static rm_isa_state states[RM_N_ISA];
static char differs[RM_N_ISA][64]; // the reason, for a variant whose arithmetic is wrong

const char *rm_isa_name(rm_isa isa) { return NAMES[isa]; }

// ------------------------------------------------------------------------- features of the machine
// Linux grants the 8 KiB of tile registers to a whole process, when the process requests them.
static int may_use_tiles(void) {
  enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}

// The compiler's test also tests that the operating system saves the registers.
#define REQUIRE(feature) \
  if (!__builtin_cpu_supports(feature)) \
  return "the processor or its operating system lacks " feature

static const char *lacking(rm_isa isa) {
  REQUIRE("fma");
  if (isa == RM_ISA_REF) return NULL;
  REQUIRE("avx2");
  if (isa == RM_ISA_AVX2 || EMULATED) return NULL;
  REQUIRE("avx512f");
  if (isa == RM_ISA_AVX512F) return NULL;
  REQUIRE("avx512bw");
  REQUIRE("avx512bf16");
  if (isa == RM_ISA_AVX512BF16) return NULL;
  REQUIRE("amx-tile");
  REQUIRE("amx-bf16");
  return may_use_tiles() ? NULL : "the operating system refuses tile registers to this process";
}

// ------------------------------------------------------------------------------- trying a variant
static _Thread_local volatile sig_atomic_t probing;
static _Thread_local sigjmp_buf back;
static struct sigaction before; // the previous handler of SIGILL

static void on_sigill(int signal_number, siginfo_t *info, void *context) {
  if (probing) siglongjmp(back, 1);
  if (before.sa_flags & SA_SIGINFO) {
    before.sa_sigaction(signal_number, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(signal_number);
  } else {
    sigaction(SIGILL, &before, NULL); // the instruction runs again and ends the process
  }
}

static void try_out(rm_isa isa) {
  rm_isa_state *state = &states[isa];
  struct sigaction probe = {.sa_sigaction = on_sigill, .sa_flags = SA_SIGINFO};
  sigset_t trap, mask;
  sigemptyset(&probe.sa_mask);
  sigemptyset(&trap);
  sigaddset(&trap, SIGILL);
  if (sigaction(SIGILL, &probe, &before) != 0) {
    state->refused = "SIGILL cannot be handled, so its instructions cannot be tried";
    return;
  }
  pthread_sigmask(SIG_UNBLOCK, &trap, &mask); // a blocked trap would end the process
  const uint32_t fp = rm_fp_enter();
  if (sigsetjmp(back, 1) == 0) {
    probing = 1;
    const char *wrong = rm_verify(TABLES[isa]);
    if (wrong) {
      snprintf(differs[isa], sizeof differs[isa], "its arithmetic differs from ref's in %s", wrong);
      state->refused = differs[isa];
    } else if (!state->emulated && isa != RM_ISA_REF) {
      rm_measure(TABLES[isa], &state->gflops_one_row, &state->gflops_many_rows);
    }
  } else {
    state->refused = "one of its instructions traps";
  }
  probing = 0;
  rm_fp_leave(fp);
  pthread_sigmask(SIG_SETMASK, &mask, NULL);
  sigaction(SIGILL, &before, NULL);
}

static void decide(void) {
  for (int isa = 0; isa < RM_N_ISA; isa++) {
    states[isa].emulated = EMULATED && isa > RM_ISA_AVX2;
    states[isa].refused = lacking((rm_isa)isa);
    if (!states[isa].refused) try_out((rm_isa)isa);
  }
}

// --------------------------------------------------------------------------------------- who asks
rm_isa_state rm_isa_ask(rm_isa isa) {
  if (isa < 0 || isa >= RM_N_ISA) return (rm_isa_state){.refused = "no such instruction set"};
  pthread_once(&decided, decide);
  return states[isa];
}

const rm_kernels *rm_kernels_for(rm_isa isa) {
  return rm_isa_ask(isa).refused ? NULL : TABLES[isa];
}

// The index of a name; RM_N_ISA: unknown.
static int isa_named(const char *name) {
  int isa = 0;
  while (isa < RM_N_ISA && strcmp(name, NAMES[isa]) != 0) isa++;
  return isa;
}

const rm_kernels *rm_kernels_named(const char *isa) {
  return rm_kernels_for((rm_isa)isa_named(isa));
}

// Both rates count: prefill has many rows, a decode step few.
static double speed(rm_isa isa) {
  const rm_isa_state s = rm_isa_ask(isa);
  if (s.gflops_one_row <= 0 || s.gflops_many_rows <= 0) return 0;
  return 1 / (1 / s.gflops_one_row + 1 / s.gflops_many_rows);
}

const rm_kernels *rm_kernels_best(void) {
  const char *word = getenv("RM_ISA");
  int cap = RM_N_ISA - 1, best = -1;
  if (word && *word) {
    cap = isa_named(word);
    if (cap == RM_N_ISA) return NULL;
    // An emulated variant is chosen by name only.
    if (rm_isa_ask((rm_isa)cap).emulated) return rm_kernels_for((rm_isa)cap);
  }
  for (int isa = cap; isa >= 0; isa--) {
    const rm_isa_state state = rm_isa_ask((rm_isa)isa);
    if (state.refused || state.emulated) continue;
    if (best < 0 || speed((rm_isa)isa) > speed((rm_isa)best)) best = isa;
  }
  return best < 0 ? NULL : TABLES[best];
}
