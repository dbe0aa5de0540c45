"""How the ranks of a mesh communicate. The program is SPMD: every process makes the same calls in
the same order.

    Generator(spec, mesh=rm.Mesh(tp=2, dp=2))                     all ranks are threads of this
                                                                  process: the default
    Generator(spec, mesh=…, comm=rm.comm.shm())                   under torchrun: one process per
                                                                  rank, shared memory (one machine)
    Generator(spec, mesh=…, comm=rm.comm.shm("name", rank, world))    the same, for processes that
                                                                      you start yourself
    Generator(spec, mesh=…, comm=rm.comm.torch(group))            one process per rank, a
                                                                  torch.distributed group (Gloo)
    Generator(spec, device="cuda", mesh=…, comm=rm.comm.nccl(rm.comm.shm()))     the same, with NCCL
                                                                                 between GPUs; with
                                                                                 rm.comm.nccl()
                                                                  ranks are threads

A comm belongs to one generator. It moves bytes and computes nothing, so results do not depend on
the comm.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any, NamedTuple

from rollmesh import _core
from rollmesh.distributed.mesh import Mesh
from rollmesh.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ConfigError,
    MeshMismatchError,
    RankLostError,
    StateError,
)
from rollmesh.runtime import nccl as _nccl
from rollmesh.runtime.arguments import MAX_TIMEOUT_S, integer, timeout_s
from rollmesh.runtime.devices import Device
from rollmesh.runtime.messages import shown

# Operations, in the order of csrc/comm/comm.h.
OPS = ("barrier", "all_gather", "all_to_all", "dispatch", "combine", "step", "vote")
SEEN_ENDING_S = 0.2  # a connection breaks a moment before the pidfd of its process signals
BOARD_S = 2.0  # timeout of reads and writes of torch's store
ASK_S = 1.0  # between two reads of the store that look for a rank that has given up
GAVE_UP = "rollmesh: the rank that gave up"
# Environment variables of torchrun whose values together are a run's own.
NAMES_OF_RUN = (
    "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip
NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")


def _machine() -> str:
    """Returns a name of the machine and pid namespace. On ranks with equal names, a pid stands for
    the same process."""
    return (
        f"{socket.gethostname()} {os.stat('/proc/self/ns/pid').st_ino}"
        if os.path.exists("/proc/self/ns/pid")
        else ""
    )


def _number(variable: str) -> int:
    text = os.environ[variable]
    if not text.isdecimal():
        raise ConfigError(f"{variable}: expected a number in the environment, got {shown(text)}")
    return int(text)


def check_alike(everyone: Sequence[Mapping[str, Any]]) -> None:
    """Raises MeshMismatchError unless all ranks have equal values. The error lists the ranks that
    differ from rank 0, and the differences."""
    wrong = [
        f"rank {rank} has {name} = {its.get(name)}, rank 0 {everyone[0].get(name)}"
        for rank, its in enumerate(everyone)
        for name in sorted({*its, *everyone[0]})
        if its.get(name) != everyone[0].get(name)
    ]
    if wrong:
        raise MeshMismatchError(
            f"the ranks of this mesh were not made alike: {'; '.join(wrong)[:2000]}"
        )


def check_group(group: Any) -> None:
    """Raises ConfigError unless `group` is None or a group of torch.distributed with this process
    in it. torch itself would fail with an assertion."""
    try:
        from torch import distributed
    except ImportError as error:
        raise ConfigError(
            f"group: expected rm.comm.nccl(…) or rm.comm.shm(…) without torch, got {shown(group)}"
        ) from error
    if group is not None and not isinstance(group, distributed.ProcessGroup):
        raise ConfigError(
            "group: expected a comm (rm.comm.nccl, shm, torch), torch's ProcessGroup with this "
            f"process in it or None, got {shown(group)}"
        )
    if not distributed.is_initialized():
        raise StateError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group first"
        )
    try:
        distributed.get_rank(group)
    except ValueError as error:
        raise StateError(
            "group: expected one that torch.distributed knows, got one that was destroyed or not "
            "made by new_group"
        ) from error


class Endpoints(NamedTuple):
    """This rank's end of each group; None for a group of one rank."""

    tp: _core.Comm | None
    ep: _core.Comm | None
    world: _core.Comm | None
    control: _core.Comm | None  # a second group of all ranks, for messages of the Python layer


