"""NCCL from Python: which one is found, what is said where something is missing, and NCCL itself as far as it goes without a GPU.

Input: the library of the wheel nvidia-nccl-cu13 where it is installed (its tests skip elsewhere), the stand-in of tests/native/standin,
and files that are none. Oracle: the wheel's own version and header, and the rules of the docstrings. Bound: equality."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from native_build import ROOT, standin
from test_native import passes

import rollmesh as rm
from rollmesh import comm as comms
from rollmesh import nccl

Build = Callable[..., Path]
WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


def of_wheel() -> tuple[Path, str]:
    """The wheel's library and version, or a skip."""
    for name in WHEELS:
        try:
            files, version = importlib.metadata.files(name) or [], importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == "libnccl.so.2":
                return Path(str(file.locate())), version
    pytest.skip(f"needs NCCL itself: pip install {WHEELS[0]}")


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


# ---------------------------------------------------------------------------------------------- NCCL itself
def test_the_wheel_is_found() -> None:
    path, version = of_wheel()
    found = nccl.find()
    if "already" in found.source and not os.path.samefile(found.path, path):
        pytest.skip(f"this process has loaded another: {found}")
    assert os.path.samefile(found.path, path)
    assert ".".join(map(str, found.version)) == version


def test_a_group_without_a_driver_is_an_error(native: Build) -> None:
    path, version = of_wheel()
    if has_driver():
        pytest.skip("there is a driver here")
    lines = passes([native("nccl_real")], NCCL_LIBRARY=str(path), NCCL_DEBUG="").splitlines()
    assert lines[0] == f"version {version}"
    assert lines[1] == "a name: no error"
    assert len(lines) == 4
    for line in lines[2:]:
        assert re.match(
            r'rank \d: (DeviceError: making a group: NCCL says "unhandled cuda error|RankLostError: rank \d has given up)', line
        )
    assert any("DeviceError" in line for line in lines[2:])


