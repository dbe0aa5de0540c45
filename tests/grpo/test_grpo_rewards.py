"""Inputs and side effects of a reward of `rollmesh grpo`, and the values that prompts may hold:
copies, each prompt's original form, late imports, rows that JSON readers or tokenizers refuse."""

from __future__ import annotations

import math
import os
import re
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import ROOT
from rollouts import lists, rollout_of

import rollmesh as rm
from rollmesh.grpo import rewards, rollout
from rollmesh.run import data, samples
from rollmesh.run.signals import Interrupts

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return data.load_tokenizer(ROOT / "data/chars")


def reward(
    tmp_path: Path, code: str, name: str, *more: str, weights: tuple[float, ...] = ()
) -> rewards.Rewards:
    (tmp_path / f"{name}.py").write_text(code)
    return rewards.Rewards([f"{name}:f", *more], weights, tmp_path)


def means_of(scores: samples.Scores) -> dict[str, float]:
    return {
        name.removeprefix("reward/"): value
        for name, value in scores.metrics().items()
        if name.startswith("reward/")
    }


def rolled_out(tokenizer: Any, *rows: dict[str, Any]) -> samples.Rollout:
    prompts = [data.make_prompt(row, tokenizer, False, 0, "here") for row in rows]
    logprobs = [np.zeros(1, np.float32) for _ in rows]
    return rollout_of(
        prompts,
        [[1 + i, 2] for i in range(len(rows))],
        logprobs,
        ["AB"] * len(rows),
        [True] * len(rows),
    )


def test_a_reward_may_change_what_it_is_given(tokenizer: Any, tmp_path: Path) -> None:
    """The change affects neither the batch nor the next function."""
    code = (
        "def f(prompts, completions, completion_ids, answer, tags):\n"
        "    assert prompts == ['ab', 'cd'] and completions == ['AB', 'AB'] and completion_ids == "
        "[[1, 2], [2, 2]]\n"
        "    assert answer == ['AB', 'CD'] and tags == [['x'], ['y']]\n"
        "    for columns in (prompts, completions, completion_ids, answer, tags):\n        "
        "columns.reverse()\n"
        "    for items in (*completion_ids, *tags):\n        items.clear()\n"
        "    return [1.0, 0.0]\n"
    )
    rows = [{"prompt": p, "answer": p.upper(), "tags": [t]} for p, t in (("ab", "x"), ("cd", "y"))]
    this = rolled_out(tokenizer, *rows)
    several = reward(
        tmp_path,
        code,
        "changes_of_test",
        "changes_of_test:f",
        "char_match",
        weights=(1.0, 2.0, 1.0),
    )
    scores = rollout.score(this, several)
    assert scores.total == [4.0, 0.0]
    assert means_of(scores) == {"changes_of_test:f": 0.5, "char_match": 0.5}
    assert lists(this).token_ids == [[1, 2], [2, 2]]
    assert [p.columns for p in lists(this).prompt] == [
        {k: v for k, v in row.items() if k != "prompt"} for row in rows
    ]


def test_each_completion_has_the_form_of_its_prompt(tokenizer: Any, tmp_path: Path) -> None:
    code = "def f(completions, **_):\n    return [float(isinstance(c, str)) for c in completions]\n"
    chat = {"messages": [{"role": "user", "content": "ab"}]}
    for rows, forms in (
        ([{"prompt": "ab"}, chat], [1.0, 0.0]),
        ([chat, {"prompt": "ab"}], [0.0, 1.0]),
    ):
        assert (
            rollout.score(
                rolled_out(tokenizer, *rows), reward(tmp_path, code, "forms_of_test")
            ).total
            == forms
        )


