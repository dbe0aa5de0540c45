"""Generator.follow: rank 0 makes the calls, the other processes follow.

Ranks are forked by mesh_ranks.py; the scenarios are in mesh_led.py. Oracle: one process, which
makes the same calls with the same mesh without followers. Bound: 0 differing bits."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import pytest
from marks import full, some
from mesh_ranks import CASES
from test_mesh_processes import Server, results, servers  # noqa: F401 (a fixture)

import rollmesh as rm

MESHES = [(2, 1, 1), (2, 2, 4), (1, 2, 1), (1, 2, 2)]
Mesh = tuple[int, int, int]
Ask = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def ranks(servers: dict[str, Server]) -> Ask:
    def ask(do: str, mesh: Mesh, transport: str = "shm", **job: Any) -> list[dict[str, Any]]:
        return servers[transport](
            do, mesh, of="mesh_led", **{"model": "moe", "timeout": 30.0, **job}
        )

    return ask


@pytest.fixture(scope="module")
def alone(servers: dict[str, Server]) -> Callable[..., Any]:
    """Returns the results of one process whose threads are the ranks."""
    known: dict[Any, Any] = {}

    def ask(mesh: Mesh, inflight: str) -> Any:
        if (mesh, inflight) not in known:
            job = {
                "of": "mesh_led",
                "model": "moe",
                "inflight": inflight,
                "transport": "none",
                "order": [0],
            }
            known[mesh, inflight] = results(servers["shm"]("every_call", mesh, **job))[0]
        return known[mesh, inflight]

    return ask


OVER_SHM = [(mesh, source, "shm") for mesh in MESHES for source in ("all", 0, 1)]
OVER_TORCH = [
    full(mesh, source, "torch")
    for mesh, source in (((2, 1, 1), 0), ((2, 2, 4), 1), ((1, 2, 2), "all"))
]


@pytest.mark.parametrize(
    "mesh, source, transport",
    [*some(OVER_SHM, lambda case: case[0] in MESHES[:2] and case[1] != 1, names=3), *OVER_TORCH],
    ids=str,
)
def test_rank_0_gets_what_one_process_gets(
    ranks: Ask, alone: Callable[..., Any], mesh: Mesh, source: Any, transport: str
) -> None:
    first, *others = results(ranks("every_call", mesh, transport, inflight="wait", source=source))
    assert first == alone(mesh, "wait")
    assert others == [True] * len(others), "the generator of a rank that has followed is open"


@pytest.mark.parametrize("inflight", ["keep", full("restart"), full("abort")])
def test_a_version_while_requests_run(ranks: Ask, alone: Callable[..., Any], inflight: str) -> None:
    assert results(ranks("every_call", (1, 2, 2), inflight=inflight))[0] == alone(
        (1, 2, 2), inflight
    )


def test_what_is_refused(ranks: Ask) -> None:
    """Arguments that rank 0 refuses, a source of another rank that fails, calls of a rank that
    follows; rank 0 continues after each."""
    [own, answers], others = results(ranks("refused", (2, 1, 1)))
    assert own[0] == "SyncAbortedError: rank 1: FileNotFoundError: no such shard"
    assert own[1].startswith("MissingKeyError: ")
    assert own[2].startswith("StateError: begin_sync: expected ranks that make their own calls")
    assert own[3].startswith("ConfigError: ")
    assert others[0] == "agenerate and astream: expected a call on rank 0, got one on rank 1"
    assert others[1:] == ["rank 1 follows rank 0 (Generator.follow); make this call on rank 0"] * 4
    expected = results(ranks("idle", (2, 1, 1), silent=0.0))[0]
    assert {**answers, "about": None} == {**expected, "about": None}  # which has the version


@pytest.mark.full
@pytest.mark.parametrize("transport", ["shm", full("torch")])
def test_rank_0_may_be_silent_for_longer_than_a_timeout(ranks: Ask, transport: str) -> None:
    busy, silent = (
        results(ranks("idle", (1, 2, 2), transport, timeout=2.0, silent=seconds))
        for seconds in (0.0, 5.0)
    )
    assert silent == busy


def test_a_signal_handler_of_a_rank_that_follows(ranks: Ask) -> None:
    told, own = results(ranks("handled", (2, 1, 1)))
    refused = "rank 1 follows rank 0 (Generator.follow); make this call on rank 0"
    assert own == [refused] * 4
    assert told == results(ranks("idle", (2, 1, 1), silent=0.0))[0]


def test_another_thread_closes_a_rank_that_has_followed(ranks: Ask) -> None:
    assert ranks("ended", (2, 1, 1), victim=0)[1]["result"] is True


def test_texts_that_are_no_exact_str(ranks: Ask) -> None:
    plain, numpy = (results(ranks("words", (1, 2, 2), text=text)) for text in ("str", "str_"))
    assert numpy == plain


@pytest.mark.full
def test_rank_0_may_be_in_a_call_for_longer_than_a_timeout(ranks: Ask) -> None:
    slow, patient = (
        results(ranks("busy", (1, 2, 2), timeout=timeout))[0] for timeout in (1.0, 30.0)
    )
    assert slow == patient


def test_rank_0_drops_its_generator_without_close(ranks: Ask) -> None:
    assert results(ranks("dropped", (1, 2, 2), victim=0, limit=20.0)) == [
        None,
        ["RankLostError", ANY],
    ]


@pytest.mark.parametrize("how", ["agenerate", full("generate")])
@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGINT], ids=lambda s: s.name)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_ends(ranks: Ask, victim: int, ended_by: signal.Signals, how: str) -> None:
    """The other rank raises RankLostError immediately, rank 0 in its running call. A Ctrl-C in rank
    0's event loop cancels the request and closes the generator, like anywhere else."""
    answers = ranks("lost", (1, 2, 2), victim=victim, signal=int(ended_by), how=how, limit=30.0)
    told = [answer["result"] for answer in answers]
    assert told[victim] == (None if ended_by is signal.SIGKILL else ["KeyboardInterrupt", ""])
    if (victim, ended_by) == (0, signal.SIGINT):
        assert told[1] == ["closed"]
        return
    assert told[1 - victim][0] == "RankLostError"
    assert f"rank {victim}" in told[1 - victim][1]


