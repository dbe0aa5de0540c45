"""`rollmesh grpo CONFIG.toml`: the loop of rollmesh/grpo with a live display."""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import rollmesh as rm
from rollmesh.cli import drop_output, warnings_shown
from rollmesh.cli.options import GENERATOR_KEYS, INSTALL_TRAIN, TRAIN, add_mesh
from rollmesh.runtime.messages import plain, shown

if TYPE_CHECKING:
    from rollmesh.grpo.loop import Run
    from rollmesh.run.config import GeneratorTable
    from rollmesh.run.metrics import Completions, Metrics
    from rollmesh.run.signals import Interrupts

_log = logging.getLogger("rollmesh.grpo")
CHECKPOINTS = "checkpoints", "abandoned"  # folders of a run
HELP_OUT = (
    "run folder: metrics.jsonl, curves.png, TensorBoard events, checkpoints (default: a "
    "new folder under runs/)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG.toml")
    parser.add_argument("--out", type=_named, metavar="DIR", help=HELP_OUT)
    parser.add_argument(
        "--resume",
        type=_named,
        metavar="DIR",
        help="a run folder or one of its checkpoints; goes on bit for bit",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replaces a key, such as train.lr=1e-3",
    )
    parser.add_argument("--seed", type=int, help="the same as --set seed=N")
    parser.add_argument(
        "--generator",
        choices=("rollmesh", "vllm"),
        help="which engine generates; the numbers are the same (docs/vllm.md)",
    )
    parser.add_argument(
        "--wandb", metavar="PROJECT", help="log the metrics to this project of Weights & Biases too"
    )
    add_mesh(parser)


def _named(text: str) -> Path:
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"expected the path of a folder, got {shown(text)}")
    return Path(text)


def run(args: argparse.Namespace) -> int:
    """From here to the end a SIGINT, SIGTERM or SIGHUP is a KeyboardInterrupt with a note of what
    there is and how to go on."""
    from rollmesh.run.signals import Interrupts

    with Interrupts() as interrupts:
        return _run(args, interrupts)


def _run(args: argparse.Namespace, interrupts: Interrupts) -> int:
    overrides = list(args.set)
    if args.seed is not None:
        overrides.append(f"seed={args.seed}")
    if args.generator is not None:
        overrides.append(f"generator.engine={args.generator}")
    overrides += [
        f"generator.{k}={v}" for k in GENERATOR_KEYS if (v := getattr(args, k, None)) is not None
    ]
    from rollmesh.run import config as run_config
    from rollmesh.run.files import locked

    config = run_config.load(args.config, overrides)
    missing = [name for name in TRAIN if importlib.util.find_spec(name) is None]
    if missing:
        raise rm.ConfigError(f"training needs {', '.join(missing)}: {INSTALL_TRAIN}")
    if args.wandb and importlib.util.find_spec("wandb") is None:
        raise rm.ConfigError(
            "--wandb: expected the package wandb, got none here: pip install wandb"
        )
    if config.generator.engine == "vllm":
        _ask_for_vllm()
    comm, overridden = (
        _comm(config.generator),
        [text.partition("=")[0].strip() for text in overrides],
    )
    if comm is not None and comm.rank > 0:
        _environment()
        from rollmesh.grpo import loop

        try:
            loop.follow(config, args.resume, comm)
        except rm.errors.RankLostError as error:
            error.add_note("rank 0 says why it ended, and how to go on")
            raise
        return 0
    named = _folder(args)
    out = named.absolute()  # a reward may change the working folder
    if out.is_dir() and not os.access(out, os.W_OK | os.X_OK):
        raise rm.ConfigError(
            f"{plain(out)}: expected a folder to write to, got a read-only one; --out names another"
        )
    makes = args.out is not None or args.resume is None  # what is resumed is there, or is not found
    words = [
        "rollmesh",
        "grpo",
        str(args.config),
        "--resume",
        str(named),
        *(word for text in overrides for word in ("--set", text)),
    ]
    words += ["--wandb", args.wandb] if args.wandb else []
    with ExitStack() as stack:
        interrupts.hold("the run folder is made")
        if makes:
            stack.enter_context(_made(out))
        stack.enter_context(warnings_shown("grpo"))
        if out.is_dir():
            stack.enter_context(locked(out))
        stack.callback(interrupts.hold, "the run folder is left")
        with suppress(OSError):  # a reader that has gone
            print(f"{args.config} → {named}: reading data and model", flush=True)
        with (
            _noted(KeyboardInterrupt, lambda: "no step was made; the same command begins again"),
            _memory_told(),
        ):
            interrupts.release()
            _environment()
            from rollmesh.grpo import loop

            this = loop.prepare(config, args.resume, overridden, comm)
        began = time.monotonic()
        try:
            lines = _train(args, this, out, interrupts, words)
        finally:
            interrupts.hold("the generator is closed")
            this.close()
    with _noted(KeyboardInterrupt, lambda: f"all {config.train.steps} steps are made: {named}"):
        interrupts.release()
        from rollmesh.run.progress import rounded

        evaluated = [rounded(m["eval_reward"]) for m in lines if "eval_reward" in m]
        first, last = evaluated[0], evaluated[-1]
        drop_output()
        print(
            f"held-out reward {first} → {last} in {lines[-1]['step']} steps and "
            f"{time.monotonic() - began:.0f} s; {named}/metrics.jsonl, {named}/curves.png"
        )
    return 0


