"""Every variant of every op gives ref's bits: any shape, alignment, thread count and input. Tolerance zero.

ref itself is held to independent oracles in test_ops_reference.py. Outputs lie between guard bytes; inputs are misaligned.
"""

# ruff: noqa: B023 - closures over loop variables are called in the same turn of the loop
from __future__ import annotations

import numpy as np
import pytest
from ops_cases import (
    DTYPES,
    FAST,
    Array,
    Guarded,
    assert_same_bits,
    attention_case,
    hard,
    inputs,
    misaligned,
    normal,
    packed,
    stored,
    values,
)

from rollmesh import ops

pytestmark = pytest.mark.skipif(not FAST, reason="this processor has no variant but ref")

WIDTHS = (1, 15, 16, 17, 31, 32, 33, 61)
ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 11, 13, 25, 70)
KINDS = ("normal", "hard")


def gemm_like(op: str, m: int, n: int, k: int, dtype: str, kind: str, rng: np.random.Generator) -> None:
    x = inputs(rng, (m, k), dtype, kind)
    if op == "swiglu":
        w = misaligned(ops.pack_gate_up(inputs(rng, (n, k), dtype, kind), normal(rng, (n, k), dtype), dtype=dtype, isa="ref"))
    else:
        w = packed(inputs(rng, (n, k), dtype, kind), dtype)
    bias = inputs(rng, (n,), dtype, kind) if op == "bias" else None

    def run(isa: str, threads: int) -> tuple[Array, ...]:
        y = Guarded((m, n), np.float32 if op == "float32_out" else x.dtype)
        if op == "swiglu":
            ops.gemm_swiglu(x, w, n, out=y.array, isa=isa, threads=threads)
        else:
            ops.gemm(x, w, n, bias=bias, out=y.array, isa=isa, threads=threads)
        y.check()
        return (y.array,)

    assert_same_bits(run)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["plain", "bias", "float32_out", "swiglu"])
def test_gemm_widths(op: str, dtype: str, kind: str, rng: np.random.Generator) -> None:
    for n in WIDTHS:
        for k in WIDTHS:
            gemm_like(op, int(rng.choice(ROWS)), n, k, dtype, kind, rng)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["plain", "swiglu"])
def test_gemm_rows(op: str, dtype: str, rng: np.random.Generator) -> None:
    for m in (*ROWS, 96, 97, 131):
        gemm_like(op, m, 40, 72, dtype, "hard", rng)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemm_long_and_threaded(dtype: str, rng: np.random.Generator) -> None:
    """Large enough that two threads share the columns (or the rows), and that k is worked on in pieces."""
    for m, n, k in ((1, 700, 1100), (3, 300, 1024), (40, 100, 800), (200, 20, 300)):
        gemm_like("plain", m, n, k, dtype, "normal", rng)
        gemm_like("swiglu", m, n, k, dtype, "normal", rng)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("swiglu", [False, True])
