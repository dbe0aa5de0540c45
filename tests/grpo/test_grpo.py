"""The parts of rollmesh.grpo, each against a hand computation, and the loop as a whole on a model
of a few thousand weights.

The full learning runs (three seeds, dense and MoE) take minutes:
`pytest -m slow tests/grpo/test_grpo_learning.py`.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import TIMES, TINY_RUN
from paths import ROOT
from rollouts import rollout_of

import rollmesh as rm

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rollmesh.grpo import advantages as adv  # noqa: E402
from rollmesh.grpo import loop, rewards, rollout, trainer  # noqa: E402
from rollmesh.grpo.loss import (  # noqa: E402
    grpo_loss,
    mismatch,
    token_weights,
)
from rollmesh.model.families import FAMILIES  # noqa: E402
from rollmesh.run import (  # noqa: E402
    checkpoint,
    config,
    data,
    metrics,
    samples,
    seeds,
)
from rollmesh.run.config import LossTable, TrainTable  # noqa: E402

MOE, DENSE = ROOT / "configs/qwen3_moe_debug.toml", ROOT / "configs/qwen3_debug.toml"
pytestmark = pytest.mark.usefixtures("torch_as_it_was")


# ---------------------------------------------------------------------------------- configuration
@pytest.mark.parametrize(
    "change, message",
    [
        ('train.lr="x"', r'\[train\] lr: expected a number, got "x"'),
        ("train.lr=-1", r"\[train\] lr: expected above 0, got -1"),
        ("train.lr=nan", r"\[train\] lr: expected a finite number, got nan"),
        ("train.steps=1.5", r"\[train\] steps: expected an integer, got 1.5"),
        ("train.steps=true", r"\[train\] steps: expected an integer, got true"),
        ("train.speed=3", r"\[train\] speed: no such key; there are kernels, mismatch, steps, "),
        ("trian.lr=1", r"trian: no such table; there are model, "),
        ("sed=1", r"sed: no such key"),
        ("train=3", r"train: expected a table, got 3"),
        ("reward.shuffle=1", r"\[reward\] shuffle: expected true or false, got 1"),
        ('reward.functions=["a", 2]', r"\[reward\] functions\[1\]: expected a string, got 2"),
        ("reward.functions=[]", r"\[reward\] functions: expected at least one"),
        ("reward.weights=[1, 2]", r"\[reward\] weights: expected 1, one a function, got 2"),
        (
            "loss.aggregation=mean",
            r'\[loss\] aggregation: expected one of "token-mean", "sequence-mean", "constant", '
            r'got "mean"',
        ),
        ("rollout.samples=1", r"\[rollout\] samples: expected at least 2, got 1"),
        (
            "rollout.max_tokens=64",
            r"\[rollout\] max_tokens: expected below \[generator\] max_model_len=64, got 64",
        ),
        (
            "rollout.top_p=0.9",
            r"\[rollout\] top_k: expected above 0 with top_p = 0.9, min_p = 0 .*, got 0",
        ),
        ("rollout.top_p=0", r"\[rollout\] top_p: expected above 0, got 0"),
        ("train.betas=[0.9]", r"\[train\] betas: expected two numbers in \[0, 1\), got \[0.9\]"),
        ('model={path="a", hidden_size=3}', r"\[model\] hidden_size: not allowed beside path"),
        ("model={hidden_size=3}", r"\[model\]: give either path"),
        ("model.layer_types=[]", r'\[model\] layer_types: not a key of architecture "qwen3_moe"'),
        ("model.n_group=1", r'\[model\] n_group: not a key of architecture "qwen3_moe"'),
        (
            "model.architecture=llama",
            r'\[model\] moe_intermediate_size: not a key of architecture "llama"',
        ),
        (
            'model={architecture="qwen3", num_experts=8}',
            r'\[model\] num_experts: not a key of architecture "qwen3"',
        ),
        (
            'model={architecture="glm4_moe", num_experts=8}',
            r'\[model\] num_experts: not a key of architecture "glm4_moe"',
        ),
        (
            'model={architecture="qwen2", attention_bias=true}',
            r'\[model\] attention_bias: not a key of architecture "qwen2"',
        ),
        (
            "model.architecture=gpt2",
            r'\[model\] architecture: expected one of "llama", .*"glm4_moe", got "gpt2"',
        ),
        ("model.architecture=3", r"\[model\] architecture: expected a string, got 3"),
        (
            "data.stage_steps=[5]",
            r"\[data\] stage_steps: expected 0 steps for 1 files in train, got 1",
        ),
        ("seed=-1", r"seed: expected at least 0, got -1"),
        ("novalue", r"--set novalue: expected KEY=VALUE"),
        ("seed.deep=1", r"--set seed.deep=1: seed is not a table"),
    ],
)
def test_a_wrong_key_is_an_error_that_names_its_path(change: str, message: str) -> None:
    with pytest.raises(rm.ConfigError, match=f"^{message}"):
        config.load(MOE, [change])


def test_minibatches_must_divide_the_prompts() -> None:
    with pytest.raises(
        rm.ConfigError,
        match=r"\[train\] updates: 3 minibatches do not divide \[rollout\] prompts=32",
    ):
        config.load(MOE, ["train.minibatches=true", "train.updates=3"])


def test_unreadable_files_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(rm.ConfigError, match="No such file"):
        config.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(rm.ConfigError, match=r"bad\.toml"):
        config.load(tmp_path / "bad.toml")


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.stem)
def test_the_configs_in_the_repository_are_valid(file: Path) -> None:
    assert config.load(file).as_dict()["model"]["architecture"] in FAMILIES


def test_overrides_are_toml_and_bare_words_are_strings() -> None:
    c = config.load(
        MOE,
        [
            "train.lr=1e-3",
            "train.schedule=cosine",
            "seed=7",
            'reward.functions=["exact_match"]',
            "train.warmup_steps=4",
        ],
    )
    assert (c.train.lr, c.train.schedule, c.seed, c.reward.functions) == (
        1e-3,
        "cosine",
        7,
        ("exact_match",),
    )


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


# ------------------------------------------------------------------------------------------- data
@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return data.load_tokenizer(ROOT / "data/chars")


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_script_makes_the_files_in_the_repository(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "data"))
    try:
        import make_data
    finally:
        sys.path.remove(str(ROOT / "data"))
    make_data.main(tmp_path)
    made = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file())
    assert made == sorted(
        p.relative_to(ROOT / "data")
        for p in (ROOT / "data").rglob("*")
        if p.suffix in (".json", ".jsonl")
    )
    assert [
        p for p in made if (tmp_path / p).read_bytes() != (ROOT / "data" / p).read_bytes()
    ] == []


def test_the_tokenizer_is_one_token_a_character(tokenizer: Any) -> None:
    text = "".join(map(chr, range(32, 127))) + "\n"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) == len(set(ids))
    assert tokenizer.decode(ids) == text
    assert (
        tokenizer.decode([*ids[:3], tokenizer.eos_token_id], skip_special_tokens=True) == text[:3]
    )


def test_a_reward_sees_special_tokens_but_not_the_end(tokenizer: Any) -> None:
    """A policy that pads its answer must lose reward: only the eos that ended the completion is
    left out."""
    a, unk, eos = tokenizer.convert_tokens_to_ids(["A", "<|unk|>", tokenizer.eos_token])

    def completion(ids: list[int], finish: str, stop: int | str | None = None) -> Any:
        return SimpleNamespace(
            token_ids=np.array(ids, np.int32), finish_reason=finish, stop_reason=stop
        )

    assert rollout.text_of(tokenizer, [], completion([a, a, eos], "stop")) == "AA"
    assert rollout.text_of(tokenizer, [], completion([a, unk], "length")) == "A<|unk|>"
    assert rollout.text_of(tokenizer, [], completion([a, unk, eos], "stop")) == "A<|unk|>"
    assert rollout.text_of(tokenizer, [], completion([a, a], "stop", "A")) == "AA"
    assert rollout.text_of(tokenizer, [], completion([eos], "stop")) == ""


def test_chats_go_through_the_template(tokenizer: Any) -> None:
    row = {"messages": [{"role": "user", "content": "ab"}], "answer": "AB"}
    p = data.make_prompt(row, tokenizer, False, 0, "here")
    q = data.make_prompt({"prompt": "ab", "answer": "AB"}, tokenizer, True, 0, "here")
    assert (
        p.ids
        == q.ids
        == tuple(tokenizer.convert_tokens_to_ids(["<|user|>", "a", "b", "<|assistant|>"]))
    )
    assert p.is_chat
    assert p.columns == {"answer": "AB"}


@pytest.mark.parametrize(
    "row",
    [
        {},
        [],
        {"prompt": 3},
        {"prompt": ""},
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"prompt": "a", "messages": []},
    ],
)
def test_malformed_rows_name_file_and_line(row: Any, tokenizer: Any, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", [{"prompt": "a"}, row])
    with pytest.raises(rm.ConfigError, match=r"x.jsonl:2: "):
        data.read_jsonl(tmp_path / "x.jsonl", tokenizer)


def test_a_line_without_json_is_named(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\nb\n', encoding="utf-8")
    with pytest.raises(
        rm.ConfigError, match=r"x.jsonl:2: expected a JSON object, got none: Expecting value"
    ):
        data.read_jsonl(tmp_path / "x.jsonl", tokenizer)


def test_a_line_separator_inside_a_string_ends_no_line(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(
        '{"prompt": "a\u2028b"}\n\n{"prompt": "c"}\n', encoding="utf-8"
    )
    assert [p.source for p in data.read_jsonl(tmp_path / "x.jsonl", tokenizer)] == ["a\u2028b", "c"]


def test_the_heldout_share_depends_on_the_text_only(tokenizer: Any, tmp_path: Path) -> None:
    """The split does not depend on the order or the other rows of the file: a prompt stays on its
    side, and prompts are not on both."""
    rows = [{"prompt": f"p{i}", "answer": "x"} for i in range(400)]
    sets = []
    for name, part in (("a", rows), ("b", rows[::-1][:300])):
        file = write_jsonl(tmp_path / f"{name}.jsonl", part)
        c = config.load(MOE, [f'data={{train=["{file}"], heldout_share=0.2}}'])
        found = data.load_dataset(c, tokenizer)
        sets.append(({p.source for p in found.train}, {p.source for p in found.heldout}))
    (train_a, held_a), (train_b, held_b) = sets
    assert not train_a & held_a
    assert held_b == {p for p in held_a if p in held_b | train_b}
    assert 40 <= len(held_a) <= 120


def test_a_heldout_prompt_that_is_trained_on_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "ab"}, {"prompt": "cd"}])
    with pytest.raises(
        rm.ConfigError, match=r"\[data\] heldout: 2 of its prompts are training prompts too"
    ):
        data.load_dataset(
            config.load(MOE, [f'data={{train=["{file}"], heldout=["{file}"]}}']), tokenizer
        )


def test_draws_depend_on_seed_and_step_and_open_stages(tokenizer: Any, tmp_path: Path) -> None:
    files = [
        write_jsonl(tmp_path / f"{i}.jsonl", [{"prompt": f"{i}{j}"} for j in range(50)])
        for i in range(2)
    ]
    held = write_jsonl(tmp_path / "held.jsonl", [{"prompt": "held"}])
    found = data.load_dataset(
        config.load(MOE, [f"data={{train={files}, heldout=['{held}'], stage_steps=[3]}}"]),
        tokenizer,
    )
    drawn = found.draw(0, 0, 20)
    assert drawn == found.draw(0, 0, 20)
    assert drawn != found.draw(0, 1, 20)
    assert drawn != found.draw(1, 0, 20)
    assert len({p.ids for p in drawn}) == 20
    assert {p.source[0] for p in found.draw(0, 2, 50)} == {"0"}
    assert {p.source[0] for p in found.draw(0, 3, 100)} == {"0", "1"}
    assert len(found.draw(0, 0, 80)) == 80


@pytest.mark.parametrize("name", ["upper_heldout", "upper_train", "sort_heldout"])
def test_no_constant_completion_is_worth_more_than_030(name: str) -> None:
    """Computes exactly the best completion that ignores the prompt: at each length the best
    character of each position."""
    rows = [json.loads(line) for line in (ROOT / f"data/{name}.jsonl").read_text().splitlines()]
    answers = [row["answer"] for row in rows]
    characters = sorted(set("".join(answers)))
    best = 0.0
    for length in range(1, 7):
        share = [
            max(
                np.mean([i < len(a) and a[i] == c and 1 / max(length, len(a)) for a in answers])
                for c in characters
            )
            for i in range(length)
        ]
        best = max(best, float(sum(share)))
    assert 1 / 26 <= best <= 0.3


def test_heldout_and_training_prompts_are_distinct() -> None:
    for held, files in (
        ("upper_heldout", ["upper_train"]),
        ("sort_heldout", ["sort2_train", "sort3_train", "sort4_train", "sort5_train"]),
    ):
        prompts = [
            json.loads(line)["prompt"]
            for f in files
            for line in (ROOT / f"data/{f}.jsonl").read_text().splitlines()
        ]
        held_out = {
            json.loads(line)["prompt"]
            for line in (ROOT / f"data/{held}.jsonl").read_text().splitlines()
        }
        assert len(prompts) == len(set(prompts))
        assert len(held_out) == 256
        assert not held_out & set(prompts)


# ---------------------------------------------------------------------------------------- metrics
def test_metrics_of_a_killed_run_are_cut_at_the_resumed_step(tmp_path: Path) -> None:
    log = metrics.MetricsLog(tmp_path)
    for step in range(5):
        log.write({"step": step, "x": step * 0.5})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 5, "x"')
    log = metrics.MetricsLog(tmp_path, first_step=3)
    log.write({"step": 3, "x": 7.0})
    log.close()
    assert [(m["step"], m["x"]) for m in metrics.read(tmp_path / "metrics.jsonl")] == [
        (0, 0.0),
        (1, 0.5),
        (2, 1.0),
        (3, 7.0),
    ]


# --------------------------------------------------------------------------------------- the loop
@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs draw_curves, which takes longer than the rest of these small runs: only one test calls
    it."""
    monkeypatch.setattr("rollmesh.run.folder.draw_curves", lambda lines, path: path.touch())
    return metrics.draw_curves


