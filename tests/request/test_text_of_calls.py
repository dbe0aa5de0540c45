"""A sample has one text, whichever call returns it and whatever else runs.

Input: rollouts of a tiny random model whose tokens are bytes, some words and a special token, so
that many texts have invalid bytes. Oracle: Detokenizer over prompt and tokens.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from itertools import pairwise
from typing import Any

import pytest
from helpers import SMALL, numpy_state_dict, tiny_config

import rollmesh as rm
from rollmesh.grpo.rollout import text_of
from rollmesh.request.text import Detokenizer, TextCodec

pytest.importorskip("tokenizers")

from test_detokenizer import byte_level, llama

KINDS = {"byte_level": byte_level(), "llama": llama()}
PROMPTS: list[Any] = ["is red", "x\u20ac", [5, 6, 7, 8, 9], [3]]
FREE: dict[str, Any] = {"n": 3, "max_tokens": 24, "ignore_eos": True}
ENDS = [*range(20, 40)]
PARAMS = [
    rm.SamplingParams(**FREE, seed=1),
    rm.SamplingParams(**FREE, seed=2, skip_special_tokens=False),
    rm.SamplingParams(**FREE, seed=3, stop=["never"]),
    rm.SamplingParams(**FREE, seed=4, stop=["\x10", "red", "Z"], min_tokens=2),
    rm.SamplingParams(**FREE, seed=4, stop=["B", "red", "Z"], include_stop_str_in_output=True),
    rm.SamplingParams(**FREE, seed=5, stop_token_ids=ENDS, include_stop_str_in_output=True),
    rm.SamplingParams(**FREE, seed=6, stop_token_ids=ENDS),
]
ASKED = [(prompt, params) for prompt in PROMPTS for params in PARAMS]
WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "chunks": {"max_num_batched_tokens": 7, "threads": 2},
    "preempted": {"kv_cache_gib": 7.5 * 2 * 2 * 16 * 48 * 4 / 2**30},
    "dp 2": {"mesh": rm.Mesh(dp=2)},
}


def make(kind: str, **options: Any) -> rm.Generator:
    tokenizer = KINDS[kind]
    config = tiny_config(vocab_size=tokenizer.get_vocab_size() + 5)
    settings = {"dtype": "float32", "tokenizer": tokenizer, **SMALL, **options}
    generator = rm.Generator(rm.ModelSpec.from_hf(config), **settings)
    generator.sync_weights(numpy_state_dict(config, 0, "float32", False), version=1)
    return generator


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def texts(outputs: list[rm.RequestOutput]) -> list[tuple[Any, ...]]:
    samples = [sample for output in outputs for sample in output.outputs]
    return [(s.text, s.token_ids.tolist(), s.finish_reason, s.stop_reason) for s in samples]


def check(codec: TextCodec, params: rm.SamplingParams, output: rm.RequestOutput) -> None:
    """Checks that each text is that of the tokens, and that a stop string occurs in the last token
    only."""
    for sample in output.outputs:
        keeps = params.include_stop_str_in_output
        detokenizer = Detokenizer(
            codec,
            output.prompt_token_ids.tolist(),
            stops=params.stop or (),
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
            keeps_stop=keeps,
        )
        tokens = sample.token_ids.tolist()
        if isinstance(sample.stop_reason, int) and not keeps:
            tokens.pop()
        stop = [sample.stop_reason] if isinstance(sample.stop_reason, str) else []
        found = [detokenizer.push(token) for token in tokens]
        assert [*filter(None, found)] == [*filter(None, found[-1:])] == stop
        assert sample.text == detokenizer.text


async def streams(gen: rm.Generator) -> list[list[rm.RequestOutput]]:
    async def one(prompt: Any, params: rm.SamplingParams) -> list[rm.RequestOutput]:
        return [output async for output in gen.astream(prompt, params)]

    return list(await asyncio.gather(*(one(*each) for each in ASKED)))


def test_every_call_gives_the_same_text(kind: str) -> None:
    with make(kind) as gen:
        want = gen.generate(*map(list, zip(*ASKED, strict=True)), use_tqdm=False)
        for (_, params), output in zip(ASKED, want, strict=True):
            check(TextCodec(KINDS[kind]), params, output)
        ids = gen.submit(*map(list, zip(*ASKED, strict=True)))
        polled = {output.request_id: output for output in gen.poll(len(ids))}
        assert texts([polled[request] for request in ids]) == texts(want)
        streamed = asyncio.run(streams(gen))
    assert texts([outputs[-1] for outputs in streamed]) == texts(want)
    reasons = {type(reason) for _, _, _, reason in texts(want)}
    assert reasons == {type(None), int, str}
    for outputs in streamed:
        for samples in zip(*(output.outputs for output in outputs), strict=True):
            seen = [sample.text for sample in samples]
            assert all(b.startswith(a) for a, b in pairwise(seen))


@pytest.mark.parametrize("way", WAYS)
def test_the_batch_and_the_mesh_change_no_text(kind: str, way: str) -> None:
    with make(kind) as alone:
        each = [alone.generate([prompt], params, use_tqdm=False) for prompt, params in ASKED]
    want = [text for outputs in each for text in texts(outputs)]
    with make(kind, **WAYS[way]) as gen:
        assert texts(gen.generate(*map(list, zip(*ASKED, strict=True)), use_tqdm=False)) == want
        assert (gen.metrics()["preemptions"] > 0) == (way == "preempted")


@pytest.mark.parametrize("inflight", ["keep", "restart", "abort"])
def test_a_sync_between_changes_no_text(kind: str, inflight: Any) -> None:
    config = tiny_config(vocab_size=KINDS[kind].get_vocab_size() + 5)
    other = numpy_state_dict(config, 1, "float32", False)
    with make(kind) as gen:
        gen.submit(*map(list, zip(*ASKED[:7], strict=True)))
        for _ in range(9):
            gen.poll()
        gen.sync_weights(other, version=2, inflight=inflight)
        outputs = sorted(gen.poll(7), key=lambda output: output.request_id)
    for (_, params), output in zip(ASKED, outputs, strict=False):
        check(TextCodec(KINDS[kind]), params, output)


def test_a_reward_judges_the_text_of_the_generator(kind: str) -> None:
    """The text contains special tokens and the space of the first token."""
    params = rm.SamplingParams(**FREE, seed=7, skip_special_tokens=False)
    with make(kind) as gen:
        for prompt in PROMPTS:
            [output] = gen.generate([prompt], params, use_tqdm=False)
            for sample in output.outputs:
                assert text_of(KINDS[kind], output.prompt_token_ids.tolist(), sample) == sample.text


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes a user without processes")
def test_a_generator_where_the_system_gives_no_thread() -> None:
    """Raises CapacityError; a generator that was made before still works."""
    code = """
        import asyncio, os, resource
        import rollmesh as rm
        from helpers import SMALL, numpy_state_dict, tiny_config

        def make():
            return rm.Generator(rm.ModelSpec.from_hf(tiny_config()), dtype="float32", **SMALL)

        gen = make()
        gen.sync_weights(numpy_state_dict(tiny_config(), 0, "float32", False))
        os.setgid(65534)
        os.setuid(65534)
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        try:
            make()
        except rm.CapacityError as error:
            print(error)
        params = rm.SamplingParams(max_tokens=3, ignore_eos=True)
        print(len(gen.generate([1], params)[0].outputs[0].token_ids))
        print(len(asyncio.run(gen.agenerate([1], params)).outputs[0].token_ids))
    """
    path = os.pathsep.join(sys.path)
    run = [sys.executable, "-c", textwrap.dedent(code)]
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(run, capture_output=True, text=True, env=env)
    lines = done.stdout.splitlines()
    assert lines[-2:] == ["3", "3"], done.stderr
    assert len(lines) == 3
    assert "a generator: expected another thread, got none" in lines[0]
