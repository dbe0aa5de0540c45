"""Every model family under vllm.LLM is bit-identical to rm.Generator (test_vllm_engine.py), from
transformers' config.json and names."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import helpers
import pytest
import vllm_support as support
from marks import full

import rollmesh as rm
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


def test_a_hybrid_model_with_few_pages(tmp_path: Path) -> None:
    """Chunks, preemptions, prefix hits, versions without a reset of the prefix cache, and sleep."""
    setting = SimpleNamespace(model="hybrid", dtype="bfloat16")
    requests = support.mixed("hybrid", 1, 12) + [
        support.request([9] * 40, seed=seed, max_tokens=80) for seed in range(4)
    ]
    with support.engine(tmp_path, "hybrid", "bfloat16", num_gpu_blocks_override=16) as llm:
        served = support.Served(setting, llm, lambda weights, _: support.load(llm, weights))
        for _ in range(3):
            served.push()
            trace = served.traced(requests)
            assert trace.chunks > 0 < trace.preempted
            assert trace.hits > 0
        llm.sleep(1)
        llm.wake_up()
        served.hold(requests)
        llm.sleep(2)
        llm.wake_up(["weights"])
        served.push()
        llm.wake_up(["kv_cache"])
        served.hold(requests)
        metrics = support.worker_of(llm).metrics()
        assert metrics["cached_tokens"] > 0
        # The last requests still hold states: vLLM reports their end with the next step.
        assert metrics["states"] - metrics["states_free"] <= 6
        served.oracle.close()


def test_the_text_model_of_a_multimodal_config(tmp_path: Path) -> None:
    support.CASES["qwen3_5_moe"] = helpers.Case("qwen3_5_moe", {
        "model_type": "qwen3_5_moe", "text_config": support.CASES["hybrid"].config,
        "vision_config": {"depth": 1}, "tie_word_embeddings": False,
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    })  # fmt: skip
    weights, requests = support.weights_of("hybrid", "bfloat16"), support.mixed("hybrid", 2)
    oracle = support.Oracle("qwen3_5_moe", "bfloat16")
    oracle.serve(weights)
    with support.engine(tmp_path, "qwen3_5_moe", "bfloat16") as llm:
        named = {
            name.replace("model.", "model.language_model.", 1): x for name, x in weights.items()
        }
        support.load(llm, named)
        assert support.agree(support.generate(llm, requests), oracle.answers(requests)) > 100
    oracle.close()


@pytest.mark.parametrize("caching", [False, True])
def test_states_and_pages_fit_into_the_cache(caching: bool, tmp_path: Path) -> None:
    """The engine takes what vLLM was given, up to one page and one state."""
    given, page, state = 1 << 20, 6144, 36352
    sizes = {"kv_cache_memory_bytes": given, "enable_prefix_caching": caching}
    with support.engine(tmp_path, "hybrid", "bfloat16", **sizes) as llm:
        metrics = support.worker_of(llm).metrics()
        assert metrics["states"] == 7 + caching * metrics["kv_pages"] // -(-state // page)
        used = metrics["kv_pages"] * page + metrics["states"] * state
        assert metrics["kv_bytes"] == used
        assert given - page - state < used <= given
    sizes["kv_cache_memory_bytes"] = 7 * state
    with (
        pytest.raises(rm.CapacityError, match=f"max_num_seqs=6: expected more than {7 * state} "),
        support.engine(tmp_path, "hybrid", "bfloat16", **sizes),
    ):
        pass
