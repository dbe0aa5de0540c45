"""The token dispatcher as an operation of a trainer: rows to their experts and back, with
gradients, over ranks that are threads.

Input: random rows and router weights; 8 experts, 3 of them for a row; 0 to 31 tokens in runs of ⌈n
/ ranks⌉, so that some ranks have few or none. Oracles: the same block on one rank by the functions
of rollmesh.ops, in bits; a dense block in plain torch, in float64, for gradients; gradcheck.
Bounds: 0 differing bits, whatever the ranks, the backend and the padding; 1e-12 of float64
gradients.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import math
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dispatch_cases import (
    BACKENDS,
    EXPERTS,
    HIDDEN,
    MESHES,
    SECONDS,
    SIZES,
    TOKENS,
    TOP_K,
    Batch,
    Block,
    bits,
    no_rows,
    other_gradient,
    other_outputs,
    other_plan,
    other_rows,
    outcomes,
    random_routing,
    random_rows,
    runs,
    same,
    tensor,
    together,
    train,
    train_all,
    words,
)
from marks import SUMMARY, full
from torch import Tensor

import rollmesh as rm
from rollmesh import _core, ops
from rollmesh.torch import TokenDispatcher, token_dispatcher, token_dispatchers
from rollmesh.torch.dispatch import _tree


@pytest.fixture
def group() -> Iterator[Callable[..., list[TokenDispatcher]]]:
    made: list[TokenDispatcher] = []

    def make(
        ranks: int, backend: str = "alltoall", timeout: float = SECONDS, **changes: Any
    ) -> list[TokenDispatcher]:
        made.extend(token_dispatchers(ranks, backend=backend, timeout=timeout, **(SIZES | changes)))
        return made[-ranks:]

    yield make
    for dispatcher in made:
        dispatcher.close()


# ----------------------------------------------------------------------------------------- values
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks, backend", MESHES)
def test_the_values_are_those_of_one_rank(
    group: Any, rng: np.random.Generator, ranks: int, backend: str, dtype: str
) -> None:
    block, ends = Block.random(rng, dtype), group(ranks, backend)

    def check(n: int) -> None:
        x = random_rows(rng, n, getattr(torch, dtype))
        expected = tensor(block.whole(words(x)))
        ids, gates = map(torch.from_numpy, block.route(words(x)))
        cut = runs(n, ranks, backend)
        got = together(
            ends, lambda r, end: block.on_rank(end, x[cut[r]], ids[cut[r]], gates[cut[r]])
        )
        for r in range(ranks):
            assert same(got[r], expected[cut[r]]), (n, r)

    for n in TOKENS:
        check(n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int16])
def test_rows_arrive_sorted_by_expert(
    group: Any, rng: np.random.Generator, dtype: torch.dtype
) -> None:
    """Oracle: the definition, spelled out in Python. A row's order among its expert's is by rank,
    then row."""
    ends = group(2)
    x, (ids, _) = (100 * random_rows(rng, 17)).to(dtype), random_routing(rng, 17)
    cut = runs(17, 2, "alltoall")
    for end, sent in zip(ends, together(ends, lambda r, end: end.dispatch(x[cut[r]], ids[cut[r]]))):
        wanted = [[row for row in range(17) if expert in ids[row]] for expert in end.experts]
        assert sent.group_rows.tolist() == np.cumsum([0, *map(len, wanted)]).tolist()
        assert same(sent.rows, x[[row for rows in wanted for row in rows]])


@pytest.mark.parametrize("experts", [1, 2, 3, 5, 8, 33])
def test_the_tree_in_torch_is_the_contracts(rng: np.random.Generator, experts: int) -> None:
    """The sum that float64 takes, in float32 beside the kernel's; zeros of both signs among the
    values."""
    for k in {1, min(3, experts), experts}:
        ids = np.array([rng.permutation(experts)[:k] for _ in range(9)], np.int32)
        y, gates = (
            rng.standard_normal((9 * k, 7), dtype=np.float32),
            rng.standard_normal((9, k), dtype=np.float32),
        )
        y[rng.random(y.shape) < 0.3] = -0.0
        place = rng.permutation(9 * k).astype(np.int32).reshape(9, k)
        expected = torch.from_numpy(ops.combine(y, place, ids, gates, experts))
        assert same(
            _tree(
                torch.from_numpy(y[place]), torch.from_numpy(gates), torch.from_numpy(ids), experts
            ),
            expected,
        ), k


def test_values_do_not_know_of_grad(group: Any, rng: np.random.Generator) -> None:
    block, ends, n = Block.random(rng, "bfloat16"), group(2), 17
    x, (ids, gates), cut = (
        random_rows(rng, n, torch.bfloat16),
        random_routing(rng, n),
        runs(n, 2, "alltoall"),
    )

    def work(mode: Callable[[], Any], grad: bool) -> Callable[[int, TokenDispatcher], Tensor]:
        def run(r: int, end: TokenDispatcher) -> Tensor:
            with mode():
                own = (
                    x[cut[r]].clone().requires_grad_(grad and not torch.is_inference_mode_enabled())
                )
                g = (
                    gates[cut[r]]
                    .clone()
                    .requires_grad_(grad and not torch.is_inference_mode_enabled())
                )
                sent = end.dispatch(own, ids[cut[r]])
                assert sent.rows.requires_grad == (grad and torch.is_grad_enabled())
                y = tensor(
                    block.experts(
                        words(sent.rows.detach()),
                        sent.group_rows.numpy(),
                        slice(end.experts.start, end.experts.stop),
                    )
                )
                return end.combine(y.requires_grad_(sent.rows.requires_grad), g, sent.plan).detach()

        return run

    first, *others = (
        together(ends, work(*way))
        for way in (
            (nullcontext, False),
            (nullcontext, True),
            (torch.no_grad, True),
            (torch.inference_mode, False),
        )
    )
    assert all(same(a, b) for other in others for a, b in zip(first, other))


# -------------------------------------------------------------------------------------- gradients
@pytest.mark.parametrize("ranks, backend", MESHES)
def test_gradients_are_those_of_a_dense_block(
    group: Any, rng: np.random.Generator, ranks: int, backend: str
) -> None:
    """Two layers over one dispatcher, so that plans of several layers live at a time."""
    batch, weights = Batch.random(rng, 17, torch.float64), random_rows(rng, EXPERTS, torch.float64)
    leaves = [t.clone().requires_grad_() for t in (batch.x, batch.gates, weights)]
    out = leaves[0]
    for _ in range(2):
        out = (
            leaves[1][:, :, None] * torch.tanh(out[:, None, :] * leaves[2][batch.ids.long()])
        ).sum(1)
    wanted = [out.detach(), *torch.autograd.grad(out, leaves, batch.pull)]
    cut = runs(17, ranks, backend)
    got = train_all(group(ranks, backend), [batch.on(rows) for rows in cut], weights, layers=2)
    for rows, part in zip(cut, got):
        for value, whole in zip(part[:3], wanted[:3]):
            torch.testing.assert_close(value, whole[rows], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.cat([part.weights for part in got]), wanted[3], rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks, backend", MESHES[1:])
def test_gradients_have_the_bits_of_one_rank(
    group: Any, rng: np.random.Generator, ranks: int, backend: str, dtype: torch.dtype
) -> None:
    weights, alone, ends = random_rows(rng, EXPERTS, dtype), group(1), group(ranks, backend)
    for n in TOKENS:
        batch, cut = Batch.random(rng, n, dtype), runs(n, ranks, backend)
        [whole] = train_all(alone, [batch], weights)
        got = train_all(ends, [batch.on(rows) for rows in cut], weights)
        for rows, part in zip(cut, got):
            assert all(
                same(value, all_rows[rows]) for value, all_rows in zip(part[:3], whole[:3])
            ), n
        assert same(torch.cat([part.weights for part in got]), whole.weights), n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("ranks, backend", MESHES)
def test_padding_does_not_show(
    group: Any, rng: np.random.Generator, ranks: int, backend: str, dtype: torch.dtype
) -> None:
    """Padding anywhere, another number of rows of it on each rank, full of NaN: the generator and
    the trainer pad differently."""
    weights, ends = random_rows(rng, EXPERTS, dtype), group(ranks, backend)
    for n in TOKENS:
        batch = Batch.random(rng, n, dtype)
        parts = [batch.on(rows) for rows in runs(n, ranks, backend)]
        sizes = [len(part.x) + int(pads) for part, pads in zip(parts, rng.integers(0, 9, ranks))]
        at = [
            torch.from_numpy(np.sort(rng.permutation(size)[: len(part.x)]))
            for size, part in zip(sizes, parts)
        ]
        plain = train_all(ends, parts, weights)
        padded = train_all(
            ends, [part.padded(rows, size) for part, rows, size in zip(parts, at, sizes)], weights
        )
        for rows, size, a, b in zip(at, sizes, padded, plain):
            pads = torch.ones(size, dtype=torch.bool).index_fill(0, rows, False)
            assert all(same(value[rows], real) for value, real in zip(a[:3], b[:3])), n
            assert all(same(value[pads], torch.zeros_like(value[pads])) for value in a[:3]), n
            assert same(a.weights, b.weights), n


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(group: Any, rng: np.random.Generator, backend: str) -> None:
    """At ep = 2: each rank checks the derivatives of its own output by its own rows and gates; what
    one changes reaches no output of the other's. With local_allreduce both make the same changes.
    One of the rows is padding."""
    ends, hidden = group(2, backend, hidden=3), 3
    data = []
    for _ in range(2):
        ids, gates = random_routing(rng, 4, torch.float64)
        ids[2] = -1
        data.append((torch.from_numpy(rng.standard_normal((4, hidden))), ids, gates))
    if backend == "local_allreduce":
        data[1] = data[0]

    def work(r: int, end: TokenDispatcher) -> bool:
        x, ids, gates = data[r]

        def block(x: Tensor, gates: Tensor) -> Tensor:
            sent = end.dispatch(x, ids)
            of_row = torch.arange(end.experts.start, end.experts.stop).repeat_interleave(
                sent.group_rows.diff()
            )
            return end.combine(torch.sin(sent.rows * (1.0 + of_row)[:, None]), gates, sent.plan)

        return torch.autograd.gradcheck(
            block, (x.clone().requires_grad_(), gates.clone().requires_grad_())
        )

    assert together(ends, work) == [True, True]


def test_gradcheck_of_each_half(group: Any, rng: np.random.Generator) -> None:
    """On one rank: dispatch alone, combine alone, by all their inputs."""
    [end] = group(1)
    x, (ids, gates) = (
        random_rows(rng, 3, torch.float64)[:, :3].contiguous().requires_grad_(),
        random_routing(rng, 3, torch.float64),
    )
    assert torch.autograd.gradcheck(lambda x: end.dispatch(x, ids).rows, x)
    sent = end.dispatch(x.detach(), ids)
    y = torch.randn_like(sent.rows).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda y, gates: end.combine(y, gates, sent.plan), (y, gates.requires_grad_())
    )


# -------------------------------------------------------------------------------- what goes wrong
def call(
    end: TokenDispatcher, n: int = 4, hidden: int = HIDDEN, k: int = TOP_K, first: int = 2
) -> Any:
    """By default to experts 2, 3, 4, of which at ep = 2 both ranks have some."""
    return end.dispatch(
        torch.ones(n, hidden), (first + torch.arange(k, dtype=torch.int32)).repeat(n, 1)
    )


def other_call(r: int, end: TokenDispatcher) -> Any:
    sent = call(end)
    return call(end) if r else end.combine(sent.rows, torch.ones(4, TOP_K), sent.plan)


@pytest.mark.parametrize(
    "work, backend",
    [
        *((other_call, backend) for backend in BACKENDS),
        *((lambda r, end: call(end, hidden=HIDDEN - r), backend) for backend in BACKENDS[:2]),
        (lambda r, end: call(end, n=4 + r), "local_allreduce"),
        (
            lambda r, end: end.dispatch(
                torch.ones(2, HIDDEN),
                torch.tensor([[0, 1, 2], [3, 4, 5]][:: 1 - 2 * r], dtype=torch.int32),
            ),
            "local_allreduce",
        ),
    ],
)
def test_a_mismatch_is_an_error(
    group: Any, work: Callable[[int, TokenDispatcher], Any], backend: str
) -> None:
    errors = outcomes(group(2, backend), work)
    assert {type(error) for error in errors} <= {rm.CollectiveMismatchError, rm.RankLostError}, (
        errors
    )
    assert rm.CollectiveMismatchError in {type(error) for error in errors}, errors


@pytest.mark.parametrize(
    "work, said",
    [
        (
            other_rows,
            r"plan 1: dispatch of rows of (24 bfloat16|12 float32); rank \d in plan 1: dispatch "
            r"of rows of (24 b|12 f)",
        ),
        (no_rows, "plan 1: dispatch of rows of|local_allreduce: expected the same"),
        (other_outputs, r"plan 1: combine of rows of (24 bfloat16|12 float32); rank \d"),
        (other_plan, r"plan (1|2): combine of rows of 24 float32; rank \d in plan (1|2): combine"),
        (
            other_gradient,
            r"plan (1|2): the gradient of dispatch of rows of 24 float32; rank \d in plan (1|2)",
        ),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_bytes_do_not_tell_apart_is_an_error(
    group: Any, work: Callable[..., Any], said: str, backend: str
) -> None:
    """Both are told: each has what the other says. One may hear of the other's leaving before it
    has read that."""
    errors = outcomes(group(2, backend), work)
    assert {type(error) for error in errors} <= {rm.CollectiveMismatchError, rm.RankLostError}, (
        errors
    )
    assert any(
        isinstance(error, rm.CollectiveMismatchError) and re.search(said, str(error))
        for error in errors
    ), errors


@pytest.mark.parametrize(
    "wrong, error",
    [
        ({"n": 41}, rm.CapacityError),
        ({"first": EXPERTS - 1}, rm.RequestError),
        ({"first": -1}, rm.RequestError),
        ({"k": 2}, rm.ShapeError),
        ({"hidden": 3 * HIDDEN}, rm.LayoutError),
    ],
)
def test_what_one_rank_may_not_ask_ends_the_group(
    group: Any, wrong: dict[str, int], error: type[Exception]
) -> None:
    ends = group(2)
    mine, theirs = outcomes(ends, lambda r, end: call(end, **({} if r else wrong)))
    assert type(mine) is error, mine
    assert type(theirs) is rm.RankLostError, theirs
    assert [type(e) for e in outcomes(ends, lambda r, end: call(end))] == [type(theirs)] * 2


def test_the_core_ends_the_group_itself() -> None:
    """As above, but that nobody calls abort."""
    ends = _core.dispatchers(2, EXPERTS, TOP_K, 4, 8, "alltoall", SECONDS)
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(ends[1].plan, np.empty((0, TOP_K), np.int32))
        with pytest.raises(
            rm.RequestError, match="row 0 of ids: expected distinct experts, got expert 5 twice"
        ):
            ends[0].plan(np.full((1, TOP_K), 5, np.int32))
        assert type(theirs.exception()) is rm.RankLostError


@pytest.mark.parametrize(
    "wrong, error",
    [
        (lambda end: end.dispatch(np.ones((2, 3)), torch.ones(2, 3)), rm.UnsupportedTensorError),
        (
            lambda end: end.dispatch(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int64)),
            rm.DTypeError,
        ),
        (
            lambda end: end.dispatch(torch.ones(2), torch.ones(2, 3, dtype=torch.int32)),
            rm.ShapeError,
        ),
        (
            lambda end: end.dispatch(torch.ones(3, 3), torch.ones(2, 3, dtype=torch.int32)),
            rm.ShapeError,
        ),
        (
            lambda end: end.dispatch(
                torch.ones(1, 3, dtype=torch.half, requires_grad=True), torch.arange(3).int()[None]
            ),
            rm.DTypeError,
        ),
        (
            lambda end: end.dispatch(torch.ones(1, 3), torch.zeros(1, 3, dtype=torch.int32)),
            rm.RequestError,
        ),
        (
            lambda end: end.combine(
                torch.ones(12, HIDDEN).half(), torch.ones(4, TOP_K), call(end).plan
            ),
            rm.DTypeError,
        ),
        (
            lambda end: end.combine(
                torch.ones(12, HIDDEN), torch.ones(4, TOP_K).double(), call(end).plan
            ),
            rm.DTypeError,
        ),
        (
            lambda end: end.combine(torch.ones(12, HIDDEN), torch.ones(5, TOP_K), call(end).plan),
            rm.ShapeError,
        ),
        (
            lambda end: end.combine(torch.ones(11, HIDDEN), torch.ones(4, TOP_K), call(end).plan),
            rm.ShapeError,
        ),
        (
            lambda end: end.combine(torch.ones(12, HIDDEN), torch.ones(4, TOP_K), None),
            rm.StateError,
        ),
        (
            lambda end: end.combine(torch.ones(12, HIDDEN), torch.ones(4, TOP_K), call(end)),
            rm.StateError,
        ),
    ],
)
def test_wrong_tensors_are_refused(
    group: Any, wrong: Callable[[TokenDispatcher], Any], error: type[Exception]
) -> None:
    [end] = group(1)
    with pytest.raises(error):
        wrong(end)
    assert len(call(end).rows) == 4 * TOP_K  # one rank has no group that could end


def test_a_plan_is_of_its_dispatcher(group: Any) -> None:
    a, b = group(1)[0], group(1)[0]
    with pytest.raises(rm.StateError, match="expected a plan of this dispatcher"):
        b.combine(call(a).rows, torch.ones(4, TOP_K), call(a).plan)
    a.close()
    a.close()
    with pytest.raises(rm.StateError, match="closed"):
        call(a)


@pytest.mark.parametrize(
    "ranks, changes, said",
    [
        (2, {"backend": "deepep"}, "got 'deepep', which lacks .*deep_ep package.*NVSHMEM"),
        (2, {"backend": "magic"}, "expected one of disabled, local_allreduce"),
        (2, {"backend": "disabled"}, 'for 2 ranks, got "disabled"'),
        (3, {}, "ep=3 does not divide num_experts=8"),
        (2, {"top_k": 9}, r"num_experts=8\), got 9"),
        (2, {"max_rows": 0}, "max_rows: expected .*got 0"),
        (2, {"hidden": 0}, "hidden: expected .*got 0"),
        (2, {"hidden": 2**62}, "hidden: expected .*got 4611686018427387904"),
        (2, {"num_experts": 2**70}, "num_experts: .*got "),
        (2, {"top_k": 2.0}, "top_k: expected an integer.*got 2.0"),
        (2, {"dtype": "float32"}, "dtype: expected a torch.dtype.*got 'float32'"),
        (0, {}, r"num_ranks: expected an integer in \[1, 64\].*got 0"),
        (65, {}, "num_ranks: expected .*got 65"),
        (2**31, {}, "num_ranks: expected .*got 2147483648"),
        *(
            (2, {"timeout": timeout}, f"timeout: expected seconds .*got {timeout}")
            for timeout in (0, -1.0, math.nan, math.inf, True)
        ),
        (2, {"timeout": "1"}, "timeout: expected seconds.*got '1'"),
    ],
)
def test_wrong_settings_are_refused(ranks: int, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(rm.ConfigError, match=said):
        token_dispatchers(ranks, **(SIZES | changes))


def test_more_rows_than_can_be_counted() -> None:
    with pytest.raises(rm.LimitError, match="max_rows=2000000000"):
        token_dispatchers(2, **(SIZES | {"max_rows": 2_000_000_000}))


# --------------------------------------------------------------------------------------- the rest
class Mailbox:
    """An exchange in Python for two ranks that are threads: what a process group does."""

    def __init__(self) -> None:
        self.parts: list[list[bytes]] = [[], []]
        self.barrier = threading.Barrier(2, timeout=SECONDS)

    def of(self, rank: int) -> Callable[..., list[bytes]]:
        def exchange(
            op: int, sequence: int, epoch: int, timeout: float, send: list[bytes], sizes: list[int]
        ) -> list[bytes]:
            self.parts[rank] = send
            self.barrier.wait()
            got = [part[rank] for part in self.parts]
            self.barrier.wait()
            return got

        return exchange


def test_over_an_end_of_a_group(rng: np.random.Generator) -> None:
    box, block, n = Mailbox(), Block.random(rng, "float32"), 17
    comms = [_core.Comm(box.of(r), r, 2) for r in range(2)]
    with pytest.raises(rm.ConfigError):
        token_dispatcher(comms[0], **(SIZES | {"top_k": 0}))  # and the end is left to its owner
    ends = [token_dispatcher(comm, **SIZES) for comm in comms]
    with pytest.raises(rm.StateError):
        token_dispatcher(comms[0], **SIZES)
    x = random_rows(rng, n)
    (ids, gates), cut = map(torch.from_numpy, block.route(x.numpy())), runs(n, 2, "alltoall")
    got = together(ends, lambda r, end: block.on_rank(end, x[cut[r]], ids[cut[r]], gates[cut[r]]))
    assert same(torch.cat(got), tensor(block.whole(x.numpy())))


def digest(*tensors: Tensor) -> str:
    return hashlib.sha256(b"".join(bits(t).numpy().tobytes() for t in tensors)).hexdigest()


def comm_of(rank: int, name: str) -> rm.comm.Comm:
    """Over shared memory, or over Gloo where the name is a path."""
    if "/" not in name:
        return rm.comm.shm(name, rank, 2, timeout=300.0)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{name}", rank=rank, world_size=2
    )
    atexit.register(torch.distributed.destroy_process_group)
    return rm.comm.torch(timeout=300.0)


def of_a_process(rank: int, name: str) -> list[str]:
    """Digests of what this rank gets, the block's output and then output and gradients of two
    layers; of one rank's where there is no name."""
    rng, own = np.random.default_rng(5), runs(17, 2, "alltoall")[rank]
    block, x = Block.random(rng, "bfloat16"), random_rows(rng, 17, torch.bfloat16)
    batch, weights = Batch.random(rng, 17, torch.float32), random_rows(rng, EXPERTS)
    if not name:
        [end] = token_dispatchers(1, **SIZES)
        whole, here = (
            train(end, batch, weights, 2),
            slice(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2),
        )
        return [
            digest(tensor(block.whole(words(x)))[own]),
            digest(*(t[own] for t in whole[:3]), whole.weights[here]),
        ]
    end = token_dispatcher(comm_of(rank, name).connect(rm.Mesh(tp=2, ep=2)).ep, **SIZES)
    ids, gates = map(torch.from_numpy, block.route(words(x)))
    return [
        digest(block.on_rank(end, x[own], ids[own], gates[own])),
        digest(*train(end, batch.on(own), weights, 2)),
    ]


