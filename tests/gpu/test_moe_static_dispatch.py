"""Dispatch with fixed sizes (csrc/model/moe/static_dispatch.c) on the simulated device: what a step
sends follows from its number of rows, and the results are bit-identical to one rank on the CPU.

Input: steps of one row and more per replica, ranks without rows and without any of the chosen
experts, rows whose size is not a multiple of four bytes. Oracle: results of one rank on the CPU;
byte counts from device_traffic.py. Bound: equality.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import helpers
import numpy as np
import pytest
from device_traffic import device_step_bytes
from marks import some
from test_cuda_engine import bits, library  # noqa: F401  (a fixture)

import rollmesh as rm

TRAVELLING = ("alltoall", "allgather_reducescatter")
BACKENDS = (*TRAVELLING, "local_allreduce")
FEW = 5  # max_num_seqs
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "vocab_size": 300,
}
LAYERS = 2
LIMIT = 240  # seconds of a test


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """Ranks of one process that are in different exchanges would wait for each other forever: the
    limit ends the process."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@contextmanager
def generator(config: helpers.Config, state: Any, **options: Any) -> Iterator[rm.Generator]:
    how = {
        "max_model_len": 96,
        "max_num_seqs": FEW,
        "max_num_batched_tokens": 32,
        "kv_cache_gib": 0.004,
        "threads": 1,
        **options,
    }
    with rm.Generator(rm.ModelSpec.from_hf(config), **how) as made:
        made.sync_weights(state, cast=True)
        yield made


def told(made: rm.Generator, prompts: list[list[int]], **params: Any) -> Any:
    outputs = made.generate(
        prompts, rm.SamplingParams(seed=3, ignore_eos=True, **params), use_tqdm=False
    )
    return [
        [bits([c.token_ids, c.logprobs, c.routed_experts, c.top_logprobs]) for c in output.outputs]
        for output in outputs
    ]


def moved(made: rm.Generator, prompts: list[list[int]], **params: Any) -> tuple[int, int, int]:
    """Returns steps, bytes that all ranks sent, and calls of one rank."""
    before = made.metrics()
    told(made, prompts, **params)
    after = made.metrics()
    steps, sent, calls = (
        after[name] - before[name] for name in ("steps", "comm_bytes", "comm_calls")
    )
    return steps, sent, calls


# ------------------------------------------------------------------------------------- which form
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "mesh, changes",
    [
        (rm.Mesh(tp=2, ep=2), {}),
        (rm.Mesh(tp=4, ep=4), {"num_experts": 4}),
        (rm.Mesh(tp=2, dp=2, ep=4), {}),
        (rm.Mesh(dp=2, ep=2), {"hidden_size": 37}),
    ],
    ids=str,
)
def test_a_step_of_few_rows_moves_what_its_rows_say(
    mesh: rm.Mesh, changes: dict[str, Any], backend: str, sequence_parallel: bool
) -> None:
    if backend == "local_allreduce" and mesh.ep != mesh.tp:
        pytest.skip("local_allreduce works where ep = tp")
    config = helpers.tiny_config(moe=True, **{**SIZES, **changes})
    how: dict[str, Any] = {
        "device": "cuda",
        "mesh": mesh,
        "ep_backend": backend,
        "sequence_parallel": sequence_parallel,
    }
    with generator(config, helpers.numpy_state_dict(config, seed=1), **how) as made:
        steps, sent, _ = moved(made, [[i + 1] for i in range(FEW * mesh.dp)], max_tokens=4)
    want = device_step_bytes(
        rm.ModelSpec.from_hf(config),
        mesh,
        FEW,
        ep_backend=backend,
        sequence_parallel=sequence_parallel,
    )
    assert steps == 4
    assert sent / steps == want


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_long_step_does_not_depend_on_choices(backend: str) -> None:
    """The prompt has more rows than sequences fit at once. The step sends the same number of bytes
    and makes the same calls for every prompt of that length, and a step of one row makes no more
    calls than on the CPU, which exchanges what is chosen."""
    config = helpers.tiny_config(moe=True, **SIZES)
    state = helpers.numpy_state_dict(config, seed=1)
    found = {}
    for device in ("cpu", "cuda"):
        with generator(
            config,
            state,
            device=device,
            mesh=rm.Mesh(tp=2, ep=2),
            ep_backend=backend,
            enable_prefix_caching=False,
        ) as made:
            found[device] = [
                {
                    moved(made, [[(7 * i + start) % 97 for i in range(rows)]], max_tokens=1)
                    for start in range(8)
                }
                for rows in (FEW + 1, 1)
            ]
    (((steps, _, calls),), ((_, _, few_calls),)) = found["cuda"]
    assert (steps, calls) == (1, few_calls)
    fewer = {"alltoall": 1, "allgather_reducescatter": 2, "local_allreduce": 0}[backend]
    assert {each for _, _, each in found["cpu"][1]} == {few_calls + fewer * LAYERS}


