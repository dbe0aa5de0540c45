"""The dependencies between the folders, checked by reading the sources: which file includes or
imports which, and which calls are banned in a layer.

Input: every C and Python file of the repository. Oracle: the tables below, which list the allowed
dependencies of each folder. Bound: no exception. For each rule, one violation is injected into a
copy of the tree to show that the rule works.
"""

from __future__ import annotations

import ast
import graphlib
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

FOLDERS = ("kernels", "csrc", "ext", "python", "tests", "benchmarks", "data")

# Allowed targets of each folder's quoted includes. A name without a folder (kernels.h) is in
# kernels/ or beside the file.
DEVICE = {"kernels", "csrc/base", "csrc/device"}
COMM = DEVICE | {"csrc/comm"}
MODEL = COMM | {"csrc/mesh", "csrc/model"}
BELOW = MODEL | {"csrc/gpu", "csrc/weights", "csrc/comm/shm"}
C_LAYERS = {
    "kernels": {"kernels"},
    "csrc/base": {"kernels", "csrc/base"},
    "csrc/device": DEVICE,
    "csrc/comm/shm": COMM | {"csrc/comm/shm"},
    "csrc/comm": COMM,
    "csrc/mesh": {"csrc/base", "csrc/mesh"},
    "csrc/model": MODEL,
    "csrc/gpu": MODEL | {"csrc/scheduler", "csrc/gpu"},
    "csrc/weights": MODEL | {"csrc/gpu", "csrc/weights"},
    "csrc/scheduler": {"kernels", "csrc/base", "csrc/scheduler"},
    "csrc/step": BELOW | {"csrc/scheduler", "csrc/step"},
    "csrc/engine": BELOW | {"csrc/scheduler", "csrc/step", "csrc/engine"},
    "ext": BELOW | {"csrc/scheduler", "csrc/engine", "ext"},
}
# Folders with one header for the files outside of them.
C_INTERFACES = {"csrc/gpu": "gpu.h"}
INCLUDE_PATH = ("kernels", "csrc", "ext")

# Packages and modules of python/rollmesh, and the ones that each may import, lowest first. "" is
# rollmesh itself: the exports of __init__.
_BASE = ("errors", "runtime", "model", "distributed", "request", "weights")
PYTHON_LAYERS = {
    "errors": set(),
    "runtime": {"errors"},
    "model": {"errors", "runtime"},
    "distributed": {"errors", "runtime", "model"},
    "request": {"errors", "runtime", "model", "distributed"},
    "weights": {"errors", "runtime", "model", "distributed", "request"},
    "ops": {"errors", "runtime"},
    "comm": {"distributed"},
    "sources": {"errors", "runtime", "weights"},
    "options": {*_BASE},
    "generator": {*_BASE, "options"},
    "prometheus": {"errors", "generator"},
    "": {*_BASE, "generator", "comm", "ops", "sources"},
    "torch": {*_BASE, "", "ops"},
    "vllm": {*_BASE, "", "options", "generator", "ops", "torch"},
    "titan": {*_BASE, "", "options", "generator", "ops", "torch"},
    "run": {*_BASE, "", "options", "comm", "ops", "sources", "torch", "vllm"},
    "grpo": {*_BASE, "", "options", "comm", "ops", "sources", "torch", "vllm", "run"},
    "cli": {*_BASE, "", "options", "comm", "ops", "sources", "torch", "vllm", "run", "grpo"},
}
# The generator's only run-time dependency; anything else is imported inside the function that needs
# it.
PYTHON_THIRD_PARTY = {
    name: {"numpy"} for name in PYTHON_LAYERS.keys() - {"torch", "vllm", "titan", "run", "grpo"}
}

C_BANNED = re.compile(
    r"(?<![\w.>])(abort|_?exit|_Exit|quick_exit|v?f?printf|f?puts|putchar|perror|system|popen|gets|strcpy|strcat|v?sprintf)\s*\("
)
# fma and sqrt are one instruction each under the flags of setup.py; the results of all other libm
# functions depend on the libm.
KERNEL_BANNED = re.compile(
    r"(?<![\w.>])(malloc|calloc|realloc|free|aligned_alloc|posix_memalign|mmap|"
    r"(?:exp|exp2|expm1|log|log2|log1p|pow|sin|cos|tan|tanh)f?)\s*\("
)
ISA_IFDEF = re.compile(r"^\s*#\s*(?:el)?if\w*\b.*__(?:AVX|SSE|FMA|AMX)", re.MULTILINE)
PYTHON_BANNED_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def c_files(root: Path) -> Iterator[Path]:
    for folder in INCLUDE_PATH:
        yield from sorted(
            path
            for path in (root / folder).rglob("*")
            if path.suffix in {".c", ".h", ".cu", ".cuh"}
        )


