"""The configuration of a run: wrong keys, bounds, overrides, and rules that join several keys."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
from grpo_runs import MOE
from paths import ROOT

import rollmesh as rm

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rollmesh.model.families import FAMILIES  # noqa: E402
from rollmesh.run import (  # noqa: E402
    config,
)
from rollmesh.run.tables import read_table  # noqa: E402

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
            r'\[model\] architecture: expected one of "llama", .*"glm4_moe", .*got "gpt2"',
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


# The numbers of a run: key, default and range. inf: no upper bound.
NUMBERS = """
data.heldout_share 0.05 (0, 0.5]
rollout.prompts 32 [1, 1048576]
rollout.samples 16 [2, 1048576]
rollout.max_tokens 128 [1, inf)
rollout.temperature 1.0 (0, inf)
rollout.top_k 0 [0, inf)
rollout.top_p 1.0 (0, 1]
rollout.min_p 0.0 [0, 1]
rollout.log_completions 16 [0, inf)
rollout.num_completions_to_print 0 [0, inf)
rollout.max_assistant_turns 8 [2, inf)
rollout.max_num_gen_batches 10 [1, inf)
rollout.async_level 0 [0, 64]
generator.threads 0 [0, 256]
generator.max_model_len 4096 [2, inf)
generator.max_num_seqs 256 [1, 65536]
generator.state_interval 0 [0, 16777216]
generator.kv_cache_gib 1.0 (0, inf)
generator.tp 1 [1, inf)
generator.dp 1 [1, inf)
generator.ep 1 [1, inf)
generator.comm_timeout 1800.0 (0, inf)
sync.self_test 0.0 [0, inf)
loss.clip_low 0.2 (0, 1]
loss.clip_high 0.2 (0, 1e18]
loss.entropy 0.0 [0, inf)
loss.kl 0.0 [0, inf)
correction.cap 2.0 [1, inf)
correction.mask_low 0.5 [0, 1]
correction.mask_high 5.0 [1, inf)
train.steps 100 [1, inf)
train.updates 1 [1, 1048576]
train.micro_batch 0 [0, inf)
train.lr 1e-06 (0, 1e18]
train.warmup_steps 0 [0, inf)
train.weight_decay 0.0 [0, inf)
train.grad_clip 1.0 (0, inf)
train.threads 0 [0, 1024]
eval.every 10 [1, inf)
eval.prompts 256 [1, inf)
eval.temperature 0.0 [0, inf)
checkpoint.every 50 [0, inf)
checkpoint.keep 2 [1, inf)
"""


def test_every_number_has_its_default_and_its_range() -> None:
    """Each end of a range is accepted if it belongs to the range; the next number is refused."""
    found = re.findall(r"(\w+)\.(\w+) (\S+) ([\[(])(\S+), (\S+)[])]", NUMBERS)
    assert {(table, key) for table, key, *_ in found} == {
        (table.name, row.name)
        for table in dataclasses.fields(config.Config)
        if dataclasses.is_dataclass(table.default) and table.name != "model"
        for row in dataclasses.fields(table.default)
        if row.metadata
    }
    for table, key, default, bracket, *ends in found:
        is_real = "." in default or "e" in default
        low, high = map(float, ends)
        assert repr(getattr(getattr(config.Config(), table), key)) == default

        def after(value: float, towards: float, is_real: bool = is_real) -> float:
            return math.nextafter(value, towards) if is_real else value + math.copysign(1, towards)

        inside = [low if bracket == "[" else after(low, math.inf)]
        outside = [after(low, -math.inf) if bracket == "[" else low]
        if high < math.inf:
            inside.append(high)
            outside.append(after(high, math.inf))
        for value in inside:
            given = value if is_real else int(value)
            read = read_table(config.Config, {table: {key: given}})
            assert getattr(getattr(read, table), key) == given
        for value in outside:
            given = value if is_real else int(value)
            with pytest.raises(rm.ConfigError, match=rf"^\[{table}\] {key}: expected a"):
                read_table(config.Config, {table: {key: given}})


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
