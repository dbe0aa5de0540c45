"""Sampling options that the C engine does not have, applied to logits on the host before the engine
draws.

The steps and their order are those of vLLM's Sampler (vllm/v1/sample/sampler.py), with vLLM's own
functions: grammar, allowed ids, bad words, processors (min_tokens, logit_bias, the user's own),
penalties. Temperature, min_p, top_k and top_p follow in the engine, so a user's processor that vLLM
would apply after temperature (`is_argmax_invariant`) is refused.

vLLM's processors keep state for each row of a persistent batch and receive its changes.
`ProcessorBatch` is this batch: a request has a slot as long as every call of `edit` has a row of
it, and the used slots have no gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.sample.logits_processor import (
    BUILTIN_LOGITS_PROCESSORS,
    BatchUpdate,
    MinPLogitsProcessor,
    MoveDirectionality,
    build_logitsprocs,
)
from vllm.v1.sample.ops.bad_words import apply_bad_words
from vllm.v1.sample.ops.penalties import apply_all_penalties

from rollmesh.errors import ConfigError

Logits = NDArray[np.float32]
Ids = NDArray[np.int32]
NONE = np.zeros(0, np.int32)
FREED = ""  # marks the slot of a request that has ended


@dataclass(frozen=True, slots=True)
class HostRow:
    """The request that a row of logits belongs to."""

    name: str
    params: Any  # vllm.SamplingParams
    prompt_ids: Ids
    output_ids: list[int]  # tokens so far
    # [ceil(vocab / 32)] from its grammar: bit v of the row is set if token v is allowed
    bitmask: Ids | None = None


@dataclass(slots=True)
class _Known:
    """The arguments that the processors received for a slot. The processors keep a reference to
    output_ids."""

    params: Any
    output_ids: list[int]

    def is_continued_by(self, row: HostRow) -> bool:
        """Returns False if another request has this name now, or if vLLM dropped some of its
        tokens, so that the processors' state is stale."""
        return self.params is row.params and len(self.output_ids) <= len(row.output_ids)


@dataclass(slots=True)
class ProcessorBatch:
    """The slots of vLLM's processors."""

    slots: list[str] = field(default_factory=list)  # slot → name
    known: dict[str, _Known] = field(default_factory=dict)

    def update(self, rows: Sequence[HostRow]) -> BatchUpdate | None:
        """Changes the slots to the requests of `rows`: new requests take freed slots, then requests
        from the last slots fill the remaining gaps. Returns the changes, or None."""
        current = {row.name: row for row in rows}
        for name, known in list(self.known.items()):
            if name in current and known.is_continued_by(current[name]):
                known.output_ids[:] = current[name].output_ids
            else:
                del self.known[name]
                self.slots[self.slots.index(name)] = FREED
        gaps = [slot for slot, name in enumerate(self.slots) if name == FREED]
        added, moved = [], []
        for name, row in current.items():
            if name in self.known:
                continue
            slot = gaps.pop(0) if gaps else len(self.slots)
            self.slots[slot : slot + 1] = [name]
            self.known[name] = _Known(row.params, list(row.output_ids))
            added.append((slot, row.params, row.prompt_ids.tolist(), self.known[name].output_ids))
        removed = gaps[::-1]
        for slot in gaps:
            while self.slots and self.slots[-1] == FREED:
                self.slots.pop()
            if slot < len(self.slots):
                self.slots[slot] = self.slots.pop()
                moved.append((len(self.slots), slot, MoveDirectionality.UNIDIRECTIONAL))
        if not (added or removed or moved):
            return None
        return BatchUpdate(batch_size=len(self.slots), removed=removed, added=added, moved=moved)


