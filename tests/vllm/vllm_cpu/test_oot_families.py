"""Every model family as rollmesh's class under vLLM's own model runner: bit-identical to
rm.Generator (test_oot_bits.py)."""

from __future__ import annotations

import importlib
from pathlib import Path

import helpers
import oot
import pytest
import vllm_support
from marks import full

from rollmesh.model.families import FAMILIES
from rollmesh.model.family_rules import attention_layers

family_models = importlib.import_module("family_models")
SIZES = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
OFF = {"use_sliding_window": False, "layer_types": None}
NO_WINDOWS = {
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "smollm3": {"use_sliding_window": False, "no_rope_layers": [1, 0]},
    "gpt_oss": {"layer_types": ["full_attention"] * 2},
    **dict.fromkeys(("qwen2", "qwen3", "qwen2_moe"), OFF),
    # Layers without a window, and so without rope in EXAONE-4.
    **{
        family: {"layer_types": ["full_attention"] * 2}
        for family in (
            "dots1",
            "exaone4",
            "exaone_moe",
            "cwm",
            "ministral",
            "gemma2",
            "gemma3_text",
            "olmo3",
            "afmoe",
        )
    },
    "phi3": {
        "sliding_window": None,
        "hidden_size": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}
QUICK = ("smollm3", "olmoe", "glm4_moe")


@pytest.mark.parametrize(
    "family",
    [
        family if family in QUICK else full(family)
        for family in family_models.FAMILIES
        if FAMILIES[family].layer_kinds is attention_layers
    ],
)
def test_bits_are_the_generators(family: str, tmp_path: Path) -> None:
    head_dim = {} if family in family_models.NO_HEAD_DIM else {"head_dim": 32}
    changes = family_models.cuttable(family) | SIZES | NO_WINDOWS.get(family, {}) | head_dim
    model = family_models.draw(family, 700, **changes)
    weights = {name: x.numpy() for name, x in model.state.items()}
    vllm_support.CASES[family] = helpers.Case(family, model.config.to_dict())
    oracle = vllm_support.Oracle(family, "float32")
    oracle.serve(weights)
    with oot.engine(tmp_path, family, "float32", num_gpu_blocks_override=24) as llm:
        oot.model_of(llm).load_weights(oot.tensors(weights))
        assert oot.agree(llm, oracle, oot.greedy(0, (1, 2, 15, 33, 64))) > 300
    oracle.close()
