"""The trainer's side of vLLM's weight updates, for workers that run on rollmesh
(weight_updates.py). It needs no vLLM in its process.

    sender = WeightSender(client)               client: vllm.LLM, the URL of a vLLM server, or any
                                                object with vLLM's four calls
    sender.send(model, version=7)               whole or not at all; a worker's error is raised
                                                here, with its class if it is rollmesh's

    sender = AsyncWeightSender(async_llm)       the same for vllm.AsyncLLM:  await sender.send(…)

The tensors travel in buckets of bounded size, one per call of update_weights: in a segment of
shared memory that is filled again for each bucket, or, to workers on other machines, by a broadcast
over a Gloo group (transport="distributed"). With lend=True tensors on GPUs are not copied: the
workers' GPUs read them where they are. Each loan lasts for one call of update_weights, which
returns when all workers have read. (A loan of the whole set until its commit lost: a source may
gather its tensors one by one, and all of them need not fit.)
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollmesh.errors import (
    ConfigError,
    DeadlineError,
    StateError,
    SyncAbortedError,
    UnsupportedTensorError,
)
from rollmesh.runtime.arguments import boolean, choice, integer
from rollmesh.runtime.messages import reason, shown
from rollmesh.runtime.threads import starting, to_thread
from rollmesh.vllm.clients import client_of, is_awaited, typed
from rollmesh.vllm.update_info import TRANSPORTS, InitInfo, UpdateInfo, check_timeout
from rollmesh.weights.pieces import is_sharded
from rollmesh.weights.transport.gloo_group import Group
from rollmesh.weights.transport.loans import Held, Lender
from rollmesh.weights.transport.manifest import describe, fill, lay_out
from rollmesh.weights.transport.segment import Bytes, Segment
from rollmesh.weights.transport.tensors import (
    as_array,
    entries_of,
    grouped,
    holds_tensors,
    own_array,
)

BLOCK_BYTES = 128 << 20
LENT_S = 10.0  # how long a failed send waits for workers that still read lent tensors
GivenUp = Callable[[], bool]
Bucket = list[tuple[str, NDArray[Any] | Held]]


class Call(NamedTuple):
    """One of vLLM's calls, and what this process does meanwhile."""

    method: str
    args: tuple[Any, ...] = ()
    meanwhile: Callable[[GivenUp], None] | None = None


Calls = Generator[Call, Any, None]  # yields calls; their results are sent back in


