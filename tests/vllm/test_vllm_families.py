"""Every model family under vllm.LLM is bit-identical to rm.Generator (test_vllm_engine.py), from
transformers' config.json and names."""

from __future__ import annotations

import importlib
from pathlib import Path

import helpers
import pytest
import vllm_support as support
from marks import full

from rollmesh.model.families import FAMILIES

pytest.importorskip("vllm", reason="needs vLLM")
family_models = importlib.import_module("family_models")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

SIZES = {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_size": 96,
    "intermediate_size": 80,
    "vocab_size": 300,
}
QUICK = ("llama", "qwen2", "qwen3_5_text")
LENGTHS = (1, 2, 15, 33, 64, 97)


@pytest.mark.parametrize(
    "family", [family if family in QUICK else full(family) for family in family_models.FAMILIES]
)
def test_requests_of_every_kind(family: str, tmp_path: Path) -> None:
    sizes = SIZES | ({"num_key_value_heads": 6} if FAMILIES[family].latent else {})
    model = family_models.draw(family, 600, **sizes, tie_word_embeddings=False)
    weights = {name: x.numpy() for name, x in model.state.items()}
    support.CASES[family] = helpers.Case(family, model.config.to_dict())
    oracle = support.Oracle(family, "float32")
    oracle.serve(weights)
    with support.engine(tmp_path, family, "float32") as llm:
        assert llm.llm_engine.vllm_config.model_config.architectures == [
            FAMILIES[family].architecture
        ]
        support.load(llm, weights)
        requests = support.mixed(family, 1, 12)
        with support.Trace(llm) as trace:
            assert support.agree(support.generate(llm, requests), oracle.answers(requests)) > 100
        assert trace.chunks > 0
    oracle.close()
