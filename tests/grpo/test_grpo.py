"""The GRPO loop as a whole, on a model of a few thousand weights.

The full learning runs (three seeds, dense and MoE) take minutes:
`pytest -m slow tests/grpo/test_grpo_learning.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from grpo_runs import DENSE, MOE
from helpers import TIMES, TINY_RUN

import rollmesh as rm

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rollmesh.grpo import loop  # noqa: E402
from rollmesh.run import (  # noqa: E402
    checkpoint,
    config,
    metrics,
)

pytestmark = pytest.mark.usefixtures("torch_as_it_was")


# ---------------------------------------------------------------------------------------- metrics
def test_metrics_of_a_killed_run_are_cut_at_the_resumed_step(tmp_path: Path) -> None:
    log = metrics.MetricsLog(tmp_path)
    for step in range(5):
        log.write({"step": step, "x": step * 0.5})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 5, "x"')
    log = metrics.MetricsLog(tmp_path, first_step=3)
    log.write({"step": 3, "x": 7.0})
    log.close()
    assert [(m["step"], m["x"]) for m in metrics.read(tmp_path / "metrics.jsonl")] == [
        (0, 0.0),
        (1, 0.5),
        (2, 1.0),
        (3, 7.0),
    ]


# --------------------------------------------------------------------------------------- the loop
@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs draw_curves, which takes longer than the rest of these small runs: only one test calls
    it."""
    monkeypatch.setattr("rollmesh.run.folder.draw_curves", lambda lines, path: path.touch())
    return metrics.draw_curves


def run(file: Path, out: Path, changes: list[str], resume: Path | None = None) -> loop.Run:
    this = loop.prepare(config.load(file, [*TINY_RUN, *changes]), resume)
    try:
        loop.train(this, out)
    finally:
        this.close()
    return this


def weights_of(this: loop.Run) -> dict[str, bytes]:
    return {name: t.detach().numpy().tobytes() for name, t in this.trainer.state_dict().items()}


def moments_of(this: loop.Run) -> list[bytes]:
    state = this.trainer.optimizer.state_dict()["state"]
    return [
        torch.as_tensor(t).numpy().tobytes()
        for _, entry in sorted(state.items())
        for _, t in sorted(entry.items())
    ]


@pytest.mark.quick(1)
@pytest.mark.parametrize("file", [MOE, DENSE], ids=["moe", "dense"])
def test_a_resumed_run_is_the_same_run_bit_for_bit(file: Path, tmp_path: Path) -> None:
    """Compares four steps at once with two steps, new objects as in a new process, and two more.
    Bound: weights, moments and metrics (except times) are bit-identical. The reference model and a
    sampled evaluation are on, so that they are covered too."""
    changes = ["loss.kl=0.01", "eval.temperature=0.7", "train.minibatches=true"]
    whole = run(file, tmp_path / "whole", [*changes, "train.steps=4"])
    first = run(file, tmp_path / "parts", [*changes, "train.steps=2"])
    assert weights_of(first) != weights_of(whole)
    second = run(file, tmp_path / "parts", [*changes, "train.steps=4"], resume=tmp_path / "parts")
    assert second.first_step == 2
    assert weights_of(second) == weights_of(whole)
    assert moments_of(second) == moments_of(whole)
    lines = [
        [
            {k: v for k, v in m.items() if k not in TIMES}
            for m in metrics.read(tmp_path / name / "metrics.jsonl")
        ]
        for name in ("whole", "parts")
    ]
    assert lines[0] == lines[1]
    assert [m["step"] for m in lines[0]] == list(range(5))