class Comm:
    """One rank's connection to the others. Subclasses make the ends."""

    MAX_WORLD = 4096

    def __init__(self, rank: int, world: int, timeout: float):
        self.world = integer("world", world, 1, self.MAX_WORLD)
        self.rank = integer("rank", rank, 0, self.world - 1)
        self.timeout = timeout_s(timeout)
        self._used = self._closed = False

    def connect(self, mesh: Mesh) -> Endpoints:
        """Connects the groups of a mesh and returns this rank's ends. May be called once."""
        if mesh.world != self.world:
            raise ConfigError(
                f"mesh: expected {self.world} ranks, as many as the comm has, got {mesh.world} "
                f"(dp={mesh.dp}, tp={mesh.tp})"
            )
        if self._closed:
            raise StateError("this comm is closed; make another one")
        if self._used:
            raise StateError("this comm belongs to another generator; make one for each")
        self._used = True
        try:
            return self._connect(mesh)
        except BaseException:
            self.close()
            raise

    def _connect(self, mesh: Mesh) -> Endpoints:
        raise NotImplementedError

    def handshake_values(self) -> dict[str, str]:
        """Values that all ranks compare before they make their engines."""
        return {"NCCL": "none"}

    def accept_handshake(self, everyone: Sequence[Mapping[str, str]]) -> None:
        """Checks the handshake values of all ranks. Raises MeshMismatchError, which lists the ranks
        whose NCCL differs."""
        check_alike([{"NCCL": its["NCCL"]} for its in everyone])

    def abort(self) -> None:
        """Called when this rank gives up, after its ends were aborted. Subclasses do here what else
        the other ranks need in order to notice."""

    def close(self) -> None:
        """Called after the generator has closed its ends."""
        self._closed = True


class Shm(Comm):
    """Shared memory between processes of one machine."""

    MAX_WORLD = 64

    def __init__(self, name: str, rank: int, world: int, timeout: float):
        super().__init__(rank, world, timeout)
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ConfigError(
                f"name: expected 1 to 200 letters, digits, '.', '_' or '-', got {shown(name)}"
            )
        self.name = name

    def _connect(self, mesh: Mesh) -> Endpoints:
        nonce = int.from_bytes(
            hashlib.sha256(f"{os.getuid()} {self.name}".encode()).digest()[:8], "little"
        )
        return Endpoints(*_core.attach(self.name, self.rank, nonce, *mesh.degrees, self.timeout))


