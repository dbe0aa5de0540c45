"""Scenarios of tests/engine/test_kv_size.py for ranks in separate processes, which
tests/support/mesh_ranks.py forks."""

from __future__ import annotations

import os
import time
from typing import Any

import mesh_ranks

import rollmesh as rm
from rollmesh import _core
from rollmesh.distributed import peers
from rollmesh.runtime.devices import LIBRARY_SWITCH


def sized(rank: Any) -> Any:
    """Returns a rank's pages, the free memory of its card before, its weights, and the mesh's
    answers if requested."""
    with rank.make(**rank.job["each"][rank.rank]) as generator:
        made = generator.metrics()
        device = made["device"].partition(":")[2]
        free = (
            _core.cuda_available(os.environ[LIBRARY_SWITCH], int(device)) + made["kv_bytes"]
            if device
            else None
        )
        digests = [
            generator.sync_weights(rank.source(scale), cast=True).digest for scale in (1.0, 0.75)
        ]
        sizes = {
            "pages": made["kv_pages"],
            "kv": made["kv_bytes"],
            "weights": made["weight_bytes"],
            "free": free,
        }
        return {
            **sizes,
            "bits": [digests, mesh_ranks.answers(generator) if rank.job["answers"] else None],
        }


def unmade(rank: Any) -> Any:
    """The victim fails while it makes its engine, or its process exits there. Returns the error of
    each rank, and after how many seconds."""

    def fails(*_: Any) -> Any:
        if rank.job["how"] == "ends":
            rank.end_itself()
        raise MemoryError("none left for an engine")

    if rank.victim:
        peers._core = type("Core", (), {"Engine": staticmethod(fails)})
    start = time.monotonic()
    try:
        rank.make()
    except (rm.Error, MemoryError) as error:
        return [type(error).__name__, str(error), time.monotonic() - start]
    return None
