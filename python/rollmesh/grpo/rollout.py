"""Rollouts: the completions that one step generates, scores and learns from.

Dynamic sampling (`sample_groups`, DAPO): with [rollout] filter_groups a step learns from groups
whose judged rewards differ. Groups of equal rewards are left out, and other prompts are drawn and
generated, until the step has all its groups, max_num_gen_batches batches were generated, or the
prompts are used up. Groups of equal rewards then fill the step, so that every step has the same
shape. Rejected: ending such a run, as verl does, because the data may only be too hard so far.
Yu et al. 2025, "DAPO", arXiv 2503.14476. The keys have verl's names.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import rollmesh as rm
from rollmesh.grpo.advantages import rewards_differ
from rollmesh.grpo.rewards import Rewards
from rollmesh.run.config import RolloutTable
from rollmesh.run.data import Prompt, columns_of, completion_text
from rollmesh.run.samples import Completion, Rollout, Scores
from rollmesh.run.seeds import seed_of

if TYPE_CHECKING:
    from rollmesh.run.generator import RolloutGenerator


def generate(
    generator: RolloutGenerator,
    tokenizer: Any,
    prompts: list[Prompt],
    sampling: rm.SamplingParams,
    purpose: str,
    *,
    run_seed: int,
    step: int,
    versions: range,
    routing: bool = False,
    places: Sequence[int] | None = None,
    max_tokens: Sequence[int] | None = None,
) -> Rollout:
    """Samples every prompt. The seed of a prompt is a hash of (run seed, step, purpose, prompt,
    place). Raises StateError for tokens of weights that are not in `versions`.

    routing     fail if the generator does not record routed experts
    places      number of each prompt in the seeds; default: 0, 1, …
    max_tokens  largest number of tokens for each prompt; default: that of `sampling`"""
    began = time.perf_counter()
    lengths: Sequence[int | None] = max_tokens or [sampling.max_tokens] * len(prompts)
    params = [
        dataclasses.replace(
            sampling, seed=seed_of(run_seed, step, f"{purpose}\0{i}\0{p.ids}"), max_tokens=length
        )
        for i, p, length in zip(places or range(len(prompts)), prompts, lengths, strict=True)
    ]
    requests = generator.generate([list(p.ids) for p in prompts], params, use_tqdm=False)
    outputs = [c for request in requests for c in request.outputs]
    if wrong := {int(v) for c in outputs for v in c.versions}.difference(versions):
        wanted = f"version {versions[0]} only"
        if len(versions) > 1:
            wanted = f"versions {versions[0]} to {versions[-1]}"
        raise rm.StateError(
            f"step {step}: tokens of weight versions {sorted(wrong)}, expected {wanted}"
        )
    if routing and any(c.routed_experts is None for c in outputs):
        raise rm.ConfigError(
            f"[correction] routing_replay: expected false where {type(generator).__name__} records "
            "no routed experts, got true"
        )
    repeated = (p for p in prompts for _ in range(sampling.n))
    completions = [
        Completion(
            prompt=prompt,
            token_ids=c.token_ids.tolist(),
            logprobs=np.asarray(c.sampling_logprobs, np.float32),
            versions=np.asarray(c.versions, np.int64),
            drawn=np.ones(len(c.token_ids), bool),
            text=text_of(tokenizer, prompt.ids, c),
            stopped=c.finish_reason == "stop",
            kept_tokens=c.kept_tokens,
            routed_experts=c.routed_experts,
        )
        for prompt, c in zip(repeated, outputs, strict=True)
    ]
    return Rollout(completions, time.perf_counter() - began)


def text_of(tokenizer: Any, prompt_ids: Sequence[int], completion: rm.CompletionOutput) -> str:
    """Returns the text that a reward judges: the completion without the token that ended it. Other
    special tokens stay in the text, so a policy that pads its answer with them pays for it."""
    ended = completion.finish_reason == "stop" and completion.stop_reason is None
    return completion_text(tokenizer, prompt_ids, completion.token_ids.tolist(), ended)


def completion_of(prompt: Prompt, text: Any) -> Any:
    """Returns a completion in the form of its prompt: a text, or a list of messages."""
    if prompt.is_chat and isinstance(text, str):
        return [{"role": "assistant", "content": text}]
    return text


def score(rollout: Rollout, rewards: Rewards) -> Scores:
    """Returns the rewards of all completions."""
    prompts = [c.prompt for c in rollout.completions]
    return rewards.judge(
        [p.source for p in prompts],
        [completion_of(c.prompt, c.text) for c in rollout.completions],
        [c.token_ids for c in rollout.completions],
        columns_of(prompts),
    )


def sample_groups(
    draw: Callable[[int, Sequence[Prompt]], list[Prompt]],
    roll_out: Callable[[list[Prompt], int], Rollout],
    score: Callable[[Rollout], Scores],
    table: RolloutTable,
) -> tuple[Rollout, Scores, dict[str, Any]]:
    """Returns the rollout and the scores of table.prompts groups, in the order of their drawing,
    and the metrics of dynamic sampling.

    draw      a function of a count and the prompts of the step so far; returns other prompts, fewer
              than the count at the end of the data
    roll_out  a function of prompts and the number of the batch in the step; returns their
              samples"""
    rollouts: list[Rollout] = []
    scores: list[Scores] = []
    drawn: list[Prompt] = []
    differ: list[bool] = []  # for each prompt in `drawn`, whether its rewards differ
    while (
        (missing := table.prompts - sum(differ))
        and len(rollouts) < table.max_num_gen_batches
        and (prompts := draw(missing, drawn))
    ):
        rollouts.append(roll_out(prompts, len(rollouts)))
        scores.append(score(rollouts[-1]))
        drawn += prompts
        differ += rewards_differ(np.reshape(scores[-1].total, (-1, table.samples))).tolist()
    # All groups whose rewards differ, then the first ones of equal rewards.
    chosen = sorted(sorted(range(len(drawn)), key=lambda i: not differ[i])[: table.prompts])
    taken = [c for i in chosen for c in range(i * table.samples, (i + 1) * table.samples)]
    completions = [c for rollout in rollouts for c in rollout.completions]
    rollout = Rollout(
        completions, sum(r.seconds for r in rollouts), sum(r.environment_s for r in rollouts)
    )
    scored = Scores.joined(scores)
    metrics = {
        "num_gen_batches": len(rollouts),
        "groups_left_out": len(drawn) - len(chosen),
        "drawn_reward_mean": scored.mean(),
        "tokens_per_s": rollout.num_tokens / rollout.seconds,
    }
    chosen_ones = dataclasses.replace(rollout, completions=[completions[i] for i in taken])
    return chosen_ones, scored.take(taken), metrics
