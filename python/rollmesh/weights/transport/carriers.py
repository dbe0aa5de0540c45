"""How the buckets of a weight stream (stream.py) are stored and broadcast from one rank to all
others.

    TorchCarrier     a torch.distributed group: buckets are host memory, or with NCCL a torch tensor
                     on each rank's GPU
    CommCarrier      rm.comm.shm, rm.comm.torch: host memory
    NcclCarrier      rm.comm.nccl: memory of each rank's GPU, without torch

Messages about a bucket go through the host if possible; data on GPUs never does. A broadcast has
two parts, `begin` and `finish`, so that one bucket travels while another is filled or read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollmesh import _core
from rollmesh.distributed.comm import Comm, Nccl, check_group
from rollmesh.distributed.mesh import Mesh
from rollmesh.errors import (
    CapacityError,
    CollectiveTimeoutError,
    ConfigError,
    FormatError,
    RankLostError,
)
from rollmesh.runtime.devices import device_of
from rollmesh.runtime.messages import shown
from rollmesh.weights.transport.loans import Held, gpus, hold, is_on_gpu
from rollmesh.weights.transport.manifest import Entry, view
from rollmesh.weights.transport.tensors import (
    DTYPES,
    as_array,
    bytes_of,
    checksum,
    checksum_of_torch,
    dense,
    dtype_name,
    is_torch,
    own,
    own_array,
)

MAX_TOLD = 2048  # bytes of one rank's message to all others
GPU_DIMS = 4  # what a generator reads


class HostPiece:
    """A tensor to send, in host memory."""

    def __init__(self, name: str, tensor: Any, copy: bool):
        self.name, self.array = name, (own_array if copy else as_array)(name, tensor)
        self.dtype, self.shape, self.nbytes = (
            dtype_name(self.array),
            self.array.shape,
            self.array.nbytes,
        )


class TorchPiece:
    """A torch tensor to send, on its GPU."""

    def __init__(self, name: str, tensor: Any):
        self.name, self.tensor = name, tensor
        self.dtype, self.shape, self.nbytes = (
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tensor.nbytes,
        )


Piece = HostPiece | TorchPiece | Held  # each has name, dtype, shape and nbytes


class Bucket(Protocol):
    size: int
    on_gpu: bool

    def put(self, offset: int, piece: Any) -> None:
        """Copies a piece in. The piece must not change until `finish`; the bucket keeps a
        reference."""

    def sum(self, entry: Entry) -> str:
        """The checksum of the entry's bytes; "" if the carrier has none."""

    def begin(self, src: int) -> None:
        """Starts the broadcast of rank `src`'s bytes into every rank's bucket; it is complete when
        `finish` returns."""

    def finish(self) -> None: ...

    def take(self, entry: Entry, verify: bool) -> Any:
        """The entry as a view that keeps the bucket alive. FormatError: a wrong checksum, or an
        unreadable shape."""


