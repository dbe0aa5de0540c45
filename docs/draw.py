"""Draws the pictures of the documents as SVG, with the standard library alone.

python docs/draw.py                        docs/architecture.svg, of docs/architecture.txt
python docs/draw.py METRICS.jsonl          docs/learning.svg, of the metrics of a run of
                                           `rollmesh grpo`
python docs/draw.py CURVES.json            docs/curves.svg, of what
                                           `python -m benchmarks.trainer curves CURVES.json` wrote
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
CELL = 20
FILLS = {
    "outer": "#ffffff",
    "plain": "#f3f4f6",
    "python": "#e8f1fb",
    "c": "#eaf6ec",
    "kernel": "#fdf3e3",
    "leaf": "#ffffff",
}
FONT = "font-family='Helvetica, Arial, DejaVu Sans, sans-serif'"


def text(
    x: float,
    y: float,
    words: str,
    size: int = 13,
    weight: str = "normal",
    anchor: str = "middle",
    fill: str = "#1f2937",
) -> str:
    return (
        f"<text x='{x:g}' y='{y:g}' {FONT} font-size='{size}' font-weight='{weight}' "
        f"text-anchor='{anchor}' "
        f"fill='{fill}'>{escape(words)}</text>"
    )


def page(width: float, height: float, parts: list[str]) -> str:
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {height:g}' "
        f"width='{width:g}' height='{height:g}'>"
    )
    return "\n".join(
        [
            head,
            f"<rect width='{width:g}' height='{height:g}' fill='#ffffff'/>",
            *parts,
            "</svg>",
            "",
        ]
    )


def box(
    left: float, top: float, width: float, height: float, kind: str, title: str, second: str
) -> list[str]:
    stroke = "#9ca3af" if kind in ("leaf", "plain") else "#374151"
    middle = left + width / 2
    parts = [
        f"<rect x='{left:g}' y='{top:g}' width='{width:g}' height='{height:g}' rx='6' "
        f"fill='{FILLS[kind]}' stroke='{stroke}'/>",
    ]
    if kind in ("leaf", "plain"):  # the words in the middle
        y = top + height / 2 + (5 if not second else -3)
        parts.append(text(middle, y, title))
        if second:
            parts.append(text(middle, y + 16, second, 11, fill="#4b5563"))
    else:  # the words at the top
        parts.append(text(middle, top + 20, title, 15 if kind == "outer" else 13, "bold"))
        if second:
            parts.append(text(middle, top + 38, second, 11, fill="#4b5563"))
    return parts


def arrow(x1: float, y1: float, x2: float, y2: float, title: str, second: str) -> list[str]:
    tip = 9 if x2 > x1 else -9
    parts = [
        f"<path d='M{x1:g} {y1:g} L{x2 - tip:g} {y2:g}' stroke='#b45309' stroke-width='3' "
        "fill='none'/>",
        f"<path d='M{x2:g} {y2:g} l{-tip * 1.4:g} -7 v14 z' fill='#b45309'/>",
        text((x1 + x2) / 2, y1 - 12, title, 13, "bold"),
    ]
    if second:
        parts.append(text((x1 + x2) / 2, y1 + 22, second, 11, fill="#4b5563"))
    return parts


def architecture(description: str) -> str:
    """The SVG of docs/architecture.txt."""
    parts: list[str] = []
    width = height = 0.0
    for line in description.splitlines():
        words = line.split()
        if not words or words[0] == "#" or line.startswith("#"):
            continue
        if words[0] == "size":
            width, height = float(words[1]) * CELL, float(words[2]) * CELL
            continue
        place = [float(word) * CELL for word in words[1:5]]
        rest = words[6:] if words[0] == "box" else words[5:]
        title, _, second = " ".join(rest).partition(" / ")
        if words[0] == "box":
            left, top, across, down = place
            parts += box(left + 2, top + 2, across - 4, down - 4, words[5], title, second)
        else:
            parts += arrow(*place, title, second)
    return page(width, height, parts)


class Plot:
    """Axes of rewards from 0 to 1 by step, and what is drawn in them."""

    left, top, width, height = 60.0, 30.0, 640.0, 220.0

    def __init__(self, last: int) -> None:
        self.last = last
        self.parts: list[str] = []
        for tenth in range(0, 11, 2):
            y = self.top + (1 - tenth / 10) * self.height
            self.parts.append(f"<path d='M{self.left:g} {y:g} h{self.width:g}' stroke='#e5e7eb'/>")
            self.parts.append(text(self.left - 8, y + 4, f"{tenth / 10:g}", 12, anchor="end"))
        for step in range(0, last + 1, 20):
            self.parts.append(
                text(
                    self.left + step / last * self.width, self.top + self.height + 18, str(step), 12
                )
            )
        self.parts.append(text(self.left + self.width / 2, self.top + self.height + 38, "step", 13))

    def points(self, found: Iterable[tuple[int, float]]) -> str:
        return " ".join(
            f"{self.left + step / self.last * self.width:.1f},"
            f"{self.top + (1 - value) * self.height:.1f}"
            for step, value in found
        )

    def line(self, found: Iterable[tuple[int, float]], colour: str) -> None:
        self.parts.append(
            f"<polyline points='{self.points(found)}' fill='none' stroke='{colour}' "
            "stroke-width='2'/>"
        )

    def band(
        self, low: list[tuple[int, float]], high: list[tuple[int, float]], colour: str
    ) -> None:
        self.parts.append(
            f"<polygon points='{self.points([*low, *reversed(high)])}' fill='{colour}' "
            "fill-opacity='0.15'/>"
        )

    def label(self, colour: str, words: str, y: float, x: float = 450) -> None:
        self.parts.append(
            f"<path d='M{self.left + x:g} {y:g} h24' stroke='{colour}' stroke-width='3'/>"
        )
        self.parts.append(text(self.left + x + 32, y + 4, words, 13, anchor="start"))

    def page(self) -> str:
        return page(730, 305, self.parts)


def learning(metrics: list[dict[str, Any]]) -> str:
    """Reward of each step and of held-out prompts."""
    plot = Plot(max(line["step"] for line in metrics))
    for name, colour, label, y in (
        ("reward_mean", "#2563eb", "reward of the rollouts", 150),
        ("eval_reward", "#ea580c", "held out", 170),
    ):
        plot.line(
            ((line["step"], line[name]) for line in metrics if line.get(name) is not None), colour
        )
        plot.label(colour, label, y)
    return plot.page()


def curves(runs: list[dict[str, Any]]) -> str:
    """Held-out reward of each arm: mean of its seeds, and a band from the lowest to the highest."""
    arms: dict[str, list[dict[int, float]]] = {}
    for run in runs:
        arms.setdefault(run["arm"], []).append(
            {int(step): value for step, value in run["heldout"].items()}
        )
    steps = sorted(next(iter(arms.values()))[0])
    plot = Plot(steps[-1])
    for i, (arm, colour) in enumerate(zip(arms, ("#9333ea", "#ea580c", "#2563eb"), strict=True)):
        found = [[seed[step] for seed in arms[arm]] for step in steps]
        plot.band(
            list(zip(steps, map(min, found), strict=True)),
            list(zip(steps, map(max, found), strict=True)),
            colour,
        )
        plot.line(
            ((step, sum(values) / len(values)) for step, values in zip(steps, found, strict=True)),
            colour,
        )
        plot.label(colour, arm, 150 + 20 * i, 320)
    return plot.page()


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1].endswith(".json"):
        (DOCS / "curves.svg").write_text(
            curves(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["runs"]),
            encoding="utf-8",
        )
    elif len(sys.argv) > 1:
        lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
        (DOCS / "learning.svg").write_text(
            learning([json.loads(line) for line in lines]), encoding="utf-8"
        )
    else:
        description = (DOCS / "architecture.txt").read_text(encoding="utf-8")
        (DOCS / "architecture.svg").write_text(architecture(description), encoding="utf-8")


if __name__ == "__main__":
    main()
