"""The weights of a safetensors folder as GGUF, for llama.cpp. Needs the package gguf, but not
torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

# llama.cpp's names of a layer's tensors by those of a checkpoint.
NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
ARCHITECTURES = {
    "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "qwen3_5_text": "qwen35", "deepseek_v3": "deepseek2",
}  # fmt: skip
# Which part of the rotated elements turns by which of three positions. The positions of text are
# equal, so that this does not change numbers, but llama.cpp requires it.
SECTIONS = [11, 11, 10, 0]


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


def number_of_experts(config: dict[str, Any]) -> int:
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((config[key] for key in keys if key in config), 0)


def renamed(weights: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Renames to llama.cpp's names; each matrix of a layer's experts as one array, the heads' parts
    of kv_b_proj for keys, transposed, apart from those for values."""
    found = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
    }
    if "lm_head.weight" in weights:
        found["output.weight"] = weights["lm_head.weight"]
    names = NAMES
    if config["model_type"] == "qwen3_5_text":
        names = NAMES | {"post_attention_layernorm.weight": "post_attention_norm.weight"}
    for layer in range(config["num_hidden_layers"]):
        of, into = f"model.layers.{layer}.", f"blk.{layer}."
        for name, new in names.items():
            if (array := weights.get(of + name)) is not None:
                found[into + new] = array
        if (latent := weights.get(f"{of}self_attn.kv_b_proj.weight")) is not None:
            nope = config["qk_nope_head_dim"]
            heads = latent.reshape(config["num_attention_heads"], -1, latent.shape[1])
            found[f"{into}attn_k_b.weight"] = heads[:, :nope].transpose(0, 2, 1)
            found[f"{into}attn_v_b.weight"] = heads[:, nope:]
        for name in ("gate", "up", "down") if f"{of}mlp.gate.weight" in weights else ():
            matrices = [
                weights[f"{of}mlp.experts.{expert}.{name}_proj.weight"]
                for expert in range(number_of_experts(config))
            ]
            found[f"{into}ffn_{name}_exps.weight"] = np.stack(matrices)
    return found


def in_float32(name: str, array: np.ndarray, zero_centered: bool) -> np.ndarray | None:
    """Returns what llama.cpp's own converter writes in float32: vectors, the convolution and the
    router. None: the tensor stays in bfloat16."""
    if array.ndim > 1 and not any(word in name for word in ("ffn_gate_inp", "ssm_conv1d")):
        return None
    values = (array.squeeze().astype(np.uint32) << 16).view(np.float32)
    if name.endswith("ssm_a"):
        return -np.exp(values)
    if zero_centered and name.endswith("norm.weight") and "ssm_norm" not in name:
        return values + np.float32(1)
    return values


def add_latent(writer: Any, config: dict[str, Any]) -> None:
    """The heads of latent attention: one of keys and values in the cache, of other sizes than those
    before the absorption."""
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_kv_lora_rank(rank)
    writer.add_q_lora_rank(config["q_lora_rank"] or 0)
    writer.add_rope_dimension_count(rope)


def add_heads(writer: Any, config: dict[str, Any]) -> None:
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])


def add_delta_nets(writer: Any, config: dict[str, Any]) -> None:
    rotated = config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]
    writer.add_rope_dimension_count(int(rotated))
    writer.add_rope_dimension_sections(SECTIONS)
    interval = config["layer_types"].index("full_attention") + 1
    writer.add_uint32(f"{writer.arch}.full_attention_interval", interval)
    values = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_inner_size(values * config["linear_value_head_dim"])


def add_experts(writer: Any, config: dict[str, Any]) -> None:
    from gguf import ExpertGatingFuncType

    writer.add_expert_count(number_of_experts(config))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["model_type"] == "deepseek_v3":
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def gguf_of(folder: Path, config: dict[str, Any]) -> Path:
    """Writes the folder's model for llama.cpp, most matrices in bfloat16."""
    import gguf

    into, partial = folder / "model.gguf", folder / "partial.gguf"
    if into.is_file():
        return into
    writer = gguf.GGUFWriter(str(partial), ARCHITECTURES[config["model_type"]])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    hybrid = "linear_num_value_heads" in config
    (add_latent if "kv_lora_rank" in config else add_heads)(writer, config)
    if hybrid:
        add_delta_nets(writer, config)
    if number_of_experts(config):
        add_experts(writer, config)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    for name, array in renamed(read(folder / "model.safetensors"), config).items():
        if (values := in_float32(name, array, hybrid)) is not None:
            writer.add_tensor(name, values)
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