class Carrier(Protocol):
    rank: int
    ranks: list[int]  # of the group, in its order
    has_sums: bool

    def check(self, device: Any, sends: bool) -> None:
        """Checks the `device` of a stream, without other ranks. Error: this rank does not have
        it."""

    def open(self) -> None:
        """Called once all ranks have passed `check`: makes what needs all ranks, for the first
        stream."""

    def piece(self, name: str, tensor: Any, copy: bool) -> Piece:
        """copy: the tensor's memory is used again for the next one."""

    def is_for_gpu(self, pieces: list[Any]) -> bool:
        """Whether a bucket of these is stored on GPUs."""

    def bucket(self, size: int, on_gpu: bool) -> Bucket:
        """MemoryError or CapacityError without memory."""

    def broadcast(self, array: NDArray[Any], src: int) -> None:
        """Broadcasts a host array, in place."""

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value (short JSON), in the order of `ranks`."""

    def give_up(self) -> None:
        """This rank gives up; the other ranks notice it if the carrier can tell them."""


def carrier_of(group: Any) -> Carrier:
    """The carrier of a group. A comm makes one at its first stream and keeps it."""
    if not isinstance(group, Comm):
        check_group(group)
        return TorchCarrier(group)
    if group.world < 2:
        raise ConfigError("group: expected a comm of two ranks at least, got one rank")
    if group.stream is None:
        group.stream = NcclCarrier(group) if isinstance(group, Nccl) else CommCarrier(group)
    return group.stream  # type: ignore[no-any-return]


def check_host(device: Any) -> None:
    if device is not None and device != "cpu":
        raise ConfigError(
            f"device: expected None or 'cpu', got {shown(device)}; GPUs are chosen with "
            "rm.comm.nccl(…), in torch by torch.cuda.set_device"
        )


# --------------------------------------------------------------------------------------- the host
class HostBucket:
    """A bucket in host memory; subclasses broadcast it."""

    on_gpu = False

    def __init__(self, size: int):
        self.size, self.data = size, np.zeros(size, np.uint8)

    def put(self, offset: int, piece: HostPiece) -> None:
        self.data[offset : offset + piece.nbytes] = bytes_of(piece.array)

    def sum(self, entry: Entry) -> str:
        return checksum(self.data[entry.offset : entry.offset + entry.bytes])

    def take(self, entry: Entry, verify: bool) -> NDArray[Any]:
        return view(entry, self.data, verify=verify)


class CommBucket(HostBucket):
    def __init__(self, carrier: CommCarrier, size: int):
        super().__init__(size)
        self._carrier = carrier

    def begin(self, src: int) -> None:
        self._carrier.world.broadcast(self.data, src)

    def finish(self) -> None:
        """Nothing to wait for: `begin` completes the broadcast."""


class CommCarrier:
    """The ranks of a comm of its own, which is connected at the first stream."""

    has_sums = True

    def __init__(self, comm: Comm):
        self._comm = comm
        ends = comm.connect(Mesh(dp=comm.world))
        assert ends.world is not None
        assert ends.control is not None
        self.world, self.control = ends.world, ends.control
        self.rank, self.ranks = comm.rank, list(range(comm.world))

    def check(self, device: Any, sends: bool) -> None:
        check_host(device)

    def open(self) -> None:
        """Nothing to make."""

    def piece(self, name: str, tensor: Any, copy: bool) -> Piece:
        return HostPiece(name, tensor, copy)

    def is_for_gpu(self, pieces: list[Any]) -> bool:
        return False

    def bucket(self, size: int, on_gpu: bool) -> Bucket:
        return CommBucket(self, size)

    def broadcast(self, array: NDArray[Any], src: int) -> None:
        self.control.broadcast(array, src)

    def all_gather(self, value: Any) -> list[Any]:
        return [json.loads(part) for part in self.control.all_gather(json.dumps(value).encode())]

    def give_up(self) -> None:
        for end in (self.world, self.control):
            end.abort()
        self._comm.abort()

    def close(self) -> None:
        for end in (self.world, self.control):
            end.close()


# ------------------------------------------------------------------------ GPUs, by rollmesh alone
class NcclCarrier(CommCarrier):
    """One GPU per rank, between which NCCL moves bytes. There are no checksums: they would need a
    kernel of their own, and NCCL relies on the network's checks."""

    has_sums = False

    def __init__(self, comm: Nccl):
        super().__init__(comm)
        self._nccl = comm
        self.group: Any = None  # made by the first stream that no rank refuses
        self.ordinal, self._device = -1, "cuda"

    def check(self, device: Any, sends: bool) -> None:
        """Also opens the GPU, so that a failure is reported to the other ranks."""
        named = "cuda" if device is None or (device == "cpu" and not sends) else device
        if self.group is None or named == "cpu":
            where = self._nccl.place(device_of(named), Mesh(dp=len(self.ranks)))
            self.ordinal, self._device = where.cuda_ordinal, named
            self.readers, self._sender = (
                gpus(),
                gpus(),
            )  # two queues, so that a consumer's copy to the host does not wait for a broadcast
            self._sender.wait(self.ordinal)
        elif device not in (None, "cpu", self._device, f"cuda:{self.ordinal}"):
            raise ConfigError(
                f"device: expected None or 'cuda:{self.ordinal}' of this comm's first stream, got "
                f"{shown(device)}"
            )

    def open(self) -> None:
        if self.group is not None:
            return
        comm = self._nccl
        comm.accept_handshake(self.all_gather(comm.handshake_values()))
        self.group = self._sender.group(
            self.world, self.ordinal, comm.library.path, str(comm.gpu), comm.timeout
        )

    def piece(self, name: str, tensor: Any, copy: bool) -> Piece:
        if not is_on_gpu(tensor):
            return HostPiece(name, tensor, copy)
        if is_torch(tensor):
            tensor = dense(name, tensor)
            return hold(self._sender, name, own(tensor) if copy else tensor)
        return hold(self._sender, name, tensor)

    def is_for_gpu(self, pieces: list[Any]) -> bool:
        return True

    def bucket(self, size: int, on_gpu: bool) -> Bucket:
        return NcclBucket(self, size)

    def await_tensors(self, ordinal: int) -> None:
        """Waits for kernels that write tensors on another GPU; on this rank's own GPU the stream
        order is enough."""
        if ordinal != self.ordinal:
            self._sender.wait(ordinal)

    def give_up(self) -> None:
        if self.group is not None:
            self.group.abort()
        super().give_up()

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
        super().close()


