"""The worker's side of weight updates: the methods that vLLM calls on every worker, over rollmesh's
syncs (rollmesh/weights/updates.py). A set is staged and then committed by one swap on all ranks.
Until the swap, and if any part of the set is wrong, the old version serves.

    init_weight_transfer_engine ─► start_weight_update ─► update_weights … ─► finish_weight_update
                                       ▲                        │ an error ends the update on all
                                                                ranks └────────────────────────┘
    model.load_weights(pairs), any number of times; committed at the next step, at a repeated name,
    or by process_weights_after_loading

The version number is rollmesh's, an integer that increases; the trainer gives it, or it is the next
one. The label ("step-1") is vLLM's: the engine core keeps it, and
finish_weight_update(weight_version) sets it once all workers have committed.

All ranks make the same calls, and what one refuses all refuse. Only one worker of an executor
raises: vLLM's multiprocess executor stops reading replies at the first failure and would take the
unread ones for replies to its next call.
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
# vLLM's own workers treat levels above 2 as 2. vLLM has paused generation by then, so refusing them
# would leave it paused.
KEPT, DROPPED = 1, 2
# verl answers a bucket once load_weights has returned, and its trainer waits for the answer without
# a timeout.
VERL_EXTENSION = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"
TAGS = {"weights": PARTS["weights"], "kv_cache": PARTS["kv"]}

T = TypeVar("T")


def register_engine() -> None:
    """Registers the backend with vLLM, once."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "rollmesh.vllm.transfer", "TransferEngine"
        )


def answers(parallel: Any, rank: int) -> bool:
    """Whether this worker is the one of its executor that raises. With an external launcher each
    process is an executor."""
    return bool(
        parallel.distributed_executor_backend == "external_launcher"
        or rank == parallel.world_size - 1
    )


def _replies(method: Callable[..., None]) -> Callable[..., None]:
    """vLLM passes on the text of an exception and not its class, so the text begins with the class.
    Only one worker raises."""

    @wraps(method)
    def reply(self: WeightUpdates, *args: Any, **options: Any) -> None:
        try:
            method(self, *args, **options)
        except Exception as error:
            if self._answers:
                raise (type(error) if isinstance(error, Error) else Error)(reason(error)) from error

    return reply


class _Hosted:
    """In place of a generator's requests: vLLM has them, and updates keep running requests."""

    def step(self) -> int:
        raise StateError("expected inflight='keep': vLLM steps its requests")

    def rewind(self) -> None:
        self.step()


