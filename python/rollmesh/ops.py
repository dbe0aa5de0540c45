"""The generator's own forward ops over NumPy arrays: for tests, and for a trainer that wants the same function.

Every op of the numeric contract (docs/numerics.md) is here, in every variant that this machine runs: `isa="ref"` is the
specification, `isa=None` the fastest; all give the same bits, with any number of `threads`. A bf16 array is an array of
uint16 words, or an ml_dtypes.bfloat16 array (seen as words, not copied); bf16 results are uint16 words. Float32 works in
the same order of summation. Arrays must be C-contiguous; sizes, dtypes and ranges of indices are checked
(ShapeError, DTypeError, LayoutError, RequestError) and nothing is ever cast.

Weights of a matrix product are packed once by `pack` (or `pack_gate_up` for SwiGLU).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollmesh import _core
from rollmesh._core import available_isas, best_isa, isa_states
from rollmesh.arguments import REAL, choice
from rollmesh.errors import ConfigError, DTypeError, Error, RequestError, ShapeError, UnsupportedTensorError
from rollmesh.show import plain, shown

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

Array = NDArray[Any]
_LAYOUT_PLAIN, _LAYOUT_PACKED, _LAYOUT_GATE, _LAYOUT_UP = range(4)
_MAX_SIZE, _MAX_THREADS = 2**31 - 1, 256
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


class LmHead(NamedTuple):
    """Of each row: logits [rows, vocab] (None when not kept), (max, Σ exp(logit − max)), the target's logprob, flags."""

    logits: NDArray[np.float32] | None
    stats: NDArray[np.float32]
    target_logprobs: NDArray[np.float32] | None
    row_flags: NDArray[np.uint8]


class LmHeadPairs(NamedTuple):
    """Of a part of the vocabulary: logits [rows, vocab] (None when not kept), (max, Σ exp(logit − max)) of each block of 128
    entries [blocks, rows, 2], the target's logit (0 where it is not of this part), flags."""

    logits: NDArray[np.float32] | None
    pairs: NDArray[np.float32]
    target_logits: NDArray[np.float32] | None
    row_flags: NDArray[np.uint8]


class Routing(NamedTuple):
    """Experts [rows, top_k], best first, and their gate values."""

    ids: NDArray[np.int32]
    gates: NDArray[np.float32]


