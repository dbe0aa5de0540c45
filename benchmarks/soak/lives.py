"""Generators from beginning to end: made in several sizes, and closed or dropped in every state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import rollmesh as rm
from benchmarks.soak.common import (
    DENSE,
    SIZES,
    Interrupted,
    Letters,
    Work,
    bits,
    in_thread,
    numpy_state_dict,
    refused,
)
from rollmesh import _core

OPTIONS: list[dict[str, Any]] = [
    {},
    {"dtype": "bfloat16"},
    {"threads": 1},
    {"threads": 3, "enable_prefix_caching": False, "block_size": 32},
]


class Lives(Work):
    name = "lives"

    def __init__(self, rng: np.random.Generator, folder: Path):
        self.spec = rm.ModelSpec.from_hf(dict(DENSE))
        self.state = numpy_state_dict(DENSE)
        self.prompts: list[Any] = [[1, 2, 3], [4, 5], np.array([6, 7, 8])]
        self.params = rm.SamplingParams(n=2, max_tokens=30, seed=1, ignore_eos=True)
        self.tokenizer = Letters()
        self.handed = [
            self.state,
            self.spec,
            self.prompts,
            *self.prompts,
            self.params,
            self.tokenizer,
        ]
        self.handed += [thing for pair in self.state.items() for thing in pair]
        # Option values; the strings are interned, so these are the same objects.
        self.handed += ["float32", "bfloat16"]
        self._made = 0
        self.bits = b""
        ends = (
            self.closed,
            self.closed_twice,
            self.lost,
            self.lost_in_a_cycle,
            self.closed_by_a_thread,
            self.left_by_an_exception,
        )
        states = (
            self.new,
            self.synced,
            self.running,
            self.half_synced,
            self.asleep,
            self.paused,
            self.failed,
        )
        self.calls = [partial(end, state) for end in ends for state in states]
        self.calls += [self.refused_options, self.no_memory]

    def make(self) -> rm.Generator:
        self._made += 1
        options = {**SIZES, "dtype": "float32", **OPTIONS[self._made % len(OPTIONS)]}
        return rm.Generator(self.spec, tokenizer=self.tokenizer, **options)

    # -------------------------------------------------------------------------------------- states
    def new(self, gen: rm.Generator) -> None:
        refused(rm.NotSyncedError, gen.generate, self.prompts, use_tqdm=False)

    def synced(self, gen: rm.Generator) -> None:
        gen.sync_weights(self.state, cast=True)
        bits(gen)

    def running(self, gen: rm.Generator) -> None:
        gen.sync_weights(self.state, cast=True)
        gen.submit(self.prompts, self.params)
        gen.poll()

    def half_synced(self, gen: rm.Generator) -> None:
        gen.begin_sync(cast=True).push("model.norm.weight", self.state["model.norm.weight"])

    def asleep(self, gen: rm.Generator) -> None:
        self.running(gen)
        gen.sleep()

    def paused(self, gen: rm.Generator) -> None:
        self.running(gen)
        gen.pause("keep")

    def failed(self, gen: rm.Generator) -> None:
        refused(rm.MissingKeyError, gen.sync_weights, {})

    # ---------------------------------------------------------------------------------------- ends
    def closed(self, state: Callable[[rm.Generator], None]) -> int:
        gen = self.make()
        state(gen)
        gen.close()
        return 1

    def closed_twice(self, state: Callable[[rm.Generator], None]) -> int:
        with self.make() as gen:
            state(gen)
            gen.close()
            refused(rm.StateError, gen.submit, self.prompts)
        return 1

    def lost(self, state: Callable[[rm.Generator], None]) -> int:
        state(self.make())
        return 1

    def lost_in_a_cycle(self, state: Callable[[rm.Generator], None]) -> int:
        gen = self.make()
        state(gen)
        cycle: list[Any] = [gen]
        cycle.append(cycle)
        return 1

    def closed_by_a_thread(self, state: Callable[[rm.Generator], None]) -> int:
        gen = self.make()
        state(gen)
        in_thread(gen.close)
        return 1

    def left_by_an_exception(self, state: Callable[[rm.Generator], None]) -> int:
        def life() -> None:
            with self.make() as gen:
                state(gen)
                raise Interrupted

        refused(Interrupted, life)
        return 1

    # ------------------------------------------------------------------------------ no life at all
    def refused_options(self) -> int:
        refused(rm.ConfigError, rm.Generator, self.spec, **{**SIZES, "block_size": 7})
        refused(rm.ConfigError, rm.Generator, self.spec, **SIZES, dtype="int8")
        refused(rm.ConfigError, rm.Generator, self.spec, **SIZES, isa="abacus")
        return 3

    def no_memory(self) -> int:
        """Creation fails at each of its first allocations."""
        for site in range(1, 9):
            _core.memory_fail_at(site)
            try:
                refused(MemoryError, rm.Generator, self.spec, **SIZES)
            finally:
                _core.memory_fail_at(0)
        return 8

    def settle(self) -> int:
        with rm.Generator(self.spec, dtype="float32", **SIZES) as gen:
            gen.sync_weights(self.state)
            seen = bits(gen)
        assert seen == (self.bits or seen), "the same weights gave other bits"
        self.bits = seen
        return 1

    def close(self) -> None:
        return
