"""Types for argparse: numbers in a range. A value that would run nothing, or without end, is a
usage error."""

from __future__ import annotations

import argparse
from collections.abc import Callable

MOST = 10**9  # for counts without an explicit limit
SEEDS = 2**64 - 1
THREADS = 256  # of machine.c and of an engine


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    """Whole numbers of [least, most]."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:  # not a number, or one with more digits than Python reads
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} is not a whole number in [{least}, {most}]"
            )
        return value

    return read


def real(least: float, most: float) -> Callable[[str], float]:
    """Numbers of [least, most], without NaN."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} is not a number in [{least:g}, {most:g}]"
            )
        return value

    return read
