"""The command line on tiny shapes: its output, its exit status, and its errors. Each command runs
once as a separate program; the other tests call the command's function directly, which avoids the
seconds of importing torch."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import math
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
from paths import ROOT

import rollmesh as rm
from rollmesh import _core
from rollmesh.cli import bench, doctor
from rollmesh.runtime import cublas
from rollmesh.runtime.devices import device_of

MOE = ROOT / "configs/qwen3_moe_debug.toml"
SMALL = ["--kv-cache-gib", "0.01", "--threads", "1"]
NO_GPU = "none found (nvidia-smi is absent or sees none)"


def program(*args: object, cwd: Path | None = None) -> str:
    """Returns the standard output of `python -m rollmesh args`."""
    command = [sys.executable, "-m", "rollmesh", *map(str, args)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, cwd=cwd
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def rollmesh(*args: object, status: int = 0) -> str:
    """Returns the standard output of `rollmesh args`, run in this process; standard error if a
    failure is expected."""
    from rollmesh.cli import main

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            got: object = main([str(arg) for arg in args])
        except SystemExit as ended:  # of argparse
            got = ended.code
    assert got == status, f"exit status {got}\n{out.getvalue()}\n{err.getvalue()}"
    return err.getvalue() if status else out.getvalue()


@pytest.mark.parametrize(
    "code, absent",
    [
        (
            "from rollmesh.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
            ["numpy", "rollmesh._core", "dataclasses"],
        ),
        (
            "from rollmesh.cli import bench, doctor, generate, grpo, plan",
            ["torch", "transformers", "rich", "matplotlib"],
        ),
    ],
)
def test_the_command_line_is_light(code: str, absent: list[str]) -> None:
    """--help answers immediately, because it imports no command. Only grpo may import torch, and
    only when it runs."""
    code += f"\nimport sys; print([m for m in {absent} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_packages_names_are_there() -> None:
    """Names that are imported on first use are in dir() and can be imported by name and by *. The
    first use imports all of them."""
    code = (
        "import rollmesh, sys; assert 'numpy' not in sys.modules and set(rollmesh.__all__) <= "
        "set(dir(rollmesh))"
    )
    code += (
        "\nrollmesh.Mesh; assert 'Generator' in vars(rollmesh); seen = set(sys.modules); from "
        "rollmesh import *"
    )
    code += "\nassert not {n for n in set(sys.modules) - seen if n != 'rollmesh.comm'}"
    code += (
        "\nassert Generator is rollmesh.Generator is vars(rollmesh)['Generator']; assert "
        "all(n in globals() for n in rollmesh.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="module 'rollmesh' has no attribute 'Nothing'"):
        _ = rm.Nothing


def test_doctor_says_what_was_chosen_and_what_is_missing() -> None:
    from helpers import tiny_spec

    text = program("doctor")
    with rm.Generator(tiny_spec(), kv_cache_gib=0.001, max_model_len=16) as generator:
        isa = generator.metrics()["isa"]
    assert f"chosen         {isa}: " in text
    assert text.count("<- chosen") == 1
    assert re.search(r'  device="cuda"  (works|no: device = .cuda.: expected .*)\n', text)
    for name in (
        "ref",
        "NumPy",
        "threads",
        "shm",
        "lost ranks",
        "torch",
        "transformers",
        "nvcc",
        "NCCL",
        "vllm",
    ):
        assert f"\n  {name} " in text


@pytest.mark.parametrize(
    "free, words",
    [
        (2**34, "works for up to 64 ranks: 16.00 GiB of"),
        (25 << 20, "works for up to 2 "),
        (19 << 20, "no: "),
    ],
)
def test_doctor_knows_how_many_ranks_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, words: str
) -> None:
    monkeypatch.setattr(
        os,
        "statvfs",
        lambda path: SimpleNamespace(f_bavail=free >> 12, f_frsize=1 << 12, f_blocks=1 << 30),
    )
    assert doctor._shared_memory(tmp_path).startswith(words)


def test_doctor_says_what_is_left_to_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "usable_cores", lambda: 3)
    monkeypatch.setattr(_core, "memory_pools", lambda: [(1, 5 << 30), (2, 3 << 29), (3, 7 << 30)])
    rows = dict(doctor._processor())
    assert rows["threads"].startswith("3 by default: ")
    assert rows["memory"].endswith(
        "GiB, of which 1.50 GiB are free and within this process's limits"
    )


def test_doctor_where_processes_cannot_be_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert doctor._shared_memory(tmp_path / "none").startswith("no: ")
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    assert "/proc" in doctor._process_ends()
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    assert doctor._torch_groups().startswith("missing")


def test_doctor_names_the_backends_that_torch_has() -> None:
    """Oracle: torch, which doctor itself does not import."""
    distributed = pytest.importorskip("torch.distributed")
    assert ("Gloo" in doctor._torch_groups()) == distributed.is_gloo_available()
    assert ("NCCL" in doctor._torch_groups()) == distributed.is_nccl_available()


@pytest.mark.parametrize(
    "devices, seen",
    [
        ("2", "2 devices here"),
        ("1", "1 device here"),
        ("0", "no driver here, and NVIDIA's is all they need"),
    ],
)
def test_doctor_knows_the_kernels_of_this_build(
    simt_library: Path, monkeypatch: pytest.MonkeyPatch, devices: str, seen: str
) -> None:
    """Runs on the simulated device. The CUDA runtime is part of the library, so the output has no
    line about a missing runtime."""
    monkeypatch.setenv("ROLLMESH_CUDA_LIBRARY", str(simt_library))
    monkeypatch.setenv("ROLLMESH_SIMT_DEVICES", devices)
    monkeypatch.setattr(doctor, "_first_line", lambda *_, **__: None)  # no nvidia-smi, no nvcc
    rows = dict(doctor._gpu())
    found = (
        f"{seen.removesuffix(' here')}, says {simt_library.name}; nvidia-smi is absent or sees none"
    )
    assert rows["GPU"] == (NO_GPU if devices == "0" else found)
    assert rows["nvcc"] == "missing: only needed to build CUDA kernels"
    assert rows["CUDA kernels"] == f"for simt, in {simt_library.name}; {seen}"
    missing = "no: device = 'cuda': expected an NVIDIA driver, got none on this machine"
    assert rows['device="cuda"'] == ("works" if devices != "0" else missing)
    assert not [text for text in rows if "runtime" in text]


def test_a_driver_that_is_too_old_is_said(
    simt_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMESH_CUDA_LIBRARY", str(simt_library))
    monkeypatch.setenv("ROLLMESH_SIMT_DRIVER", "12080")
    rows = dict(doctor._gpu())
    assert (
        rows["CUDA kernels"]
        == f"for simt, in {simt_library.name}; the driver here is too old, they need 580 or later"
    )
    assert (
        rows['device="cuda"']
        == "no: device = 'cuda': expected NVIDIA driver 580 or later (CUDA 13), got an older one"
    )
    with pytest.raises(
        rm.ConfigError, match='device="cuda": expected an NVIDIA driver 580 or later'
    ):
        rm._core.cuda_available(str(simt_library), 0)


def test_doctor_believes_nvidias_own_tool(
    simt_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMESH_CUDA_LIBRARY", str(simt_library))
    monkeypatch.setattr(
        doctor,
        "_first_line",
        lambda command, **_: "NVIDIA H200, 580.1" if command[0] == "nvidia-smi" else None,
    )
    assert dict(doctor._gpu())["GPU"] == "NVIDIA H200, 580.1"


@pytest.mark.parametrize(
    "environment, has_nvcc, words",
    [
        ({"ROLLMESH_CUDA": "0"}, True, "made with ROLLMESH_CUDA=0"),
        ({}, False, "made where nvcc was not on PATH"),
        ({}, True, "made with an nvcc that failed"),
        ({"ROLLMESH_SANITIZE": "1"}, True, "made with ROLLMESH_SANITIZE"),
    ],
)
def test_a_build_without_cuda_says_why(
    environment: dict[str, str],
    has_nvcc: bool,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs setup.py's own step beside an extension, and checks what doctor and a generator report.
    nvcc is a program that fails."""
    for name in ("ROLLMESH_CUDA", "ROLLMESH_SANITIZE", "ROLLMESH_CUDA_LIBRARY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "bin").mkdir()
    if has_nvcc:
        (tmp_path / "bin/nvcc").write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "bin/nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    code = f"""
import os, sys
os.chdir({str(ROOT)!r})
from pathlib import Path
import setuptools
from distutils.core import run_setup
command = run_setup("setup.py", stop_after="init").get_command_obj("build_ext")
command.ensure_finalized()
command.build_temp = {str(tmp_path / "objects")!r}
command.build_cuda_beside(Path({str(tmp_path / "_core.so")!r}))
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)
    monkeypatch.setattr(rm._core, "__file__", str(tmp_path / "_core.so"))
    assert doctor._cuda_library() == (f"not in this build, {words}", 0)
    with pytest.raises(
        rm.ConfigError,
        match=rf"^device = 'cuda': expected a build with librollmesh_cuda.so, got one {words}$",
    ):
        device_of("cuda")


