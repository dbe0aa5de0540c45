"""The placement of a model on a mesh of ranks: csrc/mesh, csrc/model/placement, and the output of
rollmesh plan."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers
import pytest
from marks import SUMMARY, full

import rollmesh as rm
from rollmesh.model import sizes
from rollmesh.model.placement import placements


def spec_of(**changes: Any) -> rm.ModelSpec:
    return rm.ModelSpec.from_hf(helpers.tiny_config(**changes))


@pytest.mark.parametrize("sanitize", ["", full("address,undefined")])
def test_properties_of_placements(
    native: Callable[..., Path], sanitize: str, pytestconfig: pytest.Config
) -> None:
    """tests/support/native/placement.c: random models on random meshes. It must first detect an
    injected fault."""
    program = native("placement", sanitize=sanitize)
    planted = subprocess.run([program, "--plant", "1"], capture_output=True, text=True, check=False)
    assert planted.returncode == 1
    assert "is held 0 times" in planted.stderr
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pytestconfig.stash[SUMMARY].append(done.stdout.strip())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "held"),
    [
        (32, 4, 1, ["0-3"]),
        # Fewer KV heads than ranks: copies.
        (32, 4, 8, ["0-0", "0-0", "1-1", "1-1", "2-2", "2-2", "3-3", "3-3"]),
        (12, 4, 6, ["0-0", "0-1", "1-1", "2-2", "2-3", "3-3"]),  # groups that straddle ranks
        (6, 2, 3, ["0-0", "0-1", "1-1"]),
        (12, 3, 2, ["0-1", "1-2"]),
    ],
)
def test_kv_heads_of_a_rank(heads: int, kv_heads: int, tp: int, held: list[str]) -> None:
    """Oracle written out by hand: the KV heads that a rank's query heads read."""
    spec = spec_of(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=16)
    assert [f"{rank.kv_heads[0]}-{rank.kv_heads[-1]}" for rank in placements(spec, tp=tp)] == held


def test_experts_of_a_rank() -> None:
    """ep = 1: slices of all; tp: whole experts, again in each replica; dp*tp: whole experts, once
    in the world."""
    spec = spec_of(
        moe=True,
        num_experts=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=64,
    )
    slices = placements(spec, tp=2, dp=2, ep=1)
    assert [rank.experts for rank in slices] == [range(8)] * 4
    assert [rank.expert_inner for rank in slices] == [range(32), range(32, 64)] * 2
    assert [rank.experts for rank in placements(spec, tp=2, dp=2, ep=2)] == [
        range(4),
        range(4, 8),
    ] * 2
    spread = placements(spec, tp=2, dp=2, ep=4)
    assert [rank.experts for rank in spread] == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert {rank.expert_inner for rank in spread} == {range(64)}


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"tp": 0}, r"tp: expected an integer in \[1, 65536\], got 0$"),
        ({"dp": 2**40}, r"dp: expected an integer in \[1, 65536\], got 1099511627776$"),
        ({"tp": 64, "dp": 128}, "expected at most 4096 ranks, got 8192"),
        ({"tp": 4, "dp": 2, "ep": 2}, "ep: expected 1, tp=4 or dp*tp=8, got 2"),
        ({"tp": 3}, "tp: expected a divisor of num_attention_heads=4, got 3"),
        ({"dp": 3, "ep": 3}, "ep: expected a divisor of num_experts=8, got 3"),
    ],
)
def test_rules_of_a_mesh(degrees: dict[str, int], message: str) -> None:
    spec = spec_of(moe=True, num_experts=8, num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(rm.ConfigError, match=message.replace("*", r"\*")):
        placements(spec, **degrees)


def test_a_dense_model_has_no_expert_axis() -> None:
    with pytest.raises(rm.ConfigError, match="ep: expected 1 for a model without experts, got 2"):
        placements(spec_of(num_attention_heads=4), tp=2, ep=2)


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_ranks_hold_the_model_once(moe: bool, tied: bool) -> None:
    """Compares the bytes of all ranks of one replica with a single rank: every tensor is held, and
    the excess is the KV heads and vectors held twice and tiles that are cut."""
    shape = {
        "vocab_size": 1280,
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
    }
    spec = spec_of(
        moe=moe,
        tie_word_embeddings=tied,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        **shape,
    )

    def total(**degrees: int) -> int:
        return sum(sum(rank.values()) for rank in sizes.rank_bytes(spec, "bfloat16", **degrees))

    one = total()
    kv = sum(m.elements * 2 for m in sizes.matrices(spec) if m.kind in ("k", "v"))
    (held,) = sizes.rank_bytes(spec, "bfloat16")
    whole = sum(n for kind, n in held.items() if kind.endswith("_norm") or kind == "router")
    assert total(tp=4) == one + kv + 3 * whole  # 2 KV heads on 4 ranks
    assert total(tp=2, dp=3) == 3 * (one + whole)
    if moe:
        assert total(tp=4, ep=4) == one + kv + 3 * whole
        assert total(tp=2, dp=2, ep=4) < 2 * one