class NcclBucket:
    on_gpu = True

    def __init__(self, carrier: NcclCarrier, size: int):
        self.size, self._carrier = size, carrier
        self.block = carrier.group.block(size)
        self._kept: list[Any] = []

    def put(self, offset: int, piece: HostPiece | Held) -> None:
        self._kept.append(piece)
        if isinstance(piece, HostPiece):
            self.block.put(offset, bytes_of(piece.array))
        else:
            self._carrier.await_tensors(piece.ordinal)
            each = DTYPES[piece.dtype].itemsize
            self.block.copy(offset, piece.ordinal, piece.address, each, piece.shape, piece.strides)

    def sum(self, entry: Entry) -> str:
        return ""

    def begin(self, src: int) -> None:
        if self.size:
            self._carrier.group.broadcast(self.block, self.size, src)

    def finish(self) -> None:
        self._carrier.group.wait()
        self._kept = []

    def take(self, entry: Entry, verify: bool) -> _core.DeviceArray:
        if len(entry.shape) > GPU_DIMS:
            raise FormatError(
                f"{entry.name}: expected at most {GPU_DIMS} dims on a GPU, got {len(entry.shape)}"
            )
        strides = tuple(math.prod(entry.shape[i + 1 :]) for i in range(len(entry.shape)))
        at = self.block.address + entry.offset
        return self._carrier.readers.array(
            self._carrier.ordinal, at, entry.dtype, entry.shape, strides, self.block
        )


# ------------------------------------------------------------------------------ torch.distributed
def gpu_of(group: Any) -> Any:
    """This process's GPU if the group has NCCL; else None (Gloo would copy GPU tensors through the
    host)."""
    import torch
    import torch.distributed as dist

    return (
        torch.device("cuda", torch.cuda.current_device())
        if "nccl" in str(dist.get_backend_config(group))
        else None
    )


