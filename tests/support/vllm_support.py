"""Shared by the tests of rollmesh under a real vLLM engine: the environment, small models in vLLM's
format, and the oracle.

A request is a prompt and a dict of sampling settings whose names vLLM and rollmesh share, so that
one description makes the SamplingParams of both. The oracle is rm.Generator with the same weights.
Answers of both are converted to one form (Answer) in which every float is stored as its 32 bits. A
Generator does not return ranks, so they are counted in its logits. So `agree` compares bit for bit.

vLLM is imported by engine() only: these tests skip where it is not installed, and importing it
costs seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest

import rollmesh as rm
from rollmesh.model.families import FAMILIES

os.environ.setdefault("VLLM_PLUGINS", "rollmesh")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")

HAS_VLLM = importlib.util.find_spec("vllm") is not None

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 96,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
CASES = {
    "dense": helpers.Case("dense", helpers.tiny_config(False, **SIZES, intermediate_size=160)),
    "moe": helpers.Case(
        "moe",
        helpers.tiny_config(
            True, **SIZES, num_experts=24, num_experts_per_tok=3, intermediate_size=160
        ),
    ),
    "hybrid": helpers.Case(
        "hybrid",
        {
            **SIZES, "model_type": "qwen3_5_moe_text", "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "partial_rotary_factor": 0.5, "num_hidden_layers": 4, "full_attention_interval": 2,
            "layer_types": ["linear_attention", "full_attention"] * 2, "attention_bias": False,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24,
            "linear_value_head_dim": 20, "linear_conv_kernel_dim": 4, "num_experts": 8,
            "num_experts_per_tok": 3, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
    ),
}  # fmt: skip
ARCHITECTURES = {name: family.architecture for name, family in FAMILIES.items()}
MAX_MODEL_LEN = 128
Settings = Mapping[str, Any]
Weights = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    settings: Settings

    @property
    def ours(self) -> rm.SamplingParams:
        return rm.SamplingParams(**self.settings)

    @property
    def theirs(self) -> Any:
        from vllm import SamplingParams

        return SamplingParams(**self.settings, detokenize=False)


def request(prompt: Iterable[int], **settings: Any) -> Request:
    """Makes a request that always has a seed, because a sample that cannot be repeated has no
    oracle. The stop tokens of the model are not used."""
    settings = {"seed": 0, "logprobs": 0, "max_tokens": 8, "ignore_eos": True} | settings
    return Request(tuple(int(token) for token in prompt), settings)


# ---------------------------------------------------------------------------------------- answers
Position = dict[int, tuple[int, int]]  # token → bits of its logprob, its rank


def bits(values: Any) -> list[int]:
    """float32 values (that vLLM holds as doubles) as the integers of their bits."""
    exact = np.asarray(values, np.float64)
    single = exact.astype(np.float32)
    assert np.array_equal(single, exact, equal_nan=True), "a logprob is no float32"
    words: list[int] = np.atleast_1d(single).view(np.uint32).tolist()
    return words


@dataclasses.dataclass
class Answer:
    """One sample, or, at index −1, a request's prompt."""

    index: int
    tokens: list[int]
    end: tuple[str | None, int | str | None]
    positions: list[Position]

    def __len__(self) -> int:
        return len(self.tokens) + sum(map(len, self.positions))


def vllm_position(position: Any) -> Position:
    tokens = list(position)
    words = bits([position[token].logprob for token in tokens])
    return {token: (word, position[token].rank) for token, word in zip(tokens, words, strict=True)}


def vllm_answers(output: Any) -> list[Answer]:
    """Returns the answers of a vllm.RequestOutput."""
    answers = []
    if output.prompt_logprobs is not None:
        assert output.prompt_logprobs[0] is None
        positions = [vllm_position(position) for position in output.prompt_logprobs[1:]]
        answers.append(Answer(-1, list(output.prompt_token_ids), (None, None), positions))
    for sample in sorted(output.outputs, key=lambda sample: sample.index):
        positions = [vllm_position(position) for position in sample.logprobs or ()]
        answers.append(
            Answer(
                sample.index,
                list(sample.token_ids),
                (sample.finish_reason, sample.stop_reason),
                positions,
            )
        )
    return answers


