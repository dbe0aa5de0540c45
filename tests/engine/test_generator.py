"""The generator's API on tiny models: the outputs, their order, and the effect of each call on the
others. The oracle is the engine itself (score, other batches, other generators); test_parity.py
tests whether the numbers are right."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from helpers import numpy_state_dict, parameter_shapes, prompts, tiny_config, tiny_spec

import rollmesh as rm

STATES = [numpy_state_dict(tiny_config(), seed=seed) for seed in (0, 1)]
VOCAB = tiny_config()["vocab_size"]


def make(moe: bool = False, **options: Any) -> rm.Generator:
    settings = {
        "dtype": "float32",
        "threads": 1,
        "kv_cache_gib": 0.004,
        "max_model_len": 256,
        **options,
    }
    return rm.Generator(tiny_spec(moe), **settings)


@pytest.fixture
def gen() -> Iterator[rm.Generator]:
    with make() as generator:
        generator.sync_weights(STATES[0], version=1)
        yield generator


def word_tokenizer() -> Any:
    """A real tokenizer with one token per letter and digit pair: every id of the vocabulary decodes
    to text."""
    from tokenizers import Tokenizer, decoders, models

    words = [chr(ord("a") + i) for i in range(26)] + [f"{i:02d}." for i in range(VOCAB - 26)]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    made.decoder = decoders.Fuse()
    return made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


def same(a: rm.CompletionOutput, b: rm.CompletionOutput) -> bool:
    return all(
        getattr(a, name).tobytes() == getattr(b, name).tobytes()
        for name in ("token_ids", "logprobs", "sampling_logprobs")
    ) and (
        a.finish_reason,
        a.stop_reason,
    ) == (b.finish_reason, b.stop_reason)


def sequence(output: rm.RequestOutput, index: int = 0) -> np.ndarray:
    return np.concatenate([output.prompt_token_ids, output.outputs[index].token_ids])


# -------------------------------------------------------------------------- before the first sync
def test_nothing_serves_before_the_first_sync() -> None:
    with make() as generator:
        assert generator.version is None
        for call in (
            lambda: generator.generate([1]),
            lambda: generator.score([[1, 2]]),
            lambda: generator.logits([[1]]),
        ):
            with pytest.raises(rm.NotSyncedError):
                call()
        with pytest.raises(rm.NotSyncedError):
            generator.submit([1])
        generator.sync_weights(STATES[0], version=5)
        assert generator.version == 5
        assert len(generator.generate([1], use_tqdm=False)[0].outputs[0].token_ids) == 16


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_manifest_is_the_checkpoint(moe: bool, dtype: str) -> None:
    with make(moe, dtype=dtype) as generator:
        manifest = generator.manifest()
    required = {name: info.shape for name, info in manifest.items() if info.required}
    assert required == parameter_shapes(tiny_config(moe))
    optional = {name for name, info in manifest.items() if not info.required}
    assert all("expert_bias" in name or "e_score_correction_bias" in name for name in optional)
    assert {info.dtype for name, info in manifest.items() if name in required} == {dtype}


BAD_SETTINGS: list[dict[str, Any]] = [
    {"device": "gpu"},
    {"dtype": "float16"},
    {"dtype": np.float32},
    {"comm": ...},
    {"mesh": 2},
    {"ep_backend": "deepep"},
    {"ep_backend": "nccl"},
    {"sequence_parallel": 1},
    {"max_model_len": 0},
    {"max_num_seqs": 0},
    {"max_num_batched_tokens": 0},
    {"block_size": 8},
    {"block_size": 24},
    {"kv_cache_gib": 0.0},
    {"threads": 0},
    {"threads": 1.5},
    {"seed": -1},
    {"seed": 2**64},
    {"isa": "z80"},
    {"isa": 3},
    {"eos_token_ids": [VOCAB]},
    {"eos_token_ids": -1},
    {"tokenizer": 3},
]


@pytest.mark.parametrize("settings", BAD_SETTINGS, ids=str)
def test_bad_settings_are_config_errors(settings: dict[str, Any]) -> None:
    with pytest.raises(rm.ConfigError) as caught:
        make(**settings)
    assert next(iter(settings)) in str(caught.value)


@pytest.mark.parametrize(
    "backend", ["disabled", "local_allreduce", "allgather_reducescatter", "alltoall"]
)
def test_backends_that_have_no_effect_on_one_rank(backend: str) -> None:
    with make(
        ep_backend=backend, sequence_parallel=True, mesh=rm.Mesh(tp=1, dp=1, ep=1)
    ) as generator:
        assert generator.mesh.world == 1


# ---------------------------------------------------------------------------------------- outputs
@pytest.mark.parametrize("moe", [False, True])
def test_every_field_of_an_output(moe: bool) -> None:
    config = tiny_config(moe)
    with make(moe) as generator:
        generator.sync_weights(numpy_state_dict(config), version=4)
        prompt = prompts(config, [21])[0]
        params = rm.SamplingParams(
            n=3, max_tokens=9, temperature=0.8, top_p=0.9, seed=11, logprobs=4, prompt_logprobs=2
        )
        output = generator.generate(prompt, params, use_tqdm=False)[0]
        assert output.finished
        assert output.error is None
        assert output.prompt is None
        assert output.prompt_token_ids.tolist() == prompt
        assert output.prompt_token_ids.dtype == np.int32
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs.tobytes() == generator.score([prompt])[0].tobytes()
        assert output.prompt_top_logprobs is not None
        assert (
            output.prompt_top_logprobs.ids.shape
            == output.prompt_top_logprobs.logprobs.shape
            == (20, 2)
        )
        times = output.metrics
        assert times is not None
        assert (
            0
            < times.queued_ts
            <= times.scheduled_ts
            < times.first_token_ts
            < times.last_token_ts
            <= time.monotonic()
        )
        assert [sample.index for sample in output.outputs] == [0, 1, 2]
        for sample in output.outputs:
            n = len(sample.token_ids)
            assert n == 9
            for array in (
                sample.token_ids,
                sample.logprobs,
                sample.sampling_logprobs,
                sample.versions,
            ):
                assert array.shape == (n,)
            dtypes = (
                sample.token_ids.dtype,
                sample.logprobs.dtype,
                sample.sampling_logprobs.dtype,
                sample.versions.dtype,
            )
            assert dtypes == (np.int32, np.float32, np.float32, np.int64)
            assert sample.text == ""
            assert (sample.finish_reason, sample.stop_reason) == ("length", None)
            assert sample.cumulative_logprob == np.sum(sample.logprobs, dtype=np.float64)
            assert sample.versions.tolist() == [4] * n
            assert sample.contract == rm.Contract("x86", 1, "float32", (4,))
            assert np.all(sample.sampling_logprobs >= sample.logprobs - 20)
            top = sample.top_logprobs
            assert top is not None
            assert top.ids.shape == top.logprobs.shape == (n, 4)
            assert np.all(np.diff(top.logprobs, axis=1) <= 0)
            for i, token in enumerate(sample.token_ids):
                if token in top.ids[i]:
                    assert top.logprobs[i][top.ids[i].tolist().index(token)] == sample.logprobs[i]
            if not moe:
                assert sample.routed_experts is None
                continue
            routed = sample.routed_experts
            assert routed is not None
            assert routed.shape == (21 + n - 1, 2, 2)
            assert routed.dtype == np.int16
            assert routed.min() >= 0
            assert routed.max() < 8
            assert np.all(routed[..., 0] != routed[..., 1])


def test_times_of_requests_that_wait_restart_and_end_early() -> None:
    config = tiny_config(False)
    with make(False, max_num_seqs=1) as generator:
        generator.sync_weights(numpy_state_dict(config))
        ids = generator.submit(
            prompts(config, [5, 5, 5]), rm.SamplingParams(max_tokens=6, ignore_eos=True)
        )
        for _ in range(3):
            assert generator.poll() == []
        before = time.monotonic()
        generator.sync_weights(numpy_state_dict(config), inflight="restart")
        generator.abort(ids[2])
        first, second, aborted = (
            output.metrics
            for output in sorted(generator.poll(3), key=lambda output: output.request_id)
        )
        assert first is not None and second is not None and aborted is not None  # noqa: PT018
        assert (
            first.queued_ts
            < before
            < first.scheduled_ts
            < first.first_token_ts
            < first.last_token_ts
        )
        assert first.last_token_ts <= second.scheduled_ts < second.first_token_ts
        assert second.queued_ts < before
        assert (aborted.scheduled_ts, aborted.first_token_ts, aborted.last_token_ts) == (
            0.0,
            0.0,
            0.0,
        )


def test_score_of_short_sequences_and_its_refusals(gen: rm.Generator) -> None:
    scores = gen.score([[3], [3, 4]])
    assert [score.shape for score in scores] == [(0,), (1,)]
    assert gen.score([]) == gen.logits([]) == []
    with pytest.raises(rm.RequestError, match="min_tokens"):
        gen.score([[3, 4]], rm.SamplingParams(min_tokens=1))
    with pytest.raises(rm.RequestError):
        gen.score([[3, 4]], [rm.SamplingParams()] * 2)
    excluded = gen.score([[3, 4]], rm.SamplingParams(top_k=1))[0]
    assert excluded[0] in (0.0, -np.inf)


def test_outputs_come_in_the_order_of_the_prompts(gen: rm.Generator) -> None:
    lengths = [30, 1, 12, 3, 25, 7]
    params = [
        rm.SamplingParams(max_tokens=max_tokens, temperature=0.0)
        for max_tokens in (1, 20, 3, 14, 2, 9)
    ]
    many = prompts(tiny_config(), lengths)
    outputs = gen.generate(many, params, use_tqdm=False)
    assert [output.prompt_token_ids.tolist() for output in outputs] == many
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 20, 3, 14, 2, 9]


def test_all_spellings_of_a_prompt(gen: rm.Generator) -> None:
    params = rm.SamplingParams(temperature=0.0)
    want = gen.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0]
    forms: list[Any] = [[5, 6, 7], (5, 6, 7), np.array([5, 6, 7]), [(5, 6, 7)]]
    forms += [np.array([[5, 6, 7]], np.int16), [np.array([5, 6, 7], np.uint8)]]
    for form in forms:
        outputs = gen.generate(form, params, use_tqdm=False)
        assert len(outputs) == 1
        assert same(outputs[0].outputs[0], want)
    assert gen.generate([], params, use_tqdm=False) == []


# ------------------------------------------------------------------------------------------ seeds


def test_requests_without_a_seed_follow_the_engines() -> None:
    def run(seed: int) -> list[bytes]:
        with make(seed=seed) as generator:
            generator.sync_weights(STATES[0])
            first = generator.generate([[1, 2, 3]] * 3, use_tqdm=False) + generator.generate(
                [[1, 2, 3]], use_tqdm=False
            )
            return [output.outputs[0].token_ids.tobytes() for output in first]

    assert run(5) == run(5)
    assert run(5) != run(6)
    assert len(set(run(5))) == 4


# ------------------------------------------------------------------------------------------- ends


def cut(texts: Sequence[str], stops: Sequence[str], min_tokens: int) -> tuple[int, str, str] | None:
    """Returns the oracle: the token and the preceding text after which a stop string first occurs
    in the joined texts, and that string."""
    for n in range(min_tokens + 1, len(texts) + 1):
        text, before = "".join(texts[:n]), "".join(texts[: n - 1])
        found = [
            (at, stop)
            for stop in stops
            for at in [text.find(stop, max(0, len(before) - len(stop) + 1))]
            if at >= 0
        ]
        if found:
            at, stop = min(found, key=lambda pair: pair[0])
            return n, text[:at], stop
    return None


@pytest.mark.parametrize("min_tokens", [0, 12])
def test_stop_strings(tokenizer: Any, min_tokens: int) -> None:
    """Keeps the tokens up to the one that completes the string, and the text up to the string;
    strings may cross token borders."""
    with make(tokenizer=tokenizer) as generator:
        generator.sync_weights(STATES[0])
        free = generator.generate(
            ["abc"], rm.SamplingParams(max_tokens=60, seed=5, n=6), use_tqdm=False
        )[0]
        assert free.prompt == "abc"
        stops = ["1.3", "4.8", ".9", "77.", "2.0", "e", "nowhere"]
        params = rm.SamplingParams(max_tokens=60, seed=5, n=6, stop=stops, min_tokens=min_tokens)
        outputs = generator.generate(["abc"], params, use_tqdm=False)[0].outputs
        seen = set()
        for plain, stopped in zip(free.outputs, outputs, strict=True):
            texts = [tokenizer.decode([token]) for token in plain.token_ids.tolist()]
            assert plain.text == "".join(texts)
            want = cut(texts, stops, min_tokens)
            if want is None:
                assert same(plain, stopped)
                continue
            n, text, stop = want
            seen.add(stop)
            assert stopped.token_ids.tolist() == plain.token_ids[:n].tolist()
            assert stopped.logprobs.tobytes() == plain.logprobs[:n].tobytes()
            assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (
                text,
                "stop",
                stop,
            )
        assert len(seen) >= 2


def test_a_stop_string_in_the_last_token_counts(tokenizer: Any) -> None:
    with make(tokenizer=tokenizer) as generator:
        generator.sync_weights(STATES[0])
        free = generator.generate(["abc"], rm.SamplingParams(max_tokens=6, seed=5), use_tqdm=False)[
            0
        ].outputs[0]
        last = tokenizer.decode(free.token_ids[-1:].tolist())
        assert last not in tokenizer.decode(free.token_ids[:-1].tolist())
        stopped = generator.generate(
            ["abc"], rm.SamplingParams(max_tokens=6, seed=5, stop=last), use_tqdm=False
        )[0].outputs[0]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", last)
        assert stopped.token_ids.tolist() == free.token_ids.tolist()
        assert stopped.text == free.text[: -len(last)]


def test_incremental_text_of_a_byte_level_tokenizer() -> None:
    """Input: characters of up to four bytes, each byte a token. Oracle: all tokens decoded at
    once."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from rollmesh.request.text import Detokenizer, TextCodec

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoders.ByteLevel(),
    )
    codec = TextCodec(made)
    for text in ("plain", "é€𝄞 mixed 漢字 end", "𝄞" * 30, "a\ufffdb"):
        ids = codec.encode(text)
        detokenizer = Detokenizer(codec, [], stops=["never"])
        assert [detokenizer.push(token) for token in ids] == [None] * len(ids)
        assert detokenizer.text == text
        for at in range(1, len(text)):
            detokenizer = Detokenizer(codec, [], stops=[text[at]])
            found = [stop for stop in map(detokenizer.push, ids) if stop]
            assert found[0] == text[at]
            break
    detokenizer = Detokenizer(codec, [], stops=["never"])
    for token in codec.encode("𝄞")[:2] * 20:  # single tokens do not complete a character
        assert (detokenizer.push(token), detokenizer.text) == (None, "")
    detokenizer.push(codec.encode("a")[0])
    assert detokenizer.text == "\ufffd" * 20 + "a"


