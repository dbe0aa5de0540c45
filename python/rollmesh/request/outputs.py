"""Results of generation and of weight syncs. Fields have vLLM's names where vLLM has them, but
values are arrays instead of lists of dicts. All arrays are copies that belong to the caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollmesh.distributed.wire import sendable


@sendable
@dataclass(frozen=True, slots=True)
class Contract:
    """The conditions on which the numbers of a sample depend. Samples with equal contracts and
    equal tokens are bit-identical.

    family           instruction family whose members are bit-identical ("x86")
    version          version of the numeric contract, docs/numerics.md
    dtype            "bfloat16" or "float32"
    weight_versions  versions of the weights that computed the tokens, ascending; several if a sync
                     was committed in between
    """

    family: str
    version: int
    dtype: str
    weight_versions: tuple[int, ...]

    def __post_init__(self) -> None:
        # Messages between ranks have lists.
        object.__setattr__(self, "weight_versions", tuple(self.weight_versions))


@sendable
@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The k likeliest tokens of each position under the model, in descending order; of equal tokens
    the lowest id comes first."""

    ids: NDArray[np.int32]  # [n, k]
    logprobs: NDArray[np.float32]  # [n, k]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A logprob in vLLM's form, as CompletionOutput.vllm_logprobs returns it."""

    logprob: float
    rank: int | None  # 1: the likeliest token; None: not among the k requested ones
    decoded_token: str | None = None  # always None, since single tokens are not decoded


def _in_vllms_form(
    tokens: NDArray[np.int32], logprobs: NDArray[np.float32], top: TopLogprobs | None
) -> list[dict[int, Logprob]]:
    """Returns a dict for each token: the token itself, then the likeliest ones."""
    forms = []
    for i, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
        ids = top.ids[i].tolist() if top else []
        form = {token: Logprob(logprob, ids.index(token) + 1 if token in ids else None)}
        for rank, other in enumerate(ids, 1):
            form.setdefault(other, Logprob(float(top.logprobs[i, rank - 1]), rank))  # type: ignore[union-attr]
        forms.append(form)
    return forms


@sendable
@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a request.

    text            the text of the tokens after the prompt, without the stop string or stop token;
                    an incomplete character at the end is left out. While the sample runs, each text
                    begins with the previous one
    finish_reason   "stop", "length", "abort" or "error"; None while it runs
    stop_reason     the stop string or stop token id that ended it; None for eos
    contract        None if the sample has no tokens, if any of them was computed from stale KV
                    (sync_weights(keep_kv=True)), or with Generator(fast=True)
    """

    index: int
    text: str  # see docs/from_vllm.md; "" without a tokenizer
    token_ids: NDArray[np.int32]  # [n], including the token that ended the sample
    finish_reason: str | None
    stop_reason: int | str | None
    cumulative_logprob: float  # float64 sum of logprobs
    # [n] the model's logprob of each token: temperature 1, no filter
    logprobs: NDArray[np.float32]
    # [n] logprob under the distribution that the token was drawn from; 0.0 at temperature 0
    sampling_logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]  # [n] weight version of each token
    contract: Contract | None
    top_logprobs: TopLogprobs | None = None  # with SamplingParams.logprobs > 0
    # [prompt + n - 1, moe_layers, k]; None in a dense model and until the request is finished
    routed_experts: NDArray[np.int16] | None = None
    # [n, top_k], with SamplingParams.kept_tokens: ids by descending logit, then -1
    kept_tokens: NDArray[np.int32] | None = None

    def vllm_logprobs(self) -> list[dict[int, Logprob]]:
        """Returns `logprobs` and `top_logprobs` in the form of vLLM's CompletionOutput.logprobs:
        for each token a dict by id, with the drawn token first."""
        return _in_vllms_form(self.token_ids, self.logprobs, self.top_logprobs)


@sendable
@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request, under vLLM's names: seconds of time.monotonic() on the machine that ran
    it, or 0.0 if the request did not reach this point. After a restart
    (sync_weights(inflight="restart")) all times except queued_ts are those of the last run."""

    queued_ts: float  # added to the engine
    scheduled_ts: float  # first step planned
    first_token_ts: float  # first token of any sample
    last_token_ts: float


@sendable
@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt and its samples, in the order of their index. After an abort, prompt logprobs that
    were not computed are nan (ids: -1)."""

    request_id: int
    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: NDArray[np.int32]  # [p]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache served
    # [p - 1] logprob of token i+1 given tokens 0..i, with SamplingParams.prompt_logprobs
    prompt_logprobs: NDArray[np.float32] | None = None
    prompt_top_logprobs: TopLogprobs | None = None  # [p - 1, k]
    metrics: RequestMetrics | None = None  # None if the engine refused the request
    # The error that ended the request, with on_error="return" and from poll, which also reports
    # exceptions of the tokenizer.
    error: Exception | None = None

    def vllm_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Returns the logprobs of the prompt in vLLM's form, with None for its first token. Returns
        None without SamplingParams.prompt_logprobs."""
        if self.prompt_logprobs is None:
            return None
        return [
            None,
            *_in_vllms_form(
                self.prompt_token_ids[1:], self.prompt_logprobs, self.prompt_top_logprobs
            ),
        ]


@sendable
@dataclass(frozen=True, slots=True)
class SyncReport:
    """The report of a committed sync."""

    version: int
    num_tensors: int  # number of tensors in the source
    num_parameters: int  # number of the model's parameters that were filled
    num_skipped: int  # number of buffers of rope; with strict=False also of unexpected names
    bytes: int  # bytes of tensor data read
    seconds: float  # from begin to commit
    copy_seconds: float  # part of `seconds` inside the copies
    # 16 hex digits over names and stored values; the same for every spelling of the same weights
    digest: str
    pause_s: float = 0.0  # longest time without a step for running requests

    @property
    def gb_per_s(self) -> float:
        """Speed of copying, in 10^9 bytes of tensor data per second."""
        return self.bytes / self.copy_seconds / 1e9 if self.copy_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """The differences between the trainer's and the generator's logprobs of the same tokens."""

    max_abs_diff: float
    mean_abs_diff: float
    num_tokens: int
    threshold: float
    worst: tuple[int, int]  # sequence of the largest difference, and position of its token
    version: int
    # trainer - generator, [len - 1] for each sequence
    diffs: list[NDArray[np.float32]] = field(repr=False, default_factory=list)
