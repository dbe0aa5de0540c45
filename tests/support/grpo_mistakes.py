"""Mistakes in the inputs of `rollmesh grpo`: the TOML or an option, the prompts, the reward. Used
by tests/support/grpo_fuzz.py.

Each function makes mistakes, or harmless changes, in a trial's folder. From an independent reading
of the folder it returns whether the run must be refused and, if not, what the run must have done.
"""

from __future__ import annotations

import json
import math
import os
import random
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Table = dict[str, Any]

REWARD = """
import json
def judge(prompts, completions, completion_ids, **columns):
    with open({seen!r}, "a", encoding="utf-8", errors="surrogatepass") as file:
        for i, p in enumerate(prompts):
            row = {{k: v[i] for k, v in columns.items() if v[i] is not None}}
            file.write(json.dumps([p, row], sort_keys=True) + "\\n")
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [len(set(t)) % 3 / 2 for t in texts]
"""
TOML: Table = {
    "seed": 3,
    "model": {
        "architecture": "qwen3", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32,
        "initializer_range": 0.1, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "attention_bias": False,
    },
    "tokenizer": {"path": "tok"},
    "data": {"train": ["train.jsonl"], "heldout": ["heldout.jsonl"], "heldout_share": 0.05,
    "chat": False, "overlong": "raise"},
    "reward": {"functions": ["reward_of_fuzz:judge"], "weights": [1.0], "shuffle": False},
    "rollout": {"prompts": 2, "samples": 2, "max_tokens": 3, "temperature": 1.0,
    "log_completions": 99, "async_level": 0, "top_p": 1.0},
    "generator": {
        "dtype": "float32", "device": "cpu", "threads": 1, "max_model_len": 32, "max_num_seqs": 8,
        "kv_cache_gib": 0.001, "tp": 1, "dp": 1,
        "ep": 1, "ep_backend": "alltoall", "sequence_parallel": False, "exchange": "host",
        "comm": "auto", "comm_timeout": 60.0,
        "engine": "rollmesh",
    },
    "sync": {"cast": False, "self_test": 0.0, "inflight": "wait"},
    "loss": {
        "clip_low": 0.2, "clip_high": 0.2, "entropy": 0.01, "kl": 0.0, "aggregation": "token-mean",
        "baseline": "mean", "scale": "group",
    },
    "correction": {"importance_sampling": "none", "cap": 2.0, "routing_replay": False},
    "train": {
        "steps": 2, "updates": 1, "minibatches": False, "micro_batch": 0, "lr": 1e-3,
        "schedule": "constant", "warmup_steps": 0,
        "betas": [0.9, 0.999], "weight_decay": 0.0, "grad_clip": 1.0, "dtype": "float32",
        "device": "cpu", "threads": 1,
        "mismatch": "raise",
    },
    "eval": {"every": 1, "prompts": 2, "temperature": 0.0},
    "checkpoint": {"every": 1, "keep": 2},
}  # fmt: skip
# A large number is valid for these keys, but takes a long time or much memory.
LONG = {
    "steps",
    "prompts",
    "samples",
    "updates",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "head_dim",
    "threads",
}
LONG |= {
    "num_attention_heads",
    "max_position_embeddings",
    "max_model_len",
    "max_num_seqs",
    "kv_cache_gib",
    "tp",
    "dp",
    "ep",
}
# Keys that a refusal may name instead of the one that was touched.
AKIN = {
    "hidden_size": "head_dim num_attention_heads", "num_attention_heads": "num_key_value_heads",
    "num_key_value_heads": "num_attention_heads",
    "max_tokens": "max_model_len", "max_model_len": "max_position_embeddings "
                                                    "max_tokens",
                                                    "max_position_embeddings": "max_model_len",
    "dtype": "cast", "kv_cache_gib": "KV", "tp": "mesh", "dp": "mesh", "ep": "mesh",
    "prompts": "updates",
    "train": "heldout directory File", "heldout": "train directory File",
    "path": "tokenizer", "initializer_range": "gradient non-finite NaN inf", "comm": "WORLD_SIZE "
                                                                                     "RANK",
    "rms_norm_eps": "gradient "
                    "non-finite", "entropy": "gradient", "lr": "gradient",
                    "temperature": "gradient", "engine": "vllm",
    "weights": "reward", "self_test": "self-test",
}  # fmt: skip


