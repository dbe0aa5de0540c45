"""The configuration of a run: wrong keys, overrides, and rules that join several keys."""

from __future__ import annotations

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
