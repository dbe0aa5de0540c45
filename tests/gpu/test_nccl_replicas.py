"""Recorded decode steps where experts span replicas (ep = dp·tp, csrc/gpu/graphs.c): each
replica has its own batch, or none, and all record and replay one size together. Runs on the
stand-ins of tests/gpu/test_nccl_engine.py, or on GPUs.

Input: replicas with equal and with different numbers of rows, a replica without rows, a replica
that ends before the other, a replica that processes a prompt in chunks while the other decodes.
Oracle: one rank on the CPU, and the same mesh with enforce_eager=True. Bound: equality.
metrics()["graph_replays"] is the sum of the steps that the replicas have replayed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
from device_traffic import device_step_bytes
from marks import full
from test_cuda_engine import MOE, told
from test_cuda_graphs import PARAMS, PROMPTS
from test_external_scheduler import asked
from test_mesh_processes import results
from test_nccl_engine import Make, Run, make, ranks, shares, simt, where  # noqa: F401  (fixtures)

import rollmesh as rm

TWO, FOUR = rm.Mesh(dp=2, ep=2), rm.Mesh(dp=2, tp=2, ep=4)
WIDE = {"max_num_seqs": 7, "kv_cache_gib": 0.004}
# Requests of one replica beside the other's one long sequence: requests go to the replica with the
# least requested work.
LONG = rm.SamplingParams(max_tokens=40, seed=1, ignore_eos=True)


def short(n: int, tokens: int) -> list[rm.SamplingParams]:
    return [
        rm.SamplingParams(max_tokens=tokens, seed=10 + i, temperature=i % 2, ignore_eos=True)
        for i in range(n)
    ]


def rollouts(generator: rm.Generator, prompts: Any = PROMPTS, params: Any = PARAMS) -> Any:
    """Returns all fields except the number of cached prompt tokens."""
    return [
        output[:1] + output[2:]
        for output in told(generator.generate(prompts, params, use_tqdm=False))
    ]


def counts(generator: rm.Generator) -> tuple[int, int]:
    stats = generator.metrics()
    return stats["steps"], stats["graph_replays"]


@pytest.mark.full
@pytest.mark.parametrize(
    "mesh, changes",
    [
        (TWO, {"ep_backend": "alltoall"}),
        full(TWO, {"ep_backend": "allgather_reducescatter", "dtype": "float32"}),
        full(FOUR, {"ep_backend": "alltoall", "sequence_parallel": True}),
        full(FOUR, {"ep_backend": "allgather_reducescatter"}),
        full(rm.Mesh(dp=4, ep=4), {"device": "cuda:0"}),
    ],
    ids=str,
)
def test_unequal_batches_are_replayed_together(
    make: Make, mesh: rm.Mesh, changes: dict[str, Any]
) -> None:
    """Batches of all sizes, under three versions, with a sleep between two of them."""
    dtype = changes.get("dtype", "bfloat16")
    eager = {**changes, "enforce_eager": True}
    generators = [
        make(MOE, dtype=dtype, **WIDE),
        make(MOE, mesh, **WIDE, **changes),
        make(MOE, mesh, **WIDE, **eager),
    ]
    found: list[Any] = [[] for _ in generators]
    for generator, seen in zip(generators, found, strict=True):
        for version in range(3):
            generator.sync_weights(helpers.numpy_state_dict(MOE, seed=version), cast=True)
            seen += [
                rollouts(generator),
                rollouts(generator, [[3] * 70, *PROMPTS[:3]], short(4, 9)),
            ]
            if version == 1:
                generator.sleep(["kv"])
                generator.wake(["kv"])
    assert found[0] == found[1] == found[2]
    steps, replays = counts(generators[1])
    assert replays % mesh.dp == 0
    assert replays > mesh.dp * steps // 2
    assert [counts(generator)[1] for generator in (generators[0], generators[2])] == [0, 0]


@pytest.mark.parametrize("mesh", [TWO, full(FOUR)], ids=str)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_all_replicas_have_the_size_of_the_fullest(make: Make, mesh: rm.Mesh, n: int) -> None:
    """One replica decodes 40 tokens of one sequence, the other 8 of n − 1, or none: the first of
    all 40 steps has the prompts, and the first step of each size is enqueued."""
    params = [LONG, *short(n - 1, 8)]
    cpu, gpu = make(MOE, **WIDE), make(MOE, mesh, **WIDE)
    found = []
    for generator in (cpu, gpu):
        generator.sync_weights(helpers.numpy_state_dict(MOE, seed=1), cast=True)
        found.append(rollouts(generator, [[i + 1, 2, 3] for i in range(n)], params))
    assert found[0] == found[1]
    sizes = {1: 1, 2: 1, 5: 2}[n]
    assert counts(gpu) == (40, mesh.dp * (39 - sizes))


@pytest.mark.parametrize("mesh", [(1, 2, 2), (2, 2, 4)], ids=str)
def test_every_rank_replays(ranks: Run, mesh: tuple[int, int, int]) -> None:
    """Each process counts its replays. One request has twelve tokens: after the prompt's step one
    step is enqueued and the others are replayed, on the idle replica too. Of three requests two are
    in one replica, which is a new size."""
    (one, _), (three, _) = results(
        ranks("replayed", (1, 1, 1), model="moe", transport="none", options={"device": "cpu"})
    )[0]
    for got in results(ranks("replayed", mesh, model="moe")):
        assert got == [[one, 10], [three, 20]]


def test_a_replica_that_has_slept_alone(ranks: Run) -> None:
    """The replica has dropped its recordings, so the others record again together with it."""
    (one, _), _ = results(
        ranks("replayed", (1, 1, 1), model="moe", transport="none", options={"device": "cpu"})
    )[0]
    found = results(ranks("replayed", (1, 2, 2), model="moe", prompts=[[[3, 1]]] * 3, sleepers=[0]))
    assert found[0] == found[1] == [[one, 10], [one, 20], [one, 30]]


def test_a_step_that_one_replica_enqueues_all_enqueue(make: Make) -> None:
    """While one replica processes a prompt in eight chunks, or records top logprobs, the other's
    decode is not replayed. A prompt of one token is processed in a step like the following ones."""
    chunks = {**WIDE, "max_num_batched_tokens": 7, "enable_prefix_caching": False}
    cpu, gpu = make(MOE, **chunks), make(MOE, TWO, **chunks)
    top = rm.SamplingParams(max_tokens=9, seed=4, logprobs=2, ignore_eos=True)
    found = []
    for generator in (cpu, gpu):
        generator.sync_weights(helpers.numpy_state_dict(MOE, seed=1), cast=True)
        found.append([rollouts(generator, [[1], [2]], short(2, 9))])
        before = counts(generator)
        found[-1].append(rollouts(generator, [[1], [5] * 56], [short(1, 9)[0], short(1, 1)[0]]))
        found[-1].append(rollouts(generator, [[1], [2]], [short(1, 9)[0], top]))
    assert found[0] == found[1]
    assert before == (9, 2 * 8)
    assert counts(gpu) == (9 + 9 + 9, 2 * (8 + 1))


def test_ranks_of_tokens_that_one_replica_wants(make: Make) -> None:
    """All replicas then use the recording with ranks, and record it at the same step: eight steps
    with ranks and eight without."""
    cpu, gpu = make(MOE, **WIDE), make(MOE, TWO, **WIDE)
    found = []
    for generator in (cpu, gpu):
        generator.sync_weights(helpers.numpy_state_dict(MOE, seed=1), cast=True)
        engine, told = generator._engine._engine, []
        asks = [
            asked(max_tokens=9 + 8 * i, seed=i, ignore_eos=True, ranks=i == 0) for i in range(2)
        ]
        numbers = [
            engine.add(np.array([i + 1, 2], np.int32), np.zeros(0, np.int32), ask, None)
            for i, ask in enumerate(asks)
        ]
        while engine.unfinished():
            engine.step()
        for sample in (engine.sample(number, 0) for number in numbers):
            told.append(
                [
                    None if sample[name] is None else sample[name].tobytes()
                    for name in ("token_ids", "logprobs", "ranks")
                ]
            )
        found.append(told)
    assert found[0] == found[1]
    assert [of_tokens is None for _, _, of_tokens in found[1]] == [False, True]
    assert counts(gpu) == (17, 2 * (7 + 7))


def test_where_one_replica_has_no_memory_for_a_graph_none_replays(
    make: Make,
    simt: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is memory for one graph, and two ranks need one."""
    monkeypatch.setenv("ROLLMESH_SIMT_GRAPHS", "1")
    cpu, gpu = make(MOE, **WIDE), make(MOE, TWO, **WIDE)
    found = []
    for generator in (cpu, gpu):
        generator.sync_weights(helpers.numpy_state_dict(MOE, seed=1), cast=True)
        found.append([rollouts(generator), rollouts(generator)])
    assert found[0] == found[1]
    assert counts(gpu)[1] == 0


