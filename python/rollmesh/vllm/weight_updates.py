"""The worker's side of new weights: what vLLM calls on every worker, in front of rollmesh's own syncs (rollmesh/weights/updates.py).
A set is staged and committed by one swap on all ranks, so while it comes, and when any part of it is bad, the version before serves.

    init_weight_transfer_engine ─► start_weight_update ─► update_weights … ─► finish_weight_update
                                       ▲                        │ an error closes the update, on all ranks
                                       └────────────────────────┘
    model.load_weights(pairs), any number of times; the set closes at the next step or at a repeated name

The number of a version is ours, an integer that increases: the trainer gives it, or it is the next. The label of a version
("step-1") is vLLM's: the engine core keeps it, and finish_weight_update(weight_version) sets it once all workers have committed.

All ranks make the same calls, and what one refuses all refuse. Only one worker of an executor raises: vLLM's multiprocess
executor stops reading replies at the first failure, and would take those that it has left for the replies to its next call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch

from rollmesh.distributed.rank_engine import RankEngine
from rollmesh.errors import ConfigError, Error, FormatError, StateError, UnsupportedTensorError
from rollmesh.runtime.arguments import PARTS
from rollmesh.runtime.messages import reason, shown
from rollmesh.weights.sync import SyncOptions, lent, push_mapping
from rollmesh.weights.updates import Sync, Weights

BACKEND = "rollmesh"
# What is above 2 is 2 to vLLM's own workers: to refuse it here would leave generation paused, which vLLM has done by then.
KEPT, DROPPED = 1, 2
TAGS = {"weights": PARTS["weights"], "kv_cache": PARTS["kv"]}

T = TypeVar("T")


def register_engine() -> None:
    """Tells vLLM of the backend; again does nothing."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "rollmesh.vllm.transfer", "TransferEngine")


def answers(parallel: Any, rank: int) -> bool:
    """Whether this worker is the one that raises. Under an external launcher each process is an executor of its own."""
    return bool(parallel.distributed_executor_backend == "external_launcher" or rank == parallel.world_size - 1)


def _replies(method: Callable[..., None]) -> Callable[..., None]:
    """vLLM gives its caller the words of an exception and not its class, so the class stands in them. Only one worker raises."""

    @wraps(method)
    def reply(self: WeightUpdates, *args: Any, **options: Any) -> None:
        try:
            method(self, *args, **options)
        except Exception as error:
            if self._answers:
                raise (type(error) if isinstance(error, Error) else Error)(reason(error)) from error

    return reply


class _Hosted:
    """In place of a generator's requests: vLLM has them, and what runs is kept."""

    def step(self) -> int:
        raise StateError("vLLM steps its requests, wanted inflight='keep'")

    def rewind(self) -> None:
        self.step()