def refused_on_rank_1(rank: int, name: str) -> list[Any]:
    """What each rank is told, and when; both live until their input ends."""
    end = token_dispatcher(comm_of(rank, name).connect(rm.Mesh(tp=2, ep=2)).ep, **SIZES)
    [error] = outcomes([end], lambda _, end: call(end, first=EXPERTS - TOP_K + rank))
    return [type(error).__name__, time.monotonic(), error]


def of_processes(
    function: Callable[[int, str], list[Any]], folder: Path, transport: str
) -> list[list[str]]:
    """What two ranks that are processes say, in words."""
    name = (
        str(folder / "rendezvous")
        if transport == "torch"
        else f"test-dispatch-{secrets.token_hex(8)}"
    )
    code = (
        f"import sys, test_dispatch_op as t; print(*t.{function.__name__}(int(sys.argv[1]), "
        "sys.argv[2]), flush=True); sys.stdin.read()"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(r), name],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    try:
        lines = [rank.stdout.readline().split() for rank in ranks if rank.stdout is not None]
        for rank in ranks:
            rank.communicate(timeout=600)
    finally:
        for rank in ranks:
            rank.kill()
    return lines


@pytest.mark.parametrize("transport", [full("shm"), full("torch")])
def test_over_processes(tmp_path: Path, transport: str) -> None:
    assert of_processes(of_a_process, tmp_path, transport) == [
        of_a_process(r, "") for r in range(2)
    ]


