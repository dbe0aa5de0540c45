"""The differentiable ops of rollmesh.torch.functions.

Input: random float32 tensors. Oracles: rollmesh.ops for the forward pass, in bits; the same op in
plain torch in float64 for values and gradients. Bounds: 0 differing bits; 1e-6 of a tensor's norm.
bfloat16: gradients of the float32 op on the rounded input, to 2 %.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import rollmesh as rm
from rollmesh import ops
from rollmesh.torch import Sequences, functions
from rollmesh.torch.functions import Heads, logits

HIDDEN, INNER, EXPERTS, TOP_K, VOCAB, ROWS = 40, 24, 6, 2, 300, 11
HEADS = Heads(4, 2, 16, 1e-6)
LENGTHS = (4, 1, 6)
EPS = 1e-5


class Case:
    """ours and plain: the same function of `inputs`, by rollmesh and by torch in any dtype."""

    def __init__(
        self, ours: Callable[..., Any], plain: Callable[..., Any], *shapes: tuple[int, ...]
    ):
        self.ours, self.plain, self.shapes = ours, plain, shapes


def rope(dtype: str = "float32") -> tuple[Tensor, Tensor]:
    inv_freq = (1e4 ** -(np.arange(0, HEADS.head_dim, 2) / HEADS.head_dim)).astype(np.float32)
    cos, sin = ops.rope_table(inv_freq, 16, dtype=dtype)
    return torch.from_numpy(cos), torch.from_numpy(sin)


def sequences() -> Sequences:
    return Sequences(np.array(LENGTHS))


def plain_attention(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, sinks: Tensor | None = None, *, heads: Heads
) -> Tensor:
    out, (cos, sin) = [], (t.to(qkv.dtype) for t in rope())
    for part in qkv.split(list(LENGTHS)):
        n = len(part)
        q, k, v = (x.view(n, -1, heads.head_dim) for x in part.split(heads.widths, 1))

        def turned(x: Tensor, weight: Tensor, n: int = n) -> Tensor:
            a, b = F.rms_norm(x, (heads.head_dim,), weight, heads.eps).chunk(2, -1)
            c, s = cos[:n, None], sin[:n, None]
            return torch.cat([a * c - b * s, b * c + a * s], -1)

        groups = heads.num_heads // heads.num_kv_heads
        q, k, v = (
            turned(q, q_weight),
            turned(k, k_weight).repeat_interleave(groups, 1),
            v.repeat_interleave(groups, 1),
        )
        away = torch.arange(n)[:, None] - torch.arange(n)
        live = (away >= 0) & ((away < heads.window) if heads.window else True)
        scores = (torch.einsum("qhd,khd->hqk", q, k) * heads.scale).masked_fill(~live, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, n, 1)], -1)
        p = torch.softmax(scores, -1)[..., :n]
        out.append(torch.einsum("hqk,khd->qhd", p, v).reshape(n, -1))
    return torch.cat(out)


BIAS = torch.linspace(0.3, -0.3, EXPERTS)  # large enough to change choices


def plain_moe(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    renormalize: bool,
    bias: Tensor | None = None,
    act: Any = F.silu,
) -> Tensor:
    scores = torch.softmax(x @ router.t(), -1)
    ids = (scores if bias is None else scores + bias).topk(TOP_K, -1).indices
    gates = scores.gather(1, ids)
    gates = gates / gates.sum(-1, keepdim=True) if renormalize else gates
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        gate, up = (x @ gate_up[e].t()).chunk(2, -1)
        weight = (gates * (ids == e)).sum(-1, keepdim=True)
        out = out + weight * ((act(gate) * up) @ down[e].t())
    return out


def targets() -> Tensor:
    return torch.arange(ROWS) * 27 % VOCAB


def plain_logprobs(x: Tensor, weight: Tensor, temperature: float) -> Tensor:
    log_p = torch.log_softmax(x @ weight.t() / temperature, -1)
    return torch.stack([log_p.gather(1, targets()[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)])


def logprobs_at(temperature: float) -> Case:
    def ours(x: Tensor, weight: Tensor) -> Tensor:
        made = functions.token_logprobs(x, weight, targets(), temperature=temperature, entropy=True)
        assert made.entropy is not None
        return torch.stack([made.logprobs, made.entropy])

    return Case(
        ours, lambda x, w: plain_logprobs(x, w, temperature), (ROWS, HIDDEN), (VOCAB, HIDDEN)
    )


def kept_tokens() -> Tensor:
    """[ROWS, 6]: each row's target among one to six tokens."""
    rows = [
        [(target + 31 * i) % VOCAB if i <= row % 6 else -1 for i in range(6)]
        for row, target in enumerate(targets().tolist())
    ]
    return torch.tensor(
        [row[1 : 1 + i % 6] + row[:1] + row[1 + i % 6 :] for i, row in enumerate(rows)]
    )