class WeightUpdates:
    """Of one worker. `engine` is this rank's; `rank` counts the workers of one executor."""

    def __init__(self, engine: RankEngine, vllm_config: Any, rank: int):
        self._engine, self._config = engine, vllm_config
        parallel = vllm_config.parallel_config
        self.rank = rank
        self.number = parallel.data_parallel_index * parallel.world_size + rank  # among the workers of all data parallel ranks
        self._answers = answers(parallel, rank)
        self.weights = Weights(engine, _Hosted())  # type: ignore[arg-type]
        self.model = ServedModel(self)
        self._set: Sync | None = None  # of the open update, once its first block has come
        self._loaded: Sync | None = None  # of load_weights
        self._updating = False
        self._transfer: Any = None
        if vllm_config.weight_transfer_config is not None:
            self._transfer = self._make_transfer(vllm_config.weight_transfer_config)

    def _make_transfer(self, config: Any) -> Any:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory

        if config.backend != BACKEND:
            raise ConfigError(f"weight_transfer_config.backend = {shown(config.backend)}, wanted {BACKEND!r}")
        register_engine()
        return WeightTransferEngineFactory.create_engine(config, self._config, torch.device("cpu"), self.model)

    # ---------------------------------------------------------------------------------------- what vLLM calls
    @_replies
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """A trainer begins; an update that another has left open is dropped. StateError while that one lives and is within it."""
        transfer = self._configured()
        info = self.together("the info of a trainer", transfer.parse_init_info, init_info)
        self.alike("a trainer", info.sender)
        self.together("a trainer's beginning", self._require_free, transfer, info.sender)
        self.drop("a trainer began anew")
        transfer.init_transfer_engine(info)

    @_replies
    def start_weight_update(self) -> None:
        transfer = self._configured()
        self.together("an update's beginning", self._require_free, transfer, None)
        if self._set is not None:
            self.drop("another update was started")
            self._refuse("start_weight_update within an update: that one is dropped now, wanted finish_weight_update before the next")
        if self._engine.stats()["asleep"] & PARTS["weights"]:
            self._refuse("start_weight_update while the weights are asleep: wake_up(tags=['weights']) first")
        transfer.start_weight_update()
        self._updating = True  # again, where no block has come: nobody can say whose it was

    @_replies
    def start_draft_weight_update(self) -> None:
        self._refuse("there is no draft model to update; rollmesh does not speculate")

    @_replies
    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """One block. Of a list each worker takes its own, in the order of data parallel ranks and workers."""
        transfer = self._configured()
        if not self._updating:
            self._refuse("update_weights without an open update: start_weight_update first; an error in one closes it")
        with self._dropping():
            info = self.together("the info of a block", self._own, transfer, update_info)
            self.alike("a block of weights", (info.sender, info.version, info.abort))
        self.together("a block's sender", transfer.require_sender, info)  # the update goes on without a block of another's
        with self._dropping():
            transfer.update_weights(info)

    @_replies
    def finish_weight_update(self) -> None:
        """Commits on all ranks, or on none."""
        transfer = self._configured()
        if not self._updating:
            self._refuse("finish_weight_update without an open update: start_weight_update first; an error in one closes it")
        try:
            transfer.finish_weight_update()
        finally:
            self._close()

    @_replies
    def shutdown_weight_transfer_engine(self) -> None:
        if self._updating:
            self._refuse("shutdown_weight_transfer_engine within an update: finish_weight_update first")
        if self._transfer is not None:
            self._transfer.shutdown()

    def weight_version(self) -> int | None:
        """Number of the serving version; None before the first, and while the weights are asleep."""
        return self.weights.version

    def compute_weight_checksums(self) -> dict[str, str]:
        """Over names and values of all weights, whatever the mesh: from one worker of each data parallel rank."""
        version, digest, *_ = self._engine.sync_state()
        number = self._config.parallel_config.data_parallel_index
        return {f"dp{number}": f"{digest:016x}"} if self.rank == 0 and version is not None else {}

    @_replies
    def reset_weights(self) -> None:
        self._refuse("weights are never zeroed: push others, or sleep(2)")

    @_replies
    def sleep(self, level: int = 1) -> None:
        """1: the KV cache goes, and the weights from a GPU to the host's memory, from which wake_up has them serve again. On the CPU they
        are there already: they stay awake, and so does a set that is open. 2: both go, and weights have to be pushed anew."""
        if not isinstance(level, int) or level < KEPT:
            raise ConfigError(f"sleep level {shown(level)}, wanted {KEPT} (the KV cache goes, weights are kept) or {DROPPED} (both go)")
        if level == KEPT and self._engine.stats()["device"] == "cpu":
            self._rest(PARTS["kv"], False)
        else:
            self._rest(PARTS["kv"] | PARTS["weights"], level == KEPT)

    @_replies
    def wake_up(self, tags: list[str] | None = None) -> None:
        parts = self._engine.stats()["asleep"] if tags is None else _mask(tags)
        if parts:  # none, where all of them were woken by tag
            self.together("wake_up", self.weights.wake, parts)

    @_replies
    def discard(self, tags: Iterable[str]) -> None:
        """Sleep by tag."""
        self._rest(_mask(tags), False)

    def close_unscoped(self) -> None:
        """Before a step: a set that load_weights has pushed is committed. IncompleteSyncError when some of it is missing; then it is
        dropped, and the version before serves."""
        self.weights.close_unscoped()

    def shutdown(self) -> None:
        """The worker ends."""
        if self._transfer is not None:
            self._transfer.shutdown()

    # ---------------------------------------------------------------------------------------- the transfer engine's means
    def together(self, where: str, action: Callable[..., T], *args: Any) -> T:
        """As Weights.together."""
        return self.weights.together(where, action, *args)

    def alike(self, what: str, value: Any) -> None:
        """As Weights.alike, of any value."""
        self.weights.alike(what, repr(value))

    @property
    def device(self) -> str:
        """Of this rank's engine: "cpu", or "cuda:" and a number."""
        return self._engine.stats()["device"]

    def stage(self, block: Mapping[str, Any], version: int | None, options: dict[str, Any]) -> None:
        """A block into the set of the open update, which begins with its first. What is lent of it is open on this rank until the rank
        has read what it needs."""
        if self._set is None:
            self._begin(version, options)
        assert self._set is not None
        if (begun := self._set.options.version) != version:
            self._refuse(f"a block of version {version} in an update of version {begun}")
        self._set.require_open()
        self.together("a block of weights", self._push, block)

    def _push(self, block: Mapping[str, Any]) -> None:
        with lent(block) as is_lent_still:
            push_mapping(self._engine, block, None)
            is_lent_still()

    def commit(self, options: dict[str, Any]) -> None:
        if self._set is None:
            self._begin(None, options)  # nothing has come, which the commit says
        assert self._set is not None
        self.weights.finish(self._set, None)

    def drop(self, why: str) -> None:
        """The open update, if there is one, ends."""
        try:
            if self._set is not None:
                self.weights.reset(why, only=self._set)
        finally:
            self._close()

    def _close(self) -> None:
        self._updating, self._set = False, None
        if self._transfer is not None:
            self._transfer.end_weight_update()

    def _begin(self, version: int | None, options: dict[str, Any]) -> None:
        begun = Sync(self.weights, lambda _: nullcontext(), SyncOptions(version=version, inflight="keep", **options))
        begun.scoped = True  # no step closes it
        self.weights.begin(begun)
        self._set = begun

    # ---------------------------------------------------------------------------------------- inside a reply
    def _configured(self) -> Any:
        if self._transfer is None:
            self._refuse(
                f"no weight transfer: wanted weight_transfer_config=WeightTransferConfig(backend={BACKEND!r}) when the engine is made"
            )
        return self._transfer

    def _require_free(self, transfer: Any, sender: str | None) -> None:
        if self._set is not None and transfer.is_held(sender):
            self._refuse("another trainer's update is open, and its sender lives: wanted its end, or the sender's, first")

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """An error ends the open update."""
        try:
            yield
        except BaseException:
            self.drop("a block of it was refused")
            raise

    def _own(self, transfer: Any, update_info: Any) -> Any:
        if not isinstance(update_info, list):
            return transfer.parse_update_info(update_info)
        if self.number >= len(update_info):
            raise FormatError(f"update_info is a list of {len(update_info)}, wanted one for each worker: this one is number {self.number}")
        return transfer.parse_update_info(update_info[self.number])

    def _rest(self, parts: int, keep: bool) -> None:
        if parts & PARTS["weights"]:
            self.drop("the weights were put to sleep")
            self.weights.reset("the weights were put to sleep")
        self.together("sleep", self.weights.sleep, parts, keep)

    @staticmethod
    def _refuse(why: str) -> None:
        raise StateError(why)

    # ---------------------------------------------------------------------------------------- model.load_weights
    def load(self, pairs: Iterable[tuple[str, Any]]) -> set[str]:
        """As vLLM's loaders: other float dtypes are converted. Returns the names that were taken."""
        taken: set[str] = set()
        self._load(pairs, taken)
        return taken

    @_replies
    def _load(self, pairs: Iterable[tuple[str, Any]], taken: set[str]) -> None:
        if self._updating:
            self._refuse("load_weights within an update: finish_weight_update first")
        for entry in _each(pairs):
            if self._loaded is None or self._loaded.closed is not None:
                self._loaded = Sync(self.weights, lambda _: nullcontext(), SyncOptions(cast=True, inflight="keep"))
                self.weights.begin(self._loaded)
            try:
                if isinstance(entry, Exception):  # other ranks wait for this one's tensor, and for the set's beginning if it is the first
                    raise entry
                self._loaded.push(*entry)
            except Exception as error:  # the caller has been told that its set failed: no later step may commit the rest
                self.weights.abort(self._loaded, error)
                raise
            taken.add(entry[0])


