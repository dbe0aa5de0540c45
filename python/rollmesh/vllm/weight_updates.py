"""The worker's side of weight updates: the methods that vLLM calls on every worker, implemented
with rollmesh's syncs (rollmesh/weights/updates.py). A set is staged and then committed by one swap
on all ranks. The old version serves until the swap, and keeps serving if any part of the set is
wrong.

    init_weight_transfer_engine ─► start_weight_update ─► update_weights … ─► finish_weight_update
                                       ▲                        │ an error ends the update on all
                                                                ranks └────────────────────────┘
    model.load_weights(pairs), any number of times; committed at the next step, at a repeated name,
    or by process_weights_after_loading

rollmesh's version number is an integer that increases; the trainer passes it, or it is the next
number. vLLM's label ("step-1") is stored in the engine core, and
finish_weight_update(weight_version) sets it after all workers have committed.

All ranks make the same calls; if one rank refuses a call, all refuse it. Only one worker of an
executor raises an exception: vLLM's multiprocess executor stops reading replies at the first
failure, and would read the remaining ones as replies to its next call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from rollmesh.distributed.rank_engine import RankEngine
from rollmesh.errors import ConfigError, Error, FormatError, StateError
from rollmesh.runtime.arguments import PARTS
from rollmesh.runtime.messages import reason, shown
from rollmesh.weights.sync import SyncOptions, lent
from rollmesh.weights.transport.tensors import pair_of
from rollmesh.weights.updates import Sync, Weights

BACKEND = "rollmesh"
# Levels above 2 are treated as 2, as in vLLM's own workers. Refusing them would leave vLLM paused,
# since it pauses generation before it calls the workers.
KEPT, DROPPED = 1, 2
# verl replies to a bucket after load_weights has returned, and its trainer waits for the reply
# without a timeout.
VERL_EXTENSION = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"
TAGS = {"weights": PARTS["weights"], "kv_cache": PARTS["kv"]}

R = TypeVar("R")


def register_engine() -> None:
    """Registers the backend with vLLM, once."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "rollmesh.vllm.transfer", "TransferEngine"
        )


def answers(parallel: Any, rank: int) -> bool:
    """Returns whether this worker is the one that raises exceptions in its executor. With an
    external launcher each process is an executor."""
    return bool(
        parallel.distributed_executor_backend == "external_launcher"
        or rank == parallel.world_size - 1
    )


