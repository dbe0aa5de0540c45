"""Sources of weights that are not tensors of this process. Each is a mapping or an iterator of
(name, tensor) for `Generator.sync_weights`.

    SafetensorsFolder(path)          a checkpoint folder or file, read tensor by tensor
    SharedWriter, SharedReader       trainer and generator are processes of one machine: a file in
                                     /dev/shm, read without a copy
    DeltaWriter, DeltaReader         a folder that both sides see: whole sets now and then, between
                                     them what a step has changed
    DeltaEncoder, DeltaDecoder       the same as bytes, for any other way between them
    bucketed(entries, bytes)         splits an iterator into buckets of at most so many bytes

Nothing here unpickles, listens on a port, or imports torch before it is needed.
"""

from __future__ import annotations

from typing import Any, NoReturn

from rollmesh.errors import ConfigError
from rollmesh.runtime.dtypes import BF16
from rollmesh.weights.safetensors_folder import SafetensorsFolder
from rollmesh.weights.transport.delta import DeltaDecoder, DeltaEncoder
from rollmesh.weights.transport.delta_folder import DeltaReader, DeltaWriter
from rollmesh.weights.transport.store import SharedReader, SharedWriter
from rollmesh.weights.transport.tensors import bucketed

__all__ = [
    "BF16", "DeltaDecoder", "DeltaEncoder", "DeltaReader", "DeltaWriter", "SafetensorsFolder",
    "SharedReader", "SharedWriter", "bucketed",
    "receive_weights", "send_weights",
]  # fmt: skip


def send_weights(*args: Any, **options: Any) -> NoReturn:
    """Deprecated: raises ConfigError, which names what to use instead."""
    raise ConfigError(
        "send_weights, receive_weights: expected another way between trainer and generator, got a "
        "stream over a group of ranks, which was removed: use SharedWriter and SharedReader on one "
        "machine, DeltaWriter and DeltaReader over a folder, or DeltaEncoder and DeltaDecoder "
        "over a group of your own"
    )


receive_weights = send_weights
