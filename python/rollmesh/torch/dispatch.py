"""Token rows to the ranks of their experts and back, with gradients: the generator's own dispatch (csrc/model/moe/dispatch.h) and
combination for a trainer, so that both compute one function.

    sent = dispatcher.dispatch(x, ids)                # rows at this rank's experts, sorted by expert
    y = experts(sent.rows, sent.group_rows)           # any function of a row and its expert
    out = dispatcher.combine(y, gates, sent.plan)     # Σ gate · y at the rows' home, by the contract's tree

Every rank of the group makes the same calls in the same order, in the backward pass too: a rank without rows calls them with empty
tensors, has its output in its loss, and asks for the gradients that the others ask for. The values are the same under grad, no_grad
and inference_mode, and with any number of ranks, any backend and any padding. Gradients travel the same way: that of y goes out as
a row for each choice, that of x comes back and is added up by the same tree, so they do not depend on the mesh either.

Tensors may be a GPU's, all of a call on one. Rows travel between ranks by way of the host, as the exchange itself does; sums, and so
the bits, are those of the GPU's family cuda_fma, which are the CPU's.

With "local_allreduce" x, ids and gates are the same on all ranks, and so is the output and what its gradient has to be.

A call that fails on one rank ends the group: the others get RankLostError, and not a wait.
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
from rollmesh.errors import ConfigError, DTypeError, LayoutError, ShapeError, StateError, UnsupportedTensorError
from rollmesh.runtime.arguments import REAL, integer
from rollmesh.runtime.messages import shown
from rollmesh.torch.arrays import combine

MAX_RANKS = 64  # that are threads
GATE_DTYPES = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}


class Dispatched(NamedTuple):
    """rows [rows here, hidden] sorted by expert; rows group_rows[e] … group_rows[e + 1] are those of the e-th expert of this rank, by
    rank, then row. The plan is what combine wants."""

    rows: Tensor
    group_rows: Tensor
    plan: _core.DispatchPlan


class TokenDispatcher:
    """One rank's end of a group of ranks that share experts out: rank r of n has the r-th n-th of them. One thread at a time."""

    def __init__(self, core: _core.Dispatcher):
        self._core = core

    @property
    def experts(self) -> range:
        """Those of this rank."""
        return range(*self._core.experts)

    def dispatch(self, x: Tensor, ids: Tensor) -> Dispatched:
        """Rows of x [rows, hidden] to the ranks of their experts, ids int32 [rows, top_k]. A row of negative ids is padding: it goes
        nowhere, combine gives zeros for it and its gradient is zero.

        RequestError: an id out of range or twice in a row. CapacityError: more rows than max_rows. CollectiveMismatchError: ranks
        that are in different calls, or disagree on sizes or dtype."""
        with _all_or_none(self._core):
            _check("x", x, 2, None)
            _check("ids", ids, 2, torch.int32)
            _on_one_device("ids", ids, "x", x)
            if x.requires_grad and x.dtype not in GATE_DTYPES:
                raise DTypeError(f"x: expected one of {', '.join(map(str, GATE_DTYPES))}, since it requires grad, got {x.dtype}")
            if len(x) != len(ids):
                raise ShapeError(f"ids: expected {len(x)} rows, as x has, got {len(ids)}")
            plan = self._core.plan(ids.detach().cpu().contiguous().numpy())
        rows: Tensor = _Dispatch.apply(x, self._core, plan)  # type: ignore[no-untyped-call]
        return Dispatched(rows, torch.from_numpy(plan.group_rows).to(x.device), plan)

    def combine(self, y: Tensor, gates: Tensor, plan: _core.DispatchPlan) -> Tensor:
        """Σ gate · y of each row of the home, [rows, hidden], rounded once. y: what the experts made of the rows of `plan`, in their
        order; gates [rows, top_k], float32, of float64 rows float64.

        StateError: a plan of another dispatcher. CollectiveMismatchError: plans of different dispatch calls, and as dispatch."""
        with _all_or_none(self._core):
            if not isinstance(plan, _core.DispatchPlan):
                raise StateError(f"plan: expected a plan of this dispatcher, got {shown(plan)}")
            _check("y", y, 2, None)
            if y.dtype not in GATE_DTYPES:
                raise DTypeError(f"y: expected one of {', '.join(map(str, GATE_DTYPES))}, got {y.dtype}")
            _check("gates", gates, 2, GATE_DTYPES[y.dtype])
            _on_one_device("gates", gates, "y", y)
            if gates.shape != (plan.num_rows, self._core.top_k):
                raise ShapeError(f"gates: expected shape {(plan.num_rows, self._core.top_k)}, got {tuple(gates.shape)}")
        out: Tensor = _Combine.apply(y, gates, self._core, plan)  # type: ignore[no-untyped-call]
        return out

    def abort(self) -> None:
        """The others' calls fail from now on, where they wait already too: for a rank that cannot go on."""
        self._core.abort()

    def close(self) -> None:
        self._core.close()


