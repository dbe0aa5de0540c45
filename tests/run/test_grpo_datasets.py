"""Datasets of Hugging Face as [data] of `rollmesh grpo`: every form gives the same prompts as the
same JSONL."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from helpers import TIMES, TINY_RUN
from paths import ROOT

import rollmesh as rm

pytest.importorskip("torch")
pytest.importorskip("transformers")

from rollmesh.grpo import loop
from rollmesh.run import config, data, metrics

DENSE = ROOT / "configs/qwen3_debug.toml"
HELDOUT = ROOT / "data/upper_heldout.jsonl"
pytestmark = pytest.mark.usefixtures("torch_as_it_was", "no_pictures")

CHATS = [
    [{"role": "user", "content": "ab"}],
    [{"role": "system", "content": "c", "name": "x"}, {"role": "user", "content": "d"}],
]
ROWS: list[dict[str, Any]] = [
    {"prompt": "ab", "answer": "AB", "tags": ["x", "y"], "level": 3},
    {"prompt": "cd\u2028e", "answer": "é", "level": 2**60},
    *({"messages": chat, "answer": ""} for chat in CHATS),
    {"prompt": "f", "tags": [], "score": 0.1, "facts": {"deep": [1, 2]}},
    *({"prompt": f"{i}", "answer": str(i)} for i in range(40)),
]
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{% if m.name is defined %}({{ m.name }}){% "
    "endif %}{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    loaded = data.load_tokenizer(ROOT / "data/chars")
    loaded.chat_template = TEMPLATE
    return loaded


def jsonl(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def loaded(train: Path | str, tokenizer: Any, *more: str) -> data.Dataset:
    return data.load_dataset(
        config.load(DENSE, [*TINY_RUN, f'data.train=["{train}"]', "data.heldout=[]", *more]),
        tokenizer,
    )


def on_disk(path: Path, rows: Any) -> Path:
    rows.with_format("numpy").save_to_disk(path)  # the format is stored with it
    return path


def splits_on_disk(path: Path, rows: Any) -> Path:
    import datasets

    datasets.DatasetDict({"test": rows.select([0]), "train": rows}).save_to_disk(path)
    return path


def parquet(path: Path, rows: Any) -> Path:
    rows.to_parquet(file := path.with_name("a[*].parquet"))
    return file


def arrow(path: Path, rows: Any) -> Path:
    rows.save_to_disk(path)
    [file] = path.glob("*.arrow")
    return file


def clone(path: Path, rows: Any) -> Path:
    """A repository of the Hub: two configs, of which one has two splits."""
    for name, kept in (
        ("big/train", range(len(rows))),
        ("big/test", range(1)),
        ("small/train", range(1, 2)),
    ):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        rows.select(kept).to_parquet(path / f"{name}.parquet")
    files = "  data_files:\n  - {split: train, path: %s/train*}\n"
    test = "  - {split: test, path: big/test*}\n"
    configs = f"- config_name: big\n{files % 'big'}{test}- config_name: small\n{files % 'small'}"
    (path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    return path


@pytest.mark.parametrize(
    "form", [on_disk, splits_on_disk, parquet, arrow, clone], ids=lambda form: form.__name__
)
def test_a_dataset_gives_the_prompts_of_the_same_jsonl(
    form: Callable[[Path, Any], Path],
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compares sources, ids, order, held-out share and columns. None stands for a key that a row
    lacks, as in a reward's columns."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    of_jsonl = loaded(jsonl(tmp_path / "rows.jsonl"), tokenizer)
    names = dict.fromkeys(key for row in ROWS for key in row)
    rows = datasets.Dataset.from_list([dict.fromkeys(names) | row for row in ROWS])
    more = ["data.dataset_config=big"] if form is clone else []
    found = loaded(form(tmp_path / "rows", rows), tokenizer, *more)
    for ours, theirs in ((found.train, of_jsonl.train), (found.heldout, of_jsonl.heldout)):
        assert [(p.source, p.ids) for p in ours] == [(p.source, p.ids) for p in theirs]
        missing = dict.fromkeys(names.keys() - {"prompt", "messages"}, [None] * len(ours))
        assert data.columns_of(ours) == missing | data.columns_of(theirs)


def test_each_side_takes_its_split(tokenizer: Any, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"prompt": c} for c in "abcdef"])
    datasets.DatasetDict(
        {"train": rows.select(range(3)), "test": rows.select([3]), "more": rows.select([4, 5])}
    ).save_to_disk(tmp_path)
    sets = [*TINY_RUN, f'data.train=["{tmp_path}"]', f'data.heldout=["{tmp_path}"]']
    for more, train, heldout in (
        ([], "abc", "d"),
        (["data.dataset_train_split=more", "data.dataset_test_split=train"], "ef", "abc"),
    ):
        both = data.load_dataset(config.load(DENSE, [*sets, *more]), tokenizer)
        assert ["".join(p.source for p in side) for side in (both.train, both.heldout)] == [
            train,
            heldout,
        ]


def test_a_run_has_the_bits_of_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [
        json.loads(line) for line in (ROOT / "data/upper_train.jsonl").read_text().splitlines()[:50]
    ]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "rows")
    lines = []
    for train in (jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "rows"):
        this = loop.prepare(
            config.load(
                DENSE,
                [
                    *TINY_RUN,
                    "train.steps=2",
                    f'data.train=["{train}"]',
                    f'data.heldout=["{HELDOUT}"]',
                ],
            )
        )
        try:
            out = tmp_path / f"out of {train.name}"
            loop.train(this, out)
        finally:
            this.close()
        lines.append(
            [
                {k: v for k, v in m.items() if k not in TIMES}
                for m in metrics.read(out / "metrics.jsonl")
            ]
        )
    assert lines[0] == lines[1]
    assert len(lines[0]) == 3


def test_a_dataset_that_cannot_be_read_is_named(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "half.parquet").write_bytes(b"PAR1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/train.jsonl").write_text('{"prompt": "a"', encoding="utf-8")
    os.mkfifo(tmp_path / "pipe.arrow")
    rows = datasets.Dataset.from_list([{"prompt": "ab"}, {"prompt": None}, {"prompt": ""}])
    splits_on_disk(tmp_path / "splits", rows)
    rows.to_parquet(tmp_path / "none.parquet")
    rows.select([0, 2]).to_parquet(tmp_path / "no_tokens.parquet")
    message = {"role": "user", "content": "ab", "date": datetime(2026, 11, 26, tzinfo=UTC)}
    datasets.Dataset.from_list([{"messages": [message]}]).to_parquet(tmp_path / "dates.parquet")
    read = r"expected a dataset of Hugging Face, got "
    for name, message in (
        (f"{tmp_path}/half.parquet", rf"^\[data\] .*half\.parquet: {read}ArrowInvalid: "),
        (f"{tmp_path}/gone.parquet", rf"^\[data\] .*gone\.parquet: {read}FileNotFoundError: "),
        (f"{tmp_path}/gone", "gone: No such file or directory"),
        (f"{tmp_path}/empty", rf"^\[data\] .*empty: {read}EmptyDatasetError: "),
        (f"{tmp_path}/bad", rf"^\[data\] .*bad: {read}ArrowInvalid: JSON parse error"),
        (f"{tmp_path}/pipe.arrow", r"pipe\.arrow: expected a file, got a pipe"),
        (
            f"{tmp_path}/none.parquet",
            r"none\.parquet: row 1: expected an object with either prompt or messages",
        ),
        (
            f"{tmp_path}/dates.parquet",
            r"dates\.parquet: row 0: expected a chat of what JSON has, .* got TypeError: .* "
            r"datetime ",
        ),
        (f"{tmp_path}/no_tokens.parquet", r"no_tokens\.parquet: row 1: the prompt has no tokens"),
        (
            "hf://datasets/nobody/nothing@v1",
            rf"^\[data\] hf://datasets/nobody/nothing@v1: {read}.*(O|o)ffline",
        ),
    ):
        with pytest.raises(rm.ConfigError, match=message):
            loaded(name, tokenizer)
    with pytest.raises(
        rm.ConfigError,
        match=r"expected a split dev, got test, train; \[data\] dataset_train_split and ",
    ):
        loaded(tmp_path / "splits", tokenizer, "data.dataset_train_split=dev")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(
        rm.ConfigError,
        match=r"^\[data\] dataset_config: expected a dataset in train or heldout, got 'main' and "
        r"JSONL",
    ):
        loaded(tmp_path / "rows.jsonl", tokenizer, "data.dataset_config=main")


@pytest.mark.full
def test_a_name_of_the_hub(tmp_path: Path) -> None:
    """Uses the Hub's own client and a local server instead of the Hub: the newest revision, a named
    revision, and missing names."""
    pytest.importorskip("datasets")
    names = [f"hf://datasets/org/{name}" for name in ("name", "name@v1", "other")]
    command = [sys.executable, str(ROOT / "tests/support/hf_hub.py"), str(tmp_path), *names]
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, timeout=300, env=env
    )
    *rows, missing, asked = map(json.loads, done.stdout.splitlines())
    assert rows == [[{"prompt": "ab", "answer": "AB"}, {"prompt": "cd", "answer": "CD"}]] * 2
    assert missing.startswith(f"[data] {names[2]}: expected a dataset of Hugging Face, got ")
    assert {"/api/datasets/org/name", "/api/datasets/org/name/revision/v1"} <= set(asked)


def test_without_the_package_of_datasets(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "datasets" else find(name, *rest),
    )
    with pytest.raises(
        rm.ConfigError,
        match=r"a\.parquet: expected the package datasets, got none here: pip install datasets$",
    ):
        loaded(tmp_path / "a.parquet", tokenizer)
