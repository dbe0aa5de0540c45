"""What a trainer says to vLLM's workers, through vLLM's own calls: how weights will come (`InitInfo`), and what is in one block of them
(`UpdateInfo`). Plain values in dataclasses, as msgpack and JSON carry them, never tensors; the bytes come beside them
(transport/segment.py).

Both ends are this file. What does not fit is refused here, before anything is opened, received or read.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

from rollmesh.errors import ConfigError, Error, FormatError, VersionError
from rollmesh.runtime.messages import listed, shown

TRANSPORTS = ("shm", "distributed")
MAX_BLOCK = 1 << 40  # bytes
MAX_TIMEOUT_S = 10**6

T = TypeVar("T", "InitInfo", "UpdateInfo")


def _integer(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def check_timeout(timeout: Any) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= MAX_TIMEOUT_S:
        raise ConfigError(f"timeout = {shown(timeout)}, wanted seconds above 0, at most {MAX_TIMEOUT_S}")


@dataclass(frozen=True)
class InitInfo:
    """The init_info of init_weight_transfer_engine. The last four are for transport="distributed", by the names of vLLM's own engines.

    sender              the trainer's own name: a block that says another is refused, so that of two trainers none has blocks in the
                        other's set
    cast                convert other float dtypes to the model's, as torch's .to() does; else DTypeError
    allow_bias_removal  a router bias that the serving version has may be absent (then zero)
    world_size          the trainer and all workers of all data parallel ranks
    rank_offset         rank of the first worker
    timeout             seconds that a rank waits for another
    """

    transport: str = "shm"
    sender: str | None = None
    cast: bool = False
    allow_bias_removal: bool = False
    master_address: str | None = None
    master_port: int | None = None
    world_size: int | None = None
    rank_offset: int = 1
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"transport = {shown(self.transport)}, wanted one of {', '.join(TRANSPORTS)}")
        if self.sender is not None and not isinstance(self.sender, str):
            raise ConfigError(f"sender = {shown(self.sender)}, wanted a name or None")
        for name in ("cast", "allow_bias_removal"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} = {shown(getattr(self, name))}, wanted True or False")
        if self.transport == "shm":
            if (self.master_address, self.master_port, self.world_size) != (None, None, None):
                raise ConfigError("transport='shm' takes no master_address, master_port or world_size")
            return
        if not isinstance(self.master_address, str) or not self.master_address:
            raise ConfigError(f"master_address = {shown(self.master_address)}, wanted the trainer's address")
        ranges = {"master_port": (1, 65535), "world_size": (2, 2**16), "rank_offset": (1, 2**16)}
        for name, (low, high) in ranges.items():
            if not _integer(value := getattr(self, name), low, high):
                raise ConfigError(f"{name} = {shown(value)}, wanted an integer in [{low}, {high}]")
        check_timeout(self.timeout)


@dataclass(frozen=True)
class UpdateInfo:
    """The update_info of update_weights: one block of tensors.

    description     JSON (transport/manifest.py): what tensors lie where in the block, and with transport="shm" what stays on the
                    trainer's GPUs until the call returns
    size            bytes of the block
    segment, nonce  transport="shm": the file in /dev/shm
    sender          as in the InitInfo
    version         number of the set; every block of a set says the same. None: the next
    abort           instead of a block: why the trainer gives the set up
    """

    description: str = ""
    size: int = 0
    segment: str | None = None
    nonce: str | None = None
    sender: str | None = None
    version: int | None = None
    abort: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.description, str):
            raise FormatError(f"description = {shown(self.description)}, wanted JSON")
        if not _integer(self.size, 0, MAX_BLOCK):
            raise FormatError(f"size = {shown(self.size)}, wanted bytes in [0, {MAX_BLOCK}]")
        if self.version is not None and not _integer(self.version, 0, 2**63 - 1):
            raise VersionError(f"version = {shown(self.version)}, wanted an integer in [0, 2^63)")
        if self.abort is not None and not isinstance(self.abort, str):
            raise FormatError(f"abort = {shown(self.abort)}, wanted a reason")


def info_of(kind: type[T], values: Any, error: type[Error]) -> T:
    """An InitInfo or UpdateInfo of what came for it."""
    if not isinstance(values, dict):
        raise error(f"{kind.__name__} of {shown(values)}, wanted a dict")
    known = [field.name for field in fields(kind)]
    if unknown := [(key, value) for key, value in values.items() if key not in known]:
        raise error(f"{kind.__name__} with {listed(unknown)}, wanted some of {', '.join(known)}")
    return kind(**values)
