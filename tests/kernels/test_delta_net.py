"""delta_net against float64, in chunks, and through slots.

Input: random rows of small sequences. Oracle: the recurrence of transformers in float64; for chunks
and slots the same rows in one call. Bound of the values: the state's update is a contraction (|k|
<= 1, beta and decay in [0, 1]), so that rounding errors of rows add up at most; each is at most a
few roundings of a sum of k_dim products. Bound of the rest: zero differing bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops_cases import DTYPES, EPS, EPS_T, Array, normal, values

from rollmesh import errors, ops

K_HEADS, V_HEADS, K, V, TAPS, ROWS = 2, 4, 20, 35, 4, 40
CHANNELS = 2 * K_HEADS * K + V_HEADS * V


def i32(*values: int) -> Any:
    return np.array(values, np.int32)


class Layer:
    """The inputs of ROWS rows."""

    def __init__(self, rng: np.random.Generator, dtype: str) -> None:
        self.dtype = dtype
        self.x = normal(rng, (ROWS, CHANNELS + V_HEADS * (V + 2)), dtype)
        self.conv = normal(rng, (CHANNELS, TAPS), dtype, 0.5)
        self.a_log, self.dt_bias = (normal(rng, (V_HEADS,), "float32") for _ in range(2))
        self.norm = normal(rng, (V,), dtype)

    def states(self, slots: int) -> Array:
        return ops.delta_states(slots, V_HEADS, K, V, TAPS, dtype=self.dtype)

    def run(self, rows: Any, states: Array, load: Any, save: Any, seqs: Any, **how: Any) -> Array:
        return ops.delta_net(
            np.ascontiguousarray(self.x[rows]), self.conv, self.a_log, self.dt_bias, self.norm,
            states, load, save, seqs, k_dim=K, eps=1e-6, **how,
        )  # fmt: skip

    def whole(self, **how: Any) -> Array:
        none = np.full(ROWS, -1, np.int32)
        return self.run(slice(None), self.states(0), i32(-1), none, np.zeros_like(none), **how)


def float64(layer: Layer) -> tuple[Array, Array]:
    """Returns the output and the size of a rounding error of one row, both [rows, heads, v]."""
    x, conv, norm = (values(t).astype(np.float64) for t in (layer.x, layer.conv, layer.norm))
    padded = np.concatenate([np.zeros((TAPS - 1, CHANNELS)), x[:, :CHANNELS]])
    acc = sum(padded[j : j + ROWS] * conv[:, j] for j in range(TAPS))
    u = acc / (1 + np.exp(-acc))
    q, k = (u[:, i * K_HEADS * K :][:, : K_HEADS * K].reshape(ROWS, K_HEADS, K) for i in (0, 1))
    q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6) for y in (q, k))
    q, k = (np.repeat(y, V_HEADS // K_HEADS, 1) for y in (q / np.sqrt(K), k))
    v = u[:, 2 * K_HEADS * K :].reshape(ROWS, V_HEADS, V)
    z = x[:, CHANNELS:][:, : V_HEADS * V].reshape(v.shape)
    b, a = np.split(x[:, CHANNELS + V_HEADS * V :], 2, 1)
    decay = np.exp(-np.exp(layer.a_log.astype(float)) * np.logaddexp(0, a + layer.dt_bias))
    state, out, size = np.zeros((V_HEADS, K, V)), [], 0.0
    for t in range(ROWS):
        state = state * decay[t][:, None, None]
        delta = (v[t] - (state * k[t][:, :, None]).sum(1)) / (1 + np.exp(-b[t]))[:, None]
        state = state + k[t][:, :, None] * delta[:, None]
        out.append((state * q[t][:, :, None]).sum(1))
        size = max(size, float(np.sqrt((state**2).sum(1)).max()), float(np.abs(v[t]).max()))
    o = np.stack(out)
    scale = norm * z / (1 + np.exp(-z)) / np.sqrt((o * o).mean(-1, keepdims=True) + 1e-6)
    return o * scale, size * np.abs(scale) / np.sqrt(K)


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_float64(dtype: str, rng: np.random.Generator) -> None:
    layer = Layer(rng, dtype)
    got, (want, unit) = values(layer.whole(isa="ref")), float64(layer)
    rows = np.arange(1, ROWS + 1)[:, None, None]
    bound = (K / 4 + 16) * EPS * rows * unit + (V / 16 + 16) * EPS * np.abs(want)
    assert (np.abs(got - want) <= bound + EPS_T[dtype] * 1.01 * np.abs(want)).all()


@pytest.mark.parametrize("isa", ops.available_isas())
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_sequences_and_heads_do_not_change_a_bit(
    dtype: str, isa: str, rng: np.random.Generator
) -> None:
    """A sequence in chunks, beside another one that shares its first rows through a snapshot, with
    the state saved in place and elsewhere; and each part of the heads alone."""
    layer = Layer(rng, dtype)
    whole, states = layer.whole(isa=isa), layer.states(4)
    states[:] = np.nan
    for first, n, load, keep in ((0, 1, -1, 0), (1, 2, 0, 0), (3, 14, 0, 1), (17, ROWS - 17, 1, 1)):
        save = np.full(n, -1, np.int32)
        save[-1] = keep
        if first == 3:
            save[9] = 2  # a snapshot after row 12
        zeros = np.zeros(n, np.int32)
        out = layer.run(slice(first, first + n), states, i32(load), save, zeros, isa=isa)
        assert out.tobytes() == whole[first : first + n].tobytes()
    # The second sequence continues from the snapshot; the first starts from zeros.
    rows = [*range(8), *range(13, 20)]
    seqs, save = i32(*[1] * 8, *[0] * 7), np.full(15, -1, np.int32)
    save[7], save[14] = 3, 2
    out = layer.run(rows, states, i32(2, -1), save, seqs, isa=isa, threads=2)
    assert out.tobytes() == whole[rows].tobytes()
    out = layer.run([8, 20], states, i32(2, 3), i32(-1, -1), i32(1, 0), isa=isa)
    assert out.tobytes() == whole[[8, 20]].tobytes()


@pytest.mark.parametrize(("first", "heads"), [(0, 1), (1, 2), (1, 3), (2, 2)])
def test_a_part_of_the_heads(first: int, heads: int, rng: np.random.Generator) -> None:
    layer, group = Layer(rng, "float32"), V_HEADS // K_HEADS
    k_heads = range(first // group, (first + heads - 1) // group + 1)
    of_k = np.concatenate([np.arange(h * K, (h + 1) * K) for h in k_heads])
    of_v = np.arange(first * V, (first + heads) * V)
    channels = np.concatenate([of_k, K_HEADS * K + of_k, 2 * K_HEADS * K + of_v])
    own = np.arange(first, first + heads)
    gates = CHANNELS + V_HEADS * V
    columns = np.concatenate([channels, CHANNELS + of_v, gates + own, gates + V_HEADS + own])
    none = np.full(ROWS, -1, np.int32)
    out = ops.delta_net(
        np.ascontiguousarray(layer.x[:, columns]), layer.conv[channels], layer.a_log[own],
        layer.dt_bias[own], layer.norm, ops.delta_states(0, heads, K, V, TAPS, dtype="float32"),
        i32(-1), none, np.zeros_like(none), k_dim=K, eps=1e-6, group=group, head0=first % group,
    )  # fmt: skip
    assert out.tobytes() == layer.whole()[:, own].tobytes()


def test_slots_that_clash(rng: np.random.Generator) -> None:
    layer = Layer(rng, "float32")
    states, seqs = layer.states(3), i32(0, 0, 1)
    for load, save in (
        (i32(-1, -1), i32(2, -1, 2)),  # twice saved
        (i32(0, -1), i32(0, -1, -1)),  # before the sequence's last row
        (i32(0, 1), i32(-1, 1, -1)),  # another sequence's
    ):
        with pytest.raises(errors.RequestError, match="save_slots: expected a slot that no other"):
            layer.run([0, 1, 2], states, load, save, seqs)
    with pytest.raises(errors.RequestError, match="expected adjacent rows of sequence 0, got"):
        layer.run([0, 1, 2], states, i32(0, -1), i32(-1, -1, -1), i32(0, 1, 0))
    layer.run([0, 1, 2], states, i32(0, 1), i32(2, 0, 1), seqs)
    with pytest.raises(errors.ShapeError, match=r"conv.shape\[0\] - v_heads \* v_dim"):
        ops.delta_net(
            layer.x, layer.conv[1:], layer.a_log, layer.dt_bias, layer.norm, states, i32(-1),
            seqs, seqs, k_dim=K, eps=1e-6,
        )  # fmt: skip