class Sampled(NamedTuple):
    """Of each row: the token (−1 for a flagged row), its logprob under the model and under what it was drawn from."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    sampling_logprobs: NDArray[np.float32]


@dataclass(frozen=True)
class SampleParams:
    """How one row is drawn. `forced` ≥ 0 draws nothing and asks for that token's logprobs. A number that its column of the op
    cannot hold raises RequestError here, one that makes no sense when it is drawn with."""

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = -1
    seed: int = 0
    counter: int = 0
    banned: Sequence[int] = ()
    forced: int = -1

    def __post_init__(self) -> None:
        for name in ("seed", "counter"):
            _integer(RequestError, name, getattr(self, name), 0, 2**64 - 1)
        for name in ("top_k", "forced"):
            _integer(RequestError, name, getattr(self, name), -(2**31), 2**31 - 1)
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if not _is_real(value) or _MAX_FLOAT32 < abs(value) < np.inf:
                raise RequestError(f"{name} = {shown(value)}, wanted a float32 number")
        try:
            object.__setattr__(self, "banned", tuple(self.banned))
        except TypeError as error:
            raise RequestError(f"banned = {shown(self.banned)}, wanted a sequence of tokens") from error
        for token in self.banned:
            _integer(RequestError, "a token of banned", token, -(2**31), 2**31 - 1)


def kernels(isa: str | None = None, threads: int = 1) -> _core.Kernels:
    """The op table of a variant with a thread team and workspace of its own, kept for the next call of this process: those that
    a forked child inherits have lost their threads, and may be locked for ever."""
    name = best_isa() if isa is None else isa
    if not isinstance(name, str):
        raise ConfigError(f"isa = {shown(isa)}, wanted one of {', '.join(available_isas())}")
    return _kernels(name, _integer(ConfigError, "threads", threads, 1, _MAX_THREADS), os.getpid())


@lru_cache(maxsize=16)
def _kernels(isa: str, threads: int, process: int) -> _core.Kernels:
    return _core.Kernels(choice("isa", isa, available_isas()), threads)


def _integer(error: type[Error], name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= int(value) <= high:
        raise error(f"{name} = {shown(value)}, wanted an integer in [{low}, {high}]")
    return int(value)


def _is_real(value: Any) -> bool:
    return isinstance(value, REAL) and not isinstance(value, bool)


def _real(name: str, value: Any, low: float = -_MAX_FLOAT32) -> float:
    if not _is_real(value) or not low <= value <= _MAX_FLOAT32:
        raise ConfigError(f"{name} = {shown(value)}, wanted a finite float32" + (" >= 0" if low == 0 else ""))
    return float(value)


def _size(name: str, value: Any) -> int:
    return _integer(ShapeError, name, value, 0, _MAX_SIZE)


def _words(array: Array) -> Array:
    """bf16 as the C side takes it; ml_dtypes has a dtype number of its own, but the name is stable."""
    return array.view(np.uint16) if isinstance(array, np.ndarray) and array.dtype.name == "bfloat16" else array


def _array(name: str, array: Array, dims: int | None = None) -> Array:
    """For what a default output takes its size or dtype from; the C side looks at the rest."""
    array = _words(array)
    if not isinstance(array, np.ndarray):
        raise UnsupportedTensorError(f"{name} is a {type(array).__name__}, wanted a numpy array")
    if dims is not None and array.ndim != dims:
        raise ShapeError(f"{name} has {array.ndim} dims, wanted {dims}")
    return array


def _matrix(name: str, array: Array) -> Array:
    return _array(name, array, 2)


def _matrices(name: str, array: Array) -> Array:
    try:
        array = np.asarray(_words(array))
    except (TypeError, ValueError) as error:  # rows of several lengths
        raise UnsupportedTensorError(f"{name} is no matrix: {plain(error)}") from error
    if array.ndim not in (2, 3):
        raise ShapeError(f"{name} has {array.ndim} dims, wanted 2, or 3 with groups")
    return array if array.ndim == 3 else array[None]


def _new(shape: tuple[int, ...], dtype: Any, make: Callable[..., Array] = np.empty) -> Array:
    """An output. MemoryError where memory is short; a size that no array can have is one of the arguments' making."""
    try:
        return make(shape, dtype)
    except ValueError as error:
        raise ShapeError(f"an output of shape {shown(shape)}, wanted one that can be addressed") from error


def _optional(array: Array | None) -> Array | None:
    return None if array is None else _words(array)


def _numpy_dtype(dtype: str) -> type[np.uint16] | type[np.float32]:
    if not isinstance(dtype, str) or dtype not in ("bfloat16", "float32"):
        raise DTypeError(f"dtype={shown(dtype)}, wanted 'bfloat16' or 'float32'")
    return np.uint16 if dtype == "bfloat16" else np.float32


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def packed_size(n: int, k: int) -> int:
    """Elements of a packed matrix of n rows (outputs) and k columns."""
    return _round_up(n, 16) * _round_up(k, 32)


# ---------------------------------------------------------------------------------------------- weights
def pack(weight: Array, *, dtype: str = "bfloat16", isa: str | None = None, threads: int = 1) -> Array:
    """[n, k], or [groups, n, k] for the matrices of a grouped gemm, in the packed layout: one dim. Converts like torch's .to()."""
    matrices = _matrices("weight", weight)
    size = packed_size(matrices.shape[1], matrices.shape[2])
    out = _new((len(matrices) * size,), _numpy_dtype(dtype), np.zeros)
    for group, matrix in enumerate(matrices if size else matrices[:1]):  # of nothing there may be 2^31 groups; one is looked at
        kernels(isa, threads).pack(out[group * size : (group + 1) * size], matrix, _LAYOUT_PACKED, 0)
    return out


