// comm_object.h: _core.Comm, a Python object that owns this rank's endpoint of a group until an
// engine takes it.
#pragma once

#include "comm/comm.h"
#include "core.h"

// Takes the rm_comm out of `object`, a Comm; the caller owns it and keeps a reference to `object`
// until it has destroyed *out. None sets *out to NULL. Returns 0, or −1 with StateError: not a
// Comm, or one that is closed or in use. relative: as of rm_is.
int rm_comm_take(void *relative, PyObject *object, rm_comm **out);
// Puts it back into `object` when the creation of its new owner has failed.
void rm_comm_put_back(PyObject *object, rm_comm *comm);
