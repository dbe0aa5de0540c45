// check.h: shared by the sources of check.
#pragma once

#include "device.cuh"
#include "rm_cuda.h"
#ifndef RM_SIMT
#include "gpu.h"
#endif

// Compares bits, counts a case of `count` elements, and prints where they differ.
bool same(const char *what, const void *got, const void *want, size_t bytes, int64_t count);

bool check_mma_places(), check_mma_company(uint64_t seed), check_mma_model(uint64_t seed);
