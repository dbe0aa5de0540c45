"""Decode steps that are recorded and replayed (csrc/gpu/graphs.c), on the fibres of
tests/gpu/simt, or on a GPU if there is one.

Oracle: the CPU, and the same engine with enforce_eager=True. Bound: equality. The tests check
metrics()["graph_replays"], so that a test without replays fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import helpers
import pytest
from marks import some
from test_cuda_engine import DENSE, MOE, library, simt, told  # noqa: F401  (fixtures)

import rollmesh as rm

Make = Callable[..., rm.Generator]
# Ends at different lengths, so that batches shrink through all sizes.
PROMPTS = [[i + 1, 2, 3][: 1 + i % 3] * (1 + i % 4) for i in range(7)]
PARAMS = [
    rm.SamplingParams(
        max_tokens=4 + 3 * i,
        seed=i,
        temperature=i % 3 / 2,
        top_k=(-1, 5)[i % 2],
        top_p=1 - i % 2 / 10,
        ignore_eos=True,
    )
    for i in range(7)
]
WIDE = {"max_num_seqs": 7, "kv_cache_gib": 0.004}


def rollouts(generator: rm.Generator, params: Any = PARAMS) -> Any:
    return told(generator.generate(PROMPTS, params, use_tqdm=False))


def steps_and_replays(generator: rm.Generator) -> tuple[int, int]:
    stats = generator.metrics()
    return stats["steps"], stats["graph_replays"]


@pytest.mark.parametrize("isa", [None, "cuda_mma"])
@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_a_replayed_step_gives_the_bits_of_one_enqueued(
    make: Make, config: helpers.Config, isa: str | None
) -> None:
    state = helpers.numpy_state_dict(config, seed=1)
    replayed, eager = (
        make(config, isa=isa, **WIDE),
        make(config, isa=isa, enforce_eager=True, **WIDE),
    )
    generators = [replayed, eager] if isa else [replayed, eager, make(config, "cpu", **WIDE)]
    found = []
    for generator in generators:
        generator.sync_weights(state, cast=True)
        # The second time prompts are prefix hits, and every size has run before.
        found.append([rollouts(generator), rollouts(generator)])
    assert found == [found[0]] * len(found)
    steps, replays = steps_and_replays(replayed)
    assert replays > steps // 2
    assert [steps_and_replays(generator)[1] for generator in generators[1:]] == [0] * (
        len(generators) - 1
    )


@pytest.mark.parametrize(
    "changes",
    some(
        [
            {"max_num_batched_tokens": 5},
            {"max_num_batched_tokens": 2},
            {"max_num_seqs": 3},
            {"pages": 6},
            {"block_size": 32},
        ],
        [2, 3],
    ),
    ids=str,
)
def test_replays_among_chunks_preemptions_and_others(make: Make, changes: dict[str, Any]) -> None:
    """Steps with prompts, top logprobs or banned tokens are not recorded, and run between
    replays."""
    changes = {**WIDE, **changes}
    if pages := changes.pop("pages", 0):
        stats = make(MOE, "cpu", **WIDE).metrics()
        changes["kv_cache_gib"] = (pages + 0.5) * stats["kv_bytes"] / stats["kv_pages"] / 2**30
    params = [
        rm.SamplingParams(
            max_tokens=20, seed=i, ignore_eos=True, n=1 + i % 4, logprobs=2 * (i == 4) or None
        )
        for i in range(6)
    ]
    params.append(
        rm.SamplingParams(
            max_tokens=20, seed=6, min_tokens=12, stop_token_ids=range(40), repetition_penalty=1.2
        )
    )
    found = []
    for device in ("cpu", "cuda"):
        generator = make(MOE, device, **changes)
        generator.sync_weights(helpers.numpy_state_dict(MOE, seed=1), cast=True)
        generator.submit(
            [[9, 8, 7, 6] * 9], rm.SamplingParams(max_tokens=9, seed=3, prompt_logprobs=1)
        )
        found.append([rollouts(generator, params), rollouts(generator)])
        found[-1].append(told(generator.poll()))
    assert found[0] == found[1]
    assert generator.metrics()["graph_replays"] > 5
    assert (generator.metrics()["preemptions"] > 0) == bool(pages)


@pytest.mark.parametrize(
    "changes, replays",
    [
        ({}, 18),
        ({"min_tokens": 12, "stop_token_ids": [5]}, 7),
        ({"logprobs": 2}, 0),
        ({"logit_bias": {5: 1.0}}, 0),
        ({"frequency_penalty": 0.5}, 0),
    ],
    ids=str,
)
def test_which_steps_are_replayed(make: Make, changes: dict[str, Any], replays: int) -> None:
    """The first of 20 tokens comes from the prefill, and the first step of a size is enqueued.
    Steps with token lists are not recorded."""
    gpu = make(DENSE)
    gpu.sync_weights(helpers.numpy_state_dict(DENSE, seed=1), cast=True)
    params = rm.SamplingParams(max_tokens=20, temperature=0, **changes)
    assert len(gpu.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids) == 20
    assert gpu.metrics()["graph_replays"] == replays


def test_a_sync_costs_no_recording(make: Make) -> None:
    """A store's two blocks alternate: from the third version on every known size is replayed
    immediately."""
    params = rm.SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    cpu, gpu = make(DENSE, "cpu"), make(DENSE)
    replays = []
    for version in range(5):
        state = helpers.numpy_state_dict(DENSE, seed=version)
        found = []
        for generator in (cpu, gpu):
            generator.sync_weights(state, cast=True)
            found.append(told(generator.generate([[1, 2, 3]], params, use_tqdm=False)))
        assert found[0] == found[1]
        replays.append(gpu.metrics()["graph_replays"])
    each = [after - before for before, after in zip([0, *replays], replays, strict=False)]
    # The first of nine tokens comes from the prefill; a new address's first step is enqueued.
    assert each == [7, 7, 8, 8, 8]


def test_sleep_forgets_recordings_and_wake_makes_new_ones(make: Make) -> None:
    params = rm.SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    state = helpers.numpy_state_dict(MOE, seed=1)
    gpu = make(MOE)
    gpu.sync_weights(state, cast=True)
    first = told(gpu.generate([[1, 2, 3]], params, use_tqdm=False))
    for parts in (("kv",), ("weights",), ("weights", "kv")):
        gpu.sleep(parts)
        gpu.wake(parts)
        if "weights" in parts:
            gpu.sync_weights(state, cast=True)
        before = gpu.metrics()["graph_replays"]
        again = told(gpu.generate([[1, 2, 3]], params, use_tqdm=False))
        assert [o[5][0][:2] if isinstance(o, tuple) else o for o in again] == [
            o[5][0][:2] if isinstance(o, tuple) else o for o in first
        ]
        assert gpu.metrics()["graph_replays"] == before + 7


def test_a_row_that_is_not_finite_ends_its_request_alone(make: Make) -> None:
    """A token whose embedding is NaN is used in a replayed step."""
    state = helpers.numpy_state_dict(DENSE, seed=1)
    found = []
    for device in ("cpu", "cuda"):
        generator = make(DENSE, device)
        generator.sync_weights(state, cast=True)
        drawn = (
            generator.generate(
                [[1, 2, 3]], rm.SamplingParams(max_tokens=9, seed=1), use_tqdm=False
            )[0]
            .outputs[0]
            .token_ids
        )
        poisoned = {**state, "model.embed_tokens.weight": state["model.embed_tokens.weight"].copy()}
        poisoned["model.embed_tokens.weight"][int(drawn[5])] = float("nan")
        with generator.begin_sync(cast=True, allow_nonfinite=True) as sync:
            for name, tensor in poisoned.items():
                sync.push(name, tensor)
        params = [rm.SamplingParams(max_tokens=9, seed=seed, ignore_eos=True) for seed in (1, 2, 3)]
        outputs = generator.generate([[1, 2, 3]] * 3, params, use_tqdm=False, on_error="return")
        found.append(told(outputs))
        assert any(output.error for output in outputs)
    assert found[0] == found[1]
    assert generator.metrics()["graph_replays"] > 0


def test_without_memory_for_graphs_steps_are_enqueued(
    make: Make, simt: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMESH_SIMT_GRAPHS", "1")
    state = helpers.numpy_state_dict(DENSE, seed=1)
    cpu, gpu = make(DENSE, "cpu", **WIDE), make(DENSE, **WIDE)
    found = []
    for generator in (cpu, gpu):
        generator.sync_weights(state, cast=True)
        found.append([rollouts(generator), rollouts(generator)])
    assert found[0] == found[1]
    steps, replays = steps_and_replays(gpu)
    assert 0 < replays < steps // 2


@pytest.mark.parametrize("work", [1, 2, 25, 40])
def test_a_recording_that_another_thread_spoils(
    make: Make, simt: None, monkeypatch: pytest.MonkeyPatch, work: int
) -> None:
    """A wait for the whole device invalidates the recording: that step is enqueued, and the next is
    recorded."""
    params = rm.SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    found = []
    for spoilt in (False, True):
        if spoilt:
            monkeypatch.setenv("ROLLMESH_SIMT_SPOIL", str(work))
        generator = make(DENSE)
        for version in range(4):  # both blocks of the store
            generator.sync_weights(helpers.numpy_state_dict(DENSE, seed=version), cast=True)
            found.append(told(generator.generate([[1, 2, 3]], params, use_tqdm=False)))
        found.append(generator.metrics()["graph_replays"] + spoilt)
    assert found[:5] == found[5:]


def test_a_fault_in_a_replay_is_a_device_error(
    make: Make, simt: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = helpers.numpy_state_dict(DENSE, seed=1)
    params = rm.SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    faults = 0
    for launch in (300, 500, 700):
        monkeypatch.setenv("ROLLMESH_SIMT_FAULT", str(launch))
        generator = make(DENSE)
        generator.sync_weights(state, cast=True)
        with pytest.raises(rm.DeviceError, match="cuda:0"):
            generator.generate([[1, 2, 3]], params, use_tqdm=False)
        faults += generator.metrics()["graph_replays"] > 0
        with pytest.raises(rm.DeviceError):
            generator.generate([[1, 2, 3]], params, use_tqdm=False)
        generator.close()
    assert faults > 0
    monkeypatch.delenv("ROLLMESH_SIMT_FAULT")
    generator = make(DENSE)
    generator.sync_weights(state, cast=True)
    assert (
        len(generator.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids) == 40
    )


@pytest.mark.parametrize("wrong", [1, None, "yes"])
def test_enforce_eager_is_true_or_false(make: Make, wrong: Any) -> None:
    with pytest.raises(rm.ConfigError, match="enforce_eager"):
        make(enforce_eager=wrong)
