"""Requests in flight: the state that Python keeps for each request while the C engine runs it, and
the conversion of its records to a RequestOutput. The caller has exclusive use of the engine
(loop.py).

    add ──► step … step ──► done ──► output (copies out) ──► release
                  └─ searches for stop strings after every step
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.distributed.rank_engine import ALONE, Lead, RankEngine, led
from rollmesh.errors import DeadlineError, NumericsError, RequestError, StateError
from rollmesh.request.logit_edits import LogitEdits, logit_edits
from rollmesh.request.outputs import (
    CompletionOutput,
    Contract,
    RequestMetrics,
    RequestOutput,
    TopLogprobs,
)
from rollmesh.request.sampling import SamplingParams
from rollmesh.request.text import Detokenizer, TextCodec
from rollmesh.runtime.arguments import BYTES, MAX_ITEMS, is_longer_than, is_masked
from rollmesh.runtime.engine_views import CONTRACT_VERSION, Finish, Floats, Ids, RequestView
from rollmesh.runtime.messages import shown

GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True, kw_only=True)
class EngineRequest:
    """A request in the form that ext/engine/engine.c reads; its fields are those of rm_request."""

    n: int = 1
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    min_p: float
    top_k: int
    has_seed: bool
    seed: int
    ignore_eos: bool = False
    logprobs: int
    prompt_logprobs: int
    score: bool = False
    score_sampling: bool = False
    ranks: bool = False
    external_draws: bool = False
    kept_tokens: bool = False
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    @classmethod
    def of(
        cls, params: SamplingParams, number: int, score: bool = False, score_sampling: bool = False
    ) -> EngineRequest:
        asked = cls(
            **{name: getattr(params, name) for name in _OF_PARAMS},
            has_seed=params.seed is not None,
            score=score,
            score_sampling=score_sampling,
        )
        asked.max_tokens = params.max_tokens or 1  # Requests.add gives a number
        asked.seed = number if params.seed is None else params.seed
        asked.logprobs = params.logprobs or 0
        asked.prompt_logprobs = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        if score:
            asked.n, asked.logprobs, asked.prompt_logprobs, asked.kept_tokens = 1, 0, 0, False
        return asked


# Fields that SamplingParams has too.
_OF_PARAMS = {row.name for row in fields(EngineRequest)} & {
    row.name for row in fields(SamplingParams)
}


@dataclass(slots=True)
class _Request:
    prompt_ids: Ids
    prompt: str | None
    params: SamplingParams
    number: int  # number of the generation, see Requests._generations; 0 for a score
    texts: list[Detokenizer]  # one for each sample; empty without a tokenizer and for a score
    logits: Floats | None = None  # [len, vocab] for a score that keeps its logits
    timeout: float | None = None  # seconds after which it was aborted


class Requests:
    """All requests of one engine."""

    def __init__(
        self,
        engine: RankEngine,
        codec: TextCodec | None,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        dtype: str,
        max_model_len: int,
        is_invariant: bool = True,
    ):
        self._max_model_len, self._vocab_size = max_model_len, vocab_size
        self.engine, self._codec, self._eos = engine, codec, frozenset(eos_token_ids)
        self.loan: Any = None  # the loop.Loan in use, which measures the time between steps
        self._dtype = dtype
        self._family, self._is_invariant = engine.stats()["family"], is_invariant
        self._records: dict[int, _Request] = {}
        # Number of accepted generations. Default seeds are made from it, so scores and refused
        # requests do not change them.
        self._generations = 0
        self._watched: set[int] = set()  # running requests with stop strings
        # Request → error of the tokenizer in the search for stop strings.
        self._faults: dict[int, BaseException] = {}

    # ---------------------------------------------------------------------------------------- in
    @led(Lead.QUEUED)
    def add(self, prompt_ids: Ids, params: SamplingParams, prompt: str | None = None) -> int:
        """Queues a generation. Raises RequestError or CapacityError if the engine refuses it."""
        if params.stop and self._codec is None:
            raise RequestError(
                "stop: expected no stop strings, since the generator has no tokenizer, got "
                f"{shown(params.stop)}"
            )
        if params.max_tokens is None:
            params = replace(
                params, max_tokens=max(1, params.min_tokens, self._max_model_len - len(prompt_ids))
            )
        stop_ids = np.asarray(params.stop_token_ids, dtype=np.int32)
        edits, texts = self._edits(params), self._texts(prompt_ids, params)
        number = self._generations + 1
        request: int = self.engine.add(
            prompt_ids, stop_ids, EngineRequest.of(params, number), None, edits
        )
        self._records[request] = _Request(prompt_ids, prompt, params, number, texts)
        self._generations = number
        if params.stop and self.engine.has(request):
            self._watched.add(request)
        return request

    @led(Lead.QUEUED)
    def add_score(self, ids: Ids, params: SamplingParams | None = None, vocab_size: int = 0) -> int:
        """Queues a scoring pass over `ids`. vocab_size > 0: also keep its logits."""
        chosen = params or GREEDY
        logits = np.zeros((len(ids), vocab_size), np.float32) if vocab_size else None
        asked = EngineRequest.of(chosen, 0, True, params is not None)
        request: int = self.engine.add(
            ids, np.zeros(0, np.int32), asked, logits, self._edits(chosen)
        )
        self._records[request] = _Request(ids, None, chosen, 0, [], logits)
        return request

    def _edits(self, params: SamplingParams) -> LogitEdits | None:
        return logit_edits(
            params, self._codec, self._vocab_size, self._eos.union(params.stop_token_ids or ())
        )

    def _texts(self, prompt_ids: Ids, params: SamplingParams) -> list[Detokenizer]:
        if self._codec is None:
            return []
        return [
            Detokenizer(
                self._codec,
                prompt_ids,
                stops=params.stop or (),
                min_tokens=params.min_tokens,
                skip_special_tokens=params.skip_special_tokens,
                keeps_stop=params.include_stop_str_in_output,
            )
            for _ in range(params.n)
        ]

    # ---------------------------------------------------------------------------------------- work
    @led(Lead.COLLECTIVE)
    def step(self) -> int:
        """Runs one engine step, unless the generator is paused, and searches for stop strings.
        Returns the number of rows of all replicas."""
        engine, loan, rows = self.engine, self.loan, 0
        fault: Exception | None = None
        if loan is not None:
            loan.note_pause()
        try:
            if not engine.paused:
                rows = engine.step()
            if self._watched:
                self._watch_all()
        except Exception as error:
            if not engine.has_replicas or isinstance(error, (*ALONE, MemoryError)):
                raise
            fault = error
        if engine.has_replicas:  # in other processes, which wait for this rank's results
            rows = engine.share_step(rows, fault, self._result)
        if loan is not None:
            loan.note_step()
        return rows

    def _result(self, request: int) -> RequestOutput | Floats | Exception:
        """Returns the result of a finished request for rank 0."""
        if self._records[request].number:
            return self.output_or_error(request)
        try:
            return self.scores(request)
        except Exception as error:  # noqa: BLE001 (raised on rank 0)
            return error

    def _watch_all(self) -> None:
        """Searches all running requests for stop strings. If a tokenizer raises, the request ends
        as with a stop string, and the error is in its output."""
        for request in list(self._watched):
            try:
                self._watch(request)
            except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever user code raises)
                self._end(request, error)

    def _watch(self, request: int) -> None:
        record = self._records[request]
        running = False
        for sample, text in enumerate(record.texts):
            finish, fresh = self.engine.tokens(request, sample, text.num_tokens)
            running |= finish is None
            if finish not in ("abort", "error"):  # otherwise `output` reads the text
                self._read(request, sample, finish, fresh)
        if not running:
            self._watched.discard(request)

    def _end(self, request: int, fault: BaseException) -> None:
        record = self._records[request]
        self._faults[request] = fault
        self._watched.discard(request)
        for sample, text in enumerate(record.texts):
            if self.engine.tokens(request, sample, text.num_tokens)[0] is None:
                self.engine.stop_sample(request, sample, text.num_tokens)

    def _read(self, request: int, sample: int, finish: Finish, fresh: Ids) -> None:
        """Decodes the new tokens of a sample, and ends the sample at a stop string. If an error has
        delayed this, the engine drops the tokens after the stop string."""
        record = self._records[request]
        text = record.texts[sample]
        tokens = fresh.tolist() if text.found is None else []
        if finish == "stop" and not record.params.include_stop_str_in_output:
            tokens = tokens[:-1]  # eos or a stop token
        for token in tokens:
            if text.push(token) is not None:
                break
        if text.found is not None and finish in (None, "length", "stop"):
            self.engine.stop_sample(request, sample, text.num_tokens)

    @led(Lead.QUEUED)
    def abort(self, requests: Iterable[int]) -> None:
        """Aborts the requests that still run. They are then finished, with finish_reason
        "abort"."""
        running = set(self.engine.ids()) - self.engine.finished()
        for request in requests:
            if request in running:
                self.engine.abort(request)

    @led(Lead.QUEUED)
    def cut_off(self, requests: Iterable[int], timeout: float | None) -> None:
        """Aborts those of these requests that still run, because their time has passed."""
        for request in set(requests) - self.engine.finished():
            self._records[request].timeout = timeout
        self.abort(requests)

    def rewind(self) -> None:
        """Restarts the search for stop strings in running requests, which begin again after a sync
        with inflight="restart"."""
        for request in set(self.engine.ids()) - self.engine.finished():
            record = self._records[request]
            if record.texts:
                record.texts = self._texts(record.prompt_ids, record.params)
            if record.params.stop and self.engine.has(request):
                self._watched.add(request)

    # ---------------------------------------------------------------------------------------- out
    def num_tokens(self, request: int, before: list[int]) -> list[int]:
        """Returns the number of tokens of each sample so far, but at least `before`, the result of
        an earlier call: after a restart the numbers do not decrease."""
        if request in self.engine.foreign:
            return before
        return [
            count + len(self.engine.tokens(request, sample, count)[1])
            for sample, count in enumerate(before)
        ]

    @led(Lead.QUEUED)
    def forget(self, requests: Iterable[int]) -> None:
        """Aborts and releases requests, without results. If they are the latest generations, their
        numbers are used again."""
        known = set(self.engine.ids())
        requests = sorted(known.intersection(requests), reverse=True)
        self.abort(requests)
        for request in requests:
            record = self._records.get(request)
            self.release(request)
            if record is not None and record.number == self._generations > 0:
                self._generations -= 1

    @led(Lead.QUEUED)
    def release(self, request: int) -> None:
        """Removes the records of a finished request from the engine."""
        self.engine.release(request)
        self._watched.discard(request)
        self._faults.pop(request, None)
        self._records.pop(request, None)

    def output_or_error(self, request: int) -> RequestOutput:
        """Like output, but if the tokenizer raises, `error` is its exception and the texts are
        empty."""
        try:
            self.raise_fault([request])
            return self.output(request)
        except Exception as error:  # noqa: BLE001 (whatever user code raises)
            return replace(self.output(request, has_text=False), error=error)

    def raise_fault(self, requests: Iterable[int]) -> None:
        """Raises the exception that a tokenizer raised in the search for a stop string, if any."""
        for request in requests:
            if (fault := self._faults.get(request)) is not None:
                raise fault

    def output(self, request: int, has_text: bool = True) -> RequestOutput:
        """Returns the output of a request, with its tokens so far if it still runs."""
        record = self._records[request]
        if request in self.engine.foreign:
            output: RequestOutput = self.engine.foreign[request]
            return replace(output, prompt=record.prompt)
        view = self.engine.request(request)
        top = _top(
            view["prompt_top_ids"],
            view["prompt_top_logprobs"],
            record.params.prompt_logprobs or 0,
        )
        scored = view["num_scored"]
        if view["prompt_logprobs"] is not None:
            view["prompt_logprobs"][scored:] = np.nan
        if top is not None:
            top.ids[scored:], top.logprobs[scored:] = -1, np.nan
        completions = [self._completion(request, i, view, has_text) for i in range(view["n"])]
        error = view["error"]
        if error is None and record.timeout is not None:
            error = DeadlineError(f"request {request} did not finish within {record.timeout} s")
        return RequestOutput(
            request_id=request,
            prompt=record.prompt,
            prompt_token_ids=record.prompt_ids,
            outputs=completions,
            finished=view["finished"],
            num_cached_tokens=view["num_cached_tokens"],
            prompt_logprobs=view["prompt_logprobs"],
            prompt_top_logprobs=top,
            metrics=RequestMetrics(*view["times"]),
            error=error,
        )

    def scores(self, request: int) -> Floats:
        """Returns float32 [len − 1] of a scoring pass, or its logits if it keeps them. Raises the
        error that ended it."""
        result = self.engine.foreign.get(request)
        if isinstance(result, Exception):
            raise result
        if result is not None:
            return result  # type: ignore[no-any-return]
        record, view = self._records[request], self.engine.request(request)
        finish = self.engine.tokens(request, 0, 0)[0]
        if view["error"] is not None:
            raise view["error"]
        if finish == "abort":
            raise StateError(
                f"scoring pass {request} was aborted (abort, pause or sync of another thread) "
                "before it ended"
            )
        if record.logits is not None:
            return record.logits
        scores: Floats | None
        for scores in (view["prompt_sampling_logprobs"], view["prompt_logprobs"]):
            if scores is not None:
                return scores
        if len(record.prompt_ids) > 1:
            raise NumericsError(f"request {request} ended without scores")
        return np.zeros(0, np.float32)

    def _completion(
        self,
        request: int,
        index: int,
        view: RequestView,
        has_text: bool,
    ) -> CompletionOutput:
        record = self._records[request]
        decoded = record.texts[index] if record.texts else None
        if decoded is not None and has_text:
            read = self.engine.tokens(request, index, decoded.num_tokens)
            self._read(request, index, *read)
        sample = self.engine.sample(request, index)
        tokens, finish = sample["token_ids"], sample["finish"]
        text = ""
        if decoded is not None and has_text:
            text = decoded.text_so_far() if finish is None else decoded.text
        reason: int | str | None = None
        if decoded is not None and decoded.found is not None:
            finish, reason = "stop", decoded.found
        elif finish == "stop":
            is_eos = sample["stop_token"] in self._eos and not record.params.ignore_eos
            reason = None if is_eos else sample["stop_token"]
        contract = None
        if self._is_invariant and len(tokens) and not sample["no_contract"].any():
            used = tuple(dict.fromkeys(sample["versions"].tolist()))  # versions only grow
            contract = Contract(self._family, CONTRACT_VERSION, self._dtype, used)
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=tokens,
            finish_reason=finish,
            stop_reason=reason,
            cumulative_logprob=float(np.sum(sample["logprobs"], dtype=np.float64)),
            logprobs=sample["logprobs"],
            sampling_logprobs=sample["sampling_logprobs"],
            versions=sample["versions"],
            contract=contract,
            top_logprobs=_top(
                sample["top_ids"], sample["top_logprobs"], record.params.logprobs or 0
            ),
            routed_experts=_routed(view["prompt_routed"], sample["routed"], len(tokens)),
            kept_tokens=_kept(sample["top_ids"], sample["kept"], record.params.top_k),
        )


def _top(ids: Ids | None, logprobs: Floats | None, k: int) -> TopLogprobs | None:
    """Returns the first k top logprobs, the requested ones. For kept_tokens the engine records
    more."""
    if ids is None or logprobs is None or not k:
        return None
    return TopLogprobs(np.ascontiguousarray(ids[:, :k]), np.ascontiguousarray(logprobs[:, :k]))


def _kept(ids: Ids | None, kept: Ids | None, top_k: int) -> Ids | None:
    """Returns [n, top_k]: the first `kept` ids of each row, then -1."""
    if ids is None or kept is None:
        return None
    return np.where(np.arange(top_k) < kept[:, None], ids[:, :top_k], np.int32(-1))


def _routed(
    prompt: NDArray[np.int16] | None, generated: NDArray[np.int16] | None, num_tokens: int
) -> NDArray[np.int16] | None:
    """Returns the routing [prompt + n − 1, moe_layers, k]; the last token was not an input. Returns
    None for a dense model or without generated tokens."""
    if prompt is None or generated is None or num_tokens == 0:
        return None
    return np.concatenate([prompt, generated])


def token_ids(prompt: Any) -> Ids:
    """Returns a sequence of ints in the form that the engine takes. Raises RequestError for any
    other object; the engine checks the range of the ids."""
    if isinstance(prompt, (Mapping, *BYTES)):  # NumPy would misread bytes
        kind = type(prompt).__name__
        advice = f"a {kind}; give its prompt or prompt_token_ids alone"
        raise RequestError(
            f"expected text or token ids, got {advice if isinstance(prompt, Mapping) else kind}"
        )
    if is_masked(prompt):
        raise RequestError("expected a plain array, got a masked one; .filled(value) makes one")
    if is_longer_than(prompt, MAX_ITEMS):
        raise RequestError(f"expected at most {MAX_ITEMS} token ids, got more")
    try:
        array = np.asarray(prompt)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(
            f"expected a sequence of token ids, got a {type(prompt).__name__}: {error}"
        ) from error
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise RequestError(
            f"expected integer token ids of one dim, got dtype {array.dtype} and shape "
            f"{array.shape}"
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > 2**31 - 1:
        raise RequestError(f"expected ids in [0, vocab_size), got {low if low < 0 else high}")
    return np.array(array, dtype=np.int32)
