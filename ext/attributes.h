// attributes.h: converts the attributes of a Python object to a C struct, and a C struct to a dict,
// by a table with one line per field. Called with the GIL.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "core.h"

typedef enum rm_attribute_type {
  RM_ATTR_BOOL, // an int, set to the object's truth value
  RM_ATTR_I32, // also an int or an enum
  RM_ATTR_I64,
  RM_ATTR_U64,
  RM_ATTR_F32, // rounded to nearest even in any floating-point environment
  RM_ATTR_F64,
  RM_ATTR_TEXT // const char *, NULL for None; a view of the attribute's value
} rm_attribute_type;

typedef struct rm_attribute {
  const char *name; // of the attribute, and the dict's key
  rm_attribute_type type; // of the C member
  size_t offset;
} rm_attribute;
#define RM_LENGTH(table) (sizeof(table) / sizeof(table)[0])

// Returns 0, or −1 with the exception set (AttributeError, TypeError; OverflowError if a value does
// not fit its member, ConfigError for a text that is neither str nor None). Appends the values of
// texts to `held`, a list, which keeps the views valid; NULL if the table has no texts.
int rm_attributes_read(PyObject *module, PyObject *object, const rm_attribute *attributes, size_t n,
                       void *out, PyObject *held);
// A new dict, or NULL.
PyObject *rm_attributes_dict(const void *from, const rm_attribute *attributes, size_t n);