def _train(
    args: argparse.Namespace, this: Run, out: Path, interrupts: Interrupts, words: list[str]
) -> list[Metrics]:
    """Trains; the lines of metrics.jsonl. words: the command that goes on with the run."""
    from rollmesh.grpo import checkpoint, loop
    from rollmesh.run.progress import Display
    from rollmesh.run.tracking import wandb_log

    this.interrupts = interrupts
    shows = True

    def how_to_go_on() -> str:
        found = checkpoint.newest(out)
        if found is None:
            lines = out / "metrics.jsonl"
            made = lines.is_file() and lines.stat().st_size
            return (
                "no checkpoint was written"
                if made
                else "no step was finished; the same command begins again"
            )
        return f"to go on from {found.name}: {shlex.join(words)}"

    logs = wandb_log(args.wandb, out, this.config) if args.wandb else nullcontext(lambda _: None)
    with _noted(BaseException, how_to_go_on), _memory_told():
        interrupts.release()
        with logs as log, Display(args.config.stem, this.config.train.steps) as display:

            def show(metrics: Metrics, completions: Completions) -> None:
                nonlocal shows
                try:
                    if shows:
                        display.show(metrics, completions)
                except (Exception, SystemExit) as error:  # noqa: BLE001 (a reader that has gone; rich would exit)
                    shows, why = False, error.__context__ or error
                    drop_output()
                    _log.warning(
                        "nothing more is displayed: %s: %s", type(why).__name__, plain(why)
                    )
                log(metrics)

            return loop.train(this, out, show)


def _ask_for_vllm() -> None:
    from rollmesh.run.vllm import ask_for_plugin

    if ask_for_plugin():
        print(
            f"VLLM_PLUGINS={os.environ['VLLM_PLUGINS']}: set for this run, so that vLLM runs on "
            "rollmesh",
            file=sys.stderr,
        )


def _comm(table: GeneratorTable) -> rm.comm.Comm | None:
    """The comm of the ranks that torchrun started; None: all ranks are threads of this process."""
    world = os.environ.get("WORLD_SIZE", "1")
    if not world.isdecimal():
        raise rm.ConfigError(
            f"WORLD_SIZE: expected the number of ranks, as torchrun sets it, got {shown(world)}; "
            "unset it for one process"
        )
    started = int(world) > 1
    if started and table.engine == "vllm":
        raise rm.ConfigError(
            "WORLD_SIZE: expected no torchrun around vLLM, which starts its ranks itself, got "
            f"{os.environ['WORLD_SIZE']}"
        )
    if table.comm == "threads" or (table.comm == "auto" and not started):
        return None
    if table.comm != "torch":
        return rm.comm.shm(timeout=table.comm_timeout)
    from torch import distributed

    from rollmesh.run.files import told_as

    with told_as(
        '[generator] comm="torch": expected RANK, WORLD_SIZE and MASTER_ADDR in the environment, '
        "as torchrun sets them"
    ):
        distributed.init_process_group("gloo")
    atexit.register(
        distributed.destroy_process_group
    )  # else the threads of Gloo may end the process with SIGABRT
    return rm.comm.torch(timeout=table.comm_timeout)


def _folder(args: argparse.Namespace) -> Path:
    """Where the run writes. A folder that already holds a run is refused unless it is the one being
    resumed."""
    if args.out is None and args.resume is not None:
        if (run_folder := _run_of(args.resume)) is None:
            where = plain(args.resume.resolve().parent)
            seen = f"expected a checkpoint of a run folder, got one in {where}; --out names one"
            raise rm.ConfigError(f"--resume {plain(args.resume)}: {seen}")
        return run_folder
    if args.out is None:
        numbered = (Path("runs") / f"{args.config.stem}-{i}" for i in range(1, 10_000))
        return next(folder for folder in numbered if not folder.exists())
    metrics = args.out / "metrics.jsonl"
    resumed = args.resume and _run_of(args.resume)
    goes_on = resumed and resumed.exists() and metrics.exists() and resumed.samefile(args.out)
    if (
        not goes_on and metrics.is_file() and metrics.stat().st_size
    ):  # empty: a run that ended before its first step
        resumable = any(args.out.glob("checkpoints/step_*"))
        advice = (
            f"--resume {plain(args.out)} goes on with it"
            if resumable
            else "it has no checkpoint to go on from; choose another folder"
        )
        raise rm.ConfigError(f"--out {plain(args.out)}: a run is there already; {advice}")
    return Path(args.out)


def _run_of(resume: Path) -> Path | None:
    """The run folder of --resume: itself, or that of a checkpoint; None: of a checkpoint that is
    elsewhere."""
    if not (resume / "trainer").is_dir():
        return resume
    path = (
        resume if resume.parent.name in CHECKPOINTS else resume.resolve()
    )  # as it was given, unless that says nothing
    return path.parent.parent if path.parent.name in CHECKPOINTS else None


@contextmanager
def _made(out: Path) -> Iterator[None]:
    """Makes the run folder before anything slow, so that one without write access fails at once.
    Removes it if it stays empty."""
    is_new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise rm.ConfigError(f"{plain(out)}: {e.strerror}; expected a folder to write to") from e
    try:
        yield
    finally:
        if is_new:
            with suppress(OSError):  # not empty
                out.rmdir()


@contextmanager
def _noted(kind: type[BaseException], note: Callable[[], str]) -> Iterator[None]:
    """Adds a note to what ends the block early."""
    try:
        yield
    except kind as error:
        error.add_note(note())
        raise


@contextmanager
def _memory_told() -> Iterator[None]:
    """torch's two errors of too little memory as Python's."""
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError" and "can't allocate memory" not in str(error):
            raise
        said = plain(str(error).partition("DefaultCPUAllocator: ")[2] or error)
        raise MemoryError(
            f"{said}; [train] micro_batch, [rollout] prompts and samples make a step smaller"
        ) from error


def _environment() -> None:
    """Call before torch is imported. torch's threads must sleep between operators: spinning, they
    starve the generator's threads and, on a busy machine, each other (measured: 22 s a step against
    1 s). Other packages' messages would break the display."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