class Failure(AssertionError):
    """A run for which the oracle does not hold."""


class Raw(str):
    """A TOML value in literal form."""


@dataclass
class Case:
    """A run to try. verdict: refused, accepted, same (as an undisturbed run) or either."""

    what: str
    verdict: str = "either"
    names: tuple[str, ...] = ()  # one of them is in a refusal
    options: list[str] = field(default_factory=list)
    whole: bool = False  # the options are the whole command
    resumes: bool = False
    # a refusal leaves the run folder's logs as they were: the resumed steps have not begun
    keeps: bool = True
    apart_from: str = ""  # a file in which a run that is the same may differ
    check: Callable[[Path], None] = lambda trial: None  # of a run that succeeded


# ------------------------------------------------------------------------------------------- TOML
def as_toml(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {as_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**4000:
        return "1" + "0" * 5000
    return (
        json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        if isinstance(value, str)
        else json.dumps(value)
    )


def write_toml(table: Table, file: Path) -> None:
    """Writes plain values first, then a table each."""
    lines = [f"{json.dumps(k)} = {as_toml(v)}" for k, v in table.items() if not isinstance(v, dict)]
    for name, values in table.items():
        if isinstance(values, dict):
            lines += [
                "",
                f"[{json.dumps(name)}]",
                *(f"{json.dumps(k)} = {as_toml(v)}" for k, v in values.items()),
            ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogatepass")


# --------------------------------------------------------------------------------------- mistakes
TEXTS = [
    "",
    "x",
    "x" * 100_000,
    "é",
    "a\nb",
    "../..",
    "cuda:99999999999999999999",
    "auto",
    "1",
    "true",
    "\u202e",
]
WORDS = [  # right of some key
    "linear", "cosine", "leave-one-out", "batch", "none", "sequence-mean", "constant",
    "token_truncate", "sequence_truncate", "token_mask",
    "record", "truncate", "drop", "bfloat16", "float32", "keep", "restart", "wait", "threads",
    "shm", "torch", "nccl", "vllm", "cpu",
    "cuda", "allgather_reducescatter", "llama", "gpt9", "model", "tok", "mean",
]  # fmt: skip
NUMBERS = [
    0,
    1,
    2,
    3,
    -1,
    7,
    0.5,
    1.0,
    1.5,
    -0.0,
    1e308,
    1e-320,
    -1e9,
    math.nan,
    math.inf,
    -math.inf,
    2**31,
    2**63 - 1,
    2**63,
    -(2**63),
]
NUMBERS += [2**64, 10**30, 10**400]
OTHERS: list[Any] = [True, False, [], [1], ["x"], [[1]], [True, "a"], {}, {"a": 1}]


def junk(r: random.Random) -> Any:
    kind = r.random()
    return r.choice(NUMBERS) if kind < 0.45 else r.choice(TEXTS) if kind < 0.7 else r.choice(OTHERS)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_mistake(there: Any, value: Any) -> bool:
    """Returns whether a value is invalid for this key, for which `there` is valid."""
    if isinstance(value, Raw):
        return True
    if isinstance(there, bool) or isinstance(value, bool):
        return type(there) is not type(value)
    if is_number(there) and is_number(value):
        return (
            not (math.isfinite(value) if isinstance(value, float) else abs(value) < 10**300)
            or (isinstance(there, int) and isinstance(value, float))
            or (isinstance(value, int) and not -(2**63) <= value < 2**63)
        )
    if isinstance(there, list) and isinstance(value, list):
        return any(is_mistake(there[0], item) for item in value)
    return type(there) is not type(value)


def takes_long(key: str, value: Any) -> bool:
    """Returns whether the run with this value would be valid, but too large."""
    return key in LONG and is_number(value) and 4 < value < (2**63 if key == "steps" else 2**40)


def toml_value(r: random.Random, trial: Path) -> Case:
    """Sets one or two keys to another value, in the file or by --set."""
    table: Table = json.loads(json.dumps(TOML))
    wanted: Table = json.loads(json.dumps(TOML))
    options, names, wrong = [], [], False
    for name, key in r.sample(
        [(n, key) for n in TOML if n != "seed" for key in TOML[n]], r.choice([1, 1, 1, 2])
    ):
        there = TOML[name][key]
        value = junk(r)
        if r.random() < 0.5 and isinstance(there, str):
            value = r.choice(WORDS)
        elif r.random() < 0.5 and is_number(there):
            value = r.choice([there + 1, there * 2, there / 2, -there, 0, 1, 2, 0.25])
        elif isinstance(there, list) and r.random() < 0.6:
            value = r.choice([[], there * 2, [*there, junk(r)], [junk(r)], there[:1]])
        if takes_long(key, value) or (
            key == "functions" and isinstance(value, list) and len(value) > 1
        ):
            value = 1
        if isinstance(value, float) and not math.isfinite(value) and r.random() < 0.5:
            value = Raw(
                r.choice(["1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "{a = {b = {}}}"])
            )
        wrong |= is_mistake(there, value)
        names += [key, *AKIN.get(key, "").split()]
        if r.random() < 0.3 and not isinstance(value, Raw):
            options += ["--set", f"{name}.{key}={as_toml(value)}"]
        else:
            table[name][key] = value
        wanted[name][key] = value
    write_toml(table, trial / "run.toml")

    def check(where: Path) -> None:
        for name, keys in kept_config(where).items():
            for key, value in keys.items() if isinstance(keys, dict) else [(name, keys)]:
                given = wanted[name].get(key, value) if isinstance(keys, dict) else wanted[name]
                # An integer is rounded to a float.
                if value != (
                    float(given) if isinstance(value, float) and is_number(given) else given
                ):
                    raise Failure(
                        f"[{name}] {key}: {given!r:.200} was given, {value!r:.200} is kept"
                    )

    return Case(
        f"{options} {names}", "refused" if wrong else "either", tuple(names), options, check=check
    )


def toml_key(r: random.Random, trial: Path) -> Case:
    """Adds an unknown key or table."""
    table: Table = json.loads(json.dumps(TOML))
    key = r.choice(
        [
            "unheard_of",
            "",
            "Steps",
            "step",
            "lr ",
            "x" * 1000,
            "é",
            "a.b",
            "\u202e",
            "\x07",
            "steps\n",
        ]
    )
    where = r.choice([None, *(n for n in TOML if n != "seed")])
    options = []
    how = r.random()
    if how < 0.2:
        options = [
            "--set",
            f"{where}.{r.choice(['nope', 'a.b.c', '', 'steps '])}=1"
            if where
            else f"{r.choice(['=', '', 'x', '.', '..=1'])}",
        ]
        key = "--set" if where is None else where
    elif where is None:
        table[key] = r.choice([1, {}, {"a": 1}, []])
        key = key or "no such"
    elif how < 0.3:
        table[where] = junk(r)
        if isinstance(table[where], dict) and not table[where]:
            table[where] = 1
        key = where
    else:
        table[where][key] = junk(r)
    write_toml(table, trial / "run.toml")
    if any(o.endswith("steps =1") for o in options):  # a blank around a key is none of it
        return Case(str(options), "either", ("steps",), options)
    return Case(
        f"{where}: {key!r:.50} {options}",
        "refused",
        (key[:50], json.dumps(key)[1:30], repr(key)[1:30], "no such"),
        options,
    )


def damaged(r: random.Random, text: bytearray, some: list[bytes]) -> None:
    for _ in range(r.choice([1, 1, 2, 3])):
        position = r.randrange(len(text) + 1)
        text[position : position + r.choice([0, 1, 1, 5, 10_000])] = r.choice(some)


def toml_bytes(r: random.Random, trial: Path) -> Case:
    text = bytearray((trial / "run.toml").read_bytes())
    damaged(
        r,
        text,
        [
            b"",
            b"\xff",
            b"\x00",
            b"=",
            b"[",
            b"]" * 9,
            b"[" * 5000,
            b'"',
            b'"\\ud800"',
            b"\n",
            b"#",
            b"9" * 5000,
            b"\xef\xbb\xbf",
            b"\r",
        ],
    )
    (trial / "run.toml").write_bytes(bytes(text))
    try:
        table = tomllib.loads(text.decode())
    except (ValueError, RecursionError):
        return Case("not TOML", "refused", ("run.toml",))
    changed = {n for n in TOML if table.get(n) != TOML[n]} | (table.keys() - TOML.keys())
    if not changed:
        return Case("the same TOML", "same")
    touched = {
        k
        for n in changed
        for k in [
            n,
            *(table[n] if isinstance(table.get(n), dict) else ()),
            *(TOML[n] if isinstance(TOML.get(n), dict) else ()),
        ]
    }
    for name in changed & TOML.keys():  # a number with a digit more may be hours of work
        of = table.get(name)
        if isinstance(of, dict) and any(
            takes_long(k, v)
            for k, v in of.items()
            if v != TOML[name].get(k)
            if isinstance(TOML[name], dict)
        ):
            write_toml(TOML, trial / "run.toml")
            return Case("the same TOML", "same")

    def check(where: Path) -> None:
        for name in table:
            for key, value in (
                table[name].items() if isinstance(table[name], dict) else [(name, table[name])]
            ):
                kept = kept_config(where)[name]
                if (kept[key] if isinstance(table[name], dict) else kept) != value:
                    raise Failure(
                        f"[{name}] {key}: {value!r:.200} was given, {kept!r:.200} is kept"
                    )

    return Case(
        f"other TOML: {changed}",
        "either",
        tuple(n for k in touched for n in [k, *AKIN.get(k, "").split()]),
        check=check,
    )


def kept_config(trial: Path) -> Table:
    state: Table = json.loads((newest(trial / "out") / "trainer/state.json").read_text())["config"]
    return state


def newest(out: Path) -> Path:
    return max(file.parents[1] for file in out.glob("checkpoints/step_*/trainer/state.json"))


COMMANDS: list[tuple[list[str], str, str]] = [  # options, verdict, what a refusal names
    (["nowhere.toml"], "refused", "nowhere.toml"),
    (["folder-is-no.toml"], "refused", "folder-is-no.toml"),
    (["train.jsonl"], "refused", "train.jsonl"),
    (["run.toml", "--out", "train.jsonl"], "refused", "train.jsonl"),
    (["run.toml", "--out", "train.jsonl/x"], "refused", "train.jsonl"),
    (["run.toml", "--out", "run-left"], "refused", "run-left"),
    (["run.toml", "--out", "x" * 300], "refused", "xxx"),
    (["run.toml", "--resume", "nowhere"], "refused", "nowhere"),
    (["run.toml", "--resume", "train.jsonl"], "refused", "train.jsonl"),
    (["run.toml", "--resume", "tok"], "refused", "tok"),
    (["run.toml", "--resume", "ahead-left"], "refused", "async_level"),
    (["ahead.toml", "--resume", "run-left", "--out", "out"], "refused", "async_level"),
    (["run.toml", "--out", ""], "refused", "--out"),
    (["run.toml", "--resume", "run-left", "--set", "train.steps=0"], "refused", "steps"),
    (["run.toml", "--seed", "x"], "refused", "--seed"),
    (["run.toml", "--seed", "-1", "--out", "out"], "refused", "seed"),
    (["run.toml", "--seed", str(2**63), "--out", "out"], "refused", "seed"),
    (["run.toml", "--tp", "0", "--out", "out"], "refused", "tp"),
    (["run.toml", "--tp", "3", "--out", "out"], "refused", "tp"),
    (["run.toml", "--dp", "1.5"], "refused", "--dp"),
    (["run.toml", "--device", "gpu", "--out", "out"], "refused", "device"),
    (["run.toml", "--device", "cuda", "--out", "out"], "refused", "device"),
    (["run.toml", "--generator", "x"], "refused", "--generator"),
    (["run.toml", "--unheard"], "refused", "--unheard"),
    (["run.toml", "more.toml"], "refused", "more.toml"),
    (["run.toml", "--set"], "refused", "--set"),
    (["run.toml", "--ep-backend", "\udcff", "--out", "out"], "refused", "ep_backend"),
    (["\udcff.toml"], "refused", "toml"),
    (["run.toml", "--out", "out"], "same", ""),
    (["run.toml", "--set", "\udcff=1", "--out", "out"], "refused", "udcff"),
    (["run.toml", "--resume", "out-left"], "refused", "out-left"),
    (["run.toml", "--set", "train.dtype=\udcff", "--out", "out"], "refused", "dtype"),
    (["run.toml", "--resume", "\udcff"], "refused", "udcff"),
    (["run.toml", "--resume", "run-left", "--out", "out"], "either", ""),
    (["run.toml", "--resume", "run-left/checkpoints/step_000001", "--out", "out"], "either", ""),
    (["run.toml", "--seed", "3", "--tp", "1", "--dtype-of-nothing", "x"], "refused",
    "--dtype-of-nothing"),
    (["run.toml", "--out", "out", "--wandb", ""], "either", ""),
    (["run.toml", "--tp", "1", "--dp", "1", "--ep", "1", "--device", "cpu", "--seed", "3", "--out",
    "out"], "same", ""),
]  # fmt: skip


def command(r: random.Random, trial: Path) -> Case:
    """Other options, or invalid paths."""
    options, verdict, name = r.choice(COMMANDS)
    (trial / "folder-is-no.toml").mkdir()
    return Case(str(options), verdict, (name,), options, whole=True)


# ---------------------------------------------------------------------------------------- prompts
LIMIT = TOML["generator"]["max_model_len"] - TOML["rollout"]["max_tokens"]  # tokens of a prompt
RESERVED = ("prompts", "completions", "completion_ids")
CELLS: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    10**30,
    "",
    "x",
    "é\u2028",
    "\ud800",
    [],
    [1, [2]],
    {},
    {"a": {"b": [None]}},
    "x" * 10_000,
    math.nan,
]
CHATS: list[Any] = [
    [{"role": "user", "content": "ab"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}, {"role": "user",
    "content": "b"}],
    [], [{}], [{"role": "user"}], [{"role": 1, "content": "a"}],
    [{"role": "user", "content": None}], [[]], "text", {"role": "user",
    "content": "a"},
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    [{"role": "user", "content": "a", "name": "n"}], [{"role": "user",
    "content": "\ud800"}],
]  # fmt: skip


def verdict_of_row(line: bytes) -> tuple[str, Any]:
    """Judges a line by the rules of docs/grpo.md: (refused | accepted | either, [prompt,
    columns])."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        return "refused", None
    if (
        not isinstance(row, dict)
        or ("prompt" in row) == ("messages" in row)
        or set(row) & set(RESERVED)
    ):
        return "refused", None
    source = row.get("prompt", row.get("messages"))
    columns = {k: v for k, v in row.items() if k not in ("prompt", "messages") and v is not None}
    told = [source, columns]
    if isinstance(source, str) and "prompt" in row:
        if not source or has_surrogate(source):
            return "refused", None
        if "<|" in source:  # a token of several characters, or several of one
            return "either", told
        return ("refused", None) if len(source) > LIMIT else ("accepted", told)
    if not isinstance(source, list) or not source or not all(isinstance(m, dict) for m in source):
        return "refused", None
    if not all(
        isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in source
    ):
        return "refused", None
    if has_surrogate(json.dumps(source, ensure_ascii=False)):
        return "either", told
    return (
        "accepted"
        if sum(len(m["content"]) + len(m["role"]) + 20 for m in source) < LIMIT
        else "either"
    ), told


def has_surrogate(text: str) -> bool:
    return any(0xD800 <= ord(c) < 0xE000 for c in text)


def prompts(r: random.Random, trial: Path) -> Case:
    """Changes the training or the held-out prompts: a value in a row, bytes of the file, or the
    file itself."""
    name = r.choice(["train.jsonl", "heldout.jsonl"])
    file = trial / name
    how = r.random()
    if how < 0.1:
        return prompts_file(r, file)
    lines = file.read_bytes().splitlines()
    if how < 0.6:
        i = r.randrange(len(lines))
        row = json.loads(lines[i])
        for _ in range(r.choice([1, 1, 2])):
            key = r.choice(
                [
                    "prompt",
                    "prompt",
                    "messages",
                    "messages",
                    "answer",
                    "new",
                    *RESERVED,
                    "",
                    "self",
                    "x" * 1000,
                    "é",
                ]
            )
            row[key] = (
                r.choice(CHATS)
                if key == "messages"
                else r.choice([*CELLS, "ab=", "a" * LIMIT, "a" * (LIMIT + 1)])
            )
            if (key == "messages" and r.random() < 0.8) or (key == "new" and r.random() < 0.2):
                row.pop("prompt", None)
        lines[i] = json.dumps(row).encode()
        content = bytearray(b"\n".join(lines))
    else:
        content = bytearray(r.choice([b"\n", b"\r\n", b"\n\n \n"]).join(lines))
        some = [
            b"",
            b"\xff",
            b"\x00",
            b"{",
            b"}",
            b"\n",
            b"[" * 100_000,
            b"9" * 5000,
            b'"',
            b"null\n",
            b"[]\n",
            b'{"prompt": "zz="}\n',
            b"\xef\xbb\xbf",
            b"NaN",
        ]
        damaged(r, content, some)
    file.write_bytes(bytes(content))
    verdicts, told = [], []
    sources: dict[str, set[str]] = {"train.jsonl": set(), "heldout.jsonl": set()}
    for each in sources:
        rows = [line for line in (trial / each).read_bytes().split(b"\n") if line.strip()]
        for line in rows:
            verdict, row = verdict_of_row(line)
            verdicts.append(verdict)
            if row is not None:
                told.append(json.dumps(row, sort_keys=True))
                sources[each].add(json.dumps(row[0]))
        if not rows:
            verdicts.append("refused")
        try:
            (trial / each).read_bytes().decode()
        except ValueError:
            verdicts.append("refused")
    if sources["train.jsonl"] & sources["heldout.jsonl"]:
        verdicts.append("refused")
    verdict = next((v for v in ("refused", "either") if v in verdicts), "accepted")

    def check(where: Path) -> None:
        seen = set(
            (where / "seen.jsonl").read_text(encoding="utf-8", errors="surrogatepass").splitlines()
        )
        if other := seen - set(told):
            raise Failure(f"the reward got {other.pop()[:500]}")

    return Case(f"{name}: {verdict}", verdict, (name, "[data]", "max_model_len"), check=check)


def prompts_file(r: random.Random, file: Path) -> Case:
    how = r.choice(["missing", "folder", "fifo", "zero", "null", "link", "loop"])
    file.rename(aside := file.with_name("aside"))
    if how == "folder":
        file.mkdir()
    elif how == "fifo":
        os.mkfifo(file)
    elif how == "loop":
        file.symlink_to(file)
    elif how != "missing":
        file.symlink_to({"zero": "/dev/zero", "null": "/dev/null", "link": aside}[how])
    return Case(
        f"{file.name}: {how}", "same" if how == "link" else "refused", (file.name, "[data]")
    )


# ---------------------------------------------------------------------------------------- rewards
NOTHING = math.nan  # not judged: null in completions.jsonl
VALUES: list[tuple[str, float | None]] = [  # what a completion gets, and what counts; None: refused
    ("1", 1.0), ("0.5", 0.5), ("True", 1.0), ("None", NOTHING), ("-1e18", -1e18), ("1e18", 1e18),
    ("__import__('numpy').float32(0.5)", 0.5),
    ("__import__('torch').tensor(0.25)", 0.25), ("__import__('numpy').int8(3)", 3.0),
    ("__import__('fractions').Fraction(1, 2)", 0.5),
    ("__import__('decimal').Decimal('0.5')", 0.5), ("float('nan')", None), ("float('inf')", None),
    ("10**400", None), ("10**5000", None),
    ("-1.1e18", None), ("'1'", None), ("b'1'", None), ("bytearray(b'1')", None), ("[1]", None),
    ("1j", None), ("object()", None), ("{}",
    None),
    ("__import__('numpy').ones(2)", None), ("__import__('torch').ones(2)", None), ("Odd()", None),
    ("OddExit()", None), ("OddStop()",
    None), ("judge", None),
]  # fmt: skip
SHAPES: list[tuple[str, bool]] = [  # of the values v, one a completion; whether they are taken
    ("v", True), ("tuple(v)", True), ("iter(v)", True), ("(x for x "
                                                         "in v)", True),
                                                         ("dict(enumerate(v)).values()", True),
    ("__import__('numpy').array(v)", True), ("__import__('torch').tensor(v)", True),
    ("__import__('collections').deque(v)", True),
    ("__import__('torch').tensor(v, "
     "requires_grad=True)", True), ("v[:-1]", False), ("v + v[:1]", False), ("[]", False),
     ("v[0]", False),
    ("None", False),
    ("[v]", False), ("__import__('numpy').array([v])", False),
    ("__import__('torch').tensor([v]).T", True), ("dict(enumerate(v))", False),
    ("'1' * len(v)", False), ("b'1' * len(v)", False), ("bytearray(len(v))", False),
    ("set(range(len(v)))", False),
    ("frozenset(range(len(v)))", False),
    ("__import__('itertools').repeat(1.0)", False), ("(1 / 0 for x "
                                                     "in v)", False), ("object()", False),
                                                     ("judge", False), ("stops(v)",
    False), ("exits(v)", False),
]  # fmt: skip
RAISED = [
    "ValueError('no')", "KeyError('k')", "SystemExit", "SystemExit(0)", "SystemExit(3)",
    "GeneratorExit", "StopIteration",
    "RecursionError", "MemoryError",
    "OSError(28, 'No space')", "BrokenPipeError", "TimeoutError", "Unprintable()",
    "UnicodeDecodeError('utf-8', b'x', 0, 1, 'y')",
    "Own('x')", "AssertionError",
    "__import__('asyncio').CancelledError()", "ExceptionGroup('g', [ValueError('a'), "
                                              "ExceptionGroup('h', [KeyError('b')])])",
    "ValueError('x' * 10**6)",
    "ValueError('\\ud800\\x1b[31m\\x00')", "ImportError('x')", "SyntaxError('x')", "Warning('x')",
    "deep(10**6)", "rm.ConfigError('x')",
    "rm.StateError",
    "__import__('subprocess').CalledProcessError(1, 'x')", "BaseExceptionGroup('g', "
                                                           "[GeneratorExit()])", "NameError",
                                                           "Chained()",
]  # fmt: skip
HARMLESS = [
    "prompts.clear(); completions.clear(); completion_ids.clear()", "[i.clear() for i in "
                                                                    "completion_ids]",
    "[x.clear() for x in columns.values()]",
    "print('x' * 1000, flush=True)", "__import__('random').seed(0); "
                                     "__import__('numpy').random.seed(0)",
    "__import__('os').environ.pop('HOME', "
    "None)", "__import__('gc').disable()", "__import__('sys').setrecursionlimit(10000)",
    "__import__('os').chdir('/')",
    "__import__('sys').path.clear()", "__import__('warnings').warn('x')",
    "__import__('logging').getLogger().setLevel(0)",
    "__import__('os').umask(0)",
    "__import__('threading').Thread(target=print).start()",
    "__import__('torch').set_grad_enabled(False)",
    "__import__('numpy').seterr(all='raise')", "__import__('decimal').getcontext().prec = 1",
]  # fmt: skip
ODD = """
import rollmesh as rm
class Odd:
    def __float__(self): raise ValueError('no')
    def __repr__(self): raise ValueError('no')
class OddExit:
    def __float__(self): raise SystemExit(0)
class OddStop:
    def __float__(self): raise GeneratorExit
class Own(BaseException): pass
class Unprintable(Exception):
    def __str__(self): raise SystemExit(0)
    __repr__ = __str__
def Chained():
    a, b = ValueError('a'), ValueError('b')
    a.__cause__, b.__cause__ = b, a
    return a
def deep(n): return deep(n - 1)
def stops(v):
    yield v[0]
    raise GeneratorExit
def exits(v):
    yield v[0]
    raise SystemExit(0)
"""


def rewards(r: random.Random, trial: Path) -> Case:
    """Changes what a reward returns or raises, or what it does to its arguments and to the process;
    or makes a module that cannot be imported."""
    how, file = r.random(), trial / "reward_of_fuzz.py"
    good = file.read_text()
    head = (
        ODD
        + good.replace("def judge(", "def plain(")
        + "def judge(prompts, completions, completion_ids, **columns):\n"
    )
    own = "    v = plain(prompts, completions, completion_ids, **columns)\n"
    names = ("reward", "[reward]")
    if how < 0.3:
        expression, worth = r.choice(VALUES)
        file.write_text(f"{head}    return [{expression} for _ in completions]\n")

        def check(where: Path) -> None:
            found = {row["reward"] for row in completions(where)}
            if found != {None if worth is NOTHING else worth}:
                raise Failure(f"{expression} counts {found}")

        return Case(expression, "refused" if worth is None else "accepted", names, check=check)
    if how < 0.55:
        expression, taken = r.choice(SHAPES)
        file.write_text(f"{head}{own}    return {expression}\n")
        return Case(expression, "same" if taken else "refused", names)
    if how < 0.75:
        raised = r.choice(RAISED)
        file.write_text(f"{head}{own}    raise {raised}\n")
        return Case(raised, "refused", names)
    if how < 0.9:
        done = r.choice(HARMLESS)
        file.write_text(f"{head}{own}    {done}\n    return v\n")
        return Case(done, "same")
    broken = r.choice(
        [
            "raise SystemExit(0)\n",
            "raise GeneratorExit\n",
            "import nowhere\n",
            "def judge(:\n",
            "judge = 1\n",
            "async def judge(**x): pass\n",
            "\x00",
        ]
    )
    if r.random() < 0.3:
        text = bytearray(good.encode())
        damaged(r, text, [b"\xff", b"\x00", b"(", b"\n"])
        file.write_bytes(bytes(text))
        return Case("the file of the reward is damaged", "either", names)
    file.write_text(broken)
    return Case(broken, "refused", names)


def completions(trial: Path) -> list[Table]:
    return [
        json.loads(line)
        for line in (trial / "out/completions.jsonl").read_text(encoding="utf-8").splitlines()
    ]
