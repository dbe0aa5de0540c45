"""TitanRL (torchtitan.experiments.rl) on rollmesh: its Controller, trainer, loss, routers and
torchstore, in Monarch's processes.

Input: examples/titan/grpo.py, a small Qwen3-MoE from random weights in float32. Oracle: the
logprobs of torchtitan's own forward pass, and the weights after each step (digests) of one
generator in one process. Bound: 1e-5; with RollmeshTrainer 0; equal digests."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

pytest.importorskip("torchtitan")
pytest.importorskip("monarch")

import titan_cpu

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchtitan's, that torch was imported before
    import rollmesh.titan
import helpers
from torchtitan.config import OverrideConfig
from torchtitan.experiments.rl import controller
from torchtitan.experiments.rl.actors import generator as titan
from torchtitan.experiments.rl.models.vllm_registry import InferenceParallelismConfig
from torchtitan.experiments.rl.observability import metrics as m
from torchtitan.experiments.rl.routing.intra_generator_router import IntraGeneratorRouter
from torchtitan.experiments.rl.routing.strategies import LeastLoadedRoutingStrategy

import rollmesh as rm
from rollmesh.titan import RollmeshGenerator, generator


# ------------------------------------------------------------------------------------------- runs
class Run:
    """One training run and what it printed."""

    def __init__(self, script: str, *arguments: str, timeout: float = 300):
        # Monarch is silent under pytest, and this process's execution is not the child's.
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTEST_", "HYPERACTOR_"))
        }
        # fmt: off
        self.done = subprocess.run(
            [sys.executable, "-W", "ignore", str(ROOT / script), *arguments],
            env={**env, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=timeout,
            check=False,
        )
        # fmt: on
        self.text = self.done.stdout + self.done.stderr

    def all_of(self, pattern: str) -> list[str]:
        return re.findall(pattern, self.text)

    def check(self) -> Run:
        assert self.done.returncode == 0, self.text[-6000:]
        return self

    @property
    def digests(self) -> list[str]:
        """Returns one digest for each version, which must be equal on all generators."""
        told = self.all_of(r"version (\d+) serves, .*, digest ([0-9a-f]{16})")
        versions = {
            int(version): {digest for other, digest in told if other == version}
            for version, _ in told
        }
        assert all(len(each) == 1 for each in versions.values()), versions
        return [versions[version].pop() for version in sorted(versions)]

    @property
    def differences(self) -> list[float]:
        return list(map(float, self.all_of(r"bit_wise/logprob_diff/max: (\S+)")))


@functools.cache
def plain() -> Run:
    return Run("examples/titan/grpo.py", "--steps", "2").check()


def test_one_generator() -> None:
    assert len(set(plain().digests)) == 3  # versions 0, 1 and 2
    assert len(plain().differences) == 2
    assert max(plain().differences) <= 1e-5
    for name in ("num_cached_tokens", "inter_token_latency_ms", "queue_time_ms", "decode_time_ms"):
        assert f"generator/{name}/mean" in plain().text


def test_two_generators_of_two_processes_train_the_same_weights() -> None:
    run = Run(
        "examples/titan/grpo.py",
        "--steps",
        "2",
        "--generators",
        "2",
        "--processes",
        "--tp",
        "2",
        "--ep",
        "2",
    ).check()
    assert len(run.all_of("version 1 serves")) == 2
    assert run.digests == plain().digests
    assert run.differences == plain().differences


@functools.cache
def killed() -> Run:
    """Two steps with the generator's forward pass in a trainer of two ranks, then rank 1 of the
    generator's two is killed."""
    arguments = ["--same-bits", "--trainer-ranks", "2", "--processes", "--tp", "2", "--ep", "2"]
    return Run("tests/support/titan_killed.py", "--steps", "1000", *arguments)


def test_the_trainers_forward_pass_is_the_generators() -> None:
    assert killed().differences[:2] == [0.0, 0.0], killed().text[-6000:]
    assert len(set(killed().digests)) >= 2


def test_a_killed_rank_is_named() -> None:
    """Monarch names it, and so does the rank that has detected the loss, unless Monarch ends that
    rank first: then another run is killed."""
    runs = [killed()]
    while (
        "RankLostError: lost rank 1: the process has ended" not in runs[-1].text and len(runs) < 4
    ):
        runs.append(killed.__wrapped__())
    for run in runs:
        assert run.done.returncode not in (0, -signal.SIGKILL), run.text[-6000:]
        assert "Killed(sig=9)" in run.text
    assert "RankLostError: lost rank 1: the process has ended" in runs[-1].text, runs[-1].text[
        -6000:
    ]


