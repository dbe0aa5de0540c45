"""agenerate and astream: requests of event loops, which a thread of the generator runs.

    coroutine ──► inbox ──► thread: add ── step … step ── output ──► call_soon_threadsafe ──►
    coroutine cancelled ──► inbox ──► thread: abort and release

The thread starts with the first request, takes the generator's turn for one step at a time, as
generate does, and ends when nothing is left to run. An event loop never waits for a step. Any
number of loops and threads may have requests at once. What goes wrong for one request is raised in
its coroutine; an error of the engine in all.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from rollmesh.distributed.rank_engine import RankEngine
from rollmesh.errors import Error, RequestError, StateError
from rollmesh.request.arguments import param_list
from rollmesh.request.driver import PAUSE_POLL_S, Driver, Prompt
from rollmesh.request.outputs import RequestOutput
from rollmesh.request.requests import Requests, token_ids
from rollmesh.request.sampling import SamplingParams
from rollmesh.runtime.threads import starting
from rollmesh.runtime.turn import Turn


@dataclass(slots=True, eq=False)
class _Stream:
    """One request, between its coroutine and the thread."""

    prompt: Prompt
    params: SamplingParams
    partial: bool  # whether outputs are wanted while it runs
    loop: asyncio.AbstractEventLoop
    news: asyncio.Event = field(default_factory=asyncio.Event)  # of the loop
    output: RequestOutput | None = None  # the latest; it replaces one that was not taken
    error: BaseException | None = None
    request: int | None = None  # the thread's: its id once it was in the engine
    num_tokens: list[int] = field(
        default_factory=list
    )  # the thread's: of each sample, when it last told

    def tell(self, output: RequestOutput | None, error: BaseException | None = None) -> None:
        """Wakes the coroutine."""
        self.output, self.error = output, error
        with suppress(RuntimeError):  # its loop is closed
            self.loop.call_soon_threadsafe(self.news.set)

    def is_abandoned(self) -> bool:
        """Nobody will read it: its loop is closed, or stands still while the interpreter exits and
        waits for the thread."""
        return self.loop.is_closed() or not (
            self.loop.is_running() or threading.main_thread().is_alive()
        )


class AsyncDriver:
    """The requests of event loops of one generator."""

    def __init__(self, driver: Driver, engine: RankEngine, requests: Requests, turn: Turn):
        self._driver, self._engine, self._requests, self._turn = driver, engine, requests, turn
        self._lock = threading.Lock()  # of the next three
        self._added: list[_Stream] = []
        self._cancelled: list[_Stream] = []
        self._thread: threading.Thread | None = None
        self._open: dict[int, _Stream] = {}  # the thread's: those in the engine

    # ---------------------------------------------------------------------------- in an event loop
    async def generate(self, prompt: Prompt, params: SamplingParams | None) -> RequestOutput:
        outputs = [output async for output in self.stream(prompt, params, partial=False)]
        return outputs[-1]

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None, partial: bool = True
    ) -> AsyncGenerator[RequestOutput, None]:
        if self._engine.has_peers and self._engine.role is None:
            raise StateError(
                "agenerate and astream: expected rank 0 of ranks that follow it, got a rank of "
                "several; call follow() on all"
            )
        self._turn.check_alive()
        self._turn.check_outside()
        [chosen] = param_list(params, 1)
        stream = _Stream(_one_prompt(prompt), chosen, partial, asyncio.get_running_loop())
        self._add(stream)
        finished, before = False, None
        try:
            while not finished:
                await stream.news.wait()
                stream.news.clear()
                output, error = stream.output, stream.error
                finished = error is not None or (output is not None and output.finished)
                if error is not None:
                    raise error
                if (
                    output is not None and output is not before
                ):  # the thread may tell the next one before this one is read
                    yield output
                before = output
        finally:
            if not finished and not self._turn.is_gone():
                self._cancel(stream)

    def _add(self, stream: _Stream) -> None:
        """CapacityError if the system gives no thread."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._run, name="rollmesh-async")
                with starting("agenerate and astream"):
                    thread.start()
                self._thread = thread
            self._added.append(stream)

    def _cancel(self, stream: _Stream) -> None:
        with self._lock:
            if self._thread is not None:  # without a thread, all requests have ended
                self._cancelled.append(stream)

    # ------------------------------------------------------------------------------- in the thread
    def _run(self) -> None:
        while self._has_work():
            try:
                with self._turn.take():
                    self._empty_inbox()
                    moved = not self._open or self._step()
            except BaseException as error:  # noqa: BLE001 (raised in the coroutines)
                self._fail(error)
                continue
            if not moved:
                time.sleep(PAUSE_POLL_S)  # paused, or a part is asleep

    def _has_work(self) -> bool:
        with self._lock:
            if self._open or self._added or self._cancelled:
                return True
            self._thread = None
            return False

    def _next(self, box: list[_Stream]) -> _Stream | None:
        with self._lock:
            return box.pop(0) if box else None

    def _empty_inbox(self) -> None:
        """One by one, so that what raises is one request's."""
        while (stream := self._next(self._added)) is not None:
            try:
                number = stream.request = self._driver.submit_one(stream.prompt, stream.params)
            except BaseException as error:  # noqa: BLE001 (a refusal, or whatever the tokenizer raises)
                stream.tell(None, error)
                continue
            stream.num_tokens = [0] * stream.params.n
            self._open[number] = stream
        while (stream := self._next(self._cancelled)) is not None:
            self._end(stream)
        for stream in [stream for stream in self._open.values() if stream.is_abandoned()]:
            self._end(stream)

    def _end(self, stream: _Stream, error: BaseException | None = None) -> None:
        """Takes a request out of the engine before it is done. error: is told."""
        if stream.request is None or self._open.pop(stream.request, None) is None:
            return
        self._requests.abort([stream.request])
        self._requests.release(stream.request)
        if error is not None:
            stream.tell(None, error)

    def _spoiled(self, number: int, error: BaseException) -> None:
        """The search for stop strings has raised. One that is not ours is left to its own call."""
        if number in self._open:
            self._end(self._open[number], error)

    def _step(self) -> bool:
        """One engine step, and what it brought. False: nothing moved."""
        rows = 0 if self._engine.stats()["asleep"] else self._requests.step_apart(self._spoiled)
        done = self._requests.finished_of(self._open)
        for number, stream in list(self._open.items()):
            if number in done:
                self._take(number, stream)
            elif stream.partial and self._has_grown(stream, number):
                output = self._output(number)
                self._end(stream, output) if isinstance(output, BaseException) else stream.tell(
                    output
                )
        return bool(rows or done)

    def _take(self, number: int, stream: _Stream) -> None:
        """The output, or the error, of a request that is done, which leaves the engine."""
        output = self._output(number)
        del self._open[number]
        self._requests.release(number)
        stream.tell(None, output) if isinstance(output, BaseException) else stream.tell(output)

    def _output(self, number: int) -> RequestOutput | BaseException:
        """What there is so far, or what ended the request or its decoding."""
        try:
            output = self._requests.output(number)
        except BaseException as error:  # noqa: BLE001 (whatever the tokenizer raises)
            return error
        return output if output.error is None else output.error

    def _has_grown(self, stream: _Stream, number: int) -> bool:
        before, stream.num_tokens = (
            stream.num_tokens,
            self._requests.num_tokens(number, stream.num_tokens),
        )
        return before != stream.num_tokens

    def _fail(self, error: BaseException) -> None:
        """An error of the engine, or a generator that is closed: every request ends with it."""
        with self._lock:
            streams = [*self._open.values(), *self._added]
            self._added.clear()
            self._cancelled.clear()
        numbers = list(self._open)
        self._open.clear()
        self._driver.abort_unless_shared(error)
        for stream in streams:
            stream.tell(None, error)
        if numbers and not self._turn.is_gone():
            with (
                suppress(Error),
                self._turn.take(),
            ):  # closed meanwhile, or an engine that can no more
                self._requests.forget(numbers)


def _one_prompt(prompt: Prompt) -> Prompt:
    """A copy, since the thread reads it later. RequestError for what is no prompt."""
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
