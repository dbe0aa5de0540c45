"""The generator: makes rollouts with the weights that a trainer pushes into it.

Path of a token: generate → Requests.add → engine steps → RequestOutput.
Path of a weight: sync_weights → check → push → commit.

Threads: any thread may call any method. A thread of the generator runs the engine, and calls begin
in the order in which they arrive (request/loop.py). Calls of other threads run between the steps of
generate; a sync has exclusive use of the engine. A call from inside another call (such as a weights
iterator that generates) and every call in a forked child raise StateError.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollmesh import _core
from rollmesh.distributed.comm import Nccl
from rollmesh.distributed.leading import LedEngine, Operations, by_every_rank, make_call
from rollmesh.distributed.mesh import Mesh
from rollmesh.distributed.peers import FOLLOW, join
from rollmesh.distributed.rank_engine import use_ranks
from rollmesh.errors import ConfigError, StateError, UnexpectedKeyError
from rollmesh.model.spec import ModelSpec
from rollmesh.options import EngineOptions, GeneratorOptions, check_option, documentation, takes
from rollmesh.request.arguments import check_vocabulary, eos_ids
from rollmesh.request.calls import Calls
from rollmesh.request.loop import Call
from rollmesh.request.outputs import SelfTestReport, SyncReport
from rollmesh.request.requests import Requests
from rollmesh.request.text import Prompt, TextCodec, tokenizer_of_folder
from rollmesh.runtime import cublas
from rollmesh.runtime.arguments import (
    PARTS,
    boolean,
    choice,
    deadline_of,
    part_mask,
    part_names,
)
from rollmesh.runtime.devices import CUDA_FAMILIES, Device, device_of
from rollmesh.runtime.engine_views import OpTime
from rollmesh.runtime.messages import shown
from rollmesh.weights.resharding import BOX_DIMS
from rollmesh.weights.self_test import Scorer, run_self_test
from rollmesh.weights.sync import SyncOptions, source_of_follower
from rollmesh.weights.transport.tensors import check_source
from rollmesh.weights.updates import Sync, Weights

PEFT = (".lora_", ".base_layer.", "base_model.model.")  # parts of names in a model with adapters
_log = logging.getLogger("rollmesh")
_log.addHandler(logging.NullHandler())  # prints nothing unless the program adds a handler


P = ParamSpec("P")
T = TypeVar("T")


class ParameterInfo(NamedTuple):
    """One entry of Generator.manifest()."""

    shape: tuple[int, ...]
    dtype: str  # "bfloat16" or "float32"
    required: bool


class Shard(NamedTuple):
    """The box of a tensor that this process needs, in elements; returned by Generator.shard().
    `sizes` contains a 0 if the process needs no part of the tensor."""

    shape: tuple[int, ...]  # shape of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Generator(Calls):
    """Generates tokens with a model whose weights come from a trainer. Creating a generator loads
    no weights. Its arguments are the rows of rollmesh.options.GeneratorOptions:

    {options}

    Results do not depend, bit for bit, on mesh, comm, ep_backend, sequence_parallel, block_size,
    enable_prefix_caching, threads, enforce_eager or the CPU's isa.

    Raises ConfigError (a setting that is not allowed, a missing device), MemoryError, CapacityError
    (too little memory on a GPU, or memory_fraction leaves no room for a page), DeviceError (CUDA
    failed).
    """

    @takes(GeneratorOptions)
    def __init__(self, options: GeneratorOptions):
        spec, dtype = options.spec, options.dtype
        self.spec, self.dtype, self.tokenizer = spec, dtype, options.tokenizer
        self.mesh = options.mesh or Mesh()
        length = options.max_model_len
        if length is None:
            # A length of the config, unlike the caller's, has not been checked.
            has_own = spec.rope_settings.depends_on_length
            length = min(spec.max_position_embeddings, 2**31 - 1) if has_own else 4096
        self.max_model_len = check_option("max_model_len", length)
        where = device_of(options.device)
        nccl = options.comm if isinstance(options.comm, Nccl) else None
        if nccl is not None:
            where = nccl.place(where, self.mesh)
        self._nccl = None if nccl is None else str(nccl.library)
        blas = self._cublas = cublas.for_generator(where, dtype) if options.fast else None
        codec = None if self.tokenizer is None else TextCodec(self.tokenizer)
        check_vocabulary(self.tokenizer, spec)
        self.eos_token_ids = eos_ids(options.eos_token_ids, self.tokenizer, spec)
        num_parameters = spec.num_parameters  # allocates, so before the engine exists
        engine = join(
            spec.engine_values(self.max_model_len),
            self._engine_options(options, where, nccl),
            None if nccl is not None and nccl.group is None else options.comm,
            self.mesh,
            partial(LedEngine, mesh=self.mesh),
        )
        requests = Requests(
            engine,
            codec,
            self.eos_token_ids,
            spec.vocab_size,
            dtype,
            self.max_model_len,
            blas is None,
        )
        self._weights = Weights(engine, requests)
        if engine.has_peers:
            use_ranks(engine, requests, self._weights, self)
        try:
            super().__init__(engine, requests, codec)
        except BaseException:
            engine.close()
            raise
        most = spec.rope_settings.longest
        if options.max_model_len is not None and self.max_model_len > most:
            _log.warning(
                "max_model_len: expected at most %d, the positions that the model's config is made "
                "for, got %d; a sequence beyond them may be of low quality",
                most,
                self.max_model_len,
            )
        stats = self._engine.stats()
        _log.info(
            "generator: %s, %.2f B parameters, %s, tp=%d dp=%d ep=%d, %s (%s), %d KV pages of %d "
            "positions",
            spec.model_type, num_parameters / 1e9, dtype, self.mesh.tp, self.mesh.dp,
            self.mesh.ep,
            options.device, stats["isa"], stats["kv_pages"], options.block_size,
        )  # fmt: skip

    def _engine_options(
        self, options: GeneratorOptions, where: Device, nccl: Nccl | None
    ) -> EngineOptions:
        on_gpu, gib, blas = where.cuda_library is not None, options.kv_cache_gib, self._cublas
        if options.profile and on_gpu:
            raise ConfigError(
                "profile: expected False on a GPU, whose ops end later than they return, got True; "
                "Nsight Systems shows them"
            )
        isa = options.isa
        if isa is not None:
            choice("isa", isa, CUDA_FAMILIES if on_gpu else _core.available_isas())
        return EngineOptions(
            **options.shared(),
            max_model_len=self.max_model_len,
            eos_token_ids=np.asarray(self.eos_token_ids, dtype=np.int32),
            tp=self.mesh.tp,
            dp=self.mesh.dp,
            ep=self.mesh.ep,
            kv_bytes=0 if gib is None else int(gib * 2**30),
            memory_fraction=options.memory_fraction if gib is None else 0.0,
            isa=None if on_gpu else isa,
            cuda_library=where.cuda_library,
            cuda_ordinal=where.cuda_ordinal,
            cuda_family=(isa or (cublas.FAMILY if blas else None)) if on_gpu else None,
            nccl_library=None if nccl is None else nccl.library.path,
            cublas_library=None if blas is None else blas.path,
            cublas_version=None if blas is None else ".".join(map(str, blas.version)),
        )

    @classmethod
    def from_hf(
        cls, folder_or_config: Any, *, ignore: tuple[str, ...] = (), **options: Any
    ) -> Generator:
        """Makes a generator for the model of a Hugging Face folder or config. Reads no weights; use
        sync_weights to load them.

        folder_or_config  a local folder with config.json (its tokenizer and the eos_token_id of its
                          generation_config.json are used too), the path of a config.json, a
                          transformers config object, or its dict
        ignore            keys of the config to ignore, as in ModelSpec.from_hf, such as
                          ("rope_scaling.attn_factor",)
        options           options of Generator; `tokenizer` replaces the folder's tokenizer, and
                          tokenizer=None means no tokenizer

        Raises ConfigError (names the path that cannot be read, or the key and value that are not
        supported), FormatError (a config.json that is not a JSON object), and the errors of
        Generator.
        """
        spec = ModelSpec.from_hf(folder_or_config, ignore=ignore)
        if (
            "tokenizer" not in options
            and isinstance(folder_or_config, (str, os.PathLike))
            and os.path.isdir(folder_or_config)
        ):
            options["tokenizer"] = tokenizer_of_folder(Path(folder_or_config))
        return cls(spec, **options)

    # --------------------------------------------------------------------------------------- state
    @property
    def version(self) -> int | None:
        """Version number of the serving weights; None before the first sync and while the weights
        are asleep."""
        return self._weights.version

    def manifest(self) -> dict[str, ParameterInfo]:
        """Returns the shape and dtype of each parameter that a sync has to provide, by its Hugging
        Face name. A sync also accepts packed and torchtitan names."""
        self._loop.check_alive()
        return {
            name: ParameterInfo(shape, dtype, required)
            for name, shape, dtype, required in self._weights.manifest
        }

    def shard(self, name: str) -> Shard:
        """Returns the smallest box of a tensor that contains every part that the ranks of this
        process need, for sources that can read a part of a tensor. If all ranks are in one process,
        it is the whole tensor. name: any name that a sync accepts. A source may call this while a
        sync reads it. Raises UnexpectedKeyError if the model has no tensor of that name."""
        self._loop.check_alive()

        def wanted() -> tuple[tuple[int, ...], NDArray[np.int64]]:
            entry = self._engine.sync_resolve(name)
            return entry.shape, entry.wanted()

        shape, rows = wanted() if self._loop.is_inside else self._loop.call(wanted)
        count, me = len(shape), self._engine.rank
        needed = rows[:, 1 + BOX_DIMS :].all(axis=1)  # without the parts that are empty
        if self._engine.has_peers:
            needed &= rows[:, 0] == me
        if not needed.any():
            return Shard(shape, (0,) * count, (0,) * count)
        rows = rows[needed, 1:]
        first, sizes = rows[:, :count], rows[:, BOX_DIMS : BOX_DIMS + count]
        offsets, ends = first.min(axis=0), (first + sizes).max(axis=0)
        return Shard(shape, tuple(offsets.tolist()), tuple((ends - offsets).tolist()))

    def metrics(self) -> dict[str, Any]:
        """Returns counters since creation, sizes in bytes, times in seconds, and:

        device, isa, family  the device and the kernels in use
        kv_usage             share of KV pages in use, in [0, 1]
        nccl, cublas         version and path of the library in use, or None
        invariant            False with fast=True: logprobs may depend on the batch
        asleep, paused       parts that are asleep; whether the generator is paused
        """
        stats = self._loop.call(self._engine.stats)
        pages = stats["kv_pages"]
        usage = (pages - stats["kv_pages_free"]) / pages if pages else 0.0
        return {
            **stats,
            "version": self._weights.version,
            "asleep": [part for part, bit in PARTS.items() if stats["asleep"] & bit],
            "paused": self._engine.paused,
            "kv_usage": usage,
            "nccl": self._nccl,
            "cublas": self._cublas and str(self._cublas),
            "invariant": self._cublas is None,
        }

    def profile(self) -> list[OpTime]:
        """With profile=True, returns the time of each op since the last call, by op and shape of
        the weights, on rank 0 of this process. Each entry has seconds, calls and rows; matrix
        products and attention also have FLOPs and the bytes of weights to read. metrics() has the
        times of whole steps."""
        times: list[OpTime] = self._loop.call(self._engine.profile)
        return times

    # ------------------------------------------------------------------------------------- weights
    @by_every_rank
    def sync_weights(
        self,
        source: Any,
        version: int | None = None,
        cast: bool = False,
        strict: bool = True,
        mode: Literal["staged", "inplace"] = "staged",
        inflight: Literal["wait", "restart", "abort", "keep"] = "wait",
        keep_kv: bool = False,
        allow_nonfinite: bool = False,
        allow_bias_removal: bool = False,
        timeout: float | None = None,
    ) -> SyncReport:
        """Replaces all weights by a new version, atomically: after any error the old version keeps
        serving (but see mode).

        source              a state dict, an iterator of (name, tensor), or one of rollmesh.sources.
                            Tensors may be torch's, NumPy's or of any DLPack producer, and on any
                            GPU of this process if the generator uses GPUs. If ranks are processes,
                            pass None on ranks without weights, and equal weights on all others;
                            DTensors (FSDP2, any mesh) and rm.Piece are sent to the ranks that need
                            them, without gathering. In one process a DTensor is gathered
        version             must exceed the last committed version; None: the next number
        cast                convert other float dtypes as torch's .to() does; False: raise
                            DTypeError for them
        strict              False: skip unknown names, keep the values of missing parameters
        mode                "staged": copy, then swap; "inplace": without a second copy, but a
                            failure during the copy leaves the generator without weights
        inflight            running requests: "wait" finishes them first, "restart" runs them again
                            from the prompt, "abort" ends them, "keep" keeps their tokens and
                            recomputes their KV. mode="inplace" requires "wait"
        keep_kv             with "keep": do not recompute KV; tokens computed from old KV have no
                            contract
        allow_nonfinite     accept NaN and infinities
        allow_bias_removal  accept that a router bias of the serving version is missing (it becomes
                            zero)
        timeout             seconds until DeadlineError, including the wait for other calls; None:
                            no limit

        Returns a SyncReport; its `bytes` counts the bytes that this process has read.

        Raises MissingKeyError, UnexpectedKeyError, DuplicateKeyError, TiedWeightError, ShapeError,
        DTypeError, LayoutError, UnsupportedTensorError, NonFiniteError, LimitError, VersionError,
        CapacityError, IncompleteSyncError, StateError, DeadlineError. For a mapping the message
        lists all errors of one class and counts those of the other classes. Exceptions of the
        source pass through. If ranks are processes and one rank fails, the others raise
        SyncAbortedError with its reason; if they were given different weights, all raise
        MeshMismatchError. RankLostError, CollectiveMismatchError and CollectiveTimeoutError end the
        mesh, except a CollectiveMismatchError whose message names two calls.
        """
        options = SyncOptions(
            version, cast, strict, mode, inflight, keep_kv, allow_nonfinite, allow_bias_removal
        )
        # If ranks are processes, another process may have the source.
        if source is not None or not self._engine.has_peers:
            check_source(source)
        deadline = deadline_of(timeout)
        loan = self._loop.loan(deadline)
        loan.function = partial(
            self._weights.sync, options, source=source, deadline=deadline, let_step=loan.let_step
        )
        try:
            report: SyncReport = replace(self._loop.run(loan), pause_s=loan.pause_s)
        except UnexpectedKeyError as error:
            if any(part in str(error) for part in PEFT):
                error.add_note(
                    "these are adapters of PEFT: merge them first (model.merge_and_unload(), "
                    "then its state dict)"
                )
            raise
        _log.info(
            "sync: version %d serves, %.3f GB in %.3f s, digest %s",
            report.version,
            report.bytes / 1e9,
            report.seconds,
            report.digest,
        )
        return report

    def begin_sync(self, version: int | None = None, **options: Any) -> Sync:
        """Opens a sync whose tensors are pushed one by one, in any order; see Sync. The options are
        those of sync_weights, except timeout. Drops a sync that is already open.

        If ranks are processes, each rank pushes the whole set, and the ranks synchronize at every
        push. Raises StateError while other ranks are in follow()."""

        given = {"version": version, **options}
        make_call(self, "begin_sync", lambda: given, lambda: SyncOptions(**given))
        sync = Sync(self._weights, self._loop.lend, SyncOptions(**given))
        try:
            self._loop.lend(lambda: self._weights.begin(sync))
            return sync
        except BaseException as error:
            if self._weights.is_open(sync):
                self._loop.lend(partial(self._weights.abort, sync, error))
            raise

    def self_test(
        self,
        scorer: Scorer,
        prompts: Sequence[Prompt] | None = None,
        threshold: float | None = None,
        max_tokens: int = 32,
        seed: int = 0,
    ) -> SelfTestReport:
        """Generates tokens and compares their logprobs with the trainer's.

        scorer     a function from a list of int32 arrays to a list of logprobs [len − 1], or a
                   transformers model
        prompts    token ids or texts; None: eight random prompts
        threshold  largest allowed |Δ logprob|; None: 1e-3 in float32, 0.1 in bfloat16

        Raises NumericsError, with the largest difference and its place, if the difference exceeds
        the threshold.
        """
        return run_self_test(self, scorer, prompts, threshold, max_tokens, seed)

    # --------------------------------------------------------------------------- several processes
    def follow(self, source: Callable[[int | None], Any] | None = None) -> None:
        """Makes every call of rank 0 on this rank, if ranks are processes, until rank 0 closes its
        generator; then closes this generator. On rank 0 it waits for the other ranks and returns.
        In one process it does nothing.

        source  this rank's source in a sync of rank 0: a function of sync_weights' `version` that
                returns the `source`. None: this rank has no weights. Rank 0 passes its own source
                to sync_weights

        Rank 0 may then use agenerate and astream, and make calls from several threads, but not
        begin_sync. All replicas step together. astream yields partial outputs of replica 0 only;
        requests of other replicas yield only their final output.

        Raises CollectiveMismatchError (ranks above 0 are in different calls), StateError (another
        thread of this rank is in follow), RankLostError (a rank has ended, or rank 0 has ended
        without close), and other errors that end the mesh. Any other error of a call is raised on
        rank 0 only, and this method continues.
        """
        if source is not None and not callable(source):
            raise ConfigError(f"source: expected a function of the version, got {shown(source)}")
        engine = self._engine
        if not isinstance(engine, LedEngine):
            self._loop.check_alive()
        elif engine.rank > 0:
            engine.apply_calls(FOLLOW, self._operations(source), self._loop.lend)
            self.close()
        elif not engine.is_followed:
            engine.lead_call(FOLLOW, lambda: None, self._loop.call)

    def _operations(self, source: Callable[[int | None], Any] | None) -> Operations:
        """Returns a function that finds an operation of rank 0 by its name. source: see follow."""
        parts = (self._requests, self._weights, self._engine)

        def sync(options: SyncOptions) -> SyncReport:
            own = None if source is None else source_of_follower(source, options.version)
            return self._weights.sync(options, source=own)

        def operation(name: str) -> Callable[..., Any]:
            owner = next(part for part in parts if hasattr(part, name))
            return sync if name == "sync" else getattr(owner, name)

        return operation

    # ------------------------------------------------------------------------- pause, sleep, close
    @by_every_rank
    def pause(self, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
        """Stops scheduling. mode: "abort" ends running requests, "wait" finishes them first, "keep"
        stops them until resume().

        While paused, submit() still queues; generate, score and logits raise StateError."""
        choice("pause mode", mode, ("abort", "wait", "keep"))

        def pause() -> None:
            if mode == "abort":
                self._requests.abort(self._engine.ids())
            while mode == "wait" and not self._engine.paused and self._engine.unfinished():
                call.check_wanted()
                if self._requests.step() == 0 and (left := self._engine.unfinished()):
                    raise StateError(f"{left} requests cannot finish while a part is asleep")
            self._engine.pause(True)

        call = Call(pause)
        self._loop.run(call)

    @by_every_rank
    def resume(self) -> None:
        """Ends pause()."""
        self._loop.call(partial(self._engine.pause, False))

    @by_every_rank
    def sleep(
        self,
        parts: str | Sequence[str] = ("weights", "kv"),
        keep_weights: bool = False,
        *,
        level: int | None = None,
    ) -> None:
        """Frees the memory of "weights", "kv" or both. After wake(), weights that were not kept
        need a sync, and running requests recompute their KV.

        keep_weights: copies the weights to host memory, so that the same version serves after
        wake() without a sync. On the CPU the weights stay in place and their memory is not freed. A
        later sleep("weights") without keep_weights frees them. Raises CapacityError or MemoryError
        if the host has too little memory; all ranks then stay awake.

        level: vLLM's argument. 1 is sleep(keep_weights=True), 2 is sleep().
        """
        mask = part_mask(parts)
        if level is not None:
            if (
                type(level) is not int
                or level not in (1, 2)
                or mask != part_mask(PARTS)
                or keep_weights
            ):
                raise ConfigError(
                    "level: expected 1 or 2 in place of parts and keep_weights, got "
                    f"{shown(level)}, {shown(parts)}"
                )
            keep_weights = level == 1
        keep = boolean("keep_weights", keep_weights)
        if keep and not mask & PARTS["weights"]:
            raise ConfigError(
                f"parts: expected 'weights' among them with keep_weights=True, got {shown(parts)}"
            )

        self._loop.call(lambda: self._weights.sleep(mask, keep))
        _log.info("sleep: %s%s", part_names(mask), ", weights kept" if keep else "")

    @by_every_rank
    def wake(self, parts: str | Sequence[str] = ("weights", "kv")) -> None:
        """Allocates the memory again. Weights that were not kept need a sync. Raises CapacityError
        if a GPU has too little memory; all parts then stay asleep, kept weights stay kept, and a
        later call may succeed."""
        mask = part_mask(parts)
        self._loop.call(lambda: self._weights.wake(mask))
        _log.info("wake: %s", part_names(mask))

    def wake_up(self, tags: str | Sequence[str] | None = None) -> None:
        """Calls wake(), under vLLM's name. tags: "weights", "kv_cache" or both; None: both."""
        self.wake(tuple(PARTS) if tags is None else tags)

    @by_every_rank
    def reset_prefix_cache(self) -> None:
        """Removes all prefixes from the prefix cache."""
        self._loop.call(self._engine.reset_prefix_cache)

    def close(self) -> None:
        """Frees memory and threads, and drops unfinished requests. Every later call except close()
        raises StateError."""

        if isinstance(self._engine, LedEngine):
            self._engine.check_not_following()

        def release() -> None:
            self._engine.close()
            self._weights.forget()

        self._loop.close(release)

    def __enter__(self) -> Generator:
        self._loop.check_alive()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


Generator.__doc__ = (Generator.__doc__ or "").replace("    {options}", documentation())
