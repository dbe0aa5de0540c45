"""How a stream of weights travels (stream.py): what a bucket of it is, and how that comes from one rank to all others.

    TorchCarrier     a torch.distributed group: buckets are bytes of the host, or over NCCL a torch tensor on each rank's GPU
    CommCarrier      rm.comm.shm, rm.comm.torch: bytes of the host
    NcclCarrier      rm.comm.nccl: memory of each rank's GPU, without torch

Words (what is said of a bucket) go by the host wherever there is a way; data on GPUs never does. A bucket is filled, sent and
looked at; `begin` and `finish` of a broadcast are two, so that one bucket travels while another is filled or read.
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
from rollmesh.errors import CapacityError, CollectiveTimeoutError, ConfigError, FormatError, RankLostError
from rollmesh.runtime.devices import device_of
from rollmesh.runtime.messages import shown
from rollmesh.weights.transport.loans import Held, gpus, hold, is_on_gpu
from rollmesh.weights.transport.manifest import Entry, view
from rollmesh.weights.transport.tensors import DTYPES, as_array, bytes_of, checksum, checksum_of_torch, dense, dtype_name, is_torch

MAX_TOLD = 2048  # bytes that a rank tells all others at once
GPU_DIMS = 4  # of what a generator reads


class HostPiece:
    """A tensor that is to be sent, as bytes of the host."""

    def __init__(self, name: str, tensor: Any):
        self.name, self.array = name, as_array(name, tensor)
        self.dtype, self.shape, self.nbytes = dtype_name(self.array), self.array.shape, self.array.nbytes


class TorchPiece:
    """A torch tensor that stays on its GPU."""

    def __init__(self, name: str, tensor: Any):
        self.name, self.tensor = name, tensor
        self.dtype, self.shape, self.nbytes = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes


Piece = HostPiece | TorchPiece | Held  # each has name, dtype, shape and nbytes


class Bucket(Protocol):
    size: int
    on_gpu: bool

    def put(self, offset: int, piece: Any) -> None:
        """From here until `finish` the piece stays as it is; the bucket keeps it."""

    def sum(self, entry: Entry) -> str:
        """Of the entry's bytes; "" where the carrier has no sums."""

    def begin(self, src: int) -> None:
        """The bytes of rank `src` into everyone's bucket, some time before `finish` returns."""

    def finish(self) -> None: ...

    def take(self, entry: Entry, verify: bool) -> Any:
        """The entry as a view of the bucket, which it keeps. FormatError: its sum is another one, or it is nothing that could be read."""


class Carrier(Protocol):
    rank: int
    ranks: list[int]  # of the group, in its order
    has_sums: bool

    def check(self, device: Any, sends: bool) -> None:
        """What this rank can know alone of the device that a stream names. Error: it is none of this rank's."""

    def open(self) -> None:
        """Every rank has checked, and has heard that all others have: what is to be made together, by the first stream."""

    def piece(self, name: str, tensor: Any) -> Piece: ...

    def is_for_gpu(self, pieces: list[Any]) -> bool:
        """Whether a bucket with these is to lie on GPUs."""

    def bucket(self, size: int, on_gpu: bool) -> Bucket:
        """MemoryError or CapacityError where there is no room."""

    def words(self, array: NDArray[Any], src: int) -> None:
        """Broadcast of an array of the host, in place."""

    def tell(self, value: Any) -> list[Any]:
        """Every rank's value, a few words of JSON, in the order of `ranks`."""

    def give_up(self) -> None:
        """This rank goes no further, and the others are to hear of it, where that can be."""


def carrier_of(group: Any) -> Carrier:
    """A comm's is made by its first stream, for which all ranks meet."""
    if not isinstance(group, Comm):
        check_group(group)
        return TorchCarrier(group)
    if group.world < 2:
        raise ConfigError("a comm of one rank, wanted one that sends and one that receives")
    if group.stream is None:
        group.stream = NcclCarrier(group) if isinstance(group, Nccl) else CommCarrier(group)
    return group.stream  # type: ignore[no-any-return]


def check_host(device: Any) -> None:
    if device is not None and device != "cpu":
        raise ConfigError(
            f"device = {shown(device)}, wanted None or 'cpu': rm.comm.nccl(…) has a GPU to choose, a torch group torch.cuda.set_device's"
        )


# -------------------------------------------------------------------------------------------------- the host
class HostBucket:
    """How it is sent is a subclass's."""

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
        """A call of the host is complete at its return."""