class HostLogits:
    """Edits rows as vLLM's Sampler would. One per worker; all ranks make the same calls."""

    def __init__(self, vllm_config: Any):
        custom = vllm_config.model_config.logits_processors or ()
        self._vocab = vllm_config.model_config.get_vocab_size()
        processors = build_logitsprocs(vllm_config, torch.device("cpu"), False, False, custom)
        self._processors = [
            one for one in processors.all if not isinstance(one, MinPLogitsProcessor)
        ]
        # The user's own processors, which may edit any row.
        self.custom = [
            one for one in self._processors if type(one) not in BUILTIN_LOGITS_PROCESSORS
        ]
        for processor in self.custom:
            if processor.is_argmax_invariant():
                raise ConfigError(
                    f"logits processor {type(processor).__qualname__}: expected "
                    "is_argmax_invariant() = False, got True; such processors "
                    "run after temperature, which the engine applies when it draws"
                )
        self._batch = ProcessorBatch()

    def edit(self, raw: Logits, rows: Sequence[HostRow], never_drawn: Ids = NONE) -> Logits:
        """Returns the edited logits as a new array, with −inf for tokens that must not be drawn.
        raw: [n, vocab] with n ≥ 1 rows. never_drawn: tokens that the model's compute_logits sets to
        −inf, before all other edits."""
        update = self._batch.update(rows)
        for processor in self._processors:
            processor.update_state(update)
        place = {row.name: index for index, row in enumerate(rows)}
        order = [place[name] for name in self._batch.slots]
        in_slots, edited = raw[order], np.empty_like(raw)
        in_slots[:, never_drawn] = -np.inf
        self._edit([rows[index] for index in order], in_slots)
        edited[order] = in_slots
        return edited

    def _edit(self, rows: Sequence[HostRow], logits: Logits) -> None:
        for row, line in zip(rows, logits):
            if row.bitmask is not None:
                line[~_allowed(row.bitmask, self._vocab)] = -np.inf
            if row.params.allowed_token_ids is not None:
                ids = list(row.params.allowed_token_ids)
                kept = line[ids]
                line.fill(-np.inf)
                line[ids] = kept
        tensor = torch.from_numpy(logits)
        outputs = [self._batch.known[row.name].output_ids for row in rows]
        bad_words = {
            slot: row.params.bad_words_token_ids
            for slot, row in enumerate(rows)
            if row.params.bad_words_token_ids
        }
        apply_bad_words(tensor, bad_words, outputs)
        for processor in self._processors:
            done = processor.apply(tensor)
            if done is not tensor:
                tensor.copy_(done)
        self._penalize(rows, tensor, outputs)

    def _penalize(
        self, rows: Sequence[HostRow], logits: torch.Tensor, outputs: list[list[int]]
    ) -> None:
        """Applies penalties to the rows that have any."""
        chosen = [slot for slot, row in enumerate(rows) if _has_penalties(row.params)]
        if not chosen:
            return
        longest = max(len(rows[slot].prompt_ids) for slot in chosen)
        # Padding is an id outside the vocabulary.
        prompts = torch.full((len(chosen), longest), self._vocab, dtype=torch.int64)
        for line, slot in zip(prompts, chosen):
            line[: len(rows[slot].prompt_ids)] = torch.from_numpy(rows[slot].prompt_ids)
        values = [
            torch.tensor(
                [getattr(rows[slot].params, f"{name}_penalty") for slot in chosen],
                dtype=torch.float32,
            )
            for name in ("presence", "frequency", "repetition")
        ]
        logits[chosen] = apply_all_penalties(
            logits[chosen], prompts, *values, [outputs[slot] for slot in chosen]
        )


def bitmask_rows(grammar: Any) -> dict[str, Ids]:
    """Returns the row of each request in vLLM's GrammarOutput. Without speculation a request has
    one row."""
    return (
        {}
        if grammar is None
        else dict(zip(grammar.structured_output_request_ids, grammar.grammar_bitmask, strict=True))
    )


def _allowed(bitmask: Ids, vocab: int) -> NDArray[np.bool_]:
    """Returns bool [vocab]: which tokens the bitmask allows."""
    little_endian = np.ascontiguousarray(bitmask, dtype="<i4")
    return np.unpackbits(little_endian.view(np.uint8), count=vocab, bitorder="little").astype(
        np.bool_
    )


def _has_penalties(params: Any) -> bool:
    return bool(
        params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.repetition_penalty != 1.0
    )
