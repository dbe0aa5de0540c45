"""Scenarios for the server of mesh_ranks.py: weights that come in pieces. test_resharding.py has
the expected results.

The trainer runs in the same processes, which use Gloo whatever the generator's ranks use. Job:
"trainer" how its ranks hold the weights, "axes" of its mesh, "dims" that each axis shards (-1:
replicated), "first" rank of it, "packed" experts in one tensor, "dtype", "stream" an iterator
instead of a mapping.

torch is imported here, at the top, because the server imports this module once for all ranks that
it forks."""

from __future__ import annotations

import atexit
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest
import torch
import torch._dynamo  # which FSDP takes when it is first used
from mesh_ranks import CASES, Rank, answers, weights
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import rollmesh as rm
from rollmesh.weights.resharding import Resharding

Named = dict[str, Any]
for name in CASES:
    weights(name)


def begin(rank: Rank, trains: bool = True) -> None:
    """Connects the generator's ranks by the job's transport; over torch they use the trainer's
    process group."""
    if trains:
        distributed.init_process_group(
            "gloo", init_method=f"file://{rank.job['name']}", rank=rank.rank, world_size=rank.world
        )
        atexit.register(distributed.destroy_process_group)

    def comm() -> rm.comm.Comm:
        if rank.job["transport"] == "torch":
            return rm.comm.torch(timeout=60.0)
        return rm.comm.shm(Path(rank.job["name"]).name, rank.rank, rank.world, 60.0)

    rank.comm = comm  # type: ignore[method-assign]


def full(rank: Rank, scale: float) -> Named:
    """All weights as torch tensors."""
    name = rank.job["model"]
    state: Named = {
        key: torch.from_numpy(np.array(value)) for key, value in weights(name, scale).items()
    }
    if rank.job.get("packed"):
        state = helpers.module_state_dict(state, CASES[name].config)
    keep = torch.float32 if rank.job.get("dtype", "float32") == "float32" else torch.bfloat16
    return {
        key: value if key.endswith("e_score_correction_bias") else value.to(keep)
        for key, value in state.items()
    }


# --------------------------------------------------------------------------------------- trainers
def on_mesh(rank: Rank, state: Named) -> Named | None:
    """DTensors over "axes" of ranks from "first" on; other ranks have no source."""
    axes, first = rank.job["axes"], rank.job.get("first", 0)
    # Made by all ranks.
    mesh = DeviceMesh("cpu", torch.arange(first, first + math.prod(axes)).reshape(axes))
    if not first <= rank.rank < first + math.prod(axes):
        return None

    def placed(tensor: Any) -> Any:
        where = [Shard(dim) if 0 <= dim < tensor.ndim else Replicate() for dim in rank.job["dims"]]
        return distribute_tensor(tensor, mesh, where, src_data_rank=None)

    return {name: placed(tensor) for name, tensor in state.items()}


def module_of(state: Named) -> Any:
    """Modules that are named as the weights are."""
    root = torch.nn.Module()
    for name, tensor in state.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, torch.nn.Module())
            at = getattr(at, part)
        at.register_parameter(last, torch.nn.Parameter(tensor))
    return root


def fully_sharded(rank: Rank, state: Named) -> Named:
    """torch's own FSDP2 over all ranks; with two axes the first is FSDP's, and the second shards
    rows as tensor parallelism does."""
    axes = rank.job["axes"]
    mesh = init_device_mesh("cpu", tuple(axes), mesh_dim_names=("fsdp", "tp")[: len(axes)])
    if len(axes) == 2:
        state = {
            name: distribute_tensor(tensor, mesh["tp"], [Shard(0)], src_data_rank=None)
            for name, tensor in state.items()
        }
    module = module_of(state)
    layers = module.model.layers if hasattr(module, "model") else []
    for _, layer in layers.named_children() if layers else []:
        fully_shard(layer, mesh=mesh["fsdp"])
    fully_shard(module, mesh=mesh["fsdp"])
    return module.state_dict()  # type: ignore[no-any-return]


