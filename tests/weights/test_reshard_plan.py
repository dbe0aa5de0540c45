"""weights/reshard_plan.py: the plan of copies between ranks, and the part of each tensor that a
mesh needs.

Input: random tensors in random pieces of random trainers, requested in other pieces. Oracle: NumPy,
which cuts the tensor, copies by the plan and counts how often each element was written. Bound:
gather(shard(x)) = x, every requested element once, and no others."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import helpers
import numpy as np
import pytest
from numpy.typing import NDArray

import rollmesh as rm
from rollmesh.model.placement import placements
from rollmesh.weights import reshard_plan
from rollmesh.weights.reshard_plan import Copy, plan_copies
from rollmesh.weights.resharding import wanted_boxes

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


Held = list[tuple[int, Box]]


def boxes(listed: Held) -> list[tuple[int, reshard_plan.Box]]:
    return [
        (rank, tuple((first, first + n) for first, n in zip(offsets, sizes, strict=True)))
        for rank, (offsets, sizes) in listed
    ]


def plan(held: Held, wanted: Held) -> list[Copy]:
    return plan_copies("x", boxes(held), boxes(wanted))


def chunk(n: int, parts_: int, index: int) -> tuple[int, int]:
    """Returns the chunk of torch.chunk: ceil(n / parts) each, the last ones smaller or empty."""
    each = -(-n // parts_) if n else 0
    first = min(n, each * index)
    return first, min(each, n - first)


def trainer(rng: np.random.Generator, shape: tuple[int, ...], world: int) -> list[tuple[int, Box]]:
    """Returns boxes like those of DTensor placements: a mesh of one or two axes, each Shard(dim) or
    Replicate. A rank may be outside the mesh."""
    size = int(rng.integers(1, world + 1))
    inner = int(rng.choice([n for n in range(1, size + 1) if size % n == 0]))
    axes = [
        (size // inner, int(rng.integers(-1, len(shape)))),
        (inner, int(rng.integers(-1, len(shape)))),
    ]
    first_rank = int(rng.integers(world - size + 1))
    out = []
    for index in range(size):
        offsets, sizes = [0] * len(shape), list(shape)
        for (n, dim), at in zip(axes, divmod(index, inner), strict=True):
            if dim >= 0:
                first, sizes[dim] = chunk(sizes[dim], n, at)
                offsets[dim] += first
        out.append((first_rank + index, (tuple(offsets), tuple(sizes))))
    return out


def generator(
    rng: np.random.Generator, shape: tuple[int, ...], world: int
) -> list[tuple[int, Box]]:
    """Some disjoint boxes for each rank: cells of a random grid."""
    out = []
    for rank in range(world):
        cuts = [
            sorted({0, n, *rng.integers(0, n + 1, int(rng.integers(3))).tolist()}) for n in shape
        ]
        for cell in itertools.product(*(list(itertools.pairwise(c)) or [(0, 0)] for c in cuts)):
            if rng.random() < 0.5:
                out.append((rank, (tuple(a for a, _ in cell), tuple(b - a for a, b in cell))))
    return out


def carry_out(x: NDArray[Any], held: Held, wanted: Held, copies: list[Copy], world: int) -> None:
    """Cuts x, makes the copies, compares."""
    got = np.zeros((world, *x.shape), x.dtype)
    times = np.zeros((world, *x.shape), int)
    has = np.zeros((world, *x.shape), bool)
    wants = np.zeros((world, *x.shape), bool)
    for marks, listed in ((has, held), (wants, wanted)):
        for rank, box in boxes(listed):
            marks[(rank, *(slice(*ends) for ends in box))] = True
    for giver, taker, ends in copies:
        box = tuple(slice(*each) for each in ends)
        assert has[(giver, *box)].all(), "a rank gives what it does not have"
        assert giver == taker or not has[(taker, *box)].any(), "a rank gets what it has"
        got[(taker, *box)] = x[box]
        times[(taker, *box)] += 1
    assert np.array_equal(times, wants), "not every wanted element was written once"
    assert np.array_equal(got, np.where(wants, x, 0))


def case(rng: np.random.Generator) -> tuple[NDArray[Any], Held, Held, int]:
    shape = tuple(
        int(n)
        for n in rng.choice(
            [0, 1, 2, 3, 5, 8], int(rng.integers(1, 5)), p=[0.04, 0.16, 0.2, 0.2, 0.2, 0.2]
        )
    )
    world = int(rng.integers(1, 9))
    held = trainer(rng, shape, world)
    # Adds pieces of a second trainer, which overlap those of the first in any way.
    if rng.random() < 0.3:
        held = sorted(held + trainer(rng, shape, world), key=lambda part: part[0])
    x = np.arange(1, math.prod(shape) + 1).reshape(shape)
    return x, held, generator(rng, shape, world), world


def test_gather_of_shard_is_the_tensor(rng: np.random.Generator) -> None:
    copied = Counter[str]()
    for _ in range(1500):
        x, held, wanted, world = case(rng)
        copies = plan(held, wanted)
        carry_out(x, held, wanted, copies, world)
        copied.update("own" if copy.giver == copy.taker else "other" for copy in copies)
    assert min(copied.values()) > 1000


def test_an_element_that_nobody_has_is_named(rng: np.random.Generator) -> None:
    """One random element is removed from every piece; the piece is split into boxes around it."""
    seen = 0
    for _ in range(300):
        x, _, wanted, world = case(rng)
        if x.size == 0:
            continue
        hole = [int(rng.integers(n)) for n in x.shape]
        held: Held = []
        for d, n in enumerate(x.shape):  # the hyperplanes beside it
            for first, size in ((0, hole[d]), (hole[d] + 1, n - hole[d] - 1)):
                offsets, sizes = [0] * x.ndim, list(x.shape)
                offsets[d], sizes[d] = first, size
                held.append((int(rng.integers(world)), (tuple(offsets), tuple(sizes))))
        held.sort(key=lambda part: part[0])
        wants = [
            rank
            for rank, (offsets, sizes) in wanted
            if all(f <= h < f + n for f, h, n in zip(offsets, hole, sizes, strict=True))
        ]
        if not wants:
            carry_out(x, held, wanted, plan(held, wanted), world)
            continue
        seen += 1
        text = str(hole).replace("[", r"\[").replace("]", r"\]")
        with pytest.raises(
            rm.IncompleteSyncError, match=rf"^x: .*element {text} .* rank {wants[0]} needs it"
        ):
            plan(held, wanted)
    assert seen > 50


def test_replicas_share_the_work() -> None:
    """Four ranks have a tensor and twelve request it: each of the four sends it three times, and
    the ranks that have it use their own copy."""
    whole = ((0, 0), (4, 4))
    copies = plan([(rank, whole) for rank in (0, 4, 8, 12)], [(rank, whole) for rank in range(16)])
    assert Counter(copy.giver for copy in copies) == {0: 4, 4: 4, 8: 4, 12: 4}
    assert len(copies) == 16
    assert [copy.taker for copy in copies if copy.giver == copy.taker] == [0, 4, 8, 12]


def test_a_tensor_of_any_size_costs_nothing() -> None:
    """Sizes close to the end of int64."""
    rows, columns = 2**31, 2**31 - 1
    halves: Held = [(0, ((0, 0), (2**30, columns))), (1, ((2**30, 0), (2**30, columns)))]
    assert plan(halves, [(0, ((0, 5), (rows, 7)))]) == [
        (0, 0, ((0, 2**30), (5, 12))),
        (1, 0, ((2**30, rows), (5, 12))),
    ]


# ------------------------------------------------------------------------------ what a mesh wants
SIZES = {
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "hidden_size": 96,
    "head_dim": 8,
}
EXPERT = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    "mesh", [(1, 1, 1), (2, 1, 1), (2, 1, 2), (3, 2, 6), (4, 2, 1), (6, 1, 6)], ids=str
)
def test_what_a_mesh_wants(mesh: tuple[int, int, int]) -> None:
    """Compares with rollmesh.model.placement, row by row: fused and single names, experts packed or
    separate, vectors."""
    config = helpers.tiny_config(
        True, **SIZES, num_experts=12, attention_bias=True, moe_intermediate_size=80
    )
    spec = rm.ModelSpec.from_hf(config)
    where = placements(spec, *mesh)
    tp, dp, ep = mesh
    with rm.Generator(
        spec,
        mesh=rm.Mesh(tp=tp, dp=dp, ep=ep),
        dtype="float32",
        kv_cache_gib=0.01,
        max_model_len=64,
        threads=1,
    ) as made:
        engine = made._engine
        inner, hidden, d = 80, 96, 8
        for name, shape, rows in [
            ("model.embed_tokens.weight", (300, hidden), lambda p: p.vocab),
            ("model.norm.weight", (hidden,), lambda p: range(hidden)),
            (
                "model.layers.0.self_attn.q_proj.bias",
                (96,),
                lambda p: range(p.heads.start * d, p.heads.stop * d),
            ),
            (
                "model.layers.0.self_attn.k_proj.weight",
                (16, hidden),
                lambda p: range(p.kv_heads.start * d, p.kv_heads.stop * d),
            ),
        ]:
            check_wanted(engine, name, shape, [[(0, set(rows(p)))] for p in where])
        for e in (0, 11):
            check_wanted(
                engine,
                f"{EXPERT}.{e}.up_proj.weight",
                (inner, hidden),
                [[(0, held(p, e, p.expert_inner))] for p in where],
            )
        down = [[(e, held(p, e, p.expert_hidden)) for e in range(12)] for p in where]
        check_wanted(engine, f"{EXPERT}.down_proj", (12, hidden, inner), down)
        both = [
            [
                (
                    e,
                    held(p, e, p.expert_inner)
                    | {inner + row for row in held(p, e, p.expert_inner)},
                )
                for e in range(12)
            ]
            for p in where
        ]
        table = check_wanted(engine, f"{EXPERT}.gate_up_proj", (12, 2 * inner, hidden), both)
        assert len(table) <= 2 * tp * dp, "runs of neighbours are one box"
        with pytest.raises(rm.UnexpectedKeyError):
            engine.sync_resolve("model.nothing")


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1), (2, 1, 2), (3, 2, 6)], ids=str)
def test_what_a_mesh_wants_of_transposed_experts(mesh: tuple[int, int, int]) -> None:
    """gpt-oss: rows of gate and up alternate and are the last dim."""
    sizes = {"intermediate_size": 80, "num_hidden_layers": 1, "num_local_experts": 6}
    spec = rm.ModelSpec.from_hf({"model_type": "gpt_oss", **SIZES, **sizes})
    where, (tp, dp, ep) = placements(spec, *mesh), mesh
    options = {"kv_cache_gib": 0.01, "max_model_len": 64, "threads": 1}
    at = rm.Mesh(tp=tp, dp=dp, ep=ep)
    with rm.Generator(spec, mesh=at, dtype="float32", **options) as made:
        for name, inner, outer in (("gate_up", 160, 96), ("down", 96, 80)):
            wanted = []
            for p in where:
                rows = p.expert_hidden if name == "down" else range(0)
                pairs = p.expert_inner if name == "gate_up" else range(0)
                of_rank = {*rows, *(2 * row + i for row in pairs for i in range(2))}
                wanted.append([(e, of_rank if e in p.experts else set()) for e in range(6)])
            check_wanted(made._engine, f"{EXPERT}.{name}_proj_bias", (6, inner), wanted, -1)
            check_wanted(made._engine, f"{EXPERT}.{name}_proj", (6, outer, inner), wanted, -1)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_what_a_mesh_wants_of_keys_and_values_of_latents(tp: int) -> None:
    """The rows of kv_b_proj by heads: all of them, for keys and values together."""
    latent = {
        "kv_lora_rank": 32, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 16,
        "num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96,
        "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 96,
    }  # fmt: skip
    spec = rm.ModelSpec.from_hf({"model_type": "deepseek_v3", **latent})
    where, name = placements(spec, tp, 1, 1), "model.layers.0.self_attn.kv_b_proj.weight"
    options = {"kv_cache_gib": 0.01, "max_model_len": 64, "threads": 1}
    with rm.Generator(spec, mesh=rm.Mesh(tp=tp), dtype="float32", **options) as made:
        rows = [set(range(p.heads.start * 21, p.heads.stop * 21)) for p in where]
        check_wanted(made._engine, name, (126, 32), [[(0, one)] for one in rows])


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1), (3, 2, 1), (6, 1, 1)], ids=str)
def test_what_a_mesh_wants_of_delta_nets(mesh: tuple[int, int, int]) -> None:
    """Qwen3-Next: rows of whole key heads and of whole query heads with their gates; the
    convolution, whose second dim is 1."""
    hybrid = {
        "num_hidden_layers": 2, "num_experts": 6, "num_experts_per_tok": 2,
        "intermediate_size": 80, "moe_intermediate_size": 40, "full_attention_interval": 2,
        "linear_num_key_heads": 4, "linear_num_value_heads": 12, "linear_key_head_dim": 5,
        "linear_value_head_dim": 7, "linear_conv_kernel_dim": 3,
    }  # fmt: skip
    spec = rm.ModelSpec.from_hf({"model_type": "qwen3_next", **SIZES, **hybrid})
    where, (tp, dp, ep) = placements(spec, *mesh), mesh
    options = {"kv_cache_gib": 0.01, "max_model_len": 64, "threads": 1}
    with rm.Generator(spec, mesh=rm.Mesh(tp=tp, dp=dp, ep=ep), dtype="float32", **options) as made:

        def wanted(each: int, name: str) -> list[list[tuple[int, set[int]]]]:
            heads = [getattr(p, name) for p in where]
            return [[(0, set(range(h.start * each, h.stop * each)))] for h in heads]

        at, keys = "model.layers.0.linear_attn", 4 * 5
        qkvz = wanted(2 * 5 + 6 * 7, "delta_key_heads")
        check_wanted(made._engine, f"{at}.in_proj_qkvz.weight", (208, 96), qkvz)
        check_wanted(
            made._engine, f"{at}.in_proj_ba.weight", (24, 96), wanted(6, "delta_key_heads")
        )
        gated = wanted(16, "heads")
        check_wanted(made._engine, "model.layers.1.self_attn.q_proj.weight", (192, 96), gated)
        conv = [
            [(0, q | {row + keys for row in q} | {row + 2 * keys for row in v})]
            for ((_, q),), ((_, v),) in zip(
                wanted(5, "delta_key_heads"), wanted(7, "delta_heads"), strict=True
            )
        ]
        check_wanted(made._engine, f"{at}.conv1d.weight", (124, 1, 3), conv, row_dim=0)


def held(p: Any, expert: int, rows: range) -> set[int]:
    return set(rows) if expert in p.experts else set()


def check_wanted(
    engine: Any,
    name: str,
    shape: tuple[int, ...],
    expected: list[list[tuple[int, set[int]]]],
    row_dim: int = 0,
) -> list[tuple[int, reshard_plan.Box]]:
    """expected: for each rank (index of the outer dim, rows). row_dim: 0, or −1 of stacked
    tensors whose last dim is the rows."""
    entry = engine.sync_resolve(name)
    assert entry.shape == shape
    table = wanted_boxes(entry.wanted(), len(shape))
    assert [rank for rank, _ in table] == sorted(rank for rank, _ in table)
    for rank, outers in enumerate(expected):
        times = np.zeros(shape, int)
        want = np.zeros(shape, int)
        for at, box in table:
            if at == rank:
                times[tuple(slice(*ends) for ends in box)] += 1
        for outer, rows in outers:
            stacked = (len(shape) == 3 and shape[1] > 1) or row_dim
            at_outer = want[outer] if stacked else want
            np.moveaxis(at_outer, row_dim, 0)[sorted(rows)] = 1
        assert np.array_equal(times, want), (name, rank)
    return table
