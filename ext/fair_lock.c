// fair_lock.c: _core.Turn, a fair lock (threads get it in the order of arrival), and _core.Holding,
// its context manager.
//
// In C, since CPython handles signals when a Python function begins: a Ctrl-C at the first
// instruction of a Python __exit__ would leave the lock held. No signal is handled between the
// block and a C __exit__, nor between a C __enter__ and the block, except from CPython 3.14 on,
// where the Holding's dealloc releases the lock. threading.Lock is not fair: a thread that steps
// the engine in a loop would take it again before a waiting thread wakes up.
//
// All of it holds the GIL except the wait itself. (A free-threaded CPython enables the GIL when
// this module is imported, since the module does not declare that it can do without.)
#include "core.h"

#include "clock.h"

// A caller in the queue; owned by its thread. On the heap, since a daemon thread may be ended by
// the interpreter while it waits.
typedef struct waiter {
  struct waiter *next; // view: who came later
  unsigned long thread;
  PyThread_type_lock gate; // owned; closed until the turn is this one's
} waiter;

typedef struct turn_object {
  PyObject_HEAD
  unsigned long owner; // thread; 0: nobody's
  waiter *first; // view: the queue, oldest first
} turn_object;

typedef struct holding_object {
  PyObject_HEAD
  turn_object *turn; // owned
  PyObject *check; // owned callable, or NULL
  double deadline; // on time.monotonic()'s clock; infinity: none
  int has_turn; // from __enter__ to __exit__
} holding_object;

static waiter **last_of(turn_object *turn) {
  waiter **link = &turn->first;
  while (*link) link = &(*link)->next;
  return link;
}

static int has_taken(const turn_object *turn, unsigned long thread) {
  if (turn->owner == thread) return 1;
  for (const waiter *other = turn->first; other; other = other->next)
    if (other->thread == thread) return 1;
  return 0;
}

static void pass_on(turn_object *turn) {
  waiter *next = turn->first;
  turn->owner = next ? next->thread : 0;
  if (!next) return;
  turn->first = next->next;
  PyThread_release_lock(next->gate);
}

static double seconds_until(double deadline) { return deadline - rm_now(); }

// Waits at the gate until the turn is this thread's, the deadline or an exception of a signal
// handler. 1: it is; 0: too late; −1.
static int wait_at(turn_object *turn, const waiter *mine, double deadline) {
  static const double LONGEST_SECONDS =
      3600; // of one wait: PyThread's longest depends on the platform
  while (turn->owner != mine->thread) {
    const double left = seconds_until(deadline),
                 wait = left < LONGEST_SECONDS ? left : LONGEST_SECONDS;
    PyLockStatus status;
    Py_BEGIN_ALLOW_THREADS
      status =
          PyThread_acquire_lock_timed(mine->gate, wait > 0 ? (PY_TIMEOUT_T)(wait * 1e6) : 0, 1);
    Py_END_ALLOW_THREADS
    if (turn->owner == mine->thread) break;
    if (status == PY_LOCK_INTR && PyErr_CheckSignals()) return -1;
    if (status == PY_LOCK_FAILURE && left <= LONGEST_SECONDS) return 0;
  }
  return 1;
}

static int wait_in_queue(PyObject *module, turn_object *turn, unsigned long thread,
                         double deadline) {
  waiter *mine = PyMem_Calloc(1, sizeof *mine);
  if (!mine || !(mine->gate = PyThread_allocate_lock())) {
    PyMem_Free(mine);
    PyErr_NoMemory();
    return -1;
  }
  mine->thread = thread;
  PyThread_acquire_lock(mine->gate, 0);
  *last_of(turn) = mine;
  const int came = wait_at(turn, mine, deadline);
  if (came < 0 && turn->owner == thread) pass_on(turn); // it came while a signal was handled
  for (waiter **link = &turn->first; *link; link = &(*link)->next) {
    if (*link != mine) continue;
    *link = mine->next;
    break;
  }
  PyThread_free_lock(mine->gate);
  PyMem_Free(mine);
  if (!came)
    PyErr_SetString(rm_state(module)->deadline_error,
                    "the generator was busy in another thread until the deadline");
  return came > 0 ? 0 : -1;
}

