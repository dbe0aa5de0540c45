"""The GRPO loop, and the protocol of a step.

          ┌──────────────── push: the weights become version n ───────────────┐
          ▼                                                                   │
      generator ── tokens, logprobs ──► rewards ──► advantages ──► trainer ───┘
          ▲         (Rollout)           (Scores)    (per group)    (loss, AdamW)
      prompts of step n

Weights have a version, the number of the step that uses them; version 0 is the initial model.
Step n is

    push      gives the trainer's state dict to the generator as version n, completely or not at
              all, directly after the optimizer step
    generate  draws prompts by (run seed, n), and a group of samples for each, with seeds from (run
              seed, n, prompt). Every token records its version; any but n is an error. An
              environment (environment.py) adds turns, dynamic sampling (rollout.py) other groups
    score     text of each completion → reward → advantage within its group
    learn     clipped GRPO (loss.py) against the logprobs that the generator recorded, then AdamW:
              the weights are now version n + 1

With [rollout] async_level = N ≥ 1 a thread generates batch n + N while step n learns from batch n
(run/async_rollouts.py).

Held-out prompts are generated on version n too, before the rollouts. So line n of metrics.jsonl
describes version n; the last line, n = steps, has everything but an update. Each step compares
trainer and generator on its tokens (loss.py). A checkpoint has what step n + 1 starts from.

The generator reads no checkpoint. It is created from the model's configuration, without weights.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rollmesh as rm
from rollmesh.grpo.advantages import advantages, rewards_differ
from rollmesh.grpo.environment import converse
from rollmesh.grpo.loss import mismatch
from rollmesh.grpo.rewards import Rewards
from rollmesh.grpo.rollout import generate, sample_groups, score
from rollmesh.grpo.trainer import Trainer
from rollmesh.request.arguments import eos_ids
from rollmesh.run import checkpoint
from rollmesh.run.async_rollouts import AsyncRollouts, Overlap, batches_of, staleness
from rollmesh.run.config import Config
from rollmesh.run.data import Dataset, Prompt, load_dataset
from rollmesh.run.environment import Environment, check_template
from rollmesh.run.folder import RunFolder
from rollmesh.run.generator import RolloutGenerator, group_sampling, make_generator
from rollmesh.run.metrics import Completions, Metrics
from rollmesh.run.models import model_config, read_tokenizer
from rollmesh.run.samples import Rollout, Scores, completion_rows, step_metrics
from rollmesh.run.seeds import seed_of
from rollmesh.run.signals import Interrupts
from rollmesh.weights.self_test import run_self_test

_log = logging.getLogger("rollmesh.grpo")
WAITS = "the checkpoint of step %d waits for rollouts; a signal ends the run without it"


@dataclass
class Run:
    """The parts of one run. On a mesh of processes rank 0 has it; the others call `follow`."""

    config: Config
    tokenizer: Any
    data: Dataset
    rewards: Rewards
    trainer: Trainer
    generator: RolloutGenerator
    environment: Environment | None = None
    first_step: int = 0
    ready: Sequence[Rollout] = ()  # rollouts in the checkpoint, for first_step, first_step + 1, …
    resumed: Path | None = None  # the resumed checkpoint
    interrupts: Interrupts = field(default_factory=Interrupts)

    def close(self) -> None:
        try:
            self.generator.close()
        finally:
            self.rewards.close()


def prepare(
    config: Config,
    resume: Path | None = None,
    overridden: list[str] | None = None,
    comm: rm.comm.Comm | None = None,
) -> Run:
    """Reads data and tokenizer, and builds the trainer and a generator without weights.

    resume      a run folder or one of its checkpoints
    overridden  keys that may differ from those of the checkpoint
    comm        this process is rank 0 of the generator's mesh"""
    keys = overridden or []
    # Absolute, since the import of a reward may change the working folder.
    folder = checkpoint.find(resume).absolute() if resume else None
    first_step = checkpoint.read_state(folder, config, keys) if folder else 0
    tokenizer = read_tokenizer(config)
    data = load_dataset(config, tokenizer)
    if folder:
        checkpoint.check_data(folder, data, keys)
    rewards = Rewards(config.reward.functions, config.reward.weights, Path(config.folder))
    environment = None
    if (name := config.rollout.environment) is not None:
        environment = Environment(name, Path(config.folder), rewards.event_loop)
        spec = rm.ModelSpec.from_hf(model_config(config, tokenizer, folder))
        check_template(data.train, tokenizer, eos_ids(None, tokenizer, spec))
    ready = checkpoint.read_rollouts(folder, config, data, tokenizer) if folder else []
    trainer = Trainer(config, tokenizer, folder)
    if folder:
        checkpoint.load_optimizer(folder, trainer)
        checkpoint.verify(folder)  # last, since the readers have better messages
    generator = make_generator(config, trainer.model.config, tokenizer, comm)
    if isinstance(generator, rm.Generator):
        generator.follow()
    return Run(
        config, tokenizer, data, rewards, trainer, generator, environment, first_step, ready, folder
    )