def test_grouped_gemm(swiglu: bool, dtype: str, rng: np.random.Generator) -> None:
    """Groups of no, one and many rows; as large that threads cut inside groups."""
    for rows_of, n, k in (([0, 1, 0, 7, 30, 0], 33, 65), ([1] * 9, 130, 300), ([0, 0, 0], 17, 5), ([64, 3, 0, 40], 100, 200)):
        group_rows = np.concatenate([[0], np.cumsum(rows_of)]).astype(np.int32)
        m, groups = int(group_rows[-1]), len(rows_of)
        x = normal(rng, (m, k), dtype)
        gate, up = normal(rng, (groups, n, k), dtype), normal(rng, (groups, n, k), dtype)
        w = ops.pack_gate_up(gate, up, dtype=dtype, isa="ref") if swiglu else ops.pack(gate, dtype=dtype, isa="ref")

        def run(isa: str, threads: int) -> tuple[Array, ...]:
            y = Guarded((m, n), x.dtype)
            op = ops.gemm_swiglu if swiglu else ops.gemm
            op(x, w, n, group_rows=group_rows, out=y.array, isa=isa, threads=threads)
            y.check()
            return (y.array,)

        want = assert_same_bits(run)[0]
        for g in range(groups):  # and a group's rows are those of its own matrix
            one = w[g * len(w) // groups : (g + 1) * len(w) // groups]
            rows = slice(group_rows[g], group_rows[g + 1])
            alone = (ops.gemm_swiglu if swiglu else ops.gemm)(np.ascontiguousarray(x[rows]), one, n, isa=FAST[0][0])
            assert (alone == want[rows]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemm_rows_do_not_see_each_other(dtype: str, rng: np.random.Generator) -> None:
    """Row i of a batch is bit for bit the row alone: nothing is chosen by batch size. A NaN row stays where it is."""
    x, w = normal(rng, (37, 200), dtype), packed(normal(rng, (50, 200), dtype), dtype)
    for isa, threads in FAST:
        whole = ops.gemm(x, w, 50, isa=isa, threads=threads)
        for i in range(37):
            assert (ops.gemm(x[i : i + 1].copy(), w, 50, isa=isa) == whole[i]).all()
        spoiled = x.copy()
        spoiled[5] = stored(np.array([np.nan], np.float32), dtype)
        others = np.arange(37) != 5
        assert (ops.gemm(spoiled, w, 50, isa=isa, threads=threads)[others] == whole[others]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: str, kind: str, rng: np.random.Generator) -> None:
    for n in (*WIDTHS, 500, 4099):
        for rows in (0, 1, 9):
            x, weight = inputs(rng, (rows, n), dtype, kind), inputs(rng, (n,), dtype, kind)
            residual = inputs(rng, (rows, n), dtype, kind)

            def run(isa: str, threads: int) -> tuple[Array, ...]:
                out, state = Guarded(x.shape, x.dtype), Guarded(x.shape, x.dtype)
                state.array[...] = residual
                plain = ops.rms_norm(residual, weight, eps=1e-6, isa=isa, threads=threads)
                ops.rms_norm(state.array, weight, eps=1e-6, x=x, out=out.array, isa=isa, threads=threads)
                out.check()
                state.check()
                aliased = x.copy()
                ops.rms_norm(residual.copy(), weight, eps=1e-6, x=aliased, out=aliased, isa=isa, threads=threads)
                assert (aliased == out.array).all()
                return plain, out.array, state.array

            assert_same_bits(run)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed(dtype: str, rng: np.random.Generator) -> None:
    for vocab, hidden in ((1, 1), (17, 33), (100, 64), (131, 129)):
        table = hard(rng, (vocab, hidden), dtype)
        tied = packed(table, dtype)
        ids = rng.integers(0, vocab, 23).astype(np.int32)

        def run(isa: str, threads: int) -> tuple[Array, ...]:
            out = Guarded((23, hidden), table.dtype)
            ops.embed(ids, table, out=out.array, isa=isa, threads=threads)
            out.check()
            return out.array, ops.embed(ids, tied, packed=(vocab, hidden), isa=isa, threads=threads)

        plain, from_packed = assert_same_bits(run)
        assert (plain == table[ids]).all()
        assert (from_packed == table[ids]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_rows(dtype: str, rng: np.random.Generator) -> None:
    """Rows in any order, some twice, some never, none of them; NaNs, denormals and zeros of both signs keep their bits."""
    for many, width in ((1, 1), (9, 1), (17, 33), (100, 64), (40, 4099)):
        x = hard(rng, (many, width), dtype)
        x.view(np.uint16)[-1] = 0xFFFF  # a NaN that no op would store
        for rows in (np.arange(many, dtype=np.int32), rng.integers(0, many, 23).astype(np.int32), np.zeros(0, np.int32)):

            def run(isa: str, threads: int) -> tuple[Array, ...]:
                out = Guarded((len(rows), width), x.dtype)
                ops.gather_rows(x, rows, out=out.array, isa=isa, threads=threads)
                out.check()
                return (out.array.view(np.uint16), ops.gather_rows(x, rows, isa=isa, threads=threads).view(np.uint16))

            given, made = assert_same_bits(run)
            assert (given == x[rows].view(np.uint16)).all()
            assert (made == given).all()


def qkv_case(
    rng: np.random.Generator, dtype: str, rows: int, heads: int, kv_heads: int, head_dim: int, page_size: int, kind: str
) -> dict[str, Array]:
    pages = rows // page_size + 2
    slots = rng.permutation(pages * page_size)[:rows].astype(np.int64)
    slots[rows // 2 : rows // 2 + 1] = -1
    cos, sin = ops.rope_table(np.float32(10000.0) ** -(np.arange(head_dim // 2, dtype=np.float32) / (head_dim // 2)), 500, dtype=dtype)
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


def run_qk_rope(
    case: dict[str, Array], heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: str, isa: str, threads: int
) -> tuple[Array, ...]:
    args = {key: value for key, value in case.items() if key != "pages"}
    k, v = ops.kv_cache(int(case["pages"]), kv_heads, page_size, head_dim, dtype=dtype)
    flags = np.zeros(len(case["qkv"]), np.uint8)
    q = Guarded((len(flags), heads, head_dim), k.dtype)
    ops.qk_rope_kv(
        **args, k_cache=k, v_cache=v, num_heads=heads, page_size=page_size, eps=1e-6, row_flags=flags, out=q.array, isa=isa, threads=threads
    )
    q.check()
    return q.array, k, v, flags


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_qk_rope_kv(dtype: str, kind: str, rng: np.random.Generator) -> None:
    for rows, heads, kv_heads, head_dim, page_size in (
        (0, 1, 1, 2, 16),
        (1, 2, 1, 8, 16),
        (19, 3, 3, 32, 32),
        (7, 4, 2, 62, 16),
        (33, 6, 2, 128, 64),
    ):
        case = qkv_case(rng, dtype, rows, heads, kv_heads, head_dim, page_size, kind)
        assert_same_bits(lambda isa, threads: run_qk_rope(case, heads, kv_heads, head_dim, page_size, dtype, isa, threads))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nonfinite_k_and_v_are_stored_as_zeros_and_flagged(dtype: str, rng: np.random.Generator) -> None:
    heads, kv_heads, head_dim, page_size, rows = 2, 2, 32, 16, 12
    case = qkv_case(rng, dtype, rows, heads, kv_heads, head_dim, page_size, "normal")
    case["slots"] = np.arange(rows, dtype=np.int64)
    clean = run_qk_rope(case, heads, kv_heads, head_dim, page_size, dtype, "ref", 1)
    nan, inf = stored(np.array([np.nan, np.inf], np.float32), dtype)
    case["qkv"][3, (heads + 1) * head_dim + 5] = inf  # k of kv head 1
    case["qkv"][8, (heads + kv_heads) * head_dim] = nan  # v of kv head 0
    case["qkv"][9, 0] = nan  # q only: no flag
    _, k, v, flags = assert_same_bits(lambda isa, threads: run_qk_rope(case, heads, kv_heads, head_dim, page_size, dtype, isa, threads))
    assert flags.tolist() == [1 if r in (3, 8) else 0 for r in range(rows)]
    differs_k, differs_v = k != clean[1], v != clean[2]
    assert differs_k.any()
    assert (k[differs_k] == 0).all()
    assert (v[differs_v] == 0).all()
    assert differs_k[0, 0].sum() == 0
    assert differs_v[0, 1].sum() == 0


# ---------------------------------------------------------------------------------------------- attention
ATTENTION = [
    # lengths, chunk, heads, kv_heads, head_dim, page_size, window
    ([1, 5, 33], 100, 2, 1, 16, 16, 0),
    ([16, 31, 32, 64, 65], 7, 4, 2, 32, 16, 0),
    ([40, 100], 40, 6, 6, 24, 48, 0),
    ([70, 3], 70, 8, 1, 128, 64, 0),
    ([90, 61], 90, 4, 2, 62, 32, 17),
    ([1030, 40], 12, 2, 1, 8, 16, 0),
    ([2100, 1024, 1025], 2, 4, 2, 16, 64, 0),
    ([2100, 1100], 3, 2, 2, 16, 32, 1060),
    ([200] * 3, 1, 30, 1, 64, 16, 33),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths, chunk, heads, kv_heads, head_dim, page_size, window", ATTENTION)
def test_attention(
    lengths: list[int],
    chunk: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    window: int,
    dtype: str,
    rng: np.random.Generator,
) -> None:
    case = attention_case(rng, dtype, lengths, chunk, heads, kv_heads, head_dim, page_size, window)

    def run(isa: str, threads: int) -> tuple[Array, ...]:
        out = Guarded(case["q"].shape, case["q"].dtype)
        ops.attention(**case, page_size=page_size, scale=head_dim**-0.5, window=window, out=out.array, isa=isa, threads=threads)
        out.check()
        return (out.array,)

    want = assert_same_bits(run)[0]
    assert np.isfinite(values(want)).all()
    rows = rng.permutation(len(want))  # the batch in another order, every row alone among strangers
    mixed = dict(case, q=case["q"][rows].copy(), positions=case["positions"][rows].copy(), seq_of_row=case["seq_of_row"][rows].copy())
    for isa, threads in FAST:
        got = ops.attention(**mixed, page_size=page_size, scale=head_dim**-0.5, window=window, isa=isa, threads=threads)
        assert (got == want[rows]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_with_wild_scores(dtype: str, rng: np.random.Generator) -> None:
    """Scores of ±10^6, so that alpha is 0 or 1, and a NaN and an infinite query, whose neighbours must not notice."""
    case = attention_case(rng, dtype, [70, 130], 50, 4, 2, 32, 16)
    q = np.array(case["q"])
    q[::3] = stored(normal(rng, q[::3].shape, "float32", 1e6), dtype)
    clean = ops.attention(**dict(case, q=q), page_size=16, scale=1.0, isa="ref")
    spoiled = q.copy()
    spoiled[7, 1, 3], spoiled[20, 0, 0] = stored(np.array([np.nan, np.inf], np.float32), dtype)
    for array in (q, spoiled):
        want = assert_same_bits(
            lambda isa, threads: (ops.attention(**dict(case, q=array), page_size=16, scale=1.0, isa=isa, threads=threads),)
        )[0]
    touched = np.zeros(q.shape[:2], bool)
    touched[7, 1] = touched[20, 0] = True
    assert (want[~touched] == clean[~touched]).all()


# ---------------------------------------------------------------------------------------------- mixture of experts
@pytest.mark.parametrize("dtype", DTYPES)
def test_router(dtype: str, rng: np.random.Generator) -> None:
    for experts, top_k, hidden, rows in ((1, 1, 8, 3), (2, 1, 33, 0), (8, 2, 64, 70), (17, 17, 31, 5), (64, 8, 100, 30), (130, 6, 65, 9)):
        for kind in ("normal", "hard", "ties", "nan"):
            x, w = normal(rng, (rows, hidden), dtype), normal(rng, (experts, hidden), dtype)
            if kind == "hard":
                x, w = hard(rng, x.shape, dtype), hard(rng, w.shape, dtype)
            if kind == "ties":
                w[:] = w[0]
            if kind == "nan" and rows:
                x[0, 0], x[-1, -1] = stored(np.array([np.nan, np.inf], np.float32), dtype)
            pw = packed(w, dtype)
            bias = misaligned(np.round(rng.standard_normal(experts), 1).astype(np.float32))
            bias[0] = np.nan if kind == "nan" else bias[0]
            for b, renormalize in ((None, True), (bias, True), (bias, False)):
                ids, gates = assert_same_bits(
                    lambda isa, threads: ops.router(x, pw, experts, top_k, bias=b, renormalize=renormalize, isa=isa, threads=threads)
                )
                assert ((ids >= 0) & (ids < experts)).all()
                assert all(len(set(row)) == top_k for row in ids.tolist())
                if kind == "ties" and b is None:
                    assert (ids == np.arange(top_k)).all()
                assert gates.shape == ids.shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_permute_and_combine(dtype: str, rng: np.random.Generator) -> None:
    for experts, top_k, hidden, rows in ((1, 1, 1, 1), (5, 2, 33, 0), (8, 2, 64, 41), (17, 5, 31, 13), (64, 8, 129, 70), (100, 64, 16, 3)):
        ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(rows)] or [np.zeros((top_k,), int)])[:rows].astype(np.int32)
        gates = misaligned(rng.standard_normal((rows, top_k)).astype(np.float32))
        x = hard(rng, (rows, hidden), dtype)
        _, _, place = assert_same_bits(lambda isa, threads: ops.permute(x, ids, experts, isa=isa, threads=threads))
        y = hard(rng, (rows * top_k, hidden), dtype)

        def run(isa: str, threads: int) -> tuple[Array, ...]:
            out = Guarded((rows, hidden), y.dtype)
            ops.combine(y, place, ids, gates, experts, out=out.array, isa=isa, threads=threads)
            out.check()
            return (out.array,)

        assert_same_bits(run)


# ---------------------------------------------------------------------------------------------- logits and tokens
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_lm_head(dtype: str, kind: str, rng: np.random.Generator) -> None:
    for vocab in (1, 17, 127, 128, 129, 500, 1000):
        for rows, hidden in ((0, 8), (1, 33), (5, 64), (17, 32), (100, 16)):
            x, w = inputs(rng, (rows, hidden), dtype, kind), packed(inputs(rng, (vocab, hidden), dtype, kind), dtype)
            targets = rng.integers(-1, vocab, rows).astype(np.int32)

            def run(isa: str, threads: int) -> tuple[Array, ...]:
                kept = ops.lm_head(x, w, vocab, targets=targets, isa=isa, threads=threads)
                not_kept = ops.lm_head(x, w, vocab, targets=targets, keep_logits=False, isa=isa, threads=threads)
                assert kept.logits is not None
                assert kept.target_logprobs is not None
                assert not_kept.target_logprobs is not None
                assert (not_kept.stats.view(np.uint32) == kept.stats.view(np.uint32)).all()
                return kept.logits, kept.stats, kept.target_logprobs, kept.row_flags, not_kept.target_logprobs

            *_, flags, _ = assert_same_bits(run)
            assert not flags.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_lm_head_flags_rows_that_are_not_finite(dtype: str, rng: np.random.Generator) -> None:
    """A NaN, +∞ and −∞ among the logits each flag their row and no other; −∞ by overflow of the dot product too."""
    x, w = normal(rng, (20, 40), dtype), normal(rng, (300, 40), dtype)
    x[2, 1], x[9, 0] = stored(np.array([np.nan, np.inf], np.float32), dtype)
    x[15, 0], w[299, 0] = stored(np.array([-1e30, 1e10], np.float32), dtype)  # its other logits are finite
    pw = packed(w, dtype)

    def run(isa: str, threads: int) -> tuple[Array, ...]:
        head = ops.lm_head(x, pw, 300, isa=isa, threads=threads)
        assert head.logits is not None
        return head.logits, head.stats, head.row_flags

    *_, flags = assert_same_bits(run)
    assert flags.tolist() == [2 if r in (2, 9, 15) else 0 for r in range(20)]


def logits_case(rng: np.random.Generator, rows: int, vocab: int, kind: str) -> tuple[Array, Array]:
    logits = (rng.standard_normal((rows, vocab)) * 4).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits)
    if kind == "peaked":
        logits[:, rng.integers(vocab)] += 60
    if kind == "infinite":
        logits[rng.random(logits.shape) < 0.3] = -np.inf
        logits[:, rng.integers(vocab)] = 0.5
    logits += 0.0
    stats = np.stack([logits.max(1), np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True)).sum(1)], 1).astype(np.float32)
    return misaligned(logits), misaligned(stats)


def sample_params(rng: np.random.Generator, vocab: int) -> ops.SampleParams:
    def choice(*options: float) -> float:
        return options[int(rng.integers(len(options)))]

    return ops.SampleParams(
        temperature=choice(0.0, 1.0, 1.0, 0.7, 3.0, 1e-3, 1e-40),
        top_p=choice(1.0, 1.0, 0.9, 0.3, 1e-6, 1e-42),
        min_p=choice(0.0, 0.0, 0.05, 1.0),
        top_k=int(choice(-1, -1, 1, 2, 7, vocab - 1, vocab, 10 * vocab)),
        seed=int(rng.integers(2**64, dtype=np.uint64)),
        counter=int(rng.integers(2**64, dtype=np.uint64)),
        banned=rng.permutation(vocab)[: int(choice(0, 0, 1, 3, vocab))].tolist(),
        forced=int(choice(-1, -1, rng.integers(vocab))),
    )


@pytest.mark.parametrize("kind", ["plain", "ties", "peaked", "infinite"])
@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 130, 1023, 1025, 2500])
def test_sample(vocab: int, kind: str, rng: np.random.Generator) -> None:
    rows = 24 if vocab > 1000 else 150
    logits, stats = logits_case(rng, rows, vocab, kind)
    params = [sample_params(rng, vocab) for _ in range(rows)]
    flags = (rng.random(rows) < 0.1).astype(np.uint8)
    tokens, logprobs, under = assert_same_bits(
        lambda isa, threads: ops.sample(logits, stats, params, row_flags=flags, isa=isa, threads=threads)
    )
    assert (tokens < vocab).all()
    for r in np.flatnonzero(flags):
        assert tokens[r] == -1
        assert np.isnan(logprobs[r])
        assert np.isnan(under[r])
    drawn = [r for r in range(rows) if tokens[r] >= 0 and params[r].forced < 0]
    assert all(tokens[r] not in params[r].banned for r in drawn)
    assert np.isfinite(under[drawn]).all()


@pytest.mark.parametrize("kind", ["plain", "ties", "infinite"])
def test_top_logprobs(kind: str, rng: np.random.Generator) -> None:
    for vocab in (1, 16, 33, 1000):
        logits, stats = logits_case(rng, 9, vocab, kind)
        for k in {0, 1, min(5, vocab), vocab if vocab < 50 else 20}:
            ids, _ = assert_same_bits(lambda isa, threads: ops.top_logprobs(logits, stats, k, isa=isa, threads=threads))
            order = np.lexsort((np.broadcast_to(np.arange(vocab), logits.shape), -logits), axis=1)
            assert (ids == order[:, :k]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_ranks(kind: str, rng: np.random.Generator) -> None:
    """Against NumPy's own comparison. Ties, zeros of both signs, NaNs as logits and as the token's own, rows without a token."""
    for vocab in (1, 2, 15, 16, 17, 33, 500):
        logits = inputs(rng, (9, vocab), "float32", kind)
        logits[::2] = np.round(logits[::2])
        logits[rng.random(logits.shape) < 0.05] = np.nan
        tokens = rng.integers(0, vocab, 9).astype(np.int32)
        tokens[4] = -1

        def run(isa: str, threads: int) -> tuple[Array, ...]:
            return (ops.ranks(logits, tokens, isa=isa, threads=threads),)

        flushed = np.where(np.abs(logits) < np.finfo(np.float32).tiny, np.float32(0), logits)
        own = np.take_along_axis(flushed, tokens[:, None], 1)
        want = np.where(tokens < 0, 0, (flushed >= own).sum(1))
        assert (assert_same_bits(run)[0] == want).all()