def test_incremental_text_of_a_decoder_that_looks_left() -> None:
    """Metaspace drops the space of the first token only: a token's text depends on the one before
    it."""
    from tokenizers import Tokenizer, decoders, models

    from rollmesh.request.text import Detokenizer, TextCodec

    words = ["▁one", "▁two", "▁three", "s", "▁"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="s"))
    made.decoder = decoders.Metaspace()
    codec = TextCodec(made)
    ids = [0, 1, 3, 2, 4, 4, 1, 3, 3]
    detokenizer = Detokenizer(codec, [], stops=["never"])
    for n, token in enumerate(ids, 1):
        assert detokenizer.push(token) is None
        assert detokenizer.text == codec.decode(ids[:n])
    detokenizer = Detokenizer(codec, [], stops=["s t"])
    assert [detokenizer.push(token) for token in ids[:4]] == [None, None, None, "s t"]
    assert detokenizer.text == "one two"


def test_a_real_text_prompt_and_the_hugging_face_tokenizer(tokenizer: Any) -> None:
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="z")
    with make(tokenizer=fast) as generator, make(tokenizer=tokenizer, eos_token_ids=25) as plain:
        assert generator.eos_token_ids == plain.eos_token_ids == (25,)
        for each in (generator, plain):
            each.sync_weights(STATES[0])
        params = rm.SamplingParams(max_tokens=30, seed=5)
        a, b = (
            generator.generate("q", params, use_tqdm=False)[0],
            plain.generate("q", params, use_tqdm=False)[0],
        )
        assert same(a.outputs[0], b.outputs[0])
        assert a.prompt == "q"
        assert a.prompt_token_ids.tolist() == [16]


