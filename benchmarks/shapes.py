"""The measured models, and the least that a step of each must transfer and compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BF16_BYTES = 2


@dataclass(frozen=True)
class Shape:
    """A Qwen3 or Qwen3-MoE by its sizes. `n_experts` 0: dense. Embeddings are tied."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    intermediate: int  # of the MLP, or of one expert
    n_experts: int = 0
    top_k: int = 0

    def config(self) -> dict[str, Any]:
        """Returns the shape as a Hugging Face config.json."""
        config = {
            "model_type": "qwen3_moe" if self.n_experts else "qwen3",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "tie_word_embeddings": True,
            "max_position_embeddings": 4096,
        }
        if self.n_experts:
            config |= {
                "num_experts": self.n_experts,
                "num_experts_per_tok": self.top_k,
                "moe_intermediate_size": self.intermediate,
                "norm_topk_prob": True,
                "router_aux_loss_coef": 0.0,
            }
        return config

    @property
    def attention_weights(self) -> int:
        """Elements of q, k, v and o of one layer."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_weights(self) -> int:
        """Elements of gate, up and down of one MLP or one expert."""
        return 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """Elements of all matrices, without norms."""
        mlp = (
            self.n_experts * (self.mlp_weights + self.hidden)
            if self.n_experts
            else self.mlp_weights
        )
        return self.vocab * self.hidden + self.layers * (self.attention_weights + mlp)

    def decode_elements(self, experts_touched: float) -> float:
        """Weights that one decode step has to read. experts_touched: different experts, summed over
        the layers."""
        mlp = (
            experts_touched * self.mlp_weights if self.n_experts else self.layers * self.mlp_weights
        )
        router = self.layers * self.n_experts * self.hidden
        return self.vocab * self.hidden + self.layers * self.attention_weights + router + mlp

    @property
    def kv_elements(self) -> int:
        """Elements of K and V of one position, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def prefill_flops(self, tokens: int) -> float:
        """Multiplications and additions of a prompt with logits for the last row only."""
        mlp = (
            self.top_k * self.mlp_weights + self.n_experts * self.hidden
            if self.n_experts
            else self.mlp_weights
        )
        matrices = (
            2 * tokens * self.layers * (self.attention_weights + mlp) + 2 * self.vocab * self.hidden
        )
        scores_and_values = (
            4 * self.layers * self.heads * self.head_dim * tokens * (tokens + 1) // 2
        )
        return matrices + scores_and_values


SHAPES = {
    shape.name: shape
    for shape in (
        # Qwen/Qwen3-0.6B
        Shape(
            "dense-0.6b",
            hidden=1024,
            layers=28,
            heads=16,
            kv_heads=8,
            head_dim=128,
            vocab=151936,
            intermediate=3072,
        ),
        # Qwen3-MoE's proportions at one billion: 64 experts of width 256, 8 a token, about 0.36 B
        # active
        Shape("moe-1b", 1024, 16, 16, 8, 128, 151936, intermediate=256, n_experts=64, top_k=8),
    )
}

# Shapes for a GPU. A step of one would take a CPU minutes.
CARD_SHAPES = {
    shape.name: shape
    for shape in (
        SHAPES["dense-0.6b"],
        # Qwen/Qwen3-8B, but for its head, which is the embedding here: as many bytes in a step
        Shape(
            "dense-8b",
            hidden=4096,
            layers=36,
            heads=32,
            kv_heads=8,
            head_dim=128,
            vocab=151936,
            intermediate=12288,
        ),
        # Qwen/Qwen3-30B-A3B: 128 experts of width 768, 8 a token; 12 of its 48 layers
        Shape(
            "moe-30b-a3b", 2048, 12, 32, 4, 128, 151936, intermediate=768, n_experts=128, top_k=8
        ),
    )
}
# The same kinds, of a size that the simulated device of the tests gets through.
SMOKE_SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "dense-tiny",
            hidden=64,
            layers=2,
            heads=4,
            kv_heads=2,
            head_dim=16,
            vocab=151,
            intermediate=96,
        ),
        Shape("moe-tiny", 64, 2, 4, 2, 16, 151, intermediate=32, n_experts=8, top_k=2),
    )
}
