"""`rollmesh doctor`: what it prints of this machine, of simulated devices and of machines that lack
parts. Oracles: the generator's own choice, torch, and the devices that were simulated."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_calls import program
from paths import ROOT

import rollmesh as rm
from rollmesh import _core
from rollmesh.cli import doctor
from rollmesh.runtime import cublas
from rollmesh.runtime.devices import device_of

NO_GPU = "none found (nvidia-smi is absent or sees none)"


def test_doctor_says_what_was_chosen_and_what_is_missing() -> None:
    from helpers import tiny_spec

    text = program("doctor")
    with rm.Generator(tiny_spec(), kv_cache_gib=0.001, max_model_len=16) as generator:
        isa = generator.metrics()["isa"]
    assert f"chosen         {isa}: " in text
    assert text.count("<- chosen") == 1
    assert re.search(r'  device="cuda"  (works|no: device = .cuda.: expected .*)\n', text)
    for name in (
        "ref",
        "NumPy",
        "threads",
        "shm",
        "torch",
        "transformers",
        "nvcc",
        "NCCL",
        "vllm",
    ):
        assert f"\n  {name} " in text


@pytest.mark.parametrize(
    "free, words",
    [
        (2**34, "works for up to 64 ranks: 16.00 GiB of"),
        (25 << 20, "works for up to 2 "),
        (19 << 20, "no: "),
    ],
)
def test_doctor_knows_how_many_ranks_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, words: str
) -> None:
    monkeypatch.setattr(
        os,
        "statvfs",
        lambda path: SimpleNamespace(f_bavail=free >> 12, f_frsize=1 << 12, f_blocks=1 << 30),
    )
    assert doctor._shared_memory(tmp_path).startswith(words)


def test_doctor_says_what_is_left_to_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "usable_cores", lambda: 3)
    monkeypatch.setattr(_core, "memory_pools", lambda: [(1, 5 << 30), (2, 3 << 29), (3, 7 << 30)])
    rows = dict(doctor._processor())
    assert rows["threads"].startswith("3 by default: ")
    assert rows["memory"].endswith(
        "GiB, of which 1.50 GiB are free and within this process's limits"
    )


def test_doctor_where_processes_cannot_be_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert doctor._shared_memory(tmp_path / "none").startswith("no: ")
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    assert doctor._torch_groups().startswith("missing")


def test_doctor_names_the_backends_that_torch_has() -> None:
    """Oracle: torch, which doctor itself does not import."""
    distributed = pytest.importorskip("torch.distributed")
    assert ("Gloo" in doctor._torch_groups()) == distributed.is_gloo_available()
    assert ("NCCL" in doctor._torch_groups()) == distributed.is_nccl_available()


@pytest.mark.parametrize(
    "devices, seen",
    [
        ("2", "2 devices here"),
        ("1", "1 device here"),
        ("0", "no driver here, and NVIDIA's is all they need"),
    ],
)
def test_doctor_knows_the_kernels_of_this_build(
    simt_library: Path, monkeypatch: pytest.MonkeyPatch, devices: str, seen: str
) -> None:
    """Runs on the simulated device. The CUDA runtime is part of the library, so the output has no
    line about a missing runtime."""
    monkeypatch.setenv("ROLLMESH_CUDA_LIBRARY", str(simt_library))
    monkeypatch.setenv("ROLLMESH_SIMT_DEVICES", devices)
    monkeypatch.setattr(doctor, "_first_line", lambda *_, **__: None)  # no nvidia-smi, no nvcc
    rows = dict(doctor._gpu())
    found = (
        f"{seen.removesuffix(' here')}, says {simt_library.name}; nvidia-smi is absent or sees none"
    )
    assert rows["GPU"] == (NO_GPU if devices == "0" else found)
    assert rows["nvcc"] == "missing: only needed to build CUDA kernels"
    assert rows["CUDA kernels"] == f"for simt, in {simt_library.name}; {seen}"
    missing = "no: device = 'cuda': expected an NVIDIA driver, got none on this machine"
    assert rows['device="cuda"'] == ("works" if devices != "0" else missing)
    assert not [text for text in rows if "runtime" in text]


def test_a_driver_that_is_too_old_is_said(
    simt_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMESH_CUDA_LIBRARY", str(simt_library))
    monkeypatch.setenv("ROLLMESH_SIMT_DRIVER", "12080")
    rows = dict(doctor._gpu())
    assert (
        rows["CUDA kernels"]
        == f"for simt, in {simt_library.name}; the driver here is too old, they need 580 or later"
    )
    assert (
        rows['device="cuda"']
        == "no: device = 'cuda': expected NVIDIA driver 580 or later (CUDA 13), got an older one"
    )
    with pytest.raises(
        rm.ConfigError, match='device="cuda": expected an NVIDIA driver 580 or later'
    ):
        rm._core.cuda_available(str(simt_library), 0)


def test_doctor_believes_nvidias_own_tool(
    simt_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMESH_CUDA_LIBRARY", str(simt_library))
    monkeypatch.setattr(
        doctor,
        "_first_line",
        lambda command, **_: "NVIDIA H200, 580.1" if command[0] == "nvidia-smi" else None,
    )
    assert dict(doctor._gpu())["GPU"] == "NVIDIA H200, 580.1"


@pytest.mark.parametrize(
    "environment, has_nvcc, words",
    [
        ({"ROLLMESH_CUDA": "0"}, True, "made with ROLLMESH_CUDA=0"),
        ({}, False, "made where nvcc was not on PATH"),
        ({}, True, "made with an nvcc that failed"),
        ({"ROLLMESH_SANITIZE": "1"}, True, "made with ROLLMESH_SANITIZE"),
    ],
)
def test_a_build_without_cuda_says_why(
    environment: dict[str, str],
    has_nvcc: bool,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs setup.py's own step beside an extension, and checks what doctor and a generator report.
    nvcc is a program that fails."""
    for name in ("ROLLMESH_CUDA", "ROLLMESH_SANITIZE", "ROLLMESH_CUDA_LIBRARY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "bin").mkdir()
    if has_nvcc:
        (tmp_path / "bin/nvcc").write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "bin/nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    code = f"""
import os, sys
os.chdir({str(ROOT)!r})
from pathlib import Path
import setuptools
from distutils.core import run_setup
command = run_setup("setup.py", stop_after="init").get_command_obj("build_ext")
command.ensure_finalized()
command.build_temp = {str(tmp_path / "objects")!r}
command.build_cuda_beside(Path({str(tmp_path / "_core.so")!r}))
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)
    monkeypatch.setattr(rm._core, "__file__", str(tmp_path / "_core.so"))
    assert doctor._cuda_library() == (f"not in this build, {words}", 0)
    with pytest.raises(
        rm.ConfigError,
        match=rf"^device = 'cuda': expected a build with librollmesh_cuda.so, got one {words}$",
    ):
        device_of("cuda")


