"""[train] kernels and mismatch of rollmesh grpo: with rollmesh's kernels trainer and generator are
one function.

Input: a few steps of smaller debug configs. Oracle: the generator's record. Bound: 0 differing
logprobs and routed experts; with the generator on a mesh or another instruction set, bit-identical
metrics."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import TIMES
from marks import full, some
from paths import ROOT
from rollouts import rollout_of

import rollmesh as rm

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402

from rollmesh.grpo import loop  # noqa: E402
from rollmesh.grpo.trainer import Trainer  # noqa: E402
from rollmesh.model.families import FAMILIES  # noqa: E402
from rollmesh.run import config  # noqa: E402
from rollmesh.run.data import Prompt, load_tokenizer  # noqa: E402
from rollmesh.run.samples import Rollout, make_batch  # noqa: E402

CONFIGS = {"moe": ROOT / "configs/qwen3_moe_debug.toml", "dense": ROOT / "configs/qwen3_debug.toml"}
TINY = [
    "model.hidden_size=32", "model.intermediate_size=32", "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "rollout.prompts=4", "rollout.samples=4", "eval.prompts=8", "generator.kv_cache_gib=0.01",
    "eval.every=2", "train.steps=4",
    "train.threads=1", "generator.threads=1",
]  # fmt: skip
BFLOAT16 = ['generator.dtype="bfloat16"', "sync.cast=true"]
FILTERS = ["rollout.top_k=20", "rollout.top_p=0.9", "rollout.min_p=0.01"]
ZERO = ("logprob_diff_max", "logprob_diff_mean", "kl_k1", "kl_k3", "tokens_differ")
pytestmark = pytest.mark.usefixtures("torch_as_it_was", "no_pictures")


SIZES = (
    "hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, "
    "num_key_value_heads=2"
)
EXPERTS = "num_experts_per_tok=2, num_experts=8"
DEEPSEEK = (
    "num_experts_per_tok=2, n_routed_experts=8, n_group=2, topk_group=1, moe_intermediate_size=16"
)
LATENT = "kv_lora_rank=16, qk_nope_head_dim=6, qk_rope_head_dim=8, v_head_dim=16"
KEYS = {  # of [model], besides SIZES
    "mistral": "sliding_window=8",
    "qwen2": 'use_sliding_window=true, sliding_window=8, layer_types=["full_attention", '
    '"sliding_attention"]',
    "qwen3_moe": f"{EXPERTS}, moe_intermediate_size=16",
    "smollm3": "no_rope_layer_interval=2",
    "mixtral": "num_local_experts=8",
    "qwen2_moe": f"{EXPERTS}, moe_intermediate_size=16, shared_expert_intermediate_size=24, "
    "qkv_bias=true",
    "olmoe": EXPERTS,
    "glm4_moe": f"{DEEPSEEK}, routed_scaling_factor=1.5, "
    "head_dim=16, use_qk_norm=true, n_shared_experts=2, rope_parameters={rope_type='default', "
    "rope_theta=100.0, partial_rotary_factor=0.5}",
    "gpt_oss": "num_experts_per_tok=2, num_local_experts=8, head_dim=16, sliding_window=8, "
    "swiglu_limit=0.5",
    "afmoe": f"{EXPERTS}, moe_intermediate_size=16, head_dim=16, num_shared_experts=1, "
    "num_dense_layers=1",
    "hunyuan_v1_dense": "head_dim=16",
    "hunyuan_v1_moe": "head_dim=16, num_experts=8, moe_topk=2",
    "seed_oss": "attention_out_bias=true",
    "minimax_m2": "head_dim=16, rotary_dim=8, num_local_experts=8, num_experts_per_tok=2",
    "dots1": f"{DEEPSEEK}, n_shared_experts=1, first_k_dense_replace=1",
    "solar_open": f"{DEEPSEEK}, head_dim=16",
    "hy_v3": f"{EXPERTS}, moe_intermediate_size=16, head_dim=16, router_scaling_factor=2.0, "
    "mlp_layer_types=['dense', 'sparse'], num_shared_experts=2",
    "exaone4": "sliding_window=8, sliding_window_pattern=2",
    "exaone_moe": f"{EXPERTS}, moe_intermediate_size=16, sliding_window=8, "
    "sliding_window_pattern=2, num_shared_experts=1",
    "flex_olmo": EXPERTS,
    "cwm": "sliding_window=8, rope_parameters={rope_type='default', rope_theta=100.0}",
    "phi3": "sliding_window=8, rope_parameters={rope_type='default', rope_theta=100.0, "
    "partial_rotary_factor=0.5}",
    "ernie4_5_moe": "moe_num_experts=8, moe_k=2, moe_intermediate_size=16, "
    "moe_num_shared_experts=1, moe_norm_min=0.3, moe_layer_start_index=0, moe_layer_end_index=1, "
    "moe_layer_interval=1",
    "ministral": "sliding_window=8, head_dim=8",
    "deepseek_v3": f"{DEEPSEEK}, {LATENT}, q_lora_rank=12, first_k_dense_replace=1",
    "glm4_moe_lite": f"{DEEPSEEK}, {LATENT}, q_lora_rank=12, rope_interleave=false",
}
DELTA = (
    "full_attention_interval=2, linear_num_key_heads=2, linear_num_value_heads=4, head_dim=16, "
    "linear_key_head_dim=16, linear_value_head_dim=8, linear_conv_kernel_dim=4"
)
KEYS |= {
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": f"{DELTA}, {EXPERTS}, moe_intermediate_size=16, "
    "shared_expert_intermediate_size=24",
    "qwen3_next": f"{DELTA}, {EXPERTS}, moe_intermediate_size=16, "
    "shared_expert_intermediate_size=24",
}
QUICK = ("llama", "qwen2", "glm4_moe")


def model_of(family: str) -> str:
    keys = f", {KEYS[family]}" if family in KEYS else ""
    sizes = SIZES
    if FAMILIES[family].latent:  # each head has its own keys
        sizes = sizes.replace("num_key_value_heads=2", "num_key_value_heads=4")
    return (
        f"model={{architecture='{family}', max_position_embeddings=64, initializer_range=0.1, "
        f"{sizes}{keys}}}"
    )


def ran(name: str, out: Path, *changes: str, resume: bool = False) -> list[dict[str, Any]]:
    """Returns the metrics of a run, without its times. resume: continues the run in `out`."""
    run = loop.prepare(
        config.load(CONFIGS[name], [*TINY, *changes]), *([out, ["train.steps"]] if resume else [])
    )
    try:
        lines = loop.train(run, out)
    finally:
        run.close()
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([], id="float32"),
        full(BFLOAT16),
        pytest.param(
            [*BFLOAT16, "rollout.temperature=0.7", "train.minibatches=true", "train.micro_batch=3"],
            id="all",
        ),
        pytest.param([*BFLOAT16, *FILTERS, "train.minibatches=true", "loss.kl=0.1"], id="filters"),
        full([*BFLOAT16, 'train.dtype="bfloat16"']),
        full([*FILTERS, "rollout.temperature=0.7"]),
        full(["loss.kl=0.1", "rollout.temperature=1.3"]),
        full(["loss.kl=0.1", "rollout.temperature=0.1", "train.lr=0.03"]),
    ],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_trainer_and_generator_are_one_function(
    name: str, changes: list[str], tmp_path: Path
) -> None:
    lines = ran(name, tmp_path, *changes)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert {line[key] for line in lines for key in ZERO} == {0.0}


def test_a_reference_model_is_the_same_function(tmp_path: Path) -> None:
    """The reference is the initial model, so before the first update the penalty is exactly 0."""
    lines = ran("dense", tmp_path, "loss.kl=0.1", "train.updates=1", *BFLOAT16)
    assert lines[0]["kl_ref"] == 0.0
    assert lines[1]["kl_ref"] > 0.0


def test_a_kl_that_no_float_holds_is_named(tmp_path: Path) -> None:
    words = (
        r"gradient norm is nan.*weights were not updated; \[loss\] kl is exp\(-.* − -.*\), "
        r"reference − trainer, at sequence .* token \d"
    )
    with pytest.raises(rm.NumericsError, match=words):
        ran("dense", tmp_path, "loss.kl=0.1", "rollout.temperature=0.1", "train.lr=1")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(["generator.tp=2", "generator.dp=2", "generator.ep=4"], id="mesh"),
        pytest.param(['generator.isa="ref"', "generator.max_num_seqs=3"], id="ref"),
        full(["train.micro_batch=16"]),
    ],
)
def test_the_run_is_that_of_one_rank(changes: list[str], tmp_path: Path) -> None:
    """Rewards, losses and gradients are bit-identical, so the trainers did the same on the same
    tokens."""
    assert ran("moe", tmp_path / "mesh", *BFLOAT16, *changes) == ran(
        "moe", tmp_path / "one", *BFLOAT16
    )


def test_filters_that_a_vocabulary_is_too_small_for(tmp_path: Path) -> None:
    """The run is refused before it generates."""
    with pytest.raises(
        rm.ConfigError,
        match=r"^\[rollout\] top_k: expected below the 101 tokens of the model's vocabulary, got "
        r"101$",
    ):
        ran("dense", tmp_path, "rollout.top_k=101")


def test_torchs_kernels_are_apart_and_say_so(tmp_path: Path) -> None:
    lines = ran("moe", tmp_path, 'train.kernels="torch"', "sync.self_test=0.0", *BFLOAT16)
    assert min(line["logprob_diff_max"] for line in lines) > 1e-4


def test_torchs_kernels_take_the_logprobs_of_kept_tokens(tmp_path: Path) -> None:
    """In float32 they equal the recorded logprobs up to rounding; without the record they would
    differ by about -log(0.9)."""
    lines = ran("moe", tmp_path, 'train.kernels="torch"', *FILTERS)
    assert 0 < max(line["logprob_diff_max"] for line in lines) < 1e-4


@pytest.mark.full
def test_a_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    whole = ran("moe", tmp_path / "whole", *BFLOAT16)
    ran("moe", tmp_path / "half", "train.steps=2", *BFLOAT16)
    assert ran("moe", tmp_path / "half", *BFLOAT16, resume=True)[2:] == whole[2:]


# --------------------------------------------------------------------------------------- families
@pytest.mark.quick(1)
@pytest.mark.parametrize("family", some(FAMILIES, lambda family: family in QUICK))
def test_every_family_is_one_function(family: str, tmp_path: Path) -> None:
    lines = ran("dense", tmp_path, model_of(family))
    assert len(lines) == 5
    assert {line[key] for line in lines for key in ZERO} == {0.0}


@pytest.mark.parametrize(
    "family",
    some(
        [n for n, f in FAMILIES.items() if f.has_experts and n not in ("afmoe", "hunyuan_v1_moe")],
        lambda family: family in QUICK,
    ),
)
def test_every_familys_routing_is_replayed(family: str, tmp_path: Path) -> None:
    """In float32, so that the gates equal the generator's up to rounding."""
    lines = ran("moe", tmp_path, model_of(family), "correction.routing_replay=true")
    assert max(line["logprob_diff_max"] for line in lines) < 1e-4


