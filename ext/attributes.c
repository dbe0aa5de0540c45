// attributes.c: see attributes.h.
#include "attributes.h"

#include <limits.h>
#include <string.h>

#include "kernels.h"

static int out_of_range(const rm_attribute *attribute, PyObject *value, const char *type) {
  PyErr_Format(PyExc_OverflowError, "%s = %R does not fit %s", attribute->name, value, type);
  return -1;
}

// Rounded to nearest even whatever the caller's mode is: 0.7 must be the same temperature in every thread. volatile keeps the
// conversion between the two calls.
static float to_float(volatile double wide) {
  const uint32_t saved = rm_fp_enter();
  volatile float narrow = (float)wide;
  rm_fp_leave(saved);
  return narrow;
}

static int store_integer(const rm_attribute *attribute, PyObject *value, char *member) {
  const long long wide = PyLong_AsLongLong(value);
  if (wide == -1 && PyErr_Occurred()) return -1;
  switch (attribute->type) {
    case RM_ATTR_INT:
      if (wide < INT_MIN || wide > INT_MAX) return out_of_range(attribute, value, "an int");
      memcpy(member, &(int){(int)wide}, sizeof(int));
      return 0;
    case RM_ATTR_I32:
      if (wide < INT32_MIN || wide > INT32_MAX) return out_of_range(attribute, value, "32 bits");
      memcpy(member, &(int32_t){(int32_t)wide}, sizeof(int32_t));
      return 0;
    default: memcpy(member, &(int64_t){wide}, sizeof(int64_t)); return 0;
  }
}

static int store(const rm_attribute *attribute, PyObject *value, char *member) {
  if (attribute->type == RM_ATTR_BOOL) {
    const int truth = PyObject_IsTrue(value);
    if (truth < 0) return -1;
    memcpy(member, &truth, sizeof truth);
    return 0;
  }
  if (attribute->type == RM_ATTR_F32 || attribute->type == RM_ATTR_F64) {
    const double wide = PyFloat_AsDouble(value);
    if (wide == -1.0 && PyErr_Occurred()) return -1;
    if (attribute->type == RM_ATTR_F64) {
      memcpy(member, &wide, sizeof wide);
      return 0;
    }
    const float narrow = to_float(wide);
    memcpy(member, &narrow, sizeof narrow);
    return 0;
  }
  PyObject *integer = PyNumber_Index(value);
  if (!integer) return -1;
  int failed;
  if (attribute->type == RM_ATTR_U64) {
    const unsigned long long wide = PyLong_AsUnsignedLongLong(integer);
    failed = wide == ULLONG_MAX && PyErr_Occurred();
    if (!failed) memcpy(member, &(uint64_t){wide}, sizeof(uint64_t));
  } else {
    failed = store_integer(attribute, integer, member);
  }
  Py_DECREF(integer);
  return failed ? -1 : 0;
}

int rm_attributes_read(PyObject *object, const rm_attribute *attributes, size_t n_attributes, void *out) {
  for (size_t i = 0; i < n_attributes; i++) {
    PyObject *value = PyObject_GetAttrString(object, attributes[i].name);
    if (!value) return -1;
    const int failed = store(&attributes[i], value, (char *)out + attributes[i].offset);
    Py_DECREF(value);
    if (failed) return -1;
  }
  return 0;
}