def test_help_of_bench_shows_its_defaults() -> None:
    parser = argparse.ArgumentParser(prog="bench")
    bench.add_arguments(parser)
    text = " ".join(parser.format_help().split())
    values = parser.parse_args(["shape.json"])
    for name, value in (
        ("batch", " ".join(map(str, values.batch))),
        ("prefill", values.prefill),
        ("seed", values.seed),
    ):
        assert re.search(rf"--{name} [^-]*\(default: {value}\)", text), name


def test_doctor_where_the_librarys_name_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Input: a missing file, and a file that is not a library. If cuBLASLt is not found, the output
    names the extra that contains it."""
    monkeypatch.setattr(cublas, "candidates", lambda *_: iter(()))
    monkeypatch.setattr(doctor, "_first_line", lambda *_, **__: None)
    wrong = tmp_path / "none.so"
    monkeypatch.setenv("ROLLMESH_CUDA_LIBRARY", str(wrong))
    rows = dict(doctor._gpu())
    assert (rows["GPU"], rows["CUDA kernels"]) == (
        NO_GPU,
        f"ROLLMESH_CUDA_LIBRARY={wrong}: there is no such file",
    )
    assert rows["cuBLASLt"].endswith(
        "(pip install '.[cuda]' in rollmesh's checkout); only needed for fast=True"
    )
    os.mkfifo(tmp_path / "fifo")  # opening it would block until a writer comes
    for strange in (
        f"/{'b' * 300}",
        str(tmp_path / "fifo"),
        str(tmp_path),
        str(tmp_path / "a\nb\x1b[31m"),
    ):
        monkeypatch.setenv("ROLLMESH_CUDA_LIBRARY", strange)
        rows = dict(doctor._gpu())
        assert rows["CUDA kernels"].endswith(": there is no such file")
        assert rows['device="cuda"'].startswith("no: ROLLMESH_CUDA_LIBRARY: expected")
        assert all(row.isprintable() for row in rows.values())
    monkeypatch.setenv("ROLLMESH_CUDA_LIBRARY", str(wrong))
    wrong.write_text("no library")
    rows = dict(doctor._gpu())
    assert rows["GPU"] == NO_GPU
    assert rows["CUDA kernels"].startswith("cannot be loaded: ")


def test_a_reader_that_leaves_is_no_traceback() -> None:
    """The reader closes the pipe early, as in `rollmesh doctor | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "rollmesh", "doctor"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rollmesh", "doctor"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (
        2,
        "rollmesh doctor: OSError: [Errno 28] No space left on device\n",
    )


def test_plan_of_the_full_size_config() -> None:
    """Qwen3-30B-A3B has 30,532,122,624 parameters (its safetensors index says 61,064,245,248 bytes
    of bfloat16)."""
    text = program("plan", ROOT / "configs/qwen3_30b_a3b.toml")
    assert "30,532,122,624 parameters" in text
    assert "KV of a token                        96.00 KiB" in text
    sharded = rollmesh("plan", ROOT / "configs/qwen3_30b_a3b.toml", "--tp", 8, "--ep", 8)
    assert "KV of a token                        24.00 KiB" in sharded, (
        "4 KV heads over 8 ranks: one each"
    )
    assert "ep: expected a divisor of num_experts=128, got 3" in rollmesh(
        "plan", ROOT / "configs/qwen3_30b_a3b.toml", "--dp", 3, "--ep", 3, status=2
    )


def test_plan_counts_what_the_engine_stores() -> None:
    """Compares the weights line with the engine's own count for the same shape: within the packing
    of vectors (1 %)."""
    from rollmesh.cli import options
    from rollmesh.model import sizes

    for name in ("qwen3_debug", "qwen3_moe_debug"):
        spec = rm.ModelSpec.from_hf(options.read_model_config(ROOT / f"configs/{name}.toml"))
        for dtype in ("bfloat16", "float32"):
            planned = sum(sizes.rank_bytes(spec, dtype)[0].values())
            with rm.Generator(spec, dtype=dtype, kv_cache_gib=0.001, max_model_len=16) as generator:
                elements = sum(
                    math.prod(info.shape) for info in generator.manifest().values() if info.required
                )
                assert sizes.count_parameters(spec).total == elements
                assert planned == pytest.approx(generator.metrics()["weight_bytes"], rel=0.01)


def test_generate_with_random_weights_is_reproducible() -> None:
    args = (
        "generate",
        MOE,
        "ab=",
        "xyz=",
        "--random",
        "--json",
        "-n",
        2,
        "--max-tokens",
        5,
        *SMALL,
    )
    rows = [json.loads(line) for line in program(*args).splitlines()]
    assert [(len(r["token_ids"]), len(r["logprobs"]), r["index"]) for r in rows] == [
        (5, 5, 0),
        (5, 5, 1),
    ] * 2
    assert all(len(r["text"]) <= 5 for r in rows)
    assert rows == [json.loads(line) for line in rollmesh(*args).splitlines()]
    by_ids = rollmesh("generate", MOE, "5,6,7", "--ids", "--random", "--max-tokens", 3, *SMALL)
    assert len(by_ids.splitlines()) == 1


def test_generate_converts_where_a_dtype_is_asked_for(tmp_path: Path) -> None:
    """transformers saves GLM-4-MoE's router in float32 beside bfloat16."""
    pytest.importorskip("transformers")
    family_models = importlib.import_module("family_models")
    model = family_models.draw("glm4_moe", 1, **family_models.cuttable("glm4_moe"))
    model.net("bfloat16").save_pretrained(tmp_path)
    args = ("generate", tmp_path, "--ids", "5,17,3", "--max-tokens", 2, "--json", *SMALL)
    assert "mlp.gate.weight: expected bfloat16, got float32" in rollmesh(*args, status=2)
    assert len(json.loads(rollmesh(*args, "--dtype", "bfloat16"))["token_ids"]) == 2


def test_generate_skips_what_the_model_has_no_place_for(tmp_path: Path) -> None:
    """The folder has a layer after the last one, like checkpoints of GLM-4-MoE with multi-token
    prediction: accepted with --skip-unknown, else refused."""
    pytest.importorskip("transformers")
    from safetensors.numpy import load_file, save_file

    family_models = importlib.import_module("family_models")
    family_models.draw("glm4_moe", 300, **family_models.cuttable("glm4_moe")).net().save_pretrained(
        tmp_path
    )
    command = ("generate", tmp_path, "--ids", "1,2,3", "--max-tokens", 4, "--json", *SMALL)
    want = rollmesh(*command)
    weights = load_file(tmp_path / "model.safetensors")
    beyond = {
        name.replace("layers.1.", "layers.2."): x
        for name, x in weights.items()
        if "layers.1." in name
    }
    save_file(weights | beyond, tmp_path / "model.safetensors")
    assert "layer 2; the model has 2" in (said := rollmesh(*command, status=2))
    assert said.endswith(
        "\n--ignore NAME skips one, with * for any characters; --skip-unknown skips all\n"
    )
    assert rollmesh(*command, "--skip-unknown") == want
    assert rollmesh(*command, "--ignore", "model.layers.2.*") == want
    assert "layer 2; the model has 2" in rollmesh(
        *command, "--ignore", "model.layers.2.self_attn.*", status=2
    )
    assert "missing: model.layers.0.self_attn" in rollmesh(
        *command, "--ignore", "*.q_proj.weight", "--ignore", "*layers.2.*", status=2
    )


def test_generate_from_a_folder_equals_transformers(tmp_path: Path) -> None:
    """A float32 checkpoint saved by transformers: the greedy completion equals transformers' own,
    token by token."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from rollmesh.run import config, data
    from rollmesh.run.models import model_config

    tokenizer = data.load_tokenizer(ROOT / "data/chars")
    torch.manual_seed(3)
    model = transformers.Qwen3MoeForCausalLM(model_config(config.load(MOE), tokenizer)).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    row = json.loads(
        rollmesh(
            "generate",
            tmp_path,
            "hello ",
            "--json",
            "--max-tokens",
            8,
            "--temperature",
            0,
            "--ignore-eos",
            *SMALL,
        )
    )
    ids = row["prompt_token_ids"]
    assert ids == tokenizer.encode("hello ")
    with torch.no_grad():
        for token, logprob in zip(row["token_ids"], row["logprobs"], strict=True):
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
            assert token == int(logits.argmax())
            assert logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-4)
            ids = [*ids, token]
    assert row["text"] == tokenizer.decode(row["token_ids"], skip_special_tokens=True)
    chat = json.loads(
        rollmesh("generate", tmp_path, "hi", "--chat", "--json", "--max-tokens", 1, *SMALL)
    )
    assert chat["prompt_token_ids"] == tokenizer.convert_tokens_to_ids(
        ["<|user|>", "h", "i", "<|assistant|>"]
    )


def test_bench_prints_figures() -> None:
    lines = program("bench", MOE, "--batch", 1, 4, "--prefill", 32, *SMALL).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["sync", "prefill", "decode", "decode"]
    assert all(float(line.split()[1].replace(",", "")) > 0 for line in lines[1:])


@pytest.mark.usefixtures("torch_as_it_was")
def test_grpo_runs_refuses_and_resumes(tmp_path: Path) -> None:
    small = [
        "--set",
        "rollout.prompts=4",
        "--set",
        "rollout.samples=4",
        "--set",
        "eval.prompts=8",
        "--set",
        "generator.kv_cache_gib=0.01",
    ]
    out = program("grpo", MOE, "--seed", 3, "--set", "train.steps=1", *small, cwd=tmp_path)
    assert "step 0/1  reward" in out
    assert "held-out reward" in out
    folder = tmp_path / "runs/qwen3_moe_debug-1"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert "expected a folder without a run, got one" in rollmesh(
        "grpo", MOE, "--out", folder, status=2
    )
    rollmesh("grpo", MOE, "--resume", folder, "--seed", 3, "--set", "train.steps=2", *small)
    assert [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ] == [0, 1, 2]
    greedy = ("abcd=", "--json", "--max-tokens", 4, "--temperature", 0, *SMALL)
    completion = rollmesh("generate", folder / "checkpoints/step_000002", *greedy)
    assert json.loads(completion)["finish_reason"] in ("stop", "length")
    assert rollmesh("generate", folder, *greedy) == completion, (
        "a run folder stands for its newest checkpoint"
    )


@pytest.mark.parametrize(
    "args, message",
    [
        (("plan", "/no/such/folder.json"), "ConfigError: /no/such/folder.json: No such file"),
        (("generate", MOE, "--random"), "ConfigError: no prompts"),
        (
            ("generate", MOE, "--random", "--file", "/no/such"),
            "ConfigError: /no/such: No such file or directory\n",
        ),
        (
            ("generate", MOE, "x,y", "--ids", "--random"),
            "ConfigError: --ids: expected token ids such as 5,17,3, got 'x,y'",
        ),
        (
            ("generate", MOE, "a", "--random", "--tp", "3"),
            "ConfigError: tp: expected a divisor of num_attention_heads=",
        ),
        (("generate", MOE, "a", "--random", "--device", "cuda"), "ConfigError: device = 'cuda'"),
        (
            ("generate", MOE, "a", "--random", "--tp", "0"),
            "ConfigError: mesh tp: expected an integer in [1, 65536], got 0",
        ),
        (
            ("generate", MOE, "a", "--random", "--max-model-len", "0"),
            "ConfigError: max_model_len: expected … got 0",
        ),
        (("bench", MOE, "--max-model-len", "0"), "ConfigError: max_model_len: expected … got 0"),
        (
            ("plan", MOE, "--device", "banana"),
            "ConfigError: device: expected 'cpu', 'cuda' or 'cuda:N', got 'banana'",
        ),
        (
            ("plan", MOE, "--device", ""),
            "ConfigError: device: expected 'cpu', 'cuda' or 'cuda:N', got ''",
        ),
        (
            ("bench", MOE, "--isa", "cuda_mma"),
            "ConfigError: isa: expected one of ref … got 'cuda_mma'",
        ),
        (
            ("generate", MOE, "a", "--random", "--isa", "x" * 100_000),
            "ConfigError: isa: expected one of … got 'xxx",
        ),
        (("plan", MOE, "--tp", "0"), "ConfigError: tp: expected an integer in [1, 65536], got 0"),
        (("plan", MOE, "--kv-cache-gib", "inf"), "ConfigError: --kv-cache-gib inf"),
        (("plan", MOE, "--kv-cache-gib", "1e308"), "ConfigError: --kv-cache-gib 1e+308"),
        (
            ("plan", MOE, "--tp", "9" * 4000, "--ep", "9" * 4000),
            "expected an integer in [1, 65536]",
        ),
        (("plan", "x" * 300), "File name too long"),
        (("plan", "/proc/self/mem"), "ConfigError: /proc/self/mem: "),
        (
            ("generate", MOE, "a", "--random", "--tp", "9" * 4000),
            "ConfigError: mesh tp: expected an integer in [1, 65536], got 999",
        ),
        (
            ("generate", MOE, "a", "--random", "--device", "x" * 100_000),
            "ConfigError: device: expected … got 'xxx",
        ),
        (
            ("generate", MOE, "a", "--random", "--ep-backend", "x" * 100_000),
            "ConfigError: ep_backend: expected one of … got 'xxx",
        ),
        (
            ("generate", MOE, "x" * 100_000, "--ids", "--random"),
            "ConfigError: --ids: expected token ids such as 5,17,3, got 'xxx",
        ),
        (
            ("grpo", MOE, "--set", "train.lr=" + "x" * 100_000),
            "ConfigError: [train] lr: expected a number, got 'xxx",
        ),
        (("grpo", MOE, "--set", "x" * 100_000), "expected KEY=VALUE"),
        (("grpo", MOE, "--set", "x" * 100_000 + "=1"), "no such key"),
        (("grpo", MOE, "--set", "train." + "x" * 100_000 + "=1"), "no such key"),
        (("grpo", MOE, "--set", "train.lr=" + "[" * 5000), "ConfigError: --set train.lr=[["),
        (("grpo", MOE, "--set", "train.steps=" + "9" * 5000), "ConfigError: --set train.steps=999"),
        (
            ("grpo", MOE, "--set", "train.lr=" + "9" * 400),
            "ConfigError: [train] lr: expected a number of 64 bits, got 999",
        ),
        (
            ("grpo", MOE, "--set", "train.steps=9223372036854775808"),
            "ConfigError: [train] steps: expected a number of 64 bits",
        ),
        (("grpo", MOE, "--out", "/dev/null/x"), "ConfigError: /dev/null/x: Not a directory"),
        (("grpo", MOE, "--tp", "0"), "ConfigError: [generator] tp"),
        (
            ("generate", MOE, "a", "--random", "--top-p", "2"),
            "RequestError: top_p: expected a number in (0, 1], got 2.0",
        ),
        (
            ("bench", MOE, "--batch", "0"),
            "ConfigError: --prefill 512 --batch [0]: expected positive numbers",
        ),
        (
            ("grpo", MOE, "--set", "train.lr=x"),
            'ConfigError: [train] lr: expected a number, got "x"',
        ),
        (
            ("grpo", MOE, "--tp", "3", "--out", "/tmp/never"),
            "ConfigError: tp: expected a divisor of num_attention_heads=",
        ),
        (
            ("grpo", MOE, "--resume", "/no/such"),
            "ConfigError: --resume /no/such: no checkpoint there",
        ),
    ],
)
def test_errors_are_one_line_and_status_2(args: tuple[object, ...], message: str) -> None:
    text = rollmesh(*args, status=2)
    assert re.search(".*".join(map(re.escape, message.split(" … "))), text), text
    assert "Traceback" not in text
    assert text.count("\n") == 1
    assert len(text) < 800


def refused(*args: object) -> str:
    """Returns the one line of `rollmesh args`."""
    text = rollmesh(*args, status=2)
    assert re.match(f"rollmesh {args[0]}: (Config|Format)Error: ", text), text
    assert text.count("\n") == 1
    return text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("generation_config.json", "{"),
        ("generation_config.json", "[]"),
        ("generation_config.json", '{"eos_token_id": 1.5}'),
        ("generation_config.json", '{"eos_token_id": {}}'),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "["),
        ("config.json", "[" * 200_000),
    ],
)
def test_broken_files_of_a_checkpoint(name: str, text: str, tmp_path: Path) -> None:
    from helpers import tiny_config

    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    (tmp_path / name).write_text(text)
    refused("generate", tmp_path, "1,2", "--ids", "--random", *SMALL)


@pytest.mark.parametrize(
    "change",
    [{"num_hidden_layers": 10**30}, {"vocab_size": 2**70}, {"moe_intermediate_size": 2**70}],
    ids=str,
)
def test_plan_of_what_no_machine_holds(change: dict[str, int], tmp_path: Path) -> None:
    from helpers import tiny_config

    (tmp_path / "config.json").write_text(json.dumps({**tiny_config(True), **change}))
    assert f"{next(iter(change))}: expected" in refused("plan", tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "x=" + "[" * 5000,
        "seed=" + "9" * 5000,
        "x = \xff",
        "seed=",
        "x" * 100_000 + "=1",
        '"\\u001b\\n"=1',
    ],
    ids=["deep", "digits", "latin-1", "cut", "long key", "escape"],
)
def test_runs_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(text.encode("latin-1"))
    said = refused("plan", tmp_path / "run.toml")
    assert len(said) < 1000
    assert said[:-1].isprintable()


@pytest.mark.parametrize(
    "word",
    ["foo", "\x1b[31mred\n  avx2 works", "x" * 3000, os.fsdecode(b"\xff\xfe")],
    ids=["foo", "escape", "long", "bytes"],
)
def test_doctor_of_an_instruction_set_that_there_is_none_of(word: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rollmesh", "doctor"],
        capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "RM_ISA": word},
    )  # fmt: skip
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  chosen ")]
    assert (done.returncode, done.stderr) == (0, "")
    assert "none: RM_ISA: expected an instruction set" in line
    assert "capped" not in line
    assert len(line) < 200
    assert line.isprintable()


@pytest.mark.full
def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    rollmesh("grpo", MOE, "--tp", "3", "--out", tmp_path / "new", status=2)
    (tmp_path / "old").mkdir()
    rollmesh("grpo", MOE, "--tp", "3", "--out", tmp_path / "old", status=2)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def a_run(folder: Path, generator: str) -> Path:
    """Writes a run's TOML of the debug MoE shape, with these lines as its [generator] table."""
    shape = MOE.read_text().partition("[model]")[2].partition("\n[")[0]
    run = folder / "run.toml"
    run.write_text(
        f'[model]{shape}\n[tokenizer]\npath = "{ROOT}/data/chars"\n[generator]\n{generator}\n'
    )
    return run


def test_plan_and_bench_take_the_runs_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """dtype and KV cache come from the TOML's [generator], unless an option overrides them."""
    from rollmesh.cli import main

    run = a_run(tmp_path, 'dtype = "float32"\nkv_cache_gib = 0.015625\n[sync]\ncast = true')
    assert main(["plan", str(run)]) == 0
    text = capsys.readouterr().out
    assert "rank(s), float32 (" in text
    assert "   0.015625 GiB hold " in text
    assert main(["plan", str(run), "--dtype", "bfloat16", "--kv-cache-gib", "2"]) == 0
    text = capsys.readouterr().out
    assert "rank(s), bfloat16 (" in text
    assert "   2 GiB hold " in text
    assert main(["bench", str(run), "--batch", "1", "--prefill", "8", "--threads", "1"]) == 0
    assert ", float32, " in capsys.readouterr().out


def test_commands_take_the_runs_device(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    simt_library: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run on a GPU is planned and measured for a GPU, unless an option overrides this; on the
    simulated device."""
    from rollmesh.cli import main
    from rollmesh.runtime.devices import LIBRARY_SWITCH

    monkeypatch.setenv(LIBRARY_SWITCH, str(simt_library))
    run = a_run(
        tmp_path,
        'device = "cuda:1"\ntp = 2\nthreads = 4\nkv_cache_gib = 0.015625\n[sync]\ncast = true',
    )

    def header(*words: str) -> str:
        assert main([*words[:1], str(run), *words[1:]]) == 0
        return capsys.readouterr().out

    small = ("--batch", "1", "--prefill", "4")
    assert ", cuda:1 (cuda_sm90, cuda_fma), 4 threads\n" in header("bench", *small)
    assert ", cuda:0 (cuda_sm90, cuda_mma_sm90), 1 threads\n" in header(
        "bench", *small, "--device", "cuda:0", "--isa", "cuda_mma", "--tp", "1", "--threads", "1"
    )
    assert ", bfloat16, ref, 2 threads\n" in header(
        "bench", *small, "--device", "cpu", "--isa", "ref", "--threads", "2"
    )
    assert "(tp=2, dp=1, ep=1), device cuda:1\n" in header("plan")
    assert "(tp=2, dp=1, ep=1), device cpu\n" in header("plan", "--device", "cpu")
    prompts = ("1,2", "--ids", "--random", "--temperature", "0", "--max-tokens", "3")
    assert header("generate", *prompts) == header("generate", *prompts, "--device", "cpu"), (
        "the bits are one family's"
    )
    monkeypatch.setenv(LIBRARY_SWITCH, str(tmp_path / "none.so"))
    for command in ("bench", "generate"):
        assert main([command, str(run), *(prompts if command == "generate" else small)]) == 2
        assert "none.so, which is not a file" in capsys.readouterr().err
    assert "device cuda:1\n" in header("plan"), "a plan needs no GPU"


def test_plan_sums_the_ranks_of_one_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sums the weights of all ranks, of --ranks, and a KV cache of each; to the two printed
    digits."""
    from rollmesh.cli import main

    command = [
        "plan",
        str(ROOT / "configs/qwen3_30b_a3b.toml"),
        "--tp",
        "4",
        "--kv-cache-gib",
        "2",
        "--ranks",
    ]
    assert main([*command, "--device", "cuda:0"]) == 0
    text = capsys.readouterr().out
    together = re.search(
        r"\nof all 4 ranks, on cuda:0 +(\d+\.\d\d) GiB   and a workspace of each\n", text
    )
    of_each = [float(size) for size in re.findall(r"^ +\d .* (\d+\.\d\d) GiB$", text, re.MULTILINE)]
    assert together, text
    assert len(of_each) == 4
    assert float(together[1]) == pytest.approx(2 * sum(of_each) + 4 * 2, abs=0.005 * 9)
    for device in ("cuda", "cpu"):
        assert main([*command, "--device", device]) == 0
        assert "of all 4 ranks" not in capsys.readouterr().out


def test_a_run_folders_newest_checkpoint(tmp_path: Path) -> None:
    from rollmesh.cli.options import checkpoint_of

    for step in ("step_000009", "step_000010", "step_1000000", ".step_2000000.partial"):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
        (tmp_path / "checkpoints" / step / "config.json").write_text("{}")
    newest = tmp_path / "checkpoints/step_1000000"
    assert checkpoint_of(tmp_path) == checkpoint_of(newest) == newest
    assert checkpoint_of(tmp_path / "nowhere") == tmp_path / "nowhere"


def test_an_exception_of_a_reward_names_it(tmp_path: Path) -> None:
    from rollmesh.grpo.rewards import Rewards

    (tmp_path / "reward_that_raises.py").write_text("def f(**columns):\n    return {}['oops']\n")
    reward = Rewards(["reward_that_raises:f"], (), tmp_path)
    with pytest.raises(
        rm.ConfigError, match=r"^reward reward_that_raises:f raised KeyError: 'oops'\n"
    ) as caught:
        reward.judge(["p"], ["c"], [[1]], {})
    assert isinstance(caught.value.__cause__, KeyError)


def test_prompts_may_stand_behind_an_option(tmp_path: Path) -> None:
    first = rollmesh(
        "generate", MOE, "1,2", "3,4", "--random", "--ids", "--max-tokens", 2, "--json", *SMALL
    )
    assert (
        rollmesh(
            "generate", MOE, "--random", "--ids", "1,2", "3,4", "--max-tokens", 2, "--json", *SMALL
        )
        == first
    )
    assert "unrecognized arguments: --idz" in rollmesh("generate", MOE, "--idz", "1,2", status=2)
    assert "unrecognized arguments: more" in rollmesh("doctor", "more", status=2)


@pytest.mark.parametrize("absent", ["tokenizers", "transformers"])
def test_without_the_packages_of_training(absent: str) -> None:
    """bench needs a shape, generate --ids numbers; grpo reports the missing packages."""

    def run(*args: object) -> subprocess.CompletedProcess[str]:
        hide = (
            "import importlib.util as u, sys; f = u.find_spec\n"
            f"sys.modules[{absent!r}] = None\n"
            f"u.find_spec = lambda name, *a: None if name == {absent!r} else f(name, *a)\n"
            f"from rollmesh.cli import main; sys.exit(main({[str(arg) for arg in args]!r}))"
        )
        return subprocess.run(
            [sys.executable, "-c", hide], capture_output=True, text=True, timeout=240, check=False
        )

    assert run("bench", MOE, "--prefill", 4, "--batch", 1, *SMALL).returncode == 0
    assert (
        run("generate", MOE, "1,2", "--random", "--ids", "--max-tokens", 2, *SMALL).returncode == 0
    )
    refused = run("grpo", MOE)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert f"training needs {absent}: pip install" in refused.stderr


def test_a_run_that_never_began_does_not_block_its_folder(tmp_path: Path) -> None:
    from rollmesh.cli import grpo

    args = argparse.Namespace(config=MOE, out=tmp_path, resume=None)
    (tmp_path / "metrics.jsonl").touch()
    assert grpo._folder(args) == tmp_path
    (tmp_path / "metrics.jsonl").write_text("{}\n", encoding="utf-8")
    with pytest.raises(
        rm.ConfigError, match="no checkpoint to continue from; choose another folder"
    ):
        grpo._folder(args)
    (tmp_path / "checkpoints/step_000001").mkdir(parents=True)
    with pytest.raises(rm.ConfigError, match=r"--resume .* continues it"):
        grpo._folder(args)


def test_the_config_of_the_documents_is_whole(tmp_path: Path) -> None:
    """Reads the TOML that docs/grpo.md gives for a custom task unchanged, and checks what the page
    says of the two dtypes."""
    from rollmesh.run import config as run_config

    text = (ROOT / "docs/grpo.md").read_text(encoding="utf-8").split("```toml\n")[1].split("```")[0]
    file = tmp_path / "task.toml"
    file.write_text(text, encoding="utf-8")
    assert run_config.load(file).reward.functions == ("my_reward:has_target",)
    with pytest.raises(rm.ConfigError, match=r"\[sync\] cast: expected true"):
        run_config.load(file, ["sync.cast=false"])
