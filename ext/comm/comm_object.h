// comm_object.h: _core.Comm, a Python object over this rank's end of a group; engine.c takes the
// ends out of it.
#pragma once

#include "comm/comm.h"
#include "core.h"

// The rm_comm of `object`, a Comm, for the caller to own; None gives NULL. The caller keeps a
// reference to `object` until it has destroyed *out. 0, or −1 with StateError: no Comm, or one that
// is closed or in use.
int rm_comm_take(PyObject *module, PyObject *object, rm_comm **out);
// Back into `object`, when whatever took it was not made after all.
void rm_comm_put_back(PyObject *object, rm_comm *comm);
