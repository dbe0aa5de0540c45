"""The self-test of a sync: checks that trainer and generator compute the same function. It samples
tokens with the new weights, lets the trainer score them, and compares the largest difference of
logprobs with a threshold. A wrong name, a transposed matrix or a stale copy gives a difference of
about 1; rounding stays far below that (float32: 1e-3, bfloat16: 0.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollmesh.errors import ConfigError, NumericsError
from rollmesh.model.spec import ModelSpec
from rollmesh.request.outputs import RequestOutput, SelfTestReport
from rollmesh.request.sampling import SamplingParams
from rollmesh.runtime.arguments import exportable, integer, is_real, items_of
from rollmesh.runtime.messages import shown

Scorer = Callable[[list[NDArray[np.int32]]], Sequence[Any]] | Any
THRESHOLDS = {"float32": 1e-3, "bfloat16": 0.1}


class Generates(Protocol):
    """The part of a generator that a self-test uses."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def dtype(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def version(self) -> int | None: ...

    def generate(
        self, prompts: Sequence[Any], params: Any, use_tqdm: bool
    ) -> list[RequestOutput]: ...


def score_with_model(model: Any, sequences: list[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
    """Returns float32 [len − 1] logprobs for each sequence, computed one sequence at a time by a
    torch module that returns `.logits`."""
    import torch

    scores = []
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            device = next(model.parameters()).device
            for ids in sequences:
                tokens = torch.from_numpy(ids.astype(np.int64)).to(device)
                logits = model(input_ids=tokens[None]).logits[0, :-1].float()
                picked = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
                scores.append(picked.cpu().numpy())
    finally:
        model.train(was_training)
    return scores


def run_self_test(
    generator: Generates,
    scorer: Scorer,
    prompts: Sequence[Any] | None,
    threshold: float | None,
    max_tokens: int,
    seed: int,
) -> SelfTestReport:
    """See Generator.self_test."""
    if threshold is None:
        threshold = THRESHOLDS[generator.dtype]
    if not is_real(threshold) or not threshold >= 0.0:
        raise ConfigError(f"threshold: expected a number >= 0, got {shown(threshold)}")
    if not callable(scorer):
        raise ConfigError(f"scorer: expected a function or a torch module, got {shown(scorer)}")
    # SamplingParams checks the seed.
    max_tokens = integer("max_tokens", max_tokens, 1, generator.max_model_len - 1)
    params = SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, prompt_logprobs=0)
    if prompts is None:
        shape = 8, min(8, generator.max_model_len - max_tokens)
        drawn = np.random.default_rng(seed).integers(0, generator.spec.vocab_size, shape)
        prompts = list(drawn.astype(np.int32))
    outputs = generator.generate(prompts, params, use_tqdm=False)
    version = generator.version
    sequences = [
        np.concatenate([output.prompt_token_ids, output.outputs[0].token_ids]) for output in outputs
    ]
    ours = [
        np.concatenate([_floats(output.prompt_logprobs), output.outputs[0].logprobs])
        for output in outputs
    ]
    is_module = callable(getattr(scorer, "parameters", None)) and callable(
        getattr(scorer, "eval", None)
    )
    theirs = items_of(
        ConfigError,
        "scorer",
        score_with_model(scorer, sequences) if is_module else scorer(sequences),
        len(ours),
    )
    if len(theirs) != len(ours):
        raise ConfigError(
            f"scorer: expected logprobs of {len(ours)} sequences, got those of {len(theirs)}"
        )
    diffs = [
        _difference(mine, _floats(yours), index)
        for index, (mine, yours) in enumerate(zip(ours, theirs, strict=True))
    ]
    if not diffs or not all(diff.size for diff in diffs):
        raise ConfigError("prompts: expected tokens to compare in each, got none")
    flat = np.abs(np.concatenate(diffs))
    largest = [float(np.max(np.abs(diff))) for diff in diffs]
    sequence = int(np.argmax(largest))
    position = int(np.argmax(np.abs(diffs[sequence]))) + 1
    report = SelfTestReport(
        max_abs_diff=largest[sequence],
        mean_abs_diff=float(flat.mean()),
        num_tokens=flat.size,
        threshold=threshold,
        worst=(sequence, position),
        version=-1 if version is None else version,
        diffs=diffs,
    )
    if not report.max_abs_diff <= threshold:
        raise NumericsError(
            f"self-test of version {report.version}: expected |Δ logprob| of at most "
            f"{threshold:g} over {report.num_tokens} tokens, "
            f"got {report.max_abs_diff:.6g} at sequence {sequence}, token {position}"
        )
    return report


def _floats(values: Any) -> NDArray[np.float32]:
    """Returns logprobs as a flat float32 array on the host; `values` may be a torch tensor on any
    device."""
    if callable(getattr(values, "detach", None)):
        values = exportable("scorer", values).float().cpu()
    try:
        return np.asarray(values).astype(np.float32, casting="same_kind").reshape(-1)
    except (TypeError, ValueError, RuntimeError) as error:  # not numbers, or rows of other lengths
        raise ConfigError(f"scorer: expected logprobs, got {shown(values)}") from error


def _difference(
    ours: NDArray[np.float32], theirs: NDArray[np.float32], index: int
) -> NDArray[np.float32]:
    if ours.shape != theirs.shape:
        raise ConfigError(
            f"scorer: expected {ours.size} logprobs for sequence {index}, got {theirs.size}"
        )
    difference: NDArray[np.float32] = theirs - ours
    return np.where(np.isnan(difference), np.float32(np.inf), difference)
