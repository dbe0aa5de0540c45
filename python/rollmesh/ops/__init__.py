"""The generator's forward ops over NumPy arrays or arrays on a CUDA device, for tests and for
trainers that need to compute the same function.

The module has all ops of the numeric contract (docs/numerics.md), for every instruction set of this
machine. `isa="ref"` is the specification and `isa=None` the fastest; all are bit-identical, with
any number of `threads`. A bfloat16 array is a uint16 array of its words, or an ml_dtypes.bfloat16
array, which is viewed as words; bfloat16 results are uint16 arrays. Arrays must be C-contiguous.
An array that an op writes to must not overlap another argument, except for indices, which the op
copies first. The output of activate may be x, and that of rms_norm the residual or x. k_cache and
v_cache may be different pages of one array.
The ops check sizes, dtypes and ranges of indices (ShapeError, DTypeError, LayoutError,
RequestError, ConfigError, UnsupportedTensorError) and do not convert dtypes.

`pack` (`pack_gate_up` for SwiGLU) converts the weights of a gemm to the kernels' layout.

Arrays may be on a CUDA device: tensors of torch or CuPy, of any DLPack producer, and DeviceArrays,
which the ops return on a device. Only indices are copied to the host. All arrays of a call must be
on one device, but indices may be NumPy arrays. `isa="cuda_fma"`, the default, is bit-identical to
the CPU. `isa="cuda_mma"` uses tensor cores for bfloat16; it needs weights that were packed and
caches that were filled with the same isa. `torch.from_dlpack(out)` uses an output without a copy;
`out.numpy()` copies it to the host. A call waits until the host has checked indices on the device;
on_stream describes when it waits for the op itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh._core import DeviceArray, Kernels, available_isas, best_isa, isa_states
from rollmesh.errors import ConfigError, ShapeError, UnsupportedTensorError
from rollmesh.ops.arguments import (
    Array,
    array_of,
    matrices_of,
    numpy_dtype,
    round_up,
    size_of,
)
from rollmesh.ops.arguments import (
    kernels as kernels,
)
from rollmesh.ops.devices import (
    on_stream,
    op_device_on,
    op_over,
    release_devices,
    run,
    to_device,
    zeros_in,
)
from rollmesh.ops.types import LmHead, LmHeadPairs, Routing, Sampled, SampleParams
from rollmesh.runtime.arguments import ACTIVATIONS, boolean, choice
from rollmesh.runtime.engine_views import Floats, Ids
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
    "delta_net",
    "delta_states",
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
    "sigmoid_gate",
    "to_device",
    "top_logprobs",
]

_LAYOUT_PLAIN, _LAYOUT_PACKED, _LAYOUT_GATE, _LAYOUT_UP = range(4)
SCORES = ("softmax", "sigmoid")  # rm_score of kernels.h


def _index(name: str, word: str, words: Sequence[str]) -> int:
    """The number of a word in kernels.h."""
    return words.index(choice(name, word, words))


def _new(wanted: bool) -> Any:
    """The value of an optional output: `...` for a new array, None for no array."""
    return ... if wanted else None


# ---------------------------------------------------------------------------------------- weights
def pack(
    weight: Array, *, dtype: str = "bfloat16", isa: str | None = None, threads: int = 1
) -> Array:
    """Returns weights in the packed layout, an array of one dim. weight: [n, k], or [groups, n, k]
    for a grouped gemm; converted to dtype as torch's .to() does."""
    op, (weight,) = op_over(isa, threads, {"weight": weight})
    return _packed(op, matrices_of("weight", weight), _LAYOUT_PACKED, dtype)


def pack_gate_up(
    gate: Array, up: Array, *, dtype: str = "bfloat16", isa: str | None = None, threads: int = 1
) -> Array:
    """Returns gate and up in the packed layout of gemm_swiglu, interleaved by 16 columns. gate, up:
    both [n, k] or [groups, n, k]."""
    op, (gate, up) = op_over(isa, threads, {"gate": gate, "up": up})
    gates, ups = matrices_of("gate", gate), matrices_of("up", up)
    if gates.shape != ups.shape:
        raise ShapeError(
            f"expected gate and up of one shape ([groups, n, k]), got {gates.shape} and {ups.shape}"
        )
    out = _packed(op, gates, _LAYOUT_GATE, dtype)
    return _packed(op, ups, _LAYOUT_UP, dtype, out)


