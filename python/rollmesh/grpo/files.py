"""Errors of what a run writes, whichever library writes it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
