// attributes.h: converts the attributes of a Python object to a C struct, and a C struct to a dict,
// by a table with one line per field. Called with the GIL.
#pragma once

#include "base/attribute.h"
#include "core.h"

#define RM_LENGTH(table) (sizeof(table) / sizeof(table)[0])

// Returns 0, or −1 with the exception set (AttributeError, TypeError; OverflowError if a value does
// not fit its member, ConfigError for a text that is neither str nor None). Appends the values of
// texts to `held`, a list, which keeps the views valid; NULL if the table has no texts.
int rm_attributes_read(PyObject *object, const rm_attribute *attributes, size_t n, void *out,
                       PyObject *held);
// A new dict, or NULL.
PyObject *rm_attributes_dict(const void *from, const rm_attribute *attributes, size_t n);
