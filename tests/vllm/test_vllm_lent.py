"""WeightSender(lend=True): a trainer's tensors on a GPU, read there by vLLM's workers in other
processes. Runs on the simulated devices (test_cuda_loans.py), which end a process that frees memory
which another process has open. The workers run without vLLM (test_vllm_plugin.py has the whole
engine).

Oracle: the logits of a Generator on the CPU with the same weights. Bound: 0 differing bits."""

# ruff: noqa: F401 (fixtures of another file)
from __future__ import annotations

import json
import multiprocessing
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import numpy_state_dict, tiny_config
from marks import full
from test_cuda_sources import library
from vllm_lender import Asked, Remote, read

import rollmesh as rm
from rollmesh import _core
from rollmesh.runtime.devices import LIBRARY_SWITCH
from rollmesh.vllm.trainer import WeightSender
from rollmesh.vllm.update_info import UpdateInfo
from rollmesh.weights.transport import loans
from rollmesh.weights.transport.loans import Borrowed
from rollmesh.weights.transport.manifest import Loan, parse
from rollmesh.weights.transport.segment import FOLDER, LOAN, MappedSegment, Segment

pytest.importorskip("torch", reason="the worker's side is a module of torch")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

CONFIG = tiny_config(True)
PROMPTS = [[1, 2, 3, 4, 5], [140, 7]]  # vllm_ranks'
LATE = "model.layers.1.mlp.experts.7.down_proj.weight"
NORM = "model.norm.weight"


def state(seed: int) -> dict[str, np.ndarray]:
    return numpy_state_dict(CONFIG, seed=seed, dtype="float32")


@cache
def bits(seed: int) -> bytes:
    """Returns the answers of a generator on the CPU with the weights of a seed."""
    with rm.Generator(
        rm.ModelSpec.from_hf(CONFIG),
        dtype="float32",
        max_model_len=32,
        kv_cache_gib=0.002,
        threads=1,
    ) as generator:
        generator.sync_weights(state(seed))
        return b"".join(logits.tobytes() for logits in generator.logits(PROMPTS))


class Workers:
    """A client of vLLM's four calls, and the weights that should serve. `remotes` are its
    trainers."""

    def __init__(self, client: Any, library: Path):
        self.client, self.seed, self.version, self._library = client, 0, 0, library
        self.remotes: list[Remote] = []
        sender = WeightSender(client)
        sender.send(state(0), 0)
        self.hold()

    def trainer(
        self, ordinal: int = 0, settings: dict[str, str] | None = None, **options: Any
    ) -> Remote:
        self.remotes.append(Remote(self._library, ordinal, settings, **options))
        return self.remotes[-1]

    def push(self, remote: Remote, **how: Any) -> None:
        """Sends a set that is read in place; afterwards the trainer overwrites its tensors and
        frees them."""
        self.seed, self.version = (self.seed + 1) % 3, self.version + 1
        remote.send(self.client, CONFIG, self.seed, self.version, **how)
        assert remote.do("alive") == 0
        remote.do("change")
        remote.do("free")
        self.hold()

    def hold(self) -> None:
        assert self.client.bits() == bits(self.seed)
        versions = self.client.rpc("weight_version")
        assert versions == [self.version] * len(versions)

    def refuses(self, remote: Remote, words: str, **how: Any) -> None:
        """Expects a refusal of the trainer's set: the trainer has its tensors back, and the old
        weights serve."""
        with pytest.raises(RuntimeError, match=words):
            remote.send(self.client, CONFIG, (self.seed + 1) % 3, self.version + 1, **how)
        remote.do("free")
        self.hold()


def ranks() -> Any:
    import vllm_ranks

    return vllm_ranks.Processes(CONFIG, "float32", 2, f"test.{secrets.token_hex(8)}", device="cuda")