def replies(method: Callable[..., R]) -> Callable[..., R]:
    """Decorates a method that vLLM or a trainer calls on every worker. Only one worker raises the
    exception. Its text begins with its class, since vLLM passes on only the text."""

    @wraps(method)
    def reply(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return method(self, *args, **options)
        except Exception as error:
            if self.answers:
                raise (type(error) if isinstance(error, Error) else Error)(reason(error)) from error

    return reply


class _Hosted:
    """Replaces a generator's requests, since vLLM has the requests and updates keep those that
    run."""

    def step(self) -> int:
        raise StateError("expected inflight='keep': vLLM steps its requests")

    def rewind(self) -> None:
        self.step()


class WeightUpdates:
    """Weight updates of one worker. engine: this rank's engine. rank: the worker's number in its
    executor."""

    def __init__(self, engine: RankEngine, vllm_config: Any, rank: int):
        self._engine, self.vllm_config = engine, vllm_config
        parallel = vllm_config.parallel_config
        self.rank = rank
        # Number of this worker among the workers of all data parallel ranks.
        self.number = parallel.data_parallel_index * parallel.world_size + rank
        self.answers = answers(parallel, rank)
        self.weights = Weights(engine, _Hosted())  # type: ignore[arg-type]
        self.on_all_ranks = self.weights.on_all_ranks
        self.model = ServedModel(self)
        self._set: Sync | None = None  # sync of the open update, from its first bucket on
        # Sync of load_weights, whose calls do not mark the end of a set: the next step, a repeated
        # name or finish_load commits it.
        self._loaded: Sync | None = None
        self._loaded_names: set[str] = set()  # names pushed in that sync
        self._waits_for_each = parallel.worker_extension_cls == VERL_EXTENSION
        self._held: Error | None = None  # error that load_weights did not raise
        self._updating = False
        self._transfer: Any = None
        if vllm_config.weight_transfer_config is not None:
            self._transfer = self._make_transfer(vllm_config.weight_transfer_config)

    def _make_transfer(self, config: Any) -> Any:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory

        if config.backend != BACKEND:
            raise ConfigError(
                f"weight_transfer_config.backend: expected {BACKEND!r}, got {shown(config.backend)}"
            )
        register_engine()
        return WeightTransferEngineFactory.create_engine(
            config, self.vllm_config, torch.device("cpu"), self.model
        )

    # ----------------------------------------------------------------------------- what vLLM calls
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Begins the updates of a trainer. Drops an update that another trainer left open; raises
        StateError if that trainer is alive and has sent a part."""
        transfer = self._configured()
        info = self.on_all_ranks("the info of a trainer", transfer.parse_init_info, init_info)
        self.require_equal("a trainer", info.sender)
        self.on_all_ranks("a trainer's beginning", self._require_free, transfer, info.sender)
        self.drop("a trainer began anew")
        transfer.init_transfer_engine(info)

    def start_weight_update(self) -> None:
        transfer = self._configured()
        self.on_all_ranks("an update's beginning", self._require_free, transfer, None)
        if self._set is not None:
            self.drop("another update was started")
            self._refuse(
                "start_weight_update within an update, which is dropped now; call "
                "finish_weight_update before the next"
            )
        if self._engine.stats()["asleep"] & PARTS["weights"]:
            self._refuse(
                "start_weight_update while the weights are asleep; call wake_up(tags=['weights']) "
                "first"
            )
        transfer.start_weight_update()
        # May be True already, since an update does not belong to a trainer before its first bucket.
        self._updating = True

    def start_draft_weight_update(self) -> None:
        self._refuse("there is no draft model to update: no speculative decoding")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Stages one bucket. A list has one bucket for each worker, in the order of data parallel
        ranks and workers."""
        transfer = self._configured()
        if not self._updating:
            self._refuse(
                "update_weights without an open update; call start_weight_update first. An error "
                "ends an update"
            )
        with self._dropping():
            info = self.on_all_ranks("the info of a bucket", self._own, transfer, update_info)
            self.require_equal("a bucket of weights", (info.sender, info.version, info.abort))
        # A bucket of another sender is refused, and the update stays open.
        self.on_all_ranks("the sender of a bucket", transfer.require_sender, info)
        with self._dropping():
            transfer.update_weights(info)

    def finish_weight_update(self) -> None:
        """Commits the open update on all ranks or on none."""
        transfer = self._configured()
        if not self._updating:
            self._refuse(
                "finish_weight_update without an open update; call start_weight_update first. An "
                "error ends an update"
            )
        try:
            transfer.finish_weight_update()
        finally:
            self._close()

    def shutdown_weight_transfer_engine(self) -> None:
        if self._updating:
            self._refuse(
                "shutdown_weight_transfer_engine within an update; call finish_weight_update first"
            )
        if self._transfer is not None:
            self._transfer.shutdown()

    def weight_version(self) -> int | None:
        """Returns the number of the serving version; None before the first commit and while the
        weights are asleep."""
        return self.weights.version

    def compute_weight_checksums(self) -> dict[str, str]:
        """Returns the digest of all weights, on one worker of each data parallel rank. The digest
        does not depend on the mesh."""
        version, digest, *_ = self._engine.sync_state()
        number = self.vllm_config.parallel_config.data_parallel_index
        return {f"dp{number}": f"{digest:016x}"} if self.rank == 0 and version is not None else {}

    def reset_weights(self) -> None:
        self._refuse("reset_weights is not supported; push other weights, or call sleep(2)")

    def sleep(self, level: int = 1) -> None:
        """Frees memory. Level 1 frees the KV cache and moves weights from a GPU to host memory,
        from which wake_up restores them; on the CPU the weights stay awake, and an open update
        stays open. Level 2 frees KV cache and weights; the weights must be pushed again."""
        if not isinstance(level, int) or level < KEPT:
            raise ConfigError(
                f"sleep level: expected {KEPT} (keeps weights) or {DROPPED} (frees weights and KV "
                f"cache), got {shown(level)}"
            )
        if level == KEPT and self._engine.stats()["device"] == "cpu":
            self._rest(PARTS["kv"], False)
        else:
            self._rest(PARTS["kv"] | PARTS["weights"], level == KEPT)

    def wake_up(self, tags: list[str] | None = None) -> None:
        parts = self._engine.stats()["asleep"] if tags is None else _mask(tags)
        if parts:  # 0 if everything is already awake
            self.on_all_ranks("wake_up", self.weights.wake, parts)

    def discard(self, tags: Iterable[str]) -> None:
        """Frees the memory of these tags."""
        self._rest(_mask(tags), False)

    def commit_open_sync(self) -> None:
        """Commits the set that load_weights has pushed; called before each step. If the set is
        incomplete, drops it and raises IncompleteSyncError; the old version keeps serving."""
        self._held = None  # the trainer has not finished that set
        self._commit_loaded()

    @replies
    def finish_load(self) -> None:
        """Commits the set that load_weights has pushed, or raises the error that load_weights has
        kept. A trainer calls this after it has loaded all tensors."""
        held, self._held = self._held, None
        if held is not None:
            raise held
        self._commit_loaded()

    @replies
    def forbid(self, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces the model's compute_logits. Raises ConfigError if the new function does more
        than forbid tokens; the old one then stays."""
        self.model.never_drawn = _forbidden_by(edit, self.vllm_config.model_config.get_vocab_size())
        self.model._edit = edit

    def shutdown(self) -> None:
        """Closes the transfer engine because the worker is being closed."""
        if self._transfer is not None:
            self._transfer.shutdown()

    # --------------------------------------------------------------------- for the transfer engine
    def require_equal(self, what: str, value: Any) -> None:
        """Calls Weights.require_equal, for any value."""
        self.weights.require_equal(what, repr(value))

    @property
    def device(self) -> str:
        """This rank's device: "cpu" or "cuda:N"."""
        return str(self._engine.stats()["device"])

    def stage(
        self, bucket: Mapping[str, Any], version: int | None, options: dict[str, Any]
    ) -> None:
        """Stages a bucket of the open update; the first bucket begins the sync. A rank has lent
        tensors open only while it reads them."""
        if self._set is None:
            self._set = self._begun(version=version, **options)
        if (begun := self._set.options.version) != version:
            self._refuse(f"a bucket of version {version} in an update of version {begun}")
        self._set.require_open()
        self.on_all_ranks("a bucket of weights", self._push, bucket)

    def _push(self, bucket: Mapping[str, Any]) -> None:
        assert self._set is not None
        with lent(bucket) as is_lent_still:
            self._set.plan.push_mapping(bucket, None)
            is_lent_still()

    def commit(self, options: dict[str, Any]) -> None:
        if self._set is None:  # without a bucket; the commit raises IncompleteSyncError
            self._set = self._begun(**options)
        self.weights.finish(self._set, None)

    def drop(self, why: str) -> None:
        """Drops the open update, if there is one."""
        try:
            if self._set is not None:
                self.weights.reset(why, only=self._set)
        finally:
            self._close()

    def _close(self) -> None:
        self._updating, self._set = False, None
        if self._transfer is not None:
            self._transfer.end_weight_update()

    def _begun(self, **options: Any) -> Sync:
        begun = Sync(self.weights, _directly, SyncOptions(inflight="keep", **options))
        self.weights.begin(begun)
        return begun

    # ------------------------------------------------------------------------------ inside a reply
    def _configured(self) -> Any:
        if self._transfer is None:
            self._refuse(
                "no weight transfer: make the engine with "
                f"weight_transfer_config=WeightTransferConfig(backend={BACKEND!r})"
            )
        return self._transfer

    def _require_free(self, transfer: Any, sender: str | None) -> None:
        if self._set is not None and transfer.is_held(sender):
            self._refuse(
                "another trainer's update is open and its sender is alive; wait until it has "
                "finished or ended"
            )

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """Returns a context that drops the open update on an error."""
        try:
            yield
        except BaseException:
            self.drop("one of its buckets was refused")
            raise

    def _own(self, transfer: Any, update_info: Any) -> Any:
        if not isinstance(update_info, list):
            return transfer.parse_update_info(update_info)
        if self.number >= len(update_info):
            raise FormatError(
                f"update_info: expected one for each worker, got a list of {len(update_info)}; "
                f"this is worker {self.number}"
            )
        return transfer.parse_update_info(update_info[self.number])

    def _rest(self, parts: int, keep: bool) -> None:
        if parts & PARTS["weights"]:
            self.drop("the weights were put to sleep")
            self.weights.reset("the weights were put to sleep")
            self._held = None
        self.on_all_ranks("sleep", self.weights.sleep, parts, keep)

    @staticmethod
    def _refuse(why: str) -> None:
        raise StateError(why)

    # -------------------------------------------------------------------------- model.load_weights
    def load(self, pairs: Iterable[tuple[str, Any]]) -> set[str]:
        """Loads pairs of names and tensors, and returns the loaded names. Converts other float
        dtypes, as vLLM's loaders do. With verl the first error of a set is kept for finish_load,
        and the rest of the set is not read."""
        taken: set[str] = set()
        if not self._waits_for_each:
            self._load(pairs, taken)
        elif self._held is None:
            try:
                self._push_all(pairs, taken)
            except Exception as error:  # noqa: BLE001 (finish_load raises it, on all ranks)
                self._held = error if isinstance(error, Error) else Error(reason(error))
                # The frames of the traceback hold the tensors, whose memory verl is closing.
                error.__traceback__ = None
        return taken

    @replies
    def _load(self, pairs: Iterable[tuple[str, Any]], taken: set[str]) -> None:
        self._push_all(pairs, taken)

    def _push_all(self, pairs: Iterable[tuple[str, Any]], taken: set[str]) -> None:
        if self._updating:
            self._refuse("load_weights within an update; call finish_weight_update first")
        for entry in _each(pairs):
            name = None if isinstance(entry, Exception) else entry[0]
            if isinstance(name, str) and name in self._loaded_names:
                self._commit_loaded()
            if self._loaded is None or self._loaded.closed is not None:
                self._loaded, self._loaded_names = self._begun(cast=True), set()
            try:
                # Raised only here, since other ranks wait for this rank to begin the sync and push.
                if isinstance(entry, Exception):
                    raise entry
                self._loaded.push(*entry)
            except Exception as error:  # drops the set, so that a later step cannot commit the rest
                self.weights.abort(self._loaded, error)
                raise
            self._loaded_names.add(entry[0])
            taken.add(entry[0])

    def _commit_loaded(self) -> None:
        """Commits the set of load_weights, if one is open. If it is incomplete, drops it and raises
        IncompleteSyncError; the old version keeps serving."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None and loaded.closed is None:
            self.weights.finish(loaded, None)


def _each(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any] | Exception]:
    """Yields the entries of the trainer's iterator. If an exception ends the iterator, yields it as
    the last value."""
    try:
        yield from map(pair_of, pairs)
    except Exception as error:  # noqa: BLE001 (raised by the caller)
        yield error


def _mask(tags: Any) -> int:
    if not isinstance(tags, Iterable):
        raise ConfigError(f"tags: expected some of {', '.join(TAGS)}, got {shown(tags)}")
    mask = 0
    for tag in [tags] if isinstance(tags, str) else tags:
        if not isinstance(tag, str) or tag not in TAGS:
            raise ConfigError(f"tag: expected {' or '.join(map(repr, TAGS))}, got {shown(tag)}")
        mask |= TAGS[tag]
    return mask


class ServedModel(torch.nn.Module):
    """The object that vLLM and trainers find at `worker.model_runner.model`. It has no parameters;
    the engine of each rank has the rank's shards.

    `compute_logits` may be replaced, as verl does, by a function that sets the logits of some
    tokens to -inf. These tokens are then never drawn."""

    never_drawn: NDArray[np.int32]  # ascending token ids

    def __init__(self, updates: WeightUpdates):
        super().__init__()
        self._updates = updates
        self._edit: Callable[[torch.Tensor], torch.Tensor] = torch.clone
        self.never_drawn = np.zeros(0, np.int32)

    @property
    def updates(self) -> WeightUpdates:
        return self._updates

    @property
    def model(self) -> ServedModel:
        """Returns self. vLLM's models have their layers in this attribute, and verl reads it."""
        return self

    @property
    def compute_logits(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function that takes logits [rows, vocab] and returns a copy. Replacing it by a function
        that does more than forbid tokens raises ConfigError."""
        return self._edit

    @compute_logits.setter
    def compute_logits(self, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._updates.forbid(edit)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """Stages tensors by their Hugging Face names, one or more per call. The set is committed at
        the next step, at a repeated name or by process_weights_after_loading. If it is incomplete
        then, IncompleteSyncError is raised and the old version keeps serving."""
        return self._updates.load(weights)

    def process_weights_after_loading(self) -> None:
        """Commits the loaded set. vLLM's function of the same name calls this, and verl calls that
        function after each set."""
        self._updates.finish_load()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise StateError("this module is for load_weights only; the engine runs the forward pass")


def _forbidden_by(
    edit: Callable[[torch.Tensor], torch.Tensor], vocab_size: int
) -> NDArray[np.int32]:
    """Returns the tokens that `edit` sets to -inf, found by calling it with two rows."""
    given = torch.stack([torch.zeros(vocab_size), torch.arange(float(vocab_size))])
    edited = edit(given.clone())
    out = torch.isneginf(edited)
    if (
        edited.shape != given.shape
        or not torch.equal(out[0], out[1])
        or not torch.equal(edited, given.masked_fill(out, -torch.inf))
    ):
        raise ConfigError(
            "compute_logits: expected a function that sets the logits of certain tokens to -inf, "
            "got one that does more"
        )
    if out.all():
        raise ConfigError(
            "compute_logits: expected a function that leaves some tokens, got one that sets all "
            f"{vocab_size} to -inf"
        )
    return out[0].nonzero()[:, 0].numpy().astype(np.int32)


def _directly(function: Callable[[], Any], deadline: float | None) -> Any:
    """Calls a function directly, since a worker has one thread, which alone uses the engine."""
    del deadline
    return function()
