"""Typed access to a config."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rollmesh.errors import ConfigError
from rollmesh.model.rope import ROPE_TABLES, number
from rollmesh.runtime.messages import plain, shown

# Bounds of integers here. The engine's own limits (csrc/model/spec.c) are checked when a ModelSpec
# is made. The number of layers is checked first, since tuples of that length are made, and factors
# of a product, since errors name keys of the config.
MAX_LAYERS = 1024
MAX_WIDTH = 2**22  # of an MLP
MAX_POSITION = 2**62
MIN_NORMAL = 2.0**-126  # C reads smaller numbers as 0, which means "none" for factors and caps


def without(config: Mapping[str, Any], ignore: Collection[str]) -> dict[str, Any]:
    """The config without the keys in `ignore`. "rope_scaling.attn_factor" is a key of the table
    rope_scaling, for which rope_parameters, its name in transformers 5, stands too. A table of
    ignored keys alone is left out."""
    names = set(ignore)
    for name in ignore:
        table, _, key = name.partition(".")
        if key and table in ROPE_TABLES:
            names |= {f"{other}.{key}" for other in ROPE_TABLES}
    return _without(config, names, "")


def _without(table: Mapping[str, Any], names: set[str], path: str) -> dict[str, Any]:
    kept = {}
    for key, value in table.items():
        name = path + key_name(key)
        if name in names:
            continue
        if isinstance(value, Mapping) and any(other.startswith(f"{name}.") for other in names):
            rest = _without(value, names, f"{name}.")
            if rest or not value:
                kept[key] = rest
        else:
            kept[key] = value
    return kept


def key_name(key: Any) -> str:
    """The name by which `ignore` takes a key; a dict may have keys of other types than str."""
    return key if isinstance(key, str) else plain(key)


class Reader:
    """Typed access to a config; every failure names the key and the value."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    def integer(
        self, key: str, low: int = 1, high: int = MAX_POSITION, default: int | None = None
    ) -> int:
        value = self.values.get(key, default)
        if value is None:
            raise ConfigError(
                f"{key}: expected an integer, got {'none' if key not in self.values else 'None'}"
            )
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{key}: expected an integer in [{low}, {high}], got {shown(value)}")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{key}: expected a bool, got {shown(value)}")
        return value

    def positive(self, key: str, default: float) -> float:
        value = float(number(key, self.values.get(key, default), 0, strict=True))
        if value < MIN_NORMAL:
            raise ConfigError(f"{key}: expected a float32 of at least 2**-126, got {value}")
        return value

    def switch(self, key: str | bool, default: bool = False) -> bool:
        """Returns a key's value or its default, or a constant."""
        return key if isinstance(key, bool) else self.boolean(key, default)

    def given(self, key: str) -> bool:
        return self.values.get(key) is not None
