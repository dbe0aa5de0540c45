"""The gated delta rule of rollmesh.torch.functions.

Input: random sequences, shorter and longer than a chunk of the backward pass. Oracles: rollmesh.ops
for the forward pass, in bits; the recurrence row by row in float64 for values and gradients.
Bounds: 0 differing bits; 1e-5 of a tensor's norm, in bfloat16 2 %."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import rollmesh as rm
from rollmesh import ops
from rollmesh.torch import Sequences, functions
from rollmesh.torch.functions import DeltaHeads, delta

HEADS = DeltaHeads(2, 6, 12, 20, 1e-6)
LENGTHS = (3, 150, 64, 1, 65)
TAPS = 4


def plain(x: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor, norm: Tensor) -> Tensor:
    out = []
    for rows in x.split(list(LENGTHS)):
        n, group = len(rows), HEADS.num_v_heads // HEADS.num_k_heads
        *_, z, b, a = rows.split(HEADS.widths, 1)
        inputs = F.pad(rows[:, : len(conv)].T, (TAPS - 1, 0))
        mixed = F.silu((inputs.unfold(1, TAPS, 1) * conv).sum(-1)).T
        q, k, v = mixed.split(HEADS.widths[:3], 1)
        q, k = (y.view(n, -1, HEADS.k_dim).repeat_interleave(group, 1) for y in (q, k))
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        v = v.view(n, -1, HEADS.v_dim)
        decay, beta = torch.exp(-a_log.exp() * F.softplus(a + dt_bias)), b.sigmoid()
        state, o = x.new_zeros(HEADS.num_v_heads, HEADS.k_dim, HEADS.v_dim), []
        for t in range(n):
            state = state * decay[t, :, None, None]
            change = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * beta[t, :, None]
            state = state + torch.einsum("hk,hv->hkv", k[t], change)
            o.append(torch.einsum("hkv,hk->hv", state, q[t]) * HEADS.k_dim**-0.5)
        normed = torch.stack(o)
        normed = normed * (normed.square().mean(-1, keepdim=True) + HEADS.eps).rsqrt() * norm
        out.append(normed.flatten(1) * F.silu(z))
    return torch.cat(out)


def drawn(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    channels, heads = sum(HEADS.widths[:3]), HEADS.num_v_heads
    shapes = [(sum(LENGTHS), sum(HEADS.widths)), (channels, 1, TAPS), (heads,), (heads,)]
    made = [torch.randn(shape, generator=generator) for shape in (*shapes, (HEADS.v_dim,))]
    return [x.to(dtype).requires_grad_() for x in made]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass takes the sequences in three parts."""
    monkeypatch.setattr(delta, "STEPS_AT_ONCE", 2 * max(LENGTHS))
    given = drawn(dtype)
    exact = [x.detach().double().requires_grad_() for x in given]
    out = functions.delta_net(*given, Sequences(np.array(LENGTHS)), HEADS)
    want = plain(*exact)
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    made = torch.autograd.grad(out, given, grad)
    bound = 1e-5 if dtype == torch.float32 else 0.02
    expected = torch.autograd.grad(want, exact, grad.double())
    for got, right in zip((out, *made), (want, *expected), strict=True):
        assert got.dtype == dtype
        assert (got.double() - right).norm() <= bound * right.norm()


def test_the_forward_pass_has_the_bits_of_the_op() -> None:
    x, *weights = (t.detach() for t in drawn(torch.float32))
    rows = Sequences(np.array(LENGTHS))
    conv, *vectors = (w.squeeze(1).numpy() if w.ndim == 3 else w.numpy() for w in weights)
    states = ops.delta_states(0, HEADS.num_v_heads, HEADS.k_dim, HEADS.v_dim, TAPS, dtype="float32")
    none = np.full(rows.num_rows, -1, np.int32)
    want = ops.delta_net(
        x.numpy(), conv, *vectors, states, none[: len(LENGTHS)], none, rows.seq_of_row,
        k_dim=HEADS.k_dim, eps=HEADS.eps, isa="ref",
    )  # fmt: skip
    made = functions.delta_net(x, *weights, rows, HEADS)
    assert made.numpy().tobytes() == want.tobytes()


def test_rows_of_other_sequences_are_refused() -> None:
    with pytest.raises(rm.ShapeError, match="x: expected 3 rows, those of the sequences, got 283"):
        functions.delta_net(*drawn(torch.float32), Sequences(np.array([3])), HEADS)
