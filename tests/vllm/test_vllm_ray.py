"""Ranks that Ray starts are bit-identical to rm.Generator, under both of vLLM's executors for Ray.

Input: requests of every kind on a tiny MoE at tp = ep = 2, on a cluster of this machine alone.
Oracle: rm.Generator with the same weights. Bound: 0 differing bits. A worker occupies one of Ray's
GPU resources, which need not be real GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm_support as support

pytest.importorskip("vllm", reason="needs vLLM")
ray = pytest.importorskip("ray", reason="needs Ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # vLLM's own and Ray's


@pytest.fixture(params=["0", "1"], ids=["compiled-graph", "message-queue"])
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", request.param)
    # Ray knows this machine under another address.
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    ray.init(num_gpus=2, num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_two_ranks(tmp_path: Path) -> None:
    from rollmesh.vllm.trainer import WeightSender

    weights, requests = support.weights_of("moe", "float32"), support.mixed("moe")
    oracle = support.Oracle("moe", "float32")
    oracle.serve(weights)
    degrees = {
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
        "distributed_executor_backend": "ray",
    }
    with support.engine(tmp_path, "moe", "float32", **degrees) as llm:
        WeightSender(llm).send(weights, version=1)
        assert support.agree(support.generate(llm, requests), oracle.answers(requests)) > 1000
    oracle.close()
