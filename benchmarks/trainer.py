"""The trainer's forward pass by the generator's kernels (docs/trainer.md): whether it is the same
function, and its cost.

    python -m benchmarks.trainer same [--logprobs 10000000]    how many logprobs of both sides
                                                               differ: 0, or exit status 1
    python -m benchmarks.trainer loop [--steps 200]            the same in training, generator on a
                                                               mesh and on one rank
    python -m benchmarks.trainer cost                          time and memory of a trainer's step
                                                               beside transformers
    python -m benchmarks.trainer checkpointing                 the same with gradient checkpointing
                                                               over without
    python -m benchmarks.trainer ahead                         tokens/s of a run whose rollouts are
                                                               ahead of its trainer
    python -m benchmarks.trainer curves FILE.json              rewards with transformers' forward,
                                                               corrected or not, and with rollmesh's

`same` draws completions with chunked prefill, prefix hits and preemption, on each instruction set
of this machine, and scores random sequences; the trainer computes all of them in padded batches.
`loop` runs `rollmesh grpo` on the debug configs in float32 and bfloat16 with tp=2, dp=2, ep=4
(dense: tp=2, dp=2) and with one rank; the curves must be bit-identical. `cost` alternates steps
(forward and backward, with weights packed again) of a patched model and of transformers in one
process, best of each; the resident set's peak is measured in a separate process for each.
`checkpointing` uses a process for each, whose second step is timed. `ahead` alternates between the
levels of [rollout] async_level, best of each. `curves` trains the MoE debug config on a bfloat16
generator with each of ARMS and several seeds, and writes the input of `python docs/draw.py
FILE.json`.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rollmesh as rm
import rollmesh.torch
from benchmarks.machine import describe
from benchmarks.options import THREADS, whole
from benchmarks.shapes import Shape, qwen3
from rollmesh._core import usable_cores
from rollmesh.run.models import checkpoint_layers

ROOT = Path(__file__).resolve().parent.parent
SMALL = {
    "dense": qwen3("dense", 64, 2, 4, 2, 16, 512, 128),
    "moe": qwen3("moe", 64, 2, 4, 2, 16, 512, 64, n_experts=8, top_k=2),
}
COST = {  # (model, sequences, tokens of each)
    "debug MoE": (qwen3("debug", 64, 2, 4, 2, 16, 128, 64, n_experts=8, top_k=2), 512, 12),
    "0.6B-shaped, 4 layers": (qwen3("stack", 1024, 4, 16, 8, 128, 16384, 3072), 8, 128),
}
LONG = "16 layers, 2 sequences of 1,024 tokens"
PEAK = COST | {LONG: (qwen3("deep", 256, 16, 4, 2, 64, 2048, 768), 2, 1024)}
DTYPES = ("float32", "bfloat16")
# The forward pass of the trainer, and the handling of differences from the generator in the loss.
ARMS = {
    "transformers": ['train.kernels="torch"'],
    "transformers, truncated importance sampling": [
        'train.kernels="torch"',
        'correction.importance_sampling="token_truncate"',
    ],
    "rollmesh": ['train.kernels="rollmesh"'],
}


def model_of(shape: Shape, dtype: str = "float32") -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    values = shape.config()
    config = AutoConfig.for_model(
        values.pop("model_type"),
        **values,
        initializer_range=0.1 if shape.spec.hidden_size < 256 else 0.02,
    )
    experts = {"experts_implementation": "grouped_mm"} if shape.spec.num_experts else {}
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), **experts).eval()


# ------------------------------------------------------------------------------------------- same
def trainers(model: Any, sequences: list[np.ndarray]) -> Iterator[np.ndarray]:
    """The trainer's logprobs of each sequence, without its first token, in padded batches."""
    for first in range(0, len(sequences), 64):
        batch = sequences[first : first + 64]
        ids = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(batch):
            at = (ids.shape[1] - len(sequence)) * (row % 2)
            ids[row, at : at + len(sequence)] = torch.from_numpy(sequence.astype(np.int64))
            mask[row, at : at + len(sequence)] = 1
        with torch.no_grad():
            found = rollmesh.torch.logprobs(model, ids, mask).logprobs.numpy()
        kept = mask.numpy().astype(bool)
        for row in range(len(batch)):
            yield found[row][kept[row, 1:] & kept[row, :-1]]


