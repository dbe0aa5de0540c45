"""Runs of `rollmesh grpo` that are killed at random moments and resumed until they finish.

Oracle: an undisturbed run. Every file of the last checkpoint, completions.jsonl, and metrics.jsonl
except for times are identical, byte for byte. A killed run leaves nothing in its folder and nothing
in /dev/shm.

Most signals are SIGKILL, the others SIGTERM and SIGINT. The moment is drawn from the duration of an
undisturbed run, with the forks of tests/support/grpo_forked.py. Every tenth run starts as a command
in a fresh interpreter and may be killed during its imports. A run that was killed before its first
checkpoint starts again from the beginning.

    PYTHONPATH=python python tests/support/grpo_kills.py [--kills 200] [--seed 1] [--first 0]
    [--plant 0]

A run depends on the seed, its number and the machine's speed. --plant 1 injects a fault: AdamW's
moments are not read from a checkpoint.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpo_forked as forked
from helpers import TINY_RUN

STEPS = 40
SMALL = [*TINY_RUN, f"train.steps={STEPS}", "rollout.log_completions=2", "eval.prompts=4"]
SETTINGS = [  # each with the steps between two checkpoints
    (
        f"async_level {level}, a checkpoint every {every}",
        [f"rollout.async_level={level}", f"checkpoint.every={every}"],
    )
    for level in (0, 1)
    for every in (1, 3, 10)
]
SIGNALS = [signal.SIGKILL] * 3 + [signal.SIGTERM, signal.SIGINT]
LIMIT = 120.0  # seconds of a run, which takes one or two


class Failure(AssertionError):
    """A resumed run that differs, or that did not end."""


def compare(out: Path, whole: dict[str, Any]) -> None:
    found = forked.result(out)
    if differ := sorted(
        name for name in found.keys() | whole.keys() if found.get(name) != whole.get(name)
    ):
        raise Failure(f"another run: {', '.join(differ)} differ")
    left = sorted(str(path.relative_to(out)) for path in out.rglob(".*"))
    left += forked.left_in_shm()
    if left:
        raise Failure(f"left behind: {', '.join(left)}")


def steps_kept(out: Path) -> int:
    """Returns the number of steps in the newest checkpoint, or 0 without a checkpoint."""
    return max(
        (int(file.parts[-3][5:]) for file in out.glob("checkpoints/step_*/trainer/state.json")),
        default=0,
    )


def without_moments() -> None:
    """The injected fault."""
    from rollmesh.run import checkpoint

    checkpoint.load_optimizer = lambda folder, trainer: None


@dataclass
class Whole:
    seconds: float
    result: dict[str, Any]


def undisturbed(folder: Path, options: list[str]) -> Whole:
    out, said, began = folder / "whole", folder / "said.txt", time.monotonic()
    if forked.run(["grpo", str(forked.DENSE), "--out", str(out), *options], said, LIMIT) != 0:
        raise Failure(said.read_text()[-4000:])
    whole = Whole(time.monotonic() - began, forked.result(out))
    shutil.rmtree(out)
    return whole


def one(
    r: random.Random,
    is_command: bool,
    options: list[str],
    folder: Path,
    whole: Whole,
    most: int,
    plant: int,
) -> Counter[str]:
    """Runs until the end, with at most eight kills and at most the given number. Returns the
    signals that were sent, and how often the run started again from the beginning."""
    out = folder / "out"
    counts: Counter[str] = Counter()
    most = min(most, r.randint(1, 8))
    while True:
        done = steps_kept(out)
        if out.exists() and not done:
            counts["anew"] += 1
            shutil.rmtree(out)
        argv = ["grpo", str(forked.DENSE), "--resume" if done else "--out", str(out), *options]
        said = folder / "said.txt"
        if is_command:
            child = forked.start_command(argv, said)
        else:
            child = forked.start(argv, said, without_moments if plant else lambda: None)
        try:
            if counts.total() - counts["anew"] < most:
                sent = r.choice(SIGNALS)
                left = whole.seconds * (0.3 + 0.7 * (STEPS - done) / STEPS) + (
                    3.0 if is_command else 0.0
                )
                # The product of two draws makes early moments more likely.
                if child.wait(left * min(r.random(), r.random())) is None:
                    counts[sent.name] += 1
                    child.end(sent)
            status = child.wait(LIMIT)
        finally:
            child.end()
        if status == 0:
            compare(out, whole.result)
            return counts
        # A Ctrl-C during an import may raise any error.
        begun = not is_command or "reading data and model" in child.text()
        if begun and status not in {-s for s in SIGNALS} | {128 + s for s in SIGNALS}:
            raise Failure(f"expected the end by a signal, got {status}:\n{child.text()[-4000:]}")
        is_command = False


def run(*, kills: int, seed: int = 1, first: int = 0, plant: int = 0) -> tuple[int, Counter[str]]:
    """Returns (runs, signals sent): runs until there were enough kills. Raises Failure with the
    command that runs the case alone."""
    forked.prepare()
    counts: Counter[str] = Counter()
    wholes: dict[str, Whole] = {}
    with tempfile.TemporaryDirectory(prefix="rollmesh-") as name:
        folder = Path(name)
        for number in itertools.count(first):
            if (left := kills - sum(counts[s.name] for s in set(SIGNALS))) <= 0:
                break
            setting, changes = SETTINGS[number % len(SETTINGS)]
            options = forked.sets([*SMALL, *changes])
            try:
                if setting not in wholes:
                    wholes[setting] = undisturbed(folder, options)
                counts += one(
                    random.Random(f"{seed}/{number}"),
                    number % 10 == 9,
                    options,
                    folder,
                    wholes[setting],
                    left,
                    plant,
                )
            except Failure as error:
                raise Failure(
                    f"grpo_kills.py --seed {seed} --first {number}: {setting}: {error}"
                ) from error
            counts["runs"] += 1
            shutil.rmtree(folder / "out")
    return counts.pop("runs"), counts


def line(runs: int, counts: Counter[str], seed: int) -> str:
    sent = {s.name: counts[s.name] for s in dict.fromkeys(SIGNALS)}
    return (
        f"grpo_kills: {sum(sent.values())} kills "
        f"({', '.join(f'{n} {name}' for name, n in sent.items())}) of {runs} runs, "
        f"{counts['anew']} of them before the first checkpoint; 0 of {runs} results differ, seed "
        f"{seed}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name, default in (("kills", 200), ("seed", 1), ("first", 0), ("plant", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = vars(parser.parse_args())
    try:
        runs, counts = run(**options)
    except Failure as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(line(runs, counts, options["seed"]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
