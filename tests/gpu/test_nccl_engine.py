"""rm.Generator(device="cuda", comm=rm.comm.nccl(…)): ranks that exchange activations by NCCL. Runs
on the simulated device of tests/gpu/simt and the stand-in for NCCL of tests/support/native/standin,
or on GPUs with the real NCCL if they are available, with several ranks on one GPU if necessary.

Oracle: one rank on the CPU, to which a mesh on devices is bit-identical. Bound: equality. A failure
of one rank raises a typed error on all ranks, in time: a rank must not wait for a queue that
another rank will never reach. Ranks are threads of this process, or processes that
tests/support/mesh_ranks.py forks."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import helpers
import pytest
from marks import full, some
from native_build import standin
from test_cuda_engine import DENSE, MOE, PARAMS, PROMPTS, everything, free, told
from test_cuda_graphs import PARAMS as GRAPH_PARAMS
from test_cuda_graphs import PROMPTS as GRAPH_PROMPTS
from test_mesh_processes import Server, check_lost, results

import rollmesh as rm
from rollmesh import _core
from rollmesh.runtime import nccl
from rollmesh.runtime.devices import LIBRARY_SWITCH, library_path

Make = Callable[..., rm.Generator]
Run = Callable[..., list[dict[str, Any]]]
PROOF = 2  # groups of NCCL, each of which is tested when it is made (csrc/gpu/nccl/nccl.c)
SOON = 20.0  # seconds within which a fault must be reported, far above the usual time


@pytest.fixture(scope="module")
def where(simt_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment for a GPU and the real NCCL, or for the stand-ins of both."""
    real = library_path()
    has_gpu = real.exists() and _core.cuda_count(str(real)) > 0
    if not has_gpu and shutil.which("gcc") is None:
        pytest.skip("needs a GPU or a C compiler")
    if has_gpu:
        found = {"NCCL_LIBRARY": nccl.find().path}
    else:
        found = {
            LIBRARY_SWITCH: str(simt_library),
            "NCCL_LIBRARY": str(standin(tmp_path_factory.mktemp("standin"))),
        }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in found.items():
            patch.setenv(name, value)
        patch.delenv(nccl.SHARES_GPU_VARIABLE, raising=False)
        yield found


