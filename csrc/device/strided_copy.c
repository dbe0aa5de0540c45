// strided_copy.c: see strided_copy.h.
#include "device/strided_copy.h"

rm_strided rm_strided_of(int n_dims, const int64_t shape[], const int64_t strides[], int64_t each) {
  rm_strided r = {.size = {1, 1, 1, 1}, .width = (size_t)each};
  int at = RM_STRIDED_DIMS; // of the outermost run so far
  int64_t lies_together = each; // bytes from which on the next dim goes on with the run
  for (int i = n_dims - 1; i >= 0; i--) {
    const int64_t step = strides[i] * each;
    if (shape[i] == 1) continue;
    if (at == RM_STRIDED_DIMS && step == lies_together)
      r.width *= (size_t)shape[i], lies_together *= shape[i];
    else if (at < RM_STRIDED_DIMS && step == r.size[at] * r.step[at]) r.size[at] *= shape[i];
    else if (at > 0) at--, r.size[at] = shape[i], r.step[at] = step;
  }
  return r;
}

// The innermost runs go in one two-dimensional copy.
void rm_strided_copy(const rm_device *device, int ordinal, const rm_strided *r, char *to,
                     const char *from) {
  const size_t inner = (size_t)r->size[3], width = r->width;
  for (int64_t i = 0; i < r->size[0]; i++)
    for (int64_t j = 0; j < r->size[1]; j++)
      for (int64_t k = 0; k < r->size[2]; k++, to += inner * width) {
        const char *at = from + i * r->step[0] + j * r->step[1] + k * r->step[2];
        const size_t pitch = inner > 1 ? (size_t)r->step[3] : width;
        if (ordinal == device->ordinal)
          device->copy_2d(device->self, to, width, at, pitch, width, inner);
        else device->copy_2d_from_peer(device->self, to, width, at, ordinal, pitch, width, inner);
      }
}
