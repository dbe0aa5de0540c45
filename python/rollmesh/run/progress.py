"""The display of a run: a live table on a terminal, else a plain line every few seconds."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from rollmesh.run.metrics import Completions, Metrics

PLAIN_SECONDS = 5.0  # between plain lines; a line with a held-out reward is always printed
MOST_PRINTED = 600  # characters of a prompt or a completion: its first and last


class Display:
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

    def __exit__(self, *error: object) -> None:
        if self._live:
            with suppress(OSError):  # the terminal was closed
                self._live.stop()

    def show(self, metrics: Metrics, completions: Completions) -> None:
        """Shows a step. Completions are printed if the step's line is."""
        if self._printed == float("-inf"):
            self._first_step = metrics["step"]
        self._heldout = metrics.get("eval_reward", self._heldout)
        now = time.monotonic()
        is_due = "eval_reward" in metrics or now - self._printed >= PLAIN_SECONDS
        if not self._live and not is_due:
            return
        self._printed = now
        items = self._items(metrics)
        if not self._live:
            self._console.print("  ".join(f"{name} {value}" for name, value in items))
        self._print(completions)
        if self._live:
            self._live.update(self._table(items, metrics["step"], now), refresh=True)

    def _print(self, completions: Completions) -> None:
        from rich.table import Table
        from rich.text import Text

        if not completions:
            return
        title = f"step {completions[0]['step']}"
        table = Table(
            "reward", "prompt", "completion", title=title, title_justify="left", show_lines=True
        )
        for c in completions:
            texts = (_printable(c[name]) for name in ("prompt", "completion"))
            # A Text has no markup.
            table.add_row(rounded(c["reward"]), *(Text(text, overflow="fold") for text in texts))
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

    def _table(self, items: list[tuple[str, str]], step: int, now: float) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        done, elapsed = step - self._first_step, now - self._start
        left = elapsed / done * (self._steps - step) if done else 0.0
        title = f"{self._title} · {elapsed:.0f} s, about {left:.0f} s left"
        table = Table(title=title, title_justify="left")
        for name, _ in items:
            table.add_column(name, justify="right")
        table.add_row(*(value for _, value in items))
        table.add_row(ProgressBar(total=self._steps, completed=step, width=12))
        return table


def rounded(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.3f}"


def _printable(source: str | list[dict[str, Any]]) -> str:
    """Returns a text, or a chat with its roles. Characters that move a terminal's cursor are
    escaped."""
    text = source
    if not isinstance(text, str):
        text = "\n".join(f"{m['role']}: {m.get('content')}" for m in text)
    if len(text) > MOST_PRINTED:
        text = f"{text[: MOST_PRINTED // 2]} … {text[-MOST_PRINTED // 2 :]}"
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