def our_positions(tokens: Any, logprobs: Any, top: Any, logits: Any) -> list[Position]:
    """Makes the positions of `tokens` drawn from (or found at) the rows of `logits`; ranks count
    from 1, like vLLM's."""
    # Counts equal values too, like vLLM.
    ranks = (logits >= np.take_along_axis(logits, np.asarray(tokens, np.int64)[:, None], 1)).sum(1)
    positions = []
    for i, word in enumerate(bits(logprobs)):
        position = {int(tokens[i]): (word, int(ranks[i]))}
        if top is not None:
            position |= {
                int(t): (w, 1 + rank)
                for rank, (t, w) in enumerate(zip(top.ids[i], bits(top.logprobs[i]), strict=True))
            }
        positions.append(position)
    return positions


class Oracle:
    """rm.Generator as the oracle of a vLLM engine. `processed`: its logprobs are those of the
    distribution drawn from."""

    def __init__(self, model: str, dtype: str, processed: bool = False):
        self.case, self.processed = CASES[model], processed
        self.generator = rm.Generator(
            rm.ModelSpec.from_hf(self.case.config),
            dtype=dtype,
            max_model_len=MAX_MODEL_LEN,
            kv_cache_gib=0.02,
            threads=1,
        )

    def serve(self, weights: Weights) -> None:
        self.generator.sync_weights(weights)

    def answers(self, requests: Sequence[Request]) -> list[list[Answer]]:
        outputs = self.generator.generate(
            [list(r.prompt) for r in requests], [r.ours for r in requests], use_tqdm=False
        )
        return [self._answers(r, output) for r, output in zip(requests, outputs, strict=True)]

    def _answers(self, request: Request, output: rm.RequestOutput) -> list[Answer]:
        prompt = list(request.prompt)
        answers = []
        texts = [prompt + sample.token_ids.tolist() for sample in output.outputs]
        logits = self.generator.logits(texts)
        if output.prompt_logprobs is not None:
            positions = our_positions(
                prompt[1:],
                output.prompt_logprobs,
                output.prompt_top_logprobs,
                logits[0][: len(prompt) - 1],
            )
            answers.append(Answer(-1, prompt, (None, None), positions))
        for sample, rows in zip(output.outputs, logits, strict=True):
            tokens = sample.token_ids.tolist()
            logprobs = sample.sampling_logprobs if self.processed else sample.logprobs
            positions = our_positions(
                tokens, logprobs, sample.top_logprobs, rows[len(prompt) - 1 : -1]
            )
            if request.settings["logprobs"] is None:
                positions = []
            answers.append(
                Answer(sample.index, tokens, (sample.finish_reason, sample.stop_reason), positions)
            )
        return answers

    def close(self) -> None:
        self.generator.close()


def agree(got: Sequence[Sequence[Answer]], want: Sequence[Sequence[Answer]]) -> int:
    """Raises an AssertionError with the first difference; else returns how many tokens and values
    were compared."""
    assert len(got) == len(want), f"{len(got)} outputs, wanted {len(want)}"
    for i, (some, others) in enumerate(zip(got, want, strict=True)):
        assert [a.index for a in some] == [a.index for a in others], (
            f"request {i} has other samples"
        )
        for a, b in zip(some, others, strict=True):
            where = f"request {i}, " + ("its prompt" if a.index < 0 else f"sample {a.index}")
            assert a.tokens == b.tokens, f"{where}: tokens {a.tokens}, wanted {b.tokens}"
            assert a.end == b.end, f"{where}: ended by {a.end}, wanted {b.end}"
            assert len(a.positions) == len(b.positions), (
                f"{where}: logprobs of {len(a.positions)} tokens, wanted {len(b.positions)}"
            )
            for at, (p, q) in enumerate(zip(a.positions, b.positions, strict=True)):
                assert p == q, f"{where}, position {at}: (bits, rank) by token {p}, wanted {q}"
    return sum(len(a) for answers in want for a in answers)


