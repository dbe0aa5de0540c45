"""rm.Generator(fast=True): dense gemms by cuBLASLt. Runs on the simulated device of tests/gpu/simt
and the stand-in for the library of tests/support/native/standin, which has one algorithm whose sums
depend on the number of rows and one whose sums do not; on a GPU with the real cuBLASLt.

Oracle: NumPy in float64 for a gemm. For a model, its float32 generator on the CPU; the distance
between that and the bf16 generator measures the effect of rounding. Bounds: for a gemm, k·ε of
float32 plus the stand-in's truncation (2⁻¹⁰) of Σ|x·w|, then bf16's rounding; for logprobs, a few
times that distance (`close`); equality for everything that is not a sum.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cuda_device
import helpers
import numpy as np
import pytest
import vendor_gemm
from marks import full
from native_build import ROOT, cublas_standin
from paths import SUPPORT
from test_cuda_engine import DENSE, MOE, PARAMS, PROMPTS, told

import rollmesh as rm
from rollmesh import _core
from rollmesh.runtime import cublas
from rollmesh.runtime.devices import LIBRARY_SWITCH, library_path

sys.path.insert(0, str(ROOT))

from benchmarks import gpu_gemm, shapes
from benchmarks.card import Card

Make = Callable[..., rm.Generator]
CONFIGS = {
    "dense": DENSE,
    "bias": helpers.tiny_config(attention_bias=True),
    "tied": helpers.tiny_config(tie_word_embeddings=True),
    "moe": MOE,
    "mixed": helpers.tiny_config(moe=True, mlp_only_layers=[0]),
}
SEQUENCES = helpers.prompts(DENSE, [5, 17, 33, 40, 64], seed=3)
SPLIT_CUTS = 2.0**-10
F32, BF16 = 2.0**-24, 2.0**-8  # the largest relative errors of one rounding


@pytest.fixture(scope="module")
def where(simt_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment for a GPU and the real cuBLASLt, or for the stand-ins of both."""
    real = library_path()
    has_gpu = real.exists() and _core.cuda_count(str(real)) > 0
    if not has_gpu and os.environ.get("RM_NEEDS_GPU"):
        cuda_device.no_gpu(f"no GPU here, or no {real}")
    if not has_gpu and shutil.which("gcc") is None:
        pytest.skip("needs a GPU or a C compiler")
    if has_gpu:
        found = {cublas.LIBRARY_SWITCH: cublas.find().path}
    else:
        found = {
            LIBRARY_SWITCH: str(simt_library),
            cublas.LIBRARY_SWITCH: str(cublas_standin(tmp_path_factory.mktemp("cublas"))),
        }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in found.items():
            patch.setenv(name, value)
        yield found


@pytest.fixture(autouse=True)
def library(where: dict[str, str]) -> Iterator[Path]:
    """All handles that a test makes in the stand-in must be destroyed."""
    loaded = None if LIBRARY_SWITCH not in where else ctypes.CDLL(where[cublas.LIBRARY_SWITCH])
    before = loaded and loaded.standin_cublas_alive()
    yield Path(where.get(LIBRARY_SWITCH, library_path()))
    assert before == (loaded and loaded.standin_cublas_alive())


@pytest.fixture
def standin(where: dict[str, str]) -> None:
    if LIBRARY_SWITCH not in where:
        pytest.skip("a stand-in's settings mean nothing to cuBLASLt")


@pytest.fixture
def make(make: Make) -> Make:
    def one(
        config: helpers.Config = DENSE, device: str = "cuda", seed: int | None = 1, **changes: Any
    ) -> rm.Generator:
        generator = make(config, device, **{"fast": device != "cpu", **changes})
        if seed is not None:
            generator.sync_weights(helpers.numpy_state_dict(config, seed=seed), cast=True)
        return generator

    return one


@pytest.fixture
def device(library: Path) -> Iterator[cuda_device.Device]:
    with cuda_device.Library(library).open() as opened:
        yield opened


