"""Types of what the C engine returns: the dicts and tuples of ext/engine/views.c and
ext/engine/sync.c."""

from __future__ import annotations

from typing import Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

CONTRACT_VERSION = 1  # of docs/numerics.md; a change of any bit there is a new number

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Finish = Literal["stop", "length", "abort", "error"] | None
ManifestEntry = tuple[str, tuple[int, ...], str, bool]  # name, shape, dtype, required


class RequestView(TypedDict):
    finished: bool
    error: Exception | None
    num_cached_tokens: int
    num_scored: int  # leading entries of the next four that were computed
    n: int
    # Queued, scheduled, first and last token: seconds of time.monotonic(); 0: not yet.
    times: tuple[float, float, float, float]
    prompt_logprobs: Floats | None  # [p - 1]
    prompt_sampling_logprobs: Floats | None  # [p - 1]
    prompt_ranks: Ids | None  # [p - 1]
    prompt_top_ids: Ids | None  # [p - 1, k]
    prompt_top_logprobs: Floats | None  # [p - 1, k]
    prompt_routed: NDArray[np.int16] | None  # [p, moe_layers, k]; None while the request runs


class SampleView(TypedDict):
    finish: Finish
    stop_token: int  # -1: none
    token_ids: Ids  # [n]
    logprobs: Floats  # [n]
    sampling_logprobs: Floats  # [n]
    versions: NDArray[np.int64]  # [n]
    no_contract: NDArray[np.uint8]  # [n]
    ranks: Ids | None  # [n]
    top_ids: Ids | None  # [n, k], k: logprobs, with kept_tokens at least top_k
    top_logprobs: Floats | None  # [n, k]
    kept: Ids | None  # [n] the filters kept the first so many of top_ids
    routed: NDArray[np.int16] | None  # [n - 1, moe_layers, k]; None while the sample runs


class OpTime(TypedDict):
    """The calls of one op with one shape of weights."""

    op: str
    n: int  # columns of a product's weights, 0 for other ops
    k: int  # rows of them
    calls: int
    rows: int  # of all calls
    seconds: float
    # of these, until all threads had begun and ended: a mean over threads, where several worked
    waited: float
    flops: float  # of products and attention
    weight_bytes: float  # that the calls had to read


class Stats(TypedDict):
    version: int  # -1: not synced
    waiting: int
    running: int
    steps: int
    rows: int
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    graph_replays: int
    kv_pages: int
    kv_pages_free: int
    prefix_hits: int
    prefix_misses: int
    evictions: int
    states: int  # 0 in models without states of sequences
    states_free: int
    state_evictions: int
    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int
    threads: int
    asleep: int  # bits: 1 weights, 2 KV
    device: str  # "cpu", "cuda:0"
    isa: str
    family: str
    forward_seconds: float
    schedule_seconds: float
    commit_seconds: float
    comm_bytes: int  # sent to other ranks, by all ranks of this process
    comm_calls: int  # exchanges, and seconds in them, of the rank that has most
    comm_seconds: float


class SyncValues(TypedDict):
    version: int
    num_tensors: int
    num_parameters: int
    num_skipped: int
    bytes: int
    seconds: float
    copy_seconds: float
    digest: int