# ---------------------------------------------------------------------------- submit, poll, abort
def drain(generator: rm.Generator) -> list[rm.RequestOutput]:
    outputs = []
    while generator.metrics()["waiting"] + generator.metrics()["running"]:
        outputs += generator.poll()
    return outputs + generator.poll()


def test_submit_and_poll_give_what_generate_gives(gen: rm.Generator) -> None:
    many = prompts(tiny_config(), [3, 30, 8])
    params = [rm.SamplingParams(max_tokens=n, seed=n) for n in (20, 2, 9)]
    want = gen.generate(many, params, use_tqdm=False)
    ids = gen.submit(many, params)
    assert len(set(ids)) == 3
    # This steps the other requests too.
    inside = gen.generate([[1]], rm.SamplingParams(max_tokens=3), use_tqdm=False)
    assert len(inside) == 1
    got = {output.request_id: output for output in drain(gen)}
    assert sorted(got) == sorted(ids)
    for request, output in zip(ids, want, strict=True):
        assert same(got[request].outputs[0], output.outputs[0])
    assert gen.poll() == []
    ids = gen.submit(many, params)
    assert [output.request_id for output in gen.poll(min_outputs=1)] == [ids[1]]
    assert [output.request_id for output in gen.poll(min_outputs=99)] == [ids[0], ids[2]]


