"""Builds rollmesh._core: every C source with its own flags, in parallel, and one link.

setuptools' own compiler driver gives all sources of an extension the same flags and starts from
Python's CFLAGS (which define NDEBUG and contain old options such as -O2 -Wall). The kernels need
the opposite: one file compiled once per instruction set with exactly the flags of the numeric
contract. So build_ext keeps setuptools' rules for *where* files go (build_lib, build_temp, in place
for an editable install) and replaces *how* they are made.

`python setup.py archive --to DIR` compiles the same objects, except the extension's, into
DIR/librollmesh.a, for the C drivers of tests/support/native.

kernels/cuda becomes a separate library beside the extension, librollmesh_cuda.so, which contains
the CUDA runtime: the extension does not depend on CUDA, and one build serves machines with and
without a GPU. `python setup.py cuda --to DIR` builds only this library, with ptxas' report on each
kernel in DIR/kernels/cuda/*.ptxas.

The build reads these environment variables:
  CC, CFLAGS, LDFLAGS    the compiler (gcc) and flags added at the end
  ROLLMESH_ASSERT=1      assertions on
  ROLLMESH_WERROR=1      a warning is an error
  ROLLMESH_SANITIZE=…    address,undefined (the interpreter then needs LD_PRELOAD of libasan)
  ROLLMESH_CUDA=0|1      1: always build the CUDA library, 0: never; by default it is built if a
                         suitable nvcc is found
  ROLLMESH_CUDA_ARCHS    its architectures, separated by commas (sm_90a)
  ROLLMESH_JOBS=N        number of parallel compilers; one per core by default
  ROLLMESH_EMULATE=1     emulates the variants that this processor may lack: for tests"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, LinkError, OptionError

ROOT = Path(__file__).resolve().parent

# One binary for Python 3.11 and later. Free-threaded interpreters have no limited API.
LIMITED_API = None if sysconfig.get_config_var("Py_GIL_DISABLED") else 0x030B0000

WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes"]
COMMON = [
    "-std=gnu11",
    "-O3",
    "-g1",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-fPIC",
    "-pthread",
]
INCLUDE = ["-Ikernels", "-Icsrc", "-Iext"]


class Isa(NamedTuple):
    """A variant of the sources in kernels/cpu: its lanes, its way to multiply a panel, its compiler
    flags."""

    lanes: str
    panel: str
    flags: tuple[str, ...]


# kernels/cpu: these are compiled once, with these flags …
ONCE = {
    # The oracle: plain loops, with the FMA instruction instead of a library call.
    "ref*.c": ["-O2", "-mfma"],
    "rope_table.c": ["-O2", "-mfma"],
    "pack.c": ["-mavx2"],  # shared by the variants
    "fp.c": [],
    "profile.c": [],
    "select_isa.c": [],
    "verify.c": ["-O2"],
}
# … and every other source there once for each of these.
ISAS = {
    "avx2": Isa("vec_avx2.h", "panel_float.h", ("-mavx2", "-mfma")),
    "avx512f": Isa("vec_avx512f.h", "panel_float.h", ("-mavx512f", "-mfma")),
    "avx512bf16": Isa(
        "vec_avx512bf16.h", "panel_bf16.h", ("-mavx512f", "-mavx512bw", "-mavx512bf16", "-mfma")
    ),
    "amx": Isa(
        "vec_amx.h",
        "panel_amx.h",
        ("-mavx512f", "-mavx512bw", "-mavx512bf16", "-mfma", "-mamx-tile", "-mamx-bf16"),
    ),
}

# ROLLMESH_EMULATE=1: the variants beyond AVX2 are compiled over functions that emulate their
# instructions (tests/kernels/emulated).
EMULATED = ("-O1", "-mavx2", "-mfma", "-Itests/kernels/emulated", "-DRM_EMULATED", "-Wno-psabi")

# The flags of kernels/cuda that affect results: kernels/cuda/device.cuh. A spill is a warning.
CUDA_FLAGS = [
    "-std=c++20",
    "-O3",
    "-fmad=false",
    "-ftz=true",
    "-prec-div=true",
    "-prec-sqrt=true",
    "-Xptxas=-v,-warn-spills",
]
CUDA_HOST_FLAGS = "-fPIC,-fvisibility=hidden,-ffp-contract=off,-fno-exceptions,-Wall,-Wextra"
CUDA_LIBRARY = "librollmesh_cuda.so"
CUDA_ABSENT = (
    "librollmesh_cuda.absent"  # written instead of the library: the reason for `rollmesh doctor`
)


@dataclass(frozen=True)
class Unit:
    """One compilation: a source (relative to the root), its object (relative to build_temp) and its
    flags."""

    source: Path
    object: Path
    flags: tuple[str, ...]


def core_units() -> list[Unit]:
    """All compilations except the extension's, in a stable order. Sources are found by glob: adding
    a file is enough."""
    found: list[Unit] = []
    emulate = os.environ.get("ROLLMESH_EMULATE") == "1"
    for source in files("kernels/cpu", "*.c"):
        once = next((flags for pattern, flags in ONCE.items() if source.match(pattern)), None)
        if once is not None:
            found.append(
                Unit(
                    source,
                    source.with_suffix(".o"),
                    (*once, *(["-DRM_EMULATED"] if emulate else [])),
                )
            )
            continue
        for name, isa in ISAS.items():
            flags = EMULATED if emulate and name != "avx2" else isa.flags
            own = (
                *flags,
                f"-DRM_ISA={name}",
                f'-DRM_VEC_HEADER="{isa.lanes}"',
                f'-DRM_PANEL_HEADER="{isa.panel}"',
            )
            found.append(Unit(source, source.with_suffix(f".{name}.o"), own))
    return found + [
        Unit(source, source.with_suffix(".o"), ()) for source in files("csrc", "**/*.c")
    ]


def extension_units() -> list[Unit]:
    python = python_flags()
    return [Unit(source, source.with_suffix(".o"), python) for source in files("ext", "**/*.c")]


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
    return (
        [f"-fsanitize={sanitizers}", "-O1", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
        if sanitizers
        else []
    )


def recorded(command: list[str]) -> str:
    """Returns what makes an object differ: the words of a command without its target. -Werror does
    not, since an object that was made with warnings has no record."""
    return shlex.join(word for word in command[:-1] if word != "-Werror")


def is_fresh(path: Path, command: list[str]) -> bool:
    """Returns whether the object was made by this command, wherever it was put, without a warning,
    from files that have not changed since."""
    record, depends = path.with_suffix(".cmd"), path.with_suffix(".d")
    if not (
        path.exists()
        and record.exists()
        and depends.exists()
        and record.read_text() == recorded(command)
    ):
        return False
    inputs = depends.read_text().replace("\\\n", " ").partition(":")[2].split()
    made = path.stat().st_mtime_ns
    return all(
        (ROOT / name).exists() and (ROOT / name).stat().st_mtime_ns < made for name in inputs
    )


def run(path: Path, command: list[str]) -> str | None:
    """Runs a compiler; returns what it said when it failed, prints its warnings when it did not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        return f"{shlex.join(command)}\n{done.stdout}"
    if done.stdout:
        print(done.stdout, file=sys.stderr)
        path.with_suffix(".cmd").unlink(missing_ok=True)
    elif path.suffix == ".o":
        path.with_suffix(".cmd").write_text(recorded(command))
    return None


