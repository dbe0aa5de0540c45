// random_bits.h: the random numbers of the tests of the tensor cores.
#pragma once

#include <cstdint>

namespace {

uint64_t state = 1; // a seed

uint32_t random_bits() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 33) ^ static_cast<uint32_t>(state >> 13);
}

} // namespace
