"""The mesh of ranks: data, tensor and expert parallel degrees. The world has dp * tp ranks. The
experts span ep ranks: 1 (each expert is sharded over tp like a dense MLP), tp, or dp * tp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollmesh.errors import ConfigError
from rollmesh.model.placement import MAX_RANKS
from rollmesh.runtime.arguments import choice, integer

EP_BACKENDS = ("disabled", "local_allreduce", "allgather_reducescatter", "alltoall")


@dataclass(frozen=True, slots=True)
class Mesh:
    """Degrees of parallelism of a world of dp * tp ranks. Results are bit-identical on every mesh.

    tp       number of ranks that share the matrices of one replica, each with some of the columns;
             must divide the number of attention heads
    dp       number of replicas; each replica runs different requests
    ep       number of ranks that share the experts: 1 (each expert is sharded over tp like a dense
             layer), tp, or dp * tp; must divide the number of experts
    cp, pp   context and pipeline parallelism: always 1

    Raises ConfigError for degrees that break one of these rules. Creating a generator checks
    whether the model fits the degrees.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "ep", "cp", "pp"):
            value = integer(f"mesh {name}", getattr(self, name), 1, MAX_RANKS)
            object.__setattr__(self, name, value)
        for name in ("cp", "pp"):
            if getattr(self, name) != 1:
                raise ConfigError(
                    f"mesh {name}: expected 1, got {getattr(self, name)}; there is no context or "
                    "pipeline parallelism"
                )
        if self.ep not in (1, self.tp, self.dp * self.tp):
            raise ConfigError(
                f"mesh ep: expected 1, tp = {self.tp} or dp*tp = {self.dp * self.tp}, got {self.ep}"
            )

    @property
    def degrees(self) -> tuple[int, int, int]:
        """tp, dp and ep."""
        return self.tp, self.dp, self.ep

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp


def check_backend(name: Any) -> str:
    """Checks the name of a token dispatcher and returns it. Raises ConfigError."""
    if isinstance(name, str) and name == "deepep":
        raise ConfigError(
            f"ep_backend: expected one of {', '.join(EP_BACKENDS)}, got 'deepep', which needs "
            "NVSHMEM and a CUDA device for each rank"
        )
    return choice("ep_backend", name, EP_BACKENDS)
