"""The ops of a mixture of experts, as test_ops_reference.py tests the others.

Oracles: float64 with derived bounds, transformers' routers, and the tree of combine, node by
node."""

from __future__ import annotations

import numpy as np
import pytest
from ops_cases import DTYPES, EPS, Array, dot_bound, hard, normal, stored, values

from rollmesh import ops

REF = "ref"


def f64(x: Array) -> Array:
    return values(x).astype(np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_router_against_float64(dtype: str, rng: np.random.Generator) -> None:
    experts, top_k, hidden, rows = 24, 5, 50, 40
    x, w = normal(rng, (rows, hidden), dtype), normal(rng, (experts, hidden), dtype, 0.3)
    bias = normal(rng, (experts,), "float32", 0.02)
    logits, bound = f64(x) @ f64(w).T, dot_bound(values(x), values(w)).max()
    scores = np.exp(logits - logits.max(1, keepdims=True))
    scores /= scores.sum(1, keepdims=True)
    tolerance = 2 * bound + 20 * EPS  # relative, of a score
    for b in (None, bias):
        for renormalize in (True, False):
            ids, gates = ops.router(
                x,
                ops.pack(w, dtype=dtype, isa=REF),
                experts,
                top_k,
                bias=b,
                renormalize=renormalize,
                isa=REF,
            )
            keys = scores + (0 if b is None else b)
            order = np.argsort(-keys, 1, kind="stable")
            ranked = np.take_along_axis(keys, order, 1)
            # Rows whose choice cannot change by rounding.
            clear = (ranked[:, :top_k] - ranked[:, 1 : top_k + 1] > 4 * tolerance).all(1)
            assert clear.sum() > rows // 2
            assert (ids[clear] == order[clear, :top_k]).all()
            chosen = np.take_along_axis(scores, ids.astype(np.int64), 1)
            want = chosen / chosen.sum(1, keepdims=True) if renormalize else chosen
            assert (np.abs(gates - want) <= 3 * tolerance * want).all()


def test_router_with_a_bias_of_the_logits(rng: np.random.Generator) -> None:
    """GptOssTopKRouter, in float32. Rows whose choice is within rounding of a tie are skipped."""
    torch = pytest.importorskip("torch")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssTopKRouter

    config = GptOssConfig(num_local_experts=24, num_experts_per_tok=5, hidden_size=50)
    x, w = normal(rng, (60, 50), "float32"), normal(rng, (24, 50), "float32", 0.3)
    bias, theirs = normal(rng, (24,), "float32", 2.0), GptOssTopKRouter(config)
    theirs.weight.data, theirs.bias.data = (torch.from_numpy(a.copy()) for a in (w, bias))
    with torch.no_grad():
        logits, gates, ids = (t.numpy() for t in theirs(torch.from_numpy(x.copy())))
    tolerance = 2 * dot_bound(values(x), values(w)).max() + 20 * EPS
    ranked = -np.sort(-logits, 1)
    clear = (ranked[:, :5] - ranked[:, 1:6]).min(1) > 4 * tolerance
    assert clear.sum() > 45
    packed = ops.pack(w, dtype="float32", isa=REF)
    ours = ops.router(x, packed, 24, 5, logit_bias=bias, isa=REF)
    assert (ours.ids[clear] == ids[clear]).all()
    assert (np.abs(ours.gates - gates)[clear] <= 5 * tolerance * gates[clear]).all()


@pytest.mark.quick(3)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (8, 3), (12, 12)])
def test_router_against_transformers(
    groups: int, top_groups: int, renormalize: bool, rng: np.random.Generator
) -> None:
    """Sigmoid scores, a bias, expert groups and a scale: Glm4MoeTopkRouter, in float32. Rows whose
    choice of an expert or a group is within rounding of a tie are skipped."""
    torch = pytest.importorskip("torch")
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeConfig, Glm4MoeTopkRouter

    experts, top_k, hidden, rows = 24, 5, 50, 60
    x, w = normal(rng, (rows, hidden), "float32"), normal(rng, (experts, hidden), "float32", 0.3)
    bias = normal(rng, (experts,), "float32", 0.2)
    config = Glm4MoeConfig(
        n_routed_experts=experts,
        num_experts_per_tok=top_k,
        hidden_size=hidden,
        n_group=groups,
        topk_group=top_groups,
        norm_topk_prob=renormalize,
        routed_scaling_factor=2.5,
    )
    theirs = Glm4MoeTopkRouter(config)
    theirs.weight.data, theirs.e_score_correction_bias = (
        torch.from_numpy(w.copy()),
        torch.from_numpy(bias.copy()),
    )
    with torch.no_grad():
        logits, gates, ids = (t.numpy() for t in theirs(torch.from_numpy(x.copy())))

    keys = 1 / (1 + np.exp(-f64(logits))) + bias
    order = np.argsort(-np.take_along_axis(keys, ids, 1), 1)  # theirs come in any order
    gates, ids = np.take_along_axis(gates, order, 1), np.take_along_axis(ids, order, 1)
    group_keys = np.sort(keys.reshape(rows, groups, -1), 2)[:, :, -2:].sum(2)
    least = np.sort(group_keys, 1)[:, -top_groups]
    is_open = np.repeat(group_keys >= least[:, None], experts // groups, 1)
    ranked = -np.sort(-np.where(is_open, keys, -np.inf), 1)
    # The absolute error of a score, which is below 1, and the relative error of a gate.
    tolerance = 2 * dot_bound(values(x), values(w)).max() + 20 * EPS
    clear = (ranked[:, :top_k] - ranked[:, 1 : top_k + 1]).min(1) > 4 * tolerance
    clear &= (least[:, None] - np.where(group_keys < least[:, None], group_keys, -np.inf)).min(
        1
    ) > 8 * tolerance
    assert clear.sum() > rows * 3 // 4

    packed = ops.pack(w, dtype="float32", isa=REF)
    how = {
        "bias": bias,
        "renormalize": renormalize,
        "score": "sigmoid",
        "route_scale": 2.5,
        "isa": REF,
    }
    ours = ops.router(x, packed, experts, top_k, num_groups=groups, top_groups=top_groups, **how)
    assert (ours.ids[clear] == ids[clear]).all()
    assert (np.abs(ours.gates - gates)[clear] <= 3 * tolerance * gates[clear]).all()


def test_sigmoid_scores_at_the_ends() -> None:
    """Scores that are all 0 give gates of 0 instead of NaN. A NaN logit affects only its own score;
    a group with fewer than two numbers is last."""
    one, low = np.ones((1, 1), np.float32), np.full((8, 1), -100, np.float32)
    logits = np.array([[3, np.nan, 1, 1, 0, 0.5, np.nan, np.nan]], np.float32).T.copy()
    for isa in ops.available_isas():
        assert ops.router(
            one, ops.pack(low, dtype="float32", isa=isa), 8, 2, score="sigmoid", isa=isa
        ).gates.tolist() == [[0, 0]]
        packed = ops.pack(logits, dtype="float32", isa=isa)
        for top_groups, want in (
            (2, [2, 3, 5, 4]),
            (3, [0, 2, 3, 5, 4, 1]),
            (4, [0, 2, 3, 5, 4, 1, 6, 7]),
        ):
            how = {
                "renormalize": False,
                "score": "sigmoid",
                "num_groups": 4,
                "top_groups": top_groups,
                "isa": isa,
            }
            ids, gates = ops.router(one, packed, 8, len(want), **how)
            assert ids.tolist() == [want]
            assert (np.isnan(gates) == np.isnan(logits.T[0, want])).all()


def test_permute_sorts_by_expert_then_row(rng: np.random.Generator) -> None:
    rows, experts, top_k = 30, 7, 3
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(rows)]).astype(np.int32)
    x = hard(rng, (rows, 20), "bfloat16")
    x_out, group_rows, place = ops.permute(x, ids, experts, isa=REF)
    order = np.argsort(ids.reshape(-1), kind="stable")
    assert (x_out == x[order // top_k]).all()
    assert (place.reshape(-1)[order] == np.arange(rows * top_k)).all()
    assert (np.diff(group_rows) == np.bincount(ids.reshape(-1), minlength=experts)).all()


def tree(leaves: dict[int, Array], first: int, width: int) -> Array | None:
    """The node over [first, first + width): left + right, or the one that is present."""
    if width == 1:
        return leaves.get(first)
    left, right = tree(leaves, first, width // 2), tree(leaves, first + width // 2, width // 2)
    if left is None or right is None:
        return right if left is None else left
    return left + right


@pytest.mark.parametrize("dtype", DTYPES)
def test_combine_is_the_complete_tree(dtype: str, rng: np.random.Generator) -> None:
    for experts, top_k in ((1, 1), (5, 3), (8, 8), (60, 8), (128, 6)):
        ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(12)]).astype(np.int32)
        gates = rng.random((12, top_k)).astype(np.float32)
        y, place = (
            normal(rng, (12 * top_k, 33), dtype),
            rng.permutation(12 * top_k).reshape(12, top_k).astype(np.int32),
        )
        out = ops.combine(y, place, ids, gates, experts, isa=REF)
        places = 1 << (experts - 1).bit_length()
        for r in range(12):
            root = tree(
                {int(e): gates[r, k] * values(y[place[r, k]]) for k, e in enumerate(ids[r])},
                0,
                places,
            )
            assert root is not None
            assert (out[r] == stored(root, dtype)).all()
