"""Weights from other places: a checkpoint folder, shared memory, a torch.distributed group. Oracle:
the digest and the logits of the same values sent from this process. Bound: zero. Further tests
cover what each source must refuse."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from helpers import numpy_state_dict, tiny_config
from paths import child_environment

import rollmesh as rm
from rollmesh import sources
from rollmesh.weights import safetensors_folder
from rollmesh.weights.transport import manifest, segment

CONFIG = tiny_config(True)
STATE = numpy_state_dict(CONFIG, dtype="float32")
IDS = [[1, 2, 3, 4, 5]]


def generator(dtype: str = "bfloat16") -> rm.Generator:
    return rm.Generator(
        rm.ModelSpec.from_hf(CONFIG), dtype=dtype, max_model_len=32, kv_cache_gib=0.002, threads=1
    )


def words(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """bfloat16 without ml_dtypes: uint16 words under a bfloat16 dtype name, rounded to nearest even
    by hand."""
    bits = {name: x.view(np.uint32) for name, x in state.items()}
    return {
        name: ((b + 0x7FFF + (b >> 16 & 1)) >> 16).astype(np.uint16).view(sources.BF16)
        for name, b in bits.items()
    }


@pytest.fixture(scope="module")
def want() -> str:
    with generator() as gen:
        return str(gen.sync_weights(STATE, cast=True).digest)


def test_bf16_words_are_bfloat16(want: str) -> None:
    state = words(STATE)
    with generator() as gen:
        assert gen.sync_weights(state).digest == want
        plain = {**state, "model.norm.weight": state["model.norm.weight"].view(np.dtype(np.uint16))}
        with pytest.raises(rm.DTypeError, match="uint16"):
            gen.sync_weights(plain)
    assert state["model.norm.weight"][::-1].dtype.metadata == {"rollmesh": "bfloat16"}
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name, x in state.items():
        assert np.array_equal(
            x.view(np.uint16), STATE[name].astype(ml_dtypes.bfloat16).view(np.uint16)
        )


# ----------------------------------------------------------------------------------------- folder
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The state in two files and an index, as transformers saves it."""
    torch = pytest.importorskip("torch")
    save = pytest.importorskip("safetensors.torch").save_file
    names = list(STATE)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i}.safetensors"
        save({name: torch.from_numpy(STATE[name]).bfloat16() for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return tmp_path


def test_a_folder_is_a_source(folder: Path, want: str) -> None:
    with generator() as gen:
        assert gen.sync_weights(sources.SafetensorsFolder(folder)).digest == want
        assert gen.sync_weights(iter(sources.SafetensorsFolder(str(folder)).items())).digest == want
        (folder / safetensors_folder.INDEX).unlink()
        assert gen.sync_weights(sources.SafetensorsFolder(folder)).digest == want
    one = sources.SafetensorsFolder(folder / "model-0.safetensors")
    assert len(one) == (len(STATE) + 1) // 2
    assert set(one) == set(list(STATE)[::2])


def test_ignore_leaves_out_tensors_of_a_folder(folder: Path, want: str) -> None:
    """Tensors are selected by a pattern and by name; a parameter that is left out is missing."""
    torch = pytest.importorskip("torch")
    names = [
        f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in ("rope.sin", "rope.cos")
    ]
    pytest.importorskip("safetensors.torch").save_file(
        {name: torch.ones(4) for name in names}, folder / "model-2.safetensors"
    )
    (folder / safetensors_folder.INDEX).unlink()
    patterns = ("*.rope.sin", names[1], names[3], "absent")
    with generator() as gen:
        with pytest.raises(rm.UnexpectedKeyError, match="4 of the weights: "):
            gen.sync_weights(sources.SafetensorsFolder(folder))
        with pytest.raises(rm.UnexpectedKeyError, match=rf"2 of the weights: {names[1]} "):
            gen.sync_weights(sources.SafetensorsFolder(folder, patterns[:1]))
        report = gen.sync_weights(sources.SafetensorsFolder(folder, ignore=patterns))
        assert (report.digest, report.num_skipped) == (want, 0)
        with pytest.raises(
            rm.MissingKeyError, match=r"1 of the weights: missing: model\.norm\.weight"
        ):
            gen.sync_weights(sources.SafetensorsFolder(folder, (*patterns, "model.norm.*")))
    for bad in ("*", 3, (3,), None):
        with pytest.raises(rm.ConfigError, match="ignore: expected a tuple of names of tensors"):
            sources.SafetensorsFolder(folder, bad)  # type: ignore[arg-type]
    for wrong in (3, None, b"x", np.array(3)):
        with pytest.raises(
            rm.ConfigError, match="path: expected a path of a folder or a file, got"
        ):
            sources.SafetensorsFolder(wrong)  # type: ignore[arg-type]


def test_a_folder_read_without_torch(
    folder: Path, want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ml_dtypes")
    real = safetensors_folder.importlib.util.find_spec
    monkeypatch.setattr(
        safetensors_folder.importlib.util,
        "find_spec",
        lambda name: None if name == "torch" else real(name),
    )
    source = sources.SafetensorsFolder(folder)
    assert isinstance(source["model.norm.weight"], np.ndarray)
    with generator() as gen:
        assert gen.sync_weights(source).digest == want


def test_a_pipe_in_a_folder(folder: Path) -> None:
    """Opening a pipe would block until a writer opens it."""
    for path in folder.glob("*.safetensors"):
        path.unlink()
        os.mkfifo(path)
    with pytest.raises(rm.FormatError, match="expected a regular file, got mode prw"):
        sources.SafetensorsFolder(folder)


@pytest.mark.parametrize("change", ["cut", "written", "replaced", "removed"])
def test_a_file_that_changes_while_it_is_mapped(folder: Path, change: str) -> None:
    """The missing part of the last page reads as zeros, without SIGBUS."""
    source = sources.SafetensorsFolder(folder)
    name = next(iter(source))
    before = source[name].float().numpy().copy()
    file = source._where[name]
    if change == "cut":
        os.truncate(file, 10)
    elif change == "written":
        with open(file, "r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            stream.write(b"1")
        os.utime(file, ns=(1, 1))
    elif change == "replaced":
        (folder / "new").write_bytes(b"")
        (folder / "new").rename(file)
    else:
        file.unlink()
    if change in ("replaced", "removed"):
        assert np.array_equal(source[name].float().numpy(), before)
    else:
        with pytest.raises(rm.FormatError, match="expected the file as it was opened"):
            source[name]


def test_malformed_folders(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    index, file = folder / safetensors_folder.INDEX, folder / "model-0.safetensors"
    good_index, good = index.read_text(), file.read_bytes()

    def malformed(path: Path = folder) -> None:
        with pytest.raises(rm.FormatError):
            dict(sources.SafetensorsFolder(path))

    malformed(empty)
    malformed(empty / "absent.safetensors")
    with pytest.raises(
        rm.FormatError, match=r"^a{200}…: File name too long; expected a checkpoint folder or file$"
    ):
        sources.SafetensorsFolder("a" * 5000)
    for text in (
        "",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": {"a": "../model-0.safetensors"}}',
        '{"weight_map": {"a": 1}}',
    ):
        index.write_text(text)
        malformed()
    index.write_text(good_index.replace("model-1", "model-2"))
    with pytest.raises(
        rm.FormatError, match=r"/model-2\.safetensors: expected a safetensors file, got none$"
    ):
        sources.SafetensorsFolder(folder)
    values = json.loads(good_index)
    values["weight_map"]["absent"] = "model-0.safetensors"
    index.write_text(json.dumps(values))
    malformed()
    index.write_text(good_index)
    header = int.from_bytes(good[:8], "little")
    for data in (
        b"",
        good[:7],
        good[:100],
        good[:-1],
        good + b"\0",
        b"\xff" * 8 + good[8:],
        good[:8] + b"x" * header + good[8 + header :],
    ):
        file.write_bytes(data)
        malformed()
    index.unlink()
    file.write_bytes((folder / "model-1.safetensors").read_bytes())
    malformed()  # every name twice


# ---------------------------------------------------------------------------------- shared memory
@pytest.fixture
def writer() -> Iterator[sources.SharedWriter]:
    with sources.SharedWriter() as made:
        yield made


def test_shared_memory_is_a_source(writer: sources.SharedWriter, want: str) -> None:
    reader = sources.SharedReader(writer.address)
    with pytest.raises(rm.NotSyncedError):
        reader.refresh()
    assert writer.publish(words(STATE)) == 0
    with generator() as gen:
        assert reader.refresh() == reader.version == 0
        assert gen.sync_weights(reader, version=reader.version).digest == want
        other = {name: x * np.float32(1.5) for name, x in STATE.items()}
        assert writer.publish(iter(other.items()), version=7) == 7
        assert gen.sync_weights(reader, version=1).digest == want  # mapped memory stays
        assert reader.refresh() == 7
        second = gen.sync_weights(reader, version=7, cast=True).digest
        assert second == gen.sync_weights(other, cast=True).digest != want
    with pytest.raises(rm.VersionError):
        writer.publish(STATE, version=7)
    held = reader["model.norm.weight"]
    assert not held.flags.writeable
    writer.close()
    assert np.array_equal(held, other["model.norm.weight"])
    with pytest.raises(rm.StateError):
        writer.publish(STATE)
    with pytest.raises(rm.NotSyncedError):
        reader.refresh()


def test_a_reader_of_shared_memory_holds_one_version(writer: sources.SharedWriter) -> None:
    """File descriptors and mappings of versions before the serving version are closed."""
    reader = sources.SharedReader(writer.address)
    path = writer.address.rpartition(":")[0]

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count(path)

    writer.publish(STATE)
    reader.refresh()
    before = held()
    assert before[1] == 1
    for _ in range(20):
        writer.publish(STATE)
        reader.refresh()
        assert reader["model.norm.weight"].size
    assert held() == before


def test_a_forked_child_cannot_publish_or_remove(writer: sources.SharedWriter) -> None:
    writer.publish({"a": np.ones(3)}, 1)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            try:
                writer.publish({"a": np.zeros(3)}, 2)
            except rm.StateError:
                writer.close()
                status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    with sources.SharedReader(writer.address) as reader:
        assert (reader.refresh(), reader["a"].tolist()) == (1, [1, 1, 1])


def test_an_interrupted_refresh(writer: sources.SharedWriter) -> None:
    """The version number is that of the tensors. A kept traceback does not keep the reader
    locked."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before, kept = signal.signal(signal.SIGALRM, interrupt), []
    try:
        with sources.SharedReader(writer.address) as reader:
            for version in range(300):
                writer.publish({"a": np.full(3, float(version))}, version)
                try:
                    signal.setitimer(signal.ITIMER_REAL, 2e-5 + 1e-6 * version)
                    while True:
                        reader.refresh()
                except KeyboardInterrupt as error:
                    kept.append(error)
                assert not reader._guard.locked()
                assert reader.version is None or reader["a"][0] == reader.version
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_shared_memory_takes_torch_tensors(writer: sources.SharedWriter, want: str) -> None:
    torch = pytest.importorskip("torch")
    mixed = {name: torch.nn.Parameter(torch.from_numpy(x).bfloat16()) for name, x in STATE.items()}
    mixed["model.embed_tokens.weight"] = (
        mixed["model.embed_tokens.weight"].detach().t().contiguous().t()
    )

    class Own(torch.Tensor):  # type: ignore[misc]
        """A tensor class of the caller's."""

    mixed["model.norm.weight"] = mixed["model.norm.weight"].detach().as_subclass(Own)
    writer.publish(mixed)
    reader = sources.SharedReader(writer.address)
    reader.refresh()
    with generator() as gen:
        assert gen.sync_weights(reader).digest == want
    for bad in (torch.zeros(3, dtype=torch.int8), np.zeros(3, np.int64), np.zeros(3, ">f4")):
        with pytest.raises(rm.DTypeError):
            writer.publish({"x": bad})
    values = np.arange(3, dtype=np.float32)
    for bad in (
        [1.0],
        np.ma.masked_array(values, values > 1),
        torch.masked.masked_tensor(torch.from_numpy(values), torch.ones(3) > 0),
    ):
        with pytest.raises(
            rm.UnsupportedTensorError,
            match=r"^x: expected .*, got a (list|masked array|masked tensor)",
        ):
            writer.publish({"x": bad})
    assert reader.refresh() == 0


def test_shared_memory_from_another_process(want: str) -> None:
    """The trainer is a separate process; its store disappears when the process ends."""
    program = textwrap.dedent(
        """
        import sys
        from test_sources import STATE, words
        from rollmesh import sources
        with sources.SharedWriter() as writer:
            writer.publish(words(STATE), version=3)
            print(writer.address, flush=True)
            sys.stdin.readline()
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as trainer:
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        address = trainer.stdout.readline().strip()
        reader = sources.SharedReader(address)
        assert reader.refresh() == 3
        trainer.stdin.write("\n")
        trainer.stdin.close()
        assert trainer.wait(60) == 0
        assert not Path(address.rpartition(":")[0]).exists()
        with generator() as gen:
            assert gen.sync_weights(reader).digest == want


@pytest.mark.parametrize(
    "folder", ["/nope", "/dev/null", "a" * 5000], ids=lambda folder: folder[:9]
)
def test_a_store_needs_a_folder(folder: str) -> None:
    with pytest.raises(
        rm.ConfigError, match=rf"^folder: expected a folder that exists, got '{folder[:100]}"
    ):
        sources.SharedWriter(folder)


def test_a_store_is_ours_and_private(tmp_path: Path) -> None:
    with sources.SharedWriter(tmp_path) as writer:
        writer.publish(STATE)
        file = Path(writer.address.rpartition(":")[0])
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert list(tmp_path.iterdir()) == [file]
        for bad in ("", "nothing", str(file), f"{file}:", "\ud800:x", "/a:\ud800", "\0:x", 3, None):
            with pytest.raises(rm.errors.AuthError):
                sources.SharedReader(bad)  # type: ignore[arg-type]
        with pytest.raises(rm.errors.AuthError, match="expected a file of the sender"):
            sources.SharedReader(f"{file}:{'0' * 32}").refresh()
        reader = sources.SharedReader(writer.address)
        file.chmod(0o644)
        with pytest.raises(rm.errors.AuthError, match="rw-r--r--"):
            reader.refresh()
        file.chmod(0o600)
        file.rename(tmp_path / "real")
        file.symlink_to(tmp_path / "real")
        with pytest.raises(rm.errors.AuthError):
            reader.refresh()


def test_a_folder_whose_name_is_not_text(tmp_path: Path) -> None:
    """os.fsdecode makes half of a surrogate pair of a byte that is not UTF-8."""
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    with sources.SharedWriter(folder) as writer:
        writer.publish(STATE, 3)
        with sources.SharedReader(writer.address) as reader:
            assert reader.refresh() == 3


def test_a_writer_that_is_not_closed(tmp_path: Path) -> None:
    """The version disappears when its process ends, but not with a forked child; the next writer
    removes the files of a killed process."""
    program = textwrap.dedent(
        """
        import os, sys
        import numpy as np
        from rollmesh.sources import SharedWriter
        writer = SharedWriter(sys.argv[1])
        writer.publish({"x": np.ones(3, np.float32)})
        if (child := os.fork()) == 0:
            sys.exit()
        os.waitpid(child, 0)
        assert len(os.listdir(sys.argv[1])) == 1
        if sys.argv[2] == "killed":
            os.kill(os.getpid(), 9)
        """
    )
    for how, left in (("ends", 0), ("killed", 1)):
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program, str(tmp_path), how],
            check=how == "ends",
            timeout=60,
        )
        assert len(list(tmp_path.iterdir())) == left
    with sources.SharedWriter(tmp_path) as writer:
        writer.publish({"x": np.ones(3, np.float32)})
        assert len(list(tmp_path.iterdir())) == 2  # it may have been made at this moment
        for path in tmp_path.iterdir():
            os.utime(path, (0, 0))
        writer.publish({"x": np.ones(3, np.float32)})
        assert list(tmp_path.iterdir()) == [Path(writer.address.rpartition(":")[0])]


def test_damaged_stores(writer: sources.SharedWriter) -> None:
    writer.publish(STATE)
    file = Path(writer.address.rpartition(":")[0])
    good = file.read_bytes()
    reader = sources.SharedReader(writer.address)
    reader.refresh()

    def replace(data: bytes) -> None:
        """Replaces the file with a new file: a mapped file must not shrink under its readers."""
        new = file.with_name(file.name + "-new")
        descriptor = os.open(new, os.O_CREAT | os.O_WRONLY, 0o600)
        os.write(descriptor, data)
        os.close(descriptor)
        new.rename(file)

    start = segment.HEAD
    length = int.from_bytes(good[56:64], "little")
    damaged = [b"", good[:10], b"x" + good[1:], good[: start + 5], good[:-200]]
    damaged += [good[:56] + b"\xff" * 8 + good[64:], good[:start] + b"[" + good[start + 1 :]]
    for data in damaged:
        replace(data)
        with pytest.raises((rm.FormatError, rm.errors.AuthError)):
            reader.refresh()
    header = good[start : start + length]
    changes = {
        b'"float32"': [b'"floaty2"'],
        b'"offset": 0': [b'"offset": 8', b'"offset":-1'],
        b'"name"': [b'"nome"'],
    }
    for old, others in changes.items():
        assert old in header
        for new in others:
            replace(good[:start] + header.replace(old, new) + good[start + length :])
            with pytest.raises(rm.FormatError):
                reader.refresh()
    flipped = bytearray(good)
    flipped[-65] ^= 1  # in the last tensor
    replace(bytes(flipped))
    reader.refresh()
    last = list(reader)[-1]
    with pytest.raises(rm.FormatError, match=rf"{last}.*sum"):
        _ = reader[last]
    lenient = sources.SharedReader(writer.address, verify=False)
    lenient.refresh()
    assert lenient[last].shape == STATE[last].shape


@pytest.mark.parametrize(
    ("source", "version", "error"),
    [
        ([("x", np.ones(2)), ("x", np.zeros(2))], None, "DuplicateKeyError"),
        ({5: np.ones(2)}, None, "LimitError"),
        ({None: np.ones(2)}, None, "LimitError"),
        ({"x" * 1025: np.ones(2)}, None, "LimitError"),
        *((source, None, "UnsupportedTensorError") for source in (None, 3, "path", [3], [("x",)])),
        *(
            ({"x": np.ones(2)}, version, "VersionError")
            for version in (2**63, 10**30, 1.5, "7", True, -1, 0)
        ),
    ],
    ids=str,
)
def test_what_no_reader_could_take_is_not_published(
    tmp_path: Path, source: Any, version: Any, error: str
) -> None:
    """Publishing raises a typed error, before it replaces the existing version."""
    with sources.SharedWriter(tmp_path) as writer:
        writer.publish({"x": np.full(3, 7.0)})
        with pytest.raises(getattr(rm.errors, error)):
            writer.publish(source, version)
        reader = sources.SharedReader(writer.address)
        assert (reader.refresh(), writer.version) == (0, 0)
        assert reader["x"].tolist() == [7.0] * 3
        assert writer.publish({"x" * 1024: np.ones(2)}, 2**63 - 1) == reader.refresh()


def test_scalars_and_views_keep_their_shape(tmp_path: Path) -> None:
    state = {
        "scalar": np.array(3.5, np.float32),
        "none": np.ones((0, 3)),
        "turned": np.arange(6.0).reshape(2, 3).T,
    }
    with sources.SharedWriter(tmp_path) as writer:
        writer.publish({**state, "words": np.array(0x3F80, np.uint16).view(sources.BF16)})
        reader = sources.SharedReader(writer.address)
        reader.refresh()
        assert {name: reader[name].shape for name in reader} == {
            "scalar": (),
            "none": (0, 3),
            "turned": (3, 2),
            "words": (),
        }
        assert all(np.array_equal(reader[name], x) for name, x in state.items())


def test_no_room_in_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sources.SharedWriter(tmp_path) as writer:
        writer.publish({"x": np.ones(3, np.float32)})

        def full(descriptor: int, offset: int, size: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(rm.CapacityError, match="No space"):
            writer.publish(STATE)
        reader = sources.SharedReader(writer.address)
        assert reader.refresh() == 0
        assert list(reader) == ["x"]
        assert list(tmp_path.iterdir()) == [Path(writer.address.rpartition(":")[0])]


def test_a_sweep_keeps_a_version_that_replaced_the_one_it_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sources.SharedWriter(tmp_path) as writer, sources.SharedReader(writer.address) as reader:
        writer.publish({"x": np.ones(3)})
        os.utime(writer.address.rpartition(":")[0], (0, 0))
        lock = segment.lock

        def publish_and_lock(*arguments: Any) -> bool:
            monkeypatch.setattr(segment, "lock", lock)
            writer.publish({"x": np.zeros(3)})
            return lock(*arguments)

        monkeypatch.setattr(segment, "lock", publish_and_lock)
        segment._sweep(tmp_path)
        assert reader.refresh() == 1


def test_a_reader_that_reads_one_loan_twice_counts_once(tmp_path: Path) -> None:
    owned = segment.Segment(8, tmp_path)
    one, other = (segment.MappedSegment(owned.path, owned.nonce) for _ in range(2))
    number = owned.lend()
    for _ in range(2):
        with one.reading(number, "it"):
            assert (owned.num_read(), owned.num_reading()) == (0, 1)
        assert (owned.num_read(), owned.num_reading()) == (1, 0)
    with other.reading(number, "it"):
        pass
    assert owned.num_read() == 2
    number = owned.lend()  # a new loan without readers
    for reader, count in ((other, 1), (one, 2)):
        with reader.reading(number, "it"):
            pass
        assert owned.num_read() == count
        reader.close()
    assert owned.num_read() == 2
    owned.close()


def test_refresh_keeps_what_it_has_mapped_until_another_version_comes(tmp_path: Path) -> None:
    with sources.SharedWriter(tmp_path) as writer, sources.SharedReader(writer.address) as reader:
        writer.publish({"x": np.ones(3)})
        reader.refresh()
        mapped = reader._segment
        assert reader.refresh() == 0
        assert reader._segment is mapped
        writer.publish({"x": np.zeros(3)})
        assert (reader.refresh(), reader["x"][0]) == (1, 0)


def test_without_descriptors_or_memory_a_segment_is_a_capacity_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer and the reader both raise CapacityError; the folder keeps only the first
    segment."""
    owned = segment.Segment(8, tmp_path)
    for module, name, number, text in (
        (os, "open", errno.EMFILE, "Too many open files"),
        (segment.mmap, "mmap", errno.ENOMEM, "Cannot allocate"),
    ):

        def fails(*_: Any, number: int = number, **__: Any) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patched:
            patched.setattr(module, name, fails)
            with pytest.raises(rm.CapacityError, match=text):
                segment.Segment(8, tmp_path)
            with pytest.raises(rm.CapacityError, match=text):
                segment.MappedSegment(owned.path, owned.nonce)
    assert list(tmp_path.iterdir()) == [owned.path]
    owned.close()


def test_a_closed_segment_is_unlocked_though_a_child_has_its_descriptor(tmp_path: Path) -> None:
    owned = segment.Segment(8, tmp_path)
    reader = segment.MappedSegment(owned.path, owned.nonce)
    inherited = os.dup(owned._file.descriptor)  # the same open file description, as in a child
    assert reader.is_owned()
    owned.close()
    assert not reader.is_owned()
    os.close(inherited)
    reader.close()


def test_copies_are_read_from_a_read_only_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lent tensors cannot be read from it, because a reader has to lock its byte."""
    with sources.SharedWriter(tmp_path) as writer, sources.SharedReader(writer.address) as reader:
        writer.publish({"x": np.ones(3)})
        system_open = os.open

        def read_only(path: Any, flags: int, *rest: Any) -> int:
            if flags & os.O_ACCMODE != os.O_RDONLY:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return system_open(path, flags, *rest)

        monkeypatch.setattr(os, "open", read_only)
        assert (reader.refresh(), reader["x"][0]) == (0, 1)
        assert reader._segment is not None
        with (
            pytest.raises(rm.ConfigError, match="expected write access"),
            reader._segment.reading(1, "it"),
        ):
            pass
        monkeypatch.undo()


def test_a_new_segment_does_not_wait_for_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(segment, "lock", lambda *_: False)
        with pytest.raises(rm.StateError, match="expected a lock on the new file"):
            segment.Segment(8, tmp_path)
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------- buckets, stream
def test_buckets() -> None:
    entries = [(str(i), np.zeros(i, np.uint8)) for i in (3, 3, 4, 11, 0, 10, 1)]
    got = [[int(name) for name, _ in bucket] for bucket in sources.bucketed(entries, 10)]
    assert got == [[3, 3, 4], [11], [0, 10], [1]]
    assert list(sources.bucketed([], 10)) == []
    for bad in (0, -1):
        with pytest.raises(rm.LimitError):
            next(sources.bucketed(entries, bad))
    for wrong, said in (
        (3, "expected pairs .* got a int"),
        (("x",), "expected pairs"),
        (("x", [1.0]), "^x: expected .* got a list$"),
    ):
        with pytest.raises(rm.UnsupportedTensorError, match=said):
            list(sources.bucketed([wrong], 10))  # type: ignore[list-item]


def test_descriptions_that_lie() -> None:
    entry: dict[str, Any] = {
        "name": "a",
        "dtype": "float32",
        "shape": [2, 3],
        "offset": 0,
        "bytes": 24,
        "sum": "",
    }

    def parsed(**changes: Any) -> Any:
        return manifest.parse(json.dumps({"tensors": [{**entry, **changes}]}).encode(), 64)

    assert parsed().entries["a"].shape == (2, 3)
    lies: list[dict[str, Any]] = [
        {"dtype": "int8"},
        {"dtype": None},
        {"dtype": ["float32"]},
        {"shape": [0, 2**70], "bytes": 0},
        {"shape": [1] * 33, "bytes": 4},
        {"shape": [2, -3]},
        {"shape": [2, 3.0]},
        {"shape": [True, 6]},
        {"shape": [2**62, 2**62]},
        {"shape": 6},
        {"bytes": 23},
        {"bytes": -24},
        {"offset": 64},
        {"offset": 2**70},
        {"offset": 4},
        {"more": 1},
    ]
    for lie in lies:
        with pytest.raises(rm.FormatError):
            parsed(**lie)
    for name in (None, "x" * 2000):
        with pytest.raises(rm.LimitError):
            parsed(name=name)
    for text in (
        b"",
        b"null",
        b"[]",
        b'{"tensors": 3}',
        b'{"tensors": [3]}',
        b"\xff",
        b"[" * 200_000,
    ):
        with pytest.raises(rm.FormatError):
            manifest.parse(text, 64)


@pytest.mark.parametrize("call", [sources.send_weights, sources.receive_weights])
def test_streams_were_removed(call: Any) -> None:
    """The names still exist and raise an error with the replacement."""
    with pytest.raises(rm.ConfigError, match=r"use SharedWriter .*, DeltaWriter .*, or DeltaEnc"):
        call({}, src=0)
