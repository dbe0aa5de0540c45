"""The pack op: the place and value of each element, and the digest and finite check that go with
it.

Input: random bits (denormals, infinities and NaN among them) in every source type, shapes around
the tile edges, matrices that begin in the middle of a tile, one and two threads, the plain loops
and the fast pack. Oracle: the layout's and the digest's formulas of kernels.h as NumPy index
arithmetic, and conversions by float arithmetic. Bound: zero."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from rollmesh import ops

PLAIN, PACKED, GATE, UP = range(4)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Nearest even; a NaN becomes 0x7FC0. float64 goes through float32, as torch's .to() does."""
    if x.dtype == np.uint16:
        return x
    with np.errstate(over="ignore", invalid="ignore"):
        bits = x.astype(np.float32).view(np.uint32)
    rounded = (
        (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    ).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def to_f32(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return (
            (x.astype(np.uint32) << np.uint32(16))
            if x.dtype == np.uint16
            else x.astype(np.float32).view(np.uint32)
        )


def places(layout: int, bf16: bool, rows: int, cols: int, row0: int) -> np.ndarray:
    row, col = np.meshgrid(np.arange(rows) + row0, np.arange(cols), indexing="ij")
    if layout == PLAIN:
        return row * cols + col
    if layout != PACKED:
        row = row // 16 * 32 + (16 if layout == UP else 0) + row % 16
    tile = row // 16 * -(-cols // 32) + col // 32
    n, k = row % 16, col % 32
    return tile * 512 + (k // 2 * 32 + n * 2 + k % 2 if bf16 else k * 16 + n)


def digest(bits: np.ndarray, index0: int = 0) -> int:
    """Σ weight(word)·word mod 2^64 over the words of the elements in row-major order, a word being
    two bf16 or a float32."""
    flat = bits.reshape(-1)
    at = np.arange(flat.size, dtype=np.uint64) + np.uint64(index0)
    word, shift = (
        (at >> np.uint64(1), (at & np.uint64(1)) * np.uint64(16))
        if bits.dtype == np.uint16
        else (at, np.zeros_like(at))
    )
    weight = (word.astype(np.uint32) + np.uint32(1)) * np.uint32(0x9E3779B1)
    weight ^= weight >> np.uint32(15)
    return int((weight.astype(np.uint64) * (flat.astype(np.uint64) << shift)).sum(dtype=np.uint64))


def source(rng: np.random.Generator, dtype: str, rows: int, cols: int, finite: bool) -> np.ndarray:
    width = {
        "bfloat16": np.uint16,
        "float16": np.uint16,
        "float32": np.uint32,
        "float64": np.uint64,
    }[dtype]
    bits = rng.integers(0, np.iinfo(width).max, (rows, cols), width, endpoint=True)
    if dtype == "bfloat16":
        return (
            np.where(bits >> 7 & 0xFF == 0xFF, bits & 0x807F, bits).astype(np.uint16)
            if finite
            else bits
        )
    x = bits.view(dtype)
    # Most random doubles are beyond float32: spread them over its range and a little more.
    if dtype == "float64":
        x = np.ldexp(rng.standard_normal((rows, cols)), rng.integers(-160, 130, (rows, cols)))
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return np.where(np.abs(x.astype(np.float64)) < 3e38, x, np.zeros_like(x)) if finite else x


def packed(
    isa: str | None, threads: int, dst: np.ndarray, weight: np.ndarray, layout: int, row0: int,
    index0: int,
) -> tuple[int, int]:  # fmt: skip
    """Packs into dst; returns the digest and the index of the first value that is not finite."""
    given = {
        "weight": weight, "layout": layout, "dst_row0": row0, "index0": index0, "dst_first": 0,
        "grouped": False, "dst": dst.reshape(-1),
    }  # fmt: skip
    found = ops.kernels(isa, threads).run("pack", given)[1]
    return int(found.view(np.uint64)[0]), int(found[1])


@pytest.mark.quick(24)
@pytest.mark.parametrize("isa", ["ref", None])
@pytest.mark.parametrize("layout", [PLAIN, PACKED, GATE, UP])
@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "float64"])
def test_pack(
    isa: str | None, layout: int, stored: str, dtype: str, rng: np.random.Generator
) -> None:
    bf16 = stored == "bfloat16"
    for trial in range(40):
        rows, cols = (
            int(rng.choice([1, 2, 15, 16, 17, 31, 33, 64, 100])),
            int(rng.choice([1, 2, 31, 32, 33, 63, 64, 65, 96, 130, 511, 1025])),
        )
        row0 = int(rng.choice([0, 0, 1, 8, 16, 24, 37]))
        total = row0 + rows + int(rng.integers(0, 20))
        x = source(rng, dtype, rows, cols, finite=trial % 2 == 0)
        # The zero keeps its sign, as in torch's cast.
        x[0, 0] = np.array(-0.0, x.dtype) if dtype != "bfloat16" else 0x8000
        kind = np.uint16 if bf16 else np.uint32
        want_bits = (to_bf16 if bf16 else to_f32)(x)
        size = (
            total * cols
            if layout == PLAIN
            else -(-total // 16) * 16 * (1 if layout == PACKED else 2) * -(-cols // 32) * 32
        )
        before = rng.integers(0, 1000, size, kind)
        if layout != PLAIN:  # pads are zero and stay zero; neighbouring elements do not change
            mask = np.zeros(size, bool)
            for other in (GATE, UP) if layout != PACKED else (PACKED,):
                mask[places(other, bf16, total, cols, 0)] = True
            before[~mask] = 0
        want, out = before.copy(), before.copy()
        want[places(layout, bf16, rows, cols, row0)] = want_bits
        target = out if bf16 else out.view(np.float32)
        got = packed(isa, 1 + trial % 2, target, x, layout, row0, 0)
        where = f"{rows=} {cols=} {row0=} {total=}"
        same = want == out
        if not bf16:
            # The payload of a converted float64 NaN is not specified.
            same |= np.isnan(want.view(np.float32)) & np.isnan(out.view(np.float32))
        assert same.all(), where
        exponent = 0x7F80 if bf16 else 0x7F800000
        bad = np.flatnonzero((want_bits & kind(exponent)).reshape(-1) == exponent)
        assert got[1] == (bad[0] if bad.size else -1), where
        if not bad.size:
            assert got[0] == digest(want_bits), where


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
@pytest.mark.parametrize("layout", [PLAIN, PACKED, UP])
def test_rows_where_they_lie(layout: int, stored: str, rng: np.random.Generator) -> None:
    """Stored rows, many tiles of them, are read in place: rows a multiple of 4,096 bytes apart or
    not, unaligned sources and destinations. Oracle: the plain loops, for the written values and the
    results."""
    kind = np.uint16 if stored == "bfloat16" else np.float32
    per_page = 4096 // np.dtype(kind).itemsize
    for cols in (per_page, 2 * per_page, per_page + 32, 960, 999):
        for rows in (16, 50):
            block = rng.integers(0, 0x7F00, rows * cols + 64).astype(kind)
            size = (
                (rows + 20) * cols
                if layout == PLAIN
                else 2 * (rows // 16 + 3) * 16 * -(-cols // 32) * 32
            )
            for at, row0, shift in ((0, 0, 0), (3, 16, 0), (0, 0, 1), (0, 5, 0), (1, 3, 1)):
                source = block[at : at + rows * cols].reshape(rows, cols)
                found = []
                for isa in ("ref", None):
                    out = np.zeros(size + 64, kind)
                    start = -out.ctypes.data // out.itemsize % (64 // out.itemsize) + shift
                    target = out[start : start + size]
                    told = packed(isa, 2, target, source, layout, row0, 0)
                    found.append((told, target.tobytes()))
                assert found[0] == found[1], (rows, cols, at, row0, shift)


@pytest.mark.parametrize("layout", [PLAIN, PACKED, GATE, UP])
@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_digests_of_runs_of_rows_add_up(layout: int, stored: str, rng: np.random.Generator) -> None:
    """Ranks hold disjoint runs of a parameter's rows with any cuts, also empty ones: the digest of
    the whole is the sum of theirs. The index of an element that is not finite stays relative to the
    part."""
    to_bits = to_bf16 if stored == "bfloat16" else to_f32
    for rows, cols in ((40, 64), (33, 33), (100, 31), (7, 1), (5, 2), (130, 600)):
        whole = rng.standard_normal((rows, cols), np.float32)
        cuts = [0, *sorted(int(cut) for cut in rng.integers(0, rows + 1, 4)), rows]
        total = 0
        for begin, end in pairwise(cuts):
            part = whole[begin:end].copy()
            out = np.zeros(
                2 * (part.shape[0] + 15) * (cols + 31),
                np.uint16 if stored == "bfloat16" else np.float32,
            )
            target = out[: part.size].reshape(part.shape) if layout == PLAIN else out
            got = packed(None, 2, target, part, layout, 0, begin * cols)
            assert got == (digest(to_bits(part), begin * cols), -1), (rows, cols, begin, end)
            total += got[0]
            if part.size:
                part[-1, -1] = np.inf
                assert packed(None, 1, target, part, layout, 0, begin * cols)[1] == part.size - 1
        assert total % 2**64 == digest(to_bits(whole))


def test_the_digest_knows_where_a_part_begins(rng: np.random.Generator) -> None:
    """Rows may begin at any index, also beyond 2^32; two odd rows share a word."""
    for stored in ("bfloat16", "float32"):
        for cols in (32, 33, 66, 77):
            x = rng.standard_normal((19, cols), np.float32)
            bits = (to_bf16 if stored == "bfloat16" else to_f32)(x)
            seen = set()
            for index0 in (0, cols, 3 * cols, 2 * cols * 12345, cols << 31, cols * (2**33 + 5)):
                for layout in (PLAIN, PACKED):
                    out = np.zeros(
                        bits.shape if layout == PLAIN else 32 * 96,
                        np.uint16 if stored == "bfloat16" else np.float32,
                    )
                    assert packed(None, 1, out, x, layout, 0, index0) == (
                        digest(bits, index0),
                        -1,
                    ), (stored, cols, index0, layout)
                seen.add(digest(bits, index0))
            assert len(seen) >= 5
