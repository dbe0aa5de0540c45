"""A device's step path does not allocate. Device memory and pinned memory are allocated when a
generator is made and when it receives weights, graphs in the first steps of each number of rows.
test_allocations.py tests host memory.

Oracle: the allocation calls that the runtime of tests/gpu/simt counts. Bound: zero calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import pytest
from marks import some
from test_cuda_engine import DENSE, MOE, PARAMS, PROMPTS, library, simt  # noqa: F401  (fixtures)

import rollmesh as rm

Make = Callable[..., rm.Generator]
KINDS = ("blocks of a device", "pinned blocks", "graphs", "streams", "events")  # of simt_made
# Ranks are threads that exchange through the host.
MESHES: dict[str, tuple[helpers.Config, dict[str, Any]]] = {
    "dense": (DENSE, {}),
    "moe": (MOE, {}),
    "eager": (DENSE, {"enforce_eager": True}),
    "tensor cores": (MOE, {"isa": "cuda_mma"}),
    "tp": (DENSE, {"mesh": rm.Mesh(tp=2)}),
    "moe, token shards": (MOE, {"mesh": rm.Mesh(tp=2), "sequence_parallel": True}),
    "ep of tp": (MOE, {"mesh": rm.Mesh(tp=2, ep=2)}),
    "ep of dp": (MOE, {"mesh": rm.Mesh(dp=2, ep=2), "ep_backend": "allgather_reducescatter"}),
}
CALLS: dict[str, Callable[[rm.Generator], Any]] = {
    "decode": lambda g: g.generate(
        [[1, 2, 3], [4], [5, 6]],
        rm.SamplingParams(max_tokens=20, seed=1, ignore_eos=True),
        use_tqdm=False,
    ),
    "prefill": lambda g: g.generate(
        [[i % 60 for i in range(90)]] * 2, rm.SamplingParams(max_tokens=1), use_tqdm=False
    ),
    "all options": lambda g: g.generate(PROMPTS, PARAMS, use_tqdm=False),
    "score": lambda g: g.score(
        [[3, 1, 2, 9, 8, 7], [6] * 40], rm.SamplingParams(temperature=0.8, top_k=7)
    ),
    "logits": lambda g: g.logits([[3, 1, 2, 9], [4] * 40]),
    "submit and poll": lambda g: (g.submit(PROMPTS, PARAMS), g.poll(min_outputs=len(PROMPTS))),
}


@pytest.fixture
def counted(library: Path, simt: None) -> Callable[[], dict[str, int]]:
    """Returns the number of requests of each kind so far, in the library that the engine has
    loaded."""
    loaded = ctypes.CDLL(str(library))

    def counts() -> dict[str, int]:
        found = (ctypes.c_uint64 * len(KINDS))()
        loaded.simt_made(found)
        return dict(zip(KINDS, found, strict=True))

    return counts


@pytest.mark.parametrize("config, changes", some(MESHES.values(), [6], names=2), ids=MESHES)
def test_steps_allocate_nothing(
    make: Make,
    counted: Callable[[], dict[str, int]],
    config: helpers.Config,
    changes: dict[str, Any],
) -> None:
    """Memory is not allocated even in the first call of a kind; graphs are not made in the second
    and the third."""
    before, eager = counted(), changes.get("enforce_eager", False)
    generator = make(config, **changes)
    generator.sync_weights(helpers.numpy_state_dict(config, seed=1), cast=True)
    made = counted()
    taken = [kind for kind in KINDS if made[kind] == before[kind]]
    assert taken == ["graphs"], "what is counted is what the engine takes"
    for call in CALLS.values():
        call(generator)
    first = counted()
    assert {**first, "graphs": 0} == {**made, "graphs": 0}, "a first call"
    assert (
        (first["graphs"] > made["graphs"])
        == (generator.metrics()["graph_replays"] > 0)
        == ("mesh" not in changes and not eager)
    )
    for _ in range(2):
        for name, call in CALLS.items():
            call(generator)
            assert counted() == first, name
