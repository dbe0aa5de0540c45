"""When a source is read (weights/transport/tensors.py): sources that reuse the memory of one tensor
for the next, through each path from a trainer to a generator; sources that change or fail while
they are read.

Oracle: the arrays that the source was made from. Bound: 0 differing bits."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import numpy_state_dict, tiny_config, tiny_spec

import rollmesh as rm
from rollmesh.sources import (
    DeltaDecoder,
    DeltaEncoder,
    DeltaReader,
    DeltaWriter,
    SharedReader,
    SharedWriter,
    bucketed,
)
from rollmesh.vllm.trainer import WeightSender
from rollmesh.weights.resharding import AHEAD, Source
from rollmesh.weights.transport import manifest, segment

STATE = numpy_state_dict(tiny_config(), dtype="float32")
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "kv_cache_gib": 0.001,
    "max_model_len": 32,
}


class Reused(Mapping[str, Any]):
    """Fills one buffer again for each tensor."""

    def __init__(self, of_torch: bool = False):
        self._buffer = np.empty(max(array.size for array in STATE.values()), np.float32)
        self._of_torch, self.num_read = of_torch, 0

    def __iter__(self) -> Iterator[str]:
        return iter(STATE)

    def __len__(self) -> int:
        return len(STATE)

    def __getitem__(self, name: str) -> Any:
        self.num_read += 1
        view = self._buffer[: STATE[name].size].reshape(STATE[name].shape)
        view[...] = STATE[name]
        if not self._of_torch:
            return view
        import torch

        return torch.from_numpy(view)


class ReusedDict(dict[str, Any]):
    """A dict whose items() differ from its contents."""

    def items(self) -> Any:
        return iter(Reused().items())


def right(got: Any) -> bool:
    return set(got) == set(STATE) and all(
        np.array_equal(np.asarray(got[name]), STATE[name]) for name in STATE
    )


SOURCES: dict[str, Callable[[], Any]] = {
    "mapping": Reused,
    "iterator": lambda: iter(Reused().items()),
    "items": lambda: Reused().items(),
    "torch": lambda: Reused(of_torch=True),
    "iterator of torch": lambda: iter(Reused(of_torch=True).items()),
    "dict of another class": lambda: ReusedDict(STATE),
    "dict": lambda: dict(STATE),
    "OrderedDict": lambda: OrderedDict(STATE),
    "list": lambda: list(STATE.items()),
}


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> Any:
    if "torch" in request.param:
        pytest.importorskip("torch")
    return SOURCES[request.param]()


@pytest.fixture(scope="module")
def gen() -> Iterator[rm.Generator]:
    with rm.Generator(tiny_spec(), **OPTIONS) as made:
        yield made


# --------------------------------------------------------------------------------------- each way
@pytest.mark.parametrize(
    "options", [{}, {"timeout": 60.0}, {"mode": "inplace"}, {"strict": False}], ids=str
)
def test_sync_weights(gen: rm.Generator, source: Any, options: dict[str, Any]) -> None:
    digest = gen.sync_weights(STATE).digest
    assert gen.sync_weights(source, **options).digest == digest


def test_deltas(tmp_path: Path, source: Any) -> None:
    pytest.importorskip("zstandard")
    zeros = {name: np.zeros_like(array) for name, array in STATE.items()}
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    decoder.apply(encoder.encode(zeros, 0))
    decoder.apply(encoder.encode(source, 1))
    assert encoder.base == 0
    assert right(decoder)
    decoder.apply(encoder.encode(STATE, 2))
    assert right(decoder)


@pytest.mark.parametrize("lend_to", [0, 1])
def test_shared_memory_and_a_folder(tmp_path: Path, source: Any, lend_to: int) -> None:
    with SharedWriter(tmp_path) as writer, SharedReader(writer.address) as shared:
        writer.publish(source, lend_to=lend_to)
        shared.refresh()
        assert right(shared)
        pytest.importorskip("zstandard")
        with DeltaWriter(tmp_path) as folder:
            folder.publish(shared)
            reader = DeltaReader(tmp_path)
            reader.refresh()
            assert right(reader)


@pytest.mark.parametrize("bucket_bytes", [1, 5000, 1 << 30])
def test_buckets(source: Any, bucket_bytes: int) -> None:
    entries = source.items() if isinstance(source, Mapping) else source
    assert right(dict(entry for bucket in bucketed(entries, bucket_bytes) for entry in bucket))


class Workers:
    """vLLM's four calls, for a worker that keeps what it receives."""

    def __init__(self) -> None:
        self.got: dict[str, Any] = {}
        self._mapped: dict[str, segment.MappedSegment] = {}

    def init_weight_transfer_engine(self, info: Any) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, info: Any) -> None:
        name = info["segment"]  # it is filled again for each bucket, and unlinked
        if name not in self._mapped:
            self._mapped[name] = segment.MappedSegment(segment.FOLDER / name, info["nonce"])
        data = self._mapped[name].tensors(info["size"])
        entries = manifest.parse(info["description"].encode(), data.size).entries
        self.got |= {
            name: manifest.view(entry, data, verify=True).copy() for name, entry in entries.items()
        }

    def finish_weight_update(self, version: Any = None) -> None: ...


