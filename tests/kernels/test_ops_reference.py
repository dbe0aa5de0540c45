"""The reference ops against oracles that share no code with them: exact fractions for the dot
product and the MoE tree, float64 with derived bounds for the rest, published vectors for the random
numbers. Results for ref hold for every variant (test_checkops.py, tolerance zero)."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray
from ops_cases import (
    DTYPES,
    EPS,
    EPS_T,
    Array,
    dot_bound,
    exact_dot,
    hard,
    normal,
    stored,
    to_bf16,
    values,
)

from rollmesh import errors, ops

REF = "ref"


def f64(x: Array) -> Array:
    return values(x).astype(np.float64)


# ----------------------------------------------------------------------------------- dot products
@pytest.mark.parametrize("kind", ["normal", "hard"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dot_product_is_the_contract_step_by_step(
    dtype: str, kind: str, rng: np.random.Generator
) -> None:
    """Bit for bit against fractions: the even chain, the odd chain, their sum, block after block,
    denormals flushed."""
    for k in (1, 2, 31, 32, 33, 64, 97):
        x, w = (
            (hard if kind == "hard" else normal)(rng, (3, k), dtype),
            (hard if kind == "hard" else normal)(rng, (5, k), dtype),
        )
        y = ops.gemm(x, ops.pack(w, dtype=dtype, isa=REF), 5, float32_out=True, isa=REF)
        want = [[exact_dot(values(x[i]), values(w[j])) for j in range(5)] for i in range(3)]
        assert (y == np.array(want, np.float32)).all()
        assert not np.signbit(y[y == 0]).any(), "an output is never -0"


def test_dot_product_order_is_seen_by_this_test(rng: np.random.Generator) -> None:
    """These inputs give a different result if the sum is plain ascending, like in a NumPy loop."""
    x, w = normal(rng, (8, 96), "float32"), normal(rng, (8, 96), "float32")
    y = ops.gemm(x, ops.pack(w, dtype="float32", isa=REF), 8, isa=REF)
    plain = np.zeros((8, 8), np.float32)
    for k in range(96):
        plain += np.outer(x[:, k], w[:, k]).astype(np.float32)
    assert (plain != y).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemm_against_float64(dtype: str, rng: np.random.Generator) -> None:
    for m, n, k in ((3, 17, 1), (2, 33, 65), (5, 16, 300), (1, 5, 1000)):
        x, w, bias = (
            normal(rng, (m, k), dtype),
            normal(rng, (n, k), dtype),
            normal(rng, (n,), dtype),
        )
        packed = ops.pack(w, dtype=dtype, isa=REF)
        exact, bound = f64(x) @ f64(w).T, dot_bound(values(x), values(w))
        assert (np.abs(ops.gemm(x, packed, n, float32_out=True, isa=REF) - exact) <= bound).all()
        biased = f64(ops.gemm(x, packed, n, bias=bias, isa=REF))
        with_bias = exact + f64(bias)
        assert (
            np.abs(biased - with_bias)
            <= bound + 1.01 * (EPS + EPS_T[dtype]) * (np.abs(with_bias) + bound)
        ).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemm_rounds_once(dtype: str, rng: np.random.Generator) -> None:
    """y is the float32 accumulator rounded once to T; with a bias too."""
    x, w, bias = (
        normal(rng, (9, 70), dtype),
        normal(rng, (20, 70), dtype),
        normal(rng, (20,), dtype),
    )
    packed = ops.pack(w, dtype=dtype, isa=REF)
    acc = ops.gemm(x, packed, 20, float32_out=True, isa=REF)
    assert (ops.gemm(x, packed, 20, isa=REF) == stored(acc, dtype)).all()
    assert (ops.gemm(x, packed, 20, bias=bias, isa=REF) == stored(acc + values(bias), dtype)).all()


def activated(g: NDArray[np.float64], activation: str) -> NDArray[np.float64]:
    if activation == "relu2":
        return np.maximum(g, 0) ** 2
    if activation == "gelu":
        return g * np.array([0.5 * math.erfc(-z / math.sqrt(2)) for z in g.flat]).reshape(g.shape)
    with np.errstate(over="ignore"):
        return g / (
            1 + np.exp(-(g if activation == "silu" else np.sqrt(8 / np.pi) * (g + 0.044715 * g**3)))
        )  # type: ignore[no-any-return]


# exp to 1 ulp, the sum and the quotient to half a one, then roundings to T. An error of z in
# sigmoid(z) is at most 0.28 times that of z relative to z, which has four roundings; Phi has
# Abramowitz and Stegun's 1.5e-7 / 2 and about as much by rounding.
OF_SHARE = {"silu": 0.0, "gelu_tanh": 2 * EPS, "gelu": 1.5e-7, "relu2": 0.0}


@pytest.mark.parametrize("activation", OF_SHARE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_against_float64(dtype: str, activation: str, rng: np.random.Generator) -> None:
    x, gate, up = (
        normal(rng, (6, 80), dtype, 2.0),
        normal(rng, (35, 80), dtype),
        normal(rng, (35, 80), dtype),
    )
    both = np.empty((6, 70), x.dtype)
    packed = ops.pack_gate_up(gate, up, dtype=dtype, isa=REF)
    got = f64(ops.gemm_swiglu(x, packed, 35, activation=activation, gate_up=both, isa=REF))
    each = [ops.gemm(x, ops.pack(w, dtype=dtype, isa=REF), 35, isa=REF) for w in (gate, up)]
    assert (both == np.concatenate(each, 1)).all()
    g, u = map(f64, each)
    opened = activated(g, activation)
    relative = 4 * EPS + 2.01 * EPS_T[dtype]  # two roundings to T
    assert (
        np.abs(got - opened * u)
        <= relative * np.abs(opened * u) + OF_SHARE[activation] * np.abs(g * u) + 2.0**-126
    ).all()


@pytest.mark.parametrize("activation", OF_SHARE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activate_against_float64(dtype: str, activation: str, rng: np.random.Generator) -> None:
    x = normal(rng, (6, 35), dtype, 3.0)
    x[0, :3] = stored(np.array([0.0, -0.0, np.nan], np.float32), dtype)
    got = ops.activate(x, activation, isa=REF)
    wanted, g = activated(f64(x), activation), f64(x)
    assert np.isnan(f64(got)[0, 2])
    assert (f64(got)[0, :2] == 0).all()
    wanted[0, 2] = g[0, 2] = 0
    error = np.abs(np.nan_to_num(f64(got)) - wanted)
    assert (
        error
        <= (4 * EPS + EPS_T[dtype]) * np.abs(wanted) + OF_SHARE[activation] * np.abs(g) + 2.0**-126
    ).all()
    same = x.copy()
    assert ops.activate(same, activation, out=same, isa=REF) is same
    assert same.tobytes() == got.tobytes()


def test_an_activation_that_is_none() -> None:
    x, w = np.zeros((1, 32), np.float32), np.zeros((16, 32), np.float32)
    packed = ops.pack_gate_up(w, w, dtype="float32")
    with pytest.raises(
        errors.ConfigError,
        match="activation: expected one of silu, gelu_tanh, gelu, relu2, swiglu_oai, got 'relu'",
    ):
        ops.gemm_swiglu(x, packed, 16, activation="relu")
    with pytest.raises(
        errors.ConfigError,
        match="activation: expected one of silu, gelu_tanh, gelu, relu2, got None",
    ):
        ops.activate(x, None)  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigError, match="relu2, got 'swiglu_oai'"):
        ops.activate(x, "swiglu_oai")


@pytest.mark.parametrize("dtype", DTYPES)
def test_biases_of_groups_and_the_clamped_swiglu(dtype: str, rng: np.random.Generator) -> None:
    """Biases: as a gemm of each group with its own. The swiglu: float64, of rounded gate and up."""
    x, bounds = normal(rng, (6, 80), dtype, 2.0), np.array([0, 2, 2, 6], np.int32)
    gate, up = normal(rng, (3, 35, 80), dtype), normal(rng, (3, 35, 80), dtype)
    biases, both = normal(rng, (3, 70), dtype, 5.0), np.empty((6, 70), x.dtype)
    how = {"group_rows": bounds, "isa": REF}
    halves = [ops.pack(w, dtype=dtype, isa=REF) for w in (gate, up)]
    each = [
        ops.gemm(x, w, 35, bias=np.ascontiguousarray(bias), **how)
        for w, bias in zip(halves, np.split(biases, 2, 1), strict=True)
    ]
    alone = [
        ops.gemm(x[a:b], ops.pack(w[g], dtype=dtype, isa=REF), 35, bias=bias[g].copy(), isa=REF)
        for w, bias in ((gate, biases[:, :35]), (up, biases[:, 35:]))
        for g, (a, b) in enumerate(pairwise(bounds))
    ]
    assert (np.concatenate(each) == np.concatenate(alone)).all()
    got = f64(
        ops.gemm_swiglu(
            x, ops.pack_gate_up(gate, up, dtype=dtype, isa=REF), 35, bias=biases, gate_up=both,
            activation="swiglu_oai", alpha=1.5, limit=4.0, **how,
        )
    )  # fmt: skip
    assert (both == np.concatenate(each, 1)).all()
    g, u = np.minimum(f64(each[0]), 4), np.clip(f64(each[1]), -4, 4)
    assert (f64(each[0]) > 4).any()
    assert (np.abs(f64(each[1])) > 4).any()
    wanted = g / (1 + np.exp(-np.float32(1.5) * g)) * (u + 1)
    # Besides the roundings of silu: one of alpha·g, and that of u + 1.
    relative = (6 + 1.5 * 4) * EPS + 2.01 * EPS_T[dtype]
    assert (np.abs(got - wanted) <= relative * np.abs(wanted) + EPS * np.abs(g) + 2.0**-126).all()


# ------------------------------------------------------------------------------------------- rows
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_against_float64(dtype: str, rng: np.random.Generator) -> None:
    for n in (1, 17, 64, 1000):
        residual, x, weight = (
            normal(rng, (4, n), dtype),
            normal(rng, (4, n), dtype),
            normal(rng, (n,), dtype),
        )
        state = residual.copy()
        out = f64(ops.rms_norm(state, weight, eps=1e-6, x=x, isa=REF))
        assert (state == stored(values(residual) + values(x), dtype)).all()
        h = f64(state)
        want = f64(weight) * h / np.sqrt((h * h).mean(1, keepdims=True) + 1e-6)
        # the mean: n/16 + 4 additions of squares; then a root, two quotients, two products, two
        # roundings to T
        relative = (n / 16 + 12) * EPS + 2.01 * EPS_T[dtype]
        assert (np.abs(out - want) <= relative * np.abs(want) + 2.0**-126).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_centered_norm_and_factors(dtype: str, rng: np.random.Generator) -> None:
    """(1 + weight)·h/rms with one rounding to T, and factors of the addend and of embeddings."""
    h, x, weight = (normal(rng, shape, dtype) for shape in ((4, 100), (4, 100), (100,)))
    out = f64(ops.rms_norm(h, weight, eps=1e-6, zero_centered=True, isa=REF))
    wide = f64(h)
    want = (1 + f64(weight)) * wide / np.sqrt((wide * wide).mean(1, keepdims=True) + 1e-6)
    relative = (100 / 16 + 12) * EPS + 1.01 * EPS_T[dtype]
    assert (np.abs(out - want) <= relative * np.abs(want) + 2.0**-126).all()
    state, scaled = h.copy(), stored(values(x) * np.float32(0.22), dtype)
    ops.rms_norm(state, None, eps=1.0, x=x, x_scale=0.22, isa=REF)
    assert (state == stored(values(h) + values(scaled), dtype)).all()
    assert (ops.embed(np.arange(4, dtype=np.int32), x, scale=0.22, isa=REF) == scaled).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_gate_against_float64(dtype: str, rng: np.random.Generator) -> None:
    x, gate = normal(rng, (5, 35), dtype), normal(rng, (5, 35), dtype, 4.0)
    want = f64(x) / (1 + np.exp(-f64(gate)))
    got = f64(ops.sigmoid_gate(x, gate, isa=REF))
    assert (np.abs(got - want) <= (4 * EPS + 2.01 * EPS_T[dtype]) * np.abs(want)).all()


def test_caps_are_tanh(rng: np.random.Generator) -> None:
    """Logits are the values themselves, so a cap of 1 shows tanh: to 2 ulp, also near 0."""
    small = np.float32(10.0) ** rng.uniform(-30, 0, 20000).astype(np.float32)
    points = np.concatenate([small, -small, np.linspace(-20, 20, 60001), [np.inf, -np.inf]])
    w = np.zeros((len(points), 32), np.float32)
    w[:, 0] = np.where(np.isinf(points), 0, points)
    x = np.zeros((1, 32), np.float32)
    x[0, 0] = 1
    packed = ops.pack(w, dtype="float32", isa=REF)
    got = ops.lm_head(x, packed, len(w), softcap=1.0, isa=REF).logits
    want = np.tanh(w[:, 0].astype(np.float64))
    assert (np.abs(got[0] - want) <= 2 * np.spacing(np.abs(want).astype(np.float32))).all()
    got = ops.lm_head(x, packed, len(w), scale=0.125, softcap=30.0, isa=REF).logits
    want = 30 * np.tanh(w[:, 0].astype(np.float64) / 240)
    assert (np.abs(got[0] - want) <= 8 * EPS * np.abs(want) + 2.0**-126).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_after_rope(dtype: str, rng: np.random.Generator) -> None:
    qkv, weight = normal(rng, (3, 4 * 16), dtype), normal(rng, (16,), dtype)
    cos, sin = ops.rope_table(np.float32([1.0, 0.5, 0.25, 0.125]), 9, dtype=dtype)
    at, slots = np.array([0, 3, 8], np.int32), np.arange(3)
    caches = ops.kv_cache(1, 1, 16, 16, dtype=dtype)
    args = {"num_heads": 2, "page_size": 16, "eps": 1e-6, "isa": REF}
    turned = ops.qk_rope_kv(qkv, None, None, cos, sin, at, slots, *caches, **args)
    q = ops.qk_rope_kv(qkv, weight, weight, cos, sin, at, slots, *caches, norm_last=True, **args)
    rows = turned.reshape(6, 16)
    assert (q.reshape(6, 16) == ops.rms_norm(rows, weight, eps=1e-6, isa=REF)).all()
    squares = ops.head_squares(qkv, 2, 16)
    with pytest.raises(errors.ConfigError, match="norm_last: expected False with squares"):
        ops.qk_rope_kv(
            qkv, weight, weight, cos, sin, at, slots, *caches, squares=squares, norm_last=True,
            **args,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_qk_rope_kv(dtype: str, rng: np.random.Generator) -> None:
    """Compares q, k and v of one row with float64, and checks their place in the pages."""
    heads, kv_heads, head_dim, page_size, rows = 4, 2, 24, 16, 21
    half = head_dim // 2
    qkv = normal(rng, (rows, (heads + 2 * kv_heads) * head_dim), dtype)
    q_weight, k_weight = normal(rng, (head_dim,), dtype), normal(rng, (head_dim,), dtype)
    cos, sin = ops.rope_table(
        np.float32(10000.0) ** -(np.arange(half, dtype=np.float32) / half), 300, dtype=dtype
    )
    positions, slots = (
        rng.integers(0, 300, rows).astype(np.int32),
        rng.permutation(48)[:rows].astype(np.int64),
    )
    k_cache, v_cache = ops.kv_cache(3, kv_heads, page_size, head_dim, dtype=dtype)
    args = {"num_heads": heads, "page_size": page_size, "eps": 1e-6, "isa": REF}
    q = ops.qk_rope_kv(
        qkv, q_weight, k_weight, cos, sin, positions, slots, k_cache, v_cache, **args
    )

    x = f64(qkv).reshape(rows, heads + 2 * kv_heads, head_dim)
    normed = x / np.sqrt((x * x).mean(2, keepdims=True) + 1e-6)
    normed[:, :heads] *= f64(q_weight)
    normed[:, heads:] *= f64(k_weight)
    c, s = (t[positions].astype(np.float64)[:, None] for t in (cos, sin))
    lo, hi = normed[..., :half], normed[..., half:]
    want = np.concatenate([lo * c - hi * s, hi * c + lo * s], -1)
    # norm: two roundings to T; each product one, the sum one
    size = np.concatenate([abs(lo * c) + abs(hi * s), abs(hi * c) + abs(lo * s)], -1)
    bound = (4.03 * EPS_T[dtype] + 20 * EPS) * size + 2.0**-126
    assert (np.abs(f64(q) - want[:, :heads]) <= bound[:, :heads]).all()

    # K pages are packed matrices [page_size, head_dim]; V pages hold pairs of positions (bf16) or
    # rows (float32)
    for r in range(rows):
        page, pos = divmod(int(slots[r]), page_size)
        for h in range(kv_heads):
            one = np.eye(head_dim, dtype=np.float32)
            k = ops.gemm(
                stored(one, dtype), k_cache[page, h], page_size, float32_out=True, isa=REF
            )[:, pos]
            assert (np.abs(k - want[r, heads + h]) <= bound[r, heads + h]).all()
            page_of_v = (
                v_cache[page, h].reshape(page_size // 2, 32, 2)
                if dtype == "bfloat16"
                else v_cache[page, h].reshape(page_size, 32)
            )
            v = (
                page_of_v[pos // 2, :head_dim, pos % 2]
                if dtype == "bfloat16"
                else page_of_v[pos, :head_dim]
            )
            assert (v == qkv[r].reshape(-1, head_dim)[heads + kv_heads + h]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_over_all_heads(dtype: str, rng: np.random.Generator) -> None:
    """q and k are bit-identical to the values from the squares, which are within the bound of
    float64. Two ranks with half of the heads each are bit-identical to one rank."""
    heads, kv_heads, head_dim, rows = 6, 4, 24, 5
    qkv = normal(rng, (rows, heads + 2 * kv_heads, head_dim), dtype)
    q_weight, k_weight = (
        normal(rng, (heads * head_dim,), dtype),
        normal(rng, (kv_heads * head_dim,), dtype),
    )
    angles = (np.zeros((1, 0), np.float32),) * 2
    args = {"page_size": 16, "eps": 1e-6, "isa": REF}

    def normed(
        x: Array, weights: tuple[Array, Array], num_heads: int, squares: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        of_k = (x.shape[1] - num_heads) // 2
        caches, at = ops.kv_cache(1, of_k, 16, head_dim, dtype=dtype), np.arange(rows)
        q = ops.qk_rope_kv(
            x.reshape(rows, -1),
            *weights,
            *angles,
            np.zeros(rows, np.int32),
            at,
            *caches,
            num_heads=num_heads,
            squares=squares,
            **args,
        )
        one = stored(np.eye(head_dim, dtype=np.float32), dtype)
        return q, np.stack(
            [ops.gemm(one, page, 16, isa=REF)[:, :rows].T for page in caches[0][0]], 1
        )

    squares = ops.head_squares(qkv.reshape(rows, -1), heads, head_dim, isa=REF)
    whole = normed(qkv, (q_weight, k_weight), heads, squares)
    parts = (slice(heads), slice(heads, heads + kv_heads))
    for part, weight, of_heads, got in zip(parts, (q_weight, k_weight), squares, whole):
        exact = (f64(qkv)[:, part] ** 2).sum(2)
        assert (np.abs(of_heads - exact) <= (head_dim / 16 + 5) * EPS * exact).all()
        total = np.zeros(rows, np.float32)
        for h in range(of_heads.shape[1]):
            total += of_heads[:, h]
        scale = 1 / np.sqrt(total / np.float32(of_heads.shape[1] * head_dim) + np.float32(1e-6))
        t = stored(values(qkv[:, part]) * scale[:, None, None], dtype)
        assert (got == stored(values(weight).reshape(-1, head_dim) * values(t), dtype)).all()

    def of_rank(rank: int) -> tuple[Array, slice, slice]:
        mine, mine_k = (slice(rank * n // 2, (rank + 1) * n // 2) for n in (heads, kv_heads))
        q, k, v = np.split(qkv, [heads, heads + kv_heads], axis=1)
        return np.concatenate([q[:, mine], k[:, mine_k], v[:, mine_k]], 1), mine, mine_k

    each = [
        ops.head_squares(of_rank(rank)[0].reshape(rows, -1), heads // 2, head_dim, isa=REF)
        for rank in range(2)
    ]
    gathered = np.concatenate([q for q, _ in each], 1), np.concatenate([k for _, k in each], 1)
    for rank in range(2):
        x, mine, mine_k = of_rank(rank)
        weights = (
            q_weight.reshape(heads, -1)[mine].reshape(-1),
            k_weight.reshape(kv_heads, -1)[mine_k].reshape(-1),
        )
        q, k = normed(x, weights, heads // 2, gathered)
        assert (q == whole[0][:, mine]).all()
        assert (k == whole[1][:, mine_k]).all()


def test_rows_are_copied(rng: np.random.Generator) -> None:
    """embed from a plain and a packed table, gather_rows: NaNs, denormals and zeros of both signs
    keep their bits."""
    table, ids = hard(rng, (17, 33), "bfloat16"), np.array([16, 0, 3, 3], np.int32)
    table[3, 0] = 0xFFFF  # a NaN that ops do not store
    for isa in ops.available_isas():
        assert (ops.embed(ids, table, isa=isa) == table[ids]).all()
        assert (ops.gather_rows(table, ids, isa=isa) == table[ids]).all()
        assert (
            ops.embed(ids, ops.pack(table), packed=(17, 33), isa=isa)[:2] == table[ids[:2]]
        ).all()


# -------------------------------------------------------------------------------------- attention
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [0, 5, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_against_float64(
    dtype: str, window: int, has_sinks: bool, rng: np.random.Generator
) -> None:
    for length, heads, kv_heads, head_dim, value_dim in (
        (1, 2, 1, 16, 0),
        (45, 4, 2, 24, 0),
        (70, 3, 3, 40, 0),
        (1100, 1, 1, 8, 0),
        (40, 4, 1, 40, 18),
    ):
        of_v = value_dim or head_dim
        k, v = (
            normal(rng, (length, kv_heads, head_dim), dtype),
            normal(rng, (length, kv_heads, of_v), dtype),
        )
        pages = -(-length // 16)
        k_cache, v_cache = ops.kv_cache(
            pages, kv_heads, 16, head_dim, value_dim=value_dim, dtype=dtype
        )
        for page in range(pages):
            for h in range(kv_heads):
                rows = slice(16 * page, 16 * page + 16)
                block_k, block_v = (
                    np.zeros((16, head_dim), k.dtype),
                    np.zeros((16, -(-of_v // 16) * 16), k.dtype),
                )
                block_k[: len(k[rows])], block_v[: len(v[rows]), :of_v] = k[rows, h], v[rows, h]
                k_cache[page, h] = ops.pack(block_k, dtype=dtype, isa=REF)
                v_cache[page, h] = (
                    block_v.reshape(8, 2, -1).transpose(0, 2, 1) if dtype == "bfloat16" else block_v
                ).reshape(-1)
        positions = np.unique(np.array([0, length // 2, length - 1], np.int32))
        q = normal(rng, (len(positions), heads, head_dim), dtype, 2.0)
        tables, scale = np.arange(pages, dtype=np.int32)[None], np.float32(head_dim**-0.5)
        sinks = normal(rng, (heads,), dtype, 3.0) if has_sinks else None
        out = f64(
            ops.attention(
                q,
                k_cache,
                v_cache,
                positions,
                np.zeros_like(positions),
                tables,
                page_size=16,
                scale=scale,
                window=window,
                value_dim=value_dim,
                sinks=sinks,
                isa=REF,
            )
        )
        for r, p in enumerate(positions):
            live = slice(max(0, p - window + 1) if window else 0, p + 1)
            for h in range(heads):
                kk, vv = f64(k[live, h * kv_heads // heads]), f64(v[live, h * kv_heads // heads])
                scores = kk @ f64(q[r, h]) * float(scale)
                sink = -np.inf if sinks is None else f64(sinks[h : h + 1])[0]
                top = max(scores.max(), sink)
                weights = np.exp(scores - top)
                weights /= weights.sum() + np.exp(sink - top)
                # a score is off by the dot product's bound; exp turns that into a relative error of
                # p; P is rounded to T
                off = dot_bound(values(q[r, h])[None], values(kk.astype(np.float32)))[0] * float(
                    scale
                ) + 2 * EPS * np.abs(scores)
                relative = EPS_T[dtype] + 2 * off.max() + (40 + length / 8) * EPS
                bound = relative * (weights @ np.abs(vv)) * 2 + EPS_T[dtype] * np.abs(weights @ vv)
                assert (np.abs(out[r, h] - weights @ vv) <= 1.01 * bound + 2.0**-126).all()
        group = heads // kv_heads
        for h in range(heads):  # a rank with only this head and the one kv head that it reads
            mine = (
                np.ascontiguousarray(x[:, h // group : h // group + 1]) for x in (k_cache, v_cache)
            )
            part = ops.attention(
                q[:, h : h + 1].copy(),
                *mine,
                positions,
                np.zeros_like(positions),
                tables,
                page_size=16,
                scale=scale,
                window=window,
                group=group,
                value_dim=value_dim,
                head0=h % group,
                sinks=None if sinks is None else sinks[h : h + 1].copy(),
                isa=REF,
            )
            assert (f64(part)[:, 0] == out[:, h]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_latent_attention(dtype: str, rng: np.random.Generator) -> None:
    """Compares qk_rope_kv with the same op for heads that are only rotated, and with rms_norm: 0
    bits differ. A latent that is not finite is stored as zeros and flags its row."""
    heads, rank, n, nope, rows = 3, 20, 4, 6, 5
    q_dim, head_dim = nope + 2 * n, 2 * n + rank
    qkv = normal(rng, (rows, heads * q_dim + rank + 2 * n), dtype)
    weight = normal(rng, (rank,), dtype)
    frequencies = np.float32(100.0) ** -(np.arange(n, dtype=np.float32) / n)
    rope = ops.rope_table(frequencies, 50, dtype=dtype)
    positions, slots = rng.integers(0, 50, rows).astype(np.int32), np.arange(rows)
    qkv[4, heads * q_dim + 1] = stored(np.float32([np.nan]), dtype)[0]
    flags = np.zeros(rows, np.uint8)
    args = {"page_size": 16, "eps": 1e-6, "isa": REF}
    k_cache, v_cache = ops.kv_cache(1, 1, 16, head_dim, value_dim=rank, dtype=dtype)
    q = ops.qk_rope_kv(
        qkv, None, weight, *rope, positions, slots, k_cache, v_cache, num_heads=heads,
        value_dim=rank, q_dim=q_dim, row_flags=flags, **args,
    )  # fmt: skip
    of_q, latent, key = np.split(qkv, [heads * q_dim, heads * q_dim + rank], 1)
    of_q = of_q.reshape(rows, heads, q_dim)[..., nope:].reshape(rows, -1)
    plain = np.concatenate([of_q, key, key], 1)
    turned_k, _ = ops.kv_cache(1, 1, 16, 2 * n, dtype=dtype)
    turned = ops.qk_rope_kv(
        plain, None, None, *rope, positions, slots, turned_k, _, num_heads=heads, **args
    )
    assert (q[..., : 2 * n] == turned).all()
    assert flags.tolist() == [0, 0, 0, 0, 1]
    one = stored(np.eye(head_dim, dtype=np.float32), dtype)
    k = ops.gemm(one, k_cache[0, 0], 16, isa=REF).T
    wanted_key = ops.gemm(one[: 2 * n, : 2 * n].copy(), turned_k[0, 0], 16, isa=REF).T
    normed = ops.rms_norm(latent.copy(), weight, eps=1e-6, isa=REF)
    assert (k[:4, : 2 * n] == wanted_key[:4]).all()
    assert (values(k[:4, 2 * n :]) == values(normed[:4])).all()
    v = v_cache[0, 0].reshape(8, 32, 2).transpose(0, 2, 1) if dtype == "bfloat16" else v_cache[0, 0]
    v = v.reshape(16, 32)[:, :rank]
    assert (v[:4] == normed[:4]).all()
    assert not k[4].any()
    assert not v[4].any()
    with pytest.raises(errors.ShapeError, match="value_dim: expected a kv head of"):
        ops.qk_rope_kv(
            qkv, None, weight, *rope, positions, slots, k_cache, v_cache, num_heads=heads,
            value_dim=rank, q_dim=q_dim, norm_last=True, **args,
        )  # fmt: skip
    with pytest.raises(errors.ShapeError, match="q_dim without value_dim: expected exactly 0"):
        ops.qk_rope_kv(
            normal(rng, (5, 3 * head_dim), dtype), None, None, *rope, positions, slots, k_cache,
            k_cache.copy(), num_heads=1, q_dim=q_dim, **args,
        )  # fmt: skip


# ------------------------------------------------------------------------------ logits and tokens
@pytest.mark.parametrize("dtype", DTYPES)
def test_lm_head_against_float64(dtype: str, rng: np.random.Generator) -> None:
    for vocab in (5, 128, 700):
        x, w = normal(rng, (6, 60), dtype), normal(rng, (vocab, 60), dtype, 0.4)
        targets = rng.integers(0, vocab, 6).astype(np.int32)
        targets[2] = -1
        head = ops.lm_head(x, ops.pack(w, dtype=dtype, isa=REF), vocab, targets=targets, isa=REF)
        assert head.logits is not None
        assert head.target_logprobs is not None
        bound = dot_bound(values(x), values(w)).max()
        assert (np.abs(head.logits - f64(x) @ f64(w).T) <= bound).all()
        # From here on the op's own float32 logits are the input.
        logits = head.logits.astype(np.float64)
        log_sum = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1))
        want = logits[np.arange(6), targets] - logits.max(1) - log_sum
        # Additions in a block, in its tree and in the merges: relative errors of the sum.
        steps = 8 + 4 + 3 * (vocab // 128 + 1)
        tolerance = (steps + 4) * EPS + 2 * EPS * (
            np.abs(logits - logits.max(1, keepdims=True)).max() + np.abs(log_sum).max()
        )
        assert (np.abs(head.target_logprobs - want) <= tolerance)[targets >= 0].all()
        assert head.target_logprobs[2] == 0


def test_merge_pairs_against_float64(rng: np.random.Generator) -> None:
    """Pairs, like those of blocks, against log-sum-exp in float64; a NaN among the sums flags only
    its row."""
    for blocks, rows in ((1, 3), (2, 1), (40, 7)):
        pairs = np.stack(
            [rng.standard_normal((blocks, rows)) * 6, 1 + 127 * rng.random((blocks, rows))], 2
        ).astype(np.float32)
        targets = rng.integers(0, 128 * blocks, rows).astype(np.int32)
        targets[-1] = -1
        logits = (pairs[:, :, 0].max(0) - rng.random(rows)).astype(np.float32)
        head = ops.merge_pairs(pairs, targets=targets, target_logits=logits, isa=REF)
        assert head.target_logprobs is not None
        maxima, sums = pairs[:, :, 0].astype(np.float64), pairs[:, :, 1].astype(np.float64)
        assert (head.stats[:, 0] == maxima.max(0)).all()
        total = (sums * np.exp(maxima - maxima.max(0))).sum(0)
        # a merge: two exps off by an ulp and by that of their argument, a product and an fma
        relative = blocks * 6 * EPS + 2 * EPS * (maxima.max() - maxima.min())
        assert (np.abs(head.stats[:, 1] - total) <= relative * total).all()
        want = logits.astype(np.float64) - maxima.max(0) - np.log(total)
        tolerance = relative + 4 * EPS * (1 + np.abs(want))
        assert (np.abs(head.target_logprobs - want) <= tolerance)[targets >= 0].all()
        assert head.target_logprobs[-1] == 0
        assert not head.row_flags.any()
        pairs[blocks // 2, 0, 1] = np.nan
        spoiled = ops.merge_pairs(pairs, isa=REF)
        assert spoiled.row_flags.tolist() == [2] + [0] * (rows - 1)
        assert (spoiled.stats[1:] == head.stats[1:]).all()


# ----------------------------------------------------------------------- environment and refusals
def test_the_callers_floating_point_environment_is_left_alone() -> None:
    """Denormals are flushed inside an op and kept outside, before and after. They are made and
    compared as bits, because 1e-40 is 0 where they are flushed, and equal to 0 where they count as
    zeros."""
    bits = np.array([71362], np.uint32)  # of 1e-40
    tiny = bits.view(np.float32)
    for isa in ops.available_isas():
        y = ops.gemm(
            np.repeat(tiny[None], 32, 1),
            ops.pack(np.full((16, 32), 1.0, np.float32), dtype="float32"),
            16,
            isa=isa,
            threads=2,
        )
        assert (y == 0).all()
        assert (tiny * np.float32(1)).view(np.uint32) == bits


def test_wrong_arguments_are_refused(rng: np.random.Generator) -> None:
    x, w = normal(rng, (4, 32), "float32"), ops.pack(np.ones((16, 32), np.float32), dtype="float32")
    with pytest.raises(errors.DTypeError):
        ops.gemm(x.astype(np.float64), w, 16)
    with pytest.raises(errors.DTypeError):
        ops.gemm(to_bf16(x), w, 16)
    with pytest.raises(errors.ShapeError):
        ops.gemm(x, w, 17)
    with pytest.raises(errors.ShapeError):
        ops.gemm(x, w, 16, bias=np.zeros(15, np.float32))
    with pytest.raises(errors.LayoutError):
        ops.gemm(np.asfortranarray(x), w, 16)
    with pytest.raises(errors.ShapeError):
        ops.gemm(
            x,
            w,
            16,
            group_rows=np.array([0, 5], np.int32)[::1].copy(),
            out=np.empty((5, 16), np.float32),
        )
    with pytest.raises(errors.RequestError):
        ops.gemm(x, w, 16, group_rows=np.array([0, 5], np.int32))
    with pytest.raises(errors.RequestError):
        ops.embed(np.array([3], np.int32), np.zeros((3, 8), np.float32))
    with pytest.raises(errors.ConfigError):
        ops.gemm(x, w, 16, isa="mmx")
    read_only = np.empty((4, 16), np.float32)
    read_only.flags.writeable = False
    with pytest.raises(errors.LayoutError):
        ops.gemm(x, w, 16, out=read_only)
    with pytest.raises(errors.ShapeError):
        ops.router(x, w, 16, 17)
    logits, stats = np.zeros((1, 4), np.float32), np.array([[0, 4]], np.float32)
    for bad in (
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"min_p": 2.0},
        {"forced": 4},
        {"temperature": float("nan")},
    ):
        with pytest.raises(errors.RequestError):
            ops.sample(logits, stats, ops.SampleParams(**bad))


def test_ml_dtypes_arrays_are_taken_as_words(rng: np.random.Generator) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x, w = rng.standard_normal((3, 40)), rng.standard_normal((16, 40))
    as_bf16 = x.astype(ml_dtypes.bfloat16)
    packed = ops.pack(w.astype(ml_dtypes.bfloat16))
    assert (ops.gemm(as_bf16, packed, 16) == ops.gemm(as_bf16.view(np.uint16), packed, 16)).all()
