"""Where a run's numbers go: DIR/metrics.jsonl always, TensorBoard events beside it, curves.png
drawn from them; completions.jsonl.

Line n describes version n of the weights, see loop.py. Means without values are null. A resumed run
keeps the lines before its first step and drops the rest, so the file reads as one run.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from rollmesh.errors import FormatError
from rollmesh.run.files import writing
from rollmesh.runtime.messages import plain, shown

Metrics = dict[str, Any]
Completions = list[dict[str, Any]]  # lines of completions.jsonl
_log = logging.getLogger("rollmesh.grpo")


class MetricsLog:
    def __init__(self, folder: Path, first_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        self.lines = (
            [m for m in read(self.path) if m["step"] < first_step] if self.path.exists() else []
        )
        self._file = self._written()
        self._folder = folder / "events"
        with writing(self._folder):
            self._events: Any = SummaryWriter(str(self._folder), purge_step=first_step)

    def _written(self) -> TextIO:
        """The file, anew with all lines, open for more."""
        partial = self.path.with_name(".metrics.jsonl.partial")
        try:
            with writing(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                partial.write_text(
                    "".join(json.dumps(m) + "\n" for m in self.lines), encoding="utf-8"
                )
                os.replace(partial, self.path)
        finally:
            partial.unlink(missing_ok=True)
        return self.path.open("a", encoding="utf-8")

    def write(self, metrics: Metrics) -> None:
        if not _is_whole(self.path, self._file):
            _log.warning(
                "%s was removed or changed by another program; it is written again", self.path
            )
            self._file.close()
            self._file = self._written()
        self.lines.append(metrics)
        with writing(self.path):
            self._file.write(json.dumps(metrics) + "\n")
            self._file.flush()
        numbers = {
            name: value
            for name, value in metrics.items()
            if isinstance(value, (int, float)) and name != "step"
        }
        self._draw(
            lambda events: [
                events.add_scalar(name, value, metrics["step"]) for name, value in numbers.items()
            ]
        )

    def _draw(self, call: Callable[[Any], object]) -> None:
        try:
            if self._events is not None:
                call(self._events)
        except Exception as error:  # noqa: BLE001 (a picture ends no run)
            self._events = None
            _log.warning(
                "%s: nothing more is written for TensorBoard: %s: %s",
                self._folder,
                type(error).__name__,
                plain(error),
            )

    def close(self) -> None:
        with writing(self.path):
            self._file.close()
        self._draw(lambda events: events.close())


class CompletionsLog:
    """DIR/completions.jsonl: step, prompt, completion, reward, and whether it ended by itself, of
    the first completions of each step."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        self.path = folder / "completions.jsonl"
        partial = self.path.with_name(".completions.jsonl.partial")
        try:
            with writing(self.path):
                if self.path.exists():
                    with self.path.open("rb") as old, partial.open("wb") as new:
                        new.writelines(line for line in old if _step_of(line) < first_step)
                    os.replace(partial, self.path)
        finally:
            partial.unlink(missing_ok=True)
        self._file = self._opened()

    def _opened(self) -> TextIO:
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return self.path.open("a", encoding="utf-8", errors="backslashreplace")

    def write(self, rows: Completions) -> None:
        if not _is_whole(self.path, self._file):
            _log.warning(
                "%s was removed or changed by another program; it goes on with what is there",
                self.path,
            )
            self._file.close()
            self._file = self._opened()
        with writing(self.path):
            self._file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            self._file.flush()

    def close(self) -> None:
        with writing(self.path):
            self._file.close()


def _is_whole(path: Path, file: TextIO) -> bool:
    """Whether the path still names the open file, with what was written and nothing else."""
    own = os.fstat(file.fileno())
    try:
        there = path.stat()
    except OSError:
        return False
    return os.path.samestat(own, there) and there.st_size == file.tell()


def _step_of(line: bytes) -> float:
    """Infinity: this is half a line, or none of ours."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return math.inf
    return row["step"] if isinstance(row, dict) and type(row.get("step")) is int else math.inf


def read(path: Path) -> list[Metrics]:
    """Complete lines only: a killed run may have left half of one at the end."""
    data = path.read_bytes()
    lines: list[Metrics] = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise FormatError(
                f"{plain(path)}:{number}: expected a line of metrics: {plain(error)}"
            ) from error
        if not isinstance(lines[-1], dict) or type(lines[-1].get("step")) is not int:
            raise FormatError(
                f"{plain(path)}:{number}: expected a line of metrics with a step, got "
                f"{shown(lines[-1])}"
            )
    return lines


def draw_curves(lines: list[Metrics], path: Path) -> None:
    """Reward and held-out reward; trainer against generator; entropy and clipping; speed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = [
        ("reward", ("reward_mean", "eval_reward"), "linear"),
        ("trainer against generator", ("logprob_diff_max", "kl_k3"), "log"),
        ("policy", ("entropy", "clip_share"), "linear"),
        ("seconds a step", ("generate_s", "update_s", "sync_s"), "log"),
    ]
    for axes, (title, names, scale) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        if not any((m.get(name) or 0) > 0 for m in lines for name in names):
            scale = "linear"  # a log scale leaves out zeros
        for name in names:
            points = [
                (m["step"], m[name])
                for m in lines
                if m.get(name) is not None and (scale == "linear" or m[name] > 0)
            ]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    label=name,
                    linewidth=1.2,
                    marker="o" if name == "eval_reward" else None,
                    markersize=3,
                )
        axes.set(title=title, xlabel="step", yscale=scale)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    partial = path.with_name(f".{path.name}.partial")
    try:
        with writing(path):
            figure.savefig(partial, dpi=110, format="png")
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
