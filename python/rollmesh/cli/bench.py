"""`rollmesh bench MODEL` measures decode and prefill of a model's shape with random weights, in
minutes for 0.6 B on two cores. `rollmesh bench --suite cpu`, in the root of a clone, prints the
table of benchmarks/cpu.py with the machine's limits and peers.

The first command gives an estimate. For measurements to quote use benchmarks/, which compares with
the machine's measured limits and with peers. Decode times include scheduling and sampling, since
whole `generate` calls are timed; the GB/s count the weights that the tokens of a step use, once per
step. Prefill counts 2 flops per weight and token, without attention. --profile prints the time of
each op, and how long threads waited for each other.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import timeit
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np

import rollmesh as rm
from rollmesh.cli.options import (
    add_engine,
    add_ignore,
    checkpoint_of,
    make_generator,
    read_model_config,
    read_spec,
    take_run_settings,
)
from rollmesh.cli.weights import random_weights
from rollmesh.model.sizes import Parameters, count_parameters
from rollmesh.runtime.messages import shown

DECODE_TOKENS = 32
SUITES = {"cpu": "benchmarks/cpu.py"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "checkpoint folder, config.json or a run's TOML: for its shape only"
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL", help=text)
    parser.add_argument(
        "--batch",
        type=int,
        nargs="+",
        default=[1, 8, 32],
        help="sequences that decode together (default: 1 8 32)",
    )
    parser.add_argument(
        "--prefill", type=int, default=512, help="tokens of the prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the random weights (default: %(default)s)"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="where the time of each point goes, by op (CPU only); takes a third longer",
    )
    add_engine(parser, "positions of a sequence; default: what is needed")
    add_ignore(parser)
    suite = "a whole table of benchmarks/ instead of MODEL; its options follow (--suite cpu --help)"
    parser.add_argument("--suite", nargs=argparse.REMAINDER, metavar="cpu …", help=suite)


def run(args: argparse.Namespace) -> int:
    if args.suite is not None:
        return _suite(args)
    if args.model is None:
        raise rm.ConfigError("expected MODEL or --suite, got neither")
    take_run_settings(args)
    spec = read_spec(args, read_model_config(checkpoint_of(args.model)))
    if args.prefill < 1 or min(args.batch) < 1:
        raise rm.ConfigError(
            f"--prefill {args.prefill} --batch {args.batch}: expected positive numbers"
        )
    dtype = args.dtype or "bfloat16"
    parameters = count_parameters(spec)
    length = args.max_model_len
    if length is None:
        length = max(args.prefill, 16 + DECODE_TOKENS) + 1
    with make_generator(
        args,
        spec,
        dtype,
        length,
        seed=args.seed,
        max_num_seqs=max(args.batch),
        enable_prefix_caching=False,
        profile=args.profile,
    ) as generator:
        report = generator.sync_weights(random_weights(generator, args.seed), cast=True)
        metrics = generator.metrics()
        where = metrics["isa"]
        if metrics["device"] != "cpu":
            where = f"{metrics['device']} ({metrics['isa']}, {metrics['family']})"
        counts = f"{parameters.total:,} parameters, {parameters.active:,} a token"
        print(f"{args.model}: {counts}, {dtype}, {where}, {metrics['threads']} threads")
        print(
            f"sync     {report.bytes / 1e9:8.3f} GB in {report.seconds:.3f} s "
            f"({report.gb_per_s:.2f} GB/s while copying)"
        )
        _prefill(generator, args.prefill, parameters, args.profile)
        for batch in args.batch:
            _decode(generator, batch, parameters, 2 if dtype == "bfloat16" else 4, args.profile)
    return 0


def _suite(args: argparse.Namespace) -> int:
    """Runs the module of the clone in the working folder, which compiles its own sources and prints
    the commit."""
    name, *options = args.suite or [""]
    if name not in SUITES:
        raise rm.ConfigError(f"--suite: expected {', '.join(SUITES)}, got {shown(name)}")
    alone = argparse.ArgumentParser()
    add_arguments(alone)
    if alone.parse_args(["--suite", *args.suite], argparse.Namespace(command="bench")) != args:
        raise rm.ConfigError(f"--suite {name}: expected no MODEL, and its options after it")
    file = SUITES[name]
    if not Path(file).is_file():
        raise rm.ConfigError(
            f"--suite {name}: expected {file} here, got {Path.cwd()}; run it in the root of "
            "a clone of rollmesh"
        )
    module = file.removesuffix(".py").replace("/", ".")
    return subprocess.call([sys.executable, "-m", module, *options])


def _prefill(generator: rm.Generator, length: int, parameters: Parameters, profile: bool) -> None:
    ids = np.random.default_rng(0).integers(0, generator.spec.vocab_size, length).tolist()
    params = rm.SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)

    def call() -> object:
        return generator.generate([ids], params, use_tqdm=False)

    seconds = _best_of(call)
    flops = 2 * parameters.active_body * length
    print(
        f"prefill  {length / seconds:8,.0f} tokens/s  {flops / seconds / 1e9:8.1f} GFLOP/s  "
        f"({length} tokens)"
    )
    if profile:
        _show(_times(generator, call), 1)


def _decode(
    generator: rm.Generator, batch: int, parameters: Parameters, bytes_each: int, profile: bool
) -> None:
    """Measures the time of DECODE_TOKENS tokens: a long generate minus a short one, so that the
    prefill cancels."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, generator.spec.vocab_size, 16).tolist() for _ in range(batch)]

    def call(tokens: int) -> Callable[[], object]:
        params = rm.SamplingParams(max_tokens=tokens, ignore_eos=True, seed=0)
        return lambda: generator.generate(prompts, params, use_tqdm=False)

    step = max((_best_of(call(DECODE_TOKENS)) - _best_of(call(1))) / (DECODE_TOKENS - 1), 1e-9)
    read = parameters.read_by(batch) * bytes_each
    together = f"{batch} sequence{'' if batch == 1 else 's'}"
    print(
        f"decode   {batch / step:8,.0f} tokens/s  {read / step / 1e9:8.1f} GB/s  ({together}, "
        f"{step * 1e3:.2f} ms a step)"
    )
    if not profile:
        return
    long, short = _times(generator, call(DECODE_TOKENS)), _times(generator, call(1))
    _show(
        defaultdict(float, {key: long[key] - short[key] for key in list(long)}), DECODE_TOKENS - 1
    )


