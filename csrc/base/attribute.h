// attribute.h: a member of a struct by name, type and offset, for tables that read, check or export
// structs member by member.
#pragma once

#include <stddef.h>
#include <stdint.h>

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
  const char *name; // in Python
  rm_attribute_type type; // of the C member
  size_t offset;
} rm_attribute;

// A row of a table for a member, whose name in Python is the same or another.
#define RM_ATTRIBUTE(object, type, member) RM_ATTRIBUTE_AS(object, type, member, member)
#define RM_ATTRIBUTE_AS(object, type, name, member) \
  {#name, RM_ATTR_##type, offsetof(object, member)}
