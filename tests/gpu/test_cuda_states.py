"""States of sequences on a device: kept, forked and padded steps that are recorded and replayed.

Oracle: the CPU. Bound: equality."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from test_cuda_engine import library, simt, told  # noqa: F401  (fixtures)

import rollmesh as rm

pytest.importorskip("torch", reason="transformers makes the weights")
family_models = importlib.import_module("family_models")


def test_a_hybrid_model_has_the_bits_of_the_cpu(make: Any, seed: int) -> None:
    family = "qwen3_5_text"
    model = family_models.draw(family, 300, seed, **family_models.cuttable(family))
    prompts = [list(range(40))[: 17 + 5 * i] for i in range(4)]
    params = [
        rm.SamplingParams(n=1 + i % 2, max_tokens=6 + i, seed=i, ignore_eos=True) for i in range(4)
    ]
    found = []
    for device in ("cpu", "cuda"):
        gen = make(
            model.config, device, max_num_seqs=6, state_interval=16, max_num_batched_tokens=24
        )
        gen.sync_weights(model.state, cast=True)
        found.append([told(gen.generate(prompts, params, use_tqdm=False)) for _ in range(2)])
    assert found[0] == found[1]
    stats = gen.metrics()
    assert stats["graph_replays"] > 5
    assert stats["cached_tokens"] > 0
    assert stats["states_free"] == stats["states"]
