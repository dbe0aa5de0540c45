"""Weights on a GPU of another process (CUDA IPC), on the simulated devices:
SharedWriter.publish(lend_to=…) there, Generator.sync_weights(SharedReader) here. The stand-in opens
a handle once per process and never in the process that made it, can number the devices differently,
and ends a process that frees memory which another process has open.

Oracle: the same weights from the host, by digest and by logits. Bound: equality. After a failure
the old version keeps serving."""

# ruff: noqa: F401 (fixtures of another file)
from __future__ import annotations

import copy
import ctypes
import errno
import gc
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import gpu_trainer
import helpers
import numpy as np
import pytest
from marks import full
from test_cuda_sources import DENSE, MOE, from_the_host, library, logits, spread

import rollmesh as rm
from rollmesh import _core, sources
from rollmesh.runtime.devices import LIBRARY_SWITCH
from rollmesh.weights.transport import loans, manifest, segment
from rollmesh.weights.transport.tensors import as_array

NAME = "model.norm.weight"


class Remote:
    """A trainer in a separate process: remote.publish(…) calls Lending.publish there."""

    def __init__(self, path: Path, ordinal: int, folder: Path, settings: dict[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, end = context.Pipe()
        self.process = context.Process(
            target=gpu_trainer.lend,
            args=(end, str(path), ordinal, str(folder), settings),
            daemon=True,
        )
        self.process.start()
        end.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self.pipe.send((name, arguments, keywords))
            assert self.pipe.poll(60), f"{name}: no answer"
            answer, error = self.pipe.recv()
            if error is not None:
                raise RuntimeError(error)
            return answer

        return call

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(60)

    def finish(self) -> None:
        """Expects exit status 0: the simulated device has detected no fault."""
        if self.process.is_alive():
            self.pipe.send(None)
        self.process.join(60)
        assert self.process.exitcode in (0, -signal.SIGKILL)


@pytest.fixture
def trainer(library: Path, tmp_path: Path) -> Iterator[Callable[..., Remote]]:
    started: list[Remote] = []

    def one(ordinal: int = 0, **settings: str) -> Remote:
        started.append(Remote(library, ordinal, tmp_path, settings))
        return started[-1]

    yield one
    for remote in started:
        remote.finish()


@pytest.fixture
def ranks(library: Path, tmp_path: Path) -> Iterator[Callable[..., Callable[..., list[Any]]]]:
    """Two processes of gpu_trainer.rank_of_two. Calling it sends a message to each and returns
    their answers, within 30 seconds."""
    context, pipes, processes = multiprocessing.get_context("spawn"), [], []

    def answers(victim: int = 0) -> list[Any]:
        for pipe in pipes:
            pipe.send(victim)
        return [pipe.recv() for pipe in pipes if pipe.poll(30)]

    def start(config: helpers.Config, addresses: list[str | None]) -> Callable[..., list[Any]]:
        for rank, address in enumerate(addresses):
            pipe, end = context.Pipe()
            arguments = (
                end,
                tmp_path.name + str(os.getpid()),
                rank,
                config,
                {**helpers.SMALL, "dtype": "float32"},
                address,
            )
            processes.append(
                context.Process(target=gpu_trainer.rank_of_two, args=arguments, daemon=True)
            )
            processes[-1].start()
            pipes.append(pipe)
        return answers

    yield start
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join(60)
        assert process.exitcode == 0


def state_of(config: helpers.Config, seed: int) -> dict[str, np.ndarray]:
    return helpers.numpy_state_dict(config, seed=seed, dtype="float32")


# ---------------------------------------------------------------------------------------- weights
@pytest.mark.parametrize("config", [full(DENSE), MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("ordinal, packed", [(0, True), (2, False)])
def test_weights_of_another_process(
    make: Callable[..., rm.Generator],
    trainer: Callable[..., Remote],
    config: helpers.Config,
    ordinal: int,
    packed: bool,
) -> None:
    """Sends two versions, one after the other; after each the trainer may free the memory that it
    has lent."""
    remote, gpu = trainer(ordinal), make(config)
    reader = sources.SharedReader(remote.address())
    for version, seed in enumerate((1, 2)):
        remote.publish(config, seed, version, 1, packed=packed)
        assert reader.refresh() == version
        report = gpu.sync_weights(reader, version=version, cast=True)
        remote.wait(60)
        remote.free()
        assert report.num_tensors == len(state_of(config, seed))
        assert (report.digest, logits(gpu)) == from_the_host(make, config, state_of(config, seed))
    with pytest.raises(rm.NotSyncedError, match="expected a published version"):
        reader.refresh()


def test_devices_have_other_numbers_there(
    make: Callable[..., rm.Generator], trainer: Callable[..., Remote]
) -> None:
    remote, gpu = trainer(0, ROLLMESH_SIMT_FIRST="3"), make(DENSE)
    remote.publish(DENSE, 1, 0, 1)
    reader = sources.SharedReader(remote.address())
    reader.refresh()
    with reader.lent():
        assert reader[NAME].__dlpack_device__() == (2, 3)
    remote.wait(60)
    remote.publish(DENSE, 1, 1, 1)
    reader.refresh()
    assert (
        gpu.sync_weights(reader, cast=True).digest
        == from_the_host(make, DENSE, state_of(DENSE, 1))[0]
    )
    remote.wait(60)


def test_some_on_the_host(
    make: Callable[..., rm.Generator], trainer: Callable[..., Remote]
) -> None:
    remote, gpu = trainer(), make(DENSE)
    names = tuple(sorted(state_of(DENSE, 1)))[::2]
    remote.publish(DENSE, 1, 0, 1, on_host=names)
    reader = sources.SharedReader(remote.address())
    reader.refresh()
    assert sorted(reader) == sorted(state_of(DENSE, 1))
    assert len(reader) == len(state_of(DENSE, 1))
    assert isinstance(reader[names[0]], np.ndarray)
    report = gpu.sync_weights(reader, cast=True)
    assert (report.digest, logits(gpu)) == from_the_host(make, DENSE, state_of(DENSE, 1))
    remote.wait(60)


def test_several_readers_and_ranks(
    make: Callable[..., rm.Generator], trainer: Callable[..., Remote]
) -> None:
    """Each generator has a reader; a generator whose ranks are threads on two GPUs opens the memory
    once."""
    remote = trainer(1)
    remote.publish(MOE, 1, 0, 2)
    want = from_the_host(make, MOE, state_of(MOE, 1))
    for number, generator in enumerate((make(MOE, "cuda", mesh=rm.Mesh(tp=2)), make(MOE))):
        with pytest.raises(
            RuntimeError,
            match=f"DeadlineError: version 0 was read by {number} of 2 readers within the timeout",
        ):
            remote.wait(0)
        assert remote.alive() > 0
        reader = sources.SharedReader(remote.address())
        reader.refresh()
        digest = generator.sync_weights(reader, cast=True).digest
        assert (digest, logits(generator)) == want
        with pytest.raises(
            rm.StateError, match=r"version 0: .*given back; refresh\(\) maps the next one"
        ):
            generator.sync_weights(reader, cast=True)
    remote.wait(60)
    assert remote.alive() == 0


@pytest.mark.parametrize("readers", [2, full(1)], ids=["each has a reader", "one has"])
def test_ranks_that_are_processes(
    make: Callable[..., rm.Generator],
    trainer: Callable[..., Remote],
    ranks: Callable[..., Callable[..., list[Any]]],
    readers: int,
) -> None:
    """Sends two versions; a third, whose trainer exits while it is read, is refused on both
    ranks."""
    remote = trainer(1)
    cpu = make(MOE, "cpu", dtype="float32")
    answers = ranks(MOE, [remote.address() if rank < readers else None for rank in range(2)])
    for version in range(2):
        remote.publish(MOE, version, version, readers)
        want = cpu.sync_weights(state_of(MOE, version)).digest, logits(cpu)
        assert answers() == [list(want)] * 2
        remote.wait(60)
        remote.free()
    remote.publish(MOE, 5, 2, readers)
    told = answers(remote.process.pid)
    assert any(
        "RankLostError: version 2: expected the trainer that lends it" in answer[0]
        for answer in told
    )
    assert all("RankLostError" in answer[0] or "SyncAbortedError" in answer[0] for answer in told)


def test_a_rank_that_cannot_give_back(
    trainer: Callable[..., Remote], ranks: Callable[..., Callable[..., list[Any]]]
) -> None:
    """Both ranks have committed, and one leaves by an error: the other gets the error, and does not
    wait."""
    remote = trainer(1)
    answers = ranks(MOE, [remote.address()] * 2)
    remote.publish(MOE, 1, 0, 2)
    told = answers(-1)
    assert told[0] == ["DeviceError: cannot be given back"]
    assert told[1][0].startswith("RankLostError")
    remote.take_back()


def test_tensor_by_tensor(
    make: Callable[..., rm.Generator], trainer: Callable[..., Remote]
) -> None:
    remote, gpu = trainer(), make(DENSE)
    remote.publish(DENSE, 1, 4, 1)
    reader = sources.SharedReader(remote.address())
    reader.refresh()
    with pytest.raises(
        rm.StateError, match=rf"{NAME}: .* is lent: read it by sync_weights, or within"
    ):
        reader[NAME]
    with reader.lent() as still, gpu.begin_sync(version=4, cast=True) as sync:
        for name, tensor in reader.items():
            sync.push(name, tensor)
        still()
    with pytest.raises(rm.StateError, match="was given back to the process that lent it"):
        tensor.__dlpack__(max_version=(1, 0))
    assert logits(gpu) == from_the_host(make, DENSE, state_of(DENSE, 1))[1]
    remote.wait(60)


def test_a_sync_that_fails_may_be_tried_again(
    make: Callable[..., rm.Generator], trainer: Callable[..., Remote]
) -> None:
    remote, gpu = trainer(), make(DENSE)
    remote.publish(DENSE, 1, 0, 1)
    reader = sources.SharedReader(remote.address())
    reader.refresh()
    with pytest.raises(rm.DTypeError, match="cast=True converts"):
        gpu.sync_weights(reader)
    with pytest.raises(RuntimeError, match="version 0 was read by 0 of 1 readers"):
        remote.wait(0)
    assert (
        gpu.sync_weights(reader, cast=True).digest
        == from_the_host(make, DENSE, state_of(DENSE, 1))[0]
    )
    remote.wait(60)


def test_a_commit_that_fails_may_be_tried_again(
    make: Callable[..., rm.Generator], trainer: Callable[..., Remote]
) -> None:
    """All tensors are staged, but a running request cannot finish. The loan is kept, because its
    version does not serve yet."""
    remote, gpu = trainer(), make(DENSE)
    gpu.sync_weights(state_of(DENSE, 2), version=0, cast=True)
    remote.publish(DENSE, 1, 1, 1)
    reader = sources.SharedReader(remote.address())
    reader.refresh()
    gpu.submit([[1, 2, 3]], rm.SamplingParams(max_tokens=4, ignore_eos=True))
    gpu.pause("keep")
    with pytest.raises(rm.StateError, match="1 requests cannot finish"):
        gpu.sync_weights(reader, version=1, cast=True, inflight="wait")
    assert gpu.version == 0
    with pytest.raises(RuntimeError, match="version 1 was read by 0 of 1 readers"):
        remote.wait(0)
    gpu.resume()
    report = gpu.sync_weights(reader, version=1, cast=True, inflight="wait")
    assert (report.digest, logits(gpu)) == from_the_host(make, DENSE, state_of(DENSE, 1))
    remote.wait(60)


# ----------------------------------------------------------------------- who ends, who takes back
@pytest.mark.parametrize(
    "what, kind, message",
    [
        ("kill", rm.RankLostError, "version 1: expected the trainer that lends it"),
        ("take_back", rm.StateError, "version 1: .*that its trainer took back"),
        ("change", rm.StateError, "version 1: .*that its trainer took back"),
    ],
)
@pytest.mark.parametrize("in_the_middle", [False, True])
def test_a_trainer_that_goes(
    make: Callable[..., rm.Generator],
    trainer: Callable[..., Remote],
    what: str,
    kind: type[Exception],
    message: str,
    in_the_middle: bool,
) -> None:
    remote, gpu = trainer(), make(DENSE)
    gpu.sync_weights(state_of(DENSE, 2), version=0, cast=True)
    before = logits(gpu)

    def happens() -> None:
        if what == "change":
            remote.take_back()
        getattr(remote, what)()

    remote.publish(DENSE, 1, 1, 1)
    reader = gpu_trainer.Interrupted(remote.address())
    reader.refresh()
    if in_the_middle:
        reader.interrupt(len(reader) + 3, happens)  # each is read once to be checked
    if not in_the_middle:
        happens()
    with pytest.raises(kind, match=message):
        gpu.sync_weights(reader, cast=True)
    assert gpu.version == 0
    assert logits(gpu) == before


def test_a_reader_that_ends(
    make: Callable[..., rm.Generator], trainer: Callable[..., Remote]
) -> None:
    remote, gpu = trainer(), make(DENSE)
    remote.publish(DENSE, 1, 0, 1)
    process = multiprocessing.get_context("spawn").Process(
        target=gpu_trainer.borrow_and_die, args=(remote.address(),)
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0
    with pytest.raises(
        RuntimeError,
        match=r"RankLostError: version 0 was read by 0 of 1 readers, and one of the others has "
        r"ended",
    ):
        remote.wait(60)
    with pytest.raises(RuntimeError, match="version 0, which is lent to 1 readers"):
        remote.publish(DENSE, 1, 1, 1)
    reader = sources.SharedReader(remote.address())
    reader.refresh()
    gpu.sync_weights(reader, cast=True)
    remote.wait(60)
    reader.close()
    remote.publish(DENSE, 2, 1, 1)
    # A closed reader differs from a reader whose process has ended.
    with pytest.raises(RuntimeError, match="DeadlineError"):
        remote.wait(0.05)
    remote.take_back()
    remote.free()


def test_a_reader_that_has_read_and_ends(trainer: Callable[..., Remote]) -> None:
    """The reader ends without close: the next version is not lent to it, and does not wait for
    it."""
    remote = trainer()
    remote.publish(DENSE, 1, 0, 2)
    process = multiprocessing.get_context("spawn").Process(
        target=gpu_trainer.borrow_and_end, args=(remote.address(),)
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0
    with pytest.raises(
        RuntimeError,
        match="version 0 was read by 1 of 2 readers within the timeout; 0 others have begun",
    ):
        remote.wait(0.05)
    with sources.SharedReader(remote.address()) as reader:
        reader.refresh()
        with reader.lent():
            pass
    remote.wait(60)
    remote.publish(DENSE, 2, 1, 1)
    with pytest.raises(
        RuntimeError,
        match="version 1 was read by 0 of 1 readers within the timeout; 0 others have begun",
    ):
        remote.wait(0.05)
    remote.take_back()


def test_a_reader_that_is_dropped(library: Path, trainer: Callable[..., Remote]) -> None:
    """A dropped reader counts as ended, although its process lives."""
    remote = trainer()
    remote.publish(DENSE, 1, 0, 1)
    reader = sources.SharedReader(remote.address())
    reader.refresh()
    with suppress(KeyError), reader.lent():
        reader["none"]
    with pytest.raises(
        RuntimeError, match=r"DeadlineError: .* within the timeout; 1 others have begun"
    ):
        remote.wait(0.05)
    del reader
    gc.collect()
    with pytest.raises(RuntimeError, match="RankLostError: version 0 was read by 0 of 1 readers"):
        remote.wait(60)
    remote.take_back()


def test_a_reader_is_closed_by_its_block(library: Path, trainer: Callable[..., Remote]) -> None:
    remote = trainer()
    remote.publish(DENSE, 1, 0, 1)
    with sources.SharedReader(remote.address()) as reader:
        reader.refresh()
        with reader.lent():
            with pytest.raises(rm.StateError, match="version 0: expected no sync that reads it"):
                reader.close()
            assert reader[NAME].nbytes > 0
            with pytest.raises(RuntimeError, match="within the timeout; 1 others have begun"):
                remote.wait(0)
    remote.wait(60)


def open_files() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def test_locks_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the system's reason, and all files are closed. A lock that cannot be requested
    does not count as held."""
    writer = sources.SharedWriter(tmp_path)
    writer.publish({"x": np.ones(3, np.float32)})
    path, _, nonce = writer.address.rpartition(":")
    mapped = segment.MappedSegment(Path(path), nonce)
    before = open_files()

    def fails(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    with monkeypatch.context() as patched:
        patched.setattr(segment.fcntl, "fcntl", fails)
        for call, error in ((mapped.is_owned, OSError),
        (lambda: segment.Segment(8, tmp_path), rm.CapacityError),
                            (lambda: writer.publish({}), rm.CapacityError)):  # fmt: skip
            with pytest.raises(error, match="no locks available"):
                call()
    assert open_files() == before
    assert len(list(tmp_path.iterdir())) == 1
    mapped.close()
    writer.close()


class Gpus:
    """A stand-in with allocations of 100 bytes; those at `bad` cannot be freed."""

    def __init__(self, *bad: int) -> None:
        self.bad, self.open = bad, [0, 1, 2]
        self.opened = iter(self.open[:])

    def borrow(self, bus: str, handle: bytes) -> tuple[int, int, int]:
        return 0, next(self.opened), 100

    def give_back(self, ordinal: int, address: int) -> None:
        self.open.remove(address)
        if address in self.bad:
            raise rm.DeviceError(f"of {address}")


def test_all_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(2, 1)
    monkeypatch.setattr(loans, "gpus", lambda: gpus)
    borrowed = loans.Borrowed(manifest.Loan(1, "1-a", (manifest.Allocation("", b"", 100),) * 3, {}))
    with pytest.raises(rm.DeviceError, match="of 2"):
        borrowed.close()
    assert gpus.open == []


@pytest.mark.parametrize("size, fits", [(99, True), (100, True), (101, False)])
def test_sizes_of_allocations(monkeypatch: pytest.MonkeyPatch, size: int, fits: bool) -> None:
    """Allocations may be mapped in larger units than they were made."""
    gpus = Gpus()
    monkeypatch.setattr(loans, "gpus", lambda: gpus)
    with (
        nullcontext()
        if fits
        else pytest.raises(rm.FormatError, match=r"expected an allocation of 101 bytes .*, got 100")
    ):
        loans.Borrowed(
            manifest.Loan(1, "1-a", (manifest.Allocation("", b"", size),) * 3, {})
        ).close()
    assert gpus.open == ([] if fits else [1, 2])


# --------------------------------------------------------------------------------------- refusals
def test_memory_that_cannot_be_opened_elsewhere(
    make: Callable[..., rm.Generator], trainer: Callable[..., Remote]
) -> None:
    remote = trainer(ROLLMESH_SIMT_SEGMENTS="1")
    with pytest.raises(
        RuntimeError,
        match=r"UnsupportedTensorError: .*cudaIpcGetMemHandle: invalid argument; "
        r".*expandable_segments:False",
    ):
        remote.publish(DENSE, 1, 0, 1)
    remote.environment(ROLLMESH_SIMT_SEGMENTS="0")
    assert remote.publish(DENSE, 1, 0, 1) == 0
    remote.take_back()


def test_a_gpu_that_is_not_visible_here(
    make: Callable[..., rm.Generator],
    trainer: Callable[..., Remote],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remote, gpu = trainer(), make(DENSE)
    remote.publish(DENSE, 1, 0, 1)
    reader = sources.SharedReader(remote.address())
    reader.refresh()
    monkeypatch.setenv("ROLLMESH_SIMT_FIRST", "2")
    with pytest.raises(
        rm.ConfigError, match=r"GPU 0000:01:00\.0 is not among the devices of this process"
    ):
        gpu.sync_weights(reader, cast=True)
    monkeypatch.delenv("ROLLMESH_SIMT_FIRST")
    gpu.sync_weights(reader, cast=True)
    remote.wait(60)


def test_a_generator_on_the_cpu_takes_none(
    make: Callable[..., rm.Generator], trainer: Callable[..., Remote]
) -> None:
    remote = trainer()
    remote.publish(DENSE, 1, 0, 1)
    reader = sources.SharedReader(remote.address())
    reader.refresh()
    with pytest.raises(
        rm.UnsupportedTensorError,
        match=r"expected a tensor on the CPU, got one on DLPack device type 2 ",
    ):
        make(DENSE, "cpu").sync_weights(reader, cast=True)


def test_lent_by_this_process(make: Callable[..., rm.Generator], library: Path) -> None:
    trainer = gpu_trainer.Trainer(library, 0)
    with sources.SharedWriter() as writer:
        writer.publish(trainer.packed(state_of(DENSE, 1)), lend_to=1)
        reader = sources.SharedReader(writer.address)
        reader.refresh()
        with pytest.raises(
            rm.StateError, match="got one of this process: pass the tensors themselves"
        ):
            make(DENSE).sync_weights(reader, cast=True)
        with pytest.raises(
            rm.StateError,
            match=r"version 0, which is lent to 1 readers; call wait_until_read\(\) or take_back",
        ):
            writer.publish({}, lend_to=1)
    trainer.close()


@pytest.mark.parametrize("lend_to", [-1, True, 1.0, "1", 5000])
def test_numbers_of_readers(library: Path, lend_to: Any) -> None:
    with (
        sources.SharedWriter() as writer,
        pytest.raises(rm.ConfigError, match=r"lend_to: expected an integer in .*"),
    ):
        writer.publish({"a": np.zeros(3, np.float32)}, lend_to=lend_to)


def test_nothing_to_lend(library: Path) -> None:
    with sources.SharedWriter() as writer:
        assert [writer.publish({"a": np.zeros(3, np.float32)}, lend_to=1) for _ in range(2)] == [
            0,
            1,
        ]
        writer.wait_until_read(0)
        reader = sources.SharedReader(writer.address)
        assert reader.refresh() == 1
        with reader.lent() as still:
            still()
            assert reader["a"].shape == (3,)


def test_no_cuda_library(library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainer = gpu_trainer.Trainer(library, 0)
    monkeypatch.setenv(LIBRARY_SWITCH, str(tmp_path / "none.so"))
    with (
        sources.SharedWriter() as writer,
        pytest.raises(rm.ConfigError, match=r"expected none\.so, got a build without it"),
    ):
        writer.publish(trainer.packed(state_of(DENSE, 1)), lend_to=1)
    trainer.close()


def flags_of(capsule: Any) -> int:
    """Returns the flags of a DLManagedTensorVersioned, after two words of its version and two
    pointers."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.c_uint64.from_address(pointer(capsule, b"dltensor_versioned") + 24).value


@pytest.mark.parametrize("how", ["plain", "transposed", "backwards", "every other"])
def test_strides_by_way_of_the_host(library: Path, how: str) -> None:
    """The host rebuilds the tensor from its place, shape and strides, and not after it was
    returned."""
    wanted = np.arange(48, dtype=np.float16).reshape(6, 8)
    trainer, gpus = gpu_trainer.Trainer(library, 1), _core.Gpus(str(library))
    ordinal, address, dtype, shape, strides, owner = gpus.lend(
        "a", trainer.tensor(wanted if how == "plain" else spread(wanted, how))
    )
    gpus.wait(1)
    array = gpus.array(ordinal, address, dtype, shape, strides)
    assert (array.shape, array.strides, array.dtype, array.nbytes) == (
        (6, 8),
        strides,
        "float16",
        96,
    )
    assert flags_of(array.__dlpack__(max_version=(1, 0))) == 1  # read-only: it is another's
    assert as_array("a", array).tobytes() == wanted.tobytes()
    with pytest.raises(
        rm.UnsupportedTensorError,
        match="__array__: expected an array of the host, got float16 on cuda:1",
    ):
        np.asarray(array)
    words = as_array("a", gpus.array(ordinal, address, "bfloat16", shape, strides))
    assert (words.dtype.metadata, words.tobytes()) == ({"rollmesh": "bfloat16"}, wanted.tobytes())
    array.drop()
    with pytest.raises(rm.StateError, match="was given back"):
        as_array("a", array)
    del owner
    trainer.close()


def test_a_handle_of_another_length(library: Path) -> None:
    with pytest.raises(rm.ConfigError, match="expected a handle of 64 bytes, got 3"):
        _core.Gpus(str(library)).borrow("0000:01:00.0", b"abc")
    with pytest.raises(
        rm.DeviceError,
        match="cuda:0: memory of another process: cudaIpcOpenMemHandle: invalid argument",
    ):
        _core.Gpus(str(library)).borrow("0000:01:00.0", bytes(64))


GOOD: dict[str, Any] = {
    "number": 1,
    "process": "1-a",
    "allocations": [["0000:01:00.0", "00" * 64, 100]],
    "tensors": [
        ["a", "float32", [2, 3], [3, 1], 0, 76],
        ["b", "bfloat16", [], [], 0, 98],
        ["c", "float32", [3], [-2], 0, 16],
    ],
}


def changed(*path: Any) -> dict[str, Any]:
    """Returns GOOD with the last of `path` at the place that the others name."""
    made = copy.deepcopy(GOOD)
    at = made
    for step in path[:-2]:
        at = at[step]
    at[path[-2]] = path[-1]
    return made


def test_a_good_description() -> None:
    assert sorted(manifest.parse_loan(GOOD, set()).tensors) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "value, message",
    [
        (None, "expected a manifest of lent weights"),
        ({}, "expected a manifest of lent weights"),
        (changed("allocations", 0, 1, "xyz"), "expected a manifest of lent weights"),
        (changed("tensors", 0, []), "expected a manifest of lent weights"),
        (
            changed("tensors", 0, 5, 77),
            r"a: expected bytes inside an allocation of 100, got \[77, 101\)",
        ),
        (changed("tensors", 0, 5, -4), r"a: expected bytes inside .*, got \[-4, 20\)"),
        (changed("tensors", 2, 5, 15), r"c: expected bytes inside .*, got \[-1, 19\)"),
        (changed("tensors", 0, 3, [2**59, 1]), r"a: expected bytes inside .*, got \["),
        (changed("tensors", 0, 3, [2**60, 1]), "expected integers below"),
        (changed("tensors", 0, 2, [2, True]), "expected integers below"),
        (changed("tensors", 0, 2, [0, 3]), "expected at most 4 sizes >= 1"),
        (changed("tensors", 0, 3, [1]), "expected at most 4 sizes >= 1"),
        (changed("tensors", 0, 4, 1), "a: expected one of 1 allocations, got number 1"),
        (changed("tensors", 0, 1, "int8"), "expected a dtype of .*, got 'int8'"),
        (changed("number", 0), r"the number of a loan: expected an integer in .*, got 0"),
        (changed("number", True), "the number of a loan: .*, got True"),
        (changed("number", 2**63), "the number of a loan: .*, got 9223372036854775808"),
        ([], "expected a manifest of lent weights"),
    ],
)
def test_damaged_descriptions(value: Any, message: str) -> None:
    with pytest.raises(rm.FormatError, match=message):
        manifest.parse_loan(value, set())


def test_a_description_with_a_name_twice() -> None:
    with pytest.raises(rm.DuplicateKeyError, match="a: expected it once"):
        manifest.parse_loan(changed("tensors", 1, 0, "a"), set())


def test_a_reader_without_a_version_is_refused_by_name(make: Callable[..., rm.Generator]) -> None:
    """Before the first refresh, and after close."""
    with sources.SharedWriter() as writer:
        writer.publish(helpers.numpy_state_dict(DENSE, seed=1))
        generator, reader = make(), sources.SharedReader(writer.address)
        with pytest.raises(rm.StateError, match="refresh"):
            generator.sync_weights(reader, cast=True)
        generator.sync_weights(reader, version=reader.refresh(), cast=True)
        reader.close()
        with pytest.raises(rm.StateError, match="refresh"):
            generator.sync_weights(reader, cast=True)
    for address in (5, None, b"/x:y", "a\0:b"):
        with pytest.raises(rm.Error, match="address: expected a SharedWriter's"):
            sources.SharedReader(address)
