"""gpt-oss's MXFP4 tensors as SafetensorsFolder reads them.

Oracle: transformers' own function, for every byte with every scale whose numbers are finite in
bfloat16. Bound: equality of bits."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest

import rollmesh as rm
from rollmesh.model.families import FAMILIES
from rollmesh.weights import mxfp4

torch = pytest.importorskip("torch", reason="the oracle is transformers")
family_models = importlib.import_module("family_models")
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def theirs(blocks: Any, scales: Any) -> Any:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)


def test_every_byte_with_every_scale() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 252, 16, 16)
    scales = torch.arange(252, dtype=torch.uint8).view(1, 252, 1).expand(1, 252, 16)
    ours = mxfp4.dequantized("x", blocks, scales)
    assert ours.shape == (1, 512, 252)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(
        ours.contiguous().view(torch.int16), theirs(blocks, scales).view(torch.int16)
    )
    assert mxfp4.dequantized("x", blocks[:, :1], scales[:, :1] + 255).isnan().all()


def folder(path: Path, seed: int) -> tuple[Any, dict[str, Any]]:
    """Writes a checkpoint of 4-bit experts; returns its model and the state dict in bfloat16."""
    from safetensors.torch import save_file

    sizes = {"hidden_size": 96, "intermediate_size": 64, "num_local_experts": 3}
    sizes |= {"num_experts_per_tok": 2, "layer_types": None}
    model, rng = family_models.draw("gpt_oss", 0, seed, **sizes), np.random.default_rng(seed)
    stored, state = {}, {name: x.bfloat16() for name, x in model.state.items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name, x in list(state.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = x
            continue
        experts, cols, rows = x.shape
        shape = experts, rows, cols // 32
        blocks = torch.from_numpy(rng.integers(0, 256, (*shape, 16)).astype(np.uint8))
        scales = torch.from_numpy(rng.integers(118, 126, shape).astype(np.uint8))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        state[name] = theirs(blocks, scales)
    save_file(stored, path / "model.safetensors")
    config = model.config.to_dict() | {"quantization_config": MXFP4}
    (path / "config.json").write_text(json.dumps(config))
    return model, state


def test_a_quantized_folder_is_the_model_in_bfloat16(tmp_path: Path, seed: int) -> None:
    _, state = folder(tmp_path, seed)
    source = rm.sources.SafetensorsFolder(tmp_path)
    assert sorted(source) == sorted(state)
    assert len(source) == len(state)
    for name, x in state.items():
        assert torch.equal(source[name], x), name
        assert source.header(name) == ("BF16", tuple(x.shape))
    limits = {**helpers.SMALL, "max_model_len": 256, "tokenizer": None}
    with rm.Generator.from_hf(tmp_path, dtype="bfloat16", **limits) as gen:
        assert gen.sync_weights(source).digest == gen.sync_weights(state).digest


@pytest.mark.parametrize("method", ["mxfp4", "fp8"])
def test_other_quantized_weights_are_refused(method: str, tmp_path: Path, seed: int) -> None:
    model, _ = folder(tmp_path, seed)
    family = "gpt_oss" if method == "fp8" else "llama"
    fields = (
        model.config.to_dict()
        if method == "fp8"
        else family_models.draw(family, 0, seed).config.to_dict()
    )
    assert FAMILIES[family].mxfp4 == (method == "fp8")
    with pytest.raises(rm.ConfigError, match="quantized weights are not supported"):
        rm.ModelSpec.from_hf(fields | {"quantization_config": {"quant_method": method}})


@pytest.mark.parametrize(
    "changes, got",
    [
        ({"blocks": torch.ones(2, 3, 4, 15, dtype=torch.uint8)}, r"uint8 \(2, 3, 4, 15\)"),
        ({"blocks": torch.ones(2, 3, 4, 16, dtype=torch.bfloat16)}, "bfloat16"),
        ({"scales": torch.ones(2, 3, 4).to(torch.float8_e4m3fn)}, "float8_e4m3fn"),
        ({"scales": torch.ones(4, dtype=torch.uint8)}, r"uint8 \(4,\)"),
        ({"x": torch.ones(2, 128, 3)}, "x_blocks too"),
    ],
    ids=["groups of 15", "bfloat16", "float8", "1 dim", "both forms"],
)
def test_blocks_that_do_not_fit_their_scales(
    changes: dict[str, Any], got: str, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    parts = {
        "x_blocks": torch.ones(2, 3, 4, 16, dtype=torch.uint8),
        "x_scales": torch.ones(2, 3, 4, dtype=torch.uint8),
        **{name if name == "x" else f"x_{name}": x for name, x in changes.items()},
    }
    save_file(parts, tmp_path / "model.safetensors")
    with pytest.raises(rm.FormatError, match=rf"x: expected .*{got}"):
        rm.sources.SafetensorsFolder(tmp_path)["x"]


def test_a_header_of_scales_without_groups(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    ones = torch.ones(4, dtype=torch.uint8)
    save_file({"x_blocks": ones, "x_scales": ones.clone()}, tmp_path / "model.safetensors")
    with pytest.raises(rm.FormatError, match=r"x_scales: expected scales .* got shape \(4,\)"):
        rm.sources.SafetensorsFolder(tmp_path).header("x")
