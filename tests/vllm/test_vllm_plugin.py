"""Installing rollmesh does not affect vLLM. Selecting it in VLLM_PLUGINS gives vLLM the platform,
or an error with the reason.

The first half does not need vLLM: rollmesh alone still works, and the results of the entry points
are compared for each environment. The second half asks vLLM itself which platform it selects and
what its configuration becomes, and checks that every unsupported option is refused by name (the
option is set to a value that vLLM would accept, and the message has both)."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import tiny_config
from native_build import standin
from paths import ROOT, SUPPORT
from vllm_releases import TORCH

import rollmesh as rm
import rollmesh.vllm as plugin
from rollmesh.cli import doctor
from rollmesh.vllm.platforms import config

os.environ.setdefault("VLLM_PLUGINS", "rollmesh")
HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


def pretend(
    monkeypatch: pytest.MonkeyPatch, version: str | None, asked: str | None = "rollmesh"
) -> None:
    """Simulates a machine with this version of vLLM (None: not installed), and this value of
    VLLM_PLUGINS."""

    def found(package: str) -> str:
        if version is None or package != "vllm":
            raise importlib.metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if asked is not None:
        monkeypatch.setenv("VLLM_PLUGINS", asked)


# ----------------------------------------------------------------------------------- entry points
@pytest.mark.parametrize(
    "words",
    [
        None,
        "",
        "other",
        "rollmesh2",
        "rollmesh_model",
        "Rollmesh",
        " rollmesh",
        "my_rollmesh,other",
    ],
)
def test_installed_but_not_asked_for(monkeypatch: pytest.MonkeyPatch, words: str | None) -> None:
    """Also with a version that would be refused, because rollmesh is not selected."""
    for version in (*plugin.TRIED, "9.9.9", None):
        pretend(monkeypatch, version, words)
        assert plugin.platform() is None
        assert plugin.register() is None


def test_the_table_of_releases_is_what_can_be_installed() -> None:
    """The extra allows the oldest to the newest version of the table; the documents and the
    environment's script name the newest."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]["vllm"]
    assert extra == [f"vllm>={plugin.TRIED[0]},<={plugin.TRIED[-1]}"]
    assert f"vllm=={plugin.TRIED[-1]} torch=={TORCH[plugin.TRIED[-1]]}" in (
        ROOT / "docs/vllm.md"
    ).read_text("utf-8")
    script = (ROOT / ".ci/vllm").read_text("utf-8")
    assert tuple(TORCH) == plugin.TRIED
    for version, torch in TORCH.items():
        assert f"[{version}]=torch=={torch}" in script


