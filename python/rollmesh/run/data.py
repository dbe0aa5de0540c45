"""Prompts: reads JSONL files or Hugging Face datasets, sets held-out prompts apart, and draws the
prompts of each step.

A row is an object with `prompt` (text) or `messages` (a chat, for the tokenizer's template), and
any further columns, which the reward function gets as keyword arguments. Held-out prompts come
from separate files, or are a share of the training prompts chosen by a hash of their text, so that
the choice does not depend on the seed, the order or the number of rows. Each prompt is in one of
the two sets.

A dataset has one type per column, so a key that some rows of a JSONL file lack is None in them.
None counts as absent for `prompt`, `messages`, and the keys of a message, which chat templates look
for.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmesh.errors import ConfigError
from rollmesh.request.text import Detokenizer, TextCodec
from rollmesh.run.config import Config
from rollmesh.run.files import library_errors
from rollmesh.run.seeds import rng_of
from rollmesh.runtime.messages import listed, plain, shown

SOURCES = {"prompt", "messages"}
REWARD_ARGUMENTS = {"prompts", "completions", "completion_ids"}
HUB = "hf://datasets/"
_log = logging.getLogger("rollmesh.grpo")


@dataclass(frozen=True)
class Prompt:
    source: str | list[dict[str, Any]]  # the text or the chat, for the reward function
    ids: tuple[int, ...]  # the token ids, for the model
    columns: dict[str, Any]
    stage: int = 0

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.source, str)


@dataclass(frozen=True)
class Dataset:
    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]
    stage_steps: tuple[int, ...]

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of all prompts, their tokens and columns, in their order."""
        found = hashlib.sha256()
        for p in (*self.train, None, *self.heldout):
            row = p and [p.source, p.ids, p.columns, p.stage]
            text = json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__)
            found.update(text.encode() + b"\n")
        return found.hexdigest()

    def draw(
        self, run_seed: int, step: int, count: int, drawn: Sequence[Prompt] = ()
    ) -> list[Prompt]:
        """Returns `count` training prompts of the open stages for a step, without repetition if the
        stages have that many. drawn: the prompts of the step so far. If there are any, returns
        other prompts, fewer than `count` at the end of the data."""
        stage = sum(step >= s for s in self.stage_steps)
        pool = [p for p in self.train if p.stage <= stage] if self.stage_steps else self.train
        if drawn:
            known = set(map(id, drawn))
            left = [p for p in pool if id(p) not in known]
            rng = rng_of(run_seed, step, f"prompts\0{len(drawn)}")
            return rng.sample(left, min(count, len(left)))
        rng = rng_of(run_seed, step, "prompts")
        return rng.sample(pool, count) if count <= len(pool) else rng.choices(pool, k=count)


