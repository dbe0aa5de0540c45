# The C extension: ext/. Generator and rollmesh.ops are its public faces; every name here is private
# to the package. All attributes are read-only.
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn, final

import numpy as np
from numpy.typing import NDArray

from rollmesh.runtime.engine_views import (
    Finish,
    Floats,
    Ids,
    ManifestEntry,
    OpTime,
    RequestView,
    SampleView,
    Stats,
    SyncValues,
)

_Drawn = tuple[Ids, Floats, Floats, Ids]  # tokens, logprobs, sampling_logprobs, ranks
# (op, sequence, epoch, timeout, bytes for each rank, number of bytes from each rank) -> the bytes
_Exchange = Callable[[int, int, int, float, list[bytes], list[int]], Sequence[bytes | memoryview]]

# This rank's endpoint of a group whose bytes `exchange` moves.
@final
class Comm:
    def __new__(cls, exchange: _Exchange, rank: int, size: int) -> Comm: ...
    # Returns the bytes of every rank.
    def all_gather(self, data: bytes, /) -> list[bytes]: ...
    # Sends give[r] to rank r and receives from it into take[r]; sizes must match.
    def all_to_all(
        self, give: Sequence[NDArray[np.uint8]], take: Sequence[NDArray[np.uint8]], /
    ) -> None: ...
    # Raises the exception of the next call if this rank can see that the group is dead.
    def look(self) -> None: ...
    # Sets the seconds that each later call may wait for the others.
    def set_timeout(self, seconds: float, /) -> None: ...
    # Ends the group; waiting calls of the other ranks raise RankLostError.
    def abort(self) -> None: ...
    # Leaves the group. May be called again.
    def close(self) -> None: ...

# The GPUs of this process, for memory shared between processes.
@final
class Gpus:
    def __new__(cls, library: str) -> Gpus: ...
    # Returns (ordinal, address, dtype, shape, strides, owner of the memory).
    def lend(
        self, name: str, tensor: Any, /
    ) -> tuple[int, int, str, tuple[int, ...], tuple[int, ...], Any]: ...
    # Waits until the writes of the tensors lent so far are complete.
    def wait(self, ordinal: int, /) -> None: ...
    # Returns (bus id, handle, address, bytes) of the allocation at the address.
    def loan(self, ordinal: int, address: int, /) -> tuple[str, bytes, int, int]: ...
    # Opens another process's memory: (ordinal, address, bytes).
    def borrow(self, bus: str, handle: bytes, /) -> tuple[int, int, int]: ...
    # Closes memory of another process.
    def give_back(self, ordinal: int, address: int, /) -> None: ...
    # Returns a read-only array over part of an open allocation.
    def array(
        self,
        ordinal: int,
        address: int,
        dtype: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        /,
    ) -> DeviceArray: ...

