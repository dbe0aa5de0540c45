"""Generator(kv_cache_gib=None) on meshes: the number of pages of each rank if ranks share a card,
if one card has less free memory than another, and if weights do not fit; ranks as threads and as
processes.

Oracle: for each card the free memory without the KV caches (read from the device), minus the sizes
that `rollmesh plan` computes for its ranks' weights and for the buffers of a sync
(parallel_copy.c); for the mesh the minimum. Bound: the rounding of each parameter up to 64 bytes,
which plan omits; otherwise equality, in pages. Results are bit-identical to a mesh with the given
number of pages, and to one rank."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import pytest
from marks import full
from test_cuda_engine import DENSE, MOE, everything
from test_mesh_processes import Server, results, servers  # noqa: F401 (a fixture)

import rollmesh as rm
from rollmesh import _core
from rollmesh.model.sizes import matrices, rank_bytes
from rollmesh.runtime.devices import LIBRARY_SWITCH

MIB = 1 << 20
MEMORY = 24 * MIB  # of each card
SOON = 15.0  # seconds within which a failure of one rank must be reported
# With tp=3 all ranks hold different sizes.
UNEVEN = helpers.tiny_config(num_attention_heads=6, num_key_value_heads=2, vocab_size=300)
Make = Callable[..., rm.Generator]
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def library(simt_library: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The simulated device, even if there is a GPU, because a test sets its memory."""
    monkeypatch.setenv(LIBRARY_SWITCH, str(simt_library))
    monkeypatch.setenv("ROLLMESH_SIMT_MEMORY", str(MEMORY))
    return simt_library


def free(library: Path, card: int) -> int:
    return _core.cuda_available(str(library), card)


def machine_has() -> int:
    return (
        int(
            re.search(
                r"MemAvailable: "
                r"*(\d+) kB",
                Path("/proc/meminfo").read_text(),
            )[1]
        )
        * 1024
    )  # type: ignore[index]


def with_staging(weights: int) -> int:
    """Two copies of a rank's weights, and the buffers of a sync."""
    return 2 * weights + 2 * min(max(4 * weights, 64 << 10), 32 * MIB) + 4096 * 24


def taken(config: helpers.Config, mesh: rm.Mesh, rounding: int = 0) -> list[int]:
    """Returns the weight bytes of each rank in bfloat16, plus `rounding` bytes for each
    parameter."""
    spec = rm.ModelSpec.from_hf(config)
    more = rounding * sum(m.count for m in matrices(spec))
    ranks = rank_bytes(spec, "bfloat16", mesh.tp, mesh.dp, mesh.ep)
    return [with_staging(sum(rank.values()) + more) for rank in ranks]


