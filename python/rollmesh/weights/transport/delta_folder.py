"""Versions of weights in a folder, for generators that come and go, on any machine that sees it: a
file a version, whole or a delta.

    trainer     writer = DeltaWriter(folder)               generator   reader = DeltaReader(folder)
                writer.publish(state_dict, version)                    version = reader.refresh()
                                                                       gen.sync_weights(reader,
                                                                       version=version)

    0000000000000000040.whole             a whole set: the first, and every `whole_every` versions
    0000000000000000041.after.40.delta    the changes from version 40 to 41

A file is written under another name and renamed, so that a reader never sees half of one. A reader
that starts late, or has missed versions, takes the newest whole set and the deltas behind it,
unless the deltas behind its own version lead as far. Files older than the whole set before the
newest are removed: a reader that has begun a chain can still finish it.

The folder belongs to one writer at a time, which holds a lock on its file `.lock` while it lives.
Each file carries the id of its writer, the run. Files have the mode 0600, and a reader takes only
regular files of its user or root without write permission for others.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rollmesh.errors import (
    AuthError,
    ConfigError,
    FormatError,
    NotSyncedError,
    StateError,
    VersionError,
)
from rollmesh.runtime.arguments import integer
from rollmesh.runtime.messages import plain, shown
from rollmesh.weights.transport.delta import (
    START,
    DeltaDecoder,
    DeltaEncoder,
    Header,
    check_version,
    header_size,
    parse_header,
    with_payload,
)
from rollmesh.weights.transport.segment import OWNER, LockedFile, lock

_log = logging.getLogger("rollmesh")

FILE = re.compile(r"(\d{19})(?:\.whole|\.after\.(\d{1,19})\.delta)")
TEMPORARY = ".being-written"
LOCK = ".lock"
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
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
    return Path(folder).absolute()


def _is_own(path: Path) -> bool:
    """Whether the path names a regular file of this user."""
    try:
        status = os.lstat(path)
    except OSError:  # removed meanwhile
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


class DeltaWriter:
    """The trainer's side. A folder has one writer at a time, until `close` or the end of a `with`
    block, of the object or of the process. The next writer begins with a whole set, whose version
    has to exceed those in the folder."""

    def __init__(self, folder: str | Path, *, whole_every: int = 50):
        """StateError: the folder has another writer. AuthError: its lock is another user's.
        ConfigError: its file system has no locks."""
        self._folder, self._whole_every = (
            _checked(folder),
            integer("whole_every", whole_every, 1, 2**31 - 1),
        )
        self._encoder = DeltaEncoder()
        self._since_whole = 0  # versions published since, the whole one included
        self._has_warned = False
        self._lock = LockedFile(self._folder / LOCK)
        self._end = weakref.finalize(self, self._lock.close)
        try:
            self._take_folder()
        except BaseException:
            self.close()
            raise
        there = [file.version for file in _files(self._folder) if _is_own(file.path)]
        self._found = max(there, default=None)  # of earlier writers
        self._clean()

    @property
    def version(self) -> int | None:
        """The number of the version published last, at first the newest of earlier writers."""
        return self._found if self._encoder.version is None else self._encoder.version

    def publish(
        self, source: Mapping[str, Any] | Iterable[tuple[str, Any]], version: int | None = None
    ) -> int:
        """Writes a version and returns its number; None: the next one. Each tensor is copied before
        the next one is asked for.

        Errors: of DeltaEncoder.encode; OSError (a full disk); StateError (the writer is closed).
        They leave the folder and the writer as before, and the call may be repeated. After an
        interrupt, the property `version` shows whether the version was published. If old files
        cannot be removed, the logger `rollmesh` has a warning, and the next call tries again.
        """
        if self._lock.descriptor < 0:
            raise StateError(
                f"{plain(self._folder)}: the writer is closed, or belongs to another process"
            )
        if not self._holds_lock():
            raise StateError(
                f"{plain(self._lock.path)}: expected the file that this writer has locked, "
                "got another or none; the folder was begun again: make a new DeltaWriter"
            )
        version = check_version(
            (-1 if self.version is None else self.version) + 1 if version is None else version,
            self.version,
        )
        encoder, since = self._encoder, self._since_whole
        message, new = encoder.made(source, version, whole=since >= self._whole_every)
        kind = "whole" if new.base is None else f"after.{new.base}.delta"
        name = f"{version:019d}.{kind}"
        path, before = self._folder / name, encoder.last
        temporary = self._folder / f"{name}.{secrets.token_hex(4)}{TEMPORARY}"
        if os.path.lexists(path):
            raise VersionError(
                f"{plain(path)}: expected no file of this version, got one; "
                "publish a higher version"
            )
        try:
            self._write(temporary, message)
            encoder.last, self._since_whole = new, 1 if new.base is None else since + 1
            os.rename(temporary, path)  # no Ctrl-C can come between these two lines
        except BaseException:
            if not os.path.lexists(path):
                encoder.last, self._since_whole = before, since
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        self._clean()
        return version

    def close(self) -> None:
        """Leaves the folder to another writer. The versions stay."""
        self._lock.close()
        self._end.detach()

    def __enter__(self) -> DeltaWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _take_folder(self) -> None:
        path = self._lock.path
        try:
            self._lock.open(os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.ELOOP):
                raise AuthError(
                    f"{plain(path)}: expected our own file: {error.strerror}; use another folder"
                ) from error
            raise
        if not _is_own(path):
            raise AuthError(f"{plain(path)}: expected our own regular file; use another folder")
        try:
            is_free = lock(self._lock.descriptor, fcntl.F_WRLCK, OWNER)
        except OSError as error:  # ENOLCK, ENOSYS
            raise ConfigError(
                f"{plain(self._folder)}: expected a file system with locks, got: {error.strerror}; "
                "use another folder"
            ) from error
        if not is_free:
            raise StateError(
                f"{plain(self._folder)}: expected a folder without a DeltaWriter, "
                "got one that is open; close that one, or use another folder"
            )

    def _holds_lock(self) -> bool:
        """Whether the folder still has the file that this writer has locked."""
        try:
            there = os.lstat(self._lock.path)
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(self._lock.descriptor), there)

    @staticmethod
    def _write(path: Path, message: bytes) -> None:
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            os.fchmod(file.fileno(), 0o600)  # regardless of the umask
            file.write(message)
            file.flush()
            os.fsync(file.fileno())

    def _clean(self) -> None:
        """Removes this user's old versions, and what interrupted or killed writers have left."""
        there = [file for file in _files(self._folder) if _is_own(file.path)]
        wholes = [file.version for file in there if file.base is None]
        old = [file.path for file in there if len(wholes) > 1 and file.version < wholes[-2]]
        for path in (*old, *filter(_is_own, self._folder.glob(f"*{TEMPORARY}"))):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                if not self._has_warned:
                    _log.warning("%s: cannot remove this old file: %s", plain(path), error.strerror)
                self._has_warned = True


