"""Rows of Hugging Face datasets, by the library `datasets` (an extra, imported here only): a
folder, a file of Parquet or Arrow, the Hub.

A dataset has one type a column, so a key that some rows of a JSONL file lack is None in them. Where
that decides what a prompt is, None counts as absent: of `prompt` and `messages`, and of the keys of
a message, which chat templates look for.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import rollmesh as rm
from rollmesh.run.files import told_as
from rollmesh.runtime.messages import listed, plain

HUB = "hf://datasets/"
SUFFIXES = (".parquet", ".arrow")


def is_dataset(name: str, path: Path) -> bool:
    """Whether an entry of [data] train or heldout, at `path` unless it is of the Hub, is one of
    these; else it is JSONL."""
    return name.startswith(HUB) or path.suffix in SUFFIXES or path.is_dir()


def rows_of(name: str, path: Path, config: str | None, split: str) -> list[dict[str, Any]]:
    """The rows in their order. `config` and `split`: of datasets that have several. ConfigError:
    `datasets` is not installed, or cannot read it."""
    if importlib.util.find_spec("datasets") is None:
        raise rm.ConfigError(
            f"[data] {plain(name)}: expected the package datasets, got none here: pip install "
            "datasets"
        )
    if path.is_fifo():
        raise rm.ConfigError(
            f"[data] {plain(name)}: expected a file, got a pipe, which --resume could not read "
            "again"
        )
    with told_as(f"[data] {plain(name)}: expected a dataset of Hugging Face"):
        found = _load(name, path, config, split)
        splits = (
            found if isinstance(found, dict) else {split: found}
        )  # a DatasetDict, or one without splits
        rows = [_row(row) for row in splits[split].with_format(None)] if split in splits else None
    if rows is None:
        there = listed((key,) for key in splits)
        advice = "[data] dataset_train_split and dataset_test_split name those of train and heldout"
        raise rm.ConfigError(
            f"[data] {plain(name)}: expected a split {plain(split)}, got {there}; {advice}"
        )
    return rows


def _load(name: str, path: Path, config: str | None, split: str) -> Any:
    import datasets

    if name.startswith(HUB):
        repository, _, revision = name.removeprefix(HUB).partition("@")
        return datasets.load_dataset(repository, config, split=split, revision=revision or None)
    if path.suffix == ".parquet":
        from pyarrow import parquet

        return datasets.Dataset(
            parquet.read_table(path)
        )  # from_parquet would copy it to a cache, and expand a * in the path
    if path.suffix == ".arrow":
        return datasets.Dataset.from_file(str(path))
    if any(
        (path / of_save_to_disk).is_file()
        for of_save_to_disk in ("state.json", "dataset_dict.json")
    ):
        return datasets.load_from_disk(str(path))
    try:
        return datasets.load_dataset(str(path), config, split=split)  # a clone of one of the Hub
    except datasets.exceptions.DatasetGenerationError as error:
        raise error.__cause__ or error from None  # it does not say what is wrong


def _row(row: dict[str, Any]) -> dict[str, Any]:
    row = {k: v for k, v in row.items() if v is not None or k not in ("prompt", "messages")}
    for key in row.keys() & {"prompt", "messages"}:
        if isinstance(row[key], list):
            row[key] = [
                {k: v for k, v in m.items() if v is not None} if isinstance(m, dict) else m
                for m in row[key]
            ]
    return row
