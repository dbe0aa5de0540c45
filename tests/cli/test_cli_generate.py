"""`rollmesh generate`: prompts from files and from the command line, ignored keys, the length.
Input: tiny models with random weights, files with invalid prompts. Oracle: the API, and the same
command without them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_calls import MOE, SMALL, refused, rollmesh
from paths import ROOT

import rollmesh as rm

ROWS = [
    *(
        "5",
        "null",
        "[1]",
        '{"prompt_token_ids": 5}',
        '["a"]',
        '{"prompt_token_ids": [1.9]}',
        "[" * 200_000,
        "{'prompt': 1}",
    ),
    *(
        "\ufeff{}",
        "\0",
        '{"prompt": 5}',
        '{"prompt": null}',
        '{"prompt": "a", "prompt_token_ids": [1]}',
        '{"messages": []}',
        '{"messages": "a"}',
        "{}",
    ),
]


@pytest.mark.parametrize("row", ROWS)
def test_rows_of_a_file_that_are_no_prompts(row: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "ab="}}\n{row}\n')
    said = refused("generate", MOE, "--random", "--file", tmp_path / "rows.jsonl", *SMALL)
    assert f"{tmp_path}/rows.jsonl:2: " in said


def test_a_prompt_that_is_refused_is_named_and_the_others_are_completed(tmp_path: Path) -> None:
    """Input: half of a surrogate pair, a value that is not text, and a text beyond max_model_len,
    between good prompts. On the command line a byte that is not UTF-8 becomes such a half. Oracle:
    the command without them."""
    rows = [
        '{"prompt": "ab="}',
        "",
        '{"prompt": "ab\\ud83d"}',
        '{"prompt": ""}',
        '{"prompt": "xy="}',
        json.dumps({"prompt": "x" * 70}),
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    command = ("generate", MOE, "--random", "--json", "--max-tokens", 3, *SMALL)
    want = rollmesh(*command, "cd=", "ab=", "xy=")
    run = [
        sys.executable,
        "-m",
        "rollmesh",
        *map(str, command),
        "cd=",
        b"cd\xff",
        "--file",
        str(tmp_path / "rows.jsonl"),
    ]
    done = subprocess.run(run, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    assert done.stdout == want
    said = [line.removeprefix("rollmesh generate: ") for line in done.stderr.splitlines()]
    at = f"{tmp_path}/rows.jsonl"
    assert said[0].startswith(
        r"RequestError: prompt 1: expected text without half of a surrogate pair, got 'cd\udcff'"
    )
    assert said[1].startswith(
        rf"RequestError: {at}:3: prompt 3: expected text without half of a surrogate pair, got "
        r"'ab\ud83d'"
    )
    assert said[2].startswith(f"RequestError: {at}:4: prompt 4: ")
    assert said[3].startswith(f"RequestError: {at}:6: prompt 6: ") or said[3].startswith(
        f"CapacityError: {at}:6: prompt 6: "
    )
    assert len(said) == 4


def test_a_chat_that_is_refused_is_named_and_the_others_are_completed(tmp_path: Path) -> None:
    """Input: half of a surrogate pair, and content of another type than str. Oracle: the command
    without them."""
    pytest.importorskip("transformers")
    chat = '{"messages": [{"role": "user", "content": %s}]}'
    rows = [chat % content for content in ('"ab"', '"ab\\ud83d"', "5", '"cd"')]
    command = ("generate", MOE, "--random", "--json", "--max-tokens", 3, *SMALL)
    command += ("--tokenizer", ROOT / "data/chars")
    for name, some in (("good", rows[::3]), ("all", rows)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(some))
    want = rollmesh(*command, "--file", tmp_path / "good.jsonl")
    words = (sys.executable, "-m", "rollmesh", *command, "--file", tmp_path / "all.jsonl")
    run = list(map(str, words))
    done = subprocess.run(run, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    assert done.stdout == want
    at = f"rollmesh generate: RequestError: {tmp_path}/all.jsonl"
    said = done.stderr.splitlines()
    assert said[0].startswith(f"{at}:2: prompt 1: chat: expected text without half of a surrogate")
    assert said[1].startswith(f"{at}:3: prompt 2: chat: expected the content of a message")
    assert len(said) == 2


def test_a_row_of_a_file_does_not_depend_on_the_others(tmp_path: Path) -> None:
    """The row's tokens do not change beside a chat, and its logprobs do not change beside a long
    prompt, with a model whose rope frequencies depend on a length. Oracle: the prompts by the API,
    one by one."""
    pytest.importorskip("transformers")
    from helpers import numpy_state_dict, tiny_config
    from safetensors.numpy import save_file

    for kind in (
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4},
    ):
        config = tiny_config(
            vocab_size=128, head_dim=8, max_position_embeddings=256, dtype="float32",
            rope_scaling={**kind,
            "original_max_position_embeddings": 64} if kind["rope_type"] == "longrope" else kind,
        )  # fmt: skip
        folder = tmp_path / str(kind["rope_type"])
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        for file in (ROOT / "data/chars").glob("token*"):
            shutil.copy(file, folder)
        save_file(numpy_state_dict(config), folder / "model.safetensors")
        rows = [
            {"prompt": "abc"},
            {"messages": [{"role": "user", "content": "ab"}]},
            {"prompt": "x" * 200},
        ]
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (folder / "short.jsonl").write_text("\n".join(map(json.dumps, rows[:2])))
        command = ("generate", folder, "--json", "--max-tokens", 40, "--temperature", 0, *SMALL)
        printed = rollmesh(*command, "--file", folder / "rows.jsonl").splitlines()
        assert rollmesh(*command, "--file", folder / "short.jsonl").splitlines() == printed[:2]
        got = [json.loads(line) for line in printed]
        with rm.Generator.from_hf(folder, dtype="float32", kv_cache_gib=0.01, threads=1) as gen:
            assert gen.max_model_len == 256, (
                "the config's, as that of the command: frequencies depend on it"
            )
            gen.sync_weights(rm.sources.SafetensorsFolder(folder))
            params = rm.SamplingParams(max_tokens=40, temperature=0.0)
            want = [
                gen.generate("abc", params)[0],
                gen.chat(rows[1]["messages"], params)[0],
                gen.generate("x" * 200, params)[0],
            ]
        assert [row["prompt_token_ids"] for row in got] == [
            output.prompt_token_ids.tolist() for output in want
        ]
        assert [row["token_ids"] for row in got] == [
            output.outputs[0].token_ids.tolist() for output in want
        ]
        assert [row["logprobs"] for row in got] == [
            output.outputs[0].logprobs.tolist() for output in want
        ]
        assert [row["text"] for row in got] == [output.outputs[0].text for output in want]


def test_ignore_of_the_commands(tmp_path: Path) -> None:
    """A key inside the rope table: each command's error names the option that accepts it, and the
    option works. Also in a run's TOML."""
    from helpers import tiny_config

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    plain, odd = tmp_path / "plain", tmp_path / "odd"
    for folder, more in ((plain, {}), (odd, {"attn_factor": 0.878})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(tiny_config(rope_scaling=yarn | more)))
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "odd"\nignore = ["rope_parameters.attn_factor"]\n[sync]\ncast = true\n'
    )
    (tmp_path / "bare.toml").write_text('[model]\npath = "odd"\n[sync]\ncast = true\n')
    for command in (("plan",), ("generate", "--random", "--ids", "1,2", "--max-tokens", 2, *SMALL)):
        first, *rest = command
        want = rollmesh(first, plain, *rest).replace(str(plain), "")
        for model in (odd, tmp_path / "bare.toml"):
            said = rollmesh(first, model, *rest, status=2)
            assert "rope_scaling.attn_factor=0.878; ignore=('rope_scaling.attn_factor',)" in said
            assert said.endswith(
                "\nif they do not change the numbers: --ignore rope_scaling.attn_factor\n"
            )
        assert (
            rollmesh(first, odd, *rest, "--ignore", "rope_scaling.attn_factor").replace(
                str(odd), ""
            )
            == want
        )
        assert (
            rollmesh(first, tmp_path / "run.toml", *rest).replace(str(tmp_path / "run.toml"), "")
            == want
        )


def test_a_max_model_len_beyond_the_models_positions_is_told(tmp_path: Path) -> None:
    from helpers import tiny_config

    (tmp_path / "config.json").write_text(json.dumps(tiny_config(max_position_embeddings=64)))
    command = [
        sys.executable,
        "-m",
        "rollmesh",
        "generate",
        str(tmp_path),
        "--random",
        "--ids",
        "1,2",
        "--max-tokens",
        "2",
        *SMALL,
    ]
    for length, lines in (("64", 0), ("65", 1)):
        done = subprocess.run(
            [*command, "--max-model-len", length],
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        )
        assert len(done.stderr.splitlines()) == lines
    assert done.stderr.startswith(
        "rollmesh generate: max_model_len: expected at most 64, the positions that the model's "
        "config is made"
    )
    assert "got 65" in done.stderr