def at_once(compile_one: Callable[[Any], str | None], todo: list[Any]) -> list[str]:
    """Returns the messages of the compilers that failed; runs several at once."""
    with ThreadPoolExecutor(
        int(os.environ.get("ROLLMESH_JOBS", "0")) or os.cpu_count() or 1
    ) as pool:
        return [message for message in pool.map(compile_one, todo) if message]


def compile_all(todo: list[Unit], temp: Path, force: bool) -> list[str]:
    """Compiles the objects that are not fresh, several at once, and returns their paths."""
    flags = [*COMMON, *WARNINGS, *INCLUDE, *shared_flags()]
    assertions = "-UNDEBUG" if os.environ.get("ROLLMESH_ASSERT") == "1" else "-DNDEBUG"
    if os.environ.get("ROLLMESH_WERROR") == "1":
        flags.append("-Werror")
    flags_end = shlex.split(os.environ.get("CFLAGS", ""))

    def compile_one(unit: Unit) -> str | None:
        path = temp / unit.object
        # kernels/ has no assertions.
        own = unit.flags if unit.source.parts[0] == "kernels" else (assertions, *unit.flags)
        command = [
            *compiler(),
            *flags,
            *own,
            *flags_end,
            "-MMD",
            "-c",
            str(unit.source),
            "-o",
            str(path),
        ]
        return None if is_fresh(path, command) and not force else run(path, command)

    if failed := at_once(compile_one, todo):
        raise CompileError("\n".join(failed))
    return [str(temp / unit.object) for unit in todo]


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "gcc"))


def build_cuda(target: Path, temp: Path) -> None:
    """Compiles kernels/cuda into the library `target`; ptxas' reports stay beside the objects in
    `temp`."""
    nvcc = shutil.which("nvcc")
    if not nvcc:
        raise CompileError(
            "nvcc is not on PATH: install the CUDA toolkit, or build with ROLLMESH_CUDA=0"
        )
    archs = os.environ.get("ROLLMESH_CUDA_ARCHS", "sm_90a").split(",")
    targets = [f"-gencode=arch=compute_{arch.removeprefix('sm_')},code={arch}" for arch in archs]
    flags = [
        *CUDA_FLAGS,
        *targets,
        f"-Xcompiler={CUDA_HOST_FLAGS}",
        f'-DRM_CUDA_ARCHS="{",".join(archs)}"',
        "-Ikernels",
        "-Ikernels/cpu",
    ]
    if os.environ.get("ROLLMESH_WERROR") == "1":
        flags.append("-Werror=all-warnings")

    def compile_one(source: Path) -> str | None:
        path = (temp / source).with_suffix(".o")
        command = [
            nvcc,
            *flags,
            "-MMD",
            "-MF",
            str(path.with_suffix(".d")),
            "-c",
            str(source),
            "-o",
            str(path),
        ]
        if is_fresh(path, command):
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            return f"{shlex.join(command)}\n{done.stdout}"
        path.with_suffix(".ptxas").write_text(done.stdout)
        path.with_suffix(".cmd").write_text(recorded(command))
        return None

    sources = files("kernels/cuda", "*.cu")
    if failed := at_once(compile_one, sources):
        raise CompileError("\n".join(failed))
    objects = [str((temp / source).with_suffix(".o")) for source in sources]
    target.parent.mkdir(parents=True, exist_ok=True)
    link = [
        nvcc,
        "-shared",
        "-cudart=static",
        "-Xlinker=--as-needed,--exclude-libs=ALL,-z,noexecstack,-z,defs",
        *objects,
        "-o",
        str(target),
    ]
    if message := run(target, link):
        raise LinkError(message)


