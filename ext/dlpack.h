// dlpack.h: DLPack's structures: its published C ABI (versions 0.x and 1.x) under rollmesh's names.
#pragma once

#include <stdint.h>

typedef struct dl_device {
  int32_t type, id;
} dl_device;
typedef struct dl_dtype {
  uint8_t code, bits;
  uint16_t lanes;
} dl_dtype;
typedef struct dl_tensor {
  void *data;
  dl_device device;
  int32_t n_dims;
  dl_dtype dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} dl_tensor;
typedef struct dl_versioned {
  uint32_t major, minor;
  void *context;
  void (*deleter)(struct dl_versioned *);
  uint64_t flags;
  dl_tensor tensor;
} dl_versioned;

enum { DL_READ_ONLY = 1 }; // of flags
enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3, DL_CUDA_MANAGED = 13 };
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_COMPLEX = 5, DL_BOOL = 6 };

// The element types of arrays on a device (tensor.c). Weights have one of the first four, in the
// order of rm_src_dtype.
typedef struct rm_element {
  const char *name;
  uint8_t code, bits;
  int type; // NumPy's type number; uint16's for bfloat16
} rm_element;
enum { RM_N_ELEMENTS = 7, RM_N_WEIGHT_ELEMENTS = 4 };
extern const rm_element rm_elements[RM_N_ELEMENTS];
#define RM_WEIGHT_ELEMENTS "bfloat16, float32, float16 or float64"
#define RM_ELEMENTS "bfloat16, float32, float16, float64, int32, int64 or uint8"