static PyObject *holding_enter(PyObject *object, PyObject *ignored) {
  (void)ignored;
  holding_object *self = (holding_object *)object;
  turn_object *turn = self->turn;
  PyObject *module = rm_module_of(object);
  const unsigned long thread = PyThread_get_thread_ident();
  if (has_taken(turn, thread))
    return rm_raise_code(
        module, RM_E_STATE,
        "the generator was called from inside one of its own calls (a callback, weights iterator "
        "or signal handler)");
  if (!turn->owner) turn->owner = thread;
  else if (wait_in_queue(module, turn, thread, self->deadline)) return NULL;
  PyObject *checked = self->check ? PyObject_CallNoArgs(self->check) : Py_NewRef(Py_None);
  if (!checked) pass_on(turn);
  else Py_DECREF(checked);
  self->has_turn = checked != NULL;
  return checked ? Py_NewRef(Py_None) : NULL;
}

static PyObject *holding_exit(PyObject *object, PyObject *error) {
  (void)error;
  holding_object *self = (holding_object *)object;
  if (self->turn->owner != PyThread_get_thread_ident())
    return rm_raise_code(rm_module_of(object), RM_E_STATE,
                         "a turn was given back that this thread does not have");
  self->has_turn = 0;
  pass_on(self->turn);
  Py_RETURN_NONE;
}

RM_TRAVERSE(holding_traverse, holding_object, (PyObject *)self->turn, self->check)

static int holding_clear(PyObject *object) { // not the turn, which dealloc passes on
  Py_CLEAR(((holding_object *)object)->check);
  return 0;
}

static void holding_dealloc(PyObject *object) {
  PyObject_GC_UnTrack(object);
  holding_object *self = (holding_object *)object;
  if (self->has_turn) pass_on(self->turn);
  Py_XDECREF((PyObject *)self->turn);
  Py_XDECREF(self->check);
  rm_object_free(object);
}

static PyObject *turn_take(PyObject *object, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"deadline", "check", NULL};
  PyObject *deadline = Py_None, *check = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OO:take", names, &deadline, &check)) return NULL;
  const double at = deadline == Py_None ? Py_HUGE_VAL : PyFloat_AsDouble(deadline);
  if (at == -1.0 && PyErr_Occurred()) return NULL;
  holding_object *holding = rm_object_make(rm_module_of(object), RM_TYPE_HOLDING);
  if (!holding) return NULL;
  holding->turn = (turn_object *)Py_NewRef(object);
  holding->check = check == Py_None ? NULL : Py_NewRef(check);
  holding->deadline = at;
  return (PyObject *)holding;
}

static PyObject *turn_waiting(PyObject *object, void *ignored) {
  (void)ignored;
  long count = 0;
  for (const waiter *other = ((turn_object *)object)->first; other; other = other->next) count++;
  return PyLong_FromLong(count);
}

static PyObject *turn_is_inside(PyObject *object, void *ignored) {
  (void)ignored;
  return PyBool_FromLong(has_taken((turn_object *)object, PyThread_get_thread_ident()));
}

static PyMethodDef holding_methods[] = {
    {"__enter__", holding_enter, METH_NOARGS, PyDoc_STR("Waits for the turn.")},
    {"__exit__", holding_exit, METH_VARARGS, PyDoc_STR("Passes the turn on.")},
    {0},
};

static PyMethodDef turn_methods[] = {
    {"take", (PyCFunction)(void (*)(void))turn_take, METH_VARARGS | METH_KEYWORDS,
     PyDoc_STR(
         "(deadline=None, check=None): a context manager that holds the turn for a block.\n\n"
         "deadline: on time.monotonic()'s clock. check() is called when the turn has come; where "
         "it raises, the block is not\n"
         "entered. StateError in a thread that has the turn or waits for it, DeadlineError when "
         "it has not come in time.")},
    {0},
};

static PyGetSetDef turn_members[] = {
    {"waiting", turn_waiting, NULL, PyDoc_STR("Threads in the queue."), NULL},
    {"is_inside", turn_is_inside, NULL,
     PyDoc_STR("Whether this thread has the turn or waits for it."), NULL},
    {0},
};

static PyType_Slot holding_slots[] = {
    {Py_tp_dealloc, holding_dealloc},
    {Py_tp_traverse, holding_traverse},
    {Py_tp_clear, holding_clear},
    {Py_tp_methods, holding_methods},
    {Py_tp_doc, "Of Turn.take, for one `with`."},
    {0, NULL},
};
PyType_Spec rm_holding_spec =
    RM_TYPE("Holding", holding_object, RM_GC | RM_MADE_HERE, holding_slots);

static PyType_Slot turn_slots[] = {
    {Py_tp_dealloc, rm_object_free},
    {Py_tp_methods, turn_methods},
    {Py_tp_getset, turn_members},
    {Py_tp_doc,
     "A fair lock: one caller at a time, in the order of arrival; no Ctrl-C can leave it taken."},
    {0, NULL},
};
PyType_Spec rm_turn_spec = RM_TYPE("Turn", turn_object, 0, turn_slots);
