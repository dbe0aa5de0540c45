"""Inputs and exact arithmetic for the tests of the op table: arrays that are hard on kernels, pages
of K and V, outputs between guard bytes, bf16 and float32 with denormals flushed as docs/numerics.md
says, and fma in exact fractions."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh import ops

Array = NDArray[Any]
DTYPES = ("bfloat16", "float32")
FAST = [(isa, threads) for isa in ops.available_isas() if isa != "ref" for threads in (1, 2)]
EPS = 2.0**-24  # of one float32 rounding, relative
EPS_T = {"bfloat16": 2.0**-8, "float32": 2.0**-24}  # the same of a rounding to T


def to_bf16(x: Array) -> NDArray[np.uint16]:
    """float32 → words of bf16: nearest even, denormals to signed zero, one NaN."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    near = ((u.astype(np.uint64) + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    near = np.where(u & 0x7F800000 == 0, (u >> 16 & 0x8000).astype(np.uint16), near)
    return np.where(u & 0x7FFFFFFF > 0x7F800000, np.uint16(0x7FC0), near)


def values(x: Array) -> Array:
    """Stored words as float32 numbers."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def stored(x: Array, dtype: str) -> Array:
    return to_bf16(x) if dtype == "bfloat16" else np.ascontiguousarray(x, np.float32)


def misaligned(x: Array) -> Array:
    """The same array one element past a 64-byte boundary, the worst alignment for vector loads."""
    room = np.zeros(x.size + 64 // x.itemsize + 2, x.dtype)
    start = (-room.ctypes.data // x.itemsize) % (64 // x.itemsize) + 1
    out = room[start : start + x.size].reshape(x.shape)
    out[...] = x
    return out


def normal(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float = 1.0
) -> Array:
    return misaligned(stored(rng.standard_normal(shape, np.float32) * np.float32(scale), dtype))


def hard(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Numbers that show an order: 2^±60, terms that cancel, denormals, both zeros. Finite, and so
    are sums of their products."""
    x = rng.standard_normal(shape).astype(np.float32)
    kind = rng.integers(0, 6, shape)
    x = np.where(kind == 0, np.ldexp(x, rng.integers(-60, 61, shape)), x)
    x = np.where(kind == 1, np.float32(-0.0), x)
    x = np.where(kind == 2, np.ldexp(x, rng.integers(-145, -120, shape)), x).astype(np.float32)
    flat = x.reshape(-1)
    flat[1::7] = -flat[0 : flat.size - 1 : 7]
    return misaligned(stored(x, dtype))


def inputs(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, kind: str) -> Array:
    return hard(rng, shape, dtype) if kind == "hard" else normal(rng, shape, dtype)


def packed(w: Array, dtype: str) -> Array:
    return misaligned(ops.pack(w, dtype=dtype, isa="ref"))