@pytest.mark.parametrize("block_bytes", [1, 5000, 1 << 30])
def test_weight_sender(source: Any, block_bytes: int) -> None:
    workers = Workers()
    sender = WeightSender(workers, block_bytes=block_bytes, verify=True)
    sender.send(source, version=1)
    assert right(workers.got)


@pytest.mark.parametrize("source", ["mapping", "iterator", "dict"], indirect=True)
def test_exchanges_between_processes(source: Any) -> None:
    """Reads one entry at a time for an exchange from sources that do not hold their tensors."""
    taken = Source(source)
    count = AHEAD if taken.holds else 1
    got = {}
    while parts := taken.take(count):
        for part in parts:
            assert not isinstance(part, Exception)
            got[part.name] = np.array(part.array())
    assert right(got)


# ---------------------------------------------------------------------------- sources that change
def test_a_mapping_is_read_once_by_a_transport() -> None:
    pytest.importorskip("zstandard")
    source = Reused()
    DeltaEncoder().encode(source, 0)
    assert source.num_read == len(STATE)


def broken(after: int) -> Iterator[tuple[str, Any]]:
    yield from list(STATE.items())[:after]
    raise ZeroDivisionError


class Shrinking(dict[str, Any]):
    """Loses a tensor while it is read."""

    def items(self) -> Any:
        for name in list(self):
            yield name, self[name]
            self.popitem()


@pytest.mark.parametrize("after", [0, 1, 3])
def test_sources_that_fail(tmp_path: Path, gen: rm.Generator, after: int) -> None:
    pytest.importorskip("zstandard")
    digest = gen.sync_weights(STATE).digest
    with (
        SharedWriter(tmp_path) as writer,
        SharedReader(writer.address) as shared,
        DeltaWriter(tmp_path) as folder,
    ):
        reader = DeltaReader(tmp_path)
        writer.publish(STATE)
        folder.publish(STATE)
        for publish in (writer.publish, folder.publish, gen.sync_weights):
            with pytest.raises(ZeroDivisionError):
                publish(broken(after))
            with pytest.raises((KeyError, RuntimeError, rm.Error)):
                publish(Shrinking(STATE) if publish == gen.sync_weights else broken_mapping())
        assert shared.refresh() == writer.version == reader.refresh() == folder.version == 0
        assert right(shared)
        assert right(reader)
        assert folder.publish(STATE) == 1
        assert reader.refresh() == 1
    assert gen.sync_weights(STATE).digest == digest


def broken_mapping() -> Any:
    class Disagreeing(Reused):
        """Lists a tensor that it does not have."""

        def __iter__(self) -> Iterator[str]:
            return iter([*STATE, "another"])

    return Disagreeing()


def test_tensors_that_another_thread_writes(tmp_path: Path) -> None:
    """The checksum covers the stored bytes: a reader gets torn values without an error, and the
    encoder's base equals that of the receivers."""
    pytest.importorskip("zstandard")
    state = {"a": np.zeros(1 << 20, np.float32), "b": np.zeros((64, 1 << 12))}
    ends = threading.Event()

    def write() -> None:
        while not ends.is_set():
            for array in state.values():
                array += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        encoder, decoder = DeltaEncoder(2), DeltaDecoder(2)
        with SharedWriter(tmp_path) as writer, SharedReader(writer.address) as reader:
            for version in range(15):
                writer.publish(state)
                reader.refresh()
                assert set(reader) == {
                    name for name in state if reader[name].shape == state[name].shape
                }
                decoder.apply(encoder.encode(state, version))
    finally:
        ends.set()
        thread.join()
    decoder.apply(encoder.encode(state, 15))
    assert all(np.array_equal(decoder[name], state[name]) for name in state)


