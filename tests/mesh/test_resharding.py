"""Generators whose ranks are processes receive per-rank pieces of a state dict, and tensors are
never gathered: torch's FSDP2 and DTensors on meshes equal to, smaller than and across the
generator's, rm.Piece with arbitrary cuts, experts packed and one by one.

Ranks are forked by mesh_ranks.py; the scenarios are in mesh_pieces.py. Oracle: one rank with the
whole state dict, by digest and by all its answers. Bound: 0 differing bits; a rank receives only
bytes that it needs."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from marks import SUMMARY, some
from test_mesh_processes import KILL, Server, results

import rollmesh as rm
from rollmesh import _core
from rollmesh.weights.pieces import part_of

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that has imported torch, whatever the generator's ranks use."""
    made = Server("torch", tmp_path_factory.mktemp("rendezvous"))
    yield made
    made.end()


@pytest.fixture(scope="module")
def alone(server: Server) -> Callable[[str], Any]:
    known: dict[str, Any] = {}

    def ask(model: str) -> Any:
        if model not in known:
            known[model] = results(server("bits", (1, 1, 1), transport="none", model=model))[0]
        return known[model]

    return ask


@pytest.fixture(scope="module")
def shares(pytestconfig: pytest.Config) -> Iterator[list[float]]:
    """Collects, for each case, the part of the mesh's reads that came from other ranks."""
    seen: list[float] = []
    yield seen
    if seen:
        least, most = (f"{100 * share:.0f} %" for share in (min(seen), max(seen)))
        pytestconfig.stash[SUMMARY].append(
            f"weights in pieces: {len(seen)} trainers, {least} to {most} of the bytes read came "
            "from other ranks"
        )


CASES: list[tuple[str, tuple[int, int, int], dict[str, Any]]] = [
    ("shm", (2, 1, 2), {"trainer": "fsdp", "axes": [2]}),
    ("shm", (2, 2, 4), {"trainer": "fsdp", "axes": [4], "packed": True, "dtype": "bfloat16"}),
    ("shm", (2, 1, 1), {"trainer": "fsdp", "axes": [2], "model": "dense", "stream": True}),
    ("shm", (3, 1, 1), {"trainer": "mesh", "axes": [3], "dims": [1], "packed": True}),
    ("shm", (1, 3, 3), {"trainer": "mesh", "axes": [3], "dims": [0], "stream": True}),
    ("shm", (2, 2, 1), {"trainer": "mesh", "axes": [2, 2], "dims": [0, 1], "packed": True}),
    (
        "shm",
        (4, 1, 4),
        {"trainer": "mesh", "axes": [2, 2], "dims": [-1, 2], "packed": True, "dtype": "bfloat16"},
    ),
    ("shm", (2, 2, 4), {"trainer": "mesh", "axes": [2], "dims": [0], "first": 1, "packed": True}),
    ("shm", (2, 1, 1), {"trainer": "mesh", "axes": [1], "dims": [0], "first": 1, "model": "dense"}),
    ("shm", (3, 1, 3), {"trainer": "anyhow"}),
    ("shm", (2, 2, 2), {"trainer": "anyhow", "packed": True, "dtype": "bfloat16", "stream": True}),
    ("torch", (2, 1, 2), {"trainer": "fsdp", "axes": [2], "packed": True}),
    ("torch", (1, 2, 1), {"trainer": "anyhow", "model": "dense"}),
]


def name_of(case: Any) -> str:
    return (
        "-".join(f"{key}{value}" for key, value in case.items()).replace(" ", "")
        if isinstance(case, dict)
        else str(case)
    )


@pytest.mark.parametrize("transport, mesh, how", some(CASES, [0, 5, 9], names=3), ids=name_of)
def test_pieces_give_the_bits_of_the_whole(
    server: Server,
    alone: Callable[[str], Any],
    shares: list[float],
    transport: str,
    mesh: Any,
    how: dict[str, Any],
) -> None:
    job = {"model": "moe", "of": "mesh_pieces", "transport": transport, **how}
    moved = results(server("resharded", mesh, **job))
    for number, got in enumerate(moved):
        assert got["bits"] == alone(job["model"]), f"rank {number}"
        assert got["received"] <= got["bytes"], f"rank {number} received more than it holds"
        assert got["gathered"] == 0, f"rank {number} gathered {got['gathered']} tensors"
    received, read = (sum(got[key] for got in moved) for key in ("received", "bytes"))
    assert received > 0
    shares.append(received / read)


