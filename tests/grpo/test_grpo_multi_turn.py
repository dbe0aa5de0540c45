"""[rollout] environment: completions of several turns, whose replies are part of the sequence but
not of the loss.

The model ends a turn with any of 40 of its 101 tokens, so that a random completion has several
turns. Oracle of the records: with rollmesh's kernels the trainer computes the whole sequence at
once and must reproduce each recorded logprob and expert, turn by turn."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import TIMES
from marks import full
from paths import ROOT
from rollouts import lists, rollout_of

import rollmesh as rm

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rollmesh.grpo import loop, rewards  # noqa: E402
from rollmesh.grpo.environment import converse  # noqa: E402
from rollmesh.run import config, data, metrics  # noqa: E402
from rollmesh.run.config import RolloutTable  # noqa: E402
from rollmesh.run.data import Prompt  # noqa: E402
from rollmesh.run.environment import Environment  # noqa: E402
from rollmesh.run.samples import Rollout, make_batch  # noqa: E402
from rollmesh.run.user_code import EventLoop  # noqa: E402

CHARS = ROOT / "data/chars"
CONFIGS = {"moe": ROOT / "configs/qwen3_moe_debug.toml", "dense": ROOT / "configs/qwen3_debug.toml"}
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' if m.role != 'tool' else '<|user|>#' "
    "}}{{ m.content }}<|eos|>!{% endfor %}"
)
TEMPLATE += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
CHAT = [{"role": "user", "content": "ab"}]
pytestmark = pytest.mark.usefixtures("torch_as_it_was", "no_pictures")

ENVIRONMENT = """
def text(prompt, completion, answer):
    return None if len(completion) > 9 else f"[{answer[:2]}{len(completion) % 7}]"
def chat(prompt, completion, answer):
    replies = [{"role": "user", "content": f"{answer[:1]}{len(completion)}"}, {"role": "tool",
        "content": "x"}]
    return None if len(completion) > 4 else replies[0] if len(completion) % 4 == 1 else replies
def lengths(prompts, completions, **_):
    return [float(len(str(c)) % 11) for c in completions]