class _Sending:
    """The steps of a send, for both kinds of client."""

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
        block_bytes         of tensors in one bucket; a larger tensor is a bucket by itself
        cast                convert other float dtypes to the model's, as torch's .to() does; else
                            DTypeError
        allow_bias_removal  a router bias that the serving version has may be absent (then zero)
        verify              the workers compare a checksum of each tensor that is copied; lent
                            tensors have none
        lend                shm: tensors on GPUs (of any library, by DLPack) are lent to workers on
                            GPUs of this machine, which read them without a copy; others are copied.
                            They must not change while `send`
                            runs: an iterator must not use the memory of one for another.
                            UnsupportedTensorError for GPU memory that no other process can
                            open; ConfigError if a worker is on the CPU or does not see the tensors'
                            GPU, or if a build has no CUDA library: lend=False copies through the
                            host
        pause               pause generation during a send, unless it is paused already; running
                            requests are kept. None: where that is necessary (vLLM's LLM or AsyncLLM
                            with several data parallel ranks) or may be (a server)
        master_address, master_port, num_workers
                            distributed: the address at which this process listens from the first
                            send on (port 0: a free one; a given port may stay in use for a while
                            after a failed send), and the number of workers of all data parallel
                            ranks
        timeout             seconds: in a distributed group for another rank, and for a server's
                            answer to one call
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
                raise ConfigError(
                    "transport: expected 'shm' with lend=True, got 'distributed': GPU memory is "
                    "lent on its own machine"
                )
            if not isinstance(master_address, str) or num_workers is None:
                raise ConfigError(
                    "transport='distributed': expected master_address and num_workers"
                )
            integer("num_workers", num_workers, 1, 2**16 - 1)
        elif (master_address, master_port, num_workers) != (None, 0, None):
            raise ConfigError("transport='shm' takes no master_address, master_port or num_workers")
        self._name = secrets.token_hex(16)
        self._address, self._port, self._num_workers, self._timeout = (
            master_address,
            master_port,
            num_workers,
            timeout,
        )
        self._shared: Segment | None = None
        self._previous: Segment | None = None
        self._group: Group | None = None
        self._client = self._checked(client)
        self._closed = self._sends = False

    def _checked(self, client: Any) -> Any:
        raise NotImplementedError

    def _pauses(self) -> bool:
        pauses = self._client.spans if self._pause is None else self._pause
        if pauses and not hasattr(self._client, "hold"):
            raise ConfigError(
                "pause: expected None for a client that has only the four calls, got True; pause "
                "it yourself"
            )
        return bool(pauses)

    def _send(self, source: Any, version: int, label: str | None) -> Calls:
        version = integer("version", version, 0, 2**63 - 1)
        label = str(version) if label is None else _checked_label(label)
        source = _source(source)
        if self._closed or self._sends:
            raise StateError(
                "the sender is closed"
                if self._closed
                else "the sender is sending already; send one set after another"
            )
        self._sends = True
        try:
            self._close_segment()  # left by a send whose end a Ctrl-C cut short
            yield from self._begin()
            yield Call("start_weight_update")
            yield from self._buckets(source, version)
            yield Call("finish_weight_update", (label,))
            if hasattr(self._client, "serving"):
                try:
                    served = yield Call("serving")
                except Exception as error:
                    raise SyncAbortedError(
                        f"weights committed; asking for the served version failed: {error}"
                    ) from error
                _require(version, served)
        except BaseException:
            # trainer and workers may be at different points of the exchange; the next send makes a
            # new group
            self._close_group()
            raise
        finally:
            self._sends = False
            self._close_segment()

    def _begin(self) -> Calls:
        """Over shm before every set, which ends an update that a trainer left open. A group is made
        once."""
        if self._transport == "shm":
            yield Call("init_weight_transfer_engine", (asdict(self._info()),))
        elif self._group is None:
            assert self._address is not None
            assert self._num_workers is not None
            self._group = Group.listening(
                self._address, self._port, self._num_workers + 1, self._timeout
            )
            yield Call(
                "init_weight_transfer_engine",
                (asdict(self._info(self._group)),),
                self._group.gather,
            )

    def _info(self, group: Group | None = None) -> InitInfo:
        options: dict[str, Any] = {
            "sender": self._name,
            "cast": self._cast,
            "allow_bias_removal": self._allow_bias_removal,
        }
        if group is None:
            return InitInfo("shm", **options)
        return InitInfo("distributed", **options, master_address=self._address,
        master_port=group.port, world_size=group.world,
                        timeout=self._timeout)  # fmt: skip

    def _buckets(self, source: Mapping[str, Any] | Iterable[Any], version: int) -> Calls:
        """One call per bucket. If the source fails, the workers are told to drop the update."""
        copy = not holds_tensors(source)

        def taken(name: str, tensor: Any) -> NDArray[Any] | Held:
            if self._lender is None:
                return (own_array if copy else as_array)(name, tensor)
            return self._lender.take(name, tensor, copy)

        pairs = ((name, taken(name, tensor)) for name, tensor in entries_of(source))
        buckets = grouped(pairs, self._block_bytes)
        while True:
            bucket: Bucket | None = None  # no reference to tensors that were lent before
            try:
                bucket = next(buckets, None)
                call = None if bucket is None else self._call(bucket, version)
            except BaseException as error:
                yield Call(
                    "update_weights", (asdict(UpdateInfo(sender=self._name, abort=reason(error))),)
                )
                raise
            if call is None:
                return
            yield from self._until_read(call)
            self._close_previous()
            if self._shared is not None:
                self._shared.unlink()  # all workers have it open

    def _until_read(self, call: Call) -> Calls:
        """Takes the loan back after the call, also if it failed, and waits until no worker has the
        tensors open."""
        try:
            yield call
        except BaseException as error:
            if self._shared is not None and not self._shared.take_back(LENT_S):
                error.add_note(
                    f"a worker still has tensors open that were lent to it, {LENT_S:g} seconds "
                    "later: do not free their memory"
                )
            raise
        if self._shared is not None and not self._shared.take_back(self._timeout):
            raise DeadlineError(
                f"a worker still has tensors open that were lent for a call, {self._timeout:g} "
                "seconds after its return"
            )

    def _call(self, bucket: Bucket, version: int) -> Call:
        held = [tensor for _, tensor in bucket if isinstance(tensor, Held)]
        arrays = [(name, tensor) for name, tensor in bucket if not isinstance(tensor, Held)]
        entries, size = lay_out(arrays)
        if (group := self._group) is None:
            shared = self._segment_of(size)
            assert shared.data is not None
            entries = fill(shared.data, entries, arrays, sums=self._verify)
            lent = (
                self._lender.describe(held, shared.next_loan)
                if self._lender is not None and held
                else None
            )
            info = UpdateInfo(
                describe(entries, lent).decode(),
                size,
                shared.name,
                shared.nonce,
                self._name,
                version,
            )
            if held:
                shared.lend()
            return Call("update_weights", (asdict(info),))
        data: Bytes = np.empty(size, np.uint8)
        entries = fill(data, entries, arrays, sums=self._verify)
        info = UpdateInfo(describe(entries).decode(), size, sender=self._name, version=version)
        return Call(
            "update_weights", (asdict(info),), lambda given_up: group.broadcast(data, given_up)
        )

    def _segment_of(self, needed: int) -> Segment:
        """A segment with room for so many bytes. The first one has the size of its bucket, which
        may be all; the second has block_bytes. The previous one stays open until the workers have
        opened this one: its lock tells them that the sender lives."""
        if self._shared is None or self._shared.size < needed:
            size = (
                max(needed, self._block_bytes)
                if self._shared is not None and self._shared.size
                else needed
            )
            self._previous, self._shared = self._shared, None
            self._shared = Segment(size)
        return self._shared

    def _close_previous(self) -> None:
        before, self._previous = self._previous, None
        if before is not None:
            before.close()

    def _close_segment(self) -> None:
        self._close_previous()
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()

    def _close_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def close(self) -> None:
        """Closes the group and its port. Shared memory is only held during a send; the workers keep
        serving."""
        self._closed = True
        self._close_group()


