"""The rules of a DeltaWriter's folder: one writer, its runs, its own regular files, bounded sizes
(weights/transport/delta_folder.py). A broken rule raises a typed error, and the version that a
reader has reached stays, bit for bit."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollmesh as rm
from rollmesh.sources import DeltaEncoder, DeltaReader, DeltaWriter

pytest.importorskip("zstandard")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


def state(value: float) -> dict[str, np.ndarray]:
    return {"a": np.full(100, value, np.float32), "b": np.arange(60.0) + value}


def holds(reader: DeltaReader, value: float) -> bool:
    return all(np.array_equal(reader[name], array) for name, array in state(value).items())


def whole(folder: Path, version: int) -> Path:
    return folder / f"{version:019d}.whole"


def in_child(code: Callable[[], None], *, user: int | None = None) -> int:
    """Returns the exit status of a forked child that runs `code`: 1 after an error."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if user is not None:
                os.setgid(user)
                os.setuid(user)
            code()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ------------------------------------------------------------------------------------- one writer
def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with DeltaWriter(tmp_path) as writer:
        writer.publish(state(1), 1)
        (tmp_path / "x.being-written").write_bytes(b"of the first writer")
        with pytest.raises(
            rm.StateError, match=f"{tmp_path}: expected a folder without a DeltaWriter"
        ):
            DeltaWriter(tmp_path)
        assert (tmp_path / "x.being-written").exists()
        writer.publish(state(2))
    with pytest.raises(rm.StateError, match="expected an open writer"):
        writer.publish(state(3))
    with DeltaWriter(tmp_path) as other:
        assert other.version == 2
        assert other.publish(state(3)) == 3
    del other
    gc.collect()
    unnamed = DeltaWriter(tmp_path)
    assert unnamed.version == 3
    del unnamed
    DeltaWriter(tmp_path).close()


def test_a_killed_writers_lock_is_free_and_a_forks_is_not_its_own(tmp_path: Path) -> None:
    """A child of the trainer (a data loader) may outlive it, but it cannot publish or hold the
    lock."""
    script = """
        import os, sys, time
        import numpy as np
        from rollmesh.sources import DeltaWriter

        writer = DeltaWriter(sys.argv[1])
        child = os.fork()
        if child == 0:
            try:
                writer.publish({"a": np.ones(3)})
            except Exception as error:
                print(type(error).__name__, flush=True)
            time.sleep(30)
        time.sleep(1)
        os.kill(os.getpid(), 9)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "StateError\n"
        with pytest.raises(rm.StateError, match="expected a folder without a DeltaWriter"):
            DeltaWriter(tmp_path)
        assert process.wait(20) == -9
        with DeltaWriter(tmp_path) as writer:
            assert writer.publish(state(1)) == 0
        process.stdout.close()


def test_a_folder_that_is_begun_again_under_its_writer(tmp_path: Path) -> None:
    folder = tmp_path / "it"
    folder.mkdir()
    first, reader = DeltaWriter(folder), DeltaReader(folder)
    first.publish(state(1), 1)
    reader.refresh()
    shutil.rmtree(folder)
    folder.mkdir()
    with DeltaWriter(folder) as second:
        second.publish(state(2), 1)
        with pytest.raises(rm.StateError, match="expected the file that this writer has locked"):
            first.publish(state(3), 2)
        with pytest.raises(rm.VersionError, match=r"expected run .* make a new DeltaReader"):
            reader.refresh()
        assert holds(reader, 1)
        second.publish(state(4), 2)  # a delta against the other run's version 1
        with pytest.raises(rm.VersionError):
            reader.refresh()
        assert (reader.version, holds(reader, 1)) == (1, True)
        late = DeltaReader(folder)
        assert (late.refresh(), holds(late, 4)) == (2, True)


def test_a_folder_that_is_begun_again_with_lower_versions(tmp_path: Path) -> None:
    with DeltaWriter(tmp_path) as first:
        first.publish(state(1), 5)
    reader = DeltaReader(tmp_path)
    reader.refresh()
    for path in tmp_path.iterdir():
        path.unlink()
    assert reader.refresh() == 5  # the folder has no newer version yet
    with DeltaWriter(tmp_path) as second:
        second.publish(state(2), 1)
        with pytest.raises(rm.VersionError, match=r"got version 1 as the newest; .* begun again"):
            reader.refresh()
        assert (reader.version, holds(reader, 1)) == (5, True)


def test_a_folder_by_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("it").mkdir()
    with DeltaWriter("it") as writer:
        reader = DeltaReader("it")
        monkeypatch.chdir("/")
        writer.publish(state(1), 1)
        assert (reader.refresh(), holds(reader, 1)) == (1, True)


def test_a_trainer_that_goes_on_has_higher_versions(tmp_path: Path) -> None:
    reader = DeltaReader(tmp_path)
    with DeltaWriter(tmp_path) as first:
        first.publish(state(1), 5)
    reader.refresh()
    run = reader.run
    with DeltaWriter(tmp_path) as second:
        for version in (3, 5):
            with pytest.raises(rm.VersionError, match=f"version {version} does not exceed 5"):
                second.publish(state(2), version)
        assert second.publish(state(2)) == 6
    assert whole(tmp_path, 6).exists()
    assert (reader.refresh(), holds(reader, 2), reader.run == run) == (6, True, False)


def test_a_version_is_never_replaced(tmp_path: Path) -> None:
    """Holds even without a working lock, as on a file system without locks."""
    with DeltaWriter(tmp_path) as writer:
        writer.publish(state(1), 1)
        content = whole(tmp_path, 1).read_bytes()
        shutil.copy(whole(tmp_path, 1), tmp_path / f"{2:019d}.after.1.delta")
        with pytest.raises(rm.VersionError, match="expected no file of version 2, got one"):
            writer.publish(state(2), 2)
        assert writer.version == 1
        assert writer.publish(state(2), 3) == 3
    assert whole(tmp_path, 1).read_bytes() == content


# ------------------------------------------------------------------------------------------ files
def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    """The path may be longer than a socket's address."""
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def make_sparse(path: Path) -> None:
    """Writes the header of a message of 100 TB."""
    message = DeltaEncoder().encode(state(9), 9)
    size = int.from_bytes(message[8:16], "little")
    path.write_bytes(message[: 24 + size])
    os.truncate(path, 10**13)
    path.chmod(0o600)


