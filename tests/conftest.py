"""Shared by all tests: seeds that a failure prints, generators that are always closed, two torch
threads, and the summary line of the parity tests."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from marks import SUMMARY, first_cases_are_quick

# pytest adds this folder to the path. Its folders torch and vllm must not shadow the packages.
sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SUMMARY] = []
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Spinning threads of torch would starve the engine's threads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests must not use the network
    # vLLM uses its second resume protocol if triton has a driver, or may get one later. It assumes
    # the latter if the device list is explicitly empty, but not if the machine has no devices.
    if importlib.util.find_spec("vllm") and not os.path.exists("/dev/nvidiactl"):
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    # torch's float32 pow takes 16 elements at a time with AVX2 and 32 with AVX-512, the rest by
    # powf: inv_freq would differ by machine.
    os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
    # With AMX, torch's attention calls AVX-512 code that the line above turns off, and raises.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


@pytest.fixture(autouse=True, scope="session")
def _two_torch_threads() -> None:
    """torch uses every core by default; the machines that run the tests have two."""
    try:
        import torch
    except ImportError:  # sanitizer runs have none
        return
    torch.set_num_threads(2)


@pytest.fixture(scope="module")
def torch_as_it_was() -> Iterator[None]:
    """A trainer sets torch's thread count and deterministic algorithms for its process; this
    restores them for other test files."""
    import torch

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the curves of a run, which take longer to draw than a test's run."""
    monkeypatch.setattr("rollmesh.run.folder.draw_curves", lambda lines, path: path.touch())


@pytest.fixture
def plain_signals() -> Iterator[None]:
    """Restores signals that the parent process may have ignored, such as a shell for background
    jobs, or nohup."""
    from rollmesh.run.signals import SIGNALS

    before = [(number, signal.signal(number, signal.SIG_DFL)) for number in SIGNALS]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before:
        signal.signal(number, handler)


