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
from marks import SUMMARY

OPS = (
    *("embed", "gather_rows", "rms_norm", "gemm", "gemm_swiglu", "activate", "sigmoid_gate"),
    "head_squares",
    *("qk_rope_kv", "attention", "delta_net", "router", "permute", "static_dispatch", "combine"),
    *("lm_head", "merge_pairs", "sample", "top_logprobs", "ranks", "pack"),
)
# The ops of the family cuda_mma that differ; their oracle is the reference with that family's sums.
MMA_OPS = (
    *("embed", "gemm", "gemm_swiglu", "qk_rope_kv", "attention", "router", "lm_head", "pack"),
)
# The op chooses one of the tiles; each is compared, also where the op would not choose it.
TILES = [f"cuda_mma_tile{i}" for i in range(4)]
CASES = [
    *(("cuda_fma", op) for op in OPS),
    *(("cuda_mma", op) for op in MMA_OPS),
    *((tile, op) for tile in TILES for op in ("gemm", "gemm_swiglu")),
]
needs_nvcc = pytest.mark.skipif(
    not shutil.which("nvcc"), reason="no nvcc here: kernels/cuda not compiled"
)


@pytest.fixture(scope="module")
def check(cuda_folder: Path) -> Path:
    return cuda_build.simt(cuda_folder, "check")


@pytest.fixture(scope="module")
def checkops(cuda_folder: Path) -> Path:
    return cuda_build.simt(cuda_folder, "checkops")


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


def compare(program: Path, *words: str) -> None:
    """Runs checkops, which ends with status 3 if it compares nothing."""
    status, text = said(program, *words)
    assert status == 0, text
    assert re.search(r"^0 differences in [1-9]\d* elements", text, re.MULTILINE), text


def test_simt_gives_the_references_bits(checkops: Path, seed: int) -> None:
    """The mma kernels and the reference use a model of the instruction on sm_90
    (tests/gpu/simt/mma_model.h): this checks order, layouts and barriers."""
    compare(checkops, "--trials", "8", "--seed", str(seed))


@pytest.mark.full
@pytest.mark.parametrize(("isa", "op"), CASES)
def test_simt_gives_the_references_bits_over_many_shapes(
    checkops: Path, isa: str, op: str, seed: int
) -> None:
    compare(checkops, "--isa", isa, "--op", op, "--trials", "100", "--seed", str(seed))


def test_one_wrong_bit_is_seen(checkops: Path) -> None:
    for op in OPS:
        status, text = said(checkops, "--op", op, "--trials", "10", "--plant")
        assert status == 1, text
        assert f"again: checkops --op {op} --trial" in text


def test_touch_makes_the_same_launches_once(checkops: Path) -> None:
    """Under a memory checker, one order runs the trials that a comparison runs in two."""
    words = ("--op", "gemm", "--trials", "5", "--seed", "3", "--isa", "cuda_fma")
    found = [
        re.search(r"^(?:0 differences in )?(\d+) elements", said(checkops, *words, *more)[1], re.M)
        for more in ((), ("--touch",))
    ]
    assert found[0]
    assert found[1]
    assert found[0][1] == found[1][1]


@pytest.mark.quick(2)
@pytest.mark.parametrize("what", ["mma_places", "mma_company", "mma_model"])
def test_properties_of_the_tensor_core_kernels(check: Path, what: str, seed: int) -> None:
    """Packings, units and places are bijections; a row's bits do not depend on the rows beside it;
    the model of the instruction returns an H100's results and does not depend on the order of the
    products."""
    status, text = said(check, what, str(seed))
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
    for isa, op in CASES:
        compare(program, "--isa", isa, "--op", op, "--trials", "40", "--seed", str(seed))
    status, text = said(cuda_folder / "check_gpu", "mma_company", str(seed))
    assert status == 0, text
    status, text = said(cuda_folder / "probe_mma")
    assert status == 0, text
