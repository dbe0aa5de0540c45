"""`rollmesh grpo --generator vllm` is bit-identical to a run of the default engine.

Input: configs/qwen3_moe_debug.toml cut to two steps of 64 completions, float32 on one worker and
bfloat16 on two. Oracle: the same configuration with rollmesh's own engine. Bound: every metric but
the times, and every weight of the last checkpoint, are equal; also for a run that one engine began
and the other resumed. Each run with vLLM is a separate process, as a user starts it. The parts that
work without vLLM (the configuration, the error when vLLM is missing) are tested everywhere."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import TIMES
from paths import ROOT

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import rollmesh as rm  # noqa: E402
from rollmesh.cli import main  # noqa: E402
from rollmesh.grpo import loop  # noqa: E402
from rollmesh.run import (  # noqa: E402
    checkpoint,
    config,
    metrics,
)
from rollmesh.run import vllm as vllm_engine  # noqa: E402

CONFIG = ROOT / "configs/qwen3_moe_debug.toml"
SHORT = [
    "train.steps=2",
    "rollout.prompts=8",
    "rollout.samples=8",
    "eval.prompts=8",
    "eval.every=1",
    "eval.temperature=0.7",
]
BFLOAT16 = ["generator.dtype=bfloat16", "sync.cast=true", "sync.self_test=0.5"]
REPLAY = "correction.routing_replay=true"
pytestmark = pytest.mark.usefixtures("torch_as_it_was", "no_pictures")
WORKS = all(
    importlib.util.find_spec(name) for name in ("vllm", "rich", "matplotlib", "tensorboard")
)
needs_vllm = pytest.mark.skipif(not WORKS, reason="needs vllm and rollmesh's extra train")


# ----------------------------------------------------------------------------------- without vLLM
@pytest.mark.parametrize(
    "changes, message",
    [
        (
            ["generator.engine=vllm", "rollout.top_k=5"],
            r'\[rollout\] top_k: expected 0 where \[generator\] engine is "vllm" .*, got 5',
        ),
        (
            ["generator.engine=sglang"],
            r'\[generator\] engine: expected one of "rollmesh", "vllm", got "sglang"',
        ),
        (
            ["generator.engine=vllm", "generator.comm_timeout=5"],
            r"\[generator\] comm_timeout: expected 1800.0 where .*, got 5.0",
        ),
        (
            ["generator.engine=vllm", "generator.state_interval=32"],
            r"\[generator\] state_interval: expected 0 where .*, got 32",
        ),
        (
            ["generator.engine=vllm", "generator.comm=shm"],
            r'\[generator\] comm: expected "auto" or "threads" where .* engine is "vllm" .*, '
            r'got "shm"',
        ),
        (
            ["generator.engine=vllm", "generator.tp=2", "generator.dp=2", "generator.ep=2"],
            r'\[generator\] ep: expected 1 or 4 where .* engine is "vllm" .*, got 2',
        ),
    ],
)
def test_what_vllm_cannot_be_told_is_refused(changes: list[str], message: str) -> None:
    with pytest.raises(rm.ConfigError, match=f"^{message}"):
        config.load(CONFIG, changes)


def test_a_run_may_change_its_engine(tmp_path: Path) -> None:
    """The engine is among the keys that a resumed run may change, like the number of threads; this
    also holds for a checkpoint without this key."""
    assert "generator.engine" in checkpoint.MAY_DIFFER
    (tmp_path / "trainer").mkdir()
    then = config.load(CONFIG).as_dict()
    del then["generator"]["engine"]
    (tmp_path / checkpoint.STATE).write_text(
        json.dumps({"format": checkpoint.FORMAT, "next_step": 5, "config": then})
    )
    assert checkpoint.read_state(tmp_path, config.load(CONFIG, ["generator.engine=vllm"]), []) == 5


def test_without_vllm_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The error comes before any file is written."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "vllm" else find("json")
    )
    assert main(["grpo", str(CONFIG), "--generator", "vllm", "--out", str(tmp_path / "run")]) == 2
    assert (
        "ConfigError: generating with vLLM needs the package vllm: pip install"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


def test_the_plugin_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that the user gave stay. If vLLM was imported without our plugin it is too late."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    for name in ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_NO_USAGE_STATS", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    for before, after in (
        ("", "rollmesh"),
        ("other", "other,rollmesh"),
        ("rollmesh_model", "rollmesh_model,rollmesh"),
    ):
        monkeypatch.setenv("VLLM_PLUGINS", before)
        assert vllm_engine.ask_for_plugin()
        assert os.environ["VLLM_PLUGINS"] == after
        assert not vllm_engine.ask_for_plugin()
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    with pytest.raises(
        rm.ConfigError,
        match=r'^VLLM_PLUGINS: expected rollmesh in it before vllm is imported, got "other"',
    ):
        vllm_engine.ask_for_plugin()


def test_torchrun_round_vllm_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_engine, "ask_for_plugin", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["grpo", str(CONFIG), "--generator", "vllm"]) == 2
    assert re.search(
        "ConfigError: WORLD_SIZE: expected no torchrun around vLLM.*, got 2$",
        capsys.readouterr().err,
        re.MULTILINE,
    )


def sample(**changes: Any) -> SimpleNamespace:
    """Makes a completion like vLLM's: three tokens, of versions 4, 4 and 5, that a stop token
    ended."""
    spans = [
        SimpleNamespace(version="4", start=0, end=2),
        SimpleNamespace(version="5", start=2, end=3),
    ]
    fields = {
        "index": 0,
        "token_ids": [7, 8, 2],
        "finish_reason": "stop",
        "stop_reason": 2,
        "weight_versions": spans,
        "routed_experts": None,
    }
    return SimpleNamespace(
        **fields | {"logprobs": SimpleNamespace(logprobs=[-1.5, -0.25, -2.0])} | changes
    )


def test_records_are_read_as_vllm_gives_them() -> None:
    """Worked out by hand. The eos, which vLLM handles as a stop token, is an end without a reason;
    a logprob keeps its bits."""
    # The second position has two entries.
    prompt = SimpleNamespace(logprobs=[-3.0, -0.5, -4.0], start_indices=[0, 0, 2])
    output = SimpleNamespace(
        outputs=[sample()],
        prompt_token_ids=[1, 5, 6],
        num_cached_tokens=None,
        prompt_logprobs=prompt,
    )
    read = vllm_engine.output_of(output, 3, rm.SamplingParams(seed=0), frozenset({2}))
    c = read.outputs[0]
    assert (c.token_ids.tolist(), c.finish_reason, c.stop_reason, c.versions.tolist()) == (
        [7, 8, 2],
        "stop",
        None,
        [4, 4, 5],
    )
    assert c.sampling_logprobs.tolist() == c.logprobs.tolist() == [-1.5, -0.25, -2.0]
    assert read.prompt_logprobs is not None
    assert read.prompt_logprobs.tolist() == [-3.0, -4.0]
    at_two = vllm_engine.output_of(
        output, 3, rm.SamplingParams(seed=0, temperature=2.0), frozenset()
    ).outputs[0]
    assert at_two.stop_reason == 2
    assert np.isnan(at_two.logprobs).all()
    biased = vllm_engine.output_of(
        output, 3, rm.SamplingParams(seed=0, logit_bias={7: 1.0}), frozenset()
    ).outputs[0]
    assert np.isnan(biased.logprobs).all()
    assert c.routed_experts is None
    every = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2)
    output.outputs = [sample(routed_experts=every)]
    routed = (
        vllm_engine.output_of(
            output, 3, rm.SamplingParams(seed=0), frozenset(), (True, False, True)
        )
        .outputs[0]
        .routed_experts
    )
    assert routed is not None
    assert routed.dtype == np.int16
    assert routed.tolist() == [[row[0].tolist(), row[2].tolist()] for row in every]
    output.outputs = [sample(weight_versions=None)]
    assert vllm_engine.output_of(output, 3, rm.SamplingParams(), frozenset()).outputs[
        0
    ].versions.tolist() == [-1, -1, -1]


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"finish_reason": "error", "stop_reason": "NumericsError: row 3"},
            "request 9, sample 0: ended with error: NumericsError: row 3",
        ),
        ({"finish_reason": "abort", "stop_reason": None}, "request 9, sample 0: ended with abort"),
        ({"token_ids": [7, 8]}, "request 9, sample 0: 3 logprobs for 2 tokens"),
    ],
)
def test_a_completion_that_is_none_is_an_error(changes: dict[str, Any], message: str) -> None:
    output = SimpleNamespace(
        outputs=[sample(**changes)], prompt_token_ids=[1], num_cached_tokens=0, prompt_logprobs=None
    )
    with pytest.raises(rm.Error, match=f"^{message}"):
        vllm_engine.output_of(output, 9, rm.SamplingParams(), frozenset())


@needs_vllm
def test_what_vllm_does_not_do_is_refused() -> None:
    for option, message in (
        ({"kept_tokens": True, "top_k": 3}, "kept_tokens: expected False with vLLM, .*, got True"),
        ({"stop": "x"}, r"stop: expected none, got \['x'\]"),
        ({"bad_words": "x"}, r"bad_words: expected none, got \['x'\]"),
        ({"seed": None}, "seed: expected a number, got None"),
    ):
        with pytest.raises(rm.RequestError, match=f"^{message}"):
            vllm_engine.vllm_params(rm.SamplingParams(**{"seed": 0, **option}), [])


# -------------------------------------------------------------------------------------- with vLLM
def started(
    out: Path, changes: list[str], *arguments: str, path: Path | None = None
) -> subprocess.Popen[str]:
    """`path`: where the modules are that the config names."""
    command = [sys.executable, "-m", "rollmesh", "grpo", str(CONFIG), "--out", str(out), *arguments]
    command += [word for change in [*SHORT, *changes] for word in ("--set", change)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(path), environment.get("PYTHONPATH")])
        )
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def own(out: Path, changes: list[str], resume: Path | None = None) -> None:
    """A run of rollmesh's own engine, in this process."""
    run = loop.prepare(config.load(CONFIG, [*SHORT, *changes]), resume)
    try:
        loop.train(run, out)
    finally:
        run.close()


