"""rollmesh: a C engine that generates rollouts with weights that a trainer pushes into it.

    spec = rm.ModelSpec.from_hf(config)
    gen = rm.Generator(spec)
    gen.sync_weights(model.state_dict())
    outs = gen.generate(prompts, rm.SamplingParams(max_tokens=64))

Everything but the errors is imported on first use, so that `rollmesh --help` needs neither NumPy
nor the extension. `rollmesh.ops` has the engine's operations over NumPy arrays, `rollmesh.sources`
weights from folders and shared memory, `rollmesh.torch` a trainer whose forward pass is the
generator's (needs torch). The training loop, `rollmesh.grpo`, is a separate package and needs the
`train` extra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rollmesh import errors as errors
from rollmesh.errors import *  # noqa: F403

if TYPE_CHECKING:  # type checkers do not see __getattr__; `as` exports a name to them
    import rollmesh.ops
    import rollmesh.sources  # noqa: F401
    from rollmesh import comm as comm
    from rollmesh.distributed.mesh import Mesh as Mesh
    from rollmesh.generator import Generator as Generator
    from rollmesh.generator import ParameterInfo as ParameterInfo
    from rollmesh.generator import Shard as Shard
    from rollmesh.model.spec import ModelSpec as ModelSpec
    from rollmesh.request.outputs import *  # noqa: F403
    from rollmesh.request.sampling import SamplingParams as SamplingParams
    from rollmesh.weights.pieces import Piece as Piece
    from rollmesh.weights.updates import Sync as Sync

_MODULES = ("comm", "ops", "prometheus", "sources", "torch")
_NAMES = {  # module → what is imported from it
    "distributed.mesh": "Mesh",
    "generator": "Generator ParameterInfo Shard",
    "model.spec": "ModelSpec",
    "request.outputs": "CompletionOutput Contract Logprob RequestMetrics RequestOutput "
    "SelfTestReport SyncReport TopLogprobs",
    "request.sampling": "SamplingParams",
    "weights.pieces": "Piece",
    "weights.updates": "Sync",
}
_PUBLIC = [name for names in _NAMES.values() for name in names.split()]

__version__ = "0.1.0"
__all__ = sorted([*errors.__all__, *_PUBLIC, "comm", "errors"])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"rollmesh.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rollmesh' has no attribute {name!r}")
    # All at once: a later use, such as making a generator, imports nothing more.
    for module, names in _NAMES.items():
        found = importlib.import_module(f"rollmesh.{module}")
        for each in names.split():
            globals().setdefault(each, getattr(found, each))
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_PUBLIC})