def test_a_mean_is_over_the_completions_that_were_judged(tmp_path: Path) -> None:
    code = "def f(**_):\n    return [None, 1.0, 2.0]\ndef g(**_):\n    return [None] * 3\n"
    judged = reward(tmp_path, code, "none_of_test", "none_of_test:g")
    scores = judged.judge(["p"] * 3, ["c"] * 3, [[1]] * 3, {})
    assert np.array_equal(scores.total, [math.nan, 1.0, 2.0], equal_nan=True)
    assert (scores.mean(), scores.std(), means_of(scores)) == (1.5, 0.5, {"none_of_test:f": 1.5})
    nothing = scores.take([0])
    assert (nothing.mean(), nothing.std(), means_of(nothing)) == (None, None, {})


def test_a_sum_is_over_the_functions_that_judged(tmp_path: Path) -> None:
    """A score of None adds nothing if another function judges, even one of weight 0: TRL's
    nansum."""
    code = "def f(**_):\n    return [None, None, 1.0, 2.0]\n"
    code += "def g(**_):\n    return [None, -1.0, 1.0, None]\n"
    for weights, total in (
        ((0.5, 3.0), [math.nan, -3.0, 3.5, 1.0]),
        ((0.0, 1.0), [math.nan, -1.0, 1.0, 0.0]),
    ):
        both = reward(tmp_path, code, "sums_of_test", "sums_of_test:g", weights=weights)
        assert np.array_equal(
            both.judge(["p"] * 4, ["c"] * 4, [[1]] * 4, {}).total, total, equal_nan=True
        )


def test_infinite_sums_that_cancel_are_not_taken_for_unjudged(tmp_path: Path) -> None:
    code = "def f(**_):\n    return [1e18]\ndef g(**_):\n    return [-1e18]\n"
    both = reward(tmp_path, code, "cancel_of_test", "cancel_of_test:g", weights=(1e300, 1e300))
    with pytest.raises(
        rm.ConfigError,
        match=r"^\[reward\] weights: expected sums of at most 1e\+18, got nan for completion 0$",
    ):
        both.judge(["p"], ["c"], [[1]], {})


