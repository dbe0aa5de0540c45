"""The engine's behaviour: sharing of pages, preemption, results of cache hits, the effect of a new
version on requests in flight, and the isolation of failures.

Input: tiny random models. Oracle: the same request alone in a plain engine (`solo`), or `score`
under the version that a token names; bounds are 0 unless stated. How many rows were computed and
pages held comes from metrics(), and the expected figures are counted in the tests from prompt, page
and sample counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import helpers
import numpy as np
import pytest

import rollmesh as rm

Params = rm.SamplingParams
DENSE, MOE = helpers.tiny_config(num_hidden_layers=1), helpers.tiny_config(moe=True)
BOTH = pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
WEIGHTS = {
    (id(config), seed): helpers.numpy_state_dict(config, seed)
    for config in (DENSE, MOE)
    for seed in (1, 2)
}
PAGE = 16


@contextlib.contextmanager
def engine(
    config: helpers.Config = DENSE, pages: int = 400, version: int | None = 1, **options: Any
) -> Iterator[rm.Generator]:
    """Version v serves the weights of seed v. page bytes: K and V rows of head_dim 16, K padded to
    32 (kernels.h)."""
    page_bytes = config["num_hidden_layers"] * config["num_key_value_heads"] * PAGE * (32 + 16) * 4
    settings = {
        "dtype": "float32",
        "threads": 1,
        "max_model_len": 256,
        "kv_cache_gib": (pages + 0.5) * page_bytes / 2**30,
        **options,
    }
    with rm.Generator(rm.ModelSpec.from_hf(config), **settings) as gen:
        assert gen.metrics()["kv_pages"] == pages
        for v in range(1, (version or 0) + 1):
            sync(gen, config, v)
        yield gen


def sync(gen: rm.Generator, config: helpers.Config, version: int, **options: Any) -> rm.SyncReport:
    return gen.sync_weights(WEIGHTS[id(config), version], version=version, **options)


def prompt(length: int, seed: int = 0) -> list[int]:
    return helpers.prompts(DENSE, [length], seed)[0]


def solo(
    config: helpers.Config, ids: list[int], params: Params, version: int = 1
) -> rm.RequestOutput:
    with engine(config, version=version, enable_prefix_caching=False) as gen:
        return gen.generate(ids, params, use_tqdm=False)[0]


def arrays(output: rm.RequestOutput) -> list[bytes | None]:
    """Returns all records except the versions."""
    found: list[Any] = [output.prompt_logprobs]
    for top in (output.prompt_top_logprobs, *(c.top_logprobs for c in output.outputs)):
        found += [top and top.ids, top and top.logprobs]
    for c in output.outputs:
        found += [c.token_ids, c.logprobs, c.sampling_logprobs, c.routed_experts, c.kept_tokens]
    return [None if x is None else x.tobytes() for x in found]


def held(gen: rm.Generator) -> int:
    stats = gen.metrics()
    return int(stats["kv_pages"] - stats["kv_pages_free"])


def at_rest(gen: rm.Generator) -> bool:
    stats = gen.metrics()
    return bool(
        stats["kv_pages_free"] == stats["kv_pages"] and stats["running"] == stats["waiting"] == 0
    )


# -------------------------------------------------------------------------- one prompt, n samples
@BOTH
def test_a_prompt_is_computed_once_and_its_pages_are_shared(config: helpers.Config) -> None:
    """40 positions are 2 full pages and one of 8. Four samples share 3 pages; at their first
    separate write three of them copy the last page."""
    params = Params(n=4, max_tokens=12, seed=3)
    with engine(config) as gen:
        gen.submit([prompt(40)], params)
        gen.poll()
        assert gen.metrics()["rows"] == 40
        # All four first tokens come from one row of logits.
        assert gen.metrics()["generated_tokens"] == 4
        assert held(gen) == 3
        gen.poll()
        assert gen.metrics()["rows"] == 44
        assert held(gen) == 2 + 4
        output = gen.poll(1)[0]
        assert gen.metrics()["rows"] == 40 + 4 * 11
        assert at_rest(gen)
    assert len({c.token_ids.tobytes() for c in output.outputs}) == 4
    for i, c in enumerate(output.outputs):
        one = solo(config, prompt(40), Params(max_tokens=12, seed=3 + i)).outputs[0]
        assert c.token_ids.tobytes() == one.token_ids.tobytes()
        assert c.logprobs.tobytes() == one.logprobs.tobytes()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32])
def test_samples_that_share_no_partial_page_copy_nothing(length: int) -> None:
    """Counts pages after the second step: full pages are shared, and each sample has one that was
    copied or is new."""
    with engine() as gen:
        gen.submit([prompt(length)], Params(n=3, max_tokens=4, seed=0))
        gen.poll()
        gen.poll()
        assert held(gen) == length // PAGE + 3


@BOTH
@pytest.mark.parametrize("caching", [False, True])
def test_more_samples_than_places(config: helpers.Config, caching: bool) -> None:
    """Seven samples with room for three at a time start one after another and give the same
    answer."""
    params = Params(n=7, max_tokens=10, seed=5, temperature=0.9, prompt_logprobs=0, logprobs=2)
    want = solo(config, prompt(37), params)
    with engine(
        config, max_num_seqs=3, enable_prefix_caching=caching, max_num_batched_tokens=20
    ) as gen:
        got = gen.generate(
            [prompt(37), prompt(9, 1)], [params, Params(max_tokens=30)], use_tqdm=False
        )[0]
        assert arrays(got) == arrays(want)
        assert at_rest(gen)


def test_siblings_go_on_when_one_ends_at_its_first_token() -> None:
    """The leader's pages stay when the leader ends."""
    whole = solo(DENSE, prompt(20), Params(n=6, max_tokens=8, seed=1))
    leader_stops_at = int(whole.outputs[0].token_ids[0])
    params = Params(n=6, max_tokens=8, seed=1, stop_token_ids=(leader_stops_at,))
    with engine() as gen:
        output = gen.generate(prompt(20), params, use_tqdm=False)[0]
        assert at_rest(gen)
    assert output.outputs[0].token_ids.tolist() == [leader_stops_at]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == (
        "stop",
        leader_stops_at,
    )
    for c, w in zip(output.outputs, whole.outputs):
        cut = w.token_ids.tolist()
        cut = cut[: cut.index(leader_stops_at) + 1] if leader_stops_at in cut else cut
        assert c.token_ids.tolist() == cut