def logprobs_among(temperature: float) -> Case:
    """The logprobs among the tokens that filters kept."""

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        made = functions.token_logprobs(
            x, weight, targets(), kept_tokens=kept_tokens(), temperature=temperature, entropy=True
        )
        assert made.entropy is not None
        return torch.stack([made.logprobs, made.entropy])

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        found = []
        for row, target, kept in zip(
            x @ weight.t() / temperature, targets().tolist(), kept_tokens(), strict=True
        ):
            among = kept[kept >= 0]
            log_p = torch.log_softmax(row[among], -1)
            found.append(
                torch.stack([log_p[among.tolist().index(target)], -(log_p.exp() * log_p).sum()])
            )
        return torch.stack(found, 1)

    return Case(ours, plain, (ROWS, HIDDEN), (VOCAB, HIDDEN))


ACTS: dict[str, Any] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x) ** 2,
}


def swiglu_with(activation: str) -> Case:
    act = ACTS[activation]
    ours = partial(functions.swiglu, activation=activation)
    return Case(
        ours,
        lambda x, g, u: act(x @ g.t()) * (x @ u.t()),
        (ROWS, HIDDEN),
        (INNER, HIDDEN),
        (INNER, HIDDEN),
    )


def moe_with(renormalize: bool, bias: Tensor | None = None, activation: str = "silu") -> Case:
    def ours(*inputs: Tensor) -> Tensor:
        return functions.moe(
            *inputs, top_k=TOP_K, renormalize=renormalize, bias=bias, activation=activation
        ).out

    shapes = (
        (ROWS, HIDDEN),
        (EXPERTS, HIDDEN),
        (EXPERTS, 2 * INNER, HIDDEN),
        (EXPERTS, HIDDEN, INNER),
    )
    return Case(
        ours, lambda *inputs: plain_moe(*inputs, renormalize, bias, ACTS[activation]), *shapes
    )


def attention_with(window: int, has_sinks: bool = False) -> Case:
    heads = HEADS._replace(window=window)

    def ours(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, *sinks: Tensor) -> Tensor:
        table, sink = rope(str(qkv.dtype).removeprefix("torch.")), sinks[0] if sinks else None
        return functions.attention(qkv, q_weight, k_weight, table, sequences(), heads, sinks=sink)

    return Case(
        ours,
        partial(plain_attention, heads=heads),
        (ROWS, sum(HEADS.widths)),
        (HEADS.head_dim,),
        (HEADS.head_dim,),
        *[(HEADS.num_heads,)] * has_sinks,
    )


def moe_with_biases() -> Case:
    """gpt-oss's: biases of the router's logits and of experts, a clamped swiglu."""
    alpha, limit = 1.702, 0.5
    names = "logit_bias", "gate_up_bias", "down_bias"

    def ours(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, *biases: Tensor) -> Tensor:
        return functions.moe(
            x, router, gate_up, down, top_k=TOP_K, **dict(zip(names, biases, strict=True)),
            activation="swiglu_oai", alpha=alpha, limit=limit,
        ).out  # fmt: skip

    def plain(
        x: Tensor,
        router: Tensor,
        gate_up: Tensor,
        down: Tensor,
        logit_bias: Tensor,
        gate_up_bias: Tensor,
        down_bias: Tensor,
    ) -> Tensor:
        top = (x @ router.t() + logit_bias).topk(TOP_K, -1)
        gates, out = torch.softmax(top.values, -1), torch.zeros_like(x)
        for e in range(EXPERTS):
            gate, up = (x @ gate_up[e].t() + gate_up_bias[e]).chunk(2, -1)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            inner = gate * torch.sigmoid(alpha * gate) * (up + 1)
            weight = (gates * (top.indices == e)).sum(-1, keepdim=True)
            out = out + weight * (inner @ down[e].t() + down_bias[e])
        return out

    return Case(
        ours,
        plain,
        (ROWS, HIDDEN),
        (EXPERTS, HIDDEN),
        (EXPERTS, 2 * INNER, HIDDEN),
        (EXPERTS, HIDDEN, INNER),
        (EXPERTS,),
        (EXPERTS, 2 * INNER),
        (EXPERTS, HIDDEN),
    )