def test_doctor_where_the_librarys_name_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Input: a missing file, and a file that is not a library. If cuBLASLt is not found, the output
    names the extra that contains it."""
    monkeypatch.setattr(cublas.libraries, "candidates", lambda *_: iter(()))
    monkeypatch.setattr(doctor, "_first_line", lambda *_, **__: None)
    wrong = tmp_path / "none.so"
    monkeypatch.setenv("ROLLMESH_CUDA_LIBRARY", str(wrong))
    rows = dict(doctor._gpu())
    assert (rows["GPU"], rows["CUDA kernels"]) == (
        NO_GPU,
        f"ROLLMESH_CUDA_LIBRARY={wrong}: there is no such file",
    )
    assert rows["cuBLASLt"].endswith(
        "(pip install '.[cuda]' in rollmesh's checkout); only needed for fast=True"
    )
    os.mkfifo(tmp_path / "fifo")  # opening it would block until a writer comes
    for strange in (
        f"/{'b' * 300}",
        str(tmp_path / "fifo"),
        str(tmp_path),
        str(tmp_path / "a\nb\x1b[31m"),
    ):
        monkeypatch.setenv("ROLLMESH_CUDA_LIBRARY", strange)
        rows = dict(doctor._gpu())
        assert rows["CUDA kernels"].endswith(": there is no such file")
        assert rows['device="cuda"'].startswith("no: ROLLMESH_CUDA_LIBRARY: expected")
        assert all(row.isprintable() for row in rows.values())
    monkeypatch.setenv("ROLLMESH_CUDA_LIBRARY", str(wrong))
    wrong.write_text("no library")
    rows = dict(doctor._gpu())
    assert rows["GPU"] == NO_GPU
    assert rows["CUDA kernels"].startswith("cannot be loaded: ")


@pytest.mark.parametrize(
    "word",
    ["foo", "\x1b[31mred\n  avx2 works", "x" * 3000, os.fsdecode(b"\xff\xfe")],
    ids=["foo", "escape", "long", "bytes"],
)
def test_doctor_of_an_instruction_set_that_there_is_none_of(word: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rollmesh", "doctor"],
        capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "RM_ISA": word},
    )  # fmt: skip
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  chosen ")]
    assert (done.returncode, done.stderr) == (0, "")
    assert "none: RM_ISA: expected an instruction set" in line
    assert "capped" not in line
    assert len(line) < 200
    assert line.isprintable()