@pytest.fixture(scope="module")
def two(simt_library: Path) -> Iterator[Workers]:
    """Two ranks on separate GPUs."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(LIBRARY_SWITCH, str(simt_library))
        served = Workers(ranks(), simt_library)
    yield served
    served.client.close()


@pytest.fixture
def workers(request: pytest.FixtureRequest, library: Path) -> Iterator[Callable[..., Workers]]:
    """One worker in this process; the two of this file; or two that end with the test."""
    made: list[Workers] = []

    def some(world: int = 1, device: str = "cuda", to_the_end: bool = False) -> Workers:
        import vllm_ranks

        if world > 1 and not to_the_end:
            made.append(request.getfixturevalue("two"))
            return made[-1]
        made.append(
            Workers(
                vllm_ranks.Alone(CONFIG, "float32", device=device) if world == 1 else ranks(),
                library,
            )
        )
        request.addfinalizer(made[-1].client.close)
        return made[-1]

    yield some
    for each in made:
        while each.remotes:
            each.remotes.pop().finish()


# ------------------------------------------------------------------------------------------- sets
@pytest.mark.parametrize("world", [1, full(2)])
def test_sets_of_any_blocks(workers: Callable[..., Workers], world: int) -> None:
    """Sends a set in one block and in many, from the worker's GPU and from another, in one
    allocation and in one for each tensor, some on the host. Meanwhile the old version serves."""
    served = workers(world)
    one, many = served.trainer(0, block_bytes=1 << 30), served.trainer(3, block_bytes=30_000)
    served.push(one)
    served.push(many)
    served.push(one, packed=False)
    served.push(many, on_host=tuple(sorted(state(0)))[::2])
    served.push(many, on_host=tuple(state(0)))  # nothing to lend
    served.push(one)


def test_what_is_lent_is_not_copied(
    workers: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file in shared memory contains only the host's tensors. The trainer keeps lent tensors
    for the time of a call, which ends with all of them returned, and keeps nothing of the previous
    block."""
    served, seen = workers(), list[Asked]()
    remote = served.trainer(block_bytes=30_000)

    def back(gpus: _core.Gpus, ordinal: int, address: int) -> None:
        opened.remove((ordinal, address))
        give_back(gpus, ordinal, address)

    class Gpus:
        def __init__(self, made: _core.Gpus) -> None:
            self._parts = made

        def borrow(self, bus: str, handle: bytes) -> tuple[int, int, int]:
            ordinal, address, size = self._parts.borrow(bus, handle)
            opened.append((ordinal, address))
            return ordinal, address, size

        def give_back(self, ordinal: int, address: int) -> None:
            back(self._parts, ordinal, address)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._parts, name)

    opened, give_back, make = (
        list[tuple[int, int]](),
        _core.Gpus.give_back,
        rm.weights.transport.loans.gpus,
    )
    monkeypatch.setattr(rm.weights.transport.loans, "gpus", lambda: Gpus(make()))
    remote.begin("send", CONFIG, 1, 1, on_host=(NORM,))
    lent_names: set[str] = set()
    while (asked := remote.next()) is not None:
        if asked.method == "update_weights":
            seen.append(asked)
            info = UpdateInfo(**asked.args[0])
            assert [entry["name"] for entry in json.loads(info.description)["tensors"]] in (
                [],
                [NORM],
            )
            loan = parse(info.description.encode(), info.size).loan
            names = set() if loan is None else set(loan.tensors)
            # The additional name belongs to the next block, which did not fit.
            assert len(names) <= asked.alive <= len(names) + 1
            lent_names |= names
        remote.pass_on(served.client, asked)
        assert opened == []
    remote.result()
    assert len(seen) > 3
    assert lent_names == set(state(0)) - {NORM}
    served.seed, served.version = 1, 1
    served.hold()