def on_vllm(out: Path, changes: list[str], *arguments: str) -> str:
    """Returns stderr of a successful run. A run that takes too long is killed with its workers."""
    process = started(out, changes, *arguments)
    try:
        said, complaints = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"{said}\n{complaints}"
    return complaints


def lines(out: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in line.items() if name not in TIMES}
        for line in metrics.read(out / "metrics.jsonl")
    ]


def weights(out: Path, step: int) -> bytes:
    return (out / f"checkpoints/step_{step:06}/model.safetensors").read_bytes()


def same(out: Path, oracle: Path, steps: int) -> None:
    mine, theirs = lines(out), lines(oracle)
    assert [line["step"] for line in mine] == list(range(steps + 1))
    assert max(line["reward_mean"] for line in mine) > 0, (
        "rewards of zero teach nothing, and nothing would be compared"
    )
    for a, b in zip(mine, theirs, strict=True):
        assert a == b, f"step {a['step']}"
    assert weights(out, steps) == weights(oracle, steps)


@needs_vllm
def test_a_run_on_vllm_is_the_run_without_it_and_goes_on_without_it(tmp_path: Path) -> None:
    """Compares three steps of rollmesh's engine with two of vLLM's and, resumed, the third without
    it."""
    own(tmp_path / "own", ["train.steps=3"])
    said = on_vllm(tmp_path / "vllm", [], "--generator", "vllm")
    assert "VLLM_PLUGINS=rollmesh: set for this run" in said
    assert weights(tmp_path / "vllm", 2) != weights(tmp_path / "own", 3)
    own(tmp_path / "vllm", ["train.steps=3"], tmp_path / "vllm")
    same(tmp_path / "vllm", tmp_path / "own", 3)


