"""TRL on a patched model: the fused head of its trainers alone, and examples/trl_grpo.py, which
runs TRL's GRPOTrainer, colocated, with vLLM on rollmesh, on the CPU.

Oracles: for logprobs the record of a rollout, bit for bit; for entropy and gradients TRL's own head
on a plain model (1e-4 of their norm); in the example TRL itself, which computes the logprob of
every sampled token with the model and reports the difference to vLLM's. Bound: 0. The test of
learning takes some minutes:

    pytest -m slow tests/torch/test_trl.py
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import helpers
import numpy as np
import pytest
import torch
from marks import SUMMARY, full
from paths import ROOT
from test_torch_patch import Batch, drawn, generator_of, model_of

import rollmesh as rm

pytest.importorskip("trl", reason="needs TRL")
pytest.importorskip("vllm", reason="needs vLLM")

from trl.trainer.utils import add_fused_lm_head

EXAMPLE = ROOT / "examples/trl_grpo.py"


def train(out: Path, steps: int, seconds: float, *options: str) -> list[dict[str, Any]]:
    """Returns TRL's log, an object for each two optimizer steps, which share their completions."""
    command = [sys.executable, str(EXAMPLE), "--out", str(out), "--steps", str(steps), *options]
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("VLLM_")
    } | {"VLLM_PLUGINS": "rollmesh"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        said = process.communicate(timeout=seconds)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said[-4000:]
    return [json.loads(line) for line in (out / "trl_metrics.jsonl").read_text().splitlines()]


def apart(lines: list[dict[str, Any]]) -> float:
    """Returns the largest difference that TRL reports; asserts that its importance sampling ratio
    is 1."""
    for line in lines:
        for end in ("min", "mean", "max"):
            assert line[f"sampling/importance_sampling_ratio/{end}"] == 1.0
    return max(line["sampling/sampling_logp_difference/max"] for line in lines)


def test_every_rollout_is_of_the_weights_that_trl_pushed_last(tmp_path: Path) -> None:
    lines = train(tmp_path, 6, 400)
    assert len(lines) == 3
    assert len({line["entropy"] for line in lines}) == 3  # the weights moved
    assert apart(lines) == 0.0


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        full("qwen2_moe"),
        *(pytest.param(family, marks=pytest.mark.slow) for family in ("qwen2", "mistral")),
    ],
)
def test_other_families(family: str, tmp_path: Path) -> None:
    lines = train(tmp_path, 4, 400, "--model", family)
    assert len({line["entropy"] for line in lines}) == 2
    assert apart(lines) == 0.0


@pytest.mark.full
def test_a_reference_model(tmp_path: Path) -> None:
    """The reference is the policy's function too: before the first update TRL's KL is exactly 0."""
    lines = train(tmp_path, 4, 400, "--beta", "0.05")
    assert apart(lines) == 0.0
    assert lines[0]["kl"] == 0.0
    assert lines[1]["kl"] > 0.0


