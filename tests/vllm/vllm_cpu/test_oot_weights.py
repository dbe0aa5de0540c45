"""Weights of the out-of-tree classes: empty before the first load, strict, staged, complete or
unchanged; and on the meta device.

Oracle of the answers: rm.Generator with that version, bit for bit. Oracle of the construction: the
process's own memory, and the RoPE table of ops.rope_table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oot
import pytest
from oot import MOE, TIED
from vllm_support import ARCHITECTURES, CASES, Oracle, weights_of

import rollmesh as rm
from rollmesh import ops

LARGE = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Oracle]]:
    with oot.engine(tmp_path_factory.mktemp("weights"), MOE, "bfloat16") as llm:
        oracle = Oracle(MOE, "bfloat16")
        yield llm, oracle
        oracle.close()


def test_the_first_load_is_waited_for(served: tuple[Any, Oracle]) -> None:
    import torch

    llm, oracle = served
    model = oot.model_of(llm)
    assert model.commit_weights() is None
    with pytest.raises(rm.errors.NotSyncedError, match="load_weights"):
        model.embed_input_ids(torch.zeros(1, dtype=torch.int32))
    weights = weights_of(MOE, "bfloat16")
    oracle.serve(weights)
    for pair in oot.tensors(weights):  # as TRL does it
        assert model.load_weights([pair]) == {pair[0]}
    assert model.version is None, (
        "a set is closed by the next pass, not by its last tensor: a router bias may follow"
    )
    assert oot.agree(llm, oracle, oot.greedy(0, (1, 20, 40))) > 100
    assert model.version == 0


def test_a_later_version_and_what_is_refused(served: tuple[Any, Oracle]) -> None:
    import torch

    llm, oracle = served
    model = oot.model_of(llm)
    good = dict(oot.tensors(weights_of(MOE, "bfloat16", seed=1)))
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    bad = {
        rm.errors.ShapeError: {name: good[name].T.contiguous()},
        rm.errors.DTypeError: {name: good[name].to(torch.int8)},
        rm.errors.NonFiniteError: {name: torch.full_like(good[name], float("nan"))},
        rm.errors.UnexpectedKeyError: {name.replace("3", "99"): good[name]},
    }
    for error, change in bad.items():
        with pytest.raises(error, match=r"experts\.(3|99)\.down_proj"):
            model.load_weights(
                (change | {key: value for key, value in good.items() if key not in change}).items()
            )
    incomplete = {key: value for key, value in good.items() if key != name}
    model.load_weights(incomplete.items())
    with pytest.raises(rm.errors.IncompleteSyncError, match=r"experts\.3\.down_proj"):
        model.commit_weights()
    assert model.version == 0
    assert oot.agree(llm, oracle, oot.greedy(5, (17, 33))) > 100, "the old version serves"

    oracle.serve(weights_of(MOE, "bfloat16", seed=1))
    model.load_weights(good.items())
    assert model.commit_weights() == 1
    llm.reset_prefix_cache()
    assert oot.agree(llm, oracle, oot.greedy(5, (17, 33))) > 100


def test_packed_experts_a_bias_and_float32(served: tuple[Any, Oracle]) -> None:
    """The tensors of a transformers 5 module: one tensor for all experts, a router bias, and
    float32, which is converted as in vLLM's loaders."""
    import torch

    llm, oracle = served
    config = oot.CONFIGS[MOE]
    full = {
        name: torch.from_numpy(value) for name, value in weights_of(MOE, "float32", seed=2).items()
    }
    packed: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}.mlp"
        if f"{at}.gate.weight" not in full:
            continue
        each = [
            [full.pop(f"{at}.experts.{e}.{part}_proj.weight") for part in ("gate", "up", "down")]
            for e in range(config["num_experts"])
        ]
        packed[f"{at}.experts.gate_up_proj"] = torch.stack([torch.cat(parts[:2]) for parts in each])
        packed[f"{at}.experts.down_proj"] = torch.stack([parts[2] for parts in each])
        packed[f"{at}.gate.e_score_correction_bias"] = torch.linspace(
            -0.2, 0.2, config["num_experts"]
        )
    sent = {**full, **packed}
    oracle.generator.sync_weights(sent, cast=True)
    oot.model_of(llm).load_weights(sent.items())
    llm.reset_prefix_cache()
    assert oot.agree(llm, oracle, oot.greedy(6, (5, 40))) > 100


# ------------------------------------------------------------------------------ without an engine
def vllm_config(at: Path, config: dict[str, Any], **changes: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    at.mkdir(exist_ok=True)
    name = ARCHITECTURES[config["model_type"]]
    (at / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    options = {
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 512,
        "block_size": 16,
        "load_format": "dummy",
    }
    return EngineArgs(model=str(at), **options | changes).create_engine_config()


def resident() -> int:
    """Returns the bytes of this process in memory or promised: the heap and anonymous maps, touched
    or not."""
    words = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(words[name].split()[0]) << 10 for name in ("VmRSS", "VmSwap"))


def test_made_on_the_meta_device(tmp_path: Path) -> None:
    """Makes a model of 30 billion parameters on the meta device without allocating memory for
    weights; RoPE's table exists."""
    import torch
    from vllm.model_executor.model_loader.utils import initialize_model

    config = vllm_config(tmp_path / "large", {**oot.CONFIGS[MOE], **LARGE})
    before = resident()
    with torch.device("meta"):
        model = initialize_model(config)
    spec = model.spec
    assert spec.num_parameters > 30e9
    assert not list(model.parameters()), "weights are the store's"
    assert model.version is None
    assert resident() - before < 256 << 20, "of 61 GB that the weights have"
    inv_freq, scale = spec.rope(512)
    cos, sin = ops.rope_table(inv_freq, 512, scale=scale, dtype="bfloat16")
    buffers = dict(model.named_buffers())
    assert np.array_equal(buffers["rope_cos"].numpy(), cos)
    assert np.array_equal(buffers["rope_sin"].numpy(), sin)
    assert not {"rope_cos", "rope_sin"} & set(model.state_dict()), "a load would have to bring them"


@pytest.mark.parametrize(
    "changes, engine, match",
    [
        ({"head_dim": 24}, {}, "head_dim: expected a multiple of 32, got 24"),
        (
            {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1},
            {},
            "without sliding windows, got 32",
        ),
        (CASES["hybrid"].config, {}, "layer_types: expected attention in all layers"),
        ({}, {"dtype": "float16"}, "dtype: expected bfloat16 or float32, got 'float16'"),
        ({}, {"logprobs_mode": "raw_logits"}, "logprobs_mode"),
    ],
    ids=["head_dim", "window", "linear attention", "dtype", "logprobs_mode"],
)
def test_refused_by_name(
    changes: dict[str, Any], engine: dict[str, Any], match: str, tmp_path: Path
) -> None:
    from vllm.model_executor.model_loader.utils import initialize_model

    with pytest.raises(rm.errors.ConfigError, match=match):
        initialize_model(vllm_config(tmp_path / "m", {**oot.CONFIGS[TIED], **changes}, **engine))
