// exp_order.c: rm_exp over every float32 that is not above 0, in descending order: it never rises.
// So what min_p leaves, and what has a weight, is a prefix of the order by logit (docs/numerics.md
// §7). Exit status 1 and the first place where it rises.
#include <stdint.h>
#include <stdio.h>

#pragma GCC target("avx2,fma")
#pragma GCC optimize("O3")

#include "cpu/scalar.h"

enum { EACH = 4096 };

int main(void) {
  static float e[EACH + 1];
  uint32_t from = 0x80000000u; // −0, then ever larger magnitudes
  const uint32_t end = 0xff800001u; // behind −∞
  e[0] = rm_exp(0.0f);
  for (uint32_t n; from < end; from += n) {
    n = end - from < EACH ? end - from : EACH;
    for (uint32_t i = 0; i < n; i++) e[i + 1] = rm_exp(rm_float(from + i));
    for (uint32_t i = 0; i < n; i++)
      if (!(e[i + 1] <= e[i])) {
        printf("exp(%a) = %a is above %a\n", (double)rm_float(from + i), (double)e[i + 1],
               (double)e[i]);
        return 1;
      }
    e[0] = e[n];
  }
  printf("exp never rises over %u numbers\n", end - 0x80000000u);
  return 0;
}
