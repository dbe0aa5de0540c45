"""Rollouts for tests, from lists by completion."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from rollmesh.run.samples import Completion, Rollout


def rollout_of(
    prompts: Sequence[Any],
    token_ids: Sequence[list[int]],
    logprobs: Sequence[Any],
    texts: Sequence[Any],
    stopped: Sequence[bool],
    seconds: float = 0.0,
    **lists: Sequence[Any],
) -> Rollout:
    versions = [np.zeros(len(recorded), np.int64) for recorded in logprobs]
    drawn = [np.ones(len(ids), bool) for ids in token_ids]
    lists = {"versions": versions, "drawn": drawn, **lists}
    return Rollout(
        [
            Completion(
                prompt=prompts[i],
                token_ids=token_ids[i],
                logprobs=logprobs[i],
                text=texts[i],
                stopped=stopped[i],
                **{name: values[i] for name, values in lists.items()},
            )
            for i in range(len(prompts))
        ],
        seconds,
    )


def lists(rollout: Rollout) -> Any:
    """The fields of the completions, each as a list."""
    columns = {name: [getattr(c, name) for c in rollout.completions] for name in FIELDS}
    return SimpleNamespace(**columns)


FIELDS = tuple(Completion.__dataclass_fields__)
