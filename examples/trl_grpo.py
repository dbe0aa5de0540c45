"""TRL's GRPOTrainer trains a small Qwen3-MoE, or another family, on the CPU. Rollouts come from
vLLM in the same process, whose forward pass is rollmesh's.

    VLLM_PLUGINS=rollmesh python examples/trl_grpo.py

For rollmesh a user of TRL only adds that variable and rm.torch.patch(model): trainer, loss and
optimizer are TRL's own. The task is that of configs/qwen3_moe_debug.toml: upper-case four letters,
from random weights, with one token per character. Every other step TRL pushes the weights one
parameter a call and asks vLLM for 512 completions with the logprob of each token. Before it learns
from them it computes those logprobs with the model: the metric sampling_logp_difference is the
difference between the two. Both sides are one function of the weights, so it is 0, and the
importance sampling ratio with which TRL corrects its loss is 1.

Needs vllm and trl with its datasets (docs/vllm.md lists the versions). DIR/trl_metrics.jsonl has
TRL's log, one object for each two optimizer steps, which share their completions.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_PLUGINS", "rollmesh")
# torch's threads sleep between operators, because the generator needs the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer

import rollmesh.torch
from rollmesh.grpo.rewards import char_match

DATA = Path(__file__).resolve().parent.parent / "data"
SAMPLES = 16  # of each prompt
PROMPTS = 32  # a step


def new_model(folder: Path, tokenizer: PreTrainedTokenizerBase, family: str) -> Any:
    """Makes a model with random weights. vLLM gets the folder, for its config.json; the weights
    come from the trainer. A reference model is loaded from the folder."""
    experts = {
        "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "experts_implementation": "grouped_mm",
    } if family.endswith("_moe") else {}  # fmt: skip
    config = AutoConfig.for_model(
        family, vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, dtype="float32",
        **experts,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.name_or_path = config.name_or_path = str(folder)
    return model


def train(out: Path, steps: int, beta: float, family: str) -> list[dict[str, Any]]:
    """Trains; returns TRL's log, one dict for each step."""
    tokenizer = AutoTokenizer.from_pretrained(DATA / "chars")
    model = rollmesh.torch.patch(new_model(out / "model", tokenizer, family))
    args = GRPOConfig(
        output_dir=str(out),
        use_cpu=True,
        bf16=False,
        seed=0,
        max_steps=steps,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        num_iterations=2,
        max_completion_length=6,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        beta=beta,
        epsilon_high=0.5,
        entropy_coef=0.05,
        router_aux_loss_coef=0.0,  # a patched model returns no router logits
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.05,
        vllm_max_model_length=64,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        gradient_checkpointing=False,
    )
    dataset = load_dataset(
        "json",
        data_files=str(DATA / "upper_train.jsonl"),
        split="train",
        cache_dir=str(out / "datasets"),
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=char_match,
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    if trainer.ref_model is not None:
        rollmesh.torch.patch(trainer.ref_model)
    trainer.train()
    return [line for line in trainer.state.log_history if "reward" in line]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="TRL's GRPOTrainer on vLLM on rollmesh, on the CPU."
    )
    parser.add_argument("--out", type=Path, help="default: a new temporary folder")
    parser.add_argument(
        "--steps",
        type=int,
        default=240,
        help="optimizer steps; each two of them share their completions",
    )
    parser.add_argument(
        "--beta", type=float, default=0.0, help="of the KL term; above 0 TRL has a reference model"
    )
    parser.add_argument(
        "--model",
        default="qwen3_moe",
        help="a model_type of docs/models.md with Qwen3's keys, or fewer",
    )
    given = parser.parse_args()
    out = given.out or Path(tempfile.mkdtemp(prefix="trl-"))
    out.mkdir(parents=True, exist_ok=True)
    lines = train(out, given.steps, given.beta, given.model)
    (out / "trl_metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rewards = [line["reward"] for line in lines]
    apart = max(line["sampling/sampling_logp_difference/max"] for line in lines)
    ratios = [
        line[f"sampling/importance_sampling_ratio/{end}"]
        for line in lines
        for end in ("min", "max")
    ]
    print(
        f"reward {rewards[0]:.3f} → {rewards[-1]:.3f} in {given.steps} steps; "
        f"sampling_logp_difference at most {apart}, "
        f"importance sampling ratio {min(ratios)} to {max(ratios)}; {out}/trl_metrics.jsonl"
    )
    if apart != 0.0 or min(ratios) != 1.0 or max(ratios) != 1.0:
        raise SystemExit(
            f"sampling_logp_difference/max: expected 0, got {apart}: trainer and generator differ"
        )


if __name__ == "__main__":
    main()
