"""A sync over the ranks of a mesh is complete or has no effect, even if only one rank can detect
the error.

Input: a mesh of eight ranks and state dicts with one fault in one row. Oracle: the outputs before
the sync, and those of one rank after the next. Bound: equal bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import helpers
import numpy as np
import pytest

import rollmesh as rm

CASE = helpers.Case(
    "mesh",
    helpers.tiny_config(
        True,
        vocab_size=300,
        hidden_size=96,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_experts=8,
    ),
)
WEIGHTS = helpers.numpy_state_dict(CASE.config)
MESH = rm.Mesh(tp=4, dp=2, ep=8)
LAST_ROWS = (
    "model.layers.1.self_attn.q_proj.weight",
    "lm_head.weight",
    "model.layers.0.mlp.experts.7.down_proj.weight",
)


def generator(mesh: rm.Mesh | None = MESH) -> rm.Generator:
    return rm.Generator(
        rm.ModelSpec.from_hf(CASE.config),
        mesh=mesh,
        dtype="float32",
        kv_cache_gib=0.01,
        max_model_len=64,
        threads=1,
    )


def rollout(gen: rm.Generator) -> bytes:
    outputs = gen.generate(
        [[1, 2, 3], [9] * 20],
        rm.SamplingParams(n=2, max_tokens=6, seed=1, ignore_eos=True),
        use_tqdm=False,
    )
    return b"".join(
        c.token_ids.tobytes() + c.logprobs.tobytes() for o in outputs for c in o.outputs
    )


def halved() -> dict[str, np.ndarray]:
    return {name: value * np.float32(0.5) for name, value in WEIGHTS.items()}


@pytest.fixture(scope="module")
def expected() -> tuple[bytes, bytes]:
    """Returns the results of one rank for the first and the second version."""
    with generator(None) as gen:
        gen.sync_weights(WEIGHTS)
        first = rollout(gen)
        gen.sync_weights(halved())
        return first, rollout(gen)


@pytest.mark.parametrize("name", LAST_ROWS)
def test_bad_set_what_one_rank_refuses_no_rank_serves(
    name: str, expected: tuple[bytes, bytes]
) -> None:
    """Only the rank that holds the last row reads the NaN in it."""
    bad = halved()
    bad[name] = bad[name].copy()
    bad[name][-1, -1] = np.nan
    with generator() as gen:
        gen.sync_weights(WEIGHTS)
        with pytest.raises(
            rm.NonFiniteError,
            match=rf"{name}: element \[{bad[name].shape[0] - 1}, {bad[name].shape[1] - 1}\]",
        ):
            gen.sync_weights(bad)
        assert gen.version == 0
        assert rollout(gen) == expected[0]
        gen.sync_weights(halved())
        assert rollout(gen) == expected[1]


@pytest.mark.parametrize("name", LAST_ROWS)
def test_a_tensor_that_one_rank_refused_may_be_sent_again(
    name: str, expected: tuple[bytes, bytes]
) -> None:
    good = halved()
    bad = good[name].copy()
    bad[-1, 0] = np.inf
    with generator() as gen, gen.begin_sync() as sync:
        with pytest.raises(rm.NonFiniteError):
            sync.push(name, bad)
        for each, value in good.items():
            sync.push(each, value)
        sync.commit()
        assert rollout(gen) == expected[1]


@pytest.mark.parametrize("mesh", [None, MESH], ids=["one", "mesh"])
def test_of_many_pushed_at_once_all_are_there_or_none(
    mesh: rm.Mesh | None, expected: tuple[bytes, bytes]
) -> None:
    """One of them is bad, the last or one in the middle: each can then be sent again, together or
    alone."""
    good = halved()
    pairs = list(good.items())
    bad = good[LAST_ROWS[0]].copy()
    bad[-1, -1] = np.nan
    poisoned = [(name, bad if name == LAST_ROWS[0] else value) for name, value in pairs]
    with generator(mesh) as gen, gen.begin_sync() as sync:
        engine = gen._engine

        def push_all(pairs: Iterable[tuple[str, Any]]) -> None:
            entries = []
            for name, tensor in pairs:
                entries.append(engine.sync_resolve(name))
                engine.sync_take(entries[-1], tensor)
            engine.sync_push(entries)

        for pushed, error in (
            (poisoned, rm.NonFiniteError),
            ([*pairs, pairs[3]], rm.DuplicateKeyError),
            ([*pairs, ("no.such", bad)], rm.UnexpectedKeyError),
            ([*pairs, (LAST_ROWS[1], good[LAST_ROWS[1]])], rm.DuplicateKeyError),
            ([*pairs[:4], (pairs[4][0], bad[:1]), *pairs[5:]], rm.ShapeError),
            ([*pairs[:4], (pairs[4][0], [pairs[4]]), *pairs[5:]], rm.UnsupportedTensorError),
        ):
            with pytest.raises(error):
                push_all(pushed)
        push_all([])
        push_all(pairs[:7])
        with pytest.raises(rm.DuplicateKeyError):  # the tensors that arrived before stay
            push_all([*pairs[7:], pairs[0]])
        for name, value in pairs[7:11]:
            sync.push(name, value)
        push_all(tuple(pairs[11:]))
        report = sync.commit()
        assert report.num_tensors == report.num_parameters == len(pairs)
        assert rollout(gen) == expected[1]


def test_faults_that_all_ranks_see_are_told_once(expected: tuple[bytes, bytes]) -> None:
    with generator() as gen:
        gen.sync_weights(WEIGHTS)
        lacking = dict(halved())
        del lacking["lm_head.weight"]
        with pytest.raises(rm.MissingKeyError, match=r"lm_head\.weight"):
            gen.sync_weights(lacking)
        with pytest.raises(rm.VersionError):
            gen.sync_weights(halved(), version=0)
        with pytest.raises(rm.ShapeError):
            gen.sync_weights({**halved(), "model.norm.weight": np.ones(95, np.float32)})
        assert rollout(gen) == expected[0]


def test_in_place_and_asleep(expected: tuple[bytes, bytes]) -> None:
    with generator() as gen:
        gen.sync_weights(WEIGHTS)
        gen.sync_weights(halved(), mode="inplace")
        assert rollout(gen) == expected[1]
        gen.sleep(("weights", "kv"))
        gen.wake(("weights", "kv"))
        with pytest.raises(rm.NotSyncedError):
            rollout(gen)
        gen.sync_weights(WEIGHTS)
        assert rollout(gen) == expected[0]


@pytest.mark.parametrize("inflight", ["restart", "keep", "abort", "wait"])
def test_requests_in_flight(inflight: str) -> None:
    """A sync in the middle has the same effect on requests as without a mesh, token for token."""
    results = []
    for mesh in (None, rm.Mesh(tp=2), rm.Mesh(tp=4, ep=4)):
        with generator(mesh) as gen:
            gen.sync_weights(WEIGHTS)
            gen.submit(
                [[1, 2, 3], [4] * 30, [5, 6]],
                rm.SamplingParams(max_tokens=12, seed=3, ignore_eos=True),
            )
            for _ in range(4):
                gen.poll()
            gen.sync_weights(halved(), inflight=inflight)  # type: ignore[arg-type]
            outputs = gen.poll(3)
            results.append(
                [
                    (
                        o.outputs[0].token_ids.tobytes(),
                        o.outputs[0].logprobs.tobytes(),
                        o.outputs[0].versions.tobytes(),
                    )
                    for o in outputs
                ]
            )
    assert results[0] == results[1] == results[2]
    assert len(results[0]) == 3


@pytest.mark.parametrize("mesh", [None, rm.Mesh(tp=2), rm.Mesh(tp=4, ep=4)], ids=str)
def test_nonfinite_what_one_rank_finds_not_finite_ends_the_request_on_all(
    mesh: rm.Mesh | None,
) -> None:
    """The last KV head's K is infinite for one token only; ranks without that head would
    continue."""
    bad = {name: value.copy() for name, value in WEIGHTS.items()}
    bad["model.layers.0.self_attn.k_proj.weight"][-1] = np.inf
    with generator(mesh) as gen:
        gen.sync_weights(bad, allow_nonfinite=True)
        outputs = gen.generate(
            [[1, 2, 3], [4]],
            rm.SamplingParams(max_tokens=4, seed=1),
            use_tqdm=False,
            on_error="return",
        )
        assert [type(output.error) for output in outputs] == [rm.NumericsError] * 2
        assert "a row of K or V is not finite" in str(outputs[0].error)
        gen.sync_weights(WEIGHTS)
        assert all(
            output.error is None
            for output in gen.generate([[1, 2, 3]], use_tqdm=False, on_error="return")
        )