@pytest.mark.slow
def test_a_killed_generator_is_named() -> None:
    run = Run("tests/support/titan_killed.py", "--steps", "1000", "--generators", "2")
    assert run.done.returncode not in (0, -signal.SIGKILL), run.text[-6000:]
    assert re.search(r"RollmeshGenerator generator_1\{.*\n.*Killed\(sig=9\)", run.text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--generators", "2"],
        ["--processes", "--tp", "2", "--ep", "2"],
        ["--tp", "2", "--ep", "2"],
    ],
)
def test_it_learns(arguments: list[str]) -> None:
    run = Run("examples/titan/grpo.py", *arguments, timeout=600).check()
    rewards = list(map(float, run.all_of(r"rollout_reward/_mean: (\S+)")))
    assert rewards[0] < 0.1
    assert rewards[-1] >= 0.9
    assert max(run.differences) <= 1e-5


WRONG = {
    "generate before start": "RuntimeError: generate: call start_engine_loop on all ranks first",
    "start again": None,
    "generate before weights": "NotSyncedError",
    "pull before push": "Mapping is missing from the store",
    "pull": None,
    "older version": "VersionError: .*0",
    "nan": "NonFiniteError: .* norm.weight: element .3. is not finite",
    "missing": "MissingKeyError: .*model.norm.weight",
    "empty prompt": "RequestError: ",
    "token out of range": "RequestError: .*100000",
    "long prompt": "RequestError: .*65",
    "temperature": "RequestError: temperature: expected a finite float32 >= 0, got -1.0",
    "good again": None,
    "close": None,
    "close again": None,
    "generate after close": "StateError: the generator is closed",
}


def test_calls_that_an_actor_refuses(tmp_path: Path) -> None:
    """Each call raises the expected error, and afterwards the old version serves bit-identical
    results."""
    run = Run("tests/support/titan_actor.py", str(tmp_path)).check()
    told: dict[str, Any] = dict(
        json.loads(line) for line in run.text.splitlines() if line.startswith('["')
    )
    for name, words in WRONG.items():
        assert (words is None) == (told[name] is None), f"{name}: {told[name]}"
        assert words is None or re.search(words, told[name]), f"{name}: {told[name]}"
    assert [said for name, said in told.items() if name.startswith("old serves")] == [True] * 4
    assert told["same id"][0] == ""
    assert told["same id"][-1].endswith("ValueError: request_id 'same' is already in flight")
    assert all(said is None or "StateError" in said for said in told["in flight at close"])


# ------------------------------------------------------------------------------ the actor's parts
def test_metrics_are_vllm_generators() -> None:
    """Computed by vLLM's generator's own function, on the times of one of our requests."""
    config = helpers.tiny_config(False)
    with rm.Generator(
        rm.ModelSpec.from_hf(config),
        dtype="float32",
        max_model_len=64,
        kv_cache_gib=0.01,
        threads=1,
    ) as made:
        made.sync_weights(helpers.numpy_state_dict(config, 0, "float32"))
        for max_tokens in (1, 5):
            [output] = made.generate(
                [[1, 2, 3]],
                rm.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                use_tqdm=False,
            )
            times = output.metrics
            assert times is not None
            inputs = titan._RequestMetricsInputs(
                num_cached_tokens=output.num_cached_tokens, has_stats=True,
                queued_ts=times.queued_ts, scheduled_ts=times.scheduled_ts,
                first_token_ts=times.first_token_ts, last_token_ts=times.last_token_ts,
                first_token_latency=times.first_token_ts - times.queued_ts,
                num_generation_tokens=len(output.outputs[0].token_ids),
            )  # fmt: skip
            want = titan._prepare_generation_request_metrics(inputs, prefix="p")
            found = generator._metrics(output, "p", 7)
            told = {(metric.key, type(metric.value)): metric.value.value for metric in found}
            for kind in (m.Mean, m.Max):
                assert told.pop(("p/inflight_requests_at_completion", kind)) == 7.0
            assert told == {(metric.key, type(metric.value)): metric.value.value for metric in want}


def test_a_completion_has_its_first_and_last_version() -> None:
    config = helpers.tiny_config(False)
    with rm.Generator(
        rm.ModelSpec.from_hf(config),
        dtype="float32",
        max_model_len=64,
        kv_cache_gib=0.01,
        threads=1,
    ) as made:
        made.sync_weights(helpers.numpy_state_dict(config, 0, "float32"), version=3)
        made.submit([[1, 2, 3]], rm.SamplingParams(max_tokens=8, ignore_eos=True))
        made.poll()
        made.sync_weights(
            helpers.numpy_state_dict(config, 1, "float32"), version=5, inflight="keep"
        )
        [output] = made.poll(1)
        found = generator._completion(output, "r", 5, [])
        assert (found.min_policy_version, found.max_policy_version, found.request_id) == (3, 5, "r")
        assert found.token_ids == output.outputs[0].token_ids.tolist()
        assert found.token_logprobs == output.outputs[0].logprobs.tolist()
        made.submit([[1, 2, 3]])
        made.abort()
        [aborted] = made.poll(1)
        found = generator._completion(aborted, "r", 5, generator._metrics(aborted, "p", 1))
        assert (
            found.token_ids,
            found.min_policy_version,
            found.max_policy_version,
            found.finish_reason,
        ) == ([], 5, 5, "abort")