@pytest.mark.parametrize("plant", ["", "SAME(RM_NCCL_USAGE, ncclInternalError);\n"])
def test_declarations_are_the_headers(tmp_path: Path, plant: str) -> None:
    header = of_wheel()[0].parents[1] / "include" / "nccl.h"
    if shutil.which("nvcc") is None or not header.exists():
        pytest.skip("needs nvcc, which knows where CUDA's headers are, and the wheel's nccl.h")
    source = tmp_path / "nccl_header.c"
    source.write_text((ROOT / "tests" / "native" / "standin" / "nccl_header.c").read_text() + plant)
    flags = ["-Xcompiler=-std=gnu11", f"-I{header.parent}", f"-I{ROOT / 'kernels'}", f"-I{ROOT / 'csrc'}"]
    command = ["nvcc", "-c", *flags, "-o", str(tmp_path / "header.o"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode == 0) == (not plant), done.stderr
    assert ("static assertion failed" in done.stderr) == bool(plant)


# ---------------------------------------------------------------------------------------------- which one
@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    if shutil.which("gcc") is None:
        pytest.skip("needs a C compiler")
    return str(standin(tmp_path))


def test_a_library_that_is_loaded_comes_first(stand_in: str) -> None:
    script = f"""
import ctypes
from rollmesh import nccl
kept = ctypes.CDLL({stand_in!r})
print(nccl.find())
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == f"2.32.3, which this process has loaded already ({stand_in})\n"


def test_a_version_is_read(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nccl.find(stand_in) == nccl.Library(stand_in, (2, 32, 3), "as asked for")
    assert nccl.find(Path(stand_in)).path == stand_in
    # The stand-in reads what C sees, which os.environ sets too.
    monkeypatch.setenv("STANDIN_VERSION", "21602")
    with pytest.raises(rm.ConfigError, match=r"libnccl.so.2 is NCCL 2.16.2, wanted 2.17.1 or later"):
        nccl.find(stand_in)
    monkeypatch.setenv("STANDIN_VERSION", "2708")
    with pytest.raises(rm.ConfigError, match=r"is NCCL 2.7.8, wanted"):
        nccl.find(stand_in)


def test_what_is_no_nccl_is_refused(tmp_path: Path) -> None:
    with pytest.raises(rm.ConfigError, match=r"no NCCL can be loaded: .*nowhere"):
        nccl.find("/nowhere/libnccl.so.2")
    text = tmp_path / "libnccl.so.2"
    text.write_text("no library\n")
    with pytest.raises(rm.ConfigError, match="no NCCL can be loaded"):
        nccl.find(text)
    with pytest.raises(rm.ConfigError, match=r"libm.so.6 has no ncclGetVersion, wanted NCCL 2.17.1 or later"):
        nccl.find("libm.so.6")


def test_nothing_to_find_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_candidates", lambda: iter(()))
    with pytest.raises(rm.ConfigError, match=r"no libnccl.so.2 was found.*pip install nvidia-nccl-cu13"):
        nccl.find()


# ---------------------------------------------------------------------------------------------- rm.comm.nccl
def host() -> comms.Shm:
    return rm.comm.shm("rollmesh-test-nccl", 0, 2)


@pytest.mark.parametrize("group", [None, "shm", 3])
def test_a_group_of_the_host_is_wanted(group: object) -> None:
    with pytest.raises(rm.ConfigError, match=r"wanted a comm of the host: rm.comm.shm\(…\) or rm.comm.torch\(…\)"):
        rm.comm.nccl(group)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "cuda:", "cuda:-1", "cuda:0 ", "cuda:1000", 0, None])
def test_a_device_of_cuda_is_wanted(device: object) -> None:
    with pytest.raises(rm.ConfigError, match="wanted 'cuda' or 'cuda:0'"):
        rm.comm.nccl(host(), device)  # type: ignore[arg-type]


def test_what_this_machine_lacks_is_said() -> None:
    if has_driver():
        pytest.skip("there is a driver here")
    with pytest.raises(rm.ConfigError, match=r"this build of rollmesh has no kernels for GPUs|no NVIDIA driver is here"):
        rm.comm.nccl(host())


@pytest.fixture
def pretended(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> comms.Nccl:
    """As where there is a GPU."""
    monkeypatch.setattr(comms, "_check_cuda", lambda index: None)
    return rm.comm.nccl(host(), "cuda:1", stand_in)


def test_what_the_engine_needs_is_there(pretended: comms.Nccl, stand_in: str) -> None:
    assert (pretended.rank, pretended.world, pretended.timeout, pretended.device) == (0, 2, 600.0, "cuda:1")
    assert pretended.library.path == stand_in
    with pytest.raises(rm.ConfigError, match="wanted a comm of the host"):
        rm.comm.nccl(pretended)


def test_a_cpu_does_not_take_it(pretended: comms.Nccl) -> None:
    import helpers

    with pytest.raises(rm.ConfigError, match="comm is for the memory of cuda:1 and device = 'cpu'"):
        rm.Generator(rm.ModelSpec.from_hf(helpers.tiny_config()), mesh=rm.Mesh(tp=2), comm=pretended)


def test_ranks_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(nccl.SHARES_GPU_VARIABLE, raising=False)
    apart = [{"NCCL": "2.29.7", "GPU": f"here {i}"} for i in range(3)]
    comms.check_gpus(apart)
    assert nccl.SHARES_GPU_VARIABLE not in os.environ
    with pytest.raises(rm.MeshMismatchError, match=r"rank 2 has NCCL = 2.30.3, rank 0 2.29.7"):
        comms.check_gpus([*apart[:2], {"NCCL": "2.30.3", "GPU": "here 2"}])
    with pytest.raises(rm.ConfigError, match=r"ranks 1 and 2 have one GPU, which NCCL 2.29.7 does not allow, wanted 2.30.3 or later"):
        comms.check_gpus([*apart[:2], apart[1]])
    comms.check_gpus([{"NCCL": "2.30.3", "GPU": "here 0"}] * 2)
    assert os.environ[nccl.SHARES_GPU_VARIABLE] == "1"
    monkeypatch.delenv(nccl.SHARES_GPU_VARIABLE)


def test_a_gpu_has_one_name_on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    third = comms._gpu_name(3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, 3")
    assert comms._gpu_name(1) == third
    assert comms._gpu_name(0) != third
