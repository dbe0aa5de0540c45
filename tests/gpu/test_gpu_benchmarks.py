"""benchmarks.gpu on the simulated device, and the control flow of benchmarks/card_run.sh, so that
both work when a GPU is available.

Input: tiny models and few steps; parts that pass, fail and hang. Oracle: the rows that the
docstring lists, the bytes of the shape's parameters, and the result that each part must have.
Bound: equality."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import test_cuda
from native_build import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks import gpu as gpu_benchmarks
from benchmarks import shapes
from benchmarks.gpu import GEMM, OP
from benchmarks.gpu_table import tables


def gpu(library: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "ROLLMESH_CUDA_LIBRARY": str(library),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-m", "benchmarks.gpu", *words]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


# --------------------------------------------------------------------------------- benchmarks.gpu
@pytest.mark.full
def test_every_part_runs_on_the_simulated_device(simt_library: Path, tmp_path: Path) -> None:
    done = gpu(
        simt_library, "--smoke", "--families", "cuda_fma", "--out", str(tmp_path / "found.json")
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["machine"]["card"] == "simulated"
    wanted = {"decode": 4, "bits": 4, "prefill": 2, "sync": 4, "start": 2, "ops": 0}
    parts = {part: [row for row in found["rows"] if row["part"] == part] for part in wanted}
    assert {part: len(of_part) for part, of_part in parts.items()} == wanted
    for row in found["rows"]:
        assert row["seconds"] > 0
        assert row["share"] is None or row["share"] == row["rate"] / row["limit"] > 0
    assert all(row["what"].endswith(": 0 differ") for row in parts["bits"])
    for row in parts["decode"] + parts["sync"]:
        shape = shapes.SMOKE_SHAPES[row["what"].split()[0]]
        gigabytes = row["rate"] * row["seconds"]
        if row["part"] == "sync":  # norms and what blocks are rounded up to come on top
            assert shape.parameters * 2e-9 < gigabytes < shape.parameters * 2e-9 + 1e-4
            continue
        n = int(row["what"].partition("sequences=")[2].split()[0])
        kv = n * (16 + 1 + 1.5) * shape.kv_elements
        layers, top_k = sum(shape.spec.is_moe_layer), shape.spec.num_experts_per_tok
        experts = [layers * top_k, layers * min(shape.spec.num_experts, n * top_k)]
        least, most = (
            (shape.decode_elements(touched) + kv) * 2e-9 for touched in (experts[0], experts[-1])
        )
        assert least * (1 - 1e-9) <= gigabytes <= most * (1 + 1e-9)
    assert "ops      not measured" in done.stdout


def test_the_simulated_device_is_not_measured(simt_library: Path) -> None:
    done = gpu(simt_library, "limits")
    assert done.returncode == 1
    assert (
        done.stderr
        == "benchmarks.gpu: the simulated device has no speed; --smoke runs everything on it once\n"
    )


def test_settings_reach_the_generator(simt_library: Path) -> None:
    done = gpu(simt_library, "--smoke", "prefill", "--set", "threads=0")
    assert done.returncode == 1
    assert "ConfigError: threads: expected an integer in [1, 256], got 0" in done.stderr
    for wrong in ("thread=1", "isa='cuda_fma'"):
        done = gpu(simt_library, "--smoke", "prefill", "--set", wrong)
        assert done.returncode == 2
        assert (
            f"--set {wrong.partition('=')[0]}: wanted an option of rm.Generator that no part sets "
            "itself: comm, dtype," in done.stderr
        )


def test_a_line_of_bench_mma_is_read() -> None:
    """The line has the format of bench_mma's printf."""
    what = "8B gate_up rows=4096 n=12288 k=4096 groups=0"
    line = (
        f"{what:58} {1234.5:9.1f} us {98.0:8.0f} GB/s {2.1:5.1f} % of reading {456.7:8.1f} TFLOP/s"
    )
    source = (ROOT / "tests" / "gpu" / "simt" / "bench_mma.cu").read_text()
    assert "%-58s %9.1f us %8.0f GB/s %5.1f %% of reading %8.1f TFLOP/s" in source
    found = OP.match(line)
    assert found
    assert found.groupdict() == {"what": what, "us": "1234.5", "gb": "98", "tflop": "456.7"}
    gemm = GEMM.match(found["what"] + " ")
    assert gemm
    assert gemm.groupdict() == {"name": "gate_up", "m": "4096", "n": "12288", "k": "4096"}
    assert GEMM.match("30B-A3B down rows=8 n=2048 k=768 groups=128 ") is None


