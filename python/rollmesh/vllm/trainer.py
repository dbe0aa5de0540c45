"""The trainer's side of vLLM's weight updates, for workers that run on rollmesh (weight_updates.py). It needs no vLLM in its process.

    sender = WeightSender(client)               client: vllm.LLM, the URL of a vLLM server, or any object with vLLM's four calls
    sender.send(model, version=7)               whole or not at all; an error of any worker is raised here, by its class where it is ours

    sender = AsyncWeightSender(async_llm)       the same for vllm.AsyncLLM:  await sender.send(…)

The tensors go in blocks of bounded size: a segment of shared memory that is filled again and again, or, for workers on other machines,
broadcasts from here over a Gloo group (transport="distributed"). With lend=True tensors on GPUs stay where they are, and the workers'
GPUs read them there: a loan for each block, that lasts for one call of update_weights, which returns when all workers have read. A loan
of the whole set until its commit lost: a source may gather its tensors one by one, and all of them together need not fit.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollmesh.errors import ConfigError, DeadlineError, StateError, SyncAbortedError, UnsupportedTensorError
from rollmesh.runtime.arguments import boolean, choice, integer
from rollmesh.runtime.messages import reason, shown
from rollmesh.vllm.clients import client_of, is_awaited, understood
from rollmesh.vllm.update_info import TRANSPORTS, InitInfo, UpdateInfo, check_timeout
from rollmesh.weights.pieces import is_sharded
from rollmesh.weights.transport.gloo_group import Group
from rollmesh.weights.transport.loans import Held, Lender
from rollmesh.weights.transport.manifest import describe, fill, lay_out
from rollmesh.weights.transport.segment import Bytes, Segment
from rollmesh.weights.transport.tensors import as_array, bucketed

BLOCK_BYTES = 128 << 20
LENT_S = 10.0  # that a send which has failed waits for workers that read what is lent
GivenUp = Callable[[], bool]
Bucket = list[tuple[str, NDArray[Any] | Held]]


class Call(NamedTuple):
    """One of vLLM's calls, and what this process does while it runs."""

    method: str
    args: tuple[Any, ...] = ()
    meanwhile: Callable[[GivenUp], None] | None = None


Calls = Generator[Call, Any, None]  # is sent what a call has returned