@pytest.mark.full
def test_a_routers_bias_is_synced_saved_and_resumed(tmp_path: Path) -> None:
    """GLM-4-MoE's bias is a buffer, which the optimizer does not see. It changes choices, so the
    run without it differs."""
    run = loop.prepare(config.load(CONFIGS["dense"], [*TINY, model_of("glm4_moe")]))
    run.close()
    assert run.trainer is not None
    model = run.trainer.model
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    model.save_pretrained(str(tmp_path / "without"))
    with torch.no_grad():
        bias.copy_(torch.linspace(-0.2, 0.2, 8))
    model.save_pretrained(str(tmp_path / "with"))
    start = f'model={{path="{tmp_path / "with"}"}}'

    whole = ran("dense", tmp_path / "whole", start)
    assert {line[key] for line in whole for key in ZERO} == {0.0}
    assert whole != ran("dense", tmp_path / "other", f'model={{path="{tmp_path / "without"}"}}')
    ran("dense", tmp_path / "half", start, "train.steps=2")
    assert ran("dense", tmp_path / "half", start, resume=True)[2:] == whole[2:]
    for folder in (tmp_path / "whole", tmp_path / "half"):
        state = load_file(folder / "checkpoints/step_000004/model.safetensors")
        assert torch.equal(state["model.layers.1.mlp.gate.e_score_correction_bias"], bias)


