"""Where weights come from when they are not already tensors of this process. Each source gives what `Generator.sync_weights` takes:
a mapping, or an iterator of (name, tensor).

    SafetensorsFolder(path)          a checkpoint folder or file, read tensor by tensor
    SharedWriter, SharedReader       trainer and generator are processes of one machine: a file in /dev/shm, zero copy to read
    send_weights, receive_weights    between ranks, in buckets: by rm.comm.nccl or a torch group of NCCL from GPU to GPU; by rm.comm.shm or
                                     any other torch.distributed group
    bucketed(entries, bytes)         groups a stream into buckets

Nothing here unpickles, listens on a port, or imports torch before it is needed.
"""

from __future__ import annotations

from rollmesh.runtime.dtypes import BF16
from rollmesh.weights.safetensors_folder import SafetensorsFolder
from rollmesh.weights.transport.store import SharedReader, SharedWriter
from rollmesh.weights.transport.stream import receive_weights, send_weights
from rollmesh.weights.transport.tensors import bucketed

__all__ = ["BF16", "SafetensorsFolder", "SharedReader", "SharedWriter", "bucketed", "receive_weights", "send_weights"]
