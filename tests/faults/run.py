"""Injects known faults into the product, one at a time, and prints which test catches each.

The faults are in tests/faults/*.toml, one file per area. Each is a change that breaks a promise
which few tests guard, and that mutate.py would not find by chance:

    [name]
    what = "what is wrong, and what a user would suffer from it"
    file = "the file that is changed"
    function = "the function that is changed; left out for a table or a macro"
    old = 'a short pattern that occurs once in the function; line breaks do not count'
    new = 'its replacement'
    tests = 'arguments of pytest: the tests that should catch the fault'

A fault that needs more than one change has `[[name.also]]` tables with file, function, old and new,
applied in order. tests/faults/test_faults.py checks that every pattern is found. If you change such
a line, update its fault.

The script copies the tree to a scratch folder and builds it there. For each fault it makes the
change in a copy of that, builds, and runs the fault's tests until the first failure.

A test counts only if it passes without any fault, so all named tests run once on the clean tree
first. A fault is caught if a test fails (exit status 1 of pytest), if a signal kills the process,
or if the simulated device ends it (tests/gpu/simt). A fault is not caught if it does not build, if
pytest cannot collect the tests, or if all tests exceed their time limit. The exit status is 1 if
some fault was not caught.

    python tests/faults/run.py [NAME …] [--list] [--into DIR]
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import places

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent
TIMEOUT = 600  # seconds of one build or one run of tests
TIMED_OUT = 124
SIMT_FAULT = 3  # what a process ends with that the simulated device faults


@dataclass(frozen=True)
class Change:
    file: str
    function: str | None
    old: str
    new: str

    def apply(self, text: str) -> str:
        return places.replace(text, self.file, self.function, self.old, self.new)


@dataclass(frozen=True)
class Fault:
    area: str
    name: str
    what: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...]


def read_fault(area: str, name: str, entry: dict[str, Any]) -> Fault:
    changes = tuple(
        Change(each["file"], each.get("function"), each["old"], each["new"])
        for each in (entry, *entry.get("also", ()))
    )
    return Fault(area, name, entry["what"], changes, tuple(shlex.split(entry["tests"])))


def all_faults() -> list[Fault]:
    tables = {path.stem: tomllib.loads(path.read_text()) for path in sorted(FOLDER.glob("*.toml"))}
    return [
        read_fault(area, name, entry)
        for area, table in tables.items()
        for name, entry in table.items()
    ]


def copy_tree(to: Path) -> None:
    """Copies the files that git would keep, and removes others from the copy. A file that has not
    changed keeps its old copy, so that little is compiled again."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    names = {name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()}
    for stale in [
        path for path in to.rglob("*") if path.is_file() and str(path.relative_to(to)) not in names
    ]:
        stale.unlink()
    for name in names:
        source, target = ROOT / name, to / name
        if target.exists() and target.read_bytes() == source.read_bytes():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


