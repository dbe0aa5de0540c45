"""The mesh of ranks: data, tensor and expert parallel degrees. World = dp x tp; ep says how many
ranks the experts span: 1 (each expert sharded over tp like a dense MLP), tp, or dp*tp.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass

from rollmesh.errors import ConfigError
from rollmesh.show import shown

MAX_RANKS = 2**16


@dataclass(frozen=True, slots=True)
class Mesh:
    """Degrees of parallelism. A combination that breaks a rule raises ConfigError."""

    tp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "ep", "cp", "pp"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 1 <= int(value) <= MAX_RANKS:
                raise ConfigError(f"mesh {name} = {shown(value)}, wanted an integer in [1, {MAX_RANKS}]")
            object.__setattr__(self, name, int(value))
        for name in ("cp", "pp"):
            if getattr(self, name) != 1:
                raise ConfigError(f"mesh {name} = {getattr(self, name)}, wanted 1: context and pipeline parallelism are not offered")
        if self.ep not in (1, self.tp, self.dp * self.tp):
            raise ConfigError(f"mesh ep = {self.ep}, wanted 1, tp = {self.tp} or dp*tp = {self.dp * self.tp}")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp
