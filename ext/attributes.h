// attributes.h: a C struct from the attributes of a Python object, or a dict of a C struct, by a
// table with one line a field.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "core.h"

typedef enum rm_attribute_type {
  RM_ATTR_BOOL, // an int that gets the object's truth
  RM_ATTR_INT,
  RM_ATTR_I32,
  RM_ATTR_I64,
  RM_ATTR_U64,
  RM_ATTR_F32, // rounded to nearest even, whatever the caller's mode is
  RM_ATTR_F64,
  RM_ATTR_TEXT // const char *, NULL for None; a view of the attribute's value
} rm_attribute_type;

typedef struct rm_attribute {
  const char *name; // of the attribute, or the dict's key
  rm_attribute_type type; // of the C member
  size_t offset;
} rm_attribute;
#define RM_LENGTH(table) (sizeof(table) / sizeof(table)[0])

// 0, or −1 with the exception set (AttributeError, TypeError; OverflowError where a value does not
// fit its member, ConfigError for a text that is neither str nor None). The values of texts are
// appended to `held`, a list, which keeps the views valid; NULL where the table has none.
int rm_attributes_read(PyObject *module, PyObject *object, const rm_attribute *attributes, size_t n,
                       void *out, PyObject *held);
// A new dict, or NULL.
PyObject *rm_attributes_dict(const void *from, const rm_attribute *attributes, size_t n);