def follow(config: Config, resume: Path | None, comm: rm.comm.Comm) -> None:
    """Runs a rank without a trainer: it generates until rank 0 closes the generator."""
    tokenizer = read_tokenizer(config)
    hf_config = model_config(config, tokenizer, checkpoint.find(resume) if resume else None)
    with closing(make_generator(config, hf_config, tokenizer, comm)) as generator:
        assert isinstance(generator, rm.Generator)
        generator.follow()


def train(
    run: Run, out: Path, show: Callable[[Metrics, Completions], None] = lambda *_: None
) -> list[Metrics]:
    """Runs the steps from first_step to `steps`, and returns all lines of metrics.jsonl. Calls
    `show` with the metrics of each step and the completions to print.

    If a checkpoint cannot be written, the run tries again after the next step; at the last step it
    raises OSError. A run that ends early writes a checkpoint of the last finished step. With
    async_level it waits for the rollouts of that checkpoint, unless a signal arrives."""
    config, overlap = run.config, Overlap()
    level, last = config.rollout.async_level, config.train.steps
    ahead = _async_rollouts(run, overlap) if level else None

    def save(step: int, is_early: bool) -> None:
        rollouts: Sequence[Rollout] = ()
        if ahead:
            if is_early and not ahead.has(range(step, step + level)):
                _log.warning(WAITS, step)
            rollouts = ahead.take(range(step, step + level))
        run.interrupts.hold("the checkpoint is written")
        digest = run.data.digest
        checkpoint.save(out, run.trainer, run.tokenizer, config, step, rollouts, digest)

    with run.interrupts:
        run.interrupts.hold("the run has begun")
        checkpoint.set_aside(out, run.first_step, run.resumed)
        first, trainer = run.first_step, run.trainer
        with (
            ahead or nullcontext(),
            RunFolder(out, config, first, trainer, run.interrupts, save, show) as folder,
        ):
            run.interrupts.release()
            for step in range(first, last + 1):
                folder.finish(step, *run_step(run, step, ahead, overlap))
                if ahead and step < last:
                    ahead.drop(step)
        return folder.lines


def run_step(
    run: Run, step: int, ahead: AsyncRollouts | None, overlap: Overlap
) -> tuple[Metrics, Completions]:
    """Runs one step (ahead: with async_level ≥ 1). Returns its metrics and its completions."""
    config, start = run.config, time.perf_counter()
    if ahead and config.sync.inflight == "wait":
        ahead.wait()
    with overlap.working("generator"):
        pushed, sync_s = _push(run, step)
        is_evaluated = step % config.eval.every == 0 or step == config.train.steps
        evaluated = evaluate(run, step) if is_evaluated else {}
    scores: Scores | None = None
    sampled: Metrics = {}
    if ahead:
        level, last = config.rollout.async_level, config.train.steps
        batches = batches_of(step, run.first_step, len(run.ready), level, last)
        ahead.order(batches, step)
        [rollout] = ahead.take(range(step, step + 1))
    elif config.rollout.filter_groups:
        rollout, scores, sampled = _sample_groups(run, step)
    else:
        rollout = _roll_out(run, step)
    behind = staleness(rollout, step, config.rollout.async_level)
    with overlap.working("trainer"):
        scores = scores or score(rollout, run.rewards)
        began = time.perf_counter()
        run.interrupts.hold("this step's update")
        logprobs, learned = _learn(run, rollout, scores, step)
        update_s = time.perf_counter() - began
    metrics: Metrics = {
        "step": step,
        **step_metrics(rollout, scores),
        "sync_s": sync_s,
        "pause_s": pushed.pause_s,
        "sync_gb_per_s": pushed.gb_per_s,
        **sampled,
    }
    if run.environment is not None:
        metrics["turns_mean"] = float(np.mean([c.turns for c in rollout.completions]))
        metrics["environment_s"] = rollout.environment_s
    if len(run.rewards.names) > 1:
        metrics |= scores.metrics()
    metrics |= evaluated | learned | {"update_s": update_s}
    metrics |= mismatch(logprobs, rollout.logprobs)
    if ahead:
        metrics |= behind | overlap.shares()
    metrics["step_s"] = time.perf_counter() - start
    count = max(config.rollout.log_completions, config.rollout.num_completions_to_print)
    return metrics, completion_rows(step, rollout, scores)[:count]


