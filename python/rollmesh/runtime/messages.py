"""Values in messages: on one line, of bounded length, and never raising. A wrong argument may be a
megabyte long, contain itself, or be an integer with more digits than Python prints.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Any

MAX_TOLD = 8000  # characters of one rank's error that the others get: a list of offenders fits
MOST = 200  # characters of a value
MOST_LISTED = 20  # keys that a message names
MOST_SUGGESTED = 2000  # characters of keys that a message repeats as options of a command

# Looks at a few elements of a container only: one that holds itself a thousand times over has more
# of them than can be printed.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxdict, _SHORT.maxset = 4, 16, 16, 16, 16
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 300


def shown(value: Any) -> str:
    """The repr of a value, cut to a line."""
    try:
        text = _SHORT.repr(value)
    except (ValueError, RecursionError):  # of integers with thousands of digits
        return f"a {type(value).__name__} too large to print"
    return text if len(text) <= MOST else f"{text[:MOST]}…"


def plain(text: object) -> str:
    """A path, a key or another error's message, without quotes: unprintable characters are escaped,
    a long text is cut."""
    try:
        whole = str(text)
    except (Exception, SystemExit):  # noqa: BLE001 (whatever __str__ raises)
        whole = f"a {type(text).__name__} that cannot be printed"
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in whole[:MOST])
    return line if len(whole) <= MOST else f"{line}…"


def listed(items: Iterable[tuple[Any, ...]]) -> str:
    """Keys, or keys with values (key=value, …), the first MOST_LISTED."""
    every = list(items)
    first = ", ".join(
        "=".join([_shown_key(key), *map(shown, value)]) for key, *value in every[:MOST_LISTED]
    )
    return first if len(every) <= MOST_LISTED else f"{first} and {len(every) - MOST_LISTED} more"


def byte_text(count: float) -> str:
    """A number of bytes with a unit; as rm_say_bytes (csrc/base/status.h)."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _shown_key(key: Any) -> str:
    return key if isinstance(key, str) and len(key) <= 100 and key.isprintable() else shown(key)


def reason(error: BaseException) -> str:
    """An error of one rank as the others are told: its class and its message."""
    return f"{type(error).__name__}: {error}"[:MAX_TOLD]