@BOTH
def test_a_draw_depends_on_seed_and_position_only(config: helpers.Config) -> None:
    """Continuing from any point of a sample with its seed gives the rest of the sample."""
    whole = solo(config, prompt(20), Params(max_tokens=12, seed=2**64 - 1, n=2))
    for c, seed in zip(whole.outputs, (2**64 - 1, 0)):  # sample i has seed + i mod 2^64
        for cut in (1, 5, 11):
            rest = solo(
                config,
                [*prompt(20), *c.token_ids[:cut].tolist()],
                Params(max_tokens=12 - cut, seed=seed),
            ).outputs[0]
            assert rest.token_ids.tobytes() == c.token_ids[cut:].tobytes()
            assert rest.logprobs.tobytes() == c.logprobs[cut:].tobytes()


# ----------------------------------------------------------------------------------- prefix cache
def test_what_a_hit_serves() -> None:
    """num_cached_tokens counts prompt positions that were not computed: whole pages, but the last
    position always is."""
    plain, with_records = (
        Params(max_tokens=2, seed=0),
        Params(max_tokens=2, seed=0, prompt_logprobs=0),
    )
    with engine() as gen:

        def cached(length: int, params: Params = plain) -> int:
            return gen.generate(prompt(length), params, use_tqdm=False)[0].num_cached_tokens

        assert cached(70) == 0
        assert cached(70) == 64
        assert cached(50) == 48
        assert cached(64) == 63  # its last row is computed again for the logits, and not stored
        assert cached(64, with_records) == 0  # these logprobs were not recorded
        assert cached(64, with_records) == 63
        # Row 47 gives the logprob of token 48, which is not on a complete page.
        assert cached(60, with_records) == 47
        # Pages do not keep the top-k.
        assert cached(64, dataclasses.replace(with_records, prompt_logprobs=2)) == 0
        gen.reset_prefix_cache()
        assert cached(70) == 0
        assert cached(70) == 64
        sync(gen, DENSE, 2)
        assert cached(70) == 0
    with engine(enable_prefix_caching=False) as gen:
        assert [cached(70), cached(70)] == [0, 0]


