"""sleep(keep_weights=True): the host keeps the weights, the device's memory is freed, and after
wake() the same version serves from a new block.

Runs on the fibres of tests/gpu/simt, or on a GPU if there is one. Oracle: the answers of the same
engine before it slept. Bound: equality. A refusal changes nothing: awake parts serve, and sleeping
parts can wake later. Either all ranks sleep or wake, or none."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import helpers
import pytest
from marks import full
from test_cuda_engine import DENSE, MOE, everything, free, library, simt, slack, told, two_gpus  # noqa: F401  (fixtures)
from test_mesh_processes import Server, results

import rollmesh as rm
from rollmesh import _core

Make = Callable[..., rm.Generator]
TWO = {"mesh": rm.Mesh(tp=2, ep=2)}  # ranks that are threads, by way of the host


def of_version(generator: rm.Generator) -> Any:
    """Returns the answers, and the number and digest of their version. Hits on cached prefixes
    differ, so the cache is empty at the start."""
    generator.reset_prefix_cache()
    return everything(generator), generator.version, generator._engine.sync_state()[1]


def served(make: Make, **changes: Any) -> tuple[rm.Generator, Any]:
    """Returns a generator with its second version, so that the staging block was written before."""
    generator = make(MOE, **changes)
    for seed in (1, 2):
        generator.sync_weights(helpers.numpy_state_dict(MOE, seed=seed), cast=True)
    return generator, of_version(generator)


NO_ROOM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
FILE *fopen(const char *path, const char *mode) {
  FILE *(*its)(const char *, const char *) = (FILE * (*)(const char *,
      const char *)) dlsym(RTLD_NEXT, "fopen");
  const char *other = getenv("OTHER_MEMINFO");
  return its(other && !strcmp(path, "/proc/meminfo") ? other : path, mode);
}
"""
ASLEEP = """
import os, sys
import helpers, rollmesh as rm
spec = rm.ModelSpec.from_hf(helpers.tiny_config(moe=True))
state = helpers.numpy_state_dict(helpers.tiny_config(moe=True), seed=1)
for mesh in (rm.Mesh(), rm.Mesh(tp=2, ep=2)):
    with rm.Generator(spec, device="cuda:0", mesh=mesh, max_model_len=64,
        kv_cache_gib=0.002) as generator:
        generator.sync_weights(state, cast=True)
        kib = generator.metrics()["weight_bytes"] // 1024 + 1 if mesh.world == 1 else kib
        open(sys.argv[1], "w").write(f"MemAvailable: {kib} kB\\n")
        os.environ["OTHER_MEMINFO"] = sys.argv[1]
        try:
            generator.sleep(keep_weights=True)
            print("asleep")
        except rm.CapacityError as error:
            print(error, generator.version)
        del os.environ["OTHER_MEMINFO"]
"""


APART = """
import os, sys
import helpers, rollmesh as rm
rank, meminfo, name, needs = int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
config = helpers.tiny_config(moe=True)
options = {"mesh": rm.Mesh(tp=2, ep=2), "comm": rm.comm.shm(name, rank, 2, 30.0),
    "max_model_len": 64, "kv_cache_gib": 0.002}
with rm.Generator(rm.ModelSpec.from_hf(config), device="cuda:0", **options) as generator:
    generator.sync_weights(helpers.numpy_state_dict(config, seed=1), cast=True)
    kib = int(needs * generator.metrics()["weight_bytes"]) // 1024 + 1
    open(meminfo, "w").write(f"MemAvailable: {kib} kB\\n")
    os.environ["OTHER_MEMINFO"] = meminfo
    try:
        generator.sleep(keep_weights=True)
        print("asleep")
    except rm.CapacityError as error:
        print(error, generator.metrics()["asleep"], generator.version)
    del os.environ["OTHER_MEMINFO"]
"""


