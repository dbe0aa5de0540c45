"""Sources of weights that are not tensors of this process. Each is a mapping or an iterator of (name, tensor) for
`Generator.sync_weights`.

    SafetensorsFolder(path)          a checkpoint folder or file, read tensor by tensor
    SharedWriter, SharedReader       trainer and generator are processes of one machine: a file in /dev/shm, read without a copy
    send_weights, receive_weights    between ranks, in buckets: from GPU to GPU with rm.comm.nccl or torch's NCCL, through the host with
                                     rm.comm.shm, rm.comm.torch or any other torch.distributed group
    bucketed(entries, bytes)         splits a stream into buckets

Nothing here unpickles, listens on a port, or imports torch before it is needed.
"""

from __future__ import annotations

from rollmesh.runtime.dtypes import BF16
from rollmesh.weights.safetensors_folder import SafetensorsFolder
from rollmesh.weights.transport.store import SharedReader, SharedWriter
from rollmesh.weights.transport.stream import receive_weights, send_weights
from rollmesh.weights.transport.tensors import bucketed

__all__ = ["BF16", "SafetensorsFolder", "SharedReader", "SharedWriter", "bucketed", "receive_weights", "send_weights"]
