"""The command line on tiny shapes: its output and its exit status. Each command runs once as a
separate program; the other tests call the command's function directly, which avoids the seconds of
importing torch."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_calls import MOE, SMALL, program, rollmesh
from paths import ROOT

import rollmesh as rm
from rollmesh.cli import bench


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


@pytest.mark.usefixtures("torch_as_it_was", "no_pictures")  # of the second run
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
    """dtype, KV cache and isa come from the TOML's [generator], unless an option overrides them."""
    from rollmesh.cli import main

    run = a_run(
        tmp_path, 'dtype = "float32"\nisa = "ref"\nkv_cache_gib = 0.015625\n[sync]\ncast = true'
    )
    assert main(["plan", str(run)]) == 0
    text = capsys.readouterr().out
    assert "rank(s), float32 (" in text
    assert "   0.015625 GiB hold " in text
    assert main(["plan", str(run), "--dtype", "bfloat16", "--kv-cache-gib", "2"]) == 0
    text = capsys.readouterr().out
    assert "rank(s), bfloat16 (" in text
    assert "   2 GiB hold " in text
    assert main(["bench", str(run), "--batch", "1", "--prefill", "8", "--threads", "1"]) == 0
    assert ", float32, ref, " in capsys.readouterr().out
    run = a_run(
        tmp_path, 'device = "cuda"\nisa = "cuda_fma"\nkv_cache_gib = 0.015625\n[sync]\ncast = true'
    )
    assert main(["bench", str(run), "--batch", "1", "--prefill", "8", "--device", "cpu"]) == 0


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
