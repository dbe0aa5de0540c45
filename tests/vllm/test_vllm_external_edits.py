"""Logits edited on the host are those of vLLM's Sampler before temperature.

Input: random logits and requests with random controls, several at once, that come and go over steps
in any order, as in a batch. Oracle: vllm.v1.sample.sampler.Sampler.apply_logits_processors, with
all of its inputs built again in each step, after xgrammar's bitmask kernel; and for each control
alone, its definition in plain Python. Bound: 0 differing bits.
"""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("VLLM_PLUGINS", "rollmesh")
pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

with warnings.catch_warnings():  # which are errors here, and vLLM's own
    warnings.simplefilter("ignore")
    import torch
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.sample.logits_processor import (
        LogitsProcessor,
        build_logitsprocs,
        process_dict_updates,
    )
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    import rollmesh as rm
    from rollmesh.vllm.worker.external_edits import EditedRow, ExternalEdits, bitmask_rows

VOCAB = 77  # not a multiple of 32
MAX_SEQS = 16


class Counting(LogitsProcessor):
    """A user-defined processor with state: it adds the number of tokens so far to token 0."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool):
        self.rows: dict[int, list[int]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self.rows,
            batch_update,
            lambda params, prompt, output: output if params.extra_args else None,
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        added = torch.zeros_like(logits)
        for row, output in self.rows.items():
            added[row, 0] = len(output)
        return logits + added  # another tensor


class AfterTemperature(Counting):
    def is_argmax_invariant(self) -> bool:
        return True


def config(*processors: Any) -> Any:
    """Returns the fields of a VllmConfig that are read."""
    model = SimpleNamespace(logits_processors=list(processors), get_vocab_size=lambda: VOCAB)
    scheduler = SimpleNamespace(max_num_seqs=MAX_SEQS)
    return SimpleNamespace(model_config=model, scheduler_config=scheduler, speculative_config=None)


def random_params(rng: np.random.Generator) -> SamplingParams:
    def ids(most: int) -> list[int]:
        return rng.integers(0, VOCAB, rng.integers(1, most)).tolist()

    controls: list[dict[str, Any]] = [
        {"presence_penalty": float(rng.uniform(-2, 2))},
        {"frequency_penalty": float(rng.uniform(-2, 2))},
        {"repetition_penalty": float(rng.uniform(0.1, 2))},
        {"logit_bias": {token: float(rng.uniform(-100, 100)) for token in ids(9)}},
        {"allowed_token_ids": ids(40)},
        {"_bad_words_token_ids": [ids(3) for _ in range(6)]},
        {"min_tokens": int(rng.integers(1, 6)), "stop_token_ids": ids(5)},
        {"structured_outputs": StructuredOutputsParams(json_object=True)},
        {"extra_args": {"count": True}},
        {"min_p": 0.3},  # owned by the engine: must not change here
    ]
    chosen = rng.random(len(controls)) < 0.35
    return SamplingParams(
        **{
            key: value
            for control, on in zip(controls, chosen)
            if on
            for key, value in control.items()
        }
    )


def random_row(rng: np.random.Generator, name: str) -> EditedRow:
    params = random_params(rng)
    prompt = rng.integers(0, VOCAB, rng.integers(1, 20)).astype(np.int32)
    return EditedRow(name, params, prompt, rng.integers(0, VOCAB, rng.integers(0, 4)).tolist())


def stepped(rng: np.random.Generator, row: EditedRow) -> EditedRow:
    """Advances one token, or goes back one when vLLM drops the drawn token; with a grammar, also
    with this step's bitmask."""
    output = (
        row.output_ids[:-1]
        if rng.random() < 0.1
        else [*row.output_ids, int(rng.integers(0, VOCAB))]
    )
    mask = (
        rng.integers(-(2**31), 2**31, -(-VOCAB // 32)).astype(np.int32)
        if row.params.structured_outputs
        else None
    )
    return EditedRow(row.name, row.params, row.prompt_ids, output, mask)


def of_vllm(raw: np.ndarray, rows: list[EditedRow], *processors: Any) -> np.ndarray:
    """Computes the oracle."""
    import xgrammar

    logits = torch.from_numpy(raw.copy())
    masked = [i for i, row in enumerate(rows) if row.bitmask is not None]
    if masked:
        masks = np.full((len(rows), -(-VOCAB // 32)), -1, np.int32)
        for i in masked:
            masks[i] = rows[i].bitmask
        xgrammar.apply_token_bitmask_inplace(logits, torch.from_numpy(masks), indices=masked)
    made = build_logitsprocs(config(), torch.device("cpu"), False, False, list(processors))
    added = [
        (i, row.params, row.prompt_ids.tolist(), list(row.output_ids)) for i, row in enumerate(rows)
    ]
    for processor in made.all:
        processor.update_state(BatchUpdate(batch_size=len(rows), removed=[], added=added, moved=[]))
    allowed = torch.zeros(len(rows), VOCAB, dtype=torch.bool)
    for i, row in enumerate(rows):
        if row.params.allowed_token_ids is not None:
            allowed[i] = True
            allowed[i, row.params.allowed_token_ids] = False
    longest = max(len(row.prompt_ids) for row in rows)
    prompts = torch.full((len(rows), longest), VOCAB, dtype=torch.int64)
    for i, row in enumerate(rows):
        prompts[i, : len(row.prompt_ids)] = torch.from_numpy(row.prompt_ids)
    metadata = SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=False,
        prompt_token_ids=prompts,
        frequency_penalties=torch.tensor([row.params.frequency_penalty for row in rows]),
        presence_penalties=torch.tensor([row.params.presence_penalty for row in rows]),
        repetition_penalties=torch.tensor([row.params.repetition_penalty for row in rows]),
        output_token_ids=[list(row.output_ids) for row in rows],
        allowed_token_ids_mask=allowed,
        bad_words_token_ids={
            i: row.params.bad_words_token_ids
            for i, row in enumerate(rows)
            if row.params.bad_words_token_ids
        },
        logitsprocs=made,
    )
    return Sampler().apply_logits_processors(logits, metadata, False).numpy()


def random_logits(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.normal(0, 5, (rows, VOCAB)).astype(np.float32)


@pytest.mark.parametrize("round_", range(20))
def test_as_vllms_sampler(rng: np.random.Generator, round_: int) -> None:
    host = ExternalEdits(config(Counting))
    assert [type(processor) for processor in host.custom] == [Counting]
    running: dict[str, EditedRow] = {}
    for step in range(25):
        for name in [name for name in running if rng.random() < 0.15]:
            del running[name]
        while (len(running) < MAX_SEQS and rng.random() < 0.5) or not running:
            name = f"request {rng.integers(0, 40)}"  # another request may reuse a name
            running[name] = random_row(rng, name)
        running = {name: stepped(rng, row) for name, row in running.items()}
        # Some requests skip a step.
        rows = [running[name] for name in rng.permutation(list(running)) if rng.random() < 0.9]
        if not rows:
            continue
        raw, never_drawn = (
            random_logits(rng, len(rows)),
            np.flatnonzero(rng.random(VOCAB) < rng.choice([0, 0.2])).astype(np.int32),
        )
        before, hidden = raw.copy(), raw.copy()
        hidden[:, never_drawn] = -np.inf  # as compute_logits gives them to vLLM
        got, want = host.edit(raw, rows, never_drawn), of_vllm(hidden, rows, Counting)
        assert np.array_equal(raw, before)
        assert np.array_equal(got.view(np.uint32), want.view(np.uint32)), (
            f"step {step}, rows {np.flatnonzero((got != want).any(1))}"
        )


def test_a_grammar_ends_before_min_tokens(rng: np.random.Generator) -> None:
    """If a grammar allows only the end, min_tokens does not ban it."""
    mask = np.zeros(3, np.int32)
    mask[9 // 32] = 1 << (9 % 32)
    params = SamplingParams(
        min_tokens=5,
        stop_token_ids=[9],
        structured_outputs=StructuredOutputsParams(json_object=True),
    )
    raw = random_logits(rng, 1)
    rows = bitmask_rows(
        SimpleNamespace(structured_output_request_ids=["a"], grammar_bitmask=mask[None])
    )
    got = ExternalEdits(config()).edit(
        raw, [EditedRow("a", params, np.array([5], np.int32), [], rows["a"])]
    )
    assert np.flatnonzero(np.isfinite(got[0])).tolist() == [9]
    assert got[0, 9] == raw[0, 9]


def test_a_processor_after_temperature_is_refused() -> None:
    with pytest.raises(
        rm.ConfigError,
        match=r"AfterTemperature: expected is_argmax_invariant\(\) = False, got True",
    ):
        ExternalEdits(config(AfterTemperature))
