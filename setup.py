"""Builds rollmesh._core: every C source with its own flags, in parallel, and one link.

setuptools' own compiler driver gives all sources of an extension the same flags and starts from Python's CFLAGS (which
define NDEBUG, and -O2 -Wall of another day). The kernels need the opposite: one file compiled once per instruction set
with exactly the flags of the numeric contract. So build_ext keeps setuptools' idea of *where* things go (build_lib, build_temp,
in place for an editable install) and replaces *how* they are made.

`python setup.py archive --to DIR` compiles the same objects without the extension's into DIR/librollmesh.a, for the C drivers of
tests/native.

What a build reads from the environment:
  CC, CFLAGS, LDFLAGS    the compiler (gcc) and flags added at the end
  ROLLMESH_ASSERT=1      assertions on
  ROLLMESH_WERROR=1      a warning is an error
  ROLLMESH_SANITIZE=…    address,undefined (the interpreter then needs LD_PRELOAD of libasan)
  ROLLMESH_JOBS=N        compilers at once; one per core by default
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError, OptionError

ROOT = Path(__file__).resolve().parent

# One binary for Python 3.11 and later. Free-threaded interpreters have no limited API.
LIMITED_API = None if sysconfig.get_config_var("Py_GIL_DISABLED") else 0x030B0000

WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes"]
COMMON = ["-std=gnu11", "-O3", "-g1", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-fPIC", "-pthread"]
INCLUDE = ["-Ikernels", "-Icsrc", "-Iext"]

# kernels/cpu: these are compiled once, with these flags …
ONCE = {
    "ref*.c": ["-O2", "-mfma"],  # the oracle: plain loops, but with the FMA instruction and not a library call for each
    "rope_table.c": ["-O2", "-mfma"],
    "pack.c": [],
    "fp.c": [],
    "dispatch.c": [],
}
# … and every other source there once for each of these.
ISAS = {
    "avx2": ["-mavx2", "-mfma"],
}


@dataclass(frozen=True)
class Unit:
    """One compilation: a source (relative to the root), its object (relative to build_temp) and the flags of its own."""

    source: Path
    object: Path
    flags: tuple[str, ...]


def core_units() -> list[Unit]:
    """All compilations but the extension's, in a stable order. Sources are found by glob: adding a file is enough."""
    found: list[Unit] = []
    for source in files("kernels/cpu", "*.c"):
        once = next((flags for pattern, flags in ONCE.items() if source.match(pattern)), None)
        if once is not None:
            found.append(Unit(source, source.with_suffix(".o"), tuple(once)))
            continue
        for isa, flags in ISAS.items():
            own = (*flags, f"-DRM_ISA={isa}", f'-DRM_VEC_HEADER="vec_{isa}.h"')
            found.append(Unit(source, source.with_suffix(f".{isa}.o"), own))
    return found + [Unit(source, source.with_suffix(".o"), ()) for source in files("csrc", "**/*.c")]


def extension_units() -> list[Unit]:
    python = python_flags()
    return [Unit(source, source.with_suffix(".o"), python) for source in files("ext", "*.c")]


def files(folder: str, pattern: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in (ROOT / folder).glob(pattern))


def python_flags() -> tuple[str, ...]:
    import numpy

    flags = [f"-isystem{sysconfig.get_path('include')}", f"-isystem{numpy.get_include()}"]
    if LIMITED_API:
        flags.append(f"-DPy_LIMITED_API={LIMITED_API:#010x}")
    return tuple(flags)


def shared_flags() -> list[str]:
    """Flags of compilation and link that the environment chooses."""
    sanitizers = os.environ.get("ROLLMESH_SANITIZE", "")
    return [f"-fsanitize={sanitizers}", "-O1", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"] if sanitizers else []


def is_fresh(path: Path, command: list[str]) -> bool:
    """True when the object was made by this very command from files that have not changed since."""
    record, depends = path.with_suffix(".cmd"), path.with_suffix(".d")
    if not (path.exists() and record.exists() and depends.exists() and record.read_text() == shlex.join(command)):
        return False
    inputs = depends.read_text().replace("\\\n", " ").partition(":")[2].split()
    made = path.stat().st_mtime_ns
    return all((ROOT / name).exists() and (ROOT / name).stat().st_mtime_ns < made for name in inputs)


def run(path: Path, command: list[str]) -> str | None:
    """Runs a compiler; returns what it said when it failed, prints its warnings when it did not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        return f"{shlex.join(command)}\n{done.stdout}"
    if done.stdout:
        print(done.stdout, file=sys.stderr)
    if path.suffix == ".o":
        path.with_suffix(".cmd").write_text(shlex.join(command))
    return None


def compile_all(todo: list[Unit], temp: Path, force: bool) -> list[str]:
    """Compiles what is not fresh, several at once, and returns the objects' paths."""
    flags = [*COMMON, *WARNINGS, *INCLUDE, *shared_flags()]
    flags.append("-UNDEBUG" if os.environ.get("ROLLMESH_ASSERT") == "1" else "-DNDEBUG")
    if os.environ.get("ROLLMESH_WERROR") == "1":
        flags.append("-Werror")
    flags_end = shlex.split(os.environ.get("CFLAGS", ""))

    def compile_one(unit: Unit) -> str | None:
        path = temp / unit.object
        command = [*compiler(), *flags, *unit.flags, *flags_end, "-MMD", "-c", str(unit.source), "-o", str(path)]
        return None if is_fresh(path, command) and not force else run(path, command)

    with ThreadPoolExecutor(int(os.environ.get("ROLLMESH_JOBS", "0")) or os.cpu_count() or 1) as pool:
        failed = [message for message in pool.map(compile_one, todo) if message]
    if failed:
        raise CompileError("\n".join(failed))
    return [str(temp / unit.object) for unit in todo]


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "gcc"))


class BuildExt(build_ext):
    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        objects = compile_all(core_units() + extension_units(), Path(self.build_temp).resolve(), bool(self.force))
        target.parent.mkdir(parents=True, exist_ok=True)
        for stale in target.parent.glob(target.name.split(".")[0] + ".*.so"):
            stale.unlink()  # one with another tag would be imported before the new one
        link = [*compiler(), "-shared", "-pthread", *shared_flags(), *objects, "-o", str(target)]
        if message := run(target, [*link, *shlex.split(os.environ.get("LDFLAGS", ""))]):
            raise LinkError(message)


class Archive(Command):
    description = "compile the C core into DIR/librollmesh.a, objects beside it"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = [("to=", None, "the folder DIR")]

    def initialize_options(self) -> None:
        self.to: str | None = None

    def finalize_options(self) -> None:
        if not self.to:
            raise OptionError("archive needs --to DIR")

    def run(self) -> None:
        folder = Path(str(self.to)).resolve()
        objects = compile_all(core_units(), folder, force=False)
        target = folder / "librollmesh.a"
        target.unlink(missing_ok=True)  # or objects of sources that are gone would stay in it
        if message := run(target, ["ar", "rcs", str(target), *objects]):
            raise LinkError(message)


setup(
    ext_modules=[
        Extension(
            "rollmesh._core",
            sources=sorted({str(unit.source) for unit in core_units() + extension_units()}),
            py_limited_api=LIMITED_API is not None,
        )
    ],
    cmdclass={"build_ext": BuildExt, "archive": Archive},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED_API else {},
)