# ------------------------------------------------------------------------- gradient checkpointing
def trained(name: str, out: Path, *changes: str) -> tuple[list[dict[str, Any]], bytes]:
    """Returns the metrics of a run, and its last weights."""
    return ran(name, out, *changes, "train.steps=2"), (
        out / "checkpoints/step_000002/model.safetensors"
    ).read_bytes()


OTHER = [*BFLOAT16, "sync.self_test=0.0", 'train.kernels="torch"']
ALL = [*BFLOAT16, "train.micro_batch=3", "train.minibatches=true", "train.updates=2", "loss.kl=0.1"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "name, changes",
    [
        full("dense", []),
        full("moe", []),
        full("dense", OTHER),
        full("moe", [*OTHER, *FILTERS, 'train.dtype="bfloat16"']),
        # The layer that the backward pass computes again uses the recorded experts too, some of
        # which differ from its own.
        pytest.param(
            "moe",
            [*OTHER, "correction.routing_replay=true", "train.micro_batch=5"],
            id="routing replay",
        ),
        full("dense", ALL),
        pytest.param("moe", ALL, id="all"),
    ],
)
def test_gradient_checkpointing_has_the_same_bits(
    name: str, changes: list[str], tmp_path: Path
) -> None:
    plain = trained(name, tmp_path / "plain", *changes)
    assert plain == trained(name, tmp_path / "again", *changes, "train.gradient_checkpointing=true")
    assert plain[0][0]["grad_norm"] > 0.0