@BOTH
def test_a_hit_returns_the_records_that_a_recomputation_would(config: helpers.Config) -> None:
    """Covers prompt logprobs and routed experts of cached prompt tokens, including tokens that were
    generated the first time."""
    params = Params(n=2, max_tokens=40, seed=1, prompt_logprobs=0)
    with engine(config) as gen:
        first = gen.generate(prompt(53), params, use_tqdm=False)[0]
        for c in first.outputs:  # one continued in the prompt's last page, the other in its copy
            turn = [*prompt(53), *c.token_ids.tolist(), *prompt(10, 4)]
            for _ in range(2):
                second = gen.generate(turn, params, use_tqdm=False)[0]
                # 92 positions have KV, so 5 pages are complete; with records the last row is
                # computed again.
                assert second.num_cached_tokens >= 79
                assert arrays(second) == arrays(solo(config, turn, params))
            scored = gen.score([turn])[0]
            assert second.prompt_logprobs is not None
            assert scored.tobytes() == second.prompt_logprobs.tobytes()


@BOTH
def test_logits_and_scores_do_not_care_for_the_cache(config: helpers.Config) -> None:
    ids = prompt(64)
    with engine(config, enable_prefix_caching=False) as gen:
        logits, scores = gen.logits([ids])[0], gen.score([ids])[0]
    with engine(config) as gen:
        for _ in range(3):
            gen.generate(ids, Params(max_tokens=3), use_tqdm=False)
            assert gen.score([ids])[0].tobytes() == scores.tobytes()
            assert gen.logits([ids])[0].tobytes() == logits.tobytes()


def test_a_page_is_found_behind_its_own_prefix_only() -> None:
    """Pages a, c and b are cached. b + c begins with b, and the cached page of c after a has
    different contents."""
    a, b, c = (prompt(PAGE, seed) for seed in range(3))
    params = Params(max_tokens=3, seed=0)
    with engine() as gen:
        gen.generate([[*a, *c, 1], [*b, 1]], params, use_tqdm=False)
        output = gen.generate([*b, *c, 1], params, use_tqdm=False)[0]
        assert output.num_cached_tokens == PAGE
        assert arrays(output) == arrays(solo(DENSE, [*b, *c, 1], params))


def test_the_cache_gives_way_oldest_first() -> None:
    """20 pages; six prompts of 5 whole pages: the cache still has the last prompts but not the
    first; pages in use are not evicted."""
    with engine(pages=20) as gen:
        for seed in range(6):
            gen.generate(prompt(80, seed), Params(max_tokens=2), use_tqdm=False)
        assert gen.metrics()["evictions"] > 0
        assert (
            gen.generate(prompt(80, 5), Params(max_tokens=2), use_tqdm=False)[0].num_cached_tokens
            == 79
        )
        assert (
            gen.generate(prompt(80, 0), Params(max_tokens=2), use_tqdm=False)[0].num_cached_tokens
            == 0
        )


# ------------------------------------------------------------------------------------- exhaustion


def test_exhaustion_the_oldest_is_not_disturbed() -> None:
    """The oldest request gets a token in every step, whatever is added after it."""
    with engine(pages=8) as gen:
        oldest = gen.submit([prompt(20)], Params(max_tokens=90, ignore_eos=True))
        for step in range(90):
            if step % 3 == 0:
                gen.submit([prompt(40, step)], Params(max_tokens=30))
            done = [output.request_id for output in gen.poll()]
            assert (oldest[0] in done) == (step == 89)
        assert gen.metrics()["preemptions"] > 0


