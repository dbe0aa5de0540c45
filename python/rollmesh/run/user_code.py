"""Functions of the user's own, which a configuration names as `module:function`: their import,
their errors, their event loop.

The import runs the module, and so does a call: name only your own.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import rollmesh as rm
from rollmesh.runtime.messages import plain

T = TypeVar("T")
PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
MAX_NOTE = 8000  # characters of a traceback, whose exception may hold a megabyte


def imported(
    name: str, folder: Path | None, key: str, built_in: Sequence[str] = ()
) -> Callable[..., Any]:
    """`module:function`, from `folder`, the working folder or the Python path. `key`: of the
    configuration. Raises rm.ConfigError."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        known = f"{', '.join(built_in)} or " if built_in else ""
        raise rm.ConfigError(f'{key}: expected {known}module:function, got "{plain(name)}"')
    what = f'{key}: importing "{plain(module_name)}"'
    extra = [str(p.resolve()) for p in (folder, Path.cwd()) if p is not None]
    sys.path[:0] = extra
    try:
        with naming(what, but=ImportError):
            module = importlib.import_module(module_name)
    except ImportError as e:
        raise rm.ConfigError(f'{key}: cannot import "{plain(module_name)}": {plain(e)}') from e
    finally:
        # Late imports and spawned processes of the module look there too; behind all else, so that
        # no module there hides a library's.
        for p in extra:
            with suppress(ValueError):  # the module has removed it itself
                sys.path.remove(p)
        sys.path += [p for p in dict.fromkeys(extra) if p not in sys.path]
    function = getattr(module, attribute, None)
    if not callable(function):
        raise rm.ConfigError(f'{key}: module "{module_name}" has no function "{attribute}"')
    return function  # type: ignore[no-any-return]


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


class EventLoop:
    """In which a run awaits functions. It lasts until `close`, so that what they keep open between
    two calls, such as an HTTP client, stays usable. One thread at a time makes the calls."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, what: str, works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """The results of all, which are awaited together. The first that fails cancels the
        others."""
        with naming(what, but=rm.ConfigError):
            return self._runner.run(_all(works))

    def close(self) -> None:
        self._runner.close()


async def _all(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def finished(work: Awaitable[T]) -> T:
    """Its result. RuntimeError: it was cancelled, and not because of another's error."""
    try:
        return await work
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        raise RuntimeError("what it awaited was cancelled").with_traceback(
            error.__traceback__
        ) from None


@contextmanager
def naming(what: str, but: type[BaseException] | tuple[()] = ()) -> Iterator[None]:
    """An exception of the user's code becomes a ConfigError, with the traceback of that code as a
    note. A Ctrl-C is told where it came."""
    try:
        yield
    except but:
        raise
    except KeyboardInterrupt as error:
        if not hasattr(error, "__notes__"):
            error.add_note(f"{what} ran")
        raise
    except BaseException as error:  # SystemExit, asyncio.CancelledError and a class of its own too
        named = rm.ConfigError(f"{what} raised {type(error).__name__}: {plain(error)}".rstrip(": "))
        own = error.__traceback__
        while own is not None and _is_ours(own.tb_frame.f_code.co_filename):
            own = own.tb_next
        if own is not None or isinstance(error, SyntaxError):
            note = "".join(traceback.format_exception(type(error), error, own)).rstrip()
            named.add_note(
                note
                if len(note) <= MAX_NOTE
                else f"{note[: MAX_NOTE // 2]}\n…\n{note[-MAX_NOTE // 2 :]}"
            )
        raise named from error


def _is_ours(file: str) -> bool:
    return file.startswith(PACKAGE) or "importlib" in file