"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    loaded = data.load_tokenizer(CHARS)
    loaded.chat_template = TEMPLATE
    return loaded


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> Any:
    """Returns, for a config's name, the folder of a random model with many end tokens."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "turns_of_test.py").write_text(ENVIRONMENT)

    def made(name: str) -> Path:
        kind = config.load(CONFIGS[name]).model.architecture
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        }
        experts = (
            {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
            if name == "moe"
            else {}
        )
        torch.manual_seed(0)
        hf = transformers.AutoConfig.for_model(
            kind, **sizes, **experts, head_dim=16, vocab_size=len(tokenizer),
            eos_token_id=[1, *range(40, 79)], pad_token_id=None,
            max_position_embeddings=64, initializer_range=0.1, tie_word_embeddings=False,
        )  # fmt: skip
        transformers.AutoModelForCausalLM.from_config(hf).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(str(tmp_path / name))
        return tmp_path / name

    return made


def ran(
    folder: Path,
    name: str,
    out: Path,
    environment: str | None,
    *changes: str,
    resume: Path | None = None,
) -> list[dict[str, Any]]:
    sets = [
        f'model={{path="{folder}"}}', f'tokenizer.path="{folder}"', "train.steps=2",
        "rollout.prompts=4", "rollout.samples=4",
        "rollout.max_tokens=40", "eval.prompts=4", "eval.every=2", "generator.kv_cache_gib=0.01",
        "train.threads=1", "generator.threads=1",
        "checkpoint.every=1", "checkpoint.keep=9", "rollout.log_completions=99",
        'reward.functions=["turns_of_test:lengths"]', *changes,
    ]  # fmt: skip
    sets += [] if environment is None else [f'rollout.environment="turns_of_test:{environment}"']
    run = loop.prepare(config.load(CONFIGS[name], sets), resume)
    try:
        lines = loop.train(run, out)
    finally:
        run.close()
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


# ------------------------------------------------------------------------------------------- runs
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "name, environment, changes",
    [
        pytest.param(
            "dense",
            "text",
            ["train.micro_batch=3", "train.minibatches=true", "train.updates=2", "loss.kl=0.1"],
            id="text",
        ),
        pytest.param(
            "moe",
            "chat",
            ["data.chat=true", "rollout.top_k=90", "rollout.filter_groups=true"],
            id="chat, filters",
        ),
        full(
            "moe",
            "text",
            ['generator.dtype="bfloat16"', "sync.cast=true", "train.gradient_checkpointing=true"],
        ),
        full("dense", "chat", ["data.chat=true", "generator.tp=2", "generator.max_num_seqs=3"]),
    ],
)
def test_the_trainer_finds_every_record(
    name: str, environment: str, changes: list[str], model: Any, tmp_path: Path
) -> None:
    """A resumed run is bit-identical too."""
    folder, out, again = model(name), tmp_path / "out", tmp_path / "again"
    lines = ran(folder, name, out, environment, *changes)
    assert {line["tokens_differ"] for line in lines} == {0.0}
    assert all(line["turns_mean"] > 1.2 for line in lines)
    (again / "checkpoints").mkdir(parents=True)
    shutil.move(out / "checkpoints/step_000001", again / "checkpoints/step_000001")
    shutil.copy(out / "metrics.jsonl", again)
    assert ran(folder, name, again, environment, *changes, resume=again) == lines
    last = "checkpoints/step_000002/model.safetensors"
    assert (again / last).read_bytes() == (out / last).read_bytes()
    rows = [json.loads(row) for row in (out / "completions.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * 16
    if environment == "chat":
        turns = [[m["role"] for m in row["completion"]] for row in rows]
        assert ["assistant", "user", "assistant", "user", "tool", "assistant"] in turns
        assert all(t[-1] == "assistant" for t in turns)
    else:
        assert any("[" in row["completion"] and "]" in row["completion"] for row in rows)


def test_recorded_routing_is_replayed_over_all_turns(model: Any, tmp_path: Path) -> None:
    """With transformers' forward pass, on a bfloat16 generator: the routed experts of the last turn
    equal those of the whole sequence."""
    sets = [
        'generator.dtype="bfloat16"',
        "sync.cast=true",
        "sync.self_test=0.0",
        'train.kernels="torch"',
    ]
    sets += [
        "correction.routing_replay=true",
        'correction.importance_sampling="sequence_truncate"',
        "train.micro_batch=5",
    ]
    lines = ran(model("moe"), "moe", tmp_path / "out", "text", *sets)
    assert all(line["turns_mean"] > 1.2 for line in lines)
    assert all(0 < line["logprob_diff_max"] < 0.5 for line in lines)


def test_an_environment_that_says_nothing_changes_nothing(model: Any, tmp_path: Path) -> None:
    folder = model("dense")
    (tmp_path / "turns_of_test_silent.py").write_text("async def f(**_):\n    return None\n")
    plain = ran(folder, "dense", tmp_path / "a", None)
    lines = ran(
        folder, "dense", tmp_path / "b", None, 'rollout.environment="turns_of_test_silent:f"'
    )
    assert {line.pop("turns_mean") for line in lines} == {1.0}
    assert lines == plain
    assert (tmp_path / "a/completions.jsonl").read_bytes() == (
        tmp_path / "b/completions.jsonl"
    ).read_bytes()
    assert "environment_s" in metrics.read(tmp_path / "b/metrics.jsonl")[0]


# ------------------------------------------------------------------------------------ one rollout
@pytest.fixture
def environment_of(tmp_path: Path) -> Iterator[Callable[[str, str], Environment]]:
    """Makes an environment from its code and a name for its module."""
    event_loop = EventLoop()

    def made(code: str, name: str) -> Environment:
        (tmp_path / f"{name}.py").write_text(code)
        return Environment(f"{name}:f", tmp_path, event_loop)

    yield made
    event_loop.close()


def first_turns(prompts: Sequence[Prompt], ids: Sequence[list[int]], tokenizer: Any) -> Rollout:
    """Returns first turns like those of `generate`; token 1 is the end."""
    ends = [turn[-1] == 1 for turn in ids]
    texts = [
        tokenizer.decode(turn[:-1] if ended else turn)
        for turn, ended in zip(ids, ends, strict=True)
    ]
    numbers = [np.arange(len(turn), dtype=np.float32) - 9 for turn in ids]
    versions = [np.full(len(turn), 3) for turn in ids]
    routed = [
        np.zeros((len(p.ids) + len(turn) - 1, 2, 2), np.int16)
        for p, turn in zip(prompts, ids, strict=True)
    ]
    return rollout_of(
        list(prompts),
        [list(turn) for turn in ids],
        numbers,
        texts,
        ends,
        routed_experts=routed,
        versions=versions,
        seconds=1.0,
    )


def test_turns_by_hand(tokenizer: Any, environment_of: Callable[[str, str], Environment]) -> None:
    """Four completions: one continues twice, one gets no reply, one does not end, and the reply to
    one does not fit."""
    code = (
        "def f(prompt, completion, long):\n    return '=' * (9 if long else 1) if "
        "len(completion) < 5 else None\n"
    )
    environment = environment_of(code, "by_hand_of_test")
    a, b, end = (tokenizer.encode(x)[0] for x in ("a", "b", "<|eos|>"))
    equals = tokenizer.encode("=")[0]
    prompts = [Prompt("p", (b, b), {"long": i == 3}) for i in range(4)]
    asked = []

    def draw(turn: int, places: list[int], given: list[Prompt], left: list[int]) -> Rollout:
        asked.append((turn, places, [p.ids for p in given], left))
        return first_turns(given, [[b, end]] if turn == 1 else [[b, b, b]], tokenizer)

    turns = [[a, a, end], [a, a, a, a, a, end], [a, a], [a, end]]
    got = converse(
        first_turns(prompts, turns, tokenizer),
        draw,
        environment,
        tokenizer,
        {end},
        RolloutTable(max_tokens=11),
    )
    assert asked == [
        (1, [0], [(b, b, a, a, end, equals)], [7]),
        (2, [0], [(b, b, a, a, end, equals, b, end, equals)], [4]),
    ]
    assert lists(got).token_ids == [[a, a, end, equals, b, end, equals, b, b, b], *turns[1:]]
    assert lists(got).text == ["aa=b=bbb", "aaaaa", "aa", "a"]
    assert (lists(got).turns, lists(got).stopped, got.num_tokens, got.seconds) == (
        [3, 1, 1, 1],
        [False, True, False, False],
        18,
        3.0,
    )
    assert [len(record) for record in lists(got).routed_experts] == [11, 7, 3, 3], (
        "all but the last token"
    )
    assert [x.tolist() for x in lists(got).drawn] == [
        [i not in (3, 6) for i in range(10)],
        *[[True] * len(t) for t in turns[1:]],
    ]
    batch = make_batch(got.completions)
    assert batch.targets_N.tolist() == [
        a,
        a,
        end,
        b,
        end,
        b,
        b,
        b,
        *[x for turn in turns[1:] for x in turn],
    ]
    assert batch.columns_N.tolist()[:8] == [1, 2, 3, 5, 6, 8, 9, 10]
    assert batch.rows_N.tolist() == [0] * 8 + [1] * 6 + [2] * 2 + [3] * 2
    assert batch.lengths_B.tolist() == [8, 6, 2, 2]
    assert batch.old_logprobs_N.tolist()[:8] == [-9.0, -8.0, -7.0, -9.0, -8.0, -9.0, -8.0, -7.0]
    assert batch.tokens_BT[batch.generated_BT].tolist() == batch.targets_N.tolist()
    assert batch.mask_BT.sum(1).tolist() == [12, 8, 4, 4]


def test_the_limit_of_turns(
    tokenizer: Any, environment_of: Callable[[str, str], Environment]
) -> None:
    environment = environment_of("def f(completion, **_):\n    return '='\n", "limit_of_test")
    prompts = [Prompt("p", (9,), {})]
    for most in (2, 4):
        got = converse(
            first_turns(prompts, [[9, 1]], tokenizer),
            lambda turn, places, given, left: first_turns(given, [[9, 1]], tokenizer),
            environment, tokenizer, {1}, RolloutTable(max_tokens=99, max_assistant_turns=most),
        )  # fmt: skip
        assert (lists(got).turns, lists(got).stopped, len(lists(got).token_ids[0])) == (
            [most],
            [True],
            3 * most - 1,
        )


def test_the_tokens_of_a_chat_are_the_template_s(
    tokenizer: Any, environment_of: Callable[[str, str], Environment]
) -> None:
    """Three turns that the policy ends by <|user|>, with a template that does not end messages
    (GLM-4's): the tokens equal those of the whole conversation rendered at once."""
    other = data.load_tokenizer(CHARS)
    other.chat_template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    )
    other.chat_template += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    code = "def f(prompt, completion):\n"
    code += "    return {'role': 'user', 'content': 'x' * len(completion)}\n"
    environment = environment_of(code, "template_of_test")
    b, user = other.encode("b")[0], other.convert_tokens_to_ids("<|user|>")
    prompt = data.make_prompt({"messages": CHAT}, other, False, 0, "here")
    turns = [[b] * (n + 1) + [user] for n in range(3)]

    def draw(turn: int, places: list[int], given: list[Prompt], left: list[int]) -> Rollout:
        drawn = first_turns(given, [turns[turn]], other)
        [c] = drawn.completions
        return Rollout([dataclasses.replace(c, text="b" * (turn + 1), stopped=True)])

    first = draw(0, [0], [prompt], [])
    got = converse(
        first, draw, environment, other, {user}, RolloutTable(max_tokens=99, max_assistant_turns=3)
    )
    chat = [*CHAT, *lists(got).text[0]]
    assert [m["content"] for m in chat] == ["ab", "b", "x", "bb", "xxx", "bbb"]
    whole = other.apply_chat_template(chat, tokenize=False)
    assert other.decode([*prompt.ids, *lists(got).token_ids[0]]) == f"{whole}<|user|>"


