// vec_amx.h: the lanes of a processor with AMX, which also has 512-bit lanes and vdpbf16ps. Tiles
// are in panel_amx.h.
#pragma once

#include "vec_avx512bf16.h"