@pytest.mark.parametrize("needs", [1.5, 2.5])
def test_processes_of_a_host_ask_it_together(
    simt_library: Path, tmp_path: Path, needs: float
) -> None:
    """Each process has room for its own part. Both have room only if the host has more than twice
    as much."""
    (tmp_path / "other.c").write_text(NO_ROOM)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", tmp_path / "other.so", tmp_path / "other.c", "-ldl"],
        check=True,
    )
    environment = os.environ | {
        "LD_PRELOAD": str(tmp_path / "other.so"),
        "ROLLMESH_CUDA_LIBRARY": str(simt_library),
    }
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    name = f"asleep-{os.getpid()}-{needs}"
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                APART,
                str(rank),
                str(tmp_path / f"meminfo{rank}"),
                name,
                str(needs),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        said, _ = rank.communicate(timeout=120)
        wanted = (
            r"keep_weights: expected [1-9]\S+ KiB of free host memory for the weights of "
            r"ranks 0, 1, got [1-9]\S+ KiB; .* \[\] 0"
        )
        assert re.fullmatch("asleep" if needs > 2 else wanted, said.strip()), said


def test_ranks_of_a_host_without_room_for_all_of_them_stay_awake(
    simt_library: Path, tmp_path: Path
) -> None:
    """The host has room for one rank's weights. Two ranks together need slightly more, although
    each of them needs less."""
    (tmp_path / "other.c").write_text(NO_ROOM)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", tmp_path / "other.so", tmp_path / "other.c", "-ldl"],
        check=True,
    )
    environment = os.environ | {
        "LD_PRELOAD": str(tmp_path / "other.so"),
        "ROLLMESH_CUDA_LIBRARY": str(simt_library),
    }
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", ASLEEP, str(tmp_path / "meminfo")]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    one, two = done.stdout.splitlines()
    assert one == "asleep"
    assert re.fullmatch(
        r"keep_weights: expected [1-9][\d.]+ KiB of free host memory for the weights of 2 ranks, "
        r"got [1-9][\d.]+ KiB 0",
        two,
    )


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    "changes", [{}, {"dtype": "float32"}, TWO, {"device": "cpu"}, {"device": "cpu", **TWO}], ids=str
)
def test_what_is_kept_serves_again(make: Make, library: Path, changes: dict[str, Any]) -> None:
    """The blocks have the size of several halves of the transfer buffer, the last half
    incomplete."""
    generator, before = served(make, **changes)
    is_cuda = generator.metrics()["device"] != "cpu"
    weights, kv = generator.metrics()["weight_bytes"], generator.metrics()["kv_bytes"]
    for parts in (("weights", "kv"), ("weights",), ("kv", "weights")):
        awake, mapped = (
            [_core.cuda_available(str(library), d) for d in range(2)] if is_cuda else [],
            _core.memory_mapped(),
        )
        generator.sleep(parts, keep_weights=True)
        generator.sleep(parts, keep_weights=True)
        assert generator.metrics()["asleep"] == [
            part for part in ("weights", "kv") if part in parts
        ]
        assert generator.version is None
        if is_cuda:
            given = sum(_core.cuda_available(str(library), d) - was for d, was in enumerate(awake))
            assert given >= weights + ("kv" in parts) * kv - slack(library)
            # The copy, one for each rank, in whole pages.
            assert 0 <= _core.memory_mapped() - mapped - weights < 2 * 4096
        with pytest.raises(rm.StateError, match="asleep"):
            generator.generate([[1]], use_tqdm=False)
        with pytest.raises(rm.StateError, match="weights: expected awake, got asleep"):
            generator.sync_weights(helpers.numpy_state_dict(MOE, seed=3), cast=True)
        generator.wake("kv")  # one by one
        assert generator.version is None
        generator.wake("weights")
        if is_cuda:
            assert _core.memory_mapped() == mapped
        assert of_version(generator) == before
    report = generator.sync_weights(helpers.numpy_state_dict(MOE, seed=1), cast=True)
    assert report.version == before[1] + 1


def test_requests_that_run_go_on(make: Make) -> None:
    params = rm.SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    generator, _ = served(make)
    whole = told(generator.generate([[1, 2], [3]], params, use_tqdm=False))
    generator.submit([[1, 2], [3]], params)
    for _ in range(5):
        generator.poll()
    generator.sleep("weights", keep_weights=True)
    generator.wake("weights")
    again = told(sorted(generator.poll(min_outputs=2), key=lambda output: output.request_id))
    assert [o[0] if not isinstance(o, tuple) else o[5] for o in again] == [
        o[0] if not isinstance(o, tuple) else o[5] for o in whole
    ]


