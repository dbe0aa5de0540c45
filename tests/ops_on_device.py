"""rollmesh.ops as a test of the CPU calls it, run on a CUDA device: `Shipped` copies the NumPy arrays of a call there, calls the op, and
brings back what it gave and what it wrote. So a case that holds the CPU's variants to each other holds a device to them too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rollmesh import ops
from rollmesh.runtime.devices import CUDA_FAMILIES

WRITTEN = ("out", "residual", "k_cache", "v_cache", "row_flags")


class Shipped:
    """Calls for another isa than a CUDA family, and what is no op, are rollmesh.ops' own."""

    def __init__(self, device: str = "cuda:0") -> None:
        self._device = device
        self.calls: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        own = getattr(ops, name)

        def op(*arguments: Any, isa: str | None = None, **keywords: Any) -> Any:
            if isa not in CUDA_FAMILIES:
                return own(*arguments, isa=isa, **keywords)
            self.calls[name] = self.calls.get(name, 0) + 1
            return self._on_device(own, isa, dict(zip(own.__code__.co_varnames, arguments)) | keywords)

        return op if callable(own) and "isa" in getattr(own, "__annotations__", ()) else own

    def _on_device(self, own: Any, isa: str, given: dict[str, Any]) -> Any:
        there: dict[int, Any] = {}  # an array that is given twice is one array there

        def ship(value: Any) -> Any:
            if not isinstance(value, np.ndarray):
                return value
            return there.setdefault(id(value), self._put(np.ascontiguousarray(value)))

        found = own(**{name: ship(value) for name, value in given.items()}, isa=isa)
        for name in WRITTEN:
            if isinstance(given.get(name), np.ndarray):
                given[name][...] = self._got(there[id(given[name])])
        return given["out"] if given.get("out") is not None else self._landed(found)

    def _landed(self, found: Any) -> Any:
        if isinstance(found, ops.DeviceArray):
            return self._got(found)
        if isinstance(found, tuple):
            values = [self._landed(value) for value in found]
            return type(found)(*values) if hasattr(found, "_fields") else tuple(values)
        return found

    def _put(self, array: np.ndarray) -> Any:
        return ops.to_device(array, self._device)

    def _got(self, there: Any) -> np.ndarray:
        return np.asarray(there.numpy())