# ------------------------------------------------------------------------- benchmarks/card_run.sh
SCRIPT = ROOT / "benchmarks" / "card_run.sh"
PROGRAMS = ("probe_mma", "bench_wgmma", "bench_mma", "check_gpu", "checkops_gpu", "checkops")


class Rehearsal:
    """A folder in which every program that card_run.sh calls is a stand-in, which notes its
    arguments in `calls` and passes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in PROGRAMS:
            self.program(folder / name)
        for name in ("python3", "nvidia-smi", "ncu", "compute-sanitizer"):
            self.program(folder / "bin" / name)
        (folder / "commit").write_text("abc\n")
        self.program(folder / "probe_mma", "echo P3 digest")
        self.program(
            folder / "bin" / "python3", "echo CUDA kernels for sm_90a, in librollmesh_cuda.so"
        )

    def program(self, path: Path, words: str = "exit 0") -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "{path.name} $*" >>{self.folder}/calls\n{words}\n')
        path.chmod(0o755)

    def start(self, *parts: str, within: int = 500) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [SCRIPT, *parts],
            env={
                "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
                "CARD_RUN": str(self.folder),
                "OUT": str(self.folder / "out"),
                "WITHIN": str(within),
            },
            stdout=subprocess.DEVNULL,
        )

    def report(self) -> dict[str, int]:
        """The status of each part of report.txt, and the parts whose logs are in logs.tgz."""
        lines = (self.folder / "out" / "report.txt").read_text().splitlines()
        found = {line.split()[0]: int(line.split()[2]) for line in lines}
        with tarfile.open(self.folder / "out" / "logs.tgz") as logs:
            assert {f"log/{name}.log" for name in found} <= set(logs.getnames())
        return found

    def calls(self, program: str) -> list[list[str]]:
        lines = (self.folder / "calls").read_text().splitlines()
        return [line.split()[1:] for line in lines if line.split()[0] == program]


@pytest.fixture
def rehearsal(tmp_path: Path) -> Rehearsal:
    return Rehearsal(tmp_path)


def test_every_part_runs_once_and_asks_for_what_there_is(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rehearsal.start().wait(60) == 0
    report = rehearsal.report()
    assert len(report) > 18
    assert set(report.values()) == {0}
    for words in rehearsal.calls("python3"):
        if words[:2] == ["-m", "benchmarks.gpu"]:
            monkeypatch.setattr(sys, "argv", words[1:])
            gpu_benchmarks.parsed()
        for word in words:
            assert not word.startswith("tests/") or (ROOT / word).exists()
    checked: dict[str, set[str]] = {}
    for words in rehearsal.calls("checkops_gpu"):
        checked.setdefault(words[3], set()).add(words[1])
    assert checked.pop("cuda_fma") == set(test_cuda.OPS)
    assert checked.pop("cuda_mma") == set(test_cuda.MMA_OPS)
    assert checked == {tile: {"gemm", "gemm_swiglu"} for tile in test_cuda.TILES}
    before = len(rehearsal.calls("python3"))
    assert rehearsal.start().wait(60) == 0
    assert len(rehearsal.calls("python3")) == before


@pytest.mark.full
def test_a_part_that_fails_or_hangs_ends_nothing(rehearsal: Rehearsal) -> None:
    folder = rehearsal.folder
    rehearsal.program(folder / "bench_wgmma", "kill -9 $$")
    rehearsal.program(
        folder / "checkops_gpu", '[ "$2" = gemm ] && { echo "gemm: 3 differ"; exit 1; }; exit 0'
    )
    rehearsal.program(folder / "bench_mma", "echo begun; sleep 300")
    assert rehearsal.start("wgmma", "bits-mma", "ops", "grpo", within=14).wait(60) == 1
    report = rehearsal.report()
    assert report.pop("wgmma") not in (0, 124)
    assert report == {"bits-mma": 1, "ops": 124}  # less than 10 s are left for grpo
    log = (folder / "log" / "bits-mma.log").read_text()
    assert "BAD gemm mma 1\ngemm: 3 differ" in log
    rehearsal.program(folder / "bench_mma")
    assert rehearsal.start("ops", "grpo").wait(60) == 0
    assert rehearsal.report()["ops"] == 0
    assert rehearsal.report()["grpo"] == 0


def test_a_part_that_there_is_not_is_refused(rehearsal: Rehearsal) -> None:
    assert rehearsal.start("card", "bogus").wait(60) == 2
    assert not (rehearsal.folder / "calls").exists()


def test_what_was_done_is_kept_when_the_time_ends(rehearsal: Rehearsal) -> None:
    rehearsal.program(rehearsal.folder / "bench_mma", "sleep 300")
    running = rehearsal.start("card", "wgmma", "ops")
    calls, deadline = rehearsal.folder / "calls", time.monotonic() + 30
    while not calls.exists() or "bench_mma" not in calls.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.kill()
    running.wait(30)
    assert rehearsal.report() == {"card": 0, "wgmma": 0}


def test_figures_become_tables(tmp_path: Path) -> None:
    row = {
        "part": "decode",
        "what": "x",
        "family": "cuda_fma",
        "seconds": 0.0125,
        "rate": 3000.0,
        "unit": "GB/s",
        "share": 0.75,
    }
    machine = {"card": "NVIDIA H200", "date": "2026-01-02", "commit": "abc", "options": "decode"}
    one = {
        "machine": machine,
        "limits": {"copy_gb_s": 2000.0, "read_gb_s": None},
        "rows": [row, row | {"rate": None, "share": None}],
    }
    (tmp_path / "decode.json").write_text(json.dumps(one))
    text = tables([tmp_path / "decode.json"])
    assert text.startswith("card NVIDIA H200, date 2026-01-02, commit abc\n\n## decode\n")
    assert "Commit abc. Limits: copy_gb_s 2000.0." in text
    assert (
        "| decode | x | cuda_fma | 12.500 | 3000.0 GB/s | 75.0% |\n| decode | x | cuda_fma | "
        "12.500 |  |  |\n" in text
    )


def test_limits_are_measured_once(simt_library: Path, tmp_path: Path) -> None:
    limits = tmp_path / "limits.json"
    for copy in (None, 12.5):
        if copy:
            limits.write_text(json.dumps(json.loads(limits.read_text()) | {"copy_gb_s": copy}))
        done = gpu(simt_library, "--smoke", "limits", "--limits", str(limits))
        assert done.returncode == 0, done.stderr[-2000:]
    assert "copy_gb_s    12.5\n" in done.stdout


@pytest.mark.full
def test_tests_that_find_no_gpu_fail_where_one_is_needed(tmp_path: Path) -> None:
    """Otherwise a part would pass without using the card."""
    environment = os.environ | {
        "PATH": str(tmp_path),  # without nvcc, so that the test does not wait for it
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "RM_NEEDS_GPU": "1",
    }
    tests = str(Path(__file__).with_name("test_cuda_device.py"))
    words = ["-p", "no:cacheprovider", "-q", tests, "-k", "gpu and poll_ends"]
    command = [sys.executable, "-m", "pytest", *words]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stdout[-2000:]
    assert "no nvcc here: kernels/cuda not compiled" in done.stdout
