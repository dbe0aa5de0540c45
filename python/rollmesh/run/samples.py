"""The data of a step: completions, their scores, and the tensors for the trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.run.data import Prompt

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Completion:
    """One sample of a prompt."""

    prompt: Prompt
    token_ids: list[int]  # includes the eos that ended it and the tokens of replies
    logprobs: NDArray[np.float32]  # recorded by the generator for each drawn token
    versions: NDArray[np.int64]  # version of the weights that drew each token
    drawn: NDArray[np.bool_]  # for each of token_ids, whether the policy drew it
    text: Any  # without the eos; for a chat with an environment, the messages
    stopped: bool  # whether eos ended it, not max_tokens
    turns: int = 1  # number of turns of the policy
    kept_tokens: NDArray[np.int32] | None = None  # [tokens, top_k], −1 after the last
    routed_experts: NDArray[np.int16] | None = None  # [prompt + n − 1, moe_layers, k]


@dataclass(frozen=True)
class Rollout:
    """Completions, [prompts × samples], with the samples of a prompt adjacent."""

    completions: list[Completion]
    seconds: float = 0.0  # time of the generation
    environment_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the policy drew."""
        return sum(len(c.logprobs) for c in self.completions)

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """The recorded logprobs of all tokens."""
        return np.concatenate([c.logprobs for c in self.completions])


@dataclass(frozen=True)
class Scores:
    total: list[float]  # [completions]: the weighted sums; NaN: not judged
    values: dict[str, list[float | None]]  # function → [completions]; None: not judged
    seconds_of: dict[str, float]  # function → seconds
    seconds: float  # total time of all functions

    def metrics(self) -> dict[str, float]:
        """Returns reward/NAME, the mean of a function over the completions that it judged, and
        reward_s/NAME, its seconds."""
        judged = {n: [v for v in values if v is not None] for n, values in self.values.items()}
        means = {f"reward/{n}": math.fsum(v) / len(v) for n, v in judged.items() if v}
        return means | {f"reward_s/{name}": seconds for name, seconds in self.seconds_of.items()}

    def mean(self) -> float | None:
        """Returns the mean reward of the judged completions, or None if all are unjudged."""
        return float(np.mean(judged)) if (judged := self._judged()) else None

    def std(self) -> float | None:
        """Returns the standard deviation of the judged rewards, or None if all are unjudged."""
        return float(np.std(judged)) if (judged := self._judged()) else None

    def _judged(self) -> list[float]:
        return [number for number in self.total if not math.isnan(number)]

    def take(self, indices: Sequence[int]) -> Scores:
        """Returns the scores of these completions, with the same seconds."""
        values = {name: [numbers[i] for i in indices] for name, numbers in self.values.items()}
        return replace(self, total=[self.total[i] for i in indices], values=values)

    @staticmethod
    def joined(parts: Sequence[Scores]) -> Scores:
        names = parts[0].values
        return Scores(
            [number for part in parts for number in part.total],
            {name: [value for part in parts for value in part.values[name]] for name in names},
            {name: sum(part.seconds_of[name] for part in parts) for name in names},
            sum(part.seconds for part in parts),
        )


def step_metrics(rollout: Rollout, scores: Scores) -> dict[str, Any]:
    completions, num_tokens = rollout.completions, rollout.num_tokens
    return {
        "reward_mean": scores.mean(),
        "reward_std": scores.std(),
        "unjudged_share": float(np.isnan(scores.total).mean()),
        "tokens": num_tokens,
        "tokens_per_s": num_tokens / rollout.seconds,
        "completion_tokens": num_tokens / len(completions),
        "stopped_share": float(np.mean([c.stopped for c in completions])),
        "generate_s": rollout.seconds,
        "reward_s": scores.seconds,
    }


def completion_rows(step: int, rollout: Rollout, scores: Scores) -> list[dict[str, Any]]:
    """Returns the rows of completions.jsonl."""
    return [
        {
            "step": step,
            "prompt": c.prompt.source,
            "completion": c.text,
            "reward": None if math.isnan(reward) else reward,
            "stopped": c.stopped,
        }
        for c, reward in zip(rollout.completions, scores.total, strict=True)
    ]


@dataclass(frozen=True)
class Batch:
    """B sequences, padded to T; N generated tokens in the order of the sequences."""

    tokens_BT: Tensor  # prompts and completions, T the longest; 0 after the end of a sequence
    mask_BT: Tensor  # whether each of tokens_BT belongs to a sequence
    generated_BT: Tensor  # whether the policy drew each of them
    rows_N: Tensor  # sequence of each generated token
    columns_N: Tensor  # position whose logits predict the token
    targets_N: Tensor  # id of the token
    old_logprobs_N: Tensor  # recorded by the generator
    lengths_B: Tensor  # generated tokens of each sequence
    kept_NK: Tensor | None = None  # int32: tokens that the filters of each draw kept, then −1
    routed_BTLK: Tensor | None = None  # int16 expert ids; −1 without a record
    versions_N: Tensor | None = None  # version of the weights that drew each generated token

    @property
    def ids_BT(self) -> Tensor:
        """tokens_BT without the last column, which predicts nothing."""
        return self.tokens_BT[:, :-1]


def make_batch(completions: Sequence[Completion], device: Any = "cpu") -> Batch:
    """Returns completions as tensors on torch's `device`.

    The routing of a sequence's last token is missing, since it was drawn and never computed. In
    ids_BT only shorter sequences have that token, and no logprob depends on it."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    def joined(arrays: list[Any]) -> Any:
        return None if arrays[0] is None else torch.from_numpy(np.concatenate(arrays)).to(device)

    def padded(rows: list[NDArray[Any]], fill: int = 0) -> Tensor:
        each = [torch.from_numpy(row) for row in rows]
        return pad_sequence(each, batch_first=True, padding_value=fill).to(device)

    tokens = [np.array([*c.prompt.ids, *c.token_ids]) for c in completions]
    tokens_BT = padded(tokens)
    generated_BT = padded(
        [np.append(np.zeros(len(c.prompt.ids), bool), c.drawn) for c in completions]
    )
    rows_N, places_N = generated_BT.nonzero(as_tuple=True)
    routed = [c.routed_experts for c in completions if c.routed_experts is not None]
    return Batch(
        tokens_BT=tokens_BT,
        mask_BT=padded([np.ones(len(row), bool) for row in tokens]),
        generated_BT=generated_BT,
        rows_N=rows_N,
        columns_N=places_N - 1,
        targets_N=tokens_BT[rows_N, places_N],
        old_logprobs_N=joined([c.logprobs for c in completions]),
        lengths_B=generated_BT.sum(1),
        kept_NK=joined([c.kept_tokens for c in completions]),
        routed_BTLK=padded(routed, -1) if routed else None,
        versions_N=joined([c.versions for c in completions]),
    )
