"""The generator's own forward ops over arrays, NumPy's or a CUDA device's: for tests, and for a
trainer that wants the same function.

All ops of the numeric contract (docs/numerics.md), for every instruction set of this machine.
`isa="ref"` is the specification, `isa=None` the fastest; all give the same bits, with any number of
`threads`. bfloat16 arrays are uint16 arrays of its words, or ml_dtypes.bfloat16 arrays, which are
viewed as words; bfloat16 results are uint16 arrays. Arrays have to be C-contiguous. Sizes, dtypes
and ranges of indices are checked (ShapeError, DTypeError, LayoutError, RequestError, ConfigError,
UnsupportedTensorError); nothing is cast.

`pack` (`pack_gate_up` for SwiGLU) brings the weights of a gemm into the kernels' layout.

Arrays may be on a CUDA device: torch's or CuPy's tensors, any DLPack producer, and DeviceArrays,
which the ops return there. Nothing is copied to the host but indices. All arrays of a call are on
one device; indices may be NumPy arrays. `isa="cuda_fma"`, the default, gives the CPU's bits.
`isa="cuda_mma"` uses tensor cores for bfloat16, with weights that it has packed and caches that it
has filled. To use an output elsewhere without a copy: `torch.from_dlpack(out)`; `.numpy()` copies
it to the host. A call waits for indices on the device, which the host checks; see on_stream for
when it waits for the op itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from rollmesh import _core
from rollmesh._core import DeviceArray, available_isas, best_isa, isa_states
from rollmesh.errors import ConfigError, ShapeError, UnsupportedTensorError
from rollmesh.ops.arguments import (
    Array,
    array_of,
    host_array,
    matrices_of,
    matrix_of,
    new_array,
    numpy_dtype,
    packed_size,
    part_of,
    real_of,
    round_up,
    size_of,
)
from rollmesh.ops.arguments import (
    kernels as kernels,
)
from rollmesh.ops.devices import (
    Op,
    new_in,
    on_stream,
    op_device_on,
    op_over,
    release_devices,
    to_device,
)
from rollmesh.ops.types import LmHead, LmHeadPairs, Routing, Sampled, SampleParams
from rollmesh.runtime.arguments import ACTIVATIONS, choice
from rollmesh.runtime.messages import shown

__all__ = [
    "DeviceArray",
    "LmHead",
    "LmHeadPairs",
    "Routing",
    "SampleParams",
    "Sampled",
    "activate",
    "attention",
    "available_isas",
    "best_isa",
    "combine",
    "embed",
    "gather_rows",
    "gemm",
    "gemm_swiglu",
    "head_squares",
    "isa_states",
    "kv_cache",
    "lm_head",
    "lm_head_pairs",
    "merge_pairs",
    "on_stream",
    "pack",
    "pack_gate_up",
    "permute",
    "qk_rope_kv",
    "ranks",
    "release_devices",
    "rms_norm",
    "rope_table",
    "router",
    "sample",
    "to_device",
    "top_logprobs",
]

_LAYOUT_PLAIN, _LAYOUT_PACKED, _LAYOUT_GATE, _LAYOUT_UP = range(4)


# ---------------------------------------------------------------------------------------- weights
def pack(
    weight: Array, *, dtype: str = "bfloat16", isa: str | None = None, threads: int = 1
) -> Array:
    """[n, k], or [groups, n, k] for a grouped gemm, in the packed layout: an array of one dim.
    Converts like torch's .to()."""
    op, weight = op_over(isa, threads, weight=weight)
    matrices = matrices_of("weight", weight)
    return _packed(op, [(matrices, _LAYOUT_PACKED)], matrices.shape[1], dtype)


def pack_gate_up(
    gate: Array, up: Array, *, dtype: str = "bfloat16", isa: str | None = None, threads: int = 1
) -> Array:
    """gate and up, both [n, k] or [groups, n, k], interleaved by 16 columns as gemm_swiglu takes
    them."""
    op, gate, up = op_over(isa, threads, gate=gate, up=up)
    gates, ups = matrices_of("gate", gate), matrices_of("up", up)
    if gates.shape != ups.shape:
        raise ShapeError(
            f"expected gate and up of one shape ([groups, n, k]), got {gates.shape} and {ups.shape}"
        )
    return _packed(
        op, [(gates, _LAYOUT_GATE), (ups, _LAYOUT_UP)], 2 * round_up(gates.shape[1], 16), dtype
    )