def _push(run: Run, step: int) -> tuple[rm.SyncReport, float]:
    began = time.perf_counter()
    report = run.trainer.push(run.generator, step)
    seconds, threshold = time.perf_counter() - began, run.config.sync.self_test
    if step == run.first_step and threshold > 0:
        prompts = [list(p.ids) for p in run.data.heldout[:8]]
        max_tokens = run.config.rollout.max_tokens
        run_self_test(run.generator, run.trainer.score, prompts, threshold, max_tokens, seed=0)
    return report, seconds


def _learn(
    run: Run, rollout: Rollout, scores: Scores, step: int
) -> tuple[NDArray[np.float32], Metrics]:
    """Returns the trainer's logprobs on the weights before the update, and the metrics."""
    config, rewards = run.config, np.array(scores.total)
    if step == config.train.steps:
        return run.trainer.logprobs_of(rollout), {}
    if config.reward.shuffle:  # control experiment: these rewards contain no information
        rng = np.random.default_rng(seed_of(config.seed, step, "shuffle"))
        rewards = rng.permutation(rewards)
    groups = rewards.reshape(-1, config.rollout.samples)
    advantage = advantages(groups, config.loss.baseline, config.loss.scale).reshape(-1)
    learned, logprobs = run.trainer.learn(rollout, advantage, step)
    return logprobs, {"flat_groups": float((~rewards_differ(groups)).mean()), **learned}


def evaluate(run: Run, step: int) -> Metrics:
    """Returns the mean reward of one completion per held-out prompt; None: all are unjudged."""
    began, config = time.perf_counter(), run.config
    sampling = rm.SamplingParams(
        max_tokens=config.rollout.max_tokens, temperature=config.eval.temperature
    )
    prompts = list(run.data.heldout[: config.eval.prompts])
    rollout = _generate(run, prompts, step, "held-out", sampling, range(step, step + 1))
    reward = score(rollout, run.rewards).mean()
    return {"eval_reward": reward, "eval_s": time.perf_counter() - began}


def _roll_out(run: Run, step: int, version: int | None = None) -> Rollout:
    """Generates the batch of a step with the weights `version` (default: the step's own), or also
    later ones if a sync does not wait for it."""
    config, first = run.config, step if version is None else version
    last = first if config.sync.inflight == "wait" else step
    prompts = run.data.draw(config.seed, step, config.rollout.prompts)
    versions = range(first, last + 1)
    return _generate(run, prompts, step, "rollout", group_sampling(config), versions)


def _sample_groups(run: Run, step: int) -> tuple[Rollout, Scores, Metrics]:
    def roll_out(prompts: list[Prompt], batch: int) -> Rollout:
        purpose, versions = f"rollout {batch}" if batch else "rollout", range(step, step + 1)
        return _generate(run, prompts, step, purpose, group_sampling(run.config), versions)

    return sample_groups(
        lambda count, drawn: run.data.draw(run.config.seed, step, count, drawn),
        roll_out,
        lambda rollout: score(rollout, run.rewards),
        run.config.rollout,
    )


def _generate(
    run: Run,
    prompts: list[Prompt],
    step: int,
    purpose: str,
    sampling: rm.SamplingParams,
    versions: range,
) -> Rollout:
    """Samples the prompts, with all turns if there is an environment."""
    draw = partial(
        generate,
        run.generator,
        run.tokenizer,
        run_seed=run.config.seed,
        step=step,
        versions=versions,
        routing=run.config.correction.routing_replay,
    )
    first = draw(prompts, sampling, purpose)
    if run.environment is None:
        return first
    one = dataclasses.replace(sampling, n=1)
    return converse(
        first,
        lambda turn, places, so_far, left: draw(
            so_far, one, f"{purpose}, turn {turn}", places=places, max_tokens=left
        ),
        run.environment,
        run.tokenizer,
        eos_ids(None, run.tokenizer, run.generator.spec),
        run.config.rollout,
    )


def _async_rollouts(run: Run, overlap: Overlap) -> AsyncRollouts:
    def generate(batch: int, version: int) -> Rollout:
        with overlap.working("generator"):
            return _roll_out(run, batch, version)

    return AsyncRollouts(generate, run.generator.abort, dict(enumerate(run.ready, run.first_step)))
