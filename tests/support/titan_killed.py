"""Child of test_titan_rl.py: runs examples/titan/grpo.py and kills the last process of the last
generator after the second step."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/titan"))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)

import grpo
from monarch.actor import Actor, endpoint
from torchtitan.experiments.rl.components.weight_sync import WeightSyncManager
from torchtitan.experiments.rl.controller import Controller


class Pid(Actor):
    @endpoint
    async def get(self) -> int:
        return os.getpid()


victims: list[int] = []
run, push = Controller.run, WeightSyncManager.start_async_push_pull


async def run_with_victim(self: Controller) -> None:
    pids = await self._proc_meshes[-1].spawn("pid", Pid).get.call()
    *_, (_, pid) = pids.items()
    victims.append(pid)
    await run(self)


def push_and_kill(self: Any, *, version: int) -> None:
    if version == 2:
        os.kill(victims[0], signal.SIGKILL)
    push(self, version=version)


Controller.run, WeightSyncManager.start_async_push_pull = run_with_victim, push_and_kill
grpo.main(sys.argv[1:])