def test_sampling_means_the_same() -> None:
    sampling = titan.SamplingConfig(
        temperature=0.5, top_p=0.9, max_tokens=7, seed=3, stop_token_ids=[5, 6]
    )
    assert generator._params_of(sampling) == rm.SamplingParams(
        temperature=0.5, top_p=0.9, max_tokens=7, seed=3, stop_token_ids=(5, 6)
    )
    assert (
        generator._params_of(replace(sampling, stop_token_ids=None, seed=None)).stop_token_ids == ()
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {
                "override": OverrideConfig(
                    imports=["torchtitan.overrides.fused_swiglu.fused_swiglu"]
                )
            },
            "generator.override: expected none",
        ),
        (
            {
                "reset_running_requests_on_weight_sync": False,
                "reset_prefix_cache_on_weight_sync": False,
            },
            "expected True, as old KV serves",
        ),
        (
            {
                "intra_generator_router": IntraGeneratorRouter.Config(
                    strategy=LeastLoadedRoutingStrategy.Config()
                )
            },
            "intra_generator_router: expected the default",
        ),
        (
            {
                "mesh": rm.Mesh(tp=2),
                "parallelism": InferenceParallelismConfig(tensor_parallel_degree=2),
            },
            "generator.mesh: expected None with 2 processes",
        ),
    ],
)
def test_what_the_generator_does_not_have_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(rm.ConfigError, match=re.escape(message)):
        RollmeshGenerator.Config(**options)


