"""Builds the C drivers of tests/support/native against the C core. Without Python, TSan, valgrind
and tight loops see only the code under test.

    python tests/support/native_build.py NAME [--sanitize thread] [--emulate] [--into DIR]

prints the program's path.

The core is compiled by `setup.py archive`, with the flags it always has; a driver is
tests/support/native/NAME.c and whatever tests/support/native/common/*.c holds, or the folder
tests/support/native/NAME alone. --emulate: the variants that this processor cannot run are compiled
over functions that compute what their instructions do, so that any x86 with AVX2 runs them."""

from __future__ import annotations

import argparse
import fcntl
import functools
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "support" / "native"
FLAGS = [
    "-std=gnu11",
    "-O2",
    "-g1",
    "-ffp-contract=off",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Werror",
]


def compiler() -> list[str]:
    """Words of a command, as setup.py reads CC: "ccache gcc", "gcc -m64"."""
    return shlex.split(os.environ.get("CC", "gcc"))


def once(target: Path, make: Callable[[], None]) -> Path:
    """Makes `target`; under pytest-xdist the first worker that asks does, and the others wait for
    it. With RM_PREBUILT, a file that was brought from another machine is used as it is."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if "RM_PREBUILT" in os.environ and target.exists():
        return target
    if (session := os.environ.get("PYTEST_XDIST_TESTRUNUID")) is None:
        make()
        return target
    with target.with_name(f"{target.name}.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if lock.read() != session:
            make()
            lock.truncate(0)
            lock.write(session)
    return target


@functools.cache
def core(into: Path, sanitize: str, emulate: bool) -> Path:
    """librollmesh.a, in the folder under `into` of its sanitizer and of emulation. Fresh objects
    are kept: those of an earlier call, and the kernels' that installing from this tree left in
    build/."""
    at = into / "-".join(
        word
        for word in (sanitize.replace(",", "-") or "plain", "emulated" if emulate else "")
        if word
    )
    environment = os.environ | {
        "ROLLMESH_SANITIZE": sanitize,
        "ROLLMESH_ASSERT": "1",
        "ROLLMESH_EMULATE": "1" if emulate else "",
    }

    def make() -> None:
        for made in (
            ROOT.glob("build/temp.*/kernels")
            if at.name == "plain" and not (at / "kernels").exists()
            else ()
        ):
            shutil.copytree(made, at / "kernels", dirs_exist_ok=True)
        run([sys.executable, "setup.py", "-q", "archive", "--to", str(at)], environment)

    return once(at / "librollmesh.a", make)


@functools.cache
def build(name: str, into: Path, sanitize: str = "", emulate: bool = False) -> Path:
    """Compiles the core and the driver NAME; returns the program, which stands beside the core."""
    archive = core(into, sanitize, emulate)
    program = archive.parent / name
    sources = sorted((FOLDER / name).glob("*.c")) or [
        FOLDER / f"{name}.c",
        *sorted((FOLDER / "common").glob("*.c")),
    ]
    flags = [*FLAGS, "-UNDEBUG", "-Ikernels", "-Icsrc", f"-I{FOLDER}"]
    if sanitize:
        flags += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    command = [
        *compiler(),
        *flags,
        *map(str, sources),
        str(archive),
        "-lm",
        "-ldl",
        "-o",
        str(program),
    ]
    return once(program, lambda: run(command, dict(os.environ)))


@functools.cache
def standin(
    into: Path, sanitize: str = "", name: str = "nccl.c", file: str = "libnccl.so.2"
) -> Path:
    """The stand-in for libnccl.so.2, tests/support/native/standin/nccl.c, to be loaded by drivers
    with the same sanitizer; or another one."""
    at = into / (sanitize.replace(",", "-") or "plain")
    library = at / file
    flags = [*FLAGS, "-fPIC", "-shared", "-fvisibility=hidden", f"-I{FOLDER}"]
    if sanitize:
        flags += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    return once(
        library,
        lambda: run(
            [*compiler(), *flags, str(FOLDER / "standin" / name), "-lrt", "-o", str(library)],
            dict(os.environ),
        ),
    )


def cublas_standin(into: Path) -> Path:
    """Builds the stand-in for libcublasLt.so.13."""
    return standin(into, name="cublaslt.c", file="libcublasLt.so.13")


def run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build a driver of tests/support/native.")
    parser.add_argument("name")
    parser.add_argument("--sanitize", default="", help="thread, or address,undefined")
    parser.add_argument(
        "--emulate", action="store_true", help="variants that this processor lacks run in emulation"
    )
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "native")
    options = parser.parse_args()
    sys.stdout.write(f"{build(options.name, options.into, options.sanitize, options.emulate)}\n")
