"""Whether cuBLASLt satisfies the contract: the part `gemm` of benchmarks.gpu.

For each dense gemm of a layer an algorithm is pinned: the library's best for the largest number of
rows that also supports fewer rows, and, if the library supports batch invariance, one for which it
promises batch invariance. Each algorithm multiplies the same rows in calls of every number of rows,
and at the beginning and at the end of the largest call: a row's bits must be those of the largest
call. The contract requires this (docs/numerics.md), as far as a test can show. If all are equal,
the figure of interest is the time beside the family cuda_mma's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.card import Card, bfloat16, cuda_device
from benchmarks.shapes import BF16_BYTES, Shape
from rollmesh.runtime import cublas
from rollmesh.runtime.devices import library_path

import vendor_gemm  # isort: skip  # of tests, which benchmarks.card has put on the path

CHOICES = {
    "pinned": vendor_gemm.PINNED,
    "promised": vendor_gemm.INVARIANT,
    "free": vendor_gemm.FREE,
}
TIMES = 20
OWN_WORKSPACE = 64 << 20  # the largest workspace that an op of cuda_mma needs


@dataclass(frozen=True)
class Finding:
    """The result for one gemm and one choice. differing: the number of tried row counts in which a
    row has different bits."""

    name: str
    shape: vendor_gemm.Shape
    choice: str
    tried: int
    differing: int
    seconds: dict[int, float]  # by rows


def shapes_of(shape: Shape) -> dict[str, vendor_gemm.Shape]:
    """Returns the gemms of one rank; for a MoE only those of attention."""
    spec = shape.spec
    heads, kv = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    found = {
        "qkv": vendor_gemm.Shape(heads + 2 * kv, spec.hidden_size),
        "o": vendor_gemm.Shape(spec.hidden_size, heads),
    }
    if not spec.num_experts:
        found["gate_up"] = vendor_gemm.Shape(spec.intermediate_size, spec.hidden_size, swiglu=True)
        found["down"] = vendor_gemm.Shape(spec.hidden_size, spec.intermediate_size)
    return found


class Bench:
    """One gemm's operands on the card. Numbers have σ = 1, those of W σ = 1/√k."""

    def __init__(self, card: Card, shape: vendor_gemm.Shape, most: int):
        self.card, self.device, self.shape, self.most = card, card.device, shape, most
        rng = np.random.default_rng(shape.n + shape.k)
        self.w_rows = 2 * shape.n if shape.swiglu else shape.n
        # The size in whole tiles.
        padded = -(-shape.n // 16) * 16 * (2 if shape.swiglu else 1) * -(-shape.k // 32) * 32
        self.w = self._filled(rng, padded, shape.k**-0.5)
        self.x = self._filled(rng, most * shape.k, 1.0)
        self.y, self.whole = (card.device.alloc(most * shape.n * BF16_BYTES) for _ in range(2))
        self.found, self.workspace = (
            card.device.alloc(vendor_gemm.FOUND_BYTES),
            card.device.alloc(OWN_WORKSPACE),
        )

    def _filled(self, rng: np.random.Generator, elements: int, scale: float) -> int:
        block = self.device.alloc(elements * BF16_BYTES)
        run = min(elements, 1 << 24)
        noise = bfloat16(rng.standard_normal(run, np.float32) * np.float32(scale)).tobytes()
        for first in range(0, elements, run):
            self.device.write(
                block + first * BF16_BYTES, noise[: min(run, elements - first) * BF16_BYTES]
            )
        return block

    def drop(self) -> None:
        for block in (self.w, self.x, self.y, self.whole, self.found, self.workspace):
            self.device.drop(block)

    def differing(
        self, opened: vendor_gemm.VendorGemm, kernels: vendor_gemm.Kernels, sizes: list[int]
    ) -> int:
        """Returns how many of the sizes have a row whose bits differ from a call of all rows."""
        opened.multiply(self.shape, self.whole, self.x, self.w, self.most)
        return sum(not self._agrees(opened, kernels, rows) for rows in sizes)

    def _agrees(
        self, opened: vendor_gemm.VendorGemm, kernels: vendor_gemm.Kernels, rows: int
    ) -> bool:
        for first in {0, self.most - rows}:
            opened.multiply(
                self.shape, self.y, self.x + first * self.shape.k * BF16_BYTES, self.w, rows
            )
            whole = self.whole + first * self.shape.n * BF16_BYTES
            if (
                vendor_gemm.differs(
                    self.device, kernels, self.y, whole, rows, self.shape.n, self.found
                )
                >= 0
            ):
                return False
        return True

    def seconds(self, multiply: Callable[[int], None], sizes: list[int]) -> dict[int, float]:
        """Returns the seconds of a gemm for each number of rows, averaged over TIMES calls;
        measures twice, because the first run loads kernels."""

        def several(rows: int) -> None:
            for _ in range(TIMES):
                multiply(rows)

        def one(rows: int) -> float:
            return self.card.seconds(lambda: several(rows)) / TIMES

        return {rows: min(one(rows) for _ in range(2)) for rows in sizes}


def findings(card: Card, shape: Shape, sizes: list[int], timed: list[int]) -> list[Finding]:
    """sizes: numbers of rows to compare with the largest of them; timed: sizes to time too."""
    library, found = cuda_device.Library(library_path()), []
    path, most = cublas.find().path, max(*sizes, *timed)
    mma = vendor_gemm.table(library, "cuda_mma")
    for name, gemm in shapes_of(shape).items():
        bench = Bench(card, gemm, most)
        for choice, number in CHOICES.items():
            try:
                with vendor_gemm.opened(card.device, path, [gemm], most, number) as opened:

                    def multiply(
                        rows: int, opened: vendor_gemm.VendorGemm = opened, bench: Bench = bench
                    ) -> None:
                        opened.multiply(bench.shape, bench.y, bench.x, bench.w, rows)

                    differing = bench.differing(opened, mma, sizes)
                    found.append(
                        Finding(
                            name,
                            gemm,
                            choice,
                            len(sizes),
                            differing,
                            bench.seconds(multiply, timed),
                        )
                    )
            except vendor_gemm.Refused as why:
                print(f"  gemm {name} {choice}: {why}", flush=True)
        found.append(Finding(name, gemm, "cuda_mma", 0, 0, bench.seconds(own(bench, mma), timed)))
        bench.drop()
    return found


def own(bench: Bench, kernels: vendor_gemm.Kernels) -> Callable[[int], None]:
    """Times the same gemm by the op of a family; the contents of W are valid as tiles too."""
    stream = bench.device.table.stream
    context = cuda_device.Context(
        stream=stream, workspace=bench.workspace, workspace_bytes=OWN_WORKSPACE, n_threads=1
    )

    def multiply(rows: int) -> None:
        args = vendor_gemm.arguments(bench.shape, bench.y, bench.x, bench.w, rows)
        op = kernels.gemm_swiglu if bench.shape.swiglu else kernels.gemm
        op(ctypes.byref(context), ctypes.byref(args))

    return multiply
