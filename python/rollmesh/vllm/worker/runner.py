"""Turns vLLM's SchedulerOutput into one step of the engine (csrc/scheduler/external_scheduler.h)
and its result into a ModelRunnerOutput.

vLLM sends only changes: whole new requests, new pages of running requests, and names of finished
requests. The engine keeps tokens, random streams, records and block tables; this file keeps the
number and parameters of each request. A preempted request comes back as a cached request (with new
pages and all its tokens) or as a new one (with its tokens so far); in both cases its name is known
here.

A request can fail without ending others: its name and reason are returned with the step's output
(scheduler.py). Without weights, or while weights or KV are asleep, all requests of the step fail.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
from vllm.logger import init_logger
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
)

from rollmesh.distributed.rank_engine import ALONE, RankEngine
from rollmesh.errors import CapacityError, Error, NotSyncedError, RequestError, StateError
from rollmesh.model.spec import ModelSpec
from rollmesh.runtime.engine_views import Floats, Ids
from rollmesh.runtime.messages import reason
from rollmesh.vllm.scheduler import CACHED, FAILED
from rollmesh.vllm.weight_updates import WeightUpdates
from rollmesh.vllm.worker import sampling
from rollmesh.vllm.worker.external_edits import EditedRow, ExternalEdits, bitmask_rows

HAS_FAILED, EXTERNAL_DRAWS = -2, -3  # instead of a token: csrc/scheduler/external_scheduler.h
NO_STEP = (NotSyncedError, StateError)  # the step fails on all ranks before it changes anything
LOGGER = init_logger("vllm.rollmesh")  # vLLM shows loggers below "vllm"
MOST_FAILED = 4096  # number of failed requests whose reason is kept for why_failed


@dataclass(slots=True)
class _ScheduledRequest:
    """A request of vLLM and its number in the engine."""

    number: int
    params: Any
    prompt: Ids
    logprobs: int | None  # number of most likely tokens beside the drawn one; None: no logprobs
    prompt_logprobs: int | None  # the same for the prompt
    prompt_given: bool  # whether vLLM has received its prompt logprobs
    external_draws: bool  # whether vLLM's functions edit its logits before the draw
    routed: int  # number of positions whose routing vLLM has, or did not request


class _Part(NamedTuple):
    """The part of a step that belongs to one request."""

    name: str
    request: _ScheduledRequest
    computed: int
    rows: int
    pages: Sequence[int]
    replace: bool


class _Drawn(NamedTuple):
    """The draws of a step, with one entry for each part, in order."""

    tokens: Ids  # −1: not drawn
    logprobs: Floats
    sampling_logprobs: Floats
    ranks: Ids


class Runner:
    """The requests of one worker."""

    def __init__(
        self,
        engine: RankEngine,
        updates: WeightUpdates,
        edits: ExternalEdits,
        spec: ModelSpec,
    ):
        self.engine, self.updates, self._edits = engine, updates, edits
        self._spec, self._vocab_size = spec, spec.vocab_size
        # TRL and verl use both attributes to push weights into the model.
        self.model = updates.model
        self.vllm_config = updates.vllm_config
        self._max_model_len = self.vllm_config.model_config.max_model_len
        self._logprobs_mode = self.vllm_config.model_config.logprobs_mode
        self._requests: dict[str, _ScheduledRequest] = {}
        self._accepted = 0  # number of requests so far; used for the seed of a request without one
        self._scheduled: Any = None
        self._failed: dict[str, str] = {}  # the last requests that failed, and why

    # -------------------------------------------------------------------------------------- a step
    def execute_model(
        self, scheduled: Any, intermediate_tensors: None = None
    ) -> ModelRunnerOutput | None:
        """Stores the scheduled step for sample_tokens, which receives the grammars and runs it. If
        the step has no rows, only releases finished requests."""
        if scheduled.total_num_scheduled_tokens:
            self._scheduled = scheduled
            return None
        self._release_finished(scheduled)
        return EMPTY_MODEL_RUNNER_OUTPUT

    def sample_tokens(self, grammar: Any) -> ModelRunnerOutput:
        scheduled, self._scheduled = self._scheduled, None
        if scheduled is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        try:
            output = self._make_step(scheduled, grammar)
        except BaseException as error:
            self.engine.abort_unless_shared(error)
            raise
        self._remember(getattr(output, FAILED, {}))
        return output

    def _make_step(self, scheduled: Any, grammar: Any) -> ModelRunnerOutput:
        names, failed = list(scheduled.num_scheduled_tokens), dict[str, str]()
        self._release_finished(scheduled)
        why = self._commit_open_sync()
        if why is None:
            try:
                parts = self._parts(scheduled, failed)
                drawn = self._step(parts, grammar)
            except NO_STEP as error:
                why = error
        if why is not None:
            self._fail(scheduled)
            return _output(names, {}, dict.fromkeys(names, reason(why)))
        tokens = dict(zip((part.name for part in parts), drawn.tokens.tolist(), strict=True))
        failed |= {
            part.name: self._why(part.request) for part in parts if tokens[part.name] == HAS_FAILED
        }
        output = _output(names, tokens, failed)
        output.logprobs = self._logprobs(output.req_id_to_index, parts, drawn)
        begun = {part.name: part.request.number for part in parts if part.computed and part.replace}
        views = {name: self.engine.request(number) for name, number in begun.items()}
        setattr(output, CACHED, {name: view["num_cached_tokens"] for name, view in views.items()})
        given = {part.name: part.request for part in parts if tokens[part.name] >= 0}
        for name, request in given.items():
            if request.prompt_logprobs is not None and not request.prompt_given:
                output.prompt_logprobs_dict[name] = self._prompt_logprobs(request)
        if self.vllm_config.aux_output_config.enabled:
            output.aux_output_connector_output = {
                name: self._experts(request) for name, request in given.items()
            }
        return output

    def idle_step(self) -> None:
        """Takes part in a step in which this rank has no rows but other ranks may have some."""
        try:
            if self._commit_open_sync() is None:
                self._step([], None)
        except NO_STEP:
            pass  # the other ranks cannot run the step either
        except BaseException as error:
            self.engine.abort_unless_shared(error)
            raise

    def _commit_open_sync(self) -> Error | None:
        """Commits the set that load_weights has pushed. Returns the error of a wrong set, which is
        the same on all ranks and ends only the requests of this step. Also logs the error, since a
        trainer that reads only tokens, such as TRL, would not show it."""
        try:
            self.updates.commit_open_sync()
        except ALONE:
            raise
        except Error as error:
            LOGGER.error("the weights that load_weights was given are dropped: %s", reason(error))
            return error
        return None

    def _remember(self, failed: dict[str, str]) -> None:
        """Keeps the first reason of each failed request. vLLM may schedule a failed request once
        more before it reads the failure."""
        for name, why in failed.items():
            self._failed.setdefault(name, why)
        for name in list(self._failed)[:-MOST_FAILED]:
            del self._failed[name]

    def why_failed(self, name: str) -> str | None:
        """Returns why the newest request of this id failed, or None. The server's cmpl-7 may be
        several requests here: 1_cmpl-7-0-93d2a0ff is the second sample of its first prompt."""
        part = re.compile(rf"(\d+_)?{re.escape(name)}([-_]\d+)?(-[0-9a-f]{{8}})?")
        known = (why for its, why in reversed(self._failed.items()) if part.fullmatch(its))
        return next(known, None)

    def _fail(self, scheduled: Any) -> None:
        """Fails the requests of a step that did not run, and marks their new pages as empty, since
        vLLM counts them as computed."""
        for name in scheduled.num_scheduled_tokens:
            if name in self._requests:
                self.engine.external_fail(self._requests[name].number)
        added = [new.block_ids for new in scheduled.scheduled_new_reqs]
        for pages in (*added, *scheduled.scheduled_cached_reqs.new_block_ids):
            self._forget(pages)

    def _forget(self, pages: Any) -> None:
        if pages:
            self.engine.external_invalidate_pages(np.array(pages[0], np.int32))

    def _step(self, parts: list[_Part], grammar: Any) -> _Drawn:
        most = sum(part.request.external_draws for part in parts)
        logits, stats = (np.empty((most, n), np.float32) for n in (self._vocab_size, 2))
        columns, _ = self.engine.external_step(
            _numbers(parts),
            np.array([part.computed for part in parts], np.int64),
            np.array([part.rows for part in parts], np.int64),
            np.array([part.replace for part in parts], np.uint8),
            np.array([len(part.pages) for part in parts], np.int64),
            np.array([page for part in parts for page in part.pages], np.int32),
            logits if most else None,
            stats if most else None,
        )
        drawn = _Drawn(*columns)
        waiting = np.flatnonzero(drawn.tokens == EXTERNAL_DRAWS)
        if len(waiting):
            rows = drawn.ranks[waiting]  # the row of each request, including failed ones
            columns = self._draw([parts[i] for i in waiting], logits[rows], stats[rows], grammar)
            for column, values in zip(drawn, columns, strict=True):
                column[waiting] = values
        return drawn

    def _draw(
        self, parts: list[_Part], raw: Floats, stats: Any, grammar: Any
    ) -> tuple[NDArray[Any], ...]:
        """Edits logits, then makes the engine draw from them. Returns the columns of _Drawn, in the
        order of the parts."""
        masks = bitmask_rows(grammar)
        rows = []
        for name, request, *_ in parts:
            generated = self.engine.tokens(request.number, 0, 0)[1].tolist()
            rows.append(EditedRow(name, request.params, request.prompt, generated, masks.get(name)))
        edited = self._edits.edit(raw, rows, self.model.never_drawn)
        drawn: tuple[NDArray[Any], ...] = self.engine.external_draw(
            _numbers(parts), raw, stats, edited
        )
        return drawn

    # -------------------------------------------------------------------------------- vLLM's input
    def _release_finished(self, scheduled: Any) -> None:
        """Releases finished requests in the order of their numbers, since the order of vLLM's sets
        differs between processes."""
        ended = [
            self._requests.pop(name)
            for name in scheduled.finished_req_ids
            if name in self._requests
        ]
        for number in sorted(request.number for request in ended):
            self.engine.abort(number)
            self.engine.release(number)
        for name in scheduled.preempted_req_ids or ():
            if name in self._requests:
                self.engine.external_preempt(self._requests[name].number)

    def _parts(self, scheduled: Any, failed: dict[str, str]) -> list[_Part]:
        """Returns the parts of a step, in vLLM's order. Adds requests that the engine refuses to
        `failed`."""
        rows, cached = scheduled.num_scheduled_tokens, scheduled.scheduled_cached_reqs
        parts: dict[str, _Part] = {}
        for new in scheduled.scheduled_new_reqs:
            name, pages = new.req_id, new.block_ids
            try:
                request = self._resumed(new) or self._add(new)
            except (RequestError, CapacityError) as error:
                failed[name] = reason(error)
                self._forget(pages)
                continue
            parts[name] = _Part(name, request, new.num_computed_tokens, rows[name], pages[0], True)
        for name, pages, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name not in self._requests:
                failed[name] = "it failed in an earlier step"
                self._forget(pages)
                continue
            request, replace = self._requests[name], name in cached.resumed_req_ids
            if replace and name in cached.all_token_ids:
                self._set_tokens(request, cached.all_token_ids[name])
            new_pages = pages[0] if pages else ()
            parts[name] = _Part(name, request, computed, rows[name], new_pages, replace)
        return [parts[name] for name in rows if name in parts]

    def _add(self, new: Any) -> _ScheduledRequest:
        params = new.sampling_params
        prompt = sampling.token_ids("the prompt", new.prompt_token_ids, self._vocab_size)
        sampling.refuse(params)
        sampling.refuse_mode(params, self._logprobs_mode)
        most = min(
            params.max_tokens or self._max_model_len, max(self._max_model_len - len(prompt), 1)
        )
        never = self.model.never_drawn
        asked = sampling.engine_request(
            params,
            self._accepted,
            most,
            self._vocab_size,
            bool(self._edits.custom),
            never_draws=len(never) > 0,
        )
        number = self.engine.add(
            prompt,
            never if len(never) else sampling.banned_ids(params, self._vocab_size),
            asked,
            None,
        )
        self._accepted += 1
        self._requests[new.req_id] = request = _ScheduledRequest(
            number,
            params,
            prompt,
            None if params.logprobs is None else asked.logprobs,
            asked.prompt_logprobs if params.prompt_logprobs is not None else None,
            False,
            asked.external_draws,
            params.routed_experts_prompt_start,
        )
        return request

    def _resumed(self, new: Any) -> _ScheduledRequest | None:
        """Returns the known request if vLLM sends a preempted request as a new one."""
        request = self._requests.get(new.req_id)
        if request is None:
            return None
        if not np.array_equal(new.prompt_token_ids, request.prompt):
            raise RequestError(
                f"expected the prompt of {len(request.prompt)} tokens that this request had, got "
                f"one of {len(new.prompt_token_ids)}: streaming input is not supported"
            )
        self._set_tokens(request, new.prefill_token_ids or new.prompt_token_ids)
        return request

    def _set_tokens(self, request: _ScheduledRequest, tokens: Iterable[int]) -> None:
        """Sets the tokens of a request to those that vLLM has. Tokens that vLLM dropped are drawn
        again."""
        known = np.array(list(tokens)[len(request.prompt) :], np.int32)
        self.engine.external_tokens(request.number, known)
        request.routed = min(request.routed, len(request.prompt) + len(known) - 1)
        if not len(known):  # vLLM has dropped the records sent with the first token
            request.routed = min(request.routed, request.params.routed_experts_prompt_start)
            request.prompt_given = False

    # ------------------------------------------------------------------------------- vLLM's output
    def _why(self, request: _ScheduledRequest) -> str:
        return reason(self.engine.request(request.number)["error"] or StateError("it has ended"))

    def _logprobs(
        self, index: dict[str, int], parts: list[_Part], drawn: _Drawn
    ) -> LogprobsLists | None:
        """Returns one row per request: the drawn token first, then the most likely ones."""
        asking = [
            (i, part)
            for i, part in enumerate(parts)
            if part.request.logprobs is not None and drawn.tokens[i] >= 0
        ]
        if not asking:
            return None
        most = max(part.request.logprobs or 0 for _, part in asking)
        ids = np.zeros((len(index), most + 1), np.int32)
        values = np.zeros((len(index), most + 1), np.float32)
        ranks = np.zeros(len(index), np.int32)
        here, there = [i for i, _ in asking], [index[part.name] for _, part in asking]
        ids[there, 0], ranks[there] = drawn.tokens[here], drawn.ranks[here]
        is_raw = self._logprobs_mode == "raw_logprobs"
        values[there, 0] = (drawn.logprobs if is_raw else drawn.sampling_logprobs)[here]
        for k in sorted({part.request.logprobs or 0 for _, part in asking} - {0}):
            same = [part for _, part in asking if part.request.logprobs == k]
            rows = [index[part.name] for part in same]
            ids[rows, 1 : k + 1], values[rows, 1 : k + 1] = self.engine.external_top(
                _numbers(same), k
            )
        return LogprobsLists(ids, values, ranks)

    def _experts(self, request: _ScheduledRequest) -> AuxRequestOutput:
        """Returns the routed experts of the positions since the last token: [n, layers, k], 0 in
        layers without experts."""
        start = request.routed
        rows = self.engine.external_routed(request.number, start)
        request.routed += len(rows)
        narrowest = np.uint8 if self._spec.num_experts <= 256 else np.uint16
        all_layers = np.zeros((len(rows), self._spec.num_hidden_layers, rows.shape[2]), narrowest)
        all_layers[:, np.flatnonzero(self._spec.is_moe_layer)] = rows
        return AuxRequestOutput(start, all_layers)

    def _prompt_logprobs(self, request: _ScheduledRequest) -> LogprobsTensors:
        """Returns the logprobs of all prompt tokens except the first. They are sent with the first
        token after the prompt."""
        view: Any = self.engine.request(request.number)  # with the arrays that _add requested
        k = request.prompt_logprobs or 0
        request.prompt_given = True
        ids, values = request.prompt[1:, None], view["prompt_logprobs"][:, None]
        if k:
            ids = np.hstack([ids, view["prompt_top_ids"]])
            values = np.hstack([values, view["prompt_top_logprobs"]])
        return LogprobsTensors(*map(_tensor, (ids, values, view["prompt_ranks"])))


def _numbers(parts: list[_Part]) -> NDArray[np.uint64]:
    return np.array([part.request.number for part in parts], np.uint64)


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    """Converts an array to a tensor. torch.from_numpy gives an empty array (for a prompt of one
    token) strides of 0, which vLLM cannot serialise."""
    tensor = torch.from_numpy(array)
    return tensor if array.size else torch.empty(array.shape, dtype=tensor.dtype)


def _output(names: list[str], tokens: dict[str, int], failed: dict[str, str]) -> ModelRunnerOutput:
    output = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[
            [token] if (token := tokens.get(name, -1)) >= 0 else [] for name in names
        ],
    )
    if failed:
        setattr(output, FAILED, failed)
    return output
