"""Prompts: JSONL or a dataset of Hugging Face in, token ids out; the held-out split; which prompts
a step takes.

A row is an object with `prompt` (text) or `messages` (a chat, rendered by the tokenizer's
template), and any further columns: they reach the reward function as keyword arguments. The
held-out set is files of its own, or a share of the training prompts chosen by a hash of their text,
so that it does not depend on the seed, the order or the number of lines. No prompt is in both.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rollmesh as rm
from rollmesh.request.text import rendered_chat
from rollmesh.run.config import Config
from rollmesh.run.files import told_as
from rollmesh.run.hf_datasets import is_dataset, rows_of
from rollmesh.run.seeds import rng_of
from rollmesh.runtime.messages import listed, plain, shown

REWARD_ARGUMENTS = {"prompts", "completions", "completion_ids"}
_log = logging.getLogger("rollmesh.grpo")


@dataclass(frozen=True)
class Prompt:
    source: str | list[dict[str, str]]  # as the reward function sees it: the text, or the chat
    ids: tuple[int, ...]  # as the model sees it
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
            found.update(
                json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__).encode()
                + b"\n"
            )
        return found.hexdigest()

    def draw(
        self, run_seed: int, step: int, count: int, drawn: Sequence[Prompt] = ()
    ) -> list[Prompt]:
        """The training prompts of a step: `count` without repetition (with, where there are fewer),
        open stages only. `drawn`: of the step so far; then others, fewer where no more are left."""
        stage = sum(step >= s for s in self.stage_steps)
        pool = [p for p in self.train if p.stage <= stage] if self.stage_steps else self.train
        if drawn:
            known = set(map(id, drawn))
            left = [p for p in pool if id(p) not in known]
            return rng_of(run_seed, step, f"prompts\0{len(drawn)}").sample(
                left, min(count, len(left))
            )
        rng = rng_of(run_seed, step, "prompts")
        if count <= len(pool):
            return rng.sample(pool, count)
        return rng.choices(pool, k=count)


def load_tokenizer(path: Path) -> Any:
    """A transformers tokenizer from a folder, or from a bare tokenizer.json. Remote code is never
    run. ConfigError: it cannot be read."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if path.is_dir():
        # Without either, transformers makes an empty tokenizer.
        if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            raise rm.ConfigError(
                f"[tokenizer] path: expected a tokenizer.json or tokenizer_config.json in {path}, "
                "got neither"
            )
        with told_as(f"{path}: expected the files of a tokenizer"):
            return AutoTokenizer.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False
            )
    if path.is_file():
        with told_as(f"{path}: expected a tokenizer.json"):
            return PreTrainedTokenizerFast(tokenizer_file=str(path))  # type: ignore[no-untyped-call]
    raise rm.ConfigError(
        f"[tokenizer] path: {plain(path)} is neither a folder nor a tokenizer.json"
    )


def load_dataset(config: Config, tokenizer: Any) -> Dataset:
    table = config.data
    if not table.train:
        raise rm.ConfigError("[data] train: expected at least one file of prompts")
    if not any(is_dataset(name, config.path(name)) for name in (*table.train, *table.heldout)):
        for field in dataclasses.fields(table):
            if (
                field.name.startswith("dataset_")
                and (value := getattr(table, field.name)) != field.default
            ):
                raise rm.ConfigError(
                    f"[data] {field.name}: expected a dataset in train or heldout, got "
                    f"{shown(value)} and JSONL alone"
                )
    stages = range(len(table.train)) if table.stage_steps else [0] * len(table.train)
    train = [
        p
        for name, stage in zip(table.train, stages, strict=True)
        for p in _read(config, name, tokenizer, table.dataset_train_split, stage)
    ]
    if table.heldout:
        heldout = [
            p
            for name in table.heldout
            for p in _read(config, name, tokenizer, table.dataset_test_split)
        ]
    else:
        heldout = [p for p in train if _in_share(p, table.heldout_share)]
        train = [p for p in train if not _in_share(p, table.heldout_share)]
    limit = config.generator.max_model_len - config.rollout.max_tokens
    if table.overlong != "raise":
        train, heldout = (
            _fitted(train, limit, table.overlong),
            _fitted(heldout, limit, table.overlong),
        )
    held_ids = {p.ids for p in heldout}
    if (table.heldout or table.overlong == "truncate") and (
        both := sum(p.ids in held_ids for p in train)
    ):
        raise rm.ConfigError(f"[data] heldout: {both} of its prompts are training prompts too")
    if not train or not heldout:
        raise rm.ConfigError(
            f"[data]: expected prompts on both sides, got {len(train)} to train on and "
            f"{len(heldout)} held out"
        )
    if table.stage_steps and all(p.stage for p in train):
        raise rm.ConfigError(
            f"[data] train: expected prompts in {table.train[0]}, the first stage, got none"
        )
    longest = max(len(p.ids) for p in (*train, *heldout))
    if longest > limit:
        raise rm.ConfigError(
            f"[generator] max_model_len: a prompt of {longest} tokens and "
            f"max_tokens={config.rollout.max_tokens} "
            f"do not fit into {config.generator.max_model_len}; [data] overlong can drop or "
            "truncate such prompts"
        )
    return Dataset(tuple(train), tuple(heldout), table.stage_steps)


