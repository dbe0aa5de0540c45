"""Edits of logits that the C engine does not have, made by vLLM's own functions before the engine
draws.

The steps and their order are those of vLLM's Sampler (vllm/v1/sample/sampler.py): grammar, allowed
ids, bad words, processors (min_tokens, logit_bias, the user's own), penalties. Temperature, min_p,
top_k and top_p follow in the engine, so a user's processor that vLLM would apply after temperature
(`is_argmax_invariant`) is refused.

vLLM's processors keep state for each row of a persistent batch and receive its changes. A request
has a slot of this batch as long as every call of `edit` has a row of it, and the used slots have no
gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
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
from rollmesh.runtime.engine_views import Floats, Ids
from rollmesh.vllm.worker.sampling import has_penalties

NONE = np.zeros(0, np.int32)
FREED = ""  # marks the slot of a request that has ended


@dataclass(frozen=True, slots=True)
class EditedRow:
    """The request that a row of logits belongs to."""

    name: str
    params: Any  # vllm.SamplingParams
    prompt_ids: Ids
    output_ids: list[int]  # tokens so far
    # [ceil(vocab / 32)] from its grammar: bit v of the row is set if token v is allowed
    bitmask: Ids | None = None


class ExternalEdits:
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
        self._slots: list[str] = []  # slot → name of its request
        # Requests as the processors received them. The processors keep a reference to output_ids.
        self._known: dict[str, EditedRow] = {}

    def edit(self, raw: Floats, rows: Sequence[EditedRow], never_drawn: Ids = NONE) -> Floats:
        """Returns the edited logits as a new array, with −inf for tokens that must not be drawn.
        raw: [n, vocab] with n ≥ 1 rows. never_drawn: tokens that the model's compute_logits sets to
        −inf, before all other edits."""
        changes = self._assign_slots({row.name: row for row in rows})
        for processor in self._processors:
            processor.update_state(changes)
        place = {row.name: index for index, row in enumerate(rows)}
        order = [place[name] for name in self._slots]
        in_slots, edited = raw[order], np.empty_like(raw)
        in_slots[:, never_drawn] = -np.inf
        self._edit([rows[index] for index in order], in_slots)
        edited[order] = in_slots
        return edited

    def _assign_slots(self, current: dict[str, EditedRow]) -> BatchUpdate | None:
        """Changes the slots to the current requests: new requests take freed slots, then requests
        from the last slots fill the remaining gaps. Returns the changes, or None.

        A request is new if another one had its name, or if vLLM dropped some of its tokens, so that
        the processors' state is stale."""
        known, slots = self._known, self._slots
        for slot, name in enumerate(slots):
            row, before = current.get(name), known[name]
            if (
                row is not None
                and row.params is before.params
                and len(row.output_ids) >= len(before.output_ids)
            ):
                before.output_ids[:] = row.output_ids
            else:
                del known[name]
                slots[slot] = FREED
        gaps = [slot for slot, name in enumerate(slots) if name == FREED]
        added, moved = [], []
        for name in [name for name in current if name not in known]:
            slot = gaps.pop(0) if gaps else len(slots)
            row = known[name] = replace(
                current[name], output_ids=list(current[name].output_ids), bitmask=None
            )
            slots[slot : slot + 1] = [name]
            added.append((slot, row.params, row.prompt_ids.tolist(), row.output_ids))
        for slot in gaps:
            while slots and slots[-1] == FREED:
                slots.pop()
            if slot < len(slots):
                slots[slot] = slots.pop()
                moved.append((len(slots), slot, MoveDirectionality.UNIDIRECTIONAL))
        if not (added or gaps):
            return None
        return BatchUpdate(batch_size=len(slots), removed=gaps[::-1], added=added, moved=moved)

    def _edit(self, rows: Sequence[EditedRow], logits: Floats) -> None:
        for row, line in zip(rows, logits):
            if row.bitmask is not None:
                words = np.ascontiguousarray(row.bitmask, dtype="<i4").view(np.uint8)
                line[np.unpackbits(words, count=self._vocab, bitorder="little") == 0] = -np.inf
            if row.params.allowed_token_ids is not None:
                ids = list(row.params.allowed_token_ids)
                kept = line[ids]
                line.fill(-np.inf)
                line[ids] = kept
        tensor = torch.from_numpy(logits)
        outputs = [self._known[row.name].output_ids for row in rows]
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
        if chosen := [slot for slot, row in enumerate(rows) if has_penalties(row.params)]:
            tensor[chosen] = self._penalized(
                tensor[chosen], [rows[slot] for slot in chosen], [outputs[slot] for slot in chosen]
            )

    def _penalized(
        self, logits: torch.Tensor, rows: list[EditedRow], outputs: list[list[int]]
    ) -> torch.Tensor:
        prompts = pad_sequence(
            [torch.from_numpy(row.prompt_ids).long() for row in rows],
            batch_first=True,
            padding_value=self._vocab,  # an id outside the vocabulary
        )
        presence, frequency, repetition = torch.tensor(
            [
                (row.params.presence_penalty, row.params.frequency_penalty,
                 row.params.repetition_penalty)
                for row in rows
            ],
            dtype=torch.float32,
        ).T  # fmt: skip
        return apply_all_penalties(logits, prompts, presence, frequency, repetition, outputs)  # type: ignore[no-any-return]


def bitmask_rows(grammar: Any) -> dict[str, Ids]:
    """Returns the row of each request in vLLM's GrammarOutput. Without speculation a request has
    one row."""
    return (
        {}
        if grammar is None
        else dict(zip(grammar.structured_output_request_ids, grammar.grammar_bitmask, strict=True))
    )