def layer_of(path: Path) -> str | None:
    """The row of C_LAYERS that a path relative to the root belongs to."""
    return next((name for name in C_LAYERS if Path(name) in path.parents), None)


def code_only(text: str) -> str:
    """C source with comments and the inside of strings blanked, lines kept."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
    return re.sub(
        pattern, lambda match: '""' + "\n" * match.group().count("\n"), text, flags=re.DOTALL
    )


def c_violations(root: Path) -> Iterator[str]:
    for path in c_files(root):
        where = path.relative_to(root)
        layer = layer_of(where)
        if layer is None:
            yield f"{where}: in no layer"
            continue
        text = path.read_text()
        for bracket, name in re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)', text, re.MULTILINE):
            if bracket == "<":
                if layer != "ext" and (
                    name == "Python.h" or name.startswith(("numpy/", "cpython/"))
                ):
                    yield f"{where}: includes <{name}>"
                continue
            candidates = [path.parent / name, *(root / folder / name for folder in INCLUDE_PATH)]
            found = next(
                (candidate.resolve() for candidate in candidates if candidate.is_file()), None
            )
            if found is None:
                yield f'{where}: "{name}" is not in the tree'
                continue
            target = layer_of(found.relative_to(root.resolve()))
            if target not in C_LAYERS[layer]:
                yield f'{where}: {layer} must not include "{name}"'
            elif target != layer and C_INTERFACES.get(target, found.name) != found.name:
                yield f'{where}: includes "{name}", expected {C_INTERFACES[target]} of {target}'
        code = code_only(text)
        yield from (f"{where}: calls {match[1]}()" for match in C_BANNED.finditer(code))
        if layer == "kernels":
            yield from (f"{where}: calls {match[1]}()" for match in KERNEL_BANNED.finditer(code))
            yield from (
                f"{where}: chooses an instruction set by {match[0].strip()}"
                for match in ISA_IFDEF.finditer(code)
            )


def imports(node: ast.AST, package: str, at_import: bool = True) -> Iterator[tuple[str, bool]]:
    """(absolute module name, is it imported at run time and at module level) of each import;
    expressions have none."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, at_import) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        # `from . import x` may name a module or an attribute; both spellings are offered, the
        # tables know modules only.
        yield from ((f"{module}.{alias.name}", at_import) for alias in node.names)
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    is_type_checking = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield from imports(child, package, at_import and not (is_function or is_type_checking))


def group_of(module: str) -> str:
    """The row of PYTHON_LAYERS of an absolute module name of ours."""
    parts = module.split(".")
    if parts[1:] == ["__main__"]:
        return "cli"
    return parts[1] if len(parts) > 1 and parts[1] in {*PYTHON_LAYERS, "_core"} else ""


def python_violations(root: Path) -> Iterator[str]:
    source = root / "python"
    for path in sorted(root / name for name in python_files(root)):
        where = path.relative_to(root)
        tree = ast.parse(path.read_text(), str(where))
        in_package = source in path.parents
        parts = path.relative_to(source).with_suffix("").parts if in_package else ()
        own = ".".join(parts)
        package = ".".join(parts[:-1])
        group = group_of(own)
        for module, at_import in imports(tree, package):
            top = module.split(".")[0]
            if top in PYTHON_BANNED_MODULES:
                yield f"{where}: imports {top}"
            if not in_package:
                continue
            if top == "rollmesh" and group_of(module) not in PYTHON_LAYERS[group] | {
                group,
                "_core",
            }:
                yield f"{where}: must not import {module}"
            allowed = PYTHON_THIRD_PARTY.get(group)
            if (
                at_import
                and allowed is not None
                and top != "rollmesh"
                and top not in sys.stdlib_module_names | allowed
            ):
                yield f"{where}: imports {top} at module level"
        yield from (f"{where}: {what}" for what in unsafe_calls(tree))


def python_files(root: Path) -> Iterator[Path]:
    for folder in FOLDERS:
        yield from (path.relative_to(root) for path in (root / folder).rglob("*.py"))


