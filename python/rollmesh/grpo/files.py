"""Errors of the files that a run reads and writes, whichever library does it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollmesh.errors import ConfigError
from rollmesh.runtime.messages import plain


@contextmanager
def told_as(what: str) -> Iterator[None]:
    """Whatever a library raises of a user's file as a ConfigError: transformers, tokenizers, safetensors and jinja2 each have their own."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        name = type(error).__name__
        raise ConfigError(f"{what}, got {name}: {plain(error)}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises what the system refuses (a full disk, a missing permission) as an OSError that names a file: its own, or else `path`.

    A failed write has no file name in Python, and safetensors and tokenizers, written in Rust, raise classes of their own."""
    try:
        yield
    except Exception as error:
        number, has_name = _number_of(error), getattr(error, "filename", None) is not None
        if number is None or has_name:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def _number_of(error: Exception) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None