def load_tokenizer(path: Path) -> Any:
    """Returns the transformers tokenizer of a folder or a tokenizer.json. Never runs remote code.
    ConfigError: it cannot be read."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if path.is_dir():
        # Without these files transformers makes an empty tokenizer.
        if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            raise ConfigError(
                "[tokenizer] path: expected a tokenizer.json or tokenizer_config.json in "
                f"{path}, got neither"
            )
        with library_errors(f"{path}: expected the files of a tokenizer"):
            return AutoTokenizer.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False
            )
    if path.is_file():
        with library_errors(f"{path}: expected a tokenizer.json"):
            return PreTrainedTokenizerFast(tokenizer_file=str(path))  # type: ignore[no-untyped-call]
    raise ConfigError(f"[tokenizer] path: {plain(path)} is neither a folder nor a tokenizer.json")


def load_dataset(config: Config, tokenizer: Any) -> Dataset:
    table = config.data
    if not table.train:
        raise ConfigError("[data] train: expected at least one file of prompts, got none")
    if not any(_is_dataset(name, config.path(name)) for name in (*table.train, *table.heldout)):
        for field in dataclasses.fields(table):
            value = getattr(table, field.name)
            if field.name.startswith("dataset_") and value != field.default:
                raise ConfigError(
                    f"[data] {field.name}: expected a dataset in train or heldout, got "
                    f"{shown(value)} and JSONL alone"
                )
    train, heldout = [], []
    for i, name in enumerate(table.train):
        stage = i if table.stage_steps else 0
        train += _read(config, name, tokenizer, table.dataset_train_split, stage)
    for name in table.heldout:
        heldout += _read(config, name, tokenizer, table.dataset_test_split)
    if not table.heldout:
        heldout = [p for p in train if _in_share(p, table.heldout_share)]
        train = [p for p in train if not _in_share(p, table.heldout_share)]
    room = config.generator.max_model_len - config.rollout.max_tokens
    if table.overlong != "raise":
        train, heldout = (_fitted(prompts, room, table.overlong) for prompts in (train, heldout))
    heldout_ids = {p.ids for p in heldout}
    both = sum(p.ids in heldout_ids for p in train)
    if both and (table.heldout or table.overlong == "truncate"):
        raise ConfigError(f"[data] heldout: {both} of its prompts are training prompts too")
    if not train or not heldout:
        raise ConfigError(
            f"[data]: expected prompts on both sides, got {len(train)} to train on and "
            f"{len(heldout)} held out; give [data] heldout, or more prompts"
        )
    if table.stage_steps and all(p.stage for p in train):
        raise ConfigError(
            f"[data] train: expected prompts in {table.train[0]}, the first stage, got none"
        )
    if config.rollout.environment and any("completion" in p.columns for p in (*train, *heldout)):
        raise ConfigError(
            "[data]: expected no column completion: an environment gets an argument of this "
            "name; rename the column"
        )
    longest = max(len(p.ids) for p in (*train, *heldout))
    if longest > room:
        raise ConfigError(
            f"[generator] max_model_len: a prompt of {longest} tokens and "
            f"max_tokens={config.rollout.max_tokens} "
            f"do not fit into {config.generator.max_model_len}; [data] overlong can drop or "
            "truncate such prompts"
        )
    return Dataset(tuple(train), tuple(heldout), table.stage_steps)


def _fitted(prompts: list[Prompt], room: int, overlong: str) -> list[Prompt]:
    """Returns prompts of at most `room` tokens: drops longer ones, or keeps their last tokens."""
    is_long = [len(p.ids) > room for p in prompts]
    if any(is_long):
        done = "dropped" if overlong == "drop" else "truncated to their last tokens"
        text = "%d of %d prompts have more than %d tokens and were %s ([data] overlong)"
        _log.warning(text, sum(is_long), len(prompts), room, done)
    kept = (p for p, long in zip(prompts, is_long, strict=True) if not long or overlong != "drop")
    return [dataclasses.replace(p, ids=p.ids[-room:]) for p in kept]


def _in_share(p: Prompt, share: float) -> bool:
    text = json.dumps(p.source, sort_keys=True, ensure_ascii=False).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") < share * 2.0**64


def _read(config: Config, name: str, tokenizer: Any, split: str, stage: int = 0) -> list[Prompt]:
    """Reads an entry of [data] train or heldout."""
    table, path = config.data, config.path(name)
    if not _is_dataset(name, path):
        return read_jsonl(path, tokenizer, table.chat, stage)
    rows = enumerate(rows_of(name, path, table.dataset_config, split))
    return [make_prompt(row, tokenizer, table.chat, stage, f"{name}: row {i}") for i, row in rows]


def _is_dataset(name: str, path: Path) -> bool:
    """Returns whether an entry is a dataset of Hugging Face; otherwise it is JSONL."""
    return name.startswith(HUB) or path.suffix in (".parquet", ".arrow") or path.is_dir()


def read_jsonl(path: Path, tokenizer: Any, chat: bool = False, stage: int = 0) -> list[Prompt]:
    """Returns the prompts of a JSONL file. Raises ConfigError, with file and line, for a malformed
    object."""
    if path.is_fifo() or path.is_char_device():
        raise ConfigError(
            f"{plain(path)}: expected a file, got a pipe or a device, which --resume could not "
            "read again"
        )
    return [make_prompt(row, tokenizer, chat, stage, where) for where, row in json_lines(path)]


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields "file:line" and the value of each line of a JSONL file. Skips blank lines. Raises
    ConfigError."""
    try:
        # Not splitlines(): JSON strings may contain U+2028.
        lines = path.read_bytes().decode().split("\n")
    except OSError as e:
        raise ConfigError(f"{plain(path)}: {e.strerror}") from e
    except ValueError as e:  # not UTF-8, a NUL in the path
        raise ConfigError(f"{plain(path)}: {plain(e)}") from e
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{plain(path)}:{number}"
        try:
            yield where, json.loads(line)
        except (ValueError, RecursionError) as e:  # not JSON, too many digits or levels
            raise ConfigError(f"{where}: expected a JSON object, got none: {plain(e)}") from e


