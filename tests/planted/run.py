"""Plants known faults, one at a time, and says which test caught which.

Each tests/planted/NN-name.patch changes one thing that a user would suffer from. Its header says what, why it hurts, and on a
`Tests:` line which tests should see it, narrowest first (arguments of pytest, split like a shell's). This script copies the tree
to a scratch folder and builds it there; then, for every patch, to a copy of that: applies it, builds, runs those tests until the
first failure.

A test counts only if it passes without any patch, so all named tests run once on the clean tree first. A fault is caught when a
test fails (pytest's exit status 1) or kills the process by a signal, or the simulated device ends it (tests/simt). One whose patch
does not apply or does not build is not caught, nor is one that pytest could not collect, or that no test ended in time. Exit
status 1: some fault was not caught.

    python tests/planted/run.py [NAME …] [--list] [--wide] [--into DIR]
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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent
TIMEOUT = 600  # seconds of one build or one run of tests
TIMED_OUT = 124
SIMT_FAULT = 3  # what a process ends with that the simulated device faults
WIDE = [
    f"tests/test_{name}.py" for name in ("ops", "ops_reference", "engine", "sync", "requests", "generator", "generator_sync", "sources")
]


@dataclass(frozen=True)
class Fault:
    """A patch and what its header says."""

    path: Path
    title: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.stem


def read_fault(path: Path) -> Fault:
    header = path.read_text().partition("\n--- ")[0].splitlines()
    tests = [line.removeprefix("Tests:") for line in header if line.startswith("Tests:")]
    if len(tests) != 1 or len(header) < 3:
        raise ValueError(f"{path.name}: the header needs what, why and one line of Tests:")
    return Fault(path, header[0], tuple(shlex.split(tests[0])))


def all_faults() -> list[Fault]:
    return [read_fault(path) for path in sorted(FOLDER.glob("*.patch"))]


def touched(fault: Fault) -> list[str]:
    return re.findall(r"^\+\+\+ b/(\S+)", fault.path.read_text(), re.MULTILINE)


def copy_tree(to: Path) -> None:
    """All files that git would keep, and no others; one that has not changed keeps its old copy, so that little is compiled again."""
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    names = {name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()}
    for stale in [path for path in to.rglob("*") if path.is_file() and str(path.relative_to(to)) not in names]:
        stale.unlink()
    for name in names:
        source, target = ROOT / name, to / name
        if target.exists() and target.read_bytes() == source.read_bytes():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def apply(tree: Path, fault: Fault, *options: str) -> bool:
    command = ["patch", "-p1", "--fuzz=0", "--batch", "--silent", "--no-backup-if-mismatch", *options, "-i", str(fault.path)]
    return subprocess.run(command, cwd=tree, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


class Scratch:
    """`work`, a copy of the tree with its builds, and `clean`, what that was before any fault. A fault is planted into a work that
    is copied from clean with the times of its files, so that only what the fault touches is compiled."""

    def __init__(self, folder: Path) -> None:
        self.clean, self.work = folder / "clean", folder / "work"
        self.tree, self.lib, self.temp, self.native = (self.work / name for name in ("tree", "lib", "temp", "native"))
        if self.clean.exists():
            self.restore()
        copy_tree(self.tree)

    def restore(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.clean, self.work)

    def keep(self) -> None:
        shutil.rmtree(self.clean, ignore_errors=True)
        shutil.copytree(self.work, self.clean)

    def call(self, command: list[str], **variables: str) -> tuple[int, str]:
        fixed = {"ROLLMESH_CUDA": "0", "PYTHONDONTWRITEBYTECODE": "1", "RM_NATIVE_BUILD": str(self.native)}
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
        command = [sys.executable, "setup.py", "-q", "build", "--build-lib", str(self.lib), "--build-temp", str(self.temp)]
        status, said = self.call(command)
        return said if status else None

    def test(self, tests: list[str]) -> tuple[int, str]:
        """pytest's exit status and its last words: the test that failed first, or in which the process died."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=line", "-rfE", *tests]
        status, said = self.call(command, PYTHONPATH=str(self.lib))
        if failed := re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", said, re.MULTILINE):
            return status, failed[1]
        if status < 0 and (died := re.search(r'File "\S*(tests/\w+\.py)", line \d+ in (\w+)', said)):
            return status, f"{signal.Signals(-status).name} in {died[1]}::{died[2]}"
        if status == SIMT_FAULT and "INTERNALERROR" not in said:  # which ends pytest with the same number
            return 1, "the simulated device ended the process"  # its words are in pytest's capture
        return status, said.strip()[-300:]


def plant(scratch: Scratch, fault: Fault, wide: bool) -> tuple[bool, str]:
    """(caught, by what or why not)."""
    scratch.restore()
    if not apply(scratch.tree, fault):
        return False, "the patch does not apply"
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
        print(f"{'caught' if caught else 'MISSED'}  {fault.name:36} {time.monotonic() - start:5.0f} s  {said[:200]}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} caught in {time.monotonic() - begin:.0f} s")
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="plants known faults and says which test caught which")
    parser.add_argument("names", nargs="*", metavar="NAME", help="patches, by their file name or its beginning; all by default")
    parser.add_argument("--list", action="store_true", help="show the faults and do nothing")
    parser.add_argument("--wide", action="store_true", help="try more test files when the named tests pass")
    parser.add_argument("--into", type=Path, metavar="DIR", help="scratch folder to keep, so that the next run builds less")
    options = parser.parse_args()
    faults = [fault for fault in all_faults() if not options.names or fault.name.startswith(tuple(options.names))]
    if not faults:
        parser.error("no fault of that name")
    if options.list:
        for fault in faults:
            print(f"{fault.name:36} {fault.title}")
        return 0
    if shutil.which("patch") is None:
        parser.error("patch is not installed")
    if options.into:
        return run(faults, options.into.resolve(), options.wide)
    with tempfile.TemporaryDirectory() as folder:
        return run(faults, Path(folder), options.wide)


if __name__ == "__main__":
    sys.exit(main())
