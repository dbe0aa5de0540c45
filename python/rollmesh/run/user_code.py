"""Functions that a configuration names as `module:function`: their import, calls and errors.

Importing and calling such a function runs the user's code: name only functions that you trust.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import os
import sys
import time
import traceback
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
    Sized,
)
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from rollmesh.errors import ConfigError
from rollmesh.runtime.messages import plain, shown

T = TypeVar("T")
MAX_NOTE = 8000  # characters of a traceback, since the text of an exception may be very long
MAX_REWARD = 1e18  # its square fits into a float32
TEXT = (str, bytes, bytearray)  # float() or list() would take these
UNORDERED_OR_TEXT = (*TEXT, Mapping, Set)
PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def imported(
    name: str, folder: Path | None, key: str, built_in: Sequence[str] = ()
) -> Callable[..., Any]:
    """Returns `module:function`, imported from `folder`, the working folder or the Python path.
    Raises ConfigError, which names `key` of the configuration."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        known = f"{', '.join(built_in)} or " if built_in else ""
        raise ConfigError(f'{key}: expected {known}module:function, got "{plain(name)}"')
    extra = [str(p.resolve()) for p in (folder, Path.cwd()) if p is not None]
    sys.path[:0] = extra
    try:
        with naming(f'{key}: importing "{plain(module_name)}"', but=ImportError):
            module = importlib.import_module(module_name)
    except ImportError as e:
        raise ConfigError(f'{key}: cannot import "{plain(module_name)}": {plain(e)}') from e
    finally:
        # Late imports and spawned processes of the module need the folders too. At the end of the
        # path they do not hide the modules of a library.
        for p in extra:
            with suppress(ValueError):  # the module has removed it
                sys.path.remove(p)
        sys.path += [p for p in dict.fromkeys(extra) if p not in sys.path]
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f'{key}: module "{module_name}" has no function "{attribute}"')
    return function  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Call:
    """One call of a user's function."""

    what: str  # in error messages
    function: Callable[..., Any]
    arguments: Callable[[], dict[str, Any]]
    read: Callable[[Any], Any] = lambda returned: returned  # may run code of the user

    @property
    def is_async(self) -> bool:
        """Whether the function is `async def`, or an object whose `__call__` is."""
        function, method = self.function, type(self.function).__call__
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)

    def result(self) -> tuple[Any, float]:
        """Returns what `read` returns, and the seconds that the call took."""
        began = time.perf_counter()
        with naming(self.what):
            value = self.read(self.function(**self.arguments()))
        return value, time.perf_counter() - began

    async def awaited(self) -> tuple[Any, float]:
        """Like result, for an async function."""
        began = time.perf_counter()
        with naming(self.what, but=asyncio.CancelledError):
            value = self.read(await _finished(self.function(**self.arguments())))
        return value, time.perf_counter() - began


class EventLoop:
    """Runs the calls of a run. Its event loop lasts until `close`, so that a client which an async
    function keeps stays usable. Calls come from one thread at a time."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, calls: Sequence[Call]) -> list[tuple[Any, float]]:
        """Returns the result of each call. Calls the functions in order, then awaits the async ones
        together; the first that fails cancels the others."""
        results = {i: call.result() for i, call in enumerate(calls) if not call.is_async}
        if waiting := [i for i in range(len(calls)) if i not in results]:
            names = dict.fromkeys(calls[i].what for i in waiting)
            with naming(", ".join(names), but=ConfigError):
                found = self._runner.run(together([calls[i].awaited() for i in waiting]))
            results |= zip(waiting, found, strict=True)
        return [results[i] for i in range(len(calls))]

    def close(self) -> None:
        self._runner.close()


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results of coroutines that run at the same time. The first error cancels the
    others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _finished(work: Awaitable[T]) -> T:
    """Returns the result. Raises RuntimeError if the work was cancelled although no other call
    failed."""
    try:
        return await work
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        why = RuntimeError("what it awaited was cancelled")
        raise why.with_traceback(error.__traceback__) from None


@contextmanager
def naming(what: str, but: type[BaseException] | tuple[()] = ()) -> Iterator[None]:
    """Raises an exception of the user's code as a ConfigError with the traceback of that code as a
    note. A Ctrl-C gets a note of what ran."""
    try:
        yield
    except but:
        raise
    except KeyboardInterrupt as error:
        if not hasattr(error, "__notes__"):
            error.add_note(f"{what} ran")
        raise
    except BaseException as error:  # SystemExit, asyncio.CancelledError and user classes too
        named = ConfigError(f"{what} raised {type(error).__name__}: {plain(error)}".rstrip(": "))
        trace = error.__traceback__
        while trace is not None and _is_internal(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        if trace is not None or isinstance(error, SyntaxError):
            note = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
            half = MAX_NOTE // 2
            named.add_note(note if len(note) <= MAX_NOTE else f"{note[:half]}\n…\n{note[-half:]}")
        raise named from error


def _is_internal(file: str) -> bool:
    return file.startswith(PACKAGE) or "importlib" in file


def call_rewards(
    event_loop: EventLoop,
    functions: Mapping[str, Callable[..., Any]],
    arguments: Callable[[], dict[str, Any]],
    count: int,
) -> dict[str, tuple[list[float | None], float]]:
    """Returns the values of each reward function for `count` completions, and its seconds. Raises
    ConfigError if a function raised, or did not return one finite number or None for each."""
    read = partial(_listed, count=count)
    calls = [Call(f"reward {name}", f, arguments, read) for name, f in functions.items()]
    found: dict[str, tuple[list[float | None], float]] = {}
    for name, (values, seconds) in zip(functions, event_loop.run(calls), strict=True):
        if isinstance(values, str):
            raise ConfigError(
                f"reward {name}: expected {count} values, one a completion, got {values}"
            )
        found[name] = [_number(value, name, i) for i, value in enumerate(values)], seconds
    return found


def _listed(returned: Any, count: int) -> list[Any] | str:
    """Returns `count` values, or a description of what a reward returned instead. Reads at most one
    value more, since a generator may be endless."""
    if isinstance(returned, UNORDERED_OR_TEXT) or not isinstance(returned, Iterable):
        return f"a {type(returned).__name__}"
    values = list(islice(returned, count + 1))
    if len(values) == count:
        return values
    return str(len(returned) if isinstance(returned, Sized) else len(values))


def _number(value: Any, name: str, i: int) -> float | None:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, TEXT) else float(value)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 (the value's own __float__ may raise anything)
        number = math.nan
    if not abs(number) <= MAX_REWARD:
        raise ConfigError(
            f"reward {name}: completion {i} got {shown(value)}; expected a finite number, or None"
        )
    return number