def bf16(values: np.ndarray) -> np.ndarray:
    """Words, rounded to nearest even."""
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)


def f64(words: np.ndarray) -> np.ndarray:
    return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


# ------------------------------------------------------------------------------------------ gemms
class Operands:
    """x [most][k], W and a bias on the device, and the same as float64."""

    def __init__(self, device: cuda_device.Device, shape: vendor_gemm.Shape, most: int):
        rng = np.random.default_rng([shape.n, shape.k])
        rows = shape.n * (2 if shape.swiglu else 1)
        words = [
            bf16(rng.standard_normal(size, np.float32))
            for size in ((most, shape.k), (rows, shape.k), (rows,))
        ]
        self.device, self.shape, self.rows = device, shape, rows
        self.x, self.w, self.bias = (self.there(array) for array in words)
        x, w, bias = (f64(array) for array in words)
        self.exact, self.scale = (
            x @ w.T + (bias if shape.has_bias else 0.0),
            np.abs(x) @ np.abs(w).T + np.abs(bias),
        )
        self.y = device.alloc(most * rows * 2)

    def there(self, array: np.ndarray) -> int:
        block = self.device.alloc(array.nbytes)
        self.device.write(block, array.tobytes())
        return block

    def multiplied(
        self, opened: vendor_gemm.VendorGemm, m: int, shape: vendor_gemm.Shape | None = None
    ) -> np.ndarray:
        shape = shape or self.shape
        opened.multiply(shape, self.y, self.x, self.w, m, self.bias if shape.has_bias else 0)
        return np.frombuffer(self.device.read(self.y, m * shape.n * 2), np.uint16).reshape(
            m, shape.n
        )


@pytest.mark.parametrize("choice", [vendor_gemm.FREE, vendor_gemm.PINNED])
@pytest.mark.parametrize(
    "shape",
    [vendor_gemm.Shape(*size) for size in ((48, 40), (8, 8, True), (96, 64, True), (31, 16))],
)
def test_a_gemm_is_one(
    device: cuda_device.Device, where: dict[str, str], shape: vendor_gemm.Shape, choice: int
) -> None:
    most = 33
    if shape.n % 8 and LIBRARY_SWITCH not in where:
        pytest.skip("cuBLASLt itself may have no algorithm for rows that are not aligned")
    with vendor_gemm.opened(device, where[cublas.LIBRARY_SWITCH], [shape], most, choice) as opened:
        assert (
            opened.version
            == cublas.find().version[0] * 10000
            + cublas.find().version[1] * 100
            + cublas.find().version[2]
        )
        operands = Operands(device, shape, most)
        for m in (1, 2, 3, 15, 16, 17, 32, 33):
            error = np.abs(f64(operands.multiplied(opened, m)) - operands.exact[:m])
            assert np.all(
                error
                <= ((shape.k + 8) * F32 + SPLIT_CUTS) * operands.scale[:m]
                + BF16 * np.abs(operands.exact[:m])
                + 1e-30
            ), m


@pytest.mark.parametrize("rows_at_once", [1, 5, 33])
def test_gate_and_up_become_one(
    device: cuda_device.Device,
    where: dict[str, str],
    standin: None,
    monkeypatch: pytest.MonkeyPatch,
    rows_at_once: int,
) -> None:
    """The workspace limits the number of rows at once. The oracle is computed from the gemm alone,
    with the algorithm that does not depend on the number of rows."""
    monkeypatch.setenv("STANDIN_CUBLAS_FIRST", "whole")
    shape, both, most = vendor_gemm.Shape(131, 32, swiglu=True), vendor_gemm.Shape(262, 32), 33
    room = 4 * shape.n * rows_at_once
    with vendor_gemm.opened(
        device, where[cublas.LIBRARY_SWITCH], [shape, both], most, room=room
    ) as opened:
        operands = Operands(device, shape, most)
        for m in (1, 16, 33):
            sums = f64(operands.multiplied(opened, m, both))
            gate, up = sums[:, : shape.n], sums[:, shape.n :]
            wanted = gate / (1 + np.exp(-gate)) * up
            assert np.all(
                np.abs(f64(operands.multiplied(opened, m)) - wanted)
                <= 2.1 * BF16 * np.abs(wanted) + 1e-30
            ), m


