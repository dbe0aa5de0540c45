"""A small GRPO run of every model family: a random model learns to write letters in upper case.

    python -m benchmarks.families [--families gemma2,gpt_oss] [--steps 100]

Each run is `rollmesh grpo` with configs/qwen3_debug.toml and another [model] of two layers and
hidden size 64. Prints the held-out reward before and after, the largest difference between a
generated token's logprob and the trainer's (0: the bits agree), and the seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.options import whole
from rollmesh.model.families import FAMILIES

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
# Each option is given to the families that read its key.
OPTIONS: dict[str, Any] = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}


def model_of(family: str) -> dict[str, Any]:
    """Returns the [model] of a family."""
    keys = FAMILIES[family].keys.split()
    both = {"num_experts", "num_local_experts"} <= set(keys)
    options = {key: value for key, value in OPTIONS.items() if key in keys}
    if both:
        del options["num_local_experts"]  # another name of num_experts
    sizes = dict(SIZES)
    if FAMILIES[family].latent:
        del sizes["head_dim"]
        sizes |= LATENT
    if family == "deepseek_v3":
        options |= {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    return {"architecture": family, **sizes, **options}


def toml(tables: Mapping[str, Any]) -> str:
    """Returns tables of plain values as TOML, which has the same form of values as JSON."""
    lines = [f"{k} = {json.dumps(v)}" for k, v in tables.items() if not isinstance(v, dict)]
    for name, table in tables.items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def run(family: str, steps: int, folder: Path) -> dict[str, float]:
    """Runs GRPO and returns the figures of the report."""
    tables = tomllib.loads((CONFIGS / "qwen3_debug.toml").read_text())
    tables["model"] = model_of(family)
    tables["tokenizer"]["path"] = str(CONFIGS.parent / "data" / "chars")
    for key in ("train", "heldout"):
        tables["data"][key] = [str(CONFIGS.parent / "data" / f"upper_{key}.jsonl")]
    config, out = folder / f"{family}.toml", folder / family
    config.write_text(toml(tables))
    command = [sys.executable, "-m", "rollmesh", "grpo", str(config), "--out", str(out)]
    for setting in (f"train.steps={steps}", f"eval.every={steps}", f"checkpoint.every={steps}"):
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    if done.returncode:
        raise RuntimeError(f"{family}: {done.stderr.strip() or done.stdout.strip()}")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["eval_reward"] for row in rows if "eval_reward" in row]
    return {
        "before": rewards[0],
        "after": rewards[-1],
        "difference": max(row.get("logprob_diff_max", 0.0) for row in rows),
        "seconds": sum(row.get("step_s", 0.0) for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--families", default=",".join(FAMILIES), help="model_types, by commas")
    parser.add_argument("--steps", type=whole(1), default=100)
    args = parser.parse_args()
    chosen = args.families.split(",")
    if unknown := [family for family in chosen if family not in FAMILIES]:
        parser.error(f"--families: expected some of {', '.join(FAMILIES)}, got {unknown[0]}")
    print(f"| family, {args.steps} steps | held-out reward | max difference of a logprob | s |")
    print("|---|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        for family in chosen:
            row = run(family, args.steps, Path(folder))
            print(
                f"| `{family}` | {row['before']:.3f} → {row['after']:.3f} | "
                f"{row['difference']:g} | {row['seconds']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
