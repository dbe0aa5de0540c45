"""Every model family on a CUDA device: the fibres of tests/gpu/simt, or a GPU if there is one.

Oracle: one rank on the CPU. The kernels compute with the contract's FMA chains, so tokens,
logprobs, logits, routed experts and digests equal the CPU's. Bound: equality. Steps of one device
are replayed as captured graphs except for the first step of a size."""

from __future__ import annotations

import importlib
from typing import Any

import helpers
import pytest
from device_traffic import device_step_bytes
from marks import full, some
from test_cuda_engine import library  # noqa: F401  (a fixture)
from test_nccl_engine import Make, make, shares, where  # noqa: F401  (fixtures)

import rollmesh as rm

pytest.importorskip("torch", reason="the models are transformers'")
family_models = importlib.import_module("family_models")
family_runs = importlib.import_module("family_runs")
# Norms over all heads; groups, a shared expert, half heads; a switch for biases; no gate.
QUICK = {"olmoe", "glm4_moe", "qwen2_moe", "arcee"}
WITH_EXPERTS = QUICK - {"arcee"}


def generator(model: Any, **options: Any) -> rm.Generator:
    return family_runs.generator(model, **{**helpers.SMALL, "kv_cache_gib": 0.004, **options})


def told(gen: rm.Generator) -> list[bytes]:
    return family_runs.told(gen)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", some(family_models.FAMILIES, QUICK.__contains__))
def test_a_device_gives_the_bits_of_the_cpu(family: str, dtype: str, seed: int) -> None:
    model = family_runs.cut(family, seed)
    found, replays = [], []
    for options in ({}, {"device": "cuda"}, {"device": "cuda", "enforce_eager": True}):
        with generator(model, dtype=dtype, **options) as gen:
            found.append((gen.sync_weights(model.state, cast=True).digest, told(gen)))
            replays.append(gen.metrics()["graph_replays"])
    assert found[0] == found[1] == found[2]
    assert replays[1] > 0 == replays[2]


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize(
    "family", some(family_models.FAMILIES, lambda family: family == "glm4_moe")
)
def test_random_configs_on_a_device(family: str, number: int, seed: int) -> None:
    model = family_models.draw(family, 600 + number, seed)
    prompts = helpers.prompts({"vocab_size": model.config.vocab_size}, (1, 7, 35), seed=2)
    found = []
    for device in ("cpu", "cuda"):
        with generator(model, device=device) as gen:
            found.append([logits.tobytes() for logits in gen.logits(prompts)])
    assert found[0] == found[1]


MESHES: list[tuple[rm.Mesh, dict[str, Any]]] = [
    (rm.Mesh(tp=2), {}),
    (rm.Mesh(tp=2), {"sequence_parallel": True}),
    (rm.Mesh(tp=2, ep=2), {"ep_backend": "alltoall", "sequence_parallel": True}),
    (rm.Mesh(tp=2, ep=2), {"ep_backend": "allgather_reducescatter"}),
    (rm.Mesh(tp=2, ep=2), {"ep_backend": "local_allreduce"}),
]


@pytest.mark.parametrize("family", some(sorted(QUICK), [0, 1]))
def test_a_mesh_of_devices_gives_one_ranks_bits(family: str, seed: int) -> None:
    model = family_runs.cut(family, seed)
    with generator(model, dtype="bfloat16") as gen:
        want = told(gen)
    for mesh, options in MESHES:
        if mesh.ep > 1 and family not in WITH_EXPERTS:
            continue
        with generator(model, dtype="bfloat16", device="cuda", mesh=mesh, **options) as gen:
            assert told(gen) == want, (mesh, options)


@pytest.mark.parametrize(
    "mesh, options",
    [
        full(rm.Mesh(tp=2), {}),
        full(rm.Mesh(tp=3), {"sequence_parallel": True}),
        (rm.Mesh(tp=2, ep=2), {"ep_backend": "alltoall", "sequence_parallel": True}),
        full(rm.Mesh(tp=2, ep=2), {"ep_backend": "local_allreduce"}),
        full(rm.Mesh(dp=2, tp=2, ep=4), {"ep_backend": "allgather_reducescatter"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", sorted(WITH_EXPERTS))
def test_ranks_replay_captured_graphs(
    make: Make, family: str, mesh: rm.Mesh, options: dict[str, Any], seed: int
) -> None:
    """Over NCCL or its stand-in. A replayed step of four rows a replica transfers the bytes of
    device_traffic."""
    model, found = family_runs.cut(family, seed), []
    prompts, params = (
        [[i + 1] for i in range(4 * mesh.dp)],
        rm.SamplingParams(max_tokens=4, seed=3, ignore_eos=True),
    )
    for on in ({}, {"mesh": mesh, **options}):
        gen = make(model.config, dtype="bfloat16", kv_cache_gib=0.004, **on)
        gen.sync_weights(model.state, cast=True)
        found.append(told(gen))
        gen.generate(prompts, params, use_tqdm=False)
        before = gen.metrics()
        gen.generate([[ids[0] + 20] for ids in prompts], params, use_tqdm=False)
        after = gen.metrics()
    assert found[0] == found[1]
    assert after["graph_replays"] - before["graph_replays"] == 4 * mesh.dp
    want = device_step_bytes(gen.spec, mesh, 4, captured=True, **options)
    assert after["comm_bytes"] - before["comm_bytes"] == 4 * want
