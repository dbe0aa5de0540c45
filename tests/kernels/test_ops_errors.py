"""Refusals of the ops. Input: wrong calls, sizes beyond any memory, and a fork during an op.
Oracle: the class of the error (each derives from ValueError) and the outputs, which a refused call
does not change.

Sizes that would overflow a product, and the fork, run in a separate process, because a failure
there is a crash or a hang.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ops_cases import DTYPES, Array, normal

from rollmesh import _core, errors, ops

HUGE = (2**31, 2**59, 2**60, 2**63, 2**64, -(2**31), -1, -64)


def words(*shape: int) -> Array:
    return np.zeros(shape, np.uint16)


def ints(*values: int) -> Array:
    return np.array(values, np.int32)


def run_script(body: str) -> None:
    head = """
        import os, signal, sys, threading, time, warnings
        import numpy as np
        from rollmesh import _core, errors, ops
        z, i, f = (lambda *s: np.zeros(s, np.uint16)), np.int32, np.float32
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [
        sys.executable,
        "-X",
        "faulthandler",
        "-c",
        textwrap.dedent(head) + textwrap.dedent(body),
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


# ------------------------------------------------------------------------- rows outside all groups
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_share_out_every_row(dtype: str, swiglu: bool, rng: np.random.Generator) -> None:
    """group_rows begins with 0 and ends with m; otherwise rows of the output would not be
    written."""
    x, gate = normal(rng, (4, 32), dtype), normal(rng, (2, 16, 32), dtype)
    w = ops.pack_gate_up(gate, gate, dtype=dtype) if swiglu else ops.pack(gate, dtype=dtype)
    op: Callable[..., Array] = ops.gemm_swiglu if swiglu else ops.gemm
    before = normal(rng, (4, 16), dtype)
    for bounds in ([1, 2, 3], [0, 2, 3], [1, 2, 4], [4, 4, 4], [0, 0, 0]):
        out = before.copy()
        with pytest.raises(errors.ShapeError, match=r"(first|last) of group_rows"):
            op(x, w, 16, group_rows=ints(*bounds), out=out)
        assert (out == before).all()
    with pytest.raises(errors.ShapeError, match=r"last of group_rows: expected .*got 0"):
        op(x, w[:0], 16, group_rows=ints(0))
    assert op(x[:0], w[:0], 16, group_rows=ints(0)).shape == (0, 16)
    first, second = (
        op(part, half, 16) for part, half in ((x[:1], w[: w.size // 2]), (x[1:], w[w.size // 2 :]))
    )
    assert (op(x, w, 16, group_rows=ints(0, 1, 4)) == np.concatenate([first, second])).all()


def test_gate_and_up_have_one_shape() -> None:
    for gate, up in (
        ((32, 64), (32, 33)),
        ((3, 32), (5, 32)),
        ((2, 32, 32), (3, 32, 32)),
        ((2, 8, 8), (8, 8)),
        ((8,), (8,)),
    ):
        with pytest.raises(errors.ShapeError):
            ops.pack_gate_up(words(*gate), words(*up))
    for shape in ((), (3,), (1, 2, 3, 4)):
        with pytest.raises(errors.ShapeError, match="expected 2 dims, or 3"):
            ops.pack(words(*shape))


# ---------------------------------------------------------------------------------- a rank's part
def test_heads_and_the_kv_heads_that_they_read() -> None:
    """(group, head0) must make the query heads read exactly the kv heads of the caches."""

    def attend(heads: int, kv_heads: int, group: int, head0: int) -> Array:
        rows = (ints(0), ints(0), np.zeros((1, 1), np.int32))
        return ops.attention(
            words(1, heads, 32),
            *ops.kv_cache(1, kv_heads, 16, 32),
            *rows,
            page_size=16,
            scale=1.0,
            group=group,
            head0=head0,
        )

    for heads, kv_heads, group, head0 in (
        (4, 2, 0, 0),
        (4, 2, 2, 0),
        (4, 2, 3, 2),
        (4, 2, 3, 1),
        (3, 1, 8, 5),
        (1, 1, 2**31 - 1, 2**31 - 2),
    ):
        assert attend(heads, kv_heads, group, head0).shape == (1, heads, 32)
    for heads, kv_heads, group, head0 in (
        (3, 2, 0, 0),
        (4, 2, 0, 1),
        (4, 2, 2, 1),
        (4, 2, 4, 0),
        (4, 2, 1, 0),
        (3, 1, 8, 8),
        (3, 1, 8, 6),
    ):
        with pytest.raises(errors.ShapeError, match="head"):
            attend(heads, kv_heads, group, head0)


def test_squares_and_what_goes_with_them() -> None:
    """squares covers all heads of a model, at least the heads of this rank; the weights cover the
    heads of this rank."""
    f32, angles, place = (
        np.float32,
        (np.zeros((1, 0), np.float32),) * 2,
        (ints(0), np.zeros(1, np.int64)),
    )

    def rope(squares: object, q: Array | None, k: Array | None) -> Array:
        return ops.qk_rope_kv(
            words(1, 4 * 32),
            q,
            k,
            *angles,
            *place,
            *ops.kv_cache(1, 1, 16, 32),
            num_heads=2,
            page_size=16,
            eps=1e-6,
            squares=squares,
        )  # type: ignore[arg-type]

    q, k, of_q, of_k = words(64), words(32), np.ones((1, 2), f32), np.ones((1, 1), f32)
    for good in ((of_q, of_k), [np.ones((1, 8), f32), np.ones((1, 4), f32)]):
        assert rope(good, q, k).shape == (1, 2, 32)
    for wrong in (of_q, (of_q,), (of_q, of_k, of_k), (None, None), (of_q, None), 1):
        with pytest.raises(
            errors.ConfigError, match=r"^squares: expected \(q_squares, k_squares\), got"
        ):
            rope(wrong, q, k)
    for weights, absent in (
        ((None, None), "q_weight"),
        ((q, None), "k_weight"),
        ((None, k), "q_weight"),
    ):
        with pytest.raises(
            errors.ConfigError,
            match=f"^squares: expected q_weight and k_weight with them, got {absent} = None",
        ):
            rope((of_q, of_k), *weights)
    for name, squares in (("q", (of_k, of_k)), ("k", (of_q, of_k[:, :0]))):
        with pytest.raises(
            errors.ShapeError, match=rf"^{name}_squares.shape\[1\]: expected at least"
        ):
            rope(squares, q, k)
    for name, squares in (("q", (np.ones((2, 2), f32), of_k)), ("k", (of_q, of_k[0]))):
        with pytest.raises(errors.ShapeError, match=f"^{name}_squares: expected"):
            rope(squares, q, k)
    for name, weights in (("q", (words(32), k)), ("k", (q, words(64)))):
        with pytest.raises(errors.ShapeError, match=f"^{name}_weight: expected"):
            rope((of_q, of_k), *weights)
    with pytest.raises(errors.ShapeError, match=r"^q_weight: expected size 32 in dim 0, got 64"):
        rope(None, q, k)
    with pytest.raises(errors.DTypeError, match=r"^q_squares: expected"):
        rope((of_q.astype(np.float64), of_k), q, k)
    for columns, heads, head_dim in ((96, 3, 32), (97, 1, 32), (0, 0, 0), (64, 2, 32), (96, 1, 0)):
        with pytest.raises(
            errors.ShapeError, match=r"^qkv: expected \(\d+ \+ 2·kv_heads\)·\d+ columns"
        ):
            ops.head_squares(words(1, columns), heads, head_dim)
    with pytest.raises(errors.ShapeError, match=r"^num_heads: expected at least 1, got 0"):
        ops.head_squares(words(1, 64), 0, 32)


@pytest.mark.parametrize("dtype", ["float64", "float16", "int32", "bool"])
def test_a_wrong_dtype_is_named(dtype: str) -> None:
    """The error lists the expected dtypes; for a value that is not an array it says so."""
    wrong, core = np.zeros((2, 32), dtype), ops.kernels("ref")
    either = rf"expected bfloat16 \(its words in uint16\) or float32, got {dtype}"
    for name, call in (
        ("x", lambda: ops.gemm(wrong, words(512), 16)),
        ("x", lambda: ops.gather_rows(wrong, ints(0))),
        ("residual", lambda: ops.rms_norm(wrong, words(32), eps=1e-6)),
        ("table", lambda: ops.embed(ints(0), wrong)),
        ("x", lambda: ops.lm_head(wrong, words(512), 16)),
    ):
        with pytest.raises(errors.DTypeError, match=f"^{name}: {either}$"):
            call()
    with pytest.raises(errors.DTypeError, match=rf"^weight: expected dtype uint16, got {dtype}$"):
        ops.rms_norm(words(2, 32), wrong[0], eps=1e-6)
    if dtype in ("int32", "bool"):
        with pytest.raises(
            errors.DTypeError,
            match=rf"^weight: expected bfloat16 .* float16 or float64, got {dtype}$",
        ):
            ops.pack(wrong)
    with pytest.raises(
        errors.UnsupportedTensorError,
        match=r"^x: expected an array of bfloat16 .*got <class 'list'>",
    ):
        core.run("gather_rows", {"x": [1.0], "rows": ints(0)})


def test_pairs_and_what_goes_with_them() -> None:
    f32, one = np.float32, ints(-1)
    pairs = np.ones((2, 1, 2), f32)
    for wrong in (pairs[:0], pairs[0], np.ones((2, 1, 3), f32)):
        with pytest.raises(errors.ShapeError):
            ops.merge_pairs(wrong)
    with pytest.raises(
        errors.UnsupportedTensorError, match=r"pairs: expected a NumPy array of float32, got .*list"
    ):
        ops.merge_pairs([1.0])  # type: ignore[arg-type]
    with pytest.raises(errors.DTypeError):
        ops.merge_pairs(pairs.astype(np.float64))
    with pytest.raises(errors.LayoutError):
        ops.merge_pairs(np.ones((2, 2, 2), f32).transpose(1, 0, 2))
    with pytest.raises(
        errors.UnsupportedTensorError,
        match="both of targets and target_logits, or neither, got target_logits = None",
    ):
        ops.merge_pairs(pairs, targets=one)
    with pytest.raises(
        errors.UnsupportedTensorError,
        match="both of targets and target_logits, or neither, got targets = None",
    ):
        ops.merge_pairs(pairs, target_logits=np.ones(1, f32))
    with pytest.raises(
        errors.UnsupportedTensorError,
        match="target_logits: expected a NumPy array of float32, got <class 'NoneType'>",
    ):
        ops.kernels().run("merge_pairs", {"pairs": pairs, "targets": one, "target_logprobs": ...})
    with pytest.raises(errors.ShapeError, match="targets"):
        ops.merge_pairs(pairs, targets=ints(0, 0), target_logits=np.ones(2, f32))
    for token in (-2, 256):
        with pytest.raises(errors.RequestError, match="targets"):
            ops.merge_pairs(pairs, targets=ints(token), target_logits=np.ones(1, f32))
    assert ops.merge_pairs(
        pairs, targets=ints(255), target_logits=np.ones(1, f32)
    ).stats.tolist() == [[1.0, 2.0]]
    core, head = ops.kernels("ref"), {"x": words(1, 32), "w": words(512), "vocab": 16}
    for wrong in (pairs, np.ones((1, 2, 2), f32), np.ones((0, 1, 2), f32)):
        with pytest.raises(errors.ShapeError, match="pairs"):
            core.run("lm_head_pairs", {**head, "pairs": wrong})
    with pytest.raises(errors.ShapeError, match="vocab"):
        core.run("lm_head", {"x": words(1, 32), "w": words(0), "vocab": 0})
    for op, out in (("lm_head", "target_logprobs"), ("lm_head_pairs", "target_logits")):
        with pytest.raises(errors.Error, match="targets"):
            core.run(op, {**head, out: ...})
    assert ops.lm_head_pairs(words(1, 32), words(0), 0, targets=one).pairs.shape == (0, 1, 2)


def test_where_a_part_of_a_parameter_may_begin() -> None:
    def pack(cols: int, index0: int) -> Array:
        given = {
            "weight": words(1, cols), "layout": 1, "dst_row0": 0, "index0": index0, "dst_first": 0,
            "grouped": False, "dst": words(1024),
        }  # fmt: skip
        return ops.kernels("ref").run("pack", given)[1]

    for cols, index0 in ((32, 1), (32, 33), (32, -32), (33, -1), (33, 2**63 - 1)):
        with pytest.raises(errors.ShapeError, match="index0"):
            pack(cols, index0)
    with pytest.raises(errors.ShapeError, match="expected even, such as 32, got 33"):
        pack(32, 33)
    for cols, index0 in ((32, 2), (33, 1), (33, 2**40)):
        assert pack(cols, index0).tolist() == [0, -1, -1]


# ------------------------------------------------------------------------------------------ sizes
def test_sizes_that_wrap_are_refused() -> None:
    """Products of these sizes are 0, or small, in 64 bits, so that an unchecked call would access
    memory far outside its arrays."""
    run_script("""
        position, tables = dict(num_heads=1, page_size=2**59, eps=1e-6), (np.array([0], i),
            np.array([[0]], i))
        angles = (np.zeros((4, 16), f),) * 2
        calls = (
            lambda: ops.embed(np.array([2**31 - 1], i), z(0), packed=(2**60, 64), out=z(1, 64)),
            lambda: ops.embed(np.array([900000], i), z(16), packed=(10**6, -64), out=z(1, 64)),
            lambda: ops.embed(np.array([900000], i), z(16), packed=(10**6, -1), out=z(1, 64)),
            lambda: ops.attention(z(1, 1, 32), z(1, 1, 0), z(1, 1, 0), np.array([10**6], i),
                *tables, page_size=2**59, scale=1.0),
            lambda: ops.qk_rope_kv(z(1, 96), z(32), z(32), *angles, tables[0], np.array([10**10]),
                z(1, 1, 0), z(1, 1, 0), **position),
            lambda: ops.router(z(1, 32), z(0), 2**59, 1),
            lambda: ops.lm_head(z(1, 32), z(0), 2**59, targets=np.array([-1], i),
                keep_logits=False),
            lambda: ops.gemm(z(0, 32), z(0), 2**59),
            lambda: ops.gemm_swiglu(z(0, 2**31 - 1), z(0), 2**31 - 1),
            lambda: ops.gemm(z(0, 2**40), z(0), 0),
        )
        for n, call in enumerate(calls):
            try:
                call()
            except errors.ShapeError:
                continue
            sys.exit(f"call {n} went through")
    """)


@pytest.mark.parametrize("size", HUGE)
def test_sizes_no_array_can_have(size: int) -> None:
    f32, table = np.zeros((1, 8), np.float32), words(1, 1)
    stats, tables = np.zeros((1, 2), np.float32), (ints(0), ints(0), np.zeros((1, 1), np.int32))
    calls: tuple[Callable[[], object], ...] = (
        lambda: ops.gemm(words(1, 32), words(512), size),
        lambda: ops.gemm_swiglu(words(1, 32), words(1024), size),
        lambda: ops.embed(ints(0), words(512), packed=(size, 32)),
        lambda: ops.embed(ints(0), words(512), packed=(1, size)),
        lambda: ops.kv_cache(size, 1, 16, 32),
        lambda: ops.kv_cache(1, size, 16, 32),
        lambda: ops.kv_cache(1, 1, size, 32),
        lambda: ops.kv_cache(1, 1, 16, size),
        lambda: ops.rope_table(np.ones(4, np.float32), size),
        lambda: ops.attention(
            words(1, 1, 32), *ops.kv_cache(1, 1, 16, 32), *tables, page_size=size, scale=1.0
        ),
        lambda: ops.attention(
            words(1, 1, 32),
            *ops.kv_cache(1, 1, 16, 32),
            *tables,
            page_size=16,
            scale=1.0,
            window=size,
        ),
        lambda: ops.router(words(1, 32), words(512), size, 1),
        lambda: ops.router(words(1, 32), words(512), 4, size),
        lambda: ops.permute(words(1, 1), ints(0)[None], size),
        lambda: ops.combine(table, ints(0)[None], ints(0)[None], f32[:, :1].copy(), size),
        lambda: ops.lm_head(words(1, 32), words(512), size),
        lambda: ops.top_logprobs(f32, stats, size),
    )
    for call in calls:
        with pytest.raises(errors.ShapeError):
            call()


def test_numbers_are_numbers() -> None:
    """Refused values are named in the error. Other exceptions (Ctrl-C, out of memory) are passed
    on. A flag is used by its truth value."""
    x, weight = np.ones((2, 32), np.float32), np.ones(32, np.float32)
    for eps, said in (
        (b"1", "b'1'"),
        (np.True_, "True"),
        (True, "True"),
        ("1", "'1'"),
        (-1.0, "-1.0"),
        (10**400, "an integer beyond it"),
    ):
        with pytest.raises(
            errors.ConfigError, match=f"^eps: expected a finite float32 >= 0, got .*{said}"
        ):
            ops.rms_norm(x, weight, eps=eps)
    tables, caches = (ints(0), ints(0), np.zeros((1, 1), np.int32)), ops.kv_cache(1, 1, 16, 32)
    for size, said in (
        (2**63, "one of more than 64 bits"),
        ("16", "'16'"),
        (16.0, "16.0"),
        (None, "None"),
        (0, "0"),
    ):
        with pytest.raises(
            errors.ShapeError, match=rf"^page_size: expected an integer in \[1, \d+\], got {said}"
        ):
            ops.attention(words(1, 1, 32), *caches, *tables, page_size=size, scale=1.0)

    class Interrupted:
        def __float__(self) -> float:
            raise KeyboardInterrupt

        def __index__(self) -> int:
            raise MemoryError

    with pytest.raises(KeyboardInterrupt):
        ops.rms_norm(x, weight, eps=Interrupted())
    with pytest.raises(MemoryError):
        ops.attention(words(1, 1, 32), *caches, *tables, page_size=Interrupted(), scale=1.0)
    w = ops.pack(np.arange(8 * 32, dtype=np.float32).reshape(8, 32) / 256, dtype="float32")
    for flag in (True, np.True_):
        assert (ops.router(x, w, 8, 2, renormalize=flag).gates.sum(1) == 1).all()
    for wrong in (1, None, "yes", [], ints(1), ints(1, 2), np.array(True), NoTruth()):
        for name, call in (
            ("renormalize", lambda flag: untyped.router(x, w, 8, 2, renormalize=flag)),
            ("float32_out", lambda flag: untyped.gemm(x, w, 8, float32_out=flag)),
            ("keep_logits", lambda flag: untyped.lm_head(x, w, 8, keep_logits=flag)),
            ("keep_logits", lambda flag: untyped.lm_head_pairs(x, w, 8, keep_logits=flag)),
            ("kept", lambda flag: untyped.sample(LOGITS, STATS, ops.SampleParams(), kept=flag)),
        ):
            with pytest.raises(errors.ConfigError, match=f"^{name}: expected a bool, got "):
                call(wrong)


class NoTruth:
    """Has no truth value and compares with nothing, as an array of several elements."""

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise ValueError("no truth value")

    def __eq__(self, other: object) -> Any:
        raise ValueError("no comparison")


@pytest.mark.parametrize("wrong", [np.arange(2), np.array("ref"), ["ref"], b"ref", 3, NoTruth()])
def test_words_of_other_types(wrong: Any) -> None:
    x, w = np.ones((1, 32), np.float32), ops.pack(np.ones((8, 32), np.float32), dtype="float32")
    calls: dict[str, list[Callable[[], object]]] = {
        "isa": [
            lambda: ops.rms_norm(x, None, eps=1.0, isa=wrong),
            lambda: ops.pack(x, isa=wrong),
            lambda: ops.kernels(wrong),
        ],
        "device": [
            lambda: ops.kv_cache(1, 1, 16, 16, device=wrong),
            lambda: ops.rope_table(x[0], 4, device=wrong),
            lambda: ops.to_device(x, wrong),
            lambda: ops.on_stream(1, wrong).__enter__(),
        ],
        "score": [lambda: ops.router(x, w, 8, 2, score=wrong)],
        "activation": [lambda: ops.activate(x, wrong)],
    }
    for name, of_name in calls.items():
        for call in of_name:
            with pytest.raises(errors.ConfigError, match=f"^{name}: expected .*, got "):
                call()


def test_what_the_router_cannot_choose_by() -> None:
    x, w = np.ones((1, 32), np.float32), ops.pack(np.ones((12, 32), np.float32), dtype="float32")
    for said, how in (
        ("score: expected one of softmax, sigmoid, got 'tanh'", {"score": "tanh"}),
        ("route_scale: expected a finite float32 >= 0, got nan", {"route_scale": float("nan")}),
        ("route_scale: expected a finite float32 >= 0, got -1", {"route_scale": -1}),
    ):
        with pytest.raises(errors.ConfigError, match=f"^{said}"):
            ops.router(x, w, 12, 5, **how)
    for said, sizes in (
        (r"num_groups: expected an integer in \[1, 64\], got 0", (0, 1)),
        (r"num_groups: expected an integer in \[1, 64\], got 65", (65, 1)),
        ("num_experts: expected a positive multiple of 5, got 12", (5, 5)),
        ("num_experts / num_groups: expected at least 2, got 1", (12, 12)),
        (r"top_groups: expected an integer in \[1, 4\], got 5", (4, 5)),
        (r"top_groups: expected an integer in \[1, 4\], got 0", (4, 0)),
        (r"top_k: expected at most top_groups \* num_experts / num_groups = 3, got 5", (4, 1)),
    ):
        with pytest.raises(errors.ShapeError, match=f"^{said}"):
            ops.router(x, w, 12, 5, num_groups=sizes[0], top_groups=sizes[1])


@pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""),
    reason="AddressSanitizer has mapped terabytes already",
)
def test_no_memory_to_work_in_is_said() -> None:
    run_script("""
        import resource
        zero = np.zeros((1, 1), i)
        def combine(experts):
            return ops.combine(z(1, 32), zero, zero, np.ones((1, 1), f), experts, isa="ref")
        combine(1)
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, -1))
        try:
            combine(2**31 - 1)
        except MemoryError as error:
            assert str(error) == "no memory for the 8.00 GiB that this op works in", error
        else:
            sys.exit("went through")
        combine(1)
    """)


def test_inputs_of_other_dims() -> None:
    for x in (words(32), words(1, 1, 32), words()):
        for call in (ops.gemm, ops.gemm_swiglu, ops.lm_head):
            with pytest.raises(errors.ShapeError, match="expected 2"):
                call(x, words(512), 16)
        with pytest.raises(errors.ShapeError, match="expected 2"):
            ops.embed(ints(0), x)


# --------------------------------------------------------------------------------------- settings
def test_sample_params_that_no_column_holds() -> None:
    """2^64 − 1 is a valid seed, 2^64 is not; the same at both ends of every integer."""
    for name, low, high in (
        ("seed", 0, 2**64),
        ("counter", 0, 2**64),
        ("top_k", -(2**31), 2**31),
        ("forced", -(2**31), 2**31),
    ):
        for value in (low, high - 1):
            assert getattr(ops.SampleParams(**{name: value}), name) == value
        for wrong in (low - 1, high, 1.5, "1", None):
            with pytest.raises(errors.RequestError, match=name):
                ops.SampleParams(**{name: wrong})  # type: ignore[arg-type]
    for token in (2**31, -(2**31) - 1, 0.5):
        with pytest.raises(errors.RequestError, match="banned"):
            ops.SampleParams(banned=(1, token))  # type: ignore[arg-type]


def masked(*shape: int) -> Array:
    return np.ma.masked_array(np.ones(shape, np.float32), np.ones(shape, bool))


LONG = "x" * 10**6
untyped: Any = ops  # for arguments of a wrong type
STATS, LOGITS, CACHES = (
    np.zeros((1, 2), np.float32),
    np.zeros((1, 8), np.float32),
    (words(1, 1, 512), words(1, 1, 512)),
)
WRONG: dict[str, tuple[type[errors.Error], Callable[[], object]]] = {
    "permute ids list": (
        errors.UnsupportedTensorError,
        lambda: untyped.permute(words(1, 1), [[0]], 1),
    ),
    "permute ids of one dim": (errors.ShapeError, lambda: ops.permute(words(1, 1), ints(0), 1)),
    "embed ids 3": (errors.UnsupportedTensorError, lambda: untyped.embed(3, words(1, 1))),
    "embed ids without dims": (
        errors.ShapeError,
        lambda: ops.embed(np.array(0, np.int32), words(1, 1)),
    ),
    "embed packed of one": (
        errors.ShapeError,
        lambda: untyped.embed(ints(0), words(512), packed=(1,)),
    ),
    "embed packed 5": (errors.ShapeError, lambda: untyped.embed(ints(0), words(512), packed=5)),
    "embed packed list": (
        errors.UnsupportedTensorError,
        lambda: ops.embed(ints(0), [0] * 512, packed=(1, 32)),
    ),  # type: ignore[arg-type]
    "activate over x": (
        errors.LayoutError,
        lambda: (x := words(3, 2)) is ops.activate(x[1:], "silu", out=x[:2]),
    ),
    "activate out of other width": (
        errors.ShapeError,
        lambda: ops.activate(words(2, 2), "silu", out=words(2, 1)),
    ),
    "activate other dtype": (
        errors.DTypeError,
        lambda: ops.activate(words(2, 2), "silu", out=np.zeros((2, 2), np.float32)),
    ),
    "activate nothing known": (errors.ConfigError, lambda: ops.activate(words(2, 2), "tanh")),
    "gather rows 3": (errors.UnsupportedTensorError, lambda: untyped.gather_rows(words(1, 1), 3)),
    "gather x of one dim": (errors.ShapeError, lambda: ops.gather_rows(words(1), ints(0))),
    "gather row -1": (errors.RequestError, lambda: ops.gather_rows(words(2, 1), ints(-1))),
    "gather row 2 of 2": (errors.RequestError, lambda: ops.gather_rows(words(2, 1), ints(0, 2))),
    "gather out of other width": (
        errors.ShapeError,
        lambda: ops.gather_rows(words(2, 1), ints(0), out=words(1, 2)),
    ),
    "gather over x": (
        errors.LayoutError,
        lambda: (x := words(3, 1)) is ops.gather_rows(x[1:], ints(1, 0), out=x[:2]),
    ),
    "gemm over x": (
        errors.LayoutError,
        lambda: (x := words(2, 32)) is ops.gemm(x, words(1024), 32, out=x),
    ),
    "gather float64": (errors.DTypeError, lambda: ops.gather_rows(np.zeros((2, 1)), ints(0))),
    "ranks of one dim": (errors.ShapeError, lambda: ops.ranks(LOGITS[0], ints(0))),
    "ranks token -2": (errors.RequestError, lambda: ops.ranks(LOGITS, ints(-2))),
    "ranks token 8 of 8": (errors.RequestError, lambda: ops.ranks(LOGITS, ints(8))),
    "ranks of two tokens": (errors.ShapeError, lambda: ops.ranks(LOGITS, ints(0, 1))),
    "rope_table None": (errors.UnsupportedTensorError, lambda: untyped.rope_table(None, 3)),
    "rope_table scale": (
        errors.ConfigError,
        lambda: ops.rope_table(np.ones(4, np.float32), 3, scale=LONG),
    ),  # type: ignore[arg-type]
    "rms_norm list": (
        errors.UnsupportedTensorError,
        lambda: ops.rms_norm([[1.0]], words(1), eps=1e-6),
    ),  # type: ignore[arg-type]
    "rms_norm masked": (
        errors.UnsupportedTensorError,
        lambda: ops.rms_norm(masked(1, 8), np.ones(8, np.float32), eps=1e-6),
    ),
    "rms_norm weight masked": (
        errors.UnsupportedTensorError,
        lambda: ops.rms_norm(LOGITS, masked(8), eps=1e-6),
    ),
    "rms_norm out masked": (
        errors.UnsupportedTensorError,
        lambda: ops.rms_norm(LOGITS, np.ones(8, np.float32), eps=1e-6, out=masked(1, 8)),
    ),
    "pack masked": (errors.UnsupportedTensorError, lambda: ops.pack(masked(2, 32))),
    "pack masked words": (
        errors.UnsupportedTensorError,
        lambda: ops.pack(masked(2, 32).astype(np.uint16)),
    ),
    "gather masked rows": (
        errors.UnsupportedTensorError,
        lambda: ops.gather_rows(words(1, 1), masked(1).astype(np.int32)),
    ),
    "attention q": (
        errors.UnsupportedTensorError,
        lambda: ops.attention(
            None, *CACHES, ints(0), ints(0), ints(0)[None], page_size=16, scale=1.0
        ),  # type: ignore[arg-type]
    ),
    "attention scale": (
        errors.ConfigError,
        lambda: ops.attention(
            words(1, 1, 32), *CACHES, ints(0), ints(0), ints(0)[None], page_size=16, scale=np.nan
        ),
    ),
    "sample params": (errors.ConfigError, lambda: untyped.sample(LOGITS, STATS, [1, 2])),
    "sample params 0": (errors.ConfigError, lambda: untyped.sample(LOGITS, STATS, [0])),
    "sample params 5": (errors.ConfigError, lambda: untyped.sample(LOGITS, STATS, 5)),
    "banned 3": (errors.RequestError, lambda: untyped.SampleParams(banned=3)),
    "temperature text": (errors.RequestError, lambda: untyped.SampleParams(temperature=LONG)),
    "top_p bool": (errors.RequestError, lambda: ops.SampleParams(top_p=True)),
    "temperature 10**400": (errors.RequestError, lambda: ops.SampleParams(temperature=10**400)),
    "min_p 1e39": (errors.RequestError, lambda: ops.SampleParams(min_p=1e39)),
    "seed": (errors.RequestError, lambda: ops.SampleParams(seed=10**5000)),
    "threads": (errors.ConfigError, lambda: ops.kernels(threads=10**5000)),
    "isa": (errors.ConfigError, lambda: ops.kernels(isa=LONG)),
    "n": (errors.ShapeError, lambda: ops.gemm(words(1, 32), words(512), 10**5000)),
    "dtype": (errors.DTypeError, lambda: ops.pack(words(1, 1), dtype=LONG)),
    "dtype array": (errors.DTypeError, lambda: untyped.pack(words(1, 1), dtype=ints(1, 2))),
    "pack ragged": (errors.UnsupportedTensorError, lambda: untyped.pack([[1], [2, 3]])),
    "kv_cache": (errors.ShapeError, lambda: ops.kv_cache(2**31 - 1, 2**31 - 1, 16, 2)),
    "top_logprobs": (
        errors.ShapeError,
        lambda: ops.top_logprobs(np.zeros((2**31, 0), np.float32), STATS, 2**31 - 1),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_of_other_kinds(name: str) -> None:
    kind, call = WRONG[name]
    with pytest.raises(kind) as caught:
        call()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("eps", [-5, -1e-45, np.nan, np.inf, 1e39, 10**400, "x", None, True])
def test_epsilons(eps: float) -> None:
    x = np.ones((1, 32), np.float32)
    with pytest.raises(errors.ConfigError, match="eps"):
        ops.rms_norm(x, x[0], eps=eps)
    with pytest.raises(errors.ConfigError, match="eps"):
        ops.qk_rope_kv(
            words(1, 96),
            words(32),
            words(32),
            x,
            x,
            ints(0),
            ints(0),
            *CACHES,
            num_heads=1,
            page_size=16,
            eps=eps,
        )
    assert (ops.rms_norm(x, x[0], eps=0) == 1.0).all()


def test_packing_of_nothing_takes_no_time() -> None:
    """2^31 − 1 groups without elements are a single NumPy array; no loop runs over their number."""
    for shape in ((2**31 - 1, 0, 0), (2**31 - 1, 0, 5), (0, 4, 4), (0, 0)):
        empty = np.zeros(shape, np.float32)
        assert ops.pack(empty).shape == ops.pack_gate_up(empty, empty).shape == (0,)
    with pytest.raises(errors.ConfigError, match="isa"):
        ops.pack(words(0, 0), isa="avx9")


def test_variants_and_thread_counts() -> None:
    x, w = words(1, 32), words(32)
    for threads in (0, -1, 257, 10**6, 2**31, 2**40, 2**64, 1.0, "1", None, True):
        with pytest.raises(errors.ConfigError, match="threads"):
            ops.rms_norm(x, w, eps=1e-6, threads=threads)  # type: ignore[arg-type]
    for isa in ([], 1, b"ref", "", "avx9", "ref\0"):
        with pytest.raises(errors.ConfigError, match="isa"):
            ops.rms_norm(x, w, eps=1e-6, isa=isa)  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigError):
        _core.Kernels("avx9", 1)


# ------------------------------------------------------------------------------------------- fork
@pytest.mark.parametrize("threads", [1, 2])
def test_fork_in_the_midst_of_an_op(threads: int) -> None:
    """Another thread is inside the op, so the child inherits a locked mutex. The child's own call
    is bit-identical to the parent's; an inherited object refuses calls. An alarm ends a child that
    hangs, and the parent's thread continues."""
    run_script(f"""
        warnings.simplefilter("ignore")
        threads = {threads}
        core = ops.kernels("ref", threads)
        x, w = np.ones((64, 2048), f), np.ones(256 * 2048, f)
        small, norm = np.full((3, 40), 2, f), np.ones(40, f)
        want = ops.rms_norm(small, norm, eps=1e-6, isa="ref", threads=threads)
        leave, rounds = threading.Event(), []
        def work():
            while not leave.is_set():
                rounds.append(float(ops.gemm(x, w, 256, isa="ref", threads=threads)[0, 0]))
        thread = threading.Thread(target=work)
        thread.start()
        for turn in range(4):
            time.sleep(0.03)
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                got = ops.rms_norm(small, norm, eps=1e-6, isa="ref", threads=threads)
                try:
                    core.run("rms_norm", dict(residual=small, weight=norm, eps=1e-6))
                except errors.StateError as error:
                    os._exit(7 if (got == want).all() and "child" in str(error) else 1)
                os._exit(2)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code != 7:
                leave.set()
                sys.exit(f"child {{turn}} ended with {{code}}")
        leave.set()
        thread.join()
        assert set(rounds) == {{2048.0}}
    """)
