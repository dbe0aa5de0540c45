"""Threads for the library's own work. The system may refuse to start one (RLIMIT_NPROC, a pids
cgroup)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from rollmesh.errors import CapacityError

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
REFUSED = "can't start new thread"  # CPython's message


@contextmanager
def starting(what: str) -> Iterator[None]:
    """Raises CapacityError if the system refuses a thread; CPython raises a RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        if str(error) != REFUSED:
            raise
        raise CapacityError(
            f"{what}: expected another thread, got none from the system; "
            "raise the limit on processes (ulimit -u, pids.max) or end others"
        ) from error


async def to_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """asyncio.to_thread. CapacityError if the system refuses the thread."""
    with starting("a call in a thread"):
        return await asyncio.to_thread(function, *args, **kwargs)


def in_threads(function: Callable[[T], R], items: Iterable[T], num_threads: int) -> list[R]:
    """Returns the results of a function for each item, in order, computed by at most `num_threads`
    threads.

    The caller's thread is one of them. It also does the work of threads that the system refuses.
    After an error no further item begins; the first error is raised when all threads have ended.
    """
    todo = list(enumerate(items))[::-1]
    results: dict[int, R] = {}
    errors: list[BaseException] = []
    at_work: list[threading.Lock] = []  # each held by a helper until it ends

    def work() -> None:
        while todo and not errors:
            try:
                index, item = todo.pop()
            except IndexError:  # another thread took the last one
                return
            results[index] = function(item)

    def helper() -> None:
        lock = threading.Lock()
        with lock:
            at_work.append(lock)
            try:
                work()
            except BaseException as error:  # noqa: BLE001 (raised in the caller's thread)
                errors.append(error)

    helpers: list[threading.Thread] = []
    try:
        for _ in range(min(num_threads, len(todo)) - 1):
            # A Ctrl-C inside start() can leave a thread that never ends; exit must not wait for it.
            helpers.append(threading.Thread(target=helper, name="rollmesh-transport", daemon=True))
            try:
                helpers[-1].start()
            except RuntimeError:
                break
        work()
        _join(helpers)
    except BaseException as error:
        errors.append(error)  # before the wait: a helper that starts late begins nothing
        ended = 0
        while ended < len(at_work):  # a join that a Ctrl-C has interrupted cannot be repeated
            try:
                with at_work[ended]:
                    ended += 1
            except BaseException as another:  # noqa: BLE001 (a second Ctrl-C; the first is raised)
                errors.append(another)
        _join(helpers)
        raise
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(results))]


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        if thread.is_alive():
            thread.join()
