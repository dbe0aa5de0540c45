"""sources.send_weights and receive_weights: weights from one rank to others, by rollmesh's own
groups (NCCL between simulated GPUs, shared memory) and by torch's (Gloo; and what is done with
tensors of GPUs, over Gloo, on the CPU). Ranks are processes, tests/support/stream_ranks.py.

Oracle: the same weights synced from the host by one generator on the CPU, by digest (of every
stored value) and logits. Bound: equality. What goes wrong on any rank is a typed error on all, in
time, and the version before serves.
"""

from __future__ import annotations

import multiprocessing
import re
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
import stream_ranks
from marks import some
from native_build import standin
from stream_ranks import State, seen

import rollmesh as rm
from rollmesh import sources
from rollmesh.runtime.devices import LIBRARY_SWITCH

KINDS = ("nccl", "shm", "gloo", "torch")
LOSING = KINDS[:3]  # torch's groups alike
DENSE, MOE = helpers.tiny_config(), helpers.tiny_config(moe=True)
SOON = 20.0  # seconds in which a fault has to be known, far above what it takes
GIVEN = {"nccl": "DeviceArray", "shm": "ndarray", "gloo": "ndarray", "torch": "Tensor"}


class Ranks:
    """Processes of one group; rank 0 sends unless a test says otherwise."""

    def __init__(
        self,
        kind: str,
        settings: dict[str, str],
        folder: Path,
        world: int = 3,
        timeout: float = 60.0,
        device: str | None = None,
    ):
        self.kind, self.world = kind, world
        name = f"stream-{secrets.token_hex(8)}"
        name = name if kind in ("nccl", "shm") else str(folder / name)
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(world):
            pipe, end = context.Pipe()
            arguments = (end, settings, kind, rank, world, name, timeout, device)
            self.processes.append(
                context.Process(target=stream_ranks.serve, args=arguments, daemon=True)
            )
            self.processes[-1].start()
            self.pipes.append(pipe)
            end.close()

    def __call__(self, *commands: tuple[Any, ...], limit: float = 60.0) -> list[Any]:
        """(method, *arguments, {keywords}) of each rank, together: its answer, or the text of its
        error. None: it has ended."""
        for pipe, (method, *given, options) in zip(self.pipes, commands, strict=True):
            pipe.send([method, given, options])
        return [self._answer(rank, limit) for rank in range(self.world)]

    def _answer(self, rank: int, limit: float) -> Any:
        assert self.pipes[rank].poll(limit), f"rank {rank}: no answer in {limit} s"
        try:
            answer, error, _ = self.pipes[rank].recv()
        except EOFError:
            return None
        return answer if error is None else error

    def stream(
        self,
        config: helpers.Config,
        seed: int,
        sender: dict[str, Any],
        receiver: dict[str, Any] | None = None,
    ) -> list[Any]:
        """One stream into the generators."""
        return self(
            ("send", config, seed, sender), *[("receive", receiver or {})] * (self.world - 1)
        )

    def make(self, config: helpers.Config, **options: Any) -> None:
        device = "cuda" if self.kind == "nccl" else "cpu"
        answers = self(*[("make", config, device, options)] * self.world)
        assert answers == [None] * self.world

    def serve(self) -> list[Any]:
        return self(*[("serves", {})] * self.world)[1:]

    def end(self, codes: tuple[int, ...] = (0,)) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                with suppress(BrokenPipeError):  # it ends just now
                    pipe.send(None)
        for process in self.processes:
            process.join(60)
            assert process.exitcode in codes