def test_abort_keeps_what_was_generated(gen: rm.Generator) -> None:
    full = gen.generate([1, 2], rm.SamplingParams(max_tokens=50, seed=1), use_tqdm=False)[
        0
    ].outputs[0]
    first, second = gen.submit([[1, 2], [1, 2]], rm.SamplingParams(max_tokens=50, seed=1))
    for _ in range(8):
        gen.poll()
    gen.abort(first)
    gen.abort([first, 10**9])  # finished or unknown ids have no effect
    done = {output.request_id: output.outputs[0] for output in drain(gen)}
    assert done[first].finish_reason == "abort"
    assert 0 < len(done[first].token_ids) < 50
    assert done[first].token_ids.tolist() == full.token_ids[: len(done[first].token_ids)].tolist()
    assert same(done[second], full)


# ----------------------------------------------------------------------------------- pause, sleep
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pause_modes(gen: rm.Generator, mode: Any) -> None:
    params = rm.SamplingParams(max_tokens=30, seed=1)
    full = gen.generate([1, 2], params, use_tqdm=False)[0].outputs[0]
    gen.submit([[1, 2]], params)
    for _ in range(4):
        gen.poll()
    gen.pause(mode)
    assert gen.metrics()["paused"]
    outputs = gen.poll()
    with pytest.raises(rm.StateError, match="paused"):
        gen.generate([1], use_tqdm=False)
    if mode == "keep":
        assert outputs == gen.poll(min_outputs=1) == []
        gen.resume()
        outputs = gen.poll(min_outputs=1)
    (output,) = outputs
    if mode == "abort":
        assert output.outputs[0].finish_reason == "abort"
        assert len(output.outputs[0].token_ids) == 4
    else:
        assert same(output.outputs[0], full)
    gen.resume()
    assert not gen.metrics()["paused"]
    assert same(gen.generate([1, 2], params, use_tqdm=False)[0].outputs[0], full)
    with pytest.raises(rm.ConfigError):
        gen.pause("now")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pause_from_another_thread(gen: rm.Generator, mode: Any) -> None:
    params = rm.SamplingParams(max_tokens=200, seed=1)
    full = gen.generate([[1, 2]] * 8, params, use_tqdm=False)
    results: list[rm.RequestOutput] = []
    thread = threading.Thread(
        target=lambda: results.extend(gen.generate([[1, 2]] * 8, params, use_tqdm=False))
    )
    steps = gen.metrics()["steps"]
    thread.start()
    while gen.metrics()["steps"] < steps + 5:
        time.sleep(0.001)
    gen.pause(mode)
    if mode == "keep":
        before = gen.metrics()["steps"]
        time.sleep(0.1)
        assert thread.is_alive()
        assert gen.metrics()["steps"] == before
        gen.resume()
    thread.join(30)
    assert not thread.is_alive()
    if mode == "abort":
        assert all(output.outputs[0].finish_reason == "abort" for output in results)
    else:
        assert all(same(a.outputs[0], b.outputs[0]) for a, b in zip(results, full, strict=True))


