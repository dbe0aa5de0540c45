"""benchmarks.gpu on the simulated device, and the control flow of benchmarks.gpu_first, so that
both work when a GPU is available.

Input: tiny models and few steps; parts that pass, fail, hang and depend on each other. Oracle: the
rows that the docstring lists, the bytes of the shape's parameters, and the result that each part
must have. Bound: equality."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import test_cuda
from native_build import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks import gpu_first, shapes
from benchmarks.gpu import GEMM, OP
from benchmarks.gpu_first import Part, State


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
        experts = (
            [0.0]
            if not shape.n_experts
            else [shape.layers * shape.top_k, shape.layers * min(shape.n_experts, n * shape.top_k)]
        )
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


# --------------------------------------------------------------------------- benchmarks.gpu_first
def options_of(**changes: object) -> argparse.Namespace:
    return argparse.Namespace(**{"within": 60.0, "again": [], **changes})


def first(plan: list[Part], folder: Path, **changes: object) -> dict[str, str]:
    state = State.of(folder)
    gpu_first.run(plan, state, options_of(**changes), gpu_first.environment(folder, 7))
    return {part.name: state.fate(part) for part in plan}


def test_parts_have_a_fate_a_log_and_one_turn(tmp_path: Path) -> None:
    plan = [
        Part("good", 20, 'echo "seed $SEED"; echo turn >> "$DIR/turns"'),
        Part("bad", 20, "echo no; exit 3"),
        Part("behind", 20, "echo unseen", "bad"),
        Part("none", 20, "exit 77"),
        Part("last", 20, "kill -9 $$", "good"),
    ]
    fates = {
        "good": "passed",
        "bad": "failed",
        "behind": "left",
        "none": "absent",
        "last": "failed",
    }
    assert first(plan, tmp_path) == fates
    assert first(plan, tmp_path) == fates
    assert (tmp_path / "turns").read_text() == "turn\n"
    assert (tmp_path / "good.log").read_text() == "seed 7\n"
    assert json.loads((tmp_path / "state.json").read_text())["bad"]["status"] == 3
    report = (tmp_path / "report.txt").read_text()
    assert "=== bad: failed\nno\n" in report
    assert "unseen" not in report
    assert first(plan, tmp_path, again=["good"]) == fates
    assert (tmp_path / "turns").read_text() == "turn\nturn\n"


def is_running(process: int) -> bool:
    """Returns whether the process runs; a zombie does not run."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.full
