"""vLLM's calls on a worker for new weights, without vLLM's engine (test_vllm_updates.py tests them
with the engine).

Input: a small MoE model; sets that are complete, spoiled in one place, or cut off. Oracle: the
logits of a Generator with the same weights. Bound: 0 differing bits. After each refusal the old
weights serve, and a good set is accepted.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers import numpy_state_dict

import rollmesh as rm
from rollmesh.errors import Error
from rollmesh.vllm.update_info import InitInfo, UpdateInfo

pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

import vllm_ranks as ranks  # noqa: E402
from vllm_served import (  # noqa: E402
    CONFIG,
    DTYPE,
    LATE,
    SHM,
    SPOILED,
    Served,
    alone,  # noqa: F401
    bits,
    nan,
    served,  # noqa: F401
    state,
    two,  # noqa: F401
)

from rollmesh.vllm.trainer import WeightSender  # noqa: E402
from rollmesh.weights.transport import manifest, segment  # noqa: E402


# ------------------------------------------------------------------------- sets by the four calls
@pytest.mark.parametrize("how", SPOILED)
def test_a_spoiled_set(served: Served, how: str) -> None:
    """The bad tensor comes late, when most of the set is staged; the caller gets the error by its
    class, from one process or two."""
    spoil, error = SPOILED[how]
    with pytest.raises(error):
        served.sender.send(spoil(state(served.version + 1)), served.version + 1)
    served.still_works()


def test_calls_out_of_order(served: Served) -> None:
    client = served.client
    for call, words in (
        (lambda: client.update_weights({}), "update_weights without an open update"),
        (client.finish_weight_update, "finish_weight_update without an open update"),
        (lambda: client.rpc("start_draft_weight_update"), "no draft model"),
        (lambda: client.rpc("reset_weights"), "reset_weights is not supported"),
    ):
        with pytest.raises((rm.StateError, RuntimeError), match=f"StateError: .*{words}"):
            call()
    client.start_weight_update()
    with pytest.raises(
        (rm.StateError, RuntimeError), match="shutdown_weight_transfer_engine within an update"
    ):
        client.rpc("shutdown_weight_transfer_engine")
    client.start_weight_update()  # again: there is nothing in it yet
    with pytest.raises((rm.IncompleteSyncError, RuntimeError), match="IncompleteSyncError"):
        client.finish_weight_update()
    client.rpc("shutdown_weight_transfer_engine")
    with pytest.raises((rm.StateError, RuntimeError), match="init_weight_transfer_engine first"):
        client.start_weight_update()
    client.init_weight_transfer_engine({})
    client.start_weight_update()  # the trainer leaves here; the next one starts again
    served.sender = WeightSender(client)
    served.still_works()


# ---------------------------------------------------------------------- blocks that are not right
class Block:
    """A whole set in one shared block, which tests spoil."""

    def __init__(self, version: int):
        arrays = [
            (name, x.view(np.uint16).view(rm.sources.BF16)) for name, x in state(version).items()
        ]
        self.shared = segment.Segment(1 << 20)
        assert self.shared.data is not None
        entries, size = manifest.lay_out(arrays)
        entries = manifest.fill(self.shared.data, entries, arrays, sums=True)
        self.path = SHM / self.shared.name
        self.info: dict[str, Any] = {
            "description": manifest.describe(entries).decode(),
            "size": size,
            "version": version,
        }
        self.info |= {"segment": self.shared.name, "nonce": self.shared.nonce}

    def described(self, change: Callable[[dict[str, Any]], None]) -> None:
        told = json.loads(self.info["description"])
        change(told["tensors"][40])
        self.info["description"] = json.dumps(told)


def _changed_byte(block: Block) -> None:
    assert block.shared.data is not None
    block.shared.data[block.info["size"] // 2] ^= 1


BLOCKS: dict[str, tuple[Callable[[Block], Any], str]] = {
    "cut off": (
        lambda b: os.truncate(b.path, segment.aligned(segment.HEAD) + 2936),
        "FormatError: .* bytes of weights, got 2936",
    ),
    "cut to nothing": (lambda b: os.truncate(b.path, 0), "FormatError: .* bytes at least, got 0"),
    "mode": (
        lambda b: b.path.chmod(0o644),
        "AuthError: .* with mode 0600, got owner .* mode -rw-r--r--",
    ),
    "nonce": (
        lambda b: b.info.update(nonce="0" * 32),
        "AuthError: .* expected a file of the sender",
    ),
    "no such file": (
        lambda b: b.info.update(segment="rollmesh-weights-" + "0" * 32),
        "AuthError: .* does not exist",
    ),
    "another path": (
        lambda b: b.info.update(segment="../../etc/passwd"),
        "FormatError: .* of a WeightSender, got segment",
    ),
    "a link": (
        lambda b: (
            b.path.rename(b.path.parent / "rollmesh-test"),
            b.path.symlink_to("rollmesh-test"),
        ),
        "AuthError",
    ),
    "a pipe": (
        lambda b: (b.path.unlink(), os.mkfifo(b.path, 0o600)),
        "AuthError: .* mode prw-------",
    ),
    "no segment": (
        lambda b: b.info.update(segment=None),
        "FormatError: .* of a WeightSender, got segment None",
    ),
    "size": (lambda b: b.info.update(size=1 << 41), "FormatError: size: expected an integer"),
    "size below 0": (
        lambda b: b.info.update(size=-1),
        "FormatError: size: expected an integer in .*, got -1",
    ),
    "no JSON": (
        lambda b: b.info.update(description="{"),
        "FormatError: expected a manifest of weights",
    ),
    "another field": (
        lambda b: b.info.update(pickled="gASV"),
        "FormatError: UpdateInfo: expected some of .*, got pickled='gASV'",
    ),
    "no text": (
        lambda b: b.info.update(description="\ud800"),
        "FormatError: expected a manifest of weights",
    ),
    "version": (
        lambda b: b.info.update(version=True),
        "VersionError: version: expected an integer in .*, got True",
    ),
    "a byte": (_changed_byte, "FormatError: .* expected checksum "),
    "offset": (
        lambda b: b.described(lambda t: t.update(offset=1 << 40)),
        "FormatError: .* at 1099511627776",
    ),
    "offset below 0": (lambda b: b.described(lambda t: t.update(offset=-64)), "FormatError"),
    "shape": (lambda b: b.described(lambda t: t.update(shape=[1 << 40, 1 << 40])), "FormatError"),
    "dtype": (
        lambda b: b.described(lambda t: t.update(dtype="object")),
        "FormatError: .* expected a dtype of .*, got 'object'",
    ),
    "name": (lambda b: b.described(lambda t: t.update(name="x" * 2000)), "LimitError"),
    "same name": (
        lambda b: b.described(lambda t: t.update(name="model.norm.weight")),
        "DuplicateKeyError|ShapeError",
    ),
}


@pytest.mark.parametrize("how", BLOCKS)
def test_a_block_that_is_not_right(served: Served, how: str) -> None:
    spoil, words = BLOCKS[how]
    block = Block(served.version + 1)
    try:
        served.client.init_weight_transfer_engine({"transport": "shm"})
        spoil(block)
        served.client.start_weight_update()
        with pytest.raises((Error, RuntimeError), match=words):
            served.client.update_weights(block.info)
        # The error has closed the update.
        with pytest.raises((Error, RuntimeError), match="without an open update"):
            served.client.finish_weight_update()
    finally:
        block.shared.close()
        (SHM / "rollmesh-test").unlink(missing_ok=True)
    served.still_works()


def test_an_update_that_is_started_within_another(served: Served) -> None:
    """The update stays open while its trainer lives, and holds the block; then it is dropped."""
    block = Block(served.version + 1)
    served.client.init_weight_transfer_engine({})
    served.client.start_weight_update()
    served.client.update_weights(block.info)
    with pytest.raises((rm.StateError, RuntimeError), match="another trainer's update is open"):
        served.client.start_weight_update()
    block.shared.close()
    with pytest.raises(
        (rm.StateError, RuntimeError),
        match="start_weight_update within an update, which is dropped",
    ):
        served.client.start_weight_update()
    with pytest.raises((rm.StateError, RuntimeError), match="without an open update"):
        served.client.finish_weight_update()
    served.still_works()


def test_a_block_that_is_cut_while_it_is_open(served: Served) -> None:
    """Reading beyond the end of a mapped file would kill the worker."""
    block = Block(served.version + 1)
    served.client.init_weight_transfer_engine({})
    served.client.start_weight_update()
    served.client.update_weights({**block.info, "description": '{"tensors": []}'})
    os.truncate(block.path, segment.aligned(segment.HEAD) + 4936)
    with pytest.raises(
        (rm.FormatError, RuntimeError), match=r"FormatError: .* bytes of weights, got 4936"
    ):
        served.client.update_weights(block.info)
    block.shared.close()
    served.still_works()


def test_one_version_a_set(served: Served) -> None:
    block = Block(served.version + 1)
    served.client.init_weight_transfer_engine({})
    served.client.start_weight_update()
    served.client.update_weights({**block.info, "description": '{"tensors": []}'})
    with pytest.raises(
        (rm.StateError, RuntimeError), match="a bucket of version None in an update of version"
    ):
        served.client.update_weights({**block.info, "version": None})
    block.shared.close()
    served.still_works()


@pytest.mark.parametrize(
    "info",
    [
        {"transport": "carrier pigeon"},
        {"master_port": 29500},
        {"transport": "distributed"},
        {"transport": "folder"},
        {"cast": 1},
        {"packed": True},
        [],
        None,
    ],
)
def test_an_init_info_that_is_not_right(served: Served, info: Any) -> None:
    with pytest.raises((Error, RuntimeError), match="ConfigError: "):
        served.client.init_weight_transfer_engine(info)
    served.still_works()


# ---------------------------------------------------------------------------------- several ranks
def test_what_one_rank_refuses_all_refuse(two: Served) -> None:
    """A list brings each worker its own block, and one of them is bad. The caller gets the reason,
    and all replies are read, because vLLM's executor would take an unread reply for the reply to
    its next call."""
    for bad in (0, 1):
        block = Block(two.version + 1)
        infos = [dict(block.info), dict(block.info)]
        infos[bad]["size"] = 64
        two.client.init_weight_transfer_engine({})
        two.client.start_weight_update()
        with pytest.raises(
            RuntimeError, match="FormatError" if bad else "SyncAbortedError: rank 0: FormatError"
        ):
            two.client.update_weights(infos)
        assert two.client.left_over() == 0
        block.shared.close()
        two.still_works()
    for spoil in ({"version": two.version + 2}, {"abort": "enough"}):
        block = Block(two.version + 1)
        two.client.init_weight_transfer_engine({})
        two.client.start_weight_update()
        with pytest.raises(
            RuntimeError, match="CollectiveMismatchError: rank 1 is in a bucket of weights of"
        ):
            two.client.update_weights([block.info, block.info | spoil])
        assert two.client.left_over() == 0
        block.shared.close()
        two.still_works()
    two.client.start_weight_update()
    with pytest.raises(
        RuntimeError, match="expected one for each worker, got a list of 1; this is worker 1"
    ):
        two.client.update_weights([{}])
    two.still_works()


def test_a_set_that_is_given_by_rank(two: Served) -> None:
    block = Block(two.version + 1)
    two.client.init_weight_transfer_engine({})
    two.client.start_weight_update()
    two.client.update_weights([block.info, block.info])
    two.client.finish_weight_update()
    two.version += 1
    two.hold()
    block.shared.close()


def test_every_process_of_an_external_launcher_hears_of_it() -> None:
    """Under the external launcher each process has a separate executor."""
    client = ranks.Processes(CONFIG, DTYPE, 2, f"test.{secrets.token_hex(8)}", "external_launcher")
    try:
        with pytest.raises(RuntimeError, match="without an open update"):
            client.finish_weight_update()
        assert client.left_over() == 1
    finally:
        client.close()


# ----------------------------------------------------------------------------------- load_weights
def test_load_weights(served: Served) -> None:
    """Loads one parameter a call, in a dtype that is converted; the next step closes the set."""
    version = served.version + 1
    for name, tensor in ranks.float_words(state(version)).items():
        assert served.client.rpc("load", [(name, tensor)])[-1] == {name}
    served.version = version
    served.hold()
    served.client.rpc("load", list(state(version + 1).items()))
    served.version = version + 1
    served.hold()


def test_load_weights_twice_without_a_step(served: Served) -> None:
    """A repeated name begins the next set: two versions later the last version serves."""
    for version in (served.version + 1, served.version + 2):
        served.client.rpc("load", list(state(version).items()))
    served.version += 2
    served.hold()


def test_load_weights_of_a_part(served: Served) -> None:
    served.client.rpc(
        "load", [item for item in state(served.version + 1).items() if item[0] != LATE]
    )
    with pytest.raises(
        (rm.IncompleteSyncError, RuntimeError),
        match=r"lacks 1 of 71 parameters: .*experts.7.down_proj",
    ):
        served.client.rpc("commit_open_sync")
    if isinstance(served.client, ranks.Processes):
        served.client.skip(1)  # in a step every rank raises, and vLLM reads one reply
    served.still_works()


def test_load_weights_that_are_bad(served: Served) -> None:
    """A bad tensor ends its set, even after all tensors that the set needs; load_weights within an
    update by the four calls loads nothing."""
    good = state(served.version + 1)
    with pytest.raises((rm.UnexpectedKeyError, RuntimeError), match="UnexpectedKeyError"):
        served.client.rpc("load", [*good.items(), ("model.of.nothing", good[LATE])])
    served.hold()
    with pytest.raises((rm.NonFiniteError, RuntimeError), match="NonFiniteError"):
        served.client.rpc(
            "load", [(name, nan(x) if name == LATE else x) for name, x in good.items()]
        )
    with pytest.raises((rm.UnsupportedTensorError, RuntimeError), match="expected pairs"):
        served.client.rpc("load", [1])
    served.still_works()
    served.client.start_weight_update()
    with pytest.raises((rm.StateError, RuntimeError), match="load_weights within an update"):
        served.client.rpc("load", list(good.items()))
    served.still_works()


@pytest.mark.parametrize("how", sorted(SPOILED.keys() - {"none", "float32"}))
def test_load_weights_under_verl(served: Served, how: str) -> None:
    """verl's trainer waits for the answer to each bucket, and an exception is not an answer. So the
    first error of a set is raised when the set is closed, in vLLM's process_weights_after_loading,
    without another step."""
    rpc = served.client.rpc
    spoil, error = SPOILED[how]
    rpc("as_under_verl", True)
    try:
        for spoiled in (True, False):
            entries = list((spoil if spoiled else dict)(state(served.version + 1)).items())
            for first in range(0, len(entries), 7):
                rpc("load", entries[first : first + 7])
            if spoiled:
                with pytest.raises((error, RuntimeError), match=error.__name__):
                    rpc("finish_load")
            else:
                rpc("finish_load")
                served.version += 1
            assert set(rpc("weight_version")) == {served.version}
            served.hold()
    finally:
        rpc("as_under_verl", False)
    served.still_works()


@pytest.mark.parametrize("between", ["bits", "sleep"])
def test_a_trainer_under_verl_that_leaves(served: Served, between: str) -> None:
    """The trainer has sent a bad tensor and never closes the set: the old version keeps serving,
    and the next trainer starts a new set."""
    rpc = served.client.rpc
    rpc("as_under_verl", True)
    try:
        rpc("load", [(LATE, nan(state(served.version + 1)[LATE]))])
        if between == "sleep":
            rpc("sleep", 2)
            rpc("wake_up", None)
        else:
            served.hold()
        rpc("load", list(state(served.version + 1).items()))
        rpc("finish_load")
        served.version += 1
        served.hold()
    finally:
        rpc("as_under_verl", False)
    served.still_works()


def test_a_router_bias_that_comes_last() -> None:
    """The set is complete without the bias; closing the set there would lose the bias."""
    weights = numpy_state_dict(CONFIG, 5, DTYPE, router_bias=True)
    last = sorted(weights, key=lambda name: name.endswith("e_score_correction_bias"))
    assert last[-1].endswith("e_score_correction_bias")
    with rm.Generator(
        rm.ModelSpec.from_hf(CONFIG), dtype=DTYPE, max_model_len=32, kv_cache_gib=0.002, threads=1
    ) as generator:
        generator.sync_weights(weights)
        want = b"".join(logits.tobytes() for logits in generator.logits(ranks.PROMPTS))
    client = ranks.Alone(CONFIG, DTYPE)
    for name in last:
        client.rpc("load", [(name, weights[name])])
    assert client.bits() == want
    client.close()


def test_an_iterator_that_fails(alone: Served) -> None:
    def pairs() -> Iterator[tuple[str, np.ndarray]]:
        yield next(iter(state(3).items()))
        raise OSError("the trainer's disk")

    with pytest.raises(Error, match="OSError: the trainer's disk"):
        alone.client.rpc("load", pairs())
    alone.still_works()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("after", [0, 3])
def test_an_iterator_that_fails_on_one_rank(two: Served, rank: int, after: int) -> None:
    """It may fail before its first tensor too, while the other rank waits in the set's
    beginning."""
    with pytest.raises(
        RuntimeError,
        match=("" if rank else "SyncAbortedError: rank 0: ") + "OSError: the trainer's disk",
    ):
        two.client.rpc("load_cut", list(state(two.version + 1).items()), rank, after)
    assert two.client.left_over() == 0
    two.still_works()


@pytest.mark.parametrize("rank", [0, 1])
def test_an_iterator_that_fails_on_one_rank_under_verl(two: Served, rank: int) -> None:
    """Both ranks keep the error, and do not read the next bucket."""
    rpc, entries = two.client.rpc, list(state(two.version + 1).items())
    rpc("as_under_verl", True)
    try:
        rpc("load_cut", entries, rank, 3)
        assert rpc("load", entries) == [set(), set()]
        with pytest.raises(
            RuntimeError,
            match=("" if rank else "SyncAbortedError: rank 0: ") + "OSError: the trainer's disk",
        ):
            rpc("finish_load")
        assert two.client.left_over() == 0
    finally:
        rpc("as_under_verl", False)
    two.still_works()


def test_the_model_holds_nothing(alone: Served) -> None:
    model = alone.client.worker.updates.model
    assert list(model.parameters()) == []
    assert [type(module).__name__ for module in model.modules()] == ["ServedModel"]
    with pytest.raises(rm.StateError, match="the engine runs the forward pass"):
        model(1)


def test_what_may_replace_compute_logits(alone: Served) -> None:
    """A function that forbids certain tokens is accepted, and two in a row are both applied.
    Anything else is refused, and the previous functions stay."""
    import torch

    model = alone.client.worker.updates.model
    for start in (140, 130):
        compute = model.compute_logits
        model.compute_logits = lambda logits, compute=compute, start=start: compute(
            logits
        ).index_fill(1, torch.arange(start, start + 5), -torch.inf)
    assert model.never_drawn.tolist() == [*range(130, 135), *range(140, 145)]
    rows = torch.arange(2.0)[:, None].expand(-1, ranks.VOCAB)
    for edit, words in (
        (lambda logits: logits + 1, "got one that does more"),
        (lambda logits: logits[:, :9], "got one that does more"),
        (lambda logits: logits.masked_fill(rows.bool(), -torch.inf), "got one that does more"),
        (lambda logits: logits.masked_fill(logits < 3, -torch.inf), "got one that does more"),
        (lambda logits: torch.full_like(logits, -torch.inf), f"sets all {ranks.VOCAB}"),
    ):
        with pytest.raises(rm.ConfigError, match=words):
            model.compute_logits = edit
    assert len(model.never_drawn) == 10
    model.compute_logits = torch.clone
    assert len(model.never_drawn) == 0


def test_a_compute_logits_that_all_ranks_refuse(two: Served) -> None:
    with pytest.raises(RuntimeError, match="got one that does more"):
        two.client.rpc("replace_compute_logits", 1.0)
    assert two.client.left_over() == 0
    two.still_works()


# ------------------------------------------------------------------------------------------ sleep
def test_sleep(served: Served) -> None:
    rpc = served.client.rpc
    rpc("sleep", 1)
    rpc("wake_up", None)
    served.hold()  # level 1 keeps the weights
    rpc("sleep", 2)
    assert set(rpc("weight_version")) == {None}
    with pytest.raises((rm.StateError, RuntimeError), match="asleep; call wake_up"):
        served.sender.send(state(1), served.version + 1)
    rpc("wake_up", ["weights"])
    served.sender.send(state(served.version + 1), served.version + 1)
    served.version += 1
    rpc("wake_up", ["kv_cache"])
    served.hold()
    rpc("discard", ("kv_cache",))
    rpc("wake_up", ["kv_cache"])
    served.hold()
    for call, args in (
        ("sleep", "2"),
        ("sleep", 0),
        ("wake_up", ["scheduling"]),
        ("discard", ["all"]),
    ):
        with pytest.raises((rm.ConfigError, RuntimeError), match="ConfigError"):
            rpc(call, args)
    served.still_works()


def test_sleep_within_a_set(served: Served) -> None:
    """Level 1 keeps the pushed tensors. Level 2 drops them, and the next block gets an error with
    this reason."""
    rpc = served.client.rpc
    rpc("load", list(state(served.version + 1).items()))
    rpc("sleep", 1)
    rpc("wake_up", None)
    served.version += 1
    served.hold()
    served.client.start_weight_update()
    rpc("sleep", 2)
    rpc("wake_up", None)
    with pytest.raises((rm.StateError, RuntimeError), match="without an open update"):
        served.client.update_weights({})
    served.push()


# --------------------------------------------------------------------- the worker's configuration
def test_without_a_configured_transfer() -> None:
    client = ranks.Alone(CONFIG, DTYPE, backend=None)
    with pytest.raises(
        rm.StateError, match=r"weight_transfer_config=WeightTransferConfig\(backend='rollmesh'\)"
    ):
        client.init_weight_transfer_engine({})
    client.rpc("load", list(state(1).items()))
    assert client.bits() == bits(1)
    client.close()
    with pytest.raises(rm.ConfigError, match="expected 'rollmesh', got 'nccl'"):
        ranks.Alone(CONFIG, DTYPE, backend="nccl")


def test_infos_are_plain() -> None:
    """msgpack and JSON can carry them."""
    import msgspec

    for info in (InitInfo(), UpdateInfo("{}", 3, "a", "b", 4)):
        values = dict(vars(info))
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(values)) == values
        assert type(info)(**json.loads(json.dumps(values))) == info


def test_checksums(served: Served) -> None:
    """vLLM's weight checker: equal checksums for equal weights, on any mesh."""
    served.push()
    with rm.Generator(
        rm.ModelSpec.from_hf(CONFIG), dtype=DTYPE, max_model_len=32, kv_cache_gib=0.002, threads=1
    ) as generator:
        want = generator.sync_weights(state(served.version)).digest
    every: dict[str, str] = {}
    for some in served.client.rpc("compute_weight_checksums"):
        assert not every.keys() & some.keys()
        every |= some
    assert every == {"dp0": want}
