"""The arguments of vLLM's weight calls: how weights will arrive (`InitInfo`), and what is in one
bucket of them (`UpdateInfo`). Plain values that msgpack and JSON can carry; tensors travel beside
them (weights/transport/segment.py).

Both sender and worker use this file. Wrong values are refused here, before anything is opened,
received or read.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

from rollmesh.errors import ConfigError, Error, FormatError, VersionError
from rollmesh.runtime.messages import listed, shown

TRANSPORTS = ("shm", "distributed", "folder")
MAX_BUCKET = 1 << 40  # bytes
MAX_TIMEOUT_S = 10**6

T = TypeVar("T", "InitInfo", "UpdateInfo")


def _integer(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def check_timeout(timeout: Any) -> None:
    if (
        isinstance(timeout, bool)
        or not isinstance(timeout, (int, float))
        or not 0 < timeout <= MAX_TIMEOUT_S
    ):
        raise ConfigError(
            f"timeout: expected seconds above 0, at most {MAX_TIMEOUT_S}, got {shown(timeout)}"
        )


@dataclass(frozen=True)
class InitInfo:
    """The init_info of init_weight_transfer_engine. The last four are for transport="distributed",
    with the names of vLLM's own engines.

    transport           "shm", "distributed": a WeightSender sends buckets. "folder": each update is
                        the newest version in the folder of a rollmesh.sources.DeltaWriter

    sender              a name of the trainer: a bucket that names another sender is refused, so
                        that no set mixes two trainers
    cast                convert other float dtypes to the model's, as torch's .to() does; else
                        DTypeError
    folder              for transport="folder", as the workers see it. Each keeps a copy of the
                        version in host memory
    allow_bias_removal  a router bias that the serving version has may be absent (then zero)
    world_size          the trainer and all workers of all data parallel ranks
    rank_offset         rank of the first worker
    timeout             seconds that a rank waits for another
    """

    transport: str = "shm"
    sender: str | None = None
    cast: bool = False
    allow_bias_removal: bool = False
    folder: str | None = None
    master_address: str | None = None
    master_port: int | None = None
    world_size: int | None = None
    rank_offset: int = 1
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ConfigError(
                f"transport: expected one of {', '.join(TRANSPORTS)}, got {shown(self.transport)}"
            )
        if self.sender is not None and not isinstance(self.sender, str):
            raise ConfigError(f"sender: expected a str or None, got {shown(self.sender)}")
        for name in ("cast", "allow_bias_removal"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: expected a bool, got {shown(getattr(self, name))}")
        if (self.transport == "folder") != isinstance(self.folder, str):
            raise ConfigError(
                f"folder: expected {'a path' if self.transport == 'folder' else 'none'}, got "
                f"{shown(self.folder)}"
            )
        if self.transport != "distributed":
            if (self.master_address, self.master_port, self.world_size) != (None, None, None):
                raise ConfigError(
                    f"transport={self.transport!r} takes no master_address, master_port or "
                    "world_size"
                )
            return
        if not isinstance(self.master_address, str) or not self.master_address:
            raise ConfigError(
                f"master_address: expected the trainer's address, got {shown(self.master_address)}"
            )
        ranges = {"master_port": (1, 65535), "world_size": (2, 2**16), "rank_offset": (1, 2**16)}
        for name, (low, high) in ranges.items():
            if not _integer(value := getattr(self, name), low, high):
                raise ConfigError(
                    f"{name}: expected an integer in [{low}, {high}], got {shown(value)}"
                )
        check_timeout(self.timeout)


@dataclass(frozen=True)
class UpdateInfo:
    """The update_info of update_weights: one bucket of tensors. With transport="folder" it has no
    fields but `version`.

    description     JSON (weights/transport/manifest.py): names, dtypes, shapes and offsets of the
                    tensors, and with transport="shm" those that are lent on the trainer's GPUs
                    until the call returns
    size            bytes of the bucket
    segment, nonce  transport="shm": the file in /dev/shm
    sender          as in the InitInfo
    version         number of the set, the same in all its buckets. None: the next, or what the
                    folder has
    abort           instead of a bucket: why the trainer gives up the set
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
            raise FormatError(f"description: expected JSON, got {shown(self.description)}")
        if not _integer(self.size, 0, MAX_BUCKET):
            raise FormatError(f"size: expected bytes in [0, {MAX_BUCKET}], got {shown(self.size)}")
        if self.version is not None and not _integer(self.version, 0, 2**63 - 1):
            raise VersionError(
                f"version: expected an integer in [0, 2^63), got {shown(self.version)}"
            )
        if self.abort is not None and not isinstance(self.abort, str):
            raise FormatError(f"abort: expected a reason, got {shown(self.abort)}")


def info_of(kind: type[T], values: Any, error: type[Error]) -> T:
    """An InitInfo or UpdateInfo from the dict that arrived."""
    if not isinstance(values, dict):
        raise error(f"{kind.__name__}: expected a dict, got {shown(values)}")
    known = [field.name for field in fields(kind)]
    if unknown := [(key, value) for key, value in values.items() if key not in known]:
        raise error(f"{kind.__name__}: expected some of {', '.join(known)}, got {listed(unknown)}")
    return kind(**values)
