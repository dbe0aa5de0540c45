"""Mistakes in the TOML and the options of `rollmesh grpo`. Used by tests/support/grpo_fuzz.py, as
are those in the prompts and the reward (grpo_prompt_mistakes.py) and in folders
(grpo_folder_mistakes.py).

Each function makes mistakes, or harmless changes, in a trial's folder. From an independent reading
of the folder it returns whether the run must be refused and, if not, what the run must have done.
"""

from __future__ import annotations

import json
import math
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