def test_a_model_that_is_not_computed_is_refused_before_anything_starts() -> None:
    model = titan_cpu.model_registry("debugmodel", attn_backend="flex")
    for wrong in (0, 5000):
        with pytest.raises(
            rm.ConfigError, match=rf"generator.max_model_len: .*4096.*, got {wrong}"
        ):
            RollmeshGenerator.Config(max_model_len=wrong).spec_of(model)
    model.model.layers[0].attention_norm.eps = 0.5
    with pytest.raises(rm.ConfigError, match=r"eps"):
        RollmeshGenerator.Config().spec_of(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "device: expected 'cpu', 'cuda' or 'cuda:N', got 'gpu'"),
        (
            {"model_dtype": "auto"},
            "generator.model_dtype: expected one of bfloat16, float32, got 'auto'",
        ),
        ({"threads": 0}, "generator.threads: expected an integer in [1, 256], got 0"),
        ({"kv_cache_gib": 0}, "generator.kv_cache_gib: expected a number of GiB above 0"),
        ({"kv_cache_gib": float("nan")}, "got nan"),
        ({"kv_cache_gib": "1"}, "got '1'"),
        ({"mesh": "tp=2"}, "generator.mesh: expected a Mesh, got 'tp=2'"),
        ({"mesh": rm.Mesh(tp=3)}, "tp: expected a divisor of num_attention_heads=16, got 3"),
        (
            {"parallelism": InferenceParallelismConfig(tensor_parallel_degree=3)},
            "tp: expected a divisor of num_attention_heads=16, got 3",
        ),
        (
            {"parallelism": None},
            "generator.parallelism: expected a InferenceParallelismConfig, got None",
        ),
        (
            {"reset_prefix_cache_on_weight_sync": "False"},
            "generator.reset_prefix_cache_on_weight_sync: expected a bool, got 'False'",
        ),
        (
            {"max_num_batched_tokens": 0},
            "generator.max_num_batched_tokens: expected an integer in [1, 1048576], got 0",
        ),
        (
            {"debug": type(RollmeshGenerator.Config().debug)(seed=-1)},
            "generator.debug.seed: expected an integer in [0, ",
        ),
        ({"sampling": titan.SamplingConfig(temperature=-1.0)}, "temperature"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_starts(
    options: dict[str, Any], message: str
) -> None:
    model = titan_cpu.model_registry("debugmodel", attn_backend="flex")
    with pytest.raises(rm.Error, match=re.escape(message)):
        RollmeshGenerator.Config(**options).spec_of(model)


@pytest.mark.parametrize(
    "config", [None, {}, RollmeshGenerator.Config()], ids=["None", "dict", "generator"]
)
def test_install_takes_a_controllers_config(config: Any) -> None:
    with pytest.raises(rm.ConfigError, match=r"config: expected a Controller\.Config of TitanRL"):
        rollmesh.titan.install(config)


@pytest.mark.parametrize("trainer", [3, "RollmeshTrainer", dict, RollmeshGenerator], ids=str)
def test_install_takes_a_trainers_class(trainer: Any) -> None:
    registry = importlib.import_module(
        "torchtitan.experiments.rl.examples.alphabet_sort.config_registry"
    )
    with pytest.raises(
        rm.ConfigError,
        match="trainer: expected PolicyTrainer, a class that derives from it, or None",
    ):
        rollmesh.titan.install(registry.rl_grpo_qwen3_0_6b_varlen(), trainer=trainer)


def first_rollout(seed: int | None) -> list[int]:
    """Returns the first rollout of a new generator, by the actor's endpoint without its process."""
    config = RollmeshGenerator.Config(debug=type(RollmeshGenerator.Config().debug)(seed=seed))
    actor: Any = object.__new__(RollmeshGenerator)
    spec = helpers.tiny_config(False)
    with rm.Generator(
        rm.ModelSpec.from_hf(spec),
        dtype="bfloat16",
        max_model_len=64,
        kv_cache_gib=0.01,
        threads=1,
        seed=seed or 0,
    ) as gen:
        gen.sync_weights(helpers.numpy_state_dict(spec, 0, "bfloat16"))
        vars(actor).update(
            config=config, gen=gen, policy_version=1, _rank=0, _in_flight=set(), _is_started=True
        )
        endpoint = inspect.unwrap(RollmeshGenerator.generate._method)(
            actor, [1, 2, 3], request_id="r", routing_session_id="s"
        )
        return list(asyncio.run(endpoint).token_ids)


def test_generators_without_a_seed_draw_differently() -> None:
    """Otherwise the samples of a prompt on two generators would come in pairs."""
    assert first_rollout(3) == first_rollout(3)
    assert first_rollout(None) != first_rollout(None)


def test_titanrls_own_configs_are_taken() -> None:
    registry = importlib.import_module(
        "torchtitan.experiments.rl.examples.alphabet_sort.config_registry"
    )
    configs = [
        made()
        for name, made in vars(registry).items()
        if name.startswith("rl_grpo_qwen3") and inspect.isfunction(made)
    ]
    assert len(configs) >= 8
    for config in configs:
        if config.generator.override.imports:
            with pytest.raises(
                rm.ConfigError, match=r"install\(config, override=OverrideConfig\(\)\) drops them"
            ):
                rollmesh.titan.install(config)
        taken = rollmesh.titan.install(config, override=OverrideConfig(), kv_cache_gib=2.0)
        assert isinstance(taken.generator, RollmeshGenerator.Config)
        assert (taken.generator.sampling, taken.generator.kv_cache_gib) == (
            config.generator.sampling,
            2.0,
        )
        assert controller.VLLMGenerator is RollmeshGenerator
        assert (
            rollmesh.titan.install(taken, trainer=rollmesh.titan.RollmeshTrainer).generator
            == taken.generator
        )
    with pytest.raises(TypeError, match="kv_cache"):
        rollmesh.titan.install(configs[0], kv_cache=1.0)
    other = registry.rl_grpo_gpt_oss_debug_varlen()
    with pytest.raises(rm.ConfigError, match="expected torchtitan's Qwen3Model"):
        rollmesh.titan.install(other)


@pytest.mark.skipif(
    "without_vllm" not in sys.modules["vllm"].__file__, reason="a real vLLM is here"
)
def test_the_stand_in_for_vllm_says_so() -> None:
    import vllm
    from vllm.config import VllmConfig

    assert isinstance(VllmConfig, type)
    with pytest.raises(
        ImportError,
        match=r"vLLM is not installed, and vllm.LLM was called; pip install 'rollmesh\[vllm\]'",
    ):
        vllm.LLM(model="m")


def test_the_trainers_parallelism_is_refused_by_name() -> None:
    from torchtitan.config import CompileConfig, ParallelismConfig
    from torchtitan.experiments.rl.actors.trainer import PolicyTrainer

    trainer = object.__new__(rollmesh.titan.RollmeshTrainer)
    model = titan_cpu.model_registry("debugmodel", attn_backend="flex")
    for parallelism, compiled, message in (
        (
            ParallelismConfig(tensor_parallel_degree=2),
            False,
            "trainer.parallelism.tensor_parallel_degree: expected 1",
        ),
        (
            ParallelismConfig(expert_parallel_degree=2),
            False,
            "trainer.parallelism.expert_parallel_degree: expected 1",
        ),
        (ParallelismConfig(), True, "compile.enable: expected False"),
    ):
        trainer.compile_config = CompileConfig(enable=compiled)
        with pytest.raises(rm.ConfigError, match=re.escape(message)):
            trainer._build_model(model, PolicyTrainer.Config(parallelism=parallelism), "cpu")
