"""Builds what the tests of kernels/cuda run: the library with ptxas' reports, and `checkops`
(tests/support/native/checkops) and `check` (tests/gpu/simt/check*.cpp) over the fibres of
tests/gpu/simt/simt.cpp or over a GPU.

    python tests/support/cuda_build.py simt | check | simt_library | gpu | library [--into DIR]
        prints the path of the program or library; simt is checkops over the fibres
    python tests/support/cuda_build.py report [--into DIR]
        prints what ptxas reports of each kernel, for each of ROLLMESH_CUDA_ARCHS
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import native_build
from native_build import ROOT, once, run

SIMT = ROOT / "tests" / "gpu" / "simt"
CHECKOPS = sorted((native_build.FOLDER / "checkops").glob("*.c"))
PROGRAMS = {
    "check": [SIMT / "check.cpp", SIMT / "check_mma.cpp", SIMT / "check_model.cpp"],
    "checkops": [
        SIMT / "checkops_cuda.cpp",
        *(path for path in CHECKOPS if path.stem not in ("cpu", "machine")),
    ],
}
INCLUDE = [
    "-Ikernels",
    "-Ikernels/cpu",
    "-Ikernels/cuda",
    f"-I{SIMT}",
    f"-I{ROOT / 'tests' / 'support'}",
    f"-I{native_build.FOLDER}",
]
CPU_FLAGS = [
    "-std=c++20",
    "-O2",
    "-g1",
    "-mfma",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Werror",
]
# -Wno-unknown-pragmas, because g++ does not know nvcc's pragmas.
CPU_FLAGS += [
    "-Wno-unknown-pragmas",
    "-DRM_SIMT",
    '-DRM_CUDA_ARCHS="simt"',
    "-fPIC",
    "-fvisibility=hidden",
    "-x",
    "c++",
]
# A GPU faults where an address is not a multiple of its word; here that is an illegal instruction.
CPU_FLAGS += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]


@functools.cache
def library(into: Path) -> Path:
    command = [sys.executable, "setup.py", "-q", "cuda", "--to", str(into / "cuda")]
    return once(
        into / "cuda" / "librollmesh_cuda.so",
        lambda: run(command, {"ROLLMESH_WERROR": "1"} | os.environ),
    )


@functools.cache
def headers(into: Path) -> list[str]:
    """Parses the standard headers once: this was half of the time of compiling forty small
    sources."""
    names = (
        "algorithm",
        "cmath",
        "cstddef",
        "cstdint",
        "cstdio",
        "cstring",
        "initializer_list",
        "memory",
        "vector",
    )
    header = into / "standard.h"
    flags = ["c++-header" if flag == "c++" else flag for flag in CPU_FLAGS]

    def make() -> None:
        header.write_text("".join(f"#include <{name}>\n" for name in names))
        run(
            [os.environ.get("CXX", "g++"), *flags, str(header), "-o", f"{header}.gch"],
            dict(os.environ),
        )

    once(into / "standard.h.gch", make)
    return ["-include", str(header)]


@functools.cache
def simt_object(into: Path, source: Path) -> str:
    target = into / f"{source.stem}.simt.o"
    command = [
        os.environ.get("CXX", "g++"),
        *CPU_FLAGS,
        *INCLUDE,
        *headers(into),
        "-c",
        str(source),
        "-o",
        str(target),
    ]
    return str(once(target, lambda: run(command, dict(os.environ))))


def simt_objects(into: Path, sources: list[Path]) -> list[str]:
    headers(into)  # before the threads
    with ThreadPoolExecutor(int(os.environ.get("ROLLMESH_JOBS", "0")) or os.cpu_count()) as pool:
        return list(pool.map(lambda source: simt_object(into, source), sources))


def simt_sources() -> list[Path]:
    return [*sorted((ROOT / "kernels" / "cuda").glob("*.cu")), *sorted(SIMT.glob("simt*.cpp"))]


def c_object(into: Path, source: Path, *flags: str) -> str:
    """Compiles a source of checkops, or one of the reference."""
    target = into / f"{source.stem}.o"
    words = [*native_build.FLAGS, "-mfma", "-fno-math-errno", "-fPIC", *INCLUDE, *flags]
    command = [*native_build.compiler(), *words, "-c", str(source), "-o", str(target)]
    return str(once(target, lambda: run(command, dict(os.environ))))


@functools.cache
def simt(into: Path, name: str = "check") -> Path:
    """Builds `check` or `checkops` over the kernels as C++ with threads as fibres: does not need
    CUDA."""
    own = PROGRAMS[name]
    objects = simt_objects(into, [*simt_sources(), *(p for p in own if p.suffix == ".cpp")])
    objects += [c_object(into, path) for path in own if path.suffix == ".c"]
    target = into / f"{name}_simt"
    link = [os.environ.get("CXX", "g++"), *objects, str(reference(into)), "-lm", "-pthread"]
    return once(target, lambda: run([*link, "-o", str(target)], dict(os.environ)))


@functools.cache
def simt_library(into: Path) -> Path:
    """Builds a replacement for librollmesh_cuda.so on machines without a GPU. It exports the same
    functions over the same kernels and uses the CUDA runtime of tests/gpu/simt, so code that loads
    the real library can load this one."""
    target = into / "librollmesh_simt.so"
    flags = ["-shared", "-pthread", "-Wl,-z,noexecstack,-z,defs"]

    def make() -> None:
        objects = simt_objects(into, simt_sources())
        link = [os.environ.get("CXX", "g++"), *flags, *objects, "-lm", "-o", str(target)]
        run(link, dict(os.environ))

    return once(target, make)


def gpu(into: Path) -> Path:
    """Builds checkops_gpu and check_gpu over the kernels as in the library; also probe_mma, which
    tests the hardware properties that the family cuda_mma relies on, bench_mma, which times ops one
    by one, and bench_wgmma, which measures the gain from wgmma. Needs nvcc to build and a GPU to
    run. Returns checkops_gpu."""
    objects = sorted(library(into).parent.glob("kernels/cuda/*.o"))
    flags = [
        "-std=c++20",
        "-O2",
        "-fmad=false",
        "-ftz=true",
        "-Wno-deprecated-gpu-targets",
        *INCLUDE,
    ]
    if os.environ.get("ROLLMESH_WERROR", "1") == "1":
        flags.append("-Werror=all-warnings")
    for arch in os.environ.get("ROLLMESH_CUDA_ARCHS", "sm_90a").split(","):
        flags.append(f"-gencode=arch=compute_{arch.removeprefix('sm_')},code={arch}")
    own = {path for paths in PROGRAMS.values() for path in paths if path.suffix == ".cpp"}
    made = {path: str(into / f"{path.stem}.gpu.o") for path in [*sorted(own), SIMT / "gpu.cu"]}
    alone = [[str(SIMT / "probe_mma.cu"), "-o", str(into / "probe_mma")]]
    alone += [
        [str(SIMT / f"{name}.cu"), *map(str, objects), "-o", str(into / name)]
        for name in ("bench_mma", "bench_wgmma")
    ]
    commands = [
        ["nvcc", *flags, "-x", "cu", "-c", str(source), "-o", to] for source, to in made.items()
    ]
    commands += [["nvcc", *flags, "-cudart=static", *words] for words in alone]
    with ThreadPoolExecutor(int(os.environ.get("ROLLMESH_JOBS", "0")) or os.cpu_count()) as pool:
        list(pool.map(lambda command: run(command, dict(os.environ)), commands))
    shared = [made[SIMT / "gpu.cu"], *map(str, objects), str(reference(into, on_gpu=True)), "-lm"]
    for name, paths in PROGRAMS.items():
        parts = [made.get(path) or c_object(into, path) for path in paths]
        to = str(into / f"{name}_gpu")
        run(["nvcc", "-cudart=static", *parts, *shared, "-o", to], dict(os.environ))
    return into / "checkops_gpu"


@functools.cache
def reference(into: Path, on_gpu: bool = False) -> Path:
    """Builds the reference table, the oracle; and as rm_table_ref_mma the same files with the sums
    of the family cuda_mma, whose one instruction is a model's, or the GPU's own."""
    cpu = ROOT / "kernels" / "cpu"
    at = into / ("reference_gpu" if on_gpu else "reference")
    archive = at / "libref.a"

    def make() -> None:
        parts = [c_object(at, path) for path in (*sorted(cpu.glob("ref*.c")), cpu / "fp.c")]
        mma = str(at / "ref_mma.o")
        mma_dot = c_object(at, SIMT / "mma_dot.c", *(["-DRM_ON_GPU"] if on_gpu else []))
        shared = ("ref_dot.o", "fp.o")
        run(
            ["ld", "-r", *(p for p in parts if Path(p).name not in shared), mma_dot, "-o", mma],
            dict(os.environ),
        )
        symbols = ["--keep-global-symbol=rm_table_ref_mma"]
        symbols += ["--redefine-sym=rm_table_ref=rm_table_ref_mma"]
        run(["objcopy", *symbols, mma], dict(os.environ))
        archive.unlink(missing_ok=True)
        run(["ar", "rcs", str(archive), *parts, mma], dict(os.environ))

    return once(archive, make)


class Kernel(NamedTuple):
    """One entry function for one architecture, as ptxas reports it. `shared` omits shared memory
    whose size is set at launch."""

    source: str
    name: str
    arch: str
    registers: int
    stack: int
    spilled: int  # bytes stored and bytes loaded
    shared: int


def kernels(built: Path) -> list[Kernel]:
    """Returns the kernels of the library `built`, in the order of its sources."""
    found = []
    for path in sorted(built.parent.glob("kernels/cuda/*.ptxas")):
        for entry in path.read_text().split("Compiling entry function ")[1:]:
            name, arch = re.match(r"'(\w+)' for '(\w+)'", entry).groups()
            stack, stores, loads = re.search(
                r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", entry
            ).groups()
            registers, shared = (
                re.search(r"Used (\d+) registers", entry)[1],
                re.search(r"(\d+) bytes smem", entry),
            )
            figures = (
                int(registers),
                int(stack),
                int(stores) + int(loads),
                int(shared[1]) if shared else 0,
            )
            found.append(Kernel(path.stem, name, arch, *figures))
    return found


def largest(found: list[Kernel], arch: str, most: int = 3) -> str:
    """Returns one line: the number of kernels for `arch`, those with the most registers and with
    the most shared memory, and all that spill or use a stack."""
    here = [k for k in found if k.arch == arch]
    parts = [f"{arch}: {len(here)} kernels"]
    static = "bytes of shared memory, but for what launches ask for"
    for title, figure in (("registers", lambda k: k.registers), (static, lambda k: k.shared)):
        top = [k for k in sorted(here, key=figure, reverse=True)[:most] if figure(k)]
        parts.append(f"most {title}: {_listed(top, figure)}")
    spilled = [k for k in here if k.spilled or k.stack]
    parts.append(
        f"spills or a stack: {_listed(spilled, lambda k: f'{k.spilled} and {k.stack} bytes')}"
    )
    return "; ".join(parts)


def _listed(found: list[Kernel], figure: Callable[[Kernel], object]) -> str:
    names = demangled([k.name for k in found])
    return ", ".join(f"{k.source} {name} {figure(k)}" for k, name in zip(found, names)) or "none"


def report(into: Path) -> str:
    """Returns a line for each kernel with a column for each architecture: registers, then nonzero
    bytes of stack, spills and shared memory."""
    found = kernels(library(into))
    archs, names = (
        list(dict.fromkeys(k.arch for k in found)),
        list(dict.fromkeys((k.source, k.name) for k in found)),
    )
    of = {(k.source, k.name, k.arch): k for k in found}
    plain = dict(zip(names, demangled([name for _, name in names])))
    width = max(len(text) for text in plain.values())
    lines = [f"{'':16} {'kernel':{width}} " + " ".join(f"{arch:>16}" for arch in archs)]
    for source, name in names:
        cells = []
        for arch in archs:
            k = of.get((source, name, arch))
            extra = (
                [
                    f"{bytes_}{letter}"
                    for bytes_, letter in ((k.stack, "st"), (k.spilled, "sp"), (k.shared, "sh"))
                    if bytes_
                ]
                if k
                else []
            )
            cells.append(f"{' '.join([*extra, str(k.registers) if k else '-']):>16}")
        lines.append(f"{source:16} {plain[source, name]:{width}} {' '.join(cells)}")
    return "\n".join(lines)


def demangled(names: list[str]) -> list[str]:
    """Returns the names without arguments and namespaces, or unchanged if c++filt is not
    installed."""
    if not shutil.which("c++filt"):
        return names
    done = subprocess.run(
        ["c++filt"], input="\n".join(names), stdout=subprocess.PIPE, text=True, check=True
    )
    return [
        re.sub(
            r"^void |\(anonymous namespace\)::|_GLOBAL__N_\w+::|\(rm_dtype\)", "", line
        ).partition("(")[0]
        for line in done.stdout.splitlines()
    ]


MAKES: dict[str, Callable[[Path], object]] = {
    "simt": lambda into: simt(into, "checkops"),
    "check": simt,
    "simt_library": simt_library,
    "gpu": gpu,
    "library": library,
    "report": report,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Build the CUDA library or a program that checks it."
    )
    parser.add_argument("what", choices=tuple(MAKES))
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "cuda")
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    made = MAKES[options.what](options.into)
    sys.stdout.write(f"{made}\n")