def _fitted(prompts: list[Prompt], limit: int, overlong: str) -> list[Prompt]:
    """Prompts of at most `limit` tokens: of longer ones the last tokens, or none."""
    fit = [
        p if len(p.ids) <= limit else dataclasses.replace(p, ids=p.ids[-limit:]) for p in prompts
    ]
    count = sum(a is not b for a, b in zip(fit, prompts, strict=True))
    if count:
        done = "dropped" if overlong == "drop" else "truncated to their last tokens"
        _log.warning(
            "%d of %d prompts have more than %d tokens and were %s ([data] overlong)",
            count,
            len(prompts),
            limit,
            done,
        )
    return [a for a, b in zip(fit, prompts, strict=True) if a is b or overlong == "truncate"]


def _read(config: Config, name: str, tokenizer: Any, split: str, stage: int = 0) -> list[Prompt]:
    """An entry of [data] train or heldout."""
    table, path = config.data, config.path(name)
    if not is_dataset(name, path):
        return read_jsonl(path, tokenizer, table.chat, stage)
    rows = enumerate(rows_of(name, path, table.dataset_config, split))
    return [make_prompt(row, tokenizer, table.chat, stage, f"{name}: row {i}") for i, row in rows]


def read_jsonl(path: Path, tokenizer: Any, chat: bool = False, stage: int = 0) -> list[Prompt]:
    """Raises rm.ConfigError with file and line where an object is malformed."""
    if path.is_fifo() or path.is_char_device():
        raise rm.ConfigError(
            f"{plain(path)}: expected a file, got a pipe or a device, which --resume could not "
            "read again"
        )
    return [make_prompt(row, tokenizer, chat, stage, where) for where, row in json_lines(path)]


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """The values of a JSONL file, each after its place, "file:line". Skips blank lines. Raises
    rm.ConfigError."""
    try:
        lines = (
            path.read_bytes().decode().split("\n")
        )  # not splitlines(): JSON strings may hold U+2028
    except OSError as e:
        raise rm.ConfigError(f"{plain(path)}: {e.strerror}") from e
    except ValueError as e:  # no UTF-8, a NUL in the path
        raise rm.ConfigError(f"{plain(path)}: {plain(e)}") from e
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{plain(path)}:{number}"
        try:
            yield where, json.loads(line)
        except (
            ValueError,
            RecursionError,
        ) as e:  # no JSON, a number of too many digits, nested too deeply
            raise rm.ConfigError(f"{where}: expected a JSON object, got none: {plain(e)}") from e


def make_prompt(row: Any, tokenizer: Any, chat: bool, stage: int, where: str) -> Prompt:
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        keys = f"the keys {listed((key,) for key in row)}" if isinstance(row, dict) else shown(row)
        raise rm.ConfigError(
            f"{where}: expected an object with either prompt or messages, got {keys}"
        )
    columns = {k: v for k, v in row.items() if k not in ("prompt", "messages")}
    if taken := sorted(columns.keys() & REWARD_ARGUMENTS):
        raise rm.ConfigError(
            f"{where}: expected no column {taken[0]}: a reward gets an argument of this name; "
            "rename the column"
        )
    source: Any = row.get("prompt", row.get("messages"))
    if isinstance(source, str) and "messages" in row:
        raise rm.ConfigError(
            f"{where}: expected messages to be a list of {{role, content}}, got text; its key is "
            "prompt"
        )
    if isinstance(source, str) and chat:
        source = [{"role": "user", "content": source}]
    if isinstance(source, str):
        with told_as(f"{where}: expected a prompt that the tokenizer takes"):  # no lone surrogates
            ids = tokenizer.encode(source)
    elif is_chat(source):
        if tokenizer.chat_template is None:
            raise rm.ConfigError(f"{where}: a chat, but the tokenizer has no chat template")
        with told_as(
            f"{where}: expected messages of what JSON has"
        ):  # of a dataset also dates and bytes; completions.jsonl has none
            json.dumps(source)
        with told_as(f"{where}: expected a chat that the tokenizer's chat template takes"):
            text = rendered_chat(tokenizer, source, add_generation_prompt=True)
            ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        raise rm.ConfigError(
            f"{where}: expected prompt to be text, or messages a list of {{role, content}}, both "
            f"text, got {source!r:.80}"
        )
    if not ids:
        raise rm.ConfigError(f"{where}: the prompt has no tokens")
    return Prompt(source, tuple(ids), columns, stage)


def columns_of(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """The prompts' columns, transposed; a prompt without one has None there."""
    names = sorted({name for p in prompts for name in p.columns})
    return {name: [p.columns.get(name) for p in prompts] for name in names}


def eos_ids(tokenizer: Any, model_config: Any) -> list[int]:
    """What ends a completion: the tokenizer's eos and those of the model's config."""
    found: Iterable[Any] = (tokenizer.eos_token_id, getattr(model_config, "eos_token_id", None))
    return sorted(
        {i for item in found for i in (item if isinstance(item, list) else [item]) if i is not None}
    )


def is_chat(source: Any) -> bool:
    """Whether these are messages, at least one."""
    return (
        isinstance(source, list)
        and bool(source)
        and all(
            isinstance(m, dict)
            and isinstance(m.get("role"), str)
            and isinstance(m.get("content"), str)
            for m in source
        )
    )


def _in_share(p: Prompt, share: float) -> bool:
    text = json.dumps(p.source, sort_keys=True, ensure_ascii=False).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") < share * 2.0**64