def attention_case(
    rng: np.random.Generator,
    dtype: str,
    lengths: list[int],
    chunk: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    window: int = 0,
) -> dict[str, Array]:
    """Sequences in shuffled pages that ask for their last min(chunk, length) positions. Slots that
    must not be read hold finite garbage if they share a page with live slots. Pages without a live
    slot hold NaN, and tables do not point to them."""
    needed = [-(-n // page_size) for n in lengths]
    order = rng.permutation(sum(needed) + 3).astype(np.int32)
    tables = np.full((len(lengths), max(needed) + 1), -1, np.int32)
    for i, n in enumerate(needed):
        first = max(0, lengths[i] - chunk - window + 1) // page_size if window else 0
        tables[i, first:n] = order[sum(needed[:i]) + first : sum(needed[:i]) + n]
    k, v = ops.kv_cache(len(order), kv_heads, page_size, head_dim, dtype=dtype)
    k[...] = normal(rng, k.shape, dtype)
    v[...] = normal(rng, v.shape, dtype)
    if head_dim % 32:  # the packed layout's padding is zero
        k[:, :, packed(np.ones((page_size, head_dim), np.float32), dtype) == 0] = 0
    unused = np.setdiff1d(order, tables)
    k[unused] = v[unused] = stored(np.array([np.nan], np.float32), dtype)
    rows = [(s, p) for s, n in enumerate(lengths) for p in range(max(0, n - chunk), n)]
    return {
        "q": normal(rng, (len(rows), heads, head_dim), dtype, 2.0),
        "k_cache": k,
        "v_cache": v,
        "positions": np.array([p for _, p in rows], np.int32),
        "seq_of_row": np.array([s for s, _ in rows], np.int32),
        "block_tables": tables,
    }


def qkv_case(
    rng: np.random.Generator,
    dtype: str,
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    kind: str,
) -> dict[str, Array]:
    pages = rows // page_size + 2
    slots = rng.permutation(pages * page_size)[:rows].astype(np.int64)
    slots[rows // 2 : rows // 2 + 1] = -1
    cos, sin = ops.rope_table(
        np.float32(10000.0) ** -(np.arange(head_dim // 2, dtype=np.float32) / (head_dim // 2)),
        500,
        dtype=dtype,
    )
    return {
        "qkv": inputs(rng, (rows, (heads + 2 * kv_heads) * head_dim), dtype, kind),
        "q_weight": normal(rng, (head_dim,), dtype),
        "k_weight": normal(rng, (head_dim,), dtype),
        "cos": misaligned(cos),
        "sin": misaligned(sin),
        "positions": rng.integers(0, 500, rows).astype(np.int32),
        "slots": slots,
        "pages": np.array(pages),
    }


def bits(x: Array) -> Array:
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[x.itemsize])


def assert_same_bits(run: Callable[[str, int], tuple[Array, ...]]) -> tuple[Array, ...]:
    """run(isa, threads) in every variant and with one and two threads gives ref's bits. Returns
    ref's."""
    want = run("ref", 1)
    for isa, threads in FAST:
        for i, (a, b) in enumerate(zip(want, run(isa, threads))):
            assert a.shape == b.shape
            wrong = np.argwhere(bits(a) != bits(b))
            assert not len(wrong), (
                f"{isa} threads={threads}: output {i} differs at {wrong[:4].tolist()} of "
                f"{a.shape}, {len(wrong)} places"
            )
    return want


# ---------------------------------------------------------------------------------- exact float32
def flush(x: float) -> float:
    return 0.0 * x if abs(x) < 2.0**-126 else x


def round_f32(q: Fraction) -> float:
    """Nearest even in 24 bits, then denormals to zero (tininess after rounding). A Python float
    that is a float32."""
    if q == 0:
        return 0.0
    exponent = abs(q).numerator.bit_length() - abs(q).denominator.bit_length()
    if abs(q) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    return flush(float(round(q / unit) * unit))  # round() of a Fraction is nearest even


def fma(a: float, b: float, c: float) -> float:
    return round_f32(Fraction(flush(a)) * Fraction(flush(b)) + Fraction(flush(c)))


def exact_dot(x: Array, w: Array) -> float:
    """docs/numerics.md §2, step by step in fractions. Zeros lose their sign here; compare after +
    0.0."""
    k = _padded(len(x))
    xs, ws = np.zeros(k), np.zeros(k)
    xs[: len(x)], ws[: len(w)] = x, w
    acc = 0.0
    for block in range(0, k, 32):
        chains = [0.0, 0.0]
        for kk in range(32):
            chains[kk % 2] = fma(float(xs[block + kk]), float(ws[block + kk]), chains[kk % 2])
        acc = round_f32(
            Fraction(acc) + Fraction(round_f32(Fraction(chains[0]) + Fraction(chains[1])))
        )
    return acc


def _padded(k: int) -> int:
    return -(-k // 32) * 32


def dot_bound(x: Array, w: Array) -> Array:
    """|computed − exact| of x·wᵀ: each term passes at most 16 fma, one E + O and one add a block;
    k·ε·Σ|x·y|."""
    steps = 17 + _padded(x.shape[-1]) // 32
    return 1.01 * steps * EPS * (np.abs(x.astype(np.float64)) @ np.abs(w.astype(np.float64)).T)
