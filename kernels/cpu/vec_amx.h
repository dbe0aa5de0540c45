// vec_amx.h: what a processor with AMX also has: 512-bit lanes and vdpbf16ps. The tiles are
// panel_amx.h's.
#pragma once

#include "vec_avx512bf16.h"