def pack_gate_up(gate: Array, up: Array, *, dtype: str = "bfloat16", isa: str | None = None, threads: int = 1) -> Array:
    """gate and up, both [n, k] or [groups, n, k], interleaved by 16 columns as gemm_swiglu takes them."""
    gates, ups = _matrices("gate", gate), _matrices("up", up)
    if gates.shape != ups.shape:
        raise ShapeError(f"gate has shape {gates.shape} and up {ups.shape}, wanted the same ([groups, n, k])")
    size = 2 * packed_size(gates.shape[1], gates.shape[2])
    out = _new((len(gates) * size,), _numpy_dtype(dtype), np.zeros)
    for group, pair in enumerate(zip(gates, ups, strict=True) if size else zip(gates[:1], ups[:1], strict=True)):  # as in pack
        for matrix, layout in zip(pair, (_LAYOUT_GATE, _LAYOUT_UP), strict=True):
            kernels(isa, threads).pack(out[group * size : (group + 1) * size], matrix, layout, 0)
    return out


def embed(
    ids: Array, table: Array, *, packed: tuple[int, int] | None = None, out: Array | None = None, isa: str | None = None, threads: int = 1
) -> Array:
    """Rows [len(ids), hidden] of a table [vocab, hidden], or of a packed one whose (vocab, hidden) is given."""
    ids, table = _array("ids", ids, 1), _matrix("table", table) if packed is None else _array("table", table)
    if packed is not None and not (isinstance(packed, (tuple, list)) and len(packed) == 2):
        raise ShapeError(f"packed = {shown(packed)}, wanted (vocab, hidden)")
    vocab, hidden = table.shape if packed is None else packed
    vocab, hidden = _size("vocab", vocab), _size("hidden", hidden)
    out = _new((len(ids), hidden), table.dtype) if out is None else _words(out)
    kernels(isa, threads).embed(out, ids, table, packed is not None, vocab, hidden)
    return out


def gather_rows(x: Array, rows: NDArray[np.int32], *, out: Array | None = None, isa: str | None = None, threads: int = 1) -> Array:
    """[len(rows), n] of x [m, n]: the rows that are named, bits as they are. out must not overlap x."""
    x, rows = _matrix("x", x), _array("rows", rows, 1)
    out = _new((len(rows), x.shape[1]), x.dtype) if out is None else _words(out)
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
    residual, eps = _array("residual", residual), _real("eps", eps, 0.0)
    out = np.empty_like(residual) if out is None else _words(out)
    kernels(isa, threads).rms_norm(out, residual, _optional(x), _words(weight), eps)
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
    x, n = _matrix("x", x), _size("n", n)
    out = _new((x.shape[0], n), np.float32 if float32_out else x.dtype) if out is None else _words(out)
    kernels(isa, threads).gemm(out, x, _words(w), _optional(bias), group_rows, n, False)
    return out


def gemm_swiglu(
    x: Array, w: Array, n: int, *, group_rows: Array | None = None, out: Array | None = None, isa: str | None = None, threads: int = 1
) -> Array:
    """silu(gate) · up with w of pack_gate_up; n is the width of one of them."""
    x, n = _matrix("x", x), _size("n", n)
    out = _new((x.shape[0], n), x.dtype) if out is None else _words(out)
    kernels(isa, threads).gemm(out, x, _words(w), None, group_rows, n, True)
    return out


# ---------------------------------------------------------------------------------------------- attention
def kv_cache(num_pages: int, num_kv_heads: int, page_size: int, head_dim: int, *, dtype: str = "bfloat16") -> tuple[Array, Array]:
    """Zeroed (k, v) pages of one layer."""
    pages, heads = _size("num_pages", num_pages), _size("num_kv_heads", num_kv_heads)
    positions, dim = _size("page_size", page_size), _size("head_dim", head_dim)
    k = _new((pages, heads, _size("page_size * head_dim", positions * _round_up(dim, 32))), _numpy_dtype(dtype), np.zeros)
    return k, _new((pages, heads, positions * _round_up(dim, 16)), k.dtype, np.zeros)


