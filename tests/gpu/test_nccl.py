"""NCCL from Python: which library is found, the errors if something is missing, and the parts of
NCCL itself that work without a GPU.

Input: the library of the wheel nvidia-nccl-cu13 if it is installed (its tests are skipped
otherwise), the stand-in of tests/support/native/standin, and files that are not libraries. Oracle:
the wheel's own version and header, and the rules of the docstrings. Bound: equality."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import helpers
import pytest
from native_build import ROOT, standin
from paths import SUPPORT
from test_native import passes

import rollmesh as rm
from rollmesh.cli import doctor
from rollmesh.distributed import comm as comms
from rollmesh.runtime import nccl
from rollmesh.runtime.devices import Device

Build = Callable[..., Path]
BLOCKS = "NCCL_MAX_CTAS"
WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


def of_wheel() -> tuple[Path, str]:
    """Returns the wheel's library and version, or skips."""
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


# ------------------------------------------------------------------------------------ NCCL itself
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
            r'rank \d: (DeviceError: making a group: NCCL says "unhandled cuda '
            r"error|RankLostError: rank \d has aborted)",
            line,
        )
    assert any("DeviceError" in line for line in lines[2:])


@pytest.mark.parametrize("plant", ["", "SAME(RM_NCCL_USAGE, ncclInternalError);\n"])
def test_declarations_are_the_headers(tmp_path: Path, plant: str) -> None:
    header = of_wheel()[0].parents[1] / "include" / "nccl.h"
    if shutil.which("nvcc") is None or not header.exists():
        pytest.skip("needs nvcc, which knows where CUDA's headers are, and the wheel's nccl.h")
    if "NCCL_API_MAGIC" not in header.read_text():
        pytest.skip(f"the wheel's nccl.h is older than what we declare: {of_wheel()[1]}")
    source = tmp_path / "nccl_header.c"
    source.write_text((SUPPORT / "native" / "standin" / "nccl_header.c").read_text() + plant)
    flags = [
        "-Xcompiler=-std=gnu11",
        f"-I{header.parent}",
        f"-I{ROOT / 'kernels'}",
        f"-I{ROOT / 'csrc'}",
    ]
    command = ["nvcc", "-c", *flags, "-o", str(tmp_path / "header.o"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode == 0) == (not plant), done.stderr
    assert ("static assertion failed" in done.stderr) == bool(plant)


# -------------------------------------------------------------------------------------- which one
@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    if shutil.which("gcc") is None:
        pytest.skip("needs a C compiler")
    return str(standin(tmp_path))


def test_a_library_that_is_loaded_comes_first(stand_in: str) -> None:
    script = f"""
import ctypes
from rollmesh.runtime import nccl
kept = ctypes.CDLL({stand_in!r})
print(nccl.find())
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == f"2.32.3, which this process has loaded already ({stand_in})\n"


def test_a_version_is_read(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nccl.find(stand_in) == nccl.Library(stand_in, (2, 32, 3), "as asked for")
    assert nccl.find(Path(stand_in)).path == stand_in
    # The stand-in reads C's environment, which os.environ sets too.
    monkeypatch.setenv("STANDIN_VERSION", "21602")
    with pytest.raises(
        rm.ConfigError, match=r"expected NCCL 2.17.1 or later, got 2.16.2 in .*libnccl.so.2"
    ):
        nccl.find(stand_in)
    monkeypatch.setenv("STANDIN_VERSION", "2708")
    with pytest.raises(rm.ConfigError, match=r"expected NCCL 2.17.1 or later, got 2.7.8"):
        nccl.find(stand_in)


def test_what_is_no_nccl_is_refused(tmp_path: Path) -> None:
    with pytest.raises(rm.ConfigError, match=r"NCCL cannot be loaded: .*nowhere"):
        nccl.find("/nowhere/libnccl.so.2")
    text = tmp_path / "libnccl.so.2"
    text.write_text("no library\n")
    with pytest.raises(rm.ConfigError, match="NCCL cannot be loaded"):
        nccl.find(text)
    with pytest.raises(
        rm.ConfigError,
        match=r"expected NCCL 2.17.1 or later, got .*libm.so.6 without ncclGetVersion",
    ):
        nccl.find("libm.so.6")
    for wrong in ("", "\ud800", "a\0", 3, b"libnccl.so.2"):
        with pytest.raises(
            rm.ConfigError, match=r"^library: expected None or the path of a libnccl"
        ):
            nccl.find(wrong)  # type: ignore[arg-type]


def test_nothing_to_find_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl.libraries, "candidates", lambda *_: iter(()))
    with pytest.raises(
        rm.ConfigError,
        match=r"expected libnccl.so, .*got none \(pip install 'nvidia-nccl-cu13>=2\.30\.3'\)",
    ):
        nccl.find()


def test_one_version_is_asked_for_everywhere() -> None:
    """The version of the extra, of the message, and the version from which ranks may share a GPU
    are equal."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    (asked,) = [requirement for requirement in extras["cuda"] if "nccl" in requirement]
    assert f"pip install '{asked}'" == nccl.INSTALL
    assert asked == f"{WHEELS[0]}>={'.'.join(map(str, nccl.SHARES_GPU))}"


@pytest.mark.parametrize("version", [(2, 30, 3), (2, 30, 2), (2, 29, 7), (2, 32, 3)], ids=str)
def test_doctor_says_what_shares_a_gpu(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(nccl, "find", lambda: nccl.Library("libnccl.so.2", version, "the system's"))
    shares = "several ranks may have one GPU"
    alone = f"each rank needs a GPU of its own, before 2.30.3 ({nccl.INSTALL})"
    assert doctor._nccl() == f"{nccl.find()}; {shares if version >= (2, 30, 3) else alone}"


def test_doctor_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl.libraries, "candidates", lambda *_: iter(()))
    assert f"({nccl.INSTALL}); only needed for several GPUs" in doctor._nccl()


# ----------------------------------------------------------------------------------- rm.comm.nccl
def host() -> comms.Shm:
    return rm.comm.shm("rollmesh-test-nccl", 0, 2)


@pytest.mark.parametrize("group", ["shm", 3])
def test_a_group_of_the_host_is_wanted(group: object) -> None:
    with pytest.raises(
        rm.ConfigError,
        match=r"expected a host comm \(rm.comm.shm\(…\), rm.comm.torch\(…\)\), or None",
    ):
        rm.comm.nccl(group)  # type: ignore[arg-type]


def test_it_wraps_a_comm_once(stand_in: str) -> None:
    made = rm.comm.nccl(host(), stand_in)
    assert (made.rank, made.world, made.timeout, made.library.path) == (0, 2, 600.0, stand_in)
    with pytest.raises(rm.ConfigError, match="expected a host comm"):
        rm.comm.nccl(made, stand_in)


def test_no_nccl_is_said_before_there_is_a_generator(tmp_path: Path) -> None:
    with pytest.raises(rm.ConfigError, match="NCCL cannot be loaded"):
        rm.comm.nccl(host(), tmp_path / "libnccl.so.2")


@pytest.mark.parametrize("group", [None, host()])
def test_it_is_of_gpus(stand_in: str, group: comms.Shm | None) -> None:
    made = rm.comm.nccl(group, stand_in)
    with pytest.raises(
        rm.ConfigError, match=r"device: expected 'cuda' with rm.comm.nccl\(…\), got 'cpu'"
    ):
        rm.Generator(rm.ModelSpec.from_hf(helpers.tiny_config()), mesh=rm.Mesh(tp=2), comm=made)


def test_a_device_is_refused_in_the_generators_words(stand_in: str) -> None:
    with pytest.raises(rm.ConfigError, match="expected 'cpu', 'cuda' or 'cuda:N'"):
        rm.Generator(
            rm.ModelSpec.from_hf(helpers.tiny_config()),
            device="cuda:",
            mesh=rm.Mesh(tp=2),
            comm=rm.comm.nccl(None, stand_in),
        )


@pytest.fixture
def not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (nccl.SHARES_GPU_VARIABLE, BLOCKS):
        monkeypatch.setenv(name, "0")  # for what a test puts there to go with it
        monkeypatch.delenv(name)


def heard(stand_in: str, everyone: list[tuple[str, str]]) -> str:
    """Returns the environment after the handshake of all ranks' (NCCL, GPU)."""
    rm.comm.nccl(host(), stand_in).accept_handshake(
        [{"NCCL": version, "GPU": gpu} for version, gpu in everyone]
    )
    return os.environ.get(nccl.SHARES_GPU_VARIABLE, "unset")


def test_ranks_on_one_gpu(stand_in: str, not_shared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = [("2.32.3", f"here {i}") for i in range(3)]
    assert heard(stand_in, apart) == "unset"
    assert BLOCKS not in os.environ
    with pytest.raises(rm.MeshMismatchError, match=r"rank 2 has NCCL = 2.30.3, rank 0 2.32.3"):
        heard(stand_in, [*apart[:2], ("2.30.3", "here 2")])
    assert heard(stand_in, [*apart[:2], apart[1]]) == "1"
    assert os.environ[BLOCKS] == "4"
    monkeypatch.setenv(BLOCKS, "7")
    assert heard(stand_in, [*apart[:2], apart[1]]) == "1"
    assert os.environ[BLOCKS] == "7"  # the user's setting is kept
    monkeypatch.setenv(nccl.SHARES_GPU_VARIABLE, "0")
    with pytest.raises(
        rm.ConfigError,
        match="ranks 1 and 2 share a GPU: expected NCCL_MULTI_RANK_GPU_ENABLE=1 in the "
        "environment, got '0'",
    ):
        heard(stand_in, [*apart[:2], apart[1]])
    monkeypatch.delenv(nccl.SHARES_GPU_VARIABLE)
    monkeypatch.setenv("STANDIN_VERSION", "22907")
    with pytest.raises(
        rm.ConfigError,
        match=r"ranks 0 and 1 share a GPU: expected NCCL 2\.30\.3 or later, got 2\.29\.7",
    ):
        heard(stand_in, [("2.29.7", "here 0")] * 2)
    assert nccl.SHARES_GPU_VARIABLE not in os.environ


@pytest.mark.parametrize(
    "ordinal, world, found",
    [(-1, 2, "unset"), (-1, 8, "unset"), (-1, 9, "1"), (3, 1, "unset"), (3, 2, "1")],
    ids=lambda value: str(value),
)
def test_threads_on_one_gpu(
    stand_in: str,
    not_shared: None,
    monkeypatch: pytest.MonkeyPatch,
    ordinal: int,
    world: int,
    found: str,
) -> None:
    monkeypatch.setattr(rm._core, "cuda_count", lambda library: 8)
    where = Device("library", ordinal)
    assert rm.comm.nccl(None, stand_in).place(where, rm.Mesh(tp=world)) == where
    assert os.environ.get(nccl.SHARES_GPU_VARIABLE, "unset") == found


def test_a_process_has_the_gpu_of_its_number(
    stand_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rm._core, "cuda_count", lambda library: 2)
    monkeypatch.setattr(rm._core, "cuda_bus", lambda library, ordinal: f"bus {ordinal}")
    for rank, wanted in ((0, 0), (1, 1), (2, 0)):
        made = rm.comm.nccl(rm.comm.shm("rollmesh-test-nccl", rank, 3), stand_in)
        assert made.place(Device("library", -1), rm.Mesh(tp=3)).cuda_ordinal == wanted
        assert str(made.gpu).endswith(f" bus {wanted}")
        assert made.place(Device("library", 1), rm.Mesh(tp=3)).cuda_ordinal == 1


def test_a_gpu_has_one_name_on_a_machine(
    simt_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name does not depend on the GPU's number in a process."""
    names = [rm._core.cuda_bus(str(simt_library), ordinal) for ordinal in range(3)]
    assert len(set(names)) == 3
    monkeypatch.setenv("ROLLMESH_SIMT_FIRST", "1")
    assert rm._core.cuda_bus(str(simt_library), 0) == names[1]
    with pytest.raises(rm.ConfigError, match=r"cuda:99: .*invalid device ordinal"):
        rm._core.cuda_bus(str(simt_library), 99)


# ------------------------------------------------------------- looking for the others, over torch
class Exchange:
    """The interface of a torch group as the C side uses it."""

    def __init__(self, error: Exception | None) -> None:
        self.error, self.looks = error, 0

    def look(self) -> None:
        self.looks += 1
        if self.error:
            raise self.error


def test_an_exchange_is_asked_now_and_then() -> None:
    fine = Exchange(None)
    comm = rm._core.Comm(fine, 0, 2)  # type: ignore[arg-type]
    for _ in range(50):
        comm.look()
    assert fine.looks < 50
    with pytest.raises(rm.RankLostError, match="rank 1 is gone"):
        rm._core.Comm(Exchange(rm.RankLostError("rank 1 is gone")), 0, 2).look()  # type: ignore[arg-type]
    rm._core.Comm(lambda *ignored: [], 0, 2).look()  # type: ignore[arg-type]


class Peers:
    """The part of comm.Torch that an exchange uses."""

    def __init__(self, ended: list[int], gave_up: int | None) -> None:
        self._ended, self._gave_up, self.heard = ended, gave_up, False

    def ended(self) -> list[int]:
        return self._ended

    def who_gave_up(self) -> int | None:
        return self._gave_up


@pytest.mark.parametrize(
    "ended, gave_up, said",
    [
        ([], None, None),
        ([2], None, "lost rank 2: the process has ended"),
        ([], 1, "lost rank 1: it has aborted"),
    ],
)
def test_a_torch_group_says_who_is_lost(
    ended: list[int], gave_up: int | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comms, "ASK_S", -1.0)
    peers = Peers(ended, gave_up)
    exchange = comms._Exchange(peers, object(), 0, 3)  # type: ignore[arg-type]
    if said is None:
        exchange.look()
    else:
        with pytest.raises(rm.RankLostError, match=said):
            exchange.look()
    assert peers.heard == (said is not None)


def test_a_torch_group_that_was_left_says_so() -> None:
    with pytest.raises(rm.RankLostError, match="rank 0 has aborted or left the group"):
        comms._Exchange(Peers([], None), None, 0, 3).look()  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [5, True, [], b"/x", "", "a\0b"], ids=repr)
def test_a_library_that_is_no_path_is_refused(wrong: object) -> None:
    with pytest.raises(rm.ConfigError, match=r"library: expected None or the path .*got "):
        rm.comm.nccl(None, wrong)
