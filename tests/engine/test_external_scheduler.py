"""An engine with a host's scheduler (csrc/scheduler/external_scheduler.h), without vLLM: the host
here decides at random.

Oracle: rm.Generator with the same weights, one for each version. A token equals the Generator's
draw after the same tokens, and its logprob equals the Generator's score, bit for bit, whatever the
chunks, the pages (shared, replaced, reused), the preemptions, the tokens that the host drops, and
the versions that come meanwhile without a reset of the prefix cache. A hybrid model has states too,
which the engine keeps for itself. Bound: bit equality."""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import helpers
import numpy as np
import pytest

import rollmesh as rm
from rollmesh import _core
from rollmesh.options import EngineOptions

PAGE, PAGES, MAX_LEN = 16, 24, 128
CONFIG = helpers.tiny_config(moe=True)
VERSIONS = 3
NOTHING = (None, None)


def asked(**changes: Any) -> Any:
    """Makes a request in the form that ext/engine/engine.c reads."""
    plain = {
        "n": 1, "max_tokens": 24, "min_tokens": 0, "temperature": 1.0, "top_p": 1.0, "min_p": 0.0,
        "top_k": -1, "has_seed": True, "seed": 7,
        "ignore_eos": False, "logprobs": 0, "prompt_logprobs": -1, "score": False,
        "score_sampling": False, "ranks": False,
        "external_draws": False, "kept_tokens": False, "repetition_penalty": 1.0,
        "frequency_penalty": 0.0, "presence_penalty": 0.0,
    }  # fmt: skip
    return types.SimpleNamespace(**{**plain, **changes})


HYBRID = "qwen3_5_moe_text"


@functools.cache
def hybrid() -> Any:
    """A model with delta nets, and weights of version 0."""
    pytest.importorskip("torch", reason="transformers makes the weights")
    models = importlib.import_module("family_models")
    return models.draw(HYBRID, 300, **models.cuttable(HYBRID))


def spec_of(model: str) -> rm.ModelSpec:
    return helpers.tiny_spec(moe=True) if model == "moe" else rm.ModelSpec.from_hf(hybrid().config)


def make_engine(model: str = "moe", **changes: Any) -> Any:
    options = {
        "dtype": "bfloat16", "isa": None, "threads": 2, "max_model_len": MAX_LEN, "max_num_seqs": 6,
        "max_num_batched_tokens": 32,
        "block_size": PAGE, "kv_bytes": 0, "seed": 0, "enable_prefix_caching": False,
        "eos_token_ids": np.zeros(0, np.int32), "tp": 1,
        "dp": 1, "ep": 1, "ep_backend": "alltoall", "sequence_parallel": False,
        "external_pages": PAGES,
    } | ({} if model == "moe" else {"dtype": "float32", "enable_prefix_caching": True})  # fmt: skip
    return _core.Engine(
        spec_of(model).engine_values(MAX_LEN), EngineOptions(**{**options, **changes})
    )


def weights(version: int, model: str = "moe") -> dict[str, np.ndarray]:
    if model == "moe":
        return helpers.numpy_state_dict(CONFIG, seed=version, dtype="bfloat16")
    shapes = {name: tuple(x.shape) for name, x in hybrid().state.items()}
    return {name: helpers.weight(name, shape, version) for name, shape in shapes.items()}


def push(engine: Any, version: int, model: str = "moe") -> None:
    engine.sync_begin(version)
    for name, tensor in weights(version, model).items():
        helpers.push_entry(engine, name, tensor)
    engine.sync_commit("keep")


def add(engine: Any, prompt: Any, **changes: Any) -> int:
    return int(
        engine.add(np.asarray(prompt, np.int32), np.zeros(0, np.int32), asked(**changes), None)
    )


def step(engine: Any, *parts: tuple[int, int, int, list[int], bool], logits: Any = NOTHING) -> Any:
    """parts: (number, computed, rows, pages, replace)."""
    ids, computed, rows, pages, replace = zip(*parts, strict=True) if parts else ((),) * 5
    results, num_rows = engine.external_step(
        np.array(ids, np.uint64),
        np.array(computed, np.int64),
        np.array(rows, np.int64),
        np.array(replace, np.uint8),
        np.array([len(each) for each in pages], np.int64),
        np.array([page for each in pages for page in each], np.int32),
        *logits,
    )
    return (*results, num_rows)


@pytest.fixture
def engine() -> Iterator[Any]:
    made = make_engine()
    push(made, 0)
    yield made
    made.close()


