"""The arithmetic of GRPO by hand: seeds, learning rate, advantages, loss, batches and built-in
rewards."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpo_runs import tokenizer  # noqa: F401
from rollouts import rollout_of

import rollmesh as rm

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rollmesh.grpo import advantages as adv  # noqa: E402
from rollmesh.grpo import rewards, rollout, trainer  # noqa: E402
from rollmesh.grpo.loss import (  # noqa: E402
    grpo_loss,
    mismatch,
    token_weights,
)
from rollmesh.run import (  # noqa: E402
    data,
    samples,
    seeds,
)
from rollmesh.run.config import LossTable, TrainTable  # noqa: E402

pytestmark = pytest.mark.usefixtures("torch_as_it_was")


# -------------------------------------------------------------------------------- seeds, schedule
def test_seeds_are_these_numbers_forever() -> None:
    """A resumed run depends on the seeds, so they are fixed values; every argument matters and all
    lie in [0, 2^63)."""
    assert seeds.seed_of(0, 0, "prompts") == 4416943254697907929
    drawn = {seeds.seed_of(r, s, n) for r in range(10) for s in range(10) for n in ("a", "b")}
    assert len(drawn) == 200
    assert all(0 <= s < 2**63 for s in drawn)
    assert seeds.seed_of(1, 23, "x") != seeds.seed_of(12, 3, "x")


def test_learning_rate_by_hand() -> None:
    table = TrainTable(steps=10, lr=1.0, warmup_steps=2, schedule="linear")
    assert [trainer.learning_rate(table, s) for s in (0, 1, 2, 6, 9)] == [0.5, 1.0, 1.0, 0.5, 0.125]
    cosine = TrainTable(steps=8, lr=2.0, schedule="cosine")
    assert trainer.learning_rate(cosine, 4) == pytest.approx(1.0)
    assert trainer.learning_rate(TrainTable(lr=3.0), 99) == 3.0


# ------------------------------------------------------------------------------------- advantages
def test_advantages_by_hand() -> None:
    r = np.array([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
    centered = np.array([[0.5, -0.5, -0.5, 0.5], [-0.25, -0.25, -0.25, 0.75]])
    assert np.array_equal(adv.advantages(r, "mean", "none"), centered)
    assert np.allclose(
        adv.advantages(r, "leave-one-out", "none"),
        [[2 / 3, -2 / 3, -2 / 3, 2 / 3], [-1 / 3, -1 / 3, -1 / 3, 1.0]],
    )
    spread = np.array([[0.5], [math.sqrt(3) / 4]])
    assert np.allclose(adv.advantages(r), centered / (spread + adv.EPSILON), rtol=1e-12)
    assert np.allclose(
        adv.advantages(r, "mean", "batch"), centered / (centered.std() + adv.EPSILON), rtol=1e-12
    )


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave-one-out"])
def test_a_group_of_equal_rewards_gets_exact_zeros(baseline: str, scale: str) -> None:
    """0.1 three times has a mean that is not 0.1 in float64."""
    assert np.mean([0.1] * 3) != 0.1
    assert not adv.advantages(np.full((2, 3), 0.1), baseline, scale).any()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave-one-out"])
def test_unjudged_completions_count_in_no_advantage(
    baseline: str, scale: str, rng: np.random.Generator
) -> None:
    """Oracle: the formulas of advantages.py in Python, over the judged rewards of each group alone.
    Bound: 1e-12 of a value."""
    for _ in range(50):
        r = np.where(rng.random((4, 5)) < 0.4, np.nan, rng.integers(0, 3, (4, 5)).astype(float))
        r[0, 1:], r[1] = np.nan, np.nan  # one judged completion at most, and none
        expected = np.zeros(r.shape)
        for i, row in enumerate(r):
            judged = [j for j in range(5) if not np.isnan(row[j])]
            for j in judged if len({*row[judged]}) > 1 else ():
                others = [k for k in judged if k != j or baseline == "mean"]
                expected[i, j] = row[j] - row[others].mean()
                if scale == "group":
                    expected[i, j] /= row[judged].std() + adv.EPSILON
        if scale == "batch" and not np.isnan(r).all():
            expected /= expected[~np.isnan(r)].std() + adv.EPSILON
        assert np.allclose(adv.advantages(r, baseline, scale), expected, rtol=1e-12, atol=1e-12)
        assert adv.rewards_differ(r).tolist() == [len({*row[~np.isnan(row)]}) > 1 for row in r]


def test_leave_one_out_is_the_mean_of_the_others(rng: np.random.Generator) -> None:
    r = rng.random((3, 5))
    expected = [[row[i] - np.delete(row, i).mean() for i in range(5)] for row in r]
    assert np.allclose(adv.advantages(r, "leave-one-out", "none"), expected, rtol=1e-12)


# ------------------------------------------------------------------------------------------- loss
def loss_by_hand(lp: Any, old: Any, a: Any, h: Any, w: Any, t: LossTable, ref: Any = None) -> float:
    """Computes the docstring of loss.py, token by token, in Python floats."""
    total = 0.0
    for i in range(len(lp)):
        ratio = math.exp(lp[i] - old[i])
        clipped = min(max(ratio, 1 - t.clip_low), 1 + t.clip_high)
        token = -min(ratio * a[i], clipped * a[i]) - t.entropy * h[i]
        if ref is not None:
            d = ref[i] - lp[i]
            token += t.kl * (math.exp(d) - 1 - d)
        total += w[i] * token
    return total


LOSS_CASES = [
    (LossTable(), False),
    (LossTable(clip_low=0.1, clip_high=0.4, entropy=0.3), False),
    (LossTable(kl=0.5, entropy=0.1), True),
]


@pytest.mark.parametrize("table, with_ref", LOSS_CASES)
def test_loss_and_gradient_by_hand(
    table: LossTable, with_ref: bool, rng: np.random.Generator
) -> None:
    """Value within 1e-12 of the formula in float64; gradient against central differences of the
    formula, 1e-6."""
    n = 40
    lp, old = -rng.random(n) * 3, -rng.random(n) * 3
    a, h, w, ref = rng.standard_normal(n), rng.random(n), rng.random(n), -rng.random(n) * 3
    tensors = [torch.tensor(x) for x in (lp, h, old, a, w)]
    tensors[0].requires_grad_()
    tensors[1].requires_grad_()
    loss, _ = grpo_loss(*tensors, table, torch.tensor(ref) if with_ref else None)
    hand_ref = ref if with_ref else None
    assert float(loss.detach()) == pytest.approx(
        loss_by_hand(lp, old, a, h, w, table, hand_ref), abs=1e-12
    )
    loss.backward()
    eps = 1e-6
    for i in range(n):
        up, down = lp.copy(), lp.copy()
        up[i] += eps
        down[i] -= eps
        slope = (
            loss_by_hand(up, old, a, h, w, table, hand_ref)
            - loss_by_hand(down, old, a, h, w, table, hand_ref)
        ) / (2 * eps)
        assert float(tensors[0].grad[i]) == pytest.approx(slope, abs=1e-6)
    assert np.allclose(tensors[1].grad, -table.entropy * w, rtol=1e-12)


def test_clipping_stops_the_gradient_on_the_far_side_only() -> None:
    """ratio e: A > 0 is clipped above, gradient 0; A < 0 is not, gradient w·ratio·|A|. Likewise
    mirrored below."""
    lp = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    zero, one = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    loss, terms = grpo_loss(lp, zero, zero, a, one, LossTable())
    loss.backward()
    assert lp.grad is not None
    assert np.allclose(lp.grad, [0.0, math.e, -math.exp(-1), 0.0])
    assert float(terms["clip_share"]) == 2.0


def test_a_ratio_that_no_float_holds() -> None:
    """The ratio matters only where the loss grows with it: not where it is clipped, nor where the
    advantage or the token's weight is 0."""
    for advantage, correction, is_finite in (
        (1.0, 1.0, True),
        (0.0, 1.0, True),
        (-1.0, 0.0, True),
        (-1.0, 1.0, False),
    ):
        lp, zero, one = torch.tensor([-0.1], requires_grad=True), torch.zeros(1), torch.ones(1)
        loss, _ = grpo_loss(
            lp, zero, zero - 120, one * advantage, one, LossTable(), correction_N=one * correction
        )
        loss.backward()
        assert lp.grad is not None
        assert bool(lp.grad.isfinite()) == bool(loss.isfinite()) == is_finite
        assert not is_finite or lp.grad == 0