# The slowest files, the slowest first: when two workers of pytest-xdist share the files, neither
# ends with a slow file.
FIRST = [
    "device_comm",
    "cli",
    "cuda_engine",
    "nccl_engine",
    "mesh_processes",
    "torch_weights",
    "examples",
    "grpo_kernels",
    "interrupts",
    "cuda_fast",
    "parity",
    "checkops",
    "mesh_bits",
    "invariance",
    "grpo_async",
    "cuda_loans",
    "resharding",
    "grpo_faults",
    "fuzz",
    "deltas",
]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place = {f"test_{name}.py": i for i, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
    config.option.loadscopereorder = False  # pytest-xdist would begin with the files of most tests
    of = {item: {*getattr(item, "fixturenames", ())} for item in items}
    processes = [item for item in items if of[item] & {"ranks", "server", "servers"}]
    for item in processes:
        item.add_marker("processes")
    first_cases_are_quick(processes, "shm", "torch")
    # The simulated device is slow too. A real GPU is fast, and without it these cases are skipped.
    first_cases_are_quick(
        item
        for item in items
        if (item.path.parent.name == "gpu" or "simt_library" in of[item])
        and "gpu" not in item.name.partition("[")[2]
    )
    first_cases_are_quick(item for item in items if item.get_closest_marker("quick"))


def pytest_collection_finish() -> None:
    """Freezes the objects that the imports of a hundred files have created: without this, each
    gc.collect() of a test takes 0.2 s."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist sends its lines of the summary to the process that prints them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["summary"] = session.config.stash[SUMMARY]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[SUMMARY] += getattr(node, "workeroutput", {}).get("summary", [])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for line in config.stash[SUMMARY]:
        terminalreporter.write_line(line)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed fixed by the test's file name and id; RM_TEST_SEED=n replaces the seed. The report of
    a failing test shows it."""
    name = f"tests/{request.node.path.name}::{request.node.nodeid.partition('::')[2]}"
    value = int(os.environ.get("RM_TEST_SEED", zlib.crc32(name.encode())))
    request.node.user_properties.append(("seed", value))
    return value


def build_folder(kind: str, factory: pytest.TempPathFactory) -> Path:
    """Returns the folder for compiled test programs, shared by all workers of pytest-xdist;
    $RM_CUDA_BUILD and $RM_NATIVE_BUILD keep it."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = Path(os.environ.get(f"RM_{kind}_BUILD") or shared / kind.lower())
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def cuda_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which tests/support/cuda_build.py builds, so that programs of several test
    files are compiled once. RM_CUDA_BUILD=DIR keeps it."""
    if shutil.which(compiler := os.environ.get("CXX", "g++")) is None:
        pytest.skip(f"needs a C++ compiler; {compiler} is not installed")
    return build_folder("CUDA", tmp_path_factory)


@pytest.fixture(scope="session")
def simt_library(cuda_folder: Path) -> Path:
    """librollmesh_simt.so, which replaces librollmesh_cuda.so."""
    import cuda_build

    return cuda_build.simt_library(cuda_folder)


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.failed:
        seeds = [value for key, value in item.user_properties if key == "seed"]
        if seeds:
            report.sections.append(("seed", f"RM_TEST_SEED={seeds[0]}"))
    return report


def _factory() -> Iterator[Callable[..., Any]]:
    import helpers

    import rollmesh

    made: list[Any] = []

    def make(
        model: Any = None,
        *,
        weights: Any = "random",
        dtype: str = "float32",
        seed: int = 0,
        **options: Any,
    ) -> Any:
        """Makes a generator of `model` (a helpers.Case, a config dict, or None for the tiny dense
        model), synced to version 0 with its random weights, with `weights` (any source), or, for
        None, unsynced."""
        case = (
            model
            if isinstance(model, helpers.Case)
            else helpers.Case("", model or helpers.tiny_config())
        )
        options.setdefault(
            "max_model_len", case.max_model_len if isinstance(model, helpers.Case) else 256
        )
        options.setdefault("kv_cache_gib", 0.02)
        options.setdefault("threads", 2)
        if device := os.environ.get("RM_TEST_DEVICE"):  # cuda: parity with transformers, on a GPU
            options.setdefault("device", device)
            options.setdefault("isa", os.environ.get("RM_TEST_ISA"))
        gen = rollmesh.Generator(rollmesh.ModelSpec.from_hf(case.config), dtype=dtype, **options)
        made.append(gen)
        if isinstance(weights, str):
            weights = helpers.numpy_state_dict(
                case.config, seed or case.seed, dtype, case.router_bias
            )
        if weights is not None:
            gen.sync_weights(weights)
        return gen

    yield make
    for gen in made:
        gen.close()


tiny_generator = pytest.fixture(_factory, name="tiny_generator")
module_generator = pytest.fixture(_factory, name="module_generator", scope="module")


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    """Makes generators with helpers.SMALL, by default of the tiny dense model on a CUDA device; a
    module that needs others wraps it."""
    import helpers

    import rollmesh

    made: list[Any] = []

    def one(config: Any = None, device: str = "cuda", **changes: Any) -> Any:
        spec = rollmesh.ModelSpec.from_hf(config or helpers.tiny_config())
        made.append(rollmesh.Generator(spec, device=device, **{**helpers.SMALL, **changes}))
        return made[-1]

    yield one
    for generator in made:
        generator.close()


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """native(name, sanitize="", emulate=False) builds a driver of tests/support/native and returns
    the program. RM_NATIVE_BUILD=DIR keeps its objects. Without a compiler, tests that need one are
    skipped."""
    import native_build

    if shutil.which(native_build.compiler()[0]) is None:
        pytest.skip(f"needs a C compiler; {native_build.compiler()[0]} is not installed")
    into = build_folder("NATIVE", tmp_path_factory)
    return lambda name, sanitize="", emulate=False: native_build.build(
        name, into, sanitize, emulate
    )
