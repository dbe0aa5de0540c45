"""Dynamic sampling: a step learns from groups whose rewards differ.

A group of equal rewards has no advantage, and generating it was for nothing; the same is true of a
group without a judged reward. With [rollout] filter_groups such groups are left out, and as many
other prompts are drawn and generated, until the step has all its groups, max_num_gen_batches
batches were generated, or the prompts are used up. The step is then filled up with groups of equal
rewards, so that every step has the same shape. `flat_groups` shows it on data that is too hard or
too easy. Rejected: ending such a run, as verl does, because the data may only be too hard so far.

Prompts and seeds are functions of (run seed, step, prompts drawn before), so a resumed run is the
same run where its rewards are functions too. A step draws no prompt twice.

Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", arXiv 2503.14476.
The keys have verl's names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rollmesh.grpo.advantages import rewards_differ
from rollmesh.grpo.rewards import Scores
from rollmesh.grpo.rollout import Rollout
from rollmesh.run.config import RolloutTable
from rollmesh.run.data import Prompt
from rollmesh.run.metrics import Metrics


def sample_groups(
    draw: Callable[[int, Sequence[Prompt]], list[Prompt]],
    roll_out: Callable[[list[Prompt], int], Rollout],
    score: Callable[[Rollout], Scores],
    table: RolloutTable,
) -> tuple[Rollout, Scores, Metrics]:
    """The rollout and the scores of a step, table.prompts groups in the order in which they were
    drawn, and how it came by them.

    draw      (how many, those of the step so far) → other prompts, fewer where there are none
    roll_out  (prompts, number of the batch in the step) → their samples"""
    rollouts: list[Rollout] = []
    scores: list[Scores] = []
    drawn: list[Prompt] = []
    differ: list[bool] = []  # of each prompt drawn
    while (
        (missing := table.prompts - sum(differ))
        and len(rollouts) < table.max_num_gen_batches
        and (prompts := draw(missing, drawn))
    ):
        rollouts.append(roll_out(prompts, len(rollouts)))
        scores.append(score(rollouts[-1]))
        drawn += prompts
        differ += rewards_differ(np.reshape(scores[-1].total, (-1, table.samples))).tolist()
    wanted = [i for i, yes in enumerate(differ) if yes]
    chosen = sorted([*wanted, *[i for i, yes in enumerate(differ) if not yes][:missing]])
    of_all = [c for i in chosen for c in range(i * table.samples, (i + 1) * table.samples)]
    rollout, scored = Rollout.joined(rollouts), Scores.joined(scores)
    told = {
        "num_gen_batches": len(rollouts),
        "groups_left_out": len(drawn) - len(chosen),
        "drawn_reward_mean": scored.mean(),
        "tokens_per_s": rollout.num_tokens / rollout.seconds,
    }
    return rollout.take(of_all), scored.take(of_all), told
