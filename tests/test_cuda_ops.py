"""rollmesh.ops over arrays of a CUDA device: a GPU's where there is one, else the simulated one's (tests/simt).

Input: the cases of test_ops.py and test_ops_parts.py; of the tensor cores' family those where it is the CPU's. Oracle: the CPU's
reference. Bound: zero differing bits. After every test the simulated device has all of its memory again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import cuda_device
import numpy as np
import ops_cases
import pytest
import test_ops
import test_ops_parts
from ops_on_device import Shipped
from test_ops import *  # noqa: F403 (its tests, collected here once more)
from test_ops_parts import test_attention_of_all_ranks_is_that_of_one, test_the_head_of_all_ranks_is_that_of_one  # noqa: F401

from rollmesh import _core, ops
from rollmesh.runtime.devices import LIBRARY_SWITCH, library_path

FMA, MMA = [("cuda_fma", 1)], [("cuda_mma", 1)]


@pytest.fixture
def device(simt_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test leaves it as it has found it; a GPU's memory others have too."""
    real = library_path()
    if real.exists() and _core.cuda_count(str(real)) > 0:
        yield
        return
    if os.environ.get("RM_NEEDS_GPU"):
        cuda_device.no_gpu(f"no GPU here, or no {real}")
    monkeypatch.setenv(LIBRARY_SWITCH, str(simt_library))
    before = _core.cuda_available(str(simt_library), 0)
    yield
    ops.release_devices()
    assert _core.cuda_available(str(simt_library), 0) == before


@pytest.fixture(autouse=True)
def _as_the_only_variant(device: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shipped]:
    shipped = Shipped()
    for module in (test_ops, test_ops_parts, ops_cases):
        monkeypatch.setattr(module, "ops", shipped)
    for module in (test_ops, ops_cases):
        monkeypatch.setattr(module, "FAST", FMA)
    yield shipped
    assert shipped.calls, "no op ran on the device"


# ---------------------------------------------------------------------------------------------- the tensor cores' family
SAME_BITS = {  # what multiplies nothing, and float32
    "rms_norm": lambda rng, dtype: test_ops.test_rms_norm(dtype, "hard", rng),
    "gather_rows": lambda rng, dtype: test_ops.test_gather_rows(dtype, rng),
    "permute and combine": lambda rng, dtype: test_ops.test_permute_and_combine(dtype, rng),
    "sample": lambda rng, dtype: test_ops.test_sample(130, "plain", rng),
    "top_logprobs": lambda rng, dtype: test_ops.test_top_logprobs("ties", rng),
    "ranks": lambda rng, dtype: test_ops.test_ranks("hard", rng),
}
FLOAT32 = {
    "gemm": lambda rng: test_ops.gemm_like("bias", 7, 33, 61, "float32", "hard", rng),
    "gemm_swiglu": lambda rng: test_ops.gemm_like("swiglu", 7, 33, 61, "float32", "hard", rng),
    "embed": lambda rng: test_ops.test_embed("float32", rng),
    "qk_rope_kv": lambda rng: test_ops.test_qk_rope_kv("float32", "normal", rng),
    "router": lambda rng: test_ops.test_router("float32", rng),
    "lm_head": lambda rng: test_ops.test_lm_head("float32", "normal", rng),
    "attention": lambda rng: test_ops.test_attention([40, 100], 40, 6, 6, 24, 48, 0, "float32", rng),
}


@pytest.fixture
def _mma(_as_the_only_variant: Shipped, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (test_ops, ops_cases):
        monkeypatch.setattr(module, "FAST", MMA)


@pytest.mark.usefixtures("_mma")
@pytest.mark.parametrize("dtype", ops_cases.DTYPES)
@pytest.mark.parametrize("op", SAME_BITS)
def test_the_other_family_where_it_is_the_same(op: str, dtype: str, rng: np.random.Generator) -> None:
    SAME_BITS[op](rng, dtype)


@pytest.mark.usefixtures("_mma")
@pytest.mark.parametrize("op", FLOAT32)
def test_the_other_family_in_float32(op: str, rng: np.random.Generator) -> None:
    FLOAT32[op](rng)
