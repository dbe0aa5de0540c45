"""Rollouts that a thread generates while the trainer learns: [rollout] async_level = N, N ≥ 1.

The schedule is fixed. Step n pushes version n, orders batch n + N and learns from batch n, which
was ordered with version n − N; the first version of a run orders N + 1 batches. So no token is more
than N versions behind the trainer, however fast either side is, and the queue never holds more than
N + 1 batches. Learning from whatever is ready lost: such a run is never the same twice.

What a push does while a batch is generated is [sync] inflight:

    wait      the push waits until all ordered batches are finished, so each batch is of one
              version: the run is deterministic
    keep      the running requests go on with the new version; a completion has tokens of several
              versions
    restart   the running requests begin again with the new version; completions of a batch have
              different versions

With keep and restart the tokens depend on how fast the two sides are, within the same bound.

An exception of the thread is raised by the next call that waits for a batch. The end of the context
aborts what runs and waits for the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType

import numpy as np

import rollmesh as rm
from rollmesh.grpo.rollout import Rollout
from rollmesh.runtime.threads import starting

JOIN_S = 0.05  # between two aborts: the thread may have added its requests after the first


class AsyncRollouts:
    """A context in which a thread runs `generate(batch, version)` for the batches that are ordered.
    `abort()` makes it return early. `ready`: batches that are not generated. One other thread makes
    the calls.

    A batch stays until `drop`, so that what ends a step early loses none. The queues are C
    functions, which a Ctrl-C leaves whole; threading.Condition is not one. The thread adds each
    batch before it says so: a Ctrl-C behind `get` loses a message, and no batch.
    """

    def __init__(
        self,
        generate: Callable[[int, int], Rollout],
        abort: Callable[[], None],
        ready: Mapping[int, Rollout] | None = None,
    ) -> None:
        self._generate, self._abort = generate, abort
        self._orders: SimpleQueue[tuple[int, int] | None] = (
            SimpleQueue()
        )  # (batch, version); None: the end
        self._said: SimpleQueue[None] = (
            SimpleQueue()
        )  # for each batch that is finished, and at the thread's end
        self._finished = dict(ready or {})  # by batch
        self._num_ordered = self._num_generated = 0
        self._error: BaseException | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="rollouts")

    def order(self, batches: Iterable[int], version: int) -> None:
        """Asks for batches that `version`, which serves now, may generate."""
        for batch in batches:
            self._num_ordered += 1
            self._orders.put((batch, version))

    def take(self, batches: range) -> list[Rollout]:
        """These batches, which were ordered, when they are finished."""
        while not self.has(batches):
            self._wait()
        return [self._finished[batch] for batch in batches]

    def has(self, batches: range) -> bool:
        """Whether they are finished."""
        return self._finished.keys() >= set(batches)

    def drop(self, batch: int) -> None:
        """It is not needed any more."""
        self._finished.pop(batch, None)

    def wait(self) -> None:
        """Until all that was ordered is finished: nothing runs in the generator then."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._end()
        finally:
            self._end()  # after a Ctrl-C in the first

    def _end(self) -> None:
        self._stopped = True
        self._orders.put(None)
        while self._thread.is_alive():
            with suppress(
                rm.Error
            ):  # of a generator that has failed: the thread's own call raises it too
                self._abort()
            self._thread.join(JOIN_S)

    def _wait(self) -> None:
        """For the next batch."""
        if self._error is not None:
            raise self._error
        self._said.get()

    def _run(self) -> None:
        try:
            while (order := self._orders.get()) is not None and not self._stopped:
                self._finished[order[0]] = self._generate(*order)
                self._num_generated += 1
                self._said.put(None)
        except BaseException as error:  # noqa: BLE001 (raised in the other thread)
            self._error = error
            self._said.put(None)


def staleness(rollout: Rollout, version: int, level: int) -> dict[str, float]:
    """How many versions the tokens are behind the trainer's. Raises StateError above `level`, and
    for a version that is still to come."""
    behind = version - np.concatenate(rollout.versions)
    if behind.max() > level or behind.min() < 0:
        wrong = version - int(behind.max() if behind.max() > level else behind.min())
        raise rm.StateError(
            f"step {version}: a token of weight version {wrong}, expected {version - level} to "
            f"{version} ([rollout] async_level = {level})"
        )
    return {"staleness_mean": float(behind.mean()), "staleness_max": int(behind.max())}
