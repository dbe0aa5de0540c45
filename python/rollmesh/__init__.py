"""rollmesh: a C engine that generates rollouts with weights that a trainer pushes into it.

    spec = rm.ModelSpec.from_hf(config)
    gen = rm.Generator(spec)
    gen.sync_weights(model.state_dict())
    outs = gen.generate(prompts, rm.SamplingParams(max_tokens=64))

Imported on first use: `rollmesh.ops` (the engine's operations over NumPy arrays), `rollmesh.sources` (weights from folders, shared
memory and streams) and `rollmesh.torch` (a trainer whose forward pass is the generator's; needs torch). The training loop,
`rollmesh.grpo`, is a package of its own and needs the `train` extra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rollmesh import comm, errors
from rollmesh.distributed.mesh import Mesh
from rollmesh.errors import (
    AuthError,
    CapacityError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ConfigError,
    DeadlineError,
    DeviceError,
    DTypeError,
    DuplicateKeyError,
    Error,
    FormatError,
    IncompleteSyncError,
    LayoutError,
    LimitError,
    MeshMismatchError,
    MissingKeyError,
    NonFiniteError,
    NotSyncedError,
    NumericsError,
    PluginError,
    RankLostError,
    RequestError,
    ShapeError,
    StateError,
    SyncAbortedError,
    TiedWeightError,
    UnexpectedKeyError,
    UnsupportedTensorError,
    VersionError,
)
from rollmesh.generator import Generator, ParameterInfo
from rollmesh.model.spec import ModelSpec
from rollmesh.request.outputs import CompletionOutput, Contract, RequestOutput, SelfTestReport, SyncReport, TopLogprobs
from rollmesh.request.sampling import SamplingParams
from rollmesh.weights.pieces import Piece
from rollmesh.weights.updates import Sync

if TYPE_CHECKING:
    import rollmesh.ops
    import rollmesh.sources  # noqa: F401  (for type checkers: they do not see __getattr__)

_LAZY = ("ops", "sources", "torch")

__version__ = "0.1.0"
__all__ = [
    "AuthError",
    "CapacityError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CompletionOutput",
    "ConfigError",
    "Contract",
    "DTypeError",
    "DeadlineError",
    "DeviceError",
    "DuplicateKeyError",
    "Error",
    "FormatError",
    "Generator",
    "IncompleteSyncError",
    "LayoutError",
    "LimitError",
    "Mesh",
    "MeshMismatchError",
    "MissingKeyError",
    "ModelSpec",
    "NonFiniteError",
    "NotSyncedError",
    "NumericsError",
    "ParameterInfo",
    "Piece",
    "PluginError",
    "RankLostError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SelfTestReport",
    "ShapeError",
    "StateError",
    "Sync",
    "SyncAbortedError",
    "SyncReport",
    "TiedWeightError",
    "TopLogprobs",
    "UnexpectedKeyError",
    "UnsupportedTensorError",
    "VersionError",
    "comm",
    "errors",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"rollmesh.{name}")
    raise AttributeError(f"module 'rollmesh' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
