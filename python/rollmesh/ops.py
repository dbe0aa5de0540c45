"""The generator's own forward ops over NumPy arrays: for tests, and for a trainer that wants the same function.

Every op of the numeric contract (docs/numerics.md) is here, in every variant that this machine runs: `isa="ref"` is the
specification, `isa=None` the fastest; all give the same bits, with any number of `threads`. A bf16 array is an array of
uint16 words, or an ml_dtypes.bfloat16 array (seen as words, not copied); bf16 results are uint16 words. Float32 works in
the same order of summation. Arrays must be C-contiguous; sizes, dtypes and ranges of indices are checked
(ShapeError, DTypeError, LayoutError, RequestError) and nothing is ever cast.

Weights of a matrix product are packed once by `pack` (or `pack_gate_up` for SwiGLU).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollmesh import _core
from rollmesh._core import available_isas, best_isa, isa_states
from rollmesh.errors import ConfigError, ShapeError, UnsupportedTensorError
from rollmesh.op_arguments import (
    Array,
    array_of,
    kernels,
    matrices_of,
    matrix_of,
    new_array,
    numpy_dtype,
    optional_words,
    packed_size,
    real_of,
    round_up,
    size_of,
    words_of,
)
from rollmesh.op_types import LmHead, LmHeadPairs, Routing, Sampled, SampleParams
from rollmesh.show import shown

__all__ = [
    "LmHead",
    "LmHeadPairs",
    "Routing",
    "SampleParams",
    "Sampled",
    "attention",
    "available_isas",
    "best_isa",
    "combine",
    "embed",
    "gather_rows",
    "gemm",
    "gemm_swiglu",
    "isa_states",
    "kv_cache",
    "lm_head",
    "lm_head_pairs",
    "merge_pairs",
    "pack",
    "pack_gate_up",
    "permute",
    "qk_rope_kv",
    "ranks",
    "rms_norm",
    "rope_table",
    "router",
    "sample",
    "top_logprobs",
]

_LAYOUT_PLAIN, _LAYOUT_PACKED, _LAYOUT_GATE, _LAYOUT_UP = range(4)


# ---------------------------------------------------------------------------------------------- weights
def pack(weight: Array, *, dtype: str = "bfloat16", isa: str | None = None, threads: int = 1) -> Array:
    """[n, k], or [groups, n, k] for the matrices of a grouped gemm, in the packed layout: one dim. Converts like torch's .to()."""
    matrices = matrices_of("weight", weight)
    size = packed_size(matrices.shape[1], matrices.shape[2])
    out = new_array((len(matrices) * size,), numpy_dtype(dtype), np.zeros)
    for group, matrix in enumerate(matrices if size else matrices[:1]):  # of nothing there may be 2^31 groups; one is looked at
        kernels(isa, threads).pack(out[group * size : (group + 1) * size], matrix, _LAYOUT_PACKED, 0)
    return out


def pack_gate_up(gate: Array, up: Array, *, dtype: str = "bfloat16", isa: str | None = None, threads: int = 1) -> Array:
    """gate and up, both [n, k] or [groups, n, k], interleaved by 16 columns as gemm_swiglu takes them."""
    gates, ups = matrices_of("gate", gate), matrices_of("up", up)
    if gates.shape != ups.shape:
        raise ShapeError(f"gate has shape {gates.shape} and up {ups.shape}, wanted the same ([groups, n, k])")
    size = 2 * packed_size(gates.shape[1], gates.shape[2])
    out = new_array((len(gates) * size,), numpy_dtype(dtype), np.zeros)
    for group, pair in enumerate(zip(gates, ups, strict=True) if size else zip(gates[:1], ups[:1], strict=True)):  # as in pack
        for matrix, layout in zip(pair, (_LAYOUT_GATE, _LAYOUT_UP), strict=True):
            kernels(isa, threads).pack(out[group * size : (group + 1) * size], matrix, layout, 0)
    return out


def embed(
    ids: Array, table: Array, *, packed: tuple[int, int] | None = None, out: Array | None = None, isa: str | None = None, threads: int = 1
) -> Array:
    """Rows [len(ids), hidden] of a table [vocab, hidden], or of a packed one whose (vocab, hidden) is given."""
    ids, table = array_of("ids", ids, 1), matrix_of("table", table) if packed is None else array_of("table", table)
    if packed is not None and not (isinstance(packed, (tuple, list)) and len(packed) == 2):
        raise ShapeError(f"packed = {shown(packed)}, wanted (vocab, hidden)")
    vocab, hidden = table.shape if packed is None else packed
    vocab, hidden = size_of("vocab", vocab), size_of("hidden", hidden)
    out = new_array((len(ids), hidden), table.dtype) if out is None else words_of(out)
    kernels(isa, threads).embed(out, ids, table, packed is not None, vocab, hidden)
    return out


