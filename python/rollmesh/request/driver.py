"""Runs requests: generate, submit and poll, score. Each holds the generator's lock for one engine
step at a time, so that calls of other threads run between steps. On an exception a call aborts and
releases the requests that it added.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.distributed.rank_engine import RankEngine
from rollmesh.errors import CapacityError, DeadlineError, Error, RequestError, StateError
from rollmesh.request.arguments import naming_prompt, param_list, prompt_list, request_ids
from rollmesh.request.outputs import RequestOutput
from rollmesh.request.requests import Requests, token_ids
from rollmesh.request.sampling import SamplingParams
from rollmesh.request.text import Chat, TextCodec
from rollmesh.runtime.arguments import choice, deadline_of, integer, part_names
from rollmesh.runtime.engine_views import Ids
from rollmesh.runtime.progress import Progress
from rollmesh.runtime.turn import Turn

PAUSE_POLL_S = 0.02
Prompt = str | Chat | Sequence[int] | NDArray[np.integer[Any]]


class Driver:
    """The calls of one generator that run requests."""

    def __init__(
        self,
        engine: RankEngine,
        requests: Requests,
        codec: TextCodec | None,
        turn: Turn,
    ):
        self._engine, self._requests, self._codec = engine, requests, codec
        self._turn = turn
        self._submitted: set[int] = set()  # ids for poll
        self._kept: dict[
            int, RequestOutput
        ] = {}  # taken by a poll that then raised; the next one returns them

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        on_error: str,
        timeout: float | None,
    ) -> list[RequestOutput]:
        """See Generator.generate, as below."""
        choice("on_error", on_error, ("raise", "return"))
        deadline = deadline_of(timeout)
        items = prompt_list(prompts)
        chosen = param_list(params, len(items))
        ids: list[int | None] = []
        errors: dict[int, Error] = {}

        def add() -> None:
            for index, (prompt, param) in enumerate(zip(items, chosen, strict=True)):
                try:
                    ids.append(self._add(prompt, param, index))
                except (RequestError, CapacityError) as error:
                    ids.append(None)
                    errors[index] = error

        try:
            with self._turn.take(deadline):
                self._before_step()
                self._requests.all_or_none(add)
            added = [request for request in ids if request is not None]
            late = self._drive(added, deadline, Progress(len(added), use_tqdm))
            with self._turn.take():
                outputs = [
                    _refused(item, errors[index])
                    if request is None
                    else self._requests.output(request)
                    for index, (item, request) in enumerate(zip(items, ids, strict=True))
                ]
                for request in added:
                    self._requests.release(request)
        except BaseException as error:
            self._forget([request for request in ids if request is not None], error)
            raise
        for index, output in enumerate(outputs):
            if output.request_id in late and output.error is None:
                late_error = DeadlineError(
                    f"request {output.request_id} did not finish within {timeout} s"
                )
                outputs[index] = replace(output, error=late_error)
        raised = [output.error for output in outputs if output.error is not None]
        if raised and on_error == "raise":
            raised[0].outputs = outputs  # type: ignore[attr-defined]
            raise raised[0]
        return outputs

    def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[int]:
        items = prompt_list(prompts)
        chosen = param_list(params, len(items))
        ids: list[int] = []

        def add() -> None:
            for index, (prompt, param) in enumerate(zip(items, chosen, strict=True)):
                ids.append(self._add(prompt, param, index))
            self._submitted.update(ids)

        try:
            with self._turn.take():
                self._requests.all_or_none(add)
            return ids
        except BaseException as error:
            self._forget(
                ids, error
            )  # what a signal's handler has raised may have come after all were added
            raise

    def poll(self, min_outputs: int, timeout: float | None) -> list[RequestOutput]:
        min_outputs = integer("min_outputs", min_outputs, 0, 2**63 - 1)
        deadline = deadline_of(timeout)
        outputs: dict[int, RequestOutput] = {}
        more = True
        try:
            while more:
                try:
                    with self._turn.take(self._engine.own_deadline(deadline)):
                        more = self._poll_step(outputs, deadline) and len(outputs) < min_outputs
                except DeadlineError:
                    break  # the turn did not come in time
            return [outputs[request] for request in sorted(outputs)]
        except BaseException as error:
            self._kept.update(outputs)
            self.abort_unless_shared(error)
            raise

    def _poll_step(self, outputs: dict[int, RequestOutput], deadline: float | None) -> bool:
        """One step for poll; what is finished goes into `outputs`. False: another step would bring
        nothing, or too late. An exception at any point loses nothing: an output is in `outputs`, in
        `_kept` or in the engine, perhaps in two of them."""
        for request in list(self._kept):
            outputs[request] = self._kept[request]
            del self._kept[request]
        self._submitted.intersection_update(self._requests.live())
        waiting = self._submitted - self._requests.done_of(self._submitted)
        rows, late = 0, False
        if waiting:  # paused too: other ranks tell what they have aborted
            rows, late = self._requests.step_with_all(deadline)
        for request in sorted(self._requests.done_of(self._submitted)):
            outputs[request] = self._requests.output_or_error(request)
            self._requests.release(request)
            self._submitted.discard(request)
        return bool(rows and self._submitted and not late)

    def abort(self, ids: int | Sequence[int] | None) -> None:
        numbers = [] if ids is None else request_ids(ids)
        with self._turn.take():
            known = self._requests.live()
            chosen = known if ids is None else set(known).intersection(numbers)
            self._requests.abort(chosen)

    def score(
        self, sequences: Sequence[Ids], params: Sequence[SamplingParams | None], vocab_size: int = 0
    ) -> list[NDArray[np.float32]]:
        """See Generator.score. vocab_size > 0: as Generator.logits."""
        ids: list[int] = []

        def add() -> None:
            for index, (sequence, param) in enumerate(zip(sequences, params, strict=True)):
                with naming_prompt(index):
                    ids.append(self._requests.add_score(sequence, param, vocab_size))

        try:
            with self._turn.take():
                self._before_step()
                self._requests.all_or_none(add)
            self._drive(ids, None, Progress(len(ids), False))
            with self._turn.take():
                return [self._requests.take_scores(request) for request in ids]
        except BaseException as error:
            self._forget(ids, error)
            raise

    def submit_one(self, prompt: Prompt, params: SamplingParams) -> int:
        """As submit, but poll does not know of it. The caller holds the turn."""
        return self._add(prompt, params, 0)

    def _add(self, prompt: Prompt, params: SamplingParams, index: int) -> int:
        with naming_prompt(index):
            if not isinstance(prompt, (str, Chat)):
                return self._requests.add(token_ids(prompt), params)
            if self._codec is None:
                raise RequestError(
                    "expected token ids, since the generator has no tokenizer, got text"
                )
            if isinstance(prompt, Chat):
                ids = self._codec.encode_chat(prompt.messages, prompt.options)
                return self._requests.add(token_ids(ids), params)
            return self._requests.add(token_ids(self._codec.encode(prompt)), params, prompt)

    def _before_step(self) -> None:
        """StateError if the generator is paused or asleep."""
        if self._engine.paused:
            raise StateError("the generator is paused; resume() it first")
        asleep = self._engine.stats()["asleep"]
        if asleep:
            raise StateError(f"{part_names(asleep)} asleep; wake() first")

    def _drive(self, ids: Sequence[int], deadline: float | None, progress: Progress) -> set[int]:
        """Steps until all are done. Returns those that the deadline cut off. Waits while another
        thread has paused the generator."""
        open_ids = set(ids)
        try:
            with progress:
                while open_ids:
                    if deadline is not None and self._engine.any_in_lockstep(
                        time.monotonic() >= deadline
                    ):
                        self._cut_off(open_ids)
                        deadline = None
                    done = self._drive_step(open_ids)
                    open_ids -= done
                    progress.advance(len(done))
                    if not done and self._engine.paused:
                        time.sleep(PAUSE_POLL_S)
        except BaseException as error:
            self.abort_unless_shared(error)
            raise
        return self._engine.late(ids)

    def _drive_step(self, open_ids: set[int]) -> set[int]:
        """Those of open_ids that are done, after a step unless some are already."""
        with self._turn.take():
            done = self._requests.done_of(open_ids)
            if not done and not self._engine.paused:
                rows = self._requests.step_for(open_ids)
                done = self._requests.done_of(open_ids)
                if rows == 0 and not done:
                    self._before_step()
                    raise Error(
                        f"the engine has nothing to do, but {len(open_ids)} requests are not "
                        "finished"
                    )
            return done

    def _cut_off(self, ids: set[int]) -> None:
        with self._turn.take():
            self._engine.cut_off(ids - self._requests.done_of(ids))

    def abort_unless_shared(self, error: BaseException) -> None:
        """Tells the mesh that a call ends on this rank by an exception."""
        if not self._turn.is_gone():
            self._engine.abort_unless_shared(error)

    def _forget(self, ids: Sequence[int], error: BaseException) -> None:
        """Clean-up after an exception: nothing of the call stays in the engine. What user code
        raised before the first step or after the last keeps no other rank waiting."""
        if isinstance(error, MemoryError) or not isinstance(error, Exception):
            self.abort_unless_shared(error)
        if ids and not self._turn.is_gone():
            with self._turn.take():
                self._requests.forget(ids)


def sequences_of(ids_list: Sequence[Prompt]) -> list[Ids]:
    sequences = []
    for index, ids in enumerate(prompt_list(ids_list)):
        with naming_prompt(index):
            sequences.append(token_ids(ids))
    return sequences


def _refused(prompt: Any, error: Error) -> RequestOutput:
    """The output of a request that the engine did not take."""
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput(-1, text, np.zeros(0, np.int32), [], True, error=error)