@pytest.fixture(autouse=True)
def shares(where: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the environment that a test sets for ranks on one GPU."""
    monkeypatch.setenv(nccl.SHARES_GPU_VARIABLE, "0")
    monkeypatch.delenv(nccl.SHARES_GPU_VARIABLE)


@pytest.fixture
def simt(where: dict[str, str]) -> Path:
    if LIBRARY_SWITCH not in where:
        pytest.skip("a stand-in's settings mean nothing to a GPU")
    return Path(where[LIBRARY_SWITCH])


@pytest.fixture
def make(where: dict[str, str], make: Make) -> Make:
    def one(
        config: helpers.Config = DENSE, mesh: rm.Mesh | None = None, **changes: Any
    ) -> rm.Generator:
        on_gpus = (
            {
                "device": "cuda",
                "mesh": mesh,
                "comm": rm.comm.nccl(rm.comm.threads(), where["NCCL_LIBRARY"]),
            }
            if mesh
            else {}
        )
        return make(config, **{"device": "cpu", **on_gpus, **changes})

    return one


@pytest.fixture(scope="module")
def ranks(where: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs processes on devices, by NCCL over shared memory or over torch."""
    # Seconds; a process on a GPU first makes a context and loads kernels.
    limit = 40.0 if LIBRARY_SWITCH in where else 150.0
    made = {host: Server(host, tmp_path_factory.mktemp("rendezvous")) for host in ("shm", "torch")}

    def run(
        do: str, mesh: tuple[int, int, int], host: str = "shm", **job: Any
    ) -> list[dict[str, Any]]:
        options = {"device": "cuda", **job.pop("options", {})}
        return made[host](
            do,
            mesh,
            **{"transport": f"nccl over {host}", "options": options, "limit": limit, **job},
        )

    yield run
    for server in made.values():
        server.end()


@pytest.fixture(scope="module")
def alone(ranks: Run) -> Callable[..., Any]:
    """Returns the answers of one rank on the CPU."""
    known: dict[str, Any] = {}

    def ask(do: str, model: str) -> Any:
        key = f"{do} {model}"
        if key not in known:
            known[key] = results(
                ranks(do, (1, 1, 1), model=model, transport="none", options={"device": "cpu"})
            )[0]
        return known[key]

    return ask


def seen(generator: rm.Generator) -> Any:
    """Returns the results that must not depend on the mesh: all except the number of cached prompt
    tokens of a replica."""
    generated, _, *scored = everything(generator)
    return [output[:1] + output[2:] for output in generated], scored


# ------------------------------------------------------------------------------------------- bits
WIDE = helpers.tiny_config(num_attention_heads=8, num_key_value_heads=4, vocab_size=600)


@pytest.mark.parametrize(
    "config, mesh, changes",
    [
        full(DENSE, rm.Mesh(tp=2), {}),
        (DENSE, rm.Mesh(tp=2), {"sequence_parallel": True, "device": "cuda:0", "dtype": "float32"}),
        full(WIDE, rm.Mesh(tp=4), {}),
        full(WIDE, rm.Mesh(tp=4), {"dtype": "float32"}),
        (DENSE, rm.Mesh(dp=2), {}),
        full(MOE, rm.Mesh(tp=2), {}),
        (MOE, rm.Mesh(tp=2, ep=2), {"ep_backend": "alltoall"}),
        full(MOE, rm.Mesh(tp=2, ep=2), {"ep_backend": "allgather_reducescatter"}),
        full(MOE, rm.Mesh(tp=2, ep=2), {"ep_backend": "local_allreduce"}),
        (
            MOE,
            rm.Mesh(tp=2, ep=2),
            {"ep_backend": "local_allreduce", "sequence_parallel": True, "dtype": "float32"},
        ),
        full(MOE, rm.Mesh(tp=2, dp=2, ep=4), {"sequence_parallel": True}),
        full(
            MOE,
            rm.Mesh(tp=2, dp=2, ep=4),
            {"ep_backend": "allgather_reducescatter", "dtype": "float32"},
        ),
        (MOE, rm.Mesh(dp=2, ep=2), {"ep_backend": "allgather_reducescatter"}),
    ],
    ids=lambda value: (
        value["model_type"] if isinstance(value, dict) and "model_type" in value else str(value)
    ),
)
def test_a_mesh_gives_one_ranks_bits(
    make: Make, config: helpers.Config, mesh: rm.Mesh, changes: dict[str, Any]
) -> None:
    state = helpers.numpy_state_dict(config, seed=1)
    cpu, gpu = make(config, dtype=changes.get("dtype", "bfloat16")), make(config, mesh, **changes)
    found = []
    for generator in (cpu, gpu):
        generator.sync_weights(state, cast=True)
        found.append(seen(generator))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "config, mesh, changes",
    [
        (DENSE, rm.Mesh(tp=2), {}),
        full(WIDE, rm.Mesh(tp=4), {"sequence_parallel": True}),
        full(DENSE, rm.Mesh(tp=2, dp=2), {}),
        full(MOE, rm.Mesh(tp=2), {"dtype": "float32"}),
        (MOE, rm.Mesh(tp=2, ep=2), {"ep_backend": "alltoall", "sequence_parallel": True}),
        full(MOE, rm.Mesh(tp=2, ep=2), {"ep_backend": "allgather_reducescatter"}),
        full(MOE, rm.Mesh(tp=2, ep=2), {"ep_backend": "local_allreduce"}),
    ],
    ids=str,
)
def test_steps_of_ranks_are_recorded_with_their_exchanges(
    make: Make, config: helpers.Config, mesh: rm.Mesh, changes: dict[str, Any]
) -> None:
    """Batches of every size between 7 and 1, each replayed with different tokens than it was
    recorded with, under two versions."""
    cpu = make(config, dtype=changes.get("dtype", "bfloat16"), max_num_seqs=7, kv_cache_gib=0.004)
    gpu = make(config, mesh, max_num_seqs=7, kv_cache_gib=0.004, **changes)
    found = []
    for generator in (cpu, gpu):
        found.append([])
        for version in range(3):
            generator.sync_weights(helpers.numpy_state_dict(config, seed=version), cast=True)
            outputs = generator.generate(GRAPH_PROMPTS, GRAPH_PARAMS, use_tqdm=False)
            found[-1].append([output[:1] + output[2:] for output in told(outputs)])
    assert found[0] == found[1]
    assert gpu.metrics()["graph_replays"] > 20