def test_a_part_that_hangs_ends_with_all_it_started(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    hangs = Part("hangs", 4, f'echo begun; "$PYTHON" -c "{deaf}" & echo $! > "$DIR/child"; wait')
    begin = time.monotonic()
    assert first([hangs, Part("next", 5, "true")], tmp_path) == {
        "hangs": "failed",
        "next": "passed",
    }
    assert time.monotonic() - begin < 20
    child = int((tmp_path / "child").read_text())
    while is_running(child) and time.monotonic() - begin < 40:
        time.sleep(0.05)
    assert not is_running(child)
    assert (tmp_path / "hangs.log").read_text() == "begun\n"


@pytest.mark.full
def test_what_the_time_cuts_is_run_again(tmp_path: Path) -> None:
    plan = [
        Part("long", 10, 'test -e "$DIR/seen" && exit 0; touch "$DIR/seen"; sleep 300'),
        Part("longer", 1000, "true"),
    ]
    assert first(plan, tmp_path, within=3.0) == {"long": "cut", "longer": "left"}
    assert first(plan, tmp_path, within=3000.0) == {"long": "passed", "longer": "passed"}


def test_what_was_built_and_is_gone_is_built_again(tmp_path: Path) -> None:
    plan = [
        Part("build", 20, 'echo x >> "$DIR/turns"; touch "$DIR/made"', "", "made"),
        Part("use", 20, 'test -e "$DIR/made"', "build"),
    ]
    for turns in (1, 1, 2):
        assert first(plan, tmp_path) == {"build": "passed", "use": "passed"}
        assert (tmp_path / "turns").read_text() == "x\n" * turns
        if turns == 1 and (tmp_path / "once").exists():
            (tmp_path / "made").unlink()
        (tmp_path / "once").touch()


def test_figures_become_one_table(tmp_path: Path) -> None:
    row = {
        "part": "decode",
        "what": "x",
        "family": "cuda_fma",
        "seconds": 0.0125,
        "rate": 3000.0,
        "unit": "GB/s",
        "share": 0.75,
    }
    machine = {
        "card": "NVIDIA H200",
        "driver": "580",
        "date": "2026-01-02",
        "commit": "abc",
        "options": "decode",
    }
    one = {
        "machine": machine,
        "limits": {"copy_gb_s": 2000.0, "read_gb_s": None},
        "rows": [row, row | {"rate": None, "share": None}],
    }
    (tmp_path / "decode.json").write_text(json.dumps(one))
    first([Part("good", 20, "true")], tmp_path)
    path = gpu_first.collected(tmp_path, tmp_path)
    assert path.name == "gpu-2026-01-02-nvidia-h200.md"
    # The earlier file is kept.
    assert gpu_first.collected(tmp_path, tmp_path).name == "gpu-2026-01-02-nvidia-h200-2.md"
    text = path.read_text()
    assert (
        "| decode | x | cuda_fma | 12.500 | 3000.0 GB/s | 75.0% |\n| decode | x | cuda_fma | "
        "12.500 |  |  |\n" in text
    )
    assert "Commit abc. Limits in this run: copy_gb_s 2000.0." in text
    assert "- good: passed" in text


@pytest.mark.full
def test_tests_that_find_no_gpu_fail_where_one_is_needed(tmp_path: Path) -> None:
    """Otherwise a part would pass without using the card."""
    environment = gpu_first.environment(tmp_path, 1)
    environment["PATH"] = str(tmp_path)  # without nvcc, so that the test does not wait for it
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    environment.pop("RM_CUDA_BUILD")
    words = [
        *gpu_first.PYTEST,
        str(Path(__file__).with_name("test_cuda_device.py")),
        "-k",
        "gpu and poll_ends",
    ]
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stdout[-2000:]
    assert "no nvcc here: kernels/cuda not compiled" in done.stdout


def test_the_plan_names_what_there_is() -> None:
    plan = gpu_first.parts()
    names = [part.name for part in plan]
    assert len(set(names)) == len(names)
    for i, part in enumerate(plan):
        assert not part.needs or part.needs in names[:i]
        assert 0 < part.limit <= 300
        subprocess.run(["sh", "-n", "-c", part.words], check=True)
        for word in part.words.split():
            assert not word.startswith("tests/") or (ROOT / word).is_file()
    assert set(gpu_first.OPS) == set(test_cuda.OPS)
    assert set(gpu_first.MMA_OPS) == set(test_cuda.MMA_OPS)
    assert [f"cuda_{tile}" for tile in gpu_first.TILES] == test_cuda.TILES
    behind = (
        "racecheck",
        "synccheck",
        "decode-eager",
        "gemm",
        "test-fast",
        "decode-fast",
        "test-nccl",
        "test-torch",
        "test-slots",
    )
    behind += ("test-kernels",)
    half_an_hour = [part for part in plan if not part.name.startswith(behind)]
    # Limits are at least twice the expected time of a part.
    assert sum(part.limit for part in half_an_hour) < 2 * 30 * 60


@pytest.mark.parametrize("name", ["build", "programs"])
@pytest.mark.parametrize(
    "fails, told, status", [("none", "1", 0), ("1", "1 0", 0), ("[01]", "1 0", 1)]
)
def test_a_warning_of_an_untried_compiler_ends_nothing(
    tmp_path: Path, name: str, fails: str, told: str, status: int
) -> None:
    """`compiler` replaces the part's command, and fails with warnings as errors, or as it is
    told."""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\necho "$ROLLMESH_WERROR" >> "$DIR/told"\ncase $ROLLMESH_WERROR in {fails}) '
        "exit 1;; esac\n"
    )
    compiler.chmod(0o755)
    part = next(part for part in gpu_first.parts() if part.name == name)
    done = subprocess.run(
        part.command(),
        env=os.environ | {"DIR": str(tmp_path), "PYTHON": str(compiler)},
        check=False,
    )
    assert (done.returncode, (tmp_path / "told").read_text().split()) == (status, told.split())


@pytest.mark.full
def test_the_figures_of_the_plan_are_asked_for_rightly(simt_library: Path) -> None:
    """Each line of options is parsed as in a real run, which then ends because there is no
    device."""
    lines = [part.words for part in gpu_first.parts() if "benchmarks.gpu " in part.words]
    assert len(lines) >= 7
    for line in lines:
        words = line.partition("benchmarks.gpu ")[2].replace('"', "").split()
        done = gpu(simt_library, *words)
        assert (
            done.stderr
            == "benchmarks.gpu: the simulated device has no speed; --smoke runs everything on it "
            "once\n"
        ), line


@pytest.mark.parametrize(
    "capability, arch", [("8.0", "sm_80"), ("8.9", "sm_89"), ("9.0", "sm_90a"), ("10.0", "sm_100a")]
)
def test_a_card_is_compiled_for(capability: str, arch: str) -> None:
    assert gpu_first.architecture(capability) == arch


def test_no_gpu_is_said(tmp_path: Path) -> None:
    environment = os.environ | {
        "PATH": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-m", "benchmarks.gpu_first", "--to", str(tmp_path / "to")]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert (
        done.stderr == "benchmarks.gpu_first: found no GPU: nvidia-smi: No such file or directory\n"
    )
    assert not (tmp_path / "to").exists()
