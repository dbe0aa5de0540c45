"""The measured models, and the least that a step of each must transfer and compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from rollmesh.model.sizes import kv_bytes_per_token, matrices, state_bytes
from rollmesh.model.spec import ModelSpec

BF16_BYTES, FLOAT_BYTES = 2, 4


@dataclass(frozen=True)
class Shape:
    """A model by its config. Its layers may have full attention, latent attention or delta nets,
    and MLPs or experts. Counts are of matrices, without norms and other vectors."""

    name: str
    values: Mapping[str, Any] = field(hash=False)  # of a Hugging Face config.json

    def config(self) -> dict[str, Any]:
        """Returns the shape as a Hugging Face config.json."""
        return {"max_position_embeddings": 4096, **self.values}

    @property
    def label(self) -> str:
        return f"{self.name} layers={self.spec.num_hidden_layers}"

    def with_layers(self, layers: int) -> Shape:
        return replace(self, values={**self.values, "num_hidden_layers": layers})

    @cached_property
    def spec(self) -> ModelSpec:
        return ModelSpec.from_hf(self.config())

    @cached_property
    def elements(self) -> dict[str, int]:
        """Elements of all matrices of each kind."""
        return {m.kind: m.elements for m in matrices(self.spec) if len(m.shape) > 1}

    @property
    def parameters(self) -> int:
        return sum(self.elements.values())

    @property
    def head_weights(self) -> int:
        """Elements of the matrix that computes logits."""
        return self.spec.vocab_size * self.spec.hidden_size

    @property
    def expert_weights(self) -> int:
        """Elements of gate, up and down of one expert."""
        return 3 * self.spec.hidden_size * self.spec.moe_intermediate_size

    @property
    def shared_weights(self) -> int:
        """Elements of the layers' matrices that every token uses: all but the chosen experts."""
        others = ("embed", "lm_head", "expert_gate", "expert_up", "expert_down")
        return self.parameters - sum(self.elements.get(kind, 0) for kind in others)

    @property
    def state_elements(self) -> int:
        """Elements of the float32 states of one sequence, all layers with delta nets."""
        spec = self.spec
        state = spec.linear_num_value_heads * spec.linear_key_head_dim * spec.linear_value_head_dim
        return spec.layer_kinds.count("delta_net") * state

    @property
    def kv_elements(self) -> int:
        """Elements of K and V of one position, all layers. Of latent attention a row of the rotated
        key and the latent, which is K and V of all heads."""
        spec = self.spec
        row = spec.head_dim if spec.kv_lora_rank else 2 * spec.head_dim
        return spec.num_attention_layers * spec.num_key_value_heads * row

    # ---------------------------------------------------------------------------------- transfer
    def decode_elements(self, experts_touched: float) -> float:
        """Weights that one decode step has to read. experts_touched: different experts, summed over
        the layers."""
        return self.head_weights + self.shared_weights + experts_touched * self.expert_weights

    def decode_bytes(self, sequences: int, context: float, experts_touched: float) -> float:
        """Bytes of bfloat16 weights and KV, and of states, which are read and written, of one
        decode step of sequences behind `context` positions."""
        kv = sequences * context * self.kv_elements
        states = 2 * FLOAT_BYTES * sequences * self.state_elements
        return BF16_BYTES * (self.decode_elements(experts_touched) + kv) + states

    def cache_bytes(self, sequences: int, positions: int) -> int:
        """Bytes of a bfloat16 cache that holds the positions and states of all sequences. rollmesh
        gives states at most half of it."""
        spec = self.spec
        kv = positions * kv_bytes_per_token(spec, spec.num_key_value_heads, BF16_BYTES)
        state = state_bytes(spec, spec.linear_num_value_heads, BF16_BYTES)
        return 2 * max(kv, (sequences + 1) * state) if state else kv

    # ----------------------------------------------------------------------------------- compute
    @property
    def token_flops(self) -> int:
        """Multiplications and additions of one token in all layers, without attention's scores and
        values."""
        experts = self.spec.num_experts_per_tok * sum(self.spec.is_moe_layer) * self.expert_weights
        # S·k, the decay of S, the update of S, S·q
        delta_rule = 7 * self.state_elements
        return 2 * (self.shared_weights + experts) + delta_rule

    @property
    def attention_flops(self) -> int:
        """Multiplications and additions of the scores and values of one token and one position, all
        layers. Latent attention is counted in the absorbed form."""
        spec = self.spec
        return 2 * spec.num_attention_layers * spec.num_attention_heads * (
            spec.head_dim + spec.value_dim
        )  # fmt: skip

    def decode_flops(self, context: float) -> float:
        """Multiplications and additions of one token behind `context` others."""
        return 2 * self.head_weights + self.token_flops + self.attention_flops * (context + 1)

    def prefill_flops(self, tokens: int) -> int:
        """Multiplications and additions of a prompt with logits for the last row only."""
        pairs = tokens * (tokens + 1) // 2
        return 2 * self.head_weights + tokens * self.token_flops + pairs * self.attention_flops


