"""Strict reading of TOML tables into dataclasses.

The type hints are the schema, and each error names the key. The only conversions are from integers
to floats and from lists to tuples. Fields declared by `number` have a range.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import tomllib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from rollmesh.errors import ConfigError
from rollmesh.runtime.messages import plain, shown

INT64 = 2**63  # the range of integers in TOML; Python reads larger integers
KINDS = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    dict: "a table",
}
LIMITS = {
    "at_least": (operator.ge, "at least"),
    "above": (operator.gt, "above"),
    "at_most": (operator.le, "at most"),
}
NO_KEY = "no key"  # in the metadata of a field that no table has


def number(default: Any, **limits: float) -> Any:
    """Declares a field of numbers with a range. limits: keys of LIMITS."""
    return dataclasses.field(default=default, metadata=limits)


def read_table(cls: Any, table: Any, name: str = "") -> Any:
    """Returns the dataclass `cls` with the values of a table. Fields that are dataclasses are
    tables too."""
    if not isinstance(table, dict):
        raise ConfigError(f"{name}: expected a table, got {show(table)}")
    fields = {f.name: f for f in dataclasses.fields(cls) if NO_KEY not in f.metadata}
    hints, values = typing.get_type_hints(cls), {}
    for key, value in table.items():
        where = f"[{name}] {plain(key)}" if name else plain(key)
        if key not in fields:
            what = "table" if isinstance(value, dict) and not name else "key"
            raise ConfigError(f"{where}: no such {what}; there are {', '.join(fields)}")
        values[key] = convert(hints[key], fields[key].metadata, value, where)
    return cls(**values)


def convert(hint: Any, limits: Mapping[str, float], value: Any, where: str) -> Any:
    """Converts `value` to the type of the hint, or raises ConfigError."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return read_table(hint, value, where)
    if origin in (types.UnionType, typing.Union):  # X | None
        return None if value is None else convert(args[0], limits, value, where)
    if origin is Literal:
        if value not in args:
            raise ConfigError(
                f"{where}: expected one of {', '.join(map(show, args))}, got {show(value)}"
            )
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where}: expected a list, got {show(value)}")
        return tuple(convert(args[0], limits, v, f"{where}[{i}]") for i, v in enumerate(value))
    kind = origin or hint
    if isinstance(value, int) and not -INT64 <= value < INT64:
        raise ConfigError(f"{where}: expected a number of 64 bits, got {show(value)}")
    if kind is float and type(value) is int:
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{where}: expected {KINDS[kind]}, got {show(value)}")
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"{where}: expected a finite number, got {value}")
    for key, limit in limits.items():
        is_within, text = LIMITS[key]
        if not is_within(value, limit):
            raise ConfigError(f"{where}: expected {text} {limit}, got {value}")
    return value


def override(table: dict[str, Any], text: str) -> None:
    """Applies `train.lr=1e-3`. A value that is not TOML is a string."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"--set {plain(text)}: expected KEY=VALUE, such as train.lr=1e-3")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    except (ValueError, RecursionError) as e:  # too many digits or levels
        raise ConfigError(f"--set {plain(text)}: {plain(e)}") from e
    *tables, last = key.strip().split(".")
    for name in tables:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {plain(text)}: {plain(name)} is not a table")
    table[last] = parsed


def show(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and len(value) <= 100 and value.isprintable():
        return f'"{value}"'
    return shown(value)
