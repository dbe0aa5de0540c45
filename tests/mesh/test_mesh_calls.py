"""Processes as ranks, called like by training scripts: submit and poll in turns, and failures on
one rank only.

Ranks are forked by mesh_ranks.py; the scenarios are in mesh_calls.py. Oracle: one process with the
same mesh, whose polls return the same requests in the same call, and one rank, whose outputs are
the same. Bound: 0 differing bits."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from marks import full, some
from test_mesh_processes import Server, results, servers  # noqa: F401 (a fixture)

MESHES = [(1, 2, 1), (2, 2, 1), (2, 2, 4), (2, 1, 2)]
Ask = Callable[..., Any]


@pytest.fixture
def ranks(servers: dict[str, Server]) -> Callable[..., list[dict[str, Any]]]:
    def ask(
        do: str, mesh: tuple[int, int, int], transport: str = "shm", **job: Any
    ) -> list[dict[str, Any]]:
        return servers[transport](
            do, mesh, of="mesh_calls", **{"model": "moe", "timeout": 30.0, **job}
        )

    return ask


@pytest.fixture
def threads(servers: dict[str, Server]) -> Ask:
    """One process, whose threads are the ranks."""

    def ask(do: str, mesh: tuple[int, int, int], **job: Any) -> Any:
        return results(
            servers["shm"](
                do,
                mesh,
                of="mesh_calls",
                **{"model": "moe", "transport": "none", "order": [0], **job},
            )
        )[0]

    return ask


# -------------------------------------------------------------------------------- submit and poll
def by_request(polls: list[list[Any]]) -> dict[str, Any]:
    """Returns only complete outputs: the progress of an aborted request depends on the other
    requests."""
    outputs = [output for outputs in polls for output in outputs if len(output) == 4]
    return {
        str(output[0]): output
        for output in outputs
        if "abort" not in [sample[0] for sample in output[2]]
    }


@pytest.mark.parametrize("inflight", ["wait", "keep", "restart", "abort"])
@pytest.mark.parametrize("mesh", some(MESHES, [len(MESHES) - 1]), ids=str)
def test_submitting_while_others_run(
    ranks: Ask, threads: Ask, mesh: tuple[int, int, int], inflight: str
) -> None:
    expected = threads("rolling", mesh, inflight=inflight)
    for number, got in enumerate(results(ranks("rolling", mesh, inflight=inflight))):
        assert [[o[0] for o in outputs] for outputs in got] == [
            [o[0] for o in outputs] for outputs in expected
        ], f"rank {number}"
        assert got == expected, f"rank {number}"
    # Otherwise the result depends on the progress of a request when the sync came.
    if inflight in ("wait", "restart"):
        one_rank = by_request(threads("rolling", (1, 1, 1), inflight="wait"))
        assert len(one_rank) > 20
        assert inflight == "restart" or by_request(expected) == one_rank


@pytest.mark.full
def test_submitting_while_others_run_over_torch(ranks: Ask, threads: Ask) -> None:
    expected = threads("rolling", (1, 2, 1), inflight="wait")
    assert results(ranks("rolling", (1, 2, 1), "torch", inflight="wait")) == [expected, expected]


@pytest.mark.parametrize("mesh", [(1, 2, 1), (2, 2, 4)], ids=str)
def test_the_timeout_of_rank_0_ends_a_poll(
    ranks: Ask, threads: Ask, mesh: tuple[int, int, int]
) -> None:
    """The timeouts of other ranks have no effect."""
    for victim in range(2):
        expected = threads("late", mesh, victim=victim)
        assert victim or expected[0] == [0] * 10
        assert results(ranks("late", mesh, victim=victim)) == [expected] * (mesh[0] * mesh[1])


@pytest.mark.parametrize("mesh", [(1, 2, 1), (2, 2, 1), (2, 2, 4)], ids=str)
def test_a_refusal_where_one_replica_is_idle(
    ranks: Ask, threads: Ask, mesh: tuple[int, int, int]
) -> None:
    expected = threads("asleep", mesh)
    assert [kind for kind, _ in expected[0]] == ["StateError"] * 3
    assert results(ranks("asleep", mesh)) == [expected] * (mesh[0] * mesh[1])


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1)], ids=str)
def test_a_tokenizer_that_raises_between_steps(ranks: Ask, mesh: tuple[int, int, int]) -> None:
    """The request that the tokenizer cannot decode has the error on every rank; the others
    continue."""
    for number, (errors, scored) in enumerate(results(ranks("broken_tokenizer", mesh))):
        own, others = ["KeyError", "'no such letter'"], ["Error", "KeyError: 'no such letter'"]
        assert errors == [others if number else own, ["NoneType", "None"]]
        assert scored == [3]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_what_was_aborted_comes_though_no_step_can_be_made(
    ranks: Ask, threads: Ask, mesh: tuple[int, int, int]
) -> None:
    expected = threads("aborted_asleep", mesh)
    assert [bool(expected[0][0]), expected[0][2][0], len(expected[2])] == [True, "StateError", 2]
    assert results(ranks("aborted_asleep", mesh)) == [expected] * (mesh[0] * mesh[1])


@pytest.mark.parametrize("mesh, victim", [((1, 2, 1), 0), ((2, 1, 1), 1)])
def test_a_stop_string_of_one_rank(ranks: Ask, mesh: tuple[int, int, int], victim: int) -> None:
    for kind, words in results(ranks("stops", mesh, victim=victim)):
        assert kind == "CollectiveMismatchError"
        assert re.fullmatch(r"rank 1 is in generate\(.*\), rank 0 in generate\(.*\)", words)


# ----------------------------------------------------------------------------- sets that go wrong
@pytest.fixture(scope="module")
def serves_next(servers: dict[str, Server]) -> Any:
    """Returns the answers of one rank with the weights that the scenarios sync last."""
    job: dict[str, Any] = {
        "transport": "none",
        "order": [0],
        "model": "moe",
        "of": "mesh_calls",
        "bad": [],
        "rest": True,
        "how": "",
    }
    return results(servers["shm"]("mapping_faults", (1, 1, 1), **job))[0]["after"]


def check_ended(
    ranks: list[dict[str, Any]], serves_next: Any, victims: Sequence[int], kind: str, words: str
) -> None:
    """The victims raise their own error and the other ranks raise SyncAbortedError with it,
    immediately; the old version keeps serving, and a sync works."""
    moments = []
    for number, got in enumerate(results(ranks)):
        name, text, moment = got["told"]
        assert name == (kind if number in victims else "SyncAbortedError"), (number, got["told"])
        assert words in text
        assert number in victims or text.startswith(f"rank {victims[0]}: {kind}: "), (number, text)
        assert (got["same"], got["version"], got["after"]) == (True, 3, serves_next)
        moments.append(moment)
    assert max(moments) - min(moments) < 10, "known at the deadline of 30 s only"


ARGUMENTS = [
    ("version", "VersionError", "version=3"),
    ("no version", "VersionError", "seven"),
    ("source", "UnsupportedTensorError", "int"),
]


@pytest.mark.parametrize("how, kind, words", ARGUMENTS)
@pytest.mark.parametrize("way", ["sync", "pieces"])
@pytest.mark.parametrize("mesh, victim", [full((1, 2, 1), 0), ((2, 2, 4), 3)])
def test_arguments_that_one_rank_refuses(
    ranks: Ask,
    serves_next: Any,
    mesh: tuple[int, int, int],
    victim: int,
    way: str,
    how: str,
    kind: str,
    words: str,
) -> None:
    """A source is refused by its rank; all ranks refuse arguments that differ. Rank 0's own error
    is the error of the call."""
    if (way, how) == ("pieces", "source"):
        return
    got = ranks("arguments", mesh, way=way, how=how, victim=victim)
    is_shared = how != "source" or victim == 0
    if how != "source":
        kind = "CollectiveMismatchError"
    everyone = range(len(got)) if is_shared else [victim]
    check_ended(got, serves_next, [*everyone], kind, words)


WAYS = [
    ("shape", "ShapeError", "3"),
    ("gather", "RuntimeError", "a trainer's rank is gone"),
    ("memory", "MemoryError", "no room"),
    ("block", "KeyError", "the script's own"),
]


@pytest.mark.parametrize("how, kind, words", some(WAYS, [0, 3], names=3))
@pytest.mark.parametrize(
    "mesh, victim, at", [full((2, 1, 1), 1, 0), full((1, 2, 1), 0, 5), ((2, 2, 4), 2, -1)]
)
def test_a_push_that_fails_on_one_rank(
    ranks: Ask,
    serves_next: Any,
    mesh: tuple[int, int, int],
    victim: int,
    at: int,
    how: str,
    kind: str,
    words: str,
) -> None:
    """Fails at the first, the sixth and the last tensor; the last also when the others have one
    less and are at their commit."""
    check_ended(
        ranks("pieces", mesh, how=how, victim=victim, at=at), serves_next, [victim], kind, words
    )
    if at == -1:
        check_ended(
            ranks("pieces", mesh, how=how, victim=victim, at=at, others_stop=True),
            serves_next,
            [victim],
            kind,
            words,
        )


@pytest.mark.full
def test_a_push_that_fails_on_one_rank_over_torch(ranks: Ask, serves_next: Any) -> None:
    check_ended(
        ranks("pieces", (1, 2, 1), "torch", how="shape", victim=1, at=3),
        serves_next,
        [1],
        "ShapeError",
        "3",
    )


@pytest.mark.parametrize("mesh, victim", [((2, 1, 1), 1), ((1, 3, 1), 0)])
def test_one_rank_drops_its_set(ranks: Ask, mesh: tuple[int, int, int], victim: int) -> None:
    for number, got in enumerate(results(ranks("pieces", mesh, how="abort", victim=victim, at=2))):
        assert got["told"][:2] == (
            ["KeyError", "'aborted'"]
            if number == victim
            else ["SyncAbortedError", f"rank {victim}: the sync was aborted"]
        )
        assert got["same"]


def test_ctrl_c_between_two_pushes(ranks: Ask) -> None:
    told = [
        got["told"] for got in results(ranks("pieces", (2, 2, 4), how="Ctrl-C", victim=1, at=3))
    ]
    assert [name for name, _, _ in told] == [
        "RankLostError",
        "KeyboardInterrupt",
        "RankLostError",
        "RankLostError",
    ]
    assert all("rank 1" in text for name, text, _ in told if name == "RankLostError")


@pytest.mark.parametrize("mesh", [(2, 1, 1), (2, 2, 4)], ids=str)
def test_a_tensor_that_all_ranks_refuse_leaves_the_set_open(
    ranks: Ask, threads: Ask, mesh: tuple[int, int, int]
) -> None:
    expected = threads("refused_by_all", (1, 1, 1))
    assert {name for name, _ in expected[0]} == {"ShapeError"}
    assert results(ranks("refused_by_all", mesh)) == [expected] * (mesh[0] * mesh[1])


@pytest.mark.parametrize("how", ["names", "missing", "unexpected", "shapes", "values"])
@pytest.mark.parametrize(
    "bad, rest",
    [full([0, 1, 2, 3], True), full([0], False), ([0], True)],
    ids=["all", "one source", "one bad"],
)
def test_one_error_lists_all_offenders(
    ranks: Ask, threads: Ask, serves_next: Any, bad: list[int], rest: bool, how: str
) -> None:
    """The error equals the error of one process. The bad values are in rows that ranks 0 and 1
    hold; one or both ranks have bad values in their own part."""
    kind, text, _ = threads("mapping_faults", (1, 1, 1), bad=[0], rest=True, how=how)["told"]
    assert text.count("; ") >= 1
    got = ranks("mapping_faults", (2, 2, 4), bad=bad, rest=rest, how=how)
    if how != "values":
        check_ended(got, serves_next, bad, kind, text)
        return
    told = [rank["told"][:2] for rank in results(got)]
    assert told[0] == [kind, text]
    assert {name for name, _ in told} <= {kind, "SyncAbortedError"}
    assert all(text in said for name, said in told if name == "SyncAbortedError")
    assert all(rank["same"] and rank["after"] == serves_next for rank in results(got))


# ---------------------------------------------------------------- ranks that say different things
# Parts that several ranks hold, whatever else is cut: a mesh, and the rank that gets other values.
HELD_BY_MANY = {
    "model.norm.weight": [((2, 1, 1), 1), ((2, 2, 4), 2)],
    "model.embed_tokens.weight": [((1, 2, 1), 1), ((2, 2, 4), 2)],
    "model.layers.0.mlp.experts.0.gate_proj.weight": [((1, 2, 1), 0), ((2, 2, 2), 2)],
}


@pytest.mark.parametrize("way", ["sync", full("pieces")])
@pytest.mark.parametrize(
    "name, mesh, victim", [(name, *where) for name, its in HELD_BY_MANY.items() for where in its]
)
def test_bad_set_ranks_that_are_given_different_values(
    ranks: Ask, serves_next: Any, way: str, name: str, mesh: tuple[int, int, int], victim: int
) -> None:
    """The replicas of a trainer differ: all ranks refuse, whichever rank differs."""
    for got in results(ranks("differs", mesh, how="values", way=way, name=name, victim=victim)):
        kind, text, _ = got["told"]
        assert (kind, text.split(":")[0]) == ("MeshMismatchError", name)
        assert (got["same"], got["version"], got["after"]) == (True, 3, serves_next)


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1)], ids=str)
def test_a_set_with_other_options_on_one_rank(
    ranks: Ask, serves_next: Any, mesh: tuple[int, int, int]
) -> None:
    for got in results(ranks("differs", mesh, how="options", way="pieces", victim=1)):
        kind, text, _ = got["told"]
        assert (kind, "inflight='keep'" in text, "inflight='wait'" in text) == (
            "CollectiveMismatchError",
            True,
            False,
        )
        assert (got["same"], got["version"], got["after"]) == (True, 3, serves_next)


@pytest.mark.parametrize("way", ["sync", "pieces"])
@pytest.mark.parametrize("mesh, victim", [((2, 1, 1), 0), ((1, 2, 1), 1)])
def test_a_timeout_that_one_rank_has(
    ranks: Ask, serves_next: Any, mesh: tuple[int, int, int], victim: int, way: str
) -> None:
    for got in results(ranks("differs", mesh, how="timeout", way=way, victim=victim)):
        assert (got["told"][0], got["after"]) == (None, serves_next), got["told"]


# ------------------------------------------------------------------------ ranks that sleep unlike
BOTH = ["weights", "kv"]


@pytest.mark.parametrize(
    "mesh, victim", some([((2, 1, 1), 1), ((1, 2, 1), 0), ((2, 2, 4), 3)], [2], names=2)
)
@pytest.mark.parametrize(
    "sleep, wake",
    [
        ([["kv"], [BOTH]], [["kv"], [BOTH]]),
        ([["weights", True], ["weights"]], [["weights"], ["kv"]]),
        ([["cache"], []], [[[]], []]),
    ],
)
def test_ranks_that_sleep_or_wake_with_other_arguments(
    ranks: Ask, mesh: tuple[int, int, int], victim: int, sleep: Any, wake: Any
) -> None:
    """All ranks refuse immediately, and all stay as they were, including the rank that had less to
    do."""
    moments = []
    for told, *served in results(ranks("rests", mesh, victim=victim, sleep=sleep, wake=wake)):
        for (kind, text, moment, asleep), what, parts in zip(
            told, ("sleep", "wake"), ([], BOTH), strict=True
        ):
            assert (kind, asleep) == ("CollectiveMismatchError", parts), text
            assert re.fullmatch(rf"rank \d is in {what}\(.*\), rank 0 in {what}\(.*\)", text), text
            moments.append(moment)
        assert served == [True, True]
    assert max(moments) - min(moments) < 10, "known at the deadline of 30 s only"