def _each(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any] | Exception]:
    """What the trainer's iterator gives, and last the exception that it ends by."""
    try:
        for entry in pairs:
            if not isinstance(entry, (tuple, list)) or len(entry) != 2:
                raise UnsupportedTensorError(f"load_weights was given a {type(entry).__name__}, wanted pairs (name, tensor)")
            yield entry[0], entry[1]
    except Exception as error:  # noqa: BLE001 (raised by the reader)
        yield error


def _mask(tags: Any) -> int:
    if not isinstance(tags, Iterable):
        raise ConfigError(f"tags = {shown(tags)}, wanted some of {', '.join(TAGS)}")
    mask = 0
    for tag in [tags] if isinstance(tags, str) else tags:
        if not isinstance(tag, str) or tag not in TAGS:
            raise ConfigError(f"tag {shown(tag)}, wanted {' or '.join(map(repr, TAGS))}")
        mask |= TAGS[tag]
    return mask


class ServedModel(torch.nn.Module):
    """What vLLM and trainers reach as `worker.model_runner.model`. It has no parameters: the engine has them, each rank its own part."""

    def __init__(self, updates: WeightUpdates):
        super().__init__()
        self._updates = updates

    @property
    def updates(self) -> WeightUpdates:
        return self._updates

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """Stages tensors by their Hugging Face names, one or many a call. The set is committed at the next step, or when a name comes
        again; if something is missing then, IncompleteSyncError, and the version before serves."""
        return self._updates.load(weights)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise StateError("the forward pass is the engine's; this module is for load_weights")
