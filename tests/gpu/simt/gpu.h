// gpu.h: the part of simt.h that check.cpp calls, on a real GPU: memory that both sides see, and
// waiting.
#pragma once

#include <cstddef>

void simt_order(bool reverse); // the hardware's own, always
void simt_finish(); // until all launches are done; ends the program when one failed
void *simt_buffer(size_t bytes); // managed, filled with 0xff; never freed