# ---------------------------------------------------------------------------------------------- creation
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
    """This process' end over `comm`, an end of a group, such as rm.comm.shm(…).connect(mesh).ep, that is the dispatcher's from now on;
    None for one rank. Buffers are made here, for rows of up to `hidden` elements of `dtype`, `max_rows` of them on any rank.

    ConfigError: ranks that do not divide num_experts, a backend that this build lacks or that does not fit, "disabled" on several."""
    return TokenDispatcher(_core.Dispatcher(comm, *_settings(num_experts, top_k, hidden, max_rows, dtype, backend)))


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
    """The ends of ranks that are threads of this process; as token_dispatcher. timeout: seconds that a call waits for the others."""
    integer("num_ranks", num_ranks, 1, MAX_RANKS)
    if isinstance(timeout, bool) or not isinstance(timeout, REAL) or not 0 < timeout <= MAX_TIMEOUT_S:
        raise ConfigError(f"timeout: expected seconds above 0, at most {MAX_TIMEOUT_S}, got {shown(timeout)}")
    settings = _settings(num_experts, top_k, hidden, max_rows, dtype, backend)
    return [TokenDispatcher(core) for core in _core.dispatchers(num_ranks, *settings, float(timeout))]


def _settings(num_experts: int, top_k: int, hidden: int, max_rows: int, dtype: torch.dtype, backend: str) -> tuple[int, int, int, int, str]:
    """As _core wants them; what it does not check itself is whether they are numbers that it can count with."""
    sizes = {"num_experts": num_experts, "top_k": top_k, "max_rows": max_rows, "hidden": hidden}
    experts, k, rows, width = (integer(name, value, 1, 2**31 - 1) for name, value in sizes.items())
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype: expected a torch.dtype, got {shown(dtype)}")
    return experts, k, rows, width * dtype.itemsize, check_backend(backend)


# ---------------------------------------------------------------------------------------------- moves
@contextmanager
def _all_or_none(core: _core.Dispatcher) -> Iterator[None]:
    """The other ranks do not wait for one that has failed."""
    try:
        yield
    except BaseException:
        core.abort()
        raise


def _check(name: str, tensor: Tensor, dims: int, dtype: torch.dtype | None) -> None:
    if not isinstance(tensor, Tensor) or tensor.device.type not in ("cpu", "cuda") or tensor.layout != torch.strided:
        raise UnsupportedTensorError(f"{name}: expected a dense tensor on the CPU or a CUDA device, got another")
    if tensor.ndim != dims:
        raise ShapeError(f"{name}: expected {dims} dims, got {tensor.ndim}")
    if dtype is not None and tensor.dtype != dtype:
        raise DTypeError(f"{name}: expected {dtype}, got {tensor.dtype}")
    if tensor.is_conj() or tensor.is_neg():
        raise LayoutError(f"{name}: expected stored values, got a lazy conjugate or negative; resolve_conj() or resolve_neg() first")