def run(file: Path, out: Path, changes: list[str], resume: Path | None = None) -> loop.Run:
    this = loop.prepare(config.load(file, [*TINY_RUN, *changes]), resume)
    try:
        loop.train(this, out)
    finally:
        this.close()
    return this


def weights_of(this: loop.Run) -> dict[str, bytes]:
    return {name: t.detach().numpy().tobytes() for name, t in this.trainer.state_dict().items()}


def moments_of(this: loop.Run) -> list[bytes]:
    state = this.trainer.optimizer.state_dict()["state"]
    return [
        torch.as_tensor(t).numpy().tobytes()
        for _, entry in sorted(state.items())
        for _, t in sorted(entry.items())
    ]


@pytest.mark.quick(1)
@pytest.mark.parametrize("file", [MOE, DENSE], ids=["moe", "dense"])
def test_a_resumed_run_is_the_same_run_bit_for_bit(file: Path, tmp_path: Path) -> None:
    """Compares four steps at once with two steps, new objects as in a new process, and two more.
    Bound: weights, moments and metrics (except times) are bit-identical. The reference model and a
    sampled evaluation are on, so that they are covered too."""
    changes = ["loss.kl=0.01", "eval.temperature=0.7", "train.minibatches=true"]
    whole = run(file, tmp_path / "whole", [*changes, "train.steps=4"])
    first = run(file, tmp_path / "parts", [*changes, "train.steps=2"])
    assert weights_of(first) != weights_of(whole)
    second = run(file, tmp_path / "parts", [*changes, "train.steps=4"], resume=tmp_path / "parts")
    assert second.first_step == 2
    assert weights_of(second) == weights_of(whole)
    assert moments_of(second) == moments_of(whole)
    lines = [
        [
            {k: v for k, v in m.items() if k not in TIMES}
            for m in metrics.read(tmp_path / name / "metrics.jsonl")
        ]
        for name in ("whole", "parts")
    ]
    assert lines[0] == lines[1]
    assert [m["step"] for m in lines[0]] == list(range(5))


