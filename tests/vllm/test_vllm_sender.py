"""The trainer's side of vLLM's weight updates: sources, blocks, the group of torch.distributed, and
each kind of client. The workers are real, but run without vLLM's engine.

Input: a small MoE model. Oracle: the logits of a Generator with the same weights. Bound: 0
differing bits."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import rollmesh as rm

pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

import vllm_ranks as ranks  # noqa: E402
from vllm_served import SHM, SPOILED, Served, alone, left_behind, served, state, two  # noqa: E402, F401

from rollmesh.vllm.trainer import AsyncWeightSender, WeightSender  # noqa: E402
from rollmesh.weights.transport import segment  # noqa: E402


# ----------------------------------------------------------------------------- blocks and sources
@pytest.mark.parametrize("block_bytes", [1, 4096, 30_000, 1 << 30])
@pytest.mark.parametrize("verify", [False, True])
def test_blocks_of_any_size(served: Served, block_bytes: int, verify: bool) -> None:
    """Blocks hold from one tensor to all; the largest tensor is larger than some blocks."""
    served.sender.close()
    served.sender = WeightSender(served.client, block_bytes=block_bytes, verify=verify)
    served.push()
    assert left_behind() == [], "the block's name is still there"
    served.push()


def test_versions(served: Served) -> None:
    for version in (served.version, 0):
        with pytest.raises(
            rm.VersionError, match=f"version {version} does not exceed {served.version}"
        ):
            served.sender.send(state(0), version)
        served.hold()
    served.sender.send(state(served.version + 10), served.version + 10, label="step-ten")
    served.version += 10
    served.hold()
    assert served.client.label == "step-ten"
    served.push()


def test_a_source_that_fails(served: Served) -> None:
    """The caller gets the trainer's own exception, the workers' set is dropped, and steps in
    between serve the old version."""

    def source() -> Iterator[tuple[str, np.ndarray]]:
        for i, item in enumerate(state(served.version + 1).items()):
            if i == 40:
                served.hold()
                raise KeyboardInterrupt
            yield item

    with pytest.raises(KeyboardInterrupt):
        served.sender.send(source(), served.version + 1)
    assert left_behind() == []
    with pytest.raises(
        rm.StateError if isinstance(served.client, ranks.Alone) else RuntimeError,
        match="without an open update",
    ):
        served.client.finish_weight_update()
    served.still_works()


def test_blocks_that_are_made_side_by_side() -> None:
    """Each sender removes blocks that others have left, but not a block that is being made."""

    def make() -> None:
        for _ in range(300):
            segment.Segment(64).close()

    with ThreadPoolExecutor(4) as pool:
        for made in [pool.submit(make) for _ in range(4)]:
            made.result()


# --------------------------------------------------------------------------------------- a folder
def test_a_folder(served: Served, tmp_path: Path) -> None:
    """The folder serves workers on any machine. A refused version stays in the folder; a higher
    version is accepted, from another sender too. A source that fails publishes nothing."""
    served.sender = WeightSender(served.client, "folder", folder=str(tmp_path))
    served.push()
    served.push()
    readers = served.client.rpc("weight_version")
    version = served.version + 1
    with pytest.raises(rm.NonFiniteError):
        served.sender.send(SPOILED["not finite"][0](state(version)), version)
    served.hold()
    served.version += 1
    served.push()

    def source() -> Iterator[tuple[str, np.ndarray]]:
        yield next(iter(state(0).items()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        served.sender.send(source(), served.version + 1)
    served.push()
    with pytest.raises(rm.StateError, match="without a DeltaWriter, got one that is open"):
        WeightSender(served.client, "folder", folder=str(tmp_path))
    served.sender.close()
    served.sender = WeightSender(served.client, "folder", folder=str(tmp_path))
    served.push()
    served.sender.close()
    served.sender = WeightSender(served.client, block_bytes=30_000)
    served.still_works()
    assert len(served.client.rpc("weight_version")) == len(readers)


# ----------------------------------------------------------------------------------- two trainers
class Call(NamedTuple):
    method: str
    args: tuple[Any, ...]

    def __await__(self) -> Iterator[Any]:
        yield self


class Stepped:
    """A client whose calls wait until ByHand has made them."""

    spans = False

    def __getattr__(self, method: str) -> Any:
        if method in ("serving", "hold"):
            raise AttributeError(method)
        return lambda *args: Call(method, args)


class ByHand:
    """A send whose calls are made one by one."""

    def __init__(self, served: Served, seed: int):
        self.sender = WeightSender(served.client, block_bytes=30_000)
        self._client, self.sender._client = served.client, Stepped()
        self.begin(state(seed), served.version + 1)

    def begin(self, source: Any, version: int) -> None:
        self._sending = self.sender._send(source, version, None)

    def next(self) -> Call | None:
        """Returns the next call, or None at the end."""
        try:
            return self._sending.send(None)
        except StopIteration:
            return None

    def make(self, count: int = 1 << 30) -> list[Call]:
        made: list[Call] = []
        while len(made) < count and (call := self.next()) is not None:
            self.make_one(call)
            made.append(call)
        return made

    def make_one(self, call: Call) -> None:
        getattr(self._client, call.method)(*call.args)

    def close(self) -> None:
        self._sending.close()
        self.sender.close()


def its_set_serves(served: Served, *trainers: ByHand) -> None:
    """The set of the next version is complete, finished by one of the trainers; both leave, and a
    good set is accepted."""
    served.version += 1
    served.hold()
    for one in trainers:
        one.close()
    served.still_works()


def test_a_trainer_that_comes_while_another_sends(served: Served) -> None:
    """Both trainers give their set the same number. The trainer that has brought a block continues,
    and its whole set serves."""
    first, other = ByHand(served, served.version + 1), ByHand(served, 99)
    first.make(3)  # a trainer begins, an update begins, a block
    with pytest.raises((rm.StateError, RuntimeError), match="another trainer's update is open"):
        other.make()
    first.make()
    its_set_serves(served, first, other)


def test_a_trainer_that_another_has_followed(served: Served) -> None:
    """Another trainer begins before the first block: the block is refused, and the other trainer's
    set contains nothing from it."""
    first, other = ByHand(served, 99), ByHand(served, served.version + 1)
    first.make(2)
    other.make(3)
    with pytest.raises(
        (rm.StateError, RuntimeError), match=r"a bucket of sender '.*' in the update of sender '"
    ):
        first.make()
    other.make()
    its_set_serves(served, first, other)


def test_two_trainers_in_step(served: Served) -> None:
    """The calls of two trainers alternate: the trainer that began last continues."""
    first, other = ByHand(served, 99), ByHand(served, served.version + 1)
    for _ in range(2):
        first.make(1)
        other.make(1)
    with pytest.raises((rm.StateError, RuntimeError), match="a bucket of sender"):
        first.make(1)
    other.make()
    its_set_serves(served, first, other)


def test_a_trainer_is_there_between_two_blocks(served: Served) -> None:
    """The second block is another file, which the workers have not opened yet."""
    first, other = ByHand(served, served.version + 1), ByHand(served, 99)
    small, *more, large = sorted(
        state(served.version + 1).items(), key=lambda entry: entry[1].nbytes
    )
    first.sender._block_bytes = 1  # a tensor a block
    first.begin([small, large, *more], served.version + 1)
    first.make(2)
    before = first.make(1)[0].args[0]["segment"]
    call = first.next()  # the second block is made but has not arrived
    assert call is not None
    assert call.args[0]["segment"] != before
    with pytest.raises((rm.StateError, RuntimeError), match="another trainer's update is open"):
        other.make()
    first.make_one(call)
    first.make()
    its_set_serves(served, first, other)


def test_a_trainer_that_ends_within_its_set(served: Served) -> None:
    """The block of a trainer that has exited is dropped, and the next trainer can begin
    immediately."""
    first = ByHand(served, 99)
    first.make(3)
    first.close()
    served.still_works()


def test_a_second_send_of_one_sender(alone: Served) -> None:
    one = ByHand(alone, 99)
    one.make(3)
    with pytest.raises(rm.StateError, match="is sending already"):
        one.sender.send(state(99), alone.version + 1)
    one.close()
    alone.still_works()


# ---------------------------------------------------------------------------------------- clients
class Awaited:
    def __init__(self, client: ranks.Client):
        self._client = client

    async def init_weight_transfer_engine(self, init_info: Any) -> None:
        await asyncio.to_thread(self._client.init_weight_transfer_engine, init_info)

    async def start_weight_update(self) -> None:
        self._client.start_weight_update()

    async def update_weights(self, update_info: Any) -> None:
        await asyncio.to_thread(self._client.update_weights, update_info)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._client.finish_weight_update(weight_version)


def test_an_awaited_client(alone: Served) -> None:
    sender = AsyncWeightSender(Awaited(alone.client))
    alone.version += 1
    asyncio.run(sender.send(state(alone.version), alone.version))
    alone.hold()
    with pytest.raises(rm.ShapeError):
        asyncio.run(
            sender.send(SPOILED["transposed"][0](state(alone.version + 1)), alone.version + 1)
        )
    sender.close()
    alone.still_works()


def test_a_send_that_is_cancelled(alone: Served) -> None:
    """A send is cancelled while the workers have a block, or wait for a block: all waits end, and
    the next send starts from the beginning."""

    class Stuck(Awaited):
        async def update_weights(self, update_info: Any) -> None:
            updating.set()
            await asyncio.sleep(3600)

    async def push() -> None:
        sending = asyncio.ensure_future(sender.send(state(alone.version + 1), alone.version + 1))
        await updating.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending

    updating, sender = asyncio.Event(), AsyncWeightSender(Stuck(alone.client))
    began = time.monotonic()
    asyncio.run(push())
    assert time.monotonic() - began < 100
    sender.close()
    assert left_behind() == []
    alone.still_works()


class Vllm:
    """The interface of LLM: requests instead of dicts; and it can pause."""

    def __init__(self, client: ranks.Client, data_parallel_size: int = 1, paused: bool = False):
        self._client, self.llm_engine, self.paused, self.heard = client, self, paused, list[Any]()
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_size=data_parallel_size)
        )
        self.start_weight_update, self.finish_weight_update = (
            client.start_weight_update,
            client.finish_weight_update,
        )

    def init_weight_transfer_engine(self, request: Any) -> None:
        self._client.init_weight_transfer_engine(request.init_info)

    def update_weights(self, request: Any) -> None:
        self.heard.append(self.paused)
        self._client.update_weights(request.update_info)

    def collective_rpc(self, method: str) -> Any:
        return self._client.rpc(method)

    def is_sleeping(self) -> bool:
        return self.paused

    def sleep(self, level: int, mode: str) -> None:
        assert (level, mode) == (0, "keep")
        self.paused = True

    def wake_up(self, tags: list[str]) -> None:
        assert tags == ["scheduling"]
        self.paused = False


@pytest.mark.parametrize(
    "data_parallel_size, pause, paused, during",
    [
        (1, None, False, False),
        (2, None, False, True),
        (2, None, True, True),
        (1, True, False, True),
        (2, False, False, False),
    ],
)
def test_a_pause(
    alone: Served, data_parallel_size: int, pause: bool | None, paused: bool, during: bool
) -> None:
    """Data parallel ranks receive weights in a pause; a caller that has already paused resumes
    itself. A refusal ends the pause too."""
    client = Vllm(alone.client, data_parallel_size, paused)
    sender = WeightSender(client, pause=pause)
    alone.version += 1
    sender.send(state(alone.version), alone.version)
    with pytest.raises(rm.ShapeError):
        sender.send(SPOILED["transposed"][0](state(alone.version + 1)), alone.version + 1)
    assert client.heard == [during, during]
    assert client.paused == paused
    alone.still_works()


@pytest.mark.parametrize("found", [None, 0, "None", {"version": 3}])
def test_workers_that_serve_another_version(alone: Served, found: Any) -> None:
    """The value that a call returned was the reply to another call."""

    class Mixed(Vllm):
        def collective_rpc(self, method: str) -> Any:
            return [*super().collective_rpc(method), found]

    alone.version += 1
    with pytest.raises(
        rm.SyncAbortedError, match=f"to serve version {alone.version} after the send"
    ):
        WeightSender(Mixed(alone.client)).send(state(alone.version), alone.version)
    alone.hold()


def test_a_question_that_is_not_answered(alone: Served) -> None:
    class Mute(Vllm):
        def collective_rpc(self, method: str) -> Any:
            raise RuntimeError("no such call")

    alone.version += 1
    with pytest.raises(
        rm.SyncAbortedError, match="weights committed; asking for the served version failed"
    ):
        WeightSender(Mute(alone.client)).send(state(alone.version), alone.version)
    alone.hold()


def test_a_send_that_is_cancelled_in_its_pause(alone: Served) -> None:
    """The pause still completes, and the sender ends it."""

    class Slow:
        def __init__(self) -> None:
            self.vllm_config = SimpleNamespace(
                parallel_config=SimpleNamespace(data_parallel_size=2)
            )
            self.paused = False

        async def init_weight_transfer_engine(self, request: Any) -> None: ...

        async def start_weight_update(self) -> None: ...

        async def update_weights(self, request: Any) -> None: ...

        async def finish_weight_update(self, weight_version: str | None = None) -> None: ...

        async def is_paused(self) -> bool:
            return self.paused

        async def pause_generation(self, mode: str, clear_cache: bool) -> None:
            self.paused = True
            await asyncio.sleep(0.5)

        async def resume_generation(self) -> None:
            self.paused = False

    async def run() -> bool:
        llm = Slow()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(AsyncWeightSender(llm).send({}, 1), 0.1)
        return llm.paused

    assert not asyncio.run(run())


@pytest.mark.parametrize("label", [7, b"seven", "\ud800"])
def test_labels_that_are_none(alone: Served, label: Any) -> None:
    with pytest.raises(rm.ConfigError, match=r"label: expected text or None, got "):
        alone.sender.send(state(99), alone.version + 1, label)
    alone.still_works()


def test_a_closed_sender(alone: Served) -> None:
    sender = WeightSender(Vllm(alone.client))
    sender.close()
    with pytest.raises(rm.StateError, match="closed"):
        sender.send({}, alone.version + 1)


@pytest.fixture
def server(alone: Served) -> Iterator[str]:
    """A server with vLLM's endpoints for trainers."""
    paused = [False]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/is_paused"
            self.answer(200, json.dumps({"is_paused": paused[-1]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            code, told = 200, "done"
            if self.path == "/collective_rpc":
                return self.answer(
                    200,
                    json.dumps({"results": [str(one) for one in alone.client.rpc(body["method"])]}),
                )
            if self.path in ("/pause?mode=keep&clear_cache=false", "/resume"):
                paused.append(self.path != "/resume")
                return self.answer(code, told)
            try:
                getattr(alone.client, self.path.removeprefix("/"))(*body.values())
            except Exception as error:  # noqa: BLE001
                code, told = (
                    500,
                    json.dumps(
                        {"error": {"message": f"Call to collective_rpc method failed: {error}"}}
                    ),
                )
            return self.answer(code, told)

        def answer(self, code: int, told: str) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(told.encode())

        def log_message(self, *args: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{listening.server_address[1]}"
    listening.shutdown()
    thread.join()
    listening.server_close()
    assert paused == [False, True, False, True, False]


def test_a_server(alone: Served, server: str) -> None:
    sender = WeightSender(server + "/")
    alone.version += 1
    sender.send(state(alone.version), alone.version, label="a label")
    alone.hold()
    assert alone.client.label == "a label"
    with pytest.raises(rm.UnexpectedKeyError, match=r"500 .*Call to collective_rpc"):
        sender.send(SPOILED["unexpected"][0](state(alone.version + 1)), alone.version + 1)
    alone.still_works()
    with pytest.raises(rm.SyncAbortedError, match="refused"):
        WeightSender("http://127.0.0.1:9").send({}, 1)


def test_clients_that_are_none(alone: Served) -> None:
    with pytest.raises(rm.ConfigError, match=r"without .*update_weights"):
        WeightSender(object())
    with pytest.raises(rm.ConfigError, match="URL"):
        WeightSender("localhost:8000")
    with pytest.raises(rm.ConfigError, match="AsyncWeightSender"):
        WeightSender(Awaited(alone.client))
    with pytest.raises(rm.ConfigError, match="use WeightSender"):
        AsyncWeightSender(alone.client)
    for source, words in (
        (17, "expected a module"),
        ([1, 2], "pairs .*, got a int"),
        ([(1, 2, 3)], "pairs .*, got a tuple"),
    ):
        with pytest.raises(rm.UnsupportedTensorError, match=words):
            WeightSender(alone.client).send(source, alone.version + 1)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_workers": 1}, "transport: expected one of shm, folder, got 'distributed'; workers"),
        (
            {"transport": "distributed", "master_address": "127.0.0.1", "num_workers": 1},
            "transport: expected one of shm, folder, got 'distributed'; workers on other machines",
        ),
        ({"transport": "pigeon"}, "transport: expected one of shm, folder, got 'pigeon'"),
        ({"transport": "folder"}, "folder: expected a path, got None"),
        ({"folder": "/tmp"}, "folder: expected none, got '/tmp'"),
        ({"transport": "folder", "folder": "/gone"}, "folder: expected a folder that exists"),
        ({"timeout": -1}, "timeout: expected seconds above 0, .*, got -1"),
        ({"timeout": float("nan")}, "timeout: expected seconds above 0, .*, got nan"),
    ],
)
def test_options_that_are_none(alone: Served, options: dict[str, Any], words: str) -> None:
    with pytest.raises(rm.ConfigError, match=words):
        WeightSender(alone.client, **options)


def test_sources(alone: Served) -> None:
    """A module, its state dict, or pairs; another rank of the trainer has no client and only takes
    part in gathering."""
    import torch

    class Module(torch.nn.Module):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            words = state(alone.version)
            return {
                name: torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
                for name, x in words.items()
            }

    for source in (Module(), Module().state_dict, lambda: iter(state(alone.version).items())):
        alone.version += 1
        given = source if isinstance(source, Module) else source()
        WeightSender(None).send(state(alone.version), alone.version)
        alone.sender.send(given, alone.version)
        alone.hold()
