"""Which arguments of an op may share memory. Input: outputs, residuals and caches over other
arguments. Oracle: the class and the name of the error, the outputs, which a refused call does not
change, and the results of separate arrays.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from ops_cases import Array, normal

from rollmesh import errors, ops


def ints(*values: int) -> Array:
    return np.array(values, np.int32)


def test_an_output_beside_its_input() -> None:
    """Output and input are in one array: their memory is adjacent but does not overlap. An empty
    output may be anywhere."""
    both = np.arange(8, dtype=np.float32).reshape(4, 2)
    assert ops.gather_rows(both[2:], ints(1, 0), out=both[:2]).tolist() == [[6, 7], [4, 5]]
    assert ops.gather_rows(both, ints(), out=both[1:1]).shape == (0, 2)


@pytest.mark.parametrize("isa", ops.available_isas())
def test_an_output_over_another_argument(isa: str) -> None:
    """An array that an op writes to shares memory with another argument. The call is refused and
    changes nothing, also if the output comes before the other argument."""
    memory = np.arange(1024, dtype=np.float32)
    cos, place, ids = memory[256:264].reshape(2, 4), ints(1, 0)[:, None], ints(0, 1)[:, None]
    caches = ops.kv_cache(1, 1, 16, 16, dtype="float32")
    x, out, weight = memory[:32].reshape(2, 16), memory[16:48].reshape(2, 16), memory[40:56]
    tables = ints(0, 1), ints(0, 0), ints(0)[None]

    def rope(qkv: Array, k_cache: Array, out: Array | None) -> Array:
        positions, slots = ints(0, 1), np.arange(2)
        return ops.qk_rope_kv(
            qkv, None, None, cos, cos, positions, slots, k_cache, caches[1],
            num_heads=1, page_size=16, eps=1.0, out=out, isa=isa,
        )  # fmt: skip

    attend = {"page_size": 16, "scale": 1.0, "isa": isa}
    q, qkv = x.reshape(2, 1, 16), memory[512:608].reshape(2, 48)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("out", lambda: ops.embed(ints(1, 0), x, out=out, isa=isa)),
        ("out", lambda: ops.embed(ints(1, 0), x, out=x, isa=isa)),
        ("out", lambda: ops.gather_rows(x, ints(1, 0), out=out, isa=isa)),
        ("out", lambda: ops.rms_norm(x, None, eps=1.0, out=out, isa=isa)),
        ("out", lambda: ops.rms_norm(x.copy(), weight, eps=1.0, out=out, isa=isa)),
        ("x", lambda: ops.rms_norm(x, None, eps=1.0, x=out, isa=isa)),
        ("weight", lambda: ops.rms_norm(out, weight, eps=1.0, x=x.copy(), isa=isa)),
        ("out", lambda: ops.combine(x, place, ids, np.ones((2, 1), "f"), 2, out=out, isa=isa)),
        ("out", lambda: ops.combine(x, place, ids, np.ones((2, 1), "f"), 2, out=x, isa=isa)),
        ("out", lambda: ops.attention(q, *caches, *tables, out=q, **attend)),
        ("cos", lambda: rope(qkv, caches[0], memory[250:282].reshape(2, 1, 16))),
        ("out", lambda: rope(qkv, caches[0], memory[512:544].reshape(2, 1, 16))),
        ("k_cache", lambda: rope(qkv, memory[512:1024].reshape(1, 1, 512), None)),
    ]
    before = memory.copy()
    for name, call in calls:
        with pytest.raises(errors.LayoutError, match=f"^{name}: expected memory of its own, got"):
            call()
        assert (memory == before).all()


@pytest.mark.parametrize("isa", ops.available_isas())
def test_a_norm_in_place(isa: str, rng: np.random.Generator) -> None:
    """out is the residual, x, or both."""
    residual, weight = normal(rng, (3, 40), "float32"), normal(rng, (40,), "float32")
    for x in (None, normal(rng, (3, 40), "float32")):
        given = [None if a is None else a.copy() for a in (residual, x)]
        want = ops.rms_norm(given[0], weight, eps=1e-6, x=given[1], isa=isa)
        for place in range(1 if x is None else 2):
            given = [None if a is None else a.copy() for a in (residual, x)]
            out = given[place]
            ops.rms_norm(given[0], weight, eps=1e-6, x=given[1], out=out, isa=isa)
            assert (out == want).all()
    once = residual.copy()
    ops.rms_norm(once, None, eps=1e-6, x=once, isa=isa)
    assert (once == residual + residual).all()


def test_two_caches_with_their_pages_by_turns() -> None:
    """vLLM's layout: K has the even pages of an array and V the odd ones."""
    pages, _ = ops.kv_cache(4, 1, 16, 32, dtype="float32")
    qkv = np.arange(2 * 96, dtype=np.float32).reshape(2, 96)
    cos = np.ones((2, 4), np.float32)

    def fill(k_cache: Array, v_cache: Array, page: int) -> None:
        ops.qk_rope_kv(
            qkv, None, None, cos, cos, ints(0, 1), 16 * page + np.arange(2), k_cache, v_cache,
            num_heads=1, page_size=16, eps=1.0,
        )  # fmt: skip

    fill(pages[:-1], pages[1:], 2)
    want = ops.kv_cache(1, 1, 16, 32, dtype="float32")
    fill(*want, 0)
    assert (pages[2] == want[0]).all()
    assert (pages[3] == want[1]).all()
    assert not pages[:2].any()