def test_exhaustion_what_can_never_fit_is_refused_and_the_rest_served() -> None:
    """4 pages hold 64 positions; the last token is never computed, so 30 + 35 fit and 30 + 36 do
    not."""
    with engine(pages=4) as gen:
        assert (
            len(
                gen.generate(prompt(30), Params(max_tokens=35), use_tqdm=False)[0]
                .outputs[0]
                .token_ids
            )
            == 35
        )
        with pytest.raises(rm.CapacityError, match="5 pages"):
            gen.generate(prompt(30), Params(max_tokens=36), use_tqdm=False)
        assert len(gen.score([prompt(64)])[0]) == 63
        with pytest.raises(rm.CapacityError):
            gen.score([prompt(65)])
        wide = Params(n=5, max_tokens=35, seed=2)  # one at a time if need be
        assert arrays(gen.generate(prompt(30), wide, use_tqdm=False)[0]) == arrays(
            solo(DENSE, prompt(30), wide)
        )
        outputs = gen.generate(
            [prompt(30), prompt(63), prompt(5)],
            Params(max_tokens=20),
            use_tqdm=False,
            on_error="return",
        )
        assert [type(output.error) for output in outputs] == [
            type(None),
            rm.CapacityError,
            type(None),
        ]
        assert at_rest(gen)


def test_the_longest_context_ends_a_sample() -> None:
    with engine(max_model_len=64) as gen:
        output = gen.generate(prompt(60), Params(max_tokens=99), use_tqdm=False)[0].outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (4, "length")
        with pytest.raises(rm.RequestError, match="64"):
            gen.generate(prompt(64), Params(max_tokens=1), use_tqdm=False)
        assert len(gen.score([prompt(64)])[0]) == 63


# ------------------------------------------------------------------------------------------ stops
def test_min_tokens_bans_what_would_stop() -> None:
    """Stop tokens are the greedy tokens of the first six places: with min_tokens=4 the first four
    are banned, and the fifth may stop."""
    free = (
        solo(DENSE, prompt(12), Params(max_tokens=6, temperature=0.0)).outputs[0].token_ids.tolist()
    )
    with engine(eos_token_ids=free[:1]) as gen:
        params = Params(
            max_tokens=30, min_tokens=4, temperature=0.0, stop_token_ids=tuple(free[1:])
        )
        output = gen.generate(prompt(12), params, use_tqdm=False)[0].outputs[0]
        assert not set(output.token_ids[:4].tolist()) & set(free)
        first = gen.generate(prompt(12), Params(max_tokens=30, temperature=0.0), use_tqdm=False)[
            0
        ].outputs[0]
        assert (first.token_ids.tolist(), first.finish_reason, first.stop_reason) == (
            free[:1],
            "stop",
            None,
        )
        ignoring = gen.generate(
            prompt(12), Params(max_tokens=6, temperature=0.0, ignore_eos=True), use_tqdm=False
        )[0].outputs[0]
        assert ignoring.token_ids.tolist() == free
        half = Params(
            n=8, max_tokens=60, min_tokens=10, seed=1, stop_token_ids=tuple(range(0, 151, 2))
        )
        # The token is banned before the eleventh, and likely afterwards.
        for c in gen.generate(prompt(12), half, use_tqdm=False)[0].outputs:
            assert 10 < len(c.token_ids) < 40
            assert (c.token_ids % 2 == 0).tolist() == [False] * (len(c.token_ids) - 1) + [True]
            assert c.stop_reason == c.token_ids[-1]
        everything = Params(max_tokens=5, min_tokens=1, stop_token_ids=tuple(range(151)))
        with pytest.raises(rm.RequestError, match="every token"):
            gen.generate(prompt(12), everything, use_tqdm=False)


# ---------------------------------------------------------------------------- abort, pause, sleep
@BOTH
def test_abort_disturbs_nobody(config: helpers.Config) -> None:
    params = [Params(n=2, max_tokens=25, seed=i) for i in range(4)]
    prompts = [prompt(30 + i, i) for i in range(4)]
    with engine(config, pages=20) as gen:
        ids = gen.submit(prompts, params)
        for _ in range(9):
            gen.poll()
        gen.abort(ids[1])
        outputs = {output.request_id: output for output in gen.poll(4)}
        assert at_rest(gen)
    for i, request in enumerate(ids):
        want = solo(config, prompts[i], params[i])
        if i != 1:
            assert arrays(outputs[request]) == arrays(want)
            continue
        for c, w in zip(outputs[request].outputs, want.outputs):
            assert c.finish_reason == "abort"
            n = len(c.token_ids)
            assert c.token_ids.tobytes() == w.token_ids[:n].tobytes()
            assert c.logprobs.tobytes() == w.logprobs[:n].tobytes()
    assert any(len(c.token_ids) for c in outputs[ids[1]].outputs)