@pytest.mark.parametrize("first, choice, differs", [
    ("split", "pinned", True), ("split", "free", True), ("split", "promised", False),
    ("whole", "pinned", False), ("whole", "free", False),
])  # fmt: skip
def test_the_check_tells_an_algorithm_that_depends_on_the_rows(
    device: cuda_device.Device,
    library: Path,
    standin: None,
    monkeypatch: pytest.MonkeyPatch,
    first: str,
    choice: str,
    differs: bool,
) -> None:
    monkeypatch.setenv("STANDIN_CUBLAS_FIRST", first)
    monkeypatch.setattr(gpu_gemm, "CHOICES", {choice: gpu_gemm.CHOICES[choice]})
    monkeypatch.setattr(gpu_gemm, "TIMES", 1)
    shape = shapes.qwen3(
        "tiny", hidden=64, layers=1, heads=2, kv_heads=1, head_dim=32, vocab=64, intermediate=64
    )
    found = gpu_gemm.findings(
        Card(cuda_device.Library(library), device), shape, [1, 2, 3, 4, 9, 20], [1, 20]
    )
    asked = [one for one in found if one.tried]
    assert [one.name for one in asked] == ["qkv", "o", "gate_up", "down"]
    for one in asked:  # of SPLIT's calls those of 4 columns and more are alike
        assert (one.differing, one.tried) == (3 if differs else 0, 6), one
        assert set(one.seconds) == {1, 20}
    assert len(found) == 2 * len(asked)  # beside each the family cuda_mma's


@pytest.mark.parametrize("settings, choice, says", [
    ({"STANDIN_CUBLAS_VERSION": "110805"}, vendor_gemm.FREE, r"^.*expected cuBLASLt 12\.0 or "
                                                             r"later, got \S+ of version "
                                                             r"11\.8\.5$"),
    ({"STANDIN_CUBLAS_CREATE": "3"}, vendor_gemm.FREE, r"^cublasLtCreate: a failure$"),
    ({"STANDIN_CUBLAS_NONE": "4"}, vendor_gemm.FREE, r"^cuBLASLt has no algorithm for rows=4 n=16 "
                                                     r"k=8: not supported$"),
    ({"STANDIN_CUBLAS_NONE": "20"}, vendor_gemm.PINNED, r"^cuBLASLt has no algorithm for rows=20 "
                                                        r"n=16 k=8"),
    ({"STANDIN_CUBLAS_OLD": "1"}, vendor_gemm.INVARIANT, r"^expected a cuBLASLt with batch "
                                                         r"invariance, got one without$"),
])  # fmt: skip
def test_why_a_library_cannot_be_opened(
    device: cuda_device.Device, where: dict[str, str], standin: None,
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str],
    choice: int, says: str,
) -> None:  # fmt: skip
    path, shapes = where[cublas.LIBRARY_SWITCH], [vendor_gemm.Shape(16, 8)]
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(vendor_gemm.Refused, match=says),
        vendor_gemm.opened(device, path, shapes, 20, choice),
    ):
        pass