@pytest.mark.slow
def test_the_reward_rises(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The reward rises from chance, at most 0.1, to at least 0.5, which requires reading the prompt
    (test_grpo_learning.py)."""
    lines = train(tmp_path, 240, 1800)
    rewards, most = [line["reward"] for line in lines], apart(lines)
    request.config.stash[SUMMARY].append(
        f"TRL on vLLM on rollmesh: reward {rewards[0]:.3f} → {rewards[-1]:.3f} in 240 steps, "
        f"sampling_logp_difference at most {most}"
    )
    assert rewards[0] <= 0.1
    assert max(rewards[-5:]) >= 0.5
    assert most == 0.0


# --------------------------------------------------------- model(…, labels=…, fused_lm_head=True)
DENSE, MOE = helpers.CASES_BY_NAME["dense"], helpers.CASES_BY_NAME["moe"]
OUTPUTS = ("log_probs", "entropy")


def with_head(model: Any, temperature: float = 1.0, outputs: tuple[str, ...] = OUTPUTS) -> Any:
    add_fused_lm_head(model, temperature=temperature, outputs=outputs)
    return model


def scored(model: Any, batch: Batch, **options: Any) -> Any:
    labels = batch.ids.masked_fill(~batch.wanted, -100)
    return model(
        input_ids=batch.ids, attention_mask=batch.mask, labels=labels, fused_lm_head=True, **options
    )


def of(batch: Batch, output: Any) -> np.ndarray:
    """Returns the logprobs of the completions; asserts that all other positions are zero."""
    assert (output.label_mask == batch.wanted[:, 1:]).all()
    assert not output.log_probs[~output.label_mask].any()
    return output.log_probs[output.label_mask].detach().numpy()


@pytest.fixture(
    scope="module",
    params=[(DENSE, "float32"), (MOE, "float32"), (MOE, "bfloat16")],
    ids=lambda p: f"{p[0].name}-{p[1]}",
)
def drawn_of(request: pytest.FixtureRequest) -> tuple[helpers.Case, str, dict[float, Batch]]:
    """Returns (a model, its dtype, completions of it at two temperatures)."""
    case, dtype = request.param
    with generator_of(case, dtype) as generator:
        rm.torch.push(model_of(case, dtype), generator)
        return (
            case,
            dtype,
            {temperature: drawn(generator, case, temperature) for temperature in (1.0, 0.7)},
        )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_head_gives_the_logprobs_of_the_rollout(
    drawn_of: tuple[helpers.Case, str, dict[float, Batch]], temperature: float
) -> None:
    case, dtype, batches = drawn_of
    batch = batches[temperature]
    model = with_head(model_of(case, dtype), temperature)
    made = scored(model, batch)
    assert (of(batch, made) == batch.recorded).all()
    assert torch.allclose(made.loss, -made.log_probs.sum() / len(batch.recorded))
    assert torch.allclose(
        scored(model, batch, num_items_in_batch=7).loss, -made.log_probs.sum() / 7
    )
    assert model(batch.ids, attention_mask=batch.mask).logits.shape == (
        *batch.ids.shape,
        case.config["vocab_size"],
    )
    with torch.no_grad():
        assert (of(batch, scored(model, batch)) == batch.recorded).all()
    if dtype == "float32":
        plain = with_head(helpers.hf_model(case).eval().requires_grad_(), temperature)
        weights = torch.linspace(-1, 1, batch.wanted[:, 1:].numel()).view_as(batch.wanted[:, 1:])
        theirs = scored(plain, batch, position_ids=(batch.mask.cumsum(1) - 1).clamp(min=0))
        assert torch.allclose(made.entropy, theirs.entropy, rtol=1e-4, atol=1e-5)
        for output in (made, theirs):
            (output.log_probs * weights + 0.05 * output.entropy).sum().backward()
        for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (got.grad - want.grad).norm() < 1e-4 * want.grad.norm(), name


def test_around_and_under_the_head(
    drawn_of: tuple[helpers.Case, str, dict[float, Batch]], tmp_path: Path
) -> None:
    """Covers other uses of the model by a trainer, in any order."""
    case, dtype, batches = drawn_of
    batch = batches[0.7]
    model = with_head(model_of(case, dtype), 0.7)
    first = rm.torch.patch(
        with_head(helpers.hf_model(case).eval().requires_grad_(), 0.7),
        dtype=dtype,
        max_model_len=case.max_model_len,
    )
    again = with_head(with_head(model_of(case, dtype), 0.5), 0.7)  # a second trainer
    lowered = with_head(model_of(case, dtype), 0.7)
    # accelerate does the same.
    lowered.forward = MethodType(
        torch.autocast("cpu", dtype=torch.bfloat16)(lowered.forward.__func__), lowered
    )
    later = rm.torch.patch(
        rm.torch.unpatch(copy.deepcopy(lowered)), dtype=dtype, max_model_len=case.max_model_len
    )
    checkpointed = copy.deepcopy(model).train()
    checkpointed.gradient_checkpointing_enable()
    for each in (model, first, again, lowered, later, checkpointed, copy.deepcopy(model)):
        assert (of(batch, scored(each, batch)) == batch.recorded).all()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    # A copy has separate weights.
    assert (of(batch, scored(checkpointed, batch)) == batch.recorded).all()
    assert (of(batch, scored(model, batch)) != batch.recorded).any()
    # Trainer reads this parameter.
    assert "output_router_logits" in inspect.signature(model.forward).parameters or case is DENSE
    if dtype == "float32":
        theirs = scored(with_head(helpers.hf_model(case).eval(), 0.7), batch).log_probs
        # TRL's own numbers.
        assert (scored(rm.torch.unpatch(first), batch).log_probs == theirs).all()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    parallel = torch.nn.parallel.DistributedDataParallel(again)
    made = scored(parallel, batch)
    assert (of(batch, made) == batch.recorded).all()
    made.loss.backward()
    del (
        parallel,
        made,
        # DDP, as the group's last owner, would join gloo's threads while it holds the GIL, which
        # these threads may need: one run in 400 hung.
    )
    torch.distributed.destroy_process_group()


def test_lora(drawn_of: tuple[helpers.Case, str, dict[float, Batch]]) -> None:
    peft = pytest.importorskip("peft")
    case, dtype, batches = drawn_of
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"])  # whose B is 0
    model = rm.torch.patch(
        peft.get_peft_model(helpers.hf_model(case).requires_grad_(), config), dtype=dtype
    )
    with_head(model.get_base_model())
    made = scored(model, batches[1.0])
    assert (of(batches[1.0], made) == batches[1.0].recorded).all()
    made.loss.backward()


def without_temperature(model: Any) -> None:
    def forward(self: Any, fused_lm_head: bool = False) -> None:
        raise AssertionError

    model.forward = MethodType(forward, model)


ONE = torch.tensor([[1, 2, 3]])
REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "outputs": (
        lambda m: with_head(m, outputs=("is_top1",)),
        rm.ConfigError,
        "outputs: expected log_probs and entropy, got 'is_top1'",
    ),
    "another TRL": (
        without_temperature,
        rm.ConfigError,
        "expected TRL 1.16's forward pass, got one without outputs",
    ),
    "temperature": (
        lambda m: with_head(m, 0.0)(input_ids=ONE, labels=ONE, fused_lm_head=True),
        rm.RequestError,
        r"temperature: expected .* 0\.0",
    ),
    "shifted labels": (
        lambda m: with_head(m)(input_ids=ONE, shift_labels=ONE, fused_lm_head=True),
        rm.ConfigError,
        "labels: expected those of the whole sequence, got shift_labels",
    ),
    "no labels": (
        lambda m: with_head(m)(input_ids=ONE, fused_lm_head=True),
        rm.ConfigError,
        "labels: expected .*got None",
    ),
    "shape": (
        lambda m: with_head(m)(input_ids=ONE, labels=ONE[:, 1:], fused_lm_head=True),
        rm.ShapeError,
        r"labels: expected a tensor of shape \(1, 3\)",
    ),
    "a router loss": (
        lambda m: with_head(m)(
            input_ids=ONE, labels=ONE, fused_lm_head=True, output_router_logits=True
        ),
        rm.ConfigError,
        "output_router_logits: expected none .*router_aux_loss_coef=0.0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        call(model_of(MOE))
