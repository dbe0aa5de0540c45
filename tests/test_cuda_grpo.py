"""GRPO with the generator on a CUDA device, here on the fibres of tests/simt: every metric but the times and every weight of the
CPU's run, since the default family of kernels has the CPU's bits. With a trainer on a GPU too where torch has one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_cuda_engine import library  # noqa: F401  (a fixture)
from test_grpo import DENSE, MOE, TIMES, run, weights_of

import rollmesh as rm
from rollmesh.grpo import config, metrics
from rollmesh.grpo.trainer import check_devices, torch_device


def lines(folder: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in m.items() if k not in TIMES} for m in metrics.read(folder / "metrics.jsonl")]


@pytest.mark.parametrize("file", [MOE, DENSE], ids=["moe", "dense"])
def test_a_run_on_a_device_is_the_cpus(file: Path, tmp_path: Path) -> None:
    weights = [
        weights_of(run(file, tmp_path / device, ["train.steps=3", f"generator.device={device}", "generator.max_num_seqs=16"]))
        for device in ("cpu", "cuda")
    ]
    assert weights[0] == weights[1]
    assert lines(tmp_path / "cpu") == lines(tmp_path / "cuda")
    assert len(lines(tmp_path / "cuda")) == 4


@pytest.mark.parametrize(
    "name, message", [("tpu", "wanted cpu, cuda or cuda:N"), ("meta", "wanted cpu, cuda or cuda:N"), ("cuda:99", "sees . CUDA devices")]
)
def test_a_trainer_on_a_device_that_is_not_there_is_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(rm.ConfigError, match=rf"\[train\] device = '{name}'.*{message}"):
        run(DENSE, tmp_path, [f"train.device={name}"])


def test_a_trainer_on_a_gpu_wants_a_generator_that_reads_it() -> None:
    both = ["train.device=cuda:1", "generator.device=cuda"]
    for device, changes in (("cuda:1", both), ("cpu", []), ("cpu", both[1:]), ("cuda:1", [*both[:1], "generator.engine=vllm"])):
        check_devices(torch.device(device), config.load(DENSE, changes))
    with pytest.raises(rm.ConfigError, match=r"\[train\] device = 'cuda:1' with \[generator\] device = 'cpu', which reads no GPU"):
        check_devices(torch.device("cuda:1"), config.load(DENSE, both[:1]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_a_trainer_on_a_gpu_learns_as_one_on_the_cpu(tmp_path: Path) -> None:
    """The state dict goes from GPU to GPU. Bound: rounding of the trainer's own arithmetic, three steps long."""
    for device in ("cpu", "cuda"):
        run(DENSE, tmp_path / device, ["train.steps=3", f"train.device={device}", f"generator.device={device}", "generator.dtype=float32"])
    assert torch_device("cuda").type == "cuda"
    of_cpu, of_gpu = ([m for m in lines(tmp_path / device) if "loss" in m] for device in ("cpu", "cuda"))
    assert len(of_cpu) == len(of_gpu) == 3
    for first, second in zip(of_cpu, of_gpu, strict=True):
        assert abs(first["loss"] - second["loss"]) < 1e-2
        assert second["logprob_diff_max"] < 1e-3
