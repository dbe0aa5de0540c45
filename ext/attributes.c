// attributes.c: see attributes.h.
#include "attributes.h"

#include <string.h>

#include "kernels.h"

// volatile keeps the compiler from moving the conversion out from between the two calls.
static float to_float(volatile double wide) {
  const uint32_t saved = rm_fp_enter();
  volatile float narrow = (float)wide;
  rm_fp_leave(saved);
  return narrow;
}

static int store_integer(const rm_attribute *attribute, PyObject *value, void *member) {
  if (attribute->type == RM_ATTR_U64) {
    *(uint64_t *)member = PyLong_AsUnsignedLongLong(value);
    return PyErr_Occurred() ? -1 : 0;
  }
  const long long wide = PyLong_AsLongLong(value);
  if (wide == -1 && PyErr_Occurred()) return -1;
  if (attribute->type == RM_ATTR_I64) return *(int64_t *)member = wide, 0;
  if (wide < INT32_MIN || wide > INT32_MAX) {
    PyErr_Format(PyExc_OverflowError, "%s: expected a number that fits 32 bits, got %R",
                 attribute->name, value);
    return -1;
  }
  *(int32_t *)member = (int32_t)wide;
  return 0;
}
_Static_assert(sizeof(int) == sizeof(int32_t), "an int or an enum is an RM_ATTR_I32");

static int store_text(const rm_attribute *attribute, PyObject *value, const char **member) {
  Py_ssize_t length = 0;
  *member = PyUnicode_Check(value) ? PyUnicode_AsUTF8AndSize(value, &length) : NULL;
  if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_UnicodeError)) return -1;
  PyErr_Clear();
  if (value == Py_None || (*member && strlen(*member) == (size_t)length)) return 0;
  return rm_refuse(RM_E_CONFIG, "%s: expected %s, got %R", attribute->name,
                   PyUnicode_Check(value) ? "UTF-8 text without NUL" : "str or None", value);
}

static int store(const rm_attribute *attribute, PyObject *value, void *member, PyObject *held) {
  switch (attribute->type) {
    case RM_ATTR_BOOL: return (*(int *)member = PyObject_IsTrue(value)) < 0 ? -1 : 0;
    case RM_ATTR_TEXT:
      return store_text(attribute, value, member) ? -1 : PyList_Append(held, value);
    case RM_ATTR_F32:
      *(float *)member = to_float(PyFloat_AsDouble(value));
      return PyErr_Occurred() ? -1 : 0;
    case RM_ATTR_F64: *(double *)member = PyFloat_AsDouble(value); return PyErr_Occurred() ? -1 : 0;
    default: break;
  }
  RM_OWNED *integer = PyNumber_Index(value);
  return integer ? store_integer(attribute, integer, member) : -1;
}

int rm_attributes_read(PyObject *object, const rm_attribute *attributes, size_t n, void *out,
                       PyObject *held) {
  for (size_t i = 0; i < n; i++) {
    RM_OWNED *value = PyObject_GetAttrString(object, attributes[i].name);
    if (!value || store(&attributes[i], value, (char *)out + attributes[i].offset, held)) return -1;
  }
  return 0;
}

static PyObject *value_of(rm_attribute_type type, const void *member) {
  switch (type) {
    case RM_ATTR_BOOL: return PyBool_FromLong(*(const int *)member);
    case RM_ATTR_I32: return PyLong_FromLong(*(const int32_t *)member);
    case RM_ATTR_I64: return PyLong_FromLongLong(*(const int64_t *)member);
    case RM_ATTR_U64: return PyLong_FromUnsignedLongLong(*(const uint64_t *)member);
    case RM_ATTR_F32: return PyFloat_FromDouble((double)*(const float *)member);
    case RM_ATTR_F64: return PyFloat_FromDouble(*(const double *)member);
    default: return Py_BuildValue("z", *(const char *const *)member);
  }
}

PyObject *rm_attributes_dict(const void *from, const rm_attribute *attributes, size_t n) {
  PyObject *dict = PyDict_New();
  for (size_t i = 0; dict && i < n; i++)
    rm_dict_put(&dict, attributes[i].name,
                value_of(attributes[i].type, (const char *)from + attributes[i].offset));
  return dict;
}
