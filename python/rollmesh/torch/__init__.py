"""The generator's own operations for a PyTorch trainer, with torch's autograd. Needs torch, which
importing this package imports.

patch                  a transformers model computes its forward pass by the generator's kernels
functions              the differentiable ops that it is made of
token_dispatchers      expert-parallel dispatch and combine
"""

from rollmesh.torch import functions
from rollmesh.torch.dispatch import Dispatched, TokenDispatcher, token_dispatcher, token_dispatchers
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
