"""The public name of rollmesh.distributed.comm: how the ranks of a mesh reach each other."""

from __future__ import annotations

from rollmesh.distributed.comm import Comm, Ends, Nccl, Shm, Torch, nccl, shm, threads, torch

__all__ = ["Comm", "Ends", "Nccl", "Shm", "Torch", "nccl", "shm", "threads", "torch"]