CASES = {
    "embedding": Case(
        lambda w: functions.embedding(targets() % 7, w, w.dtype),
        lambda w: w[targets() % 7],
        (7, HIDDEN),
    ),
    "linear": Case(functions.linear, lambda x, w: x @ w.t(), (ROWS, HIDDEN), (INNER, HIDDEN)),
    "linear of three": Case(
        functions.linear,
        lambda x, *w: x @ torch.cat(w).t(),
        (ROWS, HIDDEN),
        (INNER, HIDDEN),
        (5, HIDDEN),
        (17, HIDDEN),
    ),
    "linear with bias": Case(
        lambda x, w, b: functions.linear(x, w, bias=b),
        F.linear,
        (ROWS, HIDDEN),
        (INNER, HIDDEN),
        (INNER,),
    ),
    "rms_norm": Case(
        lambda x, w: functions.rms_norm(x, w, EPS),
        lambda x, w: F.rms_norm(x, (HIDDEN,), w, EPS),
        (ROWS, HIDDEN),
        (HIDDEN,),
    ),
    "add_rms_norm": Case(
        lambda r, x, w: torch.cat(functions.add_rms_norm(r, x, w, EPS)),
        lambda r, x, w: torch.cat([F.rms_norm(r + x, (HIDDEN,), w, EPS), r + x]),
        (ROWS, HIDDEN),
        (ROWS, HIDDEN),
        (HIDDEN,),
    ),
    "add": Case(functions.add, torch.add, (ROWS, HIDDEN), (ROWS, HIDDEN)),
    "attention": attention_with(0),
    "attention in a window": attention_with(3),
    "attention with sinks": attention_with(0, has_sinks=True),
    "attention with sinks in a window": attention_with(3, has_sinks=True),
    "swiglu": swiglu_with("silu"),
    "swiglu, gelu": swiglu_with("gelu"),
    "swiglu, gelu by tanh": swiglu_with("gelu_tanh"),
    "swiglu, relu2": swiglu_with("relu2"),
    **{
        f"activate, {name}": Case(partial(functions.activate, activation=name), act, (ROWS, INNER))
        for name, act in ACTS.items()
    },
    "moe": moe_with(True),
    "moe, raw gates": moe_with(False),
    "moe, router bias": moe_with(True, BIAS),
    "moe, biases": moe_with_biases(),
    "moe, gelu": moe_with(True, None, "gelu"),
    "moe, gelu by tanh": moe_with(True, None, "gelu_tanh"),
    "lm_head": Case(functions.lm_head, lambda x, w: x @ w.t(), (ROWS, HIDDEN), (VOCAB, HIDDEN)),
    "token_logprobs": logprobs_at(1.0),
    "token_logprobs at 0.6": logprobs_at(0.6),
    "token_logprobs of kept tokens": logprobs_among(1.0),
    "token_logprobs of kept tokens at 0.6": logprobs_among(0.6),
}


def drawn(case: Case, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 and i else 1)
        for i, shape in enumerate(case.shapes)
    ]