def test_each_reward_has_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured with a clock that only the rewards advance."""
    code = (
        "now = [0.0]\n"
        "def f(**_):\n    now[0] += 0.25\n    return [0.0]\n"
        "def g(**_):\n    now[0] += 0.5\n    yield 1.0\n"
    )
    monkeypatch.setattr(
        "time.perf_counter",
        lambda: sys.modules["timed_of_test"].now[0] if "timed_of_test" in sys.modules else 0.0,
    )
    scores = reward(tmp_path, code, "timed_of_test", "timed_of_test:g", "exact_match").judge(
        ["p"], ["c"], [[1]], {"answer": ["c"]}
    )
    seconds = [
        scores.metrics()[f"reward_s/{name}"]
        for name in ("timed_of_test:f", "timed_of_test:g", "exact_match")
    ]
    # A generator's time is spent while it is read. The times before it are not counted.
    assert seconds == [0.25, 0.5, 0.0]
    assert scores.seconds == sum(seconds)


def test_a_weight_makes_no_reward_infinite(tmp_path: Path) -> None:
    large = reward(
        tmp_path, "def f(**_):\n    return [0.0, 1e18]\n", "weighted_of_test", weights=(1e300,)
    )
    with pytest.raises(
        rm.ConfigError,
        match=r"^\[reward\] weights: expected sums of at most 1e\+18, got inf for completion 1$",
    ):
        large.judge(["p"] * 2, ["c"] * 2, [[1]] * 2, {})


@pytest.mark.parametrize(
    "code, message",
    [
        ("import sys\ndef f(**_):\n    sys.exit(0)\n", "raised SystemExit: 0"),
        (
            "class E(Exception):\n    def __str__(self): raise OSError\ndef f(**_):\n    raise E\n",
            "raised E: a E that cannot be printed",
        ),
        (
            "class V:\n    def __float__(self): raise OSError\ndef f(**_):\n    return [V()] * 2\n",
            ": completion 0 got <",
        ),
        (
            "def f(**_):\n    while True: yield 1.0\n",
            ": expected 2 values, one a completion, got 3",
        ),
        (
            "import asyncio\ndef f(**_):\n    raise asyncio.CancelledError('x')\n",
            "raised CancelledError: x",
        ),
        ("class E(BaseException): pass\ndef f(**_):\n    yield 1\n    raise E\n", "raised E\n"),
        (
            "class E(Exception):\n    def __str__(self): raise SystemExit(0)\ndef f(**_):\n    "
            "raise E\n",
            "raised E: a E that cannot be printed",
        ),
        (
            "class V:\n    def __float__(self): raise SystemExit(0)\ndef f(**_):\n    return "
            "[V()] * 2\n",
            ": completion 0 got <",
        ),
    ],
)
def test_a_reward_that_misbehaves_is_named(code: str, message: str, tmp_path: Path) -> None:
    name = f"misbehaves_{abs(hash(code))}_of_test"
    with pytest.raises(rm.ConfigError, match=rf"^reward {name}:f ?{message}"):
        reward(tmp_path, code, name).judge(["p"] * 2, ["c"] * 2, [[1]] * 2, {})


def test_a_traceback_of_a_megabyte_is_cut(tmp_path: Path) -> None:
    """Keeps its beginning, which has the places, and its end."""
    with pytest.raises(rm.ConfigError) as caught:
        reward(
            tmp_path, "def f(**_):\n    raise ValueError('x' * 10**6 + 'end')\n", "megabyte_of_test"
        ).judge(["p"], ["c"], [[1]], {})
    [note] = caught.value.__notes__
    assert len(note) < 10_000
    assert re.search(r"line 2, in f\n.*\nValueError: x+\n…\nx+end$", note)


def test_a_reward_may_import_late_and_spawn(tmp_path: Path) -> None:
    """Otherwise a spawned process that cannot import the reward's module would exit and be started
    again, forever."""
    (tmp_path / "beside_a_reward_of_test.py").write_text("value = 0.25\n")
    code = (
        "import multiprocessing\ndef one(text):\n    return 0.5\ndef f(completions, **_):\n    "
        "import beside_a_reward_of_test as beside\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        return [beside.value + x for x in pool.map_async(one, completions).get(20)]\n"
    )
    assert reward(tmp_path, code, "spawns_of_test").judge(["p"], ["c"], [[1]], {}).total == [0.75]


@pytest.mark.parametrize(
    "returned, message",
    [
        ("['good'] * 2", "completion 0 got 'good'; expected a finite number, or None"),
        ("['1.5'] * 2", "completion 0 got '1.5'; expected a finite number, or None"),
        ("[1.0, float('nan')]", "completion 1 got nan; expected a finite number, or None"),
        ("[1.0, float('-inf')]", "completion 1 got -inf; expected a finite number, or None"),
        ("[[1.0]] * 2", r"completion 0 got \[1.0\]; expected a finite number, or None"),
        ("[1j] * 2", "completion 0 got 1j; expected a finite number, or None"),
        ("[10**400] * 2", "completion 0 got 10+.*; expected a finite number, or None"),
        ("[1e300] * 2", r"completion 0 got 1e\+300; expected a finite number, or None"),
        ("[1.0]", "expected 2 values, one a completion, got 1"),
        ("[1.0] * 3", "expected 2 values, one a completion, got 3"),
        ("'11'", "expected 2 values, one a completion, got a str"),
        ("b'11'", "expected 2 values, one a completion, got a bytes"),
        ("{1, 2}", "expected 2 values, one a completion, got a set"),
        ("[b'1'] * 2", "completion 0 got b'1'; expected a finite number, or None"),
        ("{0: 1.0, 1: 1.0}", "expected 2 values, one a completion, got a dict"),
        ("None", "expected 2 values, one a completion, got a NoneType"),
        ("1.0", "expected 2 values, one a completion, got a float"),
        ("[next(iter(()))]", "StopIteration"),
        ("(i / 0 for i in range(2))", "ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_no_reward_is_named(returned: str, message: str, tmp_path: Path) -> None:
    module = f"returns_{abs(hash(returned))}_of_test"
    (tmp_path / f"{module}.py").write_text(f"def f(**columns):\n    return {returned}\n")
    reward = rewards.Rewards([f"{module}:f"], (), tmp_path)
    with pytest.raises(rm.ConfigError, match=rf"^reward {module}:f(:| raised) {message}(\n|$)"):
        reward.judge(["p"] * 2, ["c"] * 2, [[1]] * 2, {})


@pytest.mark.parametrize(
    "returned",
    [
        "(1.0, 2)",
        "(float(i + 1) for i in range(2))",
        "numpy.float32([1, 2])",
        "torch.tensor([1, 2])",
    ],
)
def test_what_holds_numbers_is_a_reward(returned: str, tmp_path: Path) -> None:
    module = f"returns_{abs(hash(returned))}_of_test"
    (tmp_path / f"{module}.py").write_text(
        f"import numpy, torch\ndef f(**columns):\n    return {returned}\n"
    )
    assert rewards.Rewards([f"{module}:f"], (), tmp_path).judge(
        ["p"] * 2, ["c"] * 2, [[1]] * 2, {}
    ).total == [
        1.0,
        2.0,
    ]


@pytest.mark.parametrize(
    "code, message, line",
    [
        ("def f(:\n", "importing .* raised SyntaxError: invalid syntax", 1),
        ("x = 1\nraise RuntimeError('no GPU')\n", "importing .* raised RuntimeError: no GPU", 2),
        ("raise GeneratorExit\n", "importing .* raised GeneratorExit\n", 1),
    ],
)
def test_a_module_that_is_no_reward_is_named(
    code: str, message: str, line: int | None, tmp_path: Path
) -> None:
    """The traceback ends in the module."""
    module = f"imports_{abs(hash(code))}_of_test"
    (tmp_path / f"{module}.py").write_text(code)
    with pytest.raises(rm.ConfigError, match=rf"^\[reward\] functions: {message}") as caught:
        rewards.resolve(f"{module}:f", tmp_path)
    notes = "\n".join(getattr(caught.value, "__notes__", ()))
    places = re.findall(r'File "(.*)", line (\d+)', notes)
    assert places[-1:] == ([] if line is None else [(str(tmp_path / f"{module}.py"), str(line))])
    assert not any("importlib" in file for file, _ in places)


# ---------------------------------------------------------------------------------- async rewards
def judged(functions: rewards.Rewards, count: int = 2) -> samples.Scores:
    with closing(functions):
        return functions.judge(["p"] * count, ["c"] * count, [[1]] * count, {})


def test_async_rewards_are_awaited_together(tmp_path: Path) -> None:
    """The async functions wait for each other. A function that is not async runs first, without a
    running event loop. Each function gets copies."""
    code = (
        "import asyncio, functools\nplain = []\nmet = asyncio.Barrier(3)\n"
        "async def f(completions, by=1.0, **_):\n"
        "    assert plain and completions == ['c', 'c']\n    completions.clear()\n"
        "    async with asyncio.timeout(1.0):\n        await met.wait()\n    return [by, None]\n"
        "class Judge:\n    async def __call__(self, **given):\n        return await f(**given, "
        "by=2.0)\n"
        "g, h = Judge(), functools.partial(f, by=4.0)\n"
        "def last(completions, **_):\n    return plain.extend(completions) or "
        "asyncio.run(asyncio.sleep(0.01, [8.0, 8.0]))\n"
    )
    name = "together_of_test"
    scores = judged(
        reward(
            tmp_path,
            code,
            name,
            f"{name}:g",
            f"{name}:h",
            f"{name}:last",
            weights=(1.0, 1.0, 1.0, 0.5),
        )
    )
    assert scores.total == [11.0, 4.0]
    assert means_of(scores) == {
        f"{name}:{key}": value for key, value in (("f", 1.0), ("g", 2.0), ("h", 4.0), ("last", 8.0))
    }
    assert scores.metrics()[f"reward_s/{name}:last"] >= 0.01


def test_the_event_loop_lasts(tmp_path: Path) -> None:
    """Objects that an async reward keeps between two steps, such as a client or a task, belong to
    one loop, which `close` ends."""
    code = (
        "import asyncio\nkept = []\nended = []\n"
        "async def one():\n    try:\n        await asyncio.sleep(99)\n    finally:\n        "
        "ended.append(1)\n"
        "async def f(completions, **_):\n"
        "    if not kept:\n        kept.append(asyncio.create_task(one()))\n        await "
        "asyncio.sleep(0)\n"
        "    assert kept[0].get_loop() is asyncio.get_running_loop() and not kept[0].done()\n    "
        "return [1.0] * len(completions)\n"
    )
    several = reward(tmp_path, code, "lasts_of_test")
    for _ in range(2):
        assert several.judge(["p"], ["c"], [[1]], {}).total == [1.0]
    module = sys.modules["lasts_of_test"]
    assert module.ended == []
    several.close()
    assert module.ended == [1]


@pytest.mark.parametrize(
    "body, message",
    [
        ("raise KeyError('oops')", " raised KeyError: 'oops'"),
        ("sys.exit(0)", " raised SystemExit: 0"),
        (
            "async with asyncio.timeout(0.01):\n        await asyncio.sleep(9)",
            " raised TimeoutError",
        ),
        (
            "x = asyncio.create_task(met.wait())\n    x.cancel()\n    await x",
            " raised RuntimeError: what it awaited was cancelled",
        ),
        ("return [1.0]", ": expected 2 values, one a completion, got 1"),
        ("return 1.0", ": expected 2 values, one a completion, got a float"),
        ("return [1.0, 'x']", ": completion 1 got 'x'; expected a finite number, or None"),
        ("yield [1.0]", ": expected 2 values, one a completion, got a async_generator"),
    ],
)
def test_an_async_reward_that_misbehaves_is_named(body: str, message: str, tmp_path: Path) -> None:
    """The other rewards are cancelled. The traceback has the reward's own code."""
    name = f"misbehaves_{abs(hash(body))}_of_test"
    code = f"import asyncio, sys\nended, met = [], asyncio.Event()\nasync def f(**_):\n    {body}\n"
    code += (
        "async def g(**_):\n    try:\n        return await asyncio.sleep(0.2, [0.0, 0.0])\n   "
        " finally:\n        ended.append(1)\n"
    )
    several = reward(tmp_path, code, name, f"{name}:g")
    with pytest.raises(rm.ConfigError, match=rf"^reward {name}:f{re.escape(message)}") as caught:
        judged(several)
    if " raised " in message:
        assert f'File "{tmp_path}/{name}.py", line ' in caught.value.__notes__[0]
        assert "rewards.py" not in caught.value.__notes__[0]
        assert sys.modules[name].ended == [1]