def test_token_weights_by_hand() -> None:
    lengths = torch.tensor([1, 3])
    assert np.allclose(token_weights(lengths, "token-mean", 8), [0.25] * 4)
    assert np.allclose(token_weights(lengths, "sequence-mean", 8), [0.5, 1 / 6, 1 / 6, 1 / 6])
    assert np.allclose(token_weights(lengths, "constant", 8), [1 / 16] * 4)


def test_rewards_of_chats_get_messages(tokenizer: Any, tmp_path: Path) -> None:
    """TRL's form: prompts are message lists, completions one-message lists, columns once for each
    sample."""
    (tmp_path / "chat_rewards_of_test.py").write_text(
        "def f(prompts, completions, completion_ids, answer, **_):\n"
        "    return [float(p[-1]['content'].upper() == c[0]['content'] == a) for p, c, a in "
        "zip(prompts, completions, answer)]\n"
    )
    prompt = data.make_prompt({"prompt": "ab", "answer": "AB"}, tokenizer, True, 0, "here")
    this = rollout_of(
        [prompt, prompt], [[1], [2]], [np.zeros(1, np.float32)] * 2, ["AB", "A"], [True, True]
    )
    assert rollout.score(this, rewards.Rewards(["chat_rewards_of_test:f"], (), tmp_path)).total == [
        1.0,
        0.0,
    ]