def drawn(
    generator: rm.Generator, rng: np.random.Generator, vocab: int
) -> Iterator[tuple[np.ndarray, int, np.ndarray]]:
    """(sequence, length of its prompt, recorded logprobs of the rest): groups that share prefixes,
    more than the cache holds."""
    common = rng.integers(0, vocab, 40)
    prompts = [
        np.concatenate([common, rng.integers(0, vocab, n)]).tolist()
        for n in rng.integers(1, 90, 24)
    ]
    params = rm.SamplingParams(n=4, max_tokens=96, ignore_eos=True, seed=int(rng.integers(2**32)))
    for output in generator.generate(prompts, params, use_tqdm=False):
        for sample in output.outputs:
            yield (
                np.concatenate([output.prompt_token_ids, sample.token_ids]),
                len(output.prompt_token_ids),
                np.asarray(sample.logprobs),
            )


def same(wanted: int, threads: int) -> int:
    torch.set_num_threads(threads)
    generated = scored = differ = preempted = hits = round_ = 0
    isas = [isa for isa in rm.ops.available_isas() if isa != "ref"]
    while generated + scored < wanted:
        for name, shape in SMALL.items():
            for dtype in DTYPES:
                isa = isas[round_ % len(isas)]
                round_ += 1
                rng = np.random.default_rng(round_)
                model = rollmesh.torch.patch(model_of(shape), dtype=dtype, threads=threads)
                with rm.Generator(
                    shape.spec, dtype=dtype, isa=isa, threads=threads,
                    max_model_len=1024, max_num_seqs=64,
                    max_num_batched_tokens=256, kv_cache_gib=0.004,
                ) as generator:  # fmt: skip
                    rollmesh.torch.push(model, generator)
                    rows = list(drawn(generator, rng, shape.spec.vocab_size))
                    for (_, start, recorded), found in zip(
                        rows, trainers(model, [row[0] for row in rows]), strict=True
                    ):
                        differ += int((found[start - 1 :] != recorded).sum())
                        generated += len(recorded)
                    sequences = [
                        rng.integers(0, shape.spec.vocab_size, n)
                        for n in rng.integers(200, 1000, 400)
                    ]
                    for found, recorded in zip(
                        trainers(model, sequences),
                        generator.score([s.tolist() for s in sequences]),
                        strict=True,
                    ):
                        differ += int((found != np.asarray(recorded)).sum())
                        scored += len(found)
                    metrics = generator.metrics()
                    preempted += metrics["preemptions"]
                    hits += metrics["cached_tokens"]
                print(
                    f"{name:5} {dtype:8} {isa:10}  {generated + scored:,} logprobs compared, "
                    f"{differ} differ",
                    flush=True,
                )
                if generated + scored >= wanted:
                    break
    print(
        f"{generated + scored:,} logprobs of trainer and generator compared ({generated:,} drawn, "
        f"{scored:,} scored; "
        f"{preempted:,} preemptions, {hits:,} tokens from the prefix cache): {differ} differ"
    )
    return int(differ > 0)


