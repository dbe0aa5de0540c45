"""The weights of a safetensors folder as GGUF, for llama.cpp. Needs the package gguf, but not
torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}  # fmt: skip


def read(source: Path) -> dict[str, np.ndarray]:
    """The bfloat16 tensors of a safetensors file as views of uint16."""
    with source.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    data = np.memmap(source, np.uint16, "r", 8 + size)
    return {
        name: data[at["data_offsets"][0] // 2 : at["data_offsets"][1] // 2].reshape(at["shape"])
        for name, at in header.items()
    }


def renamed(weights: dict[str, np.ndarray], layers: int, experts: int) -> dict[str, np.ndarray]:
    """Renames to llama.cpp's names; each matrix of a layer's experts as one array."""
    found = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
    }
    for layer in range(layers):
        for name, new in NAMES.items():
            if (array := weights.get(f"model.layers.{layer}.{name}.weight")) is not None:
                found[f"blk.{layer}.{new}.weight"] = array
        for name in ("gate", "up", "down") if experts else ():
            of = [
                weights[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"]
                for expert in range(experts)
            ]
            found[f"blk.{layer}.ffn_{name}_exps.weight"] = np.stack(of)
    return found


def gguf_of(folder: Path, config: dict[str, Any]) -> Path:
    """Writes matrices in bfloat16, norms and the router in float32, like llama.cpp's own converter.
    Embeddings are tied."""
    import gguf

    into, partial = folder / "model.gguf", folder / "partial.gguf"
    if into.is_file():
        return into
    experts = config.get("num_experts", 0)
    writer = gguf.GGUFWriter(str(partial), "qwen3moe" if experts else "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    for name, array in renamed(
        read(folder / "model.safetensors"), config["num_hidden_layers"], experts
    ).items():
        if array.ndim == 1 or "ffn_gate_inp" in name:
            writer.add_tensor(name, (array.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(
                name,
                np.ascontiguousarray(array).view(np.uint8),
                raw_dtype=gguf.GGMLQuantizationType.BF16,
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return partial.rename(into)
