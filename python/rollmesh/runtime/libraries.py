"""Finds NVIDIA's libraries, which are loaded on demand: the one that this process has loaded
already, else that of a wheel, else the system's."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from rollmesh.errors import ConfigError


class Library(NamedTuple):
    path: str
    version: tuple[int, int, int]
    source: str  # where it was found, in words

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.version))}, {self.source} ({self.path})"


def find(
    name: str,
    wheel: str,
    packages: dict[str, str],
    version: Callable[[str], int],
    asked: tuple[str, str] | None,
    install: str,
) -> Library:
    """Returns the library to use: the path that was asked for and why, else the first candidate.
    Raises ConfigError if there is none. version: returns 10000 · major + 100 · minor + patch of the
    library at a path; install: the command that installs it."""
    found = asked or next(candidates(name, wheel, packages), None)
    if found is None:
        raise ConfigError(
            f"expected lib{name}.so, loaded, of a wheel or of the system, got none ({install})"
        )
    code = version(found[0])
    return Library(found[0], (code // 10000, code // 100 % 100, code % 100), found[1])


def candidates(name: str, wheel: str, packages: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Paths of lib{name}.so and where each was found, in words, best first. packages: those of the
    wheel, and the file in each's lib."""
    for path in _loaded(f"lib{name}.so"):
        yield path, "which this process has loaded already"
    for package, file in packages.items():
        for path in _of_wheel(package, file):
            yield path, f"of the wheel {wheel}"
    if found := ctypes.util.find_library(name):
        yield found, "the system's"


def _loaded(file: str) -> Iterator[str]:
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    paths = (line.split(maxsplit=5)[5] for line in lines if f"/{file}" in line)
    yield from filter(os.path.isfile, dict.fromkeys(paths))


def _of_wheel(package: str, file: str) -> Iterator[str]:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # no wheel of NVIDIA at all
        return
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "lib" / file
        if path.exists():
            yield str(path)
