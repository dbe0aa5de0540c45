"""The choice of tokens against oracles that share no code with it: published vectors for the random
numbers, filters by hand, and frequencies. Results for ref hold for every variant
(test_checkops.py, tolerance zero)."""

from __future__ import annotations

import numpy as np
import pytest
from ops_cases import Array, normal

from rollmesh import ops

REF = "ref"


def lone(logits: Array) -> tuple[Array, Array]:
    """Returns one row of logits and its statistics."""
    row = np.asarray(logits, np.float32).reshape(1, -1)
    return row, np.array(
        [[np.nanmax(row), np.nansum(np.exp(row.astype(np.float64) - np.nanmax(row)))]], np.float32
    )


def test_philox_known_answer() -> None:
    """Random123's vector for philox4x32-10 at zero: 6627e8d5 e169c58d …. With 2^16 equal tokens the
    draw is r's top 16 bits."""
    logits, stats = lone(np.zeros(1 << 16))
    sampled = ops.sample(logits, stats, ops.SampleParams(seed=0, counter=0), isa=REF)
    assert sampled.tokens[0] == 0xE169
    # all ones: 408f276d 41c83b0e …, but the upper counter words are zero here, so check the layout
    # of the lower ones instead
    assert (
        ops.sample(logits, stats, ops.SampleParams(seed=0, counter=0), isa=REF).tokens[0]
        == philox(0, 0) >> 48
    )
    for seed, counter in ((1, 0), (0, 1), (2**63 + 5, 7), (2**64 - 1, 2**64 - 1)):
        got = ops.sample(
            logits, stats, ops.SampleParams(seed=seed, counter=counter), isa=REF
        ).tokens[0]
        assert got == philox(seed, counter) >> 48


def philox(seed: int, counter: int) -> int:
    mask = 2**32 - 1
    key, x = [seed & mask, seed >> 32], [counter & mask, counter >> 32, 0, 0]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(p1 >> 32) ^ x[1] ^ key[0], p1 & mask, (p0 >> 32) ^ x[3] ^ key[1], p0 & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return x[0] | x[1] << 32


def test_a_draw_on_a_border_takes_the_token_behind_it() -> None:
    """Token 0 has weight 2^40, each of the others 1, so that every number from 2^40 on is a border.
    The seeds were searched for such numbers (one in 2^22); the oracle draws by exact integers."""
    others = 2**18
    logits, stats = lone(np.concatenate([[0.0], np.full(others, -27.5)]))
    for seed, token in ((2711413, 100348), (6524832, 66153), (7624765, 177384)):
        assert token == (philox(seed, 0) * (2**40 + others) >> 64) - 2**40 + 1
        for isa in ops.available_isas():
            assert (
                ops.sample(logits, stats, ops.SampleParams(seed=seed, counter=0), isa=isa).tokens[0]
                == token
            )


def kept(logits: Array, params: ops.SampleParams) -> dict[int, float]:
    """Returns the tokens that can be drawn, with their sampling logprobs: those for which `forced`
    does not give −∞."""
    row, stats = lone(logits)
    every = [ops.SampleParams(**{**params.__dict__, "forced": v}) for v in range(row.shape[1])]
    rows = np.repeat(row, row.shape[1], 0), np.repeat(stats, row.shape[1], 0)
    under = ops.sample(*rows, every, isa=REF).sampling_logprobs
    return {v: float(p) for v, p in enumerate(under) if np.isfinite(p)}


def test_filters_by_hand() -> None:
    """Ties, exactly k, the smallest prefix, min_p ≥, bans; survivors are renormalised."""
    p = np.array([0.1, 0.3, 0.2, 0.3, 0.1])
    logits = np.log(p)
    equal = np.zeros(6)
    assert set(kept(logits, ops.SampleParams(top_k=2))) == {1, 3}
    assert set(kept(logits, ops.SampleParams(top_k=1))) == {1}
    assert set(kept(logits, ops.SampleParams(top_k=4))) == {0, 1, 2, 3}
    assert set(kept(equal, ops.SampleParams(top_k=4))) == {0, 1, 2, 3}
    assert set(kept(equal, ops.SampleParams(top_p=0.5))) == {0, 1, 2}
    assert set(kept(equal, ops.SampleParams(top_p=0.51))) == {0, 1, 2, 3}
    # −0 equals +0.
    assert set(kept(np.array([-0.0, 0.0, 0.0, -0.0]), ops.SampleParams(top_k=2))) == {0, 1}
    assert set(kept(logits, ops.SampleParams(top_p=0.25))) == {1}
    assert set(kept(logits, ops.SampleParams(top_p=0.65))) == {1, 2, 3}
    assert set(kept(logits, ops.SampleParams(top_p=1e-9))) == {1}
    assert set(kept(logits, ops.SampleParams(min_p=0.6))) == {1, 2, 3}
    assert set(kept(logits, ops.SampleParams(min_p=1.0))) == {1, 3}
    assert set(kept(logits, ops.SampleParams(banned=(1, 2)))) == {0, 3, 4}
    # The top-k keeps 0.8: 0.3 + 0.3 ≥ 0.7 · 0.8.
    assert set(kept(logits, ops.SampleParams(top_k=3, top_p=0.7))) == {1, 3}
    assert set(kept(logits, ops.SampleParams(top_k=3, top_p=0.8))) == {1, 2, 3}
    for params in (
        ops.SampleParams(top_k=3),
        ops.SampleParams(temperature=0.5, banned=(3,)),
        ops.SampleParams(temperature=2.0, min_p=0.5),
    ):
        left = kept(logits, params)
        scaled = np.array([p[v] ** (1 / params.temperature) for v in left])
        assert np.allclose(list(left.values()), np.log(scaled / scaled.sum()), atol=1e-6)


