"""The public name of rollmesh.distributed.comm: how the ranks of a mesh reach each other."""

from __future__ import annotations

from rollmesh.distributed.comm import Comm, Endpoints, Nccl, Shm, Torch, nccl, shm, threads, torch

Ends = Endpoints  # deprecated name, until 1.0

__all__ = [
    "Comm", "Endpoints", "Ends", "Nccl", "Shm", "Torch", "nccl", "shm", "threads", "torch",
]  # fmt: skip