# --------------------------------------------------------------------------------------- segments
def test_any_byte_of_a_segment_that_changed_is_seen(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """Changes magic, nonce, manifest and tensors, and swaps names in the manifest."""
    state = {"one": np.ones((8, 8)), "two": np.full((8, 8), 2.0)}

    def read(address: str) -> dict[str, Any]:
        with SharedReader(address) as reader:
            reader.refresh()
            return {name: reader[name].copy() for name in reader}

    with SharedWriter(tmp_path) as writer:
        writer.publish(state, 3)
        assert read(writer.address).keys() == state.keys()
        path = Path(writer.address.rpartition(":")[0])
        good = path.read_bytes()
        manifest = range(4160, good.rindex(b"}]") + 2)
        tensors = range(len(good) - 1024, len(good))
        places = [*range(48), *range(56, 64), *manifest, *rng.choice(tensors, 100)]
        bad = {at: bytes([good[at] ^ 1 << int(rng.integers(8))]) for at in map(int, places)}
        texts = [good[:at] + byte + good[at + 1 :] for at, byte in bad.items()]
        texts.append(
            good.replace(b'"one"', b'"1"e"').replace(b'"two"', b'"one"').replace(b'"1"e"', b'"two"')
        )
        for text in texts:
            with path.open("r+b") as file:
                file.write(text)
            with pytest.raises((rm.FormatError, rm.AuthError)):
                read(writer.address)
        with path.open("r+b") as file:
            file.write(b"rollmesh weights" + good[16:])
        with pytest.raises(rm.FormatError, match="expected format rollmesh-weight2"):
            read(writer.address)


def test_a_segment_that_is_truncated_while_it_is_mapped(tmp_path: Path) -> None:
    """Raises FormatError instead of the signal SIGBUS, which would end the process."""
    script = """
import os, sys
import numpy as np
import rollmesh as rm
from rollmesh.sources import SharedReader, SharedWriter

with SharedWriter(sys.argv[1]) as writer, SharedReader(writer.address) as reader:
    writer.publish({"a": np.ones(1 << 20), "b": np.ones(1 << 20)})
    reader.refresh()
    reader["a"]
    os.truncate(writer.address.rpartition(":")[0], 1 << 16)
    for name in "ab":
        try:
            reader[name].sum()
        except rm.FormatError as error:
            print("FormatError" if "bytes of weights, got" in str(error) else error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "FormatError\nFormatError\n"), done.stderr


def test_a_refresh_while_a_sync_reads_a_segment(tmp_path: Path, gen: rm.Generator) -> None:
    with SharedWriter(tmp_path) as writer, SharedReader(writer.address) as reader:
        writer.publish(STATE)
        reader.refresh()
        with reader.lent(), reader.lent():
            writer.publish({"a": np.zeros(3)})
            for change in (reader.refresh, reader.close):
                with pytest.raises(
                    rm.StateError, match="version 0: expected no sync that reads it, got 2"
                ):
                    change()
            assert right(reader)
        assert reader.refresh() == 1
        assert list(reader) == ["a"]


def test_syncs_beside_refreshes(tmp_path: Path, gen: rm.Generator) -> None:
    """One thread refreshes as often as possible while another syncs: each sync is of one
    version."""
    pytest.importorskip("zstandard")
    states = [STATE, numpy_state_dict(tiny_config(), seed=1, dtype="float32")]
    digests = {gen.sync_weights(state).digest for state in states}
    seen, ends = set(), threading.Event()
    with DeltaWriter(tmp_path) as writer:
        reader = DeltaReader(tmp_path)
        writer.publish(states[0])
        reader.refresh()

        def refresh() -> None:
            version = 0
            while not ends.is_set():
                version += 1
                writer.publish(states[version % 2])
                try:
                    reader.refresh()
                except rm.StateError:
                    continue

        thread = threading.Thread(target=refresh)
        thread.start()
        try:
            for _ in range(60):
                seen.add(gen.sync_weights(reader).digest)
        finally:
            ends.set()
            thread.join()
    assert seen <= digests