def test_a_reply_that_the_template_refuses_is_named(
    environment_of: Callable[[str, str], Environment],
) -> None:
    other = data.load_tokenizer(CHARS)
    other.chat_template = (
        "{% for m in messages %}{{ 1 // (m.role != 'tool') }}{{ m.content }}{% endfor %}"
    )
    environment = environment_of(
        "def f(**_):\n    return {'role': 'tool', 'content': 'x'}\n", "refused_of_test"
    )
    first = first_turns([Prompt(CHAT, (1,), {})], [[9, 1]], other)
    with pytest.raises(
        rm.ConfigError,
        match=r"^environment refused_of_test:f: expected a reply .* take, got ZeroDivisionError: ",
    ):
        converse(first, lambda *_: first, environment, other, {1}, RolloutTable(max_tokens=99))


def test_a_template_that_hides_turns_is_refused_before_the_run(model: Any) -> None:
    """Refused at the start, before the run generates. Text prompts do not need a template."""
    folder = model("dense")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    sets = [
        f'model={{path="{folder}"}}',
        f'tokenizer.path="{folder}"',
        "generator.kv_cache_gib=0.01",
    ]
    chat = config.load(
        CONFIGS["dense"], [*sets, 'rollout.environment="turns_of_test:chat"', "data.chat=true"]
    )
    with pytest.raises(
        rm.ConfigError,
        match=rf"^\[rollout\] environment: expected the chat template of {folder} to render ",
    ):
        loop.prepare(chat)
    loop.prepare(
        config.load(CONFIGS["dense"], [*sets, 'rollout.environment="turns_of_test:text"'])
    ).close()