def test_sleep_and_wake_by_part(gen: rm.Generator) -> None:
    params = rm.SamplingParams(max_tokens=20, seed=1)
    full = gen.generate([1, 2], params, use_tqdm=False)[0].outputs[0]
    gen.submit([[1, 2]], params)
    for _ in range(5):
        gen.poll()
    gen.sleep("kv")
    assert gen.metrics()["asleep"] == ["kv"]
    assert gen.version == 1
    with pytest.raises(rm.StateError, match="kv asleep"):
        gen.generate([1], use_tqdm=False)
    gen.wake("kv")
    (output,) = gen.poll(min_outputs=1)
    assert same(output.outputs[0], full)  # recomputed, the same bits
    gen.sleep()
    assert gen.metrics()["asleep"] == ["weights", "kv"]
    assert gen.version is None
    gen.wake(["weights"])
    gen.wake("kv")
    with pytest.raises(rm.NotSyncedError):
        gen.generate([1], use_tqdm=False)
    with pytest.raises(rm.VersionError):
        gen.sync_weights(STATES[0], version=1)
    gen.sync_weights(STATES[0])
    assert same(gen.generate([1, 2], params, use_tqdm=False)[0].outputs[0], full)
    for parts in ("head", [], ["kv", "x"]):
        with pytest.raises(rm.ConfigError):
            gen.sleep(parts)


