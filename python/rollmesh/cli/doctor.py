"""`rollmesh doctor`: prints the machine's hardware and libraries, the selected kernels with the
reason, and how to get missing parts. A missing optional part is reported and is not an error.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import rollmesh as rm
from rollmesh import _core, vllm
from rollmesh._core import usable_cores
from rollmesh.cli.options import INSTALL_TRAIN, TRAIN
from rollmesh.ops import isa_states
from rollmesh.runtime import cublas, nccl
from rollmesh.runtime.devices import LIBRARY_SWITCH, library_path, why_absent
from rollmesh.runtime.messages import byte_text, plain, shown

SHM_BYTES = 10 << 20  # 5 groups, 2 buffers of 1 MiB in each (ext/comm/comm.c)
TINY = {
    "model_type": "qwen3",
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # the command has no options


def run(args: argparse.Namespace) -> int:
    del args
    for title, rows in (
        ("rollmesh", _rollmesh()),
        ("processor", _processor()),
        ("kernels", _kernels()),
        ("mesh", _mesh()),
        ("training", _training()),
        ("GPU", _gpu()),
        ("vLLM", _vllm()),
    ):
        print(title)
        for name, text in rows:
            print(f"  {name:<14} {text}")
    return 0


def _rollmesh() -> list[tuple[str, str]]:
    return [
        ("version", f"{rm.__version__} in {Path(rm.__file__).parent}"),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("NumPy", np.__version__),
    ]


def _processor() -> list[tuple[str, str]]:
    allowed, present = usable_cores(), os.cpu_count() or 0
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = min(available for _, available in _core.memory_pools())
    file = Path("/proc/cpuinfo")
    text = file.read_text(encoding="utf-8") if os.access(file, os.R_OK) else ""
    model = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return [
        ("model", model[1] if model else platform.machine()),
        (
            "threads",
            f"{allowed} by default: the cores that affinity and CPU quotas leave this process, of "
            f"{present}",
        ),
        (
            "memory",
            f"{byte_text(memory)}, of which {byte_text(free)} are free and within this process's "
            "limits",
        ),
    ]


def _kernels() -> list[tuple[str, str]]:
    """Lists each instruction set with the result of kernels/cpu/select_isa.c."""
    found = _metrics_of()
    chosen = "none" if isinstance(found, str) else found["isa"]
    why = "the fastest that works here; all give the same bits, and RM_ISA can cap it"
    if cap := os.environ.get("RM_ISA"):
        why = f"capped by RM_ISA={shown(cap)}"
    rows = [("chosen", f"{chosen}: {found if isinstance(found, str) else why}")]
    for isa, (refused, emulated, one_row, many_rows) in isa_states().items():
        text = "works, in emulation" if emulated else "works, bits are ref's"
        if refused:
            text = f"no: {refused}"
        if one_row > 0:
            text += f"; {one_row:.0f} GFLOP/s at 1 row, {many_rows:.0f} at 64 (bf16, one thread)"
        rows.append((isa, f"{text}{'   <- chosen' if isa == chosen else ''}"))
    return rows


def _metrics_of(**options: Any) -> dict[str, Any] | str:
    """Returns the metrics of a tiny generator, or the error that it raises."""
    limits: dict[str, Any] = {"max_model_len": 16, "max_num_seqs": 1, "kv_cache_gib": 0.001}
    try:
        spec = rm.ModelSpec.from_hf(TINY)
        with rm.Generator(spec, threads=1, **limits, **options) as generator:
            return generator.metrics()
    except rm.Error as error:
        return plain(error)


def _mesh() -> list[tuple[str, str]]:
    """Lists the comms that ranks can use here; see rollmesh.distributed.comm."""
    return [
        ("threads", "works: all ranks in this process, the default"),
        ("shm", _shared_memory(Path("/dev/shm"))),
        ("torch", _torch_groups()),
        ("nccl", "between GPUs: see below"),
        ("deepep", "not supported"),
    ]


def _shared_memory(folder: Path) -> str:
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"no: {folder} is missing or may not be written, which rm.comm.shm needs"
    room = os.statvfs(folder)
    free, whole = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    text = (
        f"{byte_text(free)} of {byte_text(whole)} free in {folder}; a rank that is a process "
        f"takes up to {SHM_BYTES >> 20} MiB"
    )
    fits = min(free // SHM_BYTES, rm.comm.Shm.MAX_WORLD)
    return (
        f"works for up to {fits} ranks: {text}"
        if fits >= 2
        else f"no: too little room for two ranks: {text}"
    )


def _torch_groups() -> str:
    """Reads torch's library for its backends, since importing torch takes seconds."""
    version, spec = _version("torch"), importlib.util.find_spec("torch")
    if version is None or spec is None or spec.origin is None:
        return "missing: rm.comm.torch needs it (ranks on several machines); threads and shm do not"
    try:
        library = (Path(spec.origin).parent / "lib/libtorch_python.so").read_bytes()
    except OSError as error:
        return f"torch {version}; its backends are unknown: {plain(error)}"
    names = ("Gloo", "MPI", "UCC", "NCCL", "XCCL")
    built = [name for name in names if f"ProcessGroup{name}\0".encode() in library]
    return (
        f"torch {version} with {', '.join(built) or 'no backend'}; "
        f"{'rm.comm.torch works over Gloo' if 'Gloo' in built else 'no Gloo'}"
    )


