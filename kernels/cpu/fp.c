// fp.c: the floating-point environment of the contract on x86: MXCSR with all exceptions masked,
// nearest even, flush-to-zero and denormals-are-zero. It does not change x87 state, which the
// kernels do not use.
#include <xmmintrin.h>

#include "kernels.h"

enum { MXCSR_CONTRACT = 0x1f80 | 0x8000 | 0x0040 };

uint32_t rm_fp_enter(void) {
  const uint32_t saved = _mm_getcsr();
  if ((saved & ~0x3fu) != MXCSR_CONTRACT) _mm_setcsr(MXCSR_CONTRACT);
  return saved;
}

void rm_fp_leave(uint32_t saved) {
  if ((saved & ~0x3fu) != MXCSR_CONTRACT) _mm_setcsr(saved);
}
