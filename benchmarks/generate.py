"""Decode and prefill speed beside transformers in the same run.  python -m benchmarks.generate

Decode: every sequence has a separate 17-token prompt whose first page of KV is cached, so that all
steps of a run are decode steps of one token per sequence, sampled at temperature 1 with its
logprob. The measure is the bytes of weights that a step must read, over its time, as a fraction of
the measured memory bandwidth; for a MoE only the chosen experts count. Prefill: an uncached prompt
of 512 tokens, to its first token; the measure is FLOP/s as a fraction of the measured float32 FMA
rate.

The peers are transformers' own models with the same weights and as many threads: forward with a KV
cache and an argmax per step, without sampling and logprobs. Rounds alternate between all engines,
and the best round of a point counts, because other work on the machine can only slow an engine
down. A point that has used up its --budget is not repeated, so a slow peer costs one round."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import rollmesh as rm
from benchmarks import machine
from benchmarks.options import THREADS, real, whole
from benchmarks.shapes import BF16_BYTES, SHAPES, Shape
from rollmesh._core import usable_cores

PAGE = 16
PREFILL_TOKENS = 512
RESULTS = Path(__file__).with_name("results")
Point = tuple[str, int]  # ("decode", sequences) or ("prefill", tokens)


@dataclass
class Row:
    """One measured point of one engine."""

    shape: str
    engine: str
    phase: str
    size: int  # sequences of a decode step, tokens of a prefill
    seconds: float  # of one step, or of the prefill
    tokens_per_s: float
    rate: float  # decode: GB/s of weights; prefill: GFLOP/s
    fraction: float  # of the machine's limit for it


class Engine(Protocol):
    name: str
    weight_bytes: int  # of one element

    def measure(self, point: Point, steps: int) -> float:
        """Seconds of one decode step of `size` sequences, or of one prefill of `size` tokens."""
        ...


class Rollmesh:
    """The generator under measurement, with the trainer's weights pushed into it."""

    name = "rollmesh"
    weight_bytes = BF16_BYTES

    def __init__(self, shape: Shape, trainer: torch.nn.Module, threads: int, sizes: Iterable[int]):
        self.shape = shape
        self.rng = np.random.default_rng(1)
        self.generator = rm.Generator(
            shape.spec,
            threads=threads,
            max_model_len=1024,
            max_num_seqs=max(sizes, default=1),
            max_num_batched_tokens=PREFILL_TOKENS,
            block_size=PAGE,
            kv_cache_gib=1.0,
        )
        self.generator.sync_weights(trainer.state_dict())
        # By sequences: the different experts of a step, summed over layers.
        self.experts_touched: dict[int, float] = {}

    def measure(self, point: Point, steps: int) -> float:
        phase, size = point
        return self._decode(size, steps) if phase == "decode" else self._prefill(size)

    def _decode(self, size: int, steps: int) -> float:
        generator = self.generator
        prompts = [
            self.rng.integers(0, self.shape.spec.vocab_size, PAGE + 1, dtype=np.int32)
            for _ in range(size)
        ]
        params = rm.SamplingParams(max_tokens=steps, ignore_eos=True, seed=7)
        generator.generate(prompts, rm.SamplingParams(max_tokens=1), use_tqdm=False)
        before = generator.metrics()["steps"]
        begin = time.perf_counter()
        outputs = generator.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        n_steps = generator.metrics()["steps"] - before
        if n_steps != steps or any(output.num_cached_tokens != PAGE for output in outputs):
            raise RuntimeError(
                f"not {steps} steps of pure decode but {n_steps}: the prompts were not cached, or "
                "the batch was split"
            )
        if self.shape.spec.num_experts:
            # [sequences, steps, layers, k]
            chosen = np.stack([output.outputs[0].routed_experts[PAGE:] for output in outputs])
            sets = [
                np.unique(chosen[:, step, layer]).size
                for step in range(chosen.shape[1])
                for layer in range(chosen.shape[2])
            ]
            self.experts_touched[size] = sum(sets) / chosen.shape[1]
        return seconds / n_steps

    def _prefill(self, tokens: int) -> float:
        prompt = self.rng.integers(0, self.shape.spec.vocab_size, tokens, dtype=np.int32)
        begin = time.perf_counter()
        self.generator.generate(
            [prompt], rm.SamplingParams(max_tokens=1, ignore_eos=True, seed=7), use_tqdm=False
        )
        return time.perf_counter() - begin