@pytest.mark.parametrize("words", ["rollmesh", "other,rollmesh", "rollmesh,other"])
def test_asked_for(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.setenv("ROLLMESH_VLLM_DEVICE", "cpu")
    for version in (*plugin.TRIED, f"{plugin.TRIED[0]}+cu129"):
        pretend(monkeypatch, version, words)
        assert [plugin.platform() for _ in range(3)] == [plugin.CPU_PLATFORM] * 3
    monkeypatch.setenv("ROLLMESH_VLLM_DEVICE", "cuda")
    assert plugin.platform() == plugin.CUDA_PLATFORM


@pytest.mark.parametrize(
    "version, words",
    [(None, "no package vllm is installed"), ("0.31.0", "vllm 0.31.0"), ("0.32.0rc1", "0.32.0rc1")],
)
def test_absent_or_of_another_version(
    monkeypatch: pytest.MonkeyPatch, version: str | None, words: str
) -> None:
    """The platform's entry point must not raise, because vLLM would continue without it: it returns
    the name of a function that raises."""
    pretend(monkeypatch, version)
    assert plugin.platform() == "rollmesh.vllm.refuse"
    for call in (plugin.refuse, plugin.register):
        with pytest.raises(rm.PluginError, match=r"0\.32\.0") as caught:
            call()
        assert words in str(caught.value)
    pretend(monkeypatch, version, plugin.MODEL_NAME)
    with pytest.raises(rm.PluginError, match=r"0\.32\.0"):
        plugin.register_model()


def test_settings_that_contradict(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, plugin.TRIED[0])
    monkeypatch.setenv("ROLLMESH_VLLM_DEVICE", "tpu")
    assert plugin.platform() == "rollmesh.vllm.refuse"
    with pytest.raises(
        rm.PluginError, match="ROLLMESH_VLLM_DEVICE: expected cpu, cuda, or unset, got 'tpu'"
    ):
        plugin.refuse()
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    with pytest.raises(rm.PluginError, match="VLLM_TARGET_DEVICE='cpu'"):
        plugin.register()
    monkeypatch.setenv("VLLM_PLUGINS", "rollmesh,rollmesh_model")
    with pytest.raises(rm.PluginError, match="VLLM_PLUGINS: expected one of"):
        plugin.register_model()


def test_light_to_import() -> None:
    """vLLM loads the entry points of every user, so they must not import torch, vLLM or
    transformers."""
    code = (
        "import sys, rollmesh.vllm as p; p.platform(); p.register(); print(sorted({'torch', "
        "'vllm', 'transformers'} & set(sys.modules)))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "VLLM_PLUGINS"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == "[]"


def test_entry_points_are_callable() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]
    assert set(groups) == {"vllm.platform_plugins", "vllm.general_plugins"}
    assert set(groups["vllm.platform_plugins"]) == {plugin.NAME}
    assert set(groups["vllm.general_plugins"]) == {plugin.NAME, plugin.MODEL_NAME}
    for group, points in groups.items():
        for name, value in points.items():
            assert callable(importlib.metadata.EntryPoint(name, value, group).load())


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    def said() -> str:
        return "\n".join(": ".join(row) for row in doctor._vllm())

    pretend(monkeypatch, None, None)
    assert "missing" in said()
    pretend(monkeypatch, "0.31.0", "rollmesh")
    assert "0.31.0" in said()
    assert "expected 0.32.0 or 0.33.0" in said()
    pretend(monkeypatch, "0.33.0", "other")
    assert "VLLM_PLUGINS=other" in said()
    assert "not asked for" in said()
    pretend(monkeypatch, "0.32.0", "rollmesh")
    assert "asked for" in said()


# ---------------------------------------------------------------------------------- vLLM's choice
@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with only a stock config.json."""
    folders = {}
    for name, moe, changes in (
        ("dense", False, {}),
        ("moe", True, {}),
        ("half", False, {"dtype": "float16"}),
    ):
        folder = tmp_path_factory.mktemp(name)
        architecture = "Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"
        config = {
            "architectures": [architecture],
            "dtype": "bfloat16",
            **tiny_config(moe),
            **changes,
        }
        (folder / "config.json").write_text(json.dumps(config))
        folders[name] = str(folder)
    return folders


Configure = Callable[..., Any]


@pytest.fixture(scope="module")
def configure(models: dict[str, str]) -> Configure:
    """Makes a VllmConfig like LLM(…)."""
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs

    def make(model: str = "dense", **options: Any) -> Any:
        return EngineArgs(
            model=models[model], **{"skip_tokenizer_init": True, "max_model_len": 128, **options}
        ).create_engine_config()

    return make


@needs_vllm
def test_vllm_takes_the_platform_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import resolve_current_platform_cls_qualname as chosen

    monkeypatch.setenv("ROLLMESH_VLLM_DEVICE", "cpu")
    monkeypatch.setenv("VLLM_PLUGINS", "rollmesh")
    assert chosen() == plugin.CPU_PLATFORM
    monkeypatch.setenv("VLLM_PLUGINS", "rollmesh_model")
    without = chosen()
    assert "rollmesh" not in without
    monkeypatch.delenv("VLLM_PLUGINS")
    assert chosen() == without


@needs_vllm
def test_a_version_that_was_not_tried_is_told_by_vllm(tmp_path: Path) -> None:
    """vLLM swallows exceptions of a platform plugin, but the user still gets the PluginError, from
    the first import."""
    (tmp_path / "sitecustomize.py").write_text(
        "import rollmesh.vllm\nrollmesh.vllm.TRIED = ('0.1.0',)\n"
    )
    path = os.pathsep.join([str(tmp_path), *(entry for entry in sys.path if entry)])
    done = subprocess.run(
        [sys.executable, "-c", "from vllm import LLM"],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "VLLM_PLUGINS": "rollmesh",
            "ROLLMESH_VLLM_DEVICE": "cpu",
        },
        check=False,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        f"rollmesh.errors.PluginError: vllm {plugin.installed_version()} is installed"
    ), done.stderr[-2000:]
    assert "tried with 0.1.0" in last


@needs_vllm
def test_loaded_again(configure: Configure) -> None:
    """vLLM loads the plugin in each of its processes, and once for each engine in a process: the
    entry points stay the same."""
    import vllm.plugins
    from vllm.platforms import resolve_current_platform_cls_qualname as chosen

    configure()
    for _ in range(3):
        vllm.plugins.plugins_loaded = False
        vllm.plugins.load_general_plugins()
        assert chosen() == plugin.CPU_PLATFORM
    configure()


@needs_vllm
def test_what_a_configuration_becomes(configure: Configure) -> None:
    from vllm.config.compilation import CompilationMode, CUDAGraphMode
    from vllm.platforms import current_platform

    from rollmesh.vllm.platforms import config

    assert current_platform.is_out_of_tree()
    assert not current_platform.is_cpu()
    assert (current_platform.device_type, current_platform.dist_backend) == ("cpu", "gloo")
    for asynchronous, name in ((True, config.ASYNC_SCHEDULER), (False, config.SCHEDULER)):
        made = configure(async_scheduling=asynchronous)
        assert made.parallel_config.worker_cls == config.WORKER
        assert made.scheduler_config.scheduler_cls == name
        assert made.scheduler_config.get_scheduler_cls().__module__ == "rollmesh.vllm.scheduler"
        assert made.scheduler_config.async_scheduling is asynchronous
        assert made.compilation_config.mode == CompilationMode.NONE
        assert made.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
        assert made.cache_config.block_size == 16
        config.check(made)
        before = repr(made)
        config.update(made)  # vLLM does it again when it changes a config
        assert repr(made) == before
    # dtype="auto" of a float16 model: values are not rounded.
    assert str(configure("half").model_config.dtype) == "torch.float32"
    assert configure(enable_sleep_mode=True).model_config.enable_sleep_mode


@needs_vllm
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_the_model_is_the_files(configure: Configure, models: dict[str, str], model: str) -> None:
    """The config is read through vLLM's own loader of config.json."""
    from rollmesh.vllm.platforms import config

    assert config.model_spec(configure(model)) == rm.ModelSpec.from_hf(models[model])
    changed = config.model_spec(configure(model, hf_overrides={"rms_norm_eps": 1e-5}))
    assert changed.rms_norm_eps == 1e-5


@needs_vllm
def test_degrees_and_shares(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollmesh.vllm.platforms import config

    def mesh(model: str, **options: Any) -> rm.Mesh:
        made = configure(model, **options)
        return config.mesh_of(made.parallel_config, made.model_config.is_moe)

    assert mesh("dense") == rm.Mesh()
    assert mesh("dense", tensor_parallel_size=2) == rm.Mesh(tp=2)
    assert mesh("dense", tensor_parallel_size=2, data_parallel_size=2) == rm.Mesh(tp=2)
    assert mesh("moe", tensor_parallel_size=2) == rm.Mesh(tp=2, ep=1)
    assert mesh("moe", tensor_parallel_size=2, enable_expert_parallel=True) == rm.Mesh(tp=2, ep=2)
    assert mesh("moe", tensor_parallel_size=2, data_parallel_size=2) == rm.Mesh(tp=2, dp=2, ep=1)
    assert mesh(
        "moe", tensor_parallel_size=2, data_parallel_size=2, enable_expert_parallel=True
    ) == rm.Mesh(tp=2, dp=2, ep=4)

    cores = len(os.sched_getaffinity(0))
    for name in ("OMP_NUM_THREADS", config.OMP_SET_BY_VLLM):
        monkeypatch.delenv(name, raising=False)
    assert config.num_threads(configure()) == min(cores, 256)
    assert config.num_threads(configure("moe", tensor_parallel_size=4)) == max(1, cores // 4)
    assert config.num_threads(configure(additional_config={"rollmesh": {"threads": 7}})) == 7
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as torchrun has it
    assert config.num_threads(configure()) == min(cores, 256)
    monkeypatch.setenv(config.OMP_SET_BY_VLLM, "1")
    assert config.num_threads(configure()) == 1
    assert config.engine_seed(configure(seed=5)) == 5


# --------------------------------------------------------------------------------------- refusals
def refused(configure: Configure, *args: Any, **options: Any) -> str:
    """Returns the error of the user's call: vLLM's configuration uses pydantic, which wraps the
    ConfigError."""
    with pytest.raises(ValueError) as caught:
        configure(*args, **options)
    inner = [entry["ctx"]["error"] for entry in caught.value.errors()]  # type: ignore[attr-defined]
    assert len(inner) == 1
    assert isinstance(inner[0], rm.ConfigError)
    assert str(inner[0]) in str(caught.value)
    return str(inner[0])


@needs_vllm
@pytest.mark.parametrize(
    "options, words",
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: expected 1, got 2"),
        ({"dtype": "float16"}, "dtype: expected bfloat16 or float32, got 'float16'"),
        (
            {"kv_cache_dtype": "fp8"},
            "kv_cache_dtype: expected 'auto' or the model's dtype 'bfloat16', got 'fp8'",
        ),
        ({"block_size": 24}, "block_size: expected a multiple of 16, got 24"),
        ({"block_size": 8}, "block_size: expected an integer in [16 … got 8"),
        (
            {"logprobs_mode": "raw_logits"},
            "logprobs_mode: expected 'raw_logprobs' or 'processed_logprobs', got 'raw_logits'",
        ),
        ({"logprobs_mode": "processed_logits"}, "got 'processed_logits'"),
        ({"enable_lora": True}, "lora_config: expected None"),
        (
            {"all2all_backend": "deepep_low_latency"},
            "all2all_backend: expected 'allgather_reducescatter', got 'deepep_low_latency'",
        ),
        ({"additional_config": {"rollmesh": {"thread": 2}}}, "got thread=2"),
        (
            {"additional_config": {"rollmesh": {"threads": 0}}},
            "threads: expected an integer in [1, 256], got 0",
        ),
        (
            {"additional_config": {"rollmesh": {"ep_backend": "magic"}}},
            "ep_backend: expected one of … got 'magic'",
        ),
        ({"additional_config": {"rollmesh": 3}}, "expected a dict, got 3"),
        ({"additional_config": {"rollmesh": {"isa": "sse"}}}, "isa: expected one of … got 'sse'"),
        ({"additional_config": {"rollmesh": {"isa": 2}}}, "isa: expected a str or None, got 2"),
        (
            {"additional_config": {"rollmesh": {"exchange": "gloo"}}},
            "exchange: expected one of host, nccl, got 'gloo'",
        ),
        (
            {"additional_config": {"rollmesh": {"exchange": "nccl"}}},
            "exchange: expected 'host' where engines run on the CPU, got 'nccl'",
        ),
        (
            {"additional_config": {"rolmesh": {}}},
            'additional_config: expected "rollmesh" alone, got rolmesh={}',
        ),
        (
            {"kv_cache_memory_bytes": 2**50},
            "kv_cache_memory_bytes: expected an integer in [1, … got 1125899906842624",
        ),
        ({"hf_overrides": {"attention_sinks": 4}}, "attention_sinks=4"),
        (
            {"attention_backend": "FLASH_ATTN"},
            "attention_config.backend: expected None, False or 0, got "
            "<AttentionBackendEnum.FLASH_ATTN",
        ),
        (
            {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
            "none, got 'vllm.v1.core.sched.scheduler.Scheduler'",
        ),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative_config: expected None",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_in_the_users_own_call(
    configure: Configure, options: dict[str, Any], words: str
) -> None:
    assert re.search(".*".join(map(re.escape, words.split(" … "))), refused(configure, **options))


@pytest.mark.parametrize("executor", ["ray", "mp"])
def test_an_isa_that_is_no_name(executor: str) -> None:
    """Also if ray's workers may be on other machines, which have their own isa names."""
    for isa in (2, ["avx2"], True):
        asked = types.SimpleNamespace(
            additional_config={"rollmesh": {"isa": isa}},
            parallel_config=types.SimpleNamespace(distributed_executor_backend=executor),
        )
        with pytest.raises(
            rm.ConfigError, match=re.escape(f"isa: expected a str or None, got {isa!r}")
        ):
            config.options(asked)


@needs_vllm
def test_refused_with_experts(configure: Configure) -> None:
    """8 experts; options that vLLM itself refuses first (experts without parallelism) are
    skipped."""
    words = refused(
        configure,
        "moe",
        hf_overrides={"num_experts": 6},
        tensor_parallel_size=4,
        enable_expert_parallel=True,
    )
    assert "4 ranks, which does not divide num_experts = 6" in words


@needs_vllm
def test_every_rule_names_an_option_of_vllms(configure: Configure) -> None:
    """Each option is set to an unsupported value, bypassing vLLM's own checks; a path that vLLM
    lacks is an AttributeError."""
    from vllm.config import WeightTransferConfig

    from rollmesh.vllm.platforms import config

    made = configure("moe", weight_transfer_config=WeightTransferConfig(backend="rollmesh"))
    config.check(made)
    accepted = dict.fromkeys(config._OFF, (None, False, 0))
    for path, values in (
        accepted | {path: only for path, (only, _) in config._ONLY.items()}
    ).items():
        *way, last = path.split(".")
        changed = copy.deepcopy(made)
        holder = changed
        for name in way:
            holder = getattr(holder, name)
        if isinstance(getattr(type(holder), last, None), property):
            continue  # derived from the model: nothing to set
        assert getattr(holder, last) in values, path
        object.__setattr__(holder, last, "other")
        with pytest.raises(rm.ConfigError) as caught:
            config.check(changed)
        assert str(caught.value).startswith(f"{path}: expected ")
        assert ", got 'other'" in str(caught.value)


@needs_vllm
def test_torch_accelerator_where_there_is_none(configure: Configure) -> None:
    """vLLM calls these without a check; each would raise."""
    import torch

    configure()
    if torch.accelerator.is_available():
        pytest.skip("has an accelerator")
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()


@needs_vllm
@pytest.mark.parametrize("model, dtype", [("dense", "float32"), ("moe", "bfloat16")])
def test_vllm_over_a_cuda_device(
    simt_library: Path, tmp_path: Path, model: str, dtype: str
) -> None:
    """On the fibres of tests/gpu/simt: vLLM's side stays on the host, and all computations of the
    worker run on the device."""
    environment = os.environ | {
        "VLLM_PLUGINS": "rollmesh",
        "ROLLMESH_VLLM_DEVICE": "cuda",
        "ROLLMESH_CUDA_LIBRARY": str(simt_library),
    }
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [
        sys.executable,
        str(SUPPORT / "vllm_device.py"),
        model,
        dtype,
        str(tmp_path / "model"),
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["platform"], found["device"]) == ("RollmeshCudaPlatform", "cuda:0")
    assert found["compared"] > 500


@needs_vllm
def test_vllms_workers_exchange_by_nccl(simt_library: Path, tmp_path: Path) -> None:
    """Two workers exchange by the stand-in for NCCL, which their processes must have loaded."""
    if importlib.import_module("torch").version.cuda is not None:
        pytest.skip("a CUDA build of torch has loaded its own NCCL first")
    library = standin(tmp_path)
    environment = os.environ | {
        "VLLM_PLUGINS": "rollmesh",
        "ROLLMESH_VLLM_DEVICE": "cuda",
        "ROLLMESH_CUDA_LIBRARY": str(simt_library),
    }
    environment |= {"LD_PRELOAD": str(library), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    command = [
        sys.executable,
        str(SUPPORT / "vllm_device.py"),
        "moe",
        "bfloat16",
        str(tmp_path / "model"),
        "nccl",
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["device"] == "cuda:0"
    assert f"which this process has loaded already ({library})" in found["nccl"]
    assert found["compared"] > 200


@needs_vllm
def test_an_exchange_of_one_worker_is_refused(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    from rollmesh.vllm.platforms import config

    made = configure(additional_config={"rollmesh": {"exchange": "host"}})
    monkeypatch.setattr(type(current_platform), "engine_device", "cuda")
    config.check(made)
    made.additional_config["rollmesh"]["exchange"] = "nccl"
    with pytest.raises(
        rm.ConfigError, match="exchange: expected 'host' with one worker, got 'nccl'"
    ):
        config.check(made)


@needs_vllm
def test_a_device_that_is_not_here_is_said_in_the_users_own_call(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollmesh.vllm.platforms.cuda import RollmeshCudaPlatform

    monkeypatch.setenv("ROLLMESH_CUDA_LIBRARY", "/nowhere/none.so")
    with pytest.raises(
        rm.ConfigError,
        match=r"ROLLMESH_CUDA_LIBRARY: expected .*got /nowhere/none\.so, which is not a file",
    ):
        RollmeshCudaPlatform.check_and_update_config(configure())


def test_a_platform_of_a_gpu_has_processes_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front end asks CUDA for a device's memory, and CUDA does not survive a fork. An explicit
    choice of the user is kept, and refused by name."""
    pretend(monkeypatch, plugin.TRIED[0])
    monkeypatch.setenv("ROLLMESH_VLLM_DEVICE", "cuda")
    for before, after in (("", "spawn"), ("fork", "fork")):
        monkeypatch.setenv(plugin.START_METHOD, before)
        if not before:
            monkeypatch.delenv(plugin.START_METHOD)
        assert plugin.platform() == plugin.CUDA_PLATFORM
        assert os.environ[plugin.START_METHOD] == after
    monkeypatch.setenv("ROLLMESH_VLLM_DEVICE", "cpu")
    monkeypatch.delenv(plugin.START_METHOD)
    assert plugin.platform() == plugin.CPU_PLATFORM
    assert plugin.START_METHOD not in os.environ


@needs_vllm
def test_a_fork_is_refused_on_a_gpu(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollmesh.vllm.platforms.cuda import RollmeshCudaPlatform

    monkeypatch.setenv(plugin.START_METHOD, "fork")
    with pytest.raises(
        rm.ConfigError, match="VLLM_WORKER_MULTIPROC_METHOD: expected 'spawn', got 'fork'"
    ):
        RollmeshCudaPlatform.check_and_update_config(configure())


@needs_vllm
@pytest.mark.parametrize(
    "assigned, visible, replica, local_rank, devices, ordinal",
    [
        ([4, 5], "", None, 1, 8, 5),
        ([4, 5], "2,4,5", 1, 1, 3, 2),
        (None, "", None, 1, 8, 1),
        (None, "", 3, 1, 8, 7),
        (None, "", 3, 1, 4, 3),
        ([], "", 1, 0, 1, 0),
    ],
)
def test_each_worker_has_a_device_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    assigned: list[int] | None,
    visible: str,
    replica: int | None,
    local_rank: int,
    devices: int,
    ordinal: int,
) -> None:
    """An engine has two workers; vLLM assigns physical devices, and a process numbers the devices
    that it sees."""
    from rollmesh.vllm.platforms import config

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    parallel = types.SimpleNamespace(
        assigned_physical_gpu_ids=assigned, data_parallel_rank_local=replica, local_world_size=2
    )
    assert config.cuda_ordinal(parallel, local_rank, devices) == ordinal
