"""agenerate and astream: requests of event loops. Each is a call in the engine's thread (loop.py)
for which no thread waits. Its outputs go to the coroutine by call_soon_threadsafe, so an event loop
never waits for a step. Errors of a request are raised in its coroutine; errors of the engine are
raised in all coroutines.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from rollmesh.errors import RequestError, StateError
from rollmesh.request.arguments import param_list
from rollmesh.request.loop import Call
from rollmesh.request.outputs import RequestOutput
from rollmesh.request.requests import token_ids
from rollmesh.request.sampling import SamplingParams
from rollmesh.request.text import Prompt

if TYPE_CHECKING:
    from rollmesh.request.calls import Calls


class _Stream(Call):
    """A request of a coroutine."""

    waits = True

    def __init__(self, calls: Calls, prompt: Prompt, params: SamplingParams, partial: bool):
        """partial: whether the coroutine reads outputs while the request runs."""
        super().__init__(lambda: calls._add(0, prompt, params))
        self._calls, self._partial = calls, partial
        self._event_loop, self.ready = asyncio.get_running_loop(), asyncio.Event()
        self.output: RequestOutput | None = None  # the latest; replaces an output that was not read
        self._num_tokens = [0] * params.n  # number of tokens of each sample in the latest output

    def begin(self) -> bool:
        super().begin()
        return False

    def look(self, finished: set[int], rows: int, late: bool) -> bool:
        request, requests = self.result, self._calls._requests
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
            self._wake()
        return is_done

    def drop(self) -> None:
        if self.result is not None:
            self._calls._requests.abort([self.result])
            self._calls._requests.release(self.result)

    def tell(self) -> None:
        self._wake()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            self._event_loop.call_soon_threadsafe(self.ready.set)


async def stream(
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
        while not this.is_done or this.output is not before:
            await this.ready.wait()
            this.ready.clear()
            if this.error is not None:
                raise this.error
            output = this.output
            if output is not None and output is not before:
                before = output
                yield output
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