def test_a_built_in_reward_judges_the_policy_alone() -> None:
    """A tool that outputs the answer earns no reward."""
    said = [
        [{"role": "assistant", "content": a}, {"role": "tool", "content": "AB"}]
        for a in ("x", "AB")
    ]
    assert rewards.contains(["p"] * 2, said, answer=["AB"] * 2) == [0.0, 1.0]


# ----------------------------------------------------------------------------------- the function


@pytest.mark.parametrize("prefix", ["", "async "], ids=["plain", "async"])
@pytest.mark.parametrize(
    "source, body, message",
    [
        ("ab", "return 1", r": expected a text, or None, got 1$"),
        ("ab", "return ''", r": expected a text, or None, got ''$"),
        ("ab", "return {'role': 'user', 'content': 'x'}", r": expected a text, or None, got \{"),
        (
            CHAT,
            "return 'x'",
            r": expected a message .*, a list of them, or None, got .* got 'x'$",
        ),
        (CHAT, "return []", r": expected a message .* got \[\]$"),
        (
            CHAT,
            "return {'role': 'user'}",
            r": expected a message .* of role user to be text, got None$",
        ),
        (CHAT, "return [{'role': 'user', 'content': 3}]", r": expected a message .* text, got 3$"),
        (
            CHAT,
            "return {'role': 'tool', 'content': 'x', 'data': b'x'}",
            r": expected a message .* of what JSON has, .* got TypeError: .* bytes ",
        ),
        ("ab", "raise KeyError('oops')", r" raised KeyError: 'oops'(\n|$)"),
        (CHAT, "sys.exit(3)", r" raised SystemExit: 3(\n|$)"),
    ],
)
def test_an_environment_that_misbehaves_is_named(
    source: Any,
    body: str,
    message: str,
    prefix: str,
    tmp_path: Path,
    environment_of: Callable[[str, str], Environment],
) -> None:
    """The error has the traceback of the environment's code."""
    name = f"misbehaves_{abs(hash((body, prefix)))}_of_test"
    environment = environment_of(f"import sys\n{prefix}def f(**_):\n    {body}\n", name)
    with pytest.raises(rm.ConfigError, match=f"^environment {name}:f{message}") as caught:
        environment.replies([(Prompt(source, (1,), {}), "x")] * 2)
    if " raised " in message:
        assert f'File "{tmp_path}/{name}.py", line 3, in f' in caught.value.__notes__[0]


