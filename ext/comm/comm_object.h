// comm_object.h: _core.Comm, a Python object over this rank's end of a group; engine.c takes the ends out of it.
#pragma once

#include "comm/comm.h"
#include "core.h"

// The end that `object` holds, for the engine to own; `object` is empty from now on. None gives NULL. 0, or −1 with the exception
// set: no Comm, or one that is empty.
int rm_comm_take(PyObject *module, PyObject *object, rm_comm **out);
// Back into `object`, when the engine was not made after all.
void rm_comm_put_back(PyObject *object, rm_comm *comm);
