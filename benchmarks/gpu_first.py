"""The first hour on a GPU.  python -m benchmarks.gpu_first --to DIR [--within SECONDS]

Builds for the installed card, then runs, part by part, the checks that need a GPU: the kernels'
bits against the reference, the order of the tensor cores' sums, the tests of the device and of the
engine on it, the figures of benchmarks.gpu, and a memory checker. The most informative parts for
their time come first. Each part is a process with a separate time limit and a separate log in DIR.
DIR/state.json and DIR/report.txt, which has the end of every log, are written after each part, so
an interrupt loses at most one part.

When it is called again with the same DIR it continues with the first unfinished part; parts that
failed are not repeated unless --again names them. --within: a part is skipped if less than a fourth
of its limit is left, and the last part is cut off; so

    python -m benchmarks.gpu_first --to build/gpu --within 560

three times is half an hour. The exit status is 0 if all parts have passed or lacked a tool that
they need, 1 if a part has failed, and 3 if parts are left. Without a GPU, --plan prints the parts,
and --results collects the figures in one file, also from a copied folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.options import SEEDS, real, whole

OPS = (
    "gemm",
    "gemm_swiglu",
    "attention",
    "qk_rope_kv",
    "lm_head",
    "rms_norm",
    "router",
    "permute",
    "static_dispatch",
    "combine",
)
OPS += (
    "sample",
    "embed",
    "gather_rows",
    "activate",
    "head_squares",
    "merge_pairs",
    "top_logprobs",
    "ranks",
    "pack",
)
MMA_OPS = (
    "gemm",
    "gemm_swiglu",
    "attention",
    "lm_head",
    "qk_rope_kv",
    "router",
    "embed",
    "pack",
)
TILES = tuple(
    f"mma_tile{i}" for i in range(4)
)  # families of checkops: the tiles of cuda_mma's gemm
RESULTS = Path(__file__).with_name("results")
TAIL = 6000  # characters of a log in the report
PYTEST = ["-m", "pytest", "-p", "no:cacheprovider", "-W", "default", "-q", "--durations=8"]
ABSENT = 77  # status of a part that lacks a tool
ENDED = ("passed", "failed", "absent")


@dataclass(frozen=True)
class Part:
    """A part. `words` are for sh, with $DIR, $PYTHON and $SEED."""

    name: str
    limit: int  # seconds
    words: str
    needs: str = ""  # a part that must have passed
    # a file below DIR without which it has not: the folder may have come without what was built in
    # it
    makes: str = ""

    def command(self) -> list[str]:
        return ["sh", "-c", self.words]


def python(*words: str) -> str:
    return " ".join(('"$PYTHON"', *words))


def asked(module: str, words: str) -> str:
    """Returns a command that marks a part as absent if something that it needs is missing; other
    errors are defects."""
    absent = f"except rollmesh.ConfigError as e: print(e); sys.exit({ABSENT})"
    return (
        python(f"-c 'import sys, rollmesh\nfrom rollmesh import {module}\ntry: {words}\n{absent}'")
        + " || exit $?; "
    )


def with_cublas(words: str) -> str:
    return asked("cublas", "print(cublas.find())") + words


def strict(words: str) -> str:
    """Returns a command that builds with warnings as errors, and once more without if an untested
    compiler warns: the warning is printed, but does not fail the part."""
    return (
        f"ROLLMESH_WERROR=1 {words} || {{ echo 'with ROLLMESH_WERROR=1: see above; now with "
        f"0'; ROLLMESH_WERROR=0 {words}; }}"
    )


def pytest(*words: str) -> str:
    return python(*PYTEST, *words)


def figures(name: str, *words: str) -> str:
    return python("-m benchmarks.gpu", *words, '--built "$DIR"', f'--out "$DIR/{name}.json"')


def checks(ops: tuple[str, ...], family: str, *, touch: bool = False, before: str = "") -> str:
    """Returns a command that runs all checks, whatever the first returns; the part passes if all
    pass."""
    words = f'{before}"$DIR/checkops_gpu" --op "$op" --isa "cuda_$f" --seed "$SEED" --trials 40'
    words += " --touch" if touch else ""
    loops = [(ops, (family,))]
    if family == "mma":
        loops.append((("gemm", "gemm_swiglu"), TILES))
    lines = ["bad=0"]
    for names, families in loops:
        lines.append(
            f"for op in {' '.join(names)}; do for f in {' '.join(families)}; do "
            f'printf "%s " "$op" "$f"; {words} || bad=1; done; done'
        )
    if family == "mma" and not touch:
        lines.append('"$DIR/check_gpu" mma_company "$SEED" || bad=1')
    return "; ".join([*lines, "exit $bad"])


def sanitized(tool: str, ops: tuple[str, ...], family: str) -> str:
    missing = (
        f'command -v compute-sanitizer >/dev/null || {{ echo "no compute-sanitizer here"; '
        f"exit {ABSENT}; }}; "
    )
    return missing + checks(
        ops,
        family,
        touch=True,
        before=f"compute-sanitizer --tool {tool} --error-exitcode 9 --print-limit 5 ",
    )


def shared_gpu(words: str) -> str:
    """Returns a command for parts with several ranks on one GPU, if a suitable NCCL is installed. A
    kernel that waits for another rank's kernel must leave it room and a hardware queue, and must
    not load anything."""
    settings = "export CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER NCCL_MAX_CTAS=4; "
    found = asked(
        "nccl",
        f"found = nccl.find(); print(found); sys.exit({ABSENT} * (found.version < "
        "nccl.SHARES_GPU))",
    )
    return found + settings + words


def parts() -> list[Part]:
    build = strict(
        'ROLLMESH_CUDA=1 "$PYTHON" setup.py -q build --build-lib "$DIR/lib" --build-temp '
        '"$DIR/cuda"'
    )
    grpo = 'rm -rf "$DIR/grpo"; ' + python(
        '-m rollmesh grpo configs/qwen3_debug.toml --device cuda --out "$DIR/grpo" --set '
        "train.steps=20"
    )
    machine = python(
        "-m pip list; compute-sanitizer --version; nvcc --version; uname -a; nproc; free -g; "
        "nvidia-smi"
    )
    meshes = ("tests/gpu/test_nccl_engine.py", "tests/gpu/test_nccl_replicas.py")
    torch_sees_it = (
        python("-c 'import sys, torch; sys.exit(not torch.cuda.is_available())'")
        + f" || exit {ABSENT}"
    )
    mma, fma = "--families cuda_mma", "--families cuda_fma"
    fast = f"{mma} --set fast=True"
    return [
        Part("machine", 60, machine),
        Part("build", 300, build, "", "lib/rollmesh/librollmesh_cuda.so"),
        Part("programs", 300, strict(python("tests/support/cuda_build.py gpu", '--into "$DIR"')),
        "build", "checkops_gpu"),
        Part("probe", 30, '"$DIR/probe_mma"', "programs"),
        Part("wgmma", 40, '"$DIR/bench_wgmma"', "programs"),
        Part("check-fma", 120, checks(OPS, "fma"), "programs"),
        Part("check-mma", 200, checks(MMA_OPS, "mma"), "programs"),
        Part("test-device", 150, pytest("tests/gpu/test_cuda_device.py",
                                        "tests/gpu/test_cuda_device_faults.py",
                                        "tests/gpu/test_cuda_captures.py"), "build"),
        Part("decode-8b", 150, figures("decode-8b", "limits decode --shapes dense-8b "
                                                    f"{mma}"), "programs"),
        Part("test-engine", 240, pytest("tests/gpu/test_cuda_engine.py",
                                        "tests/gpu/test_cuda_graphs.py"), "build"),
        Part("ops-mma", 120, figures("ops-mma", f"ops {mma}"), "programs"),
        Part("decode-others", 200, figures("decode-others", "decode --shapes "
                                                            "dense-0.6b,moe-30b-a3b "
                                                            f"{mma}"), "programs"),
        Part("bits", 120, figures("bits", "bits --shapes dense-0.6b"), "build"),
        Part("prefill", 150, figures("prefill", f"prefill {mma}"), "programs"),
        Part("test-parity", 240, "RM_TEST_DEVICE=cuda "
                                 "RM_TEST_ISA=cuda_mma " + pytest("tests/model/test_parity.py",
                                 "-k bfloat16"), "build"),
        Part("grpo", 150, grpo, "build"),
        Part("sync-start", 240, figures("sync-start", f"sync start {mma} --shapes "
                                                      "dense-8b,dense-0.6b"), "programs"),
        Part("memcheck-mma", 200, sanitized("memcheck", MMA_OPS, "mma"), "programs"),
        Part("memcheck-fma", 200, sanitized("memcheck", OPS, "fma"), "programs"),
        Part("racecheck-mma", 240, sanitized("racecheck", MMA_OPS, "mma"), "programs"),
        Part("decode-fma", 200, figures("decode-fma", f"decode prefill --prefill 512 {fma} "
                                                      "--shapes dense-8b,moe-30b-a3b"), "programs"),
        Part("ops-fma", 180, figures("ops-fma", f"ops {fma}"), "programs"),
        Part("racecheck-fma", 240, sanitized("racecheck", OPS, "fma"), "programs"),
        Part("synccheck-mma", 150, sanitized("synccheck", MMA_OPS, "mma"), "programs"),
        Part("decode-eager", 200, figures("decode-eager", f"decode {mma} --shapes dense-0.6b "
                                                          "--set enforce_eager=True"), "programs"),
        Part("gemm", 200, with_cublas(figures("gemm", "gemm --shapes dense-8b")), "build"),
        Part("test-fast", 240, with_cublas(pytest("tests/gpu/test_cuda_fast.py")), "build"),
        Part("decode-fast", 150, with_cublas(figures("decode-fast", f"decode prefill {fast} "
                                                                    "--shapes "
                                                                    "dense-8b")), "programs"),
        Part("test-nccl", 120, shared_gpu(pytest("tests/gpu/test_nccl.py")), "build"),
        Part("test-nccl-threads", 240, shared_gpu(pytest(*meshes, "-m 'not processes and not "
                                                                  "slow'")), "build"),
        Part("test-nccl-processes", 240, shared_gpu(pytest(*meshes, "-m 'processes and not "
                                                                    "slow'")), "build"),
        Part("test-torch", 240, f"{torch_sees_it}; " + pytest("tests/gpu/test_cuda_torch.py",
        "tests/gpu/test_cuda_grpo.py"), "build"),
        Part("test-slots", 200, pytest("tests/gpu/test_moe_static_dispatch.py"), "build"),
        Part("test-kernels", 240, pytest("tests/gpu/test_cuda.py", "-k", "'not simt and not shim "
                                                                        "and not tensor_core'"),
        "build"),
        Part("test-torch-ops", 150, f"{torch_sees_it}; " + pytest("tests/gpu/test_torch_arrays.py",
        "-k gpu"), "build"),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------ the results
def collected(folder: Path, to: Path) -> Path:
    """Writes all figures of the folder to one file of benchmarks/results, as a table, with the
    device that each was measured on, and the results of the parts."""
    found = {
        path.stem: json.loads(path.read_text())
        for path in sorted(folder.glob("*.json"))
        if path.stem != "state"
    }
    if not found:
        raise SystemExit(f"benchmarks.gpu_first: no figures in {folder}")
    about = next(iter(found.values()))["machine"]
    lines = [
        "# python -m benchmarks.gpu_first",
        "",
        ", ".join(f"{key} {about[key]}" for key in about if key != "options"),
        "",
    ]
    for name, one in found.items():
        limits = ", ".join(
            f"{key} {value:.1f}" for key, value in one["limits"].items() if isinstance(value, float)
        )
        lines += [
            f"## {name}",
            "",
            f"Commit {one['machine']['commit']}. Limits in this run: {limits}.",
            "",
        ]
        lines += [
            "| part | what | family | ms | rate | of the limit |",
            "|---|---|---|--:|--:|--:|",
        ]
        for row in one["rows"]:
            rate = "" if row["rate"] is None else f"{row['rate']:.1f} {row['unit']}"
            share = "" if row["share"] is None else f"{row['share']:.1%}"
            lines.append(
                f"| {row['part']} | {row['what']} | {row['family']} | {1e3 * row['seconds']:.3f} "
                f"| {rate} | {share} |"
            )
        lines.append("")
    lines += [
        "## Parts",
        "",
        *(
            f"- {name}: {fate['fate']}, {fate['seconds']} s"
            for name, fate in State.of(folder).fates.items()
        ),
    ]
    name = f"gpu-{about['date']}-{'-'.join(about['card'].lower().split())}"
    path = next(
        p
        for n in range(1, 1000)
        if not (p := to / f"{name}{'' if n == 1 else f'-{n}'}.md").exists()
    )
    path.write_text("\n".join(lines) + "\n")
    return path


# --------------------------------------------------------------------------------------- the card
def architecture(capability: str) -> str:
    """Returns the architecture to compile for ("9.0" → "sm_90a"), with the instructions that only
    this architecture has."""
    number = capability.replace(".", "")
    return f"sm_{number}{'a' if int(number) >= 90 else ''}"


def found_architecture() -> str:
    asked = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader", "-i", "0"]
    try:
        done = subprocess.run(
            asked,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
    except OSError as error:
        raise SystemExit(
            f"benchmarks.gpu_first: found no GPU: nvidia-smi: {error.strerror}"
        ) from None
    capability = done.stdout.strip()
    if done.returncode or not capability.replace(".", "").isdigit():
        raise SystemExit(
            f"benchmarks.gpu_first: found no GPU: nvidia-smi says {capability[:200]!r}"
        )
    return architecture(capability)


# ---------------------------------------------------------------------------------------- running
@dataclass
class State:
    """The result of each part, in a file of the folder."""

    folder: Path
    fates: dict[str, dict[str, object]] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> State:
        path = folder / "state.json"
        return cls(folder, json.loads(path.read_text()) if path.exists() else {})

    def fate(self, part: Part) -> str:
        fate = str(self.fates.get(part.name, {}).get("fate", "left"))
        return (
            "left"
            if fate == "passed" and part.makes and not (self.folder / part.makes).exists()
            else fate
        )

    def note(self, part: Part, fate: str, seconds: float, status: int) -> None:
        self.fates[part.name] = {"fate": fate, "seconds": round(seconds, 1), "status": status}
        written(self.folder / "state.json", json.dumps(self.fates, indent=1) + "\n")

    def log(self, part: Part) -> Path:
        return self.folder / f"{part.name}.log"

    def report(self, plan: list[Part]) -> None:
        lines = [
            f"{part.name:16s} {self.fate(part):8s} "
            f"{self.fates.get(part.name, {}).get('seconds', '')}"
            for part in plan
        ]
        for part in plan:
            if self.log(part).exists():
                lines += [
                    "",
                    f"=== {part.name}: {self.fate(part)}",
                    self.log(part).read_text(errors="replace")[-TAIL:],
                ]
        written(self.folder / "report.txt", "\n".join(lines) + "\n")


def written(path: Path, text: str) -> None:
    """Writes the file completely, or not at all."""
    half = path.with_suffix(".half")
    half.write_text(text)
    half.replace(path)


def environment(folder: Path, seed: int) -> dict[str, str]:
    paths = [str(folder / "lib"), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = os.environ | {
        "DIR": str(folder),
        "PYTHON": sys.executable,
        "SEED": str(seed),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    found |= {
        "RM_CUDA_BUILD": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "RM_NEEDS_GPU": "1",
    }
    found.pop("ROLLMESH_CUDA_LIBRARY", None)  # made by the build
    return found


def ran(part: Part, log: Path, limit: float, variables: dict[str, str]) -> int | None:
    """Returns the exit status, or None if the process and its children were killed at the limit."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            part.command(),
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all its children
            process.wait()