def _on_one_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.device != other.device:
        raise UnsupportedTensorError(f"expected tensors on one device, got {name} on {tensor.device} and {other_name} on {other.device}")


def _bytes(rows: Tensor) -> NDArray[np.uint8]:
    """The memory of contiguous rows. Through one dim: torch takes no view of another element size where a dim has 0 or 1 entries."""
    return rows.view(-1).view(torch.uint8).numpy().reshape(len(rows), rows.shape[1] * rows.itemsize)


Move = Callable[[str, _core.DispatchPlan, NDArray[np.uint8], NDArray[np.uint8]], None]


def _move(move: Move, call: str, plan: _core.DispatchPlan, rows: Tensor, num_out: int) -> Tensor:
    """All ranks move rows of one kind in the same call: the bytes alone do not tell 8 bfloat16 from 4 float32. What comes is where the
    rows are."""
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
            ones = torch.ones(plan.num_rows, core.top_k, dtype=GATE_DTYPES.get(grad.dtype, torch.float32), device=grad.device)
            return _add_up(choices, ones, core, plan), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, gates: Tensor, core: _core.Dispatcher, plan: _core.DispatchPlan) -> Tensor:
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
                grad_y = _move(core.out_each, "the gradient of combine", plan, grad_choices, plan.num_arrive)
        return grad_y, grad_gates, None, None


# ---------------------------------------------------------------------------------------------- sums
def _places(plan: _core.DispatchPlan, device: torch.device) -> tuple[Tensor, Tensor]:
    """(numbers of the rows that are no padding, the places of their choices [such rows, top_k])."""
    place = torch.from_numpy(plan.place)
    real = torch.nonzero(place[:, 0] >= 0)[:, 0]
    return real.to(device), place[real].long().to(device)


def _add_up(choices: Tensor, gates: Tensor, core: _core.Dispatcher, plan: _core.DispatchPlan) -> Tensor:
    """Σ gate · choice of each row [num_rows, hidden] by the contract's tree; zeros for padding."""
    out = torch.zeros(plan.num_rows, choices.shape[1], dtype=choices.dtype, device=choices.device)
    real, place = _places(plan, choices.device)
    if not len(real):
        return out
    if choices.dtype == torch.float64:
        out[real] = _tree(choices[place], gates[real], torch.from_numpy(plan.ids).to(choices.device), core.num_experts)
    else:
        of_choices = plan.place
        of_choices = np.ascontiguousarray(of_choices[of_choices[:, 0] >= 0])
        out[real] = combine(choices, of_choices, plan.ids, gates.detach()[real].contiguous(), core.num_experts)
    return out


def _tree(values: Tensor, gates: Tensor, ids: Tensor, num_experts: int) -> Tensor:
    """docs/numerics.md §5 in torch: gate · value [rows, top_k, hidden] at its expert's leaf of a complete binary tree, a node being
    left + right. A leaf of no choice is a zero, which adds nothing; no zero that comes out has a sign."""
    leaves = torch.zeros(len(ids), 1 << (num_experts - 1).bit_length(), values.shape[2], dtype=values.dtype, device=values.device)
    leaves[torch.arange(len(ids), device=ids.device)[:, None], ids.long()] = gates[:, :, None] * values
    while leaves.shape[1] > 1:
        leaves = leaves[:, 0::2] + leaves[:, 1::2]
    return leaves[:, 0] + 0.0


def _sum_of_halves(values: Tensor) -> Tensor:
    """Over the last dim, in an order that depends on its size alone: torch's own sum may take another with the number of rows."""
    while values.shape[-1] > 1:
        half = (values.shape[-1] + 1) // 2
        rest = values[..., half:]
        values = torch.cat([values[..., : rest.shape[-1]] + rest, values[..., rest.shape[-1] : half]], -1)
    return values[..., 0] if values.shape[-1] else values.sum(-1)
