"""TitanRL's GRPO on rollmesh, on the cores of one machine: its Controller, trainer, loss and
routers, and a small Qwen3-MoE from random weights.

    python examples/titan/grpo.py                                  # a minute on two cores
    python examples/titan/grpo.py --generators 2 --tp 2 --ep 2 --processes
    python examples/titan/grpo.py --same-bits                      # logprob_diff/max: 0

The essential line is `install(config, …)`. on_cpu.py adapts torchtitan to a machine without a GPU;
letters.py is the task."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import on_cpu  # before anything of torchtitan
from letters import LetterRollouter, byte_tokenizer
from monarch.actor import this_host
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.experiments.rl.actors.generator import SamplingConfig, VLLMGenerator
from torchtitan.experiments.rl.actors.trainer import PolicyTrainer
from torchtitan.experiments.rl.components.batcher import BatchConfig, Batcher
from torchtitan.experiments.rl.components.training_sample_builder import TrainingSampleBuilder
from torchtitan.experiments.rl.controller import AsyncLoopConfig, Controller, ValidationConfig
from torchtitan.experiments.rl.losses import GRPOLoss
from torchtitan.experiments.rl.models.vllm_registry import InferenceParallelismConfig
from torchtitan.experiments.rl.observability.metrics import MetricsProcessor
from torchtitan.experiments.rl.renderer import RendererConfig
from torchtitan.models import qwen3
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.protocols.model_spec import ModelSpec

import rollmesh as rm
from rollmesh.titan import install

HERE = Path(__file__).resolve().parent


def small_model(moe: bool) -> ModelSpec:
    """A flavor of torchtitan's registry with smaller layers."""
    dim, head_dim, vocab_size = 128, 32, 512
    rope = CosSinRoPE.Config(dim=head_dim, max_seq_len=4096, theta=1000000.0)
    shape: dict[str, Any] = {
        "n_layers": 2,
        "dim": dim,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": head_dim,
        "rope": rope,
    }
    shape |= {"fuse_qkv": True, "attn_backend": "flex"}
    flavor = qwen3.model_registry("debugmodel_moe" if moe else "debugmodel", attn_backend="flex")
    model = flavor.model
    if moe:
        layers = qwen3._build_qwen3_moe_layers(
            moe_hidden_dim=128, num_experts=8, top_k=2, moe_comm_backend="standard", **shape
        )
    else:
        layers = qwen3._build_qwen3_layers(hidden_dim=256, **shape)
    model = replace(
        model,
        vocab_size=vocab_size,
        dim=dim,
        norm=replace(model.norm, normalized_shape=dim),
        tok_embeddings=replace(model.tok_embeddings, num_embeddings=vocab_size, embedding_dim=dim),
        lm_head=replace(model.lm_head, in_features=dim, out_features=vocab_size),
        layers=layers,
    )
    return replace(flavor, model=model)


def config_of(args: argparse.Namespace, folder: Path) -> Controller.Config:
    byte_tokenizer(folder / "tokenizer")
    processes = InferenceParallelismConfig(
        tensor_parallel_degree=args.tp, data_parallel_degree=args.dp, expert_parallel_degree=args.ep
    )
    return Controller.Config(
        model_spec=small_model(args.moe),
        hf_assets_path=str(folder / "tokenizer"),
        dump_folder=str(folder),
        num_generators=args.generators,
        async_loop=AsyncLoopConfig(
            num_training_steps=args.steps,
            num_prompts_per_train_step=4,
            num_samples_per_prompt=8,
            target_offpolicy_steps=args.offpolicy,
            window_fraction=None,
            validation=ValidationConfig(num_samples=4),
            batcher=Batcher.Config(batch=BatchConfig(local_batch_size=2, seq_len=256)),
            training_sample_builder=TrainingSampleBuilder.Config(drop_zero_std_reward_groups=False),
        ),
        compile=CompileConfig(enable=False),
        rollouter=LetterRollouter.Config(),
        renderer=RendererConfig(name="qwen3", enable_thinking=False),
        metrics=MetricsProcessor.Config(enable_wandb=False),
        trainer=PolicyTrainer.Config(
            optimizer=default_adamw(lr=args.lr),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_type="linear"),
            training=TrainingConfig(mixed_precision_param="float32"),
            parallelism=ParallelismConfig(
                data_parallel_shard_degree=args.trainer_ranks, spmd_backend="partial_dtensor"
            ),
            checkpoint=CheckpointManager.Config(
                enable=False, interval=10, last_save_model_only=False
            ),
            ac_config=None,
            debug=DebugConfig(seed=args.seed),
            loss=ChunkedLossWrapper.Config(num_chunks=2, loss_fn=GRPOLoss.Config()),
        ),
        generator=VLLMGenerator.Config(
            model_dtype="float32",
            checkpoint=CheckpointManager.Config(enable=False),
            sampling=SamplingConfig(temperature=1.0, top_p=1.0, max_tokens=24),
            debug=DebugConfig(seed=args.seed),
            parallelism=processes if args.processes else InferenceParallelismConfig(),
        ),
    )


async def train(args: argparse.Namespace, folder: Path) -> None:
    # For Monarch's processes.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(HERE), os.environ.get("PYTHONPATH")])
    )
    mesh = None if args.processes else rm.Mesh(tp=args.tp, dp=args.dp, ep=args.ep)
    trainer = on_cpu.CpuRollmeshTrainer if args.same_bits else on_cpu.CpuTrainer
    config = install(
        config_of(args, folder),
        trainer=trainer,
        mesh=mesh,
        kv_cache_gib=0.1,
        max_model_len=256,
        threads=1,
    )
    host, loop, ranks = this_host(), config.build(), config.generator.num_processes
    try:
        trainer = host.spawn_procs(
            per_host={"gpus": args.trainer_ranks}, bootstrap=on_cpu.bootstrap
        )
        generators = [
            host.spawn_procs(per_host={"gpus": ranks}, bootstrap=on_cpu.bootstrap)
            for _ in range(args.generators)
        ]
        await loop.setup_async(trainer_mesh=trainer, generator_meshes=generators)
        await loop.run()
    finally:
        await loop.close()
        # Monarch's threads end after close; a process that exits before them dies of SIGABRT.
        await asyncio.sleep(3)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers: dict[str, Any] = {
        "steps": 30,
        "generators": 1,
        "tp": 1,
        "dp": 1,
        "ep": 1,
        "trainer-ranks": 1,
        "offpolicy": 0,
        "seed": 0,
    }
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--lr", type=float, default=3e-3, help="default 3e-3")
    parser.add_argument("--dense", dest="moe", action="store_false", help="a dense Qwen3")
    parser.add_argument(
        "--processes",
        action="store_true",
        help="the ranks of a generator are processes, not threads",
    )
    parser.add_argument(
        "--same-bits", action="store_true", help="the trainer computes the generator's forward pass"
    )
    parser.add_argument(
        "--out", type=Path, help="for logs and metrics; default: a temporary folder"
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        asyncio.run(train(args, args.out or Path(temporary)))


if __name__ == "__main__":
    main(sys.argv[1:])