def _packed(op: Kernels, weight: Array, layout: int, dtype: str, out: Array | None = None) -> Array:
    """Packs a matrix, or one of each group, into `out` or a new array."""
    given = {
        "weight": weight, "layout": layout, "dst_row0": 0, "index0": 0, "dst_first": 0, "dst": out,
        "grouped": weight.ndim == 3, "float32_out": numpy_dtype(dtype) is np.float32,
    }  # fmt: skip
    return op.run("pack", given)[0]


def embed(
    ids: Array,
    table: Array,
    *,
    packed: tuple[int, int] | None = None,
    scale: float | None = None,
    out: Array | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> Array:
    """Returns the rows `ids` of a table, [len(ids), hidden], times scale if it is given. table:
    [vocab, hidden], or a packed table with packed=(vocab, hidden)."""
    if packed is not None and not (isinstance(packed, (tuple, list)) and len(packed) == 2):
        raise ShapeError(f"packed: expected (vocab, hidden), got {shown(packed)}")
    sizes = {} if packed is None else {"packed": True, "vocab": packed[0], "hidden": packed[1]}
    return run("embed", isa, threads, ids=ids, table=table, scale=scale, out=out, **sizes)[0]


def gather_rows(
    x: Array,
    rows: NDArray[np.int32],
    *,
    out: Array | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> Array:
    """Returns x[rows], [len(rows), n]. x: [m, n]."""
    return run("gather_rows", **locals())[0]


# -------------------------------------------------------------------------------------- dense ops
def rms_norm(
    residual: Array,
    weight: Array | None,
    *,
    eps: float,
    x: Array | None = None,
    x_gate: Array | None = None,
    x_scale: float | None = None,
    zero_centered: bool = False,
    out: Array | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> Array:
    """Returns weight · residual / rms(residual) for each row, [rows, n], with 1 + weight if
    zero_centered; without a weight, the residual. With x, residual += x is stored to `residual`
    first. x_gate [rows]: adds sigmoid(x_gate) · x instead, with one factor for each row. x_scale:
    adds x_scale · x instead."""
    if x_gate is not None and (x is None or x_scale is not None):
        raise ConfigError(
            f"x_gate: expected x beside it, got {'none' if x is None else 'x_scale too'}"
        )
    return run("rms_norm", **locals())[0]


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
    """Returns x [m, k] times the transpose of a packed matrix [n, k], [m, n]. With group_rows
    [groups + 1], rows group_rows[g] to group_rows[g + 1] are multiplied by matrix g; group_rows
    begins with 0 and ends with m. bias: [n], with group_rows [groups, n]."""
    return run("gemm", **locals())[0]


def gemm_swiglu(
    x: Array,
    w: Array,
    n: int,
    *,
    bias: Array | None = None,
    group_rows: Array | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    out: Array | None = None,
    gate_up: Array | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> Array:
    """Returns activation(x · gate) · (x · up), [m, n]. w: from pack_gate_up; n: the width of gate.
    activation: "silu", "gelu_tanh", "gelu" (with erf) or "relu2" (the square of ReLU); or
    "swiglu_oai", gpt-oss's: g · sigmoid(alpha · g) · (u + 1), where g = min(x · gate, limit) and u
    is x · up within ±limit. bias: [2n], gate's before up's, with group_rows [groups, 2n]. gate_up
    [m, 2n], if given, receives the rounded x · gate and x · up of each row with their biases, for a
    backward pass."""
    return run(
        "gemm_swiglu", **{**locals(), "activation": _index("activation", activation, ACTIVATIONS)}
    )[0]


def activate(
    x: Array, activation: str, *, out: Array | None = None, isa: str | None = None, threads: int = 1
) -> Array:
    """Returns activation(x) for x [rows, n], as in an MLP without a gate. activation: as in
    gemm_swiglu, without "swiglu_oai"."""
    number = _index("activation", activation, ACTIVATIONS[:-1])
    return run("activate", isa, threads, x=x, activation=number, out=out)[0]


def sigmoid_gate(
    x: Array, gate: Array, *, out: Array | None = None, isa: str | None = None, threads: int = 1
) -> Array:
    """Returns sigmoid(gate) · x for x and gate [rows, n]."""
    return run("sigmoid_gate", **locals())[0]


# -------------------------------------------------------------------------------------- attention
def kv_cache(
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    *,
    value_dim: int = 0,
    dtype: str = "bfloat16",
    device: str = "cpu",
) -> tuple[Array, Array]:
    """Returns the pages (k, v) of one layer's cache, filled with zeros. value_dim: elements of a
    head of v; 0 stands for head_dim."""
    op_device = op_device_on(device)
    pages, heads = size_of("num_pages", num_pages), size_of("num_kv_heads", num_kv_heads)
    positions, dim = size_of("page_size", page_size), size_of("head_dim", head_dim)
    of_k = (pages, heads, size_of("page_size * head_dim", positions * round_up(dim, 32)))
    k = zeros_in(op_device, of_k, numpy_dtype(dtype))
    values = size_of("value_dim", value_dim) or dim
    return k, zeros_in(op_device, (pages, heads, positions * round_up(values, 16)), k.dtype)


def rope_table(
    inv_freq: Floats,
    num_positions: int,
    *,
    scale: float = 1.0,
    dtype: str = "bfloat16",
    device: str = "cpu",
) -> tuple[Array, Array]:
    """Returns (cos, sin), float32 [num_positions, len(inv_freq)], already rounded to dtype.
    inv_freq is a NumPy array; the CPU computes the table."""
    op_device = op_device_on(device)
    given = {"num_positions": num_positions, "scale": scale, "inv_freq": inv_freq}
    given["bfloat16"] = numpy_dtype(dtype) is np.uint16
    cos, sin = kernels().run("rope_table", given)
    return (cos, sin) if op_device is None else (op_device.to_device(cos), op_device.to_device(sin))


def head_squares(
    qkv: Array, num_heads: int, head_dim: int, *, isa: str | None = None, threads: int = 1
) -> tuple[Array, Array]:
    """Returns (q_squares [rows, num_heads], k_squares [rows, kv_heads]), float32: the sum of
    squares of each head of q and k. qkv: [rows, (num_heads + 2·kv_heads)·head_dim]. For a norm over
    all heads of a model (qk_rope_kv), concatenate the results of all ranks in the order of the
    heads."""
    return run("head_squares", **locals())


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
    zero_centered: bool = False,
    norm_last: bool = False,
    value_dim: int = 0,
    q_dim: int = 0,
    row_flags: NDArray[np.uint8] | None = None,
    out: Array | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> Array:
    """Norms and rotates q and k of qkv [rows, (num_heads + 2·kv_heads)·head_dim], and writes k and
    v to their slots. Returns q [rows, num_heads, head_dim].

    q_weight, k_weight: [head_dim]; both None: no norm. squares: (q_squares, k_squares) of
    head_squares, [rows, all heads of the model] and [rows, all its kv heads]. With squares, q and k
    are each normed over all these heads, and q_weight is [num_heads·head_dim] and k_weight
    [kv_heads·head_dim], for the heads in qkv. zero_centered: factors are 1 + weight. norm_last:
    heads are rotated first and then normed; not with squares. cos, sin: [positions, n]; the first
    2·n elements of a head are rotated in pairs (i, i + n), and n is at most head_dim / 2.
    A k or v row that is not finite is stored as zeros and sets bit 0 of its row in row_flags.

    Latent attention (value_dim > 0): qkv is [rows, num_heads·q_dim + value_dim + 2·n], q, then the
    latent, then the key. The last 2·n elements of each head of q are rotated and become the
    first elements of the head in the result; its other value_dim elements are not written. k of the
    only kv head is the rotated key, then the latent normed by k_weight [value_dim]; v is the normed
    latent.
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
    if squares is not None and norm_last:
        raise ConfigError("norm_last: expected False with squares, got True")
    if not value_dim and (q_weight is None) != (k_weight is None):
        raise ConfigError(
            "q_weight, k_weight: expected both or none, got only "
            f"{'k_weight' if q_weight is None else 'q_weight'}"
        )
    given = locals()
    given["q_squares"], given["k_squares"] = given.pop("squares") or (None, None)
    return run("qk_rope_kv", **given)[0]


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
    softcap: float | None = None,
    window: int = 0,
    group: int = 0,
    head0: int = 0,
    value_dim: int = 0,
    sinks: Array | None = None,
    out: Array | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> Array:
    """Returns attention of q [rows, heads, head_dim] over positions max(0, p − window + 1) … p of
    each row's sequence, through the block table of the sequence. With softcap, scores are
    softcap · tanh(score / softcap).

    Query head h reads kv head (head0 + h) // group of the caches; group 0 stands for
    heads // kv_heads. For a rank's shard of the heads, pass the model's group and, as head0, the
    index of the shard's first head within its group. sinks [heads]: for each query head a logit
    that takes part in the softmax without a key or a value. value_dim: elements of a value and of
    a head of the result, at most head_dim; 0 stands for head_dim.
    """
    return run("attention", **locals())[0]


# ------------------------------------------------------------------------------------- delta rule
def delta_states(
    num_slots: int,
    num_v_heads: int,
    k_dim: int,
    v_dim: int,
    kernel: int,
    *,
    dtype: str = "bfloat16",
    device: str = "cpu",
) -> Array:
    """Returns slots for the states of delta_net, float32 [num_slots, …], filled with zeros."""
    given = (num_v_heads, k_dim, v_dim, kernel)
    heads, k, v, taps = (size_of(name, n) for name, n in zip(_STATE_SIZES, given, strict=True))
    window = (taps - 1) * (2 * k + v) * np.dtype(numpy_dtype(dtype)).itemsize
    floats = round_up(v, 16) * round_up(k, 32) + round_up(window, 64) // 4
    shape = (size_of("num_slots", num_slots), size_of("a state", heads * floats))
    return zeros_in(op_device_on(device), shape, np.float32)


_STATE_SIZES = ("num_v_heads", "k_dim", "v_dim", "kernel")


def delta_net(
    x: Array,
    conv: Array,
    a_log: Array,
    dt_bias: Array,
    norm: Array,
    states: Array,
    load_slots: Array,
    save_slots: Array,
    seq_of_row: Array,
    *,
    k_dim: int,
    eps: float,
    group: int = 0,
    head0: int = 0,
    out: Array | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> Array:
    """Returns the gated delta rule (Qwen3-Next) over the rows of sequences, [rows, v_heads, v_dim].
    The rows of a sequence are adjacent and in order.

    x: [rows, columns], q and k of the key heads, v and z of the value heads, then b and a, which
    have one number for each value head. conv: [channels, kernel], the causal convolution of q, k
    and v. a_log, dt_bias: float32 [v_heads]. norm: [v_dim]. states: from delta_states. load_slots:
    the slot of each sequence's state before its first row, or −1 for zeros. save_slots [rows]: the
    slot to which the state after the row is written, or −1. Only the last row of a sequence may be
    saved to the slot that the sequence is loaded from. k_dim and v_dim are at most 128. group,
    head0: as in attention, with value heads in place of query heads and key heads in place of kv
    heads.
    """
    return run("delta_net", **locals())[0]


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
    min_sum: float = 0.0,
    logit_bias: Array | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> Routing:
    """Returns the top_k experts of each row of x [rows, hidden] by score + bias, and their scores
    as gates, both [rows, top_k].

    `score`: "softmax" or "sigmoid" of the logits, to which logit_bias [num_experts] is added.
    `renormalize` divides the gates by their sum (with "sigmoid" by their sum + 1e-20, with
    "softmax" at least by `min_sum`); then they are multiplied by `route_scale`. num_groups > 1
    (at most 64) divides the experts into groups of at least two consecutive experts. Only experts
    of `top_groups` groups are then chosen: those with the largest sums of their two largest
    score + bias (DeepSeek-V3, arXiv 2412.19437). Raises ConfigError for another score, or for a
    route_scale or min_sum that is not a finite float32 >= 0, and ShapeError for groups that do not
    divide num_experts or have fewer than top_k experts.
    """
    return Routing(*run("router", **{**locals(), "score": _index("score", score, SCORES)}))


def permute(
    x: Array, ids: Ids, num_experts: int, *, isa: str | None = None, threads: int = 1
) -> tuple[Array, Array, Array]:
    """Returns (x sorted by expert [rows·top_k, hidden], group_rows [num_experts + 1], place [rows,
    top_k])."""
    return run("permute", **locals())


def combine(
    y: Array,
    place: NDArray[np.int32],
    ids: Ids,
    gates: Floats,
    num_experts: int,
    *,
    out: Array | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> Array:
    """Returns each row's sum of gate · y[place] over its experts, [rows, hidden], in the order of
    the contract's tree. The experts of a row must be distinct."""
    return run("combine", **locals())[0]


# ------------------------------------------------------------------------------ logits and tokens
def lm_head(
    x: Array,
    w: Array,
    vocab: int,
    *,
    targets: Ids | None = None,
    keep_logits: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> LmHead:
    """Returns the logits of x [rows, hidden], their statistics, and the logprob of one target for
    each row (−1: no target). With scale, logits are multiplied by it; then, with softcap, they are
    softcap · tanh(logit / softcap)."""
    return LmHead(*_head("lm_head", "target_logprobs", **locals()))


def lm_head_pairs(
    x: Array,
    w: Array,
    vocab: int,
    *,
    targets: Ids | None = None,
    keep_logits: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> LmHeadPairs:
    """Computes lm_head over a shard of the vocabulary. A shard has whole blocks of 128 entries,
    except for the last block of the vocabulary, and may be empty.

    targets are counted from the shard's first entry; −1 stands for targets in other shards. Pass
    the pairs of all shards, concatenated in the order of the vocabulary, to merge_pairs.
    """
    return LmHeadPairs(*_head("lm_head_pairs", "target_logits", **locals()))


def _head(op: str, of_targets: str, keep_logits: bool, **given: Any) -> tuple[Any, ...]:
    """Runs an op of the head. of_targets: its output for targets."""
    given["logits"] = _new(boolean("keep_logits", keep_logits))
    given[of_targets] = _new(given["targets"] is not None)
    return run(op, **given)


def merge_pairs(
    pairs: Floats,
    *,
    targets: Ids | None = None,
    target_logits: Floats | None = None,
    isa: str | None = None,
    threads: int = 1,
) -> LmHead:
    """Returns the result of lm_head without logits, from the pairs [blocks, rows, 2] of all blocks
    of the vocabulary, in order. targets: −1, or a token whose logit is in target_logits."""
    if (targets is None) != (target_logits is None):
        absent = "target_logits" if target_logits is None else "targets"
        raise UnsupportedTensorError(
            f"expected both of targets and target_logits, or neither, got {absent} = None"
        )
    stats, logprobs, row_flags = run(
        "merge_pairs", isa, threads, pairs=pairs, targets=targets, target_logits=target_logits,
        target_logprobs=_new(targets is not None),
    )  # fmt: skip
    return LmHead(None, stats, logprobs, row_flags)


def sample(
    logits: Floats,
    stats: Floats,
    params: SampleParams | Sequence[SampleParams],
    *,
    forced: Array | None = None,
    row_flags: NDArray[np.uint8] | None = None,
    kept: bool = False,
    isa: str | None = None,
    threads: int = 1,
) -> Sampled:
    """Draws one token for each row of logits [rows, vocab]. stats: those of lm_head. params: one
    for all rows, or one for each row. forced [rows], if given, replaces params.forced of each row.
    kept: also count the tokens that the filters kept; 1 at temperature 0, 0 in a row without a
    token."""
    _, (logits,) = op_over(isa, threads, {"logits": logits})
    rows = array_of("logits", logits, 2).shape[0]
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
    columns = {
        name: np.array([getattr(p, name) for p in each], dtype)
        for name, dtype in SampleParams.COLUMNS.items()
    }
    if forced is not None:
        columns["forced"] = forced
    _, *sampled = run(
        "sample", isa, threads, logits=logits, stats=stats, row_flags=row_flags,
        kept=_new(boolean("kept", kept)),
        banned_starts=np.cumsum([0, *(len(p.banned) for p in each)]).astype(np.int32),
        banned=np.array([token for p in each for token in p.banned], np.int32), **columns,
    )  # fmt: skip
    return Sampled(*sampled)


def top_logprobs(
    logits: Floats,
    stats: Floats,
    k: int,
    *,
    isa: str | None = None,
    threads: int = 1,
) -> tuple[Array, Array]:
    """Returns (ids, logprobs), both [rows, k], of the k likeliest tokens, best first; of equal
    tokens the lowest id comes first."""
    return run("top_logprobs", **locals())


def ranks(
    logits: Floats,
    tokens: Ids,
    *,
    isa: str | None = None,
    threads: int = 1,
) -> Array:
    """Returns the rank of each token in its row of logits [rows, vocab], as [rows]: the number of
    logits that are at least as large; 0 for token −1."""
    return run("ranks", **locals())[0]
