"""What one step generates, scores and learns from.

`Rollout` keeps things by completion, [prompts × samples] with a prompt's samples adjacent; `Batch`
is the same flattened into tensors for the trainer: sequences padded on the right (a causal model
never looks there), generated tokens listed one by one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import rollmesh as rm
from rollmesh.grpo.rewards import Rewards, Scores
from rollmesh.request.text import Detokenizer, TextCodec
from rollmesh.run.data import Prompt, columns_of
from rollmesh.run.seeds import seed_of

if TYPE_CHECKING:
    from torch import Tensor

    from rollmesh.run.generator import RolloutGenerator


@dataclass(frozen=True)
class Rollout:
    prompts: list[Prompt]  # [completions]: each prompt repeated for its samples
    token_ids: list[list[int]]  # of a completion, the eos that ended it included
    logprobs: list[
        NDArray[np.float32]
    ]  # recorded by the generator, under the distribution drawn from
    texts: list[
        Any
    ]  # without that eos; of a chat with an environment the messages after the prompt
    stopped: list[bool]  # ended by eos, not by max_tokens
    drawn: list[NDArray[np.bool_]] | None = (
        # which of token_ids the policy drew and has records of, not the environment; None: all
        None
    )
    turns: list[int] | None = None  # of the policy; None: there is no environment
    kept_tokens: list[NDArray[np.int32]] | None = (
        None  # [tokens, top_k] each, what the filters kept, −1 after the last; None: no filters
    )
    routed_experts: list[NDArray[np.int16]] | None = (
        None  # [prompt + n − 1, moe_layers, k] each; None: not asked for
    )
    trainer_logprobs: list[NDArray[np.float32]] | None = (
        None  # before the step's first update; None: not needed
    )
    versions: list[NDArray[np.int64]] = dataclasses.field(
        default_factory=list
    )  # of the weights that drew each token
    seconds: float = 0.0  # that the generation took
    environment_s: float = 0.0  # and the environment

    @property
    def num_tokens(self) -> int:
        """That were drawn."""
        return sum(map(len, self.logprobs))

    def take(self, indices: Sequence[int]) -> Rollout:
        """These completions; the seconds stay."""
        lists = ((name, getattr(self, name)) for name in _LISTS)
        taken: dict[str, Any] = {
            name: items and [items[i] for i in indices] for name, items in lists
        }
        return dataclasses.replace(self, **taken)

    @staticmethod
    def joined(parts: Sequence[Rollout]) -> Rollout:
        """Of one kind: each with the records that the first has."""
        lists = ((name, getattr(parts[0], name)) for name in _LISTS)
        every: dict[str, Any] = {
            name: items and [item for part in parts for item in getattr(part, name)]
            for name, items in lists
        }
        return Rollout(
            **every,
            seconds=sum(p.seconds for p in parts),
            environment_s=sum(p.environment_s for p in parts),
        )


_LISTS = tuple(
    f.name for f in dataclasses.fields(Rollout) if f.name not in ("seconds", "environment_s")
)  # [completions]


@dataclass(frozen=True)
class Batch:
    """B sequences, padded to T; N generated tokens in the order of the sequences."""

    tokens_BT: Tensor  # prompts and completions, T the longest; 0 where a shorter one has ended
    mask_BT: Tensor  # which of tokens_BT belong to a sequence
    generated_BT: Tensor  # which of them the policy drew
    rows_N: Tensor  # sequence of each generated token
    columns_N: Tensor  # position whose logits predict it
    targets_N: Tensor  # the token
    old_logprobs_N: Tensor  # recorded by the generator
    lengths_B: Tensor  # generated tokens of each sequence
    kept_NK: Tensor | None = (
        None  # int32: the tokens that the filters of each draw kept, −1 after the last
    )
    routed_BTLK: Tensor | None = (
        None  # int16 expert ids of the layers with experts; -1 where there is no record
    )
    trainer_logprobs_N: Tensor | None = None  # before the step's first update
    versions_N: Tensor | None = (
        None  # of the weights that drew each generated token; None: not known
    )

    @property
    def ids_BT(self) -> Tensor:
        """tokens_BT without the last column: nothing follows it."""
        return self.tokens_BT[:, :-1]


def generate(
    generator: RolloutGenerator,
    tokenizer: Any,
    prompts: list[Prompt],
    *,
    sampling: rm.SamplingParams,
    run_seed: int,
    step: int,
    purpose: str,
    version: int,
    newest: int | None = None,
    routing: bool = False,
    places: Sequence[int] | None = None,
    max_tokens: Sequence[int] | None = None,
) -> Rollout:
    """Samples every prompt as `sampling` says; the seed of each is a hash of (run seed, step,
    purpose, prompt, and its place among them or that of `places`). Checks each token's version:
    `version`, or from there to `newest`. `routing`: routed experts are needed; else they are kept
    where the generator records them. `max_tokens`: of each prompt."""
    began = time.perf_counter()
    seeds = [
        seed_of(run_seed, step, f"{purpose}\0{i}\0{p.ids}")
        for i, p in zip(places or range(len(prompts)), prompts, strict=True)
    ]
    lengths: Sequence[int | None] = max_tokens or [sampling.max_tokens] * len(prompts)
    params = [
        dataclasses.replace(sampling, seed=seed, max_tokens=length)
        for seed, length in zip(seeds, lengths, strict=True)
    ]
    outputs = generator.generate([list(p.ids) for p in prompts], params, use_tqdm=False)
    completions = [c for o in outputs for c in o.outputs]
    answered = [p for p in prompts for _ in range(sampling.n)]
    expected = range(version, (version if newest is None else newest) + 1)
    wrong = {int(v) for c in completions for v in c.versions}.difference(expected)
    if wrong:
        wanted = (
            f"version {version} only" if len(expected) == 1 else f"versions {version} to {newest}"
        )
        raise rm.StateError(
            f"step {step}: tokens of weight versions {sorted(wrong)}, expected {wanted}"
        )
    token_ids = [[int(t) for t in c.token_ids] for c in completions]
    return Rollout(
        prompts=answered,
        token_ids=token_ids,
        logprobs=[np.asarray(c.sampling_logprobs, np.float32) for c in completions],
        texts=[text_of(tokenizer, p.ids, c) for p, c in zip(answered, completions, strict=True)],
        stopped=[c.finish_reason == "stop" for c in completions],
        kept_tokens=[c.kept_tokens for c in completions if c.kept_tokens is not None] or None,
        routed_experts=[_routed(c, generator) for c in completions]
        if routing or completions[0].routed_experts is not None
        else None,
        versions=[np.asarray(c.versions, np.int64) for c in completions],
        seconds=time.perf_counter() - began,
    )


def _routed(completion: rm.CompletionOutput, generator: RolloutGenerator) -> NDArray[np.int16]:
    if completion.routed_experts is None:
        name = type(generator).__name__
        raise rm.ConfigError(
            f"[correction] routing_replay: expected false where {name} records no routed experts, "
            "got true"
        )
    return completion.routed_experts


def text_of(tokenizer: Any, prompt_ids: Sequence[int], completion: rm.CompletionOutput) -> str:
    """What a reward judges: the completion without the token that ended it. Other special tokens
    stay in the text: one that is skipped costs nothing, and a policy that pads its answer with them
    would never learn to stop."""
    ended = completion.finish_reason == "stop" and completion.stop_reason is None
    return decode(tokenizer, prompt_ids, completion.token_ids.tolist(), ended)


def decode(tokenizer: Any, prompt_ids: Sequence[int], token_ids: Sequence[int], ended: bool) -> str:
    """The text of a completion. `ended`: its last token is the one that ended it."""
    detokenizer = Detokenizer(TextCodec(tokenizer), prompt_ids, skip_special_tokens=False)
    for token in token_ids[: len(token_ids) - ended]:
        detokenizer.push(token)
    return detokenizer.text


def score(rollout: Rollout, rewards: Rewards) -> Scores:
    """What the rewards say. A completion has the form of its prompt, text or chat."""
    pairs = zip(rollout.prompts, rollout.texts, strict=True)
    completions = [
        [{"role": "assistant", "content": text}] if p.is_chat and isinstance(text, str) else text
        for p, text in pairs
    ]
    return rewards.judge(
        [p.source for p in rollout.prompts],
        completions,
        rollout.token_ids,
        columns_of(rollout.prompts),
    )


def make_batch(rollout: Rollout, indices: list[int] | range, device: Any = "cpu") -> Batch:
    """The completions `indices`, flattened; tensors on torch's `device`.

    The routing of a sequence's last token is not recorded: it was drawn and never computed. Only a
    shorter sequence has it in ids_BT, at a position from which no logprob is taken and to which no
    other looks.
    """
    import torch

    prompts = [rollout.prompts[i].ids for i in indices]
    answers = [rollout.token_ids[i] for i in indices]
    ids = np.zeros(
        (len(prompts), max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))),
        np.int64,
    )
    for row, p, a in zip(ids, prompts, answers, strict=True):
        row[: len(p)] = p
        row[len(p) : len(p) + len(a)] = a
    lengths, starts = np.array([len(a) for a in answers]), np.array([len(p) for p in prompts])
    at = np.arange(ids.shape[1])
    mask = at < (starts + lengths)[:, None]
    generated = mask & (at >= starts[:, None])
    if rollout.drawn is not None:
        for row, start, length, i in zip(generated, starts, lengths, indices, strict=True):
            row[start : start + length] = rollout.drawn[i]
    rows, places = np.nonzero(generated)
    routed = trainer = kept = None
    if rollout.kept_tokens is not None:
        kept = torch.from_numpy(np.concatenate([rollout.kept_tokens[i] for i in indices])).to(
            device
        )
    if rollout.routed_experts is not None:
        records = [rollout.routed_experts[i] for i in indices]
        padded = np.full((len(records), ids.shape[1] - 1, *records[0].shape[1:]), -1, np.int16)
        for row, record in zip(padded, records, strict=True):
            row[: len(record)] = record
        routed = torch.from_numpy(padded).to(device)
    if rollout.trainer_logprobs is not None:
        trainer = torch.from_numpy(
            np.concatenate([rollout.trainer_logprobs[i] for i in indices])
        ).to(device)
    return Batch(
        tokens_BT=torch.from_numpy(ids).to(device),
        mask_BT=torch.from_numpy(mask).to(device),
        generated_BT=torch.from_numpy(generated).to(device),
        rows_N=torch.from_numpy(rows).to(device),
        columns_N=torch.from_numpy(places - 1).to(device),
        targets_N=torch.from_numpy(ids[rows, places]).to(device),
        old_logprobs_N=torch.from_numpy(np.concatenate([rollout.logprobs[i] for i in indices])).to(
            device
        ),
        lengths_B=torch.from_numpy(generated.sum(1)).to(device),
        kept_NK=kept,
        routed_BTLK=routed,
        trainer_logprobs_N=trainer,
        versions_N=torch.from_numpy(np.concatenate([rollout.versions[i] for i in indices])).to(
            device
        )
        if rollout.versions
        else None,
    )


def with_trainer_logprobs(rollout: Rollout, logprobs: NDArray[np.float32]) -> Rollout:
    """`logprobs`: the trainer's, of all tokens in the order of the completions."""
    ends = np.cumsum([len(recorded) for recorded in rollout.logprobs])
    return dataclasses.replace(rollout, trainer_logprobs=np.split(logprobs, ends[:-1]))