def _packed(op: Op, sources: list[tuple[Array, int]], rows: int, dtype: str) -> Array:
    """For each group, packs the matrices [groups, n, k] of all sources into one of `rows` rows. Of
    empty groups only one is checked."""
    groups, n, k = sources[0][0].shape
    size = packed_size(rows, k)
    out = op.new((groups * size,), numpy_dtype(dtype), zeros=True)
    for group in range(groups if size else min(groups, 1)):
        for matrices, layout in sources:
            op.core.pack(
                part_of(out, group * size, (size,)),
                part_of(matrices, group * n * k, (n, k)),
                layout,
                0,
                0,
            )
    return out


def embed(
    ids: Array,
    table: Array,
    *,
    packed: tuple[int, int] | None = None,
    out: Array | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> Array:
    """Rows [len(ids), hidden] of a table [vocab, hidden], or of a packed one whose (vocab, hidden)
    is given."""
    op, ids, table, out = op_over(isa, threads, ids=ids, table=table, out=out)
    ids, table = (
        array_of("ids", ids, 1),
        matrix_of("table", table) if packed is None else array_of("table", table),
    )
    if packed is not None and not (isinstance(packed, (tuple, list)) and len(packed) == 2):
        raise ShapeError(f"packed: expected (vocab, hidden), got {shown(packed)}")
    vocab, hidden = table.shape if packed is None else packed
    vocab, hidden = size_of("vocab", vocab), size_of("hidden", hidden)
    out = op.new((ids.shape[0], hidden), table.dtype) if out is None else out
    op.core.embed(out, ids, table, packed is not None, vocab, hidden)
    return out


def gather_rows(
    x: Array,
    rows: NDArray[np.int32],
    *,
    out: Array | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> Array:
    """x[rows], [len(rows), n] of x [m, n]. out must not overlap x."""
    op, x, rows, out = op_over(isa, threads, x=x, rows=rows, out=out)
    x, rows = matrix_of("x", x), array_of("rows", rows, 1)
    out = op.new((rows.shape[0], x.shape[1]), x.dtype) if out is None else out
    op.core.gather_rows(out, x, rows)
    return out


# -------------------------------------------------------------------------------------- dense ops
def rms_norm(
    residual: Array,
    weight: Array | None,
    *,
    eps: float,
    x: Array | None = None,
    x_gate: Array | None = None,
    out: Array | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> Array:
    """weight · residual / rms(residual) over rows [rows, n]; without a weight the residual. With x,
    residual += x is stored to `residual` first; with x_gate [rows] too, residual += sigmoid(x_gate)
    · x, a factor for each row."""
    if x_gate is not None and x is None:
        raise ConfigError("x_gate: expected x beside it, got none")
    op, residual, weight, x, x_gate, out = op_over(
        isa, threads, residual=residual, weight=weight, x=x, x_gate=x_gate, out=out
    )
    residual = array_of("residual", residual)
    out = op.new(residual.shape, residual.dtype) if out is None else out
    op.core.rms_norm(out, residual, x, weight, eps, x_gate)
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
    """x [m, k] times the transpose of a packed matrix [n, k]: [m, n]. With group_rows [groups + 1],
    rows group_rows[g] to group_rows[g + 1] are multiplied by matrix g; group_rows begins with 0 and
    ends with m."""
    op, x, w, bias, group_rows, out = op_over(
        isa, threads, x=x, w=w, bias=bias, group_rows=group_rows, out=out
    )
    x, n = matrix_of("x", x), size_of("n", n)
    out = op.new((x.shape[0], n), np.float32 if float32_out else x.dtype) if out is None else out
    op.core.gemm(out, x, w, bias, group_rows, n, False, None, 0)
    return out


def gemm_swiglu(
    x: Array,
    w: Array,
    n: int,
    *,
    group_rows: Array | None = None,
    activation: str = "silu",
    out: Array | None = None,
    gate_up: Array | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> Array:
    """activation(x · gate) · (x · up), [m, n], with w from pack_gate_up; n is the width of gate.
    activation: "silu", "gelu_tanh", "gelu" (by erf) or "relu2" (the square of ReLU). gate_up [m,
    2n], if given, receives x · gate and x · up of each row as they were rounded, which a backward
    pass needs."""
    op, x, w, group_rows, out, gate_up = op_over(
        isa, threads, x=x, w=w, group_rows=group_rows, out=out, gate_up=gate_up
    )
    x, n = matrix_of("x", x), size_of("n", n)
    out = op.new((x.shape[0], n), x.dtype) if out is None else out
    chosen = ACTIVATIONS.index(choice("activation", activation, ACTIVATIONS))
    op.core.gemm(out, x, w, None, group_rows, n, True, gate_up, chosen)
    return out


def activate(
    x: Array, activation: str, *, out: Array | None = None, isa: str | None = None, threads: int = 1
) -> Array:
    """activation(x) of x [rows, n]: that of an MLP without a gate. activation: as in gemm_swiglu.
    out may be x."""
    op, x, out = op_over(isa, threads, x=x, out=out)
    x = matrix_of("x", x)
    out = op.new(x.shape, x.dtype) if out is None else out
    op.core.activate(out, x, ACTIVATIONS.index(choice("activation", activation, ACTIVATIONS)))
    return out


# -------------------------------------------------------------------------------------- attention
def kv_cache(
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    *,
    dtype: str = "bfloat16",
    device: str = "cpu",
) -> tuple[Array, Array]:
    """(k, v) pages of one layer's cache, zeros."""
    op_device = op_device_on(device)
    pages, heads = size_of("num_pages", num_pages), size_of("num_kv_heads", num_kv_heads)
    positions, dim = size_of("page_size", page_size), size_of("head_dim", head_dim)
    of_k = (pages, heads, size_of("page_size * head_dim", positions * round_up(dim, 32)))
    k = new_in(op_device, of_k, numpy_dtype(dtype), zeros=True)
    return k, new_in(op_device, (pages, heads, positions * round_up(dim, 16)), k.dtype, zeros=True)


def rope_table(
    inv_freq: NDArray[np.float32],
    num_positions: int,
    *,
    scale: float = 1.0,
    dtype: str = "bfloat16",
    device: str = "cpu",
) -> tuple[Array, Array]:
    """(cos, sin), float32 [num_positions, len(inv_freq)], already rounded to dtype. inv_freq is a
    NumPy array; the CPU computes them."""
    op_device = op_device_on(device)
    shape = (size_of("num_positions", num_positions), len(host_array("inv_freq", inv_freq, 1)))
    cos, sin = new_array(shape, np.float32), new_array(shape, np.float32)
    _core.rope_table(cos, sin, inv_freq, real_of("scale", scale), numpy_dtype(dtype) is np.uint16)
    return (cos, sin) if op_device is None else (op_device.to_device(cos), op_device.to_device(sin))


def head_squares(
    qkv: Array, num_heads: int, head_dim: int, *, isa: str | None = None, threads: int = 1
) -> tuple[Array, Array]:
    """(q_squares [rows, num_heads], k_squares [rows, kv_heads]), float32: the sum of squares of
    each head of q and k of qkv [rows, (num_heads + 2·kv_heads)·head_dim]. For a norm over all heads
    of a model (qk_rope_kv): concatenate those of all ranks, in the order of the heads."""
    op, qkv = op_over(isa, threads, qkv=qkv)
    qkv, num_heads, head_dim = (
        matrix_of("qkv", qkv),
        size_of("num_heads", num_heads),
        size_of("head_dim", head_dim),
    )
    rows, width = qkv.shape
    kv_heads, left = divmod(width - num_heads * head_dim, 2 * head_dim) if head_dim else (0, 0)
    if kv_heads < 1 or left:
        raise ShapeError(
            f"qkv: expected ({num_heads} + 2·kv_heads)·{head_dim} columns, kv_heads at least 1, "
            f"got {width}"
        )
    q_squares, k_squares = (op.new((rows, heads), np.float32) for heads in (num_heads, kv_heads))
    op.core.head_squares(q_squares, k_squares, qkv, head_dim)
    return q_squares, k_squares


def qk_rope_kv(
    qkv: Array,
    q_weight: Array | None,
    k_weight: Array | None,
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
    squares: tuple[Array, Array] | None = None,
    row_flags: NDArray[np.uint8] | None = None,
    out: Array | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> Array:
    """Norms and rotates q and k of qkv [rows, (num_heads + 2·kv_heads)·head_dim], writes k and v to
    their slots; returns q [rows, num_heads, head_dim].

    q_weight, k_weight [head_dim]; both None: not normed. With squares, (q_squares, k_squares) of
    head_squares, [rows, all heads of the model] and [rows, all its kv heads], q and k are each
    normed over all these heads, and q_weight is [num_heads·head_dim], k_weight [kv_heads·head_dim],
    of the heads in qkv. cos, sin [positions, n]: the first 2·n elements of a head are rotated, in
    pairs (i, i + n); n is at most head_dim / 2.
    A k or v row that is not finite is stored as zeros and sets bit 0 of its row in row_flags.
    """
    if squares is not None and not (
        isinstance(squares, (tuple, list))
        and len(squares) == 2
        and all(x is not None for x in squares)
    ):
        raise ConfigError(f"squares: expected (q_squares, k_squares), got {shown(squares)}")
    if squares is not None and (q_weight is None or k_weight is None):
        raise ConfigError(
            "squares: expected q_weight and k_weight with them, got "
            f"{'q_weight' if q_weight is None else 'k_weight'} = None"
        )
    q_squares, k_squares = squares or (None, None)
    (
        op, qkv, q_weight, k_weight, cos, sin, positions, slots, k_cache, v_cache, row_flags, out,
        q_squares, k_squares,
    ) = op_over(
        isa, threads, qkv=qkv, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin,
        positions=positions, slots=slots, k_cache=k_cache,
        v_cache=v_cache, row_flags=row_flags, out=out, q_squares=q_squares, k_squares=k_squares,
    )  # fmt: skip
    qkv, num_heads = matrix_of("qkv", qkv), size_of("num_heads", num_heads)
    if (q_weight is None) != (k_weight is None):
        raise ConfigError(
            "q_weight, k_weight: expected both or none, got only "
            f"{'k_weight' if q_weight is None else 'q_weight'}"
        )
    rows = qkv.shape[0]
    if q_weight is None or squares is not None:
        head_dim = qkv.shape[1] // max(num_heads + 2 * array_of("k_cache", k_cache, 3).shape[1], 1)
    else:
        head_dim = array_of("q_weight", q_weight, 1).shape[0]
    out = op.new((rows, num_heads, head_dim), qkv.dtype) if out is None else out
    flags = op.new((rows,), np.uint8, zeros=True) if row_flags is None else row_flags
    op.core.qk_rope_kv(
        out,
        qkv,
        q_weight,
        k_weight,
        cos,
        sin,
        positions,
        slots,
        k_cache,
        v_cache,
        flags,
        num_heads,
        page_size,
        eps,
        q_squares,
        k_squares,
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
    """q [rows, heads, head_dim] over positions max(0, p − window + 1) … p of each row's sequence,
    through its block table.

    Query head h reads kv head (head0 + h) // group of the caches; group 0 is heads // kv_heads. For
    a rank's shard of the heads, pass the model's group, and as head0 the index of the shard's first
    head within its group.
    """
    op, q, k_cache, v_cache, positions, seq_of_row, block_tables, out = op_over(
        isa,
        threads,
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        positions=positions,
        seq_of_row=seq_of_row,
        block_tables=block_tables,
        out=out,
    )
    q = array_of("q", q)
    out = op.new(q.shape, q.dtype) if out is None else out
    op.core.attention(
        out,
        q,
        k_cache,
        v_cache,
        positions,
        seq_of_row,
        block_tables,
        page_size,
        window,
        scale,
        group,
        head0,
    )
    return out


# ----------------------------------------------------------------------------- mixture of experts
def router(
    x: Array,
    w: Array,
    num_experts: int,
    top_k: int,
    *,
    bias: Array | None = None,
    renormalize: bool = True,
    score: str = "softmax",
    num_groups: int = 1,
    top_groups: int = 1,
    route_scale: float = 1.0,
    isa: str | None = None,
    threads: int = 1,
) -> Routing:
    """The top_k experts of each row of x [rows, hidden] by score + bias, and their scores as gates,
    both [rows, top_k].

    `score`: "softmax" or "sigmoid" of the logits. `renormalize` divides the gates by their sum,
    with "sigmoid" by their sum + 1e-20; then they are multiplied by `route_scale`. num_groups > 1
    (at most 64) are groups of consecutive experts, at least two each: only experts of the
    `top_groups` groups with the largest sums of their two largest score + bias are chosen
    (DeepSeek-V3, arXiv 2412.19437). ConfigError for another score or a route_scale that is no
    finite float32 >= 0, ShapeError for groups that do not divide num_experts or have fewer than
    top_k experts.
    """
    if score not in ("softmax", "sigmoid"):
        raise ConfigError(f"score: expected 'softmax' or 'sigmoid', got {shown(score)}")
    op, x, w, bias = op_over(isa, threads, x=x, w=w, bias=bias)
    x, top_k = matrix_of("x", x), size_of("top_k", top_k)
    routing = Routing(
        op.new((x.shape[0], top_k), np.int32), op.new((x.shape[0], top_k), np.float32)
    )
    op.core.router(
        *routing,
        x,
        w,
        bias,
        num_experts,
        bool(renormalize),
        score == "sigmoid",
        num_groups,
        top_groups,
        route_scale,
    )
    return routing


def permute(
    x: Array, ids: NDArray[np.int32], num_experts: int, *, isa: str | None = None, threads: int = 1
) -> tuple[Array, Array, Array]:
    """(x sorted by expert [rows·top_k, hidden], group_rows [num_experts + 1], place [rows,
    top_k])."""
    op, x, ids = op_over(isa, threads, x=x, ids=ids)
    x, ids, num_experts = (
        matrix_of("x", x),
        matrix_of("ids", ids),
        size_of("num_experts", num_experts),
    )
    x_out = op.new((math.prod(ids.shape), x.shape[1]), x.dtype)
    group_rows, place = op.new((num_experts + 1,), np.int32), op.new(ids.shape, np.int32)
    op.core.permute(x_out, group_rows, place, x, ids, num_experts)
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
    """Each row's sum of gate · y[place] over its experts, distinct in a row, by the contract's
    tree: [rows, hidden]."""
    op, y, place, ids, gates, out = op_over(
        isa, threads, y=y, place=place, ids=ids, gates=gates, out=out
    )
    y, ids = matrix_of("y", y), matrix_of("ids", ids)
    out = op.new((ids.shape[0], y.shape[1]), y.dtype) if out is None else out
    op.core.combine(out, y, place, ids, gates, num_experts)
    return out


# ------------------------------------------------------------------------------ logits and tokens
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
    """Logits of x [rows, hidden], their statistics, and the logprob of one target a row (−1:
    none)."""
    op, x, w, targets = op_over(isa, threads, x=x, w=w, targets=targets)
    x, vocab = matrix_of("x", x), size_of("vocab", vocab)
    rows = x.shape[0]
    logits = op.new((rows, vocab), np.float32) if keep_logits else None
    logprobs = None if targets is None else op.new((rows,), np.float32)
    head = LmHead(
        logits, op.new((rows, 2), np.float32), logprobs, op.new((rows,), np.uint8, zeros=True)
    )
    op.core.lm_head(
        head.logits, head.stats, logprobs, targets, head.row_flags, x, w, vocab, None, None
    )
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
    """lm_head over a shard of the vocabulary: whole blocks of 128 entries, but for the last block;
    a shard may be empty.

    targets are counted from the shard's first entry, −1 for those of other shards. merge_pairs
    takes the pairs of all shards, concatenated in the order of the vocabulary.
    """
    op, x, w, targets = op_over(isa, threads, x=x, w=w, targets=targets)
    x, vocab = matrix_of("x", x), size_of("vocab", vocab)
    rows = x.shape[0]
    logits = op.new((rows, vocab), np.float32) if keep_logits else None
    target_logits = None if targets is None else op.new((rows,), np.float32)
    pairs, flags = (
        op.new((-(-vocab // 128), rows, 2), np.float32),
        op.new((rows,), np.uint8, zeros=True),
    )
    head = LmHeadPairs(logits, pairs, target_logits, flags)
    op.core.lm_head(logits, None, None, targets, flags, x, w, vocab, pairs, target_logits)
    return head


def merge_pairs(
    pairs: NDArray[np.float32],
    *,
    targets: NDArray[np.int32] | None = None,
    target_logits: NDArray[np.float32] | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> LmHead:
    """lm_head's result without logits, from the pairs [blocks, rows, 2] of all blocks of the
    vocabulary, in order. targets: −1, or a token whose logit is in target_logits."""
    if (targets is None) != (target_logits is None):
        absent = "target_logits" if target_logits is None else "targets"
        raise UnsupportedTensorError(
            f"expected both of targets and target_logits, or neither, got {absent} = None"
        )
    op, pairs, targets, target_logits = op_over(
        isa, threads, pairs=pairs, targets=targets, target_logits=target_logits
    )
    rows = array_of("pairs", pairs, 3).shape[1]
    logprobs = None if targets is None else op.new((rows,), np.float32)
    head = LmHead(
        None, op.new((rows, 2), np.float32), logprobs, op.new((rows,), np.uint8, zeros=True)
    )
    op.core.merge_pairs(head.stats, logprobs, targets, head.row_flags, pairs, target_logits)
    return head


def sample(
    logits: NDArray[np.float32],
    stats: NDArray[np.float32],
    params: SampleParams | Sequence[SampleParams],
    *,
    forced: Array | None = None,
    row_flags: NDArray[np.uint8] | None = None,
    kept: bool = False,
    isa: str | None = None,
    threads: int = 1,
) -> Sampled:
    """One token a row of logits [rows, vocab], whose stats are lm_head's. params: one for all rows,
    or one each. forced [rows], if given, stands in the place of each row's params.forced. kept: the
    tokens that the filters leave are counted, too; 1 at temperature 0, 0 in a row without a
    token."""
    op, logits, stats, row_flags = op_over(
        isa, threads, logits=logits, stats=stats, row_flags=row_flags
    )
    rows = matrix_of("logits", logits).shape[0]
    given = params if isinstance(params, Sequence) else [params]
    each = [params] * rows if isinstance(params, SampleParams) else list(islice(given, rows + 1))
    if wrong := [p for p in each if not isinstance(p, SampleParams)]:
        raise ConfigError(
            "params: expected SampleParams, one or a sequence of them, got a "
            f"{type(wrong[0]).__name__}"
        )
    if len(each) != rows:
        raise ConfigError(
            f"params: expected {rows}, one for each row, got "
            f"{len(each)}{' or more' if len(each) > rows else ''}"
        )
    starts = np.cumsum([0, *(len(p.banned) for p in each)]).astype(np.int32)
    columns = (
        np.array([p.temperature for p in each], np.float32),
        np.array([p.top_p for p in each], np.float32),
        np.array([p.min_p for p in each], np.float32),
        np.array([p.top_k for p in each], np.int32),
        np.array([p.seed for p in each], np.uint64),
        np.array([p.counter for p in each], np.uint64),
        np.array([p.forced for p in each], np.int32)
        if forced is None
        else array_of("forced", forced, 1),
        starts,
        np.array([token for p in each for token in p.banned], np.int32),
    )
    counts = op.new((rows,), np.int32) if kept else None
    sampled = Sampled(
        op.new((rows,), np.int32), op.new((rows,), np.float32), op.new((rows,), np.float32), counts
    )
    flags = op.new((rows,), np.uint8, zeros=True) if row_flags is None else row_flags
    op.core.sample(*sampled, logits, stats, flags, *columns)
    return sampled


def top_logprobs(
    logits: NDArray[np.float32],
    stats: NDArray[np.float32],
    k: int,
    *,
    isa: str | None = None,
    threads: int = 1,
) -> tuple[Array, Array]:
    """(ids, logprobs), both [rows, k]: the k likeliest tokens, best first, ties to the lowest
    id."""
    op, logits, stats = op_over(isa, threads, logits=logits, stats=stats)
    shape = (matrix_of("logits", logits).shape[0], size_of("k", k))
    ids, logprobs = op.new(shape, np.int32), op.new(shape, np.float32)
    op.core.top_logprobs(ids, logprobs, logits, stats)
    return ids, logprobs


def ranks(
    logits: NDArray[np.float32],
    tokens: NDArray[np.int32],
    *,
    isa: str | None = None,
    threads: int = 1,
) -> Array:
    """[rows]: the rank of each token in its row of logits [rows, vocab]: how many logits are at
    least as large; 0 for token −1."""
    op, logits, tokens = op_over(isa, threads, logits=logits, tokens=tokens)
    out = op.new((matrix_of("logits", logits).shape[0],), np.int32)
    op.core.ranks(out, logits, tokens)
    return out