@pytest.fixture(scope="module")
def settings(simt_library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    library = standin(tmp_path_factory.mktemp("standin"))
    return {
        LIBRARY_SWITCH: str(simt_library),
        "NCCL_LIBRARY": str(library),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module", params=some(KINDS, [0, 1]))
def ranks(
    request: pytest.FixtureRequest,
    settings: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Ranks]:
    if request.param in ("gloo", "torch"):
        pytest.importorskip("torch")
    made = Ranks(request.param, settings, tmp_path_factory.mktemp("store"))
    yield made
    made.end()


@pytest.fixture
def others(settings: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    """Ranks of one test, which may end."""
    started: list[Ranks] = []

    def start(kind: str, **options: Any) -> Ranks:
        started.append(Ranks(kind, options.pop("settings", settings), tmp_path, **options))
        return started[-1]

    yield start
    for made in started:
        made.end()


def from_the_host(config: helpers.Config, state: State, **options: Any) -> list[Any]:
    """[digest, version, logits] of one generator on the CPU."""
    generator = rm.Generator(rm.ModelSpec.from_hf(config), **{**helpers.SMALL, **options})
    with generator:
        return [generator.sync_weights(state, cast=True).digest, *seen(generator)]


def state_of(config: helpers.Config, seed: int, dtype: str = "float32") -> State:
    return helpers.numpy_state_dict(config, seed=seed, dtype=dtype)


def nbytes(state: State) -> int:
    """Of the buckets, whose tensors begin at multiples of 64."""
    return sum((array.nbytes + 63) // 64 * 64 for array in state.values())


def versions_apart(told: list[Any]) -> list[Any]:
    """Answers of `receive` without how many syncs there were before."""
    return [answer[:1] + answer[2:] for answer in told]


# ---------------------------------------------------------------------------------------- weights
@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_a_stream(ranks: Ranks, config: helpers.Config) -> None:
    """Three versions, in buckets of one tensor, of some and of all; float32 becomes bfloat16."""
    ranks.make(config)
    for seed, size in enumerate((1, 5000, 1 << 30)):
        state = state_of(config, seed)
        told = ranks.stream(config, seed, {"bucket_bytes": size}, {"kinds": True})
        want = [[GIVEN[ranks.kind]], *from_the_host(config, state)]
        want[2] = seed
        assert told == [nbytes(state), want, want]


@pytest.mark.parametrize("where", some(["host", "other", "mixed", "strided", "passing"], [2, 4]))
def test_tensors_of_any_memory(ranks: Ranks, where: str) -> None:
    """Of the host, of another GPU than the stream's, of all at once, such as do not lie in C order,
    and such as are gone soon."""
    ranks.make(MOE)
    told = ranks.stream(MOE, 4, {"where": where, "bucket_bytes": 20000})
    assert told[1:] == [from_the_host(MOE, state_of(MOE, 4))] * 2


def test_without_cast(ranks: Ranks) -> None:
    ranks.make(DENSE, dtype="float32")
    assert (
        ranks.stream(DENSE, 1, {}, {"cast": False})[1:]
        == [from_the_host(DENSE, state_of(DENSE, 1), dtype="float32")] * 2
    )


def tied(state: State) -> State:
    """Both names of the one tensor, as module.state_dict() has them."""
    return {**state, "lm_head.weight": state["model.embed_tokens.weight"]}


def torn(state: State) -> State:
    return {**state, "lm_head.weight": state["model.embed_tokens.weight"] + np.float32(1)}


def test_tied_weights(ranks: Ranks) -> None:
    config = helpers.tiny_config(tie_word_embeddings=True)
    state = state_of(config, 1)
    state.pop("lm_head.weight", None)
    ranks.make(config)
    want = from_the_host(config, tied(state))
    assert ranks.stream(config, 1, {"change": tied})[1:] == [want] * 2
    refused = ranks.stream(config, 1, {"change": torn})
    assert all(answer.startswith("TiedWeightError: ") for answer in refused[1:])
    assert ranks.serve() == [want[1:]] * 2


def test_any_rank_sends(ranks: Ranks) -> None:
    ranks.make(DENSE)
    told = ranks(("receive", {"src": 2}), ("receive", {"src": 2}), ("send", DENSE, 3, {}))
    assert told[:2] == [from_the_host(DENSE, state_of(DENSE, 3))] * 2


def test_what_was_received_stays(ranks: Ranks) -> None:
    """All entries of some buckets are kept and looked at when the stream is over, and again when
    another one has used its memory."""
    want = {name: array.tobytes() for name, array in state_of(DENSE, 5).items()}
    for options in ({}, {"device": "cpu"}):
        assert (
            ranks(("send", DENSE, 5, {"bucket_bytes": 3000}), *[("keep", options)] * 2)[1:]
            == [want] * 2
        )


# -------------------------------------------------------------------------------- what goes wrong
def test_a_sender_that_gives_up(ranks: Ranks) -> None:
    ranks.make(DENSE)
    first = ranks.stream(DENSE, 1, {})
    told = ranks.stream(DENSE, 2, {"fails_at": 4, "bucket_bytes": 1})
    assert told == [
        "KeyError: 'trainer'",
        *["SyncAbortedError: rank 0 gave up sending its weights"] * 2,
    ]
    assert ranks.serve() == [answer[1:] for answer in first[1:]]
    assert (
        ranks.stream(DENSE, 2, {"bucket_bytes": 0})[0]
        == "LimitError: bucket_bytes: expected a number above 0, got 0"
    )
    assert (
        ranks.stream(DENSE, 2, {"bucket_bytes": "1k"})[0]
        == "ConfigError: bucket_bytes: expected a number of bytes, got '1k'"
    )
    assert versions_apart(ranks.stream(DENSE, 2, {})[1:]) == versions_apart(
        [from_the_host(DENSE, state_of(DENSE, 2))] * 2
    )


NAMES = [
    ("model.norm.weight", "DuplicateKeyError: model.norm.weight comes twice"),
    ("", "LimitError: a tensor's name: expected a str of 1 to 1024 characters, got ''"),
    (7, "LimitError: a tensor's name: expected a str of 1 to 1024 characters, got 7"),
]


def nameless(state: State) -> State:
    return {**state, "": np.zeros(3, np.float32)}


@pytest.mark.parametrize("name, error", NAMES)
def test_a_name_that_cannot_be(ranks: Ranks, name: Any, error: str) -> None:
    """Of pairs, in the first bucket and in a later one; of a mapping before the first is sent. The
    version before serves."""
    ranks.make(DENSE)
    first = ranks.stream(DENSE, 1, {})
    aborted = ["SyncAbortedError: rank 0 gave up sending its weights"] * 2
    for size in (1, 1 << 30):
        told = ranks.stream(
            DENSE, 2, {"renamed": (len(state_of(DENSE, 2)) - 1, name), "bucket_bytes": size}
        )
        assert told == [error, *aborted]
    if not name:
        told = ranks(
            ("send", DENSE, 2, {"change": nameless, "bucket_bytes": 1}), *[("take", 1, {})] * 2
        )
        assert told == [error, *aborted]
    assert ranks.serve() == [answer[1:] for answer in first[1:]]


@pytest.mark.parametrize("count", [1, 3])
def test_a_consumer_that_stops_early(ranks: Ranks, count: int) -> None:
    """The rest is taken all the same: the other ranks get all of it, and the group's next stream is
    whole."""
    ranks.make(DENSE)
    names = list(state_of(DENSE, 1))
    told = ranks(("send", DENSE, 1, {"bucket_bytes": 3000}), ("take", count, {}), ("receive", {}))
    assert told[1:] == [names[:count], from_the_host(DENSE, state_of(DENSE, 1))]
    assert versions_apart(ranks.stream(DENSE, 2, {})[1:]) == versions_apart(
        [from_the_host(DENSE, state_of(DENSE, 2))] * 2
    )


def cut(state: State) -> State:
    return {**state, "model.norm.weight": state["model.norm.weight"][:5]}


def test_a_set_that_is_refused(ranks: Ranks) -> None:
    ranks.make(DENSE)
    want = [answer[1:] for answer in ranks.stream(DENSE, 1, {})[1:]]
    told = ranks.stream(DENSE, 2, {"change": cut, "bucket_bytes": 5000})
    assert all(answer.startswith("ShapeError: model.norm.weight") for answer in told[1:])
    assert ranks.serve() == want


@pytest.mark.parametrize(
    "lie, message",
    [
        ("no json", "expected a manifest of weights"),
        ("shape", r"do not hold float32 \[7, "),
        ("dims", r"\[1, 1, 1, 1, |at most [45] dims"),
        ("dtype", "expected a dtype of .*, got 'float99'"),
        ("twice", "comes twice"),
        ("nameless", "a tensor's name: expected a str of 1 to 1024 characters, got ''"),
        ("place", "bytes at 1099511627776 of"),
        ("sum", "expected checksum "),
    ],
)
def test_a_description_that_lies(ranks: Ranks, lie: str, message: str) -> None:
    """FormatError on who reads it, and the next stream is whole. A sum that is wrong is nothing
    where there are none."""
    ranks.make(DENSE)
    told = ranks.stream(DENSE, 1, {"lie": lie, "bucket_bytes": 3000})[1:]
    if lie == "sum" and ranks.kind == "nccl":
        assert told == [from_the_host(DENSE, state_of(DENSE, 1))] * 2
        return
    for answer in told:
        kinds = {
            "dims": "ShapeError" if ranks.kind != "nccl" else "FormatError",
            "twice": "DuplicateKeyError",
            "nameless": "LimitError",
        }
        assert answer.startswith(kinds.get(lie, "FormatError"))
        assert re.search(message, answer)
    assert ranks.stream(DENSE, 2, {})[1:] == [from_the_host(DENSE, state_of(DENSE, 2))] * 2


def test_sums_where_there_are_some(ranks: Ranks) -> None:
    ranks.make(DENSE)
    assert (
        ranks.stream(DENSE, 1, {"lie": "sum"}, {"verify": False})[1:]
        == [from_the_host(DENSE, state_of(DENSE, 1))] * 2
    )
    told = ranks.stream(DENSE, 1, {}, {"verify": True})
    if ranks.kind != "nccl":
        assert versions_apart(told[1:]) == versions_apart(
            [from_the_host(DENSE, state_of(DENSE, 1))] * 2
        )
        return
    assert (
        told[1:]
        == [
            "ConfigError: verify: expected None or False with rm.comm.nccl, got True; it has no "
            "checksums"
        ]
        * 2
    )
    assert told[0].startswith(
        "SyncAbortedError: rank 1: ConfigError: verify: expected None or False"
    )


@pytest.mark.parametrize(
    "commands, message",
    [
        (("send", 0, 1), "rank 0 sends as 0, rank 1 receives from 0, rank 2 receives from 1"),
        (("send", "send", 0), "rank 0 sends as 0, rank 1 sends as 1, rank 2 receives from 0"),
        ((1, 0, 0), "rank 0 receives from 1, rank 1 receives from 0, rank 2 receives from 0"),
        ((2, 2, 2), "rank 0 receives from 2, rank 1 receives from 2, rank 2 receives from 2"),
    ],
    ids=["one means another", "two send", "none sends", "none sends, all alike"],
)
def test_ranks_that_mean_different_senders(
    ranks: Ranks, commands: tuple[Any, ...], message: str
) -> None:
    """All learn it, and the group lives."""
    ranks.make(DENSE)
    told = ranks(
        *[
            ("send", DENSE, 1, {}) if its == "send" else ("receive", {"src": its})
            for its in commands
        ]
    )
    assert (
        told
        == [
            "CollectiveMismatchError: expected one sender, and its rank as src on all ranks, "
            f"got: {message}"
        ]
        * 3
    )
    assert ranks.stream(DENSE, 2, {})[1:] == [from_the_host(DENSE, state_of(DENSE, 2))] * 2


@pytest.mark.parametrize("src", [3, -1, True, "0", None])
def test_a_sender_that_is_no_rank(ranks: Ranks, src: Any) -> None:
    told = ranks(("send", DENSE, 1, {}), ("take", 1, {"src": src}), ("take", 1, {}))
    assert told[1].startswith("ConfigError: src: expected a rank of the group, one of ")
    assert told[1].endswith(f", got {src!r}")
    assert all(
        answer.startswith("SyncAbortedError: rank 1: ConfigError: src: expected a rank")
        for answer in told[::2]
    )


def huge(state: State) -> State:
    """More than any bucket that there was before."""
    return {**state, "model.norm.weight": np.zeros(1 << 20, np.float32)}


def huger(state: State) -> State:
    return {**state, "model.norm.weight": np.zeros(1 << 21, np.float32)}


def test_a_rank_without_room(ranks: Ranks) -> None:
    """A receiver, then the sender: nobody waits for data that has no place, and the group lives."""
    ranks.make(DENSE)
    kind = {"nccl": "CapacityError"}.get(ranks.kind, "MemoryError")
    big = {"bucket_bytes": 1 << 30, "change": huge}
    ranks.stream(DENSE, 1, {})
    told = ranks(("send", DENSE, 1, big), ("without_room", "take", 1, {}), ("receive", {}))
    assert told[1].startswith(f"{kind}: ")
    assert told[0] == told[2]
    assert told[0].startswith(f"SyncAbortedError: rank 1: {kind}: ")
    told = ranks(
        ("without_room", "send", DENSE, 1, {**big, "where": "host", "change": huger}),
        *[("take", 1, {})] * 2,
    )
    assert told[0].startswith(f"{kind}: ")
    assert told[1:] == ["SyncAbortedError: rank 0 gave up sending its weights"] * 2
    assert versions_apart(ranks.stream(DENSE, 2, {})[1:]) == versions_apart(
        [from_the_host(DENSE, state_of(DENSE, 2))] * 2
    )


def test_a_device_where_there_is_none_to_choose(ranks: Ranks) -> None:
    if ranks.kind == "nccl":
        ranks.make(DENSE)
        ranks.stream(DENSE, 1, {})
        for rank, answer in enumerate(
            ranks(*[("take", 1, {"device": f"cuda:{7 - rank}"}) for rank in range(3)])
        ):
            expected = (
                f"ConfigError: device: expected None or 'cuda:{rank}' of this comm's first stream"
            )
            assert answer.startswith(f"{expected}, got 'cuda:{7 - rank}'")
    else:
        told = ranks(*[("take", 1, {"device": "cuda"})] * 3)
        assert all(
            answer.startswith("ConfigError: device: expected None or 'cpu', got 'cuda'")
            for answer in told
        )


WRONG = (
    "gpu",
    "cuda:99",
    "\U0001f600" * 400,
)  # the last takes more bytes as JSON than a rank may tell


@pytest.mark.parametrize("device", some(WRONG, [1]), ids=["unknown", "not there", "long"])
def test_a_device_that_one_rank_names_wrong(
    others: Callable[..., Ranks], ranks: Ranks, device: str
) -> None:
    """All ranks have an error at once, in a comm's first stream and in a later one, and the comm
    lives."""
    begun = others(ranks.kind) if ranks.kind in ("nccl", "shm") else ranks
    for seed in (1, 2):
        begun.make(DENSE)
        told = begun(
            ("send", DENSE, seed, {}), ("take", 1, {"device": device}), ("receive", {}), limit=SOON
        )
        assert told[1].startswith("ConfigError: device: "), told
        assert told[0] == told[2]
        assert told[0].startswith("SyncAbortedError: rank 1: ConfigError: device: "), told
        assert (
            begun.stream(DENSE, seed, {})[1:] == [from_the_host(DENSE, state_of(DENSE, seed))] * 2
        )


def test_a_sender_on_the_host_of_a_comm_of_gpus(others: Callable[..., Ranks]) -> None:
    ranks = others("nccl")
    ranks.make(DENSE)
    for _ in range(2):  # also when there is a GPU that the comm has begun with
        told = ranks(("send", DENSE, 1, {"device": "cpu"}), *[("receive", {})] * 2, limit=SOON)
        assert told[0].startswith(
            "ConfigError: device: expected 'cuda' with rm.comm.nccl(…), got 'cpu'"
        )
        assert told[1] == told[2]
        assert told[1].startswith(
            "SyncAbortedError: rank 0: ConfigError: device: expected 'cuda' with rm.comm.nccl(…), "
            "got 'cpu'"
        )
        ranks.make(DENSE)
        assert ranks.stream(DENSE, 1, {})[1:] == [from_the_host(DENSE, state_of(DENSE, 1))] * 2


def test_a_rank_of_numpy(ranks: Ranks) -> None:
    names = list(state_of(DENSE, 1))[:1]
    assert (
        ranks(("send", DENSE, 1, {"src": np.int64(0)}), *[("take", 1, {"src": np.int32(0)})] * 2)[
            1:
        ]
        == [names] * 2
    )


# ------------------------------------------------------------------------------------- lost ranks
@pytest.mark.parametrize("kind", some(["nccl", "shm"], [1]))
def test_a_consumer_that_is_interrupted(others: Callable[..., Ranks], kind: str) -> None:
    """It waits for nobody, and the others hear of it."""
    ranks = others(kind)
    many = {"bucket_bytes": 1}
    told = ranks(("send", DENSE, 1, many), ("interrupted", 2, {}), ("take", 1000, {}), limit=SOON)
    assert told[1] == "interrupted"
    assert all(answer.startswith("RankLostError: ") for answer in told[::2]), told


@pytest.mark.parametrize("kind", some(LOSING, [0]))
@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_a_rank_that_ends(others: Callable[..., Ranks], kind: str, who: str) -> None:
    ranks = others(kind, timeout=8.0)
    ranks.make(DENSE)
    want = [answer[1:] for answer in ranks.stream(DENSE, 1, {})[1:]]
    if who == "sender":
        told = ranks(
            ("send", DENSE, 2, {"dies_at": 5, "bucket_bytes": 1}),
            *[("receive", {})] * 2,
            limit=SOON,
        )
        left = (1, 2)
    else:
        told = ranks(
            ("send", DENSE, 2, {"bucket_bytes": 1}), ("receive", {}), ("die", 3, {}), limit=SOON
        )
        left = (0, 1)
    errors = (
        ("RankLostError: ",)
        if kind in ("nccl", "shm")
        else ("RankLostError: ", "CollectiveTimeoutError: ")
    )
    for (
        rank
    ) in left:  # Gloo tells those whose connection it was, and leaves the others to their deadline
        assert told[rank].startswith(errors), told
    ranks.pipes[1].send(["serves", [], {}])
    assert ranks._answer(1, SOON) == want[0]


@pytest.mark.parametrize("kind", some(LOSING, [0]))
def test_a_rank_that_does_not_come(others: Callable[..., Ranks], kind: str) -> None:
    ranks = others(kind, world=2, timeout=2.0)
    assert (
        ranks(("ready", {}), ("ready", {})) == [None] * 2
    )  # the clock is not to run while processes begin
    assert ranks(("send", DENSE, 1, {}), ("take", 1, {}))[1] == list(state_of(DENSE, 1))[:1]
    ranks.pipes[0].send(["send", [DENSE, 1], {}])
    assert ranks._answer(0, SOON).startswith("CollectiveTimeoutError: ")


# ---------------------------------------------------------------------------------- of GPUs alone
@pytest.mark.parametrize("variable", some(["ROLLMESH_SIMT_EAGER", "ROLLMESH_SIMT_REVERSED"], [0]))
def test_ranks_on_one_gpu(
    others: Callable[..., Ranks], settings: dict[str, str], variable: str
) -> None:
    """NCCL_MULTI_RANK_GPU_ENABLE=1 is put into the environment, as for a generator."""
    ranks = others("nccl", world=2, device="cuda:0", settings={**settings, variable: "1"})
    ranks.make(MOE)
    assert ranks.stream(MOE, 1, {"where": "mixed", "bucket_bytes": 5000})[1] == from_the_host(
        MOE, state_of(MOE, 1)
    )


def test_a_consumer_whose_stream_lags(others: Callable[..., Ranks]) -> None:
    """What was given out is not written again, whoever still holds it: torch.from_dlpack asks for
    no word of when its stream is through."""
    ranks = others("nccl", world=2)
    want = {name: array.tobytes() for name, array in state_of(DENSE, 5).items()}
    for size in (1, 3000):
        assert ranks(("send", DENSE, 5, {"bucket_bytes": size}), ("lags", {}))[1] == want


@pytest.mark.full
def test_a_put_behind_a_broadcast_that_does_not_end(others: Callable[..., Ranks]) -> None:
    """CUDA holds a copy from the host's memory back until then, without a deadline; the group has
    one."""
    ranks = others("nccl", world=2, timeout=2.0)
    assert ranks(("ready", {}), ("ready", {})) == [None] * 2
    told = ranks(
        ("send", DENSE, 1, {"where": "host", "bucket_bytes": 1}), ("silent", {}), limit=SOON
    )
    assert told[0].startswith("CollectiveTimeoutError: "), told


def test_a_fault_of_the_gpu(others: Callable[..., Ranks], settings: dict[str, str]) -> None:
    """Of NCCL's, on one rank: an error on both, and the version before serves."""
    ranks = others("nccl", world=2, timeout=10.0, settings={**settings, "STANDIN_GROUP": "1:5:1"})
    ranks.make(DENSE)
    want = ranks.stream(DENSE, 1, {})[1][1:]
    told = ranks.stream(DENSE, 2, {"bucket_bytes": 1})
    assert told[1].startswith("DeviceError: "), told
    assert told[0].startswith("RankLostError: "), told
    assert ranks.serve() == [want]


# ------------------------------------------------------------------------------- without a stream
def test_what_is_no_group_of_a_stream(
    settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    alone = rm.comm.shm("stream-alone", 0, 1)
    for comm in (alone, rm.comm.nccl(None, settings["NCCL_LIBRARY"])):
        with pytest.raises(
            rm.ConfigError, match="group: expected a comm of two ranks at least, got one rank"
        ):
            sources.send_weights({}, comm)
        with pytest.raises(rm.ConfigError, match="expected a comm of two ranks at least"):
            next(sources.receive_weights(comm, src=0))
    pytest.importorskip("torch")
    from torch import distributed

    outside = (
        distributed.GroupMember.NON_GROUP_MEMBER
    )  # what new_group gives to a process that is none of its ranks
    for none in ("gloo", 3, rm.Mesh(tp=2), outside):
        message = (
            r"group: expected a comm \(rm.comm.nccl, shm, torch\), torch's ProcessGroup or "
            rf"None, got a {type(none).__name__}"
        )
        if none is outside:
            message = (
                "group: expected a group that this process is in, got torch's NON_GROUP_MEMBER"
            )
        for call in (
            lambda its: sources.send_weights({}, its),
            lambda its: next(sources.receive_weights(its, src=0)),
            rm.comm.torch,
        ):
            with pytest.raises(rm.ConfigError, match=message):
                call(none)
    with pytest.raises(rm.StateError, match=r"torch.distributed is not initialised"):
        sources.send_weights({})
    for wrong in (None, 3, "abc", b"abc"):
        with pytest.raises(
            rm.ConfigError, match=rf"source: expected a mapping .*, got a {type(wrong).__name__}"
        ):
            sources.send_weights(wrong, alone)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch", None)
    for call in (lambda: sources.send_weights({}), rm.comm.torch):
        with pytest.raises(
            rm.ConfigError,
            match=r"group: expected rm.comm.nccl\(…\) or rm.comm.shm\(…\) without torch, got None",
        ):
            call()
    monkeypatch.undo()


def test_a_group_that_torch_has_given_up_is_none(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        gone = distributed.new_group([0])
        distributed.destroy_process_group(gone)
        for call in (
            lambda: sources.send_weights({}, gone),
            lambda: next(sources.receive_weights(gone, src=0)),
            lambda: rm.comm.torch(gone),
        ):
            with pytest.raises(
                rm.StateError,
                match=r"group: expected one that torch.distributed knows, got one that was "
                r"destroyed",
            ):
                call()
    finally:
        distributed.destroy_process_group()


def test_a_comm_that_is_closed_has_no_stream(
    settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    two = rm.comm.nccl(rm.comm.shm("stream-two", 0, 2), settings["NCCL_LIBRARY"])
    two.close()
    with pytest.raises(rm.StateError, match="this comm is closed"):
        sources.send_weights({}, two)
