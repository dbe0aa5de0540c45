"""Rollouts that a thread generates while the trainer learns: [rollout] async_level = N, N ≥ 1.

The schedule is fixed. Step n pushes version n, orders batch n + N, and learns from batch n, which
was ordered with version n − N; the first version of a run orders N + 1 batches. So each token is at
most N versions behind the trainer, however fast the two sides are, and the queue holds at most
N + 1 batches. Rejected: learning from whatever is ready, because such a run cannot be repeated.

[sync] inflight says what a push does while a batch is generated:

    wait      waits until all ordered batches are finished, so each batch has one version: the run
              is deterministic
    keep      running requests continue with the new version; a completion has tokens of several
              versions
    restart   running requests begin again with the new version; the completions of a batch have
              different versions

With keep and restart the tokens depend on how fast the two sides are, within the same bound.

An exception of the thread is raised by the next call that waits for a batch. The end of the context
aborts running requests and waits for the thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Literal

import numpy as np

from rollmesh.errors import Error, StateError
from rollmesh.run.samples import Rollout
from rollmesh.runtime.threads import starting

JOIN_S = 0.05  # between two aborts, since the thread may add requests after an abort
# (trainer works, generator works) → the metric
SHARES = {
    (True, True): "both_share",
    (True, False): "trainer_only_share",
    (False, True): "generator_only_share",
}


class AsyncRollouts:
    """A context in which a thread runs `generate(batch, version)` for ordered batches. `abort()`
    makes it return early. `ready`: batches that exist already. One other thread makes the calls.

    A batch stays until `drop`, so a step that ends early loses no batch. A Ctrl-C cannot damage the
    queues, which are C functions, unlike threading.Condition. The thread adds a batch before it
    sends the message, so a Ctrl-C after `get` loses a message but no batch.
    """

    def __init__(
        self,
        generate: Callable[[int, int], Rollout],
        abort: Callable[[], None],
        ready: Mapping[int, Rollout] | None = None,
    ) -> None:
        self._generate, self._abort = generate, abort
        self._orders: SimpleQueue[tuple[int, int] | None] = SimpleQueue()  # (batch, version)
        self._messages: SimpleQueue[None] = SimpleQueue()  # one per finished batch and at the end
        self._finished = dict(ready or {})  # batch → rollout
        self._num_ordered = self._num_generated = 0
        self._error: BaseException | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="rollouts")

    def order(self, batches: Iterable[int], version: int) -> None:
        """Orders batches from `version`, which the generator has now."""
        for batch in batches:
            self._num_ordered += 1
            self._orders.put((batch, version))

    def take(self, batches: range) -> list[Rollout]:
        """Waits for these ordered batches and returns them."""
        while not self.has(batches):
            self._wait()
        return [self._finished[batch] for batch in batches]

    def has(self, batches: range) -> bool:
        """Whether these batches are finished."""
        return self._finished.keys() >= set(batches)

    def drop(self, batch: int) -> None:
        """Removes a batch that is no longer needed."""
        self._finished.pop(batch, None)

    def wait(self) -> None:
        """Waits until all ordered batches are finished. The generator is then idle."""
        while self._num_generated < self._num_ordered:
            self._wait()

    def __enter__(self) -> AsyncRollouts:
        try:
            with starting("the rollouts"):
                self._thread.start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._end()
        finally:
            self._end()  # again, after a Ctrl-C in the first call

    def _end(self) -> None:
        self._stopped = True
        self._orders.put(None)
        while self._thread.is_alive():
            with suppress(Error):  # the generator has failed, and the thread raises it too
                self._abort()
            self._thread.join(JOIN_S)

    def _wait(self) -> None:
        """Waits for the next batch."""
        if self._error is not None:
            raise self._error
        self._messages.get()

    def _run(self) -> None:
        try:
            while (order := self._orders.get()) is not None and not self._stopped:
                self._finished[order[0]] = self._generate(*order)
                self._num_generated += 1
                self._messages.put(None)
        except BaseException as error:  # noqa: BLE001 (raised in the other thread)
            self._error = error
            self._messages.put(None)


def batches_of(version: int, first_step: int, num_ready: int, level: int, last: int) -> range:
    """Returns the batches that a version generates: the batch of the step `level` later. The first
    version also generates the earlier batches, except those in the checkpoint. The last checkpoint
    has as many batches as the others, so that a longer run can continue from it."""
    first = first_step + num_ready if version == first_step else version + level
    return range(first, min(version + level, max(last, last - 1 + level)) + 1)


def staleness(rollout: Rollout, version: int, level: int) -> dict[str, float]:
    """Returns the number of versions by which the tokens are behind the trainer. Raises StateError
    if it exceeds `level`, or if a token is of a newer version than the trainer's."""
    behind = version - np.concatenate([c.versions for c in rollout.completions])
    if behind.max() > level or behind.min() < 0:
        wrong = version - int(behind.max() if behind.max() > level else behind.min())
        raise StateError(
            f"step {version}: a token of weight version {wrong}, expected {version - level} to "
            f"{version} ([rollout] async_level = {level})"
        )
    return {"staleness_mean": float(behind.mean()), "staleness_max": int(behind.max())}


class Overlap:
    """Measures how long trainer and generator work at the same time. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._working = {"trainer": 0, "generator": 0}
        self._seconds: dict[tuple[bool, bool], float] = {}
        self._since = time.perf_counter()

    @contextmanager
    def working(self, side: Literal["trainer", "generator"]) -> Iterator[None]:
        self._change(side, 1)
        try:
            yield
        finally:
            self._change(side, -1)

    def shares(self) -> dict[str, float]:
        """Returns the shares of the time since the last call; in the rest neither side worked."""
        with self._lock:
            self._advance()
            seconds, self._seconds = self._seconds, {}
        total = sum(seconds.values()) or 1.0
        return {name: seconds.get(state, 0.0) / total for state, name in SHARES.items()}

    def _change(self, side: str, by: int) -> None:
        with self._lock:
            self._advance()
            self._working[side] += by

    def _advance(self) -> None:
        now = time.perf_counter()
        state = self._working["trainer"] > 0, self._working["generator"] > 0
        self._seconds[state] = self._seconds.get(state, 0.0) + now - self._since
        self._since = now