def cut_anyhow(rank: Rank, state: Named) -> Named:
    """Pieces of rm.Piece, cut at random along a random dim, the same on all ranks: ranks with
    nothing, and some tensors whole."""
    pieces: Named = {}
    for index, (name, tensor) in enumerate(state.items()):
        rng = np.random.default_rng([7, index])
        dim = int(rng.integers(-1, tensor.ndim))
        if dim < 0:
            pieces[name] = tensor
            continue
        cuts = [
            0,
            *sorted(rng.integers(0, tensor.shape[dim] + 1, rank.world - 1).tolist()),
            tensor.shape[dim],
        ]
        at = int(rng.permutation(rank.world)[rank.rank])
        offsets = [0] * tensor.ndim
        offsets[dim] = cuts[at]
        mine = tensor.narrow(dim, cuts[at], cuts[at + 1] - cuts[at])
        numpy = rank.job.get("dtype", "float32") == "float32" and index % 2
        pieces[name] = rm.Piece(
            mine.numpy() if numpy else mine, tuple(tensor.shape), tuple(offsets)
        )
    return pieces


TRAINERS = {"mesh": on_mesh, "fsdp": fully_sharded, "anyhow": cut_anyhow}


def source(rank: Rank, scale: float) -> Any:
    state = TRAINERS[rank.job["trainer"]](rank, full(rank, scale))
    return iter(state.items()) if state is not None and rank.job.get("stream") else state


class Watch:
    """Counts the calls of full_tensor, and the bytes that come from other ranks."""

    def __init__(self) -> None:
        self.gathered, self.received, self.largest = 0, 0, 0
        full_tensor, exchange = DTensor.full_tensor, Resharding._exchange

        def counted(tensor: Any, **how: Any) -> Any:
            self.gathered += 1
            return full_tensor(tensor, **how)

        def watched(resharding: Resharding, give: list[list[Any]], take: list[list[Any]]) -> None:
            self.received += sum(view.nbytes for views in take for view in views)
            exchange(resharding, give, take)

        DTensor.full_tensor = counted  # type: ignore[method-assign]
        Resharding._exchange = watched  # type: ignore[method-assign]


# -------------------------------------------------------------------------------------- scenarios
def resharded(rank: Rank) -> Any:
    """Returns the answers of two versions, like mesh_ranks.bits, and how much was transferred."""
    begin(rank)
    watch = Watch()
    with rank.make() as generator:
        first = generator.sync_weights(source(rank, 1.0), cast=True)
        moved = {"received": watch.received, "bytes": first.bytes, "gathered": watch.gathered}
        out = {"digest": first.digest, **answers(generator)}
        second = generator.sync_weights(source(rank, 0.75), cast=True)
        return {
            "bits": [
                out,
                {"digest": second.digest, "version": second.version, **answers(generator)},
            ],
            **moved,
        }


def by_shards(rank: Rank) -> Any:
    """Like resharded, but each rank supplies the part of each tensor that Generator.shard
    returns."""
    begin(rank, trains=False)
    watch, state = Watch(), full(rank, 1.0)
    with rank.make() as generator:

        def pieces() -> Iterator[tuple[str, Any]]:
            for name, tensor in state.items():
                shard = generator.shard(name)  # inside the sync
                box = tuple(
                    slice(at, at + size)
                    for at, size in zip(shard.offsets, shard.sizes, strict=True)
                )
                yield name, rm.Piece(tensor[box].numpy(), shard.shape, shard.offsets)

        report = generator.sync_weights(pieces(), cast=True)
        with pytest.raises(rm.UnexpectedKeyError, match="nothing"):
            generator.shard("nothing")
        held = sum(math.prod(generator.shard(name).sizes) for name in state)
        got = {
            "received": watch.received,
            "bytes": report.bytes,
            "held": held,
            "all": sum(tensor.numel() for tensor in state.values()),
        }
        return {"bits": {"digest": report.digest, **answers(generator)}, **got}


