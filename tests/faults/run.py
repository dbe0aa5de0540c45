"""Plants known faults in the product, one at a time, and says which test caught which.

The faults are in tests/faults/*.toml, a file per area. Each is one change that a user would suffer
from:

    [name]
    what = "What is wrong: what a user would suffer from it."
    file = "the file that is changed"
    old = 'text that stands exactly once in it'
    new = 'what it is replaced by'
    tests = 'arguments of pytest, narrowest first: the tests that should see the fault'

A fault that needs more than one change has `[[name.also]]` tables with file, old and new, applied
in order. Prefer one changed line. tests/faults/test_planted.py checks that every text can be found.
Whoever moves or rewords such a line updates its fault.

This script copies the tree to a scratch folder and builds it there. Then, in a copy of that for
each fault, it makes the change, builds, and runs the fault's tests until the first failure.

A test counts only if it passes without any fault, so all named tests run once on the clean tree
first. A fault is caught when a test fails (pytest's exit status 1) or kills the process by a
signal, or the simulated device ends it (tests/gpu/simt). It is not caught when it does not build,
when pytest cannot collect the tests, or when none ends in time. Exit status 1: some fault was not
caught.

    python tests/faults/run.py [NAME …] [--list] [--wide] [--into DIR]
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

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent
TIMEOUT = 600  # seconds of one build or one run of tests
TIMED_OUT = 124
SIMT_FAULT = 3  # what a process ends with that the simulated device faults
WIDE = [
    f"tests/{name}.py"
    for name in (
        "kernels/test_ops_reference",
        "engine/test_engine",
        "weights/test_sync",
        "request/test_requests",
        "engine/test_generator",
        "weights/test_generator_sync",
        "weights/test_sources",
    )
]


@dataclass(frozen=True)
class Change:
    file: str
    old: str
    new: str

    def apply(self, text: str) -> str:
        """The exact text, or else one that a formatter has broken into other lines."""
        if text.count(self.old) == 1:
            return text.replace(self.old, self.new)
        words = [re.escape(word) for word in re.findall(r"\w+|[^\w\s]", self.old)]
        found = re.findall(old := r"(?:[\s,/()]|\" f?\")*?".join(words), text)
        if len(found) != 1:
            raise ValueError(f"{self.file}: expected one place with {self.old!r}, got {len(found)}")
        return re.sub(old, lambda _: self.new, text)


@dataclass(frozen=True)
class Fault:
    area: str
    name: str
    what: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...]


def read_fault(area: str, name: str, entry: dict[str, Any]) -> Fault:
    changes = tuple(
        Change(*(each[key] for key in ("file", "old", "new")))
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
    """All files that git would keep, and no others; one that has not changed keeps its old copy, so
    that little is compiled again."""
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
    """`work`, a copy of the tree with its builds, and `clean`, what that was before any fault. A
    fault is planted into a work that is copied from clean with the times of its files, so that only
    what the fault touches is compiled."""

    def __init__(self, folder: Path) -> None:
        self.clean, self.work = folder / "clean", folder / "work"
        self.tree, self.lib, self.temp, self.native = (
            self.work / name for name in ("tree", "lib", "temp", "native")
        )
        if self.clean.exists():
            self.restore()
            shutil.rmtree(
                self.lib, ignore_errors=True
            )  # modules that are gone would stay; objects are kept
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
        fixed["CFLAGS"] = (
            # a fault whose function has been renamed must not build
            "-Werror=implicit-function-declaration"
        )
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
        """pytest's exit status and its last words: the test that failed first, or in which the
        process died."""
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
        if (
            status == SIMT_FAULT and "INTERNALERROR" not in said
        ):  # which ends pytest with the same number
            return 1, "the simulated device ended the process"  # its words are in pytest's capture
        return status, said.strip()[-300:]


def plant(scratch: Scratch, fault: Fault, wide: bool) -> tuple[bool, str]:
    """(caught, by what or why not)."""
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
    if status == 0 and wide:
        status, said = scratch.test(WIDE)
    return status == 1 or status < 0, said if status else "SURVIVED"


def baseline(scratch: Scratch, faults: list[Fault], wide: bool) -> str | None:
    if said := scratch.build():
        return said
    for tests in sorted({fault.tests for fault in faults}) + ([tuple(WIDE)] if wide else []):
        status, said = scratch.test([*tests])
        if status:
            return f"without any fault, {shlex.join(tests)}: {said}"
    scratch.keep()
    return None


def run(faults: list[Fault], folder: Path, wide: bool) -> int:
    begin, scratch, missed = time.monotonic(), Scratch(folder), 0
    if said := baseline(scratch, faults, wide):
        print(said, file=sys.stderr)
        return 2
    print(f"without any fault all named tests pass ({time.monotonic() - begin:.0f} s)", flush=True)
    for fault in faults:
        start = time.monotonic()
        caught, said = plant(scratch, fault, wide)
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
        description="plants known faults and says which test caught which"
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="faults, by their name or its beginning, or areas; all by default",
    )
    parser.add_argument("--list", action="store_true", help="show the faults and do nothing")
    parser.add_argument(
        "--wide", action="store_true", help="try more test files when the named tests pass"
    )
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
        return run(faults, options.into.resolve(), options.wide)
    with tempfile.TemporaryDirectory() as folder:
        return run(faults, Path(folder), options.wide)


if __name__ == "__main__":
    sys.exit(main())
