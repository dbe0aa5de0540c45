"""vLLM as a run's generator: AsyncLLM schedules, its workers run rollmesh, and weights go through
vLLM's weight API.

AsyncLLM runs on an event loop in a separate thread; each call here submits one coroutine and waits.
vLLM gets a folder with only a config.json, and the trainer keeps the tokenizer. Every request has a
seed (sample i of a request has seed + i, as in rm.Generator), so samples do not depend on the
engine or on the order of requests.

Rejected: vllm.LLM in this process, because its step loop would hold the trainer's thread between
two tokens, and engine, torch and trainer would share one interpreter lock.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rollmesh import CompletionOutput, ModelSpec, RequestOutput, SamplingParams, SyncReport
from rollmesh.errors import ConfigError, Error, RequestError, StateError
from rollmesh.model.families import FAMILIES
from rollmesh.request.arguments import param_list
from rollmesh.request.sampling import logit_edit_names
from rollmesh.run.config import GeneratorTable
from rollmesh.run.user_code import together
from rollmesh.runtime.threads import starting
from rollmesh.vllm import NAME, asked_for
from rollmesh.vllm.trainer import AsyncWeightSender

T = TypeVar("T")
CLOSE_S = 30.0  # for vLLM's processes to end; killed processes leave shared memory behind
# Fields of SamplingParams that vLLM has too, with the same meaning.
SAME = (
    *("n", "seed", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "prompt_logprobs"),
)
INSTALL = "pip install '.[vllm]' in rollmesh's checkout; docs/vllm.md has what to pin"


class VllmGenerator:
    """A RolloutGenerator over vLLM's AsyncLLM.

    `.logprobs` of its outputs are nan unless the temperature is 1 without filters: vLLM
    returns `.sampling_logprobs`, of the distribution drawn from, and only then are both equal.
    """

    def __init__(
        self,
        table: GeneratorTable,
        hf_config: Any,
        eos_token_ids: Sequence[int],
        *,
        routing: bool = False,
    ) -> None:
        """routing: return routed experts, if the model has experts."""
        ask_for_plugin()
        self.spec = ModelSpec.from_hf(hf_config)
        self.dtype, self.max_model_len = table.dtype, table.max_model_len
        self.version: int | None = None
        self._eos = tuple(eos_token_ids)
        self._numbers = itertools.count()
        self._folder = tempfile.TemporaryDirectory(prefix="rollmesh-vllm-")
        write_config(hf_config, Path(self._folder.name))
        self._senders: dict[bool, AsyncWeightSender] = {}
        self._llm: Any = None
        self._running: set[asyncio.Task[Any]] = set()  # calls of generate, in the loop
        self._loop = LoopThread()
        try:
            self._llm = self._loop.run(start(table, self._folder.name, routing))
        except BaseException:
            self.close()
            raise

    def sync_weights(
        self, source: Mapping[str, Any], version: int, cast: bool = False
    ) -> SyncReport:
        """Pushes a state dict through shared memory, or raises and keeps serving the old version.
        The report counts the tensors of the source as parameters and has no digest."""

        async def send() -> None:
            if cast not in self._senders:
                self._senders[cast] = AsyncWeightSender(self._llm, cast=cast)
            await self._senders[cast].send(source, version)
            # Otherwise vLLM would find KV of the old version, which the worker would recompute.
            await self._llm.reset_prefix_cache()

        began, n = time.perf_counter(), len(source)
        self._loop.run(send())
        self.version = version
        num_bytes = sum(tensor.nbytes for tensor in source.values())
        seconds = time.perf_counter() - began
        return SyncReport(version, n, n, 0, num_bytes, seconds, seconds, "", pause_s=seconds)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Implements rm.Generator.generate for token ids, with use_tqdm=False. Raises the first
        request's error and aborts the others."""
        if use_tqdm:
            raise RequestError("use_tqdm: expected False with vLLM, got True")
        pairs = zip(prompts, param_list(params, len(prompts)), strict=True)
        return self._loop.run(self._generate([self._complete(list(ids), p) for ids, p in pairs]))

    def abort(self) -> None:
        """Ends calls of generate in other threads, which raise CancelledError."""
        self._loop.call(lambda: [task.cancel() for task in self._running])

    async def _generate(
        self, works: Sequence[Coroutine[Any, Any, RequestOutput]]
    ) -> list[RequestOutput]:
        me = asyncio.current_task()
        assert me is not None
        self._running.add(me)
        me.add_done_callback(self._running.discard)
        return await together(works)

    async def _complete(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        number, last = next(self._numbers), None
        prompt_input = {"type": "token", "prompt_token_ids": prompt}
        async for output in self._llm.generate(
            prompt_input, vllm_params(params, self._eos), f"rollout-{number}"
        ):
            last = output
        return output_of(last, number, params, frozenset(self._eos), self.spec.is_moe_layer)

    def close(self) -> None:
        """Ends vLLM's processes. Call nothing else afterwards."""
        for sender in self._senders.values():
            sender.close()
        llm, self._llm, self._senders = self._llm, None, {}
        if llm is not None:
            self._loop.call(lambda: llm.shutdown(timeout=CLOSE_S))
        self._loop.close()
        self._folder.cleanup()


# --------------------------------------------------------------------------------------- starting
def ask_for_plugin() -> bool:
    """Adds rollmesh to VLLM_PLUGINS, for this process and those that vLLM starts. Returns whether
    it was missing. Raises ConfigError if vLLM is not installed or was already imported."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"generating with vLLM needs the package vllm: {INSTALL}")
    # A forked engine would inherit the locks of torch's threads without the threads.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if asked_for():
        return False
    named = os.environ.get("VLLM_PLUGINS", "")
    if "vllm" in sys.modules:
        raise ConfigError(
            f'VLLM_PLUGINS: expected {NAME} in it before vllm is imported, got "{named}"'
        )
    os.environ["VLLM_PLUGINS"] = f"{named},{NAME}" if named else NAME
    return True


def write_config(hf_config: Any, folder: Path) -> None:
    """Writes config.json, the only file of the model that vLLM reads."""
    fields = json.loads(hf_config.to_json_string(use_diff=False))
    fields["architectures"] = [FAMILIES[fields["model_type"]].architecture]
    (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


async def start(table: GeneratorTable, folder: str, routing: bool) -> Any:
    """Starts the engine, in separate processes."""
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    if not type(current_platform).__module__.startswith("rollmesh."):
        raise ConfigError(
            f"vLLM's platform: expected rollmesh's, got {type(current_platform).__qualname__}; is "
            "rollmesh installed?"
        )
    own = ("ep_backend", "sequence_parallel", "isa", "exchange")
    options = {name: getattr(table, name) for name in own}
    # Threads of one worker.
    per_worker = max(1, table.threads // (table.tp * table.dp)) if table.threads else None
    same = ("dtype", "max_model_len", "max_num_seqs", "enforce_eager")
    args = AsyncEngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        generation_config="vllm",
        kv_cache_memory_bytes=int(table.kv_cache_gib * 2**30),
        tensor_parallel_size=table.tp,
        data_parallel_size=table.dp,
        enable_expert_parallel=table.ep > 1,
        logprobs_mode="processed_logprobs",
        additional_config={"rollmesh": {"threads": per_worker, **options}},
        weight_transfer_config=WeightTransferConfig(backend=NAME),
        enable_return_routed_experts=routing,
        enable_log_requests=False,
        disable_log_stats=True,
        **{name: getattr(table, name) for name in same},
    )
    try:
        return AsyncLLM.from_engine_args(args)
    except RuntimeError as error:  # a process of vLLM has ended, with an error on stderr
        raise StateError(f"vLLM's engine did not start: {error}") from error


class LoopThread:
    """An event loop in a separate thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        with starting("vLLM's event loop"):
            self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for the result. A Ctrl-C cancels the coroutine, which aborts its requests."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], T]) -> T:
        async def work() -> T:
            return function()

        return self.run(work())

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


# ---------------------------------------------------------------------------------------- records
def vllm_params(params: SamplingParams, eos_token_ids: Sequence[int]) -> Any:
    """Converts to vLLM's SamplingParams. Without a tokenizer vLLM has no eos, so the eos ids become
    stop_token_ids."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if params.seed is None:
        raise RequestError(
            "seed: expected a number, got None; without one samples would depend on the engine"
        )
    if params.kept_tokens:
        raise RequestError(
            "kept_tokens: expected False with vLLM, which does not return the tokens kept, got True"
        )
    for name in ("stop", "bad_words"):
        if texts := getattr(params, name):
            raise RequestError(
                f"{name}: expected none, got {list(texts)}; the engine has no tokenizer"
            )
    bias: Any = params.logit_bias  # pairs
    allowed = params.allowed_token_ids
    ends = () if params.ignore_eos else eos_token_ids
    return SamplingParams(
        logit_bias=None if bias is None else dict(bias),
        allowed_token_ids=None if allowed is None else list(allowed),
        stop_token_ids=[*ends, *(params.stop_token_ids or ())],
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **{name: getattr(params, name) for name in SAME},
    )


def output_of(
    output: Any,
    number: int,
    params: SamplingParams,
    eos: frozenset[int],
    is_moe_layer: Sequence[bool] = (),
) -> RequestOutput:
    """Converts vLLM's finished output. Raises rm.Error for a request that failed."""
    completions = []
    for sample in output.outputs:
        if sample.finish_reason not in ("stop", "length"):
            raise Error(
                f"request {number}, sample {sample.index}: ended with {sample.finish_reason}: "
                f"{sample.stop_reason}"
            )
        tokens = np.array(sample.token_ids, np.int32)
        drawn = np.array(sample.logprobs.logprobs, np.float32)
        if drawn.shape != tokens.shape:
            raise Error(
                f"request {number}, sample {sample.index}: {drawn.size} logprobs for "
                f"{tokens.size} tokens"
            )
        is_filtered = params.top_p != 1.0 or params.top_k != -1 or params.min_p != 0.0
        is_plain = params.temperature == 1.0 and not is_filtered and not logit_edit_names(params)
        logprobs = drawn.copy() if is_plain else np.full_like(drawn, np.nan)
        versions = np.full(len(tokens), -1, np.int64)  # −1: of a token in no span
        for span in sample.weight_versions or ():
            versions[span.start : span.end] = int(span.version)
        routed = sample.routed_experts  # of all layers
        if routed is not None:
            routed = routed[:, np.flatnonzero(is_moe_layer)].astype(np.int16)
        completions.append(
            CompletionOutput(
                index=sample.index,
                text="",
                token_ids=tokens,
                finish_reason=sample.finish_reason,
                stop_reason=None if sample.stop_reason in eos else sample.stop_reason,
                cumulative_logprob=float(np.sum(logprobs, dtype=np.float64)),
                logprobs=logprobs,
                sampling_logprobs=drawn,
                versions=versions,
                contract=None,
                routed_experts=routed,
            )
        )
    prompt_logprobs = None
    if (flat := output.prompt_logprobs) is not None:
        # The first entry of a position is the prompt's own token. The first position has none.
        chosen = [flat.logprobs[first] for first in flat.start_indices[1:]]
        prompt_logprobs = np.array(chosen, np.float32)
    return RequestOutput(
        request_id=number,
        prompt=None,
        prompt_token_ids=np.array(output.prompt_token_ids, np.int32),
        outputs=completions,
        finished=True,
        num_cached_tokens=output.num_cached_tokens or 0,
        prompt_logprobs=prompt_logprobs,
    )