class Torch(Comm):
    """Any torch.distributed process group with a backend for CPU tensors."""

    def __init__(self, group: Any, timeout: float):
        check_group(group)
        from torch import distributed

        self._exchanges: list[_Exchange] = []  # one for each group that this rank is in
        # torch's key-value store of the control group. It is readable after connections broke.
        self._store: Any = None
        self.heard = False  # True once a connection broke: another rank gave up first
        self._watched = selectors.DefaultSelector()  # pidfds of the other ranks on this machine
        self._ranks: list[int] = distributed.get_process_group_ranks(
            group or distributed.group.WORLD
        )
        super().__init__(self._ranks.index(distributed.get_rank()), len(self._ranks), timeout)

    def _connect(self, mesh: Mesh) -> Endpoints:
        """All ranks must make all groups of torch in the same order, so they compare their degrees
        over the first group."""
        world = list(range(self.world))
        control = self._group(world)
        if control is not None:
            self._store = self._exchanges[0].group.get_group_store()
            mine = {"mesh": asdict(mesh), "machine": _machine(), "process": os.getpid()}
            everyone = [json.loads(part) for part in control.all_gather(json.dumps(mine).encode())]
            check_alike([its["mesh"] for its in everyone])
            for rank, its in enumerate(everyone):
                if rank != self.rank and its["machine"] == mine["machine"]:
                    # No pidfds on this system, another pid namespace, or no free descriptor.
                    with suppress(AttributeError, OSError):
                        process = os.pidfd_open(its["process"])
                        self._watched.register(process, selectors.EVENT_READ, rank)
        ends: list[_core.Comm | None] = []  # of tp and ep
        for size in (mesh.tp, mesh.ep):
            for first in range(0, self.world, size):
                end = self._group(world[first : first + size])
                if first <= self.rank < first + size:
                    ends.append(end)
        tp, ep = ends
        return Endpoints(tp, ep, self._group(world), control)

    def _group(self, members: Sequence[int]) -> _core.Comm | None:
        from torch import distributed

        if len(members) == 1:
            return None
        group = distributed.new_group(
            [self._ranks[r] for r in members], timeout=timedelta(seconds=self.timeout)
        )
        if self.rank not in members:
            return None
        me = members.index(self.rank)
        self._exchanges.append(_Exchange(self, group, me, len(members)))
        end = _core.Comm(self._exchanges[-1], me, len(members))
        # The torch group already has the timeout; users of this end read it here.
        end.set_timeout(self.timeout)
        return end

    def ended(self, wait_s: float = 0.0) -> list[int]:
        """Returns the ranks on this machine whose process has ended. Processes on other machines
        cannot be watched."""
        return sorted(key.data for key, _ in self._watched.select(wait_s))

    def announce_giving_up(self) -> None:
        """Writes to the store that this rank gives up, unless another rank did so before. Ignores
        errors of a store that no longer exists."""
        if self._store is not None and not self.heard:
            with suppress(RuntimeError):
                self._board().compare_set(GAVE_UP, "", str(self.rank))

    def who_gave_up(self) -> int | None:
        with suppress(RuntimeError):
            if self._store is not None and (board := self._board()).check([GAVE_UP]):
                return int(board.get(GAVE_UP))
        return None

    def _board(self) -> Any:
        """Returns the store over a separate connection with a short timeout."""
        board = self._store.clone()
        board.set_timeout(timedelta(seconds=BOARD_S))
        return board

    def abort(self) -> None:
        for exchange in self._exchanges:
            exchange.abort()
        self.close()

    def close(self) -> None:
        super().close()
        for key in list((self._watched.get_map() or {}).values()):
            os.close(key.fd)
        self._watched.close()
        exchanges, self._exchanges = self._exchanges, []
        for exchange in exchanges:
            exchange.close()


class _Exchange:
    """Implements rm_transport's exchange over a torch group: all ranks exchange headers, compare
    them, then exchange the bytes."""

    def __init__(self, comm: Torch, group: Any, rank: int, size: int):
        self._comm, self.group, self._rank, self._size = comm, group, rank, size
        self._process = os.getpid()
        self._asked = time.monotonic()  # time of the last read of the store

    def __call__(
        self,
        op: int,
        sequence: int,
        epoch: int,
        timeout: float,
        send: list[bytes],
        sizes: list[int],
    ) -> list[memoryview]:
        import torch
        from torch import distributed

        del timeout  # the torch group has its own timeout
        self._check_open()
        mine = torch.tensor([op, sequence, epoch, *map(len, send)], dtype=torch.int64)
        headers = [torch.empty_like(mine) for _ in range(self._size)]
        out = torch.empty(sum(sizes), dtype=torch.uint8)
        data = torch.frombuffer(bytearray(b"".join(send)) or bytearray(1), dtype=torch.uint8)[
            : sum(map(len, send))
        ]
        try:
            distributed.all_gather(headers, mine, group=self.group)
            self._check([header.tolist() for header in headers], op, sequence, epoch, sizes)
            distributed.all_to_all_single(
                out, data, sizes, [len(part) for part in send], group=self.group
            )
        except RuntimeError as error:
            raise self._named(error, op, sequence) from error
        return [part.numpy().data for part in torch.split(out, sizes)]

    def _check_open(self) -> None:
        if self.group is None:
            raise RankLostError(f"rank {self._rank} has aborted or left the group")

    def _check(
        self, headers: list[list[int]], op: int, sequence: int, epoch: int, sizes: list[int]
    ) -> None:
        for rank, (its_op, its_sequence, its_epoch, *given) in enumerate(headers):
            if (its_op, its_sequence, its_epoch) != (op, sequence, epoch):
                theirs = f"call {its_sequence}, {OPS[its_op]}, of version {its_epoch}"
                ours = f"call {sequence}, {OPS[op]}, of version {epoch}"
                raise CollectiveMismatchError(
                    f"rank {rank} is in {theirs}, rank {self._rank} in {ours}"
                )
            if rank != self._rank and given[self._rank] != sizes[rank]:
                sent = f"bytes from rank {rank} for rank {self._rank}, got {given[self._rank]}"
                raise CollectiveMismatchError(
                    f"call {sequence}, {OPS[op]}: expected {sizes[rank]} {sent}"
                )

    def _named(self, error: RuntimeError, op: int, sequence: int) -> Exception:
        """Converts Gloo's error of a broken connection, which names only an address. The watched
        processes and the store identify the rank that has ended."""
        self._comm.heard = True
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        where = f"{OPS[op]}, call {sequence}: {text[:300]}"
        if "imed out" in text or "imeout" in text:
            return CollectiveTimeoutError(where)
        if ended := ", ".join(map(str, self._comm.ended(SEEN_ENDING_S))):
            return RankLostError(f"lost rank {ended}: the process has ended ({where})")
        who = self._comm.who_gave_up()
        return RankLostError(
            f"lost a rank: {where}" if who is None else f"lost rank {who}: it has aborted ({where})"
        )

    def look(self) -> None:
        """Called while a rank waits for its GPU. Raises RankLostError if another rank is known to
        have ended."""
        self._check_open()
        if ended := ", ".join(map(str, self._comm.ended())):
            self._comm.heard = True
            raise RankLostError(f"lost rank {ended}: the process has ended")
        if time.monotonic() - self._asked > ASK_S:
            self._asked = time.monotonic()
            if (who := self._comm.who_gave_up()) is not None:
                self._comm.heard = True
                raise RankLostError(f"lost rank {who}: it has aborted")

    def abort(self) -> None:
        """Closes the connections. Ranks that wait on them raise an error and read the reason from
        the store."""
        if self.group is not None and os.getpid() == self._process:
            self._comm.announce_giving_up()
            self.close()

    def close(self) -> None:
        from torch import distributed

        group, self.group = self.group, None  # its connections close with the last reference
        # A forked child must not destroy the parent's group.
        if group is not None and os.getpid() == self._process and distributed.is_initialized():
            distributed.destroy_process_group(group)


