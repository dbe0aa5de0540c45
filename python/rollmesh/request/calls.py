"""The calls of Generator that add requests. Parts of them run in the engine's thread (loop.py).

agenerate and astream are calls for which no thread waits. Their outputs go to the coroutine by
call_soon_threadsafe, so an event loop never waits for a step. Errors of a request are raised in its
coroutine; errors of the engine are raised in all coroutines.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np

from rollmesh.distributed.leading import by_every_rank
from rollmesh.distributed.rank_engine import RankEngine
from rollmesh.errors import CapacityError, DeadlineError, Error, RequestError, StateError
from rollmesh.model.spec import ModelSpec
from rollmesh.request.arguments import naming_prompt, param_list, prompt_list, request_ids
from rollmesh.request.loop import Call, EngineLoop
from rollmesh.request.outputs import RequestOutput
from rollmesh.request.requests import Requests, token_ids
from rollmesh.request.sampling import SamplingParams, logit_edit_names
from rollmesh.request.text import Chat, Prompt, TextCodec
from rollmesh.runtime.arguments import boolean, choice, deadline_of, integer, items_of, part_names
from rollmesh.runtime.engine_views import Floats, Ids
from rollmesh.runtime.messages import shown
from rollmesh.runtime.progress import progress


class Calls:
    """The calls of Generator that add requests."""

    spec: ModelSpec

    def __init__(self, engine: RankEngine, requests: Requests, codec: TextCodec | None):
        self._engine, self._requests, self._codec = engine, requests, codec
        self._submitted: set[int] = set()  # ids of submit, for poll
        # Outputs of a poll that raised, for the next one.
        self._kept: dict[int, RequestOutput] = {}
        self._loop = EngineLoop(engine, requests)

    @by_every_rank
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        on_error: Literal["raise", "return"] = "raise",
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts. Returns one RequestOutput for each prompt, in the same order.

        prompts   a prompt or a list of prompts, each a text or token ids
        params    one SamplingParams for all prompts, or one for each; None: SamplingParams()
        on_error  "raise": finishes the other requests, then raises the first error, with all
                  outputs in its attribute `outputs`; "return": each error is in its output's
                  `error`
        timeout   seconds; requests that still run then are aborted with a DeadlineError

        Errors of a single request: RequestError, CapacityError, NumericsError, DeadlineError.
        Errors of the whole call: NotSyncedError, StateError (closed, paused, asleep). Ctrl-C and
        any other exception abort all requests of the call.
        """
        choice("on_error", on_error, ("raise", "return"))
        items = prompt_list(prompts)
        chosen = param_list(params, len(items))
        refused: dict[int, RequestOutput] = {}  # by the index of the prompt

        def add(index: int, prompt: Prompt, param: SamplingParams) -> int | None:
            try:
                return self._add(index, prompt, param)
            except (RequestError, CapacityError) as error:
                text, no_ids = prompt if isinstance(prompt, str) else None, np.zeros(0, np.int32)
                refused[index] = RequestOutput(-1, text, no_ids, [], True, error=error)
                return None

        call = _Steps(self, add, zip(items, chosen, strict=True), self._requests.output, timeout)
        with progress(len(items), boolean("use_tqdm", use_tqdm)) as advance:
            call.reports = advance is not None
            done = iter(self._loop.run(call, advance))
        outputs = [refused.get(index) or next(done) for index in range(len(items))]
        raised: list[Any] = [output.error for output in outputs if output.error is not None]
        if raised and on_error == "raise":
            raised[0].outputs = outputs
            raise raised[0]
        return outputs

    def chat(
        self,
        messages: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        on_error: Literal["raise", "return"] = "raise",
        timeout: float | None = None,
        *,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Completes chats, as generate does. messages: one list of {role, content}, or several. The
        arguments after `timeout` are those of the tokenizer's apply_chat_template;
        chat_template_kwargs has variables of the template, such as enable_thinking.

        A request fails with RequestError if the tokenizer has no template, if a message has content
        other than text, or if the template refuses the chat."""
        variables = {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(variables, Mapping):
            raise RequestError(f"chat_template_kwargs: expected a dict, got {shown(variables)}")
        if self._codec is None:
            raise RequestError(
                "chat: expected a generator with a tokenizer of transformers, got one without a "
                "tokenizer"
            )
        chats = items_of(RequestError, "messages", messages)
        if chats and isinstance(chats[0], Mapping):
            chats = [chats]
        options = {
            "tools": tools,
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **variables,
        }
        prompts = [Chat(chat, options) for chat in chats]
        return self.generate(prompts, params, use_tqdm, on_error, timeout)

    @by_every_rank
    def submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[int]:
        """Queues prompts and returns their request ids; poll() runs them. After an error the queue
        is unchanged.

        If ranks are processes, all ranks must make the same calls of submit and poll in the same
        order."""
        items = prompt_list(prompts)
        pairs = zip(items, param_list(params, len(items)), strict=True)
        ids: list[int] = self._loop.run(_Submit(self, self._add, pairs))
        return ids

    @by_every_rank
    def poll(self, min_outputs: int = 0, timeout: float | None = None) -> list[RequestOutput]:
        """Runs engine steps, at least one, until min_outputs submitted requests are finished. Stops
        earlier if all requests are finished, after `timeout` seconds, or if the generator is
        paused.

        Returns the finished requests, oldest first. The errors of requests, including exceptions of
        a tokenizer, are in their outputs. If poll raises (asleep, Ctrl-C), the next poll returns
        the requests that had finished.

        If ranks are processes, they synchronize after each step, and all ranks return the same
        requests; the timeout is rank 0's. Each step takes as long as that of the slowest replica,
        so generate is faster if all requests must finish."""
        min_outputs = integer("min_outputs", min_outputs, 0, 2**63 - 1)
        deadline = deadline_of(timeout)
        poll = _Poll(self, min_outputs, deadline)
        try:
            outputs: list[RequestOutput] = self._loop.run(poll)
        except DeadlineError:  # the call did not begin before the deadline
            return []
        return outputs

    @by_every_rank
    def abort(self, ids: int | Sequence[int] | None = None) -> None:
        """Aborts these requests, or all with None. poll (or generate) returns them with their
        tokens so far and finish_reason "abort"; a running score or logits raises StateError."""
        numbers = None if ids is None else set(request_ids(ids))
        self._loop.call(
            lambda: self._requests.abort(self._engine.ids() if numbers is None else numbers)
        )

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> RequestOutput:
        """Completes one prompt, a text or token ids:
        `outputs = await asyncio.gather(*map(gen.agenerate, prompts))`. Any number of coroutines, in
        any event loops, may wait at the same time; one thread runs the engine steps for all of
        them. They wait while the generator is paused or its KV is asleep.

        Cancelling the coroutine aborts its request. The seed of a request without one depends on
        the order in which requests arrive.

        Raises the error that ended the request (RequestError, CapacityError, NumericsError, an
        exception of the tokenizer), NotSyncedError, or StateError (closed, weights asleep, inside
        another call of this thread, one rank of several processes)."""
        outputs = [output async for output in _stream(self, prompt, params, partial=False)]
        return outputs[-1]

    def astream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Completes one prompt like agenerate, and yields outputs while the request runs:
        `async for output in gen.astream(prompt)`. Each output has all tokens and the text so far;
        the last has finished=True. A slow reader gets fewer outputs. Each text begins with the
        previous text, since incomplete characters and the beginning of a stop string are left out.
        A sync with inflight="restart" starts tokens and text again. The arrays of each output are
        copies; only the last output has routed_experts.

        After leaving the loop early, closing the iterator aborts the request: use
        contextlib.aclosing, or the event loop closes it later."""
        return _stream(self, prompt, params, partial=True)

    @by_every_rank
    def logits(self, ids_list: Sequence[Prompt]) -> list[Floats]:
        """Returns float32 [len, vocab] for each sequence: row i has the logits of token i+1, given
        tokens 0..i."""
        sequences = sequences_of(ids_list)
        return self._score(sequences, [None] * len(sequences), self.spec.vocab_size)

    @by_every_rank
    def score(
        self,
        ids_list: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Floats]:
        """Returns float32 [len − 1] for each sequence: the logprob of token i+1, given tokens 0..i,
        bit-identical to `.logprobs` of generate.

        params  one SamplingParams for all sequences, or one for each. The result is then identical
                to `.sampling_logprobs`: under temperature and filters, -inf for a token that they
                exclude. logit_bias and allowed_token_ids apply. min_tokens must be 0, and penalties
                and bad_words are not supported, since the length of the prompt is not known here
        """
        sequences = sequences_of(ids_list)
        chosen: list[SamplingParams | None] = [None] * len(sequences)
        if params is not None:
            for param in (given := param_list(params, len(sequences))):
                if param.min_tokens > 0:
                    raise RequestError(f"min_tokens: expected 0 in score, got {param.min_tokens}")
                for name in logit_edit_names(param):
                    if name not in ("logit_bias", "allowed_token_ids"):
                        raise RequestError(
                            f"{name}: expected none in score, got {shown(getattr(param, name))}"
                        )
            chosen = [*given]
        return self._score(sequences, chosen)

    def _score(
        self, sequences: Sequence[Ids], params: Sequence[SamplingParams | None], vocab_size: int = 0
    ) -> list[Floats]:
        """See score. vocab_size > 0: see logits."""

        def add(index: int, ids: Ids, param: SamplingParams | None) -> int:
            with naming_prompt(index):
                return self._requests.add_score(ids, param, vocab_size)

        items = zip(sequences, params, strict=True)
        scores: list[Floats] = self._loop.run(_Steps(self, add, items, self._requests.scores, None))
        return scores

    # ---------------------------------------------------------------------- in the engine's thread
    def _add(self, index: int, prompt: Prompt, params: SamplingParams) -> int:
        """Queues one prompt."""
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
            return self._requests.add(token_ids(self._codec.encode(prompt)), params, prompt=prompt)

    def _check_ready(self) -> None:
        """Raises StateError if the generator is paused or asleep."""
        if self._engine.paused:
            raise StateError("the generator is paused; resume() it first")
        asleep = self._engine.stats()["asleep"]
        if asleep:
            raise StateError(f"{part_names(asleep)} asleep; wake() first")


class _Adding(Call):
    """Adds a request for each item, or none after an error."""

    def __init__(
        self, calls: Calls, add: Callable[..., int | None], items: Iterable[tuple[Any, ...]]
    ):
        """add: adds the request of an item and its index, and returns its id, or None."""

        def add_all() -> list[int]:
            added = []
            try:
                for index, item in enumerate(items):
                    self.check_wanted()
                    added.append(add(index, *item))
            finally:
                self.ids = [request for request in added if request is not None]
            return self.ids

        super().__init__(add_all)
        self.calls, self.ids = calls, list[int]()

    def drop(self) -> None:
        self.calls._requests.forget(self.ids)


class _Steps(_Adding):
    """Runs the requests until they are finished, and returns a result for each."""

    def __init__(
        self,
        calls: Calls,
        add: Callable[..., int | None],
        items: Iterable[tuple[Any, ...]],
        take: Callable[[int], Any],
        timeout: float | None,
    ):
        super().__init__(calls, add, items)
        self._take, self.deadline = take, deadline_of(timeout)
        self._timeout = None if timeout is None else float(timeout)  # sent to other ranks
        self.reports = False  # whether to report the number of finished requests to the caller
        self._open: set[int] = set()

    def begin(self) -> bool:
        self.calls._check_ready()
        super().begin()
        self._open = set(self.ids)
        return self._is_finished()

    def look(self, finished: set[int], rows: int, late: bool) -> bool:
        done = self._open & finished
        if self.reports and done:
            self.news.put(len(done))
        if done:
            self._open -= done
            self.calls._requests.raise_fault(done)
        elif rows == 0 and not late and not self.calls._engine.paused:
            raise Error(
                f"the engine has nothing to do, but {len(self._open)} requests are not finished"
            )
        if late and self._open:
            self.calls._requests.cut_off(self._open, self._timeout)
            self.deadline = None
        return self._is_finished()

    def _is_finished(self) -> bool:
        if self._open:
            return False
        self.result = [self._take(request) for request in self.ids]
        for request in self.ids:
            self.calls._requests.release(request)
        return True


class _Submit(_Adding):
    """Queues prompts for poll."""

    def begin(self) -> bool:
        super().begin()
        self.calls._submitted.update(self.ids)
        return True

    def undo(self) -> None:
        self.calls._submitted.difference_update(self.ids)
        self.drop()


class _Poll(Call):
    """Runs steps until enough submitted requests are finished."""

    def __init__(self, calls: Calls, min_outputs: int, deadline: float | None):
        super().__init__(lambda: None)
        self._calls, self._min_outputs, self.deadline = calls, min_outputs, deadline
        self._outputs: dict[int, RequestOutput] = {}

    def begin(self) -> bool:
        super().begin()
        calls = self._calls
        self._outputs, calls._kept = calls._kept, {}
        calls._submitted.intersection_update(calls._engine.ids())
        finished = calls._engine.finished()
        return calls._submitted <= finished and self.look(finished, 0, False)

    def look(self, finished: set[int], rows: int, late: bool) -> bool:
        calls = self._calls
        for request in sorted(calls._submitted & finished):
            self._outputs[request] = calls._requests.output_or_error(request)
            calls._requests.release(request)
            calls._submitted.discard(request)
        if rows and calls._submitted and not late and len(self._outputs) < self._min_outputs:
            return False
        self.result = [self._outputs[request] for request in sorted(self._outputs)]
        return True

    def drop(self) -> None:
        self._calls._kept.update(self._outputs)

    undo = drop


class _Stream(Call):
    """A request of a coroutine."""

    waits = True

    def __init__(self, calls: Calls, prompt: Prompt, params: SamplingParams, partial: bool):
        """partial: whether the coroutine reads outputs while the request runs."""
        super().__init__(lambda: calls._add(0, prompt, params))
        self.calls, self._partial = calls, partial
        self._event_loop, self.ready = asyncio.get_running_loop(), asyncio.Event()
        self.output: RequestOutput | None = None  # the latest; replaces an output that was not read
        self._num_tokens = [0] * params.n  # number of tokens of each sample in the latest output

    def begin(self) -> bool:
        super().begin()
        return False

    def look(self, finished: set[int], rows: int, late: bool) -> bool:
        request, requests = self.result, self.calls._requests
        if self._event_loop.is_closed():
            self.drop()
            return True
        is_done = request in finished
        if not is_done:
            before = self._num_tokens
            if self._partial:
                self._num_tokens = requests.num_tokens(request, before)
            if self._num_tokens == before:
                return False
        output = requests.output_or_error(request)
        if output.error is not None:
            raise output.error
        self.output = output
        if is_done:
            requests.release(request)
        else:
            self.tell()
        return is_done

    def drop(self) -> None:
        if self.result is not None:
            self.calls._requests.abort([self.result])
            self.calls._requests.release(self.result)

    def tell(self) -> None:
        """Wakes the coroutine."""
        with suppress(RuntimeError):  # the event loop is closed
            self._event_loop.call_soon_threadsafe(self.ready.set)


async def _stream(
    calls: Calls, prompt: Prompt, params: SamplingParams | None, partial: bool
) -> AsyncGenerator[RequestOutput, None]:
    """See Generator.astream. partial: whether to yield outputs while the request runs."""
    engine, loop = calls._engine, calls._loop
    if engine.rank > 0:
        raise StateError(
            f"agenerate and astream: expected a call on rank 0, got one on rank {engine.rank}"
        )
    loop.check_alive()
    loop.check_outside()
    [chosen] = param_list(params, 1)
    this = _Stream(calls, _one_prompt(prompt), chosen, partial)
    loop.post(this)
    before = None
    try:
        while this.error is None and (not this.is_done or this.output is not before):
            await this.ready.wait()
            this.ready.clear()
            output = this.output
            if this.error is None and output is not None and output is not before:
                before = output
                yield output
        if this.error is not None:  # the request may have failed before the first wait
            raise this.error
    finally:
        if not this.is_done and not loop.is_gone():
            loop.abandon(this, StateError("nobody reads the request"))


def _one_prompt(prompt: Any) -> Prompt:
    """Copies a prompt, since the engine's thread reads it later. Raises RequestError if it is not a
    prompt."""
    if isinstance(prompt, str):
        return prompt
    if (
        isinstance(prompt, (list, tuple))
        and prompt
        and not isinstance(prompt[0], (int, np.integer))
    ):
        kinds = f"a {type(prompt).__name__} of {type(prompt[0]).__name__}"
        raise RequestError(
            f"expected one prompt, text or token ids, got {kinds}; asyncio.gather runs several"
        )
    return token_ids(prompt)


def sequences_of(ids_list: Sequence[Prompt]) -> list[Ids]:
    sequences = []
    for index, ids in enumerate(prompt_list(ids_list)):
        with naming_prompt(index):
            sequences.append(token_ids(ids))
    return sequences