def test_one_algorithm_is_pinned_by_the_most_rows(
    device: cuda_device.Device,
    where: dict[str, str],
    standin: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The library is only asked for an algorithm for the largest number of rows."""
    monkeypatch.setenv("STANDIN_CUBLAS_NONE", "4")
    shape = vendor_gemm.Shape(16, 8)
    with vendor_gemm.opened(
        device, where[cublas.LIBRARY_SWITCH], [shape], 20, vendor_gemm.PINNED
    ) as opened:
        operands = Operands(device, shape, 20)
        assert np.any(operands.multiplied(opened, 4))
        assert device.wait() == cuda_device.OK


def test_what_the_door_refuses(
    device: cuda_device.Device, where: dict[str, str], tmp_path: Path
) -> None:
    shape = vendor_gemm.Shape(16, 8, swiglu=True)
    nothing = tmp_path / "libcublasLt.so.13"
    nothing.write_text("not a library")
    for library, says in (
        (str(nothing), "cuBLASLt cannot be loaded: .*invalid ELF header|file too short"),
        (
            ctypes.util.find_library("c") or "",
            "^expected cuBLASLt 12.0 or later, got .* without cublasLtGetVersion",
        ),
    ):
        with (
            pytest.raises(vendor_gemm.Refused, match=says),
            vendor_gemm.opened(device, library, [shape], 4),
        ):
            pass


def test_a_shape_that_was_not_named_ends_the_device(
    device: cuda_device.Device, where: dict[str, str], standin: None
) -> None:
    shape = vendor_gemm.Shape(16, 8)
    with vendor_gemm.opened(device, where[cublas.LIBRARY_SWITCH], [shape], 4) as opened:
        operands = Operands(device, shape, 8)
        opened.multiply(shape, operands.y, operands.x, operands.w, 5)
        assert device.wait() == cuda_device.FAULT
        assert device.message() == "a gemm of a shape that was not given at open"


def header() -> Path:
    """cublasLt.h of the wheel nvidia-cublas, or of CUDA; otherwise the test is skipped."""
    wheel = (
        Path(cublas.find().path).parents[1] / "include"
        if not os.environ.get(cublas.LIBRARY_SWITCH)
        else None
    )
    for folder in (
        wheel,
        Path("/usr/local/cuda/include"),
        *(Path(path) / "nvidia" / "cu13" / "include" for path in sys.path),
    ):
        if folder and (folder / "cublasLt.h").exists():
            return folder
    pytest.skip("needs cublasLt.h: pip install nvidia-cublas")


@pytest.mark.parametrize("plant", ["", "SAME(RM_LT_EPILOGUE, 8);\n"])
def test_declarations_are_the_headers(tmp_path: Path, plant: str) -> None:
    folder = header()
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc, which knows where CUDA's headers are")
    source = tmp_path / "cublaslt_header.c"
    source.write_text((SUPPORT / "native" / "standin" / "cublaslt_header.c").read_text() + plant)
    younger = (
        ["-DCHECK_INVARIANCE"]
        if "BATCH_INVARIANCE_FLAGS" in (folder / "cublasLt.h").read_text()
        else []
    )
    command = [
        "nvcc",
        "-c",
        "-Xcompiler=-std=gnu11",
        *younger,
        f"-I{folder}",
        f"-I{ROOT / 'kernels'}",
        "-o",
        str(tmp_path / "header.o"),
    ]
    done = subprocess.run(
        [*command, str(source)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode == 0) == (not plant), done.stderr
    assert ("static assertion failed" in done.stderr) == bool(plant)


# ------------------------------------------------------------------------------------ a generator
def distance(one: list[np.ndarray], other: list[np.ndarray]) -> np.ndarray:
    """Returns the largest and the mean difference of all logprobs."""
    all_of = np.abs(np.concatenate(one) - np.concatenate(other))
    return np.array([all_of.max(), all_of.mean()])


def close(make: Make, config: helpers.Config, scores: list[np.ndarray]) -> None:
    """Both bf16 generators round the same gemms and activations equally often, so each differs from
    float32 by about the same. The mean of 154 logprobs may be at most twice the other's, 3 times
    with the stand-in's truncation; the maximum, in which an expert may be chosen differently, 6
    times. A misplaced matrix gives a difference as large as other weights do."""
    exact = make(config, "cpu", dtype="float32").score(SEQUENCES)
    rounding = distance(make(config, "cpu").score(SEQUENCES), exact)
    others = distance(make(config, "cpu", seed=2).score(SEQUENCES), exact)
    assert np.all(distance(scores, exact) <= [6, 3] * rounding)
    assert 3 * 3 * rounding[1] < others[1]


@pytest.mark.parametrize("name", CONFIGS)
def test_values_are_close_and_the_rest_is_the_cpus(make: Make, name: str) -> None:
    config = CONFIGS[name]
    state = helpers.numpy_state_dict(config, seed=1)
    fast, cpu = make(config, seed=None), make(config, "cpu", seed=None)
    assert fast.sync_weights(state, cast=True).digest == cpu.sync_weights(state, cast=True).digest
    assert fast.manifest() == cpu.manifest()
    close(make, config, fast.score(SEQUENCES))
    captured = [dataclasses.replace(p, kept_tokens=False) for p in PARAMS[:3]]
    outputs = fast.generate(PROMPTS[:3], captured, use_tqdm=False)
    assert [len(o.outputs) for o in outputs] == [p.n for p in captured]
    assert fast.metrics()["graph_replays"] > 0


@pytest.mark.parametrize("isa", ["cuda_fma", "cuda_mma"])
def test_the_other_ops_are_a_family_of_choice(make: Make, isa: str) -> None:
    fast = make(isa=isa)
    assert fast.metrics()["family"].startswith(isa)
    close(make, DENSE, fast.score(SEQUENCES))


def test_what_it_is_is_said(make: Make, where: dict[str, str]) -> None:
    fast, slow = make(), make(fast=False)
    about = fast.metrics()
    assert about["family"].startswith("cuda_mma_sm")
    assert not about["invariant"]
    version, path = ".".join(map(str, cublas.find().version)), where[cublas.LIBRARY_SWITCH]
    assert about["cublas"] == f"{version}, as ROLLMESH_CUBLASLT_LIBRARY says ({path})"
    assert all(
        sample.contract is None
        for o in fast.generate(PROMPTS, PARAMS, use_tqdm=False)
        for sample in o.outputs
    )
    assert (slow.metrics()["cublas"], slow.metrics()["invariant"], slow.metrics()["family"]) == (
        None,
        True,
        "cuda_fma",
    )
    contract = slow.generate([[5]], use_tqdm=False)[0].outputs[0].contract
    assert contract is not None
    assert contract.family == "cuda_fma"


@pytest.mark.parametrize("first", ["whole", "split"])
def test_company_changes_bits_only_where_the_library_lets_it(
    make: Make, standin: None, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """The case that `invariant` excludes: with SPLIT a single row gets different sums."""
    monkeypatch.setenv("STANDIN_CUBLAS_FIRST", first)
    fast = make(enable_prefix_caching=False, max_num_batched_tokens=3)
    eager = make(enable_prefix_caching=False, max_num_batched_tokens=3, enforce_eager=True)
    params = [rm.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 3
    among = fast.generate([[3], [4], [5]], params, use_tqdm=False)[0].outputs[0].logprobs
    alone = fast.generate([[3]], params[:1], use_tqdm=False)[0].outputs[0].logprobs
    assert np.array_equal(among, alone) == (first == "whole")
    if first == "whole":
        assert fast.metrics()["graph_replays"] > 0 == eager.metrics()["graph_replays"]
        assert np.array_equal(
            eager.generate([[3], [4], [5]], params, use_tqdm=False)[0].outputs[0].logprobs, among
        )


@pytest.mark.parametrize("name, per_forward", [("dense", 8), ("bias", 8), ("moe", 4), ("mixed", 6)])
def test_all_dense_gemms_are_the_librarys(
    make: Make, standin: None, monkeypatch: pytest.MonkeyPatch, name: str, per_forward: int
) -> None:
    """The fault is set on the last call of the first forward and is reported; with one call more it
    is on the second forward's first call."""
    monkeypatch.setenv("STANDIN_CUBLAS_FAIL", f"{per_forward}:13")
    with pytest.raises(rm.DeviceError, match="cublasLtMatmul: a failure"):
        make(CONFIGS[name]).score([[3, 1, 2]])
    monkeypatch.setenv("STANDIN_CUBLAS_FAIL", f"{per_forward + 1}:13")
    second = make(CONFIGS[name], enable_prefix_caching=False)
    second.score([[3, 1, 2]])
    with pytest.raises(rm.DeviceError, match="cublasLtMatmul: a failure"):
        second.score([[3, 1, 2]])


def test_a_failure_in_a_recording_is_an_error(
    make: Make, standin: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs a prefill, a decode step that is run, and a decode step that is recorded."""
    monkeypatch.setenv("STANDIN_CUBLAS_FAIL", f"{8 * 2 + 3}:13")
    fast = make()
    with pytest.raises(rm.DeviceError, match="cublasLtMatmul: a failure"):
        fast.generate([[3, 1, 2]], rm.SamplingParams(max_tokens=9, ignore_eos=True), use_tqdm=False)


def test_a_failure_in_a_spoilt_recording_is_none(
    make: Make, standin: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's error for a recording that another thread has invalidated. The step is enqueued
    instead."""
    params = rm.SamplingParams(max_tokens=9, ignore_eos=True, seed=1)
    whole = told(make().generate([[3, 1, 2]], params, use_tqdm=False))
    monkeypatch.setenv("STANDIN_CUBLAS_FAIL", f"{8 * 2 + 3}:13")
    monkeypatch.setenv("ROLLMESH_SIMT_SPOIL", "2")
    fast = make()
    assert told(fast.generate([[3, 1, 2]], params, use_tqdm=False)) == whole
    assert fast.metrics()["graph_replays"] == 6


def bits_of(generator: rm.Generator) -> Any:
    generator.reset_prefix_cache()
    return told(generator.generate(PROMPTS, PARAMS, use_tqdm=False)), [
        score.tobytes() for score in generator.score(SEQUENCES)
    ]


@pytest.mark.parametrize("mode", [full("staged"), "inplace"])
def test_syncs_that_fail_leave_the_old_weights_and_others_serve(make: Make, mode: Any) -> None:
    fast, fresh = make(seed=1), make(seed=2)
    old = bits_of(fast)
    broken = helpers.numpy_state_dict(DENSE, seed=2)
    broken["model.layers.1.mlp.up_proj.weight"] = broken["model.layers.1.mlp.up_proj.weight"].copy()
    broken["model.layers.1.mlp.up_proj.weight"][95, 63] = np.nan
    with pytest.raises(rm.NonFiniteError, match=r"up_proj.weight: element \[95, 63\]"):
        fast.sync_weights(broken, cast=True)
    assert bits_of(fast) == old
    new = bits_of(fresh)[1]
    assert new != old[1]
    for seed in (2, 1, 2):  # both blocks of the store alternately, with the recordings of each
        fast.sync_weights(helpers.numpy_state_dict(DENSE, seed=seed), cast=True, mode=mode)
        assert bits_of(fast)[1] == (new if seed == 2 else old[1])


def test_its_workspace_is_counted(make: Make) -> None:
    fast, slow = make(), make(fast=False, isa="cuda_mma")
    more = fast.metrics()["workspace_bytes"] - slow.metrics()["workspace_bytes"]
    assert (
        vendor_gemm.LIBRARY_BYTES + 4 * 96 * 32
        <= more
        < vendor_gemm.LIBRARY_BYTES + 4 * 96 * 32 + 4096
    )


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("parallel", [False, True], ids=["tp", "tp-sp"])
def test_ranks_that_are_threads(make: Make, config: helpers.Config, parallel: bool) -> None:
    mesh = make(config, mesh=rm.Mesh(tp=2), sequence_parallel=parallel)
    assert mesh.metrics()["invariant"] is False
    close(make, config, mesh.score(SEQUENCES))


def test_the_self_test_holds_it_to_its_threshold(make: Make) -> None:
    """The self-test has a bound instead of equality, so the generator can serve; here the bound is
    wider, for the stand-in's truncation."""
    fast, exact = make(), make(DENSE, "cpu", dtype="float32")
    assert 0.0 < fast.self_test(exact.score, threshold=0.3).max_abs_diff <= 0.3
    other = make(DENSE, "cpu", dtype="float32", seed=2)
    with pytest.raises(rm.NumericsError):
        fast.self_test(other.score, threshold=0.3)


# ---------------------------------------------------------------------------------- which library
@pytest.mark.parametrize("how, says", [
    ({"device": "cpu"}, r"^fast = True: expected device = 'cuda' .*, got 'cpu'$"),
    ({"dtype": "float32"}, r"^fast = True: expected dtype = 'bfloat16', got 'float32'$"),
    ({"fast": 1}, r"^fast: expected a bool, got 1$"),
    ({"fast": "yes"}, r"^fast: expected a bool, got 'yes'$"),
])  # fmt: skip
def test_where_fast_means_nothing_it_is_refused(make: Make, how: dict[str, Any], says: str) -> None:
    with pytest.raises(rm.ConfigError, match=says):
        make(**{"fast": True, "seed": None} | how)


def test_without_the_library_the_refusal_says_what_is_missing(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(cublas.LIBRARY_SWITCH, str(tmp_path / "nowhere.so"))
    with pytest.raises(
        rm.ConfigError,
        match=r"^fast = True: expected a cuBLASLt that can be loaded, got .*nowhere\.so: .*No "
        r"such file",
    ):
        make(seed=None)
    monkeypatch.setenv(cublas.LIBRARY_SWITCH, ctypes.util.find_library("c") or "")
    with pytest.raises(
        rm.ConfigError,
        match=r"^fast = True: expected a cuBLASLt that can be loaded, got .*cublasLtGetVersion",
    ):
        make(seed=None)
    monkeypatch.delenv(cublas.LIBRARY_SWITCH)
    monkeypatch.setattr(cublas.libraries, "candidates", lambda *_: iter(()))
    install = r"\(pip install '\.\[cuda\]' in rollmesh's checkout\)"
    with pytest.raises(
        rm.ConfigError, match=rf"^fast = True: expected libcublasLt.so, .*got none {install}$"
    ):
        make(seed=None)


def test_an_old_library_is_refused(
    make: Make, standin: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_CUBLAS_VERSION", "110805")
    with pytest.raises(
        rm.ConfigError,
        match=r"^fast = True: expected cuBLASLt 12\.0\.0 or later, got 11\.8\.5, as ",
    ):
        make(seed=None)


def scripted(body: str, **settings: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"PYTHONPATH": paths} | settings
    return subprocess.run(
        [sys.executable, "-c", body],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_library_is_opened_only_for_fast() -> None:
    done = scripted("""
import helpers, rollmesh as rm
def loaded():
    return "libcublasLt" in open("/proc/self/maps").read()
spec = rm.ModelSpec.from_hf(helpers.tiny_config())
state = helpers.numpy_state_dict(helpers.tiny_config())
how = {"device": "cuda", "max_model_len": 32, "max_num_seqs": 2, "kv_cache_gib": 0.002}
for fast in (False, True):
    with rm.Generator(spec, fast=fast, **how) as generator:
        generator.sync_weights(state, cast=True)
        generator.score([[1, 2, 3]])
        print(fast, loaded())
""")
    assert done.stdout == "False False\nTrue True\n", done.stderr


def test_one_that_is_loaded_comes_first(where: dict[str, str], standin: None) -> None:
    path = where[cublas.LIBRARY_SWITCH]
    body = (
        f"import ctypes; from rollmesh.runtime import cublas; kept = ctypes.CDLL({path!r}); "
        "print(cublas.find())"
    )
    done = scripted(body, **{cublas.LIBRARY_SWITCH: ""})
    assert done.stdout == f"13.10.0, which this process has loaded already ({path})\n", done.stderr


def test_the_wheels_library_is_found(tmp_path: Path, where: dict[str, str], standin: None) -> None:
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    shutil.copy(where[cublas.LIBRARY_SWITCH], folder / "libcublasLt.so.13")
    body = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from rollmesh.runtime import "
        "cublas; print(cublas.find())"
    )
    done = scripted(body, **{cublas.LIBRARY_SWITCH: ""})
    assert (
        done.stdout == f"13.10.0, of the wheel nvidia-cublas ({folder / 'libcublasLt.so.13'})\n"
    ), done.stderr


def test_the_doctor_names_it(where: dict[str, str]) -> None:
    done = scripted("from rollmesh.cli import main; main(['doctor'])")
    line = next(line for line in done.stdout.splitlines() if line.split()[:1] == ["cuBLASLt"])
    assert re.match(
        r"  cuBLASLt +\d+\.\d+\.\d+, as ROLLMESH_CUBLASLT_LIBRARY says \(.*\); what fast=True "
        r"would use$",
        line,
    )
    done = scripted(
        "from rollmesh.cli import main; main(['doctor'])", **{cublas.LIBRARY_SWITCH: "/nowhere.so"}
    )
    line = next(line for line in done.stdout.splitlines() if line.split()[:1] == ["cuBLASLt"])
    assert re.match(
        r"  cuBLASLt +none: expected a cuBLASLt .*got /nowhere.so.*; only needed for fast=True$",
        line,
    )


@pytest.mark.parametrize("what", ["versions", "fast"])
def test_ranks_that_disagree_are_refused(standin: None, tmp_path: Path, what: str) -> None:
    """Two processes: with different versions of the library, or one without it."""
    body = """
import os, sys, helpers, rollmesh as rm
rank, name, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if what == "versions" and rank:
    os.environ["STANDIN_CUBLAS_VERSION"] = "130100"
try:
    rm.Generator(rm.ModelSpec.from_hf(helpers.tiny_config()), mesh=rm.Mesh(tp=2),
        comm=rm.comm.shm(name, rank, 2), device="cuda",
                 isa="cuda_mma", fast=what == "versions" or not rank, max_model_len=32,
                     max_num_seqs=2, kv_cache_gib=0.002)
except rm.MeshMismatchError as error:
    print(error)
"""
    paths = os.pathsep.join(filter(None, sys.path))
    words = [sys.executable, "-c", body]
    name = f"rollmesh-fast-{os.getpid()}-{what}"
    ranks = [
        subprocess.Popen(
            [*words, str(rank), name, what],
            env=os.environ | {"PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in ranks]
    for text in said:
        theirs = '"13.1.0"' if what == "versions" else "null"
        assert (
            text == "the ranks of this mesh were not made alike: rank 1 has cublas_version = "
            f'{theirs}, rank 0 "13.10.0"\n'
        ), said


def test_the_benchmark_of_gemms_writes_what_it_finds(standin: None, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--smoke",
        "gemm",
        "--out",
        str(tmp_path / "found.json"),
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    verdicts = [row for row in rows if row["what"].endswith("differ")]
    found = {
        (row["family"], row["what"].split(": ")[1].removesuffix(" numbers of rows differ"))
        for row in verdicts
    }
    assert found == {("pinned", "3 of 7"), ("free", "3 of 7"), ("promised", "0 of 7")}
    timed = [row for row in rows if row not in verdicts]
    assert len(timed) == len(verdicts) // 3 * 4 * 2
    for row in timed:
        assert row["rate"] > 0
        assert (row["share"] is None) == (row["family"] == "cuda_mma")


def test_a_benchmark_of_bits_says_that_there_are_none() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--smoke", "bits", "--set", "fast=True"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert (
        done.stderr
        == "benchmarks.gpu: bits with fast=True, which promises none: `gemm` says what cuBLASLt "
        "keeps\n"
    )
