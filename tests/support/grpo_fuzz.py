"""Runs of `rollmesh grpo` with a mistake in one of their inputs: the TOML or an option, the
prompts, the reward, the checkpoint folder of the model, or the run folder that is resumed.

Oracle: a run ends within `SECONDS`, either with exit status 2 or with status 0. With status 2 it
has printed a line with an error's class and the name of the changed input, and a resumed folder is
unchanged. With status 0 its results match an independent reading of the inputs: the config that is
kept, the columns that the reward received, the weights, or every byte of an undisturbed run. A
mistake that is known to be a mistake is refused. Nothing stays in /dev/shm; no process, lock or
partial file is left.

    PYTHONPATH=python python tests/support/grpo_fuzz.py [--cases 300] [--seconds 0] [--seed 1]
    [--first 0] [--kind KIND] [--plant 0]

A case depends only on the seed, its number and its kind. --plant injects a fault. 1: every reward
is 0.5; 2: an error is not an error of rollmesh; 3: a checkpoint of any run is resumed; 4: a run
hangs; 5: a column is dropped. --planted: first check that the driver detects each of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import grpo_forked as forked
from grpo_folder_mistakes import json_file, run_folder, shards, tokenizer, weights
from grpo_mistakes import (
    REWARD,
    TOML,
    Case,
    Failure,
    command,
    is_number,
    toml_bytes,
    toml_key,
    toml_value,
    write_toml,
)
from grpo_prompt_mistakes import prompts, rewards

SECONDS = 60.0  # a run takes a second; a machine may be loaded
MEMORY = 8 << 30  # of address space, beyond what the process has before the fork
LOGS = "metrics.jsonl", "completions.jsonl", "events"
MOST_SAID = 20_000  # characters
TOLD = re.compile(
    r"^(?:rollmesh grpo: (?:ConfigError|FormatError|[A-Z]\w+Error): \S|rollmesh grpo: error: "
    r"\S|rollmesh: error: \S)",
    re.M,
)

KINDS = {
    "toml_value": toml_value,
    "toml_key": toml_key,
    "toml_bytes": toml_bytes,
    "prompts": prompts,
    "rewards": rewards,
    "weights": weights,
}
KINDS |= {
    "json_file": json_file,
    "tokenizer": tokenizer,
    "run_folder": run_folder,
    "shards": shards,
    "command": command,
}
SHARES = {"run_folder": 3, "rewards": 2}


# ------------------------------------------------------------------------------------- the set-up
def make_base(folder: Path) -> None:
    """Makes the valid inputs: run.toml and folder.toml (the model of a folder), ahead.toml
    (async_level 1); prompts, tokenizer, reward, model; and the results of each run."""
    folder.mkdir()
    shutil.copytree(forked.ROOT / "data/chars", folder / "tok")
    prompts = [f"{a}{b}=" for a in "abcd" for b in "efgh"]
    rows = [json.dumps({"prompt": p, "answer": p.upper(), "row": i}) for i, p in enumerate(prompts)]
    (folder / "train.jsonl").write_text("\n".join(rows[:12]) + "\n")
    (folder / "heldout.jsonl").write_text("\n".join(rows[12:]) + "\n")
    (folder / "reward_of_fuzz.py").write_text(REWARD.format(seen="seen.jsonl"))
    write_toml(TOML, folder / "run.toml")
    write_toml(TOML | {"rollout": TOML["rollout"] | {"async_level": 1}}, folder / "ahead.toml")
    # With such a rate the weights at the end are those at the beginning, to 1e-20.
    write_toml(
        TOML
        | {
            "model": {"path": "model"},
            "tokenizer": {},
            "train": TOML["train"] | {"lr": 1e-30, "steps": 1},
        },
        folder / "folder.toml",
    )
    for name in ("run", "ahead", "folder"):
        if name == "folder":
            shutil.copytree(folder / "run/checkpoints/step_000002", folder / "model")
            shutil.rmtree(folder / "model/trainer")
        said = folder / "said.txt"
        argv = ["grpo", f"{name}.toml", "--out", name]
        if forked.run(argv, said, SECONDS, lambda: at(folder)) != 0:
            raise Failure(said.read_text())
    (folder / "seen.jsonl").unlink()
    for name in ("run", "ahead"):  # a run of which a step is left
        shutil.copytree(folder / name, folder / f"{name}-left")
        shutil.rmtree(folder / f"{name}-left/checkpoints/step_000002")
        cut_lines(folder / f"{name}-left")


def cut_lines(out: Path) -> None:
    """Leaves the logs as a run killed in step 2 does: one line of that step and half a line."""
    for name in ("metrics.jsonl", "completions.jsonl"):
        lines = (out / name).read_bytes().splitlines(keepends=True)
        (out / name).write_bytes(
            b"".join(line for line in lines if json.loads(line)["step"] < 2) + b'{"step": 2, "re'
        )


def at(folder: Path) -> None:
    """Sets the working folder and the memory limit in the fork. Skips the picture, which takes
    longer than the run."""
    from rollmesh.grpo import loop

    os.chdir(folder)
    loop.draw_curves = lambda lines, path: path.touch()
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))


# ------------------------------------------------------------------------------------- the oracle
def tree(folder: Path) -> dict[str, bytes | None]:
    """Returns the paths of a run folder with their contents; the value of a folder is None."""
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in folder.rglob("*")
    }


def judge(
    case: Case, trial: Path, base: Path, status: int, said: str, before: dict[str, bytes | None]
) -> str:
    """Raises Failure; returns refused or accepted."""
    if status == forked.HUNG:
        raise Failure(f"it did not end within {SECONDS:.0f} s")
    if status not in (0, 2):
        raise Failure(f"exit status {status}")
    if left := forked.left_in_shm():
        raise Failure(f"left in /dev/shm: {left}")
    out = trial / "out"
    if halves := [str(p) for p in out.rglob(".*") if p.name not in before and status == 0]:
        raise Failure(f"left in the run folder: {halves}")
    if len(said) > MOST_SAID:
        raise Failure(f"{len(said)} characters were said")
    if status == 2:
        told = [m.start() for m in TOLD.finditer(said)]
        if not told:
            raise Failure("no line gives an error")
        message = said[told[0] :]
        first = message.splitlines()[0]
        if not all(c.isprintable() for c in first):
            raise Failure("control characters in the message")
        if case.verdict in ("accepted", "same"):
            raise Failure("it is refused")
        if case.names and not any(name in first for name in case.names):
            raise Failure(f"it names none of {case.names!r:.500}")
        if case.resumes:
            after = tree(out)
            changed = sorted(
                k for k in after.keys() | before.keys() if after.get(k) != before.get(k)
            )
            if changed := [k for k in changed if case.keeps or not k.startswith(LOGS)]:
                raise Failure(f"the run folder was changed: {changed}")
        return "refused"
    if case.verdict == "refused":
        raise Failure("it is not refused")
    if case.verdict == "same":
        config = next((o for o in case.options if o.endswith(".toml")), "run.toml")
        same_result(out, base / Path(config).stem, case.apart_from)
    case.check(trial)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    if not all(math.isfinite(v) for line in lines for v in line.values() if is_number(v)):
        raise Failure("a metric is not finite")
    return "accepted"


def same_result(out: Path, whole: Path, apart_from: str) -> None:
    a, b = forked.result(out), forked.result(whole)
    if differ := sorted(
        name for name in a.keys() | b.keys() if a.get(name) != b.get(name) and name != apart_from
    ):
        raise Failure(f"another result: {', '.join(differ)}")


def plant_fault(fault: int) -> None:
    """Injects the fault in the fork."""
    from rollmesh.grpo import loop, rollout
    from rollmesh.run import checkpoint, user_code

    if fault == 1:
        user_code._number = lambda value, name, i: 0.5
    elif fault == 2:
        loop.load_dataset = lambda config, tokenizer: [][0]
    elif fault == 3:
        checkpoint.read_state = lambda folder, config, overridden: json.loads(
            (folder / checkpoint.STATE).read_text()
        )["next_step"]
    elif fault == 4:
        loop.load_dataset = lambda config, tokenizer: time.sleep(3600)
    elif fault == 5:
        rollout.columns_of = lambda prompts: {}


def one(seed: int, number: int, kind: str | None, folder: Path, plant: int) -> str:
    """Runs a case; returns what became of it."""
    r = random.Random(f"{seed}/{number}")
    drawn = r.choice([k for k in KINDS for _ in range(SHARES.get(k, 1))])
    kind = kind or drawn
    base, trial = folder / "base", folder / "trial"
    shutil.copytree(
        base,
        trial,
        ignore=lambda where, names: ["run", "ahead", "folder"] if Path(where) == base else [],
    )
    case = KINDS[kind](r, trial)
    config = next((o for o in case.options if o.endswith(".toml")), "run.toml")
    rest = case.options if case.whole else [o for o in case.options if o != config]
    where = (
        []
        if case.whole or "--resume" in rest
        else ["--resume", "out"]
        if case.resumes
        else ["--out", "out"]
    )
    said, before = folder / "said.txt", tree(trial / "out") if case.resumes else {}

    def inside() -> None:
        at(trial)
        plant_fault(plant)

    status = forked.run(
        ["grpo", *([] if case.whole else [config]), *where, *rest],
        said,
        SECONDS if plant != 4 else 3.0,
        inside,
    )
    text = said.read_text(encoding="utf-8", errors="replace")
    try:
        fate = judge(case, trial, base, status, text, before)
    except Exception as error:
        about = f"{kind}, {case.what:.300} ({case.verdict}): {type(error).__name__}: {error}"
        raise Failure(f"{about}; exit status {status}:\n{text[-3000:]}") from error
    finally:
        shutil.rmtree(trial)
    return f"{kind} {fate}"


def run(
    folder: Path,
    *,
    seed: int,
    first: int = 0,
    cases: int = 0,
    seconds: float = 0,
    kind: str | None = None,
    plant: int = 0,
    go_on: bool = False,
) -> tuple[int, Counter[str]]:
    """Runs cases until there are enough or the seconds are over; (how many, what became of them).
    Raises Failure, which says how to run the case alone; with go_on it is shown. folder: with the
    set-up."""
    begin, done = time.monotonic(), 0
    counts: Counter[str] = Counter()
    for number in itertools.count(first):
        if (cases and done == cases) or (seconds and time.monotonic() - begin > seconds):
            break
        try:
            counts[one(seed, number, kind, folder, plant)] += 1
        except Exception as error:  # whatever it is, it is not what was promised
            shutil.rmtree(folder / "trial", ignore_errors=True)
            told = (
                f"grpo_fuzz.py --seed {seed} --first {number} --cases "
                f"1{f' --kind {kind}' if kind else ''}: {error}"
            )
            if not go_on:
                raise Failure(told) from error
            sys.stdout.write(f"{told}\n\n")
            sys.stdout.flush()
            counts["FAILED"] += 1
        done += 1
    return done, counts


def see_planted(folder: Path) -> None:
    """Raises Failure for an injected fault that no case detects."""
    for plant, kind in (
        (1, "rewards"),
        (2, "toml_value"),
        (3, "run_folder"),
        (4, "toml_value"),
        (5, "prompts"),
    ):
        try:
            run(folder, seed=1, cases=60, kind=kind, plant=plant)
        except Failure:
            continue
        raise Failure(f"--plant {plant} is not seen")


def line(done: int, counts: Counter[str], seed: int) -> str:
    return (
        f"grpo_fuzz: {done} runs "
        f"({', '.join(f'{what} {n}' for what, n in sorted(counts.items()))}), seed {seed}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name, default in (("cases", 0), ("seconds", 0), ("seed", 1), ("first", 0), ("plant", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kind", choices=KINDS, help="cases of one kind alone")
    parser.add_argument("--go-on", action="store_true", help="show what fails and go on")
    parser.add_argument("--planted", action="store_true", help="see the injected faults first")
    options = vars(parser.parse_args())
    if not options["cases"] and not options["seconds"]:
        options["cases"] = 300
    planted = options.pop("planted")
    forked.prepare()
    try:
        with tempfile.TemporaryDirectory(prefix="rollmesh-") as name:
            make_base(Path(name) / "base")
            if planted:
                see_planted(Path(name))
            done, counts = run(Path(name), **options)
    except Failure as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(line(done, counts, options["seed"]) + "\n")
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