class Transformers:
    """A peer: the same model in transformers, forward by forward."""

    def __init__(self, shape: Shape, model: torch.nn.Module, dtype: torch.dtype):
        self.shape, self.model = shape, model
        self.name = f"transformers {str(dtype).removeprefix('torch.')}"
        self.weight_bytes = dtype.itemsize

    @torch.inference_mode()
    def measure(self, point: Point, steps: int) -> float:
        phase, size = point
        if phase == "prefill":
            prompt = torch.randint(self.shape.spec.vocab_size, (1, size))
            begin = time.perf_counter()
            self.model(prompt, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
            return time.perf_counter() - begin
        cache = self.model(
            torch.randint(self.shape.spec.vocab_size, (1, PAGE)), use_cache=True, logits_to_keep=1
        ).past_key_values
        cache.batch_repeat_interleave(size)
        # Different tokens, so that a MoE routes them differently.
        tokens = torch.randint(self.shape.spec.vocab_size, (size, 1))
        begin = time.perf_counter()
        for _ in range(steps):
            tokens = (
                self.model(tokens, past_key_values=cache, use_cache=True)
                .logits[:, -1]
                .argmax(-1, keepdim=True)
            )
        return (time.perf_counter() - begin) / steps


def make_trainer(values: dict[str, Any], dtype: torch.dtype) -> Any:
    """Returns transformers' model of a config with random weights (σ = 0.02), without the minutes
    that its own initialisation takes."""
    config = AutoConfig.for_model(**values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    rope = type(model.model.rotary_emb)(config)  # its buffers are computed, not loaded
    model.to_empty(device="cpu")
    model.model.rotary_emb = rope
    model.tie_weights()
    for name, buffer in model.named_buffers():
        if "rotary_emb" not in name:  # the routers' biases
            buffer.zero_()
    noise = (torch.randn(1 << 22, generator=torch.Generator().manual_seed(1)) * 0.02).to(dtype)
    with torch.no_grad():
        for i, (name, parameter) in enumerate(model.named_parameters()):
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
                continue
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), noise.numel()):
                piece = flat[start : start + noise.numel()]
                piece.copy_(noise.roll((7919 * i + start // 97) % noise.numel())[: piece.numel()])
    return model.eval()


def measure_shape(
    shape: Shape, points: list[Point], args: argparse.Namespace, limits: machine.Limits
) -> list[Row]:
    trainer = make_trainer(shape.config(), torch.bfloat16)
    decode_sizes = [size for phase, size in points if phase == "decode"]
    ours = Rollmesh(shape, trainer, args.threads, decode_sizes)
    engines: list[Engine] = [ours]
    if "bfloat16" in args.peers:
        engines.append(Transformers(shape, trainer, torch.bfloat16))
    if "float32" in args.peers:
        full = make_trainer(shape.config(), torch.float32)
        full.load_state_dict(trainer.state_dict())
        engines.append(Transformers(shape, full, torch.float32))
    if "bfloat16" not in args.peers:
        del trainer
        gc.collect()

    best = measure_points(engines, points, args)
    for (name, (phase, size)), seconds in best.items():
        print(
            f"  {shape.name:11s} {phase:8s} {size:4d}  {name:22s} {1e3 * seconds:10.1f} ms",
            flush=True,
        )
    return [
        row(shape, engine, point, best[engine.name, point], ours, limits)
        for point in points
        for engine in engines
    ]


def measure_points(
    engines: list[Engine], points: list[Point], args: argparse.Namespace
) -> dict[tuple[str, Point], float]:
    """Seconds of each engine at each point: the best of rounds that alternate between the
    engines."""
    best: dict[tuple[str, Point], float] = {}
    spent: dict[tuple[str, Point], float] = {}
    for point in points:
        for _ in range(args.rounds):
            for engine in engines:
                key = (engine.name, point)
                if spent.get(key, 0.0) > args.budget:
                    continue
                # Two if the time of one is not known yet, then as many as half the budget allows.
                steps = args.steps
                if not isinstance(engine, Rollmesh):
                    steps = (
                        max(2, min(steps, int(args.budget / best[key] / 2))) if key in best else 2
                    )
                begin = time.perf_counter()
                seconds = engine.measure(point, steps)
                spent[key] = spent.get(key, 0.0) + time.perf_counter() - begin
                best[key] = min(seconds, best.get(key, seconds))
    return best


def row(
    shape: Shape,
    engine: Engine,
    point: Point,
    seconds: float,
    ours: Rollmesh,
    limits: machine.Limits,
) -> Row:
    phase, size = point
    if phase == "decode":
        rate = (
            shape.decode_elements(ours.experts_touched.get(size, 0.0))
            * engine.weight_bytes
            / seconds
            * 1e-9
        )
        fraction = rate / limits.read_gb_s
    else:
        rate = shape.prefill_flops(size) / seconds * 1e-9
        fraction = rate / limits.fma_gflop_s
    return Row(shape.name, engine.name, phase, size, seconds, size / seconds, rate, fraction)


def table(rows: list[Row]) -> str:
    """Markdown; the last column is the time of the engine over rollmesh's."""
    lines = [
        "| shape | phase | size | engine | ms | tokens/s | rate | of the limit | time / rollmesh |",
        "|---|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    ours = {(r.shape, r.phase, r.size): r.seconds for r in rows if r.engine == Rollmesh.name}
    for r in rows:
        unit = "GB/s" if r.phase == "decode" else "GFLOP/s"
        ratio = r.seconds / ours[r.shape, r.phase, r.size]
        lines.append(
            f"| {r.shape} | {r.phase} | {r.size} | {r.engine} | {1e3 * r.seconds:.1f} | "
            f"{r.tokens_per_s:.1f} "
            f"| {r.rate:.1f} {unit} | {r.fraction:.0%} | {ratio:.2f} |"
        )
    return "\n".join(lines)


def save(rows: list[Row], limits: machine.Limits, about: dict[str, str]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = (
        RESULTS / f"generate-{about['date']}-{'-'.join(about['processor'].lower().split()[:3])}.md"
    )
    path.with_suffix(".json").write_text(
        json.dumps(
            {"machine": about, "limits": asdict(limits), "rows": [asdict(r) for r in rows]},
            indent=1,
        )
        + "\n"
    )
    head = ", ".join(f"{key} {value}" for key, value in about.items())
    limit_line = (
        f"Limits measured in this run: read {limits.read_gb_s:.1f} GB/s, float32 FMA "
        f"{limits.fma_gflop_s:.0f} GFLOP/s."
    )
    path.write_text(f"# python -m benchmarks.generate\n\n{head}\n\n{limit_line}\n\n{table(rows)}\n")
    return path


def numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(word) for word in text.split(",") if word]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shapes", type=numbers(str), default=list(SHAPES), help=f"of {', '.join(SHAPES)}"
    )
    parser.add_argument(
        "--decode",
        type=numbers(whole(1)),
        default=[1, 8, 32, 64],
        help="sequences of the decode points",
    )
    parser.add_argument(
        "--prefill",
        type=numbers(whole(1)),
        default=[PREFILL_TOKENS],
        help="tokens of the prefill points",
    )
    parser.add_argument(
        "--peers",
        type=numbers(str),
        default=["bfloat16", "float32"],
        help="dtypes of transformers, or nothing",
    )
    parser.add_argument("--threads", type=whole(1, THREADS), default=usable_cores())
    parser.add_argument(
        "--steps", type=whole(1), default=16, help="decode steps of one measurement"
    )
    parser.add_argument("--rounds", type=whole(1), default=3)
    parser.add_argument(
        "--budget",
        type=real(0, 1e9),
        default=12.0,
        help="seconds after which a point of one engine is not repeated",
    )
    parser.add_argument("--no-save", action="store_true", help="print the table only")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    limits = machine.measure(args.threads)
    about = machine.describe() | {"torch": torch.__version__, "threads": str(args.threads)}
    print(
        f"limits: read {limits.read_gb_s:.1f} GB/s, float32 FMA {limits.fma_gflop_s:.0f} GFLOP/s, "
        f"{args.threads} threads"
    )
    points: list[Point] = [
        *(("decode", n) for n in args.decode),
        *(("prefill", n) for n in args.prefill),
    ]
    rows: list[Row] = []
    for name in args.shapes:
        rows += measure_shape(SHAPES[name], points, args, limits)
        gc.collect()
    print(table(rows))
    if not args.no_save:
        print(f"written: {save(rows, limits, about)}")


if __name__ == "__main__":
    main()
