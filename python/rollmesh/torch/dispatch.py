"""Expert-parallel dispatch and combine for PyTorch, with gradients: the generator's own
(csrc/model/moe/dispatch.h), so that trainer and generator compute the same function.

    sent = dispatcher.dispatch(x, ids)                # rows at this rank's experts, sorted by
                                                      expert
    y = experts(sent.rows, sent.group_rows)           # any function of a row and its expert
    out = dispatcher.combine(y, gates, sent.plan)     # Σ gate · y at the rows' home, by the
                                                      contract's tree

All ranks of the group make the same calls in the same order, in the backward pass too. A rank
without rows passes empty tensors, has its output in its loss, and asks for the same gradients as
the others. Values and gradients do not depend, bit for bit, on the number of ranks, the backend,
padding, or the grad mode: the gradient of y is sent to the experts as one row for each choice; that
of x is sent back and added up in the order that combine uses.

All tensors of a call are on one device. Rows of GPU tensors are exchanged through the host; sums
are those of cuda_fma, with the CPU's bits.

With "local_allreduce", x, ids and gates have to be equal on all ranks; so is the output, and so
must its gradient be.

A call that fails on one rank ends the group: the other ranks raise RankLostError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollmesh import _core
from rollmesh.distributed.comm import MAX_TIMEOUT_S
from rollmesh.distributed.mesh import check_backend
from rollmesh.errors import (
    ConfigError,
    DTypeError,
    LayoutError,
    ShapeError,
    StateError,
    UnsupportedTensorError,
)
from rollmesh.runtime.arguments import REAL, integer
from rollmesh.runtime.messages import shown
from rollmesh.torch.arrays import combine

MAX_RANKS = 64  # that are threads
GATE_DTYPES = {
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


class Dispatched(NamedTuple):
    """rows [rows here, hidden] at this rank's experts. Rows group_rows[e] to group_rows[e + 1]
    belong to the e-th expert of this rank, ordered by home rank, then row. plan: for combine."""

    rows: Tensor
    group_rows: Tensor
    plan: _core.DispatchPlan


class TokenDispatcher:
    """One rank of a group over which experts are spread evenly: rank r of n has the r-th of n equal
    parts. One thread at a time."""

    def __init__(self, core: _core.Dispatcher):
        self._core = core

    @property
    def experts(self) -> range:
        """The experts of this rank."""
        return range(*self._core.experts)

    def dispatch(self, x: Tensor, ids: Tensor) -> Dispatched:
        """Sends the rows of x [rows, hidden] to the ranks of their experts, ids int32 [rows,
        top_k]. A row of negative ids is padding: it is not sent; combine gives zeros for it, and
        its gradient is zero.

        RequestError: an id out of range or twice in a row. CapacityError: more rows than max_rows.
        CollectiveMismatchError: ranks that are in different calls, or disagree on sizes or
        dtype."""
        with _all_or_none(self._core):
            _check("x", x, 2, None)
            _check("ids", ids, 2, torch.int32)
            _on_one_device("ids", ids, "x", x)
            if x.requires_grad and x.dtype not in GATE_DTYPES:
                raise DTypeError(
                    f"x: expected one of {', '.join(map(str, GATE_DTYPES))}, since it requires "
                    f"grad, got {x.dtype}"
                )
            if len(x) != len(ids):
                raise ShapeError(f"ids: expected {len(x)} rows, as x has, got {len(ids)}")
            plan = self._core.plan(ids.detach().cpu().contiguous().numpy())
        rows: Tensor = _Dispatch.apply(x, self._core, plan)  # type: ignore[no-untyped-call]
        return Dispatched(rows, torch.from_numpy(plan.group_rows).to(x.device), plan)

    def combine(self, y: Tensor, gates: Tensor, plan: _core.DispatchPlan) -> Tensor:
        """Σ gate · y of each row at its home rank, [rows, hidden], rounded once. y: the experts'
        outputs for the rows of `plan`, in their order. gates [rows, top_k]: float32, or float64 if
        y is.

        StateError: a plan of another dispatcher. CollectiveMismatchError: plans of different
        dispatch calls, and as dispatch."""
        with _all_or_none(self._core):
            if not isinstance(plan, _core.DispatchPlan):
                raise StateError(f"plan: expected a plan of this dispatcher, got {shown(plan)}")
            _check("y", y, 2, None)
            if y.dtype not in GATE_DTYPES:
                raise DTypeError(
                    f"y: expected one of {', '.join(map(str, GATE_DTYPES))}, got {y.dtype}"
                )
            _check("gates", gates, 2, GATE_DTYPES[y.dtype])
            _on_one_device("gates", gates, "y", y)
            if gates.shape != (plan.num_rows, self._core.top_k):
                raise ShapeError(
                    f"gates: expected shape {(plan.num_rows, self._core.top_k)}, got "
                    f"{tuple(gates.shape)}"
                )
        out: Tensor = _Combine.apply(y, gates, self._core, plan)  # type: ignore[no-untyped-call]
        return out

    def abort(self) -> None:
        """Ends the group, for a rank that cannot go on: calls of the other ranks raise
        RankLostError, also those that wait already."""
        self._core.abort()

    def close(self) -> None:
        self._core.close()


# --------------------------------------------------------------------------------------- creation
def token_dispatcher(
    comm: _core.Comm | None,
    *,
    num_experts: int,
    top_k: int,
    hidden: int,
    max_rows: int,
    dtype: torch.dtype = torch.float32,
    backend: str = "alltoall",
) -> TokenDispatcher:
    """The dispatcher of this process over `comm`, such as rm.comm.shm(…).connect(mesh).ep, which it
    owns from now on; None for one rank. Allocates buffers for `max_rows` rows of `hidden` elements
    of `dtype` on each rank.

    ConfigError: ranks that do not divide num_experts, a backend that this build lacks or that does
    not fit, "disabled" on several."""
    return TokenDispatcher(
        _core.Dispatcher(comm, *_settings(num_experts, top_k, hidden, max_rows, dtype, backend))
    )


def token_dispatchers(
    num_ranks: int,
    *,
    num_experts: int,
    top_k: int,
    hidden: int,
    max_rows: int,
    dtype: torch.dtype = torch.float32,
    backend: str = "alltoall",
    timeout: float = 60.0,
) -> list[TokenDispatcher]:
    """As token_dispatcher, for ranks that are threads of this process. timeout: seconds that a call
    waits for the other ranks."""
    integer("num_ranks", num_ranks, 1, MAX_RANKS)
    if (
        isinstance(timeout, bool)
        or not isinstance(timeout, REAL)
        or not 0 < timeout <= MAX_TIMEOUT_S
    ):
        raise ConfigError(
            f"timeout: expected seconds above 0, at most {MAX_TIMEOUT_S}, got {shown(timeout)}"
        )
    settings = _settings(num_experts, top_k, hidden, max_rows, dtype, backend)
    return [
        TokenDispatcher(core) for core in _core.dispatchers(num_ranks, *settings, float(timeout))
    ]


def _settings(
    num_experts: int, top_k: int, hidden: int, max_rows: int, dtype: torch.dtype, backend: str
) -> tuple[int, int, int, int, str]:
    """The arguments of _core.Dispatcher."""
    sizes = {"num_experts": num_experts, "top_k": top_k, "max_rows": max_rows, "hidden": hidden}
    experts, k, rows, width = (integer(name, value, 1, 2**31 - 1) for name, value in sizes.items())
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype: expected a torch.dtype, got {shown(dtype)}")
    return experts, k, rows, width * dtype.itemsize, check_backend(backend)


# ------------------------------------------------------------------------------------------ moves
@contextmanager
def _all_or_none(core: _core.Dispatcher) -> Iterator[None]:
    """Aborts the group if this rank fails, so that the others do not wait for it."""
    try:
        yield
    except BaseException:
        core.abort()
        raise


def _check(name: str, tensor: Tensor, dims: int, dtype: torch.dtype | None) -> None:
    if not isinstance(tensor, Tensor):
        raise UnsupportedTensorError(
            f"{name}: expected a torch tensor, got a {type(tensor).__name__}"
        )
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout != torch.strided:
        seen = f"a {tensor.layout} one on {tensor.device}"
        raise UnsupportedTensorError(
            f"{name}: expected a dense tensor on the CPU or a CUDA device, got {seen}"
        )
    if tensor.ndim != dims:
        raise ShapeError(f"{name}: expected {dims} dims, got {tensor.ndim}")
    if dtype is not None and tensor.dtype != dtype:
        raise DTypeError(f"{name}: expected {dtype}, got {tensor.dtype}")
    if tensor.is_conj() or tensor.is_neg():
        raise LayoutError(
            f"{name}: expected stored values, got a lazy conjugate or negative; resolve_conj() or "
            "resolve_neg() first"
        )


def _on_one_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.device != other.device:
        raise UnsupportedTensorError(
            f"expected tensors on one device, got {name} on {tensor.device} and {other_name} on "
            f"{other.device}"
        )


def _bytes(rows: Tensor) -> NDArray[np.uint8]:
    """The memory of contiguous rows. Through one dim: torch takes no view of another element size
    where a dim has 0 or 1 entries."""
    return rows.view(-1).view(torch.uint8).numpy().reshape(len(rows), rows.shape[1] * rows.itemsize)


Move = Callable[[str, _core.DispatchPlan, NDArray[np.uint8], NDArray[np.uint8]], None]


def _move(move: Move, call: str, plan: _core.DispatchPlan, rows: Tensor, num_out: int) -> Tensor:
    """Moves rows, and checks that all ranks move rows of the same width and dtype in the same call.
    The result is on the rows' device."""
    out = torch.empty(num_out, rows.shape[1], dtype=rows.dtype)
    what = f"{call} of rows of {rows.shape[1]} {str(rows.dtype).removeprefix('torch.')}"
    move(what, plan, _bytes(rows.detach().cpu().contiguous()), _bytes(out))
    return out.to(rows.device)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, core: _core.Dispatcher, plan: _core.DispatchPlan) -> Tensor:
        ctx.core, ctx.plan = core, plan
        with _all_or_none(core):
            return _move(core.out, "dispatch", plan, x, plan.num_arrive)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        core, plan = ctx.core, ctx.plan
        with _all_or_none(core):
            choices = _move(core.back, "the gradient of dispatch", plan, grad, plan.num_choices)
            ones = torch.ones(
                plan.num_rows,
                core.top_k,
                dtype=GATE_DTYPES.get(grad.dtype, torch.float32),
                device=grad.device,
            )
            return _add_up(choices, ones, core, plan), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, gates: Tensor, core: _core.Dispatcher, plan: _core.DispatchPlan
    ) -> Tensor:
        ctx.core, ctx.plan = core, plan
        with _all_or_none(core):
            choices = _move(core.back, "combine", plan, y, plan.num_choices)
            ctx.save_for_backward(choices, gates)
            return _add_up(choices, gates, core, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        core, plan = ctx.core, ctx.plan
        choices, gates = ctx.saved_tensors
        real, place = _places(plan, grad.device)
        wide, grad_y, grad_gates = gates.dtype, None, None
        with _all_or_none(core):
            each = grad[real].to(wide)[:, None, :]
            if ctx.needs_input_grad[1]:
                grad_gates = torch.zeros_like(gates)
                grad_gates[real] = _sum_of_halves(each * choices[place].to(wide))
            if ctx.needs_input_grad[0]:
                grad_choices = torch.empty_like(choices)
                grad_choices[place] = (gates[real][:, :, None] * each).to(choices.dtype)
                grad_y = _move(
                    core.out_each, "the gradient of combine", plan, grad_choices, plan.num_arrive
                )
        return grad_y, grad_gates, None, None


# ------------------------------------------------------------------------------------------- sums
def _places(plan: _core.DispatchPlan, device: torch.device) -> tuple[Tensor, Tensor]:
    """(indices of the rows that are not padding, indices of their choices [such rows, top_k])."""
    place = torch.from_numpy(plan.place)
    real = torch.nonzero(place[:, 0] >= 0)[:, 0]
    return real.to(device), place[real].long().to(device)


def _add_up(
    choices: Tensor, gates: Tensor, core: _core.Dispatcher, plan: _core.DispatchPlan
) -> Tensor:
    """Σ gate · choice of each row [num_rows, hidden] by the contract's tree; zeros for padding."""
    out = torch.zeros(plan.num_rows, choices.shape[1], dtype=choices.dtype, device=choices.device)
    real, place = _places(plan, choices.device)
    if not len(real):
        return out
    if choices.dtype == torch.float64:
        out[real] = _tree(
            choices[place],
            gates[real],
            torch.from_numpy(plan.ids).to(choices.device),
            core.num_experts,
        )
    else:
        of_choices = plan.place
        of_choices = np.ascontiguousarray(of_choices[of_choices[:, 0] >= 0])
        out[real] = combine(
            choices, of_choices, plan.ids, gates.detach()[real].contiguous(), core.num_experts
        )
    return out


def _tree(values: Tensor, gates: Tensor, ids: Tensor, num_experts: int) -> Tensor:
    """docs/numerics.md §5 in torch: gate · value [rows, top_k, hidden] at its expert's leaf of a
    complete binary tree, a node being left + right. A leaf of no choice is a zero, which adds
    nothing; no zero that comes out has a sign."""
    leaves = torch.zeros(
        len(ids),
        1 << (num_experts - 1).bit_length(),
        values.shape[2],
        dtype=values.dtype,
        device=values.device,
    )
    leaves[torch.arange(len(ids), device=ids.device)[:, None], ids.long()] = (
        gates[:, :, None] * values
    )
    while leaves.shape[1] > 1:
        leaves = leaves[:, 0::2] + leaves[:, 1::2]
    return leaves[:, 0] + 0.0


def _sum_of_halves(values: Tensor) -> Tensor:
    """Over the last dim, in an order that depends on its size alone: torch's own sum may take
    another with the number of rows."""
    while values.shape[-1] > 1:
        half = (values.shape[-1] + 1) // 2
        rest = values[..., half:]
        values = torch.cat(
            [values[..., : rest.shape[-1]] + rest, values[..., rest.shape[-1] : half]], -1
        )
    return values[..., 0] if values.shape[-1] else values.sum(-1)