def test_strided_shards_are_sent_like_others(server: Server, alone: Callable[[str], Any]) -> None:
    """FSDP over tensor parallelism of the same dim makes _StridedShard."""
    job = {
        "model": "dense",
        "of": "mesh_pieces",
        "transport": "shm",
        "trainer": "fsdp",
        "axes": [2, 2],
    }
    for got in results(server("resharded", (2, 2, 1), **job)):
        assert got["bits"] == alone("dense")
        assert got["received"] <= got["bytes"]
        assert got["gathered"] == 0


def test_strided_shards_that_do_not_divide_their_dim_are_gathered(
    server: Server, alone: Callable[[str], Any]
) -> None:
    job = {
        "model": "dense",
        "of": "mesh_pieces",
        "transport": "shm",
        "trainer": "fsdp",
        "axes": [2, 3],
    }
    for got in results(server("resharded", (3, 2, 1), **job)):
        assert got["bits"] == alone("dense")
        assert got["gathered"] > 0


def test_one_rank_that_has_all_gives_each_what_it_wants(
    server: Server, alone: Callable[[str], Any]
) -> None:
    """Each rank receives only what it holds, although the only source is whole."""
    job = {
        "model": "moe",
        "of": "mesh_pieces",
        "transport": "shm",
        "trainer": "mesh",
        "axes": [1],
        "dims": [0],
        "first": 2,
    }
    for number, got in enumerate(results(server("resharded", (4, 1, 4), **job))):
        assert got["bits"] == alone("moe")
        assert got["received"] == (0 if number == 2 else got["bytes"])


@pytest.mark.parametrize("mesh", [(2, 1, 2), (2, 2, 4), (2, 2, 1)], ids=str)
def test_ranks_that_bring_their_shards_are_sent_nothing(
    server: Server, alone: Callable[[str], Any], mesh: Any
) -> None:
    """Generator.shard, for sources that can read a part of a tensor."""
    ranks = results(server("by_shards", mesh, model="moe", of="mesh_pieces", transport="shm"))
    assert min(got["held"] for got in ranks) < 0.6 * ranks[0]["all"]
    for number, got in enumerate(ranks):
        assert got["bits"] == {
            key: value for key, value in alone("moe")[0].items() if key in got["bits"]
        }, f"rank {number}"
        assert got["received"] == 0
        assert got["held"] * 4 == got["bytes"], "more than it reads"


FAULTS = [
    ("hole", "IncompleteSyncError", None, "in a rank's piece, got none"),
    ("alike", "ShapeError", None, "expected shape"),
    (
        "huge",
        "ShapeError",
        None,
        r"expected fewer than 2\^60 elements, got shape .*4611686018427387904",
    ),
    ("unknown", "UnexpectedKeyError", None, r"\.no"),
    ("order", "MeshMismatchError", None, "rank 1: expected .*, as on rank 0, got "),
    ("fewer", "MeshMismatchError", None, "rank 1: expected .*, as on rank 0, got no more weights"),
    ("dtype", "MeshMismatchError", None, "expected float32 .*, got float64 .* on rank 1"),
    ("shape", "MeshMismatchError", None, "on rank 1"),
    ("nan", "NonFiniteError", "SyncAbortedError", "NonFiniteError|not finite"),
    ("refused", "UnsupportedTensorError", "SyncAbortedError", "list"),
    ("meta", "UnsupportedTensorError", "SyncAbortedError", "a meta tensor, which has no data"),
    ("emptied", "LayoutError", "SyncAbortedError", "expected a tensor with storage"),
    ("sparse", "UnsupportedTensorError", "SyncAbortedError", "sparse"),
    ("raises", "KeyError", "SyncAbortedError", "KeyError|no more"),
]