class Scratch:
    """`work` is a copy of the tree with its builds, and `clean` is `work` without any fault. Each
    fault gets a new `work`, copied from `clean` with the times of its files, so that only what the
    fault touches is compiled."""

    def __init__(self, folder: Path) -> None:
        self.clean, self.work = folder / "clean", folder / "work"
        self.tree, self.lib, self.temp, self.native = (
            self.work / name for name in ("tree", "lib", "temp", "native")
        )
        if self.clean.exists():
            self.restore()
            # Objects are kept; deleted modules would stay.
            shutil.rmtree(self.lib, ignore_errors=True)
        copy_tree(self.tree)

    def restore(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.clean, self.work)

    def keep(self) -> None:
        shutil.rmtree(self.clean, ignore_errors=True)
        shutil.copytree(self.work, self.clean)

    def call(self, command: list[str], **variables: str) -> tuple[int, str]:
        fixed = {
            "ROLLMESH_CUDA": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "RM_NATIVE_BUILD": str(self.native),
        }
        # A fault that calls a function that does not exist must not build.
        fixed["CFLAGS"] = "-Werror=implicit-function-declaration"
        environment = os.environ | fixed | variables
        try:
            done = subprocess.run(
                command,
                cwd=self.tree,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return TIMED_OUT, f"no end within {TIMEOUT} s"
        return done.returncode, done.stdout

    def build(self) -> str | None:
        command = [
            sys.executable,
            "setup.py",
            "-q",
            "build",
            "--build-lib",
            str(self.lib),
            "--build-temp",
            str(self.temp),
        ]
        status, said = self.call(command)
        return said if status else None

    def test(self, tests: list[str]) -> tuple[int, str]:
        """Returns pytest's exit status, and the test that failed first or in which the process
        died."""
        options = [
            "-x",
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            "--tb=line",
            "-rfE",
            "-m",
            "not slow",
        ]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        status, said = self.call(command, PYTHONPATH=str(self.lib))
        if failed := re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", said, re.MULTILINE):
            return status, failed[1]
        if status < 0 and (
            died := re.search(r'File "\S*(tests/[\w/]+\.py)", line \d+ in (\w+)', said)
        ):
            return status, f"{signal.Signals(-status).name} in {died[1]}::{died[2]}"
        # INTERNALERROR: pytest ends with the same status then.
        if status == SIMT_FAULT and "INTERNALERROR" not in said:
            return 1, "the simulated device ended the process"
        return status, said.strip()[-300:]


def inject(scratch: Scratch, fault: Fault) -> tuple[bool, str]:
    """Returns whether a test caught the fault, and which one or why not."""
    scratch.restore()
    try:
        for change in fault.changes:
            path = scratch.tree / change.file
            path.write_text(change.apply(path.read_text()))
    except (OSError, ValueError) as error:
        return False, str(error)
    if said := scratch.build():
        return False, f"does not build: {said.strip()[-300:]}"
    status, said = scratch.test([*fault.tests])
    return status == 1 or status < 0, said if status else "SURVIVED"


def baseline(scratch: Scratch, faults: list[Fault]) -> str | None:
    if said := scratch.build():
        return said
    for tests in sorted({fault.tests for fault in faults}):
        status, said = scratch.test([*tests])
        if status:
            return f"without any fault, {shlex.join(tests)}: {said}"
    scratch.keep()
    return None


def run(faults: list[Fault], folder: Path) -> int:
    begin, scratch, missed = time.monotonic(), Scratch(folder), 0
    if said := baseline(scratch, faults):
        print(said, file=sys.stderr)
        return 2
    print(f"without any fault all named tests pass ({time.monotonic() - begin:.0f} s)", flush=True)
    for fault in faults:
        start = time.monotonic()
        caught, said = inject(scratch, fault)
        missed += not caught
        print(
            f"{'caught' if caught else 'MISSED'}  {fault.name:36} {time.monotonic() - start:5.0f} "
            f"s  {said[:200]}",
            flush=True,
        )
    print(f"{len(faults) - missed} of {len(faults)} caught in {time.monotonic() - begin:.0f} s")
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description="injects known faults and prints which test catches each"
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="faults, by their name or its beginning, or areas; all by default",
    )
    parser.add_argument("--list", action="store_true", help="show the faults and do nothing")
    parser.add_argument(
        "--into",
        type=Path,
        metavar="DIR",
        help="scratch folder to keep, so that the next run builds less",
    )
    options = parser.parse_args()
    names = options.names
    faults = [
        fault
        for fault in all_faults()
        if not names or fault.area in names or fault.name.startswith(tuple(names))
    ]
    if not faults:
        parser.error("no fault of that name")
    if options.list:
        for fault in faults:
            print(f"{fault.area:8} {fault.name:36} {fault.what}")
        return 0
    if options.into:
        return run(faults, options.into.resolve())
    with tempfile.TemporaryDirectory() as folder:
        return run(faults, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
