"""Runs of `rollmesh grpo` on tiny models, what they leave, and fixtures that several files use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import TIMES, TINY_RUN
from paths import ROOT

from rollmesh.run import config, data, metrics

MOE, DENSE = ROOT / "configs/qwen3_moe_debug.toml", ROOT / "configs/qwen3_debug.toml"
SMALL = [*TINY_RUN, "train.steps=4", "checkpoint.every=2", "rollout.log_completions=0"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return data.load_tokenizer(ROOT / "data/chars")


def run(
    out: Path, resume: Path | None = None, show: Callable[[Any], None] = lambda _: None
) -> None:
    from rollmesh.grpo import loop

    this = loop.prepare(config.load(DENSE, SMALL), resume)
    try:
        loop.train(this, out, lambda line, _: show(line))
    finally:
        this.close()


def command(out: Path, changes: Sequence[str] = SMALL, *options: str) -> int:
    """Returns the exit status of `rollmesh grpo` on the dense model, run in this process."""
    from rollmesh.cli import main

    sets = [word for change in changes for word in ("--set", change)]
    return main(["grpo", str(DENSE), "--out", str(out), *options, *sets])


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in m.items() if k not in TIMES} for m in metrics.read(out / "metrics.jsonl")
    ]


def state_of(out: Path) -> dict[str, bytes]:
    """Returns the weights, moments, random state and config of the last checkpoint."""
    folder = out / "checkpoints/step_000004"
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in (*folder.rglob("*.safetensors"), folder / "config.json")
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run: the oracle."""
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollmesh.run.folder.draw_curves", lambda lines, path: path.touch())
        run(out)
    return out
