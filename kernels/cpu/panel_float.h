// panel_float.h: a panel of floats for every dtype, multiplied by FMA (dots.h).
#pragma once

#include "dots.h"

VEC int64_t block_words(rm_dtype) { return RM_K_BLOCK; }
#define block_dots fma_block
#define fill_block fma_fill
#define store_probabilities fma_probabilities
