"""rollmesh: a C engine that generates rollouts with weights that a trainer pushes into it.

    spec = rm.ModelSpec.from_hf(config)
    gen = rm.Generator(spec)
    gen.sync_weights(model.state_dict())
    outs = gen.generate(prompts, rm.SamplingParams(max_tokens=64))

Everything but the errors is imported on first use, so that `rollmesh --help` needs neither NumPy
nor the extension. `rollmesh.ops` has the engine's operations over NumPy arrays, `rollmesh.sources`
weights from folders, shared memory and streams, `rollmesh.torch` a trainer whose forward pass is
the generator's (needs torch). The training loop, `rollmesh.grpo`, is a package of its own and needs
the `train` extra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rollmesh import errors
from rollmesh.errors import (
    AuthError,
    BaseVersionError,
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

if TYPE_CHECKING:  # type checkers do not see __getattr__
    import rollmesh.ops
    import rollmesh.sources  # noqa: F401
    from rollmesh import comm
    from rollmesh.distributed.mesh import Mesh
    from rollmesh.generator import Generator, ParameterInfo, Shard
    from rollmesh.model.spec import ModelSpec
    from rollmesh.request.outputs import (
        CompletionOutput,
        Contract,
        RequestMetrics,
        RequestOutput,
        SelfTestReport,
        SyncReport,
        TopLogprobs,
    )
    from rollmesh.request.sampling import SamplingParams
    from rollmesh.weights.pieces import Piece
    from rollmesh.weights.updates import Sync

_MODULES = ("comm", "ops", "prometheus", "sources", "torch")
_MODULE_OF = {
    "CompletionOutput": "request.outputs",
    "Contract": "request.outputs",
    "Generator": "generator",
    "Logprob": "request.outputs",
    "Mesh": "distributed.mesh",
    "ModelSpec": "model.spec",
    "ParameterInfo": "generator",
    "Piece": "weights.pieces",
    "RequestMetrics": "request.outputs",
    "RequestOutput": "request.outputs",
    "SamplingParams": "request.sampling",
    "SelfTestReport": "request.outputs",
    "Shard": "generator",
    "Sync": "weights.updates",
    "SyncReport": "request.outputs",
    "TopLogprobs": "request.outputs",
}

__version__ = "0.1.0"
__all__ = [
    "AuthError",
    "BaseVersionError",
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
    "Logprob",
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
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SelfTestReport",
    "ShapeError",
    "Shard",
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
    if name in _MODULES:
        return importlib.import_module(f"rollmesh.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'rollmesh' has no attribute {name!r}")
    for (
        each,
        module,
    ) in (
        _MODULE_OF.items()
    ):  # all at once: a later use, such as making a generator, imports nothing more
        globals().setdefault(each, getattr(importlib.import_module(f"rollmesh.{module}"), each))
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_MODULE_OF})
