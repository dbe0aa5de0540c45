"""The documents: the files that they name exist, they fit a screen, the pictures match the script
that draws them, and the README's Python runs.

Rule for Markdown: lines have at most 100 characters, except rows of tables and links that cannot be
broken. The README has at most 150 lines."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import runpy
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from paths import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
MAX_LINE, MAX_README = 100, 150
# A path in backticks begins with one of these.
FOLDERS = (
    "kernels/",
    "csrc/",
    "ext/",
    "python/",
    "tests/",
    "benchmarks/",
    "configs/",
    "data/",
    "docs/",
    "examples/",
    ".ci/",
)


def prose(text: str) -> str:
    """Returns the text without blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchor(heading: str) -> str:
    """Returns the anchor that GitHub makes for a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {
        anchor(heading)
        for heading in re.findall(
            r"^#+ (.*)$", prose(page.read_text(encoding="utf-8")), re.MULTILINE
        )
    }


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
    """Checks paths in backticks and in commands, from the root; a * matches at least one file."""
    text = page.read_text(encoding="utf-8")
    if page.name == "CHANGELOG.md":
        return
    named = {
        name.rstrip("/.,:")
        for name in re.findall(
            r"(?<![\w/.-])(?:" + "|".join(map(re.escape, FOLDERS)) + r")[\w./*-]*", prose(text)
        )
    }
    commands = "\n".join(re.findall(r"^```\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))
    named |= set(
        re.findall(r"(?<![\w/.-])(?:tests|configs|examples|docs|\.ci)/[\w./*-]*\w", commands)
    )
    assert [
        name
        for name in sorted(named)
        if not (any(ROOT.glob(name)) if "*" in name else (ROOT / name).exists())
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_fit_a_screen(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    long = [
        number
        for number, line in enumerate(lines, 1)
        if len(line) > MAX_LINE and not line.startswith(("|", "!["))
    ]
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
    assert (ROOT / "docs/architecture.svg").read_text(encoding="utf-8") == draw().architecture(
        description
    )
    folders = {
        path.name
        for path in (ROOT / "csrc").iterdir()
        if path.is_dir() and any(path.rglob("*.[ch]"))
    }
    drawn = set(
        re.findall(r"[a-z_]+", description.partition(" csrc / ")[2].partition("kernels /")[0])
    )
    assert folders <= drawn


def test_the_curve_is_a_whole_run() -> None:
    points = re.findall(
        r"polyline points='([^']*)'", (ROOT / "docs/learning.svg").read_text(encoding="utf-8")
    )
    # Every step of qwen3_moe_debug.toml, and every tenth.
    assert [len(line.split()) for line in points] == [221, 23]


def tiny_checkpoint(folder: Path) -> Any:
    """Makes the README's `folder`: a model of transformers and a tokenizer."""
    import torch
    from helpers import tiny_config
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shutil.copytree(ROOT / "data/chars", folder)
    torch.manual_seed(0)
    sizes = {
        key: value
        for key, value in tiny_config(False).items()
        if key not in ("model_type", "vocab_size")
    }
    vocabulary = len(
        json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    )
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, vocab_size=vocabulary + 16))
    model.save_pretrained(folder)
    return model


def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs its blocks, one after the other, with definitions for the user's own names."""
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"^```python\n(.*?)^```",
        (ROOT / "README.md").read_text(encoding="utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )
    model = tiny_checkpoint(
        tmp_path
        / re.search(
            r"folder = "
            r'"(.*)"',
            blocks[0],
        )[1]
    )  # type: ignore[index]

    def loss_of(model: Any, outputs: Any) -> Any:
        samples = [
            torch.tensor([*out.prompt_token_ids, *sample.token_ids])[None].long()
            for out in outputs
            for sample in out.outputs
        ]
        return sum(model(tokens, labels=tokens).loss for tokens in samples)

    yours = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3),
        "batches": [["abc"], ["de", "f"]],
        "loss_of": loss_of,
    }
    (tmp_path / "readme.py").write_text("\n".join(blocks), encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()):
        found = runpy.run_path("readme.py", yours)
    assert found["gen"].version == 2
    assert all(np.isfinite(out.outputs[0].logprobs).all() for out in found["outputs"])
    found["gen"].close()


def test_the_picture_has_the_layers_of_the_code() -> None:
    """A folder of csrc includes only folders that are drawn below it, and kernels/."""
    description = (
        (ROOT / "docs/architecture.txt").read_text(encoding="utf-8").partition(" csrc / ")[2]
    )
    rows = {
        name: int(top)
        for top, name in re.findall(
            r"^box +\d+ +(\d+) +\d+ +\d+ +leaf +([a-z_]+)", description, re.MULTILINE
        )
    }
    wrong = []
    for path in (ROOT / "csrc").rglob("*.[ch]"):
        folder = path.relative_to(ROOT / "csrc").parts[0]
        for included in re.findall(
            r'^#include "([a-z_]+)/', path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            if included not in (folder, "cuda") and rows[included] <= rows[folder]:
                wrong.append(f"{path.relative_to(ROOT)} includes {included}/")
    assert wrong == []


def test_the_tests_that_documents_name_exist() -> None:
    """Checks names of the form `test_file.py::test_name`."""
    named = {
        match
        for page in PAGES
        for match in re.findall(r"`(test_\w+\.py)::(test_\w+)`", page.read_text("utf-8"))
    }
    assert named, "no document names a test"
    for file, test in sorted(named):
        assert re.search(
            rf"^ *(async )?def {test}\(",
            next((ROOT / "tests").rglob(file)).read_text("utf-8"),
            re.MULTILINE,
        ), f"{file}::{test}"