def make_of_another_version(path: Path) -> None:
    path.write_bytes(DeltaEncoder().encode(state(8), 8))
    path.chmod(0o600)


def make_old(path: Path) -> None:
    path.write_bytes(b"rmdelta1" + DeltaEncoder().encode(state(9), 9)[8:])
    path.chmod(0o600)


def make_huge_header(path: Path) -> None:
    path.write_bytes(b"rmdelta2" + (1 << 27).to_bytes(8, "little") + bytes(8))
    path.chmod(0o600)


ODD = {
    "a pipe": (make_fifo, "expected a regular file"),
    "a socket": (make_socket, "expected a regular file"),
    "a folder": (Path.mkdir, "expected a regular file"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "expected a regular file"),
    "a link to a version": (
        lambda path: path.symlink_to(whole(path.parent, 1)),
        "expected a regular file",
    ),
    "a link to itself": (lambda path: path.symlink_to(path), "expected a regular file"),
    "nothing": (lambda path: path.touch(0o600), "expected a message of DeltaEncoder, got 0 bytes"),
    "a sparse file": (make_sparse, "bytes behind its header, got"),
    "a long header": (make_huge_header, "expected a message of DeltaEncoder"),
    "another version": (
        make_of_another_version,
        "expected version 9 after None, as its name says, got 8",
    ),
    "the format before": (make_old, "expected a delta of format rmdelta2"),
}


@pytest.mark.parametrize("what", ODD)
def test_what_is_no_version(tmp_path: Path, what: str) -> None:
    """The reader refuses it immediately. A newer whole set is accepted, and the writer is not
    disturbed."""
    make, words = ODD[what]
    with DeltaWriter(tmp_path, whole_every=1) as writer:
        writer.publish(state(1), 1)
        reader, late = DeltaReader(tmp_path), DeltaReader(tmp_path)
        reader.refresh()
        make(whole(tmp_path, 9))
        for _ in range(2):
            with pytest.raises(rm.FormatError, match=words):
                reader.refresh()
            with pytest.raises(rm.FormatError, match=words):
                late.refresh()
        assert (reader.version, holds(reader, 1), late.version) == (1, True, None)
        writer.publish(state(10), 10)
        writer.publish(state(11), 11)
    for each in (reader, late):
        assert (each.refresh(), holds(each, 11)) == (11, True)