@BOTH
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_kv_sleep_costs_recomputation_and_no_bit(config: helpers.Config, steps: int) -> None:
    """The KV cache also sleeps while a prompt is half computed: 50 positions in chunks of 32."""
    params = Params(n=3, max_tokens=20, seed=8, prompt_logprobs=1, logprobs=1)
    with engine(config, max_num_batched_tokens=32) as gen:
        ids = gen.submit([prompt(50), prompt(9, 1)], [params, params])
        for _ in range(steps):
            gen.poll()
        gen.sleep("kv")
        assert gen.metrics()["kv_bytes"] == 0
        with pytest.raises(rm.StateError):
            gen.poll()
        gen.wake("kv")
        outputs = {output.request_id: output for output in gen.poll(2)}
        assert at_rest(gen)
    assert arrays(outputs[ids[0]]) == arrays(solo(config, prompt(50), params))
    assert arrays(outputs[ids[1]]) == arrays(solo(config, prompt(9, 1), params))


# -------------------------------------------------------------------------------------- in flight
def in_flight(
    gen: rm.Generator, config: helpers.Config, how: dict[str, Any]
) -> list[tuple[list[int], rm.RequestOutput]]:
    """Six requests of one to three samples; a new version comes after 9 steps, when some have
    ended, some run and some wait."""
    prompts = [prompt(11 + 17 * i, i) for i in range(6)]
    params = [
        Params(n=1 + i % 3, max_tokens=5 + 6 * i, seed=i, prompt_logprobs=0) for i in range(6)
    ]
    ids = gen.submit(prompts, params)
    done = {}
    for _ in range(9):
        done |= {output.request_id: output for output in gen.poll()}
    assert 0 < len(done) < 4
    sync(gen, config, 2, **how)
    done |= {output.request_id: output for output in gen.poll(len(ids) - len(done))}
    assert at_rest(gen)
    return [(x, done[i]) for x, i in zip(prompts, ids)]


POLICIES: dict[str, dict[str, Any]] = {
    "wait": {"inflight": "wait"},
    "restart": {"inflight": "restart"},
    "abort": {"inflight": "abort"},
    "keep": {"inflight": "keep"},
    "keep_kv": {"inflight": "keep", "keep_kv": True},
}


@BOTH
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pages", [400, 14])
def test_in_flight_every_token_is_scores_at_its_version(
    config: helpers.Config, policy: str, pages: int
) -> None:
    """Every token's logprob equals the score under its version, except for tokens computed from
    stale KV, which carry no contract. With 14 pages some requests in flight are preempted."""
    with engine(config, pages=pages, max_num_seqs=6, max_num_batched_tokens=64) as gen:
        results = in_flight(gen, config, POLICIES[policy])
    seen: dict[int, int] = {1: 0, 2: 0}
    mixed = stale = 0
    with engine(config, version=1) as old, engine(config, version=2) as new:
        for x, output in results:
            for c in output.outputs:
                versions = c.versions.tolist()
                assert versions == sorted(versions)  # a sample never goes back to an older version
                mixed += len(set(versions)) == 2
                if c.contract is None:
                    stale += len(c.token_ids) > 0
                    continue
                assert c.contract.weight_versions == tuple(sorted(set(versions)))
                ids = [*x, *c.token_ids.tolist()]
                for version, gen in ((1, old), (2, new)):
                    at = c.versions == version
                    assert (
                        gen.score([ids])[0][len(x) - 1 :][at].tobytes() == c.logprobs[at].tobytes()
                    )
                    seen[version] += int(at.sum())
                    # The row of a token draws the next token; the prompt's rows draw the first one.
                    if c.routed_experts is not None and at.any():
                        routed = (
                            gen.generate(ids, Params(max_tokens=1), use_tqdm=False)[0]
                            .outputs[0]
                            .routed_experts
                        )
                        fed = (
                            np.repeat(c.versions, [len(x)] + [1] * (len(c.versions) - 1)) == version
                        )
                        assert routed[:-1][fed].tobytes() == c.routed_experts[fed].tobytes()
    finishes = {c.finish_reason for _, output in results for c in output.outputs}
    assert seen[1] > 0
    assert (seen[2] > 0) == (policy in ("restart", "keep", "keep_kv")), seen
    assert (mixed > 0) == (policy in ("keep", "keep_kv"))
    assert (stale > 0) == (policy == "keep_kv")
    assert ("abort" in finishes) == (policy == "abort")


