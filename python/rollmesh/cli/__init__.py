"""The command line: `rollmesh grpo | generate | bench | plan | doctor`.

One module a command, each with `add_arguments(parser)` and `run(args) -> exit status`. They import what they need inside `run`:
only `grpo` needs torch, and `rollmesh doctor` must work where everything else is missing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import rollmesh as rm
from rollmesh.cli import bench, doctor, generate, grpo, plan
from rollmesh.runtime.messages import plain

COMMANDS = {
    "grpo": (grpo, "train by GRPO as a TOML file describes it"),
    "generate": (generate, "complete prompts with a checkpoint folder's weights"),
    "bench": (bench, "quick decode and prefill figures of a model's shape"),
    "plan": (plan, "a model's shapes, parameters and memory by rank"),
    "doctor": (doctor, "what this machine has, what was chosen and why, what is missing"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 2 for an error that the message explains, 130 after Ctrl-C, 141 when the reader of the output
    has gone."""
    parser = argparse.ArgumentParser(prog="rollmesh", description="Rollouts for RL training, with weights pushed by their trainer.")
    parser.add_argument("--version", action="version", version=f"rollmesh {rm.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}."))
    args, rest = parser.parse_known_args(argv)
    if rest and (args.command != "generate" or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {plain(' '.join(rest))}")
    if rest:
        args.prompts += rest  # what stands behind an option: argparse takes MODEL's prompts before it only
    try:
        status: int = COMMANDS[args.command][0].run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        _drop_output()
        return 141
    except (rm.Error, MemoryError) as error:
        print(f"rollmesh {args.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # of a path that was given, or of a disk that is full
        said = plain(error) if error.filename is None else f"{plain(error.filename)}: {error.strerror}"
        print(f"rollmesh {args.command}: {type(error).__name__}: {said}", file=sys.stderr)
        _drop_output()
        return 2
    except KeyboardInterrupt:
        return 130


def _drop_output() -> None:
    """Drops what standard output cannot take: the interpreter would fail to flush it at exit, aloud."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
