"""Refusals of the differentiable ops, and their results for no rows.

Input: small tensors of a wrong dtype, shape or kind. Oracle: the error's type and message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_torch_functions import EPS, HEADS, ROWS, rope, sequences
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import rollmesh as rm
from rollmesh.torch import functions


def f32(*shape: int) -> Tensor:
    return torch.ones(shape)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "x of float64": (
        lambda: functions.linear(f32(2, 8).double(), f32(4, 8)),
        rm.DTypeError,
        "expected torch.bfloat16 or torch.float32, got",
    ),
    "x of 3 dims": (
        lambda: functions.linear(f32(1, 2, 8), f32(4, 8)),
        rm.ShapeError,
        r"x: expected shape \[rows, width\], got \(1, 2, 8\)",
    ),
    "x that is an array": (
        lambda: functions.linear(np.ones((2, 8)), f32(4, 8)),
        rm.UnsupportedTensorError,
        "got a ndarray",
    ),  # type: ignore[arg-type]
    "columns": (
        lambda: functions.linear(f32(2, 8), f32(4, 7)),
        rm.ShapeError,
        "weight: expected 8 columns",
    ),
    "weight of integers": (
        lambda: functions.linear(f32(2, 8), torch.ones(4, 8, dtype=torch.int32)),
        rm.DTypeError,
        "weight: .*got torch.int32",
    ),
    "bias": (
        lambda: functions.linear(f32(2, 8), f32(4, 8), bias=f32(3)),
        rm.ShapeError,
        "bias: expected 4 elements, got 3",
    ),
    "norm": (
        lambda: functions.rms_norm(f32(2, 8), f32(7), EPS),
        rm.ShapeError,
        "weight: expected 8 elements, got 7",
    ),
    "residual": (
        lambda: functions.add(f32(2, 8), f32(2, 7)),
        rm.ShapeError,
        r"x: expected shape \[rows, 8\], got \(2, 7\)",
    ),
    "gate and up": (
        lambda: functions.swiglu(f32(2, 8), f32(4, 8), f32(5, 8)),
        rm.ShapeError,
        "up: expected 4 rows",
    ),
    "experts": (
        lambda: functions.moe(f32(2, 8), f32(4, 8), f32(4, 5, 8), f32(4, 8, 3), top_k=2),
        rm.ShapeError,
        r"gate_up: expected shape \(4, 6, 8\)",
    ),
    "router bias": (
        lambda: functions.moe(
            f32(2, 8), f32(4, 8), f32(4, 6, 8), f32(4, 8, 3), top_k=2, bias=f32(3)
        ),
        rm.ShapeError,
        r"bias: expected torch.float32 of shape \(4,\), got torch.float32 of shape \(3,\)",
    ),
    "rows": (
        lambda: functions.attention(f32(3, 128), f32(16), f32(16), rope(), sequences(), HEADS),
        rm.ShapeError,
        "qkv: expected 11 rows",
    ),
    "a target": (
        lambda: functions.token_logprobs(f32(2, 8), f32(4, 8), torch.tensor([1, 4])),
        rm.RequestError,
        r"in \[0, 4\), got 1 to 4",
    ),
    "targets": (
        lambda: functions.token_logprobs(f32(2, 8), f32(4, 8), torch.tensor([1])),
        rm.ShapeError,
        r"targets: .*\(2,\), got .* \(1,\)",
    ),
    "negative targets": (
        lambda: functions.token_logprobs(f32(2, 8), f32(4, 8), torch.tensor([-100, 1])),
        rm.RequestError,
        r"targets: expected tokens in \[0, 4\), got -100 to 1",
    ),
    "complex targets": (
        lambda: functions.token_logprobs(f32(1, 8), f32(4, 8), torch.tensor([1 + 0j])),
        rm.ShapeError,
        r"targets: expected integers of shape \(1,\), got torch.complex64 of shape \(1,\)",
    ),
    "kept tokens": (
        lambda: functions.token_logprobs(
            f32(2, 8), f32(4, 8), torch.tensor([1, 1]), kept_tokens=torch.ones(2, 2)
        ),
        rm.ShapeError,
        r"kept_tokens: expected integers of shape \(2, k\), got torch.float32 of shape \(2, 2\)",
    ),
    "rows of kept tokens": (
        lambda: functions.token_logprobs(
            f32(2, 8), f32(4, 8), torch.tensor([1, 1]), kept_tokens=torch.tensor([[1]])
        ),
        rm.ShapeError,
        r"kept_tokens: expected integers of shape \(2, k\), got torch.int64 of shape \(1, 1\)",
    ),
    "a kept token": (
        lambda: functions.token_logprobs(
            f32(1, 8), f32(4, 8), torch.tensor([1]), kept_tokens=torch.tensor([[1, 4]])
        ),
        rm.RequestError,
        r"kept_tokens: expected tokens in \[0, 4\), or -1 for none, got 1 to 4",
    ),
    "a token kept twice": (
        lambda: functions.token_logprobs(
            f32(1, 8), f32(4, 8), torch.tensor([1]), kept_tokens=torch.tensor([[1, 2, 2]])
        ),
        rm.RequestError,
        r"kept_tokens: expected each token of row 0 once, got \[1, 2, 2\]",
    ),
    "a kept token of more than 32 bits": (
        lambda: functions.token_logprobs(
            f32(1, 8), f32(4, 8), torch.tensor([1]), kept_tokens=torch.tensor([[1, 2 + 2**32]])
        ),
        rm.RequestError,
        r"kept_tokens: expected tokens in \[0, 4\), or -1 for none, got 1 to 4294967298",
    ),
    "a mask of kept tokens": (
        lambda: functions.token_logprobs(
            f32(1, 8), f32(4, 8), torch.tensor([1]), kept_tokens=torch.tensor([[False, True]])
        ),
        rm.ShapeError,
        r"kept_tokens: expected integers of shape \(1, k\), got torch.bool of shape \(1, 2\)",
    ),
    "a target that was not kept": (
        lambda: functions.token_logprobs(
            f32(2, 8), f32(4, 8), torch.tensor([1, 3]), kept_tokens=torch.tensor([[1, -1], [0, 1]])
        ),
        rm.RequestError,
        r"kept_tokens: expected token 3 of row 1 among them, got \[0, 1\]",
    ),
    "entropy": (
        lambda: functions.token_logprobs(
            f32(2, 8), f32(4, 8), torch.tensor([1, 1]), entropy=np.arange(2)
        ),
        rm.ConfigError,
        "^entropy: expected a bool, got array",
    ),
    "temperature": (
        lambda: functions.token_logprobs(
            f32(2, 8), f32(4, 8), torch.tensor([1, 1]), temperature=0.0
        ),
        rm.RequestError,
        "temperature: .*got 0.0",
    ),
    "a temperature that is 0 as a float32": (
        lambda: functions.token_logprobs(
            f32(2, 8), f32(4, 8), torch.tensor([1, 1]), temperature=1e-50
        ),
        rm.RequestError,
        "temperature: .*got 1e-50",
    ),
    "a weight that is not finite": (
        lambda: functions.linear(f32(2, 8), f32(4, 8) / 0),
        rm.NonFiniteError,
        r"weight: .*infinity at \[0, 0\]",
    ),
    "logits that are not finite": (
        lambda: functions.lm_head(f32(2, 8) * 1e38, f32(4, 8)),
        rm.NumericsError,
        "logits of row 0 of 2 are not finite",
    ),
    "keys that are not finite": (
        lambda: functions.attention(
            f32(ROWS, 128) * torch.inf, f32(16), f32(16), rope(), sequences(), HEADS
        ),
        rm.NumericsError,
        "keys or values of row 0 of 11 are not finite",
    ),
}


# The tensors of each function, and the function of these alone.
TENSORS: dict[str, tuple[Callable[..., Any], dict[str, Tensor]]] = {
    "embedding": (
        lambda ids, weight: functions.embedding(ids, weight, torch.float32),
        {"ids": torch.tensor([0, 3]), "weight": f32(4, 8)},
    ),
    "linear": (
        lambda x, weight, bias: functions.linear(x, weight, bias=bias),
        {"x": f32(2, 8), "weight": f32(4, 8), "bias": f32(4)},
    ),
    "rms_norm": (
        lambda x, weight: functions.rms_norm(x, weight, EPS),
        {"x": f32(2, 8), "weight": f32(8)},
    ),
    "add": (functions.add, {"residual": f32(2, 8), "x": f32(2, 8), "gate": f32(2, 1)}),
    "swiglu": (functions.swiglu, {"x": f32(2, 8), "gate": f32(4, 8), "up": f32(4, 8)}),
    "activate": (lambda x: functions.activate(x, "silu"), {"x": f32(2, 8)}),
    "attention": (
        lambda qkv, q_weight, k_weight, cos, sin: functions.attention(
            qkv, q_weight, k_weight, (cos, sin), sequences(), HEADS
        ),
        {"qkv": f32(ROWS, 128), "q_weight": f32(16), "k_weight": f32(16)}
        | dict(zip(("cos", "sin"), rope(), strict=True)),
    ),
    "moe": (
        lambda x, router, gate_up, down, bias: functions.moe(
            x, router, gate_up, down, top_k=2, bias=bias
        ),
        {"x": f32(2, 8), "router": f32(4, 8), "gate_up": f32(4, 6, 8), "down": f32(4, 8, 3)}
        | {"bias": f32(4)},
    ),
    "lm_head": (functions.lm_head, {"x": f32(2, 8), "weight": f32(4, 8)}),
    "token_logprobs": (
        lambda x, weight, targets, kept: functions.token_logprobs(
            x, weight, targets, kept_tokens=kept
        ),
        {"x": f32(2, 8), "weight": f32(4, 8), "targets": torch.tensor([1, 3])}
        | {"kept": torch.tensor([[1], [3]])},
    ),
}
OTHER_KINDS: dict[str, Callable[[Tensor], Any]] = {
    "sparse": Tensor.to_sparse,
    "csr": lambda x: (x if x.ndim > 1 else x[None]).to_sparse_csr(),
    "meta": lambda x: x.to("meta"),
    "fake": FakeTensorMode().from_tensor,
    "nested": lambda x: torch.nested.nested_tensor([x]),
    "array": Tensor.numpy,
    "number": lambda x: 3,
}


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype", "ignore:Sparse CSR")
@pytest.mark.parametrize("kind", OTHER_KINDS)
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_without_dense_memory(name: str, kind: str) -> None:
    call, tensors = TENSORS[name]
    call(**tensors)
    for argument, tensor in tensors.items():
        with pytest.raises(rm.UnsupportedTensorError, match=r"^[a-z_ ]+: expected a "):
            call(**(tensors | {argument: OTHER_KINDS[kind](tensor)}))


def test_ids_of_an_embedding() -> None:
    weight = torch.arange(32.0).view(4, 8)
    for dtype in (torch.uint8, torch.int32, torch.int64):
        ids = torch.tensor([[3, 0]], dtype=dtype)
        assert (functions.embedding(ids, weight, torch.float32) == weight[[3, 0]]).all()
    assert functions.embedding(torch.zeros(0).int(), weight, torch.float32).shape == (0, 8)
    for wrong in ([4], [0, -1], [2**40]):
        with pytest.raises(rm.RequestError, match=r"^ids: expected tokens in \[0, 4\), got "):
            functions.embedding(torch.tensor(wrong), weight, torch.float32)
    for other in (torch.float32, torch.bool, torch.complex64):
        with pytest.raises(rm.DTypeError, match=f"^ids: expected integers, got {other}"):
            functions.embedding(torch.zeros(1, dtype=other), weight, torch.float32)


OF_ROWS = ("x", "residual", "ids", "targets", "kept")


@pytest.mark.parametrize("name", sorted(set(TENSORS) - {"attention"}))
def test_gradients_of_no_rows(name: str) -> None:
    """They are zeros."""
    call, tensors = TENSORS[name]
    rows = (*OF_ROWS, "gate") if name == "add" else OF_ROWS
    empty = {key: x[:0] if key in rows else x.clone() for key, x in tensors.items()}
    wanted = [x.requires_grad_() for key, x in empty.items() if x.dtype.is_floating_point]
    out = call(**empty)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    for x in wanted:
        if x is not empty.get("bias") or name != "moe":
            assert x.grad is not None
            assert x.grad.shape == x.shape
            assert not x.grad.any()


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_are_refused(name: str) -> None:
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        call()