def unsafe_calls(tree: ast.Module) -> Iterator[str]:
    """Returns calls that turn data into code."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in {"eval", "exec", "torch.load", "yaml.load", "os.system"}:
            yield f"calls {name}()"
        for keyword in node.keywords:
            is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            if keyword.arg in {"allow_pickle", "trust_remote_code"} and is_true:
                yield f"passes {keyword.arg}=True"


def long_files(root: Path) -> Iterator[str]:
    for path in (*c_files(root), *(root / name for name in python_files(root))):
        lines = len(path.read_text().splitlines())
        if lines > 1100:
            yield f"{path.relative_to(root)}: {lines} lines, at most 1100"


def violations(root: Path) -> list[str]:
    return [*c_violations(root), *python_violations(root), *long_files(root)]


def test_packages_import_each_other_in_one_direction() -> None:
    graphlib.TopologicalSorter(PYTHON_LAYERS).prepare()  # CycleError


def test_the_tree_keeps_its_layers() -> None:
    assert violations(ROOT) == []


def test_the_training_algorithm_stays_short() -> None:
    """Counts the files of rollmesh.grpo together. Everything else of a run is in rollmesh.run."""
    files = (ROOT / "python/rollmesh/grpo").glob("*.py")
    assert sum(len(path.read_text().splitlines()) for path in files) <= 1200


@pytest.mark.parametrize(
    "path, text, said",
    [
        (
            "kernels/cpu/planted.c",
            '#include "base/status.h"\n',
            'kernels must not include "base/status.h"',
        ),
        ("kernels/cpu/planted.c", "void *f(void) { return malloc(1); }\n", "calls malloc()"),
        ("kernels/cpu/planted.c", "float f(float x) { return expf(x); }\n", "calls expf()"),
        ("kernels/cpu/planted.c", "#ifdef __AVX512F__\n#endif\n", "chooses an instruction set"),
        (
            "csrc/base/planted.c",
            '#include "model/spec.h"\n',
            'csrc/base must not include "model/spec.h"',
        ),
        ("csrc/model/planted.c", '#include "engine/engine.h"\n', "csrc/model must not include"),
        ("csrc/model/planted.c", '#include "gpu/gpu.h"\n', "csrc/model must not include"),
        (
            "csrc/step/planted.c",
            '#include "gpu/staged.h"\n',
            'includes "gpu/staged.h", expected gpu.h of csrc/gpu',
        ),
        (
            "csrc/scheduler/planted.c",
            '#include "step/runner.h"\n',
            "csrc/scheduler must not include",
        ),
        ("csrc/step/planted.c", '#include "engine/state.h"\n', "csrc/step must not include"),
        ("csrc/engine/planted.c", "#include <Python.h>\n", "includes <Python.h>"),
        ("csrc/engine/planted.c", '#include "core.h"\n', "csrc/engine must not include"),
        ("csrc/planted.c", "", "in no layer"),
        ("csrc/base/planted.c", "void f(void) { abort(); }\n", "calls abort()"),
        ("ext/planted.c", 'void f(void) { printf("%d", 1); }\n', "calls printf()"),
        ("csrc/base/planted.c", "int x;\n" * 1101, "1101 lines"),
        (
            "python/rollmesh/planted.py",
            "from rollmesh.grpo import loop\n",
            "must not import rollmesh.grpo.loop",
        ),
        ("python/rollmesh/planted.py", "from . import grpo\n", "must not import rollmesh.grpo"),
        (
            "python/rollmesh/planted.py",
            "def f():\n    from .torch import ops\n",
            "must not import rollmesh.torch.ops",
        ),
        ("python/rollmesh/planted.py", "import torch\n", "imports torch at module level"),
        ("python/rollmesh/model/planted.py", "import rollmesh\n", "must not import rollmesh"),
        (
            "python/rollmesh/request/planted.py",
            "from ..weights import sync\n",
            "must not import rollmesh.weights.sync",
        ),
        (
            "python/rollmesh/distributed/planted.py",
            "from rollmesh.request.text import x\n",
            "must not import rollmesh.request.text.x",
        ),
        (
            "python/rollmesh/torch/planted.py",
            "from ..vllm import worker\n",
            "must not import rollmesh.vllm.worker",
        ),
        (
            "python/rollmesh/grpo/planted.py",
            "from rollmesh import cli\n",
            "must not import rollmesh.cli",
        ),
        ("python/rollmesh/grpo/planted.py", "import pickle\n", "imports pickle"),
        ("python/rollmesh/grpo/planted.py", "torch.load('x')\n", "calls torch.load()"),
        ("benchmarks/planted.py", "eval('1')\n", "calls eval()"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, path: str, text: str, said: str) -> None:
    for folder in INCLUDE_PATH:
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so", "*.o")
        )
    target = tmp_path / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    found = [message for message in violations(tmp_path) if message.startswith(path)]
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize(
    "path, text",
    [
        (
            "kernels/cpu/planted.c",
            '// malloc() and printf() in words\nconst char *s = "abort()";\n',
        ),
        (
            "csrc/base/planted.c",
            "void f(void) { rm_sync_abort(s); comm->abort(comm); snprintf(b, 1, x); }\n",
        ),
        (
            "python/rollmesh/planted.py",
            "import numpy as np\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import "
            "torch\n",
        ),
        (
            "python/rollmesh/planted.py",
            "def f():\n    import torch\n    torch.nn.Linear(1, 1).eval()\n",
        ),
        ("python/rollmesh/cli/planted.py", "def f():\n    from rollmesh import grpo\n"),
    ],
)
def test_what_is_allowed_is_not_reported(tmp_path: Path, path: str, text: str) -> None:
    target = tmp_path / path
    target.parent.mkdir(parents=True)
    target.write_text(text)
    assert violations(tmp_path) == []