@pytest.mark.parametrize("how", ["sync", "pause"])
def test_a_ctrl_c_between_the_message_and_the_call(ranks: Ask, how: str) -> None:
    assert results(ranks("interrupted", (2, 1, 1), how=how)) == ["RankLostError"] * 2


def test_a_rank_that_makes_calls_of_its_own(ranks: Ask) -> None:
    for told in results(ranks("unlike", (2, 1, 1), victim=1)):
        assert told[0] == "CollectiveMismatchError"
        assert re.fullmatch(r"rank 1 is in sync_weights\(.*\), rank 0 in follow\(\)", told[1])


def test_rank_0_need_not_call_follow(ranks: Ask) -> None:
    told, expected = (
        results(ranks("idle", (1, 2, 2), silent=0.0, follow=follow)) for follow in (False, True)
    )
    assert told == expected


@pytest.mark.parametrize("source", ["all", 0], ids=str)
@pytest.mark.parametrize("victim", [0, 1])
def test_an_iterator_of_weights_that_does_not_end(ranks: Ask, victim: int, source: Any) -> None:
    told, version = results(
        ranks("endless", (2, 1, 1), victim=victim, source=source, timeout=10.0, limit=25.0)
    )[0]
    assert "DuplicateKeyError: model.norm.weight has come already in this sync" in told
    assert version == 2


def test_follow_while_a_set_is_open(ranks: Ask) -> None:
    [told, answers], others = results(ranks("unready", (2, 1, 1)))
    refused = "source: expected a function of the version, got 3"
    assert others == [refused]
    assert told[0] == refused
    assert told[1].startswith("begin_sync: expected ranks that make their own calls")
    assert told[2] == "a later sync began"
    assert answers == results(ranks("idle", (2, 1, 1), silent=0.0))[0]


def test_one_process_follows_nobody() -> None:
    case = CASES["dense"]
    with rm.Generator(
        rm.ModelSpec.from_hf(case.config), mesh=rm.Mesh(tp=2), max_model_len=64, kv_cache_gib=0.01
    ) as generator:
        assert generator.follow() is None
        assert generator.follow(lambda version: None) is None
        with pytest.raises(rm.ConfigError, match="expected a function of the version, got 3"):
            generator.follow(3)  # type: ignore[arg-type]
    with pytest.raises(rm.StateError, match="closed"):
        generator.follow()