def test_an_environment_gets_copies(environment_of: Callable[[str, str], Environment]) -> None:
    """An environment may change its copies, and the messages that it returns may change later.
    Async environments are awaited together."""
    code = (
        "import asyncio\nmet, kept = asyncio.Barrier(2), [{'role': 'user', 'content': 'x'}]\n"
        "async def f(prompt, completion, tags):\n"
        "    for items in (prompt, completion, tags):\n        items.clear()\n"
        "    async with asyncio.timeout(1.0):\n        await met.wait()\n    return kept\n"
    )
    environment = environment_of(code, "copies_of_test")
    prompts = [Prompt(CHAT, (1,), {"tags": ["t"]})] * 2
    completions = [[{"role": "assistant", "content": "c"}]] * 2
    first, second = environment.replies(list(zip(prompts, completions, strict=True)))
    assert first == second == [{"role": "user", "content": "x"}]
    assert first is not second
    assert (CHAT, prompts[0].columns, completions) == (
        [{"role": "user", "content": "ab"}], {"tags": ["t"]},
        [[{"role": "assistant", "content": "c"}]] * 2,
    )  # fmt: skip


def test_the_tool_of_the_documentation(environment_of: Callable[[str, str], Environment]) -> None:
    code = (ROOT / "docs/grpo.md").read_text().partition("# my_tools.py\n")[2].partition("```")[0]
    environment = environment_of(f"{code}\nf = adder\n", "my_tools_of_test")
    said = [[{"role": "assistant", "content": text}] for text in ("so <add>2+40</add>", "it is 42")]
    prompt = Prompt(CHAT, (1,), {"answer": "42"})
    assert environment.replies([(prompt, completion) for completion in said]) == [
        [{"role": "tool", "content": "42"}],
        None,
    ]


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            ['rollout.environment="m:f"', "rollout.async_level=1"],
            r'environment: expected none with async_level = 1, .*, got "m:f"$',
        ),
        (
            ["rollout.max_assistant_turns=3"],
            r"environment: expected one with max_assistant_turns = 3, got none$",
        ),
        (
            ['rollout.environment="m:f"', "rollout.max_assistant_turns=1"],
            r"max_assistant_turns: expected at least 2, got 1$",
        ),
    ],
)
def test_settings_that_are_refused(changes: list[str], message: str) -> None:
    with pytest.raises(rm.ConfigError, match=rf"^\[rollout\] {message}"):
        config.load(CONFIGS["dense"], changes)


def test_a_column_of_an_argument_s_name_is_refused(model: Any, tmp_path: Path) -> None:
    """Datasets with prompt and completion have such a column."""
    rows = [{"prompt": text, "answer": text, "completion": text} for text in "abcd"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = [f'data.train=["{tmp_path}/rows.jsonl"]', "data.heldout=[]", "data.heldout_share=0.5"]
    changes += ['rollout.environment="turns_of_test:text"']
    with pytest.raises(
        rm.ConfigError,
        match=r"^\[data\]: expected no column completion: an environment gets an argument of this "
        r"name",
    ):
        loop.prepare(config.load(CONFIGS["dense"], changes))


def test_an_environment_that_is_not_there_is_named(tmp_path: Path) -> None:
    for name, message in (
        ("f", 'expected module:function, got "f"'),
        ("absent_of_test:f", 'cannot import "absent_of_test"'),
    ):
        with pytest.raises(rm.ConfigError, match=rf"^\[rollout\] environment: {message}"):
            Environment(name, tmp_path, EventLoop())
