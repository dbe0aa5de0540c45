"""Packed weights that a patched model keeps from one forward pass to the next.

A matrix is packed again only if one of the tensors it is made of has changed: another tensor, or a higher version counter, which torch
raises with every write to a tensor, except those of fused optimizers: `count_optimizer_steps`. Writes through `.data` are not counted:
`forget` is for them. Where a generator of this process serves the same values, its packed weights are read in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from rollmesh.errors import StateError

Key = tuple[int, str]  # layer, −1 for what is in none; the name that the generator's views have


class WeightUse(NamedTuple):
    """How the matrices of a forward pass came to be packed."""

    shared: int  # read from the generator that serves them
    kept: int  # packed by an earlier pass
    packed: int  # packed now
    version: int | None  # that the generator serves, where some are shared


@cache
def count_optimizer_steps() -> None:
    """From now on a step of any optimizer raises the version counters of its parameters. Fused ones do not, such as Trainer's default."""

    def count(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if not tensor.is_inference():
                    increment_version(tensor)

    register_optimizer_step_post_hook(count)


class Source(NamedTuple):
    """What a packed matrix is made of: tensors, and whatever else its values depend on (which LoRA adapters are active)."""

    tensors: list[Tensor]
    state: Any = None


class Stamp:
    """What a tensor held at some moment. It keeps the tensor and the memory, so that no other can be found at their addresses; a weak
    reference would forbid torch.utils.swap_tensors, by which Module.to may convert parameters."""

    def __init__(self, tensor: Tensor):
        self._tensor, self._memory, self.shape = tensor, tensor.untyped_storage(), tensor.shape
        self._seen = self._state(tensor)

    def holds(self, tensor: Tensor) -> bool:
        return self._tensor is tensor and self._seen is not None and self._seen == self._state(tensor)

    @staticmethod
    def _state(tensor: Tensor) -> tuple[Any, ...] | None:
        """None: a tensor of inference mode, which counts no writes."""
        return None if tensor.is_inference() else (tensor._version, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


class Stamps:
    """Of a source."""

    def __init__(self, source: Source):
        self._each, self._state = [Stamp(tensor) for tensor in source.tensors], source.state

    def holds(self, source: Source) -> bool:
        same = self._state == source.state and len(self._each) == len(source.tensors)
        return same and all(stamp.holds(tensor) for stamp, tensor in zip(self._each, source.tensors, strict=True))

    def has_shapes_of(self, source: Source) -> bool:
        return [stamp.shape for stamp in self._each] == [tensor.shape for tensor in source.tensors]


class KeptWeights:
    def __init__(self) -> None:
        self._kept: dict[Key, tuple[Stamps, Any]] = {}
        self._generator: Any = None  # a weak reference
        self._version: int | None = None
        self._shared: dict[Key, Stamps] = {}
        self._views: dict[str, Any] | None = None
        self._always = False
        self._counts = [0, 0, 0]

    def forget(self) -> None:
        """Everything is packed again when it is next needed."""
        self._kept.clear()
        self.forget_shared()

    def forget_shared(self) -> None:
        """Nothing is read from a generator until the next `share`."""
        self._shared, self._views = {}, None

    def share(self, generator: Any, version: int, matrices: dict[Key, Source]) -> None:
        """The generator has committed the values of these sources as `version`."""
        self._generator, self._version, self._views = weakref.ref(generator), version, None
        self._shared = {key: Stamps(source) for key, source in matrices.items()}

    def begin(self, always: bool) -> None:
        """A forward pass begins. always: pack everything, since the writes to these tensors are not counted."""
        self._always, self._counts = always, [0, 0, 0]

    def end(self) -> None:
        """StateError if the generator has replaced the weights that this pass has read."""
        if self._counts[0] and self._serving() is None:
            raise StateError(
                f"expected the generator to serve version {self._version} during a forward pass that reads it, got a sync or sleep"
            )

    @property
    def use(self) -> WeightUse:
        shared, kept, packed = self._counts
        return WeightUse(shared, kept, packed, self._version if shared else None)

    def _serving(self) -> Any:
        """The generator, if it still serves the shared version."""
        generator = self._generator() if self._generator is not None else None
        if not self._shared or generator is None or generator._turn.is_gone() or generator.version != self._version:
            return None
        return generator

    def _view(self, key: Key) -> Any:
        """The generator's packed matrix. Its views are valid as long as it serves the version they are of."""
        generator = self._serving()
        if generator is None:
            return None
        if self._views is None:
            self._views = generator._packed_weights()
        layer, name = key
        return self._views and (self._views if layer < 0 else self._views["layers"][layer])[name]

    def get(self, key: Key, source: Source, pack: Callable[[Any], Any]) -> Any:
        """The packed matrix of a source. pack(out) makes it, in `out` unless that is None."""
        shared = self._shared.get(key)
        if shared is not None and not self._always and shared.holds(source) and (view := self._view(key)) is not None:
            self._counts[0] += 1
            return view
        stamps, packed = self._kept.pop(key, (None, None))  # it is half written if packing fails
        if stamps is not None and not self._always and stamps.holds(source):
            self._kept[key] = stamps, packed
            self._counts[1] += 1
            return packed
        packed = pack(packed if stamps is not None and stamps.has_shapes_of(source) else None)
        self._kept[key] = Stamps(source), packed
        self._counts[2] += 1
        return packed
