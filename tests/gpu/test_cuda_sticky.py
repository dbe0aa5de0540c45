"""A fault of a kernel breaks the device's context until the process ends. Runs in a separate
process, on the fibres of tests/gpu/simt, which model this with ROLLMESH_SIMT_STICKY=1.

Oracle: the CPU for the results of other devices; the error's type and words. Bound: equality.
"""

from __future__ import annotations

import ctypes as C
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
from paths import child_environment

import rollmesh as rm
from rollmesh.runtime.devices import LIBRARY_SWITCH

SMALL = {"max_model_len": 64, "max_num_seqs": 4, "kv_cache_gib": 0.002, "threads": 1}
CONFIG = helpers.tiny_config()
STATE = helpers.numpy_state_dict(CONFIG, seed=1)
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9] * 6]
GREEDY = rm.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
WHY = r"\bcuda:0: [a-zA-Z ]+: an illegal memory access was encountered"


def made(device: str, **changes: Any) -> rm.Generator:
    return rm.Generator(rm.ModelSpec.from_hf(CONFIG), device=device, **{**SMALL, **changes})


def synced(device: str, **changes: Any) -> rm.Generator:
    generator = made(device, **changes)
    generator.sync_weights(STATE, cast=True)
    return generator


def tokens(generator: rm.Generator) -> list[tuple[list[int], bytes]]:
    outputs = generator.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [
        (o.outputs[0].token_ids.tolist(), np.asarray(o.outputs[0].logprobs).tobytes())
        for o in outputs
    ]


def is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(rm.DeviceError, match=WHY):
        call()


def nothing_is_served(dead: rm.Generator) -> None:
    is_refused(lambda: tokens(dead))
    is_refused(lambda: (dead.submit(PROMPTS, GREEDY), dead.poll(min_outputs=1)))
    is_refused(lambda: dead.score(PROMPTS))
    is_refused(lambda: dead.logits(PROMPTS))
    is_refused(lambda: dead.sync_weights(STATE, cast=True))
    is_refused(lambda: dead.sync_weights(STATE, cast=True, mode="inplace"))


def main(launch: int) -> None:
    # `beside` shares the context that the fault breaks.
    cpu, bystander, beside = (synced("cpu"), synced("cuda:1"), synced("cuda:0"))
    expected = tokens(cpu)
    assert tokens(bystander) == tokens(beside) == expected
    os.environ["ROLLMESH_SIMT_FAULT"] = str(launch)
    dead = made("cuda:0")
    del os.environ["ROLLMESH_SIMT_FAULT"]
    dead.sync_weights(STATE, cast=True)
    is_refused(lambda: [tokens(dead) for _ in range(20)])
    nothing_is_served(dead)
    nothing_is_served(beside)
    for closed in (dead, beside, None):  # the last stream closes without clearing the fault
        for name, mesh in (
            ("cuda:0", None),
            ("cuda", None),
            ("cuda", rm.Mesh(tp=2)),
            ("cuda:0", rm.Mesh(dp=2)),
        ):
            is_refused(lambda name=name, mesh=mesh: made(name, mesh=mesh))
        assert tokens(bystander) == expected
        other = synced("cuda:2")
        assert tokens(other) == expected
        other.close()
        if closed is not None:
            closed.close()
            # Otherwise a trainer would get the error at its next launch.
            assert C.CDLL(os.environ[LIBRARY_SWITCH]).simt_left_error() == 0
            closed.close()
    with pytest.raises(rm.StateError, match="closed"):
        tokens(dead)
    bystander.sync_weights(STATE, cast=True)
    assert tokens(bystander) == expected == tokens(cpu)
    bystander.close()
    cpu.close()
    sys.stdout.write("OK\n")


@pytest.mark.parametrize("launch", [60, 100])
def test_a_lost_context_stays_lost(simt_library: Path, launch: int) -> None:
    """The fault occurs during generation: an update takes some 30 launches, and a generation a
    hundred."""
    settings = {LIBRARY_SWITCH: str(simt_library), "ROLLMESH_SIMT_STICKY": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__, str(launch)],
        capture_output=True, text=True, timeout=240, check=False, env=child_environment(**settings),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "OK\n"), done.stderr


if __name__ == "__main__":
    main(int(sys.argv[1]))