@pytest.mark.parametrize("world", [1, full(2)])
def test_sets_that_are_refused(workers: Callable[..., Workers], world: int) -> None:
    """One tensor of the set is bad, lent or not; the next set is accepted."""
    served = workers(world)
    remote = served.trainer(block_bytes=30_000)
    bad = state(1)[LATE].copy()
    bad[-1, 3] = np.nan
    served.refuses(remote, f"NonFiniteError: .*{LATE}", changes={LATE: bad})
    served.refuses(remote, "ShapeError", changes={LATE: state(1)[LATE].T.copy()})
    served.refuses(remote, "ShapeError", changes={LATE: state(1)[LATE].T.copy()}, on_host=(LATE,))
    served.refuses(remote, "DTypeError", changes={LATE: state(1)[LATE].astype(np.float64)})
    served.refuses(remote, "IncompleteSyncError", changes={LATE: None})
    served.refuses(remote, "UnexpectedKeyError", changes={LATE + "s": bad})
    served.push(remote)


@pytest.mark.parametrize(
    "pairs", [[("a", True), ("a", True)], [("a", True), ("a", False)], [("a", False), ("a", True)]]
)
def test_names_that_come_twice(
    workers: Callable[..., Workers], pairs: list[tuple[str, bool]]
) -> None:
    served = workers()
    remote = served.trainer()
    with pytest.raises(RuntimeError, match=r"DuplicateKeyError: .*a: expected it once"):
        remote.send(served.client, pairs, 1, command="send_pairs")
    served.hold()
    served.push(remote)


# ------------------------------------------------------------------------- who ends, who gives up
def test_a_trainer_that_dies_before_its_block_is_read(workers: Callable[..., Workers]) -> None:
    served = workers()
    remote = served.trainer()
    remote.begin("send", CONFIG, 1, 1)
    asked = remote.until(served.client, "update_weights")
    remote.kill()
    with pytest.raises(
        rm.RankLostError,
        match=r"bucket 1 of /dev/shm/rollmesh-weights-\w+: expected the trainer that lends it",
    ):
        served.client.update_weights(*asked.args)
    served.hold()
    served.push(served.trainer())


def while_reading(monkeypatch: pytest.MonkeyPatch, count: int, happens: Callable[[], None]) -> None:
    """Calls a function once when a given number of lent tensors has been read."""
    looked, array = iter(range(count)), Borrowed.array

    def look(borrowed: Borrowed, name: str) -> _core.DeviceArray:
        if next(looked, None) is None:
            monkeypatch.setattr(Borrowed, "array", array)
            happens()
        return array(borrowed, name)

    monkeypatch.setattr(Borrowed, "array", look)


