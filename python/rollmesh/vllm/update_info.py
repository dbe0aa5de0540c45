"""The arguments of vLLM's weight calls: how weights will arrive (`InitInfo`), and the contents of
one bucket (`UpdateInfo`). Their values are plain, so that msgpack and JSON can encode them; tensors
are sent separately (weights/transport/segment.py).

Both sender and worker use this file. It checks all values before anything is opened, received or
read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from rollmesh.errors import ConfigError, Error, FormatError, VersionError
from rollmesh.runtime.arguments import boolean, fields_of, integer_of
from rollmesh.runtime.messages import shown

TRANSPORTS = ("shm", "folder")
MAX_BUCKET = 1 << 40  # bytes

T = TypeVar("T")


def check_transport(transport: Any) -> None:
    if transport in TRANSPORTS:
        return
    hint = "; workers on other machines read a folder" if transport == "distributed" else ""
    raise ConfigError(
        f"transport: expected one of {', '.join(TRANSPORTS)}, got {shown(transport)}{hint}"
    )


@dataclass(frozen=True)
class InitInfo:
    """The init_info of init_weight_transfer_engine.

    transport           "shm": a WeightSender of this machine sends buckets. "folder": each update
                        is the newest version in the folder of a rollmesh.sources.DeltaWriter
    sender              a name of the trainer. A bucket with another sender is refused, so that a
                        set cannot mix tensors of two trainers
    cast                convert other float dtypes to the model's, as torch's .to() does; False:
                        raise DTypeError for them
    allow_bias_removal  accept that a router bias of the serving version is missing (it becomes
                        zero)
    folder              for transport="folder": a path on the workers' machines. Each worker keeps a
                        copy of the version in host memory
    """

    transport: str = "shm"
    sender: str | None = None
    cast: bool = False
    allow_bias_removal: bool = False
    folder: str | None = None

    def __post_init__(self) -> None:
        check_transport(self.transport)
        if self.sender is not None and not isinstance(self.sender, str):
            raise ConfigError(f"sender: expected a str or None, got {shown(self.sender)}")
        boolean("cast", self.cast)
        boolean("allow_bias_removal", self.allow_bias_removal)
        if (self.transport == "folder") != isinstance(self.folder, str):
            raise ConfigError(
                f"folder: expected {'a path' if self.transport == 'folder' else 'none'}, got "
                f"{shown(self.folder)}"
            )


@dataclass(frozen=True)
class UpdateInfo:
    """The update_info of update_weights: one bucket of tensors. With transport="folder" it has only
    sender, version and abort.

    description     JSON (weights/transport/manifest.py): names, dtypes, shapes and offsets of the
                    tensors, and with transport="shm" the tensors on the trainer's GPUs that are
                    lent until the call returns
    size            bytes of the bucket
    segment, nonce  transport="shm": the file in /dev/shm
    sender          as in the InitInfo
    version         number of the set, the same in all its buckets. None: the next number, or the
                    version in the folder
    abort           instead of a bucket: the reason why the trainer drops the set
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
        integer_of(FormatError, "size", self.size, 0, MAX_BUCKET)
        if self.version is not None:
            integer_of(VersionError, "version", self.version, 0, 2**63 - 1)
        if self.abort is not None and not isinstance(self.abort, str):
            raise FormatError(f"abort: expected a reason, got {shown(self.abort)}")


def info_of(kind: type[T], values: Any, error: type[Error], name: str = "") -> T:
    """Makes a dataclass from a received dict. name: of the dict, for messages; that of the class if
    empty."""
    return kind(**fields_of(error, name or kind.__name__, kind, values))
