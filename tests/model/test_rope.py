"""Rotary frequencies and tables.

Frequencies. Input: every rope type of Qwen3 over thetas, head dims, factors and lengths. Oracle:
the init function of transformers on this machine's CPU. Bound: zero bits, and the same attention
factor.
Table. Oracle: sine and cosine in float64 of the float32 angle. Bound: half an ulp of the result,
plus the 2^-48 that docs/numerics.md grants; then the rounding of bfloat16."""

from __future__ import annotations

from typing import Any

import helpers
import numpy as np
import pytest

import rollmesh
from rollmesh import ops

HEAD_DIMS = (
    2,
    4,
    6,
    8,
    12,
    16,
    20,
    24,
    32,
    34,
    40,
    48,
    62,
    64,
    66,
    80,
    96,
    100,
    128,
    160,
    192,
    256,
)
THETAS = (
    10000.0,
    1e6,
    5e6,
    500000.0,
    150000.0,
    1e7,
    500.0,
    10.0,
    1000003.0,
    12345.678,
    2.5,
    10000,
    1000000,
)
LENGTHS = (128, 512, 2048, 4096, 40960)


def config(rope: dict[str, Any], head_dim: int, max_positions: int = 2048) -> dict[str, Any]:
    return helpers.tiny_config(
        rope_parameters=rope, head_dim=head_dim, max_position_embeddings=max_positions
    )


def theirs(fields: dict[str, Any], length: int) -> tuple[np.ndarray, float]:
    """inv_freq and attention factor as transformers has them for a batch whose longest sequence is
    `length`."""
    import oracle
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    hf = oracle.config_of(fields)
    if hf.rope_parameters["rope_type"] == "default":
        inv_freq, scale = Qwen3RotaryEmbedding.compute_default_rope_parameters(hf)
    elif hf.rope_parameters["rope_type"] in ("dynamic", "longrope"):
        # Through the module, which alone decides which table a length gets.
        rotary = Qwen3RotaryEmbedding(hf)
        rotary(oracle.torch.zeros(1), oracle.torch.arange(length)[None])
        inv_freq, scale = rotary.inv_freq, rotary.attention_scaling
    else:
        inv_freq, scale = ROPE_INIT_FUNCTIONS[hf.rope_parameters["rope_type"]](hf)
    return inv_freq.numpy(), float(scale)


def assert_same_bits(fields: dict[str, Any], length: int) -> None:
    inv_freq, scale = rollmesh.ModelSpec.from_hf(fields).rope(length)
    wanted, wanted_scale = theirs(fields, length)
    assert inv_freq.dtype == np.float32
    assert inv_freq.shape == wanted.shape
    differ = np.flatnonzero(inv_freq.view(np.uint32) != wanted.view(np.uint32))
    where = f"{fields['rope_parameters']}, head_dim={fields['head_dim']}, max_model_len={length}"
    assert differ.size == 0, (
        f"{where}: inv_freq{differ.tolist()} is {inv_freq[differ]}, torch has {wanted[differ]}"
    )
    assert np.float32(scale) == np.float32(wanted_scale), where


@pytest.mark.parametrize("theta", THETAS)
def test_default_frequencies(theta: float) -> None:
    pytest.importorskip("torch", reason="the oracle is torch")
    for head_dim in HEAD_DIMS:
        assert_same_bits(config({"rope_type": "default", "rope_theta": theta}, head_dim), 2048)