# ------------------------------------------------------------------------------------------- bits
HARD: dict[str, tuple[rm.Mesh, dict[str, Any], dict[str, Any]]] = {
    "a rank without rows": (rm.Mesh(dp=4, ep=4), {}, {}),
    "tensor parallel replicas": (rm.Mesh(tp=2, dp=2, ep=4), {}, {}),
    "home rows": (rm.Mesh(tp=2, dp=2, ep=4), {}, {"sequence_parallel": True}),
    "experts of a rank fewer than top_k": (rm.Mesh(dp=4, ep=4), {"num_experts": 4}, {}),
    "one expert of a rank": (
        rm.Mesh(tp=4, ep=4),
        {"num_experts": 4, "num_experts_per_tok": 4},
        {"sequence_parallel": True},
    ),
    "odd rows": (rm.Mesh(dp=2, ep=2), {"hidden_size": 37}, {}),
    "odd rows in pieces": (rm.Mesh(tp=2, ep=2), {"hidden_size": 37}, {}),
    "vocabulary of one block": (rm.Mesh(tp=2, ep=2), {"vocab_size": 100}, {}),
}


@pytest.mark.parametrize("dtype", some(["bfloat16", "float32"], [0]))
@pytest.mark.parametrize("backend", TRAVELLING)
@pytest.mark.parametrize("case", HARD)
def test_fixed_sizes_give_one_ranks_bits(case: str, backend: str, dtype: str) -> None:
    """The replicas run steps with very different rows: prompts of 70 in chunks of 32 beside samples
    that decode one token at a time."""
    mesh, changes, options = HARD[case]
    config = helpers.tiny_config(moe=True, **{**SIZES, **changes})
    check(
        config,
        helpers.numpy_state_dict(config, seed=1),
        mesh,
        dtype=dtype,
        ep_backend=backend,
        **options,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_rows_to_the_experts_of_one_rank(backend: str) -> None:
    config = helpers.tiny_config(moe=True, **{**SIZES, "num_experts_per_tok": 4})
    state = helpers.numpy_state_dict(config, seed=1)
    for name in state:
        if name.endswith("mlp.gate.weight"):
            state[name] = np.zeros_like(state[name])  # equal scores: the lowest ids
    check(config, state, rm.Mesh(tp=2, ep=2), ep_backend=backend)


def check(config: helpers.Config, state: Any, mesh: rm.Mesh, **options: Any) -> None:
    prompts = [[1, 2, 3], [(5 * i) % 97 for i in range(70)], [9]]
    found = []
    for how in (
        {"device": "cpu", "dtype": options.get("dtype", "bfloat16")},
        {"device": "cuda", "mesh": mesh, **options},
    ):
        with generator(config, state, **how) as made:
            samples = (
                told(made, prompts, max_tokens=6, n=2, logprobs=2),
                told(made, prompts[:1], max_tokens=9),
            )
            found.append((samples, bits(made.logits([[4] * 3]))))
    assert found[0] == found[1]