def pages_that_fit(
    share: float, free_of: dict[int, int], card_of: list[int], sizes: list[int], page: int
) -> int:
    """The largest number of pages that fits on every card for all its ranks."""
    rooms = []
    for card, bytes_free in free_of.items():
        there = [size for size, its in zip(sizes, card_of, strict=True) if its == card]
        rooms.append(int(share * bytes_free - sum(there)) // (page * len(there)))
    return min(rooms)


# ---------------------------------------------------------------------------------------- threads
@pytest.mark.parametrize("share", [full(0.9), 1.0])
@pytest.mark.parametrize(
    "config, mesh, device, cards, fuller",
    [
        full(DENSE, rm.Mesh(tp=2), "cuda", 8, 1),
        (DENSE, rm.Mesh(dp=2), "cuda", 8, 0),
        (DENSE, rm.Mesh(tp=2), "cuda:3", 8, None),
        full(UNEVEN, rm.Mesh(tp=3), "cuda:0", 8, None),
        (UNEVEN, rm.Mesh(tp=3), "cuda", 2, 1),
        full(MOE, rm.Mesh(tp=2, dp=2, ep=4), "cuda", 2, 1),
        (MOE, rm.Mesh(dp=3), "cuda", 2, None),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)
def test_all_ranks_get_the_pages_that_fit_where_there_is_least_room(
    make: Make, library: Path, monkeypatch: pytest.MonkeyPatch, config: helpers.Config,
    mesh: rm.Mesh, device: str, cards: int,
    fuller: int | None, share: float,
) -> None:  # fmt: skip
    """With memory_fraction=1 all memory is used, and two versions of the weights still fit: the
    estimate is complete."""
    monkeypatch.setenv("ROLLMESH_SIMT_DEVICES", str(cards))
    if fuller is not None:
        make(DENSE, f"cuda:{fuller}", kv_cache_gib=0.004)  # a stranger
    card_of = [int(device.partition(":")[2] or rank % cards) for rank in range(mesh.world)]
    gpu = make(config, device, mesh=mesh, kv_cache_gib=None, memory_fraction=share)
    stats = gpu.metrics()
    pages = stats["kv_pages"] // mesh.dp
    page = stats["kv_bytes"] // (pages * mesh.world)
    assert stats["kv_bytes"] == pages * page * mesh.world
    before = {
        card: free(library, card) + card_of.count(card) * pages * page for card in set(card_of)
    }
    most, least = (
        pages_that_fit(share, before, card_of, taken(config, mesh, rounding), page)
        for rounding in (0, 64)
    )
    assert 10 < least <= pages <= most < 1.05 * least
    states = [helpers.numpy_state_dict(config, seed=seed) for seed in (2, 1)]
    for state in states:
        gpu.sync_weights(state, cast=True)
    assert all(free(library, card) <= before[card] for card in before)
    found = everything(gpu)
    gpu.close()
    said = make(config, device, mesh=mesh, kv_cache_gib=(pages + 0.5) * page / 2**30)
    for state in states:
        said.sync_weights(state, cast=True)
    assert said.metrics()["kv_pages"] == stats["kv_pages"]
    assert everything(said) == found
    one = make(config, "cpu")
    one.sync_weights(states[1], cast=True)
    assert everything(one)[2:] == found[2:]


@pytest.mark.parametrize(
    "mesh, device, words",
    [
        (
            rm.Mesh(dp=2),
            "cuda",
            r"rank 1: memory_fraction=0\.9 of the .* MiB that cuda:1 has free is .* expected more "
            r"than two .* bytes$",
        ),
        (
            rm.Mesh(dp=4),
            "cuda:0",
            r"rank \d: memory_fraction=.* that cuda:0 has free is .* expected more .* for the 4 "
            r"ranks .*$",
        ),
    ],
    ids=str,
)
def test_where_the_weights_of_a_rank_do_not_fit(
    make: Make,
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
    mesh: rm.Mesh,
    device: str,
    words: str,
) -> None:
    """Ranks that were already made are freed too, and another generator on the card keeps serving.
    Each rank alone would fit."""
    big = helpers.tiny_config(vocab_size=2048, hidden_size=128)
    stranger = make(DENSE, "cuda:1", kv_cache_gib=0.004)
    stranger.sync_weights(helpers.numpy_state_dict(DENSE, seed=1), cast=True)
    served, blocks = everything(stranger), _core.memory_blocks()
    if device == "cuda":
        monkeypatch.setenv(
            "ROLLMESH_SIMT_MEMORY", str(MEMORY - free(library, 1) + taken(big, rm.Mesh())[0])
        )
    before = [free(library, card) for card in (0, 1)]
    with pytest.raises(rm.CapacityError, match=words):
        make(big, device, mesh=mesh, kv_cache_gib=None)
    assert [free(library, card) for card in (0, 1)] == before
    assert _core.memory_blocks() == blocks
    stranger.reset_prefix_cache()
    assert everything(stranger) == served
    make(big, "cuda:0", kv_cache_gib=None)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_rank_that_cannot_be_made_ends_the_making_of_all(
    make: Make, library: Path, device: str
) -> None:
    """Each allocation of three ranks fails once, at any state of the other ranks: no rank waits,
    and all memory is freed."""
    blocks, before = _core.memory_blocks(), free(library, 0)
    for site in range(1, 1000):
        _core.memory_fail_at(site, False)
        try:
            gpu = make(
                DENSE,
                device,
                mesh=rm.Mesh(dp=3),
                kv_cache_gib=None,
                memory_fraction=0.001 if device == "cpu" else 0.9,
            )
        except (MemoryError, rm.CapacityError):
            assert (_core.memory_blocks(), free(library, 0)) == (blocks, before), site
        else:
            break
        finally:
            _core.memory_fail_at(0)
    assert site > 3 * 20
    assert gpu.metrics()["kv_pages"] > 3


def test_ranks_on_the_cpu_share_the_machines_memory(make: Make) -> None:
    """Free memory changes during the test: half as many pages, within a fifth."""
    share = 0.001
    one = make(DENSE, "cpu", kv_cache_gib=None, memory_fraction=share)
    alone = one.metrics()["kv_pages"]
    one.close()
    two = make(DENSE, "cpu", mesh=rm.Mesh(dp=2), kv_cache_gib=None, memory_fraction=share)
    assert 0.8 * alone < two.metrics()["kv_pages"] < 1.2 * alone
    two.sync_weights(helpers.numpy_state_dict(DENSE, seed=1), cast=True)
    one = make(DENSE, "cpu")
    one.sync_weights(helpers.numpy_state_dict(DENSE, seed=1), cast=True)
    assert everything(two)[2:] == everything(one)[2:]


def test_what_the_cpu_has_only_promised_counts(make: Make) -> None:
    """Counts a workspace that has not been written yet, and the records of pages, 8 bytes a
    position here: a tenth of a page of one small layer. Free memory changes during the test, so it
    is measured in between and may vary by a thirtieth."""
    small = helpers.tiny_config(
        num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8
    )
    rows = {"max_num_batched_tokens": 1 << 17}
    wide = make(small, "cpu", **rows)
    workspace = wide.metrics()["workspace_bytes"]
    wide.close()
    assert workspace > 100 * MIB
    with pytest.raises(
        rm.CapacityError,
        match=r"that cpu has free is .* two copies of the weights and their buffers",
    ):
        make(
            small, "cpu", kv_cache_gib=None, memory_fraction=0.5 * workspace / machine_has(), **rows
        )
    before = machine_has()
    cpu = make(small, "cpu", kv_cache_gib=None, memory_fraction=0.01)
    stats, share = cpu.metrics(), 0.01 * before - taken(small, rm.Mesh())[0]
    page = stats["kv_bytes"] // stats["kv_pages"]
    assert page == 16 * (32 + 16) * 2
    assert stats["kv_pages"] * (page + 16 * 8) < share * 30 / 29


# -------------------------------------------------------------------------------------- processes
@pytest.fixture
def ranks(servers: dict[str, Server], library: Path) -> Run:
    """Processes on simulated devices, each with separate memory for every card: only the card's
    name shows that ranks share it."""

    def run(
        do: str, mesh: tuple[int, int, int], host: str = "shm", **job: Any
    ) -> list[dict[str, Any]]:
        environment = {
            LIBRARY_SWITCH: str(library),
            "ROLLMESH_SIMT_MEMORY": str(MEMORY),
            **job.pop("environment", {}),
        }
        options = {"device": "cuda", "kv_cache_gib": None, **job.pop("options", {})}
        job = {
            "of": "kv_ranks",
            "each": [{}] * (mesh[0] * mesh[1]),
            "limit": 40.0,
            "answers": host == "shm",
            **job,
        }
        return servers[host](do, mesh, environment=environment, options=options, **job)

    return run


@pytest.mark.parametrize("host", ["shm", full("torch")])
@pytest.mark.parametrize(
    "mesh, device, less",
    [
        full((2, 1, 1), "cuda", 0),
        ((2, 1, 1), "cuda", 9 * MIB),
        full((2, 1, 1), "cuda:1", 0),
        full((1, 2, 2), "cuda:0", 4 * MIB),
    ],
    ids=str,
)
def test_processes_agree(
    ranks: Run, host: str, mesh: tuple[int, int, int], device: str, less: int
) -> None:
    """less: the number of bytes that rank 1 sees less than rank 0."""
    options, victims = {"device": device}, {"ROLLMESH_SIMT_MEMORY": str(MEMORY - less)}
    got = results(
        ranks("sized", mesh, host, model="moe", options=options, victim=1, victims=victims)
    )
    assert len({rank["pages"] for rank in got}) == 1
    assert [got[0]["bits"]] * 2 == [rank["bits"] for rank in got]
    pages, page = got[0]["pages"], got[0]["kv"] // got[0]["pages"]
    sizes = [with_staging(rank["weights"]) for rank in got]
    if device == "cuda":
        want = min(
            (int(0.9 * rank["free"]) - size) // page for rank, size in zip(got, sizes, strict=True)
        )
    else:
        want = (int(0.9 * min(rank["free"] for rank in got)) - sum(sizes)) // (2 * page)
    assert pages == want > 10
    said = {"device": device, "kv_cache_gib": (pages + 0.5) * page / 2**30}
    assert [
        rank["bits"] for rank in results(ranks("sized", mesh, host, model="moe", options=said))
    ] == [got[0]["bits"]] * 2


def test_processes_on_the_cpu_share_the_machines_memory(ranks: Run) -> None:
    how = {"model": "dense", "options": {"device": "cpu", "memory_fraction": 0.001}}
    alone = results(ranks("sized", (1, 1, 1), transport="none", **how))[0]
    got = results(ranks("sized", (1, 2, 1), **how))
    assert got[0]["pages"] == got[1]["pages"]
    assert 0.8 * alone["pages"] < 2 * got[0]["pages"] < 1.2 * alone["pages"]
    assert [rank["bits"] for rank in got] == [alone["bits"]] * 2


@pytest.mark.parametrize("host", ["shm", full("torch")])
def test_weights_that_do_not_fit_one_process_are_an_error_on_all(ranks: Run, host: str) -> None:
    """All ranks raise the same words, although each releases its groups as soon as it fails."""
    for rank in ranks(
        "sized",
        (1, 3, 1),
        host,
        model="moe",
        victim=1,
        victims={"ROLLMESH_SIMT_MEMORY": str(4 * MIB)},
    ):
        assert rank["error"][0] == "CapacityError"
        figures = (
            r"rank 1: memory_fraction=0\.9 of the [1-9]\S+ [KM]iB that cuda:1 has free is "
            r"[1-9]\S+ [KM]iB: expected more than"
        )
        assert re.match(figures, rank["error"][1])


@pytest.mark.parametrize("host", ["shm", full("torch")])
def test_a_size_that_one_rank_says_and_another_does_not(ranks: Run, host: str) -> None:
    start = time.monotonic()
    for rank in ranks("sized", (1, 2, 1), host, each=[{}, {"kv_cache_gib": 0.01}]):
        assert rank["error"] == [
            "MeshMismatchError", "the ranks of this mesh were not made alike: rank 1 has "
                                 "kv_cache_gib = a number, rank 0 None"
        ]  # fmt: skip
    assert time.monotonic() - start < SOON


@pytest.mark.parametrize("host", ["shm", full("torch")])
@pytest.mark.parametrize("how", ["fails", "ends"])
def test_a_rank_that_does_not_come_is_waited_for_by_nobody(ranks: Run, host: str, how: str) -> None:
    got = ranks("unmade", (2, 2, 1), host, model="dense", victim=2, how=how)
    for rank in (got[0], got[1], got[3]):
        assert rank["error"] is None
        kind, text, seconds = rank["result"]
        assert kind == "RankLostError"
        assert "rank 2" in text
        assert ("could not be made: MemoryError" in text) == (how == "fails")
        assert seconds < SOON
    assert got[2]["result"][:1] == ["MemoryError"] if how == "fails" else got[2]["status"] == -9
