"""The files that a run writes at safe points: metrics, completions, checkpoints and curves.

A signal ends a run only at a safe point (signals.py), where weights and metrics are those of the
last finished step. A run that ends early writes a checkpoint of that step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollmesh.run import metrics
from rollmesh.run.checkpoint import TrainerState
from rollmesh.run.config import Config
from rollmesh.run.files import expect_file
from rollmesh.run.metrics import Completions, Metrics, draw_curves
from rollmesh.run.signals import Interrupts
from rollmesh.runtime.messages import plain

_log = logging.getLogger("rollmesh.grpo")


@dataclass
class RunFolder:
    """A context around the steps of a run.

    save  writes a checkpoint, or raises OSError; arguments: next step, whether the run ends early
    show  displays a step; arguments: metrics, completions to print"""

    out: Path
    config: Config
    first_step: int
    trainer: TrainerState
    interrupts: Interrupts
    save: Callable[[int, bool], object]
    show: Callable[[Metrics, Completions], None]

    def __post_init__(self) -> None:
        out, first_step = self.out, self.first_step
        self._saved = self._next_step = first_step
        self._num_updates = self.trainer.num_updates  # number of updates before the next step
        out.mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "completions.jsonl"):
            expect_file(out / name)
        if (old := out / "metrics.jsonl").exists():
            metrics.read(old)  # raises errors before completions.jsonl is rewritten
        self._completions = metrics.CompletionsLog(out, first_step)
        self._metrics = metrics.MetricsLog(out, first_step)
        self.lines = self._metrics.lines

    def finish(self, step: int, line: Metrics, completions: Completions) -> None:
        """Writes the metrics and completions of a step, displays them, and writes a checkpoint if
        one is due. If the checkpoint fails, the next step tries again; the last step raises
        OSError."""
        table, last = self.config.rollout, self.config.train.steps
        every = self.config.checkpoint.every
        self._completions.write(*completions[: table.log_completions], ensure_ascii=False)
        self._metrics.write(line)
        self._next_step, self._num_updates = min(step + 1, last), self.trainer.num_updates
        self.interrupts.release()
        self.show(line, completions[: table.num_completions_to_print])
        n, saved = self._next_step, self._saved
        if n > saved and (n == last or (every > 0 and n // every > saved // every)):
            try:
                self._checkpoint(is_early=False)
            except OSError as error:
                if step == last:
                    raise
                _log.warning("%s; the checkpoint is tried again after the next step", error)
            self.interrupts.release()

    def _checkpoint(self, is_early: bool) -> None:
        before, self._saved = self._saved, self._next_step
        try:
            self.save(self._next_step, is_early)
        except OSError:
            self._saved = before
            raise

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self._end_early(error)
                return
            self.interrupts.hold("its last files are written")
            try:
                draw_curves(self.lines, self.out / "curves.png")
            except Exception as why:  # noqa: BLE001 (plotting errors do not stop the run)
                _log.warning("curves.png was not drawn: %s: %s", type(why).__name__, plain(why))
            self.interrupts.release()
        finally:
            self._metrics.close()

    def _end_early(self, error: BaseException) -> None:
        """Writes a checkpoint of the last finished step, unless an update has begun since."""
        if self._next_step <= self._saved or self._num_updates != self.trainer.num_updates:
            return
        self.interrupts.drop()
        try:
            self._checkpoint(is_early=True)
        except Exception as why:  # noqa: BLE001 (the first error is raised)
            text = f"{type(why).__name__}: {plain(why)}"
            error.add_note(f"no checkpoint of step {self._next_step}: {text}")
