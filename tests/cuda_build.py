"""Builds what the tests of kernels/cuda run: the library with ptxas' reports, and tests/simt/check*.cpp over the fibres of
tests/simt/simt.cpp or over a GPU.

    python tests/cuda_build.py simt | gpu | library [--into DIR]      prints the path of the program or library
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from native_build import ROOT, run

SIMT = ROOT / "tests" / "simt"
INCLUDE = ["-Ikernels", "-Ikernels/cpu", "-Ikernels/cuda", f"-I{SIMT}"]
CPU_FLAGS = ["-std=c++20", "-O2", "-g1", "-mfma", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Wshadow", "-Werror"]
CPU_FLAGS += ["-Wno-unknown-pragmas", "-DRM_SIMT", "-x", "c++"]  # nvcc's pragmas mean nothing to g++


def library(into: Path) -> Path:
    run([sys.executable, "setup.py", "-q", "cuda", "--to", str(into / "cuda")], os.environ | {"ROLLMESH_WERROR": "1"})
    return into / "cuda" / "librollmesh_cuda.so"


def simt(into: Path) -> Path:
    """The kernels as C++, threads as fibres: needs no CUDA."""
    sources = [*sorted((ROOT / "kernels" / "cuda").glob("*.cu")), *sorted(SIMT.glob("simt*.cpp")), *sorted(SIMT.glob("check*.cpp"))]
    objects = []
    for source in sources:
        objects.append(into / f"{source.stem}.simt.o")
        run([os.environ.get("CXX", "g++"), *CPU_FLAGS, *INCLUDE, "-c", str(source), "-o", str(objects[-1])], dict(os.environ))
    program = into / "check_simt"
    libraries = [str(reference(into)), "-lm", "-pthread"]
    run([os.environ.get("CXX", "g++"), *map(str, objects), *libraries, "-o", str(program)], dict(os.environ))
    return program


def gpu(into: Path) -> Path:
    """The kernels as the library has them, called by the same check; beside it probe_mma, which asks the hardware what the family
    cuda_mma needs of it. Needs nvcc to build and a GPU to run."""
    objects = sorted(library(into).parent.glob("kernels/cuda/*.o"))
    program = into / "check_gpu"
    flags = ["-std=c++20", "-O2", "-fmad=false", "-ftz=true", "-Werror=all-warnings", "-Wno-deprecated-gpu-targets", *INCLUDE]
    flags += ["-gencode=arch=compute_90a,code=sm_90a"]
    made = []
    for source in (*sorted(SIMT.glob("check*.cpp")), SIMT / "gpu.cu"):
        made.append(str(into / f"{source.stem}.gpu.o"))
        run(["nvcc", *flags, "-x", "cu", "-c", str(source), "-o", made[-1]], dict(os.environ))
    oracle = str(reference(into, on_gpu=True))
    run(["nvcc", "-cudart=static", *made, *map(str, objects), oracle, "-lm", "-o", str(program)], dict(os.environ))
    run(["nvcc", *flags, "-cudart=static", str(SIMT / "probe_mma.cu"), "-o", str(into / "probe_mma")], dict(os.environ))
    return program


def reference(into: Path, on_gpu: bool = False) -> Path:
    """The reference table alone, the oracle; and as rm_table_ref_mma the same files over the sums of the family cuda_mma, whose one
    instruction is a model's, or the GPU's own."""
    cpu = ROOT / "kernels" / "cpu"
    objects = []
    for source in (*sorted(cpu.glob("ref*.c")), cpu / "fp.c", SIMT / "mma_dot.c"):
        objects.append(str(into / f"{source.stem}.o"))
        flags = ["-std=gnu11", "-O2", "-g1", "-mfma", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-Ikernels", "-Ikernels/cpu"]
        flags += ["-DRM_ON_GPU"] if on_gpu else []
        run([os.environ.get("CC", "gcc"), *flags, "-c", str(source), "-o", objects[-1]], dict(os.environ))
    mma_dot = objects.pop()
    mma = str(into / "ref_mma.o")
    parts = [name for name in objects if Path(name).name not in ("ref_dot.o", "fp.o")]
    run(["ld", "-r", *parts, mma_dot, "-o", mma], dict(os.environ))
    run(["objcopy", "--keep-global-symbol=rm_table_ref_mma", "--redefine-sym=rm_table_ref=rm_table_ref_mma", mma], dict(os.environ))
    archive = into / "libref.a"
    archive.unlink(missing_ok=True)
    run(["ar", "rcs", str(archive), *objects, mma], dict(os.environ))
    return archive


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the CUDA library or a program that checks it.")
    parser.add_argument("what", choices=("simt", "gpu", "library"))
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "cuda")
    options = parser.parse_args()
    options.into.mkdir(parents=True, exist_ok=True)
    made = {"simt": simt, "gpu": gpu, "library": library}[options.what](options.into)
    sys.stdout.write(f"{made}\n")