def test_recordings_are_of_the_new_block(make: Make) -> None:
    """Recordings contain addresses of the old block: a size's first step is enqueued, and the next
    steps are replayed again."""
    params = rm.SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    gpu, _ = served(make)
    first = gpu.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0]
    for parts in (("weights",), ("weights", "kv")):
        gpu.sleep(parts, keep_weights=True)
        gpu.wake(parts)
        before = gpu.metrics()["graph_replays"]
        again = gpu.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0]
        assert (again.token_ids.tobytes(), again.logprobs.tobytes()) == (
            first.token_ids.tobytes(),
            first.logprobs.tobytes(),
        )
        assert gpu.metrics()["graph_replays"] == before + 7


@pytest.mark.parametrize("changes", [{}, {"device": "cpu"}], ids=str)
def test_a_later_sleep_drops_what_was_kept(
    make: Make, library: Path, changes: dict[str, Any]
) -> None:
    generator, before = served(make, **changes)
    generator.sleep(keep_weights=True)
    mapped = _core.memory_mapped()
    generator.sleep("kv")
    assert _core.memory_mapped() == mapped
    generator.sleep("weights")
    assert _core.memory_mapped() <= mapped - generator.metrics()["weight_bytes"]
    generator.sleep(keep_weights=True)  # there is nothing left to keep
    generator.wake()
    assert generator.version is None
    with pytest.raises(rm.NotSyncedError):
        generator.generate([[1]], use_tqdm=False)
    generator.sync_weights(helpers.numpy_state_dict(MOE, seed=2), cast=True)
    assert of_version(generator)[0][2:] == before[0][2:]  # but for the version's number


def test_an_open_set_is_dropped(make: Make) -> None:
    """A set in place has written no weights at its beginning: the previous weights serve again."""
    generator, before = served(make)
    for mode in ("staged", "inplace"):
        pushed = generator.begin_sync(mode=mode, cast=True)
        generator.sleep(keep_weights=True)
        with pytest.raises(
            rm.StateError, match="this sync is closed: the weights were put to sleep"
        ):
            pushed.push("model.norm.weight", helpers.numpy_state_dict(MOE)["model.norm.weight"])
        generator.wake()
        assert of_version(generator) == before


@pytest.mark.parametrize("changes", [{}, TWO, {"device": "cpu"}], ids=str)
def test_close_gives_the_copy_back(make: Make, library: Path, changes: dict[str, Any]) -> None:
    gc.collect()
    blocks, before = _core.memory_blocks(), free(library)
    generator, _ = served(make, **changes)
    generator.sleep(keep_weights=True)
    generator.close()
    assert _core.memory_blocks() == blocks
    assert abs(free(library) - before) <= slack(library)


def test_unsynced_weights_are_not_kept(make: Make) -> None:
    generator, mapped = make(), _core.memory_mapped()
    generator.sleep("weights", keep_weights=True)
    assert _core.memory_mapped() == mapped
    generator.wake("weights")
    with pytest.raises(rm.NotSyncedError):
        generator.generate([[1]], use_tqdm=False)


@pytest.mark.parametrize(
    "parts, keep, words",
    [
        ("kv", True, "parts: expected 'weights' among them with keep_weights=True, got 'kv'"),
        ("weights", 1, "keep_weights: expected a bool, got 1"),
    ],
)
def test_what_cannot_be_kept_is_refused(make: Make, parts: str, keep: Any, words: str) -> None:
    generator = make(device="cpu")
    with pytest.raises(rm.ConfigError, match=words):
        generator.sleep(parts, keep_weights=keep)
    assert generator.metrics()["asleep"] == []


# ---------------------------------------------------------------------------------------- no room
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("changes", [full({}), TWO], ids=str)
def test_no_room_in_the_host(make: Make, library: Path, changes: dict[str, Any]) -> None:
    """Any allocation of any rank fails: all ranks stay awake and keep their weights."""
    generator, before = served(make, **changes)
    devices, mapped, blocks = (
        [_core.cuda_available(str(library), d) for d in range(2)],
        _core.memory_mapped(),
        _core.memory_blocks(),
    )
    refused = 0
    for site in range(1, 20):
        _core.memory_fail_at(site, False)
        try:
            generator.sleep(keep_weights=True)
            break
        except MemoryError as error:
            assert "for the weights on the host, got none" in str(error)  # noqa: PT017
        finally:
            _core.memory_fail_at(0)
        refused += 1
        assert generator.metrics()["asleep"] == []
        assert (_core.memory_mapped(), _core.memory_blocks()) == (mapped, blocks)
        assert [_core.cuda_available(str(library), d) for d in range(2)] == devices
        assert of_version(generator) == before
    assert refused == (2 if changes else 1)
    generator.wake()
    assert of_version(generator) == before