def test_vllms_names_of_sleep_and_wake(gen: rm.Generator) -> None:
    params = rm.SamplingParams(max_tokens=5, seed=1)
    full = gen.generate([1, 2], params, use_tqdm=False)[0].outputs[0]
    gen.sleep(level=1)
    assert gen.metrics()["asleep"] == ["weights", "kv"]
    gen.wake_up(tags=["weights", "kv_cache"])
    assert same(gen.generate([1, 2], params, use_tqdm=False)[0].outputs[0], full)
    gen.sleep(level=2)
    gen.wake_up(tags="kv_cache")
    assert gen.metrics()["asleep"] == ["weights"]
    gen.wake_up()
    with pytest.raises(rm.NotSyncedError):
        gen.generate([1], use_tqdm=False)
    for wrong in (
        {"level": 0},
        {"level": True},
        {"level": "1"},
        {"level": 1, "keep_weights": True},
        {"level": 2, "parts": "kv"},
    ):
        with pytest.raises(rm.ConfigError, match="level: expected 1 or 2"):
            gen.sleep(**wrong)  # type: ignore[arg-type]
    for tags in (5, ["kv_cache", "weights", "kv"], [None], "scheduling"):
        with pytest.raises(rm.ConfigError, match="expected 'weights', 'kv' or both"):
            gen.wake_up(tags)  # type: ignore[arg-type]


