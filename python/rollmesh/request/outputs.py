"""Results of generation and of weight syncs. Names are vLLM's if it has one, but values are arrays,
not lists of dicts. All arrays are copies that belong to the caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Contract:
    """What a sample's numbers depend on: equal contracts and equal tokens give equal bits.

    family          instruction family whose members give the same bits ("x86")
    version         of the numeric contract, docs/numerics.md
    dtype           "bfloat16" or "float32"
    weight_versions ascending versions of the weights that the tokens belong to; one unless a sync
    came in between
    """

    family: str
    version: int
    dtype: str
    weight_versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The k likeliest tokens of each position under the model, descending, ties to the lowest
    id."""

    ids: NDArray[np.int32]  # [n, k]
    logprobs: NDArray[np.float32]  # [n, k]


@dataclass(frozen=True, slots=True)
class Logprob:
    """vLLM's form of a logprob, as CompletionOutput.vllm_logprobs gives it."""

    logprob: float
    rank: int | None  # 1: the likeliest token; None: not among the k that were asked for
    decoded_token: str | None = None  # always None: there are no texts of single tokens here


def _in_vllms_form(
    tokens: NDArray[np.int32], logprobs: NDArray[np.float32], top: TopLogprobs | None
) -> list[dict[int, Logprob]]:
    """A dict for each token: the token itself, then the likeliest."""
    forms = []
    for i, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
        ids = top.ids[i].tolist() if top else []
        form = {token: Logprob(logprob, ids.index(token) + 1 if token in ids else None)}
        for rank, other in enumerate(ids, 1):
            form.setdefault(other, Logprob(float(top.logprobs[i, rank - 1]), rank))  # type: ignore[union-attr]
        forms.append(form)
    return forms


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a request.

    text            what the tokens add to the text of the prompt, without the stop string or stop
                    token; an incomplete character at the end is left out. While the sample runs,
                    each text begins with the one before
    finish_reason   "stop", "length", "abort" or "error"; None while it runs
    stop_reason     the stop string or stop token id that ended it; None for eos
    contract        None when any of its tokens was computed from stale KV
                    (sync_weights(keep_kv=True)), or there is none, or the generator is
                    Generator(fast=True)
    """

    index: int
    text: str  # see docs/from_vllm.md; "" without a tokenizer
    token_ids: NDArray[np.int32]  # [n] up to and with the token that ended it
    finish_reason: str | None
    stop_reason: int | str | None
    cumulative_logprob: float  # float64 sum of logprobs
    logprobs: NDArray[
        np.float32
    ]  # [n] the model's own logprob of each token: temperature 1, no filter
    sampling_logprobs: NDArray[
        np.float32
    ]  # [n] under the distribution it was drawn from; 0.0 at temperature 0
    versions: NDArray[np.int64]  # [n] weight version of each token
    contract: Contract | None
    top_logprobs: TopLogprobs | None = None  # with SamplingParams.logprobs > 0
    # [prompt + n - 1, moe_layers, k]; None in a dense model and until the request is finished
    routed_experts: NDArray[np.int16] | None = None
    kept_tokens: NDArray[np.int32] | None = (
        None  # [n, top_k], with SamplingParams.kept_tokens: ids by descending logit, then -1
    )

    def vllm_logprobs(self) -> list[dict[int, Logprob]]:
        """`logprobs` and `top_logprobs` as vLLM's CompletionOutput.logprobs has them: for each
        token a dict of ids, the drawn one first."""
        return _in_vllms_form(self.token_ids, self.logprobs, self.top_logprobs)


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When a request came to each point, under vLLM's names: seconds of time.monotonic() on the
    machine that ran it, 0.0 if it did not. After a restart (sync_weights(inflight="restart")) they
    are those of the last run, but queued_ts."""

    queued_ts: float  # added to the engine
    scheduled_ts: float  # its first step was planned
    first_token_ts: float  # of any sample
    last_token_ts: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt and its samples, in the order of their index. Prompt logprobs that an abort left
    uncomputed are nan (ids: -1)."""

    request_id: int
    prompt: str | None  # when it was given as text
    prompt_token_ids: NDArray[np.int32]  # [p]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache served
    prompt_logprobs: NDArray[np.float32] | None = (
        None  # [p - 1] of token i+1 given 0..i, with SamplingParams.prompt_logprobs
    )
    prompt_top_logprobs: TopLogprobs | None = None  # [p - 1, k]
    metrics: RequestMetrics | None = None  # None: a request that the engine refused
    error: Exception | None = (
        None  # what ended it, with on_error="return"; from poll also what the tokenizer raised
    )

    def vllm_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """The same of the prompt, as in vLLM: None for its first token. None without
        SamplingParams.prompt_logprobs."""
        if self.prompt_logprobs is None:
            return None
        return [
            None,
            *_in_vllms_form(
                self.prompt_token_ids[1:], self.prompt_logprobs, self.prompt_top_logprobs
            ),
        ]


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One committed sync."""

    version: int
    num_tensors: int  # tensors that came
    num_parameters: int  # of the model, that they filled
    num_skipped: int  # buffers of rope; with strict=False also unexpected names
    bytes: int  # of tensor data read
    seconds: float  # begin to commit
    copy_seconds: float  # of these, inside the copies
    # 16 hex digits over names and stored values; the same for every spelling of the same weights
    digest: str

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes of tensor data per second of copying."""
        return self.bytes / self.copy_seconds / 1e9 if self.copy_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """How far the trainer's logprobs are from the generator's on the same tokens."""

    max_abs_diff: float
    mean_abs_diff: float
    num_tokens: int
    threshold: float
    worst: tuple[int, int]  # sequence, position in it (of the token that was scored)
    version: int
    diffs: list[NDArray[np.float32]] = field(
        repr=False, default_factory=list
    )  # trainer - generator, [len - 1] each
