"""Which part of a model each rank of a mesh holds. The rules are csrc/model/placement.h's; this
gives its numbers names."""

from __future__ import annotations

from typing import NamedTuple

from rollmesh import _core
from rollmesh.model.spec import ModelSpec
from rollmesh.runtime.arguments import integer

MAX_RANKS = 2**16


class Placement(NamedTuple):
    """The part of a model on one rank. Each field is a range of heads, of experts, or of rows
    (output features) of the named matrices."""

    heads: range
    kv_heads: range
    hidden: range  # o_proj, a dense layer's down_proj
    inner: range  # a dense layer's gate_proj and up_proj
    shared_inner: range  # a shared expert's gate_proj and up_proj
    vocab: range  # embed_tokens, lm_head
    experts: range  # those it holds a part of
    expert_inner: range  # of each: gate_proj and up_proj
    expert_hidden: range  # of each: down_proj
    delta_heads: range  # value heads of layers of the kind "delta_net"
    delta_key_heads: range  # the key heads that they read


def placements(spec: ModelSpec, tp: int = 1, dp: int = 1, ep: int = 1) -> list[Placement]:
    """Returns the placement of every rank of a dp x tp mesh, rank = dp index * tp + tp index.

    Raises rm.ConfigError unless there are at most 4096 ranks, ep is 1, tp or dp*tp, tp divides the
    query heads, and ep divides the experts."""
    for name, degree in (("tp", tp), ("dp", dp), ("ep", ep)):
        integer(name, degree, 1, MAX_RANKS)
    table = _core.placement(spec.engine_values(1), tp, dp, ep)
    return [
        Placement(*(range(first, first + n) for first, n in ranges)) for ranges in table.tolist()
    ]