Times = defaultdict[tuple[str, str], float]  # (op, "seconds" | "waited" | "flops" | "bytes") → sum


def _times(generator: rm.Generator, call: Callable[[], object]) -> Times:
    """Returns the times of one call by op, for a generator with a profile."""
    before = generator.metrics()
    generator.profile()
    start = time.perf_counter()
    call()
    wall = time.perf_counter() - start
    ops, after = generator.profile(), generator.metrics()
    times: Times = defaultdict(float)
    for op in ops:
        name = f"{op['op']} {op['n']}×{op['k']}" if op["n"] else op["op"]
        times[name, "seconds"] += op["seconds"]
        times[name, "waited"] += op["waited"]
        times[name, "flops"] += op["flops"]
        times[name, "bytes"] += op["weight_bytes"]
    forward, schedule, commit = (
        after[f"{part}_seconds"] - before[f"{part}_seconds"]
        for part in ("forward", "schedule", "commit")
    )
    times["between ops", "seconds"] = forward - sum(op["seconds"] for op in ops)
    times["schedule, commit", "seconds"] = schedule + commit
    times["Python", "seconds"] = wall - forward - schedule - commit
    return times


def _show(times: Times, steps: int) -> None:
    total = sum(value for (_, unit), value in times.items() if unit == "seconds")
    for name in sorted({name for name, _ in times}, key=lambda name: -times[name, "seconds"]):
        seconds, rates = times[name, "seconds"], []
        for unit, label in (("flops", "GFLOP/s"), ("bytes", "GB/s")):
            if times[name, unit] > 0 and seconds > 0:
                rates.append(f"{times[name, unit] / seconds / 1e9:8.1f} {label}")
        if times[name, "waited"] > 0 and seconds > 0:
            rates.append(f"{times[name, 'waited'] / seconds:4.0%} waiting")
        print(
            f"    {seconds / total:6.1%}  {seconds / steps * 1e3:9.3f} ms  {name:28} "
            f"{'  '.join(rates)}".rstrip()
        )


def _best_of(call: Callable[[], object]) -> float:
    return min(timeit.repeat(call, number=1, repeat=3))