def rope_table(
    inv_freq: NDArray[np.float32], num_positions: int, *, scale: float = 1.0, dtype: str = "bfloat16"
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(cos, sin), float32 [num_positions, len(inv_freq)], already rounded to dtype."""
    cos = _new((_size("num_positions", num_positions), len(_array("inv_freq", inv_freq, 1))), np.float32)
    sin = np.empty_like(cos)
    _core.rope_table(cos, sin, inv_freq, _real("scale", scale), _numpy_dtype(dtype) is np.uint16)
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
    qkv, num_heads, page_size = _matrix("qkv", qkv), _size("num_heads", num_heads), _size("page_size", page_size)
    rows, q_weight, eps = qkv.shape[0], _array("q_weight", q_weight, 1), _real("eps", eps, 0.0)
    out = _new((rows, num_heads, len(q_weight)), qkv.dtype) if out is None else _words(out)
    flags = np.zeros(rows, np.uint8) if row_flags is None else row_flags
    caches = (_words(k_cache), _words(v_cache))
    kernels(isa, threads).qk_rope_kv(
        out, qkv, q_weight, _words(k_weight), cos, sin, positions, slots, *caches, flags, num_heads, page_size, eps
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
    q, scale, page_size, window = _array("q", q), _real("scale", scale), _size("page_size", page_size), _size("window", window)
    caches, group, head0 = (_words(k_cache), _words(v_cache)), _size("group", group), _size("head0", head0)
    out = np.empty_like(q) if out is None else _words(out)
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
    x, num_experts, top_k = _matrix("x", x), _size("num_experts", num_experts), _size("top_k", top_k)
    routing = Routing(_new((x.shape[0], top_k), np.int32), _new((x.shape[0], top_k), np.float32))
    kernels(isa, threads).router(*routing, x, _words(w), bias, num_experts, renormalize)
    return routing


def permute(
    x: Array, ids: NDArray[np.int32], num_experts: int, *, isa: str | None = None, threads: int = 1
) -> tuple[Array, NDArray[np.int32], NDArray[np.int32]]:
    """(x sorted by expert [rows·top_k, hidden], group_rows [num_experts + 1], place [rows, top_k])."""
    x, ids, num_experts = _matrix("x", x), _matrix("ids", ids), _size("num_experts", num_experts)
    x_out = _new((ids.size, x.shape[1]), x.dtype)
    group_rows, place = _new((num_experts + 1,), np.int32), np.empty_like(ids)
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
    y, ids, num_experts = _matrix("y", y), _matrix("ids", ids), _size("num_experts", num_experts)
    out = _new((ids.shape[0], y.shape[1]), y.dtype) if out is None else _words(out)
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
    x, vocab = _matrix("x", x), _size("vocab", vocab)
    rows = x.shape[0]
    logits = _new((rows, vocab), np.float32) if keep_logits else None
    logprobs = None if targets is None else np.empty(rows, np.float32)
    head = LmHead(logits, np.empty((rows, 2), np.float32), logprobs, np.zeros(rows, np.uint8))
    kernels(isa, threads).lm_head(head.logits, head.stats, logprobs, targets, head.row_flags, x, _words(w), vocab)
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
    x, vocab = _matrix("x", x), _size("vocab", vocab)
    rows = x.shape[0]
    logits = np.empty((rows, vocab), np.float32) if keep_logits else None
    target_logits = None if targets is None else np.empty(rows, np.float32)
    head = LmHeadPairs(logits, np.empty((-(-vocab // 128), rows, 2), np.float32), target_logits, np.zeros(rows, np.uint8))
    kernels(isa, threads).lm_head(logits, None, None, targets, head.row_flags, x, _words(w), vocab, head.pairs, target_logits)
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
    rows = _matrix("logits", logits).shape[0]
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
    shape = (_matrix("logits", logits).shape[0], _size("k", k))
    ids, logprobs = _new(shape, np.int32), _new(shape, np.float32)
    kernels(isa, threads).top_logprobs(ids, logprobs, logits, stats)
    return ids, logprobs


def ranks(logits: NDArray[np.float32], tokens: NDArray[np.int32], *, isa: str | None = None, threads: int = 1) -> NDArray[np.int32]:
    """[rows]: how many of a row of logits [rows, vocab] are at least its token's, the token's own among them; 0 for token −1."""
    out = np.empty(_matrix("logits", logits).shape[0], np.int32)
    kernels(isa, threads).ranks(out, logits, tokens)
    return out
