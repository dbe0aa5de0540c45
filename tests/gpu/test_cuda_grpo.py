"""GRPO with the generator on a CUDA device, on the fibres of tests/gpu/simt. Oracle: a run on the
CPU. Bound: every metric but the times and every weight are equal, because the default family of
kernels is bit-identical to the CPU. If torch has a GPU, the trainer runs there too."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
from grpo_runs import DENSE, MOE
from helpers import TIMES
from marks import full
from native_build import standin
from test_cuda_engine import is_simt, library  # noqa: F401  (a fixture)
from test_grpo import run, weights_of
from transformers import AutoConfig

import rollmesh as rm
from rollmesh.run import config, metrics
from rollmesh.run.generator import make_generator
from rollmesh.runtime import nccl


def lines(folder: Path) -> list[dict[str, float]]:
    return [
        {k: v for k, v in m.items() if k not in TIMES}
        for m in metrics.read(folder / "metrics.jsonl")
    ]


@pytest.mark.parametrize("file", [MOE, full(DENSE)], ids=["moe", "dense"])
def test_a_run_on_a_device_is_the_cpus(file: Path, tmp_path: Path) -> None:
    weights = [
        weights_of(
            run(
                file,
                tmp_path / device,
                ["train.steps=3", f"generator.device={device}", "generator.max_num_seqs=16"],
            )
        )
        for device in ("cpu", "cuda")
    ]
    assert weights[0] == weights[1]
    assert lines(tmp_path / "cpu") == lines(tmp_path / "cuda")
    assert len(lines(tmp_path / "cuda")) == 4


@pytest.mark.full
def test_a_run_whose_ranks_exchange_by_nccl_is_the_cpus(
    library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not is_simt(library):
        pytest.skip("the stand-in for NCCL is one on a simulated device")
    made = str(standin(tmp_path))
    monkeypatch.setattr(nccl.libraries, "candidates", lambda *_: iter([(made, "the stand-in")]))
    monkeypatch.setenv(nccl.SHARES_GPU_VARIABLE, "0")
    monkeypatch.delenv(nccl.SHARES_GPU_VARIABLE)  # what is put there goes with the test
    small = ["train.steps=1", "generator.max_num_seqs=16", "generator.tp=2", "generator.ep=2"]
    by_nccl = ["generator.device=cuda", "generator.exchange=nccl", "generator.enforce_eager=true"]
    weights = [
        weights_of(run(MOE, tmp_path / name, [*small, *more]))
        for name, more in (("cpu", []), ("nccl", by_nccl))
    ]
    assert weights[0] == weights[1]
    assert lines(tmp_path / "cpu") == lines(tmp_path / "nccl")


def test_what_a_generator_is_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, object] = {}
    name = "rollmesh.run.generator"
    monkeypatch.setattr(f"{name}.Generator", lambda spec, **options: made.update(options))
    monkeypatch.setattr(f"{name}.nccl", lambda group: ("nccl over", group))
    hf_config = AutoConfig.for_model("qwen3", **config.load(DENSE).model.hf_fields())
    for changes, want in (
        (["generator.isa=ref"], (None, False, "ref")),
        (["generator.device=cuda"], (None, False, None)),
        (
            ["generator.device=cuda", "generator.enforce_eager=true", "generator.isa=cuda_mma"],
            (None, True, "cuda_mma"),
        ),
        (
            ["generator.device=cuda", "generator.exchange=nccl", "generator.tp=2"],
            (("nccl over", None), False, None),
        ),
    ):
        make_generator(
            config.load(DENSE, changes), hf_config, types.SimpleNamespace(eos_token_id=None)
        )
        assert (made["comm"], made["enforce_eager"], made["isa"]) == want


@pytest.mark.parametrize(
    "changes, message",
    [
        (["device=foo"], r'^\[generator\] device: expected "cpu", "cuda" or "cuda:N", got "foo"$'),
        (["device=cuda:"], r'\[generator\] device: expected .*, got "cuda:"'),
        (["device=foo", "engine=vllm"], r'\[generator\] device: expected .*, got "foo"'),
        (["device=foo", "isa=cuda_mma"], r'\[generator\] device: expected .*, got "foo"'),
        (
            ["exchange=nccl"],
            r'\[generator\] exchange: expected "host" where device is "cpu", .*, got "nccl"',
        ),
        (
            ["exchange=nccl", "device=cuda"],
            r'\[generator\] exchange: expected "host" where .* with tp=1 and ep=1, whose ranks '
            r"exchange nothing",
        ),
        (["exchange=gloo"], r"\[generator\] exchange: .*gloo"),
        (
            ["enforce_eager=true"],
            r'\[generator\] enforce_eager: expected false where device is "cpu"',
        ),
        (
            ["isa=cuda_mma"],
            r'\[generator\] isa: expected one of .*"ref".* where device is "cpu", got "cuda_mma"',
        ),
        (
            ["isa=ref", "device=cuda:1"],
            r'\[generator\] isa: expected one of "cuda_fma", "cuda_mma".* where device is '
            r'"cuda:1", got "ref"',
        ),
    ],
)
def test_what_means_nothing_on_a_device_is_refused(changes: list[str], message: str) -> None:
    with pytest.raises(rm.ConfigError, match=message):
        config.load(DENSE, [f"generator.{change}" for change in changes])


def test_vllms_workers_are_told_themselves() -> None:
    """vLLM's platform selects the device of the workers, so rollmesh does not refuse options that
    depend on it; the workers do."""
    table = config.load(
        DENSE,
        [
            f"generator.{change}"
            for change in (
                "engine=vllm",
                "exchange=nccl",
                "enforce_eager=true",
                "isa=cuda_mma",
                "tp=2",
            )
        ],
    ).generator
    assert (table.exchange, table.enforce_eager, table.isa) == ("nccl", True, "cuda_mma")


@pytest.mark.parametrize(
    "name, message",
    [
        ("tpu", "expected cpu, cuda or cuda:N"),
        ("meta", "expected cpu, cuda"),
        ("cuda:99", r"expected cpu with \[generator\] device = 'cpu'"),
    ],
)
def test_a_trainer_on_a_device_that_is_not_there_is_refused(
    name: str, message: str, tmp_path: Path
) -> None:
    at_load = rf'\[train\] device: expected "cpu", "cuda" or "cuda:N", got "{name}"'
    with pytest.raises(
        rm.ConfigError,
        match=rf"\[train\] device: {message}.*, got '{name}'" if name == "cuda:99" else at_load,
    ):
        run(DENSE, tmp_path, [f"train.device={name}"])


def test_a_trainer_on_a_gpu_wants_a_generator_that_reads_it() -> None:
    both = ["train.device=cuda:1", "generator.device=cuda"]
    for device, changes in (
        ("cuda:1", both),
        ("cpu", []),
        ("cpu", both[1:]),
        ("cuda:1", [*both[:1], "generator.engine=vllm"]),
    ):
        assert config.load(DENSE, changes).train.device == device
    with pytest.raises(
        rm.ConfigError,
        match=r"\[train\] device: expected cpu with \[generator\] device = 'cpu', got 'cuda:1'",
    ):
        config.load(DENSE, both[:1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_a_trainer_on_a_gpu_learns_as_one_on_the_cpu(tmp_path: Path) -> None:
    """The state dict is transferred from GPU to GPU. Bound: rounding of the trainer's own
    arithmetic, over three steps."""
    for device in ("cpu", "cuda"):
        run(
            DENSE,
            tmp_path / device,
            [
                "train.steps=3",
                f"train.device={device}",
                f"generator.device={device}",
                "generator.dtype=float32",
            ],
        )
    of_cpu, of_gpu = (
        [m for m in lines(tmp_path / device) if "loss" in m] for device in ("cpu", "cuda")
    )
    assert len(of_cpu) == len(of_gpu) == 3
    for first, second in zip(of_cpu, of_gpu, strict=True):
        assert abs(first["loss"] - second["loss"]) < 1e-2
        assert second["logprob_diff_max"] < 1e-3
