"""A GPU beside its own limits.  python -m benchmarks.gpu [PART …]

    limits     rates of memory reads, copies, puts and gets; cuBLAS' bf16 rate through torch, if
               torch is installed
    decode     a step of 1 … sequences, each at a separate, cached context: bytes of weights and KV
               that a step must read over its time, as a share of the rate of a kernel that only
               reads. For a MoE only the chosen experts count
    bits       the tokens and logprobs of a sequence alone and among up to --company others of
               other lengths: the number that differ
    prefill    one uncached prompt, to its first token: operations over time, as a share of cuBLAS'
               rate
    sync       a state dict of the device, beside a copy on the device; a state dict of the host,
               beside a copy of pinned memory
    start      a process from its start to its first token, stage by stage
    gemm       the dense gemms of a layer by cuBLASLt, if it is installed: whether a pinned
               algorithm gives a row the same bits in calls of 1 … 1024 rows, and its time beside
               the family cuda_mma's (gpu_gemm.py)
    ops        every op of an 8B and a 30B-A3B model one by one (tests/gpu/simt/bench_mma.cu), and
               torch's matmul beside the large gemms

Without names all parts run, in that order. Limits are measured in the same run, or with --limits
FILE in the first of several runs. A copy on the device is measured again beside every round of
decode and sync, and the best of a point's rounds counts, because other work can only slow a round
down. A point that has used up its --budget is not repeated. The results are written after each
part, so an interrupt loses at most one part.

Needs the library for GPUs beside the extension, and a GPU. With --smoke the simulated device of the
tests is enough, at sizes whose figures are meaningless. Run `python tests/support/cuda_build.py
gpu` first: it builds the programs that measure `ops` and the limit of reading."""

from __future__ import annotations

import argparse
import ast
import gc
import inspect
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import rollmesh as rm
from benchmarks import gpu_gemm
from benchmarks.card import (
    BUILT,
    Card,
    DeviceWeights,
    Limits,
    host_weights,
    open_card,
    said,
    torch_gemm,
)
from benchmarks.machine import ROOT
from benchmarks.options import real, whole
from benchmarks.shapes import BF16_BYTES, CARD_SHAPES, SMOKE_SHAPES, Shape
from rollmesh.runtime import cublas

PAGE = 16
FAMILIES = ("cuda_fma", "cuda_mma")
PARTS = ("limits", "decode", "bits", "prefill", "sync", "start", "gemm", "ops")
# Options that a part sets itself.
OWN = (
    "spec",
    "device",
    "isa",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "kv_cache_gib",
)
RESULTS = Path(__file__).with_name("results")


@dataclass
class Row:
    """One figure. `share` is its share of `limit`, both in `unit`; None without a limit."""

    part: str
    what: str
    family: str
    seconds: float
    rate: float | None
    unit: str
    limit: float | None

    @property
    def share(self) -> float | None:
        return self.rate / self.limit if self.rate and self.limit else None

    def line(self) -> str:
        rate = "" if self.rate is None else f"{self.rate:10.1f} {self.unit}"
        share = "" if self.share is None else f"{self.share:6.1%} of {self.limit:.0f}"
        return (
            f"  {self.part:8s} {self.what:44s} {self.family:9s} {1e3 * self.seconds:11.3f} ms "
            f"{rate:18s} {share}"
        )


class Run:
    """Shared by all parts: the card, its limits, the options, and the rows so far, which are
    written to the file after each part."""

    def __init__(self, card: Card, limits: Limits, options: argparse.Namespace):
        self.card, self.limits, self.options = card, limits, options
        self.rows: list[Row] = []
        self.differing = 0  # of what `bits` has compared

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(row.line(), flush=True)

    def best(self, measure: Callable[[], float]) -> float:
        """Returns the minimum of --rounds, or of as many rounds as begin within --budget
        seconds."""
        begin, found = time.perf_counter(), [measure()]
        while (
            len(found) < self.options.rounds and time.perf_counter() - begin < self.options.budget
        ):
            found.append(measure())
        return min(found)

    def save(self, path: Path) -> None:
        about = self.card.about() | {"options": " ".join(sys.argv[1:])}
        rows = [asdict(row) | {"share": row.share} for row in self.rows]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({"machine": about, "limits": asdict(self.limits), "rows": rows}, indent=1)
            + "\n"
        )