@pytest.mark.parametrize("how, victims, others, words", FAULTS, ids=[fault[0] for fault in FAULTS])
def test_what_is_wrong_is_raised_on_all(
    server: Server,
    alone: Callable[[str], Any],
    how: str,
    victims: str,
    others: str | None,
    words: str,
) -> None:
    """The victim is rank 1. Without "others" the same error is raised on all ranks. The old version
    serves, and the next sync is accepted."""
    ranks = results(
        server(
            "spoiled_pieces",
            (1, 2, 2),
            of="mesh_pieces",
            transport="shm",
            model="moe",
            how=how,
            victim=1,
            timeout=20.0,
        )
    )
    kinds = [rank["told"][0] for rank in ranks]
    if how == "nan":  # in rank 1's piece, in whichever's part it is
        assert set(kinds) <= {victims, others}
        assert victims in kinds
    else:
        assert kinds == [others or victims, victims]
    for rank in ranks:
        assert re.search(words, rank["told"][1]), rank["told"]
        assert rank["same"]
        assert rank["version"] == 0
        assert rank["next"] == alone("moe")[1]["digest"]


@pytest.mark.parametrize("calls", [0, 7])
def test_a_rank_that_is_killed_among_pieces(server: Server, calls: int) -> None:
    ranks = server(
        "lost_among_pieces",
        (2, 2, 4),
        of="mesh_pieces",
        transport="shm",
        model="moe",
        calls=calls,
        victim=2,
        signal=KILL,
    )
    assert ranks[2]["status"] == -KILL
    for number in (0, 1, 3):
        told = ranks[number]["result"]
        assert told["told"][0] == "RankLostError"
        assert "rank 2" in told["told"][1]
        assert told["version"] == 0


# ------------------------------------------------------------------------------------- all_to_all
def ends() -> list[_core.Comm]:
    """The control group of two ranks that are threads."""
    name = f"test.{secrets.token_hex(8)}"
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(lambda rank: _core.attach(name, rank, 7, 2, 1, 1, 20.0), (0, 1)))
    return [end for rank in ranks for end in rank[3:4] if end is not None]


def exchange(give: list[list[bytes]], sizes: list[list[int]]) -> list[Any]:
    """Returns what each of two ranks receives, or its error."""

    def one(rank: int) -> Any:
        take = [np.zeros(n, np.uint8) for n in sizes[rank]]
        try:
            groups[rank].all_to_all([np.frombuffer(part, np.uint8) for part in give[rank]], take)
        except rm.Error as error:
            return type(error)
        return [part.tobytes() for part in take]

    groups = ends()
    with ThreadPoolExecutor(2) as pool:
        out = list(pool.map(one, (0, 1)))
    for group in groups:
        group.close()
    return out


def test_all_to_all() -> None:
    assert exchange([[b"", b"abc"], [b"de", b""]], [[0, 2], [3, 0]]) == [
        [b"", b"de"],
        [b"abc", b""],
    ]
    assert exchange([[b"", b""], [b"", b""]], [[0, 0], [0, 0]]) == [[b"", b""], [b"", b""]]
    assert exchange([[b"x", b"abc"], [b"de", b"y"]], [[1, 2], [3, 1]]) == [
        [b"x", b"de"],
        [b"abc", b"y"],
    ]
    # Rank 0 fails at its next call.
    assert (
        exchange([[b"", b"abc"], [b"de", b""]], [[0, 2], [4, 0]])[1] is rm.CollectiveMismatchError
    )


def test_buffers_that_are_none() -> None:
    first, second = ends()
    empty = np.zeros(0, np.uint8)
    for give, take in (
        ([empty], [empty] * 2),
        ([empty] * 2, [empty] * 3),
        ([empty, 3], [empty] * 2),
        ([empty] * 2, [empty, b"ab"]),
    ):
        with pytest.raises((ValueError, rm.UnsupportedTensorError)):
            first.all_to_all(give, take)  # type: ignore[arg-type]
    for end in (first, second):
        end.close()
    with pytest.raises(rm.StateError):
        first.all_to_all([empty] * 2, [empty] * 2)