def test_a_whole_set_that_needs_more_memory_than_there_is(tmp_path: Path) -> None:
    """A few bytes unpack to 4 PB, in a file whose checksums are right."""
    import hashlib
    import json

    zstandard = pytest.importorskip("zstandard")
    from rollmesh.weights.transport.tensors import checksum

    payload = zstandard.ZstdCompressor(level=1).compress(bytes(64))
    rows = [["a", "float32", [10**15], "words", 10**15, [len(payload)], "0" * 16]]
    values = {"run": "x", "base": None, "version": 1, "bytes": len(payload), "tensors": rows}
    header = json.dumps({**values, "sum": checksum(np.frombuffer(payload, np.uint8))}).encode()
    start = (
        b"rmdelta2"
        + len(header).to_bytes(8, "little")
        + hashlib.blake2b(header, digest_size=8).digest()
    )
    whole(tmp_path, 1).write_bytes(start + header + payload)
    whole(tmp_path, 1).chmod(0o600)
    with pytest.raises(
        rm.CapacityError, match=r"version 1: expected .* of free host memory for a whole set, got"
    ):
        DeltaReader(tmp_path).refresh()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_files_are_private(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with DeltaWriter(tmp_path) as writer:
            writer.publish(state(1))
            writer.publish(state(2))
    finally:
        os.umask(before)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode)
        for path in tmp_path.iterdir()
        if path.name != ".lock"
    }
    assert set(modes.values()) == {0o600}
    assert len(modes) == 2
    assert stat.S_IMODE((tmp_path / ".lock").stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize("mode", [0o602, 0o620, 0o666])
def test_a_file_that_others_may_write(tmp_path: Path, mode: int) -> None:
    with DeltaWriter(tmp_path) as writer:
        writer.publish(state(1), 1)
        reader = DeltaReader(tmp_path)
        reader.refresh()
        writer.publish(state(2), 2)
        path = tmp_path / f"{2:019d}.after.1.delta"
        path.chmod(mode)
        with pytest.raises(
            rm.AuthError, match="expected a file of this user or root without write permission"
        ):
            reader.refresh()
        assert (reader.version, holds(reader, 1)) == (1, True)
        path.chmod(0o640)
        assert reader.refresh() == 2


@as_root
@pytest.mark.parametrize("name", [f"{9:019d}.whole", f"{2:019d}.after.1.delta"])
def test_a_file_of_another_user(tmp_path: Path, name: str) -> None:
    tmp_path.chmod(0o1777)
    with DeltaWriter(tmp_path) as writer:
        writer.publish(state(1), 1)
        reader = DeltaReader(tmp_path)
        reader.refresh()
        run = writer._encoder.run
        encoder = DeltaEncoder()
        encoder.run = run
        encoder.encode(state(1), 1)
        (tmp_path / name).write_bytes(
            encoder.encode(state(666), int(name[:19]), whole="whole" in name)
        )
        (tmp_path / name).chmod(0o600)
        os.chown(tmp_path / name, 65534, 65534)
        with pytest.raises(rm.AuthError, match="got owner 65534"):
            reader.refresh()
        assert (reader.version, holds(reader, 1)) == (1, True)


@as_root
def test_a_folder_with_another_users_lock(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    for parent in (tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)
    DeltaWriter(tmp_path).close()
    os.chown(tmp_path / ".lock", 65534, 65534)
    with pytest.raises(rm.AuthError, match=r"\.lock: expected our own"):
        DeltaWriter(tmp_path)
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").symlink_to("/dev/null")
    with pytest.raises(rm.AuthError, match=r"\.lock: expected our own"):
        DeltaWriter(tmp_path)


# ------------------------------------------------------------------------------------ cleaning up
def test_an_old_file_that_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The writer warns once, and removes the file as soon as it can."""
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == whole(tmp_path, 0):
            raise PermissionError(1, "Operation not permitted")
        unlink(path, missing_ok)

    with (
        DeltaWriter(tmp_path, whole_every=1) as writer,
        caplog.at_level(logging.WARNING, "rollmesh"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", refuse)
            for version in range(5):
                assert writer.publish(state(version)) == version
        assert [path.name[:19] for path in sorted(tmp_path.glob("*.whole"))] == [
            f"{v:019d}" for v in (0, 3, 4)
        ]
        assert [record.getMessage() for record in caplog.records] == [
            f"{whole(tmp_path, 0)}: cannot remove this old file: Operation not permitted"
        ]
        writer.publish(state(5))
        assert [path.name[:19] for path in sorted(tmp_path.glob("*.whole"))] == [
            f"{v:019d}" for v in (4, 5)
        ]


def test_what_a_killed_writer_leaves(tmp_path: Path) -> None:
    """The next writer removes the unfinished file; a folder of that name stays."""
    (tmp_path / "y.being-written").mkdir()
    (tmp_path / f"{0:019d}.whole.0badcafe.being-written").write_bytes(b"half")
    with DeltaWriter(tmp_path) as writer:
        writer.publish(state(1))
        assert [path.name for path in tmp_path.glob("*.being-written")] == ["y.being-written"]


# ------------------------------------------------------------------------------------ a generator
def test_a_refresh_while_a_sync_reads(tmp_path: Path) -> None:
    """A sync reads one version to its end; a refresh during the sync raises StateError."""
    from helpers import numpy_state_dict, tiny_config, tiny_spec

    states = [numpy_state_dict(tiny_config(), seed=seed) for seed in range(2)]
    options: dict[str, Any] = {
        "dtype": "float32",
        "threads": 1,
        "kv_cache_gib": 0.001,
        "max_model_len": 32,
    }
    with rm.Generator(tiny_spec(), **options) as gen, DeltaWriter(tmp_path) as writer:
        digests = [gen.sync_weights(one).digest for one in states]
        reader = DeltaReader(tmp_path)
        writer.publish(states[0])
        reader.refresh()
        with reader.lent():
            writer.publish(states[1])
            with pytest.raises(
                rm.StateError, match="version 0: expected no sync that reads it, got 1"
            ):
                reader.refresh()
            assert reader.version == 0
        assert reader.refresh() == 1
        assert gen.sync_weights(reader).digest == digests[1]
