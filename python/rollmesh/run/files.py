"""Errors of the files that a run reads and writes, whichever library does it."""

from __future__ import annotations

import fcntl
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollmesh.errors import ConfigError, StateError
from rollmesh.runtime.messages import plain

_locks: set[int] = set()  # descriptors


@contextmanager
def told_as(what: str) -> Iterator[None]:
    """Whatever a library raises of a user's file as a ConfigError: transformers, tokenizers,
    safetensors and jinja2 each have their own."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        name = type(error).__name__
        raise ConfigError(f"{what}, got {name}: {plain(error)}") from error


def expect_file(path: Path) -> None:
    """ConfigError: a pipe or a device, whose reading may never end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError(f"{plain(path)}: expected a file, got a pipe, a socket or a device")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises what the system refuses (a full disk, a missing permission) as an OSError that names a
    file: its own, or else `path`.

    A failed write has no file name in Python, and safetensors and tokenizers, written in Rust,
    raise classes of their own."""
    try:
        yield
    except Exception as error:
        number, has_name = _number_of(error), getattr(error, "filename", None) is not None
        if number is None or has_name:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other runs out of a run folder while this one is in it. StateError: one is there. A
    forked process does not: those of a reward's pool may outlive a run that is killed."""
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
        os.close(descriptor)  # of a run that has ended since, and removed it
    _locks.add(descriptor)
    try:
        with writing(path):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode())
        yield
    finally:
        if descriptor in _locks:  # else this is a fork
            _locks.remove(descriptor)
            with suppress(
                OSError
            ):  # of a disk that is read-only since; nobody is locked out by the file
                path.unlink()
            with suppress(OSError):  # a reward may have closed it
                os.close(descriptor)


def _leave_locks() -> None:
    while _locks:
        with suppress(OSError):
            os.close(_locks.pop())


os.register_at_fork(after_in_child=_leave_locks)


def _number_of(error: Exception) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None