class Nccl(Comm):
    """NCCL between GPUs, together with a host comm. NCCL sends activations; the host comm sends
    plans, requests, votes and outputs, and reports ranks that have ended. `group`, the host comm,
    is None if ranks are threads."""

    def __init__(self, group: Comm | None, library: str | os.PathLike[str] | None):
        if group is not None and (not isinstance(group, Comm) or isinstance(group, Nccl)):
            raise ConfigError(
                "group: expected a host comm (rm.comm.shm(…), rm.comm.torch(…)), or None where "
                f"ranks are threads, got {shown(group)}"
            )
        self.library = _nccl.find(library)
        self.group = group
        # A name of this rank's GPU, equal on ranks that share the GPU. None if ranks are threads.
        self.gpu: str | None = None
        super().__init__(
            *((0, 1, MAX_TIMEOUT_S) if group is None else (group.rank, group.world, group.timeout))
        )

    def place(self, where: Device, mesh: Mesh) -> Device:
        """Returns the generator's device with this rank's ordinal. Raises ConfigError for the
        CPU."""
        if where.cuda_library is None:
            raise ConfigError(
                "device: expected 'cuda' with rm.comm.nccl(…), got 'cpu'; rm.comm.shm(…) and "
                "rm.comm.torch(…) are for CPUs"
            )
        count = _core.cuda_count(where.cuda_library)
        if self.group is None:
            one = where.cuda_ordinal >= 0
            self._allow_sharing([0 if one else rank % max(count, 1) for rank in range(mesh.world)])
            return where
        ordinal = where.cuda_ordinal if where.cuda_ordinal >= 0 else self.rank % count
        self.gpu = (
            f"{_machine() or socket.gethostname()} {_core.cuda_bus(where.cuda_library, ordinal)}"
        )
        return where._replace(cuda_ordinal=ordinal)

    def _allow_sharing(self, gpus: Sequence[object]) -> None:
        """Sets NCCL's environment if ranks share a GPU. Raises ConfigError if NCCL does not allow
        it. gpus: of each rank."""
        pairs = [(gpus.index(gpu), rank) for rank, gpu in enumerate(gpus) if gpu in gpus[:rank]]
        if not pairs:
            return
        shared = "ranks {} and {} share a GPU".format(*pairs[0])
        if self.library.version < _nccl.SHARES_GPU:
            raise ConfigError(
                f"{shared}: expected NCCL {'.'.join(map(str, _nccl.SHARES_GPU))} or later, got "
                f"{'.'.join(map(str, self.library.version))}; or give each rank its own GPU"
            )
        # NCCL reads both variables when the process makes its first communicator.
        allowed = os.environ.setdefault(_nccl.SHARES_GPU_VARIABLE, "1")
        os.environ.setdefault(*_nccl.FEWER_BLOCKS)
        if allowed != "1":
            raise ConfigError(
                f"{shared}: expected {_nccl.SHARES_GPU_VARIABLE}=1 in the environment, got "
                f"{shown(allowed)}"
            )

    def _connect(self, mesh: Mesh) -> Endpoints:
        assert self.group is not None
        return self.group.connect(mesh)

    def handshake_values(self) -> dict[str, str]:
        return {"NCCL": ".".join(map(str, self.library.version)), "GPU": str(self.gpu)}

    def accept_handshake(self, everyone: Sequence[Mapping[str, str]]) -> None:
        super().accept_handshake(everyone)
        self._allow_sharing([its["GPU"] for its in everyone])

    def abort(self) -> None:
        if self.group is not None:
            self.group.abort()

    def close(self) -> None:
        super().close()
        if self.group is not None:
            self.group.close()


