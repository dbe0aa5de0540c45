"""Prompts: the tokenizer and the files in the repository, rows of JSONL, held-out prompts and the
draws of each step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from grpo_runs import MOE, tokenizer  # noqa: F401
from paths import ROOT

import rollmesh as rm

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rollmesh.grpo import rollout  # noqa: E402
from rollmesh.run import (  # noqa: E402
    config,
    data,
)

pytestmark = pytest.mark.usefixtures("torch_as_it_was")


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_script_makes_the_files_in_the_repository(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "data"))
    try:
        import make_data
    finally:
        sys.path.remove(str(ROOT / "data"))
    make_data.main(tmp_path)
    made = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file())
    assert made == sorted(
        p.relative_to(ROOT / "data")
        for p in (ROOT / "data").rglob("*")
        if p.suffix in (".json", ".jsonl")
    )
    assert [
        p for p in made if (tmp_path / p).read_bytes() != (ROOT / "data" / p).read_bytes()
    ] == []


def test_the_tokenizer_is_one_token_a_character(tokenizer: Any) -> None:
    text = "".join(map(chr, range(32, 127))) + "\n"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) == len(set(ids))
    assert tokenizer.decode(ids) == text
    assert (
        tokenizer.decode([*ids[:3], tokenizer.eos_token_id], skip_special_tokens=True) == text[:3]
    )


def test_a_reward_sees_special_tokens_but_not_the_end(tokenizer: Any) -> None:
    """A policy that pads its answer must lose reward: only the eos that ended the completion is
    left out."""
    a, unk, eos = tokenizer.convert_tokens_to_ids(["A", "<|unk|>", tokenizer.eos_token])

    def completion(ids: list[int], finish: str, stop: int | str | None = None) -> Any:
        return SimpleNamespace(
            token_ids=np.array(ids, np.int32), finish_reason=finish, stop_reason=stop
        )

    assert rollout.text_of(tokenizer, [], completion([a, a, eos], "stop")) == "AA"
    assert rollout.text_of(tokenizer, [], completion([a, unk], "length")) == "A<|unk|>"
    assert rollout.text_of(tokenizer, [], completion([a, unk, eos], "stop")) == "A<|unk|>"
    assert rollout.text_of(tokenizer, [], completion([a, a], "stop", "A")) == "AA"
    assert rollout.text_of(tokenizer, [], completion([eos], "stop")) == ""


def test_chats_go_through_the_template(tokenizer: Any) -> None:
    row = {"messages": [{"role": "user", "content": "ab"}], "answer": "AB"}
    p = data.make_prompt(row, tokenizer, False, 0, "here")
    q = data.make_prompt({"prompt": "ab", "answer": "AB"}, tokenizer, True, 0, "here")
    assert (
        p.ids
        == q.ids
        == tuple(tokenizer.convert_tokens_to_ids(["<|user|>", "a", "b", "<|assistant|>"]))
    )
    assert p.is_chat
    assert p.columns == {"answer": "AB"}


@pytest.mark.parametrize(
    "row",
    [
        {},
        [],
        {"prompt": 3},
        {"prompt": ""},
        {"messages": []},
        {"messages": [{"role": "user"}]},
        {"prompt": "a", "messages": []},
    ],
)
def test_malformed_rows_name_file_and_line(row: Any, tokenizer: Any, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", [{"prompt": "a"}, row])
    with pytest.raises(rm.ConfigError, match=r"x.jsonl:2: "):
        data.read_jsonl(tmp_path / "x.jsonl", tokenizer)


def test_a_line_without_json_is_named(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\nb\n', encoding="utf-8")
    with pytest.raises(
        rm.ConfigError, match=r"x.jsonl:2: expected a JSON object, got none: Expecting value"
    ):
        data.read_jsonl(tmp_path / "x.jsonl", tokenizer)


def test_a_line_separator_inside_a_string_ends_no_line(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(
        '{"prompt": "a\u2028b"}\n\n{"prompt": "c"}\n', encoding="utf-8"
    )
    assert [p.source for p in data.read_jsonl(tmp_path / "x.jsonl", tokenizer)] == ["a\u2028b", "c"]


def test_the_heldout_share_depends_on_the_text_only(tokenizer: Any, tmp_path: Path) -> None:
    """The split does not depend on the order or the other rows of the file: a prompt stays on its
    side, and prompts are not on both."""
    rows = [{"prompt": f"p{i}", "answer": "x"} for i in range(400)]
    sets = []
    for name, part in (("a", rows), ("b", rows[::-1][:300])):
        file = write_jsonl(tmp_path / f"{name}.jsonl", part)
        c = config.load(MOE, [f'data={{train=["{file}"], heldout_share=0.2}}'])
        found = data.load_dataset(c, tokenizer)
        sets.append(({p.source for p in found.train}, {p.source for p in found.heldout}))
    (train_a, held_a), (train_b, held_b) = sets
    assert not train_a & held_a
    assert held_b == {p for p in held_a if p in held_b | train_b}
    assert 40 <= len(held_a) <= 120


def test_a_heldout_prompt_that_is_trained_on_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "ab"}, {"prompt": "cd"}])
    with pytest.raises(
        rm.ConfigError, match=r"\[data\] heldout: 2 of its prompts are training prompts too"
    ):
        data.load_dataset(
            config.load(MOE, [f'data={{train=["{file}"], heldout=["{file}"]}}']), tokenizer
        )


def test_draws_depend_on_seed_and_step_and_open_stages(tokenizer: Any, tmp_path: Path) -> None:
    files = [
        write_jsonl(tmp_path / f"{i}.jsonl", [{"prompt": f"{i}{j}"} for j in range(50)])
        for i in range(2)
    ]
    held = write_jsonl(tmp_path / "held.jsonl", [{"prompt": "held"}])
    found = data.load_dataset(
        config.load(MOE, [f"data={{train={files}, heldout=['{held}'], stage_steps=[3]}}"]),
        tokenizer,
    )
    drawn = found.draw(0, 0, 20)
    assert drawn == found.draw(0, 0, 20)
    assert drawn != found.draw(0, 1, 20)
    assert drawn != found.draw(1, 0, 20)
    assert len({p.ids for p in drawn}) == 20
    assert {p.source[0] for p in found.draw(0, 2, 50)} == {"0"}
    assert {p.source[0] for p in found.draw(0, 3, 100)} == {"0", "1"}
    assert len(found.draw(0, 0, 80)) == 80


@pytest.mark.parametrize("name", ["upper_heldout", "upper_train", "sort_heldout"])
def test_no_constant_completion_is_worth_more_than_030(name: str) -> None:
    """Computes exactly the best completion that ignores the prompt: at each length the best
    character of each position."""
    rows = [json.loads(line) for line in (ROOT / f"data/{name}.jsonl").read_text().splitlines()]
    answers = [row["answer"] for row in rows]
    characters = sorted(set("".join(answers)))
    best = 0.0
    for length in range(1, 7):
        share = [
            max(
                np.mean([i < len(a) and a[i] == c and 1 / max(length, len(a)) for a in answers])
                for c in characters
            )
            for i in range(length)
        ]
        best = max(best, float(sum(share)))
    assert 1 / 26 <= best <= 0.3


def test_heldout_and_training_prompts_are_distinct() -> None:
    for held, files in (
        ("upper_heldout", ["upper_train"]),
        ("sort_heldout", ["sort2_train", "sort3_train", "sort4_train", "sort5_train"]),
    ):
        prompts = [
            json.loads(line)["prompt"]
            for f in files
            for line in (ROOT / f"data/{f}.jsonl").read_text().splitlines()
        ]
        held_out = {
            json.loads(line)["prompt"]
            for line in (ROOT / f"data/{held}.jsonl").read_text().splitlines()
        }
        assert len(prompts) == len(set(prompts))
        assert len(held_out) == 256
        assert not held_out & set(prompts)