def qwen3(
    name: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    intermediate: int,  # of the MLP, or of one expert
    n_experts: int = 0,
    top_k: int = 0,
) -> Shape:
    """A Qwen3 or Qwen3-MoE by its sizes. `n_experts` 0: dense. Embeddings are tied."""
    config = {
        "model_type": "qwen3_moe" if n_experts else "qwen3",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "tie_word_embeddings": True,
    }
    if n_experts:
        config |= {
            "num_experts": n_experts,
            "num_experts_per_tok": top_k,
            "moe_intermediate_size": intermediate,
            "norm_topk_prob": True,
            "router_aux_loss_coef": 0.0,
        }
    return Shape(name, config)


def qwen3_5(
    name: str, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int,
    intermediate: int, linear_heads: int, linear_head_dim: int,
) -> Shape:  # fmt: skip
    """A dense Qwen3.5 with attention in each fourth layer, else delta nets with as many heads of
    keys as of values. Embeddings are tied."""
    config = {
        **qwen3(name, hidden, layers, heads, kv_heads, head_dim, vocab, intermediate).values,
        "model_type": "qwen3_5_text",
        "full_attention_interval": 4,
        "linear_num_key_heads": linear_heads,
        "linear_num_value_heads": linear_heads,
        "linear_key_head_dim": linear_head_dim,
        "linear_value_head_dim": linear_head_dim,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
    }
    return Shape(name, config)


def moonlight(
    name: str, hidden: int, layers: int, heads: int, kv_lora_rank: int, nope: int, rope: int,
    value_dim: int, vocab: int, intermediate: int, moe_intermediate: int, n_experts: int,
    top_k: int,
) -> Shape:  # fmt: skip
    """A DeepSeek-V3 as Moonlight: q in one step, the first layer dense, two shared experts in each
    other one, sigmoid scores, one group of experts."""
    config = {
        "model_type": "deepseek_v3",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": None,
        "kv_lora_rank": kv_lora_rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value_dim,
        "intermediate_size": intermediate,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": moe_intermediate,
        "n_routed_experts": n_experts,
        "num_experts_per_tok": top_k,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    }
    return Shape(name, config)


def by_name(*shapes: Shape) -> dict[str, Shape]:
    return {shape.name: shape for shape in shapes}


SHAPES = by_name(
    # Qwen/Qwen3-0.6B
    qwen3("dense-0.6b", 1024, 28, 16, 8, 128, 151936, intermediate=3072),
    # Qwen3-MoE's proportions at one billion: 64 experts of width 256, 8 a token, about 0.36 B
    # active
    qwen3("moe-1b", 1024, 16, 16, 8, 128, 151936, intermediate=256, n_experts=64, top_k=8),
)

# Shapes that only the CPU suite measures.
CPU_SHAPES = by_name(
    # The text model of Qwen/Qwen3.5-0.8B
    qwen3_5(
        "hybrid-0.8b", 1024, 24, 8, 2, 256, 248320, intermediate=3584, linear_heads=16,
        linear_head_dim=128,
    ),
    # moonshotai/Moonlight-16B-A3B: 64 experts of width 1408, 6 a token; 4 of its 27 layers
    moonlight(
        "latent-moe", 2048, 4, 16, 512, 128, 64, 128, 163840, intermediate=11264,
        moe_intermediate=1408, n_experts=64, top_k=6,
    ),
)  # fmt: skip

# Shapes for a GPU. A step of one would take a CPU minutes.
CARD_SHAPES = by_name(
    SHAPES["dense-0.6b"],
    # Qwen/Qwen3-8B, but for its head, which is the embedding here: as many bytes in a step
    qwen3("dense-8b", 4096, 36, 32, 8, 128, 151936, intermediate=12288),
    # Qwen/Qwen3-30B-A3B: 128 experts of width 768, 8 a token; 12 of its 48 layers
    qwen3("moe-30b-a3b", 2048, 12, 32, 4, 128, 151936, intermediate=768, n_experts=128, top_k=8),
)
# The same kinds, of a size that the simulated device of the tests gets through.
SMOKE_SHAPES = by_name(
    qwen3("dense-tiny", 64, 2, 4, 2, 16, 151, intermediate=96),
    qwen3("moe-tiny", 64, 2, 4, 2, 16, 151, intermediate=32, n_experts=8, top_k=2),
)
CPU_SMOKE_SHAPES = by_name(
    qwen3_5(
        "hybrid-tiny", 64, 4, 4, 2, 32, 151, intermediate=96, linear_heads=2, linear_head_dim=16
    ),
    moonlight(
        "latent-tiny", 64, 3, 4, 32, 16, 16, 16, 151, intermediate=96, moe_intermediate=32,
        n_experts=8, top_k=2,
    ),
)  # fmt: skip
