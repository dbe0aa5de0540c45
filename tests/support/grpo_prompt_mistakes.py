"""Mistakes in the prompts and the reward of `rollmesh grpo`. Used by tests/support/grpo_fuzz.py.

Each function makes mistakes, or harmless changes, in a trial's folder, as in grpo_mistakes.py.
"""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

from grpo_mistakes import TOML, Case, Failure, Table, damaged

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
