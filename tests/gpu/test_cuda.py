"""Tests of kernels/cuda. On a CPU, as C++ over the fibres of tests/gpu/simt: every op must be
bit-identical to the reference over shapes around the tile widths and values of every kind, and the
shim must detect what its documentation lists. With nvcc: the library builds without a warning, does
not spill registers and loads without a driver. With a GPU: the same comparison on the hardware."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cuda_build
import pytest
from cuda_device import no_gpu
from marks import SUMMARY, full, some

# The number of cases that tests/gpu/simt/check.cpp must reach: an output of an op, in one order of
# the threads.
OPS = {
    "embed": 300,
    "gather_rows": 900,
    "rms_norm": 1000,
    "gemm": 480,
    "gemm_swiglu": 480,
    "activate": 380,
    "head_squares": 400,
    "qk_rope_kv": 1000,
    "attention": 350,
    "router": 1200,
    "permute": 800,
    "static_dispatch": 1300,
    "combine": 400,
    "lm_head": 1728,
    "merge_pairs": 580,
    "sample": 1100,
    "top_logprobs": 150,
    "ranks": 160,
    "pack": 1200,
}
# The same for the ops of the family cuda_mma that differ; the oracle is the reference with that
# family's sums.
MMA_OPS = {
    name: OPS[name]
    for name in (
        "embed",
        "gemm",
        "gemm_swiglu",
        "qk_rope_kv",
        "attention",
        "router",
        "lm_head",
        "pack",
    )
}
needs_nvcc = pytest.mark.skipif(
    not shutil.which("nvcc"), reason="no nvcc here: kernels/cuda not compiled"
)


@pytest.fixture(scope="module")
def check(cuda_folder: Path) -> Path:
    return cuda_build.simt(cuda_folder)


@pytest.fixture(scope="module")
def library(cuda_folder: Path) -> Path:
    return cuda_build.library(cuda_folder)


def said(program: Path, *words: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(program), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout


CASES = [("fma", *case) for case in OPS.items()] + [("mma", *case) for case in MMA_OPS.items()]


@pytest.mark.parametrize("share", ["few", full("all")])
@pytest.mark.parametrize(
    "family, op, least", some(CASES, lambda case: case[:2] != ("mma", "attention"), names=3)
)
def test_simt_gives_the_references_bits(
    check: Path, family: str, op: str, least: int, share: str, seed: int
) -> None:
    """The mma kernels are compared with a model of the instruction (tests/gpu/simt/mma_model.h):
    this checks order, layouts and barriers, but not the rounding of the hardware."""
    status, text = said(check, op, str(seed), family, share)
    found = re.fullmatch(r"OK cases=(\d+) elements=\d+\n", text)
    assert status == 0, text
    assert found, text
    assert int(found[1]) >= (least // 32 if share == "few" else least)


@pytest.mark.parametrize("op", ["gemm", full("sample")])
def test_touch_makes_the_same_launches_once(check: Path, op: str) -> None:
    """Under a memory checker, one order runs as many cases as the comparison runs in two."""
    found = [
        re.fullmatch(r"OK cases=(\d+) elements=\d+\n", said(check, op, "3", "fma", *words)[1])
        for words in ((), ("touch",))
    ]
    assert found[0], op
    assert found[1], op
    assert int(found[0][1]) == 2 * int(found[1][1]) > 0


@pytest.mark.parametrize("what", ["mma_places", "mma_company", full("mma_tiles")])
def test_properties_of_the_tensor_core_kernels(check: Path, what: str, seed: int) -> None:
    """Packings, units and places are bijections; a row's bits do not depend on the rows beside
    it."""
    status, text = said(check, what, str(seed), "mma")
    assert status == 0, text


@pytest.mark.parametrize(
    "fault, message",
    [
        ("barrier", "a barrier that not all threads reach"),
        ("left", "a barrier that not all threads reach"),
        ("mixed", "lanes of a warp in different operations"),
        ("mma", "lanes of a warp in different operations"),
        ("copies", "a block ended before its copies"),
        ("matrices", "a row of a matrix that is not in shared memory"),
        ("matrices_between", "a row of a matrix that is not aligned"),
        ("unasked", "a launch CUDA refuses"),
        ("shared", "access outside"),
        ("shared_end", "access outside"),
        ("buffer", "access outside"),
        ("misaligned", "an address that is not aligned"),
        ("unloaded", "past_buffer is launched before device 0 has loaded it"),
        ("race", "DIFFERS"),
        ("warp_race", "DIFFERS"),
    ],
)
def test_the_shim_catches(check: Path, fault: str, message: str) -> None:
    status, text = said(check, fault)
    assert status == (1 if message == "DIFFERS" else 3)
    assert message in text


@pytest.mark.full
@needs_nvcc
def test_no_kernel_spills(library: Path, cuda_folder: Path, pytestconfig: pytest.Config) -> None:
    """Checks each __global__ of the sources for each requested architecture, from ptxas' report.
    The summary shows the largest kernels and a file shows all, before any assertion."""
    archs = os.environ.get("ROLLMESH_CUDA_ARCHS", "sm_90a").split(",")
    sources = "".join(path.read_text() for path in cuda_build.ROOT.glob("kernels/cuda/*.cu"))
    names = re.findall(
        r"__global__ void\s(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s+)?(\w+)\(", sources
    )
    found = cuda_build.kernels(library)
    log = cuda_folder / "kernels.txt"
    log.write_text(f"{cuda_build.report(cuda_folder)}\n", encoding="utf-8")
    pytestconfig.stash[SUMMARY].append(
        f"{cuda_build.largest(found, 'sm_90a' if 'sm_90a' in archs else archs[0])} (all: {log})"
    )
    assert len(names) == sources.count("__global__") > 0
    for arch in archs:
        entries = [kernel.name for kernel in found if kernel.arch == arch]
        assert [name for name in names if not any(name in entry for entry in entries)] == []
    assert {kernel.arch for kernel in found} == set(archs)
    assert [kernel for kernel in found if kernel.stack or kernel.spilled] == []


# The floating-point operations of PTX that the contract allows: rounded to nearest even, denormal
# inputs and outputs flushed to zero, only explicit fmaf fused, no approximations. Moves,
# comparisons and selections do not round. nvcc compiles a mask over the bits to abs for sm_100,
# which flushes like the contract. A pair of bf16 is rounded as rm_f32_to_bf16 rounds values that
# are neither denormal nor NaN.
CONTRACT = re.compile(
    r"(fma|add|sub|mul|div|sqrt|rcp)\.rn\.ftz\.f32|(neg|abs|max)\.ftz\.f32|setp\.\w+\.ftz\.f32|selp\.f32|mov\.f32"
    r"|cvt\.rn\.f32\.[su](32|64)|cvt\.rn\.bf16x2\.f32|(ld|st)(\.(global|shared|param))?(\.v[24])?\.f32|mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32"
)


@pytest.mark.full
@needs_nvcc
# The oldest and newest architecture that CI compiles for, and the main target.
@pytest.mark.parametrize("arch", ["80", "90a", "100"])
def test_kernels_compute_with_the_contracts_operations_alone(tmp_path: Path, arch: str) -> None:
    """Detects what the fibres cannot show: missing flags, a contraction, an intrinsic, a double, or
    a preprocessor branch for one architecture."""
    flags = re.search(
        r"^CUDA_FLAGS = \[(.*?)\]",
        (cuda_build.ROOT / "setup.py").read_text(),
        re.MULTILINE | re.DOTALL,
    )[1]  # type: ignore[index]
    words = [word for word in re.findall(r'"([^"]*)"', flags) if not word.startswith("-Xptxas")]

    def operations(source: Path) -> set[str]:
        to = tmp_path / f"{source.stem}.ptx"
        own = [
            "-Ikernels",
            "-Ikernels/cpu",
            '-DRM_CUDA_ARCHS="ptx"',
            f"-gencode=arch=compute_{arch},code=compute_{arch}",
        ]
        subprocess.run(
            ["nvcc", *words, *own, "-ptx", str(source), "-o", str(to)],
            cwd=cuda_build.ROOT,
            check=True,
            timeout=300,
        )
        return set(
            re.findall(
                r"^\s+(?:@!?%p\d+ )?([a-z0-9_.:]*\.[fbe]\w*(?:16|32|64)(?:x2)?)\s",
                to.read_text(),
                re.MULTILINE,
            )
        )

    sources = sorted((cuda_build.ROOT / "kernels" / "cuda").glob("*.cu"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = set().union(*pool.map(operations, sources))
    floats = {name for name in found if re.search(r"\.(f|bf|e\d)\w*\d", name)}
    assert {"fma.rn.ftz.f32", "div.rn.ftz.f32"} <= floats
    assert sorted(name for name in floats if not CONTRACT.fullmatch(name)) == []


@pytest.mark.full
@needs_nvcc
def test_library_loads_without_a_driver_and_says_what_it_is(library: Path) -> None:
    needed = subprocess.run(
        ["readelf", "-d", str(library)], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    assert not re.search(r"NEEDED.*(cuda|nv)", needed), needed
    loaded = ctypes.CDLL(str(library))
    loaded.rm_cuda_archs.restype = ctypes.c_char_p
    assert loaded.rm_cuda_archs().decode() == os.environ.get("ROLLMESH_CUDA_ARCHS", "sm_90a")
    assert loaded.rm_cuda_devices() >= -1


@pytest.mark.full
@needs_nvcc
def test_gpu_gives_the_references_bits(library: Path, cuda_folder: Path, seed: int) -> None:
    program = cuda_build.gpu(cuda_folder)  # compiled in any case
    if ctypes.CDLL(str(library)).rm_cuda_devices() < 1:
        no_gpu("no GPU here: kernels/cuda was compiled, never run on hardware")
    for op, family in [(op, "fma") for op in OPS] + [
        (op, "mma") for op in (*MMA_OPS, "mma_company", "mma_tiles")
    ]:
        status, text = said(program, op, str(seed), family)
        assert status == 0, text
        assert text.startswith("OK")
    status, text = said(cuda_folder / "probe_mma")
    assert status == 0, text
