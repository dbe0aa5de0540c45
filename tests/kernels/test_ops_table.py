"""Every argument of every op, by the table of the extension (ext/ops/ops.h).

Input: one valid call of each op; then the same call with one argument replaced by a value that is
invalid for its kind. Oracle: the class of the error and the name of the argument in its message;
for outputs, the bits of the call that allocates them itself. Bound: zero differing bits.

An op or argument of the table without a value below fails the first test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rollmesh import _core, errors, ops

TABLE = _core.op_arguments()
F32, I32, WORDS = np.float32, np.int32, np.uint16


def f32(*shape: int) -> Any:
    return np.ones(shape, F32)


def i32(*shape: int) -> Any:
    return np.zeros(shape, I32)


def words(*shape: int) -> Any:
    return np.full(shape, 0x3F80, WORDS)  # ones


HEAD = {
    "x": words(2, 32),
    "w": words(16 * 32),
    "vocab": 16,
    "scale": 0.5,
    "softcap": 30.0,
    "targets": i32(2),
    "logits": f32(2, 16),
}
CASES: dict[str, dict[str, Any]] = {
    "pack": {
        "layout": 1, "dst_row0": 0, "index0": 0, "dst_first": 0, "grouped": True,
        "float32_out": False, "weight": words(2, 16, 32), "dst": words(2 * 512),
        "found": np.zeros(3, np.int64),
    },
    "rope_table": {
        "num_positions": 3, "scale": 1.0, "bfloat16": False, "inv_freq": f32(2),
        "cos": f32(3, 2), "sin": f32(3, 2),
    },
    "embed": {
        "packed": True, "vocab": 16, "hidden": 32, "ids": i32(2), "table": words(512),
        "scale": 2.0, "out": words(2, 32),
    },
    "gather_rows": {"x": words(2, 32), "rows": i32(3), "out": words(3, 32)},
    "rms_norm": {
        "eps": 1e-6, "residual": words(2, 32), "x": words(2, 32), "x_gate": words(2),
        "weight": words(32), "zero_centered": True, "x_scale": 0.5, "out": words(2, 32),
    },
    "gemm": {
        "n": 16, "float32_out": False, "x": words(2, 32), "w": words(512), "bias": words(16),
        "out": words(2, 16),
    },
    "gemm_swiglu": {
        "n": 16, "activation": 0, "alpha": 1.0, "limit": 1.0, "x": words(2, 32), "w": words(1024),
        "out": words(2, 16), "group_rows": np.array([0, 2], I32), "bias": words(1, 32),
        "gate_up": words(2, 32),
    },
    "sigmoid_gate": {"x": words(2, 32), "gate": words(2, 32), "out": words(2, 32)},
    "activate": {"activation": 3, "x": words(2, 32), "out": words(2, 32)},
    "head_squares": {
        "num_heads": 2, "head_dim": 32, "qkv": words(2, 128), "q_squares": f32(2, 2),
        "k_squares": f32(2, 1),
    },
    "qk_rope_kv": {
        "num_heads": 2, "page_size": 16, "eps": 1e-6, "zero_centered": True, "norm_last": False,
        "value_dim": 0, "q_dim": 0,
        "qkv": words(2, 128), "q_weight": words(64),
        "k_weight": words(32), "k_cache": words(1, 1, 512), "v_cache": words(1, 1, 512),
        "cos": f32(4, 16), "sin": f32(4, 16), "positions": i32(2), "slots": np.arange(2),
        "q_squares": f32(2, 4), "k_squares": f32(2, 2), "out": words(2, 2, 32),
        "row_flags": np.zeros(2, np.uint8),
    },
    "attention": {
        "page_size": 16, "window": 0, "scale": 1.0, "softcap": 30.0, "group": 2, "head0": 0,
        "value_dim": 0,
        "q": words(2, 2, 32),
        "k_cache": words(1, 1, 512), "v_cache": words(1, 1, 512), "positions": i32(2),
        "seq_of_row": i32(2), "block_tables": i32(1, 2), "sinks": words(2), "out": words(2, 2, 32),
    },
    "delta_net": {
        "k_dim": 4, "group": 2, "head0": 1, "eps": 1e-6, "conv": words(32, 2), "a_log": f32(2),
        "dt_bias": f32(2), "norm": words(8), "x": words(2, 52), "states": f32(3, 1056),
        "load_slots": i32(1), "save_slots": np.array([1, 2], I32), "seq_of_row": i32(2),
        "out": words(2, 2, 8),
    },
    "router": {
        "num_experts": 4, "top_k": 2, "renormalize": True, "score": 1, "num_groups": 2,
        "top_groups": 1, "route_scale": 1.0, "min_sum": 0.0, "x": words(2, 32), "w": words(512),
        "bias": f32(4), "logit_bias": words(4), "ids": i32(2, 2), "gates": f32(2, 2),
    },
    "permute": {
        "num_experts": 4, "x": words(2, 32), "ids": i32(2, 2), "x_out": words(4, 32),
        "group_rows": i32(5), "place": i32(2, 2),
    },
    "combine": {
        "num_experts": 4, "place": i32(2, 2), "ids": np.array([[0, 1], [2, 3]], I32),
        "gates": f32(2, 2), "y": words(4, 32), "out": words(2, 32),
    },
    "lm_head": {
        **HEAD, "stats": f32(2, 2), "target_logprobs": f32(2), "row_flags": np.zeros(2, np.uint8),
    },
    "lm_head_pairs": {
        **HEAD, "pairs": f32(1, 2, 2), "target_logits": f32(2), "row_flags": np.zeros(2, np.uint8),
    },
    "merge_pairs": {
        "pairs": f32(1, 2, 2), "targets": i32(2), "target_logits": f32(2), "stats": f32(2, 2),
        "target_logprobs": f32(2), "row_flags": np.zeros(2, np.uint8),
    },
    "sample": {
        "logits": f32(2, 16), "stats": f32(2, 2), "row_flags": np.zeros(2, np.uint8),
        "tokens": i32(2), "logprobs": f32(2), "sampling_logprobs": f32(2), "kept": i32(2),
        "temperature": f32(2), "top_p": f32(2), "min_p": np.zeros(2, F32),
        "top_k": np.full(2, -1, I32), "seed": np.zeros(2, np.uint64),
        "counter": np.zeros(2, np.uint64), "forced": np.full(2, -1, I32),
        "banned_starts": i32(3), "banned": i32(0),
    },
    "top_logprobs": {
        "k": 3, "logits": f32(2, 16), "stats": f32(2, 2), "ids": i32(2, 3), "logprobs": f32(2, 3),
    },
    "ranks": {"logits": f32(2, 16), "tokens": i32(2), "ranks": i32(2)},
}  # fmt: skip
GROUPED = {"group_rows": np.array([0, 2], I32), "bias": words(1, 16)}
SIZES = (-1, -2, -64, 2**31, 2**59, 2**60, 2**63 - 1, -(2**63), 2**64, "1", 1.0, None, True)


def run(op: str, **changes: Any) -> tuple[Any, ...]:
    copies = {name: np.copy(v) if isinstance(v, np.ndarray) else v for name, v in CASES[op].items()}
    return ops.kernels("ref").run(op, copies | changes)


def arguments(*roles: str) -> list[tuple[str, str]]:
    return [
        (op, name)
        for op, named in TABLE.items()
        for name, role in named.items()
        if role in roles and name in CASES.get(op, ())
    ]


ARRAYS = arguments("in", "index", "host", "inout", "out")


def test_every_argument_has_a_value() -> None:
    assert {op: set(named) for op, named in TABLE.items()} == {
        op: set(named) | ({"group_rows"} if op == "gemm" else set()) for op, named in CASES.items()
    }
    run("gemm", **GROUPED)


def wrong_arrays(array: Any) -> Iterator[tuple[type[errors.Error], Any]]:
    yield errors.UnsupportedTensorError, array.tolist()
    yield errors.UnsupportedTensorError, np.ma.masked_array(array)
    yield errors.DTypeError, array.astype(np.complex128)
    yield errors.ShapeError, array[None]
    if array.size > 1:
        yield errors.LayoutError, np.repeat(array, 2, -1)[..., ::2]
    if array.ndim > 1:
        yield errors.ShapeError, array[0]


@pytest.mark.parametrize(("op", "name"), ARRAYS)
def test_an_array_that_does_not_fit(op: str, name: str) -> None:
    for error, wrong in wrong_arrays(CASES[op][name]):
        with pytest.raises(error, match=rf"^{name}\b"):
            run(op, **{name: wrong})


@pytest.mark.parametrize(("op", "name"), arguments("inout", "out"))
def test_an_array_that_is_written(op: str, name: str) -> None:
    if (op, name) == ("sample", "row_flags"):
        return  # an input that the op makes if it is absent
    array = CASES[op][name].copy()
    array.flags.writeable = False
    with pytest.raises(errors.LayoutError, match=rf"^{name}: expected a writable array"):
        run(op, **{name: array})


MAY_BE_NONE = {
    *(("rms_norm", "x_scale"), ("embed", "scale"), ("attention", "softcap")),
    *((op, name) for op in ("lm_head", "lm_head_pairs") for name in ("scale", "softcap")),
}


@pytest.mark.parametrize(("op", "name"), arguments("number"))
def test_a_number_out_of_range(op: str, name: str) -> None:
    value = CASES[op][name]
    if isinstance(value, bool):
        return  # a flag goes by its truth value
    if isinstance(value, float):
        nothing = () if (op, name) in MAY_BE_NONE else (None,)
        for real in (np.nan, np.inf, 1e39, "1", *nothing, True):
            with pytest.raises(errors.ConfigError, match=rf"^{name}: expected a finite float32"):
                run(op, **{name: real})
        return
    for size in SIZES:
        if op == "pack" and name != "dst_row0" and size == 2**31:
            continue  # an index of an element
        with pytest.raises(errors.ShapeError, match=rf"^{name}: expected an integer in \["):
            run(op, **{name: size})


@pytest.mark.parametrize("op", CASES)
def test_outputs_that_are_made_or_given(op: str) -> None:
    outputs = [name for name, role in TABLE[op].items() if role == "out"]
    given = {name: CASES[op][name].copy() for name in outputs}
    mine, made = run(op, **given), run(op, **dict.fromkeys(outputs, ...))
    assert len(mine) == len(made) == len(outputs)
    for name, a, b in zip(outputs, mine, made, strict=True):
        assert a is given[name]
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), name


def test_what_is_no_argument() -> None:
    with pytest.raises(TypeError, match="ranks: expected arguments of the op, got"):
        run("ranks", n=1)
    with pytest.raises(ValueError, match="expected the name of an op, got 'rank'"):
        ops.kernels("ref").run("rank", {})
    with pytest.raises(errors.UnsupportedTensorError, match=r"^logits: expected .*NoneType"):
        ops.kernels("ref").run("ranks", {})
