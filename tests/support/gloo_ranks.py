"""Runs a function on the ranks of a torch.distributed group over Gloo, each in a separate
process."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from paths import child_environment


def on_ranks(size: int, function: Callable[[int], None], folder: Path) -> None:
    """Calls `function(rank)` of a test module on each rank, and asserts that all ranks end well."""
    command = [sys.executable, "-W", "ignore", __file__, function.__module__, function.__name__]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(folder / "store")],
            env=child_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    printed = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [(rank.returncode, text) for rank, text in zip(ranks, printed, strict=True)] == [
        (0, "OK\n")
    ] * size


def main(module: str, function: str, rank: int, size: int, store: str) -> None:
    from torch import distributed

    place = f"file://{store}"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=size)
    getattr(importlib.import_module(module), function)(rank)
    distributed.barrier()
    distributed.destroy_process_group()
    sys.stdout.write("OK\n")
    sys.stdout.flush()
    os._exit(0)  # threads of Gloo may call std::terminate while the interpreter ends


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