class CommCarrier:
    """rm.comm's ranks; the comm is connected when the first stream begins, and is no generator's."""

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
        """The ends are all there is."""

    def piece(self, name: str, tensor: Any) -> Piece:
        return HostPiece(name, tensor)

    def is_for_gpu(self, pieces: list[Any]) -> bool:
        return False

    def bucket(self, size: int, on_gpu: bool) -> Bucket:
        return CommBucket(self, size)

    def words(self, array: NDArray[Any], src: int) -> None:
        self.control.broadcast(array, src)

    def tell(self, value: Any) -> list[Any]:
        return [json.loads(part) for part in self.control.all_gather(json.dumps(value).encode())]

    def give_up(self) -> None:
        for end in (self.world, self.control):
            end.abort()
        self._comm.abort()

    def close(self) -> None:
        for end in (self.world, self.control):
            end.close()


# -------------------------------------------------------------------------------------------------- GPUs, by rollmesh alone
class NcclCarrier(CommCarrier):
    """One GPU a rank, whose memory NCCL reads and writes. Bytes of a GPU have no sums here: that would take a kernel of its own, and what
    NCCL brings is the network's to guard."""

    has_sums = False

    def __init__(self, comm: Nccl):
        super().__init__(comm)
        self._nccl = comm
        self.group: Any = None  # until the first stream that no rank refuses
        self.ordinal, self._device = -1, "cuda"

    def check(self, device: Any, sends: bool) -> None:
        """The GPU is opened here, before the ranks meet: one that cannot be is a reason like any other."""
        named = "cuda" if device is None or (device == "cpu" and not sends) else device
        if self.group is None or named == "cpu":
            where = self._nccl.place(device_of(named), Mesh(dp=len(self.ranks)))
            self.ordinal, self._device = where.cuda_ordinal, named
            self.readers, self._sender = gpus(), gpus()  # two queues: a consumer that copies to the host waits for no broadcast
            self._sender.wait(self.ordinal)
        elif device not in (None, "cpu", self._device, f"cuda:{self.ordinal}"):
            raise ConfigError(f"device = {shown(device)}, wanted None or 'cuda:{self.ordinal}', where this comm's first stream has begun")

    def open(self) -> None:
        if self.group is not None:
            return
        comm = self._nccl
        comm.hears(self.tell(comm.tells()))
        self.group = self._sender.group(self.world, self.ordinal, comm.library.path, str(comm.gpu), comm.timeout)

    def piece(self, name: str, tensor: Any) -> Piece:
        if not is_on_gpu(tensor):
            return HostPiece(name, tensor)
        return hold(self._sender, name, dense(name, tensor) if is_torch(tensor) else tensor)

    def is_for_gpu(self, pieces: list[Any]) -> bool:
        return True

    def bucket(self, size: int, on_gpu: bool) -> Bucket:
        return NcclBucket(self, size)

    def await_tensors(self, ordinal: int) -> None:
        """Of this rank's own GPU they are read behind what writes them."""
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
            raise FormatError(f"{entry.name}: {len(entry.shape)} dims on a GPU, wanted at most {GPU_DIMS}")
        strides = tuple(math.prod(entry.shape[i + 1 :]) for i in range(len(entry.shape)))
        at = self.block.address + entry.offset
        return self._carrier.readers.array(self._carrier.ordinal, at, entry.dtype, entry.shape, strides, self.block)


# -------------------------------------------------------------------------------------------------- torch.distributed
def gpu_of(group: Any) -> Any:
    """This process's torch.device, where the group moves GPUs' tensors itself. Gloo takes them too, by way of the host: None."""
    import torch
    import torch.distributed as dist

    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in str(dist.get_backend_config(group)) else None


