// fields.h: many arrays in one allocation. A table lists pointers and the sizes of their arrays;
// the caller allocates the checked sum, and each array is carved out of it. Size and layout come
// from the same table, so they cannot disagree.
#pragma once

#include <string.h>

#include "base/checked.h"
#include "base/memory.h"

enum { RM_FIELD_ALIGN = 64 }; // a cache line

typedef struct rm_field {
  void *slot; // address of the pointer to set
  size_t count, bytes; // elements, and bytes of one element; a count of 0 sets NULL
} rm_field;
// The row of an array of `count` elements, or of `count` rows of `width` elements.
#define RM_FIELD(array, count) RM_FIELD_ROWS(array, count, 1)
#define RM_FIELD_ROWS(array, count, width) \
  {&(array), (size_t)(count), (size_t)(width) * sizeof *(array)}

// Returns the bytes of an allocation for all fields, 0 when the sum does not fit in a size_t.
static inline size_t rm_fields_bytes(const rm_field *fields, size_t n) {
  size_t total = RM_FIELD_ALIGN;
  for (size_t i = 0; i < n; i++) {
    size_t bytes;
    if (!rm_mul_size(fields[i].count, fields[i].bytes, &bytes) ||
        !rm_add_size(bytes, RM_FIELD_ALIGN, &bytes) || !rm_add_size(total, bytes, &total))
      return 0;
  }
  return total;
}

// Sets all pointers into an allocation of rm_fields_bytes.
static inline void rm_fields_place(const rm_field *fields, size_t n, void *block) {
  const size_t skip = (RM_FIELD_ALIGN - (uintptr_t)block % RM_FIELD_ALIGN) % RM_FIELD_ALIGN;
  char *at = (char *)block + skip;
  for (size_t i = 0; i < n; i++) {
    const size_t bytes = fields[i].count * fields[i].bytes;
    const void *array = fields[i].count ? at : NULL;
    memcpy(fields[i].slot, &array, sizeof array);
    at += (bytes + RM_FIELD_ALIGN - 1) / RM_FIELD_ALIGN * RM_FIELD_ALIGN;
  }
}
