"""Errors of the command line: a mistake in an argument or a file ends with one line that names it
and with status 2."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_calls import MOE, SMALL, refused, rollmesh

import rollmesh as rm


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
        (
            ("plan", MOE, "--ep-backend", "x"),
            "ConfigError: --ep-backend: expected one of … got 'x'",
        ),
        (("plan", MOE, "--ep-backend", ""), "ConfigError: --ep-backend: expected one of … got ''"),
        (("plan", MOE, "--rows", "0"), "ConfigError: --rows 0: expected a number in [1, 1048576]"),
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


def test_ranges_of_the_options_of_plan() -> None:
    """The ends of a range are accepted, the next numbers are refused."""
    for option, inside, outside in (
        ("--rows", (1, 2**20), (0, 2**20 + 1)),
        ("--kv-cache-gib", (0, 2**20 - 1), (-1, 2**20, "nan")),
    ):
        for value in inside:
            rollmesh("plan", MOE, f"{option}={value}")
        for value in outside:
            assert f"{option} " in refused("plan", MOE, f"{option}={value}")


def test_more_keys_than_a_line_holds_are_not_suggested(tmp_path: Path) -> None:
    """The error ends with the options that ignore its keys, unless these have more than 2,000
    characters."""
    from helpers import tiny_config

    def said(*lengths: int) -> str:
        keys = {f"x{i}".ljust(length, "y"): 1 for i, length in enumerate(lengths)}
        (tmp_path / "config.json").write_text(json.dumps(tiny_config() | keys))
        return rollmesh("plan", tmp_path, status=2)

    assert "--ignore x0yy --ignore x1yy" in said(4, 4)
    assert "--ignore" in said(1000, 1000)
    assert "--ignore" not in said(1000, 1001)


@pytest.mark.full
def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    rollmesh("grpo", MOE, "--tp", "3", "--out", tmp_path / "new", status=2)
    (tmp_path / "old").mkdir()
    rollmesh("grpo", MOE, "--tp", "3", "--out", tmp_path / "old", status=2)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_an_exception_of_a_reward_names_it(tmp_path: Path) -> None:
    from rollmesh.grpo.rewards import Rewards

    (tmp_path / "reward_that_raises.py").write_text("def f(**columns):\n    return {}['oops']\n")
    reward = Rewards(["reward_that_raises:f"], (), tmp_path)
    with pytest.raises(
        rm.ConfigError, match=r"^reward reward_that_raises:f raised KeyError: 'oops'\n"
    ) as caught:
        reward.judge(["p"], ["c"], [[1]], {})
    assert isinstance(caught.value.__cause__, KeyError)


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
