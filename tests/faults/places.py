"""Finds functions and short patterns in sources, for run.py and mutate.py."""

from __future__ import annotations

import ast
import re
from pathlib import Path

# At the beginning of a line, up to the body: `static int name(int a) {`. C, C++ and CUDA.
_HEAD = re.compile(r"^(?=[A-Za-z_])[^;{}#=]*\)[^;{}#=]*\{", re.MULTILINE)
_NAME = re.compile(r"(\w+)\s*\(")
_NO_NAME = {"__attribute__", "__launch_bounds__", "alignas", "__align__"}


def functions(text: str, file: str) -> dict[str, list[tuple[int, int]]]:
    """Returns where each function of a source begins and ends, by name.

    A method of Python has its class in its name: `Generator.close`. A name has several places where
    a preprocessor or a template repeats it.
    """
    return python_functions(text) if Path(file).suffix == ".py" else c_functions(text)


def c_functions(text: str) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for head in _HEAD.finditer(text):
        end = text.find("\n}", head.end())
        last = len(text) if end < 0 else end + 2
        if name := _name(head[0]):
            found.setdefault(name, []).append((head.start(), last))
    return found


def _name(head: str) -> str | None:
    """Returns the last name before parentheses that are not inside others."""
    name, depth = None, 0
    for match in re.finditer(r"\w+(?=\s*\()|[()]", head):
        if match[0] == "(":
            depth += 1
        elif match[0] == ")":
            depth -= 1
        elif depth == 0 and match[0] not in _NO_NAME:
            name = match[0]
    return name


def python_functions(text: str) -> dict[str, list[tuple[int, int]]]:
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found: dict[str, list[tuple[int, int]]] = {}

    def visit(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = outer
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{outer}.{child.name}" if outer else child.name
                if not isinstance(child, ast.ClassDef):
                    place = (lines[child.lineno - 1], lines[child.end_lineno or child.lineno])
                    found.setdefault(name, []).append(place)
            visit(child, name)

    visit(ast.parse(text), "")
    return found


def pattern(words: str) -> re.Pattern[str]:
    """Returns an expression for these tokens, however a formatter has broken their lines."""
    tokens = [re.escape(token) for token in re.findall(r"\w+|[^\w\s]", words)]
    ends = [r"\b" if re.match(r"\w", words.strip()[i]) else "" for i in (0, -1)]
    return re.compile(ends[0] + r"(?:[\s,/()]|\" f?\")*?".join(tokens) + ends[1])


def replace(text: str, file: str, function: str | None, old: str, new: str) -> str:
    """Replaces the one place of `old` in a function of `text`, or in all of it."""
    places = [(0, len(text))]
    if function is not None and not (places := functions(text, file).get(function, [])):
        raise ValueError(f"{file}: expected a function {function}, got none")
    found = [
        match
        for begin, end in places
        for match in pattern(old).finditer(text, begin, end)
        if match.end() <= end
    ]
    if len(found) != 1:
        where = f"{file}: {function}" if function else file
        raise ValueError(f"{where}: expected one place with {old!r}, got {len(found)}")
    return text[: found[0].start()] + new + text[found[0].end() :]
