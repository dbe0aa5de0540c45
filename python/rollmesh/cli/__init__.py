"""The command line: `rollmesh grpo | generate | bench | plan | doctor`.

Each command has a module with `add_arguments(parser)` and `run(args) -> exit status`, imported when
the command is used. Optional packages are imported inside `run`: only `grpo` needs torch, and
`rollmesh doctor` must work if all other packages are missing.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType

import rollmesh as rm
from rollmesh.runtime.messages import plain

COMMANDS = {
    "grpo": "train by GRPO as a TOML file describes it",
    "generate": "complete prompts with a checkpoint folder's weights",
    "bench": "quick decode and prefill figures of a model's shape",
    "plan": "a model's shapes, parameters and memory by rank",
    "doctor": "what this machine has, what was chosen and why, what is missing",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status: 0; 2 for an error that the message explains; 130
    after Ctrl-C (128 + the number of another signal); 141 if the reader of the output has closed
    it. Prints each note of an error on a new line after its message. Without argv this is the
    program itself, and a Ctrl-C during the interpreter's exit does not print a traceback."""
    try:
        return _main(argv)
    finally:
        if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _main(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="rollmesh",
        description="Rollouts for RL training, with weights pushed by their trainer.",
    )
    parser.add_argument("--version", action="version", version=f"rollmesh {rm.__version__}")
    if sys.stdout is None:  # closed by a shell's >&-: keep its file number occupied
        drop_output()
    with suppress(AttributeError):
        # An ASCII terminal must not make a command fail.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    words = sys.argv[1:] if argv is None else argv
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name in words:
            _module_of(name).add_arguments(command)
    args, rest = parser.parse_known_args(argv)
    if rest and (args.command != "generate" or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {plain(' '.join(rest))}")
    if rest:
        # Prompts after an option: argparse takes only the prompts before it.
        args.prompts += rest
    try:
        status: int = _module_of(args.command).run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        drop_output()
        return 141
    except (rm.Error, MemoryError) as error:
        _tell(f"rollmesh {args.command}: {type(error).__name__}: {error}", error)
        return 2
    except OSError as error:  # a wrong path in the arguments, or a full disk
        said = (
            plain(error) if error.filename is None else f"{plain(error.filename)}: {error.strerror}"
        )
        _tell(f"rollmesh {args.command}: {type(error).__name__}: {said}", error)
        drop_output()
        return 2
    except KeyboardInterrupt as error:
        # The exception of a reward may have a text instead of a number.
        number = next((n for n in signal.valid_signals() if error.args == (n,)), signal.SIGINT)
        _tell(
            f"rollmesh {args.command}: "
            f"{'interrupted' if number == signal.SIGINT else signal.strsignal(number)}",
            error,
        )
        return 128 + int(number)


@contextmanager
def warnings_shown(command: str) -> Iterator[None]:
    """Prints the library's warnings on standard error."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter(f"rollmesh {command}: %(message)s"))
    log = logging.getLogger("rollmesh")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _tell(text: str, error: BaseException) -> None:
    with suppress(OSError, ValueError):  # the reader may be gone; the exit status stays the same
        print(text, *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)


def _module_of(command: str) -> ModuleType:
    return importlib.import_module(f"rollmesh.cli.{command}")


def drop_output() -> None:
    """Redirects a closed standard output to os.devnull, since flushing it at exit would print an
    error. A reward function may have closed it."""
    if sys.stdout is None or sys.stdout.closed:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open until the program ends)
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