# ------------------------------------------------------------------------------------------ Piece
@pytest.mark.parametrize(
    "array, shape, offsets, error, words",
    [
        (
            (2, 3),
            (2, 2),
            (0, 0),
            rm.LayoutError,
            r"shape \[2, 3\] at \[0, 0\] of a tensor of shape \[2, 2\]",
        ),
        ((2, 3), (4, 3), (3, 0), rm.LayoutError, "inside"),
        ((2, 3), (4, 3), (-1, 0), rm.LayoutError, "inside"),
        ((2, 3), (4, 3), (0,), rm.LayoutError, "inside"),
        ((2, 3), (4, 3, 1), (0, 0, 0), rm.LayoutError, "inside"),
        ((1, 1, 1, 1, 1), (1, 1, 1, 1, 1), (0, 0, 0, 0, 0), rm.LayoutError, "4 dims"),
        ((2, 3), (4, 3.0), (0, 0), rm.LayoutError, "shape"),
        ((2, 3), (4, 3), (True, 0), rm.LayoutError, "offsets"),
        ((2, 3), 4, (0, 0), rm.LayoutError, "shape"),
        (None, (4, 3), (0, 0), rm.UnsupportedTensorError, "NoneType"),
    ],
)
def test_pieces_that_are_none(
    array: Any, shape: Any, offsets: Any, error: type[rm.Error], words: str
) -> None:
    with pytest.raises(error, match=words):
        rm.Piece(None if array is None else np.zeros(array, np.float32), shape, offsets)


def emptied() -> Any:
    """Returns a tensor whose storage was freed, like a tensor that a sharded trainer has
    resharded."""
    import torch

    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> Any:
    import torch
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode().from_tensor(torch.ones(3))


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda torch: torch.ones(3, device="meta"), rm.UnsupportedTensorError, "a meta tensor"),
        (
            lambda torch: torch.ones(3).to_sparse(),
            rm.UnsupportedTensorError,
            "got a sparse tensor",
        ),
        (
            lambda torch: torch.nested.nested_tensor([torch.ones(3)], layout=torch.jagged),
            rm.UnsupportedTensorError,
            "a nested tensor",
        ),
        (
            lambda torch: torch.ones(3).to_mkldnn(),
            rm.UnsupportedTensorError,
            "layout torch._mkldnn",
        ),
        (lambda torch: fake(), rm.UnsupportedTensorError, "a fake tensor"),
        (lambda torch: torch.ones(3, dtype=torch.complex64), rm.DTypeError, "complex64"),
        (lambda torch: emptied(), rm.LayoutError, "expected a tensor with storage"),
    ],
)
def test_tensors_without_memory_to_read(
    make: Callable[[Any], Any], error: type[rm.Error], words: str
) -> None:
    with pytest.raises(error, match=f"^a name: .*{words}"):
        part_of("a name", make(pytest.importorskip("torch")))


@pytest.mark.parametrize(
    "shape", [(2**60,), (2**62, 2**62), (2**63 - 1,), (2**70,), (2**30, 0, 2**30)]
)
def test_shapes_that_nothing_can_have(shape: tuple[int, ...]) -> None:
    piece = rm.Piece(np.zeros((0,) * len(shape), np.float64), shape, (0,) * len(shape))
    with pytest.raises(rm.ShapeError, match=rf"a name: expected fewer than 2\^60 .*{shape[0]}"):
        part_of("a name", piece)


def test_one_process_takes_a_piece_that_is_whole() -> None:
    import test_mesh_sync as mesh_sync

    whole = {
        name: rm.Piece(value, value.shape, (0,) * value.ndim)
        for name, value in mesh_sync.WEIGHTS.items()
    }
    name = "model.embed_tokens.weight"
    part = {
        **whole,
        name: rm.Piece(mesh_sync.WEIGHTS[name][:100], mesh_sync.WEIGHTS[name].shape, (0, 0)),
    }
    with mesh_sync.generator(rm.Mesh(tp=2)) as generator:
        for source in (part, iter(part.items())):
            with pytest.raises(
                rm.LayoutError,
                match=r"expected the whole tensor, got .* \[100, 96\] at \[0, 0\] of .* \[300, "
                r"96\]",
            ):
                generator.sync_weights(source)
            assert generator.version is None
        first = generator.sync_weights(whole).digest
        assert generator.sync_weights(mesh_sync.WEIGHTS).digest == first
        with generator.begin_sync() as sync:
            with pytest.raises(rm.LayoutError, match="expected the whole tensor"):
                sync.push(name, part[name])
            for key, value in whole.items():
                sync.push(key, value)
        assert sync.report is not None
        assert sync.report.digest == first