@pytest.mark.parametrize("mesh, call", [(rm.Mesh(tp=2), 2), (rm.Mesh(tp=2, ep=2), 3)], ids=str)
def test_nccl_is_what_activations_travel_by(
    make: Make, simt: Path, monkeypatch: pytest.MonkeyPatch, mesh: rm.Mesh, call: int
) -> None:
    """A bit that the stand-in flips in rank 1's data of the first layer changes the results."""
    state, found = helpers.numpy_state_dict(MOE, seed=1), []
    for flip in ("", f"1:{PROOF + call}"):
        monkeypatch.setenv("STANDIN_FLIP", flip)
        generator = make(MOE, mesh, ep_backend="local_allreduce")
        generator.sync_weights(state, cast=True)
        found.append([row.tobytes() for row in generator.logits([[4] * 9])])
    assert found[0] != found[1]


@pytest.mark.parametrize(
    "mesh, groups",
    [(rm.Mesh(tp=2), 1), (rm.Mesh(tp=2, ep=2), 1), (rm.Mesh(tp=2, dp=2, ep=4), 2)],
    ids=str,
)
def test_ranks_compare_their_calls_once_a_step(
    make: Make, where: dict[str, str], mesh: rm.Mesh, groups: int
) -> None:
    """Compared with the same mesh that exchanges through the host and compares in every call: each
    group makes two calls more when it is made, axes with the same ranks share a group, and each
    step of a rank makes one more."""
    state, calls, steps = helpers.numpy_state_dict(MOE, seed=1), [], 0
    for comm in (None, rm.comm.nccl(None, where["NCCL_LIBRARY"])):
        # All steps have few rows.
        generator = make(MOE, mesh, comm=comm, enforce_eager=True, max_num_seqs=32)
        generator.sync_weights(state, cast=True)
        generator.generate(PROMPTS, PARAMS, use_tqdm=False)
        stats = generator.metrics()
        calls.append(stats["comm_calls"])
        steps = stats["steps"]
    assert steps > 5
    assert calls[1] - calls[0] == groups * (2 + steps)


def test_close_gives_everything_back(make: Make, simt: Path) -> None:
    before, mapped = (
        [_core.cuda_available(str(simt), device) for device in range(2)],
        _core.memory_blocks(),
    )
    gpu = make(MOE, rm.Mesh(tp=2, ep=2), ep_backend="local_allreduce")
    gpu.sync_weights(helpers.numpy_state_dict(MOE, seed=1), cast=True)
    gpu.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert free(simt) < before[0]
    gpu.close()
    assert (
        [_core.cuda_available(str(simt), device) for device in range(2)],
        _core.memory_blocks(),
    ) == (before, mapped)
    assert [
        name for name in os.listdir("/dev/shm") if name.startswith(f"standin-nccl-{os.getpid()}-")
    ] == []


def test_which_nccl_is_said(make: Make, where: dict[str, str]) -> None:
    generator = make(DENSE, rm.Mesh(tp=2))
    assert generator.metrics()["nccl"] == str(nccl.find(where["NCCL_LIBRARY"]))
    assert where["NCCL_LIBRARY"] in generator.metrics()["nccl"]
    assert make().metrics()["nccl"] is None


# -------------------------------------------------------------------------------- what is refused
def test_it_is_of_gpus(make: Make) -> None:
    with pytest.raises(
        rm.ConfigError, match=r"device: expected 'cuda' with rm.comm.nccl\(…\), got 'cpu'"
    ):
        make(DENSE, rm.Mesh(tp=2), device="cpu")
    with pytest.raises(rm.ConfigError, match="expected 'cpu', 'cuda' or 'cuda:N'"):
        make(DENSE, rm.Mesh(tp=2), device="cuda:")


REFUSED = [
    (
        {"STANDIN_VERSION": "22907"},
        {"device": "cuda:0"},
        rm.ConfigError,
        "ranks 0 and 1 share a GPU: expected NCCL 2.30.3 .*, got 2.29.7",
    ),
    (
        {"STANDIN_ID": "2"},
        {},
        rm.RankLostError,
        r"ncclGetUniqueId: NCCL says .unhandled system error.: planted: no id",
    ),
    ({"STANDIN_INIT": "1:5"}, {}, rm.ConfigError, "making a group: NCCL says .invalid usage"),
    (
        {"STANDIN_INIT": "1:2"},
        {},
        rm.RankLostError,
        "making a group: NCCL says .unhandled system error",
    ),
    (
        {"ROLLMESH_SIMT_MEMORY": "4096"},
        {},
        rm.CapacityError,
        r"a buffer for exchanges takes \d+\.\d\d [KM]iB and cuda:\d has",
    ),
    (
        {"ROLLMESH_SIMT_MEMORY": "300000"},
        {},
        rm.CapacityError,
        r"takes \d+\.\d\d [KM]iB and cuda:0 has \d+\.\d\d KiB free",
    ),
]


