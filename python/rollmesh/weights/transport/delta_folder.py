"""Versions of weights in a folder, for generators that come and go, on any machine that sees it: a file a version, whole or a delta.

    trainer     writer = DeltaWriter(folder)               generator   reader = DeltaReader(folder)
                writer.publish(state_dict, version)                    version = reader.refresh()
                                                                       gen.sync_weights(reader, version=version)

    0000000000000000040.whole             a whole set: the first, and every `whole_every` versions
    0000000000000000041.after.40.delta    the changes from version 40 to 41

A file is written under another name and renamed, so that a reader never sees half of one. A reader that starts late, or has missed
versions, takes the newest whole set and the deltas behind it, unless the deltas behind its own version lead as far. When a whole set is
published, files older than the whole set before it are removed: a reader that has begun a chain can still finish it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rollmesh.errors import ConfigError, FormatError, NotSyncedError
from rollmesh.runtime.arguments import integer
from rollmesh.runtime.messages import plain, shown
from rollmesh.weights.transport.delta import DeltaDecoder, DeltaEncoder, check_version

FILE = re.compile(r"(\d{19})(?:\.whole|\.after\.(\d{1,19})\.delta)")
TEMPORARY = ".being-written"
TRIES = 5  # a reader lists the folder so often while files go away under it


class _File(NamedTuple):
    version: int
    base: int | None  # None: a whole set
    path: Path


def _files(folder: Path) -> list[_File]:
    """By version. Other names are passed over."""
    found = []
    for path in folder.iterdir():
        if match := FILE.fullmatch(path.name):
            found.append(_File(int(match[1]), int(match[2]) if match[2] else None, path))
    return sorted(found, key=lambda file: file.version)


def _checked(folder: str | Path) -> Path:
    if not isinstance(folder, (str, os.PathLike)) or not os.path.isdir(folder):
        raise ConfigError(f"folder: expected a folder that exists, got {shown(str(folder))}")
    return Path(folder)


class DeltaWriter:
    """The trainer's side; one writer a folder at a time. A new one goes on with a whole set, whose version has to exceed those there."""

    def __init__(self, folder: str | Path, *, whole_every: int = 50):
        self._folder, self._whole_every = _checked(folder), integer("whole_every", whole_every, 1, 2**31 - 1)
        self._encoder = DeltaEncoder()
        self._since_whole = 0  # versions published since, the whole one included
        for path in self._folder.glob(f"*{TEMPORARY}"):  # of a writer that was killed
            path.unlink(missing_ok=True)
        there = _files(self._folder)
        self.version: int | None = there[-1].version if there else None

    def publish(self, source: Mapping[str, Any] | Iterable[tuple[str, Any]], version: int | None = None) -> int:
        """Writes a version and returns its number; None: the next one. Errors: of DeltaEncoder.encode; OSError (a full disk). The folder is
        as before then, and the call may be repeated."""
        version = check_version((-1 if self.version is None else self.version) + 1 if version is None else version, self.version)
        message = self._encoder.encode(source, version, whole=self._since_whole >= self._whole_every)
        base = self._encoder.base
        try:
            self._write(self._folder / (f"{version:019d}.whole" if base is None else f"{version:019d}.after.{base}.delta"), message)
        except BaseException:
            self._encoder = DeltaEncoder()  # nobody has the version that it would go on from
            raise
        self.version, self._since_whole = version, 1 if base is None else self._since_whole + 1
        if base is None:
            self._remove_old()
        return version

    def _write(self, path: Path, message: bytes) -> None:
        temporary = path.with_name(path.name + TEMPORARY)
        try:
            with open(temporary, "xb") as file:
                file.write(message)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _remove_old(self) -> None:
        there = _files(self._folder)
        wholes = [file.version for file in there if file.base is None]
        for file in there:
            if len(wholes) > 1 and file.version < wholes[-2]:
                file.path.unlink(missing_ok=True)


class DeltaReader(DeltaDecoder):
    """The generator's side: a mapping of the version that refresh found, for Generator.sync_weights. Nothing is written to the folder."""

    def __init__(self, folder: str | Path):
        super().__init__()
        self._folder = _checked(folder)

    def refresh(self) -> int:
        """Reaches the newest version of the folder, by the deltas behind its own or from a whole set, and returns its number.

        NotSyncedError: the folder has no whole set yet, or is gone. FormatError: a file is damaged, and no newer whole set is there; the
        version reached so far stays, and the next whole set leads on. OSError: the folder cannot be read."""
        for _ in range(TRIES):
            with suppress(FileNotFoundError):  # removed meanwhile: there is a newer whole set
                return self._reach()
        if not self._folder.is_dir():
            raise NotSyncedError(f"{plain(self._folder)} is gone")
        raise FormatError(f"{plain(self._folder)}: files go away while they are read; is there more than one writer?")

    def _reach(self) -> int:
        files = _files(self._folder)
        own, fresh = self._chain(files, self.version), self._from_whole(files)
        end = own[-1].version if own else self.version
        try:
            for file in fresh if fresh and (end is None or fresh[-1].version > end) else own:
                self._apply(file)
        except FormatError:
            rest = self._from_whole(files)
            if not rest or (self.version is not None and rest[0].version <= self.version):
                raise
            for file in rest:
                self._apply(file)
        if self.version is None:
            raise NotSyncedError(f"{plain(self._folder)} has no whole set of weights yet")
        return self.version

    def _apply(self, file: _File) -> None:
        message = file.path.read_bytes()
        try:
            self.apply(message)
        except FormatError as error:
            raise FormatError(f"{plain(file.path)}: {error}") from error

    @staticmethod
    def _chain(files: list[_File], version: int | None) -> list[_File]:
        """The deltas behind a version, each against the one before."""
        chain = []
        for file in files:
            if version is not None and file.base == version:
                chain.append(file)
                version = file.version
        return chain

    def _from_whole(self, files: list[_File]) -> list[_File]:
        """The newest whole set that is newer than the own version, and the deltas behind it."""
        wholes = [file for file in files if file.base is None and (self.version is None or file.version > self.version)]
        return [wholes[-1], *self._chain(files, wholes[-1].version)] if wholes else []

