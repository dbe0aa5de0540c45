"""Weight syncs: every source and spelling, complete, partial, in place, aborted and refused, with
requests in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rollmesh as rm
from benchmarks.soak.common import (
    DENSE,
    MOE,
    SIZES,
    Interrupted,
    State,
    Work,
    bits,
    in_thread,
    numpy_state_dict,
    refused,
)
from rollmesh import _core
from rollmesh.sources import BF16, SharedReader, SharedWriter


class Exported:
    """A tensor that exports only DLPack."""

    def __init__(self, array: np.ndarray):
        self._array = array

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._array.__dlpack__(**arguments)


class Broken(Exported):
    """A tensor whose producer fails."""

    def __init__(self, array: np.ndarray, error: type[Exception]):
        super().__init__(array)
        self._error = error

    def __dlpack__(self, **arguments: Any) -> Any:
        raise self._error("not today")


class Rootless:
    """The base of an array, whose own `base` attribute raises."""

    def __init__(self, array: np.ndarray):
        self.__array_interface__ = array.__array_interface__
        self._array = array

    @property
    def base(self) -> Any:
        raise Interrupted


def fused(state: State) -> State:
    """q, k, v and gate, up of each layer as one tensor; experts as one tensor a layer."""
    out = dict(state)
    for layer in range(DENSE["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        out[f"{at}.self_attn.qkv_proj.weight"] = np.concatenate(
            [out.pop(f"{at}.self_attn.{part}_proj.weight") for part in "qkv"]
        )
        if f"{at}.mlp.gate_proj.weight" in out:
            out[f"{at}.mlp.gate_up_proj.weight"] = np.concatenate(
                [out.pop(f"{at}.mlp.{part}_proj.weight") for part in ("gate", "up")]
            )
            continue
        experts = range(MOE["num_experts"])
        gate, up, down = (
            np.stack([out.pop(f"{at}.mlp.experts.{e}.{part}_proj.weight") for e in experts])
            for part in ("gate", "up", "down")
        )
        out[f"{at}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        out[f"{at}.mlp.experts.down_proj"] = down
    return out


def bare(state: State) -> State:
    """Names of a wrapped module without the outer class."""
    return {
        name.removeprefix("model.").replace("layers.", "_orig_mod.layers."): array
        for name, array in state.items()
    }


def bf16(array: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(array).view(np.uint32) >> 16).astype(np.uint16).view(BF16)


def strange(array: np.ndarray) -> Iterator[tuple[type[Exception], Any]]:
    """Yields invalid values for this tensor, each with the error that refuses it."""
    tensor = torch.from_numpy(array.copy())
    emptied = torch.from_numpy(array.copy()).clone()
    emptied.untyped_storage().resize_(0)
    yield rm.ShapeError, np.zeros((3, 5), np.float32)
    yield rm.DTypeError, array.astype(np.int8)
    yield rm.DTypeError, tensor.to(torch.int32)
    yield rm.NonFiniteError, np.full_like(array, np.nan)
    yield rm.UnsupportedTensorError, [1.0]
    yield rm.UnsupportedTensorError, tensor.to("meta")
    yield rm.UnsupportedTensorError, tensor.to_sparse()
    yield rm.UnsupportedTensorError, torch.complex(tensor, tensor).conj().imag
    yield rm.UnsupportedTensorError, Broken(array, BufferError)
    yield rm.LayoutError, emptied
    yield Interrupted, Broken(array, Interrupted)
    yield Interrupted, np.asarray(Rootless(array))


class Model:
    """A generator and the sources of one model."""

    def __init__(self, config: Mapping[str, Any], dtype: str, folder: Path):
        self.spec = rm.ModelSpec.from_hf(dict(config))
        self.gen = rm.Generator(self.spec, dtype=dtype, **SIZES)
        self.plain = numpy_state_dict(config)
        first = next(iter(self.plain))
        self.good: dict[str, dict[str, Any]] = {
            "plain": self.plain,
            "other": numpy_state_dict(config, seed=1),
            "fused": fused(self.plain),
            "bare": bare(self.plain),
            "float16": {name: array.astype(np.float16) for name, array in self.plain.items()},
            "float64": {name: array.astype(np.float64) for name, array in self.plain.items()},
            "bfloat16": {name: bf16(array) for name, array in self.plain.items()},
            "transposed": {name: np.asfortranarray(array) for name, array in self.plain.items()},
            "window": {
                name: np.stack([array, array], axis=-1)[..., 0]
                for name, array in self.plain.items()
            },
            "ml_dtypes": numpy_state_dict(config, dtype="bfloat16"),
            "torch": {
                name: torch.nn.Parameter(torch.from_numpy(array.copy()))
                for name, array in self.plain.items()
            },
            "torch bfloat16": {
                name: torch.from_numpy(array).bfloat16() for name, array in self.plain.items()
            },
            "dlpack": {name: Exported(array) for name, array in self.plain.items()},
        }
        self.bad: list[tuple[type[Exception], dict[str, Any]]] = [
            (
                rm.MissingKeyError,
                {name: array for name, array in self.plain.items() if name != first},
            ),
            (rm.UnexpectedKeyError, {**self.plain, "stranger": self.plain[first]}),
            (rm.DuplicateKeyError, {**self.plain, first.removeprefix("model."): self.plain[first]}),
            *((kind, {**self.plain, first: tensor}) for kind, tensor in strange(self.plain[first])),
        ]
        self.writer = SharedWriter(folder)
        self.reader = SharedReader(self.writer.address)
        self.prompts: list[Any] = [[1, 2, 3], [4], np.array([5, 6]), [7] * 20]
        self.params = rm.SamplingParams(max_tokens=6, seed=3, ignore_eos=True)
        self.bits = b""

    def handed(self) -> list[Any]:
        sources = [*self.good.values(), *(source for _, source in self.bad)]
        inside = [thing for source in sources for pair in source.items() for thing in pair]
        inside += [
            thing.base
            for thing in inside
            if isinstance(thing, np.ndarray) and thing.base is not None
        ]
        inside += [
            thing.untyped_storage()
            for thing in inside
            if isinstance(thing, torch.Tensor) and thing.layout == torch.strided
        ]
        names = [
            self.good["ml_dtypes"]["model.norm.weight"].dtype.name,
            Exported.__name__,
            torch.nn.Parameter.__name__,
        ]
        # Objects that the extension handles when it reads a tensor.
        shown = [*(BF16.metadata or {}).values(), torch.strided, BufferError, *names]
        return [
            *shown,
            self.plain,
            self.spec,
            self.params,
            self.prompts,
            *self.prompts,
            *sources,
            *inside,
            self.writer,
            self.reader,
        ]

    def calls(self) -> Iterator[Callable[[], int]]:
        for name in self.good:
            yield partial(self.mapping, name)
        for kind, source in self.bad:
            yield partial(self.refused_mapping, kind, source)
        for options in ({"inflight": way} for way in ("wait", "restart", "abort", "keep")):
            yield partial(self.in_flight, options)
        yield partial(self.in_flight, {"inflight": "keep", "keep_kv": True})
        yield from (
            self.iterator,
            self.broken_iterator,
            self.block,
            self.broken_block,
            self.pieces,
            self.repeated,
            self.incomplete,
        )
        yield from (
            self.dropped,
            self.partial,
            self.in_place,
            self.half_in_place,
            self.old_version,
            self.too_late,
        )
        yield from (self.shared, self.asleep, self.beside_generate, self.no_memory)

    def sync(self, source: Any, **options: Any) -> int:
        self.gen.sync_weights(source, cast=True, **options)
        return 1

    def mapping(self, name: str) -> int:
        return self.sync(self.good[name])

    def refused_mapping(self, kind: type[Exception], source: Mapping[str, Any]) -> int:
        refused(kind, self.sync, source)
        return 1

    def in_flight(self, options: Mapping[str, Any]) -> int:
        ids = self.gen.submit(self.prompts, self.params)
        self.gen.poll()
        self.gen.poll()
        self.sync(self.good["other"], **options)
        assert len(self.gen.poll(min_outputs=len(ids))) == len(ids)
        return 1

    def iterator(self) -> int:
        return self.sync(reversed(list(self.plain.items())))

    def _breaks(self) -> Iterator[tuple[str, np.ndarray]]:
        for index, item in enumerate(self.plain.items()):
            if index == 5:
                raise Interrupted
            yield item

    def broken_iterator(self) -> int:
        refused(Interrupted, self.sync, self._breaks())
        refused(rm.IncompleteSyncError, self.sync, iter(list(self.plain.items())[:4]))
        return 2

    def block(self) -> int:
        with self.gen.begin_sync(cast=True) as sync:
            for name, array in self.plain.items():
                sync.push(name, array)
        return 1

    def _broken_block(self) -> None:
        with self.gen.begin_sync(cast=True) as sync:
            sync.push("model.norm.weight", self.plain["model.norm.weight"])
            raise Interrupted

    def broken_block(self) -> int:
        refused(Interrupted, self._broken_block)
        return 1

    def pieces(self) -> int:
        """Open while requests run, which does not change their weights."""
        sync = self.gen.begin_sync(cast=True)
        for name, array in self.plain.items():
            sync.push(name, array)
        bits(self.gen)
        sync.commit()
        return 1

    def repeated(self) -> int:
        """A repeated name is refused; the sync stays open."""
        sync = self.gen.begin_sync(cast=True)
        for name, array in self.plain.items():
            sync.push(name, array)
        refused(rm.DuplicateKeyError, sync.push, name, array)
        sync.commit()
        return 1

    def incomplete(self) -> int:
        sync = self.gen.begin_sync(cast=True)
        sync.push("model.norm.weight", self.plain["model.norm.weight"])
        refused(rm.IncompleteSyncError, sync.commit)
        sync = self.gen.begin_sync(cast=True)
        refused(rm.ShapeError, sync.push, "model.norm.weight", self.plain["lm_head.weight"])
        sync.abort()
        return 2

    def dropped(self) -> int:
        """The handle of an open set is dropped; the next sync resets the set."""
        self.gen.begin_sync(cast=True).push("model.norm.weight", self.plain["model.norm.weight"])
        return 1 + self.sync(self.plain)

    def partial(self) -> int:
        return self.sync(dict(list(self.plain.items())[::2]), strict=False)

    def in_place(self) -> int:
        return self.sync(self.plain, mode="inplace")

    def half_in_place(self) -> int:
        refused(Interrupted, self.sync, self._breaks(), mode="inplace")
        assert self.gen.version is None
        return 1 + self.sync(self.plain)

    def old_version(self) -> int:
        refused(rm.VersionError, self.sync, self.plain, version=0)
        return 1

    def too_late(self) -> int:
        self.gen.submit(self.prompts, self.params)
        refused(rm.DeadlineError, self.sync, self.plain, timeout=0)
        self.gen.abort()
        self.gen.poll()
        return 1

    def shared(self) -> int:
        """Syncs through shared memory, as from a trainer in another process."""
        self.writer.publish(self.plain)
        self.reader.refresh()
        return self.sync(self.reader)

    def asleep(self) -> int:
        self.gen.sleep()
        refused(rm.StateError, self.sync, self.plain)
        self.gen.wake()
        return 1 + self.sync(self.plain)

    def beside_generate(self) -> int:
        """Syncs between two steps of another thread's generate, or before or after it."""
        in_thread(
            partial(self.gen.generate, self.prompts, self.params, use_tqdm=False),
            beside=partial(self.sync, self.plain, inflight="keep"),
        )
        return 1

    def no_memory(self) -> int:
        """Makes an allocation fail, if there is one: with staging kept from the last sync there may
        be none."""
        _core.memory_fail_at(1)
        try:
            self.sync(self.plain)
        except (MemoryError, rm.CapacityError):
            return 1
        finally:
            _core.memory_fail_at(0)
        return 1

    def settle(self) -> int:
        done = self.sync(self.plain)
        seen = bits(self.gen)
        assert seen == (self.bits or seen), "the same weights gave other bits"
        self.bits = seen
        return done


class Syncs(Work):
    name = "syncs"

    def __init__(self, rng: np.random.Generator, folder: Path):
        self.models = [Model(DENSE, "float32", folder), Model(MOE, "bfloat16", folder)]
        for model in self.models:
            model.settle()
        self.calls = [call for model in self.models for call in model.calls()]
        self.handed = [thing for model in self.models for thing in model.handed()]

    def settle(self) -> int:
        return sum(model.settle() for model in self.models)

    def close(self) -> None:
        for model in self.models:
            model.writer.close()
            model.gen.close()