FILTERS = [
    *(
        {},
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": 40},
        {"top_k": 39},
        {"top_p": 0.3},
        {"top_p": 0.999999},
        {"min_p": 0.2},
        {"min_p": 1.0},
    ),
    *(
        {"top_k": 17, "top_p": 0.6},
        {"top_k": 5, "min_p": 0.3},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "temperature": 1.7},
    ),
    *(
        {"temperature": 0.05},
        {"temperature": 0.01, "top_k": 30},
        {"temperature": 100.0, "top_p": 0.5},
    ),
]


@pytest.mark.parametrize("isa", ops.available_isas())
def test_kept_tokens_are_the_first_of_the_top_logprobs(rng: np.random.Generator, isa: str) -> None:
    """Input: spread rows, rows of few values (so that the limit cuts ties), one value, zeros of
    both signs, −∞, NaNs and large peaks. Oracle: the tokens that have a sampling logprob when they
    are forced."""
    spread, odd = rng.standard_normal(40) * 3, rng.standard_normal(40)
    odd[::3], odd[1::7], odd[5], odd[11] = -np.inf, np.nan, 0.0, -0.0
    rows = [
        spread,
        np.round(spread / 2),
        np.zeros(40),
        np.where(np.arange(40) % 2, 0.0, -0.0),
        odd,
        np.where(spread > 3, 60.0, spread),
    ]
    seen = set()
    for logits in rows:
        row, stats = lone(logits)
        ids, _ = ops.top_logprobs(row, stats, 40, isa=isa)
        for filters in FILTERS:
            # Not 1, because without a filter that is the model's logprob.
            params = ops.SampleParams(**{"temperature": 0.99999, **filters})
            drawn, same = (
                ops.sample(row, stats, params, isa=isa, kept=True),
                ops.sample(row, stats, params, isa=isa),
            )
            assert drawn.kept is not None
            assert same.kept is None
            count = int(drawn.kept[0])
            seen.add(count)
            assert set(ids[0, :count].tolist()) == set(kept(logits, params))
            assert drawn.tokens[0] in ids[0, :count]
            assert all((a == b).all() for a, b in zip(drawn[:3], same[:3], strict=True))
            forced = ops.sample(
                row, stats, params, forced=np.array([7], np.int32), isa=isa, kept=True
            )
            assert forced.kept is not None
            assert forced.kept[0] == count
    assert {1, 40} <= seen
    assert len(seen) > 12


@pytest.mark.parametrize("isa", ops.available_isas())
def test_kept_of_rows_without_filters_bans_or_tokens(isa: str) -> None:
    row, stats = lone(np.array([1.0, 3.0, 3.0, -0.0, -40.0]))

    def count(params: ops.SampleParams, logits: Array = row, flag: int = 0) -> int:
        counts = ops.sample(
            logits, stats, params, row_flags=np.array([flag], np.uint8), isa=isa, kept=True
        ).kept
        assert counts is not None
        return int(counts[0])

    assert count(ops.SampleParams()) == 4  # the last weighs less than 2^-40
    assert count(ops.SampleParams(top_k=5)) == 4
    assert count(ops.SampleParams(top_k=4, banned=(1,))) == 3
    assert count(ops.SampleParams(top_p=0.1, banned=(1, 2))) == 1
    assert count(ops.SampleParams(temperature=0.0, top_k=3)) == 1
    assert count(ops.SampleParams(temperature=0.0, forced=3)) == 1
    assert count(ops.SampleParams(temperature=0.0, banned=(0, 1, 2, 3, 4))) == 0
    assert count(ops.SampleParams(top_k=2, banned=(0, 1, 2, 3, 4))) == 0
    assert count(ops.SampleParams(top_k=2), flag=1) == 0
    assert count(ops.SampleParams(temperature=0.0), flag=1) == 0
    for broken in (np.nan, -np.inf):
        assert count(ops.SampleParams(top_p=0.5), np.full((1, 5), broken, np.float32)) == 0
    assert count(ops.SampleParams(top_k=2), np.array([[0, np.inf, 1, 2, 3]], np.float32)) == 0


