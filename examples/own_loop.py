"""Your own training loop: PyTorch trains, rollmesh generates with the weights of each step, and
both compute the same logprobs.

    python examples/own_loop.py [FOLDER]        FOLDER: a Hugging Face checkpoint of Qwen3 or
                                                Qwen3-MoE

Without FOLDER it trains a small random model. The task is to generate even token ids; the loss is
REINFORCE.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import rollmesh as rm
import rollmesh.torch

SMALL = Qwen3Config(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    initializer_range=0.1,
)  # fmt: skip
PROMPT = [1, 2, 3]
NEW_TOKENS = 8


def main() -> None:
    torch.manual_seed(0)
    if len(sys.argv) > 1:
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(SMALL, dtype=torch.float32)
    rm.torch.patch(model)  # its forward pass is the generator's from now on
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with rm.Generator.from_hf(
        model.config, dtype="float32", max_model_len=64, kv_cache_gib=0.1
    ) as generator:
        for step in range(20):
            # Afterwards either all of the new version serves, or the old version does.
            rm.torch.push(model, generator, version=step)
            params = rm.SamplingParams(n=64, max_tokens=NEW_TOKENS, ignore_eos=True, seed=step * 64)
            samples = generator.generate([PROMPT], params, use_tqdm=False)[0].outputs
            tokens = torch.tensor(np.array([[*PROMPT, *sample.token_ids] for sample in samples]))
            generated = torch.tensor(np.array([sample.logprobs for sample in samples]))
            rewards = (tokens[:, len(PROMPT) :] % 2 == 0).float().mean(1)

            logprobs = rm.torch.logprobs(model, tokens).logprobs[:, len(PROMPT) - 1 :]
            differ = int((logprobs != generated).sum())
            loss = -((rewards - rewards.mean())[:, None] * logprobs).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(
                f"step {step}  reward {rewards.mean():.3f}  {differ} of {generated.numel()} "
                "logprobs differ"
            )


if __name__ == "__main__":
    main()
