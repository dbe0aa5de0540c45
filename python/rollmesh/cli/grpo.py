"""`rollmesh grpo CONFIG.toml`: the training loop of rollmesh.grpo with a live display."""

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
from rollmesh.run.config import Config, GeneratorTable, load
from rollmesh.run.files import library_errors, locked
from rollmesh.run.signals import Interrupts
from rollmesh.runtime.messages import plain, shown

if TYPE_CHECKING:
    from rollmesh.grpo.loop import Run
    from rollmesh.run.metrics import Completions, Metrics

_log = logging.getLogger("rollmesh.grpo")
CHECKPOINTS = "checkpoints", "abandoned"  # folders of a run
OUT = "run folder: metrics.jsonl, curves.png, TensorBoard events, checkpoints (default: a new "
OUT += "folder under runs/)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", type=Path, metavar="CONFIG.toml")
    add("--out", type=_named, metavar="DIR", help=OUT)
    resume = "a run folder or one of its checkpoints; continues the run bit for bit"
    add("--resume", type=_named, metavar="DIR", help=resume)
    text = "replaces a key, such as train.lr=1e-3"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    add("--seed", type=int, help="the same as --set seed=N")
    engine = "the engine that generates; the numbers are the same (docs/vllm.md)"
    add("--generator", choices=("rollmesh", "vllm"), help=engine)
    add("--wandb", metavar="PROJECT", help="also log the metrics to this Weights & Biases project")
    add_mesh(parser)


def _named(text: str) -> Path:
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"expected the path of a folder, got {shown(text)}")
    return Path(text)


def run(args: argparse.Namespace) -> int:
    """Runs the command. SIGINT, SIGTERM and SIGHUP raise a KeyboardInterrupt with a note on how to
    continue the run."""
    with Interrupts() as interrupts:
        return _run(args, interrupts)


def _run(args: argparse.Namespace, interrupts: Interrupts) -> int:
    overrides = list(args.set)
    overrides += [] if args.seed is None else [f"seed={args.seed}"]
    overrides += [] if args.generator is None else [f"generator.engine={args.generator}"]
    given = ((key, getattr(args, key, None)) for key in GENERATOR_KEYS)
    overrides += [f"generator.{key}={value}" for key, value in given if value is not None]
    config = load(args.config, overrides)
    if missing := [name for name in TRAIN if importlib.util.find_spec(name) is None]:
        raise rm.ConfigError(f"training needs {', '.join(missing)}: {INSTALL_TRAIN}")
    if args.wandb and importlib.util.find_spec("wandb") is None:
        raise rm.ConfigError(
            "--wandb: expected the package wandb, got none here: pip install wandb"
        )
    if config.generator.engine == "vllm":
        from rollmesh.run.vllm import ask_for_plugin

        if ask_for_plugin():
            plugins = f"VLLM_PLUGINS={os.environ['VLLM_PLUGINS']}"
            print(f"{plugins}: set for this run, so that vLLM runs on rollmesh", file=sys.stderr)
    comm = _comm(config.generator)
    if comm is not None and comm.rank > 0:
        _follow(config, args.resume, comm)
        return 0
    folder = _folder(args)
    out = folder.absolute()  # a reward may change the working folder
    if out.is_dir() and not os.access(out, os.W_OK | os.X_OK):
        raise rm.ConfigError(
            f"{plain(out)}: expected a folder to write to, got a read-only one; --out names another"
        )
    words = ["rollmesh", "grpo", str(args.config), "--resume", str(folder)]
    words += [word for text in overrides for word in ("--set", text)]
    words += ["--wandb", args.wandb] if args.wandb else []
    with ExitStack() as stack:
        interrupts.hold("the run folder is made")
        if args.out is not None or args.resume is None:  # a resumed folder exists
            stack.enter_context(_created(out))
        stack.enter_context(warnings_shown("grpo"))
        if out.is_dir():
            stack.enter_context(locked(out))
        stack.callback(interrupts.hold, "the run folder is left")
        with suppress(OSError):  # the reader of the output may be gone
            print(f"{args.config} → {folder}: reading data and model", flush=True)
        begin = "no step was made; the same command begins again"
        with _noting(KeyboardInterrupt, lambda: begin):
            interrupts.release()
            _set_environment()
            from rollmesh.grpo.loop import prepare

            keys = [text.partition("=")[0].strip() for text in overrides]
            this = prepare(config, args.resume, keys, comm)
        began = time.monotonic()
        this.interrupts = interrupts
        try:
            with _noting(BaseException, lambda: _how_to_continue(out, words)):
                interrupts.release()
                lines = _train(args, this, out)
        finally:
            interrupts.hold("the generator is closed")
            this.close()
    with _noting(KeyboardInterrupt, lambda: f"all {config.train.steps} steps are made: {folder}"):
        interrupts.release()
        from rollmesh.run.progress import rounded

        evaluated = [rounded(m["eval_reward"]) for m in lines if "eval_reward" in m]
        drop_output()
        print(
            f"held-out reward {evaluated[0]} → {evaluated[-1]} in {lines[-1]['step']} steps and "
            f"{time.monotonic() - began:.0f} s; {folder}/metrics.jsonl, {folder}/curves.png"
        )
    return 0


