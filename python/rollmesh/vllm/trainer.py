"""The trainer's side of vLLM's weight updates, for workers that run on rollmesh
(weight_updates.py). It needs no vLLM in its process.

    sender = WeightSender(client)           client: vllm.LLM, the URL of a vLLM server, or any
                                            object with vLLM's four calls
    sender.send(model, version=7)           updates all weights or none; raises a worker's error,
                                            of the same class if it is one of rollmesh's

    sender = AsyncWeightSender(async_llm)   the same for vllm.AsyncLLM:  await sender.send(…)

transport="shm": the workers are on this machine. Tensors are sent in buckets of bounded size, one
for each call of update_weights, in a segment of shared memory that is filled again for each bucket.
With lend=True, tensors on GPUs are not copied: the workers' GPUs read them in place. A loan lasts
for one call of update_weights, which returns when all workers have read the tensors, so that a
source may gather its tensors one by one.

transport="folder": the workers are on any machine that sees a folder. Each send publishes a version
there (rollmesh.sources.DeltaWriter), and in one call of update_weights the workers read it.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar, TypeVar

from numpy.typing import NDArray

from rollmesh.errors import (
    ConfigError,
    DeadlineError,
    StateError,
    SyncAbortedError,
    UnsupportedTensorError,
)
from rollmesh.runtime.arguments import boolean, integer, is_unicode, timeout_s
from rollmesh.runtime.messages import reason, shown
from rollmesh.vllm.clients import client_of, is_awaited, typed
from rollmesh.vllm.update_info import InitInfo, UpdateInfo, check_transport
from rollmesh.weights.pieces import is_sharded
from rollmesh.weights.transport.delta_folder import DeltaWriter
from rollmesh.weights.transport.loans import Lender, OwnedTensor
from rollmesh.weights.transport.manifest import check_new_name, describe, fill, lay_out
from rollmesh.weights.transport.segment import Segment
from rollmesh.weights.transport.tensors import (
    as_array,
    entries_of,
    grouped,
    holds_tensors,
    own_array,
)

BLOCK_BYTES = 128 << 20
LENT_S = 10.0  # how long a failed send waits for workers that still read lent tensors
Bucket = list[tuple[str, NDArray[Any] | OwnedTensor]]
T = TypeVar("T")


class _Sending:
    """The steps of a send, for both kinds of client. The client's calls return a result or an
    awaitable."""

    _awaits: ClassVar[bool]  # whether the client's calls are awaited

    def __init__(
        self,
        client: Any,
        transport: str = "shm",
        *,
        folder: str | None = None,
        block_bytes: int = BLOCK_BYTES,
        cast: bool = False,
        allow_bias_removal: bool = False,
        verify: bool = False,
        lend: bool = False,
        pause: bool | None = None,
        timeout: float = 300.0,
        **removed: Any,
    ):
        """client              see the docstring of the class
        transport           "shm": the workers are on this machine; "folder": on any machine
        folder              for "folder": an existing path, the same for this process and all
                            workers. A version that the workers refuse stays in the folder; the
                            next one needs a higher number
        block_bytes         shm: bytes of tensors in one bucket; a larger tensor has its own bucket
        cast                convert other float dtypes to the model's, as torch's .to() does; False:
                            raise DTypeError for them
        allow_bias_removal  accept that a router bias of the serving version is missing (it becomes
                            zero)
        verify              shm: the workers compare a checksum of each copied tensor. Lent tensors
                            have no checksum; tensors in a folder are always compared
        lend                shm: tensors on GPUs (of any library, by DLPack) are lent to workers on
                            GPUs of this machine, which read them without a copy; other tensors are
                            copied. Lent tensors must not change while `send` runs: an iterator
                            must not use the memory of one for another. Raises
                            UnsupportedTensorError for GPU memory that other processes cannot open,
                            and ConfigError if a worker is on the CPU or does not see the tensors'
                            GPU, or if a build has no CUDA library; use lend=False then
        pause               pause generation during a send, unless it is already paused; running
                            requests are kept. None: pause if it is necessary (vLLM's LLM or
                            AsyncLLM with several data parallel ranks) or may be (a server)
        timeout             seconds until a server must have answered one call

        Other arguments belong to the removed transport="distributed" and raise ConfigError.
        """
        check_transport("distributed" if removed else transport)
        self._transport = transport
        self._block_bytes = integer("block_bytes", block_bytes, 1, 1 << 40)
        self._cast, self._verify = boolean("cast", cast), boolean("verify", verify)
        self._allow_bias_removal = boolean("allow_bias_removal", allow_bias_removal)
        self._lender = Lender() if boolean("lend", lend) else None
        self._pause = None if pause is None else boolean("pause", pause)
        self._folder, self._timeout = folder, timeout_s(timeout)
        self._name = secrets.token_hex(16)
        self._shared: Segment | None = None
        self._previous: Segment | None = None
        self._info()  # checks that transport and folder fit together
        if lend and folder is not None:
            raise ConfigError(
                f"transport: expected 'shm' with lend=True, got {transport!r}: GPU memory is lent "
                "on its own machine"
            )
        self._client = self._checked(client)
        has_client = self._client is not None
        self._writer = DeltaWriter(folder) if folder is not None and has_client else None
        self._closed = self._sends = self._has_begun = False

    def _checked(self, client: Any) -> Any:
        known = client_of(client, self._timeout)
        if is_awaited(known) != self._awaits:
            calls, use = ("", "") if self._awaits else ("not ", "Async")
            raise ConfigError(
                f"client: expected calls that are {calls}awaited, got a {type(client).__name__}; "
                f"use {use}WeightSender"
            )
        return known

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            result = getattr(self._client, method)(*args)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:  # noqa: BLE001
            # Not kept in a variable: the cycle with the traceback would keep tensors alive.
            raise typed(error)  # noqa: B904 (typed sets the cause)

    async def _send_paused(self, source: Any, version: int, label: str | None) -> None:
        pauses = self._client.spans if self._pause is None else self._pause
        if pauses and not hasattr(self._client, "hold"):
            raise ConfigError(
                "pause: expected None for a client that has only the four calls, got True; pause "
                "it yourself"
            )
        held = pauses and await self._hold()
        try:
            await self._send(source, version, label)
        finally:
            if held:
                await self._call("release")

    async def _hold(self) -> bool:
        """Pauses generation and returns whether it was running."""
        return bool(await self._call("hold"))

    async def _send(self, source: Any, version: int, label: str | None) -> None:
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
            self._close_segment()  # open if a Ctrl-C interrupted the end of the last send
            # With shm this ends an update that another trainer left open. With a folder one call is
            # enough, since the workers' readers keep their version between sends.
            if self._writer is None or not self._has_begun:
                await self._call("init_weight_transfer_engine", asdict(self._info()))
            self._has_begun = False  # True again after this send has succeeded
            await self._call("start_weight_update")
            if self._writer is None:
                await self._buckets(source, version)
            else:
                writer = self._writer
                await self._or_abort(lambda: writer.publish(source, version))
                await self._update(UpdateInfo(sender=self._name, version=version))
            await self._call("finish_weight_update", label)
            self._has_begun = True
            if hasattr(self._client, "serving"):
                try:
                    served = await self._call("serving")
                except Exception as error:
                    raise SyncAbortedError(
                        f"weights committed; asking for the served version failed: {error}"
                    ) from error
                _require(version, served)
        finally:
            self._sends = False
            self._close_segment()

    def _info(self) -> InitInfo:
        return InitInfo(
            self._transport,
            sender=self._name,
            cast=self._cast,
            allow_bias_removal=self._allow_bias_removal,
            folder=self._folder,
        )

    async def _or_abort(self, make: Callable[[], T]) -> T:
        """Returns the result of make(). If it raises, makes the workers drop the update."""
        try:
            return make()
        except BaseException as error:
            await self._update(UpdateInfo(sender=self._name, abort=reason(error)))
            raise

    async def _buckets(self, source: Mapping[str, Any] | Iterable[Any], version: int) -> None:
        """Makes one call for each bucket."""
        copy, seen = not holds_tensors(source), set[str]()

        def taken(name: str, tensor: Any) -> NDArray[Any] | OwnedTensor:
            check_new_name(name, seen)
            if self._lender is None:
                return (own_array if copy else as_array)(name, tensor)
            return self._lender.take(name, tensor, copy)

        pairs = ((name, taken(name, tensor)) for name, tensor in entries_of(source))
        buckets = grouped(pairs, self._block_bytes)

        def next_info() -> UpdateInfo | None:
            bucket = next(buckets, None)
            return None if bucket is None else self._filled(bucket, version)

        while (info := await self._or_abort(next_info)) is not None:
            await self._until_read(info)
            self._close_previous()
            if self._shared is not None:
                self._shared.unlink()  # all workers have opened it

    async def _update(self, info: UpdateInfo) -> None:
        await self._call("update_weights", asdict(info))

    async def _until_read(self, info: UpdateInfo) -> None:
        """Sends a bucket, then ends the loan and waits until all workers have closed the tensors,
        even if the call failed."""
        try:
            await self._update(info)
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

    def _filled(self, bucket: Bucket, version: int) -> UpdateInfo:
        """Copies a bucket to the segment and opens a loan for its lent tensors."""
        held = [tensor for _, tensor in bucket if isinstance(tensor, OwnedTensor)]
        arrays = [(name, tensor) for name, tensor in bucket if not isinstance(tensor, OwnedTensor)]
        entries, size = lay_out(arrays)
        shared = self._segment_of(size)
        assert shared.data is not None
        entries = fill(shared.data, entries, arrays, sums=self._verify)
        lent = None
        if self._lender is not None and held:
            lent = self._lender.describe(held, shared.next_loan)
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
        return info

    def _segment_of(self, needed: int) -> Segment:
        """Returns a segment with room for `needed` bytes. The first segment has the size of its
        bucket, which may contain all tensors; the second has block_bytes. The previous segment
        stays open until the workers have opened this one, since its lock shows them that the sender
        is alive."""
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

    def close(self) -> None:
        """Releases the folder for another writer. The workers keep serving."""
        self._closed = True
        if self._writer is not None:
            self._writer.close()


class WeightSender(_Sending):
    """Sends weights to a client: a vllm.LLM, the URL of a server (started with
    VLLM_SERVER_DEV_MODE=1), or an object with init_weight_transfer_engine(info),
    start_weight_update(), update_weights(info) and finish_weight_update(weight_version). None:
    another rank of a sharded trainer has the client, and this rank takes part in gathering
    DTensors."""

    _awaits = False

    def _checked(self, client: Any) -> Any:
        return None if client is None else super()._checked(client)

    def send(self, source: Any, version: int, label: str | None = None) -> None:
        """Sends a set of weights: a module, a state dict, or an iterable of (name, tensor), with
        Hugging Face names.

        version  must exceed the last version; tokens record it
        label    vLLM's name of the version (get_weight_version, weight_versions of its outputs);
                 None: the number as text

        Raises a worker's error of the same class if it is one of rollmesh's (ShapeError,
        IncompleteSyncError, VersionError, …), otherwise the client's exception, and
        SyncAbortedError if workers have ended. The old version keeps serving after an error, unless
        the message states otherwise: at the end the version that the workers of an LLM, AsyncLLM or
        server report is checked.
        """
        if self._client is None:
            _gather(source)
        else:
            _run(self._send_paused(source, version, label))


class AsyncWeightSender(_Sending):
    """Like WeightSender, for vllm.AsyncLLM or an object whose four calls are awaited."""

    _awaits = True

    async def send(self, source: Any, version: int, label: str | None = None) -> None:
        """Sends a set of weights, like WeightSender.send. Reads and copies the source in the thread
        of the event loop."""
        await self._send_paused(source, version, label)

    async def _hold(self) -> bool:
        """If the caller is cancelled meanwhile, waits for the pause and ends it."""
        holding = asyncio.ensure_future(super()._hold())
        try:
            return await asyncio.shield(holding)
        except asyncio.CancelledError:
            if await holding:
                await self._call("release")
            raise


def _run(sending: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine that does not wait, since none of the client's calls is awaited."""
    try:
        sending.send(None)
    except StopIteration:
        return
    sending.close()
    raise StateError("client: expected calls that are not awaited, got one that is")


