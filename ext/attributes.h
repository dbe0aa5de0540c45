// attributes.h: fills a C struct from the attributes of a Python object by a table, one line a field. Specs, options and
// requests have 10 to 20 attributes each; a table keeps name, type and place together where a format string would not.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "core.h"

typedef enum rm_attribute_type { RM_ATTR_BOOL, RM_ATTR_INT, RM_ATTR_I32, RM_ATTR_I64, RM_ATTR_U64, RM_ATTR_F32, RM_ATTR_F64 } rm_attribute_type;

typedef struct rm_attribute {
  const char *name;             // of the Python attribute
  rm_attribute_type type;       // of the C member; BOOL is an int that gets the object's truth
  size_t offset;
} rm_attribute;

// 0, or −1 with the exception set (AttributeError, TypeError; OverflowError where a value does not fit its member).
int rm_attributes_read(PyObject *object, const rm_attribute *attributes, size_t n_attributes, void *out);