def test_a_run_leaves_what_it_promises(
    tmp_path: Path, drawn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmesh.run.folder.draw_curves", drawn)
    run(
        MOE,
        tmp_path,
        ["train.steps=3", "checkpoint.every=1", "checkpoint.keep=2", "train.micro_batch=5"],
    )
    lines = metrics.read(tmp_path / "metrics.jsonl")
    wanted = {
        "step",
        "reward_mean",
        "logprob_diff_max",
        "logprob_diff_mean",
        "kl_k1",
        "kl_k3",
        "tokens_differ",
        "tokens_per_s",
        "sync_s",
        "pause_s",
    }
    wanted |= {"generate_s", "reward_s", "update_s"}
    assert all(wanted <= m.keys() for m in lines)
    assert ["eval_reward" in m for m in lines] == [True, False, True, True]
    assert max(m["logprob_diff_max"] for m in lines) < 1e-4, (
        "float32 on both sides differs by rounding only"
    )
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == [
        "step_000002",
        "step_000003",
    ]
    assert not list(tmp_path.rglob("*.partial"))
    assert list((tmp_path / "events").glob("events.*"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    files = {p.name for p in (tmp_path / "checkpoints/step_000003").iterdir()}
    assert {"config.json", "model.safetensors", "trainer", "tokenizer.json"} <= files
    assert not [f for f in files if f.endswith((".bin", ".pt", ".pkl"))]


def test_micro_batches_give_the_same_gradient(tmp_path: Path) -> None:
    """One step with micro batches of 5 of 16 sequences against one forward: the sums differ in
    order only."""
    norms = []
    for size in (0, 5):
        run(
            MOE,
            tmp_path / str(size),
            ["train.steps=1", f"train.micro_batch={size}", "loss.aggregation=sequence-mean"],
        )
        norms.append(metrics.read(tmp_path / str(size) / "metrics.jsonl")[0])
    assert norms[0]["grad_norm"] == pytest.approx(norms[1]["grad_norm"], rel=1e-4)
    assert norms[0]["loss"] == pytest.approx(norms[1]["loss"], rel=1e-4, abs=1e-6)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    run(MOE, tmp_path, ["train.steps=1", "train.lr=1e-3"])
    with pytest.raises(
        rm.ConfigError,
        match=r"belongs to another run: train.lr differ \(train.lr: 0.001 there, 0.002 here\)",
    ):
        loop.prepare(config.load(MOE, [*TINY_RUN, "train.steps=2", "train.lr=2e-3"]), tmp_path)
    assert (
        checkpoint.read_state(
            checkpoint.find(tmp_path), config.load(MOE, [*TINY_RUN, "train.lr=2e-3"]), ["train.lr"]
        )
        == 1
    )
    bigger = config.load(MOE, [*TINY_RUN, "train.lr=1e-3", "model.hidden_size=96"])
    with pytest.raises(
        rm.ConfigError,
        match=r"belongs to another run: model\.hidden_size differ .* 96 here\); a run keeps its "
        r"model$",
    ):
        checkpoint.read_state(checkpoint.find(tmp_path), bigger, ["model.hidden_size"])
    with pytest.raises(rm.ConfigError, match="no checkpoint there"):
        loop.prepare(config.load(MOE, TINY_RUN), tmp_path / "none")
    for where in ("checkpoints", "checkpoints/step_000009"):
        with pytest.raises(
            rm.ConfigError, match=r"no checkpoint there .*; .*checkpoints has step_000001$"
        ):
            checkpoint.find(tmp_path / where)


def test_other_prompts_than_those_of_the_run_are_refused(tmp_path: Path) -> None:
    """The file was edited since the run; an option can declare that the data differ."""
    rows = [json.dumps({"prompt": f"{c}=", "answer": c}) + "\n" for c in "abcdefgh"]
    sets = [
        f'data.train=["{tmp_path}/rows"]',
        "data.heldout=[]",
        "data.heldout_share=0.3",
        "data.stage_steps=[]",
    ]
    (tmp_path / "rows").write_text("".join(rows))
    run(MOE, tmp_path / "run", [*sets, "train.steps=1"])
    (tmp_path / "rows").write_text("".join([*rows[:-1], rows[-1].replace('"h"', '"H"')]))
    changed = config.load(MOE, [*TINY_RUN, *sets, "train.steps=1"])
    with pytest.raises(
        rm.ConfigError,
        match=r"belongs to a run with other prompts: expected those of SHA-256 '\w+', got \w+; "
        r"the ",
    ):
        loop.prepare(changed, tmp_path / "run")
    loop.prepare(changed, tmp_path / "run", ["data.train"]).close()
    state = tmp_path / "run/checkpoints/step_000001/trainer/state.json"
    state.write_text(
        json.dumps({k: v for k, v in json.loads(state.read_text()).items() if k != "data"})
    )
    loop.prepare(changed, tmp_path / "run").close()  # a checkpoint of an older version


def test_a_run_starts_from_a_checkpoint_folder_that_the_trainer_reads(tmp_path: Path) -> None:
    first = run(MOE, tmp_path / "a", ["train.steps=1"])
    folder = tmp_path / "a/checkpoints/step_000001"
    this = loop.prepare(
        config.load(MOE, [*TINY_RUN[4:], f'model={{path="{folder}"}}', "tokenizer={}"])
    )
    this.close()
    assert weights_of(this) == weights_of(first)


def test_tokens_of_another_version_are_an_error(tmp_path: Path) -> None:
    this = loop.prepare(config.load(MOE, TINY_RUN))
    try:
        this.generator.sync_weights(this.trainer.state_dict(), version=5)
        with pytest.raises(
            rm.StateError, match=r"step 4: tokens of weight versions \[5\], expected version 4 only"
        ):
            loop.evaluate(this, 4)
    finally:
        this.close()


@pytest.mark.parametrize("kernels", ["torch", "rollmesh"])
def test_trainer_and_generator_must_agree_after_a_sync(kernels: str) -> None:
    """The self-test with the trainer's scorer passes at 1e-3 in float32, with rollmesh's kernels at
    0, and fails after the trainer's next step."""
    this = loop.prepare(config.load(MOE, [*TINY_RUN, f'train.kernels="{kernels}"']))
    try:
        this.generator.sync_weights(this.trainer.state_dict(), version=0)
        assert (this.generator.self_test(this.trainer.score, threshold=1e-3).max_abs_diff > 0) == (
            kernels == "torch"
        )
        with torch.no_grad():
            this.trainer.model.lm_head.weight.mul_(1.1)
        with pytest.raises(rm.NumericsError, match="self-test"):
            this.generator.self_test(this.trainer.score, threshold=1e-3)
    finally:
        this.close()