class TorchCarrier:
    """A group with two backends (cpu:gloo,cuda:nccl) takes each bucket where its tensors lie, one of NCCL alone all of them on GPUs."""

    has_sums = True

    def __init__(self, group: Any):
        import torch
        import torch.distributed as dist

        self.group, self.gpu = group, gpu_of(group)
        self.rank, self.ranks = dist.get_rank(), dist.get_process_group_ranks(group or dist.group.WORLD)
        moves_host = "cpu" in str(dist.get_backend_config(group)) or dist.get_backend(group) == "gloo"
        self._words_at = torch.device("cpu") if moves_host else self.gpu

    def check(self, device: Any, sends: bool) -> None:
        check_host(device)

    def open(self) -> None:
        """The group is the caller's."""

    def piece(self, name: str, tensor: Any) -> Piece:
        if self.gpu is not None and is_torch(tensor) and tensor.device.type == self.gpu.type:
            return TorchPiece(name, dense(name, tensor))
        return HostPiece(name, tensor)

    def is_for_gpu(self, pieces: list[Any]) -> bool:
        return self._words_at == self.gpu or any(isinstance(piece, TorchPiece) for piece in pieces)

    def bucket(self, size: int, on_gpu: bool) -> Bucket:
        if on_gpu and self.gpu is None:
            raise ConfigError("a bucket on GPUs, and this rank's group has no backend for them, wanted the same group on all ranks")
        return TorchBucket(self, size) if on_gpu else GlooBucket(self, size)

    def words(self, array: NDArray[Any], src: int) -> None:
        import torch
        import torch.distributed as dist

        if array.size == 0:
            return
        tensor = torch.from_numpy(array)
        with named("a broadcast of words"):
            moved = tensor.to(self._words_at)
            dist.broadcast(moved, src, group=self.group)
            tensor.copy_(moved)

    def tell(self, value: Any) -> list[Any]:
        import torch
        import torch.distributed as dist

        text = json.dumps(value).encode()
        assert len(text) <= MAX_TOLD
        mine = torch.frombuffer(bytearray(text.ljust(MAX_TOLD)), dtype=torch.uint8)
        with named("an exchange of words"):
            mine = mine.to(self._words_at)
            everyone = [torch.empty_like(mine) for _ in self.ranks]
            dist.all_gather(everyone, mine, group=self.group)
            return [json.loads(part.cpu().numpy().tobytes()) for part in everyone]

    def give_up(self) -> None:
        """torch has no word for it: the others hear of it when the group's own deadline has passed."""


@contextmanager
def named(what: str) -> Iterator[None]:
    """torch's failures of a group, by their kind."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        kind = CollectiveTimeoutError if "imed out" in text or "imeout" in text else RankLostError
        raise kind(f"{what}: {text[:300]}") from error


class _TorchBroadcast:
    """How a bucket travels in a torch group."""

    _carrier: TorchCarrier
    _work: Any = None
    _bytes: Any  # its data as a tensor of bytes

    def begin(self, src: int) -> None:
        import torch.distributed as dist

        if self._bytes.numel():
            with named("a broadcast of weights"):
                self._work = dist.broadcast(self._bytes, src, group=self._carrier.group, async_op=True)

    def finish(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            with named("a broadcast of weights"):
                work.wait()


class GlooBucket(_TorchBroadcast, HostBucket):
    def __init__(self, carrier: TorchCarrier, size: int):
        import torch

        super().__init__(size)
        self._carrier, self._bytes = carrier, torch.from_numpy(self.data)


class TorchBucket(_TorchBroadcast):
    """What is read of it on torch's current stream, or by DLPack, is read behind the broadcast: the stream that is current at `finish`
    waits for it, and any other is the consumer's to order behind that one."""

    on_gpu = True

    def __init__(self, carrier: TorchCarrier, size: int):
        import torch

        self.size, self._carrier = size, carrier
        try:
            self.data = self._bytes = torch.zeros(size, dtype=torch.uint8, device=carrier.gpu)
        except torch.OutOfMemoryError as error:
            raise CapacityError(f"no room on {carrier.gpu} for a bucket of {size} bytes: {str(error).splitlines()[0][:200]}") from error

    def put(self, offset: int, piece: HostPiece | TorchPiece) -> None:
        import torch

        if isinstance(piece, TorchPiece):
            data = piece.tensor.contiguous().reshape(-1).view(torch.uint8)
        else:
            data = torch.from_numpy(np.array(bytes_of(piece.array)))  # a copy: it may be one that cannot be written to
        self.data[offset : offset + piece.nbytes].copy_(data)

    def sum(self, entry: Entry) -> str:
        return checksum_of_torch(self.data[entry.offset : entry.offset + entry.bytes])

    def take(self, entry: Entry, verify: bool) -> Any:
        import torch

        if verify and (seen := self.sum(entry)) != entry.sum:
            raise FormatError(f"{entry.name}: the sum of its bytes is {seen}, wanted {entry.sum}")
        return self.data[entry.offset : entry.offset + entry.bytes].view(getattr(torch, entry.dtype)).reshape(entry.shape)