def test_batches_list_generated_tokens_by_hand(tokenizer: Any) -> None:
    """Two prompts of 1 and 3 tokens with 2 and 1 generated tokens: the ids, and for each generated
    token the position before it."""
    prompts = [data.Prompt("", (7,), {}), data.Prompt("", (4, 5, 6), {})]
    this = rollout_of(
        prompts, [[8, 1], [9]], [np.float32([-1, -2]), np.float32([-3])], ["", ""], [True, False]
    )
    b = samples.make_batch(this.completions)
    assert b.ids_BT.tolist() == [[7, 8, 1], [4, 5, 6]]
    assert list(zip(b.rows_N.tolist(), b.columns_N.tolist(), b.targets_N.tolist())) == [
        (0, 0, 8),
        (0, 1, 1),
        (1, 2, 9),
    ]
    assert b.old_logprobs_N.tolist() == [-1, -2, -3]
    assert b.lengths_B.tolist() == [2, 1]


def test_mismatch_by_hand() -> None:
    trainer_lp, generator_lp = np.float32([-1.0, -2.0, -3.0]), np.float32([-1.0, -2.5, -2.75])
    m = mismatch(trainer_lp, generator_lp)
    d = [0.0, 0.5, -0.25]
    assert m["logprob_diff_mean"] == pytest.approx(0.25)
    assert m["logprob_diff_max"] == 0.5
    assert m["kl_k1"] == pytest.approx(-sum(d) / 3)
    assert m["kl_k3"] == pytest.approx(sum(math.exp(x) - 1 - x for x in d) / 3)
    assert m["tokens_differ"] == pytest.approx(2 / 3)


# ---------------------------------------------------------------------------------------- rewards
def test_built_in_rewards_by_hand() -> None:
    texts, answers = ["ABCD", "ABXD", "ABCDE", "", "xABCD"], ["ABCD"] * 5
    assert rewards.char_match([], texts, answer=answers) == [1.0, 0.75, 0.8, 0.0, 0.0]
    assert rewards.exact_match([], [" ABCD\n", "ABC"], answer=["ABCD"] * 2) == [1.0, 0.0]
    assert rewards.contains([], texts, answer=answers) == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert rewards.char_match(
        [], [[{"role": "assistant", "content": "ABCD"}]], answer=["ABCD"]
    ) == [1.0]


MODULE = """
def by_length(prompts, completions, completion_ids=None, **columns):
    assert len(prompts) == len(completions) == len(completion_ids) == len(columns["bonus"])
    return [len(ids) + bonus for ids, bonus in zip(completion_ids, columns["bonus"])]

def none(completions, **_):
    return [None] * len(completions)

def short(completions, **_):
    return [1.0]

def nan(completions, **_):
    return [float("nan")] * len(completions)
"""


def test_a_reward_of_ones_own_has_trls_signature(tmp_path: Path) -> None:
    (tmp_path / "own_rewards_of_test.py").write_text(MODULE)
    path = list(sys.path)
    r = rewards.Rewards(
        ["own_rewards_of_test:by_length", "own_rewards_of_test:none"], [0.5, 3.0], tmp_path
    )
    assert sys.path[: len(path)] == path, "no module beside the reward hides a library's"
    assert r.judge(["p", "q"], ["x", "yy"], [[1], [2, 3]], {"bonus": [10, 20]}).total == [5.5, 11.0]
    for name, message in (
        ("short", "expected 2 values, one a completion, got 1"),
        ("nan", "completion 0 got nan"),
    ):
        with pytest.raises(rm.ConfigError, match=message):
            rewards.Rewards([f"own_rewards_of_test:{name}"], (), tmp_path).judge(
                ["p", "q"], ["x", "y"], [[1], [2]], {}
            )
    for name, message in (
        ("nope", "expected char_match"),
        ("no_such_module_x:f", "cannot import"),
        ("own_rewards_of_test:f", "no function"),
    ):
        with pytest.raises(rm.ConfigError, match=message):
            rewards.resolve(name, tmp_path)