@pytest.mark.parametrize(
    "environment, changes, kind, words",
    REFUSED,
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_group_that_cannot_be_made(
    make: Make,
    simt: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    changes: Any,
    kind: type[Exception],
    words: str,
) -> None:
    with monkeypatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with pytest.raises(kind, match=words):
            make(DENSE, rm.Mesh(tp=2), **changes)
    make(DENSE, rm.Mesh(tp=2)).sync_weights(helpers.numpy_state_dict(DENSE, seed=1), cast=True)


def test_a_thread_that_cannot_be_made(
    make: Make, simt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library has no code for this rank's GPU. The other rank waits where groups of NCCL are
    made, and gets the error there."""
    monkeypatch.setenv("ROLLMESH_SIMT_SM", "90,70")
    told: list[str] = []

    def construct() -> None:
        with pytest.raises(rm.ConfigError) as caught:
            make(DENSE, rm.Mesh(tp=2))
        told.append(str(caught.value))

    maker = threading.Thread(target=construct, daemon=True)
    maker.start()
    maker.join(SOON)
    assert len(told) == 1
    assert "cuda:1 is an sm_70" in told[0]


# ----------------------------------------------------------------- faults: ranks that are threads


# ----------------------------------------------------------------------- ranks that are processes
@pytest.mark.parametrize(
    "host, mesh, model, options",
    [
        ("shm", (2, 1, 1), "dense", {}),
        full("shm", (2, 2, 4), "moe", {"sequence_parallel": True}),
        full("shm", (3, 1, 3), "moe", {"ep_backend": "local_allreduce"}),
        full("torch", (2, 1, 2), "moe", {"ep_backend": "allgather_reducescatter"}),
    ],
)
def test_processes_give_the_bits_of_one_rank(
    ranks: Run,
    alone: Callable[..., Any],
    host: str,
    mesh: tuple[int, int, int],
    model: str,
    options: dict[str, Any],
) -> None:
    expected = [family_aside(answer) for answer in alone("bits", model)]
    for number, got in enumerate(
        results(ranks("bits", mesh, host, model=model, options=options, source=0))
    ):
        assert [family_aside(answer) for answer in got] == expected, f"rank {number}"


def family_aside(answer: dict[str, Any]) -> dict[str, Any]:
    """Removes the family from a contract: it is the device's, although the bits equal the CPU's."""
    return {**answer, "about": answer["about"].replace("family='cuda_fma'", "family='x86'")}


# The victim's place when it exits: anywhere in a step; in a call of NCCL that is never enqueued; in
# a kernel that never ends, of the forward, of one with prompt logprobs after it, or of the last
# call in a step. In the last four the others wait in the kernel.
KILLED = {
    "in a step": {"where": "generate", "calls": 9, "delay": 0.004},
    "between steps": {"where": "generate", "calls": 5},
    "in a call": {
        "where": "generate",
        "calls": 3,
        "delay": 0.5,
        "victims": {"STANDIN_GROUP": "1:60:7"},
    },
    "in a kernel of the forward": {
        "where": "generate",
        "calls": 0,
        "delay": 0.5,
        "victims": {"STANDIN_HANG": "1:8"},
    },
    "in a kernel before prompt logprobs": {
        "where": "sample",
        "calls": 0,
        "delay": 0.5,
        "victims": {"STANDIN_HANG": "1:8"},
    },
    "in a kernel at the end": {
        "where": "generate",
        "calls": 3,
        "delay": 0.5,
        "victims": {"STANDIN_HANG": "1:60"},
    },
}
LONG = {"max_model_len": 4096, "kv_cache_gib": 0.1}


@pytest.mark.full
def test_an_abort_that_lasts_is_waited_for_by_nobody(ranks: Run, simt: Path) -> None:
    """NCCL's own abort waits until all recordings of the communicator are gone, and recordings are
    freed after it: the error must come before."""
    began = time.monotonic()
    job = {
        "victims": {"STANDIN_HANG": "1:60"},
        "environment": {"STANDIN_ABORT": "4.5"},
        "timeout": 2.0,
        "options": LONG,
    }
    got = results(ranks("failing", (2, 1, 2), model="moe", victim=1, **job))
    assert {rank["told"][0] for rank in got} <= {"CollectiveTimeoutError", "RankLostError"}
    assert max(rank["seconds"] for rank in got) < 5.5
    assert time.monotonic() - began > 4.0


@pytest.mark.parametrize("how", some(KILLED, [0, 3]))
@pytest.mark.parametrize("mesh", [(2, 1, 2)], ids=str)
def test_a_rank_that_is_killed_is_named(
    ranks: Run, alone: Callable[..., Any], simt: Path, mesh: tuple[int, int, int], how: str
) -> None:
    options = {**LONG, "ep_backend": "local_allreduce"}
    got = ranks(
        "lost",
        mesh,
        model="moe",
        victim=1,
        signal=int(signal.SIGKILL),
        options=options,
        **KILLED[how],
    )
    assert got[1]["status"] == -signal.SIGKILL
    check_lost(got, 1, within=SOON)


def test_a_rank_that_is_killed_while_another_hands_logits_out(ranks: Run, simt: Path) -> None:
    """A copy to unpinned memory waits inside the driver, where lost ranks cannot be detected, so
    the engine waits for the queue before the copy."""
    job = {"where": "logits", "calls": 0, "delay": 0.5, "victims": {"STANDIN_HANG": "1:13"}}
    got = ranks(
        "lost", (2, 1, 1), model="dense", victim=1, signal=int(signal.SIGKILL), options=LONG, **job
    )
    check_lost(got, 1, within=SOON)


@pytest.mark.parametrize(
    "victims, kinds",
    [
        ({"STANDIN_GROUP": "1:60:3"}, {"RankLostError"}),
        full({"STANDIN_GROUP": "1:60:5"}, {"CollectiveMismatchError", "RankLostError"}),
        full({"STANDIN_ASYNC": "1:60:6"}, {"RankLostError"}),
        full({"STANDIN_GROUP": "1:60:7"}, {"CollectiveTimeoutError", "RankLostError"}),
        full({"STANDIN_HANG": "1:60"}, {"CollectiveTimeoutError", "RankLostError"}),
        ({"ROLLMESH_SIMT_FAULT": "900"}, {"DeviceError", "RankLostError"}),
    ],
    ids=lambda value: "-".join(sorted(value)) if isinstance(value, set) else str(value),
)
def test_a_fault_of_one_process_is_an_error_on_all(
    ranks: Run, alone: Callable[..., Any], simt: Path, victims: dict[str, str], kinds: set[str]
) -> None:
    """The rank with the fault raises its own error; each rank can make another generator."""
    got = results(
        ranks(
            "failing", (2, 1, 2), model="moe", victim=1, victims=victims, timeout=2.0, options=LONG
        )
    )
    assert {rank["told"][0] for rank in got} <= kinds
    own = kinds - {"RankLostError"}
    if "STANDIN_HANG" in victims:  # both wait in one call: either may be the one that gives up
        assert any(rank["told"][0] in own for rank in got)
    elif own:
        assert got[1]["told"][0] in own
    for rank in got:
        assert rank["again"] in kinds
        assert rank["seconds"] < SOON
        assert rank["next"] == alone("bits", "moe")[0]["logits"]


def test_a_device_that_fails_is_heard_of_where_replicas_meet(ranks: Run, simt: Path) -> None:
    """Ranks do not exchange in a step, except through the host: a rank that has lost its device
    gives the mesh up, and the others do not wait for it."""
    job = {
        "victims": {"ROLLMESH_SIMT_FAULT": "900"},
        "transport": "shm",
        "timeout": 60.0,
        "options": LONG,
    }
    got = results(ranks("failing", (1, 2, 1), model="dense", victim=1, **job))
    assert [rank["told"][0] for rank in got] == ["RankLostError", "DeviceError"]
    assert all(rank["seconds"] < SOON for rank in got)


@pytest.mark.full
def test_a_rank_that_stops_is_timed_out(ranks: Run, simt: Path) -> None:
    job = {
        "where": "generate",
        "calls": 3,
        "delay": 0.5,
        "victims": {"STANDIN_HANG": "1:60"},
        "options": LONG,
        "timeout": 2.0,
    }
    got = ranks("lost", (2, 1, 1), model="dense", victim=1, signal=int(signal.SIGSTOP), **job)
    assert got[0]["result"]["told"][0] == "CollectiveTimeoutError"
    assert "was not done within 2 s" in got[0]["result"]["told"][1]
    assert got[1]["result"]["told"][0] in ("CollectiveTimeoutError", "RankLostError")


# ----------------------------------------------------------------------------- making and syncing
def test_a_rank_that_cannot_be_made(ranks: Run, where: dict[str, str]) -> None:
    """The other ranks wait where groups of NCCL are made, or have finished, and get the error
    there."""
    got = ranks("construct", (2, 1, 1), each=[{}, {"kv_cache_gib": 500000.0}], timeout=20.0)
    assert got[1]["error"][0] in ("CapacityError", "MemoryError")
    assert got[0]["error"][0] == "RankLostError"
    assert got[0]["error"][1].startswith(f"rank 1 could not be made: {got[1]['error'][0]}")


@pytest.mark.parametrize(
    "job, words",
    [
        ({"victims": {"STANDIN_VERSION": "23003"}}, "rank 1 has NCCL = 2.30.3, rank 0 2.32.3"),
        ({"without": True}, "rank 1 has NCCL = none, rank 0 2.32.3"),
    ],
    ids=["another NCCL", "none"],
)
def test_ranks_that_have_not_the_same_nccl(
    ranks: Run, simt: Path, job: dict[str, Any], words: str
) -> None:
    for rank in ranks("construct", (2, 1, 1), each=[{}, {}], victim=1, timeout=20.0, **job):
        assert rank["error"][0] == "MeshMismatchError"
        assert words in rank["error"][1]


@pytest.mark.full
def test_caches_that_take_what_is_free_on_one_gpu(
    make: Make, ranks: Run, alone: Callable[..., Any], simt: Path
) -> None:
    """Two ranks there, threads or processes, have less than half the pages of ranks with separate
    GPUs, because the weights are subtracted twice."""
    options = {"kv_cache_gib": None, "memory_fraction": 0.05}
    state = helpers.numpy_state_dict(DENSE, seed=1)
    cpu, *gpus = (
        make(DENSE),
        *(make(DENSE, rm.Mesh(tp=2), device=device, **options) for device in ("cuda", "cuda:2")),
    )
    for generator in (cpu, *gpus):
        generator.sync_weights(state, cast=True)
    assert 2.0 < gpus[0].metrics()["kv_bytes"] / gpus[1].metrics()["kv_bytes"] < 2.4
    assert [seen(gpu) for gpu in gpus] == [seen(cpu)] * 2
    of_ranks = {"of": "kv_ranks", "model": "moe", "each": [{}, {}], "answers": True}
    found = [
        results(ranks("sized", (2, 1, 1), **of_ranks, options={**options, "device": device}))
        for device in ("cuda", "cuda:0")
    ]
    assert [len({rank["pages"] for rank in got}) for got in found] == [1, 1]
    assert 2.0 < found[0][0]["pages"] / found[1][0]["pages"] < 2.4
    got, want = (
        [family_aside(rank["bits"][1]) for its in found for rank in its],
        alone("bits", "moe")[1],
    )
    assert got == [{kind: want[kind] for kind in got[0]}] * 4


def test_ranks_on_one_gpu_want_an_nccl_that_allows_it(ranks: Run, simt: Path) -> None:
    one = {"device": "cuda:0"}
    for rank in ranks(
        "construct",
        (2, 1, 1),
        each=[one, one],
        timeout=20.0,
        environment={"STANDIN_VERSION": "22907"},
    ):
        assert rank["error"][0] == "ConfigError"
        assert (
            "ranks 0 and 1 share a GPU: expected NCCL 2.30.3 or later, got 2.29.7"
            in rank["error"][1]
        )
    for rank in ranks("construct", (2, 1, 1), each=[one, one], timeout=20.0):
        assert rank["error"] is None


def test_ranks_that_step_with_different_batches(ranks: Run) -> None:
    """The prompts have equal lengths, so that all exchanges have equal sizes."""
    for rank in ranks("apart", (2, 1, 1), model="moe", how="unheard", victim=1, timeout=20.0):
        assert rank["error"][0] == "CollectiveMismatchError"
        assert "another batch" in rank["error"][1]


def test_ranks_that_are_asked_for_different_things(ranks: Run) -> None:
    """For the same batch one rank returns logits, and the other does not exchange logits: they
    compare before the first one waits for it."""
    for rank in ranks("apart", (2, 1, 1), model="moe", how="handed out", victim=1, timeout=10.0):
        assert rank["error"][0] == "CollectiveMismatchError", rank["error"]


@pytest.mark.full
def test_close_of_a_process_gives_everything_back(ranks: Run, simt: Path) -> None:
    for first, _, third in results(ranks("closed", (2, 1, 2), model="moe")):
        assert all(after <= before for after, before in zip(third, first, strict=True)), (
            first,
            third,
        )