def gradients(
    function: Callable[..., Tensor], inputs: list[Tensor], dtypes: list[torch.dtype]
) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of a fixed weighting of it."""
    leaves = [
        x.detach().to(dtype).requires_grad_() for x, dtype in zip(inputs, dtypes, strict=True)
    ]
    out = function(*leaves)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return out.detach(), list(torch.autograd.grad(out, leaves, upstream.to(out.dtype)))


def apart(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_in_float32(name: str) -> None:
    case, inputs = CASES[name], drawn(CASES[name])
    got, got_gradients = gradients(case.ours, inputs, [torch.float32] * len(inputs))
    want, want_gradients = gradients(case.plain, inputs, [torch.float64] * len(inputs))
    assert apart(got, want) < 1e-6
    for i, (mine, plain) in enumerate(zip(got_gradients, want_gradients, strict=True)):
        assert apart(mine, plain) < 1e-6, f"gradient {i}"


@pytest.mark.parametrize("masters", [False, True], ids=["bfloat16", "float32 masters"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "embedding"])
def test_gradients_in_bfloat16(name: str, masters: bool) -> None:
    """Each gradient has the dtype of its input, and equals the gradient at the rounded values."""
    case = CASES[name]
    inputs = [x.bfloat16().float() for x in drawn(case)]
    activations = 2 if name in ("add_rms_norm", "add") else 1
    weight = torch.float32 if masters else torch.bfloat16
    dtypes = [torch.bfloat16 if i < activations else weight for i in range(len(inputs))]
    _, got = gradients(case.ours, inputs, dtypes)
    _, want = gradients(case.plain, inputs, [torch.float64] * len(inputs))
    assert [g.dtype for g in got] == dtypes
    for i, (mine, plain) in enumerate(zip(got, want, strict=True)):
        assert apart(mine, plain) < 0.02, f"gradient {i}"


# ----------------------------------------------------------------------- bits of the forward pass
def words(x: Tensor) -> Any:
    return (
        x.detach().view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.detach().numpy()
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forward_passes_have_the_bits_of_the_ops(dtype: str) -> None:
    """With gradients and without; the weights are float32, like an optimizer's."""
    kind = getattr(torch, dtype)
    x, router, gate_up, down = drawn(CASES["moe"])
    x, matrix, vector = x.to(kind), drawn(CASES["lm_head"])[1], torch.rand(HIDDEN) + 0.5
    packed = ops.pack(matrix.numpy(), dtype=dtype)
    experts = (
        ops.pack(router.numpy(), dtype=dtype),
        ops.pack_gate_up(*(half.contiguous().numpy() for half in gate_up.chunk(2, 1)), dtype=dtype),
        ops.pack(down.numpy(), dtype=dtype),
    )
    routing = ops.router(words(x), experts[0], EXPERTS, TOP_K)
    sent, group_rows, place = ops.permute(words(x), routing.ids, EXPERTS)
    inner = ops.gemm_swiglu(sent, experts[1], INNER, group_rows=group_rows)
    mixed = ops.combine(
        ops.gemm(inner, experts[2], HIDDEN, group_rows=group_rows), place, *routing, EXPERTS
    )
    head = ops.lm_head(words(x), packed, VOCAB, targets=targets().int().numpy())
    want = {
        "linear": ops.gemm(words(x), packed, VOCAB),
        "rms_norm": ops.rms_norm(words(x), words(vector.to(kind)), eps=EPS),
        "moe": mixed,
        "logits": head.logits,
        "logprobs": head.target_logprobs,
    }
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            leaf = x.clone().requires_grad_(grad)
            got = {
                "linear": functions.linear(leaf, matrix),
                "rms_norm": functions.rms_norm(leaf, vector, EPS),
                "moe": functions.moe(leaf, router, gate_up, down, top_k=TOP_K).out,
                "logits": functions.lm_head(leaf, matrix),
                "logprobs": functions.token_logprobs(leaf, matrix, targets()).logprobs,
            }
        for name, tensor in got.items():
            assert tensor.requires_grad == grad
            assert (words(tensor) == want[name]).all(), name


def test_logprobs_of_any_temperature_are_those_a_sampler_records() -> None:
    x, weight = drawn(CASES["lm_head"])
    head = ops.lm_head(words(x), ops.pack(weight.numpy(), dtype="float32"), VOCAB)
    assert head.logits is not None
    for temperature in (0.3, 1.0, 1.7):
        params = [ops.SampleParams(temperature=temperature, forced=int(t)) for t in targets()]
        want = ops.sample(head.logits, head.stats, params).sampling_logprobs
        assert (
            functions.token_logprobs(x, weight, targets(), temperature=temperature).logprobs.numpy()
            == want
        ).all()


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 9}, {"top_k": 200, "top_p": 0.7}, {"top_k": 50, "top_p": 0.9, "min_p": 0.1}],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_logprobs_of_kept_tokens_are_those_a_sampler_records(
    temperature: float, filters: dict[str, Any]
) -> None:
    """The oracle forces every token: the filters keep the tokens whose logprob is then finite."""
    x, weight = drawn(CASES["lm_head"])
    head = ops.lm_head(words(x), ops.pack(weight.numpy(), dtype="float32"), VOCAB)
    assert head.logits is not None
    forced = [
        ops.sample(
            head.logits,
            head.stats,
            ops.SampleParams(temperature, **filters),
            forced=np.full(ROWS, token, np.int32),
        ).sampling_logprobs
        for token in range(VOCAB)
    ]
    logprobs = torch.from_numpy(np.stack(forced, 1))  # [ROWS, VOCAB]
    kept = torch.full((ROWS, 200), -1)
    for row, possible in enumerate(~logprobs.isneginf()):
        tokens = torch.nonzero(possible)[:, 0]
        kept[row, : len(tokens)] = tokens.flip(0)
    for place in range(int((kept >= 0).sum(1).min())):
        target = kept[:, place]
        made = functions.token_logprobs(
            x, weight, target, kept_tokens=kept, temperature=temperature
        )
        assert (made.logprobs == logprobs.gather(1, target[:, None])[:, 0]).all()