# ------------------------------------------------------------------------------------------- loop
def run(config: str, out: Path, steps: int, changes: list[str]) -> list[dict[str, Any]]:
    given = [option for change in changes for option in ("--set", change)]
    command = [
        sys.executable,
        "-m",
        "rollmesh",
        "grpo",
        str(ROOT / "configs" / config),
        "--out",
        str(out),
        "--set",
        f"train.steps={steps}",
    ]
    subprocess.run([*command, *given], check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def loop(steps: int) -> int:
    bad = 0
    for config, mesh in (
        ("qwen3_moe_debug.toml", ["tp=2", "dp=2", "ep=4"]),
        ("qwen3_debug.toml", ["tp=2", "dp=2"]),
    ):
        for dtype in DTYPES:
            common = [f'generator.dtype="{dtype}"', "sync.cast=true"]
            with tempfile.TemporaryDirectory() as folder:
                one = run(config, Path(folder) / "one", steps, common)
                many = run(
                    config,
                    Path(folder) / "mesh",
                    steps,
                    [*common, *(f"generator.{degree}" for degree in mesh)],
                )
            tokens = sum(line["tokens"] for line in many)
            differ = sum(round(line["tokens_differ"] * line["tokens"]) for line in one + many)
            curves = [
                [(m["reward_mean"], m.get("eval_reward"), m.get("grad_norm")) for m in lines]
                for lines in (one, many)
            ]
            equal = curves[0] == curves[1]
            bad += differ + (not equal)
            print(
                f"{config} {dtype}: {steps} steps, mesh {' '.join(mesh)}: {differ} of "
                f"{tokens + sum(m['tokens'] for m in one):,} logprobs "
                "differ; the curves of mesh and one rank are "
                f"{'equal to the last bit' if equal else 'NOT EQUAL'}; "
                f"held-out reward {many[0]['eval_reward']:.3f} → {many[-1]['eval_reward']:.3f}",
                flush=True,
            )
    return int(bad > 0)


# ------------------------------------------------------------------------------------------ ahead
def ahead(rounds: int, steps: int) -> None:
    """Tokens of rollouts over the time of the steps, without the first two. A level above 0 has one
    thread for each side; level 0, where the sides alternate, one or two."""
    ways = {f"level 0, {n} thread{'s' * (n > 1)}": (0, n, "wait") for n in (1, 2)}
    ways |= {
        f"level {level}, {how}, 1 thread each": (level, 1, how)
        for level, how in ((1, "wait"), (2, "keep"))
    }
    best = dict.fromkeys(ways, 0.0)
    shares: dict[str, str] = {}
    for _ in range(rounds):
        for way, (level, threads, how) in ways.items():
            changes = [
                f"rollout.async_level={level}",
                f'sync.inflight="{how}"',
                f"train.threads={threads}",
                f"generator.threads={threads}",
            ]
            with tempfile.TemporaryDirectory() as folder:
                lines = run(
                    "qwen3_moe_debug.toml",
                    Path(folder) / "run",
                    steps,
                    [*changes, "eval.every=1000"],
                )[2:-1]
            rate = sum(m["tokens"] for m in lines) / sum(m["step_s"] for m in lines)
            if rate > best[way]:
                best[way] = rate
                shares[way] = (
                    f", both sides work {np.mean([m['both_share'] for m in lines]):.0%} of the time"
                    if level
                    else ""
                )
    for way, rate in best.items():
        print(
            f"{way}: {rate:,.0f} tokens/s, {rate / best['level 0, 2 threads']:.2f} × level "
            f"0{shares[way]}"
        )


# ----------------------------------------------------------------------------------------- curves
def curves(file: Path, steps: int, seeds: int, threads: int) -> None:
    """Runs of one thread each, as many at a time as there are threads."""
    common = [
        'generator.dtype="bfloat16"',
        "sync.cast=true",
        "sync.self_test=0.0",
        "train.threads=1",
        "generator.threads=1",
    ]

    def train(arm: str, seed: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            metrics = run(
                "qwen3_moe_debug.toml",
                Path(folder) / "run",
                steps,
                [*common, f"seed={seed}", *ARMS[arm]],
            )
        heldout = {m["step"]: m["eval_reward"] for m in metrics if "eval_reward" in m}
        most, mean = (
            max(m["logprob_diff_max"] for m in metrics),
            float(np.mean([m["kl_k3"] for m in metrics])),
        )
        last = heldout[max(heldout)]
        print(
            f"{arm}, seed {seed}: held-out reward {last:.3f}, logprob_diff_max {most:.2g}, kl_k3 "
            f"{mean:.2g}",
            flush=True,
        )
        return {
            "arm": arm,
            "seed": seed,
            "logprob_diff_max": most,
            "kl_k3": mean,
            "heldout": heldout,
        }

    pairs = [(arm, seed) for seed in range(seeds) for arm in ARMS]
    with ThreadPoolExecutor(threads) as pool:
        runs = list(pool.map(lambda pair: train(*pair), pairs))
    record = {
        "machine": describe(),
        "config": "qwen3_moe_debug.toml",
        "changes": common,
        "arms": ARMS,
        "runs": runs,
    }
    file.write_text(json.dumps(record) + "\n")
    shown = sorted({step for step in (50, 100, 150) if step in runs[0]["heldout"]} | {steps})
    print(
        "held-out reward at step "
        + ", ".join(map(str, shown))
        + ": mean of the seeds (lowest to highest)"
    )
    for arm in ARMS:
        of_arm = [r["heldout"] for r in runs if r["arm"] == arm]
        found = [[rewards[step] for rewards in of_arm] for step in shown]
        print(
            f"{arm}: "
            + ", ".join(f"{np.mean(at):.3f} ({min(at):.3f} to {max(at):.3f})" for at in found)
        )


# ------------------------------------------------------------------------------------------- cost
def step_of(model: Any, ids: torch.Tensor, patched: bool) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    if patched:
        logprobs = rollmesh.torch.logprobs(model, ids).logprobs
    else:
        logits = model(ids, use_cache=False).logits[:, :-1].float()
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
    logprobs.mean().backward()  # type: ignore[no-untyped-call]


def peak_of(
    name: str, dtype: str, patched: bool, checkpointed: bool = False
) -> tuple[float, float]:
    """Returns the maximum MiB of the resident set, and seconds of the second of two steps, in a
    separate process."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.trainer",
        "peak",
        name,
        dtype,
        str(int(patched)),
        str(int(checkpointed)),
    ]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ
    )
    memory, seconds = map(float, done.stdout.split()[-2:])
    return memory, seconds


def peak(name: str, dtype: str, patched: bool, checkpointed: bool) -> None:
    shape, sequences, tokens = PEAK[name]
    model = model_of(shape, dtype)
    if patched:
        rollmesh.torch.patch(model)
    if checkpointed:
        checkpoint_layers(model)
    ids = torch.randint(0, shape.spec.vocab_size, (sequences, tokens))
    for _ in range(2):
        start = time.perf_counter()
        step_of(model, ids, patched)
    # Not ru_maxrss, which would include the process that this one was forked from.
    status = Path("/proc/self/status").read_text()
    print(
        next(
            int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")
        ),
        time.perf_counter() - start,
    )


def checkpointing() -> None:
    for dtype in DTYPES:
        for who, patched in (("rollmesh", True), ("transformers", False)):
            (plain, plain_s), (again, again_s) = (
                peak_of(LONG, dtype, patched, checkpointed) for checkpointed in (False, True)
            )
            print(
                f"{LONG} {dtype:8}  {who:12} peak memory {plain:.0f} MiB, with checkpointing "
                f"{again:.0f}: {again / plain:.2f} ×; "
                f"time {plain_s:.2f} and {again_s:.2f} s: {again_s / plain_s:.2f} ×",
                flush=True,
            )


def cost(rounds: int, threads: int) -> None:
    torch.set_num_threads(threads)
    print(
        f"a step (forward, backward, packing), best of {rounds} alternating rounds, {threads} "
        "threads; below 1: rollmesh is faster"
    )
    for name, (shape, sequences, tokens) in COST.items():
        ids = torch.randint(
            0,
            shape.spec.vocab_size,
            (sequences, tokens),
            generator=torch.Generator().manual_seed(1),
        )
        best: dict[str, float] = {}
        for dtype in DTYPES:
            plain = model_of(shape, dtype)
            patched_model = rollmesh.torch.patch(copy.deepcopy(plain))
            models: dict[str, tuple[Any, bool]] = {
                "rollmesh": (patched_model, True),
                "transformers": (plain, False),
            }
            for _ in range(rounds):
                for who, (model, patched) in models.items():
                    start = time.perf_counter()
                    step_of(model, ids, patched)
                    best[f"{who} {dtype}"] = min(
                        best.get(f"{who} {dtype}", 1e9), time.perf_counter() - start
                    )
        fastest = min(best[f"transformers {dtype}"] for dtype in DTYPES)
        for dtype in DTYPES:
            ours, theirs = best[f"rollmesh {dtype}"], best[f"transformers {dtype}"]
            memory = [peak_of(name, dtype, patched)[0] for patched in (True, False)]
            print(
                f"{name:22} {dtype:8}  rollmesh {1e3 * ours:7.1f} ms, transformers "
                f"{1e3 * theirs:7.1f} ms: {ours / theirs:.2f} × "
                f"({ours / fastest:.2f} × the faster of its two); "
                f"peak memory {memory[0]:.0f} and {memory[1]:.0f} MiB: "
                f"{memory[0] / memory[1]:.2f} ×",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=whole(1, THREADS), default=usable_cores())
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("same").add_argument("--logprobs", type=whole(1), default=10**7)
    parts.add_parser("loop").add_argument("--steps", type=whole(1), default=200)
    parts.add_parser("cost").add_argument("--rounds", type=whole(1), default=8)
    parts.add_parser("checkpointing")
    levels = parts.add_parser("ahead")
    levels.add_argument("--rounds", type=whole(1), default=3)
    levels.add_argument("--steps", type=whole(4), default=40)
    rewards = parts.add_parser("curves")
    rewards.add_argument("file", type=Path)
    rewards.add_argument("--steps", type=whole(1), default=220)
    rewards.add_argument("--seeds", type=whole(1), default=5)
    alone = parts.add_parser("peak")
    for name in ("name", "dtype", "patched", "checkpointed"):
        alone.add_argument(name)
    given = parser.parse_args()
    calls: dict[str, Callable[[], int | None]] = {
        "same": lambda: same(given.logprobs, given.threads),
        "loop": lambda: loop(given.steps),
        "cost": lambda: cost(given.rounds, given.threads),
        "ahead": lambda: ahead(given.rounds, given.steps),
        "curves": lambda: curves(given.file, given.steps, given.seeds, given.threads),
        "checkpointing": checkpointing,
        "peak": lambda: peak(
            given.name, given.dtype, given.patched == "1", given.checkpointed == "1"
        ),
    }
    return calls[given.part]() or 0


if __name__ == "__main__":
    sys.exit(main())