@pytest.mark.parametrize("kernels", ["rollmesh", "torch"])
@pytest.mark.parametrize(
    "family", [family if family in QUICK else full(family) for family in FAMILIES]
)
def test_gradient_checkpointing_keeps_the_input_of_each_layer(family: str, kernels: str) -> None:
    """It saves nothing else of the layer for the backward pass. Only the layers themselves are in
    training mode."""
    saved: dict[bool, list[int]] = {}
    prompts, tokens = [Prompt("", (5, 6, 7), {})] * 4, [[8, 9], [8], [3, 4, 5], [9, 9]]
    this = rollout_of(
        prompts, tokens, [np.zeros(len(ids), np.float32) for ids in tokens], [""] * 4, [True] * 4
    )
    for checkpoints in (False, True):
        sets = [
            *TINY,
            model_of(family),
            f'train.kernels="{kernels}"',
            f"train.gradient_checkpointing={str(checkpoints).lower()}",
        ]
        made = Trainer(config.load(CONFIGS["moe"], sets), load_tokenizer(ROOT / "data/chars"))
        assert {m for m in made.model.modules() if m.training} == set(
            made.model.model.layers if checkpoints else []
        )
        sizes: list[int] = []
        saved[checkpoints] = kept = []
        layer = made.model.model.layers[1]
        layer.register_forward_pre_hook(lambda *_, sizes=sizes: sizes.clear())
        layer.register_forward_hook(lambda *_, sizes=sizes, kept=kept: kept.extend(sizes))

        def seen(x: Any, sizes: list[int] = sizes) -> Any:
            sizes.append(x.nbytes)
            return x

        with torch.autograd.graph.saved_tensors_hooks(seen, lambda x: x):
            made.logprobs(make_batch(this.completions))
    rows = (
        4 * 5 if kernels == "torch" else sum(len(prompts[0].ids) + len(ids) - 1 for ids in tokens)
    )
    assert sum(saved[False]) > 5 * rows * 32 * 4
    assert sum(saved[True]) == rows * 32 * 4