def _opened(file: _File) -> BinaryIO:
    """Opens a version. FormatError unless it is a regular file, AuthError for another user's."""
    path = plain(file.path)
    try:
        descriptor = os.open(file.path, READ)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            raise AuthError(f"{path}: expected our own file: {error.strerror}") from error
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise FormatError(f"expected a regular file: {error.strerror}") from error
        raise
    try:
        status = os.fstat(descriptor)
        mode = stat.filemode(status.st_mode)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"expected a regular file, got mode {mode}")
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
            raise AuthError(
                f"{path}: expected a file of this user or root without write permission for "
                f"others, got owner {status.st_uid} and mode {mode}"
            )
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _header(file: _File, stream: BinaryIO) -> Header:
    """The header of a version, checked against its file's name and size."""
    size = os.fstat(stream.fileno()).st_size
    start = stream.read(START)
    text = stream.read(header_size(start, size))
    header = parse_header(start, text, size - START - len(text))
    if (header.version, header.base) != (file.version, file.base):
        raise FormatError(
            f"expected version {file.version} after {file.base}, as its name says, "
            f"got {header.version} after {header.base}"
        )
    return header


class DeltaReader(DeltaDecoder):
    """The generator's side: a mapping of the version that refresh found, for
    Generator.sync_weights. Nothing is written to the folder."""

    def __init__(self, folder: str | Path):
        super().__init__()
        self._folder = _checked(folder)

    def refresh(self) -> int:
        """Reaches the newest version of the folder, by the deltas behind its own or from a whole
        set, and returns its number.

        NotSyncedError: the folder lacks a whole set, or is gone. FormatError: a file is damaged or
        not a regular file, without a newer whole set. The version reached so far stays, and the
        next whole set is read. AuthError: a file belongs to another user, or others may write it.
        VersionError: the folder was begun again by another run. CapacityError: no memory
        for a whole set. StateError: a sync reads this version. OSError: the folder cannot be
        read."""
        with self._guard:
            self._require_unread(f"version {self.version}")
            for _ in range(TRIES):
                with suppress(FileNotFoundError):  # removed meanwhile: there is a newer whole set
                    return self._reach()
        if not self._folder.is_dir():
            raise NotSyncedError(f"{plain(self._folder)} is gone")
        raise FormatError(
            f"{plain(self._folder)}: files go away while they are read; is there more than one "
            "writer?"
        )

    def _reach(self) -> int:
        files = _files(self._folder)
        own, fresh = self._chain(files, self.version), self._from_whole(files)
        end = own[-1].version if own else self.version
        starts_anew = bool(fresh) and (end is None or fresh[-1].version > end)
        if not starts_anew:
            self._require_own_run(files)
        try:
            for file in fresh if starts_anew else own:
                self._take(file)
        except FormatError:
            rest = self._from_whole(files)
            if not rest or (self.version is not None and rest[0].version <= self.version):
                raise
            for file in rest:
                self._take(file)
        if self.version is None:
            raise NotSyncedError(f"{plain(self._folder)} has no whole set of weights yet")
        return self.version

    def _require_own_run(self, files: list[_File]) -> None:
        """VersionError if the folder has this reader's version of another run, or only others."""
        if files and self.version is not None and self.version not in {f.version for f in files}:
            raise VersionError(
                f"{plain(self._folder)}: expected version {self.version}, which is served, or a "
                f"newer whole set, got version {files[-1].version} as the newest; "
                "the folder was begun again: make a new DeltaReader"
            )
        for file in files:
            if file.version != self.version:
                continue
            with suppress(FormatError):  # damaged since it was read
                with _opened(file) as stream:
                    header = _header(file, stream)
                if header.run != self.run:
                    raise VersionError(
                        f"{plain(file.path)}: expected run {str(self.run)[:8]} of the version that "
                        f"is served, got run {header.run[:8]}; the folder was begun again: "
                        "make a new DeltaReader"
                    )

    def _take(self, file: _File) -> None:
        try:
            with _opened(file) as stream:
                header = _header(file, stream)
                self._check(header)
                self._apply(with_payload(header, memoryview(stream.read(header.bytes))))
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
        wholes = [
            file
            for file in files
            if file.base is None and (self.version is None or file.version > self.version)
        ]
        return [wholes[-1], *self._chain(files, wholes[-1].version)] if wholes else []