def threads() -> None:
    """Returns None: all ranks are threads of this process, as in a Generator without a comm."""


def shm(
    name: str | None = None,
    rank: int | None = None,
    world: int | None = None,
    timeout: float = 600.0,
) -> Shm:
    """Makes this process one rank of a mesh on one machine. Under torchrun, name, rank and world
    are read from its environment variables. The name is a file in /dev/shm until all ranks have
    connected; use a random name, since another mesh must not use it at the same time. timeout:
    seconds that a rank waits for another rank, in any call, before CollectiveTimeoutError."""
    env = os.environ
    if (rank is None or world is None) and not {"RANK", "WORLD_SIZE"} <= env.keys():
        raise ConfigError(
            "comm.shm: expected rank and world, or RANK and WORLD_SIZE in the environment "
            "(torchrun sets them)"
        )
    rank = _number("RANK") if rank is None else rank
    world = _number("WORLD_SIZE") if world is None else world
    if name is None:
        if not env.get("MASTER_PORT"):
            raise ConfigError(
                "comm.shm: expected a name, or MASTER_PORT in the environment (torchrun sets it)"
            )
        text = " ".join(env.get(key, "") for key in NAMES_OF_RUN)
        name = "rollmesh-" + hashlib.sha256(text.encode()).hexdigest()[:24]
    return Shm(name, rank, world, timeout)


def torch(group: Any = None, timeout: float = 600.0) -> Torch:
    """Makes this process one rank of a torch.distributed group that the caller has initialised.
    group: None is the default group. timeout: as in shm."""
    return Torch(group, timeout)


def nccl(group: Comm | None = None, library: str | os.PathLike[str] | None = None) -> Nccl:
    """Connects ranks on GPUs, for Generator(device="cuda"). NCCL moves activations between the
    GPUs.

    group    moves everything else, and its timeout applies: rm.comm.shm or rm.comm.torch; with None
             or rm.comm.threads() all ranks are threads of this process

    library  path of a libnccl.so.2; by default the library that is already loaded, the wheel's, or
             the system's (`rollmesh doctor` prints its path, and metrics()["nccl"] has the path of
             the library in use)

    With NCCL 2.30.3 and later two ranks may share a GPU. NCCL_MULTI_RANK_GPU_ENABLE=1 and
    NCCL_MAX_CTAS=4 are then set in the environment, unless they are already set. Start the process
    with CUDA_DEVICE_MAX_CONNECTIONS=32, so that each rank gets a separate hardware queue.

    Raises ConfigError if NCCL is missing or too old. Creating the generator raises ConfigError on
    the CPU, or if ranks share a GPU and NCCL does not allow it, and MeshMismatchError if ranks have
    different versions of NCCL. Later calls raise RankLostError, CollectiveTimeoutError and
    CollectiveMismatchError, as with any comm, and DeviceError if CUDA fails."""
    return Nccl(group, library)