@BOTH
def test_in_flight_restart_is_the_new_version_from_the_beginning(config: helpers.Config) -> None:
    params = Params(
        n=3,
        max_tokens=20,
        seed=4,
        prompt_logprobs=1,
        logprobs=2,
        top_k=9,
        top_p=0.8,
        kept_tokens=True,
    )
    with engine(config) as gen:
        gen.submit([prompt(30)], params)
        for _ in range(6):
            gen.poll()
        sync(gen, config, 2, inflight="restart")
        output = gen.poll(1)[0]
        assert at_rest(gen)
    assert arrays(output) == arrays(solo(config, prompt(30), params, version=2))
    assert {v for c in output.outputs for v in c.versions.tolist()} == {2}


@BOTH
def test_in_flight_a_prompt_in_the_making_is_of_one_version(config: helpers.Config) -> None:
    """70 positions in chunks of 32; a sync comes after the second chunk. All records of the prompt,
    and of a score, are of the new version."""
    for policy in ("keep", "keep_kv"):
        with engine(config, max_num_batched_tokens=32) as gen:
            gen.submit([prompt(70)], Params(max_tokens=6, seed=4, prompt_logprobs=0))
            gen.poll()
            gen.poll()
            sync(gen, config, 2, **POLICIES[policy])
            output = gen.poll(1)[0]
        assert output.outputs[0].contract is not None
        assert arrays(output) == arrays(
            solo(config, prompt(70), Params(max_tokens=6, seed=4, prompt_logprobs=0), version=2)
        )


def test_in_flight_keep_never_mixes_records_into_the_cache() -> None:
    """A kept request has the old version's prompt logprobs on the new version's pages; a later
    score must not return them."""
    with engine() as gen:
        gen.submit([prompt(64)], Params(max_tokens=30, seed=4, prompt_logprobs=0))
        gen.poll()
        gen.poll()
        sync(gen, DENSE, 2, inflight="keep")
        output = gen.poll(1)[0]
        ids = [*prompt(64), *output.outputs[0].token_ids.tolist()]
        got = gen.score([ids])[0]
    with engine(version=2) as gen:
        assert gen.score([ids])[0].tobytes() == got.tobytes()


