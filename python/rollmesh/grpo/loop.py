"""The GRPO loop, and the protocol of a step.

Weights have a version: the number of the step that uses them. Version 0 is the initial model. Step
n is

    push      the trainer's state dict goes to the generator as version n, whole or not at all,
              directly after the optimizer step that made it; nothing is generated in between
    generate  prompts drawn by (run seed, n), a group of samples each, seeds from (run seed, n,
              prompt); every token records the version it was drawn with, and any but n is an error.
              With [rollout] environment a completion has several turns (multi_turn.py)
    score     the text of each completion → reward → advantage within its group. With [rollout]
              filter_groups other prompts replace groups of equal rewards (dynamic_sampling.py)
    update    clipped GRPO against the logprobs that the generator recorded; AdamW: the weights are
              now version n + 1

With [rollout] async_level = N ≥ 1 a thread generates batch n + N while step n learns from batch n
(async_rollouts.py).

Held-out prompts are generated on the same version n, before the rollouts. So line n of
metrics.jsonl describes version n; the last line, n = steps, has everything but an update. Trainer
and generator are compared on each step's tokens, on the version that drew them (mismatch.py), and a
checkpoint holds what step n + 1 starts from.

The generator reads no checkpoint. It is created from the model's configuration, without weights,
and cannot generate before a push.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rollmesh as rm
from rollmesh.grpo import checkpoint
from rollmesh.grpo.advantages import advantages, rewards_differ
from rollmesh.grpo.async_rollouts import AsyncRollouts, staleness
from rollmesh.grpo.dynamic_sampling import sample_groups
from rollmesh.grpo.mismatch import mismatch
from rollmesh.grpo.multi_turn import Environment, check_template, converse
from rollmesh.grpo.rewards import Rewards, Scores
from rollmesh.grpo.rollout import Rollout, generate, score
from rollmesh.grpo.trainer import Trainer, model_config
from rollmesh.run.config import Config
from rollmesh.run.data import Dataset, Prompt, eos_ids, load_dataset, load_tokenizer
from rollmesh.run.files import expect_file
from rollmesh.run.generator import RolloutGenerator, make_generator
from rollmesh.run.metrics import Completions, CompletionsLog, Metrics, MetricsLog, draw_curves
from rollmesh.run.metrics import read as read_metrics
from rollmesh.run.models import folder_config
from rollmesh.run.overlap import Overlap
from rollmesh.run.seeds import seed_of
from rollmesh.run.signals import Interrupts
from rollmesh.runtime.messages import plain
from rollmesh.weights.self_test import run_self_test

SELF_TEST_SEED = 0
_log = logging.getLogger("rollmesh.grpo")


@dataclass
class Run:
    """The parts of one run. `train(run)` runs it. On a mesh of processes this is rank 0; `follow`
    runs the others."""

    config: Config
    tokenizer: Any
    data: Dataset
    rewards: Rewards
    trainer: Trainer
    generator: RolloutGenerator
    environment: Environment | None = None
    first_step: int = 0
    ready: Sequence[Rollout] = ()  # of the checkpoint: batches first_step, first_step + 1, …
    resumed: Path | None = None  # the checkpoint
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
    """Reads data and tokenizer, builds trainer and an empty generator. `resume`: a run folder or
    one of its checkpoints. `comm`: this process is rank 0 of the generator's mesh."""
    folder = (
        checkpoint.find(resume).absolute() if resume else None
    )  # the import of a reward may change the working folder
    first_step = checkpoint.read_state(folder, config, overridden or []) if folder else 0
    if first_step > config.train.steps:
        raise rm.ConfigError(
            f"[train] steps: expected at least {first_step}, which {folder} has made, got "
            f"{config.train.steps}"
        )
    if config.model.path is not None:
        folder_config(
            config.path(config.model.path), config.model.ignore
        )  # before its tokenizer, which reads it too
    tokenizer = _tokenizer(config)
    data = load_dataset(config, tokenizer)
    if folder:
        checkpoint.check_data(folder, data, overridden or [])
    rewards = Rewards(config.reward.functions, config.reward.weights, Path(config.folder))
    environment = None
    if config.rollout.environment is not None:
        environment = Environment(
            config.rollout.environment, Path(config.folder), rewards.event_loop
        )
        if any("completion" in p.columns for p in (*data.train, *data.heldout)):
            raise rm.ConfigError(
                "[data]: expected no column completion: an environment gets an argument of this "
                "name; rename the column"
            )
        ends = eos_ids(tokenizer, model_config(config, tokenizer, folder))
        check_template(data.train, tokenizer, ends)
    ready = checkpoint.read_rollouts(folder, config, data, tokenizer) if folder else []
    trainer = Trainer(config, tokenizer, folder)
    if folder:
        checkpoint.load_optimizer(folder, trainer)
        checkpoint.verify(folder)  # what cannot be read is named by its reader
    generator = make_generator(config, trainer.model.config, tokenizer, comm)
    if isinstance(generator, rm.Generator):
        generator.follow()
    return Run(
        config, tokenizer, data, rewards, trainer, generator, environment, first_step, ready, folder
    )


