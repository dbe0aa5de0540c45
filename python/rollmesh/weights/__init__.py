"""The weights of a generator: how a new version comes in and which one serves.

    updates      the sets of one generator: begin, push, commit
    transport    tensors between processes: shared memory, CUDA IPC loans, streams of collectives
"""

from __future__ import annotations

from rollmesh.weights.updates import BEGINNING, SLEEP, WAKE, Sync, Weights

__all__ = ["BEGINNING", "SLEEP", "WAKE", "Sync", "Weights"]