def random_rope(
    rope_type: str, rng: np.random.Generator, head_dim: int
) -> tuple[dict[str, Any], int]:
    """Parameters of one type and a max_position_embeddings, drawn as configs have them and
    beyond."""
    theta = float(rng.choice([1e4, 1e6, 5e5, rng.uniform(2, 1e7)]))
    original = int(rng.choice([64, 2048, 4096, 8192, rng.integers(16, 40960)]))
    factor = float(rng.choice([1.0, 2.0, 4.0, 8.0, 32.0, rng.uniform(1, 40)]))
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": theta}
    max_positions = int(original * rng.choice([1, 2, 4]))
    if rope_type == "proportional":
        rope["partial_rotary_factor"] = float(rng.choice([0.25, 0.5, 0.75, 1.0]))
    else:
        rope["factor"] = factor
    if rope_type in ("yarn", "llama3", "longrope"):
        rope["original_max_position_embeddings"] = original
    if rope_type == "yarn":
        options = {
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
            "attention_factor": 1.25,
            "mscale": 0.707,
            "mscale_all_dim": 1.3,
        }
        rope |= {key: value for key, value in options.items() if rng.random() < 0.4}
    if rope_type == "llama3":
        rope |= {
            "low_freq_factor": float(rng.choice([1.0, 1.5])),
            "high_freq_factor": float(rng.choice([4.0, 3.3])),
        }
    if rope_type == "longrope":
        rope |= {
            name: rng.uniform(1, 30, head_dim // 2).tolist()
            for name in ("short_factor", "long_factor")
        }
        if rng.random() < 0.3:
            del rope["factor"]
        if rng.random() < 0.3:
            rope["attention_factor"] = 1.19
    return rope, max_positions


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "rope_type", ["linear", "yarn", "llama3", "dynamic", "longrope", "proportional"]
)
def test_frequencies_of_every_type(rope_type: str, rng: np.random.Generator) -> None:
    pytest.importorskip("torch", reason="the oracle is torch")
    for _ in range(100):
        head_dim = int(rng.choice([d for d in HEAD_DIMS if d > 2 or rope_type != "dynamic"]))
        rope, max_positions = random_rope(rope_type, rng, head_dim)
        length = int(
            rng.choice([*LENGTHS, max_positions, rope.get("original_max_position_embeddings", 100)])
        )
        assert_same_bits(config(rope, head_dim, max_positions), length)


def test_transformers_4_spelling_is_the_same() -> None:
    """rope_theta and rope_scaling beside the rest, "type" for "rope_type"."""
    new = config(
        {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        64,
    )
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old |= {
        "rope_theta": 1e6,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    }
    a, b = (rollmesh.ModelSpec.from_hf(fields).rope(2048) for fields in (new, old))
    assert np.array_equal(a[0].view(np.uint32), b[0].view(np.uint32))
    assert a[1] == b[1]


def rounded_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Nearest even, for finite normal numbers and zeros."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return (
        ((bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) & np.uint64(0xFFFF0000))
        .astype(np.uint32)
        .view(np.float32)
    )


@pytest.mark.parametrize("scale", [1.0, 1.2079442])
def test_table_against_float64(scale: float, rng: np.random.Generator) -> None:
    """Large angles: 131,072 positions, inv_freq up to 1 and beyond, whose float64 sine libm rounds
    to within an ulp of 2^-53."""
    inv_freq = np.concatenate(
        [
            np.float32([1.0, 0.999999, 1e-7, 0.0, 7.5]),
            np.exp(rng.uniform(-14, 0, 3)).astype(np.float32),
        ]
    )
    n = 131072
    cos, sin = ops.rope_table(inv_freq, n, scale=scale, dtype="float32")
    # The contract's rounding of the angle.
    angle = (np.arange(n, dtype=np.float32)[:, None] * inv_freq).astype(np.float64)
    for ours, exact in ((cos, np.cos(angle)), (sin, np.sin(angle))):
        nearest = exact.astype(np.float32)
        if scale == 1.0:
            half_ulp = np.spacing(np.abs(nearest)).astype(np.float64) / 2
            assert (np.abs(ours - exact) <= half_ulp + 2.0**-47 * np.abs(exact)).all()
        else:
            # scale · the nearest float32, rounded once more: one ulp either way where the nearest
            # is a near tie
            assert (np.abs(ours - nearest * np.float32(scale)) <= np.spacing(np.abs(ours))).all()
    low_cos, low_sin = ops.rope_table(inv_freq, n, scale=scale, dtype="bfloat16")
    assert np.array_equal(low_cos, rounded_to_bfloat16(cos))
    assert np.array_equal(low_sin, rounded_to_bfloat16(sin))


def test_table_is_what_transformers_multiplies_by() -> None:
    """Against transformers' own cos and sin, which go through torch's float32 functions: two ulps
    of 1."""
    pytest.importorskip("torch", reason="the oracle is torch")
    import oracle
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    fields = config(
        {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
        128,
        4096,
    )
    inv_freq, scale = rollmesh.ModelSpec.from_hf(fields).rope(4096)
    ours = ops.rope_table(inv_freq, 4096, scale=scale, dtype="float32")
    reference = Qwen3RotaryEmbedding(oracle.config_of(fields))(
        oracle.torch.zeros(1), oracle.torch.arange(4096)[None]
    )
    for a, b in zip(ours, reference):
        assert np.abs(a - b[0, :, :64].numpy()).max() <= 2 * np.finfo(np.float32).eps * scale