def _training() -> list[tuple[str, str]]:
    rows = [(name, _version(name) or "missing") for name in TRAIN]
    if any(text == "missing" for _, text in rows):
        rows.append(
            (
                "to get them",
                f"{INSTALL_TRAIN}; without them sync, bench and generate from token ids work, "
                "`rollmesh grpo` does not",
            )
        )
    return rows


def _gpu() -> list[tuple[str, str]]:
    driver = _first_line(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    nvcc, found = _first_line(["nvcc", "--version"], last=True), _metrics_of(device="cuda")
    kernels, count = _cuda_library()
    if driver is None:
        # A container may have only the driver, and the simulated device needs neither.
        driver = "none found (nvidia-smi is absent or sees none)"
        if count > 0:
            name = library_path().name
            driver = f"{_devices(count)}, says {name}; nvidia-smi is absent or sees none"
    return [
        ("GPU", driver),
        ("nvcc", nvcc or "missing: only needed to build CUDA kernels"),
        ("NCCL", _nccl()),
        ("cuBLASLt", _cublas()),
        ("CUDA kernels", kernels),
        ('device="cuda"', f"no: {found}" if isinstance(found, str) else "works"),
    ]


def _devices(count: int) -> str:
    return f"{count} device{'' if count == 1 else 's'}"


def _nccl() -> str:
    """Returns the NCCL that would be loaded if torch has not loaded one."""
    try:
        library = nccl.find()
    except rm.ConfigError as error:
        return f"none: {plain(error)}; only needed for several GPUs"
    if library.version >= nccl.SHARES_GPU:
        return f"{library}; several ranks may have one GPU"
    return (
        f"{library}; each rank needs a GPU of its own, before "
        f"{'.'.join(map(str, nccl.SHARES_GPU))} ({nccl.INSTALL})"
    )


def _cublas() -> str:
    try:
        return f"{cublas.find()}; what fast=True would use"
    except rm.ConfigError as error:
        return f"none: {plain(error)}; only needed for fast=True"


def _cuda_library() -> tuple[str, int]:
    """Describes the CUDA library that generators use, which contains the CUDA runtime, and returns
    the number of its devices."""
    path = library_path()
    if not os.path.isfile(path) and os.environ.get(LIBRARY_SWITCH):
        return f"{LIBRARY_SWITCH}={plain(path)}: there is no such file", 0
    if not os.path.isfile(path):
        return f"not in this build, {why_absent()}", 0
    try:
        library = ctypes.CDLL(str(path))
        library.rm_cuda_archs.restype = ctypes.c_char_p
        archs, count = library.rm_cuda_archs().decode(), int(library.rm_cuda_devices())
    except (OSError, AttributeError) as error:
        return f"cannot be loaded: {plain(error)}", 0
    seen = f"{_devices(count)} here"
    if count == -1:
        seen = "no driver here, and NVIDIA's is all they need"
    elif count < 0:
        seen = "the driver here is too old, they need 580 or later"
    return f"for {archs}, in {path.name}; {seen}", count


def _vllm() -> list[tuple[str, str]]:
    """Reads packages and the environment, since importing vLLM takes seconds."""
    version, asked = vllm.installed_version(), os.environ.get("VLLM_PLUGINS")
    if version is None:
        return [
            (
                "vllm",
                f"missing: only needed to run inside vLLM's engine ({vllm.TRIED[-1]}; "
                "docs/vllm.md#install)",
            )
        ]
    fits = (
        "which rollmesh was tried with"
        if version in vllm.TRIED
        else f"expected {' or '.join(vllm.TRIED)}: no other was tried"
    )
    named = "unset" if asked is None else f"VLLM_PLUGINS={plain(asked)}"
    chosen = [name for name in (vllm.NAME, vllm.MODEL_NAME) if vllm.asked_for(name)]
    found = {point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    return [
        ("vllm", f"{version}, {fits}"),
        (
            "plugin",
            "installed"
            if vllm.NAME in found
            else "vLLM does not find it: rollmesh is on the path, but not installed",
        ),
        (
            "asked for",
            f"{' and '.join(chosen)} ({named})"
            if chosen
            else f"no: {named}; not asked for, vLLM runs as if rollmesh were not there",
        ),
        (
            "triton",
            _version("triton")
            or "missing: vLLM speaks the protocol of its V1 model runner then, which works as well",
        ),
    ]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(command: list[str], last: bool = False) -> str | None:
    """Returns the first line that a program prints, or None for a missing or failing program."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[-1 if last else 0] if lines else None
