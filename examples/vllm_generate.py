"""The real vLLM engine generates on rollmesh, with weights that a trainer sends.

    VLLM_PLUGINS=rollmesh python examples/vllm_generate.py

vLLM schedules requests; every forward pass and every draw is rollmesh's, bit-identical to
rm.Generator. docs/vllm.md explains how to install vLLM with a GPU and without. At the start vLLM
logs a traceback about a missing tokenizer, because this model has none.
"""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("VLLM_PLUGINS", "rollmesh")

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig

from rollmesh.vllm.trainer import WeightSender

CONFIG = Qwen3MoeConfig(
    vocab_size=1000, hidden_size=128, intermediate_size=256, moe_intermediate_size=64,
    num_experts=8, num_experts_per_tok=2,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    architectures=["Qwen3MoeForCausalLM"],
)  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    trained = Qwen3MoeForCausalLM(CONFIG)
    with tempfile.TemporaryDirectory() as folder:
        # A config.json is a complete model; generating before the first weights is an error.
        CONFIG.save_pretrained(folder)
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=256,
            kv_cache_memory_bytes=2**27,
            weight_transfer_config=WeightTransferConfig(backend="rollmesh"),
        )
        params = SamplingParams(n=4, seed=7, max_tokens=16, logprobs=0, detokenize=False)
        sender = WeightSender(llm, cast=True)
        for version in range(2):
            # reset_prefix_cache is not needed: KV of old weights is never read.
            sender.send(trained, version=version)
            output = llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)[0]
            print(f"version {llm.get_weight_version()}: {list(output.outputs[0].token_ids)}")
            trained.lm_head.weight.data.mul_(1.1)


if __name__ == "__main__":  # vLLM may start its processes by importing this file
    main()