def spoiled(rank: Rank, state: Named) -> Any:
    """Returns the state with an error on the victim, or on all ranks."""
    how, names = rank.job["how"], list(state)
    name = names[5]
    if how == "hole":  # the last row of one tensor is in nobody's piece
        old = state[name]
        keep = min(old.sizes[0], max(0, old.shape[0] - 1 - old.offsets[0]))
        state[name] = rm.Piece(
            old.array[:keep], old.shape, old.offsets if keep else (0,) * len(old.shape)
        )
    if how == "alike":  # every rank says that the whole tensor has one row more
        state[name] = rm.Piece(
            state[name].array,
            (state[name].shape[0] + 1, *state[name].shape[1:]),
            state[name].offsets,
        )
    if how == "huge":  # every rank says that the whole tensor is larger than can be
        old = state[name]
        state[name] = rm.Piece(
            np.zeros((0,) * len(old.shape), np.float32),
            (2**62, *[2**70] * (len(old.shape) - 1)),
            (0,) * len(old.shape),
        )
    if how == "unknown":
        state = {(f"{key}.no" if key == name else key): value for key, value in state.items()}
    if not rank.victim:
        return state
    if how == "order":
        state = {key: state[key] for key in [*names[:5], names[6], names[5], *names[7:]]}
    elif how == "fewer":
        # An iterator, because missing names in a mapping would be detected immediately.
        return iter([(key, state[key]) for key in names[:5]])
    elif how == "dtype":
        state[name] = rm.Piece(
            state[name].array.astype(np.float64), state[name].shape, state[name].offsets
        )
    elif how == "shape":
        state[name] = rm.Piece(
            state[name].array,
            (state[name].shape[0] + 1, *state[name].shape[1:]),
            state[name].offsets,
        )
    elif how == "nan":
        array = np.array(state[name].array)
        array[(0,) * array.ndim] = np.nan
        state[name] = rm.Piece(array, state[name].shape, state[name].offsets)
    elif how == "refused":
        state[name] = [1.0, 2.0]
    elif how in ("meta", "sparse", "emptied"):
        array = torch.from_numpy(np.array(state[name].array)).clone()
        if how == "emptied":
            array.untyped_storage().resize_(0)
        array = (
            array.to("meta") if how == "meta" else array.to_sparse() if how == "sparse" else array
        )
        state[name] = rm.Piece(array, state[name].shape, state[name].offsets)
    elif how == "raises":

        def broken() -> Iterator[tuple[str, Any]]:
            yield from list(state.items())[:5]
            raise KeyError("no more")

        return broken()
    return state


def rows(rank: Rank, state: Named) -> Named:
    """Pieces of rows, as even as they come."""
    out = {}
    for name, array in state.items():
        cuts = [len(array) * r // rank.world for r in range(rank.world + 1)]
        first, last = cuts[rank.rank], cuts[rank.rank + 1]
        out[name] = rm.Piece(
            np.asarray(array)[first:last], array.shape, (first, *[0] * (array.ndim - 1))
        )
    return out


def spoiled_pieces(rank: Rank) -> Any:
    """Makes a sync in pieces with an error. Returns its error, the version that serves then, and
    the next sync."""
    begin(rank, trains=False)
    with rank.make() as generator:
        generator.sync_weights(rows(rank, weights("moe")), cast=True)
        before = answers(generator)
        try:
            generator.sync_weights(spoiled(rank, rows(rank, weights("moe", 0.5))), cast=True)
        except (rm.Error, KeyError) as error:
            told = [type(error).__name__, str(error)]
        else:
            told = None
        same, version = answers(generator) == before, generator.version
        report = generator.sync_weights(rows(rank, weights("moe", 0.75)), cast=True)
        return {"told": told, "same": same, "version": version, "next": report.digest}


def lost_among_pieces(rank: Rank) -> Any:
    """The victim exits while pieces are exchanged."""
    begin(rank, trains=False)
    kept, count = Resharding._exchange, iter(range(rank.job["calls"]))
    generator = rank.make()
    generator.sync_weights(rows(rank, weights("moe")), cast=True)

    def counted(resharding: Resharding, give: Any, take: Any) -> None:
        if next(count, None) is None and rank.victim:
            rank.end_itself()
        kept(resharding, give, take)

    Resharding._exchange = counted  # type: ignore[method-assign]
    try:
        generator.sync_weights(rows(rank, weights("moe", 0.5)), cast=True)
    except rm.Error as error:
        told = [type(error).__name__, str(error)]
    version = generator.version
    generator.close()
    return {"told": told, "version": version}
