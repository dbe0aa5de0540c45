// gpu.h: the part of simt.h that check.cpp calls, on a real GPU: memory that both sides see, and
// waiting; and the oracle of the family cuda_mma.
#pragma once

#include <cstddef>

void simt_order(bool reverse); // the hardware's own, always
void simt_finish(); // until all launches are done; ends the program when one failed
void *simt_buffer(size_t bytes); // mapped or managed, filled with 0xff; never freed
// Compares the model of the instruction (mma_model.h) with the card in one launch and prints how
// many results differ. If any do, or if RM_MMA_ORACLE=card, the sums of mma_dot.c come from the
// card: one launch for each output. RM_MMA_ORACLE=model keeps the model.
void gpu_choose_mma_oracle();