def rows_of(name: str, path: Path, config: str | None, split: str) -> list[dict[str, Any]]:
    """Returns the rows of a dataset in their order. `config` and `split` select one of several.
    ConfigError: the library `datasets` is missing, or cannot read it."""
    what = f"[data] {plain(name)}"
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            f"{what}: expected the package datasets, got none here: pip install datasets"
        )
    if path.is_fifo():
        raise ConfigError(
            f"{what}: expected a file, got a pipe, which --resume could not read again"
        )
    with library_errors(f"{what}: expected a dataset of Hugging Face"):
        found = _load_hf_dataset(name, path, config, split)
        splits = found if isinstance(found, dict) else {split: found}
        rows = [_row(row) for row in splits[split].with_format(None)] if split in splits else None
    if rows is None:
        raise ConfigError(
            f"{what}: expected a split {plain(split)}, got {listed((key,) for key in splits)}; "
            "[data] dataset_train_split and dataset_test_split name those of train and heldout"
        )
    return rows


def _load_hf_dataset(name: str, path: Path, config: str | None, split: str) -> Any:
    import datasets

    if name.startswith(HUB):
        repository, _, revision = name.removeprefix(HUB).partition("@")
        return datasets.load_dataset(repository, config, split=split, revision=revision or None)
    if path.suffix == ".parquet":
        from pyarrow import parquet

        # from_parquet would copy the file to a cache, and expand a * in the path.
        return datasets.Dataset(parquet.read_table(path))
    if path.suffix == ".arrow":
        return datasets.Dataset.from_file(str(path))
    if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return datasets.load_from_disk(str(path))
    try:
        return datasets.load_dataset(str(path), config, split=split)  # a clone from the Hub
    except datasets.exceptions.DatasetGenerationError as error:
        raise error.__cause__ or error from None  # the cause describes the problem


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """Removes None from `prompt`, `messages` and messages."""

    def present(table: Any) -> Any:
        is_table = isinstance(table, dict)
        return {k: v for k, v in table.items() if v is not None} if is_table else table

    for key in SOURCES & row.keys():
        if (value := row.pop(key)) is not None:
            row[key] = list(map(present, value)) if isinstance(value, list) else value
    return row


def make_prompt(row: Any, tokenizer: Any, chat: bool, stage: int, where: str) -> Prompt:
    """Returns the prompt of a row. Raises ConfigError, with the place `where`, for a malformed
    row."""
    if not isinstance(row, dict) or len(SOURCES & row.keys()) != 1:
        keys = f"the keys {listed((key,) for key in row)}" if isinstance(row, dict) else shown(row)
        raise ConfigError(f"{where}: expected an object with either prompt or messages, got {keys}")
    columns = {k: v for k, v in row.items() if k not in SOURCES}
    if taken := sorted(columns.keys() & REWARD_ARGUMENTS):
        raise ConfigError(
            f"{where}: expected no column {taken[0]}: a reward gets an argument of this name; "
            "rename the column"
        )
    if isinstance(row.get("messages"), str):
        raise ConfigError(
            f"{where}: expected messages to be a list of {{role, content}}, got text; its key is "
            "prompt"
        )
    source: Any = row.get("prompt", row.get("messages"))
    if chat and isinstance(source, str):
        source = [{"role": "user", "content": source}]
    what, codec = "prompt" if isinstance(source, str) else "chat", TextCodec(tokenizer)
    with library_errors(f"{where}: expected a {what} of what JSON has, that the tokenizer takes"):
        json.dumps(source)  # for completions.jsonl; datasets may have dates and bytes
        if isinstance(source, str):
            ids = codec.encode(source)
        else:
            ids = codec.encode_chat(source, {"add_generation_prompt": True})
    if not ids:
        raise ConfigError(f"{where}: the prompt has no tokens")
    return Prompt(source, tuple(ids), columns, stage)


def columns_of(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """Returns the columns of all prompts, with None for a prompt without the column."""
    names = sorted({name for p in prompts for name in p.columns})
    return {name: [p.columns.get(name) for p in prompts] for name in names}


def completion_text(
    tokenizer: Any, prompt_ids: Sequence[int], token_ids: Sequence[int], ended: bool
) -> str:
    """Returns the text of a completion. ended: leave out the last token, which ended it."""
    detokenizer = Detokenizer(TextCodec(tokenizer), prompt_ids, skip_special_tokens=False)
    for token in token_ids[: len(token_ids) - ended]:
        detokenizer.push(token)
    return detokenizer.text
