// attributes.h: converts the attributes of a Python object to a C struct, and a C struct to a dict,
// by a table with one line per field. Called with the GIL.
#pragma once

#include "base/attribute.h"
#include "core.h"

// A row of a table for a member, whose name in Python is the same or another. The type follows from
// the member's; an int that is a truth value is an RM_ATTRIBUTE of type BOOL.
#define RM_MEMBER(object, member) RM_MEMBER_AS(object, member, member)
#define RM_MEMBER_AS(object, name, member) \
  {#name, \
   _Generic(((object *)NULL)->member, \
       int: RM_ATTR_I32, \
       unsigned: RM_ATTR_I32, \
       int64_t: RM_ATTR_I64, \
       uint64_t: RM_ATTR_U64, \
       float: RM_ATTR_F32, \
       double: RM_ATTR_F64, \
       const char *: RM_ATTR_TEXT), \
   offsetof(object, member)}

// Returns 0, or −1 with the exception set (AttributeError, TypeError; OverflowError if a value does
// not fit its member, ConfigError for a text that is neither str nor None). Appends the values of
// texts to `held`, a list, which keeps the views valid; NULL if the table has no texts.
int rm_attributes_read(PyObject *object, const rm_attribute *attributes, size_t n, void *out,
                       PyObject *held);
// A new dict, or NULL.
PyObject *rm_attributes_dict(const void *from, const rm_attribute *attributes, size_t n);