def test_a_run_leaves_what_it_promises(
    tmp_path: Path, drawn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmesh.run.folder.draw_curves", drawn)
    run(
        MOE,
        tmp_path,
        ["train.steps=3", "checkpoint.every=1", "checkpoint.keep=2", "train.micro_batch=5"],
    )
    lines = metrics.read(tmp_path / "metrics.jsonl")
    wanted = {
        "step",
        "reward_mean",
        "logprob_diff_max",
        "logprob_diff_mean",
        "kl_k1",
        "kl_k3",
        "tokens_differ",
        "tokens_per_s",
        "sync_s",
    }
    wanted |= {"generate_s", "reward_s", "update_s"}
    assert all(wanted <= m.keys() for m in lines)
    assert ["eval_reward" in m for m in lines] == [True, False, True, True]
    assert max(m["logprob_diff_max"] for m in lines) < 1e-4, (
        "float32 on both sides differs by rounding only"
    )
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == [
        "step_000002",
        "step_000003",
    ]
    assert not list(tmp_path.rglob("*.partial"))
    assert list((tmp_path / "events").glob("events.*"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    files = {p.name for p in (tmp_path / "checkpoints/step_000003").iterdir()}
    assert {"config.json", "model.safetensors", "trainer", "tokenizer.json"} <= files
    assert not [f for f in files if f.endswith((".bin", ".pt", ".pkl"))]


def test_micro_batches_give_the_same_gradient(tmp_path: Path) -> None:
    """One step with micro batches of 5 of 16 sequences against one forward: the sums differ in
    order only."""
    norms = []
    for size in (0, 5):
        run(
            MOE,
            tmp_path / str(size),
            ["train.steps=1", f"train.micro_batch={size}", "loss.aggregation=sequence-mean"],
        )
        norms.append(metrics.read(tmp_path / str(size) / "metrics.jsonl")[0])
    assert norms[0]["grad_norm"] == pytest.approx(norms[1]["grad_norm"], rel=1e-4)
    assert norms[0]["loss"] == pytest.approx(norms[1]["loss"], rel=1e-4, abs=1e-6)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    run(MOE, tmp_path, ["train.steps=1", "train.lr=1e-3"])
    with pytest.raises(
        rm.ConfigError,
        match=r"belongs to another run: train.lr differ \(train.lr: 0.001 there, 0.002 here\)",
    ):
        loop.prepare(config.load(MOE, [*TINY_RUN, "train.steps=2", "train.lr=2e-3"]), tmp_path)
    assert (
        checkpoint.read_state(
            checkpoint.find(tmp_path), config.load(MOE, [*TINY_RUN, "train.lr=2e-3"]), ["train.lr"]
        )
        == 1
    )
    bigger = config.load(MOE, [*TINY_RUN, "train.lr=1e-3", "model.hidden_size=96"])
    with pytest.raises(
        rm.ConfigError,
        match=r"belongs to another run: model\.hidden_size differ .* 96 here\); a run keeps its "
        r"model$",
    ):
        checkpoint.read_state(checkpoint.find(tmp_path), bigger, ["model.hidden_size"])
    with pytest.raises(rm.ConfigError, match="no checkpoint there"):
        loop.prepare(config.load(MOE, TINY_RUN), tmp_path / "none")
    for where in ("checkpoints", "checkpoints/step_000009"):
        with pytest.raises(
            rm.ConfigError, match=r"no checkpoint there .*; .*checkpoints has step_000001$"
        ):
            checkpoint.find(tmp_path / where)


def test_other_prompts_than_those_of_the_run_are_refused(tmp_path: Path) -> None:
    """The file was edited since the run; an option can declare that the data differ."""
    rows = [json.dumps({"prompt": f"{c}=", "answer": c}) + "\n" for c in "abcdefgh"]
    sets = [
        f'data.train=["{tmp_path}/rows"]',
        "data.heldout=[]",
        "data.heldout_share=0.3",
        "data.stage_steps=[]",
    ]
    (tmp_path / "rows").write_text("".join(rows))
    run(MOE, tmp_path / "run", [*sets, "train.steps=1"])
    (tmp_path / "rows").write_text("".join([*rows[:-1], rows[-1].replace('"h"', '"H"')]))
    changed = config.load(MOE, [*TINY_RUN, *sets, "train.steps=1"])
    with pytest.raises(
        rm.ConfigError,
        match=r"belongs to a run with other prompts: expected those of SHA-256 '\w+', got \w+; "
        r"the ",
    ):
        loop.prepare(changed, tmp_path / "run")
    loop.prepare(changed, tmp_path / "run", ["data.train"]).close()
    state = tmp_path / "run/checkpoints/step_000001/trainer/state.json"
    state.write_text(
        json.dumps({k: v for k, v in json.loads(state.read_text()).items() if k != "data"})
    )
    loop.prepare(changed, tmp_path / "run").close()  # a checkpoint of an older version


def test_a_run_starts_from_a_checkpoint_folder_that_the_trainer_reads(tmp_path: Path) -> None:
    first = run(MOE, tmp_path / "a", ["train.steps=1"])
    folder = tmp_path / "a/checkpoints/step_000001"
    this = loop.prepare(
        config.load(MOE, [*TINY_RUN[4:], f'model={{path="{folder}"}}', "tokenizer={}"])
    )
    this.close()
    assert weights_of(this) == weights_of(first)


def test_tokens_of_another_version_are_an_error(tmp_path: Path) -> None:
    this = loop.prepare(config.load(MOE, TINY_RUN))
    try:
        this.generator.sync_weights(this.trainer.state_dict(), version=5)
        with pytest.raises(
            rm.StateError, match=r"step 4: tokens of weight versions \[5\], expected version 4 only"
        ):
            loop.evaluate(this, 4)
    finally:
        this.close()


@pytest.mark.parametrize("kernels", ["torch", "rollmesh"])
def test_trainer_and_generator_must_agree_after_a_sync(kernels: str) -> None:
    """The self-test with the trainer's scorer passes at 1e-3 in float32, with rollmesh's kernels at
    0, and fails after the trainer's next step."""
    this = loop.prepare(config.load(MOE, [*TINY_RUN, f'train.kernels="{kernels}"']))
    try:
        this.generator.sync_weights(this.trainer.state_dict(), version=0)
        assert (this.generator.self_test(this.trainer.score, threshold=1e-3).max_abs_diff > 0) == (
            kernels == "torch"
        )
        with torch.no_grad():
            this.trainer.model.lm_head.weight.mul_(1.1)
        with pytest.raises(rm.NumericsError, match="self-test"):
            this.generator.self_test(this.trainer.score, threshold=1e-3)
    finally:
        this.close()
