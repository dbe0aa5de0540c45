"""Generator(profile=True) and `rollmesh bench --profile`: the time of each op.

Input: generations of tiny random models. Oracle: the same without a profile, bit for bit; the FLOPs
of the model's products, computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest

import rollmesh as rm
from rollmesh.cli import main

CONFIGS = {"dense": helpers.tiny_config(), "moe": helpers.tiny_config(moe=True)}


def generator(name: str, **options: Any) -> rm.Generator:
    gen = rm.Generator(
        rm.ModelSpec.from_hf(CONFIGS[name]),
        dtype="float32",
        max_model_len=128,
        kv_cache_gib=0.02,
        **options,
    )
    gen.sync_weights(helpers.numpy_state_dict(CONFIGS[name], 1), cast=True, version=1)
    return gen


@pytest.mark.parametrize("name", CONFIGS)
def test_a_profile_counts_every_op_and_changes_no_bit(name: str) -> None:
    prompts, params = (
        helpers.prompts(CONFIGS[name], [20, 3], seed=1),
        rm.SamplingParams(max_tokens=5, seed=2, ignore_eos=True),
    )
    with generator(name) as plain, generator(name, profile=True) as timed:
        assert plain.profile() == timed.profile() == []
        want, before = plain.generate(prompts, params, use_tqdm=False), timed.metrics()
        got = timed.generate(prompts, params, use_tqdm=False)
        ops, after = timed.profile(), timed.metrics()
        assert timed.profile() == [], "counted from the last call on"
    for a, b in zip(want, got, strict=True):
        assert (a.outputs[0].token_ids == b.outputs[0].token_ids).all()
        assert (a.outputs[0].logprobs == b.outputs[0].logprobs).all()

    spec, rows = timed.spec, after["rows"] - before["rows"]
    by_name = {(op["op"], op["n"], op["k"]): op for op in ops}
    assert len(by_name) == len(ops)
    inside = sum(op["seconds"] for op in ops)
    assert all(0 <= op["waited"] < op["seconds"] for op in ops)
    assert 0 < inside < after["forward_seconds"] - before["forward_seconds"]
    qkv = (spec.num_attention_heads + 2 * spec.num_key_value_heads) * spec.head_dim
    product = by_name["gemm", qkv, spec.hidden_size]
    assert product["rows"] == rows * spec.num_hidden_layers
    assert product["flops"] == 2.0 * product["rows"] * qkv * spec.hidden_size
    head = by_name["lm_head", spec.vocab_size, spec.hidden_size]
    assert head["rows"] == 10
    assert head["weight_bytes"] >= head["calls"] * spec.vocab_size * spec.hidden_size * 4
    # Position p of a sequence sees p + 1; the last token of each is not computed.
    seen = sum(n * (n + 1) // 2 for n in (24, 7)) * spec.num_hidden_layers
    assert (
        by_name["attention", 0, 0]["flops"] == 4.0 * seen * spec.num_attention_heads * spec.head_dim
    )
    if name == "moe":
        chosen = np.concatenate([o.outputs[0].routed_experts for o in got]).size
        assert sum(op["rows"] for op in ops if op["op"] == "experts") == chosen


def test_a_profile_is_wanted_or_not() -> None:
    with pytest.raises(rm.ConfigError, match="profile: expected a bool, got 1"):
        generator("dense", profile=1)


def test_bench_says_where_the_time_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["moe"]))
    assert (
        main(
            [
                "bench",
                str(tmp_path),
                "--batch",
                "2",
                "--prefill",
                "20",
                "--kv-cache-gib",
                "0.02",
                "--profile",
            ]
        )
        == 0
    )
    points = capsys.readouterr().out.split("decode")
    for point in points:
        shares = [float(line.split("%")[0]) for line in point.splitlines() if "%" in line]
        assert 99 < sum(shares) < 101
        for name in ("experts_swiglu", "attention", "lm_head", "between ops", "Python"):
            assert f"  {name}" in point