def test_tokens_that_no_sampler_draws_have_a_number_and_a_gradient() -> None:
    """Other weights may have drawn such tokens: the sampler gives a token below 2^-40 the weight
    0."""
    x, weight = (10 * t for t in drawn(CASES["lm_head"]))
    case = logprobs_at(0.05)
    got, got_gradients = gradients(case.ours, [x, weight], [torch.float32] * 2)
    want, want_gradients = gradients(case.plain, [x, weight], [torch.float64] * 2)
    assert got[0].min() < -1000
    assert apart(got, want) < 1e-6
    assert all(
        apart(mine, plain) < 1e-6 for mine, plain in zip(got_gradients, want_gradients, strict=True)
    )


@pytest.mark.parametrize("name", ["token_logprobs", "token_logprobs of kept tokens"])
def test_logits_in_chunks_and_computed_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less room for logits does not change a bit of the logprobs, and changes the gradients by
    rounding only."""
    case, inputs = CASES[name], drawn(CASES[name])
    whole = gradients(case.ours, inputs, [torch.float32] * 2)
    monkeypatch.setattr(logits, "LOGITS_AT_ONCE", 3 * VOCAB)
    chunked = gradients(case.ours, inputs, [torch.float32] * 2)
    monkeypatch.setattr(logits, "LOGITS_KEPT", 0)
    again = gradients(case.ours, inputs, [torch.float32] * 2)
    for other in (chunked, again):
        assert (other[0][0] == whole[0][0]).all()
        assert all(apart(a, b) < 1e-6 for a, b in zip(other[1], whole[1], strict=True))


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("attention")])
def test_long_sequences_have_the_gradients_of_short_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above a length the backward pass uses torch's attention; less room for scores splits the
    batch."""
    case, inputs = CASES[name], drawn(CASES[name])
    want = gradients(case.plain, inputs, [torch.float64] * len(inputs))[1]
    for limit, value in (("SHORT", 0), ("SHORT", 256), ("SCORES_AT_ONCE", 1)):
        monkeypatch.setattr(sys.modules[Heads.__module__], limit, value)
        got = gradients(case.ours, inputs, [torch.float32] * len(inputs))[1]
        assert all(apart(a, b) < 1e-6 for a, b in zip(got, want, strict=True))


# -------------------------------------------------------------------------------------- sequences
def test_a_batch_and_its_rows() -> None:
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    rows = Sequences.of_batch((4, 4), mask)
    assert rows.lengths.tolist() == [3, 2, 4]
    assert rows.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert rows.places.tolist() == [1, 2, 3, 4, 5, 12, 13, 14, 15]
    values = torch.arange(16.0).view(4, 4)
    assert (rows.pad(rows.pick(values)) == values * mask).all()
    last = rows.without_last()
    assert last.places.tolist() == [1, 2, 4, 12, 13, 14]
    assert last.lengths.tolist() == [2, 1, 3]
    packed = Sequences.of_batch((1, 6), None, torch.tensor([[0, 1, 2, 0, 0, 1]]))
    assert packed.lengths.tolist() == [3, 1, 2]
    left = Sequences.of_batch(
        (2, 3), torch.tensor([[0, 1, 1], [1, 1, 1]]), torch.tensor([[1, 0, 1], [0, 1, 2]])
    )
    assert left.lengths.tolist() == [2, 3]


@pytest.mark.parametrize(
    "mask, positions, error, words",
    [
        ([[1, 0, 1]], None, rm.RequestError, r"side by side, got a hole before \[0, 2\]"),
        ([[0, 0, 0]], None, rm.RequestError, "at least one token, got none"),
        (None, [[0, 2, 1]], rm.RequestError, r"position_ids: expected 1 at \[0, 1\].*got 2"),
        (None, [[3, 4, 5]], rm.RequestError, r"position_ids: expected 0 at \[0, 0\].*got 3"),
        ([[1, 1]], None, rm.ShapeError, r"attention_mask: expected shape \(1, 3\), got \(1, 2\)"),
        ([[[1, 1, 1]]], None, rm.ShapeError, "attention_mask: expected 2 dims.*got 3"),
        (
            None,
            [[0.0, 1.0, 2.0]],
            rm.UnsupportedTensorError,
            "position_ids: expected a torch tensor of integers",
        ),
    ],
)
def test_batches_that_are_refused(
    mask: Any, positions: Any, error: type[Exception], words: str
) -> None:
    tensors = [None if given is None else torch.tensor(given) for given in (mask, positions)]
    with pytest.raises(error, match=words):
        Sequences.of_batch((1, 3), *tensors)
