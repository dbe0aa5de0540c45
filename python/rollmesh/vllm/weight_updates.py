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

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch

from rollmesh.distributed.rank_engine import RankEngine, use_ranks
from rollmesh.errors import (
    AuthError,
    ConfigError,
    Error,
    FormatError,
    StateError,
    VersionError,
)
from rollmesh.runtime.arguments import PARTS, part_mask
from rollmesh.runtime.messages import reason, shown
from rollmesh.vllm.served_model import ServedModel, forbidden_by
from rollmesh.vllm.update_info import InitInfo, UpdateInfo, info_of
from rollmesh.weights.sync import SyncOptions, lent
from rollmesh.weights.transport import segment
from rollmesh.weights.transport.delta_folder import DeltaReader
from rollmesh.weights.transport.loans import ReceivedTensors
from rollmesh.weights.transport.manifest import parse
from rollmesh.weights.transport.segment import MappedSegment
from rollmesh.weights.transport.tensors import pair_of
from rollmesh.weights.updates import Sync, Weights

BACKEND = "rollmesh"
SEGMENT = re.compile(segment.PREFIX + "[0-9a-f]{32}")
REMEDY = "; lend=False at the sender copies through the host"
# Levels above 2 are treated as 2, as in vLLM's own workers. Refusing them would leave vLLM paused,
# since it pauses generation before it calls the workers.
KEPT, DROPPED = 1, 2
# verl replies to a bucket after load_weights has returned, and its trainer waits for the reply
# without a timeout.
VERL_EXTENSION = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"