class WeightSender(_Sending):
    """For vllm.LLM, a server's URL (started with VLLM_SERVER_DEV_MODE=1), or an object with
    init_weight_transfer_engine(info), start_weight_update(), update_weights(info) and
    finish_weight_update(weight_version). None: another rank of a sharded trainer has the client,
    and this one takes part in gathering DTensors."""

    def _checked(self, client: Any) -> Any:
        if client is None:
            return None
        known = client_of(client, self._timeout)
        if is_awaited(known):
            raise ConfigError(
                f"client: expected calls that are not awaited, got a {type(client).__name__}; use "
                "AsyncWeightSender"
            )
        return known

    def send(self, source: Any, version: int, label: str | None = None) -> None:
        """Sends a set of weights: a module, a state dict, or an iterable of (name, tensor), with
        Hugging Face names.

        version  must exceed the last one; tokens record it
        label    vLLM's name of it (get_weight_version, weight_versions of its outputs); None: the
                 number as text

        Raises a worker's error with its class if it is rollmesh's (ShapeError, IncompleteSyncError,
        VersionError, …), else the client's own exception; SyncAbortedError if workers were lost.
        The old version keeps serving in all cases, unless the error says otherwise: at the end LLM,
        AsyncLLM and a server are asked which version their workers serve.
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
                    calls.throw(typed(error))
                    raise
        finally:
            calls.close()  # it has not ended if a Ctrl-C came between two calls

    def _make(self, call: Call, pool: ThreadPoolExecutor) -> Any:
        method = getattr(self._client, call.method)
        if call.meanwhile is None:
            return method(*call.args)
        with starting(f"{call.method} over a group"):
            made = pool.submit(method, *call.args)
        try:
            call.meanwhile(lambda: made.done() and made.exception() is not None)
        except SyncAbortedError:
            made.result()  # the call's own error says more
            raise
        return made.result()


class AsyncWeightSender(_Sending):
    """The same for vllm.AsyncLLM, or an object whose four calls are awaited."""

    def _checked(self, client: Any) -> Any:
        known = client_of(client, self._timeout)
        if not is_awaited(known):
            raise ConfigError(
                f"client: expected calls that are awaited, got a {type(client).__name__}; use "
                "WeightSender"
            )
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
        """Pauses generation. If the caller is cancelled meanwhile, waits for the pause and ends
        it."""
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
                    calls.throw(typed(error))
                    raise
        finally:
            calls.close()  # as above

    async def _make(self, call: Call) -> Any:
        made = asyncio.ensure_future(getattr(self._client, call.method)(*call.args))
        try:
            if call.meanwhile is not None:

                def given_up() -> bool:
                    return made.done() and (made.cancelled() or made.exception() is not None)

                await to_thread(call.meanwhile, given_up)
        except SyncAbortedError:
            await made  # the call's own error says more
            raise
        except asyncio.CancelledError:
            made.cancel()  # the thread stops waiting then
            raise
        return await made


def _next(calls: Calls, returned: Any) -> Call | None:
    """The next call. returned: the result of the previous one."""
    try:
        return calls.send(returned)
    except StopIteration:
        return None


def _require(version: int, served: list[Any]) -> None:
    """SyncAbortedError unless all workers serve the version or a later one. vLLM's multiprocess
    executor may mix up replies to different calls (after collective_rpc of an unknown name, for
    instance), and then a refused set looks committed."""
    if not all(str(one).isdecimal() and int(str(one)) >= version for one in served):
        raise SyncAbortedError(
            f"expected the workers to serve version {version} after the send, got "
            f"{', '.join(map(shown, served))}"
        )


def _checked_label(label: Any) -> str:
    """Refuses a label that is not UTF-8 text: vLLM's front end would fail at every later
    request."""
    with suppress(UnicodeEncodeError):
        if isinstance(label, str) and label.encode():
            return label
    raise ConfigError(f"label: expected text or None, got {shown(label)}")


# ---------------------------------------------------------------------------------------- sources
def _source(source: Any) -> Mapping[str, Any] | Iterable[Any]:
    """A module's state dict, a mapping or pairs."""
    if callable(getattr(source, "state_dict", None)):
        source = source.state_dict()
    if not isinstance(source, Iterable) or isinstance(source, (str, bytes)):
        raise UnsupportedTensorError(
            "source: expected a module, a mapping or pairs (name, tensor), got a "
            f"{type(source).__name__}"
        )
    return source


def _gather(source: Any) -> None:
    """What a rank without a client does: full_tensor() is a collective of the trainer."""
    for _, tensor in entries_of(_source(source)):
        if is_sharded(tensor):
            tensor.full_tensor()
