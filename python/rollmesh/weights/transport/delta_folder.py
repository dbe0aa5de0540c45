"""Versions of weights as files in a folder, whole sets or deltas. The generators run on any machine
that sees the folder and may start and stop at any time.

    trainer     writer = DeltaWriter(folder)               generator   reader = DeltaReader(folder)
                writer.publish(state_dict, version)                    version = reader.refresh()
                                                                       gen.sync_weights(reader,
                                                                       version=version)

    0000000000000000040.whole             a whole set: the first, and every `whole_every` versions
    0000000000000000041.after.40.delta    the changes from version 40 to 41

A file is written under another name and then renamed, so that a reader never sees an incomplete
file. A reader applies the deltas after its own version if they lead to the newest one; otherwise it
reads the newest whole set and the deltas after it. The two newest whole sets and all later files
are kept, so that a reader can finish a chain of deltas that it has begun.

A folder has one writer at a time, which holds a lock on the file `.lock` until it ends. Each file
contains the id of its writer, the run. Files have the mode 0600, and a reader accepts only regular
files that belong to its user or root and that others cannot write.
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
from rollmesh.runtime.arguments import existing_folder, integer
from rollmesh.runtime.messages import plain
from rollmesh.weights.transport.delta import (
    START,
    DeltaDecoder,
    DeltaEncoder,
    Header,
    header_size,
    parse_header,
)
from rollmesh.weights.transport.manifest import check_version
from rollmesh.weights.transport.segment import OWNER, LockedFile, lock

_log = logging.getLogger("rollmesh")

FILE = re.compile(r"(\d{19})(?:\.whole|\.after\.(\d{1,19})\.delta)")
TEMPORARY = ".being-written"
LOCK = ".lock"
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
TRIES = 5  # how often a reader lists the folder again if files are removed meanwhile


class _File(NamedTuple):
    version: int
    base: int | None  # None: a whole set
    path: Path


def _files(folder: Path) -> list[_File]:
    """Returns the folder's versions in ascending order, and ignores other files."""
    found = []
    for path in folder.iterdir():
        if match := FILE.fullmatch(path.name):
            found.append(_File(int(match[1]), int(match[2]) if match[2] else None, path))
    return sorted(found, key=lambda file: file.version)


def _is_own(path: Path) -> bool:
    """Whether the path names a regular file of this user."""
    try:
        status = os.lstat(path)
    except OSError:  # the file was removed meanwhile
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