class WeightUpdates:
    """One worker's weight updates. `engine` is this rank's; `rank` counts the workers of one
    executor."""

    def __init__(self, engine: RankEngine, vllm_config: Any, rank: int):
        self._engine, self.vllm_config = engine, vllm_config
        parallel = vllm_config.parallel_config
        self.rank = rank
        self.number = (
            parallel.data_parallel_index * parallel.world_size + rank
        )  # among the workers of all data parallel ranks
        self._answers = answers(parallel, rank)
        self.weights = Weights(engine, _Hosted())  # type: ignore[arg-type]
        self.model = ServedModel(self)
        self._set: Sync | None = None  # of the open update, from its first bucket on
        # Of load_weights, which does not say when a set is complete: the next step, a repeated name
        # or finish_load commits it.
        self._loaded: Sync | None = None
        self._loaded_names: set[str] = set()  # that were pushed
        self._waits_for_each = parallel.worker_extension_cls == VERL_EXTENSION
        self._held: Error | None = None  # what load_weights did not raise
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
    @_replies
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """A trainer begins. Drops an update that another trainer left open; StateError if that
        trainer is alive and has sent a part."""
        transfer = self._configured()
        info = self.on_all_ranks("the info of a trainer", transfer.parse_init_info, init_info)
        self.require_equal("a trainer", info.sender)
        self.on_all_ranks("a trainer's beginning", self._require_free, transfer, info.sender)
        self.drop("a trainer began anew")
        transfer.init_transfer_engine(info)

    @_replies
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
        self._updating = (
            True  # it may be so already: an update without a bucket belongs to no trainer yet
        )

    @_replies
    def start_draft_weight_update(self) -> None:
        self._refuse("there is no draft model to update: no speculative decoding")

    @_replies
    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """One bucket. Of a list each worker takes its own, in the order of data parallel ranks and
        workers."""
        transfer = self._configured()
        if not self._updating:
            self._refuse(
                "update_weights without an open update; call start_weight_update first. An error "
                "ends an update"
            )
        with self._dropping():
            info = self.on_all_ranks("the info of a bucket", self._own, transfer, update_info)
            self.require_equal("a bucket of weights", (info.sender, info.version, info.abort))
        self.on_all_ranks(
            "the sender of a bucket", transfer.require_sender, info
        )  # refuses a bucket; the update stays open
        with self._dropping():
            transfer.update_weights(info)

    @_replies
    def finish_weight_update(self) -> None:
        """Commits on all ranks or on none."""
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

    @_replies
    def shutdown_weight_transfer_engine(self) -> None:
        if self._updating:
            self._refuse(
                "shutdown_weight_transfer_engine within an update; call finish_weight_update first"
            )
        if self._transfer is not None:
            self._transfer.shutdown()

    def weight_version(self) -> int | None:
        """The serving version's number; None before the first and while the weights are asleep."""
        return self.weights.version

    def compute_weight_checksums(self) -> dict[str, str]:
        """The digest of all weights, from one worker of each data parallel rank; it does not depend
        on the mesh."""
        version, digest, *_ = self._engine.sync_state()
        number = self.vllm_config.parallel_config.data_parallel_index
        return {f"dp{number}": f"{digest:016x}"} if self.rank == 0 and version is not None else {}

    @_replies
    def reset_weights(self) -> None:
        self._refuse("reset_weights is not supported; push other weights, or call sleep(2)")

    @_replies
    def sleep(self, level: int = 1) -> None:
        """1: frees the KV cache and moves weights from a GPU to host memory, from which wake_up
        restores them. On the CPU they stay awake, and an open update stays open. 2: frees both;
        weights have to be pushed again."""
        if not isinstance(level, int) or level < KEPT:
            raise ConfigError(
                f"sleep level: expected {KEPT} (keeps weights) or {DROPPED} (frees weights and KV "
                f"cache), got {shown(level)}"
            )
        if level == KEPT and self._engine.stats()["device"] == "cpu":
            self._rest(PARTS["kv"], False)
        else:
            self._rest(PARTS["kv"] | PARTS["weights"], level == KEPT)

    @_replies
    def wake_up(self, tags: list[str] | None = None) -> None:
        parts = self._engine.stats()["asleep"] if tags is None else _mask(tags)
        if parts:  # 0 if everything is awake already
            self.on_all_ranks("wake_up", self.weights.wake, parts)

    @_replies
    def discard(self, tags: Iterable[str]) -> None:
        """Sleep by tag."""
        self._rest(_mask(tags), False)

    def commit_open_sync(self) -> None:
        """Called before a step: commits the set that load_weights has pushed. IncompleteSyncError
        drops it; the old version serves."""
        self._held = None  # of a set that its trainer has left
        self._commit_loaded()

    @_replies
    def finish_load(self) -> None:
        """Called by a trainer that has loaded all: the same, or the error that load_weights has
        kept."""
        held, self._held = self._held, None
        if held is not None:
            raise held
        self._commit_loaded()

    @_replies
    def forbid(self, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """The model's compute_logits is replaced. ConfigError if the new one does more than to
        forbid tokens; the old one stays then."""
        self.model.never_drawn = _forbidden_by(edit, self.vllm_config.model_config.get_vocab_size())
        self.model._edit = edit

    def shutdown(self) -> None:
        """The worker is being closed."""
        if self._transfer is not None:
            self._transfer.shutdown()

    # --------------------------------------------------------------------- for the transfer engine
    def on_all_ranks(self, where: str, action: Callable[..., T], *args: Any) -> T:
        """As Weights.on_all_ranks."""
        return self.weights.on_all_ranks(where, action, *args)

    def require_equal(self, what: str, value: Any) -> None:
        """As Weights.require_equal, for any value."""
        self.weights.require_equal(what, repr(value))

    @property
    def device(self) -> str:
        """This rank's device: "cpu" or "cuda:N"."""
        return self._engine.stats()["device"]

    def stage(
        self, bucket: Mapping[str, Any], version: int | None, options: dict[str, Any]
    ) -> None:
        """Stages a bucket of the open update; its first bucket begins the sync. A rank keeps lent
        tensors open only while it reads."""
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
        if self._set is None:  # no bucket came; the commit raises IncompleteSyncError
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
        """Drops the open update on an error."""
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
        """Converts other float dtypes, as vLLM's loaders do. Returns the names that were loaded.
        Under verl the first error of a set is kept for finish_load, and the rest of the set is not
        read."""
        taken: set[str] = set()
        if not self._waits_for_each:
            self._load(pairs, taken)
        elif self._held is None:
            try:
                self._push_all(pairs, taken)
            except Exception as error:  # noqa: BLE001 (raised by finish_load; on all ranks alike, so that none goes on)
                self._held = error if isinstance(error, Error) else Error(reason(error))
                error.__traceback__ = (
                    None  # its frames hold the tensors, whose memory verl closes now
                )
        return taken

    @_replies
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
                # raised here, since other ranks wait for this rank to begin the sync and push
                if isinstance(entry, Exception):
                    raise entry
                self._loaded.push(*entry)
            except Exception as error:  # drop the set: no later step may commit the rest of it
                self.weights.abort(self._loaded, error)
                raise
            self._loaded_names.add(entry[0])
            taken.add(entry[0])

    def _commit_loaded(self) -> None:
        """Commits the set of load_weights, if one is open. IncompleteSyncError drops it; the old
        version serves."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None and loaded.closed is None:
            self.weights.finish(loaded, None)


def _each(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any] | Exception]:
    """The entries of the trainer's iterator; last the exception that ended it, if one did."""
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
    """What vLLM and trainers get as `worker.model_runner.model`. It has no parameters; the engine
    has them, each rank its shard.

    `compute_logits` may be replaced, as verl does, by a function that sets the logits of some
    tokens to -inf: they are never drawn then."""

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
        """vLLM's models have their layers there, and verl looks for it."""
        return self

    @property
    def compute_logits(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Takes logits [rows, vocab] and returns a copy. ConfigError if it is replaced by what does
        more than to forbid tokens."""
        return self._edit

    @compute_logits.setter
    def compute_logits(self, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._updates.forbid(edit)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """Stages tensors by their Hugging Face names, one or many per call. The set is committed at
        the next step, at a repeated name or by process_weights_after_loading; if it is incomplete
        then, IncompleteSyncError is raised and the old version serves."""
        return self._updates.load(weights)

    def process_weights_after_loading(self) -> None:
        """Commits what was loaded. vLLM's function of this name calls it, and verl calls that after
        each set."""
        self._updates.finish_load()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise StateError("this module is for load_weights only; the engine runs the forward pass")


def _forbidden_by(
    edit: Callable[[torch.Tensor], torch.Tensor], vocab_size: int
) -> NDArray[np.int32]:
    """The tokens that `edit` sets to -inf, tried on two rows."""
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
    """A worker has one thread, which has the engine to itself."""
    del deadline
    return function()