def gather_rows(x: Array, rows: NDArray[np.int32], *, out: Array | None = None, isa: str | None = None, threads: int = 1) -> Array:
    """[len(rows), n] of x [m, n]: the rows that are named, bits as they are. out must not overlap x."""
    x, rows = matrix_of("x", x), array_of("rows", rows, 1)
    out = new_array((len(rows), x.shape[1]), x.dtype) if out is None else words_of(out)
    kernels(isa, threads).gather_rows(out, x, rows)
    return out


# ---------------------------------------------------------------------------------------------- dense ops
def rms_norm(
    residual: Array,
    weight: Array,
    *,
    eps: float,
    x: Array | None = None,
    out: Array | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> Array:
    """weight · residual / rms(residual) over rows [rows, n]. With x, residual += x is stored to `residual` first."""
    residual, eps = array_of("residual", residual), real_of("eps", eps, 0.0)
    out = np.empty_like(residual) if out is None else words_of(out)
    kernels(isa, threads).rms_norm(out, residual, optional_words(x), words_of(weight), eps)
    return out


def gemm(
    x: Array,
    w: Array,
    n: int,
    *,
    bias: Array | None = None,
    group_rows: Array | None = None,
    float32_out: bool = False,
    out: Array | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> Array:
    """x [m, k] times a packed [n, k] matrix: [m, n]. With group_rows [groups + 1], rows group_rows[g] … meet matrix g; they
    begin with 0 and end with m."""
    x, n = matrix_of("x", x), size_of("n", n)
    out = new_array((x.shape[0], n), np.float32 if float32_out else x.dtype) if out is None else words_of(out)
    kernels(isa, threads).gemm(out, x, words_of(w), optional_words(bias), group_rows, n, False)
    return out


def gemm_swiglu(
    x: Array, w: Array, n: int, *, group_rows: Array | None = None, out: Array | None = None, isa: str | None = None, threads: int = 1
) -> Array:
    """silu(gate) · up with w of pack_gate_up; n is the width of one of them."""
    x, n = matrix_of("x", x), size_of("n", n)
    out = new_array((x.shape[0], n), x.dtype) if out is None else words_of(out)
    kernels(isa, threads).gemm(out, x, words_of(w), None, group_rows, n, True)
    return out


# ---------------------------------------------------------------------------------------------- attention
def kv_cache(num_pages: int, num_kv_heads: int, page_size: int, head_dim: int, *, dtype: str = "bfloat16") -> tuple[Array, Array]:
    """Zeroed (k, v) pages of one layer."""
    pages, heads = size_of("num_pages", num_pages), size_of("num_kv_heads", num_kv_heads)
    positions, dim = size_of("page_size", page_size), size_of("head_dim", head_dim)
    k = new_array((pages, heads, size_of("page_size * head_dim", positions * round_up(dim, 32))), numpy_dtype(dtype), np.zeros)
    return k, new_array((pages, heads, positions * round_up(dim, 16)), k.dtype, np.zeros)


def rope_table(
    inv_freq: NDArray[np.float32], num_positions: int, *, scale: float = 1.0, dtype: str = "bfloat16"
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(cos, sin), float32 [num_positions, len(inv_freq)], already rounded to dtype."""
    cos = new_array((size_of("num_positions", num_positions), len(array_of("inv_freq", inv_freq, 1))), np.float32)
    sin = np.empty_like(cos)
    _core.rope_table(cos, sin, inv_freq, real_of("scale", scale), numpy_dtype(dtype) is np.uint16)
    return cos, sin


def qk_rope_kv(
    qkv: Array,
    q_weight: Array,
    k_weight: Array,
    cos: Array,
    sin: Array,
    positions: Array,
    slots: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    num_heads: int,
    page_size: int,
    eps: float,
    row_flags: NDArray[np.uint8] | None = None,
    out: Array | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> Array:
    """Norms and rotates q and k of qkv [rows, (num_heads + 2·kv_heads)·head_dim], writes k and v to their slots; returns q
    [rows, num_heads, head_dim].

    A k or v row that is not finite is stored as zeros and sets bit 0 of its row in row_flags.
    """
    qkv, num_heads, page_size = matrix_of("qkv", qkv), size_of("num_heads", num_heads), size_of("page_size", page_size)
    rows, q_weight, eps = qkv.shape[0], array_of("q_weight", q_weight, 1), real_of("eps", eps, 0.0)
    out = new_array((rows, num_heads, len(q_weight)), qkv.dtype) if out is None else words_of(out)
    flags = np.zeros(rows, np.uint8) if row_flags is None else row_flags
    caches = (words_of(k_cache), words_of(v_cache))
    kernels(isa, threads).qk_rope_kv(
        out, qkv, q_weight, words_of(k_weight), cos, sin, positions, slots, *caches, flags, num_heads, page_size, eps
    )
    return out


def attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    positions: Array,
    seq_of_row: Array,
    block_tables: Array,
    *,
    page_size: int,
    scale: float,
    window: int = 0,
    group: int = 0,
    head0: int = 0,
    out: Array | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> Array:
    """q [rows, heads, head_dim] over positions max(0, p − window + 1) … p of each row's sequence, through its block table.

    Query head h reads kv head (head0 + h) // group of the caches; group 0 is heads // kv_heads. A run of a model's heads, with
    the kv heads that it reads, has the model's group, and as head0 the place of its first head within that head's group.
    """
    q, scale, page_size, window = array_of("q", q), real_of("scale", scale), size_of("page_size", page_size), size_of("window", window)
    caches, group, head0 = (words_of(k_cache), words_of(v_cache)), size_of("group", group), size_of("head0", head0)
    out = np.empty_like(q) if out is None else words_of(out)
    kernels(isa, threads).attention(out, q, *caches, positions, seq_of_row, block_tables, page_size, window, scale, group, head0)
    return out


# ---------------------------------------------------------------------------------------------- mixture of experts
def router(
    x: Array,
    w: Array,
    num_experts: int,
    top_k: int,
    *,
    bias: Array | None = None,
    renormalize: bool = True,
    isa: str | None = None,
    threads: int = 1,
) -> Routing:
    """The top_k experts of each row of x [rows, hidden] by score + bias, and their scores as gates."""
    x, num_experts, top_k = matrix_of("x", x), size_of("num_experts", num_experts), size_of("top_k", top_k)
    routing = Routing(new_array((x.shape[0], top_k), np.int32), new_array((x.shape[0], top_k), np.float32))
    kernels(isa, threads).router(*routing, x, words_of(w), bias, num_experts, renormalize)
    return routing


def permute(
    x: Array, ids: NDArray[np.int32], num_experts: int, *, isa: str | None = None, threads: int = 1
) -> tuple[Array, NDArray[np.int32], NDArray[np.int32]]:
    """(x sorted by expert [rows·top_k, hidden], group_rows [num_experts + 1], place [rows, top_k])."""
    x, ids, num_experts = matrix_of("x", x), matrix_of("ids", ids), size_of("num_experts", num_experts)
    x_out = new_array((ids.size, x.shape[1]), x.dtype)
    group_rows, place = new_array((num_experts + 1,), np.int32), np.empty_like(ids)
    kernels(isa, threads).permute(x_out, group_rows, place, x, ids, num_experts)
    return x_out, group_rows, place


def combine(
    y: Array,
    place: NDArray[np.int32],
    ids: NDArray[np.int32],
    gates: NDArray[np.float32],
    num_experts: int,
    *,
    out: Array | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> Array:
    """Each row's sum of gate · y[place] over its experts, distinct in a row, by the contract's tree: [rows, hidden]."""
    y, ids, num_experts = matrix_of("y", y), matrix_of("ids", ids), size_of("num_experts", num_experts)
    out = new_array((ids.shape[0], y.shape[1]), y.dtype) if out is None else words_of(out)
    kernels(isa, threads).combine(out, y, place, ids, gates, num_experts)
    return out


# ---------------------------------------------------------------------------------------------- logits and tokens
def lm_head(
    x: Array,
    w: Array,
    vocab: int,
    *,
    targets: NDArray[np.int32] | None = None,
    keep_logits: bool = True,
    isa: str | None = None,
    threads: int = 1,
) -> LmHead:
    """Logits of x [rows, hidden], their statistics, and the logprob of one target a row (−1: none)."""
    x, vocab = matrix_of("x", x), size_of("vocab", vocab)
    rows = x.shape[0]
    logits = new_array((rows, vocab), np.float32) if keep_logits else None
    logprobs = None if targets is None else np.empty(rows, np.float32)
    head = LmHead(logits, np.empty((rows, 2), np.float32), logprobs, np.zeros(rows, np.uint8))
    kernels(isa, threads).lm_head(head.logits, head.stats, logprobs, targets, head.row_flags, x, words_of(w), vocab)
    return head


def lm_head_pairs(
    x: Array,
    w: Array,
    vocab: int,
    *,
    targets: NDArray[np.int32] | None = None,
    keep_logits: bool = True,
    isa: str | None = None,
    threads: int = 1,
) -> LmHeadPairs:
    """lm_head over a part of the vocabulary, of whole blocks of 128 entries but for the vocabulary's last; 0 entries are a part.

    targets are counted from the part's first entry, −1 where it lies elsewhere. The pairs of all parts, concatenated in the
    order of the vocabulary, are what merge_pairs takes.
    """
    x, vocab = matrix_of("x", x), size_of("vocab", vocab)
    rows = x.shape[0]
    logits = np.empty((rows, vocab), np.float32) if keep_logits else None
    target_logits = None if targets is None else np.empty(rows, np.float32)
    head = LmHeadPairs(logits, np.empty((-(-vocab // 128), rows, 2), np.float32), target_logits, np.zeros(rows, np.uint8))
    kernels(isa, threads).lm_head(logits, None, None, targets, head.row_flags, x, words_of(w), vocab, head.pairs, target_logits)
    return head


def merge_pairs(
    pairs: NDArray[np.float32],
    *,
    targets: NDArray[np.int32] | None = None,
    target_logits: NDArray[np.float32] | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> LmHead:
    """What lm_head over the whole vocabulary gives, logits aside, from the pairs [blocks, rows, 2] of all its blocks in ascending
    order. targets: −1, or a token whose logit stands in target_logits; its logprob is of (max, Σ) of all blocks."""
    if not isinstance(pairs, np.ndarray):
        raise UnsupportedTensorError(f"pairs is a {type(pairs).__name__}, wanted a numpy array")
    if pairs.ndim != 3:
        raise ShapeError(f"pairs has {pairs.ndim} dims, wanted 3")
    rows = pairs.shape[1]
    logprobs = None if targets is None else np.empty(rows, np.float32)
    head = LmHead(None, np.empty((rows, 2), np.float32), logprobs, np.zeros(rows, np.uint8))
    kernels(isa, threads).merge_pairs(head.stats, logprobs, targets, head.row_flags, pairs, target_logits)
    return head


def sample(
    logits: NDArray[np.float32],
    stats: NDArray[np.float32],
    params: SampleParams | Sequence[SampleParams],
    *,
    row_flags: NDArray[np.uint8] | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> Sampled:
    """One token a row of logits [rows, vocab], whose stats are lm_head's. params: one for all rows, or one each."""
    rows = matrix_of("logits", logits).shape[0]
    each = [params] * rows if isinstance(params, SampleParams) else list(params) if isinstance(params, Sequence) else [params]
    if wrong := [p for p in each if not isinstance(p, SampleParams)]:
        raise ConfigError(f"params has a {type(wrong[0]).__name__}, wanted SampleParams, one or a sequence of them")
    if len(each) != rows:
        raise ConfigError(f"{len(each)} params for {rows} rows")
    starts = np.cumsum([0, *(len(p.banned) for p in each)]).astype(np.int32)
    columns = (
        np.array([p.temperature for p in each], np.float32),
        np.array([p.top_p for p in each], np.float32),
        np.array([p.min_p for p in each], np.float32),
        np.array([p.top_k for p in each], np.int32),
        np.array([p.seed for p in each], np.uint64),
        np.array([p.counter for p in each], np.uint64),
        np.array([p.forced for p in each], np.int32),
        starts,
        np.array([token for p in each for token in p.banned], np.int32),
    )
    sampled = Sampled(np.empty(rows, np.int32), np.empty(rows, np.float32), np.empty(rows, np.float32))
    flags = np.zeros(rows, np.uint8) if row_flags is None else row_flags
    kernels(isa, threads).sample(*sampled, logits, stats, flags, *columns)
    return sampled


def top_logprobs(
    logits: NDArray[np.float32], stats: NDArray[np.float32], k: int, *, isa: str | None = None, threads: int = 1
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """(ids, logprobs), both [rows, k]: the k likeliest tokens, best first, ties to the lowest id."""
    shape = (matrix_of("logits", logits).shape[0], size_of("k", k))
    ids, logprobs = new_array(shape, np.int32), new_array(shape, np.float32)
    kernels(isa, threads).top_logprobs(ids, logprobs, logits, stats)
    return ids, logprobs


def ranks(logits: NDArray[np.float32], tokens: NDArray[np.int32], *, isa: str | None = None, threads: int = 1) -> NDArray[np.int32]:
    """[rows]: how many of a row of logits [rows, vocab] are at least its token's, the token's own among them; 0 for token −1."""
    out = np.empty(matrix_of("logits", logits).shape[0], np.int32)
    kernels(isa, threads).ranks(out, logits, tokens)
    return out
