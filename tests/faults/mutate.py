"""Mutates product files at random places and prints which mutants the tests of their folder kill.

A mutation changes a comparison, a constant by 1, `and` to `or`, or drops a statement or a `not`.
Files of Python are read by `ast`, files of C and CUDA by simple rules for tokens.

    python tests/faults/mutate.py --files python/rollmesh/grpo/loss.py [--count 20] [--seed 1]

The script works on a copy of the tree, which it removes at the end, or keeps where --into says. C
is built there; if all files are Python, the copy takes the extension that was built in place. Tests
run without any mutation first: all must pass. The tests of a file are the quick ones of the folder
that FOLDERS names, or those that --tests names. A mutant is killed if a test fails, if the process
dies or if the tests take ten times as long. A mutant that does not build does not count.

Some survivors are equivalent to the original. Read each one; add a test for the others.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import places
from run import ROOT, Scratch, copy_tree

# Where the tests of a file are. The first prefix that fits counts.
FOLDERS = {
    "kernels/cuda": "gpu",
    "kernels/device.h": "gpu",
    "kernels/vendor_gemm.h": "gpu",
    "kernels": "kernels",
    "csrc/comm": "mesh",
    "csrc/device": "gpu",
    "csrc/gpu": "gpu",
    "csrc/mesh": "mesh",
    "csrc/model": "model",
    "csrc/weights": "weights",
    "csrc": "engine",
    "ext/comm": "mesh",
    "ext/gpu": "gpu",
    "ext/ops": "kernels",
    "ext": "engine",
    "python/rollmesh/cli": "cli",
    "python/rollmesh/comm.py": "mesh",
    "python/rollmesh/distributed": "mesh",
    "python/rollmesh/grpo": "grpo",
    "python/rollmesh/model/torchtitan.py": "titan",
    "python/rollmesh/model": "model",
    "python/rollmesh/ops": "kernels",
    "python/rollmesh/request": "request",
    "python/rollmesh/run": "run",
    "python/rollmesh/sources.py": "weights",
    "python/rollmesh/titan": "titan",
    "python/rollmesh/torch": "torch",
    "python/rollmesh/vllm": "vllm",
    "python/rollmesh/weights/transport/loans.py": "gpu",
    "python/rollmesh/weights": "weights",
    "python/rollmesh": "engine",
}
COMPARISONS = {
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "==": ("!=",),
    "!=": ("==",),
    "is": ("is not",),
    "is not": ("is",),
    "in": ("not in",),
    "not in": ("in",),
}
SHORTEST_LIMIT = 60  # seconds for the tests of one mutant, at least


def tests_of(file: str) -> str:
    folder = next(to for prefix, to in FOLDERS.items() if f"{file}/".startswith(f"{prefix}/"))
    return f"tests/{folder}"


@dataclass(frozen=True)
class Mutation:
    """Replaces the bytes [begin, end) of a file. `line` counts from 1."""

    file: str
    line: int
    begin: int
    end: int
    old: str
    new: str

    def apply(self, text: str) -> str:
        data = text.encode()
        return (data[: self.begin] + self.new.encode() + data[self.end :]).decode()

    def __str__(self) -> str:
        old = " ".join(self.old.split())
        return f"{self.file}:{self.line}: {old[:60]} → {self.new or 'nothing'}"


# ----------------------------------------------------------------------------------------- Python
DROPPED = (ast.Expr, ast.AugAssign, ast.Raise, ast.Delete, ast.Break, ast.Continue)


def of_python(file: str, text: str) -> Iterator[Mutation]:
    """Yields every mutation of a module. Annotations, docstrings and f-strings stay as they are."""
    data = text.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def at(line: int, column: int) -> int:
        return starts[line - 1] + column

    def span(node: ast.AST) -> tuple[int, int]:
        return (
            at(node.lineno, node.col_offset),  # type: ignore[attr-defined]
            at(node.end_lineno, node.end_col_offset),  # type: ignore[attr-defined]
        )

    def change(begin: int, end: int, new: str) -> Mutation:
        line = data.count(b"\n", 0, begin) + 1
        return Mutation(file, line, begin, end, data[begin:end].decode(), new)

    def between(left: ast.AST, right: ast.AST, word: str) -> tuple[int, int] | None:
        """Returns the place of an operator between two nodes, which may have parentheses."""
        begin, end = span(left)[1], span(right)[0]
        words = r"\s+".join(map(re.escape, word.split()))
        ends = r"\b" if word[0].isalpha() else ""
        found = re.search(rf"{ends}{words}{ends}".encode(), data[begin:end])
        return found and (begin + found.start(), begin + found.end())

    def visit(node: ast.AST) -> Iterator[Mutation]:
        if isinstance(node, ast.JoinedStr):  # CPython 3.11 has wrong places inside
            return
        if isinstance(node, ast.Compare):
            terms = [node.left, *node.comparators]
            for left, operator, right in zip(terms, node.ops, terms[1:], strict=False):
                word = OPERATORS[type(operator)]
                if place := between(left, right, word):
                    yield from (change(*place, new) for new in COMPARISONS[word])
        elif isinstance(node, ast.BoolOp):
            word, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                if place := between(left, right, word):
                    yield change(*place, new)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield change(span(node)[0], span(node.operand)[0], "")
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield from (change(*span(node), f"{node.value + step}") for step in (1, -1))
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield change(*span(node), str(not node.value))
        if (isinstance(node, DROPPED) and not is_docstring(node)) or (
            isinstance(node, ast.Assign) and not isinstance(node.targets[0], (ast.Name, ast.Tuple))
        ):
            yield change(*span(node), "pass")
        for name, child in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for each in child if isinstance(child, list) else [child]:
                if isinstance(each, ast.AST):
                    yield from visit(each)

    yield from visit(ast.parse(text))


OPERATORS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
}


def is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


# ---------------------------------------------------------------------------------------------- C
# Comments, strings and preprocessor lines are blanked first, so that offsets stay.
NOT_CODE = re.compile(
    rb"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*",
    re.DOTALL | re.MULTILINE,
)
C_COMPARISON = re.compile(rb"(?<= )(?:<=|>=|==|!=|<|>)(?=\s)")
C_LOGICAL = re.compile(rb"&&|\|\|")
C_NUMBER = re.compile(rb"(?<![\w.])(?:0|[1-9]\d*)(?![\w.])")
C_STATEMENT = re.compile(
    rb"(?<=[;{}\n])[ \t]*\n?[ \t]*((?:[\w.\[\]]|->)+(?: [-+*/|&^]?= [^;{}]*|\([^;{}]*\)|\+\+|--)?;)"
)
C_KEEPS = (b"return", b"else", b"goto", b"do", b"default", b"}")


def of_c(file: str, text: str) -> Iterator[Mutation]:
    """Yields mutations inside the functions of a source of C or CUDA."""
    data = text.encode()
    code = NOT_CODE.sub(lambda match: re.sub(rb"[^\n]", b" ", match[0]), data)
    bodies = sorted(
        (len(text[:begin].encode()), len(text[:end].encode()))
        for spans in places.c_functions(text).values()
        for begin, end in spans
    )

    def change(begin: int, end: int, new: str) -> Mutation:
        line = data.count(b"\n", 0, begin) + 1
        return Mutation(file, line, begin, end, data[begin:end].decode(), new)

    for begin, end in bodies:
        begin = code.index(b"{", begin)
        for match in C_COMPARISON.finditer(code, begin, end):
            yield from (change(*match.span(), new) for new in COMPARISONS[match[0].decode()])
        for match in C_LOGICAL.finditer(code, begin, end):
            yield change(*match.span(), "||" if match[0] == b"&&" else "&&")
        for match in C_NUMBER.finditer(code, begin, end):
            value = int(match[0])
            yield from (change(*match.span(), str(value + step)) for step in (1, -1))
        for match in C_STATEMENT.finditer(code, begin, end):
            if not match[1].startswith(C_KEEPS):
                yield change(*match.span(1), ";")


def mutations(files: list[str]) -> list[Mutation]:
    found: list[Mutation] = []
    for file in files:
        text = (ROOT / file).read_text()
        found += (of_python if file.endswith(".py") else of_c)(file, text)
    return found


# ------------------------------------------------------------------------------------------- runs
@dataclass
class Result:
    killed: int = 0
    broken: int = 0  # did not build
    survivors: list[Mutation] = field(default_factory=list)

    def __str__(self) -> str:
        total = self.killed + len(self.survivors)
        rate = f"{100 * self.killed / total:.0f} %" if total else "none"
        lines = [f"killed {self.killed} of {total} ({rate}); {self.broken} did not build"]
        return "\n".join(lines + [f"survived  {mutation}" for mutation in self.survivors])


class Copy:
    """A copy of the tree in which one file at a time is mutated."""

    def __init__(self, folder: Path, compiled: bool) -> None:
        self.compiled = compiled
        if compiled:
            scratch = self.scratch = Scratch(folder)
            if said := scratch.build():
                raise RuntimeError(said)
            self.tree, self.path = scratch.tree, scratch.lib
            return
        self.tree = folder / "tree"
        self.path = self.tree / "python"
        copy_tree(self.tree)
        built = sorted((ROOT / "python/rollmesh").glob("*.so"))
        if not built:
            raise RuntimeError("extension: expected one built in place, got none")
        for library in built:
            shutil.copy2(library, self.path / "rollmesh")

    def test(self, tests: list[str], limit: float) -> bool:
        """Returns whether all tests pass within `limit` seconds."""
        options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=no"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=self.tree,
            env={**os.environ, "PYTHONPATH": str(self.path), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(timeout=limit) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what the tests have started
            process.wait()

    def kills(self, mutation: Mutation, tests: list[str], limit: float) -> bool | None:
        """Returns whether a test fails with the mutation; None if it does not build."""
        file = self.tree / mutation.file
        text = file.read_text()
        try:
            file.write_text(mutation.apply(text))
            if self.compiled and self.scratch.build():
                return None
            return not self.test(tests, limit)
        finally:
            file.write_text(text)


def run(files: list[str], count: int, seed: int, tests: list[str] | None, folder: Path) -> Result:
    """Tries `count` mutations of `files`, drawn by `seed`."""
    every = mutations(files)
    drawn = random.Random(seed).sample(every, min(count, len(every)))
    copy = Copy(folder, compiled=any(not file.endswith(".py") for file in files))
    limits: dict[str, float] = {}
    result = Result()
    print(f"{len(every)} mutations, {len(drawn)} of them drawn by seed {seed}", flush=True)
    for mutation in drawn:
        words = tests or [tests_of(mutation.file)]
        if (key := " ".join(words)) not in limits:
            begin = time.monotonic()
            if not copy.test(words, 3600):
                raise RuntimeError(f"{key}: expected tests that pass without a mutation")
            limits[key] = max(SHORTEST_LIMIT, 10 * (time.monotonic() - begin))
        killed = copy.kills(mutation, words, limits[key])
        if killed is None:
            result.broken += 1
        elif killed:
            result.killed += 1
        else:
            result.survivors.append(mutation)
        state = {None: "no build", True: "killed", False: "SURVIVED"}[killed]
        print(f"{state:9} {mutation}", flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="mutates product files and prints the kill rate")
    parser.add_argument("--files", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--count", type=int, default=20, help="mutations to try (20)")
    parser.add_argument("--seed", type=int, default=1, help="which mutations are drawn (1)")
    parser.add_argument("--tests", metavar="ARGS", help="arguments of pytest instead of the folder")
    parser.add_argument("--into", type=Path, metavar="DIR", help="scratch folder to keep")
    options = parser.parse_args()
    files = [Path(os.path.abspath(file)).relative_to(ROOT).as_posix() for file in options.files]
    tests = shlex.split(options.tests) if options.tests else None
    arguments = files, options.count, options.seed, tests
    if options.into:
        print(run(*arguments, options.into.resolve()))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        print(run(*arguments, Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