@needs_vllm
def test_two_workers_in_bfloat16_give_the_same_run(tmp_path: Path) -> None:
    """Experts are spread over two ranks. vLLM also does the self-test: prompt logprobs, and those
    of drawn tokens. The trainer replays the routing that vLLM returns."""
    own(tmp_path / "own", [*BFLOAT16, REPLAY])
    on_vllm(
        tmp_path / "vllm", [*BFLOAT16, REPLAY, "generator.engine=vllm"], "--tp", "2", "--ep", "2"
    )
    same(tmp_path / "vllm", tmp_path / "own", 2)


@needs_vllm
def test_rollouts_ahead_are_those_without_vllm(tmp_path: Path) -> None:
    """At async_level 1, vLLM's processes generate while this process learns."""
    ahead = ["rollout.async_level=1", "train.steps=3"]
    own(tmp_path / "own", ahead)
    on_vllm(tmp_path / "vllm", ahead, "--generator", "vllm")
    same(tmp_path / "vllm", tmp_path / "own", 3)


@needs_vllm
def test_an_error_while_vllm_generates_ends_the_run(tmp_path: Path) -> None:
    """A reward raises while the next batch is in flight: neither side waits for the other."""
    (tmp_path / "late.py").write_text(
        "calls = []\n"
        "def late(prompts, completions, **columns):\n"
        "    calls.append(0)\n"
        # the fourth call divides by zero
        "    return [float(len(calls) / (4 - len(calls))) for _ in completions]\n"
    )
    changes = ["reward.functions=['late:late']", "rollout.async_level=1", "train.steps=9"]
    process = started(tmp_path / "run", changes, "--generator", "vllm", path=tmp_path)
    complaints = process.communicate(timeout=120)[1]
    assert process.returncode != 0
    assert "reward late:late raised ZeroDivisionError" in complaints


@needs_vllm
def test_a_failed_self_test_ends_the_run_and_its_processes(tmp_path: Path) -> None:
    """The tolerance is so small that the self-test fails by rounding. A few seconds later all
    processes of the session have ended."""
    process = started(
        tmp_path / "run", ["sync.self_test=1e-12", "train.kernels=torch"], "--generator", "vllm"
    )
    complaints = process.communicate(timeout=300)[1]
    assert process.returncode == 2, complaints
    assert "NumericsError: self-test of version 0: expected |Δ logprob| of at most" in complaints
    deadline = time.monotonic() + 30
    while (left := members(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


def members(session: int) -> list[str]:
    """Returns the command lines of a session's processes that are not defunct."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(
                    (stat.parent / "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                )
        except (OSError, ProcessLookupError):
            continue
    return found
