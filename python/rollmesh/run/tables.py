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

import rollmesh as rm
from rollmesh.runtime.messages import plain, shown

INT64 = 2**63  # the range of integers in TOML; Python reads larger integers


def number(
    default: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> Any:
    """Declares a field with a range, which `check_range` checks."""
    return dataclasses.field(
        default=default, metadata={"at_least": at_least, "above": above, "at_most": at_most}
    )


def read_table(cls: Any, table: Any, name: str) -> Any:
    if not isinstance(table, dict):
        raise rm.ConfigError(f"{name}: expected a table, got {show(table)}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in table:
        if key not in fields:
            raise rm.ConfigError(
                f"[{name}] {plain(key)}: no such key; there are {', '.join(fields)}"
            )
    hints = typing.get_type_hints(cls)
    return cls(**{k: read_value(fields[k], hints[k], v, f"[{name}] {k}") for k, v in table.items()})


def read_value(f: dataclasses.Field[Any], hint: Any, value: Any, where: str) -> Any:
    value = convert(hint, value, where)
    for item in value if isinstance(value, tuple) else (value,):
        check_range(f.metadata, item, where)
    return value


def convert(hint: Any, value: Any, where: str) -> Any:
    """Converts `value` to the type of the hint, or raises ConfigError."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return convert(next(a for a in args if a is not type(None)), value, where)
    if origin is Literal:
        if value not in args:
            raise rm.ConfigError(
                f"{where}: expected one of {', '.join(map(show, args))}, got {show(value)}"
            )
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise rm.ConfigError(f"{where}: expected a list, got {show(value)}")
        return tuple(convert(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    kind = origin or hint
    if isinstance(value, int) and not -INT64 <= value < INT64:
        raise rm.ConfigError(f"{where}: expected a number of 64 bits, got {show(value)}")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = {
            int: "an integer",
            float: "a number",
            str: "a string",
            bool: "true or false",
            dict: "a table",
        }
        raise rm.ConfigError(f"{where}: expected {names[kind]}, got {show(value)}")
    return value


def check_range(limits: Mapping[str, Any], value: Any, where: str) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    if not math.isfinite(value):
        raise rm.ConfigError(f"{where}: expected a finite number, got {value}")
    for key, ok, text in (
        ("at_least", operator.ge, "at least"),
        ("above", operator.gt, "above"),
        ("at_most", operator.le, "at most"),
    ):
        limit = limits.get(key)
        if limit is not None and not ok(value, limit):
            raise rm.ConfigError(f"{where}: expected {text} {limit}, got {value}")


def override(table: dict[str, Any], text: str) -> None:
    """Applies `train.lr=1e-3`. A value that is not TOML is a string."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise rm.ConfigError(f"--set {plain(text)}: expected KEY=VALUE, such as train.lr=1e-3")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    except (ValueError, RecursionError) as e:  # too many digits or levels
        raise rm.ConfigError(f"--set {plain(text)}: {plain(e)}") from e
    *tables, last = key.strip().split(".")
    for name in tables:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise rm.ConfigError(f"--set {plain(text)}: {plain(name)} is not a table")
    table[last] = parsed


def show(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and len(value) <= 100 and value.isprintable():
        return f'"{value}"'
    return shown(value)