@pytest.fixture(scope="module")
def oracles(module_generator: Callable[..., Any]) -> list[Any]:
    """A generator of each version."""
    return [
        module_generator(CONFIG, weights=weights(version), dtype="bfloat16", max_model_len=MAX_LEN)
        for version in range(VERSIONS)
    ]


@pytest.fixture
def hybrid_engine() -> Iterator[Any]:
    """Checks at the end that all states are free."""
    made = make_engine("hybrid")
    push(made, 0, "hybrid")
    yield made
    stats = made.stats()
    assert stats["states_free"] == stats["states"] > 0
    made.close()


@pytest.fixture(scope="module")
def hybrid_oracles() -> Iterator[list[Any]]:
    made = []
    for version in range(VERSIONS):
        oracle = rm.Generator(
            spec_of("hybrid"), dtype="float32", max_model_len=MAX_LEN, kv_cache_gib=0.02, threads=2
        )
        oracle.sync_weights(weights(version, "hybrid"))
        made.append(oracle)
    yield made
    for oracle in made:
        oracle.close()


class Host:
    """A host with requests, pages and a prefix cache, which schedules some requests in each
    step."""

    def __init__(self, engine: Any, rng: np.random.Generator):
        self.engine, self.rng = engine, rng
        self.free, self.held = list(range(PAGES)), dict[int, list[int]]()  # request → pages
        self.users = dict.fromkeys(range(PAGES), 0)
        # All tokens up to the end of a full page → the page.
        self.cached: dict[tuple[int, ...], int] = {}
        self.tokens, self.computed, self.prompts = (
            dict[int, list[int]](),
            dict[int, int](),
            dict[int, int](),
        )
        # request → (token, logprob, version) of each drawn token
        self.drawn: dict[int, list[tuple[int, float, int]]] = {}
        self.resumed: set[int] = set()
        self.version = 0

    def add(self, prompt: list[int], **changes: Any) -> None:
        number = add(self.engine, prompt, **changes)
        self.tokens[number], self.prompts[number], self.drawn[number] = (
            list(prompt),
            len(prompt),
            [],
        )

    def release(self, number: int) -> None:
        """Releases the request's pages; cached pages stay until they are needed."""
        for page in self.held.pop(number, []):
            self.users[page] -= 1
            if not self.users[page]:
                self.free.append(page)

    def take(self) -> int | None:
        if not self.free:
            return None
        page = self.free.pop(0)
        self.cached = {key: kept for key, kept in self.cached.items() if kept != page}
        return page

    def start(self, number: int) -> list[int]:
        """Starts with the cached pages of its prefix; the last token is always computed."""
        tokens, pages = self.tokens[number], list[int]()
        while (len(pages) + 1) * PAGE < len(tokens) and tuple(
            tokens[: (len(pages) + 1) * PAGE]
        ) in self.cached:
            pages.append(self.cached[tuple(tokens[: (len(pages) + 1) * PAGE])])
        for page in pages:
            if not self.users[page]:
                self.free.remove(page)
            self.users[page] += 1
        self.held[number], self.computed[number] = list(pages), len(pages) * PAGE
        return pages

    def preempt(self, number: int) -> None:
        self.release(number)
        self.engine.external_preempt(number)
        self.resumed.add(number)
        # A token that the host drops is drawn again.
        if self.rng.random() < 0.3 and self.drawn[number]:
            self.drawn[number].pop()
            self.tokens[number].pop()
            self.engine.external_tokens(
                number, np.array(self.tokens[number][self.prompts[number] :], np.int32)
            )

    def part(self, number: int) -> tuple[int, int, int, list[int], bool] | None:
        replace = number not in self.held
        pages = self.start(number) if replace else []
        left = len(self.tokens[number]) - self.computed[number]
        rows = left if self.rng.random() < 0.6 else int(self.rng.integers(1, left + 1))
        while len(self.held[number]) * PAGE < self.computed[number] + rows:
            if (page := self.take()) is None:
                self.preempt(number)
                return None
            self.users[page] += 1
            self.held[number].append(page)
            pages.append(page)
        part = number, self.computed[number], rows, pages, replace or number in self.resumed
        self.resumed.discard(number)
        self.computed[number] += rows
        # Pages are registered immediately, like in vLLM: a later part of this step may hit them.
        for end in range(PAGE, self.computed[number] + 1, PAGE):
            self.cached.setdefault(
                tuple(self.tokens[number][:end]), self.held[number][end // PAGE - 1]
            )
        return part

    def step(self) -> None:
        order = [number for number in self.tokens if self.rng.random() < 0.8][:6]
        for number in [
            number for number in self.held if number not in order and self.rng.random() < 0.2
        ]:
            self.preempt(number)
        for number in [number for number in self.held if number not in order]:
            if len(set(self.held) | set(order)) > 6:
                self.preempt(number)
        parts = [part for number in order if (part := self.part(number)) is not None]
        tokens, logprobs, *_ = step(self.engine, *parts)
        for (number, *_), token, logprob in zip(
            parts, tokens.tolist(), logprobs.tolist(), strict=True
        ):
            assert (token >= 0) == (self.computed[number] == len(self.tokens[number]))
            if token >= 0:
                self.tokens[number].append(token)
                self.drawn[number].append((token, logprob, self.version))
        for number in [
            number
            for number, drawn in self.drawn.items()
            if len(drawn) == 24 and number in self.tokens
        ]:
            self.release(number)
            self.engine.abort(number)
            self.engine.release(number)
            del self.tokens[number]


def prompts_of(rng: np.random.Generator) -> list[list[int]]:
    """Makes prompts, some with common beginnings."""
    stem = rng.integers(2, 150, size=40).tolist()
    return [
        stem[: int(rng.integers(0, 41))]
        + rng.integers(2, 150, size=int(rng.integers(1, 40))).tolist()
        for _ in range(10)
    ]


def served(
    engine: Any,
    rng: np.random.Generator,
    prompts: list[list[int]],
    pushes: tuple[int, ...] = (),
    model: str = "moe",
) -> Host:
    """Returns a host that has served all prompts, each with its number as seed. pushes: the steps
    after which the next version comes."""
    host, steps = Host(engine, rng), 0
    for seed, prompt in enumerate(prompts):
        host.add(prompt, seed=seed)
    while host.tokens:
        host.step()
        steps += 1
        if steps in pushes:
            host.version += 1
            push(engine, host.version, model)
        assert steps < 4000
    return host


MODELS = pytest.mark.parametrize("case, model", [
    *((case, "moe") for case in range(8)), *((case, "hybrid") for case in range(8))
])  # fmt: skip


def parts_of(model: str, request: pytest.FixtureRequest) -> tuple[Any, list[Any]]:
    prefix = "" if model == "moe" else "hybrid_"
    return request.getfixturevalue(f"{prefix}engine"), request.getfixturevalue(f"{prefix}oracles")


@MODELS
def test_a_host_by_dice_gets_the_tokens_of_a_generator(
    case: int, model: str, request: pytest.FixtureRequest, rng: np.random.Generator
) -> None:
    engine, oracles = parts_of(model, request)
    prompts = prompts_of(rng)
    host = served(engine, rng, prompts)
    for seed, (prompt, drawn) in enumerate(zip(prompts, host.drawn.values(), strict=True)):
        wanted = (
            oracles[0]
            .generate([prompt], rm.SamplingParams(max_tokens=24, seed=seed), use_tqdm=False)[0]
            .outputs[0]
        )
        assert [token for token, _, _ in drawn] == list(wanted.token_ids)
        assert (
            np.array([logprob for _, logprob, _ in drawn], np.float32).tobytes()
            == wanted.logprobs.tobytes()
        )


@MODELS
def test_new_versions_need_no_word_about_the_prefix_cache(
    case: int, model: str, request: pytest.FixtureRequest, rng: np.random.Generator
) -> None:
    engine, oracles = parts_of(model, request)
    prompts = prompts_of(rng)
    host = served(engine, rng, prompts, pushes=(15, 40), model=model)
    seen = set()
    for prompt, drawn in zip(prompts, host.drawn.values(), strict=True):
        tokens = prompt + [token for token, _, _ in drawn]
        scores = [oracle.score([tokens])[0][len(prompt) - 1 :] for oracle in oracles]
        for at, (_, logprob, version) in enumerate(drawn):
            assert np.float32(logprob).tobytes() == scores[version][at].tobytes(), (
                f"token {at} of version {version}"
            )
        seen |= {version for _, _, version in drawn}
    assert seen == {0, 1, 2}


def test_states_at_the_end_of_pages(hybrid_engine: Any, hybrid_oracles: list[Any]) -> None:
    """A request with cached pages computes only its own rows if the last page keeps a state, also
    if the pages are computed in the same step. Otherwise, and after a sleep or a failed request, it
    computes the rows of the pages again."""
    engine, prompt = hybrid_engine, list(range(2, 72))
    oracle = hybrid_oracles[0]
    wanted = oracle.generate([prompt], rm.SamplingParams(max_tokens=1, seed=7), use_tqdm=False)[0]
    [token], pages = wanted.outputs[0].token_ids.tolist(), [1, 2, 3, 4]
    first, second = add(engine, prompt[:20]), add(engine, prompt[:20])
    before = engine.stats()["steps"]
    tokens, *_, rows = step(engine, (first, 0, 20, [11, 12], True), (second, 16, 4, [11, 13], True))
    assert tokens[0] == tokens[1]
    assert rows == 24
    assert engine.stats()["steps"] - before == 2, "the second one waits for the state"
    for number in (first, second):
        engine.abort(number)
        engine.release(number)
    a, b, c, d, e = (add(engine, prompt) for _ in range(5))
    tokens, *_, rows = step(
        engine, (a, 0, 70, [*pages, 5], True), (b, 64, 6, [*pages, 6], True)
    )  # fmt: skip
    assert (tokens.tolist(), rows) == ([token] * 2, 76)
    tokens, *_, rows = step(engine, (c, 48, 22, [1, 2, 3, 7, 8], True))
    assert (tokens.tolist(), rows) == ([token], 70), "only the prompt's last full page keeps one"
    tokens, *_, rows = step(engine, (d, 64, 6, [*pages, 9], True))
    assert (tokens.tolist(), rows) == ([token], 6)
    engine.external_fail(a)
    tokens, *_, rows = step(engine, (e, 64, 6, [*pages, 10], True))
    assert (tokens.tolist(), rows) == ([token], 70)
    engine.external_preempt(e)
    engine.sleep(2)
    engine.wake(2)
    tokens, *_, rows = step(engine, (e, 64, 7, [*pages, 10], True))
    assert rows == 71
    for number in (a, b, c, d, e):
        engine.abort(number)
        engine.release(number)


def test_more_prefixes_than_states_to_spare(hybrid_oracles: list[Any]) -> None:
    """With one state more than requests, two prefixes cannot both be held while all requests save a
    state: some requests compute their prefix again."""
    engine, oracle = make_engine("hybrid", external_pages=8), hybrid_oracles[0]
    push(engine, 0, "hybrid")
    assert engine.stats()["states"] == 7
    prompts, wanted = [list(range(2, 22)), list(range(30, 50))], []
    for page, prompt in enumerate(prompts):
        [answer] = oracle.generate(
            [prompt], rm.SamplingParams(max_tokens=1, seed=7), use_tqdm=False
        )
        wanted.append(answer.outputs[0].token_ids.tolist()[0])
        number = add(engine, prompt)
        assert step(engine, (number, 0, 20, [page, 2], True))[0].tolist() == wanted[-1:]
        engine.abort(number)
        engine.release(number)
    parts = [(add(engine, prompts[i % 2]), 16, 4, [i % 2, 2 + i], True) for i in range(6)]
    tokens, *_, rows = step(engine, *parts)
    assert tokens.tolist() == wanted * 3
    assert rows > 24
    engine.close()


def test_kv_that_slept_is_made_again(engine: Any, oracles: list[Any]) -> None:
    prompt = list(range(2, 42))
    number = add(engine, prompt, seed=3)
    tokens = step(engine, (number, 0, 40, [1, 2, 3], True))[0].tolist()
    engine.sleep(2)
    with pytest.raises(rm.StateError, match="KV cache: expected awake, got asleep"):
        step(engine, (number, 40, 1, [], False))
    engine.wake(2)
    tokens += step(engine, (number, 40, 1, [], False))[0].tolist()
    assert step(engine, (number, 41, 1, [], False))[4] == 1, "what was made again counts"
    wanted = (
        oracles[0]
        .generate([prompt], rm.SamplingParams(max_tokens=2, seed=3), use_tqdm=False)[0]
        .outputs[0]
    )
    assert tokens == list(wanted.token_ids)


def test_records_of_a_prompt_are_of_one_version(engine: Any, oracles: list[Any]) -> None:
    """A version comes in the middle of a prompt that records logprobs, top logprobs and ranks."""
    prompt = np.random.default_rng(0).integers(2, 150, size=70).tolist()
    number = add(engine, prompt, prompt_logprobs=2, logprobs=2, ranks=True)
    step(engine, (number, 0, 40, [4, 9, 2], True))
    push(engine, 1)
    tokens, _, _, ranks, rows = step(engine, (number, 40, 30, [7, 8], False))
    assert rows == 70
    params = rm.SamplingParams(max_tokens=1, seed=7, prompt_logprobs=2, logprobs=2)
    wanted = oracles[1].generate([prompt], params, use_tqdm=False)[0]
    view, logits = engine.request(number), oracles[1].logits([prompt + tokens.tolist()])[0]
    assert tokens.tolist() == list(wanted.outputs[0].token_ids)
    assert view["prompt_logprobs"].tobytes() == wanted.prompt_logprobs.tobytes()
    assert view["prompt_top_ids"].tolist() == wanted.prompt_top_logprobs.ids.tolist()
    assert (
        engine.external_routed(number, 0).tolist() == wanted.outputs[0].routed_experts[:70].tolist()
    )
    counts = [
        int((row >= row[token]).sum())
        for row, token in zip(logits, [*prompt[1:], *tokens.tolist()])
    ]
    assert view["prompt_ranks"].tolist() == counts[: len(prompt) - 1]
    assert ranks.tolist() == counts[len(prompt) - 1 : len(prompt)]
    assert (
        engine.external_top(np.array([number], np.uint64), 2)[0].tolist()
        == wanted.outputs[0].top_logprobs.ids[:1].tolist()
    )


def test_ranks_of_samples_that_share_a_row(oracles: list[Any]) -> None:
    """The request is drawn without a host: the first tokens of a prompt's samples come from one row
    of logits, beside rows without ranks."""
    made = make_engine(external_pages=0, kv_bytes=1 << 22, seed=3)
    push(made, 0)
    prompt = list(range(9, 40))
    add(made, prompt[5:], max_tokens=6, temperature=2.0, seed=1)
    number = add(made, prompt, n=4, max_tokens=6, temperature=2.0, ranks=True)
    while made.unfinished():
        made.step()
    seen = set()
    for index in range(4):
        sample = made.sample(number, index)
        tokens = sample["token_ids"].tolist()
        logits = oracles[0].logits([prompt + tokens])[0][len(prompt) - 1 :]
        assert sample["ranks"].tolist() == [
            int((row >= row[token]).sum()) for row, token in zip(logits, tokens)
        ]
        seen.add(tokens[0])
    assert len(seen) > 1
    made.close()


def test_routing_of_a_shared_prompt_is_that_of_who_computed_it(
    engine: Any, oracles: list[Any]
) -> None:
    prompt = np.random.default_rng(1).integers(2, 150, size=40).tolist()
    first, second, third = (add(engine, prompt) for _ in range(3))
    # A hit within the batch.
    step(engine, (first, 0, 20, [1, 2], True), (second, 16, 8, [1, 4], True))
    step(
        engine,
        (first, 20, 20, [3], False),
        (second, 24, 16, [5], False),
        (third, 32, 8, [1, 2, 6], True),
    )
    wanted = (
        oracles[0]
        .generate([prompt], rm.SamplingParams(max_tokens=1), use_tqdm=False)[0]
        .outputs[0]
        .routed_experts
    )
    for number, cached in ((first, 0), (second, 16), (third, 32)):
        assert engine.external_routed(number, 0).tolist() == wanted.tolist()
        assert engine.external_routed(number, 7).tolist() == wanted[7:].tolist()
        assert engine.request(number)["num_cached_tokens"] == cached


# ----------------------------------------------------------------------- rows that the host edits
def test_the_host_edits_and_the_engine_draws(engine: Any, oracles: list[Any]) -> None:
    """Unedited logits give the engine's own draw; with banned tokens, the draw among the rest. The
    logprob is the model's."""
    prompt = list(range(5, 25))
    plain, edited = (
        add(engine, prompt, seed=11, temperature=0.8),
        add(engine, prompt, seed=11, temperature=0.8, external_draws=True, ranks=True),
    )
    logits, stats = np.empty((1, 151), np.float32), np.empty((1, 2), np.float32)
    drawn = step(
        engine, (plain, 0, 20, [1, 2], True), (edited, 0, 20, [3, 4], True), logits=(logits, stats)
    )
    assert drawn[0].tolist()[1] == -3
    assert logits.tobytes() == oracles[0].logits([prompt])[0][-1:].tobytes()
    same = engine.external_draw(np.array([edited], np.uint64), logits, stats, logits.copy())
    assert [column.tolist() for column in same[:3]] == [column[:1].tolist() for column in drawn[:3]]
    with pytest.raises(rm.StateError, match="expected logits that wait for a draw"):
        engine.external_draw(np.array([edited], np.uint64), logits, stats, logits.copy())
    step(engine, (edited, 20, 1, [], False), logits=(logits, stats))
    only = np.full_like(logits, -np.inf)
    only[0, [17, 90]] = 1.5
    token, logprob, sampling, rank = (
        column[0]
        for column in engine.external_draw(np.array([edited], np.uint64), logits, stats, only)
    )
    assert token in (17, 90)
    assert np.isclose(sampling, np.log(0.5), atol=1e-6)
    tokens = engine.sample(edited, 0)["token_ids"].tolist()
    assert np.float32(logprob).tobytes() == oracles[0].score([prompt + tokens])[0][-1:].tobytes()
    assert rank == (logits[0] >= logits[0, token]).sum()
    # At temperature 1 the two logprobs still come from two rows.
    hot = add(engine, prompt, seed=11, external_draws=True)
    step(engine, (hot, 0, 20, [5, 6], True), logits=(logits, stats))
    assert np.isclose(
        engine.external_draw(np.array([hot], np.uint64), logits, stats, only)[2][0],
        np.log(0.5),
        atol=1e-6,
    )


def test_the_host_draws_for_several_requests(engine: Any, oracles: list[Any]) -> None:
    """Each request has the logprob that the model gives its token."""
    prompts = [[5, 6, 7], [40, 41, 42], [90, 91, 92]]
    numbers = [add(engine, ids, seed=11, external_draws=True) for ids in prompts]
    logits, stats = np.empty((3, 151), np.float32), np.empty((3, 2), np.float32)
    rows = [(number, 0, 3, [1 + i], True) for i, number in enumerate(numbers)]
    step(engine, *rows, logits=(logits, stats))
    tokens, logprobs, *_ = engine.external_draw(
        np.array(numbers, np.uint64), logits, stats, logits.copy()
    )
    for i, ids in enumerate(prompts):
        want = oracles[0].score([[*ids, int(tokens[i])]])[0][-1:]
        assert logprobs[i : i + 1].tobytes() == want.tobytes()


@pytest.mark.parametrize("spoiled", [slice(None), 0, 77, 150])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_edited_row_that_is_not_finite_ends_its_request(
    engine: Any, spoiled: Any, temperature: float
) -> None:
    number, other = (
        add(engine, [5, 6, 7], external_draws=True, temperature=temperature) for _ in range(2)
    )
    logits, stats = np.empty((2, 151), np.float32), np.empty((2, 2), np.float32)
    step(engine, (number, 0, 3, [1], True), (other, 0, 3, [2], True), logits=(logits, stats))
    edited = logits.copy()
    edited[0, spoiled] = np.nan
    tokens = engine.external_draw(np.array([number, other], np.uint64), logits, stats, edited)[
        0
    ].tolist()
    assert tokens[0] == -2
    assert tokens[1] >= 0
    assert isinstance(engine.request(number)["error"], rm.NumericsError)
    assert step(
        engine, (number, 3, 1, [], False), (other, 3, 1, [], False), logits=(logits, stats)
    )[0].tolist() == [-2, -3]


def test_a_row_of_nothing_is_not_drawn(engine: Any) -> None:
    for temperature in (0.0, 1.0):
        number = add(engine, [5, 6, 7], external_draws=True, temperature=temperature)
        logits, stats = np.empty((1, 151), np.float32), np.empty((1, 2), np.float32)
        step(engine, (number, 0, 3, [1], True), logits=(logits, stats))
        drawn = engine.external_draw(
            np.array([number], np.uint64), logits, stats, np.full_like(logits, -np.inf)
        )
        assert drawn[0].tolist() == [-2]


# ------------------------------------------------------------------------ pages that were not fed
def test_pages_of_who_was_not_fed_hold_nothing(engine: Any, oracles: list[Any]) -> None:
    """The pages belong to another prompt of the serving version, but the host assumes that their
    owner was computed. The host says so (forget), or passes them to a request that has ended."""
    old, prompt = list(range(2, 42)), list(range(60, 100))
    wanted = (
        oracles[0]
        .generate([prompt], rm.SamplingParams(max_tokens=1, seed=7), use_tqdm=False)[0]
        .outputs[0]
        .logprobs.tolist()
    )
    first = add(engine, old)
    step(engine, (first, 0, 40, [1, 2, 3], True))
    engine.external_invalidate_pages(np.array([1, 2, 999, -5], np.int32))
    second = add(engine, prompt)
    assert step(engine, (second, 32, 8, [1, 2, 4], True))[1].tolist() == wanted
    third, fourth = add(engine, old), add(engine, prompt)
    step(engine, (third, 0, 16, [5], True))
    engine.external_fail(third)
    drawn = step(engine, (third, 16, 24, [3, 4], False), (fourth, 32, 8, [3, 4, 6], True))
    assert drawn[0].tolist()[0] == -2
    assert drawn[1].tolist()[1:] == wanted
    fifth = add(engine, old[:16] + prompt[:2])
    again = (
        oracles[0]
        .generate([old[:16] + prompt[:2]], rm.SamplingParams(max_tokens=1, seed=7), use_tqdm=False)[
            0
        ]
        .outputs[0]
    )
    *_, rows = result = step(engine, (fifth, 16, 2, [5, 7], True))
    assert (result[0][0], rows) == (again.token_ids[0], 18), (
        "what a request that failed has left is fed again"
    )


def test_all_generated_tokens_dropped(engine: Any, oracles: list[Any]) -> None:
    """The records of the prompt come from the version that draws the first token again."""
    prompt = np.random.default_rng(2).integers(2, 150, size=20).tolist()
    number = add(engine, prompt, prompt_logprobs=0)
    step(engine, (number, 0, 20, [1, 2], True))
    push(engine, 1)
    engine.external_preempt(number)
    engine.external_tokens(number, np.zeros(0, np.int32))
    step(engine, (number, 16, 4, [1, 3], True))
    wanted = oracles[1].generate(
        [prompt], rm.SamplingParams(max_tokens=1, seed=7, prompt_logprobs=0), use_tqdm=False
    )[0]
    view = engine.request(number)
    assert view["prompt_logprobs"].tobytes() == wanted.prompt_logprobs.tobytes()
    assert engine.external_routed(number, 0).tolist() == wanted.outputs[0].routed_experts.tolist()
    assert engine.sample(number, 0)["token_ids"].tolist() == list(wanted.outputs[0].token_ids)


# ---------------------------------------------------------------------------------------- refused
@pytest.mark.parametrize(
    ("part", "words"),
    [
        ((1, 0, 6, [1], True), "at most its 5 tokens"),
        ((1, -1, 2, [1], True), "-1 computed"),
        ((1, 0, 0, [1], True), "and 0 rows"),
        ((1, 0, 5, [], True), "got 0 of"),
        ((1, 0, 5, [PAGES], True), f"expected pages 0 to {PAGES - 1}, got {PAGES}"),
        ((1, 0, 5, [-1], True), "expected pages 0 to .*, got -1"),
        ((1, 0, 5, list(range(9)), True), "got 9 of"),
        ((77, 0, 5, [1], True), "request 77: expected one that was added"),
    ],
)
def test_a_part_that_breaks_a_rule(part: Any, words: str, engine: Any) -> None:
    """The call changes nothing, including the parts before the bad part."""
    number, other = add(engine, [5, 6, 7, 8, 9]), add(engine, [5, 6, 7, 8, 9])
    assert number == 1
    with pytest.raises(rm.RequestError, match=words):
        step(engine, (other, 0, 5, [3], True), part)
    assert engine.stats()["rows"] == 0
    tokens = step(engine, (number, 0, 5, [1], True), (other, 0, 5, [3], True))[0].tolist()
    assert tokens[0] == tokens[1] >= 0


def test_other_refusals(engine: Any, tiny_generator: Callable[..., Any]) -> None:
    number = add(engine, [5, 6, 7], max_tokens=1)
    with pytest.raises(rm.RequestError, match="expected one part in a step, got two"):
        step(engine, (number, 0, 3, [1], True), (number, 0, 3, [2], True))
    with pytest.raises(rm.RequestError, match="max_num_seqs: expected at most 6 requests at once"):
        step(engine, *((add(engine, [5]), 0, 1, [page], True) for page in range(7)))
    drawing = add(engine, [5], external_draws=True)
    with pytest.raises(rm.RequestError, match="logits: expected room for 1 requests"):
        step(engine, (drawing, 0, 1, [1], True))
    with pytest.raises(rm.StateError, match="external scheduler: expected external_step"):
        engine.step()
    with pytest.raises(rm.RequestError, match="expected a generation with n=1"):
        add(engine, [5], n=2)
    with pytest.raises(rm.RequestError, match="expected a generation with n=1"):
        add(engine, [5], score=True)
    with pytest.raises(rm.RequestError, match="expected at most its 0 generated tokens"):
        engine.external_tokens(number, np.array([3], np.int32))
    columns = (
        np.zeros(1, np.int64),
        np.zeros(1, np.int64),
        np.zeros(1, np.uint8),
        np.array([2]),
        np.zeros(1, np.int32),
    )
    with pytest.raises(rm.ShapeError, match="page_counts"):
        engine.external_step(np.array([number], np.uint64), *columns, *NOTHING)
    first = step(engine, (number, 0, 3, [1], True))[0]
    assert first[0] >= 0
    step(engine, (number, 3, 1, [], False))  # one more than requested, if the host is late
    with pytest.raises(rm.RequestError, match="expected at most 2 generated tokens"):
        step(engine, (number, 4, 1, [], False))
    with pytest.raises(rm.RequestError, match="expected generated token"):
        engine.external_tokens(number, np.array([int(first[0]) + 1], np.int32))
    own = tiny_generator(CONFIG)._engine
    with pytest.raises(rm.StateError, match="schedules its own requests"):
        step(own)
    with pytest.raises(rm.RequestError, match="expected an engine with an external scheduler"):
        add(own, [5], external_draws=True)
    with pytest.raises(
        rm.RequestError, match="expected draws of the engine, got external_draws=True"
    ):
        add(engine, [5], external_draws=True, kept_tokens=True, top_k=3)
    with pytest.raises(
        rm.RequestError,
        match="external scheduler: expected no penalties, logit_bias, bad_words or banned tokens",
    ):
        add(engine, [5], presence_penalty=0.5)
    with pytest.raises(rm.RequestError, match="penalties and bad_words: expected none in a score"):
        add(own, [5, 6], score=True, repetition_penalty=2.0)
    with pytest.raises(rm.RequestError, match=r"frequency_penalty: expected a number in .*, got 3"):
        add(own, [5, 6], frequency_penalty=3.0)
    with pytest.raises(rm.RequestError, match="kept_tokens=True: expected no penalties"):
        add(own, [5, 6], presence_penalty=0.5, kept_tokens=True, top_k=3)
    with pytest.raises(rm.RequestError, match="expected a generation, got a score"):
        add(own, [5, 6], score=True, kept_tokens=True, top_k=3)
    with pytest.raises(rm.RequestError, match="expected min_tokens=0, got 1"):
        add(own, [5, 6], min_tokens=1, kept_tokens=True, top_k=3)
    with pytest.raises(rm.ConfigError, match="one rank in each process"):
        make_engine(tp=2)


def test_without_weights_nothing_is_taken() -> None:
    engine = make_engine()
    with pytest.raises(rm.NotSyncedError):
        add(engine, [5])
    with pytest.raises(rm.NotSyncedError):
        step(engine)
    engine.close()


def test_a_failed_request_leaves_no_page_to_others(engine: Any, oracles: list[Any]) -> None:
    """The weights give NaN for one token's row; requests that share its pages but not the token are
    not affected."""
    poisoned = weights(1)
    embed = poisoned["model.embed_tokens.weight"].copy()
    embed[77] = np.nan
    engine.sync_begin(1, allow_nonfinite=True)
    for name, tensor in {**poisoned, "model.embed_tokens.weight": embed}.items():
        helpers.push_entry(engine, name, tensor)
    engine.sync_commit("keep")
    stem = list(range(80, 112))
    bad, good = add(engine, [*stem, 77, 5]), add(engine, [*stem, 6, 5])
    tokens = step(engine, (bad, 0, 34, [1, 2, 3], True), (good, 32, 2, [1, 2, 4], True))[0].tolist()
    assert tokens[0] == -2
    assert isinstance(engine.request(bad)["error"], rm.NumericsError)
    wanted = (
        oracles[1]
        .generate([[*stem, 6, 5]], rm.SamplingParams(max_tokens=2, seed=7), use_tqdm=False)[0]
        .outputs[0]
    )
    tokens = tokens[1:] + step(engine, (good, 34, 1, [], False))[0].tolist()
    assert tokens == list(wanted.token_ids)
    third = add(engine, [*stem, 6, 5])
    assert step(engine, (third, 32, 2, [1, 2, 5], True))[0].tolist() == tokens[:1]
    full = [*stem, 77, *range(5, 20)]  # the bad row is in a page that the host may share
    first, second = add(engine, [*full, 9]), add(engine, [*full, 10])
    assert step(engine, (first, 0, 49, [8, 9, 10, 11], True))[0].tolist() == [-2]
    assert step(engine, (second, 48, 1, [8, 9, 10, 12], True))[0].tolist() == [-2], (
        "its zeros are nobody's KV"
    )
