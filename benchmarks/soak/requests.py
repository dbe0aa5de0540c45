"""Requests of one generator: drawn, scored, refused, aborted, late, with text and stop strings, by
generate and by submit and poll. Nearly all of the time is spent in the Python layer: the model is
as small as possible, and most completions have one to three tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import rollmesh as rm
from benchmarks.soak.common import DENSE, SIZES, Letters, Work, bits, numpy_state_dict, refused
from rollmesh import _core

BATCH = 64


class Pieces(Letters):
    """A tokenizer that raises in the middle of a batch."""

    def encode(self, text: str) -> list[int]:
        if text == "bad":
            raise KeyError(text)
        return super().encode(text)


class Requests(Work):
    name = "requests"

    def __init__(self, rng: np.random.Generator, folder: Path):
        self.spec = rm.ModelSpec.from_hf(dict(DENSE))
        self.gen = rm.Generator(self.spec, dtype="float32", tokenizer=Pieces(), **SIZES)
        self.gen.sync_weights(numpy_state_dict(DENSE))
        vocab = DENSE["vocab_size"]
        self.prompts: list[Any] = [
            rng.integers(0, vocab, rng.integers(1, 9)).tolist() for _ in range(BATCH)
        ]
        self.prompts[::3] = [
            np.array(prompt, dtype=kind)
            for prompt, kind in zip(self.prompts[::3], [np.int32, np.int64] * BATCH)
        ]
        self.texts = [
            "".join(chr(ord("a") + token) for token in rng.integers(0, 26, 5)) for _ in range(BATCH)
        ]
        self.params = [self._params(rng, index) for index in range(BATCH)]
        self.stopping = rm.SamplingParams(max_tokens=4, stop=("a", "bc"), seed=5)
        self.long = rm.SamplingParams(max_tokens=40, seed=6, ignore_eos=True)
        # Every token is banned.
        self.endless = rm.SamplingParams(
            min_tokens=1, max_tokens=2, stop_token_ids=list(range(vocab))
        )
        self.refused = [[99], [], [-1], [0] * 100, [1, 2]]
        self.handed = [
            self.prompts,
            self.texts,
            self.params,
            self.stopping,
            self.long,
            self.endless,
            self.refused,
        ]
        self.handed += [*self.prompts, *self.texts, *self.params, *self.refused]
        self.bits = b""
        self.calls = [
            self.generate,
            self.generate,
            self.submit,
            self.score,
            self.score_sampling,
            self.logits,
            self.text,
            self.refuse,
        ]
        self.calls += [
            self.refuse_and_raise,
            self.refuse_all,
            self.abort_some,
            self.abort_all,
            self.late,
            self.no_memory,
        ]
        self.calls += [self.broken_tokenizer, self.paused, self.asleep, self.without_prefixes]

    @staticmethod
    def _params(rng: np.random.Generator, index: int) -> rm.SamplingParams:
        return rm.SamplingParams(
            n=2 if index % 16 == 0 else 1,
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_k=int(rng.choice([-1, 5])),
            top_p=float(rng.choice([1.0, 0.8])),
            max_tokens=1 + index % 3,
            stop_token_ids=[3, 4] if index % 5 == 0 else [],
            seed=index if index % 2 else None,
            logprobs=2 if index % 7 == 0 else None,
            prompt_logprobs=1 if index % 11 == 0 else None,
        )

    def generate(self) -> int:
        assert all(
            output.error is None
            for output in self.gen.generate(self.prompts, self.params, use_tqdm=False)
        )
        return BATCH

    def submit(self) -> int:
        ids = self.gen.submit(self.prompts, self.params)
        assert len(self.gen.poll(min_outputs=len(ids))) == BATCH
        return BATCH

    def score(self) -> int:
        assert len(self.gen.score(self.prompts)) == BATCH
        return BATCH

    def score_sampling(self) -> int:
        assert len(self.gen.score(self.prompts, self.params)) == BATCH
        return BATCH

    def logits(self) -> int:
        assert len(self.gen.logits(self.prompts)) == BATCH
        return BATCH

    def text(self) -> int:
        assert all(
            output.error is None
            for output in self.gen.generate(self.texts, self.stopping, use_tqdm=False)
        )
        return BATCH

    def refuse(self) -> int:
        outputs = self.gen.generate(self.refused, self.params[0], use_tqdm=False, on_error="return")
        assert [output.error is None for output in outputs] == [False, False, False, False, True]
        return len(outputs)

    def refuse_and_raise(self) -> int:
        refused(rm.RequestError, self.gen.generate, self.refused, self.params[0], use_tqdm=False)
        return len(self.refused)

    def refuse_all(self) -> int:
        refused(rm.RequestError, self.gen.submit, [*self.prompts, [99]], self.params[0])
        refused(rm.RequestError, self.gen.submit, self.prompts[0], self.endless)
        refused(rm.RequestError, self.gen.score, [*self.prompts, [99]])
        return 2 * (BATCH + 1) + 1

    def abort_some(self) -> int:
        ids = self.gen.submit(self.prompts, self.long)
        self.gen.poll()
        self.gen.abort(ids[::2])
        taken = len(self.gen.poll())
        self.gen.abort()
        assert taken + len(self.gen.poll()) == BATCH
        return BATCH

    def abort_all(self) -> int:
        self.gen.submit(self.prompts, self.long)
        self.gen.abort()
        assert len(self.gen.poll()) == BATCH
        return BATCH

    def late(self) -> int:
        outputs = self.gen.generate(
            self.prompts, self.long, use_tqdm=False, timeout=1e-3, on_error="return"
        )
        assert len(outputs) == BATCH
        return BATCH

    def no_memory(self) -> int:
        """The fifth request gets no memory, and the requests before it are dropped too."""
        _core.memory_fail_at(5)
        try:
            refused(MemoryError, self.gen.submit, self.prompts, self.params)
        finally:
            _core.memory_fail_at(0)
        return BATCH

    def broken_tokenizer(self) -> int:
        refused(
            KeyError, self.gen.generate, [*self.texts[:9], "bad"], self.stopping, use_tqdm=False
        )
        return 10

    def paused(self) -> int:
        self.gen.submit(self.prompts, self.params)
        self.gen.poll()
        self.gen.pause("keep")
        refused(rm.StateError, self.gen.generate, self.prompts, self.params, use_tqdm=False)
        self.gen.resume()
        self.gen.poll(min_outputs=BATCH)
        return 2 * BATCH

    def asleep(self) -> int:
        """The KV cache sleeps in the middle and is computed again."""
        ids = self.gen.submit(self.prompts, self.params)
        taken = len(self.gen.poll())
        self.gen.sleep("kv")
        self.gen.wake("kv")
        assert taken + len(self.gen.poll(min_outputs=len(ids))) == BATCH
        return BATCH

    def without_prefixes(self) -> int:
        self.gen.reset_prefix_cache()
        return self.generate()

    def settle(self) -> int:
        seen = bits(self.gen)
        assert seen == (self.bits or seen), "the same request gave other bits"
        self.bits = seen
        assert self.gen.metrics()["running"] == self.gen.metrics()["waiting"] == 0
        return 1

    def close(self) -> None:
        self.gen.close()