# ------------------------------------------------------------------------------ where they differ
def spoilt(change: str, rollout: Rollout) -> Rollout:
    """A record with one wrong number."""
    place, name = (3, "logprobs") if change == "logprobs" else (1, "routed_experts")
    c = rollout.completions[place]
    record = getattr(c, name).copy()
    if change == "logprobs":
        record[2] = np.nextafter(record[2], np.float32(0))
    else:
        record[4, 1, 0] = (record[4, 1, 0] + 1) % 8
    completions = list(rollout.completions)
    completions[place] = dataclasses.replace(c, **{name: record})
    return dataclasses.replace(rollout, completions=completions)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "change, words",
    [
        (
            "logprobs",
            r"logprobs: expected -\S+ for sequence 3 of the batch, position \d+, token \d+, .*got "
            r"-\S+ from the trainer; 1 of \d+ differ",
        ),
        (
            "routing",
            r"routed experts: expected expert \d as choice 0 of MoE layer 1 for sequence 1 of the "
            r"batch, position 4, .*; 1 of \d+ differ",
        ),
    ],
)
def test_the_first_difference_is_named(
    change: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes before the optimizer's step, so the weights are those that drew the tokens;
    with "record" the run continues."""
    learn, seen = Trainer.learn, []

    def wrong(self: Trainer, rollout: Rollout, advantages: Any, step: int) -> Any:
        seen.append([p.detach().clone() for p in self.model.parameters()])
        try:
            return learn(self, spoilt(change, rollout), advantages, step)
        except rm.NumericsError:
            assert all(
                (p == q).all() for p, q in zip(self.model.parameters(), seen[-1], strict=True)
            )
            raise

    monkeypatch.setattr(Trainer, "learn", wrong)
    with pytest.raises(rm.NumericsError, match=words):
        ran("moe", tmp_path / "raise")
    lines = ran("moe", tmp_path / "record", 'train.mismatch="record"')
    assert len(lines) == 5


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            ['train.kernels="triton"'],
            r'\[train\] kernels: expected one of "rollmesh", "torch", got "triton"',
        ),
        (
            ['train.mismatch="ignore"'],
            r'\[train\] mismatch: expected one of "raise", "record", got "ignore"',
        ),
        (
            ['train.kernels="rollmesh"', "correction.routing_replay=true"],
            r"\[correction\] routing_replay: expected false where \[train\] kernels",
        ),
        (
            [
                'train.kernels="rollmesh"',
                'generator.device="cuda"',
                'generator.isa="cuda_mma"',
                *BFLOAT16,
            ],
            r'\[train\] kernels: expected "torch" where \[generator\] isa is "cuda_mma"',
        ),
    ],
)
def test_settings_that_are_refused(changes: list[str], words: str) -> None:
    with pytest.raises(rm.ConfigError, match=words):
        config.load(CONFIGS["moe"], changes)


@pytest.mark.parametrize(
    "changes, kernels",
    [
        ([], "rollmesh"),
        (["correction.routing_replay=true"], "torch"),
        (['generator.device="cuda"'], "rollmesh"),
        (['generator.device="cuda"', 'generator.isa="cuda_mma"', *BFLOAT16], "torch"),
        (['generator.device="cuda"', 'train.device="cuda"'], "torch"),
        (
            ['generator.device="cuda"', 'train.device="cuda"', 'train.kernels="rollmesh"'],
            "rollmesh",
        ),
        (['train.kernels="torch"'], "torch"),
    ],
)
def test_what_none_stands_for(changes: list[str], kernels: str) -> None:
    assert config.kernels_of(config.load(CONFIGS["moe"], changes)) == kernels


def test_the_optimizer_has_the_configs_numbers() -> None:
    sets = ["train.betas=[0.7, 0.8]", "train.lr=0.01", "train.weight_decay=0.25"]
    made = Trainer(config.load(CONFIGS["moe"], sets), load_tokenizer(ROOT / "data/chars"))
    wanted = {"betas": (0.7, 0.8), "lr": 0.01, "weight_decay": 0.25}
    assert {name: made.optimizer.defaults[name] for name in wanted} == wanted
