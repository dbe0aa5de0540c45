"""A GRPO run whose generator receives only deltas equals the run with whole pushes: 200 steps, bit
for bit.

Oracle: the same configuration, pushed whole. Bound: every metric of every step but the times, and
every weight at the end, are equal.

    pytest -m slow tests/grpo/test_grpo_deltas.py"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("zstandard")

from helpers import TIMES
from marks import SUMMARY
from test_grpo_async import MOE, TINY

from rollmesh.grpo import loop
from rollmesh.run import config, metrics
from rollmesh.sources import DeltaDecoder, DeltaEncoder

STEPS = 200


class ByDeltas:
    """A generator behind a connection on which only the first version is sent whole."""

    def __init__(self, generator: Any):
        self._generator, self._encoder, self._decoder = (
            generator,
            DeltaEncoder(threads=1),
            DeltaDecoder(threads=1),
        )
        self.whole = self.deltas = self.sent = 0

    def sync_weights(self, source: Any, version: int, cast: bool = False) -> Any:
        del cast  # here instead of in a remote trainer
        message = self._encoder.encode(
            {name: tensor.detach().bfloat16() for name, tensor in source.items()}, version
        )
        self.whole += self._encoder.base is None
        self.deltas += self._encoder.base is not None
        self.sent += len(message) if self._encoder.base is not None else 0
        return self._generator.sync_weights(self._decoder, self._decoder.apply(message))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


def run(out: Path, by_deltas: bool) -> tuple[list[dict[str, Any]], dict[str, bytes], Any]:
    changes = [
        *TINY,
        f"train.steps={STEPS}",
        "eval.every=50",
        "generator.dtype=bfloat16",
        "sync.cast=true",
    ]
    this = loop.prepare(config.load(MOE, changes))
    if by_deltas:
        this.generator = ByDeltas(this.generator)
    try:
        loop.train(this, out)
        weights = {
            name: tensor.detach().numpy().tobytes()
            for name, tensor in this.trainer.state_dict().items()
        }
        bytes_of_a_version = sum(
            tensor.numel() * 2 for tensor in this.trainer.state_dict().values()
        )
    finally:
        this.close()
    lines = [
        {name: value for name, value in line.items() if name not in TIMES}
        for line in metrics.read(out / "metrics.jsonl")
    ]
    return lines, weights, (this.generator, bytes_of_a_version)


@pytest.mark.slow
def test_a_run_by_deltas_is_the_run_with_whole_pushes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setattr("rollmesh.run.folder.draw_curves", lambda lines, path: None)
    lines, weights, _ = run(tmp_path / "whole", False)
    got, its, (generator, size) = run(tmp_path / "deltas", True)
    assert (generator.whole, generator.deltas) == (1, STEPS)
    assert len(lines) == STEPS + 1
    for mine, theirs in zip(lines, got, strict=True):
        assert mine == theirs, f"step {mine['step']}"
    assert weights == its
    share = generator.sent / STEPS / size
    pytestconfig.stash[SUMMARY].append(
        f"grpo by deltas: {STEPS} steps, the bits of whole pushes, {share:.1%} of their bytes"
    )