def follow(config: Config, resume: Path | None, comm: rm.comm.Comm) -> None:
    """A rank without a trainer: it generates with the others until rank 0 closes the generator."""
    tokenizer = _tokenizer(config)
    hf_config = model_config(config, tokenizer, checkpoint.find(resume) if resume else None)
    with closing(make_generator(config, hf_config, tokenizer, comm)) as generator:
        assert isinstance(generator, rm.Generator)
        generator.follow()


def _tokenizer(config: Config) -> Any:
    source = config.tokenizer.path or config.model.path
    if source is None:
        raise rm.ConfigError(
            "[tokenizer] path: expected a folder or a tokenizer.json; a random model brings none"
        )
    return load_tokenizer(config.path(source))


def train(
    run: Run, out: Path, show: Callable[[Metrics, Completions], None] = lambda *_: None
) -> list[Metrics]:
    """Runs steps first_step … steps and returns the metrics of all lines of the file. `show` gets
    those of each step, and the completions to print.

    A checkpoint that cannot be written is tried again after the next step; only at the end it is an
    OSError. What ends the run early leaves a checkpoint of the last finished step. With async_level
    it waits for the rollouts that this checkpoint has, unless a signal comes."""
    with run.interrupts:
        run.interrupts.hold("the run has begun")
        checkpoint.set_aside(out, run.first_step, run.resumed)
        return _train(run, out, show)


def _train(run: Run, out: Path, show: Callable[[Metrics, Completions], None]) -> list[Metrics]:
    config, last, level = run.config, run.config.train.steps, run.config.rollout.async_level
    out.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "completions.jsonl"):
        expect_file(out / name)
    if (old := out / "metrics.jsonl").exists():
        read_metrics(old)  # what is broken is refused before completions.jsonl is rewritten
    texts, log = CompletionsLog(out, run.first_step), MetricsLog(out, run.first_step)
    overlap = Overlap()
    saved = run.first_step  # next step of the newest checkpoint
    finished = (
        run.first_step,
        run.trainer.num_updates,
    )  # next step, and updates of the weights that it starts from

    def save(ahead: AsyncRollouts | None) -> None:
        nonlocal saved
        rollouts = ahead.take(range(finished[0], finished[0] + level)) if ahead else ()
        run.interrupts.hold("the checkpoint is written")
        before, saved = saved, finished[0]
        try:
            checkpoint.save(
                out, run.trainer, run.tokenizer, config, finished[0], rollouts, run.data.digest
            )
        except OSError:
            saved = before
            raise

    try:
        run.interrupts.release()
        with _async_rollouts(run, overlap) if level else nullcontext() as ahead:
            try:
                for step in range(run.first_step, last + 1):
                    metrics, completions = run_step(run, step, ahead, overlap)
                    texts.write(completions[: config.rollout.log_completions])
                    log.write(metrics)
                    finished = min(step + 1, last), run.trainer.num_updates
                    if ahead and step < last:
                        ahead.drop(step)
                    run.interrupts.release()
                    show(metrics, completions[: config.rollout.num_completions_to_print])
                    if _is_due(config, finished[0], saved):
                        try:
                            save(ahead)
                        except OSError as error:
                            if step == last:
                                raise
                            _log.warning(
                                "%s; the checkpoint is tried again after the next step", error
                            )
                        run.interrupts.release()
            except BaseException as error:
                if finished[0] > saved and finished[1] == run.trainer.num_updates:
                    run.interrupts.drop()
                    if ahead and not ahead.has(range(finished[0], finished[0] + level)):
                        _log.warning(
                            "the checkpoint of step %d waits for rollouts; a signal ends the run "
                            "without it",
                            finished[0],
                        )
                    try:
                        save(ahead)
                    except Exception as why:  # noqa: BLE001 (the first error is raised)
                        error.add_note(
                            f"no checkpoint of step {finished[0]}: {type(why).__name__}: "
                            f"{plain(why)}"
                        )
                raise
        run.interrupts.hold("its last files are written")
        try:
            draw_curves(log.lines, out / "curves.png")
        except Exception as error:  # noqa: BLE001 (a picture ends no run)
            _log.warning("curves.png was not drawn: %s: %s", type(error).__name__, plain(error))
    except BaseException:
        for file in (texts, log):
            with suppress(OSError):  # of a disk that is full: the first error is raised
                file.close()
        raise
    texts.close()
    log.close()
    run.interrupts.release()
    return log.lines