# ---------------------------------------------------------------------------- a model on the card
class Served:
    """A generator of `shape` with weights that were made on the card; closed by `with`."""

    def __init__(self, run: Run, shape: Shape, family: str, sequences: int, length: int):
        self.run, self.shape = run, shape
        positions = sequences * (length + 2 * PAGE)
        self.generator = rm.Generator(
            shape.spec,
            device="cuda",
            isa=family,
            max_num_seqs=sequences,
            max_num_batched_tokens=max(length, sequences),
            block_size=PAGE,
            kv_cache_gib=positions * shape.kv_elements * BF16_BYTES / 2**30 * 1.1,
            **{"max_model_len": length + PAGE} | run.options.set,
        )
        weights = DeviceWeights(run.card, self.generator.manifest())
        self.generator.sync_weights(weights.tensors)
        weights.drop()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *ignored: object) -> None:
        self.generator.close()
        gc.collect()


def decode_step(
    served: Served, rng: np.random.Generator, sequences: int, context: int, steps: int
) -> tuple[float, float]:
    """Seconds of a step, and the different experts that it chose, summed over the layers."""
    generator, shape = served.generator, served.shape
    prompts = [
        rng.integers(0, shape.spec.vocab_size, context + 1, dtype=np.int32)
        for _ in range(sequences)
    ]
    generator.generate(prompts, rm.SamplingParams(max_tokens=1), use_tqdm=False)
    before = generator.metrics()["steps"]
    begin = time.perf_counter()
    outputs = generator.generate(
        prompts, rm.SamplingParams(max_tokens=steps, ignore_eos=True, seed=7), use_tqdm=False
    )
    seconds = time.perf_counter() - begin
    n_steps = generator.metrics()["steps"] - before
    if n_steps != steps or any(output.num_cached_tokens != context for output in outputs):
        raise SystemExit(
            f"benchmarks.gpu: {n_steps} steps, not {steps} of pure decode: prompts were not "
            "cached, or the batch was split"
        )
    touched = 0.0
    if shape.spec.num_experts:
        # [sequences, steps, layers, k]
        chosen = np.stack([output.outputs[0].routed_experts[context:] for output in outputs])
        sets = [
            np.unique(chosen[:, step, layer]).size
            for step in range(chosen.shape[1])
            for layer in range(chosen.shape[2])
        ]
        touched = sum(sets) / chosen.shape[1]
    return seconds / steps, touched


def decode(run: Run) -> None:
    options = run.options
    for shape, family in pairs(options):
        sizes = [n for n in options.sequences if n <= options.most.get(shape.name, n)]
        length = options.context + 1 + options.steps
        with Served(run, shape, family, max(sizes), length) as served:
            for n in sizes:
                rng, touched, copies = np.random.default_rng(n), [0.0], [run.limits.copy_gb_s]

                def measure(
                    n: int = n,
                    served: Served = served,
                    rng: Any = rng,
                    touched: Any = touched,
                    copies: Any = copies,
                ) -> float:
                    copies.append(run.card.copy_rate(options.bytes, 2))
                    seconds, touched[0] = decode_step(
                        served, rng, n, options.context, options.steps
                    )
                    return seconds

                seconds = run.best(measure)
                positions = n * (options.context + 1 + options.steps / 2)
                elements = (
                    served.shape.decode_elements(touched[0]) + positions * served.shape.kv_elements
                )
                limit = max(
                    run.limits.memory_gb_s, 2 * max(copies) if run.limits.read_gb_s is None else 0.0
                )
                what = f"{shape.label} sequences={n} context={options.context}"
                run.add(
                    Row(
                        "decode",
                        what,
                        family,
                        seconds,
                        elements * BF16_BYTES / seconds * 1e-9,
                        "GB/s",
                        limit,
                    )
                )