class BuildExt(build_ext):
    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        objects = compile_all(
            core_units() + extension_units(), Path(self.build_temp).resolve(), bool(self.force)
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        for stale in target.parent.glob(target.name.split(".")[0] + ".*.so"):
            stale.unlink()  # one with another tag would be imported before the new one
        link = [
            *compiler(),
            "-shared",
            "-pthread",
            *shared_flags(),
            *objects,
            "-ldl",
            "-o",
            str(target),
        ]
        if message := run(target, [*link, *shlex.split(os.environ.get("LDFLAGS", ""))]):
            raise LinkError(message)
        self.build_cuda_beside(target)

    def copy_extensions_to_source(self) -> None:
        """Also copies what is beside the extension, for builds in place."""
        super().copy_extensions_to_source()
        for ext in self.extensions:
            folder = Path(self.get_ext_fullpath(ext.name)).parent
            for name in (CUDA_LIBRARY, CUDA_ABSENT):
                built = Path(self.build_lib, self.get_ext_filename(ext.name)).with_name(name)
                (folder / name).unlink(missing_ok=True)
                if built.exists():
                    shutil.copy2(built, folder)

    def build_cuda_beside(self, extension: Path) -> None:
        wanted, folder = os.environ.get("ROLLMESH_CUDA", "auto"), extension.parent
        (folder / CUDA_LIBRARY).unlink(missing_ok=True)
        (folder / CUDA_ABSENT).unlink(missing_ok=True)
        if wanted == "0":
            why = "made with ROLLMESH_CUDA=0"
        elif wanted != "1" and os.environ.get("ROLLMESH_SANITIZE"):
            why = "made with ROLLMESH_SANITIZE"
        elif wanted != "1" and not shutil.which("nvcc"):
            why = "made where nvcc was not on PATH"
        else:
            try:
                build_cuda(folder / CUDA_LIBRARY, Path(self.build_temp).resolve())
                return
            except (CompileError, LinkError) as error:
                if wanted == "1":
                    raise
                print(
                    f"no CUDA library in this build (ROLLMESH_CUDA=1 makes it an error): {error}",
                    file=sys.stderr,
                )
                why = "made with an nvcc that failed"
        (folder / CUDA_ABSENT).write_text(f"{why}\n", encoding="utf-8")


class BuildPy(build_py):
    """build_lib is kept between builds, so deleted modules would get into the next wheel; they are
    removed first."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        made = {Path(name).resolve() for name in self.get_outputs(include_bytecode=False)}
        for path in Path(self.build_lib, "rollmesh").resolve().rglob("*.py*"):
            if path.suffix in (".py", ".pyi") and path not in made:
                path.unlink()


class Archive(Command):
    description = "compile the C core into DIR/librollmesh.a, objects beside it"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = [("to=", None, "the folder DIR")]

    def initialize_options(self) -> None:
        self.to: str | None = None

    def finalize_options(self) -> None:
        if not self.to:
            raise OptionError(f"{self.get_command_name()} needs --to DIR")

    def run(self) -> None:
        folder = Path(str(self.to)).resolve()
        objects = compile_all(core_units(), folder, force=False)
        target = folder / "librollmesh.a"
        target.unlink(missing_ok=True)  # or objects of deleted sources would stay in it
        if message := run(target, ["ar", "rcs", str(target), *objects]):
            raise LinkError(message)


class Cuda(Archive):
    description = (
        "compile kernels/cuda into DIR/librollmesh_cuda.so, objects and ptxas' reports beside it"
    )

    def run(self) -> None:
        folder = Path(str(self.to)).resolve()
        build_cuda(folder / CUDA_LIBRARY, folder)


setup(
    ext_modules=[
        Extension(
            "rollmesh._core",
            sources=sorted({str(unit.source) for unit in core_units() + extension_units()}),
            py_limited_api=LIMITED_API is not None,
        )
    ],
    cmdclass={"build_py": BuildPy, "build_ext": BuildExt, "archive": Archive, "cuda": Cuda},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED_API else {},
)
