"""Errors name the files of a run that are missing, cut in half or changed, and settings that are
out of every range."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grpo_runs import DENSE, SMALL, command, whole  # noqa: F401
from paths import ROOT

import rollmesh as rm
from rollmesh.cli import main

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rollmesh.grpo import loop  # noqa: E402
from rollmesh.run import (  # noqa: E402
    checkpoint,
    config,
    data,
    metrics,
)
from rollmesh.run.generator import make_generator  # noqa: E402

pytestmark = pytest.mark.usefixtures("torch_as_it_was", "no_pictures")


# -------------------------------------------------------------------------- files that are broken
def half(folder: Path, name: str) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[: (folder / name).stat().st_size // 2])


@pytest.mark.parametrize(
    "name, content, message",
    [
        (
            "tokenizer.json",
            None,
            "/tok: expected the files of a tokenizer, got ValueError: Couldn't instantiate",
        ),
        (
            "tokenizer.json",
            "half",
            "/tok: expected the files of a tokenizer, got JSONDecodeError: ",
        ),
        (
            "tokenizer.json",
            "{}",
            "/tok: expected the files of a tokenizer, got KeyError: 'added_tokens'",
        ),
        (
            "tokenizer_config.json",
            "half",
            "/tok: expected the files of a tokenizer, got JSONDecodeError: ",
        ),
        (
            "chat_template.jinja",
            "{% for m in",
            "chats.jsonl:1: expected a chat .* got TemplateSyntaxError: ",
        ),
        (
            "chat_template.jinja",
            "{{ raise_exception('no') }}",
            "chats.jsonl:1: expected a chat .* got TemplateError: no$",
        ),
        (
            "chat_template.jinja",
            "{{ messages + 1 }}",
            "chats.jsonl:1: expected a chat .* got TypeError: ",
        ),
    ],
)
def test_a_broken_tokenizer_is_named(
    name: str, content: str | None, message: str, tmp_path: Path
) -> None:
    """Input: a file that is missing (None), truncated, or something else, in the tokenizer of
    data/chars, saved with the chat template as a file."""
    folder, chats = tmp_path / "tok", tmp_path / "chats.jsonl"
    data.load_tokenizer(ROOT / "data/chars").save_pretrained(str(folder))
    chats.write_text('{"messages": [{"role": "user", "content": "ab"}]}\n')
    assert len(data.read_jsonl(chats, data.load_tokenizer(folder))) == 1
    if content == "half":
        half(folder, name)
    elif content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(rm.ConfigError, match=message):
        data.read_jsonl(chats, data.load_tokenizer(folder))


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    """transformers would make an empty tokenizer, from the model_type of a config.json."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(
        rm.ConfigError,
        match=r"^\[tokenizer\] path: expected a tokenizer.json or tokenizer_config.json in .* got "
        r"neither$",
    ):
        data.load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name, message",
    [
        ("model.safetensors", "model.safetensors: .*incomplete"),
        ("config.json", "config.json: "),
        ("trainer/state.json", "state.json: expected the state of a run, got JSONDecodeError: "),
        (
            "trainer/optimizer.safetensors",
            "optimizer.safetensors: expected the optimizer's state, got SafetensorError: ",
        ),
    ],
)
def test_a_checkpoint_cut_in_half_is_named(
    name: str, message: str, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "step_000004"
    shutil.copytree(whole / "checkpoints/step_000004", folder)
    half(folder, name)
    with pytest.raises((rm.ConfigError, rm.FormatError), match=message):
        loop.prepare(config.load(DENSE, SMALL), folder)


@pytest.mark.parametrize("name", ["model.safetensors", "trainer/optimizer.safetensors"])
def test_a_flipped_bit_of_a_checkpoint_is_named(name: str, whole: Path, tmp_path: Path) -> None:
    """A change of a number's lowest bit cannot be seen without a digest. Older checkpoints have no
    digests."""
    folder = tmp_path / "step_000004"
    shutil.copytree(whole / "checkpoints/step_000004", folder)
    content = bytearray((folder / name).read_bytes())
    content[-4] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(
        rm.FormatError,
        match=rf"{name}: expected the file that was written, of SHA-256 '\w+' in .*; it was "
        r"changed",
    ):
        loop.prepare(config.load(DENSE, SMALL), folder)
    state = json.loads((folder / "trainer/state.json").read_text())
    for wrong, message in (
        ([], "expected sha256, a table, got"),
        ({**state["sha256"], "a": 1}, "a: expected the file that was written"),
    ):
        edit_state(folder, sha256=wrong)
        with pytest.raises(rm.FormatError, match=message):
            checkpoint.verify(folder)
    shutil.copytree(folder, older := tmp_path / "step_000002")
    with pytest.raises(
        rm.FormatError,
        match=rf"it was changed or damaged since. The checkpoint before: --resume {older}$",
    ):
        checkpoint.verify(folder)
    del state["sha256"]
    (folder / "trainer/state.json").write_text(json.dumps(state))
    checkpoint.verify(folder)


def edit_state(folder: Path, **changes: Any) -> None:
    file = folder / "trainer/state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_config(folder: Path, table: str, **changes: Any) -> None:
    config = json.loads((folder / "trainer/state.json").read_text())["config"]
    edit_state(folder, config=config | {table: config[table] | changes})


def edit_optimizer(folder: Path, **changes: Any) -> None:
    """A value of None removes a tensor."""
    from safetensors.torch import load_file, save_file

    file = folder / "trainer/optimizer.safetensors"
    tensors = load_file(file) | {name: x for name, x in changes.items() if x is not None}
    save_file({name: x for name, x in tensors.items() if changes.get(name, x) is not None}, file)


MOMENT = "exp_avg:model.norm.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda f: (f / "trainer/state.json").write_text("[]"),
            "expected the state of a run, got a list",
        ),
        (
            lambda f: edit_state(f, next_step="x"),
            "expected next_step, an integer from 0, .* got next_step='x'",
        ),
        (
            lambda f: edit_config(f, "rollout", **{"x" * 9999: 1}),
            r"run: .{200,300} differ \(rollout\.x{192}…: 1 there, None here\)",
        ),
        (
            lambda f: edit_config(f, "rollout", min_p={}),
            r"rollout\.min_p differ \(rollout\.min_p: {} there, 0\.0 here\)",
        ),
        (
            lambda f: edit_state(f, next_step=2),
            "expected next_step=4, as the folder is named, got 2$",
        ),
        (
            lambda f: edit_state(f, config=[]),
            "expected next_step, an integer from 0, and config, a table",
        ),
        (
            lambda f: edit_optimizer(f, rng=None),
            "expected the optimizer's state, got KeyError: 'rng'",
        ),
        (
            lambda f: edit_optimizer(f, rng=torch.zeros(3)),
            "expected the optimizer's state, got TypeError: RNG state",
        ),
        (
            lambda f: edit_optimizer(f, **{MOMENT: None}),
            rf"{MOMENT}: expected \[32\] of floats, .* got None$",
        ),
        (
            lambda f: edit_optimizer(f, **{MOMENT: torch.zeros(3)}),
            rf"{MOMENT}: expected \[32\] of floats, .* got \[3\] of torch\.float32$",
        ),
        (
            lambda f: edit_optimizer(f, **{MOMENT: torch.zeros(32, dtype=torch.int8)}),
            rf"{MOMENT}: expected .* of floats, .* got \[32\] of torch\.int8$",
        ),
        (
            lambda f: edit_optimizer(f, **{"step:model.norm.weight": torch.tensor(-1.0)}),
            r"step:.*: expected \[\] of floats, a step from 0, got ",
        ),
        (
            lambda f: edit_optimizer(f, more=torch.zeros(3)),
            r"more: expected no such key, got \[3\] of torch\.float32$",
        ),
    ],
)
def test_the_state_of_a_run_that_was_changed_is_named(
    change: Callable[[Path], None], message: str, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "step_000004"
    shutil.copytree(whole / "checkpoints/step_000004", folder)
    change(folder)
    with pytest.raises((rm.ConfigError, rm.FormatError), match=message):
        loop.prepare(config.load(DENSE, SMALL), folder)


@pytest.mark.parametrize(
    "line", [b"garbage", b"[1]", b'{"a": 1}', b'{"step": "x"}', b"\xff", b"[" * 100_000]
)
def test_metrics_that_are_none_are_named(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n' + line + b"\n")
    with pytest.raises(rm.FormatError, match=r"metrics\.jsonl:2: expected a line of metrics"):
        metrics.read(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize(
    "changes, message",
    [
        (["train.lr=1e300"], "[train] lr: expected at most 1e+18, got 1e+300"),
        (["loss.clip_high=1e308"], "[loss] clip_high: expected at most 1e+18, got 1e+308"),
        (
            [f"rollout.prompts={2**63 - 1}"],
            f"[rollout] prompts: expected at most {2**20}, got {2**63 - 1}",
        ),
        (["train.threads=100000"], "[train] threads: expected at most 1024, got 100000"),
        (
            [f"model.hidden_size={10**12}"],
            f"hidden_size: expected 1 to 4194304, got {10**12}",
        ),
        (['generator.comm="torch"'], '[generator] comm="torch": expected RANK, WORLD_SIZE and '),
    ],
)
def test_settings_that_nothing_can_hold_are_refused(
    changes: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path / "out", changes) == 2
    assert f"rollmesh grpo: ConfigError: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("world", ["", "x", "-1"])
def test_a_world_that_is_no_number(
    world: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    assert main(["grpo", str(DENSE)]) == 2
    assert (
        f"ConfigError: WORLD_SIZE: expected the number of ranks, as torchrun sets it, got '{world}'"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("option", ["--out", "--resume"])
@pytest.mark.parametrize("path", ["", "a\0b"])
def test_a_path_that_names_no_folder(
    option: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["grpo", str(DENSE), option, path])
    assert f"{option}: expected the path of a folder, got {path!r}" in capsys.readouterr().err


def test_a_tokenizer_with_more_tokens_than_the_model(whole: Path) -> None:
    folder = whole / "checkpoints/step_000004"
    tokenizer = data.load_tokenizer(folder)
    count = len(tokenizer)
    tokenizer.add_tokens(["<|more|>"])
    from transformers import AutoConfig

    this = config.load(DENSE, SMALL)
    with pytest.raises(
        rm.ConfigError,
        match=rf"^tokenizer: expected at most vocab_size = {count} tokens, got {count + 1}$",
    ):
        make_generator(this, AutoConfig.from_pretrained(str(folder)), tokenizer)