def due(plan: list[Part], state: State, again: list[str]) -> Iterator[Part]:
    for part in plan:
        if part.name in again or state.fate(part) not in ENDED:
            yield part


def run(
    plan: list[Part], state: State, options: argparse.Namespace, variables: dict[str, str]
) -> None:
    deadline = time.monotonic() + options.within
    by_name = {part.name: part for part in plan}
    for part in list(due(plan, state, options.again)):
        if part.needs and state.fate(by_name[part.needs]) != "passed":
            print(f"{part.name:16s} left: needs {part.needs}", flush=True)
            continue
        room = deadline - time.monotonic()
        if room < part.limit / 4:
            print(
                f"{part.name:16s} left: {max(room, 0):.0f} s are left, and it may take "
                f"{part.limit}",
                flush=True,
            )
            continue  # a shorter one may fit
        begin = time.monotonic()
        status = ran(part, state.log(part), min(part.limit, room), variables)
        seconds = time.monotonic() - begin
        was_cut = status is None and room < part.limit  # because of --within, not its own limit
        fate = "cut" if was_cut else {0: "passed", ABSENT: "absent"}.get(status, "failed")
        state.note(part, fate, seconds, -1 if status is None else status)
        state.report(plan)
        print(
            f"{part.name:16s} {fate:8s} {seconds:6.1f} s  {last_line(state.log(part))}", flush=True
        )


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:100] if lines else ""


