"""The live display of a run: a table that is redrawn on a terminal, one plain line every few
seconds where output is a file."""

from __future__ import annotations

import time
from contextlib import suppress
from types import TracebackType
from typing import Any

from rollmesh.run.metrics import Completions, Metrics

PLAIN_SECONDS = 5.0  # between plain lines; lines with a held-out reward are always printed
MOST_PRINTED = 600  # characters of a prompt or a completion: its first and last


class Display:
    """Picks the form by whether standard output is a terminal."""

    def __init__(self, title: str, steps: int) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False, soft_wrap=True)
        self._live = (
            Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        )
        self._title, self._steps = title, steps
        self._heldout: float | None = None
        self._start, self._printed, self._first_step = time.monotonic(), float("-inf"), 0

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            with suppress(OSError):  # a terminal that has gone
                self._live.stop()

    def show(self, metrics: Metrics, completions: Completions) -> None:
        """`completions` are printed with the lines that are."""
        if self._printed == float("-inf"):
            self._first_step = metrics["step"]
        self._heldout = metrics.get("eval_reward", self._heldout)
        now = time.monotonic()
        if self._live:
            self._printed = now
            self._print(completions)
            self._live.update(self._table(metrics, now), refresh=True)
        elif "eval_reward" in metrics or now - self._printed >= PLAIN_SECONDS:
            self._printed = now
            self._console.print(
                "  ".join(f"{name} {value}" for name, value in self._items(metrics))
            )
            self._print(completions)

    def _print(self, completions: Completions) -> None:
        from rich.table import Table
        from rich.text import Text

        if not completions:
            return
        table = Table(
            "reward",
            "prompt",
            "completion",
            title=f"step {completions[0]['step']}",
            title_justify="left",
            show_lines=True,
        )
        for c in completions:
            texts = (
                Text(_printable(c[name]), overflow="fold") for name in ("prompt", "completion")
            )  # Text: no markup
            table.add_row(rounded(c["reward"]), *texts)
        self._console.print(table, soft_wrap=False)

    def _items(self, m: Metrics) -> list[tuple[str, str]]:
        kl = [("KL ref", f"{m['kl_ref']:.4f}")] if m.get("kl_ref") else []
        return [
            ("step", f"{m['step']}/{self._steps}"),
            ("reward", rounded(m["reward_mean"])),
            ("held-out", rounded(self._heldout)),
            ("KL", f"{m['kl_k3']:.1e}"),
            *kl,
            ("max |Δlogp|", f"{m['logprob_diff_max']:.1e}"),
            ("tokens/s", f"{m['tokens_per_s']:,.0f}"),
            ("sync", f"{m['sync_s'] * 1e3:.1f} ms"),
        ]

    def _table(self, metrics: Metrics, now: float) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        done = metrics["step"] - self._first_step
        elapsed = now - self._start
        left = elapsed / done * (self._steps - metrics["step"]) if done else 0.0
        table = Table(
            title=f"{self._title} · {elapsed:.0f} s, about {left:.0f} s left", title_justify="left"
        )
        items = self._items(metrics)
        for name, _ in items:
            table.add_column(name, justify="right")
        table.add_row(*(value for _, value in items))
        table.add_row(ProgressBar(total=self._steps, completed=metrics["step"], width=12))
        return table


def rounded(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.3f}"


def _printable(source: str | list[dict[str, str]]) -> str:
    """A text, or a chat with its roles; what would move a terminal's cursor is escaped."""
    text = (
        source
        if isinstance(source, str)
        else "\n".join(f"{m['role']}: {m['content']}" for m in source)
    )
    if len(text) > MOST_PRINTED:
        text = f"{text[: MOST_PRINTED // 2]} … {text[-MOST_PRINTED // 2 :]}"
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
