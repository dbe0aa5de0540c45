// spec.h: converts a model spec from Python to C.
#pragma once

#include "core.h"

#include "model/spec.h"

// Converts what ModelSpec.engine_values of rollmesh.model.spec returns. Owned: rm_spec_destroy. NULL
// with the exception set.
rm_spec *rm_spec_from_python(PyObject *object);