def bits(run: Run) -> None:
    """Bound: zero differing bits. The other sequences have every length up to four pages, so that
    they also change the contents of a step's chunks."""
    if run.options.set.get("fast"):
        raise SystemExit(
            "benchmarks.gpu: bits with fast=True, which promises none: `gemm` says what cuBLASLt "
            "keeps"
        )
    for shape, family in pairs(run.options):
        rng, most, length = np.random.default_rng(5), max(run.options.company), 6 * PAGE
        prompts = [
            rng.integers(0, shape.spec.vocab_size, int(rng.integers(1, 4 * PAGE)), dtype=np.int32)
            for _ in range(most)
        ]
        params = [rm.SamplingParams(max_tokens=PAGE, ignore_eos=True, seed=i) for i in range(most)]
        with Served(run, shape, family, most, length) as served:
            alone = [drawn(served, [prompts[i]], [params[i]])[0] for i in range(min(most, 4))]
            for n in run.options.company:
                begin = time.perf_counter()
                among = drawn(served, prompts[:n], params[:n])
                differing = sum(
                    int(np.count_nonzero(a != b))
                    for one, other in zip(alone, among)
                    for a, b in zip(one, other)
                )
                what = f"{shape.label} sequences={n}: {differing} differ"
                run.add(Row("bits", what, family, time.perf_counter() - begin, None, "", None))
                run.differing += differing