def test_a_token_below_2_to_minus_40_is_never_drawn() -> None:
    assert set(kept(np.array([0.0, -27.7, -27.8]), ops.SampleParams(temperature=0.99999))) == {0, 1}


def test_greedy() -> None:
    logits, stats = lone(np.array([1.0, 3.0, 3.0, -0.0]))
    drawn = ops.sample(
        logits, stats, ops.SampleParams(temperature=0.0, top_k=1, top_p=0.1), isa=REF
    )
    assert (drawn.tokens[0], drawn.sampling_logprobs[0]) == (1, 0.0)
    assert abs(drawn.logprobs[0] - np.log(np.exp(3) / (np.exp(1) + 2 * np.exp(3) + 1))) < 1e-6
    banned = ops.sample(logits, stats, ops.SampleParams(temperature=0.0, banned=(1,)), isa=REF)
    assert banned.tokens[0] == 2
    for forced, under in ((1, 0.0), (2, -np.inf)):
        assert (
            ops.sample(
                logits, stats, ops.SampleParams(temperature=0.0, forced=forced), isa=REF
            ).sampling_logprobs[0]
            == under
        )


def test_temperature_one_without_filters_is_the_model_bit_for_bit(rng: np.random.Generator) -> None:
    logits = normal(rng, (50, 300), "float32", 3.0)
    stats = np.concatenate([lone(row)[1] for row in logits])
    params = [ops.SampleParams(seed=i) for i in range(50)]
    sampled = ops.sample(np.ascontiguousarray(logits), stats, params, isa=REF)
    assert (sampled.logprobs.view(np.uint32) == sampled.sampling_logprobs.view(np.uint32)).all()
    warm = ops.sample(
        np.ascontiguousarray(logits),
        stats,
        [ops.SampleParams(seed=i, temperature=1.5) for i in range(50)],
        isa=REF,
    )
    assert (warm.logprobs != warm.sampling_logprobs).any()


@pytest.mark.parametrize(
    "params",
    [
        ops.SampleParams(),
        ops.SampleParams(temperature=0.6, top_k=5),
        ops.SampleParams(temperature=1.5, top_p=0.8),
    ],
)
def test_frequencies(params: ops.SampleParams) -> None:
    """40,000 draws at successive counters against the distribution: Pearson's chi-square, 1 in 10^6
    by chance (fixed seed)."""
    p = np.array([0.02, 0.3, 0.08, 0.25, 0.05, 0.2, 0.1])
    n = 40_000
    row, stats = lone(np.log(p))
    each = [ops.SampleParams(**{**params.__dict__, "seed": 11, "counter": i}) for i in range(n)]
    tokens = ops.sample(np.repeat(row, n, 0), np.repeat(stats, n, 0), each, isa=REF).tokens
    expected = {v: n * np.exp(lp) for v, lp in kept(np.log(p), params).items()}
    seen = np.bincount(tokens, minlength=len(p))
    assert seen.sum() == sum(seen[v] for v in expected)
    chi_square = sum((seen[v] - e) ** 2 / e for v, e in expected.items())
    assert chi_square < 40


def test_top_logprobs(rng: np.random.Generator) -> None:
    # Rounding gives ties, and zeros of both signs, which are equal.
    logits = np.round(normal(rng, (5, 40), "float32", 2.0))
    assert np.signbit(logits[logits == 0]).any()
    stats = np.concatenate([lone(row)[1] for row in logits])
    ids, logprobs = ops.top_logprobs(logits, stats, 12, isa=REF)
    order = np.lexsort((np.broadcast_to(np.arange(40), logits.shape), -logits), axis=1)[:, :12]
    assert (ids == order).all()
    want = (
        np.take_along_axis(logits.astype(np.float64), order, 1)
        - stats[:, :1]
        - np.log(stats[:, 1:].astype(np.float64))
    )
    assert np.abs(logprobs - want).max() < 2e-6


def test_ranks() -> None:
    """Worked out by hand: the likeliest token has rank 1, ties count one another, −0 equals +0, and
    comparisons with a NaN are false."""
    nan, inf = np.nan, np.inf
    logits = np.array(
        [[3, 1, 2, 3], [0.0, -0.0, -1, 5], [nan, 2, nan, 1], [-inf, inf, -inf, 0], [1, 2, 3, 4]],
        np.float32,
    )
    wanted = {
        0: [2, 3, 0, 4, 4],
        1: [4, 3, 1, 1, 3],
        2: [3, 4, 0, 4, 2],
        3: [2, 1, 2, 2, 1],
        -1: [0, 0, 0, 0, 0],
    }
    for token, ranks in wanted.items():
        assert ops.ranks(logits, np.full(5, token, np.int32), isa=REF).tolist() == ranks