class TorchCarrier:
    """With two backends (cpu:gloo,cuda:nccl) buckets stay where their tensors are; with NCCL alone
    all are on GPUs."""

    has_sums = True

    def __init__(self, group: Any):
        import torch
        import torch.distributed as dist

        self.group, self.gpu = group, gpu_of(group)
        self.rank, self.ranks = (
            dist.get_rank(),
            dist.get_process_group_ranks(group or dist.group.WORLD),
        )
        moves_host = (
            "cpu" in str(dist.get_backend_config(group)) or dist.get_backend(group) == "gloo"
        )
        self._host_at = torch.device("cpu") if moves_host else self.gpu

    def check(self, device: Any, sends: bool) -> None:
        check_host(device)

    def open(self) -> None:
        """Nothing to make: the group is the caller's."""

    def piece(self, name: str, tensor: Any, copy: bool) -> Piece:
        if self.gpu is not None and is_torch(tensor) and tensor.device.type == self.gpu.type:
            tensor = dense(name, tensor)
            return TorchPiece(name, own(tensor) if copy else tensor)
        return HostPiece(name, tensor, copy)

    def is_for_gpu(self, pieces: list[Any]) -> bool:
        return self._host_at == self.gpu or any(isinstance(piece, TorchPiece) for piece in pieces)

    def bucket(self, size: int, on_gpu: bool) -> Bucket:
        if on_gpu and self.gpu is None:
            raise ConfigError(
                "expected the same group on all ranks, got a bucket on GPUs on a rank whose group "
                "has no backend for them"
            )
        return TorchBucket(self, size) if on_gpu else GlooBucket(self, size)

    def broadcast(self, array: NDArray[Any], src: int) -> None:
        import torch
        import torch.distributed as dist

        if array.size == 0:
            return
        tensor = torch.from_numpy(array)
        with typed("a broadcast of a message"):
            moved = tensor.to(self._host_at)
            dist.broadcast(moved, src, group=self.group)
            tensor.copy_(moved)

    def all_gather(self, value: Any) -> list[Any]:
        import torch
        import torch.distributed as dist

        text = json.dumps(value).encode()
        assert len(text) <= MAX_TOLD
        mine = torch.frombuffer(bytearray(text.ljust(MAX_TOLD)), dtype=torch.uint8)
        with typed("an exchange of messages"):
            mine = mine.to(self._host_at)
            everyone = [torch.empty_like(mine) for _ in self.ranks]
            dist.all_gather(everyone, mine, group=self.group)
            return [json.loads(part.cpu().numpy().tobytes()) for part in everyone]

    def give_up(self) -> None:
        """torch cannot tell the other ranks; they notice it at the group's timeout."""


@contextmanager
def typed(what: str) -> Iterator[None]:
    """Raises torch's errors of a group as CollectiveTimeoutError or RankLostError."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        kind = CollectiveTimeoutError if "imed out" in text or "imeout" in text else RankLostError
        raise kind(f"{what}: {text[:300]}") from error


class _TorchBroadcast:
    """The broadcast of a bucket in a torch group."""

    _carrier: TorchCarrier
    _work: Any = None
    _bytes: Any  # its data as a tensor of bytes

    def begin(self, src: int) -> None:
        import torch.distributed as dist

        if self._bytes.numel():
            with typed("a broadcast of weights"):
                self._work = dist.broadcast(
                    self._bytes, src, group=self._carrier.group, async_op=True
                )

    def finish(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            with typed("a broadcast of weights"):
                work.wait()


class GlooBucket(_TorchBroadcast, HostBucket):
    def __init__(self, carrier: TorchCarrier, size: int):
        import torch

        super().__init__(size)
        self._carrier, self._bytes = carrier, torch.from_numpy(self.data)


class TorchBucket(_TorchBroadcast):
    """A bucket on a GPU. The stream that is current at `finish` waits for the broadcast; a consumer
    orders other streams behind it."""

    on_gpu = True

    def __init__(self, carrier: TorchCarrier, size: int):
        import torch

        self.size, self._carrier = size, carrier
        try:
            self.data = self._bytes = torch.zeros(size, dtype=torch.uint8, device=carrier.gpu)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"no memory on {carrier.gpu} for a bucket of {size} bytes: "
                f"{str(error).splitlines()[0][:200]}"
            ) from error

    def put(self, offset: int, piece: HostPiece | TorchPiece) -> None:
        import torch

        if isinstance(piece, TorchPiece):
            data = piece.tensor.contiguous().reshape(-1).view(torch.uint8)
        else:
            data = torch.from_numpy(
                np.array(bytes_of(piece.array))
            )  # a copy: torch warns about read-only arrays
        self.data[offset : offset + piece.nbytes].copy_(data)

    def sum(self, entry: Entry) -> str:
        return checksum_of_torch(self.data[entry.offset : entry.offset + entry.bytes])

    def take(self, entry: Entry, verify: bool) -> Any:
        import torch

        if verify and (seen := self.sum(entry)) != entry.sum:
            raise FormatError(f"{entry.name}: expected checksum {entry.sum}, got {seen}")
        return (
            self.data[entry.offset : entry.offset + entry.bytes]
            .view(getattr(torch, entry.dtype))
            .reshape(entry.shape)
        )
