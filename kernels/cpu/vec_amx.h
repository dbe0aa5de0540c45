// vec_amx.h: what a processor with AMX also has: 512-bit lanes. The tiles are panel_amx.h's.
#pragma once

#include "vec_avx512f.h"
