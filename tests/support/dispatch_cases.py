"""What the tests of the token dispatcher work on: ranks that are threads, a mixture of experts by
rollmesh.ops, and a batch with the gradient of its output. 8 experts, 3 of them for a row."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import rollmesh as rm
from rollmesh import ops
from rollmesh.torch import TokenDispatcher

EXPERTS, TOP_K, HIDDEN, WIDTH = 8, 3, 24, 20
TOKENS = (0, 1, 2, 5, 17, 31)
BACKENDS = ("alltoall", "allgather_reducescatter", "local_allreduce")
MESHES = [(1, "disabled"), *((ranks, backend) for ranks in (1, 2, 4) for backend in BACKENDS)]
SECONDS = 120.0  # that a call waits: a test that fails does not hang
SIZES: dict[str, Any] = {
    "num_experts": EXPERTS,
    "top_k": TOP_K,
    "hidden": HIDDEN,
    "max_rows": 40,
    "dtype": torch.float64,
}


def outcomes(ends: list[TokenDispatcher], work: Callable[[int, TokenDispatcher], Any]) -> list[Any]:
    """What `work` gave on each rank, or the exception that it ended with."""

    def rank(index: int) -> Any:
        try:
            return work(index, ends[index])
        except Exception as error:  # noqa: BLE001 - it is what the tests look at
            if not isinstance(error, rm.Error):  # of those the others hear from the dispatcher
                ends[index].abort()
            return error

    with ThreadPoolExecutor(len(ends)) as pool:
        return list(pool.map(rank, range(len(ends))))


def together(ends: list[TokenDispatcher], work: Callable[[int, TokenDispatcher], Any]) -> list[Any]:
    results = outcomes(ends, work)
    errors = [result for result in results if isinstance(result, Exception)]
    for error in sorted(
        errors, key=lambda e: isinstance(e, rm.RankLostError)
    ):  # the cause before what followed from it
        raise error
    return results


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
    )


class Block(NamedTuple):
    """A mixture of experts by rollmesh.ops, its weights in the dtype's packed form."""

    router: Any
    gate: Any
    up: Any
    down: Any
    dtype: str

    @staticmethod
    def random(rng: np.random.Generator, dtype: str) -> Block:
        def weights(*shape: int) -> Any:
            return rng.standard_normal(shape, dtype=np.float32)

        inner, outer = (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
        return Block(
            ops.pack(weights(EXPERTS, HIDDEN), dtype=dtype),
            weights(*inner),
            weights(*inner),
            weights(*outer),
            dtype,
        )

    def route(self, x: Any) -> ops.Routing:
        return ops.router(x, self.router, EXPERTS, TOP_K)

    def experts(self, rows: Any, group_rows: Any, which: slice = slice(None)) -> Any:
        up = ops.pack_gate_up(self.gate[which], self.up[which], dtype=self.dtype)
        inner = ops.gemm_swiglu(rows, up, WIDTH, group_rows=group_rows)
        return ops.gemm(
            inner, ops.pack(self.down[which], dtype=self.dtype), HIDDEN, group_rows=group_rows
        )

    def whole(self, x: Any) -> Any:
        ids, gates = self.route(x)
        rows, group_rows, place = ops.permute(x, ids, EXPERTS)
        return ops.combine(self.experts(rows, group_rows), place, ids, gates, EXPERTS)

    def on_rank(self, end: TokenDispatcher, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        sent = end.dispatch(x, ids)
        y = self.experts(
            words(sent.rows), sent.group_rows.numpy(), slice(end.experts.start, end.experts.stop)
        )
        return end.combine(tensor(y), gates, sent.plan)


def words(x: Tensor) -> Any:
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def tensor(array: Any) -> Tensor:
    return (
        torch.from_numpy(array).view(torch.bfloat16)
        if array.dtype == np.uint16
        else torch.from_numpy(array)
    )


def random_rows(rng: np.random.Generator, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(rng.standard_normal((n, HIDDEN))).to(dtype)


def random_routing(
    rng: np.random.Generator, n: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """(ids, gates), some gates negative, so that a sum's order shows."""
    ids = np.array([rng.permutation(EXPERTS)[:TOP_K] for _ in range(n)], np.int32).reshape(n, TOP_K)
    return torch.from_numpy(ids), torch.from_numpy(rng.standard_normal((n, TOP_K))).to(dtype)


def runs(n: int, ranks: int, backend: str) -> list[slice]:
    """Each rank's rows; local_allreduce has them all everywhere."""
    each = -(-n // ranks)
    return [
        slice(0, n) if backend == "local_allreduce" else slice(each * r, min(each * (r + 1), n))
        for r in range(ranks)
    ]


class Batch(NamedTuple):
    x: Tensor
    ids: Tensor
    gates: Tensor
    pull: Tensor  # the gradient of the output

    @staticmethod
    def random(rng: np.random.Generator, n: int, dtype: torch.dtype) -> Batch:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return Batch(
            random_rows(rng, n, dtype), *random_routing(rng, n, wide), random_rows(rng, n, dtype)
        )

    def on(self, rows: slice) -> Batch:
        return Batch(*(values[rows] for values in self))

    def padded(self, rows: Tensor, n: int) -> Batch:
        """n rows, of which `rows` are ours; the others are NaN."""
        full = [
            torch.full((n, t.shape[1]), -1 if t is self.ids else np.nan, dtype=t.dtype)
            for t in self
        ]
        return Batch(*(to.index_copy(0, rows, values) for to, values in zip(full, self)))


class Trained(NamedTuple):
    out: Tensor
    x: Tensor  # gradients from here on
    gates: Tensor
    weights: Tensor


def train(end: TokenDispatcher, batch: Batch, weights: Tensor, layers: int = 1) -> Trained:
    """tanh(row · weight of the expert), `layers` times through one dispatcher, and the gradients of
    Σ pull · out."""
    own = weights[end.experts.start : end.experts.stop].clone().requires_grad_()
    x, gates = batch.x.clone().requires_grad_(), batch.gates.clone().requires_grad_()
    out = x
    for _ in range(layers):
        sent = end.dispatch(out, batch.ids)
        per_row = own.repeat_interleave(sent.group_rows.diff(), 0)
        out = end.combine(torch.tanh(sent.rows * per_row), gates, sent.plan)
    out.backward(batch.pull)
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in (x, gates, own)]
    return Trained(out.detach(), *grads)


def train_all(
    ends: list[TokenDispatcher], parts: list[Batch], weights: Tensor, layers: int = 1
) -> list[Trained]:
    return together(ends, lambda r, end: train(end, parts[r], weights, layers))


# --------------------------------------------------------------------- ranks that have come apart
def dispatch(
    end: TokenDispatcher, dtype: torch.dtype = torch.float32, hidden: int = HIDDEN, n: int = 4
) -> Any:
    """To expert 0 and the last ones; n = 0: a rank without rows."""
    return end.dispatch(
        torch.ones(n, hidden, dtype=dtype),
        torch.tensor([[0, 6, 7]], dtype=torch.int32).repeat(n, 1),
    )


def other_rows(r: int, end: TokenDispatcher, n: int = 4) -> Any:
    """Of equal bytes, which is all that the transport counts."""
    return (
        dispatch(end, torch.bfloat16, HIDDEN, n) if r else dispatch(end, torch.float32, HIDDEN // 2)
    )


def no_rows(r: int, end: TokenDispatcher) -> Any:
    return other_rows(r, end, n=0)


def other_outputs(r: int, end: TokenDispatcher) -> Any:
    sent = dispatch(end)
    y = sent.rows.bfloat16() if r else sent.rows[:, : HIDDEN // 2]
    return end.combine(y, torch.ones(4, TOP_K), sent.plan)


def other_plan(r: int, end: TokenDispatcher) -> Any:
    """Two batches that look alike; rank 1 takes the plan of the first where rank 0 takes that of
    the second."""
    first, second = dispatch(end), dispatch(end)
    return end.combine(second.rows, torch.ones(4, TOP_K), (first if r else second).plan)


def other_gradient(r: int, end: TokenDispatcher) -> Any:
    """Two layers side by side, whose gradients rank 1 asks for in another order."""
    layers = [
        end.dispatch(
            torch.ones(4, HIDDEN, requires_grad=True), torch.arange(TOP_K).int().repeat(4, 1)
        )
        for _ in range(2)
    ]
    for layer in layers[:: 1 - 2 * r]:
        layer.rows.sum().backward()
