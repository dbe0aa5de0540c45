"""The figures of benchmarks.gpu as tables.  python -m benchmarks.gpu_table FILE.json …

Prints Markdown: the machine, and for each file its commit, its limits and its rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def table(name: str, found: dict[str, Any]) -> list[str]:
    limits = ", ".join(
        f"{key} {value:.1f}" for key, value in found["limits"].items() if isinstance(value, float)
    )
    lines = [
        f"## {name}",
        "",
        f"Commit {found['machine']['commit']}. Limits: {limits}.",
        "",
        "| part | what | family | ms | rate | of the limit |",
        "|---|---|---|--:|--:|--:|",
    ]
    for row in found["rows"]:
        rate = "" if row["rate"] is None else f"{row['rate']:.1f} {row['unit']}"
        share = "" if row["share"] is None else f"{row['share']:.1%}"
        lines.append(
            f"| {row['part']} | {row['what']} | {row['family']} | {1e3 * row['seconds']:.3f} "
            f"| {rate} | {share} |"
        )
    return [*lines, ""]


def tables(paths: list[Path]) -> str:
    found = {path.stem: json.loads(path.read_text()) for path in paths}
    about = next(iter(found.values()))["machine"]
    lines = [", ".join(f"{key} {about[key]}" for key in about if key != "options"), ""]
    for name, one in found.items():
        lines += table(name, one)
    return "\n".join(lines)


if __name__ == "__main__":
    if not sys.argv[1:]:
        raise SystemExit(
            f"benchmarks.gpu_table: expected files that benchmarks.gpu wrote\n{__doc__}"
        )
    print(tables([Path(word) for word in sys.argv[1:]]))