def _require(version: int, served: list[Any]) -> None:
    """Raises SyncAbortedError unless all workers serve the version or a later one. vLLM's
    multiprocess executor may mix up replies to different calls (for example after collective_rpc of
    an unknown name), and a refused set then looks committed."""
    if not all(str(one).isdecimal() and int(str(one)) >= version for one in served):
        raise SyncAbortedError(
            f"expected the workers to serve version {version} after the send, got "
            f"{', '.join(map(shown, served))}"
        )


def _checked_label(label: Any) -> str:
    """Returns the label. Raises an error for a label that is not UTF-8 text, with which vLLM's
    front end would fail at every later request."""
    if isinstance(label, str) and label and is_unicode(label):
        return label
    raise ConfigError(f"label: expected text or None, got {shown(label)}")


# ---------------------------------------------------------------------------------------- sources
def _source(source: Any) -> Mapping[str, Any] | Iterable[Any]:
    """Returns the state dict of a module, and any other source unchanged."""
    if callable(getattr(source, "state_dict", None)):
        source = source.state_dict()
    if not isinstance(source, Iterable) or isinstance(source, (str, bytes)):
        raise UnsupportedTensorError(
            "source: expected a module, a mapping or pairs (name, tensor), got a "
            f"{type(source).__name__}"
        )
    return source


def _gather(source: Any) -> None:
    """Gathers the DTensors of a source on a rank without a client, since full_tensor() is a
    collective of all ranks of the trainer."""
    for _, tensor in entries_of(_source(source)):
        if is_sharded(tensor):
            tensor.full_tensor()
