"""A mesh is bit-identical to one rank, for every degree, token dispatcher and way to cut a step.
Ranks are threads.

Input: two-layer models whose sizes are not divisible by the degrees (a vocabulary of three blocks,
hidden and intermediate sizes of three and five tiles, KV heads fewer than ranks or straddling
them); prompts and steps of 1, 2, 5, 17 and 31 rows. Oracle: one rank. Bound: 0 differing bits in
logits, rollouts, both logprobs, routed experts and the digest of the weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import helpers
import numpy as np
import pytest
from marks import SUMMARY, full

import rollmesh as rm
from rollmesh.distributed.traffic import step_traffic
from rollmesh.model.placement import Placement, placements

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 96,
    "intermediate_size": 160,
    "head_dim": 8,
}
SHAPES = {
    "few_kv_heads": {"num_attention_heads": 24, "num_key_value_heads": 2, **SIZES},
    "straddling": {
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "attention_bias": True,
        "tie_word_embeddings": True,
        **SIZES,
    },
    "moe": {
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "num_experts": 144,
        "num_experts_per_tok": 5,
        **SIZES,
    },
}
TP, DP = (1, 2, 3, 4, 6, 8), (1, 2, 3)
BACKENDS = ("alltoall", "allgather_reducescatter", "local_allreduce")
PROMPTS = [[7] * 1, [1, 2], [3, 1, 4, 1, 5], list(range(100, 117)), list(range(250, 281)), [7] * 19]

Words = list[np.ndarray[Any, Any]]


def words(array: Any) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1)


class Model:
    def __init__(self, name: str, dtype: str, **more: Any):
        changes = SHAPES[name] | more
        self.case = helpers.Case(
            name, helpers.tiny_config("num_experts" in changes, **changes), router_bias=True
        )
        self.spec, self.dtype = rm.ModelSpec.from_hf(self.case.config), dtype
        self.weights = helpers.state_dict(self.case)
        self.source = (
            helpers.module_state_dict(self.weights, self.case.config)
            if self.case.is_moe
            else self.weights
        )
        self.expected: dict[tuple[int, bool], Words] = {}

    def generator(self, mesh: rm.Mesh | None, rows: int, **options: Any) -> rm.Generator:
        generator = rm.Generator(
            self.spec, mesh=mesh, dtype=self.dtype, kv_cache_gib=0.02, max_model_len=64,
            max_num_seqs=5, threads=1,
            max_num_batched_tokens=rows, **options,
        )  # fmt: skip
        self.digest = generator.sync_weights(self.source, cast=True).digest
        return generator

    def run(
        self, mesh: rm.Mesh | None, rows: int, n_prompts: int, top: bool, **options: Any
    ) -> Words:
        """Returns all results that the contract fixes, for prompts in steps of at most `rows`
        rows."""
        with self.generator(mesh, rows, **options) as generator:
            params = rm.SamplingParams(
                n=2,
                max_tokens=5,
                seed=11,
                logprobs=3 if top else None,
                prompt_logprobs=0,
                ignore_eos=True,
            )
            out = [words(np.frombuffer(self.digest.encode(), np.uint8))]
            for output in generator.generate(PROMPTS[:n_prompts], params, use_tqdm=False):
                out.append(words(output.prompt_logprobs))
                for c in output.outputs:
                    out += [words(c.token_ids), words(c.logprobs), words(c.sampling_logprobs)]
                    out += (
                        []
                        if c.top_logprobs is None
                        else [words(c.top_logprobs.ids), words(c.top_logprobs.logprobs)]
                    )
                    out += [] if c.routed_experts is None else [words(c.routed_experts)]
            out += [words(logits) for logits in generator.logits(PROMPTS[:n_prompts])]
            return out

    def run_digest(self) -> str:
        self.generator(None, 8).close()
        return self.digest

    def one_rank(self, n_prompts: int, top: bool) -> Words:
        key = n_prompts, top
        if key not in self.expected:
            self.expected[key] = self.run(None, 31, *key)
        return self.expected[key]


@pytest.fixture(
    scope="module",
    params=[
        *[(name, "bfloat16") for name in SHAPES],
        *[full((name, "float32")) for name in SHAPES],
    ],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def model(request: pytest.FixtureRequest) -> Model:
    return Model(*request.param)


def settings(moe: bool) -> Iterator[tuple[rm.Mesh, dict[str, Any]]]:
    for tp in TP:
        for dp in DP:
            for ep in sorted({1, tp, tp * dp}) if moe else [1]:
                for backend in BACKENDS if ep > 1 else BACKENDS[:1]:
                    if backend == "local_allreduce" and ep != tp:
                        continue
                    for sequence_parallel in (False, True) if tp > 1 else (False,):
                        yield (
                            rm.Mesh(tp=tp, dp=dp, ep=ep),
                            {"ep_backend": backend, "sequence_parallel": sequence_parallel},
                        )


@pytest.mark.parametrize("every", [3, full(1)])  # the quick set takes a third of the meshes
def test_every_mesh_gives_the_bits_of_one_rank(
    model: Model, every: int, pytestconfig: pytest.Config
) -> None:
    """The whole product of degrees, dispatchers and sequence parallelism; rows of a step, prompts
    and top logprobs rotate along, so that replicas are idle, steps are smaller than tp and rows do
    not divide."""
    compared = different = meshes = 0
    for i, (mesh, options) in enumerate(
        itertools.islice(settings(model.case.is_moe), 0, None, every)
    ):
        # With top logprobs every rank draws.
        rows, n_prompts, top = ((1, 2, 5, 17, 31)[i % 5], 1 + i % len(PROMPTS), i % 4 == 0)
        want, got = model.one_rank(n_prompts, top), model.run(mesh, rows, n_prompts, top, **options)
        assert len(want) == len(got)
        wrong = sum(
            int((a != b).sum()) if a.shape == b.shape else a.size
            for a, b in zip(want, got, strict=True)
        )
        assert wrong == 0, (
            f"{mesh} {options}, {rows} rows a step, {n_prompts} prompts: {wrong} bytes differ"
        )
        compared += sum(a.size for a in want)
        different += wrong
        meshes += 1
    pytestconfig.stash[SUMMARY].append(
        f"mesh, {model.case.name} {model.dtype}: {meshes} meshes up to {max(TP) * max(DP)} ranks, "
        f"{different} of {compared:,} bytes differ"
    )


def test_parts_are_parts(model: Model) -> None:
    """Each rank holds only its share: weights and KV of a mesh together are about those of one
    rank."""
    with (
        model.generator(None, 8) as alone,
        model.generator(rm.Mesh(tp=4), 8) as four,
        model.generator(rm.Mesh(dp=2), 8) as two,
    ):
        whole = alone.metrics()["weight_bytes"]
        # Every rank holds whole vectors and routers, and tiles are padded.
        assert four.metrics()["weight_bytes"] < 1.6 * whole
        assert two.metrics()["weight_bytes"] == 2 * whole


def held_elements(spec: rm.ModelSpec, name: str, shape: tuple[int, ...], rank: Placement) -> int:
    """Returns the elements of one parameter on one rank, from the name of its module."""
    module, dim = name.split(".")[-2], spec.head_dim
    if ".experts." in name and int(name.split(".experts.")[1].split(".")[0]) not in rank.experts:
        return 0
    expert = ".experts." in name
    rows = {
        "embed_tokens": rank.vocab, "lm_head": rank.vocab, "o_proj": rank.hidden,
        "down_proj": rank.expert_hidden if expert else rank.hidden,
        "gate_proj": rank.expert_inner if expert else rank.inner,
        "up_proj": rank.expert_inner if expert else rank.inner,
        "q_proj": range(len(rank.heads) * dim), "k_proj": range(len(rank.kv_heads) * dim),
        "v_proj": range(len(rank.kv_heads) * dim),
    }.get(module, range(shape[0]))  # fmt: skip
    return len(rows) * int(np.prod(shape[1:], dtype=np.int64))


@pytest.mark.parametrize(
    "mesh",
    [rm.Mesh(tp=4), rm.Mesh(tp=3, dp=2, ep=6), rm.Mesh(tp=2, dp=2, ep=2), rm.Mesh(tp=6, dp=2)],
    ids=str,
)
def test_each_rank_reads_what_it_holds_and_no_more(mesh: rm.Mesh) -> None:
    """The bytes that a sync reads, over all ranks, equal those of the parts that they hold."""
    model = Model("moe", "bfloat16")
    with model.generator(mesh, 8) as generator:
        report = generator.sync_weights(model.weights, cast=True)
        manifest = generator.manifest()
    ranks = placements(model.spec, mesh.tp, mesh.dp, mesh.ep)
    want = sum(
        held_elements(model.spec, name, info.shape, rank) * model.weights[name].itemsize
        for rank in ranks
        for name, info in manifest.items()
        if name in model.weights
    )
    assert report.bytes == want
    assert report.digest == Model("moe", "bfloat16").run_digest()


@pytest.fixture(scope="module")
def even() -> Model:
    """A bias above all scores makes every token choose every twelfth expert: each of up to four
    ranks gets the same number of choices, as rollmesh.distributed.traffic assumes."""
    model = Model("moe", "bfloat16", num_experts_per_tok=12)
    for name, bias in model.weights.items():
        if name.endswith("e_score_correction_bias"):
            bias[:] = 0
            bias[::12] = 100
    return model


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "mesh",
    [
        rm.Mesh(tp=4),
        rm.Mesh(tp=3, dp=2, ep=3),
        rm.Mesh(tp=2, dp=2, ep=4),
        rm.Mesh(dp=2),
        rm.Mesh(dp=2, ep=2),
        rm.Mesh(tp=2, dp=3),
    ],
    ids=str,
)
def test_traffic_is_what_plan_says(
    even: Model, mesh: rm.Mesh, backend: str, sequence_parallel: bool
) -> None:
    """Bytes that the engine counted over decode steps of five rows a replica, against
    distributed/traffic.py: exact. An axis of size 1 transfers nothing, so that the other axis has
    all the bytes."""
    if backend == "local_allreduce" and mesh.ep not in (1, mesh.tp):
        pytest.skip("local_allreduce works where ep = tp")
    with even.generator(
        mesh, 31, ep_backend=backend, sequence_parallel=sequence_parallel
    ) as generator:
        before = generator.metrics()
        prompts = [[i + 1] for i in range(5 * mesh.dp)]
        generator.generate(
            prompts, rm.SamplingParams(max_tokens=8, ignore_eos=True, seed=1), use_tqdm=False
        )
        after = generator.metrics()
    steps = after["steps"] - before["steps"]
    assert steps == 8
    want = step_traffic(even.spec, mesh, 5, ep_backend=backend, sequence_parallel=sequence_parallel)
    assert (want.tp == 0, want.ep == 0) == (mesh.tp == 1, mesh.ep == 1)
    assert (after["comm_bytes"] - before["comm_bytes"]) / steps == pytest.approx(
        sum(want), rel=1e-12, abs=0
    )


@pytest.mark.parametrize(
    "mesh", [rm.Mesh(tp=2, dp=2, ep=4), rm.Mesh(tp=3, ep=3), rm.Mesh(dp=3), rm.Mesh(tp=4)], ids=str
)
def test_a_mesh_under_pressure(mesh: rm.Mesh) -> None:
    """Few pages, few places, prompts with common beginnings, a second version: preemption, prefix
    hits and a sync do not change a bit either."""
    model = Model("moe", "bfloat16")
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 300, int(rng.integers(1, 30))).tolist() for _ in range(20)]
    prompts += [[*prompts[i], *prompts[i], 3][:35] for i in range(6)]
    params = [
        rm.SamplingParams(n=int(rng.integers(1, 4)), max_tokens=int(rng.integers(1, 24)), seed=i)
        for i in range(len(prompts))
    ]
    second = {name: value * np.float32(0.75) for name, value in model.weights.items()}

    def rollouts(generator: rm.Generator) -> list[tuple[bytes, bytes, bytes]]:
        return [
            (c.token_ids.tobytes(), c.logprobs.tobytes(), c.routed_experts.tobytes())
            for output in generator.generate(prompts, params, use_tqdm=False)
            for c in output.outputs
        ]

    def both_versions(mesh: rm.Mesh | None, pages: int) -> tuple[list[Any], int]:
        kv_heads = 4 if mesh is None else {1: 4, 2: 2, 3: 2, 4: 1}[mesh.tp]  # of a rank
        # Layers, KV heads, K padded to 32 and V to 16, bytes.
        page = 2 * kv_heads * (16 * 32 + 16 * 16) * 2
        with rm.Generator(
            model.spec,
            mesh=mesh,
            kv_cache_gib=pages * page / 2**30,
            max_model_len=64,
            max_num_seqs=4,
            threads=2,
            max_num_batched_tokens=13,
        ) as generator:
            generator.sync_weights(model.weights, cast=True)
            first = rollouts(generator)
            generator.sync_weights(second, cast=True)
            return [first, rollouts(generator)], generator.metrics()["preemptions"]

    want, none = both_versions(None, 64)
    got, preemptions = both_versions(mesh, 5)
    assert none == 0 < preemptions
    assert got == want