# -------------------------------------------------------------------------------- models, engines
def weights_of(model: str, dtype: str, seed: int = 0) -> Weights:
    """Makes the weights of a version: another seed changes all values."""
    shapes = hybrid_shapes() if model == "hybrid" else None
    return helpers.numpy_state_dict(CASES[model].config, seed, dtype, shapes=shapes)


@functools.cache
def hybrid_shapes() -> dict[str, tuple[int, ...]]:
    fields = dict(CASES["hybrid"].config)
    family = fields.pop("model_type")
    state = importlib.import_module("family_models").draw(family, 0, **fields).state
    return {name: tuple(x.shape) for name, x in state.items()}


def folder(at: Path, model: str) -> str:
    """A folder with a stock config.json and nothing else."""
    config = CASES[model].config
    path = at / model
    path.mkdir(parents=True, exist_ok=True)
    stock = {
        "hidden_act": "silu",
        **config,
        "architectures": config.get("architectures") or [ARCHITECTURES[config["model_type"]]],
        "dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(stock))
    return str(path)


def options(at: Path, model: str, dtype: str, **changes: Any) -> dict[str, Any]:
    """Options of LLM, AsyncEngineArgs and similar classes: steps of at most 32 tokens and 6
    sequences, so that long prompts are processed in chunks."""
    return {
        "model": folder(at, model),
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 32,
        "block_size": 16,
        "kv_cache_memory_bytes": 1 << 22,
        "seed": 0,
        "disable_log_stats": True,
        "max_logprobs": -1,
        "weight_transfer_config": {"backend": "rollmesh"},
    } | changes


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Variables that vLLM reads when an engine starts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def engine(
    at: Path, model: str, dtype: str, v2: bool = False, processes: bool = False, **changes: Any
) -> Iterator[Any]:
    """vllm.LLM, in this process unless `processes`. v2: the protocol of resumption that vLLM uses
    on GPUs."""
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
        "VLLM_USE_V2_MODEL_RUNNER": str(int(v2)),
        "CUDA_VISIBLE_DEVICES": "",
    }
    with environment(**variables), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm import LLM

        chosen = options(at, model, dtype, **changes)
        if isinstance(chosen["weight_transfer_config"], dict):
            from vllm.config import WeightTransferConfig

            chosen["weight_transfer_config"] = WeightTransferConfig(
                **chosen["weight_transfer_config"]
            )
        try:
            llm = LLM(**chosen)
        except Exception:  # vLLM keeps its process groups, and the next engine may need others
            from vllm.distributed import parallel_state

            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
            raise
        try:
            assert llm.llm_engine.vllm_config.use_v2_model_runner == v2
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


def worker_of(llm: Any) -> Any:
    """rollmesh's worker in an engine of this process."""
    return llm.llm_engine.model_executor.driver_worker.worker


def load(llm: Any, weights: Weights) -> None:
    """Loads one parameter a call, like TRL and verl. The set closes at the next step."""
    import torch

    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    for name, value in weights.items():
        tensor = (
            torch.from_numpy(value.view(np.uint16)).view(torch.bfloat16)
            if value.dtype.itemsize == 2
            else torch.from_numpy(value)
        )
        model.load_weights([(name, tensor)])


def generate(llm: Any, requests: Sequence[Request]) -> list[list[Answer]]:
    prompts = [{"prompt_token_ids": list(r.prompt)} for r in requests]
    return [
        vllm_answers(output)
        for output in llm.generate(prompts, [r.theirs for r in requests], use_tqdm=False)
    ]