def test_where_one_replicas_recording_is_spoilt_all_record_again(
    make: Make,
    simt: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread's wait for the second rank's device invalidates the recording."""
    cpu, whole = make(MOE, **WIDE), make(MOE, TWO, **WIDE)
    monkeypatch.setenv("ROLLMESH_SIMT_SPOIL", "9,1")
    spoilt = make(MOE, TWO, **WIDE)
    found = []
    for generator in (cpu, whole, spoilt):
        generator.sync_weights(helpers.numpy_state_dict(MOE, seed=1), cast=True)
        found.append([rollouts(generator), rollouts(generator)])
    assert found == [found[0]] * 3
    (steps, replays), (same_steps, fewer) = counts(whole), counts(spoilt)
    assert (same_steps, fewer) == (steps, replays - 2)


@pytest.mark.parametrize(
    "how",
    [{"inflight": "restart"}, {"inflight": "keep"}, {"inflight": "keep", "keep_kv": True}],
    ids=str,
)
def test_updates_in_mid_generation(make: Make, how: dict[str, Any]) -> None:
    """Compared with the same mesh on the CPU, whose replicas have reached the same step when the
    weights come."""
    found = []
    for changes in ({"device": "cpu", "comm": None}, {}):
        generator = make(MOE, TWO, dtype="float32", **WIDE, **changes)
        generator.sync_weights(helpers.numpy_state_dict(MOE, seed=1))
        ids, done = generator.submit(PROMPTS, PARAMS), []
        for step in range(8):
            done += generator.poll()
            if step == 3:
                generator.sync_weights(helpers.numpy_state_dict(MOE, seed=2), **how)
        done += generator.poll(min_outputs=len(ids) - len(done))
        found.append(told(sorted(done, key=lambda output: output.request_id)))
    assert found[0] == found[1]
    assert generator.metrics()["graph_replays"] > 2 * 10


@pytest.mark.parametrize(
    "mesh, changes",
    [
        (rm.Mesh(tp=2), {}),
        (rm.Mesh(tp=2, ep=2), {"ep_backend": "local_allreduce"}),
        (rm.Mesh(tp=2, ep=2), {"ep_backend": "alltoall", "sequence_parallel": True}),
        (TWO, {"ep_backend": "alltoall"}),
        (FOUR, {"ep_backend": "allgather_reducescatter"}),
    ],
    ids=str,
)
def test_a_replay_counts_what_it_moves(make: Make, mesh: rm.Mesh, changes: dict[str, Any]) -> None:
    """Each replica steps eight times with four rows: the first step is enqueued and the second
    recorded. Every step transfers the bytes of device_traffic. Each rank also sends
    one byte to its group to report that it has memory for a graph."""
    gpu = make(MOE, mesh, **WIDE, **changes)
    gpu.sync_weights(helpers.numpy_state_dict(MOE, seed=1), cast=True)
    moved = []
    for round in range(2):
        before = gpu.metrics()
        rollouts(gpu, [[i + 1 + 20 * round] for i in range(4 * mesh.dp)], short(4 * mesh.dp, 4))
        after = gpu.metrics()
        assert after["steps"] - before["steps"] == 4
        moved.append(
            [after[name] - before[name] for name in ("comm_bytes", "comm_calls", "graph_replays")]
        )
    assert [replays for _, _, replays in moved] == [3 * mesh.dp, 4 * mesh.dp]
    groups, size = (1, mesh.dp * mesh.tp) if mesh.ep > mesh.tp else (mesh.dp, mesh.tp)
    assert moved[0][:2] == [moved[1][0] + groups * size * (size - 1), moved[1][1] + 1]
    want = device_step_bytes(rm.ModelSpec.from_hf(MOE), mesh, 4, captured=True, **changes)
    assert moved[1][0] == 4 * want


@pytest.mark.parametrize(
    "mesh, rows, changes",
    [
        (TWO, 515, {"ep_backend": "alltoall"}),
        full(FOUR, 1027, {"ep_backend": "allgather_reducescatter", "sequence_parallel": True}),
        full(rm.Mesh(tp=2, ep=2), 1027, {"ep_backend": "local_allreduce"}),
    ],
    ids=str,
)
def test_long_steps_go_to_experts_run_after_run(
    make: Make, mesh: rm.Mesh, rows: int, changes: dict[str, Any]
) -> None:
    """For each rank, a prompt has three rows more than a run of 512, and its home has the other
    replica's few rows beside it or none."""
    config = helpers.tiny_config(moe=True, num_hidden_layers=1)
    how = {
        "max_model_len": 1100,
        "max_num_batched_tokens": 1100,
        "max_num_seqs": 2,
        "enable_prefix_caching": False,
    }
    prompts = [[(7 * i) % 97 for i in range(rows)], [5, 6]]
    found = []
    for generator in (make(config, **how), make(config, mesh, **how, **changes)):
        generator.sync_weights(helpers.numpy_state_dict(config, seed=1), cast=True)
        params = rm.SamplingParams(max_tokens=2, seed=1, logprobs=2)
        found.append(
            [rollouts(generator, prompts, params), rollouts(generator, prompts[:1], params)]
        )
    assert found[0] == found[1]


@pytest.mark.parametrize("backend", ["alltoall", "allgather_reducescatter"])
def test_by_nccl_no_step_moves_what_is_chosen(make: Make, backend: str) -> None:
    """The prompts have more rows than sequences fit at once. Rows are not counted, so the number of
    bytes and calls is the same for all contents."""
    gpu = make(MOE, TWO, max_num_seqs=2, ep_backend=backend, enable_prefix_caching=False)
    gpu.sync_weights(helpers.numpy_state_dict(MOE, seed=1), cast=True)
    moved = set()
    for first in range(6):
        before = gpu.metrics()
        rollouts(gpu, [[(first + 7 * i) % 97 for i in range(9)]], rm.SamplingParams(max_tokens=1))
        after = gpu.metrics()
        moved.add(
            tuple(after[name] - before[name] for name in ("steps", "comm_bytes", "comm_calls"))
        )
    assert len(moved) == 1
