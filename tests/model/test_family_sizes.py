"""The sizes that rollmesh.distributed.traffic and rollmesh.model.sizes compute from each family's
config.

Oracle: the engine's metrics()["comm_bytes"] and ["weight_bytes"], and the manifest. Bound:
equality, for weights up to the alignment of 64 bytes."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
from marks import some
from test_mesh_bits import BACKENDS

import rollmesh as rm
from rollmesh.distributed.traffic import step_traffic
from rollmesh.model import sizes
from rollmesh.model.families import FAMILIES

pytest.importorskip("torch", reason="the models are transformers'")
family_models = importlib.import_module("family_models")
family_runs = importlib.import_module("family_runs")
LINE = 64  # bytes at which each matrix and each vector begins
# Every row chooses every expert, equally many on each rank, as rollmesh.distributed.traffic
# assumes.
ALL = {
    "mixtral": {"num_experts_per_tok": 8},
    "qwen2_moe": {"num_experts_per_tok": 8},
    "olmoe": {"num_experts_per_tok": 8},
    "glm4_moe": {
        "num_experts_per_tok": 8,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
    },
    **{
        family: {"num_experts_per_tok": 8}
        for family in (
            *("minimax_m2", "hy_v3", "flex_olmo", "gpt_oss", "granitemoe", "afmoe"),
            *("qwen3_next", "qwen3_5_moe_text"),
        )
    },
    **{
        family: {"num_experts_per_tok": 8, "topk_group": 2}
        for family in ("dots1", "solar_open", "exaone_moe", "deepseek_v3", "glm4_moe_lite")
    },
    "ernie4_5_moe": {"moe_k": 8},
    "hunyuan_v1_moe": {"moe_topk": 8},
}


def meshes(family: str) -> list[tuple[rm.Mesh, dict[str, Any]]]:
    found: list[tuple[rm.Mesh, dict[str, Any]]] = [
        (rm.Mesh(tp=2), {}),
        (rm.Mesh(tp=3), {}),
        (rm.Mesh(tp=2, dp=2), {}),
    ]
    if FAMILIES[family].has_experts:
        found += [(rm.Mesh(tp=2, ep=2), {"ep_backend": backend}) for backend in BACKENDS]
        found += [
            (rm.Mesh(tp=2, dp=2, ep=4), {"ep_backend": backend})
            for backend in BACKENDS
            if backend != "local_allreduce"
        ]
    return [
        (mesh, {**options, "sequence_parallel": rows})
        for mesh, options in found
        for rows in (False, True)
    ]


@pytest.mark.parametrize(
    "family", some(family_models.FAMILIES, {"olmo2", "olmoe", "qwen2_moe", "glm4_moe"}.__contains__)
)
def test_a_step_moves_the_bytes_of_the_formula(family: str, seed: int) -> None:
    model = family_models.draw(
        family, 300, seed, **{**family_models.cuttable(family), **ALL.get(family, {})}
    )
    for mesh, options in meshes(family):
        with family_runs.generator(
            model, dtype="bfloat16", mesh=mesh, max_num_seqs=5, **options
        ) as gen:
            before = gen.metrics()
            prompts = [[i + 1] for i in range(5 * mesh.dp)]
            gen.generate(
                prompts, rm.SamplingParams(max_tokens=4, ignore_eos=True, seed=1), use_tqdm=False
            )
            after = gen.metrics()
        steps, moved = (after[name] - before[name] for name in ("steps", "comm_bytes"))
        assert steps == 4
        assert moved / steps == pytest.approx(
            sum(step_traffic(gen.spec, mesh, 5, **options)), rel=1e-12, abs=0
        ), (mesh, options)


@pytest.mark.quick(8)
@pytest.mark.parametrize("dtype, each", [("bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize("family", family_models.FAMILIES)
def test_weights_are_counted(family: str, dtype: str, each: int, seed: int) -> None:
    """Counts on one rank, two and three. q, k and v are packed as one matrix, and so are the six
    inputs of a delta net, but rank_bytes counts each separately: two tiles more, or five."""
    models = [family_models.draw(family, 700 + number, seed) for number in range(3)] + [
        family_runs.cut(family, seed)
    ]
    own_width = (
        {"moe_intermediate_size": 1}
        if FAMILIES[family].experts.width in FAMILIES[family].keys
        else {}
    )
    models.append(
        family_models.draw(family, 703, seed, intermediate_size=1, vocab_size=2, **own_width)
    )
    for model in models:
        spec = rm.ModelSpec.from_hf(model.config)
        kinds, layers = list(sizes.matrices(spec)), spec.num_hidden_layers
        # Stored as float32, whether the family has a bias or not.
        bias = sum(spec.is_moe_layer) * (4 * spec.num_experts + LINE)
        fused = (
            5 if "delta_net" in spec.layer_kinds else 2
        )  # parts of one matrix, without the first
        tiles = fused * layers * sizes.TILE_ROWS * (spec.hidden_size + sizes.TILE_COLS) * each
        for tp in (1, 2, 3) if model is models[3] else (1,):
            held = sum(sum(rank.values()) for rank in sizes.rank_bytes(spec, dtype, tp))
            with family_runs.generator(model, dtype=dtype, mesh=rm.Mesh(tp=tp)) as gen:
                required = {
                    name: math.prod(info.shape)
                    for name, info in gen.manifest().items()
                    if info.required
                }
                stored = gen.metrics()["weight_bytes"]
            most = held + tp * (bias + LINE * sum(m.count for m in kinds))
            assert held - tp * tiles < stored <= most, (tp, held, stored, model.config)
        elements = sum(
            n
            for name, n in required.items()
            if not name.endswith(("correction_bias", "expert_bias"))
        )
        assert sizes.count_parameters(spec).total == elements == spec.num_parameters