@pytest.mark.full
@pytest.mark.parametrize("transport", ["shm", full("torch")])
def test_a_process_that_gives_up_is_heard_of(
    tmp_path: Path, transport: str, pytestconfig: pytest.Config
) -> None:
    """At once, and not at the deadline of 300 s; it does not end."""
    theirs, mine = of_processes(refused_on_rank_1, tmp_path, transport)
    assert mine[0] == "RequestError"
    assert theirs[0] == "RankLostError"
    assert "rank 1" in " ".join(theirs)
    seconds = float(theirs[1]) - float(mine[1])
    assert seconds < 30
    pytestconfig.stash[SUMMARY].append(
        f"{transport}: a dispatcher that gave up was known to the other after "
        f"{1000 * seconds:.1f} ms"
    )


def test_one_thread_at_a_time(group: Any) -> None:
    """Two threads on one end, whose peer never comes: one is refused, and that ends the wait of the
    other."""
    end = group(2, timeout=600.0)[0]
    errors = outcomes([end, end], lambda r, end: call(end))
    assert {type(error) for error in errors} == {rm.StateError, rm.RankLostError}, errors


def test_buffers_are_sized_once(group: Any, rng: np.random.Generator) -> None:
    def held(tokens: tuple[int, ...]) -> tuple[int, int]:
        for n in tokens:
            batch = Batch.random(rng, n, torch.float32)
            train_all(ends, [batch.on(rows) for rows in runs(n, 2, "alltoall")], weights)
        gc.collect()  # what earlier tests left in cycles, once
        return _core.memory_mapped(), _core.memory_blocks()

    ends, weights = group(2), random_rows(rng, EXPERTS, torch.float32)
    before = held((1,))
    assert held(TOKENS) == before
    for end in ends:
        end.close()
    assert _core.memory_mapped() < before[0]
