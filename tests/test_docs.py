"""The documents: what they name exists, they fit a screen, the pictures are what the script draws, and the README's Python runs.

Rule for Markdown: no line over 130 characters, but for rows of tables and links that cannot be broken. The README has at most 150
lines."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
MAX_LINE, MAX_README = 130, 150
# A path in backticks begins with one of these.
FOLDERS = ("kernels/", "csrc/", "ext/", "python/", "tests/", "benchmarks/", "configs/", "data/", "docs/", "examples/", ".ci/")


def prose(text: str) -> str:
    """Without blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchor(heading: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", prose(page.read_text(encoding="utf-8")), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_links_to_exists(page: Path) -> None:
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text(encoding="utf-8"))):
        if target.startswith(("http://", "https://")):
            continue
        path, _, name = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (name and name not in anchors(file)):
            missing.append(target)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    """Paths in backticks and in commands, from the root; a * matches at least one file."""
    text = page.read_text(encoding="utf-8")
    if page.name == "CHANGELOG.md":
        return
    named = {
        name.rstrip("/.,:") for name in re.findall(r"(?<![\w/.-])(?:" + "|".join(map(re.escape, FOLDERS)) + r")[\w./*-]*", prose(text))
    }
    commands = "\n".join(re.findall(r"^```\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))
    named |= set(re.findall(r"(?<![\w/.-])(?:tests|configs|examples|docs|\.ci)/[\w./*-]*\w", commands))
    assert [name for name in sorted(named) if not (any(ROOT.glob(name)) if "*" in name else (ROOT / name).exists())] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_fit_a_screen(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    long = [number for number, line in enumerate(lines, 1) if len(line) > MAX_LINE and not line.startswith(("|", "!["))]
    assert long == []
    assert page.name != "README.md" or len(lines) <= MAX_README


def draw() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs/draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_what_the_script_draws() -> None:
    description = (ROOT / "docs/architecture.txt").read_text(encoding="utf-8")
    assert (ROOT / "docs/architecture.svg").read_text(encoding="utf-8") == draw().architecture(description)
    folders = {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir() and any(path.rglob("*.[ch]"))}
    drawn = set(re.findall(r"[a-z_]+", description.partition(" csrc / ")[2].partition("kernels /")[0]))
    assert folders <= drawn


def test_the_curve_is_a_whole_run() -> None:
    points = re.findall(r"polyline points='([^']*)'", (ROOT / "docs/learning.svg").read_text(encoding="utf-8"))
    assert [len(line.split()) for line in points] == [221, 23]  # every step of qwen3_moe_debug.toml, and every tenth
