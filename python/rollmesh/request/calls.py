"""The calls that add requests: generate, score, submit and poll. Parts of them run in the engine's
thread (loop.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.distributed.rank_engine import RankEngine
from rollmesh.errors import CapacityError, DeadlineError, Error, RequestError, StateError
from rollmesh.request.arguments import naming_prompt, param_list, prompt_list, request_ids
from rollmesh.request.loop import Call, EngineLoop
from rollmesh.request.outputs import RequestOutput
from rollmesh.request.requests import Requests, token_ids
from rollmesh.request.sampling import SamplingParams
from rollmesh.request.text import Chat, TextCodec
from rollmesh.runtime.arguments import choice, deadline_of, integer, part_names
from rollmesh.runtime.engine_views import Ids
from rollmesh.runtime.progress import Progress

Prompt = str | Chat | Sequence[int] | NDArray[np.integer[Any]]


class Calls:
    """The calls of one generator."""

    def __init__(
        self, engine: RankEngine, requests: Requests, codec: TextCodec | None, loop: EngineLoop
    ):
        self.engine, self.requests, self.loop = engine, requests, loop
        self._codec = codec
        self.submitted: set[int] = set()  # ids of submit, for poll
        self.kept: dict[int, RequestOutput] = {}  # outputs of a poll that raised, for the next one

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        on_error: str,
        timeout: float | None,
    ) -> list[RequestOutput]:
        """See Generator.generate."""
        choice("on_error", on_error, ("raise", "return"))
        deadline = deadline_of(timeout)
        items = prompt_list(prompts)
        chosen = param_list(params, len(items))
        outputs: list[RequestOutput | None] = [None] * len(items)
        places: list[int] = []  # index of each prompt that the engine accepted

        def add(call: Call) -> list[int]:
            self._check_ready()
            added: list[int] = []
            for index, (prompt, param) in enumerate(zip(items, chosen, strict=True)):
                call.check_wanted()
                try:
                    added.append(self.add(prompt, param, index))
                    places.append(index)
                except (RequestError, CapacityError) as error:
                    outputs[index] = _refused(prompt, error)
            return added

        call = _Steps(self, add, self.requests.output, deadline)
        with Progress(len(items), use_tqdm) as progress:
            call.reports = progress.is_shown
            done = self.loop.run(call, deadline, progress.advance)
        for index, output in zip(places, done, strict=True):
            if output.request_id in call.late and output.error is None:
                words = f"request {output.request_id} did not finish within {timeout} s"
                output = replace(output, error=DeadlineError(words))
            outputs[index] = output
        told = [output for output in outputs if output is not None]
        raised = [output.error for output in told if output.error is not None]
        if raised and on_error == "raise":
            raised[0].outputs = told  # type: ignore[attr-defined]
            raise raised[0]
        return told

    def score(
        self, sequences: Sequence[Ids], params: Sequence[SamplingParams | None], vocab_size: int = 0
    ) -> list[NDArray[np.float32]]:
        """See Generator.score. vocab_size > 0: see Generator.logits."""

        def add(call: Call) -> list[int]:
            self._check_ready()
            added = []
            for index, (sequence, param) in enumerate(zip(sequences, params, strict=True)):
                call.check_wanted()
                with naming_prompt(index):
                    added.append(self.requests.add_score(sequence, param, vocab_size))
            return added

        scores: list[NDArray[np.float32]] = self.loop.run(
            _Steps(self, add, self.requests.scores, None)
        )
        return scores

    def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[int]:
        items = prompt_list(prompts)
        ids: list[int] = self.loop.run(_Submit(self, items, param_list(params, len(items))))
        return ids

    def poll(self, min_outputs: int, timeout: float | None) -> list[RequestOutput]:
        min_outputs = integer("min_outputs", min_outputs, 0, 2**63 - 1)
        deadline = deadline_of(timeout)
        poll = _Poll(self, min_outputs, deadline)
        try:
            outputs: list[RequestOutput] = self.loop.run(poll, deadline)
        except DeadlineError:  # the call did not begin before the deadline
            return []
        return outputs

    def abort(self, ids: int | Sequence[int] | None) -> None:
        numbers = None if ids is None else request_ids(ids)

        def abort() -> None:
            known = self.requests.live()
            self.requests.abort(known if numbers is None else set(known).intersection(numbers))

        self.loop.call(abort)

    # ---------------------------------------------------------------------- in the engine's thread
    def add(self, prompt: Prompt, params: SamplingParams, index: int) -> int:
        """Queues one prompt."""
        with naming_prompt(index):
            if not isinstance(prompt, (str, Chat)):
                return self.requests.add(token_ids(prompt), params)
            if self._codec is None:
                raise RequestError(
                    "expected token ids, since the generator has no tokenizer, got text"
                )
            if isinstance(prompt, Chat):
                ids = self._codec.encode_chat(prompt.messages, prompt.options)
                return self.requests.add(token_ids(ids), params)
            return self.requests.add(token_ids(self._codec.encode(prompt)), params, prompt=prompt)

    def all_or_none(self, add: Callable[[], list[int]]) -> list[int]:
        """Calls `add`, which adds requests, and returns their ids. If it raises, removes the
        requests that it added."""
        before = self.requests.live()
        try:
            return add()
        except BaseException:
            self.requests.forget(set(self.engine.ids()).difference(before))
            raise

    def _check_ready(self) -> None:
        """Raises StateError if the generator is paused or asleep."""
        if self.engine.paused:
            raise StateError("the generator is paused; resume() it first")
        asleep = self.engine.stats()["asleep"]
        if asleep:
            raise StateError(f"{part_names(asleep)} asleep; wake() first")


class _Steps(Call):
    """Adds requests, runs them until they are finished, and returns a result for each."""

    def __init__(
        self,
        calls: Calls,
        add: Callable[[Call], list[int]],
        take: Callable[[int], Any],
        deadline: float | None,
    ):
        super().__init__(lambda: calls.all_or_none(lambda: add(self)))
        self._calls, self._take, self.deadline = calls, take, deadline
        self.reports = False  # whether to report the number of finished requests to the caller
        self._is_cut = False  # whether the deadline has passed
        self.late: set[int] = set()  # requests aborted by the deadline
        self._ids: list[int] = []
        self._open: set[int] = set()

    def begin(self) -> bool:
        super().begin()
        self._ids, self._open = self.result, set(self.result)
        return self._is_finished()

    def look(self, finished: set[int], rows: int, late: bool) -> bool:
        done = self._open & finished
        if self.reports and done:
            self.news.put(len(done))
        if done:
            self._open -= done
            self._calls.requests.raise_fault(done)
        elif rows == 0 and not late and not self._calls.engine.paused:
            raise Error(
                f"the engine has nothing to do, but {len(self._open)} requests are not finished"
            )
        if late and self._open and not self._is_cut:
            self._calls.requests.cut_off(self._open)
            self._is_cut, self.deadline = True, None
        return self._is_finished()

    def _is_finished(self) -> bool:
        if self._open:
            return False
        self.late = self._calls.requests.late.intersection(self._ids)
        self.result = [self._take(request) for request in self._ids]
        for request in self._ids:
            self._calls.requests.release(request)
        return True

    def drop(self) -> None:
        self._calls.requests.forget(self._ids)


class _Submit(Call):
    """Queues all prompts, or none after an error."""

    def __init__(self, calls: Calls, prompts: list[Any], params: list[SamplingParams]):
        super().__init__(lambda: calls.all_or_none(self._add))
        self._calls, self._prompts, self._params = calls, prompts, params

    def _add(self) -> list[int]:
        ids = []
        for index, (prompt, param) in enumerate(zip(self._prompts, self._params, strict=True)):
            self.check_wanted()
            ids.append(self._calls.add(prompt, param, index))
        self._calls.submitted.update(ids)
        return ids

    def undo(self) -> None:
        self._calls.submitted.difference_update(self.result)
        self._calls.requests.forget(self.result)


class _Poll(Call):
    """Runs steps until enough submitted requests are finished."""

    def __init__(self, calls: Calls, min_outputs: int, deadline: float | None):
        super().__init__(lambda: None)
        self._calls, self._min_outputs, self.deadline = calls, min_outputs, deadline
        self._outputs: dict[int, RequestOutput] = {}

    def begin(self) -> bool:
        super().begin()
        calls = self._calls
        self._outputs, calls.kept = calls.kept, {}
        calls.submitted.intersection_update(calls.requests.live())
        finished = calls.engine.finished()
        return calls.submitted <= finished and self.look(finished, 0, False)

    def look(self, finished: set[int], rows: int, late: bool) -> bool:
        calls = self._calls
        for request in sorted(calls.submitted & finished):
            self._outputs[request] = calls.requests.output_or_error(request)
            calls.requests.release(request)
            calls.submitted.discard(request)
        if rows and calls.submitted and not late and len(self._outputs) < self._min_outputs:
            return False
        self.result = [self._outputs[request] for request in sorted(self._outputs)]
        return True

    def drop(self) -> None:
        self._calls.kept.update(self._outputs)

    undo = drop


def sequences_of(ids_list: Sequence[Prompt]) -> list[Ids]:
    sequences = []
    for index, ids in enumerate(prompt_list(ids_list)):
        with naming_prompt(index):
            sequences.append(token_ids(ids))
    return sequences


def _refused(prompt: Any, error: Error) -> RequestOutput:
    """Returns the output of a request that the engine did not accept."""
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput(-1, text, np.zeros(0, np.int32), [], True, error=error)