@final
class DeviceArray:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    ndim: int
    dtype: str
    nbytes: int
    device: str
    op_device: OpDevice | None
    def __dlpack__(self, **options: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn: ...
    def __bool__(self) -> NoReturn: ...
    def __len__(self) -> int: ...
    def numpy(self) -> NDArray[Any]: ...
    def drop(self) -> None: ...

# A CUDA device opened for ops over arrays.
@final
class OpDevice:
    def __new__(cls, library: str, ordinal: int) -> OpDevice: ...
    device: str
    def zeros(self, shape: tuple[int, ...], dtype: str, /) -> DeviceArray: ...
    def to_device(self, array: NDArray[Any], /) -> DeviceArray: ...
    # Returns a view of a DLPack producer's tensor; ops wait for the producer's stream.
    def take(self, name: str, tensor: Any, /) -> DeviceArray: ...

# Number of devices, -1 without a driver.
def cuda_count(library: str, /) -> int: ...

# PCI bus id of a device, the same in every process of the machine.
def cuda_bus(library: str, ordinal: int, /) -> str: ...

# Free bytes of a device's memory.
def cuda_available(library: str, ordinal: int, /) -> int: ...

# This rank's Comms (tp, ep, world, control) of a shared-memory region, None for a group of one.
def attach(
    name: str, rank: int, nonce: int, tp: int, dp: int, ep: int, timeout: float, /
) -> tuple[Comm | None, Comm | None, Comm | None, Comm | None]: ...

# Loads that libnccl.so.2, which stays loaded, and returns its version; 23203 is 2.32.3.
def nccl_version(path: str, /) -> int: ...

# A name that Engine.sync_resolve has resolved, and its tensor until the push.
@final
class SyncEntry:
    name: str  # as the source spells it
    params: list[int]  # indices into the manifest; empty: the entry is skipped
    shape: tuple[int, ...]  # that the tensor must have
    nbytes: int  # of the tensor; 0 without one
    taken: bool  # whether the entry has a tensor
    # Returns the parts of the tensor that each rank needs: rows [rank, 4 firsts, 4 sizes].
    def wanted(self) -> NDArray[np.int64]: ...
    # Gives the tensor back.
    def release(self) -> None: ...

# The C engine of rollmesh.Generator; one thread at a time. ends: (rank, tp, ep, world), the Comms
# of a process that is one rank of several.
@final
class Engine:
    def __new__(
        cls,
        spec: SimpleNamespace,
        options: Any,  # rollmesh.options.EngineOptions
        ends: tuple[int, Comm | None, Comm | None, Comm | None] | None = None,
    ) -> Engine: ...
    # Frees everything. May be called again.
    def close(self) -> None: ...
    # Adds a request and returns its id. edits: the arrays of rollmesh.request.logit_edits.
    def add(
        self,
        prompt: Ids,
        stop_token_ids: Ids,
        request: Any,
        logits: Floats | None,
        edits: tuple[NDArray[Any], ...] | None = None,
        /,
    ) -> int: ...
    # Ends a request; its results stay readable.
    def abort(self, id: int, /) -> None: ...
    # Forgets a finished request.
    def release(self, id: int, /) -> None: ...
    # Ends a sample after its first n_tokens, where a stop string matched.
    def stop_sample(self, id: int, sample: int, n_tokens: int, /) -> None: ...
    # Schedules, computes and commits. Returns the number of rows computed.
    def step(self) -> int: ...
    # Runs a step that an external scheduler decided. Returns ((tokens, logprobs,
    # sampling_logprobs, ranks), rows computed).
    def external_step(
        self,
        ids: NDArray[np.uint64],
        computed: NDArray[np.int64],
        rows: NDArray[np.int64],
        replace: NDArray[np.uint8],
        page_counts: NDArray[np.int64],
        pages: Ids,
        logits: Floats | None,
        stats: Floats | None,
        /,
    ) -> tuple[_Drawn, int]: ...
    # Draws from logits that the caller has edited. Returns (tokens, logprobs,
    # sampling_logprobs, ranks).
    def external_draw(
        self,
        ids: NDArray[np.uint64],
        raw: Floats,
        stats: Floats,
        edited: Floats,
        /,
    ) -> _Drawn: ...
    # Returns (token ids, logprobs) of the k likeliest tokens at each request's last token.
    def external_top(self, ids: NDArray[np.uint64], k: int, /) -> tuple[Ids, Floats]: ...
    # Returns the routing of the positions from `start` to the last input token.
    def external_routed(self, id: int, start: int, /) -> NDArray[np.int16]: ...
    # Ends a request that was not fed; its pages contain nothing valid.
    def external_fail(self, id: int, /) -> None: ...
    # Marks pages whose content is not valid.
    def external_invalidate_pages(self, pages: Ids, /) -> None: ...
    # Tells the engine that the external scheduler has freed the request's pages.
    def external_preempt(self, id: int, /) -> None: ...
    # Sets the tokens generated so far; later tokens are dropped.
    def external_tokens(self, id: int, tokens: Ids, /) -> None: ...
    # Aborts the groups: waiting ranks of other processes raise RankLostError.
    def give_up(self) -> None: ...
    # Returns whether this process has the request, and not another replica's process.
    def has(self, id: int, /) -> bool: ...
    def unfinished(self) -> int: ...
    # Returns the ids of finished requests that were not released.
    def finished(self) -> set[int]: ...
    # Returns the ids of all requests that were not released, oldest first.
    def ids(self) -> list[int]: ...
    def reset_prefix_cache(self) -> None: ...
    # Frees the memory of parts: 1 weights, 2 KV. With 4 the host keeps the serving weights.
    def sleep(self, parts: int, /) -> None: ...
    # Allocates the memory again. Offloaded weights stay on the host until
    # offload_weights(False).
    def wake(self, parts: int, /) -> None: ...
    # True: copies the serving weights to the host, before a sleep with 4. False: frees that copy.
    def offload_weights(self, keep: bool, /) -> None: ...
    # Returns (host memory that offload_weights needs, [(memory pool, free bytes), …]).
    def host_room(self) -> tuple[int, list[tuple[int, int]]]: ...
    def request(self, id: int, /) -> RequestView: ...
    def sample(self, id: int, sample: int, /) -> SampleView: ...
    def tokens(self, id: int, sample: int, start: int, /) -> tuple[Finish, Ids]: ...
    def stats(self) -> Stats: ...
    # Returns the time of each op since the last call; empty without the option profile.
    def profile(self) -> list[OpTime]: ...
    def manifest(self) -> list[ManifestEntry]: ...
    # Read-only views of this rank's serving weights, packed, valid until the next commit, sleep or
    # close; None: not synced.
    def weights(self) -> dict[str, Any] | None: ...
    # Opens a sync; an open sync is reset.
    def sync_begin(
        self,
        version: int,
        *,
        cast: bool = ...,
        allow_nonfinite: bool = ...,
        allow_partial: bool = ...,
        allow_bias_removal: bool = ...,
        in_place: bool = ...,
    ) -> None: ...
    # Returns an entry with the parameters that the name stands for.
    def sync_resolve(self, name: str, skip_unknown: bool = False, /) -> SyncEntry: ...
    # Checks the tensor and keeps it in the entry until the push.
    def sync_take(self, entry: SyncEntry, tensor: Any, /) -> None: ...
    # Copies the entries' tensors into the staged weights: all of them, or none.
    def sync_push(
        self, entries: Sequence[SyncEntry], most: int = ..., between: Callable[[], object] = ..., /
    ) -> None: ...
    # Swaps versions. inflight: refuse, restart, abort, keep or keep_kv.
    def sync_commit(self, inflight: str, /) -> SyncValues: ...
    # Closes an open sync; the old version keeps serving.
    def sync_abort(self) -> None: ...
    # Returns (version or None, digest).
    def sync_state(self) -> tuple[int | None, int]: ...

# int64 [world][8 ranges][first, n], in the order of placement.h.
def placement(spec: SimpleNamespace, tp: int, dp: int, ep: int, /) -> NDArray[np.int64]: ...

# [(kind, name, shape)] of the tensors of a checkpoint, without routers' biases.
def parameters(spec: SimpleNamespace, /) -> list[tuple[str, str, tuple[int, ...]]]: ...

# {kind: bytes} that this rank stores, in one version.
def parameter_bytes(
    spec: SimpleNamespace, tp: int, dp: int, ep: int, rank: int, bfloat16: bool, /
) -> dict[str, int]: ...

# {name: (least, most)} of the engine's integer options.
def engine_limits() -> dict[str, tuple[int, int]]: ...

# Cores of the affinity mask, at most the CPU quota rounded down; at least 1.
def usable_cores(root: str = ..., /) -> int: ...

# The smallest CPU quota of this process's control groups, in cores, or inf.
def cpu_quota(root: str = ..., /) -> float: ...

# [(name, available bytes)] of the machine and of control groups with a limit.
def memory_pools(root: str = ..., /) -> list[tuple[int, int]]: ...

# The 64-bit checksum of csrc/base/checksum.h.
def checksum(buffer: Any, /) -> int: ...

# Bytes of weights, KV and workspaces mapped now by this process.
def memory_mapped() -> int: ...

# Number of allocations, small and mapped, that are not freed yet.
def memory_blocks() -> int: ...

# A test hook: the n-th allocation from now fails.
def memory_fail_at(n: int, for_ever: bool = ..., /) -> None: ...

# One variant of the ops over arrays.
@final
class Kernels:
    def __new__(
        cls, isa: str, threads: int, op_device: OpDevice | None = None, stream: int = 0
    ) -> Kernels: ...
    op_device: OpDevice | None  # None: the host
    # An op of op_arguments(), with named arguments: the tuple of its outputs, in that order.
    def run(self, op: str, arguments: dict[str, Any], /) -> tuple[Any, ...]: ...

# {op: {argument: "number", "in", "index", "host", "inout" or "out"}}; the table is in ext/ops.
def op_arguments() -> dict[str, dict[str, str]]: ...
def available_isas() -> tuple[str, ...]: ...
def best_isa() -> str: ...
def isa_states() -> dict[str, tuple[str | None, bool, float, float]]: ...