class DeltaWriter:
    """The trainer's side. A folder has one writer at a time; the writer ends with `close`, with its
    `with` block, or with its object or process. The next writer begins with a whole set, whose
    version must exceed those in the folder."""

    def __init__(self, folder: str | Path, *, whole_every: int = 50):
        """whole_every: number of versions from one whole set to the next. Raises StateError if the
        folder has another writer, AuthError if its lock belongs to another user, and ConfigError if
        its file system has no locks."""
        self._folder = existing_folder(folder).absolute()
        self._whole_every = integer("whole_every", whole_every, 1, 2**31 - 1)
        self._encoder = DeltaEncoder()
        self._since_whole = 0  # versions published since the last whole set, including it
        self._has_warned = False
        self._lock = LockedFile(self._folder / LOCK)
        self._end = weakref.finalize(self, self._lock.close)
        try:
            self._take_folder()
        except BaseException:
            self.close()
            raise
        there = [file.version for file in _files(self._folder) if _is_own(file.path)]
        self._found = max(there, default=None)  # newest version of earlier writers
        self._clean()

    @property
    def version(self) -> int | None:
        """Number of the version published last; before the first `publish`, the newest version of
        earlier writers."""
        return self._found if self._encoder.version is None else self._encoder.version

    def publish(
        self, source: Mapping[str, Any] | Iterable[tuple[str, Any]], version: int | None = None
    ) -> int:
        """Writes a version and returns its number. version: None takes the next number. Each tensor
        is copied before the next one is read.

        Raises the errors of DeltaEncoder.encode, OSError (such as a full disk), and StateError (the
        writer is closed). An error leaves the folder and the writer unchanged, and the call may be
        repeated. After an interrupt, the property `version` shows whether the version was
        published. If old files cannot be removed, a warning is logged to the logger `rollmesh`, and
        the next call tries again.
        """
        if self._lock.descriptor < 0:
            raise StateError(
                f"{plain(self._folder)}: expected an open writer of this process, got one that was "
                "closed or is another process's"
            )
        if not self._holds_lock():
            raise StateError(
                f"{plain(self._lock.path)}: expected the file that this writer has locked, "
                "got another or none; the folder was begun again: make a new DeltaWriter"
            )
        version = check_version(version, self.version)
        if any(file.version == version for file in _files(self._folder)):
            raise VersionError(
                f"{plain(self._folder)}: expected no file of version {version}, got one; "
                "publish a higher version"
            )
        encoder, path = self._encoder, None
        before = encoder.last, self._since_whole
        temporary = self._folder / f"{version:019d}.{secrets.token_hex(4)}{TEMPORARY}"
        try:
            message = encoder.encode(source, version, whole=self._since_whole >= self._whole_every)
            self._since_whole = 1 if encoder.base is None else self._since_whole + 1
            kind = "whole" if encoder.base is None else f"after.{encoder.base}.delta"
            path = self._folder / f"{version:019d}.{kind}"
            self._write(temporary, message)
            os.rename(temporary, path)
        except BaseException:
            if path is None or not os.path.lexists(path):
                encoder.last, self._since_whole = before
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        self._clean()
        return version

    def close(self) -> None:
        """Releases the folder for another writer. The versions stay in it."""
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
        """Whether the file that this writer has locked is still in the folder."""
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
        """Removes this user's old versions and the temporary files of interrupted or killed
        writers."""
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
    """Opens the file of a version. Raises FormatError unless it is a regular file, and AuthError if
    it belongs to another user."""
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
    """Returns the header of a version, checked against the name and size of its file."""
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
    """The generator's side: a mapping of the tensors of the version that `refresh` reached, for
    Generator.sync_weights. It only reads the folder."""

    def __init__(self, folder: str | Path):
        super().__init__()
        self._folder = existing_folder(folder).absolute()

    def refresh(self) -> int:
        """Reads the newest version of the folder and returns its number. Applies the deltas after
        its own version, or reads a whole set.

        Raises NotSyncedError (the folder has no whole set, or does not exist), FormatError (a file
        is damaged or not a regular file, and there is no newer whole set; the version reached so
        far stays, and the next call reads the next whole set), AuthError (a file belongs to another
        user, or others may write it), VersionError (another run has begun the folder again),
        CapacityError (too little memory for a whole set), StateError (a sync is reading this
        version), and OSError (the folder cannot be read)."""
        with self._guard:
            self._require_unread(f"version {self.version}")
            for _ in range(TRIES):
                with suppress(FileNotFoundError):  # a file was removed: a newer set exists
                    return self._reach()
        if not self._folder.is_dir():
            raise NotSyncedError(f"{plain(self._folder)}: expected a folder, got none")
        raise FormatError(
            f"{plain(self._folder)}: expected files that stay while they are read, got files that "
            "were removed; is there more than one writer?"
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
            if not (rest := self._from_whole(files)):
                raise
            for file in rest:
                self._take(file)
        if self.version is None:
            raise NotSyncedError(f"{plain(self._folder)}: expected a whole set, got none yet")
        return self.version

    def _require_own_run(self, files: list[_File]) -> None:
        """Raises VersionError if this reader's version in the folder is of another run, or if all
        versions in the folder are of other runs."""
        if files and self.version is not None and self.version not in {f.version for f in files}:
            raise VersionError(
                f"{plain(self._folder)}: expected version {self.version}, which is served, or a "
                f"newer whole set, got version {files[-1].version} as the newest; "
                "the folder was begun again: make a new DeltaReader"
            )
        for file in files:
            if file.version != self.version:
                continue
            with suppress(FormatError):  # the file was damaged after it was read
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
                self._apply(header, memoryview(stream.read(header.bytes)))
        except FormatError as error:
            raise FormatError(f"{plain(file.path)}: {error}") from error

    @staticmethod
    def _chain(files: list[_File], version: int | None) -> list[_File]:
        """Returns the chain of deltas after a version, each against the one before."""
        chain = []
        for file in files:
            if version is not None and file.base == version:
                chain.append(file)
                version = file.version
        return chain

    def _from_whole(self, files: list[_File]) -> list[_File]:
        """Returns the newest whole set that is newer than this reader's version, and the deltas
        after it."""
        wholes = [
            file
            for file in files
            if file.base is None and (self.version is None or file.version > self.version)
        ]
        return [wholes[-1], *self._chain(files, wholes[-1].version)] if wholes else []
