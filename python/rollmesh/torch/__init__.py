"""The generator's own operations for a PyTorch trainer, with torch's autograd. Needs torch, which
importing this package imports.

patch                  a transformers model computes its forward pass by the generator's kernels
functions              the differentiable ops that it is made of
"""

from typing import NoReturn

from rollmesh.errors import ConfigError
from rollmesh.torch import functions
from rollmesh.torch.patch import (
    Scored,
    WeightUse,
    forget,
    logprobs,
    patch,
    push,
    state_dict,
    unpatch,
    weight_use,
)
from rollmesh.torch.sequences import Sequences

__all__ = [
    "Dispatched",
    "Scored",
    "Sequences",
    "TokenDispatcher",
    "WeightUse",
    "forget",
    "functions",
    "logprobs",
    "patch",
    "push",
    "state_dict",
    "token_dispatcher",
    "token_dispatchers",
    "unpatch",
    "weight_use",
]


def token_dispatcher(*_: object, **__: object) -> NoReturn:
    """Deprecated: raises ConfigError. The dispatchers that sent rows between the ranks of a trainer
    were removed. torch.distributed.all_to_all_single sends rows, and rollmesh.ops.combine adds them
    up in the generator's order."""
    raise ConfigError(
        "token_dispatcher: expected torch.distributed.all_to_all_single with rollmesh.ops.combine, "
        "got a call of a function that was removed"
    )


token_dispatchers = TokenDispatcher = Dispatched = token_dispatcher