def test_a_trainer_that_dies_while_it_is_read(
    workers: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = workers()
    remote = served.trainer()
    while_reading(monkeypatch, 20, remote.kill)
    remote.begin("send", CONFIG, 1, 1)
    asked = remote.until(served.client, "update_weights")
    with pytest.raises(
        rm.RankLostError, match=r"bucket 1 of .*: expected the trainer that lends it"
    ):
        served.client.update_weights(*asked.args)
    with pytest.raises(rm.StateError, match="without an open update"):
        served.client.finish_weight_update()
    served.hold()
    served.push(served.trainer())


def test_a_trainer_that_dies_while_its_memory_is_opened(
    workers: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening then fails, but the reported reason is the trainer's death."""
    served = workers()
    remote = served.trainer()

    def fails(_: Loan) -> None:
        remote.kill()
        raise rm.DeviceError("cudaIpcOpenMemHandle: invalid argument")

    remote.begin("send", CONFIG, 1, 1)
    asked = remote.until(served.client, "update_weights")
    with monkeypatch.context() as patched:
        patched.setattr(loans, "Borrowed", fails)
        with pytest.raises(
            rm.RankLostError, match=r"bucket 1 of .*: expected the trainer that lends it"
        ):
            served.client.update_weights(*asked.args)
    served.hold()
    served.push(served.trainer())


def test_a_call_that_its_trainer_has_given_up(workers: Callable[..., Workers]) -> None:
    """The worker reaches the call after the trainer has its tensors back: it opens nothing."""
    served = workers()
    remote = served.trainer()
    remote.begin("send", CONFIG, 1, 1)
    asked = remote.until(served.client, "update_weights")
    remote.answer("timed out")
    assert remote.next() is None
    with pytest.raises(RuntimeError, match=r"RuntimeError: timed out$"):
        remote.result()
    remote.do("change")
    remote.do("free")
    with pytest.raises(rm.AuthError, match="does not exist"):  # the file is gone with the send
        served.client.update_weights(*asked.args)
    served.hold()
    served.push(remote)


def test_a_call_that_is_given_up_while_its_block_is_read(
    workers: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's send waits until the worker has closed what it has open, and the worker drops
    what it has read."""
    served = workers()
    remote = served.trainer()

    def give_up() -> None:
        remote.answer("timed out")
        assert not remote.pipe.poll(0.3), "the send has ended with its tensors open in a worker"

    while_reading(monkeypatch, 20, give_up)
    remote.begin("send", CONFIG, 1, 1)
    asked = remote.until(served.client, "update_weights")
    with pytest.raises(rm.StateError, match=r"bucket 1 of .* that its trainer took back"):
        served.client.update_weights(*asked.args)
    assert remote.next() is None
    with pytest.raises(RuntimeError, match=r"RuntimeError: timed out$"):
        remote.result()
    remote.do("change")
    remote.do("free")
    with pytest.raises(rm.StateError, match="without an open update"):
        served.client.finish_weight_update()
    served.hold()
    served.push(remote)


def test_a_worker_that_keeps_what_was_lent(
    workers: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker keeps it longer than the trainer waits: the error says so. The worker drops all
    that it reads afterwards."""
    served = workers()
    remote = served.trainer(timeout=0.2)
    remote.do("patience", 0.2)

    def outwait(answer: str | None) -> None:
        remote.answer(answer)
        assert remote.next() is None

    told = "a worker still has tensors open"
    for answer, words in (
        (None, f"DeadlineError: {told}"),
        ("lost", rf"lost; {told} that were lent to it, 0\.2 seconds later"),
    ):
        while_reading(monkeypatch, 20, lambda answer=answer: outwait(answer))
        remote.begin("send", CONFIG, 1, 1)
        asked = remote.until(served.client, "update_weights")
        with pytest.raises(rm.StateError, match="that its trainer took back"):
            served.client.update_weights(*asked.args)
        with pytest.raises(RuntimeError, match=words):
            remote.result()
        remote.do("free")
        served.hold()
    served.push(remote)


@pytest.mark.full
def test_a_worker_that_dies_while_it_reads(workers: Callable[..., Workers]) -> None:
    """Its lock disappears with it: the trainer does not wait."""
    served = workers(2, to_the_end=True)
    remote = served.trainer()
    served.push(remote)
    served.client.rpc("end_reading", 0, 20)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="EOFError"):
        remote.send(served.client, CONFIG, 2, 2)
    assert time.monotonic() - began < 8  # LENT_S is 10
    remote.do("change")
    remote.do("free")


@pytest.fixture
def readers() -> Iterator[Callable[..., tuple[Connection, Any]]]:
    started = []

    def one(block: Segment, number: int) -> tuple[Connection, Any]:
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=read, args=(theirs, block.name, block.nonce, number), daemon=True
        )
        process.start()
        theirs.close()
        started.append(process)
        return ours, process

    yield one
    for process in started:
        process.kill()
        process.join()


def test_locks_of_readers(readers: Callable[..., tuple[Connection, Any]]) -> None:
    """Several readers may read at once, and a loan ends when none of them reads. A reader that is
    killed stops reading, and numbers are not reused."""
    block = Segment(0)
    assert block.take_back(0)
    first = block.lend()
    (one, _), (other, process) = readers(block, first), readers(block, first)
    assert [pipe.recv() for pipe in (one, other)] == ["reads"] * 2
    assert not block.take_back(0.05)
    late, _ = readers(block, first)
    assert late.recv().startswith("StateError: bucket 1 of ")
    one.send("")
    assert one.recv().startswith("StateError: bucket 1 of ")
    second = block.lend()
    assert second > first
    assert not block.take_back(0.05)
    process.kill()
    process.join()
    third = block.lend()
    assert block.take_back(5)
    assert block.take_back(0)
    stale, _ = readers(block, third)
    assert stale.recv().startswith("StateError: bucket 3 of ")
    whole, _ = readers(block, block.lend())
    assert whole.recv() == "reads"
    whole.send("")
    assert whole.recv() == "has read"
    assert block.take_back(5)
    block.close()
    assert block.take_back(0)


def test_a_lock_outlives_a_sweep() -> None:
    """A sender of the same process opens and closes every existing block."""
    block = Segment(8)
    reader = MappedSegment(FOLDER / block.name, block.nonce)
    try:
        with reader.reading(block.lend(), "it"):
            Segment(8).close()
            assert not block.take_back(0.05)
    finally:
        reader.close()
        block.close()


def test_a_trainer_that_closes_its_block(readers: Callable[..., tuple[Connection, Any]]) -> None:
    """The lent memory stays as it is: no reader holds the file."""
    block = Segment(0)
    pipe, _ = readers(block, block.lend())
    assert pipe.recv() == "reads"
    block.close()
    pipe.send("")
    assert "expected the trainer that lends it" in pipe.recv()


# ------------------------------------------------------------------------------------- who cannot
def test_a_worker_on_the_cpu(workers: Callable[..., Workers]) -> None:
    served = workers(device="cpu")
    remote = served.trainer()
    words = (
        "ConfigError: lent tensors: expected a worker on a GPU, got one on the CPU; "
        "lend=False at the sender copies"
    )
    served.refuses(remote, words)
    served.push(remote, on_host=tuple(state(0)))


def test_a_gpu_that_a_worker_does_not_see(
    workers: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = workers()
    remote = served.trainer()
    monkeypatch.setenv("ROLLMESH_SIMT_FIRST", "2")
    served.refuses(
        remote,
        r"ConfigError: GPU 0000:01:00\.0 is not among the devices of this process.*; lend=False "
        r"at the sender copies",
    )
    monkeypatch.delenv("ROLLMESH_SIMT_FIRST")
    served.push(remote)


@pytest.mark.parametrize("rank", [full(0), 1])
def test_a_gpu_that_one_worker_does_not_see(workers: Callable[..., Workers], rank: int) -> None:
    """The other worker has read its part by then: the set ends on both."""
    served = workers(2)
    remote = served.trainer(block_bytes=30_000)
    served.client.rpc("set", rank, "ROLLMESH_SIMT_FIRST", "2")
    served.refuses(remote, "ConfigError: GPU 0000:01:00.0 is not among the devices of this process")
    served.client.rpc("set", rank, "ROLLMESH_SIMT_FIRST", "0")
    served.push(remote)


def test_memory_that_cannot_be_given_back(
    workers: Callable[..., Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = workers()
    remote = served.trainer()
    close = Borrowed.close

    def fails(borrowed: Borrowed) -> None:
        close(borrowed)
        raise rm.DeviceError("cannot be given back")

    with monkeypatch.context() as patched:
        patched.setattr(Borrowed, "close", fails)
        served.refuses(remote, "DeviceError: cannot be given back")
    served.push(remote)


def test_memory_that_nobody_else_can_open(workers: Callable[..., Workers]) -> None:
    """The trainer ends the update that it has begun."""
    served = workers()
    remote = served.trainer(settings={"ROLLMESH_SIMT_SEGMENTS": "1"})
    served.refuses(
        remote,
        "UnsupportedTensorError: .*expandable_segments:False.*a WeightSender's lend=False, copies",
    )
    with pytest.raises(rm.StateError, match="without an open update"):
        served.client.finish_weight_update()
    remote.do("environment", ROLLMESH_SIMT_SEGMENTS="0")
    served.push(remote)


def test_a_tensor_in_shards_is_gathered() -> None:
    """The tensor is copied from the host, where it is stored, without using CUDA."""

    class Sharded:
        def full_tensor(self) -> np.ndarray:
            return np.arange(3, dtype=np.float32)

    assert np.array_equal(loans.Lender().take("a", Sharded()), np.arange(3))


def test_a_loan_is_opened_after_its_tensors_were_written_and_described() -> None:
    """Describing a tensor waits for the work that writes it."""
    numbers: list[int] = []

    def open_loan() -> int:
        assert sender._shared is not None
        return int.from_bytes(sender._shared.path.read_bytes()[LOAN : LOAN + 8], "little")

    class Lender(loans.Lender):
        def take(self, name: str, tensor: Any, copy: bool = False) -> Any:
            return loans.OwnedTensor(name, 0, 64, "float32", (1,), (1,), None)

        def describe(self, tensors: Any, number: int) -> dict[str, Any]:
            numbers.extend((number, open_loan()))
            return {}

    class Client:
        init_weight_transfer_engine = finish_weight_update = lambda *_: None
        start_weight_update = init_weight_transfer_engine

        def update_weights(self, _: Any) -> None:
            numbers.append(open_loan())

    sender = WeightSender(Client(), lend=True)
    sender._lender = Lender()
    sender.send({"a": np.ones(1)}, 1)
    assert numbers == [1, 0, 1]


def test_a_worker_closes_what_was_lent_though_the_set_cannot_be_dropped() -> None:
    from rollmesh.vllm.weight_updates import WeightUpdates

    def fails(*_: Any, **__: Any) -> None:
        raise rm.RankLostError("a rank has ended")

    closed: list[bool] = []
    updates: Any = WeightUpdates.__new__(WeightUpdates)
    updates._set, updates.weights = object(), SimpleNamespace(reset=fails)
    updates._segment = SimpleNamespace(close=lambda: closed.append(True))
    with pytest.raises(rm.RankLostError):
        updates.drop("it was refused")
    assert closed == [True]


def test_options_that_do_not_go_together() -> None:
    class Client:
        init_weight_transfer_engine = start_weight_update = update_weights = (
            finish_weight_update
        ) = print

    with pytest.raises(
        rm.ConfigError, match="transport: expected 'shm' with lend=True, got 'folder'"
    ):
        WeightSender(Client(), "folder", lend=True, folder="/tmp")
    for bad in (1, "yes", None):
        with pytest.raises(rm.ConfigError, match=f"lend: expected a bool, got {bad!r}"):
            WeightSender(Client(), lend=bad)


# ------------------------------------------------------------------- what comes instead of a loan
GOOD = {
    "number": 1,
    "process": "1-a",
    "allocations": [["0000:01:00.0", "00" * 64, 100]],
    "tensors": [["a", "float32", [2], [1], 0, 0]],
}

HOST = {"name": "a", "dtype": "float32", "shape": [2], "offset": 0, "bytes": 8, "sum": ""}
NOTHING = {**GOOD, "allocations": [], "tensors": []}


@pytest.mark.parametrize(
    "loan, error, words",
    [
        (5, rm.FormatError, "expected a manifest of lent weights"),
        ({}, rm.FormatError, "expected a manifest of lent weights"),
        (GOOD, rm.DuplicateKeyError, "a: expected it once"),
        (NOTHING, rm.StateError, "bucket 1 of .* that its trainer took back"),
        ({**NOTHING, "number": 2}, rm.UnexpectedKeyError, "a"),
    ],
)
def test_loans_of_a_stranger(
    workers: Callable[..., Workers], loan: Any, error: type[Exception], words: str
) -> None:
    """A block with tensor a on the host and a loan of another trainer, number 2. Each of these ends
    the update, and the old weights serve."""
    served = workers()
    block = Segment(64)
    assert [block.lend(), block.lend()] == [1, 2]
    served.client.init_weight_transfer_engine({"sender": "b"})
    served.client.start_weight_update()
    told = json.dumps({"tensors": [HOST], "lent": loan})
    info = {
        "description": told,
        "size": 8,
        "segment": block.name,
        "nonce": block.nonce,
        "sender": "b",
    }
    with pytest.raises(error, match=words):
        served.client.update_weights(info)
    with pytest.raises(rm.StateError, match="without an open update"):
        served.client.finish_weight_update()
    served.hold()
    block.close()