def main() -> int:
    plan = parts()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_first",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--to",
        type=Path,
        default=ROOT / "build" / "gpu",
        help="the folder of logs, results and what is built",
    )
    parser.add_argument(
        "--within", type=real(1, 1e6), default=1e6, help="seconds that this call may take"
    )
    parser.add_argument(
        "--again",
        type=lambda text: text.split(","),
        default=[],
        help="parts that are run whatever became of them",
    )
    parser.add_argument("--only", type=lambda text: text.split(","), help="these parts")
    parser.add_argument("--seed", type=whole(0, SEEDS), default=1, help="of the checks")
    parser.add_argument("--plan", action="store_true", help="print the parts and their limits")
    parser.add_argument(
        "--results",
        action="store_true",
        help="run nothing; write the figures of the folder into benchmarks/results",
    )
    options = parser.parse_args()
    for name in (*options.again, *(options.only or ())):
        if name not in {part.name for part in plan}:
            parser.error(f"expected a part that --plan prints, got {name[:40]!r}")
    if options.plan:
        print("\n".join(f"{part.name:16s} {part.limit:4d} s  {part.words}" for part in plan))
        return 0
    if options.results:
        print(f"written: {collected(options.to, RESULTS)}")
        return 0
    variables = environment(options.to.resolve(), options.seed) | {
        "ROLLMESH_CUDA_ARCHS": found_architecture()
    }
    options.to.mkdir(parents=True, exist_ok=True)
    state = State.of(options.to.resolve())
    wanted = [part for part in plan if not options.only or part.name in options.only]
    chosen = {part.name for part in wanted}
    run(
        [part for part in plan if part.name in chosen or part.name in {p.needs for p in wanted}],
        state,
        options,
        variables,
    )
    fates = [state.fate(part) for part in wanted]
    left = sum(fate not in ENDED for fate in fates)
    print(", ".join(f"{fates.count(fate)} {fate}" for fate in ENDED) + f", {left} left")
    return 1 if "failed" in fates else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
