"""Errors of the files that a run reads and writes, and the lock of its folder."""

from __future__ import annotations

import fcntl
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollmesh.errors import ConfigError, StateError
from rollmesh.runtime.messages import plain

_locks: set[int] = set()  # descriptors


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Raises any error of a library as a ConfigError. transformers, tokenizers, safetensors and
    jinja2 each have their own classes for a wrong file."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise ConfigError(f"{what}, got {type(error).__name__}: {plain(error)}") from error


def expect_file(path: Path) -> None:
    """Raises ConfigError for a pipe or a device, which could block the reader forever."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError(f"{plain(path)}: expected a file, got a pipe, a socket or a device")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises a system error, such as a full disk, as an OSError that names a file; `path` if the
    error names none.

    Python's error of a failed write has no file name. safetensors and tokenizers, which are written
    in Rust, raise their own classes."""
    try:
        yield
    except Exception as error:
        number, has_name = _errno_of(error), getattr(error, "filename", None) is not None
        if number is None or has_name:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file under another name and renames it, so that an error leaves the old file."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write(partial)
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks a run folder. Raises StateError if another run has locked it. Forked processes, such as
    those of a reward's pool, do not hold the lock, since they may outlive a killed run."""
    path = folder / ".lock"
    while True:
        with writing(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(descriptor, 300).decode(errors="replace").strip()
            os.close(descriptor)
            raise StateError(
                f"{plain(folder)}: expected a folder without another run, got one of "
                f"{plain(owner) or 'a run'}"
            ) from error
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            break
        os.close(descriptor)  # the run that made this file has ended and removed it
    _locks.add(descriptor)
    try:
        with writing(path):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode())
        yield
    finally:
        if descriptor in _locks:  # False in a forked process
            _locks.remove(descriptor)
            with suppress(OSError):  # on a read-only disk the file stays, without a lock
                path.unlink()
            with suppress(OSError):  # a reward may have closed it
                os.close(descriptor)


def _release_locks() -> None:
    while _locks:
        with suppress(OSError):
            os.close(_locks.pop())


os.register_at_fork(after_in_child=_release_locks)


def _errno_of(error: Exception) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None