def _is_due(config: Config, next_step: int, saved: int) -> bool:
    """Whether a checkpoint should have been written since the newest one."""
    every = config.checkpoint.every
    return next_step > saved and (
        next_step == config.train.steps or (every > 0 and next_step // every > saved // every)
    )


def _batches(run: Run, version: int) -> range:
    """What a version generates: the batch of the step async_level later; the first one all before
    it too, unless the checkpoint had them. The last checkpoint of a run has as many as any other,
    so that a longer run can go on from it."""
    level, last = run.config.rollout.async_level, run.config.train.steps
    first = run.first_step + len(run.ready) if version == run.first_step else version + level
    return range(first, min(version + level, max(last, last - 1 + level)) + 1)


def _async_rollouts(run: Run, overlap: Overlap) -> AsyncRollouts:

    def generate(batch: int, version: int) -> Rollout:
        overlap.start("generator")
        try:
            return _roll_out(run, batch, version)
        finally:
            overlap.stop("generator")

    return AsyncRollouts(generate, run.generator.abort, dict(enumerate(run.ready, run.first_step)))


def _is_tested(run: Run, step: int) -> bool:
    return step == run.first_step and run.config.sync.self_test > 0


def _test_prompts(run: Run) -> list[list[int]]:
    return [list(p.ids) for p in run.data.heldout[:8]]


def _is_evaluated(run: Run, step: int) -> bool:
    return step % run.config.eval.every == 0 or step == run.config.train.steps


def run_step(
    run: Run, step: int, ahead: AsyncRollouts | None, overlap: Overlap
) -> tuple[Metrics, Completions]:
    """One step of the protocol above: its metrics, and the completions that are written or printed.
    `ahead`: with async_level ≥ 1."""
    config, start = run.config, time.perf_counter()
    if ahead and config.sync.inflight == "wait":
        ahead.wait()
    overlap.start("generator")
    began = time.perf_counter()
    report = run.trainer.push(run.generator, step)
    sync_s = time.perf_counter() - began
    if _is_tested(run, step):
        threshold, max_tokens = config.sync.self_test, config.rollout.max_tokens
        run_self_test(
            run.generator,
            run.trainer.score,
            _test_prompts(run),
            threshold,
            max_tokens,
            SELF_TEST_SEED,
        )
    evaluated = evaluate(run, step) if _is_evaluated(run, step) else {}
    overlap.stop("generator")
    scores: Scores | None = None
    sampled: Metrics = {}
    if ahead:
        ahead.order(_batches(run, step), step)
        [rollout] = ahead.take(range(step, step + 1))
    elif config.rollout.filter_groups:
        rollout, scores, sampled = _sample_groups(run, step)
    else:
        rollout = _roll_out(run, step)
    behind = staleness(rollout, step, config.rollout.async_level)
    overlap.start("trainer")
    scores = scores or score(rollout, run.rewards)
    rewards = np.array(scores.total)
    metrics: Metrics = {
        "step": step,
        "reward_mean": scores.mean(),
        "reward_std": scores.std(),
        "unjudged_share": float(np.isnan(rewards).mean()),
        "tokens": rollout.num_tokens,
        "tokens_per_s": rollout.num_tokens / rollout.seconds,
        "completion_tokens": rollout.num_tokens / len(rollout.texts),
        "stopped_share": float(np.mean(rollout.stopped)),
        "sync_s": sync_s,
        "sync_gb_per_s": report.gb_per_s,
        "generate_s": rollout.seconds,
        "reward_s": scores.seconds,
    } | sampled
    if rollout.turns is not None:
        metrics |= {
            "turns_mean": float(np.mean(rollout.turns)),
            "environment_s": rollout.environment_s,
        }
    if len(run.rewards.names) > 1:
        metrics |= scores.metrics()
    last = step == config.train.steps
    metrics |= evaluated
    began = time.perf_counter()
    run.interrupts.hold("this step's update")
    if last:
        logprobs = run.trainer.logprobs_of(rollout)
    else:
        grouped = _shuffled(rewards, config, step).reshape(-1, config.rollout.samples)
        metrics["flat_groups"] = float((~rewards_differ(grouped)).mean())
        advantage = advantages(grouped, config.loss.baseline, config.loss.scale).reshape(-1)
        learned, logprobs = run.trainer.learn(rollout, advantage, step)
        metrics |= learned
    metrics["update_s"] = time.perf_counter() - began
    metrics |= mismatch(logprobs, np.concatenate(rollout.logprobs))
    overlap.stop("trainer")
    if ahead:
        metrics |= behind | overlap.shares()
    metrics["step_s"] = time.perf_counter() - start
    count = max(config.rollout.log_completions, config.rollout.num_completions_to_print)
    judged = [None if np.isnan(reward) else reward for reward in scores.total[:count]]
    rows = zip(rollout.prompts[:count], rollout.texts, judged, rollout.stopped, strict=False)
    return metrics, [
        {"step": step, "prompt": p.source, "completion": t, "reward": r, "stopped": s}
        for p, t, r, s in rows
    ]


def evaluate(run: Run, step: int) -> Metrics:
    """Mean reward of one completion of each held-out prompt on the serving version. None: no
    completion was judged."""
    began = time.perf_counter()
    rollout = _held_out(run, step)
    return {
        "eval_reward": score(rollout, run.rewards).mean(),
        "eval_s": time.perf_counter() - began,
    }


def _sample_groups(run: Run, step: int) -> tuple[Rollout, Scores, Metrics]:
    return sample_groups(
        lambda count, drawn: run.data.draw(run.config.seed, step, count, drawn),
        lambda prompts, batch: _samples(
            run, prompts, step, f"rollout {batch}" if batch else "rollout", step, step
        ),
        lambda rollout: score(rollout, run.rewards),
        run.config.rollout,
    )


def _roll_out(run: Run, step: int, version: int | None = None) -> Rollout:
    """The batch of a step, by `version`, or by that and later ones if a sync does not wait for it.
    None: the step's own version."""
    version = step if version is None else version
    newest = version if run.config.sync.inflight == "wait" else step
    return _samples(
        run,
        run.data.draw(run.config.seed, step, run.config.rollout.prompts),
        step,
        "rollout",
        version,
        newest,
    )


def _samples(
    run: Run, prompts: list[Prompt], step: int, purpose: str, version: int, newest: int
) -> Rollout:
    """A group of each prompt."""
    table, keep = run.config.rollout, run.config.correction.routing_replay
    filters: dict[str, Any] = {}
    if table.top_k:
        filters = {
            "top_k": table.top_k,
            "top_p": table.top_p,
            "min_p": table.min_p,
            "kept_tokens": True,
        }
    sampling = rm.SamplingParams(
        n=table.samples, max_tokens=table.max_tokens, temperature=table.temperature, **filters
    )
    return _generate(run, prompts, step, purpose, sampling, version, newest, keep)


def _held_out(run: Run, step: int) -> Rollout:
    table = run.config.eval
    sampling = rm.SamplingParams(
        max_tokens=run.config.rollout.max_tokens, temperature=table.temperature
    )
    return _generate(
        run, list(run.data.heldout[: table.prompts]), step, "held-out", sampling, step, step
    )


def _generate(
    run: Run,
    prompts: list[Prompt],
    step: int,
    purpose: str,
    sampling: rm.SamplingParams,
    version: int,
    newest: int,
    routing: bool = False,
) -> Rollout:
    def draw(of: list[Prompt], purpose: str, sampling: rm.SamplingParams, **each: Any) -> Rollout:
        return generate(
            run.generator,
            run.tokenizer,
            of,
            sampling=sampling,
            run_seed=run.config.seed,
            step=step,
            purpose=purpose,
            version=version,
            newest=newest,
            routing=routing,
            **each,
        )

    first = draw(prompts, purpose, sampling)
    if run.environment is None:
        return first
    one, ends = dataclasses.replace(sampling, n=1), eos_ids(run.tokenizer, run.trainer.model.config)
    return converse(
        first,
        lambda turn, places, of, left: draw(
            of, f"{purpose}, turn {turn}", one, places=places, max_tokens=left
        ),
        run.environment,
        run.tokenizer,
        ends,
        run.config.rollout,
    )


def _shuffled(rewards: NDArray[np.float64], config: Config, step: int) -> NDArray[np.float64]:
    """The control experiment: the step's rewards, permuted over its completions. Nothing can be
    learned from them."""
    if not config.reward.shuffle:
        return rewards
    return np.random.default_rng(seed_of(config.seed, step, "shuffle")).permutation(rewards)