@pytest.mark.usefixtures("plain_signals")
@pytest.mark.parametrize("loop_handles_it", [False, True])
def test_an_interrupt_ends_async_rewards(loop_handles_it: bool, tmp_path: Path) -> None:
    """The rewards are cancelled, at the latest when the run is closed."""
    code = (
        "import asyncio, os, signal\nended = []\nasync def f(**_):\n"
        "    asyncio.get_running_loop().call_later(0.02, os.kill, os.getpid(), signal.SIGINT)\n"
        "    try:\n        await asyncio.sleep(9)\n    finally:\n        ended.append(1)\n"
    )
    name = f"interrupted_{loop_handles_it}_of_test"
    several = reward(tmp_path, code, name)
    with (
        pytest.raises(KeyboardInterrupt) as caught,
        Interrupts() if loop_handles_it else nullcontext(),
    ):
        judged(several)
    assert caught.value.__notes__ == [f"reward {name}:f ran"]
    assert sys.modules[name].ended == [1]


def test_completions_that_no_function_judges_are_said_once(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    judge = reward(
        tmp_path,
        "def f(prompts, completions, **_):\n    return [None] * (len(completions) - 1) + [1.0]\n",
        "silent_of_test",
    )
    this = rolled_out(tokenizer, *({"prompt": p} for p in "abc"))
    for _ in range(2):
        assert np.array_equal(
            rollout.score(this, judge).total, [math.nan, math.nan, 1.0], equal_nan=True
        )
    told = "2 of 3 completions got None from every reward function; their advantage is 0, "
    told += "and they do not count in the means"
    assert [r.getMessage() for r in caplog.records] == [told]


@pytest.mark.parametrize("name", ["char_match", "exact_match", "contains"])
@pytest.mark.parametrize(
    "rows",
    [[{"prompt": "a"}], [{"prompt": "a", "answer": "A"}, {"prompt": "b"}]],
    ids=["no column", "one row"],
)
def test_a_built_in_reward_names_the_column_that_it_reads(
    name: str, rows: list[dict[str, Any]], tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(
        rm.ConfigError,
        match=f"^reward {name} raised TypeError: expected text in the column answer of each "
        "prompt, got N",
    ):
        rollout.score(rolled_out(tokenizer, *rows), rewards.Rewards([name], (), tmp_path))


# ---------------------------------------------------------------------------------------- prompts
@pytest.mark.parametrize(
    "line, message",
    [
        (
            '{"prompt": "a", "completions": null}',
            r"expected no column completions: a reward gets an argument of this name; rename the "
            r"column$",
        ),
        (
            '{"messages": "ab"}',
            r"expected messages to be a list of {role, content}, got text; its key is prompt$",
        ),
        (
            '{"messages": [{"role": "user", "content": []}]}',
            r"expected a chat .* the content of a message of role user to be text, got \[\]$",
        ),
        (
            '{"question": "a", "answer": "b"}',
            r"expected an object with either prompt or messages, got the keys question, answer$",
        ),
        ('{"prompt": "a\\ud800"}', r"expected a prompt .* that the tokenizer takes, got "),
        (
            '{"messages": [{"role": "user", "content": "\\ud800"}]}',
            r"expected a chat .* that the tokenizer takes, got ",
        ),
        (
            '{"prompt": "a", "x": ' + "9" * 5000 + "}",
            r"expected a JSON object, got none: Exceeds the limit \(4300 digits\)",
        ),
        (
            '{"prompt": "a", "x": ' + "[" * 100_000 + "}",
            r"expected a JSON object, got none: maximum recursion depth exceeded",
        ),
    ],
    ids=[
        "an argument's name",
        "text as messages",
        "parts",
        "other names",
        "surrogate",
        "surrogate in a chat",
        "digits",
        "depth",
    ],
)
def test_a_row_that_cannot_be_read_is_named(
    line: str, message: str, tokenizer: Any, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(rm.ConfigError, match=rf"rows\.jsonl:2: {message}"):
        data.read_jsonl(file, tokenizer)


def test_paths_that_are_no_files_are_named(tokenizer: Any, tmp_path: Path) -> None:
    """Reading a FIFO without a writer would block forever, and /dev/zero has no end."""
    os.mkfifo(tmp_path / "fifo")
    for path, message in (
        (tmp_path / "fifo", "expected a file, got a pipe"),
        (Path("/dev/zero"), "got a pipe or a device"),
        (Path("a\0b"), r"a\\x00b: embedded null byte"),
    ):
        with pytest.raises(rm.ConfigError, match=message):
            data.read_jsonl(path, tokenizer)