class Trace:
    """Records what vLLM's scheduler sends to the worker of an engine in this process. Tests that
    need chunks, hits or preemptions assert them with it."""

    def __init__(self, llm: Any):
        self.worker, self.seen = worker_of(llm), set[str]()
        self.steps = self.chunks = self.hits = self.preempted = self.resumed = 0

    def __enter__(self) -> Trace:
        run = self.worker.execute_model

        def execute_model(scheduled: Any) -> Any:
            self._look(scheduled)
            return run(scheduled)

        self.worker.execute_model = execute_model
        return self

    def __exit__(self, *_: Any) -> None:
        del self.worker.execute_model

    def _look(self, scheduled: Any) -> None:
        self.steps += scheduled.total_num_scheduled_tokens > 0
        self.preempted += len(scheduled.preempted_req_ids or ())
        for new in scheduled.scheduled_new_reqs:
            again = new.req_id in self.seen
            self.resumed += again
            self.hits += not again and new.num_computed_tokens > 0
            self.seen.add(new.req_id)
            self.chunks += new.num_computed_tokens + scheduled.num_scheduled_tokens[
                new.req_id
            ] < len(new.prompt_token_ids)
        self.resumed += len(scheduled.scheduled_cached_reqs.resumed_req_ids)


class Served:
    """An engine, the oracle, and the weights that both have. put(weights, version) sends them to
    the engine."""

    def __init__(self, setting: Any, llm: Any, put: Callable[[Weights, int], None]):
        self.setting, self.llm, self.version, self.compared = setting, llm, 0, 0
        self.oracle, self._put = Oracle(setting.model, setting.dtype), put

    def push(self) -> None:
        self.version += 1
        weights = weights_of(self.setting.model, self.setting.dtype, self.version)
        self._put(weights, self.version)
        self.oracle.serve(weights)

    def hold(self, requests: list[Request]) -> None:
        """Compares the engine's answers with the oracle's."""
        self.compared += agree(generate(self.llm, requests), self.oracle.answers(requests))

    def traced(self, requests: list[Request]) -> Trace:
        """Does the same and returns what vLLM scheduled for the requests."""
        with Trace(self.llm) as trace:
            self.hold(requests)
        return trace


@contextlib.contextmanager
def served(
    setting: Any, at: Path, putting: Callable[[Any], Callable[[Weights, int], None]], **options: Any
) -> Iterator[Served]:
    """An engine of a setting (model, dtype, v2, and how it is named), with its first weights."""
    need_protocol(setting.v2)
    with engine(at, setting.model, setting.dtype, setting.v2, **options) as llm:
        it = Served(setting, llm, putting(llm))
        it.push()
        try:
            yield it
        finally:
            it.oracle.close()


def need_protocol(v2: bool) -> None:
    if v2 and importlib.util.find_spec("triton") is None:
        pytest.skip("vLLM speaks its second protocol only where triton is installed")


def mixed(model: str, seed: int = 0, n_requests: int = 8) -> list[Request]:
    """Requests of every kind at once: greedy, seeded with each filter, several samples, with and
    without logprobs of several numbers, stop tokens, prompts of one token and of several chunks,
    some that begin alike."""
    vocab = CASES[model].config["vocab_size"]
    rng = np.random.default_rng([seed, 77])
    shared = rng.integers(0, vocab, 40).tolist()
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 5, "prompt_logprobs": 3},
        {"temperature": 1.0, "n": 3, "logprobs": 0},
        {"temperature": 0.7, "top_p": 0.8, "logprobs": 2, "prompt_logprobs": 0},
        {"temperature": 1.3, "top_k": 7, "n": 2, "logprobs": 20},
        {"temperature": 0.9, "min_p": 0.05, "top_p": 0.95, "top_k": 40, "logprobs": None},
        {
            "temperature": 0.0,
            "logprobs": 0,
            "stop_token_ids": rng.integers(0, vocab, 40).tolist(),
            "max_tokens": 30,
        },
        {
            "temperature": 1.0,
            "logprobs": 1,
            "stop_token_ids": rng.integers(0, vocab, 60).tolist(),
            "min_tokens": 6,
            "max_tokens": 30,
        },
        {"temperature": 2.0, "logprobs": 3, "prompt_logprobs": 20, "max_tokens": 1},
    ]
    lengths = (1, 33, 5, 70, 17, 31, 2, 64)
    requests = []
    for i in range(n_requests):
        prompt = rng.integers(0, vocab, lengths[i % 8]).tolist()
        if i % 8 in (1, 3, 7):
            prompt = shared[: min(40, len(prompt))] + prompt[40:]
        length = {"max_tokens": int(rng.integers(2, 24))} | kinds[i % 8]
        requests.append(request(prompt, seed=int(rng.integers(0, 1 << 40)), **length))
    return requests