@pytest.mark.parametrize("changes", [{}, full(TWO)], ids=str)
@pytest.mark.parametrize("left", ["nothing", "less than the weights", "the weights"])
def test_no_room_on_the_device(
    make: Make,
    library: Path,
    simt: None,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    left: str,
) -> None:
    """Both parts stay asleep, whichever of them had no room; the copy stays, and serves after a
    later call."""
    monkeypatch.setenv("ROLLMESH_SIMT_MEMORY", str(64 << 20))
    generator, before = served(make, **changes)
    generator.sleep(keep_weights=True)
    mapped = _core.memory_mapped()
    weights = generator.metrics()["weight_bytes"]  # of all ranks, and less than the cache of one
    room = {"nothing": 0, "less than the weights": weights // 4, "the weights": weights + 4096}[
        left
    ]
    used = (64 << 20) - min(
        _core.cuda_available(str(library), d) for d in range(2 if changes else 1)
    )
    monkeypatch.setenv("ROLLMESH_SIMT_MEMORY", str(used + room))
    what = "the KV cache" if left == "the weights" else "waking the weights"
    for _ in range(2):
        with pytest.raises(
            rm.CapacityError,
            match=rf"{what} takes \d+\.\d\d [KM]iB and cuda:\d has (\d+\.\d\d [KM]iB|\d+ B) free",
        ):
            generator.wake()
        assert generator.metrics()["asleep"] == ["weights", "kv"]
        assert _core.memory_mapped() == mapped
    assert free(library) >= room
    monkeypatch.setenv("ROLLMESH_SIMT_MEMORY", str(64 << 20))
    generator.wake()
    assert of_version(generator) == before


def test_one_device_of_two_has_no_room(
    make: Make, library: Path, simt: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other device frees the memory that it had allocated."""
    monkeypatch.setenv("ROLLMESH_SIMT_MEMORY", str(32 << 20))
    generator, before = served(make, **TWO)
    generator.sleep(keep_weights=True)
    asleep, left = (_core.cuda_available(str(library), d) for d in range(2))
    small = make(device="cuda:1")
    besides = left - _core.cuda_available(str(library), 1) - small.metrics()["kv_bytes"]
    small.close()
    other = make(device="cuda:1", kv_cache_gib=(left - besides - (64 << 10)) / 2**30)
    with pytest.raises(rm.CapacityError, match=r"takes .* and cuda:1 has"):
        generator.wake()
    assert _core.cuda_available(str(library), 0) == asleep
    other.close()
    generator.wake()
    assert of_version(generator) == before


# -------------------------------------------------------------------------------------- processes
@pytest.fixture(scope="module")
def shm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server("shm", tmp_path_factory.mktemp("rendezvous"))
    yield server
    server.end()


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_without_room_ends_it_on_all(
    shm: Server, library: Path, simt: None, victim: int
) -> None:
    """The victim raises its own error, and the other ranks an error with the victim's number;
    afterwards all of them sleep, wake and give equal answers."""
    environment = {
        name: value for name, value in os.environ.items() if name.startswith("ROLLMESH_")
    }
    job = {
        "of": "mesh_calls",
        "options": {"device": "cuda", "dtype": "float32"},
        "victim": victim,
        "environment": environment,
    }
    for rank, (first, errors, last) in enumerate(results(shm("kept_weights", (2, 1, 1), **job))):
        assert first == last
        calls = [
            ("sleep", "MemoryError", []),
            ("wake", "CapacityError", ["weights", "kv"]),
            ("wake the cache", "CapacityError", ["kv"]),
        ]
        for call, own, parts in calls:
            name, words, asleep = errors[call]
            assert name == (own if rank == victim else "SyncAbortedError")
            assert rank == victim or words.startswith(f"rank {victim}: {own}")
            assert asleep == parts