def drawn(
    served: Served, prompts: list[Any], params: list[rm.SamplingParams]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the tokens of each prompt, and its logprobs as words. The cache is empty."""
    served.generator.reset_prefix_cache()
    outputs = [
        output.outputs[0] for output in served.generator.generate(prompts, params, use_tqdm=False)
    ]
    return [
        (np.asarray(o.token_ids), np.asarray(o.logprobs, np.float32).view(np.uint32))
        for o in outputs
    ]


def prefill(run: Run) -> None:
    options, rng = run.options, np.random.default_rng(3)
    for shape, family in pairs(options):
        with Served(run, shape, family, 1, max(options.prefill)) as served:
            for tokens in options.prefill:

                def measure(tokens: int = tokens, served: Served = served) -> float:
                    prompt = rng.integers(0, served.shape.spec.vocab_size, tokens, dtype=np.int32)
                    begin = time.perf_counter()
                    served.generator.generate(
                        [prompt],
                        rm.SamplingParams(max_tokens=1, ignore_eos=True, seed=7),
                        use_tqdm=False,
                    )
                    return time.perf_counter() - begin

                measure()  # the first one loads the kernels
                seconds = run.best(measure)
                what = f"{shape.label} tokens={tokens}: {tokens / seconds:.0f} tokens/s"
                rate = shape.prefill_flops(tokens) / seconds * 1e-9
                run.add(
                    Row("prefill", what, family, seconds, rate, "GFLOP/s", run.limits.gemm_gflop_s)
                )


# ---------------------------------------------------------------------------------------- weights
def sync(run: Run) -> None:
    """From the third sync on both the serving and the staging block exist; the best of those syncs
    counts."""
    for shape, family in pairs(run.options):
        spec = shape.spec
        settings = {"max_model_len": 64, "kv_cache_gib": 0.1} | run.options.set
        with rm.Generator(spec, device="cuda", isa=family, **settings) as generator:
            manifest = generator.manifest()
            weights = DeviceWeights(run.card, manifest)
            seconds, copies = sync_times(run, generator, weights.tensors)
            weights.drop()
            what = f"{shape.label} {weights.bytes / 1e9:.2f} GB of the device"
            run.add(
                Row(
                    "sync",
                    what,
                    family,
                    seconds,
                    weights.bytes / seconds * 1e-9,
                    "GB/s",
                    max(copies),
                )
            )
            if weights.bytes > run.options.host_bytes:
                continue
            seconds, _ = sync_times(run, generator, host_weights(manifest))
            what = f"{shape.label} {weights.bytes / 1e9:.2f} GB of the host, not pinned"
            run.add(
                Row(
                    "sync",
                    what,
                    family,
                    seconds,
                    weights.bytes / seconds * 1e-9,
                    "GB/s",
                    run.limits.put_gb_s,
                )
            )


def sync_times(
    run: Run, generator: rm.Generator, tensors: dict[str, Any]
) -> tuple[float, list[float]]:
    copies = [run.limits.copy_gb_s]

    def measure() -> float:
        copies.append(run.card.copy_rate(run.options.bytes, 2))
        begin = time.perf_counter()
        generator.sync_weights(tensors)
        return time.perf_counter() - begin

    for _ in range(2):
        measure()
    return run.best(measure), copies


def start(run: Run) -> None:
    for shape, family in pairs(run.options):
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu",
            "first",
            "--shapes",
            shape.name,
            "--families",
            family,
        ]
        command += [
            "--layers",
            f"{shape.name}={shape.spec.num_hidden_layers}",
            *(["--smoke"] if run.options.smoke else []),
        ]
        for name, value in run.options.set.items():
            command += ["--set", f"{name}={value!r}"]
        began = time.time()
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"benchmarks.gpu: the child process ended with {done.returncode}")
        stages = json.loads(done.stdout)
        made = stages.pop("made")
        times = {name: at - began for name, at in stages.items()}
        told = ", ".join(f"{name} {at:.2f} s" for name, at in times.items())
        what = f"{shape.label}, without {made:.2f} s of making weights"
        run.add(Row("start", what, family, times["token"] - made, None, "", None))
        print(f"           {told}", flush=True)


def first(card: Card, options: argparse.Namespace) -> None:
    """In the other process: returns when each stage was reached, and how long its weights took to
    make."""
    shape, family = pairs(options)[0]
    stages = {"imported": time.time()}
    spec = shape.spec
    settings = {"max_model_len": 256, "kv_cache_gib": 0.1} | options.set
    generator = rm.Generator(spec, device="cuda", isa=family, **settings)
    stages["created"] = time.time()
    weights = DeviceWeights(card, generator.manifest())
    made = time.time() - stages["created"]
    generator.sync_weights(weights.tensors)
    stages["synced"] = time.time()
    generator.generate([[1, 2, 3]], rm.SamplingParams(max_tokens=1), use_tqdm=False)
    stages["token"] = time.time()
    weights.drop()
    generator.close()
    print(json.dumps(stages | {"made": made}))


# ------------------------------------------------------------------------------------------- gemm
def gemm(run: Run) -> None:
    """Does not depend on the families: the family is the peer."""
    try:
        print(f"  gemm     cuBLASLt {cublas.find()}", flush=True)
    except rm.ConfigError as error:
        print(f"  gemm     not measured: {error}")
        return
    for shape in dict.fromkeys(shape for shape, _ in pairs(run.options)):
        begin = time.perf_counter()
        found = gpu_gemm.findings(run.card, shape, run.options.gemm_rows, run.options.gemm_timed)
        peers = {one.name: one.seconds for one in found if not one.tried}
        for one in found:
            wide = 2 if one.shape.swiglu else 1
            what = f"{shape.name} {one.name} n={wide * one.shape.n} k={one.shape.k}"
            if one.tried:
                verdict = f"{one.differing} of {one.tried} numbers of rows differ"
                run.add(
                    Row(
                        "gemm",
                        f"{what}: {verdict}",
                        one.choice,
                        time.perf_counter() - begin,
                        None,
                        "",
                        None,
                    )
                )
            for rows, seconds in one.seconds.items():
                flops = 2e-9 * rows * wide * one.shape.n * one.shape.k
                limit = flops / peers[one.name][rows] if one.tried else None
                run.add(
                    Row(
                        "gemm",
                        f"{what} rows={rows}",
                        one.choice,
                        seconds,
                        flops / seconds,
                        "GFLOP/s",
                        limit,
                    )
                )


# -------------------------------------------------------------------------------------------- ops
OP = re.compile(
    r"(?P<what>.+?)\s+(?P<us>[\d.]+) us\s+(?P<gb>\d+) GB/s\s+[\d.]+ % of "
    r"reading\s+(?P<tflop>[\d.]+) TFLOP/s"
)
GEMM = re.compile(r"8B (?P<name>\w+) rows=(?P<m>\d+) n=(?P<n>\d+) k=(?P<k>\d+) ")


def ops(run: Run) -> None:
    program = run.options.built / "bench_mma"
    if run.card.is_simulated or not program.exists():
        print(
            f"  ops      not measured: needs a GPU and {program}, which python "
            "tests/support/cuda_build.py gpu makes"
        )
        return
    for family in run.options.families:
        for line in said([str(program), family.removeprefix("cuda_")]).splitlines():
            found = OP.match(line)
            if not found:
                print(line)
                continue
            what, seconds, tflop = found["what"], float(found["us"]) * 1e-6, float(found["tflop"])
            gemm_op = GEMM.match(what + " ")
            if gemm_op is None or int(gemm_op["m"]) < 64:
                run.add(
                    Row(
                        "ops",
                        what,
                        family,
                        seconds,
                        float(found["gb"]),
                        "GB/s",
                        run.limits.memory_gb_s,
                    )
                )
                continue
            wide = 2 if gemm_op["name"] == "gate_up" else 1
            peer = torch_gemm(int(gemm_op["m"]), wide * int(gemm_op["n"]), int(gemm_op["k"]))
            theirs = None if peer is None else 1e3 * tflop * seconds / peer
            run.add(Row("ops", what, family, seconds, 1e3 * tflop, "GFLOP/s", theirs))


# ------------------------------------------------------------------------------------ the command
def pairs(options: argparse.Namespace) -> list[tuple[Shape, str]]:
    shapes = SMOKE_SHAPES if options.smoke else CARD_SHAPES
    chosen = [
        shapes[name].with_layers(options.layers.get(name, shapes[name].spec.num_hidden_layers))
        for name in options.shapes or shapes
    ]
    return [(shape, family) for shape in chosen for family in options.families]


def words(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        found = text.split(",")
        for word in found:
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"{word[:40]!r} is none of {', '.join(allowed)}")
        return found

    return read


def numbers(least: int) -> Callable[[str], list[int]]:
    return lambda text: [whole(least)(word) for word in text.split(",")]


def counts(text: str) -> dict[str, int]:
    """dense-8b=4,moe-30b-a3b=2"""
    found = {}
    for word in text.split(","):
        name, _, count = word.partition("=")
        if name not in CARD_SHAPES | SMOKE_SHAPES:
            raise argparse.ArgumentTypeError(
                f"{name[:40]!r} is none of {', '.join(CARD_SHAPES | SMOKE_SHAPES)}"
            )
        found[name] = whole(1)(count)
    return found


def setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE, with the value as a Python literal."""
    name, equals, value = text.partition("=")
    try:
        if not name.isidentifier() or not equals:
            raise ValueError
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not NAME=VALUE with a value of Python"
        ) from None


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="tiny shapes and few steps, also on the simulated device",
    )
    parser.add_argument(
        "--shapes", type=words((*CARD_SHAPES, *SMOKE_SHAPES)), help=f"of {', '.join(CARD_SHAPES)}"
    )
    parser.add_argument(
        "--layers", type=counts, default={}, help="SHAPE=N,…: not as many as the shape has"
    )
    parser.add_argument(
        "--families", type=words(FAMILIES), default=list(FAMILIES), help=f"of {', '.join(FAMILIES)}"
    )
    parser.add_argument(
        "--sequences", type=numbers(1), default=[1, 2, 4, 8, 16, 64], help="of the points of decode"
    )
    parser.add_argument(
        "--most",
        type=counts,
        default={"dense-8b": 16},
        help="SHAPE=N,…: no more sequences than these",
    )
    parser.add_argument(
        "--context",
        type=whole(PAGE),
        default=512,
        help="positions before a step, cached; whole pages of 16",
    )
    parser.add_argument("--steps", type=whole(1), default=64, help="of one measurement of decode")
    parser.add_argument(
        "--company",
        type=numbers(1),
        default=[1, 2, 7, 64, 1024],
        help="sequences of the points of bits",
    )
    parser.add_argument(
        "--prefill", type=numbers(1), default=[512, 4096], help="tokens of the points of prefill"
    )
    parser.add_argument(
        "--gemm-rows",
        type=numbers(1),
        default=list(range(1, 1025)),
        help="of the calls of gemms that are compared",
    )
    parser.add_argument(
        "--gemm-timed",
        type=numbers(1),
        default=[1, 16, 64, 256, 1024],
        help="of those that are timed",
    )
    parser.add_argument("--rounds", type=whole(1), default=5)
    parser.add_argument(
        "--budget",
        type=real(0, 1e6),
        default=4.0,
        help="seconds after which a point is not repeated",
    )
    parser.add_argument(
        "--bytes",
        type=whole(1 << 10),
        default=1 << 30,
        help="of one copy that bandwidth is measured with",
    )
    parser.add_argument(
        "--host-bytes",
        type=whole(0, 1 << 40),
        default=4 << 30,
        help="larger state dicts are not synced from the host",
    )
    parser.add_argument(
        "--set",
        type=setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of rm.Generator",
    )
    parser.add_argument(
        "--built", type=Path, default=BUILT, help="what tests/support/cuda_build.py gpu has built"
    )
    parser.add_argument(
        "--limits",
        type=Path,
        metavar="FILE",
        help="read the limits from it if it is there; else measure them and write it",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="of the results, JSON (benchmarks/results/gpu-DATE-CARD.json; with --smoke none)",
    )
    options = parser.parse_args()
    options.set = dict(options.set)
    settable = inspect.signature(rm.Generator).parameters.keys() - set(OWN)
    if unknown := sorted(options.set.keys() - settable):
        parser.error(
            f"--set {unknown[0][:40]}: wanted an option of rm.Generator that no part sets itself: "
            f"{', '.join(sorted(settable))}"
        )
    if wrong := [
        part for part in options.parts if part not in PARTS and options.parts != ["first"]
    ]:
        parser.error(f"{wrong[0][:40]!r} is none of {', '.join(PARTS)}")
    if options.context % PAGE:
        parser.error(f"--context: expected a multiple of {PAGE}, got {options.context}")
    if options.smoke:
        options.sequences, options.context, options.steps, options.rounds = [1, 2], PAGE, 3, 1
        options.prefill, options.bytes, options.company = [20], 1 << 16, [1, 3]
        options.gemm_rows, options.gemm_timed = list(range(1, 8)), [1, 7]
    return options