def _follow(config: Config, resume: Path | None, comm: rm.comm.Comm) -> None:
    _set_environment()
    from rollmesh.grpo.loop import follow

    try:
        follow(config, resume, comm)
    except rm.errors.RankLostError as error:
        error.add_note("rank 0 says why it ended, and how to continue")
        raise


def _train(args: argparse.Namespace, this: Run, out: Path) -> list[Metrics]:
    """Trains with a display, and returns the lines of metrics.jsonl."""
    from rollmesh.grpo.loop import train
    from rollmesh.run.metrics import wandb_log
    from rollmesh.run.progress import Display

    project, config, shows = args.wandb, this.config, True
    logs = wandb_log(project, out, config.as_dict()) if project else nullcontext(lambda _: None)
    with logs as log, Display(args.config.stem, config.train.steps) as display:

        def show(metrics: Metrics, completions: Completions) -> None:
            nonlocal shows
            try:
                if shows:
                    display.show(metrics, completions)
            # The reader of the output may be gone; rich would exit.
            except (Exception, SystemExit) as error:  # noqa: BLE001
                shows, why = False, error.__context__ or error
                drop_output()
                _log.warning("the display stops: %s: %s", type(why).__name__, plain(why))
            log(metrics)

        return train(this, out, show)


def _how_to_continue(out: Path, words: list[str]) -> str:
    """Returns the note on how to continue a run. words: the command that resumes it."""
    from rollmesh.run import checkpoint

    if found := checkpoint.newest(out):
        return f"to continue from {found.name}: {shlex.join(words)}"
    lines = out / "metrics.jsonl"
    if lines.is_file() and lines.stat().st_size:
        return "no checkpoint was written"
    return "no step was finished; the same command begins again"


def _comm(table: GeneratorTable) -> rm.comm.Comm | None:
    """Returns the comm of the ranks that torchrun started. None: the ranks are threads of this
    process."""
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
            f"{world}"
        )
    if table.comm == "threads" or (table.comm == "auto" and not started):
        return None
    if table.comm != "torch":
        return rm.comm.shm(timeout=table.comm_timeout)
    from torch import distributed

    with library_errors(
        '[generator] comm="torch": expected RANK, WORLD_SIZE and MASTER_ADDR in the environment, '
        "as torchrun sets them"
    ):
        distributed.init_process_group("gloo")
    # Otherwise Gloo's threads may end the process with SIGABRT.
    atexit.register(distributed.destroy_process_group)
    return rm.comm.torch(timeout=table.comm_timeout)


def _folder(args: argparse.Namespace) -> Path:
    """Returns the run folder. Refuses one that holds a run, unless this run resumes it."""
    resumed = args.resume and _run_of(args.resume)
    if args.out is None and args.resume is not None:
        if resumed is None:
            parent = plain(args.resume.resolve().parent)
            raise rm.ConfigError(
                f"--resume {plain(args.resume)}: expected a checkpoint of a run folder, got one in "
                f"{parent}; --out names one"
            )
        return resumed
    if args.out is None:
        numbered = (Path("runs") / f"{args.config.stem}-{i}" for i in range(1, 10_000))
        return next(folder for folder in numbered if not folder.exists())
    out: Path = args.out
    metrics = out / "metrics.jsonl"
    goes_on = resumed and resumed.exists() and metrics.exists() and resumed.samefile(out)
    # The file of a run that ended before its first step is empty.
    if not goes_on and metrics.is_file() and metrics.stat().st_size:
        advice = "it has no checkpoint to continue from; choose another folder"
        if any(out.glob("checkpoints/step_*")):
            advice = f"--resume {plain(out)} continues it"
        raise rm.ConfigError(
            f"--out {plain(out)}: expected a folder without a run, got one; {advice}"
        )
    return out


def _run_of(resume: Path) -> Path | None:
    """Returns the run folder of --resume: itself, or the one of a checkpoint. None: the checkpoint
    is not in a run folder."""
    if not (resume / "trainer").is_dir():
        return resume
    path = resume if resume.parent.name in CHECKPOINTS else resume.resolve()
    return path.parent.parent if path.parent.name in CHECKPOINTS else None


@contextmanager
def _created(out: Path) -> Iterator[None]:
    """Creates the run folder, and removes it if it stays empty."""
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
def _noting(kind: type[BaseException], note: Callable[[], str]) -> Iterator[None]:
    """Adds a note to an exception. Raises torch's two errors of too little memory as
    MemoryError."""
    try:
        try:
            yield
        except RuntimeError as error:
            is_memory = "can't allocate memory" in str(error)
            if type(error).__name__ != "OutOfMemoryError" and not is_memory:
                raise
            text = plain(str(error).partition("DefaultCPUAllocator: ")[2] or error)
            raise MemoryError(
                f"{text}; [train] micro_batch, [rollout] prompts and samples make a step smaller"
            ) from error
    except kind as error:
        error.add_note(note())
        raise


def _set_environment() -> None:
    """Call this before torch is imported. torch's threads must sleep between operators: threads
    that spin slow down the generator's and, on a busy machine, each other (22 s a step instead of
    1 s). Messages of other packages would break the display."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
