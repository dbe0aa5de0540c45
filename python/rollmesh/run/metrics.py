"""The metrics of a run: DIR/metrics.jsonl, TensorBoard events, curves.png drawn from them, and
DIR/completions.jsonl.

Line n describes version n of the weights (grpo/loop.py). Means without values are null. A resumed
run keeps the lines before its first step and drops the rest, so a file reads as one run.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollmesh.errors import FormatError
from rollmesh.run.files import library_errors, replace_file, writing
from rollmesh.runtime.messages import plain, shown

Metrics = dict[str, Any]
Completions = list[dict[str, Any]]  # rows of completions.jsonl
_log = logging.getLogger("rollmesh.grpo")


class JsonLines:
    """A JSONL file to which lines are appended. If another program removed or changed the file,
    `restore` makes a new one, with a warning that ends with `then`."""

    def __init__(self, path: Path, restore: Callable[[], object], then: str) -> None:
        self.path, self._restore, self._then = path, restore, then
        self._begin()

    def _begin(self) -> None:
        with writing(self.path):
            self._restore()
            self.path.touch()
            self._size = self.path.stat().st_size

    def write(self, *rows: dict[str, Any], ensure_ascii: bool = True) -> None:
        if not self.path.is_file() or self.path.stat().st_size != self._size:
            _log.warning("%s was removed or changed by another program; %s", self.path, self._then)
            self._begin()
        text = "".join(json.dumps(row, ensure_ascii=ensure_ascii) + "\n" for row in rows)
        data = text.encode(errors="backslashreplace")
        with writing(self.path), self.path.open("ab") as file:
            file.write(data)
        self._size += len(data)


class MetricsLog:
    """DIR/metrics.jsonl, and TensorBoard events in DIR/events."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        path = folder / "metrics.jsonl"
        self.lines = [m for m in read(path) if m["step"] < first_step] if path.exists() else []

        def rewrite(partial: Path) -> None:
            partial.write_text("".join(json.dumps(m) + "\n" for m in self.lines), encoding="utf-8")

        self._file = JsonLines(path, lambda: replace_file(path, rewrite), "it is written again")
        self._folder = folder / "events"
        with writing(self._folder):
            self._events: Any = SummaryWriter(str(self._folder), purge_step=first_step)

    def write(self, metrics: Metrics) -> None:
        self._file.write(metrics)
        self.lines.append(metrics)
        for name, value in metrics.items():
            if isinstance(value, (int, float)) and name != "step":
                self._add_events("add_scalar", name, value, metrics["step"])

    def _add_events(self, method: str, *args: Any) -> None:
        """Calls TensorBoard's writer. Its errors do not stop the run."""
        try:
            if self._events is not None:
                getattr(self._events, method)(*args)
        except Exception as error:  # noqa: BLE001
            self._events, kind = None, type(error).__name__
            text = "%s: TensorBoard gets no more events: %s: %s"
            _log.warning(text, self._folder, kind, plain(error))

    def close(self) -> None:
        self._add_events("close")


class CompletionsLog(JsonLines):
    """DIR/completions.jsonl: the first completions of each step, with step, prompt, reward, and
    whether they ended with an end token."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        path = folder / "completions.jsonl"

        def cut(partial: Path) -> None:
            with path.open("rb") as old, partial.open("wb") as new:
                new.writelines(line for line in old if _step_of(line) < first_step)

        if path.exists():
            replace_file(path, cut)
        super().__init__(
            path, lambda: folder.mkdir(parents=True, exist_ok=True), "later rows are appended"
        )


def _step_of(line: bytes) -> float:
    """Returns the step of a line, or infinity for an incomplete or invalid line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return math.inf
    return row["step"] if isinstance(row, dict) and type(row.get("step")) is int else math.inf


def read(path: Path) -> list[Metrics]:
    """Returns the complete lines of a file. A killed run may leave an incomplete line at the
    end."""
    data = path.read_bytes()
    lines: list[Metrics] = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        where = f"{plain(path)}:{number}: expected a line of metrics"
        try:
            lines.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{where}: {plain(error)}") from error
        if not isinstance(lines[-1], dict) or type(lines[-1].get("step")) is not int:
            raise FormatError(f"{where} with a step, got {shown(lines[-1])}")
    return lines


@contextmanager
def wandb_log(project: str, out: Path, config: dict[str, Any]) -> Iterator[Callable[..., object]]:
    """Yields a function that logs a line of metrics in a Weights & Biases run of `project`, named
    like the run folder. A resumed run is a new run there, with the same name. WANDB_MODE=offline
    stores the run in `out`/wandb, for `wandb sync`. Raises ConfigError for an error of W&B, such as
    a missing login."""
    import wandb

    settings = wandb.Settings(console="off", silent=True)
    with library_errors(f"--wandb {project}: expected a login of W&B, or WANDB_MODE=offline"):
        run = wandb.init(project=project, name=out.name, dir=out, config=config, settings=settings)
    with run:
        run.define_metric("*", step_metric="step")
        yield run.log


def draw_curves(lines: list[Metrics], path: Path) -> None:
    """Writes the plots of a run as a PNG file."""
    figure = plot(lines)
    replace_file(path, lambda partial: figure.savefig(partial, dpi=110, format="png"))


def plot(lines: list[Metrics]) -> Any:
    """Returns a matplotlib figure with the rewards, the differences between trainer and generator,
    entropy and clipping, and the times."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    panels = [
        ("reward", ("reward_mean", "eval_reward"), "linear"),
        ("trainer against generator", ("logprob_diff_max", "kl_k3"), "log"),
        ("policy", ("entropy", "clip_share"), "linear"),
        ("seconds a step", ("generate_s", "update_s", "sync_s"), "log"),
    ]
    for axes, (title, names, scale) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        if not any((m.get(name) or 0) > 0 for m in lines for name in names):
            scale = "linear"  # a log scale leaves out zeros
            if title == "trainer against generator" and lines:
                count = sum(m.get("tokens", 0) for m in lines)
                text = f"0 of {count:,} logprobs differ"
                axes.text(0.5, 0.75, text, transform=axes.transAxes, ha="center", size="large")
        for name in names:
            points = [
                (m["step"], m[name])
                for m in lines
                if m.get(name) is not None and (scale == "linear" or m[name] > 0)
            ]
            if points:
                marker = "o" if name == "eval_reward" else None
                axes.plot(
                    *zip(*points, strict=True),
                    label=name,
                    linewidth=1.2,
                    marker=marker,
                    markersize=3,
                )
        axes.set(title=title, xlabel="step", yscale=scale)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    return figure