R = TypeVar("R")


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
        if engine.has_peers:
            use_ranks(engine, self.weights)
        self.on_all_ranks = self.weights.on_all_ranks
        self.model = ServedModel(self)
        self._set: Sync | None = None  # sync of the open update, from its first bucket on
        # Sync of load_weights, whose calls do not mark the end of a set: the next step, a repeated
        # name or finish_load commits it.
        self._loaded: Sync | None = None
        self._waits_for_each = parallel.worker_extension_cls == VERL_EXTENSION
        self._held: Error | None = None  # error that load_weights did not raise
        self._updating = False
        self._info: InitInfo | None = None  # of the trainer that began last
        self._segment: MappedSegment | None = None  # segment of the last bucket
        self._folder: DeltaReader | None = None
        config = vllm_config.weight_transfer_config
        if config is not None and config.backend != BACKEND:
            raise ConfigError(
                f"weight_transfer_config.backend: expected {BACKEND!r}, got {shown(config.backend)}"
            )

    # ----------------------------------------------------------------------------- what vLLM calls
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Begins the updates of a trainer. Drops an update that another trainer left open; raises
        StateError if that trainer is alive and has sent a part."""
        if self.vllm_config.weight_transfer_config is None:
            raise StateError(
                "no weight transfer: make the engine with "
                f"weight_transfer_config=WeightTransferConfig(backend={BACKEND!r})"
            )
        info: InitInfo = self.on_all_ranks(
            "the info of a trainer", info_of, InitInfo, init_info, ConfigError
        )
        self.require_equal("a trainer", info.sender)
        self.on_all_ranks("a trainer's beginning", self._require_free, info.sender)
        self.drop("a trainer began anew")
        self.shutdown()
        if info.folder is not None:
            self._folder = self.on_all_ranks("the folder of weights", DeltaReader, info.folder)
        self._info = info

    def start_weight_update(self) -> None:
        self.on_all_ranks("an update's beginning", self._require_free, None)
        if self._set is not None:
            self.drop("another update was started")
            raise StateError(
                "start_weight_update within an update, which is dropped now; call "
                "finish_weight_update before the next"
            )
        if self._engine.stats()["asleep"] & PARTS["weights"]:
            raise StateError(
                "start_weight_update while the weights are asleep; call wake_up(tags=['weights']) "
                "first"
            )
        self._required_info()
        # May be True already, since an update does not belong to a trainer before its first bucket.
        self._updating = True

    def start_draft_weight_update(self) -> None:
        raise StateError("there is no draft model to update: no speculative decoding")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Stages one bucket. A list has one bucket for each worker, in the order of data parallel
        ranks and workers."""
        self._require_open("update_weights")
        with self._dropping():
            info = self.on_all_ranks("the info of a bucket", self._own, update_info)
            self.require_equal("a bucket of weights", (info.sender, info.version, info.abort))
        # A bucket of another sender is refused, and the update stays open.
        self.on_all_ranks("the sender of a bucket", self._require_sender, info)
        with self._dropping():
            self._receive(info)

    def finish_weight_update(self) -> None:
        """Commits the open update on all ranks or on none."""
        self._require_open("finish_weight_update")
        try:
            if self._set is None:  # without a bucket; the commit raises IncompleteSyncError
                self._set = self._begun(**self._options())
            self.weights.finish(self._set, None)
        finally:
            self._close()

    def shutdown_weight_transfer_engine(self) -> None:
        if self._updating:
            raise StateError(
                "shutdown_weight_transfer_engine within an update; call finish_weight_update first"
            )
        self.shutdown()

    def weight_version(self) -> int | None:
        """Returns the number of the serving version; None before the first commit and while the
        weights are asleep."""
        return self.weights.version

    def compute_weight_checksums(self) -> dict[str, str]:
        """Returns the digest of all weights, on one worker of each data parallel rank. The digest
        does not depend on the mesh."""
        version, digest = self._engine.sync_state()
        number = self.vllm_config.parallel_config.data_parallel_index
        return {f"dp{number}": f"{digest:016x}"} if self.rank == 0 and version is not None else {}

    def reset_weights(self) -> None:
        raise StateError("reset_weights is not supported; push other weights, or call sleep(2)")

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
        parts = self._engine.stats()["asleep"] if tags is None else tags and part_mask(tags)
        if parts:  # 0 if everything is already awake
            self.on_all_ranks("wake_up", self.weights.wake, parts)

    def discard(self, tags: Iterable[str]) -> None:
        """Frees the memory of these tags."""
        self._rest(part_mask(tags), False)

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
        self.model.never_drawn = forbidden_by(edit, self.vllm_config.model_config.get_vocab_size())
        self.model._edit = edit

    def shutdown(self) -> None:
        """Forgets the trainer and closes its segment."""
        self._info = self._folder = None
        self._close_segment()

    # ------------------------------------------------------------------------------------ a bucket
    def require_equal(self, what: str, value: Any) -> None:
        """Calls Weights.require_equal, for any value."""
        self.weights.require_equal(what, repr(value))

    def _receive(self, info: UpdateInfo) -> None:
        if info.abort is not None:
            self.drop(f"the trainer gave up: {info.abort}")
        elif self._folder is not None:
            version = self.on_all_ranks("reading the folder of weights", self._refresh, info)
            self.require_equal("a version of the folder", version)
            self._stage(self._folder, version)
        else:
            bucket = self.on_all_ranks("the arrival of a bucket", self._tensors, info)
            self._stage(bucket, info.version)

    def _refresh(self, info: UpdateInfo) -> int:
        assert self._folder is not None
        version = self._folder.refresh()
        if info.version not in (None, version):
            raise VersionError(
                f"version: expected the newest in the folder, {version}, got {info.version}"
            )
        return version

    def _tensors(self, info: UpdateInfo) -> ReceivedTensors:
        """Returns the tensors of a bucket. Lent tensors are opened later, since a rank must not
        wait for other ranks while it has them open."""
        mapped = self._mapped(info.segment, info.nonce)
        data = mapped.tensors(info.size)
        manifest = parse(info.description.encode(errors="surrogatepass"), data.size)
        what = "a bucket of weights"
        if manifest.loan is not None:
            if self._engine.stats()["device"] == "cpu":
                raise ConfigError(
                    f"lent tensors: expected a worker on a GPU, got one on the CPU{REMEDY}"
                )
            what = f"bucket {manifest.loan.number} of {mapped.path}"
        tensors = ReceivedTensors(remedy=REMEDY)
        tensors.receive(manifest, data, mapped, what)
        return tensors

    def _mapped(self, name: Any, nonce: Any) -> MappedSegment:
        """Returns the segment of this name. It stays mapped until a bucket has another name, since
        the trainer unlinks the file."""
        if not isinstance(name, str) or not SEGMENT.fullmatch(name) or not isinstance(nonce, str):
            raise FormatError(
                f"expected the segment and nonce of a WeightSender, got segment {shown(name)} and "
                f"nonce {shown(nonce)}"
            )
        if self._segment is None or self._segment.path.name != name:
            self._close_segment()
            path = segment.FOLDER / name
            try:
                self._segment = MappedSegment(path, nonce)
            except FileNotFoundError as error:
                raise AuthError(
                    f"{path} does not exist; with transport='shm' trainer and workers must be on "
                    "one machine"
                ) from error
        return self._segment

    def _stage(self, bucket: Mapping[str, Any], version: int | None) -> None:
        """Stages a bucket of the open update; the first bucket begins the sync. A rank has lent
        tensors open only while it reads them."""
        if self._set is None:
            self._set = self._begun(version=version, **self._options())
        if (begun := self._set.options.version) != version:
            raise StateError(f"a bucket of version {version} in an update of version {begun}")
        self._set.require_open()
        self.on_all_ranks("a bucket of weights", self._push, bucket)

    def _push(self, bucket: Mapping[str, Any]) -> None:
        assert self._set is not None
        with lent(bucket) as is_lent_still:
            self._set.plan.push_mapping(bucket, None)
            is_lent_still()

    def drop(self, why: str) -> None:
        """Drops the open update, if there is one."""
        try:
            if self._set is not None:
                self.weights.reset(why, only=self._set)
        finally:
            self._close()

    def _close(self) -> None:
        self._updating, self._set = False, None
        self._close_segment()

    def _close_segment(self) -> None:
        mapped, self._segment = self._segment, None
        if mapped is not None:
            mapped.close()

    def _options(self) -> dict[str, Any]:
        info = self._required_info()
        return {"cast": info.cast, "allow_bias_removal": info.allow_bias_removal}

    def _begun(self, **options: Any) -> Sync:
        begun = Sync(self.weights, _directly, SyncOptions(inflight="keep", **options))
        self.weights.begin(begun)
        return begun

    def _require_open(self, call: str) -> None:
        if not self._updating:
            raise StateError(
                f"{call} without an open update; call start_weight_update first. An error ends an "
                "update"
            )

    # ------------------------------------------------------------------------------ inside a reply
    def _required_info(self) -> InitInfo:
        if self._info is None:
            raise StateError("no trainer has begun: call init_weight_transfer_engine first")
        return self._info

    def _require_free(self, sender: str | None) -> None:
        """Raises StateError if the open update belongs to another trainer that is alive."""
        its_own = self._info is None or (sender is not None and self._info.sender == sender)
        if (
            self._set is not None
            and not its_own
            and self._segment is not None
            and self._segment.is_owned()
        ):
            raise StateError(
                "another trainer's update is open and its sender is alive; wait until it has "
                "finished or ended"
            )

    def _require_sender(self, info: UpdateInfo) -> None:
        """Raises StateError unless the bucket's sender is the one that called
        init_weight_transfer_engine last."""
        if info.sender != (begun := self._required_info().sender):
            raise StateError(
                f"a bucket of sender {shown(info.sender)} in the update of sender {shown(begun)}; "
                "call init_weight_transfer_engine first"
            )

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """Returns a context that drops the open update on an error."""
        try:
            yield
        except BaseException:
            self.drop("one of its buckets was refused")
            raise

    def _own(self, update_info: Any) -> UpdateInfo:
        if isinstance(update_info, list):
            if self.number >= len(update_info):
                raise FormatError(
                    f"update_info: expected one for each worker, got a list of {len(update_info)}; "
                    f"this is worker {self.number}"
                )
            update_info = update_info[self.number]
        return info_of(UpdateInfo, update_info, FormatError)

    def _rest(self, parts: int, keep: bool) -> None:
        if parts & PARTS["weights"]:
            self.drop("the weights were put to sleep")
            self.weights.reset("the weights were put to sleep")
            self._held = None
        self.on_all_ranks("sleep", self.weights.sleep, parts, keep)

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

    def _push_all(self, pairs: Iterable[tuple[str, Any]], taken: set[str]) -> None:
        if self._updating:
            raise StateError("load_weights within an update; call finish_weight_update first")
        for entry in _each(pairs):
            name = None if isinstance(entry, Exception) else entry[0]
            loaded = self._loaded
            if loaded is not None and isinstance(name, str) and name in loaded.plan.entries:
                self._commit_loaded()
            if self._loaded is None or self._loaded.closed is not None:
                self._loaded = self._begun(cast=True)
            try:
                # Raised only here, since other ranks wait for this rank to begin the sync and push.
                if isinstance(entry, Exception):
                    raise entry
                self._loaded.push(*entry)
            except Exception as error:  # drops the set, so that a later step cannot commit the rest
                self.weights.abort(self._loaded, error)
                raise
            taken.add(entry[0])

    _load = replies(_push_all)

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


def _directly(function: Callable[[], Any], deadline: float | None) -> Any:
    """Calls a function directly, since a worker has one thread, which alone uses the engine."""
    del deadline
    return function()