def test_logprobs_in_vllms_form(gen: rm.Generator) -> None:
    params = rm.SamplingParams(
        max_tokens=30, seed=3, temperature=3.0, logprobs=50, prompt_logprobs=2, ignore_eos=True
    )
    (output,) = gen.generate([[5, 6, 7]], params, use_tqdm=False)
    sample, tokens, top = (
        output.outputs[0],
        output.outputs[0].token_ids.tolist(),
        output.outputs[0].top_logprobs,
    )
    assert top is not None
    forms = sample.vllm_logprobs()
    assert [next(iter(form)) for form in forms] == tokens
    assert (
        sum(form[token].logprob for form, token in zip(forms, tokens, strict=True))
        == sample.cumulative_logprob
    )
    for form, token, ids, values in zip(forms, tokens, top.ids, top.logprobs, strict=True):
        assert set(form) == {token, *ids.tolist()}
        assert [form[i].rank for i in ids.tolist()] == list(range(1, 51))
        assert [form[i].logprob for i in ids.tolist()] == values.tolist()
        assert token in ids.tolist() or form[token].rank is None
    # Both kinds were drawn.
    assert {form[token].rank is None for form, token in zip(forms, tokens, strict=True)} == {
        True,
        False,
    }
    prompt = output.vllm_prompt_logprobs()
    assert prompt is not None
    assert prompt[0] is None
    assert [next(iter(form)) for form in prompt[1:] if form] == [6, 7]
    (plain,) = gen.generate([[5]], rm.SamplingParams(max_tokens=1), use_tqdm=False)
    assert plain.vllm_prompt_logprobs() is None
    assert plain.outputs[0].vllm_logprobs() == [
        {int(plain.outputs[0].token_ids[0]): rm.Logprob(float(plain.outputs[0].logprobs[0]), None)}
    ]


def test_metrics_count(gen: rm.Generator) -> None:
    gen.generate([list(range(40))] * 2, rm.SamplingParams(max_tokens=5, n=2), use_tqdm=False)
    metrics = gen.metrics()
    assert metrics["generated_tokens"] == 20
    assert metrics["prompt_tokens"] == 80
    assert metrics["running"] == metrics["waiting"] == 0
    assert metrics["version"] == 1
    assert (metrics["family"], metrics["threads"], metrics["paused"], metrics["asleep"]) == (
        "x86",
        1,
        False,
        [],
    )
    assert metrics["kv_usage"] == 0.0
    assert metrics["forward_seconds"] > 0


# ------------------------------------------------------------------------------------------ close
def test_close_is_final_and_idempotent() -> None:
    generator = make()
    with generator as same_one:
        assert same_one is generator
        generator.sync_weights(STATES[0])
        generator.submit([[1, 2]] * 3)
        sync = generator.begin_sync()
    generator.close()
    assert generator.version is None
    sync.abort()
    calls = [
        lambda: generator.generate([1]),
        lambda: generator.score([[1, 2]]),
        lambda: generator.submit([1]),
        generator.poll,
        generator.abort,
        generator.pause,
        generator.resume,
        generator.sleep,
        generator.wake,
        generator.reset_prefix_cache,
        generator.metrics,
        generator.manifest,
        generator.begin_sync,
        sync.commit,
        generator.__enter__,
        lambda: generator.sync_weights(STATES[0]),
    ]
    for call in calls:
        with pytest.raises(rm.StateError, match="closed"):
            call()