def limits_of(card: Card, options: argparse.Namespace) -> Limits:
    """Measures the card's limits, or reads them from --limits if an earlier call wrote them."""
    path = options.limits
    if path and path.exists():
        return Limits(**json.loads(path.read_text()))
    found = card.limits(options.bytes, options.built)
    if path:
        path.write_text(json.dumps(asdict(found)) + "\n")
    return found


def main() -> None:
    options = parsed()
    with open_card() as card:
        if options.parts == ["first"]:
            first(card, options)
            return
        if card.is_simulated and not options.smoke:
            raise SystemExit(
                "benchmarks.gpu: the simulated device has no speed; --smoke runs everything on it "
                "once"
            )
        about, limits = card.about(), limits_of(card, options)
        print("\n".join(f"{key:12s} {value}" for key, value in about.items()))
        print(
            "\n".join(
                f"{key:12s} {value:.1f}"
                for key, value in asdict(limits).items()
                if isinstance(value, float)
            )
        )
        print("\n".join(f"not measured: {line}" for line in limits.missing), flush=True)
        slug = "-".join(about["card"].lower().split())
        path = options.out or (
            None if options.smoke else RESULTS / f"gpu-{about['date']}-{slug}.json"
        )
        run = Run(card, limits, options)
        for part in options.parts or PARTS:
            if part != "limits":
                calls = (decode, bits, prefill, sync, start, gemm, ops)
                dict(zip(PARTS[1:], calls, strict=True))[part](run)
            if path:
                run.save(path)
    if path:
        print(f"written: {path}")
    if run.differing:
        raise SystemExit(
            f"benchmarks.gpu: {run.differing} tokens and logprobs depend on the company of their "
            "sequence"
        )


if __name__ == "__main__":
    main()