class _Sending:
    """What to call and when, for both kinds of client."""

    def __init__(
        self,
        client: Any,
        transport: str = "shm",
        *,
        block_bytes: int = BLOCK_BYTES,
        cast: bool = False,
        allow_bias_removal: bool = False,
        verify: bool = False,
        lend: bool = False,
        pause: bool | None = None,
        master_address: str | None = None,
        master_port: int = 0,
        num_workers: int | None = None,
        timeout: float = 300.0,
    ):
        """client              as the class says
        transport           "shm": the workers are on this machine; "distributed": on any
        block_bytes         of tensors in one block; a larger tensor gets a block of its size
        cast                convert other float dtypes to the model's, as torch's .to() does; else DTypeError
        allow_bias_removal  a router bias that the serving version has may be absent (then zero)
        verify              the workers compare a sum of each tensor's bytes, but of what is lent
        lend                shm: tensors on GPUs (of any library, by DLPack) are lent to workers on GPUs of this machine, which read them
                            there without a copy; others are copied. They must stay as they are while `send` runs, and are the trainer's
                            again when it has returned or raised. UnsupportedTensorError for GPU memory that no other process can open,
                            ConfigError where a worker is on the CPU or does not see the tensors' GPU, or a build has no CUDA library:
                            lend=False copies by way of the host
        pause               generation pauses during a send, unless it is paused already; running requests are kept. None: where it has to
                            (vLLM's LLM or AsyncLLM with several data parallel ranks) or may have to (a server)
        master_address, master_port, num_workers
                            distributed: where this process listens (port 0: a free one; one that is given may stay taken for a while
                            after a send that failed) once the first send asks the workers to join, and how many they are in all data
                            parallel ranks
        timeout             seconds that one waits for another: in a distributed group, and for a server's answer to one call
        """
        self._transport = choice("transport", transport, TRANSPORTS)
        self._block_bytes = integer("block_bytes", block_bytes, 1, 1 << 40)
        self._cast, self._verify = boolean("cast", cast), boolean("verify", verify)
        self._allow_bias_removal = boolean("allow_bias_removal", allow_bias_removal)
        self._lender = Lender() if boolean("lend", lend) else None
        self._pause = None if pause is None else boolean("pause", pause)
        check_timeout(timeout)
        integer("master_port", master_port, 0, 65535)
        if transport == "distributed":
            if lend:
                raise ConfigError("lend=True with transport='distributed', wanted 'shm': a GPU's memory is opened on its own machine")
            if not isinstance(master_address, str) or num_workers is None:
                raise ConfigError("transport='distributed' without master_address and num_workers, wanted both")
            integer("num_workers", num_workers, 1, 2**16 - 1)
        elif (master_address, master_port, num_workers) != (None, 0, None):
            raise ConfigError("transport='shm' takes no master_address, master_port or num_workers")
        self._name = secrets.token_hex(16)
        self._address, self._port, self._num_workers, self._timeout = master_address, master_port, num_workers, timeout
        self._shared: Segment | None = None
        self._before: Segment | None = None
        self._group: Group | None = None
        self._client = self._checked(client)
        self._closed = self._sends = False

    def _checked(self, client: Any) -> Any:
        raise NotImplementedError

    def _pauses(self) -> bool:
        wanted = self._client.spans if self._pause is None else self._pause
        if wanted and not hasattr(self._client, "hold"):
            raise ConfigError("pause=True for a client of four calls, wanted pause=None: pausing is the caller's")
        return bool(wanted)

    def _send(self, source: Any, version: int, label: str | None) -> Calls:
        version = integer("version", version, 0, 2**63 - 1)
        label = str(version) if label is None else _sendable(label)
        entries = _entries(source)
        if self._closed or self._sends:
            raise StateError(f"the sender {'is closed' if self._closed else 'sends a set already, wanted one after another'}")
        self._sends = True
        try:
            self._leave_block()  # of a send whose end a Ctrl-C has cut short
            yield from self._begin()
            yield Call("start_weight_update")
            yield from self._blocks(entries, version)
            yield Call("finish_weight_update", (label,))
            if hasattr(self._client, "serving"):
                try:
                    served = yield Call("serving")
                except Exception as error:
                    raise SyncAbortedError(f"weights committed; asking for the served version failed: {error}") from error
                _require(version, served)
        except BaseException:
            self._leave_group()  # the two sides may not be at the same place: the next send begins anew
            raise
        finally:
            self._sends = False
            self._leave_block()

    def _begin(self) -> Calls:
        """Before every set over shm: an update that a trainer has left open ends by it. A group is made once."""
        if self._transport == "shm":
            yield Call("init_weight_transfer_engine", (asdict(self._info()),))
        elif self._group is None:
            assert self._address is not None
            assert self._num_workers is not None
            self._group = Group.listening(self._address, self._port, self._num_workers + 1, self._timeout)
            yield Call("init_weight_transfer_engine", (asdict(self._info(self._group)),), self._group.gather)

    def _info(self, group: Group | None = None) -> InitInfo:
        options: dict[str, Any] = {"sender": self._name, "cast": self._cast, "allow_bias_removal": self._allow_bias_removal}
        if group is None:
            return InitInfo("shm", **options)
        return InitInfo("distributed", **options, master_address=self._address, master_port=group.port, world_size=group.world,
                        timeout=self._timeout)  # fmt: skip

    def _blocks(self, entries: Iterator[tuple[str, Any]], version: int) -> Calls:
        """A source that fails on the way ends the update on the workers too."""
        take = as_array if self._lender is None else self._lender.take
        buckets = bucketed(((name, take(name, tensor)) for name, tensor in entries), self._block_bytes)
        while True:
            bucket: Bucket | None = None  # of what was lent nothing is kept
            try:
                bucket = next(buckets, None)
                call = None if bucket is None else self._block(bucket, version)
            except BaseException as error:
                yield Call("update_weights", (asdict(UpdateInfo(sender=self._name, abort=reason(error))),))
                raise
            if call is None:
                return
            yield from self._until_read(call)
            self._leave_before()
            if self._shared is not None:
                self._shared.unlink()  # all workers have it open

    def _until_read(self, call: Call) -> Calls:
        """What is lent for a call is the trainer's again when it has ended, however it has."""
        try:
            yield call
        except BaseException as error:
            if self._shared is not None and not self._shared.take_back(LENT_S):
                error.add_note(f"a worker still has tensors open that were lent to it, {LENT_S:g} seconds later: their memory must stay")
            raise
        if self._shared is not None and not self._shared.take_back(self._timeout):
            raise DeadlineError(f"a worker still has tensors open that were lent for a call, {self._timeout:g} seconds after its return")

    def _block(self, bucket: Bucket, version: int) -> Call:
        held = [tensor for _, tensor in bucket if isinstance(tensor, Held)]
        arrays = [(name, tensor) for name, tensor in bucket if not isinstance(tensor, Held)]
        entries, size = lay_out(arrays, sums=self._verify)
        if (group := self._group) is None:
            shared = self._shared_block(size)
            assert shared.data is not None
            fill(shared.data, entries, arrays)
            lent = self._lender.describe(held, shared.next_loan) if self._lender is not None and held else None
            info = UpdateInfo(describe(entries, lent).decode(), size, shared.name, shared.nonce, self._name, version)
            if held:
                shared.lend()
            return Call("update_weights", (asdict(info),))
        block: Bytes = np.empty(size, np.uint8)
        fill(block, entries, arrays)
        info = UpdateInfo(describe(entries).decode(), size, sender=self._name, version=version)
        return Call("update_weights", (asdict(info),), lambda given_up: group.broadcast(block, given_up))

    def _shared_block(self, needed: int) -> Segment:
        """Of the size of the first one, when that is all; the second time the largest that is wanted as a rule. The one before is held
        until the workers have this one: it tells them that the sender lives."""
        if self._shared is None or self._shared.size < needed:
            size = max(needed, self._block_bytes) if self._shared is not None and self._shared.size else needed
            self._before, self._shared = self._shared, None
            self._shared = Segment(size)
        return self._shared

    def _leave_before(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.close()

    def _leave_block(self) -> None:
        self._leave_before()
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()

    def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def close(self) -> None:
        """Gives the group and its port back; shared memory is held during a send only. What the workers serve stays."""
        self._closed = True
        self._leave_group()


class WeightSender(_Sending):
    """For vllm.LLM, a server's URL (started with VLLM_SERVER_DEV_MODE=1), or an object with init_weight_transfer_engine(info),
    start_weight_update(), update_weights(info) and finish_weight_update(weight_version). None: another rank of the same trainer has the
    client, and this one takes part in gathering DTensors."""

    def _checked(self, client: Any) -> Any:
        if client is None:
            return None
        known = client_of(client, self._timeout)
        if is_awaited(known):
            raise ConfigError(f"client is a {type(client).__name__}, whose calls are awaited, wanted an AsyncWeightSender for it")
        return known

    def send(self, source: Any, version: int, label: str | None = None) -> None:
        """A set of weights: a module, a state dict, or an iterable of (name, tensor), all of them under their Hugging Face names.

        version  must exceed the last one; tokens name it
        label    what vLLM calls it (get_weight_version, weight_versions of its outputs); None: the number as text

        Raises what a worker raised, if that is of ours (ShapeError, IncompleteSyncError, VersionError, …), else the client's own
        exception; SyncAbortedError where workers went away. In all cases the version before serves, unless the error says otherwise:
        LLM, AsyncLLM and a server are asked at the end what their workers serve.
        """
        if self._client is None:
            _gather(source)
            return
        held = self._pauses() and self._client.hold()
        try:
            with ThreadPoolExecutor(1) as pool:
                self._drive(self._send(source, version, label), pool)
        finally:
            if held:
                self._client.release()

    def _drive(self, calls: Calls, pool: ThreadPoolExecutor) -> None:
        returned = None
        try:
            while (call := _next(calls, returned)) is not None:
                try:
                    returned = self._make(call, pool)
                except BaseException as error:
                    calls.throw(understood(error))
                    raise
        finally:
            calls.close()  # it still waits where a Ctrl-C came between two calls

    def _make(self, call: Call, pool: ThreadPoolExecutor) -> Any:
        method = getattr(self._client, call.method)
        if call.meanwhile is None:
            return method(*call.args)
        made = pool.submit(method, *call.args)
        try:
            call.meanwhile(lambda: made.done() and made.exception() is not None)
        except SyncAbortedError:
            made.result()  # its reason is the better one
            raise
        return made.result()


class AsyncWeightSender(_Sending):
    """The same for vllm.AsyncLLM, or an object whose four calls are awaited."""

    def _checked(self, client: Any) -> Any:
        known = client_of(client, self._timeout)
        if not is_awaited(known):
            raise ConfigError(f"client is a {type(client).__name__}, whose calls are not awaited, wanted a WeightSender for it")
        return known

    async def send(self, source: Any, version: int, label: str | None = None) -> None:
        """As WeightSender.send. The source is read and copied in the event loop's thread."""
        held = self._pauses() and await self._held()
        try:
            await self._drive(self._send(source, version, label))
        finally:
            if held:
                await self._client.release()

    async def _held(self) -> bool:
        """A pause that was asked for is gone through with, and ended if the caller has gone meanwhile."""
        holding = asyncio.ensure_future(self._client.hold())
        try:
            return bool(await asyncio.shield(holding))
        except asyncio.CancelledError:
            if await holding:
                await self._client.release()
            raise

    async def _drive(self, calls: Calls) -> None:
        returned = None
        try:
            while (call := _next(calls, returned)) is not None:
                try:
                    returned = await self._make(call)
                except BaseException as error:
                    calls.throw(understood(error))
                    raise
        finally:
            calls.close()  # as above

    async def _make(self, call: Call) -> Any:
        made = asyncio.ensure_future(getattr(self._client, call.method)(*call.args))
        try:
            if call.meanwhile is not None:
                await asyncio.to_thread(call.meanwhile, lambda: made.done() and (made.cancelled() or made.exception() is not None))
        except SyncAbortedError:
            await made  # its reason is the better one
            raise
        except asyncio.CancelledError:
            made.cancel()  # which ends what the thread waits for
            raise
        return await made


def _next(calls: Calls, returned: Any) -> Call | None:
    """returned: by the call before, None before the first."""
    try:
        return calls.send(returned)
    except StopIteration:
        return None


def _require(version: int, served: list[Any]) -> None:
    """vLLM's multiprocess executor may take one worker's reply for that to another call (a name that no worker has, called by
    collective_rpc, is enough), and then a set that was refused for one that was taken."""
    if not all(str(one).isdecimal() and int(str(one)) >= version for one in served):
        raise SyncAbortedError(f"the workers say that they serve {', '.join(map(shown, served))} after a send of version {version}")


def _sendable(label: Any) -> str:
    """vLLM's front end fails at a label that it cannot read, with the first request and for good."""
    with suppress(UnicodeEncodeError):
        if isinstance(label, str) and label.encode():
            return label
    raise ConfigError(f"label = {shown(label)}, wanted text or None")


# -------------------------------------------------------------------------------------------------- sources
def _entries(source: Any) -> Iterator[tuple[str, Any]]:
    if callable(getattr(source, "state_dict", None)):
        source = source.state_dict()
    if isinstance(source, Mapping):
        return iter(source.items())
    if not isinstance(source, Iterable) or isinstance(source, (str, bytes)):
        raise UnsupportedTensorError(f"source is a {type(source).__name__}, wanted a module, a mapping or an iterable of (name, tensor)")
    return map(_pair, source)


def _pair(entry: Any) -> tuple[str, Any]:
    if not isinstance(entry, (tuple, list)) or len(entry) != 2:
        raise UnsupportedTensorError(f"source has a {type(entry).__name__}, wanted pairs (name, tensor)")
    return entry[0], entry[1]


def _gather(source: Any) -> None:
    """The part of a rank without a client: full_tensor() is a collective of the trainer's."""
    for _, tensor in _entries(source):
        if is_sharded(tensor):
            tensor.full_tensor()