def push_between_steps(gen: rm.Generator, config: helpers.Config, fail: bool) -> None:
    """Makes a sync to version 2 with a step after every tenth of it."""
    state = list(WEIGHTS[id(config), 2].items())
    with gen.begin_sync(version=2, inflight="keep") as block:
        for i, (name, tensor) in enumerate(state):
            block.push(name, tensor)
            if i % (len(state) // 10) == 0:
                assert not gen.poll()
        if fail:
            raise KeyError("enough")


@BOTH
def test_in_flight_steps_go_on_while_a_sync_is_open(config: helpers.Config) -> None:
    """Pushes between steps do not change a result before the commit; an aborted sync does not
    change any result."""
    params = Params(max_tokens=60, seed=1)
    want = solo(config, prompt(20), params)
    with engine(config) as gen:
        gen.submit([prompt(20)], params)
        with pytest.raises(KeyError, match="enough"):
            push_between_steps(gen, config, fail=True)
        assert gen.version == 1
        assert arrays(gen.poll(1)[0]) == arrays(want)
        gen.submit([prompt(20)], params)
        push_between_steps(gen, config, fail=False)
        c, w = gen.poll(1)[0].outputs[0], want.outputs[0]
        old = c.versions.tolist().count(1)
        assert old >= 10
        assert c.versions.tolist() == [1] * old + [2] * (60 - old)
        assert c.token_ids[:old].tobytes() == w.token_ids[:old].tobytes()
        assert c.logprobs[:old].tobytes() == w.logprobs[:old].tobytes()


def test_in_flight_in_place_needs_an_idle_engine() -> None:
    with engine() as gen:
        gen.submit([prompt(20)], Params(max_tokens=30, seed=1))
        gen.poll()
        with pytest.raises(rm.StateError, match="expected none before a sync in place, got 1"):
            gen._engine.sync_begin(2, in_place=True)
        sync(gen, DENSE, 2, mode="inplace")  # waits
        output = gen.poll(1)[0]
        assert set(output.outputs[0].versions.tolist()) == {1}


# ------------------------------------------------------------------------------------- not finite
BAD = 77  # a token whose embedding is not finite: every K row made from it is NaN


@BOTH
@pytest.mark.parametrize("value", [np.inf, np.nan], ids=str)
def test_nonfinite_a_bad_row_ends_its_request_alone(config: helpers.Config, value: float) -> None:
    """Bad tokens in prompts (at a page's start, inside, last) and generated ones; the other
    requests are bit-identical to those of an engine without bad requests."""
    weights = dict(WEIGHTS[id(config), 1])
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["model.embed_tokens.weight"][BAD] = value
    good = [[t if t != BAD else 1 for t in prompt(20 + 3 * i, i)] for i in range(5)]
    params = [
        Params(n=2, max_tokens=20, seed=i, prompt_logprobs=0, temperature=0.5) for i in range(5)
    ]

    def poisoned(length: int, at: int) -> list[int]:
        ids = [t if t != BAD else 1 for t in prompt(length, 9)]
        return [*ids[:at], BAD, *ids[at + 1 :]]

    with engine(config, version=None) as gen:
        gen.sync_weights(weights, version=1, allow_nonfinite=True)
        want = [gen.generate(x, p, use_tqdm=False)[0] for x, p in zip(good, params)]
        if any(BAD in c.token_ids for output in want for c in output.outputs):
            pytest.fail("the seeds of this test draw the bad token; choose others")
        bad = [poisoned(40, 0), poisoned(40, 16), poisoned(40, 21), poisoned(33, 32)]
        for attempt in range(
            2
            # Again: a cached poisoned page would be served now.
        ):
            mixed = [x for pair in zip(good, [*bad, bad[1]]) for x in pair]
            outputs = gen.generate(
                mixed, [p for p in params for _ in range(2)], use_tqdm=False, on_error="return"
            )
            for i, output in enumerate(outputs):
                if i % 2 == 0:
                    assert arrays(output) == arrays(want[i // 2]), (attempt, i)
                    continue
                assert isinstance(output.error, rm.NumericsError)
                at = mixed[i].index(BAD)
                assert f"position {at}:" in str(output.error)
                assert all(
                    c.finish_reason == "error" and len(c.token_ids) == 0 for c in output.outputs
                )
        assert at_rest(gen)


def test_nonfinite_a_generated_bad_token_keeps_what_came_before() -> None:
    """Some of 60 samples draw the bad token: the next step on it fails, and the token and all
    before it stay readable."""
    weights = dict(WEIGHTS[id(DENSE), 1])
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["model.embed_tokens.weight"][BAD] = np.nan
    with engine(version=None) as gen:
        gen.sync_weights(weights, version=1, allow_nonfinite=True)
        found = 0
        for seed in range(60):
            output = gen.generate(
                prompt(5, 3), Params(max_tokens=40, seed=seed), use_tqdm=False, on_error="return"
            )[0]
            c = output.outputs[0]
            if output.error is None:
                assert BAD not in c.token_ids[:-1]
                continue
            found += 1
            assert c.finish_reason == "error"
            assert c.token_ids[-1] == BAD
            assert BAD not in c.token_ids[:-1]
            assert np.isfinite(c.logprobs).all()
        assert found > 3
        assert at_rest(gen)


@pytest.mark.parametrize("rows", [[5], list(range(151))], ids=["one", "all"])
def test_nonfinite_logits_that_are_not_finite(rows: list[int]) -> None:
    """Every request fails at its first token (all -inf included); after a valid sync all requests
    succeed."""
    weights = dict(WEIGHTS[id(DENSE), 1])
    weights["lm_head.weight"] = weights["lm_head.weight"].copy()
    weights["lm_head.weight"][rows] = -np.inf
    with engine(version=None) as gen:
        gen.sync_weights(weights, version=1, allow_nonfinite=True)
        outputs = gen.generate(
            [prompt(5), prompt(40)], Params(n=2, max_tokens=4), use_tqdm=False, on_error="return"
        )
        for output in outputs:
            assert isinstance(output.error, rm.NumericsError)
            assert "logits" in str(output.error)
            assert all(len(c.token_ids) == 0 for c in output.outputs)
        with pytest.raises(rm.NumericsError):
            gen.score([prompt(5)])
        sync(gen, DENSE, 2)
        assert gen.generate(prompt(5), Params(max_tokens=4), use_tqdm=False)[0].error is None
        assert at_rest(gen)


# ------------------------------------------------------------------------- anything, in any order
@BOTH
@pytest.mark.parametrize("trial", range(4))
def test_any_order_of_calls(config: helpers.Config, trial: int, rng: np.random.Generator) -> None:
    """300 random calls (add, step, abort, pause, KV sleep, cache reset) on few pages. Finished
    requests equal `solo`, aborted requests are a prefix of it, and at the end all pages and
    requests are released."""
    stem = prompt(60, 50)
    asked: dict[int, tuple[list[int], Params]] = {}
    done: dict[int, rm.RequestOutput] = {}
    options = {
        "pages": int(rng.integers(10, 40)),
        "max_num_seqs": int(rng.integers(1, 9)),
        "max_num_batched_tokens": int(rng.integers(1, 80)),
    }
    aborted: set[int] = set()
    with engine(config, **options, enable_prefix_caching=bool(rng.integers(4))) as gen:
        for _ in range(300):
            choice = rng.random()
            if choice < 0.1 and len(asked) < 25:
                ids = [
                    *stem[: rng.integers(0, 60)],
                    *prompt(int(rng.integers(1, 40)), int(rng.integers(99))),
                ]
                n, seed = int(rng.integers(1, 5)), int(rng.integers(2**40))
                records = {
                    "prompt_logprobs": [None, 0, 2][rng.integers(3)],
                    "logprobs": [None, 2][rng.integers(2)],
                }
                if rng.integers(2):
                    records |= {"top_k": 9, "top_p": 0.9, "kept_tokens": True}
                params = Params(n=n, seed=seed, max_tokens=int(rng.integers(1, 40)), **records)
                asked[gen.submit([ids], params)[0]] = (ids, params)
            elif choice < 0.12 and asked:
                victim = int(rng.choice(list(asked)))
                if victim not in done:
                    aborted.add(victim)
                    gen.abort(victim)
            elif choice < 0.14:
                gen.reset_prefix_cache()
            elif choice < 0.15:
                gen.sleep("kv")
                gen.wake("kv")
            elif choice < 0.17:
                gen.pause("keep")
                ended = {output.request_id: output for output in gen.poll()}
                assert ended.keys() <= aborted
                done |= ended
                gen.resume()
            else:
                done |= {output.request_id: output for output in gen.poll()}
        done |= {output.request_id: output for output in gen.poll(len(asked) - len(done))}
        assert at_rest(gen)
    assert done.keys() == asked.keys()
    with engine(config, enable_prefix_caching=False) as plain:
        for request, (ids, params) in asked.items():
            want, got = plain.generate(ids, params, use_tqdm=False)[0], done[request]
            if request not in aborted:
                assert arrays(got) == arrays(want)
                continue
            for c, w in zip(got.outputs, want.outputs):
                n = len(c.token_ids)
                assert c.token_ids.tobytes() == w.token_ids[:n].tobytes()
                assert c.logprobs.tobytes() == w.logprobs[:n].tobytes()
