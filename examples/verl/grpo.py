"""verl's GRPO trains a small Qwen3-MoE on the CPU, on rollouts of verl's vLLM servers, whose
forward pass is rollmesh's.

    python examples/verl/grpo.py

For rollmesh a user of verl only sets VLLM_PLUGINS=rollmesh. The rest of `ENVIRONMENT`, on_cpu.py
and the settings of the first block are needed on a machine without a GPU. Trainer (FSDP), loss,
servers, agent loops and weight transfer are verl's own, `python -m verl.trainer.main_ppo`. The
task: answer with upper-case letters, from random weights, with one token per character.

Needs verl and vLLM (docs/verl.md lists the versions and the measurements)."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DATA = HERE.parent.parent / "data"
PROMPTS, SAMPLES = 8, 16  # a step, of each prompt
ENVIRONMENT = {
    "VLLM_PLUGINS": "rollmesh",  # vLLM schedules, rollmesh computes
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "on_cpu",
    # the name under which verl has its FSDP trainer; it then runs on the platform's device
    "VERL_ENGINE_DEVICE": "cuda",
    "VLLM_HOST_IP": "127.0.0.1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    """verl's reward function: the share of the answer's characters that are upper-case letters."""
    return sum("A" <= letter <= "Z" for letter in solution_str) / max(len(solution_str), 1)


def new_model(folder: Path, moe: bool) -> None:
    """Writes config.json, random weights and the tokenizer."""
    import torch
    from transformers import (
        AutoTokenizer,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    tokenizer = AutoTokenizer.from_pretrained(DATA / "chars")
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
        "initializer_range": 0.1, "dtype": "float32",
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    torch.manual_seed(0)
    experts = {
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    model = (
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts))
        if moe
        else Qwen3ForCausalLM(Qwen3Config(**shape))
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prompts(name: str, most: int) -> list[dict[str, Any]]:
    """Writes rows in verl's format."""
    lines = [json.loads(line) for line in (DATA / name).read_text().splitlines()[:most]]
    return [
        {
            "data_source": "upper",
            "prompt": [{"role": "user", "content": line["prompt"]}],
            "reward_model": {"style": "rule", "ground_truth": line["answer"]},
        }
        for line in lines
    ]


def settings(out: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that differ from verl's defaults. The first block is needed on any
    machine without a GPU, whatever the task."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    ranks = args.ranks
    return {
        "trainer.device": "cpu",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"{actor}.use_torch_compile": False,
        f"+{actor}.fsdp_config.mixed_precision": (
            "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
        ),
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.model.use_remove_padding": False,  # wants flash-attn
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes": 1 << 26,
        f"+{rollout}.engine_kwargs.vllm.enable_expert_parallel": args.ep > 1,
        "ray_kwargs.ray_init.num_cpus": 8,
        "+ray_kwargs.ray_init.num_gpus": ranks,  # verl counts workers as GPUs
        "+ray_kwargs.ray_init.include_dashboard": False,
        "trainer.n_gpus_per_node": ranks,
        # as few processes as verl can do with
        f"{rollout}.agent.num_workers": 1,
        "reward.num_workers": 1,
        "data.dataloader_num_workers": 0,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        # the task
        "actor_rollout_ref.model.path": out / "model",
        "data.train_files": out / "train.parquet",
        "data.val_files": out / "heldout.parquet",
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": 8,
        "data.max_response_length": 6,
        "reward.custom_reward_function.path": Path(__file__).resolve(),
        "algorithm.adv_estimator": "grpo",
        f"{actor}.optim.lr": 3e-3,
        f"{actor}.ppo_mini_batch_size": PROMPTS,
        f"{actor}.ppo_micro_batch_size_per_gpu": PROMPTS * SAMPLES // ranks,
        f"{actor}.entropy_coeff": 0.0,
        f"{rollout}.name": "vllm",
        f"{rollout}.n": SAMPLES,
        f"{rollout}.dtype": "float32",
        f"{rollout}.tensor_model_parallel_size": args.tp,
        f"{rollout}.expert_parallel_size": args.ep,
        f"{rollout}.max_model_len": 32,
        f"{rollout}.max_num_batched_tokens": 1024,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": PROMPTS * SAMPLES // ranks,
        "trainer.logger": "[console,file]",
        "trainer.total_training_steps": args.steps,
        "trainer.total_epochs": 100,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": out / "checkpoints",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="verl's GRPO on vLLM on rollmesh, on the CPU.")
    parser.add_argument("--out", type=Path, help="default: a new temporary folder")
    for name, default, what in (
        ("steps", 30, ""),
        ("ranks", 1, "of the trainer (FSDP)"),
        ("tp", 1, "of a server"),
        ("ep", 1, "of a server"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{what}; default {default}".lstrip("; ")
        )
    parser.add_argument("--dense", dest="moe", action="store_false", help="a dense Qwen3")
    parser.add_argument("more", nargs="*", help="further settings of verl's, NAME=VALUE")
    args = parser.parse_args()
    import datasets

    out = (args.out or Path(tempfile.mkdtemp(prefix="verl-"))).resolve()
    new_model(out / "model", args.moe)
    for name, most in (("train", 4096), ("heldout", 64)):
        datasets.Dataset.from_list(prompts(f"upper_{name}.jsonl", most)).to_parquet(
            out / f"{name}.parquet"
        )
    given = [f"{name}={value}" for name, value in settings(out, args).items()] + args.more
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    environment = (
        os.environ
        | ENVIRONMENT
        | {"PYTHONPATH": path, "VERL_FILE_LOGGER_PATH": str(out / "metrics.jsonl")}
    )
    code = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *given], env=environment, cwd=out
    ).returncode
    if code:
        raise SystemExit(code)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    print(json.dumps(lines[-1], indent=1))
    print(out / "metrics.jsonl")


if __name__ == "__main__":
    main()