def continued(oracle: Oracle, request: Request, first: Answer, cut: int) -> Answer:
    """Continues the sample `first` from `cut` tokens as the oracle now serves it: the text so far
    is the prompt, and draws depend on the position."""
    head = first.tokens[:cut]
    left = request.settings["max_tokens"] - len(head)
    rest = oracle.answers(
        [Request(request.prompt + tuple(head), {**request.settings, "max_tokens": left})]
    )[0][-1]
    return Answer(first.index, head + rest.tokens, rest.end, first.positions[:cut] + rest.positions)


# --------------------------------------------------------------------------------------- AsyncLLM
@contextlib.asynccontextmanager
async def async_engine(
    at: Path, model: str, dtype: str, v2: bool = False, **changes: Any
) -> AsyncIterator[Any]:
    """Runs vllm.AsyncLLM, whose engines are always separate processes: with data parallelism one
    for each replica."""
    with (
        environment(VLLM_USE_V2_MODEL_RUNNER=str(int(v2)), CUDA_VISIBLE_DEVICES=""),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        chosen = options(at, model, dtype, **changes)
        chosen["weight_transfer_config"] = WeightTransferConfig(**chosen["weight_transfer_config"])
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**chosen))
        try:
            yield llm
        finally:
            llm.shutdown()


async def async_generate(
    llm: Any, requests: Sequence[Request], name: str, ranks: Sequence[int] | None = None
) -> list[list[Answer]]:
    """Generates all requests at once. `name` makes their ids; `ranks` sets which replica serves
    each, instead of vLLM's choice."""
    from vllm.sampling_params import RequestOutputKind

    async def one(number: int, request: Request) -> list[Answer]:
        params = request.theirs
        params.output_kind = RequestOutputKind.FINAL_ONLY
        rank = None if ranks is None else ranks[number]
        stream = llm.generate(
            {"prompt_token_ids": list(request.prompt)},
            params,
            f"{name}-{number}",
            data_parallel_rank=rank,
        )
        outputs = [output async for output in stream]
        return vllm_answers(outputs[-1])

    return list(await asyncio.gather(*(one(i, request) for i, request in enumerate(requests))))


def drawn(model: str, seed: int = 0) -> list[Request]:
    """Requests as RL makes them: samples of a prompt, the logprob of each token drawn and nothing
    else."""
    vocab = CASES[model].config["vocab_size"]
    rng = np.random.default_rng([seed, 78])
    kinds: tuple[Settings, ...] = (
        {"temperature": 1.0, "n": 4},
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 11, "n": 2},
        {"temperature": 0.8, "min_p": 0.1, "top_p": 0.99},
        {"temperature": 0.0},
    )
    return [
        request(
            rng.integers(0, vocab, int(rng.integers(1, 60))),
            seed=int(rng.integers(0, 1 << 40)),
            max_tokens=12,
            **kind,
        )
        for kind in kinds
    ]


def without_ranks(answers: Sequence[Sequence[Answer]]) -> list[list[Answer]]:
    """Removes ranks: for a filtered distribution a Generator returns no logits to count ranks
    in."""
    return [
        [
            dataclasses.replace(
                a, positions=[{t: (word, 0) for t, (word, _) in p.items()} for p in a.positions]
            )
            for a in some
        ]
        for some in answers
    ]


def ended(llm: Any, request: Request) -> tuple[str | None, str]:
    """Returns how a request that cannot be served ends."""
    output = llm.generate(
        [{"prompt_token_ids": list(request.prompt)}], [request.theirs], use_tqdm=False
    )[0].outputs[0]
    return output.finish_reason, str(output.stop_reason)
