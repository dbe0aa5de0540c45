"""RollmeshTrainer's forward pass in torchtitan's own modules.

Oracle: the generator's score, bit for bit; for gradients torchtitan's forward pass in float32 and
torch's autograd, to 1e-4 of the largest of a parameter; for its expert counts torchtitan's."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchtitan")
pytest.importorskip("monarch")

import titan_cpu  # noqa: F401 (before rollmesh.titan)
import torch
from test_titan_spec import built, config, config35, deepseeks, in_float32, yarn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchtitan's, that torch was imported before
    from rollmesh.titan.generator import read_spec
    from rollmesh.titan.trainer import Forward
from torchtitan.components import loss
from torchtitan.experiments.rl.losses import dapo
from torchtitan.models.common import moe

import rollmesh as rm

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")
LENGTHS = (40, 23)  # of two sequences that fill one row of a batch; a second row has one of 63


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe.GroupedExperts, "forward", in_float32)
    for module in (loss, dapo):
        monkeypatch.setattr(module, "compute_logprobs", module.compute_logprobs)


def gated_expert(model: Any) -> None:
    for layer in model.layers:
        layer.moe.shared_experts = config35("debugmodel_moe").layers[0].moe.shared_experts


def test_qwen3_5_is_refused() -> None:
    """TitanRL's PolicyTrainer does not compute it either."""
    with pytest.raises(
        rm.ConfigError, match=r"model_spec: expected Qwen3 or Llama 3 with TitanRL, got Qwen3.5"
    ):
        read_spec(config35())
    model = built(config35())
    with pytest.raises(TypeError, match="'NoneType' object is not subscriptable"):
        model(torch.zeros(1, 5, dtype=torch.int64), positions=torch.arange(5)[None])


def sequences(vocab_size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, vocab_size, (length,), generator=generator)
        for length in (*LENGTHS, sum(LENGTHS))
    ]


def packed(parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, positions), both [2, 63]: two sequences in the first row."""
    positions = torch.cat([torch.arange(length) for length in (*LENGTHS, sum(LENGTHS))])
    return torch.cat(parts).view(2, -1), positions.view(2, -1)


def logprobs_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]


@pytest.mark.parametrize(
    "flavor",
    [
        *("debugmodel", "debugmodel_non_fused_qkv", "debugmodel_moe", "llama3"),
        *("yarn", "deepseeks", "gated_expert"),
    ],
)
def test_forward_of_the_generator_backward_of_torch(flavor: str) -> None:
    # Sigmoid scores, groups, scaled gates, shared experts.
    changes = {"yarn": yarn, "deepseeks": deepseeks, "gated_expert": gated_expert}
    model = config("debugmodel_moe" if flavor in changes else flavor)
    if flavor in changes:
        changes[flavor](model)
    own = built(model).train()
    ours = copy.deepcopy(own)
    spec = rm.ModelSpec.from_torchtitan(model)
    Forward(spec, 128).take_over(ours)
    parts = sequences(model.vocab_size)
    tokens, positions = packed(parts)
    weights = torch.linspace(-1, 1, tokens.numel()).view(2, -1)
    labels = tokens.roll(-1, 1)
    inside = positions.roll(-1, 1) != 0  # the next token is of the same sequence

    hidden = ours(tokens, positions=positions)
    found, entropy = dapo.compute_logprobs(hidden, labels, return_entropy=True)
    (found * weights * inside).sum().backward()

    with rm.Generator(
        spec, dtype="float32", max_model_len=128, kv_cache_gib=0.05, threads=1
    ) as generator:
        generator.sync_weights(own.state_dict())
        scores = np.concatenate(generator.score([part.tolist() for part in parts]))
    assert found[inside].detach().numpy().tobytes() == scores.tobytes()

    expected = torch.cat(
        [logprobs_of(own(part[None]), part.roll(-1)[None])[0] for part in parts]
    ).view(2, -1)
    (expected * weights * inside).sum().backward()
    assert torch.allclose(found[inside], expected[inside], rtol=0, atol=1e-4)
    assert (entropy > 0).all()
    assert not entropy.requires_grad
    for (name, mine), (_, its) in zip(ours.named_parameters(), own.named_parameters(), strict=True):
        assert mine.grad is not None, name
        assert (mine.grad - its.grad).abs().max() <= 1e-4 * its.grad.abs().max(), name
    counts = [(name, buffer) for name, buffer in own.named_buffers() if "tokens_per_expert" in name]
    assert len(counts) == sum(spec.is_moe_layer)
    for name, buffer in counts:
        assert torch.equal(buffer, ours.get_buffer(name)), name
        assert buffer.sum() == tokens.numel() * spec.num_experts_per_tok


def test_labels_that_the_loss_masks() -> None:
    model = config("debugmodel", 1)
    ours = built(model)
    Forward(rm.ModelSpec.from_torchtitan(model), 128).take_over(ours)
    tokens, positions = packed(sequences(model.vocab_size))
    with torch.no_grad():
        masked: Any = dapo.compute_logprobs(
            ours(tokens, positions=positions), torch.full_like(tokens, -100)
        )
    assert torch.isfinite(masked).all()
