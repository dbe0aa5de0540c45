"""agenerate and astream: requests of event loops, which a thread of the generator runs.

    coroutine ──► inbox ──► thread: add ── step … step ── output ──► call_soon_threadsafe ──► coroutine
    cancelled ──► inbox ──► thread: abort and release

The thread starts with the first request, takes the generator's turn for one step at a time, as generate does, and ends when nothing is
left to run. An event loop never waits for a step. Any number of loops and threads may have requests at once.
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
from rollmesh.errors import RequestError, StateError
from rollmesh.request.arguments import param_list
from rollmesh.request.driver import PAUSE_POLL_S, Driver, Prompt
from rollmesh.request.outputs import RequestOutput
from rollmesh.request.requests import Requests
from rollmesh.request.sampling import SamplingParams
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
    request: int | None = None  # the thread's: its id while it is in the engine
    num_tokens: list[int] = field(default_factory=list)  # the thread's: of each sample, when it last told

    def tell(self, output: RequestOutput | None, error: BaseException | None = None) -> None:
        """Wakes the coroutine."""
        self.output, self.error = output, error
        with suppress(RuntimeError):  # its loop is closed
            self.loop.call_soon_threadsafe(self.news.set)


class AsyncDriver:
    """The requests of event loops of one generator."""

    def __init__(self, driver: Driver, engine: RankEngine, requests: Requests, turn: Turn):
        self._driver, self._engine, self._requests, self._turn = driver, engine, requests, turn
        self._lock = threading.Lock()  # of the next three
        self._added: list[_Stream] = []
        self._cancelled: list[_Stream] = []
        self._thread: threading.Thread | None = None
        self._open: dict[int, _Stream] = {}  # the thread's: those in the engine

    # ---------------------------------------------------------------------------------------- in an event loop
    async def generate(self, prompt: Prompt, params: SamplingParams | None) -> RequestOutput:
        outputs = [output async for output in self.stream(prompt, params, partial=False)]
        return outputs[-1]

    async def stream(self, prompt: Prompt, params: SamplingParams | None, partial: bool = True) -> AsyncGenerator[RequestOutput, None]:
        if self._engine.has_peers:
            raise StateError("agenerate and astream: expected a generator whose ranks are of one process, got one rank of several")
        if isinstance(prompt, (list, tuple)) and prompt and not isinstance(prompt[0], (int, np.integer)):
            kinds = f"a {type(prompt).__name__} of {type(prompt[0]).__name__}"
            raise RequestError(f"expected one prompt, text or token ids, got {kinds}; asyncio.gather runs several")
        [chosen] = param_list(params, 1)
        self._turn.check_alive()
        stream = _Stream(prompt, chosen, partial, asyncio.get_running_loop())
        self._put(self._added, stream)
        finished, before = False, None
        try:
            while not finished:
                await stream.news.wait()
                stream.news.clear()
                output, error = stream.output, stream.error
                finished = error is not None or (output is not None and output.finished)
                if error is not None:
                    raise error
                if output is not None and output is not before:  # the thread may tell the next one before this one is read
                    yield output
                before = output
        finally:
            if not finished:
                self._put(self._cancelled, stream)

    def _put(self, box: list[_Stream], stream: _Stream) -> None:
        with self._lock:
            box.append(stream)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="rollmesh-async")
                self._thread.start()

    # ---------------------------------------------------------------------------------------- in the thread
    def _run(self) -> None:
        while self._has_work():
            try:
                with self._turn.take():
                    self._empty_inbox()
                    moved = self._step() if self._open else True
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

    def _empty_inbox(self) -> None:
        with self._lock:
            added, cancelled = list(self._added), list(self._cancelled)
            self._added.clear()
            self._cancelled.clear()
        dropped = set(map(id, cancelled))
        for stream in added:
            if id(stream) in dropped:
                continue
            try:
                stream.request = self._driver.add(stream.prompt, stream.params)
            except Exception as error:  # noqa: BLE001 (a refusal, or whatever the tokenizer raises)
                stream.tell(None, error)
                continue
            stream.num_tokens = [0] * stream.params.n
            self._open[stream.request] = stream
        for stream in cancelled:
            self._drop(stream)

    def _drop(self, stream: _Stream) -> None:
        """Ends a request that nobody waits for any more."""
        if stream.request is not None and self._open.pop(stream.request, None) is not None:
            self._requests.abort([stream.request])
            self._requests.release(stream.request)

    def _step(self) -> bool:
        """One engine step, and what it brought. False: nothing moved."""
        rows = self._driver.step_if_running()
        done = self._requests.done_of(set(self._open))
        for number, stream in list(self._open.items()):
            if number in done:
                output = self._requests.output_or_error(number)
                self._requests.release(number)
                del self._open[number]
                stream.tell(None, output.error) if output.error is not None else stream.tell(output)
            elif stream.loop.is_closed():
                self._drop(stream)
            elif stream.partial and self._has_grown(stream, number):
                stream.tell(self._requests.output_or_error(number))
        return bool(rows or done)

    def _has_grown(self, stream: _Stream, number: int) -> bool:
        before, stream.num_tokens = stream.num_tokens, self._requests.num_tokens(number)
        return before != stream.num_tokens

    def _fail(self, error: BaseException) -> None:
        """An error of the engine, or a generator that is closed: every request ends with it."""
        with self._lock:
            streams = [*self._open.values(), *self._added]
            self._added.clear()
            self._cancelled.clear()
        numbers = list(self._open)
        self._open.clear()
        for stream in streams:
            stream.tell(None, error)
        if numbers and not self._turn.is_gone():
            with self._turn.take():
                self._requests.forget(numbers)
